//! Decides what a colon before a name means in PostgreSQL: `a[1:n]` is a slice, `ARRAY[:id]` is a
//! parameter. Only the brackets and the token before matter.

use super::SqlParameter;
use super::tokens::Token;

/// The part of the statement so far that decides what a colon means.
#[derive(Debug, Default)]
pub(super) struct Context {
    open: Vec<Bracket>,
    before: Before,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bracket {
    Round,
    /// `a[…]`, where a colon may separate a slice.
    Subscript,
    /// `ARRAY[…]`, where a colon cannot separate a slice.
    Array,
}

/// The last token that was neither blank nor comment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Before {
    /// A token that a value cannot follow without an operator between.
    Value,
    /// The word `ARRAY`.
    Array,
    /// `[`.
    Opening,
    #[default]
    Other,
}

/// Words that come before a value in an expression. In a subscript, any other word is a value.
const BEFORE_VALUES: [&str; 16] = [
    "AND",
    "OR",
    "NOT",
    "LIKE",
    "ILIKE",
    "TO",
    "BETWEEN",
    "SYMMETRIC",
    "ASYMMETRIC",
    "FROM",
    "CASE",
    "WHEN",
    "THEN",
    "ELSE",
    "ESCAPE",
    "ZONE",
];

impl Context {
    /// Whether `:name` is a slice separator followed by a name.
    pub(super) fn is_slice(&self, name: &str) -> bool {
        match (self.open.last(), self.before) {
            (Some(Bracket::Subscript), Before::Value) => true,
            (Some(Bracket::Subscript), Before::Opening) => SqlParameter::find(name).is_none(),
            (Some(Bracket::Subscript), Before::Array | Before::Other)
            | (Some(Bracket::Round | Bracket::Array) | None, _) => false,
        }
    }

    /// Takes the next token into account.
    pub(super) fn pass(&mut self, token: Token, piece: &str) {
        self.before = match (token, piece) {
            (Token::Blank, _) => return,
            (Token::Semicolon, _) => {
                self.open.clear();
                Before::Other
            }
            (Token::Parameter | Token::Quoted, _) => Before::Value,
            (Token::Word, word) if word.eq_ignore_ascii_case("ARRAY") => Before::Array,
            (Token::Word, word) => {
                let leads = BEFORE_VALUES.iter().any(|known| known.eq_ignore_ascii_case(word));
                if leads { Before::Other } else { Before::Value }
            }
            (Token::Sign, "(") => {
                self.open.push(Bracket::Round);
                Before::Other
            }
            (Token::Sign, "[") => {
                self.open.push(self.bracket());
                Before::Opening
            }
            (Token::Sign, ")" | "]") => {
                self.open.pop();
                Before::Value
            }
            (Token::Sign, _) => Before::Other,
        };
    }

    /// The kind of bracket that a `[` opens here.
    fn bracket(&self) -> Bracket {
        match (self.before, self.open.last()) {
            (Before::Array, _) => Bracket::Array,
            // An array of arrays: `ARRAY[[1, 2], [3, 4]]`.
            (Before::Opening | Before::Other, Some(Bracket::Array)) => Bracket::Array,
            (Before::Value | Before::Opening | Before::Other, _) => Bracket::Subscript,
        }
    }
}
