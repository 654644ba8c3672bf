use crate::collect::Collector;
use crate::service::tests::Fixture;
use crate::txn::embedded::wait_closed;
use chain::id::{ClientId, InodeId};
use rpc::Code;
use rpc::message::meta::*;
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A file of six chunks of 1 MiB on three chains, whose writer has it open.
async fn six_chunks(f: &Fixture) -> Opened {
    let made = f.create(ROOT, "a").await.unwrap();
    let file = &made.attributes;
    (0..6).for_each(|i| f.chunks.put(&file.layout.unwrap(), file.inode, i, 1 << 20));
    let report = f.report_request(file.inode, made.session);
    f.run(&ReportLength { length: 6 * MIB, ..report }).await.unwrap();
    made
}

fn other(f: &Fixture) -> Caller {
    Caller { client: ClientId::new(9), ..f.caller() }
}

async fn pending(f: &Fixture) -> Vec<InodeId> {
    f.meta.unfinished_cuts(&mut None, 10).await.unwrap()
}

#[tokio::test]
async fn a_truncation_is_answered_when_the_chunks_are_cut() {
    let f = Fixture::new().await;
    let file = six_chunks(&f).await.attributes.inode;
    assert_eq!(f.truncate(file, 3 * MIB / 2).await.unwrap().length, 3 * MIB / 2);
    assert_eq!(f.chunks.lengths(file), [(0, 1 << 20), (1, 1 << 19)]);
    f.truncate(file, 6 * MIB).await.unwrap();
    assert_eq!(f.chunks.lengths(file), [(0, 1 << 20), (1, 1 << 19)], "to grow cuts nothing");
    f.truncate(file, MIB).await.unwrap();
    assert_eq!(f.chunks.lengths(file), [(0, 1 << 20)]);
    f.truncate(file, 0).await.unwrap();
    assert_eq!((f.chunks.lengths(file), pending(&f).await), (vec![], vec![]));
}

#[tokio::test]
async fn until_the_chunks_are_cut_nobody_can_make_cut_bytes_part_of_the_file_again() {
    let f = Fixture::new().await;
    let made = six_chunks(&f).await;
    let file = made.attributes.inode;
    *f.chunks.down.lock().unwrap() = true;
    let cut = Truncate { caller: f.caller(), inode: file, length: 10 };
    assert_eq!(f.run(&cut).await.unwrap_err().code, Code::ChainUnavailable);
    assert_eq!(pending(&f).await, [file]);
    f.is_sound().await;
    // Reading goes on, up to the new end.
    assert_eq!(f.lookup(ROOT, "a").await.unwrap().length, 10);
    let read = Open { caller: other(&f), inode: file, write: false };
    assert_eq!(f.run(&read).await.unwrap().attributes.length, 10);
    let write = Open { write: true, ..read };
    let create = Create { caller: other(&f), ..f.create_request(ROOT, "a") };
    let report = f.report_request(file, made.session);
    let report = ReportLength { length: 7 * MIB, truncate_generation: 1, ..report };
    let grow = Truncate { caller: other(&f), inode: file, length: 7 * MIB };
    let refused = [
        f.run(&write).await.map(drop),
        f.run(&create).await.map(drop),
        f.run(&report).await.map(drop),
        f.run(&grow).await.map(drop),
        f.attributes(file).await.map(drop),
        f.meta.settle_length(file).await.map_err(|error| match error {
            crate::op::OpError::Refused(error) => error,
            other => panic!("{other}"),
        }),
    ];
    for outcome in refused {
        assert_eq!(outcome.unwrap_err().code, Code::ChainUnavailable);
    }
    assert_eq!(f.lookup(ROOT, "a").await.unwrap().length, 10);
    // The one who truncates has died; whoever needs it first cuts.
    *f.chunks.down.lock().unwrap() = false;
    let grown = f.run(&grow).await.unwrap();
    assert_eq!((grown.length, grown.truncate_generation), (7 * MIB, 1));
    assert_eq!((f.chunks.lengths(file), pending(&f).await), (vec![(0, 10)], vec![]));
    // What is written from here on is not cut by a retry of the first request.
    f.chunks.put(&made.attributes.layout.unwrap(), file, 6, 5);
    assert_eq!(f.run(&cut).await.unwrap().length, 10, "the first answer");
    assert_eq!(f.chunks.lengths(file), [(0, 10), (6, 5)]);
    f.is_sound().await;
}

#[tokio::test]
async fn requests_do_not_pile_up_behind_a_cut_that_takes_long() {
    let f = Fixture::new().await;
    let file = six_chunks(&f).await.attributes.inode;
    let long = f.meta.cuts.lock(file).await;
    assert_eq!(f.truncate(file, MIB).await.unwrap_err().code, Code::Busy);
    drop(long);
    assert_eq!(f.truncate(file, MIB).await.unwrap().length, MIB);
    assert_eq!((f.chunks.lengths(file), pending(&f).await), (vec![(0, 1 << 20)], vec![]));
    // It takes longest, and the process ends after it: not before the databases are closed.
    drop(f);
    assert!(wait_closed(Duration::from_secs(60)), "the stores did not close");
}

#[tokio::test]
async fn a_truncation_holds_when_its_client_falls_silent_before_the_cut() {
    let f = Fixture::new().await;
    let made = six_chunks(&f).await;
    let file = made.attributes.inode;
    *f.chunks.down.lock().unwrap() = true;
    assert!(f.truncate(file, 10).await.is_err());
    *f.chunks.down.lock().unwrap() = false;
    f.meta.settle_length(file).await.unwrap();
    assert_eq!(f.attributes(file).await.unwrap().length, 10);
    assert_eq!(f.chunks.lengths(file), [(0, 10)]);
}

#[tokio::test]
async fn the_collector_cuts_what_was_left_and_forgets_what_is_gone() {
    let f = Fixture::new().await;
    let made = six_chunks(&f).await;
    let file = made.attributes.inode;
    let mut collector = Collector::new(Arc::clone(&f.meta), Duration::ZERO);
    *f.chunks.down.lock().unwrap() = true;
    assert!(f.truncate(file, 10).await.is_err());
    collector.round().await.unwrap();
    assert_eq!(pending(&f).await, [file]);
    *f.chunks.down.lock().unwrap() = false;
    collector.round().await.unwrap();
    assert_eq!((f.chunks.lengths(file), pending(&f).await), (vec![(0, 10)], vec![]));

    *f.chunks.down.lock().unwrap() = true;
    assert!(f.truncate(file, 5).await.is_err());
    f.remove(ROOT, "a", false).await.unwrap();
    assert_eq!(f.is_sound().await.orphans, 1);
    *f.chunks.down.lock().unwrap() = false;
    let report = ReportLength { close: true, ..f.report_request(file, made.session) };
    f.run(&report).await.unwrap();
    collector.round().await.unwrap();
    assert_eq!((f.chunks.lengths(file), pending(&f).await), (vec![], vec![]));
    assert_eq!(f.is_sound().await.inodes, 1);
}

#[tokio::test]
async fn what_was_written_under_an_old_generation_into_new_chunks_counts() {
    let f = Fixture::new().await;
    let made = six_chunks(&f).await;
    let (file, layout) = (made.attributes.inode, made.attributes.layout.unwrap());
    f.truncate(file, MIB).await.unwrap();
    // A writer that has not heard of it: no chunk 8 was there to refuse it.
    f.chunks.put(&layout, file, 8, 77);
    let report = f.report_request(file, made.session);
    let report = ReportLength { length: 8 * MIB + 77, ..report };
    let told = f.run(&report).await.unwrap();
    assert_eq!((told.length, told.truncate_generation), (8 * MIB + 77, 1));
    // One whose writes were cut adds nothing.
    let report = ReportLength { caller: f.caller(), length: 20 * MIB, ..report };
    assert_eq!(f.run(&report).await.unwrap().length, 8 * MIB + 77);
}
