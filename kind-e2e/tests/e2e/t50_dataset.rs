//! Real and made data on S3 and in the store, read three ways by labelled pods: every digest is the one that
//! was made with the data.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::pod::Pod;
use kind_e2e::training::{DataSet, TRAIN, data_sets, training};
use kind_e2e::{kube, wait};
use serde_json::Value;

/// An inspection starts a pod, and opens four files.
const INSPECTED_WITHIN: Duration = Duration::from_secs(60);
/// A load of 2.1 GiB, each byte to three replicas, on the two cores and the one disk that everything shares.
const LOADED_WITHIN: Duration = Duration::from_secs(300);

#[test]
fn datasets_on_s3_become_ready_with_rows_and_bytes() -> Result<()> {
    explained(|| {
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
    })
}

#[test]
fn a_pod_reads_from_s3_what_was_put_there_by_file_by_ring_and_by_scan() -> Result<()> {
    explained(|| read("from-s3", "", data_sets()?))
}

#[test]
fn a_load_copies_into_the_store_and_a_pod_reads_the_same_there() -> Result<()> {
    explained(|| {
        let sets = data_sets()?;
        for set in sets {
            let (load, _) = wait::until(set.name, LOADED_WITHIN, || {
                let load = kube::get(TRAIN, "datasetloads.lampyris.dev", set.name)?;
                kube::is_true(&load, "Complete")?;
                Ok(load)
            })?;
            let progress = &load["status"]["progress"];
            let all = progress["bytesDone"] == set.bytes() && progress["percent"] == 100;
            ensure!(all, "{progress}");
            ensure!(load["status"]["digest"].as_str().is_some_and(|d| d.len() == 64), "{load}");
        }
        read("from-store", "-store", sets)
    })
}

/// Charts, servers, Jobs, and pods that were injected: what we start, and what we add to. It comes last in this
/// module because pods of ended Jobs stay for a while.
#[test]
fn every_pod_of_ours_has_requests_and_limits() -> Result<()> {
    explained(|| {
        data_sets()?;
        let _injected = Pod::start("bounded", "node-1")?;
        let kinds = ["inspect", "keeper", "load", "meta", "node", "operator", "storage"];
        let (pods, _) = wait::until("a pod of each kind", INSPECTED_WITHIN, || {
            let pods = our_pods()?;
            let component = |pod: &Value| {
                let labels = &pod["metadata"]["labels"];
                labels["app.kubernetes.io/component"].as_str().map(str::to_owned)
            };
            let seen: BTreeSet<String> = pods.iter().filter_map(component).collect();
            let missing: Vec<_> = kinds.iter().filter(|kind| !seen.contains(**kind)).collect();
            ensure!(missing.is_empty(), "no pods of {missing:?}, only of {seen:?}");
            Ok(pods)
        })?;
        let missing: Vec<String> = pods
            .iter()
            .flat_map(|pod| {
                let name = pod["metadata"]["name"].to_string();
                kube::unbounded(pod).into_iter().map(move |what| format!("pod {name}: {what}"))
            })
            .collect();
        ensure!(missing.is_empty(), "{missing:#?}");
        Ok(())
    })
}

/// The pods of all namespaces that charts and operator made, and those that were injected.
fn our_pods() -> Result<Vec<Value>> {
    let mut pods = Vec::new();
    for selector in ["app.kubernetes.io/name=lampyris", "lampyris.dev/inject=true"] {
        let found = kube::list_everywhere("pods", selector)?;
        ensure!(!found.is_empty(), "no pod has {selector}");
        pods.extend(found);
    }
    Ok(pods)
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
