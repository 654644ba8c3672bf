//! Rename: one transaction, replacing and across directories too (M4), and never a cycle (M3).

use super::entry::{check_empty, drop_inode};
use super::{
    DEPTH_MAX, Given, OpError, Operation, check_name, check_sticky, load, load_directory,
    load_inode, refuse, store_inode, touch_directory,
};
use crate::schema::{Dentry, Inode, Record, dentry_key};
use crate::txn::{Isolation, Txn};
use chain::id::InodeId;
use rpc::Code;
use rpc::message::meta::{Caller, FileKind, ROOT, Rename};

impl Operation for Rename {
    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }

    async fn apply<T: Txn>(&self, txn: &mut T, given: &Given) -> Result<(), OpError> {
        check_name(&self.name)?;
        check_name(&self.new_name)?;
        let from = load_directory(txn, self.parent).await?;
        let to = load_directory(txn, self.new_parent).await?;
        let from_key = dentry_key(&given.hash, self.parent, &self.name);
        let to_key = dentry_key(&given.hash, self.new_parent, &self.new_name);
        let Some(moved) = load::<Dentry, T>(txn, &from_key, Isolation::Serializable).await? else {
            return refuse(
                Code::NotFound,
                format!("{} in {}", self.name.escape_ascii(), self.parent),
            );
        };
        let replaced = load::<Dentry, T>(txn, &to_key, Isolation::Serializable).await?;
        if self.no_replace && replaced.is_some() {
            return refuse(Code::Exists, self.new_name.escape_ascii().to_string());
        }
        if from_key == to_key {
            return Ok(());
        }
        let inode = load_inode(txn, moved.inode, Isolation::Serializable).await?;
        check_sticky(&self.caller, &from, &inode)?;
        if moved.kind == FileKind::Directory {
            check_not_below(txn, self.new_parent, &to, moved.inode).await?;
        }
        if let Some(replaced) = replaced {
            replace(txn, given, self, &to, (&moved, &replaced)).await?;
        }
        txn.clear(&from_key);
        txn.set(&to_key, &moved.to_value());
        touch_directory(txn, self.parent, given);
        touch_directory(txn, self.new_parent, given);
        let parent = if moved.kind == FileKind::Directory { self.new_parent } else { inode.parent };
        store_inode(txn, moved.inode, &Inode { changed_ns: given.now_ns, parent, ..inode });
        Ok(())
    }
}

/// Takes the new name from what holds it now.
async fn replace<T: Txn>(
    txn: &mut T,
    given: &Given,
    request: &Rename,
    to: &Inode,
    (moved, replaced): (&Dentry, &Dentry),
) -> Result<(), OpError> {
    let name = request.new_name.escape_ascii().to_string();
    let is_directory = |dentry: &Dentry| dentry.kind == FileKind::Directory;
    let inode = load_inode(txn, replaced.inode, Isolation::Serializable).await?;
    match (is_directory(moved), is_directory(replaced)) {
        (true, false) => return refuse(Code::NotDirectory, name),
        (false, true) => return refuse(Code::IsDirectory, name),
        (true, true) => check_empty(txn, replaced.inode).await?,
        (false, false) => {}
    }
    check_sticky(&request.caller, to, &inode)?;
    drop_inode(txn, given, replaced.inode, &inode);
    Ok(())
}

/// Fails if `directory` is `moved` or lies below it. Every ancestor counts as read, and a move
/// rewrites the moved directory's inode: of two moves that together make a cycle, one conflicts.
async fn check_not_below<T: Txn>(
    txn: &mut T,
    mut directory: InodeId,
    inode: &Inode,
    moved: InodeId,
) -> Result<(), OpError> {
    let mut parent = inode.parent;
    for _ in 0..DEPTH_MAX {
        if directory == moved {
            return refuse(Code::WouldLoop, format!("directory {moved} into itself"));
        }
        if directory == ROOT {
            return Ok(());
        }
        directory = parent;
        parent = load_inode(txn, directory, Isolation::Serializable).await?.parent;
    }
    refuse(Code::TooLarge, format!("directory deeper than {DEPTH_MAX}"))
}
