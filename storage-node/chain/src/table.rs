//! The chain table: which targets form a chain, in which order, and who serves.

mod next;

pub use next::{Local, Report, Reports, Revive, next};

use crate::id::{ChainId, ChainVersion, NodeId, TargetId};

/// What a target does for its chain, as the manager has published it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PublicState {
    /// Holds every committed update; answers reads and takes part in writes.
    Serving,
    /// Holds a complete copy of a chain that nobody serves: any of these may revive it.
    LastServing,
    /// Catching up behind the serving targets: receives forwards, answers no reads.
    Syncing,
    /// Alive again, queued until it may sync.
    Waiting,
    /// Not reachable, or not started.
    Offline,
}

impl PublicState {
    /// Every state, in write order of a chain's list.
    pub const ALL: [Self; 5] =
        [Self::Serving, Self::LastServing, Self::Syncing, Self::Waiting, Self::Offline];
}

/// One member of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChainTarget {
    /// The target.
    pub id: TargetId,
    /// Its published state.
    pub state: PublicState,
}

/// A chain at one version. Serving targets come first, head before tail; at most one syncing
/// target follows them; the others come last.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Chain {
    /// The chain.
    pub id: ChainId,
    /// Fencing number of this state of the chain.
    pub version: ChainVersion,
    /// All members, the absent ones too.
    pub targets: Vec<ChainTarget>,
}

impl Chain {
    /// Serving targets, head first.
    pub fn serving(&self) -> impl DoubleEndedIterator<Item = TargetId> + '_ {
        self.targets.iter().filter(|t| t.state == PublicState::Serving).map(|t| t.id)
    }

    /// The target that assigns versions, if anybody serves.
    #[must_use]
    pub fn head(&self) -> Option<TargetId> {
        self.serving().next()
    }

    /// The last serving target: what it holds is committed.
    #[must_use]
    pub fn tail(&self) -> Option<TargetId> {
        self.serving().next_back()
    }

    /// The target that is catching up, if any.
    #[must_use]
    pub fn syncing(&self) -> Option<TargetId> {
        self.targets.iter().find(|t| t.state == PublicState::Syncing).map(|t| t.id)
    }

    /// The published state of `target`; `None` if it is not a member.
    #[must_use]
    pub fn state_of(&self, target: TargetId) -> Option<PublicState> {
        self.targets.iter().find(|t| t.id == target).map(|t| t.state)
    }

    /// The next target in write order after `target`: the next serving one, or after the tail the
    /// syncing one.
    #[must_use]
    pub fn successor(&self, target: TargetId) -> Option<TargetId> {
        let mut order = self.serving().chain(self.syncing());
        order.find(|t| *t == target)?;
        order.next()
    }

    /// The target before `target` in write order.
    #[must_use]
    pub fn predecessor(&self, target: TargetId) -> Option<TargetId> {
        let mut before = None;
        for member in self.serving().chain(self.syncing()) {
            if member == target {
                return before;
            }
            before = Some(member);
        }
        None
    }

    /// The nodes of all members.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.targets.iter().map(|t| t.id.node())
    }

    /// A chain that nobody has served yet: every member holds the same nothing, so that each of
    /// them counts as complete, and the first to report brings the chain up ([`mod@next`]).
    #[must_use]
    pub fn newborn(id: ChainId, targets: &[TargetId]) -> Self {
        let complete = |id: &TargetId| ChainTarget { id: *id, state: PublicState::LastServing };
        Self { id, version: ChainVersion::NEWBORN, targets: targets.iter().map(complete).collect() }
    }

    /// Whether the list obeys T2: members distinct and sorted by state, at most one syncing, none
    /// syncing without a serving one, none `LastServing` beside a serving one.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let count = |state| self.targets.iter().filter(|t| t.state == state).count();
        let serving = count(PublicState::Serving);
        let syncing = count(PublicState::Syncing);
        let mut ids: Vec<TargetId> = self.targets.iter().map(|t| t.id).collect();
        ids.sort_unstable();
        ids.dedup();
        !self.targets.is_empty()
            && ids.len() == self.targets.len()
            && self.targets.is_sorted_by_key(|t| t.state)
            && syncing <= 1
            && (syncing == 0 || serving > 0)
            && (count(PublicState::LastServing) == 0) == (serving > 0)
    }
}

#[cfg(test)]
mod tests;
