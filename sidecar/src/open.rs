//! File systems for volumes: over a dataset's objects, or over a directory of the store.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use keeper::handover::{Credentials, Volume};
use source::{ClusterConfig, Failure, Reason, Source, SourceConfig};

use crate::dataset_fs::{DatasetFs, DatasetOptions, SharedDatasetFs};
use crate::metrics::{Metered, Metrics};
use crate::report::{Refusal, Reporter};
use crate::ring_server::Mounts;
use crate::run::{Opened, Opener};
use crate::status::StatusCallback;
use crate::store_fs::{StoreFs, StoreOptions};
use crate::unsaved::Unsaved;
use crate::vfs::{FileSystem, ROOT};

/// Opens what the node plugin describes, and offers it to the ring as well.
#[derive(Debug)]
pub struct Sources {
    /// By volume: who takes fresh credentials.
    sources: Mutex<BTreeMap<String, Arc<dyn Source>>>,
    mounts: Arc<Mounts>,
    unsaved: PathBuf,
    metrics: Metrics,
}

impl Sources {
    /// Opens volumes and adds each to `mounts` under its path in the application. `unsaved` is a directory for marks of
    /// files with unsaved bytes, see [`Unsaved`]. What is asked of the volumes is counted into `metrics`.
    #[must_use]
    pub fn new(mounts: Arc<Mounts>, unsaved: PathBuf, metrics: Metrics) -> Self {
        Self { sources: Mutex::default(), mounts, unsaved, metrics }
    }

    fn store(
        &self,
        volume: &Volume,
        cluster: &ClusterConfig,
        callback: StatusCallback,
    ) -> Result<Opened, Failure> {
        let unsaved = Unsaved::open(self.unsaved.join(&volume.name)).map_err(|error| {
            let message = format!("keep marks of unsaved files: {error}");
            Failure::new(Reason::StoreUnavailable, message)
        })?;
        let options = StoreOptions {
            path: cluster.path.clone(),
            read_only: volume.read_only,
            uid: volume.uid,
            gid: volume.gid,
        };
        let client = client::Client::new(client::ClientOptions::new(&cluster.manager));
        let files = StoreFs::new(client, options, unsaved, callback);
        Ok(Opened { files: Arc::new(files), immutable: false })
    }

    fn dataset(
        &self,
        volume: &Volume,
        config: &SourceConfig,
        callback: StatusCallback,
    ) -> Result<Opened, Failure> {
        let source = source::open(config)?;
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        sources.insert(volume.name.clone(), Arc::clone(&source));
        drop(sources);
        let options =
            DatasetOptions { uid: volume.uid, gid: volume.gid, ..DatasetOptions::default() };
        let files = DatasetFs::start(source, options, callback);
        Ok(Opened { files: Arc::new(SharedDatasetFs(files)), immutable: false })
    }
}

fn refusal(failure: &Failure) -> Refusal {
    Refusal { reason: failure.reason.to_string(), message: failure.message.clone() }
}

#[async_trait::async_trait]
impl Opener for Sources {
    async fn open(&self, volume: &Volume, report: &Reporter) -> Result<Opened, Refusal> {
        let config: SourceConfig =
            serde_json::from_value(volume.source.clone()).map_err(|error| Refusal {
                reason: Reason::StoreUnavailable.to_string(),
                message: format!("source of the volume: {error}"),
            })?;
        let last: Arc<Mutex<Option<Refusal>>> = Arc::default();
        let (heard, told) = (Arc::clone(&last), report.clone());
        let callback: StatusCallback = Arc::new(move |word| match word {
            Ok(()) => told.works(),
            Err(failure) => {
                let refusal = refusal(failure);
                told.refuse(&refusal);
                *heard.lock().unwrap_or_else(PoisonError::into_inner) = Some(refusal);
            }
        });
        let opened = match &config {
            SourceConfig::S3(_) => self.dataset(volume, &config, callback),
            SourceConfig::Cluster(cluster) => self.store(volume, cluster, callback),
        };
        let opened = opened.map_err(|failure| refusal(&failure))?;
        // The first look decides whether the pod may start.
        if let Err(error) = opened.files.readdir(ROOT, 0, 1).await {
            let heard = last.lock().unwrap_or_else(PoisonError::into_inner).take();
            return Err(heard.unwrap_or_else(|| Refusal {
                reason: Reason::StoreUnavailable.to_string(),
                message: format!("list the root: {error:?}"),
            }));
        }
        let Opened { files, immutable } = opened;
        let files: Arc<dyn FileSystem> = Arc::new(Metered::new(files, &volume.name, &self.metrics));
        if let Some(path) = &volume.mount_path {
            self.mounts.add(path, Arc::clone(&files));
        }
        self.mounts.add(&format!("/{}", volume.name), Arc::clone(&files));
        Ok(Opened { files, immutable })
    }

    fn credentials(&self, fresh: &Credentials) {
        let sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = sources.get(&fresh.volume) {
            source.set_credentials(source::Credentials {
                access_key_id: fresh.access_key_id.clone(),
                secret_access_key: fresh.secret_access_key.clone(),
                session_token: fresh.session_token.clone(),
            });
        }
    }
}
