//! What is wrong with a configuration, where, and what to do about it. Never shows a value that
//! could be a secret: a message quotes only values of keys that hold none.

use std::fmt;
use std::path::{Path, PathBuf};

/// What is wrong with one value, before it is known where that value stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InvalidSetting {
    /// What is wrong.
    pub(crate) problem: String,
    /// What to do about it.
    pub(crate) hint: String,
}

impl InvalidSetting {
    /// Both at once.
    pub(crate) fn new(problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { problem: problem.into(), hint: hint.into() }
    }
}

/// Where a setting came from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// A command line flag or an environment variable, by its name.
    Override(&'static str),
    /// A byte of the config file.
    File(usize),
    /// The file as a whole, or no place in particular.
    Whole,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigProblem {
    /// Where.
    pub(crate) origin: Origin,
    /// The dotted key, or empty.
    pub(crate) key: String,
    /// What and what to do.
    pub(crate) invalid: InvalidSetting,
}

/// Collects problems while a config is read, so that all of them are reported at once.
#[derive(Debug, Default)]
pub(crate) struct ConfigProblems(Vec<ConfigProblem>, Option<Unopened>);

/// Something that is needed could not be opened or made, which is no mistake in the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unopened;

impl ConfigProblems {
    /// Adds one.
    pub(crate) fn add(&mut self, origin: Origin, key: impl Into<String>, invalid: InvalidSetting) {
        self.0.push(ConfigProblem { origin, key: key.into(), invalid });
    }

    /// Adds one about a file or directory that cannot be used, though the config is right.
    pub(crate) fn add_unopened(&mut self, key: &str, invalid: InvalidSetting) {
        self.add(Origin::Whole, key, invalid);
        self.1 = Some(Unopened);
    }

    /// Whether nothing is wrong so far.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The report, with lines counted in `text`, in the order of the file.
    pub(crate) fn into_errors(mut self, file: Option<&Path>, text: &str) -> ConfigErrors {
        self.0.sort_by(|one, other| one.origin.cmp(&other.origin));
        let lines = self.0.iter().map(|problem| render(problem, file, text)).collect();
        ConfigErrors { file: file.map(Path::to_owned), lines, unopened: self.1 }
    }
}

/// All that is wrong with a configuration, ready to print.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) struct ConfigErrors {
    /// The file, where there is one.
    pub(crate) file: Option<PathBuf>,
    lines: Vec<String>,
    /// Set where something could not be opened.
    pub(crate) unopened: Option<Unopened>,
}

impl ConfigErrors {
    /// A single error about the file as a whole.
    pub(crate) fn whole(file: Option<&Path>, invalid: InvalidSetting) -> Self {
        let mut problems = ConfigProblems::default();
        problems.add(Origin::Whole, "", invalid);
        problems.into_errors(file, "")
    }

    /// One text for each error.
    pub(crate) fn lines(&self) -> &[String] {
        &self.lines
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

fn render(problem: &ConfigProblem, file: Option<&Path>, text: &str) -> String {
    let file = file.map(|file| file.display().to_string());
    let origin = match (&problem.origin, file) {
        (Origin::Override(name), _) => format!("{name}: "),
        (Origin::File(at), Some(file)) => {
            let (line, column) = line_and_column(text, *at);
            format!("{file}:{line}:{column}: ")
        }
        (Origin::File(at), None) => format!("line {}: ", line_and_column(text, *at).0),
        (Origin::Whole, Some(file)) => format!("{file}: "),
        (Origin::Whole, None) => String::new(),
    };
    let key = if problem.key.is_empty() { String::new() } else { format!("{}: ", problem.key) };
    let InvalidSetting { problem, hint } = &problem.invalid;
    let hint = if hint.is_empty() { String::new() } else { format!("\n  hint: {hint}") };
    format!("{origin}{key}{problem}{hint}").chars().map(visible).collect()
}

/// Keys and file names come from outside: a terminal must not obey them.
fn visible(c: char) -> char {
    if c.is_control() && c != '\n' { '\u{fffd}' } else { c }
}

/// Both count from one, columns in characters.
fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_columns_count_from_one_and_in_characters() {
        assert_eq!(line_and_column("", 0), (1, 1));
        assert_eq!(line_and_column("a\nb", 2), (2, 1));
        assert_eq!(line_and_column("é = 1", 3), (1, 3));
        assert_eq!(line_and_column("a\n", 99), (2, 1));
    }
}
