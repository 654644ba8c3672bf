//! A disk that is full in the middle of a group commit. A process of its own: the limit that
//! stands for the full disk, on the size of every file, is the whole process's.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::collections::BTreeMap;
use std::path::Path;

use chain::id::{
    ChainVersion, ChannelId, ChunkId, ClientId, InodeId, NodeId, TargetId, UpdateId, UpdateVersion,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use storage_node::engine::{Engine, Error, IoMode, Op, Options, Stage, Which, verify};
use tokio::signal::unix::{SignalKind, signal};

const TARGET: TargetId = TargetId::new(100_010_101);
const FILE_BYTES: u64 = 2 << 20;
/// Of metadata, twice as much as one file may hold.
const UPDATES: u64 = 200;
const RECORDS: u64 = 800;

fn open(dir: &Path) -> Engine {
    Engine::open(&Options {
        dir: dir.to_owned(),
        cluster: "train".to_owned(),
        node: NodeId::new(10_001),
        io: IoMode::Threads,
        capacity_bytes: Some(FILE_BYTES / 2),
    })
    .unwrap()
}

fn stage(index: u64) -> Stage {
    let bytes = index.to_le_bytes();
    let checksum = crc32c::crc32c(&bytes);
    Stage {
        chunk: ChunkId { file: InodeId::new(7), index: index % 10 },
        version: UpdateVersion::new(1 + index / 10),
        chain_version: ChainVersion::new(1),
        id: UpdateId { client: ClientId::new(5), channel: ChannelId::new(0), seq: index },
        truncate_generation: 0,
        expected: None,
        op: Op::Write { offset: 0, bytes: bytes.to_vec().into(), checksum },
    }
}

#[tokio::test]
async fn a_group_that_finds_no_space_fails_and_what_was_answered_is_there_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path());
    // Else the kernel ends the process instead of the write.
    let _handled = signal(SignalKind::from_raw(libc::SIGXFSZ)).unwrap();
    let unlimited = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(FILE_BYTES), ..unlimited }).unwrap();
    let records = (1..=RECORDS).map(|n| {
        let engine = engine.clone();
        let record = vec![n.to_le_bytes()[0]; 4096];
        tokio::spawn(async move { engine.set_target_record(TargetId::new(n), record).await })
    });
    let records: Vec<_> = records.collect();
    // The newest answered update of each chunk.
    let mut answered = BTreeMap::new();
    let mut refused = 0;
    for index in 0..UPDATES {
        let Stage { chunk, version, chain_version, .. } = stage(index);
        match engine.stage(TARGET, stage(index)).await {
            Ok(_) => answered.insert(chunk, index),
            Err(Error::Failed(_)) => break,
            Err(e) => panic!("{e}"),
        };
        match engine.commit(TARGET, chunk, version, chain_version).await {
            Ok(_) => {}
            Err(Error::Failed(_)) => break,
            Err(e) => panic!("{e}"),
        }
    }
    let mut stored = Vec::new();
    for (n, record) in (1..).zip(records) {
        match record.await.unwrap() {
            Ok(()) => stored.push(TargetId::new(n)),
            Err(Error::Failed(_)) => refused += 1,
            Err(e) => panic!("{e}"),
        }
    }
    assert!(refused > 0 && !stored.is_empty(), "{refused} of {RECORDS} were refused");
    assert!(engine.failed().unwrap().contains("write metadata"), "{:?}", engine.failed());
    assert!(matches!(engine.stage(TARGET, stage(0)).await, Err(Error::Failed(_))));
    drop(engine);
    setrlimit(Resource::Fsize, unlimited).unwrap();
    let engine = open(dir.path());
    let found: Vec<_> = engine.targets().unwrap().into_iter().map(|(target, _)| target).collect();
    assert!(stored.iter().all(|target| found.contains(target)), "{stored:?} in {found:?}");
    for (chunk, index) in answered {
        let info = engine.meta(TARGET, chunk).unwrap();
        // What was answered is pending or committed, and nothing later is than was asked.
        let which = if info.pending.is_some() { Which::Pending } else { Which::Committed };
        let read = engine.read(TARGET, chunk, 0, 8, which).await.unwrap();
        assert!(read.state.id.seq >= index, "{chunk}: {} of {index}", read.state.id.seq);
        assert_eq!(read.bytes[..], read.state.id.seq.to_le_bytes());
    }
    drop(engine);
    assert_eq!(verify(dir.path()).unwrap().problems, []);
}
