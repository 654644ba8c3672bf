//! Each thing that is stored is damaged in turn; no wrong byte may come back. R4.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use rocksdb::IteratorMode;

use super::*;

/// A disk with two chunks of 70 000 bytes, each of two updates, and a pending one.
async fn filled() -> Disk {
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    for index in 0..2 {
        update(&engine, chunk(index), 1, write(0, content(index))).await;
        update(&engine, chunk(index), 2, write(66_000, vec![0xee; 100])).await;
    }
    engine.stage(TARGET, stage(chunk(0), 3, write(0, vec![0xdd; 100]))).await.unwrap();
    engine.set_target_record(TARGET, b"record".to_vec()).await.unwrap();
    disk
}

fn content(index: u64) -> Vec<u8> {
    (0..70_000_u64).map(|i| ((i / 7) ^ index).to_le_bytes()[0]).collect()
}

fn expected(index: u64) -> Vec<u8> {
    let mut bytes = content(index);
    bytes[66_000..66_100].fill(0xee);
    bytes
}

/// Reads every state of every chunk; counts those that are refused as corrupt. Panics on a
/// wrong byte.
async fn refusals(engine: &Engine) -> usize {
    let mut count = 0;
    for index in 0..2 {
        for which in [Which::Committed, Which::Pending] {
            match engine.read(TARGET, chunk(index), 0, u64::MAX, which).await {
                Ok(read) if which == Which::Committed => assert!(read.bytes == expected(index)),
                Ok(read) => assert_eq!(read.bytes[100..], expected(index)[100..]),
                Err(Error::Corrupt { .. }) => count += 1,
                Err(Error::NotFound(_)) if (index, which) == (1, Which::Pending) => {}
                Err(e) => panic!("{e}"),
            }
        }
    }
    count
}

fn blocks_of(disk: &Disk) -> Vec<alloc::Block> {
    let db = store::open(&disk.dir.path().join("meta"), false).unwrap();
    let mode = IteratorMode::From(b"b", rocksdb::Direction::Forward);
    let keys = db.iterator(mode).map(|item| item.unwrap().0).take_while(|key| key[0] == b'b');
    keys.map(|key| record::parse_block_key(&key).unwrap()).collect()
}

fn blocks_file(disk: &Disk) -> File {
    File::options().read(true).write(true).open(disk.dir.path().join("blocks")).unwrap()
}

#[tokio::test]
async fn an_undamaged_disk_reads_and_verifies() {
    let disk = filled().await;
    assert_eq!(refusals(&disk.open()).await, 0);
    let report = verify(disk.dir.path()).unwrap();
    assert_eq!((report.problem_count, report.blocks, report.committed), (0, 5, 2));
}

#[tokio::test]
async fn one_flipped_bit_in_any_block_is_found_by_read_and_by_verify() {
    let disk = filled().await;
    for block in blocks_of(&disk) {
        let flip = || {
            let (file, at) = (blocks_file(&disk), block.offset() + 1234);
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        };
        flip();
        assert!(verify(disk.dir.path()).unwrap().problem_count >= 1);
        let engine = disk.open();
        assert!(refusals(&engine).await >= 1, "block at {}", block.offset());
        assert!(engine.stats().corrupt_pages >= 1);
        flip();
        assert_eq!(refusals(&engine).await, 0, "block at {}", block.offset());
    }
}

#[tokio::test]
async fn an_update_on_a_corrupt_base_is_refused_and_a_replacement_is_not() {
    let disk = filled().await;
    let engine = disk.open();
    let base = Place { target: TARGET, chunk: chunk(1) };
    let records = store::chunk(&engine.inner.db.snapshot(), base).unwrap();
    let first = records.committed.unwrap().fragments[0];
    blocks_file(&disk).write_all_at(&[0xff; 64], first.block.offset() + 5000).unwrap();
    let partial = engine.stage(TARGET, stage(chunk(1), 3, write(1, "x"))).await;
    assert!(matches!(partial, Err(Error::Corrupt { offset: 4096, .. })), "{partial:?}");
    update(&engine, chunk(1), 3, Op::Replace(replace(b"from a peer"))).await;
    assert_eq!(read(&engine, chunk(1), Which::Committed).await, b"from a peer");
}

#[tokio::test]
async fn swapped_zeroed_and_old_blocks_are_found() {
    let disk = filled().await;
    let blocks = blocks_of(&disk);
    let file = blocks_file(&disk);
    let page = |block: alloc::Block| {
        let mut page = vec![0; 4096];
        file.read_exact_at(&mut page, block.offset()).unwrap();
        page
    };
    let put = |block: alloc::Block, page: &[u8]| file.write_all_at(page, block.offset()).unwrap();
    for (a, b) in blocks.iter().zip(blocks.iter().skip(1)) {
        let (in_a, in_b) = (page(*a), page(*b));
        put(*a, &in_b);
        put(*b, &in_a);
        assert!(refusals(&disk.open()).await >= 1, "swapped");
        put(*b, &in_b);
        put(*a, &vec![0; 4096]);
        assert!(refusals(&disk.open()).await >= 1, "zeroed");
        put(*a, &in_a);
        assert_eq!(refusals(&disk.open()).await, 0, "restored");
    }
}

#[tokio::test]
async fn the_same_bytes_in_a_block_of_an_older_version_are_found() {
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    update(&engine, chunk(0), 1, write(0, vec![1; 4096])).await;
    let old = blocks_of_open(&engine);
    update(&engine, chunk(0), 2, write(0, vec![2; 4096])).await;
    let new = blocks_of_open(&engine);
    // A lost write: the new block still holds what the old one held.
    blocks_file(&disk).write_all_at(&[1; 4096], new[0].offset()).unwrap();
    assert_ne!(old, new);
    let answer = engine.read(TARGET, chunk(0), 0, 10, Which::Committed).await;
    assert!(matches!(answer, Err(Error::Corrupt { offset: 0, .. })));
}

fn blocks_of_open(engine: &Engine) -> Vec<alloc::Block> {
    let place = Place { target: TARGET, chunk: chunk(0) };
    let records = store::chunk(&engine.inner.db.snapshot(), place).unwrap();
    records.committed.unwrap().fragments.iter().map(|f| f.block).collect()
}

#[tokio::test]
async fn damage_in_any_metadata_value_is_refused_at_open_or_at_read() {
    let disk = filled().await;
    let meta = disk.dir.path().join("meta");
    let all: Vec<_> = {
        let db = store::open(&meta, false).unwrap();
        db.iterator(IteratorMode::From(b"", rocksdb::Direction::Forward))
            .map(|item| item.unwrap())
            .collect()
    };
    let kinds: std::collections::BTreeSet<u8> = all.iter().map(|(key, _)| key[0]).collect();
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), b"bcipt");
    for (key, good) in &all {
        for at in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.to_vec();
            bad[at] ^= 0x10;
            let db = store::open(&meta, false).unwrap();
            db.put(key, &bad).unwrap();
            drop(db);
            let found_offline =
                verify(disk.dir.path()).map_or(true, |report| report.problem_count > 0);
            assert!(found_offline || key[0] == b't', "verify misses {key:?} at {at}");
            match Engine::open(&disk.options) {
                Err(Error::Open(e)) => assert!(matches!(*e, OpenError::Mismatch { .. }), "{e}"),
                Err(e) => panic!("{e}"),
                Ok(engine) if key[0] == b't' => {
                    assert!(matches!(engine.targets(), Err(Error::Failed(_))));
                }
                Ok(engine) => assert!(refusals(&engine).await >= 1, "{key:?} at {at}"),
            }
            // The identity changes with each open that got far enough.
            let db = store::open(&meta, false).unwrap();
            if key[0] != b'i' {
                db.put(key, good).unwrap();
                continue;
            }
            drop(db);
            let superblock = superblock::Superblock::load(disk.dir.path()).unwrap().unwrap();
            let (disk_name, incarnation) = (superblock.disk, superblock.incarnation);
            let identity = record::Identity { disk: disk_name, incarnation };
            store::open(&meta, false).unwrap().put(key, identity.encode()).unwrap();
        }
    }
    assert_eq!(refusals(&disk.open()).await, 0);
}

#[tokio::test]
async fn damage_in_the_header_of_the_block_file_is_refused() {
    let disk = filled().await;
    let good = fs::read(disk.dir.path().join("blocks")).unwrap()[..4096].to_vec();
    for at in [0, 20, 45, 4000, 4095] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        blocks_file(&disk).write_all_at(&bad, 0).unwrap();
        assert!(disk.refusal().contains("header of the block file"), "byte {at}");
        assert!(verify(disk.dir.path()).is_err());
    }
}
