//! Metrics and state of the sidecars, re-exported with the pod they belong to.
//!
//! Sidecars show theirs on unix sockets in the pod; the network reaches only this process. What a
//! sidecar says is bounded before it is believed: the pod may have replaced it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::Value;

use crate::volume::Pod;

/// Longest answer of one sidecar.
const MAX_BODY_BYTES: usize = 256 << 10;
/// Longest state of one sidecar: some lines for each of its volumes.
pub const MAX_STATE_BYTES: usize = 64 << 10;
/// Most series of one sidecar; the rest is left out.
pub const MAX_SERIES: usize = 200;
/// A sidecar that takes longer is left out.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Admin sockets in the private directory, and the containers that they belong to.
pub const SOCKETS: [(&str, &str); 2] =
    [("mount-admin.sock", "lampyris-mount"), ("scan-admin.sock", "lampyris-scan")];

/// Families of metrics by name, from many sidecars.
#[derive(Debug, Default)]
pub struct Families(BTreeMap<String, Family>);

#[derive(Debug, Default)]
struct Family {
    comments: Vec<String>,
    samples: Vec<String>,
}

impl Families {
    /// Adds what one sidecar said, each sample with the labels of its pod and container.
    pub fn add(&mut self, text: &str, pod: &Pod, container: &str) {
        let labels = format!(
            "namespace=\"{}\",pod=\"{}\",container=\"{container}\"",
            pod.namespace, pod.name
        );
        let mut current = String::new();
        let mut series = 0;
        for line in text.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let mut words = comment.splitn(3, ' ');
                let (kind, name) = (words.next(), words.next());
                if let (Some("HELP" | "TYPE" | "UNIT"), Some(name)) = (kind, name) {
                    name.clone_into(&mut current);
                    let family = self.0.entry(current.clone()).or_default();
                    let start = format!("# {} {name} ", kind.unwrap_or_default());
                    if !family.comments.iter().any(|known| known.starts_with(&start)) {
                        family.comments.push(line.to_owned());
                    }
                }
            } else if let Some(sample) = relabel(line, &labels) {
                series += 1;
                if series > MAX_SERIES {
                    return;
                }
                let name = if line.starts_with(&current) { current.clone() } else { name_of(line) };
                self.0.entry(name).or_default().samples.push(sample);
            }
        }
    }

    /// All families as text, without the end mark.
    #[must_use]
    pub fn render(&self) -> String {
        let families = self.0.values().filter(|family| !family.samples.is_empty());
        families
            .flat_map(|family| family.comments.iter().chain(&family.samples))
            .flat_map(|line| [line.as_str(), "\n"])
            .collect()
    }
}

fn name_of(line: &str) -> String {
    line.chars().take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':')).collect()
}

/// A sample line with more labels; `None` if it is not one.
fn relabel(line: &str, labels: &str) -> Option<String> {
    let name = name_of(line);
    let rest = line.get(name.len()..)?;
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) || rest.contains('\0') {
        return None;
    }
    if let Some(value) = rest.strip_prefix(' ') {
        return Some(format!("{name}{{{labels}}} {value}"));
    }
    let own = rest.strip_prefix('{')?;
    let separator = if own.starts_with('}') { "" } else { "," };
    // The sidecar may not speak for another pod.
    let forged = ["namespace=", "pod=", "container="];
    let is_forged = |label: &str| own.starts_with(label) || own.contains(&format!(",{label}"));
    if forged.into_iter().any(is_forged) {
        return None;
    }
    Some(format!("{name}{{{labels}{separator}{own}"))
}

/// A sidecar's metrics; `None` when it is not there or misbehaves.
pub async fn scrape(private_dir: &Path, socket: &str) -> Option<String> {
    let said = ask(private_dir, socket, "/metrics", MAX_BODY_BYTES).await.ok()?;
    String::from_utf8(said.to_vec()).ok()
}

/// A sidecar's state, or `{"error": …}` in its place.
pub async fn state(private_dir: &Path, socket: &str) -> Value {
    let said = ask(private_dir, socket, "/state", MAX_STATE_BYTES).await;
    let parsed = said.and_then(|said| serde_json::from_slice(&said).map_err(|_| "no JSON"));
    parsed.unwrap_or_else(|why| serde_json::json!({"error": why}))
}

async fn ask(
    private_dir: &Path,
    socket: &str,
    path: &str,
    limit: usize,
) -> Result<Bytes, &'static str> {
    let asked = tokio::time::timeout(TIMEOUT, fetch(private_dir, socket, path, limit));
    asked.await.unwrap_or(Err("no answer in time"))
}

/// Ends its connection with itself, also when nobody waits for it any more.
async fn fetch(
    private_dir: &Path,
    socket: &str,
    path: &str,
    limit: usize,
) -> Result<Bytes, &'static str> {
    let stream = crate::socket::connect(private_dir, socket).map_err(|_| "not there")?;
    stream.set_nonblocking(true).map_err(|_| "not there")?;
    let stream = tokio::net::UnixStream::from_std(stream).map_err(|_| "not there")?;
    let broken = "no HTTP";
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|_| broken)?;
    let mut driver = tokio::task::JoinSet::new();
    driver.spawn(connection);
    let request = hyper::Request::get(path).header("host", "sidecar");
    let request = request.body(Empty::<Bytes>::new()).map_err(|_| broken)?;
    let answer = sender.send_request(request).await.map_err(|_| broken)?;
    if answer.status() != hyper::StatusCode::OK {
        return Err("refused");
    }
    let body = Limited::new(answer.into_body(), limit).collect().await;
    Ok(body.map_err(|_| "an answer too long or cut off")?.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> Pod {
        Pod { namespace: "n".into(), name: name.into(), uid: "u".into() }
    }

    #[test]
    fn samples_of_two_pods_share_one_family() {
        let text = "# HELP reads Reads.\n# TYPE reads counter\nreads_total 3\n\
                    reads_total{kind=\"s3\"} 4\n# EOF\n";
        let mut families = Families::default();
        families.add(text, &pod("a"), "lampyris-mount");
        families.add(text, &pod("b"), "lampyris-mount");
        let labels = |pod| format!("namespace=\"n\",pod=\"{pod}\",container=\"lampyris-mount\"");
        let (a, b) = (labels("a"), labels("b"));
        assert_eq!(
            families.render(),
            format!(
                "# HELP reads Reads.\n# TYPE reads counter\n\
                 reads_total{{{a}}} 3\nreads_total{{{a},kind=\"s3\"}} 4\n\
                 reads_total{{{b}}} 3\nreads_total{{{b},kind=\"s3\"}} 4\n"
            )
        );
    }

    #[test]
    fn a_sidecar_can_neither_flood_nor_speak_for_another_pod() {
        let mut text = String::from("x{pod=\"other\"} 1\nx{a=\"1\",namespace=\"other\"} 1\n{} 1\n");
        for n in 0..MAX_SERIES * 2 {
            text.push_str(&format!("y{{n=\"{n}\"}} 1\n"));
        }
        let mut families = Families::default();
        families.add(&text, &pod("a"), "lampyris-mount");
        let shown = families.render();
        assert_eq!(shown.lines().count(), MAX_SERIES);
        assert!(!shown.contains("other"));
    }
}
