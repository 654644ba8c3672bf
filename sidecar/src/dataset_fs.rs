//! A dataset's objects as read-only files.
//!
//! An inode number is a hash of path *and* identity (the ETag): the same after a restart, another one when the object was
//! replaced. So an open file never mixes the bytes of two versions: it gets ESTALE, and opening again reads the new one.

mod blocks;
mod tree;

use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use source::{Failure, Reason, Source};
use tokio::time::Instant;

use crate::status::{Status, StatusCallback};
use crate::vfs::{
    Attr, Caller, DirEntry, DirPage, Errno, FileSystem, Kind, Opened, ROOT, SetAttr, StatFs,
};
use blocks::Blocks;
use tree::{Node, Tree};

/// How often a failing dataset is tried again, unless [`DatasetOptions`] say otherwise.
const TICK: Duration = Duration::from_secs(2);
/// Least time between two listings.
const LIST_PAUSE: Duration = Duration::from_secs(2);
/// A name that is missing is looked for in a new listing if the last one is older.
const MISSING_AGE: Duration = Duration::from_secs(30);
/// Attempts of one read, for failures that pass by themselves.
const READ_ATTEMPTS: u32 = 3;
/// Pause between them.
const READ_PAUSE: Duration = Duration::from_millis(300);

/// Whose the files appear to be, how much memory they may take, and how soon they heal.
#[derive(Clone, Copy, Debug)]
pub struct DatasetOptions {
    /// Owner of every file.
    pub uid: u32,
    /// Group of every file.
    pub gid: u32,
    /// Bytes of fetched blocks that are kept at most.
    pub cache_bytes: usize,
    /// How often what fails is tried again, and idle blocks are dropped.
    pub tick: Duration,
}

impl Default for DatasetOptions {
    fn default() -> Self {
        Self { uid: 0, gid: 0, cache_bytes: 12 << 20, tick: TICK }
    }
}

/// The file system.
#[derive(Debug)]
pub struct DatasetFs {
    source: Arc<dyn Source>,
    options: DatasetOptions,
    tree: RwLock<Option<Arc<Tree>>>,
    listing: tokio::sync::Mutex<Listing>,
    blocks: Blocks,
    status: Status<Part>,
}

/// What of a dataset works or fails by itself: keys may list that may not get, and get one object but not another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    List,
    Block { ino: u64, block: u64 },
}

/// The last attempt to list.
#[derive(Debug, Default)]
struct Listing {
    at: Option<Instant>,
    failure: Option<Failure>,
}

impl DatasetFs {
    /// A file system over `source`. Lists it in the background at once, and again while it fails, until the returned value
    /// is dropped; `callback` hears what comes of it. Must be called inside a tokio runtime.
    #[must_use]
    pub fn start(
        source: Arc<dyn Source>,
        options: DatasetOptions,
        callback: StatusCallback,
    ) -> Arc<Self> {
        let fs = Arc::new(Self {
            source,
            options,
            tree: RwLock::new(None),
            listing: tokio::sync::Mutex::new(Listing::default()),
            blocks: Blocks::new(options.cache_bytes),
            status: Status::new(callback),
        });
        tokio::spawn(attend(Arc::downgrade(&fs)));
        fs
    }

    fn current(&self) -> Option<Arc<Tree>> {
        self.tree.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The tree, listed first if there is none.
    async fn tree(&self) -> Result<Arc<Tree>, Errno> {
        match self.current() {
            Some(tree) => Ok(tree),
            None => self.list(LIST_PAUSE).await,
        }
    }

    /// Lists again unless that happened less than `age` ago. The old tree stays when listing fails.
    async fn list(&self, age: Duration) -> Result<Arc<Tree>, Errno> {
        let mut listing = self.listing.lock().await;
        if listing.at.is_none_or(|at| at.elapsed() >= age) {
            let listed = self.source.list().await;
            listing.at = Some(Instant::now());
            listing.failure = match listed {
                Ok(objects) => {
                    let tree = Arc::new(Tree::new(objects));
                    let new = Arc::clone(&tree);
                    *self.tree.write().unwrap_or_else(PoisonError::into_inner) = Some(new);
                    self.status.works(|part| match part {
                        Part::List => true,
                        // An object that was replaced or removed: nobody can read it any more.
                        Part::Block { ino, .. } => tree.node(*ino).is_none(),
                    });
                    None
                }
                Err(failure) => {
                    tracing::warn!(source = %self.source.describe(), %failure, "list the dataset");
                    self.status.fails(Part::List, &failure);
                    Some(failure)
                }
            };
        }
        match (&listing.failure, self.current()) {
            (_, Some(tree)) => Ok(tree),
            (Some(failure), None) => Err(errno(failure.reason)),
            (None, None) => Err(Errno::EIO),
        }
    }

    fn attr(&self, ino: u64, node: &Node) -> Attr {
        let (kind, size, mode, links, modified_ms) = match node {
            Node::Directory(_) => (Kind::Directory, 0, 0o555, 2, 0),
            Node::File(object) => (Kind::File, object.size, 0o444, 1, object.modified_ms),
        };
        let modified_ns = modified_ms.saturating_mul(1_000_000);
        Attr {
            ino,
            kind,
            size,
            mode,
            uid: self.options.uid,
            gid: self.options.gid,
            links,
            accessed_ns: modified_ns,
            modified_ns,
            changed_ns: modified_ns,
            block_size: blocks::BLOCK_BYTES,
        }
    }

    /// The inode, or what its absence means: an object of an earlier listing was replaced or removed.
    async fn attr_of(&self, ino: u64) -> Result<Attr, Errno> {
        let tree = self.tree().await?;
        let node = tree.node(ino).ok_or(Errno::ESTALE)?;
        Ok(self.attr(ino, node))
    }

    async fn fetch(self: Arc<Self>, ino: u64, block: u64) -> Result<Bytes, Failure> {
        let stale = || Failure::new(Reason::DatasetChanged, "the object is another one now");
        let tree = self.current().ok_or_else(stale)?;
        let Some(Node::File(object)) = tree.node(ino) else { return Err(stale()) };
        let start = block * u64::from(blocks::BLOCK_BYTES);
        let end = object.size.min(start + u64::from(blocks::BLOCK_BYTES));
        let mut attempt = 1;
        loop {
            match self.source.read(object, start..end).await {
                Err(failure) if failure.reason.is_retryable() && attempt < READ_ATTEMPTS => {
                    attempt += 1;
                    tokio::time::sleep(READ_PAUSE).await;
                }
                Ok(bytes) => {
                    self.status.works(|part| *part == Part::Block { ino, block });
                    return Ok(bytes);
                }
                failed => return failed,
            }
        }
    }

    fn block(self: &Arc<Self>, ino: u64, block: u64) -> blocks::Fetched {
        self.blocks.get(ino, block, || Box::pin(Arc::clone(self).fetch(ino, block)))
    }

    async fn read_blocks(
        self: &Arc<Self>,
        ino: u64,
        offset: u64,
        length: u32,
    ) -> Result<Vec<Bytes>, Errno> {
        let attr = self.attr_of(ino).await?;
        if attr.kind != Kind::File {
            return Err(Errno::EISDIR);
        }
        let size = u64::from(blocks::BLOCK_BYTES);
        let end = attr.size.min(offset.saturating_add(u64::from(length)));
        if offset >= end {
            return Ok(Vec::new());
        }
        let (first, last) = (offset / size, (end - 1) / size);
        let fetched: Vec<_> = (first..=last).map(|block| self.block(ino, block)).collect();
        for ahead in self.blocks.ahead(ino, first, last, attr.size.div_ceil(size)) {
            // Runs by itself; who reads it finds it in the cache.
            drop(tokio::spawn(self.block(ino, ahead)));
        }
        let mut parts = Vec::with_capacity(fetched.len());
        for (block, fetched) in (first..=last).zip(fetched) {
            let bytes = match fetched.await {
                Ok(bytes) => bytes,
                // It may have failed before this reader came, for a reason that has passed.
                Err(_) => {
                    self.blocks.forget(ino, block);
                    let again = self.block(ino, block).await;
                    again.map_err(|failure| self.read_failed(ino, block, &failure))?
                }
            };
            let start = offset.max(block * size) - block * size;
            let stop = end.min((block + 1) * size) - block * size;
            let (Ok(start), Ok(stop)) = (usize::try_from(start), usize::try_from(stop)) else {
                return Err(Errno::EIO);
            };
            if stop > bytes.len() {
                return Err(Errno::EIO);
            }
            parts.push(bytes.slice(start..stop));
        }
        Ok(parts)
    }

    fn read_failed(&self, ino: u64, block: u64, failure: &Failure) -> Errno {
        self.blocks.forget(ino, block);
        tracing::warn!(source = %self.source.describe(), %failure, "read the dataset");
        self.status.fails(Part::Block { ino, block }, failure);
        errno(failure.reason)
    }

    /// Tries again what failed: only its own success says that it works.
    async fn try_again(self: &Arc<Self>) {
        let failing = self.status.failing();
        let outdated = |(part, reason): &(Part, Reason)| {
            *part == Part::List || matches!(reason, Reason::DatasetChanged | Reason::ObjectNotFound)
        };
        if self.current().is_none() || failing.iter().any(outdated) {
            // The status has the outcome.
            drop(self.list(Duration::ZERO).await);
        }
        for (part, _) in self.status.failing() {
            let Part::Block { ino, block } = part else { continue };
            // One that fails is enough for now: the others would fail alike, and each asks the endpoint.
            if let Err(failure) = Arc::clone(self).fetch(ino, block).await {
                return self.status.fails(part, &failure);
            }
        }
    }
}

/// Tries again what fails, and drops idle blocks, until the file system is gone.
async fn attend(fs: Weak<DatasetFs>) {
    while let Some(fs) = fs.upgrade() {
        fs.try_again().await;
        fs.blocks.drop_idle();
        let tick = fs.options.tick;
        drop(fs);
        tokio::time::sleep(tick).await;
    }
}

/// The errno of each reason.
const fn errno(reason: Reason) -> Errno {
    match reason {
        Reason::InvalidCredentials | Reason::AccessDenied => Errno::EACCES,
        Reason::ObjectNotFound => Errno::ENOENT,
        Reason::DatasetChanged => Errno::ESTALE,
        _ => Errno::EIO,
    }
}

/// What a front end drives: shares the file system that [`DatasetFs::start`] made.
#[derive(Clone, Debug)]
pub struct SharedDatasetFs(pub Arc<DatasetFs>);

#[async_trait::async_trait]
impl FileSystem for SharedDatasetFs {
    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, Errno> {
        let fs = &self.0;
        let mut tree = fs.tree().await?;
        if tree.child(parent, name).is_none() {
            tree = fs.list(MISSING_AGE).await?;
        }
        let ino = tree.child(parent, name).ok_or(Errno::ENOENT)?;
        let node = tree.node(ino).ok_or(Errno::ENOENT)?;
        Ok(fs.attr(ino, node))
    }

    async fn getattr(&self, ino: u64) -> Result<Attr, Errno> {
        if ino == ROOT && self.0.current().is_none() {
            // The mount point answers while the first listing is under way or failing.
            return Ok(self.0.attr(ROOT, &Node::Directory(Vec::new())));
        }
        self.0.attr_of(ino).await
    }

    async fn setattr(&self, _: Caller, _: u64, _: SetAttr) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    async fn readdir(&self, ino: u64, cookie: u64, limit: u32) -> Result<DirPage, Errno> {
        let tree = self.0.tree().await?;
        let Node::Directory(names) = tree.node(ino).ok_or(Errno::ESTALE)? else {
            return Err(Errno::ENOTDIR);
        };
        let from = names.partition_point(|(at, _)| *at <= cookie);
        let behind = names.get(from..).unwrap_or_default();
        let entries = behind.iter().take(limit as usize).filter_map(|(ino, name)| {
            let attr = self.0.attr(*ino, tree.node(*ino)?);
            Some(DirEntry { name: Bytes::copy_from_slice(name.as_bytes()), cookie: *ino, attr })
        });
        Ok(DirPage { entries: entries.collect(), end: behind.len() <= limit as usize })
    }

    async fn open(&self, _: Caller, ino: u64, write: bool) -> Result<Opened, Errno> {
        if write {
            return Err(Errno::EROFS);
        }
        // The bytes behind an inode number never change.
        Ok(Opened { attr: self.0.attr_of(ino).await?, keep_cache: true })
    }

    async fn create(&self, _: Caller, _: u64, _: &[u8], _: u32, _: bool) -> Result<Opened, Errno> {
        Err(Errno::EROFS)
    }

    async fn read_parts(&self, ino: u64, offset: u64, length: u32) -> Result<Vec<Bytes>, Errno> {
        self.0.read_blocks(ino, offset, length).await
    }

    async fn write(&self, _: Caller, _: u64, _: u64, _: Bytes) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    async fn flush(&self, _: u64) -> Result<(), Errno> {
        Ok(())
    }

    async fn fsync(&self, _: u64) -> Result<(), Errno> {
        Ok(())
    }

    async fn release(&self, _: u64, _: bool) {}

    async fn mkdir(&self, _: Caller, _: u64, _: &[u8], _: u32) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    async fn unlink(&self, _: Caller, _: u64, _: &[u8]) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    async fn rmdir(&self, _: Caller, _: u64, _: &[u8]) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    async fn rename(
        &self,
        _: Caller,
        _: (u64, &[u8]),
        _: (u64, &[u8]),
        _: bool,
    ) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    async fn symlink(&self, _: Caller, _: u64, _: &[u8], _: &[u8]) -> Result<Attr, Errno> {
        Err(Errno::EROFS)
    }

    async fn readlink(&self, _: u64) -> Result<Bytes, Errno> {
        Err(Errno::EINVAL)
    }

    async fn statfs(&self) -> Result<StatFs, Errno> {
        let tree = self.0.current();
        let (bytes, inodes) = tree.map_or((0, 1), |tree| tree.totals());
        Ok(StatFs { capacity_bytes: bytes, free_bytes: 0, inodes })
    }
}

#[cfg(test)]
mod tests;
