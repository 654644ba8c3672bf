//! A queue of fixed 64-byte entries in shared memory, one producer and one consumer, in two processes that need not trust
//! each other.
//!
//! ```text
//! +0    u32 head     entries taken, free-running    written by the consumer
//! +64   u32 tail     entries published, free-running written by the producer
//! +128  u32 sleeping 1 while the consumer waits for the doorbell
//! +192  entry[entries], 64 bytes each; entry i of the stream lies at i mod entries
//! ```
//! Each side keeps its own index in private memory and only ever *writes* it to the region; the other side's index is read
//! once a call and checked against the private one. Entries are read word by word, once, into a copy.
//!
//! No wake-up is lost: the consumer stores `sleeping`, then looks at `tail` again; the producer stores `tail`, then looks at
//! `sleeping`; with a full fence between on both sides, one of them sees the other. A lying peer can only fail to wake, or
//! wake for nothing, itself.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use crate::event::EventFd;
use crate::shm::{Region, ShmError};

/// Size of an entry in bytes.
pub const ENTRY_BYTES: usize = 64;

/// Most entries of one queue.
pub const ENTRIES_MAX: u32 = 1 << 16;

const HEAD: usize = 0;
const TAIL: usize = 64;
const SLEEPING: usize = 128;
const ENTRIES: usize = 192;

/// One entry: eight little-endian words whose meaning belongs to the user of the queue.
pub type Entry = [u64; 8];

/// Why a queue is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The number of entries is not a power of two between 1 and [`ENTRIES_MAX`].
    #[error("queue of {0} entries, must be a power of two up to {ENTRIES_MAX}")]
    Entries(u32),
    /// The queue does not fit into the region.
    #[error("queue outside its region")]
    Region(#[from] ShmError),
    /// The peer published an index that no honest peer can reach.
    #[error("peer misbehaved: index {theirs} against {ours} with {entries} entries")]
    PeerMisbehaved {
        /// The peer's index.
        theirs: u32,
        /// The private index of this side.
        ours: u32,
        /// Entries of the queue.
        entries: u32,
    },
    /// Waiting for the doorbell failed.
    #[error("wait for doorbell")]
    Wait(#[source] std::io::Error),
}

/// Bytes that a queue of `entries` needs; a multiple of 64.
#[must_use]
pub const fn queue_bytes(entries: u32) -> usize {
    ENTRIES + entries as usize * ENTRY_BYTES
}

/// What both ends hold.
#[derive(Debug)]
struct Queue {
    region: Arc<Region>,
    at: usize,
    entries: u32,
    doorbell: EventFd,
}

impl Queue {
    fn new(
        region: Arc<Region>,
        at: usize,
        entries: u32,
        doorbell: EventFd,
    ) -> Result<Self, QueueError> {
        if !entries.is_power_of_two() || entries > ENTRIES_MAX {
            return Err(QueueError::Entries(entries));
        }
        let end = at.saturating_add(queue_bytes(entries));
        if end > region.len() || !at.is_multiple_of(64) {
            let bounds =
                ShmError::Bounds { offset: at, len: queue_bytes(entries), size: region.len() };
            return Err(bounds.into());
        }
        Ok(Self { region, at, entries, doorbell })
    }

    fn load(&self, field: usize) -> Result<u32, QueueError> {
        Ok(self.region.atomic_u32(self.at + field)?.load(Ordering::Acquire))
    }

    fn store(&self, field: usize, value: u32) -> Result<(), QueueError> {
        self.region.atomic_u32(self.at + field)?.store(value, Ordering::Release);
        Ok(())
    }

    fn entry_at(&self, index: u32) -> usize {
        let slot = index & (self.entries - 1);
        self.at + ENTRIES + slot as usize * ENTRY_BYTES
    }
}

/// The end that publishes entries.
#[derive(Debug)]
pub struct Producer {
    queue: Queue,
    tail: u32,
}

impl Producer {
    /// The producing end of a fresh queue of `entries` at `at` (a multiple of 64) in `region`.
    ///
    /// # Errors
    /// [`QueueError::Entries`], [`QueueError::Region`].
    pub fn new(
        region: Arc<Region>,
        at: usize,
        entries: u32,
        doorbell: EventFd,
    ) -> Result<Self, QueueError> {
        Ok(Self { queue: Queue::new(region, at, entries, doorbell)?, tail: 0 })
    }

    /// Entries that can be pushed before the consumer takes one.
    ///
    /// # Errors
    /// [`QueueError::PeerMisbehaved`].
    pub fn space(&self) -> Result<u32, QueueError> {
        let head = self.queue.load(HEAD)?;
        let used = self.tail.wrapping_sub(head);
        let entries = self.queue.entries;
        if used > entries {
            return Err(QueueError::PeerMisbehaved { theirs: head, ours: self.tail, entries });
        }
        Ok(entries - used)
    }

    /// Publishes `entry`; false if the queue is full. The consumer may see it at once; [`ring`](Self::ring) wakes it.
    ///
    /// # Errors
    /// [`QueueError::PeerMisbehaved`].
    pub fn push(&mut self, entry: &Entry) -> Result<bool, QueueError> {
        if self.space()? == 0 {
            return Ok(false);
        }
        let at = self.queue.entry_at(self.tail);
        for (index, word) in entry.iter().enumerate() {
            self.queue.region.atomic_u64(at + index * 8)?.store(*word, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        self.queue.store(TAIL, self.tail)?;
        Ok(true)
    }

    /// Wakes the consumer if it sleeps. Call once after a batch of pushes.
    ///
    /// # Errors
    /// Never for a queue that was made; the type allows for a region that changed.
    pub fn ring(&self) -> Result<(), QueueError> {
        fence(Ordering::SeqCst);
        let sleeping = self.queue.region.atomic_u32(self.queue.at + SLEEPING)?;
        if sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::SeqCst) != 0 {
            self.queue.doorbell.notify();
        }
        Ok(())
    }
}

/// The end that takes entries.
#[derive(Debug)]
pub struct Consumer {
    queue: Queue,
    head: u32,
}

impl Consumer {
    /// The consuming end of a fresh queue of `entries` at `at` (a multiple of 64) in `region`.
    ///
    /// # Errors
    /// [`QueueError::Entries`], [`QueueError::Region`].
    pub fn new(
        region: Arc<Region>,
        at: usize,
        entries: u32,
        doorbell: EventFd,
    ) -> Result<Self, QueueError> {
        Ok(Self { queue: Queue::new(region, at, entries, doorbell)?, head: 0 })
    }

    /// Takes the next entry, if one is published.
    ///
    /// # Errors
    /// [`QueueError::PeerMisbehaved`].
    pub fn pop(&mut self) -> Result<Option<Entry>, QueueError> {
        if self.ready()? == 0 {
            return Ok(None);
        }
        let at = self.queue.entry_at(self.head);
        let mut entry = [0; 8];
        for (index, word) in entry.iter_mut().enumerate() {
            *word = self.queue.region.atomic_u64(at + index * 8)?.load(Ordering::Relaxed);
        }
        self.head = self.head.wrapping_add(1);
        self.queue.store(HEAD, self.head)?;
        Ok(Some(entry))
    }

    /// Entries published and not taken.
    ///
    /// # Errors
    /// [`QueueError::PeerMisbehaved`].
    pub fn ready(&self) -> Result<u32, QueueError> {
        let tail = self.queue.load(TAIL)?;
        let ready = tail.wrapping_sub(self.head);
        let entries = self.queue.entries;
        if ready > entries {
            return Err(QueueError::PeerMisbehaved { theirs: tail, ours: self.head, entries });
        }
        Ok(ready)
    }

    /// Says that this side is about to sleep on the doorbell. True if entries are there already: then do not sleep.
    /// For callers that wait for several descriptors at once; after waking they call [`end_sleep`](Self::end_sleep).
    ///
    /// # Errors
    /// [`QueueError::PeerMisbehaved`].
    pub fn begin_sleep(&self) -> Result<bool, QueueError> {
        self.queue.region.atomic_u32(self.queue.at + SLEEPING)?.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Ok(self.ready()? > 0)
    }

    /// Takes the word of [`begin_sleep`](Self::begin_sleep) back and drains the doorbell.
    ///
    /// # Errors
    /// Never for a queue that was made.
    pub fn end_sleep(&self) -> Result<(), QueueError> {
        self.queue.store(SLEEPING, 0)?;
        let _ = self.queue.doorbell.drain();
        Ok(())
    }

    /// Waits until an entry is there; false at the timeout (`None` waits for ever).
    ///
    /// # Errors
    /// [`QueueError::PeerMisbehaved`], [`QueueError::Wait`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool, QueueError> {
        let deadline = timeout.map(|timeout| std::time::Instant::now() + timeout);
        loop {
            if self.ready()? > 0 {
                return Ok(true);
            }
            let left = deadline.map(|at| at.saturating_duration_since(std::time::Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            if !self.begin_sleep()? {
                self.queue.doorbell.wait(left).map_err(QueueError::Wait)?;
            }
            self.queue.store(SLEEPING, 0)?;
        }
    }

    /// The doorbell, to poll together with other descriptors.
    #[must_use]
    pub const fn doorbell(&self) -> &EventFd {
        &self.queue.doorbell
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(entries: u32) -> (Producer, Consumer, Arc<Region>) {
        let region = Arc::new(Region::create("t", queue_bytes(entries)).unwrap());
        let bell = EventFd::new().unwrap();
        let twin = bell.try_clone().unwrap();
        let producer = Producer::new(Arc::clone(&region), 0, entries, bell).unwrap();
        let consumer = Consumer::new(Arc::clone(&region), 0, entries, twin).unwrap();
        (producer, consumer, region)
    }

    #[test]
    fn entries_come_out_in_order_and_a_full_queue_says_so() {
        let (mut producer, mut consumer, _) = pair(4);
        for round in 0..5u64 {
            for n in 0..4 {
                assert!(producer.push(&[round * 10 + n; 8]).unwrap());
            }
            assert!(!producer.push(&[99; 8]).unwrap());
            for n in 0..4 {
                assert_eq!(consumer.pop().unwrap(), Some([round * 10 + n; 8]));
            }
            assert_eq!(consumer.pop().unwrap(), None);
        }
    }

    #[test]
    fn no_wakeup_is_lost_between_two_sleeping_threads() {
        const COUNT: u64 = 200_000;
        let (mut to, mut from_other, _keep) = pair(8);
        let (mut back, mut from_back, _keep_too) = pair(2);
        let echo = std::thread::spawn(move || {
            for _ in 0..COUNT {
                while from_other.ready().unwrap() == 0 {
                    assert!(from_other.wait(Some(Duration::from_secs(20))).unwrap(), "lost");
                }
                let entry = from_other.pop().unwrap().unwrap();
                assert!(back.push(&entry).unwrap());
                back.ring().unwrap();
            }
        });
        for n in 0..COUNT {
            assert!(to.push(&[n; 8]).unwrap());
            to.ring().unwrap();
            assert!(from_back.wait(Some(Duration::from_secs(20))).unwrap(), "lost at {n}");
            assert_eq!(from_back.pop().unwrap(), Some([n; 8]));
        }
        echo.join().unwrap();
    }

    #[test]
    fn a_peer_that_lies_about_its_index_is_found_out() {
        let (mut producer, mut consumer, region) = pair(4);
        assert!(producer.push(&[1; 8]).unwrap());
        region.atomic_u32(TAIL).unwrap().store(u32::MAX, Ordering::Release);
        let lied = consumer.pop();
        assert!(
            matches!(lied, Err(QueueError::PeerMisbehaved { theirs: u32::MAX, .. })),
            "{lied:?}"
        );
        region.atomic_u32(HEAD).unwrap().store(77, Ordering::Release);
        assert!(matches!(producer.push(&[1; 8]), Err(QueueError::PeerMisbehaved { .. })));
    }

    #[test]
    fn indices_survive_wrapping_around() {
        let (mut producer, mut consumer, region) = pair(2);
        producer.tail = u32::MAX;
        consumer.head = u32::MAX;
        region.atomic_u32(HEAD).unwrap().store(u32::MAX, Ordering::Release);
        region.atomic_u32(TAIL).unwrap().store(u32::MAX, Ordering::Release);
        for n in 0..4 {
            assert!(producer.push(&[n; 8]).unwrap());
            assert_eq!(consumer.pop().unwrap(), Some([n; 8]));
        }
    }

    #[test]
    fn a_queue_must_fit_and_be_a_power_of_two() {
        let region = Arc::new(Region::create("t", queue_bytes(4)).unwrap());
        let make = |at, entries| {
            Producer::new(Arc::clone(&region), at, entries, EventFd::new().unwrap()).map(|_| ())
        };
        assert!(make(0, 4).is_ok());
        assert!(matches!(make(0, 3), Err(QueueError::Entries(3))));
        assert!(matches!(make(0, 0), Err(QueueError::Entries(0))));
        assert!(matches!(make(0, 8), Err(QueueError::Region(_))));
        assert!(matches!(make(64, 4), Err(QueueError::Region(_))));
        assert!(matches!(make(usize::MAX & !63, 2), Err(QueueError::Region(_))));
    }
}
