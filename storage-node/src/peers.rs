//! Where the other servers are, and connections to them.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use chain::id::{NodeId, TargetId};
use rpc::conn::Pool;
use rpc::message::Request;
use rpc::message::manager::NodeAddress;
use rpc::{Code, Error};
use tokio::sync::Notify;

/// The servers that the manager named.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    pool: Pool,
    addresses: RwLock<HashMap<NodeId, String>>,
    /// Somebody wants the routing table fetched, or the manager told, at once.
    pub(crate) refresh: Notify,
}

impl Peers {
    pub(crate) fn learn(&self, nodes: Vec<NodeAddress>) {
        let nodes = nodes.into_iter().map(|n| (n.node, n.address)).collect();
        *self.addresses.write().unwrap_or_else(PoisonError::into_inner) = nodes;
    }

    /// Calls the server that holds `target`.
    pub(crate) async fn call<R: Request>(
        &self,
        target: TargetId,
        request: &R,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<(R::Response, Bytes), Error> {
        let node = target.node();
        let address = {
            let addresses = self.addresses.read().unwrap_or_else(PoisonError::into_inner);
            addresses.get(&node).cloned()
        };
        let unknown = || Error::new(Code::Unreachable, format!("no address of node {node}"));
        self.pool.call(&address.ok_or_else(unknown)?, request, payload, deadline).await
    }

    /// Calls the manager.
    pub(crate) async fn call_manager<R: Request>(
        &self,
        manager: &str,
        request: &R,
        deadline: Duration,
    ) -> Result<R::Response, Error> {
        let answer = self.pool.call(manager, request, Bytes::new(), deadline).await;
        answer.map(|(response, _)| response)
    }
}
