//! One chunk at its chain: reads at any serving target with immediate failover, updates at the head with one id until they
//! are answered.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chain::id::{ChainId, ChainVersion, ChunkId, NodeId, TargetId};
use chain::table::Chain;
use rpc::error::Retry;
use rpc::message::Request;
use rpc::message::manager::Routing;
use rpc::message::storage::{Read, ReadDone, Update, UpdateDone, UpdateOp};
use rpc::{Code, Error};
use tokio::time::Instant;

use crate::routing::{address_of, find_chain};
use crate::{Backoff, Inner};

/// For how long a server that did not answer is asked last.
const SUSPECT_FOR: Duration = Duration::from_secs(3);
/// How long a refused request waits for a newer routing table before it tries again.
const REFRESH_FOR: Duration = Duration::from_millis(200);
/// Longest single attempt of a read, reached by doubling: a slow link is not a dead server.
const READ_ATTEMPT_MAX: Duration = Duration::from_secs(8);

static ROTATION: AtomicUsize = AtomicUsize::new(0);
/// Servers that did not answer, by when.
static SUSPECTS: Mutex<Option<HashMap<NodeId, Instant>>> = Mutex::new(None);

/// Which servers answered late or not at all, in this process.
fn suspect(node: NodeId) {
    let mut suspects = SUSPECTS.lock().unwrap_or_else(PoisonError::into_inner);
    suspects.get_or_insert_default().insert(node, Instant::now());
}

fn is_suspect(node: NodeId) -> bool {
    let suspects = SUSPECTS.lock().unwrap_or_else(PoisonError::into_inner);
    let since = suspects.as_ref().and_then(|suspects| suspects.get(&node));
    since.is_some_and(|since| since.elapsed() < SUSPECT_FOR)
}

/// The serving targets in the order in which a read asks them: rotated by `turn`, suspects last.
fn read_order(chain: &Chain, turn: usize, suspect: impl Fn(NodeId) -> bool) -> Vec<TargetId> {
    let mut order: Vec<TargetId> = chain.serving().collect();
    if !order.is_empty() {
        let by = turn % order.len();
        order.rotate_left(by);
    }
    order.sort_by_key(|target| suspect(target.node()));
    order
}

/// A request that any serving target can answer.
trait ToTarget: Request {
    type Answer: Send;
    /// Addresses it to `target` of `chain`.
    fn aim(&mut self, chain: &Chain, target: TargetId);
    /// Checks an answer before anybody uses it.
    fn accept(&self, done: Self::Response, payload: Bytes) -> Result<Self::Answer, Error>;
}

impl ToTarget for Read {
    type Answer = Bytes;

    fn aim(&mut self, chain: &Chain, target: TargetId) {
        (self.chain_version, self.target) = (chain.version, target);
    }

    fn accept(&self, done: ReadDone, payload: Bytes) -> Result<Bytes, Error> {
        if payload.len() > self.length as usize || crc32c::crc32c(&payload) != done.checksum {
            let why =
                format!("{} bytes of chunk {} from {}", payload.len(), self.chunk, self.target);
            return Err(Error::new(Code::CorruptChunk, why));
        }
        Ok(payload)
    }
}

impl Inner {
    /// Bytes of `chunk` from `offset`, at most `length`, fewer where the chunk is shorter.
    pub(crate) async fn read_chunk(
        &self,
        chain: ChainId,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<Bytes, Error> {
        let (chain_version, target) = (ChainVersion::NONE, TargetId::new(0));
        let relaxed = false;
        let read = Read { chain, chain_version, target, chunk, offset, length, relaxed };
        self.at_any_target(chain, ROTATION.fetch_add(1, Ordering::Relaxed), read).await
    }

    /// Asks serving targets of `chain` one after the other until one answers.
    async fn at_any_target<R: ToTarget>(
        &self,
        chain: ChainId,
        turn: usize,
        mut request: R,
    ) -> Result<R::Answer, Error> {
        let until = self.until();
        let mut backoff = Backoff::new(until);
        let mut attempt = self.options.read_attempt;
        loop {
            let table = self.routing.get(until).await?;
            let error = match find_chain(&table, chain) {
                Some(found) => {
                    match self.one_round(&table, found, turn, attempt, &mut request).await {
                        Ok(answer) => return Ok(answer),
                        Err(error) if error.code.retry() == Retry::Never => return Err(error),
                        Err(error) => error,
                    }
                }
                None => unknown_chain(chain),
            };
            if error.code == Code::Timeout {
                attempt = (attempt * 2).min(READ_ATTEMPT_MAX);
            }
            self.routing.refresh(table.version, backoff.next).await;
            backoff.pause(error).await?;
        }
    }

    /// Every serving target once; the last failure if none answers.
    async fn one_round<R: ToTarget>(
        &self,
        table: &Routing,
        chain: &Chain,
        turn: usize,
        attempt: Duration,
        request: &mut R,
    ) -> Result<R::Answer, Error> {
        let why = format!("chain {} has no serving target", chain.id);
        let mut last = Error::new(Code::ChainUnavailable, why);
        for target in read_order(chain, turn, is_suspect) {
            last = match self.ask(table, chain, target, attempt, request).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            match last.code.retry() {
                Retry::Never | Retry::RefreshRouting => return Err(last),
                Retry::AtTail => {
                    let Some(tail) = chain.tail() else { continue };
                    match self.ask(table, chain, tail, attempt, request).await {
                        Ok(answer) => return Ok(answer),
                        Err(error) => last = error,
                    }
                }
                Retry::OtherReplica | Retry::Backoff => {}
            }
        }
        Err(last)
    }

    async fn ask<R: ToTarget>(
        &self,
        table: &Routing,
        chain: &Chain,
        target: TargetId,
        attempt: Duration,
        request: &mut R,
    ) -> Result<R::Answer, Error> {
        request.aim(chain, target);
        let address = locate(table, target)?;
        match self.pool.call(address, &*request, Bytes::new(), attempt).await {
            Ok((done, payload)) => request.accept(done, payload),
            Err(error) => {
                if matches!(error.code, Code::Timeout | Code::Unreachable) {
                    suspect(target.node());
                }
                Err(error)
            }
        }
    }

    /// Changes `chunk`; answered when every serving target has it durably. The same update id goes with every attempt.
    pub(crate) async fn update_chunk(
        &self,
        chain: ChainId,
        chunk: ChunkId,
        change: Change,
        payload: Bytes,
    ) -> Result<UpdateDone, Error> {
        let lane = self.lanes.take(chunk).await;
        let mut update = Update {
            chain,
            chain_version: ChainVersion::NONE,
            target: TargetId::new(0),
            chunk,
            id: lane.id(),
            truncate_generation: change.truncate_generation,
            op: change.op,
            chunk_size: change.chunk_size,
            checksum: crc32c::crc32c(&payload),
        };
        let until = self.until();
        let mut backoff = Backoff::new(until);
        loop {
            let table = self.routing.get(until).await?;
            let error = match self.update_once(&table, &mut update, &payload).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            match error.code.retry() {
                Retry::Never => return Err(error),
                Retry::Backoff => {}
                Retry::RefreshRouting | Retry::OtherReplica | Retry::AtTail => {
                    self.routing.refresh(table.version, REFRESH_FOR.min(backoff.next * 4)).await;
                }
            }
            backoff.pause(error).await?;
        }
    }

    async fn update_once(
        &self,
        table: &Routing,
        update: &mut Update,
        payload: &Bytes,
    ) -> Result<UpdateDone, Error> {
        let id = update.chain;
        let chain = find_chain(table, id).ok_or_else(|| unknown_chain(id))?;
        let head = chain.head().ok_or_else(|| {
            let why = format!("chain {} has no serving target", chain.id);
            Error::new(Code::ChainUnavailable, why)
        })?;
        update.chain_version = chain.version;
        update.target = head;
        let address = locate(table, head)?;
        let call = self.pool.call(address, &*update, payload.clone(), self.options.attempt);
        tokio::select! {
            answer = call => answer.map(|(done, _)| done),
            // The chain went on without this head: do not wait for its silence to end.
            () = self.routing.changed(chain) => {
                if !self.routing.serves(id, head) {
                    // It may be out of reach: when it is back, its old connection is not yet.
                    self.pool.forget(address);
                }
                Err(Error::new(Code::StaleChain, format!("chain {} changed meanwhile", chain.id)))
            }
        }
    }
}

/// What an update does, and under which of the file's properties.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) op: UpdateOp,
    pub(crate) truncate_generation: u64,
    pub(crate) chunk_size: u32,
}

fn locate(table: &Routing, target: TargetId) -> Result<&str, Error> {
    address_of(table, target).ok_or_else(|| {
        Error::new(Code::Unreachable, format!("the server of target {target} has no address"))
    })
}

fn unknown_chain(chain: ChainId) -> Error {
    Error::new(Code::ChainUnavailable, format!("chain {chain} is not in the routing table"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use chain::table::{ChainTarget, PublicState};

    fn chain(states: &[PublicState]) -> Chain {
        let targets = states
            .iter()
            .zip(10_001..)
            .map(|(state, node)| ChainTarget { id: NodeId::new(node).target(0, 0), state: *state });
        Chain { id: ChainId::new(1), version: ChainVersion::new(2), targets: targets.collect() }
    }

    fn nodes(order: Vec<TargetId>) -> Vec<u32> {
        order.into_iter().map(|target| target.node().get()).collect()
    }

    #[test]
    fn reads_rotate_over_serving_targets_and_ask_suspects_last() {
        use PublicState::{Offline, Serving};
        let chain = chain(&[Serving, Serving, Serving, Offline]);
        assert_eq!(nodes(read_order(&chain, 0, |_| false)), [10_001, 10_002, 10_003]);
        assert_eq!(nodes(read_order(&chain, 4, |_| false)), [10_002, 10_003, 10_001]);
        let second = |node: NodeId| node.get() == 10_002;
        assert_eq!(nodes(read_order(&chain, 1, second)), [10_003, 10_001, 10_002]);
    }

    #[test]
    fn a_chain_without_serving_targets_is_asked_nowhere() {
        assert!(read_order(&chain(&[PublicState::LastServing]), 5, |_| false).is_empty());
    }
}
