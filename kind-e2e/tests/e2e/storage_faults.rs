//! Storage that fails under pods that read and write: a process killed, a node cut off, everything killed at once.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kind_e2e::command::{cache, run};
use kind_e2e::node::Trouble;
use kind_e2e::pod::{Exercise, Pod, explained, kill_in, untroubled};
use kind_e2e::site::{CLUSTER, STORAGE};
use kind_e2e::{kube, wait};
use serde_json::Value;

/// No read takes longer, whatever happens to one storage node.
const READ_STALL: Duration = Duration::from_secs(5);
/// Writes go on with two replicas within this.
const WRITE_STALL: Duration = Duration::from_secs(10);
/// Restarting, catching up and being told so.
const WHOLE_WITHIN: Duration = Duration::from_secs(90);
/// How long a node is cut off: ten leases.
const CUT_OFF: Duration = Duration::from_secs(60);

/// A reader on one node and a writer on another.
struct Load {
    reader: Pod,
    writer: Pod,
    reading: Exercise,
    writing: Exercise,
}

impl Load {
    fn start(name: &str, reads_on: &str, writes_on: &str) -> Result<Self> {
        let reader = Pod::start(&format!("{name}-reader"), reads_on)?;
        let writer = Pod::start(&format!("{name}-writer"), writes_on)?;
        writer.exercise(&["create", "/data/read", "16777216"])?;
        let reading = reader.begin(&["read", "/data/read", "8"])?;
        let writing = writer.begin(&["write", "/data", "2097152"])?;
        Ok(Self { reader, writer, reading, writing })
    }

    /// Ends both; nothing failed, nothing took too long, and the reader's node has what the writer closed.
    fn end(self) -> Result<()> {
        let (read, wrote) = (self.reading.end()?, self.writing.end()?);
        untroubled("reading", &read, READ_STALL)?;
        untroubled("writing", &wrote, WRITE_STALL)?;
        let files = wrote["files"].as_u64().context("files")?.min(8);
        for number in 0..files {
            let path = format!("/data/written-{number}");
            ensure!(self.reader.exercise(&["verify", &path])?["bytes"] == 2_097_152);
            self.writer.exercise(&["remove", &path])?;
        }
        self.writer.exercise(&["remove", "/data/read"])?;
        Ok(())
    }
}

fn pods(component: &str) -> Result<Vec<Value>> {
    let selector =
        format!("lampyris.dev/cluster={CLUSTER},app.kubernetes.io/component={component}");
    kube::list(STORAGE, "pods", &selector)
}

fn text<'a>(value: &'a Value, pointer: &str) -> Result<&'a str> {
    value.pointer(pointer).and_then(Value::as_str).with_context(|| format!("{pointer} in {value}"))
}

/// Waits until every chain has all its replicas; what `since` adds is the time before.
fn whole(since: Instant) -> Result<()> {
    wait::until("every chain whole", WHOLE_WITHIN, || {
        let cluster = kube::get(STORAGE, "storageclusters.lampyris.dev", CLUSTER)?;
        kube::is_true(&cluster, "Ready")?;
        let (status, why) = kube::condition(&cluster, "Degraded")?;
        ensure!(status == "False", "{why}");
        Ok(())
    })?;
    eprintln!("every chain whole after {:?}", since.elapsed());
    Ok(())
}

/// Waits until the cluster says that replicas are missing.
fn degraded() -> Result<()> {
    wait::until("the cluster is degraded", Duration::from_secs(30), || {
        let cluster = kube::get(STORAGE, "storageclusters.lampyris.dev", CLUSTER)?;
        let (status, why) = kube::condition(&cluster, "Degraded")?;
        ensure!(status == "True", "{why}");
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_killed_storage_process_fails_no_read_and_no_write() -> Result<()> {
    explained(|| {
        let load = Load::start("killed", "node-1", "node-2")?;
        for victim in pods("storage")?.iter().take(2) {
            let begin = Instant::now();
            let restarts = victim["status"]["containerStatuses"][0]["restartCount"].clone();
            kill_in(victim, "storage-node")?;
            wait::until("the storage process runs again", WHOLE_WITHIN, || {
                let pod = kube::get(STORAGE, "pod", text(victim, "/metadata/name")?)?;
                let status = &pod["status"]["containerStatuses"][0];
                ensure!(status["restartCount"] != restarts && status["ready"] == true, "{status}");
                Ok(())
            })?;
            whole(begin)?;
        }
        load.end()
    })
}

#[test]
fn a_storage_node_cut_off_for_a_minute_is_missed_by_nobody() -> Result<()> {
    explained(|| {
        let meta = pods("meta")?;
        let meta_node = text(meta.first().context("a metadata pod")?, "/spec/nodeName")?;
        // node-1 holds the API server.
        let (cut, other) =
            if meta_node == "node-2" { ("node-3", "node-2") } else { ("node-2", "node-3") };
        let victims = pods("storage")?;
        let victim = victims
            .iter()
            .find(|pod| pod["spec"]["nodeName"] == cut)
            .context("a storage pod on the node")?;
        let load = Load::start("cut-off", "node-1", other)?;
        let begin = Instant::now();
        let trouble = Trouble::partition(cut)?;
        degraded()?;
        refuses(cut, text(victim, "/status/podIP")?)?;
        std::thread::sleep(CUT_OFF.saturating_sub(begin.elapsed())); // the span itself is the fault
        trouble.heal()?;
        whole(begin)?;
        load.end()?;
        let pod = Pod::start("cut-off-later", cut)?;
        pod.exercise(&["create", "/data/later", "3000000"])?;
        pod.exercise(&["verify", "/data/later"])?;
        pod.exercise(&["remove", "/data/later"])?;
        Ok(())
    })
}

/// Inside the cut-off node: its storage server knows that it may not answer any more.
fn refuses(node: &str, address: &str) -> Result<()> {
    let pid = std::fs::read_to_string(cache().join(format!("cluster/run/{node}/pid")))
        .context("the node's process")?;
    let url = format!("http://{address}:9101/readyz");
    wait::until("the cut-off server is not ready", Duration::from_secs(20), || {
        let mut curl = Command::new("nsenter");
        curl.args(["-t", pid.trim(), "-n", "curl", "-s", "-m", "2", "-w", " %{http_code}", &url]);
        let said = run(&mut curl)?;
        ensure!(said.trim_end().ends_with("503"), "{said}");
        eprintln!("cut-off server: {said}");
        Ok(())
    })?;
    Ok(())
}

#[test]
fn everything_killed_at_once_returns_by_itself_with_all_it_had() -> Result<()> {
    explained(|| {
        let (one, two) = (Pod::start("all-1", "node-1")?, Pod::start("all-2", "node-3")?);
        for number in 0..4 {
            one.exercise(&["create", &format!("/data/all/{number}"), "4000000"])?;
        }
        let begin = Instant::now();
        let (storage, meta) = (pods("storage")?, pods("meta")?);
        for pod in &storage {
            kill_in(pod, "storage-node")?;
        }
        for pod in &meta {
            kill_in(pod, "meta")?;
        }
        for old in storage.iter().chain(&meta) {
            let restarts = &old["status"]["containerStatuses"][0]["restartCount"];
            wait::until("everything runs again", WHOLE_WITHIN, || {
                let pod = kube::get(STORAGE, "pod", text(old, "/metadata/name")?)?;
                let status = &pod["status"]["containerStatuses"][0];
                ensure!(status["restartCount"] != *restarts && status["ready"] == true, "{status}");
                Ok(())
            })?;
        }
        whole(begin)?;
        for number in 0..4 {
            let path = format!("/data/all/{number}");
            ensure!(two.exercise(&["verify", &path])?["bytes"] == 4_000_000);
            ensure!(one.exercise(&["verify", &path])?["bytes"] == 4_000_000);
        }
        one.exercise(&["remove", "/data/all"])?;
        Ok(())
    })
}
