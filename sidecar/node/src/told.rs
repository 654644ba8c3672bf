//! What the owner of a pod is told about its volumes: each change once, with what to do about it. No IO.
//!
//! A sidecar may speak faster than Events may be posted, and a pod may put a program of its own in its place. So what it
//! said last and what was told of it are two things: of all that it says in between nothing is kept.

use std::time::Instant;

use keeper::handover::{Role, Status};

use crate::cluster::Notice;
use crate::publish;

/// Longest message of a sidecar that is passed on, in characters.
const MESSAGE_CHARS: usize = 600;

/// What the parts that serve one volume said, and what was told of it.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// Since when it waits to be told that another sidecar serves the mount.
    taken_over: Option<Instant>,
    mount: Word,
    scan: Word,
}

/// The last word of one part.
#[derive(Debug, Default)]
struct Word {
    /// What is wrong, as far as it has said.
    trouble: Option<Trouble>,
    /// The last reason that was told; empty after a recovery.
    told: String,
    /// Since when there is something to tell.
    waits: Option<Instant>,
}

#[derive(Debug)]
struct Trouble {
    reason: String,
    message: String,
}

impl Word {
    fn hear(&mut self, status: &Status) {
        self.trouble = if status.ok {
            None
        } else {
            let reason = status.reason.as_deref().unwrap_or("StoreUnavailable");
            let plain = reason.len() <= 64 && reason.chars().all(|c| c.is_ascii_alphanumeric());
            if !plain || reason.is_empty() {
                return;
            }
            let message = status.message.as_deref().unwrap_or_default();
            let message = message.chars().take(MESSAGE_CHARS).collect();
            Some(Trouble { reason: reason.to_owned(), message })
        };
        if self.reason() == self.told {
            self.waits = None;
        } else {
            self.waits.get_or_insert_with(Instant::now);
        }
    }

    fn reason(&self) -> &str {
        self.trouble.as_ref().map_or("", |trouble| &trouble.reason)
    }

    /// What to tell of it, which is told then.
    fn tell(&mut self, part: &str, dataset: &str) -> Notice {
        self.waits = None;
        let now = self.reason().to_owned();
        let before = std::mem::replace(&mut self.told, now);
        match &self.trouble {
            None => Notice {
                warning: false,
                reason: "Recovered".to_owned(),
                note: format!("Dataset {dataset}, {part}: works again after {before}"),
            },
            Some(Trouble { reason, message }) => Notice {
                warning: true,
                reason: reason.clone(),
                note: format!("Dataset {dataset}, {part}: {message}; {}", publish::fix(reason)),
            },
        }
    }
}

impl Told {
    const fn of(&mut self, role: Role) -> &mut Word {
        match role {
            Role::Mount => &mut self.mount,
            Role::Scan => &mut self.scan,
        }
    }

    /// A sidecar said how it does.
    pub(crate) fn hear(&mut self, role: Role, status: &Status) {
        self.of(role).hear(status);
    }

    /// A sidecar came: what an earlier one said counts no more. If it still holds it is said again; if not, the owner, who
    /// was told of it, is told so when this one says that it works.
    pub(crate) fn attach(&mut self, role: Role) {
        let word = self.of(role);
        (word.trouble, word.waits) = (None, None);
    }

    /// Another sidecar serves the mount now.
    pub(crate) fn take_over(&mut self) {
        self.taken_over.get_or_insert_with(Instant::now);
    }

    /// Since when there is something to tell, if there is.
    pub(crate) fn waits(&self) -> Option<Instant> {
        [self.taken_over, self.mount.waits, self.scan.waits].into_iter().flatten().min()
    }

    /// What has waited longest to be told: nothing waits behind what changes all the time.
    pub(crate) fn next(&mut self, dataset: &str) -> Option<Notice> {
        let first = Some(self.waits()?);
        if self.taken_over == first {
            self.taken_over = None;
            return Some(Notice {
                warning: false,
                reason: "MountRecovered".to_owned(),
                note: format!("a new sidecar serves Dataset {dataset}; open files go on"),
            });
        }
        // What a pod's owner calls the part that a sidecar is.
        let (word, part) = if self.mount.waits == first {
            (&mut self.mount, "mount")
        } else {
            (&mut self.scan, "scan agent")
        };
        Some(word.tell(part, dataset))
    }

    /// What is wrong now, for a human: of mount and scan agent; empty while nothing is.
    pub(crate) fn trouble(&self) -> serde_json::Value {
        serde_json::json!({"mount": self.mount.reason(), "scan": self.scan.reason()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(reason: Option<&str>) -> Status {
        Status {
            volume: "v".into(),
            ok: reason.is_none(),
            reason: reason.map(str::to_owned),
            message: Some("403 from the server".into()),
        }
    }

    /// Reasons told when everything is told at once.
    fn say(told: &mut Told, role: Role, reason: Option<&str>) -> Vec<String> {
        told.hear(role, &status(reason));
        std::iter::from_fn(|| told.next("n/d")).map(|notice| notice.reason).collect()
    }

    #[test]
    fn each_change_is_told_once_and_with_its_fix() {
        let mut told = Told::default();
        let mut notice = |reason| {
            told.hear(Role::Mount, &status(reason));
            let notice = told.next("n/d");
            assert_eq!(told.next("n/d"), None);
            notice
        };
        assert_eq!(notice(None), None);
        let first = notice(Some("InvalidCredentials")).unwrap();
        assert!(first.warning);
        assert_eq!(
            first.note,
            "Dataset n/d, mount: 403 from the server; correct the keys in the Secret that the Dataset names"
        );
        assert_eq!(notice(Some("InvalidCredentials")), None);
        assert!(notice(Some("AccessDenied")).is_some());
        let last = notice(None).unwrap();
        assert_eq!((last.warning, last.reason.as_str()), (false, "Recovered"));
        assert_eq!(last.note, "Dataset n/d, mount: works again after AccessDenied");
        assert_eq!(notice(None), None);
    }

    #[test]
    fn a_made_up_reason_is_not_shown() {
        let told = &mut Told::default();
        for made_up in ["Send money!", "", "a\nb", &"A".repeat(65)] {
            assert!(say(told, Role::Scan, Some(made_up)).is_empty(), "{made_up:?}");
        }
        assert!(say(told, Role::Scan, None).is_empty());
    }

    #[test]
    fn what_an_earlier_sidecar_said_counts_no_more() {
        let told = &mut Told::default();
        assert_eq!(say(told, Role::Scan, Some("CorruptFile")), ["CorruptFile"]);
        told.attach(Role::Scan);
        assert_eq!(told.trouble(), serde_json::json!({"mount": "", "scan": ""}));
        assert_eq!(told.next("n/d"), None, "nobody has said yet that it works");
        // It still holds, so nothing is new.
        assert!(say(told, Role::Scan, Some("CorruptFile")).is_empty());
        told.attach(Role::Scan);
        assert_eq!(say(told, Role::Scan, None), ["Recovered"]);
        told.attach(Role::Scan);
        assert!(say(told, Role::Scan, None).is_empty());
    }

    #[test]
    fn nothing_waits_behind_what_changes_all_the_time() {
        let told = &mut Told::default();
        told.hear(Role::Mount, &status(Some("A")));
        told.hear(Role::Scan, &status(Some("CorruptFile")));
        told.take_over();
        let mut order = Vec::new();
        for reason in ["B", "C", "D"] {
            told.hear(Role::Mount, &status(Some(reason)));
            order.push(told.next("n/d").unwrap().reason);
        }
        assert_eq!(order, ["B", "CorruptFile", "MountRecovered"]);
        assert_eq!(told.next("n/d").unwrap().reason, "D");
        assert_eq!(told.waits(), None);
    }
}
