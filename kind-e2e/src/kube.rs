//! `kubectl`, with objects as JSON values.

use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::command::{output_within, run_within, tool};

/// Longer than every `--timeout` that kubectl itself is given, and than what it runs inside of pods.
const LONGEST: Duration = Duration::from_secs(240);

/// `kubectl ARGS...` against the cluster that `KUBECONFIG` names.
///
/// # Errors
/// When kubectl fails; the message holds what it said.
pub fn kubectl(args: &[&str]) -> Result<String> {
    run_within(program().args(args), LONGEST)
}

fn program() -> Command {
    tool("kubectl")
}

fn output(kubectl: &mut Command, input: &str) -> Result<Output> {
    output_within(kubectl, input, LONGEST)
}

/// Applies manifests, as a user would.
///
/// # Errors
/// When the API server refuses one of them.
pub fn apply(manifests: &str) -> Result<String> {
    apply_with(&[], manifests)
}

/// [`apply`] in a namespace, for manifests that name none.
///
/// # Errors
/// As [`apply`].
pub fn apply_in(namespace: &str, manifests: &str) -> Result<String> {
    apply_with(&["-n", namespace], manifests)
}

fn apply_with(flags: &[&str], manifests: &str) -> Result<String> {
    let output = output(program().args(flags).args(["apply", "-f", "-"]), manifests)?;
    if !output.status.success() {
        bail!("kubectl apply: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Asks the API server to refuse a manifest and gives back its words.
///
/// # Errors
/// When it accepts the manifest.
pub fn refused(namespace: &str, manifest: &str) -> Result<String> {
    let mut kubectl = program();
    kubectl.args(["-n", namespace, "apply", "--dry-run=server", "-f", "-"]);
    let output = output(&mut kubectl, manifest)?;
    if output.status.success() {
        bail!("the API server accepts:\n{manifest}");
    }
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Asks the API server whether it would take manifests, and holds them to its schemas: a field that
/// no schema knows is an error. Gives back the objects as it would keep them.
///
/// # Errors
/// When it refuses one of them; the message holds its words.
pub fn accepted(namespace: &str, manifests: &str) -> Result<Vec<Value>> {
    let mut kubectl = program();
    kubectl.args(["-n", namespace, "apply", "--dry-run=server", "--validate=strict"]);
    let output = output(kubectl.args(["-o", "json", "-f", "-"]), manifests)?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let mut said: Value = serde_json::from_slice(&output.stdout).context("parse the objects")?;
    match said["items"].take() {
        Value::Array(items) => Ok(items),
        _ => Ok(vec![said]),
    }
}

/// Deletes an object if it is there, and waits until it is gone.
///
/// # Errors
/// When it is still there after a minute.
pub fn delete(namespace: &str, kind: &str, name: &str) -> Result<()> {
    delete_with(&[], namespace, kind, name)
}

/// [`delete`] that first waits until everything is gone that the object owns.
///
/// # Errors
/// As [`delete`].
pub fn delete_with_dependents(namespace: &str, kind: &str, name: &str) -> Result<()> {
    delete_with(&["--cascade=foreground"], namespace, kind, name)
}

/// [`delete`] that does not wait: nobody uses the name again in this run.
///
/// # Errors
/// When the API server refuses.
pub fn abandon(namespace: &str, kind: &str, name: &str) -> Result<()> {
    delete_with(&["--wait=false"], namespace, kind, name)
}

fn delete_with(flags: &[&str], namespace: &str, kind: &str, name: &str) -> Result<()> {
    let mut args = vec!["-n", namespace, "delete", kind, name, "--ignore-not-found"];
    args.push("--timeout=60s");
    args.extend(flags);
    kubectl(&args)?;
    Ok(())
}

/// One object.
///
/// # Errors
/// When it does not exist or cannot be read.
pub fn get(namespace: &str, kind: &str, name: &str) -> Result<Value> {
    let text = kubectl(&["-n", namespace, "get", kind, name, "-o", "json"])?;
    serde_json::from_str(&text).with_context(|| format!("parse {kind} {name}"))
}

/// The objects of a kind in a namespace that a label selector chooses; an empty one chooses all.
///
/// # Errors
/// When they cannot be read.
pub fn list(namespace: &str, kind: &str, selector: &str) -> Result<Vec<Value>> {
    items(&["-n", namespace, "get", kind, "-l", selector, "-o", "json"])
}

/// [`list`] of all namespaces.
///
/// # Errors
/// As [`list`].
pub fn list_everywhere(kind: &str, selector: &str) -> Result<Vec<Value>> {
    items(&["get", kind, "-A", "-l", selector, "-o", "json"])
}

fn items(args: &[&str]) -> Result<Vec<Value>> {
    let text = kubectl(args)?;
    let mut list: Value = serde_json::from_str(&text).with_context(|| format!("parse {args:?}"))?;
    match list["items"].take() {
        Value::Array(items) => Ok(items),
        other => bail!("{args:?} gives {other}"),
    }
}

/// The status of a condition (`True`, `False`, `Unknown`) with its reason and message, provided that
/// the controller has seen the newest generation.
///
/// # Errors
/// When the condition is not there yet or speaks of an older generation.
pub fn condition(object: &Value, kind: &str) -> Result<(String, String)> {
    let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions
        .and_then(|c| c.iter().find(|c| c["type"] == kind))
        .with_context(|| format!("no condition {kind} in {}", object["status"]))?;
    let observed = found["observedGeneration"].as_i64().unwrap_or(0);
    if observed != generation {
        bail!("condition {kind} speaks of generation {observed}, the object is at {generation}");
    }
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    Ok((text("status"), format!("{}: {}", text("reason"), text("message"))))
}

/// Succeeds when the object's condition is `True` at its newest generation.
///
/// # Errors
/// When it is not, with the reason that the condition gives.
pub fn is_true(object: &Value, kind: &str) -> Result<()> {
    match condition(object, kind)? {
        (status, _) if status == "True" => Ok(()),
        (status, why) => bail!("condition {kind} is {status}: {why}"),
    }
}

/// Something that was told about an object.
#[derive(Clone, Debug)]
pub struct Event {
    /// `Warning` or `Normal`.
    pub kind: String,
    /// Kind and name of the object, with a slash between.
    pub about: String,
    /// One word.
    pub reason: String,
    /// A sentence.
    pub message: String,
    /// How often it was told.
    pub count: u64,
    /// When it was told last, as [`moment`] has it.
    pub last: String,
}

/// The events of a namespace that a field selector chooses; an empty one chooses all.
///
/// # Errors
/// When they cannot be read.
pub fn events(namespace: &str, fields: &str) -> Result<Vec<Event>> {
    let text =
        kubectl(&["-n", namespace, "get", "events", "--field-selector", fields, "-o", "json"])?;
    let list: Value = serde_json::from_str(&text).context("parse events")?;
    Ok(list["items"].as_array().context("a list of events")?.iter().map(event).collect())
}

fn event(event: &Value) -> Event {
    let text = |pointer: &str| {
        event.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    // The two APIs for events keep time and number in different places.
    let times =
        ["/lastTimestamp", "/series/lastObservedTime", "/eventTime", "/metadata/creationTimestamp"];
    let counts = [&event["count"], &event["series"]["count"]];
    Event {
        kind: text("/type"),
        about: format!("{}/{}", text("/involvedObject/kind"), text("/involvedObject/name")),
        reason: text("/reason"),
        message: text("/message"),
        count: counts.into_iter().filter_map(Value::as_u64).max().unwrap_or(1).max(1),
        last: times.into_iter().map(|t| moment(&text(t))).max().unwrap_or_default(),
    }
}

/// The events about a pod with this reason.
///
/// # Errors
/// When it has none, with those that it has.
pub fn told(namespace: &str, pod: &str, reason: &str) -> Result<Vec<Event>> {
    let uid = get(namespace, "pod", pod)?["metadata"]["uid"].as_str().map(str::to_owned);
    let fields = format!("involvedObject.uid={}", uid.context("the pod's uid")?);
    let all = events(namespace, &fields)?;
    let reasons: Vec<_> = all.iter().map(|event| event.reason.clone()).collect();
    let found: Vec<_> = all.into_iter().filter(|event| event.reason == reason).collect();
    if found.is_empty() {
        bail!("no event {reason} on {pod}: {reasons:?}");
    }
    Ok(found)
}

/// A time of the API server, down to the second: as such, times compare as text.
#[must_use]
pub fn moment(time: &str) -> String {
    time.chars().take("2026-01-01T00:00:00".len()).collect()
}

/// Now, as [`moment`] has it.
///
/// # Errors
/// When `date` fails.
pub fn now() -> Result<String> {
    let time = run_within(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%S"]), LONGEST)?;
    Ok(moment(time.trim()))
}

/// The containers of a pod or of a pod's template whose CPU request, memory request or memory limit is missing.
#[must_use]
pub fn unbounded(pod: &Value) -> Vec<String> {
    let mut missing = Vec::new();
    for list in ["initContainers", "containers"] {
        for container in pod["spec"][list].as_array().into_iter().flatten() {
            for amount in ["/requests/cpu", "/requests/memory", "/limits/memory"] {
                if container["resources"].pointer(amount).is_none() {
                    missing.push(format!("{} has no {amount}", container["name"]));
                }
            }
        }
    }
    missing
}

/// What a pod answers to `GET /PATH` at one of its ports, by way of the API server.
///
/// # Errors
/// When it does not answer, or with another status than success.
pub fn ask(namespace: &str, pod: &str, port: i32, path: &str) -> Result<String> {
    let url = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{path}");
    kubectl(&["get", "--raw", &url])
}

/// Puts an object to a path of the API, such as a subresource.
///
/// # Errors
/// When the API server refuses it; the message holds its words.
pub fn put(path: &str, object: &Value) -> Result<()> {
    let output =
        output(program().args(["replace", "--raw", path, "-f", "-"]), &object.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "put {path}: {}", said.trim());
    Ok(())
}

/// What a command printed inside a container.
///
/// # Errors
/// When it cannot be run there or ends with another status than 0.
pub fn exec(namespace: &str, pod: &str, container: &str, command: &[&str]) -> Result<String> {
    let mut args = vec!["-n", namespace, "exec", pod, "-c", container, "--"];
    args.extend(command);
    kubectl(&args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_condition_of_an_older_generation_does_not_count() {
        let ready = json!({"type": "Ready", "status": "True", "reason": "R", "message": "m", "observedGeneration": 1});
        let object = |generation: i64| json!({"metadata": {"generation": generation}, "status": {"conditions": [ready]}});
        assert!(is_true(&object(1), "Ready").is_ok());
        let error = is_true(&object(2), "Ready").expect_err("generation 2 was not observed");
        assert_eq!(error.to_string(), "condition Ready speaks of generation 1, the object is at 2");
        assert!(condition(&object(1), "Progressing").is_err());
    }

    #[test]
    fn an_event_of_either_api_has_a_time_and_a_number() {
        let old = json!({"reason": "BackOff", "lastTimestamp": "2026-01-01T00:00:09Z", "count": 3});
        let new = json!({"reason": "BackOff", "eventTime": "2026-01-01T00:00:08.123456Z",
            "metadata": {"creationTimestamp": "2026-01-01T00:00:08Z"}});
        let (old, new) = (event(&old), event(&new));
        assert_eq!((old.last.as_str(), old.count), ("2026-01-01T00:00:09", 3));
        assert_eq!((new.last.as_str(), new.count), ("2026-01-01T00:00:08", 1));
    }

    #[test]
    fn a_container_without_a_limit_is_named() {
        let bounded = json!({"requests": {"cpu": "1", "memory": "1"}, "limits": {"memory": "1"}});
        let pod = |resources: Value| json!({"spec": {"containers": [{"name": "app", "resources": resources}]}});
        assert!(unbounded(&pod(bounded)).is_empty());
        assert_eq!(unbounded(&pod(json!({}))).len(), 3);
        let half = json!({"requests": {"cpu": "1", "memory": "1"}});
        assert_eq!(unbounded(&pod(half)), ["\"app\" has no /limits/memory"]);
    }
}
