//! The namespace: each operation is one function of a transaction and of what is given from
//! outside (time, a fresh inode id, the layout for new files). It decides on what it reads in the
//! transaction that acts, so a permission or an emptiness holds at the commit (M8).

mod entry;
mod file;
mod list;
mod rename;

use crate::schema::{
    self, DirectoryTime, HashKey, Inode, Record, SchemaError, directory_time_key, inode_key,
};
use crate::txn::{Isolation, Scan, Txn, TxnError};
use bytes::Bytes;
use chain::id::InodeId;
use chain::layout::Layout;
use rpc::message::Request;
use rpc::message::meta::{Attributes, Caller, FileKind, NAME_MAX, ROOT};
use rpc::{Code, Error};

/// Most bytes of a file: what a signed 64-bit offset reaches.
pub const LENGTH_MAX: u64 = i64::MAX as u64;
/// Deepest directory: bounds the walk to the root in a rename.
pub const DEPTH_MAX: usize = 1024;

/// What an operation takes from outside its transaction. Fixed for one attempt.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    /// The server's clock, nanoseconds since 1970.
    pub now_ns: u64,
    /// An inode id that was never used: for at most one new inode.
    pub fresh: InodeId,
    /// Where the chunks of a new file go; none before a chain table is declared.
    pub layout: Option<Layout>,
    /// Key of the names' hash.
    pub hash: HashKey,
    /// Bytes of the disks, divided by the replicas: all of them, and used ones.
    pub space: (u64, u64),
    /// Whether an attempt before this one settled the length of the operation's file.
    pub settled: bool,
}

/// Why an operation did not happen.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OpError {
    /// The caller gets this.
    #[error(transparent)]
    Refused(#[from] Error),
    /// The transaction failed: perhaps another attempt succeeds.
    #[error(transparent)]
    Txn(#[from] TxnError),
    /// A stored value cannot be read.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The chunks of this file are to be cut first. Another attempt then.
    #[error("inode {0} waits for its chunks to be cut")]
    CutPending(InodeId),
    /// How far this file reaches is to be asked of its chunks first. Another attempt then.
    #[error("inode {0} waits for its length")]
    Unsettled(InodeId),
}

/// A request of the metadata service, run in a transaction.
pub trait Operation: Request {
    /// Whether it may use [`Given::fresh`].
    const MAKES_INODE: bool = false;

    /// Who asks, if the operation changes anything: then a retry finds the first answer.
    fn caller(&self) -> Option<&Caller>;

    /// The file whose chunks must be cut before the answer goes out, if the operation leaves that to do.
    fn cuts(&self) -> Option<InodeId> {
        None
    }

    /// The operation. An error leaves the transaction to be dropped.
    fn apply<T: Txn>(
        &self,
        txn: &mut T,
        given: &Given,
    ) -> impl Future<Output = Result<Self::Response, OpError>> + Send;
}

fn refuse<T>(code: Code, what: impl Into<String>) -> Result<T, OpError> {
    Err(OpError::Refused(Error::new(code, what)))
}

/// Names are bytes without `/` and NUL; `.` and `..` are the kernel's.
fn check_name(name: &[u8]) -> Result<(), OpError> {
    if name.len() > NAME_MAX {
        return refuse(Code::NameTooLong, format!("name of {} bytes", name.len()));
    }
    let bad = name.is_empty() || name == b"." || name == b"..";
    if bad || name.iter().any(|b| matches!(b, b'/' | 0)) {
        return refuse(Code::InvalidName, format!("name '{}'", name.escape_ascii()));
    }
    Ok(())
}

async fn load<R: Record, T: Txn>(
    txn: &mut T,
    key: &[u8],
    isolation: Isolation,
) -> Result<Option<R>, OpError> {
    let value = txn.get(key, isolation).await?;
    Ok(value.map(|value| R::from_value(key, &value)).transpose()?)
}

async fn load_inode<T: Txn>(
    txn: &mut T,
    inode: InodeId,
    isolation: Isolation,
) -> Result<Inode, OpError> {
    match load(txn, &inode_key(inode), isolation).await? {
        Some(found) => Ok(found),
        None => refuse(Code::NotFound, format!("inode {inode}")),
    }
}

/// Fails while the chunks of a file are still to be cut: until then it must not grow, and nobody may learn its truncate
/// generation.
async fn check_cut<T: Txn>(txn: &mut T, id: InodeId, isolation: Isolation) -> Result<(), OpError> {
    match txn.get(&schema::cut_key(id), isolation).await? {
        Some(_) => Err(OpError::CutPending(id)),
        None => Ok(()),
    }
}

/// A directory that the operation relies on: it cannot be removed before the commit.
async fn load_directory<T: Txn>(txn: &mut T, inode: InodeId) -> Result<Inode, OpError> {
    let found = load_inode(txn, inode, Isolation::Serializable).await?;
    if found.kind != FileKind::Directory {
        return refuse(Code::NotDirectory, format!("inode {inode}"));
    }
    Ok(found)
}

/// Attributes for a client: a directory's time is kept apart.
async fn attributes<T: Txn>(
    txn: &mut T,
    id: InodeId,
    inode: &Inode,
) -> Result<Attributes, OpError> {
    let mut attributes = inode.attributes(id);
    if inode.kind == FileKind::Directory {
        let time: Option<DirectoryTime> =
            load(txn, &directory_time_key(id), Isolation::Snapshot).await?;
        let entries_ns = time.map_or(0, |t| t.modified_ns);
        attributes.modified_ns = attributes.modified_ns.max(entries_ns);
        attributes.changed_ns = attributes.changed_ns.max(entries_ns);
    }
    Ok(attributes)
}

fn store_inode<T: Txn>(txn: &mut T, id: InodeId, inode: &Inode) {
    txn.set(&inode_key(id), &inode.to_value());
}

/// Notes that the entries of a directory changed.
fn touch_directory<T: Txn>(txn: &mut T, id: InodeId, given: &Given) {
    let time = DirectoryTime { modified_ns: given.now_ns };
    txn.set(&directory_time_key(id), &time.to_value());
}

/// In a sticky directory only root, its owner and the entry's owner may remove or rename.
fn check_sticky(caller: &Caller, parent: &Inode, child: &Inode) -> Result<(), OpError> {
    let sticky = parent.mode & 0o1000 != 0;
    if sticky && ![0, parent.uid, child.uid].contains(&caller.uid) {
        return refuse(Code::PermissionDenied, "the directory is sticky");
    }
    Ok(())
}

/// A page of a range for the readers of whole ranges.
async fn scan_snapshot<T: Txn>(
    txn: &mut T,
    (begin, end): (Vec<u8>, Vec<u8>),
    limit: usize,
) -> Result<Vec<(Bytes, Bytes)>, OpError> {
    Ok(txn.scan(Scan::new(begin, end, limit).snapshot()).await?.pairs)
}

/// Makes an empty store into one with a root directory. Does nothing if it has one.
///
/// # Errors
/// [`Code::WrongCluster`] if the store belongs to another cluster.
pub async fn format<T: Txn>(
    txn: &mut T,
    cluster: &str,
    hash_key: u128,
    now_ns: u64,
) -> Result<HashKey, OpError> {
    let found: Option<schema::System> = load(txn, &schema::SYSTEM, Isolation::Serializable).await?;
    if let Some(system) = found {
        if system.cluster != cluster {
            let why = format!("the store belongs to cluster {}, not {cluster}", system.cluster);
            return refuse(Code::WrongCluster, why);
        }
        return Ok(HashKey::new(system.hash_key));
    }
    let system = schema::System { cluster: cluster.to_owned(), hash_key };
    txn.set(&schema::SYSTEM, &system.to_value());
    let root = Inode { mode: 0o1777, parent: ROOT, ..new_inode(FileKind::Directory, now_ns) };
    store_inode(txn, ROOT, &root);
    txn.add(&schema::COUNT, 1);
    Ok(HashKey::new(hash_key))
}

const fn new_inode(kind: FileKind, now_ns: u64) -> Inode {
    Inode {
        kind,
        mode: 0,
        uid: 0,
        gid: 0,
        links: 1,
        length: 0,
        accessed_ns: now_ns,
        modified_ns: now_ns,
        changed_ns: now_ns,
        truncate_generation: 0,
        layout: None,
        parent: InodeId::new(0),
        target: Bytes::new(),
    }
}

#[cfg(test)]
mod tests;
