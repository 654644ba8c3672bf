//! What a pod asks for: its annotations, checked. Every refusal names the field and the fix,
//! because the user sees nothing else.

use crds::names::{
    ANNOTATION_CPU_LIMIT, ANNOTATION_CPU_REQUEST, ANNOTATION_DATASETS, ANNOTATION_INJECTED,
    ANNOTATION_MEMORY_LIMIT, ANNOTATION_MEMORY_REQUEST, ANNOTATION_SCAN,
};
use serde_json::Value;
use thiserror::Error;

use crate::plan::diff::quantity_milli;

/// Most datasets in one pod.
pub const DATASETS_MAX: usize = 16;
/// Folder in every container that belongs to us.
pub const OWN_DIR: &str = "/run/lampyris";

/// Why a pod is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Denial {
    /// Nothing to inject.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}] is missing: name a Dataset such as imagenet:/data, or remove the label lampyris.dev/inject"
    )]
    NoDatasets,
    /// Too much to inject.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}] names {0} datasets: at most {DATASETS_MAX} are possible, use several pods"
    )]
    TooMany(usize),
    /// An entry that cannot be read.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}]: {entry:?} {problem}: write name[@namespace]:/mount[:ro|rw], with commas between"
    )]
    Syntax {
        /// The entry.
        entry: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Two entries in one place.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}]: mount paths {0} and {1} overlap: choose separate paths"
    )]
    Overlap(String, String),
    /// An entry in the place of a volume of the user.
    #[error(
        "spec.{list}[{container}].volumeMounts: {taken} overlaps with the mount path {path} of a dataset: choose another path in metadata.annotations[{ANNOTATION_DATASETS}]"
    )]
    PathTaken {
        /// `containers` or `initContainers`.
        list: &'static str,
        /// Name of the container.
        container: String,
        /// The user's mount path.
        taken: String,
        /// The dataset's mount path.
        path: String,
    },
    /// No such Dataset.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}]: Dataset {0} does not exist: create it first, or correct the name (name@namespace for another namespace)"
    )]
    UnknownDataset(String),
    /// The Dataset is going away.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}]: Dataset {0} is being deleted: use another one, or wait and create it again"
    )]
    DatasetDeleting(String),
    /// A write to what cannot be written.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}]: Dataset {0} is read-only: write :ro, or use a Dataset with source.cluster and readOnly: false"
    )]
    ReadOnly(String),
    /// Credentials that the pod cannot have.
    #[error(
        "metadata.annotations[{ANNOTATION_DATASETS}]: Dataset {dataset} uses a Secret of its own namespace: run the pod in namespace {namespace}, or create a Dataset with that source in the pod's namespace"
    )]
    ForeignSecret {
        /// The Dataset.
        dataset: String,
        /// Its namespace.
        namespace: String,
    },
    /// Scanning what cannot be scanned.
    #[error(
        "metadata.annotations[{ANNOTATION_SCAN}]: none of the pod's datasets has format Vortex: remove the annotation, or name such a Dataset"
    )]
    NothingToScan,
    /// An annotation with a value that is not one.
    #[error("metadata.annotations[{annotation}]: {value:?} is not {wanted}")]
    Value {
        /// The annotation.
        annotation: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// A request above its limit.
    #[error(
        "metadata.annotations[{request}]: {asked} is more than the limit {limit}: lower it, or raise the annotation that ends in -limit"
    )]
    AboveLimit {
        /// The annotation of the request.
        request: &'static str,
        /// Its value.
        asked: String,
        /// The limit.
        limit: String,
    },
    /// A name that is ours.
    #[error("spec.{list}: the name {name} belongs to lampyris: rename it")]
    ReservedName {
        /// `volumes`, `containers` or `initContainers`.
        list: &'static str,
        /// The name.
        name: String,
    },
    /// A copy of an injected pod that now names other datasets.
    #[error(
        "spec.{list}: {name} is of an earlier injection and does not fit metadata.annotations[{ANNOTATION_DATASETS}]: remove every volume, mount and container whose name begins with lampyris-, and metadata.annotations[{ANNOTATION_INJECTED}]"
    )]
    EarlierInjection {
        /// `volumes` or `initContainers`.
        list: &'static str,
        /// Name of the volume or container.
        name: String,
    },
    /// A container that would see what only our sidecars may.
    #[error(
        "spec.{list}[{container}].{field}: the volume {volume} belongs to lampyris: remove the entry"
    )]
    ForeignMount {
        /// `containers`, `initContainers` or `ephemeralContainers`.
        list: &'static str,
        /// Name of the container.
        container: String,
        /// `volumeMounts` or `volumeDevices`.
        field: &'static str,
        /// The volume.
        volume: String,
    },
    /// A pod that cannot have FUSE mounts.
    #[error(
        "spec.os.name is windows: datasets can be mounted on Linux only, remove the label lampyris.dev/inject"
    )]
    Windows,
    /// A pod in a user namespace.
    #[error(
        "spec.hostUsers is false: datasets cannot be mounted into pods with a user namespace yet, remove the field"
    )]
    UserNamespace,
    /// A request that is not about a pod.
    #[error("the request holds no pod")]
    NoPod,
}

/// One entry of the datasets annotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mention {
    /// Name of the Dataset.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Where to mount it.
    pub path: String,
    /// Whether the pod may write.
    pub writable: bool,
}

impl Mention {
    /// `namespace/name`, for messages.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// What the sidecars get, as quantities; `None` takes the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// CPU request and limit.
    pub cpu: (Option<String>, Option<String>),
    /// Memory request and limit.
    pub memory: (Option<String>, Option<String>),
}

/// All that a pod asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Its datasets, in order.
    pub mentions: Vec<Mention>,
    /// Whether it wants the scan agent.
    pub scan: bool,
    /// Sizes of the sidecars.
    pub sizes: Sizes,
}

/// Reads a pod's annotations. `namespace` is the pod's.
pub fn read(pod: &Value, namespace: &str) -> Result<Ask, Denial> {
    if pod["spec"]["os"]["name"] == "windows" {
        return Err(Denial::Windows);
    }
    if pod["spec"]["hostUsers"] == Value::Bool(false) {
        return Err(Denial::UserNamespace);
    }
    let get = |key: &str| pod["metadata"]["annotations"][key].as_str();
    let text = get(ANNOTATION_DATASETS).map(str::trim).filter(|text| !text.is_empty());
    let mentions = mentions(text.ok_or(Denial::NoDatasets)?, namespace)?;
    let scan = match get(ANNOTATION_SCAN) {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            let value = shown(other);
            let wanted = "\"true\" or \"false\"";
            return Err(Denial::Value { annotation: ANNOTATION_SCAN, value, wanted });
        }
    };
    let sizes = Sizes {
        cpu: pair(
            get(ANNOTATION_CPU_REQUEST),
            get(ANNOTATION_CPU_LIMIT),
            ANNOTATION_CPU_REQUEST,
            ANNOTATION_CPU_LIMIT,
        )?,
        memory: pair(
            get(ANNOTATION_MEMORY_REQUEST),
            get(ANNOTATION_MEMORY_LIMIT),
            ANNOTATION_MEMORY_REQUEST,
            ANNOTATION_MEMORY_LIMIT,
        )?,
    };
    Ok(Ask { mentions, scan, sizes })
}

/// Reads the datasets annotation.
pub fn mentions(text: &str, namespace: &str) -> Result<Vec<Mention>, Denial> {
    let entries: Vec<&str> = text.split(',').map(str::trim).collect();
    if entries.len() > DATASETS_MAX {
        return Err(Denial::TooMany(entries.len()));
    }
    let mut list: Vec<Mention> = Vec::new();
    for entry in entries {
        let mention = mention(entry, namespace)?;
        if let Some(other) = list.iter().find(|other| overlap(&other.path, &mention.path)) {
            return Err(Denial::Overlap(other.path.clone(), mention.path));
        }
        list.push(mention);
    }
    Ok(list)
}

fn mention(entry: &str, namespace: &str) -> Result<Mention, Denial> {
    let wrong = |problem| Denial::Syntax { entry: shown(entry), problem };
    let (who, rest) = entry.split_once(':').ok_or_else(|| wrong("has no mount path"))?;
    let (path, mode) = match rest.split_once(':') {
        Some((path, mode)) => (path, mode),
        None => (rest, "ro"),
    };
    let writable = match mode {
        "ro" => false,
        "rw" => true,
        _ => return Err(wrong("ends in something other than ro or rw")),
    };
    let (name, home) = who.split_once('@').unwrap_or((who, namespace));
    if !is_label(name) {
        return Err(wrong("has no valid Dataset name"));
    }
    if !is_label(home) {
        return Err(wrong("has no valid namespace"));
    }
    check_path(path).map_err(wrong)?;
    let (name, namespace) = (name.to_owned(), home.to_owned());
    Ok(Mention { name, namespace, path: path.to_owned(), writable })
}

fn check_path(path: &str) -> Result<(), &'static str> {
    if !path.starts_with('/') {
        return Err("has a mount path that is not absolute");
    }
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    if parts.iter().any(|part| part.is_empty() || *part == "." || *part == "..") {
        return Err("has a mount path with an empty part, . or ..");
    }
    if path.len() > 1024 || path.chars().any(char::is_control) {
        return Err("has a mount path that is too long or has control characters");
    }
    if overlap(path, OWN_DIR) {
        return Err("has a mount path in /run/lampyris, which is ours");
    }
    Ok(())
}

fn is_label(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let ends_well = !text.starts_with('-') && !text.ends_with('-');
    !text.is_empty() && text.len() <= 63 && text.chars().all(fits) && ends_well
}

/// What a message quotes of the user's text.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Whether one path is the other, or inside it.
#[must_use]
pub fn overlap(a: &str, b: &str) -> bool {
    let inside = |inner: &str, outer: &str| {
        inner
            .strip_prefix(outer.trim_end_matches('/'))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    inside(a, b) || inside(b, a)
}

fn pair(
    request: Option<&str>,
    limit: Option<&str>,
    request_key: &'static str,
    limit_key: &'static str,
) -> Result<(Option<String>, Option<String>), Denial> {
    for (annotation, value) in [(request_key, request), (limit_key, limit)] {
        let bad = |text: &&str| quantity_milli(text).is_none_or(|milli| milli <= 0);
        if let Some(value) = value.filter(bad) {
            let value = shown(value);
            let wanted = "a positive quantity such as 500m or 256Mi";
            return Err(Denial::Value { annotation, value, wanted });
        }
    }
    if let (Some(asked), Some(limit)) = (request, limit)
        && quantity_milli(asked) > quantity_milli(limit)
    {
        let (asked, limit) = (asked.to_owned(), limit.to_owned());
        return Err(Denial::AboveLimit { request: request_key, asked, limit });
    }
    Ok((request.map(str::to_owned), limit.map(str::to_owned)))
}
