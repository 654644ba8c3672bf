//! The HTTPS server of the webhook. Every replica serves; the certificate is read anew from the
//! Secret without a restart.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crds::Dataset;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use kube::{Api, Client};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use super::ask::{self, Denial};
use super::certs::Stored;
use super::inject;
use crate::metrics::{AdmissionLabels, Metrics};
use crate::plan::Images;

/// Connections at the same time: the API server keeps a few.
const CONNECTIONS_MAX: usize = 256;
/// Longest request, in bytes: a pod is at most 1.5 MiB in etcd.
const BODY_MAX: usize = 8 << 20;
/// Longest handshake, and longest wait for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long connections may go on after the process was asked to stop: until then the API server
/// has learnt that this replica is gone.
const DRAIN: Duration = Duration::from_secs(4);

/// A serving certificate that cannot be used.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The PEM does not parse.
    #[error("read the serving certificate")]
    Pem(#[from] rustls::pki_types::pem::Error),
    /// The key does not fit.
    #[error("use the serving certificate")]
    Tls(#[from] rustls::Error),
}

/// The certificate and key in the form that TLS wants them.
pub fn certified_key(stored: &Stored) -> Result<CertifiedKey, KeyError> {
    let chain = CertificateDer::pem_slice_iter(stored.leaf.as_bytes()).collect::<Result<_, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(stored.leaf_key.as_bytes())?;
    Ok(CertifiedKey::new(chain, rustls::crypto::ring::sign::any_supported_type(&key)?))
}

/// The certificate that is served now; none until the Secret was read.
#[derive(Debug, Default)]
pub struct Current {
    key: RwLock<Option<Arc<CertifiedKey>>>,
}

impl Current {
    /// Serves this certificate from now on.
    pub fn set(&self, key: CertifiedKey) {
        *self.key.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(key));
    }

    /// Whether there is a certificate to serve.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.key.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.key.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What an admission needs.
#[derive(Clone)]
pub struct Webhook {
    /// The API server, for Datasets.
    pub client: Client,
    /// Images of the sidecars.
    pub images: Images,
    /// Counters.
    pub metrics: Metrics,
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhook").field("images", &self.images).finish_non_exhaustive()
    }
}

/// Serves until `stop`, and then a little longer.
pub async fn serve(
    listener: TcpListener,
    webhook: Arc<Webhook>,
    current: Arc<Current>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(current);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let end = async move {
        rpc::shutdown::stopped(&mut stop).await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::pin!(end);
    loop {
        let stream = tokio::select! {
            () = &mut end => return Ok(()),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "accept a webhook connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else { continue };
        let (acceptor, webhook) = (acceptor.clone(), Arc::clone(&webhook));
        tokio::spawn(async move {
            connection(stream, acceptor, webhook).await;
            drop(slot);
        });
    }
}

async fn connection(stream: TcpStream, acceptor: TlsAcceptor, webhook: Arc<Webhook>) {
    let stream = match tokio::time::timeout(HEAD_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "webhook handshake"),
        Err(_) => return,
    };
    let service = service_fn(move |request| {
        let webhook = Arc::clone(&webhook);
        async move { Ok::<_, std::convert::Infallible>(webhook.answer(request).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(120))
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "webhook connection");
    }
}

impl Webhook {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let plain = |status: StatusCode, text: &'static str| {
            let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
            *response.status_mut() = status;
            response
        };
        if request.method() != Method::POST || request.uri().path() != "/inject" {
            return plain(StatusCode::NOT_FOUND, "no such path\n");
        }
        let Ok(body) = Limited::new(request.into_body(), BODY_MAX).collect().await else {
            return plain(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long or ended early\n");
        };
        let Ok(review) = serde_json::from_slice::<Value>(&body.to_bytes()) else {
            return plain(StatusCode::BAD_REQUEST, "the body is not an AdmissionReview\n");
        };
        let review = self.review(&review).await;
        let mut response = Response::new(Full::new(Bytes::from(review.to_string())));
        let kind = hyper::header::HeaderValue::from_static("application/json");
        response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
        response
    }

    async fn review(&self, review: &Value) -> Value {
        let start = Instant::now();
        let outcome = self.decide(&review["request"]).await;
        let decision = match &outcome {
            Ok(patch) if patch.is_empty() => "unchanged",
            Ok(_) => "injected",
            Err(_) => "denied",
        };
        self.metrics.admissions.get_or_create(&AdmissionLabels { decision }).inc();
        self.metrics.admission_seconds.observe(start.elapsed().as_secs_f64());
        response(&review["request"]["uid"], outcome)
    }

    async fn decide(&self, request: &Value) -> Result<Vec<Value>, Refusal> {
        let pod = &request["object"];
        if !pod["spec"].is_object() {
            return Err(Denial::NoPod.into());
        }
        let namespace = request["namespace"].as_str().unwrap_or_default();
        let ask = ask::read(pod, namespace)?;
        let found = ask.mentions.iter().map(|mention| async {
            let datasets: Api<Dataset> = Api::namespaced(self.client.clone(), &mention.namespace);
            datasets.get_opt(&mention.name).await
        });
        let datasets: Vec<Option<Dataset>> = futures::future::try_join_all(found)
            .await
            .map_err(|error| Refusal::Lookup(Box::new(error)))?;
        Ok(inject::patch(pod, namespace, &ask, &datasets, &self.images)?)
    }
}

#[derive(Debug, Error)]
enum Refusal {
    #[error(transparent)]
    Denial(#[from] Denial),
    #[error("lampyris could not look up the datasets, try again: {0}")]
    Lookup(Box<kube::Error>),
}

fn response(uid: &Value, outcome: Result<Vec<Value>, Refusal>) -> Value {
    let mut answer = json!({"uid": uid, "allowed": outcome.is_ok()});
    match outcome {
        Ok(patch) if patch.is_empty() => {}
        Ok(patch) => {
            use base64::Engine;
            let text = Value::Array(patch).to_string();
            answer["patchType"] = json!("JSONPatch");
            answer["patch"] = json!(base64::engine::general_purpose::STANDARD.encode(text));
        }
        Err(refusal) => {
            let code = if matches!(refusal, Refusal::Lookup(_)) { 503 } else { 422 };
            answer["status"] = json!({"code": code, "message": refusal.to_string()});
        }
    }
    json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer})
}
