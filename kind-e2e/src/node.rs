//! Nodes of the local cluster: faults of a whole node through `kind-e2e/cluster`, and commands inside of one.

use std::process::Command;

use anyhow::{Context, Result};

use crate::command::{cache, repository, run, tool};

/// A node in trouble; dropping it heals the node, so that a failed test leaves a whole cluster.
#[derive(Debug)]
pub struct Trouble {
    node: String,
}

impl Trouble {
    /// Cuts the node's network.
    ///
    /// # Errors
    /// When the cluster script fails.
    pub fn partition(node: &str) -> Result<Self> {
        cluster(&["partition", node])?;
        Ok(Self { node: node.to_owned() })
    }

    /// Heals the node and waits until it is Ready.
    ///
    /// # Errors
    /// When it does not become Ready.
    pub fn heal(self) -> Result<()> {
        let node = self.node.clone();
        drop(self);
        crate::kube::kubectl(&[
            "wait",
            "--for=condition=Ready",
            &format!("node/{node}"),
            "--timeout=120s",
        ])?;
        Ok(())
    }
}

impl Drop for Trouble {
    fn drop(&mut self) {
        if let Err(error) = cluster(&["heal", &self.node]) {
            eprintln!("{} stays in trouble: {error:#}", self.node);
        }
    }
}

fn cluster(args: &[&str]) -> Result<String> {
    run(Command::new(repository().join("kind-e2e/cluster")).args(args))
}

/// Copies the logs of the local cluster to where they outlive it; says where.
///
/// # Errors
/// When no cluster runs on this machine.
pub fn keep_logs() -> Result<String> {
    cluster(&["keep-logs"])
}

/// A command in a node's mount, network and UTS namespaces: it works also while the node is cut off.
///
/// # Errors
/// When the node does not run on this machine.
pub fn command(node: &str, program: &str) -> Result<Command> {
    let path = cache().join(format!("cluster/run/{node}/pid"));
    let pid = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut command = Command::new("nsenter");
    command.args(["-t", pid.trim(), "-m", "-n", "-u", "--wd=/"]);
    command.arg(tool(program).get_program());
    Ok(command)
}

/// `crictl` of a node.
///
/// # Errors
/// When the node does not run on this machine.
pub fn crictl(node: &str) -> Result<Command> {
    let mut crictl = command(node, "crictl")?;
    crictl.args(["--runtime-endpoint", "unix:///run/containerd/containerd.sock"]);
    Ok(crictl)
}
