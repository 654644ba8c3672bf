//! Measures one engine in a directory against the same disk without it, in the same run.
//!
//! `cargo run -p storage-node --example engine-bench -- DIR [ROUNDS] [SECONDS]` prints one JSON
//! object per line. Needs `fio` for the read anchor. DIR must not exist; it is left behind.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use chain::id::{
    ChainVersion, ChannelId, ChunkId, ClientId, InodeId, NodeId, TargetId, UpdateId, UpdateVersion,
};
use storage_node::engine::{Engine, IoMode, Op, Options, Stage, Which};

const TARGET: TargetId = TargetId::new(100_010_101);
const CHUNKS: u64 = 768;
const CHUNK_SIZE: usize = 1 << 20;
const PAGE: u64 = 4096;
const DEPTH: u64 = 32;

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().context("usage: engine-bench DIR [ROUNDS] [SECONDS]")?;
    let rounds = args.next().map_or(Ok(5), |a| a.parse())?;
    let seconds = Duration::from_secs(args.next().map_or(Ok(4), |a| a.parse())?);
    let dir = Path::new(&dir);
    let engine = Engine::open(&Options {
        dir: dir.to_owned(),
        cluster: "bench".to_owned(),
        node: NodeId::new(10_001),
        io: IoMode::Auto,
        capacity_bytes: None,
    })?;
    println!("{}", serde_json::json!({"io": engine.state().io, "direct": engine.state().direct}));
    random_reads(&engine, dir, rounds, seconds).await?;
    for size in [64 << 10, 1 << 20] {
        overwrites(&engine, dir, rounds, size).await?;
    }
    shared_barriers(&engine, seconds).await?;
    let status = std::fs::read_to_string("/proc/self/status")?;
    println!(
        "{}",
        status
            .lines()
            .filter(|l| l.starts_with("VmHWM") || l.starts_with("VmRSS"))
            .collect::<Vec<_>>()
            .join(" ")
    );
    Ok(())
}

fn chunk(index: u64) -> ChunkId {
    ChunkId { file: InodeId::new(1), index }
}

async fn write(
    engine: &Engine,
    chunk: ChunkId,
    version: u64,
    offset: u64,
    bytes: Bytes,
) -> Result<()> {
    let id = UpdateId { client: ClientId::new(1), channel: ChannelId::new(1), seq: version };
    let version = UpdateVersion::new(version);
    let chain_version = ChainVersion::new(1);
    let op = Op::Write { offset, checksum: crc32c::crc32c(&bytes), bytes };
    let (truncate_generation, expected) = (0, None);
    let stage = Stage { chunk, version, chain_version, id, truncate_generation, expected, op };
    engine.stage(TARGET, stage).await?;
    engine.commit(TARGET, chunk, version, chain_version).await?;
    Ok(())
}

async fn random_reads(engine: &Engine, dir: &Path, rounds: usize, seconds: Duration) -> Result<()> {
    let mut random = 88_172_645_463_325_252_u64;
    for index in 0..CHUNKS {
        let words = (0..CHUNK_SIZE / 8).flat_map(|_| next(&mut random).to_le_bytes());
        write(engine, chunk(index), 1, 0, words.collect()).await?;
    }
    let (mut ours, mut anchors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        anchors.push(fio(&dir.join("blocks"), seconds)?);
        let (start, count) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let readers = (0..DEPTH).map(|reader| {
            let (engine, count) = (engine.clone(), Arc::clone(&count));
            tokio::spawn(async move {
                let mut random = 1 + reader;
                while start.elapsed() < seconds {
                    let at = next(&mut random);
                    let offset = (at >> 40) % (CHUNK_SIZE as u64 / PAGE) * PAGE;
                    let chunk = chunk(at % CHUNKS);
                    engine.read(TARGET, chunk, offset, PAGE, Which::Committed).await?;
                    count.fetch_add(1, Ordering::Relaxed);
                }
                anyhow::Ok(())
            })
        });
        for reader in readers.collect::<Vec<_>>() {
            reader.await??;
        }
        ours.push(per_second(count.load(Ordering::Relaxed), start));
    }
    report(
        "engine-4k-randread",
        "op/s",
        "higher",
        &mut ours,
        &mut anchors,
        "fio io_uring QD32, same file",
        0.9,
    );
    Ok(())
}

fn fio(file: &Path, seconds: Duration) -> Result<f64> {
    let output = Command::new("fio")
        .args(["--name=anchor", "--readonly", "--direct=1", "--rw=randread", "--bs=4k"])
        .args(["--iodepth=32", "--ioengine=io_uring", "--time_based", "--output-format=json"])
        .arg(format!("--runtime={}", seconds.as_secs()))
        .arg(format!("--size={}", CHUNKS * CHUNK_SIZE as u64))
        .arg(format!("--filename={}", file.display()))
        .output()
        .context("run fio")?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    report["jobs"][0]["read"]["iops"].as_f64().context("fio printed no read rate")
}

/// One client overwrites 4 KiB in a chunk of `size`, against append and fdatasync.
async fn overwrites(engine: &Engine, dir: &Path, rounds: usize, size: usize) -> Result<()> {
    const WRITES: u64 = 300;
    let target = chunk(10_000 + size as u64);
    let mut log = File::create(dir.join("anchor.log"))?;
    let page = Bytes::from(vec![7; 4096]);
    let mut version = 1;
    write(engine, target, version, 0, vec![1; size].into()).await?;
    let (mut ours, mut anchors) = (Vec::new(), Vec::new());
    let before = engine.stats();
    let mut random = 99;
    for _ in 0..rounds {
        let mut times = Vec::new();
        for _ in 0..WRITES {
            let start = Instant::now();
            log.write_all(&page)?;
            log.sync_data()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        anchors.push(median(&mut times));
        times.clear();
        for _ in 0..WRITES {
            version += 1;
            let offset = (next(&mut random) >> 40) % (size as u64 / PAGE) * PAGE;
            let start = Instant::now();
            write(engine, target, version, offset, page.clone()).await?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        ours.push(median(&mut times));
    }
    let after = engine.stats();
    let name = format!("engine-4k-overwrite-{}k", size >> 10);
    report(
        &name,
        "us p50",
        "lower",
        &mut ours,
        &mut anchors,
        "append 4 KiB + fdatasync",
        if size > 1 << 16 { 2.0 } else { 1.5 },
    );
    let amplification =
        ratio(after.block_bytes - before.block_bytes, after.update_bytes - before.update_bytes);
    println!("{}", serde_json::json!({"bench": name, "write_amplification": amplification}));
    Ok(())
}

/// 64 clients, each on its own chunk of 64 KiB.
async fn shared_barriers(engine: &Engine, seconds: Duration) -> Result<()> {
    let (before, start) = (engine.stats(), Instant::now());
    let clients = (0..64).map(|client| {
        let engine = engine.clone();
        tokio::spawn(async move {
            let chunk = chunk(20_000 + client);
            let mut version = 0;
            while start.elapsed() < seconds {
                version += 1;
                write(&engine, chunk, version, version % 16 * PAGE, vec![1; 4096].into()).await?;
            }
            anyhow::Ok(())
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await??;
    }
    let after = engine.stats();
    let updates = after.updates - before.updates;
    println!(
        "{}",
        serde_json::json!({
            "bench": "engine-4k-overwrite-64-clients", "unit": "op/s",
            "ours": per_second(updates, start),
            "barriers_per_update": ratio(after.barriers - before.barriers, updates), "goal": 0.2,
        })
    );
    Ok(())
}

fn report(
    name: &str,
    unit: &str,
    better: &str,
    ours: &mut [f64],
    anchors: &mut [f64],
    anchor_is: &str,
    goal: f64,
) {
    let (ours, anchor) = (median(ours), median(anchors));
    println!(
        "{}",
        serde_json::json!({
            "bench": name, "unit": unit, "better": better, "ours": ours.round(),
            "anchor": anchor.round(), "anchor_is": anchor_is,
            "ratio": (ours / anchor * 1000.0).round() / 1000.0, "goal": goal,
        })
    );
}

fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn per_second(count: u64, start: Instant) -> f64 {
    (count as f64 / start.elapsed().as_secs_f64()).round()
}

fn ratio(a: u64, b: u64) -> f64 {
    (a as f64 / b.max(1) as f64 * 1000.0).round() / 1000.0
}
