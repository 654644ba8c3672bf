//! The C functions of `include/lampyris_ring.h` over [`crate::client`]. Every pointer is checked for null; a failure is a
//! negative errno.
#![expect(unsafe_code, reason = "the C interface takes raw pointers")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::time::Duration;

use crate::client::{Ring, RingError, Transfer};
use crate::layout::{Completion as CompletionParts, Op};

const EIO: c_int = 5;
const EAGAIN: c_int = 11;
const EINVAL: c_int = 22;
const EPIPE: c_int = 32;

/// `struct lampyris_completion`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CCompletion {
    /// The submission's.
    pub user_data: u64,
    /// Bytes done, or a negative errno.
    pub result: i64,
}

fn errno(error: &RingError) -> c_int {
    match error {
        RingError::Refused(errno) => -*errno,
        RingError::Argument(_) => -EINVAL,
        RingError::HungUp => -EPIPE,
        RingError::Connect(error) => -error.raw_os_error().unwrap_or(EIO),
        _ => -EIO,
    }
}

/// # Safety
/// `text` is null or a C string that lives during the call.
unsafe fn string<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and a C string by the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// # Safety
/// `ring` is null or came from `lampyris_ring_connect`, was not destroyed, and is used by one thread at a time.
unsafe fn ring_of<'a>(ring: *mut Ring) -> Option<&'a mut Ring> {
    // SAFETY: null, or a live ring that nobody else uses now, by the caller's promise.
    unsafe { ring.as_mut() }
}

/// Connects; null on failure, with the errno (positive) in `*error` if that is not null.
///
/// # Safety
/// `socket` is a C string; `error` is null or points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lampyris_ring_connect(
    socket: *const c_char,
    entries: u32,
    error: *mut c_int,
) -> *mut Ring {
    // SAFETY: passed on from the caller.
    let connected = match unsafe { string(socket) } {
        Some(socket) => Ring::connect(Path::new(socket), entries).map_err(|e| -errno(&e)),
        None => Err(EINVAL),
    };
    match connected {
        Ok(ring) => Box::into_raw(Box::new(ring)),
        Err(code) => {
            // SAFETY: null, or a valid int by the caller's promise.
            if let Some(error) = unsafe { error.as_mut() } {
                *error = code;
            }
            std::ptr::null_mut()
        }
    }
}

/// Hangs up and unmaps all memory of the ring; null is fine.
///
/// # Safety
/// `ring` came from `lampyris_ring_connect` and is not used afterwards, its memory neither.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lampyris_ring_destroy(ring: *mut Ring) {
    if !ring.is_null() {
        // SAFETY: made by `Box::into_raw`, destroyed once by the caller's promise.
        drop(unsafe { Box::from_raw(ring) });
    }
}

/// Shares `bytes` of new memory: its address, and its number in `*iov`; null on failure.
///
/// # Safety
/// `ring` as for `lampyris_ring_destroy`; `iov` points to a `uint32_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lampyris_ring_register(
    ring: *mut Ring,
    bytes: usize,
    iov: *mut u32,
) -> *mut c_void {
    // SAFETY: passed on from the caller.
    let (Some(ring), Some(number)) = (unsafe { ring_of(ring) }, unsafe { iov.as_mut() }) else {
        return std::ptr::null_mut();
    };
    match ring.register(bytes) {
        Ok(made) => {
            *number = made.id;
            made.region.as_ptr().cast()
        }
        Err(_) => std::ptr::null_mut(),
    }
}

/// Opens a file: its number, or a negative errno; its size in `*size` if that is not null.
///
/// # Safety
/// `ring` as for `lampyris_ring_destroy`; `path` is a C string; `size` is null or points to a `uint64_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lampyris_ring_open(
    ring: *mut Ring,
    path: *const c_char,
    flags: u32,
    size: *mut u64,
) -> i64 {
    // SAFETY: passed on from the caller.
    let (Some(ring), Some(path)) = (unsafe { ring_of(ring) }, unsafe { string(path) }) else {
        return (-EINVAL).into();
    };
    match ring.open(path, flags) {
        Ok(file) => {
            // SAFETY: null, or a valid number by the caller's promise.
            if let Some(size) = unsafe { size.as_mut() } {
                *size = file.size;
            }
            file.id.into()
        }
        Err(error) => errno(&error).into(),
    }
}

/// Closes a file; 0 or a negative errno.
///
/// # Safety
/// `ring` as for `lampyris_ring_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lampyris_ring_close(ring: *mut Ring, file: u32) -> c_int {
    // SAFETY: passed on from the caller.
    let Some(ring) = (unsafe { ring_of(ring) }) else { return -EINVAL };
    ring.close(file).map_or_else(|error| errno(&error), |()| 0)
}

/// Queues a transfer: `op` 1 read, 2 write, 3 sync. 0, `-EAGAIN` when as many as granted are under way, or another negative errno.
///
/// # Safety
/// `ring` as for `lampyris_ring_destroy`.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "C has no other way to name them")]
pub unsafe extern "C" fn lampyris_ring_prepare(
    ring: *mut Ring,
    op: c_int,
    file: u32,
    iov: u32,
    iov_offset: u64,
    file_offset: u64,
    length: u32,
    user_data: u64,
) -> c_int {
    // SAFETY: passed on from the caller.
    let Some(ring) = (unsafe { ring_of(ring) }) else { return -EINVAL };
    let op = match op {
        1 => Op::Read,
        2 => Op::Write,
        3 => Op::Sync,
        _ => return -EINVAL,
    };
    let transfer = Transfer { file, iov, iov_offset, file_offset, length, user_data };
    match ring.prepare(op, transfer) {
        Ok(true) => 0,
        Ok(false) => -EAGAIN,
        Err(error) => errno(&error),
    }
}

/// Wakes the sidecar for what was prepared; 0 or a negative errno.
///
/// # Safety
/// `ring` as for `lampyris_ring_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lampyris_ring_submit(ring: *mut Ring) -> c_int {
    // SAFETY: passed on from the caller.
    let Some(ring) = (unsafe { ring_of(ring) }) else { return -EINVAL };
    ring.submit().map_or_else(|error| errno(&error), |()| 0)
}

/// Takes up to `max` completions, waiting for the first at most `timeout_ms` (negative = for ever). Their number, 0 at the
/// timeout, or a negative errno.
///
/// # Safety
/// `ring` as for `lampyris_ring_destroy`; `completions` points to room for `max` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lampyris_ring_wait(
    ring: *mut Ring,
    completions: *mut CCompletion,
    max: u32,
    timeout_ms: i64,
) -> c_int {
    // SAFETY: passed on from the caller.
    let Some(ring) = (unsafe { ring_of(ring) }) else { return -EINVAL };
    if completions.is_null() || max == 0 {
        return -EINVAL;
    }
    let mut timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let mut count = 0;
    while count < max {
        match ring.wait(timeout) {
            Ok(Some(done)) => {
                let CompletionParts { user_data, result } = done;
                // SAFETY: `count` is below `max`, for which the caller promised room.
                unsafe { completions.add(count as usize).write(CCompletion { user_data, result }) };
                count += 1;
                timeout = Some(Duration::ZERO);
            }
            Ok(None) => break,
            Err(error) if count == 0 => return errno(&error),
            Err(_) => break,
        }
    }
    c_int::try_from(count).unwrap_or(c_int::MAX)
}
