//! What a manager said when it refused: kept by the controller that heard it, until the next
//! reconcile makes a condition of it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;

/// The last refusal of each object. One that was made again under the same name starts without.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// Uid and reason, by namespace and name: as many as there are objects at most.
    last: Mutex<HashMap<String, (Option<String>, String)>>,
}

impl Refusals {
    /// Why the object was refused last.
    pub(super) fn of(&self, object: &ObjectReference) -> Option<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (uid, why) = last.get(&super::Context::key(object))?;
        (*uid == object.uid).then(|| why.clone())
    }

    /// Notes a refusal, or that there is none any more.
    pub(super) fn remember(&self, object: &ObjectReference, why: Option<String>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let key = super::Context::key(object);
        match why {
            Some(why) => drop(last.insert(key, (object.uid.clone(), why))),
            None => drop(last.remove(&key)),
        }
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
        one.remember(&object("a"), Some("no".to_owned()));
        assert_eq!(one.of(&object("a")), Some("no".to_owned()));
        assert_eq!(other.of(&object("a")), None, "another controller of the process");
        assert_eq!(one.of(&object("b")), None, "made again under the same name");
        one.remember(&object("b"), None);
        assert_eq!(one.of(&object("a")), None);
        assert!(one.last.lock().unwrap().is_empty(), "nothing is kept for objects that are gone");
    }
}
