//! Memory for answers: each connection may have so many bytes read and not yet sent, so that a client that asks for much, or
//! stops to listen, takes memory and time from nobody else.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use rpc::{Code, Error};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of one connection that are being read or wait to be sent: keeps a fast link busy, with 1 MiB chunks.
const CONNECTION_BYTES: u32 = 8 << 20;
/// Connections that may be remembered after their last answer was sent.
const IDLE_MAX: usize = 256;

/// The budgets of all connections that have answers under way.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    connections: Mutex<HashMap<SocketAddr, Weak<Semaphore>>>,
}

/// Room for one answer; given back when the answer's bytes are dropped.
#[derive(Debug)]
pub(crate) struct Room {
    _permit: OwnedSemaphorePermit,
}

struct Held {
    bytes: Bytes,
    _room: Room,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Room {
    /// Keeps the room as long as `bytes` exist.
    pub(crate) fn hold(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Held { bytes, _room: self })
    }
}

impl Budget {
    /// Waits until an answer of `length` bytes has room on the connection from `peer`. A longer one than all its room waits
    /// for all of it.
    pub(crate) async fn room(&self, peer: SocketAddr, length: u32) -> Result<Room, Error> {
        let room = self.of(peer).acquire_many_owned(length.min(CONNECTION_BYTES)).await;
        room.map(|permit| Room { _permit: permit })
            .map_err(|_| Error::new(Code::Internal, "the budget of answers is closed"))
    }

    fn of(&self, peer: SocketAddr) -> Arc<Semaphore> {
        let mut all = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(&peer).and_then(Weak::upgrade) {
            return known;
        }
        if all.len() >= IDLE_MAX {
            all.retain(|_, budget| budget.strong_count() > 0);
        }
        let fresh = Arc::new(Semaphore::new(CONNECTION_BYTES as usize));
        all.insert(peer, Arc::downgrade(&fresh));
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(ready) => Some(ready),
            std::task::Poll::Pending => None,
        }
    }

    #[test]
    fn a_client_that_does_not_listen_waits_for_itself_alone() {
        let budget = Budget::default();
        let (greedy, other) = (SocketAddr::from(([1; 4], 1)), SocketAddr::from(([1; 4], 2)));
        let whole = Bytes::from_static(b"an answer");
        let held: Vec<Bytes> = (0..8)
            .map(|_| now(budget.room(greedy, 1 << 20)).unwrap().unwrap().hold(whole.clone()))
            .collect();
        assert!(now(budget.room(greedy, 4096)).is_none());
        assert!(now(budget.room(other, 64 << 20)).is_some());
        assert_eq!(held[0], whole);
        let part = held[0].slice(3..);
        drop(held);
        assert!(now(budget.room(greedy, 8 << 20)).is_none(), "a part keeps its room");
        drop(part);
        assert!(now(budget.room(greedy, 8 << 20)).is_some());
    }

    #[test]
    fn idle_connections_are_forgotten() {
        let budget = Budget::default();
        for port in 0..2_000 {
            now(budget.room(SocketAddr::from(([1; 4], port)), 1)).unwrap().unwrap();
        }
        assert!(budget.connections.lock().unwrap().len() <= IDLE_MAX);
    }
}
