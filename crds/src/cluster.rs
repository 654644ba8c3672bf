//! `StorageCluster`: one replicated store, written by an administrator.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::shared::{ChainCount, Resources, VolumeSpec, conditions};

/// A replicated store that the operator runs: one manager and metadata process and a number of
/// storage nodes, joined by a chain table.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, KubeSchema)]
#[kube(
    group = "lampyris.dev",
    version = "v1alpha1",
    kind = "StorageCluster",
    namespaced,
    status = "StorageClusterStatus",
    shortname = "fsc",
    category = "lampyris",
    validation = Rule::new("size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("a StorageCluster's name must be a DNS label of at most 40 characters that starts with a letter"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Storage", type_ = "string", json_path = ".status.storage.text"),
    printcolumn(name = "Chains", type_ = "integer", json_path = ".status.chains.serving"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Domain", type_ = "string", priority = 1, json_path = ".spec.storage.failureDomain"),
    printcolumn(name = "Manager", type_ = "string", priority = 1, json_path = ".status.endpoints.manager")
)]
#[serde(rename_all = "camelCase")]
pub struct StorageClusterSpec {
    /// The storage nodes and how data is spread over them.
    pub storage: StorageSpec,
    /// The manager and metadata process.
    pub metadata: MetadataSpec,
    /// What happens to the data when this object is deleted.
    #[serde(default)]
    pub deletion: Deletion,
}

/// The storage nodes and how data is spread over them.
#[derive(Clone, Debug, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.count >= self.replicas")
        .message("storage.count must be at least storage.replicas"),
    validation = Rule::new("(self.count * self.targetsPerNode) % self.replicas == 0")
        .message("storage.count * storage.targetsPerNode must be a multiple of storage.replicas"),
    validation = Rule::new("self.replicas == oldSelf.replicas")
        .message("storage.replicas cannot change after creation"),
    validation = Rule::new("self.count == oldSelf.count")
        .message("storage.count cannot change yet: expanding and draining are not supported"),
    validation = Rule::new("self.targetsPerNode == oldSelf.targetsPerNode")
        .message("storage.targetsPerNode cannot change after creation"),
    validation = Rule::new("self.failureDomain == oldSelf.failureDomain")
        .message("storage.failureDomain cannot change after creation"),
    validation = Rule::new("self.chunkSize == oldSelf.chunkSize")
        .message("storage.chunkSize cannot change after creation")
)]
pub struct StorageSpec {
    /// Number of storage nodes.
    #[x_kube(validation = Rule::new("self >= 1 && self <= 200").message("storage.count must be between 1 and 200"))]
    #[schemars(range(min = 0, max = 100_000))]
    pub count: i32,
    /// Copies of each chunk: the length of a chain.
    #[serde(default = "default_replicas")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 5").message("storage.replicas must be between 1 and 5"))]
    #[schemars(range(min = 1, max = 100))]
    pub replicas: i32,
    /// Node label whose values are the failure domains; no chain has two targets in one domain.
    #[serde(default = "default_failure_domain")]
    #[x_kube(validation = Rule::new("self.matches('^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')")
        .message("storage.failureDomain must be a node label key such as topology.kubernetes.io/zone"))]
    #[schemars(length(min = 1, max = 253))]
    pub failure_domain: String,
    /// Labels of the nodes that may run storage; any node when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 16))]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Targets (replicas' homes) on each storage node.
    #[serde(default = "default_targets")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 99").message("storage.targetsPerNode must be between 1 and 99"))]
    #[schemars(range(min = 0, max = 100_000))]
    pub targets_per_node: i32,
    /// Size of the pieces that files are cut into: a power of two from 64Ki to 64Mi.
    #[serde(default = "default_chunk_size")]
    #[x_kube(validation = Rule::new("string(self) in ['64Ki', '128Ki', '256Ki', '512Ki', '1Mi', '2Mi', '4Mi', '8Mi', '16Mi', '32Mi', '64Mi']")
        .message("storage.chunkSize must be a power of two from 64Ki to 64Mi, such as 1Mi"))]
    pub chunk_size: Quantity,
    /// Volume of each storage node.
    pub volume: VolumeSpec,
    /// CPU and memory of each storage node.
    #[serde(default = "default_resources")]
    pub resources: Resources,
}

/// The manager and metadata process.
#[derive(Clone, Debug, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MetadataSpec {
    /// Where metadata is kept.
    pub store: MetadataStore,
    /// Volume of the embedded store.
    pub volume: VolumeSpec,
    /// CPU and memory of the process.
    #[serde(default = "default_resources")]
    pub resources: Resources,
}

/// Where metadata is kept: exactly one member.
#[derive(Clone, Debug, Default, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.embedded)")
        .message("metadata.store must be {embedded: {}}, the only store so far")
)]
pub struct MetadataStore {
    /// A transactional store inside the manager process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedded: Option<EmbeddedStore>,
}

/// A transactional store inside the manager process. It has no settings.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub struct EmbeddedStore {}

/// What happens to the data when the cluster is deleted.
#[derive(Clone, Debug, Deserialize, Serialize, KubeSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Deletion {
    /// `Retain` keeps every volume claim; a cluster of the same name finds its data again.
    #[serde(default = "default_deletion")]
    #[x_kube(validation = Rule::new("self == 'Retain'").message("deletion.policy must be Retain, the only policy so far"))]
    #[schemars(length(max = 32))]
    pub policy: String,
}

// The API server checks defaults against our rules, so this default has to pass them.
impl Default for Deletion {
    fn default() -> Self {
        Self { policy: default_deletion() }
    }
}

/// What the operator saw last.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct StorageClusterStatus {
    /// Generation of the spec that this status speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One word for humans, derived from the conditions: Pending, Ready, Degraded, Unavailable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Ready, Progressing, Degraded.
    #[serde(default)]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// The highest node id ever given out. Ids are never used twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_node_id: Option<i64>,
    /// Storage nodes that are ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageCount>,
    /// Chains by state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chains: Option<ChainCount>,
    /// Where to reach the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<Endpoints>,
}

/// Storage nodes that are ready, of those that are wanted.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct StorageCount {
    /// Storage nodes that the manager hears from.
    pub ready: i32,
    /// Storage nodes that are wanted.
    pub desired: i32,
    /// Both, as `ready/desired`.
    pub text: String,
}

/// Where to reach the cluster.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Endpoints {
    /// Host and port of the manager and metadata service.
    pub manager: String,
}

fn default_replicas() -> i32 {
    3
}

fn default_targets() -> i32 {
    3
}

fn default_failure_domain() -> String {
    "kubernetes.io/hostname".to_owned()
}

fn default_chunk_size() -> Quantity {
    Quantity("1Mi".to_owned())
}

fn default_deletion() -> String {
    "Retain".to_owned()
}

fn default_resources() -> Resources {
    let map = |cpu: &str, memory: &str| {
        BTreeMap::from([
            ("cpu".to_owned(), Quantity(cpu.to_owned())),
            ("memory".to_owned(), Quantity(memory.to_owned())),
        ])
    };
    Resources { requests: Some(map("100m", "128Mi")), limits: Some(map("2", "512Mi")) }
}

/// `host:port` of the manager of cluster `name` in `namespace`, as pods reach it.
#[must_use]
pub fn manager_address(name: &str, namespace: &str) -> String {
    format!("{name}-meta.{namespace}.svc:{}", crate::names::META_PORT)
}
