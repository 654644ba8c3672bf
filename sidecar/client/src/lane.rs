//! Update ids: a lane carries one update at a time, so that a chunk needs to remember one result for each lane.

use std::sync::{Mutex, PoisonError};

use chain::id::{ChannelId, ClientId, UpdateId};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Updates of one client that are under way at once.
const LANES: u32 = 64;

/// The lanes of a client.
#[derive(Debug)]
pub(crate) struct Lanes {
    client: ClientId,
    free: Mutex<Vec<(ChannelId, u64)>>,
    count: Semaphore,
}

/// A lane that is in use, with the id of its update. Retries use the same id.
#[derive(Debug)]
pub(crate) struct Lane<'a> {
    lanes: &'a Lanes,
    channel: ChannelId,
    seq: u64,
    _permit: Option<SemaphorePermit<'a>>,
}

impl Lanes {
    pub(crate) fn new(client: ClientId) -> Self {
        let free = (0..LANES).map(|lane| (ChannelId::new(lane), 0)).collect();
        Self { client, free: Mutex::new(free), count: Semaphore::new(LANES as usize) }
    }

    /// Waits for a free lane and takes its next number.
    pub(crate) async fn take(&self) -> Lane<'_> {
        // The semaphore is never closed; without a permit the lane list itself is the bound.
        let permit = self.count.acquire().await.ok();
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let (channel, last) = free.unwrap_or((ChannelId::new(LANES), 0));
        Lane { lanes: self, channel, seq: last + 1, _permit: permit }
    }
}

impl Lane<'_> {
    pub(crate) const fn id(&self) -> UpdateId {
        UpdateId { client: self.lanes.client, channel: self.channel, seq: self.seq }
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        let mut free = self.lanes.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push((self.channel, self.seq));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[tokio::test]
    async fn no_two_updates_share_an_id_and_lanes_do_not_run_side_by_side() {
        let lanes = Lanes::new(ClientId::new(7));
        let mut seen = HashSet::new();
        for _ in 0..3 {
            let mut held = Vec::new();
            for _ in 0..LANES {
                held.push(lanes.take().await);
            }
            let channels: HashSet<_> = held.iter().map(|lane| lane.id().channel).collect();
            assert_eq!(channels.len(), LANES as usize);
            assert!(held.iter().all(|lane| seen.insert(lane.id())));
        }
        assert!(seen.iter().all(|id| (1..=3).contains(&id.seq)));
    }
}
