//! Mutates what others send us: reviews of pods, and answers of a manager. Whatever comes, the
//! operator neither panics nor believes it. `LAMPYRIS_FUZZ_SECONDS` says for how long.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use crds::{ChainTable, Dataset};
use k8s_openapi::jiff::Timestamp;
use operator::plan::cluster::{ClusterView, ManagerStatus};
use operator::plan::table::TableView;
use operator::plan::{Children, Env, Images, cluster, lint, table};
use operator::webhook::{ask, inject};
use operator::{http, observe};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Exchanges over a socket: each takes a port for a minute.
const EXCHANGES_MAX: u64 = 4_000;

fn images() -> Images {
    Images { registry: "r".to_owned(), tag: "1".to_owned(), pull_policy: "Always".to_owned() }
}

fn pods() -> Vec<Value> {
    let folder = "tests/injection";
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let pods = paths.filter(|path| path.to_str().unwrap().ends_with(".pod.yaml"));
    pods.map(|path| serde_yaml_ng::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
        .collect()
}

fn dataset(name: &str) -> Dataset {
    serde_json::from_value(json!({
        "apiVersion": "lampyris.dev/v1alpha1", "kind": "Dataset",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"format": "Vortex", "readOnly": false,
            "source": {"cluster": {"ref": {"name": "train"}, "path": "/x"}}},
    }))
    .unwrap()
}

fn inject(pod: &Value) -> Option<Vec<Value>> {
    let ask = ask::read(pod, "team").ok()?;
    let found: Vec<_> = ask.mentions.iter().map(|m| Some(dataset(&m.name))).collect();
    inject::patch(pod, "team", &ask, &found, &images()).ok()
}

/// An AdmissionReview: what is allowed is patched as it says, once, and shows nobody's container
/// what only ours may see.
fn review(bytes: &[u8]) {
    let Ok(review) = serde_json::from_slice::<Value>(bytes) else { return };
    let pod = &review["request"]["object"];
    let Some(operations) = pod["spec"].is_object().then(|| inject(pod)).flatten() else { return };
    let patch: json_patch::Patch = serde_json::from_value(json!(operations)).unwrap();
    let mut injected = pod.clone();
    // A pod with lists that are none is the API server's to refuse.
    if json_patch::patch(&mut injected, &patch).is_err() {
        return;
    }
    for list in ["containers", "initContainers"] {
        for container in injected["spec"][list].as_array().into_iter().flatten() {
            let ours = ["lampyris-mount", "lampyris-scan"];
            if list == "initContainers" && ours.iter().any(|name| container["name"] == *name) {
                continue;
            }
            for mount in container["volumeMounts"].as_array().into_iter().flatten() {
                assert_ne!(mount["name"], "lampyris-private", "{injected}");
            }
        }
    }
    assert_eq!(inject(&injected), Some(Vec::new()), "{injected}");
}

#[test]
fn no_review_makes_the_webhook_panic_or_give_away_its_sockets() {
    let reviews = |pod: Value| {
        let again = inject(&pod).map(|operations| {
            let patch: json_patch::Patch = serde_json::from_value(json!(operations)).unwrap();
            let mut injected = pod.clone();
            json_patch::patch(&mut injected, &patch).unwrap();
            injected
        });
        [Some(pod), again].into_iter().flatten().map(|pod| {
            json!({"request": {"uid": "u", "namespace": "team", "object": pod}})
                .to_string()
                .into_bytes()
        })
    };
    let good: Vec<Vec<u8>> = pods().into_iter().flat_map(reviews).collect();
    good.iter().for_each(|bytes| review(bytes));
    let runs = rpc::fuzz::run(|random| {
        let mut bytes = good[random.below(good.len())].clone();
        let donor = &good[random.below(good.len())];
        random.mutate(&mut bytes, donor);
        review(&bytes);
    });
    assert!(runs > 500, "only {runs} runs");
}

fn view() -> (ClusterView, ChainTable) {
    let object = |kind: &str, name: &str, spec: Value| {
        json!({"apiVersion": "lampyris.dev/v1alpha1", "kind": kind, "spec": spec,
            "metadata": {"name": name, "namespace": "storage", "uid": name, "generation": 1}})
    };
    let members: Vec<Value> = (10_001..10_004)
        .map(|id| json!({"nodeId": id, "failureDomain": format!("n{id}")}))
        .collect();
    let spec = json!({"clusterRef": {"name": "train"}, "tableId": 1, "revision": 1, "replicas": 3,
        "targetsPerNode": 3, "chunkSizeBytes": 1 << 20, "nodes": members});
    let table = object("ChainTable", "train-table-1", spec);
    let volume = json!({"size": "1Gi"});
    let spec = json!({"storage": {"count": 3, "volume": volume}, "metadata": {"store": {"embedded": {}}, "volume": volume}});
    let node = |id: i64| {
        let spec = json!({"clusterRef": {"name": "train"}, "nodeId": id});
        serde_json::from_value(object("StorageNode", &format!("train-{id}"), spec)).unwrap()
    };
    let table: ChainTable = serde_json::from_value(table).unwrap();
    let cluster = ClusterView {
        cluster: serde_json::from_value(object("StorageCluster", "train", spec)).unwrap(),
        nodes: (10_001..10_004).map(node).collect(),
        table: Some(table.clone()),
        children: Children::new(),
        hosts: BTreeMap::from([(10_001, "n1".to_owned())]),
        domains: BTreeMap::new(),
        manager: None,
    };
    (cluster, table)
}

/// A manager's status: it is no status, or there is a plan that may be carried out.
fn status(manager: Option<ManagerStatus>) {
    let env = Env { images: images(), jobs: Default::default(), now: Timestamp::UNIX_EPOCH };
    let (mut cluster, table) = view();
    let table = TableView { table, manager: manager.clone(), refusal: None };
    assert_eq!(lint::lint(&table::plan(&table, &env)), Vec::<String>::new());
    cluster.manager = manager;
    assert_eq!(lint::lint(&cluster::plan(&cluster, &env)), Vec::<String>::new());
}

fn statuses() -> Vec<Vec<u8>> {
    let targets = json!({"total": 3, "serving": 2, "syncing": 1, "offline": 0});
    let nodes: Vec<Value> = (10_001..10_004)
        .map(|id| {
            json!({"nodeId": id, "address": "a:1", "alive": true, "lastHeartbeatMs": 5,
            "targets": targets, "capacityBytes": 1u64 << 40, "usedBytes": 7})
        })
        .collect();
    let table = json!({"digest": "0".repeat(64), "nodes": 4, "chains": 3, "replicas": 3,
        "targetsPerNode": 3, "chunkSizeBytes": 1 << 20});
    let chains = json!({"total": 3, "serving": 1, "degraded": 1, "unavailable": 1});
    [json!(table), Value::Null]
        .into_iter()
        .map(|table| {
            json!({"cluster": "train", "ready": true, "tableRevision": 1, "table": table,
                "chains": chains, "nodes": nodes})
        })
        .map(|status| status.to_string().into_bytes())
        .collect()
}

#[test]
fn no_status_of_a_manager_makes_a_plan_panic() {
    let good = statuses();
    let runs = rpc::fuzz::run(|random| {
        let mut bytes = good[random.below(good.len())].clone();
        let donor = &good[random.below(good.len())];
        random.mutate(&mut bytes, donor);
        if let Ok(manager) = serde_json::from_slice(&bytes) {
            status(Some(manager));
        }
    });
    assert!(runs > 500, "only {runs} runs");
}

/// Answers the next connection with `bytes`, and ends it.
async fn answer(listener: &TcpListener, bytes: &[u8]) {
    let (mut stream, _) = listener.accept().await.unwrap();
    // The request, whole: it has a body or none, and the client says how long.
    let mut head = [0; 4096];
    assert!(stream.read(&mut head).await.unwrap() > 0);
    // The client may have heard enough before the end.
    drop(stream.write_all(bytes).await);
    drop(stream.shutdown().await);
}

#[test]
fn no_answer_over_http_makes_its_reader_panic_or_wait() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let mut good: Vec<Vec<u8>> = Vec::new();
    for body in statuses() {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        good.push([head.as_bytes(), &body].concat());
        let head = format!(
            "HTTP/1.1 409 Conflict\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n",
            body.len()
        );
        good.push([head.as_bytes(), &body, b"\r\n0\r\n\r\n"].concat());
    }
    let runs = rpc::fuzz::run_at_most(EXCHANGES_MAX, |random| {
        let mut bytes = good[random.below(good.len())].clone();
        let donor = &good[random.below(good.len())];
        random.mutate(&mut bytes, donor);
        let (manager, ()) = runtime
            .block_on(async { tokio::join!(observe::manager(&host), answer(&listener, &bytes)) });
        status(manager);
    });
    assert!(runs > 50, "only {runs} runs");
    let mut push = good.swap_remove(1);
    push.truncate(push.len() - 5);
    let cut = runtime.block_on(async {
        let put = http::exchange(hyper::Method::PUT, &host, "/v1/table", None);
        tokio::join!(put, answer(&listener, &push)).0
    });
    assert!(matches!(cut, Err(http::HttpError::Body(..))), "{cut:?}");
}
