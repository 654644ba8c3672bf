use super::super::conformance::{Dice, cases, randomized};
use super::*;
use std::time::Duration;

fn open(dir: &tempfile::TempDir) -> Embedded {
    Embedded::open(dir.path()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conforms() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    cases(&store).await;
    assert!(store.is_quiet(), "the history outlives its readers");
}

#[tokio::test]
async fn random_interleavings_equal_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    for seed in 0..20 {
        randomized(&store, seed, 1500).await;
    }
    assert!(store.is_quiet(), "the history outlives its readers");
}

/// The directory as a crash at this moment would leave it. RocksDB removes files that it no longer
/// needs behind the caller's back: a copy during which names went or came shows no one moment, so it
/// is made again.
fn copy(from: &Path) -> tempfile::TempDir {
    for _ in 0..100 {
        let (to, before) = (tempfile::tempdir().unwrap(), names(from));
        let copied = before
            .iter()
            .try_for_each(|name| std::fs::copy(from.join(name), to.path().join(name)).map(drop));
        match copied {
            Ok(()) if before == names(from) => return to,
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
            _ => {}
        }
    }
    panic!("{} does not keep still", from.display());
}

fn names(dir: &Path) -> std::collections::BTreeSet<std::ffi::OsString> {
    let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name());
    files.filter(|name| name != "LOCK").collect()
}

/// The log that RocksDB writes in `dir`.
fn log_of(dir: &Path) -> std::fs::File {
    let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path());
    let log = files.filter(|p| p.extension().is_some_and(|e| e == "log")).max().unwrap();
    std::fs::OpenOptions::new().read(true).write(true).open(log).unwrap()
}

async fn contents(store: &Embedded) -> Vec<(Bytes, Bytes)> {
    let mut txn = store.begin().await.unwrap();
    txn.scan(Scan::new(vec![], vec![255], 10_000)).await.unwrap().pairs
}

#[tokio::test]
async fn a_crash_after_any_commit_keeps_it_and_all_before() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    let mut dice = Dice(3);
    for round in 0..25u64 {
        let mut txn = store.begin().await.unwrap();
        for _ in 0..3 {
            let key = u8::try_from(dice.below(9)).unwrap();
            if dice.below(4) == 0 {
                txn.clear_range(&[key], &[key + 2]);
            } else {
                txn.set(&[key], &round.to_le_bytes());
            }
        }
        txn.add(b"n", 1);
        txn.commit().await.unwrap();
        // What the disk holds at this moment is what a crash would leave.
        let image = copy(dir.path());
        assert_eq!(contents(&open(&image)).await, contents(&store).await, "round {round}");
    }
}

#[tokio::test]
async fn a_torn_log_loses_whole_commits_from_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    for round in 0..10u8 {
        let mut txn = store.begin().await.unwrap();
        txn.set(b"a", &[round]);
        txn.set(b"b", &[round]);
        txn.commit().await.unwrap();
    }
    let image = copy(dir.path());
    let file = log_of(image.path());
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let pairs = contents(&open(&image)).await;
    let values: Vec<u8> = pairs.iter().map(|(_, v)| v[0]).collect();
    assert_eq!(values, [8, 8]);
}

#[tokio::test]
async fn a_damaged_log_is_refused_and_not_cut_short() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    for round in 0..5u8 {
        let mut txn = store.begin().await.unwrap();
        txn.set(&[round], &[round; 3000]);
        txn.commit().await.unwrap();
    }
    let end = log_of(dir.path()).metadata().unwrap().len();
    // Not in the last record: damage there cannot be told from one that was torn.
    for at in [end / 4, end / 2] {
        let image = copy(dir.path());
        let (log, mut byte) = (log_of(image.path()), [0]);
        log.read_exact_at(&mut byte, at).unwrap();
        log.write_all_at(&[byte[0] ^ 1], at).unwrap();
        let refused = Embedded::open(image.path());
        let damaged = |error: &TxnError| error.to_string().contains("Corruption");
        assert!(refused.as_ref().is_err_and(damaged), "byte {at} of {end}: {refused:?}");
    }
}

#[tokio::test]
async fn a_second_process_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let _store = open(&dir);
    assert!(matches!(Embedded::open(dir.path()), Err(TxnError::Failed(_))));
}

#[test]
fn an_outlived_transaction_is_too_old_and_frees_the_history() {
    let (start, key) = (Instant::now(), b"k".to_vec());
    let mut history = History::default();
    let old = history.begin(start).unwrap();
    history.record(1, vec![(key.clone(), None)]);
    history.publish(1, start + Duration::from_secs(1));
    assert_eq!(history.at(&key, old), Some(None));
    assert_eq!(history.check_age(old), Ok(()));
    history.record(2, vec![(key.clone(), Some(Bytes::from_static(b"1")))]);
    history.publish(2, start + TXN_MAX_AGE + Duration::from_secs(1));
    assert_eq!(history.check_age(old), Err(TxnError::TooOld));
    history.end(old);
    assert!(history.is_empty());
}
