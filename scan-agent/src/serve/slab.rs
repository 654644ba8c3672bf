//! The shared ring of one scan: batches are placed in it, and their room returns when the client
//! releases them or is gone.
//!
//! A batch lies in the lower half of the ring, where the client may use it for as long as it likes. When
//! the client waits for the next one and keeps so much, or in such pieces, that the lower half has no
//! room, the next one lies in the upper half. What lies there, the client copies and releases before it
//! waits again. So the upper half is empty whenever the client waits, and any batch fits: a scan never
//! waits for a batch that its consumer still uses.
//!
//! Room is bounded and fixed at the start; a client that does not release stops the scan, nothing
//! else. The client shares the memory and may scribble over it: that hurts only itself, because
//! nothing is ever read back from here.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

use ring::shm::{Region, ShmError};

/// Every buffer begins at a multiple of this: what Arrow recommends and SIMD likes.
pub(super) const ALIGNMENT: usize = 64;

/// A ring's memory and who holds which part of it.
#[derive(Debug)]
pub(super) struct Slab {
    region: Region,
    size: usize,
    ledger: Mutex<Ledger>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Ledger {
    /// Held room by offset.
    held: BTreeMap<usize, Lease>,
    next_id: u64,
    /// The batch that the client waits for, by its number.
    wanted: Option<u64>,
    is_closed: bool,
}

#[derive(Debug)]
struct Lease {
    id: u64,
    len: usize,
}

/// Room for one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// Number to release it by.
    pub(super) id: u64,
    /// First byte.
    pub(super) offset: usize,
}

impl Slab {
    /// A ring of `size` bytes.
    pub(super) fn new(size: usize) -> Result<Self, ShmError> {
        Ok(Self {
            region: Region::create("lampyris-scan", size)?,
            size,
            ledger: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// The memory, for handing its descriptor over and for writing.
    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes of the ring.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Bytes of the largest batch: half of the ring.
    pub(super) fn largest(&self) -> usize {
        self.size / 2
    }

    /// Waits for `len` bytes in one piece; none once the client is gone, or when `len` exceeds
    /// [`Slab::largest`], for which the wait would never end.
    pub(super) fn take(&self, len: usize) -> Option<Room> {
        let (lower, upper) = (0..self.largest(), self.largest()..self.size);
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if ledger.is_closed || len > self.largest() {
                return None;
            }
            let is_wanted = ledger.wanted == Some(ledger.next_id);
            let beside = || is_wanted.then(|| ledger.first_fit(len, &upper)).flatten();
            if let Some(offset) = ledger.first_fit(len, &lower).or_else(beside) {
                let id = ledger.next_id;
                ledger.next_id += 1;
                ledger.held.insert(offset, Lease { id, len });
                return Some(Room { id, offset });
            }
            ledger = self.changed.wait(ledger).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives a batch's room back; false if the client does not hold it.
    pub(super) fn release(&self, id: u64) -> bool {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let before = ledger.held.len();
        ledger.held.retain(|_, lease| lease.id != id);
        self.changed.notify_all();
        ledger.held.len() < before
    }

    /// The client has read this many batches and waits for the next.
    pub(super) fn want(&self, read: u64) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.wanted = Some(read);
        self.changed.notify_all();
    }

    /// Ends every wait: the client is gone.
    pub(super) fn close(&self) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.is_closed = true;
        self.changed.notify_all();
    }

    /// Whether the client is gone.
    pub(super) fn is_closed(&self) -> bool {
        let ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.is_closed
    }
}

impl Ledger {
    fn first_fit(&self, len: usize, within: &Range<usize>) -> Option<usize> {
        let mut start = within.start;
        for (&offset, lease) in self.held.range(within.clone()) {
            if offset - start >= len {
                return Some(start);
            }
            start = (offset + lease.len).next_multiple_of(ALIGNMENT);
        }
        (within.end.saturating_sub(start) >= len).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    fn offset(slab: &Slab, len: usize) -> (u64, usize) {
        let room = slab.take(len).unwrap();
        (room.id, room.offset)
    }

    #[test]
    fn room_is_aligned_disjoint_and_reused() {
        let slab = Slab::new(8192).unwrap();
        assert_eq!(offset(&slab, 100), (0, 0));
        assert_eq!(offset(&slab, 1000), (1, 128));
        assert_eq!(offset(&slab, 2900), (2, 1152));
        assert!(slab.release(1));
        assert!(!slab.release(1), "released twice");
        assert_eq!(offset(&slab, 1024), (3, 128));
        assert!(slab.take(4097).is_none(), "half of the ring is 4096 bytes");
    }

    #[test]
    fn the_next_batch_fits_whatever_a_client_keeps_of_the_lower_half() {
        let slab = Slab::new(1 << 20).unwrap();
        let mut random = 1_u64;
        let mut below = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % bound
        };
        let mut kept: Vec<u64> = Vec::new();
        for round in 0..10_000 {
            slab.want(round);
            let share = 1 << below(6);
            let len = usize::try_from(1 + below(slab.largest() as u64 / share)).unwrap();
            let upper = slab.largest()..slab.size();
            let is_room = {
                let ledger = slab.ledger.lock().unwrap();
                ledger.first_fit(len, &upper).is_some()
            };
            assert!(is_room, "round {round}: no room for {len} bytes beside {} kept", kept.len());
            let (id, at) = offset(&slab, len);
            if at >= slab.largest() {
                assert!(slab.release(id));
            } else {
                kept.push(id);
            }
            // It uses some for long, and lets others go in any order.
            while !kept.is_empty() && below(3) == 0 {
                let index = usize::try_from(below(kept.len() as u64)).unwrap();
                assert!(slab.release(kept.swap_remove(index)));
            }
        }
    }

    #[test]
    fn a_client_that_waits_gets_the_upper_half_once() {
        let slab = Arc::new(Slab::new(8192).unwrap());
        assert_eq!(offset(&slab, 4000), (0, 0));
        slab.want(1);
        assert_eq!(offset(&slab, 4000), (1, 4096));
        assert!(slab.release(1));
        let waiter = Arc::clone(&slab);
        let waiting = thread::spawn(move || waiter.take(4000));
        slab.want(1); // Said before the second batch came, and too late.
        thread::yield_now();
        assert!(!slab.ledger.lock().unwrap().held.values().any(|lease| lease.id == 2));
        slab.want(2);
        assert_eq!(waiting.join().unwrap(), Some(Room { id: 2, offset: 4096 }));
    }

    #[test]
    fn a_full_ring_waits_for_a_release_and_ends_when_the_client_is_gone() {
        let slab = Arc::new(Slab::new(8192).unwrap());
        let first = slab.take(4096).unwrap();
        let waiter = Arc::clone(&slab);
        let waiting = thread::spawn(move || (waiter.take(4096), waiter.take(4096)));
        assert!(
            slab.release(first.id),
            "the second batch takes its place: nobody has said that he waits"
        );
        let has = |id| slab.ledger.lock().unwrap().held.values().any(|lease| lease.id == id);
        while !has(1) {
            thread::yield_now();
        }
        slab.close();
        let (second, third) = waiting.join().unwrap();
        assert_eq!(second, Some(Room { id: 1, offset: 0 }));
        assert_eq!(third, None);
        assert!(slab.is_closed());
    }
}
