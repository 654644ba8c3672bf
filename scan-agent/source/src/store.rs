//! Files of our own store as a source, through the crate `client`.
//!
//! A file's identity is its inode, length, times and truncate generation: a file that was
//! replaced, removed or written since it was listed fails the read that notices. A removed file's
//! bytes stay for a while, but the dataset is no longer what was listed.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use client::{Attributes, Client, ClientOptions, Code, FileKind, InodeId};
use tokio::sync::OnceCell;

use crate::{
    ClusterConfig, Credentials, Failure, MAX_OBJECTS, Object, Reason, Source, check_range,
};

/// A store that does not answer for this long is unavailable: the failure must be out in thirty
/// seconds.
const DEADLINE: Duration = Duration::from_secs(20);
/// Directories nested deeper than this are refused.
const MAX_DEPTH: usize = 64;

/// Files below a path of a storage cluster, or one file.
#[derive(Debug)]
pub struct StoreSource {
    client: OnceCell<Client>,
    manager: String,
    root: String,
}

impl StoreSource {
    /// A source that connects when it is first used.
    pub fn new(config: &ClusterConfig) -> Self {
        Self {
            client: OnceCell::new(),
            manager: config.manager.clone(),
            root: config.path.trim_end_matches('/').to_owned(),
        }
    }

    /// The client, made inside the runtime that uses it first.
    async fn client(&self) -> &Client {
        let make = || async {
            let mut options = ClientOptions::new(&self.manager);
            options.deadline = DEADLINE;
            Client::new(options)
        };
        self.client.get_or_init(make).await
    }

    async fn walk(&self, client: &Client) -> Result<Vec<Object>, Failure> {
        let mut objects = Vec::new();
        let mut directories = vec![(String::new(), 0)];
        while let Some((below, depth)) = directories.pop() {
            let path = format!("{}{below}", self.root);
            let entries = client.list_dir(&path).await.map_err(|e| failure("list", &path, &e))?;
            for entry in entries {
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                let path = format!("{below}/{name}");
                match entry.attributes.kind {
                    FileKind::File => objects.push(object(&path, &entry.attributes)),
                    FileKind::Directory if depth < MAX_DEPTH => directories.push((path, depth + 1)),
                    FileKind::Directory => {
                        let message = format!("{path} is nested deeper than {MAX_DEPTH}");
                        return Err(Failure::new(Reason::StoreUnavailable, message));
                    }
                    // What a link names is counted where it is, or is no part of the dataset.
                    FileKind::Symlink => {}
                }
            }
            if objects.len() > MAX_OBJECTS {
                let message = format!("{} has more than {MAX_OBJECTS} files", self.describe());
                return Err(Failure::new(Reason::StoreUnavailable, message));
            }
        }
        objects.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(objects)
    }
}

#[async_trait::async_trait]
impl Source for StoreSource {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        let client = self.client().await;
        let found = client.stat_path(&self.root).await;
        let attributes = found.map_err(|e| failure("look up", &self.root, &e))?;
        if attributes.kind == FileKind::File {
            let name = self.root.rsplit('/').next().unwrap_or_default();
            return Ok(vec![object(name, &attributes)]);
        }
        self.walk(client).await
    }

    async fn read(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        check_range(object, &range)?;
        let client = self.client().await;
        let wanted = range.end - range.start;
        let changed = || {
            let message = format!("{} is not the file that was listed", object.path);
            Failure::new(Reason::DatasetChanged, message)
        };
        let inode = inode_of(&object.identity).ok_or_else(changed)?;
        let wrap = |error: client::Error| match error.code {
            Code::NotFound => changed(),
            _ => failure("read", &object.path, &error),
        };
        let bytes = client.read_at(inode, range.start, wanted).await.map_err(wrap)?;
        // After the read: what was read before a change that this does not see was still good.
        let attributes = client.attributes(inode).await.map_err(wrap)?;
        if identity(&attributes) != object.identity || attributes.links == 0 {
            return Err(changed());
        }
        if bytes.len() as u64 != wanted {
            let message = format!("got {} of {wanted} bytes of {}", bytes.len(), object.path);
            return Err(Failure::new(Reason::TruncatedFile, message));
        }
        Ok(bytes)
    }

    fn set_credentials(&self, _credentials: Credentials) {}

    fn describe(&self) -> String {
        format!("{}{}", self.manager, self.root)
    }
}

fn object(path: &str, attributes: &Attributes) -> Object {
    Object {
        path: path.trim_start_matches('/').to_owned(),
        size: attributes.length,
        identity: identity(attributes),
        modified_ms: attributes.modified_ns / 1_000_000,
    }
}

fn identity(attributes: &Attributes) -> String {
    format!(
        "{}-{}-{}-{}",
        attributes.inode.get(),
        attributes.length,
        attributes.modified_ns,
        attributes.truncate_generation
    )
}

fn inode_of(identity: &str) -> Option<InodeId> {
    let (inode, _) = identity.split_once('-')?;
    inode.parse().ok().map(InodeId::new)
}

fn failure(verb: &str, path: &str, error: &client::Error) -> Failure {
    let reason = match error.code {
        Code::NotFound | Code::NotDirectory => Reason::ObjectNotFound,
        Code::PermissionDenied => Reason::AccessDenied,
        Code::Unreachable => Reason::EndpointUnreachable,
        _ => Reason::StoreUnavailable,
    };
    Failure::new(reason, format!("{verb} {path}: {error}"))
}
