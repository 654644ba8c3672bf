//! One heap for all threads: with the C library's several ones, each keeps for itself what its threads have freed, and a
//! sidecar that was busy once holds half as much again as it ever needed.
//!
//! The C library takes that number from the environment when a program starts, so the program starts once more.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// What the C library reads (`mallopt(3)`).
const ARENAS: &str = "MALLOC_ARENA_MAX";

/// Comes back in a process with one heap: this one, or the same started again in its place. A number that somebody set is
/// left alone.
pub fn use_one_heap() {
    if std::env::var_os(ARENAS).is_some() {
        return;
    }
    let mut arguments = std::env::args_os();
    let error = match (std::env::current_exe(), arguments.next()) {
        (Ok(program), Some(name)) => {
            Command::new(program).arg0(name).args(arguments).env(ARENAS, "1").exec()
        }
        (Err(error), _) => error,
        (Ok(_), None) => std::io::Error::other("no name of this program"),
    };
    tracing::warn!(%error, "start again with one heap; this process will keep more memory");
}
