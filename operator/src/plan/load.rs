//! What a DatasetLoad needs next: one Job, its progress in the status, and a verdict. A load whose
//! verdict is in is never touched again.

use crds::dataset::Source;
use crds::load::{LoadFailure, Progress};
use crds::names::{LABEL_COMPONENT, LABEL_LOAD};
use crds::{Dataset, DatasetLoad, DatasetLoadStatus};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::condition::{self, Verdict, fix};
use super::job::{self, JobRequest, Outcome};
use super::{Action, Env, ObjectId, Plan};

/// Seconds between looks at the progress.
const POLL_S: u64 = 2;
/// Seconds between looks while a Dataset is awaited.
const WAIT_S: u64 = 5;
/// Failures kept in the status.
const FAILURES: usize = 20;
/// Pods that may fail before the load does.
const RETRIES: i32 = 2;

/// What is known about one load.
#[derive(Debug)]
pub struct LoadView {
    /// The object.
    pub load: DatasetLoad,
    /// The Dataset to fill.
    pub target: Option<Dataset>,
    /// The Dataset to copy from, if the load names one.
    pub from: Option<Dataset>,
    /// The Job, if it exists.
    pub job: Option<Value>,
    /// Termination messages of its pods, latest last.
    pub messages: Vec<String>,
    /// What its pod says about its progress.
    pub progress: Option<Progress>,
}

/// Name of the load's Job.
#[must_use]
pub fn job_name(load: &DatasetLoad) -> String {
    format!("{}-load", load.name_any())
}

/// Decides what to do about the load.
#[must_use]
pub fn plan(view: &LoadView, env: &Env) -> Plan {
    let mut plan = Plan::default();
    let load = &view.load;
    let old = load.status.clone().unwrap_or_default();
    let over =
        ["Complete", "Failed"].iter().any(|type_| condition::is_true(&old.conditions, type_));
    if over || load.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let mut status =
        DatasetLoadStatus { observed_generation: load.metadata.generation, ..old.clone() };
    match (&view.job, endpoints(view)) {
        // An earlier load of this name left it; the garbage collector is about to take it away.
        (Some(found), _) if !is_owned(found, load) => plan.requeue(POLL_S),
        (Some(found), _) => follow(&mut plan, &mut status, view, found, env),
        (None, Ok((from, to))) => {
            plan.actions.push(Action::Create(manifest(load, &from, to, env)));
            let verdict =
                Verdict::yes("Started", format!("Job {} is being created", job_name(load)));
            conclude(&mut plan, &mut status, view, "Pending", verdict, env);
            plan.requeue(POLL_S);
        }
        (None, Err(Obstacle::Missing(what))) => {
            let verdict = Verdict::no("DatasetNotFound", format!("create Dataset {what}"));
            conclude(&mut plan, &mut status, view, "Pending", verdict, env);
            plan.requeue(WAIT_S);
        }
        (None, Err(Obstacle::NotACluster(what))) => {
            let text =
                format!("Dataset {what} has no source.cluster, so nothing can be loaded into it");
            fail(&mut plan, &mut status, view, "NotACluster", text, env);
        }
    }
    if status != old {
        let namespace = load.namespace().unwrap_or_default();
        let id = ObjectId::new("DatasetLoad", &namespace, &load.name_any());
        plan.status(id, json!(status));
    }
    plan
}

fn is_owned(job: &Value, load: &DatasetLoad) -> bool {
    let owners = job["metadata"]["ownerReferences"].as_array();
    let uid = load.uid().unwrap_or_default();
    owners.into_iter().flatten().any(|owner| owner["uid"] == uid.as_str())
}

enum Obstacle {
    Missing(String),
    NotACluster(String),
}

/// Where to copy from (format and source) and to.
fn endpoints(view: &LoadView) -> Result<(Source, &Dataset), Obstacle> {
    let spec = &view.load.spec;
    let Some(target) = &view.target else {
        return Err(Obstacle::Missing(spec.dataset_ref.name.clone()));
    };
    if target.spec.source.cluster.is_none() {
        return Err(Obstacle::NotACluster(spec.dataset_ref.name.clone()));
    }
    let from = match (&spec.from.s3, &spec.from.dataset_ref, &view.from) {
        (Some(s3), _, _) => Source { s3: Some(s3.clone()), cluster: None },
        (None, _, Some(dataset)) => dataset.spec.source.clone(),
        (None, reference, None) => {
            let name = reference.as_ref().map_or_else(String::new, |r| r.name.clone());
            return Err(Obstacle::Missing(name));
        }
    };
    Ok((from, target))
}

fn follow(
    plan: &mut Plan,
    status: &mut DatasetLoadStatus,
    view: &LoadView,
    found: &Value,
    env: &Env,
) {
    if let Some(progress) = &view.progress {
        status.progress = Some(percent(progress.clone()));
    }
    match job::outcome(found, &view.messages) {
        Outcome::Running => {
            let active = found["status"]["active"].as_i64().unwrap_or_default() > 0;
            let phase = if active { "Running" } else { "Pending" };
            let verdict = Verdict::yes("Copying", format!("Job {} runs", job_name(&view.load)));
            conclude(plan, status, view, phase, verdict, env);
            plan.requeue(POLL_S);
        }
        Outcome::Done(result) => complete(plan, status, view, &result, env),
        Outcome::Failed { reason, message, detail } => {
            status.failures = failures(&detail);
            let secret = view.load.spec.from.s3.as_ref().and_then(|s3| s3.secret_ref.as_ref());
            let remedy = fix(&reason, secret.map(|reference| reference.name.as_str()));
            fail(plan, status, view, &reason, format!("{message}; {remedy}"), env);
        }
    }
}

fn complete(
    plan: &mut Plan,
    status: &mut DatasetLoadStatus,
    view: &LoadView,
    result: &Value,
    env: &Env,
) {
    let number = |key: &str| result[key].as_i64().unwrap_or_default();
    let (files, bytes) = (number("files"), number("bytes"));
    status.digest = result["sha256"].as_str().map(|text| text.chars().take(128).collect());
    status.progress = Some(Progress {
        files_done: files,
        files_total: files,
        bytes_done: bytes,
        bytes_total: bytes,
        percent: 100,
        rate_bytes_per_second: 0,
    });
    let text = format!("{files} files, {bytes} bytes copied and compared");
    let generation = view.load.metadata.generation;
    let verdict = Verdict::yes("Copied", text.clone());
    condition::set(&mut status.conditions, "Complete", verdict, generation, env.now);
    let verdict = Verdict::no("Copied", "the load is over");
    conclude(plan, status, view, "Complete", verdict, env);
    plan.notice(false, "Complete", text);
}

fn fail(
    plan: &mut Plan,
    status: &mut DatasetLoadStatus,
    view: &LoadView,
    reason: &str,
    text: String,
    env: &Env,
) {
    let generation = view.load.metadata.generation;
    let verdict = Verdict::yes(reason, text.clone());
    condition::set(&mut status.conditions, "Failed", verdict, generation, env.now);
    conclude(plan, status, view, "Failed", Verdict::no(reason, "the load is over"), env);
    plan.notice(true, reason, text);
}

fn conclude(
    plan: &mut Plan,
    status: &mut DatasetLoadStatus,
    view: &LoadView,
    phase: &str,
    progressing: Verdict,
    env: &Env,
) {
    status.phase = Some(phase.to_owned());
    let generation = view.load.metadata.generation;
    let (reason, message) = (progressing.reason.clone(), progressing.message.clone());
    let changed =
        condition::set(&mut status.conditions, "Progressing", progressing, generation, env.now);
    if changed && reason == "DatasetNotFound" {
        plan.notice(true, &reason, message);
    }
}

fn percent(mut progress: Progress) -> Progress {
    let (done, total) = (progress.bytes_done.max(0), progress.bytes_total.max(0));
    let share = done.saturating_mul(100).checked_div(total).unwrap_or_default();
    progress.percent = i32::try_from(share.min(100)).unwrap_or_default();
    progress
}

fn failures(detail: &Value) -> Vec<LoadFailure> {
    let text = |value: &Value| value.as_str().unwrap_or_default().chars().take(256).collect();
    let list = detail["failures"].as_array();
    list.into_iter()
        .flatten()
        .take(FAILURES)
        .map(|item| LoadFailure { path: text(&item["path"]), reason: text(&item["reason"]) })
        .collect()
}

fn manifest(load: &DatasetLoad, from: &Source, target: &Dataset, env: &Env) -> Value {
    let namespace = load.namespace().unwrap_or_default();
    let (name, uid) = (load.name_any(), load.uid().unwrap_or_default());
    let request = JobRequest {
        name: job_name(load),
        namespace: &namespace,
        owner: ("DatasetLoad", &name, &uid),
        labels: json!({
            "app.kubernetes.io/name": "lampyris",
            "app.kubernetes.io/managed-by": "lampyris-operator",
            LABEL_COMPONENT: "load",
            LABEL_LOAD: name,
        }),
        command: "load",
        config: json!({
            "from": from.config(&namespace),
            "to": target.spec.source.config(&namespace),
            "parallelism": load.spec.parallelism,
        }),
        secret: from.secret_name(),
        retries: RETRIES,
        deadline_s: None,
        resources: json!({
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"cpu": "2", "memory": "512Mi"},
        }),
    };
    job::manifest(&request, env)
}
