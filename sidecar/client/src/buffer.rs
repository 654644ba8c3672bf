//! The write buffer: small writes are joined chunk by chunk and go out when a chunk is full, at fsync or close, after a
//! second, or when the budget is used up. One write-back of a file runs at a time, so that two writes of the same bytes
//! reach the store in their order.
//!
//! A write-back that fails until its deadline drops its bytes and leaves its error with the file: the next fsync or close
//! gets it, once. Until then the file stays here, also when nobody is known to have it open: who opened it before this
//! process took the mount over is not.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use chain::id::InodeId;
use futures::stream::{self, StreamExt};
use rpc::message::meta::Attributes;
use rpc::message::storage::UpdateOp;
use rpc::{Code, Error};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::file::{Placement, pieces};
use crate::meta::LengthReport;
use crate::{Identity, Inner};

/// How often buffers are looked at.
const AGE_TICK: Duration = Duration::from_millis(250);
/// After how long unwritten bytes go out by themselves.
const AGE_MAX: Duration = Duration::from_secs(1);
/// Chunks of one file that are written at once.
const PARALLEL: usize = 16;

/// Unwritten bytes inside one chunk.
#[derive(Debug, Default)]
struct Extent {
    parts: Vec<Bytes>,
    length: u64,
}

impl Extent {
    fn push(&mut self, bytes: Bytes) {
        self.length += bytes.len() as u64;
        self.parts.push(bytes);
    }

    /// The bytes from `from` to `to`, counted from the extent's start.
    fn slice(&self, from: u64, to: u64) -> Self {
        let (mut at, mut out) = (0, Self::default());
        for part in &self.parts {
            let end = at + part.len() as u64;
            let (start, stop) = (from.clamp(at, end) - at, to.clamp(at, end) - at);
            if start < stop {
                // Both are at most the length of a part.
                #[allow(clippy::cast_possible_truncation, reason = "inside a slice in memory")]
                out.push(part.slice(start as usize..stop as usize));
            }
            at = end;
        }
        out
    }

    fn join(mut self) -> Bytes {
        match self.parts.len() {
            1 => self.parts.swap_remove(0),
            _ => self.parts.concat().into(),
        }
    }
}

/// Unwritten bytes of one file, by offset: extents do not overlap and lie within one chunk each.
#[derive(Debug, Default)]
struct Extents(BTreeMap<u64, Extent>);

impl Extents {
    /// Puts `bytes`, which lie within one chunk, over what is there. Returns how many bytes they replaced.
    fn put(&mut self, chunk_size: u64, offset: u64, bytes: Bytes) -> u64 {
        let end = offset + bytes.len() as u64;
        let replaced = self.cut(offset, end);
        if let Some((start, before)) = self.0.range_mut(..offset).next_back()
            && start + before.length == offset
            && !offset.is_multiple_of(chunk_size)
        {
            before.push(bytes);
        } else {
            self.0.entry(offset).or_default().push(bytes);
        }
        replaced
    }

    /// Drops what lies between `from` and `to`. Returns how many bytes that were.
    fn cut(&mut self, from: u64, to: u64) -> u64 {
        let overlaps = |start: u64, extent: &Extent| start < to && start + extent.length > from;
        let hit: Vec<u64> = self
            .0
            .range(..to)
            .rev()
            .take_while(|(start, extent)| overlaps(**start, extent))
            .map(|(start, _)| *start)
            .collect();
        let mut dropped = 0;
        for start in hit {
            let Some(extent) = self.0.remove(&start) else { continue };
            let end = start + extent.length;
            dropped += end.min(to) - start.max(from);
            if start < from {
                self.0.insert(start, extent.slice(0, from - start));
            }
            if end > to {
                self.0.insert(to, extent.slice(to - start, end - start));
            }
        }
        dropped
    }

    /// Takes all extents, or those that reach the end of their chunk, grouped by chunk.
    fn take(&mut self, chunk_size: u64, all: bool) -> Vec<Vec<(u64, Extent)>> {
        let goes = |start: &u64, extent: &mut Extent| {
            all || (start + extent.length).is_multiple_of(chunk_size)
        };
        let mut chunks: Vec<Vec<(u64, Extent)>> = Vec::new();
        let mut last = None;
        for (start, extent) in self.0.extract_if(.., goes) {
            let chunk = start / chunk_size;
            if last != Some(chunk) {
                chunks.push(Vec::new());
                last = Some(chunk);
            }
            if let Some(group) = chunks.last_mut() {
                group.push((start, extent));
            }
        }
        chunks
    }
}

/// How far unreported writes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reach {
    end: u64,
    /// The truncate generation under which the first of them was made. A truncation since may have cut some: the service
    /// then asks the chunks how far the file reaches.
    truncate_generation: u64,
    /// How many they are: a report covers those that were made before it.
    writes: u64,
}

#[derive(Debug)]
struct State {
    identity: Identity,
    attributes: Attributes,
    /// One for each opening, the first one used for reports. Empty after a restart until the next write.
    sessions: Vec<u64>,
    opens: usize,
    extents: Extents,
    /// The furthest write that was not reported.
    unreported: Option<Reach>,
    error: Option<Error>,
    /// When the oldest unwritten byte came.
    oldest: Option<Instant>,
    used: Instant,
    /// A write-back of full chunks is on its way.
    scheduled: bool,
    /// The age task has sent somebody.
    ageing: bool,
    /// It is not in the map any more: whoever still has it must not put anything in.
    retired: bool,
}

impl State {
    fn new(identity: Identity, attributes: &Attributes) -> Self {
        Self {
            identity,
            attributes: attributes.clone(),
            sessions: Vec::new(),
            opens: 0,
            extents: Extents::default(),
            unreported: None,
            error: None,
            oldest: None,
            used: Instant::now(),
            scheduled: false,
            ageing: false,
            retired: false,
        }
    }

    /// Whether somebody has it open, or it holds something that is still to be written or told.
    fn is_busy(&self) -> bool {
        self.opens > 0
            || !self.extents.0.is_empty()
            || self.unreported.is_some()
            || self.error.is_some()
    }

    /// Another client may have truncated the file: what is written from now on is of its generation.
    fn learn(&mut self, attributes: &Attributes) {
        self.learn_generation(attributes.truncate_generation);
    }

    fn learn_generation(&mut self, generation: u64) {
        let known = &mut self.attributes.truncate_generation;
        *known = generation.max(*known);
    }
}

/// One file that is written.
#[derive(Debug)]
struct Writer {
    inode: InodeId,
    chunk_size: u32,
    state: Mutex<State>,
    /// Held by the one write-back.
    write_back: tokio::sync::Mutex<()>,
}

impl Writer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All files that are written.
#[derive(Debug)]
pub(crate) struct Buffers {
    budget: Semaphore,
    bytes: usize,
    writers: Mutex<HashMap<InodeId, Arc<Writer>>>,
}

impl Buffers {
    pub(crate) fn new(bytes: usize) -> Self {
        let bytes = bytes.clamp(64 << 10, Semaphore::MAX_PERMITS);
        Self { budget: Semaphore::new(bytes), bytes, writers: Mutex::new(HashMap::new()) }
    }

    /// Bytes that wait to be written back, or are on their way.
    pub(crate) fn used(&self) -> usize {
        self.bytes.saturating_sub(self.budget.available_permits())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InodeId, Arc<Writer>>> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, inode: InodeId) -> Option<Arc<Writer>> {
        self.lock().get(&inode).cloned()
    }

    /// The writer of a file, made if there is none, with another session. `opens` says how many openings that is.
    fn add_session(
        &self,
        identity: Identity,
        attributes: &Attributes,
        session: u64,
        opens: usize,
    ) -> Arc<Writer> {
        // The map stays locked: nobody retires the writer between the look and the change.
        let mut writers = self.lock();
        let make = || {
            Arc::new(Writer {
                inode: attributes.inode,
                chunk_size: attributes.layout.map_or(1 << 20, |layout| layout.chunk_size_bytes),
                state: Mutex::new(State::new(identity, attributes)),
                write_back: tokio::sync::Mutex::new(()),
            })
        };
        let writer = Arc::clone(writers.entry(attributes.inode).or_insert_with(make));
        let mut state = writer.lock();
        state.opens += opens;
        state.learn(attributes);
        state.sessions.push(session);
        state.used = Instant::now();
        drop(state);
        writer
    }

    /// Notes an opening for writing.
    pub(crate) fn opened(&self, identity: Identity, attributes: &Attributes, session: u64) {
        drop(self.add_session(identity, attributes, session, 1));
    }

    /// Whether this client has a session of the file: it keeps its chunks then, also without a name.
    pub(crate) fn has_session(&self, inode: InodeId) -> bool {
        self.get(inode).is_some_and(|writer| !writer.lock().sessions.is_empty())
    }

    /// Notes a truncation that this client made.
    pub(crate) fn truncated(&self, attributes: &Attributes) {
        if let Some(writer) = self.get(attributes.inode) {
            writer.lock().learn(attributes);
        }
    }

    /// Where unreported writes end.
    pub(crate) fn written_end(&self, inode: InodeId) -> Option<u64> {
        Some(self.get(inode)?.lock().unreported?.end)
    }

    /// Whether nothing of a file waits here.
    pub(crate) fn is_saved(&self, inode: InodeId) -> bool {
        let Some(writer) = self.get(inode) else { return true };
        // Bytes that are being written back are in no extent.
        let Ok(_none_under_way) = writer.write_back.try_lock() else { return false };
        let state = writer.lock();
        state.extents.0.is_empty() && state.unreported.is_none() && state.error.is_none()
    }

    pub(crate) fn has_sessions(&self) -> bool {
        self.lock().values().any(|writer| !writer.lock().sessions.is_empty())
    }

    fn give_back(&self, bytes: u64) {
        self.budget.add_permits(usize::try_from(bytes).unwrap_or(0));
    }
}

impl Inner {
    pub(crate) async fn buffer_write(
        self: &Arc<Self>,
        identity: Identity,
        inode: InodeId,
        offset: u64,
        bytes: Bytes,
    ) -> Result<(), Error> {
        let mut writer = self.writer(identity, inode).await?;
        let chunk_size = u64::from(writer.chunk_size);
        let mut left = bytes;
        let length = left.len() as u64;
        for piece in pieces(writer.chunk_size, offset, length) {
            let at = piece.index * chunk_size + u64::from(piece.offset);
            let mut part = left.split_to(piece.length as usize);
            // A piece may be larger than what the whole budget allows.
            while !part.is_empty() {
                let step = part.split_to(part.len().min(self.buffers.bytes));
                let start = at + u64::from(piece.length) - (part.len() + step.len()) as u64;
                let room = self.reserve(&writer, step.len()).await?;
                while !self.put(&writer, start, step.clone()) {
                    // Retired while this waited for room.
                    writer = self.writer(identity, inode).await?;
                }
                // Given back when the bytes are written.
                room.forget();
            }
        }
        Ok(())
    }

    /// Takes bytes into the buffer; not into that of a writer that was retired, which nobody writes back.
    fn put(self: &Arc<Self>, writer: &Arc<Writer>, offset: u64, bytes: Bytes) -> bool {
        let chunk_size = u64::from(writer.chunk_size);
        let end = offset + bytes.len() as u64;
        let mut state = writer.lock();
        if state.retired {
            return false;
        }
        let now = Instant::now();
        state.used = now;
        state.oldest.get_or_insert(now);
        let truncate_generation = state.attributes.truncate_generation;
        let fresh = Reach { end, truncate_generation, writes: 0 };
        let reach = state.unreported.get_or_insert(fresh);
        reach.end = reach.end.max(end);
        reach.writes += 1;
        let replaced = state.extents.put(chunk_size, offset, bytes);
        self.buffers.give_back(replaced);
        if end.is_multiple_of(chunk_size) && !std::mem::replace(&mut state.scheduled, true) {
            let (inner, writer) = (Arc::clone(self), Arc::clone(writer));
            tokio::spawn(async move { inner.write_out(&writer, false).await });
        }
        true
    }

    /// The writer of a file, with a session: made anew after a restart.
    async fn writer(&self, identity: Identity, inode: InodeId) -> Result<Arc<Writer>, Error> {
        if let Some(writer) = self.buffers.get(inode)
            && !writer.lock().sessions.is_empty()
        {
            return Ok(writer);
        }
        let mut opened = self.open_session(identity, inode, true).await?;
        Placement::of(&opened.attributes)?;
        self.inodes.put(&mut opened.attributes);
        Ok(self.buffers.add_session(identity, &opened.attributes, opened.session, 0))
    }

    /// If another client truncated the file since this one wrote to it, learns how far it reaches now. What is written and
    /// not reported says nothing about that any more.
    pub(crate) async fn meet_truncation(&self, attributes: &Attributes) {
        let Some(writer) = self.buffers.get(attributes.inode) else { return };
        let unreported = writer.lock().unreported;
        let generation = attributes.truncate_generation;
        if unreported.is_some_and(|reach| reach.truncate_generation < generation) {
            self.write_out(&writer, true).await;
            // Also after a failure: under an older generation it is the chunks that say how far the file reaches.
            if let Err(error) = self.report(&writer).await {
                // It is reported again, and the next flush fails if it still cannot be.
                tracing::debug!(inode = %writer.inode, %error, "report a length after a truncation");
            }
        }
    }

    /// Waits for room in the budget; makes room from this file first, the age task makes it from the others.
    async fn reserve(&self, writer: &Writer, bytes: usize) -> Result<SemaphorePermit<'_>, Error> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        if let Ok(permit) = self.buffers.budget.try_acquire_many(permits) {
            return Ok(permit);
        }
        self.write_out(writer, true).await;
        let room = self.buffers.budget.acquire_many(permits);
        match tokio::time::timeout_at(self.until(), room).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(Error::new(Code::Timeout, "wait for room in the write buffer")),
        }
    }

    /// Writes back what this client holds of a file. A failure stays with the file.
    pub(crate) async fn write_back(&self, inode: InodeId) -> Result<(), Error> {
        if let Some(writer) = self.buffers.get(inode) {
            self.write_out(&writer, true).await;
        }
        Ok(())
    }

    async fn write_out(&self, writer: &Writer, all: bool) {
        let _one = writer.write_back.lock().await;
        let (chunks, attributes) = {
            let mut state = writer.lock();
            state.scheduled = false;
            if all {
                state.oldest = None;
            }
            (state.extents.take(u64::from(writer.chunk_size), all), state.attributes.clone())
        };
        let outcomes: Vec<Result<u64, Error>> = stream::iter(chunks)
            .map(|extents| self.write_chunk(&attributes, extents))
            .buffer_unordered(PARALLEL)
            .collect()
            .await;
        let mut state = writer.lock();
        for outcome in outcomes {
            match outcome {
                Ok(generation) => state.learn_generation(generation),
                Err(error) => {
                    tracing::warn!(inode = %writer.inode, %error, "write back");
                    state.error = Some(error);
                }
            }
        }
    }

    /// Writes extents of one chunk in order; gives their bytes back to the budget whatever comes of it.
    async fn write_chunk(
        &self,
        attributes: &Attributes,
        extents: Vec<(u64, Extent)>,
    ) -> Result<u64, Error> {
        let size = attributes.layout.map_or(1 << 20, |layout| u64::from(layout.chunk_size_bytes));
        let mut result = Ok(attributes.truncate_generation);
        for (start, extent) in extents {
            let length = extent.length;
            if result.is_ok() {
                // Below the chunk size, which is a `u32`.
                #[allow(clippy::cast_possible_truncation, reason = "a remainder of a u32")]
                let op = UpdateOp::Write { offset: (start % size) as u32 };
                result = self.change_chunk(attributes, start / size, op, extent.join()).await;
            }
            self.buffers.give_back(length);
        }
        result
    }

    /// Writes back, reports the length, and hands out an earlier error.
    pub(crate) async fn flush(&self, inode: InodeId) -> Result<(), Error> {
        let Some(writer) = self.buffers.get(inode) else { return Ok(()) };
        self.write_out(&writer, true).await;
        if let Some(error) = writer.lock().error.take() {
            return Err(error);
        }
        self.report(&writer).await
    }

    /// Writes back and reports every file; a failure stays with its file.
    pub(crate) async fn flush_all(&self) -> Result<(), Error> {
        let writers: Vec<Arc<Writer>> = self.buffers.lock().values().cloned().collect();
        let flushed = stream::iter(writers).map(|writer| async move { self.save(&writer).await });
        let outcomes: Vec<_> = flushed.buffer_unordered(PARALLEL).collect().await;
        outcomes.into_iter().collect()
    }

    /// Writes back and reports the length. A failure to write back stays with the file, and is told before the length is:
    /// some of the bytes that it covers are lost.
    async fn save(&self, writer: &Writer) -> Result<(), Error> {
        self.write_out(writer, true).await;
        let error = writer.lock().error.clone();
        error.map_or(Ok(()), Err)?;
        self.report(writer).await
    }

    /// Tells the service how far the file reaches, if it does not know.
    async fn report(&self, writer: &Writer) -> Result<(), Error> {
        let (identity, unreported, session) = {
            let state = writer.lock();
            (state.identity, state.unreported, state.sessions.first().copied())
        };
        let Some(reach) = unreported else { return Ok(()) };
        let session = match session {
            Some(session) => session,
            None => self.renew_session(writer, identity).await?,
        };
        let (inode, Reach { end: length, truncate_generation, .. }) = (writer.inode, reach);
        let report =
            LengthReport { identity, inode, session, length, truncate_generation, close: false };
        let mut attributes = match self.report_length(report).await {
            Err(error) if error.code == Code::SessionEnded => {
                let session = self.renew_session(writer, identity).await?;
                self.report_length(LengthReport { session, ..report }).await?
            }
            other => other?,
        };
        self.inodes.put(&mut attributes);
        let mut state = writer.lock();
        state.learn(&attributes);
        if state.unreported == Some(reach) {
            state.unreported = None;
        }
        Ok(())
    }

    async fn renew_session(&self, writer: &Writer, identity: Identity) -> Result<u64, Error> {
        let session = self.open_session(identity, writer.inode, true).await?.session;
        writer.lock().sessions = vec![session];
        Ok(session)
    }

    pub(crate) async fn release(&self, inode: InodeId) {
        let Some(writer) = self.buffers.get(inode) else { return };
        let last = {
            let mut state = writer.lock();
            state.opens = state.opens.saturating_sub(1);
            state.opens == 0
        };
        if last {
            // Others may have it open since before this process: a failure is for their fsync or close.
            if let Err(error) = self.save(&writer).await {
                tracing::warn!(%inode, %error, "write back after the last close");
            }
            self.retire(&writer).await;
        } else {
            let spare = {
                let mut state = writer.lock();
                if state.sessions.len() > 1 { state.sessions.pop() } else { None }
            };
            self.end_sessions(&writer, spare.into_iter().collect()).await;
        }
    }

    /// Forgets a writer that nobody has open and that holds nothing.
    async fn retire(&self, writer: &Arc<Writer>) {
        let sessions = {
            let mut writers = self.buffers.lock();
            // Bytes that are being written back are in no extent.
            let Ok(_none_under_way) = writer.write_back.try_lock() else { return };
            let mut state = writer.lock();
            // What is in the map in the place of a retired one is another.
            if state.retired || state.is_busy() {
                return;
            }
            writers.remove(&writer.inode);
            state.retired = true;
            std::mem::take(&mut state.sessions)
        };
        self.end_sessions(writer, sessions).await;
    }

    async fn end_sessions(&self, writer: &Writer, sessions: Vec<u64>) {
        let (identity, truncate_generation) = {
            let state = writer.lock();
            (state.identity, state.attributes.truncate_generation)
        };
        for session in sessions {
            let inode = writer.inode;
            let report = LengthReport {
                identity,
                inode,
                session,
                length: 0,
                truncate_generation,
                close: true,
            };
            match self.report_length(report).await {
                Ok(mut attributes) => self.inodes.put(&mut attributes),
                // The service ends it by itself when the client falls silent.
                Err(error) => tracing::debug!(%inode, %error, "end a session"),
            }
        }
    }
}

/// Writes back what has waited long enough, until the client is gone.
pub(crate) async fn age(client: Weak<Inner>) {
    loop {
        tokio::time::sleep(AGE_TICK).await;
        let Some(inner) = client.upgrade() else { return };
        inner.readahead.drop_stale();
        let pressed = inner.buffers.used() > inner.buffers.bytes / 4 * 3;
        let writers: Vec<Arc<Writer>> = inner.buffers.lock().values().cloned().collect();
        for writer in writers {
            let (due, idle) = {
                let mut state = writer.lock();
                let old = state.oldest.is_some_and(|since| pressed || since.elapsed() >= AGE_MAX);
                // A length waits for the failure before it to be told.
                let sayable = state.unreported.is_some() && state.error.is_none();
                let unsaid = sayable && state.used.elapsed() >= AGE_MAX;
                let due = (old || unsaid) && !state.ageing;
                state.ageing |= due;
                (due, !state.is_busy() && state.used.elapsed() >= inner.options.idle)
            };
            if due {
                tokio::spawn(write_aged(Arc::clone(&inner), writer));
            } else if idle {
                // Not waited for: without the metadata service it takes long, and the others' bytes grow old.
                let inner = Arc::clone(&inner);
                tokio::spawn(async move { inner.retire(&writer).await });
            }
        }
    }
}

async fn write_aged(inner: Arc<Inner>, writer: Arc<Writer>) {
    if let Err(error) = inner.save(&writer).await {
        tracing::debug!(inode = %writer.inode, %error, "write back what has waited");
    }
    writer.lock().ageing = false;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u64 = 64;
    const NOBODY: Identity = Identity { uid: 0, gid: 0 };

    /// A client of a cluster that does not answer, and a file of it that a write session was opened for.
    fn client_and_writer() -> (crate::Client, Attributes, Arc<Writer>) {
        let (deadline, attempt) = (Duration::from_millis(20), Duration::from_millis(10));
        let nowhere = crate::ClientOptions::new("127.0.0.1:1");
        let client = crate::Client::new(crate::ClientOptions { deadline, attempt, ..nowhere });
        let layout = chain::layout::Layout {
            table: 1,
            chains: 3,
            stripe: 3,
            chunk_size_bytes: 1 << 20,
            seed: 9,
        };
        let empty = crate::file::tests::attributes();
        let attributes = Attributes { layout: Some(layout), ..empty };
        let writer = client.inner.buffers.add_session(NOBODY, &attributes, 1, 0);
        (client, attributes, writer)
    }

    #[tokio::test]
    async fn a_failure_is_kept_until_it_was_told_though_nobody_has_the_file_open() {
        let (client, attributes, writer) = client_and_writer();
        let (inner, inode) = (&client.inner, attributes.inode);
        writer.lock().error = Some(Error::new(Code::NoSpace, "a chunk"));
        inner.retire(&writer).await;
        inner.release(inode).await;
        assert!(!client.is_saved(inode));
        assert_eq!(client.flush(inode).await.unwrap_err().code, Code::NoSpace);
        assert_eq!(client.flush(inode).await, Ok(()), "it is told once");
        inner.retire(&writer).await;
        assert!(inner.buffers.get(inode).is_none(), "there was nothing left of it");
    }

    #[tokio::test]
    async fn a_retired_writer_takes_no_bytes_and_its_successor_stays() {
        let (client, attributes, old) = client_and_writer();
        let (inner, inode) = (&client.inner, attributes.inode);
        assert!(inner.buffers.has_session(inode));
        inner.retire(&old).await;
        assert!(!inner.buffers.has_session(inode));
        assert!(!inner.put(&old, 0, Bytes::from_static(b"lost")));
        let new = inner.buffers.add_session(NOBODY, &attributes, 2, 0);
        assert!(inner.put(&new, 0, Bytes::from_static(b"kept")));
        inner.retire(&old).await;
        inner.retire(&new).await;
        assert!(Arc::ptr_eq(&inner.buffers.get(inode).unwrap(), &new));
        assert_eq!(flat(&new.lock().extents), [(0, b"kept".to_vec())]);
    }

    /// A write that comes while a length is being reported is not covered by that report.
    #[tokio::test]
    async fn a_write_of_old_bytes_is_reported_too() {
        let (client, _, writer) = client_and_writer();
        let put = |bytes| assert!(client.inner.put(&writer, 0, Bytes::from_static(bytes)));
        put(b"one");
        let before = writer.lock().unreported;
        put(b"two");
        let after = writer.lock().unreported;
        assert_eq!(before.map(|reach| reach.end), after.map(|reach| reach.end));
        assert_ne!(before, after);
    }

    fn flat(extents: &Extents) -> Vec<(u64, Vec<u8>)> {
        extents.0.iter().map(|(start, extent)| (*start, extent.parts.concat())).collect()
    }

    #[test]
    fn neighbours_join_within_a_chunk_and_not_across() {
        let mut extents = Extents::default();
        assert_eq!(extents.put(CHUNK, 10, Bytes::from_static(b"ab")), 0);
        assert_eq!(extents.put(CHUNK, 12, Bytes::from_static(b"cd")), 0);
        assert_eq!(extents.put(CHUNK, 60, Bytes::from_static(b"wxyz")), 0);
        assert_eq!(extents.put(CHUNK, 64, Bytes::from_static(b"next")), 0);
        let expected = [(10, &b"abcd"[..]), (60, b"wxyz"), (64, b"next")];
        assert_eq!(flat(&extents), expected.map(|(at, bytes)| (at, bytes.to_vec())));
        let full: Vec<_> = extents.take(CHUNK, false).into_iter().flatten().collect();
        assert_eq!(full.len(), 1);
        assert_eq!(full[0].0, 60);
        assert_eq!(extents.take(CHUNK, true).len(), 2);
    }

    proptest! {
        #[test]
        fn later_writes_win_and_every_byte_is_counted(
            writes in prop::collection::vec((0u64..200, 1usize..64, any::<u8>()), 1..40)
        ) {
            let mut extents = Extents::default();
            let mut model: BTreeMap<u64, u8> = BTreeMap::new();
            let (mut put, mut replaced) = (0u64, 0u64);
            for (start, length, value) in writes {
                // Within one chunk, as the caller cuts it.
                let length = length.min(usize::try_from(CHUNK - start % CHUNK).unwrap());
                replaced += extents.put(CHUNK, start, Bytes::from(vec![value; length]));
                put += length as u64;
                model.extend((start..start + length as u64).map(|at| (at, value)));
            }
            let mut seen = BTreeMap::new();
            for (start, bytes) in flat(&extents) {
                prop_assert!(start / CHUNK == (start + bytes.len() as u64 - 1) / CHUNK);
                for (at, value) in (start..).zip(bytes) {
                    prop_assert!(seen.insert(at, value).is_none());
                }
            }
            prop_assert_eq!(put - replaced, seen.len() as u64);
            prop_assert_eq!(seen, model);
        }
    }
}
