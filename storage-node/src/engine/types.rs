//! What the engine takes and gives: updates, states of chunks, answers and errors.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use chain::id::{ChainVersion, ChannelId, ChunkId, ClientId, TargetId, UpdateId, UpdateVersion};
use thiserror::Error;

use super::superblock::OpenError;

/// Largest chunk that the engine stores, in bytes: the largest block.
pub const MAX_CHUNK_SIZE: u64 = 64 << 20;

/// Entries in the duplicate table of one chunk. Each costs 44 bytes in the chunk's record, which
/// every update rewrites: 256 lanes are enough for a file written by one client with many lanes
/// or by many clients with few, and bound the record to 12 KiB. A new lane beyond them takes the
/// place of the one whose last update is the oldest: PROTOCOL.md, W7, says what that may cost.
pub const MAX_DUPLICATES: usize = 256;

/// Largest opaque record that may be kept for a target, in bytes.
pub const MAX_TARGET_RECORD: usize = 4096;

/// How block IO is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// io_uring where the kernel allows it, else threads; [`super::Engine::state`] tells which.
    #[default]
    Auto,
    /// io_uring, or the engine does not open.
    Uring,
    /// A few threads with positioned reads and writes.
    Threads,
}

/// How to open an engine.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory that is the disk: a mount point of its own in production.
    pub dir: PathBuf,
    /// Name of the cluster that owns the disk; another name on the disk is refused.
    pub cluster: String,
    /// The node that owns the disk; another one on the disk is refused.
    pub node: chain::id::NodeId,
    /// How block IO is done.
    pub io: IoMode,
    /// Upper bound for the bytes of blocks; `None` takes what the file system offers.
    pub capacity_bytes: Option<u64>,
}

/// What the engine found out about itself when it opened; shown in `/state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineState {
    /// Random name that the disk got when it was formatted.
    pub disk: String,
    /// Times that this disk was opened for service.
    pub incarnation: u64,
    /// `"io_uring"` or `"threads"`.
    pub io: &'static str,
    /// Why io_uring is not used, if it was wanted.
    pub io_reason: Option<String>,
    /// Whether block IO bypasses the page cache.
    pub direct: bool,
    /// Why the engine no longer serves, if so.
    pub failed: Option<String>,
}

/// Space and work of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes that blocks may take in all.
    pub capacity_bytes: u64,
    /// Bytes taken by blocks now.
    pub used_bytes: u64,
    /// Reads answered.
    pub reads: u64,
    /// Bytes answered by reads.
    pub read_bytes: u64,
    /// Updates staged.
    pub updates: u64,
    /// Bytes that the updates carried.
    pub update_bytes: u64,
    /// Bytes written into blocks; over `update_bytes` this is the write amplification of data.
    pub block_bytes: u64,
    /// Durable barriers: fdatasync of blocks, and synced writes of metadata.
    pub barriers: u64,
    /// Pages that failed verification.
    pub corrupt_pages: u64,
}

/// One update, to be made durable as the chunk's pending state.
#[derive(Clone, Debug)]
pub struct Stage {
    /// The chunk to change.
    pub chunk: ChunkId,
    /// The version that the update gives it: committed + 1, or any for [`Op::Replace`].
    pub version: UpdateVersion,
    /// The chain version under which the update came.
    pub chain_version: ChainVersion,
    /// Name of the update.
    pub id: UpdateId,
    /// Count of the file's truncations that the writer knew. An older one is refused, and the same
    /// one if it takes bytes away.
    pub truncate_generation: u64,
    /// CRC32C that all bytes of the chunk must have afterwards, if another replica has applied the
    /// update: one that makes other bytes here is refused.
    pub expected: Option<u32>,
    /// What to do.
    pub op: Op,
}

/// What an update does to a chunk.
#[derive(Clone, Debug)]
pub enum Op {
    /// Put `bytes` at `offset`; a gap behind the old end reads as zero.
    Write {
        /// First byte in the chunk.
        offset: u64,
        /// What to put there; not empty.
        bytes: Bytes,
        /// CRC32C of `bytes`, as the writer computed it: checked where they lie for the disk.
        checksum: u32,
    },
    /// Set the length; a longer chunk reads as zero behind the old end.
    Truncate {
        /// New length in bytes.
        length: u64,
    },
    /// Remove the chunk; a record of the removal stays until [`super::Engine::forget_removed`].
    Remove,
    /// Take over another replica's committed state as it is (sync).
    Replace(Replace),
}

/// The whole state of a chunk on another replica.
#[derive(Clone, Debug)]
pub struct Replace {
    /// All bytes of the chunk; empty if it was removed.
    pub bytes: Bytes,
    /// Whether the chunk is removed there.
    pub removed: bool,
    /// CRC32C of `bytes`, checked before anything is written.
    pub checksum: u32,
    /// The duplicate table there.
    pub duplicates: Duplicates,
}

/// The last update of each lane that a chunk has seen, at most [`MAX_DUPLICATES`].
pub type Duplicates = BTreeMap<(ClientId, ChannelId), Applied>;

/// What an update did, kept to answer its retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Number of the update in its lane.
    pub seq: u64,
    /// The version that it gave the chunk.
    pub version: UpdateVersion,
    /// Length of the chunk after it, in bytes.
    pub length: u64,
}

/// What a target holds of one file, as of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileView {
    /// Index and length of the chunks that were asked for, in order; none that is removed.
    pub chunks: Vec<(u64, u64)>,
    /// Index and length of the file's last chunk, wherever that is.
    pub last: Option<(u64, u64)>,
    /// Index and version of each pending update that changes what is said here.
    pub pending: Vec<(u64, UpdateVersion)>,
}

/// One state of a chunk, committed or pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkState {
    /// Version of the last update.
    pub version: UpdateVersion,
    /// Chain version at commit; for a pending state the one under which it was staged.
    pub chain_version: ChainVersion,
    /// Length in bytes.
    pub length: u64,
    /// CRC32C of all bytes.
    pub checksum: u32,
    /// Highest truncate generation that came with an update.
    pub truncate_generation: u64,
    /// Whether the chunk is removed (and this is the record of it).
    pub removed: bool,
    /// Whether this state came by [`Op::Replace`].
    pub replaced: bool,
    /// Name of the last update.
    pub id: UpdateId,
    /// The last update of each lane, this one included.
    pub duplicates: Duplicates,
}

/// What a target knows about one chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkInfo {
    /// What readers see.
    pub committed: Option<ChunkState>,
    /// What was staged and neither committed nor dropped.
    pub pending: Option<ChunkState>,
}

/// Which of a chunk's states to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The committed one.
    Committed,
    /// The pending one.
    Pending,
}

/// Bytes of a chunk, each verified against its stored checksum.
#[derive(Clone, Debug)]
pub struct Read {
    /// The bytes, fewer than asked for where the chunk ends.
    pub bytes: Bytes,
    /// The state that they belong to.
    pub state: ChunkState,
    /// Version of the chunk's pending update at the time, when the committed state was read.
    pub pending: Option<UpdateVersion>,
}

/// A chunk on a target, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The target.
    pub target: TargetId,
    /// The chunk.
    pub chunk: ChunkId,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunk {} on target {}", self.chunk, self.target)
    }
}

/// Why the engine refused or failed. Cloneable, because one failed barrier answers many updates.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The disk failed a write or a sync; nothing is served from it any more.
    #[error("engine stopped: {0}")]
    Failed(Arc<str>),
    /// The directory was refused at open.
    #[error(transparent)]
    Open(Arc<OpenError>),
    /// No block for the update; nothing was changed.
    #[error("no space for {wanted_bytes} bytes, {free_bytes} free")]
    NoSpace {
        /// Size of the block that was wanted, in bytes.
        wanted_bytes: u64,
        /// What is free, in smaller pieces.
        free_bytes: u64,
    },
    /// Stored bytes or metadata do not match their checksum, or cannot be read.
    #[error("{place} is corrupt at byte {offset}: {detail}")]
    Corrupt {
        /// Where.
        place: Place,
        /// First byte of the bad page in the chunk.
        offset: u64,
        /// What was wrong.
        detail: Arc<str>,
    },
    /// The chunk is not there, or removed, or has no such state.
    #[error("{0} not found")]
    NotFound(Place),
    /// The update is older than what is committed.
    #[error("update {asked} of {place}: {committed} is committed already")]
    AlreadyCommitted {
        /// Where.
        place: Place,
        /// Version of the update.
        asked: UpdateVersion,
        /// The committed version.
        committed: UpdateVersion,
    },
    /// An update before this one is missing.
    #[error("update {asked} of {place}: only {committed} is committed")]
    MissingUpdate {
        /// Where.
        place: Place,
        /// Version of the update.
        asked: UpdateVersion,
        /// The committed version, 0 for none.
        committed: UpdateVersion,
    },
    /// Another update is pending.
    #[error("update {pending} of {place} is pending")]
    OtherPending {
        /// Where.
        place: Place,
        /// Its version.
        pending: UpdateVersion,
    },
    /// Commit or drop of an update that is not pending.
    #[error("no pending update {asked} of {place}")]
    NotPending {
        /// Where.
        place: Place,
        /// The version asked for.
        asked: UpdateVersion,
    },
    /// The chain version is older than the one stored with the chunk.
    #[error("chain version {asked} for {place}, stored under {stored}")]
    StaleChain {
        /// Where.
        place: Place,
        /// The version that came.
        asked: ChainVersion,
        /// The version that is stored.
        stored: ChainVersion,
    },
    /// The writer did not know of a truncation, or this is its cut once more.
    #[error("truncate generation {asked} for {place}, stored {stored}")]
    StaleTruncate {
        /// Where.
        place: Place,
        /// The generation that came.
        asked: u64,
        /// The generation that is stored.
        stored: u64,
    },
    /// The bytes of the update changed on their way.
    #[error("update of {0}: its bytes do not match the checksum that came with them")]
    Damaged(Place),
    /// The update makes other bytes here than where it was applied before.
    #[error(
        "update {asked} of {place} makes bytes with checksum {made:#010x}, not {expected:#010x}"
    )]
    Diverged {
        /// Where.
        place: Place,
        /// Version of the update.
        asked: UpdateVersion,
        /// CRC32C of what it makes here.
        made: u32,
        /// CRC32C of what it made there.
        expected: u32,
    },
    /// The update is malformed: the caller's fault.
    #[error("update of {place}: {detail}")]
    BadUpdate {
        /// Where.
        place: Place,
        /// What was wrong.
        detail: &'static str,
    },
}
