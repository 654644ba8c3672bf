//! The metadata store: RocksDB, opened small, and typed look-ups in it.

use std::path::Path;

use chain::id::{ChunkId, TargetId};
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, DBRecoveryMode, LogLevel, Options, Snapshot,
};

use super::alloc::Block;
use super::record::{self, BlockRecord, ChunkRecord};
use super::types::{Error, Place};

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
        let mode = rocksdb::IteratorMode::From(&start, rocksdb::Direction::Forward);
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

fn corrupt(place: Place, detail: &str) -> Error {
    Error::Corrupt { place, offset: 0, detail: detail.into() }
}
