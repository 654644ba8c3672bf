//! How a volume does, told to the node plugin, which makes pod events of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use keeper::handover::{FromSidecar, Status};
use tokio::sync::mpsc;

/// Why a volume is not served, in the words of events and conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Typed reason, such as `InvalidCredentials`.
    pub reason: String,
    /// What happened.
    pub message: String,
}

/// Tells the node plugin how one volume does, at each change.
#[derive(Debug, Clone)]
pub struct Reporter {
    volume: String,
    last: Arc<Mutex<Option<Status>>>,
    /// Whether the mount is served: before that the source alone makes nothing well.
    served: Arc<AtomicBool>,
    outbox: mpsc::Sender<FromSidecar>,
}

impl Reporter {
    /// For a volume of which nothing was said yet.
    pub(crate) fn new(volume: &str, outbox: mpsc::Sender<FromSidecar>) -> Self {
        Self { volume: volume.to_owned(), last: Arc::default(), served: Arc::default(), outbox }
    }

    /// For the same files under a new mount, of which nothing was said yet.
    pub(crate) fn anew(self) -> Self {
        self.served.store(false, Ordering::Relaxed);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self
    }

    /// The mount is served from now on.
    pub(crate) fn serve(&self) {
        self.served.store(true, Ordering::Relaxed);
        self.works();
    }

    /// The source answers; told once the mount is served.
    pub fn works(&self) {
        if self.served.load(Ordering::Relaxed) {
            self.tell(true, None);
        }
    }

    /// Something keeps it from being served well.
    pub fn refuse(&self, refusal: &Refusal) {
        self.tell(false, Some(refusal));
    }

    fn tell(&self, ok: bool, refusal: Option<&Refusal>) {
        let status = Status {
            volume: self.volume.clone(),
            ok,
            reason: refusal.map(|refusal| refusal.reason.clone()),
            message: refusal.map(|refusal| refusal.message.clone()),
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = last.as_ref().is_none_or(|l| l.ok != ok || l.reason != status.reason);
        if changed {
            // A full outbox means a node plugin long away: it asks for the status when it is back.
            let _ = self.outbox.try_send(FromSidecar::Status(status.clone()));
        }
        *last = Some(status);
    }

    /// The last word, for a node plugin that has not heard it.
    pub(crate) fn again(&self) -> Option<FromSidecar> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.clone().map(FromSidecar::Status)
    }
}
