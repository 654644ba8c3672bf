//! Python's way to the native ring: `lampyris._lampyris`, wrapped by `lampyris.ring`.
//!
//! Whole transfers only: a read is cut into pieces that fill the queue and the shared buffer, runs
//! without the interpreter's lock, and comes back as `bytes`. No knowledge of datasets here.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyConnectionError, PyOSError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ring::client::{Iov, Ring, RingError, Transfer};
use ring::layout::Op;

/// Bytes of one submission: large enough for bandwidth, small enough for several in flight.
const PIECE: usize = 1 << 20;

/// A connection to the sidecar's `ring.sock` with one shared buffer. Usable from any thread, one
/// call at a time.
#[pyclass(name = "Ring", module = "lampyris._lampyris", frozen)]
#[derive(Debug)]
struct PyRing {
    inner: Mutex<Inner>,
    timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    ring: Ring,
    iov: Iov,
    pieces: usize,
    /// An earlier call gave up with transfers under way: their completions would be taken for
    /// later ones.
    is_lost: bool,
}

#[pymethods]
impl PyRing {
    /// Connects; `entries` transfers at once (a power of two), a buffer of `buffer_bytes`.
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
        let inner = py.detach(move || {
            let mut ring = Ring::connect(&socket, entries)?;
            let iov = ring.register(buffer_bytes)?;
            let granted = usize::try_from(entries).unwrap_or(1);
            let pieces = granted.min(buffer_bytes / PIECE);
            Ok(Inner { ring, iov, pieces, is_lost: false })
        });
        Ok(Self { inner: Mutex::new(inner.map_err(raise)?), timeout })
    }

    /// Opens the file at an absolute path under a mount: its number and size.
    fn open(&self, py: Python<'_>, path: &str) -> PyResult<(u32, u64)> {
        let opened = py.detach(|| self.lock().ring.open(path, 0)).map_err(raise)?;
        Ok((opened.id, opened.size))
    }

    /// The file's size now.
    fn size(&self, py: Python<'_>, file: u32) -> PyResult<u64> {
        py.detach(|| self.lock().ring.size(file)).map_err(raise)
    }

    /// Closes a file.
    fn close(&self, py: Python<'_>, file: u32) -> PyResult<()> {
        py.detach(|| self.lock().ring.close(file)).map_err(raise)
    }

    /// Up to `length` bytes from `offset`; fewer only at the end of the file.
    fn read<'py>(
        &self,
        py: Python<'py>,
        file: u32,
        offset: u64,
        length: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.lock().read(file, offset, length, self.timeout))?;
        Ok(PyBytes::new(py, &bytes))
    }
}

impl PyRing {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn read(
        &mut self,
        file: u32,
        offset: u64,
        length: usize,
        timeout: Duration,
    ) -> PyResult<Vec<u8>> {
        if self.is_lost {
            return Err(PyConnectionError::new_err("an earlier transfer was given up"));
        }
        let size = self.ring.size(file).map_err(raise)?;
        let left = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut out = vec![0; length.min(left)];
        let step = self.pieces * PIECE;
        let mut at = 0;
        while at < out.len() {
            let window = out.get_mut(at..).unwrap_or_default();
            let take = window.len().min(step);
            let window = window.get_mut(..take).unwrap_or_default();
            let got = self.read_window(file, offset + at as u64, window, timeout);
            self.is_lost = self.ring.in_flight() > 0;
            let got = got?;
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
    ) -> PyResult<usize> {
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
            if !self.ring.prepare(Op::Read, transfer).map_err(raise)? {
                return Err(PyConnectionError::new_err("the queue is full"));
            }
        }
        self.ring.submit().map_err(raise)?;
        let mut short_at = window.len();
        for _ in &pieces {
            let Some(done) = self.ring.wait(Some(timeout)).map_err(raise)? else {
                return Err(PyTimeoutError::new_err("the sidecar did not answer in time"));
            };
            let start = usize::try_from(done.user_data).unwrap_or(usize::MAX);
            let length = pieces.iter().find(|(at, _)| *at == start).map(|(_, length)| *length);
            let length =
                length.ok_or_else(|| PyConnectionError::new_err("an unknown completion"))?;
            let got = usize::try_from(done.result).map_err(|_| {
                let errno = i32::try_from(done.result.saturating_neg()).unwrap_or(i32::MAX);
                raise(RingError::Refused(errno))
            })?;
            if got < length {
                short_at = short_at.min(start + got);
            }
            let target = window.get_mut(start..start + got.min(length)).unwrap_or_default();
            let copied = self.iov.region.copy_out(start, target);
            copied.map_err(|error| raise(error.into()))?;
        }
        Ok(short_at)
    }
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
