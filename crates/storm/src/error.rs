//! Why a storm could not run.

/// Why a storm could not be planned, sent or judged. A broken law is not an error.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct StormError {
    /// The party at fault.
    pub kind: StormErrorKind,
    /// The problem in words.
    pub message: String,
    /// How to fix the problem; may be empty.
    pub hint: String,
}

/// The cause of a [`StormError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StormErrorKind {
    /// The arguments describe no valid storm.
    Arguments,
    /// The endpoint or the probe cannot be reached.
    Unreachable,
}

impl StormError {
    pub(crate) fn arguments(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind: StormErrorKind::Arguments, message: message.into(), hint: hint.into() }
    }

    pub(crate) fn unreachable(message: impl Into<String>) -> Self {
        let kind = StormErrorKind::Unreachable;
        Self { kind, message: message.into(), hint: String::new() }
    }
}
