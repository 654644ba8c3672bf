//! Messages of `scan.sock`: one JSON object a line, the ring's memory by SCM_RIGHTS.
//!
//! client → agent: `open` once, then `release` for each batch it is done with, and `want` whenever it has read all
//! that has come and waits for more.
//! agent → client: `opened` (its first byte carries the memfd), then `batch`es, then `done`; or
//! `error`, once, at any time. A `datasets` request is answered and ends the conversation.

use serde::{Deserialize, Serialize};
use source::{Failure, Reason};

use crate::bridge::ScanError;
use crate::schema::Column;

/// Version of this protocol.
pub const VERSION: u32 = 1;
/// Bounds of what a client may ask for.
const MAX_COLUMNS: usize = 10_000;
const MAX_BATCH_ROWS: usize = 1 << 20;
/// Bytes that a client's ring may have.
pub(super) const SLAB_BYTES: std::ops::RangeInclusive<usize> = (1 << 20)..=(1 << 30);

/// What a client says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// Begins a scan.
    Open(Open),
    /// Gives a batch's memory back.
    Release {
        /// The batch's number.
        id: u64,
    },
    /// Says that the client waits: it has copied and released what lay in the ring's upper half.
    Want {
        /// How many batches it has read: more may be on their way, and then it does not wait.
        read: u64,
    },
    /// Asks which datasets there are.
    Datasets {},
}

/// A scan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Open {
    /// [`VERSION`].
    pub version: u32,
    /// A dataset by its name, its volume's name or its mount path.
    pub dataset: String,
    /// Columns in order of delivery; none means all.
    #[serde(default)]
    pub columns: Option<Vec<String>>,
    /// A filter; see the module `filter`.
    #[serde(default, rename = "where")]
    pub filter: Option<String>,
    /// Most rows of a batch.
    #[serde(default = "default_batch_rows")]
    pub batch_rows: usize,
    /// Bytes of the ring.
    #[serde(default = "default_slab_bytes")]
    pub slab_bytes: usize,
}

/// What the agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply {
    /// The scan can begin.
    Opened(Opened),
    /// Rows, in the ring.
    Batch(Batch),
    /// All rows were sent.
    Done(Done),
    /// The scan cannot begin or go on.
    Error(ErrorReply),
    /// The datasets there are.
    Datasets(Vec<DatasetReply>),
}

/// What a scan will deliver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Opened {
    /// Columns in order of delivery.
    pub columns: Vec<Column>,
    /// Files of the dataset.
    pub files: usize,
    /// Bytes of the ring whose descriptor comes with this message.
    pub slab_bytes: usize,
}

/// A batch: where each buffer of each column lies in the ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Number to release it by.
    pub id: u64,
    /// Rows.
    pub rows: usize,
    /// Bytes of the ring that it holds.
    pub bytes: usize,
    /// One a column.
    pub columns: Vec<Node>,
}

/// One array in Arrow's layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Rows, or items for the child of a list.
    pub len: usize,
    /// Nulls among them.
    pub nulls: usize,
    /// Offset and length of each buffer in Arrow's order; a missing validity is null.
    pub buffers: Vec<Option<(usize, usize)>>,
    /// Items of lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<Self>,
}

/// The end of a scan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Done {
    /// Rows sent.
    pub rows: u64,
    /// Batches sent.
    pub batches: u64,
    /// Bytes that this scan fetched from the source.
    pub bytes_fetched: u64,
    /// Bytes of all files of the dataset.
    pub file_bytes: u64,
}

/// Why a scan failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReply {
    /// A [`Reason`], or `InvalidRequest`, `DatasetUnknown`, `Busy`, `Stopping`.
    pub reason: String,
    /// For people.
    pub message: String,
    /// Byte offset in the filter, where it is the filter's fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<usize>,
}

/// A dataset that can be scanned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DatasetReply {
    /// The Dataset's name.
    pub name: String,
    /// Where the pod has it mounted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mount_path: Option<String>,
}

impl Request {
    /// Parses and validates a client's line.
    pub fn parse(line: &[u8]) -> Result<Self, ErrorReply> {
        let request: Self =
            serde_json::from_slice(line).map_err(|e| ErrorReply::invalid(e.to_string()))?;
        if let Self::Open(open) = &request {
            open.validate()?;
        }
        Ok(request)
    }
}

impl Open {
    fn validate(&self) -> Result<(), ErrorReply> {
        let columns = self.columns.as_ref();
        if self.version != VERSION {
            let message = format!("version {} asked, this agent speaks {VERSION}", self.version);
            Err(ErrorReply::invalid(message))
        } else if columns.is_some_and(|names| !(1..=MAX_COLUMNS).contains(&names.len())) {
            Err(ErrorReply::invalid("columns must name 1 to 10000"))
        } else if !(1..=MAX_BATCH_ROWS).contains(&self.batch_rows) {
            Err(ErrorReply::invalid("batchRows must be 1 to 1048576"))
        } else if !SLAB_BYTES.contains(&self.slab_bytes) {
            Err(ErrorReply::invalid("slabBytes must be 1 MiB to 1 GiB"))
        } else {
            Ok(())
        }
    }
}

impl ErrorReply {
    /// The client's own mistake.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { reason: "InvalidRequest".into(), message: message.into(), position: None }
    }

    /// There are as many scans as there may be.
    pub fn busy(most: u32) -> Self {
        let message = format!("{most} scans are running, the most at once; scan again later");
        Self { reason: "Busy".into(), message, position: None }
    }

    /// The agent has been asked to end.
    pub fn stopping() -> Self {
        let message = "the agent is ending and takes no new scans; scan again later".into();
        Self { reason: "Stopping".into(), message, position: None }
    }
}

impl From<&Failure> for ErrorReply {
    fn from(failure: &Failure) -> Self {
        Self {
            reason: failure.reason.to_string(),
            message: failure.message.clone(),
            position: None,
        }
    }
}

impl From<&ScanError> for ErrorReply {
    fn from(error: &ScanError) -> Self {
        match error {
            ScanError::Source(failure) => failure.into(),
            ScanError::Filter(error) => {
                Self { position: Some(error.position), ..Self::invalid(error.to_string()) }
            }
            ScanError::Type(_) => Self {
                reason: Reason::UnknownEncoding.to_string(),
                ..Self::invalid(error.to_string())
            },
            ScanError::NoColumn { .. } | ScanError::Request(_) => Self::invalid(error.to_string()),
            // Nobody's fault, as when there are too many scans.
            ScanError::NoRoom(_) => {
                Self { reason: "Busy".into(), ..Self::invalid(error.to_string()) }
            }
        }
    }
}

fn default_batch_rows() -> usize {
    8192
}

fn default_slab_bytes() -> usize {
    64 << 20
}

/// Fuzz target: no line may panic, and what is accepted survives a round trip.
pub fn fuzz_request(data: &[u8]) {
    if let Ok(request) = Request::parse(data) {
        let line = serde_json::to_vec(&request).unwrap_or_default();
        assert!(Request::parse(&line).is_ok_and(|same| same == request));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_request_gets_the_defaults() {
        let line = br#"{"open":{"version":1,"dataset":"flights","where":"a > 1"}}"#;
        let Request::Open(open) = Request::parse(line).unwrap() else { panic!("not open") };
        assert_eq!((open.batch_rows, open.slab_bytes), (8192, 64 << 20));
        assert_eq!(open.filter.as_deref(), Some("a > 1"));
    }

    #[test]
    fn what_is_out_of_bounds_is_named() {
        let cases = [
            (r#"{"version":2,"dataset":"a"}"#, "version 2"),
            (r#"{"version":1,"dataset":"a","columns":[]}"#, "columns"),
            (r#"{"version":1,"dataset":"a","batchRows":0}"#, "batchRows"),
            (r#"{"version":1,"dataset":"a","slabBytes":1}"#, "slabBytes"),
            (r#"{"version":1,"dataset":"a","shuffle":true}"#, "shuffle"),
            (r#"{"version":1}"#, "dataset"),
        ];
        for (open, word) in cases {
            let error = Request::parse(format!("{{\"open\":{open}}}").as_bytes()).unwrap_err();
            assert_eq!(error.reason, "InvalidRequest");
            assert!(error.message.contains(word), "{word}: {}", error.message);
        }
        assert!(Request::parse(b"\xff").is_err());
    }
}
