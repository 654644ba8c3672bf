//! One application's connection: a thread that owns the queues, tasks that do the transfers.

use std::collections::HashMap;
use std::future::Future;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use ring::event::EventFd;
use ring::fd::{FdError, recv_with_fds, send_with_fds};
use ring::layout::{
    CONTROL_BYTES, Completion, Control, ControlKind, LENGTH_MAX, LayoutError, OPEN_CREATE,
    OPEN_WRITE, Op, Submission, VERSION, completions_at, is_valid_entries, region_bytes,
};
use ring::queue::{Consumer, Producer, QueueError};
use ring::shm::{Region, ShmError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno as Kernel;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::{Counted, Mounts, Rights, walk};
use crate::vfs::{Errno, FileSystem, Kind};

/// How long a connection may take to say hello, or to send the rest of a control message.
const PATIENCE: Duration = Duration::from_secs(5);
/// Iovs of one connection.
const IOVS_MAX: usize = 64;
/// Bytes of all iovs of one connection.
const IOV_BYTES_MAX: usize = 8 << 30;
/// Files that one connection has open.
const FILES_MAX: usize = 1024;
/// Bytes of transfers of one connection that the sidecar holds at once.
const BYTES_MAX: usize = 8 << 20;
/// Mode of a file that open makes.
const CREATE_MODE: u32 = 0o644;

/// Why a connection ended before its application hung up.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("set up a connection")]
    Io(#[from] std::io::Error),
    #[error("wait for an application")]
    Poll(#[from] Kernel),
    #[error("control socket")]
    Socket(#[from] FdError),
    #[error("the application sent no message of this ABI")]
    Layout(#[from] LayoutError),
    #[error("the application hung up inside a message")]
    Cut,
    #[error("the application did not say hello")]
    NoHello,
    #[error("queue")]
    Queue(#[from] QueueError),
    #[error("shared memory")]
    Shm(#[from] ShmError),
    #[error("the application has more transfers under way than granted")]
    TooMany,
}

/// A file that the application has open. Released when nothing uses it any more: neither the application nor a transfer.
#[derive(Debug)]
struct File {
    files: Arc<dyn FileSystem>,
    ino: u64,
    write: bool,
    runtime: Handle,
}

impl Drop for File {
    fn drop(&mut self) {
        let (files, ino, write) = (Arc::clone(&self.files), self.ino, self.write);
        self.runtime.spawn(async move { files.release(ino, write).await });
    }
}

/// The fields `id` and `value` of an answer.
type Outcome = Result<(u32, u64), Errno>;

/// What a task of a connection has finished.
#[derive(Debug)]
enum Done {
    Transfer(Completion),
    Control(ControlKind, Outcome),
    /// A file and its size.
    Open(Result<(File, u64), Errno>),
}

/// What the tasks of one connection share.
#[derive(Debug)]
struct Shared {
    rights: Rights,
    bytes: Semaphore,
    done: Mutex<Sender<Done>>,
    /// Wakes the connection's thread: only this process has it.
    wake: EventFd,
    _counted: Counted,
}

impl Shared {
    fn finish(&self, done: Done) {
        // The thread may have ended with its application; then a file that was opened is released here.
        let _ = lock(&self.done).send(done);
        self.wake.notify();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Connection<'a> {
    socket: UnixStream,
    mounts: &'a Mounts,
    runtime: &'a Handle,
    submissions: Consumer,
    completions: Producer,
    entries: u32,
    in_flight: u32,
    shared: Arc<Shared>,
    done: Receiver<Done>,
    iovs: HashMap<u32, Arc<Region>>,
    files: HashMap<u32, Arc<File>>,
    next_id: u32,
    /// Whether a control message is being answered by a task: the next one is not looked at before.
    asked: bool,
}

/// Serves one application until it hangs up.
pub(super) fn serve(
    socket: UnixStream,
    mounts: &Mounts,
    runtime: &Handle,
    counted: Counted,
) -> Result<(), ConnectionError> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let Some((hello, _, _)) = receive(&socket)? else { return Err(ConnectionError::NoHello) };
    let entries = u32::try_from(hello.value).unwrap_or(0);
    if hello.kind != ControlKind::Hello || hello.flags != VERSION || !is_valid_entries(entries) {
        answer(&socket, ControlKind::Hello, Err(Errno::EINVAL), &[])?;
        return Err(ConnectionError::NoHello);
    }
    let rights = Rights::of(&socket)?;
    let region = Arc::new(Region::create("lampyris-ring", region_bytes(entries))?);
    let (submit, complete) = (EventFd::new()?, EventFd::new()?);
    let fds = [region.fd(), submit.as_fd(), complete.as_fd()];
    answer(&socket, ControlKind::Hello, Ok((0, entries.into())), &fds)?;
    let (send, done) = channel();
    let shared = Shared {
        rights,
        bytes: Semaphore::new(BYTES_MAX),
        done: Mutex::new(send),
        wake: EventFd::new()?,
        _counted: counted,
    };
    let mut connection = Connection {
        submissions: Consumer::new(Arc::clone(&region), 0, entries, submit)?,
        completions: Producer::new(region, completions_at(entries), entries, complete)?,
        socket,
        mounts,
        runtime,
        entries,
        in_flight: 0,
        shared: Arc::new(shared),
        done,
        iovs: HashMap::new(),
        files: HashMap::new(),
        next_id: 1,
        asked: false,
    };
    let outcome = connection.run();
    // It fails when the application was faster.
    let _ = connection.socket.shutdown(Shutdown::Both);
    outcome
}

impl Connection<'_> {
    fn run(&mut self) -> Result<(), ConnectionError> {
        loop {
            self.deliver()?;
            self.take_submissions()?;
            if self.submissions.begin_sleep()? {
                self.submissions.end_sleep()?;
                continue;
            }
            let wanted = if self.asked { PollFlags::empty() } else { PollFlags::IN };
            let mut fds = [
                PollFd::new(&self.socket, wanted | PollFlags::RDHUP),
                PollFd::new(self.submissions.doorbell(), PollFlags::IN),
                PollFd::new(&self.shared.wake, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(Kernel::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let spoken = fds.first().is_some_and(|fd| !fd.revents().is_empty());
            self.submissions.end_sleep()?;
            let _ = self.shared.wake.drain();
            // While an answer is due only a hang-up is looked for.
            if spoken && (self.asked || !self.control()?) {
                return Ok(());
            }
        }
    }

    /// Publishes what tasks have finished.
    fn deliver(&mut self) -> Result<(), ConnectionError> {
        let mut any = false;
        while let Ok(done) = self.done.try_recv() {
            match done {
                Done::Transfer(completion) => {
                    self.in_flight = self.in_flight.saturating_sub(1);
                    self.push(completion)?;
                    any = true;
                }
                Done::Control(kind, outcome) => self.settle(kind, outcome)?,
                Done::Open(opened) => {
                    let outcome = opened.map(|(file, size)| {
                        let id = self.fresh_id();
                        self.files.insert(id, Arc::new(file));
                        (id, size)
                    });
                    self.settle(ControlKind::Open, outcome)?;
                }
            }
        }
        if any {
            self.completions.ring()?;
        }
        Ok(())
    }

    fn push(&mut self, completion: Completion) -> Result<(), ConnectionError> {
        // Full only if the application submitted more than it was granted.
        if self.completions.push(&completion.encode())? {
            Ok(())
        } else {
            Err(ConnectionError::TooMany)
        }
    }

    fn take_submissions(&mut self) -> Result<(), ConnectionError> {
        // At most one round of the queue before the control socket gets its turn.
        for _ in 0..self.entries {
            let Some(entry) = self.submissions.pop()? else { break };
            if self.in_flight >= self.entries {
                return Err(ConnectionError::TooMany);
            }
            match self.validate(&entry) {
                Ok((submission, file, region)) => {
                    self.in_flight += 1;
                    let shared = Arc::clone(&self.shared);
                    self.runtime.spawn(transfer(shared, submission, file, region));
                }
                Err((user_data, errno)) => {
                    let result = i64::from(-errno.0);
                    self.push(Completion { user_data, result })?;
                    self.completions.ring()?;
                }
            }
        }
        Ok(())
    }

    /// Checks the copy of an entry against what this connection has.
    fn validate(&self, entry: &ring::queue::Entry) -> Result<Valid, (u64, Errno)> {
        let [_, _, _, _, user_data, ..] = *entry;
        let refuse = |errno| (user_data, errno);
        let submission = Submission::decode(entry).map_err(|_| refuse(Errno::EINVAL))?;
        let file = self.files.get(&submission.file).ok_or_else(|| refuse(Errno::EBADF))?;
        if submission.op == Op::Write && !file.write {
            return Err(refuse(Errno::EBADF));
        }
        if submission.op == Op::Sync {
            return Ok((submission, Arc::clone(file), None));
        }
        let region = self.iovs.get(&submission.iov).ok_or_else(|| refuse(Errno::EINVAL))?;
        let end = submission.iov_offset.checked_add(submission.length.into());
        if end.is_none_or(|end| end > region.len() as u64) {
            return Err(refuse(Errno::EINVAL));
        }
        Ok((submission, Arc::clone(file), Some(Arc::clone(region))))
    }

    /// Answers the control message that a task was asked to see to.
    fn settle(&mut self, kind: ControlKind, outcome: Outcome) -> Result<(), ConnectionError> {
        self.asked = false;
        answer(&self.socket, kind, outcome, &[])
    }

    /// Lets a task see to a control message: it may wait for the store, and the queues must not wait with it.
    fn ask<W>(&mut self, work: W)
    where
        W: Future<Output = Done> + Send + 'static,
    {
        self.asked = true;
        let shared = Arc::clone(&self.shared);
        self.runtime.spawn(async move { shared.finish(work.await) });
    }

    /// Takes one control message; false when the application has hung up.
    fn control(&mut self) -> Result<bool, ConnectionError> {
        let Some((request, payload, fds)) = receive(&self.socket)? else { return Ok(false) };
        let answered = match request.kind {
            ControlKind::Hello => Err(Errno::EINVAL),
            ControlKind::Register => self.register(fds).map(Some),
            ControlKind::Unregister => match self.iovs.remove(&request.id) {
                Some(_) => Ok(Some((0, 0))),
                None => Err(Errno::EINVAL),
            },
            ControlKind::Open => self.open(&payload, request.flags).map(|()| None),
            ControlKind::Close => self.close(request.id).map(|()| None),
            ControlKind::Stat => self.stat(request.id).map(|()| None),
        };
        // Without an outcome a task has been asked.
        if let Some(outcome) = answered.transpose() {
            answer(&self.socket, request.kind, outcome, &[])?;
        }
        Ok(true)
    }

    fn fresh_id(&mut self) -> u32 {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1).max(1);
        id
    }

    fn register(&mut self, mut fds: Vec<OwnedFd>) -> Outcome {
        let (Some(fd), true) = (fds.pop(), fds.is_empty()) else { return Err(Errno::EINVAL) };
        let taken: usize = self.iovs.values().map(|region| region.len()).sum();
        if self.iovs.len() >= IOVS_MAX {
            return Err(Errno::EAGAIN);
        }
        let left = IOV_BYTES_MAX.saturating_sub(taken);
        let region = Region::open(fd, left).map_err(|_| Errno::EINVAL)?;
        let id = self.fresh_id();
        self.iovs.insert(id, Arc::new(region));
        Ok((id, 0))
    }

    fn open(&mut self, path: &[u8], flags: u32) -> Result<(), Errno> {
        if self.files.len() >= FILES_MAX || flags & !(OPEN_WRITE | OPEN_CREATE) != 0 {
            return Err(Errno::EINVAL);
        }
        let path = std::str::from_utf8(path).map_err(|_| Errno::EINVAL)?;
        let (files, rest) = self.mounts.find(path).ok_or(Errno::ENOENT)?;
        let (shared, runtime) = (Arc::clone(&self.shared), self.runtime.clone());
        self.ask(async move {
            let opened = open_file(&*files, &shared.rights, &rest, flags).await;
            let write = flags & OPEN_WRITE != 0;
            Done::Open(opened.map(|(ino, size)| (File { files, ino, write, runtime }, size)))
        });
        Ok(())
    }

    fn close(&mut self, id: u32) -> Result<(), Errno> {
        let file = self.files.remove(&id).ok_or(Errno::EBADF)?;
        self.ask(async move {
            let flushed = if file.write { file.files.flush(file.ino).await } else { Ok(()) };
            Done::Control(ControlKind::Close, flushed.map(|()| (id, 0)))
        });
        Ok(())
    }

    fn stat(&mut self, id: u32) -> Result<(), Errno> {
        let file = Arc::clone(self.files.get(&id).ok_or(Errno::EBADF)?);
        self.ask(async move {
            let found = file.files.getattr(file.ino).await;
            Done::Control(ControlKind::Stat, found.map(|attr| (id, attr.size)))
        });
        Ok(())
    }
}

async fn open_file(
    files: &dyn FileSystem,
    rights: &Rights,
    path: &str,
    flags: u32,
) -> Result<(u64, u64), Errno> {
    let (write, caller) = (flags & OPEN_WRITE != 0, rights.caller);
    let (attr, missing) = walk(files, rights, path).await?;
    if let Some((parent, name)) = missing {
        if flags & OPEN_CREATE == 0 {
            return Err(Errno::ENOENT);
        }
        if !rights.allow(&attr, 3) {
            return Err(Errno::EACCES);
        }
        let made = files.create(caller, parent, name.as_bytes(), CREATE_MODE, false).await?;
        return Ok((made.attr.ino, made.attr.size));
    }
    if attr.kind != Kind::File {
        return Err(Errno::EISDIR);
    }
    if !rights.allow(&attr, if write { 6 } else { 4 }) {
        return Err(Errno::EACCES);
    }
    let opened = files.open(caller, attr.ino, write).await?;
    Ok((opened.attr.ino, opened.attr.size))
}

/// Does one transfer and completes it, whatever comes of it.
async fn transfer(
    shared: Arc<Shared>,
    submission: Submission,
    file: Arc<File>,
    region: Option<Arc<Region>>,
) {
    let user_data = submission.user_data;
    let outcome = carry_out(&shared, submission, &file, region.as_deref()).await;
    let result = outcome.unwrap_or_else(|errno| i64::from(-errno.0));
    // First what was used, then the word that it is free.
    drop((file, region));
    shared.finish(Done::Transfer(Completion { user_data, result }));
}

async fn carry_out(
    shared: &Shared,
    submission: Submission,
    file: &File,
    region: Option<&Region>,
) -> Result<i64, Errno> {
    let Submission { op, length, iov_offset, file_offset, .. } = submission;
    let Some(region) = region else { return file.files.fsync(file.ino).await.map(|()| 0) };
    // Never closed, and never asked for more than it has: see the assertion below.
    let _bytes = shared.bytes.acquire_many(length).await.map_err(|_| Errno::EIO)?;
    let mut at = usize::try_from(iov_offset).map_err(|_| Errno::EINVAL)?;
    let start = at;
    if op == Op::Write {
        let mut bytes = BytesMut::zeroed(length as usize);
        region.copy_out(at, &mut bytes).map_err(|_| Errno::EINVAL)?;
        file.files.write(shared.rights.caller, file.ino, file_offset, bytes.freeze()).await?;
        return Ok(length.into());
    }
    for part in file.files.read_parts(file.ino, file_offset, length).await? {
        region.copy_in(at, &part).map_err(|_| Errno::EIO)?;
        at += part.len();
    }
    i64::try_from(at - start).map_err(|_| Errno::EIO)
}

const _: () = assert!(LENGTH_MAX as usize <= BYTES_MAX);

/// What an entry asks for, of which file, with which memory.
type Valid = (Submission, Arc<File>, Option<Arc<Region>>);
/// A control message, its payload and its descriptors.
type Message = (Control, Vec<u8>, Vec<OwnedFd>);

/// The next message; `None` when the application has hung up.
fn receive(socket: &UnixStream) -> Result<Option<Message>, ConnectionError> {
    let (mut head, mut fds) = ([0; CONTROL_BYTES], Vec::new());
    if !fill(socket, &mut head, &mut fds)? {
        return Ok(None);
    }
    let control = Control::decode(&head)?;
    let mut payload = vec![0; control.length as usize];
    if !payload.is_empty() && !fill(socket, &mut payload, &mut fds)? {
        return Err(ConnectionError::Cut);
    }
    Ok(Some((control, payload, fds)))
}

/// Fills `bytes`; false if the peer had closed before the first one.
fn fill(
    socket: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<bool, ConnectionError> {
    let mut filled = 0;
    while filled < bytes.len() {
        let space = bytes.get_mut(filled..).unwrap_or_default();
        let (count, more) = recv_with_fds(socket, space, 1)?;
        fds.extend(more);
        match count {
            0 if filled == 0 => return Ok(false),
            0 => return Err(ConnectionError::Cut),
            _ => filled += count,
        }
        if fds.len() > 1 {
            return Err(FdError::TooMany { count: fds.len(), max: 1 }.into());
        }
    }
    Ok(true)
}

fn answer(
    socket: &UnixStream,
    kind: ControlKind,
    outcome: Outcome,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Result<(), ConnectionError> {
    let mut control = Control::new(kind);
    match outcome {
        Ok((id, value)) => (control.id, control.value) = (id, value),
        Err(errno) => control.status = -errno.0,
    }
    Ok(send_with_fds(socket, &control.encode(), fds)?)
}
