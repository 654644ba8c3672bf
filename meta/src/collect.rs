//! What is done behind clients' backs: the chunks of removed files are removed, and clients that
//! ended without a word lose their sessions, after the length of what they wrote is settled, and cuts
//! that a truncation left to do are done.
//!
//! M5: a file is collected only after its removal is committed, no session has it open for
//! writing, and a grace period has passed; and then it is, however often this process restarts:
//! the queue is in the store, and each step may be repeated.

use crate::chunks::Chunks;
use crate::op::OpError;
use crate::schema::{
    self, Inode, Record, answered_key, client_key, client_session_key, cut_key, garbage_key,
    inode_key, parse_client_session_key, session_key, sessions_of, sessions_of_client, within,
};
use crate::service::Meta;
use crate::service::cut::list;
use crate::txn::{Isolation, Scan, Store, Txn, TxnError, key_after};
use chain::id::{ChainId, ChunkId, ClientId, InodeId};
use chain::layout::Layout;
use rpc::Error;
use rpc::clock::boot_time;
use rpc::message::storage::UpdateOp;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// How long a removed file's chunks stay for those who read it just now.
pub const GRACE: Duration = Duration::from_secs(60);
/// Files looked at in one round, in each of the queues.
const ROUND_FILES: usize = 256;
/// Sessions ended in one transaction.
const PRUNE_PAGE: usize = 128;

/// Removes what nobody needs any more.
#[derive(Debug)]
pub struct Collector<S, C> {
    meta: Arc<Meta<S, C>>,
    grace: Duration,
    /// When this process first found a file in the queue.
    found: BTreeMap<InodeId, Duration>,
    /// Where the next round goes on in the queue: what is stuck does not hold up the rest.
    cursor: Option<bytes::Bytes>,
    /// The same in the queue of cuts.
    cut_cursor: Option<bytes::Bytes>,
}

impl<S: Store, C: Chunks> Collector<S, C> {
    /// A collector that waits `grace` after it finds a removed file.
    pub const fn new(meta: Arc<Meta<S, C>>, grace: Duration) -> Self {
        Self { meta, grace, found: BTreeMap::new(), cursor: None, cut_cursor: None }
    }

    /// One round over queue and clients. What fails is tried again in the next one.
    ///
    /// # Errors
    /// The store's.
    pub async fn round(&mut self) -> Result<(), OpError> {
        let now = boot_time();
        for client in self.meta.silent_clients(now) {
            match self.prune(client).await {
                Ok(()) => {
                    self.meta.forget_client(client);
                    tracing::info!(client = client.get(), "a silent client's sessions ended");
                }
                Err(error) => tracing::warn!(%error, "end a silent client's sessions"),
            }
        }
        for inode in self.meta.unfinished_cuts(&mut self.cut_cursor, ROUND_FILES).await? {
            if let Err(error) = self.meta.finish_cut(inode).await {
                tracing::warn!(%error, %inode, "cut the chunks of a file");
            }
        }
        for (inode, file) in self.queue().await? {
            let found = *self.found.entry(inode).or_insert(now);
            if now.saturating_sub(found) < self.grace || self.is_open(inode).await? {
                continue;
            }
            match self.collect(inode, &file).await {
                Ok(()) => drop(self.found.remove(&inode)),
                Err(error) => tracing::warn!(%error, %inode, "remove the chunks of a file"),
            }
        }
        Ok(())
    }

    async fn queue(&mut self) -> Result<Vec<(InodeId, Inode)>, OpError> {
        let mut txn = self.meta.store().begin().await?;
        let (start, end) = within(schema::GARBAGE.to_vec());
        let begin = self.cursor.take().map_or(start, |last| key_after(&last));
        let page = txn.scan(Scan::new(begin, end, ROUND_FILES).snapshot()).await?;
        self.cursor = page.pairs.last().filter(|_| page.more).map(|(key, _)| key.clone());
        let mut files = Vec::with_capacity(page.pairs.len());
        for (key, _) in page.pairs {
            let id = InodeId::new(u64::from_le_bytes(schema::parse_id(&key)?));
            let key = inode_key(id);
            if let Some(value) = txn.get(&key, Isolation::Snapshot).await? {
                files.push((id, Inode::from_value(&key, &value)?));
            }
        }
        Ok(files)
    }

    async fn is_open(&self, inode: InodeId) -> Result<bool, OpError> {
        let mut txn = self.meta.store().begin().await?;
        let (begin, end) = sessions_of(inode);
        Ok(!txn.scan(Scan::new(begin, end, 1).snapshot()).await?.pairs.is_empty())
    }

    async fn collect(&self, id: InodeId, inode: &Inode) -> Result<(), OpError> {
        if let Some(layout) = &inode.layout {
            for chain in layout.stripe_chains() {
                self.remove_chunks(chain, id, inode.truncate_generation + 1, layout).await?;
            }
        }
        let mut txn = self.meta.store().begin().await?;
        // Serializable: an inode that changed meanwhile is looked at again.
        let (begin, end) = sessions_of(id);
        let open = !txn.scan(Scan::new(begin, end, 1)).await?.pairs.is_empty();
        let queued = txn.get(&garbage_key(id), Isolation::Serializable).await?.is_some();
        if open || !queued {
            return Ok(());
        }
        txn.clear(&inode_key(id));
        txn.clear(&garbage_key(id));
        txn.clear(&cut_key(id));
        txn.add(&schema::COUNT, u64::MAX);
        Ok(txn.commit().await?)
    }

    async fn remove_chunks(
        &self,
        chain: ChainId,
        file: InodeId,
        generation: u64,
        layout: &Layout,
    ) -> Result<(), Error> {
        for chunk in list(self.meta.chunks(), chain, file, 0).await? {
            let id = ChunkId { file, index: chunk.index };
            let (op, size) = (UpdateOp::Remove, layout.chunk_size_bytes);
            self.meta.chunks().change(chain, id, op, generation, size).await?;
        }
        Ok(())
    }

    /// Ends a client: its sessions, then its answers and its record.
    async fn prune(&self, client: ClientId) -> Result<(), OpError> {
        loop {
            let mut txn = self.meta.store().begin().await?;
            let (begin, end) = sessions_of_client(client);
            let page = txn.scan(Scan::new(begin, end, PRUNE_PAGE).snapshot()).await?;
            drop(txn);
            for (key, _) in &page.pairs {
                let (inode, session) = parse_client_session_key(key)?;
                self.meta.settle_length(inode).await?;
                let mut txn = self.meta.store().begin().await?;
                txn.clear(&session_key(inode, client, session));
                txn.clear(&client_session_key(client, inode, session));
                txn.commit().await?;
            }
            if !page.more {
                break;
            }
        }
        let mut txn = self.meta.store().begin().await?;
        // Serializable: a request of the client that comes now conflicts, and one of the two waits.
        txn.get(&client_key(client), Isolation::Serializable).await?;
        let (begin, end) = sessions_of_client(client);
        if !txn.scan(Scan::new(begin, end, 1)).await?.pairs.is_empty() {
            return Err(TxnError::Conflict.into());
        }
        txn.clear(&client_key(client));
        txn.clear_range(&answered_key(client, 0), &answered_key(client, u64::MAX));
        Ok(txn.commit().await?)
    }
}

#[cfg(test)]
mod tests;
