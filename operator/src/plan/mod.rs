//! Decisions: a view of the API objects in, a list of actions out. Nothing here talks to a server,
//! reads a clock or sleeps, so every decision can be replayed from text
//! (`operator/tests/scenarios/`). A plan of a state that is already right is empty: that is what
//! keeps the operator from writing at the fixed point.

pub mod cluster;
pub mod condition;
pub mod dataset;
pub mod diff;
pub mod job;
pub mod lint;
pub mod load;
pub mod table;
pub mod workload;

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

/// API version of our own kinds.
pub const API_VERSION: &str = "lampyris.dev/v1alpha1";

/// What a plan needs to know besides the objects.
#[derive(Clone, Debug)]
pub struct Env {
    /// Where images come from.
    pub images: Images,
    /// Where the pods of Jobs may run.
    pub jobs: job::Placement,
    /// The time of the observation.
    pub now: Timestamp,
}

/// Registry, tag and pull policy of every image that the operator deploys.
#[derive(Clone, Debug)]
pub struct Images {
    /// Registry and path, without the image's name.
    pub registry: String,
    /// Tag of all images.
    pub tag: String,
    /// `Always`, `IfNotPresent` or `Never`.
    pub pull_policy: String,
}

impl Images {
    /// The full reference of image `name`.
    #[must_use]
    pub fn reference(&self, name: &str) -> String {
        format!("{}/{name}:{}", self.registry, self.tag)
    }
}

/// A namespaced object.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ObjectId {
    /// Kind, such as `StatefulSet`.
    pub kind: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl ObjectId {
    /// The identity of `kind` `namespace`/`name`.
    #[must_use]
    pub fn new(kind: &str, namespace: &str, name: &str) -> Self {
        Self { kind: kind.to_owned(), namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// The identity that a manifest states.
    #[must_use]
    pub fn of(object: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Self {
            kind: text(&object["kind"]),
            namespace: text(&object["metadata"]["namespace"]),
            name: text(&object["metadata"]["name"]),
        }
    }
}

/// Objects by kind and name, all of one namespace.
pub type Children = BTreeMap<(String, String), Value>;

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Server-side apply of a whole object.
    Apply(Value),
    /// Create; an object of that name that is already there is left alone.
    Create(Value),
    /// Delete with everything that the object owns.
    Delete(ObjectId),
    /// Server-side apply of an object's status.
    Status(ObjectId, Value),
    /// Add or remove one finalizer.
    Finalizer {
        /// The object that holds it.
        object: ObjectId,
        /// Its name.
        name: String,
        /// Whether it should be there.
        present: bool,
    },
    /// Give a chain table to the manager at this host and port.
    PushTable(String, Value),
    /// Tell the user, on the object that is being reconciled.
    Event(Notice),
}

/// An event for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whether something is wrong.
    pub warning: bool,
    /// One word in CamelCase.
    pub reason: String,
    /// What happened and what to do about it.
    pub message: String,
}

/// What to do now, and when to look again at the latest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// In this order.
    pub actions: Vec<Action>,
    /// Seconds until the next look if nothing changes before.
    pub requeue_s: Option<u64>,
}

impl Plan {
    /// Looks again after `seconds`, or earlier if that was asked for already.
    pub fn requeue(&mut self, seconds: u64) {
        self.requeue_s = Some(self.requeue_s.map_or(seconds, |old| old.min(seconds)));
    }

    /// Applies `desired` unless `observed` already has all of it.
    pub fn ensure(&mut self, desired: Value, observed: Option<&Value>) {
        if !observed.is_some_and(|have| diff::covers(&desired, have)) {
            self.actions.push(Action::Apply(desired));
        }
    }

    /// Writes a status, in its place: whoever carries the plan out may die, or be refused, between any two actions. What
    /// is given out (a look, a design, an id, of which the StorageNode is the record) is on record before it is used; a
    /// refused write does not hide the state that it belongs to; events follow the status that they come from, so that
    /// each is told once.
    pub fn status(&mut self, id: ObjectId, status: Value) {
        self.actions.push(Action::Status(id, status));
        self.actions.sort_by_key(|action| match action {
            Action::Delete(_) => 0,
            Action::Create(object) if object["kind"] == "StorageNode" => 0,
            Action::Status(..) => 1,
            Action::Event(_) => 2,
            Action::Apply(_) | Action::Create(_) => 3,
            Action::Finalizer { .. } | Action::PushTable(..) => 3,
        });
    }

    /// Adds an event.
    pub fn notice(&mut self, warning: bool, reason: &str, message: impl Into<String>) {
        let reason = reason.to_owned();
        self.actions.push(Action::Event(Notice { warning, reason, message: message.into() }));
    }
}

/// The reference that makes Kubernetes delete a child with its owner.
#[must_use]
pub fn owner_reference(kind: &str, name: &str, uid: &str) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": true,
        "blockOwnerDeletion": false,
    })
}
