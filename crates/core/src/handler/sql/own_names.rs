//! Finds names in the schema `hapax` in a statement for PostgreSQL. A handler may call the documented
//! functions and read the documented views there, and nothing else. On SQLite an authorizer checks each
//! table, so nothing is checked here.

use std::borrow::Cow;

use super::Dialect;
use super::tokens::{SqlProblem, Token, Tokens};

const SCHEMA: &str = "hapax";

const FUNCTIONS: [&str; 7] =
    ["once", "complete", "fail", "publish", "reserve", "finish", "abandon"];

const VIEWS: [&str; 5] = ["processed_events", "arrivals", "attempts", "deliveries", "dead_letters"];

/// Looks for `hapax.NAME` in the tokens.
pub(super) struct OwnNames {
    dialect: Dialect,
    seen: PartialName,
}

/// How much of such a name was read.
#[derive(Clone, Copy)]
enum PartialName {
    Nothing,
    /// The schema, and its offset.
    Schema(usize),
    Dot(usize),
}

impl OwnNames {
    pub(super) fn new(dialect: Dialect) -> Self {
        Self { dialect, seen: PartialName::Nothing }
    }

    pub(super) fn pass(&mut self, at: usize, token: Token, piece: &str) -> Result<(), SqlProblem> {
        if self.dialect == Dialect::Sqlite || token == Token::Blank {
            return Ok(());
        }
        if token == Token::Quoted && is_escaped_name(piece) {
            return Err(SqlProblem::new(
                at,
                "a name that is written with escapes cannot be checked",
                "write the characters themselves between double quotes, without U&",
            ));
        }
        let name = name_of(token, piece);
        let before = std::mem::replace(&mut self.seen, PartialName::Nothing);
        match (before, name) {
            (PartialName::Dot(start), Some(name)) if !is_documented(&name) => {
                Err(refused(start, &name))
            }
            (PartialName::Schema(start), None) if piece == "." => {
                self.seen = PartialName::Dot(start);
                Ok(())
            }
            (_, Some(name)) if name == SCHEMA => {
                self.seen = PartialName::Schema(at);
                Ok(())
            }
            (_, _) => Ok(()),
        }
    }

    /// Checks a string of a `DO`: the database runs its body. A body that cannot be read here as the
    /// database reads it is refused.
    pub(super) fn pass_body(&mut self, at: usize, quoted: &str) -> Result<(), SqlProblem> {
        if quoted.starts_with('"') {
            // The name of a language.
            return Ok(());
        }
        let body = body_of(quoted)
            .ok_or_else(|| unread(at, "it is written with escapes or in several strings"))?;
        let mut names = Self::new(self.dialect);
        let mut tokens = Tokens::native(&body, self.dialect);
        while let Some((range, token)) =
            tokens.next().map_err(|fault| unread(at, &fault.problem))?
        {
            let passed = names.pass(at, token, &body[range]);
            passed.map_err(|fault| SqlProblem { at, ..fault })?;
        }
        Ok(())
    }
}

/// The text of a string in dollar quotes or in plain quotes. `None` for all others: `E'…'`, `U&'…'`, and a
/// string that continues on another line.
fn body_of(quoted: &str) -> Option<Cow<'_, str>> {
    if let Some(rest) = quoted.strip_prefix('$') {
        let tag = rest.find('$')? + 2;
        return quoted.get(tag..quoted.len().checked_sub(tag)?).map(Cow::Borrowed);
    }
    let inside = quoted.strip_prefix('\'')?.strip_suffix('\'')?;
    let is_one = !inside.replace("''", "").contains('\'');
    is_one.then(|| Cow::Owned(inside.replace("''", "'")))
}

/// Whether it is `U&"…"`. Its escapes may spell any name, and a `UESCAPE` behind it may change what an escape is.
fn is_escaped_name(piece: &str) -> bool {
    piece.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("u&\""))
}

/// A name as PostgreSQL reads it.
fn name_of(token: Token, piece: &str) -> Option<String> {
    match token {
        Token::Word => Some(piece.to_ascii_lowercase()),
        Token::Quoted => {
            let inside = piece.strip_prefix('"')?.strip_suffix('"')?;
            Some(inside.replace("\"\"", "\""))
        }
        Token::Blank | Token::Semicolon | Token::Parameter | Token::Sign => None,
    }
}

fn is_documented(name: &str) -> bool {
    FUNCTIONS.contains(&name) || VIEWS.contains(&name)
}

fn unread(at: usize, why: &str) -> SqlProblem {
    SqlProblem::new(
        at,
        format!("the body of this DO cannot be checked: {why}"),
        "write the body in PL/pgSQL between $$ and $$, or create a procedure and CALL it",
    )
}

fn refused(at: usize, name: &str) -> SqlProblem {
    let name: String = name.chars().take(40).collect();
    SqlProblem::new(
        at,
        format!("{SCHEMA}.{name} belongs to Hapax"),
        format!(
            "a handler works on your tables; in the schema {SCHEMA} it may call {} and read {}",
            FUNCTIONS.join(", "),
            VIEWS.join(", ")
        ),
    )
}
