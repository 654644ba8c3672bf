//! Block IO: positioned reads and writes of aligned buffers, by io_uring or by threads.
//!
//! Both take requests from any thread and own file and buffer until the kernel is done with
//! them, also when nobody waits for the answer any more.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use tokio::sync::oneshot;

use super::buf::AlignedBuf;
use super::types::IoMode;
use crate::uring::Uring;

/// Threads of the twin: enough to keep a disk's queue filled by 4 KiB reads on few cores.
const THREADS: usize = 8;

/// Direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// From the file into the buffer.
    Read,
    /// From the buffer into the file.
    Write,
}

/// One read or write of a whole buffer.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    pub(crate) file: Arc<File>,
    /// Position in the file, in bytes.
    pub(crate) offset: u64,
    pub(crate) buf: AlignedBuf,
    /// Bytes that are through.
    pub(crate) done: usize,
    pub(crate) reply: oneshot::Sender<io::Result<AlignedBuf>>,
}

impl Request {
    /// Takes the kernel's answer: the request again if bytes are left, else it is answered.
    pub(crate) fn advance(mut self, result: io::Result<usize>) -> Option<Self> {
        let answer = match result {
            Ok(0) if self.buf.len() > 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.done += count;
                if self.done < self.buf.len() {
                    return Some(self);
                }
                Ok(self.buf)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Some(self),
            Err(e) => Err(e),
        };
        // A receiver that is gone wanted no answer.
        drop(self.reply.send(answer));
        None
    }
}

/// Requests on their way to the thread or threads that do them.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) requests: VecDeque<Request>,
    pub(crate) is_closed: bool,
}

impl Queue {
    /// Adds a request. Nobody would ever take it from a closed queue: there it is dropped, which
    /// tells its caller.
    pub(crate) fn push(&mut self, request: Request) {
        if !self.is_closed {
            self.requests.push_back(request);
        }
    }
}

/// What a caller is told whose request nobody will do.
fn stopped() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "block IO has stopped")
}

/// Whether no further request will be done: the whole disk is out of reach, not one page.
pub(super) fn is_stopped(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

/// The way in which blocks are read and written.
#[derive(Debug)]
pub(super) enum Io {
    Uring(Uring),
    Threads(Threads),
}

impl Io {
    /// Starts as asked; with [`IoMode::Auto`] also tells why io_uring is not used.
    pub(super) fn start(mode: IoMode) -> io::Result<(Self, Option<String>)> {
        let uring = match mode {
            IoMode::Threads => None,
            IoMode::Auto | IoMode::Uring => Some(Uring::start()),
        };
        match uring {
            Some(Ok(uring)) => Ok((Self::Uring(uring), None)),
            Some(Err(e)) if mode == IoMode::Uring => Err(e),
            Some(Err(e)) => Ok((Self::Threads(Threads::start()?), Some(e.to_string()))),
            None => Ok((Self::Threads(Threads::start()?), None)),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Uring(_) => "io_uring",
            Self::Threads(_) => "threads",
        }
    }

    /// Fills `buf` from `offset`.
    pub(super) async fn read(
        &self,
        file: &Arc<File>,
        offset: u64,
        buf: AlignedBuf,
    ) -> io::Result<AlignedBuf> {
        self.submit(Kind::Read, file, offset, buf).await
    }

    /// Writes all of `buf` at `offset`; not durable before a barrier.
    pub(super) async fn write(
        &self,
        file: &Arc<File>,
        offset: u64,
        buf: AlignedBuf,
    ) -> io::Result<AlignedBuf> {
        self.submit(Kind::Write, file, offset, buf).await
    }

    async fn submit(
        &self,
        kind: Kind,
        file: &Arc<File>,
        offset: u64,
        buf: AlignedBuf,
    ) -> io::Result<AlignedBuf> {
        let (reply, answer) = oneshot::channel();
        let file = Arc::clone(file);
        let request = Request { kind, file, offset, buf, done: 0, reply };
        match self {
            Self::Uring(uring) => uring.submit(request),
            Self::Threads(threads) => threads.submit(request),
        }
        answer.await.unwrap_or_else(|_| Err(stopped()))
    }
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let is_idle = |q: &mut Queue| q.requests.is_empty() && !q.is_closed;
        loop {
            let queue = self.changed.wait_while(self.lock(), is_idle);
            let next = queue.unwrap_or_else(PoisonError::into_inner).requests.pop_front();
            let Some(mut request) = next else { return };
            loop {
                let result = transfer(&mut request);
                match request.advance(result) {
                    Some(rest) => request = rest,
                    None => break,
                }
            }
        }
    }
}

fn transfer(request: &mut Request) -> io::Result<usize> {
    let at = request.offset + request.done as u64;
    let (file, done) = (&request.file, request.done);
    Ok(match request.kind {
        Kind::Read => {
            let space = request.buf.as_mut().get_mut(done..).unwrap_or_default();
            rustix::io::pread(file, space, at)?
        }
        Kind::Write => {
            let rest = request.buf.as_ref().get(done..).unwrap_or_default();
            rustix::io::pwrite(file, rest, at)?
        }
    })
}

/// The twin of [`Uring`] for kernels and seccomp profiles that refuse it.
#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut this = Self { shared, threads: Vec::with_capacity(THREADS) };
        for _ in 0..THREADS {
            let shared = Arc::clone(&this.shared);
            let thread = thread::Builder::new().name("block-io".to_owned());
            this.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(this)
    }

    /// Takes no further requests; those that were taken are done.
    pub(super) fn close(&self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }

    fn submit(&self, request: Request) {
        self.shared.lock().push(request);
        self.shared.changed.notify_one();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing left to wait for.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modes() -> Vec<Io> {
        [IoMode::Auto, IoMode::Threads].map(|mode| Io::start(mode).unwrap().0).into()
    }

    #[tokio::test]
    async fn an_error_of_the_device_is_an_error_and_never_bytes() {
        // Nothing is mapped at its start, so a read there is EIO; and behind its end nothing is.
        let bad = Arc::new(File::open("/proc/self/mem").unwrap());
        let short = Arc::new(tempfile::tempfile().unwrap());
        for io in modes() {
            let failed = io.read(&bad, 0, AlignedBuf::zeroed(1)).await.unwrap_err();
            assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{}", io.name());
            let cut = io.read(&short, 0, AlignedBuf::zeroed(1)).await.unwrap_err();
            assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof, "{}", io.name());
            assert!(!is_stopped(&failed) && !is_stopped(&cut));
        }
    }

    #[tokio::test]
    async fn a_request_after_the_end_of_block_io_is_refused_and_does_not_wait() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        for io in modes() {
            match &io {
                Io::Uring(uring) => uring.close(),
                Io::Threads(threads) => threads.close(),
            }
            let refused = io.read(&file, 0, AlignedBuf::zeroed(1)).await.unwrap_err();
            assert!(is_stopped(&refused), "{}: {refused}", io.name());
        }
    }
}
