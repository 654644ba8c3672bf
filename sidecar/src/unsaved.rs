//! Which files have bytes that were taken from the application and are not in the store yet, known across a kill.
//!
//! A sidecar that is killed loses its write buffer. Its successor finds a mark for each such file and fails the next fsync
//! or close of it, once, instead of calling lost bytes safe. A mark is an empty file, named by the inode, in the pod's
//! private directory, which outlives the process and not the pod.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use client::{Client, InodeId};

/// How often marks of files are removed whose bytes went out by themselves.
const TICK: Duration = Duration::from_secs(1);

/// The marks of one volume.
#[derive(Debug)]
pub struct Unsaved {
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The marked files of this process.
    marked: HashMap<InodeId, Marked>,
    /// Files whose bytes died with an earlier process.
    lost: HashSet<InodeId>,
}

#[derive(Debug, Default)]
struct Marked {
    /// Writes so far.
    writes: u64,
    /// Those of them that are not in the write buffer yet.
    coming: u64,
}

/// A write that is on its way into the buffer: as long as it is held, nobody takes the file for saved.
#[derive(Debug)]
#[must_use = "hold it until the write has returned"]
pub struct Coming<'a> {
    unsaved: &'a Unsaved,
    inode: InodeId,
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        if let Some(marked) = self.unsaved.lock().marked.get_mut(&self.inode) {
            marked.coming -= 1;
        }
    }
}

impl Unsaved {
    /// Takes up the marks in `dir`, which is made if missing.
    ///
    /// # Errors
    /// The file system's.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&dir)?;
        let mut lost = HashSet::new();
        for entry in std::fs::read_dir(&dir)? {
            if let Some(inode) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
                lost.insert(InodeId::new(inode));
            }
        }
        if !lost.is_empty() {
            tracing::warn!(files = lost.len(), "an earlier sidecar died with unsaved bytes");
        }
        Ok(Self { dir, state: Mutex::new(State { lost, ..State::default() }) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, inode: InodeId) -> PathBuf {
        self.dir.join(inode.get().to_string())
    }

    /// Marks a file that is about to take a write, until the write has returned and its bytes are safe.
    ///
    /// # Errors
    /// The file system's: then the write must not be taken.
    pub fn mark(&self, inode: InodeId) -> io::Result<Coming<'_>> {
        let mut state = self.lock();
        if !state.marked.contains_key(&inode) {
            std::fs::File::create(self.path(inode))?;
        }
        let marked = state.marked.entry(inode).or_default();
        marked.writes += 1;
        marked.coming += 1;
        drop(state);
        Ok(Coming { unsaved: self, inode })
    }

    /// How often the file was marked; pass it to [`clear`](Self::clear). None while a write is on its way into the buffer:
    /// what is saved from there says nothing of it.
    #[must_use]
    pub fn writes(&self, inode: InodeId) -> Option<u64> {
        self.lock().marked.get(&inode).filter(|marked| marked.coming == 0).map(|it| it.writes)
    }

    /// The first `writes` writes of a file are safe: removes its mark unless there were more.
    pub fn clear(&self, inode: InodeId, writes: Option<u64>) {
        let mut state = self.lock();
        let marked = state.marked.get(&inode).map(|marked| marked.writes);
        if writes.is_some() && marked == writes {
            state.marked.remove(&inode);
            if !state.lost.contains(&inode) {
                self.remove(inode);
            }
        }
    }

    /// Whether an earlier process lost bytes of this file; tells it once.
    #[must_use]
    pub fn take_lost(&self, inode: InodeId) -> bool {
        let mut state = self.lock();
        let was_lost = state.lost.remove(&inode);
        if was_lost && !state.marked.contains_key(&inode) {
            self.remove(inode);
        }
        was_lost
    }

    /// Removes the marks of files of which `client` holds nothing any more.
    pub fn tidy(&self, client: &Client) {
        let marked: Vec<InodeId> = self.lock().marked.keys().copied().collect();
        for inode in marked {
            // Counted before the look: what comes after it is another write.
            let writes = self.writes(inode);
            if client.is_saved(inode) {
                self.clear(inode, writes);
            }
        }
    }

    fn remove(&self, inode: InodeId) {
        if let Err(error) = std::fs::remove_file(self.path(inode)) {
            // At worst a successor reports a loss that did not happen.
            tracing::warn!(%inode, %error, "remove the mark of a file");
        }
    }
}

/// Removes the marks of files whose bytes went out by themselves, until the volume is gone.
pub(crate) async fn tidy(unsaved: Weak<Unsaved>, client: Client) {
    loop {
        tokio::time::sleep(TICK).await;
        let Some(unsaved) = unsaved.upgrade() else { return };
        unsaved.tidy(&client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_is_told_once_of_each_file_that_was_not_safe() {
        let dir = tempfile::tempdir().unwrap();
        let [safe, busy, lost] = [7, 8, 9].map(InodeId::new);
        let first = Unsaved::open(dir.path().join("marks")).unwrap();
        for inode in [safe, busy, lost] {
            drop(first.mark(inode).unwrap());
        }
        let (of_safe, of_busy) = (first.writes(safe), first.writes(busy));
        // A write that came while the earlier ones were written back.
        drop(first.mark(busy).unwrap());
        first.clear(safe, of_safe);
        first.clear(busy, of_busy);
        drop(first);

        let second = Unsaved::open(dir.path().join("marks")).unwrap();
        assert_eq!([safe, busy, lost].map(|inode| second.take_lost(inode)), [false, true, true]);
        assert_eq!([safe, busy, lost].map(|inode| second.take_lost(inode)), [false; 3]);
        drop(second.mark(lost).unwrap());
        drop(second);
        let third = Unsaved::open(dir.path().join("marks")).unwrap();
        assert_eq!([busy, lost].map(|inode| third.take_lost(inode)), [false, true]);
    }

    #[test]
    fn a_loss_is_remembered_until_it_is_told_whatever_is_written_since() {
        let dir = tempfile::tempdir().unwrap();
        let inode = InodeId::new(3);
        drop(Unsaved::open(dir.path().into()).unwrap().mark(inode).unwrap());
        let second = Unsaved::open(dir.path().into()).unwrap();
        drop(second.mark(inode).unwrap());
        second.clear(inode, second.writes(inode));
        drop(second);
        assert!(Unsaved::open(dir.path().into()).unwrap().take_lost(inode));
    }

    /// A write may wait for a session or for room, long after it was marked and before it is in the buffer.
    #[tokio::test]
    async fn a_mark_stays_while_a_write_is_on_its_way_into_the_buffer() {
        let dir = tempfile::tempdir().unwrap();
        let (tidied, flushed) = (InodeId::new(3), InodeId::new(4));
        let nothing_held = Client::new(client::ClientOptions::new("127.0.0.1:1"));
        let unsaved = Unsaved::open(dir.path().into()).unwrap();
        let marks = || std::fs::read_dir(dir.path()).unwrap().count();
        let coming = [tidied, flushed].map(|inode| unsaved.mark(inode).unwrap());
        unsaved.tidy(&nothing_held);
        assert_eq!(marks(), 2);
        // A flush that began now does not cover it, also if it arrives before the flush ends.
        let before = unsaved.writes(flushed);
        drop(coming);
        unsaved.clear(flushed, before);
        assert_eq!(marks(), 2);
        unsaved.tidy(&nothing_held);
        assert_eq!(marks(), 0);
    }
}
