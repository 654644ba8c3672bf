//! Inodes and bytes: reads over the chunks of a file, writes through the buffer, lengths, truncation, close-to-open.
//!
//! What holds: a read after `open` sees everything that another client closed or fsynced before; a client sees its own
//! writes at once; holes and short chunks read as zeros up to the file's length, and the chunks of a removed file as an
//! error; every byte was checked against the checksum that its server computed from verified bytes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chain::id::{ChunkId, InodeId};
use chain::layout::Layout;
use futures::stream::{self, StreamExt, TryStreamExt};
use rpc::message::meta::{Attributes, FileKind};
use rpc::message::storage::UpdateOp;
use rpc::{Code, Error};
use tokio::time::Instant;

use crate::chunk::Change;
use crate::readahead::Ahead;
use crate::{Client, Identity, Inner};

/// How long attributes are believed where a read asks for bytes past the known end.
const ATTRIBUTES_FOR: Duration = Duration::from_secs(1);
/// Inodes whose attributes are kept; all are dropped when there are more.
const INODES_MAX: usize = 4096;
/// Chunks of one read that are asked for at once.
const PARALLEL: usize = 16;
/// Zeros for holes.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Attributes as last heard.
#[derive(Debug, Default)]
pub(crate) struct InodeCache(Mutex<HashMap<InodeId, (Attributes, Instant)>>);

impl InodeCache {
    fn lock(&self) -> MutexGuard<'_, HashMap<InodeId, (Attributes, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `attributes`, with the length of a later answer if this one was overtaken: within a truncate generation a
    /// length only grows.
    pub(crate) fn put(&self, attributes: &mut Attributes) {
        let mut cache = self.lock();
        if cache.len() >= INODES_MAX {
            cache.clear();
        }
        let reach = |known: &Attributes| (known.truncate_generation, known.length);
        if let Some((known, _)) = cache.get(&attributes.inode)
            && reach(known) > reach(attributes)
        {
            (attributes.truncate_generation, attributes.length) = reach(known);
        }
        cache.insert(attributes.inode, (attributes.clone(), Instant::now()));
    }

    fn get(&self, inode: InodeId) -> Option<(Attributes, Instant)> {
        self.lock().get(&inode).cloned()
    }

    pub(crate) fn forget(&self, inode: InodeId) {
        self.lock().remove(&inode);
    }
}

/// A part of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) index: u64,
    pub(crate) offset: u32,
    pub(crate) length: u32,
}

/// The parts of chunks that `length` bytes from `offset` cover, in order.
pub(crate) fn pieces(chunk_size: u32, offset: u64, length: u64) -> impl Iterator<Item = Piece> {
    let size = u64::from(chunk_size.max(1));
    let end = offset.saturating_add(length);
    let first = offset / size;
    let last = if length == 0 { first } else { (end - 1) / size + 1 };
    (first..last).map(move |index| {
        let start = offset.max(index * size) - index * size;
        let stop = end.min((index + 1).saturating_mul(size)) - index * size;
        // Both are at most the chunk size, which is a `u32`.
        #[allow(clippy::cast_possible_truncation, reason = "at most the chunk size")]
        Piece { index, offset: start as u32, length: (stop - start) as u32 }
    })
}

/// A file's layout and the chain of each of its chunks.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    pub(crate) layout: Layout,
    chains: Vec<chain::id::ChainId>,
}

impl Placement {
    pub(crate) fn of(attributes: &Attributes) -> Result<Self, Error> {
        let inode = attributes.inode;
        match (attributes.kind, attributes.layout) {
            (FileKind::File, Some(layout)) if layout.is_valid() => {
                Ok(Self { layout, chains: layout.stripe_chains() })
            }
            (FileKind::Directory, _) => {
                Err(Error::new(Code::IsDirectory, format!("inode {inode} has no bytes")))
            }
            _ => Err(Error::new(Code::InvalidRequest, format!("inode {inode} has no layout"))),
        }
    }

    pub(crate) fn chain(&self, index: u64) -> Result<chain::id::ChainId, Error> {
        let at = index % u64::from(self.layout.stripe.max(1));
        let chain = usize::try_from(at).ok().and_then(|at| self.chains.get(at));
        chain.copied().ok_or_else(|| Error::new(Code::Internal, "the layout names no chain"))
    }
}

impl Inner {
    /// The service's attributes with what this client wrote and has not reported.
    pub(crate) fn local_view(&self, mut attributes: Attributes) -> Attributes {
        // Looked up first: a report puts the new length into the cache before the writer forgets it.
        let written = self.buffers.written_end(attributes.inode);
        self.inodes.put(&mut attributes);
        attributes.length = attributes.length.max(written.unwrap_or(0));
        attributes
    }

    pub(crate) async fn fresh_attributes(&self, inode: InodeId) -> Result<Attributes, Error> {
        let found = self.attributes(inode).await?;
        Ok(self.local_view(found))
    }

    /// Attributes that are right for reading up to `end`: asked for again where the known length may be too short.
    async fn attributes_for(&self, inode: InodeId, end: u64) -> Result<Attributes, Error> {
        let written = self.buffers.written_end(inode);
        let Some((mut known, since)) = self.inodes.get(inode) else {
            return self.fresh_attributes(inode).await;
        };
        known.length = known.length.max(written.unwrap_or(0));
        if end <= known.length || since.elapsed() <= ATTRIBUTES_FOR {
            return Ok(known);
        }
        self.fresh_attributes(inode).await
    }

    /// Where a file ends now, asked because a chunk has less than the known length makes of it: a hole, or a cut, or the
    /// file was removed and its chunks with it.
    async fn end_now(&self, inode: InodeId) -> Result<u64, Error> {
        let now = self.fresh_attributes(inode).await?;
        if now.links == 0 && !self.buffers.has_session(inode) {
            let why =
                format!("inode {inode} was removed, and its bytes may be; open the file anew");
            return Err(Error::new(Code::NotFound, why));
        }
        Ok(now.length)
    }

    async fn read_piece(
        &self,
        inode: InodeId,
        placement: &Placement,
        piece: Piece,
    ) -> Result<Bytes, Error> {
        let chain = placement.chain(piece.index)?;
        let chunk = ChunkId { file: inode, index: piece.index };
        self.read_chunk(chain, chunk, piece.offset, piece.length).await
    }

    /// Changes one chunk; a write that met another client's truncation goes again under the new generation, which is
    /// returned.
    pub(crate) async fn change_chunk(
        &self,
        attributes: &Attributes,
        index: u64,
        op: UpdateOp,
        payload: Bytes,
    ) -> Result<u64, Error> {
        let placement = Placement::of(attributes)?;
        let (chain, inode) = (placement.chain(index)?, attributes.inode);
        let chunk = ChunkId { file: inode, index };
        let chunk_size = placement.layout.chunk_size_bytes;
        let mut truncate_generation = attributes.truncate_generation;
        loop {
            let change = Change { op, truncate_generation, chunk_size };
            match self.update_chunk(chain, chunk, change, payload.clone()).await {
                Err(error) if error.code == Code::StaleTruncate => {
                    let now = self.fresh_attributes(inode).await?.truncate_generation;
                    if now <= truncate_generation {
                        return Err(error);
                    }
                    truncate_generation = now;
                }
                other => return other.map(|_| truncate_generation),
            }
        }
    }
}

/// Files, by inode. Failures carry the code of the server that refused, or [`Code::Timeout`] and [`Code::Unreachable`] when
/// nobody answered until the deadline.
impl Client {
    /// Attributes from the service, with this client's own writes.
    pub async fn attributes(&self, inode: InodeId) -> Result<Attributes, Error> {
        self.inner.fresh_attributes(inode).await
    }

    /// Opens a file: later reads see what others closed before. For writing, an unlinked file keeps its bytes until
    /// [`release`](Self::release).
    pub async fn open(
        &self,
        identity: Identity,
        inode: InodeId,
        write: bool,
    ) -> Result<Attributes, Error> {
        self.inner.readahead.forget(inode);
        let opened = self.inner.open_session(identity, inode, write).await?;
        if write {
            self.inner.buffers.opened(identity, &opened.attributes, opened.session);
        }
        self.inner.meet_truncation(&opened.attributes).await;
        Ok(self.inner.local_view(opened.attributes))
    }

    /// Makes a file and opens it for writing; an existing one too, unless `exclusive`.
    pub async fn create(
        &self,
        identity: Identity,
        parent: InodeId,
        name: &[u8],
        mode: u32,
        exclusive: bool,
    ) -> Result<Attributes, Error> {
        let opened = self.inner.create_inode(identity, parent, name, mode, exclusive).await?;
        self.inner.buffers.opened(identity, &opened.attributes, opened.session);
        self.inner.meet_truncation(&opened.attributes).await;
        Ok(self.inner.local_view(opened.attributes))
    }

    /// Bytes of a file, fewer than `length` only at its end, in the pieces in which they arrived. [`Code::NotFound`] if it
    /// was removed and bytes are missing.
    pub async fn read(
        &self,
        inode: InodeId,
        offset: u64,
        length: u32,
    ) -> Result<Vec<Bytes>, Error> {
        let inner = &self.inner;
        let wanted_end = offset.saturating_add(u64::from(length));
        inner.write_back(inode).await?;
        let attributes = inner.attributes_for(inode, wanted_end).await?;
        let placement = Placement::of(&attributes)?;
        let end = wanted_end.min(attributes.length);
        let Some(length) = end.checked_sub(offset).filter(|length| *length > 0) else {
            return Ok(Vec::new());
        };
        let chunk_size = placement.layout.chunk_size_bytes;
        let ahead = inner.readahead.notice(inode, offset, length, chunk_size, attributes.length);
        if !ahead.chunks.is_empty() {
            // Written since the look above, before this reader was noticed: what is fetched must hold it.
            inner.write_back(inode).await?;
        }
        for index in &ahead.chunks {
            self.fetch_ahead(inode, &placement, &ahead, *index)?;
        }
        let parts: Vec<(Piece, Bytes)> = stream::iter(pieces(chunk_size, offset, length))
            .map(|piece| self.read_through(inode, &placement, piece))
            .buffered(PARALLEL)
            .try_collect()
            .await?;
        let is_short = parts.iter().any(|(piece, bytes)| bytes.len() < piece.length as usize);
        let end = if is_short { end.min(inner.end_now(inode).await?) } else { end };
        Ok(padded(parts, end.saturating_sub(offset)))
    }

    /// A piece from what was read ahead, else from its chain.
    async fn read_through(
        &self,
        inode: InodeId,
        placement: &Placement,
        piece: Piece,
    ) -> Result<(Piece, Bytes), Error> {
        if let Some(fetched) = self.inner.readahead.find(inode, piece.index)
            && let Ok(chunk) = fetched.await
        {
            let start = chunk.len().min(piece.offset as usize);
            let stop = chunk.len().min(piece.offset as usize + piece.length as usize);
            return Ok((piece, chunk.slice(start..stop)));
        }
        Ok((piece, self.inner.read_piece(inode, placement, piece).await?))
    }

    fn fetch_ahead(
        &self,
        inode: InodeId,
        placement: &Placement,
        ahead: &Ahead,
        index: u64,
    ) -> Result<(), Error> {
        let (chain, chunk) = (placement.chain(index)?, ChunkId { file: inode, index });
        let (inner, length) =
            (std::sync::Arc::clone(&self.inner), placement.layout.chunk_size_bytes);
        self.inner.readahead.start(inode, ahead, index, length, async move {
            inner.read_chunk(chain, chunk, 0, length).await
        });
        Ok(())
    }

    /// Takes all of `bytes` at `offset`. They are in a buffer afterwards; [`flush`](Self::flush) makes them durable and
    /// reports failures of writing back.
    pub async fn write(
        &self,
        identity: Identity,
        inode: InodeId,
        offset: u64,
        bytes: Bytes,
    ) -> Result<(), Error> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| i64::try_from(*end).is_ok());
        if end.is_none() {
            return Err(Error::new(Code::TooLarge, format!("write at {offset} of inode {inode}")));
        }
        let taken = self.inner.buffer_write(identity, inode, offset, bytes).await;
        // After the bytes are in the buffer: nobody starts to fetch older ones from here on.
        self.inner.readahead.forget(inode);
        taken
    }

    /// Writes back everything of this file and reports its length: durable and visible to others on success. Reports an
    /// earlier failure of writing back, once.
    pub async fn flush(&self, inode: InodeId) -> Result<(), Error> {
        self.inner.flush(inode).await
    }

    /// Writes back everything of every file and reports the lengths. A failure stays with its file too: the next
    /// [`flush`](Self::flush) reports it.
    pub async fn flush_all(&self) -> Result<(), Error> {
        self.inner.flush_all().await
    }

    /// Whether nothing that was written to a file waits here: no byte, no length, no failure to report.
    #[must_use]
    pub fn is_saved(&self, inode: InodeId) -> bool {
        self.inner.buffers.is_saved(inode)
    }

    /// Whether the metadata service keeps a session of the file for this client: it was written here, and somebody has it
    /// open or it was not idle for long yet.
    #[must_use]
    pub fn has_session(&self, inode: InodeId) -> bool {
        self.inner.buffers.has_session(inode)
    }

    /// Bytes of all files that were written and are not in the store yet.
    #[must_use]
    pub fn unsaved_bytes(&self) -> usize {
        self.inner.buffers.used()
    }

    /// One opening for writing has ended. Flush first; what is still unwritten is written in the background.
    pub async fn release(&self, inode: InodeId) {
        self.inner.release(inode).await;
    }

    /// Sets the length of a file. On success no later read sees bytes that were cut: the metadata service cuts the chunks
    /// before it answers. Nobody else may: it could cut what another client wrote since.
    pub async fn truncate(
        &self,
        identity: Identity,
        inode: InodeId,
        length: u64,
    ) -> Result<Attributes, Error> {
        self.inner.flush(inode).await?;
        self.inner.readahead.forget(inode);
        let mut attributes = self.inner.truncate_length(identity, inode, length).await?;
        self.inner.readahead.forget(inode);
        self.inner.inodes.put(&mut attributes);
        self.inner.buffers.truncated(&attributes);
        Ok(attributes)
    }

    /// Forgets what is cached of an inode, so that the next use asks the servers.
    pub fn forget(&self, inode: InodeId) {
        self.inner.inodes.forget(inode);
        self.inner.readahead.forget(inode);
    }
}

/// The first `left` bytes of pieces that follow each other, with zeros for what a chunk lacks.
fn padded(parts: Vec<(Piece, Bytes)>, mut left: u64) -> Vec<Bytes> {
    let mut out = Vec::with_capacity(parts.len());
    for (piece, mut bytes) in parts {
        let length = u32::try_from(left).unwrap_or(u32::MAX).min(piece.length);
        left -= u64::from(length);
        bytes.truncate(length as usize);
        out.extend(filled(bytes, length));
    }
    out
}

/// `bytes`, and zeros behind them up to `length`.
fn filled(bytes: Bytes, length: u32) -> Vec<Bytes> {
    let mut missing = (length as usize).saturating_sub(bytes.len());
    let mut parts = vec![bytes];
    while missing > 0 {
        let part = Bytes::from_static(&ZEROS).slice(..missing.min(ZEROS.len()));
        missing -= part.len();
        parts.push(part);
    }
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_is_cut_at_chunk_borders() {
        let cut: Vec<_> = pieces(100, 250, 260).map(|p| (p.index, p.offset, p.length)).collect();
        assert_eq!(cut, [(2, 50, 50), (3, 0, 100), (4, 0, 100), (5, 0, 10)]);
        assert_eq!(pieces(100, 250, 0).count(), 0);
        assert_eq!(pieces(100, 200, 100).count(), 1);
    }

    /// Those of an empty file without a layout.
    pub(crate) const fn attributes() -> Attributes {
        Attributes {
            inode: InodeId::new(7),
            kind: FileKind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            links: 1,
            length: 0,
            accessed_ns: 0,
            modified_ns: 0,
            changed_ns: 0,
            truncate_generation: 0,
            layout: None,
        }
    }

    #[tokio::test]
    async fn an_answer_that_was_overtaken_shortens_no_file() {
        let cache = InodeCache::default();
        let put = |truncate_generation, length| {
            let mut known = Attributes { truncate_generation, length, ..attributes() };
            cache.put(&mut known);
            (known.truncate_generation, known.length)
        };
        assert_eq!(put(1, 70), (1, 70));
        assert_eq!(put(1, 50), (1, 70), "asked before a report that was answered earlier");
        assert_eq!(put(2, 10), (2, 10), "a truncation");
        assert_eq!(put(1, 90), (2, 10), "asked before it");
        assert_eq!(put(2, 20), (2, 20));
    }

    #[test]
    fn what_a_chunk_lacks_is_zero() {
        let parts = filled(Bytes::from_static(b"ab"), 200_000);
        let all = parts.concat();
        assert_eq!(all.len(), 200_000);
        assert_eq!(&all[..2], b"ab");
        assert!(all[2..].iter().all(|byte| *byte == 0));
        assert!(filled(Bytes::new(), 0).is_empty());
        let piece =
            |length, bytes| (Piece { index: 0, offset: 0, length }, Bytes::from_static(bytes));
        let parts = |left| padded(vec![piece(4, b"ab"), piece(4, b"cdef")], left).concat();
        assert_eq!(parts(8), b"ab\0\0cdef");
        assert_eq!(parts(6), b"ab\0\0cd");
        assert_eq!((parts(1), parts(0)), (b"a".to_vec(), vec![]), "cut meanwhile");
    }

    proptest! {
        #[test]
        fn pieces_cover_the_range_once(offset in 0u64..1 << 40, length in 0u64..1 << 24) {
            let size = 1u32 << 20;
            let mut at = offset;
            for piece in pieces(size, offset, length) {
                prop_assert_eq!(piece.index * u64::from(size) + u64::from(piece.offset), at);
                prop_assert!(piece.length > 0 && piece.offset + piece.length <= size);
                at += u64::from(piece.length);
            }
            prop_assert_eq!(at, offset + length);
        }
    }
}
