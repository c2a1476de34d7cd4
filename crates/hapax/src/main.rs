//! `hapax`: turns at-least-once webhooks into exactly-once effects. The binary is thin: [`cli`]
//! reads the command, [`config`] the settings, [`serve`] runs the server.

mod cli;
// Much of it is there for the server to read.
#[allow(dead_code)]
mod config;
mod logs;
mod serve;
mod signing;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run().into()
}
