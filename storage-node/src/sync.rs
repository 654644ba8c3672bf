//! Brings a syncing successor up to date: compares listings page by page, sends what differs.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chain::id::{ChainVersion, ChunkId, TargetId};
use chain::sync::{Entry, Page, plan};
use rpc::message::chain::{Link, ListChunks, SyncDone};
use rpc::{Code, Error};
use tokio::task::JoinSet;

use crate::convert;
use crate::node::Node;
use crate::target::Target;

/// Chunks compared at once: a page is about 100 KiB.
const PAGE: u32 = 2_048;
/// Chunks sent at once: bounds the memory that they take at both ends.
const IN_FLIGHT_MAX: usize = 8;
/// How long a question to the successor may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Before sync is tried again after a failure.
const PAUSE: Duration = Duration::from_millis(300);
/// Between reminders to a successor that has everything and is not serving yet.
const REMIND: Duration = Duration::from_millis(1_000);

/// Starts the work that the target's present chain asks for; it ends with that chain version.
pub(crate) fn follow(node: &Arc<Node>, target: &Arc<Target>) {
    let Some((to, version)) = target.replica().sync_to() else { return };
    let (node, target) = (Arc::clone(node), Arc::clone(target));
    tokio::spawn(async move {
        let is_current = || target.replica().sync_to() == Some((to, version));
        while is_current() {
            let job = Job { node: &node, target: &target, to, version };
            let pause = match job.run().await {
                // A successor that restarts forgets that it is complete: the next round, which
                // finds nothing to send, tells it again.
                Ok(_) => REMIND,
                Err(error) => {
                    tracing::warn!(chain = %target.chain, successor = %to, %error, "sync");
                    PAUSE
                }
            };
            tokio::time::sleep(pause).await;
        }
    });
}

struct Job<'a> {
    node: &'a Arc<Node>,
    target: &'a Arc<Target>,
    to: TargetId,
    version: ChainVersion,
}

impl Job<'_> {
    /// One pass over all chunks, then the word that nothing is lacking.
    async fn run(&self) -> Result<u64, Error> {
        let (mut after, mut sent, mut incarnation) = (None, 0, None);
        loop {
            let (theirs, process) = self.remote_page(after).await?;
            if *incarnation.get_or_insert(process) != process {
                return Err(Error::new(Code::VersionGap, "the successor restarted"));
            }
            let own = self.local_page(after)?;
            let plan = plan(&own, &theirs);
            sent += plan.chunks.len() as u64;
            self.send(plan.chunks).await?;
            after = plan.next;
            if after.is_none() {
                break;
            }
        }
        let request = SyncDone { link: self.link(), incarnation: incarnation.unwrap_or(0) };
        self.node.peers.call(self.to, &request, Bytes::new(), TIMEOUT).await?;
        if sent > 0 {
            tracing::info!(chain = %self.target.chain, successor = %self.to, chunks = sent,
                version = %self.version, "the successor is up to date");
        }
        Ok(sent)
    }

    fn link(&self) -> Link {
        Link { chain: self.target.chain, chain_version: self.version, target: self.to }
    }

    async fn remote_page(&self, after: Option<ChunkId>) -> Result<(Page, u64), Error> {
        let request = ListChunks { link: self.link(), after, limit: PAGE };
        let (page, _) = self.node.peers.call(self.to, &request, Bytes::new(), TIMEOUT).await?;
        let entry = |c: &rpc::message::chain::ListedChunk| Entry {
            chunk: c.chunk,
            committed: c.committed,
            is_pending: c.is_pending,
        };
        let entries: Vec<Entry> = page.chunks.iter().map(entry).collect();
        let is_forward = entries.is_sorted_by_key(|e| e.chunk)
            && entries.first().is_none_or(|e| Some(e.chunk) > after);
        if !is_forward || (entries.is_empty() && !page.is_last) {
            return Err(Error::new(Code::InvalidRequest, "a listing that does not go forward"));
        }
        Ok((Page { entries, is_last: page.is_last }, page.incarnation))
    }

    fn local_page(&self, after: Option<ChunkId>) -> Result<Page, Error> {
        let page = self.target.engine.list(self.target.id, after, PAGE as usize);
        let page = page.map_err(|error| convert::engine_error(&error))?;
        let is_last = page.len() < PAGE as usize;
        let entries = page.iter().map(|(chunk, info)| Entry {
            chunk: *chunk,
            committed: info.committed.as_ref().map(convert::identity),
            is_pending: info.pending.is_some(),
        });
        Ok(Page { entries: entries.collect(), is_last })
    }

    async fn send(&self, chunks: Vec<ChunkId>) -> Result<(), Error> {
        let mut under_way = JoinSet::new();
        for chunk in chunks {
            if under_way.len() >= IN_FLIGHT_MAX {
                self.reap(&mut under_way).await?;
            }
            let (target, version) = (Arc::clone(self.target), self.version);
            under_way.spawn(async move { target.sync(version, chunk).await });
        }
        while !under_way.is_empty() {
            self.reap(&mut under_way).await?;
        }
        Ok(())
    }

    async fn reap(&self, under_way: &mut JoinSet<Result<(), Error>>) -> Result<(), Error> {
        match under_way.join_next().await {
            Some(Ok(result)) => {
                self.node.metrics.synced_chunks.inc();
                result
            }
            Some(Err(error)) => Err(Error::new(Code::Internal, error.to_string())),
            None => Ok(()),
        }
    }
}
