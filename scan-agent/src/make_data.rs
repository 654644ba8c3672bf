//! `scan-agent make-data`: rows that anybody can make again, and their digests.
//!
//! Every value is a function of (seed, column, row), so that a second program, in another language,
//! can write the same table without a shared file: `python/tools/make_data.py` does.
//!
//! `mix(n)` is splitmix64's output function of `n`; the stream of column `c` at row `r` is
//! `word(c, r) = mix(seed * 0x9E3779B97F4A7C15 + c * 0xD1B54A32D192ED03 + r * 0x8CB92BA72F3D8DD7)`, wrapping.
//! Columns, in order (w = word):
//!
//! | column | type | value |
//! |---|---|---|
//! | id | i64 | r |
//! | label | i32 | w mod 1000; null where w >> 32 mod 16 is 0 |
//! | score | f64 | (w >> 11) / 2^53 |
//! | price | f32 | (w mod 100000) / 100, rounded to f32 |
//! | taken | `timestamp[us]` | 1 600 000 000 000 000 + r * 250 000 + w mod 1000; null where w >> 32 mod 64 is 0 |
//! | city | utf8 | one of [`CITIES`] by w mod 8, then `-` and w >> 32 mod 100; null where w >> 40 mod 10 is 0 |
//! | flag | bool | w mod 50 is 0 |
//! | image | `list[3072]<u8>` | bytes of word(7, r * 384 + i) for i below 384, little-endian |

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use arrow_array::types::Float32Type;
use arrow_array::{
    ArrayRef, BooleanArray, FixedSizeListArray, Float64Array, Int32Array, Int64Array,
    PrimitiveArray, RecordBatch, StringArray, TimestampMicrosecondArray, UInt8Array,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use sha2::{Digest, Sha256};
use source::{DirSource, Failure, Reason, Source};
use tokio::runtime::Handle;

use crate::bridge::{File, FooterCache, Plan, Writer};
use crate::digest::RowDigest;
use crate::schema::Column;

/// Words of the column `city`.
const CITIES: [&str; 8] =
    ["oslo", "bergen", "trondheim", "tromsø", "narvik", "stavanger", "bodø", "ålesund"];
/// Bytes of an image: 32 × 32 × 3.
const IMAGE_BYTES: usize = 3072;
/// Bytes of a row before encoding, for choosing the number of rows.
const ROW_BYTES: u64 = 3072 + 48;
/// Rows made at a time.
const BATCH_ROWS: u64 = 4096;

/// Makes about `bytes` of rows in `files` files below `out`, and `digests.json` beside them.
pub fn synthetic(bytes: u64, files: u32, seed: u64, out: &Path) -> anyhow::Result<()> {
    let rows = (bytes / ROW_BYTES).max(1);
    let files = u64::from(files.max(1)).min(rows);
    std::fs::create_dir_all(out).with_context(|| format!("make --out {}", out.display()))?;
    let schema = schema();
    let writer = Writer::new(Arc::clone(&schema));
    let mut digest = RowDigest::new(&columns(&schema)?);
    let mut written = Vec::new();
    for file in 0..files {
        let (first, last) = (rows * file / files, rows * (file + 1) / files);
        let path = out.join(format!("part-{file:05}.vortex"));
        let mut starts = (first..last).step_by(usize::try_from(BATCH_ROWS)?);
        let mut batches = std::iter::from_fn(|| {
            let start = starts.next()?;
            Some(batch(&schema, seed, start, last.min(start + BATCH_ROWS)).and_then(|batch| {
                digest.update(&batch).map_err(|e| internal(&e))?;
                Ok(batch)
            }))
        });
        writer.write(&path, &mut batches)?;
        written.push(path);
    }
    write_digests(out, &written, digest)
}

/// Writes the rows of `from` again, with our writer.
pub fn rewrite(from: &Path, out: &Path, io: &Handle) -> anyhow::Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("make --out {}", out.display()))?;
    let source: Arc<dyn Source> = Arc::new(DirSource::new(from));
    let objects = io.block_on(source.list())?;
    let object = objects.first().context("--from has no file")?;
    let file = File::open(&source, object, io, &FooterCache::default())?;
    let plan = Plan::default();
    let columns = file.columns(&plan)?;
    let fields: Vec<Field> = columns.iter().map(Column::to_arrow).collect();
    let mut digest = RowDigest::new(&columns);
    let mut batches = Vec::new();
    file.scan(&plan, &mut |batch| {
        batches.push(digest.update(&batch).map(|()| batch).map_err(|e| internal(&e)));
        std::ops::ControlFlow::Continue(())
    })?;
    let name = from.file_name().context("--from has no file name")?;
    let path = out.join(name);
    Writer::new(Arc::new(Schema::new(fields))).write(&path, &mut batches.into_iter())?;
    write_digests(out, &[path], digest)
}

fn write_digests(
    out: &Path,
    files: &[std::path::PathBuf],
    digest: RowDigest,
) -> anyhow::Result<()> {
    let mut entries = Vec::new();
    for path in files {
        let mut file = std::fs::File::open(path)?;
        let mut hash = Sha256::new();
        let bytes = std::io::copy(&mut file, &mut hash)?;
        entries.push(serde_json::json!({
            "path": path.file_name().and_then(|name| name.to_str()),
            "bytes": bytes,
            "sha256": hex::encode(hash.finalize()),
        }));
    }
    let rows = digest.rows();
    let text = serde_json::json!({ "rows": rows, "digest": digest.finish(), "files": entries });
    std::fs::write(out.join("digests.json"), serde_json::to_string_pretty(&text)?)?;
    Ok(())
}

fn internal(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Reason::CorruptFile, error.to_string())
}

fn columns(schema: &Schema) -> anyhow::Result<Vec<Column>> {
    schema.fields().iter().map(|field| Ok(Column::from_arrow(field)?)).collect()
}

fn schema() -> SchemaRef {
    let item = Arc::new(Field::new_list_field(DataType::UInt8, false));
    let width = i32::try_from(IMAGE_BYTES).unwrap_or(i32::MAX);
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("label", DataType::Int32, true),
        Field::new("score", DataType::Float64, false),
        Field::new("price", DataType::Float32, false),
        Field::new("taken", DataType::Timestamp(TimeUnit::Microsecond, None), true),
        Field::new("city", DataType::Utf8, true),
        Field::new("flag", DataType::Boolean, false),
        Field::new("image", DataType::FixedSizeList(item, width), false),
    ]))
}

fn mix(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    n ^ (n >> 31)
}

fn word(seed: u64, column: u64, row: u64) -> u64 {
    let seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let column = column.wrapping_mul(0xD1B5_4A32_D192_ED03);
    mix(seed.wrapping_add(column).wrapping_add(row.wrapping_mul(0x8CB9_2BA7_2F3D_8DD7)))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "the values are below the bounds that the module's table gives"
)]
fn batch(schema: &SchemaRef, seed: u64, first: u64, last: u64) -> Result<RecordBatch, Failure> {
    let rows = || first..last;
    let words = |column: u64| rows().map(move |row| word(seed, column, row));
    let label = |w: u64| (!(w >> 32).is_multiple_of(16)).then_some((w % 1000) as i32);
    let taken = |row: u64| {
        let w = word(seed, 4, row);
        let at = 1_600_000_000_000_000 + row * 250_000 + w % 1000;
        (!(w >> 32).is_multiple_of(64)).then_some(at.cast_signed())
    };
    let city = |w: u64| {
        let name = CITIES.get((w % 8) as usize)?;
        (!(w >> 40).is_multiple_of(10)).then(|| format!("{name}-{}", (w >> 32) % 100))
    };
    let mut pixels = Vec::with_capacity((last - first) as usize * IMAGE_BYTES);
    for row in rows() {
        let words = (row * 384..(row + 1) * 384).map(|i| word(seed, 7, i));
        words.for_each(|w| pixels.extend(w.to_le_bytes()));
    }
    let DataType::FixedSizeList(item, width) = schema.field(7).data_type().clone() else {
        return Err(internal(&"image is a list"));
    };
    let image = FixedSizeListArray::try_new(item, width, Arc::new(UInt8Array::from(pixels)), None)
        .map_err(|e| internal(&e))?;
    let price = words(3).map(|w| (w % 100_000) as f32 / 100.0);
    let arrays: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(rows().map(u64::cast_signed))),
        Arc::new(Int32Array::from_iter(words(1).map(label))),
        Arc::new(Float64Array::from_iter_values(
            words(2).map(|w| (w >> 11) as f64 / (1_u64 << 53) as f64),
        )),
        Arc::new(PrimitiveArray::<Float32Type>::from_iter_values(price)),
        Arc::new(TimestampMicrosecondArray::from_iter(rows().map(taken))),
        Arc::new(StringArray::from_iter(words(5).map(city))),
        Arc::new(BooleanArray::from_iter(words(6).map(|w| Some(w.is_multiple_of(50))))),
        Arc::new(image),
    ];
    RecordBatch::try_new(Arc::clone(schema), arrays).map_err(|e| internal(&e))
}
