//! Whether an object on the server already has everything that we would apply. The server adds
//! defaults and rewrites quantities, and admission policies add volumes, mounts and variables, so
//! equality would never hold and we would write for ever.

use serde_json::Value;

/// Whether every field of `desired` is in `observed` with the same meaning, and every item of its
/// lists. What is there besides is nobody's mistake: in a list whose items have keys it may be
/// someone else's, as it may in an object. A list without keys has to be the same from end to end.
#[must_use]
pub fn covers(desired: &Value, observed: &Value) -> bool {
    match (desired, observed) {
        (Value::Object(want), Value::Object(have)) => want.iter().all(|(key, value)| {
            have.get(key).map_or_else(|| is_empty(value), |other| covers_field(key, value, other))
        }),
        (Value::Array(want), Value::Array(have)) => {
            want.len() == have.len() && want.iter().zip(have).all(|(a, b)| covers(a, b))
        }
        (Value::String(want), Value::String(have)) => want == have || same_quantity(want, have),
        (want, have) => want == have,
    }
}

fn covers_field(name: &str, desired: &Value, observed: &Value) -> bool {
    match (desired, observed, keys(name)) {
        (Value::Array(want), Value::Array(have), keys @ [_, ..]) => want.iter().all(|item| {
            let same = |other: &&Value| is_same(item, other, keys);
            have.iter().find(same).is_some_and(|other| covers(item, other))
        }),
        _ => covers(desired, observed),
    }
}

/// The fields that tell apart the items of the list `name`, as server-side apply merges it; none of
/// a list that it takes as a whole, such as `args`.
fn keys(name: &str) -> &'static [&'static str] {
    match name {
        "containers" | "initContainers" | "volumes" | "env" | "imagePullSecrets" => &["name"],
        "volumeMounts" => &["mountPath"],
        "volumeDevices" => &["devicePath"],
        // Of a container, and of a Service.
        "ports" => &["containerPort", "port", "protocol"],
        "topologySpreadConstraints" => &["topologyKey", "whenUnsatisfiable"],
        "ownerReferences" => &["uid"],
        _ => &[],
    }
}

/// Whether two items have the same key: at least one part of it, and the same in every part that
/// is wanted.
fn is_same(want: &Value, have: &Value, keys: &[&str]) -> bool {
    let mut stated = keys.iter().filter(|key| want.get(key).is_some()).peekable();
    stated.peek().is_some() && stated.all(|key| want[*key] == have[*key])
}

/// The server drops these.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn same_quantity(a: &str, b: &str) -> bool {
    matches!((quantity_milli(a), quantity_milli(b)), (Some(a), Some(b)) if a == b)
}

/// A Kubernetes quantity in thousandths; `None` if it is not one or has finer parts.
#[must_use]
pub fn quantity_milli(text: &str) -> Option<i128> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let scale: i128 = match suffix {
        "m" => 1,
        "" => 1_000,
        "k" => 1_000_000,
        "M" => 1_000_000_000,
        "G" => 1_000_000_000_000,
        "T" => 1_000_000_000_000_000,
        "P" => 1_000_000_000_000_000_000,
        "Ki" => 1_000 << 10,
        "Mi" => 1_000 << 20,
        "Gi" => 1_000 << 30,
        "Ti" => 1_000 << 40,
        "Pi" => 1_000 << 50,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > 9 {
        return None;
    }
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let divisor = 10_i128.pow(u32::try_from(fraction.len()).ok()?);
    let product = digits.checked_mul(scale)?;
    (product % divisor == 0).then_some(product / divisor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn defaults_that_the_server_added_do_not_count_as_a_difference() {
        let desired = json!({"spec": {"a": 1, "empty": {}, "list": [{"x": "y"}]}});
        let observed = json!({"spec": {"a": 1, "list": [{"x": "y", "added": true}], "b": 2}});
        assert!(covers(&desired, &observed));
        assert!(!covers(&json!({"spec": {"a": 2}}), &observed));
        assert!(!covers(&json!({"spec": {"c": 1}}), &observed));
        assert!(!covers(&json!({"spec": {"list": []}}), &observed));
    }

    /// A container as we apply it, and as the server gives it back.
    fn container() -> (Value, Value) {
        let want = json!({
            "name": "storage", "image": "r/storage-node:1", "args": ["serve", "--io", "auto"],
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [
                {"name": "rpc", "containerPort": 9100, "protocol": "TCP"},
                {"name": "admin", "containerPort": 9101, "protocol": "TCP"},
            ],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        });
        let mut have = want.clone();
        have["terminationMessagePath"] = json!("/dev/termination-log");
        (json!({"containers": [want]}), json!({"containers": [have]}))
    }

    #[test]
    fn what_a_policy_adds_to_a_list_with_keys_is_no_difference() {
        for (list, item) in [
            ("volumeMounts", json!({"name": "ca", "mountPath": "/etc/ca", "readOnly": true})),
            ("env", json!({"name": "HTTPS_PROXY", "value": "http://proxy:3128"})),
            ("ports", json!({"containerPort": 15_090, "protocol": "TCP"})),
            // The same number, another protocol: another port.
            ("ports", json!({"containerPort": 9100, "protocol": "UDP"})),
        ] {
            let (want, mut have) = container();
            let items = have["containers"][0][list].as_array_mut().unwrap();
            items.insert(0, item);
            assert!(covers(&want, &have), "{list}: {have}");
        }
        let (mut want, mut have) = container();
        for (list, own, added) in [
            ("containers", Value::Null, json!({"name": "proxy", "image": "x"})),
            ("volumes", json!({"name": "tmp", "emptyDir": {}}), json!({"name": "ca"})),
            ("initContainers", json!({"name": "a"}), json!({"name": "b"})),
            ("imagePullSecrets", json!({"name": "ours"}), json!({"name": "theirs"})),
            (
                "topologySpreadConstraints",
                json!({"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}),
                json!({"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 9}),
            ),
        ] {
            if !own.is_null() {
                (want[list], have[list]) = (json!([own]), json!([own]));
            }
            have[list].as_array_mut().unwrap().insert(0, added);
            assert!(covers(&want, &have), "{list}: {have}");
        }
    }

    #[test]
    fn an_item_that_is_gone_or_another_is_a_difference() {
        for (pointer, value) in [
            ("/containers/0/volumeMounts/0/mountPath", json!("/elsewhere")),
            ("/containers/0/volumeMounts/0/name", json!("other")),
            ("/containers/0/volumeMounts", json!([])),
            ("/containers/0/env/0/valueFrom/fieldRef/fieldPath", json!("status.hostIP")),
            ("/containers/0/ports/1/containerPort", json!(9102)),
            ("/containers/0/ports/1/name", json!("metrics")),
            ("/containers/0/name", json!("renamed")),
            ("/containers/0/image", json!("r/storage-node:2")),
            // Lists that are taken as a whole.
            ("/containers/0/args", json!(["serve", "--io", "auto", "--verbose"])),
            ("/containers/0/args", json!(["--io", "auto", "serve"])),
            ("/containers/0/args", json!(["serve", "--io"])),
        ] {
            let (want, mut have) = container();
            *have.pointer_mut(pointer).unwrap() = value;
            assert!(!covers(&want, &have), "{pointer}: {have}");
        }
    }

    #[test]
    fn quantities_are_compared_by_value() {
        for (a, b) in [("1", "1000m"), ("0.5", "500m"), ("1Gi", "1024Mi"), ("1.5Gi", "1536Mi")] {
            assert!(covers(&json!(a), &json!(b)), "{a} {b}");
        }
        for (a, b) in [("1", "1001m"), ("1G", "1Gi"), ("v1", "v01"), ("", "0")] {
            assert!(!covers(&json!(a), &json!(b)), "{a} {b}");
        }
    }
}
