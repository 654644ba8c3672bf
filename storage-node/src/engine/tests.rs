//! The engine as its callers see it. Each test of the macro runs on io_uring (where the kernel
//! allows it) and on threads.

mod corruption;
mod crash;
mod disk;
mod model;
mod race;

use bytes::Bytes;
use chain::id::{ChannelId, ClientId, InodeId, NodeId, UpdateId};
use tempfile::TempDir;

use super::*;

const KIB: u64 = 1024;
const TARGET: TargetId = TargetId::new(100_010_101);

/// A directory and how to open it.
struct Disk {
    dir: TempDir,
    options: Options,
}

impl Disk {
    /// `LAMPYRIS_IO` says what stands for [`IoMode::Auto`]: `uring` also fails where the kernel refuses it.
    fn new(io: IoMode) -> Self {
        let asked = std::env::var("LAMPYRIS_IO").unwrap_or_default();
        let io = match (io, asked.as_str()) {
            (IoMode::Auto, "uring") => IoMode::Uring,
            (IoMode::Auto, "threads") => IoMode::Threads,
            (io, _) => io,
        };
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            dir: dir.path().to_owned(),
            cluster: "train".to_owned(),
            node: NodeId::new(10_001),
            io,
            capacity_bytes: Some(8 << 20),
        };
        Self { dir, options }
    }

    fn open(&self) -> Engine {
        Engine::open(&self.options).unwrap()
    }

    fn refusal(&self) -> String {
        Engine::open(&self.options).unwrap_err().to_string()
    }
}

fn chunk(index: u64) -> ChunkId {
    ChunkId { file: InodeId::new(7), index }
}

fn version(raw: u64) -> UpdateVersion {
    UpdateVersion::new(raw)
}

fn chain_version(raw: u64) -> ChainVersion {
    ChainVersion::new(raw)
}

fn id(lane: u32, seq: u64) -> UpdateId {
    UpdateId { client: ClientId::new(5), channel: ChannelId::new(lane), seq }
}

fn stage(chunk: ChunkId, raw: u64, op: Op) -> Stage {
    Stage {
        chunk,
        version: version(raw),
        chain_version: chain_version(1),
        id: id(0, raw),
        // Each update of a test comes after a truncation of its own, so that any may cut.
        truncate_generation: raw,
        expected: None,
        op,
    }
}

fn write(offset: u64, bytes: impl Into<Bytes>) -> Op {
    let bytes = bytes.into();
    Op::Write { offset, checksum: crc32c::crc32c(&bytes), bytes }
}

fn replace(bytes: &[u8]) -> Replace {
    let (bytes, checksum) = (Bytes::copy_from_slice(bytes), crc32c::crc32c(bytes));
    Replace { bytes, removed: false, checksum, duplicates: Duplicates::new() }
}

async fn update(engine: &Engine, chunk: ChunkId, raw: u64, op: Op) -> ChunkState {
    engine.stage(TARGET, stage(chunk, raw, op)).await.unwrap();
    engine.commit(TARGET, chunk, version(raw), chain_version(1)).await.unwrap()
}

async fn read(engine: &Engine, chunk: ChunkId, which: Which) -> Vec<u8> {
    engine.read(TARGET, chunk, 0, u64::MAX, which).await.unwrap().bytes.to_vec()
}

macro_rules! on_both_io_modes {
    ($($(#[$doc:meta])* async fn $name:ident($io:ident: IoMode) $body:block)*) => {
        $(async fn $name($io: IoMode) $body)*
        mod uring {
            $(#[tokio::test] async fn $name() { super::$name(super::IoMode::Auto).await; })*
        }
        mod threads {
            $(#[tokio::test] async fn $name() { super::$name(super::IoMode::Threads).await; })*
        }
    };
}

on_both_io_modes! {
    async fn a_staged_update_is_pending_until_it_is_committed(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, "old bytes")).await;
        let staged = engine.stage(TARGET, stage(chunk(0), 2, write(4, "!"))).await.unwrap();
        assert_eq!((staged.version, staged.length), (version(2), 9));
        assert_eq!(staged.checksum, crc32c::crc32c(b"old !ytes"));
        let committed = engine.read(TARGET, chunk(0), 4, 100, Which::Committed).await.unwrap();
        assert_eq!((&committed.bytes[..], committed.pending), (&b"bytes"[..], Some(version(2))));
        assert_eq!(read(&engine, chunk(0), Which::Pending).await, b"old !ytes");
        engine.commit(TARGET, chunk(0), version(2), chain_version(3)).await.unwrap();
        let committed = engine.read(TARGET, chunk(0), 0, 6, Which::Committed).await.unwrap();
        assert_eq!((&committed.bytes[..], committed.pending), (&b"old !y"[..], None));
        assert_eq!(committed.state.chain_version, chain_version(3));
        let gone = engine.read(TARGET, chunk(0), 0, 1, Which::Pending).await;
        assert!(matches!(gone, Err(Error::NotFound(_))));
    }

    async fn only_the_next_version_is_accepted(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        let answer = engine.stage(TARGET, stage(chunk(0), 2, write(0, "a"))).await;
        assert!(matches!(answer, Err(Error::MissingUpdate { .. })));
        update(&engine, chunk(0), 1, write(0, "a")).await;
        let answer = engine.stage(TARGET, stage(chunk(0), 1, write(0, "b"))).await;
        assert!(matches!(answer, Err(Error::AlreadyCommitted { .. })));
        engine.stage(TARGET, stage(chunk(0), 2, write(0, "b"))).await.unwrap();
        let other = Stage { id: id(9, 1), ..stage(chunk(0), 2, write(0, "c")) };
        let answer = engine.stage(TARGET, other).await;
        assert!(matches!(answer, Err(Error::OtherPending { .. })));
        let answer = engine.commit(TARGET, chunk(0), version(3), chain_version(1)).await;
        assert!(matches!(answer, Err(Error::NotPending { .. })));
        let answer = engine.commit(TARGET, chunk(0), version(2), chain_version(0)).await;
        assert!(matches!(answer, Err(Error::StaleChain { .. })));
        assert_eq!(read(&engine, chunk(0), Which::Committed).await, b"a");
    }

    async fn the_same_update_again_answers_as_before_under_the_later_chain(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        let first = engine.stage(TARGET, stage(chunk(0), 1, write(0, "a"))).await.unwrap();
        let again = Stage { chain_version: chain_version(4), ..stage(chunk(0), 1, write(0, "a")) };
        let second = engine.stage(TARGET, again).await.unwrap();
        let raised = ChunkState { chain_version: chain_version(4), ..first };
        assert_eq!(second, raised);
        let stale = engine.stage(TARGET, stage(chunk(0), 1, write(0, "a"))).await;
        assert!(matches!(stale, Err(Error::StaleChain { .. })));
        drop(engine);
        let engine = disk.open();
        assert_eq!(engine.meta(TARGET, chunk(0)).unwrap().pending, Some(raised.clone()));
        for _ in 0..2 {
            let done = engine.commit(TARGET, chunk(0), version(1), chain_version(4)).await;
            assert_eq!(done.unwrap(), raised);
        }
    }

    async fn a_dropped_update_leaves_the_committed_bytes_and_no_space_taken(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, vec![1; 300 << 10])).await;
        let used = engine.stats().used_bytes;
        engine.stage(TARGET, stage(chunk(0), 2, write(0, vec![2; 300 << 10]))).await.unwrap();
        assert!(engine.stats().used_bytes > used);
        engine.drop_pending(TARGET, chunk(0), version(2)).await.unwrap();
        engine.drop_pending(TARGET, chunk(0), version(2)).await.unwrap();
        assert_eq!(engine.stats().used_bytes, used);
        assert_eq!(read(&engine, chunk(0), Which::Committed).await, vec![1; 300 << 10]);
        engine.stage(TARGET, Stage { id: id(3, 3), ..stage(chunk(0), 2, write(0, "x")) }).await.unwrap();
    }

    async fn gaps_and_lengthened_chunks_read_as_zero(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, vec![9; 5000])).await;
        update(&engine, chunk(0), 2, Op::Truncate { length: 4500 }).await;
        update(&engine, chunk(0), 3, Op::Truncate { length: 200_000 }).await;
        let state = update(&engine, chunk(0), 4, write(300_000, vec![8; 10])).await;
        let mut expected = vec![0; 300_010];
        expected[..4500].fill(9);
        expected[300_000..].fill(8);
        assert_eq!(read(&engine, chunk(0), Which::Committed).await, expected);
        assert_eq!(state.checksum, crc32c::crc32c(&expected));
        let part = engine.read(TARGET, chunk(0), 4499, 2, Which::Committed).await.unwrap();
        assert_eq!(&part.bytes[..], [9, 0]);
    }

    async fn a_late_write_of_an_older_truncate_generation_is_refused(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, "abc")).await;
        let cut = Stage { truncate_generation: 2, ..stage(chunk(0), 2, Op::Truncate { length: 1 }) };
        engine.stage(TARGET, cut).await.unwrap();
        engine.commit(TARGET, chunk(0), version(2), chain_version(1)).await.unwrap();
        let late = Stage { truncate_generation: 1, ..stage(chunk(0), 3, write(2, "z")) };
        let answer = engine.stage(TARGET, late).await;
        assert!(matches!(answer, Err(Error::StaleTruncate { asked: 1, stored: 2, .. })));
        assert_eq!(read(&engine, chunk(0), Which::Committed).await, b"a");
    }

    async fn a_late_cut_that_would_take_what_came_after_it_is_refused(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        let at = |raw, truncate_generation, op| {
            Stage { truncate_generation, ..stage(chunk(0), raw, op) }
        };
        engine.stage(TARGET, at(1, 2, write(0, "newer"))).await.unwrap();
        engine.commit(TARGET, chunk(0), version(1), chain_version(1)).await.unwrap();
        // The same cut, sent a second time, bears the generation of what was written after it.
        for (asked, op) in [
            (1, Op::Remove),
            (2, Op::Remove),
            (1, Op::Truncate { length: 1 }),
            (2, Op::Truncate { length: 1 }),
            (1, Op::Truncate { length: 9 }),
        ] {
            let answer = engine.stage(TARGET, at(2, asked, op.clone())).await;
            assert!(
                matches!(answer, Err(Error::StaleTruncate { asked: a, stored: 2, .. }) if a == asked),
                "{op:?}: {answer:?}"
            );
            assert_eq!(read(&engine, chunk(0), Which::Committed).await, b"newer");
        }
        // What takes nothing away is in time, and so is a cut that came after.
        for (raw, generation, op) in [
            (2, 2, Op::Truncate { length: 5 }),
            (3, 2, Op::Truncate { length: 6 }),
            (4, 3, Op::Truncate { length: 2 }),
            (5, 4, Op::Remove),
            (6, 4, Op::Remove),
        ] {
            let state = engine.stage(TARGET, at(raw, generation, op)).await.unwrap();
            assert_eq!(state.truncate_generation, generation);
            engine.commit(TARGET, chunk(0), version(raw), chain_version(1)).await.unwrap();
        }
        // A removed chunk remembers its generation.
        let late = engine.stage(TARGET, at(7, 3, write(0, "z"))).await;
        assert!(matches!(late, Err(Error::StaleTruncate { asked: 3, stored: 4, .. })), "{late:?}");
    }

    async fn a_removal_is_remembered_until_it_is_forgotten(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, "abc")).await;
        let state = update(&engine, chunk(0), 2, Op::Remove).await;
        assert!(state.removed && state.duplicates.len() == 1);
        let gone = engine.read(TARGET, chunk(0), 0, 1, Which::Committed).await;
        assert!(matches!(gone, Err(Error::NotFound(_))));
        assert_eq!(engine.list(TARGET, None, 9).unwrap().len(), 1);
        let early = engine.forget_removed(TARGET, chunk(0), version(1)).await;
        assert!(matches!(early, Err(Error::BadUpdate { .. })));
        engine.forget_removed(TARGET, chunk(0), version(2)).await.unwrap();
        assert_eq!(engine.meta(TARGET, chunk(0)).unwrap(), ChunkInfo::default());
        // The barrier of the last change let the space of the removed bytes go.
        assert_eq!(engine.stats().used_bytes, 0);
    }

    async fn a_replacement_takes_over_version_bytes_and_duplicates(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, "mine")).await;
        engine.stage(TARGET, stage(chunk(0), 2, write(0, "lost"))).await.unwrap();
        let applied = Applied { seq: 8, version: version(40), length: 6 };
        let lane = (ClientId::new(5), ChannelId::new(3));
        let whole = Replace { duplicates: [(lane, applied)].into(), ..replace(b"theirs") };
        let bad = Replace { checksum: 1, ..whole.clone() };
        let answer = engine.stage(TARGET, stage(chunk(0), 41, Op::Replace(bad))).await;
        assert!(matches!(answer, Err(Error::Damaged(_))));
        engine.stage(TARGET, stage(chunk(0), 41, Op::Replace(whole.clone()))).await.unwrap();
        engine.commit(TARGET, chunk(0), version(41), chain_version(2)).await.unwrap();
        let info = engine.meta(TARGET, chunk(0)).unwrap();
        assert_eq!(info.pending, None);
        let state = info.committed.unwrap();
        assert_eq!((state.version, state.duplicates), (version(41), whole.duplicates));
        assert_eq!(read(&engine, chunk(0), Which::Committed).await, b"theirs");
        let back = Stage { chain_version: chain_version(2), ..stage(chunk(0), 7, Op::Replace(replace(b""))) };
        engine.stage(TARGET, back).await.unwrap();
        engine.commit(TARGET, chunk(0), version(7), chain_version(2)).await.unwrap();
        assert_eq!(read(&engine, chunk(0), Which::Committed).await, b"");
    }

    async fn a_full_duplicate_table_forgets_the_lane_that_was_silent_longest(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        let most = u64::try_from(MAX_DUPLICATES).unwrap();
        let lane = |n: u64| (ClientId::new(u128::from(n)), ChannelId::new(0));
        let entry = |n: u64| (lane(n), Applied { seq: 1, version: version(n), length: 1 });
        let full: Duplicates = (1..=most).map(entry).collect();
        let whole = Replace { duplicates: full, ..replace(b"a") };
        let at = |n: u64, client: u64, seq: u64| {
            let id = UpdateId { client: lane(client).0, channel: lane(client).1, seq };
            Stage { id, ..stage(chunk(0), n, write(0, "b")) }
        };
        update(&engine, chunk(0), most, Op::Replace(whole)).await;
        // Client 1 speaks again: it is the newest now, and client 2 the oldest.
        engine.stage(TARGET, at(most + 1, 1, 2)).await.unwrap();
        engine.commit(TARGET, chunk(0), version(most + 1), chain_version(1)).await.unwrap();
        let state = engine.stage(TARGET, at(most + 2, 9_999, 1)).await.unwrap();
        assert_eq!(state.duplicates.len(), MAX_DUPLICATES);
        assert!(!state.duplicates.contains_key(&lane(2)));
        let kept = [(1, 2, most + 1), (3, 1, 3), (9_999, 1, most + 2)];
        for (client, seq, at) in kept {
            let expected = Applied { seq, version: version(at), length: 1 };
            assert_eq!(state.duplicates.get(&lane(client)), Some(&expected));
        }
    }

    async fn a_write_whose_bytes_changed_on_the_way_is_refused(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, vec![1; 200_000])).await;
        let (before, used) = (engine.meta(TARGET, chunk(0)).unwrap(), engine.stats().used_bytes);
        for offset in [0, 5, 70_000] {
            let mut bytes = vec![2; 100_000];
            let checksum = crc32c::crc32c(&bytes);
            bytes[99_999] ^= 0x10;
            let op = Op::Write { offset, bytes: bytes.into(), checksum };
            let answer = engine.stage(TARGET, stage(chunk(0), 2, op)).await;
            assert!(matches!(answer, Err(Error::Damaged(_))), "{answer:?}");
        }
        assert_eq!(engine.meta(TARGET, chunk(0)).unwrap(), before);
        assert_eq!(engine.stats().used_bytes, used);
        update(&engine, chunk(0), 2, write(70_000, vec![2; 100_000])).await;
    }

    async fn an_update_that_makes_other_bytes_than_elsewhere_leaves_nothing(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, "old bytes")).await;
        let (before, used) = (engine.meta(TARGET, chunk(0)).unwrap(), engine.stats().used_bytes);
        let expected = Some(crc32c::crc32c(b"new bytes"));
        let asked = |op| Stage { expected, ..stage(chunk(0), 2, op) };
        for op in [
            write(0, "now"),
            Op::Truncate { length: 3 },
            Op::Truncate { length: 90_000 },
            Op::Remove,
            Op::Replace(replace(b"not bytes")),
        ] {
            let answer = engine.stage(TARGET, asked(op.clone())).await;
            assert!(matches!(answer, Err(Error::Diverged { .. })), "{op:?}: {answer:?}");
            assert_eq!(engine.meta(TARGET, chunk(0)).unwrap(), before);
        }
        assert_eq!(engine.stats().used_bytes, used);
        // Nor does what is pending answer for another content.
        let right = asked(write(0, "new"));
        let pending = engine.stage(TARGET, right.clone()).await.unwrap();
        let other = Stage { expected: Some(1), ..right.clone() };
        let answer = engine.stage(TARGET, other).await;
        assert!(matches!(answer, Err(Error::Diverged { .. })), "{answer:?}");
        assert_eq!(engine.stage(TARGET, right).await.unwrap(), pending);
    }

    async fn a_file_is_told_by_its_chunks_and_its_last_one(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        let file = |from, limit| engine.file(TARGET, InodeId::new(7), from, limit).unwrap();
        assert_eq!(file(0, 9), FileView::default());
        let of = |file, index| ChunkId { file: InodeId::new(file), index };
        let longest = u64::MAX;
        for (of_file, index, length) in
            [(7, 0, 10), (7, 3, 11), (7, 8, 12), (7, longest, 13), (6, longest, 1), (8, 0, 1)]
        {
            update(&engine, of(of_file, index), 1, write(0, vec![1; length])).await;
        }
        assert_eq!(file(0, 9).chunks, [(0, 10), (3, 11), (8, 12), (longest, 13)]);
        for (from, limit) in [(0, 1), (4, 9), (longest, 9), (0, 0)] {
            assert_eq!(file(from, limit).last, Some((longest, 13)), "from {from}, {limit}");
        }
        update(&engine, of(7, longest), 2, Op::Remove).await;
        update(&engine, of(7, 3), 2, Op::Remove).await;
        let last = Some((8, 12));
        assert_eq!(file(1, 1), FileView { chunks: vec![(8, 12)], last, pending: vec![] });
        assert_eq!(file(longest, 9), FileView { chunks: vec![], last, pending: vec![] });
        // Pending: what was asked for, and what may move the end.
        for (index, raw) in [(0, 2), (3, 3), (8, 2), (9, 1)] {
            engine.stage(TARGET, stage(of(7, index), raw, write(0, "x"))).await.unwrap();
        }
        let pending = |from, limit| -> Vec<u64> {
            file(from, limit).pending.into_iter().map(|(index, _)| index).collect()
        };
        assert_eq!(pending(0, 9), [0, 3, 8, 9]);
        assert_eq!(pending(0, 1), [0, 8, 9]);
        assert_eq!(pending(1, 9), [3, 8, 9]);
        assert_eq!(pending(longest, 9), [8, 9]);
        update(&engine, of(6, 0), 1, Op::Remove).await;
        let other = |n| engine.file(TARGET, InodeId::new(n), 0, 9).unwrap();
        assert_eq!(other(6).last, Some((longest, 1)));
        assert_eq!((other(8).chunks, other(8).last), (vec![(0, 1)], Some((0, 1))));
    }

    async fn chunks_are_listed_in_order_and_in_pages(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        for index in [300, 2, 1] {
            update(&engine, chunk(index), 1, write(0, "a")).await;
        }
        engine.stage(TARGET, stage(chunk(200), 1, write(0, "b"))).await.unwrap();
        let other = TargetId::new(TARGET.get() + 1);
        engine.stage(other, stage(chunk(0), 1, write(0, "c"))).await.unwrap();
        let (mut from, mut seen) = (None, Vec::new());
        loop {
            let page = engine.list(TARGET, from, 2).unwrap();
            seen.extend(page.iter().map(|(chunk, info)| (chunk.index, info.committed.is_some())));
            from = page.last().map(|(chunk, _)| *chunk);
            if page.len() < 2 {
                break;
            }
        }
        assert_eq!(seen, [(1, true), (2, true), (200, false), (300, true)]);
        assert_eq!(engine.list(other, None, 9).unwrap().len(), 1);
    }

    async fn everything_is_there_after_reopening(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, vec![3; 100_000])).await;
        let pending = engine.stage(TARGET, stage(chunk(0), 2, write(5, "pending"))).await.unwrap();
        engine.set_target_record(TARGET, b"chain version 6".to_vec()).await.unwrap();
        let (used, state) = (engine.stats().used_bytes, engine.state());
        drop(engine);
        let engine = disk.open();
        assert_eq!(engine.stats().used_bytes, used);
        assert_eq!((&engine.state().disk, engine.state().incarnation), (&state.disk, 2));
        assert_eq!(read(&engine, chunk(0), Which::Committed).await, vec![3; 100_000]);
        assert_eq!(engine.meta(TARGET, chunk(0)).unwrap().pending, Some(pending));
        assert_eq!(engine.targets().unwrap(), [(TARGET, b"chain version 6".to_vec())]);
        drop(engine);
        let report = verify(disk.dir.path()).unwrap();
        assert_eq!((report.committed, report.pending, report.problem_count), (1, 1, 0));
        assert_eq!((report.cluster.as_str(), report.node, report.incarnation), ("train", 10_001, 2));
    }

    async fn freed_space_never_shows_old_bytes(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        for index in 0..6 {
            update(&engine, chunk(index), 1, write(0, vec![0xaa; 1 << 20])).await;
            update(&engine, chunk(index), 2, Op::Remove).await;
        }
        for index in 10..16 {
            update(&engine, chunk(index), 1, write(1, "x")).await;
            update(&engine, chunk(index), 2, write(900_000, "y")).await;
            update(&engine, chunk(index), 3, Op::Truncate { length: 1_000_000 }).await;
            let mut expected = vec![0; 1_000_000];
            (expected[1], expected[900_000]) = (b'x', b'y');
            assert!(read(&engine, chunk(index), Which::Committed).await == expected);
        }
    }

    async fn a_full_disk_refuses_and_keeps_what_it_has(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        let mut kept = 0;
        let refusal = loop {
            let op = write(0, vec![u8::try_from(kept).unwrap(); 1 << 20]);
            match engine.stage(TARGET, stage(chunk(kept), 1, op)).await {
                Ok(_) => engine.commit(TARGET, chunk(kept), version(1), chain_version(1)).await.unwrap(),
                Err(e) => break e,
            };
            kept += 1;
        };
        assert!(matches!(refusal, Error::NoSpace { wanted_bytes: 1_048_576, .. }), "{refusal}");
        assert!((7..=8).contains(&kept), "{kept} chunks of 1 MiB in 8 MiB");
        assert_eq!(engine.failed(), None);
        for index in 0..kept {
            let bytes = read(&engine, chunk(index), Which::Committed).await;
            assert!(bytes == vec![u8::try_from(index).unwrap(); 1 << 20]);
        }
        update(&engine, chunk(0), 2, Op::Remove).await;
        engine.forget_removed(TARGET, chunk(0), version(2)).await.unwrap();
        update(&engine, chunk(99), 1, write(0, vec![1; 1 << 20])).await;
    }

    async fn a_full_disk_takes_overwrites_in_the_space_of_what_they_replace(io: IoMode) {
        let mut disk = Disk::new(io);
        disk.options.capacity_bytes = Some(2 * 64 * KIB);
        let engine = disk.open();
        for raw in 1..30_u8 {
            update(&engine, chunk(0), raw.into(), write(0, vec![raw; 65_536])).await;
            assert!(read(&engine, chunk(0), Which::Committed).await == vec![raw; 65_536]);
        }
        engine.stage(TARGET, stage(chunk(0), 30, write(0, "pending"))).await.unwrap();
        let refused = engine.stage(TARGET, stage(chunk(1), 1, write(0, "x"))).await;
        assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
    }

    async fn updates_under_way_together_share_their_barriers(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        let before = engine.stats().barriers;
        let updates = (0..64).map(|index| {
            let engine = engine.clone();
            tokio::spawn(async move { update(&engine, chunk(index), 1, write(0, "abc")).await })
        });
        for update in updates.collect::<Vec<_>>() {
            update.await.unwrap();
        }
        let barriers = engine.stats().barriers - before;
        assert!(barriers < 64, "{barriers} barriers for 64 updates");
    }

    async fn reads_beside_overwrites_see_one_version_whole(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(0), 1, write(0, vec![1; 200_000])).await;
        let writer = {
            let engine = engine.clone();
            tokio::spawn(async move {
                for raw in 2..250_u8 {
                    update(&engine, chunk(0), raw.into(), write(0, vec![raw; 200_000])).await;
                }
            })
        };
        while !writer.is_finished() {
            let answer = engine.read(TARGET, chunk(0), 0, 200_000, Which::Committed).await.unwrap();
            let raw = u8::try_from(answer.state.version.get()).unwrap();
            assert!(answer.bytes == vec![raw; 200_000], "version {raw}");
        }
        writer.await.unwrap();
    }

    async fn an_update_whose_caller_went_away_ends_all_the_same(io: IoMode) {
        let disk = Disk::new(io);
        let engine = disk.open();
        for raw in 1..20 {
            let op = write(0, vec![u8::try_from(raw).unwrap(); 70_000]);
            let future = engine.stage(TARGET, stage(chunk(0), raw, op));
            tokio::select! { biased; _ = future => {}, () = tokio::task::yield_now() => {} }
            // Waits for the chunk behind the update that was left alone.
            let op = write(0, vec![u8::try_from(raw).unwrap(); 70_000]);
            engine.stage(TARGET, stage(chunk(0), raw, op)).await.unwrap();
            engine.commit(TARGET, chunk(0), version(raw), chain_version(1)).await.unwrap();
            let bytes = read(&engine, chunk(0), Which::Committed).await;
            assert!(bytes == vec![u8::try_from(raw).unwrap(); 70_000]);
        }
        drop(engine);
        assert_eq!(verify(disk.dir.path()).unwrap().problems, []);
    }
}

#[tokio::test]
async fn threads_are_used_where_they_are_asked_for() {
    let state = Disk::new(IoMode::Threads).open().state();
    assert_eq!((state.io, state.io_reason), ("threads", None));
}

#[tokio::test]
async fn a_failed_engine_refuses_everything_for_ever() {
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    update(&engine, chunk(0), 1, write(0, "a")).await;
    let told = engine.inner.fail("write block file: EIO".to_owned());
    assert_eq!(told.to_string(), "engine stopped: write block file: EIO");
    assert_eq!(engine.failed().as_deref(), Some("write block file: EIO"));
    let is_failed = |e: Error| assert!(matches!(e, Error::Failed(_)), "{e}");
    is_failed(engine.stage(TARGET, stage(chunk(0), 2, write(0, "b"))).await.unwrap_err());
    is_failed(engine.commit(TARGET, chunk(0), version(1), chain_version(1)).await.unwrap_err());
    is_failed(engine.read(TARGET, chunk(0), 0, 1, Which::Committed).await.unwrap_err());
    is_failed(engine.meta(TARGET, chunk(0)).unwrap_err());
    is_failed(engine.list(TARGET, None, 1).unwrap_err());
    is_failed(engine.set_target_record(TARGET, vec![]).await.unwrap_err());
}

#[tokio::test]
async fn a_failed_sync_fails_its_whole_group_and_all_that_follow() {
    let dir = tempfile::tempdir().unwrap();
    let db = Arc::new(store::open(dir.path(), true).unwrap());
    // A pipe cannot be synced.
    let (_reader, pipe) = std::io::pipe().unwrap();
    let blocks = Arc::new(File::from(std::os::fd::OwnedFd::from(pipe)));
    let allocator = Arc::new(Allocator::new(100, 100, vec![]).unwrap());
    let failure = Failure::default();
    let log = Log::start(Arc::clone(&db), blocks, Arc::clone(&allocator), &failure, Arc::default());
    let log = log.unwrap();
    let change = |durability| {
        let mut change = Change::new(durability);
        change.puts.push((b"k".to_vec(), b"v".to_vec()));
        change.allocations.push(allocator.take(1, |_, _| Ok(())).unwrap());
        change
    };
    let answer = log.apply(change(Durability::Data)).await;
    assert!(matches!(&answer, Err(Error::Failed(reason)) if reason.starts_with("sync block file")));
    let answer = log.apply(change(Durability::Metadata)).await;
    assert!(matches!(&answer, Err(Error::Failed(reason)) if reason.starts_with("sync block file")));
    assert_eq!(db.get(b"k").unwrap(), None, "metadata of a failed group");
    assert_eq!(allocator.space().1, 2 * alloc::UNIT, "blocks of failed changes stay taken");
}
