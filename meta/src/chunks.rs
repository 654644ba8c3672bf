//! The chunks of files: the metadata service asks how far they reach, cuts and removes them. It never sees their bytes.

use crate::manager::service::Published;
use chain::id::{ChainId, ChannelId, ChunkId, ClientId, InodeId, UpdateId};
use rpc::conn::Pool;
use rpc::message::manager::Routing;
use rpc::message::storage::{FileChunks, QueryFile, Update, UpdateOp};
use rpc::{Code, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// Chunks named in one query.
const CHUNKS_PAGE: u32 = 512;
/// Deadline of one message to a storage server.
const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// The chunks of files, as the metadata service needs them.
pub trait Chunks: Send + Sync + 'static {
    /// Chunks of `file` on `chain` from `from_index` on, and the last one: of the file, or at least of those.
    fn query(
        &self,
        chain: ChainId,
        file: InodeId,
        from_index: u64,
    ) -> impl Future<Output = Result<FileChunks, Error>> + Send;

    /// Cuts or removes one chunk. A write of an older truncate generation changes it no more.
    fn change(
        &self,
        chain: ChainId,
        chunk: ChunkId,
        op: UpdateOp,
        generation: u64,
        chunk_size_bytes: u32,
    ) -> impl Future<Output = Result<(), Error>> + Send;
}

/// The chunks on real storage servers.
#[derive(Debug)]
pub struct Remote {
    published: watch::Receiver<Published>,
    pool: Pool,
    client: ClientId,
    next_seq: AtomicU64,
}

impl Remote {
    /// `client` names this process's updates. They are numbered upwards, so that one that comes late is refused by a
    /// chunk that has seen a later one (W7).
    #[must_use]
    pub fn new(published: watch::Receiver<Published>, client: ClientId) -> Self {
        Self { published, pool: Pool::new(), client, next_seq: AtomicU64::new(1) }
    }

    fn routing(&self) -> Arc<Routing> {
        Arc::clone(&self.published.borrow().routing)
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

impl Chunks for Remote {
    async fn query(
        &self,
        chain: ChainId,
        file: InodeId,
        from_index: u64,
    ) -> Result<FileChunks, Error> {
        let routing = self.routing();
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

    async fn change(
        &self,
        chain: ChainId,
        chunk: ChunkId,
        op: UpdateOp,
        generation: u64,
        chunk_size_bytes: u32,
    ) -> Result<(), Error> {
        let routing = self.routing();
        let (chain, target, address) = Self::target(&routing, chain, chain::table::Chain::head)?;
        let seq = self.next_seq.fetch_add(1, Ordering::Relaxed);
        let request = Update {
            chain: chain.id,
            chain_version: chain.version,
            target,
            chunk,
            id: UpdateId { client: self.client, channel: ChannelId::new(0), seq },
            truncate_generation: generation,
            op,
            chunk_size: chunk_size_bytes,
            checksum: 0,
        };
        self.pool.call(address, &request, bytes::Bytes::new(), CALL_DEADLINE).await?;
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use chain::layout::Layout;
    use rpc::message::storage::ChunkLength;
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    /// Chunks in memory; `down` refuses everything.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Memory {
        chunks: Arc<Mutex<BTreeMap<(ChainId, ChunkId), u32>>>,
        pub(crate) down: Arc<Mutex<bool>>,
    }

    impl Memory {
        pub(crate) fn put(&self, layout: &Layout, file: InodeId, index: u64, length: u32) {
            let chains = layout.stripe_chains();
            let chain = chains[usize::try_from(index).unwrap() % chains.len()];
            self.chunks.lock().unwrap().insert((chain, ChunkId { file, index }), length);
        }

        pub(crate) fn count(&self) -> usize {
            self.chunks.lock().unwrap().len()
        }

        /// Index and length of each chunk of a file, in order.
        pub(crate) fn lengths(&self, file: InodeId) -> Vec<(u64, u32)> {
            let chunks = self.chunks.lock().unwrap();
            let of_file = chunks.iter().filter(|((_, id), _)| id.file == file);
            let mut all: Vec<_> = of_file.map(|((_, id), length)| (id.index, *length)).collect();
            all.sort_unstable();
            all
        }

        fn check(&self) -> Result<(), Error> {
            let down = *self.down.lock().unwrap();
            if down { Err(Error::new(Code::ChainUnavailable, "down")) } else { Ok(()) }
        }
    }

    impl Chunks for Memory {
        async fn query(
            &self,
            chain: ChainId,
            file: InodeId,
            from: u64,
        ) -> Result<FileChunks, Error> {
            self.check()?;
            let chunks = self.chunks.lock().unwrap();
            let of_file = chunks.iter().filter(|((c, id), _)| *c == chain && id.file == file);
            // No `last` before `from`: some servers know none.
            let found: Vec<ChunkLength> = of_file
                .map(|((_, id), length)| ChunkLength { index: id.index, length: *length })
                .filter(|chunk| chunk.index >= from)
                .collect();
            let last = found.last().cloned();
            Ok(FileChunks { chunks: found.into_iter().take(2).collect(), last })
        }

        async fn change(
            &self,
            chain: ChainId,
            chunk: ChunkId,
            op: UpdateOp,
            _: u64,
            _: u32,
        ) -> Result<(), Error> {
            self.check()?;
            let mut chunks = self.chunks.lock().unwrap();
            match op {
                UpdateOp::Truncate { length } => chunks.insert((chain, chunk), length),
                _ => chunks.remove(&(chain, chunk)),
            };
            Ok(())
        }
    }
}
