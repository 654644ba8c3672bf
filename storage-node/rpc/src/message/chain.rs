//! Messages between neighbours of a chain: forwards, and what brings a syncing target up to date.

use chain::id::{
    ChainId, ChainVersion, ChannelId, ChunkId, ClientId, TargetId, UpdateId, UpdateVersion,
};
use chain::replica::{Era, Identity};

use super::storage::UpdateOp;
use crate::{request, wire_fields, wire_struct};

wire_fields!(Identity { assigned: ChainVersion, version: UpdateVersion, checksum: u32 });
wire_fields!(Era { incarnation: u64, given_up: u64 });

wire_struct! {
    /// One entry of a chunk's duplicate table.
    pub struct AppliedUpdate {
        /// The client of the lane.
        pub client: ClientId,
        /// The lane.
        pub channel: ChannelId,
        /// Number of the last update in it.
        pub seq: u64,
        /// The version that it made.
        pub version: UpdateVersion,
        /// Length of the chunk after it, in bytes.
        pub length: u32,
    }
}

wire_struct! {
    /// Who asks whom, under which version of which chain: the start of every message here.
    pub struct Link {
        /// The chain.
        pub chain: ChainId,
        /// The sender's version of it: another one at the receiver is refused.
        pub chain_version: ChainVersion,
        /// The receiving target.
        pub target: TargetId,
    }
}

wire_struct! {
    /// An update on its way down. Answered when the receiver and all behind it committed it.
    pub struct Forward {
        /// Fence and receiver.
        pub link: Link,
        /// When it was sent: a syncing target refuses what comes late.
        pub era: Era,
        /// The chunk.
        pub chunk: ChunkId,
        /// Name of the update.
        pub id: UpdateId,
        /// The content that it makes.
        pub identity: Identity,
        /// The committed content that it builds on.
        pub base: Option<Identity>,
        /// Count of the file's truncations.
        pub truncate_generation: u64,
        /// The change; none if the payload is the whole chunk.
        pub op: Option<UpdateOp>,
        /// Whether the whole chunk is a removed one.
        pub removed: bool,
        /// The duplicate table that comes with a whole chunk.
        pub duplicates: Vec<AppliedUpdate>,
        /// CRC32C of the payload: that of the writing client, or that of `identity` with a whole
        /// chunk.
        pub checksum: u32,
    }
}
request!(Forward = 0x0111 -> ());

wire_struct! {
    /// Asks a syncing target what it has.
    pub struct ListChunks {
        /// Fence and receiver.
        pub link: Link,
        /// List behind this chunk; none for the start.
        pub after: Option<ChunkId>,
        /// Most chunks to list.
        pub limit: u32,
    }
}

wire_struct! {
    /// One chunk of a target.
    pub struct ListedChunk {
        /// The chunk.
        pub chunk: ChunkId,
        /// Its committed content.
        pub committed: Option<Identity>,
        /// Whether an update is pending.
        pub is_pending: bool,
    }
}

wire_struct! {
    /// Answer to [`ListChunks`].
    pub struct ChunkPage {
        /// In order of id.
        pub chunks: Vec<ListedChunk>,
        /// Whether nothing comes behind them.
        pub is_last: bool,
        /// The receiver's process: a listing of another one is worth nothing.
        pub incarnation: u64,
    }
}
request!(ListChunks = 0x0112 -> ChunkPage);

wire_struct! {
    /// The sender has no such chunk: the syncing target erases it.
    pub struct ForgetChunk {
        /// Fence and receiver.
        pub link: Link,
        /// When it was sent: a syncing target refuses what comes late.
        pub era: Era,
        /// The chunk.
        pub chunk: ChunkId,
    }
}
request!(ForgetChunk = 0x0113 -> ());

wire_struct! {
    /// The syncing target lacks nothing any more.
    pub struct SyncDone {
        /// Fence and receiver.
        pub link: Link,
        /// The process that was compared: another one refuses with `VersionGap`.
        pub incarnation: u64,
    }
}
request!(SyncDone = 0x0114 -> ());
