//! Running programs: output on success, the whole story on failure, and never for ever.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};

/// No program of the tests takes longer; the longest makes a gibibyte of data, or has it read.
const LONGEST: Duration = Duration::from_secs(1200);

/// Root of the repository whose tests run. Asked now and not compiled in: cargo may have built them in another clone.
#[must_use]
pub fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR");
    PathBuf::from(package.unwrap_or_else(|| ".".into())).join("..")
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
/// When it cannot be started, takes too long or ends with another status than 0; the message holds its stderr.
pub fn run(command: &mut Command) -> Result<String> {
    run_within(command, LONGEST)
}

/// [`run`] for a command that has to end within `limit`.
///
/// # Errors
/// As [`run`].
pub fn run_within(command: &mut Command, limit: Duration) -> Result<String> {
    let output = output_within(command, "", limit)?;
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
/// When it cannot be started, its input cannot be written, or it has not ended within `limit`.
pub fn output_within(command: &mut Command, input: &str, limit: Duration) -> Result<Output> {
    let mut child = spawn(command)?;
    let deadline = Limit::start(&child, limit);
    let mut stdin = child.stdin.take().context("stdin is piped")?;
    stdin.write_all(input.as_bytes()).with_context(|| format!("write to {command:?}"))?;
    drop(stdin);
    let output = child.wait_with_output().with_context(|| format!("wait for {command:?}"))?;
    ensure!(!deadline.lift(), "{command:?} was ended: it took longer than {limit:?}");
    Ok(output)
}

/// Starts a command with pipes to all three of its streams, at the head of a process group of its own.
///
/// # Errors
/// When it cannot be started.
pub(crate) fn spawn(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command.spawn().with_context(|| format!("start {command:?}"))
}

/// Ends a program and all that it has started, unless it is lifted in time.
#[derive(Debug)]
pub(crate) struct Limit {
    lift: Sender<()>,
    watch: JoinHandle<bool>,
}

impl Limit {
    /// Begins to count for a child that [`spawn`] has started.
    pub(crate) fn start(child: &Child, limit: Duration) -> Self {
        let group = Pid::from_child(child);
        let (lift, lifted) = mpsc::channel::<()>();
        let watch = std::thread::spawn(move || {
            let is_late = lifted.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if is_late {
                // An error means that it has just ended by itself.
                let _ = kill_process_group(group, Signal::KILL);
            }
            is_late
        });
        Self { lift, watch }
    }

    /// Stops counting; whether the time was over before.
    pub(crate) fn lift(self) -> bool {
        drop(self.lift);
        self.watch.join().unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_program_that_takes_too_long_ends_with_all_that_it_has_started() {
        let begin = Instant::now();
        // The inner sleep holds the pipe after the shell is gone.
        let mut command = Command::new("bash");
        let error = run_within(command.args(["-c", "sleep 60; true"]), Duration::from_millis(100))
            .expect_err("a minute is longer than 100 ms");
        assert!(error.to_string().ends_with("it took longer than 100ms"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_program_that_ends_in_time_keeps_its_output() {
        let said = run_within(Command::new("echo").arg("fine"), Duration::from_secs(60));
        assert_eq!(said.expect("echo runs"), "fine\n");
    }
}
