//! Walks a TOML file and keeps the position of every key.
//!
//! The reader is written by hand, because a derive cannot do three things at once. The reader reports every
//! problem and not only the first, suggests the key that was meant, and never quotes a value that may be a
//! secret.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::{ConfigProblems, InvalidSetting, SettingOrigin};
use super::suggest;

/// A table of the file.
#[derive(Clone)]
pub(crate) struct Section<'d> {
    path: String,
    at: usize,
    table: &'d DeTable<'d>,
}

/// A key of a table, or an element of a list.
#[derive(Clone)]
pub(crate) struct Entry<'d> {
    path: String,
    name: &'d str,
    at: usize,
    /// The position of the value.
    span: Range<usize>,
    value: &'d DeValue<'d>,
}

/// Parses the text. The message of a syntax error does not quote the text.
pub(crate) fn parse<'t>(
    text: &'t str,
    problems: &mut ConfigProblems,
) -> Option<Spanned<DeTable<'t>>> {
    match DeTable::parse(text) {
        Ok(document) => Some(document),
        Err(error) => {
            let origin = error
                .span()
                .map_or(SettingOrigin::Whole, |Range { start, .. }| SettingOrigin::File(start));
            let message = error.message().lines().next().unwrap_or("invalid TOML").to_owned();
            let hint = if message.contains("duplicate") {
                "write each key and each [section] only once"
            } else {
                "this is not TOML: write text in quotes and lists in [brackets]"
            };
            problems.add(origin, "", InvalidSetting::new(message, hint));
            None
        }
    }
}

impl<'d> Section<'d> {
    /// The whole file.
    pub(crate) fn root(document: &'d Spanned<DeTable<'d>>) -> Self {
        Self { path: String::new(), at: 0, table: document.as_ref() }
    }

    /// The entry of that name.
    pub(crate) fn get(&self, name: &str) -> Option<Entry<'d>> {
        self.entries().find(|entry| entry.name == name)
    }

    /// All entries, by name.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry<'d>> + use<'d> {
        let path = self.path.clone();
        self.table.iter().map(move |(key, value)| Entry {
            path: join(&path, key.as_ref()),
            name: key.as_ref(),
            at: key.span().start,
            span: value.span(),
            value: value.as_ref(),
        })
    }

    /// Reports every key that is not `known`.
    pub(crate) fn expect(&self, known: &[&str], problems: &mut ConfigProblems) {
        for entry in self.entries().filter(|entry| !known.contains(&entry.name)) {
            let hint = match suggest::nearest(entry.name, known) {
                Some(near) => format!("did you mean `{near}`?"),
                None if known.is_empty() => "this section has no keys".to_owned(),
                None => format!("known keys: {}", known.join(", ")),
            };
            entry.report(InvalidSetting::new("unknown key", hint), problems);
        }
    }

    /// Reports a problem with the section as a whole.
    pub(crate) fn report(&self, invalid: InvalidSetting, problems: &mut ConfigProblems) {
        problems.add(SettingOrigin::File(self.at), self.path.clone(), invalid);
    }

    /// The entry at a dotted path such as `scheme.header`, or its deepest ancestor that exists.
    pub(crate) fn deepest(&self, path: &str) -> Option<Entry<'d>> {
        let (first, rest) = match path.split_once('.') {
            Some((first, rest)) => (first, Some(rest)),
            None => (path, None),
        };
        let entry = self.get(first)?;
        match (rest, entry.value) {
            (Some(rest), DeValue::Table(table)) => {
                let inner = Section { path: entry.path.clone(), at: entry.at, table };
                Some(inner.deepest(rest).unwrap_or(entry))
            }
            (Some(_) | None, _) => Some(entry),
        }
    }
}

impl<'d> Entry<'d> {
    /// The key itself.
    pub(crate) fn name(&self) -> &'d str {
        self.name
    }

    /// The byte offset of the key.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// The dotted key.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Reports a problem with this entry.
    pub(crate) fn report(&self, invalid: InvalidSetting, problems: &mut ConfigProblems) {
        problems.add(SettingOrigin::File(self.at), self.path.clone(), invalid);
    }

    /// The offset in the file of byte `at` of the text; `None` if the text contains escapes.
    pub(crate) fn byte_in_file(&self, file: &str, at: usize) -> Option<usize> {
        let DeValue::String(text) = self.value else { return None };
        let raw = file.get(self.span.clone())?;
        let quote =
            ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quote| raw.starts_with(quote))?;
        let inner = raw.strip_prefix(quote)?.strip_suffix(quote)?;
        // TOML drops a line break right after three quotes.
        let inner = match quote.len() {
            3 => inner.strip_prefix("\r\n").or(inner.strip_prefix('\n')).unwrap_or(inner),
            _one => inner,
        };
        let start = raw.len() - quote.len() - inner.len();
        (inner == text.as_ref()).then_some(self.span.start + start + at)
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self, problems: &mut ConfigProblems) -> Option<bool> {
        match self.value {
            DeValue::Boolean(flag) => Some(*flag),
            other => self.wrong_type("true or false", other, problems),
        }
    }

    /// The text.
    pub(crate) fn text(&self, problems: &mut ConfigProblems) -> Option<&'d str> {
        match self.value {
            DeValue::String(text) => Some(text.as_ref()),
            other => self.wrong_type("text in quotes", other, problems),
        }
    }

    /// The text, parsed by `read`.
    pub(crate) fn parse<T>(
        &self,
        read: impl FnOnce(&str) -> Result<T, InvalidSetting>,
        problems: &mut ConfigProblems,
    ) -> Option<T> {
        match read(self.text(problems)?) {
            Ok(value) => Some(value),
            Err(invalid) => {
                self.report(invalid, problems);
                None
            }
        }
    }

    /// Text or a number, parsed by `read`; sizes and counts may be written as either.
    pub(crate) fn parse_number<T>(
        &self,
        read: impl FnOnce(&str) -> Result<T, InvalidSetting>,
        problems: &mut ConfigProblems,
    ) -> Option<T> {
        let read = match self.value {
            DeValue::Integer(number) => read(&number.to_string()),
            DeValue::String(text) => read(text),
            other => return self.wrong_type("a number", other, problems),
        };
        read.map_err(|invalid| self.report(invalid, problems)).ok()
    }

    /// Text or a TOML date-time, as text.
    pub(crate) fn instant_text(&self, problems: &mut ConfigProblems) -> Option<String> {
        match self.value {
            DeValue::Datetime(instant) => Some(instant.to_string()),
            DeValue::String(text) => Some(text.to_string()),
            other => self.wrong_type("a time such as \"2026-12-01T00:00:00Z\"", other, problems),
        }
    }

    /// The table.
    pub(crate) fn section(&self, problems: &mut ConfigProblems) -> Option<Section<'d>> {
        self.as_section().or_else(|| self.wrong_type("a table", self.value, problems))
    }

    /// The table, if the value is one.
    pub(crate) fn as_section(&self) -> Option<Section<'d>> {
        match self.value {
            DeValue::Table(table) => Some(Section { path: self.path.clone(), at: self.at, table }),
            _other => None,
        }
    }

    /// The elements.
    pub(crate) fn list(&self, problems: &mut ConfigProblems) -> Option<Vec<Entry<'d>>> {
        let DeValue::Array(array) = self.value else {
            return self.wrong_type("a list in [brackets]", self.value, problems);
        };
        let element = |value: &'d Spanned<DeValue<'d>>| Entry {
            path: self.path.clone(),
            name: self.name,
            at: value.span().start,
            span: value.span(),
            value: value.as_ref(),
        };
        Some(array.iter().map(element).collect())
    }

    /// The elements as texts.
    pub(crate) fn texts(&self, problems: &mut ConfigProblems) -> Option<Vec<&'d str>> {
        let entries = self.list(problems)?;
        let texts: Vec<_> = entries.iter().filter_map(|entry| entry.text(problems)).collect();
        (texts.len() == entries.len()).then_some(texts)
    }

    /// Reports the types only: the value may be a secret in the wrong place.
    fn wrong_type<T>(
        &self,
        expected: &str,
        found: &DeValue<'_>,
        problems: &mut ConfigProblems,
    ) -> Option<T> {
        let found = match found {
            DeValue::String(_) => "text",
            DeValue::Integer(_) => "an integer",
            DeValue::Float(_) => "a float",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Datetime(_) => "a date-time",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        let problem = format!("wrong type: expected {expected}, found {found}");
        self.report(InvalidSetting::new(problem, format!("write {expected}")), problems);
        None
    }
}

fn join(path: &str, key: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let key = if !key.is_empty() && key.chars().all(plain) {
        key.to_owned()
    } else {
        format!("\"{}\"", key.escape_debug())
    };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}
