//! Every reader of hostile bytes, guided by coverage where a nightly toolchain and cargo-fuzz are; on stable Rust a program
//! that repeats what was found. The tests of each crate mutate good inputs of the same functions.
//!
//! ```text
//! LAMPYRIS_FUZZ_TARGET=frame cargo +nightly fuzz run --fuzz-dir kind-e2e/fuzz any
//! LAMPYRIS_FUZZ_TARGET=frame cargo run -p fuzz --bin any -- FILE...
//! ```
#![cfg_attr(fuzzing, no_main)]

use anyhow::{Context, Result};

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 10] = [
    ("chain", rpc::fuzz::fuzz_chain),
    ("disk", storage_node::engine::fuzz_open),
    ("filter", scan_agent::filter::fuzz_filter),
    ("frame", rpc::fuzz::fuzz_frame),
    ("message", rpc::fuzz::fuzz_message),
    ("record", meta::schema::fuzz_value),
    ("request", scan_agent::serve::fuzz_request),
    ("ring", ring::layout::fuzz_layout),
    ("source", source::fuzz_source_config),
    ("vortex", scan_agent::bridge::fuzz_vortex),
];

/// The target that the environment names.
fn target() -> Result<Target> {
    let name = std::env::var("LAMPYRIS_FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    let names = TARGETS.map(|(known, _)| known).join(", ");
    let (_, target) = found
        .with_context(|| format!("LAMPYRIS_FUZZ_TARGET is {name:?}: set it to one of {names}"))?;
    Ok(*target)
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| target().unwrap_or_else(|why| panic!("{why:#}"))(bytes));

#[cfg(not(fuzzing))]
fn main() -> Result<()> {
    let target = target()?;
    for path in std::env::args_os().skip(1) {
        let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        target(&bytes);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::TARGETS;

    #[test]
    fn every_target_takes_nothing_and_anything() {
        for (name, target) in TARGETS {
            for bytes in [&b""[..], name.as_bytes(), &[0xff; 300]] {
                target(bytes);
            }
        }
    }
}
