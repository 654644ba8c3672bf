//! Listing a directory. The cookie of an entry is the keyed hash of its name, so it holds over
//! restarts, other servers and other entries' coming and going; entries of equal hash are never
//! split over two pages.

use super::{Given, OpError, Operation, attributes, load_inode, refuse, scan_snapshot};
use crate::schema::{Dentry, Record, dentries_from, parse_dentry_key};
use crate::txn::{Isolation, Txn, key_after};
use bytes::Bytes;
use rpc::Code;
use rpc::message::meta::{Caller, DirectoryEntry, DirectoryPage, FileKind, ReadDirectory};

/// Most entries of one page.
pub(super) const PAGE_MAX: usize = 1024;

impl Operation for ReadDirectory {
    fn caller(&self) -> Option<&Caller> {
        None
    }

    async fn apply<T: Txn>(&self, txn: &mut T, _: &Given) -> Result<DirectoryPage, OpError> {
        let directory = load_inode(txn, self.inode, Isolation::Snapshot).await?;
        if directory.kind != FileKind::Directory {
            return refuse(Code::NotDirectory, format!("inode {}", self.inode));
        }
        let limit = (self.limit as usize).clamp(1, PAGE_MAX);
        let range = dentries_from(self.inode, self.cookie.saturating_add(1));
        // One more tells whether the directory ends here.
        let mut pairs = scan_snapshot(txn, range, limit + 1).await?;
        let end = pairs.len() <= limit;
        if !end {
            pairs.truncate(limit);
            complete_group(txn, &mut pairs).await?;
        }
        let mut entries = Vec::with_capacity(pairs.len());
        for (key, value) in pairs {
            let (_, cookie, name) = parse_dentry_key(&key)?;
            let name = key.slice_ref(name);
            let dentry = Dentry::from_value(&key, &value)?;
            let inode = load_inode(txn, dentry.inode, Isolation::Snapshot).await?;
            let attributes = attributes(txn, dentry.inode, &inode).await?;
            entries.push(DirectoryEntry { name, cookie, attributes });
        }
        Ok(DirectoryPage { entries, end, parent: directory.parent })
    }
}

/// Adds the entries that share the last one's cookie.
async fn complete_group<T: Txn>(
    txn: &mut T,
    pairs: &mut Vec<(Bytes, Bytes)>,
) -> Result<(), OpError> {
    let Some((last, _)) = pairs.last().cloned() else { return Ok(()) };
    let (directory, cookie, _) = parse_dentry_key(&last)?;
    let (end, _) = dentries_from(directory, cookie.saturating_add(1));
    pairs.extend(scan_snapshot(txn, (key_after(&last), end), PAGE_MAX).await?);
    Ok(())
}
