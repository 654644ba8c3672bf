//! What goes wrong with a dataset on S3 is told in one word, on the Dataset and on the pod, within thirty seconds,
//! and heals without a restart of the pod.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::training::{
    DataSet, SECRET_WITHIN, TOLD_WITHIN, TRAIN, Trial, data_sets, has_reason, restarts, s3,
    training,
};
use kind_e2e::{kube, wait};

/// A pod that waits.
const SLEEP: &str = r#"["/usr/bin/python3","-c","import time; time.sleep(3600)"]"#;

fn set(name: &str) -> Result<&'static DataSet> {
    data_sets()?.iter().find(|set| set.name == name).with_context(|| format!("no data set {name}"))
}

fn runs(pod: &str, since: Instant, within: Duration) -> Result<()> {
    wait::since(since, &format!("{pod} runs"), within, || {
        let found = kube::get(TRAIN, "pod", pod)?;
        ensure!(found["status"]["containerStatuses"][0]["ready"] == true, "{}", found["status"]);
        Ok(())
    })?;
    Ok(())
}

/// A Dataset in this bucket with the keys of this Secret, and a pod that reads it; when their fault began.
fn start(trial: &Trial, bucket: &str, secret: &str) -> Result<Instant> {
    let since = Instant::now();
    training(&["dataset", trial.name(), bucket, secret])?;
    training(&["pod", trial.name(), SLEEP, trial.name()])?;
    Ok(since)
}

/// A failure that is there `since` then is told on the Dataset and on the pod; both within one and the same time.
fn told(trial: &Trial, reason: &str, since: Instant) -> Result<()> {
    let name = trial.name();
    wait::since(since, &format!("{reason} on Dataset {name}"), TOLD_WITHIN, || {
        has_reason(name, "False", reason)
    })?;
    let (events, took) =
        wait::since(since, &format!("{reason} on pod {name}"), TOLD_WITHIN, || {
            kube::told(TRAIN, name, reason)
        })?;
    eprintln!("{reason} told after {took:?}");
    let is_named = events.iter().all(|event| event.message.contains(name));
    ensure!(is_named, "an event does not name the Dataset: {events:?}");
    Ok(())
}

/// What was put right `since` then is seen by the Dataset and by the pod, again within one and the same time.
fn healed(trial: &Trial, since: Instant, within: Duration) -> Result<()> {
    let name = trial.name();
    let (_, took) = wait::since(since, &format!("Dataset {name} heals"), within, || {
        has_reason(name, "True", "Accessible")
    })?;
    runs(name, since, within)?;
    eprintln!("Dataset {name} heals after {took:?}, its pod runs after {:?}", since.elapsed());
    let count = restarts(name)?;
    ensure!(count == 0, "{name} has {count} restarts");
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
    let trial = Trial::begin("locked")?;
    explained(|| {
        s3(&["put", &format!("{}/flights.vortex", flights.folder), "locked/flights.vortex"])?;
        let good = kube::get(TRAIN, "secret", "s3-keys")?;
        let id = good["data"]["accessKeyId"].as_str().context("accessKeyId")?;
        let key = good["data"]["secretAccessKey"].as_str().context("secretAccessKey")?;
        secret("locked-keys", id, "d3Jvbmc=")?;
        let broken = start(&trial, "train", "locked-keys")?;
        told(&trial, "InvalidCredentials", broken)?;
        secret("locked-keys", id, key)?;
        healed(&trial, Instant::now(), SECRET_WITHIN)
    })
}

#[test]
fn a_missing_bucket_is_told_and_heals_when_it_is_made() -> Result<()> {
    let flights = set("flights")?;
    let trial = Trial::begin("homeless")?;
    explained(|| {
        let file = format!("{}/flights.vortex", flights.folder);
        s3(&["remove", "homeless/flights.vortex", "homeless"])?;
        let broken = start(&trial, "homeless", "s3-keys")?;
        told(&trial, "BucketNotFound", broken)?;
        s3(&["bucket", "homeless"])?;
        s3(&["put", &file, "homeless/flights.vortex", "homeless"])?;
        healed(&trial, Instant::now(), TOLD_WITHIN)
    })
}

#[test]
fn a_file_cut_short_is_told_and_heals_when_it_is_put_again() -> Result<()> {
    let flights = set("flights")?;
    let trial = Trial::begin("cut")?;
    explained(|| {
        let file = format!("{}/flights.vortex", flights.folder);
        let whole = std::fs::read(&file).with_context(|| format!("read {file}"))?;
        let folder = std::env::temp_dir().join(format!("lampyris-cut-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let cut = folder.join("cut.vortex");
        std::fs::write(&cut, whole.get(..whole.len() / 2).context("half of the file")?)?;
        s3(&["put", &cut.display().to_string(), "cut/flights.vortex"])?;
        std::fs::remove_dir_all(&folder)?;
        let broken = start(&trial, "train", "s3-keys")?;
        told(&trial, "TruncatedFile", broken)?;
        s3(&["put", &file, "cut/flights.vortex"])?;
        healed(&trial, Instant::now(), TOLD_WITHIN)
    })
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
    let trial = Trial::begin("moving")?;
    explained(|| change_during_scan(made, &trial))
}

fn change_during_scan(made: &DataSet, trial: &Trial) -> Result<()> {
    let name = trial.name();
    for part in ["part-00000.vortex", "part-00001.vortex"] {
        s3(&["put", &format!("{}/{part}", made.folder), &format!("{name}/{part}")])?;
    }
    let begin = start(trial, "train", "s3-keys")?;
    runs(name, begin, Duration::from_secs(60))?;
    let script = SLOW_SCAN.to_owned();
    let scan = std::thread::spawn(move || {
        kube::exec(TRAIN, name, "train", &["/usr/bin/python3", "-c", &script])
    });
    wait::until("the scan's first batch", Duration::from_secs(60), || {
        kube::exec(TRAIN, name, "train", &["/usr/bin/test", "-e", "/tmp/begun"])
    })?;
    // The second file becomes the first one: as good a file, but another than was listed.
    s3(&["put", &format!("{}/part-00000.vortex", made.folder), "moving/part-00001.vortex"])?;
    kube::exec(TRAIN, name, "train", &["/usr/bin/touch", "/tmp/go"])?;
    let broken = Instant::now();
    let said = scan.join().map_err(|_| anyhow::anyhow!("the scan's thread panicked"))??;
    ensure!(said.trim() == "failed DatasetChanged", "{said}");
    let reason = "DatasetChanged";
    wait::since(broken, reason, TOLD_WITHIN, || kube::told(TRAIN, name, reason))?;
    // Nothing has to be put right: the list of files is made anew, and fits.
    wait::until("Recovered", TOLD_WITHIN, || kube::told(TRAIN, name, "Recovered"))?;
    let again = r#"import lampyris; print(sum(len(b["id"]) for b in lampyris.scan("moving", columns=["id"])))"#;
    let rows = kube::exec(TRAIN, name, "train", &["/usr/bin/python3", "-c", again])?;
    // The first file, which has half of the rows, rounded down, is there twice.
    let expected = made.digests["rows"].as_u64().context("rows")? / 2 * 2;
    ensure!(rows.trim() == expected.to_string(), "{rows} rows, not {expected}");
    ensure!(restarts(name)? == 0, "the pod restarted");
    Ok(())
}
