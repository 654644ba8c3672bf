//! Three storage servers over loopback with real engines, while one is killed, cut off, or all
//! are: what was acknowledged stays, and reads go on.

mod harness;

use std::time::Duration;

use harness::Cluster;

#[test]
fn a_write_is_on_every_server_when_it_is_answered() {
    let cluster = Cluster::start(3);
    cluster.run(async {
        cluster.wait_serving(3).await;
        let mut client = cluster.client();
        for index in 0..20 {
            client.write(index, format!("chunk {index}").as_bytes()).await;
        }
        for target in cluster.targets() {
            for index in 0..20 {
                let bytes = client.read_at(target, index).await.expect("read");
                assert_eq!(bytes, format!("chunk {index}").as_bytes(), "target {target}");
            }
        }
    });
}

#[test]
fn a_killed_server_costs_no_read_and_little_write_time_and_catches_up() {
    let cluster = Cluster::start(3);
    cluster.run(async {
        let load = cluster.serving_under_load(30).await;
        let victim = cluster.head_node();
        cluster.kill(victim);
        cluster.wait_serving(2).await;
        load.wait_writes(30).await;
        cluster.restart(victim);
        cluster.wait_serving(3).await;
        load.wait_writes(30).await;
        load.finish_unharmed(&cluster).await;
    });
}

#[test]
fn a_server_that_is_cut_off_refuses_after_its_lease_and_catches_up() {
    let cluster = Cluster::start(3);
    cluster.run(async {
        let load = cluster.serving_under_load(20).await;
        let victim = cluster.tail_node();
        cluster.cut(victim);
        cluster.wait_serving(2).await;
        load.wait_writes(20).await;
        cluster.assert_refuses(victim).await;
        cluster.heal(victim);
        cluster.wait_serving(3).await;
        load.finish_unharmed(&cluster).await;
    });
}

#[test]
fn a_cluster_killed_at_once_returns_by_itself_with_everything() {
    let cluster = Cluster::start(3);
    cluster.run(async {
        let load = cluster.serving_under_load(30).await;
        for node in 1..=3 {
            cluster.kill(node);
        }
        for node in 1..=3 {
            cluster.restart(node);
        }
        load.wait_writes(30).await;
        cluster.wait_serving(3).await;
        let seen = load.finish().await;
        cluster.assert_equal_copies(&seen.chunks).await;
    });
}

#[test]
fn a_server_that_stops_in_order_is_out_at_once() {
    let cluster = Cluster::start(3);
    cluster.run(async {
        cluster.wait_serving(3).await;
        let before = std::time::Instant::now();
        cluster.stop(1).await;
        cluster.wait_serving(2).await;
        assert!(before.elapsed() < Duration::from_secs(4), "no lease had to be waited out");
    });
}

#[test]
fn any_number_of_clients_can_write_one_chunk() {
    let cluster = Cluster::start(3);
    cluster.run(async {
        cluster.wait_serving(3).await;
        let mut writers = tokio::task::JoinSet::new();
        for worker in 0..10 {
            let clients: Vec<_> = (0..100).map(|_| cluster.client()).collect();
            writers.spawn(async move {
                for (n, mut client) in clients.into_iter().enumerate() {
                    client.write(0, format!("{worker}:{n:02}").as_bytes()).await;
                }
            });
        }
        while let Some(ended) = writers.join_next().await {
            ended.expect("a writer");
        }
        let mut last = cluster.client();
        let version = last.write(0, b"last").await;
        assert_eq!(version.get(), 1_001);
        assert_eq!(last.repeat(0, b"last").await, version, "applied once");
        let copies = [(0, b"last".to_vec())].into();
        cluster.assert_equal_copies(&copies).await;
    });
}
