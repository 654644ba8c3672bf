//! The sidecar's end of `node.sock`: says who it is, receives volumes with their descriptors and, later,
//! fresh credentials; tells how each volume does.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use keeper::handover::{FromNode, FromSidecar, Hello, Role, SOCKET, VERSION};
use keeper::wire::{Connection, WireError};
use tokio::io::Interest;

/// A connection to the node plugin.
#[derive(Debug)]
pub struct Attachment {
    /// The same socket as in `connection`, for waiting.
    ready: tokio::net::UnixStream,
    connection: Connection,
}

impl Attachment {
    /// Connects to the node plugin and says hello.
    ///
    /// # Errors
    /// See [`WireError`]; the node plugin may be away for a while.
    pub fn connect(private_dir: &Path, role: Role) -> Result<Self, WireError> {
        let stream = UnixStream::connect(private_dir.join(SOCKET))?;
        stream.set_nonblocking(true)?;
        let ready = tokio::net::UnixStream::from_std(stream.try_clone()?)?;
        let attachment = Self { ready, connection: Connection::new(stream) };
        attachment.send(&FromSidecar::Hello(Hello { version: VERSION, role }))?;
        Ok(attachment)
    }

    /// Sends one message.
    ///
    /// # Errors
    /// See [`WireError`].
    pub fn send(&self, message: &FromSidecar) -> Result<(), WireError> {
        self.connection.send(message, &[])
    }

    /// The next message and its descriptors; `None` when the node plugin ended the conversation.
    /// Cancelling loses nothing.
    ///
    /// # Errors
    /// See [`WireError`].
    pub async fn receive(&mut self) -> Result<Option<(FromNode, Vec<OwnedFd>)>, WireError> {
        loop {
            self.ready.readable().await?;
            let connection = &mut self.connection;
            let received = self.ready.try_io(Interest::READABLE, || match connection.receive() {
                Err(error) if error.is_would_block() => {
                    Err(io::Error::from(io::ErrorKind::WouldBlock))
                }
                other => Ok(other),
            });
            match received {
                Ok(received) => return received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
