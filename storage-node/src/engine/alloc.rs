//! The free map: which parts of the block file hold blocks.
//!
//! A buddy allocator over 64 KiB units keeps blocks of 64 KiB to 64 MiB in one file, so that one
//! fdatasync covers all of them and space moves freely between sizes. The map lives in memory;
//! after a crash it follows from the block records, so a block that no record names is free.
//!
//! A block that leaves the metadata may still be under a reader that looked it up before. Each
//! reader enters with the current epoch; a retired block is reused only when every reader that
//! entered before has left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Smallest block, in bytes.
pub(super) const UNIT: u64 = 64 << 10;
/// Order of the largest block: 64 MiB.
pub(super) const MAX_ORDER: u8 = 10;
/// Units by which the file grows at once: 16 MiB, so that growth is rare beside writes.
const GROWTH_UNITS: u64 = 256;

/// A piece of the block file: 2^order units at a multiple of its own size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Block {
    unit: u64,
    order: u8,
}

impl Block {
    /// `None` unless aligned, of a known order, and behind the header unit.
    pub(super) fn new(unit: u64, order: u8) -> Option<Self> {
        let is_valid =
            order <= MAX_ORDER && unit > 0 && unit < 1 << 48 && unit.is_multiple_of(1 << order);
        is_valid.then_some(Self { unit, order })
    }

    /// As one number: unit above, order in the lowest byte.
    pub(super) fn to_raw(self) -> u64 {
        self.unit << 8 | u64::from(self.order)
    }

    /// The inverse of [`Block::to_raw`].
    pub(super) fn from_raw(raw: u64) -> Option<Self> {
        Self::new(raw >> 8, raw.to_le_bytes()[0])
    }

    pub(super) fn offset(self) -> u64 {
        self.unit * UNIT
    }

    pub(super) fn size(self) -> u64 {
        UNIT << self.order
    }

    fn units(self) -> u64 {
        1 << self.order
    }
}

/// Why the free map could not be built.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Overlap(pub(super) Block, pub(super) Block);

/// A block was not to be had.
#[derive(Debug)]
pub(super) enum AllocError {
    /// Nothing large enough is free; `free_bytes` are, in smaller pieces or not backed.
    NoSpace { wanted_bytes: u64, free_bytes: u64 },
    /// The file could not grow for another reason.
    Io(io::Error),
}

#[derive(Debug)]
struct Map {
    free: [BTreeSet<u64>; MAX_ORDER as usize + 1],
    total: u64,
    used: u64,
    /// Units that the file system has set aside; the file's length.
    backed: u64,
    epoch: u64,
    readers: BTreeMap<u64, usize>,
    retired: VecDeque<(u64, Block)>,
}

/// The free map, shared by writers, readers and the log.
#[derive(Debug)]
pub(super) struct Allocator {
    map: Mutex<Map>,
}

impl Allocator {
    /// A map of `total` units of which `backed` exist in the file, with `used` taken.
    pub(super) fn new(total: u64, backed: u64, mut used: Vec<Block>) -> Result<Self, Overlap> {
        used.sort_unstable();
        if let Some(pair) = used.windows(2).find(|w| w[0].unit + w[0].units() > w[1].unit) {
            return Err(Overlap(pair[0], pair[1]));
        }
        let end = used.last().map_or(1, |b| b.unit + b.units());
        let mut map = Map {
            free: Default::default(),
            total: total.max(end),
            used: used.iter().map(|b| b.units()).sum(),
            backed,
            epoch: 0,
            readers: BTreeMap::new(),
            retired: VecDeque::new(),
        };
        let mut from = 1;
        for block in used {
            map.free_range(from, block.unit);
            from = block.unit + block.units();
        }
        map.free_range(from, map.total);
        Ok(Self { map: Mutex::new(map) })
    }

    /// Takes a block of at least `bytes`; `grow(from, to)` sets bytes of the file aside.
    pub(super) fn take(
        self: &Arc<Self>,
        bytes: u64,
        grow: impl Fn(u64, u64) -> io::Result<()>,
    ) -> Result<Allocation, AllocError> {
        let size = bytes.max(UNIT).next_power_of_two();
        let mut map = self.lock();
        map.release();
        let no_space = |map: &Map| AllocError::NoSpace {
            wanted_bytes: size,
            free_bytes: (map.total - map.used).saturating_sub(1) * UNIT,
        };
        let order = u8::try_from((size / UNIT).trailing_zeros()).unwrap_or(u8::MAX);
        let block = map.take(order).ok_or_else(|| no_space(&map))?;
        match map.back(block, grow) {
            Ok(()) => Ok(Allocation { allocator: Arc::clone(self), block, is_kept: false }),
            Err(e) => {
                map.give(block);
                let is_full = matches!(
                    e.kind(),
                    io::ErrorKind::StorageFull
                        | io::ErrorKind::QuotaExceeded
                        | io::ErrorKind::FileTooLarge
                );
                Err(if is_full { no_space(&map) } else { AllocError::Io(e) })
            }
        }
    }

    /// Marks the time from which a reader looks up blocks until it has read them.
    pub(super) fn enter(self: &Arc<Self>) -> Reader {
        let mut map = self.lock();
        let epoch = map.epoch;
        *map.readers.entry(epoch).or_default() += 1;
        Reader { allocator: Arc::clone(self), epoch }
    }

    /// Gives back blocks that durable metadata no longer names, once no reader can hold them.
    pub(super) fn retire(&self, blocks: impl IntoIterator<Item = Block>) {
        let mut map = self.lock();
        let epoch = map.epoch;
        map.retired.extend(blocks.into_iter().map(|block| (epoch, block)));
        map.epoch += 1;
        map.release();
    }

    /// (total, used) in bytes, without the header unit.
    pub(super) fn space(&self) -> (u64, u64) {
        let map = self.lock();
        ((map.total - 1) * UNIT, map.used * UNIT)
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Map {
    /// Adds units `from..to`, in the largest aligned pieces.
    fn free_range(&mut self, mut from: u64, to: u64) {
        while from < to {
            let by_alignment = from.trailing_zeros().min(u32::from(MAX_ORDER));
            let order = by_alignment.min((to - from).ilog2());
            self.free_list(order).insert(from);
            from += 1 << order;
        }
    }

    fn free_list(&mut self, order: u32) -> &mut BTreeSet<u64> {
        let last = usize::from(MAX_ORDER);
        &mut self.free[usize::try_from(order).unwrap_or(last).min(last)]
    }

    /// The tightest piece of what the file has already, else the one that lengthens it least.
    fn take(&mut self, order: u8) -> Option<Block> {
        let lowest: Vec<_> = (order..=MAX_ORDER)
            .filter_map(|found| Some((*self.free_list(found.into()).first()?, found)))
            .collect();
        let is_backed = |(unit, _): &&(u64, u8)| unit + (1 << order) <= self.backed;
        let (unit, found) = *lowest.iter().find(is_backed).or_else(|| lowest.iter().min())?;
        self.free_list(found.into()).remove(&unit);
        for half in order..found {
            self.free_list(half.into()).insert(unit + (1 << half));
        }
        self.used += 1 << order;
        Some(Block { unit, order })
    }

    fn give(&mut self, block: Block) {
        self.used -= block.units();
        let Block { mut unit, mut order } = block;
        while order < MAX_ORDER && self.free_list(order.into()).remove(&(unit ^ (1 << order))) {
            unit &= !(1 << order);
            order += 1;
        }
        self.free_list(order.into()).insert(unit);
    }

    /// Makes sure that the file system has set the block aside, so that writing it cannot fail
    /// for want of space.
    fn back(&mut self, block: Block, grow: impl Fn(u64, u64) -> io::Result<()>) -> io::Result<()> {
        let end = block.unit + block.units();
        if end <= self.backed {
            return Ok(());
        }
        let generous = end.max(self.backed + GROWTH_UNITS).min(self.total);
        let grown = grow(self.backed * UNIT, generous * UNIT).map(|()| generous);
        self.backed = grown.or_else(|_| grow(self.backed * UNIT, end * UNIT).map(|()| end))?;
        Ok(())
    }

    fn release(&mut self) {
        let oldest = self.readers.first_key_value().map_or(self.epoch, |(epoch, _)| *epoch);
        while let Some((_, block)) = self.retired.pop_front_if(|(epoch, _)| *epoch < oldest) {
            self.give(block);
        }
    }
}

/// A block that no metadata names yet; given back when dropped, unless kept.
#[derive(Debug)]
pub(super) struct Allocation {
    allocator: Arc<Allocator>,
    block: Block,
    is_kept: bool,
}

impl Allocation {
    pub(super) fn block(&self) -> Block {
        self.block
    }

    /// The metadata that names the block is durable.
    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if !self.is_kept {
            self.allocator.lock().give(self.block);
        }
    }
}

/// A reader between lookup and end of read.
#[derive(Debug)]
pub(super) struct Reader {
    allocator: Arc<Allocator>,
    epoch: u64,
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut map = self.allocator.lock();
        if let Some(count) = map.readers.get_mut(&self.epoch) {
            *count -= 1;
            if *count == 0 {
                map.readers.remove(&self.epoch);
                map.release();
            }
        }
    }
}

#[cfg(test)]
mod tests;
