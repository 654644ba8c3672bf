//! The admin endpoint of every process: `/healthz`, `/readyz`, `/metrics`, `/state`, and what a
//! process adds, over TCP or a unix socket.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

use crate::shutdown::stopped;

/// Most bytes of a request's body.
const BODY_MAX: usize = 16 << 20;

/// The answer of a process's own route.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: StatusCode,
    /// A JSON document.
    pub body: serde_json::Value,
}

type Future2<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type ForOthers = dyn Fn() -> Future2<String> + Send + Sync;
type Routes = dyn Fn(Method, String, Bytes) -> Future2<Option<Answer>> + Send + Sync;

/// What the endpoint shows of its process.
pub struct Admin {
    registry: Mutex<Registry>,
    ready: Box<dyn Fn() -> Result<(), String> + Send + Sync>,
    state: Box<dyn Fn() -> serde_json::Value + Send + Sync>,
    routes: Option<Box<Routes>>,
    more_metrics: Option<Box<ForOthers>>,
    document: Option<(&'static str, Box<ForOthers>)>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

impl Admin {
    /// `ready` says what the process still waits for; `state` describes it for a human.
    pub fn new(
        registry: Registry,
        ready: impl Fn() -> Result<(), String> + Send + Sync + 'static,
        state: impl Fn() -> serde_json::Value + Send + Sync + 'static,
    ) -> Self {
        let registry = Mutex::new(registry);
        Self {
            registry,
            ready: Box::new(ready),
            state: Box::new(state),
            routes: None,
            more_metrics: None,
            document: None,
        }
    }

    /// Adds the process's own routes: given method, path and body, `None` if there is no such
    /// route.
    #[must_use]
    pub fn with_routes<F, T>(mut self, routes: F) -> Self
    where
        F: Fn(Method, String, Bytes) -> T + Send + Sync + 'static,
        T: Future<Output = Option<Answer>> + Send + 'static,
    {
        self.routes = Some(Box::new(move |m, p, b| Box::pin(routes(m, p, b))));
        self
    }

    /// Adds metrics that the process passes on for others: whole families of the text format.
    #[must_use]
    pub fn with_more_metrics<F, T>(mut self, more: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = String> + Send + 'static,
    {
        self.more_metrics = Some(Box::new(move || Box::pin(more())));
        self
    }

    /// Adds a JSON document at `path` that the process passes on for others: as text, which needs much less room than
    /// the values in it.
    #[must_use]
    pub fn with_document<F, T>(mut self, path: &'static str, document: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = String> + Send + 'static,
    {
        self.document = Some((path, Box::new(move || Box::pin(document()))));
        self
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (parts, body) = request.into_parts();
        match (&parts.method, parts.uri.path()) {
            (&Method::GET, "/healthz") => text(StatusCode::OK, "ok\n"),
            (&Method::GET, "/readyz") => match (self.ready)() {
                Ok(()) => text(StatusCode::OK, "ok\n"),
                Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            },
            (&Method::GET, "/metrics") => {
                let more = match &self.more_metrics {
                    Some(more) => more().await,
                    None => String::new(),
                };
                self.metrics(&more)
            }
            (&Method::GET, "/state") => json(StatusCode::OK, &(self.state)()),
            (method, path) => self.route(method.clone(), path.to_owned(), body).await,
        }
    }

    async fn route(&self, method: Method, path: String, body: Incoming) -> Response<Full<Bytes>> {
        if let Some((at, document)) = &self.document
            && (&method, path.as_str()) == (&Method::GET, *at)
        {
            return with_type(StatusCode::OK, "application/json", document().await.into());
        }
        let Some(routes) = &self.routes else {
            return text(StatusCode::NOT_FOUND, "no such path\n");
        };
        let Ok(body) = Limited::new(body, BODY_MAX).collect().await else {
            return text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long or ended early\n");
        };
        match routes(method, path, body.to_bytes()).await {
            Some(answer) => json(answer.status, &answer.body),
            None => text(StatusCode::NOT_FOUND, "no such path\n"),
        }
    }

    fn metrics(&self, more: &str) -> Response<Full<Bytes>> {
        use prometheus_client::encoding::text;
        let mut out = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        match text::encode_registry(&mut out, &registry) {
            Ok(()) => {
                out.push_str(more);
                out.push_str("# EOF\n");
                let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                with_type(StatusCode::OK, kind, out.into())
            }
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    with_type(status, "text/plain; charset=utf-8", body.into())
}

fn json(status: StatusCode, body: &serde_json::Value) -> Response<Full<Bytes>> {
    with_type(status, "application/json", body.to_string().into())
}

fn with_type(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static(kind);
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
    response
}

/// Answers on a TCP port until `stop` becomes true.
pub async fn serve(listener: TcpListener, admin: Arc<Admin>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => connection(stream, Arc::clone(&admin)),
                Err(error) => pause(&error).await,
            },
        }
    }
}

/// Answers on a unix socket until `stop` becomes true. A socket left at `path` is replaced.
///
/// # Errors
/// Binding the socket.
pub async fn serve_unix(
    path: &Path,
    admin: Arc<Admin>,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return Ok(()),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => connection(stream, Arc::clone(&admin)),
                Err(error) => pause(&error).await,
            },
        }
    }
}

/// Out of descriptors: gives those in use a moment to close.
async fn pause(error: &std::io::Error) {
    tracing::warn!(%error, "accept an admin connection");
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
}

fn connection<S>(stream: S, admin: Arc<Admin>)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    tokio::spawn(async move {
        let service = service_fn(|request| {
            let admin = Arc::clone(&admin);
            async move { Ok::<_, std::convert::Infallible>(admin.answer(request).await) }
        });
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(std::time::Duration::from_secs(10));
        if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
            tracing::debug!(%error, "an admin connection ended");
        }
    });
}
