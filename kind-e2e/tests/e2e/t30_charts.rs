//! The charts: what they render is what the API server's own schemas describe, field by field, what makes no sense
//! is refused before it gets there, and what a user chooses arrives.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::{helm, kube, site, wait};

/// Release, chart and namespace. The cluster is another one than the installed: its chart's own values may
/// differ from those of the installation in what cannot change.
const CHARTS: [(&str, &str, &str); 3] = [
    ("lampyris-crds", "lampyris-crds", site::SYSTEM),
    ("lampyris", "lampyris", site::SYSTEM),
    ("another", "lampyris-cluster", site::STORAGE),
];
/// Namespace and release of a cluster whose volumes are of classes that do not exist, so that it never runs.
const CLASSES: &str = "classes";

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
