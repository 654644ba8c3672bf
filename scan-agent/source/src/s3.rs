//! Objects under an S3 prefix, through `object_store`.
//!
//! Every GET carries If-Match with the ETag seen at listing, and its answer must have that ETag:
//! bytes of a replaced object are never returned, the answer is [`Reason::DatasetChanged`].
//! Requests are retried here, a bounded number of times in a bounded time, and only where the
//! server or the network is at fault. Answers are not trusted: not their length, not their range.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsCredential};
use object_store::client::{CredentialProvider, HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{
    BackoffConfig, Certificate, ClientOptions, Error, GetOptions, GetRange, GetResult, ObjectMeta,
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
/// The next object of a list, and the bytes of a read at [`SLOWEST`] or faster, are there within
/// this, or an endpoint that never stops answering could hold a reader for ever.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes a second that a read gets extra time for.
const SLOWEST: u64 = 64 << 10;
/// Most characters of an endpoint's own words in a message.
const MAX_QUOTED: usize = 200;
/// A pooled connection older than this is not reused: servers close idle ones.
const POOL_IDLE: Duration = Duration::from_secs(20);

/// Objects of a bucket under a prefix, or a single object.
#[derive(Debug)]
pub struct S3Source {
    store: AmazonS3,
    keys: Arc<Keys>,
    uri: String,
    prefix: Path,
    patience: Duration,
    /// Whether the prefix turned out to be an object's key, the last time that it was listed.
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
            prefix: path(prefix)?,
            patience: PATIENCE,
            is_single: AtomicBool::new(false),
        })
    }

    /// Below a prefix a key's path is what follows it; a single object is its own name.
    fn object(&self, meta: ObjectMeta) -> Result<Object, Failure> {
        let key = meta.location.as_ref();
        let bad =
            |why| Failure::new(Reason::StoreUnavailable, format!("{key} of {} {why}", self.uri));
        let below = match key.strip_prefix(self.prefix.as_ref()) {
            Some("") => key.rsplit('/').next().unwrap_or(key),
            Some(rest) => rest.trim_start_matches('/'),
            None => return Err(bad("was listed but not asked for")),
        };
        if !is_plain_path(below) {
            return Err(bad("is not a path below the prefix"));
        }
        let identity = meta.e_tag.ok_or_else(|| bad("was listed without an ETag"))?;
        Ok(Object {
            path: below.to_owned(),
            size: meta.size,
            identity,
            modified_ms: u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0),
        })
    }

    fn key(&self, object: &Object) -> Result<Path, Failure> {
        if self.is_single.load(Ordering::Relaxed) {
            Ok(self.prefix.clone())
        } else if self.prefix.is_root() {
            path(&object.path)
        } else {
            path(&format!("{}/{}", self.prefix, object.path))
        }
    }

    async fn list_below(&self) -> Result<Vec<Object>, Failure> {
        let prefix = Some(&self.prefix).filter(|prefix| !prefix.is_root());
        let mut stream = self.store.list(prefix);
        let mut objects = Vec::new();
        loop {
            let next =
                async { stream.try_next().await.map_err(|e| failure("list", &self.uri, &e)) };
            let Some(meta) = within(self.patience, "list", &self.uri, next).await? else { break };
            if objects.len() == MAX_OBJECTS {
                return Err(Failure::new(
                    Reason::StoreUnavailable,
                    format!("{} has more than {MAX_OBJECTS} objects", self.uri),
                ));
            }
            // The marker of the prefix itself, as consoles make for an empty folder.
            if Some(&meta.location) != prefix {
                objects.push(self.object(meta)?);
            }
        }
        objects.sort_by(|a, b| a.path.cmp(&b.path));
        drop_folders(&mut objects);
        Ok(objects)
    }

    async fn fetch(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        let wanted = range.end - range.start;
        let options = GetOptions {
            if_match: Some(object.identity.clone()),
            range: Some(GetRange::Bounded(range)),
            ..GetOptions::default()
        };
        let name = format!("{} of {}", object.path, self.uri);
        let wrap = |error| match failure("get", &name, &error) {
            Failure { reason: Reason::ObjectNotFound, .. } => {
                Failure::new(Reason::DatasetChanged, format!("{name} is gone since it was listed"))
            }
            other => other,
        };
        let answer = self.store.get_opts(&self.key(object)?, options).await.map_err(wrap)?;
        match answer.meta.e_tag.as_deref() {
            Some(tag) if is_same_tag(tag, &object.identity) => {}
            Some(_) => {
                let message = format!("{name} is not the object that was listed");
                return Err(Failure::new(Reason::DatasetChanged, message));
            }
            None => {
                let message = format!("get {name}: the answer has no ETag");
                return Err(Failure::new(Reason::StoreUnavailable, message));
            }
        }
        body(answer, wanted, &name).await
    }
}

#[async_trait::async_trait]
impl Source for S3Source {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        let objects = self.list_below().await?;
        if !objects.is_empty() {
            self.is_single.store(false, Ordering::Relaxed);
            return Ok(objects);
        }
        let nothing = || Failure::new(Reason::ObjectNotFound, format!("nothing at {}", self.uri));
        if self.prefix.is_root() {
            return Err(nothing());
        }
        match self.store.head(&self.prefix).await {
            Ok(meta) => {
                self.is_single.store(true, Ordering::Relaxed);
                Ok(vec![self.object(meta)?])
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
        let patience = self.patience + Duration::from_secs((range.end - range.start) / SLOWEST);
        within(patience, "get", &object.path, self.fetch(object, range)).await
    }

    fn set_credentials(&self, credentials: Credentials) {
        self.keys.replace(credentials);
    }

    fn describe(&self) -> String {
        self.uri.clone()
    }
}

/// A key as it is. `Path::from` would write `%`, `~`, `#` and others in another way, which is another key.
fn path(key: &str) -> Result<Path, Failure> {
    Path::parse(key)
        .map_err(|error| Failure::new(Reason::StoreUnavailable, format!("S3 key: {error}")))
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

/// Exactly `wanted` bytes; a server that does not stop is not listened to.
async fn body(answer: GetResult, wanted: u64, name: &str) -> Result<Bytes, Failure> {
    let bad = |got: String| {
        let message = format!("get {name}: the answer has {got} bytes instead of {wanted}");
        Failure::new(Reason::StoreUnavailable, message)
    };
    let mut stream = answer.into_stream();
    let mut whole = BytesMut::with_capacity(usize::try_from(wanted).unwrap_or_default());
    while let Some(part) = stream.try_next().await.map_err(|e| failure("get", name, &e))? {
        if (whole.len() + part.len()) as u64 > wanted {
            return Err(bad(format!("more than {wanted}")));
        }
        whole.extend_from_slice(&part);
    }
    if (whole.len() as u64) < wanted {
        return Err(bad(whole.len().to_string()));
    }
    Ok(whole.freeze())
}

/// What `work` says, or that it took too long.
async fn within<T>(
    patience: Duration,
    verb: &str,
    name: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::time::timeout(patience, work).await.unwrap_or_else(|_| {
        let message = format!("{verb} {name}: not done after {patience:?}");
        Err(Failure::new(Reason::StoreUnavailable, message))
    })
}

/// Whether two ETags name the same bytes: some lists and proxies drop quotes or add the weak mark.
fn is_same_tag(a: &str, b: &str) -> bool {
    let bare = |tag: &str| tag.strip_prefix("W/").unwrap_or(tag).trim_matches('"').to_owned();
    bare(a) == bare(b)
}

/// Takes out the empty objects that stand for folders: those below which there are others. The
/// client library has cut the slash off that their keys end with. Sorted before and after.
fn drop_folders(objects: &mut Vec<Object>) {
    let is_folder = |object: &Object| {
        if object.size > 0 {
            return false;
        }
        let below = format!("{}/", object.path);
        let at = objects.partition_point(|other| other.path < below);
        objects.get(at).is_some_and(|next| next.path.starts_with(&below))
    };
    let mut folders: VecDeque<bool> = objects.iter().map(is_folder).collect();
    objects.retain(|_| folders.pop_front() == Some(false));
}

fn failure(verb: &str, name: &str, error: &Error) -> Failure {
    let chain = chain_of(error);
    let reason = reason_of(error, &chain);
    Failure::new(reason, format!("{verb} {name}: {}", detail(&chain)))
}

/// The endpoint's own words where there are some, cut short: they can be a whole web page.
fn detail(chain: &Chain) -> String {
    let deepest = chain.texts.last().map_or("", String::as_str);
    let said = match (&chain.code, chain.status) {
        _ if chain.is_redirect() => {
            "the endpoint redirects: the bucket is in another region or at another endpoint".into()
        }
        (Some(code), _) => match chain.message.as_deref() {
            Some(message) => format!("{code}: {message}"),
            None => code.clone(),
        },
        (None, Some(status)) => format!("HTTP status {status}"),
        (None, None) => deepest.to_owned(),
    };
    let line = said.lines().next().unwrap_or_default();
    line.chars().take(MAX_QUOTED).collect()
}

/// What the layers of an error say, gathered once.
#[derive(Debug, Default)]
struct Chain {
    status: Option<u16>,
    code: Option<String>,
    message: Option<String>,
    kind: Option<HttpErrorKind>,
    texts: Vec<String>,
}

impl Chain {
    fn says(&self, words: &str) -> bool {
        self.texts.iter().any(|text| text.contains(words))
    }

    /// With a place to go to the client library goes there, but not without one, nor for ever.
    fn is_redirect(&self) -> bool {
        match self.status {
            Some(status) => (300..400).contains(&status),
            None => ["redirect without LOCATION", "error following redirect"]
                .into_iter()
                .any(|words| self.says(words)),
        }
    }
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
        chain.code = chain.code.or_else(|| element("Code", &text));
        chain.message = chain.message.or_else(|| element("Message", &text));
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

/// The text of an element of an S3 error document, with the entities that servers use in one.
fn element(name: &str, body: &str) -> Option<String> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    let entities =
        [("lt", "<"), ("gt", ">"), ("quot", "\""), ("#34", "\""), ("apos", "'"), ("#39", "'")];
    let plain = entities.iter().fold(text.trim().to_owned(), |text, (name, character)| {
        text.replace(&format!("&{name};"), character)
    });
    Some(plain.replace("&amp;", "&"))
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
            | "RequestExpired"
            | "RequestTimeTooSkewed"
            | "AuthorizationHeaderMalformed"
            | "InvalidSecurity"
            | "XAdminUserNotFound",
        ) => return Reason::InvalidCredentials,
        Some("AccessDenied" | "AllAccessDisabled") => return Reason::AccessDenied,
        Some("PreconditionFailed") => return Reason::DatasetChanged,
        _ => {}
    }
    if chain.is_redirect() {
        return Reason::BucketNotFound;
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
    let is_tls = ["certificate", "tls handshake", "HandshakeFailure", "InvalidMessage", "CaUsed"]
        .into_iter()
        .any(|word| chain.says(word));
    match chain.kind {
        _ if is_tls => Reason::TlsFailed,
        Some(HttpErrorKind::Connect | HttpErrorKind::Timeout) => Reason::EndpointUnreachable,
        _ => Reason::StoreUnavailable,
    }
}

#[cfg(test)]
mod tests;
