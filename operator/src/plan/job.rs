//! The Jobs that look at a Dataset and that load one. They run in the user's namespace without a
//! service account token; credentials come from a mounted Secret that the operator never reads.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Toleration;
use serde::Deserialize;
use serde_json::{Value, json};

use super::workload::{USER, restricted};
use super::{Env, owner_reference};

/// Where the pods of Jobs may run, as the administrator chose.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Placement {
    /// Labels that a node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Taints of a node that do not matter.
    pub tolerations: Vec<Toleration>,
}

/// A Job of the scan agent's image.
#[derive(Debug)]
pub struct JobRequest<'a> {
    /// Name of the Job.
    pub name: String,
    /// Its namespace.
    pub namespace: &'a str,
    /// Kind, name and uid of the owner.
    pub owner: (&'a str, &'a str, &'a str),
    /// Labels of Job and pod.
    pub labels: Value,
    /// Subcommand of `scan-agent`.
    pub command: &'a str,
    /// Configuration, passed inline.
    pub config: Value,
    /// Secret with credentials.
    pub secret: Option<&'a str>,
    /// Pods that may fail before the Job does.
    pub retries: i32,
    /// Seconds that the Job may run.
    pub deadline_s: Option<i64>,
    /// Requests and limits.
    pub resources: Value,
}

/// The manifest.
#[must_use]
pub fn manifest(request: &JobRequest<'_>, env: &Env) -> Value {
    let (kind, owner, uid) = request.owner;
    let mut spec = json!({
        "backoffLimit": request.retries,
        "ttlSecondsAfterFinished": 3600,
        "template": {"metadata": {"labels": request.labels}, "spec": pod(request, env)},
    });
    if let Some(seconds) = request.deadline_s {
        spec["activeDeadlineSeconds"] = json!(seconds);
    }
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": request.name,
            "namespace": request.namespace,
            "labels": request.labels,
            "ownerReferences": [owner_reference(kind, owner, uid)],
        },
        "spec": spec,
    })
}

fn pod(request: &JobRequest<'_>, env: &Env) -> Value {
    let mut args =
        vec![json!(request.command), json!("--config-json"), json!(request.config.to_string())];
    let mut mounts = vec![json!({"name": "tmp", "mountPath": "/tmp"})];
    let mut volumes = vec![json!({"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}})];
    if let Some(secret) = request.secret {
        args.extend([json!("--credentials-dir"), json!("/run/credentials")]);
        mounts.push(
            json!({"name": "credentials", "mountPath": "/run/credentials", "readOnly": true}),
        );
        // Optional, so that a missing Secret becomes a condition and not a pod that hangs.
        volumes.push(
            json!({"name": "credentials", "secret": {"secretName": secret, "optional": true}}),
        );
    }
    let mut pod = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": 5,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [{
            "name": "scan-agent",
            "image": env.images.reference("scan-agent"),
            "imagePullPolicy": env.images.pull_policy,
            "command": ["/usr/bin/scan-agent"],
            "args": args,
            "resources": request.resources,
            "securityContext": restricted(&json!({"type": "RuntimeDefault"})),
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
    });
    let Placement { node_selector, tolerations } = &env.jobs;
    if !node_selector.is_empty() {
        pod["nodeSelector"] = json!(node_selector);
    }
    if !tolerations.is_empty() {
        pod["tolerations"] = json!(tolerations);
    }
    pod
}

/// What a Job of the scan agent said at its end.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It is still running or has not started.
    Running,
    /// It did what it was asked to.
    Done(Value),
    /// It failed, for this reason, with this message.
    Failed {
        /// One of the reasons that conditions use.
        reason: String,
        /// A sentence.
        message: String,
        /// All that it said.
        detail: Value,
    },
}

/// Reads the outcome from the Job and the termination messages of its pods, latest last.
#[must_use]
pub fn outcome(job: &Value, messages: &[String]) -> Outcome {
    let last = messages.last().and_then(|text| serde_json::from_str::<Value>(text).ok());
    if let Some(done) = last.as_ref().and_then(|v| v.get("ok")) {
        return Outcome::Done(done.clone());
    }
    if !has_condition(job, "Failed") && !has_condition(job, "Complete") {
        // A failed pod that the Job will replace is not the end.
        return match &last {
            Some(value) if job["spec"]["backoffLimit"] == 0 => failure(value),
            _ => Outcome::Running,
        };
    }
    match last {
        Some(value) => failure(&value),
        None => Outcome::Failed {
            reason: "JobFailed".to_owned(),
            message: format!("Job {} ended without a result", job["metadata"]["name"]),
            detail: Value::Null,
        },
    }
}

fn failure(value: &Value) -> Outcome {
    let error = &value["error"];
    Outcome::Failed {
        reason: camel_case(error["reason"].as_str()),
        message: error["message"].as_str().unwrap_or("no message").chars().take(512).collect(),
        detail: error.clone(),
    }
}

/// A condition's reason must be one word; what a pod wrote is not trusted to be.
fn camel_case(reason: Option<&str>) -> String {
    match reason {
        Some(word)
            if word.len() <= 64
                && word.starts_with(|c: char| c.is_ascii_uppercase())
                && word.chars().all(|c| c.is_ascii_alphanumeric()) =>
        {
            word.to_owned()
        }
        _ => "JobFailed".to_owned(),
    }
}

fn has_condition(job: &Value, type_: &str) -> bool {
    let list = job["status"]["conditions"].as_array();
    list.into_iter().flatten().any(|c| c["type"] == type_ && c["status"] == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_before_the_job_controller_has_seen_it() {
        let job = json!({"metadata": {"name": "j"}, "spec": {"backoffLimit": 0}});
        assert_eq!(outcome(&job, &[]), Outcome::Running);
        let ok = [r#"{"ok":{"files":3}}"#.to_owned()];
        assert_eq!(outcome(&job, &ok), Outcome::Done(json!({"files": 3})));
        let bad = [r#"{"error":{"reason":"AccessDenied","message":"no"}}"#.to_owned()];
        let Outcome::Failed { reason, .. } = outcome(&job, &bad) else {
            panic!("should have failed")
        };
        assert_eq!(reason, "AccessDenied");
    }

    #[test]
    fn a_pod_that_the_job_replaces_is_not_the_end() {
        let mut job = json!({"metadata": {"name": "j"}, "spec": {"backoffLimit": 2}});
        let bad = [r#"{"error":{"reason":"AccessDenied","message":"no"}}"#.to_owned()];
        assert_eq!(outcome(&job, &bad), Outcome::Running);
        job["status"] = json!({"conditions": [{"type": "Failed", "status": "True"}]});
        assert!(matches!(outcome(&job, &bad), Outcome::Failed { .. }));
    }

    #[test]
    fn a_hostile_reason_does_not_become_a_condition() {
        for reason in ["", "two words", "lower", &"A".repeat(65), "A-b"] {
            assert_eq!(camel_case(Some(reason)), "JobFailed", "{reason}");
        }
        assert_eq!(camel_case(Some("BucketNotFound")), "BucketNotFound");
    }

    #[test]
    fn a_pod_runs_on_the_nodes_that_were_chosen_for_jobs() {
        let request = JobRequest {
            name: "j".to_owned(),
            namespace: "n",
            owner: ("Dataset", "d", "u"),
            labels: json!({}),
            command: "inspect",
            config: json!({}),
            secret: None,
            retries: 0,
            deadline_s: None,
            resources: json!({"requests": {"cpu": "1", "memory": "1Mi"}, "limits": {"cpu": "1", "memory": "1Mi"}}),
        };
        let pod = |jobs: Value| {
            let (registry, tag, pull_policy) = ("r".into(), "1".into(), "Never".into());
            let images = crate::plan::Images { registry, tag, pull_policy };
            let jobs = serde_json::from_value(jobs).unwrap();
            let now = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
            let job = manifest(&request, &Env { images, jobs, now });
            let actions = vec![crate::plan::Action::Create(job.clone())];
            let plan = crate::plan::Plan { actions, requeue_s: None };
            assert_eq!(crate::plan::lint::lint(&plan), Vec::<String>::new());
            job["spec"]["template"]["spec"].clone()
        };
        let anywhere = pod(json!({}));
        assert_eq!(
            (&anywhere["nodeSelector"], &anywhere["tolerations"]),
            (&Value::Null, &Value::Null)
        );
        let (selector, tolerations) =
            (json!({"pool": "batch"}), json!([{"key": "gpu", "operator": "Exists"}]));
        let there = pod(json!({"nodeSelector": selector, "tolerations": tolerations}));
        assert_eq!((&there["nodeSelector"], &there["tolerations"]), (&selector, &tolerations));
    }
}
