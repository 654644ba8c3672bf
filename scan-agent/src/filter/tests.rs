use super::*;

fn column(name: &str, position: usize) -> Column {
    Column { name: name.into(), position }
}

fn error(text: &str) -> (usize, String) {
    let error = Filter::parse(text).expect_err(text);
    (error.position, error.message)
}

#[test]
fn a_comparison_keeps_sides_values_and_places() {
    assert_eq!(
        Filter::parse("a >= -10").unwrap(),
        Filter::Compare {
            operator: Operator::GtEq,
            left: Operand::Column(column("a", 0)),
            right: Operand::Literal(Literal::Int(-10), 5),
        }
    );
    assert_eq!(
        Filter::parse("'it''s' <> \"odd \"\"name\"").unwrap(),
        Filter::Compare {
            operator: Operator::NotEq,
            left: Operand::Literal(Literal::Text("it's".into()), 0),
            right: Operand::Column(column("odd \"name", 11)),
        }
    );
}

#[test]
fn and_binds_tighter_than_or_and_not_tightest() {
    let filter = Filter::parse("a or b and not c").unwrap();
    let Filter::Or(left, right) = filter else { panic!("or is the root") };
    assert_eq!(*left, Filter::IsTrue(column("a", 0)));
    let Filter::And(_, not) = *right else { panic!("and is below") };
    assert_eq!(*not, Filter::Not(Box::new(Filter::IsTrue(column("c", 15)))));
}

#[test]
fn in_between_and_null_become_comparisons() {
    let names = |text| {
        let filter = Filter::parse(text).unwrap();
        filter.columns().into_iter().map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(names("a in (1, 2.5e3, -3) and b not between 'x' and 'y'"), ["a", "b"]);
    assert_eq!(
        Filter::parse("a IS NOT NULL").unwrap(),
        Filter::Not(Box::new(Filter::IsNull(column("a", 0))))
    );
    assert_eq!(
        Filter::parse("a in (1)").unwrap(),
        Filter::parse("a = 1")
            .map(|f| match f {
                Filter::Compare { operator, left, .. } =>
                    Filter::Compare { operator, left, right: Operand::Literal(Literal::Int(1), 6) },
                other => other,
            })
            .unwrap()
    );
}

#[test]
fn errors_point_at_the_character() {
    assert_eq!(error("a >"), (3, "expected a column or a value".into()));
    assert_eq!(error("a = 'x"), (4, "no closing '".into()));
    assert_eq!(error("a = 1 b"), (6, "expected and, or, or the end".into()));
    assert_eq!(error("a # 1"), (2, "unexpected '#'".into()));
    assert_eq!(error("a = 1x2"), (4, "\"1x2\" is not a number".into()));
    assert_eq!(error("1 = 2"), (4, "a comparison needs a column on one side".into()));
    assert_eq!(error("a in (b)"), (6, "expected a value".into()));
    assert_eq!(error("(a = 1"), (6, "expected a closing parenthesis".into()));
    assert_eq!(error(""), (0, "expected a column or a value".into()));
    assert_eq!(
        Filter::parse("a ! b").unwrap_err().to_string(),
        "filter, character 3: unexpected '!', write !=, <> or not"
    );
}

#[test]
fn depth_and_length_are_bounded() {
    let deep = "(".repeat(5_000) + "a" + &")".repeat(5_000);
    assert!(error(&deep).1.contains("too many words"));
    assert_eq!(error(&"not ".repeat(100)).1, "nested too deep");
    let long = vec!["a = 1"; 1000].join(" and ");
    assert_eq!(Filter::parse(&long).unwrap().columns().len(), 1);
    assert!(error(&" ".repeat(70_000)).1.contains("64 KiB"));
}
