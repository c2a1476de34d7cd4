//! Output of commands: data on stdout, messages on stderr, and the exit code.

use std::io::{self, Write as _};
use std::process::ExitCode;

use serde::Serialize;

use crate::config::{ConfigErrors, InvalidSetting};

/// The exit code of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// 0: done.
    Done,
    /// 1: a negative answer: rejected, a check failed.
    Negative,
    /// 2: bad usage or config.
    Usage,
    /// 3: could not reach or open what it needs.
    Unreachable,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Done => 0,
            Exit::Negative => 1,
            Exit::Usage => 2,
            Exit::Unreachable => 3,
        })
    }
}

/// Why a command could not do its work.
#[derive(Debug)]
pub(crate) struct CommandFailure {
    pub(crate) exit: Exit,
    message: String,
    hint: String,
}

impl CommandFailure {
    /// Bad usage or config: exit 2.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into(), hint: hint.into() }
    }

    /// A negative answer: exit 1.
    pub(crate) fn negative(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Negative, message: message.into(), hint: hint.into() }
    }

    /// A server or file could not be reached or opened: exit 3.
    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        Self { exit: Exit::Unreachable, message: message.into(), hint: String::new() }
    }

    /// The same failure with a hint.
    pub(crate) fn hinted(self, hint: &str) -> Self {
        Self { hint: hint.to_owned(), ..self }
    }

    /// The message, without the hint.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Prints the failure. A closed stdout has no message: it is not a failure.
    pub(crate) fn report(&self) {
        if self.message.is_empty() {
            return;
        }
        error(&self.message);
        if !self.hint.is_empty() {
            words(&format!("  hint: {}", self.hint));
        }
    }
}

impl From<InvalidSetting> for CommandFailure {
    fn from(InvalidSetting { problem, hint }: InvalidSetting) -> Self {
        Self::usage(problem, hint)
    }
}

impl From<ConfigErrors> for CommandFailure {
    fn from(errors: ConfigErrors) -> Self {
        let exit = match errors.unopened {
            Some(_) => Exit::Unreachable,
            None => Exit::Usage,
        };
        Self { exit, message: errors.lines().join("\nerror: "), hint: String::new() }
    }
}

impl From<io::Error> for CommandFailure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { exit: Exit::Done, message: String::new(), hint: String::new() };
        }
        Self::unreachable(format!("cannot write the output: {error}"))
    }
}

/// Prints one line of data to stdout.
pub(crate) fn data(line: &str) -> io::Result<()> {
    writeln!(anstream::stdout().lock(), "{line}")
}

/// Prints one JSON object on one line to stdout.
pub(crate) fn json(value: &impl Serialize) -> io::Result<()> {
    data(&serde_json::to_string(value).map_err(io::Error::other)?)
}

/// Prints one line to stderr; a closed stderr is ignored.
pub(crate) fn words(line: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{line}");
}

/// Prints an error to stderr.
pub(crate) fn error(line: &str) {
    words(&format!("\u{1b}[1;31merror:\u{1b}[0m {line}"));
}

/// Prints a warning to stderr.
pub(crate) fn warning(line: &str) {
    words(&format!("\u{1b}[1;33mwarning:\u{1b}[0m {line}"));
}

/// Escapes control characters, as the log does, so that text from a sender cannot control the terminal.
pub(crate) fn shown(text: &str) -> String {
    crate::logs::escaped(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_a_sender_cannot_control_the_terminal() {
        let escaped = shown("evt_1\r\n\u{1b}[2J\u{202e}tset\u{2066} é 漢");
        assert_eq!(escaped, r"evt_1\r\n\u{1b}[2J\u{202e}tset\u{2066} é 漢");
    }
}
