//! A pod without Kubernetes: its directories, its mounts, the node plugin's end of the hand-over, and the sidecar's process.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use keeper::handover::{Init, Role, SOCKET, Status, Volume};
use node::handover;
use serde_json::Value;
use tokio::runtime::Runtime;

const DEADLINE: Duration = Duration::from_secs(40);

/// A volume as the node plugin describes it.
pub(crate) fn volume(name: &str, mount_path: &str, read_only: bool, source: Value) -> Volume {
    Volume {
        name: name.into(),
        mount_path: Some(mount_path.into()),
        dataset: name.into(),
        namespace: "team".into(),
        read_only,
        format: "Files".into(),
        source,
        uid: 0,
        gid: 0,
        generation: 1,
        recorded_init: None,
        recorded_reply: None,
        mount_id: 1,
        unkept: true,
        last: false,
    }
}

/// What the node plugin holds of a pod.
struct Desk(Mutex<Vec<(Volume, OwnedFd)>>);

impl handover::Pod for Desk {
    fn volumes(&self, _: Role) -> std::io::Result<Vec<(Volume, Option<OwnedFd>)>> {
        let volumes = self.0.lock().unwrap();
        volumes.iter().map(|(volume, fd)| Ok((volume.clone(), Some(fd.try_clone()?)))).collect()
    }

    fn negotiated(&self, init: Init) -> impl Future<Output = bool> + Send + 'static {
        let mut volumes = self.0.lock().unwrap();
        let (volume, _) =
            volumes.iter_mut().find(|(volume, _)| volume.name == init.volume).unwrap();
        if volume.recorded_init.is_none() {
            volume.recorded_init = Some(init.request);
            volume.recorded_reply = Some(init.reply);
        }
        std::future::ready(true)
    }

    fn changed(&self, _: Role, status: Status) {
        println!("volume {}: {:?} {:?}", status.volume, status.reason, status.message);
    }
}

/// The pod.
pub(crate) struct Stage {
    pub place: tempfile::TempDir,
    pub runtime: Runtime,
    targets: Vec<PathBuf>,
    sidecar: Option<Child>,
}

impl Stage {
    /// Mounts `volumes` and waits until the sidecar serves them.
    pub(crate) fn set(volumes: Vec<Volume>) -> Self {
        let place = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let private = place.path().join("private");
        for dir in [&private, &place.path().join("app")] {
            std::fs::create_dir(dir).unwrap();
        }
        let target = |volume: &Volume| place.path().join("mount").join(&volume.name);
        let targets: Vec<_> = volumes.iter().map(target).collect();
        let mounted = volumes.into_iter().map(|volume| {
            let device = node::mount::mount(&target(&volume), volume.read_only).unwrap();
            (volume, device)
        });
        let desk = Arc::new(Desk(Mutex::new(mounted.collect())));
        {
            let _inside = runtime.enter();
            let listener = tokio::net::UnixListener::bind(private.join(SOCKET)).unwrap();
            let (pushes, _) = tokio::sync::broadcast::channel(handover::PUSHES);
            runtime.spawn(handover::serve(listener, desk, pushes));
        }
        let mut stage = Self { place, runtime, targets, sidecar: None };
        stage.start_sidecar();
        stage
    }

    fn private(&self) -> PathBuf {
        self.place.path().join("private")
    }

    pub(crate) fn ring(&self) -> PathBuf {
        self.place.path().join("app/ring.sock")
    }

    pub(crate) fn mounted(&self, volume: &str) -> PathBuf {
        self.place.path().join("mount").join(volume)
    }

    /// Starts the sidecar and waits until its probe succeeds.
    pub(crate) fn start_sidecar(&mut self) {
        let ready = self.private().join(sidecar::run::READY_FILE);
        let _ = std::fs::remove_file(ready);
        let binary = env!("CARGO_BIN_EXE_lampyris-mount");
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.place.path().join("sidecar.log"))
            .unwrap();
        let mut serve = Command::new(binary);
        serve.arg("serve").arg("--private-dir").arg(self.private());
        serve.arg("--app-dir").arg(self.place.path().join("app")).stderr(log);
        self.sidecar = Some(serve.spawn().unwrap());
        let until = Instant::now() + DEADLINE;
        let mut probe = Command::new(binary);
        probe.arg("probe").arg("--private-dir").arg(self.private());
        while !probe.status().unwrap().success() {
            let ended = self.sidecar.as_mut().unwrap().try_wait().unwrap();
            assert_eq!(ended, None, "the sidecar ended: {}", self.log());
            assert!(Instant::now() < until, "the sidecar is not ready: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.place.path().join("sidecar.log")).unwrap()
    }

    /// Memory of the sidecar, shared pages of its program included.
    pub(crate) fn resident_mib(&self) -> u64 {
        let pid = self.sidecar.as_ref().unwrap().id();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }

    pub(crate) fn kill_sidecar(&mut self) {
        let mut sidecar = self.sidecar.take().unwrap();
        sidecar.kill().unwrap();
        sidecar.wait().unwrap();
    }

    /// Ends the sidecar as kubelet does; it must go in peace.
    pub(crate) fn stop_sidecar(&mut self) {
        let mut sidecar = self.sidecar.take().unwrap();
        let pid = rustix::process::Pid::from_child(&sidecar);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert_eq!(sidecar.wait().unwrap(), ExitStatus::default(), "{}", self.log());
    }

    /// What the sidecar's admin socket answers.
    pub(crate) fn admin(&self, path: &str) -> String {
        let mut socket = UnixStream::connect(self.private().join("mount-admin.sock")).unwrap();
        write!(socket, "GET {path} HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for target in &self.targets {
            // By force if the sidecar is gone.
            let unmounted = self.runtime.block_on(node::mount::unmount(target));
            if !std::thread::panicking() {
                unmounted.unwrap();
            }
        }
        if let Some(mut sidecar) = self.sidecar.take() {
            let _ = sidecar.kill();
            let _ = sidecar.wait();
        }
        if std::thread::panicking() {
            println!("{}", self.log());
        }
    }
}

/// A process that holds one file open for writing; see the test that it runs.
pub(crate) struct Application {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Application {
    pub(crate) fn start(file: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", super::CHILD, "--nocapture"])
            .env(super::HELD, file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let commands = child.stdin.take();
        Self { child, commands, answers }
    }

    /// Sends one command and waits for what it says.
    pub(crate) fn ask(&mut self, command: &str) -> String {
        writeln!(self.commands.as_ref().unwrap(), "{command}").unwrap();
        let mut answers = self.answers.by_ref().lines().map(Result::unwrap);
        answers.find(|line| line.starts_with("did ")).expect("the application answers")
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        drop(self.commands.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
