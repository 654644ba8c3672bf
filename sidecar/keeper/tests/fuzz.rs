//! Mutates what is said on our unix sockets. `LAMPYRIS_FUZZ_SECONDS` says for how long.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::fmt::Debug;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use keeper::client::Client;
use keeper::handover::{FromNode, FromSidecar};
use keeper::server::Server;
use keeper::wire::{Connection, WireError};
use rpc::fuzz::Random;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

/// A connection that is left open is a defect, not slow.
const PATIENCE: Duration = Duration::from_secs(20);

/// Entries of strangers before they are dropped: each holds a descriptor of this process.
const OTHERS_MAX: usize = 100;

/// Some of `good`, mutated.
fn mutated(random: &mut Random, good: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..=random.below(3) {
        let line = good[random.below(good.len())];
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
    }
    let donor = good[random.below(good.len())];
    random.mutate(&mut bytes, donor.as_bytes());
    bytes
}

/// Whatever comes over a socket: each line is a message that can be said again, or refused alone.
fn conversation<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    let (mut theirs, ours) = UnixStream::pair().unwrap();
    theirs.write_all(bytes).unwrap();
    drop(theirs);
    let mut connection = Connection::new(ours);
    let mut lines = 0;
    let whole = loop {
        match connection.receive::<T>() {
            Ok(Some((message, _))) => {
                let again = serde_json::to_string(&message).unwrap();
                assert_eq!(serde_json::from_str::<T>(&again).unwrap(), message);
            }
            Err(WireError::Malformed(_)) => {}
            Ok(None) => break true,
            Err(_) => break false,
        }
        lines += 1;
    };
    assert_eq!(lines, bytes.split(|byte| *byte == b'\n').count() - 1);
    assert_eq!(whole, bytes.last().is_none_or(|last| *last == b'\n'), "a cut line is no message");
}

#[test]
fn hand_over_lines() {
    let from_sidecar = [
        r#"{"hello":{"version":1,"role":"mount"}}"#,
        r#"{"init":{"volume":"v","request":"AAAA","reply":"AAAA","confirm":true}}"#,
        r#"{"status":{"volume":"v","reason":"AccessDenied","message":"list"}}"#,
    ];
    let from_node = [
        r#"{"volume":{"name":"v","dataset":"d","namespace":"n","readOnly":true,"format":"Files",
            "source":{"cluster":{"manager":"h:9000","path":"/x"}},"generation":1,"mountId":7,"last":true}}"#,
        r#"{"credentials":{"volume":"v","accessKeyId":"a","secretAccessKey":"s"}}"#,
        r#"{"kept":{"volume":"v"}}"#,
    ]
    .map(|line| line.replace('\n', " "));
    let from_node = from_node.each_ref().map(String::as_str);
    let runs = rpc::fuzz::run(|random| {
        conversation::<FromSidecar>(&mutated(random, &from_sidecar));
        conversation::<FromNode>(&mutated(random, &from_node));
    });
    assert!(runs > 100, "only {runs} runs");
}

/// One client that says anything, until the keeper has hung up.
fn say(socket: &Path, bytes: &[u8], descriptor: Option<&File>) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
    // The keeper may have had enough before the end.
    let _ = ring::fd::send_with_fds(&stream, bytes, &descriptors);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answers = Vec::new();
    match stream.read_to_end(&mut answers) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("still open"),
        _ => {}
    }
}

#[test]
fn a_keeper_keeps_what_it_has_whatever_others_say() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("keeper.sock");
    let server = Server::bind(&socket, dir.path().metadata().unwrap().uid()).unwrap();
    std::thread::spawn(move || server.run());
    let held = tempfile::tempfile().unwrap();
    let honest = Client::new(socket.clone());
    honest.put("pod/held", json!({"n": 1}), &[held.as_fd()]).unwrap();
    let good = [
        r#"{"put":{"key":"x/y","meta":{"a":[1,2]}}}"#,
        r#"{"get":{"key":"x/y"}}"#,
        r#"{"list":{}}"#,
        r#"{"drop":{"key":"x/y"}}"#,
    ];
    rpc::fuzz::run(|random| {
        let bytes = mutated(random, &good);
        say(&socket, &bytes, (random.below(2) == 0).then_some(&held));
        let (meta, descriptors) = honest.get("pod/held").unwrap();
        assert_eq!(meta, json!({"n": 1}));
        let back: Vec<_> = descriptors.into_iter().map(File::from).collect();
        let inodes: Vec<_> = back.iter().map(|file| file.metadata().unwrap().ino()).collect();
        assert_eq!(inodes, [held.metadata().unwrap().ino()]);
        let others = honest.list().unwrap().into_iter().filter(|key| key != "pod/held");
        let others: Vec<_> = others.collect();
        if others.len() > OTHERS_MAX {
            others.iter().for_each(|key| honest.drop_entry(key).unwrap());
        }
    });
}
