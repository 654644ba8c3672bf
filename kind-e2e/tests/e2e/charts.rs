//! The charts: what they render is what the API server's own schemas describe, field by field.

use anyhow::{Context, Result};
use kind_e2e::{helm, kube, site};

/// Release, chart and namespace. The cluster is another one than the installed: its chart's own values may
/// differ from those of the installation in what cannot change.
const CHARTS: [(&str, &str, &str); 3] = [
    ("lampyris-crds", "lampyris-crds", site::SYSTEM),
    ("lampyris", "lampyris", site::SYSTEM),
    ("another", "lampyris-cluster", site::STORAGE),
];

#[test]
fn charts_lint_and_render_what_the_servers_schemas_know() -> Result<()> {
    site::site()?;
    for (release, chart, namespace) in CHARTS {
        helm::lint(chart).with_context(|| format!("lint {chart}"))?;
        let rendered = helm::render(release, chart, namespace)?;
        kube::accepted(namespace, &rendered).with_context(|| format!("objects of {chart}"))?;
    }
    Ok(())
}

#[test]
fn a_field_that_no_schema_knows_is_noticed() -> Result<()> {
    site::site()?;
    let manifest = "{apiVersion: v1, kind: ConfigMap, metadata: {name: probe}, dta: {}}";
    let refusal = kube::accepted(site::SYSTEM, manifest).expect_err("the field 'dta' is unknown");
    assert!(format!("{refusal:#}").contains("unknown field \"dta\""), "{refusal:#}");
    Ok(())
}
