//! A Python that the examples can run in.

use std::process::Command;

/// A Python with psycopg 3, or why the app cannot run here.
pub(crate) fn with_psycopg() -> Result<String, String> {
    let configured = std::env::var("HAPAX_TEST_PYTHON").ok().filter(|python| !python.is_empty());
    let known = configured.into_iter().chain(["python3".to_owned(), "/usr/bin/python3".to_owned()]);
    let has_psycopg = |python: &String| {
        let ran = Command::new(python).args(["-c", "import psycopg"]).output();
        ran.is_ok_and(|ran| ran.status.success())
    };
    known.into_iter().find(has_psycopg).ok_or("no python3 here has psycopg 3".to_owned())
}
