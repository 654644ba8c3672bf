//! The sidecar's end of the native ring: the application's transfers, straight between the store and memory that both share.
//!
//! The application is not trusted. Each of its fields is read once and the copy validated; a refused submission completes
//! with an errno, a broken queue ends its connection. What one connection can take is bounded: entries, iovs, files, bytes
//! under way. Each has its own thread, which alone touches its queues and rings its doorbells: an application that makes a
//! doorbell block, or never reads, stalls that thread and nobody else. When the application dies the kernel closes the
//! socket, and everything it had goes with the connection.

mod connection;

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::watch;

use crate::vfs::{Attr, Caller, Errno, FileSystem, Kind, ROOT};

/// Connections at once; further ones are closed at once.
const CONNECTIONS_MAX: usize = 64;
/// How long connections may take to end when the process does.
const END_DEADLINE: Duration = Duration::from_secs(3);
/// Symbolic links followed in one path.
const LINKS_MAX: u32 = 8;

/// File systems by the path at which the application sees them.
#[derive(Debug, Default)]
pub struct Mounts(RwLock<Vec<(String, Arc<dyn FileSystem>)>>);

impl Mounts {
    /// Adds a file system, or replaces the one at the same path.
    pub fn add(&self, path: &str, files: Arc<dyn FileSystem>) {
        let path = path.trim_end_matches('/').to_owned();
        let mut mounts = self.0.write().unwrap_or_else(PoisonError::into_inner);
        mounts.retain(|(known, _)| *known != path);
        mounts.push((path, files));
    }

    /// The deepest file system that holds `path`, and the rest of the path in it.
    fn find(&self, path: &str) -> Option<(Arc<dyn FileSystem>, String)> {
        let mounts = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let rest = |mount: &str| {
            let rest = path.strip_prefix(mount)?;
            (rest.is_empty() || rest.starts_with('/')).then(|| rest.to_owned())
        };
        let holding = mounts.iter().filter_map(|(at, fs)| Some((at.len(), fs, rest(at)?)));
        let (_, files, rest) = holding.max_by_key(|(depth, ..)| *depth)?;
        Some((Arc::clone(files), rest))
    }
}

/// Serves the ring on a socket until `stop` becomes true.
#[derive(Debug)]
pub struct RingServer {
    path: PathBuf,
    listener: UnixListener,
    mounts: Arc<Mounts>,
    connections: Arc<AtomicUsize>,
    sockets: Arc<Sockets>,
}

/// The sockets of all connections, to end them.
#[derive(Debug, Default)]
struct Sockets(Mutex<(u64, HashMap<u64, UnixStream>)>);

impl Sockets {
    fn lock(&self) -> MutexGuard<'_, (u64, HashMap<u64, UnixStream>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, socket: UnixStream) -> u64 {
        let (last, sockets) = &mut *self.lock();
        *last += 1;
        sockets.insert(*last, socket);
        *last
    }

    fn remove(&self, id: u64) {
        self.lock().1.remove(&id);
    }

    fn hang_up(&self) {
        for socket in self.lock().1.values() {
            // It fails when the application was faster.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl RingServer {
    /// Binds `path`, replacing the socket of an earlier process. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel's, e.g. no such directory.
    pub fn bind(path: &Path, mounts: Arc<Mounts>) -> std::io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        // Every container of the pod may connect; what it may read is checked by its uid.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        let (connections, sockets) = (Arc::default(), Arc::default());
        Ok(Self { path: path.to_owned(), listener, mounts, connections, sockets })
    }

    /// Connections at the moment.
    #[must_use]
    pub fn connections(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.connections)
    }

    /// Accepts connections until `stop`, then ends those that exist: no write is taken afterwards.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        loop {
            let accepted = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                accepted = self.listener.accept() => accepted,
            };
            let socket = accepted.and_then(|(socket, _)| socket.into_std());
            if let Err(error) = socket.and_then(|socket| self.start(socket)) {
                tracing::warn!(%error, "accept a ring connection");
            }
        }
        // The next process binds its own.
        let _ = std::fs::remove_file(&self.path);
        self.sockets.hang_up();
        let until = tokio::time::Instant::now() + END_DEADLINE;
        while self.connections.load(Ordering::Relaxed) > 0 && tokio::time::Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn start(&self, socket: UnixStream) -> std::io::Result<()> {
        if self.connections.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            tracing::warn!(limit = CONNECTIONS_MAX, "refuse a ring connection: too many");
            return Ok(());
        }
        socket.set_nonblocking(false)?;
        let mounts = Arc::clone(&self.mounts);
        let runtime = tokio::runtime::Handle::current();
        let sockets = Arc::clone(&self.sockets);
        let id = sockets.add(socket.try_clone()?);
        let listed = Listed { sockets, id };
        let counted = Counted::new(Arc::clone(&self.connections));
        std::thread::Builder::new()
            .name("ring".into())
            .stack_size(256 << 10)
            .spawn(move || {
                let _listed = listed;
                if let Err(error) = connection::serve(socket, &mounts, &runtime, counted) {
                    tracing::info!(%error, "end a ring connection");
                }
            })
            .map(|_| ())
    }
}

/// One connection in the count: until the last of its transfers has ended, which may be after its application.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One connection's socket among those to be ended.
struct Listed {
    sockets: Arc<Sockets>,
    id: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.sockets.remove(self.id);
    }
}

/// Who an application is, as the kernel saw it when it connected.
#[derive(Clone, Debug)]
struct Rights {
    caller: Caller,
    /// Its supplementary groups.
    groups: Vec<u32>,
}

impl Rights {
    fn of(socket: &UnixStream) -> std::io::Result<Self> {
        let peer = ring::peer::peer_of(socket)?;
        let caller = Caller { uid: peer.uid, gid: peer.gid };
        Ok(Self { caller, groups: ring::peer::groups_of(socket)? })
    }

    /// Whether there is all of `want` (4 read, 2 write, 1 search) of an inode. The kernel checks this for a mount; here
    /// nobody else does.
    fn allow(&self, attr: &Attr, want: u32) -> bool {
        let Caller { uid, gid } = self.caller;
        let shift = if uid == 0 {
            return true;
        } else if uid == attr.uid {
            6
        } else if gid == attr.gid || self.groups.contains(&attr.gid) {
            3
        } else {
            0
        };
        (attr.mode >> shift) & want == want
    }
}

/// Walks `path` in `files` to its inode, checking search rights and following links inside the mount.
async fn walk(
    files: &dyn FileSystem,
    rights: &Rights,
    path: &str,
) -> Result<(Attr, Option<(u64, String)>), Errno> {
    let mut names: Vec<String> = path.rsplit('/').map(str::to_owned).collect();
    let mut at = files.getattr(ROOT).await?;
    let mut links = 0;
    while let Some(name) = names.pop() {
        if name.is_empty() || name == "." {
            continue;
        }
        if name == ".." {
            return Err(Errno::EINVAL);
        }
        if at.kind != Kind::Directory {
            return Err(Errno::ENOTDIR);
        }
        if !rights.allow(&at, 1) {
            return Err(Errno::EACCES);
        }
        let found = match files.lookup(at.ino, name.as_bytes()).await {
            // The last name may be made by the caller.
            Err(Errno::ENOENT) if names.iter().all(String::is_empty) => {
                return Ok((at, Some((at.ino, name))));
            }
            other => other?,
        };
        if found.kind == Kind::Symlink {
            links += 1;
            let target = files.readlink(found.ino).await?;
            let target = std::str::from_utf8(&target).map_err(|_| Errno::EINVAL)?;
            if links > LINKS_MAX || target.starts_with('/') {
                return Err(Errno::EINVAL);
            }
            names.extend(target.rsplit('/').map(str::to_owned));
            continue;
        }
        at = found;
    }
    Ok((at, None))
}

#[cfg(test)]
mod tests;
