//! The S3 source against a real server, versitygw over TLS, with objects put through it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod s3_server;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use s3_server::{KEY, SECRET, free_port, server};
use source::{Credentials, Reason, S3Source, Source, SourceConfig};

#[test]
fn without_a_server_a_test_fails_unless_it_is_told_to_skip() {
    let nowhere = || PathBuf::from("/nonexistent/versitygw");
    let here = || std::env::current_exe().unwrap();
    for may_skip in [false, true] {
        assert_eq!(s3_server::choose(here(), may_skip), Ok(Some(here())));
    }
    assert_eq!(s3_server::choose(nowhere(), true), Ok(None));
    let why = s3_server::choose(nowhere(), false).unwrap_err();
    for part in ["/nonexistent/versitygw", "./kind-e2e/test unit", "LAMPYRIS_SKIP_S3"] {
        assert!(why.contains(part), "{why}");
    }
}

#[tokio::test]
async fn objects_are_listed_and_ranges_read_exactly() {
    let Some(server) = server() else { return };
    server.put("flights/b/two.vortex", "0123456789").await;
    server.put("flights/one.vortex", "x").await;
    server.put("flights-not/three.vortex", "y").await;
    let source = server.source("s3://train/flights");
    let objects = source.list().await.unwrap();
    let found: Vec<_> = objects.iter().map(|o| (o.path.as_str(), o.size)).collect();
    assert_eq!(found, [("b/two.vortex", 10), ("one.vortex", 1)]);
    assert!(objects.iter().all(|object| !object.identity.is_empty()));
    assert_eq!(&source.read(&objects[0], 3..7).await.unwrap()[..], b"3456");
    assert_eq!(source.read(&objects[0], 4..4).await.unwrap().len(), 0);

    let single = server.source("s3://train/flights/one.vortex");
    let objects = single.list().await.unwrap();
    assert_eq!(objects[0].path, "one.vortex");
    assert_eq!(&single.read(&objects[0], 0..1).await.unwrap()[..], b"x");
}

#[tokio::test]
async fn a_replaced_object_is_never_read() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "old old old").await;
    let source = server.source("s3://train/d");
    let objects = source.list().await.unwrap();
    server.put("d/a.vortex", "new new new").await;
    let failure = source.read(&objects[0], 0..3).await.unwrap_err();
    assert_eq!(failure.reason, Reason::DatasetChanged, "{failure}");
    let objects = source.list().await.unwrap();
    assert_eq!(&source.read(&objects[0], 0..3).await.unwrap()[..], b"new");
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "x").await;
    let failure = server.source("s3://no-such-bucket/d").list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::BucketNotFound, "{failure}");
    let failure = server.source("s3://train/nothing").list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::ObjectNotFound, "{failure}");
}

#[tokio::test]
async fn wrong_credentials_are_told_and_new_ones_heal_the_open_source() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "x").await;
    let mut config = server.config("s3://train/d");
    let good = config.credentials.clone().unwrap();
    let bad = |id: &str, secret: &str| Credentials {
        access_key_id: id.into(),
        secret_access_key: secret.into(),
        session_token: None,
    };
    config.credentials = Some(bad(KEY, "wrong"));
    let source = S3Source::new(&config).unwrap();
    let failure = source.list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::InvalidCredentials, "{failure}");
    assert!(!failure.message.contains("wrong"), "a secret in {failure}");
    source.set_credentials(bad("nobody", SECRET));
    let failure = source.list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::InvalidCredentials, "{failure}");
    source.set_credentials(good);
    assert_eq!(source.list().await.unwrap().len(), 1);
}

#[tokio::test]
async fn an_untrusted_certificate_and_a_closed_port_are_told_apart() {
    let Some(server) = server() else { return };
    let mut config = server.config("s3://train/d");
    config.ca_bundle = None;
    let failure = S3Source::new(&config).unwrap().list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::TlsFailed, "{failure}");
    config.endpoint = format!("https://127.0.0.1:{}", free_port());
    let started = Instant::now();
    let failure = S3Source::new(&config).unwrap().list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::EndpointUnreachable, "{failure}");
    assert!(started.elapsed() < Duration::from_secs(25));
}

/// A server that promises ten bytes and sends four, over and over.
#[tokio::test]
async fn a_short_body_is_a_truncated_file() {
    source::install_crypto_provider();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(
                b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\n\
                  Content-Range: bytes 0-9/10\r\nETag: \"e\"\r\n\
                  Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n\r\nabcd",
            );
        }
    });
    let config = format!(r#"{{"s3":{{"uri":"s3://b/d","endpoint":"http://127.0.0.1:{port}"}}}}"#);
    let source = source::open(&SourceConfig::parse(&config).unwrap()).unwrap();
    let object = source::Object {
        path: "a.vortex".into(),
        size: 10,
        identity: "\"e\"".into(),
        modified_ms: 0,
    };
    let failure = source.read(&object, 0..10).await.unwrap_err();
    assert_eq!(failure.reason, Reason::TruncatedFile, "{failure}");
}
