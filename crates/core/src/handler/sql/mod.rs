//! Parses the user's SQL into statements and named parameters. Quotes and comments are skipped
//! correctly. The parser only finds where tokens end; the database checks the statements.
//!
//! The databases disagree (comments nest in PostgreSQL, `[…]` is a name in SQLite), so a text is parsed
//! in a [`Dialect`]. `tokens` splits the text, `colon` decides what a colon means, `read` makes
//! statements, `parameter` lists the parameters, and `own_names` finds names in the schema `hapax`.

mod colon;
mod own_names;
mod parameter;
mod read;
mod tokens;

use std::fmt;

pub use self::parameter::{PostgresType, SqlParameter};

/// The database whose SQL it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Comments do not nest, `[…]` is a name, parameters become `?1`.
    Sqlite,
    /// Comments nest, `[…]` is an array or a part of one, parameters become `$1`. Strings are read
    /// as with `standard_conforming_strings = on`, the default since 9.1. The code that runs the
    /// statements must set this option on the connection.
    ///
    /// A `DO` takes no parameters, since its body is a string and strings are never changed; `CALL`
    /// takes them. In a subscript such as `a[1:n]`, a colon after a value separates a slice: the
    /// parameter is written `a[1: :n]`. A colon that comes first, as in `a[:n]`, begins a parameter if
    /// there is one of that name, and otherwise a slice.
    Postgres,
}

/// The statements of an `sql` handler, with their named parameters found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlProgram {
    /// The statements in their order, at least one. The first value of the last statement becomes
    /// the job's `result`.
    pub statements: Vec<SqlStatement>,
}

/// One statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlStatement {
    /// Its text with `?1`, `?2` … or `$1`, `$2` … in place of the named parameters.
    pub text: String,
    /// The parameters to bind, in that order, each once.
    pub parameters: Vec<SqlParameter>,
    /// The line of the program on which it begins, from 1.
    pub line: usize,
    /// The position of each part in the program, by its first byte in `text`.
    parts: Vec<StatementPart>,
}

/// A position in the program as the user wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqlPlace {
    /// From 1.
    pub line: usize,
    /// The character on that line, from 1.
    pub column: usize,
}

/// Why a program is refused, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlError {
    /// The line of the program, from 1.
    pub line: usize,
    /// The character on that line, from 1.
    pub column: usize,
    /// The problem in words.
    pub problem: String,
    /// How to fix the problem.
    pub hint: String,
}

/// A part of a statement's text: copied text, or the number of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StatementPart {
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

    /// Whether `text`, one statement with the database's own parameters, may run in a handler: it neither
    /// ends the transaction nor changes schema or session, and names no table of Hapax. The database
    /// checks that it is only one statement.
    pub fn may_begin(text: &str, dialect: Dialect) -> Result<(), SqlError> {
        read::beginning(text, dialect).map_err(|fault| fault.located(text))
    }

    /// Whether any statement has this parameter.
    pub fn uses(&self, parameter: SqlParameter) -> bool {
        self.statements.iter().any(|statement| statement.parameters.contains(&parameter))
    }
}

impl tokens::SqlProblem {
    fn located(self, text: &str) -> SqlError {
        let SqlPlace { line, column } = SqlPlace::START.after(&text[..self.at]);
        SqlError { line, column, problem: self.problem, hint: self.hint }
    }
}

impl SqlStatement {
    /// The position in the program of the byte `at` of `text`. A byte of `$1` maps to the parameter's
    /// colon; an offset past the end maps to the end.
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

    /// The position in the program of the `nth` character of `text`, counted from 1, as PostgreSQL counts
    /// in the position of an error.
    pub fn place_of_character(&self, nth: usize) -> SqlPlace {
        let at = self.text.char_indices().map(|(at, _)| at).nth(nth.saturating_sub(1));
        self.place_of_byte(at.unwrap_or(self.text.len()))
    }
}

impl SqlPlace {
    const START: Self = Self { line: 1, column: 1 };

    /// The position after `text`, if `text` begins here.
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
