//! Mutates good records and good tables: whatever lies in the store or comes from the operator is
//! read or refused. `LAMPYRIS_FUZZ_SECONDS` says for how long.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use bytes::Bytes;
use chain::id::{ChainId, InodeId, NodeId, RoutingVersion};
use chain::layout::Layout;
use chain::table::Chain;
use meta::manager::spec::{ChainTableSpec, TableStatus};
use meta::schema::{
    Answered, ClientRecord, DeclaredChain, DeclaredTable, DeclaredTarget, Dentry, DirectoryTime,
    Inode, Mark, NodeRecord, PendingCut, Record, System, fuzz_value, parse_client_session_key,
    parse_dentry_key, parse_id,
};
use rpc::message::meta::FileKind;

/// One value of each record.
fn records() -> Vec<Vec<u8>> {
    let inode = Inode {
        kind: FileKind::File,
        mode: 0o644,
        uid: 1,
        gid: 2,
        links: 1,
        length: 1 << 40,
        accessed_ns: 1,
        modified_ns: 2,
        changed_ns: 3,
        truncate_generation: 4,
        layout: Some(Layout { table: 1, chains: 3, stripe: 3, chunk_size_bytes: 1 << 20, seed: 9 }),
        parent: InodeId::new(0),
        target: Bytes::from_static(b"target"),
    };
    let targets: Vec<_> = (10_001..10_004).map(|node| NodeId::new(node).target(0, 1)).collect();
    let members = targets.iter().map(|target| DeclaredTarget { target: *target, disk: 0 });
    let declared = DeclaredChain { chain: ChainId::new(1), targets: members.collect() };
    let table = DeclaredTable {
        table: 1,
        revision: 1,
        stripe: 0,
        chunk_size_bytes: 1 << 20,
        chains: vec![declared.clone(), declared],
    };
    vec![
        System { cluster: "train".into(), hash_key: 7 }.to_value(),
        inode.to_value(),
        Inode { layout: None, kind: FileKind::Directory, ..inode }.to_value(),
        Dentry { inode: InodeId::new(9), kind: FileKind::Symlink }.to_value(),
        DirectoryTime { modified_ns: 5 }.to_value(),
        Answered { kind: 3, answer: Bytes::from_static(b"answer") }.to_value(),
        Mark {}.to_value(),
        ClientRecord { acknowledged: 11 }.to_value(),
        PendingCut { length: 6, truncate_generation: 7 }.to_value(),
        table.to_value(),
        NodeRecord { address: "10.0.0.1:9100".into(), incarnation: 8 }.to_value(),
        Chain::newborn(ChainId::new(1), &targets).to_value(),
        9u64.to_value(),
        RoutingVersion::new(10).to_value(),
    ]
}

#[test]
fn no_bytes_make_a_record_or_a_key_panic_or_write_back_as_others() {
    let good = records();
    good.iter().for_each(|value| fuzz_value(value));
    let runs = rpc::fuzz::run(|random| {
        let mut value = good[random.below(good.len())].clone();
        let donor = &good[random.below(good.len())];
        random.mutate(&mut value, donor);
        fuzz_value(&value);
        // Under a key that ends anywhere: keys come from the same disk.
        let _ = parse_dentry_key(&value);
        let _ = parse_client_session_key(&value);
        let _ = parse_id::<8>(&value);
    });
    assert!(runs > 1_000, "only {runs} runs");
}

/// What is accepted is a table that is kept, read again and named as it was declared.
fn declare(body: &[u8]) {
    let Ok(spec) = serde_json::from_slice::<ChainTableSpec>(body) else { return };
    let Ok(table) = spec.validate() else { return };
    let again = DeclaredTable::from_value(b"CHIT", &table.to_value().into()).unwrap();
    assert_eq!(again, table);
    assert_eq!(TableStatus::of(&again), TableStatus::of(&table));
}

#[test]
fn no_declared_table_makes_the_manager_panic() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("declared-table.json")).unwrap();
    let good = golden["body"].to_string().into_bytes();
    let runs = rpc::fuzz::run(|random| {
        let mut body = good.clone();
        random.mutate(&mut body, &good);
        declare(&body);
    });
    assert!(runs > 1_000, "only {runs} runs");
}
