//! The file client: everything between an inode's bytes and the servers that hold them.
//!
//! Owns: the routing cache, retries (by the class that each error code has, nothing else), update ids, the write buffer,
//! readahead. Never does: permissions (the kernel and the metadata service do), mounts, anything with a thread of its own.
//! Begin with [`Client`], then [`mod@file`] (inodes and bytes), [`path`] (the same by path, for loaders and tests).
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod buffer;
mod chunk;
pub mod file;
mod lane;
mod meta;
pub mod path;
mod readahead;
mod routing;

use std::sync::Arc;
use std::time::Duration;

pub use chain::id::InodeId;
pub use meta::AttributeChange;
pub use rpc::message::meta::{Attributes, DirectoryPage, FileKind, FileSystemStat, ROOT};
pub use rpc::{Code, Error};

use buffer::Buffers;
use lane::Lanes;
use readahead::Readahead;
use routing::RoutingCache;

/// How a client behaves. Only `manager` has no default.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Where the manager and the metadata service answer, `host:port`.
    pub manager: String,
    /// Who asks, for the calls of [`path`].
    pub identity: Identity,
    /// How long one attempt to read a chunk may take before another replica is asked.
    pub read_attempt: Duration,
    /// How long one attempt to write a chunk, or to ask the metadata service, may take.
    pub attempt: Duration,
    /// How long a read, a write or a metadata request is tried before it fails.
    pub deadline: Duration,
    /// Bytes that may wait in write buffers; writers wait while they are full.
    pub buffer_bytes: usize,
    /// Bytes that may be read ahead of sequential readers; 0 = none.
    pub readahead_bytes: usize,
    /// After how long without a write a file that nobody is known to have open gives its session back: the next write
    /// opens another one.
    pub idle: Duration,
}

impl ClientOptions {
    /// The defaults, for the cluster behind `manager`, `host:port`.
    pub fn new(manager: impl Into<String>) -> Self {
        Self {
            manager: manager.into(),
            identity: Identity { uid: 0, gid: 0 },
            read_attempt: Duration::from_secs(1),
            attempt: Duration::from_secs(3),
            // Half of the time after which the metadata service takes a silent client for dead.
            deadline: Duration::from_secs(60),
            buffer_bytes: 16 << 20,
            readahead_bytes: 8 << 20,
            idle: Duration::from_secs(30),
        }
    }
}

/// On whose behalf a request is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A client of one cluster. Cheap to clone; clones share connections, caches and buffers.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: ClientOptions,
    pool: rpc::conn::Pool,
    routing: RoutingCache,
    lanes: Lanes,
    requests: meta::Requests,
    inodes: file::InodeCache,
    buffers: Buffers,
    readahead: Readahead,
}

impl Client {
    /// A client that has asked nothing yet: requests wait for the cluster within their own deadline. Must be called inside a
    /// tokio runtime.
    #[must_use]
    pub fn new(options: ClientOptions) -> Self {
        let id = meta::random_client_id();
        let inner = Arc::new(Inner {
            pool: rpc::conn::Pool::new(),
            routing: RoutingCache::new(),
            lanes: Lanes::new(id),
            requests: meta::Requests::new(id),
            inodes: file::InodeCache::default(),
            buffers: Buffers::new(options.buffer_bytes),
            readahead: Readahead::new(options.readahead_bytes),
            options,
        });
        tokio::spawn(routing::follow(Arc::downgrade(&inner)));
        tokio::spawn(meta::keep(Arc::downgrade(&inner)));
        tokio::spawn(buffer::age(Arc::downgrade(&inner)));
        Self { inner }
    }

    /// A client that knows where everything is.
    ///
    /// # Errors
    /// The cluster did not answer within the deadline.
    pub async fn connect(options: ClientOptions) -> Result<Self, Error> {
        let client = Self::new(options);
        client.inner.routing.get(client.inner.until()).await?;
        Ok(client)
    }

    /// The options that it was made with.
    #[must_use]
    pub fn options(&self) -> &ClientOptions {
        &self.inner.options
    }

    /// Waits until `until` is true of the routing table, for tests and readiness.
    ///
    /// # Errors
    /// [`Code::Timeout`] at the deadline.
    pub async fn wait_routing(
        &self,
        until: impl Fn(&rpc::message::manager::Routing) -> bool,
    ) -> Result<(), Error> {
        self.inner.routing.wait(self.inner.until(), until).await.map(|_| ())
    }
}

impl Inner {
    /// When a request that starts now gives up.
    fn until(&self) -> tokio::time::Instant {
        tokio::time::Instant::now() + self.options.deadline
    }
}

/// Pauses between attempts: short at first, bounded, so that a recovered server is found soon.
#[derive(Debug)]
struct Backoff {
    next: Duration,
    until: tokio::time::Instant,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(5);
    const MOST: Duration = Duration::from_millis(500);

    const fn new(until: tokio::time::Instant) -> Self {
        Self { next: Self::FIRST, until }
    }

    /// Sleeps; gives `error` back when the deadline would pass.
    async fn pause(&mut self, error: Error) -> Result<(), Error> {
        let pause = self.next;
        self.next = (pause * 2).min(Self::MOST);
        if tokio::time::Instant::now() + pause >= self.until {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }
}
