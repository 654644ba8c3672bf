//! Who wrote what: the audit log of the local cluster's API server.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::PathBuf;

use anyhow::{Context, Result};
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
}

impl Mark {
    /// The end of the log as it is now.
    ///
    /// # Errors
    /// When there is no log, as on a cluster that is not local.
    pub fn now() -> Result<Self> {
        let path = std::env::var_os("LAMPYRIS_AUDIT_LOG")
            .map_or_else(|| cache().join("cluster/run/node-1/log/audit.log"), PathBuf::from);
        let offset =
            std::fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?.len();
        Ok(Self { path, offset })
    }

    /// Every write since the mark by users whose name contains `user`, leases left out.
    ///
    /// # Errors
    /// When the log cannot be read or holds something else than events.
    pub fn writes_by(&self, user: &str) -> Result<Vec<Write>> {
        let mut file =
            File::open(&self.path).with_context(|| format!("open {}", self.path.display()))?;
        file.seek(SeekFrom::Start(self.offset)).context("skip what was there before")?;
        let mut writes = Vec::new();
        for line in BufReader::new(file).lines() {
            let event: Value = serde_json::from_str(&line.context("read the audit log")?)
                .context("parse the audit log")?;
            let write = parse(&event);
            if write.user.contains(user) && write.resource != "leases" {
                writes.push(write);
            }
        }
        Ok(writes)
    }
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

    #[test]
    fn an_event_names_user_verb_and_object() {
        let event: Value = serde_json::from_str(
            r#"{"verb":"patch","user":{"username":"system:serviceaccount:s:operator"},
                "objectRef":{"resource":"datasets","namespace":"train","name":"flights","subresource":"status"}}"#,
        )
        .expect("JSON");
        let write = parse(&event);
        assert_eq!(write.user, "system:serviceaccount:s:operator");
        assert_eq!((write.verb.as_str(), write.resource.as_str()), ("patch", "datasets/status"));
        assert_eq!(write.object, "train/flights");
    }
}
