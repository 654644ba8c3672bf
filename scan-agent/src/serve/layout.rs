//! Arrow arrays laid out for the ring: pieces of several decoded batches become one batch, each
//! byte copied once, from the decoder's buffer to its place in shared memory.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_buffer::{BooleanBufferBuilder, Buffer};
use arrow_schema::DataType;
use ring::shm::{Region, ShmError};

use super::protocol::Node;
use super::slab::ALIGNMENT;

/// Buffers of a batch, each placed relative to the batch's start.
#[derive(Debug, Default)]
pub(super) struct Layout {
    buffers: Vec<Placed>,
    end: usize,
}

#[derive(Debug)]
struct Placed {
    offset: usize,
    pieces: Vec<Buffer>,
}

/// Where a buffer lies in the batch: offset and bytes.
type Span = (usize, usize);

/// An array that the type table does not have, or with less in it than it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("array of an undeliverable layout")]
pub(super) struct LayoutError;

/// Bytes of an array's rows, without the gaps that a batch has between buffers.
pub(super) fn bytes(array: &ArrayRef) -> usize {
    let len = array.len();
    let validity = if array.null_count() > 0 { len.div_ceil(8) } else { 0 };
    // Where the values of the first row begin, and those of all.
    let span = |offsets: &[i32]| {
        let at = |offset: Option<&i32>| offset.and_then(|o| usize::try_from(*o).ok()).unwrap_or(0);
        let (first, last) = (at(offsets.first()), at(offsets.last()));
        (first, last.saturating_sub(first))
    };
    let values = match array.data_type() {
        DataType::Boolean => len.div_ceil(8),
        DataType::Utf8 => 4 * len + span(array.as_string::<i32>().value_offsets()).1,
        DataType::Binary => 4 * len + span(array.as_binary::<i32>().value_offsets()).1,
        DataType::FixedSizeList(..) => bytes(array.as_fixed_size_list().values()),
        DataType::List(_) => {
            let lists = array.as_list::<i32>();
            let (first, count) = span(lists.value_offsets());
            4 * len + bytes(&lists.values().slice(first, count))
        }
        kind => len * kind.primitive_width().unwrap_or(0),
    };
    validity + values
}

impl Layout {
    /// Bytes that the batch needs.
    pub(super) fn bytes(&self) -> usize {
        self.end
    }

    /// Adds a column whose rows are those of `pieces`, one after the other.
    pub(super) fn column(&mut self, pieces: &[ArrayRef]) -> Result<Node, LayoutError> {
        let kind = pieces.first().ok_or(LayoutError)?.data_type().clone();
        let len = pieces.iter().map(|piece| piece.len()).sum();
        let nulls: usize = pieces.iter().map(|piece| piece.null_count()).sum();
        let validity = (nulls > 0).then(|| self.validity(pieces, len));
        let mut buffers: Vec<Option<Span>> = vec![validity];
        let mut children = Vec::new();
        match kind {
            DataType::Boolean => buffers.push(Some(self.bits(pieces, len))),
            DataType::Utf8 | DataType::Binary => {
                let (offsets, values) = self.bytes_column(pieces, len)?;
                buffers.extend([Some(offsets), Some(values)]);
            }
            DataType::FixedSizeList(..) => {
                let items: Vec<ArrayRef> = pieces
                    .iter()
                    .map(|piece| ArrayRef::clone(piece.as_fixed_size_list().values()))
                    .collect();
                children.push(self.column(&items)?);
            }
            DataType::List(_) => {
                let mut items: Vec<ArrayRef> = Vec::with_capacity(pieces.len());
                let mut offsets = Offsets::with_capacity(len);
                for piece in pieces {
                    let list = piece.as_list::<i32>();
                    let (first, count) = offsets.append(list.value_offsets())?;
                    items.push(list.values().slice(first, count));
                }
                let place = self.place(vec![offsets.finish()]);
                buffers.push(Some(place));
                children.push(self.column(&items)?);
            }
            kind => {
                let width = kind.primitive_width().ok_or(LayoutError)?;
                buffers.push(Some(self.fixed(pieces, width)?));
            }
        }
        Ok(Node { len, nulls, buffers, children })
    }

    /// Copies every buffer to its place in a batch that begins at `start`.
    pub(super) fn write(&self, region: &Region, start: usize) -> Result<(), ShmError> {
        for placed in &self.buffers {
            let mut at = start + placed.offset;
            for piece in &placed.pieces {
                region.copy_in(at, piece)?;
                at += piece.len();
            }
        }
        Ok(())
    }

    fn place(&mut self, pieces: Vec<Buffer>) -> Span {
        let offset = self.end;
        let len: usize = pieces.iter().map(Buffer::len).sum();
        self.end = (offset + len).next_multiple_of(ALIGNMENT);
        self.buffers.push(Placed { offset, pieces });
        (offset, len)
    }

    fn validity(&mut self, pieces: &[ArrayRef], len: usize) -> Span {
        let mut bits = BooleanBufferBuilder::new(len);
        for piece in pieces {
            match piece.nulls() {
                Some(nulls) => bits.append_buffer(nulls.inner()),
                None => bits.append_n(piece.len(), true),
            }
        }
        self.place(vec![bits.finish().into_inner()])
    }

    fn bits(&mut self, pieces: &[ArrayRef], len: usize) -> Span {
        let mut bits = BooleanBufferBuilder::new(len);
        for piece in pieces {
            bits.append_buffer(piece.as_boolean().values());
        }
        self.place(vec![bits.finish().into_inner()])
    }

    fn fixed(&mut self, pieces: &[ArrayRef], width: usize) -> Result<Span, LayoutError> {
        let mut parts = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let data = piece.to_data();
            let buffer = data.buffers().first().ok_or(LayoutError)?;
            let (start, len) = (data.offset() * width, data.len() * width);
            if start + len > buffer.len() {
                return Err(LayoutError);
            }
            parts.push(buffer.slice_with_length(start, len));
        }
        Ok(self.place(parts))
    }

    fn bytes_column(
        &mut self,
        pieces: &[ArrayRef],
        len: usize,
    ) -> Result<(Span, Span), LayoutError> {
        let mut offsets = Offsets::with_capacity(len);
        let mut values = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let (of, data) = match piece.as_string_opt::<i32>() {
                Some(text) => (text.value_offsets(), text.values()),
                None => {
                    let bytes = piece.as_binary_opt::<i32>().ok_or(LayoutError)?;
                    (bytes.value_offsets(), bytes.values())
                }
            };
            let (first, count) = offsets.append(of)?;
            values.push(data.slice_with_length(first, count));
        }
        let offsets = self.place(vec![offsets.finish()]);
        Ok((offsets, self.place(values)))
    }
}

/// Offsets of several pieces as if their values lay end to end.
struct Offsets {
    bytes: Vec<u8>,
    end: i32,
}

impl Offsets {
    fn with_capacity(rows: usize) -> Self {
        let mut bytes = Vec::with_capacity((rows + 1) * 4);
        bytes.extend(0_i32.to_le_bytes());
        Self { bytes, end: 0 }
    }

    /// First value and number of values that the piece refers to.
    fn append(&mut self, offsets: &[i32]) -> Result<(usize, usize), LayoutError> {
        let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
            return Err(LayoutError);
        };
        let shift = self.end.checked_sub(first).ok_or(LayoutError)?;
        let end = last.checked_add(shift).ok_or(LayoutError)?;
        for offset in offsets.iter().skip(1) {
            self.bytes.extend((offset + shift).to_le_bytes());
        }
        self.end = end;
        let count = usize::try_from(last - first).map_err(|_| LayoutError)?;
        Ok((usize::try_from(first).map_err(|_| LayoutError)?, count))
    }

    fn finish(self) -> Buffer {
        Buffer::from_vec(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::types::Int32Type;
    use arrow_array::{BooleanArray, Int64Array, ListArray, StringArray};
    use std::sync::Arc;

    fn place(pieces: &[ArrayRef]) -> (Node, Vec<u8>) {
        let mut layout = Layout::default();
        let node = layout.column(pieces).unwrap();
        let region = Region::create("t", layout.bytes() + 64).unwrap();
        layout.write(&region, 64).unwrap();
        let mut bytes = vec![0; layout.bytes()];
        region.copy_out(64, &mut bytes).unwrap();
        (node, bytes)
    }

    fn buffer(node: &Node, bytes: &[u8], index: usize) -> Vec<u8> {
        let (offset, len) = node.buffers[index].unwrap();
        assert_eq!(offset % ALIGNMENT, 0);
        bytes[offset..offset + len].to_vec()
    }

    #[test]
    fn pieces_cut_anywhere_become_one_array() {
        let one: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(3)]));
        let two: ArrayRef = Arc::new(Int64Array::from(vec![4, 5, 6]));
        let (node, bytes) = place(&[one.slice(1, 2), two.slice(2, 1)]);
        assert_eq!((node.len, node.nulls), (3, 1));
        assert_eq!(buffer(&node, &bytes, 0)[0] & 0b111, 0b110);
        let values = buffer(&node, &bytes, 1);
        assert_eq!(values[8..16], 3_i64.to_le_bytes());
        assert_eq!(values[16..24], 6_i64.to_le_bytes());
    }

    #[test]
    fn text_and_lists_get_offsets_from_zero() {
        let one: ArrayRef = Arc::new(StringArray::from(vec!["aa", "b", "ccc"]));
        let two: ArrayRef = Arc::new(StringArray::from(vec!["", "dd"]));
        let (node, bytes) = place(&[one.slice(1, 2), two]);
        let offsets: Vec<u8> = [0_i32, 1, 4, 4, 6].iter().flat_map(|o| o.to_le_bytes()).collect();
        assert_eq!(buffer(&node, &bytes, 1), offsets);
        assert_eq!(buffer(&node, &bytes, 2), b"bcccdd");
        assert_eq!(node.buffers[0], None);

        let lists = vec![Some(vec![Some(1)]), Some(vec![Some(2), None]), None];
        let list: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists));
        let (node, bytes) = place(&[list.slice(1, 2)]);
        let offsets: Vec<u8> = [0_i32, 2, 2].iter().flat_map(|o| o.to_le_bytes()).collect();
        assert_eq!(buffer(&node, &bytes, 1), offsets);
        assert_eq!((node.children[0].len, node.children[0].nulls), (2, 1));
    }

    #[test]
    fn bits_are_joined_across_byte_borders() {
        let one: ArrayRef = Arc::new(BooleanArray::from(vec![true; 5]));
        let two: ArrayRef = Arc::new(BooleanArray::from(vec![false, true, false, true, true]));
        let (node, bytes) = place(&[one, two]);
        assert_eq!(buffer(&node, &bytes, 1)[..2], [0b0101_1111, 0b11]);
    }
}
