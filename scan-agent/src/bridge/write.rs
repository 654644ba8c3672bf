//! Writing Vortex files: for data sets that are made and files that are rewritten.

use std::io::Write;
use std::path::{Path, PathBuf};

use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};
use source::{Failure, Reason};
use vortex::arrow::ArrowSessionExt;
use vortex::file::WriteOptionsSessionExt;

use super::{Engine, failure};

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteSummary {
    /// Rows in the file.
    pub rows: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Writes one file from Arrow batches with vortex's default strategy.
#[derive(Debug)]
pub struct Writer {
    engine: Engine,
    schema: SchemaRef,
}

impl Writer {
    /// A writer of rows of this schema.
    pub fn new(schema: SchemaRef) -> Self {
        Self { engine: Engine::new(), schema }
    }

    /// Writes `batches` to `path`, streaming: memory holds a few batches, not the file.
    pub fn write(
        &self,
        path: &Path,
        batches: &mut dyn Iterator<Item = Result<RecordBatch, Failure>>,
    ) -> Result<WriteSummary, Failure> {
        let name = path.display().to_string();
        let wrap = |error| failure(&name, &error);
        let io = |error: std::io::Error| {
            Failure::new(Reason::StoreUnavailable, format!("write {name}: {error}"))
        };
        let session = &self.engine.session;
        let dtype = session.arrow().from_arrow_schema(&self.schema).map_err(wrap)?;
        let file = std::fs::File::create(PathBuf::from(path)).map_err(io)?;
        let mut out = std::io::BufWriter::new(file);
        let options = session.write_options().blocking(&self.engine.runtime);
        let mut writer = options.writer(&mut out, dtype);
        for batch in batches {
            let array = self.import(batch?).map_err(wrap)?;
            writer.push(array).map_err(wrap)?;
        }
        let summary = writer.finish().map_err(wrap)?;
        out.flush().map_err(io)?;
        Ok(WriteSummary { rows: summary.row_count(), bytes: summary.size() })
    }

    /// Writes one batch to `path`.
    #[cfg(test)]
    pub(crate) fn write_batch(path: &Path, batch: &RecordBatch) {
        let writer = Self::new(batch.schema());
        writer.write(path, &mut std::iter::once(Ok(batch.clone()))).unwrap();
    }

    fn import(&self, batch: RecordBatch) -> vortex::error::VortexResult<vortex::array::ArrayRef> {
        let schema: &Schema = &self.schema;
        self.engine.session.arrow().from_arrow_record_batch(batch, schema)
    }
}
