use std::future::{pending, ready};

use ring::fd::{LineReader, send_line};
use tokio::runtime::Runtime;

use super::protocol::{Reply, Request};
use super::*;

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
