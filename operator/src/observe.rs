//! Reads what a plan needs. Reads only: at the fixed point this is all that the operator does.

use std::collections::BTreeMap;

use crds::names::{LABEL_CLUSTER, LABEL_COMPONENT, LABEL_NODE_ID};
use crds::{ChainTable, Dataset, StorageCluster, StorageNode};
use hyper::Method;
use kube::api::{DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::api::{self, ApiError};
use crate::http;
use crate::plan::cluster::{ClusterView, ManagerStatus};
use crate::plan::{Children, workload};

/// One object of `kind`, or `None` if it does not exist.
pub async fn get(
    client: &Client,
    kind: &str,
    namespace: &str,
    name: &str,
) -> Result<Option<Value>, ApiError> {
    let found = api::namespaced(client, kind, namespace)?
        .get_opt(name)
        .await
        .map_err(|error| ApiError::request(format!("get {kind} {namespace}/{name}"), error))?;
    found.map(|object| api::to_value(kind, &object)).transpose()
}

/// One object of `kind` as its type, or `None` if it does not exist.
pub async fn get_as<T: DeserializeOwned>(
    client: &Client,
    kind: &str,
    namespace: &str,
    name: &str,
) -> Result<Option<T>, ApiError> {
    let found = get(client, kind, namespace, name).await?;
    found.map(|value| decode(kind, name, value)).transpose()
}

fn decode<T: DeserializeOwned>(kind: &str, name: &str, value: Value) -> Result<T, ApiError> {
    serde_json::from_value(value)
        .map_err(|source| ApiError::Decode { what: format!("{kind} {name}"), source })
}

async fn list(
    client: &Client,
    kind: &str,
    namespace: &str,
    selector: &str,
) -> Result<Vec<DynamicObject>, ApiError> {
    let params = ListParams::default().labels(selector);
    let found = api::namespaced(client, kind, namespace)?
        .list(&params)
        .await
        .map_err(|error| ApiError::request(format!("list {kind} in {namespace}"), error))?;
    Ok(found.items)
}

/// Everything about one cluster.
pub async fn cluster(client: &Client, cluster: StorageCluster) -> Result<ClusterView, ApiError> {
    let namespace = cluster.namespace().unwrap_or_default();
    let name = cluster.name_any();
    let selector = format!("{LABEL_CLUSTER}={name}");
    let mut children = Children::new();
    for kind in ["StatefulSet", "Service", "PodDisruptionBudget"] {
        for object in list(client, kind, &namespace, &selector).await? {
            let value = api::to_value(kind, &object)?;
            children.insert((kind.to_owned(), object.name_any()), value);
        }
    }
    let mut nodes = Vec::new();
    for object in list(client, "StorageNode", &namespace, &selector).await? {
        let value = api::to_value("StorageNode", &object)?;
        match decode::<StorageNode>("StorageNode", &object.name_any(), value) {
            Ok(node) => nodes.push(node),
            // The others go on. Its id stays taken: the cluster's status has the highest one.
            Err(error) => tracing::warn!(%error, namespace, "pass over a StorageNode"),
        }
    }
    nodes.retain(|node| node.spec.cluster_ref.name == name);
    nodes.sort_by_key(|node| node.spec.node_id);
    let table: Option<ChainTable> =
        get_as(client, "ChainTable", &namespace, &format!("{name}-table-1")).await?;
    let hosts = hosts(client, &namespace, &name).await?;
    let domains = domains(client, &hosts, &cluster.spec.storage.failure_domain).await?;
    let manager = manager(&workload::manager_admin(&cluster)).await;
    Ok(ClusterView { cluster, nodes, table, children, hosts, domains, manager })
}

/// The Kubernetes node of each scheduled storage pod, by storage node id.
async fn hosts(
    client: &Client,
    namespace: &str,
    cluster: &str,
) -> Result<BTreeMap<i64, String>, ApiError> {
    let selector = format!("{LABEL_CLUSTER}={cluster},{LABEL_COMPONENT}=storage");
    let pods = list(client, "Pod", namespace, &selector).await?;
    let place = |pod: &DynamicObject| {
        let id = pod.labels().get(LABEL_NODE_ID)?.parse().ok()?;
        let host = pod.data["spec"]["nodeName"].as_str()?;
        Some((id, host.to_owned()))
    };
    Ok(pods.iter().filter_map(place).collect())
}

async fn domains(
    client: &Client,
    hosts: &BTreeMap<i64, String>,
    label: &str,
) -> Result<BTreeMap<String, String>, ApiError> {
    let nodes = api::cluster_wide(client, "Node")?;
    let mut found = BTreeMap::new();
    for host in hosts.values() {
        if found.contains_key(host) {
            continue;
        }
        let node = nodes
            .get_metadata_opt(host)
            .await
            .map_err(|error| ApiError::request(format!("get node {host}"), error))?;
        let value = node.and_then(|node| node.labels().get(label).cloned());
        found.extend(value.map(|value| (host.clone(), value)));
    }
    Ok(found)
}

/// What the manager at `host` says; `None` if it does not answer.
pub async fn manager(host: &str) -> Option<ManagerStatus> {
    match http::exchange(Method::GET, host, "/v1/status", None).await {
        Ok((status, body)) if status.is_success() => serde_json::from_value(body)
            .inspect_err(|error| tracing::warn!(host, %error, "read the manager's status"))
            .ok(),
        Ok((status, _)) => {
            tracing::debug!(host, %status, "the manager has no status");
            None
        }
        Err(error) => {
            tracing::debug!(host, %error, "the manager does not answer");
            None
        }
    }
}

/// A Job with its pods' termination messages and the address of a running pod.
#[derive(Debug, Default)]
pub struct JobState {
    /// The Job, if it exists.
    pub job: Option<Value>,
    /// Termination messages, latest last.
    pub messages: Vec<String>,
    /// IP address of a running pod.
    pub address: Option<String>,
}

/// Reads a Job and its pods.
pub async fn job(client: &Client, namespace: &str, name: &str) -> Result<JobState, ApiError> {
    let Some(job) = get(client, "Job", namespace, name).await? else {
        return Ok(JobState::default());
    };
    // By uid: pods of an earlier Job of this name may still be there, and speak of something else.
    let uid = job["metadata"]["uid"].as_str().unwrap_or_default();
    let selector = format!("batch.kubernetes.io/controller-uid={uid}");
    let mut ended: Vec<(String, String)> = Vec::new();
    let mut address = None;
    for pod in list(client, "Pod", namespace, &selector).await? {
        let status = &pod.data["status"];
        let last = &status["containerStatuses"][0]["state"]["terminated"];
        if let Some(message) = last["message"].as_str() {
            let at = last["finishedAt"].as_str().unwrap_or_default();
            ended.push((at.to_owned(), message.to_owned()));
        }
        if status["phase"] == "Running" {
            address = status["podIP"].as_str().map(str::to_owned);
        }
    }
    ended.sort();
    let messages = ended.into_iter().map(|(_, message)| message).collect();
    Ok(JobState { job: Some(job), messages, address })
}

/// Whether the StorageCluster that a Dataset refers to is ready; `None` if there is no such one.
pub async fn cluster_ready(client: &Client, dataset: &Dataset) -> Result<Option<bool>, ApiError> {
    let Some(source) = &dataset.spec.source.cluster else { return Ok(None) };
    let own = dataset.namespace().unwrap_or_default();
    let namespace = source.cluster_ref.namespace.as_deref().unwrap_or(&own);
    let found: Option<StorageCluster> =
        get_as(client, "StorageCluster", namespace, &source.cluster_ref.name).await?;
    Ok(found.map(|cluster| {
        let conditions = cluster.status.map(|status| status.conditions).unwrap_or_default();
        crate::plan::condition::is_true(&conditions, "Ready")
    }))
}
