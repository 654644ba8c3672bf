//! What goes into a replica and what comes out of it.

use bytes::Bytes;

use crate::id::{
    ChainId, ChainVersion, ChannelId, ChunkId, ClientId, TargetId, UpdateId, UpdateVersion,
};
use crate::table::Chain;

/// Names a waiting caller; chosen by the server, given back with the answer.
pub type Token = u64;

/// Which content a chunk has: the chain version under which the head assigned the update, and the
/// update's version. One head assigns under one chain version, so the pair is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The chain version under which the head assigned the update.
    pub assigned: ChainVersion,
    /// The version that it assigned.
    pub version: UpdateVersion,
    /// CRC32C of the whole chunk after it: two copies that agree on the pair agree on this.
    pub checksum: u32,
}

impl Identity {
    /// Whether both name the same update, whatever their checksums say.
    #[must_use]
    pub fn is_same_update(&self, other: &Self) -> bool {
        (self.assigned, self.version) == (other.assigned, other.version)
    }
}

/// When a target sent a message to its successor (S7). Each process of it sends in a later era than
/// those before, and begins another whenever it gives a message up without an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Era {
    /// How often the sender's disk had been opened when its process began.
    pub incarnation: u64,
    /// How many messages that process has given up.
    pub given_up: u64,
}

/// One state of a chunk on this target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Which content.
    pub identity: Identity,
    /// Name of the update that made it.
    pub id: UpdateId,
    /// Length in bytes.
    pub length: u32,
}

/// The last update of a lane that a chunk has seen, with its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Its number in the lane.
    pub seq: u64,
    /// The version that it made.
    pub version: UpdateVersion,
    /// Length of the chunk after it, in bytes.
    pub length: u32,
}

/// What the engine knows of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// What readers see.
    pub committed: Option<State>,
    /// What is durable and not committed.
    pub pending: Option<State>,
    /// The committed state's last update of the lane that was asked for.
    pub applied: Option<Applied>,
}

/// How an update changes its chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Put `bytes` at `offset`.
    Write {
        /// First byte in the chunk.
        offset: u32,
        /// What to put there; not empty.
        bytes: Bytes,
        /// CRC32C of `bytes`, as the writing client computed it (N10).
        checksum: u32,
    },
    /// Set the length.
    Truncate {
        /// New length in bytes.
        length: u32,
    },
    /// Remove the chunk, leaving a record of the removal.
    Remove,
}

/// A client's update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its name for ever.
    pub id: UpdateId,
    /// Count of the file's truncations that the writer knew.
    pub truncate_generation: u64,
    /// What to do.
    pub change: Change,
}

/// The whole content of a chunk, for a successor that cannot apply a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// All bytes; empty if removed.
    pub bytes: Bytes,
    /// Whether the chunk is removed.
    pub removed: bool,
    /// The duplicate table (N5).
    pub duplicates: Vec<(ClientId, ChannelId, Applied)>,
}

/// What a forward carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The change alone.
    Change(Change),
    /// Everything.
    Whole(Whole),
}

/// An update on its way down the chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The chunk.
    pub chunk: ChunkId,
    /// The update's name.
    pub id: UpdateId,
    /// The content that it makes.
    pub identity: Identity,
    /// The committed content that it builds on; none for a chunk that was never written.
    pub base: Option<Identity>,
    /// Count of the file's truncations.
    pub truncate_generation: u64,
    /// What to apply.
    pub content: Content,
}

/// An update for the engine to make durable as pending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its name.
    pub id: UpdateId,
    /// The chain version under which the head assigned it.
    pub assigned: ChainVersion,
    /// Its version.
    pub version: UpdateVersion,
    /// Count of the file's truncations.
    pub truncate_generation: u64,
    /// CRC32C that the whole chunk must have afterwards (W5); none where the update is assigned.
    pub checksum: Option<u32>,
    /// What to apply.
    pub content: Content,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// W1: the chain has another version here.
    #[error("chain is at version {0}")]
    StaleChain(ChainVersion),
    /// This target does not serve the chain, or is not the one to ask.
    #[error("not serving")]
    NotServing,
    /// Updates go to the head.
    #[error("not the head of the chain")]
    NotHead,
    /// R3: the lease ran out.
    #[error("lease has run out")]
    NoLease,
    /// R2: an update is pending, and it is not known here whether it is committed.
    #[error("update {0} is pending")]
    Dirty(UpdateVersion),
    /// Too much is queued.
    #[error("too many updates are queued")]
    Busy,
    /// W7: a later update of the same lane was applied.
    #[error("update is older than the last one of its lane")]
    StaleUpdate,
    /// The syncing successor cannot apply the change to what it has.
    #[error("the whole chunk is needed")]
    NeedWhole,
    /// W2: the forward does not build on what is committed here.
    #[error("update does not follow committed version {0}")]
    Gap(UpdateVersion),
    /// W5: two valid contents disagree. A human must look.
    #[error("another content has version {0}")]
    Conflict(UpdateVersion),
    /// N10: the bytes that came are not those that were sent.
    #[error("the bytes do not match the checksum that came with them")]
    Damaged,
    /// S7: the sender has been heard since it gave a message up, and this one is from before.
    #[error("a later message came first")]
    Late,
    /// The engine refused; the number is the server's own.
    #[error("engine: {1}")]
    Engine(u32, String),
    /// No answer from the successor.
    #[error("no answer: {0}")]
    Unreachable(String),
}

/// Answer to a client's update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The version that it made; 0 if there was nothing to do.
    pub version: UpdateVersion,
    /// Length of the chunk after it, in bytes.
    pub length: u32,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The chain was published anew, and its version is durable here.
    Chain(Chain),
    /// A client's update.
    Update(Token, ChainVersion, Update),
    /// A predecessor's forward.
    Forward(Token, ChainVersion, Era, Forward),
    /// The sync worker wants the successor to hold what is committed here.
    Sync(Token, ChainVersion, ChunkId),
    /// The predecessor says that nothing is lacking.
    SyncDone(Token, ChainVersion),
    /// Effect ended: [`Effect::Load`].
    Loaded(ChunkId, u64, Result<Known, Refusal>),
    /// Effect ended: [`Effect::Stage`].
    Staged(ChunkId, u64, Result<State, Refusal>),
    /// Effect ended: [`Effect::Commit`].
    Committed(ChunkId, u64, Result<(), Refusal>),
    /// The predecessor has no such chunk (sync).
    Forget(Token, ChainVersion, Era, ChunkId),
    /// Effect ended: [`Effect::DropPending`] or [`Effect::Erase`].
    Dropped(ChunkId, u64, Result<(), Refusal>),
    /// Effect ended: [`Effect::Send`].
    Sent(ChunkId, u64, Result<(), Refusal>),
}

/// What the successor is to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// This forward.
    Forward(Forward),
    /// A forward of the chunk's whole pending content, to be read by the server.
    Pending {
        /// The committed content that it builds on.
        base: Option<Identity>,
    },
    /// A forward of the chunk's whole committed content, to be read by the server.
    Committed,
    /// The chunk does not exist here: the successor drops it.
    Forget,
}

/// What the server does for a replica. Every effect but `Answer` and `Refresh` ends in one event
/// with the same chunk and attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Look the chunk up, with the table entry of the update's lane.
    Load(ChunkId, u64, Option<UpdateId>),
    /// Make an update durable as pending. Bytes that do not match their checksum are refused
    /// ([`Refusal::Damaged`]), and so is another content than the stage says
    /// ([`Refusal::Conflict`]): before anything is durable, so that a crash leaves nothing of it.
    Stage(u64, Stage),
    /// Commit the pending update.
    Commit(ChunkId, u64, Identity),
    /// Forget the pending update.
    DropPending(ChunkId, u64, UpdateVersion),
    /// Remove every trace of the chunk, the duplicate table too: it came from a history that the
    /// chain does not have.
    Erase(ChunkId, u64),
    /// Send to the successor under this chain version, after a pause.
    Send {
        /// The chunk.
        chunk: ChunkId,
        /// Given back.
        attempt: u64,
        /// The chain.
        chain: ChainId,
        /// The version to send under.
        chain_version: ChainVersion,
        /// The era to send in.
        era: Era,
        /// To whom.
        to: TargetId,
        /// What.
        message: Message,
        /// Wait as long before, in milliseconds.
        delay_ms: u64,
    },
    /// Tell the caller.
    Answer(Token, Result<Done, Refusal>),
    /// Somebody knows a newer version of the chain: ask the manager now.
    Refresh,
}
