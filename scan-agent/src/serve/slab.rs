//! The shared ring of one scan: batches are placed in it, and their room returns when the client
//! releases them or is gone.
//!
//! Room is bounded and fixed at the start; a client that does not release stops the scan, nothing
//! else. The client shares the memory and may scribble over it: that hurts only itself, because
//! nothing is ever read back from here.

use std::collections::BTreeMap;
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

    /// Waits for `len` bytes in one piece; none once the client is gone. `len` must not exceed
    /// [`Slab::size`], or the wait would never end.
    pub(super) fn take(&self, len: usize) -> Option<Room> {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if ledger.is_closed || len > self.size {
                return None;
            }
            if let Some(offset) = ledger.first_fit(len, self.size) {
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
    fn first_fit(&self, len: usize, size: usize) -> Option<usize> {
        let mut start = 0;
        for (&offset, lease) in &self.held {
            if offset - start >= len {
                return Some(start);
            }
            start = (offset + lease.len).next_multiple_of(ALIGNMENT);
        }
        (size.saturating_sub(start) >= len).then_some(start)
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
        let slab = Slab::new(4096).unwrap();
        assert_eq!(offset(&slab, 100), (0, 0));
        assert_eq!(offset(&slab, 1000), (1, 128));
        assert_eq!(offset(&slab, 2900), (2, 1152));
        assert!(slab.release(1));
        assert!(!slab.release(1), "released twice");
        assert_eq!(offset(&slab, 1024), (3, 128));
        assert!(slab.take(4097).is_none());
    }

    #[test]
    fn a_full_ring_waits_for_a_release_and_ends_when_the_client_is_gone() {
        let slab = Arc::new(Slab::new(4096).unwrap());
        let first = slab.take(4096).unwrap();
        let waiter = Arc::clone(&slab);
        let waiting = thread::spawn(move || (waiter.take(4096), waiter.take(4096)));
        assert!(slab.release(first.id));
        while slab.release(first.id + 1) || !slab.ledger.lock().unwrap().held.contains_key(&0) {
            thread::yield_now();
        }
        slab.close();
        let (second, third) = waiting.join().unwrap();
        assert!(second.is_some());
        assert!(slab.is_closed());
        assert!(third.is_none() || third.is_some_and(|room| room.id == 2));
    }
}
