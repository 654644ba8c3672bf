//! The answering end: each connection's requests run side by side, within bounds.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::BufReader;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use crate::codec::Wire;
use crate::error::{Code, Error};
use crate::frame::Kind;
use crate::message::Request;
use crate::shutdown::stopped;
use crate::transport::{Frame, read_frame, write_frame};

/// Requests of one connection that are under way at once; further ones wait in the socket.
const IN_FLIGHT_MAX: usize = 256;
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
                    connections.spawn(connection(stream, peer, Arc::clone(&handler), stop_connections.clone()));
                }
                Ok((_, peer)) => tracing::warn!(%peer, "refuse a connection: too many"),
                Err(error) => {
                    // Out of descriptors: give those in use a moment to close.
                    tracing::warn!(%error, "accept a connection");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
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
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%peer, %error, "set no delay");
    }
    let (read, write) = stream.into_split();
    let mut read = BufReader::with_capacity(64 << 10, read);
    let (answers, queue) = mpsc::channel(IN_FLIGHT_MAX);
    let writer = tokio::spawn(transmit(write, queue));
    let slots = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { break };
        let frame = tokio::select! {
            () = stopped(&mut stop) => break,
            frame = read_frame(&mut read) => frame,
        };
        let frame = match frame {
            Ok(Some(frame)) if !frame.header.response => frame,
            Ok(Some(_)) => break,
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
            drop(slot);
        });
    }
    drop(answers);
    if let Err(error) = writer.await {
        tracing::debug!(%peer, %error, "the writer ended");
    }
}

async fn answer<H: Handler>(handler: &H, frame: Frame, peer: SocketAddr) -> Frame {
    let (kind, id) = (frame.header.kind, frame.header.request_id);
    let call = Call { kind, head: frame.head, payload: frame.payload, peer };
    let outcome = handler.handle(call).await;
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

async fn transmit(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Frame>) {
    while let Some(frame) = queue.recv().await {
        if write_frame(&mut write, &frame).await.is_err() {
            // The reader notices the broken connection; answers behind this one have no taker.
            return;
        }
    }
}
