//! A directory of the replicated store as a file system. Inode numbers are the store's own, but for the root, which is
//! whatever directory the dataset names; so a restarted sidecar needs no table.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use client::{Attributes, Client, Code, Error, FileKind, Identity, InodeId};
use source::{Failure, Reason};
use tokio::sync::OnceCell;

use crate::status::{Status, StatusCallback};
use crate::unsaved::{self, Unsaved};
use crate::vfs::{
    Attr, Caller, DirEntry, DirPage, Errno, FileSystem, IO_MAX, Kind, Opened, ROOT, SetAttr, StatFs,
};

/// How often what does not answer is asked again; an attempt takes the client's deadline at most.
const TICK: Duration = Duration::from_secs(2);

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
    status: Arc<Status<Part>>,
    unsaved: Arc<Unsaved>,
}

/// What of the store answers or fails by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The metadata service.
    Names,
    /// What a new file needs besides: chains.
    NewFiles,
    /// The chains that have these bytes of a file.
    Bytes { inode: InodeId, offset: u64, length: u32 },
    /// The chains that take what was written to a file.
    Saved(InodeId),
}

impl Part {
    /// Whether this works once `done` has worked.
    fn is_within(&self, done: &Self) -> bool {
        match (*self, *done) {
            (
                Self::Bytes { inode, offset, length },
                Self::Bytes { inode: of, offset: from, length: read },
            ) => {
                let end = |offset: u64, length: u32| offset.saturating_add(u64::from(length));
                inode == of && from <= offset && end(offset, length) <= end(from, read)
            }
            // A file was made, so its name was.
            (Self::Names, Self::NewFiles) => true,
            _ => self == done,
        }
    }
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
        let status = Arc::new(Status::new(callback));
        tokio::spawn(attend(Arc::downgrade(&status), client.clone()));
        Self { client, options, root: OnceCell::new(), status, unsaved }
    }

    /// Finds the directory, making it if it is missing and may be written.
    async fn root(&self) -> Result<InodeId, Errno> {
        let root = self.root.get_or_try_init(|| self.find_root()).await;
        root.copied().map_err(|error| self.failed(Part::Names, &error))
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
    fn failed(&self, part: Part, error: &Error) -> Errno {
        if is_silence(error.code) {
            tracing::warn!(%error, "the store does not answer");
            self.status.fails(part, &Failure::new(Reason::StoreUnavailable, error.to_string()));
        } else if error.code == Code::Internal {
            tracing::error!(%error, "the store failed");
        }
        errno(error.code)
    }

    fn done<T>(&self, part: Part, result: Result<T, Error>) -> Result<T, Errno> {
        match result {
            Ok(value) => {
                self.status.works(|failing| failing.is_within(&part));
                Ok(value)
            }
            Err(error) => Err(self.failed(part, &error)),
        }
    }

    /// Of an operation that only the metadata service answers.
    fn named<T>(&self, result: Result<T, Error>) -> Result<T, Errno> {
        self.done(Part::Names, result)
    }
}

/// Whether a code says that nobody answered; every other one is an answer.
const fn is_silence(code: Code) -> bool {
    matches!(code, Code::Unreachable | Code::Timeout | Code::ChainUnavailable | Code::NoChainTable)
}

/// Asks again what did not answer, until the file system is gone: the application may not do so for a long time.
async fn attend(status: Weak<Status<Part>>, client: Client) {
    loop {
        tokio::time::sleep(TICK).await;
        let Some(status) = status.upgrade() else { return };
        for (part, _) in status.failing() {
            let answered = match part {
                Part::Names => client.stat_file_system().await.map(drop),
                Part::NewFiles => client.wait_routing(|routing| routing.table != 0).await,
                Part::Bytes { inode, offset, length } => {
                    client.read(inode, offset, length).await.map(drop)
                }
                // It was lost and is not written again, so that its chain answers is all that can be found out.
                Part::Saved(inode) => client.read(inode, 0, 1).await.map(drop),
            };
            if answered.is_err_and(|error| is_silence(error.code)) {
                break;
            }
            status.works(|failing| failing.is_within(&part));
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

/// The errno of a call on an open file: what is not found was there when it was opened.
fn stale(errno: Errno) -> Errno {
    if errno == Errno::ENOENT { Errno::ESTALE } else { errno }
}

const fn identity(caller: Caller) -> Identity {
    Identity { uid: caller.uid, gid: caller.gid }
}

#[async_trait::async_trait]
impl FileSystem for StoreFs {
    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, Errno> {
        let parent = self.inode(parent).await?;
        // A name that is not there is an answer, not a failure of the store.
        self.named(self.client.lookup(parent, name).await).map(|found| self.attr(&found))
    }

    async fn getattr(&self, ino: u64) -> Result<Attr, Errno> {
        let inode = self.inode(ino).await?;
        self.named(self.client.attributes(inode).await).map(|found| self.attr(&found))
    }

    async fn setattr(&self, caller: Caller, ino: u64, set: SetAttr) -> Result<Attr, Errno> {
        self.writable()?;
        let (inode, caller) = (self.inode(ino).await?, identity(caller));
        let SetAttr { size, mode, uid, gid, accessed_ns, modified_ns } = set;
        if let Some(size) = size {
            self.done(Part::Saved(inode), self.client.truncate(caller, inode, size).await)?;
        }
        let change = client::AttributeChange { mode, uid, gid, accessed_ns, modified_ns };
        if change == client::AttributeChange::default() {
            return self.getattr(ino).await;
        }
        let changed = self.client.set_attributes(caller, inode, change).await;
        self.named(changed).map(|found| self.attr(&found))
    }

    async fn readdir(&self, ino: u64, cookie: u64, limit: u32) -> Result<DirPage, Errno> {
        let inode = self.inode(ino).await?;
        let page = self.named(self.client.read_directory(inode, cookie, limit).await)?;
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
        let opened = self.named(self.client.open(identity(caller), inode, write).await)?;
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
        let part = match &made {
            Err(error) if error.code != Code::NoChainTable => Part::Names,
            _ => Part::NewFiles,
        };
        self.done(part, made).map(|made| Opened { attr: self.attr(&made), keep_cache: false })
    }

    async fn read_parts(&self, ino: u64, offset: u64, length: u32) -> Result<Vec<Bytes>, Errno> {
        let inode = self.inode(ino).await?;
        let part = Part::Bytes { inode, offset, length };
        self.done(part, self.client.read(inode, offset, length).await).map_err(stale)
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
        let _coming = self.unsaved.mark(inode).map_err(|error| {
            tracing::error!(%inode, %error, "mark a file as unsaved");
            Errno::EIO
        })?;
        // Taken into a buffer: that says nothing about the store, but that it was not taken does.
        let taken = self.client.write(identity(caller), inode, offset, bytes).await;
        taken.map_err(|error| stale(self.failed(Part::Saved(inode), &error)))
    }

    async fn flush(&self, ino: u64) -> Result<(), Errno> {
        let inode = self.inode(ino).await?;
        let writes = self.unsaved.writes(inode);
        self.done(Part::Saved(inode), self.client.flush(inode).await).map_err(stale)?;
        self.unsaved.clear(inode, writes);
        if self.unsaved.take_lost(inode) {
            tracing::error!(%inode, "an earlier sidecar died with unsaved bytes of this file");
            return Err(Errno::EIO);
        }
        Ok(())
    }

    async fn flush_all(&self) -> Result<(), Errno> {
        self.named(self.client.flush_all().await)?;
        self.unsaved.tidy(&self.client);
        Ok(())
    }

    fn unsaved_bytes(&self) -> usize {
        self.client.unsaved_bytes()
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
        self.named(made).map(|made| self.attr(&made))
    }

    async fn unlink(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.writable()?;
        let parent = self.inode(parent).await?;
        self.named(self.client.remove(identity(caller), parent, name, false).await)
    }

    async fn rmdir(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.writable()?;
        let parent = self.inode(parent).await?;
        self.named(self.client.remove(identity(caller), parent, name, true).await)
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
        self.named(self.client.rename(identity(caller), from, to, no_replace).await)
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
        self.named(made).map(|made| self.attr(&made))
    }

    async fn readlink(&self, ino: u64) -> Result<Bytes, Errno> {
        let inode = self.inode(ino).await?;
        self.named(self.client.read_symlink(inode).await)
    }

    async fn statfs(&self) -> Result<StatFs, Errno> {
        let stat = self.named(self.client.stat_file_system().await)?;
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
    use std::sync::Mutex;

    type Words = Arc<Mutex<Vec<Result<(), Reason>>>>;

    /// Over a store that does not answer.
    fn files(dir: &std::path::Path) -> (StoreFs, Words) {
        let words = Words::default();
        let sink = Arc::clone(&words);
        let callback: StatusCallback =
            Arc::new(move |word| sink.lock().unwrap().push(word.map_err(|failure| failure.reason)));
        let options = StoreOptions { path: "/".into(), read_only: false, uid: 0, gid: 0 };
        let client = Client::new(client::ClientOptions::new("127.0.0.1:1"));
        let unsaved = Unsaved::open(dir.to_owned()).unwrap();
        (StoreFs::new(client, options, unsaved, callback), words)
    }

    #[tokio::test]
    async fn a_dead_chain_is_told_once_beside_one_that_lives() {
        let dir = tempfile::tempdir().unwrap();
        let (files, words) = files(dir.path());
        let part = |offset| Part::Bytes { inode: InodeId::new(7), offset, length: 4096 };
        let dead = || Err::<(), _>(Error::new(Code::ChainUnavailable, "chain 1"));
        files.named(Ok(())).unwrap();
        for _ in 0..3 {
            assert_eq!(files.done(part(4096), dead()), Err(Errno::EIO));
            files.done(part(0), Ok(())).unwrap();
            files.named(Ok(())).unwrap();
            files.done(Part::Saved(InodeId::new(7)), Ok(())).unwrap();
        }
        assert_eq!(*words.lock().unwrap(), [Ok(()), Err(Reason::StoreUnavailable)]);
        // A longer read has those bytes too.
        let longer = Part::Bytes { inode: InodeId::new(7), offset: 0, length: 1 << 20 };
        files.done(longer, Ok(())).unwrap();
        assert_eq!(*words.lock().unwrap(), [Ok(()), Err(Reason::StoreUnavailable), Ok(())]);
    }

    #[tokio::test]
    async fn names_that_answer_do_not_hide_that_no_file_can_be_made() {
        let dir = tempfile::tempdir().unwrap();
        let (files, words) = files(dir.path());
        files.named(Ok(())).unwrap();
        for _ in 0..3 {
            let none = Err::<(), _>(Error::new(Code::NoChainTable, "create a file"));
            assert_eq!(files.done(Part::NewFiles, none), Err(Errno::EIO));
            files.named(Ok(())).unwrap();
        }
        assert_eq!(*words.lock().unwrap(), [Ok(()), Err(Reason::StoreUnavailable)]);
        files.done(Part::NewFiles, Ok(())).unwrap();
        assert_eq!(*words.lock().unwrap(), [Ok(()), Err(Reason::StoreUnavailable), Ok(())]);
    }

    #[test]
    fn a_file_that_is_gone_under_its_reader_is_stale() {
        assert_eq!(stale(errno(Code::NotFound)), Errno::ESTALE);
        assert_eq!(stale(errno(Code::Timeout)), Errno::EIO);
    }

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
