use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

fn nodes(count: u32) -> Vec<NodeInput> {
    (0..count).map(|i| NodeInput { id: 10_001 + i, domain: format!("host-{i}") }).collect()
}

fn zoned(count: u32, zones: u32) -> Vec<NodeInput> {
    (0..count)
        .map(|i| NodeInput { id: 10_001 + i, domain: format!("zone-{}", i % zones) })
        .collect()
}

fn solve(nodes: &[NodeInput], replicas: usize, targets: usize) -> Design {
    design(nodes, replicas, targets, 1, MOVES_DEFAULT).unwrap()
}

/// What every design must satisfy, recounted from the groups alone.
fn check(design: &Design, nodes: &[NodeInput], replicas: usize, targets: usize) {
    let domain: BTreeMap<u32, &str> = nodes.iter().map(|n| (n.id, n.domain.as_str())).collect();
    assert_eq!(design.groups.len(), nodes.len() * targets / replicas);
    let mut degree: BTreeMap<u32, usize> = BTreeMap::new();
    let mut heads: BTreeMap<u32, usize> = BTreeMap::new();
    let mut shared: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for group in &design.groups {
        assert_eq!(group.len(), replicas);
        let domains: BTreeSet<&str> = group.iter().map(|n| domain[n]).collect();
        assert_eq!(domains.len(), replicas, "two members of {group:?} are in one domain");
        *heads.entry(group[0]).or_default() += 1;
        for (i, a) in group.iter().enumerate() {
            *degree.entry(*a).or_default() += 1;
            for b in &group[..i] {
                *shared.entry((*a.min(b), *a.max(b))).or_default() += 1;
            }
        }
    }
    assert!(degree.values().all(|d| *d <= targets));
    assert_eq!(degree.values().sum::<usize>(), design.groups.len() * replicas);
    assert_eq!(shared.values().copied().max().unwrap_or(0), design.lambda_max);
    assert!(design.lower_bound <= design.lambda_max);
    let share = design.groups.len().div_ceil(nodes.len());
    assert!(heads.values().all(|h| *h <= share), "heads {heads:?}, at most {share} each");
}

#[test]
fn seven_thirteen_and_thirty_one_nodes_meet_exactly_once() {
    for (count, targets) in [(7, 3), (13, 6), (31, 15)] {
        let nodes = nodes(count);
        let design = solve(&nodes, 3, targets);
        check(&design, &nodes, 3, targets);
        assert_eq!((design.kind, design.lambda_min, design.lambda_max), (Kind::Exact, 1, 1));
    }
}

#[test]
fn projective_planes_of_order_three_to_five_are_found() {
    for (count, replicas) in [(13, 4), (21, 5), (31, 6)] {
        let nodes = nodes(count);
        let design = solve(&nodes, replicas, replicas);
        check(&design, &nodes, replicas, replicas);
        assert_eq!((design.kind, design.lambda_max), (Kind::Exact, 1), "{count} nodes");
    }
}

#[test]
fn sizes_without_a_known_design_stay_within_one_of_the_bound() {
    for count in [4, 5, 6, 8, 9, 10, 11, 12, 18, 36, 100] {
        for targets in [6, 16] {
            let nodes = nodes(count);
            let design = solve(&nodes, 3, targets);
            check(&design, &nodes, 3, targets);
            let (max, bound) = (design.lambda_max, design.lower_bound);
            assert!(max <= bound + 1, "{count} nodes, {targets} targets: {max} over {bound}");
        }
    }
}

/// Longest time for a design, in an unoptimised build on a busy machine too.
const SOLVED_WITHIN: Duration = Duration::from_secs(2);

#[test]
fn six_to_a_hundred_nodes_are_placed_within_one_of_the_bound_and_two_seconds() {
    for count in [6, 10, 18, 36, 100] {
        for targets in [3, 6, 16] {
            let nodes = nodes(count);
            let start = Instant::now();
            let design = solve(&nodes, 3, targets);
            let took = start.elapsed();
            check(&design, &nodes, 3, targets);
            let (max, bound) = (design.lambda_max, design.lower_bound);
            let what =
                format!("{count} nodes, {targets} targets: {} moves, {took:?}", design.moves);
            println!("{what}, two nodes share {max}, at least {bound}");
            assert!(max <= bound + 1, "{what}: {max} over {bound}");
            assert!(took < SOLVED_WITHIN, "{what}");
            // The effort is counted, so that it is the same on every machine.
            assert!(design.moves <= MOVES_DEFAULT, "{what}");
            assert_eq!(solve(&nodes, 3, targets), design, "{what}");
        }
    }
}

#[test]
fn names_of_domains_do_not_matter_only_who_shares_one() {
    for (nodes, count) in [(nodes(10), 10), (zoned(9, 3), 3)] {
        let mut renamed = nodes.clone();
        for node in &mut renamed {
            let number: u32 = node.domain.rsplit('-').next().unwrap().parse().unwrap();
            node.domain = format!("other-{}", count - number);
        }
        assert_eq!(solve(&nodes, 3, 6), solve(&renamed, 3, 6));
    }
}

#[test]
fn three_zones_get_one_member_of_each_chain() {
    for count in [3, 6, 9, 18, 36] {
        let nodes = zoned(count, 3);
        let design = solve(&nodes, 3, 6);
        check(&design, &nodes, 3, 6);
        assert!(design.lambda_max <= design.lower_bound + 1);
    }
}

#[test]
fn three_nodes_share_every_chain() {
    let design = solve(&nodes(3), 3, 4);
    check(&design, &nodes(3), 3, 4);
    assert_eq!((design.groups.len(), design.lambda_max, design.kind), (4, 4, Kind::Exact));
    let heads: BTreeSet<u32> = design.groups.iter().map(|g| g[0]).collect();
    assert_eq!(heads.len(), 3);
}

#[test]
fn the_same_seed_gives_the_same_design_whatever_the_order_of_nodes() {
    let mut backwards = nodes(10);
    backwards.reverse();
    assert_eq!(solve(&nodes(10), 3, 6), solve(&backwards, 3, 6));
}

#[test]
fn impossible_requests_say_what_to_change() {
    let refuse = |nodes: &[NodeInput], replicas| {
        design(nodes, replicas, 6, 1, MOVES_DEFAULT).unwrap_err().to_string()
    };
    assert!(refuse(&nodes(2), 3).contains("the number of nodes is 2; use 3 to 2000"));
    assert!(refuse(&zoned(6, 2), 3).contains("3 replicas need 3 failure domains"));
    let mut lopsided = zoned(9, 3);
    lopsided[0].domain = "zone-1".into();
    assert!(refuse(&lopsided, 3).contains("\"zone-1\" has 4 of 9 nodes, more than one in 3"));
    let twice = vec![nodes(1).remove(0); 3];
    assert!(refuse(&twice, 3).contains("node 10001 is listed twice"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_design_is_legal(
        count in 3u32..40, replicas in 1usize..4, targets in 1usize..12, seed: u64,
    ) {
        let nodes = nodes(count);
        let design = design(&nodes, replicas, targets, seed, 2_000).unwrap();
        check(&design, &nodes, replicas, targets);
    }
}
