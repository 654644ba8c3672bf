//! The repository checks itself: its shape, who may depend on whom, sizes, where `unsafe` may be.
//!
//! A rule that only lives in a document is broken within a month. Each test here names every place
//! that breaks its rule, so that one run is enough to repair all of them.

#![forbid(unsafe_code)]
#![allow(clippy::expect_used, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

#[path = "tidy/scan.rs"]
mod scan;

const TOP_LEVEL: &[&str] = &[
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "crds",
    "helm",
    "kind-e2e",
    "meta",
    "operator",
    "rust-toolchain.toml",
    "scan-agent",
    "sidecar",
    "storage-node",
];

/// Package, and the packages of this workspace that it may link (tests may link more).
const MAY_DEPEND: &[(&str, &[&str])] = &[
    ("chain", &[]),
    ("ring", &[]),
    ("crds", &[]),
    ("rpc", &["chain"]),
    ("client", &["chain", "rpc"]),
    ("source", &["chain", "client", "rpc"]),
    ("storage-node", &["chain", "rpc"]),
    ("meta", &["chain", "rpc"]),
    // keeper's library is the hand-over protocol and its client; its server stays in its own binary.
    ("sidecar", &["chain", "client", "keeper", "ring", "rpc", "source"]),
    ("node", &["crds", "keeper", "ring", "rpc"]),
    ("keeper", &["ring"]),
    ("scan-agent", &["chain", "client", "crds", "ring", "rpc", "source"]),
    ("lampyris-python", &["ring"]),
    ("operator", &["crds", "rpc"]),
    ("kind-e2e", &["chain", "client", "crds", "rpc"]),
    ("fuzz", &["meta", "ring", "rpc", "scan-agent", "source", "storage-node"]),
];

/// Packages that stay small on purpose, and everything that they may link.
const EXTERNAL: &[(&str, &[&str])] =
    &[("chain", &["bytes", "crc32c", "thiserror"]), ("ring", &["libc", "rustix", "thiserror"])];

/// Package that is never linked by the named ones, with the reason.
const NEVER: &[(&str, &[&str], &str)] = &[
    ("keeper", &["tokio"], "it has to outlive everything else: no runtime, little memory"),
    ("operator", &["rocksdb", "vortex"], "it sees the data plane only through HTTP and status"),
];

/// Where `unsafe` may be written: package and the files (or folders) of it.
const UNSAFE: &[(&str, &[&str])] = &[
    ("ring", &["sidecar/ring/src/"]),
    ("storage-node", &["storage-node/src/uring.rs", "storage-node/src/uring/"]),
    ("sidecar", &["sidecar/src/resume.rs", "sidecar/src/resume/"]),
    ("lampyris-python", &["scan-agent/python/src/"]),
    // Nothing is written: it is what the macro of libFuzzer becomes.
    ("fuzz", &[]),
];

const FILE_LINES: usize = 800;
const FUNCTION_LINES: usize = 70;
const MAIN_LINES: usize = 25;

fn root() -> PathBuf {
    let kind_e2e = std::env::current_dir().expect("tests run in their package");
    kind_e2e.parent().expect("kind-e2e has a parent").to_path_buf()
}

/// Every file that is or would be committed, relative to the root.
fn files() -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git runs");
    assert!(output.status.success(), "git ls-files failed");
    let list = String::from_utf8(output.stdout).expect("file names are UTF-8");
    let mut files: Vec<String> = list.lines().map(str::to_owned).collect();
    files.retain(|f| root().join(f).is_file());
    assert!(files.len() > 30, "only {} files found: is this the repository?", files.len());
    files
}

fn rust_files() -> Vec<String> {
    files().into_iter().filter(|f| f.ends_with(".rs")).collect()
}

fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_default()
}

fn packages() -> Vec<Value> {
    let output = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("metadata is JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Names of what a package links outside of its tests.
fn linked(package: &Value) -> BTreeSet<String> {
    package["dependencies"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|d| d["kind"].as_str() != Some("dev"))
        .map(|d| text(d, "name").to_owned())
        .collect()
}

/// Root source files of a package's targets of the given kinds, relative to the repository.
fn roots(package: &Value, kinds: &[&str]) -> Vec<String> {
    let base = root();
    package["targets"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|t| {
            t["kind"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|k| kinds.contains(&k.as_str().unwrap_or("")))
        })
        .filter_map(|t| {
            Path::new(text(t, "src_path")).strip_prefix(&base).ok().map(|p| p.display().to_string())
        })
        .collect()
}

fn none(broken: &[String], rule: &str) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

#[test]
fn top_level_holds_exactly_the_agreed_names() {
    let found: BTreeSet<String> = files()
        .iter()
        .filter_map(|f| f.split('/').next().map(str::to_owned))
        .filter(|name| !name.starts_with('.'))
        .collect();
    let agreed: BTreeSet<String> = TOP_LEVEL.iter().map(|s| (*s).to_owned()).collect();
    assert_eq!(found, agreed);
}

#[test]
fn packages_depend_only_in_the_agreed_direction() {
    let packages = packages();
    let ours: BTreeSet<&str> = packages.iter().map(|p| text(p, "name")).collect();
    let allowed: BTreeMap<&str, &[&str]> = MAY_DEPEND.iter().copied().collect();
    let mut broken = Vec::new();
    for package in &packages {
        let name = text(package, "name");
        let Some(may) = allowed.get(name) else {
            broken.push(format!("{name} is not in the table of this test"));
            continue;
        };
        for dependency in linked(package) {
            if ours.contains(dependency.as_str()) && !may.contains(&dependency.as_str()) {
                broken.push(format!("{name} links {dependency}"));
            }
        }
    }
    none(&broken, "workspace packages link each other only as MAY_DEPEND says");
}

#[test]
fn the_core_and_the_ring_stay_free_of_everything_else() {
    let mut broken = Vec::new();
    for package in packages() {
        let name = text(&package, "name").to_owned();
        if let Some((_, allowed)) = EXTERNAL.iter().find(|(p, _)| *p == name) {
            let extra = linked(&package).into_iter().filter(|d| !allowed.contains(&d.as_str()));
            broken.extend(extra.map(|d| format!("{name} links {d}")));
        }
        if let Some((_, banned, why)) = NEVER.iter().find(|(p, _, _)| *p == name) {
            let found = linked(&package).into_iter().filter(|d| banned.contains(&d.as_str()));
            broken.extend(found.map(|d| format!("{name} links {d}: {why}")));
        }
    }
    none(&broken, "small packages link only what is listed");
}

#[test]
fn vortex_types_stay_behind_the_bridge() {
    let mut broken: Vec<String> = packages()
        .iter()
        .filter(|p| text(p, "name") != "scan-agent" && linked(p).contains("vortex"))
        .map(|p| format!("{} links vortex", text(p, "name")))
        .collect();
    for file in rust_files() {
        let bridge = file.starts_with("scan-agent/src/bridge");
        let tests = file.starts_with("scan-agent/tests/");
        if !bridge && !tests && scan::code(&read(&file)).contains("vortex::") {
            broken.push(file);
        }
    }
    none(&broken, "only scan-agent/src/bridge names types of vortex");
}

#[test]
fn files_and_functions_stay_short() {
    let mut broken = Vec::new();
    for file in rust_files() {
        let source = read(&file);
        let lines = source.lines().count();
        let limit = if file.ends_with("src/main.rs") { MAIN_LINES } else { FILE_LINES };
        if lines > limit {
            broken.push(format!("{file}: {lines} lines, at most {limit}"));
        }
        for (name, line, length) in scan::functions(&source) {
            if length > FUNCTION_LINES {
                broken.push(format!("{file}:{line}: {name} has {length} lines"));
            }
        }
    }
    none(&broken, "sizes");
}

#[test]
fn unsafe_is_written_only_where_it_is_listed() {
    let allowed: Vec<&str> = UNSAFE.iter().flat_map(|(_, files)| files.iter().copied()).collect();
    let mut broken: Vec<String> = rust_files()
        .into_iter()
        .filter(|f| !allowed.iter().any(|a| f.starts_with(a)))
        .filter(|f| scan::words(&read(f)).any(|w| w == "unsafe"))
        .collect();
    for package in packages() {
        if UNSAFE.iter().any(|(name, _)| *name == text(&package, "name")) {
            continue;
        }
        for file in roots(&package, &["lib", "bin", "cdylib", "rlib"]) {
            if !read(&file).contains("#![forbid(unsafe_code)]") {
                broken.push(format!("{file} does not forbid unsafe code"));
            }
        }
    }
    none(&broken, "unsafe code");
}

#[test]
fn every_rust_file_is_built_by_some_target() {
    let mut reached = BTreeSet::new();
    let kinds = ["lib", "bin", "cdylib", "rlib", "test", "bench", "example", "custom-build"];
    for package in packages() {
        for file in roots(&package, &kinds) {
            scan::reach(&root(), Path::new(&file), true, &mut reached);
        }
    }
    let dead: Vec<String> =
        rust_files().into_iter().filter(|f| !reached.contains(Path::new(f))).collect();
    none(&dead, "files that no target builds");
}

#[test]
fn nothing_is_left_for_later_without_an_issue() {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X:")];
    let mut broken = Vec::new();
    for file in files() {
        for (number, line) in read(&file).lines().enumerate() {
            for mark in marks {
                let bare = line.split(mark).skip(1).any(|rest| !rest.starts_with("(#"));
                if bare && file != "Cargo.lock" {
                    broken.push(format!("{file}:{}: {}", number + 1, line.trim()));
                }
            }
        }
    }
    none(&broken, "unfinished work names its issue, as MARK(#12)");
}

#[test]
fn no_file_names_a_registry_host_or_a_path_of_one_machine() {
    let banned = [
        concat!("crates", ".io"),
        concat!("pypi", ".org"),
        concat!("pythonhosted", ".org"),
        concat!("proxy.golang", ".org"),
        concat!("deb.debian", ".org"),
        concat!("registry.npmjs", ".org"),
        concat!("docker", ".io/"),
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
    ];
    let mut broken = Vec::new();
    for file in files().into_iter().filter(|f| f != "Cargo.lock") {
        let content = read(&file);
        broken.extend(
            banned.iter().filter(|b| content.contains(**b)).map(|b| format!("{file}: {b}")),
        );
    }
    none(&broken, "hosts and machine paths");
}

#[test]
fn tests_find_their_files_from_where_they_run() {
    // Clones share a folder of build outputs: a path that is compiled in may lead to another clone's files.
    let mark = concat!("env!(\"CARGO_", "MANIFEST_DIR\")");
    let broken: Vec<_> = rust_files().into_iter().filter(|f| read(f).contains(mark)).collect();
    none(&broken, "a test runs in the folder of its package: a relative path will do");
}

#[test]
fn every_shell_script_parses() {
    let mut broken = Vec::new();
    for file in files() {
        let shell = file.ends_with(".sh") || read(&file).starts_with("#!/bin/bash");
        if shell {
            let status = Command::new("bash").arg("-n").arg(root().join(&file)).status();
            if !status.expect("bash runs").success() {
                broken.push(file);
            }
        }
    }
    none(&broken, "scripts with syntax errors");
}
