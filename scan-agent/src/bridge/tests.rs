use std::path::Path;

use arrow_array::RecordBatch;
use source::DirSource;
use tokio::runtime::Runtime;
use vortex::file::OpenOptionsSessionExt;

use super::*;
use crate::filter::Filter;
use crate::{digest_command, make_data};

mod floats;
mod large;

fn io() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// A made data set of about `bytes`.
fn made(bytes: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    make_data::synthetic(bytes, 2, 7, dir.path()).unwrap();
    dir
}

fn digests(dir: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(dir.join("digests.json")).unwrap()).unwrap()
}

fn plan(columns: &[&str], filter: Option<&str>) -> Plan {
    Plan {
        columns: Some(columns.iter().map(|name| (*name).to_owned()).collect()),
        filter: filter.map(|text| Filter::parse(text).unwrap()),
    }
}

fn open(path: &Path, io: &Runtime, footers: &FooterCache) -> Result<File, Failure> {
    let source: Arc<dyn Source> = Arc::new(DirSource::new(path));
    let object = io.block_on(source.list()).unwrap().remove(0);
    File::open(&source, &object, io.handle(), footers)
}

fn rows(file: &File, plan: &Plan) -> Result<Vec<RecordBatch>, ScanError> {
    let mut batches = Vec::new();
    file.scan(plan, &mut |batch| {
        batches.push(batch);
        ControlFlow::Continue(())
    })?;
    Ok(batches)
}

#[test]
fn rows_read_back_have_the_digest_of_the_rows_written() {
    let (dir, io) = (made(4 << 20), io());
    let source: Arc<dyn Source> = Arc::new(DirSource::new(dir.path()));
    let read = digest_command::digest(&source, &Plan::default(), io.handle()).unwrap();
    let made = digests(dir.path());
    assert_eq!(read["digest"], made["digest"]);
    assert_eq!(read["rows"], made["rows"]);
}

#[test]
fn a_projection_and_a_filter_skip_bytes_and_keep_the_right_rows() {
    let (dir, io) = (made(64 << 20), io());
    let footers = FooterCache::default();
    let path = dir.path().join("part-00000.vortex");
    let size = std::fs::metadata(&path).unwrap().len();
    let file = open(&path, &io, &footers).unwrap();
    let total = file.rows();
    let found = rows(&file, &plan(&["label"], None)).unwrap();
    assert_eq!(found.iter().map(|batch| batch.num_rows() as u64).sum::<u64>(), total);
    assert!(file.fetched() < size / 4, "{} of {size} for one column", file.fetched());

    let file = open(&path, &io, &footers).unwrap();
    assert_eq!(file.fetched(), 0, "the footer comes from the cache");
    let found =
        rows(&file, &plan(&["image", "id"], Some("id between 10 and 12 or id = 0"))).unwrap();
    let ids: Vec<i64> = found
        .iter()
        .flat_map(|batch| {
            use arrow_array::cast::AsArray;
            let ids = batch.column(1).as_primitive::<arrow_array::types::Int64Type>();
            ids.values().to_vec()
        })
        .collect();
    assert_eq!(ids, [0, 10, 11, 12]);
    assert!(file.fetched() < size * 3 / 4, "{} of {size} for four rows", file.fetched());
}

#[test]
fn filters_mean_what_they_say() {
    let (dir, io) = (made(8 << 20), io());
    let file = open(&dir.path().join("part-00000.vortex"), &io, &FooterCache::default()).unwrap();
    let count = |filter: &str| {
        let found = rows(&file, &plan(&["id"], Some(filter))).unwrap();
        found.iter().map(RecordBatch::num_rows).sum::<usize>()
    };
    let total = usize::try_from(file.rows()).unwrap();
    assert_eq!(count("id >= 0"), total);
    assert_eq!(count("label is null") + count("label is not null"), total);
    assert_eq!(count("label < 500") + count("label >= 500"), count("label is not null"));
    assert_eq!(count("flag") + count("not flag"), total);
    assert!(count("flag") > 0 && count("flag") < total / 10);
    assert_eq!(count("taken < '2020-09-13 12:26:41' and taken is not null"), 4);
    assert_eq!(count("city in ('oslo-1', 'nowhere')"), count("city = 'oslo-1'"));
    assert_eq!(count("score < 0 or price > 2e6"), 0);
}

#[test]
fn nulls_are_found_by_statistics_where_there_are_none() {
    let (dir, io) = (made(64 << 20), io());
    let path = dir.path().join("part-00000.vortex");
    let footers = FooterCache::default();
    let file = open(&path, &io, &footers).unwrap();
    assert!(file.has_nulls("label").unwrap());
    let file = open(&path, &io, &footers).unwrap();
    assert!(!file.has_nulls("image").unwrap());
    let size = std::fs::metadata(&path).unwrap().len();
    assert!(file.fetched() < size / 10, "{} of {size} for no nulls", file.fetched());
}

#[test]
fn a_request_that_does_not_fit_the_file_is_explained() {
    let (dir, io) = (made(1 << 20), io());
    let file = open(&dir.path().join("part-00000.vortex"), &io, &FooterCache::default()).unwrap();
    let error =
        |columns: &[&str], filter| rows(&file, &plan(columns, filter)).unwrap_err().to_string();
    assert!(error(&["nope"], None).starts_with("no column nope; the dataset has id, label"));
    assert!(error(&["id"], Some("nope = 1")).starts_with("filter, character 1: no column nope"));
    assert!(error(&["id"], Some("label = 'x'")).contains("does not fit type i32"));
    assert!(error(&["id"], Some("id = 1.5")).contains("character 6"));
    assert!(error(&["id"], Some("label = 3000000000")).contains("does not fit"));
    assert!(error(&["id"], Some("city")).contains("not bool"));
    assert!(error(&["id"], Some("id = label")).contains("id is i64 but label is i32"));
}

/// Bytes of the end of a file that hold its footer, with room.
const FOOTER: usize = 32_768;

/// A file and what becomes of it when other bytes are in its place.
struct Sample {
    dir: tempfile::TempDir,
    io: Runtime,
    bytes: Vec<u8>,
}

impl Sample {
    fn new() -> Self {
        let (dir, io) = (made(1 << 20), io());
        let bytes = std::fs::read(dir.path().join("part-00000.vortex")).unwrap();
        Self { dir, io, bytes }
    }

    /// Opens and scans these bytes: rows, or what went wrong and when.
    fn read(&self, bytes: &[u8]) -> Result<usize, (&'static str, Failure)> {
        let path = self.dir.path().join("damaged.vortex");
        std::fs::write(&path, bytes).unwrap();
        let file = open(&path, &self.io, &FooterCache::default()).map_err(|f| ("open", f))?;
        match rows(&file, &Plan::default()) {
            Ok(batches) => Ok(batches.iter().map(RecordBatch::num_rows).sum()),
            Err(ScanError::Source(failure)) => Err(("scan", failure)),
            Err(other) => panic!("{other}"),
        }
    }

    fn says(&self, bytes: &[u8], when: &str, reason: Reason, message: &str) {
        let (at, failure) = self.read(bytes).unwrap_err();
        let said = (at, failure.reason, failure.message.as_str());
        assert_eq!(said, (when, reason, message));
    }

    /// The file with an id of its footer made one that nobody knows, wherever it is named.
    fn renamed(&self, id: &str) -> (Vec<u8>, String) {
        let other = format!("{}Q", id.split_at(id.len() - 1).0);
        let mut bytes = self.bytes.clone();
        let mut at = bytes.len() - FOOTER;
        let mut count = 0;
        while let Some(found) = find(&bytes[at..], id.as_bytes()) {
            let end = at + found + id.len();
            // Not the beginning of a longer id.
            if !bytes[end].is_ascii_lowercase() && !b"_.".contains(&bytes[end]) {
                bytes[end - 1] = b'Q';
                count += 1;
            }
            at = end;
        }
        assert!(count > 0, "{id} is not in the footer");
        (bytes, other)
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

#[test]
fn damaged_files_are_told_apart() {
    let sample = Sample::new();
    let whole = &sample.bytes;
    let corrupt = |bytes: &[u8], message| sample.says(bytes, "open", Reason::CorruptFile, message);
    let cut = "damaged.vortex begins as a Vortex file but does not end as one";
    sample.says(&whole[..whole.len() / 2], "open", Reason::TruncatedFile, cut);
    sample.says(
        b"VTXF",
        "open",
        Reason::CorruptFile,
        "damaged.vortex: Initial read must be at least EOF_SIZE (8) bytes",
    );
    sample.says(b"VTXF\x01\0", "open", Reason::TruncatedFile, cut);
    corrupt(b"PAR1 is another format PAR1", "damaged.vortex is not a Vortex file");
    corrupt(b"", "damaged.vortex is not a Vortex file: it has 0 bytes");
    corrupt(b"VTX", "damaged.vortex is not a Vortex file: it has 3 bytes");
    let short = "damaged.vortex: Initial read must be at least 263 bytes to include the Postscript";
    corrupt(b"VTXF\x01\0\xff\0VTXF", short);
    let mut footer = whole.clone();
    let end = footer.len();
    footer[end - 300..end - 8].fill(0xa5);
    let (at, failure) = sample.read(&footer).unwrap_err();
    assert_eq!((at, failure.reason), ("open", Reason::CorruptFile), "{failure}");
}

#[test]
fn segments_outside_the_file_are_a_corrupt_file() {
    let sample = Sample::new();
    let engine = Engine::new();
    let file = engine.session.open_options().open_buffer(sample.bytes.clone()).unwrap();
    let last = *file.footer().segment_map().last().unwrap();
    let size = sample.bytes.len();
    let spec = [&last.offset.to_le_bytes()[..], &last.length.to_le_bytes()].concat();
    let at = size - FOOTER + find(&sample.bytes[size - FOOTER..], &spec).unwrap();
    for offset in [size as u64, size as u64 - u64::from(last.length) + 1, u64::MAX] {
        let mut bytes = sample.bytes.clone();
        bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        let message = format!(
            "damaged.vortex: Segment at offset {offset} with length {} extends past the end of \
             the {size}-byte file",
            last.length
        );
        sample.says(&bytes, "open", Reason::CorruptFile, &message);
    }
}

#[test]
fn a_part_of_the_format_that_is_unknown_is_named_with_what_this_build_reads() {
    let sample = Sample::new();
    let fix = "this build reads files of vortex 0.36 to 0.90";
    let cases = [
        // Of layouts the outermost is needed to open, the others when they are scanned.
        ("vortex.struct", "open", "layout"),
        ("vortex.dict", "scan", "layout"),
        ("vortex.flat", "scan", "layout"),
        ("vortex.zoned", "scan", "layout"),
        ("vortex.primitive", "scan", "array encoding"),
        ("vortex.fixed_size_list", "scan", "array encoding"),
        ("vortex.timestamp", "open", "extension type"),
        ("vortex.max", "scan", "statistic"),
    ];
    for (id, when, kind) in cases {
        let (bytes, other) = sample.renamed(id);
        let message = format!("damaged.vortex: unknown {kind} {other}; {fix}");
        sample.says(&bytes, when, Reason::UnknownEncoding, &message);
    }
    let mut newer = sample.bytes.clone();
    let version_at = newer.len() - 8;
    newer[version_at] = 2;
    let message = format!("damaged.vortex: unknown version of the file format: 2; {fix}");
    sample.says(&newer, "open", Reason::UnknownEncoding, &message);
}

/// A writer lists all that it might have used.
#[test]
fn an_unknown_encoding_that_a_file_only_lists_is_no_matter() {
    let sample = Sample::new();
    let all = sample.read(&sample.bytes).unwrap();
    for id in ["vortex.pco", "vortex.variant", "fastlanes.rle"] {
        assert_eq!(sample.read(&sample.renamed(id).0), Ok(all), "{id}");
    }
}

#[test]
fn the_layouts_of_a_file_are_checked_without_a_scan() {
    let sample = Sample::new();
    let path = sample.dir.path().join("layouts.vortex");
    let check = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        open(&path, &sample.io, &FooterCache::default()).unwrap().check_layouts()
    };
    assert_eq!(check(&sample.bytes), Ok(()));
    for id in ["vortex.flat", "vortex.zoned"] {
        let failure = check(&sample.renamed(id).0).unwrap_err();
        assert_eq!(failure.reason, Reason::UnknownEncoding, "{failure}");
    }
}

#[test]
fn the_versions_that_messages_name_are_those_of_the_build() {
    let manifest = include_str!("../../../Cargo.toml");
    let (_, newest) = READS.split_once(" to ").unwrap();
    assert!(manifest.contains(&format!("vortex = {{ version = \"={newest}.")), "{READS}");
}

#[test]
fn a_file_replaced_during_the_scan_is_a_changed_dataset() {
    let (dir, io) = (made(16 << 20), io());
    let path = dir.path().join("part-00000.vortex");
    let file = open(&path, &io, &FooterCache::default()).unwrap();
    std::fs::copy(dir.path().join("part-00001.vortex"), dir.path().join("new")).unwrap();
    std::fs::rename(dir.path().join("new"), &path).unwrap();
    match rows(&file, &Plan::default()) {
        Err(ScanError::Source(failure)) => assert_eq!(failure.reason, Reason::DatasetChanged),
        other => panic!("{:?}", other.map(|batches| batches.len())),
    }
}
