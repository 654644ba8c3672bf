//! One client's scan, on a thread of its own: decode, place in the ring, send the descriptor.
//!
//! A second thread reads releases. A client that goes away ends the scan, and everything it held
//! goes with the session. A client that stays may take as long as it likes between batches, as a
//! training loop does that saves or evaluates: its session, with its ring and its place among the
//! scans at once, ends when the client closes its socket, and that is when its process ends at the
//! latest.

use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use arrow_array::{Array, ArrayRef, RecordBatch};
use ring::fd::{FdError, LineReader, send_line};
use source::{Failure, Object, Reason};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::dataset::{Dataset, Datasets, unannounced_nulls};
use super::layout::{self, Layout, LayoutError};
use super::metrics::Metrics;
use super::protocol::{
    Batch, DatasetReply, Done, ErrorReply, Node, Open, Opened, Reply, Request, SLAB_BYTES,
};
use super::slab::{Room, Slab};
use crate::bridge::{File, Plan, ScanError};
use crate::filter::Filter;
use crate::schema::Column;

/// A client that connects must say what it wants within this time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of an error's text when all of it does not fit into a message.
const CUT_MESSAGE: usize = 64 << 10;

/// What every session shares.
#[derive(Debug)]
pub(super) struct Shared {
    /// The pod's datasets.
    pub(super) datasets: Arc<Datasets>,
    /// Where sources do their requests.
    pub(super) io: Handle,
    /// Counters.
    pub(super) metrics: Metrics,
    /// True once the process is asked to end: no scan begins then.
    pub(super) stop: watch::Receiver<bool>,
}

/// Tells a client why it is not served.
pub(super) fn refuse(stream: &UnixStream, why: ErrorReply) {
    // The client may be gone already.
    let _ = tell(stream, why);
}

/// Sends an error, which may list the columns of a dataset, cut to what a message holds.
fn tell(stream: &UnixStream, mut error: ErrorReply) -> Result<(), FdError> {
    match send(stream, &Reply::Error(error.clone())) {
        Err(FdError::LineTooLong) => {
            error.message.truncate(error.message.floor_char_boundary(CUT_MESSAGE));
            send(stream, &Reply::Error(error))
        }
        sent => sent,
    }
}

/// Serves one client to the end. Blocks.
pub(super) fn serve(shared: &Shared, stream: &UnixStream) {
    if let Err(error) = converse(shared, stream) {
        shared.metrics.failed(&error.reason);
        tracing::info!(reason = error.reason, message = error.message, "scan refused or failed");
        refuse(stream, error);
    }
}

fn converse(shared: &Shared, stream: &UnixStream) -> Result<(), ErrorReply> {
    let gone = |error: &dyn std::fmt::Display| ErrorReply::invalid(format!("client: {error}"));
    stream.set_read_timeout(Some(REQUEST_TIMEOUT)).map_err(|e| gone(&e))?;
    let mut reader = LineReader::new();
    let Some(line) = reader.recv_line(stream).map_err(|e| gone(&e))? else {
        return Ok(());
    };
    match Request::parse(&line.bytes)? {
        Request::Open(_) if *shared.stop.borrow() => Err(ErrorReply::stopping()),
        Request::Open(open) => scan(shared, stream, reader, &open),
        Request::Release { .. } | Request::Want { .. } => {
            Err(ErrorReply::invalid("release or want before open"))
        }
        Request::Datasets {} => {
            let list = shared.datasets.all();
            let reply = |d: &Arc<Dataset>| DatasetReply {
                name: d.name.clone(),
                mount_path: d.mount_path.clone(),
            };
            send(stream, &Reply::Datasets(list.iter().map(reply).collect())).map_err(|e| gone(&e))
        }
    }
}

fn scan(
    shared: &Shared,
    stream: &UnixStream,
    reader: LineReader,
    open: &Open,
) -> Result<(), ErrorReply> {
    let dataset = shared.datasets.find(&open.dataset).ok_or_else(|| unknown(shared, open))?;
    let outcome = run(shared, stream, reader, open, &dataset);
    match &outcome {
        Ok(()) => shared.datasets.report(&dataset, None),
        Err(ScanError::Source(failure)) => shared.datasets.report(&dataset, Some(failure)),
        Err(_) => {}
    }
    outcome.map_err(|error| (&error).into())
}

fn unknown(shared: &Shared, open: &Open) -> ErrorReply {
    let all = shared.datasets.all();
    let names: Vec<&str> = all.iter().map(|d| d.name.as_str()).collect();
    ErrorReply {
        reason: "DatasetUnknown".into(),
        message: format!("no dataset {}; this pod has {}", open.dataset, names.join(", ")),
        position: None,
    }
}

fn run(
    shared: &Shared,
    stream: &UnixStream,
    reader: LineReader,
    open: &Open,
    dataset: &Dataset,
) -> Result<(), ScanError> {
    let filter = open.filter.as_deref().map(Filter::parse).transpose()?;
    let plan = Plan { columns: open.columns.clone(), filter };
    let objects = dataset.objects(&shared.io)?;
    let open_file = |object| File::open(&dataset.source, object, &shared.io, &dataset.footers);
    let first = open_file(objects.first().ok_or_else(nothing)?)?;
    first.check(&plan)?;
    let columns = first.columns(&plan)?;
    let slab = Arc::new(Slab::new(open.slab_bytes).map_err(no_room)?);
    let opened = Opened { columns: columns.clone(), files: objects.len(), slab_bytes: slab.size() };
    match send_line(stream, &line(&Reply::Opened(opened)), &[slab.region().fd()]) {
        Ok(()) => {}
        Err(FdError::LineTooLong) => return Err(too_many_columns(columns.len())),
        // The client is gone.
        Err(_) => return Ok(()),
    }
    let releases = spawn_releases(stream, reader, &slab).map_err(no_room)?;
    let first_path = objects.first().map_or("", |object| &object.path);
    let shape = Shape { plan: &plan, columns: &columns, first: first_path };
    let mut sender = Sender::new(stream, &slab, open.batch_rows, &shared.metrics);
    let mut file = Some(first);
    let mut result = Ok(());
    for object in &objects {
        let next = match file.take() {
            Some(first) => Ok(first),
            None => open_file(object).map_err(ScanError::from),
        };
        result = next.and_then(|file| scan_file(&file, object, &shape, &mut sender));
        if result.is_err() || sender.stop.is_some() || slab.is_closed() {
            break;
        }
    }
    let result = result.and_then(|()| sender.finish(&objects));
    // Ends the wait of the thread that reads releases. An error says that the client has gone
    // and ended it already.
    let _ = stream.shutdown(std::net::Shutdown::Read);
    slab.close();
    drop(releases.join());
    result
}

/// What all files of a scan must fit.
struct Shape<'a> {
    plan: &'a Plan,
    /// Columns as they were announced: those of the first file.
    columns: &'a [Column],
    /// Path of the first file.
    first: &'a str,
}

fn scan_file(
    file: &File,
    object: &Object,
    shape: &Shape<'_>,
    sender: &mut Sender<'_>,
) -> Result<(), ScanError> {
    let has = file.columns(shape.plan)?;
    let announced = shape.columns.iter().map(|column| (&column.name, &column.kind));
    if !has.iter().map(|column| (&column.name, &column.kind)).eq(announced) {
        let message =
            format!("{} has other column types than {}, the first file", object.path, shape.first);
        return Err(Failure::new(Reason::CorruptFile, message).into());
    }
    // The client would take a null of these for a value. Without nulls they are as announced.
    let pairs = has.iter().zip(shape.columns).enumerate();
    let strict: Vec<(usize, &str)> = pairs
        .filter(|(_, (has, announced))| has.nullable && !announced.nullable)
        .map(|(at, (has, _))| (at, has.name.as_str()))
        .collect();
    let with_null = |batch: &RecordBatch| {
        let is_null = |at: usize| batch.columns().get(at).is_some_and(|rows| rows.null_count() > 0);
        strict.iter().find(|(at, _)| is_null(*at)).map(|(_, name)| *name)
    };
    let mut nulls = None;
    let result = file.scan(shape.plan, &mut |batch| {
        nulls = with_null(&batch);
        if nulls.is_some() { ControlFlow::Break(()) } else { sender.push(batch) }
    });
    sender.done.bytes_fetched += file.fetched();
    sender.metrics.fetched.inc_by(file.fetched());
    result?;
    match nulls {
        Some(column) => Err(unannounced_nulls(column, &object.path, shape.first).into()),
        None => sender.outcome(),
    }
}

fn nothing() -> Failure {
    Failure::new(Reason::ObjectNotFound, "the dataset has no files")
}

fn no_room(error: impl std::fmt::Display) -> ScanError {
    ScanError::NoRoom(format!("make room for the scan: {error}; scan again later"))
}

fn too_many_columns(count: usize) -> ScanError {
    let message = format!("{count} columns do not fit into one message of the scan; ask for fewer");
    ScanError::Request(message)
}

/// Reads releases until the client is gone or the session shuts its socket.
fn spawn_releases(
    stream: &UnixStream,
    mut reader: LineReader,
    slab: &Arc<Slab>,
) -> std::io::Result<thread::JoinHandle<()>> {
    let (stream, slab) = (stream.try_clone()?, Arc::clone(slab));
    stream.set_read_timeout(None)?;
    thread::Builder::new().name("scan-releases".into()).spawn(move || {
        while let Ok(Some(line)) = reader.recv_line(&stream) {
            match Request::parse(&line.bytes) {
                Ok(Request::Release { id }) => _ = slab.release(id),
                Ok(Request::Want { read }) => slab.want(read),
                _ => break,
            }
        }
        slab.close();
    })
}

fn send(stream: &UnixStream, reply: &Reply) -> Result<(), FdError> {
    send_line(stream, &line(reply), &[])
}

/// A reply has nothing in it that JSON cannot say: no map with other keys than text.
fn line(reply: &Reply) -> String {
    serde_json::to_string(reply).unwrap_or_default()
}

/// Why nothing more is sent.
enum Stop {
    /// The client is gone.
    Gone,
    /// The scan cannot go on.
    Failed(ScanError),
}

/// Cuts decoded batches into the batches that the client asked for, and sends them.
struct Sender<'a> {
    stream: &'a UnixStream,
    slab: &'a Slab,
    metrics: &'a Metrics,
    batch_rows: usize,
    pending: Vec<RecordBatch>,
    pending_rows: usize,
    /// Bytes of the pending rows, without the gaps between buffers.
    pending_bytes: usize,
    /// Once it says why, nothing is sent any more, least of all that all rows were.
    stop: Option<Stop>,
    done: Done,
}

impl<'a> Sender<'a> {
    fn new(
        stream: &'a UnixStream,
        slab: &'a Slab,
        batch_rows: usize,
        metrics: &'a Metrics,
    ) -> Self {
        Self {
            stream,
            slab,
            metrics,
            batch_rows,
            pending: Vec::new(),
            pending_rows: 0,
            pending_bytes: 0,
            stop: None,
            done: Done::default(),
        }
    }

    /// Sends as soon as there are rows for a batch, or so many bytes that no more would fit.
    fn push(&mut self, batch: RecordBatch) -> ControlFlow<()> {
        self.pending_rows += batch.num_rows();
        self.pending_bytes += bytes(&batch);
        self.pending.push(batch);
        while self.pending_rows >= self.batch_rows || self.pending_bytes > self.slab.largest() {
            self.stop = self.send_rows(self.batch_rows).err();
            if self.stop.is_some() {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    /// The error that stopped it, once.
    fn outcome(&mut self) -> Result<(), ScanError> {
        match self.stop.replace(Stop::Gone) {
            Some(Stop::Failed(error)) => Err(error),
            stop => {
                self.stop = stop;
                Ok(())
            }
        }
    }

    fn finish(&mut self, objects: &[Object]) -> Result<(), ScanError> {
        while self.pending_rows > 0 && self.stop.is_none() {
            self.stop = self.send_rows(self.pending_rows.min(self.batch_rows)).err();
        }
        self.outcome()?;
        if self.stop.is_none() && !self.slab.is_closed() {
            self.done.file_bytes = objects.iter().map(|object| object.size).sum();
            // A client that is gone needs no farewell.
            let _ = send(self.stream, &Reply::Done(self.done.clone()));
        }
        Ok(())
    }

    /// Sends up to `rows` pending rows: fewer if there are not so many or they would not fit.
    fn send_rows(&mut self, rows: usize) -> Result<(), Stop> {
        let undeliverable = |error: LayoutError| {
            Stop::Failed(ScanError::Request(format!("{error}; ask for fewer columns")))
        };
        let mut rows = rows;
        loop {
            if rows <= self.pending_rows {
                let (layout, nodes) = self.lay_out(rows).map_err(undeliverable)?;
                if layout.bytes() <= self.slab.largest() || rows == 1 {
                    return self.send_batch(rows, &layout, nodes);
                }
            }
            rows = rows.div_ceil(2);
        }
    }

    fn lay_out(&self, rows: usize) -> Result<(Layout, Vec<Node>), LayoutError> {
        let mut layout = Layout::default();
        let mut nodes = Vec::new();
        let width = self.pending.first().map_or(0, RecordBatch::num_columns);
        for column in 0..width {
            let mut left = rows;
            let mut pieces: Vec<ArrayRef> = Vec::new();
            for batch in &self.pending {
                let take = left.min(batch.num_rows());
                if take > 0 {
                    pieces.push(batch.column(column).slice(0, take));
                    left -= take;
                }
            }
            nodes.push(layout.column(&pieces)?);
        }
        Ok((layout, nodes))
    }

    fn send_batch(&mut self, rows: usize, layout: &Layout, columns: Vec<Node>) -> Result<(), Stop> {
        let bytes = layout.bytes();
        if bytes > self.slab.largest() {
            return Err(Stop::Failed(too_large(bytes)));
        }
        let Some(Room { id, offset }) = self.slab.take(bytes) else {
            return Err(Stop::Gone);
        };
        let written = layout.write(self.slab.region(), offset);
        written.map_err(|error| Stop::Failed(no_room(error)))?;
        let count = columns.len();
        let mut batch = Batch { id, rows, bytes, columns };
        batch.columns.iter_mut().for_each(|node| shift(node, offset));
        send(self.stream, &Reply::Batch(batch)).map_err(|error| match error {
            FdError::LineTooLong => Stop::Failed(too_many_columns(count)),
            _ => Stop::Gone,
        })?;
        self.drop_rows(rows);
        self.done.rows += rows as u64;
        self.done.batches += 1;
        self.metrics.rows.inc_by(rows as u64);
        Ok(())
    }

    fn drop_rows(&mut self, rows: usize) {
        self.pending_rows -= rows;
        let mut left = rows;
        self.pending.retain_mut(|batch| {
            let take = left.min(batch.num_rows());
            left -= take;
            if take > 0 {
                *batch = batch.slice(take, batch.num_rows() - take);
            }
            batch.num_rows() > 0
        });
        self.pending_bytes = self.pending.iter().map(bytes).sum();
    }
}

fn bytes(batch: &RecordBatch) -> usize {
    batch.columns().iter().map(layout::bytes).sum()
}

/// The answer to a row that does not fit into half of the ring.
fn too_large(row_bytes: usize) -> ScanError {
    let needed = row_bytes.saturating_mul(2);
    let fix = if needed <= *SLAB_BYTES.end() {
        format!("ask for slabBytes of {needed} or more, or for fewer columns")
    } else {
        format!("even the largest, {}, is too small: ask for fewer columns", SLAB_BYTES.end())
    };
    ScanError::Request(format!("a row of {row_bytes} bytes exceeds half of slabBytes; {fix}"))
}

/// Places relative to the batch become places in the ring.
fn shift(node: &mut Node, by: usize) {
    node.buffers.iter_mut().flatten().for_each(|(offset, _)| *offset += by);
    node.children.iter_mut().for_each(|child| shift(child, by));
}

#[cfg(test)]
mod tests;
