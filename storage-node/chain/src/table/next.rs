//! The transition function of a chain: published states and reports in, next published chain out.
//!
//! The manager decides nothing else about a chain. Every decision is one row of [`ROWS`]; the
//! snapshot test prints the table, so that a change of a row is a change of a reviewed file.

use super::{Chain, ChainTarget, PublicState};
use crate::id::{ChainVersion, TargetId};

/// What a storage server says about one of its targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Local {
    /// Cannot be used: its disk failed, it drains, or (the manager's own verdict) its server's
    /// lease ended.
    Offline,
    /// In service.
    Online,
    /// In service, and its predecessor confirmed under `Report::version` that it lacks nothing.
    UpToDate,
}

/// The newest that the manager knows about a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// What the target can do.
    pub local: Local,
    /// The chain version that its disk holds: [`ChainVersion::NONE`] for a disk without a copy.
    pub version: ChainVersion,
    /// When this was established, in milliseconds of any clock that only moves forward: for a
    /// living target when its heartbeat was processed, for one whose server went silent when that
    /// server's lease ended (last processed heartbeat + lease + 1 %).
    pub at_ms: u64,
}

/// Reports by target. A target without an entry was not heard of since the manager started and is
/// not yet past its lease: nothing is decided about it.
pub type Reports = std::collections::BTreeMap<TargetId, Report>;

/// Whether a chain that nobody serves may come up with the copies that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revive {
    /// Only with all its complete copies: the manager's choice for the first seconds, because
    /// copies that come back together need no sync.
    Together,
    /// With any one of them.
    Any,
}

/// A target's report, seen from its published state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Nothing known yet.
    Unheard,
    /// Offline.
    Gone,
    /// In service, without a copy: new or wiped.
    Empty,
    /// In service with a copy.
    Alive,
    /// In service, complete under the chain's current version.
    Complete,
}

/// What the row depends on beside state and standing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Given {
    /// Nothing.
    Always,
    /// Another serving target stays, and was heard from after this one was lost.
    Survivor,
    /// No serving target stays.
    NoneServes,
    /// Some serving target is in the new chain.
    Served,
    /// Nobody serves in the old chain, and reviving is allowed.
    MayRevive,
    /// Some serving target is in the new chain and no syncing one.
    Turn,
}

type Row = (PublicState, &'static [Standing], Given, PublicState);

use Given::{Always, MayRevive, NoneServes, Served, Survivor, Turn};
use PublicState::{LastServing, Offline, Serving, Syncing, Waiting};
use Standing::{Alive, Complete, Empty, Gone, Unheard};

/// The first row that matches decides. A state without a matching row stays.
const ROWS: &[Row] = &[
    (Serving, &[Gone, Empty], Survivor, Offline),
    (Serving, &[Gone, Empty], NoneServes, LastServing),
    (LastServing, &[Alive, Complete], MayRevive, Serving),
    (LastServing, &[Alive, Complete, Empty], Served, Waiting),
    (LastServing, &[Unheard, Gone], Served, Offline),
    (Syncing, &[Gone], Always, Offline),
    (Syncing, &[Complete], Served, Serving),
    (Syncing, &[Unheard, Empty, Alive, Complete], NoneServes, Waiting),
    (Waiting, &[Gone], Always, Offline),
    (Waiting, &[Empty, Alive, Complete], Turn, Syncing),
    (Offline, &[Empty, Alive, Complete], Turn, Syncing),
    (Offline, &[Empty, Alive, Complete], Always, Waiting),
];

/// The chain that follows `chain` under `reports`; `None` if nothing changes.
///
/// The caller stores the answer by compare-and-set on the version (T1) before it tells anybody:
/// the set of complete copies is on disk before a death is acted on. It calls again until `None`,
/// because one change may allow another.
///
/// # Panics
/// If `chain` breaks T2: the caller checks [`Chain::is_valid`] for chains that it read.
#[must_use]
pub fn next(chain: &Chain, reports: &Reports, revive: Revive) -> Option<Chain> {
    assert!(chain.is_valid(), "T2: {chain:?}");
    let mut view = View::new(chain, reports, revive);
    // In write order, serving targets first: a later row may ask what the earlier ones became.
    for state in PublicState::ALL {
        for target in chain.targets.iter().filter(|t| t.state == state) {
            let becomes = view.decide(*target);
            view.targets.push(ChainTarget { id: target.id, state: becomes });
        }
    }
    let mut targets = view.targets;
    targets.sort_by_key(|t| t.state);
    if targets == chain.targets {
        return None;
    }
    let next = Chain { id: chain.id, version: chain.version.next(), targets };
    assert!(next.is_valid(), "T2: {next:?} after {chain:?}");
    Some(next)
}

/// The old chain, what is known, and the members decided so far.
struct View<'a> {
    chain: &'a Chain,
    reports: &'a Reports,
    may_revive: bool,
    revives: bool,
    serving_stays: bool,
    targets: Vec<ChainTarget>,
}

impl<'a> View<'a> {
    fn new(chain: &'a Chain, reports: &'a Reports, revive: Revive) -> Self {
        let mut view = Self {
            chain,
            reports,
            may_revive: false,
            revives: false,
            serving_stays: false,
            targets: Vec::new(),
        };
        let copies: Vec<&ChainTarget> =
            chain.targets.iter().filter(|t| t.state == LastServing).collect();
        view.may_revive = chain.head().is_none()
            && match revive {
                Revive::Any => true,
                Revive::Together => copies.iter().all(|t| view.stands(t, &[Alive, Complete])),
            };
        view.revives = view.may_revive && copies.iter().any(|t| view.stands(t, &[Alive, Complete]));
        view.serving_stays =
            chain.targets.iter().any(|t| t.state == Serving && !view.stands(t, &[Gone, Empty]));
        view
    }

    fn decide(&self, target: ChainTarget) -> PublicState {
        let row = ROWS.iter().find(|(state, standings, given, _)| {
            *state == target.state && self.stands(&target, standings) && self.holds(*given, target)
        });
        row.map_or(target.state, |(.., becomes)| *becomes)
    }

    fn stands(&self, target: &ChainTarget, among: &[Standing]) -> bool {
        among.contains(&self.standing(target.id))
    }

    fn standing(&self, target: TargetId) -> Standing {
        let Some(report) = self.reports.get(&target) else { return Unheard };
        match report.local {
            Local::Offline => Gone,
            _ if report.version == ChainVersion::NONE => Empty,
            // Y1: completeness counts only under the version that is being changed.
            Local::UpToDate if report.version == self.chain.version => Complete,
            Local::UpToDate | Local::Online => Alive,
        }
    }

    fn holds(&self, given: Given, target: ChainTarget) -> bool {
        let has = |state| self.targets.iter().any(|t| t.state == state);
        match given {
            Always => true,
            Survivor => self.has_survivor(target),
            NoneServes => {
                if target.state == Serving {
                    !self.serving_stays
                } else {
                    !has(Serving)
                }
            }
            Served => has(Serving) || (target.state == LastServing && self.revives),
            MayRevive => self.may_revive,
            Turn => has(Serving) && !has(Syncing),
        }
    }

    /// T4: a remaining member must have been heard from after the lost one's lease ended, or it
    /// may be dead itself and the last complete copy would be struck off.
    fn has_survivor(&self, lost: ChainTarget) -> bool {
        let lost_at_ms = self.reports.get(&lost.id).map_or(u64::MAX, |r| r.at_ms);
        self.chain.targets.iter().any(|t| {
            t.state == Serving
                && self.stands(t, &[Alive, Complete])
                && self.reports.get(&t.id).is_some_and(|r| r.at_ms > lost_at_ms)
        })
    }
}
