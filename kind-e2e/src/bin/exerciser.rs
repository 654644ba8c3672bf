//! The program of the pods that the cluster tests watch: it writes and reads files whose every byte follows from
//! the file's name, and says in one line of JSON what an application would have felt.
//!
//! `write` and `read` go on until their standard input ends, so that whoever runs them through `kubectl exec`
//! decides when they have seen enough. To each line that they are sent they answer how much they have done so far.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "what it measured is its output")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

const USAGE: &str = "exerciser idle                      sleep until killed
exerciser create FILE BYTES         write FILE, sync and close it
exerciser verify FILE               read FILE, compare each byte with what create or write put there
exerciser write DIR BYTES           files of BYTES one after the other, until standard input ends
exerciser read FILE THREADS         blocks of FILE past the page cache, until standard input ends
exerciser falter FILE               make FILE and fail; if it is there, remove it and end well
exerciser list DIR                  names in DIR
exerciser remove PATH...            remove files and folders";
/// Bytes of one read and of one write.
const BLOCK: usize = 64 << 10;
/// Reads go past the page cache: what is measured is the store.
const O_DIRECT: i32 = 0x4000;
/// Files that `write` keeps before it writes the oldest one anew.
const FILES_KEPT: usize = 8;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let said = match words.as_slice() {
        ["idle"] => loop {
            std::thread::park();
        },
        ["create", file, bytes] => create(Path::new(file), bytes.parse().context("BYTES")?)?,
        ["verify", file] => verify(Path::new(file))?,
        ["write", dir, bytes] => write(Path::new(dir), bytes.parse().context("BYTES")?),
        ["read", file, threads] => read(Path::new(file), threads.parse().context("THREADS")?)?,
        ["falter", file] => falter(Path::new(file))?,
        ["list", dir] => list(Path::new(dir))?,
        ["remove", paths @ ..] => remove(paths)?,
        _ => bail!("{USAGE}"),
    };
    println!("{said}");
    Ok(())
}

/// The byte pattern of a file: block `number` of the file `name`.
fn block(name: &str, number: u64, out: &mut [u8]) {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for byte in name.bytes() {
        state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    for piece in out.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let bytes = (word ^ (word >> 31)).to_le_bytes();
        piece.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Writes a whole file; gives back the longest single operation.
fn fill(path: &Path, bytes: usize) -> Result<Duration> {
    let name = name_of(path);
    let mut longest = Duration::ZERO;
    let mut timed = |what: &str, action: &mut dyn FnMut() -> std::io::Result<()>| {
        let begin = Instant::now();
        action().with_context(|| format!("{what} {}", path.display()))?;
        longest = longest.max(begin.elapsed());
        anyhow::Ok(())
    };
    let mut opened = None;
    timed("create", &mut || {
        opened = Some(File::create(path)?);
        Ok(())
    })?;
    let mut file = opened.context("the file was created")?;
    let mut buffer = vec![0; BLOCK];
    for (number, start) in (0..bytes).step_by(BLOCK).enumerate() {
        let piece = &mut buffer[..BLOCK.min(bytes - start)];
        block(&name, number as u64, piece);
        timed("write", &mut || file.write_all(piece))?;
    }
    timed("sync", &mut || file.sync_all())?;
    Ok(longest)
}

fn create(path: &Path, bytes: usize) -> Result<Value> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
    }
    let begin = Instant::now();
    let longest = fill(path, bytes)?;
    Ok(json!({
        "bytes": bytes,
        "seconds": begin.elapsed().as_secs_f64(),
        "longestMs": longest.as_millis(),
    }))
}

fn verify(path: &Path) -> Result<Value> {
    let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut all = Vec::new();
    file.read_to_end(&mut all).with_context(|| format!("read {}", path.display()))?;
    let mut expected = vec![0; BLOCK];
    for (number, piece) in all.chunks(BLOCK).enumerate() {
        block(&name_of(path), number as u64, &mut expected[..piece.len()]);
        ensure!(piece == &expected[..piece.len()], "{}: block {number} differs", path.display());
    }
    Ok(json!({"bytes": all.len()}))
}

/// What the threads of `write` and `read` share.
#[derive(Default)]
struct Course {
    /// Set once standard input has ended.
    stop: AtomicBool,
    /// What has succeeded so far: reads, or files.
    done: AtomicU64,
}

impl Course {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn count(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    fn answer_until_input_ends(&self) {
        for line in std::io::stdin().lock().lines() {
            if line.is_err() {
                break;
            }
            say(&self.done().to_string());
        }
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Whoever does not listen any more need not be told.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn write(dir: &Path, bytes: usize) -> Value {
    let course = Course::default();
    let (mut files, mut longest, mut errors) = (0_usize, Duration::ZERO, Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| course.answer_until_input_ends());
        while !course.is_over() {
            let path: PathBuf = dir.join(format!("written-{}", files % FILES_KEPT));
            match fill(&path, bytes) {
                Ok(took) => {
                    course.count();
                    longest = longest.max(took);
                }
                Err(error) => errors.push(format!("{error:#}")),
            }
            if files == 0 {
                say("started");
            }
            files += 1;
            if errors.len() > 20 {
                break;
            }
        }
    });
    json!({
        "done": course.done(),
        "files": files,
        "longestMs": longest.as_millis(),
        "errors": errors,
    })
}

/// What one reading thread has met.
#[derive(Default)]
struct Met {
    longest: Duration,
    errors: Vec<String>,
}

fn read(path: &Path, threads: u64) -> Result<Value> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(O_DIRECT)
        .open(path)
        .with_context(|| format!("open {}", path.display()))?;
    let blocks = file.metadata().context("size")?.len() / BLOCK as u64;
    ensure!(blocks > 0, "{} has less than one block", path.display());
    let (course, all) = (Course::default(), Mutex::new(Met::default()));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| course.answer_until_input_ends());
        for thread in 0..threads {
            let (file, course, all) = (&file, &course, &all);
            scope.spawn(move || {
                let met = read_blocks(file, &name_of(path), blocks, thread, course);
                let mut all = all.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                all.longest = all.longest.max(met.longest);
                all.errors.extend(met.errors);
            });
        }
        say("started");
    });
    let all = all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok(json!({
        "done": course.done(),
        "seconds": begin.elapsed().as_secs_f64(),
        "longestMs": all.longest.as_millis(),
        "errors": all.errors,
    }))
}

fn read_blocks(file: &File, name: &str, blocks: u64, thread: u64, course: &Course) -> Met {
    let mut met = Met::default();
    let (mut buffer, mut expected) = (vec![0; BLOCK], vec![0; BLOCK]);
    let mut round = 0;
    while !course.is_over() && met.errors.len() < 5 {
        // A stride that has no common factor with the number of threads spreads over the whole file.
        let number = (thread * 31 + round * 7) % blocks;
        let begin = Instant::now();
        let got = file.read_exact_at(&mut buffer, number * BLOCK as u64);
        met.longest = met.longest.max(begin.elapsed());
        round += 1;
        block(name, number, &mut expected);
        match got {
            Err(error) => met.errors.push(format!("block {number}: {error}")),
            Ok(()) if buffer != expected => met.errors.push(format!("block {number} differs")),
            Ok(()) => course.count(),
        }
    }
    met
}

/// What a Job that is tried again needs: it fails once. The file shows that the first attempt's write was kept.
fn falter(path: &Path) -> Result<Value> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            std::fs::remove_file(path).with_context(|| format!("remove {}", path.display()))?;
            Ok(json!({"attempt": 2}))
        }
        Err(error) => Err(error).with_context(|| format!("make {}", path.display())),
        Ok(_) => bail!("{} was not there; the next attempt will find it", path.display()),
    }
}

fn list(dir: &Path) -> Result<Value> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(json!({"names": names}))
}

fn remove(paths: &[&str]) -> Result<Value> {
    for path in paths {
        let meta = std::fs::metadata(path).with_context(|| format!("look at {path}"))?;
        let removed =
            if meta.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        removed.with_context(|| format!("remove {path}"))?;
    }
    Ok(json!({"removed": paths.len()}))
}
