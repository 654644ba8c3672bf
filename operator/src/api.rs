//! Where each kind lives in the API. Plans name kinds; this is the only table that knows their
//! paths, and so also the list of everything that the operator can touch.

use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde_json::Value;
use thiserror::Error;

/// A request that could not be made.
#[derive(Debug, Error)]
pub enum ApiError {
    /// Plans do not touch this kind.
    #[error("kind {0} is not one that the operator handles")]
    UnknownKind(String),
    /// The API server refused, or was not reached.
    #[error("{action}")]
    Request {
        /// What was being done.
        action: String,
        /// Why it failed.
        #[source]
        source: Box<kube::Error>,
    },
    /// An object has no JSON form.
    #[error("decode {what}")]
    Decode {
        /// The object.
        what: String,
        /// Why it failed.
        #[source]
        source: serde_json::Error,
    },
}

impl ApiError {
    /// Wraps `source` with what was being done.
    pub fn request(action: impl Into<String>, source: kube::Error) -> Self {
        Self::Request { action: action.into(), source: Box::new(source) }
    }

    /// Whether the API server refused because someone else had changed the object meanwhile.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        let Self::Request { source, .. } = self else { return false };
        matches!(&**source, kube::Error::Api(status) if status.is_conflict())
    }
}

/// `(kind, group, version, plural)`.
const KINDS: [(&str, &str, &str, &str); 11] = [
    ("StatefulSet", "apps", "v1", "statefulsets"),
    ("Service", "", "v1", "services"),
    ("Pod", "", "v1", "pods"),
    ("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    ("Job", "batch", "v1", "jobs"),
    ("StorageCluster", crds::names::GROUP, "v1alpha1", "storageclusters"),
    ("StorageNode", crds::names::GROUP, "v1alpha1", "storagenodes"),
    ("ChainTable", crds::names::GROUP, "v1alpha1", "chaintables"),
    ("Dataset", crds::names::GROUP, "v1alpha1", "datasets"),
    ("DatasetLoad", crds::names::GROUP, "v1alpha1", "datasetloads"),
    ("Node", "", "v1", "nodes"),
];

fn resource(kind: &str) -> Result<ApiResource, ApiError> {
    let row = KINDS.iter().find(|row| row.0 == kind);
    let (kind, group, version, plural) =
        row.ok_or_else(|| ApiError::UnknownKind(kind.to_owned()))?;
    let api_version =
        if group.is_empty() { (*version).to_owned() } else { format!("{group}/{version}") };
    Ok(ApiResource {
        group: (*group).to_owned(),
        version: (*version).to_owned(),
        api_version,
        kind: (*kind).to_owned(),
        plural: (*plural).to_owned(),
    })
}

/// Objects of `kind` in `namespace`.
pub fn namespaced(
    client: &Client,
    kind: &str,
    namespace: &str,
) -> Result<Api<DynamicObject>, ApiError> {
    Ok(Api::namespaced_with(client.clone(), namespace, &resource(kind)?))
}

/// Objects of the cluster-scoped `kind`, or of a namespaced kind in all namespaces, to list.
pub fn cluster_wide(client: &Client, kind: &str) -> Result<Api<DynamicObject>, ApiError> {
    Ok(Api::all_with(client.clone(), &resource(kind)?))
}

/// The object as JSON, with the kind that a list leaves out.
pub fn to_value(kind: &str, object: &DynamicObject) -> Result<Value, ApiError> {
    let mut value = serde_json::to_value(object)
        .map_err(|source| ApiError::Decode { what: kind.to_owned(), source })?;
    let row = resource(kind)?;
    value["kind"] = Value::String(row.kind);
    value["apiVersion"] = Value::String(row.api_version);
    Ok(value)
}
