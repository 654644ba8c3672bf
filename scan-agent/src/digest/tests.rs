use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, BooleanArray, FixedSizeListArray, Float64Array, Int32Array, Int64Array, ListArray,
    StringArray,
};
use arrow_schema::{Field, Schema};

use super::*;

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, a)| (n, a, true)))
        .unwrap()
}

fn digest(batches: &[RecordBatch]) -> String {
    let schema = batches[0].schema();
    let columns: Vec<_> =
        schema.fields().iter().map(|field| Column::from_arrow(field).unwrap()).collect();
    let mut digest = RowDigest::new(&columns);
    for batch in batches {
        digest.update(batch).unwrap();
    }
    digest.finish()
}

fn sample() -> RecordBatch {
    let lists = vec![Some(vec![Some(1), None]), None, Some(vec![]), Some(vec![Some(7)])];
    let pairs = vec![
        Some(vec![Some(1), Some(2)]),
        None,
        Some(vec![None, Some(3)]),
        Some(vec![Some(4), Some(5)]),
    ];
    batch(vec![
        ("id", Arc::new(Int64Array::from(vec![1, 2, 3, 4]))),
        ("x", Arc::new(Float64Array::from(vec![Some(0.5), None, Some(f64::NAN), Some(-0.0)]))),
        ("s", Arc::new(StringArray::from(vec![Some("a"), Some(""), None, Some("été")]))),
        ("b", Arc::new(BooleanArray::from(vec![Some(true), None, Some(false), Some(true)]))),
        ("l", Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists))),
        ("p", Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(pairs, 2))),
    ])
}

#[test]
fn batches_may_be_cut_anywhere() {
    let whole = sample();
    let expected = digest(std::slice::from_ref(&whole));
    for cut in 0..=whole.num_rows() {
        let parts = [whole.slice(0, cut), whole.slice(cut, whole.num_rows() - cut)];
        assert_eq!(digest(&parts), expected, "cut at {cut}");
    }
}

#[test]
fn the_digest_of_known_rows_never_changes() {
    let one = batch(vec![("a", Arc::new(Int32Array::from(vec![Some(1), None, Some(-1)])))]);
    // Computed by hand from DIGEST.md with Python's hashlib.
    assert_eq!(digest(&[one]), GOLDEN);
}

const GOLDEN: &str = "313004c86e7cb073c3ebb986429e541f0d910f3b3b7b20ea262a6c8cd6a0030f";

#[test]
fn every_difference_shows() {
    let base = digest(&[sample()]);
    let column = |a: ArrayRef, name| batch(vec![(name, a)]);
    let ints = |v: Vec<Option<i32>>| Arc::new(Int32Array::from(v)) as ArrayRef;
    let first = digest(&[column(ints(vec![Some(1), None]), "a")]);
    for other in [
        digest(&[column(ints(vec![None, Some(1)]), "a")]),
        digest(&[column(ints(vec![Some(1), Some(0)]), "a")]),
        digest(&[column(ints(vec![Some(1), None]), "b")]),
        digest(&[column(ints(vec![Some(1)]), "a")]),
        digest(&[column(Arc::new(Int64Array::from(vec![Some(1), None])), "a")]),
        base,
    ] {
        assert_ne!(first, other);
    }
}

#[test]
fn what_lies_under_a_null_or_a_nan_does_not_show() {
    let nan = |bits| Arc::new(Float64Array::from(vec![f64::from_bits(bits)])) as ArrayRef;
    assert_eq!(
        digest(&[batch(vec![("x", nan(0x7ff8_0000_0000_0000))])]),
        digest(&[batch(vec![("x", nan(0xfff8_0000_0000_beef))])]),
    );
    let hidden = |under: i32| {
        let nulls = NullBuffer::from(vec![true, false]);
        Arc::new(Int32Array::new(vec![5, under].into(), Some(nulls))) as ArrayRef
    };
    assert_eq!(digest(&[batch(vec![("x", hidden(1))])]), digest(&[batch(vec![("x", hidden(2))])]),);
}

#[test]
fn a_batch_with_other_columns_is_refused() {
    let columns = [Column::from_arrow(&Field::new("a", DataType::Int32, true)).unwrap()];
    let empty = RecordBatch::new_empty(Arc::new(Schema::empty()));
    let error = RowDigest::new(&columns).update(&empty).unwrap_err();
    assert_eq!(error.to_string(), "digest column a: is missing");
}
