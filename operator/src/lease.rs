//! Leader election over one `coordination.k8s.io` Lease. Only the holder reconciles; a holder that
//! cannot renew ends its process before anyone else can have taken over, because half-done work of
//! two leaders is worse than none. Time is compared only with the holder's or the observer's own
//! monotonic clock: a Lease counts as free when it has not changed for its duration.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;

/// How long a Lease is good for after its last change.
const DURATION: Duration = Duration::from_secs(15);
/// How long a holder tries to renew before it gives up.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// How often a holder renews and an observer looks.
const PERIOD: Duration = Duration::from_secs(2);
/// Name of the Lease.
pub const NAME: &str = "lampyris-operator";

/// One replica's part in the election.
pub struct Election {
    leases: Api<Lease>,
    observer: Observer,
}

/// What one replica knows about the Lease.
struct Observer {
    identity: String,
    /// The version of the Lease seen last, and when it was first seen.
    seen: Option<(String, Instant)>,
}

impl std::fmt::Debug for Election {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Election")
            .field("identity", &self.observer.identity)
            .finish_non_exhaustive()
    }
}

impl Election {
    /// A candidate named `identity` in `namespace`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, identity: &str) -> Self {
        let leases = Api::namespaced(client, namespace);
        Self { leases, observer: Observer { identity: identity.to_owned(), seen: None } }
    }

    /// Returns once this replica holds the Lease.
    pub async fn acquire(&mut self) {
        loop {
            match self.attempt().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "look at the lease"),
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Renews until that fails for too long; then the process has to end.
    pub async fn hold(&mut self) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(PERIOD).await;
            let left = RENEW_DEADLINE.saturating_sub(renewed.elapsed());
            match tokio::time::timeout(left, self.attempt()).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => return,
                Ok(Err(error)) if left.is_zero() => {
                    tracing::error!(%error, "renew the lease");
                    return;
                }
                Ok(Err(error)) => tracing::warn!(%error, "renew the lease"),
                Err(_) => return,
            }
        }
    }

    /// Gives the Lease back, so that the next replica need not wait for its end.
    pub async fn release(&mut self) {
        let Ok(Some(mut lease)) = self.leases.get_opt(NAME).await else { return };
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if spec.holder_identity.as_deref() == Some(&self.observer.identity) {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            if let Err(error) = self.leases.replace(NAME, &PostParams::default(), &lease).await {
                tracing::warn!(%error, "release the lease");
            }
        }
    }

    /// Takes or renews the Lease if that is allowed; whether it is ours now.
    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        let Some(mut lease) = self.leases.get_opt(NAME).await? else {
            let fresh = Lease {
                metadata: ObjectMeta { name: Some(NAME.to_owned()), ..ObjectMeta::default() },
                spec: Some(claim(LeaseSpec::default(), &self.observer.identity, Timestamp::now())),
            };
            return won(self.leases.create(&PostParams::default(), &fresh).await);
        };
        let spec = lease.spec.take().unwrap_or_default();
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        if !self.observer.may_take(&spec, version, Instant::now()) {
            return Ok(false);
        }
        lease.spec = Some(claim(spec, &self.observer.identity, Timestamp::now()));
        // The resource version in the object makes this fail if anyone was faster.
        won(self.leases.replace(NAME, &PostParams::default(), &lease).await)
    }
}

impl Observer {
    fn may_take(&mut self, spec: &LeaseSpec, version: String, now: Instant) -> bool {
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder.is_empty() || holder == self.identity {
            return true;
        }
        let seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        let duration = Duration::from_secs(seconds).max(Duration::from_secs(1));
        match &self.seen {
            Some((last, since)) if *last == version => now.duration_since(*since) > duration,
            _ => {
                self.seen = Some((version, now));
                false
            }
        }
    }
}

fn won(written: Result<Lease, kube::Error>) -> Result<bool, kube::Error> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

fn claim(old: LeaseSpec, identity: &str, now: Timestamp) -> LeaseSpec {
    let mine = old.holder_identity.as_deref() == Some(identity);
    let acquired = old.acquire_time.clone().filter(|_| mine);
    LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
        acquire_time: acquired.or(Some(MicroTime(now))),
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(old.lease_transitions.unwrap_or(0) + i32::from(!mine)),
        ..old
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_by(name: &str) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(name.to_owned()),
            lease_duration_seconds: Some(15),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn a_lease_that_keeps_changing_is_never_taken_from_its_holder() {
        let mut observer = Observer { identity: "me".to_owned(), seen: None };
        let start = Instant::now();
        for step in 0..20_u64 {
            let now = start + Duration::from_secs(step * 10);
            assert!(!observer.may_take(&held_by("other"), step.to_string(), now), "{step}");
        }
    }

    #[test]
    fn a_lease_is_free_once_it_has_not_changed_for_its_duration() {
        let mut observer = Observer { identity: "me".to_owned(), seen: None };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!observer.may_take(&held_by("other"), "1".to_owned(), at(0)));
        assert!(!observer.may_take(&held_by("other"), "1".to_owned(), at(15)));
        assert!(observer.may_take(&held_by("other"), "1".to_owned(), at(16)));
    }

    #[test]
    fn ones_own_lease_and_a_released_one_are_free() {
        let mut observer = Observer { identity: "me".to_owned(), seen: None };
        for holder in ["me", ""] {
            assert!(observer.may_take(&held_by(holder), "1".to_owned(), Instant::now()));
        }
    }

    #[test]
    fn a_change_of_holder_is_counted_and_a_renewal_is_not() {
        let now = Timestamp::UNIX_EPOCH;
        let first = claim(LeaseSpec::default(), "a", now);
        assert_eq!(first.lease_transitions, Some(1));
        let renewed = claim(first.clone(), "a", now);
        assert_eq!(renewed.lease_transitions, Some(1));
        assert_eq!(claim(renewed, "b", now).lease_transitions, Some(2));
    }
}
