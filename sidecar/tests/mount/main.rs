//! `lampyris-mount serve` as it runs in a pod, but for Kubernetes: real servers of the store and of S3, real mounts, and
//! the node plugin's end of the hand-over.
//!
//! Needs root, /dev/fuse, a C compiler, and the binaries of `meta` and `storage-node` from the same build. An application
//! that has a file open while the sidecar is replaced is a process of its own: this test binary, started again. The test
//! itself must not have one: a child has it too until it executes its program, closing it there asks the sidecar, and
//! while that one is dead no other could be started.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(clippy::cast_possible_truncation, reason = "bytes are made of the low bits")]
#![allow(clippy::cast_precision_loss, clippy::float_cmp, reason = "small whole numbers")]
#![allow(clippy::print_stdout, reason = "what the processes say is shown with a failure")]

#[path = "../../../scan-agent/tests/cluster/mod.rs"]
mod cluster;
#[path = "../../../scan-agent/source/tests/s3_server/mod.rs"]
mod s3_server;
mod stage;

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use keeper::handover::Volume;
use ring::client::{Ring, Transfer};
use ring::layout::Op;
use serde_json::json;
use stage::{Application, Stage, volume};

const MIB: usize = 1 << 20;
/// What a sidecar may hold when it has nothing to do.
const RESIDENT_MIB: u64 = 32;
/// Names the file that a child process writes.
const HELD: &str = "LAMPYRIS_TEST_HELD";
/// The test that a child process runs.
const CHILD: &str = "child_process_of_the_tests_below";

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(seed | 1) >> 9) as u8).collect()
}

/// Writes what it is told to a file that it keeps open, and answers each command with its outcome.
#[test]
fn child_process_of_the_tests_below() {
    let Some(path) = std::env::var_os(HELD) else { return };
    let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    for line in std::io::stdin().lock().lines().map(Result::unwrap) {
        let outcome = match line.as_str() {
            "fsync" => file.sync_all(),
            text => file.write_all(text.as_bytes()),
        };
        println!("\ndid {}", outcome.map_or_else(|error| error.to_string(), |()| "it".to_owned()));
    }
}

/// A volume over a directory of the store that is written.
fn store_volume(stage_manager: &str) -> Volume {
    let source = json!({"cluster": {"manager": stage_manager, "path": "/sets/x"}});
    volume("store", "/mnt/store", false, source)
}

#[test]
fn files_of_the_store_behave_through_the_kernel_and_through_the_ring() {
    let cluster = cluster::Cluster::start();
    let stage = Stage::set(vec![store_volume(&cluster.manager)]);
    let root = stage.mounted("store");
    let bytes = pattern(5, 64 * MIB);
    fs::create_dir(root.join("runs")).unwrap();
    let mut file = File::create(root.join("runs/a")).unwrap();
    for piece in bytes.chunks(MIB) {
        file.write_all(piece).unwrap();
    }
    file.sync_all().unwrap();
    drop(file);
    assert!(fs::read(root.join("runs/a")).unwrap() == bytes, "bytes read back");
    fs::rename(root.join("runs/a"), root.join("runs/b")).unwrap();
    std::os::unix::fs::symlink("runs/b", root.join("link")).unwrap();
    assert_eq!(names(&root), ["link", "runs"]);
    assert_eq!(names(&root.join("runs")), ["b"]);
    assert_eq!(fs::metadata(root.join("link")).unwrap().len(), bytes.len() as u64);
    let taken = fs::create_dir(root.join("runs")).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AlreadyExists);

    // The same file by the ring, under the path that the pod knows, and from another client.
    assert!(read_by_ring(&stage.ring(), "/mnt/store/runs/b") == bytes);
    assert!(read_by_c(&stage, "/mnt/store/runs/b") == bytes);
    if let Some(read) = read_by_python(&stage, "/mnt/store/runs/b") {
        assert!(read == bytes);
    }
    assert!(read_by_other_client(&stage, &cluster, "/sets/x/runs/b") == bytes);

    // A cut and a hole.
    let file = OpenOptions::new().write(true).open(root.join("runs/b")).unwrap();
    file.set_len(MIB as u64 + 3).unwrap();
    file.set_len(2 * MIB as u64).unwrap();
    drop(file);
    let cut = fs::read(root.join("runs/b")).unwrap();
    assert!(cut[..MIB + 3] == bytes[..MIB + 3] && cut[MIB + 3..] == vec![0; MIB - 3]);
    fs::remove_file(root.join("runs/b")).unwrap();
    fs::remove_file(root.join("link")).unwrap();
    fs::remove_dir(root.join("runs")).unwrap();
    assert!(names(&root).is_empty());
    assert!(stage.admin("/state").contains("\"served\":true"));

    let metrics = stage.admin("/metrics");
    let shown = |name: &str| figure(&metrics, &format!("lampyris_mount_{name}"));
    let asked = |name: &str, what: &str| shown(&format!("{name}{{volume=\"store\",{what}}}"));
    assert!(shown("fuse_requests_total") > 64.0);
    assert_eq!(shown("written_bytes_total{volume=\"store\"}"), (64 * MIB) as f64);
    // By ring and by C; what the mount and Python read comes on top.
    assert!(shown("read_bytes_total{volume=\"store\"}") >= (2 * 64 * MIB) as f64);
    assert_eq!(shown("unsaved_bytes{volume=\"store\"}"), 0.0);
    assert!(asked("operation_seconds_count", "operation=\"write\"") >= 64.0);
    assert!(asked("operation_seconds_count", "operation=\"sync\"") >= 1.0);
    let absent = asked("operation_errors_total", "operation=\"names\",errno=\"ENOENT\"");
    assert!(absent >= 1.0, "each file that was made had not been there");
}

#[test]
fn a_dataset_on_s3_is_read_and_never_written() {
    let Some(s3) = s3_server::server() else { return };
    let bytes = pattern(9, 5 * MIB + 77);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(s3.put("set/part/one", bytes.clone()));
    let config = source::SourceConfig::S3(s3.config("s3://train/set"));
    let source = serde_json::to_value(config).unwrap();
    let stage = Stage::set(vec![volume("data", "/mnt/data", true, source)]);
    let root = stage.mounted("data");
    assert_eq!(names(&root.join("part")), ["one"]);
    assert!(fs::read(root.join("part/one")).unwrap() == bytes);
    assert!(read_by_ring(&stage.ring(), "/mnt/data/part/one") == bytes);
    assert!(read_by_c(&stage, "/mnt/data/part/one") == bytes);
    if let Some(read) = read_by_python(&stage, "/mnt/data/part/one") {
        assert!(read == bytes);
    }
    let refused = File::create(root.join("part/two")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
}

#[test]
fn what_was_written_outlives_a_sigterm_and_a_loss_by_a_kill_is_told_at_fsync() {
    let mut cluster = cluster::Cluster::start();
    let mut stage = Stage::set(vec![store_volume(&cluster.manager)]);
    let mut application = Application::start(&stage.mounted("store").join("held"));
    assert_eq!(application.ask("before "), "did it");
    stage.stop_sidecar();
    let read = read_by_other_client(&stage, &cluster, "/sets/x/held");
    assert_eq!(String::from_utf8(read).unwrap(), "before ");

    // The next one goes on with the same descriptor.
    stage.start_sidecar();
    assert_eq!(application.ask("after"), "did it");
    assert_eq!(application.ask("fsync"), "did it");
    let read = read_by_other_client(&stage, &cluster, "/sets/x/held");
    assert_eq!(String::from_utf8(read).unwrap(), "before after");

    // Nothing that was safe is reported as lost.
    stage.kill_sidecar();
    stage.start_sidecar();
    assert_eq!(application.ask("fsync"), "did it");

    // The store does not answer, so what is written stays in the buffer that dies.
    for server in &mut cluster.storage {
        server.kill();
    }
    assert_eq!(application.ask("lost"), "did it");
    let unsaved = "lampyris_mount_unsaved_bytes{volume=\"store\"}";
    assert_eq!(figure(&stage.admin("/metrics"), unsaved), 4.0);
    stage.kill_sidecar();
    stage.start_sidecar();
    // Whoever only reads is not the one to tell.
    drop(File::open(stage.mounted("store").join("held")).unwrap());
    let told = application.ask("fsync");
    assert!(told.contains("os error 5"), "{told}");
    assert_eq!(application.ask("fsync"), "did it", "a loss is told once");
}

/// A process that reads by ring from Python: a case of the program `ring_cases.py`.
struct Case {
    name: &'static str,
    child: Child,
    /// What it asks for, a line each.
    wishes: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
    granted: ChildStdin,
}

impl Case {
    fn start(python: &Path, stage: &Stage, name: &'static str, paths: &[&str]) -> Self {
        let mut child = Command::new(python)
            .arg("../scan-agent/python/tests/ring_cases.py")
            .args([Path::new(name), &stage.ring(), &expected(stage)])
            .args(paths)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let wishes = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let granted = child.stdin.take().unwrap();
        Self { name, child, wishes, granted }
    }

    fn asks(&mut self, wish: &str) {
        let asked = self.wishes.next().map(Result::unwrap);
        assert_eq!(asked.as_deref(), Some(wish), "{}", self.name);
    }

    fn has(&mut self) {
        writeln!(self.granted).unwrap();
    }

    fn ends(mut self) {
        assert!(self.child.wait().unwrap().success(), "{} failed", self.name);
    }
}

/// A file with the bytes that a [`Case`] is to read.
fn expected(stage: &Stage) -> PathBuf {
    stage.place.path().join("expected")
}

#[test]
fn python_reads_in_forks_and_workers_over_restarts_and_after_an_interrupt() {
    let Some(python) = python() else { return };
    let cluster = cluster::Cluster::start();
    let mut stage = Stage::set(vec![store_volume(&cluster.manager)]);
    let bytes = pattern(3, 4 * MIB + 77);
    let file = stage.mounted("store").join("a");
    fs::write(expected(&stage), &bytes).unwrap();
    fs::write(&file, &bytes).unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    for name in ["forks", "workers", "forgotten", "interrupted"] {
        Case::start(&python, &stage, name, &["/mnt/store/a"]).ends();
    }

    let mut case = Case::start(&python, &stage, "restarts", &["/mnt/store/a"]);
    case.asks("kill the sidecar, and start another a while later");
    stage.kill_sidecar();
    case.has();
    // What is tested is this time, in which nobody answers.
    std::thread::sleep(Duration::from_millis(500));
    stage.start_sidecar();
    case.asks("replace the sidecar");
    stage.stop_sidecar();
    stage.start_sidecar();
    case.has();
    case.asks("replace the sidecar, and make the file two bytes long");
    stage.kill_sidecar();
    stage.start_sidecar();
    OpenOptions::new().write(true).open(&file).unwrap().set_len(2).unwrap();
    case.has();
    case.ends();
}

#[test]
fn a_read_from_python_that_is_refused_takes_no_other_with_it() {
    let Some(python) = python() else { return };
    let Some(s3) = s3_server::server() else { return };
    let (one, two) = (pattern(1, 5 * MIB + 77), pattern(2, 3 * MIB + 5));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(s3.put("set/one", one.clone()));
    runtime.block_on(s3.put("set/two", two.clone()));
    let config = source::SourceConfig::S3(s3.config("s3://train/set"));
    let source = serde_json::to_value(config).unwrap();
    let stage = Stage::set(vec![volume("data", "/mnt/data", true, source)]);
    fs::write(expected(&stage), &two).unwrap();
    let mut case = Case::start(&python, &stage, "refused", &["/mnt/data/one", "/mnt/data/two"]);
    case.asks("replace the first file");
    runtime.block_on(s3.put("set/one", pattern(7, one.len())));
    case.has();
    case.ends();
}

/// A sidecar is one of many on a node: what it needs while it works it must not keep.
#[test]
fn memory_that_writing_took_is_given_back() {
    let cluster = cluster::Cluster::start();
    let stage = Stage::set(vec![store_volume(&cluster.manager)]);
    let root = stage.mounted("store");
    let before = stage.resident_mib();
    for round in 0..2 {
        let bytes = pattern(round, 64 * MIB);
        fs::write(root.join("large"), &bytes).unwrap();
        assert!(fs::read(root.join("large")).unwrap() == bytes);
    }
    let after = stage.resident_mib();
    let until = Instant::now() + Duration::from_secs(20);
    while stage.resident_mib() > RESIDENT_MIB {
        let now = stage.resident_mib();
        assert!(Instant::now() < until, "{before} MiB before, {after} after, {now} a while later");
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("{before} MiB before, {after} after, {} in the end", stage.resident_mib());
}

/// One line of the metrics.
fn figure(metrics: &str, series: &str) -> f64 {
    let lines = metrics.lines().filter_map(|line| line.rsplit_once(' '));
    let mut values = lines.filter(|(shown, _)| *shown == series).map(|(_, value)| value);
    values.next().unwrap_or_else(|| panic!("no {series} in\n{metrics}")).parse().unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn read_by_ring(socket: &Path, path: &str) -> Vec<u8> {
    let mut ring = Ring::connect(socket, 8).unwrap();
    let iov = ring.register(MIB).unwrap();
    let file = ring.open(path, 0).unwrap();
    let mut bytes = vec![0; usize::try_from(file.size).unwrap()];
    for (piece, file_offset) in bytes.chunks_mut(MIB).zip((0u64..).step_by(MIB)) {
        let length = u32::try_from(piece.len()).unwrap();
        let (file, iov_offset, user_data) = (file.id, 0, file_offset);
        let read = Transfer { file, iov: iov.id, iov_offset, file_offset, length, user_data };
        assert!(ring.prepare(Op::Read, read).unwrap());
        ring.submit().unwrap();
        let done = ring.wait(Some(Duration::from_secs(20))).unwrap().expect("an answer in time");
        assert_eq!((done.user_data, done.result), (file_offset, i64::from(length)));
        iov.region.copy_out(0, piece).unwrap();
    }
    ring.close(file.id).unwrap();
    bytes
}

/// By the program in C, linked to the library of this build.
fn read_by_c(stage: &Stage, path: &str) -> Vec<u8> {
    let built = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = stage.place.path().join("ring-c");
    let source = "ring/tests/ring.c";
    let compiled = Command::new("cc")
        .args(["-std=c11", source, "-l:libring.so", "-L"])
        .arg(&built)
        .arg(format!("-Wl,-rpath,{}", built.display()))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).arg(stage.ring()).arg(path).output().unwrap();
    assert!(ran.status.success(), "{:?} {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    ran.stdout
}

/// The interpreter of `LAMPYRIS_PYTHON`, or of the cache; none only where `LAMPYRIS_SKIP_PYTHON` is set.
fn python() -> Option<PathBuf> {
    if std::env::var_os("LAMPYRIS_SKIP_PYTHON").is_some() {
        eprintln!("skipped for LAMPYRIS_SKIP_PYTHON: reading from Python");
        return None;
    }
    let path_of = |name| std::env::var_os(name).map(PathBuf::from);
    let home = || path_of("HOME").unwrap_or_default().join(".cache/lampyris");
    let cache = path_of("LAMPYRIS_CACHE").unwrap_or_else(home);
    let python = path_of("LAMPYRIS_PYTHON").unwrap_or_else(|| cache.join("py/bin/python"));
    let installed = Command::new(&python).args(["-c", "import lampyris.ring"]).output();
    assert!(
        installed.is_ok_and(|import| import.status.success()),
        "{} has no package lampyris: ./kind-e2e/test unit installs it, LAMPYRIS_PYTHON names another \
         interpreter, LAMPYRIS_SKIP_PYTHON=1 skips what needs it",
        python.display()
    );
    Some(python)
}

/// By the Python package.
fn read_by_python(stage: &Stage, path: &str) -> Option<Vec<u8>> {
    let python = python()?;
    let program = "import sys\nfrom lampyris import ring\n\
                   sys.stdout.buffer.write(ring.read(sys.argv[2], socket=sys.argv[1]))";
    let mut read = Command::new(&python);
    let ran = read.args(["-c", program]).arg(stage.ring()).arg(path).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    Some(ran.stdout)
}

fn read_by_other_client(stage: &Stage, cluster: &cluster::Cluster, path: &str) -> Vec<u8> {
    stage.runtime.block_on(async {
        let client = cluster.any_client().await;
        let file = client.open_path(path).await.unwrap();
        client.read_at(file.inode, 0, file.length).await.unwrap().to_vec()
    })
}
