//! Operations on names: lookup, create, directories, links, remove.

use super::file::open_session;
use super::{
    Given, OpError, Operation, attributes, check_cut, check_name, check_sticky, load,
    load_directory, load_inode, new_inode, refuse, store_inode, touch_directory,
};
use crate::schema::{
    self, Dentry, Inode, Mark, Record, dentries_from, dentry_key, directory_time_key, garbage_key,
    inode_key,
};
use crate::txn::{Isolation, Scan, Txn};
use chain::id::InodeId;
use rpc::Code;
use rpc::message::meta::{
    Attributes, Caller, Create, FileKind, Lookup, MakeDirectory, MakeSymlink, Opened, Remove,
    SYMLINK_MAX,
};

impl Operation for Lookup {
    fn caller(&self) -> Option<&Caller> {
        None
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<Attributes, OpError> {
        check_name(&self.name)?;
        let parent = load_inode(txn, self.parent, Isolation::Snapshot).await?;
        if parent.kind != FileKind::Directory {
            return refuse(Code::NotDirectory, format!("inode {}", self.parent));
        }
        let key = dentry_key(&given.hash, self.parent, &self.name);
        let Some(dentry) = load::<Dentry, T>(txn, &key, Isolation::Snapshot).await? else {
            return refuse(
                Code::NotFound,
                format!("{} in {}", self.name.escape_ascii(), self.parent),
            );
        };
        let inode = load_inode(txn, dentry.inode, Isolation::Snapshot).await?;
        attributes(txn, dentry.inode, &inode).await
    }
}

/// Where a new name goes: its directory, and what the name holds now.
async fn place<T: Txn>(
    txn: &mut T,
    given: &Given,
    parent: InodeId,
    name: &[u8],
) -> Result<(Inode, Vec<u8>, Option<Dentry>), OpError> {
    check_name(name)?;
    let directory = load_directory(txn, parent).await?;
    let key = dentry_key(&given.hash, parent, name);
    let found = load(txn, &key, Isolation::Serializable).await?;
    Ok((directory, key, found))
}

/// Writes a new inode and its name. In a set-group-id directory the group is the directory's.
fn add_entry<T: Txn>(
    txn: &mut T,
    given: &Given,
    (parent, directory): (InodeId, &Inode),
    key: &[u8],
    mut inode: Inode,
) -> Inode {
    if directory.mode & 0o2000 != 0 {
        inode.gid = directory.gid;
        if inode.kind == FileKind::Directory {
            inode.mode |= 0o2000;
        }
    }
    store_inode(txn, given.fresh, &inode);
    txn.set(key, &Dentry { inode: given.fresh, kind: inode.kind }.to_value());
    touch_directory(txn, parent, given);
    txn.add(&schema::COUNT, 1);
    inode
}

fn owned(kind: FileKind, mode: u32, caller: &Caller, given: &Given) -> Inode {
    let (mode, uid, gid) = (mode & 0o7777, caller.uid, caller.gid);
    Inode { mode, uid, gid, ..new_inode(kind, given.now_ns) }
}

fn exists<T>(name: &[u8], parent: InodeId) -> Result<T, OpError> {
    refuse(Code::Exists, format!("{} in {parent}", name.escape_ascii()))
}

impl Operation for Create {
    const MAKES_INODE: bool = true;

    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<Opened, OpError> {
        let (directory, key, found) = place(txn, given, self.parent, &self.name).await?;
        let (id, inode) = match found {
            Some(_) if self.exclusive => return exists(&self.name, self.parent),
            Some(Dentry { kind: FileKind::Directory, .. }) => {
                return refuse(Code::IsDirectory, self.name.escape_ascii().to_string());
            }
            Some(Dentry { kind: FileKind::Symlink, .. }) => return exists(&self.name, self.parent),
            Some(Dentry { inode, .. }) => {
                check_cut(txn, inode, Isolation::Serializable).await?;
                (inode, load_inode(txn, inode, Isolation::Serializable).await?)
            }
            None => {
                let Some(layout) = given.layout else {
                    return refuse(Code::NoChainTable, "create a file");
                };
                let inode = owned(FileKind::File, self.mode, &self.caller, given);
                let inode = Inode { layout: Some(layout), ..inode };
                let parent = (self.parent, &directory);
                (given.fresh, add_entry(txn, given, parent, &key, inode))
            }
        };
        let session = open_session(txn, &self.caller, id)?;
        Ok(Opened { attributes: inode.attributes(id), session })
    }
}

impl Operation for MakeDirectory {
    const MAKES_INODE: bool = true;

    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<Attributes, OpError> {
        let (directory, key, found) = place(txn, given, self.parent, &self.name).await?;
        if found.is_some() {
            return exists(&self.name, self.parent);
        }
        let inode = owned(FileKind::Directory, self.mode, &self.caller, given);
        let inode = Inode { parent: self.parent, ..inode };
        let inode = add_entry(txn, given, (self.parent, &directory), &key, inode);
        Ok(inode.attributes(given.fresh))
    }
}

impl Operation for MakeSymlink {
    const MAKES_INODE: bool = true;

    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<Attributes, OpError> {
        let length = self.target.len();
        if length > SYMLINK_MAX {
            return refuse(Code::NameTooLong, format!("link target of {length} bytes"));
        }
        if self.target.is_empty() || self.target.contains(&0) {
            return refuse(Code::InvalidName, "link target is empty or holds NUL");
        }
        let (directory, key, found) = place(txn, given, self.parent, &self.name).await?;
        if found.is_some() {
            return exists(&self.name, self.parent);
        }
        let inode = Inode {
            target: self.target.clone(),
            length: length as u64,
            ..owned(FileKind::Symlink, 0o777, &self.caller, given)
        };
        let inode = add_entry(txn, given, (self.parent, &directory), &key, inode);
        Ok(inode.attributes(given.fresh))
    }
}

/// Fails unless the directory is empty, and still is at the commit.
pub(super) async fn check_empty<T: Txn>(txn: &mut T, id: InodeId) -> Result<(), OpError> {
    let (begin, end) = dentries_from(id, 0);
    if !txn.scan(Scan::new(begin, end, 1)).await?.pairs.is_empty() {
        return refuse(Code::NotEmpty, format!("directory {id}"));
    }
    // An entry about to be made reads this inode: the two conflict either way.
    Ok(())
}

/// Takes the last name from an inode. A file's chunks are left to the collector, with its inode.
pub(super) fn drop_inode<T: Txn>(txn: &mut T, given: &Given, id: InodeId, inode: &Inode) {
    if inode.kind == FileKind::File {
        let orphan = Inode { links: 0, changed_ns: given.now_ns, ..inode.clone() };
        store_inode(txn, id, &orphan);
        txn.set(&garbage_key(id), &Mark {}.to_value());
        return;
    }
    txn.clear(&inode_key(id));
    txn.clear(&directory_time_key(id));
    txn.add(&schema::COUNT, u64::MAX);
}

impl Operation for Remove {
    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<(), OpError> {
        let (directory, key, found) = place(txn, given, self.parent, &self.name).await?;
        let Some(dentry) = found else {
            return refuse(
                Code::NotFound,
                format!("{} in {}", self.name.escape_ascii(), self.parent),
            );
        };
        let inode = load_inode(txn, dentry.inode, Isolation::Serializable).await?;
        match (self.directory, inode.kind == FileKind::Directory) {
            (true, false) => {
                return refuse(Code::NotDirectory, self.name.escape_ascii().to_string());
            }
            (false, true) => {
                return refuse(Code::IsDirectory, self.name.escape_ascii().to_string());
            }
            (true, true) => check_empty(txn, dentry.inode).await?,
            (false, false) => {}
        }
        check_sticky(&self.caller, &directory, &inode)?;
        txn.clear(&key);
        touch_directory(txn, self.parent, given);
        drop_inode(txn, given, dentry.inode, &inode);
        Ok(())
    }
}
