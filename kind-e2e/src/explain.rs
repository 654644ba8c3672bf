//! What the cluster knew when a test failed: without it, a red run of a gate can only be guessed at.

use anyhow::Result;

use crate::pod::EXERCISE;
use crate::training::TRAIN;
use crate::{kube, node, site};

/// Runs a test's body; when it fails, prints what the cluster knows about our pods and objects.
///
/// # Errors
/// That of the body.
pub fn explained<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = body();
    if let Err(error) = &outcome {
        eprintln!("failed: {error:#}");
        explain();
    }
    outcome
}

fn explain() {
    // The logs of pods that this test deletes are gone a moment later.
    eprintln!("{}", node::keep_logs().unwrap_or_else(|error| format!("{error:#}")));
    let ours = "storageclusters,storagenodes,chaintables,datasets,datasetloads";
    print(&["get", "pods", "-A", "-o", "wide"]);
    print(&["get", ours, "-A"]);
    for namespace in [EXERCISE, TRAIN, site::STORAGE, site::SYSTEM] {
        print(&["-n", namespace, "get", "events", "--sort-by=.metadata.creationTimestamp"]);
    }
    for (namespace, component) in
        [(site::SYSTEM, "operator"), (site::SYSTEM, "node"), (site::STORAGE, "meta")]
    {
        let selector = format!("app.kubernetes.io/component={component}");
        print(&["-n", namespace, "logs", "--prefix", "--tail=20", "-l", &selector]);
    }
}

fn print(args: &[&str]) {
    // What cannot be told is told as that: the test has failed for another reason already.
    let said = kube::kubectl(args).unwrap_or_else(|error| format!("{error:#}"));
    eprintln!("$ kubectl {}\n{said}", args.join(" "));
}
