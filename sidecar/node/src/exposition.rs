//! Metrics of many sidecars in the text format, parsed and merged with the labels of their pods. No IO.
//!
//! Prometheus takes an answer as a whole or not at all: one line that it does not understand would hide the metrics of all
//! pods of the node, and any pod may have put another program in the place of our sidecar. So a line is passed on only if
//! it has the very form in which our sidecars write theirs, and speaks for nobody else.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::metrics::Socket;
use crate::volume::Pod;

/// Most series of one sidecar, about forty for each of its volumes; the rest is left out.
pub const MAX_SERIES: usize = 400;
/// Most bytes of the samples of one sidecar: those series with long names.
const MAX_SAMPLE_BYTES: usize = 64 << 10;
/// Most bytes of all samples with their labels: more than a node full of such sidecars usually has, and a fraction of the
/// memory that this process may take.
const MAX_BYTES: usize = 16 << 20;
/// Longest line.
const MAX_LINE_BYTES: usize = 512;
/// Labels by which a sample says whose it is: ours are put on it here, Prometheus puts its own.
const FOREIGN: [&str; 5] = ["namespace", "pod", "container", "job", "instance"];
/// What samples of a family may have behind its name, so no family's name ends with it.
const ENDINGS: [&str; 6] = ["_total", "_bucket", "_sum", "_count", "_created", "_info"];

/// What a family counts: the kinds that our sidecars have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    fn parse(word: &str) -> Option<Self> {
        [Self::Counter, Self::Gauge, Self::Histogram].into_iter().find(|kind| kind.word() == word)
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }

    /// What a sample's name has behind that of its family.
    const fn endings(self) -> &'static [&'static str] {
        match self {
            Self::Counter => &["_total"],
            Self::Gauge => &[""],
            Self::Histogram => &["_bucket", "_sum", "_count"],
        }
    }
}

/// The families of our sidecars. Of any other the pod that is heard first says what it is; of these none does.
const OURS: [(&str, Kind); 12] = [
    ("lampyris_mount_fuse_requests", Kind::Counter),
    ("lampyris_mount_fuse_requests_in_flight", Kind::Gauge),
    ("lampyris_mount_operation_errors", Kind::Counter),
    ("lampyris_mount_operation_seconds", Kind::Histogram),
    ("lampyris_mount_read_bytes", Kind::Counter),
    ("lampyris_mount_ring_connections", Kind::Gauge),
    ("lampyris_mount_unsaved_bytes", Kind::Gauge),
    ("lampyris_mount_written_bytes", Kind::Counter),
    ("lampyris_scan_failures", Kind::Counter),
    ("lampyris_scan_fetched_bytes", Kind::Counter),
    ("lampyris_scan_rows", Kind::Counter),
    ("lampyris_scan_sessions", Kind::Gauge),
];

/// Whether a family is one of [`OURS`].
#[must_use]
pub fn is_ours(family: &str) -> bool {
    OURS.iter().any(|(name, _)| *name == family)
}

/// Families of metrics by name, from many sidecars.
#[derive(Debug, Default)]
pub struct Families {
    by_name: BTreeMap<String, Family>,
    /// Labels of the sidecars that were added.
    added: BTreeSet<String>,
    bytes: usize,
}

#[derive(Debug)]
struct Family {
    kind: Kind,
    /// Shown while all sidecars say the same.
    help: Option<String>,
    /// Whole lines.
    samples: String,
}

impl Families {
    /// Adds what one sidecar said, each sample with the labels of its pod and container. Answers how many lines were left
    /// out.
    pub fn add(&mut self, text: &str, pod: &Pod, socket: &Socket) -> usize {
        let (namespace, name, container) = (&pod.namespace, &pod.name, socket.container);
        let labels = format!("namespace=\"{namespace}\",pod=\"{name}\",container=\"{container}\"");
        if !self.added.insert(labels.clone()) {
            // The pod of the same name that is on its way out: the same series twice are an error.
            return text.lines().count();
        }
        let mut answer = Answer { prefix: socket.prefix, labels, ..Answer::default() };
        let mut left_out = 0;
        // Not `lines`, which takes a carriage return for a part of the end.
        for line in text.split('\n').filter(|line| !line.is_empty()) {
            if line == "# EOF" {
                break;
            }
            left_out += usize::from(answer.take(line, self).is_none());
        }
        left_out
    }

    /// All families as text, without the end mark.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(self.bytes + self.by_name.len() * 256);
        for (name, family) in self.by_name.iter().filter(|(_, f)| !f.samples.is_empty()) {
            if let Some(help) = &family.help {
                out.push_str(&format!("# HELP {name} {help}\n"));
            }
            out.push_str(&format!("# TYPE {name} {}\n", family.kind.word()));
            out.push_str(&family.samples);
        }
        out
    }

    /// Whether samples of a family may be of that kind.
    fn may_be(&self, name: &str, kind: Kind) -> bool {
        let ours = OURS.iter().find(|(ours, _)| *ours == name).map(|(_, kind)| *kind);
        let known = ours.or_else(|| self.by_name.get(name).map(|family| family.kind));
        known.is_none_or(|known| known == kind)
    }

    /// The family of which a sidecar is about to show its first sample.
    fn open(&mut self, head: &Head) {
        match self.by_name.get_mut(&head.name) {
            Some(known) if known.help != head.help => known.help = None,
            Some(_) => {}
            None => {
                let family =
                    Family { kind: head.kind, help: head.help.clone(), samples: String::new() };
                self.by_name.insert(head.name.clone(), family);
            }
        }
    }
}

/// What a sidecar said of a family before its samples.
#[derive(Debug)]
struct Head {
    name: String,
    kind: Kind,
    help: Option<String>,
    /// Whether a sample came.
    open: bool,
}

impl Head {
    /// Roughly what it takes to keep it.
    fn bytes(&self) -> usize {
        self.name.len() + self.help.as_ref().map_or(0, String::len) + 128
    }
}

/// One sidecar's answer while it is read.
#[derive(Debug, Default)]
struct Answer {
    prefix: &'static str,
    labels: String,
    /// The last family whose help was told.
    help: Option<(String, String)>,
    /// The family that samples belong to.
    head: Option<Head>,
    /// All that were passed on.
    series: HashSet<String>,
    bytes: usize,
}

impl Answer {
    /// Takes one line; none if it is left out.
    fn take(&mut self, line: &str, families: &mut Families) -> Option<()> {
        if line.len() > MAX_LINE_BYTES || line.contains(char::is_control) {
            return None;
        }
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ')?;
            let plain = !text.is_empty() && !text.contains('\\');
            self.help = plain.then(|| (name.to_owned(), text.to_owned()));
            return plain.then_some(());
        }
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            self.head = None;
            let (name, kind) = kind.split_once(' ')?;
            let kind = Kind::parse(kind)?;
            let named = name.starts_with(self.prefix)
                && name.bytes().all(is_name)
                && !ENDINGS.iter().any(|ending| name.ends_with(ending));
            if !named || !families.may_be(name, kind) {
                return None;
            }
            let help = self.help.take().filter(|(of, _)| of == name).map(|(_, text)| text);
            self.head = Some(Head { name: name.to_owned(), kind, help, open: false });
            return Some(());
        }
        self.take_sample(line, families)
    }

    fn take_sample(&mut self, line: &str, families: &mut Families) -> Option<()> {
        let head = self.head.as_mut()?;
        let sample = Sample::parse(line)?;
        let ending = sample.name.strip_prefix(head.name.as_str())?;
        if !head.kind.endings().contains(&ending) || !sample.is_plain(ending == "_bucket") {
            return None;
        }
        let Sample { name, own, value, .. } = sample;
        let separator = if own.is_empty() { "" } else { "," };
        let shown = format!("{name}{{{}{separator}{own}}} {value}\n", self.labels);
        let more = if head.open { 0 } else { head.bytes() };
        let full = self.series.len() >= MAX_SERIES
            || self.bytes + more + line.len() > MAX_SAMPLE_BYTES
            || families.bytes + more + shown.len() > MAX_BYTES;
        if full || !self.series.insert(sample.series()) {
            return None;
        }
        if !head.open {
            families.open(head);
            head.open = true;
        }
        self.bytes += more + line.len();
        families.bytes += more + shown.len();
        families.by_name.get_mut(&head.name)?.samples.push_str(&shown);
        Some(())
    }
}

/// One line `name{label="value",…} number`, or without braces.
#[derive(Debug)]
struct Sample<'a> {
    name: &'a str,
    /// The labels as they were written.
    own: &'a str,
    labels: Vec<(&'a str, &'a str)>,
    value: &'a str,
}

impl<'a> Sample<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (name, rest) = line.split_at(line.bytes().position(|byte| !is_name(byte))?);
        let (own, labels, rest) = match rest.strip_prefix('{') {
            Some(inside) => {
                let (labels, rest) = labels(inside)?;
                let own = inside.get(..inside.len() - rest.len() - "}".len())?;
                (own, labels, rest)
            }
            None => ("", Vec::new(), rest),
        };
        let value = rest.strip_prefix(' ').filter(|value| is_number(value))?;
        Some(Self { name, own, labels, value })
    }

    /// Whether every label is there once and may be said by a sidecar. Only a bucket has a bound.
    fn is_plain(&self, is_bucket: bool) -> bool {
        let names: BTreeSet<&str> = self.labels.iter().map(|(name, _)| *name).collect();
        let foreign = |name: &&str| FOREIGN.contains(name) || name.starts_with("__");
        let bound = self.labels.iter().find(|(name, _)| *name == "le").map(|(_, bound)| *bound);
        names.len() == self.labels.len()
            && !names.iter().any(foreign)
            && bound.is_some() == is_bucket
            && bound.is_none_or(is_number)
    }

    /// The same for the same series, in whatever order its labels are.
    fn series(&self) -> String {
        let mut labels = self.labels.clone();
        labels.sort_unstable();
        // Neither a name nor a value has a bare quote in it.
        let labels = labels.iter().map(|(name, value)| format!("{name}\"{value}\""));
        labels.fold(format!("{}\"", self.name), |series, label| series + &label)
    }
}

/// Labels up to their closing brace, and what is behind it.
fn labels(inside: &str) -> Option<(Vec<(&str, &str)>, &str)> {
    let mut found = Vec::new();
    if let Some(rest) = inside.strip_prefix('}') {
        return Some((found, rest));
    }
    let mut rest = inside;
    loop {
        let (name, value) = rest.split_once("=\"")?;
        let starts = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        if !starts || !name.bytes().all(is_name) {
            return None;
        }
        let end = quoted_end(value)?;
        found.push((name, value.get(..end)?));
        let behind = value.get(end + "\"".len()..)?;
        match behind.strip_prefix(',') {
            Some(next) => rest = next,
            None => return Some((found, behind.strip_prefix('}')?)),
        }
    }
}

/// Where the quote is that ends a value; none if something is escaped that needs not be.
fn quoted_end(value: &str) -> Option<usize> {
    let mut bytes = value.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'"' => return Some(at),
            b'\\' => {
                bytes.next().filter(|(_, escaped)| matches!(escaped, b'\\' | b'"' | b'n'))?;
            }
            _ => {}
        }
    }
    None
}

const fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// A number as every parser reads it. One that is too large for them is an error to some.
fn is_number(text: &str) -> bool {
    let digits =
        |byte: u8| byte.is_ascii_digit() || matches!(byte, b'+' | b'-' | b'.' | b'e' | b'E');
    matches!(text, "NaN" | "+Inf" | "-Inf" | "inf" | "-inf")
        || (text.bytes().all(digits) && text.parse().is_ok_and(f64::is_finite))
}

#[cfg(test)]
mod tests;
