//! The one seam to the key-value store. Its semantics are FoundationDB's, so that the embedded
//! engine and a FoundationDB cluster can stand behind the same operations: a transaction reads one
//! version of the store, its own writes on top, and commits only if nothing that it read (in
//! serializable isolation) was written since. Ranges count as read from their begin to the last
//! key returned, or to their end: a key inserted there is a conflict too.

#[cfg(test)]
pub(crate) mod conformance;
pub mod embedded;
mod history;
#[cfg(test)]
pub(crate) mod unsure;

use bytes::Bytes;

/// Longest key in bytes.
pub const KEY_MAX_BYTES: usize = 10_000;
/// Longest value in bytes.
pub const VALUE_MAX_BYTES: usize = 100_000;
/// Most bytes of keys, values and conflict ranges in one transaction.
pub const TXN_MAX_BYTES: usize = 10_000_000;
/// Longest life of a transaction: a later read or commit is [`TxnError::TooOld`].
pub const TXN_MAX_AGE: std::time::Duration = std::time::Duration::from_secs(5);

/// Why a transaction did not, or perhaps did not, take effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TxnError {
    /// Something that was read has been written since. Nothing was changed: run it again.
    #[error("transaction conflicts with a later commit")]
    Conflict,
    /// The transaction outlived [`TXN_MAX_AGE`]. Nothing was changed: run it again.
    #[error("transaction is too old")]
    TooOld,
    /// The commit may have taken effect or not, now or later.
    #[error("commit result is unknown")]
    UnknownResult,
    /// A key, a value or the whole transaction is over its limit.
    #[error("{what} of {size} bytes is over the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The store cannot go on: its process must end.
    #[error("store failed: {0}")]
    Failed(String),
}

impl TxnError {
    /// Whether the same operation may be run again in a new transaction. After
    /// [`TxnError::UnknownResult`] that is right only for an operation that recognises itself.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Conflict | Self::TooOld | Self::UnknownResult)
    }
}

/// Whether a read takes part in conflict detection. Both see the same version and own writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// The commit fails if what was read has changed.
    Serializable,
    /// It does not.
    Snapshot,
}

/// What part of the key space a range read asks for.
#[derive(Clone, Debug)]
pub struct Scan {
    /// First key, included.
    pub begin: Vec<u8>,
    /// Last key, excluded.
    pub end: Vec<u8>,
    /// Most pairs returned, at least 1.
    pub limit: usize,
    /// From the end towards the begin.
    pub reverse: bool,
    /// Whether the range counts as read.
    pub isolation: Isolation,
}

impl Scan {
    /// The first `limit` pairs of `begin..end`, serializable.
    #[must_use]
    pub const fn new(begin: Vec<u8>, end: Vec<u8>, limit: usize) -> Self {
        Self { begin, end, limit, reverse: false, isolation: Isolation::Serializable }
    }

    /// The same in snapshot isolation.
    #[must_use]
    pub const fn snapshot(mut self) -> Self {
        self.isolation = Isolation::Snapshot;
        self
    }
}

/// Pairs of a range read, in its direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Key and value.
    pub pairs: Vec<(Bytes, Bytes)>,
    /// Whether the limit, not the range, ended the read.
    pub more: bool,
}

/// A store that transactions run on.
pub trait Store: Clone + Send + Sync + 'static {
    /// Its transactions.
    type Txn: Txn;

    /// Starts a transaction at the newest committed version.
    fn begin(&self) -> impl Future<Output = Result<Self::Txn, TxnError>> + Send;
}

/// One transaction. Writes are kept until [`Txn::commit`]; dropping it changes nothing.
pub trait Txn: Send {
    /// The value of `key`.
    fn get(
        &mut self,
        key: &[u8],
        isolation: Isolation,
    ) -> impl Future<Output = Result<Option<Bytes>, TxnError>> + Send;

    /// The pairs of a range.
    fn scan(&mut self, scan: Scan) -> impl Future<Output = Result<Page, TxnError>> + Send;

    /// Writes a value.
    fn set(&mut self, key: &[u8], value: &[u8]);

    /// Removes a key, if it is there.
    fn clear(&mut self, key: &[u8]);

    /// Removes every key of `begin..end` that is there at the commit.
    fn clear_range(&mut self, begin: &[u8], end: &[u8]);

    /// Adds to a little-endian `u64`, wrapping; a missing value counts as 0. Not a read.
    fn add(&mut self, key: &[u8], amount: u64);

    /// Counts `key` as read.
    fn read_conflict(&mut self, key: &[u8]);

    /// Counts `key` as written, though its value stays.
    fn write_conflict(&mut self, key: &[u8]);

    /// Makes the writes durable and visible, all or none.
    fn commit(self) -> impl Future<Output = Result<(), TxnError>> + Send;
}

/// The key after every key that starts with `prefix`; `None` if there is none.
#[must_use]
pub fn prefix_end(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|b| *b != u8::MAX)?;
    let mut end = prefix.get(..=last)?.to_vec();
    if let Some(byte) = end.last_mut() {
        *byte += 1;
    }
    Some(end)
}

/// The first key after `key`.
#[must_use]
pub fn key_after(key: &[u8]) -> Vec<u8> {
    let mut after = Vec::with_capacity(key.len() + 1);
    after.extend_from_slice(key);
    after.push(0);
    after
}

/// Adds to a stored counter: shorter values are padded, longer ones cut to eight bytes.
fn add_le(stored: Option<&[u8]>, amount: u64) -> [u8; 8] {
    let mut raw = [0u8; 8];
    for (to, from) in raw.iter_mut().zip(stored.unwrap_or_default()) {
        *to = *from;
    }
    u64::from_le_bytes(raw).wrapping_add(amount).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_end_is_the_next_key_of_another_prefix() {
        assert_eq!(prefix_end(b"INOD"), Some(b"INOE".to_vec()));
        assert_eq!(prefix_end(&[1, 255, 255]), Some(vec![2]));
        assert_eq!(prefix_end(&[255, 255]), None);
    }

    #[test]
    fn a_counter_of_another_width_is_padded_or_cut() {
        assert_eq!(add_le(None, 7), 7u64.to_le_bytes());
        assert_eq!(add_le(Some(&[1, 1]), 1), 258u64.to_le_bytes());
        assert_eq!(add_le(Some(&[255; 9]), 2), 1u64.to_le_bytes());
    }
}
