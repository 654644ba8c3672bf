//! Opening a disk: identity first, then metadata, then the free map from the block records.
//!
//! Order of writes, so that a crash between any two is told from a disk that was tampered with:
//! a new disk gets its superblock (incarnation 0) before anything else, and nothing is stored
//! under incarnation 0, so unfinished formatting is finished by the next open. An open marks the
//! superblock with the next incarnation as *opening*, then the metadata, then clears the mark:
//! metadata that is behind without that mark is an old copy.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use rocksdb::{DB, IteratorMode, WriteOptions};
use rustix::fs::{FlockOperation, OFlags};
use tokio::sync::Mutex;

use super::alloc::{Allocator, Block, UNIT};
use super::io::Io;
use super::log::Log;
use super::record::{self, ChunkRecord, IDENTITY_KEY, Identity};
use super::superblock::{self, OpenError, PAGE, Superblock};
use super::types::{EngineState, Options};
use super::{Counters, Inner, LOCKS, RESERVE_BYTES, store};

/// Share of a file system, one in so many, that blocks never take: the metadata's.
const METADATA_SHARE: u64 = 20;

pub(super) fn open(options: &Options) -> Result<Inner, OpenError> {
    let dir = options.dir.as_path();
    superblock::check_cluster_name(&options.cluster)?;
    create_dir(dir)?;
    let lock_file = lock(dir)?;
    let mut superblock = load_or_format(options)?;
    superblock.check(dir, &options.cluster, options.node)?;
    let db = open_metadata(dir, &superblock)?;
    check_identity(dir, &superblock, &db)?;
    prepare_blocks(dir, &superblock)?;
    begin_incarnation(dir, &mut superblock, &db)?;
    let (blocks, direct) = open_blocks(&dir.join("blocks"))?;
    let allocator = Arc::new(load_free_map(options, &db, &blocks)?);
    let start = OpenError::io("start the threads for", dir);
    let (io, io_reason) = Io::start(options.io).map_err(start)?;
    let state = EngineState {
        disk: hex(&superblock.disk),
        incarnation: superblock.incarnation,
        io: io.name(),
        io_reason,
        direct,
        failed: None,
    };
    let (db, blocks) = (Arc::new(db), Arc::new(blocks));
    let (failure, counters) = (Default::default(), Counters::default());
    let log = Log::start(
        Arc::clone(&db),
        Arc::clone(&blocks),
        Arc::clone(&allocator),
        &failure,
        Arc::clone(&counters.barriers),
    )
    .map_err(OpenError::io("start the log for", dir))?;
    let locks = (0..LOCKS).map(|_| Mutex::default()).collect();
    Ok(Inner {
        log,
        io,
        db,
        blocks,
        allocator,
        locks,
        counters,
        failure,
        state,
        _lock_file: lock_file,
    })
}

fn create_dir(dir: &Path) -> Result<(), OpenError> {
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            Err(OpenError::io("create directory", dir)(e))
        }
        _ => Ok(()),
    }
}

/// Keeps other processes out, for as long as the file is open.
pub(super) fn lock(dir: &Path) -> Result<File, OpenError> {
    let path = dir.join("lock");
    let file = OpenOptions::new().create(true).append(true).open(&path);
    let file = file.map_err(OpenError::io("open", &path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(OpenError::InUse { dir: dir.to_owned() }),
        Err(e) => Err(OpenError::io("lock", &path)(e.into())),
    }
}

fn load_or_format(options: &Options) -> Result<Superblock, OpenError> {
    let dir = options.dir.as_path();
    if let Some(superblock) = Superblock::load(dir)? {
        return Ok(superblock);
    }
    // A file system's own directory, our lock, and a superblock that was not finished.
    let harmless = ["lost+found", "lock", "superblock.new"];
    for entry in fs::read_dir(dir).map_err(OpenError::io("list", dir))? {
        let name = entry.map_err(OpenError::io("list", dir))?.file_name();
        if !harmless.iter().any(|known| name == *known) {
            return Err(OpenError::NotOurs { dir: dir.to_owned() });
        }
    }
    let superblock = Superblock::new(&options.cluster, options.node);
    let superblock = superblock.map_err(OpenError::io("name the new disk", dir))?;
    superblock.store(dir)?;
    Ok(superblock)
}

fn open_metadata(dir: &Path, superblock: &Superblock) -> Result<DB, OpenError> {
    let path = dir.join("meta");
    let is_new = superblock.incarnation == 0;
    if !is_new && !path.join("CURRENT").exists() {
        return Err(mismatch(&path, "metadata is missing"));
    }
    let db = store::open(&path, is_new)
        .map_err(|e| OpenError::Metadata { path: path.clone(), detail: e.to_string() })?;
    if is_new && read_identity(&path, &db)?.is_none() {
        put_identity(&path, &db, Identity { disk: superblock.disk, incarnation: 0 })?;
    }
    superblock::sync_dir(dir)?;
    Ok(db)
}

fn read_identity(path: &Path, db: &DB) -> Result<Option<Identity>, OpenError> {
    let value = db.get(IDENTITY_KEY).map_err(|e| mismatch(path, e.as_ref()))?;
    value.map(|v| Identity::decode(&v).map_err(|e| mismatch(path, e))).transpose()
}

fn put_identity(path: &Path, db: &DB, identity: Identity) -> Result<(), OpenError> {
    let mut options = WriteOptions::default();
    options.set_sync(true);
    db.put_opt(IDENTITY_KEY, identity.encode(), &options)
        .map_err(|e| OpenError::Metadata { path: path.to_owned(), detail: e.to_string() })
}

/// Compares the metadata's identity with the superblock's.
pub(super) fn check_identity(
    dir: &Path,
    superblock: &Superblock,
    db: &DB,
) -> Result<(), OpenError> {
    let path = dir.join("meta");
    let found = read_identity(&path, db)?;
    let found = found.ok_or_else(|| mismatch(&path, "metadata has no identity"))?;
    if found.disk != superblock.disk {
        return Err(mismatch(&path, "metadata belongs to another disk"));
    }
    let is_unfinished = superblock.is_opening && found.incarnation + 1 == superblock.incarnation;
    if found.incarnation == superblock.incarnation || is_unfinished {
        return Ok(());
    }
    let (metadata, disk) = (found.incarnation, superblock.incarnation);
    let which =
        if metadata < disk { "metadata is an old copy" } else { "superblock is an old copy" };
    Err(mismatch(&path, &format!("{which}: incarnation {metadata}, superblock {disk}")))
}

fn begin_incarnation(dir: &Path, superblock: &mut Superblock, db: &DB) -> Result<(), OpenError> {
    if !superblock.is_opening {
        superblock.incarnation += 1;
        superblock.is_opening = true;
        superblock.store(dir)?;
    }
    let identity = Identity { disk: superblock.disk, incarnation: superblock.incarnation };
    put_identity(&dir.join("meta"), db, identity)?;
    superblock.is_opening = false;
    superblock.store(dir)
}

/// Checks the block file's header, or writes it on a new disk.
fn prepare_blocks(dir: &Path, superblock: &Superblock) -> Result<(), OpenError> {
    let path = dir.join("blocks");
    if superblock.incarnation > 0 {
        return check_blocks(dir, superblock);
    }
    OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(false)
        .open(&path)
        .and_then(|mut file| {
            file.write_all(&superblock::block_header(superblock.disk))?;
            rustix::fs::ftruncate(&file, UNIT)?;
            file.sync_all()
        })
        .map_err(OpenError::io("write header of", &path))?;
    superblock::sync_dir(dir)
}

pub(super) fn check_blocks(dir: &Path, superblock: &Superblock) -> Result<(), OpenError> {
    let path = dir.join("blocks");
    let mut page = vec![0; PAGE];
    match File::open(&path).and_then(|file| file.read_exact_at(&mut page, 0)) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(mismatch(&path, "block file is missing"));
        }
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(mismatch(&path, "block file is cut off"));
        }
        Err(e) => return Err(OpenError::io("read header of", &path)(e)),
    }
    let disk = superblock::parse_block_header(&page)
        .map_err(|e| mismatch(&path, &format!("header of the block file: {e}")))?;
    if disk == superblock.disk {
        Ok(())
    } else {
        Err(mismatch(&path, "block file belongs to another disk"))
    }
}

/// Past the page cache where the file system can.
fn open_blocks(path: &Path) -> Result<(File, bool), OpenError> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0);
    let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    match open(flags) {
        Ok(file) => Ok((file, true)),
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => open(0).map(|file| (file, false)),
        Err(e) => Err(e),
    }
    .map_err(OpenError::io("open", path))
}

/// The free map is what the records leave. A block that no chunk names is freed here.
fn load_free_map(options: &Options, db: &DB, blocks: &File) -> Result<Allocator, OpenError> {
    let meta = options.dir.join("meta");
    let named = named_blocks(&meta, db)?;
    let mut used = Vec::new();
    for item in db.iterator(IteratorMode::From(b"b", rocksdb::Direction::Forward)) {
        let (key, _) = item.map_err(|e| mismatch(&meta, e.as_ref()))?;
        if !key.starts_with(b"b") {
            break;
        }
        match record::parse_block_key(&key) {
            Some(block) if named.contains(&block) => used.push(block),
            Some(_) => db.delete(&key).map_err(|e| mismatch(&meta, e.as_ref()))?,
            None => return Err(mismatch(&meta, "malformed key of a block")),
        }
    }
    let path = options.dir.join("blocks");
    let length = blocks.metadata().map_err(OpenError::io("look at", &path))?.len();
    if used.iter().any(|b| b.offset() + b.size() > length) {
        return Err(mismatch(&path, "block file is cut off: the metadata names blocks behind it"));
    }
    let fs = rustix::fs::fstatvfs(blocks).map_err(|e| OpenError::io("stat", &path)(e.into()))?;
    let available = fs.f_bavail.saturating_mul(fs.f_frsize);
    let reserve = (available / METADATA_SHARE).max(RESERVE_BYTES);
    let offered = length + available.saturating_sub(reserve);
    let capacity = options.capacity_bytes.map_or(offered, |limit| offered.min(limit + UNIT));
    // Unit 0 is the header.
    Allocator::new((capacity / UNIT).max(1), length / UNIT, used).map_err(|overlap| {
        let (a, b) = (overlap.0.offset(), overlap.1.offset());
        mismatch(&meta, &format!("blocks at {a} and {b} overlap"))
    })
}

/// Blocks that chunk records name. A record that does not verify is left for reads to report.
fn named_blocks(path: &Path, db: &DB) -> Result<BTreeSet<Block>, OpenError> {
    let mut named = BTreeSet::new();
    for kind in [b'c', b'p'] {
        for item in db.iterator(IteratorMode::From(&[kind], rocksdb::Direction::Forward)) {
            let (key, value) = item.map_err(|e| mismatch(path, e.as_ref()))?;
            if key.first() != Some(&kind) {
                break;
            }
            let record = ChunkRecord::decode(&key, &value).map_err(|e| {
                let name =
                    record::parse_chunk_key(&key).map_or_else(String::new, |p| p.to_string());
                mismatch(path, &format!("record of {name}: {e}"))
            })?;
            named.extend(record.fragments.iter().map(|f| f.block));
        }
    }
    Ok(named)
}

pub(super) fn mismatch(path: &Path, detail: &str) -> OpenError {
    OpenError::Mismatch { path: path.to_owned(), detail: detail.to_owned() }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
