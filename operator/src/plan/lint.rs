//! Checks every plan before it runs: a plan is code output, and these are the mistakes that a
//! review of one function does not see. A plan that fails is not executed.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Action, ObjectId, Plan, diff};

/// What is wrong with `plan`, one sentence for each finding.
#[must_use]
pub fn lint(plan: &Plan) -> Vec<String> {
    let mut findings = Vec::new();
    let mut seen = Vec::new();
    for action in &plan.actions {
        match action {
            Action::Apply(object) | Action::Create(object) => {
                let id = ObjectId::of(object);
                if seen.contains(&id) {
                    findings.push(format!("{} {} is written twice", id.kind, id.name));
                }
                check_object(object, &id, &mut findings);
                seen.push(id);
            }
            Action::Delete(id) => {
                if id.kind == "PersistentVolumeClaim" {
                    findings.push(format!("deletes data: claim {}", id.name));
                }
            }
            Action::Event(notice) => {
                if notice.message.is_empty() || notice.message.len() > 1024 {
                    findings.push(format!("event {} has no message or a long one", notice.reason));
                }
            }
            Action::Status(..) | Action::Finalizer { .. } | Action::PushTable(..) => {}
        }
    }
    findings
}

fn check_object(object: &Value, id: &ObjectId, findings: &mut Vec<String>) {
    let mut say = |text: String| findings.push(format!("{} {}: {text}", id.kind, id.name));
    if id.name.is_empty() || id.namespace.is_empty() {
        say("has no name or namespace".to_owned());
    }
    if object["metadata"]["ownerReferences"][0]["uid"].as_str().is_none_or(str::is_empty) {
        say("has no owner".to_owned());
    }
    let unknown = match id.kind.as_str() {
        "StatefulSet" => unknown_fields::<StatefulSet>(object),
        "Service" => unknown_fields::<Service>(object),
        "PodDisruptionBudget" => unknown_fields::<PodDisruptionBudget>(object),
        "Job" => unknown_fields::<Job>(object),
        "StorageNode" => unknown_fields::<crds::StorageNode>(object),
        "ChainTable" => unknown_fields::<crds::ChainTable>(object),
        _ => Some("is of a kind that plans do not write".to_owned()),
    };
    if let Some(text) = unknown {
        say(text);
    }
    let pod = &object["spec"]["template"]["spec"];
    if pod.is_object() {
        check_pod(pod, &mut say);
    }
}

/// A field that the type does not know is lost in a round trip: it was misspelt.
fn unknown_fields<T: DeserializeOwned + Serialize>(object: &Value) -> Option<String> {
    let typed: T = match serde_json::from_value(object.clone()) {
        Ok(typed) => typed,
        Err(error) => return Some(format!("does not parse: {error}")),
    };
    let back = serde_json::to_value(&typed).unwrap_or_default();
    (!diff::covers(object, &back)).then(|| "has a field that its type does not know".to_owned())
}

/// What Pod Security `restricted` and our own rules ask of every pod that we make.
fn check_pod(pod: &Value, say: &mut impl FnMut(String)) {
    if pod["automountServiceAccountToken"] != Value::Bool(false) {
        say("mounts a service account token".to_owned());
    }
    if pod["securityContext"]["runAsNonRoot"] != Value::Bool(true) {
        say("may run as root".to_owned());
    }
    for container in pod["containers"].as_array().into_iter().flatten() {
        let name = container["name"].as_str().unwrap_or_default();
        for part in ["requests", "limits"] {
            for resource in ["cpu", "memory"] {
                if container["resources"][part][resource].is_null() {
                    say(format!("container {name} has no {resource} in {part}"));
                }
            }
        }
        let context = &container["securityContext"];
        let restricted = context["allowPrivilegeEscalation"] == Value::Bool(false)
            && context["readOnlyRootFilesystem"] == Value::Bool(true)
            && context["capabilities"]["drop"][0] == "ALL"
            && context["seccompProfile"]["type"].is_string();
        if !restricted {
            say(format!("container {name} is not restricted"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn findings(object: Value) -> String {
        lint(&Plan { actions: vec![Action::Apply(object)], requeue_s: None }).join("\n")
    }

    fn service(spec: &Value) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "a", "namespace": "b", "ownerReferences": [
                {"apiVersion": "x/v1", "kind": "X", "name": "x", "uid": "u"}]},
            "spec": spec,
        })
    }

    #[test]
    fn a_misspelt_field_is_found() {
        assert_eq!(findings(service(&json!({"clusterIP": "None"}))), "");
        let found = findings(service(&json!({"clusterIp": "None"})));
        assert_eq!(found, "Service a: has a field that its type does not know");
    }

    #[test]
    fn a_pod_that_could_run_as_root_or_without_limits_is_found() {
        let mut job = service(&json!({"template": {"spec": {"containers": [{"name": "c"}]}}}));
        job["apiVersion"] = json!("batch/v1");
        job["kind"] = json!("Job");
        let found = findings(job);
        for part in ["may run as root", "no memory in limits", "not restricted", "token"] {
            assert!(found.contains(part), "{part}: {found}");
        }
    }

    #[test]
    fn deleting_a_claim_is_found() {
        let id = ObjectId::new("PersistentVolumeClaim", "b", "data-train-10001-0");
        let plan = Plan { actions: vec![Action::Delete(id)], requeue_s: None };
        assert_eq!(lint(&plan), ["deletes data: claim data-train-10001-0"]);
    }
}
