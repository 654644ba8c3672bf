//! What an update changes in a chunk: decided before any IO, as a pure function.
//!
//! An update rewrites whole 64 KiB segments, into a new block, and takes over the other
//! fragments of the committed state. So a small write costs a segment and not a chunk, an
//! aligned append copies nothing, and a block that holds committed bytes is never written.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Range;

use chain::id::UpdateVersion;

use super::alloc::UNIT;
use super::checksum::{self, PAGE_SIZE};
use super::record::{ChunkRecord, Fragment};
use super::types::{
    Applied, ChunkState, Error, MAX_CHUNK_SIZE, MAX_DUPLICATES, Op, Place, Replace, Stage,
};

const PAGE: u64 = PAGE_SIZE as u64;
/// Pages in a segment, the unit of rewriting: what the smallest block holds.
const SEGMENT: u32 = 16;
const _: () = assert!(SEGMENT as u64 * PAGE == UNIT);
/// Fragments of one chunk; with more the whole chunk is rewritten. Bounds its record to 6 KiB.
const MAX_FRAGMENTS: usize = 256;
/// Blocks may take this many times the space of the chunk in one block; beyond it the whole
/// chunk is rewritten, so that overwritten parts of large blocks do not pile up.
const MAX_SPACE_FACTOR: u64 = 2;

/// The parts of a new state.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Length of the chunk afterwards, in bytes.
    pub(super) length: u64,
    /// Parts of fragments that stay; the `crc` of one that was cut is stale.
    pub(super) kept: Vec<Fragment>,
    /// Pages that go into a new block; empty for none.
    pub(super) rewrite: Range<u32>,
    /// Pages of the old state that are copied into it: before and behind the new bytes.
    pub(super) copies: [Range<u32>; 2],
}

/// Checks an update against what is stored.
pub(super) fn check(
    place: Place,
    stage: &Stage,
    committed: Option<&ChunkState>,
    pending: Option<&ChunkState>,
) -> Result<(), Error> {
    let known = [committed, pending].into_iter().flatten();
    if let Some(stored) = known.map(|s| s.chain_version).max().filter(|v| *v > stage.chain_version)
    {
        return Err(Error::StaleChain { place, asked: stage.chain_version, stored });
    }
    if let Op::Replace(replace) = &stage.op {
        return check_replace(place, replace);
    }
    if let Some(pending) = pending {
        return Err(Error::OtherPending { place, pending: pending.version });
    }
    let asked = stage.version;
    let last = committed.map_or(UpdateVersion::new(0), |c| c.version);
    if asked <= last {
        return Err(Error::AlreadyCommitted { place, asked, committed: last });
    }
    if asked.get() - 1 != last.get() {
        return Err(Error::MissingUpdate { place, asked, committed: last });
    }
    let stored = committed.map_or(0, |c| c.truncate_generation);
    let is_late = match stage.truncate_generation.cmp(&stored) {
        Ordering::Less => true,
        // Nobody writes under a generation before its cut is done, so this is that cut once more.
        Ordering::Equal => committed.is_some_and(|old| takes_away(&stage.op, old)),
        Ordering::Greater => false,
    };
    if is_late {
        return Err(Error::StaleTruncate { place, asked: stage.truncate_generation, stored });
    }
    Ok(())
}

/// Whether bytes of the committed state would be gone.
fn takes_away(op: &Op, old: &ChunkState) -> bool {
    match op {
        Op::Remove => !old.removed,
        Op::Truncate { length } => *length < old.length,
        Op::Write { .. } | Op::Replace(_) => false,
    }
}

fn check_replace(place: Place, replace: &Replace) -> Result<(), Error> {
    let bad = |detail| Err(Error::BadUpdate { place, detail });
    if crc32c::crc32c(&replace.bytes) != replace.checksum {
        return Err(Error::Damaged(place));
    }
    if replace.bytes.len() as u64 > MAX_CHUNK_SIZE {
        return bad("longer than 64 MiB");
    }
    if replace.removed && !replace.bytes.is_empty() {
        return bad("a removed chunk with bytes");
    }
    if replace.duplicates.len() > MAX_DUPLICATES {
        return bad("more than 256 entries in the duplicate table");
    }
    Ok(())
}

/// Decides what stays, what is rewritten, and what is copied.
pub(super) fn plan(place: Place, op: &Op, old: Option<&ChunkRecord>) -> Result<Plan, Error> {
    let bad = |detail| Error::BadUpdate { place, detail };
    let old_length = old.map_or(0, |o| o.state.length);
    let fragments = old.map_or(&[][..], |o| &o.fragments);
    match op {
        Op::Write { bytes, .. } if bytes.is_empty() => Err(bad("an empty write")),
        Op::Write { offset, bytes, .. } => {
            let end = offset.checked_add(bytes.len() as u64).filter(|e| *e <= MAX_CHUNK_SIZE);
            let end = end.ok_or_else(|| bad("a write beyond 64 MiB"))?;
            Ok(plan_write(*offset..end, old_length, fragments))
        }
        Op::Truncate { length } if *length > MAX_CHUNK_SIZE => Err(bad("longer than 64 MiB")),
        Op::Truncate { length } => Ok(plan_truncate(*length, old_length, fragments)),
        Op::Remove => Ok(Plan::fresh(0)),
        Op::Replace(replace) => Ok(Plan::fresh(replace.bytes.len() as u64)),
    }
}

fn plan_write(write: Range<u64>, old_length: u64, fragments: &[Fragment]) -> Plan {
    let length = old_length.max(write.end);
    let last = pages(length);
    let from = page_at(write.start) / SEGMENT * SEGMENT;
    let to = pages(write.end).next_multiple_of(SEGMENT).min(last);
    let mut plan =
        Plan { length, kept: keep(fragments, from..to), rewrite: from..to, copies: EMPTY };
    if plan.is_wasteful() {
        plan = Plan { length, kept: Vec::new(), rewrite: 0..last, copies: EMPTY };
    }
    // The first and the last page of the write are copied too if it covers them in part.
    let head = plan.rewrite.start..pages(write.start);
    let tail = page_at(write.end).max(head.end)..plan.rewrite.end;
    let covers_last = write.end == length || write.end.is_multiple_of(PAGE);
    let tail = if covers_last { pages(write.end).max(head.end)..tail.end } else { tail };
    plan.copies = [head, tail].map(|range| range.start..range.end.max(range.start));
    plan
}

fn plan_truncate(length: u64, old_length: u64, fragments: &[Fragment]) -> Plan {
    let last = pages(length);
    if length >= old_length {
        return Plan { length, kept: fragments.to_vec(), rewrite: 0..0, copies: EMPTY };
    }
    let cut = page_at(length);
    let is_cut =
        !length.is_multiple_of(PAGE) && fragments.iter().any(|f| f.page <= cut && cut < f.end());
    let from = if is_cut { cut / SEGMENT * SEGMENT } else { last };
    let mut plan =
        Plan { length, kept: keep(fragments, from..u32::MAX), rewrite: from..last, copies: EMPTY };
    if plan.is_wasteful() {
        plan = Plan { length, kept: Vec::new(), rewrite: 0..last, copies: EMPTY };
    }
    plan.copies = [plan.rewrite.clone(), EMPTY[1].clone()];
    plan
}

const EMPTY: [Range<u32>; 2] = [0..0, 0..0];

impl Plan {
    /// A state in which nothing stays.
    fn fresh(length: u64) -> Self {
        Self { length, kept: Vec::new(), rewrite: 0..pages(length), copies: EMPTY }
    }

    fn is_wasteful(&self) -> bool {
        let block_size = |pages: usize| {
            if pages == 0 { 0 } else { (pages as u64 * PAGE).max(UNIT).next_power_of_two() }
        };
        let blocks: BTreeSet<_> = self.kept.iter().map(|f| f.block).collect();
        let taken: u64 = blocks.iter().map(|b| b.size()).sum();
        let taken = taken + block_size(self.rewrite.len());
        let in_one = block_size(pages(self.length) as usize);
        self.kept.len() >= MAX_FRAGMENTS || taken > MAX_SPACE_FACTOR * in_one.max(UNIT)
    }
}

/// The fragments without the pages of `gone`.
fn keep(fragments: &[Fragment], gone: Range<u32>) -> Vec<Fragment> {
    let cut = |f: &Fragment, range: Range<u32>| {
        let (page, end) = (f.page.max(range.start), f.end().min(range.end));
        (page < end).then(|| Fragment { page, pages: end - page, ..*f })
    };
    let sides = [0..gone.start, gone.end..u32::MAX];
    fragments.iter().flat_map(|f| sides.clone().map(|side| cut(f, side))).flatten().collect()
}

/// Page that holds byte `at`. Chunks have at most 16 384 pages.
fn page_at(at: u64) -> u32 {
    u32::try_from(at / PAGE).unwrap_or(u32::MAX)
}

/// Count of pages that hold `length` bytes.
pub(super) fn pages(length: u64) -> u32 {
    page_at(length.saturating_add(PAGE - 1))
}

/// The state after an update, given its fragments.
pub(super) fn next_state(
    stage: &Stage,
    committed: Option<&ChunkState>,
    length: u64,
    fragments: &[Fragment],
) -> ChunkState {
    let mut duplicates = committed.map(|c| c.duplicates.clone()).unwrap_or_default();
    let stored = committed.map_or(0, |c| c.truncate_generation);
    let mut state = ChunkState {
        version: stage.version,
        chain_version: stage.chain_version,
        length,
        checksum: content_checksum(length, fragments),
        truncate_generation: stage.truncate_generation.max(stored),
        removed: matches!(stage.op, Op::Remove),
        replaced: false,
        id: stage.id,
        duplicates: Default::default(),
    };
    if let Op::Replace(replace) = &stage.op {
        state.truncate_generation = stage.truncate_generation;
        state.removed = replace.removed;
        state.replaced = true;
        state.duplicates = replace.duplicates.clone();
    } else {
        let applied = Applied { seq: stage.id.seq, version: stage.version, length };
        duplicates.insert((stage.id.client, stage.id.channel), applied);
        if duplicates.len() > MAX_DUPLICATES {
            // W7. Versions are distinct, so every replica drops the same one; never the newest.
            let oldest = duplicates.iter().min_by_key(|(_, applied)| applied.version);
            if let Some(lane) = oldest.map(|(lane, _)| *lane) {
                duplicates.remove(&lane);
            }
        }
        state.duplicates = duplicates;
    }
    state
}

/// CRC32C of a chunk's bytes from its fragments' CRCs.
pub(super) fn content_checksum(length: u64, fragments: &[Fragment]) -> u32 {
    let zeros = |crc, count: u64| checksum::combine(crc, checksum::zeros(count), count);
    let (mut crc, mut at) = (0, 0);
    for fragment in fragments {
        crc = zeros(crc, u64::from(fragment.page) * PAGE - at);
        crc = checksum::combine(crc, fragment.crc, u64::from(fragment.pages) * PAGE);
        at = u64::from(fragment.end()) * PAGE;
    }
    match length.checked_sub(at) {
        Some(rest) => zeros(crc, rest),
        // The last page is zero behind the end of the chunk.
        None => checksum::strip(crc, checksum::zeros(at - length), at - length),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use chain::id::{ChunkId, InodeId, TargetId};

    use super::super::alloc::Block;
    use super::*;

    const KIB: u64 = 1024;

    fn fragment(page: u32, pages: u32, unit: u64, order: u8) -> Fragment {
        Fragment { page, pages, block: Block::new(unit, order).unwrap(), base: page, crc: 0 }
    }

    fn write(range: Range<u64>, old_length: u64, fragments: &[Fragment]) -> Plan {
        plan_write(range, old_length, fragments)
    }

    #[test]
    fn a_small_overwrite_rewrites_one_segment_and_copies_what_it_does_not_cover() {
        let plan = write(70 * KIB..74 * KIB, 1024 * KIB, &[fragment(0, 256, 16, 4)]);
        assert_eq!(plan.rewrite, 16..32);
        assert_eq!(plan.copies, [16..18, 18..32]);
        let kept: Vec<_> = plan.kept.iter().map(|f| (f.page, f.pages, f.base)).collect();
        assert_eq!(kept, [(0, 16, 0), (32, 224, 0)]);
    }

    #[test]
    fn an_aligned_append_copies_nothing() {
        let plan = write(128 * KIB..256 * KIB, 128 * KIB, &[fragment(0, 32, 2, 1)]);
        assert_eq!((plan.rewrite, plan.length), (32..64, 256 * KIB));
        assert!(plan.copies.iter().all(Range::is_empty));
        assert_eq!(plan.kept, [fragment(0, 32, 2, 1)]);
    }

    #[test]
    fn a_write_inside_one_page_copies_that_page_once() {
        let plan = write(10..20, 100, &[fragment(0, 1, 1, 0)]);
        assert_eq!((plan.rewrite, plan.copies), (0..1, [0..1, 1..1]));
        let plan = write(10..100, 100, &[fragment(0, 1, 1, 0)]);
        assert_eq!(plan.copies, [0..1, 1..1]);
        let plan = write(0..50, 100, &[fragment(0, 1, 1, 0)]);
        assert_eq!(plan.copies, [0..0, 0..1]);
    }

    #[test]
    fn a_truncation_rewrites_only_the_segment_that_it_cuts_and_leaves_no_large_block() {
        let old = [fragment(0, 256, 16, 4)];
        let plan = plan_truncate(512 * KIB, 1024 * KIB, &old);
        assert_eq!((plan.rewrite.len(), plan.kept[0].pages), (0, 128));
        let plan = plan_truncate(64 * KIB, 1024 * KIB, &old);
        assert_eq!((plan.rewrite, plan.kept.len()), (0..16, 0));
        let plan =
            plan_truncate(70 * KIB, 1024 * KIB, &[fragment(0, 16, 1, 0), fragment(16, 16, 2, 0)]);
        assert_eq!((plan.rewrite, plan.copies[0].clone()), (16..18, 16..18));
        let plan = plan_truncate(2048 * KIB, 1024 * KIB, &old);
        assert_eq!((plan.rewrite.len(), plan.length), (0, 2048 * KIB));
    }

    #[test]
    fn overwritten_parts_of_large_blocks_do_not_pile_up() {
        let mut fragments = vec![fragment(0, 256, 16, 4)];
        fragments[0].pages = 8;
        fragments.push(Fragment { page: 8, pages: 248, ..fragment(8, 248, 32, 4) });
        let plan = write(960 * KIB..1024 * KIB, 1024 * KIB, &fragments);
        assert_eq!((plan.rewrite, plan.kept), (0..256, vec![]));
    }

    #[test]
    fn malformed_updates_are_refused() {
        let chunk = ChunkId { file: InodeId::new(1), index: 0 };
        let place = Place { target: TargetId::new(1), chunk };
        let refused = |op| matches!(plan(place, &op, None), Err(Error::BadUpdate { .. }));
        let write = |offset, bytes: &'static [u8]| {
            let bytes = Bytes::from_static(bytes);
            Op::Write { offset, checksum: crc32c::crc32c(&bytes), bytes }
        };
        assert!(refused(write(0, b"")));
        assert!(refused(write(MAX_CHUNK_SIZE, b"x")));
        assert!(refused(write(u64::MAX, b"x")));
        assert!(refused(Op::Truncate { length: MAX_CHUNK_SIZE + 1 }));
    }
}
