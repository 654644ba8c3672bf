//! Reading pages of a chunk, each verified before its bytes go anywhere. R4, R5.

use std::ops::Range;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use chain::id::{ChunkId, TargetId};
use rocksdb::Snapshot;

use super::buf::AlignedBuf;
use super::checksum::{self, PAGE_SIZE};
use super::io::is_stopped;
use super::plan::pages;
use super::record::{BlockRecord, ChunkRecord, Fragment};
use super::types::{Error, Place, Read, Which};
use super::{Inner, store};

const PAGE: u64 = PAGE_SIZE as u64;

impl Inner {
    pub(super) async fn read(
        &self,
        target: TargetId,
        chunk: ChunkId,
        offset: u64,
        length: u64,
        which: Which,
    ) -> Result<Read, Error> {
        self.check_alive()?;
        let place = Place { target, chunk };
        // From here until the bytes are in memory no block is reused.
        let _reader = self.allocator.enter();
        let view = self.db.snapshot();
        let records = store::chunk(&view, place)?;
        let pending = records.pending.as_ref().map(|p| p.state.version);
        let (record, pending) = match which {
            Which::Committed => (records.committed, pending),
            Which::Pending => (records.pending, None),
        };
        let record = record.filter(|r| !r.state.removed).ok_or(Error::NotFound(place))?;
        let end = offset.saturating_add(length).min(record.state.length);
        let bytes = self.read_bytes(&view, place, &record, offset.min(end)..end).await?;
        self.check_alive()?;
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.counters.read_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(Read { bytes, state: record.state, pending })
    }

    async fn read_bytes(
        &self,
        view: &Snapshot<'_>,
        place: Place,
        record: &ChunkRecord,
        range: Range<u64>,
    ) -> Result<Bytes, Error> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let first = pages(range.start + 1) - 1;
        let wanted = first..pages(range.end);
        let start = page_size(range.start % PAGE);
        let end = start + page_size(range.end - range.start);
        let pieces = overlap(&record.fragments, wanted.clone());
        if let [piece] = pieces.as_slice()
            && (piece.page, piece.end()) == (wanted.start, wanted.end)
        {
            // No copy on the way of most reads.
            return Ok(self.read_piece(view, place, piece).await?.freeze().slice(start..end));
        }
        let mut whole = AlignedBuf::zeroed(wanted.len());
        self.copy_pieces(view, place, &pieces, wanted.start, &mut whole).await?;
        Ok(whole.freeze().slice(start..end))
    }

    /// Fills `buf`, whose first page is page `from` of the chunk, with verified pages `range`.
    /// Pages that were never written stay as they are.
    pub(super) async fn copy_pages(
        &self,
        view: &Snapshot<'_>,
        place: Place,
        record: &ChunkRecord,
        range: Range<u32>,
        from: u32,
        buf: &mut AlignedBuf,
    ) -> Result<(), Error> {
        let pieces = overlap(&record.fragments, range);
        self.copy_pieces(view, place, &pieces, from, buf).await
    }

    async fn copy_pieces(
        &self,
        view: &Snapshot<'_>,
        place: Place,
        pieces: &[Fragment],
        from: u32,
        buf: &mut AlignedBuf,
    ) -> Result<(), Error> {
        let reads = pieces.iter().map(|piece| self.read_piece(view, place, piece));
        for (piece, bytes) in pieces.iter().zip(join_all(reads).await) {
            let at = (piece.page - from) as usize * PAGE_SIZE;
            let bytes = bytes?;
            if let Some(space) = buf.as_mut().get_mut(at..at + bytes.len()) {
                space.copy_from_slice(bytes.as_ref());
            }
        }
        Ok(())
    }

    async fn read_piece(
        &self,
        view: &Snapshot<'_>,
        place: Place,
        piece: &Fragment,
    ) -> Result<AlignedBuf, Error> {
        let block = store::block(view, place, piece.block)?;
        let buf = AlignedBuf::for_reading(piece.pages as usize);
        let offset = piece.block.offset() + u64::from(piece.page - piece.base) * PAGE;
        let read = self.io.read(&self.blocks, offset, buf).await;
        let corrupt = |page: u32, detail: String| {
            self.counters.corrupt_pages.fetch_add(1, Ordering::Relaxed);
            Error::Corrupt { place, offset: u64::from(page) * PAGE, detail: detail.into() }
        };
        let buf = read.map_err(|e| {
            if is_stopped(&e) {
                self.fail(format!("read block file: {e}"))
            } else {
                corrupt(piece.page, e.to_string())
            }
        })?;
        match verify_pages(place, &block, piece, buf.as_ref()) {
            Ok(()) => Ok(buf),
            Err(page) => Err(corrupt(page, "page checksum mismatch".to_owned())),
        }
    }
}

/// Checks each page of a piece; the first bad one is the error.
pub(super) fn verify_pages(
    place: Place,
    block: &BlockRecord,
    piece: &Fragment,
    bytes: &[u8],
) -> Result<(), u32> {
    if block.base != piece.base || bytes.len() != piece.pages as usize * PAGE_SIZE {
        return Err(piece.page);
    }
    let mut stored = block.checksums.iter().skip((piece.page - piece.base) as usize);
    for (page, bytes) in (piece.page..).zip(bytes.chunks_exact(PAGE_SIZE)) {
        let domain = checksum::domain(place, block.version, page.into());
        if stored.next() != Some(&checksum::seal(domain, bytes)) {
            return Err(page);
        }
    }
    Ok(())
}

/// The parts of fragments within `range`.
fn overlap(fragments: &[Fragment], range: Range<u32>) -> Vec<Fragment> {
    let cut = |f: &Fragment| {
        let (page, end) = (f.page.max(range.start), f.end().min(range.end));
        (page < end).then(|| Fragment { page, pages: end - page, ..*f })
    };
    fragments.iter().filter_map(cut).collect()
}

/// A length within one chunk.
pub(super) fn page_size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Drives all futures together, in one task, and answers in their order.
async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut flying: Vec<_> = futures.map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|context| {
        let mut is_pending = false;
        for (future, output) in &mut flying {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(ready) => *output = Some(ready),
                    std::task::Poll::Pending => is_pending = true,
                }
            }
        }
        if is_pending { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    flying.into_iter().filter_map(|(_, output)| output).collect()
}
