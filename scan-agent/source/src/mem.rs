//! Objects in memory: for tests and fuzzing, where a file's bytes are made up.

use std::ops::Range;

use bytes::Bytes;

use crate::{Credentials, Failure, Object, Source, check_range};

/// A dataset of one object.
#[derive(Debug)]
pub struct MemSource {
    path: String,
    bytes: Bytes,
}

impl MemSource {
    /// A source with `bytes` at `path`.
    pub fn new(path: impl Into<String>, bytes: impl Into<Bytes>) -> Self {
        Self { path: path.into(), bytes: bytes.into() }
    }

    /// The object.
    pub fn object(&self) -> Object {
        Object {
            path: self.path.clone(),
            size: self.bytes.len() as u64,
            identity: "memory".into(),
            modified_ms: 0,
        }
    }
}

#[async_trait::async_trait]
impl Source for MemSource {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        Ok(vec![self.object()])
    }

    async fn read(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        check_range(object, &range)?;
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).min(self.bytes.len());
        Ok(self.bytes.slice(at(range.start)..at(range.end)))
    }

    fn set_credentials(&self, _credentials: Credentials) {}

    fn describe(&self) -> String {
        "memory".into()
    }
}
