#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]

use super::*;
use source::{Credentials, Object};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Often enough that a test sees several.
const TICK: Duration = Duration::from_millis(20);

/// Objects in memory; a failure replaces every answer while it is set, or those about one path.
#[derive(Debug, Default)]
struct Memory {
    objects: Mutex<Vec<(Object, Vec<u8>)>>,
    failure: Mutex<Option<Failure>>,
    unreadable: Mutex<Option<(&'static str, Failure)>>,
    lists: AtomicUsize,
    reads: AtomicUsize,
}

impl Memory {
    fn with(files: &[(&str, &str, usize)]) -> Arc<Self> {
        let memory = Arc::new(Self::default());
        for (path, identity, size) in files {
            memory.put(path, identity, *size);
        }
        memory
    }

    fn put(&self, path: &str, identity: &str, size: usize) {
        let bytes: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
        let object = Object {
            path: path.into(),
            size: size as u64,
            identity: identity.into(),
            modified_ms: 1_000,
        };
        let mut objects = self.objects.lock().unwrap();
        objects.retain(|(known, _)| known.path != path);
        objects.push((object, bytes));
        objects.sort_by(|a, b| a.0.path.cmp(&b.0.path));
    }

    fn fail(&self, failure: Option<Failure>) {
        *self.failure.lock().unwrap() = failure;
    }

    /// Listed, but not to be read.
    fn deny(&self, denied: Option<(&'static str, Failure)>) {
        *self.unreadable.lock().unwrap() = denied;
    }
}

#[async_trait::async_trait]
impl Source for Memory {
    async fn list(&self) -> Result<Vec<Object>, Failure> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        match self.failure.lock().unwrap().clone() {
            Some(failure) => Err(failure),
            None => Ok(self.objects.lock().unwrap().iter().map(|(o, _)| o.clone()).collect()),
        }
    }

    async fn read(&self, object: &Object, range: Range<u64>) -> Result<Bytes, Failure> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if let Some(failure) = self.failure.lock().unwrap().clone() {
            return Err(failure);
        }
        if let Some((path, failure)) = self.unreadable.lock().unwrap().clone()
            && path == object.path
        {
            return Err(failure);
        }
        let objects = self.objects.lock().unwrap();
        match objects.iter().find(|(known, _)| known == object) {
            Some((_, bytes)) => {
                Ok(Bytes::copy_from_slice(&bytes[range.start as usize..range.end as usize]))
            }
            None => Err(Failure::new(Reason::DatasetChanged, "412")),
        }
    }

    fn set_credentials(&self, _: Credentials) {}

    fn describe(&self) -> String {
        "memory".into()
    }
}

type Words = Arc<Mutex<Vec<Result<(), Reason>>>>;

fn start(source: Arc<Memory>) -> (SharedDatasetFs, Words) {
    let words = Words::default();
    let sink = Arc::clone(&words);
    let callback: StatusCallback =
        Arc::new(move |word| sink.lock().unwrap().push(word.map_err(|failure| failure.reason)));
    let options = DatasetOptions { tick: TICK, ..DatasetOptions::default() };
    (SharedDatasetFs(DatasetFs::start(source, options, callback)), words)
}

/// What `look` finds, within the thirty seconds that are promised.
async fn wait_for<T, F: Future<Output = Option<T>>>(look: impl Fn() -> F) -> T {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < until, "it did not happen within thirty seconds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn names(fs: &SharedDatasetFs, ino: u64) -> Vec<String> {
    let (mut names, mut cookie) = (Vec::new(), 0);
    loop {
        let page = fs.readdir(ino, cookie, 1).await.unwrap();
        let Some(entry) = page.entries.first() else { break };
        names.push(String::from_utf8(entry.name.to_vec()).unwrap());
        cookie = entry.cookie;
        if page.end {
            break;
        }
    }
    names.sort();
    names
}

#[tokio::test]
async fn objects_are_files_in_directories_with_the_same_numbers_after_a_restart() {
    let memory = Memory::with(&[("a/b/one", "1", 10), ("a/two", "2", 20), ("three", "3", 0)]);
    let (fs, _) = start(Arc::clone(&memory));
    assert_eq!(names(&fs, ROOT).await, ["a", "three"]);
    let a = fs.lookup(ROOT, b"a").await.unwrap();
    assert_eq!(names(&fs, a.ino).await, ["b", "two"]);
    let two = fs.lookup(a.ino, b"two").await.unwrap();
    assert_eq!((two.kind, two.size, two.mode), (Kind::File, 20, 0o444));
    assert_eq!(fs.lookup(a.ino, b"none").await, Err(Errno::ENOENT));
    let (again, _) = start(memory);
    assert_eq!(again.lookup(ROOT, b"a").await, Ok(a));
    assert_eq!(again.getattr(two.ino).await, Ok(two));
}

#[tokio::test]
async fn reads_cross_blocks_and_stop_at_the_end() {
    let size = (BLOCK * 2 + 1000) as usize;
    let (fs, _) = start(Memory::with(&[("f", "1", size)]));
    let file = fs.lookup(ROOT, b"f").await.unwrap();
    let read = fs.read(file.ino, BLOCK - 10, 20).await.unwrap();
    let expected: Vec<u8> = (BLOCK - 10..BLOCK + 10).map(|at| (at % 251) as u8).collect();
    assert_eq!(read, expected);
    assert_eq!(fs.read(file.ino, BLOCK * 2 + 990, 4096).await.unwrap().len(), 10);
    assert!(fs.read(file.ino, BLOCK * 3, 4096).await.unwrap().is_empty());
    assert_eq!(fs.write(Caller { uid: 0, gid: 0 }, file.ino, 0, read).await, Err(Errno::EROFS));
}

#[tokio::test]
async fn many_readers_of_one_block_fetch_it_once() {
    let memory = Memory::with(&[("f", "1", 1000)]);
    let (fs, _) = start(Arc::clone(&memory));
    let file = fs.lookup(ROOT, b"f").await.unwrap();
    let reads = (0..32).map(|at| fs.read(file.ino, at, 100));
    for (at, read) in futures::future::join_all(reads).await.into_iter().enumerate() {
        assert_eq!(read.unwrap()[0], at as u8);
    }
    assert_eq!(memory.reads.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_replaced_object_is_stale_and_the_new_one_is_found_within_thirty_seconds() {
    let memory = Memory::with(&[("f", "1", 1000)]);
    let (fs, words) = start(Arc::clone(&memory));
    let old = fs.lookup(ROOT, b"f").await.unwrap();
    memory.put("f", "2", 500);
    assert_eq!(fs.read(old.ino, 0, 10).await, Err(Errno::ESTALE));
    let new = wait_for(|| async {
        fs.lookup(ROOT, b"f").await.ok().filter(|found| found.ino != old.ino)
    })
    .await;
    assert_eq!(fs.read(new.ino, 0, 1000).await.unwrap().len(), 500);
    assert_eq!(fs.getattr(old.ino).await, Err(Errno::ESTALE));
    assert_eq!(*words.lock().unwrap(), [Ok(()), Err(Reason::DatasetChanged), Ok(())]);
}

#[tokio::test]
async fn a_failing_source_is_told_once_and_heals_by_itself() {
    let memory = Memory::with(&[("f", "1", 1000)]);
    memory.fail(Some(Failure::new(Reason::InvalidCredentials, "403")));
    let (fs, words) = start(Arc::clone(&memory));
    assert_eq!(fs.lookup(ROOT, b"f").await, Err(Errno::EACCES));
    assert_eq!(fs.getattr(ROOT).await.map(|attr| attr.kind), Ok(Kind::Directory));
    memory.fail(None);
    let healed = wait_for(|| async { fs.lookup(ROOT, b"f").await.ok() }).await;
    assert_eq!(healed.size, 1000);
    assert_eq!(*words.lock().unwrap(), [Err(Reason::InvalidCredentials), Ok(())]);
}

/// Keys that may list and not get: what can be listed must not call the dataset well.
#[tokio::test]
async fn a_read_that_fails_is_told_once_until_that_very_read_succeeds() {
    let denied = Failure::new(Reason::AccessDenied, "get");
    let memory = Memory::with(&[("f", "1", 1000), ("g", "1", 1000)]);
    let (fs, words) = start(Arc::clone(&memory));
    let file = fs.lookup(ROOT, b"f").await.unwrap().ino;
    let other = fs.lookup(ROOT, b"g").await.unwrap().ino;
    memory.deny(Some(("f", denied)));
    for _ in 0..3 {
        assert_eq!(fs.read(file, 0, 10).await, Err(Errno::EACCES));
        assert_eq!(fs.read(other, 0, 10).await.unwrap().len(), 10);
        let asked = memory.reads.load(Ordering::Relaxed);
        // The file system asks again by itself, and again.
        let again = || async { (memory.reads.load(Ordering::Relaxed) >= asked + 3).then_some(()) };
        wait_for(again).await;
        let told = [Ok(()), Err(Reason::AccessDenied)];
        assert_eq!(*words.lock().unwrap(), told, "works again is said only when it does");
    }
    assert_eq!(memory.lists.load(Ordering::Relaxed), 1, "what can be listed is not listed again");
    // Nobody reads it any more, so the file system has to find out by itself.
    memory.deny(None);
    wait_for(|| async { (words.lock().unwrap().len() > 2).then_some(()) }).await;
    assert_eq!(fs.read(file, 0, 10).await.unwrap().len(), 10);
    assert_eq!(*words.lock().unwrap(), [Ok(()), Err(Reason::AccessDenied), Ok(())]);
}

/// Nobody can read it any more, so nobody can be told that it works.
#[tokio::test]
async fn an_object_that_cannot_be_read_and_is_removed_is_no_trouble() {
    let gone = Failure::new(Reason::ObjectNotFound, "get");
    let memory = Memory::with(&[("f", "1", 1000), ("g", "1", 1000)]);
    let (fs, words) = start(Arc::clone(&memory));
    let file = fs.lookup(ROOT, b"f").await.unwrap().ino;
    memory.deny(Some(("f", gone)));
    assert_eq!(fs.read(file, 0, 10).await, Err(Errno::ENOENT));
    memory.objects.lock().unwrap().retain(|(object, _)| object.path != "f");
    wait_for(|| async { (words.lock().unwrap().len() > 2).then_some(()) }).await;
    assert_eq!(*words.lock().unwrap(), [Ok(()), Err(Reason::ObjectNotFound), Ok(())]);
}

const BLOCK: u64 = blocks::BLOCK_BYTES as u64;
