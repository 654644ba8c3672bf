//! The frame: a 64-byte header, a message head, a payload. `WIRE.md` shows it byte by byte.
//!
//! The header has its own checksum, so that a length is trusted before the bytes behind it are
//! read. The head is covered by the header's `head_checksum`; a payload by the checksum that the
//! message itself carries from the first sender to the last receiver.

use bytes::{BufMut, Bytes, BytesMut};

/// `LMPY` in the order of the bytes on the wire.
pub const MAGIC: u32 = u32::from_le_bytes(*b"LMPY");
/// The version that `WIRE.md` describes.
pub const VERSION: u8 = 2;
/// Size of the header in bytes.
pub const HEADER_SIZE: usize = 64;
/// Most bytes of one message head: a routing table of the largest cluster fits.
pub const HEAD_MAX: usize = 16 << 20;
/// Most bytes of one payload: one chunk of the largest size.
pub const PAYLOAD_MAX: usize = 64 << 20;

/// What a frame asks or answers. A newtype, so that an unknown kind is a value to be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind(pub u16);

/// The header, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The message.
    pub kind: Kind,
    /// Whether this answers the request of the same id.
    pub response: bool,
    /// Pairs an answer with its request on one connection.
    pub request_id: u64,
    /// 0 in requests and good answers, else the number of an [`crate::error::Code`].
    pub status: u32,
    /// Bytes of the message head that follows.
    pub head_length: u32,
    /// Bytes of the payload after the head.
    pub payload_length: u32,
    /// CRC32C of the head.
    pub head_checksum: u32,
    /// How long the sender waits, in milliseconds; 0 = no limit.
    pub deadline_ms: u32,
}

/// Why bytes are not a frame. The connection is closed: nothing behind them can be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not our protocol.
    #[error("magic is {0:#010x}, not LMPY: the peer does not speak this protocol")]
    Magic(u32),
    /// A newer or older peer.
    #[error("frame version {0}, this build speaks {VERSION}")]
    Version(u8),
    /// Damaged on the way.
    #[error("header checksum is {found:#010x}, the bytes give {computed:#010x}")]
    HeaderChecksum {
        /// In the header.
        found: u32,
        /// Over the bytes received.
        computed: u32,
    },
    /// Damaged on the way.
    #[error("head checksum is {found:#010x}, the bytes give {computed:#010x}")]
    HeadChecksum {
        /// In the header.
        found: u32,
        /// Over the bytes received.
        computed: u32,
    },
    /// A bit or byte that must be zero is not.
    #[error("reserved {0} is not zero")]
    Reserved(&'static str),
    /// Longer than any message.
    #[error("{part} of {length} bytes, more than the limit of {limit}")]
    TooLong {
        /// Head or payload.
        part: &'static str,
        /// What the header claims.
        length: u32,
        /// What is allowed.
        limit: usize,
    },
}

const FLAG_RESPONSE: u8 = 1;

impl Header {
    /// The 64 bytes, checksum included.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut out = BytesMut::with_capacity(HEADER_SIZE);
        out.put_u32_le(MAGIC);
        out.put_u8(VERSION);
        out.put_u8(if self.response { FLAG_RESPONSE } else { 0 });
        out.put_u16_le(self.kind.0);
        out.put_u64_le(self.request_id);
        out.put_u32_le(self.status);
        out.put_u32_le(self.head_length);
        out.put_u32_le(self.payload_length);
        out.put_u32_le(self.head_checksum);
        out.put_u32_le(self.deadline_ms);
        // Reserved for an access token's id and tag.
        out.put_bytes(0, 24);
        out.put_u32_le(crc32c::crc32c(&out));
        let mut header = [0; HEADER_SIZE];
        header.copy_from_slice(&out);
        header
    }

    /// Checks and reads a header.
    ///
    /// # Errors
    /// [`FrameError`]: what is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self, FrameError> {
        let [m0, m1, m2, m3, version, flags, k0, k1, rest @ ..] = *bytes;
        let magic = u32::from_le_bytes([m0, m1, m2, m3]);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let (covered, checksum) = bytes.split_at(HEADER_SIZE - 4);
        let found = u32_at(checksum, 0);
        let computed = crc32c::crc32c(covered);
        if found != computed {
            return Err(FrameError::HeaderChecksum { found, computed });
        }
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        if flags & !FLAG_RESPONSE != 0 {
            return Err(FrameError::Reserved("flag"));
        }
        let header = Self {
            kind: Kind(u16::from_le_bytes([k0, k1])),
            response: flags & FLAG_RESPONSE != 0,
            request_id: u64::from(u32_at(&rest, 0)) | u64::from(u32_at(&rest, 4)) << 32,
            status: u32_at(&rest, 8),
            head_length: u32_at(&rest, 12),
            payload_length: u32_at(&rest, 16),
            head_checksum: u32_at(&rest, 20),
            deadline_ms: u32_at(&rest, 24),
        };
        if rest.iter().skip(28).take(24).any(|b| *b != 0) {
            return Err(FrameError::Reserved("token field"));
        }
        header.check_lengths()?;
        Ok(header)
    }

    pub(crate) const fn check_lengths(&self) -> Result<(), FrameError> {
        let (head, payload) = (self.head_length, self.payload_length);
        if head as usize > HEAD_MAX {
            return Err(FrameError::TooLong { part: "head", length: head, limit: HEAD_MAX });
        }
        if payload as usize > PAYLOAD_MAX {
            return Err(FrameError::TooLong {
                part: "payload",
                length: payload,
                limit: PAYLOAD_MAX,
            });
        }
        Ok(())
    }

    /// Checks the head that came behind this header.
    ///
    /// # Errors
    /// [`FrameError::HeadChecksum`].
    pub fn check_head(&self, head: &Bytes) -> Result<(), FrameError> {
        let computed = crc32c::crc32c(head);
        if computed != self.head_checksum {
            return Err(FrameError::HeadChecksum { found: self.head_checksum, computed });
        }
        Ok(())
    }
}

/// Little-endian at `offset`; zero where `bytes` are too short, which fixed sizes exclude.
fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let quad = bytes.get(offset..offset + 4).and_then(|b| b.try_into().ok());
    quad.map_or(0, u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            kind: Kind(0x0101),
            response: true,
            request_id: 0x1122_3344_5566_7788,
            status: 3,
            head_length: 5,
            payload_length: 6,
            head_checksum: 7,
            deadline_ms: 8,
        }
    }

    #[test]
    fn decode_inverts_encode() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        for bit in 0..HEADER_SIZE * 8 {
            let mut bytes = header().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    fn resealed(change: impl FnOnce(&mut [u8; HEADER_SIZE])) -> [u8; HEADER_SIZE] {
        let mut bytes = header().encode();
        change(&mut bytes);
        let sum = crc32c::crc32c(&bytes[..HEADER_SIZE - 4]).to_le_bytes();
        bytes[HEADER_SIZE - 4..].copy_from_slice(&sum);
        bytes
    }

    #[test]
    fn every_other_version_flag_and_reserved_byte_is_refused_under_a_right_checksum() {
        let with = |at: usize, value: u8| Header::decode(&resealed(|b| b[at] = value));
        for value in 0..=u8::MAX {
            let version =
                if value == VERSION { Ok(header()) } else { Err(FrameError::Version(value)) };
            assert_eq!(with(4, value), version);
            let flags = match value {
                0 | 1 => Ok(Header { response: value == 1, ..header() }),
                _ => Err(FrameError::Reserved("flag")),
            };
            assert_eq!(with(5, value), flags);
        }
        for at in 36..60 {
            for bit in 0..8 {
                assert_eq!(with(at, 1 << bit), Err(FrameError::Reserved("token field")), "{at}");
            }
        }
    }

    #[test]
    fn lengths_are_refused_from_the_first_byte_too_many() {
        let with = |at: usize, value: usize| {
            let value = u32::try_from(value).unwrap();
            Header::decode(&resealed(|b| b[at..at + 4].copy_from_slice(&value.to_le_bytes())))
        };
        for (at, part, limit) in [(20, "head", HEAD_MAX), (24, "payload", PAYLOAD_MAX)] {
            for fits in [0, 1, limit - 1, limit] {
                assert!(with(at, fits).is_ok(), "{part} of {fits}");
            }
            for length in [limit + 1, limit * 2, u32::MAX as usize] {
                let found = u32::try_from(length).unwrap();
                let refused = FrameError::TooLong { part, length: found, limit };
                assert_eq!(with(at, length), Err(refused));
            }
        }
    }

    #[test]
    fn what_a_valid_checksum_does_not_excuse() {
        let decode = |change: fn(&mut [u8; HEADER_SIZE])| Header::decode(&resealed(change));
        assert_eq!(decode(|b| b[4] = 9), Err(FrameError::Version(9)));
        assert_eq!(decode(|b| b[5] = 2), Err(FrameError::Reserved("flag")));
        assert_eq!(decode(|b| b[40] = 1), Err(FrameError::Reserved("token field")));
        let long = decode(|b| b[20..24].copy_from_slice(&u32::MAX.to_le_bytes()));
        let limit = HEAD_MAX;
        assert_eq!(long, Err(FrameError::TooLong { part: "head", length: u32::MAX, limit }));
    }
}
