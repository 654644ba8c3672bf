//! Objects under an S3 prefix, through `object_store`.
//!
//! Every GET carries If-Match with the ETag seen at listing: bytes of a replaced object are
//! never returned, the answer is [`Reason::DatasetChanged`]. Requests are retried here and
//! nowhere above, a bounded number of times, and only where the server or the network is at fault.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsCredential};
use object_store::client::{CredentialProvider, HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{
    BackoffConfig, Certificate, ClientOptions, Error, GetOptions, GetRange, ObjectMeta,
    ObjectStore, ObjectStoreExt, RetryConfig,
};

use crate::{
    Credentials, Failure, MAX_OBJECTS, Object, Reason, S3Config, Source, check_range, is_plain_path,
};

/// A peer that does not accept within this time counts as unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A response that stalls this long is given up.
const READ_TIMEOUT: Duration = Duration::from_secs(15);
/// Four tries over at most ten seconds: a typed failure must be out within thirty.
const RETRY: RetryConfig = RetryConfig {
    backoff: BackoffConfig {
        init_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(2),
        base: 2.,
    },
    max_retries: 3,
    retry_timeout: Duration::from_secs(10),
};
/// A pooled connection older than this is not reused: servers close idle ones.
const POOL_IDLE: Duration = Duration::from_secs(20);

/// Objects of a bucket under a prefix, or a single object.
#[derive(Debug)]
pub struct S3Source {
    store: AmazonS3,
    keys: Arc<Keys>,
    uri: String,
    prefix: String,
    /// Set once the prefix turned out to be an object's key.
    is_single: AtomicBool,
}

impl S3Source {
    /// Prepares a client; makes no request.
    pub fn new(config: &S3Config) -> Result<Self, Failure> {
        crate::install_crypto_provider();
        let (bucket, prefix) = config.bucket_and_prefix()?;
        let keys = Arc::new(Keys::new(config.credentials.clone()));
        let store = AmazonS3Builder::new()
            .with_bucket_name(bucket)
            .with_endpoint(endpoint(config, bucket))
            .with_region(&config.region)
            .with_virtual_hosted_style_request(!config.path_style)
            .with_allow_http(true)
            .with_skip_signature(config.credentials.is_none())
            .with_credentials(Arc::clone(&keys) as _)
            .with_client_options(client_options(config)?)
            .with_retry(RETRY)
            .build()
            .map_err(|e| failure("prepare client for", &config.uri, &e))?;
        Ok(Self {
            store,
            keys,
            uri: config.uri.clone(),
            prefix: prefix.to_owned(),
            is_single: AtomicBool::new(false),
        })
    }

    /// Below a prefix a key's path is what follows it; a single object is its own name.
    fn object(&self, meta: ObjectMeta) -> Option<Object> {
        let key = meta.location.as_ref();
        let below = match key.strip_prefix(self.prefix.as_str()) {
            Some("") => key.rsplit('/').next().unwrap_or(key),
            Some(rest) => rest.trim_start_matches('/'),
            None => return None,
        };
        let identity = meta.e_tag?;
        is_plain_path(below).then(|| Object {
            path: below.to_owned(),
            size: meta.size,
            identity,
            modified_ms: u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0),
        })
    }

    fn key(&self, object: &Object) -> Path {
        let prefix = self.prefix.as_str();
        if self.is_single.load(Ordering::Relaxed) {
            Path::from(prefix)
        } else if prefix.is_empty() {
            Path::from(object.path.as_str())
        } else {
            Path::from(format!("{prefix}/{}", object.path))
        }
    }

    async fn list_below(&self) -> Result<Vec<Object>, Failure> {
        let prefix = (!self.prefix.is_empty()).then(|| Path::from(self.prefix.as_str()));
        let mut stream = self.store.list(prefix.as_ref());
        let mut objects = Vec::new();
        while let Some(meta) =
            stream.try_next().await.map_err(|e| failure("list", &self.uri, &e))?
        {
            if objects.len() == MAX_OBJECTS {
                return Err(Failure::new(
                    Reason::StoreUnavailable,
                    format!("{} has more than {MAX_OBJECTS} objects", self.uri),
                ));
            }
            objects.extend(self.object(meta));
        }
        objects.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(objects)
    }
}

#[async_trait::async_trait]
impl Source for S3Source {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        let objects = self.list_below().await?;
        if !objects.is_empty() {
            return Ok(objects);
        }
        let nothing = || Failure::new(Reason::ObjectNotFound, format!("nothing at {}", self.uri));
        if self.prefix.is_empty() {
            return Err(nothing());
        }
        match self.store.head(&Path::from(self.prefix.as_str())).await {
            Ok(meta) => {
                self.is_single.store(true, Ordering::Relaxed);
                Ok(self.object(meta).into_iter().collect())
            }
            Err(Error::NotFound { .. }) => Err(nothing()),
            Err(error) => Err(failure("head", &self.uri, &error)),
        }
    }

    async fn read(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        check_range(object, &range)?;
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let wanted = range.end - range.start;
        let options = GetOptions {
            if_match: Some(object.identity.clone()),
            range: Some(GetRange::Bounded(range)),
            ..GetOptions::default()
        };
        let name = || format!("{} of {}", object.path, self.uri);
        let key = self.key(object);
        let answer =
            self.store.get_opts(&key, options).await.map_err(|e| failure("get", &name(), &e))?;
        let bytes = answer.bytes().await.map_err(|e| body_failure(&name(), &e))?;
        if bytes.len() as u64 != wanted {
            return Err(Failure::new(
                Reason::TruncatedFile,
                format!("got {} of {wanted} bytes of {}", bytes.len(), name()),
            ));
        }
        Ok(bytes)
    }

    fn set_credentials(&self, credentials: Credentials) {
        self.keys.replace(credentials);
    }

    fn describe(&self) -> String {
        self.uri.clone()
    }
}

/// Credentials that can be replaced while requests are running.
#[derive(Debug)]
struct Keys {
    current: RwLock<Arc<AwsCredential>>,
}

impl Keys {
    fn new(credentials: Option<Credentials>) -> Self {
        let anonymous = || Credentials {
            access_key_id: String::new(),
            secret_access_key: String::new(),
            session_token: None,
        };
        let current = to_aws(credentials.unwrap_or_else(anonymous));
        Self { current: RwLock::new(Arc::new(current)) }
    }

    fn replace(&self, credentials: Credentials) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(to_aws(credentials));
    }
}

#[async_trait::async_trait]
impl CredentialProvider for Keys {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(&current))
    }
}

fn to_aws(credentials: Credentials) -> AwsCredential {
    AwsCredential {
        key_id: credentials.access_key_id,
        secret_key: credentials.secret_access_key,
        token: credentials.session_token,
    }
}

/// With the bucket in the host name, `object_store` wants it in the endpoint too.
fn endpoint(config: &S3Config, bucket: &str) -> String {
    let endpoint = config.endpoint.trim_end_matches('/');
    match endpoint.split_once("://") {
        Some((scheme, host)) if !config.path_style => format!("{scheme}://{bucket}.{host}"),
        _ => endpoint.to_owned(),
    }
}

fn client_options(config: &S3Config) -> Result<ClientOptions, Failure> {
    let mut options = ClientOptions::new()
        .with_allow_http(true)
        .with_http1_only()
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_read_timeout(READ_TIMEOUT)
        .with_timeout_disabled()
        .with_pool_idle_timeout(POOL_IDLE);
    if let Some(pem) = &config.ca_bundle {
        let bundle = Certificate::from_pem_bundle(pem.as_bytes());
        let bad = || Failure::new(Reason::TlsFailed, "caBundle holds no PEM certificate");
        let certificates = bundle.map_err(|_| bad())?;
        if certificates.is_empty() {
            return Err(bad());
        }
        for certificate in certificates {
            options = options.with_root_certificate(certificate);
        }
    }
    Ok(options)
}

/// A body that ended early is a truncated file; everything else is what it would be at the start.
fn body_failure(name: &str, error: &Error) -> Failure {
    let first = failure("get", name, error);
    if first.reason == Reason::StoreUnavailable {
        return Failure::new(Reason::TruncatedFile, first.message);
    }
    first
}

fn failure(verb: &str, name: &str, error: &Error) -> Failure {
    let chain = chain_of(error);
    let reason = reason_of(error, &chain);
    let deepest = chain.texts.last().map_or("", String::as_str);
    let detail = chain.code.as_deref().unwrap_or(deepest);
    Failure::new(reason, format!("{verb} {name}: {detail}"))
}

/// What the layers of an error say, gathered once.
#[derive(Debug, Default)]
struct Chain {
    status: Option<u16>,
    code: Option<String>,
    kind: Option<HttpErrorKind>,
    texts: Vec<String>,
}

fn chain_of(error: &Error) -> Chain {
    let mut chain = Chain::default();
    let mut seen = BTreeSet::new();
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(layer) = next {
        if let Some(http) = layer.downcast_ref::<HttpError>() {
            chain.kind = Some(http.kind());
        }
        let text = layer.to_string();
        chain.status = chain.status.or_else(|| status_of(&text));
        chain.code = chain.code.or_else(|| code_of(&text));
        if seen.insert(text.clone()) {
            chain.texts.push(text);
        }
        next = layer.source();
    }
    chain
}

/// The HTTP status: `object_store` keeps its error type private, only its text has the number.
fn status_of(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The `<Code>` of an S3 error document.
fn code_of(body: &str) -> Option<String> {
    let (_, rest) = body.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    (code.len() <= 64).then(|| code.trim().to_owned())
}

fn reason_of(error: &Error, chain: &Chain) -> Reason {
    match chain.code.as_deref() {
        Some("NoSuchBucket") => return Reason::BucketNotFound,
        Some("NoSuchKey") => return Reason::ObjectNotFound,
        Some(
            "InvalidAccessKeyId"
            | "SignatureDoesNotMatch"
            | "InvalidToken"
            | "ExpiredToken"
            | "AuthorizationHeaderMalformed"
            | "InvalidSecurity"
            | "XAdminUserNotFound",
        ) => return Reason::InvalidCredentials,
        Some("AccessDenied" | "AllAccessDisabled") => return Reason::AccessDenied,
        Some("PreconditionFailed") => return Reason::DatasetChanged,
        _ => {}
    }
    match (error, chain.status) {
        (Error::NotFound { .. }, _) | (_, Some(404)) => Reason::ObjectNotFound,
        (Error::Precondition { .. }, _) | (_, Some(412)) => Reason::DatasetChanged,
        (Error::Unauthenticated { .. }, _) | (_, Some(401)) => Reason::InvalidCredentials,
        (Error::PermissionDenied { .. }, _) | (_, Some(403)) => Reason::AccessDenied,
        (_, Some(416)) => Reason::TruncatedFile,
        (_, Some(_)) => Reason::StoreUnavailable,
        (_, None) => transport_reason(chain),
    }
}

fn transport_reason(chain: &Chain) -> Reason {
    let says = |word: &str| chain.texts.iter().any(|text| text.contains(word));
    let is_tls = ["certificate", "tls handshake", "HandshakeFailure", "InvalidMessage", "CaUsed"]
        .into_iter()
        .any(says);
    match chain.kind {
        _ if is_tls => Reason::TlsFailed,
        Some(HttpErrorKind::Connect | HttpErrorKind::Timeout) => Reason::EndpointUnreachable,
        Some(_) => Reason::StoreUnavailable,
        None => Reason::StoreUnavailable,
    }
}

#[cfg(test)]
mod tests;
