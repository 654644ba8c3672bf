//! Identities and versions. Newtypes without `From<u64>`, so that one cannot stand in for another.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name($raw);

        impl $name {
            /// Wraps a raw value read from the wire, a disk or a manifest.
            #[must_use]
            pub const fn new(raw: $raw) -> Self {
                Self(raw)
            }

            /// The raw value, for encoding and display.
            #[must_use]
            pub const fn get(self) -> $raw {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// One storage server, for ever: never reused, also after the server is gone.
    NodeId(u32)
);
id!(
    /// One replica's home on one disk: `node * 10 000 + (disk + 1) * 100 + slot + 1`.
    TargetId(u64)
);
id!(
    /// One chain of targets.
    ChainId(u32)
);
id!(
    /// Fencing number of one chain: grows by one at each change of its target list or states.
    ChainVersion(u64)
);
id!(
    /// Number of an update of one chunk, assigned by the head, 1 for the first.
    UpdateVersion(u64)
);
id!(
    /// Number of the routing table as a whole: grows at each change of any chain or address.
    RoutingVersion(u64)
);
id!(
    /// A file, directory or symbolic link.
    InodeId(u64)
);
id!(
    /// A client for the life of its process, chosen at random.
    ClientId(u128)
);
id!(
    /// One of a client's lanes: at most one update is under way in a lane at a time.
    ChannelId(u32)
);

impl NodeId {
    /// The target in `slot` of `disk` on this node.
    #[must_use]
    pub const fn target(self, disk: u32, slot: u32) -> TargetId {
        TargetId(self.0 as u64 * 10_000 + (disk as u64 + 1) * 100 + slot as u64 + 1)
    }
}

impl TargetId {
    /// The node that holds this target.
    #[must_use]
    pub const fn node(self) -> NodeId {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "built from a 32-bit node id: the quotient fits"
        )]
        NodeId((self.0 / 10_000) as u32)
    }

    /// The position of its disk among the node's disks, from 0; `None` for a malformed id.
    #[must_use]
    pub const fn disk(self) -> Option<u32> {
        ((self.0 / 100 % 100) as u32).checked_sub(1)
    }
}

impl ChainVersion {
    /// What a target that holds no copy reports: no chain ever has this version.
    pub const NONE: Self = Self(0);

    /// The version of a chain that nobody has served yet.
    pub const NEWBORN: Self = Self(1);

    /// The version after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl UpdateVersion {
    /// The version after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A chunk: the unit that a client addresses. Chunk `index` of a file covers the bytes
/// `index * chunk_size .. (index + 1) * chunk_size`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    /// The file that the chunk belongs to.
    pub file: InodeId,
    /// Position of the chunk in the file, from 0.
    pub index: u64,
}

impl ChunkId {
    /// Size of the encoded form in bytes.
    pub const ENCODED_SIZE: usize = 16;

    /// Big-endian (file, index), so that the byte order of keys is the order of chunks.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::ENCODED_SIZE] {
        let raw = u128::from(self.file.get()) << 64 | u128::from(self.index);
        raw.to_be_bytes()
    }

    /// The inverse of [`ChunkId::to_bytes`].
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::ENCODED_SIZE]) -> Self {
        let raw = u128::from_be_bytes(bytes);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of a 128-bit number")]
        Self { file: InodeId::new((raw >> 64) as u64), index: raw as u64 }
    }
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkId({}.{})", self.file, self.index)
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.file, self.index)
    }
}

/// Names one update for ever: a retry carries the same id and is applied at most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UpdateId {
    /// The client that asked.
    pub client: ClientId,
    /// The client's lane.
    pub channel: ChannelId,
    /// Grows by one with each new update in the lane, from 1.
    pub seq: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_id_names_its_node_and_disk() {
        let target = NodeId::new(10_001).target(2, 5);
        assert_eq!(target, TargetId::new(100_010_306));
        assert_eq!(target.node(), NodeId::new(10_001));
        assert_eq!(target.disk(), Some(2));
        assert_eq!(TargetId::new(7).disk(), None);
    }

    #[test]
    fn chunk_id_keeps_its_order_in_bytes() {
        let chunk = |file, index| ChunkId { file: InodeId::new(file), index };
        let sorted = [chunk(1, 0), chunk(1, 255), chunk(1, 256), chunk(2, 0), chunk(u64::MAX, 1)];
        let bytes: Vec<_> = sorted.iter().map(|c| c.to_bytes()).collect();
        assert!(bytes.is_sorted());
        assert_eq!(sorted.map(|c| ChunkId::from_bytes(c.to_bytes())), sorted);
    }
}
