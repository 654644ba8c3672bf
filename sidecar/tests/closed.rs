//! What others of a pod that run as the sidecar's user, and see its process, can do with it: nothing.
//!
//! Needs root, to become that user.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// As sidecars run.
const USER: u32 = 65_532;

/// Ends a process with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn as_user(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.uid(USER).gid(USER).current_dir("/").env_remove("MALLOC_ARENA_MAX");
    command
}

/// What another process of that user can look at of a process.
fn open_of(process: &Running) -> Vec<&'static str> {
    let pid = process.0.id();
    let looks = [("root/", "ls"), ("fd/", "ls"), ("environ", "cat"), ("maps", "cat")];
    let can = |(name, look): &(&str, &str)| {
        let mut look = as_user(look);
        look.arg(format!("/proc/{pid}/{name}")).stdout(Stdio::null()).stderr(Stdio::null());
        look.status().unwrap().success()
    };
    looks.into_iter().filter(can).map(|(name, _)| name).collect()
}

#[test]
fn another_process_of_its_user_can_not_look_into_a_sidecar() {
    let place = tempfile::tempdir().unwrap();
    let [private, app] = ["private", "app"].map(|name| place.path().join(name));
    for dir in [place.path(), &private, &app] {
        fs::create_dir_all(dir).unwrap();
        chown(dir, Some(USER), Some(USER)).unwrap();
    }
    // A copy: where it was built that user may not go. Readable, else the kernel would close the process by itself.
    let binary = place.path().join("lampyris-mount");
    fs::copy(env!("CARGO_BIN_EXE_lampyris-mount"), &binary).unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    let mut serve = as_user(&binary);
    serve.arg("serve").arg("--private-dir").arg(&private).arg("--app-dir").arg(&app);
    let sidecar = Running(serve.stderr(Stdio::null()).spawn().unwrap());
    let other = Running(as_user("sleep").arg("600").spawn().unwrap());
    let until = Instant::now() + Duration::from_secs(20);
    while !app.join("ring.sock").exists() {
        assert!(Instant::now() < until, "the sidecar does not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(
        open_of(&other),
        ["root/", "fd/", "environ", "maps"],
        "any other can be looked into"
    );
    assert_eq!(open_of(&sidecar), [""; 0]);
}
