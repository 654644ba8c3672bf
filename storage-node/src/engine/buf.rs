//! Page-aligned memory for O_DIRECT, without unsafe code.
//!
//! Large buffers that are gone leave their memory to the next reads: fresh memory costs its zeroing
//! and a fault for each page, a good part of what a read costs whose bytes are not on a slow disk.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::checksum::PAGE_SIZE;

/// Memory that is kept for later, in bytes over all engines of the process.
const KEPT_MAX: usize = 16 << 20;
/// Lengths worth keeping: smaller ones are cheap, larger ones are rare.
const KEPT_LENGTHS: RangeInclusive<usize> = 64 << 10..=4 << 20;

static KEPT: Kept = Kept(Mutex::new(Vec::new()));

/// Memory of buffers that are gone, the oldest first.
struct Kept(Mutex<Vec<Vec<u8>>>);

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory with room for `len` bytes and not for much more.
    fn take(&self, len: usize) -> Option<Vec<u8>> {
        let mut kept = self.lock();
        let fits = |memory: &Vec<u8>| (len + PAGE_SIZE..=2 * len).contains(&memory.len());
        let at = kept.iter().rposition(fits)?;
        Some(kept.remove(at))
    }

    /// Keeps memory; the oldest goes where there is too much.
    fn give(&self, memory: Vec<u8>) {
        let mut kept = self.lock();
        let mut over = kept.iter().map(Vec::len).sum::<usize>() + memory.len();
        let stay = kept.iter().position(|old| {
            let is_enough = over <= KEPT_MAX;
            over -= if is_enough { 0 } else { old.len() };
            is_enough
        });
        let gone = stay.unwrap_or(kept.len());
        kept.drain(..gone);
        kept.push(memory);
    }
}

/// Memory that starts at a multiple of [`PAGE_SIZE`] and has a multiple of it as length.
pub(crate) struct AlignedBuf {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// `pages` pages of zeros.
    pub(crate) fn zeroed(pages: usize) -> Self {
        let len = pages * PAGE_SIZE;
        Self::within(vec![0; len + PAGE_SIZE], len)
    }

    /// `pages` pages to read into. They hold anything, also bytes of other chunks: nobody may see
    /// them before all of them were read and verified.
    pub(crate) fn for_reading(pages: usize) -> Self {
        let len = pages * PAGE_SIZE;
        let kept = KEPT_LENGTHS.contains(&len).then(|| KEPT.take(len)).flatten();
        kept.map_or_else(|| Self::zeroed(pages), |memory| Self::within(memory, len))
    }

    fn within(memory: Vec<u8>, len: usize) -> Self {
        // The vector never grows, so its memory stays where it is when the vector moves.
        let start = memory.as_ptr().addr().next_multiple_of(PAGE_SIZE) - memory.as_ptr().addr();
        Self { memory, start, len }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes, shared without a copy.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if KEPT_LENGTHS.contains(&self.len) {
            KEPT.give(std::mem::take(&mut self.memory));
        }
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self.memory.get(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl AsMut<[u8]> for AlignedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self.memory.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_of_the_asked_length() {
        for pages in [0, 1, 3, 16] {
            let buf = AlignedBuf::zeroed(pages);
            assert_eq!(buf.as_ref().as_ptr().addr() % PAGE_SIZE, 0);
            assert_eq!(buf.as_ref(), vec![0; pages * PAGE_SIZE]);
        }
    }

    #[test]
    fn memory_to_read_into_has_the_asked_length_whatever_it_served_before() {
        // Other tests take and give at the same time, so nothing is said of where memory is from.
        for pages in [1, 16, 256, 17, 300, 64, 1025] {
            for _ in 0..3 {
                let mut buf = AlignedBuf::for_reading(pages);
                assert_eq!(buf.as_ref().as_ptr().addr() % PAGE_SIZE, 0);
                assert_eq!((buf.len(), buf.as_ref().len()), (pages * PAGE_SIZE, buf.len()));
                buf.as_mut().fill(0xff);
            }
            assert!(AlignedBuf::zeroed(pages).as_ref().iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn the_newest_memory_is_kept_up_to_the_bound_and_taken_for_what_it_fits() {
        let kept = Kept(Mutex::new(Vec::new()));
        let (small, large) = (64 << 10, 1 << 20);
        let held = || kept.lock().iter().map(Vec::len).collect::<Vec<_>>();
        (0..1000).for_each(|_| kept.give(vec![0; small + PAGE_SIZE]));
        assert!(held().iter().sum::<usize>() <= KEPT_MAX && held().len() > 200);
        kept.give(vec![0; large + PAGE_SIZE]);
        assert!(held().iter().sum::<usize>() <= KEPT_MAX);
        assert_eq!(kept.take(large).unwrap().len(), large + PAGE_SIZE);
        assert_eq!(kept.take(large), None, "none of the small ones has room");
        assert_eq!(kept.take(small).unwrap().len(), small + PAGE_SIZE);
        kept.give(vec![0; large + PAGE_SIZE]);
        assert_eq!(kept.take(large / 4), None, "four times as much");
        (0..100).for_each(|_| kept.give(vec![0; large + PAGE_SIZE]));
        assert_eq!(held(), [large + PAGE_SIZE; 15]);
    }
}
