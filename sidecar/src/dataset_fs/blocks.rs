//! Fetched blocks of objects: each is fetched once however many wait for it, the least recently used go first.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use source::Failure;
use tokio::time::Instant;

/// Bytes of one block, and of one request to the source.
pub(super) const BLOCK_BYTES: u32 = 1 << 20;
/// Blocks fetched ahead of a sequential reader.
const AHEAD: u64 = 3;
/// Blocks that nobody asked for are dropped after this.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Files whose readers are watched; all are forgotten when there are more.
const FILES_MAX: usize = 4096;

/// A block that was or is being fetched.
pub(super) type Fetched = Shared<BoxFuture<'static, Result<Bytes, Failure>>>;

#[derive(Debug)]
struct Slot {
    fetched: Fetched,
    used: Instant,
}

#[derive(Debug, Default)]
struct State {
    slots: HashMap<(u64, u64), Slot>,
    /// The block after the last one that was read, and how often that was foreseen.
    readers: HashMap<u64, (u64, u32)>,
}

/// The blocks of one file system.
#[derive(Debug)]
pub(super) struct Blocks {
    blocks_max: usize,
    state: Mutex<State>,
}

impl Blocks {
    pub(super) fn new(bytes: usize) -> Self {
        let blocks_max = (bytes / BLOCK_BYTES as usize).max(2);
        Self { blocks_max, state: Mutex::new(State::default()) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The block, fetched by `fetch` if it is not there.
    pub(super) fn get(
        &self,
        ino: u64,
        block: u64,
        fetch: impl FnOnce() -> BoxFuture<'static, Result<Bytes, Failure>>,
    ) -> Fetched {
        let mut state = self.lock();
        let now = Instant::now();
        if let Some(slot) = state.slots.get_mut(&(ino, block)) {
            slot.used = now;
            return slot.fetched.clone();
        }
        while state.slots.len() >= self.blocks_max {
            let oldest = state.slots.iter().min_by_key(|(_, slot)| slot.used).map(|(key, _)| *key);
            let Some(oldest) = oldest else { break };
            state.slots.remove(&oldest);
        }
        let fetched = fetch().shared();
        state.slots.insert((ino, block), Slot { fetched: fetched.clone(), used: now });
        fetched
    }

    /// Drops a block, e.g. because fetching it failed.
    pub(super) fn forget(&self, ino: u64, block: u64) {
        self.lock().slots.remove(&(ino, block));
    }

    /// Notes a read of blocks `first ..= last` out of `count`; says which to fetch ahead.
    pub(super) fn ahead(&self, ino: u64, first: u64, last: u64, count: u64) -> Vec<u64> {
        let mut state = self.lock();
        if state.readers.len() >= FILES_MAX {
            state.readers.clear();
        }
        let (next, foreseen) = state.readers.get(&ino).copied().unwrap_or((0, 0));
        let sequential = first <= next && next <= first + 1;
        let foreseen = if sequential { foreseen.saturating_add(1) } else { 0 };
        state.readers.insert(ino, (last + 1, foreseen));
        if foreseen < 2 {
            return Vec::new();
        }
        let ahead = (last + 1)..(last + 1 + AHEAD.min(self.blocks_max as u64 / 2)).min(count);
        ahead.filter(|block| !state.slots.contains_key(&(ino, *block))).collect()
    }

    /// Drops what nobody used for a while.
    pub(super) fn drop_idle(&self) {
        self.lock().slots.retain(|_, slot| slot.used.elapsed() < IDLE_MAX);
    }
}
