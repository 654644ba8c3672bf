//! One thread that drives one io_uring. The only module of this crate with `unsafe`.
//!
//! The kernel reads and writes memory after the call that submitted it has returned. So the
//! thread owns file and buffer of every request from submission until its completion was
//! reaped, and ends only when none is in flight.

#![expect(unsafe_code, reason = "the kernel is given pointers into buffers that this module owns")]

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, opcode, types};
use rustix::event::{EventfdFlags, PollFlags, eventfd};

use crate::engine::io::{Kind, Queue, Request};

/// Requests in flight at most: deeper queues no longer help an NVMe disk.
const DEPTH: usize = 256;
/// Submission entries: those, and the poll of the wake-up descriptor.
const ENTRIES: u32 = 512;
/// Completion mark of the wake-up poll; others are positions in the table of requests.
const WAKE: u64 = u64::MAX;

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Set before the thread sleeps and then looks at the queue once more, so that whoever adds
    /// a request either is seen or sees this.
    is_asleep: AtomicBool,
    wake: OwnedFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // Any number but 0 wakes. Fails only when the counter is full: then it is awake.
            let _ = rustix::io::write(&self.wake, &1_u64.to_le_bytes());
        }
    }
}

/// Handle of the thread; dropping it finishes what was submitted.
#[derive(Debug)]
pub(crate) struct Uring {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Uring {
    /// Sets up a ring and its thread, or says why the kernel refuses.
    pub(crate) fn start() -> io::Result<Self> {
        let ring = IoUring::new(ENTRIES)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::PollAdd::CODE];
        if needed.iter().any(|code| !probe.is_supported(*code)) {
            return Err(io::Error::other("this kernel's io_uring lacks plain reads or writes"));
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared =
            Arc::new(Shared { queue: Mutex::default(), is_asleep: AtomicBool::new(false), wake });
        let driver = Driver { ring, shared: Arc::clone(&shared), table: Vec::new(), flying: 0 };
        let thread = thread::Builder::new().name("block-uring".to_owned());
        let thread = Some(thread.spawn(move || driver.run())?);
        Ok(Self { shared, thread })
    }

    /// Takes no further requests; those that were taken are done.
    pub(crate) fn close(&self) {
        self.shared.lock().is_closed = true;
        self.shared.wake();
    }

    /// Hands a request to the thread.
    pub(crate) fn submit(&self, request: Request) {
        self.shared.lock().push(request);
        self.shared.wake();
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to wait for.
            drop(thread.join());
        }
    }
}

struct Driver {
    ring: IoUring,
    shared: Arc<Shared>,
    /// Requests in flight; a request's place is its completion mark.
    table: Vec<Option<Request>>,
    flying: usize,
}

impl Driver {
    fn run(mut self) {
        let result = self.arm().and_then(|()| self.serve());
        if result.is_err() {
            self.abandon();
        }
        // Dropping requests tells their callers that IO has stopped.
        let mut queue = self.shared.lock();
        queue.is_closed = true;
        queue.requests.clear();
    }

    /// The ring is broken, and the kernel may still use files and buffers: they must stay. Their
    /// callers must not wait for ever: the rest of each request is dropped, which tells them.
    fn abandon(&mut self) {
        for Request { file, buf, .. } in self.table.drain(..).flatten() {
            Box::leak(Box::new((file, buf)));
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            let is_closed = self.fill()?;
            if is_closed && self.flying == 0 {
                return Ok(());
            }
            self.shared.is_asleep.store(true, Ordering::SeqCst);
            let has_more = self.flying < DEPTH && !self.shared.lock().requests.is_empty();
            let want = if has_more { 0 } else { 1 };
            match self.ring.submit_and_wait(want) {
                Err(e) if !is_passing(&e) => return Err(e),
                _ => self.shared.is_asleep.store(false, Ordering::SeqCst),
            }
            self.reap()?;
        }
    }

    /// Moves requests from the queue into the ring; tells whether the queue is closed and empty.
    fn fill(&mut self) -> io::Result<bool> {
        while self.flying < DEPTH {
            let mut queue = self.shared.lock();
            let Some(request) = queue.requests.pop_front() else { return Ok(queue.is_closed) };
            drop(queue);
            self.start(request)?;
        }
        Ok(false)
    }

    fn start(&mut self, request: Request) -> io::Result<()> {
        let free = self.table.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.table.push(None);
            self.table.len() - 1
        });
        let fd = types::Fd(request.file.as_raw_fd());
        let at = request.offset + request.done as u64;
        let Some(slot) = self.table.get_mut(place) else { return Ok(()) };
        let request = slot.insert(request);
        let done = request.done;
        let entry = match request.kind {
            Kind::Read => {
                let space = request.buf.as_mut().get_mut(done..).unwrap_or_default();
                opcode::Read::new(fd, space.as_mut_ptr(), length(space.len())).offset(at).build()
            }
            Kind::Write => {
                let rest = request.buf.as_ref().get(done..).unwrap_or_default();
                opcode::Write::new(fd, rest.as_ptr(), length(rest.len())).offset(at).build()
            }
        };
        self.flying += 1;
        // SAFETY: the entry points into the buffer, and names the descriptor of the file, of the
        // request in the table. It stays there, unmoved in memory (an AlignedBuf never
        // reallocates) and untouched, until `reap` has seen its completion; `run` leaks the table
        // if the ring breaks before.
        unsafe { self.push(&entry.user_data(place as u64)) }
    }

    fn arm(&mut self) -> io::Result<()> {
        let fd = types::Fd(self.shared.wake.as_raw_fd());
        let poll = opcode::PollAdd::new(fd, u32::from(PollFlags::IN.bits())).build();
        // SAFETY: a poll points to no memory, and `shared` keeps the descriptor open.
        unsafe { self.push(&poll.user_data(WAKE)) }
    }

    /// # Safety
    /// What the entry points to stays valid until its completion was reaped.
    unsafe fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return Ok(());
        }
        self.ring.submit()?;
        // SAFETY: passed on to the caller.
        unsafe { self.ring.submission().push(entry) }.map_err(io::Error::other)
    }

    fn reap(&mut self) -> io::Result<()> {
        let done: Vec<_> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (mark, result) in done {
            if mark == WAKE {
                // Empty already if two wakes came together.
                let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
                self.arm()?;
                continue;
            }
            let place = usize::try_from(mark).unwrap_or(usize::MAX);
            let Some(request) = self.table.get_mut(place).and_then(Option::take) else { continue };
            self.flying -= 1;
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            if let Some(rest) = request.advance(result) {
                self.start(rest)?;
            }
        }
        Ok(())
    }
}

/// Whether a failed wait may simply be done again.
fn is_passing(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy
    )
}

/// A buffer has at most one block, 64 MiB; anything longer goes in several steps.
fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(1 << 30)
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;
    use crate::engine::buf::AlignedBuf;

    #[test]
    fn a_broken_ring_tells_the_callers_of_what_was_under_way() {
        // Where the kernel refuses io_uring there is no ring to break.
        let Ok(ring) = IoUring::new(8) else { return };
        let wake = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let is_asleep = AtomicBool::new(false);
        let shared = Arc::new(Shared { queue: Mutex::default(), is_asleep, wake });
        let (reply, mut answer) = oneshot::channel();
        let file = Arc::new(tempfile::tempfile().unwrap());
        let buf = AlignedBuf::zeroed(1);
        let request = Request { kind: Kind::Read, file, offset: 0, buf, done: 0, reply };
        let mut driver = Driver { ring, shared, table: vec![Some(request)], flying: 1 };
        driver.abandon();
        assert_eq!(answer.try_recv().unwrap_err(), oneshot::error::TryRecvError::Closed);
    }
}
