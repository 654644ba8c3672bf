//! `kubectl`, with objects as JSON values.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{output, run, tool};

/// `kubectl ARGS...` against the cluster that `KUBECONFIG` names.
///
/// # Errors
/// When kubectl fails; the message holds what it said.
pub fn kubectl(args: &[&str]) -> Result<String> {
    run(program().args(args))
}

fn program() -> Command {
    tool("kubectl")
}

/// Applies manifests, as a user would.
///
/// # Errors
/// When the API server refuses one of them.
pub fn apply(manifests: &str) -> Result<String> {
    let output = output(program().args(["apply", "-f", "-"]), manifests)?;
    if !output.status.success() {
        bail!("kubectl apply: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Asks the API server to refuse a manifest and gives back its words.
///
/// # Errors
/// When it accepts the manifest.
pub fn refused(manifest: &str) -> Result<String> {
    let output = output(program().args(["apply", "--dry-run=server", "-f", "-"]), manifest)?;
    if output.status.success() {
        bail!("the API server accepts:\n{manifest}");
    }
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Asks the API server whether it would take manifests, and holds them to its schemas: a field that
/// no schema knows is an error.
///
/// # Errors
/// When it refuses one of them; the message holds its words.
pub fn accepted(namespace: &str, manifests: &str) -> Result<()> {
    let mut kubectl = program();
    kubectl.args(["-n", namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-"]);
    let output = output(&mut kubectl, manifests)?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
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
    let text = kubectl(&["-n", namespace, "get", kind, "-l", selector, "-o", "json"])?;
    let mut list: Value =
        serde_json::from_str(&text).with_context(|| format!("parse a list of {kind}"))?;
    match list["items"].take() {
        Value::Array(items) => Ok(items),
        other => bail!("a list of {kind} holds {other}"),
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

/// Warning events of a namespace, as `kind/name reason: message`.
///
/// # Errors
/// When they cannot be read.
pub fn warnings(namespace: &str) -> Result<Vec<String>> {
    let text = kubectl(&[
        "-n",
        namespace,
        "get",
        "events",
        "--field-selector",
        "type=Warning",
        "-o",
        "json",
    ])?;
    let list: Value = serde_json::from_str(&text).context("parse events")?;
    let line = |e: &Value| {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let about = &e["involvedObject"];
        format!(
            "{}/{} {}: {}",
            text(&about["kind"]),
            text(&about["name"]),
            text(&e["reason"]),
            text(&e["message"])
        )
    };
    Ok(list["items"].as_array().into_iter().flatten().map(line).collect())
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

/// Everything that a container has logged.
///
/// # Errors
/// When the log cannot be read.
pub fn logs(namespace: &str, pod: &str, container: &str) -> Result<String> {
    kubectl(&["-n", namespace, "logs", pod, "-c", container])
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
}
