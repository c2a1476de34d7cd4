//! Starts an engine on a free port. If another process takes the port first, the start is repeated on another
//! port. Each engine defines when it is ready.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command};

use rustix::process::Signal;

use crate::port;
use crate::supervisor::{self, Supervisor};

/// A running engine and its port, which it keeps over restarts.
pub(crate) struct Launched {
    pub(crate) child: Child,
    pub(crate) port: u16,
}

/// Starts an engine on a free port. `ready` gets the process id and the log of this start. The check never
/// connects to the port, where another engine might answer.
pub(crate) async fn on_a_free_port(
    supervisor: &Supervisor,
    command: impl Fn(u16) -> io::Result<Command>,
    ready: impl Fn(u32, &str) -> bool,
) -> io::Result<Launched> {
    for _ in 0..port::CLASHES_MAX {
        let port = port::free();
        if let Some(child) = start(supervisor, command(port)?, &ready).await? {
            return Ok(Launched { child, port });
        }
    }
    Err(io::Error::other("every port tried was taken"))
}

/// Starts an engine again on its port.
pub(crate) async fn restart(
    supervisor: &Supervisor,
    command: Command,
    ready: impl Fn(u32, &str) -> bool,
) -> io::Result<Child> {
    let child = start(supervisor, command, &ready).await?;
    child.ok_or_else(|| io::Error::other("its port was taken meanwhile"))
}

/// The log file of an engine.
pub(crate) fn log_file(supervisor: &Supervisor) -> PathBuf {
    supervisor.folder().join("log")
}

/// The log of an engine.
pub(crate) fn log(supervisor: &Supervisor) -> String {
    fs::read_to_string(log_file(supervisor)).unwrap_or_default()
}

/// Starts an engine. Returns `None` if the port was taken.
async fn start(
    supervisor: &Supervisor,
    command: Command,
    ready: &impl Fn(u32, &str) -> bool,
) -> io::Result<Option<Child>> {
    let logged_before = log(supervisor).len();
    let mut child = supervisor.spawn(command, &log_file(supervisor))?;
    let pid = child.id();
    let up = supervisor::wait_for("the engine to accept", || {
        let ended = child.try_wait()?;
        let log = log(supervisor);
        let logged = log.get(logged_before..).unwrap_or_default();
        match ended {
            Some(_) if logged.contains("Address already in use") => Ok(Some(false)),
            Some(status) => Err(io::Error::other(format!("{status}: {logged}"))),
            None => Ok(ready(pid, logged).then_some(true)),
        }
    });
    match up.await {
        Ok(true) => Ok(Some(child)),
        Ok(false) => Ok(None),
        Err(error) => {
            supervisor::signal(pid, Signal::KILL);
            Err(error)
        }
    }
}
