//! Bytes of the metadata: what each key and value in RocksDB means.
//!
//! | key | value |
//! |---|---|
//! | `c` target chunk | committed state of a chunk, [`ChunkRecord`] |
//! | `p` target chunk | its pending state, [`ChunkRecord`] |
//! | `b` block | what a block holds, [`BlockRecord`]; the free map is what these leave |
//! | `t` target | the server's own record of a target, opaque |
//! | `i` | disk name and incarnation, to be compared with the superblock |
//!
//! Numbers in keys are big-endian, so that keys sort as chunks do; in values little-endian.
//! A value is: format (1 byte, 1), payload, CRC32C of key ‖ format ‖ payload. The key is in the
//! checksum, so a value under a wrong key fails.

use chain::id::{ChainVersion, ChannelId, ChunkId, ClientId, TargetId, UpdateId, UpdateVersion};

use super::alloc::Block;
use super::checksum::PAGE_SIZE;
use super::types::{Applied, ChunkState, Duplicates, MAX_CHUNK_SIZE, MAX_DUPLICATES, Place};

const FORMAT: u8 = 1;
const REMOVED: u8 = 1;
const REPLACED: u8 = 2;
/// Pages of the largest chunk.
const MAX_PAGES: u32 = 16_384;
const _: () = assert!(MAX_PAGES as u64 * PAGE_SIZE as u64 == MAX_CHUNK_SIZE);

/// The identity key.
pub(super) const IDENTITY_KEY: &[u8] = b"i";

/// A run of a chunk's pages within one block. Pages in no fragment were never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fragment {
    /// First page, in the chunk.
    pub(super) page: u32,
    /// Count of pages.
    pub(super) pages: u32,
    /// The block.
    pub(super) block: Block,
    /// Page of the chunk that is the block's first.
    pub(super) base: u32,
    /// CRC32C of the pages' bytes.
    pub(super) crc: u32,
}

impl Fragment {
    pub(super) fn end(&self) -> u32 {
        self.page + self.pages
    }
}

/// One state of a chunk as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChunkRecord {
    pub(super) state: ChunkState,
    /// In order of pages, without overlap, within the length.
    pub(super) fragments: Vec<Fragment>,
}

/// What a listing needs of a chunk's record, read without the rest of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outline {
    pub(super) version: UpdateVersion,
    pub(super) length: u64,
    pub(super) removed: bool,
}

/// What a block holds. Written once with the block, deleted with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlockRecord {
    pub(super) place: Place,
    /// Version of the update that wrote the block.
    pub(super) version: UpdateVersion,
    /// Page of the chunk that is the block's first.
    pub(super) base: u32,
    /// Stored checksum of each page.
    pub(super) checksums: Vec<u32>,
}

/// Disk name and incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) disk: [u8; 16],
    pub(super) incarnation: u64,
}

pub(super) fn committed_key(place: Place) -> Vec<u8> {
    chunk_key(b'c', place)
}

pub(super) fn pending_key(place: Place) -> Vec<u8> {
    chunk_key(b'p', place)
}

/// The key of a chunk's record of one kind.
pub(super) fn chunk_key(kind: u8, place: Place) -> Vec<u8> {
    let mut key = target_prefix(kind, place.target);
    key.extend(place.chunk.to_bytes());
    key
}

/// What all keys of one kind and target start with.
pub(super) fn target_prefix(kind: u8, target: TargetId) -> Vec<u8> {
    let mut key = Vec::with_capacity(9 + ChunkId::ENCODED_SIZE);
    key.push(kind);
    key.extend(target.get().to_be_bytes());
    key
}

pub(super) fn block_key(block: Block) -> Vec<u8> {
    let mut key = vec![b'b'];
    key.extend(block.to_raw().to_be_bytes());
    key
}

pub(super) fn target_key(target: TargetId) -> Vec<u8> {
    target_prefix(b't', target)
}

pub(super) fn parse_chunk_key(key: &[u8]) -> Option<Place> {
    let (target, chunk) = key.get(1..)?.split_at_checked(8)?;
    let target = TargetId::new(u64::from_be_bytes(target.try_into().ok()?));
    Some(Place { target, chunk: ChunkId::from_bytes(chunk.try_into().ok()?) })
}

pub(super) fn parse_block_key(key: &[u8]) -> Option<Block> {
    Block::from_raw(u64::from_be_bytes(key.get(1..)?.try_into().ok()?))
}

pub(super) fn parse_target_key(key: &[u8]) -> Option<TargetId> {
    Some(TargetId::new(u64::from_be_bytes(key.get(1..)?.try_into().ok()?)))
}

/// Frames a payload with format and checksum.
pub(super) fn seal(key: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(payload.len() + 5);
    value.push(FORMAT);
    value.extend(payload);
    let crc = crc32c::crc32c_append(crc32c::crc32c(key), &value);
    value.extend(crc.to_le_bytes());
    value
}

/// The payload of a value, if its checksum is right and its format known.
pub(super) fn unseal<'a>(key: &[u8], value: &'a [u8]) -> Result<&'a [u8], &'static str> {
    let (body, crc) = value.split_last_chunk::<4>().ok_or("value too short")?;
    if u32::from_le_bytes(*crc) != crc32c::crc32c_append(crc32c::crc32c(key), body) {
        return Err("metadata checksum mismatch");
    }
    match body.split_first() {
        Some((&FORMAT, payload)) => Ok(payload),
        Some(_) => Err("metadata format is newer than this program"),
        None => Err("value too short"),
    }
}

impl ChunkRecord {
    pub(super) fn encode(&self, key: &[u8]) -> Vec<u8> {
        let ChunkState { id, duplicates, .. } = &self.state;
        let mut out = Vec::with_capacity(96 + 24 * self.fragments.len() + 44 * duplicates.len());
        out.extend(self.state.version.get().to_le_bytes());
        out.extend(self.state.chain_version.get().to_le_bytes());
        out.extend(self.state.length.to_le_bytes());
        out.extend(self.state.checksum.to_le_bytes());
        out.extend(self.state.truncate_generation.to_le_bytes());
        let removed = if self.state.removed { REMOVED } else { 0 };
        out.push(removed | if self.state.replaced { REPLACED } else { 0 });
        put_lane(&mut out, (id.client, id.channel));
        out.extend(id.seq.to_le_bytes());
        put_count(&mut out, self.fragments.len());
        for fragment in &self.fragments {
            out.extend(fragment.page.to_le_bytes());
            out.extend(fragment.pages.to_le_bytes());
            out.extend(fragment.block.to_raw().to_le_bytes());
            out.extend(fragment.base.to_le_bytes());
            out.extend(fragment.crc.to_le_bytes());
        }
        put_count(&mut out, duplicates.len());
        for (lane, applied) in duplicates {
            put_lane(&mut out, *lane);
            out.extend(applied.seq.to_le_bytes());
            out.extend(applied.version.get().to_le_bytes());
            out.extend(applied.length.to_le_bytes());
        }
        seal(key, &out)
    }

    pub(super) fn decode(key: &[u8], value: &[u8]) -> Result<Self, &'static str> {
        let mut from = Cursor(unseal(key, value)?);
        let version = UpdateVersion::new(from.u64()?);
        let chain_version = ChainVersion::new(from.u64()?);
        let (length, checksum, truncate_generation) = (from.u64()?, from.u32()?, from.u64()?);
        let [flags] = from.take()?;
        let (client, channel) = from.lane()?;
        let id = UpdateId { client, channel, seq: from.u64()? };
        let count = from.count(24)?;
        let fragments = (0..count).map(|_| from.fragment()).collect::<Result<Vec<_>, _>>()?;
        let count = from.count(44)?;
        let duplicates = (0..count).map(|_| from.duplicate()).collect::<Result<Duplicates, _>>()?;
        if !from.0.is_empty() || duplicates.len() != count || flags & !(REMOVED | REPLACED) != 0 {
            return Err("chunk record is malformed");
        }
        let state = ChunkState {
            version,
            chain_version,
            length,
            checksum,
            truncate_generation,
            removed: flags & REMOVED != 0,
            replaced: flags & REPLACED != 0,
            id,
            duplicates,
        };
        let record = Self { state, fragments };
        record.validate()?;
        Ok(record)
    }

    /// The first fields of a record. All of it is verified, none of the rest is kept.
    pub(super) fn outline(key: &[u8], value: &[u8]) -> Result<Outline, &'static str> {
        let mut from = Cursor(unseal(key, value)?);
        let version = UpdateVersion::new(from.u64()?);
        let [_chain_version, length] = [from.u64()?, from.u64()?];
        let _checksum_and_generation = (from.u32()?, from.u64()?);
        let [flags] = from.take()?;
        Ok(Outline { version, length, removed: flags & REMOVED != 0 })
    }

    fn validate(&self) -> Result<(), &'static str> {
        let length = self.state.length;
        if length > MAX_CHUNK_SIZE || self.state.duplicates.len() > MAX_DUPLICATES {
            return Err("chunk record exceeds its bounds");
        }
        let mut from = 0;
        for fragment in &self.fragments {
            let end = fragment.page.checked_add(fragment.pages).ok_or("fragment overflows")?;
            let in_block = u64::from(end.saturating_sub(fragment.base)) * PAGE_SIZE as u64;
            let is_placed = fragment.page >= from
                && fragment.pages > 0
                && end <= MAX_PAGES
                && fragment.base <= fragment.page
                && in_block <= fragment.block.size();
            if !is_placed {
                return Err("fragments of the chunk are out of place");
            }
            from = end;
        }
        if u64::from(from) > length.div_ceil(PAGE_SIZE as u64) || self.state.removed && length > 0 {
            return Err("fragments lie behind the end of the chunk");
        }
        Ok(())
    }
}

impl BlockRecord {
    pub(super) fn encode(&self, key: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(40 + 4 * self.checksums.len());
        out.extend(self.place.target.get().to_le_bytes());
        out.extend(self.place.chunk.to_bytes());
        out.extend(self.version.get().to_le_bytes());
        out.extend(self.base.to_le_bytes());
        put_count(&mut out, self.checksums.len());
        out.extend(self.checksums.iter().flat_map(|crc| crc.to_le_bytes()));
        seal(key, &out)
    }

    pub(super) fn decode(key: &[u8], value: &[u8]) -> Result<Self, &'static str> {
        let mut from = Cursor(unseal(key, value)?);
        let target = TargetId::new(from.u64()?);
        let place = Place { target, chunk: ChunkId::from_bytes(from.take()?) };
        let (version, base) = (UpdateVersion::new(from.u64()?), from.u32()?);
        let count = from.count(4)?;
        let checksums = (0..count).map(|_| from.u32()).collect::<Result<Vec<_>, _>>()?;
        if !from.0.is_empty() || checksums.len() > MAX_PAGES as usize {
            return Err("block record is malformed");
        }
        Ok(Self { place, version, base, checksums })
    }
}

impl Identity {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = self.disk.to_vec();
        out.extend(self.incarnation.to_le_bytes());
        seal(IDENTITY_KEY, &out)
    }

    pub(super) fn decode(value: &[u8]) -> Result<Self, &'static str> {
        let mut from = Cursor(unseal(IDENTITY_KEY, value)?);
        let identity = Self { disk: from.take()?, incarnation: from.u64()? };
        if from.0.is_empty() { Ok(identity) } else { Err("identity is malformed") }
    }
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    // Counts are bounded far below by MAX_PAGES and MAX_DUPLICATES.
    out.extend(u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_lane(out: &mut Vec<u8>, (client, channel): (ClientId, ChannelId)) {
    out.extend(client.get().to_le_bytes());
    out.extend(channel.get().to_le_bytes());
}

/// Takes fields off the front of untrusted bytes.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or("record too short")?;
        self.0 = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        self.take().map(u64::from_le_bytes)
    }

    fn lane(&mut self) -> Result<(ClientId, ChannelId), &'static str> {
        let client = ClientId::new(u128::from_le_bytes(self.take()?));
        Ok((client, ChannelId::new(self.u32()?)))
    }

    /// A count of items of `size` bytes that are really there.
    fn count(&mut self, size: usize) -> Result<usize, &'static str> {
        let count = self.u32()? as usize;
        if count > self.0.len() / size { Err("record too short") } else { Ok(count) }
    }

    fn fragment(&mut self) -> Result<Fragment, &'static str> {
        let (page, pages) = (self.u32()?, self.u32()?);
        let block = Block::from_raw(self.u64()?).ok_or("not a block")?;
        Ok(Fragment { page, pages, block, base: self.u32()?, crc: self.u32()? })
    }

    fn duplicate(&mut self) -> Result<((ClientId, ChannelId), Applied), &'static str> {
        let lane = self.lane()?;
        let (seq, version) = (self.u64()?, UpdateVersion::new(self.u64()?));
        Ok((lane, Applied { seq, version, length: self.u64()? }))
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests;
