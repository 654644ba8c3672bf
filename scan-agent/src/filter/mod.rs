//! The filter language of a scan: a small boolean subset of SQL.
//!
//! `a >= 10 and (b in ('x', 'y') or c is null) and not d`. Own tree, own parser: what the agent
//! accepts is what this module says, whatever the engine below could do, and every refusal
//! points at a character. The bridge turns a [`Filter`] into the engine's expressions.
//!
//! Floats compare as in IEEE 754 and PyArrow: -0.0 equals 0.0, and NaN is neither equal to, less
//! than nor greater than anything, so that only `<>` and `not` keep it. A literal is first rounded
//! to the column's type.

mod instant;
mod parse;
mod token;

use std::collections::BTreeSet;

pub(crate) use instant::parse_instant;

/// A boolean condition on one row.
#[derive(Debug, Clone, PartialEq)]
pub enum Filter {
    /// All hold.
    And(Box<Self>, Box<Self>),
    /// One holds.
    Or(Box<Self>, Box<Self>),
    /// Does not hold; null stays null.
    Not(Box<Self>),
    /// `left op right`; null if a side is null.
    Compare {
        /// How to compare.
        operator: Operator,
        /// A column or a literal.
        left: Operand,
        /// A column or a literal.
        right: Operand,
    },
    /// `column is null`.
    IsNull(Column),
    /// A boolean column by itself.
    IsTrue(Column),
}

/// A column's name and where the text has it (byte offset).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Name as the schema has it.
    pub name: String,
    /// Byte offset in the filter's text.
    pub position: usize,
}

/// One side of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    /// A column's value.
    Column(Column),
    /// A value from the text.
    Literal(Literal, usize),
}

/// A value as written; the column that it is compared with gives it a type.
#[derive(Debug, Clone, PartialEq)]
pub enum Literal {
    /// A whole number.
    Int(i128),
    /// A number with a point or an exponent.
    Float(f64),
    /// A quoted string, also for dates and timestamps.
    Text(String),
    /// `true` or `false`.
    Bool(bool),
}

/// A comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    /// `=`
    Eq,
    /// `<>`
    NotEq,
    /// `<`
    Lt,
    /// `<=`
    LtEq,
    /// `>`
    Gt,
    /// `>=`
    GtEq,
}

/// A filter that cannot be used, and the character that shows it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("filter, character {}: {message}", position + 1)]
pub struct FilterError {
    /// Byte offset in the text.
    pub position: usize,
    /// What is wrong and what would be right.
    pub message: String,
}

impl FilterError {
    pub(crate) fn new(position: usize, message: impl Into<String>) -> Self {
        Self { position, message: message.into() }
    }
}

impl Filter {
    /// Parses `text`.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        parse::parse(text)
    }

    /// Names of all columns that the filter reads.
    pub fn columns(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::new();
        self.collect(&mut names);
        names
    }

    fn collect<'a>(&'a self, names: &mut BTreeSet<&'a str>) {
        match self {
            Self::And(left, right) | Self::Or(left, right) => {
                left.collect(names);
                right.collect(names);
            }
            Self::Not(inner) => inner.collect(names),
            Self::Compare { left, right, .. } => {
                for side in [left, right] {
                    if let Operand::Column(column) = side {
                        names.insert(&column.name);
                    }
                }
            }
            Self::IsNull(column) | Self::IsTrue(column) => {
                names.insert(&column.name);
            }
        }
    }
}

/// Fuzz target: no text may panic the parser or exhaust the stack.
pub fn fuzz_filter(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        match Filter::parse(text) {
            Ok(filter) => assert!(filter.columns().len() <= text.len()),
            Err(error) => assert!(error.position <= text.len()),
        }
    }
}

#[cfg(test)]
mod tests;
