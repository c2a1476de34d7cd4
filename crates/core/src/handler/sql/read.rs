//! Makes statements of tokens: where each begins and ends, its first word, and a number for each
//! parameter.

use super::own_names::OwnNames;
use super::tokens::{SqlProblem, Token, Tokens, is_name};
use super::{Dialect, SqlParameter, SqlPlace, SqlProgram, SqlStatement, StatementPart};

/// Reads a whole program.
pub(super) fn program(text: &str, dialect: Dialect) -> Result<SqlProgram, SqlProblem> {
    let mut statements = Vec::new();
    let mut draft: Option<Draft> = None;
    let mut tokens = Tokens::new(text, dialect);
    let mut names = OwnNames::new(dialect);
    while let Some((range, token)) = tokens.next()? {
        let piece = &text[range.clone()];
        let nth = statements.len() + 1;
        names.pass(range.start, token, piece)?;
        match token {
            Token::Blank => {
                if let Some(draft) = &mut draft {
                    draft.copy(piece);
                }
            }
            Token::Semicolon => {
                if let Some(draft) = draft.take() {
                    statements.push(draft.finish(nth)?);
                }
            }
            Token::Parameter => {
                let parameter = SqlParameter::find(&piece[1..]).ok_or_else(|| {
                    let hint = SqlParameter::hint_for(&piece[1..]);
                    SqlProblem::new(range.start, format!("unknown parameter {piece}"), hint)
                })?;
                match draft.as_mut().and_then(|draft| Some((draft.verb?, draft))) {
                    Some((Verb::Do, _)) => return Err(no_parameter_in_do(range.start, piece)),
                    Some((Verb::Other, draft)) => draft.parameter(parameter, piece),
                    None => return Err(no_verb(dialect, nth, range.start, piece)),
                }
            }
            Token::Word | Token::Quoted | Token::Sign => {
                let begun = draft.get_or_insert_with(|| Draft::at(text, range.start, dialect));
                if begun.verb.is_none() && !is_opening(dialect, piece) {
                    let verb = Verb::of(dialect, piece);
                    let verb = verb.ok_or_else(|| no_verb(dialect, nth, range.start, piece))?;
                    begun.verb = Some(verb);
                }
                if begun.verb == Some(Verb::Do) && token == Token::Quoted {
                    names.pass_body(range.start, piece)?;
                }
                begun.push(piece);
            }
        }
    }
    if let Some(draft) = draft {
        let nth = statements.len() + 1;
        statements.push(draft.finish(nth)?);
    }
    if statements.is_empty() {
        return Err(no_statement());
    }
    Ok(SqlProgram { statements })
}

/// Checks one statement: its first word, and that it names nothing of Hapax.
pub(super) fn beginning(text: &str, dialect: Dialect) -> Result<(), SqlProblem> {
    let mut tokens = Tokens::native(text, dialect);
    let mut names = OwnNames::new(dialect);
    let mut verb = None;
    while let Some((range, token)) = tokens.next()? {
        let piece = &text[range.clone()];
        names.pass(range.start, token, piece)?;
        match token {
            Token::Blank => {}
            Token::Quoted if verb == Some(Verb::Do) => names.pass_body(range.start, piece)?,
            Token::Word | Token::Quoted | Token::Sign | Token::Semicolon | Token::Parameter => {
                if verb.is_none() && !is_opening(dialect, piece) {
                    let found = Verb::of(dialect, piece);
                    verb = Some(found.ok_or_else(|| no_verb(dialect, 1, range.start, piece))?);
                }
            }
        }
    }
    verb.map(drop).ok_or_else(no_statement)
}

fn no_statement() -> SqlProblem {
    SqlProblem::new(0, "there is no statement", "write one, such as INSERT INTO … VALUES (:id)")
}

/// The words that a statement may begin with, for each database.
const VERBS_SQLITE: [&str; 7] =
    ["SELECT", "WITH", "INSERT", "UPDATE", "DELETE", "REPLACE", "VALUES"];
const VERBS_POSTGRES: [&str; 9] =
    ["SELECT", "WITH", "INSERT", "UPDATE", "DELETE", "MERGE", "VALUES", "CALL", "DO"];

/// The kind of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    /// Runs a string, which takes no parameters.
    Do,
    Other,
}

impl Verb {
    fn of(dialect: Dialect, word: &str) -> Option<Self> {
        let known = verbs(dialect).iter().find(|known| known.eq_ignore_ascii_case(word))?;
        Some(if *known == "DO" { Self::Do } else { Self::Other })
    }
}

fn verbs(dialect: Dialect) -> &'static [&'static str] {
    match dialect {
        Dialect::Sqlite => &VERBS_SQLITE,
        Dialect::Postgres => &VERBS_POSTGRES,
    }
}

/// Whether a token may come before the first word: `(SELECT …) UNION (SELECT …)`.
fn is_opening(dialect: Dialect, piece: &str) -> bool {
    match dialect {
        Dialect::Sqlite => false,
        Dialect::Postgres => piece == "(",
    }
}

/// A statement that is being read.
struct Draft {
    statement: SqlStatement,
    dialect: Dialect,
    /// Where it begins, in bytes of the program.
    start: usize,
    /// Its first word, once it was read.
    verb: Option<Verb>,
    /// Its length up to the last token that is neither blank nor comment.
    length: usize,
    /// The position in the program after the text that was read.
    place: SqlPlace,
}

impl Draft {
    fn at(text: &str, start: usize, dialect: Dialect) -> Self {
        let place = SqlPlace::START.after(&text[..start]);
        let statement = SqlStatement {
            text: String::new(),
            parameters: Vec::new(),
            line: place.line,
            parts: vec![StatementPart { at: 0, place, is_copy: true }],
        };
        Self { statement, dialect, start, verb: None, length: 0, place }
    }

    fn copy(&mut self, piece: &str) {
        self.statement.text.push_str(piece);
        self.place = self.place.after(piece);
    }

    fn push(&mut self, piece: &str) {
        self.copy(piece);
        self.length = self.statement.text.len();
    }

    fn parameter(&mut self, parameter: SqlParameter, piece: &str) {
        let SqlStatement { text, parameters, parts, .. } = &mut self.statement;
        let known = parameters.iter().position(|known| *known == parameter);
        let number = 1 + known.unwrap_or_else(|| {
            parameters.push(parameter);
            parameters.len() - 1
        });
        parts.push(StatementPart { at: text.len(), place: self.place, is_copy: false });
        match self.dialect {
            Dialect::Sqlite => text.push_str(&format!("?{number}")),
            Dialect::Postgres => {
                // Without the blank, `THEN:id` would become the name `THEN$1`.
                if text.ends_with(is_name) {
                    text.push(' ');
                }
                text.push_str(&format!("${number}"));
            }
        }
        self.place = self.place.after(piece);
        parts.push(StatementPart { at: text.len(), place: self.place, is_copy: true });
        self.length = text.len();
    }

    fn finish(mut self, nth: usize) -> Result<SqlStatement, SqlProblem> {
        if self.verb.is_none() {
            return Err(no_verb(self.dialect, nth, self.start, "("));
        }
        self.statement.text.truncate(self.length);
        Ok(self.statement)
    }
}

fn no_parameter_in_do(at: usize, piece: &str) -> SqlProblem {
    SqlProblem::new(
        at,
        format!("DO takes no parameters, {piece} included"),
        "its body is a string, and strings are not changed: create a procedure and CALL it with the \
         parameters",
    )
}

/// The error for a statement that begins with another word.
fn no_verb(dialect: Dialect, nth: usize, at: usize, first: &str) -> SqlProblem {
    let word = first.to_ascii_uppercase();
    let hint = match word.as_str() {
        "BEGIN" | "START" | "COMMIT" | "END" | "ROLLBACK" | "ABORT" | "SAVEPOINT" | "RELEASE"
        | "PREPARE" => {
            "Hapax begins and commits the transaction: the statements run in the one that records \
             \"done\", and an error rolls all of it back"
                .to_owned()
        }
        "CREATE" | "ALTER" | "DROP" | "TRUNCATE" | "REINDEX" | "CLUSTER" | "GRANT" | "REVOKE"
        | "COMMENT" | "REFRESH" | "IMPORT" => {
            "a handler runs for every event: change the schema in a migration of your own, before \
             Hapax starts"
                .to_owned()
        }
        "PRAGMA" | "ATTACH" | "DETACH" | "VACUUM" | "ANALYZE" | "SET" | "RESET" | "SHOW"
        | "DISCARD" | "LISTEN" | "UNLISTEN" | "LOAD" | "CHECKPOINT" | "DEALLOCATE" | "EXECUTE"
        | "DECLARE" | "FETCH" | "CLOSE" => {
            "the connection and its settings are Hapax's: a handler only reads and writes rows"
                .to_owned()
        }
        "LOCK" => "lock the rows that matter: SELECT … FOR UPDATE".to_owned(),
        "NOTIFY" => "write SELECT pg_notify('channel', 'payload')".to_owned(),
        "COPY" => "write INSERT INTO … SELECT …, or INSERT INTO … VALUES …".to_owned(),
        "TABLE" => "write SELECT * FROM …".to_owned(),
        "REPLACE" | "MERGE" => "write INSERT INTO … ON CONFLICT (…) DO UPDATE SET …".to_owned(),
        _other => match verbs(dialect) {
            [most @ .., last] => format!("begin with {} or {last}", most.join(", ")),
            [] => String::new(),
        },
    };
    let named = if first.chars().all(is_name) { word } else { first.to_owned() };
    let named: String = named.chars().take(40).collect();
    SqlProblem::new(at, format!("statement {nth} cannot begin with {named}"), hint)
}
