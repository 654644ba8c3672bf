//! Bytes with file descriptors over a unix stream socket, and lines of JSON with descriptors on their first byte.
//!
//! A descriptor rides on one byte of the stream. Whoever reads bytes without looking for descriptors loses them, so every
//! process that hands descriptors over reads through this module.
#![allow(clippy::needless_pass_by_value, reason = "a borrowed descriptor goes by value")]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors that one message may carry.
pub const FDS_MAX: usize = 32;

/// Most bytes of one line, the line feed included.
pub const LINE_MAX: usize = 1 << 20;

/// Bytes asked for by one receive of [`LineReader`].
const READ_BYTES: usize = 16 << 10;

/// Why descriptors or lines could not be passed.
#[derive(Debug, thiserror::Error)]
pub enum FdError {
    /// The socket failed; `WouldBlock` from a non-blocking one is reported as such by receives.
    #[error("{doing}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the kernel answered.
        #[source]
        source: std::io::Error,
    },
    /// The caller or the peer passed more descriptors than allowed; received ones are closed.
    #[error("{count} descriptors in one message, at most {max}")]
    TooMany {
        /// How many, as far as known.
        count: usize,
        /// How many are allowed.
        max: usize,
    },
    /// The peer sent a line longer than [`LINE_MAX`].
    #[error("line longer than {LINE_MAX} bytes")]
    LineTooLong,
    /// The peer closed the socket inside a line.
    #[error("peer closed the socket inside a line")]
    CutLine,
}

impl FdError {
    fn io(doing: &'static str, errno: Errno) -> Self {
        Self::Io { doing, source: errno.into() }
    }

    /// True if a non-blocking socket had nothing to receive.
    #[must_use]
    pub fn is_would_block(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == std::io::ErrorKind::WouldBlock)
    }
}

/// Sends all of `bytes`, with `fds` on the first one. Waits while the socket is full, also on a non-blocking one.
///
/// # Errors
/// [`FdError::TooMany`], or the socket's error. `bytes` must not be empty when there are descriptors (`InvalidInput`).
pub fn send_with_fds(
    stream: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), FdError> {
    if fds.len() > FDS_MAX {
        return Err(FdError::TooMany { count: fds.len(), max: FDS_MAX });
    }
    if bytes.is_empty() && !fds.is_empty() {
        return Err(FdError::io("send descriptors without a byte", Errno::INVAL));
    }
    let mut left = bytes;
    let mut fds_left = fds;
    while !left.is_empty() {
        match send_once(stream.as_fd(), left, fds_left) {
            Ok(sent) => {
                fds_left = &[];
                left = left.get(sent..).unwrap_or_default();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_writable(stream.as_fd())?,
            Err(errno) => return Err(FdError::io("send on unix socket", errno)),
        }
    }
    Ok(())
}

fn send_once(stream: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

fn wait_writable(stream: BorrowedFd<'_>) -> Result<(), FdError> {
    let mut fds = [PollFd::new(&stream, PollFlags::OUT)];
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(FdError::io("wait for unix socket", errno)),
    }
}

/// Receives into `buffer`: the byte count (0 when the peer has closed) and the descriptors that came with these bytes,
/// close-on-exec. Descriptors of one message never mix with those of the next.
///
/// # Errors
/// [`FdError::TooMany`] if more than `max_fds` came (all are closed), or the socket's error.
pub fn recv_with_fds(
    stream: impl AsFd,
    buffer: &mut [u8],
    max_fds: usize,
) -> Result<(usize, Vec<OwnedFd>), FdError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(buffer)];
        let received = match recvmsg(&stream, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(FdError::io("receive on unix socket", errno)),
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if fds.len() > max_fds || received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(FdError::TooMany { count: fds.len(), max: max_fds.min(FDS_MAX) });
        }
        return Ok((received.bytes, fds));
    }
}

/// Sends one line: `text` (which must not contain a line feed) and a line feed, with `fds` on its first byte.
///
/// # Errors
/// [`FdError::LineTooLong`], else as [`send_with_fds`].
pub fn send_line(stream: impl AsFd, text: &str, fds: &[BorrowedFd<'_>]) -> Result<(), FdError> {
    if text.len() >= LINE_MAX {
        return Err(FdError::LineTooLong);
    }
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(b'\n');
    send_with_fds(stream, &bytes, fds)
}

/// One received line.
#[derive(Debug)]
pub struct Line {
    /// The bytes without the line feed. Not checked to be UTF-8.
    pub bytes: Vec<u8>,
    /// The descriptors that came on its first byte.
    pub fds: Vec<OwnedFd>,
}

/// Cuts a stream into lines and keeps each line's descriptors with it.
///
/// The kernel ends a receive after the segment that carried descriptors, and a sender of this module sends a line with one
/// call: so descriptors belong to the last line that *begins* in the bytes received with them.
#[derive(Debug, Default)]
pub struct LineReader {
    bytes: Vec<u8>,
    /// Descriptors and the offset in `bytes` at which their line begins.
    fds: Vec<(usize, Vec<OwnedFd>)>,
    /// Everything before this offset holds no line feed.
    searched: usize,
}

impl LineReader {
    /// A reader at the start of a line.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The next line, or `None` when the peer has closed between two lines. On a non-blocking socket an error with
    /// [`FdError::is_would_block`] loses nothing: call again when the socket is readable.
    ///
    /// # Errors
    /// [`FdError`]; after any other error than would-block the stream is of no more use.
    pub fn recv_line(&mut self, stream: impl AsFd) -> Result<Option<Line>, FdError> {
        loop {
            if let Some(line) = self.take_line() {
                return Ok(Some(line));
            }
            if self.bytes.len() >= LINE_MAX {
                return Err(FdError::LineTooLong);
            }
            let start = self.bytes.len();
            self.bytes.resize(start + READ_BYTES, 0);
            let space = self.bytes.get_mut(start..).unwrap_or_default();
            let received = recv_with_fds(&stream, space, FDS_MAX);
            self.bytes.truncate(start + received.as_ref().map_or(0, |(count, _)| *count));
            let (count, fds) = received?;
            if !fds.is_empty() {
                self.fds.push((self.last_line_start(start), fds));
            }
            if count == 0 {
                return if self.bytes.is_empty() { Ok(None) } else { Err(FdError::CutLine) };
            }
        }
    }

    /// Where the last line begins whose first byte lies at or after `from` (the bytes end inside it or with it).
    fn last_line_start(&self, from: usize) -> usize {
        let body = self.bytes.len().saturating_sub(1);
        let before = self.bytes.get(..body).unwrap_or_default();
        let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        start.max(from.min(body))
    }

    fn take_line(&mut self) -> Option<Line> {
        let tail = self.bytes.get(self.searched..)?;
        let Some(at) = tail.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.bytes.len();
            return None;
        };
        let end = self.searched + at + 1;
        let mut bytes: Vec<u8> = self.bytes.drain(..end).collect();
        bytes.pop();
        self.searched = 0;
        let mut line_fds = Vec::new();
        for (start, fds) in std::mem::take(&mut self.fds) {
            if start < end {
                line_fds.extend(fds);
            } else {
                self.fds.push((start - end, fds));
            }
        }
        Some(Line { bytes, fds: line_fds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    fn file_with(text: &str) -> File {
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = File::from(fd);
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn text_of(fd: OwnedFd) -> String {
        let mut file = File::from(fd);
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn lines_keep_their_own_descriptors_when_received_together() {
        let (left, right) = UnixStream::pair().unwrap();
        let (one, two) = (file_with("one"), file_with("two"));
        send_line(&left, "plain", &[]).unwrap();
        send_line(&left, "first", &[one.as_fd()]).unwrap();
        send_line(&left, "between", &[]).unwrap();
        send_line(&left, "second", &[two.as_fd(), one.as_fd()]).unwrap();
        drop(left);
        let mut reader = LineReader::new();
        let mut seen = Vec::new();
        while let Some(line) = reader.recv_line(&right).unwrap() {
            let texts: Vec<_> = line.fds.into_iter().map(text_of).collect();
            seen.push((String::from_utf8(line.bytes).unwrap(), texts.join(",")));
        }
        let expected = [("plain", ""), ("first", "one"), ("between", ""), ("second", "two,one")];
        assert_eq!(seen, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn a_long_line_with_descriptors_arrives_whole() {
        let (left, right) = UnixStream::pair().unwrap();
        let text = "x".repeat(LINE_MAX - 1);
        let sent = text.clone();
        let file = file_with("data");
        let sender = std::thread::spawn(move || send_line(&left, &sent, &[file.as_fd()]));
        let line = LineReader::new().recv_line(&right).unwrap().unwrap();
        sender.join().unwrap().unwrap();
        assert_eq!(line.bytes, text.as_bytes());
        assert_eq!(line.fds.into_iter().map(text_of).collect::<Vec<_>>(), ["data"]);
    }

    #[test]
    fn more_descriptors_than_asked_for_are_refused_and_closed() {
        let (left, right) = UnixStream::pair().unwrap();
        let file = file_with("data");
        send_with_fds(&left, b"x", &[file.as_fd(), file.as_fd()]).unwrap();
        let refused = recv_with_fds(&right, &mut [0; 8], 1);
        assert!(matches!(refused, Err(FdError::TooMany { count: 2, max: 1 })), "{refused:?}");
        let sent = send_with_fds(&left, b"x", &[file.as_fd(); FDS_MAX + 1]);
        assert!(matches!(sent, Err(FdError::TooMany { .. })), "{sent:?}");
    }

    #[test]
    fn an_endless_line_and_a_cut_line_are_errors() {
        let (mut left, right) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || left.write_all(&vec![b'x'; LINE_MAX + READ_BYTES]));
        let endless = LineReader::new().recv_line(&right);
        assert!(matches!(endless, Err(FdError::LineTooLong)), "{endless:?}");
        drop(right);
        let _ = sender.join().unwrap();
        let (mut left, right) = UnixStream::pair().unwrap();
        left.write_all(b"half").unwrap();
        drop(left);
        let cut = LineReader::new().recv_line(&right);
        assert!(matches!(cut, Err(FdError::CutLine)), "{cut:?}");
    }

    #[test]
    fn would_block_loses_no_bytes() {
        let (mut left, right) = UnixStream::pair().unwrap();
        right.set_nonblocking(true).unwrap();
        let mut reader = LineReader::new();
        left.write_all(b"he").unwrap();
        assert!(reader.recv_line(&right).unwrap_err().is_would_block());
        left.write_all(b"llo\n").unwrap();
        assert_eq!(reader.recv_line(&right).unwrap().unwrap().bytes, b"hello");
    }
}
