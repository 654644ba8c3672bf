//! What a mutating runner calls: everything that is parsed when a disk is opened.

use super::record::{self, BlockRecord, ChunkRecord, Identity};
use super::superblock::{self, Superblock};

/// Parses `bytes` as superblock, block header, and each kind of key and value. Never panics;
/// what it accepts encodes to the same bytes again.
pub fn fuzz_open(bytes: &[u8]) {
    // Once as they are, to reach the checksum, and once sealed, to reach what is behind it.
    for page in [bytes.to_vec(), superblock::seal(bytes.to_vec())] {
        if let Ok(superblock) = Superblock::decode(&page) {
            assert_eq!(superblock.encode(), page, "superblock");
        }
        if let Ok(disk) = superblock::parse_block_header(&page) {
            // The bytes between magic and name are not read, so only the name must survive.
            assert_eq!(superblock::parse_block_header(&superblock::block_header(disk)), Ok(disk));
        }
    }
    let (key, payload) = bytes.split_at(bytes.len().min(25));
    if let Some(place) = record::parse_chunk_key(key) {
        assert_eq!(record::committed_key(place).get(1..), key.get(1..), "key of a chunk");
    }
    if let Some(block) = record::parse_block_key(key) {
        assert_eq!(record::block_key(block).get(1..), key.get(1..), "key of a block");
    }
    if let Some(target) = record::parse_target_key(key) {
        assert_eq!(record::target_key(target).get(1..), key.get(1..), "key of a target");
    }
    for value in [payload.to_vec(), record::seal(key, payload)] {
        if let Ok(record) = ChunkRecord::decode(key, &value) {
            assert_eq!(ChunkRecord::decode(key, &record.encode(key)), Ok(record), "chunk");
        }
        if let Ok(record) = BlockRecord::decode(key, &value) {
            assert_eq!(record.encode(key), value, "block");
        }
    }
    if let Ok(identity) = Identity::decode(bytes) {
        assert_eq!(identity.encode(), bytes, "identity");
    }
    let sealed = record::seal(record::IDENTITY_KEY, bytes);
    if let Ok(identity) = Identity::decode(&sealed) {
        assert_eq!(identity.encode(), sealed, "identity");
    }
}
