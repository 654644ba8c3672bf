//! Programs under test: each dies with its test and, when the test fails, shows what it said.

use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

/// Ports that these tests share out: below those that the kernel hands to whoever asks for any.
const PORTS: std::ops::Range<u16> = 11_000..12_000;

/// A port that is this test's as long as its process lives, and that nobody listens on yet.
///
/// The same number of UDP says so to the other tests: it is held, while the port of TCP is free for the server.
pub(crate) fn own_port() -> u16 {
    static CLAIMS: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());
    let mut claims = CLAIMS.lock().unwrap();
    for port in PORTS {
        let Ok(claim) = UdpSocket::bind(("127.0.0.1", port)) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            claims.push(claim);
            return port;
        }
    }
    panic!("no port is free in {PORTS:?}");
}

/// A process that dies with the test.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, called `name`; what it says on standard error goes to a file in `directory`.
    pub(crate) fn start(name: &str, mut command: Command, directory: &Path) -> Self {
        let log = directory.join(format!("{name}.log"));
        command.stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let child = command.spawn().unwrap_or_else(|error| panic!("start {name}: {error}"));
        Self { child, name: name.to_owned(), log }
    }

    /// The process itself.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// What it said so far.
    pub(crate) fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("standard error of {}:\n{}", self.name, self.said());
        }
    }
}
