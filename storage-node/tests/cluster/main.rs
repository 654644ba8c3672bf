//! Three storage servers over loopback with real engines, while one is killed, cut off, or all
//! are: what was acknowledged stays, and reads go on.

mod harness;

use std::time::Duration;

use harness::Cluster;
use rpc::Code;
use rpc::message::storage::{ChunkLength, UpdateOp};

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

#[test]
fn a_late_cut_is_refused_by_the_chain_and_a_repeated_one_is_answered_as_before() {
    const WRITE: UpdateOp = UpdateOp::Write { offset: 0 };
    let cluster = Cluster::start(3);
    cluster.run(async {
        cluster.wait_serving(3).await;
        let (mut meta, mut writer) = (cluster.client(), cluster.client());
        writer.update(0, 0, WRITE, b"old bytes").await.expect("write");
        let removed = meta.update(0, 1, UpdateOp::Remove, b"").await.expect("cut");
        writer.update(0, 1, WRITE, b"newer").await.expect("write after the cut");
        let again = meta.send(0, 1, UpdateOp::Remove, b"").await;
        assert_eq!(again.expect("the same cut"), removed);
        // What a process sent that ended before the next one finished the same cut.
        let mut killed = cluster.client();
        for (generation, op) in
            [(0, UpdateOp::Remove), (1, UpdateOp::Remove), (1, UpdateOp::Truncate { length: 2 })]
        {
            let late = killed.update(0, generation, op, b"").await.expect_err("late");
            assert_eq!(late.code, Code::StaleTruncate, "{op:?} under {generation}");
        }
        cluster.assert_equal_copies(&[(0, b"newer".to_vec())].into()).await;
        // The file is unlinked: its chunks go under the next generation.
        meta.update(0, 2, UpdateOp::Remove, b"").await.expect("remove");
        cluster.assert_equal_copies(&[(0, Vec::new())].into()).await;
    });
}

#[test]
fn a_query_names_the_last_chunk_of_a_file_wherever_it_begins() {
    let cluster = Cluster::start(3);
    cluster.run(async {
        cluster.wait_serving(3).await;
        let mut client = cluster.client();
        for (index, text) in [(0, "0"), (1, "10"), (2, "210"), (5, "54321"), (9, "987654321")] {
            client.write(index, text.as_bytes()).await;
        }
        let chunk = |index, length| ChunkLength { index, length };
        for target in cluster.targets() {
            for from in [0, 5, 9, 10, u64::MAX] {
                let answer = client.query(target, from, 512).await;
                assert_eq!(answer.last, Some(chunk(9, 9)), "from {from} at {target}");
            }
            let part = client.query(target, 1, 2).await;
            assert_eq!(part.chunks, [chunk(1, 2), chunk(2, 3)]);
            assert_eq!(part.last, Some(chunk(9, 9)));
        }
        // A removed chunk is none, though its record stays.
        client.update(9, 1, UpdateOp::Remove, b"").await.expect("remove");
        client.update(2, 1, UpdateOp::Remove, b"").await.expect("remove");
        for target in cluster.targets() {
            let rest = client.query(target, 2, 512).await;
            assert_eq!(rest.chunks, [chunk(5, 5)]);
            assert_eq!(rest.last, Some(chunk(5, 5)));
            assert_eq!(client.query(target, u64::MAX, 512).await.last, Some(chunk(5, 5)));
        }
    });
}

#[test]
fn the_admin_endpoints_say_whether_and_how_a_server_serves() {
    let cluster = Cluster::start(1);
    cluster.run(async {
        cluster.wait_serving(1).await;
        let mut client = cluster.client();
        // The server has taken up the chain that the manager shows: else the write is sent twice.
        client.read_at(cluster.targets()[0], 0).await.expect("read");
        client.write(0, b"x").await;
        assert_eq!(cluster.admin(1, "/healthz").await, (200, "ok\n".into()));
        assert_eq!(cluster.admin(1, "/readyz").await, (200, "ok\n".into()));
        assert_eq!(cluster.admin(1, "/elsewhere").await.0, 404);
        let (status, text) = cluster.admin(1, "/metrics").await;
        assert_eq!(status, 200);
        assert!(text.ends_with("# EOF\n"), "{text}");
        for line in [
            r#"lampyris_storage_requests_total{kind="update",outcome="ok"} 1"#,
            "lampyris_storage_update_bytes_total 1",
            "lampyris_storage_handler_panics_total 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in {text}");
        }
        let (status, text) = cluster.admin(1, "/state").await;
        let state: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(status, 200);
        let seen = [&state["cluster"], &state["node"], &state["draining"]];
        assert_eq!(seen, [&"test".into(), &10_001.into(), &serde_json::Value::Bool(false)]);
        assert_eq!(state["disks"].as_array().map(Vec::len), Some(1), "{state}");
        let target = &state["targets"][0];
        assert_eq!((&target["chain"], &target["state"]), (&1.into(), &"Serving".into()));
        // A server that its manager does not hear lives, and is not to be asked.
        cluster.cut(1);
        let (_, why) = cluster.wait_admin(1, "/readyz", 503).await;
        assert_eq!(why, "the lease from the manager has run out\n");
        assert_eq!(cluster.admin(1, "/healthz").await.0, 200);
        cluster.heal(1);
        cluster.wait_admin(1, "/readyz", 200).await;
    });
}

#[test]
fn a_log_level_that_is_none_is_refused_at_start() {
    let serve = "serve --cluster c --node-id 10001 --data /nowhere --manager m:1 --advertise a:1";
    let ended = std::process::Command::new(env!("CARGO_BIN_EXE_storage-node"))
        .args(serve.split(' '))
        .env("LAMPYRIS_LOG", "debgu")
        .output()
        .expect("start the server");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{said}");
    for part in ["LAMPYRIS_LOG", "debgu", "info,rpc=debug"] {
        assert!(said.contains(part), "{part} in {said}");
    }
}
