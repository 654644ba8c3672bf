//! The group commit: one thread that makes metadata durable for all updates under way.
//!
//! A group is what came while the previous one was being written. Its barriers, in this order:
//! 1. fdatasync of the block file, if any change of the group names a new block;
//! 2. one RocksDB batch with a synced log, if any change of the group must be durable.
//!
//! So metadata never names bytes that a power cut can take away. If either fails, every change
//! of the group fails, and the engine with it: after a failed sync the kernel may have dropped
//! the bytes and report success next time, so nothing is tried again.
//!
//! A commit needs no barrier of its own: a crash before the next one shows the update as pending
//! again, which loses nothing. The blocks it frees are reused only after that next barrier.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rocksdb::{DB, WriteBatch, WriteOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::alloc::{Allocation, Allocator, Block};
use super::types::Error;

/// Changes on their way to the log at most; beyond it updates wait.
const MAX_QUEUED: usize = 1024;
/// Changes in one group: bounds the size of a batch.
const MAX_GROUP: usize = 256;
/// A commit without a barrier gets one after this time without another update.
const IDLE_BARRIER: Duration = Duration::from_millis(50);

/// How durable a change is when it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Durability {
    /// Visible; durable with the next barrier.
    Lazy,
    /// Durable, and names no block that was not durable before.
    Metadata,
    /// Durable together with the new blocks that it names.
    Data,
}

/// A change of metadata, applied as a whole or not at all.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) durability: Durability,
    pub(super) puts: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) deletes: Vec<Vec<u8>>,
    /// Blocks that the change is the first to name.
    pub(super) allocations: Vec<Allocation>,
    /// Blocks that no metadata names after the change.
    pub(super) frees: Vec<Block>,
}

impl Change {
    pub(super) fn new(durability: Durability) -> Self {
        Self { durability, puts: vec![], deletes: vec![], allocations: vec![], frees: vec![] }
    }
}

struct Job {
    change: Change,
    reply: oneshot::Sender<Result<(), Error>>,
    _permit: OwnedSemaphorePermit,
}

/// What ended the engine's service; set once.
pub(super) type Failure = Arc<OnceLock<Arc<str>>>;

/// Handle of the thread; dropping it writes what was submitted and gives it a last barrier.
#[derive(Debug)]
pub(super) struct Log {
    /// Taken when the handle goes.
    jobs: Option<Sender<Job>>,
    permits: Arc<Semaphore>,
    thread: Option<JoinHandle<()>>,
    failure: Failure,
}

impl Log {
    pub(super) fn start(
        db: Arc<DB>,
        blocks: Arc<File>,
        allocator: Arc<Allocator>,
        failure: &Failure,
        barriers: Arc<AtomicU64>,
    ) -> std::io::Result<Self> {
        let (jobs, receiver) = mpsc::channel();
        let failure = Arc::clone(failure);
        let writer = Writer {
            db,
            blocks,
            allocator,
            failure: Arc::clone(&failure),
            barriers,
            unsynced: Vec::new(),
            is_synced: true,
        };
        let thread = thread::Builder::new().name("engine-log".to_owned());
        let thread = Some(thread.spawn(move || writer.run(&receiver))?);
        let permits = Arc::new(Semaphore::new(MAX_QUEUED));
        Ok(Self { jobs: Some(jobs), permits, thread, failure })
    }

    /// Makes everything durable that was applied before: the blocks that it freed are free then.
    pub(super) async fn barrier(&self) -> Result<(), Error> {
        self.apply(Change::new(Durability::Metadata)).await
    }

    /// Applies a change; on return it is visible, and as durable as it asked to be.
    pub(super) async fn apply(&self, change: Change) -> Result<(), Error> {
        let stopped = || Error::Failed("the engine's log has stopped".into());
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| stopped())?;
        let (reply, answer) = oneshot::channel();
        let job = Job { change, reply, _permit: permit };
        self.jobs.as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or_else(stopped)?;
        answer.await.unwrap_or_else(|_| {
            Err(self.failure.get().map_or_else(stopped, |reason| Error::Failed(Arc::clone(reason))))
        })
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to wait for.
            drop(thread.join());
        }
    }
}

struct Writer {
    db: Arc<DB>,
    blocks: Arc<File>,
    allocator: Arc<Allocator>,
    failure: Failure,
    barriers: Arc<AtomicU64>,
    /// Blocks freed by changes that are not durable yet.
    unsynced: Vec<Block>,
    is_synced: bool,
}

impl Writer {
    fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            let first = if self.is_synced {
                jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                jobs.recv_timeout(IDLE_BARRIER)
            };
            let group = match first {
                Ok(first) => {
                    std::iter::once(first).chain(jobs.try_iter()).take(MAX_GROUP).collect()
                }
                Err(RecvTimeoutError::Timeout) => Vec::new(),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            self.commit(group);
        }
        if !self.is_synced {
            self.commit(Vec::new());
        }
    }

    /// Writes a group; an empty one is a barrier for what came before.
    fn commit(&mut self, mut group: Vec<Job>) {
        let result = match self.failure.get() {
            Some(reason) => Err(Arc::clone(reason)),
            None => self.write(&group),
        };
        if let Err(reason) = &result {
            // The first failure is the one to tell.
            drop(self.failure.set(Arc::clone(reason)));
            // Without this the barrier would be tried again.
            self.is_synced = true;
            self.unsynced.clear();
        } else {
            for job in &mut group {
                job.change.allocations.drain(..).for_each(Allocation::keep);
                self.unsynced.append(&mut job.change.frees);
            }
            if self.is_synced {
                self.allocator.retire(self.unsynced.drain(..));
            }
        }
        for job in group {
            // Of a failed change it is not known whether it is on disk: its blocks stay taken.
            job.change.allocations.into_iter().for_each(Allocation::keep);
            // A caller that is gone wanted no answer.
            drop(job.reply.send(result.clone().map_err(Error::Failed)));
        }
    }

    fn write(&mut self, group: &[Job]) -> Result<(), Arc<str>> {
        let durability = group.iter().map(|job| job.change.durability).max();
        let durability = durability.unwrap_or(Durability::Metadata);
        if durability == Durability::Data {
            self.barriers.fetch_add(1, Ordering::Relaxed);
            rustix::fs::fdatasync(&self.blocks).map_err(|e| format!("sync block file: {e}"))?;
        }
        let mut batch = WriteBatch::default();
        for change in group.iter().map(|job| &job.change) {
            change.puts.iter().for_each(|(key, value)| batch.put(key, value));
            change.deletes.iter().for_each(|key| batch.delete(key));
        }
        let is_synced = durability > Durability::Lazy;
        let mut options = WriteOptions::default();
        options.set_sync(is_synced);
        let written = if batch.is_empty() {
            self.db.flush_wal(is_synced)
        } else {
            self.db.write_opt(batch, &options)
        };
        written.map_err(|e| format!("write metadata: {e}"))?;
        self.is_synced = is_synced;
        self.barriers.fetch_add(u64::from(is_synced), Ordering::Relaxed);
        Ok(())
    }
}
