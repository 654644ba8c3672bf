//! A directory of the replicated store as a file system. Inode numbers are the store's own, but for the root, which is
//! whatever directory the dataset names; so a restarted sidecar needs no table.

use std::sync::Arc;

use bytes::Bytes;
use client::{Attributes, Client, Code, Error, FileKind, Identity, InodeId};
use source::{Failure, Reason};
use tokio::sync::OnceCell;

use crate::status::{Status, StatusCallback};
use crate::unsaved::{self, Unsaved};
use crate::vfs::{
    Attr, Caller, DirEntry, DirPage, Errno, FileSystem, IO_MAX, Kind, Opened, ROOT, SetAttr, StatFs,
};

/// Which directory, and how.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Absolute path of the directory in the store.
    pub path: String,
    /// Whether changes are refused. If not, a missing directory is made.
    pub read_only: bool,
    /// Owner of a directory that is made.
    pub uid: u32,
    /// Group of a directory that is made.
    pub gid: u32,
}

/// The file system.
#[derive(Debug)]
pub struct StoreFs {
    client: Client,
    options: StoreOptions,
    root: OnceCell<InodeId>,
    status: Status,
    unsaved: Arc<Unsaved>,
}

impl StoreFs {
    /// A file system over `client`; asks nothing yet. `callback` hears when the store stops or starts to answer. Must be
    /// called inside a tokio runtime.
    #[must_use]
    pub fn new(
        client: Client,
        options: StoreOptions,
        unsaved: Unsaved,
        callback: StatusCallback,
    ) -> Self {
        let unsaved = Arc::new(unsaved);
        tokio::spawn(unsaved::tidy(Arc::downgrade(&unsaved), client.clone()));
        Self { client, options, root: OnceCell::new(), status: Status::new(callback), unsaved }
    }

    /// Finds the directory, making it if it is missing and may be written.
    async fn root(&self) -> Result<InodeId, Errno> {
        self.root.get_or_try_init(|| self.find_root()).await.copied().map_err(|e| self.failed(&e))
    }

    async fn find_root(&self) -> Result<InodeId, Error> {
        let StoreOptions { path, read_only, uid, gid } = &self.options;
        match self.client.stat_path(path).await {
            Err(error) if error.code == Code::NotFound && !read_only => {
                let made = self.client.mkdir_all(path).await?;
                // Pods of any user may mount it for writing, so it is shared as /tmp is.
                let owner = client::AttributeChange {
                    uid: Some(*uid),
                    gid: Some(*gid),
                    mode: Some(0o1777),
                    ..Default::default()
                };
                let superuser = Identity { uid: 0, gid: 0 };
                self.client.set_attributes(superuser, made, owner).await?;
                Ok(made)
            }
            other => Ok(other?.inode),
        }
    }

    async fn inode(&self, ino: u64) -> Result<InodeId, Errno> {
        if ino == ROOT { self.root().await } else { Ok(InodeId::new(ino)) }
    }

    fn attr(&self, from: &Attributes) -> Attr {
        let is_root = self.root.get() == Some(&from.inode);
        Attr {
            ino: if is_root { ROOT } else { from.inode.get() },
            kind: match from.kind {
                FileKind::File => Kind::File,
                FileKind::Directory => Kind::Directory,
                FileKind::Symlink => Kind::Symlink,
            },
            size: from.length,
            mode: from.mode,
            uid: from.uid,
            gid: from.gid,
            links: from.links,
            accessed_ns: from.accessed_ns,
            modified_ns: from.modified_ns,
            changed_ns: from.changed_ns,
            block_size: from.layout.map_or(4096, |layout| layout.chunk_size_bytes.min(IO_MAX)),
        }
    }

    fn writable(&self) -> Result<(), Errno> {
        if self.options.read_only { Err(Errno::EROFS) } else { Ok(()) }
    }

    /// Tells the status and finds the errno of a failure.
    fn failed(&self, error: &Error) -> Errno {
        if matches!(
            error.code,
            Code::Unreachable | Code::Timeout | Code::ChainUnavailable | Code::NoChainTable
        ) {
            tracing::warn!(%error, "the store does not answer");
            self.status.fails(&Failure::new(Reason::StoreUnavailable, error.to_string()));
        } else if error.code == Code::Internal {
            tracing::error!(%error, "the store failed");
        }
        errno(error.code)
    }

    fn done<T>(&self, result: Result<T, Error>) -> Result<T, Errno> {
        match result {
            Ok(value) => {
                self.status.works();
                Ok(value)
            }
            Err(error) => Err(self.failed(&error)),
        }
    }
}

/// The errno of each failure of the store.
const fn errno(code: Code) -> Errno {
    match code {
        Code::NotFound => Errno::ENOENT,
        Code::Exists => Errno::EEXIST,
        Code::NotEmpty => Errno::ENOTEMPTY,
        Code::NotDirectory => Errno::ENOTDIR,
        Code::IsDirectory => Errno::EISDIR,
        Code::InvalidName | Code::InvalidRequest | Code::WouldLoop => Errno::EINVAL,
        Code::NameTooLong => Errno::ENAMETOOLONG,
        Code::PermissionDenied => Errno::EPERM,
        Code::TooLarge => Errno::EFBIG,
        Code::NoSpace => Errno::ENOSPC,
        _ => Errno::EIO,
    }
}

const fn identity(caller: Caller) -> Identity {
    Identity { uid: caller.uid, gid: caller.gid }
}

#[async_trait::async_trait]
impl FileSystem for StoreFs {
    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, Errno> {
        let parent = self.inode(parent).await?;
        // A name that is not there is an answer, not a failure of the store.
        self.done(self.client.lookup(parent, name).await).map(|found| self.attr(&found))
    }

    async fn getattr(&self, ino: u64) -> Result<Attr, Errno> {
        let inode = self.inode(ino).await?;
        self.done(self.client.attributes(inode).await).map(|found| self.attr(&found))
    }

    async fn setattr(&self, caller: Caller, ino: u64, set: SetAttr) -> Result<Attr, Errno> {
        self.writable()?;
        let (inode, caller) = (self.inode(ino).await?, identity(caller));
        let SetAttr { size, mode, uid, gid, accessed_ns, modified_ns } = set;
        if let Some(size) = size {
            self.done(self.client.truncate(caller, inode, size).await)?;
        }
        let change = client::AttributeChange { mode, uid, gid, accessed_ns, modified_ns };
        if change == client::AttributeChange::default() {
            return self.getattr(ino).await;
        }
        let changed = self.client.set_attributes(caller, inode, change).await;
        self.done(changed).map(|found| self.attr(&found))
    }

    async fn readdir(&self, ino: u64, cookie: u64, limit: u32) -> Result<DirPage, Errno> {
        let inode = self.inode(ino).await?;
        let page = self.done(self.client.read_directory(inode, cookie, limit).await)?;
        let entries = page.entries.into_iter().map(|entry| DirEntry {
            attr: self.attr(&entry.attributes),
            name: entry.name,
            cookie: entry.cookie,
        });
        Ok(DirPage { entries: entries.collect(), end: page.end })
    }

    async fn open(&self, caller: Caller, ino: u64, write: bool) -> Result<Opened, Errno> {
        if write {
            self.writable()?;
        }
        let inode = self.inode(ino).await?;
        let opened = self.done(self.client.open(identity(caller), inode, write).await)?;
        // Whether the bytes changed since an earlier open is not known, so cached pages go.
        Ok(Opened { attr: self.attr(&opened), keep_cache: false })
    }

    async fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        mode: u32,
        exclusive: bool,
    ) -> Result<Opened, Errno> {
        self.writable()?;
        let parent = self.inode(parent).await?;
        let made = self.client.create(identity(caller), parent, name, mode, exclusive).await;
        self.done(made).map(|made| Opened { attr: self.attr(&made), keep_cache: false })
    }

    async fn read_parts(&self, ino: u64, offset: u64, length: u32) -> Result<Vec<Bytes>, Errno> {
        let inode = self.inode(ino).await?;
        self.done(self.client.read(inode, offset, length).await)
    }

    async fn write(
        &self,
        caller: Caller,
        ino: u64,
        offset: u64,
        bytes: Bytes,
    ) -> Result<(), Errno> {
        self.writable()?;
        let inode = self.inode(ino).await?;
        self.unsaved.mark(inode).map_err(|error| {
            tracing::error!(%inode, %error, "mark a file as unsaved");
            Errno::EIO
        })?;
        self.done(self.client.write(identity(caller), inode, offset, bytes).await)
    }

    async fn flush(&self, ino: u64) -> Result<(), Errno> {
        let inode = self.inode(ino).await?;
        let writes = self.unsaved.writes(inode);
        self.done(self.client.flush(inode).await)?;
        self.unsaved.clear(inode, writes);
        if self.unsaved.take_lost(inode) {
            tracing::error!(%inode, "an earlier sidecar died with unsaved bytes of this file");
            return Err(Errno::EIO);
        }
        Ok(())
    }

    async fn flush_all(&self) -> Result<(), Errno> {
        self.done(self.client.flush_all().await)?;
        self.unsaved.tidy(&self.client);
        Ok(())
    }

    async fn fsync(&self, ino: u64) -> Result<(), Errno> {
        self.flush(ino).await
    }

    async fn release(&self, ino: u64, write: bool) {
        if write && let Ok(inode) = self.inode(ino).await {
            self.client.release(inode).await;
        }
    }

    async fn mkdir(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        mode: u32,
    ) -> Result<Attr, Errno> {
        self.writable()?;
        let parent = self.inode(parent).await?;
        let made = self.client.make_directory(identity(caller), parent, name, mode).await;
        self.done(made).map(|made| self.attr(&made))
    }

    async fn unlink(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.writable()?;
        let parent = self.inode(parent).await?;
        self.done(self.client.remove(identity(caller), parent, name, false).await)
    }

    async fn rmdir(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.writable()?;
        let parent = self.inode(parent).await?;
        self.done(self.client.remove(identity(caller), parent, name, true).await)
    }

    async fn rename(
        &self,
        caller: Caller,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        no_replace: bool,
    ) -> Result<(), Errno> {
        self.writable()?;
        let (old, new) = (self.inode(from.0).await?, self.inode(to.0).await?);
        let (from, to) = ((old, from.1), (new, to.1));
        self.done(self.client.rename(identity(caller), from, to, no_replace).await)
    }

    async fn symlink(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        target: &[u8],
    ) -> Result<Attr, Errno> {
        self.writable()?;
        let parent = self.inode(parent).await?;
        let made = self.client.make_symlink(identity(caller), parent, name, target).await;
        self.done(made).map(|made| self.attr(&made))
    }

    async fn readlink(&self, ino: u64) -> Result<Bytes, Errno> {
        let inode = self.inode(ino).await?;
        self.done(self.client.read_symlink(inode).await)
    }

    async fn statfs(&self) -> Result<StatFs, Errno> {
        let stat = self.done(self.client.stat_file_system().await)?;
        Ok(StatFs {
            capacity_bytes: stat.capacity_bytes,
            free_bytes: stat.free_bytes,
            inodes: stat.inodes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_of_the_namespace_has_its_own_errno() {
        let cases = [
            (Code::NotFound, Errno::ENOENT),
            (Code::Exists, Errno::EEXIST),
            (Code::NotEmpty, Errno::ENOTEMPTY),
            (Code::NameTooLong, Errno::ENAMETOOLONG),
            (Code::PermissionDenied, Errno::EPERM),
            (Code::NoSpace, Errno::ENOSPC),
            (Code::Timeout, Errno::EIO),
        ];
        for (code, expected) in cases {
            assert_eq!(errno(code), expected, "{code:?}");
        }
    }
}
