//! What recent commits overwrote. One structure answers two questions: the value of a key at an
//! older version (the database itself holds only the newest), and whether a key or range was
//! written after a version (a conflict). Entries go when no live transaction is older than them.

use super::{TXN_MAX_AGE, TxnError};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::time::Instant;

/// Counts commits of this process.
pub(super) type Version = u64;

/// A range of keys, end excluded.
pub(super) type KeyRange = (Vec<u8>, Vec<u8>);

#[derive(Debug, Default)]
struct Readers {
    count: usize,
    newest: Option<Instant>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct History {
    committed: Version,
    /// Transactions that read below this version are too old.
    oldest: Version,
    /// By key, oldest first: before the commit `version`, the value was this.
    before: BTreeMap<Vec<u8>, VecDeque<(Version, Option<Bytes>)>>,
    log: VecDeque<(Version, Vec<Vec<u8>>)>,
    live: BTreeMap<Version, Readers>,
    failure: Option<String>,
}

impl History {
    /// Registers a transaction that starts now; its read version.
    pub(super) fn begin(&mut self, now: Instant) -> Result<Version, TxnError> {
        self.check_failure()?;
        let readers = self.live.entry(self.committed).or_default();
        readers.count += 1;
        readers.newest = Some(now);
        Ok(self.committed)
    }

    /// The counterpart of [`History::begin`].
    pub(super) fn end(&mut self, version: Version) {
        if let Some(readers) = self.live.get_mut(&version) {
            readers.count -= 1;
            if readers.count == 0 {
                self.live.remove(&version);
            }
        }
    }

    pub(super) fn check_failure(&self) -> Result<(), TxnError> {
        self.failure.clone().map_or(Ok(()), |why| Err(TxnError::Failed(why)))
    }

    pub(super) fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    pub(super) const fn check_age(&self, version: Version) -> Result<(), TxnError> {
        if version < self.oldest { Err(TxnError::TooOld) } else { Ok(()) }
    }

    /// What `key` held at `version`, if it was written since: `Some(None)` is "absent then".
    pub(super) fn at(&self, key: &[u8], version: Version) -> Option<Option<Bytes>> {
        self.before.get(key).and_then(|entries| first_after(entries, version))
    }

    /// The same for each key of a range, in key order.
    pub(super) fn range_at(
        &self,
        begin: &[u8],
        end: &[u8],
        version: Version,
    ) -> Vec<(Vec<u8>, Option<Bytes>)> {
        if begin >= end {
            return Vec::new();
        }
        let bounds = (Bound::Included(begin), Bound::Excluded(end));
        let keys = self.before.range::<[u8], _>(bounds);
        keys.filter_map(|(key, entries)| Some((key.clone(), first_after(entries, version)?)))
            .collect()
    }

    /// Whether any of `ranges` was written after `version`.
    pub(super) fn conflicts(&self, ranges: &[KeyRange], version: Version) -> bool {
        ranges.iter().filter(|(begin, end)| begin < end).any(|(begin, end)| {
            let bounds = (Bound::Included(begin.as_slice()), Bound::Excluded(end.as_slice()));
            self.before
                .range::<[u8], _>(bounds)
                .any(|(_, entries)| entries.back().is_some_and(|(v, _)| *v > version))
        })
    }

    /// Records what the coming commit `version` overwrites. Before the database is written, so
    /// that a reader who sees the new value there also finds the old one here.
    pub(super) fn record(&mut self, version: Version, overwritten: Vec<(Vec<u8>, Option<Bytes>)>) {
        assert!(version > self.committed, "versions grow");
        let keys = overwritten.iter().map(|(key, _)| key.clone()).collect();
        for (key, value) in overwritten {
            self.before.entry(key).or_default().push_back((version, value));
        }
        self.log.push_back((version, keys));
    }

    /// Makes everything up to `version` visible and forgets what no live transaction can ask for.
    pub(super) fn publish(&mut self, version: Version, now: Instant) {
        self.committed = version;
        while let Some(entry) = self.live.first_entry() {
            let newest = entry.get().newest;
            if newest.is_none_or(|t| now.saturating_duration_since(t) <= TXN_MAX_AGE) {
                break;
            }
            entry.remove();
        }
        self.oldest = self.live.keys().next().copied().unwrap_or(version).max(self.oldest);
        while let Some((logged, _)) = self.log.front() {
            if *logged > self.oldest {
                break;
            }
            let Some((logged, keys)) = self.log.pop_front() else { break };
            keys.iter().for_each(|key| self.forget(key, logged));
        }
    }

    fn forget(&mut self, key: &[u8], version: Version) {
        let Some(entries) = self.before.get_mut(key) else { return };
        while entries.front().is_some_and(|(v, _)| *v <= version) {
            entries.pop_front();
        }
        if entries.is_empty() {
            self.before.remove(key);
        }
    }

    pub(super) const fn committed(&self) -> Version {
        self.committed
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.before.is_empty() && self.log.is_empty() && self.live.is_empty()
    }
}

fn first_after(
    entries: &VecDeque<(Version, Option<Bytes>)>,
    version: Version,
) -> Option<Option<Bytes>> {
    let at = entries.partition_point(|(v, _)| *v <= version);
    entries.get(at).map(|(_, value)| value.clone())
}
