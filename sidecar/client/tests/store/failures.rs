//! Processes are killed and stopped under load: what was acknowledged stays, on every replica, and what stalls is bounded.

use std::time::{Duration, Instant};

use bytes::Bytes;

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
}
