//! What is done behind clients' backs: the chunks of removed files are removed, and clients that
//! ended without a word lose their sessions, after the length of what they wrote is settled.
//!
//! M5: a file is collected only after its removal is committed, no session has it open for
//! writing, and a grace period has passed; and then it is, however often this process restarts:
//! the queue is in the store, and each step may be repeated.

use crate::op::OpError;
use crate::schema::{
    self, Inode, Record, answered_key, client_key, client_session_key, garbage_key, inode_key,
    parse_client_session_key, session_key, sessions_of, sessions_of_client, within,
};
use crate::service::Meta;
use crate::txn::{Isolation, Scan, Store, Txn, TxnError, key_after};
use chain::id::{ChainId, ChannelId, ChunkId, ClientId, InodeId, UpdateId};
use chain::layout::Layout;
use rpc::clock::boot_time;
use rpc::conn::Pool;
use rpc::message::manager::Routing;
use rpc::message::storage::{FileChunks, QueryFile, Update, UpdateOp};
use rpc::{Code, Error};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a removed file's chunks stay for those who read it just now.
pub const GRACE: Duration = Duration::from_secs(60);
/// Files looked at in one round.
const ROUND_FILES: usize = 256;
/// Sessions ended in one transaction.
const PRUNE_PAGE: usize = 128;
/// Chunks named in one query.
const CHUNKS_PAGE: u32 = 512;
/// Deadline of one message to a storage server.
const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// The chunks of files, as the collector needs them.
pub trait Chunks: Send + Sync + 'static {
    /// Chunks of `file` on `chain` from `from_index` on, and the last one.
    fn query(
        &self,
        chain: ChainId,
        file: InodeId,
        from_index: u64,
    ) -> impl Future<Output = Result<FileChunks, Error>> + Send;

    /// Removes one chunk. A write of an older truncate generation cannot bring it back.
    fn remove(
        &self,
        chain: ChainId,
        chunk: ChunkId,
        generation: u64,
        chunk_size_bytes: u32,
    ) -> impl Future<Output = Result<(), Error>> + Send;
}

/// Removes what nobody needs any more.
#[derive(Debug)]
pub struct Collector<S, C> {
    meta: Arc<Meta<S>>,
    chunks: C,
    grace: Duration,
    /// When this process first found a file in the queue.
    found: BTreeMap<InodeId, Duration>,
    /// Where the next round goes on in the queue: what is stuck does not hold up the rest.
    cursor: Option<bytes::Bytes>,
}

impl<S: Store, C: Chunks> Collector<S, C> {
    /// A collector that waits `grace` after it finds a removed file.
    pub const fn new(meta: Arc<Meta<S>>, chunks: C, grace: Duration) -> Self {
        Self { meta, chunks, grace, found: BTreeMap::new(), cursor: None }
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
        let mut from_index = 0;
        loop {
            let found = self.chunks.query(chain, file, from_index).await?;
            for chunk in &found.chunks {
                let id = ChunkId { file, index: chunk.index };
                self.chunks.remove(chain, id, generation, layout.chunk_size_bytes).await?;
            }
            match found.chunks.last() {
                // The index grows each time, so this ends.
                Some(last) if last.index >= from_index && last.index < u64::MAX => {
                    from_index = last.index + 1;
                }
                _ => return Ok(()),
            }
        }
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
                self.settle_length(inode).await?;
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

    /// M6 for a writer that ended without a report: the file reaches as far as its last chunk.
    async fn settle_length(&self, id: InodeId) -> Result<(), OpError> {
        let key = inode_key(id);
        let mut txn = self.meta.store().begin().await?;
        let Some(value) = txn.get(&key, Isolation::Serializable).await? else { return Ok(()) };
        let mut inode = Inode::from_value(&key, &value)?;
        let Some(layout) = inode.layout else { return Ok(()) };
        let mut reach = 0u64;
        for chain in layout.stripe_chains() {
            if let Some(last) = self.chunks.query(chain, id, u64::MAX).await?.last {
                let start = last.index.saturating_mul(layout.chunk_size_bytes.into());
                reach = reach.max(start.saturating_add(last.length.into()));
            }
        }
        if reach > inode.length && reach <= crate::op::LENGTH_MAX {
            inode.length = reach;
            txn.set(&key, &inode.to_value());
            // A truncation or report meanwhile is a conflict: the next round asks again.
            txn.commit().await?;
        }
        Ok(())
    }
}

/// The chunks on real storage servers.
#[derive(Debug)]
pub struct Remote<S> {
    meta: Arc<Meta<S>>,
    pool: Pool,
    client: ClientId,
    next_seq: AtomicU64,
}

impl<S: Store> Remote<S> {
    /// `client` names this process's updates.
    #[must_use]
    pub fn new(meta: Arc<Meta<S>>, client: ClientId) -> Self {
        Self { meta, pool: Pool::new(), client, next_seq: AtomicU64::new(1) }
    }

    /// The serving target at one end of the chain, and its address.
    fn target(
        routing: &Routing,
        id: ChainId,
        pick: fn(&chain::table::Chain) -> Option<chain::id::TargetId>,
    ) -> Result<(&chain::table::Chain, chain::id::TargetId, &str), Error> {
        let find = || {
            let chain = routing.chains.iter().find(|c| c.id == id)?;
            let target = pick(chain)?;
            let node = routing.nodes.iter().find(|n| n.node == target.node())?;
            Some((chain, target, node.address.as_str()))
        };
        find().ok_or_else(|| Error::new(Code::ChainUnavailable, format!("chain {id}")))
    }
}

impl<S: Store> Chunks for Remote<S> {
    async fn query(
        &self,
        chain: ChainId,
        file: InodeId,
        from_index: u64,
    ) -> Result<FileChunks, Error> {
        let routing = self.meta.published().routing;
        let (chain, target, address) = Self::target(&routing, chain, chain::table::Chain::tail)?;
        let request = QueryFile {
            chain: chain.id,
            chain_version: chain.version,
            target,
            file,
            from_index,
            limit: CHUNKS_PAGE,
        };
        Ok(self.pool.call(address, &request, bytes::Bytes::new(), CALL_DEADLINE).await?.0)
    }

    async fn remove(
        &self,
        chain: ChainId,
        chunk: ChunkId,
        generation: u64,
        chunk_size_bytes: u32,
    ) -> Result<(), Error> {
        let routing = self.meta.published().routing;
        let (chain, target, address) = Self::target(&routing, chain, chain::table::Chain::head)?;
        let seq = self.next_seq.fetch_add(1, Ordering::Relaxed);
        let request = Update {
            chain: chain.id,
            chain_version: chain.version,
            target,
            chunk,
            id: UpdateId { client: self.client, channel: ChannelId::new(0), seq },
            truncate_generation: generation,
            op: UpdateOp::Remove,
            chunk_size: chunk_size_bytes,
            checksum: 0,
        };
        self.pool.call(address, &request, bytes::Bytes::new(), CALL_DEADLINE).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
