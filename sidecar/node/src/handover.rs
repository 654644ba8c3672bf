//! `node.sock`: gives each sidecar of a pod its volumes and passes on what it says.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use keeper::handover::{FromNode, FromSidecar, Hello, Init, Kept, Role, Status, Volume};
use keeper::wire::{Connection, WireError};
use tokio::io::Interest;
use tokio::sync::{Semaphore, broadcast};

/// A sidecar has to say who it is within this.
const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// A sidecar has to take a message within this.
const SEND_DEADLINE: Duration = Duration::from_secs(5);
/// Connections of one pod: two sidecars, and old ones that are about to be noticed as gone.
const MAX_CONNECTIONS: usize = 8;
/// Credentials that may wait for a sidecar.
pub const PUSHES: usize = 16;
/// Exchanges of one conversation that are being kept: one for each volume of a pod, and room for a few said twice.
const KEEPING_MAX: usize = 256;

/// What the sidecars of one pod may ask and tell.
pub trait Pod: Send + Sync + 'static {
    /// The volumes of the pod, with a duplicate of the device for the mount sidecar.
    fn volumes(&self, role: Role) -> io::Result<Vec<(Volume, Option<OwnedFd>)>>;
    /// A mount was negotiated. What comes back ends when the exchange is where a later node plugin finds it, with false if
    /// the volume is gone.
    fn negotiated(&self, init: Init) -> impl Future<Output = bool> + Send + 'static;
    /// A volume's state changed.
    fn changed(&self, role: Role, status: Status);
}

/// Serves one pod until its task is aborted.
pub async fn serve<P: Pod>(
    listener: tokio::net::UnixListener,
    pod: Arc<P>,
    pushes: broadcast::Sender<FromNode>,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await.and_then(|(stream, _)| stream.into_std()) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "accept a sidecar");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (pod, pushed) = (Arc::clone(&pod), pushes.subscribe());
        tokio::spawn(async move {
            if let Err(error) = converse(stream, &*pod, pushed).await {
                tracing::info!(%error, "conversation with a sidecar ended");
            }
            drop(place);
        });
    }
}

async fn converse<P: Pod>(
    stream: UnixStream,
    pod: &P,
    mut pushed: broadcast::Receiver<FromNode>,
) -> Result<(), WireError> {
    stream.set_nonblocking(true)?;
    // The same socket twice: one to wait on, one to read.
    let ready = tokio::net::UnixStream::from_std(stream.try_clone()?)?;
    let mut connection = Connection::new(stream);
    let hello = tokio::time::timeout(HELLO_DEADLINE, receive(&ready, &mut connection)).await;
    let Ok(Some(FromSidecar::Hello(Hello { role, .. }))) = hello.unwrap_or(Ok(None)) else {
        return Err(io::Error::other("the sidecar did not say hello").into());
    };
    let mut volumes = pod.volumes(role)?;
    if let Some((volume, _)) = volumes.last_mut() {
        volume.last = true;
    }
    for (volume, device) in volumes {
        send(&connection, FromNode::Volume(Box::new(volume)), device).await?;
    }
    let mut keeping = FuturesUnordered::new();
    loop {
        tokio::select! {
            received = receive(&ready, &mut connection) => match received? {
                Some(FromSidecar::Init(init)) if role == Role::Mount && keeping.len() < KEEPING_MAX => {
                    let (volume, confirm) = (init.volume.clone(), init.confirm);
                    let kept = pod.negotiated(init);
                    keeping.push(async move { (kept.await && confirm).then_some(volume) });
                }
                Some(FromSidecar::Status(status)) => pod.changed(role, status),
                Some(_) => return Err(io::Error::other("the sidecar said something odd").into()),
                None => return Ok(()),
            },
            Some(kept) = keeping.next() => if let Some(volume) = kept {
                send(&connection, FromNode::Kept(Kept { volume }), None).await?;
            },
            push = pushed.recv() => match push {
                Ok(message) => send(&connection, message, None).await?,
                // The sidecar reconnects and gets the newest with its volumes.
                Err(broadcast::error::RecvError::Lagged(_)) => return Ok(()),
                Err(broadcast::error::RecvError::Closed) => return Ok(()),
            },
        }
    }
}

/// Sends from a thread that may block: a sidecar that does not read only loses its connection.
async fn send(
    connection: &Connection,
    message: FromNode,
    device: Option<OwnedFd>,
) -> Result<(), WireError> {
    let stream = connection.stream().try_clone()?;
    let sending = tokio::task::spawn_blocking(move || {
        let devices: Vec<_> = device.iter().map(AsFd::as_fd).collect();
        Connection::new(stream).send(&message, &devices)
    });
    match tokio::time::timeout(SEND_DEADLINE, sending).await {
        Ok(Ok(sent)) => sent,
        Ok(Err(error)) => Err(io::Error::other(error).into()),
        Err(_) => {
            // Wakes the thread, too.
            connection.stream().shutdown(std::net::Shutdown::Both)?;
            Err(io::Error::from(io::ErrorKind::TimedOut).into())
        }
    }
}

async fn receive(
    ready: &tokio::net::UnixStream,
    connection: &mut Connection,
) -> Result<Option<FromSidecar>, WireError> {
    loop {
        ready.readable().await?;
        let received = ready.try_io(Interest::READABLE, || match connection.receive() {
            Err(error) if error.is_would_block() => Err(io::ErrorKind::WouldBlock.into()),
            other => Ok(other),
        });
        match received {
            // Descriptors that a sidecar sends are closed here: none are expected.
            Ok(received) => return Ok(received?.map(|(message, _)| message)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
}
