//! `helm`, with the charts of this repository.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::command::{repository, run_within, tool};

/// Longer than every time that helm itself is given.
const LONGEST: Duration = Duration::from_secs(240);

/// A value of a chart, as `--set` takes it: path and text.
pub type Setting<'a> = (&'a str, &'a str);

/// Installs a chart of `helm/`, or brings its release up to date, and waits until it is ready.
///
/// # Errors
/// When helm fails; the message holds what it said.
pub fn install(
    release: &str,
    chart: &str,
    namespace: &str,
    values: &[Setting<'_>],
) -> Result<String> {
    upgrade(release, chart, namespace, values, &["--wait", "--timeout", "180s"])
}

/// Installs a chart of `helm/`, or brings its release up to date, without waiting for anything.
///
/// # Errors
/// When helm fails; the message holds what it said.
pub fn create(
    release: &str,
    chart: &str,
    namespace: &str,
    values: &[Setting<'_>],
) -> Result<String> {
    upgrade(release, chart, namespace, values, &[])
}

fn upgrade(
    release: &str,
    chart: &str,
    namespace: &str,
    values: &[Setting<'_>],
    flags: &[&str],
) -> Result<String> {
    let mut helm = tool("helm");
    helm.args(["upgrade", "--install", release]).arg(repository().join("helm").join(chart));
    helm.args(["--namespace", namespace, "--create-namespace"]).args(flags);
    run(set(&mut helm, values))
}

/// Removes a release and waits until its objects are gone.
///
/// # Errors
/// When helm fails; the message holds what it said.
pub fn uninstall(release: &str, namespace: &str) -> Result<String> {
    let mut helm = tool("helm");
    run(helm.args(["uninstall", release, "--namespace", namespace, "--wait", "--timeout", "60s"]))
}

/// Checks a chart of `helm/` with `helm lint`; a warning counts as an error.
///
/// # Errors
/// When helm finds fault with it; the message holds what it said.
pub fn lint(chart: &str) -> Result<String> {
    run(tool("helm").args(["lint", "--strict"]).arg(repository().join("helm").join(chart)))
}

/// What a chart of `helm/` renders with these values, hooks too.
///
/// # Errors
/// When helm fails; the message holds what it said.
pub fn render(
    release: &str,
    chart: &str,
    namespace: &str,
    values: &[Setting<'_>],
) -> Result<String> {
    let mut helm = tool("helm");
    helm.args(["template", release]).arg(repository().join("helm").join(chart));
    helm.args(["--namespace", namespace]);
    run(set(&mut helm, values))
}

/// The manifests of a release, as helm applied them, each with its namespace.
///
/// # Errors
/// When there is no such release.
pub fn manifest(release: &str, namespace: &str) -> Result<String> {
    run(tool("helm").args(["get", "manifest", release, "--namespace", namespace]))
}

fn set<'a>(helm: &'a mut Command, values: &[Setting<'_>]) -> &'a mut Command {
    for (key, value) in values {
        helm.args(["--set", &format!("{key}={value}")]);
    }
    helm
}

fn run(helm: &mut Command) -> Result<String> {
    run_within(helm, LONGEST)
}
