//! `Dataset`: what a pod can mount, read by ring or scan. Written by a user.

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cluster::manager_address;
use crate::shared::{LocalRef, ObjectRef, conditions};

/// A set of files in an object store or in a StorageCluster.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, KubeSchema)]
#[kube(
    group = "lampyris.dev",
    version = "v1alpha1",
    kind = "Dataset",
    namespaced,
    status = "DatasetStatus",
    shortname = "fds",
    category = "lampyris",
    validation = Rule::new("size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')")
        .message("a Dataset's name must be a DNS label of at most 40 characters"),
    printcolumn(name = "Format", type_ = "string", json_path = ".spec.format"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Files", type_ = "integer", json_path = ".status.files"),
    printcolumn(name = "Rows", type_ = "integer", json_path = ".status.rows"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.usedBy.pods"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Bytes", type_ = "integer", priority = 1, json_path = ".status.bytes"),
    printcolumn(name = "Revision", type_ = "string", priority = 1, json_path = ".status.revision")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.readOnly || has(self.source.cluster)")
        .message("readOnly: false needs source.cluster: datasets in S3 are read-only"),
    validation = Rule::new("self.format == oldSelf.format")
        .message("format cannot change after creation; create a new Dataset"),
    validation = Rule::new("has(self.source.s3) == has(oldSelf.source.s3)")
        .message("source cannot move between s3 and cluster; create a new Dataset")
)]
pub struct DatasetSpec {
    /// How the files are read.
    pub format: Format,
    /// Where the files are: exactly one member.
    pub source: Source,
    /// Whether pods may only read. Writing needs `source.cluster`.
    #[serde(default = "default_true")]
    pub read_only: bool,
    /// How often the operator looks at the source again, such as 10m; never when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self.matches('^([0-9]+(s|m|h))+$') && duration(self) >= duration('30s') && duration(self) <= duration('168h')")
        .message("refreshInterval must be a duration such as 10m, from 30s to 168h"))]
    #[schemars(length(min = 1, max = 32))]
    pub refresh_interval: Option<String>,
}

/// How the files are read.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
pub enum Format {
    /// Vortex files: can also be scanned.
    Vortex,
    /// Bytes.
    Files,
}

/// Where the files are: exactly one member.
#[derive(Clone, Debug, Default, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.s3) != has(self.cluster)")
        .message("set exactly one of source.s3 and source.cluster")
)]
pub struct Source {
    /// An S3 bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// A directory of a StorageCluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterSource>,
}

/// Objects below a prefix of an S3 bucket.
#[derive(Clone, Debug, Default, Deserialize, Serialize, KubeSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.caBundle) || !has(self.endpoint) || self.endpoint.startsWith('https://')")
        .message("s3.caBundle needs an https endpoint")
)]
pub struct S3Source {
    /// `s3://bucket[/prefix]`.
    #[x_kube(validation = Rule::new("self.matches('^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?$')")
        .message("s3.uri must be s3://bucket or s3://bucket/prefix"))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("s3.uri cannot change after creation; create a new Dataset"))]
    #[schemars(length(max = 1024))]
    pub uri: String,
    /// URL of the server; Amazon's for the region when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHost() != '' && !self.contains('@')")
        .message("s3.endpoint must be an http or https URL such as https://s3.example.com"))]
    #[schemars(length(min = 1, max = 512))]
    pub endpoint: Option<String>,
    /// Region that requests are signed for.
    #[serde(default = "default_region")]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9-]+$')").message("s3.region must be lower-case letters, digits and hyphens"))]
    #[schemars(length(min = 1, max = 64))]
    pub region: String,
    /// Whether the bucket is named in the path rather than in the host.
    #[serde(default)]
    pub path_style: bool,
    /// Certificates to trust besides the well-known ones: PEM, base64-encoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self.startsWith('LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0t') && size(self) % 4 == 0 && self.matches('^[A-Za-z0-9+/]+={0,2}$')")
        .message("s3.caBundle must be base64 of a PEM that starts with -----BEGIN CERTIFICATE-----"))]
    #[schemars(with = "String", length(max = 65_536))]
    pub ca_bundle: Option<ByteString>,
    /// Secret in the Dataset's namespace with accessKeyId, secretAccessKey and perhaps
    /// sessionToken; unsigned requests when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalRef>,
}

/// A directory of a StorageCluster.
#[derive(Clone, Debug, Default, Deserialize, Serialize, KubeSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("source.cluster cannot change after creation; create a new Dataset"))]
pub struct ClusterSource {
    /// The StorageCluster.
    #[serde(rename = "ref")]
    pub cluster_ref: ObjectRef,
    /// Absolute path of the directory.
    #[x_kube(validation = Rule::new("self.matches('^(/[^/]+)+$') && !self.split('/').exists(p, p == '.' || p == '..')")
        .message("cluster.path must be an absolute path without ., .. or empty parts, such as /datasets/imagenet"))]
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
}

/// What the operator saw last.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DatasetStatus {
    /// Generation of the spec that this status speaks about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One word for humans: Pending, Ready, Failed, Terminating.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Ready, Accessible, DeletionBlocked.
    #[serde(default)]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// Number of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<i64>,
    /// Number of rows; of Vortex files only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<i64>,
    /// Bytes of all files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
    /// Number of columns; of Vortex files only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub columns: Option<i64>,
    /// Digest of the columns' names and types.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema_digest: Option<String>,
    /// Digest of the files' names, sizes and versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Pods that use the Dataset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_by: Option<UsedBy>,
    /// The last look at the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inspection: Option<Inspection>,
}

/// Pods that use a Dataset.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct UsedBy {
    /// How many.
    pub pods: i32,
    /// Some of them, as `namespace/name`.
    #[serde(default)]
    pub sample: Vec<String>,
}

/// The last look at the source.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Inspection {
    /// Counts the looks, so that each has a Job of its own.
    pub attempt: i64,
    /// Generation of the spec that was looked at.
    pub generation: i64,
    /// When it ended (RFC 3339); still running when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<String>,
}

fn default_true() -> bool {
    true
}

fn default_region() -> String {
    "us-east-1".to_owned()
}

impl Source {
    /// The configuration that the data-path processes take for this source, without credentials.
    /// `namespace` is the one of the object that holds the source.
    #[must_use]
    pub fn config(&self, namespace: &str) -> Value {
        match (&self.s3, &self.cluster) {
            (Some(s3), _) => json!({"s3": s3.config()}),
            (None, Some(cluster)) => {
                let home = cluster.cluster_ref.namespace.as_deref().unwrap_or(namespace);
                let manager = manager_address(&cluster.cluster_ref.name, home);
                json!({"cluster": {"manager": manager, "path": cluster.path}})
            }
            (None, None) => Value::Null,
        }
    }

    /// Name of the Secret with the credentials, if there is one.
    #[must_use]
    pub fn secret_name(&self) -> Option<&str> {
        Some(self.s3.as_ref()?.secret_ref.as_ref()?.name.as_str())
    }
}

impl S3Source {
    fn config(&self) -> Value {
        let amazon = || format!("https://s3.{}.amazonaws.com", self.region);
        let bundle =
            self.ca_bundle.as_ref().map(|pem| String::from_utf8_lossy(&pem.0).into_owned());
        json!({
            "uri": self.uri,
            "endpoint": self.endpoint.clone().unwrap_or_else(amazon),
            "region": self.region,
            "pathStyle": self.path_style,
            "caBundle": bundle,
            "credentials": null,
        })
    }
}
