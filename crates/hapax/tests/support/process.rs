//! A program of a test, such as an example: started, signalled and killed for real, or made to
//! abort at a named point.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::Lines;
use super::load::Load;

/// A running program that has printed its address; it gets a SIGKILL when dropped.
pub(crate) struct Process {
    child: Child,
    /// Its output.
    pub(crate) stdout: Lines,
    pub(crate) address: SocketAddr,
}

impl Process {
    /// Starts the program and waits for its line `app ready: ADDRESS`.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let stdout = Lines::of(child.stdout.take().unwrap());
        let ready = stdout.wait_for("app ready: ");
        let address = ready.rsplit([' ', '/']).next().unwrap().parse().unwrap();
        Self { child, stdout, address }
    }

    pub(crate) fn signal(&self, name: &str) {
        let script = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        assert!(self.stdout.wait_for_end(), "it did not stop");
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How often a failpoint was passed. The build for crash tests appends a line to the file at each
/// pass.
pub(crate) fn hits(file: &Path, point: &str) -> usize {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().filter(|line| *line == point).count()
}

/// The points at which a Rust handler can be aborted.
pub(crate) const POINTS_OF_RUST: [&str; 6] = [
    "ingress.after_commit_before_ack",
    "code.before_handler",
    "code.mid_commit",
    "code.before_commit",
    "code.after_commit",
    "code.after_handler",
];

const SIGABRT: i32 = 6;

/// Starts a program with these variables and sends it `load`. The program must abort at the `at`-th
/// hit of `point`, and the file of hits must show it.
pub(crate) fn dies_at(
    point: &str,
    at: usize,
    hit_file: &Path,
    load: &mut Load,
    start: impl FnOnce(&[(&str, &str)]) -> Process,
) {
    let before = hits(hit_file, point);
    let plan = format!("{point}=abort@{at}");
    let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
    let mut dies = start(&[("HAPAX_FAILPOINTS", &plan), hits_to]);
    load.send(dies.address, |_| {
        assert_eq!(dies.wait().signal(), Some(SIGABRT), "{point}@{at}");
    });
    assert_eq!(hits(hit_file, point) - before, at, "{point}");
}
