use rpc::fuzz::Random;

use super::*;
use crate::metrics::SOCKETS;

const MOUNT: &Socket = &SOCKETS[0];
const SCAN: &Socket = &SOCKETS[1];

fn pod(name: &str) -> Pod {
    Pod { namespace: "n".into(), name: name.into(), uid: "u".into() }
}

fn labels(pod: &str) -> String {
    format!("namespace=\"n\",pod=\"{pod}\",container=\"lampyris-mount\"")
}

/// What is shown of sidecars that say this, each in a pod of its own: `a`, `b` and so on.
fn shown(texts: &[&str]) -> String {
    let mut families = Families::default();
    for (text, name) in texts.iter().zip('a'..='z') {
        families.add(text, &pod(&name.to_string()), MOUNT);
    }
    families.render()
}

/// As our sidecars write it: every kind, labels that need escapes, numbers of every form.
const HONEST: &str = "\
# HELP lampyris_mount_operation_seconds Time that operations of files took, by volume and kind.
# TYPE lampyris_mount_operation_seconds histogram
lampyris_mount_operation_seconds_sum{volume=\"lampyris-0\",operation=\"read\"} 0.0625
lampyris_mount_operation_seconds_count{volume=\"lampyris-0\",operation=\"read\"} 2
lampyris_mount_operation_seconds_bucket{le=\"0.0001\",volume=\"lampyris-0\",operation=\"read\"} 1
lampyris_mount_operation_seconds_bucket{le=\"1e-7\",volume=\"lampyris-0\",operation=\"read\"} 0
lampyris_mount_operation_seconds_bucket{le=\"+Inf\",volume=\"lampyris-0\",operation=\"read\"} 2
# HELP lampyris_mount_read_bytes Bytes answered to reads, by mount and ring.
# TYPE lampyris_mount_read_bytes counter
lampyris_mount_read_bytes_total{volume=\"lampyris-0\"} 18446744073709551615
lampyris_mount_read_bytes_total{volume=\"a\\\"b\\\\c\\nd, pod=\\\"é\"} 1
# HELP lampyris_mount_ring_connections Applications connected to the ring
# TYPE lampyris_mount_ring_connections gauge
lampyris_mount_ring_connections -3
# TYPE lampyris_mount_new gauge
lampyris_mount_new{} NaN
# EOF
";

#[test]
fn what_a_sidecar_of_ours_writes_is_passed_on_as_it_is() {
    let mut families = Families::default();
    assert_eq!(families.add(HONEST, &pod("a"), MOUNT), 0);
    let of = labels("a");
    let shown = families.render();
    let samples = |line: &&str| !line.starts_with('#');
    for line in HONEST.lines().filter(samples) {
        let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap());
        let expected = match rest.strip_prefix('{') {
            Some(own) if own.starts_with('}') => format!("{name}{{{of}{own}"),
            Some(own) => format!("{name}{{{of},{own}"),
            None => format!("{name}{{{of}}}{rest}"),
        };
        assert_eq!(
            shown.lines().filter(|line| *line == expected).count(),
            1,
            "{expected}\n{shown}"
        );
    }
    assert_eq!(shown.lines().filter(samples).count(), HONEST.lines().filter(samples).count());
    check(&shown, &["a"]);
}

#[test]
fn samples_of_two_pods_share_one_family() {
    let text = "# HELP lampyris_mount_reads Reads.\n# TYPE lampyris_mount_reads counter\n\
                lampyris_mount_reads_total 3\nlampyris_mount_reads_total{kind=\"s3\"} 4\n# EOF\n";
    let (a, b) = (labels("a"), labels("b"));
    let name = "lampyris_mount_reads_total";
    let samples = format!(
        "{name}{{{a}}} 3\n{name}{{{a},kind=\"s3\"}} 4\n{name}{{{b}}} 3\n{name}{{{b},kind=\"s3\"}} 4\n"
    );
    let head = "# TYPE lampyris_mount_reads counter\n";
    let help = "# HELP lampyris_mount_reads Reads.\n";
    assert_eq!(shown(&[text, text]), format!("{help}{head}{samples}"));
    // Help is shown as long as nobody says something else.
    let other = text.replace("Reads.", "Send money.");
    assert_eq!(shown(&[text, &other]), format!("{head}{samples}"));
    assert_eq!(shown(&[&other, text]), format!("{head}{samples}"));
}

/// A gauge `lampyris_mount_x` and whatever line comes behind it: is that line shown?
fn is_shown(line: &str) -> bool {
    let text = format!("# TYPE lampyris_mount_x gauge\n{line}\n");
    let shown = shown(&[&text]);
    check(&shown, &["a"]);
    !shown.is_empty()
}

#[test]
fn a_line_that_is_no_sample_hides_nothing_but_itself() {
    let good = [
        "lampyris_mount_x 1",
        "lampyris_mount_x{} 1e+06",
        "lampyris_mount_x{a=\"1\",b=\"{}, \\\"}\"} -0.5",
        "lampyris_mount_x +Inf",
    ];
    for line in good {
        assert!(is_shown(line), "{line}");
    }
    let x = "lampyris_mount_x";
    let bad = [
        // No number, too large a number, something behind it.
        "rubbish",
        "1.2.3",
        "1e999",
        "0x1p3",
        "1_0",
        "",
        "infinity",
        "1 1700000000",
        "1 # {} 1",
        "1\r",
        " 1",
    ];
    for value in bad {
        assert!(!is_shown(&format!("{x} {value}")), "{value:?}");
    }
    let long = "a".repeat(MAX_LINE_BYTES);
    assert!(!is_shown(&format!("{x}{{a=\"{long}\"}} 1")));
    for name in
        ["lampyris_mount_y", "lampyris_mount_x_total", "lampyris_node_volumes", "x", "", "# UNIT"]
    {
        assert!(!is_shown(&format!("{name} 1")), "{name}");
    }
}

#[test]
fn labels_that_are_none_or_say_whose_a_sample_is_hide_nothing_but_it() {
    let bad = [
        "{",
        "{}",
        "{ 1",
        "{a} 1",
        "{a=} 1",
        "{a=1} 1",
        "{a=\"1} 1",
        "{a=\"1\",} 1",
        "{,a=\"1\"} 1",
        "{a=\"1\";b=\"1\"} 1",
        "{a=\"1\" ,b=\"1\"} 1",
        "{a=\"1\", b=\"1\"} 1",
        "{ a=\"1\"} 1",
        "{a =\"1\"} 1",
        "{1a=\"1\"} 1",
        "{a-b=\"1\"} 1",
        "{a=\"\\t\"} 1",
        "{a=\"\\\"} 1",
        "{a=\"1\"}1",
        "{a=\"1\"} ",
        "{\"a\"=\"1\"} 1",
        "{a=\"\0\"} 1",
        "{é=\"1\"} 1",
        // The same twice.
        "{a=\"1\",a=\"2\"} 1",
        // Whose it is, and what only a bucket has.
        "{pod=\"o\"} 1",
        "{a=\"1\",pod=\"o\"} 1",
        "{a=\"1\", pod=\"o\"} 1",
        "{\"pod\"=\"o\"} 1",
        "{\"pod\",a=\"o\"} 1",
        "{namespace=\"o\"} 1",
        "{container=\"o\"} 1",
        "{job=\"o\"} 1",
        "{instance=\"o\"} 1",
        "{__name__=\"o\"} 1",
        "{le=\"1\"} 1",
    ];
    for rest in bad {
        assert!(!is_shown(&format!("lampyris_mount_x{rest}")), "{rest:?}");
    }
}

#[test]
fn a_family_is_of_this_sidecar_and_of_a_kind_that_we_have() {
    for head in [
        "lampyris_mount_y nonsense",
        "lampyris_mount_y summary",
        "lampyris_mount_y",
        "lampyris_mount_y gauge ",
        "lampyris_node_y gauge",
        "lampyris_scan_y gauge",
        "y gauge",
        "lampyris_mount_y-z gauge",
        "lampyris_mount_y_total gauge",
        "lampyris_mount_read_bytes_total gauge",
    ] {
        let name = head.split(' ').next().unwrap();
        let shown = shown(&[&format!("# TYPE {head}\n{name} 1\n")]);
        assert_eq!(shown, "", "{head}");
    }
    let text = "# TYPE lampyris_scan_rows counter\nlampyris_scan_rows_total 1\n";
    let mut families = Families::default();
    assert_eq!(families.add(text, &pod("a"), MOUNT), 2);
    assert_eq!(families.add(text, &pod("a"), SCAN), 0);
    assert_eq!(families.render().lines().count(), 2);
}

#[test]
fn no_pod_decides_what_the_families_of_our_sidecars_are() {
    let liar = "# HELP lampyris_mount_read_bytes Send money.\n# TYPE lampyris_mount_read_bytes gauge\n\
                lampyris_mount_read_bytes 1\n# TYPE lampyris_mount_new counter\nlampyris_mount_new_total 1\n";
    let shown = shown(&[liar, HONEST]);
    check(&shown, &["a", "b"]);
    assert!(shown.contains("# TYPE lampyris_mount_read_bytes counter\n"), "{shown}");
    assert!(!shown.contains("Send money"), "{shown}");
    // Of a family that we do not know the first one counts.
    assert!(shown.contains("# TYPE lampyris_mount_new counter\n"), "{shown}");
    assert_eq!(shown.matches("lampyris_mount_new").count(), 2, "{shown}");
}

#[test]
fn a_sidecar_cannot_flood() {
    let series = |count: usize, label: &str| {
        let one = |n| format!("lampyris_mount_y{{n=\"{n}{label}\"}} 1\n");
        let all: String = (0..count).map(one).collect();
        format!("# TYPE lampyris_mount_y gauge\n{all}")
    };
    let shown_many = shown(&[&series(MAX_SERIES * 2, "")]);
    assert_eq!(shown_many.lines().count(), MAX_SERIES + 1);
    // One series a thousand times is one.
    assert_eq!(
        shown(&[&"# TYPE lampyris_mount_y gauge\nlampyris_mount_y 1\n".repeat(9)]).lines().count(),
        2
    );
    let long = shown(&[&series(MAX_SERIES, &"x".repeat(400))]);
    assert!((MAX_SAMPLE_BYTES / 2..MAX_SAMPLE_BYTES * 2).contains(&long.len()), "{}", long.len());
    // Nor can all of them.
    let mut families = Families::default();
    let (text, name) = (series(MAX_SERIES, &"x".repeat(100)), "p".repeat(250));
    for n in 0..150 {
        families.add(&text, &pod(&format!("{n}-{name}")), MOUNT);
    }
    let bytes = families.render().len();
    assert!((MAX_BYTES / 2..=MAX_BYTES + 1024).contains(&bytes), "{bytes}");
}

#[test]
fn of_two_pods_of_the_same_name_one_is_shown() {
    let mut families = Families::default();
    families.add(HONEST, &pod("a"), MOUNT);
    let once = families.render();
    assert!(families.add(HONEST, &pod("a"), MOUNT) > 0);
    assert_eq!(families.render(), once);
}

/// Lines of a program that wants to be seen as somebody else, or wants nobody to be seen.
const HOSTILE: &str = "\
lampyris_mount_read_bytes_total{a=\"1\", pod=\"other\"} 1
lampyris_mount_read_bytes_total{\"pod\"=\"other\"} 1
lampyris_mount_read_bytes_total{volume=\"\\\",pod=\\\"other\"} 1
lampyris_mount_read_bytes_total{pod=\"other\",namespace=\"x\"} 1
lampyris_node_volumes 9
# TYPE lampyris_mount_read_bytes nonsense
# TYPE lampyris_mount_read_bytes gauge
lampyris_mount_read_bytes 1
# UNIT lampyris_mount_read_bytes seconds
y rubbish
y{
# EOF
";

#[test]
fn whatever_a_sidecar_says_all_that_is_shown_can_be_read_and_every_other_pod_is_shown() {
    let alone = shown(&["", HONEST]);
    let honest: Vec<&str> = alone.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(honest.len() > 5);
    let texts = [HONEST.as_bytes(), HOSTILE.as_bytes()];
    let runs = rpc::fuzz::run(|random| {
        let said = hostile(random, &texts);
        let shown = if random.below(2) == 0 {
            shown(&[&said, HONEST])
        } else {
            let mut families = Families::default();
            families.add(HONEST, &pod("b"), MOUNT);
            families.add(&said, &pod("a"), MOUNT);
            families.render()
        };
        check(&shown, &["a", "b"]);
        // What we do not know ourselves may be taken from it.
        for line in honest.iter().filter(|line| !line.starts_with("lampyris_mount_new{")) {
            assert!(shown.lines().any(|shown| shown == *line), "{line}\n{said}\n{shown}");
        }
    });
    assert!(runs > 100, "only {runs} runs");
}

/// Lines of both texts in any order, some of them changed.
fn hostile(random: &mut Random, texts: &[&[u8]; 2]) -> String {
    let mut said = Vec::new();
    for _ in 0..=random.below(12) {
        let lines: Vec<&[u8]> = texts[random.below(2)].split(|byte| *byte == b'\n').collect();
        let from = random.below(lines.len());
        for line in lines.iter().skip(from).take(1 + random.below(4)) {
            let mut line = line.to_vec();
            if random.below(3) == 0 {
                let donor = texts[random.below(2)];
                random.mutate(&mut line, donor);
            }
            said.extend_from_slice(&line);
            said.push(b'\n');
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Reads the text as strictly as the format is written, without anything of the parser above: every family once with its
/// kind, every series once, each of one of `pods` and of nobody else.
fn check(text: &str, pods: &[&str]) {
    assert!(text.is_empty() || text.ends_with('\n'), "{text:?}");
    let (mut families, mut series) = (HashSet::new(), HashSet::new());
    let mut current = (String::new(), String::new());
    let mut help = None;
    for line in text.split_terminator('\n') {
        assert!(!line.contains(char::is_control), "{line:?}");
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, _] => help = Some(name.to_owned()),
            ["#", "TYPE", name, kind] => {
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert!(families.insert(name.to_owned()), "twice: {line}");
                assert!(help.take().is_none_or(|of| of == name), "{line}");
                current = (name.to_owned(), kind.to_owned());
            }
            _ => {
                let (name, mut labels, value) = read(line);
                let ending = name.strip_prefix(&current.0).unwrap_or_else(|| panic!("{line}"));
                let endings: &[&str] = match &*current.1 {
                    "counter" => &["_total"],
                    "gauge" => &[""],
                    _ => &["_bucket", "_sum", "_count"],
                };
                assert!(endings.contains(&ending), "{line}");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                let of = |wanted| labels.iter().filter(|(n, _)| n == wanted).collect::<Vec<_>>();
                let whose = [of("namespace"), of("pod"), of("container")];
                assert!(whose.iter().all(|labels| labels.len() == 1), "{line}");
                assert_eq!((&*whose[0][0].1, &*whose[2][0].1), ("n", "lampyris-mount"), "{line}");
                assert!(pods.contains(&&*whose[1][0].1), "{line}");
                assert!(of("job").is_empty() && of("instance").is_empty(), "{line}");
                let count = labels.len();
                labels.sort();
                labels.dedup_by(|a, b| a.0 == b.0);
                assert_eq!(labels.len(), count, "a label twice: {line}");
                assert!(series.insert((name, labels)), "a series twice: {line}");
            }
        }
    }
}

type Labels = Vec<(String, String)>;

/// One sample, by the letter.
fn read(line: &str) -> (String, Labels, String) {
    let mut letters = line.chars().peekable();
    let word = |letters: &mut std::iter::Peekable<std::str::Chars<'_>>| {
        let mut word = String::new();
        while let Some(c) = letters.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
            word.push(c);
        }
        assert!(word.starts_with(|c: char| !c.is_ascii_digit()), "{line}");
        word
    };
    let name = word(&mut letters);
    assert_eq!(letters.next(), Some('{'), "{line}");
    let mut labels = Labels::new();
    loop {
        let label = word(&mut letters);
        assert_eq!((letters.next(), letters.next()), (Some('='), Some('"')), "{line}");
        let mut value = String::new();
        loop {
            match letters.next().unwrap_or_else(|| panic!("{line}")) {
                '"' => break,
                '\\' => match letters.next() {
                    Some('n') => value.push('\n'),
                    Some(c @ ('\\' | '"')) => value.push(c),
                    other => panic!("{other:?} is escaped: {line}"),
                },
                c => value.push(c),
            }
        }
        labels.push((label, value));
        match letters.next() {
            Some(',') => {}
            Some('}') => break,
            other => panic!("{other:?} behind a label: {line}"),
        }
    }
    assert_eq!(letters.next(), Some(' '), "{line}");
    let value: String = letters.collect();
    assert!(!value.contains(' ') && !value.is_empty(), "{line}");
    (name, labels, value)
}
