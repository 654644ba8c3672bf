//! Who wrote what: the audit log of the local cluster's API server.

use std::fs::{File, Metadata};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::command::cache;

/// One completed write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Who wrote, such as `system:serviceaccount:lampyris-system:lampyris-operator`.
    pub user: String,
    /// `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// Plural name of the kind, with the subresource after a slash.
    pub resource: String,
    /// Namespace and name, with a slash between.
    pub object: String,
}

/// A place in the log from which writes are counted.
#[derive(Debug)]
pub struct Mark {
    path: PathBuf,
    offset: u64,
    inode: u64,
}

impl Mark {
    /// The end of the log as it is now.
    ///
    /// # Errors
    /// When there is no log, as on a cluster that is not local.
    pub fn now() -> Result<Self> {
        let path = std::env::var_os("LAMPYRIS_AUDIT_LOG")
            .map_or_else(|| cache().join("cluster/run/node-1/log/audit.log"), PathBuf::from);
        Self::at_end(&path)
    }

    fn at_end(path: &Path) -> Result<Self> {
        let log = look(path)?;
        Ok(Self { path: path.to_owned(), offset: log.len(), inode: log.ino() })
    }

    /// Every write since the mark by users whose name contains `user`.
    ///
    /// # Errors
    /// When the log cannot be read, was begun anew since the mark, or holds something else than events.
    pub fn writes_by(&self, user: &str) -> Result<Vec<Write>> {
        let log = look(&self.path)?;
        ensure!(
            log.ino() == self.inode && log.len() >= self.offset,
            "{} was begun anew, so what was written since the mark is not known",
            self.path.display()
        );
        let mut file =
            File::open(&self.path).with_context(|| format!("open {}", self.path.display()))?;
        file.seek(SeekFrom::Start(self.offset)).context("skip what was there before")?;
        let mut text = String::new();
        file.read_to_string(&mut text).context("read the audit log")?;
        // The last line may not be whole yet.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let mut writes = Vec::new();
        for line in whole.lines() {
            let event: Value = serde_json::from_str(line).context("parse the audit log")?;
            let write = parse(&event);
            if write.user.contains(user) {
                writes.push(write);
            }
        }
        Ok(writes)
    }
}

fn look(path: &Path) -> Result<Metadata> {
    std::fs::metadata(path).with_context(|| format!("look at {}", path.display()))
}

fn parse(event: &Value) -> Write {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let object = &event["objectRef"];
    let mut resource = text(&object["resource"]);
    if let Some(sub) = object["subresource"].as_str() {
        resource = format!("{resource}/{sub}");
    }
    Write {
        user: text(&event["user"]["username"]),
        verb: text(&event["verb"]),
        resource,
        object: format!("{}/{}", text(&object["namespace"]), text(&object["name"])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: &str = r#"{"verb":"patch","user":{"username":"system:serviceaccount:s:operator"},"objectRef":{"resource":"datasets","namespace":"train","name":"flights","subresource":"status"}}"#;

    fn log(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("lampyris-{name}-{}", std::process::id()));
        std::fs::write(&path, text).expect("a temporary file");
        path
    }

    #[test]
    fn an_event_names_user_verb_and_object() {
        let write = parse(&serde_json::from_str(EVENT).expect("JSON"));
        assert_eq!(write.user, "system:serviceaccount:s:operator");
        assert_eq!((write.verb.as_str(), write.resource.as_str()), ("patch", "datasets/status"));
        assert_eq!(write.object, "train/flights");
    }

    #[test]
    fn only_whole_events_since_the_mark_count() {
        let path = log("audit", "what was there before\n");
        let mark = Mark::at_end(&path).expect("the log is there");
        std::fs::write(&path, format!("what was there before\n{EVENT}\n{}", &EVENT[..20]))
            .expect("the log grows");
        assert_eq!(mark.writes_by(":s:").expect("the log is read").len(), 1);
        assert_eq!(mark.writes_by(":t:").expect("the log is read").len(), 0);
        std::fs::remove_file(path).expect("the log goes");
    }

    #[test]
    fn a_log_that_was_begun_anew_says_nothing() {
        let path = log("rotated", "much that was there before\n");
        let mark = Mark::at_end(&path).expect("the log is there");
        std::fs::write(&path, "little\n").expect("the log shrinks");
        let error = mark.writes_by("s").expect_err("it is shorter than the mark");
        assert!(error.to_string().contains("begun anew"), "{error}");
        std::fs::remove_file(path).expect("the log goes");
    }
}
