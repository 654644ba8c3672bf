//! Why a dataset cannot be read, in the words of conditions, events and clients.
//!
//! One closed list: a user who sees `AccessDenied` on a pod finds the same word in the Dataset's
//! condition, in the scan agent's answer and in the documentation.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason of a failure; the names are part of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reason {
    /// The endpoint refuses the signature: unknown or expired keys, another region, a wrong clock.
    InvalidCredentials,
    /// The bucket does not exist, or is not at this endpoint.
    BucketNotFound,
    /// No object at the path, or nothing in the dataset.
    ObjectNotFound,
    /// The credentials are good but may not read this.
    AccessDenied,
    /// The object is another one than was listed, or gone.
    DatasetChanged,
    /// Fewer bytes than the object should have.
    TruncatedFile,
    /// The bytes are not a valid Vortex file.
    CorruptFile,
    /// The file uses an encoding or layout that this version does not know.
    UnknownEncoding,
    /// No connection, or none that answers.
    EndpointUnreachable,
    /// The TLS handshake failed.
    TlsFailed,
    /// The endpoint or the store answers, but not with what was asked.
    StoreUnavailable,
}

impl Reason {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Self; 11] = [
        Self::InvalidCredentials,
        Self::BucketNotFound,
        Self::ObjectNotFound,
        Self::AccessDenied,
        Self::DatasetChanged,
        Self::TruncatedFile,
        Self::CorruptFile,
        Self::UnknownEncoding,
        Self::EndpointUnreachable,
        Self::TlsFailed,
        Self::StoreUnavailable,
    ];

    /// Whether the same request may succeed a little later without anybody changing anything.
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::EndpointUnreachable | Self::StoreUnavailable)
    }

    /// What a user can do about it, one sentence for an event's message.
    pub fn fix(self) -> &'static str {
        match self {
            Self::InvalidCredentials => {
                "check accessKeyId and secretAccessKey in the Secret, the region and the node's clock"
            }
            Self::BucketNotFound => {
                "check the bucket in spec.source.s3.uri, the endpoint and region"
            }
            Self::ObjectNotFound => "check the path in spec.source and that files were put there",
            Self::AccessDenied => "allow these credentials to list and get this path",
            Self::DatasetChanged => "open the dataset again to read the new version",
            Self::TruncatedFile => "upload the file again, whole",
            Self::CorruptFile => "upload the file again, or convert it to Vortex",
            Self::UnknownEncoding => "write the file with an edition that this version reads",
            Self::EndpointUnreachable => "check the endpoint, its DNS name and network policies",
            Self::TlsFailed => "check caBundle and the endpoint's certificate",
            Self::StoreUnavailable => "look at the StorageCluster's or the endpoint's health",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A failure with its subject in the message. Cheap to clone, so that one failed read can answer
/// everybody who waited for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct Failure {
    /// The word to match on.
    pub reason: Reason,
    /// What was being done and to what, for people.
    pub message: String,
}

impl Failure {
    /// A failure; `message` says what was being done, without the reason's own word.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_serialized_word_is_the_displayed_word() {
        for reason in Reason::ALL {
            let json = serde_json::to_string(&reason).unwrap();
            assert_eq!(json, format!("\"{reason}\""));
            assert!(!reason.fix().is_empty());
        }
    }

    #[test]
    fn only_transport_failures_are_retried() {
        let retried: Vec<_> =
            Reason::ALL.into_iter().filter(|reason| reason.is_retryable()).collect();
        assert_eq!(retried, [Reason::EndpointUnreachable, Reason::StoreUnavailable]);
    }
}
