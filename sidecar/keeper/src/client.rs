//! The node plugin's side of the keeper: one connection per call.
//!
//! A connection is cheap and the keeper may have been replaced since the last one.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::server::{Answer, Request};
use crate::wire::{Connection, WireError};

/// A keeper that takes longer is treated as away.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Why a call of the keeper failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The keeper does not answer.
    #[error("reach the keeper at {}", .path.display())]
    Unreachable {
        /// Its socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: WireError,
    },
    /// This process could not make the call.
    #[error("call the keeper")]
    Local(#[from] std::io::Error),
    /// The keeper said no.
    #[error("the keeper refused: {0}")]
    Refused(String),
    /// The keeper answered something else than it was asked.
    #[error("the keeper misbehaved: {0}")]
    Misbehaved(&'static str),
}

/// Calls a keeper.
#[derive(Debug, Clone)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// A client of the keeper at `path`.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Keeps descriptors and metadata; without descriptors only replaces the metadata.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn put(
        &self,
        key: &str,
        meta: Value,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        self.done(&Request::Put { key: key.to_owned(), meta }, descriptors)
    }

    /// Forgets an entry.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn drop_entry(&self, key: &str) -> Result<(), ClientError> {
        self.done(&Request::Drop { key: key.to_owned() }, &[])
    }

    /// Metadata and descriptors of an entry.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get(&self, key: &str) -> Result<(Value, Vec<OwnedFd>), ClientError> {
        match self.call(&Request::Get { key: key.to_owned() }, &[])? {
            (Answer::Entry { meta, .. }, descriptors) => Ok((meta, descriptors)),
            _ => Err(ClientError::Misbehaved("expected an entry")),
        }
    }

    /// All keys.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn list(&self) -> Result<Vec<String>, ClientError> {
        match self.call(&Request::List {}, &[])? {
            (Answer::Keys(keys), _) => Ok(keys),
            _ => Err(ClientError::Misbehaved("expected keys")),
        }
    }

    fn done(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        match self.call(request, fds)? {
            (Answer::Ok(true), _) => Ok(()),
            _ => Err(ClientError::Misbehaved("expected ok")),
        }
    }

    fn call(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Answer, Vec<OwnedFd>), ClientError> {
        let unreachable = |source| ClientError::Unreachable { path: self.path.clone(), source };
        match self.exchange(request, descriptors).map_err(unreachable)? {
            Some((Answer::Error(reason), _)) => Err(ClientError::Refused(reason)),
            Some(answered) => Ok(answered),
            None => Err(ClientError::Misbehaved("closed without an answer")),
        }
    }

    fn exchange(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Option<(Answer, Vec<OwnedFd>)>, WireError> {
        let stream = UnixStream::connect(&self.path)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut connection = Connection::new(stream);
        connection.send(request, descriptors)?;
        connection.receive()
    }
}
