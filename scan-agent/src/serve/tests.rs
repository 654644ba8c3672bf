use std::future::{pending, ready};

use arrow_array::types::Float32Type;
use arrow_array::{ArrayRef, Int32Array, ListArray, RecordBatch, StringArray};
use ring::fd::{LineReader, send_line};
use tokio::runtime::Runtime;

use super::protocol::{Batch, Done, Reply, Request};
use super::*;
use crate::bridge::Writer;

fn shared(io: &Runtime, path: &Path) -> Arc<Shared> {
    stoppable(io, path).0
}

/// With the switch that asks everything to end.
fn stoppable(io: &Runtime, path: &Path) -> (Arc<Shared>, watch::Sender<bool>) {
    let (datasets, _changes) = Datasets::new();
    datasets.put_source("made", Arc::new(DirSource::new(path)));
    let (io, metrics) = (io.handle().clone(), Metrics::default());
    let (switch, stop) = watch::channel(false);
    (Arc::new(Shared { datasets, io, metrics, stop }), switch)
}

fn receive(reader: &mut LineReader, stream: &UnixStream) -> (Reply, usize) {
    let line = reader.recv_line(stream).unwrap().expect("a reply");
    (serde_json::from_slice(&line.bytes).unwrap(), line.fds.len())
}

/// A client in a pair of sockets whose other end is served on a thread.
fn client(shared: &Arc<Shared>, request: &str) -> (UnixStream, thread::JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let shared = Arc::clone(shared);
    let served = thread::spawn(move || session::serve(&shared, &theirs));
    send_line(&ours, request, &[]).unwrap();
    (ours, served)
}

fn io() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn a_client_that_releases_gets_every_row_once() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    crate::make_data::synthetic(8 << 20, 2, 1, dir.path()).unwrap();
    let shared = shared(&io, dir.path());
    let open = r#"{"open":{"version":1,"dataset":"made","batchRows":500,"slabBytes":4194304}}"#;
    let (stream, served) = client(&shared, open);
    let mut reader = LineReader::new();
    let (opened, fds) = receive(&mut reader, &stream);
    assert!(matches!(opened, Reply::Opened(opened) if opened.files == 2 && fds == 1));
    let (mut rows, mut is_refused) = (0, false);
    let done = loop {
        match receive(&mut reader, &stream).0 {
            Reply::Batch(batch) => {
                rows += batch.rows as u64;
                // Refused only after the last batch: the agent has said all and does not listen.
                assert!(!is_refused, "a batch after a release was refused");
                let release = serde_json::to_string(&Request::Release { id: batch.id }).unwrap();
                is_refused = send_line(&stream, &release, &[]).is_err();
            }
            Reply::Done(done) => break done,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((rows, done.rows), ((8 << 20) / 3120, rows));
    assert!(done.bytes_fetched > 0 && done.file_bytes > 0);
    served.join().unwrap();
}

#[test]
fn a_client_that_dies_with_a_full_ring_ends_its_session() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    crate::make_data::synthetic(8 << 20, 1, 1, dir.path()).unwrap();
    let shared = shared(&io, dir.path());
    let open = r#"{"open":{"version":1,"dataset":"made","batchRows":100,"slabBytes":1048576}}"#;
    let (stream, served) = client(&shared, open);
    let mut reader = LineReader::new();
    assert!(matches!(receive(&mut reader, &stream).0, Reply::Opened(_)));
    assert!(matches!(receive(&mut reader, &stream).0, Reply::Batch(_)));
    drop(stream);
    served.join().unwrap();
}

#[test]
fn one_client_too_many_is_told_so_and_is_served_when_another_is_gone() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    let (shared, stop) = stoppable(&io, dir.path());
    let path = dir.path().join("scan.sock");
    let listener = io.block_on(async { bind(&path).unwrap() });
    let accepting = io.spawn(async move { accept(&listener, &shared, pending()).await });
    let ask = || {
        let stream = UnixStream::connect(&path).unwrap();
        // The one that is refused may be so before it has said anything.
        let sent = send_line(&stream, r#"{"datasets":{}}"#, &[]);
        (receive(&mut LineReader::new(), &stream).0, sent)
    };
    let mut clients: Vec<_> =
        (0..MAX_SESSIONS).map(|_| UnixStream::connect(&path).unwrap()).collect();
    match ask() {
        (Reply::Error(error), _) => assert_eq!(error.reason, "Busy"),
        other => panic!("{other:?}"),
    }
    clients.pop();
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while !matches!(ask(), (Reply::Datasets(_), Ok(()))) {
        assert!(std::time::Instant::now() < deadline, "the slot is not given back");
    }
    drop(clients);
    stop.send_replace(true);
    io.block_on(accepting).unwrap();
}

#[test]
fn a_scan_that_runs_may_end_while_new_ones_are_refused() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    crate::make_data::synthetic(4 << 20, 1, 1, dir.path()).unwrap();
    let (shared, stop) = stoppable(&io, dir.path());
    let path = dir.path().join("scan.sock");
    let listener = io.block_on(async { bind(&path).unwrap() });
    let served = Arc::clone(&shared);
    let accepting = io.spawn(async move { accept(&listener, &served, pending()).await });
    let open = r#"{"open":{"version":1,"dataset":"made","batchRows":100,"slabBytes":1048576}}"#;
    let refused = |stream: &UnixStream| match receive(&mut LineReader::new(), stream).0 {
        Reply::Error(error) => assert_eq!(error.reason, "Stopping"),
        other => panic!("{other:?}"),
    };
    let running = UnixStream::connect(&path).unwrap();
    send_line(&running, open, &[]).unwrap();
    let mut reader = LineReader::new();
    assert!(matches!(receive(&mut reader, &running).0, Reply::Opened(_)));
    let silent = UnixStream::connect(&path).unwrap();
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while shared.metrics.sessions.get() < 2 {
        assert!(std::time::Instant::now() < until, "the second client is not taken");
        thread::yield_now();
    }

    stop.send_replace(true);
    send_line(&silent, open, &[]).unwrap();
    refused(&silent);
    // Refused before it has said anything.
    refused(&UnixStream::connect(&path).unwrap());
    assert!(!accepting.is_finished(), "a scan still runs");
    let mut rows = 0;
    loop {
        match receive(&mut reader, &running).0 {
            Reply::Batch(batch) => {
                rows += batch.rows as u64;
                let release = serde_json::to_string(&Request::Release { id: batch.id }).unwrap();
                // Refused after the last batch.
                let _ = send_line(&running, &release, &[]);
            }
            Reply::Done(done) => break assert_eq!((rows, done.rows), ((4 << 20) / 3120, rows)),
            other => panic!("{other:?}"),
        }
    }
    io.block_on(accepting).unwrap();
}

#[test]
fn a_scan_that_does_not_end_is_cut_at_the_limit() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    let (shared, stop) = stoppable(&io, dir.path());
    let path = dir.path().join("scan.sock");
    let listener = io.block_on(async { bind(&path).unwrap() });
    let _silent = UnixStream::connect(&path).unwrap();
    stop.send_replace(true);
    io.block_on(accept(&listener, &shared, ready(())));
}

#[test]
fn nonsense_is_answered_and_ends_the_conversation() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    let shared = shared(&io, dir.path());
    for (line, reason) in [
        ("{", "InvalidRequest"),
        (r#"{"release":{"id":1}}"#, "InvalidRequest"),
        (r#"{"open":{"version":1,"dataset":"other"}}"#, "DatasetUnknown"),
        (r#"{"open":{"version":1,"dataset":"made"}}"#, "ObjectNotFound"),
    ] {
        let (stream, served) = client(&shared, line);
        match receive(&mut LineReader::new(), &stream).0 {
            Reply::Error(error) => assert_eq!(error.reason, reason),
            other => panic!("{other:?}"),
        }
        served.join().unwrap();
    }
}

/// Scans to the end, giving every batch back at once: the batches, and what came last.
fn scan(shared: &Arc<Shared>, open: &str) -> (Vec<Batch>, Result<Done, ErrorReply>) {
    let (stream, served) = client(shared, &format!(r#"{{"open":{{"version":1,{open}}}}}"#));
    let (mut reader, mut batches) = (LineReader::new(), Vec::new());
    let end = loop {
        match receive(&mut reader, &stream).0 {
            Reply::Opened(_) => {}
            Reply::Batch(batch) => {
                let release = serde_json::to_string(&Request::Release { id: batch.id }).unwrap();
                // Refused after the last batch.
                let _ = send_line(&stream, &release, &[]);
                batches.push(batch);
            }
            Reply::Done(done) => break Ok(done),
            Reply::Error(error) => break Err(error),
            other => panic!("{other:?}"),
        }
    };
    served.join().unwrap();
    (batches, end)
}

/// Writes files of one column `x`, each with its nullability.
fn numbers(dir: &Path, files: &[(&[Option<i32>], bool)]) {
    for (nth, (values, nullable)) in files.iter().enumerate() {
        let x: ArrayRef = Arc::new(values.iter().copied().collect::<Int32Array>());
        let batch = RecordBatch::try_from_iter_with_nullable([("x", x, *nullable)]).unwrap();
        Writer::write_batch(&dir.join(format!("part-{nth}.vortex")), &batch);
    }
}

#[test]
fn nulls_that_were_not_announced_are_an_error_and_not_values() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    numbers(dir.path(), &[(&[Some(1), Some(2)], false), (&[Some(3), None, Some(5)], true)]);
    let shared = shared(&io, dir.path());
    let dataset = shared.datasets.find("made").unwrap();
    let error = scan(&shared, r#""dataset":"made""#).1.unwrap_err();
    let message = "column x has nulls in part-1.vortex and is not nullable in part-0.vortex, \
                   the first file; write it as nullable in both";
    assert_eq!((&*error.reason, &*error.message), ("CorruptFile", message));
    assert_eq!(dataset.failure().unwrap().message, message);
    // Without the nulls there is nothing wrong.
    let good = scan(&shared, r#""dataset":"made","where":"x is not null""#).1.unwrap();
    assert_eq!((good.rows, dataset.failure()), (4, None));

    numbers(dir.path(), &[(&[Some(1), Some(2)], false), (&[Some(3), Some(4)], true)]);
    assert_eq!(scan(&shared, r#""dataset":"made""#).1.unwrap().rows, 4);
    // Of a column that is announced as nullable, any file may have nulls or none.
    numbers(dir.path(), &[(&[Some(1), Some(2)], true), (&[Some(3), Some(4)], false)]);
    let (batches, end) = scan(&shared, r#""dataset":"made""#);
    assert_eq!((end.unwrap().rows, batches[0].columns[0].nulls), (4, 0));
    numbers(dir.path(), &[(&[Some(1), Some(2)], true), (&[None, Some(4)], true)]);
    let (batches, end) = scan(&shared, r#""dataset":"made""#);
    assert_eq!((end.unwrap().rows, batches[0].columns[0].nulls), (4, 1));
}

#[test]
fn a_row_that_no_batch_can_hold_is_the_request_s_fault() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(600_000)]));
    let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
    Writer::write_batch(&dir.path().join("large.vortex"), &batch);
    let shared = shared(&io, dir.path());
    let (batches, end) = scan(&shared, r#""dataset":"made","slabBytes":1048576"#);
    let error = end.unwrap_err();
    assert_eq!((batches.len(), &*error.reason), (0, "InvalidRequest"));
    let fix =
        "exceeds half of slabBytes; ask for slabBytes of 1200128 or more, or for fewer columns";
    assert_eq!(error.message, format!("a row of 600064 bytes {fix}"));
    assert_eq!(shared.datasets.find("made").unwrap().failure(), None);
    let end = scan(&shared, r#""dataset":"made","slabBytes":1200128"#).1;
    assert_eq!(end.unwrap().rows, 1);
}

#[test]
fn more_columns_than_a_message_describes_are_the_request_s_fault() {
    let (io, dir) = (io(), tempfile::tempdir().unwrap());
    let shared = shared(&io, dir.path());
    let path = dir.path().join("wide.vortex");
    let refused = |count: usize| {
        let error = scan(&shared, r#""dataset":"made""#).1.unwrap_err();
        let message =
            format!("{count} columns do not fit into one message of the scan; ask for fewer");
        assert_eq!((&*error.reason, error.message), ("InvalidRequest", message));
        assert_eq!((shared.metrics.rows.get(), shared.datasets.all()[0].failure()), (0, None));
    };
    // Their batch is what is too long to say.
    let lists = vec![Some(vec![Some(0.5), None]), Some(vec![])];
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(lists));
    let columns = (0..10_000).map(|nth| (format!("c{nth}"), Arc::clone(&lists)));
    Writer::write_batch(&path, &RecordBatch::try_from_iter(columns).unwrap());
    refused(10_000);
    let end = scan(&shared, r#""dataset":"made","columns":["c0","c9999"]"#).1;
    assert_eq!(end.unwrap().rows, 2);

    // Their names are, also in what is said of a name that is not there.
    let shared = self::shared(&io, dir.path());
    let numbers: ArrayRef = Arc::new(Int32Array::from(vec![1]));
    let columns = (0..400).map(|nth| (format!("{nth}{}", "x".repeat(3000)), Arc::clone(&numbers)));
    Writer::write_batch(&path, &RecordBatch::try_from_iter(columns).unwrap());
    let error = scan(&shared, r#""dataset":"made""#).1.unwrap_err();
    assert!(error.message.starts_with("400 columns do not fit"), "{}", error.message);
    let error = scan(&shared, r#""dataset":"made","columns":["none"]"#).1.unwrap_err();
    assert_eq!((&*error.reason, error.message.len()), ("InvalidRequest", 64 << 10));
    assert!(error.message.starts_with("no column none; the dataset has 0xxx"));
}
