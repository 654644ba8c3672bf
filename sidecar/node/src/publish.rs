//! Whether a pod may have a Dataset, and what its sidecars are told. Pure.

use crds::DatasetSpec;
use keeper::handover::Volume;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;

use crate::volume::{Credentials, Options, Pod};

/// Why a pod may not have a Dataset, each with what to do.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Denied {
    /// The Secret of another namespace cannot be used.
    #[error(
        "Dataset {namespace}/{dataset} has a Secret, so only pods of namespace {namespace} may use \
         it; create a Dataset and a Secret in namespace {pod_namespace}"
    )]
    SecretOfAnotherNamespace {
        /// The Dataset.
        dataset: String,
        /// Its namespace.
        namespace: String,
        /// The pod's.
        pod_namespace: String,
    },
    /// A Dataset of another namespace cannot be written to.
    #[error("Dataset {0} belongs to another namespace and can only be mounted read-only; use :ro")]
    WriteToAnotherNamespace(String),
    /// The Dataset is read-only.
    #[error("Dataset {0} is read-only; mount it :ro or set spec.readOnly to false")]
    ReadOnly(String),
    /// The Dataset has a Secret that the volume does not name.
    #[error(
        "Dataset {0} has a Secret, but the volume has no nodePublishSecretRef; let the webhook add \
         the volume, or name Secret {1} there"
    )]
    NoSecret(String, String),
    /// The Dataset says nothing about where its files are.
    #[error("Dataset {0} has no source")]
    NoSource(String),
}

/// What is kept of a published volume, with the keeper too.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Version of this record.
    pub version: u32,
    /// Whose volume.
    pub pod: Pod,
    /// Where it is mounted.
    pub target: PathBuf,
    /// What the sidecars are told.
    pub volume: Volume,
}

/// Decides what the sidecars of a pod are told about a volume.
///
/// # Errors
/// See [`Denied`].
pub fn plan(options: &Options, spec: &DatasetSpec) -> Result<Record, Denied> {
    let full_name = format!("{}/{}", options.namespace, options.dataset);
    let foreign = options.namespace != options.pod.namespace;
    if let Some(secret) = spec.source.secret_name() {
        if foreign {
            return Err(Denied::SecretOfAnotherNamespace {
                dataset: options.dataset.clone(),
                namespace: options.namespace.clone(),
                pod_namespace: options.pod.namespace.clone(),
            });
        }
        if options.credentials.is_none() {
            return Err(Denied::NoSecret(full_name, secret.to_owned()));
        }
    }
    if !options.read_only && spec.read_only {
        return Err(Denied::ReadOnly(full_name));
    }
    if !options.read_only && foreign {
        return Err(Denied::WriteToAnotherNamespace(full_name));
    }
    let mut source = spec.source.config(&options.namespace);
    if source.is_null() {
        return Err(Denied::NoSource(full_name));
    }
    if let Some(credentials) = &options.credentials {
        set_credentials(&mut source, credentials);
    }
    let volume = Volume {
        name: options.name.clone(),
        mount_path: options.mount_path.clone(),
        dataset: options.dataset.clone(),
        namespace: options.namespace.clone(),
        read_only: options.read_only,
        format: format!("{:?}", spec.format),
        source,
        uid: options.uid,
        gid: options.gid,
        generation: 0,
        recorded_init: None,
        recorded_reply: None,
        mount_id: 0,
        unkept: true,
        last: false,
    };
    let (pod, target) = (options.pod.clone(), options.target.clone());
    Ok(Record { version: 1, pod, target, volume })
}

/// Puts credentials into a source; whether that changed anything.
pub fn set_credentials(source: &mut Value, credentials: &Credentials) -> bool {
    let Some(s3) = source.get_mut("s3").and_then(Value::as_object_mut) else { return false };
    let mut fresh = json!({
        "accessKeyId": credentials.access_key_id,
        "secretAccessKey": credentials.secret_access_key,
    });
    if let (Some(token), Some(object)) = (&credentials.session_token, fresh.as_object_mut()) {
        object.insert("sessionToken".to_owned(), json!(token));
    }
    let changed = s3.get("credentials") != Some(&fresh);
    s3.insert("credentials".to_owned(), fresh);
    changed
}

/// What a human should do about a typed reason.
#[must_use]
pub fn fix(reason: &str) -> &'static str {
    match reason {
        "InvalidCredentials" => "correct the keys in the Secret that the Dataset names",
        "BucketNotFound" => "create the bucket or correct spec.source.s3.uri",
        "ObjectNotFound" => "put the objects back or correct spec.source.s3.uri",
        "AccessDenied" => "allow these credentials to list and get below the prefix",
        "DatasetChanged" => "reopen the file; do not overwrite objects of a dataset in use",
        "TruncatedFile" | "CorruptFile" => "write the file again",
        "UnknownEncoding" => "write the file with a supported version of Vortex",
        "EndpointUnreachable" => "check spec.source.s3.endpoint and network policies",
        "TlsFailed" => "correct spec.source.s3.caBundle or the server's certificate",
        "StoreUnavailable" => "look at the StorageCluster's conditions",
        _ => "look at the log of the sidecar",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            pod: Pod { namespace: "team".into(), name: "p".into(), uid: "u".into() },
            name: "lampyris-0".into(),
            target: "/t".into(),
            mount_path: Some("/data".into()),
            dataset: "d".into(),
            namespace: "team".into(),
            read_only: true,
            uid: 0,
            gid: 7,
            credentials: None,
        }
    }

    fn spec(source: &Value, read_only: bool) -> DatasetSpec {
        serde_json::from_value(json!({"format": "Vortex", "source": source, "readOnly": read_only}))
            .unwrap()
    }

    fn s3() -> Value {
        json!({"s3": {"uri": "s3://b/p", "secretRef": {"name": "keys"}}})
    }

    fn cluster() -> Value {
        json!({"cluster": {"ref": {"name": "train", "namespace": "storage"}, "path": "/d"}})
    }

    fn keys() -> Credentials {
        Credentials {
            access_key_id: "a".into(),
            secret_access_key: "s".into(),
            session_token: None,
        }
    }

    #[test]
    fn credentials_reach_the_source_and_only_there() {
        let options = Options { credentials: Some(keys()), ..options() };
        let record = plan(&options, &spec(&s3(), true)).unwrap();
        assert_eq!(
            record.volume.source["s3"]["credentials"],
            json!({"accessKeyId": "a", "secretAccessKey": "s"})
        );
        assert_eq!((record.volume.format.as_str(), record.volume.gid), ("Vortex", 7));
        assert!(!format!("{record:?}").contains("secretAccessKey"));
        let back: Record = serde_json::from_value(serde_json::to_value(&record).unwrap()).unwrap();
        assert_eq!(back, record);
    }

    #[test]
    fn a_dataset_with_a_secret_stays_in_its_namespace() {
        let mut options = Options { credentials: Some(keys()), ..options() };
        options.namespace = "other".into();
        let denied = plan(&options, &spec(&s3(), true)).unwrap_err();
        assert!(matches!(denied, Denied::SecretOfAnotherNamespace { .. }), "{denied}");
        options.namespace = "team".into();
        options.credentials = None;
        let denied = plan(&options, &spec(&s3(), true)).unwrap_err();
        assert_eq!(denied, Denied::NoSecret("team/d".into(), "keys".into()));
    }

    #[test]
    fn writing_needs_a_writable_dataset_of_the_same_namespace() {
        let mut options = Options { read_only: false, ..options() };
        assert!(!plan(&options, &spec(&cluster(), false)).unwrap().volume.read_only);
        let denied = plan(&options, &spec(&cluster(), true)).unwrap_err();
        assert_eq!(denied, Denied::ReadOnly("team/d".into()));
        options.namespace = "other".into();
        let denied = plan(&options, &spec(&cluster(), false)).unwrap_err();
        assert_eq!(denied, Denied::WriteToAnotherNamespace("other/d".into()));
        options.read_only = true;
        let record = plan(&options, &spec(&cluster(), false)).unwrap();
        assert_eq!(
            record.volume.source,
            json!({"cluster": {"manager": "train-meta.storage.svc:9000", "path": "/d"}})
        );
    }

    #[test]
    fn only_different_credentials_count_as_a_change() {
        let mut source = json!({"s3": {"credentials": null}});
        assert!(set_credentials(&mut source, &keys()));
        assert!(!set_credentials(&mut source, &keys()));
        let renewed = Credentials { session_token: Some("t".into()), ..keys() };
        assert!(set_credentials(&mut source, &renewed));
        assert!(!set_credentials(&mut cluster(), &keys()));
    }
}
