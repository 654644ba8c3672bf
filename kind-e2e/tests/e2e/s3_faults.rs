//! What goes wrong with a dataset on S3 is told in one word, on the Dataset and on the pod, within thirty seconds,
//! and heals without a restart of the pod.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kind_e2e::training::{
    DataSet, SECRET_WITHIN, TOLD_WITHIN, TRAIN, data_sets, event, forget, has_reason, restarts, s3,
    training,
};
use kind_e2e::{kube, wait};

/// A pod that waits.
const SLEEP: &str = r#"["/usr/bin/python3","-c","import time; time.sleep(3600)"]"#;

fn set(name: &str) -> Result<&'static DataSet> {
    data_sets()?.iter().find(|set| set.name == name).with_context(|| format!("no data set {name}"))
}

fn runs(pod: &str, within: Duration) -> Result<()> {
    wait::until(&format!("{pod} runs"), within, || {
        let found = kube::get(TRAIN, "pod", pod)?;
        ensure!(found["status"]["containerStatuses"][0]["ready"] == true, "{}", found["status"]);
        Ok(())
    })?;
    Ok(())
}

/// A failure on the Dataset and on the pod, each within its time.
fn told(dataset: &str, pod: &str, reason: &str) -> Result<()> {
    wait::until(&format!("{reason} on {dataset}"), TOLD_WITHIN, || {
        has_reason(dataset, "False", reason)
    })?;
    let (text, _) = wait::until(&format!("{reason} on {pod}"), TOLD_WITHIN, || event(pod, reason))?;
    ensure!(text.contains(dataset), "the event does not name the Dataset: {text}");
    Ok(())
}

fn healed(dataset: &str, pod: &str, within: Duration) -> Result<()> {
    wait::until(&format!("{dataset} heals"), within, || has_reason(dataset, "True", "Accessible"))?;
    runs(pod, within)?;
    let count = restarts(pod)?;
    ensure!(count == 0, "{pod} has {count} restarts");
    Ok(())
}

fn secret(name: &str, id: &str, key: &str) -> Result<()> {
    kube::apply(&format!(
        "{{\"apiVersion\":\"v1\",\"kind\":\"Secret\",\"metadata\":{{\"name\":\"{name}\",\"namespace\":\"{TRAIN}\"}},\
         \"data\":{{\"accessKeyId\":\"{id}\",\"secretAccessKey\":\"{key}\"}}}}"
    ))?;
    Ok(())
}

#[test]
fn a_wrong_secret_is_told_and_the_right_one_heals_the_waiting_pod() -> Result<()> {
    let flights = set("flights")?;
    let file = format!("{}/flights.vortex", flights.folder);
    forget("locked")?;
    s3(&["put", &file, "locked/flights.vortex"])?;
    let good = kube::get(TRAIN, "secret", "s3-keys")?;
    let id = good["data"]["accessKeyId"].as_str().context("accessKeyId")?;
    secret("locked-keys", id, "d3Jvbmc=")?;
    training(&["dataset", "locked", "train", "locked-keys"])?;
    training(&["pod", "locked", SLEEP, "locked"])?;
    told("locked", "locked", "InvalidCredentials")?;
    secret(
        "locked-keys",
        id,
        good["data"]["secretAccessKey"].as_str().context("secretAccessKey")?,
    )?;
    healed("locked", "locked", SECRET_WITHIN)
}

#[test]
fn a_missing_bucket_is_told_and_heals_when_it_is_made() -> Result<()> {
    let flights = set("flights")?;
    forget("homeless")?;
    s3(&["remove", "homeless/flights.vortex", "homeless"])?;
    training(&["dataset", "homeless", "homeless", "s3-keys"])?;
    training(&["pod", "homeless", SLEEP, "homeless"])?;
    told("homeless", "homeless", "BucketNotFound")?;
    s3(&["bucket", "homeless"])?;
    s3(&[
        "put",
        &format!("{}/flights.vortex", flights.folder),
        "homeless/flights.vortex",
        "homeless",
    ])?;
    healed("homeless", "homeless", TOLD_WITHIN)
}

#[test]
fn a_file_cut_short_is_told_and_heals_when_it_is_put_again() -> Result<()> {
    let flights = set("flights")?;
    let file = format!("{}/flights.vortex", flights.folder);
    forget("cut")?;
    let whole = std::fs::read(&file).with_context(|| format!("read {file}"))?;
    let folder = std::env::temp_dir().join(format!("lampyris-cut-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let cut = folder.join("cut.vortex");
    std::fs::write(&cut, whole.get(..whole.len() / 2).context("half of the file")?)?;
    s3(&["put", &cut.display().to_string(), "cut/flights.vortex"])?;
    std::fs::remove_dir_all(&folder)?;
    training(&["dataset", "cut", "train", "s3-keys"])?;
    training(&["pod", "cut", SLEEP, "cut"])?;
    told("cut", "cut", "TruncatedFile")?;
    s3(&["put", &file, "cut/flights.vortex"])?;
    healed("cut", "cut", TOLD_WITHIN)
}

/// Reads the first batch, says so, and goes on when the file /tmp/go is there; prints how it ended.
const SLOW_SCAN: &str = r#"
import os, sys, time, lampyris
scan = lampyris.scan("moving", format="numpy", batch_rows=512, slab_bytes=8 << 20)
rows = len(next(scan)["id"])
open("/tmp/begun", "w").close()
deadline = time.monotonic() + 60
while not os.path.exists("/tmp/go"):
    assert time.monotonic() < deadline, "nobody said go"
    time.sleep(0.05)
try:
    for batch in scan:
        rows += len(batch["id"])
    print("read", rows)
except lampyris.DatasetFailed as error:
    print("failed", error.reason)
"#;

#[test]
fn an_object_that_changes_during_a_scan_fails_it_and_a_new_scan_reads_the_new_one() -> Result<()> {
    let made = set("made")?;
    forget("moving")?;
    for part in ["part-00000.vortex", "part-00001.vortex"] {
        s3(&["put", &format!("{}/{part}", made.folder), &format!("moving/{part}")])?;
    }
    training(&["dataset", "moving", "train", "s3-keys"])?;
    training(&["pod", "moving", SLEEP, "moving"])?;
    runs("moving", Duration::from_secs(60))?;
    let script = SLOW_SCAN.to_owned();
    let scan = std::thread::spawn(move || {
        kube::exec(TRAIN, "moving", "train", &["/usr/bin/python3", "-c", &script])
    });
    wait::until("the scan's first batch", Duration::from_secs(60), || {
        kube::exec(TRAIN, "moving", "train", &["/usr/bin/test", "-e", "/tmp/begun"])
    })?;
    // The second file becomes the first one: as good a file, but another than was listed.
    s3(&["put", &format!("{}/part-00000.vortex", made.folder), "moving/part-00001.vortex"])?;
    kube::exec(TRAIN, "moving", "train", &["/usr/bin/touch", "/tmp/go"])?;
    let said = scan.join().map_err(|_| anyhow::anyhow!("the scan's thread panicked"))??;
    ensure!(said.trim() == "failed DatasetChanged", "{said}");
    wait::until("DatasetChanged on the pod", TOLD_WITHIN, || event("moving", "DatasetChanged"))?;
    wait::until("Recovered on the pod", TOLD_WITHIN, || event("moving", "Recovered"))?;
    let again = r#"import lampyris; print(sum(len(b["id"]) for b in lampyris.scan("moving", columns=["id"])))"#;
    let rows = kube::exec(TRAIN, "moving", "train", &["/usr/bin/python3", "-c", again])?;
    // The first file, which has half of the rows, rounded down, is there twice.
    let expected = made.digests["rows"].as_u64().context("rows")? / 2 * 2;
    ensure!(rows.trim() == expected.to_string(), "{rows} rows, not {expected}");
    ensure!(restarts("moving")? == 0, "the pod restarted");
    Ok(())
}
