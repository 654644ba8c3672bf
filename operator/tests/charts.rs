//! What the templates of the charts make of a user's text. Read without rendering: the whole of it is
//! rendered, and given to an API server, by the cluster tests.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

/// Values that the charts' schemas hold to be whole numbers.
const NUMBERS: [&str; 5] = [
    ".Values.operator.replicas",
    ".Values.webhook.timeoutSeconds",
    ".Values.storage.count",
    ".Values.storage.replicas",
    ".Values.storage.targetsPerNode",
];

/// Whether YAML reads what the expression becomes as the text that it is, whatever that text is.
/// `rest` is what comes after it in its line.
fn is_safe(expression: &str, rest: &str) -> bool {
    let quoted = expression.ends_with("| quote") || expression.contains("\"lampyris.image\"");
    // `with`, `range` and `end`, and whole blocks, which `toYaml` and our own helpers write.
    let block = expression.starts_with('-');
    // A part of a longer word, which nothing but a text can be.
    let part = rest.starts_with("-lampyris-");
    quoted || block || part || NUMBERS.contains(&expression)
}

#[test]
fn text_of_a_user_is_quoted_wherever_it_lands() {
    let (mut bare, mut expressions) = (Vec::new(), 0);
    for chart in std::fs::read_dir("../helm").unwrap() {
        for file in std::fs::read_dir(chart.unwrap().path().join("templates")).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "yaml") {
                continue;
            }
            for line in std::fs::read_to_string(&path).unwrap().lines() {
                for part in line.split("{{").skip(1) {
                    let (expression, rest) = part.split_once("}}").unwrap();
                    expressions += 1;
                    if !is_safe(expression.trim(), rest) {
                        bare.push(format!("{}: {}", path.display(), line.trim()));
                    }
                }
            }
        }
    }
    assert!(expressions > 100, "{expressions} expressions");
    assert!(bare.is_empty(), "add `| quote`:\n{}", bare.join("\n"));
}
