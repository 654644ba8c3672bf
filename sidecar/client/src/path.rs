//! Files by path, for loaders, sources and tests: the calls of [`crate::file`] behind a walk from the root. Paths are
//! absolute, `/`-separated; symbolic links are not followed, `.` and `..` are refused.

use bytes::Bytes;
use rpc::message::meta::{Attributes, DirectoryEntry, FileKind, ROOT};
use rpc::{Code, Error};

use crate::{Client, InodeId};

/// Entries asked for at once when listing.
const PAGE: u32 = 1024;

/// The names of a path.
fn names(path: &str) -> Result<Vec<&[u8]>, Error> {
    path.split('/')
        .filter(|name| !name.is_empty())
        .map(|name| match name {
            "." | ".." => Err(Error::new(Code::InvalidName, format!("{name} in path {path}"))),
            _ => Ok(name.as_bytes()),
        })
        .collect()
}

/// By path. Failures are those of the calls on inodes, e.g. [`Code::NotFound`] for a missing part.
impl Client {
    /// The attributes of what `path` names.
    pub async fn stat_path(&self, path: &str) -> Result<Attributes, Error> {
        let names = names(path)?;
        let Some((last, parents)) = names.split_last() else {
            return self.attributes(ROOT).await;
        };
        let parent = self.walk(parents).await?;
        self.lookup(parent, last).await
    }

    async fn walk(&self, names: &[&[u8]]) -> Result<InodeId, Error> {
        let mut inode = ROOT;
        for name in names {
            inode = self.lookup(inode, name).await?.inode;
        }
        Ok(inode)
    }

    /// Opens an existing file for reading.
    pub async fn open_path(&self, path: &str) -> Result<Attributes, Error> {
        let inode = self.stat_path(path).await?.inode;
        self.open(self.options().identity, inode, false).await
    }

    /// Makes a file (mode 0644) in an existing directory and opens it for writing; an existing one is opened as it is.
    pub async fn create_path(&self, path: &str) -> Result<Attributes, Error> {
        let names = names(path)?;
        let (name, parents) = names
            .split_last()
            .ok_or_else(|| Error::new(Code::IsDirectory, "create the root directory"))?;
        let parent = self.walk(parents).await?;
        self.create(self.options().identity, parent, name, 0o644, false).await
    }

    /// Exactly the bytes `offset .. offset + length`, in one piece, or fewer at the end of the file. Any length.
    pub async fn read_at(&self, inode: InodeId, offset: u64, length: u64) -> Result<Bytes, Error> {
        const STEP: u64 = 64 << 20;
        let mut parts = Vec::new();
        let mut at = offset;
        let end = offset.saturating_add(length);
        while at < end {
            let step = u32::try_from((end - at).min(STEP)).unwrap_or(u32::MAX);
            let read = self.read(inode, at, step).await?;
            let got: usize = read.iter().map(Bytes::len).sum();
            parts.extend(read);
            at += got as u64;
            if got < step as usize {
                break;
            }
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0),
            _ => parts.concat().into(),
        })
    }

    /// Writes all of `bytes` at `offset`; durable after [`Client::flush`].
    pub async fn write_at(&self, inode: InodeId, offset: u64, bytes: Bytes) -> Result<(), Error> {
        self.write(self.options().identity, inode, offset, bytes).await
    }

    /// Every entry of a directory, in order of cookie.
    pub async fn list_dir(&self, path: &str) -> Result<Vec<DirectoryEntry>, Error> {
        let inode = self.stat_path(path).await?.inode;
        let (mut entries, mut cookie) = (Vec::new(), 0);
        loop {
            let page = self.read_directory(inode, cookie, PAGE).await?;
            let last = page.entries.last().map(|entry| entry.cookie);
            entries.extend(page.entries);
            match last {
                Some(last) if !page.end => cookie = last,
                _ => return Ok(entries),
            }
        }
    }

    /// Makes a directory and all that lead to it (mode 0755); existing ones are fine.
    pub async fn mkdir_all(&self, path: &str) -> Result<InodeId, Error> {
        let identity = self.options().identity;
        let mut inode = ROOT;
        for name in names(path)? {
            let made = match self.make_directory(identity, inode, name, 0o755).await {
                Err(error) if error.code == Code::Exists => self.lookup(inode, name).await?,
                other => other?,
            };
            if made.kind != FileKind::Directory {
                return Err(Error::new(Code::NotDirectory, format!("make directory {path}")));
            }
            inode = made.inode;
        }
        Ok(inode)
    }

    /// Removes a file or link.
    pub async fn remove_path(&self, path: &str) -> Result<(), Error> {
        let names = names(path)?;
        let (name, parents) = names
            .split_last()
            .ok_or_else(|| Error::new(Code::IsDirectory, "remove the root directory"))?;
        let parent = self.walk(parents).await?;
        self.remove(self.options().identity, parent, name, false).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_walked_by_plain_names_only() {
        assert_eq!(names("/a//b/").unwrap(), [b"a", b"b"]);
        assert!(names("/").unwrap().is_empty());
        assert_eq!(names("/a/../b").unwrap_err().code, Code::InvalidName);
    }
}
