//! Whether an object on the server already has everything that we would apply. The server adds
//! defaults and rewrites quantities, so equality would never hold and we would write for ever.

use serde_json::Value;

/// Whether every field of `desired` is in `observed` with the same meaning.
#[must_use]
pub fn covers(desired: &Value, observed: &Value) -> bool {
    match (desired, observed) {
        (Value::Object(want), Value::Object(have)) => want.iter().all(|(key, value)| {
            have.get(key).map_or_else(|| is_empty(value), |other| covers(value, other))
        }),
        (Value::Array(want), Value::Array(have)) => {
            want.len() == have.len() && want.iter().zip(have).all(|(a, b)| covers(a, b))
        }
        (Value::String(want), Value::String(have)) => want == have || same_quantity(want, have),
        (want, have) => want == have,
    }
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
