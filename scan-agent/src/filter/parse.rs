//! Recursive descent over the words; `or` binds weakest, then `and`, then `not`.

use super::token::{Token, tokens};
use super::{Column, Filter, FilterError, Literal, Operand, Operator};

/// Longest text and deepest nesting accepted: they bound memory and stack, in every later stage.
const MAX_BYTES: usize = 64 * 1024;
const MAX_DEPTH: usize = 64;
/// Most words: the tree that follows is as deep as a chain of `and`s is long.
const MAX_TOKENS: usize = 4096;

pub(super) fn parse(text: &str) -> Result<Filter, FilterError> {
    if text.len() > MAX_BYTES {
        return Err(FilterError::new(MAX_BYTES, "filter is longer than 64 KiB"));
    }
    let tokens = tokens(text)?;
    if let Some((_, position)) = tokens.get(MAX_TOKENS) {
        return Err(FilterError::new(*position, "filter has too many words"));
    }
    let mut parser = Parser { tokens: &tokens, next: 0, end: text.len(), depth: 0 };
    let filter = parser.or()?;
    match parser.peek() {
        None => Ok(filter),
        Some(_) => Err(parser.expected("and, or, or the end")),
    }
}

struct Parser<'a> {
    tokens: &'a [(Token, usize)],
    next: usize,
    end: usize,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.next).map(|(token, _)| token)
    }

    fn position(&self) -> usize {
        self.tokens.get(self.next).map_or(self.end, |&(_, at)| at)
    }

    fn expected(&self, what: &str) -> FilterError {
        FilterError::new(self.position(), format!("expected {what}"))
    }

    fn take_keyword(&mut self, word: &str) -> bool {
        let found = matches!(self.peek(), Some(Token::Name(n)) if n.eq_ignore_ascii_case(word));
        self.next += usize::from(found);
        found
    }

    fn take(&mut self, token: &Token) -> bool {
        let found = self.peek() == Some(token);
        self.next += usize::from(found);
        found
    }

    fn or(&mut self) -> Result<Filter, FilterError> {
        let mut terms = vec![self.and()?];
        while self.take_keyword("or") {
            terms.push(self.and()?);
        }
        Ok(balanced(terms, Filter::Or))
    }

    fn and(&mut self) -> Result<Filter, FilterError> {
        let mut terms = vec![self.not()?];
        while self.take_keyword("and") {
            terms.push(self.not()?);
        }
        Ok(balanced(terms, Filter::And))
    }

    fn not(&mut self) -> Result<Filter, FilterError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(FilterError::new(self.position(), "nested too deep"));
        }
        let filter = if self.take_keyword("not") {
            Filter::Not(Box::new(self.not()?))
        } else if self.take(&Token::Open) {
            let inner = self.or()?;
            if !self.take(&Token::Close) {
                return Err(self.expected("a closing parenthesis"));
            }
            inner
        } else {
            self.predicate()?
        };
        self.depth -= 1;
        Ok(filter)
    }

    fn predicate(&mut self) -> Result<Filter, FilterError> {
        let left = self.operand()?;
        if let Some(&Token::Operator(operator)) = self.peek() {
            self.next += 1;
            let right = self.operand()?;
            return compare(operator, left, right);
        }
        let Operand::Column(column) = left else {
            return Err(self.expected("a comparison"));
        };
        if self.take_keyword("is") {
            let negated = self.take_keyword("not");
            if !self.take_keyword("null") {
                return Err(self.expected("null after is"));
            }
            return Ok(negate_if(negated, Filter::IsNull(column)));
        }
        let negated = self.take_keyword("not");
        if self.take_keyword("in") {
            return Ok(negate_if(negated, self.in_list(&column)?));
        }
        if self.take_keyword("between") {
            return Ok(negate_if(negated, self.between(&column)?));
        }
        if negated {
            return Err(self.expected("in or between after not"));
        }
        Ok(Filter::IsTrue(column))
    }

    fn in_list(&mut self, column: &Column) -> Result<Filter, FilterError> {
        if !self.take(&Token::Open) {
            return Err(self.expected("( after in"));
        }
        let mut terms = Vec::new();
        loop {
            let (value, position) = self.literal()?;
            terms.push(against(Operator::Eq, column, value, position));
            if self.take(&Token::Close) {
                return Ok(balanced(terms, Filter::Or));
            }
            if !self.take(&Token::Comma) {
                return Err(self.expected(", or )"));
            }
        }
    }

    fn between(&mut self, column: &Column) -> Result<Filter, FilterError> {
        let (low, low_at) = self.literal()?;
        if !self.take_keyword("and") {
            return Err(self.expected("and between the bounds"));
        }
        let (high, high_at) = self.literal()?;
        Ok(Filter::And(
            Box::new(against(Operator::GtEq, column, low, low_at)),
            Box::new(against(Operator::LtEq, column, high, high_at)),
        ))
    }

    fn literal(&mut self) -> Result<(Literal, usize), FilterError> {
        let position = self.position();
        match self.operand()? {
            Operand::Literal(literal, position) => Ok((literal, position)),
            Operand::Column(_) => Err(FilterError::new(position, "expected a value")),
        }
    }

    fn operand(&mut self) -> Result<Operand, FilterError> {
        let position = self.position();
        let literal = match self.peek() {
            Some(Token::Int(value)) => Literal::Int(*value),
            Some(Token::Float(value)) => Literal::Float(*value),
            Some(Token::Text(value)) => Literal::Text(value.clone()),
            Some(Token::Name(name)) if name.eq_ignore_ascii_case("true") => Literal::Bool(true),
            Some(Token::Name(name)) if name.eq_ignore_ascii_case("false") => Literal::Bool(false),
            Some(Token::Name(name)) if !is_keyword(name) => {
                return Ok(self.column(name, position));
            }
            Some(Token::Quoted(name)) => return Ok(self.column(name, position)),
            _ => return Err(self.expected("a column or a value")),
        };
        self.next += 1;
        Ok(Operand::Literal(literal, position))
    }

    fn column(&mut self, name: &str, position: usize) -> Operand {
        self.next += 1;
        Operand::Column(Column { name: name.to_owned(), position })
    }
}

fn is_keyword(name: &str) -> bool {
    ["and", "or", "not", "is", "in", "between", "null"]
        .iter()
        .any(|word| name.eq_ignore_ascii_case(word))
}

fn negate_if(negated: bool, filter: Filter) -> Filter {
    if negated { Filter::Not(Box::new(filter)) } else { filter }
}

fn against(operator: Operator, column: &Column, value: Literal, position: usize) -> Filter {
    Filter::Compare {
        operator,
        left: Operand::Column(column.clone()),
        right: Operand::Literal(value, position),
    }
}

fn compare(operator: Operator, left: Operand, right: Operand) -> Result<Filter, FilterError> {
    if let (Operand::Literal(..), Operand::Literal(_, position)) = (&left, &right) {
        let message = "a comparison needs a column on one side";
        return Err(FilterError::new(*position, message));
    }
    Ok(Filter::Compare { operator, left, right })
}

/// Joins terms into a tree of logarithmic depth, so that a long list cannot exhaust a stack.
fn balanced(mut terms: Vec<Filter>, join: fn(Box<Filter>, Box<Filter>) -> Filter) -> Filter {
    while terms.len() > 1 {
        let mut joined = Vec::with_capacity(terms.len().div_ceil(2));
        let mut pairs = terms.into_iter();
        while let Some(left) = pairs.next() {
            joined.push(match pairs.next() {
                Some(right) => join(Box::new(left), Box::new(right)),
                None => left,
            });
        }
        terms = joined;
    }
    terms.pop().unwrap_or(Filter::IsTrue(Column { name: String::new(), position: 0 }))
}
