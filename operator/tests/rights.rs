//! What the charts let our processes do. Read from the templates without rendering: expressions
//! become a word, and a rule that hid in one would be missed, so rules must be written out.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use serde::Deserialize;
use serde_json::Value;

/// Every Role and ClusterRole of the charts.
fn roles() -> Vec<Value> {
    let mut found = Vec::new();
    for chart in std::fs::read_dir("../helm").unwrap() {
        for file in std::fs::read_dir(chart.unwrap().path().join("templates")).unwrap() {
            let path = file.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            // Split by hand: other documents of a template need not be YAML before rendering.
            for document in text
                .split("\n---")
                .filter(|d| d.lines().any(|l| l == "kind: Role" || l == "kind: ClusterRole"))
            {
                let plain = without_expressions(document);
                let role = Value::deserialize(serde_yaml_ng::Deserializer::from_str(&plain));
                let role = role.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert!(role["rules"].is_array(), "{}: {role}", path.display());
                found.push(role);
            }
        }
    }
    assert!(found.len() >= 5, "{} roles", found.len());
    found
}

fn without_expressions(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("{{") {
        let (expression, after) = after.split_once("}}").unwrap();
        assert!(!expression.contains("range") && !expression.contains("if "), "{expression}");
        out.push_str(before);
        out.push_str("expression");
        rest = after;
    }
    out + rest
}

fn words(rule: &Value, key: &str) -> Vec<String> {
    let list = rule[key].as_array().unwrap_or_else(|| panic!("a rule without {key}: {rule}"));
    list.iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

fn rules(role: &Value) -> &Vec<Value> {
    role["rules"].as_array().unwrap()
}

#[test]
fn no_rule_has_a_wildcard_and_secrets_are_named_one_by_one() {
    for role in roles() {
        let name = &role["metadata"]["name"];
        for rule in rules(&role) {
            let (resources, verbs) = (words(rule, "resources"), words(rule, "verbs"));
            for word in words(rule, "apiGroups").iter().chain(&resources).chain(&verbs) {
                assert!(!word.contains('*') && word != "expression", "{name}: {rule}");
            }
            let escalates = ["escalate", "bind", "impersonate"];
            assert!(!verbs.iter().any(|v| escalates.contains(&v.as_str())), "{name}: {rule}");
            if resources.iter().any(|r| r == "secrets" || r.starts_with("secrets/")) {
                assert_eq!(role["kind"], "Role", "{name} may see Secrets of every namespace");
                assert_eq!(words(rule, "resourceNames"), ["lampyris-webhook-tls"], "{name}");
                assert_eq!(verbs, ["get", "update"], "{name}");
            }
        }
    }
}

#[test]
fn of_our_own_kinds_each_process_writes_what_it_has_to() {
    let mut writes = Vec::new();
    for role in roles() {
        for rule in rules(&role).iter().filter(|r| words(r, "apiGroups") == ["lampyris.dev"]) {
            for verb in words(rule, "verbs") {
                if !["get", "list", "watch"].contains(&verb.as_str()) {
                    let role = role["metadata"]["name"].as_str().unwrap().to_owned();
                    writes.push(format!("{role}: {verb} {}", words(rule, "resources").join(" ")));
                }
            }
        }
    }
    writes.sort();
    // StorageNodes and ChainTables are made; of everything else the status is written, and the
    // finalizer of a Dataset, for which there is no right smaller than this.
    assert_eq!(
        writes,
        [
            "expression-lampyris-operator: create storagenodes chaintables",
            "expression-lampyris-operator: patch datasets",
            "expression-lampyris-operator: patch storageclusters/status storagenodes/status \
             chaintables/status datasets/status datasetloads/status",
            "expression-lampyris-retire: patch datasets",
        ]
    );
}

/// All that the role of `name` may do: verbs and resources, a rule each.
fn all_of(name: &str) -> Vec<String> {
    let roles = roles();
    let named = roles.iter().filter(|role| role["metadata"]["name"] == name);
    let rules = named.flat_map(rules);
    rules.map(|r| [words(r, "verbs"), words(r, "resources")].concat().join(" ")).collect()
}

#[test]
fn the_node_plugin_reads_datasets_and_posts_events() {
    assert_eq!(all_of("expression-lampyris-node"), ["get datasets", "create events"]);
}

#[test]
fn what_stops_the_operator_takes_its_lease_and_releases_datasets() {
    assert_eq!(
        all_of("lampyris-retire"),
        ["patch deployments/scale", "create leases", "get update leases"]
    );
    assert_eq!(all_of("expression-lampyris-retire"), ["get list patch datasets"]);
}

#[test]
fn only_servers_and_jobs_can_be_deleted() {
    let mut deletes = Vec::new();
    for role in roles() {
        for rule in rules(&role) {
            if words(rule, "verbs").iter().any(|verb| verb.starts_with("delete")) {
                let role = role["metadata"]["name"].as_str().unwrap().to_owned();
                deletes.push(format!("{role}: {}", words(rule, "resources").join(" ")));
            }
        }
    }
    deletes.sort();
    let operator = |what: &str| format!("expression-lampyris-operator: {what}");
    assert_eq!(deletes, [operator("jobs"), operator("statefulsets")]);
}
