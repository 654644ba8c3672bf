//! The routing table as last heard. One task follows the manager by long polls; whoever meets a refusal that the table is
//! too old asks for a newer one and waits for it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use chain::id::{ChainId, RoutingVersion, TargetId};
use chain::table::Chain;
use rpc::message::manager::{GetRouting, Routing};
use rpc::{Code, Error};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::Inner;

/// How long the manager may hold a poll back.
const POLL: Duration = Duration::from_secs(2);
/// Pause after a poll that failed, so that a manager that is away is not flooded.
const PAUSE: Duration = Duration::from_millis(200);
/// How often the follower looks whether its client is gone.
const IDLE: Duration = Duration::from_millis(500);

/// The cache.
#[derive(Debug)]
pub(crate) struct RoutingCache {
    table: watch::Sender<Option<Arc<Routing>>>,
}

impl RoutingCache {
    pub(crate) fn new() -> Self {
        Self { table: watch::Sender::new(None) }
    }

    /// The table, as soon as there is one.
    pub(crate) async fn get(&self, until: Instant) -> Result<Arc<Routing>, Error> {
        if let Some(table) = self.table.borrow().as_ref() {
            return Ok(Arc::clone(table));
        }
        self.wait(until, |_| true).await
    }

    /// The first table for which `want` holds.
    pub(crate) async fn wait(
        &self,
        until: Instant,
        want: impl Fn(&Routing) -> bool,
    ) -> Result<Arc<Routing>, Error> {
        let mut changes = self.table.subscribe();
        let found = changes.wait_for(|table| table.as_deref().is_some_and(&want));
        match tokio::time::timeout_at(until, found).await {
            Ok(Ok(table)) => table.clone().ok_or_else(gone),
            Ok(Err(_)) => Err(gone()),
            Err(_) => Err(Error::new(Code::Timeout, "wait for a routing table")),
        }
    }

    /// Waits a moment for a table newer than `known`; returns also without one.
    pub(crate) async fn refresh(&self, known: RoutingVersion, moment: Duration) {
        let until = Instant::now() + moment;
        // Without a newer table the caller tries with the old one again.
        let _ = self.wait(until, |table| table.version > known).await;
    }

    /// Waits until `chain` is in another version than `version`.
    pub(crate) async fn changed(&self, chain: &Chain) {
        let mut changes = self.table.subscribe();
        let differs = |table: &Option<Arc<Routing>>| {
            let now = table.as_deref().and_then(|table| find_chain(table, chain.id));
            now.is_some_and(|now| now.version > chain.version)
        };
        if changes.wait_for(differs).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether `target` serves its chain, as far as is known.
    pub(crate) fn serves(&self, chain: ChainId, target: TargetId) -> bool {
        let table = self.table.borrow();
        let found = table.as_deref().and_then(|table| find_chain(table, chain));
        found.is_some_and(|found| found.serving().any(|serving| serving == target))
    }

    fn version(&self) -> RoutingVersion {
        let table = self.table.borrow();
        table.as_ref().map_or(RoutingVersion::new(0), |table| table.version)
    }
}

fn gone() -> Error {
    Error::new(Code::Internal, "the client is shutting down")
}

/// The chain with this id; tables list chains in order of id.
pub(crate) fn find_chain(table: &Routing, id: ChainId) -> Option<&Chain> {
    let at = table.chains.binary_search_by_key(&id, |chain| chain.id).ok()?;
    table.chains.get(at)
}

/// Where the target's server answers.
pub(crate) fn address_of(table: &Routing, target: TargetId) -> Option<&str> {
    let node = target.node();
    table.nodes.iter().find(|known| known.node == node).map(|known| known.address.as_str())
}

/// Follows the manager until the client is gone. A poll under way is answered as soon as a newer table exists, so nobody
/// needs to hurry it.
pub(crate) async fn follow(client: Weak<Inner>) {
    loop {
        let Some(inner) = client.upgrade() else { return };
        let Some(answer) = poll_once(&inner).await else { return };
        let pause = match answer {
            Ok(Some(table)) => {
                inner.routing.table.send_replace(Some(Arc::new(table)));
                Duration::ZERO
            }
            // A manager without a table answers at once.
            Ok(None) if inner.routing.version().get() == 0 => PAUSE,
            Ok(None) => Duration::ZERO,
            Err(error) => {
                tracing::debug!(%error, "ask the manager for routing");
                PAUSE
            }
        };
        drop(inner);
        tokio::time::sleep(pause).await;
    }
}

/// One poll; `None` when this task holds the last reference to the client.
async fn poll_once(inner: &Arc<Inner>) -> Option<Result<Option<Routing>, Error>> {
    let known = inner.routing.version();
    // The first table is wanted at once; later ones when they exist.
    let wait = if known.get() == 0 { Duration::ZERO } else { POLL };
    let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(0);
    let request = GetRouting { known, wait_ms };
    let deadline = wait + inner.options.attempt;
    let poll = inner.pool.call(&inner.options.manager, &request, Bytes::new(), deadline);
    tokio::pin!(poll);
    loop {
        tokio::select! {
            answer = &mut poll => return Some(answer.map(|(done, _)| done.routing)),
            () = tokio::time::sleep(IDLE) => if Arc::strong_count(inner) == 1 { return None },
        }
    }
}
