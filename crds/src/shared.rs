//! Types that several kinds share, and the schema of a condition list.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A name in the same namespace.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LocalRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
}

/// A name, here or in another namespace.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Namespace of the object; the referring object's own when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub namespace: Option<String>,
}

/// CPU and memory of a container.
#[derive(Clone, Debug, Default, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[self.?requests.orValue({}), self.?limits.orValue({})].all(m, m.all(k, k in ['cpu', 'memory']))")
        .message("resources may name cpu and memory only"),
    validation = Rule::new("[self.?requests.orValue({}), self.?limits.orValue({})].all(m, m.all(k, isQuantity(string(m[k])) && quantity(string(m[k])).isGreaterThan(quantity('0'))))")
        .message("resources must be positive quantities such as 500m or 256Mi"),
    validation = Rule::new("!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) || !isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k])) || quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)")
        .message("a resource request must not exceed its limit")
)]
pub struct Resources {
    /// What the scheduler sets aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 3))]
    pub requests: Option<BTreeMap<String, Quantity>>,
    /// What the container may use at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 3))]
    pub limits: Option<BTreeMap<String, Quantity>>,
}

/// The persistent volume of one server.
#[derive(Clone, Debug, Default, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self == oldSelf")
        .message("a volume cannot change after creation; create a new StorageCluster")
)]
pub struct VolumeSpec {
    /// StorageClass of the claim; the cluster's default class when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class_name: Option<String>,
    /// Size of the claim.
    #[x_kube(validation = Rule::new("isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('64Mi')) >= 0")
        .message("volume size must be a quantity of at least 64Mi"))]
    pub size: Quantity,
}

/// How many targets of a storage node are in which state.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetCount {
    /// All targets of the node.
    pub total: i32,
    /// Targets that answer reads.
    pub serving: i32,
    /// Targets that are catching up.
    pub syncing: i32,
    /// Targets that are away.
    pub offline: i32,
}

/// How many chains of a table are in which state.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ChainCount {
    /// All chains of the table.
    pub total: i32,
    /// Chains with every replica serving.
    pub serving: i32,
    /// Chains with some but not all replicas serving.
    pub degraded: i32,
    /// Chains with no serving replica.
    pub unavailable: i32,
}

/// The schema of `status.conditions`: a list that merges by `type`.
pub fn conditions(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let mut schema = <Vec<Condition> as JsonSchema>::json_schema(generator);
    schema.insert("x-kubernetes-list-type".into(), "map".into());
    schema.insert("x-kubernetes-list-map-keys".into(), serde_json::json!(["type"]));
    schema
}
