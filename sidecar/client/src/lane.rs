//! Update ids: a lane carries one update at a time, so that a chunk needs to remember one result for each lane. A client
//! uses the same few lanes for one chunk, because the table of each chunk is small (PROTOCOL.md, W7).

use chain::id::{ChannelId, ChunkId, ClientId, UpdateId};
use tokio::sync::{Mutex, MutexGuard};

/// Updates of one client that are under way at once.
const LANES: u32 = 64;
/// Lanes that a client uses for one chunk.
const LANES_PER_CHUNK: u32 = 4;

/// The lanes of a client, each with the number of its last update.
#[derive(Debug)]
pub(crate) struct Lanes {
    client: ClientId,
    lanes: Vec<Mutex<u64>>,
}

/// A lane that is in use, with the id of its update. Retries use the same id.
#[derive(Debug)]
pub(crate) struct Lane<'a> {
    id: UpdateId,
    _held: MutexGuard<'a, u64>,
}

impl Lanes {
    pub(crate) fn new(client: ClientId) -> Self {
        Self { client, lanes: (0..LANES).map(|_| Mutex::new(0)).collect() }
    }

    /// Waits for a free lane of the chunk and takes its next number.
    pub(crate) async fn take(&self, chunk: ChunkId) -> Lane<'_> {
        // Neighbouring chunks of a file, which are written together, have lanes side by side.
        let first = chunk.file.get().wrapping_mul(7).wrapping_add(chunk.index) % u64::from(LANES);
        let nth = |n: u32| (first + u64::from(n)) % u64::from(LANES);
        let own = || {
            let all = (0..LANES_PER_CHUNK).map(nth);
            all.filter_map(|lane| Some((lane, self.lanes.get(usize::try_from(lane).ok()?)?)))
        };
        let free = own().find_map(|(lane, last)| Some((lane, last.try_lock().ok()?)));
        let (lane, mut last) = match free {
            Some(free) => free,
            None => {
                let waiting =
                    own().map(|(lane, last)| Box::pin(async move { (lane, last.lock().await) }));
                futures::future::select_all(waiting).await.0
            }
        };
        *last += 1;
        // Below the count of lanes.
        let channel = ChannelId::new(u32::try_from(lane).unwrap_or(0));
        Lane { id: UpdateId { client: self.client, channel, seq: *last }, _held: last }
    }
}

impl Lane<'_> {
    pub(crate) const fn id(&self) -> UpdateId {
        self.id
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use chain::id::InodeId;
    use futures::FutureExt;

    use super::*;

    const fn chunk(index: u64) -> ChunkId {
        ChunkId { file: InodeId::new(9), index }
    }

    #[tokio::test]
    async fn no_two_updates_share_an_id_and_lanes_do_not_run_side_by_side() {
        let lanes = Lanes::new(ClientId::new(7));
        let mut seen = HashSet::new();
        for _ in 0..3 {
            let mut held = Vec::new();
            for index in 0..u64::from(LANES) {
                held.push(lanes.take(chunk(index)).await);
            }
            let channels: HashSet<_> = held.iter().map(|lane| lane.id().channel).collect();
            assert_eq!(channels.len(), LANES as usize);
            assert!(held.iter().all(|lane| seen.insert(lane.id())));
        }
        assert!(seen.iter().all(|id| (1..=3).contains(&id.seq)));
    }

    #[tokio::test]
    async fn one_chunk_sees_few_lanes_and_waits_for_them() {
        let lanes = Lanes::new(ClientId::new(7));
        let mut held = Vec::new();
        for _ in 0..LANES_PER_CHUNK {
            held.push(lanes.take(chunk(63)).await);
        }
        let channels: HashSet<_> = held.iter().map(|lane| lane.id().channel).collect();
        assert_eq!(channels.len(), LANES_PER_CHUNK as usize);
        assert!(lanes.take(chunk(63)).now_or_never().is_none());
        let freed = held.pop().unwrap().id();
        let next = lanes.take(chunk(63)).await.id();
        assert_eq!((next.channel, next.seq), (freed.channel, freed.seq + 1));
    }
}
