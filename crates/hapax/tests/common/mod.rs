//! Runs the real binary in a controlled environment.
#![allow(dead_code)] // Each test file uses a part of this module.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// A command before it runs.
pub(crate) struct Hapax {
    command: Command,
    stdin: Vec<u8>,
    /// The working directory, unless another is set. This directory is removed afterwards.
    _dir: tempfile::TempDir,
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The binary with these arguments, in an empty directory, without inherited HAPAX_ variables.
pub(crate) fn hapax(args: &[&str]) -> Hapax {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    let dir = tempfile::tempdir().unwrap();
    command.args(args).current_dir(dir.path());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HAPAX_")) {
        command.env_remove(name);
    }
    Hapax { command, stdin: Vec::new(), _dir: dir }
}

impl Hapax {
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn args(mut self, args: &[&str]) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn in_dir(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    pub(crate) fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = bytes.to_vec();
        self
    }

    pub(crate) fn run(mut self) -> Run {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().unwrap();
        // A command that reads no input may exit before the write.
        let _ = child.stdin.take().unwrap().write_all(&self.stdin);
        let output = child.wait_with_output().unwrap();
        Run {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Writes a file and returns its path.
pub(crate) fn write(dir: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}
