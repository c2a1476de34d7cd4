//! Owns the start of an engine on a port: who takes the port first wins, and whoever lost tries
//! another one. What "ready" means is each engine's own word.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command};

use rustix::process::Signal;

use crate::keeper::{self, Keeper};
use crate::port;

/// An engine that runs, and the port it has for life.
pub(crate) struct Launched {
    pub(crate) child: Child,
    pub(crate) port: u16,
}

/// Starts an engine on the first port that nobody else has taken by then. `ready` is asked with the
/// process id and with what this start has logged: never over the network, where somebody else's
/// engine might answer on that port.
pub(crate) async fn on_a_free_port(
    keeper: &Keeper,
    command: impl Fn(u16) -> io::Result<Command>,
    ready: impl Fn(u32, &str) -> bool,
) -> io::Result<Launched> {
    for _ in 0..port::CLASHES_MAX {
        let port = port::free();
        if let Some(child) = start(keeper, command(port)?, &ready).await? {
            return Ok(Launched { child, port });
        }
    }
    Err(io::Error::other("every port tried was taken"))
}

/// Starts an engine again where it was before.
pub(crate) async fn again(
    keeper: &Keeper,
    command: Command,
    ready: impl Fn(u32, &str) -> bool,
) -> io::Result<Child> {
    let child = start(keeper, command, &ready).await?;
    child.ok_or_else(|| io::Error::other("its port was taken meanwhile"))
}

/// Where an engine's words go.
pub(crate) fn log_file(keeper: &Keeper) -> PathBuf {
    keeper.folder().join("log")
}

/// All that an engine has said.
pub(crate) fn log(keeper: &Keeper) -> String {
    fs::read_to_string(log_file(keeper)).unwrap_or_default()
}

/// Nothing when the port was taken.
async fn start(
    keeper: &Keeper,
    command: Command,
    ready: &impl Fn(u32, &str) -> bool,
) -> io::Result<Option<Child>> {
    let said_before = log(keeper).len();
    let mut child = keeper.spawn(command, &log_file(keeper))?;
    let pid = child.id();
    let up = keeper::wait_for("the engine to accept", || {
        let ended = child.try_wait()?;
        let log = log(keeper);
        let said = log.get(said_before..).unwrap_or_default();
        match ended {
            Some(_) if said.contains("Address already in use") => Ok(Some(false)),
            Some(status) => Err(io::Error::other(format!("{status}: {said}"))),
            None => Ok(ready(pid, said).then_some(true)),
        }
    });
    match up.await {
        Ok(true) => Ok(Some(child)),
        Ok(false) => Ok(None),
        Err(error) => {
            keeper::signal(pid, Signal::KILL);
            Err(error)
        }
    }
}
