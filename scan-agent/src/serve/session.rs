//! One client's scan, on a thread of its own: decode, place in the ring, send the descriptor.
//!
//! A second thread reads releases. A client that goes away ends the scan, and everything it held
//! goes with the session.

use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use arrow_array::{Array, ArrayRef, RecordBatch};
use ring::fd::{LineReader, send_line};
use source::{Failure, Object, Reason};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::dataset::{Dataset, Datasets};
use super::layout::Layout;
use super::metrics::Metrics;
use super::protocol::{Batch, DatasetReply, Done, ErrorReply, Open, Opened, Reply, Request};
use super::slab::{Room, Slab};
use crate::bridge::{File, Plan, ScanError};
use crate::filter::Filter;
use crate::schema::Column;

/// A client that connects must say what it wants within this time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that does not read its socket for this long is gone.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

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
    let _ = send(stream, &Reply::Error(why));
}

/// Serves one client to the end. Blocks.
pub(super) fn serve(shared: &Shared, stream: &UnixStream) {
    if let Err(error) = converse(shared, stream) {
        shared.metrics.failed(&error.reason);
        tracing::info!(reason = error.reason, message = error.message, "scan refused or failed");
        // The client may be gone already.
        let _ = send(stream, &Reply::Error(error));
    }
}

fn converse(shared: &Shared, stream: &UnixStream) -> Result<(), ErrorReply> {
    let gone = |error: &dyn std::fmt::Display| ErrorReply::invalid(format!("client: {error}"));
    stream.set_read_timeout(Some(REQUEST_TIMEOUT)).map_err(|e| gone(&e))?;
    stream.set_write_timeout(Some(SEND_TIMEOUT)).map_err(|e| gone(&e))?;
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
    let slab = Arc::new(Slab::new(open.slab_bytes).map_err(memory)?);
    let opened = Opened { columns: columns.clone(), files: objects.len(), slab_bytes: slab.size() };
    if send_line(stream, &line(&Reply::Opened(opened)), &[slab.region().fd()]).is_err() {
        return Ok(());
    }
    let releases = spawn_releases(stream, reader, &slab).map_err(memory)?;
    let mut sender = Sender::new(stream, &slab, open.batch_rows, &shared.metrics);
    let mut file = Some(first);
    let mut result = Ok(());
    for object in &objects {
        let next = match file.take() {
            Some(first) => Ok(first),
            None => open_file(object).map_err(ScanError::from),
        };
        result = next.and_then(|file| scan_file(&file, object, &plan, &columns, &mut sender));
        if result.is_err() || slab.is_closed() {
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

fn scan_file(
    file: &File,
    object: &Object,
    plan: &Plan,
    columns: &[Column],
    sender: &mut Sender<'_>,
) -> Result<(), ScanError> {
    let has = file.columns(plan)?;
    let is_same =
        has.iter().map(|c| (&c.name, &c.kind)).eq(columns.iter().map(|c| (&c.name, &c.kind)));
    if !is_same {
        let message = format!("{} has other column types than the first file", object.path);
        return Err(Failure::new(Reason::CorruptFile, message).into());
    }
    let result = file.scan(plan, &mut |batch| sender.push(batch));
    sender.done.bytes_fetched += file.fetched();
    sender.metrics.fetched.inc_by(file.fetched());
    result.and_then(|()| sender.error.take().map_or(Ok(()), Err))
}

fn nothing() -> Failure {
    Failure::new(Reason::ObjectNotFound, "the dataset has no files")
}

fn memory(error: impl std::fmt::Display) -> Failure {
    Failure::new(Reason::StoreUnavailable, format!("make room for the scan: {error}"))
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

fn send(stream: &UnixStream, reply: &Reply) -> Result<(), ring::fd::FdError> {
    send_line(stream, &line(reply), &[])
}

/// A reply has nothing in it that JSON cannot say: no map with other keys than text.
fn line(reply: &Reply) -> String {
    serde_json::to_string(reply).unwrap_or_default()
}

/// Cuts decoded batches into the batches that the client asked for, and sends them.
struct Sender<'a> {
    stream: &'a UnixStream,
    slab: &'a Slab,
    metrics: &'a Metrics,
    batch_rows: usize,
    pending: Vec<RecordBatch>,
    pending_rows: usize,
    error: Option<ScanError>,
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
            error: None,
            done: Done::default(),
        }
    }

    fn push(&mut self, batch: RecordBatch) -> ControlFlow<()> {
        self.pending_rows += batch.num_rows();
        self.pending.push(batch);
        while self.pending_rows >= self.batch_rows {
            if let Err(error) = self.send_rows(self.batch_rows) {
                self.error = error;
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    fn finish(&mut self, objects: &[Object]) -> Result<(), ScanError> {
        while self.pending_rows > 0 {
            let rows = self.pending_rows.min(self.batch_rows);
            if let Err(error) = self.send_rows(rows) {
                return error.map_or(Ok(()), Err);
            }
        }
        self.done.file_bytes = objects.iter().map(|object| object.size).sum();
        // A client that is gone needs no farewell.
        let _ = send(self.stream, &Reply::Done(self.done.clone()));
        Ok(())
    }

    /// Sends up to `rows` pending rows: fewer if they would not fit. An error of none means that
    /// the client is gone.
    fn send_rows(&mut self, rows: usize) -> Result<(), Option<ScanError>> {
        let mut rows = rows;
        loop {
            let (layout, nodes) = self.lay_out(rows).map_err(|e| Some(memory(e).into()))?;
            if layout.bytes() <= self.slab.largest() || rows == 1 {
                return self.send_batch(rows, &layout, nodes);
            }
            rows = rows.div_ceil(2);
        }
    }

    fn lay_out(
        &self,
        rows: usize,
    ) -> Result<(Layout, Vec<super::protocol::Node>), super::layout::LayoutError> {
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

    fn send_batch(
        &mut self,
        rows: usize,
        layout: &Layout,
        columns: Vec<super::protocol::Node>,
    ) -> Result<(), Option<ScanError>> {
        if layout.bytes() > self.slab.largest() {
            let message = format!("a row of {} bytes exceeds half of slabBytes", layout.bytes());
            return Err(Some(memory(message).into()));
        }
        let Some(Room { id, offset }) = self.slab.take(layout.bytes()) else {
            return Err(None);
        };
        layout.write(self.slab.region(), offset).map_err(|e| Some(memory(e).into()))?;
        let mut batch = Batch { id, rows, bytes: layout.bytes(), columns };
        batch.columns.iter_mut().for_each(|node| shift(node, offset));
        self.drop_rows(rows);
        self.done.rows += rows as u64;
        self.done.batches += 1;
        self.metrics.rows.inc_by(rows as u64);
        send(self.stream, &Reply::Batch(batch)).map_err(|_| None)
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
    }
}

/// Places relative to the batch become places in the ring.
fn shift(node: &mut super::protocol::Node, by: usize) {
    node.buffers.iter_mut().flatten().for_each(|(offset, _)| *offset += by);
    node.children.iter_mut().for_each(|child| shift(child, by));
}
