//! The calling end: one connection carries many requests at once; a pool has one for each address.
//!
//! A connection is given up when a request on it was not answered in time and nothing else was
//! lately: a peer that answers others is only slow with this one. Names are asked for again at each
//! connection, but what the name service said last counts while it says nothing: half of it may be
//! behind the same cut as the server that is away. When it says that there is no such name, that
//! counts: somebody else may have the address by now.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use crate::codec::Wire;
use crate::error::{Code, Error};
use crate::message::Request;
use crate::transport::{Frame, read_frame, tune, write_frame};

/// Requests queued behind the socket of one connection before callers wait.
const SEND_QUEUE: usize = 256;
/// How long one attempt to connect may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// How long the name service has for a name that it has answered before. A later answer counts for
/// the next connection.
const RESOLVE_AGAIN: Duration = Duration::from_millis(200);
/// A connection with late answers is given up after this time without any, at most.
const SILENCE_MAX: Duration = Duration::from_secs(1);

type Waiting = HashMap<u64, oneshot::Sender<Result<Frame, Error>>>;

/// What the callers of a connection share with its tasks.
#[derive(Debug)]
struct Pending {
    /// Requests without an answer yet; `None` once the connection has broken.
    waiting: Mutex<Option<Waiting>>,
    born: Instant,
    /// When the last answer came, also one that nobody waited for: milliseconds after `born`.
    heard_ms: AtomicU64,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, Option<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self) {
        let now = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard_ms.store(now, Ordering::Relaxed);
    }

    fn fail_all(&self, error: &Error) {
        for (_, waiter) in self.lock().take().into_iter().flatten() {
            // A waiter that gave up does not need the answer.
            drop(waiter.send(Err(error.clone())));
        }
    }
}

/// Removes a request that its caller no longer waits for.
struct Forget<'a>(&'a Pending, u64);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = self.0.lock().as_mut() {
            waiting.remove(&self.1);
        }
    }
}

/// One connection to a server. Dropping it breaks what is under way.
#[derive(Debug)]
pub struct Connection {
    address: String,
    next_id: AtomicU64,
    pending: Arc<Pending>,
    send: mpsc::Sender<Frame>,
    tasks: [AbortHandle; 2],
}

impl Connection {
    /// Connects to `address`, `host:port`.
    ///
    /// # Errors
    /// [`Code::Unreachable`] within [`CONNECT_TIMEOUT`], and as long again for an unknown name.
    pub async fn connect(address: &str) -> Result<Self, Error> {
        Self::open(address, &Names::default().resolve(address).await?).await
    }

    /// Connects to the first of `places`, where `address` is, that answers.
    async fn open(address: &str, places: &[SocketAddr]) -> Result<Self, Error> {
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(places))
            .await
            .map_err(|_| unreachable(address, &"no answer"))?
            .map_err(|error| unreachable(address, &error))?;
        tune(&stream).map_err(|error| unreachable(address, &error))?;
        let (read, write) = stream.into_split();
        let waiting = Mutex::new(Some(HashMap::new()));
        let (born, heard_ms) = (Instant::now(), AtomicU64::new(0));
        let pending = Arc::new(Pending { waiting, born, heard_ms });
        let (send, queue) = mpsc::channel(SEND_QUEUE);
        let reader = tokio::spawn(receive(read, Arc::clone(&pending), address.to_owned()));
        let writer = tokio::spawn(transmit(write, queue, Arc::clone(&pending)));
        let tasks = [reader.abort_handle(), writer.abort_handle()];
        let address = address.to_owned();
        Ok(Self { address, next_id: AtomicU64::new(1), pending, send, tasks })
    }

    /// Whether requests can still be answered.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.pending.lock().is_some()
    }

    /// For how long no answer has come.
    fn silence(&self) -> Duration {
        let heard = Duration::from_millis(self.pending.heard_ms.load(Ordering::Relaxed));
        self.pending.born.elapsed().saturating_sub(heard)
    }

    /// Sends `request` with `payload` and waits for the answer and its payload.
    ///
    /// # Errors
    /// The server's; [`Code::Unreachable`] if the connection breaks, [`Code::Timeout`] after
    /// `deadline`: then the request may have been carried out.
    pub async fn call<R: Request>(
        &self,
        request: &R,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<(R::Response, Bytes), Error> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match self.pending.lock().as_mut() {
            Some(waiting) => waiting.insert(id, answer),
            None => return Err(self.broken("the connection is closed")),
        };
        let _forget = Forget(&self.pending, id);
        let mut frame = Frame::new(R::KIND, id, request.to_bytes(), payload)
            .map_err(|error| Error::new(Code::InvalidRequest, error.to_string()))?;
        frame.header.deadline_ms = u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX);
        let mut answered = std::pin::pin!(answered);
        let exchange = async {
            let closed = || self.broken("the connection is closed");
            tokio::select! {
                biased;
                // A peer that reads no more keeps requests from being sent; that the connection
                // broke must be heard all the same.
                answer = &mut answered => return answer.map_err(|_| closed())?,
                sent = self.send.send(frame) => sent.map_err(|_| closed())?,
            }
            answered.await.map_err(|_| closed())?
        };
        let frame = tokio::time::timeout(deadline, exchange).await.map_err(|_| {
            let waited = deadline.as_millis();
            Error::new(Code::Timeout, format!("{} did not answer in {waited} ms", self.address))
        })??;
        if frame.header.kind != R::KIND {
            let (asked, came) = (R::KIND.0, frame.header.kind.0);
            let why = format!("{} answered {asked:#06x} with {came:#06x}", self.address);
            return Err(Error::new(Code::Internal, why));
        }
        if frame.header.status != 0 {
            return Err(Error::from_head(frame.header.status, frame.head));
        }
        Ok((R::Response::from_bytes(frame.head)?, frame.payload))
    }

    fn broken(&self, why: &str) -> Error {
        Error::new(Code::Unreachable, format!("{}: {why}", self.address))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn receive(read: OwnedReadHalf, pending: Arc<Pending>, address: String) {
    let mut read = tokio::io::BufReader::with_capacity(64 << 10, read);
    let why = loop {
        match read_frame(&mut read).await {
            Ok(Some(frame)) if frame.header.response => {
                pending.hear();
                let id = frame.header.request_id;
                let waiter = pending.lock().as_mut().and_then(|w| w.remove(&id));
                if let Some(waiter) = waiter {
                    drop(waiter.send(Ok(frame)));
                }
            }
            Ok(Some(_)) => break "it sent a request instead of an answer".to_owned(),
            Ok(None) => break "it closed the connection".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    pending.fail_all(&Error::new(Code::Unreachable, format!("{address}: {why}")));
}

async fn transmit(
    mut write: OwnedWriteHalf,
    mut queue: mpsc::Receiver<Frame>,
    pending: Arc<Pending>,
) {
    while let Some(frame) = queue.recv().await {
        if let Err(error) = write_frame(&mut write, &frame).await {
            pending.fail_all(&Error::new(Code::Unreachable, format!("send a request: {error}")));
            return;
        }
    }
}

fn unreachable(address: &str, why: &dyn std::fmt::Display) -> Error {
    Error::new(Code::Unreachable, format!("connect to {address}: {why}"))
}

type Places = Vec<SocketAddr>;

/// A question to the name service, and its answer once there is one.
#[derive(Clone, Debug)]
struct Question {
    since: Instant,
    answer: watch::Receiver<Option<Result<Places, String>>>,
}

#[derive(Debug, Default)]
struct Name {
    /// What the name service said last.
    found: Option<Places>,
    /// Under way: shared by all who want to know.
    asked: Option<Question>,
}

/// Where names were found.
#[derive(Clone, Debug, Default)]
struct Names(Arc<Mutex<HashMap<String, Name>>>);

impl Names {
    /// Where `address` is.
    async fn resolve(&self, address: &str) -> Result<Places, Error> {
        if let Ok(place) = address.parse() {
            return Ok(vec![place]);
        }
        let name = address.to_owned();
        self.resolve_by(address, async move { Ok(lookup_host(name).await?.collect()) }).await
    }

    async fn resolve_by(
        &self,
        address: &str,
        lookup: impl Future<Output = std::io::Result<Places>> + Send + 'static,
    ) -> Result<Places, Error> {
        let (known, mut question) = self.ask(address, lookup);
        let patience = if known.is_some() { RESOLVE_AGAIN } else { CONNECT_TIMEOUT };
        let answered = tokio::time::timeout(patience, question.answer.wait_for(Option::is_some));
        match answered.await.map(|answer| answer.ok().and_then(|answer| answer.clone())) {
            Ok(Some(answer)) => answer.map_err(|why| unreachable(address, &why)),
            // Late, or the runtime ends.
            Ok(None) | Err(_) => {
                known.ok_or_else(|| unreachable(address, &"the name service does not answer"))
            }
        }
    }

    /// What is known of `address`, and the question about it that is under way; a new one if there
    /// is none, or only one that waits for a silent name service already.
    fn ask(
        &self,
        address: &str,
        lookup: impl Future<Output = std::io::Result<Places>> + Send + 'static,
    ) -> (Option<Places>, Question) {
        let mut names = self.lock();
        let name = names.entry(address.to_owned()).or_default();
        let known = name.found.clone();
        if let Some(question) = name.asked.as_ref().filter(|q| q.since.elapsed() < CONNECT_TIMEOUT)
        {
            return (known, question.clone());
        }
        let (tell, answer) = watch::channel(None);
        let question = Question { since: Instant::now(), answer };
        name.asked = Some(question.clone());
        let (all, address) = (self.clone(), address.to_owned());
        tokio::spawn(async move {
            let answer = match lookup.await {
                Ok(found) if found.is_empty() => Err("the name has no address".to_owned()),
                Ok(found) => Ok(found),
                Err(error) => Err(error.to_string()),
            };
            let name = Name { found: answer.clone().ok(), asked: None };
            all.lock().insert(address, name);
            tell.send_replace(Some(answer));
        });
        (known, question)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Name>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connection to one address; locked while it is made.
type Slot = Arc<tokio::sync::Mutex<Option<Arc<Connection>>>>;

/// Connections by address, made when first needed and again when they broke.
#[derive(Debug, Default)]
pub struct Pool {
    connections: Mutex<HashMap<String, Slot>>,
    names: Names,
}

impl Pool {
    /// An empty pool.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The connection to `address`.
    ///
    /// # Errors
    /// [`Code::Unreachable`].
    pub async fn get(&self, address: &str) -> Result<Arc<Connection>, Error> {
        let slot = {
            let mut slots = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(address.to_owned()).or_default())
        };
        let mut slot = slot.lock().await;
        if let Some(open) = slot.as_ref().filter(|c| c.is_open()) {
            return Ok(Arc::clone(open));
        }
        let places = self.names.resolve(address).await?;
        let connection = Arc::new(Connection::open(address, &places).await?);
        *slot = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Closes the connection to `address`, so that the next request makes a new one: for a peer
    /// that does not answer. What is under way on it fails when its last caller lets go.
    pub fn forget(&self, address: &str) {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).remove(address);
    }

    /// [`Pool::forget`], unless a newer connection has taken the place of this one.
    fn give_up(&self, address: &str, connection: &Arc<Connection>) {
        let mut slots = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        // A slot that is locked gets its connection only now.
        let is_this = slots.get(address).is_some_and(|slot| {
            slot.try_lock()
                .is_ok_and(|kept| kept.as_ref().is_some_and(|c| Arc::ptr_eq(c, connection)))
        });
        if is_this {
            slots.remove(address);
        }
    }

    /// Sends `request` to `address`; see [`Connection::call`]. The deadline covers connecting.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub async fn call<R: Request>(
        &self,
        address: &str,
        request: &R,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<(R::Response, Bytes), Error> {
        let start = tokio::time::Instant::now();
        let connection =
            tokio::time::timeout(deadline, self.get(address)).await.map_err(|_| {
                Error::new(Code::Unreachable, format!("connect to {address}: no answer"))
            })??;
        let result =
            connection.call(request, payload, deadline.saturating_sub(start.elapsed())).await;
        let is_late = matches!(&result, Err(error) if error.code == Code::Timeout);
        if is_late && connection.silence() >= SILENCE_MAX.min(deadline / 2) {
            self.give_up(address, &connection);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    async fn answers(text: &'static str) -> std::io::Result<Places> {
        Ok(vec![place(text)])
    }

    async fn fails() -> std::io::Result<Places> {
        Err(std::io::Error::other("no such name"))
    }

    const NAME: &str = "meta:9000";

    #[tokio::test]
    async fn a_name_service_that_goes_away_takes_no_server_with_it() {
        let names = Names::default();
        let error = names.resolve_by(NAME, fails()).await.unwrap_err();
        assert_eq!(
            (error.code, error.message.as_str()),
            (Code::Unreachable, "connect to meta:9000: no such name")
        );
        let error = names.resolve_by(NAME, async { Ok(vec![]) }).await.unwrap_err();
        assert_eq!(error.message, "connect to meta:9000: the name has no address");
        let error = names.resolve_by(NAME, std::future::pending()).await.unwrap_err();
        assert_eq!(error.message, "connect to meta:9000: the name service does not answer");
        // That question is still open; whoever comes now asks anew.
        let first = place("10.0.0.1:9000");
        assert_eq!(names.resolve_by(NAME, answers("10.0.0.1:9000")).await.unwrap(), [first]);
        assert_eq!(names.resolve_by(NAME, std::future::pending()).await.unwrap(), [first]);
        assert_eq!(Names::default().resolve("10.0.0.7:1").await.unwrap(), [place("10.0.0.7:1")]);
    }

    #[tokio::test]
    async fn a_name_that_is_gone_is_forgotten() {
        let names = Names::default();
        names.resolve_by(NAME, answers("10.0.0.1:9000")).await.unwrap();
        names.resolve_by(NAME, fails()).await.unwrap_err();
        names.resolve_by(NAME, std::future::pending()).await.unwrap_err();
    }

    #[tokio::test]
    async fn an_answer_that_comes_late_counts_for_the_next_connection() {
        let (names, (tell, told)) = (Names::default(), oneshot::channel());
        names.resolve_by(NAME, answers("10.0.0.1:9000")).await.unwrap();
        let slow = async move { Ok(vec![told.await.unwrap()]) };
        let now = names.resolve_by(NAME, slow).await.unwrap();
        assert_eq!(now, [place("10.0.0.1:9000")]);
        // Whoever asks meanwhile waits for the same answer.
        let moved = place("10.0.0.2:9000");
        let (next, sent) =
            tokio::join!(names.resolve_by(NAME, fails()), async { tell.send(moved) });
        sent.unwrap();
        assert_eq!(next.unwrap(), [moved]);
    }
}
