//! What is small in a file and large in memory is delivered in pieces.

use arrow_array::builder::{FixedSizeListBuilder, ListBuilder, StringBuilder, StringViewBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{
    Array, ArrayRef, FixedSizeListArray, Int64Array, ListArray, RecordBatch, UInt8Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Schema};

use super::super::decode::PIECE_BYTES;
use super::*;
use crate::digest::RowDigest;
use crate::schema::Column;

/// Writes `rows` rows that are all the same in `column`, after their number, and opens them.
fn repeated(column: &ArrayRef, times: usize, io: &Runtime) -> (tempfile::TempDir, File) {
    let rows = column.len();
    let kind = column.data_type().clone();
    let fields = vec![Field::new("n", DataType::Int64, false), Field::new("same", kind, false)];
    let schema = Arc::new(Schema::new(fields));
    let batches = (0..times).map(|nth| {
        let first = i64::try_from(nth * rows).unwrap();
        let numbers = Int64Array::from_iter_values((first..).take(rows));
        let columns: Vec<ArrayRef> = vec![Arc::new(numbers), Arc::clone(column)];
        Ok(RecordBatch::try_new(Arc::clone(&schema), columns).unwrap())
    });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("repeated.vortex");
    Writer::new(Arc::clone(&schema)).write(&path, &mut batches.into_iter()).unwrap();
    let file = open(&path, io, &FooterCache::default()).unwrap();
    (dir, file)
}

/// Scans what is repeated: every row comes once, in order and as `is_same` wants it, and no batch
/// is large. The number of rows and of batches.
fn pieces(file: &File, filter: Option<&str>, is_same: impl Fn(&ArrayRef) -> bool) -> (u64, u64) {
    let (mut rows, mut batches) = (0, 0);
    let mut next = 0;
    let plan = plan(&["n", "same"], filter);
    file.scan(&plan, &mut |batch| {
        let numbers = batch.column(0).as_primitive::<Int64Type>();
        assert!(numbers.value(0) >= next, "rows come out of order");
        next = numbers.value(numbers.len() - 1) + 1;
        let bytes = batch.column(1).get_array_memory_size() as u64;
        assert!(bytes < 2 * PIECE_BYTES, "{bytes} bytes in a batch of {}", batch.num_rows());
        assert!(is_same(batch.column(1)), "another value");
        rows += batch.num_rows() as u64;
        batches += 1;
        ControlFlow::Continue(())
    })
    .unwrap();
    (rows, batches)
}

#[test]
fn a_long_text_that_repeats_comes_in_pieces() {
    const ROWS: usize = 66_000;
    let io = io();
    let text = "forty kilobytes ".repeat(2560);
    let mut views = StringViewBuilder::new();
    let block = views.append_block(text.as_bytes().to_vec().into());
    let length = u32::try_from(text.len()).unwrap();
    (0..ROWS / 10).for_each(|_| views.try_append_view(block, 0, length).unwrap());
    let (_dir, file) = repeated(&(Arc::new(views.finish()) as ArrayRef), 10, &io);
    // More than offsets of 32 bits can say of one split.
    assert!(text.len() as u64 * 65_536 > 1 << 31);
    let is_same = |column: &ArrayRef| {
        let column = column.as_string::<i32>();
        column.value(0) == text
            && column.value(column.len() - 1) == text
            && column.value_data().len() == text.len() * column.len()
    };
    let (rows, batches) = pieces(&file, None, is_same);
    assert_eq!(rows, ROWS as u64);
    assert!(batches > text.len() as u64 * rows / PIECE_BYTES);
    assert_eq!(pieces(&file, Some("n >= 100 and n < 2100"), is_same).0, 2000);
}

#[test]
fn a_list_that_repeats_comes_in_pieces() {
    const ROWS: usize = 70_000;
    let io = io();
    let rows = ROWS / 10;
    let items = UInt8Array::from_iter_values(
        (0..rows).flat_map(|_| (0..250).chain(0..250).chain(0..250).chain(0..250)),
    );
    let item = Arc::new(Field::new_list_field(DataType::UInt8, false));
    let lengths = OffsetBuffer::from_lengths(vec![1000; rows]);
    let lists = ListArray::new(Arc::clone(&item), lengths, Arc::new(items.clone()), None);
    let (_dir, file) = repeated(&(Arc::new(lists) as ArrayRef), 10, &io);
    let expected: Vec<u8> = items.values()[..1000].to_vec();
    let is_same = |column: &ArrayRef| {
        let column = column.as_list::<i32>();
        let row = |at| column.value(at).as_primitive::<arrow_array::types::UInt8Type>().clone();
        *row(0).values() == expected
            && *row(column.len() - 1).values() == expected
            && column.values().len() == 1000 * column.len()
    };
    let (rows_found, batches) = pieces(&file, None, is_same);
    assert!(rows_found == ROWS as u64 && batches > 4, "{rows_found} in {batches}");
    assert_eq!(pieces(&file, Some("n > 1000 and n < 60000"), is_same).0, 58_999);

    let fixed = FixedSizeListArray::try_new(item, 1000, Arc::new(items), None).unwrap();
    let (_dir, file) = repeated(&(Arc::new(fixed) as ArrayRef), 10, &io);
    let is_same = |column: &ArrayRef| {
        let column = column.as_fixed_size_list();
        let row = column.value(column.len() - 1);
        *row.as_primitive::<arrow_array::types::UInt8Type>().values() == expected
    };
    let (rows_found, batches) = pieces(&file, None, is_same);
    assert!(rows_found == ROWS as u64 && batches > 4, "{rows_found} in {batches}");
    assert_eq!(pieces(&file, Some("n > 1000 and n < 60000"), is_same).0, 58_999);
}

/// Rows of all kinds of variable width, some large, some null, some empty.
fn varied(rows: usize) -> RecordBatch {
    let mut random = 7_u64;
    let mut below = |bound: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (usize::try_from(random >> 33).unwrap()) % bound
    };
    let letters = "abcdefghijklmnopqrstuvwxyz".repeat(10_000);
    let mut texts = StringBuilder::new();
    let mut names = ListBuilder::new(StringBuilder::new());
    let mut pairs = FixedSizeListBuilder::new(StringBuilder::new(), 2);
    let mut deep = ListBuilder::new(ListBuilder::new(Int64Array::builder(0)));
    for row in 0..rows {
        match row % 5 {
            3 => texts.append_null(),
            4 => texts.append_value(""),
            _ => texts.append_value(&letters[..below(100_000)]),
        }
        (0..below(4)).for_each(|_| names.values().append_value(&letters[..below(30_000)]));
        names.append(row % 7 != 2);
        pairs.values().append_option((row % 3 > 0).then(|| &letters[..below(50_000)]));
        pairs.values().append_value(&letters[..below(9)]);
        pairs.append(true);
        for _ in 0..below(3) {
            (0..below(2000)).for_each(|_| deep.values().values().append_value(row as i64));
            deep.values().append(true);
        }
        deep.append(row % 11 != 5);
    }
    let numbers = Int64Array::from_iter_values((0..).take(rows));
    let columns: [(&str, ArrayRef, bool); 5] = [
        ("n", Arc::new(numbers), false),
        ("texts", Arc::new(texts.finish()), true),
        ("names", Arc::new(names.finish()), true),
        ("pairs", Arc::new(pairs.finish()), true),
        ("deep", Arc::new(deep.finish()), true),
    ];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

fn digest(batches: &[RecordBatch]) -> String {
    let schema = batches[0].schema();
    let columns: Vec<_> =
        schema.fields().iter().map(|field| Column::from_arrow(field).unwrap()).collect();
    let mut digest = RowDigest::new(&columns);
    batches.iter().for_each(|batch| digest.update(batch).unwrap());
    digest.finish()
}

#[test]
fn rows_are_the_same_in_pieces() {
    let io = io();
    let batch = varied(900);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("varied.vortex");
    Writer::write_batch(&path, &batch);
    let file = open(&path, &io, &FooterCache::default()).unwrap();
    for (filter, range) in [(None, 0..900), (Some("n >= 250 and n < 777"), 250..777)] {
        let plan = Plan { columns: None, filter: filter.map(|text| Filter::parse(text).unwrap()) };
        let found = rows(&file, &plan).unwrap();
        assert!(found.len() > 2, "{} batches", found.len());
        let expected = batch.slice(range.start, range.len());
        assert_eq!(digest(&found), digest(&[expected]), "{filter:?}");
    }
}
