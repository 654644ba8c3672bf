//! Storage that fails under pods that read and write: a process killed, a node cut off, everything killed at once.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kind_e2e::command::run;
use kind_e2e::explain::explained;
use kind_e2e::node::{self, Trouble};
use kind_e2e::pod::{Exercise, Pod, kill_all, kill_in, untroubled};
use kind_e2e::site::{CLUSTER, STORAGE, manager_status, pods};
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
/// A read that its server had admitted before its lease ended is answered within this.
const LAST_ANSWERS: Duration = Duration::from_secs(10);

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
        let mut load = Self { reader, writer, reading, writing };
        load.goes_on()?;
        Ok(load)
    }

    /// Waits until both have done more than now.
    fn goes_on(&mut self) -> Result<()> {
        self.reading.goes_on("reading")?;
        self.writing.goes_on("writing")
    }

    /// Ends both; nothing failed, nothing took too long, and the reader's node has what the writer closed.
    fn end(self, read_stall: Duration, write_stall: Duration) -> Result<()> {
        let (read, wrote) = (self.reading.end()?, self.writing.end()?);
        untroubled("reading", &read, read_stall)?;
        untroubled("writing", &wrote, write_stall)?;
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

fn text<'a>(value: &'a Value, pointer: &str) -> Result<&'a str> {
    value.pointer(pointer).and_then(Value::as_str).with_context(|| format!("{pointer} in {value}"))
}

/// Waits until every chain has all its replicas, as the manager says, and the operator has noticed; what `since` adds
/// is the time before.
fn whole(since: Instant) -> Result<()> {
    wait::until("every chain whole", WHOLE_WITHIN, || {
        let chains = manager_status()?["chains"].clone();
        ensure!(chains["serving"] != 0 && chains["serving"] == chains["total"], "{chains}");
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

/// Waits until the one container of a pod was started again since `old` was read, and is ready.
fn runs_again(old: &Value) -> Result<()> {
    let (name, restarts) =
        (text(old, "/metadata/name")?, &old["status"]["containerStatuses"][0]["restartCount"]);
    wait::until(&format!("{name} runs again"), WHOLE_WITHIN, || {
        let pod = kube::get(STORAGE, "pod", name)?;
        let status = &pod["status"]["containerStatuses"][0];
        ensure!(status["restartCount"] != *restarts && status["ready"] == true, "{status}");
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_killed_storage_process_fails_no_read_and_no_write() -> Result<()> {
    explained(|| {
        let mut load = Load::start("killed", "node-1", "node-2")?;
        for victim in pods("storage")?.iter().take(2) {
            let begin = Instant::now();
            kill_in(victim, "storage-node")?;
            runs_again(victim)?;
            whole(begin)?;
            load.goes_on()?;
        }
        load.end(READ_STALL, WRITE_STALL)
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
        let mut load = Load::start("cut-off", "node-1", other)?;
        let inside = Pod::start("cut-off-inside", cut)?;
        let mut reading_inside = inside.begin_on_node(&["read", "/data/read", "1"])?;
        reading_inside.goes_on("reading on the node")?;
        let begin = Instant::now();
        let trouble = Trouble::partition(cut)?;
        degraded()?;
        refuses(cut, text(victim, "/status/podIP")?)?;
        let answered = falls_silent(&mut reading_inside)?;
        load.goes_on()?;
        std::thread::sleep(CUT_OFF.saturating_sub(begin.elapsed())); // the span itself is the fault
        let later = reading_inside.done()?;
        ensure!(later == answered, "{} reads were answered after the lease", later - answered);
        trouble.heal()?;
        whole(begin)?;
        load.goes_on()?;
        // Its reads had nobody to ask for most of a minute, so some of them may have been given up.
        eprintln!("reading on the node that was cut off: {}", reading_inside.end()?);
        drop(inside);
        load.end(READ_STALL, WRITE_STALL)?;
        let pod = Pod::start("cut-off-later", cut)?;
        pod.exercise(&["create", "/data/later", "3000000"])?;
        pod.exercise(&["verify", "/data/later"])?;
        pod.exercise(&["remove", "/data/later"])?;
        Ok(())
    })
}

/// Inside the cut-off node: its storage server knows that it may not answer any more.
fn refuses(node: &str, address: &str) -> Result<()> {
    let url = format!("http://{address}:9101/readyz");
    wait::until("the cut-off server is not ready", Duration::from_secs(20), || {
        let mut curl = node::command(node, "curl")?;
        let said = run(curl.args(["-s", "-m", "2", "-w", " %{http_code}", &url]))?;
        ensure!(said.trim_end().ends_with("503"), "{said}");
        eprintln!("cut-off server: {said}");
        Ok(())
    })?;
    Ok(())
}

/// Waits until no read is answered any more; how many were. The reader is next to a server that has all the bytes and
/// that it can still reach, so it is the server that does not answer.
fn falls_silent(reading: &mut Exercise) -> Result<u64> {
    let mut before = reading.done()?;
    let (answered, _) = wait::until("the cut-off server's last answer", LAST_ANSWERS, || {
        std::thread::sleep(Duration::from_secs(1)); // a span without an answer is what is waited for
        let now = reading.done()?;
        ensure!(std::mem::replace(&mut before, now) == now, "{now} reads");
        Ok(now)
    })?;
    Ok(answered)
}

#[test]
fn everything_killed_at_once_returns_by_itself_with_all_it_had() -> Result<()> {
    explained(|| {
        let mut load = Load::start("all", "node-1", "node-3")?;
        for number in 0..4 {
            load.reader.exercise(&["create", &format!("/data/all/{number}"), "4000000"])?;
        }
        let begin = Instant::now();
        let (storage, meta) = (pods("storage")?, pods("meta")?);
        let victims: Vec<(&Value, &str)> = storage
            .iter()
            .map(|pod| (pod, "storage-node"))
            .chain(meta.iter().map(|pod| (pod, "meta")))
            .collect();
        ensure!(victims.len() == 4, "{} servers", victims.len());
        kill_all(&victims)?;
        for (pod, _) in victims {
            runs_again(pod)?;
        }
        whole(begin)?;
        load.goes_on()?;
        for number in 0..4 {
            let path = format!("/data/all/{number}");
            ensure!(load.writer.exercise(&["verify", &path])?["bytes"] == 4_000_000);
            ensure!(load.reader.exercise(&["verify", &path])?["bytes"] == 4_000_000);
        }
        load.writer.exercise(&["remove", "/data/all"])?;
        // Calls wait until the servers are back, however long that takes; none of them fails.
        load.end(WHOLE_WITHIN, WHOLE_WITHIN)
    })
}
