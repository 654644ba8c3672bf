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
    node.assign(&done.targets);
    let routing = done.routing;
    // Targets that were just made get their first lease too.
    node.renew(sent_ms.saturating_add(done.lease_ms.into()));
    if let Some(routing) = routing {
        learn(node, routing).await;
    }
    Ok(())
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
