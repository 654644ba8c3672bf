//! Mutates good inputs of everything that reads what strangers write. `LAMPYRIS_FUZZ_SECONDS` says for how long; a failure
//! prints the seed that repeats it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::cell::Cell;
use std::sync::Once;
use std::time::{Duration, Instant};

/// The end of a file is where its structure is: half of the mutations happen within so many bytes of it.
const TAIL: usize = 2048;

thread_local! {
    /// Set while a target runs: a decoder's panic is caught and answered, and would only be noise.
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Panics of the tests themselves are told as ever, or nobody would see the seed.
fn quieten() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                tell(panic);
            }
        }));
    });
}

fn run(name: &str, good: &[Vec<u8>], target: fn(&[u8])) {
    quieten();
    rpc::fuzz::run(|random| {
        let mut data = good[random.below(good.len())].clone();
        let donor = &good[random.below(good.len())];
        if random.below(2) == 0 {
            random.mutate(&mut data, donor);
        } else {
            let mut tail = data.split_off(data.len().saturating_sub(TAIL));
            random.mutate(&mut tail, donor);
            data.append(&mut tail);
        }
        let started = Instant::now();
        IS_QUIET.set(true);
        let outcome = std::panic::catch_unwind(|| target(&data));
        IS_QUIET.set(false);
        if let Err(panic) = outcome {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            panic!("{name} panics: {}", said.unwrap_or_default());
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{name} is slow");
    });
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

#[test]
fn filters() {
    let good = texts(&[
        "a >= -10 and (b in ('x', 'it''s') or c is not null) and not \"odd\"",
        "t between '2013-01-01T00:00:00.5Z' and '2013-02-01' or f < 1.5e-3",
    ]);
    run("filter", &good, scan_agent::filter::fuzz_filter);
}

#[test]
fn requests() {
    let good = texts(&[
        r#"{"open":{"version":1,"dataset":"a","columns":["x"],"where":"x > 1","batchRows":10}}"#,
        r#"{"release":{"id":7}}"#,
        r#"{"datasets":{}}"#,
    ]);
    run("request", &good, scan_agent::serve::fuzz_request);
}

#[test]
fn source_configs() {
    let good = texts(&[
        r#"{"s3":{"uri":"s3://b/p","endpoint":"https://h:1","region":"r","pathStyle":true,"caBundle":null,"credentials":{"accessKeyId":"a","secretAccessKey":"b"}}}"#,
        r#"{"cluster":{"manager":"h:9000","path":"/x"}}"#,
    ]);
    run("source config", &good, source::fuzz_source_config);
}

#[test]
fn vortex_files() {
    let dir = tempfile::tempdir().unwrap();
    scan_agent::make_data::synthetic(200_000, 1, 3, dir.path()).unwrap();
    let good = vec![std::fs::read(dir.path().join("part-00000.vortex")).unwrap()];
    run("vortex", &good, scan_agent::bridge::fuzz_vortex);
}
