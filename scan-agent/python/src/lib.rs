//! Python's way to the native ring: `lampyris._lampyris`, wrapped by `lampyris.ring`.
//!
//! Whole transfers only: a read is cut into pieces that fill the queue and the shared buffer, runs
//! without the interpreter's lock, and comes back as `bytes`. No knowledge of datasets here.
//!
//! Whatever waits for the sidecar looks for signals meanwhile, so Ctrl-C ends it. A call that was given up takes its
//! connection with it: what comes late would be taken for the answer to a later call.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyConnectionError, PyOSError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ring::client::{Iov, Ring, RingError, Transfer};
use ring::layout::{Completion, Op};

/// Bytes of one submission: large enough for bandwidth, small enough for several in flight.
const PIECE: usize = 1 << 20;
/// How long a wait goes on before it looks for signals and at its deadline.
const LOOK: Duration = Duration::from_millis(100);
/// Stack of a thread that asks the sidecar.
const STACK_BYTES: usize = 256 << 10;

/// A connection to the sidecar's `ring.sock` with one shared buffer. Usable from any thread of the
/// process that made it, one call at a time.
#[pyclass(name = "Ring", module = "lampyris._lampyris", frozen)]
#[derive(Debug)]
struct PyRing {
    /// None once it is lost.
    inner: Mutex<Option<Inner>>,
    timeout: Duration,
    /// Who connected. A fork has the same socket, queues and buffer, and the same place in them: it must not touch any.
    pid: u32,
}

#[derive(Debug)]
struct Inner {
    ring: Ring,
    iov: Iov,
    pieces: usize,
    /// By file: the size that was seen last.
    sizes: HashMap<u32, u64>,
}

#[pymethods]
impl PyRing {
    /// Connects; `entries` transfers at once (a power of two), a buffer of `buffer_bytes`. The sidecar has `timeout_s`
    /// for each answer; when it takes longer the connection is lost.
    #[new]
    #[pyo3(signature = (socket, entries = 16, buffer_bytes = 16 << 20, timeout_s = 60.0))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        entries: u32,
        buffer_bytes: usize,
        timeout_s: f64,
    ) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| PyValueError::new_err(format!("timeout_s: {error}")))?;
        if buffer_bytes < PIECE {
            return Err(PyValueError::new_err("buffer_bytes must be at least 1 MiB"));
        }
        let connect = move || Inner::connect(&socket, entries, buffer_bytes);
        let inner = py.detach(|| aside(timeout, connect))?.map_err(raise)?;
        Ok(Self { inner: Mutex::new(Some(inner)), timeout, pid: std::process::id() })
    }

    /// Opens the file at an absolute path under a mount: its number and size.
    fn open(&self, py: Python<'_>, path: String) -> PyResult<(u32, u64)> {
        self.ask(py, move |inner| {
            let opened = inner.ring.open(&path, 0)?;
            inner.sizes.insert(opened.id, opened.size);
            Ok((opened.id, opened.size))
        })
    }

    /// The file's size now.
    fn size(&self, py: Python<'_>, file: u32) -> PyResult<u64> {
        self.ask(py, move |inner| {
            let size = inner.ring.size(file)?;
            inner.sizes.insert(file, size);
            Ok(size)
        })
    }

    /// Closes a file.
    fn close(&self, py: Python<'_>, file: u32) -> PyResult<()> {
        self.ask(py, move |inner| {
            inner.sizes.remove(&file);
            inner.ring.close(file)
        })
    }

    /// Up to `length` bytes from `offset`; fewer only at the end of the file.
    fn read<'py>(
        &self,
        py: Python<'py>,
        file: u32,
        offset: u64,
        length: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let known = py.detach(|| {
            let slot = self.lock()?;
            PyResult::Ok(slot.as_ref().and_then(|inner| inner.sizes.get(&file).copied()))
        })?;
        let end = offset.saturating_add(length as u64);
        // The file may have grown, but only who reads on behind its end needs to know.
        let size = match known {
            Some(size) if end <= size => size,
            _ => self.size(py, file)?,
        };
        let left = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let bytes = py.detach(|| {
            let mut slot = self.lock()?;
            let inner = slot.as_mut().ok_or_else(lost)?;
            let read = inner.read(file, offset, length.min(left), self.timeout);
            let is_lost = read.as_ref().is_err_and(Failure::is_final);
            if is_lost || inner.ring.in_flight() > 0 {
                *slot = None;
            }
            read.map_err(Failure::raise)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }
}

impl PyRing {
    fn lock(&self) -> PyResult<MutexGuard<'_, Option<Inner>>> {
        // Before the lock: in a fork it may be held by a thread that is not there.
        if std::process::id() != self.pid {
            let message = "this ring was connected by another process: a fork connects its own";
            return Err(PyConnectionError::new_err(message));
        }
        Ok(self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks the sidecar something over the control socket.
    fn ask<T, F>(&self, py: Python<'_>, question: F) -> PyResult<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Inner) -> Result<T, RingError> + Send + 'static,
    {
        py.detach(|| {
            let mut slot = self.lock()?;
            let mut inner = slot.take().ok_or_else(lost)?;
            let (inner, outcome) = aside(self.timeout, move || {
                let outcome = question(&mut inner);
                (inner, outcome)
            })?;
            if outcome.as_ref().err().is_none_or(is_refusal) {
                *slot = Some(inner);
            }
            outcome.map_err(raise)
        })
    }
}

impl Inner {
    fn connect(socket: &Path, entries: u32, buffer_bytes: usize) -> Result<Self, RingError> {
        let mut ring = Ring::connect(socket, entries)?;
        let iov = ring.register(buffer_bytes)?;
        let granted = usize::try_from(entries).unwrap_or(1);
        let pieces = granted.min(buffer_bytes / PIECE);
        Ok(Self { ring, iov, pieces, sizes: HashMap::new() })
    }

    fn read(
        &mut self,
        file: u32,
        offset: u64,
        length: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, Failure> {
        let mut out = vec![0; length];
        let step = self.pieces * PIECE;
        let mut at = 0;
        while at < out.len() {
            let window = out.get_mut(at..).unwrap_or_default();
            let take = window.len().min(step);
            let window = window.get_mut(..take).unwrap_or_default();
            let got = self.read_window(file, offset + at as u64, window, timeout)?;
            at += got;
            if got < take {
                break;
            }
        }
        out.truncate(at);
        Ok(out)
    }

    /// Fills `window`, which fits the buffer; answers the bytes before the first gap.
    fn read_window(
        &mut self,
        file: u32,
        offset: u64,
        window: &mut [u8],
        timeout: Duration,
    ) -> Result<usize, Failure> {
        let pieces: Vec<(usize, usize)> = (0..window.len())
            .step_by(PIECE)
            .map(|start| (start, PIECE.min(window.len() - start)))
            .collect();
        for (start, length) in &pieces {
            let transfer = Transfer {
                file,
                iov: self.iov.id,
                iov_offset: *start as u64,
                file_offset: offset + *start as u64,
                length: u32::try_from(*length).map_err(|e| PyValueError::new_err(e.to_string()))?,
                user_data: *start as u64,
            };
            if !self.ring.prepare(Op::Read, transfer)? {
                return Err(PyConnectionError::new_err("the queue is full").into());
            }
        }
        self.ring.submit()?;
        let (mut short_at, mut refused) = (window.len(), None);
        // Every one, also when an earlier one was refused: the buffer is theirs until then.
        for _ in &pieces {
            let done = self.wait(timeout)?;
            let start = usize::try_from(done.user_data).unwrap_or(usize::MAX);
            let length = pieces.iter().find(|(at, _)| *at == start).map(|(_, length)| *length);
            let length =
                length.ok_or_else(|| PyConnectionError::new_err("an unknown completion"))?;
            let Ok(got) = usize::try_from(done.result) else {
                let errno = i32::try_from(done.result.saturating_neg()).unwrap_or(i32::MAX);
                refused = refused.or(Some(RingError::Refused(errno)));
                continue;
            };
            if got < length {
                short_at = short_at.min(start + got);
            }
            let target = window.get_mut(start..start + got.min(length)).unwrap_or_default();
            self.iov.region.copy_out(start, target).map_err(RingError::from)?;
        }
        refused.map_or(Ok(short_at), |error| Err(error.into()))
    }

    /// The next completion.
    fn wait(&mut self, timeout: Duration) -> Result<Completion, Failure> {
        let until = Instant::now().checked_add(timeout);
        loop {
            if let Some(done) = self.ring.wait(Some(look(until)))? {
                return Ok(done);
            }
            look_up(until)?;
        }
    }
}

/// Why a read failed.
#[derive(Debug)]
enum Failure {
    /// The ring or the sidecar failed it.
    Ring(RingError),
    /// It was given up.
    Stop(PyErr),
}

impl From<RingError> for Failure {
    fn from(error: RingError) -> Self {
        Self::Ring(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Stop(error)
    }
}

impl Failure {
    /// Whether the connection is of no use any more.
    fn is_final(&self) -> bool {
        !matches!(self, Self::Ring(error) if is_refusal(error))
    }

    fn raise(self) -> PyErr {
        match self {
            Self::Ring(error) => raise(error),
            Self::Stop(error) => error,
        }
    }
}

/// Does what only the sidecar can end on a thread of its own, so that this one can give it up. Such
/// a thread ends when the sidecar answers or is gone, and holds nobody up until then.
fn aside<T: Send + 'static>(
    timeout: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let until = Instant::now().checked_add(timeout);
    let (send, outcome) = sync_channel(1);
    let thread = std::thread::Builder::new().name("lampyris-ring".into()).stack_size(STACK_BYTES);
    // It fails to send when it was given up.
    thread.spawn(move || drop(send.send(work()))).map_err(PyErr::from)?;
    loop {
        match outcome.recv_timeout(look(until)) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => look_up(until)?,
            Err(RecvTimeoutError::Disconnected) => return Err(lost()),
        }
    }
}

/// How long a wait may go on before it looks up.
fn look(until: Option<Instant>) -> Duration {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    left.map_or(LOOK, |left| left.min(LOOK))
}

/// Lets Python's signal handlers run. An error ends the wait: a handler raised, as that of Ctrl-C does, or time is up.
fn look_up(until: Option<Instant>) -> PyResult<()> {
    let ending = || Err(PyConnectionError::new_err("Python is ending"));
    Python::try_attach(|py| py.check_signals()).unwrap_or_else(ending)?;
    if until.is_some_and(|until| until <= Instant::now()) {
        return Err(PyTimeoutError::new_err("the sidecar did not answer in time"));
    }
    Ok(())
}

fn lost() -> PyErr {
    PyConnectionError::new_err("the ring was lost by an earlier call: connect again")
}

/// Whether the connection is as good as before this error.
fn is_refusal(error: &RingError) -> bool {
    matches!(error, RingError::Refused(_) | RingError::Argument(_))
}

/// A refusal keeps its errno, so that `OSError` becomes `FileNotFoundError` and the like.
fn raise(error: RingError) -> PyErr {
    match error {
        RingError::Refused(errno) => {
            PyOSError::new_err((errno, std::io::Error::from_raw_os_error(errno).to_string()))
        }
        RingError::Argument(text) => PyValueError::new_err(text),
        other => {
            let cause = std::error::Error::source(&other).map(|e| format!(": {e}"));
            PyConnectionError::new_err(format!("{other}{}", cause.unwrap_or_default()))
        }
    }
}

/// The native part of the package `lampyris`.
#[pymodule]
fn _lampyris(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRing>()
}
