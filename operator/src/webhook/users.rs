//! Which pods use which Dataset, from the volumes of injected pods: those cannot change after a
//! pod's admission, while its owner may write any annotation on it later.

use std::collections::{BTreeMap, BTreeSet};

use crds::names::{CSI_DRIVER, LABEL_INJECT};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Deserialize;

/// Pods in one answer to a list: each comes whole, however little is kept of it.
const PAGE: u32 = 100;

/// Of a pod, what says which Datasets it uses: the rest is dropped while it is read.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = Pod)]
pub struct UserPod {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: UserSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct UserSpec {
    #[serde(default)]
    volumes: Vec<UserVolume>,
}

#[derive(Clone, Debug, Deserialize)]
struct UserVolume {
    csi: Option<UserCsi>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct UserCsi {
    driver: String,
    #[serde(default)]
    volume_attributes: BTreeMap<String, String>,
}

impl UserPod {
    /// `(namespace, name)` of each Dataset that the node plugin would mount into the pod.
    #[must_use]
    pub fn datasets(&self) -> Vec<(String, String)> {
        let volumes = self.spec.volumes.iter().filter_map(|volume| volume.csi.as_ref());
        let ours = volumes.filter(|csi| csi.driver == CSI_DRIVER);
        ours.filter_map(|csi| {
            let name = csi.volume_attributes.get("dataset")?.clone();
            let stated = csi.volume_attributes.get("namespace").cloned();
            Some((stated.or_else(|| self.namespace())?, name))
        })
        .collect()
    }

    /// Keeps who it is and its volumes of ours: the index holds every injected pod of the cluster.
    fn trim(&mut self) {
        self.metadata = ObjectMeta {
            name: self.metadata.name.take(),
            namespace: self.metadata.namespace.take(),
            uid: self.metadata.uid.take(),
            resource_version: self.metadata.resource_version.take(),
            ..ObjectMeta::default()
        };
        let ours =
            |volume: &UserVolume| volume.csi.as_ref().is_some_and(|csi| csi.driver == CSI_DRIVER);
        self.spec.volumes.retain(ours);
        self.spec.volumes.shrink_to_fit();
    }
}

/// A watch of injected pods.
#[must_use]
pub fn injected() -> watcher::Config {
    watcher::Config::default().labels(&format!("{LABEL_INJECT}=true")).page_size(PAGE)
}

/// A live index of injected pods that have not ended.
#[derive(Clone)]
pub struct Users {
    pods: Store<UserPod>,
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
        let config = injected().fields("status.phase!=Succeeded,status.phase!=Failed");
        let stream = watcher(Api::<UserPod>::all(client), config)
            .modify(UserPod::trim)
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
            if pod.datasets().contains(&wanted) {
                users.insert(format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()));
            }
        }
        users.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector::store::Writer;
    use serde_json::{Value, json};

    use super::*;

    fn volume(driver: &str, attributes: &Value) -> Value {
        json!({"name": "v", "csi": {"driver": driver, "volumeAttributes": attributes}})
    }

    fn pod(name: &str, volumes: &[Value]) -> UserPod {
        let marker = r#"{"datasets":[{"namespace":"victim","name":"secret-data"}]}"#;
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "team", "uid": "u", "resourceVersion": "7",
                "labels": {"lampyris.dev/inject": "true"},
                "annotations": {"lampyris.dev/injected": marker}},
            "spec": {"volumes": volumes, "containers": [{"name": "app", "image": "x"}]},
            "status": {"phase": "Running"},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_pod_uses_what_its_volumes_show_and_not_what_its_annotations_say() {
        let own = volume(CSI_DRIVER, &json!({"dataset": "d", "namespace": "team"}));
        let none = volume(CSI_DRIVER, &json!({"dataset": "here"}));
        let shared = volume(CSI_DRIVER, &json!({"dataset": "e", "namespace": "other"}));
        let others = volume("csi.example.com", &json!({"dataset": "d", "namespace": "victim"}));
        let bare = json!({"name": "v", "csi": {"driver": CSI_DRIVER}});
        let scratch = json!({"name": "v", "emptyDir": {}});
        let mut pod = pod("p", &[own, none, shared, others, bare, scratch]);
        let datasets = [("team", "d"), ("team", "here"), ("other", "e")];
        let datasets = datasets.map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
        assert_eq!(pod.datasets(), datasets);
        pod.trim();
        assert_eq!(pod.datasets(), datasets);
        assert_eq!((pod.spec.volumes.len(), &pod.metadata.annotations), (4, &None));
        assert_eq!((pod.name_any(), pod.namespace()), ("p".to_owned(), Some("team".to_owned())));
        assert_eq!(pod.resource_version().as_deref(), Some("7"));
    }

    #[test]
    fn a_running_pod_that_is_labelled_and_annotated_later_uses_nothing() {
        let mut writer = Writer::default();
        let users = Users { pods: writer.as_reader() };
        let volumes = [volume(CSI_DRIVER, &json!({"dataset": "d", "namespace": "team"}))];
        for pod in [pod("forger", &[]), pod("reader", &volumes)] {
            writer.apply_watcher_event(&watcher::Event::Apply(pod));
        }
        assert_eq!(users.of("team", "d"), ["team/reader"]);
        assert_eq!(users.of("victim", "secret-data"), Vec::<String>::new());
    }
}
