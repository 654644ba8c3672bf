//! The ABI of the native ring, byte for byte. Everything is little-endian; reserved bytes are zero and checked.
//!
//! **Control**: a unix stream socket. The client sends one [`Control`] (64 bytes, then `length` bytes of payload,
//! descriptors on the first byte) and waits for one answer of the same form before it sends the next. The queues go on
//! meanwhile, however long the answer takes.
//!
//! | kind | request | answer |
//! |---|---|---|
//! | 1 hello | `value` = entries wanted | `value` = entries; descriptors: queue memfd, submission doorbell, completion doorbell |
//! | 2 register | descriptor: sealed memfd | `id` = iov |
//! | 3 unregister | `id` = iov | |
//! | 4 open | `flags`; payload = absolute path as the application sees it | `id` = file, `value` = size in bytes |
//! | 5 close | `id` = file | `status` also tells a failed write-back |
//! | 6 stat | `id` = file | `value` = size in bytes |
//!
//! `status` of an answer is 0 or a negative errno.
//!
//! **Queues**: in the queue memfd, submissions at 0, completions at [`completions_at`]; see [`crate::queue`]. A client has at
//! most `entries` submissions without a completion that it took: so completions always fit, and a server may hang up on
//! who breaks this.
//!
//! ```text
//! submission  +0 u8 op, u8[3] zero, u32 file   +8 u32 iov, u32 length   +16 u64 offset in the iov
//!             +24 u64 offset in the file       +32 u64 user data        +40 zero
//! completion  +0 u64 user data                 +8 i64 bytes or -errno   +16 zero
//! ```

use crate::queue::{ENTRIES_MAX, Entry, queue_bytes};

/// `LMPR` in the order of the bytes.
pub const MAGIC: u32 = u32::from_le_bytes(*b"LMPR");
/// The one version so far, carried by hello in `flags`.
pub const VERSION: u32 = 1;
/// Size of a control message without its payload.
pub const CONTROL_BYTES: usize = 64;
/// Most bytes of a path.
pub const PATH_MAX: usize = 4096;
/// Most entries that a server grants.
pub const GRANT_MAX: u32 = 256;
/// Most bytes of one read or write.
pub const LENGTH_MAX: u32 = 4 << 20;

/// Flag of open: the file will be written.
pub const OPEN_WRITE: u32 = 1;
/// Flag of open: a missing file is made.
pub const OPEN_CREATE: u32 = 2;

/// Where the completion queue begins.
#[must_use]
pub const fn completions_at(entries: u32) -> usize {
    queue_bytes(entries)
}

/// Size of the queue memfd.
#[must_use]
pub const fn region_bytes(entries: u32) -> usize {
    2 * queue_bytes(entries)
}

/// Whether a queue can have this many entries.
#[must_use]
pub const fn is_valid_entries(entries: u32) -> bool {
    entries.is_power_of_two() && entries <= GRANT_MAX && entries <= ENTRIES_MAX
}

/// Why bytes are not a message of this ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Not our protocol.
    #[error("magic is {0:#010x}, not LMPR")]
    Magic(u32),
    /// A field has no such value.
    #[error("{field} has no value {value}")]
    Value {
        /// The field.
        field: &'static str,
        /// What it held.
        value: u64,
    },
    /// A byte that must be zero is not.
    #[error("reserved bytes are not zero")]
    Reserved,
}

/// What a control message asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ControlKind {
    /// The first message.
    Hello = 1,
    /// Shares memory.
    Register = 2,
    /// Ends sharing it.
    Unregister = 3,
    /// Opens a file.
    Open = 4,
    /// Closes it.
    Close = 5,
    /// Asks for its size.
    Stat = 6,
}

impl ControlKind {
    const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Register,
            3 => Self::Unregister,
            4 => Self::Open,
            5 => Self::Close,
            6 => Self::Stat,
            _ => return None,
        })
    }
}

/// A control message without its payload: magic, kind, status, flags, id, length, value, then zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// What it asks or answers.
    pub kind: ControlKind,
    /// 0, or a negative errno in an answer.
    pub status: i32,
    /// See the table.
    pub flags: u32,
    /// A file or an iov.
    pub id: u32,
    /// Bytes of payload that follow.
    pub length: u32,
    /// See the table.
    pub value: u64,
}

impl Control {
    /// A message with zeros in the other fields.
    #[must_use]
    pub const fn new(kind: ControlKind) -> Self {
        Self { kind, status: 0, flags: 0, id: 0, length: 0, value: 0 }
    }

    /// The 64 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; CONTROL_BYTES] {
        let mut out = [0; CONTROL_BYTES];
        let fields = [
            MAGIC,
            self.kind as u32,
            self.status.cast_unsigned(),
            self.flags,
            self.id,
            self.length,
        ];
        let words =
            fields.iter().flat_map(|field| field.to_le_bytes()).chain(self.value.to_le_bytes());
        for (to, byte) in out.iter_mut().zip(words) {
            *to = byte;
        }
        out
    }

    /// Checks and reads a message.
    ///
    /// # Errors
    /// [`LayoutError`]: the stream is of no more use.
    pub fn decode(bytes: &[u8; CONTROL_BYTES]) -> Result<Self, LayoutError> {
        let field = |index: usize| {
            let quad = bytes.get(index * 4..index * 4 + 4).and_then(|quad| quad.try_into().ok());
            quad.map_or(0, u32::from_le_bytes)
        };
        if field(0) != MAGIC {
            return Err(LayoutError::Magic(field(0)));
        }
        let unknown = LayoutError::Value { field: "kind", value: field(1).into() };
        let kind = ControlKind::from_number(field(1)).ok_or(unknown)?;
        let length = field(5);
        if length as usize > PATH_MAX {
            return Err(LayoutError::Value { field: "length", value: length.into() });
        }
        if bytes.iter().skip(32).any(|byte| *byte != 0) {
            return Err(LayoutError::Reserved);
        }
        let value = u64::from(field(6)) | u64::from(field(7)) << 32;
        let status = field(2).cast_signed();
        Ok(Self { kind, status, flags: field(3), id: field(4), length, value })
    }
}

/// What a submission does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// From the file into the iov.
    Read = 1,
    /// From the iov into the file; durable after a sync.
    Write = 2,
    /// Makes what was written before durable and visible to others.
    Sync = 3,
}

/// A submission, validated as far as it can be without knowing the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// What to do.
    pub op: Op,
    /// The file.
    pub file: u32,
    /// The iov; ignored by sync.
    pub iov: u32,
    /// Bytes, at most [`LENGTH_MAX`].
    pub length: u32,
    /// First byte in the iov.
    pub iov_offset: u64,
    /// First byte in the file.
    pub file_offset: u64,
    /// Comes back with the completion.
    pub user_data: u64,
}

impl Submission {
    /// The entry.
    #[must_use]
    pub const fn encode(&self) -> Entry {
        let op = self.op as u64 | (self.file as u64) << 32;
        let iov = self.iov as u64 | (self.length as u64) << 32;
        [op, iov, self.iov_offset, self.file_offset, self.user_data, 0, 0, 0]
    }

    /// Checks and reads a copy of an entry.
    ///
    /// # Errors
    /// [`LayoutError`]; the entry's user data still names it.
    pub fn decode(entry: &Entry) -> Result<Self, LayoutError> {
        let [op, iov, iov_offset, file_offset, user_data, rest @ ..] = *entry;
        let number = low(op);
        let op = match number {
            1 => Op::Read,
            2 => Op::Write,
            3 => Op::Sync,
            _ => return Err(LayoutError::Value { field: "op", value: number.into() }),
        };
        if rest != [0; 3] {
            return Err(LayoutError::Reserved);
        }
        let length = high(iov);
        if length > LENGTH_MAX {
            return Err(LayoutError::Value { field: "length", value: length.into() });
        }
        let end = file_offset.checked_add(length.into()).and_then(|end| i64::try_from(end).ok());
        if end.is_none() {
            return Err(LayoutError::Value { field: "file offset", value: file_offset });
        }
        let file = high(entry.first().copied().unwrap_or(0));
        Ok(Self { op, file, iov: low(iov), length, iov_offset, file_offset, user_data })
    }
}

/// What came of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The submission's.
    pub user_data: u64,
    /// Bytes done, or a negative errno.
    pub result: i64,
}

impl Completion {
    /// The entry.
    #[must_use]
    pub const fn encode(&self) -> Entry {
        [self.user_data, self.result.cast_unsigned(), 0, 0, 0, 0, 0, 0]
    }

    /// Reads a copy of an entry.
    #[must_use]
    pub const fn decode(entry: &Entry) -> Self {
        let [user_data, result, ..] = *entry;
        Self { user_data, result: result.cast_signed() }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the lower half")]
const fn low(word: u64) -> u32 {
    word as u32
}

#[allow(clippy::cast_possible_truncation, reason = "the upper half")]
const fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Decodes arbitrary bytes as each message of this ABI, for fuzzing: panics only if a decoder is wrong.
pub fn fuzz_layout(bytes: &[u8]) {
    if let Some(control) = bytes.first_chunk::<CONTROL_BYTES>() {
        if let Ok(message) = Control::decode(control) {
            assert_eq!(message.encode(), *control, "a control message reads back");
        }
        let mut entry: Entry = [0; 8];
        for (word, quad) in entry.iter_mut().zip(control.chunks_exact(8)) {
            *word = quad.try_into().map_or(0, u64::from_le_bytes);
        }
        if let Ok(submission) = Submission::decode(&entry) {
            assert!(submission.length <= LENGTH_MAX, "length is bounded");
            assert_eq!(submission.encode(), entry, "a submission reads back");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn submission() -> Submission {
        Submission {
            op: Op::Write,
            file: 3,
            iov: 5,
            length: 4096,
            iov_offset: 8192,
            file_offset: 1 << 33,
            user_data: u64::MAX,
        }
    }

    #[test]
    fn the_abi_is_frozen() {
        let words = [0x3_0000_0002, 0x1000_0000_0005, 8192, 1 << 33, u64::MAX, 0, 0, 0];
        assert_eq!(submission().encode(), words);
        assert_eq!(Submission::decode(&words), Ok(submission()));
        let control = Control { flags: 3, length: 9, value: 7, ..Control::new(ControlKind::Open) };
        let hex: String = control.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        let start = "4c4d5052040000000000000003000000000000000900000007000000000000000000";
        assert_eq!(hex[..start.len()], *start);
        assert_eq!(region_bytes(4), 2 * (192 + 4 * 64));
    }

    #[test]
    fn lies_are_refused_by_name() {
        let decode = |change: fn(&mut Entry)| {
            let mut entry = submission().encode();
            change(&mut entry);
            Submission::decode(&entry)
        };
        assert!(matches!(decode(|e| e[0] = 9), Err(LayoutError::Value { field: "op", value: 9 })));
        assert!(decode(|e| e[0] |= 0x100).is_err());
        assert!(decode(|e| e[1] = u64::MAX).is_err());
        assert!(decode(|e| e[3] = u64::MAX).is_err());
        assert_eq!(decode(|e| e[7] = 1), Err(LayoutError::Reserved));
    }

    proptest! {
        #[test]
        fn decoders_invert_encoders(bytes in prop::collection::vec(any::<u8>(), 64)) {
            fuzz_layout(&bytes);
        }

        #[test]
        fn completions_read_back(user_data: u64, result: i64) {
            let completion = Completion { user_data, result };
            prop_assert_eq!(Completion::decode(&completion.encode()), completion);
        }
    }

    #[test]
    fn mutated_messages_never_panic() {
        let entry = submission().encode().map(u64::to_le_bytes).concat();
        let good = [entry, Control::new(ControlKind::Open).encode().to_vec()];
        rpc::fuzz::run(|random| {
            let mut bytes = good[random.below(good.len())].clone();
            let donor = &good[random.below(good.len())];
            random.mutate(&mut bytes, donor);
            // Most mutations keep the length, which must be right to get anywhere.
            bytes.resize(64, 0);
            fuzz_layout(&bytes);
        });
    }
}
