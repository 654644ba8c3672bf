//! What the sidecar counts and times: a [`FileSystem`] around another, so that no front end counts for itself, and figures
//! that are read when somebody asks.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::run::Sidecar;
use crate::vfs::{Attr, Caller, DirPage, Errno, FileSystem, Opened, SetAttr, StatFs};

/// Seconds: a cached read, one from a server's memory, from its disk, from object storage; a stall; what no read may take.
const BUCKETS: [f64; 6] = [0.000_1, 0.001, 0.01, 0.1, 1.0, 5.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfVolume {
    volume: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Asked {
    volume: String,
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failed {
    volume: String,
    operation: &'static str,
    errno: String,
}

/// Figures of all volumes. Clones count together.
///
/// The node plugin shows a bounded number of series of each sidecar, so operations are told apart only as far as
/// somebody acts upon it: `read`, `write`, `sync` (flush and fsync, which wait for the store), `names` (all others).
#[derive(Clone, Debug)]
pub struct Metrics {
    seconds: Family<Asked, Histogram, fn() -> Histogram>,
    errors: Family<Failed, Counter>,
    read_bytes: Family<OfVolume, Counter>,
    written_bytes: Family<OfVolume, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let seconds: fn() -> Histogram = || Histogram::new(BUCKETS);
        Self {
            seconds: Family::new_with_constructor(seconds),
            errors: Family::default(),
            read_bytes: Family::default(),
            written_bytes: Family::default(),
        }
    }
}

impl Metrics {
    /// Registers everything, without a prefix of its own.
    pub fn register(&self, registry: &mut Registry) {
        let seconds = "Time that operations of files took, by volume and kind";
        registry.register("operation_seconds", seconds, self.seconds.clone());
        let errors =
            "Operations that failed; ENOENT is the usual answer to a name that is not there";
        registry.register("operation_errors", errors, self.errors.clone());
        let read = "Bytes answered to reads, by mount and ring";
        registry.register("read_bytes", read, self.read_bytes.clone());
        let written = "Bytes taken from writes, by mount and ring";
        registry.register("written_bytes", written, self.written_bytes.clone());
    }
}

/// A file system whose operations are counted under the name of its volume.
#[derive(Debug)]
pub struct Metered {
    files: Arc<dyn FileSystem>,
    volume: String,
    metrics: Metrics,
    read_bytes: Counter,
    written_bytes: Counter,
}

impl Metered {
    /// Counts what is asked of `files` into `metrics`.
    #[must_use]
    pub fn new(files: Arc<dyn FileSystem>, volume: &str, metrics: &Metrics) -> Self {
        let label = OfVolume { volume: volume.to_owned() };
        let read_bytes = metrics.read_bytes.get_or_create_owned(&label);
        let written_bytes = metrics.written_bytes.get_or_create_owned(&label);
        let (volume, metrics) = (volume.to_owned(), metrics.clone());
        Self { files, volume, metrics, read_bytes, written_bytes }
    }

    async fn count<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, Errno>> + Send,
    ) -> Result<T, Errno> {
        let begin = Instant::now();
        let outcome = work.await;
        let (volume, seconds) = (self.volume.clone(), begin.elapsed().as_secs_f64());
        let asked = Asked { volume, operation };
        self.metrics.seconds.get_or_create(&asked).observe(seconds);
        if let Err(errno) = &outcome {
            let (volume, errno) = (asked.volume, format!("{errno:?}"));
            self.metrics.errors.get_or_create(&Failed { volume, operation, errno }).inc();
        }
        outcome
    }

    async fn names<T>(
        &self,
        work: impl Future<Output = Result<T, Errno>> + Send,
    ) -> Result<T, Errno> {
        self.count("names", work).await
    }
}

#[async_trait::async_trait]
impl FileSystem for Metered {
    async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, Errno> {
        self.names(self.files.lookup(parent, name)).await
    }

    async fn getattr(&self, ino: u64) -> Result<Attr, Errno> {
        self.names(self.files.getattr(ino)).await
    }

    async fn setattr(&self, caller: Caller, ino: u64, set: SetAttr) -> Result<Attr, Errno> {
        self.names(self.files.setattr(caller, ino, set)).await
    }

    async fn readdir(&self, ino: u64, cookie: u64, limit: u32) -> Result<DirPage, Errno> {
        self.names(self.files.readdir(ino, cookie, limit)).await
    }

    async fn open(&self, caller: Caller, ino: u64, write: bool) -> Result<Opened, Errno> {
        self.names(self.files.open(caller, ino, write)).await
    }

    async fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        mode: u32,
        exclusive: bool,
    ) -> Result<Opened, Errno> {
        self.names(self.files.create(caller, parent, name, mode, exclusive)).await
    }

    async fn read_parts(&self, ino: u64, offset: u64, length: u32) -> Result<Vec<Bytes>, Errno> {
        let parts = self.count("read", self.files.read_parts(ino, offset, length)).await?;
        self.read_bytes.inc_by(parts.iter().map(|part| part.len() as u64).sum());
        Ok(parts)
    }

    async fn write(
        &self,
        caller: Caller,
        ino: u64,
        offset: u64,
        bytes: Bytes,
    ) -> Result<(), Errno> {
        let length = bytes.len() as u64;
        self.count("write", self.files.write(caller, ino, offset, bytes)).await?;
        self.written_bytes.inc_by(length);
        Ok(())
    }

    async fn flush(&self, ino: u64) -> Result<(), Errno> {
        self.count("sync", self.files.flush(ino)).await
    }

    async fn fsync(&self, ino: u64) -> Result<(), Errno> {
        self.count("sync", self.files.fsync(ino)).await
    }

    async fn flush_all(&self) -> Result<(), Errno> {
        self.count("sync", self.files.flush_all()).await
    }

    fn unsaved_bytes(&self) -> usize {
        self.files.unsaved_bytes()
    }

    async fn release(&self, ino: u64, write: bool) {
        self.files.release(ino, write).await;
    }

    async fn mkdir(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        mode: u32,
    ) -> Result<Attr, Errno> {
        self.names(self.files.mkdir(caller, parent, name, mode)).await
    }

    async fn unlink(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.names(self.files.unlink(caller, parent, name)).await
    }

    async fn rmdir(&self, caller: Caller, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.names(self.files.rmdir(caller, parent, name)).await
    }

    async fn rename(
        &self,
        caller: Caller,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        no_replace: bool,
    ) -> Result<(), Errno> {
        self.names(self.files.rename(caller, from, to, no_replace)).await
    }

    async fn symlink(
        &self,
        caller: Caller,
        parent: u64,
        name: &[u8],
        target: &[u8],
    ) -> Result<Attr, Errno> {
        self.names(self.files.symlink(caller, parent, name, target)).await
    }

    async fn readlink(&self, ino: u64) -> Result<Bytes, Errno> {
        self.names(self.files.readlink(ino)).await
    }

    async fn statfs(&self) -> Result<StatFs, Errno> {
        self.names(self.files.statfs()).await
    }
}

/// What a sidecar holds at the moment.
#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) sidecar: Arc<Sidecar>,
    pub(crate) ring_connections: Arc<AtomicUsize>,
}

fn gauge(figure: usize) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(figure).unwrap_or(i64::MAX))
}

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut show = |name, help, figure: &dyn EncodeMetric| {
            figure.encode(encoder.encode_descriptor(name, help, None, figure.metric_type())?)
        };
        let (now, all) = self.sidecar.load();
        show("fuse_requests_in_flight", "FUSE requests being answered", &gauge(now))?;
        let all = ConstCounter::new(u64::try_from(all).unwrap_or(u64::MAX));
        show("fuse_requests", "FUSE requests taken since the start", &all)?;
        let connections = gauge(self.ring_connections.load(Ordering::Relaxed));
        show("ring_connections", "Applications connected to the ring", &connections)?;
        let help = "Bytes taken from writes that are not in the store yet";
        let mut unsaved =
            encoder.encode_descriptor("unsaved_bytes", help, None, MetricType::Gauge)?;
        for (volume, bytes) in self.sidecar.unsaved_bytes() {
            gauge(bytes).encode(unsaved.encode_family(&OfVolume { volume })?)?;
        }
        Ok(())
    }
}
