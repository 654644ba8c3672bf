//! `scan-agent load` and `scan-agent inspect` as the operator's Jobs run them: from a real S3 server into
//! real storage servers, and what they say when something is wrong.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod cluster;
#[path = "../source/tests/s3_server/mod.rs"]
mod s3_server;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use cluster::Cluster;
use s3_server::process::own_port;
use s3_server::{KEY, SECRET, Server};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use source::{ClusterConfig, Source, SourceConfig, StoreSource};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

/// A run with the little data of these tests ends within this, or hangs.
const DEADLINE: Duration = Duration::from_secs(60);

fn agent(command: &str, config: &Value, keys: Option<&Path>, more: &[&str]) -> Child {
    let mut agent = Command::new(env!("CARGO_BIN_EXE_scan-agent"));
    agent.args([command, "--config-json", &config.to_string(), "--result", "/dev/null"]);
    if let Some(keys) = keys {
        agent.arg("--credentials-dir").arg(keys);
    }
    agent.args(more).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    agent.spawn().unwrap()
}

async fn ends(child: Child) -> (bool, Value) {
    let done = tokio::time::timeout(DEADLINE, child.wait_with_output()).await;
    let output = done.expect("the agent hangs").unwrap();
    let result = serde_json::from_slice(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    (output.status.success(), result.unwrap_or_else(|error| panic!("{error}: {said}")))
}

async fn load(from: &Value, to: &str, manager: &str, keys: Option<&Path>) -> (bool, Value) {
    let config = json!({"from": from, "to": store(manager, to), "parallelism": 2});
    ends(agent("load", &config, keys, &["--admin", "127.0.0.1:0"])).await
}

fn store(manager: &str, path: &str) -> Value {
    json!({"cluster": {"manager": manager, "path": path}})
}

/// A source as the operator renders it: the keys are in a Secret, not in it.
fn without_keys(server: &Server, uri: &str) -> Value {
    let mut config = server.config(uri);
    config.credentials = None;
    serde_json::to_value(SourceConfig::S3(config)).unwrap()
}

fn secret(secret: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("accessKeyId"), KEY).unwrap();
    std::fs::write(dir.path().join("secretAccessKey"), format!("{secret}\n")).unwrap();
    dir
}

fn noise(seed: u64, length: u64) -> Vec<u8> {
    (0..length).map(|at| at.wrapping_mul(seed | 1).to_le_bytes()[1]).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

async fn read_all(source: &StoreSource) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for object in source.list().await.unwrap() {
        let bytes = source.read(&object, 0..object.size).await.unwrap();
        found.push((object.path, sha256(&bytes)));
    }
    found
}

fn store_source(cluster: &Cluster, path: &str) -> StoreSource {
    StoreSource::new(&ClusterConfig { manager: cluster.manager.clone(), path: path.into() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dataset_is_copied_from_s3_and_every_byte_arrives() {
    let Some(s3) = s3_server::server() else { return };
    let cluster = Cluster::start();
    drop(cluster.client().await);
    let keys = secret(SECRET);
    // Longer than the piece of a copy, an odd length, a folder, and nothing at all.
    let files =
        [("a/big.bin", noise(5, (9 << 20) + 77)), ("b.bin", noise(9, 12_345)), ("empty", vec![])];
    let mut expected = Vec::new();
    for (name, bytes) in files {
        expected.push((name.to_owned(), sha256(&bytes)));
        s3.put(&format!("set/{name}"), bytes).await;
    }
    let from = without_keys(&s3, "s3://train/set");
    let (good, result) = load(&from, "/datasets/set", &cluster.manager, Some(keys.path())).await;
    assert!(good, "{result}");
    let lines: String = expected.iter().map(|(name, sum)| format!("{name}\0{sum}\n")).collect();
    let bytes = (9 << 20) + 77 + 12_345;
    assert_eq!(
        result,
        json!({"ok": {"files": 3, "bytes": bytes, "sha256": sha256(lines.as_bytes())}})
    );
    let copied = store_source(&cluster, "/datasets/set");
    assert_eq!(read_all(&copied).await, expected);

    // Again, over what is there, with one object changed: the copy is the new version.
    s3.put("set/b.bin", noise(21, 54_321)).await;
    let (good, result) = load(&from, "/datasets/set", &cluster.manager, Some(keys.path())).await;
    assert!(good, "{result}");
    expected[1].1 = sha256(&noise(21, 54_321));
    assert_eq!(read_all(&store_source(&cluster, "/datasets/set")).await, expected);

    // From one place of the store to another.
    let from = store(&cluster.manager, "/datasets/set/a");
    let (good, result) = load(&from, "/datasets/again", &cluster.manager, None).await;
    assert!(good, "{result}");
    let expected = [("big.bin".to_owned(), expected[0].1.clone())];
    assert_eq!(read_all(&store_source(&cluster, "/datasets/again")).await, expected);

    // What is described is what was copied.
    let config = json!({"format": "Files", "source": store(&cluster.manager, "/datasets/set")});
    let (good, report) = ends(agent("inspect", &config, None, &[])).await;
    assert!(good, "{report}");
    assert_eq!(
        (&report["ok"]["files"], &report["ok"]["bytes"]),
        (&json!(3), &json!((9 << 20) + 77 + 54_321))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_replaced_under_a_reader_of_the_store_is_a_changed_dataset() {
    let Some(s3) = s3_server::server() else { return };
    let cluster = Cluster::start();
    drop(cluster.client().await);
    let keys = secret(SECRET);
    let from = without_keys(&s3, "s3://train/d");
    s3.put("d/a", noise(3, 100_000)).await;
    assert!(load(&from, "/d", &cluster.manager, Some(keys.path())).await.0);
    let reader = store_source(&cluster, "/d");
    let listed = reader.list().await.unwrap();
    assert_eq!(reader.read(&listed[0], 0..10).await.unwrap()[..], noise(3, 10));
    s3.put("d/a", noise(4, 100_000)).await;
    assert!(load(&from, "/d", &cluster.manager, Some(keys.path())).await.0);
    let failure = reader.read(&listed[0], 50_000..50_010).await.unwrap_err();
    assert_eq!(failure.reason, source::Reason::DatasetChanged, "{failure}");
    let listed = reader.list().await.unwrap();
    assert_eq!(reader.read(&listed[0], 0..10).await.unwrap()[..], noise(4, 10));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dataset_that_is_nested_too_deep_is_refused_and_not_cut() {
    let cluster = Cluster::start();
    let client = cluster.client().await;
    client.mkdir_all(&format!("/d{}", "/x".repeat(64))).await.unwrap();
    assert_eq!(store_source(&cluster, "/d").list().await.unwrap().len(), 0);
    client.mkdir_all(&format!("/d{}", "/x".repeat(65))).await.unwrap();
    let failure = store_source(&cluster, "/d").list().await.unwrap_err();
    assert!(failure.message.ends_with("is nested deeper than 64"), "{failure}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_stops_a_load_is_named_in_its_result() {
    let Some(s3) = s3_server::server() else { return };
    let (good, bad) = (secret(SECRET), secret("wrong"));
    let empty = tempfile::tempdir().unwrap();
    s3.put("d/a", "x").await;
    let nobody = format!("127.0.0.1:{}", own_port());
    let cases = [
        ("s3://train/d", bad.path(), "InvalidCredentials"),
        ("s3://train/d", empty.path(), "InvalidCredentials"),
        ("s3://no-such-bucket/d", good.path(), "BucketNotFound"),
        ("s3://train/nothing", good.path(), "ObjectNotFound"),
    ];
    for (uri, keys, reason) in cases {
        let since = Instant::now();
        let (is_good, result) = load(&without_keys(&s3, uri), "/d", &nobody, Some(keys)).await;
        assert!(!is_good);
        assert_eq!(result["error"]["reason"], reason, "{result}");
        assert!(!result.to_string().contains("wrong"), "a secret in {result}");
        assert!(since.elapsed() < Duration::from_secs(30), "{reason} after {:?}", since.elapsed());
    }
}

/// Bytes of the object of [`stuck_server`]: its second piece never comes.
const STUCK_SIZE: usize = (4 << 20) + 1000;

/// An S3 server of one object whose end never comes, so that a load stands still while it is looked at.
async fn stuck_server() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 4096];
                let count = stream.read(&mut request).await.unwrap_or(0);
                let request = String::from_utf8_lossy(&request[..count]).into_owned();
                if !request.contains("list-type=2") && !request.contains("bytes=0-") {
                    return std::future::pending().await;
                }
                // The loader may have been ended meanwhile: that is what is tested.
                let _ = stream.write_all(&stuck_answer(request.contains("list-type=2"))).await;
            });
        }
    });
    port
}

fn stuck_answer(is_list: bool) -> Vec<u8> {
    const COMMON: &str = "Connection: close\r\nETag: \"e\"\r\n\
        Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n";
    if is_list {
        let body = format!(
            "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>d/a</Key>\
            <LastModified>2026-11-30T00:00:00.000Z</LastModified><ETag>\"e\"</ETag>\
            <Size>{STUCK_SIZE}</Size></Contents></ListBucketResult>"
        );
        format!("HTTP/1.1 200 OK\r\n{COMMON}Content-Length: {}\r\n\r\n{body}", body.len()).into()
    } else {
        let piece = 4 << 20;
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\n{COMMON}Content-Length: {piece}\r\n\
            Content-Range: bytes 0-{}/{STUCK_SIZE}\r\n\r\n",
            piece - 1
        );
        [head.into_bytes(), vec![7; piece]].concat()
    }
}

fn terminate(child: &Child) {
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_shows_its_progress_and_a_terminated_one_leaves_nothing_half_written() {
    let cluster = Cluster::start();
    drop(cluster.client().await);
    let endpoint = format!("http://127.0.0.1:{}", stuck_server().await);
    let config = json!({
        "from": {"s3": {"uri": "s3://b/d", "endpoint": endpoint}},
        "to": store(&cluster.manager, "/d"),
    });
    let admin = format!("127.0.0.1:{}", own_port());
    let running = agent("load", &config, None, &["--admin", &admin]);
    let since = Instant::now();
    let progress = loop {
        let state: Value = match get(&admin, "/state").await {
            Some(answer) => serde_json::from_str(&answer).unwrap(),
            None => Value::Null,
        };
        if state["progress"]["bytesDone"] == 4 << 20 {
            break state["progress"].clone();
        }
        assert!(since.elapsed() < DEADLINE, "no progress at {admin}: {state}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!((&progress["filesTotal"], &progress["filesDone"]), (&json!(1), &json!(0)));
    assert_eq!((&progress["bytesTotal"], &progress["percent"]), (&json!(STUCK_SIZE), &json!(99)));
    assert_eq!(get(&admin, "/readyz").await.as_deref(), Some("ok\n"));
    let metrics = get(&admin, "/metrics").await.unwrap();
    for line in [
        "lampyris_load_copied_files_total 0".to_owned(),
        format!("lampyris_load_copied_bytes_total {}", 4 << 20),
        "lampyris_load_dataset_files 1".to_owned(),
        format!("lampyris_load_dataset_bytes {STUCK_SIZE}"),
    ] {
        assert!(metrics.lines().any(|has| has == line), "no {line} in {metrics}");
    }
    let target = store_source(&cluster, "/d");
    let names: Vec<_> = target.list().await.unwrap().into_iter().map(|o| o.path).collect();
    assert_eq!(names, [".a.loading"]);

    terminate(&running);
    let asked = Instant::now();
    let (is_good, result) = ends(running).await;
    assert!(!is_good && asked.elapsed() < Duration::from_secs(5), "after {:?}", asked.elapsed());
    assert_eq!(result["error"]["reason"], "Interrupted");
    assert_eq!(result["error"]["message"], "ended by SIGTERM: 0 of 1 files were copied");
    assert_eq!(target.list().await.unwrap().len(), 0, "something half-written is left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminated_inspection_ends_at_once_and_says_so() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let from = json!({"s3": {"uri": "s3://b/d", "endpoint": endpoint}});
    let running = agent("inspect", &json!({"format": "Vortex", "source": from}), None, &[]);
    // It asks, and gets no answer.
    let asked = tokio::time::timeout(DEADLINE, listener.accept()).await.unwrap().unwrap();
    terminate(&running);
    let since = Instant::now();
    let (is_good, result) = ends(running).await;
    assert!(!is_good && since.elapsed() < Duration::from_secs(5), "after {:?}", since.elapsed());
    let message = "ended by SIGTERM: the dataset was not inspected to the end";
    assert_eq!(result, json!({"error": {"reason": "Interrupted", "message": message}}));
    drop(asked);
}

/// The body of an answer of the admin endpoint.
async fn get(admin: &str, path: &str) -> Option<String> {
    let mut stream = tokio::net::TcpStream::connect(admin).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: load\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer.split_once("\r\n\r\n")?.1.to_owned())
}
