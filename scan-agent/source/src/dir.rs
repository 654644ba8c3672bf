//! A directory as a source: the twin that tests and standalone use read through.
//!
//! It keeps the promises of [`Source`] (identity pinned at listing, exact lengths), so a test
//! that passes here says something about the real sources.

use std::fs::{self, File, Metadata};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::{Credentials, Failure, MAX_OBJECTS, Object, Reason, Source, check_range};

/// Directories nested deeper than this are refused: it bounds the walk over a loop of links.
const MAX_DEPTH: usize = 32;

/// Files below a directory, or one file.
#[derive(Debug)]
pub struct DirSource {
    root: PathBuf,
}

impl DirSource {
    /// A source of what is below `root` when it is listed.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn walk(&self, dir: &Path, depth: usize, out: &mut Vec<Object>) -> Result<(), Failure> {
        if depth > MAX_DEPTH || out.len() > MAX_OBJECTS {
            return Err(Failure::new(
                Reason::StoreUnavailable,
                format!("too many files below {}", self.root.display()),
            ));
        }
        for entry in fs::read_dir(dir).map_err(|e| io_failure(dir, &e))? {
            let path = entry.map_err(|e| io_failure(dir, &e))?.path();
            let meta = fs::metadata(&path).map_err(|e| io_failure(&path, &e))?;
            if meta.is_dir() {
                self.walk(&path, depth + 1, out)?;
                continue;
            }
            let below = path.strip_prefix(&self.root).ok().and_then(Path::to_str);
            let name = below.ok_or_else(|| {
                let message = format!("{} is not named in UTF-8", path.display());
                Failure::new(Reason::StoreUnavailable, message)
            })?;
            out.push(object(name, &meta));
        }
        Ok(())
    }

    fn path_of(&self, object: &Object) -> PathBuf {
        if self.root.is_file() { self.root.clone() } else { self.root.join(&object.path) }
    }
}

#[async_trait::async_trait]
impl Source for DirSource {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        let meta = fs::metadata(&self.root).map_err(|e| io_failure(&self.root, &e))?;
        if meta.is_file() {
            let name = self.root.file_name().and_then(|name| name.to_str());
            return Ok(vec![object(name.unwrap_or("file"), &meta)]);
        }
        let mut out = Vec::new();
        self.walk(&self.root, 0, &mut out)?;
        out.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(out)
    }

    async fn read(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        check_range(object, &range)?;
        let path = self.path_of(object);
        let changed = || {
            let message = format!("{} is not the file that was listed", object.path);
            Failure::new(Reason::DatasetChanged, message)
        };
        let file = File::open(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => changed(),
            _ => io_failure(&path, &error),
        })?;
        let meta = file.metadata().map_err(|e| io_failure(&path, &e))?;
        if identity(&meta) != object.identity {
            return Err(changed());
        }
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let mut buffer = vec![0; length];
        file.read_exact_at(&mut buffer, range.start).map_err(|e| io_failure(&path, &e))?;
        Ok(buffer.into())
    }

    fn set_credentials(&self, _credentials: Credentials) {}

    fn describe(&self) -> String {
        self.root.display().to_string()
    }
}

fn object(path: &str, meta: &Metadata) -> Object {
    Object {
        path: path.to_owned(),
        size: meta.len(),
        identity: identity(meta),
        modified_ms: u64::try_from(meta.mtime() * 1000).unwrap_or(0),
    }
}

fn identity(meta: &Metadata) -> String {
    let (seconds, nanos) = (meta.mtime(), meta.mtime_nsec());
    format!("{}-{}-{seconds}.{nanos}", meta.ino(), meta.len())
}

fn io_failure(path: &Path, error: &std::io::Error) -> Failure {
    let reason = match error.kind() {
        ErrorKind::NotFound => Reason::ObjectNotFound,
        ErrorKind::PermissionDenied => Reason::AccessDenied,
        ErrorKind::UnexpectedEof => Reason::TruncatedFile,
        _ => Reason::StoreUnavailable,
    };
    Failure::new(reason, format!("read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    #[tokio::test]
    async fn ranges_of_nested_files_are_read_exactly() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        fs::write(dir.path().join("b/two"), b"0123456789").unwrap();
        fs::write(dir.path().join("a"), b"x").unwrap();
        let source = DirSource::new(dir.path());
        let objects = source.list().await.unwrap();
        let paths: Vec<_> = objects.iter().map(|o| o.path.as_str()).collect();
        assert_eq!(paths, ["a", "b/two"]);
        let bytes = source.read(&objects[1], 3..7).await.unwrap();
        assert_eq!(&bytes[..], b"3456");
    }

    #[tokio::test]
    async fn a_replaced_or_removed_file_is_a_changed_dataset() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, b"old bytes").unwrap();
        let source = DirSource::new(&path);
        let objects = source.list().await.unwrap();
        fs::write(dir.path().join("new"), b"new bytes!").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        let failure = source.read(&objects[0], 0..4).await.unwrap_err();
        assert_eq!(failure.reason, Reason::DatasetChanged);
        fs::remove_file(&path).unwrap();
        let failure = source.read(&objects[0], 0..4).await.unwrap_err();
        assert_eq!(failure.reason, Reason::DatasetChanged);
    }

    #[tokio::test]
    async fn a_file_without_a_name_in_utf8_is_not_left_out_quietly() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), b"x").unwrap();
        fs::write(dir.path().join(OsStr::from_bytes(b"b\xff")), b"x").unwrap();
        let failure = DirSource::new(dir.path()).list().await.unwrap_err();
        assert_eq!(failure.reason, Reason::StoreUnavailable);
        assert!(failure.message.ends_with("is not named in UTF-8"), "{failure}");
    }

    #[tokio::test]
    async fn a_missing_directory_is_object_not_found() {
        let failure = DirSource::new("/nonexistent/x").list().await.unwrap_err();
        assert_eq!(failure.reason, Reason::ObjectNotFound);
    }
}
