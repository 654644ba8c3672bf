//! Every way a request may fail, with the one thing a client should do about it.

use bytes::Bytes;

use crate::codec::{DecodeError, Wire};
use crate::wire_struct;

/// What a client does after a failure. It obeys this and reads no message text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The request can never succeed as it is.
    Never,
    /// The same request may go to the same server again.
    Backoff,
    /// Fetch the routing table, then try again.
    RefreshRouting,
    /// Another replica may answer at once.
    OtherReplica,
    /// Read at the tail of the chain.
    AtTail,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $retry:ident;)*) => {
        /// The kind of a failure. Numbers are frozen.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code {
            $($(#[$doc])* $name,)*
        }

        impl Code {
            /// Every code.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The number on the wire, never 0.
            #[must_use]
            pub const fn number(self) -> u32 {
                match self { $(Self::$name => $number,)* }
            }

            /// The code of a number on the wire; [`Code::Internal`] for one that a newer peer
            /// sent.
            #[must_use]
            pub const fn from_number(number: u32) -> Self {
                match number { $($number => Self::$name,)* _ => Self::Internal }
            }

            /// What a client does about it.
            #[must_use]
            pub const fn retry(self) -> Retry {
                match self { $(Self::$name => Retry::$retry,)* }
            }
        }
    };
}

codes! {
    /// A defect, or a failure that nobody named: the message says more.
    Internal = 1, Backoff;
    /// The server does not know this kind of request.
    UnknownKind = 2, Never;
    /// The request's fields contradict each other or their limits.
    InvalidRequest = 3, Never;
    /// Bytes were damaged between the two ends.
    ChecksumMismatch = 4, Backoff;
    /// The server is overloaded; nothing was done.
    Busy = 5, Backoff;
    /// The server is shutting down.
    Draining = 6, OtherReplica;
    /// No connection, or it broke before the answer: the request may have been carried out.
    Unreachable = 7, OtherReplica;
    /// No answer in time: the request may have been carried out.
    Timeout = 8, OtherReplica;
    /// The caller belongs to another cluster.
    WrongCluster = 9, Never;

    /// The chain has another version than the caller thinks; `detail` is the server's.
    StaleChain = 20, RefreshRouting;
    /// The target does not serve this chain.
    NotServing = 21, RefreshRouting;
    /// The target's lease has run out.
    NoLease = 22, OtherReplica;
    /// An update is pending: `detail` is its version.
    Dirty = 23, AtTail;
    /// The stored bytes do not match their checksum here.
    CorruptChunk = 24, OtherReplica;
    /// The disk is full.
    NoSpace = 25, Never;
    /// The disk failed.
    DiskFailed = 26, OtherReplica;
    /// The target is not the head of the chain.
    NotHead = 27, RefreshRouting;
    /// A newer truncation came first: of an update that was made without knowing of it, or of that
    /// truncation's own cut, sent again.
    StaleTruncate = 28, Never;
    /// The update's lane has moved on: this update is older than the last one applied.
    StaleUpdate = 29, Never;
    /// An update is under way in this chunk; nothing was done.
    ChunkBusy = 30, Backoff;
    /// The chain has no serving target.
    ChainUnavailable = 31, RefreshRouting;
    /// A forward came out of order: the target holds another version; `detail` is its own.
    VersionGap = 32, RefreshRouting;
    /// The syncing target needs the whole chunk; only neighbours in a chain see this.
    NeedWhole = 33, Backoff;
    /// Two replicas hold different bytes under one version: writes to the chunk stop, a human
    /// must look. `detail` is the version.
    DivergedChunk = 34, Backoff;
    /// The sender has been heard since it gave up a message, and this one is from before: it sends
    /// it again; only neighbours in a chain see this.
    LateMessage = 35, Backoff;

    /// No such file or directory.
    NotFound = 50, Never;
    /// The name exists.
    Exists = 51, Never;
    /// The directory is not empty.
    NotEmpty = 52, Never;
    /// A directory was needed.
    NotDirectory = 53, Never;
    /// Something else than a directory was needed.
    IsDirectory = 54, Never;
    /// The name is empty, too long, `.`, `..`, or holds `/` or NUL.
    InvalidName = 55, Never;
    /// Not allowed for this caller.
    PermissionDenied = 56, Never;
    /// The rename would make a directory its own descendant.
    WouldLoop = 57, Never;
    /// The session of an open file has ended.
    SessionEnded = 58, Never;
    /// No chain table has been declared yet: files cannot be laid out.
    NoChainTable = 59, Backoff;
    /// The transaction met another one; it was tried again as often as allowed.
    Conflict = 60, Backoff;
    /// The name is longer than 255 bytes.
    NameTooLong = 61, Never;
    /// Reading or writing past what the file system can address.
    TooLarge = 62, Never;
}

/// A failed request, as it goes over the wire.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code:?}: {message}")]
pub struct Error {
    /// The kind of the failure.
    pub code: Code,
    /// A number that some codes define, else 0.
    pub detail: u64,
    /// For humans: what was being done to which object.
    pub message: String,
}

wire_struct! {
    /// The head of a failed answer.
    pub struct ErrorBody {
        /// See [`Error::detail`].
        pub detail: u64,
        /// See [`Error::message`].
        pub message: String,
    }
}

impl Error {
    /// A failure without a detail.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, detail: 0, message: message.into() }
    }

    /// The same failure with the number that its code defines.
    #[must_use]
    pub const fn with_detail(mut self, detail: u64) -> Self {
        self.detail = detail;
        self
    }

    /// The head that carries it.
    #[must_use]
    pub fn to_head(&self) -> Bytes {
        ErrorBody { detail: self.detail, message: self.message.clone() }.to_bytes()
    }

    /// Reads a failed answer. A head that cannot be read leaves the code.
    #[must_use]
    pub fn from_head(status: u32, head: Bytes) -> Self {
        let code = Code::from_number(status);
        match ErrorBody::from_bytes(head) {
            Ok(body) => Self { code, detail: body.detail, message: body.message },
            Err(error) => Self::new(code, format!("status {status}, {error}")),
        }
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::new(Code::InvalidRequest, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_distinct_and_read_back() {
        let mut numbers: Vec<u32> = Code::ALL.iter().map(|c| c.number()).collect();
        assert!(Code::ALL.iter().all(|c| Code::from_number(c.number()) == *c));
        assert!(!numbers.contains(&0));
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), Code::ALL.len());
        assert_eq!(Code::from_number(9_999), Code::Internal);
    }

    #[test]
    fn an_error_survives_the_wire() {
        let error = Error::new(Code::StaleChain, "chain 3 is at version 8").with_detail(8);
        assert_eq!(Error::from_head(error.code.number(), error.to_head()), error);
    }
}
