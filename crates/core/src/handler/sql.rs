//! The user's SQL, taken apart: statements and their named parameters, found without being misled
//! by what stands in quotes or comments. This knows where tokens end, and no more of SQL than that;
//! whether a statement makes sense is the database's to say.
//!
//! One set of rules serves SQLite and PostgreSQL, and where the two disagree on what a text means
//! the reading is SQLite's: comments do not nest, `[…]` is a name.

use std::fmt;
use std::ops::Range;

use crate::presets::edits;

/// The statements of an `sql` handler, with their named parameters found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlProgram {
    /// In their order, at least one; the last one's first value is the receipt's `result`.
    pub statements: Vec<SqlStatement>,
}

/// One statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlStatement {
    /// Its text with `?1`, `?2` … in place of the named parameters.
    pub text: String,
    /// What to bind to each, in that order; none of them twice.
    pub parameters: Vec<SqlParameter>,
    /// The line of the program on which it begins, from 1.
    pub line: usize,
}

/// What a named parameter stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum SqlParameter {
    Tenant,
    Source,
    EventId,
    EventType,
    Id,
    IdempotencyKey,
    Body,
    ReceivedAt,
    OccurredAt,
    Resource,
    Attempt,
    Current,
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

impl fmt::Display for SqlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.problem)
    }
}

impl std::error::Error for SqlError {}

impl SqlProgram {
    /// Splits `text` at its semicolons and finds the parameters of each statement.
    pub fn parse(text: &str) -> Result<Self, SqlError> {
        read(text).map_err(|Fault { at, problem, hint }| {
            let before = &text[..at];
            let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
            SqlError {
                line: before.matches('\n').count() + 1,
                column: before[line_start..].chars().count() + 1,
                problem,
                hint,
            }
        })
    }

    /// Whether any statement has this parameter.
    pub fn uses(&self, parameter: SqlParameter) -> bool {
        self.statements.iter().any(|statement| statement.parameters.contains(&parameter))
    }
}

impl SqlParameter {
    /// All of them, in the order in which they are told.
    pub const ALL: [Self; 12] = [
        Self::Tenant,
        Self::Source,
        Self::EventId,
        Self::EventType,
        Self::Id,
        Self::IdempotencyKey,
        Self::Body,
        Self::ReceivedAt,
        Self::OccurredAt,
        Self::Resource,
        Self::Attempt,
        Self::Current,
    ];

    /// Its name, without the colon.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Source => "source",
            Self::EventId => "event_id",
            Self::EventType => "event_type",
            Self::Id => "id",
            Self::IdempotencyKey => "idempotency_key",
            Self::Body => "body",
            Self::ReceivedAt => "received_at",
            Self::OccurredAt => "occurred_at",
            Self::Resource => "resource",
            Self::Attempt => "attempt",
            Self::Current => "current",
        }
    }

    fn named(name: &str) -> Result<Self, String> {
        if let Some(parameter) = Self::ALL.into_iter().find(|known| known.name() == name) {
            return Ok(parameter);
        }
        let plain = name.to_lowercase();
        let near = Self::ALL
            .into_iter()
            .map(|known| (edits(&plain, known.name()), known.name()))
            .filter(|(steps, _)| *steps <= (plain.len() / 3).max(1))
            .min();
        let known = Self::ALL.map(|known| format!(":{}", known.name())).join(" ");
        Err(match near {
            Some((_, near)) => format!("did you mean :{near}? Known: {known}"),
            None => format!("known: {known}"),
        })
    }
}

/// What is wrong at a byte of the text.
struct Fault {
    at: usize,
    problem: String,
    hint: String,
}

impl Fault {
    fn new(at: usize, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { at, problem: problem.into(), hint: hint.into() }
    }
}

/// How a statement may begin.
const VERBS: [&str; 7] = ["SELECT", "WITH", "INSERT", "UPDATE", "DELETE", "REPLACE", "VALUES"];

/// A statement that is being read.
struct Draft {
    statement: SqlStatement,
    /// Its length up to the last token that is neither blank nor comment.
    length: usize,
}

fn read(text: &str) -> Result<SqlProgram, Fault> {
    let mut statements = Vec::new();
    let mut draft: Option<Draft> = None;
    let mut tokens = Tokens { text, at: 0 };
    while let Some((range, token)) = tokens.next()? {
        let piece = &text[range.clone()];
        match token {
            Token::Blank => {
                if let Some(draft) = &mut draft {
                    draft.statement.text.push_str(piece);
                }
            }
            Token::Semicolon => statements.extend(draft.take().map(Draft::finish)),
            Token::Parameter => {
                let parameter = SqlParameter::named(&piece[1..]).map_err(|hint| {
                    Fault::new(range.start, format!("unknown parameter {piece}"), hint)
                })?;
                let Some(draft) = &mut draft else { return Err(no_verb(range.start, piece)) };
                draft.parameter(parameter);
            }
            Token::Word | Token::Other => {
                if draft.is_none() {
                    let is_verb = VERBS.iter().any(|verb| verb.eq_ignore_ascii_case(piece));
                    if !is_verb {
                        return Err(no_verb(range.start, piece));
                    }
                }
                draft.get_or_insert_with(|| Draft::at(text, range.start)).push(piece);
            }
        }
    }
    statements.extend(draft.map(Draft::finish));
    if statements.is_empty() {
        return Err(Fault::new(0, "there is no statement", "such as INSERT INTO … VALUES (:id)"));
    }
    Ok(SqlProgram { statements })
}

impl Draft {
    fn at(text: &str, start: usize) -> Self {
        let line = text[..start].matches('\n').count() + 1;
        let statement = SqlStatement { text: String::new(), parameters: Vec::new(), line };
        Self { statement, length: 0 }
    }

    fn push(&mut self, piece: &str) {
        self.statement.text.push_str(piece);
        self.length = self.statement.text.len();
    }

    fn parameter(&mut self, parameter: SqlParameter) {
        let known = &mut self.statement.parameters;
        let place = known.iter().position(|known| *known == parameter).unwrap_or_else(|| {
            known.push(parameter);
            known.len() - 1
        });
        self.push(&format!("?{}", place + 1));
    }

    fn finish(mut self) -> SqlStatement {
        self.statement.text.truncate(self.length);
        self.statement
    }
}

/// Says why a statement may not begin like this.
fn no_verb(at: usize, first: &str) -> Fault {
    let word = first.to_ascii_uppercase();
    let hint = match word.as_str() {
        "BEGIN" | "START" | "COMMIT" | "END" | "ROLLBACK" | "ABORT" | "SAVEPOINT" | "RELEASE" => {
            "Hapax begins and commits: the statements run in the transaction of \"done\", and an \
             error rolls all of it back"
        }
        "CREATE" | "ALTER" | "DROP" | "TRUNCATE" | "REINDEX" | "GRANT" | "REVOKE" => {
            "a handler runs for every event: change the schema in a migration of your own, before \
             Hapax starts"
        }
        "PRAGMA" | "ATTACH" | "DETACH" | "VACUUM" | "ANALYZE" | "SET" | "RESET" => {
            "the connection and its settings are Hapax's: a handler only reads and writes rows"
        }
        _other => "begin with SELECT, WITH, INSERT, UPDATE, DELETE, REPLACE or VALUES",
    };
    let named = if first.chars().all(is_name) { word } else { first.to_owned() };
    let named: String = named.chars().take(40).collect();
    Fault::new(at, format!("a statement cannot begin with {named}"), hint)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// White space or a comment.
    Blank,
    Semicolon,
    /// `:name`.
    Parameter,
    /// A keyword, a name or a number.
    Word,
    /// A string, a quoted name, a sign.
    Other,
}

struct Tokens<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Tokens<'t> {
    /// The next token. Together they are the whole text, byte for byte.
    fn next(&mut self) -> Result<Option<(Range<usize>, Token)>, Fault> {
        let start = self.at;
        let rest = &self.text[start..];
        let Some(first) = rest.chars().next() else { return Ok(None) };
        let second = rest[first.len_utf8()..].chars().next();
        let second_names = second.is_some_and(is_name);
        let (length, token) = match first {
            ' ' | '\t' | '\n' | '\r' | '\u{c}' => (1, Token::Blank),
            // Editors on some systems put it before a file.
            '\u{feff}' if start == 0 => (first.len_utf8(), Token::Blank),
            '-' if second == Some('-') => (line(rest), Token::Blank),
            '/' if second == Some('*') => {
                (2 + self.up_to("*/", 2, "a comment is not closed")?, Token::Blank)
            }
            ';' => (1, Token::Semicolon),
            '\'' => (self.quoted('\'')?, Token::Other),
            '"' | '`' => (self.quoted(first)?, Token::Other),
            '[' => (1 + self.up_to("]", 1, "a name in [brackets] is not closed")?, Token::Other),
            '$' if dollar_tag(rest).is_some() => {
                let tag = dollar_tag(rest).unwrap_or_default();
                let length = tag.len();
                (length + self.up_to(tag, length, "a dollar quote is not closed")?, Token::Other)
            }
            ':' if second == Some(':') => (2, Token::Other),
            ':' if second_names => (1 + name(&rest[1..]), Token::Parameter),
            '?' => return Err(self.foreign(1)),
            '@' | '$' if second_names => return Err(self.foreign(1 + name(&rest[1..]))),
            '\0' => return Err(Fault::new(start, "holds a NUL character", "remove it")),
            'e' | 'E' if second == Some('\'') => (1 + self.escaped()?, Token::Other),
            first if is_name(first) => (name(rest), Token::Word),
            sign => (sign.len_utf8(), Token::Other),
        };
        self.at = start + length;
        Ok(Some((start..self.at, token)))
    }

    /// The length from `skip` bytes on to the end of `close`.
    fn up_to(&self, close: &str, skip: usize, problem: &str) -> Result<usize, Fault> {
        match self.text[self.at + skip..].find(close) {
            Some(length) => Ok(length + close.len()),
            None => Err(self.not_closed(problem, close)),
        }
    }

    /// The length of what stands in quotes, where a doubled one is part of it.
    fn quoted(&self, quote: char) -> Result<usize, Fault> {
        let mut rest = self.text[self.at..].char_indices().skip(1).peekable();
        while let Some((at, letter)) = rest.next() {
            if letter == quote && rest.next_if(|(_, next)| *next == quote).is_none() {
                return Ok(at + 1);
            }
        }
        let problem = if quote == '\'' { "a string" } else { "a quoted name" };
        Err(self.not_closed(&format!("{problem} is not closed"), &quote.to_string()))
    }

    /// The length of the string after an `E`, where a backslash takes the next character with it.
    fn escaped(&self) -> Result<usize, Fault> {
        let mut rest = self.text[self.at + 1..].char_indices().skip(1).peekable();
        while let Some((at, letter)) = rest.next() {
            match letter {
                '\\' => drop(rest.next()),
                '\'' if rest.next_if(|(_, next)| *next == '\'').is_none() => return Ok(at + 1),
                _inside => {}
            }
        }
        Err(self.not_closed("a string is not closed", "'"))
    }

    fn not_closed(&self, problem: &str, close: &str) -> Fault {
        Fault::new(self.at, problem, format!("it begins here, and no {close} ends it"))
    }

    /// Other spellings would be bound to nothing, and so be NULL.
    fn foreign(&self, length: usize) -> Fault {
        let found = &self.text[self.at..self.at + length];
        let known = SqlParameter::ALL.map(|known| format!(":{}", known.name())).join(" ");
        let hint = format!("parameters are named: {known}");
        Fault::new(self.at, format!("{found} is not a parameter"), hint)
    }
}

/// What may stand in a name or a number.
fn is_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == '$' || !letter.is_ascii()
}

fn name(text: &str) -> usize {
    text.find(|letter| !is_name(letter)).unwrap_or(text.len())
}

fn line(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// `$$` or `$tag$` at the beginning of the text.
fn dollar_tag(text: &str) -> Option<&str> {
    let tag = text.strip_prefix('$')?;
    let length = tag.find('$')?;
    let tag = &tag[..length];
    let fits = !tag.starts_with(|first: char| first.is_ascii_digit()) && tag.chars().all(is_name);
    fits.then(|| &text[..length + 2])
}
