//! `operator retire` as a process: what it does when it is asked to stop.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A signal has been answered within this, whatever else the machine does.
const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn a_retire_that_is_told_to_stop_ends_at_once_and_says_what_is_left() {
    // An API server that takes the request and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = std::env::temp_dir().join(format!("lampyris-retire-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let config = folder.join("config");
    let server = format!("http://{}", listener.local_addr().unwrap());
    let text = format!(
        r#"{{"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{{"name": "c", "cluster": {{"server": "{server}"}}}}],
            "users": [{{"name": "u", "user": {{}}}}],
            "contexts": [{{"name": "c", "context": {{"cluster": "c", "user": "u"}}}}]}}"#
    );
    std::fs::write(&config, text).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_operator"))
        .args(["retire", "--system-namespace=s", "--deployment=d"])
        .env("KUBECONFIG", &config)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It works from here on.
    let (mut request, _) = listener.accept().unwrap();
    assert!(request.read(&mut [0; 16]).unwrap() > 0);
    let told = Instant::now();
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if told.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("it goes on {PATIENCE:?} after SIGTERM");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(status.signal(), None, "it handles the signal itself");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("asked to stop before every Dataset was released"), "{said}");
    assert!(said.contains("lampyris.dev/dataset"), "{said}");
}
