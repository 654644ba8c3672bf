//! Starts a storage server and stops it in order.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use chain::id::NodeId;
use prometheus_client::registry::Registry;
use rpc::admin::Admin;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::args::{Args, Command, Serve};
use crate::engine::{self, Engine, Options};
use crate::membership;
use crate::node::Node;

/// A server that runs; it ends when its stop switch is turned on.
#[derive(Debug)]
pub struct Running {
    /// The server.
    pub node: Arc<Node>,
    /// Where it answers clients.
    pub address: SocketAddr,
    /// Where it answers humans.
    pub admin: SocketAddr,
    membership: JoinHandle<()>,
    tasks: Vec<JoinHandle<()>>,
    answering: watch::Sender<bool>,
}

/// Does what the command line says.
///
/// # Errors
/// Says which flag or disk is wrong.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Verify { data } => verify(&data),
        Command::Serve(serve) => {
            rpc::telemetry::init();
            tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
                let stop = rpc::shutdown::on_signal()?;
                start(serve, stop).await?.join().await;
                Ok(())
            })
        }
    }
}

/// Opens the disks and begins to serve.
///
/// # Errors
/// A disk is refused, or a port is taken.
pub async fn start(args: Serve, stop: watch::Receiver<bool>) -> anyhow::Result<Running> {
    tracing::info!(?args, "start");
    let listener = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("--listen {}", args.listen))?;
    let admin_listener =
        TcpListener::bind(args.admin).await.with_context(|| format!("--admin {}", args.admin))?;
    let (address, admin) = (listener.local_addr()?, admin_listener.local_addr()?);
    let advertise = match args.advertise.strip_suffix(":0") {
        Some(host) => format!("{host}:{}", address.port()),
        None => args.advertise.clone(),
    };
    let id = NodeId::new(args.node_id);
    let cluster = args.cluster.clone();
    let disks = open_disks(args.clone()).await?;
    // Keyed at random for each process: names this start of the server.
    let incarnation = RandomState::new().hash_one(std::process::id());
    let node = tokio::task::spawn_blocking(move || Node::new(cluster, id, incarnation, disks));
    let node = Arc::new(node.await??);
    let (answering, stop_answering) = watch::channel(false);
    let tasks = vec![
        tokio::spawn(rpc::serve::serve(listener, Arc::clone(&node), stop_answering.clone())),
        tokio::spawn(rpc::admin::serve(admin_listener, Arc::new(endpoint(&node)), stop_answering)),
    ];
    let membership =
        tokio::spawn(membership::run(Arc::clone(&node), args.manager, advertise, stop));
    Ok(Running { node, address, admin, membership, tasks, answering })
}

impl Running {
    /// Waits until the server was asked to stop and has stopped: the manager is told first, then
    /// what is under way is answered.
    pub async fn join(self) {
        if let Err(error) = self.membership.await {
            tracing::error!(%error, "the heartbeat task ended");
        }
        self.answering.send_replace(true);
        for task in self.tasks {
            if tokio::time::timeout(std::time::Duration::from_secs(5), task).await.is_err() {
                tracing::warn!("requests under way were cut off");
            }
        }
    }
}

async fn open_disks(args: Serve) -> anyhow::Result<Vec<Engine>> {
    let open = move || {
        let (cluster, node) = (args.cluster, NodeId::new(args.node_id));
        let open = |dir: std::path::PathBuf| {
            let shown = dir.display().to_string();
            let options = Options {
                dir,
                cluster: cluster.clone(),
                node,
                io: args.io.into(),
                capacity_bytes: None,
            };
            Engine::open(&options).with_context(|| format!("--data {shown}"))
        };
        args.data.into_iter().map(open).collect::<anyhow::Result<Vec<_>>>()
    };
    // The engine spawns its tasks on this runtime.
    tokio::task::spawn_blocking(open).await?
}

fn endpoint(node: &Arc<Node>) -> Admin {
    let mut registry = Registry::default();
    node.metrics.register(&mut registry);
    let (ready, state) = (Arc::clone(node), Arc::clone(node));
    Admin::new(registry, move || ready.ready(), move || state.state())
}

fn verify(data: &Path) -> anyhow::Result<()> {
    let report = engine::verify(data).with_context(|| format!("--data {}", data.display()))?;
    let text = format!("{report:#?}\n");
    std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes())?;
    anyhow::ensure!(report.problem_count == 0, "{} problems", report.problem_count);
    Ok(())
}
