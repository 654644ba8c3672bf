//! The keeper over its real socket, with real descriptors.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use keeper::client::{Client, ClientError};
use serde_json::json;

/// A keeper process that ends with the test.
struct Keeper {
    child: Child,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Keeper {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("deep/keeper.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_lampyris-keeper"))
            .args(["serve", "--socket"])
            .arg(&socket)
            .spawn()
            .unwrap();
        let keeper = Self { child, socket, _dir: dir };
        wait_for("the keeper's socket", || UnixStream::connect(&keeper.socket).is_ok());
        keeper
    }

    fn client(&self) -> Client {
        Client::new(self.socket.clone())
    }

    fn rss_kib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn probe(socket: &Path) -> bool {
    let bin = env!("CARGO_BIN_EXE_lampyris-keeper");
    Command::new(bin).args(["probe", "--socket"]).arg(socket).status().unwrap().success()
}

#[test]
fn a_descriptor_outlives_the_one_who_gave_it() {
    let keeper = Keeper::start();
    let client = keeper.client();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"kept").unwrap();
    client.put("pod-1/data", json!({"n": 1}), &[file.as_fd()]).unwrap();
    drop(file);
    let (meta, mut descriptors) = client.get("pod-1/data").unwrap();
    assert_eq!(meta, json!({"n": 1}));
    let mut back = File::from(descriptors.pop().unwrap());
    back.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    back.read_to_string(&mut text).unwrap();
    assert_eq!(text, "kept");
}

#[test]
fn dropping_an_entry_closes_its_descriptors() {
    let keeper = Keeper::start();
    let (mut reader, writer) = UnixStream::pair().unwrap();
    keeper.client().put("pod-1/data", json!({}), &[writer.as_fd()]).unwrap();
    drop(writer);
    assert_eq!(keeper.client().list().unwrap(), ["pod-1/data"]);
    keeper.client().drop_entry("pod-1/data").unwrap();
    assert!(keeper.client().list().unwrap().is_empty());
    reader.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0, "the last descriptor is closed");
    let missing = keeper.client().get("pod-1/data").unwrap_err();
    assert!(matches!(missing, ClientError::Refused(reason) if reason.contains("pod-1/data")));
}

#[test]
fn malformed_input_ends_its_connection_only() {
    let keeper = Keeper::start();
    let file = tempfile::tempfile().unwrap();
    keeper.client().put("k", json!({}), &[file.as_fd()]).unwrap();
    let hostile: [&[u8]; 6] = [
        b"\n",
        b"{\"put\":{}}\n",
        b"\xff\xfe\x00\n",
        b"{\"get\":{\"key\":7}}\n",
        b"[[[[[[[[[[[[",
        b"{\"list\":{}}{\"list\":{}}\n",
    ];
    for bytes in hostile {
        let mut stream = UnixStream::connect(&keeper.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("{\"error\":"), "{bytes:?} got {answer:?}");
    }
    let nested = "[".repeat(500_000) + "\n";
    let mut stream = UnixStream::connect(&keeper.socket).unwrap();
    let _ = stream.write_all(nested.as_bytes());
    assert_eq!(keeper.client().list().unwrap(), ["k"], "still serves after all that");
}

#[test]
fn more_connections_than_places_wait_their_turn() {
    let keeper = Keeper::start();
    let ask = |timeout| {
        let mut stream = UnixStream::connect(&keeper.socket).unwrap();
        stream.set_read_timeout(Some(timeout)).unwrap();
        stream.write_all(b"{\"list\":{}}\n").unwrap();
        stream
    };
    let mut busy: Vec<_> = (0..16).map(|_| ask(Duration::from_secs(5))).collect();
    let mut answer = [0; 12];
    for stream in &mut busy {
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *b"{\"keys\":[]}\n");
    }
    let mut waiting = ask(Duration::from_millis(200));
    let refused = waiting.read(&mut answer).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::WouldBlock, "all places are taken");
    drop(busy);
    waiting.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    waiting.read_exact(&mut answer).unwrap();
    assert_eq!(answer, *b"{\"keys\":[]}\n");
}

#[test]
fn the_socket_is_for_root_only() {
    use std::os::unix::fs::PermissionsExt;
    let keeper = Keeper::start();
    let mode = std::fs::metadata(&keeper.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_client_of_another_user_gets_no_answer() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("k.sock");
    let uid = rustix::process::getuid().as_raw();
    let server = keeper::server::Server::bind(&socket, uid + 1).unwrap();
    std::thread::spawn(move || server.run());
    UnixStream::connect(&socket).expect("it is there");
    let refused = Client::new(socket).list();
    assert!(refused.is_err(), "{refused:?}");
}

#[test]
fn a_client_in_another_process_namespace_is_served() {
    // As the node plugin's container is for the keeper's: each sees the other as process 0.
    let keeper = Keeper::start();
    let status = Command::new("unshare")
        .args(["--pid", "--fork", env!("CARGO_BIN_EXE_lampyris-keeper"), "probe", "--socket"])
        .arg(&keeper.socket)
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn a_second_keeper_does_not_take_the_socket() {
    let keeper = Keeper::start();
    let second = Command::new(env!("CARGO_BIN_EXE_lampyris-keeper"))
        .args(["serve", "--socket"])
        .arg(&keeper.socket)
        .output()
        .unwrap();
    assert!(!second.status.success());
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(said.contains("already serves"), "{said}");
    assert!(probe(&keeper.socket), "the first one still answers");
}

#[test]
fn the_probe_follows_the_keeper_and_sigterm_ends_it() {
    let mut keeper = Keeper::start();
    assert!(probe(&keeper.socket));
    let pid = rustix::process::Pid::from_child(&keeper.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(keeper.child.wait().unwrap().success());
    assert!(!probe(&keeper.socket));
}

#[test]
fn two_hundred_entries_stay_within_five_mebibytes() {
    let keeper = Keeper::start();
    let file = tempfile::tempfile().unwrap();
    let meta = json!({"source": "x".repeat(4096)});
    for n in 0..200 {
        keeper.client().put(&format!("pod/{n}"), meta.clone(), &[file.as_fd()]).unwrap();
    }
    assert!(keeper.rss_kib() <= 5 << 10, "{} KiB", keeper.rss_kib());
}

#[test]
fn every_line_that_it_logs_is_json_with_level_and_message() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("keeper.sock");
    let mut child = Command::new(env!("CARGO_BIN_EXE_lampyris-keeper"))
        .args(["serve", "--socket"])
        .arg(&socket)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = child.stderr.take().unwrap();
    let keeper = Keeper { child, socket, _dir: dir };
    wait_for("the keeper's socket", || UnixStream::connect(&keeper.socket).is_ok());
    let mut peer = UnixStream::connect(&keeper.socket).unwrap();
    peer.write_all(b"no message\n").unwrap();
    let mut answer = String::new();
    peer.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("malformed"), "{answer}");
    drop(peer);
    let lines = std::io::BufRead::lines(std::io::BufReader::new(stderr)).map(Result::unwrap);
    let mut seen = Vec::new();
    for line in lines {
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z'), "{line}");
        let message = line["fields"]["message"].as_str().unwrap().to_owned();
        seen.push((line["level"].as_str().unwrap().to_owned(), message));
        if seen.len() == 2 {
            break;
        }
    }
    let expected = [("INFO", "serving"), ("WARN", "a connection ended")];
    assert_eq!(seen, expected.map(|(level, message)| (level.to_owned(), message.to_owned())));
}
