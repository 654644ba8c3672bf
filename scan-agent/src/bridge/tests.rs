use std::path::Path;

use arrow_array::RecordBatch;
use source::DirSource;
use tokio::runtime::Runtime;

use super::*;
use crate::filter::Filter;
use crate::{digest_command, make_data};

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

#[test]
fn damaged_files_are_told_apart() {
    let (dir, io) = (made(1 << 20), io());
    let whole = std::fs::read(dir.path().join("part-00000.vortex")).unwrap();
    let open_bytes = |bytes: &[u8]| {
        let path = dir.path().join("damaged.vortex");
        std::fs::write(&path, bytes).unwrap();
        open(&path, &io, &FooterCache::default()).map(drop).unwrap_err().reason
    };
    assert_eq!(open_bytes(&whole[..whole.len() / 2]), Reason::TruncatedFile);
    assert_eq!(open_bytes(b"PAR1 is another format PAR1"), Reason::CorruptFile);
    assert_eq!(open_bytes(b""), Reason::CorruptFile);
    let mut footer = whole;
    let end = footer.len();
    footer[end - 300..end - 8].fill(0xa5);
    assert_eq!(open_bytes(&footer), Reason::CorruptFile);
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
