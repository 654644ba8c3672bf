//! Byte sources of a dataset: a list of objects, each with an identity, and ranges of their bytes.
//!
//! The mount sidecar, the scan agent and the loader read through this one trait, so a dataset
//! means the same bytes to all of them: an [`Object`] carries the identity (S3 ETag, inode and
//! length in the store) seen when it was listed, and a read of anything else than that very
//! object fails with [`Reason::DatasetChanged`] instead of mixing two versions.
//!
//! This crate never decodes what it reads and never decides what to do about a failure: it names
//! the reason ([`Failure`]) in the words that conditions, events and clients use.
//! Begin at [`Source`], then [`open`].
#![forbid(unsafe_code)]

mod config;
mod dir;
mod failure;
mod mem;
mod s3;
mod store;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

pub use config::{ClusterConfig, Credentials, S3Config, SourceConfig, fuzz_source_config};
pub use dir::DirSource;
pub use failure::{Failure, Reason};
pub use mem::MemSource;
pub use s3::S3Source;
pub use store::StoreSource;

/// Most objects that one dataset may have: a list is held in memory by every reader.
pub const MAX_OBJECTS: usize = 1_000_000;

/// One object of a dataset as it was when listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Path below the dataset's root, `/`-separated, never empty, without `.` or `..` parts.
    pub path: String,
    /// Length in bytes.
    pub size: u64,
    /// What makes these bytes these bytes: an ETag, or inode and length. Opaque.
    pub identity: String,
    /// Last modification in milliseconds since 1970, 0 where unknown.
    pub modified_ms: u64,
}

/// Where a dataset's bytes come from. Implementations are cheap to share and safe to use from
/// many tasks at once.
#[async_trait::async_trait]
pub trait Source: Send + Sync + std::fmt::Debug {
    /// Every object of the dataset, sorted by path.
    async fn list(&self) -> Result<Vec<Object>, Failure>;

    /// Exactly the bytes `range` of `object`, or a failure; never bytes of another version.
    async fn read(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Failure>;

    /// Replaces the credentials for every later request; open handles go on. Sources without
    /// credentials ignore it.
    fn set_credentials(&self, credentials: Credentials);

    /// A name for messages and logs, free of secrets.
    fn describe(&self) -> String;
}

/// Opens the source that `config` names. No request is made: an unreachable endpoint shows at
/// the first [`Source::list`].
pub fn open(config: &SourceConfig) -> Result<Arc<dyn Source>, Failure> {
    install_crypto_provider();
    match config {
        SourceConfig::S3(s3) => Ok(Arc::new(S3Source::new(s3)?)),
        SourceConfig::Cluster(cluster) => Ok(Arc::new(StoreSource::new(cluster))),
    }
}

/// Makes ring the process's TLS provider; later calls change nothing.
pub fn install_crypto_provider() {
    // An error only says that a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Refuses a range that is not inside the object, before a request is made for it.
fn check_range(object: &Object, range: &Range<u64>) -> Result<(), Failure> {
    if range.start > range.end || range.end > object.size {
        return Err(Failure::new(
            Reason::TruncatedFile,
            format!(
                "bytes {}..{} of {} asked, which has {}",
                range.start, range.end, object.path, object.size
            ),
        ));
    }
    Ok(())
}

/// Whether every part of a relative path names something below the root.
fn is_plain_path(path: &str) -> bool {
    !path.is_empty()
        && path.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_leaves_the_root_is_not_plain() {
        for bad in ["", "/a", "a/", "a//b", "../a", "a/./b", "a/..", "a\0b"] {
            assert!(!is_plain_path(bad), "{bad:?}");
        }
        for good in ["a", "a/b.vortex", "..a/b"] {
            assert!(is_plain_path(good), "{good:?}");
        }
    }

    #[test]
    fn a_range_outside_the_object_is_refused() {
        let object = Object { path: "a".into(), size: 10, identity: "x".into(), modified_ms: 0 };
        assert!(check_range(&object, &(0..10)).is_ok());
        let failure = check_range(&object, &(5..11)).unwrap_err();
        assert_eq!(failure.reason, Reason::TruncatedFile);
        assert_eq!(failure.message, "bytes 5..11 of a asked, which has 10");
    }
}
