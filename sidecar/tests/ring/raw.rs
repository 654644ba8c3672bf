//! An application that writes the shared memory itself, and so can write anything.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ring::fd::{recv_with_fds, send_with_fds};
use ring::layout::{
    CONTROL_BYTES, Completion, Control, ControlKind, VERSION, completions_at, region_bytes,
};
use ring::queue::{ENTRY_BYTES, Entry};
use ring::shm::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const ENTRIES: u32 = 8;
const PATIENCE: Duration = Duration::from_secs(20);

/// Where the fields of a queue are; see `ring::queue`.
pub(crate) struct Layout {
    pub submissions: usize,
    pub completions: usize,
    pub head: usize,
    pub tail: usize,
    pub sleeping: usize,
    entries: usize,
}

pub(crate) const QUEUE: Layout = Layout {
    submissions: 0,
    completions: completions_at(ENTRIES),
    head: 0,
    tail: 64,
    sleeping: 128,
    entries: 192,
};

/// What came of a submission.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    Completed(Completion),
    HungUp,
}

pub(crate) struct Raw {
    socket: UnixStream,
    region: Arc<Region>,
    /// The doorbells of submissions and of completions.
    doorbells: [OwnedFd; 2],
    submitted: u32,
    taken: u32,
    iovs: Vec<Region>,
}

impl Raw {
    pub(crate) fn connect(socket: &Path) -> Self {
        let socket = UnixStream::connect(socket).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let hello =
            Control { flags: VERSION, value: ENTRIES.into(), ..Control::new(ControlKind::Hello) };
        send_with_fds(socket.as_fd(), &hello.encode(), &[]).unwrap();
        let mut answer = [0; CONTROL_BYTES];
        let (count, fds) = recv_with_fds(socket.as_fd(), &mut answer, 3).unwrap();
        assert_eq!(count, CONTROL_BYTES);
        let [queues, submit, complete]: [OwnedFd; 3] = fds.try_into().unwrap();
        let region = Arc::new(Region::open(queues, region_bytes(ENTRIES)).unwrap());
        let doorbells = [submit, complete];
        Self { socket, region, doorbells, submitted: 0, taken: 0, iovs: Vec::new() }
    }

    pub(crate) fn region(&self) -> Arc<Region> {
        Arc::clone(&self.region)
    }

    pub(crate) fn register(&mut self, bytes: usize) -> u32 {
        let region = Region::create("t", bytes).unwrap();
        let register = Control::new(ControlKind::Register).encode();
        send_with_fds(self.socket.as_fd(), &register, &[region.fd()]).unwrap();
        self.iovs.push(region);
        self.answer().id
    }

    pub(crate) fn open(&self, path: &str) -> u32 {
        let length = u32::try_from(path.len()).unwrap();
        self.ask(Control { length, ..Control::new(ControlKind::Open) }, path.as_bytes());
        let answer = self.answer();
        assert_eq!(answer.status, 0);
        answer.id
    }

    /// Sends a control message and does not wait.
    pub(crate) fn ask(&self, control: Control, payload: &[u8]) {
        let bytes = [&control.encode()[..], payload].concat();
        send_with_fds(self.socket.as_fd(), &bytes, &[]).unwrap();
    }

    pub(crate) fn answer(&self) -> Control {
        let mut answer = [0; CONTROL_BYTES];
        (&self.socket).read_exact(&mut answer).unwrap();
        Control::decode(&answer).unwrap()
    }

    pub(crate) fn is_unanswered(&self) -> bool {
        self.look(PollFlags::IN).is_empty()
    }

    pub(crate) fn is_hung_up(&self) -> bool {
        !self.look(PollFlags::RDHUP).is_empty()
    }

    fn look(&self, flags: PollFlags) -> PollFlags {
        let mut fds = [PollFd::new(&self.socket, flags)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        fds[0].revents()
    }

    pub(crate) fn overwrite(&self, queue: usize, field: usize, value: u32) {
        self.region.atomic_u32(queue + field).unwrap().store(value, Ordering::SeqCst);
    }

    fn load(&self, queue: usize, field: usize) -> u32 {
        self.region.atomic_u32(queue + field).unwrap().load(Ordering::SeqCst)
    }

    fn slot(queue: usize, index: u32) -> usize {
        queue + QUEUE.entries + (index % ENTRIES) as usize * ENTRY_BYTES
    }

    /// Publishes an entry, and wakes the server whether it says that it sleeps or not.
    pub(crate) fn submit(&mut self, entry: &Entry) {
        let at = Self::slot(QUEUE.submissions, self.submitted);
        for (index, word) in entry.iter().enumerate() {
            self.region.atomic_u64(at + index * 8).unwrap().store(*word, Ordering::Relaxed);
        }
        self.submitted = self.submitted.wrapping_add(1);
        self.overwrite(QUEUE.submissions, QUEUE.tail, self.submitted);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        rustix::io::write(&self.doorbells[0], &1u64.to_le_bytes()).unwrap();
    }

    /// Whether the server has published `count` completions in all.
    pub(crate) fn published(&self, count: u32) -> bool {
        self.load(QUEUE.completions, QUEUE.tail) == count
    }

    /// Waits for the next completion, and takes it, or for the end of the connection.
    pub(crate) fn outcome(&mut self) -> Answered {
        let taken = self.taken;
        if self.hung_up_or(|raw| raw.load(QUEUE.completions, QUEUE.tail) != taken) {
            return Answered::HungUp;
        }
        let at = Self::slot(QUEUE.completions, taken);
        let mut entry: Entry = [0; 8];
        for (index, word) in entry.iter_mut().enumerate() {
            *word = self.region.atomic_u64(at + index * 8).unwrap().load(Ordering::Relaxed);
        }
        self.taken = taken.wrapping_add(1);
        self.overwrite(QUEUE.completions, QUEUE.head, self.taken);
        Answered::Completed(Completion::decode(&entry))
    }

    /// Waits for the end of the connection, which is true, or for `condition`.
    pub(crate) fn hung_up_or(&self, condition: impl Fn(&Self) -> bool) -> bool {
        let until = Instant::now() + PATIENCE;
        loop {
            if self.is_hung_up() {
                return true;
            }
            if condition(self) {
                return false;
            }
            assert!(Instant::now() < until, "the server says nothing");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    pub(crate) fn make_doorbells_block(&self) {
        for doorbell in &self.doorbells {
            rustix::fs::fcntl_setfl(doorbell, rustix::fs::OFlags::empty()).unwrap();
        }
    }

    /// No count more fits into the doorbell that the server rings.
    pub(crate) fn fill_completion_doorbell(&self) {
        let mut full = [PollFd::new(&self.doorbells[1], PollFlags::OUT)];
        poll(&mut full, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        if !full[0].revents().is_empty() {
            rustix::io::write(&self.doorbells[1], &(u64::MAX - 1).to_le_bytes()).unwrap();
        }
    }
}
