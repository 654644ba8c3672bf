//! Every message against its golden file, and the decoder against bytes that nobody sent.
//!
//! `LAMPYRIS_BLESS=1` rewrites the files: a change of a file is a change of the protocol.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod samples;

use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc::frame::Kind;
use rpc::fuzz::{fuzz_chain, fuzz_frame, fuzz_message};
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
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
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
    for kind in known {
        assert!(samples.iter().any(|s| s.is_response && s.kind == kind), "answer of {kind:#06x}");
    }
}

/// SplitMix64: the same mutations for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>, donor: &[u8]) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(6) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7f, 0xff][self.below(4)],
                2 => bytes.truncate(at),
                3 => bytes.insert(at, self.next() as u8),
                4 => {
                    let from = self.below(donor.len());
                    bytes.splice(at.., donor[from..].iter().copied());
                }
                _ => bytes.extend_from_slice(&self.next().to_le_bytes()),
            }
        }
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

#[test]
fn no_bytes_make_the_decoder_panic_or_accept_what_it_would_not_send() {
    let seconds = std::env::var("LAMPYRIS_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(1));
    let samples = samples();
    let frames: Vec<Vec<u8>> = samples.iter().map(frame).collect();
    let chain = samples::chain();
    let mut random = Random(1);
    let mut runs = 0u64;
    while Instant::now() < end {
        for _ in 0..256 {
            let sample = &samples[random.below(samples.len())];
            let donor = frames[random.below(frames.len())].clone();
            let mut bytes = frame(sample);
            random.mutate(&mut bytes, &donor);
            if random.below(4) > 0 {
                reseal(&mut bytes);
            }
            fuzz_frame(&bytes);
            let mut head = sample.kind.to_le_bytes().to_vec();
            head.push(u8::from(sample.is_response));
            let mut body = sample.head.to_vec();
            random.mutate(&mut body, &donor);
            head.extend_from_slice(&body);
            fuzz_message(&head);
            let mut bytes = chain.to_vec();
            random.mutate(&mut bytes, &donor);
            fuzz_chain(&bytes);
            runs += 1;
        }
    }
    assert!(runs > 1_000, "only {runs} runs");
}
