//! The injected pod, as a JSON Patch on the raw pod: fields that we do not know survive, and the
//! user's containers are touched only in `volumeMounts`. Applied to its own result it changes
//! nothing, and it adds what another webhook's containers lack when it is called again.

use crds::Dataset;
use crds::dataset::Format;
use crds::names::{ANNOTATION_INJECTED, CSI_DRIVER};
use serde::Serialize;
use serde_json::{Value, json};

use super::ask::{Ask, Denial, Mention, OWN_DIR, shown};
use crate::plan::Images;
use crate::plan::diff::{self, quantity_milli};
use crate::plan::workload::{USER, restricted};

/// Folder that only our sidecars see.
const PRIVATE_DIR: &str = "/run/lampyris/private";
/// Folder with the sockets that the user's containers connect to.
const APP_DIR: &str = "/run/lampyris/app";
/// Name of the mount sidecar.
const MOUNT: &str = "lampyris-mount";
/// Name of the scan agent.
const SCAN: &str = "lampyris-scan";

/// What the webhook leaves on a pod.
#[derive(Debug, Serialize)]
struct Marker<'a> {
    version: &'a str,
    datasets: Vec<MarkedDataset<'a>>,
    scan: bool,
}

#[derive(Debug, Serialize)]
struct MarkedDataset<'a> {
    namespace: &'a str,
    name: &'a str,
    path: &'a str,
    mode: &'a str,
}

/// The patch for `pod`, which runs in `namespace` and asks for `ask`; `datasets` holds each Dataset
/// in the order of the mentions, `None` where it does not exist. Empty if nothing is missing.
pub fn patch(
    pod: &Value,
    namespace: &str,
    ask: &Ask,
    datasets: &[Option<Dataset>],
    images: &Images,
) -> Result<Vec<Value>, Denial> {
    let injected = pod["metadata"]["annotations"][ANNOTATION_INJECTED].is_string();
    if !injected {
        check_names(pod)?;
    }
    let volumes = volumes(namespace, ask, datasets)?;
    let sidecars = sidecars(ask, images);
    if injected {
        check_volumes(pod, &volumes)?;
        check_sidecars(pod, &sidecars)?;
    }
    for container in items(&pod["spec"]["ephemeralContainers"]) {
        check_mounts("ephemeralContainers", container, &[])?;
    }
    let mut out = Vec::new();
    append(&mut out, "/spec/volumes", &pod["spec"]["volumes"], volumes);
    for list in ["initContainers", "containers"] {
        for (index, container) in items(&pod["spec"][list]).enumerate() {
            if !is_ours(container) {
                check_mounts(list, container, &mounts(ask))?;
                check_paths(list, container, ask)?;
                let path = format!("/spec/{list}/{index}/volumeMounts");
                append(&mut out, &path, &container["volumeMounts"], mounts(ask));
            }
        }
    }
    add_sidecars(&mut out, pod, sidecars);
    mark(&mut out, pod, ask);
    Ok(out)
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn is_ours(container: &Value) -> bool {
    container["name"] == MOUNT || container["name"] == SCAN
}

fn has_our_name(item: &Value) -> bool {
    item["name"].as_str().is_some_and(|name| name.starts_with("lampyris-"))
}

fn name_of(item: &Value) -> String {
    shown(item["name"].as_str().unwrap_or_default())
}

fn add(path: &str, value: &Value) -> Value {
    json!({"op": "add", "path": path, "value": value})
}

/// Adds those of `wanted` whose name (and mount path) the list at `path` does not have.
fn append(out: &mut Vec<Value>, path: &str, have: &Value, wanted: Vec<Value>) {
    let same = |a: &Value, b: &Value| a["name"] == b["name"] && a["mountPath"] == b["mountPath"];
    let missing: Vec<Value> =
        wanted.into_iter().filter(|item| !items(have).any(|old| same(old, item))).collect();
    if missing.is_empty() {
        return;
    }
    if have.is_array() {
        out.extend(missing.into_iter().map(|item| add(&format!("{path}/-"), &item)));
    } else {
        out.push(add(path, &Value::Array(missing)));
    }
}

fn check_names(pod: &Value) -> Result<(), Denial> {
    for list in ["volumes", "initContainers", "containers"] {
        if let Some(item) = items(&pod["spec"][list]).find(|item| has_our_name(item)) {
            return Err(Denial::ReservedName { list, name: name_of(item) });
        }
    }
    Ok(())
}

/// A pod that carries our mark was injected a moment ago, or copied from one that was and perhaps edited: a volume of
/// ours that shows something else than the pod asks for must not stay under the name of what it asks for.
fn check_volumes(pod: &Value, wanted: &[Value]) -> Result<(), Denial> {
    let fits = |have: &Value| {
        wanted.iter().any(|want| want["name"] == have["name"] && diff::covers(want, have))
    };
    match items(&pod["spec"]["volumes"]).find(|v| has_our_name(v) && !fits(v)) {
        Some(stale) => Err(Denial::EarlierInjection { list: "volumes", name: name_of(stale) }),
        None => Ok(()),
    }
}

/// Nor does the mark make a container ours: it is where we put it, runs what we run and sees our volumes as we show
/// them. Its image may differ: registries are mirrored by other webhooks, which may have come after us.
fn check_sidecars(pod: &Value, wanted: &[Value]) -> Result<(), Denial> {
    if let Some(item) = items(&pod["spec"]["containers"]).find(|item| has_our_name(item)) {
        return Err(Denial::ReservedName { list: "containers", name: name_of(item) });
    }
    let list = "initContainers";
    for have in items(&pod["spec"][list]).filter(|item| has_our_name(item)) {
        let fits = |want: &&Value| {
            ["name", "command", "args", "restartPolicy"].iter().all(|key| want[key] == have[key])
        };
        let Some(want) = wanted.iter().find(fits) else {
            return Err(Denial::EarlierInjection { list, name: name_of(have) });
        };
        let mounts: Vec<Value> = items(&want["volumeMounts"]).cloned().collect();
        check_mounts(list, have, &mounts)?;
    }
    Ok(())
}

/// A volume of ours is mounted as `allowed` or not at all: one of them holds the sockets that hand out FUSE
/// descriptors and keys.
fn check_mounts(list: &'static str, container: &Value, allowed: &[Value]) -> Result<(), Denial> {
    let same = |mount: &Value| allowed.iter().any(|ours| plain(ours) == plain(mount));
    let mounts = items(&container["volumeMounts"]).filter(|mount| !same(mount));
    let devices = items(&container["volumeDevices"]);
    let mut foreign = mounts
        .map(|item| ("volumeMounts", item))
        .chain(devices.map(|item| ("volumeDevices", item)))
        .filter(|(_, item)| has_our_name(item));
    match foreign.next() {
        Some((field, item)) => Err(Denial::ForeignMount {
            list,
            container: name_of(container),
            field,
            volume: name_of(item),
        }),
        None => Ok(()),
    }
}

/// A mount without the fields that say nothing: the server drops them, and webhooks write them.
fn plain(mount: &Value) -> Value {
    let mut mount = mount.clone();
    if let Some(fields) = mount.as_object_mut() {
        fields.retain(|_, value| *value != json!(false) && *value != json!("") && !value.is_null());
    }
    mount
}

fn check_paths(list: &'static str, container: &Value, ask: &Ask) -> Result<(), Denial> {
    for mount in items(&container["volumeMounts"]) {
        // Those of ours are as we mount them: see `check_mounts`.
        let taken = mount["mountPath"].as_str().filter(|_| !has_our_name(mount));
        let Some(taken) = taken else { continue };
        let paths = ask.mentions.iter().map(|mention| mention.path.as_str());
        // A user's volume that holds the mount point is fine (its folder is made by the kubelet);
        // the same place, one inside a dataset, or one inside our own folder is not.
        let clash = |path: &&str| taken.trim_end_matches('/') == *path || inside(taken, path);
        if let Some(path) = paths.chain([OWN_DIR]).find(clash) {
            return Err(Denial::PathTaken {
                list,
                container: container["name"].as_str().unwrap_or_default().to_owned(),
                taken: taken.to_owned(),
                path: path.to_owned(),
            });
        }
    }
    Ok(())
}

fn inside(inner: &str, outer: &str) -> bool {
    inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'))
}

fn volumes(namespace: &str, ask: &Ask, datasets: &[Option<Dataset>]) -> Result<Vec<Value>, Denial> {
    let mut list = Vec::new();
    let mut scannable = false;
    for (index, mention) in ask.mentions.iter().enumerate() {
        let dataset = datasets.get(index).and_then(Option::as_ref);
        let dataset = dataset.ok_or_else(|| Denial::UnknownDataset(mention.full_name()))?;
        scannable |= dataset.spec.format == Format::Vortex;
        list.push(csi_volume(index, mention, dataset, namespace)?);
    }
    if ask.scan && !scannable {
        return Err(Denial::NothingToScan);
    }
    for name in ["lampyris-private", "lampyris-app"] {
        list.push(json!({"name": name, "emptyDir": {"sizeLimit": "64Mi"}}));
    }
    Ok(list)
}

fn csi_volume(
    index: usize,
    mention: &Mention,
    dataset: &Dataset,
    namespace: &str,
) -> Result<Value, Denial> {
    if dataset.metadata.deletion_timestamp.is_some() {
        return Err(Denial::DatasetDeleting(mention.full_name()));
    }
    if mention.writable && dataset.spec.read_only {
        return Err(Denial::ReadOnly(mention.full_name()));
    }
    let mut csi = json!({
        "driver": CSI_DRIVER,
        "readOnly": !mention.writable,
        // The ring finds a file by the path under which the pod sees it.
        "volumeAttributes": {
            "dataset": mention.name,
            "namespace": mention.namespace,
            "mountPath": mention.path,
        },
    });
    if let Some(secret) = dataset.spec.source.secret_name() {
        // A pod can only be given Secrets of its own namespace.
        if mention.namespace != namespace {
            return Err(Denial::ForeignSecret {
                dataset: mention.full_name(),
                namespace: mention.namespace.clone(),
            });
        }
        csi["nodePublishSecretRef"] = json!({"name": secret});
    }
    Ok(json!({"name": format!("lampyris-{index}"), "csi": csi}))
}

fn mounts(ask: &Ask) -> Vec<Value> {
    let mut list: Vec<Value> = ask
        .mentions
        .iter()
        .enumerate()
        .map(|(index, mention)| {
            json!({
                "name": format!("lampyris-{index}"),
                "mountPath": mention.path,
                "readOnly": !mention.writable,
                "mountPropagation": "HostToContainer",
            })
        })
        .collect();
    list.push(json!({"name": "lampyris-app", "mountPath": APP_DIR, "readOnly": true}));
    list
}

fn sidecars(ask: &Ask, images: &Images) -> Vec<Value> {
    let mut mount = sidecar(MOUNT, "mount", "/usr/bin/lampyris-mount", images);
    mount["resources"] = resources(ask, ("50m", "2"), ("64Mi", "256Mi"));
    // Never fails within a pod's life: a failed startup probe of a sidecar can end the pod.
    mount["startupProbe"] = json!({
        "exec": {"command": ["/usr/bin/lampyris-mount", "probe", "--private-dir", PRIVATE_DIR]},
        "periodSeconds": 1,
        "failureThreshold": 86_400,
    });
    let mut wanted = vec![mount];
    if ask.scan {
        let mut scan = sidecar(SCAN, "scan-agent", "/usr/bin/scan-agent", images);
        scan["resources"] = resources(ask, ("100m", "2"), ("128Mi", "1Gi"));
        wanted.push(scan);
    }
    wanted
}

/// The native sidecars, before every other init container, so that those see the data too.
fn add_sidecars(out: &mut Vec<Value>, pod: &Value, wanted: Vec<Value>) {
    let have = &pod["spec"]["initContainers"];
    let missing = |item: &Value| !items(have).any(|old| old["name"] == item["name"]);
    if have.is_array() {
        for (index, item) in wanted.into_iter().enumerate().filter(|(_, item)| missing(item)) {
            out.push(add(&format!("/spec/initContainers/{index}"), &item));
        }
    } else {
        out.push(add("/spec/initContainers", &Value::Array(wanted)));
    }
}

fn sidecar(name: &str, image: &str, command: &str, images: &Images) -> Value {
    let mut context = restricted(&json!({"type": "RuntimeDefault"}));
    context["runAsUser"] = json!(USER);
    context["runAsGroup"] = json!(USER);
    context["privileged"] = json!(false);
    json!({
        "name": name,
        "image": images.reference(image),
        "imagePullPolicy": images.pull_policy,
        "restartPolicy": "Always",
        "command": [command],
        "args": ["serve", "--private-dir", PRIVATE_DIR, "--app-dir", APP_DIR],
        "securityContext": context,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "lampyris-private", "mountPath": PRIVATE_DIR},
            {"name": "lampyris-app", "mountPath": APP_DIR},
        ],
    })
}

fn resources(ask: &Ask, cpu: (&str, &str), memory: (&str, &str)) -> Value {
    let (cpu_request, cpu_limit) = bounded(&ask.sizes.cpu, cpu);
    let (memory_request, memory_limit) = bounded(&ask.sizes.memory, memory);
    json!({
        "requests": {"cpu": cpu_request, "memory": memory_request},
        "limits": {"cpu": cpu_limit, "memory": memory_limit},
    })
}

/// Request and limit: what was asked for, else the default, moved so that the request fits.
fn bounded(asked: &(Option<String>, Option<String>), default: (&str, &str)) -> (String, String) {
    let above = |a: &str, b: &str| quantity_milli(a) > quantity_milli(b);
    match asked {
        (Some(request), Some(limit)) => (request.clone(), limit.clone()),
        (Some(request), None) if above(request, default.1) => (request.clone(), request.clone()),
        (Some(request), None) => (request.clone(), default.1.to_owned()),
        (None, Some(limit)) if above(default.0, limit) => (limit.clone(), limit.clone()),
        (None, Some(limit)) => (default.0.to_owned(), limit.clone()),
        (None, None) => (default.0.to_owned(), default.1.to_owned()),
    }
}

fn mark(out: &mut Vec<Value>, pod: &Value, ask: &Ask) {
    let datasets = ask.mentions.iter().map(|mention| MarkedDataset {
        namespace: &mention.namespace,
        name: &mention.name,
        path: &mention.path,
        mode: if mention.writable { "rw" } else { "ro" },
    });
    let marker =
        Marker { version: env!("CARGO_PKG_VERSION"), datasets: datasets.collect(), scan: ask.scan };
    let text = serde_json::to_string(&marker).unwrap_or_default();
    if pod["metadata"]["annotations"][ANNOTATION_INJECTED] != text.as_str() {
        let key = ANNOTATION_INJECTED.replace('~', "~0").replace('/', "~1");
        out.push(add(&format!("/metadata/annotations/{key}"), &json!(text)));
    }
}
