//! A server of a real mount is killed in the middle of its work and another one goes on.
//!
//! Needs root and /dev/fuse. The keeper, each server and each application are processes of their own:
//! this test binary, started again with a role. The test itself may hold no file of a mount: between
//! fork and exec a child has it too, closing it there asks the server, and while that one is dead no
//! other could be started.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]
#![allow(clippy::print_stdout, reason = "a role tells the test by it")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use keeper::client::Client;
use serde_json::json;
use sidecar::fuse::{self, Options};
use sidecar::resume::Exchange;

#[path = "takeover/local_fs.rs"]
mod local_fs;
#[path = "takeover/plugin.rs"]
mod plugin;

/// Names the role of a child process.
const ROLE: &str = "LAMPYRIS_TEST_ROLE";
/// The test that a child process runs.
const CHILD: &str = "child_process_of_the_tests_below";
const KEY: &str = "pod/data";
const BLOCK: usize = 4096;
const BLOCKS: usize = 4096;

#[test]
fn child_process_of_the_tests_below() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let place = PathBuf::from(std::env::var("LAMPYRIS_TEST_PLACE").unwrap());
    let socket = place.join("keeper.sock");
    match role.as_str() {
        "keeper" => {
            let uid = rustix::process::getuid().as_raw();
            keeper::server::Server::bind(&socket, uid).unwrap().run();
        }
        "readers" => read_until_told(&place.join("mount/data")),
        "sidecar" => plugin::serve(&place),
        "hello" => plugin::read_hello(&place),
        "in flight" => ask_for_one_of_each(&place.join("mount")),
        delay_ms => serve(&place, &Client::new(socket), delay_ms.parse().unwrap()),
    }
}

/// What the sidecar does with a volume: negotiate or resume, record, serve.
fn serve(place: &Path, keeper: &Client, delay_ms: u64) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (meta, mut devices) = keeper.get(KEY).unwrap();
    let bytes = |name: &str| serde_json::from_value::<Vec<u8>>(meta[name].clone()).ok();
    let recorded =
        bytes("request").map(|request| Exchange { request, reply: bytes("reply").unwrap() });
    let delay = Duration::from_millis(delay_ms);
    let files = Arc::new(local_fs::LocalFs { dir: place.join("files"), delay });
    let options = Options { immutable: false, threads: 4 };
    let device = devices.remove(0);
    let negotiated =
        fuse::negotiate(files, device, recorded.as_ref(), options, runtime.handle()).unwrap();
    let Exchange { request, reply } = &negotiated.exchange;
    keeper.put(KEY, json!({"request": request, "reply": reply}), &[]).unwrap();
    let mounted = negotiated.serve().unwrap();
    println!("serving");
    mounted.thread.join().unwrap().unwrap();
}

/// A mount, its keeper, and whoever serves it now.
struct Stage {
    place: tempfile::TempDir,
    keeper: Child,
    server: Option<Child>,
}

impl Stage {
    fn set(delay_ms: u64) -> Self {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("files")).unwrap();
        let mut data = File::create(place.path().join("files/data")).unwrap();
        for block in 0..BLOCKS {
            data.write_all(&content(block)).unwrap();
        }
        let keeper = child(place.path(), "keeper");
        let socket = place.path().join("keeper.sock");
        wait_for("the keeper", || Client::new(socket.clone()).list().is_ok());
        let device = node::mount::mount(&place.path().join("mount"), false).unwrap();
        Client::new(socket).put(KEY, json!({}), &[device.as_fd()]).unwrap();
        drop(device);
        let mut stage = Self { place, keeper, server: None };
        stage.start_server(delay_ms);
        stage
    }

    fn start_server(&mut self, delay_ms: u64) {
        let mut server = child(self.place.path(), &delay_ms.to_string());
        let mut said = String::new();
        let mut out = server.stdout.take().unwrap();
        let mut byte = [0];
        while !said.contains("serving") {
            assert_eq!(out.read(&mut byte).unwrap(), 1, "the server ended: {said}");
            said.push(char::from(byte[0]));
        }
        self.server = Some(server);
    }

    fn kill_server(&mut self) {
        let mut server = self.server.take().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
    }

    fn application(&self, role: &str) -> Child {
        child(self.place.path(), role)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for child in self.server.iter_mut().chain([&mut self.keeper]) {
            let _ = child.kill();
            let _ = child.wait();
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(node::mount::unmount(&self.place.path().join("mount"))).unwrap();
    }
}

fn child(place: &Path, role: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD, "--nocapture"])
        .env(ROLE, role)
        .env("LAMPYRIS_TEST_PLACE", place)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn content(block: usize) -> Vec<u8> {
    (0..BLOCK).map(|at| ((block * 131 + at / 64) % 251) as u8).collect()
}

/// Opens past the page cache, so that every read is a request.
fn open_direct(path: &Path) -> File {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

/// Reads one block into memory aligned as direct reads want it.
fn read_block(file: &File, block: usize) -> Vec<u8> {
    let mut buffer = vec![0; BLOCK * 2];
    let start = buffer.as_ptr().align_offset(BLOCK);
    let aligned = &mut buffer[start..start + BLOCK];
    file.read_exact_at(aligned, (block * BLOCK) as u64).unwrap();
    aligned.to_vec()
}

/// Sixty-four threads read until standard input ends; tells how many reads there were, then the longest.
fn read_until_told(path: &Path) {
    let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let readers: Vec<_> = (0..64)
        .map(|reader| {
            let file = open_direct(path);
            let (stop, reads) = (Arc::clone(&stop), Arc::clone(&reads));
            std::thread::spawn(move || {
                let (mut block, mut longest) = (reader * 61, Duration::ZERO);
                while !stop.load(Ordering::Relaxed) {
                    block = (block * 5 + 1) % BLOCKS;
                    let began = Instant::now();
                    assert_eq!(read_block(&file, block), content(block), "block {block}");
                    longest = longest.max(began.elapsed());
                    if reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(200) {
                        println!("reads");
                    }
                }
                longest
            })
        })
        .collect();
    let mut nothing = Vec::new();
    std::io::stdin().read_to_end(&mut nothing).unwrap();
    stop.store(true, Ordering::Relaxed);
    let longest = readers.into_iter().map(|reader| reader.join().unwrap()).max().unwrap();
    println!("longest {}", longest.as_millis());
}

/// One read, one write and one exclusive creation at once, each of which must succeed.
fn ask_for_one_of_each(mount: &Path) {
    let reader = open_direct(&mount.join("data"));
    let reader = std::thread::spawn(move || read_block(&reader, 7));
    let writer = OpenOptions::new().write(true).open(mount.join("data")).unwrap();
    let writer = std::thread::spawn(move || writer.write_all_at(b"written once", 9 * BLOCK as u64));
    let new = mount.join("new");
    let creator = std::thread::spawn(move || {
        OpenOptions::new().write(true).create_new(true).open(new).map(drop)
    });
    assert_eq!(reader.join().unwrap(), content(7));
    writer.join().unwrap().expect("the write succeeds");
    creator.join().unwrap().expect("the exclusive creation succeeds, though the file is there");
    let exists = OpenOptions::new().write(true).create_new(true).open(mount.join("new"));
    assert_eq!(exists.unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
}

#[test]
fn sixty_four_readers_go_on_over_two_kills_without_an_error() {
    let mut stage = Stage::set(1);
    let mut readers = stage.application("readers");
    let mut said = BufReader::new(readers.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut await_reads = |count| {
        for _ in 0..count {
            assert!(said.any(|line| line == "reads"), "the readers failed");
        }
    };
    for _ in 0..2 {
        await_reads(10);
        stage.kill_server();
        stage.start_server(1);
    }
    // More than can have been on its way to here before the kill.
    await_reads(20);
    drop(readers.stdin.take());
    let longest = said.find_map(|line| line.strip_prefix("longest ")?.parse::<u64>().ok());
    assert!(readers.wait().unwrap().success(), "a reader saw an error or wrong bytes");
    let longest = longest.unwrap();
    assert!(longest < 5000, "the longest read took {longest} ms");
}

#[test]
fn requests_in_flight_at_the_kill_are_answered_by_the_next_server() {
    // Each answer would take a minute: the first server answers none of them.
    let mut stage = Stage::set(60_000);
    let mut application = stage.application("in flight");
    let files = stage.place.path().join("files");
    // The write and the creation are carried out, but nobody was told.
    wait_for("the creation", || files.join("new").exists());
    wait_for("the write", || {
        let data = File::open(files.join("data")).unwrap();
        let mut bytes = [0; 12];
        data.read_exact_at(&mut bytes, 9 * BLOCK as u64).unwrap();
        &bytes == b"written once"
    });
    stage.kill_server();
    assert_eq!(application.try_wait().unwrap(), None, "nothing was answered yet");
    stage.start_server(0);
    assert!(application.wait().unwrap().success());
}

#[test]
fn a_server_that_dies_before_it_answers_init_can_be_replaced() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("mount");
    let device = node::mount::mount(&target, true).unwrap();
    // Read by a server that dies: nothing was recorded, nothing answered.
    let first = sidecar::resume::read_init(&device).unwrap();
    let second = sidecar::resume::read_init(&device).unwrap();
    assert_eq!(first[16..], second[16..], "the same request, but for its id");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let dir = place.path().join("files");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("hello"), "world").unwrap();
    let files = || Arc::new(local_fs::LocalFs { dir: dir.clone(), delay: Duration::ZERO });
    let options = Options { immutable: false, threads: 2 };
    let recorded = {
        // Negotiated and recorded, but dead before the kernel got the answer.
        let device = device.try_clone().unwrap();
        fuse::negotiate(files(), device, None, options, runtime.handle()).unwrap().exchange.clone()
    };
    let resumed =
        fuse::negotiate(files(), device, Some(&recorded), options, runtime.handle()).unwrap();
    let mounted = resumed.serve().unwrap();
    assert_eq!(std::fs::read_to_string(target.join("hello")).unwrap(), "world");
    let names: Vec<_> =
        std::fs::read_dir(&target).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["hello"]);
    runtime.block_on(node::mount::unmount(&target)).unwrap();
    mounted.thread.join().unwrap().unwrap();
}

#[test]
fn a_different_answer_to_init_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("mount");
    let device = node::mount::mount(&target, true).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let dir = place.path().to_owned();
    let files = Arc::new(local_fs::LocalFs { dir, delay: Duration::ZERO });
    let options = Options { immutable: false, threads: 2 };
    let again = device.try_clone().unwrap();
    let first =
        fuse::negotiate(Arc::clone(&files), again, None, options, runtime.handle()).unwrap();
    let mut recorded = first.exchange.clone();
    recorded.reply[30] ^= 1;
    let refused = fuse::negotiate(files, device, Some(&recorded), options, runtime.handle());
    assert!(matches!(refused, Err(sidecar::resume::ResumeError::Renegotiated)));
    drop(first);
    runtime.block_on(node::mount::unmount(&target)).unwrap();
}
