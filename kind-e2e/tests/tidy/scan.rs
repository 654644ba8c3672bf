//! Just enough of Rust's grammar to measure it: comments and literals blanked out, functions by
//! their braces, modules by their declarations. Its own tests keep the rules from passing on nothing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The source with comments and the contents of literals replaced by spaces; line breaks stay.
pub(crate) fn code(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skip(&chars, at);
        if end == at {
            out.push(chars[at]);
            at += 1;
        } else {
            out.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    out
}

/// Where the comment or literal that starts here ends; the same place when none starts.
fn skip(chars: &[char], at: usize) -> usize {
    let next = chars.get(at + 1).copied().unwrap_or(' ');
    match chars[at] {
        '/' if next == '/' => find(chars, at, '\n'),
        '/' if next == '*' => block_comment(chars, at),
        '"' => string(chars, at),
        'r' if (next == '"' || next == '#') && !part_of_word(chars, at) => raw_string(chars, at),
        '\'' if next == '\\' => find(chars, at + 3, '\'') + 1,
        '\'' if chars.get(at + 2) == Some(&'\'') => at + 3,
        _ => at,
    }
    .min(chars.len())
}

fn part_of_word(chars: &[char], at: usize) -> bool {
    // `br"..."` is a literal as well; any other letter before means a name that ends with r.
    at > 0 && chars[at - 1] != 'b' && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_')
}

fn find(chars: &[char], from: usize, wanted: char) -> usize {
    (from..chars.len()).find(|i| chars[*i] == wanted).unwrap_or(chars.len())
}

fn block_comment(chars: &[char], at: usize) -> usize {
    let mut depth = 0;
    let mut i = at;
    while i + 1 < chars.len() {
        match (chars[i], chars[i + 1]) {
            ('/', '*') => depth += 1,
            ('*', '/') if depth == 1 => return i + 2,
            ('*', '/') => depth -= 1,
            _ => {
                i += 1;
                continue;
            }
        }
        i += 2;
    }
    chars.len()
}

fn string(chars: &[char], at: usize) -> usize {
    let mut i = at + 1;
    while i < chars.len() && chars[i] != '"' {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

fn raw_string(chars: &[char], at: usize) -> usize {
    let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
    if chars.get(at + 1 + hashes) != Some(&'"') {
        return at; // a raw name such as r#type
    }
    let mut i = at + 2 + hashes;
    while i < chars.len() {
        let closes = chars[i] == '"'
            && chars[i + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
        if closes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    chars.len()
}

/// The words of the code, comments and literals left out.
pub(crate) fn words(source: &str) -> impl Iterator<Item = String> {
    let code = code(source);
    let words: Vec<String> =
        code.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect();
    words.into_iter()
}

/// Every function with a body: name, line number, and how many lines of its body hold code.
pub(crate) fn functions(source: &str) -> Vec<(String, usize, usize)> {
    let code = code(source);
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        if let Some(name) = function_name(line)
            && let Some(length) = body_lines(&lines[number..])
        {
            found.push((name, number + 1, length));
        }
    }
    found
}

fn function_name(line: &str) -> Option<String> {
    let (before, after) = line.split_once("fn ")?;
    let starts = before.split_whitespace().all(|w| {
        w.starts_with("pub")
            || ["async", "const", "unsafe", "extern", "in", "crate)", "super)"].contains(&w)
    });
    let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (starts && !name.is_empty()).then_some(name)
}

/// Lines with code between the braces of the body that opens first; `None` for a declaration.
fn body_lines(lines: &[&str]) -> Option<usize> {
    let mut depth = 0_usize;
    let mut brackets = 0_usize;
    let mut count = 0;
    for line in lines {
        let inside = depth > 0;
        for c in line.chars() {
            match c {
                '(' | '[' if depth == 0 => brackets += 1,
                ')' | ']' if depth == 0 => brackets = brackets.saturating_sub(1),
                ';' if depth == 0 && brackets == 0 => return None,
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => continue,
            }
            if c == '}' && depth == 0 {
                return Some(count);
            }
        }
        if inside && !line.trim().is_empty() {
            count += 1;
        }
    }
    None
}

/// Adds `file` and every file that its module declarations lead to. `owns_folder` is true for a
/// crate root or a `mod.rs`, whose modules lie beside it.
pub(crate) fn reach(base: &Path, file: &Path, owns_folder: bool, reached: &mut BTreeSet<PathBuf>) {
    let Ok(source) = std::fs::read_to_string(base.join(file)) else { return };
    if !reached.insert(file.to_path_buf()) {
        return;
    }
    let beside = file.parent().unwrap_or_else(|| Path::new("")).to_path_buf();
    let folder = if owns_folder { beside.clone() } else { file.with_extension("") };
    let mut path_attribute = None;
    for line in source.lines().map(str::trim) {
        if let Some(path) = line.strip_prefix("#[path = \"").and_then(|l| l.strip_suffix("\"]")) {
            path_attribute = Some(beside.join(path));
        } else if let Some(name) = module_name(line) {
            match path_attribute.take() {
                Some(path) => reach(base, &path, true, reached),
                None => {
                    reach(base, &folder.join(format!("{name}.rs")), false, reached);
                    reach(base, &folder.join(name).join("mod.rs"), true, reached);
                }
            }
        }
    }
}

fn module_name(line: &str) -> Option<&str> {
    let line = line.strip_suffix(';')?;
    let (visibility, name) = line.split_once("mod ")?;
    let declared = visibility.is_empty() || visibility.starts_with("pub");
    (declared && name.chars().all(|c| c.is_alphanumeric() || c == '_')).then_some(name)
}

#[test]
fn literals_and_comments_are_not_code() {
    let source = "let a = \"unsafe \\\" {\"; // unsafe\nlet b = r#\"unsafe \" }\"#; /* unsafe /* { */ */ let c = '{';";
    assert!(!words(source).any(|w| w == "unsafe"));
    assert!(!code(source).contains('{') && !code(source).contains('}'));
    assert!(words("fn f<'a>(x: &'a str) { unsafe { g(x) } }").any(|w| w == "unsafe"));
}

#[test]
fn the_length_of_a_function_counts_lines_of_code_in_its_body() {
    let source = "pub(crate) async fn f(\n    a: [u8; 4],\n) -> u8 {\n    // why\n\n    let x = 1;\n    x\n}\nfn g();\n";
    assert_eq!(functions(source), vec![("f".to_owned(), 1, 2)]);
}

#[test]
fn modules_are_found_by_their_declarations() {
    assert_eq!(module_name("pub(crate) mod table;"), Some("table"));
    assert_eq!(module_name("mod tests {"), None);
    assert_eq!(module_name("let a = mod b;"), None);
}
