//! Every message against its golden file, and the decoder against bytes that nobody sent.
//!
//! `LAMPYRIS_BLESS=1` rewrites the files: a change of a file is a change of the protocol.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod samples;

use bytes::Bytes;
use rpc::frame::Kind;
use rpc::fuzz::{fuzz_chain, fuzz_frame, fuzz_message, run};
use rpc::transport::Frame;
use samples::{Sample, samples};

fn frame(sample: &Sample) -> Vec<u8> {
    let payload = Bytes::from_static(sample.payload);
    let mut frame = Frame::new(Kind(sample.kind), 7, sample.head.clone(), payload.clone()).unwrap();
    frame.header.response = sample.is_response;
    frame.header.status = sample.status;
    frame.header.deadline_ms = if sample.is_response { 0 } else { 1_500 };
    [&frame.header.encode()[..], &sample.head[..], &payload[..]].concat()
}

/// Sixteen bytes a line, the header's four lines first.
fn dump(bytes: &[u8]) -> String {
    let line = |line: &[u8]| {
        let hex: Vec<String> = line.iter().map(|b| format!("{b:02x}")).collect();
        hex.join(" ") + "\n"
    };
    bytes.chunks(16).map(line).collect()
}

#[test]
fn every_frame_is_byte_for_byte_its_golden_file() {
    let folder = "tests/golden";
    for sample in samples() {
        let path = format!("{folder}/{}.hex", sample.name);
        let now = dump(&frame(&sample));
        if std::env::var_os("LAMPYRIS_BLESS").is_some() {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(&path, &now).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(now, golden, "{path}: LAMPYRIS_BLESS=1 rewrites it");
    }
}

#[test]
fn every_request_and_every_answer_has_a_golden_file() {
    let samples = samples();
    let mut kinds: Vec<u16> = samples.iter().filter(|s| !s.is_response).map(|s| s.kind).collect();
    kinds.sort_unstable();
    let known: Vec<u16> = [0x0101..=0x0103, 0x0111..=0x0114, 0x0201..=0x0202, 0x0301..=0x030f]
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(kinds, known);
    let mut names: Vec<&str> = kinds.iter().map(|kind| Kind(*kind).name()).collect();
    for (kind, name) in kinds.iter().zip(&names) {
        let file = format!("{kind:04x}-{}.request", name.replace('_', "-"));
        assert!(samples.iter().any(|s| s.name == file), "no {file}");
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), kinds.len());
    assert_eq!(Kind(0xffff).name(), "unknown");
    for kind in known {
        assert!(samples.iter().any(|s| s.is_response && s.kind == kind), "answer of {kind:#06x}");
    }
}

/// Puts right checksums over mutated bytes, so that the mutation gets behind them.
fn reseal(bytes: &mut [u8]) {
    if bytes.len() < 64 {
        return;
    }
    let length = u32::from_le_bytes(bytes[20..24].try_into().unwrap()) as usize;
    if let Some(head) = bytes.get(64..64usize.saturating_add(length)) {
        let sum = crc32c::crc32c(head).to_le_bytes();
        bytes[28..32].copy_from_slice(&sum);
    }
    let sum = crc32c::crc32c(&bytes[..60]).to_le_bytes();
    bytes[60..64].copy_from_slice(&sum);
}

/// Runs of a target in one second, at the least: it would do nothing else.
const RUNS_MIN: u64 = 1_000;

// Each of the targets has the whole time: they run side by side.

#[test]
fn no_bytes_make_a_frame_panic_or_be_accepted_that_nobody_would_send() {
    let frames: Vec<Vec<u8>> = samples().iter().map(frame).collect();
    let runs = run(|random| {
        let mut bytes = frames[random.below(frames.len())].clone();
        let donor = &frames[random.below(frames.len())];
        random.mutate(&mut bytes, donor);
        if random.below(4) > 0 {
            reseal(&mut bytes);
        }
        fuzz_frame(&bytes);
    });
    assert!(runs > RUNS_MIN, "only {runs} runs");
}

#[test]
fn no_bytes_make_a_message_panic_or_be_accepted_that_nobody_would_send() {
    let samples = samples();
    let runs = run(|random| {
        let sample = &samples[random.below(samples.len())];
        let donor = &samples[random.below(samples.len())].head;
        let mut body = sample.head.to_vec();
        random.mutate(&mut body, donor);
        let [low, high] = sample.kind.to_le_bytes();
        fuzz_message(&[&[low, high, u8::from(sample.is_response)], &body[..]].concat());
    });
    assert!(runs > RUNS_MIN, "only {runs} runs");
}

#[test]
fn no_bytes_make_a_chain_panic_or_be_accepted_that_nobody_would_send() {
    let samples = samples();
    let chain = samples::chain();
    let runs = run(|random| {
        let mut bytes = chain.to_vec();
        let donor = &samples[random.below(samples.len())].head;
        random.mutate(&mut bytes, donor);
        fuzz_chain(&bytes);
    });
    assert!(runs > RUNS_MIN, "only {runs} runs");
}
