//! The S3 source against a real server, versitygw over TLS, with objects put through it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod s3_server;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use s3_server::process::own_port;
use s3_server::{KEY, SECRET, server};
use source::{Credentials, Failure, Reason, S3Source, Source};

#[test]
fn without_a_server_a_test_fails_unless_it_is_told_to_skip() {
    let nowhere = || PathBuf::from("/nonexistent/versitygw");
    let here = || std::env::current_exe().unwrap();
    for may_skip in [false, true] {
        assert_eq!(s3_server::choose(here(), may_skip), Ok(Some(here())));
    }
    assert_eq!(s3_server::choose(nowhere(), true), Ok(None));
    let why = s3_server::choose(nowhere(), false).unwrap_err();
    for part in ["/nonexistent/versitygw", "./kind-e2e/test unit", "LAMPYRIS_SKIP_S3"] {
        assert!(why.contains(part), "{why}");
    }
}

#[tokio::test]
async fn objects_are_listed_and_ranges_read_exactly() {
    let Some(server) = server() else { return };
    server.put("flights/b/two.vortex", "0123456789").await;
    server.put("flights/one.vortex", "x").await;
    server.put("flights-not/three.vortex", "y").await;
    let source = server.source("s3://train/flights");
    let objects = source.list().await.unwrap();
    let found: Vec<_> = objects.iter().map(|o| (o.path.as_str(), o.size)).collect();
    assert_eq!(found, [("b/two.vortex", 10), ("one.vortex", 1)]);
    assert!(objects.iter().all(|object| !object.identity.is_empty()));
    assert_eq!(&source.read(&objects[0], 3..7).await.unwrap()[..], b"3456");
    assert_eq!(source.read(&objects[0], 4..4).await.unwrap().len(), 0);

    let single = server.source("s3://train/flights/one.vortex");
    let objects = single.list().await.unwrap();
    assert_eq!(objects[0].path, "one.vortex");
    assert_eq!(&single.read(&objects[0], 0..1).await.unwrap()[..], b"x");
}

#[tokio::test]
async fn keys_are_read_as_they_are_whatever_characters_they_have() {
    let Some(server) = server() else { return };
    let mut names = [
        "a~1.vortex",
        "b c+d&e=f@g:h;i,j.vortex",
        "hour=2024-01-01 00%3A00/part.vortex",
        "q?x#2.vortex",
        "[0]{1}^`|\"<>*!'()$\\.vortex",
        "\u{e4}\u{1f41e}.vortex",
    ];
    for name in names {
        server.put(&format!("odd~%20#dir/{name}"), name).await;
    }
    let source = server.source("s3://train/odd~%20#dir");
    let objects = source.list().await.unwrap();
    names.sort_unstable();
    assert_eq!(objects.iter().map(|object| &*object.path).collect::<Vec<_>>(), names);
    for object in &objects {
        let bytes = source.read(object, 0..object.size).await.unwrap();
        assert_eq!(bytes, object.path.as_bytes());
    }
    let single = server.source("s3://train/odd~%20#dir/q?x#2.vortex");
    let objects = single.list().await.unwrap();
    assert_eq!(&single.read(&objects[0], 0..1).await.unwrap()[..], b"q");
}

#[tokio::test]
async fn a_prefix_that_was_an_object_may_become_a_folder() {
    let Some(server) = server() else { return };
    server.put("turns", "object").await;
    let source = server.source("s3://train/turns");
    let objects = source.list().await.unwrap();
    assert_eq!(&source.read(&objects[0], 0..6).await.unwrap()[..], b"object");
    server.delete("turns").await;
    server.put("turns/inner.vortex", "inner").await;
    let objects = source.list().await.unwrap();
    assert_eq!(&source.read(&objects[0], 0..5).await.unwrap()[..], b"inner");
}

#[tokio::test]
async fn a_replaced_object_is_never_read() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "old old old").await;
    let source = server.source("s3://train/d");
    let objects = source.list().await.unwrap();
    server.put("d/a.vortex", "new new new").await;
    let failure = source.read(&objects[0], 0..3).await.unwrap_err();
    assert_eq!(failure.reason, Reason::DatasetChanged, "{failure}");
    let objects = source.list().await.unwrap();
    assert_eq!(&source.read(&objects[0], 0..3).await.unwrap()[..], b"new");
}

#[tokio::test]
async fn what_is_missing_is_named() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "x").await;
    let failure = server.source("s3://no-such-bucket/d").list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::BucketNotFound, "{failure}");
    let failure = server.source("s3://train/nothing").list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::ObjectNotFound, "{failure}");
}

#[tokio::test]
async fn wrong_credentials_are_told_and_new_ones_heal_the_open_source() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "x").await;
    let mut config = server.config("s3://train/d");
    let good = config.credentials.clone().unwrap();
    let bad = |id: &str, secret: &str| Credentials {
        access_key_id: id.into(),
        secret_access_key: secret.into(),
        session_token: None,
    };
    config.credentials = Some(bad(KEY, "wrong"));
    let source = S3Source::new(&config).unwrap();
    let failure = source.list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::InvalidCredentials, "{failure}");
    assert!(!failure.message.contains("wrong"), "a secret in {failure}");
    source.set_credentials(bad("nobody", SECRET));
    let failure = source.list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::InvalidCredentials, "{failure}");
    source.set_credentials(good);
    assert_eq!(source.list().await.unwrap().len(), 1);
}

#[tokio::test]
async fn an_untrusted_certificate_and_a_closed_port_are_told_apart() {
    let Some(server) = server() else { return };
    let mut config = server.config("s3://train/d");
    config.ca_bundle = None;
    let failure = S3Source::new(&config).unwrap().list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::TlsFailed, "{failure}");
    config.endpoint = format!("https://127.0.0.1:{}", own_port());
    let started = Instant::now();
    let failure = S3Source::new(&config).unwrap().list().await.unwrap_err();
    assert_eq!(failure.reason, Reason::EndpointUnreachable, "{failure}");
    assert!(started.elapsed() < Duration::from_secs(25));
}

/// A policy of the bucket that allows `reader` each action on its resource.
fn allow(statements: &[(&str, &str)]) -> String {
    let statement = |(action, resource): &(&str, &str)| {
        serde_json::json!({"Effect": "Allow", "Principal": {"AWS": ["reader"]},
            "Action": [action], "Resource": [format!("arn:aws:s3:::{resource}")]})
    };
    let all: Vec<_> = statements.iter().map(statement).collect();
    serde_json::json!({"Version": "2012-10-17", "Statement": all}).to_string()
}

fn says(failure: &Failure, reason: Reason, message: &str) {
    assert_eq!(failure.reason, reason, "{failure}");
    assert!(failure.message.starts_with(message), "{failure} does not begin with {message}");
}

#[tokio::test]
async fn what_a_user_may_not_do_is_denied_by_name_and_heals_when_it_is_allowed() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "abc").await;
    server.put("d/locked.vortex", "abc").await;
    let reader = server.user("reader");
    let source_of = |uri: &str| {
        let mut config = server.config(uri);
        config.credentials = Some(reader.clone());
        S3Source::new(&config).unwrap()
    };
    let all = source_of("s3://train/d");
    let one = source_of("s3://train/d/a.vortex");
    let failure = all.list().await.unwrap_err();
    says(&failure, Reason::AccessDenied, "list s3://train/d: AccessDenied: ");
    let failure = one.list().await.unwrap_err();
    says(&failure, Reason::AccessDenied, "list s3://train/d/a.vortex: AccessDenied: ");

    let may_list = ("s3:ListBucket", "train");
    server.policy(allow(&[may_list, ("s3:GetObject", "train/d/a.vortex")])).await;
    let objects = all.list().await.unwrap();
    assert_eq!(&all.read(&objects[0], 0..3).await.unwrap()[..], b"abc");
    let failure = all.read(&objects[1], 0..3).await.unwrap_err();
    says(&failure, Reason::AccessDenied, "get locked.vortex of s3://train/d: AccessDenied: ");
    let opened = one.list().await.unwrap();
    assert_eq!(&one.read(&opened[0], 1..3).await.unwrap()[..], b"bc");
    // The answer to a HEAD has no body to say more.
    let failure = source_of("s3://train/d/locked.vortex").list().await.unwrap_err();
    let message = "head s3://train/d/locked.vortex: HTTP status 403";
    says(&failure, Reason::AccessDenied, message);

    server.policy(allow(&[may_list, ("s3:GetObject", "train/d/*")])).await;
    assert_eq!(&all.read(&objects[1], 0..3).await.unwrap()[..], b"abc");
}

#[tokio::test]
async fn an_object_that_is_gone_since_it_was_listed_is_a_changed_dataset() {
    let Some(server) = server() else { return };
    server.put("d/a.vortex", "abc").await;
    let source = server.source("s3://train/d");
    let objects = source.list().await.unwrap();
    server.delete("d/a.vortex").await;
    let failure = source.read(&objects[0], 0..3).await.unwrap_err();
    let message = "a.vortex of s3://train/d is gone since it was listed";
    says(&failure, Reason::DatasetChanged, message);
}

#[tokio::test]
async fn a_region_that_the_server_does_not_have_is_named() {
    let Some(server) = server() else { return };
    let mut config = server.config("s3://train/d");
    config.region = "eu-1".into();
    let failure = S3Source::new(&config).unwrap().list().await.unwrap_err();
    let message = "list s3://train/d: AuthorizationHeaderMalformed: ";
    says(&failure, Reason::InvalidCredentials, message);
    let region = r#"the region "eu-1" is wrong; expecting "us-east-1""#;
    assert!(failure.message.ends_with(region), "{failure}");
}

#[tokio::test]
async fn folders_that_a_console_made_are_no_files() {
    let Some(server) = server() else { return };
    server.folder("d").await;
    server.folder("d/deep").await;
    server.put("d/deep/a.vortex", "abc").await;
    server.put("d/deep-too", "").await;
    let objects = server.source("s3://train/d").list().await.unwrap();
    let found: Vec<_> = objects.iter().map(|o| (o.path.as_str(), o.size)).collect();
    assert_eq!(found, [("deep-too", 0), ("deep/a.vortex", 3)]);
}
