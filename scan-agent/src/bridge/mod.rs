//! The only place that knows vortex: everything else sees files, columns, filters and Arrow.
//!
//! Vortex's wire format is stable, its Rust API is not (a minor version every two weeks), so its
//! types end here. What comes in is hostile: a file is opened and decoded under
//! [`guard`], which turns a panic of the decoder into [`Reason::CorruptFile`].

mod expression;
mod file;
mod read;
mod write;

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use source::{Failure, MemSource, Reason, Source};
use vortex::VortexSessionDefault;
use vortex::error::VortexError;
use vortex::io::runtime::BlockingRuntime;
use vortex::io::runtime::current::CurrentThreadRuntime;
use vortex::io::session::RuntimeSessionExt;
use vortex::session::VortexSession;

pub use file::{File, FooterCache, Plan, ScanError, Split};
pub use write::{WriteSummary, Writer};

/// One thread's vortex: a runtime that runs on the thread that calls, and a session bound to it.
struct Engine {
    runtime: CurrentThreadRuntime,
    session: VortexSession,
}

impl Engine {
    fn new() -> Self {
        let runtime = CurrentThreadRuntime::new();
        let session = VortexSession::default().with_handle(runtime.handle());
        Self { runtime, session }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

/// Runs a decoder over bytes that nobody vouches for.
fn guard<T>(name: &str, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("decoder panicked");
        Err(Failure::new(Reason::CorruptFile, format!("{name}: {said}")))
    })
}

/// What vortex says about a file, in our words. Vortex has no error kind for an unknown id, only
/// its text.
fn failure(name: &str, error: &VortexError) -> Failure {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let says_unknown = ["Unknown encoding", "Unknown layout encoding", "unknown layout encoding"]
        .iter()
        .any(|words| text.contains(words));
    let reason = if says_unknown { Reason::UnknownEncoding } else { Reason::CorruptFile };
    Failure::new(reason, format!("{name}: {first}"))
}

/// Fuzz target: any bytes are opened and scanned to an answer; no panic, no hang.
pub fn fuzz_vortex(data: &[u8]) {
    static IO: OnceLock<Option<tokio::runtime::Runtime>> = OnceLock::new();
    let build = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().ok();
    let Some(io) = IO.get_or_init(build) else {
        return;
    };
    let memory = MemSource::new("fuzz.vortex", data.to_vec());
    let object = memory.object();
    let source: Arc<dyn Source> = Arc::new(memory);
    let Ok(file) = File::open(&source, &object, io.handle(), &FooterCache::default()) else {
        return;
    };
    let mut batches = 0;
    let scanned = file.scan(&Plan::default(), &mut |_| {
        batches += 1;
        if batches < FUZZ_BATCHES { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    drop(scanned);
}

/// Batches after which a fuzzed scan has seen enough: a lying row count must not make it endless.
const FUZZ_BATCHES: usize = 16;

#[cfg(test)]
mod tests;
