//! The only place that knows vortex: everything else sees files, columns, filters and Arrow.
//!
//! Vortex's wire format is stable, its Rust API is not (a minor version every two weeks), so its
//! types end here. What comes in is hostile: a file is opened and decoded under
//! [`guard`], which turns a panic of the decoder into [`Reason::CorruptFile`].

mod decode;
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

/// Files that this build reads, by the vortex that wrote them: from the first stable format on.
const READS: &str = "0.36 to 0.90";
/// Most characters of vortex's own words in a message: they may quote the file.
const MAX_SAID: usize = 200;

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
        Err(in_our_words(name, said))
    })
}

fn failure(name: &str, error: &VortexError) -> Failure {
    in_our_words(name, &error.to_string())
}

/// What vortex says about a file, on one line and without its backtraces. Vortex has no error
/// kind for an unknown id, only its text, and of some it does not return but panics.
fn in_our_words(name: &str, text: &str) -> Failure {
    let text = text.split("Backtrace:").next().unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ").replace("Other error: ", "");
    let said: String = line.chars().take(MAX_SAID).collect();
    match unknown(&said) {
        Some(what) => unknown_to_us(name, &what),
        None => Failure::new(Reason::CorruptFile, format!("{name}: {said}")),
    }
}

/// The failure for a part of a file's format that this build does not have.
fn unknown_to_us(name: &str, what: &str) -> Failure {
    let message = format!("{name}: unknown {what}; this build reads files of vortex {READS}");
    Failure::new(Reason::UnknownEncoding, message)
}

/// What a message of vortex says is unknown: a kind of id and the id. An index outside the file's
/// own list of ids is not that: such a file is corrupt.
fn unknown(said: &str) -> Option<String> {
    const KINDS: [(&str, &str); 5] = [
        ("Unknown layout encoding: ", "layout"),
        ("Unknown encoding: ", "array encoding"),
        ("No such DType extension ID: ", "extension type"),
        ("unknown aggregate function id: ", "statistic"),
        ("unsupported version ", "version of the file format:"),
    ];
    KINDS.iter().find_map(|(words, kind)| {
        let (_, rest) = said.split_once(words)?;
        Some(format!("{kind} {}", rest.split_whitespace().next()?))
    })
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
    drop(file.check_layouts());
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
