//! Splits a text into tokens, in each dialect. Together the tokens are the whole text, byte for byte.

use std::ops::Range;

use super::colon::Context;
use super::{Dialect, SqlParameter};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    /// White space or a comment.
    Blank,
    Semicolon,
    /// `:name`.
    Parameter,
    /// A keyword, a name or a number.
    Word,
    /// A string or a quoted name.
    Quoted,
    /// Anything else.
    Sign,
}

/// A problem at a byte of the text.
pub(super) struct SqlProblem {
    pub(super) at: usize,
    pub(super) problem: String,
    pub(super) hint: String,
}

impl SqlProblem {
    pub(super) fn new(at: usize, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { at, problem: problem.into(), hint: hint.into() }
    }
}

/// A text that is being split.
pub(super) struct Tokens<'t> {
    text: &'t str,
    dialect: Dialect,
    at: usize,
    context: Context,
    /// Whether it may contain the database's own parameters, `$1`.
    is_native: bool,
}

impl<'t> Tokens<'t> {
    pub(super) fn new(text: &'t str, dialect: Dialect) -> Self {
        Self { text, dialect, at: 0, context: Context::default(), is_native: false }
    }

    /// A text with the database's own parameters.
    pub(super) fn native(text: &'t str, dialect: Dialect) -> Self {
        Self { is_native: true, ..Self::new(text, dialect) }
    }

    /// The next token.
    pub(super) fn next(&mut self) -> Result<Option<(Range<usize>, Token)>, SqlProblem> {
        let start = self.at;
        let rest = &self.text[start..];
        let Some(first) = rest.chars().next() else { return Ok(None) };
        let second = rest[first.len_utf8()..].chars().next();
        let (length, token) = match self.dialect {
            // A byte order mark, which some editors write.
            Dialect::Sqlite | Dialect::Postgres if start == 0 && first == '\u{feff}' => {
                (first.len_utf8(), Token::Blank)
            }
            Dialect::Sqlite => self.sqlite(rest, first, second)?,
            Dialect::Postgres => self.postgres(rest, first, second)?,
        };
        self.at = start + length;
        self.context.pass(token, &rest[..length]);
        Ok(Some((start..self.at, token)))
    }

    fn sqlite(
        &self,
        rest: &str,
        first: char,
        second: Option<char>,
    ) -> Result<(usize, Token), SqlProblem> {
        let second_names = second.is_some_and(is_name);
        Ok(match first {
            '-' if second == Some('-') => (line(rest, &['\n']), Token::Blank),
            '/' if second == Some('*') => {
                (2 + self.up_to("*/", 2, "a comment is not closed")?, Token::Blank)
            }
            '`' => (self.quoted(0, '`')?, Token::Quoted),
            '[' => (1 + self.up_to("]", 1, "a name in [brackets] is not closed")?, Token::Quoted),
            ':' if second == Some(':') => (2, Token::Sign),
            ':' if second_names => (1 + name(&rest[1..]), Token::Parameter),
            '?' => return Err(self.foreign(1)),
            '@' if second_names => return Err(self.foreign(1 + name(&rest[1..]))),
            // SQLite has no such strings and would refuse them; they contain no parameters.
            'e' | 'E' if second == Some('\'') => (1 + self.escaped(1)?, Token::Quoted),
            first if is_name(first) && first != '$' => (name(rest), Token::Word),
            first => self.either(rest, first, second)?,
        })
    }

    fn postgres(
        &self,
        rest: &str,
        first: char,
        second: Option<char>,
    ) -> Result<(usize, Token), SqlProblem> {
        Ok(match first {
            '\u{b}' => (1, Token::Blank),
            '-' if second == Some('-') => (line(rest, &['\n', '\r']), Token::Blank),
            '/' if second == Some('*') => (self.nested_comment()?, Token::Blank),
            ':' if matches!(second, Some(':' | '=')) => (2, Token::Sign),
            ':' if second.is_some_and(is_name) => {
                let length = name(&rest[1..]);
                match self.context.is_slice(&rest[1..1 + length]) {
                    true => (1, Token::Sign),
                    false => (1 + length, Token::Parameter),
                }
            }
            'e' | 'E' if second == Some('\'') => {
                (self.continued(1, |skip| self.escaped(skip))?, Token::Quoted)
            }
            'u' | 'U' if rest[1..].starts_with("&'") => {
                (self.continued(2, |skip| self.quoted(skip, '\''))?, Token::Quoted)
            }
            'u' | 'U' if rest[1..].starts_with("&\"") => (2 + self.quoted(2, '"')?, Token::Quoted),
            '\'' => (self.continued(0, |skip| self.quoted(skip, '\''))?, Token::Quoted),
            first if first.is_ascii_digit() => (number(rest), Token::Word),
            first if is_name(first) && first != '$' => (name(rest), Token::Word),
            first => self.either(rest, first, second)?,
        })
    }

    /// The tokens that both dialects share.
    fn either(
        &self,
        rest: &str,
        first: char,
        second: Option<char>,
    ) -> Result<(usize, Token), SqlProblem> {
        Ok(match first {
            ' ' | '\t' | '\n' | '\r' | '\u{c}' => (1, Token::Blank),
            ';' => (1, Token::Semicolon),
            '\'' | '"' => (self.quoted(0, first)?, Token::Quoted),
            '$' => match dollar_tag(rest) {
                Some(tag) => {
                    let body = self.up_to(tag, tag.len(), "a dollar quote is not closed")?;
                    (tag.len() + body, Token::Quoted)
                }
                None if self.is_native => (1, Token::Sign),
                None if second.is_some_and(is_name) => {
                    return Err(self.foreign(1 + name(&rest[1..])));
                }
                None => (1, Token::Sign),
            },
            '\0' => return Err(SqlProblem::new(self.at, "holds a NUL character", "remove it")),
            sign => (sign.len_utf8(), Token::Sign),
        })
    }

    /// The length from `skip` bytes on to the end of `close`.
    fn up_to(&self, close: &str, skip: usize, problem: &str) -> Result<usize, SqlProblem> {
        match self.text[self.at + skip..].find(close) {
            Some(length) => Ok(length + close.len()),
            None => Err(self.not_closed(problem, close)),
        }
    }

    /// The length of a comment that may contain others.
    fn nested_comment(&self) -> Result<usize, SqlProblem> {
        let comment = &self.text.as_bytes()[self.at..];
        let mut depth = 0;
        let mut at = 0;
        while let Some(pair) = comment.get(at..at + 2) {
            match pair {
                b"/*" => depth += 1,
                b"*/" if depth == 1 => return Ok(at + 2),
                b"*/" => depth -= 1,
                _inside => {
                    at += 1;
                    continue;
                }
            }
            at += 2;
        }
        Err(self.not_closed("a comment is not closed", "*/"))
    }

    /// The length of the quoted text from `skip` bytes on, in which a doubled quote is part of the text.
    fn quoted(&self, skip: usize, quote: char) -> Result<usize, SqlProblem> {
        let mut rest = self.text[self.at + skip..].char_indices().skip(1).peekable();
        while let Some((at, letter)) = rest.next() {
            if letter == quote && rest.next_if(|(_, next)| *next == quote).is_none() {
                return Ok(at + 1);
            }
        }
        let problem = if quote == '\'' { "a string" } else { "a quoted name" };
        Err(self.not_closed(&format!("{problem} is not closed"), &quote.to_string()))
    }

    /// The length of the string from `skip` bytes on, in which a backslash escapes the next character.
    fn escaped(&self, skip: usize) -> Result<usize, SqlProblem> {
        let mut rest = self.text[self.at + skip..].char_indices().skip(1).peekable();
        while let Some((at, letter)) = rest.next() {
            match letter {
                '\\' => drop(rest.next()),
                '\'' if rest.next_if(|(_, next)| *next == '\'').is_none() => return Ok(at + 1),
                _inside => {}
            }
        }
        Err(self.not_closed("a string is not closed", "'"))
    }

    /// The length of a string after a prefix of this length, with its continuations on the lines below. `part`
    /// returns the length of the part from a number of bytes on.
    fn continued(
        &self,
        prefix: usize,
        part: impl Fn(usize) -> Result<usize, SqlProblem>,
    ) -> Result<usize, SqlProblem> {
        let mut length = prefix + part(prefix)?;
        while let Some(gap) = continuation(&self.text[self.at + length..]) {
            length += gap + part(length + gap)?;
        }
        Ok(length)
    }

    fn not_closed(&self, problem: &str, close: &str) -> SqlProblem {
        SqlProblem::new(self.at, problem, format!("it begins here, and no {close} ends it"))
    }

    /// Other spellings of parameters would be bound to NULL.
    fn foreign(&self, length: usize) -> SqlProblem {
        let found = &self.text[self.at..self.at + length];
        let hint = format!("parameters are named: {}", SqlParameter::known());
        SqlProblem::new(self.at, format!("{found} is not a parameter"), hint)
    }
}

/// Whether a character may be part of a name or a number.
pub(super) fn is_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == '$' || !letter.is_ascii()
}

fn name(text: &str) -> usize {
    text.find(|letter| !is_name(letter)).unwrap_or(text.len())
}

/// Unlike a name, a number ends before a dollar.
fn number(text: &str) -> usize {
    text.find(|letter| !is_name(letter) || letter == '$').unwrap_or(text.len())
}

fn line(text: &str, ends: &[char]) -> usize {
    text.find(ends).unwrap_or(text.len())
}

/// The length of the gap between a string and its continuation: white space and line comments, with at least
/// one newline.
fn continuation(text: &str) -> Option<usize> {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\n', '\r', '\u{b}', '\u{c}']);
        match rest.starts_with("--") {
            true => rest = &rest[line(rest, &['\n', '\r'])..],
            false => break,
        }
    }
    let gap = text.len() - rest.len();
    (rest.starts_with('\'') && text[..gap].contains(['\n', '\r'])).then_some(gap)
}

/// `$$` or `$tag$` at the beginning of the text.
fn dollar_tag(text: &str) -> Option<&str> {
    let tag = text.strip_prefix('$')?;
    let length = tag.find('$')?;
    let tag = &tag[..length];
    let fits = !tag.starts_with(|first: char| first.is_ascii_digit()) && tag.chars().all(is_name);
    fits.then(|| &text[..length + 2])
}
