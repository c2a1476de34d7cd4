//! Puts the server together and runs it.

use crate::config::Config;

/// Runs until a signal says stop.
pub(crate) fn run(_config: Config) -> anyhow::Result<()> {
    anyhow::bail!("serving is not built yet")
}
