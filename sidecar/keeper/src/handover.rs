//! The messages on `node.sock`, between the node plugin and the sidecars of one pod.
//!
//! Unknown fields are ignored, so that either side may be the newer one.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Version of this protocol, sent in [`Hello`].
pub const VERSION: u32 = 1;
/// Name of the socket in the pod's private directory.
pub const SOCKET: &str = "node.sock";

/// What a sidecar says to the node plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FromSidecar {
    /// First message of a connection.
    Hello(Hello),
    /// The opening exchange of a mount, once known.
    Init(Init),
    /// How a volume does, at each change.
    Status(Status),
}

/// What the node plugin says to a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FromNode {
    /// One volume of the pod; for the mount sidecar the FUSE descriptor comes with it.
    Volume(Box<Volume>),
    /// Fresh credentials of one volume.
    Credentials(Credentials),
    /// The opening exchange of a mount outlives the node plugin from now on: the kernel may have the answer.
    Kept(Kept),
}

/// Who connects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// Which sidecar it is.
    pub role: Role,
}

/// The two kinds of sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Serves the mounts; receives FUSE descriptors.
    Mount,
    /// The scan agent; receives configuration only.
    Scan,
}

/// One volume as a sidecar needs it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// Name of the pod's volume.
    pub name: String,
    /// Where the application sees it, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_path: Option<String>,
    /// Name of the Dataset.
    pub dataset: String,
    /// Namespace of the Dataset.
    pub namespace: String,
    /// Whether the mount refuses writes.
    pub read_only: bool,
    /// `Vortex` or `Files`.
    pub format: String,
    /// The `SourceConfig` with its credentials. Secret: never logged.
    pub source: Value,
    /// Owner shown for files.
    #[serde(default)]
    pub uid: u32,
    /// Group shown for files.
    #[serde(default)]
    pub gid: u32,
    /// How many times the volume was handed to a mount sidecar, this one included.
    pub generation: u64,
    /// The kernel's INIT request, when an earlier sidecar answered it (base64).
    #[serde(default)]
    pub recorded_init: Option<String>,
    /// The answer given to it (base64); a later sidecar must give the same.
    #[serde(default)]
    pub recorded_reply: Option<String>,
    /// Tells this mount of the volume from an earlier one: another value comes with another FUSE connection.
    #[serde(default)]
    pub mount_id: u64,
    /// Whether the opening exchange would be lost with the node plugin: the kernel may have its answer only after
    /// [`FromNode::Kept`].
    #[serde(default)]
    pub unkept: bool,
    /// Whether this is the last volume of the pod.
    pub last: bool,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume")
            .field("name", &self.name)
            .field("dataset", &self.dataset)
            .field("namespace", &self.namespace)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// The opening exchange of one mount, as bytes on `/dev/fuse`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Init {
    /// Name of the volume.
    pub volume: String,
    /// INIT request (base64).
    pub request: String,
    /// Answer (base64).
    pub reply: String,
    /// Whether the sidecar waits for [`FromNode::Kept`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub confirm: bool,
}

/// An opening exchange that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    /// Name of the volume.
    pub volume: String,
}

/// How one volume does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Name of the volume.
    pub volume: String,
    /// Present and true when the volume is served.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ok: bool,
    /// Typed reason when it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What happened, for a human.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Credentials of an S3 volume.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Credentials {
    /// Name of the volume.
    pub volume: String,
    /// S3 access key id.
    pub access_key_id: String,
    /// S3 secret access key.
    pub secret_access_key: String,
    /// Session token of temporary credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_token: Option<String>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("volume", &self.volume).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_agreed_form() {
        let hello = FromSidecar::Hello(Hello { version: 1, role: Role::Mount });
        assert_eq!(
            serde_json::to_string(&hello).unwrap(),
            r#"{"hello":{"version":1,"role":"mount"}}"#
        );
        let ok: FromSidecar =
            serde_json::from_str(r#"{"status":{"volume":"v","ok":true}}"#).unwrap();
        assert_eq!(
            ok,
            FromSidecar::Status(Status {
                volume: "v".into(),
                ok: true,
                reason: None,
                message: None
            })
        );
        let push: FromNode = serde_json::from_str(
            r#"{"credentials":{"volume":"v","accessKeyId":"a","secretAccessKey":"s","new":1}}"#,
        )
        .unwrap();
        let FromNode::Credentials(credentials) = push else { panic!("{push:?}") };
        assert_eq!(credentials.access_key_id, "a");
    }

    #[test]
    fn debug_output_hides_the_secret() {
        let credentials = Credentials {
            volume: "v".into(),
            access_key_id: "AKIA".into(),
            secret_access_key: "hush".into(),
            session_token: Some("hush".into()),
        };
        assert!(!format!("{credentials:?}").contains("hush"));
    }
}
