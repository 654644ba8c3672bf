//! A small HTTP client for the admin endpoints of our own processes: one request per connection,
//! bounded in time and size.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use thiserror::Error;
use tokio::net::TcpStream;

/// Longest time for one exchange: a reconcile waits for it.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest answer, in bytes.
const ANSWER_MAX: usize = 4 << 20;

/// An exchange that failed.
#[derive(Debug, Error)]
pub enum HttpError {
    /// No connection.
    #[error("connect to {0}")]
    Connect(String, #[source] std::io::Error),
    /// The exchange broke off.
    #[error("exchange with {0}")]
    Exchange(String, #[source] hyper::Error),
    /// The answer is longer than is allowed, or broke off.
    #[error("read the answer of {0}: {1}")]
    Body(String, String),
    /// The answer took too long.
    #[error("{0} did not answer in time")]
    Timeout(String),
    /// The request could not be built.
    #[error("build a request to {0}")]
    Request(String, #[source] hyper::http::Error),
}

/// Sends `body` (JSON, or nothing) to `http://host/path` and returns status and JSON of the answer.
pub async fn exchange(
    method: Method,
    host: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<(StatusCode, Value), HttpError> {
    tokio::time::timeout(TIMEOUT, send(method, host, path, body))
        .await
        .map_err(|_| HttpError::Timeout(host.to_owned()))?
}

async fn send(
    method: Method,
    host: &str,
    path: &str,
    body: Option<&Value>,
) -> Result<(StatusCode, Value), HttpError> {
    let stream = TcpStream::connect(host)
        .await
        .map_err(|error| HttpError::Connect(host.to_owned(), error))?;
    let broken = |error| HttpError::Exchange(host.to_owned(), error);
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    // Ends with the exchange: the sender is dropped below.
    let driver = tokio::spawn(connection);
    let payload = body.map(ToString::to_string).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, host)
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(payload)))
        .map_err(|error| HttpError::Request(host.to_owned(), error))?;
    let response = sender.send_request(request).await.map_err(broken)?;
    let status = response.status();
    let bytes = Limited::new(response.into_body(), ANSWER_MAX)
        .collect()
        .await
        .map_err(|error| HttpError::Body(host.to_owned(), error.to_string()))?
        .to_bytes();
    driver.abort();
    let value = serde_json::from_slice(&bytes)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).trim().to_owned()));
    Ok((status, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn an_answer_is_read_with_its_status() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = vec![0; 1024];
            let read = stream.read(&mut buffer).await.unwrap();
            stream
                .write_all(b"HTTP/1.1 409 Conflict\r\ncontent-length: 13\r\n\r\n{\"reason\":\"x\"")
                .await
                .unwrap();
            stream.write_all(b"}").await.ok();
            String::from_utf8_lossy(&buffer[..read]).into_owned()
        });
        let body = serde_json::json!({"a": 1});
        let (status, answer) =
            exchange(Method::PUT, &host, "/v1/table", Some(&body)).await.unwrap();
        assert_eq!(status, StatusCode::CONFLICT);
        assert_eq!(answer, Value::String("{\"reason\":\"x\"".to_owned()));
        let request = server.await.unwrap();
        assert!(request.starts_with("PUT /v1/table HTTP/1.1"), "{request}");
    }

    #[tokio::test]
    async fn a_closed_port_is_an_error_and_not_a_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        drop(listener);
        let error = exchange(Method::GET, &host, "/", None).await.unwrap_err();
        assert!(matches!(error, HttpError::Connect(..)), "{error}");
    }
}
