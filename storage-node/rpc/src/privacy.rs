//! What a process holds is its own.

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// Closes this process to every other one of its user: its memory, its descriptors and, through `/proc/PID/root`, its
/// mounts. To be called at the start of a program that holds keys; a program that it executes begins open again.
///
/// A pod's sidecars run as a fixed user. A container of the same pod may run as that one too and see their processes, by
/// `shareProcessNamespace` or as a debug container; else it could read their keys there, or go through their root to the
/// socket that hands out descriptors, though it does not mount the directory. The kernel leaves no core of such a process.
///
/// # Errors
/// The kernel's; it refuses nobody.
pub fn close_process() -> std::io::Result<()> {
    let closed = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    closed.map_err(|error| std::io::Error::other(format!("close this process to others: {error}")))
}
