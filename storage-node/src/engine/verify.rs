//! The offline check of a whole disk: every record parsed, every page verified.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rocksdb::{DB, IteratorMode};

use super::alloc::{Allocator, Block};
use super::buf::AlignedBuf;
use super::checksum::PAGE_SIZE;
use super::open;
use super::plan::content_checksum;
use super::read::verify_pages;
use super::record::{self, ChunkRecord};
use super::store;
use super::superblock::{OpenError, Superblock};
use super::types::Place;

/// Problems that a report lists; more are only counted.
const MAX_LISTED: usize = 1000;

/// What a check of a disk found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Cluster that the disk belongs to.
    pub cluster: String,
    /// Node that the disk belongs to.
    pub node: u32,
    /// Opens for service so far.
    pub incarnation: u64,
    /// Committed chunks, removals included.
    pub committed: u64,
    /// Pending updates.
    pub pending: u64,
    /// Blocks.
    pub blocks: u64,
    /// Bytes that were read and verified.
    pub bytes: u64,
    /// Count of all problems.
    pub problem_count: u64,
    /// The first thousand problems.
    pub problems: Vec<Problem>,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The chunk, if it is known.
    pub place: Option<Place>,
    /// What is wrong.
    pub detail: String,
}

impl Report {
    fn add(&mut self, place: Option<Place>, detail: impl Into<String>) {
        self.problem_count += 1;
        if self.problems.len() < MAX_LISTED {
            self.problems.push(Problem { place, detail: detail.into() });
        }
    }
}

/// Checks the disk in `dir`, which no process may have open. Changes nothing but the lock.
///
/// # Errors
/// [`OpenError`] if the directory cannot be opened as a disk at all.
pub fn verify(dir: &Path) -> Result<Report, OpenError> {
    let Some(superblock) = Superblock::load(dir)? else {
        return Err(OpenError::NotOurs { dir: dir.to_owned() });
    };
    let _lock = open::lock(dir)?;
    let path = dir.join("meta");
    let db = DB::open_for_read_only(&store::options(false), &path, false)
        .map_err(|e| OpenError::Metadata { path, detail: e.to_string() })?;
    open::check_identity(dir, &superblock, &db)?;
    open::check_blocks(dir, &superblock)?;
    let path = dir.join("blocks");
    let blocks = File::open(&path).map_err(OpenError::io("open", &path))?;
    let mut report = Report {
        cluster: superblock.cluster,
        node: superblock.node.get(),
        incarnation: superblock.incarnation,
        ..Report::default()
    };
    let mut named = BTreeSet::new();
    for kind in [b'c', b'p'] {
        for item in db.iterator(IteratorMode::From(&[kind], rocksdb::Direction::Forward)) {
            match item {
                Ok((key, _)) if key.first() != Some(&kind) => break,
                Ok((key, value)) => {
                    verify_chunk(&db, &blocks, &key, &value, &mut named, &mut report);
                }
                Err(e) => report.add(None, format!("metadata: {e}")),
            }
        }
    }
    verify_free_map(&db, &named, &mut report);
    Ok(report)
}

fn verify_chunk(
    db: &DB,
    blocks: &File,
    key: &[u8],
    value: &[u8],
    named: &mut BTreeSet<Block>,
    report: &mut Report,
) {
    let is_committed = key.first() == Some(&b'c');
    *if is_committed { &mut report.committed } else { &mut report.pending } += 1;
    let Some(place) = record::parse_chunk_key(key) else {
        return report.add(None, "malformed key of a chunk");
    };
    let record = match ChunkRecord::decode(key, value) {
        Ok(record) => record,
        Err(e) => return report.add(Some(place), e),
    };
    if record.state.checksum != content_checksum(record.state.length, &record.fragments) {
        report.add(Some(place), "checksum of the chunk does not follow from its fragments");
    }
    for piece in &record.fragments {
        named.insert(piece.block);
        let block = match store::block(&db.snapshot(), place, piece.block) {
            Ok(block) => block,
            Err(e) => {
                report.add(Some(place), e.to_string());
                continue;
            }
        };
        let mut buf = AlignedBuf::for_reading(piece.pages as usize);
        let skip = u64::from(piece.page - piece.base) * PAGE_SIZE as u64;
        if let Err(e) = blocks.read_exact_at(buf.as_mut(), piece.block.offset() + skip) {
            report.add(Some(place), format!("read block at {}: {e}", piece.block.offset()));
            continue;
        }
        report.bytes += buf.len() as u64;
        if let Err(page) = verify_pages(place, &block, piece, buf.as_ref()) {
            report.add(Some(place), format!("page {page} does not match its checksum"));
        } else if crc32c::crc32c(buf.as_ref()) != piece.crc {
            report.add(Some(place), format!("fragment at page {} has a wrong CRC", piece.page));
        }
    }
}

fn verify_free_map(db: &DB, named: &BTreeSet<Block>, report: &mut Report) {
    let mut known = BTreeSet::new();
    for item in db.iterator(IteratorMode::From(b"b", rocksdb::Direction::Forward)) {
        match item {
            Ok((key, _)) if key.first() != Some(&b'b') => break,
            Ok((key, _)) => match record::parse_block_key(&key) {
                Some(block) => {
                    known.insert(block);
                }
                None => report.add(None, "malformed key of a block"),
            },
            Err(e) => report.add(None, format!("metadata: {e}")),
        }
    }
    report.blocks = known.len() as u64;
    for block in known.difference(named) {
        report.add(None, format!("no chunk names the block at {}", block.offset()));
    }
    if let Err(overlap) = Allocator::new(1, 0, known.into_iter().collect()) {
        let (a, b) = (overlap.0.offset(), overlap.1.offset());
        report.add(None, format!("blocks at {a} and {b} overlap"));
    }
}
