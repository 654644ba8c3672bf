//! Metrics and state of the sidecars, asked for in their pods.
//!
//! Sidecars show theirs on unix sockets in the pod; the network reaches only this process. What a sidecar says is bounded
//! and parsed before it is passed on: the pod may have put another program in its place, and all of them together must
//! fit into this one's memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

/// Longest answer of one sidecar.
const MAX_BODY_BYTES: usize = 256 << 10;
/// Longest state of one sidecar: some lines for each of its volumes.
pub const MAX_STATE_BYTES: usize = 64 << 10;
/// Deepest state: whoever reads all of them parses them together, and parsers have a limit.
const MAX_STATE_DEPTH: usize = 32;
/// A sidecar that takes longer is left out.
const TIMEOUT: Duration = Duration::from_secs(2);
const TOO_LONG: &str = "an answer too long or cut off";

/// Where a sidecar can be asked.
#[derive(Debug, PartialEq, Eq)]
pub struct Socket {
    /// Its admin socket in the private directory.
    pub name: &'static str,
    /// The container that it belongs to.
    pub container: &'static str,
    /// What the names of its metrics begin with.
    pub prefix: &'static str,
}

/// The mount sidecar's socket and the scan agent's.
pub static SOCKETS: [Socket; 2] = [
    Socket { name: "mount-admin.sock", container: "lampyris-mount", prefix: "lampyris_mount_" },
    Socket { name: "scan-admin.sock", container: "lampyris-scan", prefix: "lampyris_scan_" },
];

/// What sidecars say of themselves, as JSON, by pod and container.
pub type States = BTreeMap<String, BTreeMap<&'static str, String>>;

/// A sidecar's metrics; `None` when it is not there or misbehaves.
pub async fn scrape(private_dir: PathBuf, socket: &Socket) -> Option<String> {
    let said = ask(&private_dir, socket, "/metrics", MAX_BODY_BYTES).await.ok()?;
    String::from_utf8(said.into()).ok()
}

/// A sidecar's state as JSON, or `{"error": …}` in its place.
pub async fn state(private_dir: PathBuf, socket: &Socket) -> String {
    let said = ask(&private_dir, socket, "/state", MAX_STATE_BYTES).await;
    let checked = said.and_then(|said| checked(&said));
    checked.unwrap_or_else(|why| json!({"error": why}).to_string())
}

/// A state as text again: its values, which take thirty times as much room, are here only for this moment.
fn checked(said: &[u8]) -> Result<String, &'static str> {
    let value: Value = serde_json::from_slice(said).map_err(|_| "no JSON")?;
    if depth(&value) > MAX_STATE_DEPTH {
        return Err("JSON that is nested too deep");
    }
    // Written anew a number may be longer.
    let text = value.to_string();
    if text.len() > MAX_STATE_BYTES { Err(TOO_LONG) } else { Ok(text) }
}

/// Bounded by the parser's own limit.
fn depth(value: &Value) -> usize {
    let below = match value {
        Value::Array(values) => values.iter().map(depth).max(),
        Value::Object(fields) => fields.values().map(depth).max(),
        _ => return 0,
    };
    below.unwrap_or(0) + 1
}

/// The states of all sidecars on a node as one document.
#[must_use]
pub fn document(node: &str, states: &States) -> String {
    let quoted = |text: &str| Value::from(text).to_string();
    let size: usize = states.values().flat_map(BTreeMap::values).map(String::len).sum();
    let mut out = String::with_capacity(size + (states.len() + 1) * 256);
    out.push_str(&format!("{{\"node\":{},\"pods\":{{", quoted(node)));
    for (at, (pod, containers)) in states.iter().enumerate() {
        let separator = if at == 0 { "" } else { "," };
        out.push_str(&format!("{separator}{}:{{", quoted(pod)));
        for (at, (container, state)) in containers.iter().enumerate() {
            let separator = if at == 0 { "" } else { "," };
            out.push_str(&format!("{separator}{}:", quoted(container)));
            out.push_str(state);
        }
        out.push('}');
    }
    out.push_str("}}");
    out
}

async fn ask(
    private_dir: &Path,
    socket: &Socket,
    path: &str,
    limit: usize,
) -> Result<Bytes, &'static str> {
    let asked = tokio::time::timeout(TIMEOUT, fetch(private_dir, socket, path, limit));
    asked.await.unwrap_or(Err("no answer in time"))
}

/// Ends its connection with itself, also when nobody waits for it any more.
async fn fetch(
    private_dir: &Path,
    socket: &Socket,
    path: &str,
    limit: usize,
) -> Result<Bytes, &'static str> {
    let stream = crate::socket::connect(private_dir, socket.name).map_err(|_| "not there")?;
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
    Ok(body.map_err(|_| TOO_LONG)?.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_passed_on_only_where_it_stays_short_and_shallow() {
        let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let zeros = |zero: &str| format!("[{}]", vec![zero; 15_000].join(","));
        assert_eq!(checked(b" {\"a\": [1, 2.5]} ").unwrap(), "{\"a\":[1,2.5]}");
        assert_eq!(checked(nested(MAX_STATE_DEPTH).as_bytes()), Ok(nested(MAX_STATE_DEPTH)));
        let deep = checked(nested(MAX_STATE_DEPTH + 1).as_bytes());
        assert_eq!(deep, Err("JSON that is nested too deep"));
        assert_eq!(checked(nested(1000).as_bytes()), Err("no JSON"));
        assert_eq!(checked(zeros("0").as_bytes()), Ok(zeros("0")));
        assert_eq!(checked(zeros("1e9").as_bytes()), Err(TOO_LONG));
    }

    #[test]
    fn the_states_of_a_node_are_one_document_whatever_the_names_are() {
        let mut states = States::default();
        assert_eq!(document("n", &states), "{\"node\":\"n\",\"pods\":{}}");
        for (pod, container) in [("t/a", "lampyris-mount"), ("t/a", "lampyris-scan"), ("t/\"", "x")]
        {
            states.entry(pod.into()).or_default().insert(container, format!("[\"{container}\"]"));
        }
        let parsed: Value = serde_json::from_str(&document("n", &states)).unwrap();
        let both =
            json!({"lampyris-mount": ["lampyris-mount"], "lampyris-scan": ["lampyris-scan"]});
        assert_eq!(parsed, json!({"node": "n", "pods": {"t/a": both, "t/\"": {"x": ["x"]}}}));
    }
}
