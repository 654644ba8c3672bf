//! Words of the filter language, each with its place in the text.

use super::{FilterError, Operator};

/// One word.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// A bare name: keyword or column.
    Name(String),
    /// A column in double quotes.
    Quoted(String),
    Text(String),
    Int(i128),
    Float(f64),
    Operator(Operator),
    Open,
    Close,
    Comma,
}

/// Splits `text` into words.
pub(super) fn tokens(text: &str) -> Result<Vec<(Token, usize)>, FilterError> {
    let mut out = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let position = text.len() - rest.len();
        let Some(first) = rest.chars().next() else {
            return Ok(out);
        };
        let (token, length) = match first {
            '(' => (Token::Open, 1),
            ')' => (Token::Close, 1),
            ',' => (Token::Comma, 1),
            '\'' => quoted(rest, '\'', position).map(|(s, n)| (Token::Text(s), n))?,
            '"' => quoted(rest, '"', position).map(|(s, n)| (Token::Quoted(s), n))?,
            '<' | '>' | '=' | '!' => operator(rest, position)?,
            '0'..='9' | '-' | '+' | '.' => number(rest, position)?,
            c if c.is_alphabetic() || c == '_' => name(rest),
            c => return Err(FilterError::new(position, format!("unexpected {c:?}"))),
        };
        out.push((token, position));
        rest = rest.get(length..).unwrap_or("");
    }
}

fn name(rest: &str) -> (Token, usize) {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
    let (name, _) = rest.split_at(length);
    (Token::Name(name.to_owned()), length)
}

/// A doubled quote inside stands for one.
fn quoted(rest: &str, quote: char, position: usize) -> Result<(String, usize), FilterError> {
    let mut out = String::new();
    let mut chars = rest.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        if c != quote {
            out.push(c);
        } else if chars.next_if(|&(_, next)| next == quote).is_some() {
            out.push(quote);
        } else {
            return Ok((out, at + 1));
        }
    }
    Err(FilterError::new(position, format!("no closing {quote}")))
}

fn operator(rest: &str, position: usize) -> Result<(Token, usize), FilterError> {
    const ALL: [(&str, Operator); 8] = [
        ("<=", Operator::LtEq),
        (">=", Operator::GtEq),
        ("<>", Operator::NotEq),
        ("!=", Operator::NotEq),
        ("==", Operator::Eq),
        ("=", Operator::Eq),
        ("<", Operator::Lt),
        (">", Operator::Gt),
    ];
    ALL.iter()
        .find(|(text, _)| rest.starts_with(text))
        .map(|&(text, operator)| (Token::Operator(operator), text.len()))
        .ok_or_else(|| FilterError::new(position, "unexpected '!', write !=, <> or not"))
}

fn number(rest: &str, position: usize) -> Result<(Token, usize), FilterError> {
    let mut previous = ' ';
    let is_part = |c: char| {
        let is_sign = matches!(c, '+' | '-') && matches!(previous, ' ' | 'e' | 'E');
        previous = c;
        is_sign || c.is_ascii_alphanumeric() || c == '.' || c == '_'
    };
    let mut is_part = is_part;
    let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
    let (text, _) = rest.split_at(length);
    let bad = || FilterError::new(position, format!("{text:?} is not a number"));
    if let Ok(int) = text.parse() {
        return Ok((Token::Int(int), length));
    }
    // Only digits, signs, point and exponent: `inf`, `nan` and `1_000` are not numbers here.
    if text.contains(|c: char| c.is_ascii_alphabetic() && !matches!(c, 'e' | 'E')) {
        return Err(bad());
    }
    let float: f64 = text.parse().map_err(|_| bad())?;
    if float.is_finite() { Ok((Token::Float(float), length)) } else { Err(bad()) }
}
