//! What clients see of each other's files when nothing fails.

use bytes::Bytes;
use client::Code;

use crate::harness::{Cluster, MIB, pattern, read_file, write_file};

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
