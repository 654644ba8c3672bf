//! Whether a volume works, told upwards at each change: the node plugin makes pod events of it.

use std::sync::{Arc, Mutex, PoisonError};

use source::{Failure, Reason};

/// Told `Ok` or the failure whenever the answer differs from the last one. Must not block.
pub type StatusCallback = Arc<dyn Fn(Result<(), &Failure>) + Send + Sync>;

/// The last word said about one volume.
pub struct Status {
    last: Mutex<Option<Result<(), Reason>>>,
    callback: StatusCallback,
}

impl std::fmt::Debug for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Status").field("last", &self.last).finish_non_exhaustive()
    }
}

impl Status {
    /// Nothing said yet: the first word is a change.
    #[must_use]
    pub fn new(callback: StatusCallback) -> Self {
        Self { last: Mutex::new(None), callback }
    }

    /// The volume works.
    pub fn works(&self) {
        if self.changes(Ok(())) {
            (self.callback)(Ok(()));
        }
    }

    /// The volume does not work.
    pub fn fails(&self, failure: &Failure) {
        if self.changes(Err(failure.reason)) {
            (self.callback)(Err(failure));
        }
    }

    /// Whether the last word was a failure.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        matches!(*self.last.lock().unwrap_or_else(PoisonError::into_inner), Some(Err(_)))
    }

    fn changes(&self, now: Result<(), Reason>) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.replace(now) != Some(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_are_told() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&told);
        let status = Status::new(Arc::new(move |word| {
            sink.lock().unwrap().push(word.map_err(|failure| failure.reason));
        }));
        status.works();
        status.works();
        let denied = Failure::new(Reason::AccessDenied, "list");
        status.fails(&denied);
        status.fails(&denied);
        assert!(status.is_failing());
        status.fails(&Failure::new(Reason::BucketNotFound, "list"));
        status.works();
        let expected = [Ok(()), Err(Reason::AccessDenied), Err(Reason::BucketNotFound), Ok(())];
        assert_eq!(*told.lock().unwrap(), expected);
    }
}
