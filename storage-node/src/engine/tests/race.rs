//! Readers beside everything that takes their blocks away: no error, and only bytes of the state
//! that the answer names.

use super::*;

const CHUNKS: u64 = 6;
const ROUNDS: u64 = 60;
/// So small that each update takes a block that another chunk has just given back.
const CAPACITY: u64 = 3 << 20;

/// Bytes that name chunk and update. Versions begin anew when a removal is forgotten, updates do
/// not: so bytes of an earlier life of the chunk show too.
fn content(index: u64, seq: u64) -> Vec<u8> {
    let length = 40_000 + usize::try_from(seq * 7_919 % 90_000).unwrap();
    let page = |at: usize| (index * 31 + seq * 7 + at as u64 / 4096).to_le_bytes()[0];
    (0..length).map(page).collect()
}

/// Overwrites, drops, removes and forgets one chunk, over and over.
async fn churn(engine: Engine, index: u64) {
    let (chunk, mut raw) = (chunk(index), 0);
    for seq in 1..=ROUNDS {
        raw += 1;
        let next =
            |op| Stage { id: id(u32::try_from(index).unwrap(), seq), ..stage(chunk, raw, op) };
        let is_removed = seq % 5 == 0;
        let op = match seq % 5 {
            0 => Op::Remove,
            // Takes the place of all that was there, in a block of its own.
            _ => Op::Replace(replace(&content(index, seq))),
        };
        staged(&engine, next(op)).await;
        if seq % 7 == 3 {
            engine.drop_pending(TARGET, chunk, version(raw)).await.unwrap();
            raw -= 1;
            continue;
        }
        engine.commit(TARGET, chunk, version(raw), chain_version(1)).await.unwrap();
        if is_removed {
            engine.forget_removed(TARGET, chunk, version(raw)).await.unwrap();
            raw = 0;
        }
    }
}

/// Stages; where blocks that were freed still wait for their readers or their barrier, again.
async fn staged(engine: &Engine, stage: Stage) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        match engine.stage(TARGET, stage.clone()).await {
            Ok(_) => return,
            Err(Error::NoSpace { .. }) if std::time::Instant::now() < deadline => {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            Err(e) => panic!("{e}"),
        }
    }
}

/// Reads whole chunks and parts until the writers are done; counts the answers with bytes.
async fn watch(engine: Engine, seed: u64, done: Arc<std::sync::atomic::AtomicBool>) -> u64 {
    let (mut state, mut count) = (seed, 0);
    while !done.load(Ordering::Acquire) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
        let index = (state >> 33) % CHUNKS;
        let which = if state >> 40 & 3 == 0 { Which::Pending } else { Which::Committed };
        let (offset, length) = if state >> 50 & 1 == 0 { (0, u64::MAX) } else { (9_000, 5_000) };
        match engine.read(TARGET, chunk(index), offset, length, which).await {
            Ok(Read { bytes, state, .. }) => {
                let whole = content(index, state.id.seq);
                let from = usize::try_from(offset).unwrap();
                let to = whole.len().min(from.saturating_add(usize::try_from(length).unwrap()));
                assert!(
                    bytes == whole[from..to],
                    "chunk {index}, {which:?}, update {}",
                    state.id.seq
                );
                count += 1;
            }
            Err(Error::NotFound(_)) => {}
            Err(e) => panic!("{e}"),
        }
        // Every record parses and verifies, whatever is replaced meanwhile.
        for (at, info) in engine.list(TARGET, None, 100).unwrap() {
            assert!(at.index < CHUNKS && info.committed.or(info.pending).is_some());
        }
        tokio::task::yield_now().await;
    }
    count
}

async fn run(io: IoMode) {
    let mut disk = Disk::new(io);
    disk.options.capacity_bytes = Some(CAPACITY);
    let engine = disk.open();
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let readers: Vec<_> =
        (1..4).map(|seed| tokio::spawn(watch(engine.clone(), seed, Arc::clone(&done)))).collect();
    let writers: Vec<_> =
        (0..CHUNKS).map(|index| tokio::spawn(churn(engine.clone(), index))).collect();
    let mut ended = Vec::new();
    for writer in writers {
        ended.push(writer.await);
    }
    done.store(true, Ordering::Release);
    for reader in readers {
        assert!(reader.await.unwrap() > 0, "a reader saw nothing");
    }
    ended.into_iter().for_each(|writer| writer.unwrap());
    assert_eq!((engine.failed(), engine.stats().corrupt_pages), (None, 0));
    let written = engine.stats().block_bytes;
    assert!(written > 4 * CAPACITY, "blocks were used again: {written} bytes in {CAPACITY}");
    drop(engine);
    assert_eq!(verify(disk.dir.path()).unwrap().problems, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_reader_sees_a_block_that_was_given_to_another_chunk_on_io_uring() {
    run(IoMode::Auto).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_reader_sees_a_block_that_was_given_to_another_chunk_on_threads() {
    run(IoMode::Threads).await;
}

#[tokio::test]
async fn a_block_that_was_given_away_under_a_reader_is_refused_by_its_checksum() {
    // What the wait for readers prevents: the bytes of another chunk, whole and with right
    // checksums of their own, where a reader expects those of this one.
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    let block = async |index| {
        update(&engine, chunk(index), 1, write(0, content(index, 1))).await;
        let place = Place { target: TARGET, chunk: chunk(index) };
        store::chunk(&engine.inner.db.snapshot(), place).unwrap().committed.unwrap().fragments[0]
    };
    let (mine, other) = (block(0).await, block(1).await);
    assert_eq!((mine.page, mine.pages), (other.page, other.pages));
    let view = engine.inner.db.snapshot();
    let place = Place { target: TARGET, chunk: chunk(0) };
    let stray = record::Fragment { block: other.block, ..mine };
    let error = store::block(&view, place, stray.block).unwrap_err();
    assert!(error.to_string().contains("block record names another chunk"), "{error}");
    // And behind the record: the very bytes of the other chunk.
    let pages = usize::try_from(mine.pages).unwrap();
    let buf = buf::AlignedBuf::zeroed(pages);
    let file = &engine.inner.blocks;
    let bytes = engine.inner.io.read(file, other.block.offset(), buf).await.unwrap();
    let record = store::block(&view, place, mine.block).unwrap();
    assert_eq!(read::verify_pages(place, &record, &mine, bytes.as_ref()), Err(0));
}
