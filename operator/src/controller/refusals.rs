//! What a manager said when it refused: kept by the controller that heard it, for the condition
//! that every reconcile makes of it until the manager says something else.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;

/// The last refusal of each object. One that was made again under the same name starts without, and
/// so does one of another revision.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// By namespace and name: as many as there are objects at most.
    last: Mutex<HashMap<String, Refusal>>,
}

#[derive(Debug)]
struct Refusal {
    uid: Option<String>,
    revision: i64,
    why: String,
}

impl Refusals {
    /// Why this revision of the object was refused last.
    pub(super) fn of(&self, object: &ObjectReference, revision: i64) -> Option<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let refusal = last.get(&super::Context::key(object))?;
        let same = refusal.uid == object.uid && refusal.revision == revision;
        same.then(|| refusal.why.clone())
    }

    /// Notes that this revision of the object was refused.
    pub(super) fn remember(&self, object: &ObjectReference, revision: i64, why: String) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let refusal = Refusal { uid: object.uid.clone(), revision, why };
        last.insert(super::Context::key(object), refusal);
    }

    /// Notes that the object is refused no more, or gone.
    pub(super) fn forget(&self, object: &ObjectReference) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.remove(&super::Context::key(object));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(uid: &str) -> ObjectReference {
        ObjectReference {
            namespace: Some("storage".to_owned()),
            name: Some("train-table-1".to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        }
    }

    #[test]
    fn a_refusal_is_the_object_s_own_and_of_one_controller() {
        let (one, other) = (Refusals::default(), Refusals::default());
        one.remember(&object("a"), 1, "no".to_owned());
        assert_eq!(one.of(&object("a"), 1), Some("no".to_owned()));
        assert_eq!(one.of(&object("a"), 2), None, "another revision");
        assert_eq!(other.of(&object("a"), 1), None, "another controller of the process");
        assert_eq!(one.of(&object("b"), 1), None, "made again under the same name");
        one.forget(&object("b"));
        assert_eq!(one.of(&object("a"), 1), None);
        assert!(one.last.lock().unwrap().is_empty(), "nothing is kept for objects that are gone");
    }
}
