//! How fast the owner of a pod is told: each Event is an object that the API server keeps for everybody.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::cluster::{Cluster, Notice};
use crate::volume::Pod;

/// What is told of one pod: this much at once, then one thing each [`INTERVAL`].
const BURST: u32 = 10;
/// See [`BURST`].
const INTERVAL: Duration = Duration::from_secs(30);

/// How many Events one pod may cause now.
#[derive(Debug)]
pub(crate) struct Allowance {
    left: u32,
    burst: u32,
    interval: Duration,
    /// When the last one was added.
    at: Instant,
}

impl Default for Allowance {
    fn default() -> Self {
        Self::new(BURST, INTERVAL)
    }
}

impl Allowance {
    fn new(burst: u32, interval: Duration) -> Self {
        Self { left: burst, burst, interval, at: Instant::now() }
    }

    /// How long it takes until one is there at `now`; none if one is.
    fn missing(&mut self, now: Instant) -> Option<Duration> {
        while self.left < self.burst && now.duration_since(self.at) >= self.interval {
            (self.left, self.at) = (self.left + 1, self.at + self.interval);
        }
        if self.left == self.burst {
            self.at = now;
        }
        (self.left == 0).then(|| (self.at + self.interval).duration_since(now))
    }

    async fn wait(&mut self) {
        while let Some(missing) = self.missing(Instant::now()) {
            tokio::time::sleep(missing).await;
        }
    }

    const fn spend(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

/// Shows what `next` has to tell of a pod, one after the other, each time it is woken, until nobody can wake it any more.
/// Asked only when something may be told, `next` has the last word by then.
pub(crate) async fn show(
    cluster: Arc<dyn Cluster>,
    pod: Pod,
    mut allowance: Allowance,
    mut wakes: mpsc::Receiver<()>,
    next: impl Fn() -> Option<Notice> + Send,
) {
    while wakes.recv().await.is_some() {
        loop {
            allowance.wait().await;
            let Some(notice) = next() else { break };
            allowance.spend();
            cluster.notify(&pod, notice).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{ClusterError, DatasetSpec};
    use crate::told::Told;
    use keeper::handover::{Role, Status};
    use std::sync::Mutex;

    #[derive(Default)]
    struct Twin(Mutex<Vec<String>>);

    #[async_trait::async_trait]
    impl Cluster for Twin {
        async fn dataset(&self, _: &str, name: &str) -> Result<DatasetSpec, ClusterError> {
            Err(ClusterError::NoDataset(name.to_owned()))
        }

        async fn notify(&self, _: &Pod, notice: Notice) {
            self.0.lock().unwrap().push(notice.reason);
        }
    }

    #[tokio::test]
    async fn a_pod_that_says_something_else_all_the_time_is_shown_with_its_last_word() {
        let (cluster, told) = (Arc::new(Twin::default()), Arc::new(Mutex::new(Told::default())));
        let (wake, wakes) = mpsc::channel(1);
        let allowance = Allowance::new(BURST, Duration::from_secs(2));
        let pod = Pod { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let said = Arc::clone(&told);
        let next = move || said.lock().unwrap().next("n/d");
        let showing = tokio::spawn(show(Arc::clone(&cluster) as _, pod, allowance, wakes, next));
        let say = |reason: Option<&str>| {
            let ok = reason.is_none();
            let reason = reason.map(str::to_owned);
            let status = Status { volume: "v".into(), ok, reason, message: None };
            told.lock().unwrap().hear(Role::Mount, &status);
            // Full: awake.
            let _ = wake.try_send(());
        };
        for round in 0..1000 {
            say(Some(if round % 2 == 0 { "AccessDenied" } else { "BucketNotFound" }));
            tokio::task::yield_now().await;
        }
        say(Some("TlsFailed"));
        let until = Instant::now() + Duration::from_secs(20);
        while cluster.0.lock().unwrap().last().map(String::as_str) != Some("TlsFailed") {
            assert!(Instant::now() < until, "the last word is told");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let shown = cluster.0.lock().unwrap().len();
        assert!((10..=12).contains(&shown), "{shown} of 1001");
        // And it ends with those who wake it.
        drop(wake);
        tokio::time::timeout(Duration::from_secs(20), showing).await.unwrap().unwrap();
    }

    #[test]
    fn what_is_allowed_grows_with_time_up_to_a_bound() {
        let mut allowance = Allowance::new(2, Duration::from_secs(30));
        let mut now = allowance.at;
        let mut used_after = |seconds| {
            now += Duration::from_secs(seconds);
            let mut used = 0;
            while allowance.missing(now).is_none() {
                allowance.spend();
                used += 1;
            }
            (used, allowance.missing(now).unwrap().as_secs())
        };
        assert_eq!(used_after(3600), (2, 30));
        assert_eq!(used_after(29), (0, 1));
        assert_eq!(used_after(2), (1, 29));
        assert_eq!(used_after(3600), (2, 30));
    }
}
