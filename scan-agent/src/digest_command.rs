//! `scan-agent digest`: the canonical row digest of files on disk.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use source::{DirSource, Source};
use tokio::runtime::Handle;

use crate::bridge::{File, FooterCache, Plan};
use crate::digest::RowDigest;
use crate::filter::Filter;
use crate::serve::dataset::vortex_objects;

/// Prints `{"rows", "digest", "bytesFetched", "fileBytes"}` of the rows of all files in path order.
pub fn run(
    path: &Path,
    columns: Option<Vec<String>>,
    filter: Option<&str>,
    io: &Handle,
) -> anyhow::Result<ExitCode> {
    let plan = Plan { columns, filter: filter.map(Filter::parse).transpose()? };
    let source: Arc<dyn Source> = Arc::new(DirSource::new(path));
    let report = digest(&source, &plan, io)?;
    writeln!(std::io::stdout(), "{report}")?;
    Ok(ExitCode::SUCCESS)
}

/// Scans every file and digests what comes. Blocks.
pub fn digest(
    source: &Arc<dyn Source>,
    plan: &Plan,
    io: &Handle,
) -> anyhow::Result<serde_json::Value> {
    let objects = vortex_objects(source.as_ref(), io)?;
    let footers = FooterCache::default();
    let mut digest: Option<RowDigest> = None;
    let mut fetched = 0;
    for object in &objects {
        let file = File::open(source, object, io, &footers)?;
        let columns = file.columns(plan)?;
        let hash = digest.get_or_insert_with(|| RowDigest::new(&columns));
        let mut failed = None;
        file.scan(plan, &mut |batch| match hash.update(&batch) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        fetched += file.fetched();
    }
    let rows = digest.as_ref().map_or(0, RowDigest::rows);
    Ok(serde_json::json!({
        "rows": rows,
        "digest": digest.map(RowDigest::finish),
        "bytesFetched": fetched,
        "fileBytes": objects.iter().map(|object| object.size).sum::<u64>(),
    }))
}
