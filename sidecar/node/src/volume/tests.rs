use prost::Message;

use super::*;
use crate::csi::{MountVolume, VolumeCapability};

const KUBELET: &str = "/var/lib/kubelet";
const UID: &str = "0d7f2c1a-0000-4000-8000-000000000001";

fn target(volume: &str) -> String {
    format!("{KUBELET}/pods/{UID}/volumes/kubernetes.io~csi/{volume}/mount")
}

fn request() -> NodePublish {
    let context = [
        ("csi.storage.k8s.io/ephemeral", "true"),
        ("csi.storage.k8s.io/pod.name", "train-0"),
        ("csi.storage.k8s.io/pod.namespace", "team-a"),
        ("csi.storage.k8s.io/pod.uid", UID),
        ("dataset", "imagenet"),
        ("namespace", "data"),
    ];
    NodePublish {
        volume_id: "csi-1".into(),
        target_path: target("lampyris-0"),
        volume_capability: Some(VolumeCapability {
            block: None,
            mount: Some(MountVolume { volume_mount_group: String::new() }),
        }),
        readonly: true,
        secrets: HashMap::new(),
        volume_context: context.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
    }
}

fn parse(request: &NodePublish) -> Result<Options, VolumeError> {
    Options::parse(request, Path::new(KUBELET))
}

#[test]
fn a_request_of_kubelet_is_understood() {
    let options = parse(&request()).unwrap();
    assert_eq!(options.key(), format!("{UID}/lampyris-0"));
    assert_eq!((options.dataset.as_str(), options.namespace.as_str()), ("imagenet", "data"));
    assert_eq!(options.pod.name, "train-0");
    assert!(options.read_only);
    assert_eq!((options.uid, options.gid), (0, 0));
    assert_eq!(options.credentials, None);
}

#[test]
fn the_namespace_defaults_to_the_pods() {
    let mut request = request();
    request.volume_context.remove("namespace");
    assert_eq!(parse(&request).unwrap().namespace, "team-a");
}

#[test]
fn the_pods_fs_group_wins_over_the_attribute() {
    let mut request = request();
    request.volume_context.insert("gid".into(), "5".into());
    assert_eq!(parse(&request).unwrap().gid, 5);
    let capability = request.volume_capability.as_mut().unwrap();
    capability.mount.as_mut().unwrap().volume_mount_group = "2000".into();
    assert_eq!(parse(&request).unwrap().gid, 2000);
}

#[test]
fn each_missing_field_is_named() {
    type Spoil = fn(&mut NodePublish);
    let cases: [(Spoil, VolumeError); 6] = [
        (|r| r.volume_id.clear(), VolumeError::Missing("volume id")),
        (|r| r.target_path.clear(), VolumeError::Missing("target path")),
        (|r| r.volume_capability = None, VolumeError::Missing("volume capability")),
        (
            |r| r.volume_capability.as_mut().unwrap().block = Some(crate::csi::Empty {}),
            VolumeError::Block,
        ),
        (|r| drop(r.volume_context.remove("csi.storage.k8s.io/ephemeral")), VolumeError::NotInline),
        (|r| drop(r.volume_context.remove("dataset")), VolumeError::Missing("dataset")),
    ];
    for (spoil, expected) in cases {
        let mut request = request();
        spoil(&mut request);
        assert_eq!(parse(&request).unwrap_err(), expected);
    }
}

#[test]
fn a_target_outside_the_pods_volumes_is_refused() {
    let other = "0d7f2c1a-0000-4000-8000-000000000002";
    let targets = [
        "/etc".to_owned(),
        format!("{KUBELET}/pods/{UID}/volumes/kubernetes.io~csi/v"),
        format!("{KUBELET}/pods/{UID}/volumes/kubernetes.io~csi/v/mount/x"),
        format!("{KUBELET}/pods/{UID}/volumes/kubernetes.io~csi/../mount"),
        format!("{KUBELET}/pods/../{UID}/volumes/kubernetes.io~csi/v/mount"),
        format!("{KUBELET}/pods/{UID}/volumes/kubernetes.io~empty-dir/v/mount"),
        target("v").replace(UID, other),
    ];
    for path in targets {
        let mut request = request();
        request.target_path = path.clone();
        assert_eq!(parse(&request), Err(VolumeError::BadTarget(path)));
    }
}

#[test]
fn names_that_are_no_names_are_refused() {
    for bad in ["../x", "a/b", "A", "-a", "a.", "a\0", &"a".repeat(254)] {
        let mut request = request();
        request.volume_context.insert("dataset".into(), bad.into());
        assert!(matches!(parse(&request), Err(VolumeError::BadAttribute("dataset", _))), "{bad:?}");
    }
}

#[test]
fn the_mount_path_is_passed_on_if_it_is_one() {
    let mut request = request();
    assert_eq!(parse(&request).unwrap().mount_path, None);
    request.volume_context.insert("mountPath".into(), "/data".into());
    assert_eq!(parse(&request).unwrap().mount_path.as_deref(), Some("/data"));
    request.volume_context.insert("mountPath".into(), "data".into());
    assert!(matches!(parse(&request), Err(VolumeError::BadAttribute("mountPath", _))));
}

#[test]
fn credentials_come_from_the_secret_without_their_newline() {
    let mut request = request();
    request.secrets.insert("accessKeyId".into(), "AKIA\n".into());
    assert_eq!(parse(&request).unwrap_err(), VolumeError::Missing("secretAccessKey in the Secret"));
    request.secrets.insert("secretAccessKey".into(), "hush".into());
    let credentials = parse(&request).unwrap().credentials.unwrap();
    assert_eq!(credentials.access_key_id, "AKIA");
    assert_eq!(credentials.session_token, None);
    assert!(!format!("{credentials:?}").contains("hush"));
}

#[test]
fn unpublish_finds_the_key_and_ignores_foreign_paths() {
    let mut request = NodeUnpublish { volume_id: "csi-1".into(), target_path: target("v") };
    let kubelet = Path::new(KUBELET);
    assert_eq!(parse_unpublish(&request, kubelet).unwrap(), Some((UID.to_owned(), "v".to_owned())));
    request.target_path = "/elsewhere".into();
    assert_eq!(parse_unpublish(&request, kubelet).unwrap(), None);
    request.volume_id.clear();
    assert_eq!(parse_unpublish(&request, kubelet), Err(VolumeError::Missing("volume id")));
}

/// Any publish request: refused, or below kubelet's directory and under names that can be part of a path. Answers what a
/// log may show of it.
fn publish(request: &NodePublish) -> String {
    let options = match parse(request) {
        Ok(options) => options,
        Err(refusal) => return format!("{request:?} {refusal}"),
    };
    let (uid, name) = split_target(&options.target, Path::new(KUBELET)).unwrap();
    assert_eq!((&uid, &name), (&options.pod.uid, &options.name));
    assert_eq!(options.key().split('/').collect::<Vec<_>>(), [&*uid, &*name]);
    let private = private_dir(Path::new(KUBELET), &uid);
    assert!(private.components().all(|part| part != Component::ParentDir), "{private:?}");
    for name in [&options.dataset, &options.namespace, &options.pod.name, &options.pod.namespace] {
        assert!(object_name("name", name).is_ok(), "{name:?}");
    }
    format!("{request:?} {options:?}")
}

#[test]
fn no_publish_request_reaches_outside_its_pod_or_tells_a_secret() {
    let keys = [("accessKeyId", "hush-a"), ("secretAccessKey", "hush-b"), ("sessionToken", "hush")];
    let mut full = request();
    full.secrets = keys.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    for (key, value) in [("uid", "5"), ("gid", "6"), ("mountPath", "/mnt/data")] {
        full.volume_context.insert(key.to_owned(), value.to_owned());
    }
    assert!(parse(&full).unwrap().credentials.is_some());
    let good = [request().encode_to_vec(), full.encode_to_vec()];
    let runs = rpc::fuzz::run(|random| {
        let mut bytes = good[random.below(good.len())].clone();
        let donor = &good[random.below(good.len())];
        random.mutate(&mut bytes, donor);
        if let Ok(request) = NodePublish::decode(&*bytes) {
            publish(&request);
        }
        // A parser of protobuf refuses most of those, so also one that is whole but for a text.
        let mut request = full.clone();
        let texts = request.volume_context.values_mut().chain([&mut request.target_path]);
        let mut texts: Vec<&mut String> = texts.collect();
        let text = texts.swap_remove(random.below(texts.len()));
        let mut bytes = std::mem::take(text).into_bytes();
        random.mutate(&mut bytes, b"/../../../elsewhere/./mount");
        *text = String::from_utf8_lossy(&bytes).into_owned();
        let shown = publish(&request);
        assert!(!shown.contains("hush"), "{shown}");
    });
    assert!(runs > 100, "only {runs} runs");
}
