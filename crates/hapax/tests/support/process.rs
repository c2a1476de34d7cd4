//! A program of a test's own, such as an example: started, signalled and killed for real.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::Lines;

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
