//! The S3 source against a real server: versitygw over TLS, objects put through it.
//!
//! The binary is found at `LAMPYRIS_VERSITYGW` or in the project's cache; without one the tests
//! of this file say so and pass, because nothing else can stand in for a real server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use object_store::aws::AmazonS3Builder;
use object_store::{Certificate, ClientOptions, ObjectStore, ObjectStoreExt, path::Path};
use source::{Credentials, Reason, S3Config, S3Source, Source, SourceConfig};
use tempfile::TempDir;

const KEY: &str = "test-key";
const SECRET: &str = "test-secret";

struct Server {
    child: Child,
    port: u16,
    ca: String,
    _dir: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn binary() -> Option<PathBuf> {
    let given = std::env::var_os("LAMPYRIS_VERSITYGW").map(PathBuf::from);
    let cached = std::env::var_os("HOME")
        .map(|home| PathBuf::from(home).join(".cache/lampyris/k8s/bin/versitygw"));
    given.into_iter().chain(cached).find(|path| path.is_file())
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A server with one bucket, `train`.
fn server() -> Option<Server> {
    source::install_crypto_provider();
    let Some(binary) = binary() else {
        eprintln!("skipped: no versitygw");
        return None;
    };
    let dir = tempfile::tempdir().unwrap();
    let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    std::fs::create_dir_all(dir.path().join("data/train")).unwrap();
    let port = free_port();
    let child = Command::new(binary)
        .args(["--access", KEY, "--secret", SECRET, "--keep-alive", "--quiet"])
        .args(["--port", &format!("127.0.0.1:{port}")])
        .arg("--cert")
        .arg(&cert)
        .arg("--key")
        .arg(&key)
        .arg("posix")
        .arg(dir.path().join("data"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server { child, port, ca: made.cert.pem(), _dir: dir };
    let deadline = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline, "versitygw does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    Some(server)
}

impl Server {
    fn config(&self, uri: &str) -> S3Config {
        let config = SourceConfig::parse(&format!(
            r#"{{"s3":{{"uri":"{uri}","endpoint":"https://127.0.0.1:{}","region":"us-east-1",
               "credentials":{{"accessKeyId":"{KEY}","secretAccessKey":"{SECRET}"}}}}}}"#,
            self.port
        ));
        let SourceConfig::S3(mut s3) = config.unwrap() else { panic!("not s3") };
        s3.ca_bundle = Some(self.ca.clone());
        s3
    }

    fn source(&self, uri: &str) -> S3Source {
        S3Source::new(&self.config(uri)).unwrap()
    }

    async fn put(&self, key: &str, bytes: &'static [u8]) {
        let ca = Certificate::from_pem(self.ca.as_bytes()).unwrap();
        let store = AmazonS3Builder::new()
            .with_bucket_name("train")
            .with_endpoint(format!("https://127.0.0.1:{}", self.port))
            .with_region("us-east-1")
            .with_access_key_id(KEY)
            .with_secret_access_key(SECRET)
            .with_client_options(ClientOptions::new().with_root_certificate(ca))
            .build()
            .unwrap();
        let store: &dyn ObjectStore = &store;
        store.put(&Path::from(key), bytes.into()).await.unwrap();
    }
}

#[tokio::test]
async fn objects_are_listed_and_ranges_read_exactly() {
    let Some(server) = server() else { return };
    server.put("flights/b/two.vortex", b"0123456789").await;
    server.put("flights/one.vortex", b"x").await;
    server.put("flights-not/three.vortex", b"y").await;
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
    server.put("d/a.vortex", b"old old old").await;
    let source = server.source("s3://train/d");
    let objects = source.list().await.unwrap();
    server.put("d/a.vortex", b"new new new").await;
    let failure = source.read(&objects[0], 0..3).await.unwrap_err();
    assert_eq!(failure.reason, Reason::DatasetChanged, "{failure}");
    let objects = source.list().await.unwrap();
    assert_eq!(&source.read(&objects[0], 0..3).await.unwrap()[..], b"new");
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", b"x").await;
    let failure = server.source("s3://no-such-bucket/d").list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::BucketNotFound, "{failure}");
    let failure = server.source("s3://train/nothing").list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::ObjectNotFound, "{failure}");
}

#[tokio::test]
async fn wrong_credentials_are_told_and_new_ones_heal_the_open_source() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", b"x").await;
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
