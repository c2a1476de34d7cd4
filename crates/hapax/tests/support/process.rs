//! A program of a test's own, such as an example: started, signalled and killed for real, or made to
//! die at a named point.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::Lines;
use super::load::Load;

/// It listens somewhere and has said so; it gets a SIGKILL when dropped.
pub(crate) struct Process {
    child: Child,
    /// What it prints.
    pub(crate) stdout: Lines,
    pub(crate) address: SocketAddr,
}

impl Process {
    /// Starts it and waits for its line `app ready: ADDRESS`.
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

/// How often a named point was passed, as the build for crash tests writes it to a file.
pub(crate) fn hits(file: &Path, point: &str) -> usize {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().filter(|line| *line == point).count()
}

/// Where a handler in Rust can die.
pub(crate) const POINTS_OF_RUST: [&str; 6] = [
    "ingress.after_commit_before_ack",
    "code.before_handler",
    "code.mid_commit",
    "code.before_commit",
    "code.after_commit",
    "code.after_handler",
];

const SIGABRT: i32 = 6;

/// A program, started with these variables, gets `load` and dies when it is at `point` for the time
/// `at`, which the file of hits must show.
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
