//! Decodes a split of a file to Arrow in pieces of bounded size.
//!
//! What is small in the file may be large in Arrow: a text that repeats is stored once there and
//! written out here. So rows are measured before they are decoded. Columns whose values have one
//! width were measured when the file was split; of the others the lengths are known without the
//! values.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_schema::{DataType, Field, Fields, Schema, SchemaRef};
use vortex::array::arrays::fixed_size_list::FixedSizeListArraySlotsExt;
use vortex::array::arrays::listview::{ListViewArraySlotsExt, ListViewRebuildMode};
use vortex::array::arrays::{FixedSizeListArray, ListViewArray, PrimitiveArray, StructArray};
use vortex::array::builtins::ArrayBuiltins;
use vortex::array::expr::{Expression, byte_length, list_length, root};
use vortex::array::validity::Validity;
use vortex::array::{ArrayRef, Canonical, ExecutionCtx, IntoArray, VortexSessionExecute};
use vortex::arrow::ArrowSessionExt;
use vortex::dtype::{DType, FieldNames, Nullability, PType};
use vortex::error::{VortexResult, vortex_err};
use vortex::session::VortexSession;

use crate::schema::{Column, ColumnType};

/// Most bytes of rows that are decoded at once, unless one row has more.
pub(super) const PIECE_BYTES: u64 = 16 << 20;
/// Bytes in Arrow of where a value of variable width ends.
const OFFSET_BYTES: u64 = 4;

/// Decodes splits of a few columns.
pub(super) struct Decoder<'a> {
    session: &'a VortexSession,
    columns: &'a [Column],
    schema: SchemaRef,
    target: Field,
    context: ExecutionCtx,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(session: &'a VortexSession, columns: &'a [Column]) -> Self {
        let fields: Fields = columns.iter().map(Column::to_arrow).collect();
        Self {
            session,
            columns,
            target: Field::new("", DataType::Struct(fields.clone()), false),
            schema: Arc::new(Schema::new(fields)),
            context: session.create_execution_ctx(),
        }
    }

    /// Hands the split's rows to `sink` in order; breaks when it does.
    pub(super) fn decode(
        &mut self,
        split: ArrayRef,
        sink: &mut dyn FnMut(RecordBatch) -> ControlFlow<()>,
    ) -> VortexResult<ControlFlow<()>> {
        if self.columns.iter().all(|column| column.kind.width().is_some()) {
            return Ok(sink(self.convert(split)?));
        }
        let split = split.execute::<StructArray>(&mut self.context)?;
        let pieces = pieces(&self.measure(&split)?);
        let split = split.into_data_parts();
        let (names, mut columns) = (split.struct_fields.names(), split.fields);
        if pieces.len() > 1 {
            // Decoded, but not to Arrow: a piece is cut without decoding again, and what repeats is
            // still there only once.
            for column in &mut columns {
                *column = column.clone().execute::<Canonical>(&mut self.context)?.into_array();
            }
        }
        for rows in pieces {
            let piece = self.cut(names.clone(), &columns, rows)?;
            if sink(self.convert(piece)?).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Bytes in Arrow of each row.
    fn measure(&mut self, split: &StructArray) -> VortexResult<Vec<u64>> {
        let mut sizes = vec![least_width(self.columns); split.len()];
        for (array, column) in split.clone().into_data_parts().fields.into_iter().zip(self.columns)
        {
            if column.kind.width().is_none() {
                let more = measure(array, &column.kind, &mut self.context)?;
                sizes
                    .iter_mut()
                    .zip(more)
                    .for_each(|(size, more)| *size = size.saturating_add(more));
            }
        }
        Ok(sizes)
    }

    fn cut(
        &mut self,
        names: FieldNames,
        columns: &[ArrayRef],
        rows: Range<usize>,
    ) -> VortexResult<ArrayRef> {
        let mut cut = Vec::with_capacity(columns.len());
        for (array, column) in columns.iter().zip(self.columns) {
            let array = array.slice(rows.clone())?;
            cut.push(match column.kind {
                ColumnType::List { .. } => exact(array, &mut self.context)?.into_array(),
                _ => array,
            });
        }
        Ok(StructArray::try_new(names, cut, rows.len(), Validity::NonNullable)?.into_array())
    }

    fn convert(&mut self, rows: ArrayRef) -> VortexResult<RecordBatch> {
        let arrow = self.session.arrow();
        let arrow = arrow.execute_arrow(rows, Some(&self.target), &mut self.context)?;
        let parts = arrow.as_struct_opt().map(|rows| rows.columns().to_vec()).unwrap_or_default();
        RecordBatch::try_new(Arc::clone(&self.schema), parts)
            .map_err(|error| vortex_err!("{error}"))
    }
}

/// Bytes that every row has, whatever its values of variable width.
pub(super) fn least_width(columns: &[Column]) -> u64 {
    sum(columns.iter().filter_map(|column| column.kind.width()))
}

/// The lists with no other items than theirs: what is decoded of them is all that they hold.
fn exact(lists: ArrayRef, context: &mut ExecutionCtx) -> VortexResult<ListViewArray> {
    let lists: ListViewArray = lists.execute(context)?;
    lists.rebuild(ListViewRebuildMode::MakeExact, context)
}

/// Bytes in Arrow of each value, found without decoding them where the encoding allows.
fn measure(
    array: ArrayRef,
    kind: &ColumnType,
    context: &mut ExecutionCtx,
) -> VortexResult<Vec<u64>> {
    if let Some(width) = kind.width() {
        return Ok(vec![width; array.len()]);
    }
    match kind {
        ColumnType::List { item } => match item.width() {
            Some(width) => lengths(array, &list_length(root()), width, context),
            None => measure_lists(array, item, context),
        },
        ColumnType::FixedSizeList { size, item } => {
            let lists: FixedSizeListArray = array.execute(context)?;
            let items = measure(lists.elements().clone(), item, context)?;
            let mut sizes = vec![0; lists.len()];
            // An empty list has no items to sum.
            let per_row = usize::try_from(*size).unwrap_or(0).max(1);
            sizes
                .iter_mut()
                .zip(items.chunks(per_row))
                .for_each(|(size, items)| *size = sum(items.iter().copied()));
            Ok(sizes)
        }
        // Text and bytes: all other types have a width.
        _ => lengths(array, &byte_length(root()), 1, context),
    }
}

/// Bytes of values that have as many parts of this width as the expression says.
fn lengths(
    array: ArrayRef,
    length: &Expression,
    width: u64,
    context: &mut ExecutionCtx,
) -> VortexResult<Vec<u64>> {
    let counts: PrimitiveArray = array.apply(length)?.execute(context)?;
    let bytes = |count: &u64| count.saturating_mul(width).saturating_add(OFFSET_BYTES);
    Ok(counts.as_slice::<u64>().iter().map(bytes).collect())
}

fn measure_lists(
    array: ArrayRef,
    item: &ColumnType,
    context: &mut ExecutionCtx,
) -> VortexResult<Vec<u64>> {
    let lists: ListViewArray = array.execute(context)?;
    let lists = lists.rebuild(ListViewRebuildMode::TrimElements, context)?;
    let items = measure(lists.elements().clone(), item, context)?;
    // Bytes of all items before each one, and of all.
    let mut before = Vec::with_capacity(items.len() + 1);
    before.push(0_u64);
    for size in items {
        before.push(before.last().copied().unwrap_or(0).saturating_add(size));
    }
    let at = |index: u64| usize::try_from(index).ok().and_then(|index| before.get(index)).copied();
    let (starts, counts) = (numbers(lists.offsets(), context)?, numbers(lists.sizes(), context)?);
    let mut sizes = Vec::with_capacity(lists.len());
    for (start, count) in starts.as_slice::<u64>().iter().zip(counts.as_slice::<u64>()) {
        let span = at(*start).zip(at(start.saturating_add(*count)));
        let (first, last) = span.ok_or_else(|| vortex_err!("a list outside its items"))?;
        sizes.push(last.saturating_sub(first).saturating_add(OFFSET_BYTES));
    }
    Ok(sizes)
}

fn numbers(array: &ArrayRef, context: &mut ExecutionCtx) -> VortexResult<PrimitiveArray> {
    array.cast(DType::Primitive(PType::U64, Nullability::NonNullable))?.execute(context)
}

fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// As many rows at a time as [`PIECE_BYTES`] hold, at least one.
fn pieces(sizes: &[u64]) -> Vec<Range<usize>> {
    let (mut pieces, mut start, mut bytes) = (Vec::new(), 0, 0_u64);
    for (row, size) in sizes.iter().enumerate() {
        if row > start && bytes.saturating_add(*size) > PIECE_BYTES {
            pieces.push(start..row);
            (start, bytes) = (row, 0);
        }
        bytes = bytes.saturating_add(*size);
    }
    pieces.push(start..sizes.len());
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_has_as_many_rows_as_fit_and_at_least_one() {
        let third = PIECE_BYTES / 3;
        assert_eq!(pieces(&[]), vec![0..0; 1]);
        assert_eq!(pieces(&[1; 5]), vec![0..5; 1]);
        assert_eq!(pieces(&[third; 7]), [0..3, 3..6, 6..7]);
        assert_eq!(
            pieces(&[1, PIECE_BYTES, 1, u64::MAX, u64::MAX, 1]),
            [0..1, 1..2, 2..3, 3..4, 4..5, 5..6]
        );
        assert_eq!(pieces(&[1, PIECE_BYTES - 1, 1]), [0..2, 2..3]);
    }
}
