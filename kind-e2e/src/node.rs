//! Faults of whole nodes, through `kind-e2e/cluster`. Only the local cluster can do this.

use std::process::Command;

use anyhow::Result;

use crate::command::{repository, run};

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

    /// Ends every process of the node, as a power cut would.
    ///
    /// # Errors
    /// When the cluster script fails.
    pub fn kill(node: &str) -> Result<Self> {
        cluster(&["kill", node])?;
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
