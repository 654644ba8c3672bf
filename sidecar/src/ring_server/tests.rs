#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]

use super::*;
use crate::dataset_fs::{DatasetFs, DatasetOptions, SharedDatasetFs};
use bytes::Bytes;
use ring::client::{Ring, RingError, Transfer};
use ring::event::EventFd;
use ring::fd::{recv_with_fds, send_with_fds};
use ring::layout::{CONTROL_BYTES, Control, ControlKind, Op, Submission, VERSION, region_bytes};
use ring::queue::Producer;
use ring::shm::Region;
use source::{Credentials, Failure, Object, Source};
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

const SIZE: u64 = 3 << 20;

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(31) >> 3) as u8
}

/// One object whose bytes are computed.
#[derive(Debug)]
struct Made;

#[async_trait::async_trait]
impl Source for Made {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        let identity = "1".into();
        Ok(vec![Object { path: "dir/file".into(), size: SIZE, identity, modified_ms: 0 }])
    }

    async fn read(&self, _: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        Ok(range.map(byte).collect())
    }

    fn set_credentials(&self, _: Credentials) {}

    fn describe(&self) -> String {
        "made".into()
    }
}

/// A server on its own runtime, as the sidecar has it.
struct Served {
    directory: tempfile::TempDir,
    connections: Arc<AtomicUsize>,
    stop: watch::Sender<bool>,
    _runtime: tokio::runtime::Runtime,
}

impl Served {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (stop, stopped) = watch::channel(false);
        let connections = {
            let _inside = runtime.enter();
            let mounts = Arc::new(Mounts::default());
            let fs = DatasetFs::start(Arc::new(Made), DatasetOptions::default(), Arc::new(|_| {}));
            mounts.add("/data", Arc::new(SharedDatasetFs(fs)));
            let server = RingServer::bind(&directory.path().join("ring.sock"), mounts).unwrap();
            let connections = server.connections();
            runtime.spawn(server.run(stopped));
            connections
        };
        Self { directory, connections, stop, _runtime: runtime }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("ring.sock")
    }

    fn connect(&self) -> Ring {
        Ring::connect(&self.socket(), 8).unwrap()
    }

    fn wait_connections(&self, count: usize) {
        let until = Instant::now() + Duration::from_secs(20);
        while self.connections.load(Ordering::Relaxed) != count {
            assert!(Instant::now() < until, "connections did not become {count}");
            std::thread::yield_now();
        }
    }
}

const WAIT: Option<Duration> = Some(Duration::from_secs(20));

fn transfer(file: u32, iov: u32, length: u32) -> Transfer {
    Transfer { file, iov, iov_offset: 0, file_offset: 0, length, user_data: 0 }
}

fn result_of(ring: &mut Ring, op: Op, transfer: Transfer) -> i64 {
    assert!(ring.prepare(op, transfer).unwrap());
    ring.submit().unwrap();
    ring.wait(WAIT).unwrap().unwrap().result
}

#[test]
fn many_reads_under_way_each_land_in_their_place() {
    let served = Served::start();
    let mut ring = served.connect();
    let iov = ring.register(SIZE as usize).unwrap();
    let file = ring.open("/data/dir/file", 0).unwrap();
    assert_eq!(file.size, SIZE);
    let step = 384 << 10;
    for at in 0..8u64 {
        let (file_offset, user_data) = (at * step, 100 + at);
        let iov_offset = file_offset;
        let length = step as u32;
        let one =
            Transfer { file_offset, iov_offset, user_data, ..transfer(file.id, iov.id, length) };
        assert!(ring.prepare(Op::Read, one).unwrap());
    }
    assert!(!ring.prepare(Op::Read, transfer(file.id, iov.id, 1)).unwrap());
    ring.submit().unwrap();
    let mut seen: Vec<_> = (0..8).map(|_| ring.wait(WAIT).unwrap().unwrap()).collect();
    seen.sort_by_key(|done| done.user_data);
    assert!(seen.iter().enumerate().all(|(at, done)| done.user_data == 100 + at as u64));
    assert!(seen.iter().all(|done| done.result == step as i64), "{seen:?}");
    let mut bytes = vec![0; SIZE as usize];
    iov.region.copy_out(0, &mut bytes).unwrap();
    assert!(bytes.iter().zip(0..).all(|(found, at)| *found == byte(at)));
    ring.close(file.id).unwrap();
}

#[test]
fn refused_submissions_complete_with_an_errno_and_the_ring_goes_on() {
    let served = Served::start();
    let mut ring = served.connect();
    let iov = ring.register(4096).unwrap();
    let file = ring.open("/data/dir/file", 0).unwrap().id;
    let good = transfer(file, iov.id, 4096);
    assert_eq!(result_of(&mut ring, Op::Read, Transfer { file: 99, ..good }), -9);
    assert_eq!(result_of(&mut ring, Op::Read, Transfer { iov: 99, ..good }), -22);
    assert_eq!(result_of(&mut ring, Op::Read, Transfer { iov_offset: 1, ..good }), -22);
    assert_eq!(result_of(&mut ring, Op::Read, Transfer { iov_offset: u64::MAX, ..good }), -22);
    assert_eq!(result_of(&mut ring, Op::Read, Transfer { file_offset: u64::MAX, ..good }), -22);
    assert_eq!(result_of(&mut ring, Op::Write, good), -9);
    assert_eq!(result_of(&mut ring, Op::Read, Transfer { file_offset: SIZE, ..good }), 0);
    assert_eq!(result_of(&mut ring, Op::Read, good), 4096);
}

#[test]
fn paths_outside_the_mounts_are_not_found() {
    let served = Served::start();
    let mut ring = served.connect();
    let errno = |outcome| match outcome {
        Err(RingError::Refused(errno)) => errno,
        other => panic!("{other:?}"),
    };
    assert_eq!(errno(ring.open("/etc/passwd", 0)), libc::ENOENT);
    assert_eq!(errno(ring.open("/database", 0)), libc::ENOENT);
    assert_eq!(errno(ring.open("/data/../etc/passwd", 0)), libc::EINVAL);
    assert_eq!(errno(ring.open("/data/dir", 0)), libc::EISDIR);
    assert_eq!(errno(ring.open("/data/none", 0)), libc::ENOENT);
    assert_eq!(errno(ring.open("/data/dir/file", 77)), libc::EINVAL);
}

#[test]
fn an_application_that_dies_leaves_nothing_and_stalls_nobody() {
    let served = Served::start();
    let mut stays = served.connect();
    let iov = stays.register(4096).unwrap();
    let file = stays.open("/data/dir/file", 0).unwrap().id;
    for _ in 0..20 {
        let mut dies = served.connect();
        let iov = dies.register(1 << 20).unwrap();
        let file = dies.open("/data/dir/file", 0).unwrap().id;
        assert!(dies.prepare(Op::Read, transfer(file, iov.id, 1 << 20)).unwrap());
        dies.submit().unwrap();
    }
    served.wait_connections(1);
    assert_eq!(result_of(&mut stays, Op::Read, transfer(file, iov.id, 4096)), 4096);
}

#[test]
fn a_silent_or_lying_application_is_hung_up_on_and_others_go_on() {
    use std::io::{Read, Write};
    let served = Served::start();
    let mut honest = served.connect();
    let mut noise = UnixStream::connect(served.socket()).unwrap();
    noise.write_all(&[7; 64]).unwrap();
    let mut rest = Vec::new();
    noise.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    let mut greedy = UnixStream::connect(served.socket()).unwrap();
    let hello = Control { flags: VERSION, value: 1 << 30, ..Control::new(ControlKind::Hello) };
    greedy.write_all(&hello.encode()).unwrap();
    greedy.read_to_end(&mut rest).unwrap();
    let refused = Control::decode(rest.first_chunk().unwrap()).unwrap();
    assert_eq!(refused.status, -libc::EINVAL);
    served.wait_connections(1);
    let iov = honest.register(4096).unwrap();
    let file = honest.open("/data/dir/file", 0).unwrap().id;
    assert_eq!(result_of(&mut honest, Op::Read, transfer(file, iov.id, 4096)), 4096);
}

/// An application that keeps to no protocol once it is connected.
struct Wild {
    socket: UnixStream,
    queues: Arc<Region>,
    submissions: Producer,
}

impl Wild {
    const ENTRIES: u32 = 8;

    /// Connects, and asks for memory and a file: both are its numbers 1 and 2.
    fn connect(socket: &Path) -> Self {
        let socket = UnixStream::connect(socket).unwrap();
        let entries = Self::ENTRIES;
        let hello =
            Control { flags: VERSION, value: entries.into(), ..Control::new(ControlKind::Hello) };
        let fds = Self::ask(&socket, &hello.encode(), None).unwrap();
        let [queues, submit, _complete] = fds.try_into().unwrap();
        let queues = Arc::new(Region::open(queues, region_bytes(entries)).unwrap());
        let submit = EventFd::from_fd(submit);
        let submissions = Producer::new(Arc::clone(&queues), 0, entries, submit).unwrap();
        let memory = Region::create("wild", 1 << 16).unwrap();
        memory.populate().unwrap();
        let register = Control::new(ControlKind::Register).encode();
        Self::ask(&socket, &register, Some(&memory)).unwrap();
        let path = b"/data/dir/file";
        let open = Control { length: path.len() as u32, ..Control::new(ControlKind::Open) };
        Self::ask(&socket, &[&open.encode()[..], path].concat(), None).unwrap();
        Self { socket, queues, submissions }
    }

    /// One message and the descriptors of its answer; `None` when the sidecar hung up.
    fn ask(
        socket: &UnixStream,
        bytes: &[u8],
        memory: Option<&Region>,
    ) -> Option<Vec<std::os::fd::OwnedFd>> {
        let fds: Vec<_> = memory.iter().map(|region| region.fd()).collect();
        send_with_fds(socket.as_fd(), bytes, &fds).ok()?;
        let (count, fds) = recv_with_fds(socket, &mut [0; CONTROL_BYTES], 3).ok()?;
        (count == CONTROL_BYTES).then_some(fds)
    }

    /// Submits a few entries that were right, with bytes changed; or writes anywhere into the queues.
    fn misbehave(&mut self, random: &mut rpc::fuzz::Random) {
        for _ in 0..=random.below(8) {
            let (op, file) = ([Op::Read, Op::Write, Op::Sync][random.below(3)], 2);
            let at = random.number() % SIZE;
            let length = random.below(1 << 16) as u32;
            let (iov, iov_offset, user_data) = (1, 0, random.number());
            let good = Submission { op, file, iov, length, iov_offset, file_offset: at, user_data };
            let mut bytes = good.encode().map(u64::to_le_bytes).concat();
            let donor = bytes.clone();
            random.mutate(&mut bytes, &donor);
            bytes.resize(64, 0);
            let words = bytes.as_chunks::<8>().0;
            let entry = std::array::from_fn(|word| u64::from_le_bytes(words[word]));
            // Refused once the indices have been written over.
            let _ = self.submissions.push(&entry);
        }
        if random.below(4) == 0 {
            let word = self.queues.atomic_u32(random.below(self.queues.len() / 4) * 4).unwrap();
            word.store(random.number() as u32, Ordering::Relaxed);
        }
        let _ = self.submissions.ring();
        if random.below(4) == 0 {
            let mut control =
                Control { id: 1, ..Control::new(ControlKind::Stat) }.encode().to_vec();
            let donor = control.clone();
            random.mutate(&mut control, &donor);
            let _ = send_with_fds(self.socket.as_fd(), &control, &[]);
        }
    }
}

#[test]
fn no_entry_index_or_message_of_an_application_harms_another() {
    let served = Served::start();
    let mut honest = served.connect();
    let iov = honest.register(4096).unwrap();
    let file = honest.open("/data/dir/file", 0).unwrap().id;
    let runs = rpc::fuzz::run(|random| {
        let mut wild = Wild::connect(&served.socket());
        for _ in 0..=random.below(4) {
            wild.misbehave(random);
        }
        let file_offset = random.number() % (SIZE - 4096);
        let read = Transfer { file_offset, ..transfer(file, iov.id, 4096) };
        assert_eq!(result_of(&mut honest, Op::Read, read), 4096);
        let mut bytes = [0; 4096];
        iov.region.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().zip(file_offset..).all(|(found, at)| *found == byte(at)));
        drop(wild);
        served.wait_connections(1);
    });
    assert!(runs > 10, "only {runs} runs");
}

#[test]
fn an_application_is_hung_up_on_when_the_sidecar_ends() {
    let served = Served::start();
    let mut ring = served.connect();
    let file = ring.open("/data/dir/file", 0).unwrap();
    served.stop.send_replace(true);
    served.wait_connections(0);
    assert!(matches!(ring.wait(WAIT), Err(RingError::HungUp)));
    ring.close(file.id).unwrap_err();
}

#[test]
fn rights_follow_owner_group_and_others() {
    let attr = Attr {
        ino: 2,
        kind: Kind::File,
        size: 0,
        mode: 0o640,
        uid: 10,
        gid: 20,
        links: 1,
        accessed_ns: 0,
        modified_ns: 0,
        changed_ns: 0,
        block_size: 4096,
    };
    let may = |uid, gid, groups: &[u32], want| {
        let rights = Rights { caller: Caller { uid, gid }, groups: groups.to_vec() };
        rights.allow(&attr, want)
    };
    assert!(may(10, 0, &[], 6) && may(0, 0, &[], 7));
    assert!(may(11, 20, &[], 4) && !may(11, 20, &[], 2));
    assert!(!may(11, 21, &[], 4));
    assert!(may(11, 21, &[5, 20], 4) && !may(11, 21, &[5, 20], 2) && !may(11, 21, &[5], 4));
    // The owner's bits are the owner's, whatever groups they are in.
    let none = Attr { mode: 0o040, ..attr };
    let owner = Rights { caller: Caller { uid: 10, gid: 20 }, groups: vec![20] };
    assert!(!owner.allow(&none, 4));
}

#[test]
fn a_program_in_c_reads_the_same_bytes() {
    let served = Served::start();
    let built = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = served.directory.path().join("ring-c");
    let source = "ring/tests/ring.c";
    let compiled = std::process::Command::new("cc")
        .args(["-std=c11", "-Wall", "-Werror", source, "-l:libring.so", "-L"])
        .arg(&built)
        .arg(format!("-Wl,-rpath,{}", built.display()))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = std::process::Command::new(&program)
        .arg(served.socket())
        .arg("/data/dir/file")
        .output()
        .unwrap();
    assert!(ran.status.success(), "{:?} {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    assert_eq!(ran.stdout.len() as u64, SIZE);
    assert!(ran.stdout.iter().zip(0..).all(|(found, at)| *found == byte(at)));
}
