//! Filters over floats against IEEE 754 as Rust has it.

use arrow_array::builder::PrimitiveBuilder;
use arrow_array::cast::AsArray;
use arrow_array::types::{Float16Type, Float32Type, Float64Type, Int32Type};
use arrow_array::{
    ArrayRef, FixedSizeListArray, Float64Array, Int32Array, RecordBatch, UInt8Array,
};
use arrow_schema::{DataType, Field};
use vortex::dtype::half::f16;

use super::*;

const OPERATORS: [&str; 6] = ["=", "<>", "<", "<=", ">", ">="];

fn holds(operator: &str, a: Option<f64>, b: Option<f64>) -> Option<bool> {
    let (a, b) = (a?, b?);
    Some(match operator {
        "=" => a == b,
        "<>" => a != b,
        "<" => a < b,
        "<=" => a <= b,
        ">" => a > b,
        ">=" => a >= b,
        _ => panic!("{operator}"),
    })
}

/// What SQL makes of several: null if none decides and one is null.
fn any(terms: &[Option<bool>]) -> Option<bool> {
    if terms.contains(&Some(true)) { Some(true) } else { all_of(terms, false) }
}

fn all(terms: &[Option<bool>]) -> Option<bool> {
    if terms.contains(&Some(false)) { Some(false) } else { all_of(terms, true) }
}

fn all_of(terms: &[Option<bool>], value: bool) -> Option<bool> {
    terms.iter().all(Option::is_some).then_some(value)
}

fn special() -> Vec<Option<f64>> {
    // A number that is no decimal, so that each type holds another one.
    let third = 1.0 / 3.0;
    let of_all_types = [-0.0, 0.0, f64::NAN, -f64::NAN, 1.0, -1.0, third, f64::INFINITY];
    let mut values: Vec<_> = of_all_types.into_iter().map(Some).collect();
    values.extend([Some(f64::NEG_INFINITY), None]);
    values
}

/// A type of float: how a column holds values, and what becomes of a value in it.
#[derive(Clone, Copy)]
struct Kind {
    column: fn(&[Option<f64>]) -> ArrayRef,
    round: fn(f64) -> f64,
    tiny: f64,
}

#[expect(clippy::cast_possible_truncation, reason = "values are rounded as a literal is")]
fn kinds() -> [Kind; 3] {
    fn column<T: arrow_array::types::ArrowPrimitiveType>(
        values: &[Option<f64>],
        to: fn(f64) -> T::Native,
    ) -> ArrayRef {
        let mut builder = PrimitiveBuilder::<T>::new();
        values.iter().for_each(|value| builder.append_option(value.map(to)));
        Arc::new(builder.finish())
    }
    [
        Kind {
            column: |values| column::<Float64Type>(values, |value| value),
            round: |value| value,
            tiny: f64::from_bits(1),
        },
        Kind {
            column: |values| column::<Float32Type>(values, |value| value as f32),
            round: |value| f64::from(value as f32),
            tiny: f64::from(f32::from_bits(1)),
        },
        Kind {
            column: |values| column::<Float16Type>(values, f16::from_f64),
            round: |value| f64::from(f16::from_f64(value)),
            tiny: f64::from(f16::from_bits(1)),
        },
    ]
}

/// A file of `x`, `y` and the row's number.
struct Table {
    _dir: tempfile::TempDir,
    file: File,
    rows: Vec<(Option<f64>, Option<f64>)>,
}

impl Table {
    fn new(kind: Kind, x: &[Option<f64>], y: &[Option<f64>], io: &Runtime) -> Self {
        let numbers: Int32Array = (0_i32..).take(x.len()).collect();
        let is_nullable = x.iter().chain(y).any(Option::is_none);
        let columns: [(&str, ArrayRef, bool); 3] = [
            ("x", (kind.column)(x), is_nullable),
            ("y", (kind.column)(y), is_nullable),
            ("row", Arc::new(numbers), false),
        ];
        let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("floats.vortex");
        Writer::write_batch(&path, &batch);
        let file = open(&path, io, &FooterCache::default()).unwrap();
        let round = |value: &Option<f64>| value.map(kind.round);
        let rows = x.iter().zip(y).map(|(x, y)| (round(x), round(y))).collect();
        Self { _dir: dir, file, rows }
    }

    /// The filter, and its negation, keep the rows for which `expected` says so.
    fn check(&self, filter: &str, expected: impl Fn(Option<f64>, Option<f64>) -> Option<bool>) {
        for (filter, kept) in [(filter.to_owned(), true), (format!("not ({filter})"), false)] {
            let batches = rows(&self.file, &plan(&["row"], Some(&filter))).unwrap();
            let mut found = vec![false; self.rows.len()];
            for batch in &batches {
                for row in batch.column(0).as_primitive::<Int32Type>().values() {
                    found[usize::try_from(*row).unwrap()] = true;
                }
            }
            for (row, ((x, y), found)) in self.rows.iter().zip(found).enumerate() {
                let expected = expected(*x, *y) == Some(kept);
                assert_eq!(found, expected, "{filter}: row {row} with x {x:?}, y {y:?}");
            }
        }
    }

    fn check_literals(&self, literals: &[(&str, f64)]) {
        for &(text, value) in literals {
            for operator in OPERATORS {
                self.check(&format!("x {operator} {text}"), |x, _| holds(operator, x, Some(value)));
                self.check(&format!("{text} {operator} x"), |x, _| holds(operator, Some(value), x));
            }
        }
    }
}

#[test]
fn zeros_and_nans_compare_as_they_do_elsewhere() {
    let io = io();
    for kind in kinds() {
        let mut values = special();
        values.extend([Some(kind.tiny), Some(-kind.tiny)]);
        let table = Table::new(kind, &values, &values, &io);
        // Both of the last are too small for a float of 32 bits.
        let literals = ["0", "0.0", "-0.0", "1", "-1", "0.33333", "7e4", "1e-46", "-1e-46"];
        let literals = literals.map(|text| (text, (kind.round)(text.parse().unwrap())));
        table.check_literals(&literals);

        let (zero, one) = (Some(0.0), Some(1.0));
        table.check("x in (0, 1)", |x, _| any(&[holds("=", x, zero), holds("=", x, one)]));
        table.check("x between -0.0 and 1", |x, _| {
            all(&[holds(">=", x, zero), holds("<=", x, one)])
        });
        table.check("x between 0 and 0", |x, _| holds("=", x, zero));
        table.check("x is null", |x, _| Some(x.is_none()));
        table.check("x < 1 and x > -1", |x, _| {
            all(&[holds("<", x, one), holds(">", x, Some(-1.0))])
        });
        table.check("x > 0 or x is null", |x, _| any(&[holds(">", x, zero), Some(x.is_none())]));
    }
}

#[test]
fn columns_of_floats_compare_as_they_do_elsewhere() {
    let io = io();
    for kind in kinds() {
        let values = special();
        let pairs = values.iter().flat_map(|x| values.iter().map(move |y| (*x, *y)));
        let (x, y): (Vec<_>, Vec<_>) = pairs.unzip();
        let table = Table::new(kind, &x, &y, &io);
        for operator in OPERATORS {
            table.check(&format!("x {operator} y"), |x, y| holds(operator, x, y));
            table.check(&format!("y {operator} x"), |x, y| holds(operator, y, x));
        }
    }
}

/// Decimals are packed as integers, and repeated values as a dictionary, which compare in their
/// own ways.
#[test]
fn encoded_floats_compare_as_plain_ones() {
    let io = io();
    let [double, single, _] = kinds();
    let decimals: Vec<f64> = (-5000..5000).map(|n| f64::from(n) / 100.0).collect();
    let repeated: Vec<f64> = (0..20_000).map(|n| f64::from(n % 7 - 3) / 2.0).collect();
    let ints: Vec<f64> = (-3000..3000).map(f64::from).collect();
    for kind in [double, single] {
        for values in [&decimals, &repeated, &ints] {
            let plain: Vec<_> = values.iter().copied().map(Some).collect();
            // Some zeros with a sign, some NaNs, some nulls.
            let mut mixed = plain.clone();
            for (at, value) in mixed.iter_mut().enumerate() {
                match at % 500 {
                    3 => *value = Some(-0.0),
                    77 => *value = Some(f64::NAN),
                    78 => *value = Some(-f64::NAN),
                    100 => *value = None,
                    _ => {}
                }
            }
            for values in [plain, mixed] {
                let table = Table::new(kind, &values, &values, &io);
                let literals = [("0", 0.0), ("-0.0", -0.0), ("1.5", 1.5), ("-30", -30.0)];
                table.check_literals(&literals);
                table.check("x between -1 and 0", |x, _| {
                    all(&[holds(">=", x, Some(-1.0)), holds("<=", x, Some(0.0))])
                });
            }
        }
    }
}

#[test]
fn statistics_of_floats_skip_as_many_bytes_as_those_of_whole_numbers() {
    const ROWS: i32 = 65_536;
    let io = io();
    let whole = Int32Array::from_iter_values(0..ROWS);
    let floats = Float64Array::from_iter_values((0..ROWS).map(f64::from));
    let mut random = 1_u64;
    let noise = (0..ROWS * 512).map(|_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random.to_le_bytes()[7]
    });
    let item = Arc::new(Field::new_list_field(DataType::UInt8, false));
    let noise = Arc::new(UInt8Array::from_iter_values(noise));
    let payload = FixedSizeListArray::try_new(item, 512, noise, None).unwrap();
    let columns: [(&str, ArrayRef); 3] =
        [("n", Arc::new(whole)), ("x", Arc::new(floats)), ("payload", Arc::new(payload))];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sorted.vortex");
    Writer::write_batch(&path, &RecordBatch::try_from_iter(columns).unwrap());
    let size = std::fs::metadata(&path).unwrap().len();
    let footers = FooterCache::default();
    drop(open(&path, &io, &footers).unwrap());
    let scan = |column: &str, filter: &str| {
        let file = open(&path, &io, &footers).unwrap();
        let found = rows(&file, &plan(&["n", "payload"], Some(&format!("{column} {filter}"))));
        let values =
            |batch: &RecordBatch| batch.column(0).as_primitive::<Int32Type>().values().to_vec();
        (found.unwrap().iter().flat_map(values).collect::<Vec<_>>(), file.fetched())
    };
    for (filter, expected) in [
        ("< 3", vec![0, 1, 2]),
        ("<= 0", vec![0]),
        ("= 0", vec![0]),
        (">= 65534", vec![65_534, 65_535]),
        ("> 65534", vec![65_535]),
        ("in (0, 1)", vec![0, 1]),
        ("between -7 and 1", vec![0, 1]),
        ("< 0", vec![]),
        ("> 65535", vec![]),
        ("= -1", vec![]),
    ] {
        let (floats, fetched) = scan("x", filter);
        let (whole, least) = scan("n", filter);
        assert_eq!((&floats, &whole), (&expected, &expected), "{filter}");
        let most = if expected.is_empty() { size / 50 } else { size / 2 };
        assert!(least < most && fetched < most, "{filter}: {least}, {fetched} of {size}");
    }
}
