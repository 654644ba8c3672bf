//! The privileged calls: open the FUSE device, mount, unmount, abort.
//!
//! A FUSE mount whose server is away blocks whoever touches it, so nothing here looks at a mount point:
//! what is mounted comes from `/proc/self/mountinfo`, and everything that may hang has a deadline.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::volume::mount_data;

/// An unmount that takes longer is forced.
pub const UNMOUNT_DEADLINE: Duration = Duration::from_secs(10);
/// Read-ahead of a mount in KiB: the kernel starts at 128, too little for files that come in MiB.
const READ_AHEAD_KIB: u32 = 4096;
/// Type of our file systems.
const KIND: &str = "fuse.lampyris";
/// Where the kernel shows FUSE connections; not mounted in most containers.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// Why a privileged call failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing} {}", .path.display())]
pub struct MountError {
    /// What was being done.
    pub doing: &'static str,
    /// To which path.
    pub path: PathBuf,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

impl MountError {
    fn new(doing: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self { doing, path: path.to_owned(), source: source.into() }
    }
}

/// What is mounted at a path, as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Minor device number: names the FUSE connection.
    pub minor: u32,
    /// Type of the file system.
    pub kind: String,
}

impl Mount {
    /// Whether this program mounted it.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.kind == KIND
    }
}

/// Opens a new FUSE connection and mounts it at `target`, which is made if missing.
///
/// # Errors
/// See [`MountError`].
pub fn mount(target: &Path, read_only: bool) -> Result<OwnedFd, MountError> {
    fs::create_dir_all(target).map_err(|error| MountError::new("make", target, error))?;
    let device = Path::new("/dev/fuse");
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let connection = rustix::fs::open(device, flags, Mode::empty())
        .map_err(|error| MountError::new("open", device, error))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if read_only {
        flags |= MountFlags::RDONLY;
    }
    let data = std::ffi::CString::new(mount_data(connection.as_raw_fd()))
        .map_err(|error| MountError::new("mount", target, io::Error::other(error)))?;
    rustix::mount::mount("lampyris", target, KIND, flags, Some(data.as_c_str()))
        .map_err(|error| MountError::new("mount", target, error))?;
    Ok(connection)
}

/// The topmost mount at `target`, without touching it.
///
/// # Errors
/// See [`MountError`].
pub fn find(target: &Path) -> Result<Option<Mount>, MountError> {
    let path = Path::new("/proc/self/mountinfo");
    let table = fs::read_to_string(path).map_err(|error| MountError::new("read", path, error))?;
    Ok(find_in(&table, target))
}

/// Every mount point of ours below `dir`.
///
/// # Errors
/// See [`MountError`].
pub fn below(dir: &Path) -> Result<Vec<PathBuf>, MountError> {
    let path = Path::new("/proc/self/mountinfo");
    let table = fs::read_to_string(path).map_err(|error| MountError::new("read", path, error))?;
    let points = table.lines().filter_map(parse_line);
    let ours = points.filter(|(_, mount)| mount.is_ours());
    Ok(ours.map(|(point, _)| point).filter(|point| point.starts_with(dir)).collect())
}

fn find_in(table: &str, target: &Path) -> Option<Mount> {
    let mut points = table.lines().filter_map(parse_line).filter(|(point, _)| point == target);
    points.next_back().map(|(_, mount)| mount)
}

/// Mount point, device and type of one line of mountinfo (proc(5)).
fn parse_line(line: &str) -> Option<(PathBuf, Mount)> {
    let (fixed, rest) = line.split_once(" - ")?;
    let mut fields = fixed.split(' ').skip(2);
    let (_, minor) = fields.next()?.split_once(':')?;
    let point = fields.nth(1)?;
    let mount = Mount { minor: minor.parse().ok()?, kind: rest.split(' ').next()?.to_owned() };
    Some((PathBuf::from(unescape(point)), mount))
}

/// Undoes the octal escapes of mountinfo (space, tab, line feed, backslash).
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

/// Unmounts `target`, by force after [`UNMOUNT_DEADLINE`] or when it is busy, and removes the directory.
///
/// Returns whether force was needed. It is no error if nothing is mounted or there.
///
/// # Errors
/// See [`MountError`].
pub async fn unmount(target: &Path) -> Result<bool, MountError> {
    let forced = match find(target)? {
        None => false,
        Some(mount) => {
            let forced = !gentle(target).await;
            if forced {
                force(target, &mount)?;
            }
            forced
        }
    };
    match fs::remove_dir(target) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(MountError::new("remove", target, error))
        }
        _ => Ok(forced),
    }
}

/// Unmounts without force; false when that fails or takes too long.
async fn gentle(target: &Path) -> bool {
    let (done, outcome) = tokio::sync::oneshot::channel();
    let path = target.to_owned();
    // A thread of its own: it may hang, and then nothing may wait for it.
    let spawned = std::thread::Builder::new().name("unmount".to_owned()).spawn(move || {
        let _ = done.send(rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW).is_ok());
    });
    match spawned {
        Ok(_) => matches!(tokio::time::timeout(UNMOUNT_DEADLINE, outcome).await, Ok(Ok(true))),
        Err(_) => false,
    }
}

/// Ends the connection, so that nobody hangs on it any more, and takes the mount away.
fn force(target: &Path, mount: &Mount) -> Result<(), MountError> {
    let abort = Path::new(CONNECTIONS).join(mount.minor.to_string()).join("abort");
    // MNT_FORCE aborts too; the file also works while another unmount holds the mount.
    let _ = fs::write(abort, "1");
    let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    match rustix::mount::unmount(target, flags) {
        // The gentle attempt may have got through after the abort.
        Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
        Err(error) => Err(MountError::new("force the unmount of", target, error)),
    }
}

/// Raises the read-ahead of a mount, once its connection is negotiated. Only a matter of speed.
///
/// # Errors
/// See [`MountError`]; in a container without a writable `/sys` it always fails.
pub fn raise_read_ahead(mount: &Mount) -> Result<(), MountError> {
    let path = PathBuf::from(format!("/sys/class/bdi/0:{}/read_ahead_kb", mount.minor));
    fs::write(&path, READ_AHEAD_KIB.to_string())
        .map_err(|error| MountError::new("write", &path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
90 22 0:51 / /pods/a\\040b rw,nosuid,nodev shared:7 - fuse.lampyris lampyris rw,user_id=0
91 90 0:52 / /pods/a\\040b rw,nosuid,nodev - tmpfs t rw
92 22 0:53 / /pods/c rw master:1 - fuse.lampyris lampyris ro
";

    #[test]
    fn the_topmost_mount_at_a_path_is_found() {
        let top = find_in(TABLE, Path::new("/pods/a b")).unwrap();
        assert_eq!(top, Mount { minor: 52, kind: "tmpfs".into() });
        let only = find_in(TABLE, Path::new("/pods/c")).unwrap();
        assert_eq!(only, Mount { minor: 53, kind: "fuse.lampyris".into() });
        assert_eq!(find_in(TABLE, Path::new("/pods")), None);
        assert_eq!(find_in("garbage\n\n1 2 3 - x", Path::new("/")), None);
    }

    #[tokio::test]
    async fn an_unserved_mount_goes_away_and_its_readers_get_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("mount");
        let device = mount(&target, true).unwrap();
        assert_eq!(find(&target).unwrap().unwrap().kind, "fuse.lampyris");
        assert_eq!(below(dir.path()).unwrap(), std::slice::from_ref(&target));
        let file = target.join("file");
        let reader = std::thread::spawn(move || fs::read(file));
        unmount(&target).await.unwrap();
        assert_eq!(find(&target).unwrap(), None);
        assert!(!target.exists());
        reader.join().unwrap().unwrap_err();
        assert!(!unmount(&target).await.unwrap(), "a second time is no error");
        drop(device);
    }
}
