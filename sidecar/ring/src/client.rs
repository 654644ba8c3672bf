//! The application's end of the native ring. Blocking, one thread; make one ring for each thread.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::event::EventFd;
use crate::fd::{FdError, recv_with_fds, send_with_fds};
use crate::layout::{
    CONTROL_BYTES, Completion, Control, ControlKind, LENGTH_MAX, LayoutError, Op, PATH_MAX,
    Submission, VERSION, completions_at, is_valid_entries, region_bytes,
};
use crate::queue::{Consumer, Producer, QueueError};
use crate::shm::{REGION_MAX, Region, ShmError};

/// Why a ring call failed.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The socket could not be reached.
    #[error("connect to the ring socket")]
    Connect(#[source] std::io::Error),
    /// The control socket failed.
    #[error("talk to the sidecar")]
    Socket(#[from] FdError),
    /// The sidecar sent something else than this ABI.
    #[error("the sidecar misbehaved")]
    Layout(#[from] LayoutError),
    /// The sidecar is gone or sent too little.
    #[error("the sidecar hung up")]
    HungUp,
    /// Memory could not be shared.
    #[error("share memory")]
    Shm(#[from] ShmError),
    /// A queue failed.
    #[error("use a queue")]
    Queue(#[from] QueueError),
    /// The sidecar refused: a Linux errno, positive.
    #[error("the sidecar refused: errno {0}")]
    Refused(i32),
    /// The caller's arguments are out of bounds.
    #[error("{0}")]
    Argument(&'static str),
}

/// Memory shared with the sidecar.
#[derive(Clone, Debug)]
pub struct Iov {
    /// Its number on this ring.
    pub id: u32,
    /// The memory.
    pub region: Arc<Region>,
}

/// An open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// Its number on this ring.
    pub id: u32,
    /// Its size when it was opened, in bytes.
    pub size: u64,
}

/// One read or write.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Number of the file.
    pub file: u32,
    /// Number of the iov.
    pub iov: u32,
    /// First byte in the iov.
    pub iov_offset: u64,
    /// First byte in the file.
    pub file_offset: u64,
    /// Bytes, at most [`LENGTH_MAX`].
    pub length: u32,
    /// Comes back with the completion.
    pub user_data: u64,
}

/// A connection to the sidecar.
#[derive(Debug)]
pub struct Ring {
    socket: UnixStream,
    submissions: Producer,
    completions: Consumer,
    entries: u32,
    in_flight: u32,
    iovs: HashMap<u32, Arc<Region>>,
}

impl Ring {
    /// Connects to the sidecar's `ring.sock` for at most `entries` (a power of two up to 256) transfers at once.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn connect(socket: &Path, entries: u32) -> Result<Self, RingError> {
        if !is_valid_entries(entries) {
            return Err(RingError::Argument("entries must be a power of two up to 256"));
        }
        let socket = UnixStream::connect(socket).map_err(RingError::Connect)?;
        let hello =
            Control { flags: VERSION, value: entries.into(), ..Control::new(ControlKind::Hello) };
        let (answer, fds) = exchange(&socket, &hello, &[], None)?;
        let [queues, submit, complete]: [OwnedFd; 3] =
            fds.try_into().map_err(|_| RingError::HungUp)?;
        if answer.value != u64::from(entries) {
            return Err(RingError::Argument("the sidecar granted another number of entries"));
        }
        let region = Arc::new(Region::open(queues, region_bytes(entries))?);
        let submit = EventFd::from_fd(submit);
        let submissions = Producer::new(Arc::clone(&region), 0, entries, submit)?;
        let complete = EventFd::from_fd(complete);
        let completions = Consumer::new(region, completions_at(entries), entries, complete)?;
        let (in_flight, iovs) = (0, HashMap::new());
        Ok(Self { socket, submissions, completions, entries, in_flight, iovs })
    }

    /// Shares `bytes` of new memory, allocated at once in this process's account.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn register(&mut self, bytes: usize) -> Result<Iov, RingError> {
        let region = Arc::new(Region::create("lampyris-iov", bytes.min(REGION_MAX))?);
        region.populate()?;
        let request = Control::new(ControlKind::Register);
        let (answer, _) = exchange(&self.socket, &request, &[], Some(&region))?;
        self.iovs.insert(answer.id, Arc::clone(&region));
        Ok(Iov { id: answer.id, region })
    }

    /// Ends the sharing; transfers under way still finish.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn unregister(&mut self, iov: u32) -> Result<(), RingError> {
        let request = Control { id: iov, ..Control::new(ControlKind::Unregister) };
        exchange(&self.socket, &request, &[], None)?;
        self.iovs.remove(&iov);
        Ok(())
    }

    /// The memory of an iov.
    #[must_use]
    pub fn iov(&self, id: u32) -> Option<&Arc<Region>> {
        self.iovs.get(&id)
    }

    /// Opens a file by its absolute path under a mount; `flags` of [`crate::layout`].
    ///
    /// # Errors
    /// [`RingError::Refused`] with the errno.
    pub fn open(&mut self, path: &str, flags: u32) -> Result<OpenFile, RingError> {
        if path.len() > PATH_MAX {
            return Err(RingError::Argument("the path is too long"));
        }
        let request = Control { flags, ..Control::new(ControlKind::Open) };
        let (answer, _) = exchange(&self.socket, &request, path.as_bytes(), None)?;
        Ok(OpenFile { id: answer.id, size: answer.value })
    }

    /// Closes a file; what was written is durable and visible to others on success.
    ///
    /// # Errors
    /// [`RingError::Refused`] with the errno of a failed write-back.
    pub fn close(&mut self, file: u32) -> Result<(), RingError> {
        let request = Control { id: file, ..Control::new(ControlKind::Close) };
        exchange(&self.socket, &request, &[], None).map(|_| ())
    }

    /// The size of an open file in bytes.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn size(&mut self, file: u32) -> Result<u64, RingError> {
        let request = Control { id: file, ..Control::new(ControlKind::Stat) };
        exchange(&self.socket, &request, &[], None).map(|(answer, _)| answer.value)
    }

    /// Queues a transfer; false if as many as were granted are under way. The sidecar may begin at once;
    /// [`submit`](Self::submit) wakes it.
    ///
    /// # Errors
    /// [`RingError::Argument`] for more than [`LENGTH_MAX`] bytes.
    pub fn prepare(&mut self, op: Op, transfer: Transfer) -> Result<bool, RingError> {
        let Transfer { file, iov, iov_offset, file_offset, length, user_data } = transfer;
        if length > LENGTH_MAX {
            return Err(RingError::Argument("a transfer has at most 4 MiB"));
        }
        if self.in_flight >= self.entries {
            return Ok(false);
        }
        let entry = Submission { op, file, iov, length, iov_offset, file_offset, user_data };
        let queued = self.submissions.push(&entry.encode())?;
        self.in_flight += u32::from(queued);
        Ok(queued)
    }

    /// Wakes the sidecar for what was prepared.
    ///
    /// # Errors
    /// [`RingError`].
    pub fn submit(&self) -> Result<(), RingError> {
        Ok(self.submissions.ring()?)
    }

    /// The next completion, waiting at most `timeout` (`None` = for ever) for it. A sidecar that is gone is an error.
    ///
    /// # Errors
    /// [`RingError::HungUp`] when no completion can come any more.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<Completion>, RingError> {
        const LOOK: Duration = Duration::from_millis(500);
        let until = timeout.map(|timeout| std::time::Instant::now() + timeout);
        loop {
            if let Some(entry) = self.completions.pop()? {
                self.in_flight = self.in_flight.saturating_sub(1);
                return Ok(Some(Completion::decode(&entry)));
            }
            let left = until.map(|at| at.saturating_duration_since(std::time::Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            let step = left.map_or(LOOK, |left| left.min(LOOK));
            if !self.completions.wait(Some(step))? && self.is_hung_up() {
                return Err(RingError::HungUp);
            }
        }
    }

    /// Submissions without a completion that was taken.
    #[must_use]
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn is_hung_up(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let hung = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll(&mut fds, Some(&now)).is_ok() && fds.iter().any(|fd| fd.revents().intersects(hung))
    }
}

/// One request and its answer.
fn exchange(
    socket: &UnixStream,
    request: &Control,
    payload: &[u8],
    memory: Option<&Region>,
) -> Result<(Control, Vec<OwnedFd>), RingError> {
    let length = u32::try_from(payload.len()).map_err(|_| RingError::Argument("long payload"))?;
    let mut bytes = Control { length, ..*request }.encode().to_vec();
    bytes.extend_from_slice(payload);
    let fds: Vec<_> = memory.iter().map(|region| region.fd()).collect();
    send_with_fds(socket.as_fd(), &bytes, &fds)?;
    let (mut answer, mut filled, mut fds) = ([0; CONTROL_BYTES], 0, Vec::new());
    while filled < CONTROL_BYTES {
        let space = answer.get_mut(filled..).unwrap_or_default();
        let (count, more) = recv_with_fds(socket, space, 3)?;
        if count == 0 {
            return Err(RingError::HungUp);
        }
        filled += count;
        fds.extend(more);
    }
    let answer = Control::decode(&answer)?;
    match answer.status {
        0 => Ok((answer, fds)),
        status => Err(RingError::Refused(status.saturating_neg())),
    }
}
