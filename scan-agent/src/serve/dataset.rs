//! The datasets of this pod: where each one's bytes come from, and how it is doing.
//!
//! A dataset arrives from the node plugin (or a flag, outside Kubernetes) and stays until it is
//! replaced. Its health is what the last use or probe said; every change of it is told to the
//! node plugin, which tells the user.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use source::{Credentials, Failure, Object, Reason, Source, SourceConfig};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::bridge::{File, FooterCache};

/// Health changes waiting for the node plugin; more than one a dataset is rare.
const STATUS_QUEUE: usize = 256;
/// Files that a probe opens: enough to see a truncated upload, little enough for every ten seconds.
const PROBE_FILES: usize = 8;

/// One dataset.
#[derive(Debug)]
pub struct Dataset {
    /// Name of the Dataset.
    pub name: String,
    /// Name of the pod's volume.
    pub volume: String,
    /// Where the pod has it mounted.
    pub mount_path: Option<String>,
    /// Its bytes.
    pub source: Arc<dyn Source>,
    /// Footers seen.
    pub footers: FooterCache,
    config: Option<SourceConfig>,
    failure: Mutex<Option<Failure>>,
    was_due: AtomicBool,
}

/// A dataset's health after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The pod's volume.
    pub volume: String,
    /// None is good.
    pub failure: Option<Failure>,
}

/// All datasets of the pod.
#[derive(Debug)]
pub struct Datasets {
    by_volume: Mutex<BTreeMap<String, Arc<Dataset>>>,
    changes: mpsc::Sender<Status>,
}

impl Datasets {
    /// No datasets yet, and where changes of health come out.
    pub fn new() -> (Arc<Self>, mpsc::Receiver<Status>) {
        let (changes, receiver) = mpsc::channel(STATUS_QUEUE);
        let datasets = Self { by_volume: Mutex::default(), changes };
        (Arc::new(datasets), receiver)
    }

    /// Adds or replaces the dataset of a volume. With the same source but for credentials, scans
    /// that run go on with the new ones.
    pub fn put(&self, volume: &str, name: &str, mount_path: Option<String>, config: SourceConfig) {
        let mut all = self.by_volume.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(volume).filter(|known| known.is_same_place(&config)) {
            if let (Some(SourceConfig::S3(_)), SourceConfig::S3(s3)) = (&known.config, config) {
                s3.credentials.into_iter().for_each(|keys| known.source.set_credentials(keys));
            }
            return;
        }
        match source::open(&config) {
            Ok(source) => {
                let dataset = Dataset::new(volume, name, mount_path, source, Some(config));
                all.insert(volume.to_owned(), Arc::new(dataset));
            }
            Err(failure) => {
                tracing::warn!(volume, %failure, "cannot open dataset");
                self.tell(Status { volume: volume.to_owned(), failure: Some(failure) });
            }
        }
    }

    /// Adds a dataset whose source is open already.
    pub fn put_source(&self, name: &str, source: Arc<dyn Source>) {
        let mut all = self.by_volume.lock().unwrap_or_else(PoisonError::into_inner);
        let dataset = Dataset::new(name, name, None, source, None);
        all.insert(name.to_owned(), Arc::new(dataset));
    }

    /// Replaces the credentials of a volume's source.
    pub fn set_credentials(&self, volume: &str, credentials: Credentials) {
        match self.find(volume) {
            Some(dataset) => dataset.source.set_credentials(credentials),
            None => tracing::warn!(volume, "credentials for a volume that is not here"),
        }
    }

    /// By name, volume or mount path.
    pub fn find(&self, wanted: &str) -> Option<Arc<Dataset>> {
        let all = self.all();
        let path = wanted.trim_end_matches('/');
        all.iter()
            .find(|d| d.name == wanted || d.volume == wanted)
            .or_else(|| all.iter().find(|d| d.mount_path.as_deref() == Some(path)))
            .map(Arc::clone)
    }

    /// Every dataset, by volume.
    pub fn all(&self) -> Vec<Arc<Dataset>> {
        let all = self.by_volume.lock().unwrap_or_else(PoisonError::into_inner);
        all.values().map(Arc::clone).collect()
    }

    /// Those to look at now: each once, and `again` those that fail.
    pub fn due(&self, again: bool) -> Vec<Arc<Dataset>> {
        let mut all = self.all();
        all.retain(|dataset| {
            let is_new = !dataset.was_due.swap(true, Ordering::Relaxed);
            is_new || (again && dataset.failure().is_some())
        });
        all
    }

    /// Records how a use of the dataset ended; a change is told.
    pub fn report(&self, dataset: &Dataset, failure: Option<&Failure>) {
        let mut known = dataset.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref().map(|f| f.reason) == failure.map(|f| f.reason) {
            return;
        }
        *known = failure.cloned();
        self.tell(Status { volume: dataset.volume.clone(), failure: failure.cloned() });
    }

    fn tell(&self, status: Status) {
        if self.changes.try_send(status).is_err() {
            tracing::warn!("health change lost: the node plugin does not read");
        }
    }

    /// Looks at a dataset as a scan would and records what it found. Blocks.
    pub fn probe(&self, dataset: &Dataset, io: &Handle) {
        let found = dataset.objects(io).and_then(|objects| {
            let opened = objects.iter().take(PROBE_FILES);
            opened
                .map(|o| File::open(&dataset.source, o, io, &dataset.footers))
                .try_for_each(drop_ok)
        });
        self.report(dataset, found.err().as_ref());
    }
}

fn drop_ok(opened: Result<File, Failure>) -> Result<(), Failure> {
    opened.map(drop)
}

impl Dataset {
    fn new(
        volume: &str,
        name: &str,
        mount_path: Option<String>,
        source: Arc<dyn Source>,
        config: Option<SourceConfig>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            volume: volume.to_owned(),
            mount_path,
            source,
            footers: FooterCache::default(),
            config,
            failure: Mutex::default(),
            was_due: AtomicBool::new(false),
        }
    }

    /// The dataset's Vortex files, as they are now. Blocks.
    pub fn objects(&self, io: &Handle) -> Result<Vec<Object>, Failure> {
        vortex_objects(self.source.as_ref(), io)
    }

    /// What is wrong with it, if something is.
    pub fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn is_same_place(&self, config: &SourceConfig) -> bool {
        match (&self.config, config) {
            (Some(SourceConfig::S3(old)), SourceConfig::S3(new)) => {
                let mut old = old.clone();
                let was_signed = old.credentials.is_some();
                old.credentials.clone_from(&new.credentials);
                was_signed == new.credentials.is_some() && old == *new
            }
            (Some(old), new) => old == new,
            (None, _) => false,
        }
    }
}

/// The failure of a dataset whose first file says of a column that it has no nulls, and another
/// file has some: a client was told what the first file says.
pub fn unannounced_nulls(column: &str, path: &str, first: &str) -> Failure {
    let message = format!(
        "column {column} has nulls in {path} and is not nullable in {first}, the first file; \
         write it as nullable in both"
    );
    Failure::new(Reason::CorruptFile, message)
}

/// Files of a Vortex dataset: those that end in `.vortex`. Blocks.
pub fn vortex_objects(source: &dyn Source, io: &Handle) -> Result<Vec<Object>, Failure> {
    let mut objects = io.block_on(source.list())?;
    objects.retain(|object| object.path.ends_with(".vortex"));
    if objects.is_empty() {
        let message = format!("no .vortex file at {}", source.describe());
        return Err(Failure::new(Reason::ObjectNotFound, message));
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use source::DirSource;

    #[test]
    fn every_dataset_that_replaces_another_is_due_once() {
        let (datasets, _changes) = Datasets::new();
        for nth in 0..100 {
            // Where the last but one was in memory, very likely.
            datasets.put_source("made", Arc::new(DirSource::new("/nonexistent")));
            assert_eq!(datasets.due(false).len(), 1, "the {nth}th");
            assert_eq!((datasets.due(false).len(), datasets.due(true).len()), (0, 0));
        }
        let dataset = datasets.find("made").unwrap();
        datasets.report(&dataset, Some(&Failure::new(Reason::AccessDenied, "list")));
        assert_eq!((datasets.due(false).len(), datasets.due(true).len()), (0, 1));
    }
}
