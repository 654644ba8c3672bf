//! The metadata service over a store: runs each operation until it commits or is refused, gives
//! retries their first answer, and knows which clients are alive.

use crate::chunks::Chunks;
use crate::manager::service::Published;
use crate::op::{Given, OpError, Operation, format};
use crate::schema::{
    self, Answered, ClientRecord, HashKey, Record, answered_key, client_key, within,
};
use crate::txn::{Isolation, Scan, Store, Txn, TxnError};
use bytes::Bytes;
use chain::id::{ClientId, InodeId};
use chain::layout::Layout;
use rpc::codec::Wire;
use rpc::message::meta::{Caller, KeepSessions, ROOT};
use rpc::{Code, Error, clock::boot_time};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

pub(crate) mod cut;

/// Attempts of one operation before the client is asked to come back. Each failed one means that
/// another committed.
const ATTEMPTS_MAX: u32 = 128;
/// Inode ids taken from the store at once. What is left of them at a restart is never used.
const ID_BLOCK: u64 = 1024;
/// Ids below are reserved; 1 is the root.
const ID_FIRST: u64 = 0x1000;
/// Chains of one file, unless the table says otherwise.
const STRIPE_MAX: u32 = 16;
/// A client that said nothing for so long has ended: its sessions and answers go. A client
/// retries a request for at most half of this.
pub const CLIENT_TIMEOUT: Duration = Duration::from_secs(120);

/// The metadata service.
#[derive(Debug)]
pub struct Meta<S, C> {
    store: S,
    chunks: Arc<C>,
    cuts: cut::Locks,
    hash: HashKey,
    published: watch::Receiver<Published>,
    ids: tokio::sync::Mutex<Range<u64>>,
    /// When each client was last heard, by CLOCK_BOOTTIME.
    clients: Mutex<BTreeMap<ClientId, Duration>>,
}

impl<S: Store, C: Chunks> Meta<S, C> {
    /// Opens the metadata in `store`, making it first if the store is empty.
    ///
    /// # Errors
    /// The store is unreadable, or belongs to another cluster.
    pub async fn open(
        store: S,
        chunks: C,
        cluster: &str,
        hash_key: u128,
        published: watch::Receiver<Published>,
    ) -> Result<Self, OpError> {
        let mut txn = store.begin().await?;
        let hash = format(&mut txn, cluster, hash_key, now_ns()).await?;
        txn.commit().await?;
        let mut txn = store.begin().await?;
        let (begin, end) = within(schema::CLIENT.to_vec());
        let found = txn.scan(Scan::new(begin, end, usize::MAX - 1).snapshot()).await?;
        let mut clients = BTreeMap::new();
        for (key, _) in found.pairs {
            // Everybody has the whole time-out from now on to be heard.
            clients
                .insert(ClientId::new(u128::from_be_bytes(schema::parse_id(&key)?)), boot_time());
        }
        let (ids, clients) = (tokio::sync::Mutex::new(0..0), Mutex::new(clients));
        let (chunks, cuts) = (Arc::new(chunks), cut::Locks::default());
        Ok(Self { store, chunks, cuts, hash, published, ids, clients })
    }

    /// The store.
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// The chunks of files.
    pub(crate) fn chunks(&self) -> &C {
        &self.chunks
    }

    /// What the manager published last.
    pub fn published(&self) -> Published {
        self.published.borrow().clone()
    }

    /// Runs `request` to its end.
    ///
    /// # Errors
    /// The operation's refusal, or a storage server's if chunks were to be cut; [`Code::Conflict`] after
    /// too many attempts; [`Code::Internal`] for a damaged or failed store.
    pub async fn execute<R: Operation>(&self, request: &R) -> Result<R::Response, Error> {
        if let Some(caller) = request.caller() {
            self.saw(caller.client);
        }
        let mut settled = false;
        for _ in 0..ATTEMPTS_MAX {
            match self.step(request, &mut settled).await {
                Ok(Some(response)) => return Ok(response),
                Ok(None) => {}
                Err(OpError::Refused(error)) => return Err(error),
                Err(OpError::Txn(error)) if error.is_retryable() => tokio::task::yield_now().await,
                Err(error) => return Err(internal(&error)),
            }
        }
        Err(gave_up())
    }

    /// One attempt, or what has to be done before the next one.
    async fn step<R: Operation>(
        &self,
        request: &R,
        settled: &mut bool,
    ) -> Result<Option<R::Response>, OpError> {
        match self.attempt(request, *settled).await {
            Err(OpError::CutPending(inode)) => self.finish_cut(inode).await?,
            Err(OpError::Unsettled(inode)) => {
                self.settle_length(inode).await?;
                *settled = true;
            }
            Err(error) => return Err(error),
            Ok(response) => {
                // Also for a retry, which is given the first answer: the first one may have failed here.
                if let Some(inode) = request.cuts() {
                    self.finish_cut(inode).await?;
                }
                return Ok(Some(response));
            }
        }
        Ok(None)
    }

    async fn attempt<R: Operation>(
        &self,
        request: &R,
        settled: bool,
    ) -> Result<R::Response, OpError> {
        let fresh = if R::MAKES_INODE { self.fresh_id().await? } else { 0 };
        let given = Given { settled, ..self.given(InodeId::new(fresh)) };
        let mut txn = self.store.begin().await?;
        let Some(caller) = request.caller() else {
            return request.apply(&mut txn, &given).await;
        };
        let key = answered_key(caller.client, caller.request);
        if let Some(value) = txn.get(&key, Isolation::Serializable).await? {
            return first_answer::<R>(&key, &value, caller);
        }
        let client = client_key(caller.client);
        match txn.get(&client, Isolation::Serializable).await? {
            Some(value) => check_open(&ClientRecord::from_value(&client, &value)?, caller)?,
            None => txn.set(&client, &ClientRecord { acknowledged: 0 }.to_value()),
        }
        let response = request.apply(&mut txn, &given).await?;
        let answered = Answered { kind: R::KIND.0, answer: response.to_bytes() };
        txn.set(&key, &answered.to_value());
        txn.commit().await?;
        Ok(response)
    }

    /// Keeps the client's sessions, and drops the answers that it has received.
    ///
    /// # Errors
    /// As [`Meta::execute`].
    pub async fn keep_sessions(&self, request: &KeepSessions) -> Result<(), Error> {
        self.saw(request.client);
        for _ in 0..ATTEMPTS_MAX {
            match self.acknowledge(request.client, request.acknowledged).await {
                Ok(()) => return Ok(()),
                Err(OpError::Txn(error)) if error.is_retryable() => tokio::task::yield_now().await,
                Err(error) => return Err(internal(&error)),
            }
        }
        Err(gave_up())
    }

    /// Every request of `client` up to `acknowledged` has ended: its answer goes, and the number stays in its
    /// place, so that the request is not carried out anew when it comes once more.
    async fn acknowledge(&self, client: ClientId, acknowledged: u64) -> Result<(), OpError> {
        let key = client_key(client);
        let mut txn = self.store.begin().await?;
        let known = txn.get(&key, Isolation::Serializable).await?;
        let known = known.map(|value| ClientRecord::from_value(&key, &value)).transpose()?;
        // Most calls say nothing new, and a commit costs a sync. One that was overtaken is no news either.
        if acknowledged <= known.map_or(0, |known| known.acknowledged) {
            return Ok(());
        }
        let end = answered_key(client, acknowledged.saturating_add(1));
        txn.clear_range(&answered_key(client, 0), &end);
        txn.set(&key, &ClientRecord { acknowledged }.to_value());
        Ok(txn.commit().await?)
    }

    /// Clients that have ended: see [`CLIENT_TIMEOUT`].
    pub fn silent_clients(&self, now: Duration) -> Vec<ClientId> {
        let silent = |seen: &Duration| now.saturating_sub(*seen) > CLIENT_TIMEOUT;
        self.clients().iter().filter(|(_, seen)| silent(seen)).map(|(id, _)| *id).collect()
    }

    /// Forgets a client whose records are gone.
    pub fn forget_client(&self, client: ClientId) {
        self.clients().remove(&client);
    }

    fn saw(&self, client: ClientId) {
        self.clients().insert(client, boot_time());
    }

    fn clients(&self) -> MutexGuard<'_, BTreeMap<ClientId, Duration>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn given(&self, fresh: InodeId) -> Given {
        let Published { routing, space: (capacity, used), replicas } = self.published();
        let chains = u32::try_from(routing.chains.len()).unwrap_or(u32::MAX);
        let stripe = if routing.stripe == 0 { STRIPE_MAX } else { routing.stripe };
        let layout = Layout {
            table: routing.table,
            chains,
            stripe: stripe.min(chains),
            chunk_size_bytes: routing.chunk_size_bytes,
            seed: self.hash.cookie(&fresh.get().to_le_bytes()),
        };
        let layout = layout.is_valid().then_some(layout);
        let replicas = replicas.max(1);
        let space = (capacity / replicas, used / replicas);
        let (now_ns, hash, settled) = (now_ns(), self.hash, false);
        Given { now_ns, fresh, layout, hash, space, settled }
    }

    /// An inode id that was never given out before, by this process or another one.
    async fn fresh_id(&self) -> Result<u64, TxnError> {
        let mut ids = self.ids.lock().await;
        if let Some(id) = ids.next() {
            return Ok(id);
        }
        let mut txn = self.store.begin().await?;
        let value = txn.get(&schema::ALLOCATOR, Isolation::Serializable).await?;
        let next = match value {
            Some(value) => u64::from_value(&schema::ALLOCATOR, &value)
                .map_err(|error| TxnError::Failed(error.to_string()))?,
            None => ID_FIRST.max(ROOT.get() + 1),
        };
        txn.set(&schema::ALLOCATOR, &(next + ID_BLOCK).to_value());
        // After an unknown result the next attempt takes a further block.
        txn.commit().await?;
        *ids = next + 1..next + ID_BLOCK;
        Ok(next)
    }
}

/// Refuses a request whose end its client has seen: it lay on a connection that stood still, and would undo what
/// came after it.
fn check_open(known: &ClientRecord, caller: &Caller) -> Result<(), OpError> {
    if caller.request > known.acknowledged {
        return Ok(());
    }
    let why = format!("request {} of this client came late: it has ended", caller.request);
    Err(Error::new(Code::InvalidRequest, why).into())
}

/// What the request was answered the first time. The caller never reuses a number.
fn first_answer<R: Operation>(
    key: &[u8],
    value: &Bytes,
    caller: &Caller,
) -> Result<R::Response, OpError> {
    let answered = Answered::from_value(key, value)?;
    if answered.kind != R::KIND.0 {
        let why = format!("request {} of this client was another one", caller.request);
        return Err(Error::new(Code::InvalidRequest, why).into());
    }
    Ok(R::Response::from_bytes(answered.answer).map_err(Error::from)?)
}

fn gave_up() -> Error {
    Error::new(Code::Conflict, format!("gave up after {ATTEMPTS_MAX} attempts"))
}

fn internal(error: &OpError) -> Error {
    tracing::error!(%error, "an operation failed");
    Error::new(Code::Internal, error.to_string())
}

/// Wall clock of this server: only shown to users, never compared with another machine's.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(crate) mod tests;
