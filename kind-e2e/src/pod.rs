//! Labelled pods that read and write a Dataset of the store with the exerciser, and what they felt.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdout, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::command::{Limit, spawn, tool};
use crate::{kube, node, site, wait};

/// Namespace of these pods; it enforces PSS *restricted*.
pub const EXERCISE: &str = "exercise";
/// The Dataset that they write to.
pub const SCRATCH: &str = "scratch";
/// Where it is mounted.
pub const MOUNT: &str = "/data";
/// A pod with its mount is up within this, when its images are on the node.
const UP_WITHIN: Duration = Duration::from_secs(60);
/// The exerciser answers whoever runs it within this, also while its own calls hang, and begins within it.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// Calls go on within this once what held them up is over; how long one call may take is asserted by its own bound.
const GOES_ON_WITHIN: Duration = Duration::from_secs(30);

/// The namespace and its Dataset, made at the first call of a run and at every later one looked at.
///
/// # Errors
/// When they cannot be made or the Dataset does not become Ready.
pub fn scratch() -> Result<()> {
    site::site()?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": EXERCISE,
        "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    kube::apply(&namespace.to_string())?;
    kube::apply(&dataset(EXERCISE, SCRATCH, "/exercise").to_string())?;
    wait::until("Dataset Ready", Duration::from_secs(30), || {
        kube::is_true(&kube::get(EXERCISE, "datasets.lampyris.dev", SCRATCH)?, "Ready")
    })?;
    Ok(())
}

/// A writable Dataset over a directory of the store.
#[must_use]
pub fn dataset(namespace: &str, name: &str, path: &str) -> Value {
    json!({
        "apiVersion": "lampyris.dev/v1alpha1",
        "kind": "Dataset",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "format": "Files",
            "readOnly": false,
            "source": {"cluster": {
                "ref": {"name": site::CLUSTER, "namespace": site::STORAGE}, "path": path,
            }},
        },
    })
}

/// The security context of the application's container, as its user wrote it.
#[must_use]
pub fn security_context() -> Value {
    json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]}})
}

/// A container that runs the exerciser.
#[must_use]
pub fn container(name: &str, args: &[&str]) -> Value {
    json!({
        "name": name,
        "image": site::image("tools"),
        "command": ["/usr/bin/exerciser"],
        "args": args,
        "resources": {
            "requests": {"cpu": "10m", "memory": "16Mi"},
            "limits": {"cpu": "1", "memory": "256Mi"},
        },
        "securityContext": security_context(),
    })
}

/// A pod's template with [`SCRATCH`] mounted for writing.
#[must_use]
pub fn template(init: &[Value], containers: &[Value]) -> Value {
    json!({
        "metadata": {
            "labels": {"lampyris.dev/inject": "true"},
            "annotations": {"lampyris.dev/datasets": format!("{SCRATCH}:{MOUNT}:rw")},
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "runAsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": init,
            "containers": containers,
        },
    })
}

/// A running pod; dropping it deletes it.
#[derive(Debug)]
pub struct Pod {
    name: String,
}

impl Pod {
    /// Starts an idle pod on a node and waits until its mount serves.
    ///
    /// # Errors
    /// When it does not become Ready in time.
    pub fn start(name: &str, node: &str) -> Result<Self> {
        scratch()?;
        let mut pod = template(&[], &[container("app", &["idle"])]);
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["namespace"] = json!(EXERCISE);
        pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        kube::delete(EXERCISE, "pod", name)?; // a run that was ended may have left one
        kube::apply(&pod.to_string())?;
        let pod = Self { name: name.to_owned() };
        wait::until(&format!("pod {name} Ready"), UP_WITHIN, || {
            let seen = pod.object()?;
            let conditions = seen["status"]["conditions"].as_array();
            let ready = conditions
                .is_some_and(|c| c.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"));
            ensure!(ready, "{}", seen["status"]);
            Ok(())
        })?;
        Ok(pod)
    }

    /// The pod as the API server has it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn object(&self) -> Result<Value> {
        kube::get(EXERCISE, "pod", &self.name)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs the exerciser in the pod to its end; what it said.
    ///
    /// # Errors
    /// When it fails.
    pub fn exercise(&self, args: &[&str]) -> Result<Value> {
        let mut words = vec!["/usr/bin/exerciser"];
        words.extend(args);
        let said = kube::exec(EXERCISE, &self.name, "app", &words)?;
        serde_json::from_str(&said).with_context(|| format!("parse {said}"))
    }

    /// Starts the exerciser in the pod; it goes on until [`Exercise::end`].
    ///
    /// # Errors
    /// When it does not start.
    pub fn begin(&self, args: &[&str]) -> Result<Exercise> {
        let mut kubectl = tool("kubectl");
        kubectl.args(["-n", EXERCISE, "exec", "-i", &self.name, "-c", "app", "--"]);
        Exercise::begin(kubectl, args)
    }

    /// [`Pod::begin`] from inside of the pod's node, so that the exerciser can be asked while the node is cut off.
    ///
    /// # Errors
    /// When it does not start, or the node does not run on this machine.
    pub fn begin_on_node(&self, args: &[&str]) -> Result<Exercise> {
        let pod = self.object()?;
        let node = pod["spec"]["nodeName"].as_str().context("the pod has a node")?;
        let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
        let id =
            id.and_then(|id| id.strip_prefix("containerd://")).context("the container's id")?;
        let mut crictl = node::crictl(node)?;
        crictl.args(["exec", "-i", id]);
        Exercise::begin(crictl, args)
    }

    /// Ends a process of one of the pod's containers at once (`kill -9`).
    ///
    /// # Errors
    /// When no such process runs on this machine.
    pub fn kill(&self, program: &str) -> Result<()> {
        kill_in(&self.object()?, program)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Err(error) = kube::delete(EXERCISE, "pod", &self.name) {
            eprintln!("pod {} stays: {error:#}", self.name);
        }
    }
}

/// The exerciser at work in a pod.
#[derive(Debug)]
pub struct Exercise {
    child: Child,
    said: BufReader<ChildStdout>,
    errors: ChildStderr,
}

impl Exercise {
    /// `runner` is what runs a command in the pod.
    fn begin(mut runner: Command, args: &[&str]) -> Result<Self> {
        let mut child = spawn(runner.arg("/usr/bin/exerciser").args(args))?;
        let said = BufReader::new(child.stdout.take().context("stdout is piped")?);
        let errors = child.stderr.take().context("stderr is piped")?;
        let mut exercise = Self { child, said, errors };
        let line = exercise.line()?;
        if line.trim() != "started" {
            let _ = exercise.child.kill(); // an error means that it has ended
            bail!("{args:?} did not start: {line}{}", exercise.complaint());
        }
        Ok(exercise)
    }

    /// How much it has done so far: reads, or files written and closed.
    ///
    /// # Errors
    /// When it has ended or does not answer.
    pub fn done(&mut self) -> Result<u64> {
        let stdin = self.child.stdin.as_mut().context("stdin is piped")?;
        stdin.write_all(b"\n").context("ask the exerciser")?;
        let line = self.line()?;
        line.trim().parse().with_context(|| format!("the exerciser answers '{line}'"))
    }

    /// Waits until it has done more than it had.
    ///
    /// # Errors
    /// When nothing comes any more.
    pub fn goes_on(&mut self, what: &str) -> Result<()> {
        let before = self.done()?;
        wait::until(&format!("{what} goes on"), GOES_ON_WITHIN, || {
            ensure!(self.done()? > before, "still {before}");
            Ok(())
        })?;
        Ok(())
    }

    /// Tells it to stop; what it measured.
    ///
    /// # Errors
    /// When it failed.
    pub fn end(mut self) -> Result<Value> {
        let limit = Limit::start(&self.child, ANSWERS_WITHIN);
        drop(self.child.stdin.take());
        let mut text = String::new();
        self.said.read_to_string(&mut text).context("read what the exerciser says")?;
        let complaint = self.complaint();
        let status = self.child.wait().context("wait for the exerciser")?;
        ensure!(!limit.lift(), "the exerciser does not stop within {ANSWERS_WITHIN:?}: {text}");
        ensure!(status.success(), "the exerciser ended with {status}: {text}{complaint}");
        serde_json::from_str(&text).with_context(|| format!("parse {text}{complaint}"))
    }

    fn line(&mut self) -> Result<String> {
        let limit = Limit::start(&self.child, ANSWERS_WITHIN);
        let mut line = String::new();
        self.said.read_line(&mut line).context("wait for the exerciser")?;
        ensure!(!limit.lift(), "the exerciser said nothing for {ANSWERS_WITHIN:?}");
        Ok(line)
    }

    fn complaint(&mut self) -> String {
        let mut text = String::new();
        let _ = self.errors.read_to_string(&mut text); // it only explains
        text
    }
}

impl Drop for Exercise {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks what a reading or writing exerciser measured: it did something, no error, nothing longer than `bound`.
///
/// # Errors
/// When one of them is not so.
pub fn untroubled(what: &str, measured: &Value, bound: Duration) -> Result<()> {
    eprintln!("{what}: {measured}");
    ensure!(measured["errors"].as_array().is_some_and(Vec::is_empty), "{what}: {measured}");
    ensure!(measured["done"].as_u64().is_some_and(|done| done > 0), "{what}: {measured}");
    let longest = measured["longestMs"].as_u64().context("longestMs")?;
    ensure!(
        Duration::from_millis(longest) < bound,
        "{what}: {longest} ms in one call, at most {bound:?} are fine"
    );
    Ok(())
}

/// `kill -9` of every process `/usr/bin/PROGRAM` that belongs to a pod of the local cluster.
///
/// # Errors
/// When there is none.
pub fn kill_in(pod: &Value, program: &str) -> Result<()> {
    kill_all(&[(pod, program)])
}

/// [`kill_in`] for several pods at once: all their processes are found before the first one is ended.
///
/// # Errors
/// When one of the pods has no such process.
pub fn kill_all(victims: &[(&Value, &str)]) -> Result<()> {
    let mut all = Vec::new();
    for (pod, program) in victims {
        let uid = pod["metadata"]["uid"].as_str().context("the pod has a uid")?;
        let found = processes(uid, program)?;
        ensure!(!found.is_empty(), "no process {program} of pod {uid} on this machine");
        all.extend(found);
    }
    for pid in all {
        kill_process(pid, Signal::KILL).with_context(|| format!("end process {pid:?}"))?;
    }
    Ok(())
}

fn processes(uid: &str, program: &str) -> Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("list processes")? {
        let path = entry?.path();
        let text = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(pid) = name.parse().ok().and_then(Pid::from_raw) else { continue };
        let own = format!("/usr/bin/{program}\0");
        if text("cgroup").contains(uid) && text("cmdline").starts_with(&own) {
            found.push(pid);
        }
    }
    Ok(found)
}
