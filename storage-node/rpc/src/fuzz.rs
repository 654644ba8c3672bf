//! What must hold for any bytes at all, as plain functions: a runner mutates good messages and
//! calls these. They panic if the decoder accepts what it would not have sent.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use chain::table::Chain;

use crate::codec::Wire;
use crate::error::Error;
use crate::frame::{HEADER_SIZE, Header};
use crate::message::{Request, chain as link, manager, meta, storage};

/// SplitMix64: the same numbers and mutations for the same seed.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Any number.
    pub const fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, 0 for none.
    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.number() % n.max(1) as u64).unwrap_or(0)
    }

    /// Changes bytes in a few places; some come from `donor`.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>, donor: &[u8]) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            let [byte, ..] = self.number().to_le_bytes();
            match (self.below(6), bytes.get_mut(at)) {
                (0, Some(old)) => *old ^= 1 << (byte % 8),
                (1, Some(old)) => *old = [0, 1, 0x7f, 0xff][usize::from(byte % 4)],
                (2, _) => bytes.truncate(at),
                (3, _) => bytes.insert(at, byte),
                (4, _) => {
                    let from = self.below(donor.len());
                    bytes.truncate(at);
                    bytes.extend_from_slice(donor.get(from..).unwrap_or_default());
                }
                _ => bytes.extend_from_slice(&self.number().to_le_bytes()),
            }
        }
    }
}

/// Says which seed failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed that repeats it: {}", self.0);
        }
    }
}

/// Makes attempts with one seed after the other for as many seconds as `LAMPYRIS_FUZZ_SECONDS`
/// says, 1 by default. Answers how many.
///
/// # Panics
/// If an attempt does: then the seed is on standard error. If the variable is no number.
pub fn run(attempt: impl FnMut(&mut Random)) -> u64 {
    run_at_most(u64::MAX, attempt)
}

/// As [`run`], but no more than `most` attempts: for those that use up something, such as ports.
///
/// # Panics
/// As [`run`].
#[expect(clippy::expect_used, reason = "a runner of tests: a budget that is none must not pass")]
pub fn run_at_most(most: u64, mut attempt: impl FnMut(&mut Random)) -> u64 {
    let asked = std::env::var("LAMPYRIS_FUZZ_SECONDS").ok();
    let seconds = asked.map_or(1, |text| text.parse().expect("LAMPYRIS_FUZZ_SECONDS is a number"));
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut seed = 0;
    while seed < most && Instant::now() < end {
        let guard = Seed(seed);
        // Far apart: else neighbouring seeds gave the same numbers, shifted by one.
        attempt(&mut Random(seed.wrapping_mul(0xd134_2543_de82_ef95)));
        drop(guard);
        seed += 1;
    }
    seed
}

/// A stream of bytes as a frame: read without a panic, and what was read is what is sent.
///
/// # Panics
/// If a header that was accepted encodes to other bytes.
pub fn fuzz_frame(bytes: &[u8]) {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_SIZE>() else { return };
    let Ok(decoded) = Header::decode(header) else { return };
    assert_eq!(decoded.encode(), *header, "an accepted header has one encoding");
    let head = rest.get(..decoded.head_length as usize);
    let Some(head) = head.map(Bytes::copy_from_slice) else { return };
    if decoded.check_head(&head).is_ok() {
        message(decoded.kind.0, &head, decoded.response, decoded.status);
    }
}

/// A message head behind its kind (two bytes, little-endian) and one byte that is odd for an
/// answer.
///
/// # Panics
/// If a head that was accepted encodes to other bytes.
pub fn fuzz_message(bytes: &[u8]) {
    if let Some(([low, high, flags], head)) = bytes.split_first_chunk::<3>() {
        let kind = u16::from_le_bytes([*low, *high]);
        message(kind, &Bytes::copy_from_slice(head), flags & 1 == 1, 0);
    }
}

/// A chain as it comes from a manager: whatever decodes can be judged.
///
/// # Panics
/// If a chain that was accepted encodes to other bytes.
pub fn fuzz_chain(bytes: &[u8]) {
    let Ok(chain) = Chain::from_bytes(Bytes::copy_from_slice(bytes)) else { return };
    assert_eq!(chain.to_bytes(), bytes);
    if chain.is_valid() {
        let serving: Vec<_> = chain.serving().collect();
        assert_eq!(chain.head(), serving.first().copied());
        assert_eq!(chain.tail(), serving.last().copied());
        assert!(serving.iter().all(|t| chain.predecessor(*t) != Some(*t)));
    }
}

fn round_trip<T: Wire>(head: &Bytes) {
    if let Ok(value) = T::from_bytes(head.clone()) {
        let mut out = BytesMut::new();
        value.encode(&mut out);
        assert_eq!(out, head, "an accepted head has one encoding");
    }
}

fn message(kind: u16, head: &Bytes, is_response: bool, status: u32) {
    if status != 0 {
        let error = Error::from_head(status, head.clone());
        assert!(!format!("{error}").is_empty());
        return;
    }
    macro_rules! each {
        ($($request:ty,)*) => {
            match kind {
                $(k if k == <$request as Request>::KIND.0 => {
                    if is_response {
                        round_trip::<<$request as Request>::Response>(head);
                    } else {
                        round_trip::<$request>(head);
                    }
                })*
                _ => {}
            }
        };
    }
    each! {
        storage::Read, storage::Update, storage::QueryFile,
        link::Forward, link::ListChunks, link::ForgetChunk, link::SyncDone,
        manager::Heartbeat, manager::GetRouting,
        meta::Lookup, meta::GetAttributes, meta::SetAttributes, meta::Create, meta::Open,
        meta::ReportLength, meta::Truncate, meta::MakeDirectory, meta::MakeSymlink,
        meta::ReadSymlink, meta::Remove, meta::Rename, meta::ReadDirectory,
        meta::StatFileSystem, meta::KeepSessions,
    }
}
