//! A Python that the examples can run in.

use std::process::Command;

/// One that has psycopg 3, or why nothing here can run the app.
pub(crate) fn with_psycopg() -> Result<String, String> {
    let told = std::env::var("HAPAX_TEST_PYTHON").ok().filter(|python| !python.is_empty());
    let known = told.into_iter().chain(["python3".to_owned(), "/usr/bin/python3".to_owned()]);
    let has_psycopg = |python: &String| {
        let ran = Command::new(python).args(["-c", "import psycopg"]).output();
        ran.is_ok_and(|ran| ran.status.success())
    };
    known.into_iter().find(has_psycopg).ok_or("no python3 here has psycopg 3".to_owned())
}
