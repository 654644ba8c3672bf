//! Chunks fetched before a sequential reader asks for them. Bounded in bytes over all files, dropped after a second, so that
//! nobody sees older bytes than the attribute time allows.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chain::id::InodeId;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use rpc::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// How far a request may be from the expected place and still count as sequential: kernels send several at once.
const SLACK: u64 = 2 << 20;
/// Sequential requests before anything is fetched.
const PATIENCE: u32 = 2;
/// Chunks ahead of one reader at most.
const CHUNKS_MAX: u64 = 4;
/// How long a fetched chunk may be used.
const FRESH_FOR: Duration = Duration::from_secs(1);
/// Files whose readers are watched; all are dropped when there are more.
const FILES_MAX: usize = 1024;

type Fetched = Shared<BoxFuture<'static, Result<Bytes, Error>>>;

#[derive(Debug)]
struct Slot {
    index: u64,
    fetched: Fetched,
    born: Instant,
    _bytes: OwnedSemaphorePermit,
}

#[derive(Debug, Default)]
struct Reader {
    /// Another one for each life of the entry: what was noticed before a file was forgotten starts nothing after it.
    id: u64,
    expected: u64,
    sequential: u32,
    slots: VecDeque<Slot>,
}

/// What to fetch, and for whom.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ahead {
    reader: u64,
    pub(crate) chunks: Vec<u64>,
}

/// The readers of all files.
#[derive(Debug)]
pub(crate) struct Readahead {
    budget: Arc<Semaphore>,
    next_id: AtomicU64,
    readers: Mutex<HashMap<InodeId, Reader>>,
}

impl Readahead {
    pub(crate) fn new(bytes: usize) -> Self {
        let budget = Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)));
        Self { budget, next_id: AtomicU64::new(1), readers: Mutex::new(HashMap::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InodeId, Reader>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a read of `length` bytes at `offset`; says which chunks to fetch ahead.
    pub(crate) fn notice(
        &self,
        inode: InodeId,
        offset: u64,
        length: u64,
        chunk_size: u32,
        file_length: u64,
    ) -> Ahead {
        if self.budget.available_permits() < chunk_size as usize
            && !self.lock().contains_key(&inode)
        {
            return Ahead::default();
        }
        let mut readers = self.lock();
        if readers.len() >= FILES_MAX {
            readers.clear();
        }
        let fresh =
            || Reader { id: self.next_id.fetch_add(1, Ordering::Relaxed), ..Reader::default() };
        let reader = readers.entry(inode).or_insert_with(fresh);
        let near = offset.abs_diff(reader.expected) <= SLACK;
        reader.sequential = if near { reader.sequential.saturating_add(1) } else { 0 };
        let end = offset + length;
        reader.expected = if near { reader.expected.max(end) } else { end };
        if !near {
            reader.slots.clear();
            return Ahead::default();
        }
        let size = u64::from(chunk_size);
        let behind = (reader.expected.saturating_sub(SLACK)) / size;
        reader.slots.retain(|slot| slot.index >= behind && slot.born.elapsed() <= FRESH_FOR);
        if reader.sequential <= PATIENCE {
            return Ahead::default();
        }
        let first = reader.expected.div_ceil(size);
        let chunks = file_length.div_ceil(size);
        let depth = u64::from(reader.sequential - PATIENCE).min(CHUNKS_MAX);
        let chunks = (first..(first + depth).min(chunks))
            .filter(|index| reader.slots.iter().all(|slot| slot.index != *index))
            .collect();
        Ahead { reader: reader.id, chunks }
    }

    /// Starts fetching a chunk for a reader that is still watched, if the budget allows it.
    pub(crate) fn start(
        &self,
        inode: InodeId,
        ahead: &Ahead,
        index: u64,
        bytes: u32,
        fetch: impl Future<Output = Result<Bytes, Error>> + Send + 'static,
    ) {
        let Ok(permit) = Arc::clone(&self.budget).try_acquire_many_owned(bytes) else { return };
        let fetched = fetch.boxed().shared();
        tokio::spawn(fetched.clone());
        let slot = Slot { index, fetched, born: Instant::now(), _bytes: permit };
        if let Some(reader) = self.lock().get_mut(&inode).filter(|reader| reader.id == ahead.reader)
        {
            reader.slots.push_back(slot);
        }
    }

    /// The chunk, if it was fetched or is being fetched.
    pub(crate) fn find(&self, inode: InodeId, index: u64) -> Option<Fetched> {
        let readers = self.lock();
        let slots = &readers.get(&inode)?.slots;
        let slot = slots.iter().find(|slot| slot.index == index)?;
        (slot.born.elapsed() <= FRESH_FOR).then(|| slot.fetched.clone())
    }

    /// Drops what was fetched of a file.
    pub(crate) fn forget(&self, inode: InodeId) {
        self.lock().remove(&inode);
    }

    /// Drops what nobody came for, so that an idle process holds no memory.
    pub(crate) fn drop_stale(&self) {
        let mut readers = self.lock();
        for reader in readers.values_mut() {
            reader.slots.retain(|slot| slot.born.elapsed() <= FRESH_FOR);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: InodeId = InodeId::new(9);
    const CHUNK: u32 = 1 << 20;

    fn read(ahead: &Readahead, offset: u64) -> Vec<u64> {
        let wanted = ahead.notice(FILE, offset, 128 << 10, CHUNK, 64 << 20);
        for index in &wanted.chunks {
            let fetch = async { Ok(Bytes::from_static(b"chunk")) };
            ahead.start(FILE, &wanted, *index, CHUNK, fetch);
        }
        wanted.chunks
    }

    #[tokio::test]
    async fn a_sequential_reader_gets_the_next_chunks_and_a_random_one_none() {
        let ahead = Readahead::new(8 << 20);
        let fetched: Vec<_> = (0..8u64).flat_map(|n| read(&ahead, n * (128 << 10))).collect();
        assert_eq!(fetched, [1, 2, 3, 4]);
        assert_eq!(ahead.find(FILE, 2).unwrap().await.unwrap(), "chunk");
        assert!(read(&ahead, 40 << 20).is_empty());
        assert!(ahead.find(FILE, 2).is_none(), "a jump drops what was fetched");
    }

    #[tokio::test]
    async fn the_budget_bounds_all_files() {
        let ahead = Readahead::new(2 << 20);
        for n in 0..8u64 {
            read(&ahead, n * (128 << 10));
        }
        assert!(ahead.find(FILE, 2).is_some());
        assert!(ahead.find(FILE, 3).is_none());
        assert_eq!(ahead.budget.available_permits(), 0);
        ahead.forget(FILE);
        assert_eq!(ahead.budget.available_permits(), 2 << 20);
    }

    #[tokio::test]
    async fn what_was_noticed_before_a_write_fetches_nothing_after_it() {
        let ahead = Readahead::new(8 << 20);
        (0..2).for_each(|n| drop(read(&ahead, n * (128 << 10))));
        let notice = |n: u64| ahead.notice(FILE, n * (128 << 10), 128 << 10, CHUNK, 64 << 20);
        let before = notice(2);
        assert_eq!(before.chunks, [1]);
        ahead.forget(FILE);
        notice(3);
        ahead.start(FILE, &before, 1, CHUNK, async { Ok(Bytes::from_static(b"old")) });
        assert!(ahead.find(FILE, 1).is_none());
    }

    #[tokio::test]
    async fn nothing_is_fetched_past_the_end() {
        let ahead = Readahead::new(8 << 20);
        let notice = |n: u64| ahead.notice(FILE, n * 1000, 1000, CHUNK, 1 << 20).chunks;
        let wanted: Vec<_> = (0..8u64).flat_map(notice).collect();
        assert!(wanted.is_empty(), "{wanted:?}");
    }
}
