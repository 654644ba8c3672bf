//! Taking a FUSE connection over from a process that died.
//!
//! The kernel negotiates a connection once, by INIT, and fuser wants to do that negotiation itself on
//! the descriptor it serves. So the negotiation always happens on a socket pair: the INIT request (read
//! from the device the first time, recorded ever after) goes in at one end, fuser answers at the other,
//! and then the device replaces fuser's end by `dup3`. The same code thus opens a connection and
//! resumes it, and both must give the same answer: the kernel keeps what it was told first.
//!
//! The order of the steps is the crash argument. The exchange is with the keeper, not only with the node
//! plugin, before the kernel gets the answer: so whoever dies, either it is known or INIT is still
//! unanswered and comes again. A resuming process always writes the recorded answer again: the kernel
//! refuses it with ENOENT if it had one. Requests that the dead process had read come again by
//! NOTIFY_RESEND, with bit 63 of their id set; it is sent before any thread reads, so that nothing
//! read by this process is doubled. Requests not yet read simply wait in the kernel.
#![expect(unsafe_code, reason = "dup3 replaces a descriptor that fuser owns and does not give out")]
#![expect(clippy::host_endian_bytes, reason = "the FUSE device speaks the byte order of the host")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fuser::{Config, Filesystem, Session, SessionACL};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Least buffer that the kernel accepts for a read of the device.
const READ_BYTES: usize = (1 << 20) + 4096;
/// `FUSE_INIT` of the FUSE protocol.
const OPCODE_INIT: u32 = 26;
/// `FUSE_NOTIFY_RESEND` of the FUSE protocol, since 7.40 (Linux 6.9).
const NOTIFY_RESEND: i32 = 7;
/// Length of a request's header.
const IN_HEADER_BYTES: usize = 40;
/// Marks the id of a request that was sent before.
pub const RESENT: u64 = 1 << 63;

/// Why a connection could not be opened or resumed.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The device or the socket pair failed.
    #[error("{0}")]
    Io(&'static str, #[source] io::Error),
    /// The first request on the device is no INIT: somebody else reads from it.
    #[error("first FUSE request has opcode {0}, not INIT")]
    NotInit(u32),
    /// The answer to INIT differs from the one the kernel was given.
    #[error("this version would negotiate the mount differently; restart the pod to upgrade it")]
    Renegotiated,
}

/// The opening exchange of a connection, as bytes on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// The INIT request.
    pub request: Vec<u8>,
    /// The answer to it.
    pub reply: Vec<u8>,
}

/// Reads the INIT request of a connection that nobody has answered yet.
///
/// Blocks until the kernel sends it, which it does at the mount. A process that read it and died is
/// covered by asking for it again.
///
/// # Errors
/// See [`ResumeError`].
pub fn read_init(device: &OwnedFd) -> Result<Vec<u8>, ResumeError> {
    resend(device)?;
    let mut buffer = vec![0; READ_BYTES];
    let count = loop {
        match rustix::io::read(device, &mut buffer[..]) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            other => break other.map_err(|error| ResumeError::Io("read INIT", error.into()))?,
        }
    };
    buffer.truncate(count);
    match opcode(&buffer) {
        Some(OPCODE_INIT) => Ok(buffer),
        other => Err(ResumeError::NotInit(other.unwrap_or(0))),
    }
}

/// Lets fuser answer `request` away from the device.
///
/// The session is not attached to anything yet: see [`attach`].
///
/// # Errors
/// See [`ResumeError`].
pub fn negotiate<F: Filesystem>(
    files: F,
    request: &[u8],
    config: Config,
) -> Result<(Session<F>, Vec<u8>), ResumeError> {
    let failed = |what| move |error: io::Error| ResumeError::Io(what, error);
    // Sequenced packets keep the boundaries that fuser expects of the device.
    let (ours, fusers) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed("make a socket pair")(error.into()))?;
    rustix::io::write(&ours, request).map_err(|error| failed("replay INIT")(error.into()))?;
    let session = Session::from_fd(files, fusers, SessionACL::All, config)
        .map_err(failed("negotiate the mount"))?;
    let mut reply = vec![0; 4096];
    let count = rustix::io::read(&ours, &mut reply[..])
        .map_err(|error| failed("read the answer to INIT")(error.into()))?;
    reply.truncate(count);
    Ok((session, reply))
}

/// Puts the device in the place of the session's socket and gives the kernel the answer to INIT.
///
/// Requests of a dead predecessor come again afterwards.
///
/// # Errors
/// See [`ResumeError`].
pub fn attach<F: Filesystem>(
    session: &Session<F>,
    device: &OwnedFd,
    reply: &[u8],
) -> Result<(), ResumeError> {
    match rustix::io::write(device, reply) {
        // The kernel has had it from a predecessor.
        Ok(_) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(ResumeError::Io("answer INIT", error.into())),
    }
    resend(device)?;
    // SAFETY: both numbers are open descriptors borrowed for the call. The target stays owned by the
    // session, which goes on to own the duplicate under the same number; no thread uses it yet.
    let result =
        unsafe { libc::dup3(device.as_raw_fd(), session.as_fd().as_raw_fd(), libc::O_CLOEXEC) };
    if result < 0 {
        return Err(ResumeError::Io("attach the device", io::Error::last_os_error()));
    }
    Ok(())
}

/// Asks the kernel to send again what was read and not answered.
///
/// Kernels without it (before 6.9) say EINVAL: then only requests in flight at a crash are lost.
fn resend(device: &OwnedFd) -> Result<(), ResumeError> {
    let mut notice = [0u8; 16];
    notice[..4].copy_from_slice(&16u32.to_ne_bytes());
    notice[4..8].copy_from_slice(&NOTIFY_RESEND.to_ne_bytes());
    match rustix::io::write(device, &notice) {
        Ok(_) | Err(rustix::io::Errno::INVAL) => Ok(()),
        Err(error) => Err(ResumeError::Io("ask for unanswered requests", error.into())),
    }
}

fn opcode(request: &[u8]) -> Option<u32> {
    if request.len() < IN_HEADER_BYTES {
        return None;
    }
    let bytes = request.get(4..8)?.try_into().ok()?;
    Some(u32::from_ne_bytes(bytes))
}
