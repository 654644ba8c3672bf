//! `DatasetLoad`: copy files into a Dataset of a StorageCluster, once.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dataset::S3Source;
use crate::shared::{LocalRef, conditions};

/// Copies files into a Dataset whose source is a StorageCluster.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, KubeSchema)]
#[kube(
    group = "lampyris.dev",
    version = "v1alpha1",
    kind = "DatasetLoad",
    namespaced,
    status = "DatasetLoadStatus",
    shortname = "fdl",
    category = "lampyris",
    validation = Rule::new("size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')")
        .message("a DatasetLoad's name must be a DNS label of at most 40 characters"),
    printcolumn(name = "Dataset", type_ = "string", json_path = ".spec.datasetRef.name"),
    printcolumn(name = "Policy", type_ = "string", json_path = ".spec.policy"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Percent", type_ = "integer", json_path = ".status.progress.percent"),
    printcolumn(name = "Rate", type_ = "integer", json_path = ".status.progress.rateBytesPerSecond"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.from.datasetRef) || self.from.datasetRef.name != self.datasetRef.name")
        .message("from.datasetRef and datasetRef must name different Datasets"),
    validation = Rule::new("self == oldSelf")
        .message("a DatasetLoad cannot change after creation; create a new one")
)]
pub struct DatasetLoadSpec {
    /// The Dataset to fill; its source must be a StorageCluster.
    pub dataset_ref: LocalRef,
    /// Where the files come from: exactly one member.
    pub from: LoadSource,
    /// When to load: once.
    #[serde(default = "default_policy")]
    #[x_kube(validation = Rule::new("self == 'Once'").message("policy must be Once, the only policy so far"))]
    #[schemars(length(max = 32))]
    pub policy: String,
    /// Files that are copied at the same time.
    #[serde(default = "default_parallelism")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 64").message("parallelism must be between 1 and 64"))]
    pub parallelism: i32,
}

/// Where the files come from: exactly one member.
#[derive(Clone, Debug, Default, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.s3) != has(self.datasetRef)")
        .message("set exactly one of from.s3 and from.datasetRef")
)]
pub struct LoadSource {
    /// An S3 bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// Another Dataset of the same namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dataset_ref: Option<LocalRef>,
}

/// What the operator saw last.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DatasetLoadStatus {
    /// Generation of the spec that this status speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One word for humans: Pending, Running, Complete, Failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Complete, Failed, Progressing.
    #[serde(default)]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// How far the load is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Digest over all files that were copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Files that could not be copied, at most 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<LoadFailure>,
}

/// How far a load is.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Progress {
    /// Files that were copied.
    pub files_done: i64,
    /// Files to copy in all.
    pub files_total: i64,
    /// Bytes that were copied.
    pub bytes_done: i64,
    /// Bytes to copy in all.
    pub bytes_total: i64,
    /// Bytes that were copied, in percent.
    pub percent: i32,
    /// Bytes copied per second, lately.
    pub rate_bytes_per_second: i64,
}

/// A file that could not be copied.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LoadFailure {
    /// Path of the file below the source.
    pub path: String,
    /// Why: one of the reasons that conditions use.
    pub reason: String,
}

fn default_policy() -> String {
    "Once".to_owned()
}

fn default_parallelism() -> i32 {
    4
}
