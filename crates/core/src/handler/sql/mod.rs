//! The user's SQL, taken apart: statements and their named parameters, found without being misled
//! by what stands in quotes or comments. This knows where tokens end, and no more of SQL than that;
//! whether a statement makes sense is the database's to say.
//!
//! The databases disagree on what a text means (comments nest in one of them, `[…]` is a name in the
//! other), so a text is read in a [`Dialect`]. `tokens` knows both, `colon` what a colon is, `read`
//! makes statements of tokens, `parameter` knows what can be named, `own_names` which names are
//! Hapax's own.

mod colon;
mod own_names;
mod parameter;
mod read;
mod tokens;

use std::fmt;

pub use self::parameter::{PostgresType, SqlParameter};

/// Whose SQL it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Comments do not nest, `[…]` is a name, parameters become `?1`.
    Sqlite,
    /// Comments nest, `[…]` is an array or a part of one, parameters become `$1`. Strings are read
    /// as with `standard_conforming_strings = on`, which has been the default since 9.1: whoever
    /// runs the statements sees to it that the connection agrees.
    ///
    /// A `DO` takes no parameters, since its body is a string and a string is never touched; `CALL`
    /// takes them. In a subscript, `a[1:n]`, a colon that follows a value parts a slice, whatever
    /// comes after it: the parameter is `a[1: :n]`. A colon that comes first, `a[:n]`, begins a
    /// parameter if there is one of that name, and otherwise a slice.
    Postgres,
}

/// The statements of an `sql` handler, with their named parameters found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlProgram {
    /// In their order, at least one; the last one's first value is the receipt's `result`.
    pub statements: Vec<SqlStatement>,
}

/// One statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlStatement {
    /// Its text with `?1`, `?2` … or `$1`, `$2` … in place of the named parameters.
    pub text: String,
    /// What to bind to each, in that order; none of them twice.
    pub parameters: Vec<SqlParameter>,
    /// The line of the program on which it begins, from 1.
    pub line: usize,
    /// Where its parts stood in the program, by their first byte in `text`; the first begins it.
    parts: Vec<Part>,
}

/// A place in the program as the user wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqlPlace {
    /// From 1.
    pub line: usize,
    /// The character on that line, from 1.
    pub column: usize,
}

/// Why a program cannot be used, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlError {
    /// The line of the program, from 1.
    pub line: usize,
    /// The character on that line, from 1.
    pub column: usize,
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub hint: String,
}

/// A part of a statement's text: what was copied, or what was put in a parameter's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    at: usize,
    place: SqlPlace,
    is_copy: bool,
}

impl fmt::Display for SqlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.problem)
    }
}

impl std::error::Error for SqlError {}

impl fmt::Display for SqlPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

impl SqlProgram {
    /// Splits `text` at its semicolons and finds the parameters of each statement.
    pub fn parse(text: &str, dialect: Dialect) -> Result<Self, SqlError> {
        read::program(text, dialect).map_err(|fault| fault.located(text))
    }

    /// Whether `text`, one statement with the database's own parameters, may run in a handler: it
    /// neither ends the transaction nor touches schema or session, and names no table of Hapax's own.
    /// For those who run statements one by one; that it is only one, the database sees to.
    pub fn may_begin(text: &str, dialect: Dialect) -> Result<(), SqlError> {
        read::beginning(text, dialect).map_err(|fault| fault.located(text))
    }

    /// Whether any statement has this parameter.
    pub fn uses(&self, parameter: SqlParameter) -> bool {
        self.statements.iter().any(|statement| statement.parameters.contains(&parameter))
    }
}

impl tokens::Fault {
    fn located(self, text: &str) -> SqlError {
        let SqlPlace { line, column } = SqlPlace::START.after(&text[..self.at]);
        SqlError { line, column, problem: self.problem, hint: self.hint }
    }
}

impl SqlStatement {
    /// Where in the program the byte `at` of `text` stood; a byte of `$1` is the parameter's colon.
    /// What lies past the end is the end.
    pub fn place_of_byte(&self, at: usize) -> SqlPlace {
        let ends = self.text.char_indices().map(|(end, _)| end).chain([self.text.len()]);
        let at = ends.take_while(|end| *end <= at).last().unwrap_or(0);
        let part = self.parts.iter().rfind(|part| part.at <= at);
        match part {
            Some(part) if part.is_copy => part.place.after(&self.text[part.at..at]),
            Some(part) => part.place,
            None => SqlPlace { line: self.line, column: 1 },
        }
    }

    /// Where in the program the `nth` character of `text` stood, counted from 1, as PostgreSQL
    /// counts in the position of an error.
    pub fn place_of_character(&self, nth: usize) -> SqlPlace {
        let at = self.text.char_indices().map(|(at, _)| at).nth(nth.saturating_sub(1));
        self.place_of_byte(at.unwrap_or(self.text.len()))
    }
}

impl SqlPlace {
    const START: Self = Self { line: 1, column: 1 };

    /// The place behind `text`, if that begins here.
    fn after(self, text: &str) -> Self {
        match text.rfind('\n') {
            Some(newline) => Self {
                line: self.line + text.matches('\n').count(),
                column: text[newline + 1..].chars().count() + 1,
            },
            None => Self { line: self.line, column: self.column + text.chars().count() },
        }
    }
}
