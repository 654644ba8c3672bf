//! The ring's server against applications that lie, block, or are killed: it loses nothing, gives back everything, and goes on
//! serving another application with the right bytes.
//!
//! The server and each application that is killed or has other rights is a process of its own: this test binary, started
//! again with a role. So what the server holds can be counted. Needs root, as the other tests of this crate.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]
#![allow(clippy::print_stdout, reason = "a role tells the test by it")]

#[path = "../takeover/local_fs.rs"]
mod local_fs;
mod raw;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use raw::{Answered, QUEUE, Raw};
use ring::client::{Iov, OpenFile, Ring, Transfer};
use ring::layout::{Control, ControlKind, LENGTH_MAX, Op, Submission};
use ring::queue::Entry;
use sidecar::ring_server::{Mounts, RingServer};

/// Names the role of a child process.
const ROLE: &str = "LAMPYRIS_TEST_ROLE";
const PLACE: &str = "LAMPYRIS_TEST_PLACE";
/// The test that a child process runs.
const CHILD: &str = "child_process_of_the_tests_below";
const SIZE: usize = 1 << 20;
const IOV: usize = 64 << 10;
const WAIT: Option<Duration> = Some(Duration::from_secs(20));
/// A group that owns a file here and that no account has.
const GROUP: u32 = 41_234;

#[test]
fn child_process_of_the_tests_below() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let place = PathBuf::from(std::env::var(PLACE).unwrap());
    match role.as_str() {
        "server" => serve(&place),
        "reader" => read_until_killed(&place),
        "opener" => open_until_killed(&place),
        _ => println!("opened {:?}", connect(&place).open("/data/of-group", 0).map(|_| ())),
    }
}

fn serve(place: &Path) {
    let runtime = sidecar::run::runtime().unwrap();
    runtime.block_on(async {
        let mounts = Arc::new(Mounts::default());
        let files = local_fs::LocalFs { dir: place.join("files"), delay: Duration::ZERO };
        mounts.add("/data", Arc::new(files));
        let (_stop, stopped) = tokio::sync::watch::channel(false);
        let server = RingServer::bind(&place.join("ring.sock"), mounts).unwrap();
        println!("ready");
        server.run(stopped).await;
    });
}

fn connect(place: &Path) -> Ring {
    Ring::connect(&place.join("ring.sock"), 8).unwrap()
}

/// Has eight reads under way that are not answered, in memory that it has touched.
fn read_until_killed(place: &Path) {
    let mut ring = connect(place);
    let iov = ring.register(32 << 20).unwrap();
    let file = ring.open("/data/held", 0).unwrap().id;
    for _ in 0..8 {
        let read = Transfer {
            file,
            iov: iov.id,
            iov_offset: 0,
            file_offset: 0,
            length: 4096,
            user_data: 0,
        };
        assert!(ring.prepare(Op::Read, read).unwrap());
    }
    ring.submit().unwrap();
    println!("under way");
    let answered = ring.wait(None);
    panic!("{answered:?}");
}

/// Waits for the answer to an open.
fn open_until_killed(place: &Path) {
    let raw = Raw::connect(&place.join("ring.sock"));
    raw.ask(Control { length: 10, ..Control::new(ControlKind::Open) }, b"/data/data");
    println!("under way");
    panic!("{:?}", raw.answer());
}

fn byte(at: usize) -> u8 {
    (at.wrapping_mul(31) >> 3) as u8
}

/// A server in a process of its own.
struct Server {
    place: tempfile::TempDir,
    process: Child,
}

impl Server {
    fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        std::fs::set_permissions(place.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let files = place.path().join("files");
        std::fs::create_dir(&files).unwrap();
        let bytes: Vec<_> = (0..SIZE).map(byte).collect();
        for name in ["data", "held", "of-group"] {
            std::fs::write(files.join(name), &bytes).unwrap();
        }
        let of_group = files.join("of-group");
        std::os::unix::fs::chown(&of_group, Some(0), Some(GROUP)).unwrap();
        std::fs::set_permissions(of_group, PermissionsExt::from_mode(0o640)).unwrap();
        let process = say(child(place.path(), "server"), "ready").0;
        Self { place, process }
    }

    fn socket(&self) -> PathBuf {
        self.place.path().join("ring.sock")
    }

    /// Makes the file system wait, as if the store were away, for `names` or for `bytes` of the file `held`.
    fn take_away(&self, what: &str) {
        File::create(self.place.path().join(what)).unwrap();
    }

    fn give_back(&self, what: &str) {
        std::fs::remove_file(self.place.path().join(what)).unwrap();
    }

    /// Descriptors, threads and shared mappings that the server has.
    fn holds(&self) -> [usize; 3] {
        let proc = PathBuf::from(format!("/proc/{}", self.process.id()));
        let maps = std::fs::read_to_string(proc.join("maps")).unwrap();
        [
            std::fs::read_dir(proc.join("fd")).unwrap().count(),
            std::fs::read_dir(proc.join("task")).unwrap().count(),
            maps.lines().filter(|line| line.contains("memfd:lampyris")).count(),
        ]
    }

    /// KiB of memory that the server has of its own.
    fn private_kib(&self) -> u64 {
        let status = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn child(place: &Path, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", CHILD, "--nocapture"]).env(ROLE, role).env(PLACE, place);
    command
}

/// Starts a process and waits until it says so.
fn say(mut command: Command, what: &str) -> (Child, ChildStdin) {
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.ends_with(what)), "the process ended without a word");
    let stdin = process.stdin.take().unwrap();
    (process, stdin)
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// An application that keeps to the rules, with memory beside its reads that nobody may touch.
struct Honest {
    ring: Ring,
    iov: Iov,
    file: OpenFile,
    untouched: Iov,
}

impl Honest {
    fn of(server: &Server) -> Self {
        let mut ring = connect(server.place.path());
        let (iov, untouched) = (ring.register(SIZE).unwrap(), ring.register(IOV).unwrap());
        untouched.region.copy_in(0, &[7; IOV]).unwrap();
        let file = ring.open("/data/data", 0).unwrap();
        assert_eq!(file.size, SIZE as u64);
        Self { ring, iov, file, untouched }
    }

    /// Reads the whole file.
    fn check(&mut self) {
        self.iov.region.zero(0, SIZE).unwrap();
        let (file, iov, length) = (self.file.id, self.iov.id, SIZE as u32);
        let read = Transfer { file, iov, iov_offset: 0, file_offset: 0, length, user_data: 1 };
        assert!(self.ring.prepare(Op::Read, read).unwrap());
        self.ring.submit().unwrap();
        let done = self.ring.wait(WAIT).unwrap().expect("an answer in time");
        assert_eq!((done.user_data, done.result), (1, SIZE as i64));
        let mut bytes = vec![0; SIZE];
        self.iov.region.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().enumerate().all(|(at, found)| *found == byte(at)));
        let mut beside = vec![0; IOV];
        self.untouched.region.copy_out(0, &mut beside).unwrap();
        assert!(beside.iter().all(|byte| *byte == 7), "memory was written that no read named");
        assert_eq!(self.ring.size(self.file.id).unwrap(), SIZE as u64);
    }
}

/// A raw application with a file and an iov, and a read of both.
fn armed(server: &Server, name: &str) -> (Raw, Submission) {
    let mut raw = Raw::connect(&server.socket());
    let (iov, file) = (raw.register(IOV), raw.open(&format!("/data/{name}")));
    let length = IOV as u32;
    let (iov_offset, file_offset) = (0, 4096);
    (raw, Submission { op: Op::Read, file, iov, length, iov_offset, file_offset, user_data: 77 })
}

#[test]
fn whatever_one_field_of_an_entry_says_it_is_refused_and_the_others_go_on() {
    let server = Server::start();
    let mut honest = Honest::of(&server);
    let before = server.holds();
    let (mut raw, read) = armed(&server, "data");
    let good = read.encode();
    let half = |word: u64, low: u32, high: u32| {
        let lower = if low == 0 { word & 0xffff_ffff } else { low.into() };
        let upper = if high == 0 { word >> 32 } else { high.into() };
        lower | upper << 32
    };
    let mut lies: Vec<(usize, u64)> = Vec::new();
    for op in [2, 4, 255, 0x0100_0001] {
        lies.push((0, half(good[0], op, 0)));
    }
    for file in [99, read.iov, u32::MAX] {
        lies.push((0, half(good[0], 0, file)));
    }
    for iov in [99, read.file, u32::MAX] {
        lies.push((1, half(good[1], iov, 0)));
    }
    for length in [IOV as u32 + 1, LENGTH_MAX, LENGTH_MAX + 1, u32::MAX] {
        lies.push((1, half(good[1], 0, length)));
    }
    for offset in [1, IOV as u64, 1 << 32, 1 << 63, u64::MAX, u64::MAX - IOV as u64 + 1] {
        lies.push((2, offset));
    }
    lies.extend([(3, 1 << 63), (3, u64::MAX)]);
    lies.extend((5..8).flat_map(|word| [(word, 1), (word, 1 << 63)]));
    for (word, value) in lies {
        let mut entry: Entry = good;
        entry[word] = value;
        raw.submit(&entry);
        let Answered::Completed(done) = raw.outcome() else { panic!("{word} {value:#x}: hung up") };
        assert_eq!(done.user_data, 77);
        assert!(done.result < 0, "word {word} = {value:#x} gave {}", done.result);
        raw.submit(&good);
        let Answered::Completed(done) = raw.outcome() else { panic!("hung up after {word}") };
        assert_eq!(done.result, IOV as i64, "after word {word} = {value:#x}");
    }
    honest.check();
    drop(raw);
    wait_for("what the liar had to go", || server.holds() == before);
}

#[test]
fn an_index_out_of_range_ends_its_own_connection_alone() {
    let server = Server::start();
    let mut honest = Honest::of(&server);
    let before = server.holds();
    // Queue, field, and whether the server reads there what the application says.
    let fields = [
        (QUEUE.submissions, QUEUE.tail, true),
        (QUEUE.submissions, QUEUE.head, false),
        (QUEUE.submissions, QUEUE.sleeping, false),
        (QUEUE.completions, QUEUE.head, true),
        (QUEUE.completions, QUEUE.tail, false),
        (QUEUE.completions, QUEUE.sleeping, false),
    ];
    for (queue, field, is_read) in fields {
        for value in [10, 1 << 31, u32::MAX - 7, u32::MAX - 8] {
            let (mut raw, read) = armed(&server, "data");
            raw.submit(&read.encode());
            let Answered::Completed(done) = raw.outcome() else { panic!("hung up before the lie") };
            assert_eq!(done.result, IOV as i64);
            raw.overwrite(queue, field, value);
            if (queue, field) == (QUEUE.submissions, QUEUE.tail) {
                raw.wake();
            } else {
                raw.submit(&read.encode());
            }
            let ended = raw.hung_up_or(|raw| raw.published(2));
            assert_eq!(ended, is_read, "queue at {queue}, field {field}, value {value:#x}");
            honest.check();
        }
    }
    wait_for("what the liars had to go", || server.holds() == before);
}

/// Changes every word of its queues at random, all the time.
#[test]
fn a_queue_that_changes_at_every_moment_harms_nobody_else() {
    const WORDS: usize = 300;
    let server = Server::start();
    let mut honest = Honest::of(&server);
    let before = server.holds();
    let until = Instant::now() + Duration::from_secs(2);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut ended = 0;
    while Instant::now() < until || ended < 3 {
        assert!(Instant::now() < until + Duration::from_secs(20), "{ended} were found out");
        let (mut raw, read) = armed(&server, "data");
        let stop = Arc::new(AtomicBool::new(false));
        let (flipped, told) = (raw.region(), Arc::clone(&stop));
        seed = seed.rotate_left(9) ^ 0x5851_f42d_4c95_7f2d;
        let mut state = seed;
        let flipping = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                for _ in 0..WORDS {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let at = (state >> 20) as usize % (flipped.len() / 8) * 8;
                    // Small numbers more often: they pass more checks.
                    let value = if state & 1 == 0 { state >> 59 } else { state };
                    flipped.atomic_u64(at).unwrap().store(value, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        for _ in 0..20 {
            raw.submit(&read.encode());
            raw.wake();
            honest.check();
            if raw.is_hung_up() {
                ended += 1;
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        flipping.join().unwrap();
    }
    wait_for("what the liars had to go", || server.holds() == before);
    honest.check();
}

#[test]
fn doorbells_that_are_full_or_block_hold_nobody_up() {
    let server = Server::start();
    let mut honest = Honest::of(&server);
    let before = server.holds();
    let (mut raw, read) = armed(&server, "data");
    raw.make_doorbells_block();
    for round in 1..=3u32 {
        raw.fill_completion_doorbell();
        raw.overwrite(QUEUE.completions, QUEUE.sleeping, 1);
        raw.submit(&read.encode());
        wait_for("the completion", || raw.published(round));
        // The thread is woken by the socket, and finds the other doorbell silent.
        raw.ask(Control { id: read.file, ..Control::new(ControlKind::Stat) }, b"");
        assert_eq!(raw.answer().value, SIZE as u64);
        honest.check();
    }
    drop(raw);
    wait_for("what it had to go", || server.holds() == before);
}

#[test]
fn an_application_killed_with_reads_under_way_leaves_nothing_behind() {
    let server = Server::start();
    let mut honest = Honest::of(&server);
    let (before, mut memory) = (server.holds(), 0);
    for round in 0..6 {
        server.take_away("bytes");
        let (mut reader, _stdin) = say(child(server.place.path(), "reader"), "under way");
        // What it reads does not come, what others read does.
        honest.check();
        assert!(server.holds() > before);
        reader.kill().unwrap();
        reader.wait().unwrap();
        honest.check();
        server.give_back("bytes");
        wait_for("what the dead one had to go", || server.holds() == before);
        if round == 2 {
            // Everything that is kept for good has been made by now.
            memory = server.private_kib();
        }
    }
    let grown = server.private_kib().saturating_sub(memory);
    assert!(grown < 4096, "three dead applications of 32 MiB left {grown} KiB");
    honest.check();
}

#[test]
fn while_an_open_waits_for_the_store_reads_of_open_files_go_on() {
    let server = Server::start();
    let mut other = Honest::of(&server);
    let before = server.holds();
    let (mut raw, read) = armed(&server, "data");
    let stat = Control { id: read.file, ..Control::new(ControlKind::Stat) };
    let open = Control { length: 10, ..Control::new(ControlKind::Open) };
    let mut reads = 0;
    for (question, path) in [(open, &b"/data/held"[..]), (stat, b"")] {
        server.take_away("names");
        raw.ask(question, path);
        for _ in 0..3 {
            raw.submit(&read.encode());
            let Answered::Completed(done) = raw.outcome() else { panic!("hung up") };
            assert_eq!(done.result, IOV as i64);
            reads += 1;
        }
        assert!(raw.is_unanswered(), "{reads} reads were answered first");
        server.give_back("names");
        let answer = raw.answer();
        assert_eq!((answer.kind, answer.status, answer.value), (question.kind, 0, SIZE as u64));
    }
    // One that is killed while it waits is gone when the answer has come.
    server.take_away("names");
    let (mut opener, _stdin) = say(child(server.place.path(), "opener"), "under way");
    opener.kill().unwrap();
    opener.wait().unwrap();
    drop(raw);
    server.give_back("names");
    wait_for("what they had to go", || server.holds() == before);
    other.check();
}

/// As the kernel does for a mount: by the groups of the process that connected.
#[test]
fn a_supplementary_group_gives_its_rights() {
    let server = Server::start();
    // The program must be where another user can execute it.
    let program = server.place.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    for (groups, expected) in [
        (format!("--groups={GROUP}"), "opened Ok(())"),
        ("--clear-groups".to_owned(), "opened Err(Refused(13))"),
    ] {
        let ran = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", &groups])
            .arg(&program)
            .args(["--exact", CHILD, "--nocapture"])
            .env(ROLE, "other user")
            .env(PLACE, server.place.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(said.contains(expected), "{groups}: {said} {ran:?}");
    }
}
