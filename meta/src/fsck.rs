//! Checks the shape of the namespace (M3) in a store that nobody else has open: one tree, every
//! name with its inode, every inode with its name or in the collector's queue, counts that agree.

use crate::schema::{
    self, Dentry, HashKey, Inode, PendingCut, Prefix, Record, SchemaError, dentry_key,
    parse_dentry_key, parse_id, within,
};
use crate::txn::{Isolation, Scan, Store, Txn, TxnError, key_after};
use bytes::Bytes;
use chain::id::InodeId;
use rpc::message::meta::{FileKind, ROOT};
use std::collections::{BTreeMap, BTreeSet};

/// Pairs read in one transaction: the check may take longer than a transaction may live.
const PAGE: usize = 1000;

/// Why the check could not be made.
#[derive(Debug, thiserror::Error)]
pub enum FsckError {
    /// The store cannot be read.
    #[error("read the store: {0}")]
    Txn(#[from] TxnError),
    /// The store has no `SYST` record: it is not of a cluster.
    #[error("the store holds no metadata")]
    Empty,
    /// The system record cannot be read.
    #[error(transparent)]
    Schema(#[from] SchemaError),
}

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    /// Inodes read.
    pub inodes: usize,
    /// Names read.
    pub names: usize,
    /// Removed files whose chunks are still to be collected.
    pub orphans: usize,
    /// One sentence for each break of a rule. Empty is good.
    pub problems: Vec<String>,
}

/// Checks a store.
///
/// # Errors
/// [`FsckError`]: the check itself failed.
pub async fn check<S: Store>(store: &S) -> Result<Findings, FsckError> {
    let mut txn = store.begin().await?;
    let system = txn.get(&schema::SYSTEM, Isolation::Snapshot).await?.ok_or(FsckError::Empty)?;
    let system = schema::System::from_value(&schema::SYSTEM, &system)?;
    let count = txn.get(&schema::COUNT, Isolation::Snapshot).await?;
    let mut tree = Tree { hash: Some(HashKey::new(system.hash_key)), ..Tree::default() };
    for (key, value) in all(store, schema::INODE).await? {
        tree.inode(&key, &value);
    }
    for (key, value) in all(store, schema::DENTRY).await? {
        tree.name(&key, &value);
    }
    for (key, _) in all(store, schema::GARBAGE).await? {
        tree.orphan(&key);
    }
    for (key, value) in all(store, schema::CUT).await? {
        tree.cut(&key, &value);
    }
    tree.check_inodes();
    tree.check_reach();
    let count = count.as_deref().and_then(|v| v.first_chunk()).copied().unwrap_or_default();
    let (count, found) = (u64::from_le_bytes(count), tree.inodes.len());
    if count != found as u64 {
        tree.problem(format!("the counter says {count} inodes, there are {found}"));
    }
    let (names, orphans) = (tree.names, tree.orphans.len());
    Ok(Findings { inodes: found, names, orphans, problems: tree.problems })
}

async fn all<S: Store>(store: &S, prefix: Prefix) -> Result<Vec<(Bytes, Bytes)>, TxnError> {
    let (mut begin, end) = within(prefix.to_vec());
    let mut found = Vec::new();
    loop {
        let mut txn = store.begin().await?;
        let page = txn.scan(Scan::new(begin, end.clone(), PAGE).snapshot()).await?;
        found.extend(page.pairs);
        match found.last() {
            Some((last, _)) if page.more => begin = key_after(last),
            _ => return Ok(found),
        }
    }
}

#[derive(Default)]
struct Tree {
    hash: Option<HashKey>,
    inodes: BTreeMap<InodeId, Inode>,
    /// Directories of the names of each inode.
    parents: BTreeMap<InodeId, Vec<InodeId>>,
    children: BTreeMap<InodeId, Vec<InodeId>>,
    orphans: BTreeSet<InodeId>,
    names: usize,
    problems: Vec<String>,
}

impl Tree {
    fn problem(&mut self, what: String) {
        self.problems.push(what);
    }

    fn inode(&mut self, key: &[u8], value: &Bytes) {
        match (parse_id(key), Inode::from_value(key, value)) {
            (Ok(id), Ok(inode)) => {
                self.inodes.insert(InodeId::new(u64::from_le_bytes(id)), inode);
            }
            (Err(error), _) | (_, Err(error)) => self.problem(error.to_string()),
        }
    }

    fn name(&mut self, key: &[u8], value: &Bytes) {
        self.names += 1;
        let (parent, name, dentry) = match (parse_dentry_key(key), Dentry::from_value(key, value)) {
            (Ok((parent, _, name)), Ok(dentry)) => (parent, name, dentry),
            (Err(error), _) | (_, Err(error)) => return self.problem(error.to_string()),
        };
        let shown = name.escape_ascii().to_string();
        if self.hash.is_some_and(|hash| dentry_key(&hash, parent, name) != key) {
            self.problem(format!("name {shown} in {parent} is not at its hash"));
        }
        match self.inodes.get(&parent).map(|i| i.kind) {
            Some(FileKind::Directory) => {}
            _ => self.problem(format!("name {shown} is in {parent}, which is no directory")),
        }
        match self.inodes.get(&dentry.inode).map(|i| i.kind) {
            None => self.problem(format!("name {shown} in {parent} names no inode")),
            Some(kind) if kind != dentry.kind => {
                self.problem(format!("name {shown} in {parent} says another kind than its inode"));
            }
            Some(_) => {}
        }
        self.parents.entry(dentry.inode).or_default().push(parent);
        self.children.entry(parent).or_default().push(dentry.inode);
    }

    fn orphan(&mut self, key: &[u8]) {
        match parse_id(key) {
            Ok(id) => drop(self.orphans.insert(InodeId::new(u64::from_le_bytes(id)))),
            Err(error) => self.problem(error.to_string()),
        }
    }

    fn cut(&mut self, key: &[u8], value: &Bytes) {
        let (id, cut) = match (parse_id(key), PendingCut::from_value(key, value)) {
            (Ok(id), Ok(cut)) => (InodeId::new(u64::from_le_bytes(id)), cut),
            (Err(error), _) | (_, Err(error)) => return self.problem(error.to_string()),
        };
        let of_inode = |i: &Inode| (i.kind, i.length, i.truncate_generation);
        let of_cut = (FileKind::File, cut.length, cut.truncate_generation);
        if self.inodes.get(&id).map(of_inode) != Some(of_cut) {
            self.problem(format!("inode {id} is to be cut otherwise than it says"));
        }
    }

    fn check_inodes(&mut self) {
        let mut problems = Vec::new();
        for (id, inode) in &self.inodes {
            let parents = self.parents.get(id).map_or(&[][..], Vec::as_slice);
            let links = inode.links as usize;
            let expected = parents.len() + usize::from(*id == ROOT);
            if links != expected {
                problems.push(format!("inode {id} counts {links} links and has {expected}"));
            }
            if (links == 0) != self.orphans.contains(id) {
                problems.push(format!("inode {id} with {links} links: wrong about the queue"));
            }
            let held = inode.kind != FileKind::Directory
                || *id == ROOT && inode.parent == ROOT
                || parents == [inode.parent];
            if !held {
                problems.push(format!(
                    "directory {id} names parent {}, held by {parents:?}",
                    inode.parent
                ));
            }
            if (inode.kind == FileKind::File) != inode.layout.is_some_and(|l| l.is_valid()) {
                problems
                    .push(format!("inode {id} of kind {:?} is wrong about a layout", inode.kind));
            }
        }
        for id in self.orphans.iter().filter(|id| !self.inodes.contains_key(id)) {
            problems.push(format!("inode {id} is in the queue and does not exist"));
        }
        self.problems.append(&mut problems);
    }

    /// Every inode with a name hangs on the root: with one parent each, there is no cycle then.
    fn check_reach(&mut self) {
        let mut seen = BTreeSet::from([ROOT]);
        let mut left = vec![ROOT];
        while let Some(id) = left.pop() {
            for child in self.children.get(&id).into_iter().flatten() {
                if seen.insert(*child) {
                    left.push(*child);
                }
            }
        }
        let lost = self.inodes.iter().filter(|(id, inode)| inode.links > 0 && !seen.contains(id));
        let lost: Vec<String> =
            lost.map(|(id, _)| format!("inode {id} cannot be reached from the root")).collect();
        self.problems.extend(lost);
    }
}

#[cfg(test)]
mod tests;
