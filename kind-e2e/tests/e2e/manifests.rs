//! Bad manifests: the real API server refuses each in our own words.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use kind_e2e::command::repository;
use kind_e2e::{kube, site};

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

#[test]
fn every_bad_manifest_is_refused_in_our_words() -> Result<()> {
    site::definitions()?;
    let bad = manifests("bad")?;
    ensure!(bad.len() >= 40, "only {} bad manifests", bad.len());
    let mut wrong = Vec::new();
    for (path, text) in bad {
        let expected =
            text.lines().next().and_then(|l| l.strip_prefix("# expect: ")).unwrap_or_default();
        match kube::refused(&text) {
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

#[test]
fn every_good_manifest_is_accepted() -> Result<()> {
    site::definitions()?;
    for (path, text) in manifests("good")? {
        let refusal = kube::refused(&text);
        ensure!(refusal.is_err(), "{}: {}", path.display(), refusal.unwrap_or_default());
    }
    Ok(())
}
