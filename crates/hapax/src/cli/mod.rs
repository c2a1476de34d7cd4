//! The command line: what can be asked, and which room answers. Exit codes: 0 done, 1 a negative
//! answer, 2 bad usage or config, 3 could not reach or open what it needs.

mod admin_client;
mod api_types;
mod batch;
mod captured;
mod dead;
mod doctor;
mod events;
mod explain;
mod migrate;
mod output;
mod providers;
mod send;
mod sender;
mod setup;
mod sign;
mod stats;
mod storm;
mod verify;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

pub(crate) use self::output::Exit;
use self::output::Failure;
use crate::config::{self, Flags};
use crate::{logs, serve};

/// Turns at-least-once webhooks into exactly-once effects.
#[derive(Debug, Parser)]
#[command(name = "hapax", version, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 a negative answer (rejected, check failed), \
                        2 bad usage or config, 3 could not reach or open what it needs.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Receive webhooks: verify, deduplicate, make durable, answer. Without a config file: dev mode
    Serve(Flags),
    /// Write a config file with every key explained; never overwrites one
    Init(setup::Init),
    /// Read the config and every secret it names, and say all that is wrong
    CheckConfig(setup::CheckConfig),
    /// List the senders Hapax knows, or show one of them
    Providers(providers::Providers),
    /// Judge a captured request, or a file of them, and explain a failure
    Verify(verify::Verify),
    /// Print the headers that a sender would sign a body with
    Sign(sign::Sign),
    /// Send realistic signed sample events
    Send(send::Send),
    /// Torture an endpoint, any endpoint, with copies at once, late and forged events; exit 1 when a law
    /// of exactly-once is broken
    Storm(storm::Storm),
    /// The double-charge story, live: the same retries to a handler that checks and then acts, and to Hapax
    Demo(storm::Demo),
    /// Look at the events of a running server, replay them, decide about those in review
    #[command(subcommand)]
    Events(events::Events),
    /// Look at dead letters, the jobs that were given up, and run them again
    #[command(subcommand)]
    Dead(dead::Dead),
    /// Tell the story of one event in plain sentences
    Explain(explain::Explain),
    /// Figures of a running server: duplicates, success, processing time, retries, by source
    Stats(stats::Stats),
    /// What needs a person's attention now; exit 1 if anything does
    Alerts(stats::Alerts),
    /// Check config, data directory, disk, database, server and clock
    Doctor(doctor::Doctor),
    /// Bring the tables in a shared PostgreSQL forward, or say how they stand
    Migrate(migrate::Migrate),
    /// Print SQL to run by hand
    #[command(subcommand)]
    Sql(migrate::Sql),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Print the manual page
    Man,
}

/// Reads the command line, does what it says, and answers how that went.
pub(crate) fn run() -> Exit {
    let answer = match Cli::parse().command {
        Command::Serve(flags) => serve(&flags),
        Command::Init(init) => init.run(),
        Command::CheckConfig(check) => check.run(),
        Command::Providers(providers) => providers.run(),
        Command::Verify(verify) => verify.run(),
        Command::Sign(sign) => sign.run(),
        Command::Send(send) => send.run(),
        Command::Storm(storm) => storm.run(),
        Command::Demo(demo) => demo.run(),
        Command::Events(events) => events.run(),
        Command::Dead(dead) => dead.run(),
        Command::Explain(explain) => explain.run(),
        Command::Stats(stats) => stats.run(),
        Command::Alerts(alerts) => alerts.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Migrate(migrate) => migrate.run(),
        Command::Sql(sql) => sql.run(),
        Command::Completions { shell } => completions(shell),
        Command::Man => man(),
    };
    answer.unwrap_or_else(|failure| {
        failure.report();
        failure.exit
    })
}

fn serve(flags: &Flags) -> Result<Exit, Failure> {
    let config = config::load(flags)?;
    let failed = |error: anyhow::Error| Failure::unreachable(format!("{error:#}"));
    let _writes_the_last_lines = logs::start(&config.settings.log).map_err(failed)?;
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    serve::run(config).map_err(failed)?;
    Ok(Exit::Done)
}

fn completions(shell: Shell) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "hapax", &mut script);
    print(&script)
}

/// Every page, one after the other: that of the program, and one for each command that the others
/// name.
fn man() -> Result<Exit, Failure> {
    let mut pages = Vec::new();
    write_pages(&Cli::command(), "hapax", &mut pages)?;
    print(&pages)
}

/// `name` is that of the page. It lives as long as the process, as clap wants it, which ends after this.
fn write_pages(
    command: &clap::Command,
    name: &'static str,
    pages: &mut Vec<u8>,
) -> std::io::Result<()> {
    let command = command.clone().disable_help_subcommand(true).name(name);
    let page = command.clone().bin_name(name.replace('-', " "));
    clap_mangen::Man::new(page).title(name).render(pages)?;
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        let name = format!("{name}-{}", subcommand.get_name()).leak();
        write_pages(subcommand, name, pages)?;
    }
    Ok(())
}

fn print(bytes: &[u8]) -> Result<Exit, Failure> {
    output::data(String::from_utf8_lossy(bytes).trim_end())?;
    Ok(Exit::Done)
}
