//! What a front end (FUSE, ring) asks of a file system, and the errno words it is answered with.
//!
//! Two implementations: [`crate::store_fs`] over the replicated store, [`crate::dataset_fs`] over a dataset's objects. A
//! restarted sidecar has forgotten everything but what it asks for again, so nothing here depends on an earlier call: there
//! are no file handles, inode numbers are the same after a restart, cookies too. `open` and `release` only say when
//! close-to-open consistency wants a look at the server and when a writer has ended.

use bytes::Bytes;

/// The root directory of every file system.
pub const ROOT: u64 = 1;

/// A failed operation: a Linux errno, positive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[error("errno {0}")]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        impl Errno {
            $($(#[$doc])* pub const $name: Self = Self(libc::$name);)*
        }

        impl std::fmt::Debug for Errno {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.0 {
                    $(libc::$name => f.write_str(stringify!($name)),)*
                    other => write!(f, "Errno({other})"),
                }
            }
        }
    };
}
errnos! {
    /// No such name or inode.
    ENOENT;
    /// The bytes could not be read or written; the reason is in the status and the log.
    EIO;
    /// Not allowed for this caller.
    EACCES;
    /// Not the owner.
    EPERM;
    /// The name exists.
    EEXIST;
    /// A directory was needed.
    ENOTDIR;
    /// A directory where a file was needed.
    EISDIR;
    /// The arguments contradict each other.
    EINVAL;
    /// Past what a file may hold.
    EFBIG;
    /// The store is full.
    ENOSPC;
    /// The file system is read-only.
    EROFS;
    /// The directory has entries.
    ENOTEMPTY;
    /// The name is longer than 255 bytes.
    ENAMETOOLONG;
    /// The operation does not exist here.
    ENOSYS;
    /// The operation exists, not in this form.
    EOPNOTSUPP;
    /// The object was replaced under an open file.
    ESTALE;
    /// The server did not answer in time.
    ETIMEDOUT;
    /// The server asks to come back.
    EAGAIN;
    /// The descriptor is not open, or not for this.
    EBADF;
}

/// What an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
}

/// Attributes of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number, stable over restarts.
    pub ino: u64,
    /// What it is.
    pub kind: Kind,
    /// Length in bytes.
    pub size: u64,
    /// Permission bits, without the type.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of names.
    pub links: u32,
    /// Nanoseconds since 1970.
    pub accessed_ns: u64,
    /// Nanoseconds since 1970.
    pub modified_ns: u64,
    /// Nanoseconds since 1970.
    pub changed_ns: u64,
    /// Bytes that a caller should read or write at once.
    pub block_size: u32,
}

/// On whose behalf an operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Changes of attributes; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// New length in bytes.
    pub size: Option<u64>,
    /// New permission bits.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New access time in nanoseconds since 1970.
    pub accessed_ns: Option<u64>,
    /// New modification time in nanoseconds since 1970.
    pub modified_ns: Option<u64>,
}

/// One name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The name's bytes.
    pub name: Bytes,
    /// Pass it to continue behind this entry. Never 0; stable over restarts and other changes.
    pub cookie: u64,
    /// What it names.
    pub attr: Attr,
}

/// Some names of a directory, in order of cookie. `.` and `..` are the front end's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirPage {
    /// The names.
    pub entries: Vec<DirEntry>,
    /// Whether none come after these.
    pub end: bool,
}

/// What an open promises to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Attributes as of now, from the server.
    pub attr: Attr,
    /// Whether pages that the kernel cached before are still right.
    pub keep_cache: bool,
}

/// Sizes of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatFs {
    /// Bytes in all.
    pub capacity_bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// Inodes in use.
    pub inodes: u64,
}

/// Most bytes that a front end asks for in one read or hands over in one write.
pub const IO_MAX: u32 = 1 << 20;

/// A file system. Every operation stands alone; names are single, without `/`.
///
/// Permissions are checked by the kernel (`default_permissions`); the store checks owners again where it changes something.
#[async_trait::async_trait]
pub trait FileSystem: Send + Sync + std::fmt::Debug + 'static {
    /// Finds `name` in `parent`.
    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, Errno>;
    /// Attributes, from the server or at most a second old.
    async fn getattr(&self, ino: u64) -> Result<Attr, Errno>;
    /// Changes attributes; a new size cuts or extends.
    async fn setattr(&self, caller: Caller, ino: u64, set: SetAttr) -> Result<Attr, Errno>;
    /// Names behind `cookie` (0 = from the start), at most `limit`.
    async fn readdir(&self, ino: u64, cookie: u64, limit: u32) -> Result<DirPage, Errno>;
    /// Opens a file: what other clients closed before is read from now on.
    async fn open(&self, caller: Caller, ino: u64, write: bool) -> Result<Opened, Errno>;
    /// Makes a file and opens it for writing; opens an existing one unless `exclusive`.
    async fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        mode: u32,
        exclusive: bool,
    ) -> Result<Opened, Errno>;
    /// Bytes from `offset`, fewer than `length` only at the end of the file, in as many pieces as they arrived in.
    async fn read_parts(&self, ino: u64, offset: u64, length: u32) -> Result<Vec<Bytes>, Errno>;
    /// Takes all of `bytes`; durable after [`fsync`](Self::fsync) or [`flush`](Self::flush).
    async fn write(&self, caller: Caller, ino: u64, offset: u64, bytes: Bytes)
    -> Result<(), Errno>;
    /// At each close of a descriptor: writes back, and reports an earlier failure to do so, once.
    async fn flush(&self, ino: u64) -> Result<(), Errno>;
    /// Writes back; what was written before is durable and visible to others afterwards.
    async fn fsync(&self, ino: u64) -> Result<(), Errno>;
    /// Before the end of the process: writes back what was taken of every file. What fails is reported by the next
    /// [`fsync`](Self::fsync) or [`flush`](Self::flush) as well, though a successor may answer it.
    async fn flush_all(&self) -> Result<(), Errno> {
        Ok(())
    }
    /// Bytes that were taken from writes and that the end of this process would lose.
    fn unsaved_bytes(&self) -> usize {
        0
    }
    /// The last descriptor of one `open` or `create` is gone.
    async fn release(&self, ino: u64, write: bool);
    /// Makes a directory.
    async fn mkdir(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        mode: u32,
    ) -> Result<Attr, Errno>;
    /// Removes the name of a file or link.
    async fn unlink(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno>;
    /// Removes an empty directory.
    async fn rmdir(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno>;
    /// Renames, replacing what `new_name` was unless `no_replace`.
    async fn rename(
        &self,
        caller: Caller,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        no_replace: bool,
    ) -> Result<(), Errno>;
    /// Makes a symbolic link.
    async fn symlink(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        target: &[u8],
    ) -> Result<Attr, Errno>;
    /// What a symbolic link points to.
    async fn readlink(&self, ino: u64) -> Result<Bytes, Errno>;
    /// Sizes of the file system.
    async fn statfs(&self) -> Result<StatFs, Errno>;

    /// As [`read_parts`](Self::read_parts), in one piece: no copy if it arrived as one.
    async fn read(&self, ino: u64, offset: u64, length: u32) -> Result<Bytes, Errno> {
        Ok(join(self.read_parts(ino, offset, length).await?))
    }
}

/// One piece out of many.
#[must_use]
pub fn join(mut parts: Vec<Bytes>) -> Bytes {
    match parts.len() {
        0 => Bytes::new(),
        1 => parts.swap_remove(0),
        _ => parts.concat().into(),
    }
}
