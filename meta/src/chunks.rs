//! The chunks of files: the metadata service asks how far they reach, cuts and removes them. It never sees their bytes.

use crate::manager::service::Published;
use bytes::Bytes;
use chain::id::{ChainId, ChannelId, ChunkId, ClientId, InodeId, TargetId, UpdateId};
use chain::table::Chain;
use rpc::conn::Pool;
use rpc::message::Request;
use rpc::message::manager::Routing;
use rpc::message::storage::{FileChunks, QueryFile, Update, UpdateOp};
use rpc::{Code, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Chunks named in one query.
const CHUNKS_PAGE: u32 = 512;
/// How long the servers of a chain are asked: longer than the lease of one that was cut off.
const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// Before a server is asked again that does not know the newest version of its chain yet.
const BEHIND: Duration = Duration::from_millis(20);

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

    /// The serving target at one end of the chain, and its address.
    fn target(
        routing: &Routing,
        id: ChainId,
        pick: fn(&Chain) -> Option<TargetId>,
    ) -> Result<(&Chain, TargetId, &str), Error> {
        let find = || {
            let chain = routing.chains.iter().find(|c| c.id == id)?;
            let target = pick(chain)?;
            let node = routing.nodes.iter().find(|n| n.node == target.node())?;
            Some((chain, target, node.address.as_str()))
        };
        find().ok_or_else(|| Error::new(Code::ChainUnavailable, format!("chain {id}")))
    }

    /// Asks the target that `pick` finds. A chain that goes on without it is asked again at once, for the target that it
    /// then has: the silence of a server that was cut off ends with its lease and not with a deadline. That target hears of
    /// it a moment later than this process, and is asked until it has.
    async fn ask<R: Request>(
        &self,
        id: ChainId,
        pick: fn(&Chain) -> Option<TargetId>,
        mut aim: impl FnMut(&Chain, TargetId) -> R + Send,
    ) -> Result<R::Response, Error> {
        let mut published = self.published.clone();
        let until = Instant::now() + CALL_DEADLINE;
        let mut asked: Option<String> = None;
        loop {
            let routing = Arc::clone(&published.borrow_and_update().routing);
            let (chain, target, address) = Self::target(&routing, id, pick)?;
            if let Some(left) = asked.replace(address.to_owned()).filter(|left| left != address) {
                // It may be out of reach: when it is back, its old connection is not yet.
                self.pool.forget(&left);
            }
            let request = aim(chain, target);
            let left = until.saturating_duration_since(Instant::now());
            tokio::select! {
                answer = self.pool.call(address, &request, Bytes::new(), left) => match answer {
                    Err(error) if error.code == Code::StaleChain && left > BEHIND => {
                        tokio::time::sleep(BEHIND).await;
                    }
                    other => return other.map(|(response, _)| response),
                },
                () = superseded(&mut published, chain) => {}
            }
        }
    }
}

/// Waits until a later version of `chain` is published.
async fn superseded(published: &mut watch::Receiver<Published>, chain: &Chain) {
    let is_later = |now: &Published| {
        now.routing.chains.iter().any(|c| c.id == chain.id && c.version > chain.version)
    };
    if published.wait_for(is_later).await.is_err() {
        // The manager is gone, and so is this process soon; the call ends by itself.
        std::future::pending::<()>().await;
    }
}

impl Chunks for Remote {
    async fn query(
        &self,
        chain: ChainId,
        file: InodeId,
        from_index: u64,
    ) -> Result<FileChunks, Error> {
        self.ask(chain, Chain::tail, |chain, target| QueryFile {
            chain: chain.id,
            chain_version: chain.version,
            target,
            file,
            from_index,
            limit: CHUNKS_PAGE,
        })
        .await
    }

    async fn change(
        &self,
        chain: ChainId,
        chunk: ChunkId,
        op: UpdateOp,
        generation: u64,
        chunk_size_bytes: u32,
    ) -> Result<(), Error> {
        let seq = self.next_seq.fetch_add(1, Ordering::Relaxed);
        // The same id for each target that is asked: it is one change.
        let id = UpdateId { client: self.client, channel: ChannelId::new(0), seq };
        self.ask(chain, Chain::head, |chain, target| Update {
            chain: chain.id,
            chain_version: chain.version,
            target,
            chunk,
            id,
            truncate_generation: generation,
            op,
            chunk_size: chunk_size_bytes,
            checksum: 0,
        })
        .await?;
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::service::tests::published;
    use chain::id::{ChainVersion, NodeId, RoutingVersion, UpdateVersion};
    use chain::layout::Layout;
    use chain::table::{ChainTarget, PublicState};
    use rpc::message::manager::NodeAddress;
    use rpc::message::storage::{ChunkLength, UpdateDone};
    use rpc::serve::{Call, Handler, Reply};
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

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

    /// A storage server that answers what the metadata service asks, each other time: it heard of the chain late.
    #[derive(Default)]
    struct Answers(AtomicU64);

    impl Handler for Answers {
        async fn handle(&self, call: Call) -> Result<Reply, Error> {
            if self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
                return Err(Error::new(Code::StaleChain, "chain is at version 1"));
            }
            if call.kind == QueryFile::KIND {
                return Ok(Reply::new(&FileChunks { chunks: vec![], last: None }));
            }
            Ok(Reply::new(&UpdateDone { version: UpdateVersion::new(1), chunk_length: 0 }))
        }
    }

    fn routing(version: u64, node: NodeId, servers: &[(NodeId, String)]) -> Published {
        let target = ChainTarget { id: node.target(0, 0), state: PublicState::Serving };
        let (id, targets) = (ChainId::new(1), vec![target]);
        let chain = Chain { id, version: ChainVersion::new(version), targets };
        let address = |(node, address): &(NodeId, String)| NodeAddress {
            node: *node,
            address: address.clone(),
        };
        let empty = published(0);
        let routing = Routing {
            version: RoutingVersion::new(version),
            chains: vec![chain],
            nodes: servers.iter().map(address).collect(),
            ..Routing::clone(&empty.routing)
        };
        Published { routing: Arc::new(routing), ..empty }
    }

    /// A call that waits for a server is not left waiting when its chain goes on without that server.
    #[tokio::test]
    async fn a_chain_that_goes_on_is_asked_again_at_once() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let [first, second] = [10_001, 10_002].map(NodeId::new);
        let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
        let servers = [(first, address(&silent)), (second, address(&listener))];
        let (_stop, stopped) = watch::channel(false);
        tokio::spawn(rpc::serve::serve(listener, Arc::new(Answers::default()), stopped));
        let (chain, file) = (ChainId::new(1), InodeId::new(7));
        for nth in 0..2 {
            let (publish, published) = watch::channel(routing(1, first, &servers));
            let remote = Remote::new(published, ClientId::new(1));
            let call = async {
                if nth == 0 {
                    return remote.query(chain, file, 0).await.map(drop);
                }
                let chunk = ChunkId { file, index: 0 };
                remote.change(chain, chunk, UpdateOp::Remove, 1, 1 << 20).await
            };
            let goes_on = async {
                // The request has gone to the server that says nothing.
                let (mut asked, _) = silent.accept().await.unwrap();
                asked.read_u8().await.unwrap();
                publish.send_replace(routing(2, second, &servers));
                Ok(asked)
            };
            tokio::try_join!(call, goes_on).unwrap();
        }
    }
}
