//! Messages: one JSON object a line, descriptors with its first byte.
//!
//! The lines are those of [`ring::fd`]; here they become typed. The same connection serves blocking
//! callers and, on a non-blocking stream, tasks that wait for readiness themselves.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ring::fd::{FdError, LineReader};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The socket failed, or the peer broke the framing.
    #[error(transparent)]
    Socket(#[from] FdError),
    /// The socket could not be made or set up.
    #[error("set up a socket")]
    SetUp(#[from] io::Error),
    /// The line is not a message of this protocol.
    #[error("malformed message: {0}")]
    Malformed(#[from] serde_json::Error),
}

impl WireError {
    /// Whether a non-blocking stream had nothing to receive, or a blocking one timed out.
    #[must_use]
    pub fn is_would_block(&self) -> bool {
        matches!(self, Self::Socket(error) if error.is_would_block())
    }
}

/// One end of a conversation.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    reader: LineReader,
}

impl Connection {
    /// Wraps a connected stream.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, reader: LineReader::new() }
    }

    /// The stream below.
    #[must_use]
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends one message with its descriptors.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let text = serde_json::to_string(message)?;
        Ok(ring::fd::send_line(&self.stream, &text, descriptors)?)
    }

    /// Receives the next message and its descriptors; `None` when the peer closed after a whole one.
    ///
    /// # Errors
    /// See [`WireError`]. After [`WireError::Malformed`] the next message can be received.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<OwnedFd>)>, WireError> {
        match self.reader.recv_line(&self.stream)? {
            Some(line) => Ok(Some((serde_json::from_slice(&line.bytes)?, line.fds))),
            None => Ok(None),
        }
    }
}
