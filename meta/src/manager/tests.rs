//! Scenarios as scripts: a manager, three storage servers that do what they are told, a clock.

use super::spec::{ChainSpec, ChainTableSpec, ClusterStatus, TargetSpec};
use super::*;
use std::fmt::Write;

const NODES: [char; 3] = ['a', 'b', 'c'];

fn node(letter: char) -> NodeId {
    NodeId::new(10_001 + letter as u32 - 'a' as u32)
}

/// A storage server: it knows nothing but its disk and the routing it was last given.
#[derive(Default)]
struct Server {
    beats: bool,
    incarnation: u64,
    version: ChainVersion,
    up_to_date: bool,
    disk_failed: bool,
}

struct Scenario {
    now_ms: u64,
    state: State,
    servers: BTreeMap<char, Server>,
    log: String,
}

fn spec(revision: u64, members: &[char]) -> ChainTableSpec {
    let target = |m: &char| TargetSpec {
        target_id: node(*m).target(0, 0).get(),
        node_id: node(*m).get(),
        disk: 0,
    };
    let chain = ChainSpec { chain_id: 1, targets: members.iter().map(target).collect() };
    let chunk_size_bytes = 1 << 20;
    ChainTableSpec { table_id: 1, revision, stripe_size: 0, chunk_size_bytes, chains: vec![chain] }
}

impl Scenario {
    fn new() -> Self {
        let servers = NODES.map(|n| (n, Server { incarnation: 1, ..Server::default() })).into();
        let state = State::new("test".into(), 0, Stored::default());
        Self { now_ms: 0, state, servers, log: String::new() }
    }

    fn event(&mut self, event: &Event) -> Result<(), Error> {
        let decision = decide(self.now_ms, &self.state, event)?;
        self.state.apply(self.now_ms, decision);
        Ok(())
    }

    fn beat(&mut self, letter: char) {
        let server = &self.servers[&letter];
        let state = match (server.disk_failed, server.up_to_date) {
            (true, _) => LocalState::Offline,
            (_, true) => LocalState::UpToDate,
            _ => LocalState::Online,
        };
        let target = node(letter).target(0, 0);
        let (chain, chain_version) = (ChainId::new(1), server.version);
        let report = TargetReport { target, chain, chain_version, state, used_bytes: 1 };
        let heartbeat = Heartbeat {
            cluster: "test".into(),
            node: node(letter),
            incarnation: server.incarnation,
            address: format!("{letter}:9100"),
            targets: vec![report],
            capacity_bytes: 10,
            used_bytes: 1,
            routing: RoutingVersion::default(),
        };
        self.event(&Event::Heartbeat(heartbeat)).unwrap();
        self.learn(letter);
    }

    /// What the answer's routing makes the server store.
    fn learn(&mut self, letter: char) {
        let Some(chain) = self.state.stored.chains.get(&ChainId::new(1)) else { return };
        let state = chain.state_of(node(letter).target(0, 0));
        let server = self.servers.get_mut(&letter).unwrap();
        let newborn = chain.version == ChainVersion::NEWBORN;
        if chain.version != server.version {
            server.up_to_date = false;
        }
        if newborn || server.version != ChainVersion::NONE || state == Some(PublicState::Syncing) {
            server.version = chain.version;
        }
    }

    /// Time passes: each that beats does so once a second, 300 ms apart; a tick each 100 ms.
    fn wait(&mut self, ms: u64) {
        for _ in 0..ms / 100 {
            self.now_ms += 100;
            for (letter, offset_ms) in NODES.into_iter().zip([0, 300, 600]) {
                if self.servers[&letter].beats && self.now_ms % 1000 == offset_ms {
                    self.beat(letter);
                }
            }
            self.event(&Event::Tick).unwrap();
        }
    }

    fn show(&mut self) {
        let chain = &self.state.stored.chains[&ChainId::new(1)];
        let mut line = format!("{:>6} v{}", self.now_ms, chain.version);
        for target in &chain.targets {
            let letter = NODES.into_iter().find(|n| node(*n) == target.id.node()).unwrap();
            write!(line, " {letter}:{:?}", target.state).unwrap();
        }
        self.log += &line;
        self.log.push('\n');
    }

    /// One line of a script. An unknown verb is an error, also one that names no server.
    fn step(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap();
        let args: Vec<&str> = words.collect();
        let letters: Vec<char> = args.iter().filter_map(|a| a.chars().next()).collect();
        if verb == "serve" {
            // The chain has come up and gone on for a while.
            let members = args.join(" ");
            self.step(&format!("declare {members}"));
            self.step(&format!("up {members}"));
            return self.wait(10_000);
        }
        for letter in letters.iter().filter(|l| NODES.contains(l)) {
            let server = self.servers.get_mut(letter).unwrap();
            match verb {
                "up" => server.beats = true,
                "down" => server.beats = false,
                "restart" => server.incarnation += 1,
                "wipe" => (server.version, server.up_to_date) = (ChainVersion::NONE, false),
                "synced" => server.up_to_date = true,
                "disk-fails" => server.disk_failed = true,
                "declare" => {}
                _ => panic!("{line}"),
            }
        }
        match verb {
            "declare" => {
                self.event(&Event::Declare(spec(1, &letters).validate().unwrap())).unwrap()
            }
            "wait" => self.wait(args[0].parse().unwrap()),
            "show" => self.show(),
            "manager-restarts" => {
                self.state = State::new("test".into(), self.now_ms, self.state.stored.clone());
            }
            _ => assert!(!letters.is_empty(), "{line}"),
        }
    }
}

/// Runs a script, one step a line, and compares what its `show` lines say.
fn run(script: &str, expected: &str) {
    let mut scenario = Scenario::new();
    script.lines().map(str::trim).filter(|l| !l.is_empty()).for_each(|l| scenario.step(l));
    let expected: Vec<&str> = expected.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let found: Vec<&str> = scenario.log.lines().map(str::trim).collect();
    assert_eq!(found, expected, "after\n{script}");
}

#[test]
fn a_new_chain_serves_once_all_its_members_have_registered() {
    run(
        "declare a b c
         up a b
         wait 30000
         show
         up c
         wait 3000
         show",
        " 30000 v1 a:LastServing b:LastServing c:LastServing
          33000 v2 a:Serving b:Serving c:Serving",
    );
}

#[test]
fn a_silent_node_goes_out_after_its_lease_and_comes_back_by_sync() {
    run(
        "serve a b c
         down a
         wait 6000
         show
         wait 1500
         show
         up a
         wait 2000
         show
         synced a
         wait 1000
         show",
        " 16000 v2 a:Serving b:Serving c:Serving
          17500 v3 b:Serving c:Serving a:Offline
          19500 v4 b:Serving c:Serving a:Syncing
          20500 v5 b:Serving c:Serving a:Serving",
    );
}

#[test]
fn of_nodes_that_all_die_every_complete_one_is_remembered() {
    run(
        "serve a b c
         down a b c
         wait 20000
         show
         up a b c
         wait 3000
         show",
        " 30000 v3 a:LastServing b:LastServing c:LastServing
          33000 v4 a:Serving b:Serving c:Serving",
    );
}

#[test]
fn a_chain_comes_up_with_one_complete_copy_when_the_others_stay_away() {
    run(
        "serve a b c
         down a b c
         wait 10000
         up b
         wait 5000
         show
         wait 10000
         show",
        " 25000 v3 a:LastServing b:LastServing c:LastServing
          35000 v4 b:Serving a:Offline c:Offline",
    );
}

#[test]
fn a_stale_copy_never_revives_a_chain() {
    run(
        "serve a b c
         down a
         wait 10000
         down b c
         wait 10000
         up a
         wait 60000
         show
         up c
         wait 15000
         show",
        "  90000 v5 b:LastServing c:LastServing a:Waiting
          105000 v6 c:Serving a:Syncing b:Offline",
    );
}

#[test]
fn a_wiped_disk_of_an_existing_chain_is_no_complete_copy() {
    run(
        "serve a b c
         down a b c
         wait 20000
         wipe a
         up a
         wait 60000
         show",
        " 90000 v3 a:LastServing b:LastServing c:LastServing",
    );
}

#[test]
fn nobody_is_declared_dead_before_the_new_manager_has_waited_a_lease() {
    run(
        "serve a b c
         manager-restarts
         down a
         wait 6000
         show
         wait 2000
         show",
        " 16000 v2 a:Serving b:Serving c:Serving
          18000 v3 b:Serving c:Serving a:Offline",
    );
}

#[test]
fn a_restarted_manager_changes_nothing_when_everybody_goes_on() {
    run(
        "serve a b c
         manager-restarts
         wait 60000
         show",
        " 70000 v2 a:Serving b:Serving c:Serving",
    );
}

#[test]
fn a_restart_of_a_node_within_its_lease_changes_no_chain() {
    run(
        "serve a b c
         down a
         wait 4000
         restart a
         up a
         wait 10000
         show",
        " 24000 v2 a:Serving b:Serving c:Serving",
    );
}

#[test]
fn a_process_with_an_empty_disk_strikes_off_its_predecessor_only_after_that_ones_lease() {
    // The last word of the one before was heard at 10000: until 16060 it may answer reads, and nobody may then have
    // written without it.
    run(
        "serve a b c
         restart a
         wipe a
         wait 6000
         show
         wait 1000
         show",
        " 16000 v2 a:Serving b:Serving c:Serving
          17000 v4 b:Serving c:Serving a:Syncing",
    );
}

#[test]
fn a_new_manager_waits_for_the_lease_of_a_process_that_it_never_heard() {
    run(
        "serve a b c
         manager-restarts
         restart a
         wipe a
         wait 6000
         show
         wait 1000
         show",
        " 16000 v2 a:Serving b:Serving c:Serving
          17000 v4 b:Serving c:Serving a:Syncing",
    );
}

#[test]
fn of_several_processes_in_a_lease_the_last_one_with_the_copy_counts() {
    run(
        "serve a b c
         down a
         wait 2000
         restart a
         up a
         wait 2000
         restart a
         wipe a
         wait 1000
         restart a
         wait 4000
         show
         wait 2000
         show",
        " 19000 v2 a:Serving b:Serving c:Serving
          21000 v4 b:Serving c:Serving a:Syncing",
    );
}

#[test]
fn a_failed_disk_goes_out_at_once_and_not_the_last_one() {
    run(
        "serve a b c
         disk-fails a
         wait 2000
         show
         disk-fails b
         wait 2000
         disk-fails c
         wait 2000
         show",
        " 12000 v3 b:Serving c:Serving a:Offline
          16000 v5 c:LastServing b:Offline a:Offline",
    );
}

fn heartbeat(letter: char, incarnation: u64) -> Heartbeat {
    Heartbeat {
        cluster: "test".into(),
        node: node(letter),
        incarnation,
        address: format!("{letter}:9100"),
        targets: vec![],
        capacity_bytes: 0,
        used_bytes: 0,
        routing: RoutingVersion::default(),
    }
}

#[test]
fn an_old_process_of_a_node_is_refused() {
    let mut s = Scenario::new();
    s.event(&Event::Heartbeat(heartbeat('a', 1))).unwrap();
    s.event(&Event::Heartbeat(heartbeat('a', 2))).unwrap();
    let error = s.event(&Event::Heartbeat(heartbeat('a', 1))).unwrap_err();
    assert_eq!(error.message, "node 10001: a newer process of this node has registered");
    s.event(&Event::Heartbeat(heartbeat('a', 2))).unwrap();
}

/// A process that said that it gives its target up has no lease that its successor's empty disk would have to wait for.
#[test]
fn nothing_is_waited_for_after_a_farewell() {
    let mut s = Scenario::new();
    "declare a b c\nup a b c\nwait 20000".lines().for_each(|l| s.step(l));
    let target = node('a').target(0, 0);
    let (chain, state) = (ChainId::new(1), LocalState::Offline);
    let chain_version = s.servers[&'a'].version;
    let farewell = TargetReport { target, chain, chain_version, state, used_bytes: 1 };
    s.event(&Event::Heartbeat(Heartbeat { targets: vec![farewell], ..heartbeat('a', 1) })).unwrap();
    s.now_ms += 10;
    s.event(&Event::Heartbeat(heartbeat('a', 2))).unwrap();
    s.now_ms += 10;
    s.beat('b');
    let chain = &s.state.stored.chains[&ChainId::new(1)];
    assert_eq!(chain.state_of(target), Some(PublicState::Offline));
}

#[test]
fn bad_heartbeats_are_refused() {
    let mut s = Scenario::new();
    let mut code = |heartbeat| s.event(&Event::Heartbeat(heartbeat)).unwrap_err().code;
    let other = Heartbeat { cluster: "other".into(), ..heartbeat('a', 1) };
    assert_eq!(code(other), Code::WrongCluster);
    let nowhere = Heartbeat { address: String::new(), ..heartbeat('a', 1) };
    assert_eq!(code(nowhere), Code::InvalidRequest);
    let foreign = TargetReport {
        target: node('b').target(0, 0),
        chain: ChainId::new(1),
        chain_version: ChainVersion::NONE,
        state: LocalState::Online,
        used_bytes: 0,
    };
    let foreign = Heartbeat { targets: vec![foreign], ..heartbeat('a', 1) };
    assert_eq!(code(foreign), Code::InvalidRequest);
    assert!(s.state.stored.nodes.is_empty());
}

#[test]
fn a_table_is_declared_once_and_grows() {
    let mut s = Scenario::new();
    let table = spec(3, &NODES).validate().unwrap();
    let declare = |s: &mut Scenario, table: &DeclaredTable| s.event(&Event::Declare(table.clone()));
    declare(&mut s, &table).unwrap();
    let version = s.state.stored.version;
    declare(&mut s, &table).unwrap();
    assert_eq!(s.state.stored.version, version, "the same again changes nothing");
    let conflict = |s: &mut Scenario, table: &DeclaredTable| declare(s, table).unwrap_err();
    let older = DeclaredTable { revision: 2, ..table.clone() };
    assert_eq!(conflict(&mut s, &older).code, Code::Conflict);
    let differs = DeclaredTable { stripe: 1, ..table.clone() };
    assert_eq!(
        conflict(&mut s, &differs).message,
        "revision 3 differs from the declared revision 3"
    );
    let other_members = spec(4, &['a', 'b']).validate().unwrap();
    assert_eq!(
        conflict(&mut s, &other_members).message,
        "chain 1 exists: its members cannot change"
    );
    let mut more = spec(4, &NODES);
    let second = NODES.map(|n| TargetSpec {
        target_id: node(n).target(1, 0).get(),
        node_id: node(n).get(),
        disk: 1,
    });
    more.chains.push(ChainSpec { chain_id: 2, targets: second.to_vec() });
    declare(&mut s, &more.validate().unwrap()).unwrap();
    assert_eq!(s.state.stored.chains.len(), 2);
    assert_eq!(s.state.assignments(node('b')).len(), 2);
    let dropped = spec(5, &NODES).validate().unwrap();
    assert_eq!(declare(&mut s, &dropped).map_err(|e| e.code), Err(Code::Conflict));
}

#[test]
fn a_bad_table_is_refused_with_the_reason() {
    let reason = |change: fn(&mut ChainTableSpec)| {
        let mut bad = spec(1, &NODES);
        change(&mut bad);
        bad.validate().unwrap_err().message
    };
    assert!(reason(|s| s.table_id = 0).contains("tableId"));
    assert!(reason(|s| s.chunk_size_bytes = 3 << 20).contains("power of two"));
    assert_eq!(reason(|s| s.chains.clear()), "0 chains");
    assert!(reason(|s| s.chains[0].chain_id = 2).contains("1 is missing"));
    assert_eq!(reason(|s| s.chains[0].targets.clear()), "chain 1 has 0 targets");
    assert!(reason(|s| s.chains[0].targets[0].disk = 1).contains("not named after node 10001"));
    assert!(
        reason(|s| s.chains[0].targets[1] = s.chains[0].targets[0].clone()).contains("two places")
    );
    assert!(
        reason(|s| {
            s.chains[0].targets[1] =
                TargetSpec { target_id: 100_010_201, node_id: 10_001, disk: 1 };
        })
        .contains("two targets on node 10001")
    );
    let unknown = r#"{"tableId":1,"revision":1,"chunkSizeBytes":1048576,"chains":[],"x":1}"#;
    assert!(serde_json::from_str::<ChainTableSpec>(unknown).is_err());
}

#[test]
fn the_status_is_what_the_operator_reads() {
    let mut s = Scenario::new();
    "declare a b c\nup a b c\nwait 9000\ndown a\nwait 8000".lines().for_each(|l| s.step(l));
    let status = serde_json::to_value(ClusterStatus::of(s.now_ms, &s.state)).unwrap();
    let counts = serde_json::json!({"total": 1, "serving": 0, "degraded": 1, "unavailable": 0});
    assert_eq!(status["chains"], counts);
    assert_eq!(status["ready"], true);
    let node = |id: u32, letter: char, alive: bool, last: u64, serving: u64| {
        serde_json::json!({
            "nodeId": id, "address": format!("{letter}:9100"), "alive": alive,
            "lastHeartbeatMs": last, "capacityBytes": 10, "usedBytes": 1,
            "targets": {"total": 1, "serving": serving, "syncing": 0, "offline": 1 - serving},
        })
    };
    assert_eq!(status["nodes"][0], node(10_001, 'a', false, 8000, 0));
    assert_eq!(status["nodes"][1], node(10_002, 'b', true, 700, 1));
}
