//! Every key and value of the store, as `SCHEMA.md` lists them. Keys are written here and nowhere
//! else; a value begins with the version of its record, and a record's fields are only ever
//! appended, under a new version.

mod hash;

use crate::txn::prefix_end;
use bytes::Bytes;
use chain::id::{ChainId, ClientId, InodeId, NodeId, RoutingVersion};
use chain::layout::Layout;
use chain::table::Chain;
pub use hash::HashKey;
use rpc::codec::{DecodeError, Wire};
use rpc::message::meta::{Attributes, FileKind};
use rpc::{wire_fields, wire_struct};

/// The least cookie of an entry: 0 starts a listing, 1 and 2 are free for `.` and `..`.
pub const COOKIE_MIN: u64 = 3;

/// A stored value that cannot be read. It names its key, and stops nothing but its reader.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// A newer build wrote it.
    #[error("value of {key} has record version {found}, this build reads {newest}")]
    Version {
        /// The key, escaped.
        key: String,
        /// What its first byte says.
        found: u8,
        /// The newest that this build knows.
        newest: u8,
    },
    /// It is damaged, or not of this schema.
    #[error("value of {key} cannot be read: {source}")]
    Value {
        /// The key, escaped.
        key: String,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// A key that does not follow its prefix's form.
    #[error("key {0} is malformed")]
    Key(String),
}

/// A key for humans.
#[must_use]
pub fn show_key(key: &[u8]) -> String {
    key.escape_ascii().to_string()
}

/// A value of the store.
pub trait Record: Wire {
    /// The version that this build writes.
    const VERSION: u8 = 1;

    /// The stored form.
    fn to_value(&self) -> Vec<u8> {
        let mut out = bytes::BytesMut::new();
        Self::VERSION.encode(&mut out);
        self.encode(&mut out);
        out.to_vec()
    }

    /// Reads the fields of an older version; none if there was no such version.
    fn from_older(_version: u8, _fields: &Bytes) -> Option<Result<Self, DecodeError>> {
        None
    }

    /// Reads the stored form; `key` is named in the error.
    ///
    /// # Errors
    /// [`SchemaError`].
    fn from_value(key: &[u8], value: &Bytes) -> Result<Self, SchemaError> {
        let unreadable = |source| SchemaError::Value { key: show_key(key), source };
        let Some(&found) = value.first() else {
            return Err(unreadable(DecodeError::Truncated("record version")));
        };
        let fields = value.slice(1..);
        if found == Self::VERSION {
            return Self::from_bytes(fields).map_err(unreadable);
        }
        match Self::from_older(found, &fields) {
            Some(read) => read.map_err(unreadable),
            None => {
                let newest = Self::VERSION;
                Err(SchemaError::Version { key: show_key(key), found, newest })
            }
        }
    }
}

wire_struct! {
    /// What the store belongs to.
    pub struct System {
        /// The cluster.
        pub cluster: String,
        /// Key of the hash of names.
        pub hash_key: u128,
    }
}

/// An inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    /// What it is.
    pub kind: FileKind,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of names: 1, or 0 for a file that waits for collection.
    pub links: u32,
    /// Bytes of a file or of a link's target.
    pub length: u64,
    /// Nanoseconds since 1970.
    pub accessed_ns: u64,
    /// Nanoseconds since 1970; of a directory, see [`DirectoryTime`].
    pub modified_ns: u64,
    /// Nanoseconds since 1970.
    pub changed_ns: u64,
    /// Grows at each truncation that shortens.
    pub truncate_generation: u64,
    /// Of a file, fixed at its creation.
    pub layout: Option<Layout>,
    /// Of a directory: the one that holds it.
    pub parent: InodeId,
    /// Of a symbolic link.
    pub target: Bytes,
}

wire_fields!(Inode {
    kind: FileKind,
    mode: u32,
    uid: u32,
    gid: u32,
    links: u32,
    length: u64,
    accessed_ns: u64,
    modified_ns: u64,
    changed_ns: u64,
    truncate_generation: u64,
    layout: Option<Layout>,
    parent: InodeId,
    target: Bytes,
});

impl Inode {
    /// As clients see it.
    #[must_use]
    pub const fn attributes(&self, inode: InodeId) -> Attributes {
        Attributes {
            inode,
            kind: self.kind,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            links: self.links,
            length: self.length,
            accessed_ns: self.accessed_ns,
            modified_ns: self.modified_ns,
            changed_ns: self.changed_ns,
            truncate_generation: self.truncate_generation,
            layout: self.layout,
        }
    }
}

wire_struct! {
    /// A name in a directory.
    pub struct Dentry {
        /// What it names.
        pub inode: InodeId,
        /// Whether that is a directory.
        pub kind: FileKind,
    }
}

wire_struct! {
    /// When the entries of a directory last changed. Apart from its inode, so that creating files
    /// side by side does not conflict.
    pub struct DirectoryTime {
        /// Nanoseconds since 1970.
        pub modified_ns: u64,
    }
}

wire_struct! {
    /// The result of a request that changed something, for its retries.
    pub struct Answered {
        /// The kind of the request.
        pub kind: u16,
        /// Its answer, encoded.
        pub answer: Bytes,
    }
}

wire_struct! {
    /// A client that has sessions or answers.
    pub struct ClientRecord {
        /// Every request up to this one has ended, as the client says: it runs no more.
        pub acknowledged: u64,
    }
}

impl Record for ClientRecord {
    const VERSION: u8 = 2;

    /// Version 1 was a mark: the answers that were acknowledged went, and nobody noted which.
    fn from_older(version: u8, fields: &Bytes) -> Option<Result<Self, DecodeError>> {
        let mark = (version == 1).then(|| Mark::from_bytes(fields.clone()))?;
        Some(mark.map(|Mark {}| Self { acknowledged: 0 }))
    }
}

wire_struct! {
    /// What a truncation leaves to do at the chunks of its file.
    pub struct PendingCut {
        /// Where the file ended then: what lies past it goes.
        pub length: u64,
        /// The truncate generation of the cut.
        pub truncate_generation: u64,
    }
}

wire_struct! {
    /// A record whose key says it all.
    pub struct Mark {}
}

wire_struct! {
    /// A place of a target in the declared table.
    pub struct DeclaredTarget {
        /// The target.
        pub target: chain::id::TargetId,
        /// The position of its disk.
        pub disk: u32,
    }
}

wire_struct! {
    /// A chain as declared.
    pub struct DeclaredChain {
        /// The chain.
        pub chain: ChainId,
        /// Its members.
        pub targets: Vec<DeclaredTarget>,
    }
}

wire_struct! {
    /// The chain table as declared by the operator.
    pub struct DeclaredTable {
        /// The table.
        pub table: u32,
        /// Grows with each declaration.
        pub revision: u64,
        /// See `Routing::stripe`.
        pub stripe: u32,
        /// Chunk size of new files in bytes.
        pub chunk_size_bytes: u32,
        /// In order of id.
        pub chains: Vec<DeclaredChain>,
    }
}

wire_struct! {
    /// A registered storage server.
    pub struct NodeRecord {
        /// Where it was last.
        pub address: String,
        /// The newest process of it.
        pub incarnation: u64,
    }
}

/// Reads a value as one kind of record. One of the present version writes back as the same bytes.
fn fuzz_record<R: Record + std::fmt::Debug>(value: &Bytes) {
    if let Ok(record) = R::from_value(b"fuzz", value) {
        let same = *value == record.to_value();
        let older = value.first().is_some_and(|found| *found < R::VERSION);
        assert!(same || older, "{record:?} writes back as other bytes");
    }
}

macro_rules! records {
    ($($ty:ty),*; $($newer:ty),*) => {
        $(impl Record for $ty {})*

        /// Whatever `bytes` hold, reading them as any record ends in a value or an error, and a
        /// value writes back as the same bytes.
        pub fn fuzz_value(bytes: &[u8]) {
            let value = Bytes::copy_from_slice(bytes);
            $(fuzz_record::<$ty>(&value);)*
            $(fuzz_record::<$newer>(&value);)*
        }
    };
}
records!(
    System,
    Inode,
    Dentry,
    DirectoryTime,
    Answered,
    Mark,
    PendingCut,
    DeclaredTable,
    NodeRecord,
    Chain,
    u64,
    RoutingVersion;
    ClientRecord
);

/// A key prefix: four letters.
pub type Prefix = [u8; 4];
/// See `SCHEMA.md`.
pub const SYSTEM: Prefix = *b"SYST";
/// Next inode id of the allocator.
pub const ALLOCATOR: Prefix = *b"ALLO";
/// Number of inodes, an atomic counter.
pub const COUNT: Prefix = *b"CNTI";
/// Inodes.
pub const INODE: Prefix = *b"INOD";
/// Names.
pub const DENTRY: Prefix = *b"DENT";
/// Times of directories.
pub const DIRECTORY_TIME: Prefix = *b"DTIM";
/// Write sessions by inode.
pub const SESSION: Prefix = *b"INOS";
/// Write sessions by client.
pub const CLIENT_SESSION: Prefix = *b"CLIS";
/// Clients that have sessions or answers.
pub const CLIENT: Prefix = *b"CLNT";
/// Answers by client and request.
pub const ANSWERED: Prefix = *b"IDEM";
/// Files whose chunks are to be removed.
pub const GARBAGE: Prefix = *b"GARB";
/// Files whose chunks are to be cut.
pub const CUT: Prefix = *b"CUTS";
/// The declared table.
pub const TABLE: Prefix = *b"CHIT";
/// Chains with their states.
pub const CHAIN: Prefix = *b"CHIF";
/// Storage servers.
pub const NODE: Prefix = *b"NODE";
/// The routing version.
pub const ROUTING: Prefix = *b"ROUT";

/// Every prefix.
pub const PREFIXES: [Prefix; 16] = [
    SYSTEM,
    ALLOCATOR,
    COUNT,
    INODE,
    DENTRY,
    DIRECTORY_TIME,
    SESSION,
    CLIENT_SESSION,
    CLIENT,
    ANSWERED,
    GARBAGE,
    CUT,
    TABLE,
    CHAIN,
    NODE,
    ROUTING,
];

fn key(prefix: Prefix, parts: &[&[u8]]) -> Vec<u8> {
    let mut key = prefix.to_vec();
    parts.iter().for_each(|part| key.extend_from_slice(part));
    key
}

/// The keys that start with `start`.
#[must_use]
pub fn within(start: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    // Every key starts with a letter, so a prefix has an end.
    let end = prefix_end(&start).unwrap_or_else(|| start.clone());
    (start, end)
}

/// `INOD` ‖ inode.
#[must_use]
pub fn inode_key(inode: InodeId) -> Vec<u8> {
    key(INODE, &[&inode.get().to_le_bytes()])
}

/// `DTIM` ‖ inode.
#[must_use]
pub fn directory_time_key(inode: InodeId) -> Vec<u8> {
    key(DIRECTORY_TIME, &[&inode.get().to_le_bytes()])
}

/// `GARB` ‖ inode.
#[must_use]
pub fn garbage_key(inode: InodeId) -> Vec<u8> {
    key(GARBAGE, &[&inode.get().to_le_bytes()])
}

/// `CUTS` ‖ inode.
#[must_use]
pub fn cut_key(inode: InodeId) -> Vec<u8> {
    key(CUT, &[&inode.get().to_le_bytes()])
}

/// `DENT` ‖ directory ‖ hash of the name (big-endian: the order of cookies) ‖ name.
#[must_use]
pub fn dentry_key(hash: &HashKey, parent: InodeId, name: &[u8]) -> Vec<u8> {
    let cookie = hash.cookie(name).to_be_bytes();
    key(DENTRY, &[&parent.get().to_le_bytes(), &cookie, name])
}

/// The keys of a directory from a cookie on.
#[must_use]
pub fn dentries_from(parent: InodeId, cookie: u64) -> (Vec<u8>, Vec<u8>) {
    let begin = key(DENTRY, &[&parent.get().to_le_bytes(), &cookie.to_be_bytes()]);
    (begin, within(key(DENTRY, &[&parent.get().to_le_bytes()])).1)
}

/// The parts of a dentry's key: directory, cookie, name.
///
/// # Errors
/// [`SchemaError::Key`].
pub fn parse_dentry_key(key: &[u8]) -> Result<(InodeId, u64, &[u8]), SchemaError> {
    let parse = || {
        let rest = key.strip_prefix(&DENTRY)?;
        let (parent, rest) = rest.split_first_chunk::<8>()?;
        let (cookie, name) = rest.split_first_chunk::<8>()?;
        Some((InodeId::new(u64::from_le_bytes(*parent)), u64::from_be_bytes(*cookie), name))
    };
    parse().ok_or_else(|| SchemaError::Key(show_key(key)))
}

/// `INOS` ‖ inode ‖ client ‖ session.
#[must_use]
pub fn session_key(inode: InodeId, client: ClientId, session: u64) -> Vec<u8> {
    let (client, session) = (client.get().to_be_bytes(), session.to_be_bytes());
    key(SESSION, &[&inode.get().to_le_bytes(), &client, &session])
}

/// The sessions of a file.
#[must_use]
pub fn sessions_of(inode: InodeId) -> (Vec<u8>, Vec<u8>) {
    within(key(SESSION, &[&inode.get().to_le_bytes()]))
}

/// `CLIS` ‖ client ‖ inode ‖ session.
#[must_use]
pub fn client_session_key(client: ClientId, inode: InodeId, session: u64) -> Vec<u8> {
    let (client, session) = (client.get().to_be_bytes(), session.to_be_bytes());
    key(CLIENT_SESSION, &[&client, &inode.get().to_le_bytes(), &session])
}

/// The sessions of a client.
#[must_use]
pub fn sessions_of_client(client: ClientId) -> (Vec<u8>, Vec<u8>) {
    within(key(CLIENT_SESSION, &[&client.get().to_be_bytes()]))
}

/// The parts of a session's key by client: inode and session.
///
/// # Errors
/// [`SchemaError::Key`].
pub fn parse_client_session_key(key: &[u8]) -> Result<(InodeId, u64), SchemaError> {
    let parse = || {
        let rest = key.strip_prefix(&CLIENT_SESSION)?.get(16..)?;
        let (inode, session) = rest.split_first_chunk::<8>()?;
        let session = u64::from_be_bytes(session.try_into().ok()?);
        Some((InodeId::new(u64::from_le_bytes(*inode)), session))
    };
    parse().ok_or_else(|| SchemaError::Key(show_key(key)))
}

/// `CLNT` ‖ client.
#[must_use]
pub fn client_key(client: ClientId) -> Vec<u8> {
    key(CLIENT, &[&client.get().to_be_bytes()])
}

/// `IDEM` ‖ client ‖ request.
#[must_use]
pub fn answered_key(client: ClientId, request: u64) -> Vec<u8> {
    key(ANSWERED, &[&client.get().to_be_bytes(), &request.to_be_bytes()])
}

/// `CHIF` ‖ chain.
#[must_use]
pub fn chain_key(chain: ChainId) -> Vec<u8> {
    key(CHAIN, &[&chain.get().to_be_bytes()])
}

/// `NODE` ‖ node.
#[must_use]
pub fn node_key(node: NodeId) -> Vec<u8> {
    key(NODE, &[&node.get().to_be_bytes()])
}

/// The number behind a four-letter prefix.
///
/// # Errors
/// [`SchemaError::Key`].
pub fn parse_id<const N: usize>(key: &[u8]) -> Result<[u8; N], SchemaError> {
    let parse = || key.get(4..)?.try_into().ok();
    parse().ok_or_else(|| SchemaError::Key(show_key(key)))
}

#[cfg(test)]
mod tests;
