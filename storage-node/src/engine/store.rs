//! The metadata store: RocksDB, opened small, and typed look-ups in it.

use std::path::Path;

use chain::id::{ChunkId, InodeId, TargetId};
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, DBRecoveryMode, Direction, IteratorMode,
    LogLevel, Options, ReadOptions, Snapshot,
};

use super::alloc::Block;
use super::record::{self, BlockRecord, ChunkRecord, Outline};
use super::types::{Error, FileView, Place};

/// Write buffers and block cache are small: a storage server has 128 MiB for all its disks, and
/// the kernel caches metadata files besides.
const WRITE_BUFFER_BYTES: usize = 8 << 20;
const CACHE_BYTES: usize = 8 << 20;
const MAX_LOG_BYTES: u64 = 32 << 20;
const MAX_OPEN_FILES: i32 = 64;

/// A chunk's records.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) committed: Option<ChunkRecord>,
    pub(super) pending: Option<ChunkRecord>,
}

pub(super) fn options(may_create: bool) -> Options {
    let mut table = BlockBasedOptions::default();
    // Without memory for it RocksDB uses a cache of its own choice.
    if let Ok(cache) = Cache::new_lru_cache(CACHE_BYTES) {
        table.set_block_cache(&cache);
    }
    table.set_bloom_filter(10.0, false);
    table.set_cache_index_and_filter_blocks(true);
    let mut options = Options::default();
    options.create_if_missing(may_create);
    options.set_block_based_table_factory(&table);
    options.set_compression_type(DBCompressionType::None);
    options.set_write_buffer_size(WRITE_BUFFER_BYTES);
    options.set_max_write_buffer_number(2);
    options.set_max_total_wal_size(MAX_LOG_BYTES);
    options.set_max_open_files(MAX_OPEN_FILES);
    options.set_max_background_jobs(2);
    options.set_paranoid_checks(true);
    options.set_keep_log_file_num(2);
    options.set_max_log_file_size(1 << 20);
    options.set_log_level(LogLevel::Warn);
    // A record that was cut off at the end of the log was not synced, so nobody was told of it.
    // A bad one before the end was: then RocksDB refuses to open instead of forgetting it.
    options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
    options
}

pub(super) fn open(path: &Path, may_create: bool) -> Result<DB, rocksdb::Error> {
    DB::open(&options(may_create), path)
}

/// Both records of a chunk, as of the moment of `view`.
pub(super) fn chunk(view: &Snapshot<'_>, place: Place) -> Result<Records, Error> {
    let keys = [record::committed_key(place), record::pending_key(place)];
    let mut values = view.multi_get(&keys).into_iter().zip(&keys).map(|(value, key)| {
        let value = value.map_err(|e| corrupt(place, e.as_ref()))?;
        value.map(|v| ChunkRecord::decode(key, &v).map_err(|e| corrupt(place, e))).transpose()
    });
    let committed = values.next().transpose()?.flatten();
    Ok(Records { committed, pending: values.next().transpose()?.flatten() })
}

/// The record of a block that a chunk's record names. Without the chunk's lock both must come from
/// one view: a commit in between takes the old blocks' records away.
pub(super) fn block(view: &Snapshot<'_>, place: Place, block: Block) -> Result<BlockRecord, Error> {
    let key = record::block_key(block);
    let value = view.get_pinned(&key).map_err(|e| corrupt(place, e.as_ref()))?;
    let value = value.ok_or_else(|| corrupt(place, "block record is missing"))?;
    let record = BlockRecord::decode(&key, &value).map_err(|e| corrupt(place, e))?;
    if record.place == place {
        Ok(record)
    } else {
        Err(corrupt(place, "block record names another chunk"))
    }
}

/// Up to `limit` chunks of a target behind `from`, in order, with both records.
pub(super) fn list(
    db: &DB,
    target: TargetId,
    from: Option<ChunkId>,
    limit: usize,
) -> Result<Vec<(ChunkId, Records)>, Error> {
    // One snapshot, so that a commit between the two passes moves nothing out of sight.
    let snapshot = db.snapshot();
    let mut found = std::collections::BTreeMap::<ChunkId, Records>::new();
    for kind in [b'c', b'p'] {
        let prefix = record::target_prefix(kind, target);
        let mut start = prefix.clone();
        if let Some(from) = from {
            start.extend(from.to_bytes());
            // Just behind that key: no key continues another one.
            start.push(0);
        }
        let mode = IteratorMode::From(&start, Direction::Forward);
        for item in snapshot.iterator(mode).take(limit) {
            let nowhere = Place { target, chunk: ChunkId::from_bytes([0; 16]) };
            let (key, value) = item.map_err(|e| corrupt(nowhere, e.as_ref()))?;
            if !key.starts_with(&prefix) {
                break;
            }
            let place =
                record::parse_chunk_key(&key).ok_or_else(|| corrupt(nowhere, "malformed key"))?;
            let value = ChunkRecord::decode(&key, &value).map_err(|e| corrupt(place, e))?;
            let records = found.entry(place.chunk).or_default();
            let slot = if kind == b'c' { &mut records.committed } else { &mut records.pending };
            *slot = Some(value);
        }
    }
    Ok(found.into_iter().take(limit).collect())
}

/// The records of one kind of a file's chunks from index `from` on, or the same from the last on.
fn of_file(
    view: &Snapshot<'_>,
    kind: u8,
    target: TargetId,
    first: ChunkId,
    direction: Direction,
) -> impl Iterator<Item = Result<(u64, Outline), Error>> {
    let key = |chunk| record::chunk_key(kind, Place { target, chunk });
    let (low, high) = (key(first), key(ChunkId { index: u64::MAX, ..first }));
    let start = match direction {
        Direction::Forward => low.clone(),
        Direction::Reverse => high.clone(),
    };
    // The bounds keep the search from wading through what was deleted beside the file.
    let mut options = ReadOptions::default();
    options.set_iterate_lower_bound(low);
    // Just behind the last key: no key continues another one.
    options.set_iterate_upper_bound([&high[..], &[0]].concat());
    let records = view.iterator_opt(IteratorMode::From(&start, direction), options);
    records.map(move |item| {
        let somewhere = Place { target, chunk: first };
        let (key, value) = item.map_err(|e| corrupt(somewhere, e.as_ref()))?;
        let place =
            record::parse_chunk_key(&key).ok_or_else(|| corrupt(somewhere, "malformed key"))?;
        let outline = ChunkRecord::outline(&key, &value).map_err(|e| corrupt(place, e))?;
        Ok((place.chunk.index, outline))
    })
}

/// Up to `limit` chunks of a file from index `from` on, its last one, and what is pending there.
pub(super) fn file(
    db: &DB,
    target: TargetId,
    file: InodeId,
    from: u64,
    limit: usize,
) -> Result<FileView, Error> {
    // One snapshot, so that a commit between two passes moves nothing out of sight.
    let view = db.snapshot();
    let records =
        |kind, index, direction| of_file(&view, kind, target, ChunkId { file, index }, direction);
    let mut found = FileView::default();
    for item in records(b'c', from, Direction::Forward) {
        if found.chunks.len() >= limit {
            break;
        }
        let (index, outline) = item?;
        if !outline.removed {
            found.chunks.push((index, outline.length));
        }
    }
    let reaches_end = found.chunks.len() < limit;
    found.last = found.chunks.last().copied().filter(|_| reaches_end);
    if found.last.is_none() {
        for item in records(b'c', 0, Direction::Reverse) {
            let (index, outline) = item?;
            if !outline.removed {
                found.last = Some((index, outline.length));
                break;
            }
        }
    }
    // What is pending in the part that was asked for, and what may move the end.
    let last = found.last.map_or(0, |(index, _)| index);
    let listed_to = found.chunks.last().map(|(index, _)| *index);
    for item in records(b'p', from.min(last), Direction::Forward) {
        let (index, outline) = item?;
        let is_listed = from <= index && (reaches_end || listed_to.is_some_and(|to| index <= to));
        if is_listed || index >= last {
            found.pending.push((index, outline.version));
        }
    }
    Ok(found)
}

fn corrupt(place: Place, detail: &str) -> Error {
    Error::Corrupt { place, offset: 0, detail: detail.into() }
}
