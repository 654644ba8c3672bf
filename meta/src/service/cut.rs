//! What a truncation leaves to do at the chunks, and how far a file reaches by its chunks.
//!
//! A truncation that may shorten a file leaves a note in the store, in its own transaction. It is answered when the
//! chunks are cut and the note is gone; until then nobody opens the file for writing, reports a length of it or sets
//! one, and nobody learns the new truncate generation. So no chunk holds a cut byte when the file grows again, whoever
//! died meanwhile, and the cut never meets a byte that was written after it.

use super::Meta;
use crate::chunks::Chunks;
use crate::op::OpError;
use crate::schema::{self, Inode, PendingCut, Record, cut_key, inode_key, within};
use crate::txn::{Isolation, Scan, Store, Txn, TxnError, key_after};
use bytes::Bytes;
use chain::id::{ChainId, ChunkId, InodeId};
use rpc::message::storage::{ChunkLength, UpdateOp};
use rpc::{Code, Error};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Locks of all files: two cuts of one file are never under way at once, as the second would meet what was written
/// after the first.
const LOCKS: usize = 256;

/// See [`LOCKS`].
#[derive(Debug)]
pub(super) struct Locks(Vec<tokio::sync::Mutex<()>>);

impl Default for Locks {
    fn default() -> Self {
        Self((0..LOCKS).map(|_| tokio::sync::Mutex::new(())).collect())
    }
}

impl Locks {
    async fn lock(&self, inode: InodeId) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        let at = usize::try_from(inode.get() % LOCKS as u64).ok()?;
        Some(self.0.get(at)?.lock().await)
    }
}

/// Changes of one file that are under way at once: removing many chunks is bound by the disks' flushes, which they share.
const PARALLEL: usize = 64;

/// How long a request waits while another one cuts the same file. Its client asks again all the time: longer waits would
/// pile up behind a chain that is away, until the client's other requests have no room on its connection.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is to be done to one chunk.
struct Change {
    chain: ChainId,
    chunk: ChunkId,
    op: UpdateOp,
}

/// A cut of one file, as its tasks share it.
struct Cut<C> {
    chunks: Arc<C>,
    file: InodeId,
    note: PendingCut,
    chunk_size_bytes: u32,
}

impl<C: Chunks> Cut<C> {
    /// What of a chain lies past the end.
    async fn look(self: Arc<Self>, chain: ChainId) -> Result<Vec<Change>, Error> {
        let (size, end) = (u64::from(self.chunk_size_bytes), self.note.length);
        let found = list(&*self.chunks, chain, self.file, end / size.max(1)).await?;
        let change = |chunk: ChunkLength| {
            let op = match u32::try_from(end.saturating_sub(chunk.index.saturating_mul(size))) {
                Ok(0) => UpdateOp::Remove,
                Ok(length) if length < chunk.length => UpdateOp::Truncate { length },
                _ => return None,
            };
            let chunk = ChunkId { file: self.file, index: chunk.index };
            Some(Change { chain, chunk, op })
        };
        Ok(found.into_iter().filter_map(change).collect())
    }

    async fn apply(self: Arc<Self>, changes: Vec<Change>) -> Result<(), Error> {
        let (generation, size) = (self.note.truncate_generation, self.chunk_size_bytes);
        for Change { chain, chunk, op } in changes {
            self.chunks.change(chain, chunk, op, generation, size).await?;
        }
        Ok(())
    }

    async fn run(self: Arc<Self>, chains: Vec<ChainId>) -> Result<(), Error> {
        let looks = chains.into_iter().map(|chain| Arc::clone(&self).look(chain)).collect();
        let mut parts: Vec<Vec<Change>> = (0..PARALLEL).map(|_| Vec::new()).collect();
        let found = all_of(looks).await?.into_iter().flatten().enumerate();
        for (nth, change) in found {
            if let Some(part) = parts.get_mut(nth % PARALLEL) {
                part.push(change);
            }
        }
        parts.retain(|part| !part.is_empty());
        let changes = parts.into_iter().map(|part| Arc::clone(&self).apply(part)).collect();
        all_of(changes).await.map(drop)
    }
}

/// Runs all side by side; the first failure ends the rest.
async fn all_of<T: Send + 'static>(mut tasks: JoinSet<Result<T, Error>>) -> Result<Vec<T>, Error> {
    let mut all = Vec::with_capacity(tasks.len());
    while let Some(ended) = tasks.join_next().await {
        all.push(ended.map_err(|error| Error::new(Code::Internal, error.to_string()))??);
    }
    Ok(all)
}

/// The chunks of a file on one chain, from an index on.
pub(crate) async fn list<C: Chunks>(
    chunks: &C,
    chain: ChainId,
    file: InodeId,
    mut from_index: u64,
) -> Result<Vec<ChunkLength>, Error> {
    let mut all = Vec::new();
    loop {
        let page = chunks.query(chain, file, from_index).await?.chunks;
        let last = page.last().map(|chunk| chunk.index);
        all.extend(page);
        match last {
            // The index grows each time, so this ends.
            Some(last) if last >= from_index && last < u64::MAX => from_index = last + 1,
            _ => return Ok(all),
        }
    }
}

impl<S: Store, C: Chunks> Meta<S, C> {
    /// Cuts the chunks of a file whose truncation left that to do, if it did.
    ///
    /// # Errors
    /// The store's, and what a storage server answered: the next call goes on. [`Code::Busy`] while another request is at
    /// it.
    pub async fn finish_cut(&self, file: InodeId) -> Result<(), OpError> {
        let lock = tokio::time::timeout(PATIENCE, self.cuts.lock(file)).await;
        let busy = |_| Error::new(Code::Busy, format!("the chunks of inode {file} are being cut"));
        let _one = lock.map_err(busy)?;
        let key = cut_key(file);
        let mut txn = self.store.begin().await?;
        let Some(note) = txn.get(&key, Isolation::Snapshot).await? else { return Ok(()) };
        let cut = PendingCut::from_value(&key, &note)?;
        let inode = txn.get(&inode_key(file), Isolation::Snapshot).await?;
        let inode = inode.map(|value| Inode::from_value(&inode_key(file), &value)).transpose()?;
        drop(txn);
        if let Some(layout) = inode.and_then(|inode| inode.layout) {
            let (chunks, chunk_size_bytes) = (Arc::clone(&self.chunks), layout.chunk_size_bytes);
            let cut = Arc::new(Cut { chunks, file, note: cut, chunk_size_bytes });
            cut.run(layout.stripe_chains()).await?;
        }
        let mut txn = self.store.begin().await?;
        if txn.get(&key, Isolation::Serializable).await? == Some(note) {
            txn.clear(&key);
        }
        Ok(txn.commit().await?)
    }

    /// Files with a cut to do, from `cursor` on, and where to go on; for the collector.
    pub(crate) async fn unfinished_cuts(
        &self,
        cursor: &mut Option<Bytes>,
        limit: usize,
    ) -> Result<Vec<InodeId>, OpError> {
        let mut txn = self.store.begin().await?;
        let (start, end) = within(schema::CUT.to_vec());
        let begin = cursor.take().map_or(start, |last| key_after(&last));
        let page = txn.scan(Scan::new(begin, end, limit).snapshot()).await?;
        *cursor = page.pairs.last().filter(|_| page.more).map(|(key, _)| key.clone());
        let id = |key: &Bytes| Ok(InodeId::new(u64::from_le_bytes(schema::parse_id(key)?)));
        page.pairs.iter().map(|(key, _)| id(key)).collect()
    }

    /// M6 for what was written and not reported under the present truncate generation: the file reaches as far as its
    /// last chunk.
    ///
    /// # Errors
    /// The store's, and what a storage server answered.
    pub async fn settle_length(&self, file: InodeId) -> Result<(), OpError> {
        self.finish_cut(file).await?;
        let key = inode_key(file);
        let mut txn = self.store.begin().await?;
        // Serializable: what a truncation from here on cuts must not count.
        if txn.get(&cut_key(file), Isolation::Serializable).await?.is_some() {
            return Err(TxnError::Conflict.into());
        }
        let Some(value) = txn.get(&key, Isolation::Serializable).await? else { return Ok(()) };
        let mut inode = Inode::from_value(&key, &value)?;
        let Some(layout) = inode.layout else { return Ok(()) };
        let mut reach = 0u64;
        for chain in layout.stripe_chains() {
            // From the start: a server may take `last` for the last one of what it was asked for.
            if let Some(last) = self.chunks.query(chain, file, 0).await?.last {
                let start = last.index.saturating_mul(layout.chunk_size_bytes.into());
                reach = reach.max(start.saturating_add(last.length.into()));
            }
        }
        if reach > inode.length && reach <= crate::op::LENGTH_MAX {
            inode.length = reach;
            txn.set(&key, &inode.to_value());
            // A truncation or report meanwhile is a conflict: ask again.
            txn.commit().await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
