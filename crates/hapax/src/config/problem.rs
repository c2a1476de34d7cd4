//! Errors of a configuration: the problem, its place, and a hint. A message never quotes a value that may
//! be a secret.

use std::fmt;
use std::path::{Path, PathBuf};

/// An error in one value, before its place is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InvalidSetting {
    /// The problem.
    pub(crate) problem: String,
    /// How to fix it.
    pub(crate) hint: String,
}

impl InvalidSetting {
    /// An error with its hint.
    pub(crate) fn new(problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { problem: problem.into(), hint: hint.into() }
    }
}

/// The origin of a setting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SettingOrigin {
    /// A command line flag or an environment variable, by its name.
    Override(&'static str),
    /// A byte offset in the config file.
    File(usize),
    /// The file as a whole, or no particular place.
    Whole,
}

/// An error with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigProblem {
    /// The place.
    pub(crate) origin: SettingOrigin,
    /// The dotted key, or empty.
    pub(crate) key: String,
    /// The problem and the hint.
    pub(crate) invalid: InvalidSetting,
}

/// Collects the problems of a config, so that all are reported at once.
#[derive(Debug, Default)]
pub(crate) struct ConfigProblems(Vec<ConfigProblem>, Option<Unopened>);

/// A file or directory could not be opened or created; the config itself is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unopened;

impl ConfigProblems {
    /// Adds a problem.
    pub(crate) fn add(
        &mut self,
        origin: SettingOrigin,
        key: impl Into<String>,
        invalid: InvalidSetting,
    ) {
        self.0.push(ConfigProblem { origin, key: key.into(), invalid });
    }

    /// Adds a problem about a file or directory that cannot be used.
    pub(crate) fn add_unopened(&mut self, key: &str, invalid: InvalidSetting) {
        self.add(SettingOrigin::Whole, key, invalid);
        self.1 = Some(Unopened);
    }

    /// Whether there are no problems so far.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The errors in the order of the file, with line numbers from `text`.
    pub(crate) fn into_errors(mut self, file: Option<&Path>, text: &str) -> ConfigErrors {
        self.0.sort_by(|one, other| one.origin.cmp(&other.origin));
        let lines = self.0.iter().map(|problem| render(problem, file, text)).collect();
        ConfigErrors { file: file.map(Path::to_owned), lines, unopened: self.1 }
    }
}

/// All errors of a configuration, ready to print.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) struct ConfigErrors {
    /// The file, if there is one.
    pub(crate) file: Option<PathBuf>,
    lines: Vec<String>,
    /// Set if a file or directory could not be opened.
    pub(crate) unopened: Option<Unopened>,
}

impl ConfigErrors {
    /// A single error about the file as a whole.
    pub(crate) fn whole(file: Option<&Path>, invalid: InvalidSetting) -> Self {
        let mut problems = ConfigProblems::default();
        problems.add(SettingOrigin::Whole, "", invalid);
        problems.into_errors(file, "")
    }

    /// One text per error.
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
        (SettingOrigin::Override(name), _) => format!("{name}: "),
        (SettingOrigin::File(at), Some(file)) => {
            let (line, column) = line_and_column(text, *at);
            format!("{file}:{line}:{column}: ")
        }
        (SettingOrigin::File(at), None) => format!("line {}: ", line_and_column(text, *at).0),
        (SettingOrigin::Whole, Some(file)) => format!("{file}: "),
        (SettingOrigin::Whole, None) => String::new(),
    };
    let key = if problem.key.is_empty() { String::new() } else { format!("{}: ", problem.key) };
    let InvalidSetting { problem, hint } = &problem.invalid;
    let hint = if hint.is_empty() { String::new() } else { format!("\n  hint: {hint}") };
    format!("{origin}{key}{problem}{hint}").chars().map(visible).collect()
}

/// Replaces control characters: keys and file names must not control the terminal.
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
