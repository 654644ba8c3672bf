//! A dataset's object as the positional reader that vortex asks for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::BoxFuture;
use source::{Failure, Object, Reason, Source};
use tokio::runtime::Handle;
use vortex::array::buffer::BufferHandle;
use vortex::buffer::{Alignment, ByteBuffer};
use vortex::error::{VortexResult, vortex_err};
use vortex::io::{CoalesceConfig, VortexReadAt};

/// Reads in flight for one file.
const CONCURRENCY: usize = 16;
/// Gaps up to this are read through: a request costs about as much as this many bytes.
const COALESCE_GAP: u64 = 256 << 10;
/// Largest single read, which bounds the memory of one request.
const COALESCE_MAX: u64 = 8 << 20;

/// First and last four bytes of a file.
pub(super) type Ends = ([u8; 4], [u8; 4]);

/// Shares one object with the decoder; counts what was fetched and keeps the first failure, which
/// vortex's own error would only carry as text.
#[derive(Debug, Clone)]
pub(super) struct Reader {
    source: Arc<dyn Source>,
    object: Arc<Object>,
    io: Handle,
    fetched: Arc<AtomicU64>,
    failed: Arc<Mutex<Option<Failure>>>,
}

impl Reader {
    pub(super) fn new(source: Arc<dyn Source>, object: Object, io: Handle) -> Self {
        Self {
            source,
            object: Arc::new(object),
            io,
            fetched: Arc::default(),
            failed: Arc::default(),
        }
    }

    pub(super) fn object(&self) -> &Object {
        &self.object
    }

    /// Bytes asked from the source so far.
    pub(super) fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    pub(super) fn take_failure(&self) -> Option<Failure> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.take()
    }

    /// For telling a truncated file from another kind of file; none if there are not so many bytes.
    pub(super) fn ends(&self) -> Result<Option<Ends>, Failure> {
        let size = self.object.size;
        let Some(last_at) = size.checked_sub(4) else { return Ok(None) };
        let (source, object) = (Arc::clone(&self.source), Arc::clone(&self.object));
        let read = async move {
            let first = source.read(&object, 0..4).await?;
            let last = source.read(&object, last_at..size).await?;
            Ok((first.as_ref().try_into().ok()).zip(last.as_ref().try_into().ok()))
        };
        let lost = |error: tokio::task::JoinError| {
            Err(Failure::new(Reason::StoreUnavailable, error.to_string()))
        };
        futures::executor::block_on(self.io.spawn(read)).unwrap_or_else(lost)
    }
}

impl VortexReadAt for Reader {
    fn coalesce_config(&self) -> Option<CoalesceConfig> {
        Some(CoalesceConfig::new(COALESCE_GAP, COALESCE_MAX))
    }

    fn concurrency(&self) -> usize {
        CONCURRENCY
    }

    fn size(&self) -> BoxFuture<'static, VortexResult<u64>> {
        let size = self.object.size;
        async move { Ok(size) }.boxed()
    }

    fn read_at(
        &self,
        offset: u64,
        length: usize,
        alignment: Alignment,
    ) -> BoxFuture<'static, VortexResult<BufferHandle>> {
        let reader = self.clone();
        async move {
            let (source, object) = (Arc::clone(&reader.source), Arc::clone(&reader.object));
            let end = offset.saturating_add(length as u64);
            // The source's sockets belong to tokio, the decoder's thread does not.
            let task = reader.io.spawn(async move { source.read(&object, offset..end).await });
            let answer = task.await.unwrap_or_else(|error| {
                Err(Failure::new(Reason::StoreUnavailable, error.to_string()))
            });
            match answer {
                Ok(bytes) => {
                    reader.fetched.fetch_add(length as u64, Ordering::Relaxed);
                    let buffer = ByteBuffer::from(bytes).aligned(alignment);
                    Ok(BufferHandle::new_host(buffer))
                }
                Err(failure) => {
                    let text = failure.to_string();
                    let mut failed = reader.failed.lock().unwrap_or_else(PoisonError::into_inner);
                    failed.get_or_insert(failure);
                    Err(vortex_err!("{text}"))
                }
            }
        }
        .boxed()
    }
}
