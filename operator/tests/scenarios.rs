//! Replays the texts in `scenarios/`: each builds a small world, plans, and compares what the plan
//! says with what the text expects. Every plan is linted, and applied to the world before the next
//! one, so `plan` after `plan` shows that a state which is right is left alone.
//!
//! Run with `UPDATE=1` to write what the plans say now; read the difference before committing it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::fmt::Write;

use crds::{ChainTable, Dataset, DatasetLoad, StorageCluster, StorageNode};
use k8s_openapi::jiff::Timestamp;
use operator::plan::cluster::{ClusterView, ManagerStatus};
use operator::plan::dataset::{DatasetView, job_name};
use operator::plan::job::Placement;
use operator::plan::load::LoadView;
use operator::plan::table::TableView;
use operator::plan::{
    Action, Children, Env, Images, ObjectId, Plan, cluster, dataset, lint, load, table,
};
use serde_json::{Value, json};

const NAMESPACE: &str = "storage";

struct World {
    objects: BTreeMap<(String, String), Value>,
    hosts: BTreeMap<i64, String>,
    domains: BTreeMap<String, String>,
    manager: Option<Value>,
    /// What an admission policy adds to the containers of every StatefulSet.
    mount: Option<Value>,
    /// The table that the manager took and keeps.
    pushed: Option<Value>,
    users: Vec<String>,
    messages: Vec<String>,
    progress: Option<Value>,
    tag: String,
    second: i64,
}

impl World {
    fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            hosts: BTreeMap::new(),
            domains: BTreeMap::new(),
            manager: None,
            mount: None,
            pushed: None,
            users: Vec::new(),
            messages: Vec::new(),
            progress: None,
            tag: "1".to_owned(),
            second: 1_800_000_000,
        }
    }

    fn env(&self) -> Env {
        let (registry, pull_policy) = ("r".to_owned(), "IfNotPresent".to_owned());
        let images = Images { registry, tag: self.tag.clone(), pull_policy };
        let now = Timestamp::from_second(self.second).unwrap();
        Env { images, jobs: Placement::default(), now }
    }

    fn get(&self, kind: &str, name: &str) -> Option<&Value> {
        self.objects.get(&(kind.to_owned(), name.to_owned()))
    }

    fn get_as<T: serde::de::DeserializeOwned>(&self, kind: &str, name: &str) -> Option<T> {
        self.get(kind, name).map(|value| serde_json::from_value(value.clone()).unwrap())
    }

    fn put(&mut self, mut object: Value) {
        let id = ObjectId::of(&object);
        object["metadata"]["uid"] = json!(format!("uid-{}", id.name));
        object["metadata"]["generation"] = json!(1);
        if let Some(mount) = self.mount.as_ref().filter(|_| id.kind == "StatefulSet") {
            let pod = &mut object["spec"]["template"]["spec"];
            pod["volumes"] = json!([{"name": mount["name"], "emptyDir": {}}]);
            pod["containers"][0]["volumeMounts"].as_array_mut().unwrap().insert(0, mount.clone());
        }
        let key = (id.kind, id.name);
        if let Some(old) = self.objects.get(&key) {
            object["status"] = old["status"].clone();
            object["metadata"]["generation"] =
                json!(old["metadata"]["generation"].as_i64().unwrap() + 1);
            if object["status"].is_null() {
                object.as_object_mut().unwrap().remove("status");
            }
        }
        self.objects.insert(key, object);
    }

    /// One line of a text. Returns what a plan says, if the line plans.
    fn run(&mut self, line: &str) -> Option<String> {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let yaml = |text: &str| -> Value { serde_yaml_ng::from_str(text).unwrap() };
        match command {
            "object" => {
                let mut object = yaml(rest);
                object["apiVersion"] = json!("lampyris.dev/v1alpha1");
                object["metadata"]["namespace"] = json!(NAMESPACE);
                self.put(object);
            }
            "change" => {
                let (path, value) = rest.split_once(' ').unwrap();
                let (kind, path) = path.split_once('/').unwrap();
                let (name, path) = path.split_once('/').unwrap();
                let object = self.objects.get_mut(&(kind.to_owned(), name.to_owned())).unwrap();
                if path.starts_with("spec/") || path == "metadata/deletionTimestamp" {
                    let generation = object["metadata"]["generation"].as_i64().unwrap();
                    object["metadata"]["generation"] = json!(generation + 1);
                }
                let mut place = object;
                for part in path.split('/') {
                    place = &mut place[part];
                }
                *place = yaml(value);
            }
            "remove" => {
                let (kind, name) = rest.split_once('/').unwrap();
                self.objects.remove(&(kind.to_owned(), name.to_owned()));
            }
            // The cluster is deleted; its claims stay, and so does what the manager keeps.
            "remove-all" => self.objects.clear(),
            "place" => {
                for word in rest.split(' ') {
                    let (id, host) = word.split_once('@').unwrap();
                    self.hosts.insert(id.parse().unwrap(), host.to_owned());
                }
            }
            "label" => {
                for word in rest.split(' ') {
                    let (host, domain) = word.split_once('=').unwrap();
                    self.domains.insert(host.to_owned(), domain.to_owned());
                }
            }
            "sets-ready" => self.sets_ready(),
            "policy" => self.mount = Some(yaml(rest)),
            "manager" => self.manager = (rest != "away").then(|| yaml(rest)),
            "users" => self.users = rest.split_whitespace().map(str::to_owned).collect(),
            "message" => self.messages = vec![rest.to_owned()],
            "no-message" => self.messages.clear(),
            "progress" => self.progress = Some(yaml(rest)),
            "tag" => self.tag = rest.to_owned(),
            "wait" => self.second += rest.parse::<i64>().unwrap(),
            "plan" => return Some(self.plan(rest, usize::MAX)),
            // The operator dies after so many actions.
            "plan-dies" => {
                let (count, what) = rest.split_once(' ').unwrap();
                return Some(self.plan(what, count.parse().unwrap()));
            }
            other => panic!("unknown command {other}"),
        }
        None
    }

    fn sets_ready(&mut self) {
        for ((kind, _), set) in &mut self.objects {
            if kind == "StatefulSet" {
                let generation = set["metadata"]["generation"].clone();
                set["status"] = json!({"readyReplicas": 1, "updatedReplicas": 1, "observedGeneration": generation});
            }
        }
    }

    /// Plans, and carries out the first `count` actions.
    fn plan(&mut self, what: &str, count: usize) -> String {
        let (kind, name) = what.split_once('/').unwrap();
        let env = self.env();
        let mut plan = match kind {
            "cluster" => cluster::plan(&self.cluster(name), &env),
            "table" => table::plan(&self.table(name), &env),
            "dataset" => dataset::plan(&self.dataset(name), &env),
            "load" => load::plan(&self.load(name), &env),
            other => panic!("cannot plan {other}"),
        };
        assert_eq!(lint::lint(&plan), Vec::<String>::new(), "{what}");
        plan.actions.truncate(count);
        let text = render(&plan);
        self.apply(&plan);
        text
    }

    fn manager(&self) -> Option<ManagerStatus> {
        self.manager.clone().map(|mut value| {
            // Whatever else the text says of its table, it is the one that was pushed.
            if let Some(table) = value.get_mut("table") {
                table["digest"] = json!(table::digest(self.pushed.as_ref().unwrap()));
            }
            serde_json::from_value(value).unwrap()
        })
    }

    fn cluster(&self, name: &str) -> ClusterView {
        let mut children = Children::new();
        let mut nodes: Vec<StorageNode> = Vec::new();
        for ((kind, child), value) in &self.objects {
            match kind.as_str() {
                "StorageNode" => nodes.push(serde_json::from_value(value.clone()).unwrap()),
                "StatefulSet" | "Service" | "PodDisruptionBudget" => {
                    children.insert((kind.clone(), child.clone()), value.clone());
                }
                _ => {}
            }
        }
        ClusterView {
            cluster: self.get_as::<StorageCluster>("StorageCluster", name).unwrap(),
            nodes,
            table: self.get_as::<ChainTable>("ChainTable", &format!("{name}-table-1")),
            children,
            hosts: self.hosts.clone(),
            domains: self.domains.clone(),
            manager: self.manager(),
        }
    }

    fn table(&self, name: &str) -> TableView {
        let table = self.get_as("ChainTable", name).unwrap();
        TableView { table, manager: self.manager(), refusal: None }
    }

    fn dataset(&self, name: &str) -> DatasetView {
        let dataset: Dataset = self.get_as("Dataset", name).unwrap();
        let inspection = dataset.status.as_ref().and_then(|status| status.inspection.clone());
        let job = inspection.and_then(|last| self.get("Job", &job_name(&dataset, &last)).cloned());
        let cluster = self.get_as::<StorageCluster>("StorageCluster", "train");
        let cluster_ready = cluster.map(|cluster| {
            let status = cluster.status.unwrap_or_default();
            operator::plan::condition::is_true(&status.conditions, "Ready")
        });
        let messages = if job.is_some() { self.messages.clone() } else { Vec::new() };
        DatasetView { dataset, job, messages, users: self.users.clone(), cluster_ready }
    }

    fn load(&self, name: &str) -> LoadView {
        let load: DatasetLoad = self.get_as("DatasetLoad", name).unwrap();
        let from =
            load.spec.from.dataset_ref.as_ref().and_then(|r| self.get_as("Dataset", &r.name));
        LoadView {
            target: self.get_as("Dataset", &load.spec.dataset_ref.name),
            from,
            job: self.get("Job", &load::job_name(&load)).cloned(),
            messages: self.messages.clone(),
            progress: self.progress.clone().map(|value| serde_json::from_value(value).unwrap()),
            load,
        }
    }

    fn apply(&mut self, plan: &Plan) {
        for action in &plan.actions {
            match action {
                Action::Apply(object) => self.put(object.clone()),
                // One that is there is left alone.
                Action::Create(object) => {
                    let id = ObjectId::of(object);
                    if self.get(&id.kind, &id.name).is_none() {
                        self.put(object.clone());
                    }
                }
                Action::Delete(id) => {
                    drop(self.objects.remove(&(id.kind.clone(), id.name.clone())))
                }
                Action::Status(id, status) => {
                    let key = (id.kind.clone(), id.name.clone());
                    self.objects.get_mut(&key).unwrap()["status"] = status.clone();
                }
                Action::Finalizer { object, name, present } => {
                    let key = (object.kind.clone(), object.name.clone());
                    let list = if *present { json!([name]) } else { json!([]) };
                    self.objects.get_mut(&key).unwrap()["metadata"]["finalizers"] = list;
                }
                Action::PushTable(_, body) => self.pushed = Some(body.clone()),
                Action::Event(_) => {}
            }
        }
    }
}

fn render(plan: &Plan) -> String {
    let mut out = String::new();
    for action in &plan.actions {
        match action {
            Action::Apply(object) => line(&mut out, "apply", &ObjectId::of(object)),
            Action::Create(object) => line(&mut out, "create", &ObjectId::of(object)),
            Action::Delete(id) => line(&mut out, "delete", id),
            Action::Status(id, status) => {
                let generation = status["observedGeneration"].as_i64().unwrap_or(0);
                writeln!(out, "status {} {} of generation {generation}", id.kind, id.name).unwrap();
                for c in status["conditions"].as_array().into_iter().flatten() {
                    let text = |key: &str| c[key].as_str().unwrap_or_default().to_owned();
                    let (type_, status) = (text("type"), text("status"));
                    writeln!(out, "  {type_}={status} {}: {}", text("reason"), text("message"))
                        .unwrap();
                }
            }
            Action::Finalizer { object, name, present } => {
                let word = if *present { "hold" } else { "release" };
                line(&mut out, &format!("{word} {name}"), object);
            }
            Action::PushTable(host, body) => {
                writeln!(out, "push revision {} to {host}", body["revision"]).unwrap();
                for chain in body["chains"].as_array().unwrap() {
                    let targets = chain["targets"].as_array().unwrap();
                    let ids: Vec<_> = targets.iter().map(|t| t["targetId"].to_string()).collect();
                    writeln!(out, "  chain {}: {}", chain["chainId"], ids.join(" ")).unwrap();
                }
            }
            Action::Event(notice) => {
                let kind = if notice.warning { "warn" } else { "tell" };
                writeln!(out, "{kind} {}: {}", notice.reason, notice.message).unwrap();
            }
        }
    }
    match plan.requeue_s {
        Some(seconds) => writeln!(out, "again in {seconds} s").unwrap(),
        None => writeln!(out, "wait for a change").unwrap(),
    }
    out
}

fn line(out: &mut String, word: &str, id: &ObjectId) {
    writeln!(out, "{word} {} {}", id.kind, id.name).unwrap();
}

/// The text with every expectation replaced by what the plans say.
fn replay(text: &str) -> String {
    let mut world = World::new();
    let mut out = String::new();
    for line in text.lines() {
        if line.starts_with("    ") {
            continue;
        }
        out.push_str(line);
        out.push('\n');
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        for said in world.run(line).iter().flat_map(|text| text.lines()) {
            writeln!(out, "    {said}").unwrap();
        }
    }
    out
}

#[test]
fn every_scenario_plans_what_its_text_expects() {
    let folder = "tests/scenarios";
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let said = replay(&text);
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, &said).unwrap();
        } else {
            assert_eq!(said, text, "{}: see UPDATE=1", path.display());
        }
        count += 1;
    }
    assert!(count >= 6, "{count} scenarios");
}
