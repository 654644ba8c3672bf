//! Which pods use which Dataset, from the marker that the webhook leaves on each injected pod.

use std::collections::BTreeSet;

use crds::names::{ANNOTATION_INJECTED, LABEL_INJECT};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;

/// A live index of injected pods that have not ended.
#[derive(Clone)]
pub struct Users {
    pods: Store<PartialObjectMeta<Pod>>,
}

impl std::fmt::Debug for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Users").finish_non_exhaustive()
    }
}

impl Users {
    /// Starts watching; returns once the index is complete.
    pub async fn start(client: Client) -> Self {
        let (pods, writer) = reflector::store();
        let config = watcher::Config::default()
            .labels(&format!("{LABEL_INJECT}=true"))
            .fields("status.phase!=Succeeded,status.phase!=Failed");
        let stream = watcher(Api::<PartialObjectMeta<Pod>>::all(client), config)
            .modify(|pod| pod.metadata.managed_fields = None)
            .default_backoff()
            .reflect(writer);
        tokio::spawn(stream.for_each(|_| futures::future::ready(())));
        if let Err(error) = pods.wait_until_ready().await {
            tracing::error!(%error, "watch injected pods");
        }
        Self { pods }
    }

    /// The pods that use Dataset `namespace`/`name`, as `namespace/name`, sorted.
    #[must_use]
    pub fn of(&self, namespace: &str, name: &str) -> Vec<String> {
        let wanted = (namespace.to_owned(), name.to_owned());
        let mut users = BTreeSet::new();
        for pod in self.pods.state() {
            let Some(marker) = pod.annotations().get(ANNOTATION_INJECTED) else { continue };
            if datasets_of(marker).contains(&wanted) {
                users.insert(format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()));
            }
        }
        users.into_iter().collect()
    }
}

/// `(namespace, name)` of each Dataset that a pod's marker speaks of; none if it does not parse.
#[must_use]
pub fn datasets_of(marker: &str) -> Vec<(String, String)> {
    let value: Value = serde_json::from_str(marker).unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let list = value["datasets"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(|item| Some((text(&item["namespace"])?, text(&item["name"])?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_names_its_datasets_and_a_forged_one_names_none() {
        let marker = r#"{"version":"1","datasets":[{"namespace":"a","name":"b"},{"name":"c"}]}"#;
        assert_eq!(datasets_of(marker), [("a".to_owned(), "b".to_owned())]);
        for forged in ["", "7", "{", r#"{"datasets":{"x":1}}"#] {
            assert_eq!(datasets_of(forged), [], "{forged}");
        }
    }
}
