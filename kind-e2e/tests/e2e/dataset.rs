//! Real and made data on S3 and in the store, read three ways by labelled pods: every digest is the one that
//! was made with the data.

use std::time::Duration;

use anyhow::{Result, ensure};
use kind_e2e::training::{DataSet, TRAIN, data_sets, training};
use kind_e2e::{kube, wait};

/// An inspection starts a pod, and opens four files.
const INSPECTED_WITHIN: Duration = Duration::from_secs(60);
/// A load of 2.1 GiB, each byte to three replicas, on the two cores and the one disk that everything shares.
const LOADED_WITHIN: Duration = Duration::from_secs(300);

#[test]
fn datasets_on_s3_become_ready_with_rows_and_bytes() -> Result<()> {
    for set in data_sets()? {
        let (dataset, _) = wait::until(set.name, INSPECTED_WITHIN, || {
            let dataset = kube::get(TRAIN, "datasets.lampyris.dev", set.name)?;
            kube::is_true(&dataset, "Ready")?;
            Ok(dataset)
        })?;
        let status = &dataset["status"];
        ensure!(status["rows"] == set.digests["rows"], "{}: {status}", set.name);
        ensure!(status["bytes"] == set.bytes(), "{}: {status}", set.name);
        let files = set.digests["files"].as_array().map_or(0, Vec::len);
        ensure!(status["files"] == files, "{}: {status}", set.name);
    }
    Ok(())
}

#[test]
fn a_pod_reads_from_s3_what_was_put_there_by_file_by_ring_and_by_scan() -> Result<()> {
    read("from-s3", "", data_sets()?)
}

#[test]
fn a_load_copies_into_the_store_and_a_pod_reads_the_same_there() -> Result<()> {
    let sets = data_sets()?;
    for set in sets {
        let (load, _) = wait::until(set.name, LOADED_WITHIN, || {
            let load = kube::get(TRAIN, "datasetloads.lampyris.dev", set.name)?;
            kube::is_true(&load, "Complete")?;
            Ok(load)
        })?;
        let progress = &load["status"]["progress"];
        ensure!(progress["bytesDone"] == set.bytes() && progress["percent"] == 100, "{progress}");
        ensure!(load["status"]["digest"].as_str().is_some_and(|d| d.len() == 64), "{load}");
    }
    read("from-store", "-store", sets)
}

fn read(pod: &str, suffix: &str, sets: &[DataSet]) -> Result<()> {
    let pairs: Vec<String> = sets.iter().map(|set| set.pair(suffix)).collect();
    let mut args = vec!["job", pod];
    args.extend(pairs.iter().map(String::as_str));
    let said = training(&args)?;
    eprintln!("{said}");
    // Of each set: every file's sha256 and the rows, by file and by ring; rows and their number by scan; the filter.
    let expected: usize = sets
        .iter()
        .map(|set| 2 * (set.digests["files"].as_array().map_or(0, Vec::len) + 1) + 2 + 2)
        .sum();
    let last = said.lines().last().unwrap_or_default();
    ensure!(last == format!("{expected} comparisons: all digests agree"), "{said}");
    Ok(())
}
