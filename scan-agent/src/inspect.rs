//! `scan-agent inspect`: what a dataset is, for its status.
//!
//! Runs in a Job without any right in the cluster; its answer is one JSON object in the
//! termination log, which the operator reads from the pod's status (4 KiB at most).

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use rpc::shutdown::stopped;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use source::{Credentials, Failure, Object, Reason, Source, SourceConfig};
use tokio::runtime::Handle;

use crate::bridge::{File, FooterCache, Plan, ScanError};
use crate::schema::Column;
use crate::serve::dataset::{unannounced_nulls, vortex_objects};

/// Most bytes of a termination message that kubelet keeps.
const RESULT_BYTES: usize = 4096;
/// Columns listed by name; beyond, only their number.
const MAX_COLUMNS_LISTED: usize = 64;

/// What to look at, as the operator renders it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    format: Format,
    source: SourceConfig,
}

#[derive(Debug, Clone, Copy, Deserialize)]
enum Format {
    Vortex,
    Files,
}

/// What a dataset is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Vortex files.
    pub files: usize,
    /// Rows in all of them; none if they are just files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Number of columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub columns: Option<usize>,
    /// sha256 of names and types.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema_digest: Option<String>,
    /// sha256 of paths, sizes and identities: changes when any file does.
    pub revision: String,
    /// Names and types, if they are few.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub column_list: Vec<String>,
}

/// Inspects and writes the result; the exit code says whether it was good. SIGTERM ends it at once.
pub async fn run(
    config: String,
    keys: Result<Option<Credentials>, Failure>,
    result: &Path,
) -> anyhow::Result<ExitCode> {
    let mut stop = rpc::shutdown::on_signal().context("install signal handlers")?;
    let io = Handle::current();
    let looking = tokio::task::spawn_blocking(move || look(&config, keys, &io));
    let (text, is_good) = tokio::select! {
        looked = looking => match looked.context("inspect")? {
            Ok(report) => (serde_json::json!({ "ok": report }), true),
            Err(failure) => (serde_json::json!({ "error": failure }), false),
        },
        () = stopped(&mut stop) => (interrupted("the dataset was not inspected to the end"), false),
    };
    write_result(&text, result)?;
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn look(
    config: &str,
    keys: Result<Option<Credentials>, Failure>,
    io: &Handle,
) -> Result<Report, Failure> {
    let bad = |e| Failure::new(Reason::StoreUnavailable, format!("parse --config: {e}"));
    let keys = keys?;
    let config: Config = serde_json::from_str(config).map_err(bad)?;
    config.source.validate()?;
    let source = source::open(&crate::args::with_keys(config.source, keys))?;
    match config.format {
        Format::Vortex => inspect(&source, io),
        Format::Files => count(source.as_ref(), io),
    }
}

/// The result of a Job that was asked to end: nothing is wrong with the dataset.
pub(crate) fn interrupted(how_far: &str) -> serde_json::Value {
    let message = format!("ended by SIGTERM: {how_far}");
    tracing::warn!(message, "interrupted");
    serde_json::json!({"error": {"reason": "Interrupted", "message": message}})
}

/// Writes one JSON object to standard output and to `path` if it can be written.
pub(crate) fn write_result(text: &serde_json::Value, path: &Path) -> anyhow::Result<()> {
    use std::io::Write;
    writeln!(std::io::stdout(), "{text}")?;
    if let Err(error) = std::fs::write(path, fit(text.clone())) {
        // Outside Kubernetes there is none.
        tracing::debug!(%error, path = %path.display(), "no termination log");
    }
    Ok(())
}

/// The result with so much left out that kubelet keeps it whole: half a JSON object says nothing.
fn fit(mut result: serde_json::Value) -> String {
    loop {
        let text = result.to_string();
        let excess = text.len().saturating_sub(RESULT_BYTES);
        if excess == 0 || !shorten(&mut result, excess) {
            return text;
        }
    }
}

/// Leaves out what is missed least; false if nothing is left to leave out.
fn shorten(result: &mut serde_json::Value, excess: usize) -> bool {
    let report = result.get_mut("ok").and_then(serde_json::Value::as_object_mut);
    if report.is_some_and(|report| report.remove("columnList").is_some()) {
        return true;
    }
    let failures = result.pointer_mut("/error/failures").and_then(|list| list.as_array_mut());
    if failures.is_some_and(|list| list.pop().is_some()) {
        return true;
    }
    let Some(serde_json::Value::String(message)) = result.pointer_mut("/error/message") else {
        return false;
    };
    // A byte of text takes up to six in JSON.
    let less = message.len().saturating_sub(excess.div_ceil(6));
    let end = message.floor_char_boundary(less);
    let is_shorter = end < message.len();
    message.truncate(end);
    is_shorter
}

/// Opens every file of the dataset and adds it up. Blocks.
pub fn inspect(source: &Arc<dyn Source>, io: &Handle) -> Result<Report, Failure> {
    let objects = vortex_objects(source.as_ref(), io)?;
    let footers = FooterCache::default();
    let mut rows = 0;
    let mut columns: Option<Vec<Column>> = None;
    for object in &objects {
        let file = File::open(source, object, io, &footers)?;
        file.check_layouts()?;
        rows += file.rows();
        let has = file.columns(&Plan::default()).map_err(|error| in_words(object, error))?;
        let expected = columns.get_or_insert_with(|| has.clone());
        check_fits(&file, object, &has, expected, first(&objects))?;
    }
    let list = names(&columns.unwrap_or_default());
    Ok(Report {
        files: objects.len(),
        rows: Some(rows),
        bytes: objects.iter().map(|object| object.size).sum(),
        columns: Some(list.len()),
        schema_digest: Some(hex::encode(Sha256::digest(list.join("\n")))),
        revision: revision(&objects),
        column_list: if list.len() <= MAX_COLUMNS_LISTED { list } else { Vec::new() },
    })
}

/// Checks that a scan, which announces the columns of the first file, can deliver this one. Of a
/// column that is nullable only here, it reads where nulls may be.
fn check_fits(
    file: &File,
    object: &Object,
    has: &[Column],
    expected: &[Column],
    first: &str,
) -> Result<(), Failure> {
    if names(expected) != names(has) {
        let message = format!("{} has other columns than {first}", object.path);
        return Err(Failure::new(Reason::CorruptFile, message));
    }
    for (column, _) in
        has.iter().zip(expected).filter(|(has, first)| has.nullable && !first.nullable)
    {
        if file.has_nulls(&column.name).map_err(|error| in_words(object, error))? {
            return Err(unannounced_nulls(&column.name, &object.path, first));
        }
    }
    Ok(())
}

fn in_words(object: &Object, error: ScanError) -> Failure {
    match error {
        ScanError::Source(failure) => failure,
        other => Failure::new(Reason::UnknownEncoding, format!("{}: {other}", object.path)),
    }
}

/// Files of any kind: only their number, bytes and revision.
fn count(source: &dyn Source, io: &Handle) -> Result<Report, Failure> {
    let objects = io.block_on(source.list())?;
    Ok(Report {
        files: objects.len(),
        rows: None,
        bytes: objects.iter().map(|object| object.size).sum(),
        columns: None,
        schema_digest: None,
        revision: revision(&objects),
        column_list: Vec::new(),
    })
}

fn names(columns: &[Column]) -> Vec<String> {
    columns.iter().map(|column| format!("{}: {}", column.name, column.kind)).collect()
}

fn first(objects: &[Object]) -> &str {
    objects.first().map_or("", |object| &object.path)
}

fn revision(objects: &[Object]) -> String {
    let mut hash = Sha256::new();
    for object in objects {
        hash.update(format!("{}\0{}\0{}\n", object.path, object.size, object.identity));
    }
    hex::encode(hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn fitted(result: Value) -> Value {
        let text = fit(result);
        assert!(text.len() <= RESULT_BYTES, "{} bytes", text.len());
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn nulls_that_a_scan_would_not_announce_are_found_beforehand() {
        use arrow_array::{ArrayRef, Int32Array, RecordBatch};
        let io = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let source: Arc<dyn Source> = Arc::new(source::DirSource::new(dir.path()));
        let write = |name: &str, values: &[Option<i32>], nullable| {
            let x: ArrayRef = Arc::new(values.iter().copied().collect::<Int32Array>());
            let batch = RecordBatch::try_from_iter_with_nullable([("x", x, nullable)]).unwrap();
            crate::bridge::Writer::write_batch(&dir.path().join(name), &batch);
        };
        write("a.vortex", &[Some(1)], false);
        write("b.vortex", &[Some(2), Some(3)], true);
        assert_eq!(inspect(&source, io.handle()).unwrap().rows, Some(3));
        write("c.vortex", &[Some(4), None], true);
        let failure = inspect(&source, io.handle()).unwrap_err();
        let message = "column x has nulls in c.vortex and is not nullable in a.vortex, \
                       the first file; write it as nullable in both";
        assert_eq!((failure.reason, &*failure.message), (Reason::CorruptFile, message));
        write("a.vortex", &[Some(1)], true);
        assert_eq!(inspect(&source, io.handle()).unwrap().rows, Some(5));
    }

    #[test]
    fn a_result_that_is_short_enough_is_kept_as_it_is() {
        let result = json!({"ok": {"rows": 7, "columnList": ["a: i64", "b: utf8"]}});
        assert_eq!(fitted(result.clone()), result);
    }

    #[test]
    fn a_long_result_stays_json_and_keeps_what_matters() {
        let columns: Vec<String> =
            (0..64).map(|n| format!("{n}{}: i64", "x".repeat(200))).collect();
        let kept = fitted(json!({"ok": {"rows": 7, "columns": 64, "columnList": columns}}));
        assert_eq!((&kept["ok"]["rows"], &kept["ok"]["columns"]), (&json!(7), &json!(64)));
        assert_eq!(kept["ok"].get("columnList"), None);

        let failure = json!({"path": "é".repeat(500), "reason": "AccessDenied"});
        let failures = vec![failure; 10];
        let error = json!({"reason": "AccessDenied", "message": "get a", "failures": failures});
        let kept = fitted(json!({"error": error}));
        assert_eq!(kept["error"]["message"], "get a");
        assert_eq!(kept["error"]["failures"].as_array().unwrap().len(), 3);

        let message = "\"é".repeat(5000);
        let kept = fitted(json!({"error": {"reason": "CorruptFile", "message": message}}));
        assert_eq!(kept["error"]["reason"], "CorruptFile");
        let cut = kept["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(cut) && cut.len() > RESULT_BYTES / 2, "{} bytes", cut.len());
    }
}
