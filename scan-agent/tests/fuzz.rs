//! Mutates good inputs of everything that reads what strangers write. Short by default;
//! `LAMPYRIS_FUZZ_SECONDS` makes it long. A failure prints the seed that repeats it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::cell::Cell;
use std::sync::Once;
use std::time::{Duration, Instant};

/// Cases of a short run.
const SHORT: u64 = 300;

/// xorshift64*: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).unwrap()
    }
}

fn mutate(random: &mut Random, good: &[Vec<u8>]) -> Vec<u8> {
    let mut data = good[random.below(good.len())].clone();
    for _ in 0..=random.below(6) {
        let at = random.below(data.len().max(1));
        match random.below(7) {
            0 if !data.is_empty() => data[at] ^= 1 << random.below(8),
            1 if !data.is_empty() => data[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            2 => data.truncate(at),
            3 => {
                let len = random.below(16);
                let bytes: Vec<u8> = (0..len).map(|_| random.byte()).collect();
                data.splice(at..at, bytes);
            }
            4 if data.len() > 8 => {
                let to = random.below(data.len() - 8);
                let from = random.below(data.len() - 8);
                data.copy_within(from..from + 8, to);
            }
            5 => {
                let end = (at + random.below(32)).min(data.len());
                data.drain(at.min(end)..end);
            }
            // The end of a file is where its structure is.
            _ if !data.is_empty() => {
                let near = data.len() - 1 - random.below(data.len().min(2048));
                data[near] = random.byte();
            }
            _ => {}
        }
    }
    data
}

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
    let seconds = std::env::var("LAMPYRIS_FUZZ_SECONDS").ok();
    let seconds = seconds.map(|text| text.parse().expect("LAMPYRIS_FUZZ_SECONDS is a number"));
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut seed = 1;
    while until.map_or(seed <= SHORT, |until| Instant::now() < until) {
        let data = mutate(&mut Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)), good);
        let started = Instant::now();
        IS_QUIET.set(true);
        let outcome = std::panic::catch_unwind(|| target(&data));
        IS_QUIET.set(false);
        if let Err(panic) = outcome {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            panic!("{name}: seed {seed} panics: {}", said.unwrap_or_default());
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{name}: seed {seed} is slow");
        seed += 1;
    }
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
