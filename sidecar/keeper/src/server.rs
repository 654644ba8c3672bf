//! The keeper's socket: root only, a bounded number of connections, each answered in order.
//!
//! A thread per connection and blocking calls keep the process small and its failures plain: whatever
//! one client sends, at worst its own connection ends.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::log::{self, Level};
use crate::store::{Store, StoreError};
use crate::wire::{Connection, WireError};

/// Connections served at once: the node plugin needs one, a probe another.
const MAX_CONNECTIONS: usize = 16;
/// An idle connection is closed after this, so that a stuck client frees its place.
const IDLE: Duration = Duration::from_secs(30);
/// Stack of a connection's thread; nothing here recurses.
const STACK_BYTES: usize = 256 << 10;

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// Keep the descriptors sent along under a key.
    Put {
        /// `<pod uid>/<volume name>`.
        key: String,
        /// Anything the client wants back.
        meta: Value,
    },
    /// Give back an entry with duplicates of its descriptors.
    Get {
        /// Key of the entry.
        key: String,
    },
    /// Name all keys.
    List {},
    /// Forget an entry and close its descriptors.
    Drop {
        /// Key of the entry.
        key: String,
    },
}

/// What the keeper answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// Done.
    Ok(bool),
    /// Refused, with the reason.
    Error(String),
    /// The entry asked for; descriptors come along.
    Entry {
        /// Its key.
        key: String,
        /// Its metadata.
        meta: Value,
    },
    /// All keys.
    Keys(Vec<String>),
}

/// Why the keeper could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket could not be made.
    #[error("bind {}", .path.display())]
    Bind {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another keeper answers there: its descriptors must not be lost.
    #[error("a keeper already serves {}", .0.display())]
    AlreadyServed(PathBuf),
}

/// A bound keeper.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    store: Arc<Mutex<Store>>,
    places: Arc<(Mutex<usize>, Condvar)>,
    allowed_uid: u32,
}

impl Server {
    /// Binds the socket, mode 0600, for clients of `allowed_uid` (0 outside tests).
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn bind(path: &Path, allowed_uid: u32) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Bind { path: path.to_owned(), source };
        if UnixStream::connect(path).is_ok() {
            return Err(ServeError::AlreadyServed(path.to_owned()));
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(Self { listener, store: Arc::default(), places: Arc::default(), allowed_uid })
    }

    /// Serves until the process ends.
    pub fn run(&self) {
        for stream in self.listener.incoming() {
            match stream {
                Ok(stream) => self.admit(stream),
                // Out of descriptors or a client that went away: the next accept may do better.
                Err(error) => {
                    log::write(Level::Warn, "accept", &[("error", &error)]);
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn admit(&self, stream: UnixStream) {
        let peer = ring::peer::peer_of(&stream);
        if !peer.as_ref().is_ok_and(|peer| peer.uid == self.allowed_uid) {
            let peer = format!("{peer:?}");
            return log::write(Level::Warn, "refused a client of another user", &[("peer", &peer)]);
        }
        let place = Place::take(Arc::clone(&self.places));
        let store = Arc::clone(&self.store);
        let spawned = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            if let Err(error) = converse(stream, &store) {
                log::write(Level::Warn, "a connection ended", &[("error", &error)]);
            }
            drop(place);
        });
        if let Err(error) = spawned {
            log::write(Level::Error, "start a thread", &[("error", &error)]);
        }
    }
}

/// One of the bounded places for connections; given back when dropped.
struct Place(Arc<(Mutex<usize>, Condvar)>);

impl Place {
    fn take(places: Arc<(Mutex<usize>, Condvar)>) -> Self {
        let (count, freed) = &*places;
        let taken = count.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken = freed
            .wait_while(taken, |taken| *taken >= MAX_CONNECTIONS)
            .unwrap_or_else(PoisonError::into_inner);
        *taken += 1;
        drop(taken);
        Self(places)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (count, freed) = &*self.0;
        *count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        freed.notify_one();
    }
}

fn converse(stream: UnixStream, store: &Mutex<Store>) -> Result<(), WireError> {
    stream.set_read_timeout(Some(IDLE))?;
    stream.set_write_timeout(Some(IDLE))?;
    let mut connection = Connection::new(stream);
    loop {
        let (request, descriptors) = match connection.receive::<Request>() {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(()),
            Err(error) if error.is_would_block() => return Ok(()),
            Err(error) => {
                connection.send(&Answer::Error(error.to_string()), &[])?;
                return Err(error);
            }
        };
        let held = {
            let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
            answer(&mut store, request, descriptors)
        };
        match held {
            Ok((answer, descriptors)) => {
                let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                connection.send(&answer, &descriptors)?;
            }
            Err(error) => connection.send(&Answer::Error(error.to_string()), &[])?,
        }
    }
}

type Held = Arc<[OwnedFd]>;

fn answer(
    store: &mut Store,
    request: Request,
    descriptors: Vec<OwnedFd>,
) -> Result<(Answer, Held), StoreError> {
    match request {
        Request::Put { key, meta } => store.put(&key, &meta, descriptors)?,
        Request::Drop { key } => store.remove(&key),
        Request::List {} => return Ok((Answer::Keys(store.keys()), Held::default())),
        Request::Get { key } => {
            let entry = store.get(&key)?;
            let meta = serde_json::from_str(&entry.meta).unwrap_or(Value::Null);
            return Ok((Answer::Entry { key, meta }, entry.descriptors));
        }
    }
    Ok((Answer::Ok(true), Held::default()))
}
