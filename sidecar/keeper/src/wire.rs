//! Framing: one JSON object and a newline per message, descriptors with its first byte.
//!
//! A stream socket may hand over the bytes of two messages at once, but never merges two sets of
//! descriptors: they arrive in the order sent. So they are queued, and each message takes from the
//! queue what its type carries. Everything here is bounded, because the peer may be anybody who can
//! reach the socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message, newline included: a volume with a CA bundle is some KiB.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Most descriptors in one message and most that may wait for their message.
pub const MAX_DESCRIPTORS: usize = 8;
/// Bytes asked for in one receive.
const RECEIVE_BYTES: usize = 64 << 10;

/// Why a message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed or timed out.
    #[error("exchange a message")]
    Io(#[from] io::Error),
    /// The peer sent bytes that are not a message of this protocol.
    #[error("peer sent a malformed message: {0}")]
    Malformed(#[source] serde_json::Error),
    /// The peer sent more than the protocol allows.
    #[error("peer exceeded the limit of {0}")]
    TooMuch(&'static str),
    /// The peer closed the connection inside a message.
    #[error("peer closed the connection inside a message")]
    Truncated,
}

/// Received bytes and descriptors that are not yet whole messages.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    searched: usize,
    descriptors: VecDeque<OwnedFd>,
}

impl Inbox {
    /// Appends what one receive brought.
    ///
    /// # Errors
    /// [`WireError::TooMuch`] when a message or the queue of descriptors outgrows its bound.
    pub fn push(
        &mut self,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = OwnedFd>,
    ) -> Result<(), WireError> {
        self.bytes.extend_from_slice(bytes);
        self.descriptors.extend(descriptors);
        if self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(WireError::TooMuch("descriptors"));
        }
        let ends = self.bytes.iter().skip(self.searched).any(|byte| *byte == b'\n');
        if !ends && self.bytes.len() >= MAX_MESSAGE_BYTES {
            return Err(WireError::TooMuch("bytes in one message"));
        }
        Ok(())
    }

    /// Takes the next whole message.
    ///
    /// # Errors
    /// [`WireError::Malformed`] when the line is no `T`.
    pub fn pop<T: DeserializeOwned>(&mut self) -> Result<Option<T>, WireError> {
        let unseen = self.bytes.get(self.searched..).unwrap_or_default();
        let Some(offset) = unseen.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.bytes.len();
            return Ok(None);
        };
        let line: Vec<u8> = self.bytes.drain(..=self.searched + offset).collect();
        self.searched = 0;
        serde_json::from_slice(&line).map(Some).map_err(WireError::Malformed)
    }

    /// Takes the descriptor that was sent first among those waiting.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    /// Takes every waiting descriptor, oldest first.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        self.descriptors.drain(..).collect()
    }

    /// Whether no unfinished message waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Turns a message into its line.
///
/// # Errors
/// [`WireError::TooMuch`] when it is longer than [`MAX_MESSAGE_BYTES`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    let mut line = serde_json::to_vec(message).map_err(WireError::Malformed)?;
    line.push(b'\n');
    if line.len() > MAX_MESSAGE_BYTES {
        return Err(WireError::TooMuch("bytes in one message"));
    }
    Ok(line)
}

/// One receive from `socket` into `inbox`; 0 means the peer closed its side.
///
/// # Errors
/// Those of the socket (`WouldBlock` on a non-blocking one) and of [`Inbox::push`].
pub fn receive(socket: BorrowedFd<'_>, inbox: &mut Inbox) -> Result<usize, WireError> {
    let mut buffer = vec![0u8; RECEIVE_BYTES];
    let (count, descriptors) = ring::fd::recv_with_fds(socket, &mut buffer)?;
    inbox.push(buffer.get(..count).unwrap_or_default(), descriptors)?;
    Ok(count)
}

/// A blocking connection of either protocol.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    inbox: Inbox,
}

impl Connection {
    /// Wraps a connected stream.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, inbox: Inbox::default() }
    }

    /// The stream below, for its options.
    #[must_use]
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends one message with its descriptors.
    ///
    /// # Errors
    /// Those of [`encode`] and of the socket.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let line = encode(message)?;
        let mut sent = ring::fd::send_with_fds(self.stream.as_fd(), &line, descriptors)?;
        while let Some(rest) = line.get(sent..).filter(|rest| !rest.is_empty()) {
            sent += ring::fd::send_with_fds(self.stream.as_fd(), rest, &[])?;
        }
        Ok(())
    }

    /// Receives the next message; `None` when the peer closed after a whole one. Its descriptors wait
    /// in [`Connection::inbox`].
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>, WireError> {
        loop {
            if let Some(message) = self.inbox.pop()? {
                return Ok(Some(message));
            }
            if receive(self.stream.as_fd(), &mut self.inbox)? == 0 {
                return if self.inbox.is_empty() { Ok(None) } else { Err(WireError::Truncated) };
            }
        }
    }

    /// Where the descriptors of received messages wait.
    pub fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_split_in_two_receives_is_whole_once() {
        let mut inbox = Inbox::default();
        inbox.push(b"{\"a\":", []).unwrap();
        assert_eq!(inbox.pop::<serde_json::Value>().unwrap(), None);
        inbox.push(b"1}\n{\"b\":2}\n", []).unwrap();
        assert_eq!(inbox.pop::<serde_json::Value>().unwrap(), Some(serde_json::json!({"a": 1})));
        assert_eq!(inbox.pop::<serde_json::Value>().unwrap(), Some(serde_json::json!({"b": 2})));
        assert_eq!(inbox.pop::<serde_json::Value>().unwrap(), None);
        assert!(inbox.is_empty());
    }

    #[test]
    fn a_line_without_end_is_refused_at_the_limit() {
        let mut inbox = Inbox::default();
        inbox.push(&vec![b' '; MAX_MESSAGE_BYTES - 1], []).unwrap();
        assert!(inbox.pop::<serde_json::Value>().unwrap().is_none());
        assert!(matches!(inbox.push(b" ", []), Err(WireError::TooMuch(_))));
    }

    #[test]
    fn descriptors_of_two_messages_sent_at_once_keep_their_order() {
        let (left, right) = UnixStream::pair().unwrap();
        let (left, mut right) = (Connection::new(left), Connection::new(right));
        let files: Vec<_> = ["/dev/null", "/dev/zero"]
            .into_iter()
            .map(|path| std::fs::File::open(path).unwrap())
            .collect();
        left.send(&"first", &[files[0].as_fd()]).unwrap();
        left.send(&"second", &[files[1].as_fd()]).unwrap();
        for (name, file) in ["first", "second"].into_iter().zip(&files) {
            assert_eq!(right.receive::<String>().unwrap().as_deref(), Some(name));
            let got = right.inbox().take_descriptor().unwrap();
            assert_eq!(
                rustix::fs::fstat(&got).unwrap().st_rdev,
                rustix::fs::fstat(file).unwrap().st_rdev
            );
        }
    }

    #[test]
    fn a_peer_that_goes_away_inside_a_message_is_an_error() {
        let (left, right) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut &left, b"{\"a\"").unwrap();
        drop(left);
        let got = Connection::new(right).receive::<serde_json::Value>();
        assert!(matches!(got, Err(WireError::Truncated)));
    }
}
