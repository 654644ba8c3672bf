//! `StorageNode`: one storage server with a permanent id, written by the operator. The API server's
//! uniqueness of names guards the ids: the name must be `<cluster>-<nodeId>`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::shared::{LocalRef, TargetCount, conditions};

/// One storage server with a permanent id.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, KubeSchema)]
#[kube(
    group = "lampyris.dev",
    version = "v1alpha1",
    kind = "StorageNode",
    namespaced,
    status = "StorageNodeStatus",
    shortname = "fsn",
    category = "lampyris",
    validation = Rule::new("self.metadata.name.matches('-[0-9]{5,6}$') && self.metadata.name.startsWith(self.spec.clusterRef.name + '-') && int(self.metadata.name.substring(size(self.spec.clusterRef.name) + 1)) == self.spec.nodeId")
        .message("a StorageNode's name must be <cluster>-<nodeId>"),
    printcolumn(name = "Host", type_ = "string", json_path = ".status.nodeName"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Targets", type_ = "integer", json_path = ".status.targets.serving"),
    printcolumn(name = "Domain", type_ = "string", json_path = ".status.failureDomain"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self == oldSelf").message("a StorageNode's spec cannot change: ids are permanent")
)]
pub struct StorageNodeSpec {
    /// The StorageCluster that this node belongs to.
    pub cluster_ref: LocalRef,
    /// Permanent id, never used twice in a cluster.
    #[x_kube(validation = Rule::new("self >= 10001 && self <= 999999").message("nodeId must be between 10001 and 999999"))]
    pub node_id: i64,
}

/// What the operator saw last.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct StorageNodeStatus {
    /// Generation of the spec that this status speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One word for humans: Pending, Serving, Syncing, Lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Ready.
    #[serde(default)]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// Kubernetes node that runs the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Failure domain of that node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    /// Targets by state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<TargetCount>,
    /// Bytes that the node can hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_bytes: Option<i64>,
}
