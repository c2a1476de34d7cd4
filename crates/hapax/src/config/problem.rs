//! What is wrong with a configuration, where, and what to do about it. Never shows a value that
//! could be a secret: a message quotes only values of keys that hold none.

use std::fmt;
use std::path::{Path, PathBuf};

/// What is wrong with one value, before it is known where that value stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Complaint {
    /// What is wrong.
    pub(crate) problem: String,
    /// What to do about it.
    pub(crate) hint: String,
}

impl Complaint {
    /// Both at once.
    pub(crate) fn new(problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { problem: problem.into(), hint: hint.into() }
    }
}

/// Where a setting came from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// A command line flag or an environment variable, by its name.
    Outside(&'static str),
    /// A byte of the config file.
    File(usize),
    /// The file as a whole, or no place in particular.
    Whole,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Where.
    pub(crate) place: Place,
    /// The dotted key, or empty.
    pub(crate) key: String,
    /// What and what to do.
    pub(crate) complaint: Complaint,
}

/// Collects problems while a config is read, so that all of them are reported at once.
#[derive(Debug, Default)]
pub(crate) struct Problems(Vec<Problem>, Option<Unopened>);

/// Something that is needed could not be opened or made, which is no mistake in the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unopened;

impl Problems {
    /// Adds one.
    pub(crate) fn add(&mut self, place: Place, key: impl Into<String>, complaint: Complaint) {
        self.0.push(Problem { place, key: key.into(), complaint });
    }

    /// Adds one about a file or directory that cannot be used, though the config is right.
    pub(crate) fn add_unopened(&mut self, key: &str, complaint: Complaint) {
        self.add(Place::Whole, key, complaint);
        self.1 = Some(Unopened);
    }

    /// Whether nothing is wrong so far.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The report, with lines counted in `text`, in the order of the file.
    pub(crate) fn report(mut self, file: Option<&Path>, text: &str) -> ConfigErrors {
        self.0.sort_by(|one, other| one.place.cmp(&other.place));
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
    pub(crate) fn whole(file: Option<&Path>, complaint: Complaint) -> Self {
        let mut problems = Problems::default();
        problems.add(Place::Whole, "", complaint);
        problems.report(file, "")
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

fn render(problem: &Problem, file: Option<&Path>, text: &str) -> String {
    let file = file.map(|file| file.display().to_string());
    let place = match (&problem.place, file) {
        (Place::Outside(name), _) => format!("{name}: "),
        (Place::File(at), Some(file)) => {
            let (line, column) = line_and_column(text, *at);
            format!("{file}:{line}:{column}: ")
        }
        (Place::File(at), None) => format!("line {}: ", line_and_column(text, *at).0),
        (Place::Whole, Some(file)) => format!("{file}: "),
        (Place::Whole, None) => String::new(),
    };
    let key = if problem.key.is_empty() { String::new() } else { format!("{}: ", problem.key) };
    let Complaint { problem, hint } = &problem.complaint;
    let hint = if hint.is_empty() { String::new() } else { format!("\n  hint: {hint}") };
    format!("{place}{key}{problem}{hint}").chars().map(visible).collect()
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
