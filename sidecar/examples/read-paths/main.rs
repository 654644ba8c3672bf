//! How fast the ways to read are, against what the machine gives in the same run. Needs root and /dev/fuse.
//!
//! `read-paths [DIRECTORY [MIB]]`: a store with three replicas under DIRECTORY (default: the system's temporary one), a file of MIB MiB
//! (default 1024), three rounds in which every path and every anchor runs once; the medians are printed, one JSON object a line.
//! Servers read past the page cache, so on a disk the disk bounds every path; on tmpfs (`/dev/shm`) what is left is our own cost.

#![forbid(unsafe_code)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::indexing_slicing,
    reason = "sizes of a bench"
)]
#![allow(clippy::print_stdout, reason = "its result")]

mod stage;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use client::{Client, ClientOptions};
use ring::client::{Ring, Transfer};
use ring::layout::Op;
use sidecar::dataset_fs::{DatasetFs, DatasetOptions, SharedDatasetFs};
use sidecar::ring_server::{Mounts, RingServer};
use source::{Credentials, Failure, Object, Source};

use stage::{Pod, Process, start_store, until};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 1 << 20;
/// Transfers of a ring, and reads of a client, that are under way at once.
const DEPTH: u32 = 8;
const ROUNDS: usize = 3;
/// Bytes served from the sidecar's memory: fits its cache of blocks.
const MEMORY: u64 = 8 * MIB;
/// Random reads of one round.
const SMALL_READS: u64 = 2_000;
const SMALL: u64 = 4096;
/// Past the page cache, as the servers read; and what that asks of memory.
const O_DIRECT: i32 = 0x4000;
const ALIGNED: usize = 4096;

/// Figures by name, one for each round.
type Figures = BTreeMap<&'static str, Vec<f64>>;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let first = args.next();
    if first.as_deref() == Some("--serve-memory") {
        return serve_memory(Path::new(&args.next().context("a directory")?));
    }
    let under = first.map_or_else(std::env::temp_dir, PathBuf::from);
    let size = args.next().map_or(Ok(1024), |mib| mib.parse::<u64>())? * MIB;
    let directory = tempfile::tempdir_in(&under)?;
    let (manager, mut processes) = start_store(directory.path())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let raw = directory.path().join("raw");
    let mut file = File::create(&raw)?;
    (0..size / MIB).try_for_each(|at| file.write_all(&block(at)))?;
    file.sync_all()?;
    let mut figures = Figures::new();
    let note = |figures: &mut Figures, name, figure| figures.entry(name).or_default().push(figure);
    let client = runtime.block_on(connect(&manager))?;
    let written = runtime.block_on(write(&client, size))?;
    note(&mut figures, "write", written);
    let pod = Pod::start(directory.path(), &manager)?;
    let memory = directory.path().join("memory");
    std::fs::create_dir(&memory)?;
    let arguments = ["--serve-memory".to_owned(), memory.display().to_string()];
    processes.push(Process::start("memory", &std::env::current_exe()?, &arguments)?);
    until("the ring from memory", || memory.join("ring.sock").exists())?;
    for _ in 0..ROUNDS {
        note(&mut figures, "socket", socket(size)?);
        note(&mut figures, "disk", disk(&raw, size)?);
        note(&mut figures, "client", runtime.block_on(read(&client, size))?);
        note(&mut figures, "ring", ring(&pod.ring, "/data/data", size, size)?);
        note(&mut figures, "mount", mount(&pod.mount.join("data"), size)?);
        note(&mut figures, "memcpy", memcpy(size));
        note(
            &mut figures,
            "memory",
            ring(&memory.join("ring.sock"), "/memory/file", MEMORY, size)?,
        );
        note(&mut figures, "small", runtime.block_on(small_reads(&client, size))?);
    }
    print(&figures, &under)?;
    for process in processes.iter().filter(|p| p.name != "memory").chain(&pod.sidecar) {
        let (now, most) = process.resident()?;
        let (name, mib) = (&process.name, |bytes: u64| bytes as f64 / MIB as f64);
        println!(
            r#"{{"bench":"read-paths-resident","process":"{name}","unit":"MiB","better":"lower","ours":{:.1},"peak":{:.1}}}"#,
            mib(now),
            mib(most)
        );
    }
    Ok(())
}

fn median(figures: &Figures, name: &str) -> Result<f64> {
    let mut all = figures.get(name).cloned().with_context(|| format!("no figure for {name}"))?;
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().with_context(|| format!("no figure for {name}"))
}

fn print(figures: &Figures, under: &Path) -> Result<()> {
    let under = under.display();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let load = load.split_whitespace().next().unwrap_or_default();
    let rows = [
        ("ring-store-vs-socket", "ring", "socket", "plain TCP over loopback, 1 MiB writes", "0.4"),
        ("ring-store-vs-disk", "ring", "disk", "O_DIRECT reads of 1 MiB, 8 threads", "null"),
        ("fuse-seq-vs-ring", "mount", "ring", "ring-store-vs-socket", "0.5"),
        ("ring-alone-vs-memcpy", "memory", "memcpy", "memcpy of 1 MiB, one thread", "0.5"),
        ("client-store-vs-socket", "client", "socket", "as of ring-store-vs-socket", "null"),
    ];
    for (bench, ours, anchor, anchor_is, goal) in rows {
        let (ours, anchor) = (median(figures, ours)?, median(figures, anchor)?);
        println!(
            r#"{{"bench":"{bench}","under":"{under}","unit":"MiB/s","better":"higher","ours":{ours:.0},"anchor":{anchor:.0},"anchor_is":"{anchor_is}","ratio":{:.2},"goal":{goal},"load":{load}}}"#,
            ours / anchor
        );
    }
    for (bench, name, unit) in
        [("client-seq-write", "write", "MiB/s"), ("client-4k-randread-qd8", "small", "op/s")]
    {
        let ours = median(figures, name)?;
        println!(
            r#"{{"bench":"{bench}","under":"{under}","unit":"{unit}","better":"higher","ours":{ours:.0},"load":{load}}}"#
        );
    }
    Ok(())
}

/// MiB/s of `bytes` since `start`.
fn rate(bytes: u64, start: Instant) -> f64 {
    bytes as f64 / MIB as f64 / start.elapsed().as_secs_f64()
}

async fn connect(manager: &str) -> Result<Client> {
    let client = Client::connect(ClientOptions::new(manager)).await?;
    client
        .wait_routing(|table| {
            !table.chains.is_empty() && table.chains.iter().all(|c| c.serving().count() == 3)
        })
        .await?;
    client.mkdir_all("/bench").await?;
    Ok(client)
}

/// Content that no two blocks share.
fn block(index: u64) -> Bytes {
    let mut state = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(BLOCK);
    while out.len() < BLOCK {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.into()
}

async fn write(client: &Client, size: u64) -> Result<f64> {
    let inode = client.create_path("/bench/data").await?.inode;
    let blocks: Vec<_> = (0..16).map(block).collect();
    let start = Instant::now();
    for (at, block) in (0..size / MIB).zip(blocks.iter().cycle()) {
        client.write_at(inode, at * MIB, block.clone()).await?;
    }
    client.flush(inode).await?;
    let rate = rate(size, start);
    client.release(inode).await;
    Ok(rate)
}

/// Sequential, through the client in this process.
async fn read(client: &Client, size: u64) -> Result<f64> {
    use futures::StreamExt;
    let inode = client.open_path("/bench/data").await?.inode;
    let start = Instant::now();
    let reads = (0..size / MIB).map(|at| client.read(inode, at * MIB, BLOCK as u32));
    let mut reads = futures::stream::iter(reads).buffered(DEPTH as usize);
    let mut got = 0;
    while let Some(parts) = reads.next().await {
        got += parts?.iter().map(Bytes::len).sum::<usize>() as u64;
    }
    ensure!(got == size, "{got} bytes of {size}");
    Ok(rate(size, start))
}

/// Random reads of 4 KiB per second.
async fn small_reads(client: &Client, size: u64) -> Result<f64> {
    use futures::StreamExt;
    let inode = client.open_path("/bench/data").await?.inode;
    let start = Instant::now();
    let at = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (size / SMALL) * SMALL;
    let reads = (1..=SMALL_READS).map(|n| client.read(inode, at(n), SMALL as u32));
    let mut reads = futures::stream::iter(reads).buffer_unordered(DEPTH as usize);
    while let Some(parts) = reads.next().await {
        ensure!(parts?.iter().map(Bytes::len).sum::<usize>() as u64 == SMALL, "short");
    }
    Ok(SMALL_READS as f64 / start.elapsed().as_secs_f64())
}

/// Sequential, through a ring.
fn ring(socket: &Path, path: &str, size: u64, bytes: u64) -> Result<f64> {
    let mut ring = Ring::connect(socket, DEPTH)?;
    let iov = ring.register(DEPTH as usize * BLOCK)?;
    let file = ring.open(path, 0)?;
    ensure!(file.size == size, "{path} has {} bytes", file.size);
    let transfer = |slot: u64, at: u64| Transfer {
        file: file.id,
        iov: iov.id,
        iov_offset: slot * MIB,
        file_offset: at % size,
        length: BLOCK as u32,
        user_data: slot,
    };
    let start = Instant::now();
    let (mut next, mut done) = (0, 0);
    while next < DEPTH.into() {
        ring.prepare(Op::Read, transfer(next, next * MIB))?;
        next += 1;
    }
    ring.submit()?;
    while done < bytes / MIB {
        let completion = ring.wait(Some(Duration::from_secs(30)))?.context("no completion came")?;
        ensure!(completion.result == BLOCK as i64, "read {}", completion.result);
        done += 1;
        if next < bytes / MIB {
            ring.prepare(Op::Read, transfer(completion.user_data, next * MIB))?;
            ring.submit()?;
            next += 1;
        }
    }
    let rate = rate(bytes, start);
    ring.close(file.id)?;
    Ok(rate)
}

/// Sequential, through the mount. Opening drops what the kernel has cached.
fn mount(path: &Path, size: u64) -> Result<f64> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; BLOCK];
    let start = Instant::now();
    let mut got = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => got += count as u64,
        }
    }
    ensure!(got == size, "{got} bytes of {size}");
    Ok(rate(size, start))
}

/// Anchor: what one connection over loopback carries.
fn socket(size: u64) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let sender = std::thread::spawn(move || -> Result<()> {
        let mut stream = listener.accept()?.0;
        let bytes = block(1);
        for _ in 0..size / MIB {
            stream.write_all(&bytes)?;
        }
        Ok(())
    });
    let mut stream = TcpStream::connect(address)?;
    let mut buffer = vec![0; BLOCK];
    let start = Instant::now();
    for _ in 0..size / MIB {
        stream.read_exact(&mut buffer)?;
    }
    let rate = rate(size, start);
    sender.join().ok().context("the sender ended")??;
    Ok(rate)
}

/// Anchor: what the disk under the store gives.
fn disk(path: &Path, size: u64) -> Result<f64> {
    let file = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(path)?;
    let next = AtomicU64::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let readers: Vec<_> =
            (0..DEPTH).map(|_| scope.spawn(|| read_blocks(&file, &next, size))).collect();
        for reader in readers {
            reader.join().ok().context("a reader ended")??;
        }
        Ok(())
    })?;
    Ok(rate(size, start))
}

fn read_blocks(file: &File, next: &AtomicU64, size: u64) -> Result<()> {
    let mut memory = vec![0u8; BLOCK + ALIGNED];
    let start = memory.as_ptr().addr().next_multiple_of(ALIGNED) - memory.as_ptr().addr();
    let block = &mut memory[start..start + BLOCK];
    loop {
        let at = next.fetch_add(MIB, Ordering::Relaxed);
        if at >= size {
            return Ok(());
        }
        file.read_exact_at(block, at)?;
    }
}

/// Anchor: what one thread copies, in the pattern of the ring from memory.
fn memcpy(size: u64) -> f64 {
    let from: Vec<Bytes> = (0..MEMORY / MIB).map(block).collect();
    let mut to = vec![vec![0u8; BLOCK]; DEPTH as usize];
    let start = Instant::now();
    for at in 0..size / MIB {
        let slot = at as usize % DEPTH as usize;
        to[slot].copy_from_slice(&from[at as usize % from.len()]);
        std::hint::black_box(&mut to);
    }
    rate(size, start)
}

/// One object in memory.
#[derive(Debug)]
struct Memory;

#[async_trait::async_trait]
impl Source for Memory {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        let identity = "1".into();
        Ok(vec![Object { path: "file".into(), size: MEMORY, identity, modified_ms: 0 }])
    }

    async fn read(&self, _: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        Ok((range.start..range.end).map(|at| (at >> 9) as u8).collect())
    }

    fn set_credentials(&self, _: Credentials) {}

    fn describe(&self) -> String {
        "memory".into()
    }
}

/// A ring server whose file is in its memory after the first read.
fn serve_memory(directory: &Path) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let mounts = Arc::new(Mounts::default());
        let files = DatasetFs::start(Arc::new(Memory), DatasetOptions::default(), Arc::new(|_| {}));
        mounts.add("/memory", Arc::new(SharedDatasetFs(files)));
        let server = RingServer::bind(&directory.join("ring.sock"), mounts)?;
        let (_stop, stopped) = tokio::sync::watch::channel(false);
        server.run(stopped).await;
        Ok(())
    })
}
