//! Labelled pods with a Dataset of the store: what injection leaves alone, what init containers see, Jobs,
//! sidecars that die, an operator that is away.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::pod::{EXERCISE, Pod, container, scratch, security_context, template, untroubled};
use kind_e2e::site::{OperatorAway, SYSTEM};
use kind_e2e::{kube, wait};
use serde_json::{Value, json};

/// Admin port of the node plugin.
const NODE_ADMIN: i32 = 9810;
/// An Event is posted, and a sidecar's figures are re-exported, within this.
const TOLD_WITHIN: Duration = Duration::from_secs(30);
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

/// A container that joins a pod after its admission: it may see the data, and not what only our sidecars may.
#[test]
fn a_debug_container_gets_the_data_and_not_the_descriptors() -> Result<()> {
    explained(|| {
        let pod = Pod::start("debugged", "node-1")?;
        let path = format!("/api/v1/namespaces/{EXERCISE}/pods/{}/ephemeralcontainers", pod.name());
        let join = |volume: &str| {
            let mut object = pod.object()?;
            let mut debug = container(&format!("debug-{volume}"), &["idle"]);
            debug["volumeMounts"] = json!([{"name": volume, "mountPath": "/seen"}]);
            // The API server allows a debug container none.
            debug.as_object_mut().context("a container")?.remove("resources");
            object["spec"]["ephemeralContainers"] = json!([debug]);
            kube::put(&path, &object)
        };
        let refusal = join("lampyris-private").expect_err("the sockets of our sidecars");
        let says = format!("{refusal:#}").contains("may not mount the volume lampyris-private");
        ensure!(says, "{refusal:#}");
        join("lampyris-0")
    })
}

/// Runs a Job, which no earlier run may have left, until `status` says how it ended; the pod that ended last.
fn run_job(name: &str, pod: &Value, retries: i64, ended: impl Fn(&Value) -> bool) -> Result<Value> {
    kube::delete_with_dependents(EXERCISE, "job", name)?;
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "namespace": EXERCISE},
        "spec": {"backoffLimit": retries, "template": pod},
    });
    kube::apply(&job.to_string())?;
    let (_, took) = wait::until(&format!("the end of Job {name}"), JOB_WITHIN, || {
        let status = kube::get(EXERCISE, "job", name)?["status"].clone();
        ensure!(ended(&status), "{status}");
        Ok(())
    })?;
    eprintln!("Job {name} ended after {took:?}");
    let pods = kube::list(EXERCISE, "pods", &format!("batch.kubernetes.io/job-name={name}"))?;
    let pod = pods.first().context("the Job's pod")?;
    let sidecar = status_of(pod, "initContainerStatuses", "lampyris-mount")?;
    ensure!(sidecar["state"]["terminated"].is_object(), "the sidecar outlives the Job: {sidecar}");
    Ok(pod.clone())
}

fn status_of<'a>(pod: &'a Value, list: &str, name: &str) -> Result<&'a Value> {
    let all = pod["status"][list].as_array();
    let found = all.into_iter().flatten().find(|status| status["name"] == name);
    found.with_context(|| format!("no {name} in {}", pod["status"]))
}

fn has_condition(status: &Value, kind: &str) -> bool {
    let all = status["conditions"].as_array();
    all.into_iter().flatten().any(|c| c["type"] == kind && c["status"] == "True")
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
        run_job("job", &pod, 0, |status| has_condition(status, "Complete"))?;
        let said = kube::kubectl(&["-n", EXERCISE, "logs", "job/job", "-c", "app"])?;
        ensure!(said.trim() == r#"{"bytes":1000000}"#, "{said}");
        kube::delete_with_dependents(EXERCISE, "job", "job")
    })
}

#[test]
fn a_job_whose_container_fails_once_is_tried_again_in_the_same_pod_and_completes() -> Result<()> {
    explained(|| {
        scratch()?;
        // A name that no earlier run has used: what it left would be taken for the first attempt's.
        let file = format!("/data/faltered-{}", std::process::id());
        let mut pod = template(&[], &[container("app", &["falter", &file])]);
        pod["spec"]["restartPolicy"] = json!("OnFailure");
        // The Job counts restarts of the container as failures of the pod.
        let ended = |status: &Value| has_condition(status, "Complete");
        let pod = run_job("falters", &pod, 3, ended)?;
        let app = status_of(&pod, "containerStatuses", "app")?;
        ensure!(app["restartCount"] == 1, "{app}");
        kube::delete_with_dependents(EXERCISE, "job", "falters")
    })
}

#[test]
fn a_job_that_fails_ends_as_failed_and_its_sidecar_with_it() -> Result<()> {
    explained(|| {
        scratch()?;
        let missing = container("app", &["verify", "/data/there-is-no-such-file"]);
        let pod = template(&[], &[missing]);
        let pod = run_job("fails", &pod, 0, |status| has_condition(status, "Failed"))?;
        ensure!(pod["status"]["phase"] == "Failed", "{}", pod["status"]);
        let app = status_of(&pod, "containerStatuses", "app")?;
        ensure!(app["state"]["terminated"]["exitCode"] == 1, "{app}");
        kube::delete_with_dependents(EXERCISE, "job", "fails")
    })
}

#[test]
fn readers_go_on_when_their_sidecar_is_killed_twice() -> Result<()> {
    explained(|| {
        let pod = Pod::start("killed-sidecar", "node-2")?;
        pod.exercise(&["create", "/data/sidecar", "8388608"])?;
        for (round, bound) in (1..).zip([FIRST_STALL, SECOND_STALL]) {
            let mut reading = pod.begin(&["read", "/data/sidecar", "64"])?;
            pod.kill("lampyris-mount")?;
            wait::until("the sidecar runs again", SECOND_STALL, || {
                let seen = pod.object()?;
                let status = status_of(&seen, "initContainerStatuses", "lampyris-mount")?;
                ensure!(status["restartCount"] == round && status["started"] == true, "{status}");
                Ok(())
            })?;
            reading.goes_on("reading")?;
            pod.exercise(&["verify", "/data/sidecar"])?;
            untroubled(&format!("64 readers, kill {round}"), &reading.end()?, bound)?;
            wait::until("MountRecovered on the pod", TOLD_WITHIN, || {
                let told = kube::told(EXERCISE, pod.name(), "MountRecovered")?;
                let times: u64 = told.iter().map(|event| event.count).sum();
                ensure!(times >= round, "told {times} times: {told:?}");
                Ok(())
            })?;
        }
        pod.exercise(&["remove", "/data/sidecar"])?;
        Ok(())
    })
}

#[test]
fn the_node_plugin_shows_the_figures_of_a_pods_sidecar() -> Result<()> {
    explained(|| {
        let pod = Pod::start("figures", "node-3")?;
        pod.exercise(&["create", "/data/figures", "1000000"])?;
        let plugins = kube::list(SYSTEM, "pods", "app.kubernetes.io/component=node")?;
        let plugin = plugins.iter().find(|plugin| plugin["spec"]["nodeName"] == "node-3");
        let name = plugin.and_then(|plugin| plugin["metadata"]["name"].as_str());
        let name = name.context("a node plugin on node-3")?;
        let labels =
            format!("namespace=\"{EXERCISE}\",pod=\"{}\",container=\"lampyris-mount\"", pod.name());
        wait::until("the sidecar's figures", TOLD_WITHIN, || {
            let text = kube::ask(SYSTEM, name, NODE_ADMIN, "metrics")?;
            let figure = |series: String| -> Result<u64> {
                let shown = text.lines().find(|line| line.starts_with(&series));
                let (_, value) = shown.and_then(|line| line.rsplit_once(' ')).context(series)?;
                Ok(value.parse()?)
            };
            let taken = figure(format!("lampyris_mount_fuse_requests_total{{{labels}}}"))?;
            ensure!(taken > 0, "{taken} requests");
            let written = figure(format!("lampyris_mount_written_bytes_total{{{labels},volume="))?;
            ensure!(written == 1_000_000, "{written} bytes written");
            Ok(())
        })?;
        pod.exercise(&["remove", "/data/figures"])?;
        Ok(())
    })
}

#[test]
fn running_pods_read_on_without_an_operator() -> Result<()> {
    explained(|| {
        let pod = Pod::start("no-operator", "node-3")?;
        pod.exercise(&["create", "/data/alone", "2000000"])?;
        let away = OperatorAway::begin()?;
        pod.exercise(&["create", "/data/alone-2", "2000000"])?;
        ensure!(pod.exercise(&["verify", "/data/alone"])?["bytes"] == 2_000_000);
        away.end()?;
        pod.exercise(&["remove", "/data/alone", "/data/alone-2"])?;
        Ok(())
    })
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
