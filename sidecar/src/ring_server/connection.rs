//! One application's connection: a thread that owns the queues, tasks that do the transfers.

use std::collections::HashMap;
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

use super::{Mounts, may, walk};
use crate::vfs::{Caller, Errno, FileSystem, Kind};

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

/// A file that the application has open.
#[derive(Clone, Debug)]
struct File {
    files: Arc<dyn FileSystem>,
    ino: u64,
    write: bool,
}

/// What the tasks of one connection share.
#[derive(Debug)]
struct Shared {
    caller: Caller,
    bytes: Semaphore,
    done: Mutex<Sender<Completion>>,
    /// Wakes the connection's thread: only this process has it.
    wake: EventFd,
}

impl Shared {
    fn complete(&self, completion: Completion) {
        // The thread may have ended with its application.
        let _ = lock(&self.done).send(completion);
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
    done: Receiver<Completion>,
    iovs: HashMap<u32, Arc<Region>>,
    files: HashMap<u32, File>,
    next_id: u32,
}

/// Serves one application until it hangs up.
pub(super) fn serve(
    socket: UnixStream,
    mounts: &Mounts,
    runtime: &Handle,
) -> Result<(), ConnectionError> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let Some((hello, _, _)) = receive(&socket)? else { return Err(ConnectionError::NoHello) };
    let entries = u32::try_from(hello.value).unwrap_or(0);
    if hello.kind != ControlKind::Hello || hello.flags != VERSION || !is_valid_entries(entries) {
        answer(&socket, ControlKind::Hello, Err(Errno::EINVAL), &[])?;
        return Err(ConnectionError::NoHello);
    }
    let peer = ring::peer::peer_of(&socket)?;
    let caller = Caller { uid: peer.uid, gid: peer.gid };
    let region = Arc::new(Region::create("lampyris-ring", region_bytes(entries))?);
    let (submit, complete) = (EventFd::new()?, EventFd::new()?);
    let fds = [region.fd(), submit.as_fd(), complete.as_fd()];
    answer(&socket, ControlKind::Hello, Ok((0, entries.into())), &fds)?;
    let (send, done) = channel();
    let shared = Shared {
        caller,
        bytes: Semaphore::new(BYTES_MAX),
        done: Mutex::new(send),
        wake: EventFd::new()?,
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
    };
    let outcome = connection.run();
    connection.close_all();
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
            let mut fds = [
                PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP),
                PollFd::new(self.submissions.doorbell(), PollFlags::IN),
                PollFd::new(&self.shared.wake, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(Kernel::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let asked = fds.first().is_some_and(|fd| !fd.revents().is_empty());
            self.submissions.end_sleep()?;
            let _ = self.shared.wake.drain();
            if asked && !self.control()? {
                return Ok(());
            }
        }
    }

    /// Publishes what tasks have finished.
    fn deliver(&mut self) -> Result<(), ConnectionError> {
        let mut any = false;
        while let Ok(completion) = self.done.try_recv() {
            self.in_flight = self.in_flight.saturating_sub(1);
            self.push(completion)?;
            any = true;
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
            return Ok((submission, file.clone(), None));
        }
        let region = self.iovs.get(&submission.iov).ok_or_else(|| refuse(Errno::EINVAL))?;
        let end = submission.iov_offset.checked_add(submission.length.into());
        if end.is_none_or(|end| end > region.len() as u64) {
            return Err(refuse(Errno::EINVAL));
        }
        Ok((submission, file.clone(), Some(Arc::clone(region))))
    }

    /// Answers one control message; false when the application has hung up.
    fn control(&mut self) -> Result<bool, ConnectionError> {
        let Some((request, payload, fds)) = receive(&self.socket)? else { return Ok(false) };
        let outcome = match request.kind {
            ControlKind::Hello => Err(Errno::EINVAL),
            ControlKind::Register => self.register(fds),
            ControlKind::Unregister => match self.iovs.remove(&request.id) {
                Some(_) => Ok((0, 0)),
                None => Err(Errno::EINVAL),
            },
            ControlKind::Open => self.open(&payload, request.flags),
            ControlKind::Close => self.close(request.id),
            ControlKind::Stat => match self.files.get(&request.id) {
                Some(file) => self
                    .runtime
                    .block_on(file.files.getattr(file.ino))
                    .map(|attr| (request.id, attr.size)),
                None => Err(Errno::EBADF),
            },
        };
        answer(&self.socket, request.kind, outcome, &[])?;
        Ok(true)
    }

    fn fresh_id(&mut self) -> u32 {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1).max(1);
        id
    }

    fn register(&mut self, mut fds: Vec<OwnedFd>) -> Result<(u32, u64), Errno> {
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

    fn open(&mut self, path: &[u8], flags: u32) -> Result<(u32, u64), Errno> {
        if self.files.len() >= FILES_MAX || flags & !(OPEN_WRITE | OPEN_CREATE) != 0 {
            return Err(Errno::EINVAL);
        }
        let path = std::str::from_utf8(path).map_err(|_| Errno::EINVAL)?;
        let (files, rest) = self.mounts.find(path).ok_or(Errno::ENOENT)?;
        let opening = open_file(&*files, self.shared.caller, &rest, flags);
        let (ino, size) = self.runtime.block_on(opening)?;
        let id = self.fresh_id();
        self.files.insert(id, File { files, ino, write: flags & OPEN_WRITE != 0 });
        Ok((id, size))
    }

    fn close(&mut self, id: u32) -> Result<(u32, u64), Errno> {
        let file = self.files.remove(&id).ok_or(Errno::EBADF)?;
        self.runtime.block_on(async {
            let flushed = if file.write { file.files.flush(file.ino).await } else { Ok(()) };
            file.files.release(file.ino, file.write).await;
            flushed.map(|()| (id, 0))
        })
    }

    fn close_all(&mut self) {
        for (_, file) in self.files.drain() {
            self.runtime.spawn(async move { file.files.release(file.ino, file.write).await });
        }
    }
}

async fn open_file(
    files: &dyn FileSystem,
    caller: Caller,
    path: &str,
    flags: u32,
) -> Result<(u64, u64), Errno> {
    let write = flags & OPEN_WRITE != 0;
    let (attr, missing) = walk(files, caller, path).await?;
    if let Some((parent, name)) = missing {
        if flags & OPEN_CREATE == 0 {
            return Err(Errno::ENOENT);
        }
        if !may(caller, &attr, 3) {
            return Err(Errno::EACCES);
        }
        let made = files.create(caller, parent, name.as_bytes(), CREATE_MODE, false).await?;
        return Ok((made.attr.ino, made.attr.size));
    }
    if attr.kind != Kind::File {
        return Err(Errno::EISDIR);
    }
    if !may(caller, &attr, if write { 6 } else { 4 }) {
        return Err(Errno::EACCES);
    }
    let opened = files.open(caller, attr.ino, write).await?;
    Ok((opened.attr.ino, opened.attr.size))
}

/// Does one transfer and completes it, whatever comes of it.
async fn transfer(
    shared: Arc<Shared>,
    submission: Submission,
    file: File,
    region: Option<Arc<Region>>,
) {
    let user_data = submission.user_data;
    let outcome = carry_out(&shared, submission, &file, region.as_deref()).await;
    let result = outcome.unwrap_or_else(|errno| i64::from(-errno.0));
    shared.complete(Completion { user_data, result });
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
        file.files.write(shared.caller, file.ino, file_offset, bytes.freeze()).await?;
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
type Valid = (Submission, File, Option<Arc<Region>>);
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
    outcome: Result<(u32, u64), Errno>,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Result<(), ConnectionError> {
    let mut control = Control::new(kind);
    match outcome {
        Ok((id, value)) => (control.id, control.value) = (id, value),
        Err(errno) => control.status = -errno.0,
    }
    Ok(send_with_fds(socket, &control.encode(), fds)?)
}
