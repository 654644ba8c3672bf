//! Frames on a byte stream: shared by the calling and the answering end.

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::frame::{FrameError, HEADER_SIZE, Header, Kind};

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
    let mut header = [0; HEADER_SIZE];
    match stream.read(&mut header).await? {
        0 => return Ok(None),
        n => stream.read_exact(header.get_mut(n..).unwrap_or_default()).await?,
    };
    let header = Header::decode(&header)?;
    let head = read_bytes(stream, header.head_length as usize).await?;
    header.check_head(&head)?;
    let payload = read_bytes(stream, header.payload_length as usize).await?;
    Ok(Some(Frame { header, head, payload }))
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
