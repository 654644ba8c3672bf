//! Processes are killed and stopped under load: what was acknowledged stays, on every replica, and what stalls is bounded.

use std::time::{Duration, Instant};

use bytes::Bytes;
use client::Code;

use crate::harness::{ALL, Cluster, Load, MIB, pattern, read_file, until, write_file};

const NODES: [&str; 3] = ["10001", "10002", "10003"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_a_storage_server_fails_no_read_and_no_write() {
    let cluster = Cluster::start().await;
    let load = Load::start(&cluster).await;
    load.goes_on().await;
    cluster.kill(NODES[0]);
    load.goes_on().await;
    cluster.wait_serving(2).await;
    load.goes_on().await;
    cluster.start_again(NODES[0]);
    cluster.wait_serving(3).await;
    load.goes_on().await;
    let seen = load.finish(&cluster).await;
    assert!(seen.slowest_read < Duration::from_secs(5), "{seen:?}");
    assert!(seen.slowest_write < Duration::from_secs(10), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storage_server_that_stands_still_fails_nothing_and_catches_up() {
    let cluster = Cluster::start().await;
    let load = Load::start(&cluster).await;
    load.goes_on().await;
    let since = Instant::now();
    cluster.freeze(NODES[1]);
    cluster.wait_serving(2).await;
    // Twice its lease, and longer than any attempt to reach it.
    until("20 s pass", async || since.elapsed() > Duration::from_secs(20)).await;
    load.goes_on().await;
    cluster.thaw(NODES[1]);
    cluster.wait_serving(3).await;
    load.goes_on().await;
    let seen = load.finish(&cluster).await;
    assert!(seen.slowest_read < Duration::from_secs(5), "{seen:?}");
    assert!(seen.slowest_write < Duration::from_secs(10), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_whose_processes_are_all_killed_at_once_returns_by_itself() {
    let cluster = Cluster::start().await;
    let load = Load::start(&cluster).await;
    load.goes_on().await;
    ALL.iter().for_each(|name| cluster.kill(name));
    ALL.iter().for_each(|name| cluster.start_again(name));
    load.goes_on().await;
    let seen = load.finish(&cluster).await;
    assert!(seen.files >= 6, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_metadata_process_reads_and_open_writers_go_on_and_opens_wait() {
    let cluster = Cluster::start().await;
    let load = Load::start(&cluster).await;
    let (writer, reader, opener) =
        (cluster.client().await, cluster.client().await, cluster.client().await);
    write_file(&writer, "/open", &pattern(5, MIB)).await;
    let inode = writer.create_path("/open").await.unwrap().inode;
    reader.open_path("/open").await.unwrap();
    opener.stat_path("/open").await.unwrap();
    load.goes_on().await;

    let killed = Instant::now();
    cluster.kill("meta");
    load.reads_go_on(50).await;
    writer.write_at(inode, 1_000, Bytes::from_static(b"without metadata")).await.unwrap();
    until("the bytes reach the storage servers by themselves", async || {
        reader.read_at(inode, 1_000, 16).await.unwrap() == "without metadata"
    })
    .await;
    assert!(killed.elapsed() < Duration::from_secs(6), "all of this was within the lease");
    let open = tokio::spawn(async move { opener.open_path("/open").await });
    // Nobody serves without a lease, so what comes next waits for the manager too.
    until("the leases end", async || killed.elapsed() > Duration::from_secs(7)).await;
    assert!(!open.is_finished(), "an open was answered by nobody");

    cluster.start_again("meta");
    assert_eq!(open.await.unwrap().unwrap().inode, inode);
    writer.flush(inode).await.unwrap();
    load.goes_on().await;
    load.finish(&cluster).await;
    assert_eq!(read_file(&reader, "/open").await[1_000..1_016], *b"without metadata");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_chunks_of_a_removed_file_go_from_every_storage_server() {
    let cluster = Cluster::start().await;
    let client = cluster.client().await;
    let sizes = || [10_001, 10_002, 10_003].map(|node| cluster.used_bytes(node));
    write_file(&client, "/stays", &pattern(1, MIB)).await;
    write_file(&client, "/goes", &pattern(9, 8 * MIB)).await;
    let goes = client.stat_path("/goes").await.unwrap().inode;
    assert_eq!(cluster.assert_equal_copies(goes).await, 8);
    let reader = cluster.client().await;
    reader.open_path("/goes").await.unwrap();
    assert!(reader.read_at(goes, 0, MIB).await.unwrap() == pattern(9, MIB));
    // Removed too, and open for writing: it keeps its chunks and its holes.
    let kept = client.create_path("/kept").await.unwrap().inode;
    client.write_at(kept, 2 * MIB, Bytes::from_static(b"end")).await.unwrap();
    client.flush(kept).await.unwrap();
    client.remove_path("/kept").await.unwrap();
    until("the servers report what they hold", async || {
        sizes().iter().all(|used| *used >= 9 * MIB)
    })
    .await;
    client.remove_path("/goes").await.unwrap();
    until("every chunk is removed and its space free", async || {
        let Ok(chunks) = cluster.chunks_of(goes).await else { return false };
        let held = chunks.iter().flatten().any(|(_, held)| held.last.is_some());
        !held && sizes().iter().all(|used| *used < 2 * MIB)
    })
    .await;
    assert!(read_file(&client, "/stays").await == pattern(1, MIB));
    for offset in [0, 3 * MIB + 5] {
        let gone = reader.read_at(goes, offset, 100).await;
        assert_eq!(gone.map_err(|error| error.code), Err(Code::NotFound), "at {offset}");
    }
    let hole = client.read_at(kept, 2 * MIB - 2, 10).await.unwrap();
    assert_eq!(hole[..], *b"\0\0end");
    client.release(kept).await;
}

/// A mount that was taken over hears of no open: what nobody is known to have open may be, for as long as one likes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_write_back_is_told_however_late_somebody_asks() {
    let cluster = Cluster::start().await;
    write_file(&cluster.client().await, "/file", &pattern(3, MIB)).await;
    write_file(&cluster.client().await, "/rests", &pattern(3, 1)).await;
    let client = cluster.client_with(|options| {
        options.deadline = Duration::from_secs(2);
        options.attempt = Duration::from_secs(1);
        options.idle = Duration::from_secs(1);
    });
    let client = client.await;
    let inode = client.stat_path("/file").await.unwrap().inode;
    NODES.iter().for_each(|name| cluster.kill(name));
    client.write_at(inode, MIB, Bytes::from_static(b"lost")).await.unwrap();
    until("the bytes are given up", async || client.unsaved_bytes() == 0).await;
    // Another file, idle for less time than this one: when it is forgotten, this one was looked at too.
    let rests = client.stat_path("/rests").await.unwrap().inode;
    client.write_at(rests, 0, Bytes::new()).await.unwrap();
    until("an idle file is forgotten", async || !client.has_session(rests)).await;
    assert!(!client.is_saved(inode));
    assert_eq!(cluster.client().await.attributes(inode).await.unwrap().length, MIB);
    assert!(client.flush(inode).await.is_err(), "a failed write-back was forgotten");
    client.flush(inode).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_waits_for_room_longer_than_its_session_lasts_is_written() {
    let cluster = Cluster::start().await;
    let other = cluster.client().await;
    write_file(&other, "/full", &pattern(3, 1)).await;
    write_file(&other, "/waits", &pattern(3, 1)).await;
    let room = 64 << 10;
    let client = cluster.client_with(|options| {
        options.buffer_bytes = room;
        options.idle = Duration::from_secs(1);
    });
    let client = client.await;
    let full = client.stat_path("/full").await.unwrap().inode;
    let waits = client.stat_path("/waits").await.unwrap().inode;
    // Known here, not open, with nothing to write.
    client.write_at(waits, 0, Bytes::from_static(b"old")).await.unwrap();
    client.flush(waits).await.unwrap();
    NODES.iter().for_each(|name| cluster.freeze(name));
    client.write_at(full, 0, pattern(5, room as u64)).await.unwrap();
    let waiting = client.clone();
    let waiting =
        tokio::spawn(async move { waiting.write_at(waits, 0, Bytes::from_static(b"new")).await });
    until("its session has ended", async || !client.has_session(waits)).await;
    assert!(!waiting.is_finished());
    NODES.iter().for_each(|name| cluster.thaw(name));
    waiting.await.unwrap().unwrap();
    client.flush(waits).await.unwrap();
    assert_eq!(read_file(&other, "/waits").await[..], *b"new");
    client.flush_all().await.unwrap();
    assert_eq!(client.unsaved_bytes(), 0);
}
