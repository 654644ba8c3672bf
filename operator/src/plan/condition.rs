//! Conditions: what users, `kubectl wait` and other controllers read. The time changes only when
//! the status does, so an unchanged state makes an unchanged list.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// A verdict on one condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    /// One word in CamelCase.
    pub reason: String,
    /// A sentence for humans.
    pub message: String,
}

impl Verdict {
    /// The condition holds.
    pub fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self { status: "True", reason: reason.to_owned(), message: message.into() }
    }

    /// The condition does not hold.
    pub fn no(reason: &str, message: impl Into<String>) -> Self {
        Self { status: "False", reason: reason.to_owned(), message: message.into() }
    }

    /// Whether the condition holds.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.status == "True"
    }
}

/// Whether condition `type_` is `True`.
#[must_use]
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    conditions.iter().any(|c| c.type_ == type_ && c.status == "True")
}

/// Sets condition `type_`. Returns whether its status or reason changed, that is, whether a human
/// would want to hear of it.
pub fn set(
    conditions: &mut Vec<Condition>,
    type_: &str,
    verdict: Verdict,
    generation: Option<i64>,
    now: Timestamp,
) -> bool {
    let old = conditions.iter().find(|c| c.type_ == type_);
    let since = old
        .filter(|c| c.status == verdict.status)
        .map_or(Time(now), |c| c.last_transition_time.clone());
    let changed = old.is_none_or(|c| c.status != verdict.status || c.reason != verdict.reason);
    let new = Condition {
        type_: type_.to_owned(),
        status: verdict.status.to_owned(),
        reason: verdict.reason,
        message: verdict.message,
        observed_generation: generation,
        last_transition_time: since,
    };
    match conditions.iter_mut().find(|c| c.type_ == type_) {
        Some(slot) => *slot = new,
        None => conditions.push(new),
    }
    changed
}

/// What a user can do about a failure `reason`; `secret` is the Secret with the credentials.
#[must_use]
pub fn fix(reason: &str, secret: Option<&str>) -> String {
    match reason {
        "InvalidCredentials" => secret.map_or_else(
            || "name a Secret with accessKeyId and secretAccessKey in s3.secretRef".to_owned(),
            |name| format!("correct accessKeyId and secretAccessKey in Secret {name}"),
        ),
        "BucketNotFound" => "create the bucket, or correct s3.uri and s3.endpoint".to_owned(),
        "ObjectNotFound" => "put objects below that prefix, or correct the path".to_owned(),
        "AccessDenied" => "allow these credentials to list the prefix and read objects".to_owned(),
        "DatasetChanged" => "wait until writers are done; it is looked at again".to_owned(),
        "TruncatedFile" | "CorruptFile" => "upload the file again".to_owned(),
        "UnknownEncoding" => "write the file with vortex 0.90 or older".to_owned(),
        "EndpointUnreachable" => "check s3.endpoint and the network between".to_owned(),
        "TlsFailed" => "put the server's CA into s3.caBundle".to_owned(),
        "StoreUnavailable" => "see the conditions of the StorageCluster".to_owned(),
        _ => "see the logs of the Job".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap_or_default()
    }

    #[test]
    fn the_time_of_a_condition_moves_only_with_its_status() {
        let mut list = Vec::new();
        assert!(set(&mut list, "Ready", Verdict::no("Waiting", "a"), Some(1), at(1)));
        assert!(!set(&mut list, "Ready", Verdict::no("Waiting", "b"), Some(2), at(2)));
        assert_eq!(list[0].last_transition_time, Time(at(1)));
        assert_eq!(list[0].observed_generation, Some(2));
        assert!(set(&mut list, "Ready", Verdict::no("Broken", "b"), Some(2), at(3)));
        assert_eq!(list[0].last_transition_time, Time(at(1)));
        assert!(set(&mut list, "Ready", Verdict::yes("Fine", ""), Some(2), at(4)));
        assert_eq!(list[0].last_transition_time, Time(at(4)));
        assert_eq!(list.len(), 1);
        assert!(is_true(&list, "Ready"));
    }
}
