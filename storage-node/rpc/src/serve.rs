//! The answering end: each connection's requests run side by side, within bounds.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::metrics::counter::Counter;
use tokio::io::BufReader;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use crate::codec::Wire;
use crate::error::{Code, Error};
use crate::frame::Kind;
use crate::message::Request;
use crate::shutdown::stopped;
use crate::transport::{
    FRAME_TIMEOUT, Frame, ReadError, read_header, read_rest, tune, write_frame,
};

/// Requests of one connection that are under way at once; further ones wait in the socket.
const IN_FLIGHT_MAX: usize = 256;
/// What one connection may take.
#[derive(Clone, Copy)]
struct Limits {
    /// Bytes of requests in memory. A longer request waits until all of this is free.
    bytes: u32,
    /// Time for the peer to send a request that it began, or to take an answer.
    frame: Duration,
}

/// As many bytes as [`IN_FLIGHT_MAX`] requests of the usual 1 MiB.
const LIMITS: Limits = Limits { bytes: 256 << 20, frame: FRAME_TIMEOUT };
/// Connections at once; further ones are closed at once.
const CONNECTIONS_MAX: usize = 4096;

/// A request to be answered.
#[derive(Debug)]
pub struct Call {
    /// The message.
    pub kind: Kind,
    /// Its head.
    pub head: Bytes,
    /// Its payload.
    pub payload: Bytes,
    /// Who sent it.
    pub peer: SocketAddr,
}

impl Call {
    /// Reads the head as a request.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`].
    pub fn decode<R: Request>(&self) -> Result<R, Error> {
        Ok(R::from_bytes(self.head.clone())?)
    }

    /// The refusal of a kind that the server does not know.
    #[must_use]
    pub fn unknown(&self) -> Error {
        Error::new(Code::UnknownKind, format!("no request has the kind {:#06x}", self.kind.0))
    }
}

/// A good answer.
#[derive(Clone, Debug)]
pub struct Reply {
    head: Bytes,
    payload: Bytes,
}

impl Reply {
    /// An answer without a payload.
    pub fn new<T: Wire>(head: &T) -> Self {
        Self { head: head.to_bytes(), payload: Bytes::new() }
    }

    /// An answer with a payload.
    pub fn with_payload<T: Wire>(head: &T, payload: Bytes) -> Self {
        Self { head: head.to_bytes(), payload }
    }
}

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request. Runs beside others of the same connection.
    fn handle(&self, call: Call) -> impl Future<Output = Result<Reply, Error>> + Send;
}

/// Accepts connections until `stop` becomes true, then lets requests under way finish.
pub async fn serve<H: Handler>(
    listener: TcpListener,
    handler: Arc<H>,
    mut stop: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    let stop_connections = stop.clone();
    loop {
        tokio::select! {
            () = stopped(&mut stop) => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) if connections.len() < CONNECTIONS_MAX => {
                    connections.spawn(connection(stream, peer, Arc::clone(&handler), stop_connections.clone(), LIMITS));
                }
                Ok((_, peer)) => tracing::warn!(%peer, "refuse a connection: too many"),
                Err(error) => {
                    // Out of descriptors: give those in use a moment to close.
                    tracing::warn!(%error, "accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
    while connections.join_next().await.is_some() {}
}

async fn connection<H: Handler>(
    stream: TcpStream,
    peer: SocketAddr,
    handler: Arc<H>,
    mut stop: watch::Receiver<bool>,
    limits: Limits,
) {
    if let Err(error) = tune(&stream) {
        tracing::debug!(%peer, %error, "set socket options");
    }
    let (read, write) = stream.into_split();
    let mut read = BufReader::with_capacity(64 << 10, read);
    let (answers, queue) = mpsc::channel(IN_FLIGHT_MAX);
    let mut writer = tokio::spawn(transmit(write, queue, limits.frame));
    let room = Room {
        slots: Arc::new(Semaphore::new(IN_FLIGHT_MAX)),
        bytes: Arc::new(Semaphore::new(limits.bytes as usize)),
        limits,
    };
    loop {
        let next = tokio::select! {
            () = stopped(&mut stop) => break,
            // Nobody would be answered any more.
            _ = &mut writer => return,
            next = room.request(&mut read) => next,
        };
        let (frame, held) = match next {
            Ok(Some(next)) => next,
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%peer, %error, "close a connection");
                break;
            }
        };
        let (handler, answers) = (Arc::clone(&handler), answers.clone());
        tokio::spawn(async move {
            let answer = answer(&*handler, frame, peer).await;
            // The connection may be gone: then nobody waits for the answer.
            drop(answers.send(answer).await);
            drop(held);
        });
    }
    drop(answers);
    if let Err(error) = writer.await {
        tracing::debug!(%peer, %error, "the writer ended");
    }
}

/// What the requests of one connection may take; further ones wait in the socket.
struct Room {
    slots: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    limits: Limits,
}

type Held = [OwnedSemaphorePermit; 2];

impl Room {
    /// The next request, in memory only once there is room for it; `None` when the peer sends no
    /// further ones.
    async fn request<R>(&self, read: &mut R) -> Result<Option<(Frame, Held)>, ReadError>
    where
        R: tokio::io::AsyncRead + Unpin,
    {
        let closed = |_| std::io::Error::other("the room of a connection is closed");
        let slot = Arc::clone(&self.slots).acquire_owned().await.map_err(closed)?;
        let header = match read_header(read, self.limits.frame).await? {
            Some(header) if !header.response => header,
            _ => return Ok(None),
        };
        let length = header.head_length.saturating_add(header.payload_length);
        let bytes = Arc::clone(&self.bytes).acquire_many_owned(length.min(self.limits.bytes));
        let held = [slot, bytes.await.map_err(closed)?];
        let frame = read_rest(read, header, self.limits.frame).await?;
        Ok(Some((frame, held)))
    }
}

async fn answer<H: Handler>(handler: &H, frame: Frame, peer: SocketAddr) -> Frame {
    let (kind, id) = (frame.header.kind, frame.header.request_id);
    let call = Call { kind, head: frame.head, payload: frame.payload, peer };
    let outcome = guarded(kind, async { handler.handle(call).await }).await;
    let (status, reply) = match outcome {
        Ok(reply) => (0, reply),
        Err(error) => (error.code.number(), Reply { head: error.to_head(), payload: Bytes::new() }),
    };
    let mut frame = Frame::new(kind, id, reply.head, reply.payload).unwrap_or_else(|error| {
        let error = Error::new(Code::Internal, format!("the answer is too long: {error}"));
        empty_failure(kind, id, &error)
    });
    frame.header.response = true;
    if status != 0 {
        frame.header.status = status;
    }
    frame
}

static PANICS: LazyLock<Counter> = LazyLock::new(Counter::default);

/// Counts the requests of this process whose handler panicked, for its metrics.
#[must_use]
pub fn panics() -> Counter {
    PANICS.clone()
}

/// Makes a failure of a panic: else nobody would answer, and the caller waited until its deadline.
async fn guarded(
    kind: Kind,
    handled: impl Future<Output = Result<Reply, Error>>,
) -> Result<Reply, Error> {
    let mut handled = pin!(handled);
    poll_fn(|context| {
        // What the panic left half done is gone with the future, which is not polled again. Locks
        // of the handler are poisoned, as by any panic.
        catch_unwind(AssertUnwindSafe(|| handled.as_mut().poll(context))).unwrap_or_else(|panic| {
            PANICS.inc();
            let said = said(&*panic);
            tracing::error!(kind = kind.name(), panic = said, "a handler panicked");
            Poll::Ready(Err(Error::new(Code::Internal, format!("the handler panicked: {said}"))))
        })
    })
    .await
}

fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("something that is no text")
}

fn empty_failure(kind: Kind, request_id: u64, error: &Error) -> Frame {
    let head = error.to_head();
    let header = crate::frame::Header {
        kind,
        response: true,
        request_id,
        status: error.code.number(),
        head_length: u32::try_from(head.len()).unwrap_or(u32::MAX),
        payload_length: 0,
        head_checksum: crc32c::crc32c(&head),
        deadline_ms: 0,
    };
    Frame { header, head, payload: Bytes::new() }
}

async fn transmit(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Frame>, limit: Duration) {
    while let Some(frame) = queue.recv().await {
        let written = tokio::time::timeout(limit, write_frame(&mut write, &frame)).await;
        if !matches!(written, Ok(Ok(()))) {
            // Broken, or the peer takes no answers: those behind this one have no taker either.
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    use std::time::Instant;

    use super::*;

    const PAYLOAD: usize = 64 << 10;
    const BYTES_MAX: u32 = 4 << 16;

    /// Answers nothing before it is let go; counts what it holds.
    struct Slow {
        requests: AtomicUsize,
        bytes: AtomicUsize,
        most: [AtomicUsize; 2],
        answered: AtomicU64,
        go: Semaphore,
    }

    impl Handler for Slow {
        async fn handle(&self, call: Call) -> Result<Reply, Error> {
            let requests = self.requests.fetch_add(1, Ordering::SeqCst) + 1;
            let bytes = self.bytes.fetch_add(call.payload.len(), Ordering::SeqCst);
            self.most[0].fetch_max(requests, Ordering::SeqCst);
            self.most[1].fetch_max(bytes + call.payload.len(), Ordering::SeqCst);
            self.go.acquire().await.unwrap().forget();
            self.requests.fetch_sub(1, Ordering::SeqCst);
            self.bytes.fetch_sub(call.payload.len(), Ordering::SeqCst);
            self.answered.fetch_add(1, Ordering::SeqCst);
            Ok(Reply::new(&()))
        }
    }

    async fn until(what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so() {
            assert!(Instant::now() < deadline, "never {what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Sends `count` requests at once and sees how much of them is in memory; then all are answered.
    async fn flood(count: usize, payload: usize, most_at_once: [usize; 2]) {
        let slow = Arc::new(Slow {
            requests: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            most: Default::default(),
            answered: AtomicU64::new(0),
            go: Semaphore::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (near, peer) = listener.accept().await.unwrap();
        let (_stop, stopped) = watch::channel(false);
        let limits = Limits { bytes: BYTES_MAX, ..LIMITS };
        tokio::spawn(connection(near, peer, Arc::clone(&slow), stopped, limits));
        let (mut read, mut write) = stream.into_split();
        let sender = tokio::spawn(async move {
            for id in 0..count as u64 {
                let payload = Bytes::from(vec![1; payload]);
                let frame = Frame::new(Kind(9), id, Bytes::new(), payload).unwrap();
                write_frame(&mut write, &frame).await.unwrap();
            }
            write
        });
        let full = most_at_once[0].min(most_at_once[1] / payload.max(1));
        until("full", || slow.requests.load(Ordering::SeqCst) >= full).await;
        slow.go.add_permits(count);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..count {
            let answer = crate::transport::read_frame(&mut read).await.unwrap().unwrap();
            assert!(seen.insert(answer.header.request_id), "answered twice");
        }
        drop(sender.await.unwrap());
        assert_eq!(slow.answered.load(Ordering::SeqCst), count as u64);
        let most = [0, 1].map(|i| slow.most[i].load(Ordering::SeqCst));
        assert!(most[0] <= most_at_once[0] && most[1] <= most_at_once[1], "{most:?}");
    }

    #[tokio::test]
    async fn a_flood_of_requests_waits_in_the_socket_and_is_answered_in_the_end() {
        let limits = [IN_FLIGHT_MAX, BYTES_MAX as usize];
        flood(3 * IN_FLIGHT_MAX, 0, limits).await;
        flood(40, PAYLOAD, limits).await;
    }

    #[tokio::test]
    async fn a_request_longer_than_all_room_has_it_for_itself() {
        flood(3, 2 * BYTES_MAX as usize, [1, 2 * BYTES_MAX as usize]).await;
    }

    struct Panics;

    impl Handler for Panics {
        async fn handle(&self, call: Call) -> Result<Reply, Error> {
            match call.kind.0 {
                1 => panic!("a text"),
                2 => panic!("number {}", call.payload.len()),
                3 => std::panic::panic_any(3),
                4 => {
                    tokio::task::yield_now().await;
                    panic!("later")
                }
                _ => Ok(Reply::new(&())),
            }
        }
    }

    #[tokio::test]
    async fn a_handler_that_panics_answers_with_what_it_said_and_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (near, peer) = listener.accept().await.unwrap();
        let (_stop, stopped) = watch::channel(false);
        tokio::spawn(connection(near, peer, Arc::new(Panics), stopped, LIMITS));
        let before = panics().get();
        let expected = ["a text", "number 0", "something that is no text", "later"];
        for (kind, expected) in (1..).zip(expected) {
            let frame = Frame::new(Kind(kind), kind.into(), Bytes::new(), Bytes::new()).unwrap();
            write_frame(&mut stream, &frame).await.unwrap();
            let answer = crate::transport::read_frame(&mut stream);
            let answer = tokio::time::timeout(Duration::from_secs(30), answer).await;
            let answer = answer.expect("an answer").unwrap().unwrap();
            let error = Error::from_head(answer.header.status, answer.head);
            assert_eq!(error.code, Code::Internal);
            assert_eq!(error.message, format!("the handler panicked: {expected}"));
        }
        assert_eq!(panics().get(), before + 4);
        // The connection goes on.
        let frame = Frame::new(Kind(5), 5, Bytes::new(), Bytes::new()).unwrap();
        write_frame(&mut stream, &frame).await.unwrap();
        let answer = crate::transport::read_frame(&mut stream).await.unwrap().unwrap();
        assert_eq!((answer.header.status, answer.header.request_id), (0, 5));
    }

    struct Long;

    impl Handler for Long {
        async fn handle(&self, _: Call) -> Result<Reply, Error> {
            Ok(Reply::with_payload(&(), Bytes::from(vec![0; 32 << 20])))
        }
    }

    #[tokio::test]
    async fn a_client_that_takes_no_answers_loses_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (near, peer) = listener.accept().await.unwrap();
        let (_stop, stopped) = watch::channel(false);
        let limits = Limits { frame: Duration::from_millis(50), ..LIMITS };
        let served = tokio::spawn(connection(near, peer, Arc::new(Long), stopped, limits));
        // More than the sockets hold, and nobody reads.
        let frame = Frame::new(Kind(9), 1, Bytes::new(), Bytes::new()).unwrap();
        write_frame(&mut stream, &frame).await.unwrap();
        tokio::time::timeout(Duration::from_secs(30), served).await.unwrap().unwrap();
    }
}
