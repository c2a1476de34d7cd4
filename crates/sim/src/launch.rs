//! Owns the start of an engine on a port: who takes the port first wins, and whoever lost tries
//! another one. What "ready" means is each engine's own word.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command};

use rustix::process::Signal;

use crate::port;
use crate::supervisor::{self, Supervisor};

/// An engine that runs, and the port it has for life.
pub(crate) struct Launched {
    pub(crate) child: Child,
    pub(crate) port: u16,
}

/// Starts an engine on the first port that nobody else has taken by then. `ready` is asked with the
/// process id and with what this start has logged: never over the network, where somebody else's
/// engine might answer on that port.
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

/// Starts an engine again where it was before.
pub(crate) async fn restart(
    supervisor: &Supervisor,
    command: Command,
    ready: impl Fn(u32, &str) -> bool,
) -> io::Result<Child> {
    let child = start(supervisor, command, &ready).await?;
    child.ok_or_else(|| io::Error::other("its port was taken meanwhile"))
}

/// Where an engine's words go.
pub(crate) fn log_file(supervisor: &Supervisor) -> PathBuf {
    supervisor.folder().join("log")
}

/// All that an engine has logged.
pub(crate) fn log(supervisor: &Supervisor) -> String {
    fs::read_to_string(log_file(supervisor)).unwrap_or_default()
}

/// Nothing when the port was taken.
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
