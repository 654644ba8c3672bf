//! CRD manifests from the types. Descriptions that upstream types bring along are cut to their
//! first paragraph (a CRD must stay small enough for client-side apply), `nullable` goes (an
//! explicit null then means "left out", as everywhere in Kubernetes), and integer formats that the
//! API server does not know go as well.

use kube::CustomResourceExt;
use serde_json::Value;
use thiserror::Error;

use crate::{ChainTable, Dataset, DatasetLoad, StorageCluster, StorageNode};

/// Longest description that is kept, in characters.
const DESCRIPTION_LIMIT: usize = 240;

/// A manifest could not be made.
#[derive(Debug, Error)]
pub enum GenerateError {
    /// The CRD has no JSON form.
    #[error("encode the definition as JSON")]
    Json(#[from] serde_json::Error),
    /// The CRD has no YAML form.
    #[error("encode the definition as YAML")]
    Yaml(#[from] serde_yaml_ng::Error),
}

/// The five definitions as JSON, in the order of the documentation.
pub fn definitions() -> Result<Vec<Value>, GenerateError> {
    let all = [
        StorageCluster::crd(),
        StorageNode::crd(),
        ChainTable::crd(),
        Dataset::crd(),
        DatasetLoad::crd(),
    ];
    all.iter()
        .map(|crd| {
            let mut value = serde_json::to_value(crd)?;
            simplify(&mut value);
            Ok(value)
        })
        .collect()
}

/// `(file name, YAML)` of each definition; for the chart with the annotation that makes Helm keep
/// the definition (and so every object of its kind) at uninstall.
pub fn manifests(keep: bool) -> Result<Vec<(String, String)>, GenerateError> {
    definitions()?
        .into_iter()
        .map(|mut crd| {
            if keep {
                crd["metadata"]["annotations"]["helm.sh/resource-policy"] = "keep".into();
            }
            let plural = crd["spec"]["names"]["plural"].as_str().unwrap_or("unnamed").to_owned();
            Ok((format!("{plural}.yaml"), serde_yaml_ng::to_string(&crd)?))
        })
        .collect()
}

fn simplify(value: &mut Value) {
    match value {
        Value::Object(map) => {
            let nullable = map.remove("nullable").is_some_and(|flag| flag == true);
            if nullable && let Some(Value::Array(options)) = map.get_mut("enum") {
                options.retain(|option| !option.is_null());
            }
            if map.get("format").and_then(Value::as_str).is_some_and(|f| f.starts_with("uint")) {
                map.remove("format");
            }
            if let Some(Value::String(text)) = map.get_mut("description") {
                *text = shorten(text);
            }
            map.values_mut().for_each(simplify);
        }
        Value::Array(items) => items.iter_mut().for_each(simplify),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The first paragraph on one line, cut at a sentence if it is still too long.
fn shorten(text: &str) -> String {
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= DESCRIPTION_LIMIT {
        return line;
    }
    match line.split_once(". ") {
        Some((sentence, _)) => format!("{sentence}."),
        None => line.chars().take(DESCRIPTION_LIMIT).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_cut_to_its_first_paragraph_and_then_to_a_sentence() {
        assert_eq!(shorten("One\ntwo.\n\nThree."), "One two.");
        let long = format!("Short start. {}", "x".repeat(300));
        assert_eq!(shorten(&long), "Short start.");
    }

    #[test]
    fn nullable_is_dropped_and_so_is_its_null_among_the_options() {
        let mut value =
            serde_json::json!({"nullable": true, "enum": ["a", null], "format": "uint32"});
        simplify(&mut value);
        assert_eq!(value, serde_json::json!({"enum": ["a"]}));
    }
}
