//! Operations on an inode: attributes, open files, length.
//!
//! The length protocol: writers report how far they wrote at fsync and close, under the truncate
//! generation that their writes carried. A report never shortens a file. After one from before a
//! truncation the chunks say how far the file reaches: its writes were cut, or refused, or they made
//! chunks that were not there when the others were cut, and those count.

use super::{
    Given, LENGTH_MAX, OpError, Operation, attributes, check_cut, load, load_inode, refuse,
    store_inode,
};
use crate::schema::{
    self, Inode, Mark, PendingCut, Record, client_session_key, cut_key, session_key,
};
use crate::txn::{Isolation, Txn};
use chain::id::InodeId;
use rpc::Code;
use rpc::message::meta::{
    Attributes, Caller, FileKind, FileSystemStat, GetAttributes, Open, Opened, ReadSymlink,
    ReportLength, SetAttributes, StatFileSystem, SymlinkTarget, Truncate,
};

impl Operation for GetAttributes {
    fn caller(&self) -> Option<&Caller> {
        None
    }

    async fn apply<T: Txn>(&self, txn: &mut T, _: &Given) -> Result<Attributes, OpError> {
        // A writer that was refused learns the new generation here.
        check_cut(txn, self.inode, Isolation::Snapshot).await?;
        let inode = load_inode(txn, self.inode, Isolation::Snapshot).await?;
        attributes(txn, self.inode, &inode).await
    }
}

impl Operation for ReadSymlink {
    fn caller(&self) -> Option<&Caller> {
        None
    }

    async fn apply<T: Txn>(&self, txn: &mut T, _: &Given) -> Result<SymlinkTarget, OpError> {
        let inode = load_inode(txn, self.inode, Isolation::Snapshot).await?;
        if inode.kind != FileKind::Symlink {
            return refuse(Code::InvalidRequest, format!("inode {} is no link", self.inode));
        }
        Ok(SymlinkTarget { target: inode.target })
    }
}

impl Operation for StatFileSystem {
    fn caller(&self) -> Option<&Caller> {
        None
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<FileSystemStat, OpError> {
        let count = txn.get(&schema::COUNT, Isolation::Snapshot).await?;
        let count = count.as_deref().and_then(|v| v.first_chunk()).copied().unwrap_or_default();
        let (capacity_bytes, used_bytes) = given.space;
        let free_bytes = capacity_bytes.saturating_sub(used_bytes);
        Ok(FileSystemStat { capacity_bytes, free_bytes, inodes: u64::from_le_bytes(count) })
    }
}

impl Operation for SetAttributes {
    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<Attributes, OpError> {
        let mut inode = load_inode(txn, self.inode, Isolation::Serializable).await?;
        let (root, owner) = (self.caller.uid == 0, self.caller.uid == inode.uid);
        let chown = self.uid.is_some_and(|uid| uid != inode.uid);
        let may = root || owner && !chown;
        if (self.mode.is_some() || self.uid.is_some() || self.gid.is_some()) && !may {
            return refuse(Code::PermissionDenied, format!("inode {}", self.inode));
        }
        // A file that changes hands by its owner loses its set-id bits.
        if (chown || self.gid.is_some()) && !root && inode.kind == FileKind::File {
            inode.mode &= !0o6000;
        }
        inode.mode = self.mode.map_or(inode.mode, |mode| mode & 0o7777);
        inode.uid = self.uid.unwrap_or(inode.uid);
        inode.gid = self.gid.unwrap_or(inode.gid);
        inode.accessed_ns = self.accessed_ns.unwrap_or(inode.accessed_ns);
        inode.modified_ns = self.modified_ns.unwrap_or(inode.modified_ns);
        inode.changed_ns = given.now_ns.max(inode.changed_ns);
        store_inode(txn, self.inode, &inode);
        if inode.kind == FileKind::Directory && self.modified_ns.is_some() {
            // The set time holds until an entry changes.
            txn.clear(&schema::directory_time_key(self.inode));
        }
        attributes(txn, self.inode, &inode).await
    }
}

async fn load_file<T: Txn>(txn: &mut T, id: InodeId) -> Result<Inode, OpError> {
    let inode = load_inode(txn, id, Isolation::Serializable).await?;
    match inode.kind {
        FileKind::File => Ok(inode),
        FileKind::Directory => refuse(Code::IsDirectory, format!("inode {id}")),
        FileKind::Symlink => refuse(Code::InvalidRequest, format!("inode {id} is a link")),
    }
}

/// Makes the session of an opening for writing. Its number is the request's: a retry names the
/// same one.
pub(super) fn open_session<T: Txn>(
    txn: &mut T,
    caller: &Caller,
    inode: InodeId,
) -> Result<u64, OpError> {
    if caller.request == 0 {
        return refuse(Code::InvalidRequest, "requests are numbered from 1");
    }
    let mark = Mark {}.to_value();
    txn.set(&session_key(inode, caller.client, caller.request), &mark);
    txn.set(&client_session_key(caller.client, inode, caller.request), &mark);
    Ok(caller.request)
}

impl Operation for Open {
    fn caller(&self) -> Option<&Caller> {
        // Opening for reading leaves no trace.
        self.write.then_some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, _: &Given) -> Result<Opened, OpError> {
        if self.write {
            check_cut(txn, self.inode, Isolation::Serializable).await?;
        }
        let inode = load_file(txn, self.inode).await?;
        if inode.links == 0 {
            return refuse(Code::NotFound, format!("inode {} was removed", self.inode));
        }
        let session = if self.write { open_session(txn, &self.caller, self.inode)? } else { 0 };
        Ok(Opened { attributes: inode.attributes(self.inode), session })
    }
}

impl Operation for ReportLength {
    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<Attributes, OpError> {
        let key = session_key(self.inode, self.caller.client, self.session);
        if load::<Mark, T>(txn, &key, Isolation::Serializable).await?.is_none() {
            let what = format!("session {} of inode {}", self.session, self.inode);
            return refuse(Code::SessionEnded, what);
        }
        if self.length > LENGTH_MAX {
            return refuse(Code::TooLarge, format!("length {}", self.length));
        }
        check_cut(txn, self.inode, Isolation::Serializable).await?;
        let mut inode = load_file(txn, self.inode).await?;
        if self.truncate_generation > inode.truncate_generation {
            let what = format!("truncate generation {}", self.truncate_generation);
            return refuse(Code::InvalidRequest, what);
        }
        let current = self.truncate_generation == inode.truncate_generation;
        if !current && self.length > inode.length && !given.settled {
            return Err(OpError::Unsettled(self.inode));
        }
        if current && (self.length > inode.length || self.modified_ns > inode.modified_ns) {
            inode.length = inode.length.max(self.length);
            inode.modified_ns = inode.modified_ns.max(self.modified_ns);
            inode.changed_ns = given.now_ns.max(inode.changed_ns);
            store_inode(txn, self.inode, &inode);
        }
        if self.close {
            txn.clear(&key);
            txn.clear(&client_session_key(self.caller.client, self.inode, self.session));
        }
        Ok(inode.attributes(self.inode))
    }
}

impl Operation for Truncate {
    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    fn cuts(&self) -> Option<InodeId> {
        Some(self.inode)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<Attributes, OpError> {
        if self.length > LENGTH_MAX {
            return refuse(Code::TooLarge, format!("length {}", self.length));
        }
        check_cut(txn, self.inode, Isolation::Serializable).await?;
        let mut inode = load_file(txn, self.inode).await?;
        if self.length <= inode.length {
            // Also at the same length: another writer may have written past it, unreported.
            inode.truncate_generation += 1;
            let truncate_generation = inode.truncate_generation;
            let cut = PendingCut { length: self.length, truncate_generation };
            txn.set(&cut_key(self.inode), &cut.to_value());
        }
        inode.length = self.length;
        inode.modified_ns = given.now_ns.max(inode.modified_ns);
        inode.changed_ns = given.now_ns.max(inode.changed_ns);
        store_inode(txn, self.inode, &inode);
        Ok(inode.attributes(self.inode))
    }
}
