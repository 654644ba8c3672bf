//! What a syncing target lacks: a comparison of two sorted listings, page by page.
//!
//! Content is equal if chain version of the update, its version and the checksum agree, never by
//! the version alone (N6). Whatever differs is sent whole; what the predecessor does not have is
//! erased (N7). Writes meanwhile are forwarded, so one pass suffices.

use crate::id::ChunkId;
use crate::replica::Identity;

/// One chunk in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its committed content.
    pub committed: Option<Identity>,
    /// Whether a state is pending.
    pub is_pending: bool,
}

/// Part of a listing: entries in order from behind a cursor on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The entries.
    pub entries: Vec<Entry>,
    /// Whether the listing ends with this page.
    pub is_last: bool,
}

/// What follows from one page of each side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Chunks to send or erase, in order.
    pub chunks: Vec<ChunkId>,
    /// Where the next pages start; `None` at the end.
    pub next: Option<ChunkId>,
}

/// Compares the pages behind the same cursor. `own` is the predecessor's listing.
#[must_use]
pub fn plan(own: &Page, theirs: &Page) -> Plan {
    let end = |page: &Page| {
        if page.is_last { None } else { page.entries.last().map(|e| e.chunk) }
    };
    // Both pages are complete up to here, and perhaps not behind it.
    let bound = match (end(own), end(theirs)) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    let is_covered = |e: &&Entry| bound.is_none_or(|bound| e.chunk <= bound);
    let mut ours = own.entries.iter().filter(is_covered).peekable();
    let mut others = theirs.entries.iter().filter(is_covered).peekable();
    let mut chunks = Vec::new();
    loop {
        match (ours.peek(), others.peek()) {
            (None, None) => break,
            (Some(a), Some(b)) if a.chunk == b.chunk => {
                if a.committed != b.committed || b.is_pending {
                    chunks.push(a.chunk);
                }
                ours.next();
                others.next();
            }
            (Some(a), b) if b.is_none_or(|b| a.chunk < b.chunk) => {
                chunks.push(a.chunk);
                ours.next();
            }
            (_, Some(b)) => {
                chunks.push(b.chunk);
                others.next();
            }
            (Some(_), None) => break,
        }
    }
    Plan { chunks, next: bound }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ChainVersion, InodeId, UpdateVersion};

    fn entry(index: u64, assigned: u64, version: u64, is_pending: bool) -> Entry {
        let identity = Identity {
            assigned: ChainVersion::new(assigned),
            version: UpdateVersion::new(version),
            checksum: 7,
        };
        let chunk = ChunkId { file: InodeId::new(1), index };
        Entry { chunk, committed: Some(identity), is_pending }
    }

    fn page(entries: &[Entry], is_last: bool) -> Page {
        Page { entries: entries.to_vec(), is_last }
    }

    fn indices(plan: &Plan) -> Vec<u64> {
        plan.chunks.iter().map(|c| c.index).collect()
    }

    #[test]
    fn only_what_differs_is_sent_or_erased() {
        let own =
            page(&[entry(1, 3, 5, false), entry(2, 3, 5, false), entry(4, 9, 1, false)], true);
        let theirs = page(
            &[
                entry(1, 3, 5, false),
                entry(2, 2, 5, false),
                entry(3, 1, 1, false),
                entry(4, 9, 1, true),
            ],
            true,
        );
        let plan = plan(&own, &theirs);
        assert_eq!(indices(&plan), [2, 3, 4]);
        assert_eq!(plan.next, None);
    }

    #[test]
    fn a_plan_reaches_only_as_far_as_both_pages() {
        let own = page(&[entry(1, 1, 1, false), entry(9, 1, 1, false)], false);
        let theirs = page(&[entry(2, 1, 1, false), entry(5, 1, 1, false)], false);
        let plan = plan(&own, &theirs);
        assert_eq!(indices(&plan), [1, 2, 5]);
        assert_eq!(plan.next.map(|c| c.index), Some(5));
    }

    #[test]
    fn an_empty_target_is_sent_everything() {
        let own = page(&[entry(1, 1, 1, false), entry(2, 1, 1, false)], true);
        assert_eq!(indices(&plan(&own, &page(&[], true))), [1, 2]);
        assert_eq!(indices(&plan(&page(&[], true), &own)), [1, 2]);
    }
}
