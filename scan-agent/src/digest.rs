//! The canonical row digest: equal for equal rows, whatever wrote, split or carried them.
//!
//! DIGEST.md is the specification; `lampyris.digest` implements it a second time, on purpose
//! without sharing code. Streams: batches are fed in row order and may be cut anywhere.

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_buffer::NullBuffer;
use arrow_schema::DataType;
use sha2::{Digest, Sha256};

use crate::schema::{Column, ColumnType};

/// First bytes of every digest's input; the number is the version of DIGEST.md.
const MAGIC: &[u8] = b"lampyris-row-digest-1\n";

/// A digest being computed.
#[derive(Debug)]
pub struct RowDigest {
    columns: Vec<(String, Node)>,
    rows: u64,
}

/// A batch that does not have the columns the digest was made for.
#[derive(Debug, Clone, thiserror::Error)]
#[error("digest column {column}: {message}")]
pub struct DigestError {
    column: String,
    message: &'static str,
}

impl RowDigest {
    /// A digest over rows of these columns, in this order.
    pub fn new(columns: &[Column]) -> Self {
        let node = |column: &Column| (column.name.clone(), Node::new(&column.kind));
        Self { columns: columns.iter().map(node).collect(), rows: 0 }
    }

    /// Feeds the next rows. Columns are taken by position.
    pub fn update(&mut self, batch: &RecordBatch) -> Result<(), DigestError> {
        for (index, (name, node)) in self.columns.iter_mut().enumerate() {
            let bad = |message| DigestError { column: name.clone(), message };
            let array = batch.columns().get(index).ok_or_else(|| bad("is missing"))?;
            node.update(array.as_ref()).map_err(bad)?;
        }
        self.rows += batch.num_rows() as u64;
        Ok(())
    }

    /// Rows fed so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The digest in lower-case hex.
    pub fn finish(self) -> String {
        let mut hash = Sha256::new();
        hash.update(MAGIC);
        hash.update(self.rows.to_le_bytes());
        for (name, node) in self.columns {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name.as_bytes());
            hash.update(node.finish());
        }
        hex::encode(hash.finalize())
    }
}

/// The streams of one column, or of the items of a list column.
#[derive(Debug)]
struct Node {
    kind: String,
    presence: Sha256,
    lengths: Sha256,
    values: Sha256,
    item: Option<Box<Self>>,
    scratch: Vec<u8>,
}

impl Node {
    fn new(kind: &ColumnType) -> Self {
        let item = match kind {
            ColumnType::FixedSizeList { item, .. } | ColumnType::List { item } => {
                Some(Box::new(Self::new(item)))
            }
            _ => None,
        };
        Self {
            kind: kind.to_string(),
            presence: Sha256::new(),
            lengths: Sha256::new(),
            values: Sha256::new(),
            item,
            scratch: Vec::new(),
        }
    }

    fn finish(self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update((self.kind.len() as u64).to_le_bytes());
        hash.update(self.kind.as_bytes());
        hash.update(self.presence.finalize());
        hash.update(self.lengths.finalize());
        hash.update(self.values.finalize());
        hash.update(self.item.map_or([0; 32], |item| item.finish()));
        hash.finalize().into()
    }

    fn update(&mut self, array: &dyn Array) -> Result<(), &'static str> {
        let nulls = array.nulls().filter(|nulls| nulls.null_count() > 0);
        self.feed_presence(array.len(), nulls);
        match array.data_type() {
            DataType::Boolean => self.feed_bools(array, nulls),
            DataType::Utf8 => {
                let text = array.as_string::<i32>();
                self.feed_bytes(text.value_offsets(), text.value_data(), nulls)?;
            }
            DataType::Binary => {
                let bytes = array.as_binary::<i32>();
                self.feed_bytes(bytes.value_offsets(), bytes.value_data(), nulls)?;
            }
            DataType::FixedSizeList(_, size) => {
                let width = usize::try_from(*size).map_err(|_| "has a negative size")?;
                let values = array.as_fixed_size_list().values();
                return self.feed_items(values.as_ref(), array.len(), nulls, |row| {
                    (row * width, (row + 1) * width)
                });
            }
            DataType::List(_) => return self.feed_list(array, nulls),
            kind => {
                let width = kind.primitive_width().ok_or("has no digest")?;
                self.feed_fixed(array, width, nulls)?;
            }
        }
        Ok(())
    }

    fn feed_presence(&mut self, rows: usize, nulls: Option<&NullBuffer>) {
        self.scratch.clear();
        match nulls {
            None => self.scratch.resize(rows, 1),
            Some(nulls) => self.scratch.extend(nulls.iter().map(u8::from)),
        }
        self.presence.update(&self.scratch);
    }

    fn feed_bools(&mut self, array: &dyn Array, nulls: Option<&NullBuffer>) {
        let bits = array.as_boolean().values();
        let present = |row: &usize| nulls.is_none_or(|nulls| nulls.is_valid(*row));
        self.scratch.clear();
        let rows = (0..array.len()).filter(present);
        self.scratch.extend(rows.map(|row| u8::from(bits.value(row))));
        self.values.update(&self.scratch);
    }

    /// Values of a fixed width, nulls left out, NaNs as one NaN.
    fn feed_fixed(
        &mut self,
        array: &dyn Array,
        width: usize,
        nulls: Option<&NullBuffer>,
    ) -> Result<(), &'static str> {
        let data = array.to_data();
        let start = data.offset() * width;
        let bytes = data
            .buffers()
            .first()
            .and_then(|buffer| buffer.get(start..start + array.len() * width))
            .ok_or("has a short buffer")?;
        let nan = canonical_nan(array.data_type());
        let is_nan = |value: &[u8]| nan.is_some_and(|nan| nan.matches(value));
        if nulls.is_none() && !bytes.chunks_exact(width).any(is_nan) {
            self.values.update(bytes);
            return Ok(());
        }
        self.scratch.clear();
        for (row, value) in bytes.chunks_exact(width).enumerate() {
            if nulls.is_none_or(|nulls| nulls.is_valid(row)) {
                match nan {
                    Some(nan) if nan.matches(value) => self.scratch.extend(nan.bytes),
                    _ => self.scratch.extend_from_slice(value),
                }
            }
        }
        self.values.update(&self.scratch);
        Ok(())
    }

    fn feed_bytes(
        &mut self,
        offsets: &[i32],
        data: &[u8],
        nulls: Option<&NullBuffer>,
    ) -> Result<(), &'static str> {
        self.scratch.clear();
        for (row, pair) in offsets.windows(2).enumerate() {
            let &[start, end] = pair else { continue };
            if nulls.is_none_or(|nulls| nulls.is_valid(row)) {
                let (start, end) = (to_usize(start), to_usize(end));
                self.scratch.extend(((end - start) as u64).to_le_bytes());
                self.values.update(data.get(start..end).ok_or("has offsets outside its bytes")?);
            }
        }
        self.lengths.update(&self.scratch);
        Ok(())
    }

    fn feed_list(
        &mut self,
        array: &dyn Array,
        nulls: Option<&NullBuffer>,
    ) -> Result<(), &'static str> {
        let list = array.as_list::<i32>();
        let offsets = list.value_offsets();
        let at = |row: usize| offsets.get(row).map_or(0, |&offset| to_usize(offset));
        self.scratch.clear();
        for row in 0..array.len() {
            if nulls.is_none_or(|nulls| nulls.is_valid(row)) {
                let length = (at(row + 1) - at(row)) as u64;
                self.scratch.extend(length.to_le_bytes());
            }
        }
        self.lengths.update(&self.scratch);
        self.feed_items(list.values().as_ref(), array.len(), nulls, |row| (at(row), at(row + 1)))
    }

    /// Items of the rows that are not null, joined where they touch.
    fn feed_items(
        &mut self,
        items: &dyn Array,
        rows: usize,
        nulls: Option<&NullBuffer>,
        bounds: impl Fn(usize) -> (usize, usize),
    ) -> Result<(), &'static str> {
        let node = self.item.as_mut().ok_or("is a list but should not be")?;
        let mut open: Option<(usize, usize)> = None;
        for row in (0..rows).filter(|&row| nulls.is_none_or(|nulls| nulls.is_valid(row))) {
            let (start, end) = bounds(row);
            open = match open {
                Some((first, last)) if last == start => Some((first, end)),
                Some((first, last)) => {
                    node.update(items.slice(first, last - first).as_ref())?;
                    Some((start, end))
                }
                None => Some((start, end)),
            };
        }
        match open {
            Some((first, last)) => node.update(items.slice(first, last - first).as_ref()),
            None => Ok(()),
        }
    }
}

/// The one NaN that stands for all of a float type.
#[derive(Debug, Clone, Copy)]
struct Nan {
    bytes: &'static [u8],
    bits: u8,
}

impl Nan {
    fn matches(self, value: &[u8]) -> bool {
        match (self.bits, value) {
            (16, &[a, b]) => u16::from_le_bytes([a, b]) & 0x7fff > 0x7c00,
            (32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).is_nan(),
            (_, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]).is_nan(),
            _ => false,
        }
    }
}

fn canonical_nan(kind: &DataType) -> Option<Nan> {
    let (bytes, bits): (&'static [u8], u8) = match kind {
        DataType::Float16 => (&[0x00, 0x7e], 16),
        DataType::Float32 => (&[0, 0, 0xc0, 0x7f], 32),
        DataType::Float64 => (&[0, 0, 0, 0, 0, 0, 0xf8, 0x7f], 64),
        _ => return None,
    };
    Some(Nan { bytes, bits })
}

/// Arrow's offsets are never negative.
fn to_usize(offset: i32) -> usize {
    usize::try_from(offset).unwrap_or(0)
}

#[cfg(test)]
mod tests;
