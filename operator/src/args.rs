//! Flags. Everything else that the operator does is configured by objects.

use std::net::SocketAddr;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};

use crate::plan::Images;
use crate::plan::job::Placement;

/// Runs storage clusters and injects datasets into pods.
#[derive(Debug, Parser)]
#[command(name = "operator", version, about, long_about = None)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Reconcile all objects of lampyris.dev and serve the admission webhook.
    Run(Box<RunArgs>),
    /// Stop the operator's Deployment and release what it holds, so that an uninstall can end.
    Retire(RetireArgs),
}

/// Flags of `operator run`.
#[derive(Clone, Debug, Parser)]
pub struct RunArgs {
    /// Namespace of the operator: its Lease and its webhook's Secret are there.
    #[arg(long, value_name = "NAMESPACE")]
    pub system_namespace: String,
    /// Registry and path of all images, such as registry.example.com/lampyris.
    #[arg(long, value_name = "REGISTRY", default_value = "lampyris.local")]
    pub images: String,
    /// Tag of all images.
    #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
    pub tag: String,
    /// Pull policy of all images.
    #[arg(long, value_name = "POLICY", default_value = "IfNotPresent", value_parser = ["Always", "IfNotPresent", "Never"])]
    pub pull_policy: String,
    /// Nodes for the pods of Jobs: nodeSelector and tolerations, as in a pod, in JSON.
    #[arg(long, value_name = "JSON", default_value = "{}", value_parser = placement)]
    pub jobs: Placement,
    /// Address of /healthz, /readyz, /metrics and /state.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080")]
    pub admin: SocketAddr,
    /// Address of the admission webhook.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8443")]
    pub webhook: SocketAddr,
    /// Service that the API server calls the webhook by.
    #[arg(long, value_name = "NAME", default_value = "lampyris-webhook")]
    pub webhook_service: String,
    /// Secret that holds the webhook's certificates; the chart creates it empty.
    #[arg(long, value_name = "NAME", default_value = "lampyris-webhook-tls")]
    pub webhook_secret: String,
    /// MutatingWebhookConfiguration whose caBundle the operator keeps right.
    #[arg(long, value_name = "NAME", default_value = "lampyris-injector")]
    pub webhook_configuration: String,
    /// Name of this replica in the Lease.
    #[arg(long, value_name = "NAME", env = "POD_NAME", default_value = "operator")]
    pub identity: String,
}

/// Flags of `operator retire`.
#[derive(Clone, Debug, Parser)]
pub struct RetireArgs {
    /// Namespace of the operator.
    #[arg(long, value_name = "NAMESPACE")]
    pub system_namespace: String,
    /// The operator's Deployment.
    #[arg(long, value_name = "NAME", default_value = "lampyris-operator")]
    pub deployment: String,
}

impl Args {
    /// Parses the command line and runs until asked to stop.
    ///
    /// # Errors
    /// A flag that cannot be right, no way to reach the API server, a port that is taken, or a
    /// lost Lease.
    pub fn parse_and_run() -> anyhow::Result<()> {
        let args = Self::parse();
        rpc::telemetry::init();
        // The process has one TLS provider; a second installation would be the same one.
        rustls::crypto::ring::default_provider().install_default().ok();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("start the runtime")?;
        match args.command {
            Command::Run(args) => {
                args.check()?;
                runtime.block_on(crate::run::run(*args))
            }
            Command::Retire(args) => {
                check_name("--system-namespace", &args.system_namespace)?;
                check_name("--deployment", &args.deployment)?;
                runtime.block_on(crate::retire::retire(args))
            }
        }
    }
}

impl RunArgs {
    /// The images that the flags name.
    #[must_use]
    pub fn images(&self) -> Images {
        Images {
            registry: self.images.trim_end_matches('/').to_owned(),
            tag: self.tag.clone(),
            pull_policy: self.pull_policy.clone(),
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        check_name("--system-namespace", &self.system_namespace)?;
        check_name("--webhook-service", &self.webhook_service)?;
        check_name("--webhook-secret", &self.webhook_secret)?;
        check_name("--webhook-configuration", &self.webhook_configuration)?;
        if self.images.is_empty() || self.images.contains(char::is_whitespace) {
            bail!(
                "--images {:?}: give a registry such as registry.example.com/lampyris",
                self.images
            );
        }
        let tag_fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if self.tag.is_empty() || self.tag.len() > 128 || !self.tag.chars().all(tag_fits) {
            bail!("--tag {:?}: give an image tag such as 0.1.0", self.tag);
        }
        if self.admin == self.webhook {
            bail!("--admin and --webhook are both {}: give two addresses", self.admin);
        }
        Ok(())
    }
}

fn placement(text: &str) -> Result<Placement, String> {
    serde_json::from_str(text).map_err(|error| {
        format!("{error}: give JSON such as {{\"nodeSelector\": {{}}, \"tolerations\": []}}")
    })
}

fn check_name(flag: &str, name: &str) -> anyhow::Result<()> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 63 || !name.chars().all(fits) {
        bail!("{flag} {name:?}: give a name of lower-case letters, digits and hyphens");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(extra: &[&str]) -> Result<RunArgs, String> {
        let mut line = vec!["operator", "--system-namespace", "lampyris-system"];
        line.extend(extra);
        let args = RunArgs::try_parse_from(line).map_err(|error| error.to_string())?;
        args.check().map_err(|error| error.to_string())?;
        Ok(args)
    }

    #[test]
    fn a_flag_that_cannot_be_right_is_named_with_the_fix() {
        for (flags, part) in [
            (&["--images", "a b"][..], "--images"),
            (&["--tag", "a/b"], "--tag"),
            (&["--admin", "0.0.0.0:8443"], "two addresses"),
            (&["--webhook-secret", "A_B"], "--webhook-secret"),
            (&["--pull-policy", "Sometimes"], "--pull-policy"),
            (&["--jobs", r#"{"nodeSelectors": {}}"#], "unknown field `nodeSelectors`"),
            (&["--jobs", r#"{"nodeSelector": {"pool": 1}}"#], "--jobs"),
        ] {
            let error = run(flags).err().unwrap_or_default();
            assert!(error.contains(part), "{flags:?}: {error}");
        }
    }

    #[test]
    fn images_are_named_by_registry_and_tag() {
        let args = run(&["--images", "r.example.com/x/", "--tag", "1"]).unwrap();
        assert_eq!(args.images().reference("meta"), "r.example.com/x/meta:1");
    }

    #[test]
    fn nodes_for_jobs_are_read_as_a_pod_has_them() {
        assert_eq!(run(&[]).unwrap().jobs, Placement::default());
        let text = r#"{"nodeSelector": {"pool": "batch"}, "tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 60}]}"#;
        let jobs = run(&["--jobs", text]).unwrap().jobs;
        assert_eq!(jobs.node_selector["pool"], "batch");
        assert_eq!(jobs.tolerations[0].key.as_deref(), Some("gpu"));
        assert_eq!(jobs.tolerations[0].toleration_seconds, Some(60));
    }
}
