//! The webhook's decisions: golden patches in `injection/`, and every refusal with its message.
//!
//! Run with `UPDATE=1` to write the patches anew; read the difference before committing it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::path::PathBuf;

use crds::Dataset;
use operator::plan::Images;
use operator::webhook::ask::{self, Denial};
use operator::webhook::inject;
use serde_json::{Value, json};

fn images() -> Images {
    Images { registry: "r".to_owned(), tag: "1".to_owned(), pull_policy: "IfNotPresent".to_owned() }
}

/// The Datasets of namespace `team`: what the tests' pods can name.
fn dataset(namespace: &str, name: &str) -> Option<Dataset> {
    let s3 = json!({"s3": {"uri": "s3://data/x"}});
    let secret = json!({"s3": {"uri": "s3://data/x", "secretRef": {"name": "keys"}}});
    let cluster = json!({"cluster": {"ref": {"name": "train"}, "path": "/x"}});
    let (format, source, read_only) = match (namespace, name) {
        ("team", "flights") => ("Vortex", secret, true),
        ("team", "images" | "going") => ("Files", s3, true),
        ("team", "scratch") => ("Files", cluster, false),
        _ => return None,
    };
    let mut object = json!({
        "apiVersion": "lampyris.dev/v1alpha1", "kind": "Dataset",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"format": format, "source": source, "readOnly": read_only},
    });
    if name == "going" {
        object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
    }
    Some(serde_json::from_value(object).unwrap())
}

fn patch(pod: &Value, namespace: &str) -> Result<Vec<Value>, Denial> {
    let ask = ask::read(pod, namespace)?;
    let found: Vec<_> = ask.mentions.iter().map(|m| dataset(&m.namespace, &m.name)).collect();
    inject::patch(pod, namespace, &ask, &found, &images())
}

fn apply(pod: &Value, operations: &[Value]) -> Value {
    let mut out = pod.clone();
    let patch: json_patch::Patch = serde_json::from_value(json!(operations)).unwrap();
    json_patch::patch(&mut out, &patch).unwrap();
    out
}

fn cases() -> Vec<(PathBuf, Value)> {
    let folder = "tests/injection";
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_str().unwrap().ends_with(".pod.yaml"))
        .map(|path| {
            let pod = serde_yaml_ng::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            (path, pod)
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(found.len() >= 5, "{} pods", found.len());
    found
}

#[test]
fn patches_equal_their_goldens() {
    for (path, pod) in cases() {
        let golden = PathBuf::from(path.to_str().unwrap().replace(".pod.yaml", ".patch.json"));
        let said = json!(patch(&pod, "team").unwrap());
        if std::env::var_os("UPDATE").is_some() {
            let text = serde_json::to_string_pretty(&said).unwrap();
            std::fs::write(&golden, text + "\n").unwrap();
        }
        let want: Value = serde_json::from_str(&std::fs::read_to_string(&golden).unwrap()).unwrap();
        assert_eq!(said, want, "{}", path.display());
    }
}

#[test]
fn an_injected_pod_is_not_changed_again() {
    for (path, pod) in cases() {
        let injected = apply(&pod, &patch(&pod, "team").unwrap());
        assert_eq!(patch(&injected, "team").unwrap(), Vec::<Value>::new(), "{}", path.display());
    }
}

#[test]
fn containers_of_the_user_change_in_volume_mounts_only() {
    for (path, pod) in cases() {
        let injected = apply(&pod, &patch(&pod, "team").unwrap());
        for list in ["containers", "initContainers"] {
            for old in pod["spec"][list].as_array().into_iter().flatten() {
                let all = injected["spec"][list].as_array().unwrap();
                let mut new = all.iter().find(|c| c["name"] == old["name"]).unwrap().clone();
                let mut old = old.clone();
                for container in [&mut new, &mut old] {
                    container.as_object_mut().unwrap().remove("volumeMounts");
                }
                assert_eq!(new.to_string(), old.to_string(), "{}", path.display());
            }
        }
        let (mut new, mut old) = (injected["spec"].clone(), pod["spec"].clone());
        for part in [&mut new, &mut old] {
            for list in ["containers", "initContainers", "volumes"] {
                part.as_object_mut().unwrap().remove(list);
            }
        }
        assert_eq!(new, old, "{}", path.display());
    }
}

#[test]
fn sidecars_come_first_and_pass_pod_security_restricted() {
    for (path, pod) in cases() {
        let injected = apply(&pod, &patch(&pod, "team").unwrap());
        let scan = pod["metadata"]["annotations"]["lampyris.dev/scan"] == "true";
        let names =
            if scan { vec!["lampyris-mount", "lampyris-scan"] } else { vec!["lampyris-mount"] };
        for (index, name) in names.iter().enumerate() {
            let sidecar = &injected["spec"]["initContainers"][index];
            assert_eq!(sidecar["name"], *name, "{}", path.display());
            assert_eq!(sidecar["restartPolicy"], "Always");
            let context = &sidecar["securityContext"];
            assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
            assert_eq!(context["allowPrivilegeEscalation"], false);
            assert_eq!(context["runAsNonRoot"], true);
            assert_eq!(context["readOnlyRootFilesystem"], true);
            assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
            for part in ["requests", "limits"] {
                assert!(sidecar["resources"][part]["cpu"].is_string());
                assert!(sidecar["resources"][part]["memory"].is_string());
            }
            let mounts = sidecar["volumeMounts"].as_array().unwrap();
            assert!(
                mounts
                    .iter()
                    .all(|m| m["mountPath"].as_str().unwrap().starts_with("/run/lampyris/"))
            );
        }
    }
}

#[test]
fn a_container_that_another_webhook_adds_later_is_mounted_at_the_next_call() {
    let (_, pod) = cases().remove(0);
    let mut injected = apply(&pod, &patch(&pod, "team").unwrap());
    injected["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .push(json!({"name": "late", "image": "x"}));
    let index = injected["spec"]["containers"].as_array().unwrap().len() - 1;
    let again = patch(&injected, "team").unwrap();
    assert_eq!(again.len(), 1);
    assert_eq!(again[0]["path"], format!("/spec/containers/{index}/volumeMounts"));
}

fn pod(datasets: &str) -> Value {
    json!({
        "metadata": {"name": "p", "labels": {"lampyris.dev/inject": "true"}, "annotations": {"lampyris.dev/datasets": datasets}},
        "spec": {"containers": [{"name": "app", "image": "x"}]},
    })
}

#[test]
fn a_refusal_names_the_field_and_the_fix() {
    let long = vec!["a:/a"; 17].join(",");
    let table: [(&str, &[&str]); 25] = [
        ("", &["annotations[lampyris.dev/datasets] is missing", "name a Dataset"]),
        (&long, &["names 17 datasets", "at most 16"]),
        ("flights", &["\"flights\" has no mount path", "write name[@namespace]:/mount[:ro|rw]"]),
        ("flights:data", &["not absolute"]),
        ("flights:/", &["empty part"]),
        ("flights:/a/../b", &["empty part, . or .."]),
        ("flights:/a//b", &["empty part"]),
        ("flights:/data:rx", &["other than ro or rw"]),
        ("flights:/data:ro:x", &["other than ro or rw"]),
        ("Flights:/data", &["no valid Dataset name"]),
        ("flights@:/data", &["no valid namespace"]),
        ("flights:/run/lampyris/x", &["which is ours"]),
        ("flights:/run", &["which is ours"]),
        ("flights:/data,images:/data", &["/data and /data overlap", "separate paths"]),
        ("flights:/data,images:/data/x", &["/data and /data/x overlap"]),
        ("nothing:/data", &["Dataset team/nothing does not exist", "create it first"]),
        ("flights@other:/data", &["Dataset other/flights does not exist"]),
        ("images:/data:rw", &["Dataset team/images is read-only", "write :ro"]),
        ("going:/data", &["team/going is being deleted"]),
        ("flights:/data,,", &["has no mount path"]),
        ("flights-:/data", &["no valid Dataset name"]),
        ("-flights:/data", &["no valid Dataset name"]),
        ("flights@team-:/data", &["no valid namespace"]),
        (":/data", &["no valid Dataset name"]),
        ("flights:", &["not absolute"]),
    ];
    for (text, parts) in table {
        let message = patch(&pod(text), "team").unwrap_err().to_string();
        for part in parts {
            assert!(message.contains(part), "{text}: {message}");
        }
        assert!(message.starts_with("metadata.") || message.starts_with("spec."), "{message}");
    }
}

#[test]
fn a_refusal_quotes_no_more_than_a_line_of_what_it_refuses() {
    let long = "x".repeat(100_000);
    for key in ["datasets", "scan", "cpu-request", "cpu-limit", "memory-request", "memory-limit"] {
        let mut pod = pod("images:/data");
        pod["metadata"]["annotations"][format!("lampyris.dev/{key}")] = json!(long);
        let message = patch(&pod, "team").unwrap_err().to_string();
        assert!(message.contains(&format!("annotations[lampyris.dev/{key}]")), "{message:.200}");
        assert!(message.len() < 400, "{key}: {} bytes", message.len());
    }
}

/// An injected pod as somebody copies it, with its datasets edited.
fn copied(datasets: &str) -> Value {
    let pod = pod("images:/data,scratch:/out:rw");
    let mut copy = apply(&pod, &patch(&pod, "team").unwrap());
    copy["metadata"]["annotations"]["lampyris.dev/datasets"] = json!(datasets);
    copy
}

#[test]
fn a_copied_pod_never_keeps_the_volume_of_another_dataset() {
    assert_eq!(
        patch(&copied("images:/data,scratch:/out:rw"), "team").unwrap(),
        Vec::<Value>::new()
    );
    let stale = [
        ("flights:/data,scratch:/out:rw", "lampyris-0"),
        ("images:/other,scratch:/out:rw", "lampyris-0"),
        ("images:/data,scratch:/out", "lampyris-1"),
        ("images:/data", "lampyris-1"),
    ];
    for (datasets, volume) in stale {
        let message = patch(&copied(datasets), "team").unwrap_err().to_string();
        assert!(message.contains(&format!("spec.volumes: {volume} is of an earlier")), "{message}");
        assert!(message.contains("annotations[lampyris.dev/injected]"), "{message}");
    }
    // A mark does not make somebody else's volume ours.
    let mut forged = pod("images:/data");
    forged["metadata"]["annotations"]["lampyris.dev/injected"] = json!("{}");
    forged["spec"]["volumes"] = json!([{"name": "lampyris-0", "hostPath": {"path": "/"}}]);
    assert!(
        patch(&forged, "team").unwrap_err().to_string().contains("lampyris-0 is of an earlier")
    );
}

#[test]
fn names_of_ours_are_refused_wherever_they_stand_and_others_are_not() {
    let mut volume = pod("images:/data");
    volume["spec"]["volumes"] = json!([{"name": "lampyris-0", "emptyDir": {}}]);
    let message = patch(&volume, "team").unwrap_err().to_string();
    assert_eq!(message, "spec.volumes: the name lampyris-0 belongs to lampyris: rename it");
    let mut init = pod("images:/data");
    init["spec"]["initContainers"] = json!([{"name": "lampyris-scan"}]);
    let message = patch(&init, "team").unwrap_err().to_string();
    assert!(message.starts_with("spec.initContainers: the name lampyris-scan"), "{message}");
    volume["spec"]["volumes"][0]["name"] = json!("lampyris");
    assert!(patch(&volume, "team").is_ok());
}

#[test]
fn no_container_of_the_user_mounts_a_volume_of_ours_but_as_we_mount_it() {
    let ours = json!({"name": "lampyris-app", "mountPath": "/run/lampyris/app", "readOnly": true});
    let with = |change: &[(&str, Value)]| {
        let mut mount = ours.clone();
        change.iter().for_each(|(key, value)| mount[*key] = value.clone());
        mount
    };
    let refused = [
        json!({"name": "lampyris-private", "mountPath": "/x"}),
        json!({"name": "lampyris-private", "mountPath": "/run/lampyris/private", "readOnly": true}),
        json!({"name": "lampyris-app", "mountPath": "/run/lampyris/app"}),
        json!({"name": "lampyris-app", "mountPath": "/elsewhere", "readOnly": true}),
        json!({"name": "lampyris-0", "mountPath": "/again", "readOnly": true}),
        json!({"name": "lampyris-7", "mountPath": "/x"}),
        json!({"name": "lampyris-app"}),
        with(&[("subPath", json!("a"))]),
        with(&[("mountPropagation", json!("Bidirectional"))]),
    ];
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for (key, mount) in refused.iter().map(|mount| ("volumeMounts", mount)).chain([(
            "volumeDevices",
            &json!({"name": "lampyris-private", "devicePath": "/dev/x"}),
        )]) {
            let name = mount["name"].as_str().unwrap();
            // A fresh pod, and one that was injected a moment ago (or carries a forged mark).
            let fresh = pod("images:/data");
            let injected = apply(&fresh, &patch(&fresh, "team").unwrap());
            for (mut pod, what) in [(fresh, "fresh"), (injected, "injected")] {
                let mut container = json!({"name": "thief", "image": "x"});
                container[key] = json!([mount]);
                if !pod["spec"][list].is_array() {
                    pod["spec"][list] = json!([]);
                }
                pod["spec"][list].as_array_mut().unwrap().push(container);
                let message = match patch(&pod, "team") {
                    Ok(_) => panic!("{what} pod: {list} may mount {mount}"),
                    Err(denial) => denial.to_string(),
                };
                assert_eq!(
                    message,
                    format!(
                        "spec.{list}[thief].{key}: the volume {name} belongs to lampyris: remove the entry"
                    )
                );
            }
        }
    }
    // As we mount it ourselves, whoever wrote it: other defaults of the server change nothing.
    let mut same = pod("scratch:/out:rw");
    same["spec"]["containers"][0]["volumeMounts"] = json!([
        ours,
        {"name": "lampyris-0", "mountPath": "/out", "mountPropagation": "HostToContainer"},
    ]);
    let injected = apply(&same, &patch(&same, "team").unwrap());
    assert_eq!(
        injected["spec"]["containers"][0]["volumeMounts"],
        same["spec"]["containers"][0]["volumeMounts"]
    );
}

#[test]
fn a_forged_mark_does_not_make_a_container_ours() {
    let fresh = pod("images:/data");
    let good = apply(&fresh, &patch(&fresh, "team").unwrap());
    let thief = json!({
        "name": "lampyris-mount", "image": "x",
        "volumeMounts": [{"name": "lampyris-private", "mountPath": "/x"}],
    });
    let mut main = good.clone();
    main["spec"]["containers"].as_array_mut().unwrap().push(thief.clone());
    let mut init = good.clone();
    init["spec"]["initContainers"][0] = thief;
    let mut command = good.clone();
    command["spec"]["initContainers"][0]["command"] = json!(["/bin/sh"]);
    let mut unasked = good.clone();
    let scan = json!({"name": "lampyris-scan", "image": "x", "command": ["/usr/bin/scan-agent"]});
    unasked["spec"]["initContainers"].as_array_mut().unwrap().push(scan);
    for (pod, part) in [
        (main, "spec.containers: the name lampyris-mount belongs to lampyris"),
        (init, "spec.initContainers: lampyris-mount is of an earlier injection"),
        (command, "spec.initContainers: lampyris-mount is of an earlier injection"),
        (unasked, "spec.initContainers: lampyris-scan is of an earlier injection"),
    ] {
        let message = patch(&pod, "team").unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    // What other webhooks do to our sidecars is theirs: another registry, a mount of their own.
    let mut mirrored = good;
    mirrored["spec"]["initContainers"][0]["image"] = json!("mirror/mount:1");
    let token = json!({"name": "token", "mountPath": "/var/run/secrets/x", "readOnly": true});
    mirrored["spec"]["initContainers"][0]["volumeMounts"].as_array_mut().unwrap().push(token);
    assert_eq!(patch(&mirrored, "team").unwrap(), Vec::<Value>::new());
}

#[test]
fn ephemeral_containers_are_left_as_they_are() {
    let mut pod = pod("images:/data");
    let debug = json!([{"name": "debug", "image": "x", "targetContainerName": "app"}]);
    pod["spec"]["ephemeralContainers"] = debug.clone();
    let injected = apply(&pod, &patch(&pod, "team").unwrap());
    assert_eq!(injected["spec"]["ephemeralContainers"], debug);
}

#[test]
fn a_secret_of_another_namespace_is_refused_with_where_to_go() {
    let message = patch(&pod("flights@team:/data"), "guest").unwrap_err().to_string();
    assert!(message.contains("run the pod in namespace team"), "{message}");
    assert!(patch(&pod("images@team:/data"), "guest").is_ok());
}

#[test]
fn what_a_pod_sets_besides_is_checked_too() {
    let set = |path: &str, value: Value| {
        let mut pod = pod("flights:/data");
        *pod.pointer_mut(path).unwrap() = value;
        patch(&pod, "team").map(|_| String::new()).unwrap_or_else(|denial| denial.to_string())
    };
    let note = |key: &str, value: &str| {
        let mut pod = pod("images:/data");
        pod["metadata"]["annotations"][key] = json!(value);
        patch(&pod, "team").map(|_| String::new()).unwrap_or_else(|denial| denial.to_string())
    };
    let container = |extra: Value| {
        let mut app = json!({"name": "app", "image": "x"});
        app.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"containers": [app]})
    };
    let taken = |path: &str| {
        set("/spec", container(json!({"volumeMounts": [{"name": "v", "mountPath": path}]})))
    };
    assert!(taken("/data").contains("spec.containers[app].volumeMounts: /data overlaps"));
    assert!(taken("/data/x").contains("/data/x overlaps with the mount path /data"));
    assert!(taken("/run/lampyris/app").contains("overlaps"));
    assert_eq!(taken("/database"), "");
    assert!(set("/spec", json!({"os": {"name": "windows"}})).contains("spec.os.name"));
    assert!(set("/spec", json!({"hostUsers": false})).contains("spec.hostUsers"));
    let reserved = json!({"containers": [{"name": "lampyris-mount"}]});
    assert!(set("/spec", reserved).contains("the name lampyris-mount belongs to lampyris"));
    assert!(note("lampyris.dev/scan", "yes").contains("\"yes\" is not \"true\" or \"false\""));
    assert!(note("lampyris.dev/scan", "true").contains("format Vortex"));
    assert!(
        note("lampyris.dev/cpu-request", "much")
            .contains("cpu-request]: \"much\" is not a positive")
    );
    assert!(note("lampyris.dev/memory-limit", "0").contains("memory-limit"));
    let mut both = pod("images:/data");
    both["metadata"]["annotations"]["lampyris.dev/memory-request"] = json!("2Gi");
    both["metadata"]["annotations"]["lampyris.dev/memory-limit"] = json!("1Gi");
    assert!(
        patch(&both, "team").unwrap_err().to_string().contains("2Gi is more than the limit 1Gi")
    );
}

#[test]
fn sizes_that_were_asked_for_are_given() {
    let mut big = pod("images:/data");
    big["metadata"]["annotations"]["lampyris.dev/memory-request"] = json!("4Gi");
    let injected = apply(&big, &patch(&big, "team").unwrap());
    let resources = &injected["spec"]["initContainers"][0]["resources"];
    assert_eq!(resources["requests"]["memory"], "4Gi");
    assert_eq!(resources["limits"]["memory"], "4Gi");
    assert_eq!(resources["requests"]["cpu"], "50m");
}
