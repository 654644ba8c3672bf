//! What the node plugin asks of the API server: read one Dataset, post one Event.

use std::time::Duration;

use crds::Dataset;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};

pub use crds::DatasetSpec;

use crate::csi::DRIVER_NAME;
use crate::volume::Pod;

/// The API server gets this long; kubelet repeats a publish anyway.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest note that the API server takes in an Event.
const NOTE_BYTES: usize = 1024;

/// Why the API server could not help.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// There is no such Dataset.
    #[error("Dataset {0} does not exist; create it, or correct the name in the pod")]
    NoDataset(String),
    /// The API server refused or could not be reached.
    #[error("ask the API server for Dataset {0}")]
    Api(String, #[source] Box<kube::Error>),
    /// It did not answer in time.
    #[error("API server did not answer within 10 s")]
    Timeout,
}

/// Something that a pod's owner should see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Whether something is wrong.
    pub warning: bool,
    /// Typed reason.
    pub reason: String,
    /// What happened and what to do.
    pub note: String,
}

/// The cluster as the node plugin sees it; in tests a map and a list.
#[async_trait::async_trait]
pub trait Cluster: Send + Sync + 'static {
    /// The spec of a Dataset.
    async fn dataset(&self, namespace: &str, name: &str) -> Result<DatasetSpec, ClusterError>;
    /// Shows a notice on a pod. Failure is logged: there is nobody to tell.
    async fn notify(&self, pod: &Pod, notice: Notice);
}

/// The real one.
#[derive(Clone)]
pub struct Kubernetes {
    client: Client,
    node_name: String,
}

impl std::fmt::Debug for Kubernetes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kubernetes").field("node_name", &self.node_name).finish_non_exhaustive()
    }
}

impl Kubernetes {
    /// Uses `client` on behalf of a node.
    #[must_use]
    pub fn new(client: Client, node_name: String) -> Self {
        Self { client, node_name }
    }
}

#[async_trait::async_trait]
impl Cluster for Kubernetes {
    async fn dataset(&self, namespace: &str, name: &str) -> Result<DatasetSpec, ClusterError> {
        let full_name = format!("{namespace}/{name}");
        let api = Api::<Dataset>::namespaced(self.client.clone(), namespace);
        match tokio::time::timeout(TIMEOUT, api.get_opt(name)).await {
            Err(_) => Err(ClusterError::Timeout),
            Ok(Err(error)) => Err(ClusterError::Api(full_name, Box::new(error))),
            Ok(Ok(None)) => Err(ClusterError::NoDataset(full_name)),
            Ok(Ok(Some(dataset))) => Ok(dataset.spec),
        }
    }

    async fn notify(&self, pod: &Pod, notice: Notice) {
        let api = Api::<Event>::namespaced(self.client.clone(), &pod.namespace);
        let event = event(pod, &notice, &self.node_name);
        let params = PostParams::default();
        let posted = tokio::time::timeout(TIMEOUT, api.create(&params, &event)).await;
        match posted {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, pod = pod.name, "post an event"),
            Err(_) => tracing::warn!(pod = pod.name, "post an event: no answer within 10 s"),
        }
    }
}

fn event(pod: &Pod, notice: &Notice, node_name: &str) -> Event {
    let mut end = notice.note.len().min(NOTE_BYTES);
    while !notice.note.is_char_boundary(end) {
        end -= 1;
    }
    Event {
        metadata: ObjectMeta {
            // Not with a dot at its end, as Events are usually named: the server refuses that here.
            generate_name: Some(format!("{}-", pod.name.chars().take(200).collect::<String>())),
            namespace: Some(pod.namespace.clone()),
            ..ObjectMeta::default()
        },
        action: Some("ServeVolume".to_owned()),
        event_time: Some(MicroTime(k8s_openapi::jiff::Timestamp::now())),
        note: notice.note.get(..end).map(str::to_owned),
        reason: Some(notice.reason.clone()),
        regarding: Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(DRIVER_NAME.to_owned()),
        reporting_instance: Some(node_name.chars().take(128).collect()),
        type_: Some(if notice.warning { "Warning" } else { "Normal" }.to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_names_its_pod_and_keeps_within_the_servers_limit() {
        let pod = Pod { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let note = "é".repeat(600);
        let notice = Notice { warning: true, reason: "InvalidCredentials".into(), note };
        let event = event(&pod, &notice, "node-1");
        assert_eq!(event.note.unwrap().len(), 1024);
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.metadata.generate_name.as_deref(), Some("p-"));
        let regarding = event.regarding.unwrap();
        assert_eq!(regarding.uid.as_deref(), Some("u"));
        assert_eq!(regarding.kind.as_deref(), Some("Pod"));
    }
}
