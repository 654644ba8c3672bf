//! Real servers for tests: one metadata process, three storage processes, three chains of three. The
//! binaries are those of the same build (`cargo build -p meta -p storage-node` first, or
//! `LAMPYRIS_BIN_DIR`).
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "shared by tests, each of which uses a part; a test fails by panicking"
)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use client::{Client, ClientOptions};

use crate::s3_server::process::{Process, own_port};

fn binary(name: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let built = here.parent().and_then(|deps| deps.parent()).unwrap().to_owned();
    let directory = std::env::var_os("LAMPYRIS_BIN_DIR").map_or(built, PathBuf::from);
    let path = directory.join(name);
    assert!(path.exists(), "{} is missing: build meta and storage-node first", path.display());
    path
}

/// A cluster that dies with the test.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// `host:port` of the manager.
    pub(crate) manager: String,
    /// The storage processes.
    pub(crate) storage: Vec<Process>,
    _meta: Process,
    _directory: tempfile::TempDir,
}

fn http(address: &str, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn table() -> String {
    let chain = |chain: u64| {
        let targets: Vec<String> = (10_001..=10_003u64)
            .map(|node| {
                let target = node * 10_000 + 100 + chain;
                format!(r#"{{"targetId":{target},"nodeId":{node},"disk":0}}"#)
            })
            .collect();
        format!(r#"{{"chainId":{chain},"targets":[{}]}}"#, targets.join(","))
    };
    let chains: Vec<String> = (1..=3).map(chain).collect();
    let chains = chains.join(",");
    let head = r#""tableId":1,"revision":1,"stripeSize":0,"chunkSizeBytes":1048576"#;
    format!("{{{head},\"chains\":[{chains}]}}")
}

impl Cluster {
    /// Starts the processes and declares the chains.
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (rpc, admin) = (own_port(), own_port());
        let manager = format!("127.0.0.1:{rpc}");
        let data = |name: &str| directory.path().join(name).display().to_string();
        let args = |flags: &[(&str, String)]| {
            let mut args = vec!["serve".to_owned(), "--cluster".to_owned(), "test".to_owned()];
            for (flag, value) in flags {
                args.extend([format!("--{flag}"), value.clone()]);
            }
            args
        };
        let admin = format!("127.0.0.1:{admin}");
        let meta_flags =
            [("data", data("meta")), ("listen", manager.clone()), ("admin", admin.clone())];
        let start = |program: &str, name: &str, flags: &[(&str, String)]| {
            let mut command = Command::new(binary(program));
            command.args(args(flags));
            Process::start(name, command, directory.path())
        };
        let meta = start("meta", "meta", &meta_flags);
        let storage = (10_001..=10_003).map(|node| {
            let any = "127.0.0.1:0".to_owned();
            let flags = [
                ("node-id", node.to_string()),
                ("data", data(&node.to_string())),
                ("manager", manager.clone()),
                ("listen", any.clone()),
                ("advertise", any.clone()),
                ("admin", any),
            ];
            std::fs::create_dir_all(data(&node.to_string())).unwrap();
            start("storage-node", &format!("storage-{node}"), &flags)
        });
        let storage = storage.collect();
        let body = table();
        let length = body.len();
        let put = format!(
            "PUT /v1/table HTTP/1.1\r\nHost: m\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = http(&admin, &put);
            if answer.as_ref().is_ok_and(|answer| answer.starts_with("HTTP/1.1 2")) {
                break;
            }
            assert!(Instant::now() < until, "declare the table: {answer:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { manager, storage, _meta: meta, _directory: directory }
    }

    /// A client that has seen every replica serve.
    pub(crate) async fn client(&self) -> Client {
        let client = Client::connect(ClientOptions::new(&self.manager)).await.unwrap();
        client
            .wait_routing(|table| {
                let mut whole = table.chains.iter().map(|chain| chain.serving().count() == 3);
                table.chains.len() == 3 && whole.all(|whole| whole)
            })
            .await
            .unwrap();
        client
    }

    /// A client that does not wait for every replica.
    pub(crate) async fn any_client(&self) -> Client {
        Client::connect(ClientOptions::new(&self.manager)).await.unwrap()
    }
}
