//! Sockets in directories that a pod can change.
//!
//! The pod's own containers may put links or other files where a socket is expected, and paths below
//! the kubelet directory are longer than a socket address may be. So directories and sockets are
//! opened without following links, and reached through `/proc/self/fd`.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

const PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn through(descriptor: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
}

/// Makes the directory as kubelet makes an emptyDir, so that it may come later.
///
/// # Errors
/// The file system's.
pub fn make_empty_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777))
}

/// Binds `name` in `dir` for everybody who sees the directory, in place of what was there.
///
/// # Errors
/// The file system's and the socket's.
pub fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    let dir = rustix::fs::open(dir, PATH | OFlags::DIRECTORY, Mode::empty())?;
    match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let listener = UnixListener::bind(through(&dir).join(name))?;
    let socket = open_socket(&dir, name)?;
    fs::set_permissions(through(&socket), fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Connects to the socket `name` in `dir`.
///
/// # Errors
/// The file system's and the socket's; `InvalidInput` when it is no socket.
pub fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let dir = rustix::fs::open(dir, PATH | OFlags::DIRECTORY, Mode::empty())?;
    let socket = open_socket(&dir, name)?;
    UnixStream::connect(through(&socket))
}

fn open_socket(dir: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let socket = rustix::fs::openat(dir, name, PATH, Mode::empty())?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode);
    if kind == FileType::Socket {
        Ok(socket)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is not a socket")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_socket_deep_below_is_bound_reached_and_open_to_all() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a-long-directory-name-of-forty-characters".repeat(4));
        make_empty_dir(&deep).unwrap();
        assert_eq!(fs::metadata(&deep).unwrap().permissions().mode() & 0o777, 0o777);
        for _ in 0..2 {
            let listener = bind(&deep, "node.sock").unwrap();
            let mut client = connect(&deep, "node.sock").unwrap();
            client.write_all(b"hello").unwrap();
            drop(client);
            let mut text = String::new();
            listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello");
        }
        let mode = fs::metadata(deep.join("node.sock")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o666);
    }

    #[test]
    fn a_link_planted_by_the_pod_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = dir.path().join("elsewhere.sock");
        let _listener = UnixListener::bind(&elsewhere).unwrap();
        let pod = dir.path().join("pod");
        make_empty_dir(&pod).unwrap();
        std::os::unix::fs::symlink(&elsewhere, pod.join("node.sock")).unwrap();
        assert_eq!(connect(&pod, "node.sock").unwrap_err().kind(), io::ErrorKind::InvalidInput);
        bind(&pod, "node.sock").unwrap();
        assert!(elsewhere.exists(), "only the link was replaced");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&pod, &link).unwrap();
        assert!(bind(&link, "node.sock").is_err());
    }
}
