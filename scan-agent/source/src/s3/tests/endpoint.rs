//! An S3 endpoint that answers as it is told to, for what a real server cannot be made to do.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::super::{Object, S3Config, S3Source};
use crate::SourceConfig;

/// One response, and whether the connection lives on.
#[derive(Clone)]
pub(super) enum Answer {
    Keep(String),
    Close(String),
    /// These bytes again and again, for as long as somebody reads.
    Repeat(String, &'static str),
}

/// Answers until the test's runtime is gone.
pub(super) struct Endpoint {
    port: u16,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Endpoint {
    /// `answer` gets the head of each request, and how many came before it.
    pub(super) async fn start(
        answer: impl Fn(&str, usize) -> Answer + Send + Sync + 'static,
    ) -> Self {
        crate::install_crypto_provider();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (answer, heads) = (Arc::new(answer), Arc::clone(&seen));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, heads) = (Arc::clone(&answer), Arc::clone(&heads));
                tokio::spawn(async move { converse(stream, answer.as_ref(), &heads).await });
            }
        });
        Self { port, seen }
    }

    /// Where it is.
    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The heads of all requests so far.
    pub(super) fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }

    /// A source of `s3://b/d` there.
    pub(super) fn source(&self) -> S3Source {
        let json = format!(
            r#"{{"s3":{{"uri":"s3://b/d","endpoint":"{}",
               "credentials":{{"accessKeyId":"id","secretAccessKey":"hush-hush"}}}}}}"#,
            self.url()
        );
        let SourceConfig::S3(config) = SourceConfig::parse(&json).unwrap() else {
            panic!("not s3");
        };
        let config: S3Config = config;
        S3Source::new(&config).unwrap()
    }
}

async fn converse(
    mut stream: TcpStream,
    answer: &(impl Fn(&str, usize) -> Answer + Sync),
    heads: &Mutex<Vec<String>>,
) {
    while let Some(head) = head(&mut stream).await {
        let before = {
            let mut heads = heads.lock().unwrap();
            heads.push(head.clone());
            heads.len() - 1
        };
        // Who does not listen any more is told nothing.
        let sent = match answer(&head, before) {
            Answer::Keep(text) => stream.write_all(text.as_bytes()).await.is_ok(),
            Answer::Close(text) => stream.write_all(text.as_bytes()).await.is_err(),
            Answer::Repeat(text, again) => {
                let mut is_heard = stream.write_all(text.as_bytes()).await.is_ok();
                while is_heard {
                    is_heard = stream.write_all(again.as_bytes()).await.is_ok();
                }
                false
            }
        };
        if !sent {
            return;
        }
    }
}

async fn head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    String::from_utf8(head).ok()
}

/// A response with `status`, headers as they are and a body of its right length.
pub(super) fn response(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len())
}

/// An error as S3 tells it.
pub(super) fn error(status: &str, code: &str, message: &str) -> String {
    let body = format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>");
    response(status, "", &body)
}

/// A page of a list with one object, `d/a`, of ten bytes.
pub(super) fn page(etag: &str) -> String {
    let body = format!(
        "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>d/a</Key>\
         <LastModified>2026-11-30T00:00:00.000Z</LastModified>{etag}<Size>10</Size></Contents>\
         </ListBucketResult>"
    );
    response("200 OK", "", &body)
}

/// The head of a part of an object of ten bytes; `length` is what Content-Length says.
pub(super) fn part(range: &str, length: usize, headers: &str) -> String {
    format!(
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {length}\r\nContent-Range: {range}\r\n\
         Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n{headers}\r\n"
    )
}

/// The object that [`page`] lists.
pub(super) fn object() -> Object {
    Object { path: "a".into(), size: 10, identity: "\"e\"".into(), modified_ms: 0 }
}
