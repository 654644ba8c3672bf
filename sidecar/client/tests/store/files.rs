//! What clients see of each other's files when nothing fails.

use bytes::Bytes;
use client::Code;

use crate::harness::{Cluster, MIB, pattern, read_file, until, write_file};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_client_closed_another_reads_with_holes_cuts_and_replacements() {
    let cluster = Cluster::start().await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    writer.mkdir_all("/data/set").await.unwrap();
    let whole = pattern(7, 5 * MIB + 4321);
    write_file(&writer, "/data/set/file", &whole).await;
    assert!(read_file(&reader, "/data/set/file").await == whole);

    let inode = writer.create_path("/data/set/holes").await.unwrap().inode;
    writer.write_at(inode, 3 * MIB + 5, Bytes::from_static(b"end")).await.unwrap();
    assert_eq!(writer.read_at(inode, 3 * MIB, 100).await.unwrap()[..], *b"\0\0\0\0\0end");
    writer.flush(inode).await.unwrap();
    let holes = read_file(&reader, "/data/set/holes").await;
    assert_eq!(holes.len() as u64, 3 * MIB + 8);
    assert!(holes[..holes.len() - 3].iter().all(|byte| *byte == 0));

    let identity = writer.options().identity;
    let file = writer.stat_path("/data/set/file").await.unwrap().inode;
    writer.truncate(identity, file, MIB + 10).await.unwrap();
    writer.truncate(identity, file, 2 * MIB).await.unwrap();
    let cut = read_file(&reader, "/data/set/file").await;
    let (kept, zeros) = cut.split_at(MIB as usize + 10);
    assert!(cut.len() as u64 == 2 * MIB && *kept == whole[..kept.len()]);
    assert!(zeros.iter().all(|byte| *byte == 0), "cut bytes came back");
    // Behind the cut, by another client: the gap in its chunk stays zero as well.
    reader.open(reader.options().identity, file, true).await.unwrap();
    reader.write_at(file, MIB + 500_000, Bytes::from_static(b"late")).await.unwrap();
    reader.flush(file).await.unwrap();
    reader.release(file).await;
    let late = read_file(&writer, "/data/set/file").await;
    assert_eq!(late.len() as u64, 2 * MIB);
    assert_eq!(late[MIB as usize + 500_000..][..4], *b"late");
    let around = [&late[MIB as usize + 10..][..499_990], &late[MIB as usize + 500_004..]];
    assert!(around.concat().iter().all(|byte| *byte == 0), "cut bytes came back");

    let names = |entries: Vec<rpc::message::meta::DirectoryEntry>| {
        let mut names: Vec<_> = entries.into_iter().map(|entry| entry.name).collect();
        names.sort();
        names
    };
    assert_eq!(names(reader.list_dir("/data/set").await.unwrap()), ["file", "holes"]);
    reader.remove_path("/data/set/file").await.unwrap();
    assert_eq!(writer.stat_path("/data/set/file").await.unwrap_err().code, Code::NotFound);
}

/// The cut is the metadata service's, before it answers: whoever truncates removes nothing that came after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_client_writes_before_a_truncation_is_answered_stays() {
    let cluster = Cluster::start().await;
    let ((cutter, gate), writer) = (cluster.client_behind_gate().await, cluster.client().await);
    write_file(&cutter, "/file", &pattern(3, 3 * MIB + 17)).await;
    let inode = cutter.stat_path("/file").await.unwrap().inode;
    gate.set_open(false);
    let truncation = tokio::spawn(async move {
        cutter.truncate(cutter.options().identity, inode, 5).await.unwrap();
        cutter
    });
    until("the file is short", async || writer.attributes(inode).await.unwrap().length == 5).await;
    let late = pattern(11, 2 * MIB + 5);
    writer.open(writer.options().identity, inode, true).await.unwrap();
    writer.write_at(inode, 0, late.clone()).await.unwrap();
    writer.flush(inode).await.unwrap();
    assert!(!truncation.is_finished());
    gate.set_open(true);
    let cutter = truncation.await.unwrap();
    for client in [&cutter, &writer, &cluster.client().await] {
        assert!(read_file(client, "/file").await == late, "an acknowledged byte is lost");
    }
}

/// A writer that does not open the file again: it hears of the truncation when it reports what it has written since, under
/// the generation before, into a chunk that was not there to be cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_writer_adds_behind_a_truncation_that_it_has_not_heard_of_counts() {
    let cluster = Cluster::start().await;
    let (writer, cutter) = (cluster.client().await, cluster.client().await);
    let inode = writer.create_path("/file").await.unwrap().inode;
    writer.write_at(inode, 0, Bytes::from_static(b"reported")).await.unwrap();
    writer.flush(inode).await.unwrap();
    writer.write_at(inode, 8, Bytes::from_static(b"not told")).await.unwrap();
    // Writes back; the length is told later.
    assert_eq!(writer.read_at(inode, 0, 8).await.unwrap()[..], *b"reported");
    cutter.truncate(cutter.options().identity, inode, 4).await.unwrap();
    writer.write_at(inode, 2 * MIB, Bytes::from_static(b"x")).await.unwrap();
    writer.flush(inode).await.unwrap();
    assert_eq!(cutter.attributes(inode).await.unwrap().length, 2 * MIB + 1);
    let seen = read_file(&cutter, "/file").await;
    let (start, rest) = seen.split_at(4);
    assert_eq!((start, seen.len() as u64), (&b"repo"[..], 2 * MIB + 1));
    assert!(rest[..rest.len() - 1].iter().all(|byte| *byte == 0) && rest.ends_with(b"x"));
}

/// A client that still has the file open for writing, with bytes that the truncation cut before it reported them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_sees_another_clients_truncation_of_a_file_that_this_client_writes() {
    let cluster = Cluster::start().await;
    let (writer, cutter) = (cluster.client().await, cluster.client().await);
    let identity = writer.options().identity;
    let inode = writer.create_path("/file").await.unwrap().inode;
    writer.write_at(inode, 0, Bytes::from_static(b"reported")).await.unwrap();
    writer.flush(inode).await.unwrap();
    writer.write_at(inode, 8, pattern(5, 3 * MIB)).await.unwrap();
    // Writes back; the length is told later.
    assert_eq!(writer.read_at(inode, 0, 8).await.unwrap()[..], *b"reported");
    cutter.truncate(identity, inode, 4).await.unwrap();
    for write in [true, false] {
        assert_eq!(writer.open(identity, inode, write).await.unwrap().length, 4, "write: {write}");
        assert_eq!(writer.read_at(inode, 0, 4 * MIB).await.unwrap()[..], *b"repo");
    }
    assert_eq!(cutter.attributes(inode).await.unwrap().length, 4);
    writer.write_at(inode, 2 * MIB, Bytes::from_static(b"x")).await.unwrap();
    writer.flush(inode).await.unwrap();
    let seen = read_file(&cutter, "/file").await;
    let (start, rest) = seen.split_at(4);
    assert_eq!((start, seen.len() as u64), (&b"repo"[..], 2 * MIB + 1));
    assert!(rest[..rest.len() - 1].iter().all(|byte| *byte == 0) && rest.ends_with(b"x"));
}
