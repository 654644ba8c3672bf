//! Bad manifests and forbidden changes: the real API server refuses each in our own words. First of all tests,
//! while no operator makes servers of the objects that are stored here.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use kind_e2e::command::repository;
use kind_e2e::explain::explained;
use kind_e2e::{kube, site};
use serde_json::json;

/// Namespace of the objects that are to be changed.
const CHANGED: &str = "changed";

fn manifests(folder: &str) -> Result<Vec<(PathBuf, String)>> {
    let folder = repository().join("crds/tests").join(folder);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        files.push((path, text));
    }
    files.sort();
    Ok(files)
}

/// Checks that the API server refuses each of these manifests with the words of its first line.
fn refused(namespace: &str, manifests: &[(PathBuf, String)]) -> Result<()> {
    let mut wrong = Vec::new();
    for (path, text) in manifests {
        let expected =
            text.lines().next().and_then(|l| l.strip_prefix("# expect: ")).unwrap_or_default();
        match kube::refused(namespace, text) {
            Ok(said) if !expected.is_empty() && said.contains(expected) => {}
            Ok(said) => {
                wrong.push(format!("{}: expected '{expected}', got: {said}", path.display()))
            }
            Err(error) => wrong.push(format!("{}: {error:#}", path.display())),
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Kind and name of a manifest.
fn identity(text: &str) -> Option<(&str, &str)> {
    let kind = text.lines().find_map(|line| line.strip_prefix("kind: "))?;
    let name = text.lines().find_map(|line| line.strip_prefix("  name: "))?;
    Some((kind, name))
}

#[test]
fn every_bad_manifest_is_refused_in_our_words() -> Result<()> {
    site::definitions()?;
    let bad = manifests("bad")?;
    ensure!(bad.len() >= 40, "only {} bad manifests", bad.len());
    refused("default", &bad)
}

#[test]
fn every_forbidden_change_is_refused_in_our_words() -> Result<()> {
    site::definitions()?;
    // On a cluster that was used before, an operator would start servers for what is stored here.
    let away = site::OperatorAway::begin()?;
    let outcome = explained(store_and_change);
    // From here on nothing can be made in it.
    kube::abandon("default", "namespace", CHANGED)?;
    away.end()?;
    outcome
}

fn store_and_change() -> Result<()> {
    kube::delete("default", "namespace", CHANGED)?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": CHANGED}});
    kube::apply(&namespace.to_string())?;
    let (good, changes) = (manifests("good")?, manifests("update")?);
    ensure!(changes.len() >= 10, "only {} forbidden changes", changes.len());
    for (path, text) in &good {
        if changes.iter().any(|(_, change)| identity(change) == identity(text)) {
            kube::apply_in(CHANGED, text).with_context(|| path.display().to_string())?;
            // What has not changed may be applied again: it is the change that is refused below.
            ensure!(kube::refused(CHANGED, text).is_err(), "{} again", path.display());
        }
    }
    for (path, text) in &changes {
        let is_stored = good.iter().any(|(_, stored)| identity(stored) == identity(text));
        ensure!(is_stored, "{} changes nothing that is stored", path.display());
    }
    refused(CHANGED, &changes)
}

#[test]
fn every_good_manifest_is_accepted() -> Result<()> {
    site::definitions()?;
    for (path, text) in manifests("good")? {
        let refusal = kube::refused("default", &text);
        ensure!(refusal.is_err(), "{}: {}", path.display(), refusal.unwrap_or_default());
    }
    Ok(())
}
