//! `ChainTable`: which storage nodes share which chains. Written by the operator once all storage
//! nodes know their failure domain; the status then holds the design that the manager was given.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::shared::{ChainCount, LocalRef, conditions};

/// The declared placement of one cluster.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, KubeSchema)]
#[kube(
    group = "lampyris.dev",
    version = "v1alpha1",
    kind = "ChainTable",
    namespaced,
    status = "ChainTableStatus",
    shortname = "fct",
    category = "lampyris",
    validation = Rule::new("self.metadata.name == self.spec.clusterRef.name + '-table-1'")
        .message("a ChainTable's name must be <cluster>-table-<tableId>"),
    printcolumn(name = "Cluster", type_ = "string", json_path = ".spec.clusterRef.name"),
    printcolumn(name = "Design", type_ = "string", json_path = ".status.design.kind"),
    printcolumn(name = "Chains", type_ = "integer", json_path = ".status.health.total"),
    printcolumn(name = "Serving", type_ = "integer", json_path = ".status.health.serving"),
    printcolumn(name = "Peer load", type_ = "integer", json_path = ".status.design.lambdaMax"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("size(self.nodes) >= self.replicas")
        .message("a ChainTable needs at least as many nodes as replicas"),
    validation = Rule::new("(size(self.nodes) * self.targetsPerNode) % self.replicas == 0")
        .message("nodes * targetsPerNode must be a multiple of replicas"),
    validation = Rule::new("self == oldSelf")
        .message("a ChainTable cannot change yet: create a new StorageCluster")
)]
pub struct ChainTableSpec {
    /// The StorageCluster that this table belongs to.
    pub cluster_ref: LocalRef,
    /// Number of the table within its cluster.
    #[x_kube(validation = Rule::new("self == 1").message("tableId must be 1: a cluster has one table"))]
    pub table_id: i32,
    /// Revision of the table at the manager; the higher one wins.
    #[x_kube(validation = Rule::new("self >= 1").message("revision must be at least 1"))]
    pub revision: i64,
    /// Length of each chain.
    #[x_kube(validation = Rule::new("self >= 1 && self <= 5").message("replicas must be between 1 and 5"))]
    #[schemars(range(min = 1, max = 100))]
    pub replicas: i32,
    /// Targets on each node.
    #[x_kube(validation = Rule::new("self >= 1 && self <= 99").message("targetsPerNode must be between 1 and 99"))]
    #[schemars(range(min = 0, max = 100_000))]
    pub targets_per_node: i32,
    /// Bytes of a chunk.
    #[x_kube(validation = Rule::new("self >= 65536 && self <= 67108864").message("chunkSizeBytes must be between 65536 and 67108864"))]
    pub chunk_size_bytes: i64,
    /// The members, with the failure domain that each had when the table was made.
    #[schemars(length(min = 1, max = 200), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["nodeId"]))]
    pub nodes: Vec<TableNode>,
}

/// A member of the table.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TableNode {
    /// Permanent id of the storage node.
    #[schemars(range(min = 10_001, max = 999_999))]
    pub node_id: i64,
    /// No chain has two members with the same value.
    #[schemars(length(min = 1, max = 253))]
    pub failure_domain: String,
}

/// What the operator saw last.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ChainTableStatus {
    /// Generation of the spec that this status speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, Balanced, Degraded.
    #[serde(default)]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// Quality of the design.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub design: Option<DesignStatus>,
    /// The chains, head first, as node ids with spaces between.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chains: Vec<String>,
    /// Revision that the manager accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_revision: Option<i64>,
    /// Chains by state, as the manager counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<ChainCount>,
}

/// Quality of the design: how evenly a lost node's work spreads over the others.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DesignStatus {
    /// Exact: every pair of nodes shares the same number of chains. Balanced: nearly so.
    pub kind: String,
    /// Most chains that two nodes share.
    pub lambda_max: i64,
    /// Fewest chains that two nodes of different domains share.
    pub lambda_min: i64,
    /// No design can have a smaller lambdaMax.
    pub lower_bound: i64,
}
