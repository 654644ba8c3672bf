//! Whether a volume works, told upwards at each change: the node plugin makes pod events of it.
//!
//! A volume has parts that work or fail by themselves: what can be listed need not be readable, and one chain may be dead
//! beside a live one. So a failure is over when the part that failed works, whatever else works meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use source::{Failure, Reason};

/// Told `Ok` or the failure whenever the answer differs from the last one. Must not block.
pub type StatusCallback = Arc<dyn Fn(Result<(), &Failure>) + Send + Sync>;

/// Failures that are remembered; with so many the volume fails whatever else does.
const FAILURES_MAX: usize = 16;

/// What fails of one volume, and the last word that was said about it.
pub struct Status<P> {
    state: Mutex<State<P>>,
    callback: StatusCallback,
}

#[derive(Debug)]
struct State<P> {
    /// The longest first: of several failures one is told.
    failing: Vec<(P, Failure)>,
    last: Option<Result<(), Reason>>,
}

impl<P: std::fmt::Debug> std::fmt::Debug for Status<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Status").field("state", &self.state).finish_non_exhaustive()
    }
}

impl<P: Clone + PartialEq> Status<P> {
    /// Nothing said yet: the first word is a change.
    #[must_use]
    pub fn new(callback: StatusCallback) -> Self {
        Self { state: Mutex::new(State { failing: Vec::new(), last: None }), callback }
    }

    fn lock(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every part that `is_well` names works, or nobody can miss it any more.
    pub fn works(&self, is_well: impl Fn(&P) -> bool) {
        let mut state = self.lock();
        state.failing.retain(|(part, _)| !is_well(part));
        self.tell(&mut state);
    }

    /// A part does not work.
    pub fn fails(&self, part: P, failure: &Failure) {
        let mut state = self.lock();
        let is_full = state.failing.len() >= FAILURES_MAX;
        match state.failing.iter_mut().find(|(known, _)| *known == part) {
            Some((_, known)) => known.clone_from(failure),
            None if is_full => {}
            None => state.failing.push((part, failure.clone())),
        }
        self.tell(&mut state);
    }

    /// What fails and why, the longest first.
    #[must_use]
    pub fn failing(&self) -> Vec<(P, Reason)> {
        self.lock().failing.iter().map(|(part, failure)| (part.clone(), failure.reason)).collect()
    }

    /// Under the lock, so that words come in the order of what happened.
    fn tell(&self, state: &mut State<P>) {
        let State { failing, last } = state;
        let word = failing.first().map_or(Ok(()), |(_, failure)| Err(failure));
        let now = word.map_err(|failure| failure.reason);
        if last.replace(now) != Some(now) {
            (self.callback)(word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Words = Arc<Mutex<Vec<Result<(), Reason>>>>;

    fn status() -> (Status<char>, Words) {
        let told = Words::default();
        let sink = Arc::clone(&told);
        let status = Status::new(Arc::new(move |word| {
            sink.lock().unwrap().push(word.map_err(|failure| failure.reason));
        }));
        (status, told)
    }

    fn failure(reason: Reason) -> Failure {
        Failure::new(reason, "list")
    }

    #[test]
    fn only_changes_are_told() {
        let (status, told) = status();
        status.works(|part| *part == 'a');
        status.works(|part| *part == 'a');
        let denied = failure(Reason::AccessDenied);
        status.fails('a', &denied);
        status.fails('a', &denied);
        assert_eq!(status.failing(), [('a', Reason::AccessDenied)]);
        status.fails('a', &failure(Reason::BucketNotFound));
        status.works(|part| *part == 'a');
        let expected = [Ok(()), Err(Reason::AccessDenied), Err(Reason::BucketNotFound), Ok(())];
        assert_eq!(*told.lock().unwrap(), expected);
    }

    #[test]
    fn what_works_does_not_speak_for_what_fails() {
        let (status, told) = status();
        status.works(|part| *part == 'a');
        for _ in 0..3 {
            status.fails('b', &failure(Reason::AccessDenied));
            status.works(|part| *part == 'a');
        }
        // Another failure is told when it is the one that is left.
        status.fails('c', &failure(Reason::TruncatedFile));
        status.works(|part| *part == 'b');
        status.works(|part| *part == 'c');
        let expected = [Ok(()), Err(Reason::AccessDenied), Err(Reason::TruncatedFile), Ok(())];
        assert_eq!(*told.lock().unwrap(), expected);
    }

    #[test]
    fn failures_that_are_remembered_are_bounded() {
        let (status, told) = status();
        for part in 'a'..='z' {
            status.fails(part, &failure(Reason::StoreUnavailable));
        }
        assert_eq!(status.failing().len(), FAILURES_MAX);
        status.works(|_| true);
        assert_eq!(*told.lock().unwrap(), [Err(Reason::StoreUnavailable), Ok(())]);
    }
}
