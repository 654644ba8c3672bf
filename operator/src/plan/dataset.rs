//! What a Dataset needs next: a look at its source (a Job), another one while it fails or when its
//! interval is over, and a finalizer for as long as pods use it.

use crds::dataset::{Inspection, UsedBy};
use crds::names::{FINALIZER_DATASET, LABEL_COMPONENT, LABEL_DATASET};
use crds::{Dataset, DatasetStatus};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::condition::{self, Verdict, fix};
use super::job::{self, JobRequest, Outcome};
use super::{Action, Env, ObjectId, Plan};

/// Seconds from a failed look to the next one: a source that was put right is seen within 30 s.
const RETRY_S: i64 = 12;
/// Seconds between looks while something outside is awaited.
const WAIT_S: u64 = 5;
/// Seconds between looks at the pods that use the Dataset: their index may lag behind its events.
const USERS_S: u64 = 15;
/// Seconds that one look may take.
const DEADLINE_S: i64 = 600;
/// Pods named in status and messages.
const SAMPLE: usize = 5;

/// What is known about one Dataset.
#[derive(Debug)]
pub struct DatasetView {
    /// The object.
    pub dataset: Dataset,
    /// The Job of the current look, if it exists.
    pub job: Option<Value>,
    /// Termination messages of that Job's pods, latest last.
    pub messages: Vec<String>,
    /// Pods whose volumes name the Dataset, as `namespace/name`, sorted.
    pub users: Vec<String>,
    /// Whether the StorageCluster of `source.cluster` is ready; `None` if it does not exist.
    pub cluster_ready: Option<bool>,
}

/// Name of the Job of one look.
#[must_use]
pub fn job_name(dataset: &Dataset, inspection: &Inspection) -> String {
    let uid = dataset.uid().unwrap_or_default();
    let seed = format!("{uid}/{}/{}", inspection.generation, inspection.attempt);
    let digest = Sha256::digest(seed);
    let short: String = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-inspect-{short}", dataset.name_any())
}

/// Decides what to do about the Dataset.
#[must_use]
pub fn plan(view: &DatasetView, env: &Env) -> Plan {
    let mut plan = Plan::default();
    let dataset = &view.dataset;
    let old = dataset.status.clone().unwrap_or_default();
    let mut status = old.clone();
    let users = users(view);
    let sample = users.iter().take(SAMPLE).map(|user| (*user).to_owned()).collect();
    let pods = i32::try_from(users.len()).unwrap_or(i32::MAX);
    status.used_by = Some(UsedBy { pods, sample });
    let deleting = dataset.metadata.deletion_timestamp.is_some();
    if deleting {
        block_deletion(&mut plan, &mut status, view, &users, env);
    } else if dataset.spec.read_only {
        inspect(&mut plan, &mut status, view, env);
    } else {
        follow_cluster(&mut plan, &mut status, view, env);
    }
    let id =
        ObjectId::new("Dataset", &dataset.namespace().unwrap_or_default(), &dataset.name_any());
    if status != old {
        plan.status(id.clone(), json!(status));
    }
    // The finalizer is there only while it protects someone, so that nothing hangs without us.
    let held = dataset.finalizers().iter().any(|name| name == FINALIZER_DATASET);
    let present = !users.is_empty();
    if held || present {
        plan.requeue(USERS_S);
    }
    if held != present && !(deleting && present) {
        plan.actions.push(Action::Finalizer {
            object: id,
            name: FINALIZER_DATASET.to_owned(),
            present,
        });
    }
    plan
}

/// The pods that the Dataset is held for. One of another namespace never gets a Dataset with a
/// Secret, whatever its volumes name: it must not keep the owner from deleting it.
fn users(view: &DatasetView) -> Vec<&str> {
    let home = view.dataset.namespace().unwrap_or_default();
    let is_own = |user: &str| user.split_once('/').is_some_and(|(namespace, _)| namespace == home);
    let guarded = view.dataset.spec.source.secret_name().is_some();
    view.users.iter().map(String::as_str).filter(|user| !guarded || is_own(user)).collect()
}

fn block_deletion(
    plan: &mut Plan,
    status: &mut DatasetStatus,
    view: &DatasetView,
    users: &[&str],
    env: &Env,
) {
    status.phase = Some("Terminating".to_owned());
    status.observed_generation = view.dataset.metadata.generation;
    let verdict = if users.is_empty() {
        Verdict::no("NotInUse", "no pod uses this Dataset")
    } else {
        Verdict::yes("InUse", format!("delete these pods first: {}", names(users)))
    };
    let (blocked, message) = (verdict.holds(), verdict.message.clone());
    let generation = view.dataset.metadata.generation;
    let list = &mut status.conditions;
    if condition::set(list, "DeletionBlocked", verdict, generation, env.now) && blocked {
        plan.notice(true, "DeletionBlocked", message);
    }
    if blocked {
        plan.requeue(WAIT_S);
    }
}

fn names(users: &[&str]) -> String {
    let some = users.iter().take(SAMPLE).copied().collect::<Vec<_>>().join(", ");
    match users.len().saturating_sub(SAMPLE) {
        0 => some,
        more => format!("{some} and {more} more"),
    }
}

/// A Dataset that pods write to is as ready as its cluster: there is nothing to look at yet.
fn follow_cluster(plan: &mut Plan, status: &mut DatasetStatus, view: &DatasetView, env: &Env) {
    // What was counted while it could only be read is no longer so.
    let (files, rows, bytes, columns) = (None, None, None, None);
    let (schema_digest, revision, inspection) = (None, None, None);
    *status = DatasetStatus {
        files,
        rows,
        bytes,
        columns,
        schema_digest,
        revision,
        inspection,
        ..status.clone()
    };
    let verdict = match view.cluster_ready {
        Some(true) => Verdict::yes("ClusterReady", "the StorageCluster serves"),
        Some(false) => {
            Verdict::no("StoreUnavailable", "the StorageCluster is not ready: see its conditions")
        }
        None => Verdict::no(
            "ClusterNotFound",
            "create the StorageCluster that source.cluster.ref names",
        ),
    };
    if !verdict.holds() {
        plan.requeue(WAIT_S);
    }
    judge(plan, status, view, verdict, env);
}

fn inspect(plan: &mut Plan, status: &mut DatasetStatus, view: &DatasetView, env: &Env) {
    let generation = view.dataset.metadata.generation.unwrap_or_default();
    let last = status.inspection.clone().unwrap_or_default();
    if last.generation != generation {
        return start(plan, status, view, env);
    }
    let Some(finished) = &last.finished_at else {
        return await_job(plan, status, view, env);
    };
    let Some(wait) = interval_s(view, status) else { return };
    let since = finished.parse::<Timestamp>().map_or(0, Timestamp::as_second);
    let left = since + wait - env.now.as_second();
    if left <= 0 {
        start(plan, status, view, env);
    } else {
        plan.requeue(u64::try_from(left).unwrap_or(WAIT_S));
    }
}

/// Seconds from the end of one look to the next; `None` if there is no next one.
fn interval_s(view: &DatasetView, status: &DatasetStatus) -> Option<i64> {
    if !condition::is_true(&status.conditions, "Accessible") {
        return Some(RETRY_S);
    }
    view.dataset.spec.refresh_interval.as_deref().map(duration_s)
}

/// Seconds of a duration such as `1h30m`; the schema has checked its form.
fn duration_s(text: &str) -> i64 {
    let mut total = 0_i64;
    let mut number = 0_i64;
    for c in text.chars() {
        match c {
            '0'..='9' => {
                let digit = c.to_digit(10).map_or(0, i64::from);
                number = number.saturating_mul(10).saturating_add(digit);
            }
            unit => {
                let factor = match unit {
                    'h' => 3600,
                    'm' => 60,
                    _ => 1,
                };
                total = total.saturating_add(number.saturating_mul(factor));
                number = 0;
            }
        }
    }
    total.max(30)
}

/// Starts the next look and forgets the Job of the last one.
fn start(plan: &mut Plan, status: &mut DatasetStatus, view: &DatasetView, env: &Env) {
    let dataset = &view.dataset;
    let last = status.inspection.clone().unwrap_or_default();
    let next = Inspection {
        attempt: last.attempt + 1,
        generation: dataset.metadata.generation.unwrap_or_default(),
        finished_at: None,
    };
    if view.job.is_some() {
        let namespace = dataset.namespace().unwrap_or_default();
        let id = ObjectId::new("Job", &namespace, &job_name(dataset, &last));
        plan.actions.push(Action::Delete(id));
    }
    plan.actions.push(Action::Create(manifest(dataset, &next, env)));
    status.inspection = Some(next);
    if status.phase.is_none() {
        status.phase = Some("Pending".to_owned());
        let generation = dataset.metadata.generation;
        status.observed_generation = generation;
        let list = &mut status.conditions;
        for type_ in ["Ready", "Accessible"] {
            let verdict = Verdict {
                status: "Unknown",
                reason: "Inspecting".to_owned(),
                message: "the source is being looked at".to_owned(),
            };
            condition::set(list, type_, verdict, generation, env.now);
        }
    }
}

fn await_job(plan: &mut Plan, status: &mut DatasetStatus, view: &DatasetView, env: &Env) {
    let Some(last) = status.inspection.clone() else { return };
    let Some(found) = &view.job else {
        plan.actions.push(Action::Create(manifest(&view.dataset, &last, env)));
        return;
    };
    match job::outcome(found, &view.messages) {
        Outcome::Running => plan.requeue(WAIT_S),
        Outcome::Done(result) => {
            record(status, &result);
            finish(status, &last, env);
            let text = format!(
                "{} files, {} bytes",
                status.files.unwrap_or_default(),
                status.bytes.unwrap_or_default()
            );
            judge(plan, status, view, Verdict::yes("Accessible", text), env);
            if let Some(wait) = interval_s(view, status) {
                plan.requeue(u64::try_from(wait).unwrap_or(WAIT_S));
            }
        }
        Outcome::Failed { reason, message, .. } => {
            finish(status, &last, env);
            let remedy = fix(&reason, view.dataset.spec.source.secret_name());
            let text = format!("{message}; {remedy}");
            judge(plan, status, view, Verdict::no(&reason, text), env);
            plan.requeue(u64::try_from(RETRY_S).unwrap_or(WAIT_S));
        }
    }
}

fn finish(status: &mut DatasetStatus, last: &Inspection, env: &Env) {
    let at = Timestamp::from_second(env.now.as_second()).unwrap_or(env.now);
    status.inspection = Some(Inspection { finished_at: Some(at.to_string()), ..last.clone() });
}

fn record(status: &mut DatasetStatus, result: &Value) {
    let number = |key: &str| result[key].as_i64();
    let text = |key: &str| result[key].as_str().map(|s| s.chars().take(128).collect::<String>());
    status.files = number("files");
    status.rows = number("rows");
    status.bytes = number("bytes");
    status.columns = number("columns");
    status.schema_digest = text("schemaDigest");
    status.revision = text("revision");
}

fn judge(
    plan: &mut Plan,
    status: &mut DatasetStatus,
    view: &DatasetView,
    verdict: Verdict,
    env: &Env,
) {
    let good = verdict.holds();
    status.phase = Some(if good { "Ready" } else { "Failed" }.to_owned());
    // Not before: until then the conditions speak about an older spec.
    let generation = view.dataset.metadata.generation;
    status.observed_generation = generation;
    let list = &mut status.conditions;
    let (reason, message) = (verdict.reason.clone(), verdict.message.clone());
    condition::set(list, "Ready", verdict.clone(), generation, env.now);
    if condition::set(list, "Accessible", verdict, generation, env.now) {
        plan.notice(!good, &reason, message);
    }
}

fn manifest(dataset: &Dataset, inspection: &Inspection, env: &Env) -> Value {
    let namespace = dataset.namespace().unwrap_or_default();
    let (name, uid) = (dataset.name_any(), dataset.uid().unwrap_or_default());
    let source = &dataset.spec.source;
    let request = JobRequest {
        name: job_name(dataset, inspection),
        namespace: &namespace,
        owner: ("Dataset", &name, &uid),
        labels: json!({
            "app.kubernetes.io/name": "lampyris",
            "app.kubernetes.io/managed-by": "lampyris-operator",
            LABEL_COMPONENT: "inspect",
            LABEL_DATASET: name,
        }),
        command: "inspect",
        config: json!({"format": dataset.spec.format, "source": source.config(&namespace)}),
        secret: source.secret_name(),
        retries: 0,
        deadline_s: Some(DEADLINE_S),
        resources: json!({
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "256Mi"},
        }),
    };
    job::manifest(&request, env)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_add_up() {
        assert_eq!(duration_s("10m"), 600);
        assert_eq!(duration_s("1h30m"), 5_400);
        assert_eq!(duration_s("90s"), 90);
        assert_eq!(duration_s("1s"), 30);
    }

    #[test]
    fn a_dataset_that_may_now_be_written_shows_no_old_counts() {
        let object = json!({
            "metadata": {"name": "d", "namespace": "n", "uid": "u", "generation": 2},
            "spec": {"format": "Files", "readOnly": false,
                "source": {"cluster": {"ref": {"name": "train"}, "path": "/d"}}},
            "status": {"files": 3, "bytes": 10, "revision": "a", "observedGeneration": 1,
                "inspection": {"attempt": 1, "generation": 1}},
        });
        let dataset: Dataset = serde_json::from_value(object).unwrap_or_else(|e| panic!("{e}"));
        let (job, messages, users, cluster_ready) = (None, vec![], vec![], Some(true));
        let view = DatasetView { dataset, job, messages, users, cluster_ready };
        let (registry, tag, pull_policy) = ("r".into(), "1".into(), "Never".into());
        let images = crate::plan::Images { registry, tag, pull_policy };
        let (jobs, now) = (job::Placement::default(), Timestamp::UNIX_EPOCH);
        let plan = plan(&view, &Env { images, jobs, now });
        let Some(Action::Status(_, status)) = plan.actions.first() else { panic!("{plan:?}") };
        for gone in ["files", "bytes", "revision", "inspection"] {
            assert!(status.get(gone).is_none(), "{gone}: {status}");
        }
        assert_eq!(status["observedGeneration"], 2);
    }

    #[test]
    fn a_message_names_some_pods_and_counts_the_rest() {
        let users: Vec<String> = (0..7).map(|n| format!("a/p{n}")).collect();
        let users: Vec<&str> = users.iter().map(String::as_str).collect();
        assert_eq!(names(&users), "a/p0, a/p1, a/p2, a/p3, a/p4 and 2 more");
        assert_eq!(names(&users[..2]), "a/p0, a/p1");
    }
}
