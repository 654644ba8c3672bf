//! What kubelet asks for, checked and typed. No IO.
//!
//! Everything in a publish request comes from whoever wrote the pod: paths and names are used only
//! after they have exactly the form that kubelet gives them.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use crate::csi::{NodePublish, NodeUnpublish};

/// Directory, below a pod's directory, of its CSI volumes.
const CSI_DIR: &str = "volumes/kubernetes.io~csi";
/// Directory, below a pod's directory, of the emptyDir that only our sidecars mount.
const PRIVATE_DIR: &str = "volumes/kubernetes.io~empty-dir/lampyris-private";
/// Longest message in one read or write of the mount.
pub const MAX_READ_BYTES: u32 = 1 << 20;

/// Why a request is refused as it stands.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum VolumeError {
    /// A required field is empty.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// Raw block access was asked for.
    #[error("Lampyris volumes are file systems: block access is not possible")]
    Block,
    /// The volume is not an inline one.
    #[error("only inline volumes are served: put `csi: {{driver: csi.lampyris.dev}}` in the pod")]
    NotInline,
    /// The path is not one that kubelet gives to an inline volume of this pod.
    #[error("target path {0} is not a CSI volume of the pod below the kubelet directory")]
    BadTarget(String),
    /// An attribute has a bad value.
    #[error("attribute {0}: {1:?} is not valid")]
    BadAttribute(&'static str, String),
}

/// The identity of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// S3 credentials from the publish secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Access key id.
    pub access_key_id: String,
    /// Secret access key.
    pub secret_access_key: String,
    /// Session token of temporary credentials.
    pub session_token: Option<String>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(..)")
    }
}

/// A checked publish request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Whose volume.
    pub pod: Pod,
    /// Name of the volume in the pod.
    pub name: String,
    /// Where it has to appear.
    pub target: PathBuf,
    /// Where the application sees it, when the volume says so: the ring finds files by it.
    pub mount_path: Option<String>,
    /// Name of the Dataset.
    pub dataset: String,
    /// Namespace of the Dataset.
    pub namespace: String,
    /// Whether the pod wants it read-only.
    pub read_only: bool,
    /// Owner shown for files.
    pub uid: u32,
    /// Group shown for files: the pod's fsGroup, else the attribute.
    pub gid: u32,
    /// Credentials, when the volume names a Secret.
    pub credentials: Option<Credentials>,
}

impl Options {
    /// Checks a publish request of a kubelet whose directory is `kubelet_dir`.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub fn parse(request: &NodePublish, kubelet_dir: &Path) -> Result<Self, VolumeError> {
        required(&request.volume_id, "volume id")?;
        required(&request.target_path, "target path")?;
        let capability =
            request.volume_capability.as_ref().ok_or(VolumeError::Missing("volume capability"))?;
        if capability.block.is_some() {
            return Err(VolumeError::Block);
        }
        let mount = capability.mount.as_ref().ok_or(VolumeError::Missing("access type"))?;
        let context = &request.volume_context;
        if attribute(context, "csi.storage.k8s.io/ephemeral") != Some("true") {
            return Err(VolumeError::NotInline);
        }
        let pod = pod_of(context)?;
        let (uid, name) = split_target(Path::new(&request.target_path), kubelet_dir)
            .filter(|(uid, _)| *uid == pod.uid)
            .ok_or_else(|| VolumeError::BadTarget(request.target_path.clone()))?;
        debug_assert_eq!(uid, pod.uid);
        let dataset = attribute(context, "dataset").ok_or(VolumeError::Missing("dataset"))?;
        let namespace = attribute(context, "namespace").unwrap_or(&pod.namespace);
        Ok(Self {
            name,
            target: PathBuf::from(&request.target_path),
            mount_path: mount_path(context)?,
            dataset: object_name("dataset", dataset)?,
            namespace: object_name("namespace", namespace)?,
            read_only: request.readonly,
            uid: number("uid", context.get("uid"))?.unwrap_or(0),
            gid: match number("fsGroup", Some(&mount.volume_mount_group))? {
                Some(gid) => gid,
                None => number("gid", context.get("gid"))?.unwrap_or(0),
            },
            credentials: credentials_of(&request.secrets)?,
            pod,
        })
    }

    /// Key of the volume with the keeper.
    #[must_use]
    pub fn key(&self) -> String {
        key(&self.pod.uid, &self.name)
    }
}

/// Key of a volume with the keeper.
#[must_use]
pub fn key(pod_uid: &str, volume: &str) -> String {
    format!("{pod_uid}/{volume}")
}

/// Checks an unpublish request: pod uid and volume name, when the path is one of ours.
///
/// # Errors
/// [`VolumeError::Missing`] for an empty field.
pub fn parse_unpublish(
    request: &NodeUnpublish,
    kubelet_dir: &Path,
) -> Result<Option<(String, String)>, VolumeError> {
    required(&request.volume_id, "volume id")?;
    required(&request.target_path, "target path")?;
    Ok(split_target(Path::new(&request.target_path), kubelet_dir))
}

/// Pod uid and volume name of a target path; `None` when it has another form.
#[must_use]
pub fn split_target(target: &Path, kubelet_dir: &Path) -> Option<(String, String)> {
    let below = target.strip_prefix(kubelet_dir.join("pods")).ok()?;
    let mut parts = below.components().map(|part| match part {
        Component::Normal(part) => part.to_str(),
        _ => None,
    });
    let mut next = || parts.next().flatten();
    let uid = next()?.to_owned();
    for expected in CSI_DIR.split('/') {
        if next()? != expected {
            return None;
        }
    }
    let name = next()?.to_owned();
    (next()? == "mount" && parts.next().is_none()).then_some((uid, name))
}

/// The private directory of a pod, where its sockets are.
#[must_use]
pub fn private_dir(kubelet_dir: &Path, pod_uid: &str) -> PathBuf {
    kubelet_dir.join("pods").join(pod_uid).join(PRIVATE_DIR)
}

/// Data of the mount call for a FUSE connection.
#[must_use]
pub fn mount_data(descriptor: i32) -> String {
    format!(
        "fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,\
         max_read={MAX_READ_BYTES}"
    )
}

fn required(value: &str, what: &'static str) -> Result<(), VolumeError> {
    if value.is_empty() { Err(VolumeError::Missing(what)) } else { Ok(()) }
}

fn attribute<'a>(context: &'a HashMap<String, String>, name: &str) -> Option<&'a str> {
    context.get(name).map(String::as_str).filter(|value| !value.is_empty())
}

fn pod_of(context: &HashMap<String, String>) -> Result<Pod, VolumeError> {
    let get = |key, what: &'static str| attribute(context, key).ok_or(VolumeError::Missing(what));
    let uid = get("csi.storage.k8s.io/pod.uid", "pod uid (CSIDriver.podInfoOnMount)")?;
    Ok(Pod {
        namespace: object_name(
            "pod namespace",
            get("csi.storage.k8s.io/pod.namespace", "pod namespace")?,
        )?,
        name: object_name("pod name", get("csi.storage.k8s.io/pod.name", "pod name")?)?,
        uid: object_name("pod uid", uid)?,
    })
}

/// A name as Kubernetes allows it: it can be part of a path and of a URL.
fn object_name(what: &'static str, value: &str) -> Result<String, VolumeError> {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let valid = value.len() <= 253
        && value.chars().all(good)
        && ends(value.chars().next())
        && ends(value.chars().next_back());
    if valid {
        Ok(value.to_owned())
    } else {
        Err(VolumeError::BadAttribute(what, value.chars().take(100).collect()))
    }
}

fn mount_path(context: &HashMap<String, String>) -> Result<Option<String>, VolumeError> {
    let Some(path) = attribute(context, "mountPath") else { return Ok(None) };
    if path.starts_with('/') && path.len() < 4096 && !path.contains('\0') {
        return Ok(Some(path.to_owned()));
    }
    Err(VolumeError::BadAttribute("mountPath", path.chars().take(100).collect()))
}

fn number(what: &'static str, value: Option<&String>) -> Result<Option<u32>, VolumeError> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    value.parse().map(Some).map_err(|_| VolumeError::BadAttribute(what, value.clone()))
}

fn credentials_of(secrets: &HashMap<String, String>) -> Result<Option<Credentials>, VolumeError> {
    if secrets.is_empty() {
        return Ok(None);
    }
    // Secrets are often made from files: a trailing newline is never part of a key.
    let get = |key| secrets.get(key).map(|value| value.trim().to_owned()).filter(|v| !v.is_empty());
    Ok(Some(Credentials {
        access_key_id: get("accessKeyId")
            .ok_or(VolumeError::Missing("accessKeyId in the Secret"))?,
        secret_access_key: get("secretAccessKey")
            .ok_or(VolumeError::Missing("secretAccessKey in the Secret"))?,
        session_token: get("sessionToken"),
    }))
}

#[cfg(test)]
mod tests;
