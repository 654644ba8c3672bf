//! The processes of a store and of one pod, on this machine: metadata, three storage servers, and the mount sidecar.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use keeper::handover::{FromNode, FromSidecar, Volume};
use keeper::wire::Connection;

const PATIENCE: Duration = Duration::from_secs(60);
const NODES: std::ops::RangeInclusive<u64> = 10_001..=10_003;

/// A process that ends with this one.
pub(crate) struct Process {
    pub(crate) name: String,
    child: Child,
}

impl Process {
    pub(crate) fn start(name: &str, program: &Path, args: &[String]) -> Result<Self> {
        let child = Command::new(program).args(args).stderr(Stdio::null()).spawn();
        let child = child.with_context(|| format!("start {}", program.display()))?;
        Ok(Self { name: name.to_owned(), child })
    }

    /// Resident bytes, and the most that they were.
    pub(crate) fn resident(&self) -> Result<(u64, u64)> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
            kib.map(|kib| kib << 10).with_context(|| format!("{name} of {}", self.name))
        };
        Ok((field("VmRSS:")?, field("VmHWM:")?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A built program of this workspace.
fn program(name: &str) -> Result<PathBuf> {
    let here = std::env::current_exe()?;
    let built = here.parent().and_then(Path::parent).context("the directory of programs")?;
    let path = built.join(name);
    ensure!(path.exists(), "{} is missing: run `./kind-e2e/bench read-paths`", path.display());
    Ok(path)
}

fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        ensure!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn table() -> String {
    let target = |node: u64, chain: u64| {
        let target = node * 10_000 + 100 + chain;
        format!(r#"{{"targetId":{target},"nodeId":{node},"disk":0}}"#)
    };
    let chain = |chain: u64| {
        // Each server is the head of one chain.
        let order = (0..3).map(|at| 10_001 + (at + chain) % 3);
        let targets: Vec<_> = order.map(|node| target(node, chain)).collect();
        format!(r#"{{"chainId":{chain},"targets":[{}]}}"#, targets.join(","))
    };
    let chains: Vec<_> = (1..=3).map(chain).collect();
    let head = r#""tableId":1,"revision":1,"stripeSize":0,"chunkSizeBytes":1048576"#;
    format!("{{{head},\"chains\":[{}]}}", chains.join(","))
}

fn declare(admin: &str) -> Result<bool> {
    let body = table();
    let length = body.len();
    let mut stream = TcpStream::connect(admin)?;
    write!(
        stream,
        "PUT /v1/table HTTP/1.1\r\nHost: m\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.1 2"))
}

/// Starts a store under `directory`. Answers its manager's address and its processes.
pub(crate) fn start_store(directory: &Path) -> Result<(String, Vec<Process>)> {
    let (manager, admin) = (free_address()?, free_address()?);
    let start = |name: &str, binary: &str, flags: &[(&str, &str)]| -> Result<Process> {
        let data = directory.join(name);
        std::fs::create_dir_all(&data)?;
        let data = data.display().to_string();
        let common = [("cluster", "bench"), ("data", data.as_str())];
        let flags = common.iter().chain(flags);
        let flags = flags.flat_map(|(flag, value)| [format!("--{flag}"), (*value).to_owned()]);
        let args: Vec<_> = std::iter::once("serve".to_owned()).chain(flags).collect();
        Process::start(name, &program(binary)?, &args)
    };
    let mut processes = vec![start("meta", "meta", &[("listen", &manager), ("admin", &admin)])?];
    for node in NODES {
        let (any, id) = ("127.0.0.1:0", node.to_string());
        let flags = [
            ("node-id", id.as_str()),
            ("manager", &manager),
            ("listen", any),
            ("advertise", any),
            ("admin", any),
        ];
        processes.push(start(&format!("storage-{node}"), "storage-node", &flags)?);
    }
    until("the table is declared", || declare(&admin).unwrap_or(false))?;
    Ok((manager, processes))
}

/// The sidecar of one pod, with one volume: a directory of the store, mounted and behind its ring.
pub(crate) struct Pod {
    pub(crate) mount: PathBuf,
    pub(crate) ring: PathBuf,
    pub(crate) sidecar: Option<Process>,
    _node: Connection,
}

impl Pod {
    /// Plays the node plugin's part: mounts, and hands the descriptor over.
    pub(crate) fn start(directory: &Path, manager: &str) -> Result<Self> {
        let [private, app, target] = ["private", "app", "mount"].map(|name| directory.join(name));
        std::fs::create_dir_all(&private)?;
        std::fs::create_dir_all(&app)?;
        let listener = UnixListener::bind(private.join(keeper::handover::SOCKET))?;
        let device = node::mount::mount(&target, false)?;
        let args = ["serve", "--private-dir", &private.display().to_string(), "--app-dir"];
        let args: Vec<_> =
            args.iter().map(|arg| (*arg).to_owned()).chain([app.display().to_string()]).collect();
        let sidecar = Process::start("mount", &program("lampyris-mount")?, &args)?;
        let mut connection = Connection::new(listener.accept()?.0);
        match connection.receive::<FromSidecar>()? {
            Some((FromSidecar::Hello(_), _)) => {}
            other => bail!("the sidecar said {other:?}"),
        }
        let volume = Volume {
            name: "bench".into(),
            mount_path: Some("/data".into()),
            dataset: "bench".into(),
            namespace: "bench".into(),
            read_only: false,
            format: "Files".into(),
            source: serde_json::json!({"cluster": {"manager": manager, "path": "/bench"}}),
            uid: 0,
            gid: 0,
            generation: 1,
            recorded_init: None,
            recorded_reply: None,
            mount_id: 1,
            unkept: false,
            last: true,
        };
        connection.send(&FromNode::Volume(Box::new(volume)), &[device.as_fd()])?;
        drop(device);
        let ready = private.join(sidecar::run::READY_FILE);
        let this = Self {
            mount: target,
            ring: app.join("ring.sock"),
            sidecar: Some(sidecar),
            _node: connection,
        };
        until("the volume is served", || ready.exists() && this.ring.exists())?;
        Ok(this)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.sidecar = None;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        // What stays mounted is seen in the mount table; there is nobody to tell.
        let _ = runtime.map(|runtime| runtime.block_on(node::mount::unmount(&self.mount)));
    }
}
