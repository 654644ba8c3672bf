//! Messages that a storage server answers: to clients, and to its neighbours in a chain.

use chain::id::{ChainId, ChainVersion, ChunkId, InodeId, TargetId, UpdateId, UpdateVersion};

use crate::codec::{DecodeError, Reader, Wire};
use crate::{request, wire_struct};

wire_struct! {
    /// Reads bytes of one chunk at a serving target. The payload of the answer is the bytes, as
    /// many as the chunk has in the range: none for a chunk that was never written.
    pub struct Read {
        /// The chain of the chunk.
        pub chain: ChainId,
        /// The version that the client's routing table has.
        pub chain_version: ChainVersion,
        /// The target that should answer.
        pub target: TargetId,
        /// The chunk.
        pub chunk: ChunkId,
        /// First byte in the chunk.
        pub offset: u32,
        /// Most bytes wanted.
        pub length: u32,
        /// Whether the committed version will do while a newer one is pending.
        pub relaxed: bool,
    }
}

wire_struct! {
    /// Answer to [`Read`].
    pub struct ReadDone {
        /// Version of the bytes; 0 for a chunk that was never written.
        pub version: UpdateVersion,
        /// Length of the whole chunk in bytes.
        pub chunk_length: u32,
        /// CRC32C of the payload, computed from verified bytes.
        pub checksum: u32,
    }
}
request!(Read = 0x0101 -> ReadDone);

/// How an update changes its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UpdateOp {
    /// The payload replaces the bytes from `offset` on; a gap before it reads as zero.
    Write {
        /// First byte in the chunk.
        offset: u32,
    },
    /// The chunk ends at `length`; a longer length extends it with zeros.
    Truncate {
        /// The new length in bytes.
        length: u32,
    },
    /// The chunk is gone.
    Remove,
}

impl Wire for UpdateOp {
    const MIN_SIZE: usize = 5;
    fn encode(&self, out: &mut bytes::BytesMut) {
        let (tag, value) = match *self {
            Self::Write { offset } => (1u8, offset),
            Self::Truncate { length } => (2, length),
            Self::Remove => (3, 0),
        };
        tag.encode(out);
        value.encode(out);
    }
    fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
        let (tag, value) = (u8::decode(from)?, u32::decode(from)?);
        match (tag, value) {
            (1, offset) => Ok(Self::Write { offset }),
            (2, length) => Ok(Self::Truncate { length }),
            (3, 0) => Ok(Self::Remove),
            _ => Err(DecodeError::Unknown { field: "UpdateOp", value: tag.into() }),
        }
    }
}

wire_struct! {
    /// Changes one chunk, at the head of its chain. Answered when every serving target holds the
    /// change durably.
    pub struct Update {
        /// The chain of the chunk.
        pub chain: ChainId,
        /// The version that the client's routing table has.
        pub chain_version: ChainVersion,
        /// The head.
        pub target: TargetId,
        /// The chunk.
        pub chunk: ChunkId,
        /// Names the update: a retry carries the same id.
        pub id: UpdateId,
        /// The truncate generation of the file that the client knows: an update of an older
        /// generation than the chunk's is refused, and so is one that takes bytes away from a
        /// chunk of the same.
        pub truncate_generation: u64,
        /// The change.
        pub op: UpdateOp,
        /// Bound of the chunk's length in bytes, from the file's layout.
        pub chunk_size: u32,
        /// CRC32C of the payload, computed by the writing client.
        pub checksum: u32,
    }
}

wire_struct! {
    /// Answer to [`Update`].
    pub struct UpdateDone {
        /// The version that the update made.
        pub version: UpdateVersion,
        /// Length of the chunk after it, in bytes.
        pub chunk_length: u32,
    }
}
request!(Update = 0x0102 -> UpdateDone);

wire_struct! {
    /// Asks which chunks of a file a chain holds, at a serving target.
    pub struct QueryFile {
        /// The chain.
        pub chain: ChainId,
        /// The version that the client's routing table has.
        pub chain_version: ChainVersion,
        /// The target that should answer.
        pub target: TargetId,
        /// The file.
        pub file: InodeId,
        /// Chunks with this index or a later one.
        pub from_index: u64,
        /// Most chunks to name.
        pub limit: u32,
    }
}

wire_struct! {
    /// One chunk of a file.
    pub struct ChunkLength {
        /// Position in the file.
        pub index: u64,
        /// Committed length in bytes.
        pub length: u32,
    }
}

wire_struct! {
    /// Answer to [`QueryFile`].
    pub struct FileChunks {
        /// In order of index, from the first one asked for.
        pub chunks: Vec<ChunkLength>,
        /// The last chunk that this chain holds of the file.
        pub last: Option<ChunkLength>,
    }
}
request!(QueryFile = 0x0103 -> FileChunks);
