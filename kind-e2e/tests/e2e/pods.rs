//! Labelled pods with a Dataset of the store: what injection leaves alone, what init containers see, Jobs,
//! sidecars that die, an operator that is away.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kind_e2e::pod::{
    EXERCISE, Pod, container, explained, scratch, security_context, template, untroubled,
};
use kind_e2e::site::SYSTEM;
use kind_e2e::{kube, wait};
use serde_json::json;

/// A job of two small containers.
const JOB_WITHIN: Duration = Duration::from_secs(60);
/// The first restart of a sidecar follows at once.
const FIRST_STALL: Duration = Duration::from_secs(5);
/// The second one after kubelet's back-off.
const SECOND_STALL: Duration = Duration::from_secs(30);

#[test]
fn what_one_pod_writes_another_reads_on_another_node() -> Result<()> {
    explained(|| {
        let (writer, reader) = (Pod::start("pair-1", "node-1")?, Pod::start("pair-2", "node-2")?);
        let created = writer.exercise(&["create", "/data/pair", "5000000"])?;
        println!("5 MB written: {created}");
        ensure!(reader.exercise(&["verify", "/data/pair"])?["bytes"] == 5_000_000);
        ensure!(reader.exercise(&["list", "/data"])?["names"].to_string().contains("\"pair\""));
        reader.exercise(&["remove", "/data/pair"])?;
        let names = writer.exercise(&["list", "/data"])?;
        ensure!(!names.to_string().contains("\"pair\""), "{names}");
        Ok(())
    })
}

#[test]
fn injection_leaves_the_security_context_of_the_application_as_it_is() -> Result<()> {
    explained(|| {
        let pod = Pod::start("context", "node-1")?;
        let seen = pod.object()?;
        let app = &seen["spec"]["containers"][0];
        ensure!(app["name"] == "app", "{app}");
        ensure!(
            app["securityContext"] == security_context(),
            "asked for {}, got {}",
            security_context(),
            app["securityContext"]
        );
        let sidecar = &seen["spec"]["initContainers"][0];
        ensure!(sidecar["name"] == "lampyris-mount", "{sidecar}");
        ensure!(sidecar["resources"]["limits"]["memory"].is_string(), "{sidecar}");
        Ok(())
    })
}

#[test]
fn a_job_completes_and_its_init_container_sees_the_data() -> Result<()> {
    explained(|| {
        scratch()?;
        let pod = template(
            &[
                container("make", &["create", "/data/job/file", "1000000"]),
                container("look", &["verify", "/data/job/file"]),
            ],
            &[container("app", &["verify", "/data/job/file"])],
        );
        let job = json!({
            "apiVersion": "batch/v1", "kind": "Job",
            "metadata": {"name": "job", "namespace": EXERCISE},
            "spec": {"backoffLimit": 0, "template": pod},
        });
        kube::apply(&job.to_string())?;
        let completed = wait::until("Job complete", JOB_WITHIN, || {
            let status = kube::get(EXERCISE, "job", "job")?["status"].clone();
            ensure!(status["succeeded"] == 1, "{status}");
            Ok(())
        });
        let said = kube::kubectl(&["-n", EXERCISE, "logs", "job/job", "-c", "app"]);
        let wait = ["-n", EXERCISE, "delete", "job", "job", "--cascade=foreground", "--wait"];
        kube::kubectl(&wait)?;
        println!("job completed after {:?}", completed?.1);
        ensure!(said?.trim() == r#"{"bytes":1000000}"#);
        Ok(())
    })
}

#[test]
fn readers_go_on_when_their_sidecar_is_killed_twice() -> Result<()> {
    explained(|| {
        let pod = Pod::start("killed-sidecar", "node-2")?;
        pod.exercise(&["create", "/data/sidecar", "8388608"])?;
        for (round, bound) in [FIRST_STALL, SECOND_STALL].into_iter().enumerate() {
            let reading = pod.begin(&["read", "/data/sidecar", "64"])?;
            pod.kill("lampyris-mount")?;
            wait::until("the sidecar runs again", SECOND_STALL, || {
                let seen = pod.object()?;
                let status = &seen["status"]["initContainerStatuses"][0];
                let restarts = status["restartCount"].as_u64().context("restartCount")?;
                ensure!(restarts == round as u64 + 1 && status["started"] == true, "{status}");
                Ok(())
            })?;
            pod.exercise(&["verify", "/data/sidecar"])?;
            untroubled(&format!("64 readers, kill {}", round + 1), &reading.end()?, bound)?;
        }
        pod.exercise(&["remove", "/data/sidecar"])?;
        Ok(())
    })
}

#[test]
fn running_pods_read_on_without_an_operator() -> Result<()> {
    explained(|| {
        let pod = Pod::start("no-operator", "node-3")?;
        pod.exercise(&["create", "/data/alone", "2000000"])?;
        scale_operator("0")?;
        let outcome = wait::until("no operator runs", JOB_WITHIN, || {
            let selector = "app.kubernetes.io/component=operator";
            let left = kube::list(SYSTEM, "pods", selector)?.len();
            ensure!(left == 0, "{left} are left");
            Ok(())
        })
        .and_then(|_| pod.exercise(&["create", "/data/alone-2", "2000000"]))
        .and_then(|_| pod.exercise(&["verify", "/data/alone"]));
        scale_operator("2")?;
        let rollout = ["-n", SYSTEM, "rollout", "status", "deployment/lampyris-operator"];
        kube::kubectl(&rollout)?;
        ensure!(outcome?["bytes"] == 2_000_000);
        pod.exercise(&["remove", "/data/alone", "/data/alone-2"])?;
        Ok(())
    })
}

fn scale_operator(replicas: &str) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    kube::kubectl(&["-n", SYSTEM, "scale", "deployment/lampyris-operator", &replicas])?;
    Ok(())
}

#[test]
fn a_dataset_in_use_is_not_deleted_before_its_pods() -> Result<()> {
    explained(|| {
        let pod = Pod::start("holder", "node-1")?;
        kube::kubectl(&[
            "-n",
            EXERCISE,
            "delete",
            "datasets.lampyris.dev",
            "scratch",
            "--wait=false",
        ])?;
        wait::until("DeletionBlocked", JOB_WITHIN, || {
            let dataset = kube::get(EXERCISE, "datasets.lampyris.dev", "scratch")?;
            let (status, why) = kube::condition(&dataset, "DeletionBlocked")?;
            ensure!(status == "True" && why.contains(pod.name()), "{status} {why}");
            Ok(())
        })?;
        drop(pod);
        wait::until("the Dataset goes", JOB_WITHIN, || {
            let left = kube::list(EXERCISE, "datasets.lampyris.dev", "")?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        })?;
        scratch()
    })
}
