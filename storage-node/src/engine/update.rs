//! Staging, committing and dropping updates. The crash argument is in `ENGINE.md`.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering;

use chain::id::{ChainVersion, ChunkId, TargetId, UpdateVersion};
use rocksdb::Snapshot;

use super::alloc::{AllocError, Allocation, Block};
use super::buf::AlignedBuf;
use super::checksum::{self, PAGE_SIZE};
use super::log::{Change, Durability};
use super::plan::{self, Plan};
use super::read::page_size;
use super::record::{self, BlockRecord, ChunkRecord, Fragment};
use super::store::{self, Records};
use super::types::{ChunkState, Error, Op, Place, Stage};
use super::{Inner, grow};

/// A block that is written, but neither durable nor named.
struct Written {
    allocation: Allocation,
    record: BlockRecord,
    fragment: Fragment,
}

impl Inner {
    pub(super) async fn stage(&self, target: TargetId, stage: Stage) -> Result<ChunkState, Error> {
        self.check_alive()?;
        let place = Place { target, chunk: stage.chunk };
        let _lock = self.lock(place).await;
        let view = self.db.snapshot();
        let Records { committed, pending } = store::chunk(&view, place)?;
        if let Some(known) = pending.as_ref().filter(|p| is_same(&p.state, &stage)) {
            check_content(place, &stage, known.state.checksum)?;
            return self.restage(place, known, stage.chain_version).await;
        }
        let states = [&committed, &pending].map(|r| r.as_ref().map(|r| &r.state));
        plan::check(place, &stage, states[0], states[1])?;
        let Plan { length, mut kept, rewrite, copies } =
            plan::plan(place, &stage.op, committed.as_ref())?;
        Self::refresh_crcs(&view, place, committed.as_ref(), &mut kept)?;
        let mut buf = AlignedBuf::zeroed(rewrite.len());
        if let Some(old) = &committed {
            for range in copies {
                self.copy_pages(&view, place, old, range, rewrite.start, &mut buf).await?;
            }
        }
        fill(&stage.op, rewrite.start, length, &mut buf);
        let mut change = Change::new(Durability::Metadata);
        if !rewrite.is_empty() {
            let written = self.write_block(place, &stage, rewrite, buf).await?;
            let key = record::block_key(written.allocation.block());
            change.puts.push((key.clone(), written.record.encode(&key)));
            change.durability = Durability::Data;
            change.allocations.push(written.allocation);
            kept.push(written.fragment);
            kept.sort_unstable_by_key(|f| f.page);
        }
        let state = plan::next_state(&stage, states[0], length, &kept);
        // Before anything names the new bytes: what is refused is nowhere after a crash either.
        check_content(place, &stage, state.checksum)?;
        let next = ChunkRecord { state, fragments: kept };
        let key = record::pending_key(place);
        change.puts.push((key.clone(), next.encode(&key)));
        if let Some(superseded) = &pending {
            free(&mut change, superseded, committed.as_ref());
        }
        self.log.apply(change).await?;
        self.count_update(&stage.op);
        Ok(next.state)
    }

    /// The same update came again, perhaps under a later chain version.
    async fn restage(
        &self,
        place: Place,
        known: &ChunkRecord,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, Error> {
        let stored = known.state.chain_version;
        if chain_version < stored {
            return Err(Error::StaleChain { place, asked: chain_version, stored });
        }
        let mut next = known.clone();
        if chain_version > stored {
            next.state.chain_version = chain_version;
            let mut change = Change::new(Durability::Metadata);
            let key = record::pending_key(place);
            change.puts.push((key.clone(), next.encode(&key)));
            self.log.apply(change).await?;
        }
        Ok(next.state)
    }

    pub(super) async fn commit(
        &self,
        target: TargetId,
        chunk: ChunkId,
        version: UpdateVersion,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, Error> {
        self.check_alive()?;
        let place = Place { target, chunk };
        let _lock = self.lock(place).await;
        let Records { committed, pending } = store::chunk(&self.db.snapshot(), place)?;
        let Some(mut next) = pending.filter(|p| p.state.version == version) else {
            let done = committed.filter(|c| c.state.version == version);
            return done.map(|c| c.state).ok_or(Error::NotPending { place, asked: version });
        };
        let stored = next.state.chain_version;
        if chain_version < stored {
            return Err(Error::StaleChain { place, asked: chain_version, stored });
        }
        next.state.chain_version = chain_version;
        let mut change = Change::new(Durability::Lazy);
        let key = record::committed_key(place);
        change.puts.push((key.clone(), next.encode(&key)));
        change.deletes.push(record::pending_key(place));
        if let Some(old) = &committed {
            free(&mut change, old, Some(&next));
        }
        self.log.apply(change).await?;
        Ok(next.state)
    }

    pub(super) async fn drop_pending(
        &self,
        target: TargetId,
        chunk: ChunkId,
        version: UpdateVersion,
    ) -> Result<(), Error> {
        self.check_alive()?;
        let place = Place { target, chunk };
        let _lock = self.lock(place).await;
        let Records { committed, pending } = store::chunk(&self.db.snapshot(), place)?;
        let Some(pending) = pending else { return Ok(()) };
        if pending.state.version != version {
            return Err(Error::NotPending { place, asked: version });
        }
        let mut change = Change::new(Durability::Metadata);
        change.deletes.push(record::pending_key(place));
        free(&mut change, &pending, committed.as_ref());
        self.log.apply(change).await
    }

    pub(super) async fn forget_removed(
        &self,
        target: TargetId,
        chunk: ChunkId,
        version: UpdateVersion,
    ) -> Result<(), Error> {
        self.check_alive()?;
        let place = Place { target, chunk };
        let _lock = self.lock(place).await;
        let Records { committed, pending } = store::chunk(&self.db.snapshot(), place)?;
        if let Some(pending) = pending {
            return Err(Error::OtherPending { place, pending: pending.state.version });
        }
        let Some(committed) = committed else { return Ok(()) };
        if !committed.state.removed || committed.state.version != version {
            return Err(Error::BadUpdate { place, detail: "not removed at that version" });
        }
        let mut change = Change::new(Durability::Metadata);
        change.deletes.push(record::committed_key(place));
        self.log.apply(change).await
    }

    /// The CRC of a fragment that was cut follows from its pages' checksums.
    fn refresh_crcs(
        view: &Snapshot<'_>,
        place: Place,
        old: Option<&ChunkRecord>,
        kept: &mut [Fragment],
    ) -> Result<(), Error> {
        let before = old.map_or(&[][..], |o| &o.fragments);
        for fragment in kept.iter_mut().filter(|f| !before.contains(f)) {
            let block = store::block(view, place, fragment.block)?;
            let skip = (fragment.page - fragment.base) as usize;
            let stored = block.checksums.iter().skip(skip).take(fragment.pages as usize);
            let plain = (fragment.page..).zip(stored).map(|(page, stored)| {
                checksum::unseal(checksum::domain(place, block.version, page.into()), *stored)
            });
            fragment.crc = checksum::fold(plain);
        }
        Ok(())
    }

    /// A free block. If there is none, those that a commit freed may still wait for its barrier: a
    /// full disk takes overwrites in the space of what they replace.
    async fn take_block(&self, bytes: u64) -> Result<Allocation, Error> {
        let take = || self.allocator.take(bytes, |from, to| grow(&self.blocks, from, to));
        let mut taken = take();
        if let Err(AllocError::NoSpace { .. }) = taken {
            self.log.barrier().await?;
            taken = take();
        }
        taken.map_err(|e| match e {
            AllocError::NoSpace { wanted_bytes, free_bytes } => {
                Error::NoSpace { wanted_bytes, free_bytes }
            }
            AllocError::Io(e) => self.fail(format!("extend block file: {e}")),
        })
    }

    async fn write_block(
        &self,
        place: Place,
        stage: &Stage,
        rewrite: Range<u32>,
        buf: AlignedBuf,
    ) -> Result<Written, Error> {
        let (version, base) = (stage.version, rewrite.start);
        let domains = rewrite.clone().map(|p| checksum::domain(place, version, p.into()));
        let pages = domains.zip(buf.as_ref().chunks_exact(PAGE_SIZE));
        let (checksums, plain): (Vec<_>, Vec<_>) = pages
            .map(|(domain, page)| {
                let stored = checksum::seal(domain, page);
                (stored, checksum::unseal(domain, stored))
            })
            .unzip();
        // Only now: from here on the checksums of the pages tell if a byte changes.
        if !is_as_sent(&stage.op, base, buf.as_ref()) {
            return Err(Error::Damaged(place));
        }
        let allocation = self.take_block(buf.len() as u64).await?;
        let block = allocation.block();
        let pages = rewrite.end - rewrite.start;
        let fragment = Fragment { page: base, pages, block, base, crc: checksum::fold(plain) };
        let bytes = buf.len() as u64;
        let written = self.io.write(&self.blocks, block.offset(), buf).await;
        written.map_err(|e| self.fail(format!("write block file: {e}")))?;
        self.counters.block_bytes.fetch_add(bytes, Ordering::Relaxed);
        let record = BlockRecord { place, version, base, checksums };
        Ok(Written { allocation, record, fragment })
    }

    fn count_update(&self, op: &Op) {
        let bytes = match op {
            Op::Write { bytes, .. } => bytes.len(),
            Op::Replace(replace) => replace.bytes.len(),
            Op::Truncate { .. } | Op::Remove => 0,
        };
        self.counters.updates.fetch_add(1, Ordering::Relaxed);
        self.counters.update_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

fn is_same(pending: &ChunkState, stage: &Stage) -> bool {
    let is_same_kind = match &stage.op {
        Op::Replace(replace) => pending.replaced && pending.checksum == replace.checksum,
        Op::Write { .. } | Op::Truncate { .. } | Op::Remove => !pending.replaced,
    };
    pending.version == stage.version && pending.id == stage.id && is_same_kind
}

/// The same change on the same base must give the same bytes.
fn check_content(place: Place, stage: &Stage, made: u32) -> Result<(), Error> {
    match stage.expected {
        Some(expected) if expected != made => {
            Err(Error::Diverged { place, asked: stage.version, made, expected })
        }
        _ => Ok(()),
    }
}

/// The update's own bytes, and where they belong in a buffer that begins with page `from`.
fn payload(op: &Op, from: u32) -> (usize, &[u8]) {
    let start = u64::from(from) * PAGE_SIZE as u64;
    match op {
        Op::Write { offset, bytes, .. } => (page_size(offset - start), bytes.as_ref()),
        Op::Replace(replace) => (0, replace.bytes.as_ref()),
        Op::Truncate { .. } | Op::Remove => (0, &[][..]),
    }
}

/// Whether a write lies in the buffer as its writer had it.
fn is_as_sent(op: &Op, from: u32, buf: &[u8]) -> bool {
    let Op::Write { checksum, .. } = op else { return true };
    let (at, bytes) = payload(op, from);
    buf.get(at..at + bytes.len()).is_some_and(|there| crc32c::crc32c(there) == *checksum)
}

/// Puts the update's own bytes over the copied ones, and zeros behind the end of the chunk.
fn fill(op: &Op, from: u32, length: u64, buf: &mut AlignedBuf) {
    let start = u64::from(from) * PAGE_SIZE as u64;
    let (at, bytes) = payload(op, from);
    if let Some(space) = buf.as_mut().get_mut(at..at + bytes.len()) {
        space.copy_from_slice(bytes);
    }
    let end = page_size(length.saturating_sub(start));
    if let Some(rest) = buf.as_mut().get_mut(end..) {
        rest.fill(0);
    }
}

/// Frees the blocks that only `old` names.
fn free(change: &mut Change, old: &ChunkRecord, stays: Option<&ChunkRecord>) {
    let blocks = |record: &ChunkRecord| -> BTreeSet<Block> {
        record.fragments.iter().map(|f| f.block).collect()
    };
    let stay = stays.map(blocks).unwrap_or_default();
    for block in blocks(old).difference(&stay) {
        change.deletes.push(record::block_key(*block));
        change.frees.push(*block);
    }
}
