//! Frames on a byte stream: shared by the calling and the answering end.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::frame::{FrameError, HEADER_SIZE, Header, Kind};

/// How long a peer may take for the rest of a header or frame that it has begun: the longest
/// payload at 1 MiB/s, so that only one who means to keep the connection busy is cut off.
pub(crate) const FRAME_TIMEOUT: Duration = Duration::from_secs(64);
/// A silent connection is probed after this time,
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// then at this interval,
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// and ends after as many probes without an answer: a minute after the peer vanished.
const KEEPALIVE_PROBES: u32 = 3;

/// A frame in memory.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The checked header.
    pub header: Header,
    /// The checked message head.
    pub head: Bytes,
    /// The payload; its checksum is the message's own.
    pub payload: Bytes,
}

/// Why no further frame comes from a stream.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The stream failed or ended inside a frame.
    #[error("read a frame: {0}")]
    Io(#[from] std::io::Error),
    /// The bytes are no frame.
    #[error("read a frame: {0}")]
    Frame(#[from] FrameError),
}

impl Frame {
    /// Puts a head and a payload under a header.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] if either is longer than a frame may carry.
    pub fn new(
        kind: Kind,
        request_id: u64,
        head: Bytes,
        payload: Bytes,
    ) -> Result<Self, FrameError> {
        let length = |bytes: &Bytes| u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let header = Header {
            kind,
            response: false,
            request_id,
            status: 0,
            head_length: length(&head),
            payload_length: length(&payload),
            head_checksum: crc32c::crc32c(&head),
            deadline_ms: 0,
        };
        header.check_lengths()?;
        Ok(Self { header, head, payload })
    }
}

/// Reads one frame; `None` at a clean end of the stream.
///
/// # Errors
/// [`ReadError`]: the stream is of no further use.
pub async fn read_frame<R>(stream: &mut R) -> Result<Option<Frame>, ReadError>
where
    R: AsyncRead + Unpin,
{
    match read_header(stream, FRAME_TIMEOUT).await? {
        Some(header) => read_rest(stream, header, FRAME_TIMEOUT).await.map(Some),
        None => Ok(None),
    }
}

/// Waits for a header as long as it takes, and for its end, once it has begun, for `limit`.
pub(crate) async fn read_header<R>(
    stream: &mut R,
    limit: Duration,
) -> Result<Option<Header>, ReadError>
where
    R: AsyncRead + Unpin,
{
    let mut header = [0; HEADER_SIZE];
    let begun = stream.read(&mut header).await?;
    if begun == 0 {
        return Ok(None);
    }
    let end = stream.read_exact(header.get_mut(begun..).unwrap_or_default());
    tokio::time::timeout(limit, end).await.map_err(|_| too_slow())??;
    Ok(Some(Header::decode(&header)?))
}

/// Reads what follows a header, within `limit`.
pub(crate) async fn read_rest<R>(
    stream: &mut R,
    header: Header,
    limit: Duration,
) -> Result<Frame, ReadError>
where
    R: AsyncRead + Unpin,
{
    let rest = async {
        let head = read_bytes(stream, header.head_length as usize).await?;
        header.check_head(&head)?;
        let payload = read_bytes(stream, header.payload_length as usize).await?;
        Ok(Frame { header, head, payload })
    };
    tokio::time::timeout(limit, rest).await.map_err(|_| too_slow())?
}

fn too_slow() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "the peer began a frame and did not end it")
}

/// Makes a connection quick, and lets the kernel end it when the peer has vanished: a machine that
/// lost its power closes nothing, and its connections would stay for ever.
pub(crate) fn tune(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

/// Reads `length` bytes into memory of just that size, straight from the stream.
async fn read_bytes<R>(stream: &mut R, length: usize) -> std::io::Result<Bytes>
where
    R: AsyncRead + Unpin,
{
    let mut out = BytesMut::with_capacity(length);
    while out.len() < length {
        let left = (length - out.len()) as u64;
        if (&mut *stream).take(left).read_buf(&mut out).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(out.freeze())
}

/// Writes one frame without copying its payload. The caller flushes.
///
/// # Errors
/// The stream's.
pub async fn write_frame<W>(stream: &mut W, frame: &Frame) -> std::io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    let mut start = BytesMut::with_capacity(HEADER_SIZE + frame.head.len());
    start.extend_from_slice(&frame.header.encode());
    start.extend_from_slice(&frame.head);
    let mut chain = bytes::Buf::chain(start.freeze(), frame.payload.clone());
    stream.write_all_buf(&mut chain).await
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn a_frame_that_is_begun_and_not_ended_is_given_up_and_a_silent_stream_is_not() {
        let frame = Frame::new(Kind(7), 1, Bytes::from_static(b"head"), Bytes::from_static(b"pay"));
        let frame = frame.unwrap();
        let whole = [&frame.header.encode()[..], &frame.head, &frame.payload].concat();
        for cut in 1..whole.len() {
            let (mut near, mut far) = tokio::io::duplex(256);
            far.write_all(&whole[..cut]).await.unwrap();
            let read = async {
                let header = read_header(&mut near, SHORT).await?.unwrap();
                read_rest(&mut near, header, SHORT).await
            };
            match read.await {
                Err(ReadError::Io(e)) => assert_eq!(e.kind(), std::io::ErrorKind::TimedOut),
                other => panic!("cut at {cut}: {other:?}"),
            }
        }
        let (mut near, far) = tokio::io::duplex(256);
        let mut silent = std::pin::pin!(read_header(&mut near, Duration::ZERO));
        assert!(tokio::time::timeout(SHORT, &mut silent).await.is_err(), "nothing was begun");
        drop(far);
        assert!(matches!(silent.await, Ok(None)));
    }

    #[tokio::test]
    async fn a_vanished_peer_is_noticed_by_the_kernel() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        tune(&stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap() && stream.nodelay().unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), KEEPALIVE_INTERVAL);
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), KEEPALIVE_PROBES);
    }
}
