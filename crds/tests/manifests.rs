//! The generated YAML is what the types say, and the example manifests fit the rules.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::Value;

fn root() -> PathBuf {
    PathBuf::from("..")
}

fn yaml_files(folder: &str) -> Vec<(PathBuf, String)> {
    let mut files: Vec<_> = std::fs::read_dir(root().join(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "yaml"))
        .map(|path| (path.clone(), std::fs::read_to_string(path).unwrap()))
        .collect();
    files.sort();
    files
}

fn expectation(text: &str) -> &str {
    text.lines().next().unwrap().strip_prefix("# expect: ").unwrap()
}

/// Every message of a validation rule, found anywhere below `value`.
fn messages(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            if let Some(Value::Array(rules)) = map.get("x-kubernetes-validations") {
                found.extend(rules.iter().map(|rule| rule["message"].as_str().unwrap().to_owned()));
            }
            map.values().for_each(|v| messages(v, found));
        }
        Value::Array(items) => items.iter().for_each(|v| messages(v, found)),
        _ => {}
    }
}

fn all_messages() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for definition in crds::generate::definitions().unwrap() {
        messages(&definition, &mut found);
    }
    found
}

#[test]
fn committed_definitions_equal_the_types() {
    for (folder, keep) in [("crds/yaml", false), ("helm/lampyris-crds/templates", true)] {
        let want = crds::generate::manifests(keep).unwrap();
        let have = yaml_files(folder);
        assert_eq!(have.len(), want.len(), "{folder}: run `cargo run -p crds --bin crdgen`");
        for (name, yaml) in want {
            let on_disk = std::fs::read_to_string(root().join(folder).join(&name)).unwrap();
            assert_eq!(on_disk, yaml, "{folder}/{name}: run `cargo run -p crds --bin crdgen`");
        }
    }
}

#[test]
fn every_definition_is_small_enough_for_client_side_apply() {
    for (name, yaml) in crds::generate::manifests(false).unwrap() {
        assert!(yaml.len() < 64 * 1024, "{name} has {} bytes", yaml.len());
        assert!(!yaml.contains("nullable"), "{name}");
    }
}

#[test]
fn good_manifests_parse_into_their_types() {
    let files = yaml_files("crds/tests/good");
    assert!(files.len() >= 8, "{} good manifests", files.len());
    for (path, text) in files {
        let value: Value = serde_yaml_ng::from_str(&text).unwrap();
        let parsed = match value["kind"].as_str().unwrap() {
            "StorageCluster" => serde_json::from_value::<crds::StorageCluster>(value).err(),
            "StorageNode" => serde_json::from_value::<crds::StorageNode>(value).err(),
            "ChainTable" => serde_json::from_value::<crds::ChainTable>(value).err(),
            "Dataset" => serde_json::from_value::<crds::Dataset>(value).err(),
            "DatasetLoad" => serde_json::from_value::<crds::DatasetLoad>(value).err(),
            other => panic!("{}: kind {other}", path.display()),
        };
        assert!(parsed.is_none(), "{}: {parsed:?}", path.display());
    }
}

#[test]
fn each_bad_manifest_expects_the_message_of_one_of_our_rules() {
    let rules = all_messages();
    let mut files = yaml_files("crds/tests/bad");
    assert!(files.len() >= 40, "{} bad manifests", files.len());
    files.extend(yaml_files("crds/tests/update"));
    for (path, text) in files {
        let wanted = expectation(&text);
        assert!(rules.iter().any(|m| m.contains(wanted)), "{}: {wanted}", path.display());
    }
}

#[test]
fn each_rule_has_a_bad_manifest() {
    let mut files = yaml_files("crds/tests/bad");
    files.extend(yaml_files("crds/tests/update"));
    let wanted: Vec<_> = files.iter().map(|(_, text)| expectation(text)).collect();
    let bare: Vec<_> =
        all_messages().into_iter().filter(|m| !wanted.iter().any(|w| m.contains(w))).collect();
    assert_eq!(bare, Vec::<String>::new(), "rules that no manifest breaks");
}

#[test]
fn a_source_becomes_the_configuration_of_the_data_path() {
    let text =
        std::fs::read_to_string(root().join("crds/tests/good/dataset-s3-full.yaml")).unwrap();
    let dataset: crds::Dataset = serde_yaml_ng::from_str(&text).unwrap();
    let config = dataset.spec.source.config("ns");
    assert_eq!(config["s3"]["uri"], "s3://data/flights");
    assert_eq!(config["s3"]["pathStyle"], true);
    assert!(config["s3"]["caBundle"].as_str().unwrap().starts_with("-----BEGIN CERTIFICATE-----"));
    assert_eq!(config["s3"]["credentials"], Value::Null);

    let text =
        std::fs::read_to_string(root().join("crds/tests/good/dataset-cluster.yaml")).unwrap();
    let dataset: crds::Dataset = serde_yaml_ng::from_str(&text).unwrap();
    assert_eq!(
        dataset.spec.source.config("ns")["cluster"]["manager"],
        "train-meta.storage.svc:9000"
    );
}
