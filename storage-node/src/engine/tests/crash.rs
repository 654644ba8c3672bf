//! What a crash or a failing disk leaves, piece by piece.

use std::fs;
use std::path::{Path, PathBuf};

use super::model::image;
use super::*;

/// The log that RocksDB writes now.
fn newest_log(dir: &Path) -> PathBuf {
    let files = fs::read_dir(dir.join("meta")).unwrap().map(|e| e.unwrap().path());
    files.filter(|p| p.extension().is_some_and(|e| e == "log")).max().unwrap()
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

/// A disk as it is after a crash, with the newest log changed by `damage`.
fn crashed(disk: &Disk, damage: impl FnOnce(&File)) -> Disk {
    let next = Disk::new(IoMode::Auto);
    image(disk.dir.path(), next.dir.path());
    damage(&File::options().read(true).write(true).open(newest_log(next.dir.path())).unwrap());
    next
}

#[tokio::test]
async fn a_torn_end_of_the_log_takes_back_only_what_nobody_was_told_of() {
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    update(&engine, chunk(0), 1, write(0, vec![1; 70_000])).await;
    let log = newest_log(disk.dir.path());
    let before = length(&log);
    let used = engine.stats().used_bytes;
    engine.stage(TARGET, stage(chunk(0), 2, write(0, vec![2; 70_000]))).await.unwrap();
    let after = length(&log);
    assert!(after > before);
    let step = usize::try_from((after - before) / 7).unwrap();
    for cut in (before..=after).step_by(step).chain([before + 1, after - 1, after]) {
        let torn = crashed(&disk, |log| log.set_len(cut).unwrap());
        let engine = torn.open();
        assert!(read(&engine, chunk(0), Which::Committed).await == vec![1; 70_000]);
        let pending = engine.meta(TARGET, chunk(0)).unwrap().pending;
        assert_eq!(pending.is_some(), cut == after, "cut at {cut} of {before}..{after}");
        if pending.is_some() {
            assert!(read(&engine, chunk(0), Which::Pending).await == vec![2; 70_000]);
        } else {
            assert_eq!(engine.stats().used_bytes, used, "bytes without a record are free space");
        }
        drop(engine);
        assert_eq!(verify(torn.dir.path()).unwrap().problems, []);
    }
}

#[tokio::test]
async fn a_damaged_log_is_refused_and_not_cut_short() {
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    for raw in 1..6 {
        update(&engine, chunk(0), raw, write(0, vec![1; 5000])).await;
    }
    let end = length(&newest_log(disk.dir.path()));
    // Not in the last record: damage there cannot be told from one that was torn.
    for at in [end / 4, end / 2] {
        let damaged = crashed(&disk, |log| {
            let mut byte = [0];
            std::os::unix::fs::FileExt::read_exact_at(log, &mut byte, at).unwrap();
            std::os::unix::fs::FileExt::write_all_at(log, &[byte[0] ^ 1], at).unwrap();
        });
        let message = damaged.refusal();
        assert!(message.contains("meta"), "{message}");
    }
}

#[tokio::test]
async fn a_chunk_whose_block_record_is_gone_is_corrupt_whoever_has_the_space_now() {
    let disk = Disk::new(IoMode::Auto);
    let engine = disk.open();
    update(&engine, chunk(0), 1, write(0, vec![1; 70_000])).await;
    update(&engine, chunk(1), 1, write(0, vec![2; 70_000])).await;
    let place = Place { target: TARGET, chunk: chunk(0) };
    let records = store::chunk(&engine.inner.db.snapshot(), place).unwrap();
    let key = record::block_key(records.committed.unwrap().fragments[0].block);
    drop(engine);
    store::open(&disk.dir.path().join("meta"), false).unwrap().delete(key).unwrap();
    let engine = disk.open();
    for index in 2..20 {
        let lost = engine.read(TARGET, chunk(0), 0, 10, Which::Committed).await;
        assert!(matches!(lost, Err(Error::Corrupt { place: p, .. }) if p == place), "{lost:?}");
        assert!(read(&engine, chunk(1), Which::Committed).await == vec![2; 70_000]);
        // In the end in the very space that the lost block had.
        update(&engine, chunk(index), 1, write(0, vec![3; 70_000])).await;
    }
    drop(engine);
    assert!(verify(disk.dir.path()).unwrap().problems.iter().any(|p| p.place == Some(place)));
}

#[tokio::test]
async fn a_failed_read_names_target_and_chunk_and_gives_no_bytes() {
    for io in [IoMode::Auto, IoMode::Threads] {
        let disk = Disk::new(io);
        let engine = disk.open();
        update(&engine, chunk(3), 1, write(0, vec![7; 70_000])).await;
        drop(engine);
        let mut inner = open::open(&disk.options).unwrap();
        // Nothing is mapped at its start: every read there is EIO.
        inner.blocks = Arc::new(File::open("/proc/self/mem").unwrap());
        let engine = Engine { inner: Arc::new(inner) };
        let place = Place { target: TARGET, chunk: chunk(3) };
        for (offset, length) in [(0, 1), (0, 70_000), (4096 * 5, 4096)] {
            let error = engine.read(TARGET, place.chunk, offset, length, Which::Committed).await;
            let error = error.unwrap_err();
            assert!(matches!(&error, Error::Corrupt { place: p, .. } if *p == place), "{error}");
            let message = error.to_string();
            assert!(
                message.contains(&place.to_string()) && message.contains("os error 5"),
                "{message}"
            );
        }
        let partial = engine.stage(TARGET, stage(chunk(3), 2, write(1, "x"))).await;
        assert!(matches!(partial, Err(Error::Corrupt { .. })), "{partial:?}");
        assert_eq!(engine.failed(), None, "a page that cannot be read is not the end");
    }
}

#[tokio::test]
async fn block_io_that_has_stopped_is_the_end_of_the_disk() {
    let disk = Disk::new(IoMode::Threads);
    let engine = disk.open();
    update(&engine, chunk(0), 1, write(0, "abc")).await;
    let Io::Threads(threads) = &engine.inner.io else { panic!("threads were asked for") };
    threads.close();
    let answer = engine.read(TARGET, chunk(0), 0, 3, Which::Committed).await;
    assert!(matches!(answer, Err(Error::Failed(_))), "{answer:?}");
    assert!(engine.failed().unwrap().contains("block IO has stopped"));
}
