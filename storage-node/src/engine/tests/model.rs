//! Random sequences against a model that is a few lines long.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Write {
        chunk: u64,
        offset: u64,
        length: usize,
        fill: u8,
    },
    Truncate {
        chunk: u64,
        length: u64,
    },
    Remove {
        chunk: u64,
    },
    Replace {
        chunk: u64,
        skip: u64,
        length: usize,
        fill: u8,
    },
    Commit {
        chunk: u64,
    },
    Drop {
        chunk: u64,
    },
    Reopen,
    /// The process dies: what is in the files now is what the next one finds.
    Kill,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let chunk = || 0..3_u64;
    // Sizes around pages, segments and blocks, and a few large ones.
    let near = |base: u64| (0..3_u64).prop_map(move |d| (base + d).saturating_sub(1));
    let size = move || {
        prop_oneof![0..200_u64, near(4096), near(64 << 10), near(128 << 10), 0..600_000_u64]
    };
    let length = move || size().prop_map(|s| usize::try_from(s.max(1)).unwrap());
    let step = prop_oneof![
        8 => (chunk(), size(), length(), any::<u8>())
            .prop_map(|(chunk, offset, length, fill)| Step::Write { chunk, offset, length, fill }),
        2 => (chunk(), size()).prop_map(|(chunk, length)| Step::Truncate { chunk, length }),
        1 => chunk().prop_map(|chunk| Step::Remove { chunk }),
        1 => (chunk(), 0..5_u64, length(), any::<u8>())
            .prop_map(|(chunk, skip, length, fill)| Step::Replace { chunk, skip, length, fill }),
        10 => chunk().prop_map(|chunk| Step::Commit { chunk }),
        2 => chunk().prop_map(|chunk| Step::Drop { chunk }),
        1 => Just(Step::Reopen),
        1 => Just(Step::Kill),
    ];
    prop::collection::vec(step, 1..40)
}

#[derive(Clone, Debug, Default, PartialEq)]
struct State {
    version: u64,
    bytes: Vec<u8>,
    removed: bool,
}

#[derive(Debug, Default)]
struct Chunk {
    committed: Option<State>,
    pending: Option<State>,
}

/// What an update makes of the committed state, and how it is asked for.
fn apply(step: &Step, old: Option<&State>) -> Option<(u64, State, Op)> {
    let old = old.cloned().unwrap_or_default();
    let mut next = State { version: old.version + 1, removed: false, ..old };
    let (chunk, op) = match *step {
        Step::Write { chunk, offset, length, fill } => {
            let at = usize::try_from(offset).unwrap();
            // Bytes that differ from page to page, so that pages in wrong places show.
            let bytes: Vec<u8> =
                (at..at + length).map(|i| fill ^ (i / 4096).to_le_bytes()[0]).collect();
            next.bytes.resize(next.bytes.len().max(at + length), 0);
            next.bytes[at..at + length].copy_from_slice(&bytes);
            (chunk, write(offset, bytes))
        }
        Step::Truncate { chunk, length } => {
            next.bytes.resize(usize::try_from(length).unwrap(), 0);
            (chunk, Op::Truncate { length })
        }
        Step::Remove { chunk } => {
            next.bytes.clear();
            next.removed = true;
            (chunk, Op::Remove)
        }
        Step::Replace { chunk, skip, length, fill } => {
            next.bytes = vec![fill; length];
            next.version += skip;
            (chunk, Op::Replace(replace(&next.bytes)))
        }
        Step::Commit { .. } | Step::Drop { .. } | Step::Reopen | Step::Kill => return None,
    };
    Some((chunk, next, op))
}

struct World {
    disk: Disk,
    engine: Option<Engine>,
    chunks: BTreeMap<u64, Chunk>,
    seq: u64,
}

impl World {
    fn engine(&self) -> Engine {
        self.engine.clone().unwrap()
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Reopen => {
                self.engine = None;
                self.engine = Some(self.disk.open());
            }
            Step::Kill => self.kill(),
            Step::Commit { chunk } => self.commit(*chunk).await,
            Step::Drop { chunk } => {
                let model = self.chunks.entry(*chunk).or_default();
                if let Some(pending) = model.pending.take() {
                    let raw = version(pending.version);
                    self.engine().drop_pending(TARGET, super::chunk(*chunk), raw).await.unwrap();
                }
            }
            _ => self.update(step).await,
        }
    }

    fn kill(&mut self) {
        let next = Disk::new(self.disk.options.io);
        image(self.disk.dir.path(), next.dir.path());
        self.engine = None;
        self.disk = next;
        self.engine = Some(self.disk.open());
    }

    async fn commit(&mut self, chunk: u64) {
        let engine = self.engine();
        let model = self.chunks.entry(chunk).or_default();
        let Some(pending) = model.pending.take() else { return };
        let raw = version(pending.version);
        let state =
            engine.commit(TARGET, super::chunk(chunk), raw, chain_version(1)).await.unwrap();
        assert_eq!(state.checksum, crc32c::crc32c(&pending.bytes));
        model.committed = Some(pending);
    }

    async fn update(&mut self, step: &Step) {
        let engine = self.engine();
        let target_chunk = match *step {
            Step::Write { chunk, .. } | Step::Truncate { chunk, .. } => chunk,
            Step::Remove { chunk } | Step::Replace { chunk, .. } => chunk,
            _ => return,
        };
        let model = self.chunks.entry(target_chunk).or_default();
        let Some((chunk, next, op)) = apply(step, model.committed.as_ref()) else { return };
        self.seq += 1;
        let is_replace = matches!(op, Op::Replace(_));
        let request = Stage { id: id(0, self.seq), ..stage(super::chunk(chunk), next.version, op) };
        let answer = engine.stage(TARGET, request).await;
        if model.pending.is_some() && !is_replace {
            assert!(matches!(answer, Err(Error::OtherPending { .. })), "{answer:?}");
            return;
        }
        match answer {
            Ok(_) => model.pending = Some(next),
            Err(Error::NoSpace { .. }) => {}
            Err(e) => panic!("{e}"),
        }
    }

    async fn compare(&self) {
        for (index, model) in &self.chunks {
            let info = self.engine().meta(TARGET, chunk(*index)).unwrap();
            let both = [
                (&model.committed, info.committed, Which::Committed),
                (&model.pending, info.pending, Which::Pending),
            ];
            for (expected, found, which) in both {
                let found = match found {
                    None => None,
                    Some(s) if s.removed => {
                        Some(State { version: s.version.get(), bytes: vec![], removed: true })
                    }
                    Some(s) => {
                        let bytes = read(&self.engine(), chunk(*index), which).await;
                        assert_eq!(s.checksum, crc32c::crc32c(&bytes));
                        Some(State { version: s.version.get(), bytes, removed: false })
                    }
                };
                assert!(*expected == found, "chunk {index} {which:?}");
            }
        }
    }
}

/// The directory as a kill at this moment would leave it. RocksDB removes files that it no longer
/// needs behind the caller's back: a copy during which names went or came shows no one moment, so it
/// is made again.
pub(super) fn image(from: &Path, to: &Path) {
    for _ in 0..100 {
        let before = names(from);
        match copy(from, to) {
            Ok(()) if before == names(from) => return,
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
            _ => {
                std::fs::remove_dir_all(to).unwrap();
                std::fs::create_dir(to).unwrap();
            }
        }
    }
    panic!("{} does not keep still", from.display());
}

fn names(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(names(&path));
        }
        found.insert(path);
    }
    found
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            std::fs::create_dir(&to)?;
            copy(&entry.path(), &to)?;
        } else {
            std::fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

fn run(io: IoMode, steps: &[Step]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let disk = Disk::new(io);
        let engine = Some(disk.open());
        let mut world = World { disk, engine, chunks: BTreeMap::new(), seq: 0 };
        for step in steps {
            world.step(step).await;
            world.compare().await;
        }
        world.engine = None;
        let report = verify(world.disk.dir.path()).unwrap();
        assert_eq!(report.problems, []);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn the_engine_agrees_with_the_model_on_io_uring(steps in steps()) {
        run(IoMode::Auto, &steps);
    }

    #[test]
    fn the_engine_agrees_with_the_model_on_threads(steps in steps()) {
        run(IoMode::Threads, &steps);
    }
}
