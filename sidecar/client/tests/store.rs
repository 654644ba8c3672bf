//! The client against real servers: one metadata process, three storage processes, three chains of three. The binaries are
//! those of the same build (`cargo build -p meta -p storage-node` first, or `LAMPYRIS_BIN_DIR`).

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::{Client, ClientOptions, Code};

const MIB: u64 = 1 << 20;

fn binary(name: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let built = here.parent().and_then(|deps| deps.parent()).unwrap().to_owned();
    let directory = std::env::var_os("LAMPYRIS_BIN_DIR").map_or(built, PathBuf::from);
    let path = directory.join(name);
    assert!(path.exists(), "{} is missing: build meta and storage-node first", path.display());
    path
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A process that dies with the test.
struct Process(Child);

impl Process {
    fn start(name: &str, args: &[String]) -> Self {
        let mut command = Command::new(binary(name));
        command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Cluster {
    manager: String,
    storage: Vec<Process>,
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
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (rpc, admin) = (free_port(), free_port());
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
        let meta = Process::start("meta", &args(&meta_flags));
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
            Process::start("storage-node", &args(&flags))
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

    async fn client(&self) -> Client {
        let client = Client::connect(ClientOptions::new(&self.manager)).await.unwrap();
        let whole = |chain: &chain::table::Chain| chain.serving().count() == 3;
        client
            .wait_routing(|table| table.chains.len() == 3 && table.chains.iter().all(whole))
            .await
            .unwrap();
        client
    }

    /// A client that does not wait for every replica.
    async fn any_client(&self) -> Client {
        Client::connect(ClientOptions::new(&self.manager)).await.unwrap()
    }
}

fn pattern(seed: u64, length: u64) -> Bytes {
    (0..length).map(|at| (at.wrapping_mul(seed | 1) >> 7) as u8).collect()
}

async fn write_file(client: &Client, path: &str, bytes: &Bytes) {
    let inode = client.create_path(path).await.unwrap().inode;
    let step = 300_000;
    for (at, piece) in (0u64..).step_by(step).zip(bytes.chunks(step)) {
        client.write_at(inode, at, Bytes::copy_from_slice(piece)).await.unwrap();
    }
    client.flush(inode).await.unwrap();
    client.release(inode).await;
}

async fn read_file(client: &Client, path: &str) -> Bytes {
    let opened = client.open_path(path).await.unwrap();
    client.read_at(opened.inode, 0, opened.length + 10).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_client_closed_another_reads_with_holes_cuts_and_replacements() {
    let cluster = Cluster::start();
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    writer.mkdir_all("/data/set").await.unwrap();
    let whole = pattern(7, 5 * MIB + 4321);
    write_file(&writer, "/data/set/file", &whole).await;
    assert!(read_file(&reader, "/data/set/file").await == whole);

    let inode = writer.create_path("/data/set/holes").await.unwrap().inode;
    writer.write_at(inode, 3 * MIB + 5, Bytes::from_static(b"end")).await.unwrap();
    assert_eq!(writer.read_at(inode, 3 * MIB, 100).await.unwrap()[..], *b"\0\0\0\0\0end");
    writer.flush(inode).await.unwrap();
    let holes = read_file(&reader, "/data/set/holes").await;
    assert_eq!(holes.len() as u64, 3 * MIB + 8);
    assert!(holes[..holes.len() - 3].iter().all(|byte| *byte == 0));

    let identity = writer.options().identity;
    let file = writer.stat_path("/data/set/file").await.unwrap().inode;
    writer.truncate(identity, file, MIB + 10).await.unwrap();
    writer.truncate(identity, file, 2 * MIB).await.unwrap();
    let cut = read_file(&reader, "/data/set/file").await;
    let (kept, zeros) = cut.split_at(MIB as usize + 10);
    assert!(cut.len() as u64 == 2 * MIB && *kept == whole[..kept.len()]);
    assert!(zeros.iter().all(|byte| *byte == 0), "cut bytes came back");

    let names = |entries: Vec<rpc::message::meta::DirectoryEntry>| {
        let mut names: Vec<_> = entries.into_iter().map(|entry| entry.name).collect();
        names.sort();
        names
    };
    assert_eq!(names(reader.list_dir("/data/set").await.unwrap()), ["file", "holes"]);
    reader.remove_path("/data/set/file").await.unwrap();
    assert_eq!(writer.stat_path("/data/set/file").await.unwrap_err().code, Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_a_storage_server_fails_no_read_and_no_write() {
    let mut cluster = Cluster::start();
    let client = cluster.client().await;
    let old = pattern(3, 6 * MIB);
    write_file(&client, "/old", &old).await;
    let reading = {
        let (client, old) = (cluster.any_client().await, old.clone());
        tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            let until = Instant::now() + Duration::from_secs(15);
            while Instant::now() < until {
                let since = Instant::now();
                assert!(read_file(&client, "/old").await == old);
                slowest = slowest.max(since.elapsed());
            }
            slowest
        })
    };
    let new = pattern(11, 24 * MIB);
    let inode = client.create_path("/new").await.unwrap().inode;
    let since = Instant::now();
    for (at, piece) in new.chunks(MIB as usize).enumerate() {
        if at == 8 {
            cluster.storage[1].kill();
        }
        let piece = Bytes::copy_from_slice(piece);
        client.write_at(inode, at as u64 * MIB, piece).await.unwrap();
    }
    client.flush(inode).await.unwrap();
    assert!(since.elapsed() < Duration::from_secs(25), "writes stood for {:?}", since.elapsed());
    client.release(inode).await;
    let slowest = reading.await.unwrap();
    assert!(slowest < Duration::from_secs(5), "a read of six chunks took {slowest:?}");
    let other = cluster.any_client().await;
    assert!(read_file(&other, "/new").await == new);
}
