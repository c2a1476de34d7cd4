//! The line that a test prints if it cannot run on this machine. scripts/test counts these lines.

use std::io::{self, Write};

/// Prints the line to stderr directly, since the test harness hides the output of passing tests.
pub fn skip(test: &str, why: &str) {
    // Without a stderr the line is lost.
    let _ = writeln!(io::stderr(), "SKIPPED {test}: {why}");
}
