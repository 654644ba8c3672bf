//! What must hold for any bytes at all, as plain functions: a runner mutates good messages and
//! calls these. They panic if the decoder accepts what it would not have sent.

use bytes::{Bytes, BytesMut};
use chain::table::Chain;

use crate::codec::Wire;
use crate::error::Error;
use crate::frame::{HEADER_SIZE, Header};
use crate::message::{Request, chain as link, manager, meta, storage};

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
