//! The manager's IO: one task owns the state, takes one event after another, stores what was
//! decided, and only then answers and publishes. Readers of routing wait on what was published.

use super::spec::{ChainTableSpec, ClusterStatus};
use super::{Change, Event, LEASE_MS, State, Stored, decide};
use crate::schema::{
    self, DeclaredTable, NodeRecord, Record, SchemaError, chain_key, node_key, parse_id, within,
};
use crate::txn::{Isolation, Scan, Store, Txn, TxnError};
use chain::id::{NodeId, RoutingVersion};
use chain::table::Chain;
use rpc::message::manager::{GetRouting, Heartbeat, HeartbeatDone, Routing, RoutingDone};
use rpc::{Code, Error, clock::boot_time};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// Events that may wait for the owner: above it, senders are told to come back.
const QUEUE: usize = 4096;
/// How often time alone may change something.
const TICK: Duration = Duration::from_millis(100);
/// Longest hold of an answer about routing.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Pairs read at once at the start.
const LOAD_PAGE: usize = 1000;

/// Why the manager cannot go on. Its process must end: another one reads the store anew.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The store failed, or somebody else wrote to it.
    #[error("store the manager's state: {0}")]
    Txn(#[from] TxnError),
    /// A stored value cannot be read.
    #[error("read the manager's state: {0}")]
    Schema(#[from] SchemaError),
    /// A stored chain breaks T2.
    #[error("chain {0:?} in the store breaks rule T2")]
    Chain(Chain),
    /// Somebody else has written since.
    #[error("the store is at routing version {found}, this manager wrote {own}")]
    Deposed {
        /// In the store.
        found: RoutingVersion,
        /// Ours.
        own: RoutingVersion,
    },
}

/// What everybody else may see of the manager.
#[derive(Clone, Debug)]
pub struct Published {
    /// The routing table, as stored.
    pub routing: Arc<Routing>,
    /// Bytes of the disks of all servers heard, all and used.
    pub space: (u64, u64),
    /// Most members of a chain.
    pub replicas: u64,
}

#[derive(Debug)]
enum Command {
    Heartbeat(Heartbeat, oneshot::Sender<Result<HeartbeatDone, Error>>),
    Declare(DeclaredTable, oneshot::Sender<Result<(), Error>>),
    Status(oneshot::Sender<ClusterStatus>),
}

/// A handle to the manager's task.
#[derive(Clone, Debug)]
pub struct Manager {
    commands: mpsc::Sender<Command>,
    published: watch::Receiver<Published>,
}

impl Manager {
    /// Reads the state and makes the task: the caller runs the future until it ends, which it
    /// does with the reason why the process must.
    ///
    /// # Errors
    /// [`ManagerError`].
    pub async fn start<S: Store>(
        store: S,
        cluster: String,
    ) -> Result<(Self, impl Future<Output = ManagerError> + Send), ManagerError> {
        let stored = load(&store).await?;
        let state = State::new(cluster, now_ms(), stored);
        let (publish, published) = watch::channel(publication(&state, None));
        let (commands, queue) = mpsc::channel(QUEUE);
        let owner = Owner { store, state, publish };
        Ok((Self { commands, published }, owner.run(queue)))
    }

    /// Answers a storage server.
    ///
    /// # Errors
    /// Its refusal, or [`Code::Busy`].
    pub async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatDone, Error> {
        self.ask(|answer| Command::Heartbeat(heartbeat, answer)).await?
    }

    /// Answers a client that wants routing.
    pub async fn routing(&self, request: &GetRouting) -> RoutingDone {
        let mut published = self.published.clone();
        let wait = Duration::from_millis(request.wait_ms.into()).min(WAIT_MAX);
        let newer = published.wait_for(|p| p.routing.version != request.known);
        match tokio::time::timeout(wait, newer).await {
            Ok(Ok(p)) => RoutingDone { routing: Some((*p.routing).clone()) },
            Ok(Err(_)) | Err(_) => RoutingDone { routing: None },
        }
    }

    /// What is published, now and later.
    #[must_use]
    pub fn published(&self) -> watch::Receiver<Published> {
        self.published.clone()
    }

    /// Declares a chain table.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] for a bad table, [`Code::Conflict`] for one that does not follow.
    pub async fn declare(&self, spec: &ChainTableSpec) -> Result<(), Error> {
        let table = spec.validate()?;
        self.ask(|answer| Command::Declare(table, answer)).await?
    }

    /// The cluster's status.
    ///
    /// # Errors
    /// [`Code::Busy`].
    pub async fn status(&self) -> Result<ClusterStatus, Error> {
        self.ask(Command::Status).await
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        let busy = || Error::new(Code::Busy, "the manager has too much to do");
        self.commands.try_send(command(answer)).map_err(|_| busy())?;
        answered.await.map_err(|_| Error::new(Code::Draining, "the manager ends"))
    }
}

fn now_ms() -> u64 {
    u64::try_from(boot_time().as_millis()).unwrap_or(u64::MAX)
}

/// The owner of the state.
struct Owner<S> {
    store: S,
    state: State,
    publish: watch::Sender<Published>,
}

impl<S: Store> Owner<S> {
    async fn run(mut self, mut queue: mpsc::Receiver<Command>) -> ManagerError {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let done = tokio::select! {
                // Heartbeats that wait are heard before time declares anybody dead.
                biased;
                Some(command) = queue.recv() => self.command(command).await,
                _ = tick.tick() => self.event(&Event::Tick).await.map(drop),
            };
            if let Err(error) = done {
                return error;
            }
        }
    }

    async fn command(&mut self, command: Command) -> Result<(), ManagerError> {
        match command {
            Command::Heartbeat(heartbeat, answer) => {
                let (node, known) = (heartbeat.node, heartbeat.routing);
                let heard = self.event(&Event::Heartbeat(heartbeat)).await?;
                // A sender that is gone heartbeats again.
                drop(answer.send(heard.map(|()| self.grant(node, known))));
            }
            Command::Declare(table, answer) => {
                let declared = self.event(&Event::Declare(table)).await?;
                drop(answer.send(declared));
            }
            Command::Status(answer) => drop(answer.send(ClusterStatus::of(now_ms(), &self.state))),
        }
        Ok(())
    }

    fn grant(&self, node: NodeId, known: RoutingVersion) -> HeartbeatDone {
        let routing = Arc::clone(&self.publish.borrow().routing);
        HeartbeatDone {
            // Six thousand.
            lease_ms: u32::try_from(LEASE_MS).unwrap_or_default(),
            targets: self.state.assignments(node),
            routing: (routing.version != known).then(|| (*routing).clone()),
        }
    }

    /// Decides, stores, remembers, publishes. The inner result is the sender's.
    async fn event(&mut self, event: &Event) -> Result<Result<(), Error>, ManagerError> {
        let now_ms = now_ms();
        let decision = match decide(now_ms, &self.state, event) {
            Ok(decision) => decision,
            Err(refused) => return Ok(Err(refused)),
        };
        if let Some(change) = &decision.change {
            store_change(&self.store, self.state.stored().version, change).await?;
            for chain in &change.chains {
                tracing::info!(chain = %chain.id, version = %chain.version, targets = ?chain.targets, "chain changes");
            }
        }
        let (changed, spoke) = (decision.change.is_some(), decision.heard.is_some());
        self.state.apply(now_ms, decision);
        if changed {
            self.publish.send_replace(publication(&self.state, None));
        } else if spoke {
            let space = publication(&self.state, Some(&self.publish.borrow().routing));
            self.publish.send_modify(|p| *p = space);
        }
        Ok(Ok(()))
    }
}

/// With `same`, the routing table is that one.
fn publication(state: &State, same: Option<&Arc<Routing>>) -> Published {
    let routing = same.map_or_else(|| Arc::new(state.stored().routing()), Arc::clone);
    let replicas = routing.chains.iter().map(|c| c.targets.len()).max().unwrap_or(1);
    Published { routing, space: state.space(), replicas: replicas as u64 }
}

/// Reads what the manager stored.
///
/// # Errors
/// [`ManagerError`].
pub async fn load<S: Store>(store: &S) -> Result<Stored, ManagerError> {
    let mut txn = store.begin().await?;
    let mut stored = Stored::default();
    if let Some(value) = txn.get(&schema::TABLE, Isolation::Snapshot).await? {
        stored.table = Some(DeclaredTable::from_value(&schema::TABLE, &value)?);
    }
    if let Some(value) = txn.get(&schema::ROUTING, Isolation::Snapshot).await? {
        stored.version = RoutingVersion::from_value(&schema::ROUTING, &value)?;
    }
    for (key, value) in all(&mut txn, schema::CHAIN).await? {
        let chain = Chain::from_value(&key, &value)?;
        if !chain.is_valid() {
            return Err(ManagerError::Chain(chain));
        }
        stored.chains.insert(chain.id, chain);
    }
    for (key, value) in all(&mut txn, schema::NODE).await? {
        let node = NodeId::new(u32::from_be_bytes(parse_id(&key)?));
        stored.nodes.insert(node, NodeRecord::from_value(&key, &value)?);
    }
    Ok(stored)
}

async fn all<T: Txn>(
    txn: &mut T,
    prefix: schema::Prefix,
) -> Result<Vec<(bytes::Bytes, bytes::Bytes)>, TxnError> {
    let (mut begin, end) = within(prefix.to_vec());
    let mut found = Vec::new();
    loop {
        let page = txn.scan(Scan::new(begin, end.clone(), LOAD_PAGE).snapshot()).await?;
        found.extend(page.pairs);
        match found.last() {
            Some((last, _)) if page.more => begin = crate::txn::key_after(last),
            _ => return Ok(found),
        }
    }
}

/// T1: compare-and-set on the routing version, which every change of the manager's keys moves.
async fn store_change<S: Store>(
    store: &S,
    own: RoutingVersion,
    change: &Change,
) -> Result<(), ManagerError> {
    let mut txn = store.begin().await?;
    let found = match txn.get(&schema::ROUTING, Isolation::Serializable).await? {
        Some(value) => RoutingVersion::from_value(&schema::ROUTING, &value)?,
        None => RoutingVersion::default(),
    };
    if found != own {
        return Err(ManagerError::Deposed { found, own });
    }
    txn.set(&schema::ROUTING, &change.version.to_value());
    if let Some(table) = &change.table {
        txn.set(&schema::TABLE, &table.to_value());
    }
    for chain in &change.chains {
        txn.set(&chain_key(chain.id), &chain.to_value());
    }
    for (node, record) in &change.nodes {
        txn.set(&node_key(*node), &record.to_value());
    }
    // Nothing is retried: after an unknown result only the store knows, and a new process asks it.
    Ok(txn.commit().await?)
}
