use chain::id::{InodeId, NodeId};

use super::super::fuzz_open;
use super::super::superblock::{Superblock, block_header};
use super::*;

fn place() -> Place {
    let chunk = ChunkId { file: InodeId::new(77), index: 3 };
    Place { target: TargetId::new(100_010_101), chunk }
}

fn chunk_record() -> ChunkRecord {
    let lane = |n| (ClientId::new(n), ChannelId::new(9));
    let applied = Applied { seq: 4, version: UpdateVersion::new(11), length: 70_000 };
    let block = |unit| Block::new(unit, 0).unwrap();
    ChunkRecord {
        state: ChunkState {
            version: UpdateVersion::new(12),
            chain_version: ChainVersion::new(5),
            length: 70_000,
            checksum: 0xdead_beef,
            truncate_generation: 2,
            removed: false,
            replaced: true,
            id: UpdateId { client: ClientId::new(1), channel: ChannelId::new(2), seq: 3 },
            duplicates: [(lane(u128::MAX), applied), (lane(1), applied)].into(),
        },
        fragments: vec![
            Fragment { page: 0, pages: 16, block: block(1), base: 0, crc: 1 },
            Fragment { page: 17, pages: 1, block: block(7), base: 16, crc: 2 },
        ],
    }
}

fn block_record() -> BlockRecord {
    let version = UpdateVersion::new(12);
    BlockRecord { place: place(), version, base: 16, checksums: vec![1, 2, u32::MAX] }
}

#[test]
fn records_survive_encoding() {
    let key = committed_key(place());
    let value = chunk_record().encode(&key);
    assert_eq!(ChunkRecord::decode(&key, &value), Ok(chunk_record()));
    let key = block_key(Block::new(7, 0).unwrap());
    assert_eq!(BlockRecord::decode(&key, &block_record().encode(&key)), Ok(block_record()));
    let identity = Identity { disk: [3; 16], incarnation: 8 };
    assert_eq!(Identity::decode(&identity.encode()), Ok(identity));
}

#[test]
fn keys_survive_encoding_and_sort_as_chunks_do() {
    assert_eq!(parse_chunk_key(&committed_key(place())), Some(place()));
    let block = Block::new(32, 5).unwrap();
    assert_eq!(parse_block_key(&block_key(block)), Some(block));
    assert_eq!(parse_target_key(&target_key(TargetId::new(300))), Some(TargetId::new(300)));
    let next = Place { chunk: ChunkId { index: 256, ..place().chunk }, ..place() };
    assert!(pending_key(place()) < pending_key(next));
    assert_eq!(parse_chunk_key(b"c123"), None);
}

#[test]
fn every_flipped_bit_every_cut_and_a_foreign_key_are_detected() {
    let key = committed_key(place());
    let good = chunk_record().encode(&key);
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(ChunkRecord::decode(&key, &bad).is_err(), "bit {bit}");
    }
    for cut in 0..good.len() {
        assert!(ChunkRecord::decode(&key, &good[..cut]).is_err(), "cut at {cut}");
    }
    assert!(ChunkRecord::decode(&pending_key(place()), &good).is_err());
    let key = block_key(Block::new(7, 0).unwrap());
    let good = block_record().encode(&key);
    assert!(BlockRecord::decode(&block_key(Block::new(8, 0).unwrap()), &good).is_err());
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(BlockRecord::decode(&key, &bad).is_err(), "bit {bit}");
    }
}

#[test]
fn fragments_out_of_place_are_refused_though_the_checksum_is_right() {
    let key = committed_key(place());
    let refused = |change: fn(&mut ChunkRecord)| {
        let mut record = chunk_record();
        change(&mut record);
        ChunkRecord::decode(&key, &record.encode(&key)).is_err()
    };
    assert!(refused(|r| r.fragments.swap(0, 1)));
    assert!(refused(|r| r.fragments[1].page = 15));
    assert!(refused(|r| r.fragments[0].pages = 0));
    assert!(refused(|r| r.fragments[0].pages = 17));
    assert!(refused(|r| r.fragments[1].base = 18));
    assert!(refused(|r| r.fragments[1].pages = u32::MAX));
    assert!(refused(|r| r.state.length = 60_000));
    assert!(refused(|r| r.state.length = MAX_CHUNK_SIZE + 1));
    assert!(refused(|r| r.state.removed = true));
}

/// Good bytes of everything that is parsed at open, as [`fuzz_open`] takes them: values without
/// their seal behind a key.
fn good() -> Vec<Vec<u8>> {
    let key = committed_key(place());
    let payload = |value: Vec<u8>| value[1..value.len() - 4].to_vec();
    let identity = Identity { disk: [3; 16], incarnation: 8 }.encode();
    vec![
        Superblock::new("train", NodeId::new(10_001)).unwrap().encode(),
        block_header([3; 16]),
        [key.clone(), payload(chunk_record().encode(&key))].concat(),
        [key.clone(), chunk_record().encode(&key)].concat(),
        [key.clone(), payload(block_record().encode(&key))].concat(),
        [key.clone(), block_record().encode(&key)].concat(),
        pending_key(place()),
        block_key(Block::new(32, 5).unwrap()),
        target_key(TargetId::new(300)),
        payload(identity.clone()),
        identity,
        Vec::new(),
    ]
}

#[test]
fn no_bytes_make_an_open_panic_or_accept_what_it_would_not_store() {
    let good = good();
    good.iter().for_each(|bytes| fuzz_open(bytes));
    let runs = rpc::fuzz::run(|random| {
        let mut bytes = good[random.below(good.len())].clone();
        let donor = &good[random.below(good.len())];
        random.mutate(&mut bytes, donor);
        fuzz_open(&bytes);
    });
    assert!(runs > 1_000, "only {runs} runs");
}
