//! The embedded engine: RocksDB for durability, conflict detection in the process.
//!
//! One committer thread takes all waiting commits, checks them in order, writes them as one batch
//! with one WAL sync, and only then makes them visible and answers. Crash argument: a batch is
//! atomic in RocksDB's log, an answer is given after its sync, and nothing else is durable state;
//! so a reopened store holds every answered commit, perhaps some unanswered ones, each whole.
//! A failed write or sync fails the store for good: its process must end, the log be replayed.

use super::history::{History, KeyRange, Version};
use super::{
    Isolation, KEY_MAX_BYTES, Page, Scan, Store, TXN_MAX_AGE, TXN_MAX_BYTES, Txn, TxnError,
    VALUE_MAX_BYTES, add_le, key_after,
};
use bytes::Bytes;
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBRecoveryMode, Direction, IteratorMode, ReadOptions, WriteBatch,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Commits that may wait for the committer: above it, callers wait in turn.
const COMMIT_QUEUE: usize = 1024;
/// Commits of one batch: bounds the time to its sync.
const BATCH_MAX: usize = 256;
/// RocksDB memory: the whole process is meant to stay below 96 MiB.
const BLOCK_CACHE_BYTES: usize = 8 << 20;
const MEMTABLE_BYTES: usize = 8 << 20;

/// Databases that this process has open.
static OPEN: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

/// Waits until every database is closed, for at most `patience`; whether they are. A process that
/// ends before dies in RocksDB's static destructors, under the feet of its threads.
#[must_use]
pub fn wait_closed(patience: Duration) -> bool {
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    match CLOSED.wait_timeout_while(open, patience, |open| *open > 0) {
        Ok((open, _)) => *open == 0,
        Err(_) => false,
    }
}

fn count_open(change: fn(&mut usize)) {
    change(&mut OPEN.lock().unwrap_or_else(PoisonError::into_inner));
    CLOSED.notify_all();
}

/// See the module. Clones share one database, which closes with the last of them.
#[derive(Clone, Debug)]
pub struct Embedded {
    shared: Arc<Shared>,
    commits: mpsc::Sender<Commit>,
}

#[derive(Debug)]
struct Shared {
    db: DB,
    history: Mutex<History>,
}

impl Shared {
    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, why: &rocksdb::Error) -> TxnError {
        self.history().fail(why.to_string());
        TxnError::Failed(why.to_string())
    }

    /// The value of `key` at `version`. The history is asked last: see [`History::record`].
    fn get(&self, key: &[u8], version: Version) -> Result<Option<Bytes>, TxnError> {
        let newest = self.db.get(key).map_err(|e| self.fail(&e))?.map(Bytes::from);
        let history = self.history();
        history.check_failure()?;
        history.check_age(version)?;
        Ok(history.at(key, version).unwrap_or(newest))
    }

    fn scan(&self, scan: &Scan, version: Version) -> Result<Page, TxnError> {
        if scan.begin >= scan.end || scan.limit == 0 {
            return Ok(Page { pairs: Vec::new(), more: scan.limit == 0 });
        }
        // The iterator sees the database as it is here, so the history is asked after it.
        let mut newest = self.iterate(&scan.begin, &scan.end, scan.reverse).peekable();
        let mut older = {
            let history = self.history();
            history.check_failure()?;
            history.check_age(version)?;
            history.range_at(&scan.begin, &scan.end, version)
        };
        if scan.reverse {
            older.reverse();
        }
        let mut older = older.into_iter().peekable();
        let mut page = Page::default();
        loop {
            let take_older = match (newest.peek(), older.peek()) {
                (None, None) => return Ok(page),
                (None, Some(_)) | (Some(Err(_)), _) => older.peek().is_some(),
                (Some(Ok(_)), None) => false,
                (Some(Ok((new, _))), Some((old, _))) if scan.reverse => old[..] >= new[..],
                (Some(Ok((new, _))), Some((old, _))) => old[..] <= new[..],
            };
            let pair = if take_older {
                let Some((key, value)) = older.next() else { continue };
                newest.next_if(|n| n.as_ref().is_ok_and(|(k, _)| k[..] == key[..]));
                value.map(|value| (Bytes::from(key), value))
            } else {
                let Some(next) = newest.next() else { continue };
                let (key, value) = next.map_err(|e| self.fail(&e))?;
                Some((Bytes::from(key), Bytes::from(value)))
            };
            let Some(pair) = pair else { continue };
            if page.pairs.len() == scan.limit {
                page.more = true;
                return Ok(page);
            }
            page.pairs.push(pair);
        }
    }

    fn iterate(&self, begin: &[u8], end: &[u8], reverse: bool) -> rocksdb::DBIterator<'_> {
        let mut options = ReadOptions::default();
        options.set_iterate_lower_bound(begin);
        options.set_iterate_upper_bound(end);
        let mode =
            if reverse { IteratorMode::End } else { IteratorMode::From(begin, Direction::Forward) };
        self.db.iterator_opt(mode, options)
    }
}

impl Embedded {
    /// Opens or creates the store in `dir`.
    ///
    /// # Errors
    /// [`TxnError::Failed`] if RocksDB refuses: another process has it open, or it is damaged.
    pub fn open(dir: &Path) -> Result<Self, TxnError> {
        let failed = |e: &dyn std::fmt::Display| TxnError::Failed(e.to_string());
        let db = DB::open(&options(), dir).map_err(|e| failed(&e))?;
        let shared = Arc::new(Shared { db, history: Mutex::default() });
        let (commits, queue) = mpsc::channel(COMMIT_QUEUE);
        count_open(|open| *open += 1);
        let committer = Committer { shared: Arc::clone(&shared), version: 0 };
        std::thread::Builder::new()
            .name("commit".into())
            .spawn(move || {
                // Ends when nobody else holds the database, and closes it.
                committer.run(queue);
                count_open(|open| *open -= 1);
            })
            .map_err(|e| failed(&e))?;
        Ok(Self { shared, commits })
    }

    /// Why the store cannot go on, once it cannot.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.shared.history().check_failure().err().map(|e| e.to_string())
    }

    /// Commits since the store was opened.
    #[must_use]
    pub fn commit_count(&self) -> u64 {
        self.shared.history().committed()
    }

    #[cfg(test)]
    fn is_quiet(&self) -> bool {
        self.shared.history().is_empty()
    }
}

fn options() -> rocksdb::Options {
    let mut table = BlockBasedOptions::default();
    // Without memory for it RocksDB uses a cache of its own choice.
    if let Ok(cache) = Cache::new_lru_cache(BLOCK_CACHE_BYTES) {
        table.set_block_cache(&cache);
    }
    table.set_cache_index_and_filter_blocks(true);
    table.set_bloom_filter(10.0, false);
    let mut options = rocksdb::Options::default();
    options.create_if_missing(true);
    options.set_block_based_table_factory(&table);
    options.set_paranoid_checks(true);
    options.set_write_buffer_size(MEMTABLE_BYTES);
    options.set_max_write_buffer_number(2);
    options.set_max_total_wal_size(4 * MEMTABLE_BYTES as u64);
    options.set_max_open_files(64);
    options.set_max_background_jobs(2);
    options.set_keep_log_file_num(2);
    // A commit that was cut off at the end of the log was not synced, so nobody was told of it. A bad
    // one before the end was: then RocksDB refuses to open instead of forgetting it and all behind it.
    options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
    options
}

impl Store for Embedded {
    type Txn = EmbeddedTxn;

    async fn begin(&self) -> Result<EmbeddedTxn, TxnError> {
        let begun = Instant::now();
        let version = self.shared.history().begin(begun)?;
        Ok(EmbeddedTxn {
            reader: Reader { shared: Arc::clone(&self.shared), version, begun },
            commits: self.commits.clone(),
            changes: Changes::default(),
        })
    }
}

/// Keeps a version readable while it lives.
#[derive(Debug)]
struct Reader {
    shared: Arc<Shared>,
    version: Version,
    begun: Instant,
}

impl Reader {
    fn check_age(&self) -> Result<(), TxnError> {
        if self.begun.elapsed() > TXN_MAX_AGE { Err(TxnError::TooOld) } else { Ok(()) }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.history().end(self.version);
    }
}

#[derive(Clone, Debug)]
enum Write {
    Set(Bytes),
    Clear,
    Add(u64),
    /// A write conflict without a change.
    Touch,
}

/// What a transaction read and wants written. A write of a key lies above the cleared ranges.
#[derive(Debug, Default)]
struct Changes {
    reads: Vec<KeyRange>,
    writes: BTreeMap<Vec<u8>, Write>,
    cleared: Vec<KeyRange>,
}

impl Changes {
    fn is_cleared(&self, key: &[u8]) -> bool {
        self.cleared.iter().any(|(begin, end)| begin[..] <= *key && *key < end[..])
    }

    fn check_size(&self) -> Result<(), TxnError> {
        let check = |what, size, limit| {
            if size > limit { Err(TxnError::TooLarge { what, size, limit }) } else { Ok(()) }
        };
        let mut total = 0;
        for (key, write) in &self.writes {
            let value = if let Write::Set(value) = write { value.len() } else { 8 };
            check("key", key.len(), KEY_MAX_BYTES)?;
            check("value", value, VALUE_MAX_BYTES)?;
            total += key.len() + value;
        }
        total +=
            self.reads.iter().chain(&self.cleared).map(|(b, e)| b.len() + e.len()).sum::<usize>();
        check("transaction", total, TXN_MAX_BYTES)
    }
}

/// A page with own writes laid over it.
type Merged = BTreeMap<Vec<u8>, Bytes>;

/// A transaction of [`Embedded`].
#[derive(Debug)]
pub struct EmbeddedTxn {
    reader: Reader,
    commits: mpsc::Sender<Commit>,
    changes: Changes,
}

impl EmbeddedTxn {
    fn note_read(&mut self, begin: Vec<u8>, end: Vec<u8>, isolation: Isolation) {
        if isolation == Isolation::Serializable {
            self.changes.reads.push((begin, end));
        }
    }

    fn read(&mut self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>, TxnError> {
        self.reader.check_age()?;
        let own = self.changes.writes.get(key).cloned();
        match own {
            Some(Write::Set(value)) => return Ok(Some(value)),
            Some(Write::Clear) => return Ok(None),
            _ => {}
        }
        let stored = if self.changes.is_cleared(key) {
            None
        } else {
            self.note_read(key.to_vec(), key_after(key), isolation);
            self.reader.shared.get(key, self.reader.version)?
        };
        Ok(match own {
            Some(Write::Add(n)) => Some(Bytes::copy_from_slice(&add_le(stored.as_deref(), n))),
            _ => stored,
        })
    }

    /// One stored page with the own writes laid over the keys that it covers.
    fn page(&self, scan: &Scan) -> Result<(Merged, Option<Vec<u8>>), TxnError> {
        let stored = self.reader.shared.scan(scan, self.reader.version)?;
        let (mut begin, mut end) = (scan.begin.clone(), scan.end.clone());
        let mut rest = None;
        if let (true, Some((last, _))) = (stored.more, stored.pairs.last()) {
            if scan.reverse {
                begin = last.to_vec();
                rest = Some(begin.clone());
            } else {
                end = key_after(last);
                rest = Some(end.clone());
            }
        }
        let mut merged: BTreeMap<Vec<u8>, Bytes> = stored
            .pairs
            .into_iter()
            .filter(|(key, _)| !self.changes.is_cleared(key))
            .map(|(key, value)| (key.to_vec(), value))
            .collect();
        if begin < end {
            for (key, write) in self.changes.writes.range(begin..end) {
                match write {
                    Write::Set(value) => drop(merged.insert(key.clone(), value.clone())),
                    Write::Clear => drop(merged.remove(key)),
                    Write::Add(n) => {
                        let sum = add_le(merged.get(key).map(|v| &v[..]), *n);
                        merged.insert(key.clone(), Bytes::copy_from_slice(&sum));
                    }
                    Write::Touch => {}
                }
            }
        }
        Ok((merged, rest))
    }

    fn read_range(&mut self, scan: Scan) -> Result<Page, TxnError> {
        self.reader.check_age()?;
        let mut page = Page::default();
        let mut ask = scan.clone();
        // One more than asked for tells whether the limit ended the read.
        ask.limit = scan.limit.saturating_add(1);
        loop {
            let (merged, rest) = self.page(&ask)?;
            let pairs = merged.into_iter().map(|(key, value)| (Bytes::from(key), value));
            if scan.reverse {
                page.pairs.extend(pairs.rev());
            } else {
                page.pairs.extend(pairs);
            }
            match rest {
                Some(key) if page.pairs.len() <= scan.limit => {
                    *(if scan.reverse { &mut ask.end } else { &mut ask.begin }) = key;
                }
                _ => break,
            }
        }
        page.more = page.pairs.len() > scan.limit;
        page.pairs.truncate(scan.limit);
        let (mut begin, mut end) = (scan.begin, scan.end);
        if let (true, Some((last, _))) = (page.more, page.pairs.last()) {
            if scan.reverse {
                begin = last.to_vec();
            } else {
                end = key_after(last);
            }
        }
        self.note_read(begin, end, scan.isolation);
        Ok(page)
    }
}

impl Txn for EmbeddedTxn {
    async fn get(&mut self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>, TxnError> {
        self.read(key, isolation)
    }

    async fn scan(&mut self, scan: Scan) -> Result<Page, TxnError> {
        self.read_range(scan)
    }

    fn set(&mut self, key: &[u8], value: &[u8]) {
        self.changes.writes.insert(key.to_vec(), Write::Set(Bytes::copy_from_slice(value)));
    }

    fn clear(&mut self, key: &[u8]) {
        self.changes.writes.insert(key.to_vec(), Write::Clear);
    }

    fn clear_range(&mut self, begin: &[u8], end: &[u8]) {
        if begin < end {
            self.changes.writes.retain(|key, _| !(begin <= &key[..] && &key[..] < end));
            self.changes.cleared.push((begin.to_vec(), end.to_vec()));
        }
    }

    fn add(&mut self, key: &[u8], amount: u64) {
        let sum =
            |stored: Option<&[u8]>| Write::Set(Bytes::copy_from_slice(&add_le(stored, amount)));
        let write = match self.changes.writes.get(key) {
            Some(Write::Set(value)) => sum(Some(value)),
            Some(Write::Clear) => sum(None),
            Some(Write::Add(n)) => Write::Add(n.wrapping_add(amount)),
            Some(Write::Touch) | None if self.changes.is_cleared(key) => sum(None),
            Some(Write::Touch) | None => Write::Add(amount),
        };
        self.changes.writes.insert(key.to_vec(), write);
    }

    fn read_conflict(&mut self, key: &[u8]) {
        self.note_read(key.to_vec(), key_after(key), Isolation::Serializable);
    }

    fn write_conflict(&mut self, key: &[u8]) {
        self.changes.writes.entry(key.to_vec()).or_insert(Write::Touch);
    }

    async fn commit(self) -> Result<(), TxnError> {
        if self.changes.writes.is_empty() && self.changes.cleared.is_empty() {
            return Ok(());
        }
        self.changes.check_size()?;
        let (answer, result) = oneshot::channel();
        let commit = Commit { reader: self.reader, changes: self.changes, answer };
        let stopped = |_| TxnError::Failed("committer stopped".into());
        self.commits
            .send(commit)
            .await
            .map_err(|_| TxnError::Failed("committer stopped".into()))?;
        result.await.map_err(stopped)?
    }
}

#[derive(Debug)]
struct Commit {
    reader: Reader,
    changes: Changes,
    answer: oneshot::Sender<Result<(), TxnError>>,
}

type Values = BTreeMap<Vec<u8>, Option<Bytes>>;

/// The only writer of the database.
struct Committer {
    shared: Arc<Shared>,
    version: Version,
}

impl Committer {
    fn run(mut self, mut queue: mpsc::Receiver<Commit>) {
        let mut waiting = Vec::with_capacity(BATCH_MAX);
        while let Some(first) = queue.blocking_recv() {
            waiting.push(first);
            while waiting.len() < BATCH_MAX {
                match queue.try_recv() {
                    Ok(commit) => waiting.push(commit),
                    Err(_) => break,
                }
            }
            self.write_batch(&mut waiting);
        }
    }

    fn write_batch(&mut self, waiting: &mut Vec<Commit>) {
        let mut values = Values::new();
        let mut accepted = Vec::with_capacity(waiting.len());
        for commit in waiting.drain(..) {
            match self.accept(&commit, &mut values) {
                Ok(()) => accepted.push(commit.answer),
                Err(error) => drop(commit.answer.send(Err(error))),
            }
        }
        let result = self.make_durable(&values);
        if result.is_ok() {
            self.shared.history().publish(self.version, Instant::now());
        }
        for answer in accepted {
            // After a failed sync nobody knows what is on the disk.
            let result = result.clone().map_err(|_| TxnError::UnknownResult);
            // A caller that gave up asked for no answer.
            drop(answer.send(result));
        }
    }

    /// Checks one commit against all before it and adds its writes to the batch.
    fn accept(&mut self, commit: &Commit, values: &mut Values) -> Result<(), TxnError> {
        let Commit { reader, changes, .. } = commit;
        reader.check_age()?;
        {
            let history = self.shared.history();
            history.check_failure()?;
            history.check_age(reader.version)?;
            if history.conflicts(&changes.reads, reader.version) {
                return Err(TxnError::Conflict);
            }
        }
        let mut written = Values::new();
        let mut overwritten = Values::new();
        for (begin, end) in &changes.cleared {
            for (key, value) in self.present(begin, end, values)? {
                overwritten.entry(key.clone()).or_insert(Some(value));
                written.insert(key, None);
            }
        }
        for (key, write) in &changes.writes {
            let old = self.current(key, values)?;
            let base = written.get(key).cloned().unwrap_or_else(|| old.clone());
            overwritten.entry(key.clone()).or_insert(old);
            let new = match write {
                Write::Set(value) => Some(value.clone()),
                Write::Clear => None,
                Write::Add(n) => Some(Bytes::copy_from_slice(&add_le(base.as_deref(), *n))),
                Write::Touch => base,
            };
            written.insert(key.clone(), new);
        }
        values.append(&mut written);
        self.version += 1;
        self.shared.history().record(self.version, overwritten.into_iter().collect());
        Ok(())
    }

    fn current(&self, key: &[u8], values: &Values) -> Result<Option<Bytes>, TxnError> {
        match values.get(key) {
            Some(value) => Ok(value.clone()),
            None => Ok(self.shared.db.get(key).map_err(|e| self.shared.fail(&e))?.map(Bytes::from)),
        }
    }

    fn present(
        &self,
        begin: &[u8],
        end: &[u8],
        values: &Values,
    ) -> Result<BTreeMap<Vec<u8>, Bytes>, TxnError> {
        let mut found = BTreeMap::new();
        for pair in self.shared.iterate(begin, end, false) {
            let (key, value) = pair.map_err(|e| self.shared.fail(&e))?;
            found.insert(key.into_vec(), Bytes::from(value));
        }
        for (key, value) in values.range(begin.to_vec()..end.to_vec()) {
            match value {
                Some(value) => drop(found.insert(key.clone(), value.clone())),
                None => drop(found.remove(key)),
            }
        }
        Ok(found)
    }

    fn make_durable(&self, values: &Values) -> Result<(), TxnError> {
        if values.is_empty() {
            return Ok(());
        }
        self.shared.history().check_failure()?;
        let mut batch = WriteBatch::default();
        for (key, value) in values {
            match value {
                Some(value) => batch.put(key, value),
                None => batch.delete(key),
            }
        }
        let mut options = rocksdb::WriteOptions::default();
        options.set_sync(true);
        self.shared.db.write_opt(batch, &options).map_err(|e| self.shared.fail(&e))
    }
}

#[cfg(test)]
mod tests;
