//! The engine: keeps the chunks of all targets on one disk.
//!
//! It owns a directory with a superblock (whose disk is this), RocksDB (what is where) and one
//! file of blocks (the bytes). It promises: what [`Engine::stage`] returned is durable; every
//! byte that [`Engine::read`] returns was verified; no block that holds committed bytes is
//! written. It never decides whether an update is right: that is the chain's business.
//! `ENGINE.md` has the layout on disk and the crash argument.
//!
//! Begin with `types.rs` (what it takes and gives), then `plan.rs` (what an update changes),
//! `update.rs` (in which order it is done) and `log.rs` (how it becomes durable).

mod alloc;
pub(crate) mod buf;
mod checksum;
mod fuzz;
pub(crate) mod io;
mod log;
mod open;
mod plan;
mod read;
mod record;
mod store;
mod superblock;
mod types;
mod update;
mod verify;

use std::fs::File;
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chain::id::{ChainVersion, ChunkId, InodeId, TargetId, UpdateVersion};
use rocksdb::DB;
use tokio::sync::{Mutex, MutexGuard};

pub use fuzz::fuzz_open;
pub use superblock::OpenError;
pub use types::{
    Applied, ChunkInfo, ChunkState, Duplicates, EngineState, Error, FileView, IoMode,
    MAX_CHUNK_SIZE, MAX_DUPLICATES, MAX_TARGET_RECORD, Op, Options, Place, Read, Replace, Stage,
    Stats, Which,
};
pub use verify::{Problem, Report, verify};

use self::alloc::Allocator;
use self::io::Io;
use self::log::{Change, Durability, Failure, Log};
use self::record::{parse_target_key, target_key};
use self::store::Records;

/// Locks that chunks share by their hash. Many, so that two chunks rarely wait for one another.
const LOCKS: usize = 1024;

/// Space that growth of the block file leaves to the metadata, which must never be short of it.
const RESERVE_BYTES: u64 = 32 << 20;

/// One disk. Cheap to clone. Needs a tokio runtime around it.
///
/// A future that is dropped does not stop the work: an update that was begun ends, or the
/// process does.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    updates: AtomicU64,
    update_bytes: AtomicU64,
    block_bytes: AtomicU64,
    barriers: Arc<AtomicU64>,
    corrupt_pages: AtomicU64,
}

// Fields are dropped in this order: the log writes its last barrier while the rest is there.
#[derive(Debug)]
struct Inner {
    log: Log,
    io: Io,
    db: Arc<DB>,
    blocks: Arc<File>,
    allocator: Arc<Allocator>,
    locks: Vec<Mutex<()>>,
    counters: Counters,
    failure: Failure,
    state: EngineState,
    /// Held while the engine is open.
    _lock_file: File,
}

impl Engine {
    /// Opens the disk, or formats an empty directory. Blocks; the engine serves on return.
    ///
    /// # Errors
    /// [`Error::Open`] names what is wrong with the directory and what to do about it.
    pub fn open(options: &Options) -> Result<Self, Error> {
        let inner = open::open(options).map_err(|e| Error::Open(Arc::new(e)))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Makes an update the chunk's pending state; durable on return.
    ///
    /// The same update (version and id) again answers as before, under the later chain version.
    /// [`Op::Replace`] takes the place of whatever is pending.
    ///
    /// # Errors
    /// Refusals change nothing. [`Error::Failed`] leaves open whether the update is on disk.
    pub async fn stage(&self, target: TargetId, stage: Stage) -> Result<ChunkState, Error> {
        self.detached(async move |inner| inner.stage(target, stage).await).await
    }

    /// Makes the pending update `version` the committed state, for readers at once.
    ///
    /// It is durable with the engine's next barrier, at most 50 ms later; a crash before shows it
    /// as pending again. Answers as before if it is committed already.
    ///
    /// # Errors
    /// [`Error::NotPending`], [`Error::StaleChain`].
    pub async fn commit(
        &self,
        target: TargetId,
        chunk: ChunkId,
        version: UpdateVersion,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, Error> {
        self.detached(async move |inner| inner.commit(target, chunk, version, chain_version).await)
            .await
    }

    /// Forgets the pending update `version`; durable on return. Nothing pending is fine.
    ///
    /// # Errors
    /// [`Error::NotPending`] if another version is pending.
    pub async fn drop_pending(
        &self,
        target: TargetId,
        chunk: ChunkId,
        version: UpdateVersion,
    ) -> Result<(), Error> {
        self.detached(async move |inner| inner.drop_pending(target, chunk, version).await).await
    }

    /// Up to `length` bytes from `offset` of one state of a chunk, fewer where it ends.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such state or it is a removal; [`Error::Corrupt`] if
    /// stored bytes do not verify: reading them here again is of no use.
    pub async fn read(
        &self,
        target: TargetId,
        chunk: ChunkId,
        offset: u64,
        length: u64,
        which: Which,
    ) -> Result<Read, Error> {
        self.inner.read(target, chunk, offset, length, which).await
    }

    /// What is known of a chunk, as of one moment; nothing for an unknown one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if its record does not verify.
    pub fn meta(&self, target: TargetId, chunk: ChunkId) -> Result<ChunkInfo, Error> {
        self.inner.check_alive()?;
        store::chunk(&self.inner.db.snapshot(), Place { target, chunk }).map(info)
    }

    /// Up to `limit` chunks behind `from` in order, removals and pending ones included.
    ///
    /// # Errors
    /// [`Error::Corrupt`] at the first record that does not verify.
    pub fn list(
        &self,
        target: TargetId,
        from: Option<ChunkId>,
        limit: usize,
    ) -> Result<Vec<(ChunkId, ChunkInfo)>, Error> {
        self.inner.check_alive()?;
        let page = store::list(&self.inner.db, target, from, limit)?;
        Ok(page.into_iter().map(|(chunk, records)| (chunk, info(records))).collect())
    }

    /// Up to `limit` chunks of a file from index `from` on, the file's last chunk, and what is
    /// pending there, as of one moment. Blocks: records of removals are passed one by one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] at the first record on the way that does not verify.
    pub fn file(
        &self,
        target: TargetId,
        file: InodeId,
        from: u64,
        limit: usize,
    ) -> Result<FileView, Error> {
        self.inner.check_alive()?;
        store::file(&self.inner.db, target, file, from, limit)
    }

    /// Drops the record of a removal; durable on return. An unknown chunk is fine.
    ///
    /// # Errors
    /// [`Error::BadUpdate`] if the chunk is not removed at `version`, [`Error::OtherPending`].
    pub async fn forget_removed(
        &self,
        target: TargetId,
        chunk: ChunkId,
        version: UpdateVersion,
    ) -> Result<(), Error> {
        self.detached(async move |inner| inner.forget_removed(target, chunk, version).await).await
    }

    /// Keeps a record of the server's own about a target; durable on return.
    ///
    /// # Errors
    /// [`Error::Failed`].
    ///
    /// # Panics
    /// If the record is longer than [`MAX_TARGET_RECORD`].
    pub async fn set_target_record(&self, target: TargetId, record: Vec<u8>) -> Result<(), Error> {
        assert!(record.len() <= MAX_TARGET_RECORD, "record of a target is too long");
        self.inner.check_alive()?;
        let key = target_key(target);
        let mut change = Change::new(Durability::Metadata);
        change.puts.push((key.clone(), record::seal(&key, &record)));
        self.inner.log.apply(change).await
    }

    /// All targets that have a record, with it.
    ///
    /// # Errors
    /// [`Error::Failed`] if a record does not verify: without it no target may serve.
    pub fn targets(&self) -> Result<Vec<(TargetId, Vec<u8>)>, Error> {
        self.inner.check_alive()?;
        let damaged = |detail: &str| Error::Failed(format!("record of a target: {detail}").into());
        let mode = rocksdb::IteratorMode::From(b"t", rocksdb::Direction::Forward);
        let mut targets = Vec::new();
        for item in self.inner.db.iterator(mode) {
            let (key, value) = item.map_err(|e| damaged(e.as_ref()))?;
            if !key.starts_with(b"t") {
                break;
            }
            let target = parse_target_key(&key).ok_or_else(|| damaged("malformed key"))?;
            targets.push((target, record::unseal(&key, &value).map_err(damaged)?.to_vec()));
        }
        Ok(targets)
    }

    /// Space and work so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let counters = &self.inner.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (capacity_bytes, used_bytes) = self.inner.allocator.space();
        Stats {
            capacity_bytes,
            used_bytes,
            reads: get(&counters.reads),
            read_bytes: get(&counters.read_bytes),
            updates: get(&counters.updates),
            update_bytes: get(&counters.update_bytes),
            block_bytes: get(&counters.block_bytes),
            barriers: get(&counters.barriers),
            corrupt_pages: get(&counters.corrupt_pages),
        }
    }

    /// What the engine is, for `/state`.
    #[must_use]
    pub fn state(&self) -> EngineState {
        EngineState { failed: self.failed(), ..self.inner.state.clone() }
    }

    /// Why the engine no longer serves, if so. It never serves again.
    #[must_use]
    pub fn failed(&self) -> Option<String> {
        self.inner.failure.get().map(ToString::to_string)
    }

    /// Runs work to its end, whether or not the caller still waits for it.
    async fn detached<T, F>(&self, work: impl FnOnce(Arc<Inner>) -> F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let task = tokio::spawn(work(Arc::clone(&self.inner)));
        task.await.unwrap_or_else(|e| Err(Error::Failed(format!("update task: {e}").into())))
    }
}

impl Inner {
    fn check_alive(&self) -> Result<(), Error> {
        self.failure.get().map_or(Ok(()), |reason| Err(Error::Failed(Arc::clone(reason))))
    }

    /// Ends the engine's service.
    fn fail(&self, reason: String) -> Error {
        Error::Failed(Arc::clone(self.failure.get_or_init(|| reason.into())))
    }

    /// Keeps others from changing the chunk.
    async fn lock(&self, place: Place) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        place.hash(&mut hasher);
        let index = hasher.finish() % LOCKS as u64;
        #[expect(clippy::cast_possible_truncation, reason = "below LOCKS by the modulus")]
        self.locks[index as usize].lock().await
    }
}

fn info(records: Records) -> ChunkInfo {
    ChunkInfo {
        committed: records.committed.map(|r| r.state),
        pending: records.pending.map(|r| r.state),
    }
}

/// Sets bytes `from..to` of the block file aside, and leaves enough for the metadata.
fn grow(blocks: &File, from: u64, to: u64) -> std::io::Result<()> {
    let fs = rustix::fs::fstatvfs(blocks)?;
    if fs.f_bavail.saturating_mul(fs.f_frsize) < (to - from).saturating_add(RESERVE_BYTES) {
        return Err(std::io::ErrorKind::StorageFull.into());
    }
    let flags = rustix::fs::FallocateFlags::empty();
    Ok(rustix::fs::fallocate(blocks, flags, from, to - from)?)
}

#[cfg(test)]
mod tests;
