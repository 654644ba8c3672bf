//! The conversation with the node plugin over `node.sock`: datasets and credentials come in,
//! changes of health go out. Datasets stay when the plugin goes; it comes back and says them again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use source::{Credentials, SourceConfig};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

use super::dataset::{Datasets, Status};

/// Longest message of the plugin.
const MAX_LINE: u64 = 1 << 20;
/// Pause before connecting again: the plugin binds the socket when it publishes a volume.
const RECONNECT: Duration = Duration::from_millis(300);

/// The first line of a conversation. The messages are those of `handover` in the crate keeper, as far as the agent needs
/// them.
const HELLO: &[u8] = b"{\"hello\":{\"version\":1,\"role\":\"scan\"}}\n";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Message {
    Volume(Volume),
    Credentials(NewCredentials),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Volume {
    name: String,
    #[serde(default)]
    mount_path: Option<String>,
    dataset: String,
    #[serde(default)]
    format: Option<String>,
    source: SourceConfig,
    #[serde(default)]
    last: bool,
}

#[derive(Debug, Deserialize)]
struct NewCredentials {
    volume: String,
    #[serde(flatten)]
    credentials: Credentials,
}

/// Talks to the plugin until `stop`; `is_complete` turns true once it named every volume.
pub(super) async fn run(
    socket: &Path,
    datasets: &Arc<Datasets>,
    mut changes: mpsc::Receiver<Status>,
    is_complete: &watch::Sender<bool>,
    mut stop: watch::Receiver<bool>,
) {
    while !*stop.borrow() {
        let talk = async {
            match UnixStream::connect(socket).await {
                Ok(stream) => converse(stream, datasets, &mut changes, is_complete).await,
                Err(error) => Err(error),
            }
        };
        tokio::select! {
            ended = talk => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "node plugin is not there");
                }
            }
            _ = stop.changed() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(RECONNECT) => {}
            _ = stop.changed() => return,
        }
    }
}

async fn converse(
    stream: UnixStream,
    datasets: &Arc<Datasets>,
    changes: &mut mpsc::Receiver<Status>,
    is_complete: &watch::Sender<bool>,
) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    write.write_all(HELLO).await?;
    for dataset in datasets.all() {
        if let Some(failure) = dataset.failure() {
            let status = Status { volume: dataset.volume.clone(), failure: Some(failure) };
            write.write_all(&encode(&status)).await?;
        }
    }
    let mut read = BufReader::new(read);
    let mut line = Vec::new();
    loop {
        tokio::select! {
            // Bytes read so far stay in `line` when the other branch wins.
            count = read_line(&mut read, &mut line) => {
                if count? == 0 {
                    return Ok(());
                }
                handle(&line, datasets, is_complete);
                line.clear();
            }
            Some(status) = changes.recv() => write.write_all(&encode(&status)).await?,
        }
    }
}

async fn read_line(
    read: &mut (impl AsyncBufReadExt + Unpin),
    line: &mut Vec<u8>,
) -> std::io::Result<usize> {
    let room = MAX_LINE.saturating_sub(line.len() as u64);
    let count = read.take(room).read_until(b'\n', line).await?;
    if count > 0 && line.last() != Some(&b'\n') {
        let too_long = std::io::Error::new(std::io::ErrorKind::InvalidData, "line cut or too long");
        return Err(too_long);
    }
    Ok(count)
}

fn handle(line: &[u8], datasets: &Arc<Datasets>, is_complete: &watch::Sender<bool>) {
    match serde_json::from_slice(line) {
        Ok(Message::Volume(volume)) => {
            if volume.format.as_deref() != Some("Files") {
                let path = volume.mount_path.map(|path| path.trim_end_matches('/').to_owned());
                datasets.put(&volume.name, &volume.dataset, path, volume.source);
            }
            if volume.last {
                is_complete.send_replace(true);
            }
        }
        Ok(Message::Credentials(new)) => datasets.set_credentials(&new.volume, new.credentials),
        // The line may hold secrets: only serde's place in it is logged.
        Err(error) => tracing::warn!(at = error.column(), "message not understood"),
    }
}

fn encode(status: &Status) -> Vec<u8> {
    let body = match &status.failure {
        None => serde_json::json!({"volume": status.volume, "ok": true}),
        Some(failure) => serde_json::json!({
            "volume": status.volume,
            "reason": failure.reason,
            "message": format!("scan: {}; {}", failure.message, failure.reason.fix()),
        }),
    };
    let mut line = serde_json::json!({ "status": body }).to_string().into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use keeper::handover;
    use source::{Failure, Reason};
    use tokio::net::UnixListener;

    const VOLUME: &str = r#"{"volume":{"name":"lampyris-0","mountPath":"/data/","dataset":"flights",
        "namespace":"ml","readOnly":true,"format":"Vortex","uid":1,"gid":1,"generation":1,
        "recordedInit":null,"source":{"s3":{"uri":"s3://b/p","endpoint":"http://127.0.0.1:1",
        "credentials":{"accessKeyId":"a","secretAccessKey":"b"}}},"last":true}}"#;

    /// As the node plugin writes it, with everything that it knows.
    fn plugin_line(message: &handover::FromNode) -> Vec<u8> {
        serde_json::to_vec(message).unwrap()
    }

    fn plugin_volume(name: &str, format: &str, last: bool) -> handover::FromNode {
        let keys = serde_json::json!({"accessKeyId": "a", "secretAccessKey": "b"});
        let s3 = serde_json::json!({"uri": "s3://b/p", "endpoint": "http://127.0.0.1:1",
            "credentials": keys});
        handover::FromNode::Volume(Box::new(handover::Volume {
            name: name.into(),
            mount_path: Some(format!("/data/{name}/")),
            dataset: format!("dataset-{name}"),
            namespace: "ml".into(),
            read_only: true,
            format: format.into(),
            source: serde_json::json!({ "s3": s3 }),
            uid: 1,
            gid: 1,
            generation: 1,
            recorded_init: None,
            recorded_reply: None,
            mount_id: 7,
            unkept: false,
            last,
        }))
    }

    #[tokio::test]
    async fn what_the_node_plugin_writes_is_understood() {
        let (datasets, _changes) = Datasets::new();
        let (complete, completed) = watch::channel(false);
        let hear = |message| handle(&plugin_line(&message), &datasets, &complete);
        hear(plugin_volume("rows", "Vortex", false));
        assert!(!*completed.borrow());
        let dataset = datasets.find("/data/rows").expect("found by mount path");
        assert_eq!((&*dataset.name, &*dataset.volume), ("dataset-rows", "rows"));
        hear(plugin_volume("plain", "Files", true));
        assert!(*completed.borrow() && datasets.find("plain").is_none());

        let fresh = handover::FromNode::Credentials(handover::Credentials {
            volume: "rows".into(),
            access_key_id: "id".into(),
            secret_access_key: "secret".into(),
            session_token: Some("token".into()),
        });
        let Message::Credentials(new) = serde_json::from_slice(&plugin_line(&fresh)).unwrap()
        else {
            panic!("{fresh:?} is taken for a volume");
        };
        let keys = new.credentials;
        assert_eq!((&*new.volume, &*keys.access_key_id), ("rows", "id"));
        assert_eq!(
            (&*keys.secret_access_key, keys.session_token.as_deref()),
            ("secret", Some("token"))
        );
    }

    #[test]
    fn what_is_written_is_what_the_node_plugin_understands() {
        let understood =
            |line: &[u8]| serde_json::from_slice::<handover::FromSidecar>(line).unwrap();
        let hello = handover::Hello { version: handover::VERSION, role: handover::Role::Scan };
        assert_eq!(understood(HELLO), handover::FromSidecar::Hello(hello));
        let good = Status { volume: "rows".into(), failure: None };
        let said =
            handover::Status { volume: "rows".into(), ok: true, reason: None, message: None };
        assert_eq!(understood(&encode(&good)), handover::FromSidecar::Status(said));
        for reason in Reason::ALL {
            let failure = Some(Failure::new(reason, "list s3://b/p"));
            let status = understood(&encode(&Status { volume: "rows".into(), failure }));
            let handover::FromSidecar::Status(status) = status else { panic!("{status:?}") };
            assert_eq!((&*status.volume, status.ok), ("rows", false));
            assert_eq!(status.reason, Some(reason.to_string()));
            assert!(status.message.unwrap().starts_with("scan: list s3://b/p; "));
        }
    }

    #[tokio::test]
    async fn volumes_come_in_and_health_goes_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (datasets, changes) = Datasets::new();
        let (complete, mut completed) = watch::channel(false);
        let (stop, stopped) = watch::channel(false);
        let agent = Arc::clone(&datasets);
        let task =
            tokio::spawn(async move { run(&path, &agent, changes, &complete, stopped).await });

        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        assert_eq!(line, "{\"hello\":{\"version\":1,\"role\":\"scan\"}}\n");
        let one_line = VOLUME.replace('\n', "") + "\n";
        stream.write_all(one_line.as_bytes()).await.unwrap();
        completed.wait_for(|complete| *complete).await.unwrap();
        let dataset = datasets.find("/data").expect("found by mount path");
        assert_eq!(dataset.name, "flights");

        let failure = Failure::new(Reason::AccessDenied, "list s3://b/p");
        datasets.report(&dataset, Some(&failure));
        line.clear();
        stream.read_line(&mut line).await.unwrap();
        assert!(line.contains(r#""reason":"AccessDenied""#), "{line}");
        datasets.report(&dataset, None);
        line.clear();
        stream.read_line(&mut line).await.unwrap();
        assert_eq!(line, "{\"status\":{\"ok\":true,\"volume\":\"lampyris-0\"}}\n");
        stop.send_replace(true);
        task.await.unwrap();
    }
}
