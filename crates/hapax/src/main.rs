//! `hapax`: turns at-least-once webhooks into exactly-once effects. [`cli`] parses the command, [`config`]
//! reads the settings, [`serve`] runs the server.

mod admin;
mod alerts;
mod api;
mod cli;
mod closed_figures;
mod config;
mod endpoint_recorder;
mod format;
mod logs;
mod rejection_recorder;
mod resealing;
mod sending;
mod serve;
mod signing;
mod statements;
mod story;
mod telemetry;
mod tenant_sources;
mod traffic_recorder;
mod verifier_names;

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::run().into()
}
