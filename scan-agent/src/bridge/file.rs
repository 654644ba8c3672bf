//! One Vortex file: opened by its footer, scanned to Arrow batches.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::RecordBatch;
use arrow_schema::Schema;
use futures::{StreamExt, stream};
use source::{Failure, Object, Reason, Source};
use tokio::runtime::Handle;
use vortex::array::expr::{root, select};
use vortex::arrow::ArrowSessionExt;
use vortex::dtype::DType;
use vortex::file::{Footer, OpenOptionsSessionExt, VortexFile};
use vortex::io::runtime::BlockingRuntime;
use vortex::layout::LayoutRef;
use vortex::layout::scan::split_by::SplitBy;
use vortex::layout::session::LayoutSessionExt;

use super::decode::{Decoder, PIECE_BYTES, least_width};
use super::read::Reader;
use super::{Engine, expression, failure, guard, unknown_to_us};
use crate::filter::{self, Filter, FilterError};
use crate::schema::{Column, UnsupportedType};

/// Footers kept for opening again without a request.
const MAX_FOOTERS: usize = 1024;
/// Splits read at once; each may hold [`SPLIT_BYTES`] of file. Only one is decoded at a time.
const SPLITS_IN_FLIGHT: usize = 8;
/// File bytes of one split, about.
const SPLIT_BYTES: u64 = 4 << 20;
/// Most rows of one split: eight zones of the default writer.
const MAX_SPLIT_ROWS: u64 = 65_536;
/// Rows of a zone of the default writer; splits of more rows begin at zones.
const ZONE_ROWS: u64 = 8192;

/// Footers by object identity: a second epoch opens without reading.
#[derive(Default)]
pub struct FooterCache {
    footers: Mutex<HashMap<String, Footer>>,
}

impl std::fmt::Debug for FooterCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FooterCache").finish_non_exhaustive()
    }
}

impl FooterCache {
    fn get(&self, key: &str) -> Option<Footer> {
        let footers = self.footers.lock().unwrap_or_else(PoisonError::into_inner);
        footers.get(key).cloned()
    }

    fn put(&self, key: String, footer: Footer) {
        let mut footers = self.footers.lock().unwrap_or_else(PoisonError::into_inner);
        if footers.len() >= MAX_FOOTERS {
            footers.clear();
        }
        footers.insert(key, footer);
    }
}

/// An open file.
pub struct File {
    engine: Engine,
    inner: VortexFile,
    reader: Reader,
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File").field("object", self.reader.object()).finish_non_exhaustive()
    }
}

/// What to read of a file.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Columns in the order of delivery; none means all.
    pub columns: Option<Vec<String>>,
    /// Rows to deliver; none means all.
    pub filter: Option<Filter>,
}

/// A run of rows of one file.
pub type Split = Range<u64>;

/// Why a scan cannot begin or go on.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ScanError {
    /// The dataset or its file.
    #[error(transparent)]
    Source(#[from] Failure),
    /// The request's filter.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// A projected column cannot be delivered.
    #[error(transparent)]
    Type(#[from] UnsupportedType),
    /// The request is the client's mistake, or asks for more than there may be.
    #[error("{0}")]
    Request(String),
    /// The agent has no room for the scan now.
    #[error("{0}")]
    NoRoom(String),
    /// The request names a column that is not there.
    #[error("no column {name}; the dataset has {have}")]
    NoColumn {
        /// As asked.
        name: String,
        /// The columns there are.
        have: String,
    },
}

impl File {
    /// Opens `object` of `source`; `io` runs the source's requests. Blocks: call it on a thread
    /// that may.
    pub fn open(
        source: &Arc<dyn Source>,
        object: &Object,
        io: &Handle,
        cache: &FooterCache,
    ) -> Result<Self, Failure> {
        let reader = Reader::new(Arc::clone(source), object.clone(), io.clone());
        let name = object.path.clone();
        let key = format!("{} {} {}", source.describe(), name, object.identity);
        let engine = Engine::new();
        let opened = guard(&name, || {
            let options = engine.session.open_options().with_file_size(object.size);
            let options = match cache.get(&key) {
                Some(footer) => options.with_footer(footer),
                None => options,
            };
            engine
                .runtime
                .block_on(options.open_read(reader.clone()))
                .map_err(|error| failure(&name, &error))
        });
        let inner = opened.map_err(|error| open_failure(&reader, error))?;
        cache.put(key, inner.footer().clone());
        Ok(Self { engine, inner, reader })
    }

    /// Rows in the file.
    pub fn rows(&self) -> u64 {
        self.inner.row_count()
    }

    /// Bytes fetched from the source for this file since it was opened.
    pub fn fetched(&self) -> u64 {
        self.reader.fetched()
    }

    /// Columns of the plan's projection, with the types that a scan delivers.
    pub fn columns(&self, plan: &Plan) -> Result<Vec<Column>, ScanError> {
        let all = self.arrow_schema()?;
        let Some(names) = &plan.columns else {
            return all.fields().iter().map(|f| Ok(Column::from_arrow(f)?)).collect();
        };
        let mut columns = Vec::with_capacity(names.len());
        for name in names {
            let field = all.field_with_name(name).map_err(|_| no_column(name, &all))?;
            columns.push(Column::from_arrow(field)?);
        }
        Ok(columns)
    }

    /// Checks that every layout of the file is known, reading nothing. A scan meets only those of
    /// its columns, and encodings show only when their bytes are read.
    pub fn check_layouts(&self) -> Result<(), Failure> {
        let name = &self.reader.object().path;
        guard(name, || {
            let mut layouts = vec![LayoutRef::clone(self.inner.footer().layout())];
            while let Some(layout) = layouts.pop() {
                layouts.extend(layout.children().map_err(|error| failure(name, &error))?);
            }
            Ok(())
        })
    }

    /// Checks that the plan's columns and filter fit the file, reading nothing.
    pub fn check(&self, plan: &Plan) -> Result<(), ScanError> {
        self.columns(plan)?;
        if let Some(filter) = &plan.filter {
            expression::compile(filter, self.inner.dtype())?;
        }
        Ok(())
    }

    /// Whether a column has a null. Reads only zones whose statistics do not say that they have
    /// none.
    pub fn has_nulls(&self, column: &str) -> Result<bool, ScanError> {
        let is_null = Filter::IsNull(filter::Column { name: column.to_owned(), position: 0 });
        let plan = Plan { columns: Some(vec![column.to_owned()]), filter: Some(is_null) };
        let mut has_one = false;
        self.scan(&plan, &mut |_| {
            has_one = true;
            ControlFlow::Break(())
        })?;
        Ok(has_one)
    }

    fn arrow_schema(&self) -> Result<Schema, Failure> {
        let name = &self.reader.object().path;
        let dtype = self.inner.dtype();
        if !matches!(dtype, DType::Struct(..)) || dtype.is_nullable() {
            let message = format!("{name}: rows have type {dtype}, not a set of columns");
            return Err(Failure::new(Reason::CorruptFile, message));
        }
        guard(name, || {
            let schema = self.engine.session.arrow().to_arrow_schema(dtype);
            schema.map_err(|error| failure(name, &error))
        })
    }

    /// Delivers the plan's rows in file order, some megabytes at a time; the sink ends the scan
    /// early by breaking.
    pub fn scan(
        &self,
        plan: &Plan,
        sink: &mut dyn FnMut(RecordBatch) -> ControlFlow<()>,
    ) -> Result<(), ScanError> {
        let columns = self.columns(plan)?;
        let filter = match &plan.filter {
            Some(filter) => Some(expression::compile(filter, self.inner.dtype())?),
            None => None,
        };
        let name = &self.reader.object().path;
        let done = guard(name, || self.run(&columns, filter, sink));
        done.map_err(|error| self.reader.take_failure().unwrap_or(error).into())
    }

    fn run(
        &self,
        columns: &[Column],
        filter: Option<vortex::array::expr::Expression>,
        sink: &mut dyn FnMut(RecordBatch) -> ControlFlow<()>,
    ) -> Result<(), Failure> {
        let object = self.reader.object();
        let wrap = |error| failure(&object.path, &error);
        let dtype = self.inner.dtype();
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        let projection = select(names, root()).bind(dtype).map_err(wrap)?;
        let split_rows = split_rows(object.size, self.rows(), least_width(columns));
        let mut scan = self
            .inner
            .scan()
            .map_err(wrap)?
            .with_projection(projection.optimize_recursive().map_err(wrap)?)
            .with_split_by(SplitBy::RowCount(split_rows));
        if let Some(filter) = filter {
            let bound = filter.bind(dtype).map_err(wrap)?;
            scan = scan.with_filter(bound.optimize_recursive().map_err(wrap)?);
        }
        let mut decoder = Decoder::new(&self.engine.session, columns);
        self.engine.runtime.block_on(async {
            // Not as vortex's own stream, which reads as many splits at once for each core.
            let splits = scan.prepare().and_then(|scan| scan.execute(None)).map_err(wrap)?;
            let mut splits = std::pin::pin!(stream::iter(splits).buffered(SPLITS_IN_FLIGHT));
            while let Some(split) = splits.next().await {
                let Some(split) = split.map_err(wrap)?.filter(|split| !split.is_empty()) else {
                    continue;
                };
                if decoder.decode(split, sink).map_err(wrap)?.is_break() {
                    break;
                }
            }
            Ok(())
        })
    }
}

/// A failure of the source comes first; then, a file that begins like Vortex and does not end
/// like it was cut.
fn open_failure(reader: &Reader, error: Failure) -> Failure {
    const MAGIC: [u8; 4] = *b"VTXF";
    if let Some(failure) = reader.take_failure() {
        return failure;
    }
    let Object { path: name, size, .. } = reader.object();
    let ends = match reader.ends() {
        Ok(ends) => ends,
        Err(failure) => return failure,
    };
    match ends {
        Some((MAGIC, last)) if last != MAGIC => Failure::new(
            Reason::TruncatedFile,
            format!("{name} begins as a Vortex file but does not end as one"),
        ),
        Some((MAGIC, _)) => unknown_root(reader).unwrap_or(error),
        Some(_) => Failure::new(Reason::CorruptFile, format!("{name} is not a Vortex file")),
        None => {
            let message = format!("{name} is not a Vortex file: it has {size} bytes");
            Failure::new(Reason::CorruptFile, message)
        }
    }
}

/// Of an unknown outermost layout vortex tells the place in the file's list and not the name; a
/// session that lets unknown ones pass has the name.
fn unknown_root(reader: &Reader) -> Option<Failure> {
    let name = &reader.object().path;
    let lenient = Engine::new();
    lenient.session.allow_unknown();
    let named = guard(name, || {
        let options = lenient.session.open_options().with_file_size(reader.object().size);
        let opened = lenient.runtime.block_on(options.open_read(reader.clone()));
        let file = opened.map_err(|error| failure(name, &error))?;
        let id = file.footer().layout().encoding_id();
        let is_known = lenient.session.layouts().registry().get(&id).is_some();
        Ok((!is_known).then(|| unknown_to_us(name, &format!("layout {id}"))))
    });
    // What else is wrong with the file was told already.
    named.ok().flatten()
}

fn no_column(name: &str, all: &Schema) -> ScanError {
    let have: Vec<&str> = all.fields().iter().map(|f| f.name().as_str()).collect();
    ScanError::NoColumn { name: name.to_owned(), have: have.join(", ") }
}

/// Rows of a split: about [`SPLIT_BYTES`] of file and, of columns whose values have one width, no
/// more than is decoded at once; whole zones where possible.
fn split_rows(size: u64, rows: u64, width: u64) -> usize {
    let row_bytes = (size / rows.max(1)).max(1);
    let most = (PIECE_BYTES / width.max(1)).max(1);
    let wanted = (SPLIT_BYTES / row_bytes).clamp(64, MAX_SPLIT_ROWS).min(most);
    let rounded =
        if wanted >= ZONE_ROWS { wanted - wanted % ZONE_ROWS } else { 1 << wanted.ilog2() };
    usize::try_from(rounded).unwrap_or(usize::MAX)
}
