//! The charts: what they render is what the API server's own schemas describe, field by field, what makes no sense
//! is refused before it gets there, and what a user chooses arrives.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::{helm, kube, site, wait};
use serde_json::{Value, json};

/// Release, chart and namespace. The cluster is another one than the installed: its chart's own values may
/// differ from those of the installation in what cannot change.
const CHARTS: [(&str, &str, &str); 3] = [
    ("lampyris-crds", "lampyris-crds", site::SYSTEM),
    ("lampyris", "lampyris", site::SYSTEM),
    ("another", "lampyris-cluster", site::STORAGE),
];
/// Namespace and release of a cluster whose volumes are of classes that do not exist, so that it never runs.
const CLASSES: &str = "classes";
/// YAML takes it for a number unless somebody quotes it; helm's `--set` takes it for text.
const DIGITS: &str = "0123";

#[test]
fn charts_lint_and_render_what_the_servers_schemas_know() -> Result<()> {
    explained(|| {
        site::site()?;
        for (release, chart, namespace) in CHARTS {
            helm::lint(chart).with_context(|| format!("lint {chart}"))?;
            let rendered = helm::render(release, chart, namespace, &[])?;
            let objects = kube::accepted(namespace, &rendered)
                .with_context(|| format!("objects of {chart}"))?;
            for object in objects {
                let missing = kube::unbounded(&object["spec"]["template"]);
                ensure!(missing.is_empty(), "{}: {missing:?}", object["metadata"]["name"]);
            }
        }
        Ok(())
    })
}

#[test]
fn a_field_that_no_schema_knows_is_noticed() -> Result<()> {
    site::site()?;
    let manifest = "{apiVersion: v1, kind: ConfigMap, metadata: {name: probe}, dta: {}}";
    let refusal = kube::accepted(site::SYSTEM, manifest).expect_err("the field 'dta' is unknown");
    ensure!(format!("{refusal:#}").contains("unknown field \"dta\""), "{refusal:#}");
    Ok(())
}

#[test]
fn a_value_that_makes_no_sense_is_refused_by_its_name() -> Result<()> {
    let bad = [
        ("lampyris-crds", "keep", "no", "additional properties 'keep' not allowed"),
        ("lampyris", "operator.replicas", "none", "'/operator/replicas': got string, want integer"),
        ("lampyris", "keeper.memory", "1Gi", "'/keeper': additional properties 'memory'"),
        ("lampyris", "images.registry", "a b", "'/images/registry': 'a b' does not match pattern"),
        ("lampyris-cluster", "storage.count", "0", "'/storage/count': minimum: got 0, want 1"),
        ("lampyris", "jobs.tolerations", "all", "'/jobs/tolerations': got string, want array"),
        ("lampyris-cluster", "storage.cuont", "3", "additional properties 'cuont' not allowed"),
        (
            "lampyris-cluster",
            "storage.chunkSize",
            "1M",
            "'/storage/chunkSize': '1M' does not match",
        ),
        ("lampyris-cluster", "name", "9x", "'/name': '9x' does not match pattern"),
    ];
    for (chart, value, text, words) in bad {
        match helm::render("bad", chart, site::SYSTEM, &[(value, text)]) {
            Ok(_) => anyhow::bail!("{chart} takes {value}={text}"),
            Err(refusal) => ensure!(format!("{refusal:#}").contains(words), "{refusal:#}"),
        }
    }
    Ok(())
}

/// What the API server would make of a chart.
fn accepted(chart: &str, namespace: &str, values: &[helm::Setting<'_>]) -> Result<Vec<Value>> {
    // The operator's as it is installed, and a cluster that is not.
    let release = if chart == "lampyris" { chart } else { "another" };
    kube::accepted(namespace, &helm::render(release, chart, namespace, values)?)
}

/// The one of these objects that has this kind and name.
fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    let is_it = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    objects.iter().find(is_it).with_context(|| format!("{kind} {name}"))
}

#[test]
fn text_that_looks_like_a_number_or_a_truth_value_arrives_as_text() -> Result<()> {
    site::site()?;
    let values = [
        ("webhook.excludedNamespaces[0]", DIGITS),
        ("operator.nodeSelector.pool", DIGITS),
        ("images.tag", DIGITS),
    ];
    let objects = accepted("lampyris", site::SYSTEM, &values)?;
    let webhook = find(&objects, "MutatingWebhookConfiguration", "lampyris-injector")?;
    let excluded = &webhook["webhooks"][0]["namespaceSelector"]["matchExpressions"][1]["values"];
    ensure!(*excluded == json!(["kube-system", site::SYSTEM, DIGITS]), "{excluded}");
    let values = [
        ("name", "on"),
        ("storage.failureDomain", DIGITS),
        ("storage.nodeSelector.pool", DIGITS),
        ("storage.volume.storageClassName", DIGITS),
        ("metadata.volume.storageClassName", DIGITS),
    ];
    let objects = accepted("lampyris-cluster", site::STORAGE, &values)?;
    let spec = &find(&objects, "StorageCluster", "on")?["spec"];
    for pointer in [
        "/storage/failureDomain",
        "/storage/nodeSelector/pool",
        "/storage/volume/storageClassName",
        "/metadata/volume/storageClassName",
    ] {
        ensure!(spec.pointer(pointer) == Some(&json!(DIGITS)), "{pointer}: {spec}");
    }
    Ok(())
}

#[test]
fn a_release_and_a_namespace_whose_names_are_digits_stay_text() -> Result<()> {
    for chart in ["lampyris", "lampyris-cluster"] {
        let rendered = helm::render(DIGITS, chart, DIGITS, &[])?;
        let is_bare = |line: &&str| {
            line.split([' ', ',', '{', '}', '[', ']']).any(|word| word.trim_end() == DIGITS)
        };
        let bare: Vec<&str> = rendered.lines().filter(is_bare).collect();
        ensure!(bare.is_empty(), "{chart}: {bare:#?}");
        ensure!(rendered.contains(&format!("namespace: \"{DIGITS}\"")), "{rendered}");
    }
    Ok(())
}

#[test]
fn what_stops_the_operator_runs_where_the_operator_runs() -> Result<()> {
    site::site()?;
    let values = [
        ("operator.nodeSelector.pool", "infra"),
        ("operator.tolerations[0].key", "dedicated"),
        ("operator.tolerations[0].operator", "Exists"),
        ("operator.tolerations[0].effect", "NoSchedule"),
        ("jobs.nodeSelector.pool", "batch"),
        ("jobs.tolerations[0].operator", "Exists"),
    ];
    let objects = accepted("lampyris", site::SYSTEM, &values)?;
    let pod = |kind: &str, name: &str| -> Result<&Value> {
        Ok(&find(&objects, kind, name)?["spec"]["template"]["spec"])
    };
    let operator = pod("Deployment", "lampyris-operator")?;
    let retire = pod("Job", "lampyris-retire")?;
    let tolerations = json!([{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}]);
    for (part, chosen) in [("nodeSelector", json!({"pool": "infra"})), ("tolerations", tolerations)]
    {
        ensure!(operator[part] == chosen, "the operator has {part} {}", operator[part]);
        ensure!(retire[part] == chosen, "what stops it has {part} {}", retire[part]);
    }
    // What the operator starts goes elsewhere.
    let args = operator["containers"][0]["args"].as_array().context("the operator's arguments")?;
    let jobs = args.iter().find_map(|arg| arg.as_str()?.strip_prefix("--jobs="));
    let jobs: Value = serde_json::from_str(jobs.context("--jobs")?).context("parse --jobs")?;
    let chosen =
        json!({"nodeSelector": {"pool": "batch"}, "tolerations": [{"operator": "Exists"}]});
    ensure!(jobs == chosen, "{jobs}");
    Ok(())
}

#[test]
fn storage_classes_of_the_values_reach_the_volume_claims() -> Result<()> {
    site::site()?;
    kube::delete("default", "namespace", CLASSES)?;
    let outcome = explained(|| {
        let values = [
            ("metadata.volume.storageClassName", "for-meta"),
            ("storage.volume.storageClassName", "for-storage"),
        ];
        helm::create(CLASSES, "lampyris-cluster", CLASSES, &values)?;
        for (server, class) in [("meta", "for-meta"), ("10001", "for-storage")] {
            let name = format!("{CLASSES}-{server}");
            wait::until(&format!("claim of {name}"), Duration::from_secs(60), || {
                let set = kube::get(CLASSES, "statefulset", &name)?;
                let template = &set["spec"]["volumeClaimTemplates"][0]["spec"];
                ensure!(template["storageClassName"] == class, "{template}");
                let claim = kube::get(CLASSES, "persistentvolumeclaim", &format!("data-{name}-0"))?;
                ensure!(claim["spec"]["storageClassName"] == class, "{}", claim["spec"]);
                Ok(())
            })?;
        }
        Ok(())
    });
    // The release is a Secret of this namespace, so it goes too.
    kube::abandon("default", "namespace", CLASSES)?;
    outcome
}
