//! Keeps three things in step: the Secret with the certificates, the certificate that this replica
//! serves, and the authority that the API server trusts. Reading is every replica's, writing the
//! leader's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use thiserror::Error;
use tokio::sync::watch;

use super::certs::{self, CertError, SECRET_KEYS, Stored};
use super::serve::{self, Current, KeyError};

/// How often the Secret is read while there is nothing to serve, and afterwards.
const PERIODS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(20));

/// Why a round failed.
#[derive(Debug, Error)]
enum TrustError {
    #[error("talk to the API server")]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Cert(#[from] CertError),
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// Names of what is kept in step.
#[derive(Clone, Debug)]
pub struct Names {
    /// Namespace of Secret and Service.
    pub namespace: String,
    /// The Secret; the chart creates it empty.
    pub secret: String,
    /// The Service in front of the webhook.
    pub service: String,
    /// The MutatingWebhookConfiguration.
    pub configuration: String,
}

/// Keeps everything in step until `stop`; writes only while `leads` is true.
pub async fn run(
    client: Client,
    names: Names,
    current: Arc<Current>,
    leads: Arc<AtomicBool>,
    mut stop: watch::Receiver<bool>,
) {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &names.namespace);
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(client);
    let mut served = Stored::default();
    loop {
        let mut settled = current.is_set();
        let leading = leads.load(Ordering::Relaxed);
        match round(&secrets, &configurations, &names, leading).await {
            Ok(Some(stored)) if stored.leaf != served.leaf => match serve::certified_key(&stored) {
                Ok(key) => {
                    current.set(key);
                    served = stored;
                }
                Err(error) => tracing::warn!(%error, "load the serving certificate"),
            },
            Ok(Some(_)) => {}
            Ok(None) => settled = false,
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(%error, cause, "keep certificates");
                settled = false;
            }
        }
        let wait = if settled { PERIODS.1 } else { PERIODS.0 };
        tokio::select! {
            () = rpc::shutdown::stopped(&mut stop) => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Reads the Secret, and as the leader renews it and tells the API server whom to trust. `None`
/// while there is no certificate.
async fn round(
    secrets: &Api<Secret>,
    configurations: &Api<MutatingWebhookConfiguration>,
    names: &Names,
    leading: bool,
) -> Result<Option<Stored>, TrustError> {
    let Some(mut secret) = secrets.get_opt(&names.secret).await? else {
        tracing::warn!(
            secret = names.secret,
            "the webhook's Secret does not exist; install the chart"
        );
        return Ok(None);
    };
    let mut stored = read(&secret);
    if leading {
        let host = format!("{}.{}.svc", names.service, names.namespace);
        let hosts = [host.clone(), format!("{host}.cluster.local")];
        if let Some(next) = certs::renew(&stored, &hosts, Timestamp::now())? {
            write(&mut secret, &next);
            // The resource version in the object makes this fail if another leader was faster.
            secrets.replace(&names.secret, &PostParams::default(), &secret).await?;
            tracing::info!("renewed the webhook's certificates");
            stored = next;
        }
        trust(configurations, &names.configuration, &stored.bundle()).await?;
    }
    Ok((!stored.leaf.is_empty()).then_some(stored))
}

fn read(secret: &Secret) -> Stored {
    let text = |key: &str| {
        let data = secret.data.as_ref().and_then(|data| data.get(key));
        data.map(|bytes| String::from_utf8_lossy(&bytes.0).into_owned()).unwrap_or_default()
    };
    let [authority, authority_key, old_authority, leaf, leaf_key] = SECRET_KEYS.map(text);
    Stored { authority, authority_key, old_authority, leaf, leaf_key }
}

fn write(secret: &mut Secret, stored: &Stored) {
    let Stored { authority, authority_key, old_authority, leaf, leaf_key } = stored.clone();
    let texts = [authority, authority_key, old_authority, leaf, leaf_key];
    let pairs = SECRET_KEYS.into_iter().zip(texts);
    let data: BTreeMap<String, ByteString> =
        pairs.map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).collect();
    secret.data = Some(data);
}

async fn trust(
    configurations: &Api<MutatingWebhookConfiguration>,
    name: &str,
    bundle: &str,
) -> Result<(), kube::Error> {
    let Some(found) = configurations.get_opt(name).await? else {
        tracing::warn!(name, "the webhook configuration does not exist; install the chart");
        return Ok(());
    };
    let mut operations = Vec::new();
    for (index, webhook) in found.webhooks.iter().flatten().enumerate() {
        let have = webhook.client_config.ca_bundle.as_ref().map(|bytes| bytes.0.as_slice());
        if have != Some(bundle.as_bytes()) {
            operations.push(json!({
                "op": "add",
                "path": format!("/webhooks/{index}/clientConfig/caBundle"),
                "value": ByteString(bundle.as_bytes().to_vec()),
            }));
        }
    }
    if operations.is_empty() {
        return Ok(());
    }
    let patch: json_patch::Patch =
        serde_json::from_value(json!(operations)).map_err(kube::Error::SerdeError)?;
    configurations.patch(name, &PatchParams::default(), &Patch::Json::<()>(patch)).await?;
    tracing::info!(name, "told the API server whom to trust");
    Ok(())
}
