//! Running programs: output on success, the whole story on failure.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};

/// Root of the repository.
#[must_use]
pub fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Folder of everything that can be made again: programs, images, the local cluster.
#[must_use]
pub fn cache() -> PathBuf {
    let default =
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/lampyris");
    std::env::var_os("LAMPYRIS_CACHE").map_or_else(default, PathBuf::from)
}

/// A program of the cache when it is there, else the one on the PATH.
#[must_use]
pub fn tool(name: &str) -> Command {
    let cached = cache().join("k8s/bin").join(name);
    if cached.is_file() { Command::new(cached) } else { Command::new(name) }
}

/// Runs a command and gives back what it printed.
///
/// # Errors
/// When it cannot be started or ends with another status than 0; the message holds its stderr.
pub fn run(command: &mut Command) -> Result<String> {
    let output = output(command, "")?;
    if !output.status.success() {
        bail!(
            "{command:?} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command with `input` as its standard input, whatever status it ends with.
///
/// # Errors
/// When it cannot be started or its input cannot be written.
pub fn output(command: &mut Command, input: &str) -> Result<Output> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {command:?}"))?;
    let mut stdin = child.stdin.take().context("stdin is piped")?;
    stdin.write_all(input.as_bytes()).with_context(|| format!("write to {command:?}"))?;
    drop(stdin);
    child.wait_with_output().with_context(|| format!("wait for {command:?}"))
}
