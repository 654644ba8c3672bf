//! The server and its manager: heartbeats out, leases and chains in.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rpc::Error;
use rpc::message::manager::{Heartbeat, HeartbeatDone, Routing};
use tokio::sync::watch;

use crate::node::Node;
use crate::sync::follow;
use crate::target::now_ms;

/// Time between heartbeats when nothing happens.
const INTERVAL: Duration = Duration::from_millis(1_000);
/// Least time between heartbeats: bounds what a storm of refreshes costs the manager.
const INTERVAL_MIN: Duration = Duration::from_millis(20);
/// How long one heartbeat may take: a few fit into a lease.
const TIMEOUT: Duration = Duration::from_millis(1_500);
/// How long a draining server tells the manager so before it goes anyway.
const FAREWELL: Duration = Duration::from_secs(2);

/// Sends heartbeats until `stop` is on, then says farewell.
pub(crate) async fn run(
    node: Arc<Node>,
    manager: String,
    address: String,
    mut stop: watch::Receiver<bool>,
) {
    let mut failures = 0u32;
    loop {
        match beat(&node, &manager, &address).await {
            Ok(()) => {
                if failures > 0 {
                    tracing::info!(failures, "the manager answers again");
                }
                failures = 0;
            }
            Err(error) => {
                node.metrics.heartbeat_failures.inc();
                if failures == 0 {
                    tracing::warn!(%error, manager, "heartbeat");
                }
                failures = failures.saturating_add(1);
            }
        }
        tokio::select! {
            () = rpc::shutdown::stopped(&mut stop) => break,
            () = tokio::time::sleep(INTERVAL) => {}
            () = node.peers.refresh.notified() => tokio::time::sleep(INTERVAL_MIN).await,
        }
    }
    // No client is answered any more before the manager learns that it may go on without us.
    node.surrender();
    let farewell = tokio::time::timeout(FAREWELL, beat(&node, &manager, &address)).await;
    match farewell {
        Ok(Ok(())) => tracing::info!("the manager knows that this server stops"),
        Ok(Err(error)) => tracing::warn!(%error, "the manager was not told of the stop"),
        Err(_) => tracing::warn!("the manager did not answer the farewell"),
    }
}

async fn beat(node: &Arc<Node>, manager: &str, address: &str) -> Result<(), Error> {
    let request = heartbeat(node, address);
    // R3: the lease counts from before the request was sent.
    let sent_ms = now_ms();
    let done: HeartbeatDone = node.peers.call_manager(manager, &request, TIMEOUT).await?;
    node.metrics.heartbeats.inc();
    take(node, sent_ms, done).await;
    Ok(())
}

/// Takes up what the manager answered to a heartbeat sent at `sent_ms`.
async fn take(node: &Arc<Node>, sent_ms: u64, done: HeartbeatDone) {
    node.assign(&done.targets);
    if let Some(routing) = done.routing {
        learn(node, routing).await;
    }
    // R3: only now. A server that comes back after its lease ended may have been struck off: with
    // the new lease under the chain that it remembers it would answer from a copy that is behind.
    node.renew(sent_ms.saturating_add(done.lease_ms.into()));
}

fn heartbeat(node: &Node, address: &str) -> Heartbeat {
    let stats: Vec<_> = node.disks.iter().map(crate::engine::Engine::stats).collect();
    Heartbeat {
        cluster: node.cluster.clone(),
        node: node.id,
        incarnation: node.incarnation,
        address: address.to_owned(),
        targets: node.reports(),
        capacity_bytes: stats.iter().map(|s| s.capacity_bytes).sum(),
        used_bytes: stats.iter().map(|s| s.used_bytes).sum(),
        routing: node.routing_version(),
    }
}

/// Takes up the chains of a routing table.
async fn learn(node: &Arc<Node>, routing: Routing) {
    node.peers.learn(routing.nodes);
    let targets = node.targets();
    let mut is_new = false;
    for chain in routing.chains {
        for target in targets.iter().filter(|t| t.chain == chain.id) {
            let is_wanted = target.replica().wants(&chain);
            if !is_wanted {
                continue;
            }
            match target.publish(chain.clone()).await {
                Ok(()) => {
                    is_new = true;
                    follow(node, target);
                }
                Err(error) => tracing::error!(target_id = %target.id, %error, "store a chain"),
            }
        }
    }
    node.routing.store(routing.version.get(), Ordering::Release);
    if is_new {
        // The manager waits for our word before it changes these chains again.
        node.peers.refresh.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use chain::id::{ChainId, ChainVersion, NodeId, RoutingVersion};
    use chain::replica::Refusal;
    use chain::table::{Chain, ChainTarget, PublicState};
    use rpc::message::manager::TargetAssignment;

    use super::*;
    use crate::engine::{Engine, IoMode, Options};

    const NODE: NodeId = NodeId::new(10_001);
    const CHAIN: ChainId = ChainId::new(1);
    const LEASE_MS: u32 = 3_600_000;

    fn node(dir: &std::path::Path) -> Arc<Node> {
        let disk = Engine::open(&Options {
            dir: dir.to_owned(),
            cluster: "train".into(),
            node: NODE,
            io: IoMode::Auto,
            capacity_bytes: Some(1 << 20),
        });
        Arc::new(Node::new("train".into(), NODE, 1, vec![disk.unwrap()]).unwrap())
    }

    /// The manager's answer: the chain at `version`, with this server's target in `state`.
    fn answer(version: u64, state: PublicState) -> HeartbeatDone {
        let (own, other) = (NODE.target(0, 0), NodeId::new(10_002).target(0, 0));
        let mut targets = vec![
            ChainTarget { id: own, state },
            ChainTarget { id: other, state: PublicState::Serving },
        ];
        targets.sort_by_key(|t| t.state);
        let chain = Chain { id: CHAIN, version: ChainVersion::new(version), targets };
        let routing = Routing {
            version: RoutingVersion::new(version),
            table: 1,
            chunk_size_bytes: 1 << 20,
            stripe: 0,
            chains: vec![chain],
            nodes: Vec::new(),
        };
        HeartbeatDone {
            lease_ms: LEASE_MS,
            targets: vec![TargetAssignment { target: own, chain: CHAIN, disk: 0 }],
            routing: Some(routing),
        }
    }

    #[tokio::test]
    async fn a_server_that_was_struck_off_answers_nobody_under_the_chain_that_it_remembers() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let newborn = Routing {
            chains: vec![Chain::newborn(CHAIN, &[NODE.target(0, 0)])],
            ..answer(1, PublicState::Serving).routing.unwrap()
        };
        // A lease that ended long ago: nothing was heard of the manager since.
        let born = HeartbeatDone {
            lease_ms: 0,
            routing: Some(newborn),
            ..answer(1, PublicState::Serving)
        };
        take(&node, 0, born).await;
        take(&node, 0, HeartbeatDone { lease_ms: 1, ..answer(2, PublicState::Serving) }).await;
        let target = node.targets().remove(0);
        let admit = |version| target.replica().admit(now_ms(), ChainVersion::new(version));
        assert_eq!(admit(2), Err(Refusal::NoLease));
        let mut taking = pin!(take(&node, now_ms(), answer(3, PublicState::Offline)));
        std::future::poll_fn(|context| {
            let poll = taking.as_mut().poll(context);
            assert!(admit(2).is_err(), "between two steps of the answer");
            poll
        })
        .await;
        assert_eq!(admit(2), Err(Refusal::StaleChain(ChainVersion::new(3))));
        assert_eq!(admit(3), Err(Refusal::NotServing));
        take(&node, now_ms(), answer(4, PublicState::Serving)).await;
        assert_eq!(admit(4), Ok(()));
    }
}
