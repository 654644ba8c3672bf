//! Data, Datasets and training pods, through the scripts `data`, `s3` and `training` that the demo uses.

use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use crate::command::{repository, run};
use crate::{kube, site};

/// Namespace of the Datasets and of the pods that read them; it enforces PSS *restricted*.
pub const TRAIN: &str = "train";
/// A typed failure is out within this, and a bucket or an object that was put right is seen within it.
pub const TOLD_WITHIN: Duration = Duration::from_secs(30);
/// A Secret that was put right is seen within this: kubelet hands it on at its own pace.
pub const SECRET_WITHIN: Duration = Duration::from_secs(150);

/// A data set of the cache.
#[derive(Debug)]
pub struct DataSet {
    /// Its name, and that of the Dataset on S3.
    pub name: &'static str,
    /// The folder of its files.
    pub folder: String,
    /// What was written down when it was made: `rows`, `digest`, `files`.
    pub digests: Value,
}

impl DataSet {
    /// `NAME=FOLDER`, as `training job` wants it, for the Dataset `name` + `suffix`.
    #[must_use]
    pub fn pair(&self, suffix: &str) -> String {
        format!("{}{suffix}={}", self.name, self.folder)
    }

    /// Bytes of all its files.
    #[must_use]
    pub fn bytes(&self) -> i64 {
        self.digests["files"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|f| f["bytes"].as_i64())
            .sum()
    }
}

/// The data sets on S3, each with its Datasets and its load: made at the first call.
///
/// # Errors
/// When one of them cannot be made.
pub fn data_sets() -> Result<&'static [DataSet]> {
    static SETS: OnceLock<Result<Vec<DataSet>, String>> = OnceLock::new();
    let sets = SETS.get_or_init(|| prepare().map_err(|e| format!("{e:#}")));
    sets.as_deref().map_err(|e| anyhow!("{e}"))
}

fn prepare() -> Result<Vec<DataSet>> {
    site::site()?;
    training(&["up"])?;
    let mut sets = Vec::new();
    for name in ["flights", "flights-ours", "made", "made-big", "made-big-ours"] {
        let folder = script("data", &[name])?.trim().to_owned();
        let text = std::fs::read_to_string(format!("{folder}/digests.json"))
            .with_context(|| format!("read the digests of {name}"))?;
        let digests = serde_json::from_str(&text).with_context(|| format!("digests of {name}"))?;
        training(&["datasets", name, &folder])?;
        sets.push(DataSet { name, folder, digests });
    }
    Ok(sets)
}

/// `training ARGS...`: what it printed.
///
/// # Errors
/// When it fails.
pub fn training(args: &[&str]) -> Result<String> {
    script("training", args)
}

/// `s3 ARGS...`: what it printed.
///
/// # Errors
/// When it fails.
pub fn s3(args: &[&str]) -> Result<String> {
    script("s3", args)
}

fn script(name: &str, args: &[&str]) -> Result<String> {
    run(Command::new(repository().join("kind-e2e").join(name)).args(args))
}

/// A Dataset that is made to fail, and the pod of the same name that reads it; dropping it deletes both.
#[derive(Debug)]
pub struct Trial {
    name: &'static str,
}

impl Trial {
    /// Removes what an earlier run has left of both.
    ///
    /// # Errors
    /// When they cannot be removed.
    pub fn begin(name: &'static str) -> Result<Self> {
        for kind in ["pod", "dataset"] {
            kube::delete(TRAIN, kind, name)?;
        }
        Ok(Self { name })
    }

    /// The name of both.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        for kind in ["pod", "dataset"] {
            if let Err(error) = kube::abandon(TRAIN, kind, self.name) {
                eprintln!("{kind} {} stays: {error:#}", self.name);
            }
        }
    }
}

/// Succeeds when the condition has this status and reason.
///
/// # Errors
/// When it has not.
pub fn has_reason(dataset: &str, status: &str, reason: &str) -> Result<()> {
    let object = kube::get(TRAIN, "datasets.lampyris.dev", dataset)?;
    let (is, why) = kube::condition(&object, "Accessible")?;
    ensure!(is == status && why.starts_with(&format!("{reason}: ")), "Accessible is {is}: {why}");
    Ok(())
}

/// Restarts of all containers of a pod.
///
/// # Errors
/// When the pod cannot be read.
pub fn restarts(pod: &str) -> Result<i64> {
    let pod = kube::get(TRAIN, "pod", pod)?;
    let lists = ["initContainerStatuses", "containerStatuses"];
    let all = lists.iter().flat_map(|list| pod["status"][list].as_array().into_iter().flatten());
    Ok(all.filter_map(|status| status["restartCount"].as_i64()).sum())
}
