//! `operator run`: every task of the process, started in one place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use kube::Client;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::args::RunArgs;
use crate::controller::{self, Shared};
use crate::lease::Election;
use crate::metrics::Metrics;
use crate::webhook::serve::{self, Current, Webhook};
use crate::webhook::trust::{self, Names};
use crate::webhook::users::Users;

/// Runs until SIGTERM, or until another replica could hold the Lease.
///
/// # Errors
/// The API server cannot be reached, a port is taken, or the Lease was lost.
pub async fn run(args: RunArgs) -> anyhow::Result<()> {
    let stop = rpc::shutdown::on_signal().context("watch for signals")?;
    let client = Client::try_default().await.context("reach the API server")?;
    let mut registry = Registry::default();
    let metrics = Metrics::new(&mut registry);
    let leads = Arc::new(AtomicBool::new(false));
    let current = Arc::new(Current::default());
    admin(&args, registry, &leads, &current, &stop).await?;

    let listener = TcpListener::bind(args.webhook)
        .await
        .with_context(|| format!("--webhook {}: listen", args.webhook))?;
    let webhook = Arc::new(Webhook {
        client: client.clone(),
        images: args.images(),
        metrics: metrics.clone(),
    });
    let serving = tokio::spawn(serve::serve(listener, webhook, Arc::clone(&current), stop.clone()));
    let names = Names {
        namespace: args.system_namespace.clone(),
        secret: args.webhook_secret.clone(),
        service: args.webhook_service.clone(),
        configuration: args.webhook_configuration.clone(),
    };
    tokio::spawn(trust::run(client.clone(), names, current, Arc::clone(&leads), stop.clone()));

    let outcome = lead(&args, client, metrics, &leads, stop).await;
    if outcome.is_ok() {
        serving.await.context("the webhook server ended")?.context("serve the webhook")?;
    }
    outcome
}

async fn admin(
    args: &RunArgs,
    registry: Registry,
    leads: &Arc<AtomicBool>,
    current: &Arc<Current>,
    stop: &watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.admin)
        .await
        .with_context(|| format!("--admin {}: listen", args.admin))?;
    let (ready, stopping) = (Arc::clone(current), stop.clone());
    let is_ready = move || {
        if *stopping.borrow() {
            return Err("stopping".to_owned());
        }
        if ready.is_set() {
            Ok(())
        } else {
            Err("waiting for the webhook's certificate".to_owned())
        }
    };
    let (leads, serves, identity) = (Arc::clone(leads), Arc::clone(current), args.identity.clone());
    let images = args.images();
    let state = move || {
        json!({
            "identity": identity,
            "leads": leads.load(Ordering::Relaxed),
            "servesWebhook": serves.is_set(),
            "images": {"registry": images.registry, "tag": images.tag},
        })
    };
    let admin = Arc::new(rpc::admin::Admin::new(registry, is_ready, state));
    // The admin endpoint outlives the signal: until the end it says that the process is not ready.
    let (keep, never) = watch::channel(false);
    tokio::spawn(async move {
        rpc::admin::serve(listener, admin, never).await;
        drop(keep);
    });
    Ok(())
}

/// Waits for the Lease and reconciles while it is held.
async fn lead(
    args: &RunArgs,
    client: Client,
    metrics: Metrics,
    leads: &AtomicBool,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let mut election = Election::new(client.clone(), &args.system_namespace, &args.identity);
    tokio::select! {
        () = rpc::shutdown::stopped(&mut stop) => return Ok(()),
        () = election.acquire() => {}
    }
    tracing::info!(identity = args.identity, "leads");
    leads.store(true, Ordering::Relaxed);
    metrics.leader.set(1);
    let work = async {
        let users = Users::start(client.clone()).await;
        let (images, jobs) = (args.images(), args.jobs.clone());
        let shared = Shared { client: client.clone(), images, jobs, users, metrics };
        controller::run(shared, stop.clone()).await;
    };
    tokio::select! {
        () = work => {}
        () = election.hold() => bail!("the lease was lost: another replica may lead now"),
    }
    leads.store(false, Ordering::Relaxed);
    election.release().await;
    Ok(())
}
