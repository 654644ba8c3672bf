//! The process: sockets for kubelet, the admin endpoint, the seccomp profile, tending.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rpc::admin::Admin;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tonic::Status;

use crate::args::Serve;
use crate::cluster::{Cluster, ClusterError, Kubernetes, Notice};
use crate::csi::{
    Answer, Driver, Identity, Node, NodePublish, NodeUnpublish, Registrar, RegistrationStatus,
};
use crate::mount;
use crate::plugin::{Plugin, PluginError};
use crate::seccomp;
use crate::volume::{Options, Pod, parse_unpublish};

/// kubelet asks this socket who we are. It sends the socket's path as the request's authority, with
/// each slash as %2F, which HTTP allows only before an @: without one in the name, every request is
/// refused as malformed.
const REGISTRATION_SOCKET: &str = "reg@csi.lampyris.dev.sock";
/// Between two rounds of tending.
const TEND_INTERVAL: Duration = Duration::from_secs(30);
/// Between two attempts to reach the keeper at the start.
const KEEPER_INTERVAL: Duration = Duration::from_millis(500);

/// Where the admin endpoint shows `/state` of every sidecar on the node.
pub const SIDECARS: &str = "/state/sidecars";

/// The driver as CSI calls it.
struct Service {
    plugin: Arc<Plugin>,
    endpoint: String,
    registered: Arc<AtomicBool>,
}

impl Driver for Service {
    fn node_name(&self) -> String {
        self.plugin.node_name.clone()
    }

    fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    fn is_ready(&self) -> bool {
        true
    }

    fn publish(self: Arc<Self>, request: NodePublish) -> Answer<()> {
        Box::pin(async move { publish(&self.plugin, &request).await })
    }

    fn unpublish(self: Arc<Self>, request: NodeUnpublish) -> Answer<()> {
        Box::pin(async move {
            let key = parse_unpublish(&request, &self.plugin.kubelet_dir)
                .map_err(|error| status(&error.into()))?;
            let target = Path::new(&request.target_path);
            self.plugin.unpublish(target, key).await.map_err(|error| {
                tracing::warn!(error = chain(&error), volume = request.volume_id, "unpublish");
                status(&error)
            })
        })
    }

    fn registered(&self, status: &RegistrationStatus) {
        self.registered.store(status.plugin_registered, Ordering::Relaxed);
        if status.plugin_registered {
            tracing::info!("registered with kubelet");
        } else {
            tracing::error!(status.error, "kubelet refused the registration");
        }
    }
}

/// Publishes the volume that kubelet asks for.
///
/// # Errors
/// What kubelet shows on the pod. Most codes tell it that nothing is mounted, and then it never asks to unmount: so what
/// goes wrong with a volume that is mounted is said with one that leaves this open.
pub async fn publish(plugin: &Plugin, request: &NodePublish) -> Result<(), Status> {
    let published = match Options::parse(request, &plugin.kubelet_dir) {
        Ok(options) => plugin.publish(options).await,
        Err(error) => Err(error.into()),
    };
    let Err(error) = published else { return Ok(()) };
    tracing::warn!(error = chain(&error), volume = request.volume_id, "publish");
    let target = Path::new(&request.target_path);
    // Where that cannot be found out, it may be.
    let mounted = mount::find(target).map_or(true, |found| found.is_some_and(|m| m.is_ours()));
    Err(if mounted { Status::unavailable(chain(&error)) } else { status(&error) })
}

fn status(error: &PluginError) -> Status {
    let text = chain(error);
    match error {
        PluginError::Volume(_) => Status::invalid_argument(text),
        PluginError::Denied(_) => Status::permission_denied(text),
        PluginError::Cluster(ClusterError::NoDataset(_)) => Status::not_found(text),
        PluginError::Cluster(_) | PluginError::Keeper(_) => Status::unavailable(text),
        PluginError::Mount(_) | PluginError::Bind(..) => Status::internal(text),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// A cluster that has nothing: for conformance tests of the CSI service alone.
struct Offline;

#[async_trait::async_trait]
impl Cluster for Offline {
    async fn dataset(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<crds::DatasetSpec, ClusterError> {
        Err(ClusterError::NoDataset(format!("{namespace}/{name}")))
    }

    async fn notify(&self, _: &Pod, _: Notice) {}
}

/// Runs the node plugin until `stop`.
///
/// # Errors
/// What keeps it from starting, or the failure of a listener.
pub async fn run(args: Serve, stop: watch::Receiver<bool>) -> anyhow::Result<()> {
    let profile = seccomp::install(&args.kubelet_dir).context("install the seccomp profile")?;
    tracing::info!(profile = %profile.display(), "seccomp profile of storage pods installed");
    let cluster: Arc<dyn Cluster> = if args.offline {
        Arc::new(Offline)
    } else {
        let client = kube::Client::try_default().await.context("find the API server")?;
        Arc::new(Kubernetes::new(client, args.node_name.clone()))
    };
    let (name, dir) = (args.node_name.clone(), args.kubelet_dir.clone());
    let plugin = Plugin::new(name, dir, args.keeper(), cluster);
    let registered = Arc::new(AtomicBool::new(args.offline));
    let recovered = Arc::new(AtomicBool::new(false));
    let admin = admin(&plugin, &registered, &recovered);
    let listener = tokio::net::TcpListener::bind(args.admin)
        .await
        .with_context(|| format!("--admin {}: bind; choose a free port", args.admin))?;
    tokio::spawn(rpc::admin::serve(listener, admin, stop.clone()));
    if !recover(&plugin, stop.clone()).await {
        return Ok(());
    }
    recovered.store(true, Ordering::Relaxed);
    let endpoint = args.plugin_dir().join("csi.sock");
    let service = Arc::new(Service {
        plugin: Arc::clone(&plugin),
        endpoint: endpoint.display().to_string(),
        registered,
    });
    let csi = tonic::transport::Server::builder()
        .add_service(Identity(Arc::clone(&service)))
        .add_service(Node(Arc::clone(&service)))
        .serve_with_incoming_shutdown(incoming(&endpoint)?, stopped(stop.clone()));
    let socket = Path::new("plugins_registry").join(REGISTRATION_SOCKET);
    let registrar = tonic::transport::Server::builder()
        .add_service(Registrar(service))
        .serve_with_incoming_shutdown(
            incoming(&args.kubelet_dir.join(socket))?,
            stopped(stop.clone()),
        );
    tokio::spawn(tend(plugin));
    tokio::try_join!(csi, registrar).context("serve kubelet")?;
    // Mounts stay: the keeper holds them for the next process.
    tracing::info!("stopped");
    Ok(())
}

/// Waits for the keeper and takes up what it holds; false when stopped before.
async fn recover(plugin: &Arc<Plugin>, mut stop: watch::Receiver<bool>) -> bool {
    loop {
        match plugin.recover().await {
            Ok(()) => return true,
            Err(error) => tracing::warn!(error = chain(&error), "wait for the keeper"),
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return false,
            () = tokio::time::sleep(KEEPER_INTERVAL) => {}
        }
    }
}

async fn tend(plugin: Arc<Plugin>) {
    loop {
        tokio::time::sleep(TEND_INTERVAL).await;
        if let Err(error) = plugin.tend().await {
            tracing::warn!(error = chain(&error), "tend the volumes");
        }
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

type Incoming =
    std::pin::Pin<Box<dyn futures::Stream<Item = std::io::Result<tokio::net::UnixStream>> + Send>>;

/// Connections to a socket that is made anew.
fn incoming(path: &Path) -> anyhow::Result<Incoming> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("replace {}", path.display()));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    Ok(Box::pin(futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    })))
}

/// The admin endpoint: ready once `recovered` and `registered` are true; metrics are those of this process and of every
/// sidecar on the node, and [`SIDECARS`] shows what each says of its state.
#[must_use]
pub fn admin(
    plugin: &Arc<Plugin>,
    registered: &Arc<AtomicBool>,
    recovered: &Arc<AtomicBool>,
) -> Arc<Admin> {
    let mut registry = Registry::with_prefix("lampyris_node");
    registry.register_collector(Box::new(Counts(Arc::clone(plugin))));
    let (registered, recovered) = (Arc::clone(registered), Arc::clone(recovered));
    let ready =
        move || match (recovered.load(Ordering::Relaxed), registered.load(Ordering::Relaxed)) {
            (false, _) => Err("waiting for the keeper".to_owned()),
            (true, false) => Err("waiting for kubelet to register the driver".to_owned()),
            (true, true) => Ok(()),
        };
    let [describe, metrics, states] = std::array::from_fn(|_| Arc::clone(plugin));
    let admin = Admin::new(registry, ready, move || describe.describe())
        .with_more_metrics(move || {
            let plugin = Arc::clone(&metrics);
            async move { plugin.sidecar_metrics().await }
        })
        .with_document(SIDECARS, move || {
            let plugin = Arc::clone(&states);
            async move { plugin.sidecar_states().await }
        });
    Arc::new(admin)
}

/// What the plugin holds, read when somebody asks.
#[derive(Debug)]
struct Counts(Arc<Plugin>);

impl prometheus_client::collector::Collector for Counts {
    fn encode(
        &self,
        mut encoder: prometheus_client::encoding::DescriptorEncoder<'_>,
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeMetric;
        use prometheus_client::metrics::MetricType;
        let (volumes, pods) = self.0.counts();
        let figures =
            [("volumes", "Volumes published", volumes), ("pods", "Pods with volumes", pods)];
        for (name, help, value) in figures {
            let gauge = Gauge::<i64>::default();
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::codegen::http::uri::Authority;

    #[test]
    fn the_path_of_the_registration_socket_is_an_authority_once_kubelet_has_escaped_it() {
        let escaped = |name: &str| format!("%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2F{name}");
        assert!(escaped(REGISTRATION_SOCKET).parse::<Authority>().is_ok());
        assert!(escaped("csi.lampyris.dev-reg.sock").parse::<Authority>().is_err());
    }
}
