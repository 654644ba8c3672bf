use proptest::prelude::*;

use super::*;
use crate::id::{ChainId, ChainVersion, TargetId};

const STATES: [PublicState; 5] = PublicState::ALL;

fn target(n: u64) -> TargetId {
    TargetId::new(n)
}

fn chain(version: u64, states: &[PublicState]) -> Chain {
    let targets =
        (1..).zip(states).map(|(n, state)| ChainTarget { id: target(n), state: *state }).collect();
    Chain { id: ChainId::new(1), version: ChainVersion::new(version), targets }
}

fn report(local: Local, version: u64, at_ms: u64) -> Report {
    Report { local, version: ChainVersion::new(version), at_ms }
}

fn show(chain: &Chain) -> String {
    let members: Vec<String> =
        chain.targets.iter().map(|t| format!("{}:{:?}", t.id, t.state)).collect();
    format!("v{} {}", chain.version, members.join(" "))
}

/// Every state and standing of one member beside every kind of peer.
fn print_table() -> String {
    use PublicState::{LastServing, Offline, Serving, Syncing};
    let standings: [(&str, Option<Report>); 5] = [
        ("unheard", None),
        ("gone", Some(report(Local::Offline, 7, 100))),
        ("empty", Some(report(Local::Online, 0, 100))),
        ("alive", Some(report(Local::Online, 6, 100))),
        ("complete", Some(report(Local::UpToDate, 7, 100))),
    ];
    let peers: [(&str, Vec<PublicState>, Option<Report>); 6] = [
        ("nobody", vec![], None),
        ("serving heard later", vec![Serving], Some(report(Local::Online, 7, 101))),
        ("serving heard before", vec![Serving], Some(report(Local::Online, 7, 99))),
        ("serving gone", vec![Serving], Some(report(Local::Offline, 7, 101))),
        ("copy gone", vec![LastServing], Some(report(Local::Offline, 7, 101))),
        ("serving and syncing", vec![Serving, Syncing], Some(report(Local::Online, 7, 101))),
    ];
    let mut out = String::new();
    for state in STATES {
        for (standing, own) in &standings {
            for (peer, states, peer_report) in &peers {
                let mut members: Vec<ChainTarget> = (2..)
                    .zip(states)
                    .map(|(n, s)| ChainTarget { id: target(n), state: *s })
                    .collect();
                members.push(ChainTarget { id: target(1), state });
                members.sort_by_key(|t| t.state);
                let old = Chain { targets: members, ..chain(7, &[Offline]) };
                if !old.is_valid() {
                    continue;
                }
                let mut reports: Reports = states
                    .iter()
                    .zip(2..)
                    .filter_map(|(_, n)| Some((target(n), (*peer_report)?)))
                    .collect();
                reports.extend(own.map(|r| (target(1), r)));
                let new = next(&old, &reports, Revive::Any).unwrap_or_else(|| old.clone());
                let becomes = new.state_of(target(1)).unwrap();
                let line = format!("{state:?}, {standing}, beside {peer}: {becomes:?}\n");
                out.push_str(&line);
            }
        }
    }
    out
}

#[test]
fn the_transition_table_is_the_reviewed_one() {
    let path = "src/table/next.table";
    let now = print_table();
    if std::env::var_os("LAMPYRIS_BLESS").is_some() {
        std::fs::write(path, &now).unwrap();
    }
    assert_eq!(now, std::fs::read_to_string(path).unwrap(), "LAMPYRIS_BLESS=1 rewrites {path}");
}

#[test]
fn a_newborn_chain_comes_up_with_all_members_in_order() {
    let born = Chain::newborn(ChainId::new(1), &[target(3), target(1), target(2)]);
    let all: Reports = (1..=3).map(|n| (target(n), report(Local::Online, 1, 5))).collect();
    let up = next(&born, &all, Revive::Together).unwrap();
    assert_eq!(show(&up), "v2 3:Serving 1:Serving 2:Serving");
    assert_eq!(next(&up, &all, Revive::Any), None);
}

#[test]
fn a_chain_waits_for_all_copies_until_any_is_allowed() {
    use PublicState::LastServing;
    let down = chain(4, &[LastServing, LastServing, LastServing]);
    let one = Reports::from([(target(2), report(Local::Online, 4, 5))]);
    assert_eq!(next(&down, &one, Revive::Together), None);
    let up = next(&down, &one, Revive::Any).unwrap();
    assert_eq!(show(&up), "v5 2:Serving 1:Offline 3:Offline");
}

#[test]
fn any_single_copy_revives_a_chain_whose_members_died_together() {
    use PublicState::Serving;
    for survivor in 1..=3 {
        let served = chain(4, &[Serving, Serving, Serving]);
        let dead: Reports =
            (1..=3).map(|n| (target(n), report(Local::Offline, 4, 10 + n))).collect();
        let down = next(&served, &dead, Revive::Any).unwrap();
        assert_eq!(show(&down), "v5 1:LastServing 2:LastServing 3:LastServing");
        let mut back = dead;
        back.insert(target(survivor), report(Local::Online, 4, 20));
        let up = next(&down, &back, Revive::Any).unwrap();
        assert_eq!(up.head(), Some(target(survivor)));
        assert_eq!(up.serving().count(), 1);
    }
}

#[test]
fn a_death_is_acted_on_only_when_a_survivor_was_heard_afterwards() {
    use PublicState::Serving;
    let served = chain(4, &[Serving, Serving, Serving]);
    let mut reports = Reports::from([
        (target(1), report(Local::Offline, 4, 60)),
        (target(2), report(Local::Online, 4, 59)),
        (target(3), report(Local::Online, 4, 60)),
    ]);
    assert_eq!(next(&served, &reports, Revive::Any), None);
    reports.insert(target(3), report(Local::Online, 4, 61));
    let shrunk = next(&served, &reports, Revive::Any).unwrap();
    assert_eq!(show(&shrunk), "v5 2:Serving 3:Serving 1:Offline");
}

#[test]
fn a_wiped_disk_neither_serves_nor_revives() {
    use PublicState::{LastServing, Serving};
    let wiped = Reports::from([(target(1), report(Local::Online, 0, 9))]);
    assert_eq!(next(&chain(4, &[LastServing]), &wiped, Revive::Any), None);
    let down = next(&chain(4, &[Serving]), &wiped, Revive::Any).unwrap();
    assert_eq!(show(&down), "v5 1:LastServing");
}

#[test]
fn two_returning_targets_sync_one_after_the_other() {
    use PublicState::{Offline, Serving};
    let mut now = chain(4, &[Serving, Offline, Offline]);
    let online = |v| report(Local::Online, v, 9);
    let mut reports: Reports = (1..=3).map(|n| (target(n), online(4))).collect();
    now = next(&now, &reports, Revive::Any).unwrap();
    assert_eq!(show(&now), "v5 1:Serving 2:Syncing 3:Waiting");
    reports.insert(target(2), report(Local::UpToDate, 4, 9));
    assert_eq!(next(&now, &reports, Revive::Any), None, "Y1: complete under an older version");
    reports.insert(target(2), report(Local::UpToDate, 5, 9));
    now = next(&now, &reports, Revive::Any).unwrap();
    assert_eq!(show(&now), "v6 1:Serving 2:Serving 3:Syncing");
}

prop_compose! {
    fn any_reports()(
        raw in prop::collection::vec(prop::option::weighted(0.8, (0u8..3, 0u64..3, 0u64..20)), 4),
    ) -> Vec<Option<(u8, u64, u64)>> { raw }
}

/// Who holds a complete copy.
fn complete(chain: &Chain) -> Vec<TargetId> {
    let is_copy =
        |t: &&ChainTarget| matches!(t.state, PublicState::Serving | PublicState::LastServing);
    chain.targets.iter().filter(is_copy).map(|t| t.id).collect()
}

proptest! {
    #[test]
    fn no_sequence_of_reports_breaks_a_chain(
        steps in prop::collection::vec((any_reports(), any::<bool>()), 1..40),
    ) {
        let ids: Vec<TargetId> = (1..=4).map(target).collect();
        let mut now = Chain::newborn(ChainId::new(1), &ids);
        for (raw, any) in steps {
            let reports: Reports = (1..).zip(&raw).filter_map(|(n, r)| {
                let (local, behind, at) = (*r)?;
                let local = [Local::Offline, Local::Online, Local::UpToDate][usize::from(local)];
                let version = now.version.get().saturating_sub(behind);
                Some((target(n), report(local, version, at)))
            }).collect();
            let revive = if any { Revive::Any } else { Revive::Together };
            let Some(new) = next(&now, &reports, revive) else { continue };
            prop_assert!(new.is_valid());
            prop_assert_eq!(new.version, now.version.next());
            // T4: nobody joins the complete set but by a finished sync; the set never empties.
            prop_assert!(!complete(&new).is_empty());
            for joined in complete(&new).iter().filter(|t| !complete(&now).contains(t)) {
                prop_assert_eq!(now.state_of(*joined), Some(PublicState::Syncing));
                prop_assert_eq!(reports[joined].local, Local::UpToDate);
                prop_assert_eq!(reports[joined].version, now.version);
            }
            now = new;
        }
    }
}
