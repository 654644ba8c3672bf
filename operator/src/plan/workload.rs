//! The objects that a StorageCluster consists of. Each storage node is a StatefulSet of one, so
//! that its name carries the permanent id, its claim stays with it, and no two pods ever run on
//! one volume. All of them pass Pod Security `restricted`.

use crds::StorageCluster;
use crds::names::{
    LABEL_CLUSTER, LABEL_COMPONENT, LABEL_NODE_ID, META_ADMIN_PORT, META_PORT, STORAGE_ADMIN_PORT,
    STORAGE_PORT,
};
use crds::shared::{Resources, VolumeSpec};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{Images, owner_reference};

/// User and group of every process of ours that is not root.
pub const USER: i64 = 65_532;
/// Seccomp profile that the node plugin installs; it allows io_uring besides the usual calls.
const STORAGE_SECCOMP: &str = "lampyris/storage-node.json";

/// Name of the StatefulSet and StorageNode of one storage node.
#[must_use]
pub fn storage_name(cluster: &str, node_id: i64) -> String {
    format!("{cluster}-{node_id}")
}

/// Name of the StatefulSet and Service of the manager and metadata process.
#[must_use]
pub fn meta_name(cluster: &str) -> String {
    format!("{cluster}-meta")
}

/// `host:port` of the manager's admin endpoint.
#[must_use]
pub fn manager_admin(cluster: &StorageCluster) -> String {
    let namespace = cluster.namespace().unwrap_or_default();
    format!("{}.{namespace}.svc:{META_ADMIN_PORT}", meta_name(&cluster.name_any()))
}

/// The objects of the manager and metadata process, and what storage nodes share.
#[must_use]
pub fn shared_objects(cluster: &StorageCluster) -> Vec<Value> {
    let name = cluster.name_any();
    vec![
        meta_service(cluster),
        storage_service(cluster),
        disruption_budget(cluster, "meta", &meta_name(&name)),
        disruption_budget(cluster, "storage", &format!("{name}-storage")),
    ]
}

/// The StatefulSet of the manager and metadata process.
#[must_use]
pub fn meta_set(cluster: &StorageCluster, images: &Images) -> Value {
    let name = cluster.name_any();
    let spec = &cluster.spec.metadata;
    let args = json!([
        "serve",
        "--cluster",
        name,
        "--data",
        "/data",
        "--listen",
        format!("0.0.0.0:{META_PORT}"),
        "--admin",
        format!("0.0.0.0:{META_ADMIN_PORT}"),
    ]);
    let server = Server {
        component: "meta",
        image: images.reference("meta"),
        pull_policy: images.pull_policy.clone(),
        command: "/usr/bin/meta",
        args,
        env: json!([]),
        ports: json!([
            {"name": "rpc", "containerPort": META_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": META_ADMIN_PORT, "protocol": "TCP"},
        ]),
        seccomp: json!({"type": "RuntimeDefault"}),
        resources: &spec.resources,
        volume: &spec.volume,
    };
    let set = stateful_set(cluster, &meta_name(&name), &meta_name(&name), None);
    server.finish(set)
}

/// The StatefulSet of storage node `node_id`.
#[must_use]
pub fn storage_set(cluster: &StorageCluster, node_id: i64, images: &Images) -> Value {
    let name = cluster.name_any();
    let spec = &cluster.spec.storage;
    let namespace = cluster.namespace().unwrap_or_default();
    let args = json!([
        "serve",
        "--cluster",
        name,
        "--node-id",
        node_id.to_string(),
        "--data",
        "/data",
        "--manager",
        crds::cluster::manager_address(&name, &namespace),
        "--listen",
        format!("0.0.0.0:{STORAGE_PORT}"),
        "--advertise",
        format!("$(POD_IP):{STORAGE_PORT}"),
        "--admin",
        format!("0.0.0.0:{STORAGE_ADMIN_PORT}"),
        "--io",
        "auto",
    ]);
    let server = Server {
        component: "storage",
        image: images.reference("storage-node"),
        pull_policy: images.pull_policy.clone(),
        command: "/usr/bin/storage-node",
        args,
        env: json!([{"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}]),
        ports: json!([
            {"name": "rpc", "containerPort": STORAGE_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": STORAGE_ADMIN_PORT, "protocol": "TCP"},
        ]),
        seccomp: json!({"type": "Localhost", "localhostProfile": STORAGE_SECCOMP}),
        resources: &spec.resources,
        volume: &spec.volume,
    };
    let own = storage_name(&name, node_id);
    let mut set =
        server.finish(stateful_set(cluster, &own, &format!("{name}-storage"), Some(node_id)));
    let pod = &mut set["spec"]["template"]["spec"];
    if let Some(selector) = &spec.node_selector {
        pod["nodeSelector"] = json!(selector);
    }
    pod["topologySpreadConstraints"] = json!([{
        "maxSkew": 1,
        "topologyKey": spec.failure_domain,
        "whenUnsatisfiable": "DoNotSchedule",
        "nodeTaintsPolicy": "Honor",
        "labelSelector": {"matchLabels": {LABEL_CLUSTER: name, LABEL_COMPONENT: "storage"}},
    }]);
    set
}

/// What differs between the two kinds of servers.
struct Server<'a> {
    component: &'static str,
    image: String,
    pull_policy: String,
    command: &'static str,
    args: Value,
    env: Value,
    ports: Value,
    seccomp: Value,
    resources: &'a Resources,
    volume: &'a VolumeSpec,
}

impl Server<'_> {
    fn finish(self, mut set: Value) -> Value {
        set["metadata"]["labels"][LABEL_COMPONENT] = json!(self.component);
        set["spec"]["selector"]["matchLabels"][LABEL_COMPONENT] = json!(self.component);
        set["spec"]["template"]["metadata"]["labels"][LABEL_COMPONENT] = json!(self.component);
        set["spec"]["template"]["spec"] = self.pod();
        set["spec"]["volumeClaimTemplates"] = json!([self.claim(&set["metadata"]["labels"])]);
        set
    }

    fn pod(&self) -> Value {
        let mut container = json!({
            "name": self.component,
            "image": self.image,
            "imagePullPolicy": self.pull_policy,
            "command": [self.command],
            "args": self.args,
            "ports": self.ports,
            "resources": with_defaults(self.resources),
            "securityContext": restricted(&self.seccomp),
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "readinessProbe": probe("/readyz", 2, 3),
            "livenessProbe": probe("/healthz", 10, 6),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        });
        if self.env.as_array().is_some_and(|list| !list.is_empty()) {
            container["env"] = self.env.clone();
        }
        json!({
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 30,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        })
    }

    fn claim(&self, labels: &Value) -> Value {
        let mut claim = json!({
            "metadata": {"name": "data", "labels": labels},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": self.volume.size}},
            },
        });
        if let Some(class) = &self.volume.storage_class_name {
            claim["spec"]["storageClassName"] = json!(class);
        }
        claim
    }
}

fn stateful_set(
    cluster: &StorageCluster,
    name: &str,
    service: &str,
    node_id: Option<i64>,
) -> Value {
    let mut labels = labels(cluster);
    if let Some(id) = node_id {
        labels[LABEL_NODE_ID] = json!(id.to_string());
    }
    let mut selector = json!({LABEL_CLUSTER: cluster.name_any()});
    if let Some(id) = node_id {
        selector[LABEL_NODE_ID] = json!(id.to_string());
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(cluster, name, &labels),
        "spec": {
            "replicas": 1,
            "serviceName": service,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": labels}, "spec": {}},
        },
    })
}

fn meta_service(cluster: &StorageCluster) -> Value {
    let name = cluster.name_any();
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(cluster, &meta_name(&name), &labels(cluster)),
        "spec": {
            "selector": {LABEL_CLUSTER: name, LABEL_COMPONENT: "meta"},
            "publishNotReadyAddresses": true,
            "ports": [
                {"name": "rpc", "port": META_PORT, "targetPort": "rpc", "protocol": "TCP"},
                {"name": "admin", "port": META_ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"},
            ],
        },
    })
}

fn storage_service(cluster: &StorageCluster) -> Value {
    let name = cluster.name_any();
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(cluster, &format!("{name}-storage"), &labels(cluster)),
        "spec": {
            "clusterIP": "None",
            "selector": {LABEL_CLUSTER: name, LABEL_COMPONENT: "storage"},
            "publishNotReadyAddresses": true,
            "ports": [{"name": "rpc", "port": STORAGE_PORT, "targetPort": "rpc", "protocol": "TCP"}],
        },
    })
}

fn disruption_budget(cluster: &StorageCluster, component: &str, name: &str) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(cluster, name, &labels(cluster)),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": {
                LABEL_CLUSTER: cluster.name_any(), LABEL_COMPONENT: component,
            }},
        },
    })
}

/// Labels of everything that belongs to the cluster.
#[must_use]
pub fn labels(cluster: &StorageCluster) -> Value {
    json!({
        "app.kubernetes.io/name": "lampyris",
        "app.kubernetes.io/managed-by": "lampyris-operator",
        LABEL_CLUSTER: cluster.name_any(),
    })
}

/// Metadata of an object that the cluster owns.
#[must_use]
pub fn metadata(cluster: &StorageCluster, name: &str, labels: &Value) -> Value {
    let uid = cluster.uid().unwrap_or_default();
    json!({
        "name": name,
        "namespace": cluster.namespace().unwrap_or_default(),
        "labels": labels,
        "ownerReferences": [owner_reference("StorageCluster", &cluster.name_any(), &uid)],
    })
}

/// The strictest context that Pod Security knows, with this seccomp profile.
#[must_use]
pub fn restricted(seccomp: &Value) -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": true,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": seccomp,
    })
}

/// Requests and limits for both resources, whatever the user left out.
fn with_defaults(resources: &Resources) -> Value {
    let pick = |map: &Option<_>, key: &str| -> Option<String> {
        let map: &std::collections::BTreeMap<
            String,
            k8s_openapi::apimachinery::pkg::api::resource::Quantity,
        > = map.as_ref()?;
        map.get(key).map(|quantity| quantity.0.clone())
    };
    let mut out = json!({"requests": {}, "limits": {}});
    for (key, request, limit) in [("cpu", "100m", "2"), ("memory", "128Mi", "512Mi")] {
        let asked = pick(&resources.requests, key);
        let capped = pick(&resources.limits, key);
        // A lone request above our limit raises the limit; a lone limit below our request lowers it.
        let request_or = asked.clone().or_else(|| smaller(capped.as_deref(), request));
        let limit_or = capped.clone().or_else(|| larger(asked.as_deref(), limit));
        out["requests"][key] = json!(request_or);
        out["limits"][key] = json!(limit_or);
    }
    out
}

fn smaller(bound: Option<&str>, default: &str) -> Option<String> {
    let pick = match bound {
        Some(text) if super::diff::quantity_milli(text) < super::diff::quantity_milli(default) => {
            text
        }
        _ => default,
    };
    Some(pick.to_owned())
}

fn larger(bound: Option<&str>, default: &str) -> Option<String> {
    let pick = match bound {
        Some(text) if super::diff::quantity_milli(text) > super::diff::quantity_milli(default) => {
            text
        }
        _ => default,
    };
    Some(pick.to_owned())
}

fn probe(path: &str, period_s: i32, failures: i32) -> Value {
    json!({
        "httpGet": {"path": path, "port": "admin", "scheme": "HTTP"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 2,
    })
}
