//! A real S3 server for tests: versitygw over TLS.
//!
//! The binary is the one at `LAMPYRIS_VERSITYGW`, else the one in the project's cache. Nothing can
//! stand in for a real server: without one a test fails, unless `LAMPYRIS_SKIP_S3` is set.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "shared by tests, each of which uses a part; a test fails by panicking"
)]

pub(crate) mod process;

use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsAuthorizer, AwsCredential};
use object_store::client::{HttpConnector, HttpRequest, ReqwestConnector};
use object_store::{Certificate, ClientOptions, ObjectStoreExt, path::Path};
use source::{Credentials, S3Config, S3Source, SourceConfig};
use tempfile::TempDir;

use process::{Process, own_port};

/// The access key id of its administrator, who may do everything.
pub(crate) const KEY: &str = "test-key";
/// The secret of [`KEY`].
pub(crate) const SECRET: &str = "test-secret";

/// A server that dies with the test.
#[derive(Debug)]
pub(crate) struct Server {
    _process: Process,
    binary: PathBuf,
    /// Where it listens, on 127.0.0.1.
    pub(crate) port: u16,
    /// Its certificate.
    pub(crate) ca: String,
    _dir: TempDir,
}

/// The server's binary, or none where the environment says to do without.
fn binary() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = || path("LAMPYRIS_CACHE").or_else(|| Some(path("HOME")?.join(".cache/lampyris")));
    let wanted = path("LAMPYRIS_VERSITYGW")
        .or_else(|| Some(cache()?.join("k8s/bin/versitygw")))
        .unwrap_or_default();
    choose(wanted, std::env::var_os("LAMPYRIS_SKIP_S3").is_some())
        .unwrap_or_else(|why| panic!("{why}"))
}

/// What to run: being there wins over being skipped, and neither is a failure.
pub(crate) fn choose(wanted: PathBuf, may_skip: bool) -> Result<Option<PathBuf>, String> {
    match wanted.is_file() {
        true => Ok(Some(wanted)),
        false if may_skip => Ok(None),
        false => Err(format!(
            "no S3 server at {:?}: `./kind-e2e/test unit` builds it, LAMPYRIS_VERSITYGW names \
             another, LAMPYRIS_SKIP_S3=1 skips what needs it",
            wanted
        )),
    }
}

/// A server with one bucket, `train`; none where the environment says to skip.
pub(crate) fn server() -> Option<Server> {
    source::install_crypto_provider();
    let Some(binary) = binary() else {
        // Not `eprintln`, whose output the harness hides when a test passes.
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        let line = format!("skipped for LAMPYRIS_SKIP_S3: {name}\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return None;
    };
    let dir = tempfile::tempdir().unwrap();
    let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    std::fs::create_dir_all(dir.path().join("data/train")).unwrap();
    std::fs::create_dir(dir.path().join("users")).unwrap();
    let port = own_port();
    let mut command = Command::new(&binary);
    command
        .args(["--access", KEY, "--secret", SECRET, "--keep-alive", "--quiet"])
        .args(["--port", &format!("127.0.0.1:{port}")])
        .arg("--cert")
        .arg(&cert)
        .arg("--key")
        .arg(&key)
        .arg("--iam-dir")
        .arg(dir.path().join("users"))
        .arg("posix")
        .arg(dir.path().join("data"));
    let process = Process::start("versitygw", command, dir.path());
    let server = Server { _process: process, binary, port, ca: made.cert.pem(), _dir: dir };
    let deadline = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline, "versitygw does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    Some(server)
}

impl Server {
    /// How to reach `uri` there.
    pub(crate) fn config(&self, uri: &str) -> S3Config {
        let config = SourceConfig::parse(&format!(
            r#"{{"s3":{{"uri":"{uri}","endpoint":"https://127.0.0.1:{}","region":"us-east-1",
               "credentials":{{"accessKeyId":"{KEY}","secretAccessKey":"{SECRET}"}}}}}}"#,
            self.port
        ));
        let SourceConfig::S3(mut s3) = config.unwrap() else { panic!("not s3") };
        s3.ca_bundle = Some(self.ca.clone());
        s3
    }

    /// A source of `uri` there.
    pub(crate) fn source(&self, uri: &str) -> S3Source {
        S3Source::new(&self.config(uri)).unwrap()
    }

    /// Puts an object into the bucket `train`.
    pub(crate) async fn put(&self, key: &str, bytes: impl Into<Bytes>) {
        self.bucket().put(&Path::parse(key).unwrap(), bytes.into().into()).await.unwrap();
    }

    /// Removes an object from the bucket `train`.
    pub(crate) async fn delete(&self, key: &str) {
        self.bucket().delete(&Path::parse(key).unwrap()).await.unwrap();
    }

    fn bucket(&self) -> AmazonS3 {
        AmazonS3Builder::new()
            .with_bucket_name("train")
            .with_endpoint(self.endpoint())
            .with_region("us-east-1")
            .with_access_key_id(KEY)
            .with_secret_access_key(SECRET)
            .with_client_options(self.trusting())
            .build()
            .unwrap()
    }

    /// Makes a user without any right.
    pub(crate) fn user(&self, id: &str) -> Credentials {
        let mut admin = Command::new(&self.binary);
        admin.args(["admin", "--access", KEY, "--secret", SECRET, "--allow-insecure"]);
        admin.args(["--endpoint-url", &self.endpoint(), "create-user"]);
        admin.args(["--access", id, "--secret", SECRET, "--role", "user"]);
        let done = admin.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Credentials {
            access_key_id: id.into(),
            secret_access_key: SECRET.into(),
            session_token: None,
        }
    }

    /// Makes `document` the policy of the bucket `train`.
    pub(crate) async fn policy(&self, document: impl Into<String>) {
        self.send("/train?policy=", document.into()).await;
    }

    /// Makes an empty object whose key ends with a slash, as consoles do for a folder.
    pub(crate) async fn folder(&self, key: &str) {
        self.send(&format!("/train/{key}/"), String::new()).await;
    }

    async fn send(&self, path: &str, body: String) {
        let mut request = HttpRequest::new(body.into());
        *request.method_mut() = "PUT".parse().unwrap();
        *request.uri_mut() = format!("{}{path}", self.endpoint()).parse().unwrap();
        let keys = AwsCredential { key_id: KEY.into(), secret_key: SECRET.into(), token: None };
        AwsAuthorizer::new(&keys, "s3", "us-east-1").try_authorize(&mut request, None).unwrap();
        let client = ReqwestConnector::default().connect(&self.trusting()).unwrap();
        let answer = client.execute(request).await.unwrap();
        let status = answer.status();
        let said = answer.into_body().bytes().await.unwrap();
        assert!(status.is_success(), "{status}: {}", String::from_utf8_lossy(&said));
    }

    fn endpoint(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn trusting(&self) -> ClientOptions {
        let ca = Certificate::from_pem(self.ca.as_bytes()).unwrap();
        ClientOptions::new().with_root_certificate(ca)
    }
}
