//! The command line: one module for each command. Exit codes: 0 done, 1 a negative answer, 2 bad usage
//! or config, 3 could not reach or open what it needs.

mod admin_client;
mod alerts;
mod batch;
mod captured;
mod dead;
mod demo;
mod doctor;
mod endpoints;
mod events;
mod explain;
mod handlers;
mod listen;
mod lists;
mod messages;
mod migrate;
mod output;
mod plans;
mod providers;
mod rejections;
mod send;
mod sender;
mod setup;
mod sign;
mod stats;
mod storm;
mod tenants;
mod verify;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

use self::output::CommandFailure;
pub(crate) use self::output::Exit;
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
    /// Run the server: verify webhooks, deduplicate them, store them and run their handlers. Without a
    /// config file it runs in dev mode
    Serve(Flags),
    /// Write a config file that explains every key; an existing file is never overwritten
    Init(setup::Init),
    /// Check the config file, the secrets it names and the SQL of handlers; report every error
    CheckConfig(setup::CheckConfig),
    /// List the webhook senders that Hapax knows, or describe one of them
    Providers(providers::Providers),
    /// Verify a captured request, or a file of them, and explain why one is rejected
    Verify(verify::Verify),
    /// Sign a body as a sender would, and print the headers
    Sign(sign::Sign),
    /// Send realistic signed sample events
    Send(send::Send),
    /// Test any endpoint for exactly-once: concurrent copies, late and forged events. Exit 1 if a law is
    /// broken
    Storm(storm::StormArgs),
    /// Show a double charge: the same retries go to a check-then-act handler and to Hapax
    Demo(demo::Demo),
    /// List, show and replay the events of a running server; decide about events in review
    #[command(subcommand)]
    Events(events::Events),
    /// List, replay and discard dead letters: jobs whose retries are exhausted
    #[command(subcommand)]
    Dead(dead::Dead),
    /// List, pause and resume the handlers of a running server
    #[command(subcommand)]
    Handlers(handlers::Handlers),
    /// List the last requests of a source that were refused, with the reason of each
    Rejections(rejections::Rejections),
    /// Publish a message to every endpoint that wants it
    Publish(messages::Publish),
    /// List, show, replay and cancel published messages
    #[command(subcommand)]
    Messages(messages::Messages),
    /// List, show and replay deliveries: one message for one endpoint
    #[command(subcommand)]
    Deliveries(messages::Deliveries),
    /// Add, list, change and remove the endpoints that messages are delivered to
    #[command(subcommand)]
    Endpoints(endpoints::Endpoints),
    /// List, show and cancel plans over many deliveries or events
    #[command(subcommand)]
    Replays(plans::Replays),
    /// Set, show and remove the secrets of tenants at run time
    #[command(subcommand)]
    Tenants(tenants::Tenants),
    /// Run a local endpoint that prints each delivery and whether its signature is valid
    Listen(listen::Listen),
    /// Explain in sentences what happened to one event, and why
    Explain(explain::Explain),
    /// Show statistics of a running server by source: duplicates, success rate, processing time, retries
    Stats(stats::Stats),
    /// Show what needs attention now, exit 1 if anything does; silence an alert, or send a test alert
    Alerts(alerts::Alerts),
    /// Check the config, data directory, disk, database, server and clock
    Doctor(doctor::Doctor),
    /// Show or apply the schema migrations of a shared PostgreSQL
    Migrate(migrate::Migrate),
    /// Print SQL for you to run
    #[command(subcommand)]
    Sql(migrate::Sql),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page
    Man,
}

/// Runs the command that the command line names.
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
        Command::Handlers(handlers) => handlers.run(),
        Command::Rejections(rejections) => rejections.run(),
        Command::Publish(publish) => publish.run(),
        Command::Messages(messages) => messages.run(),
        Command::Deliveries(deliveries) => deliveries.run(),
        Command::Endpoints(endpoints) => endpoints.run(),
        Command::Replays(replays) => replays.run(),
        Command::Tenants(tenants) => tenants.run(),
        Command::Listen(listen) => listen.run(),
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

fn serve(flags: &Flags) -> Result<Exit, CommandFailure> {
    let config = config::load(flags)?;
    let failed = |error: anyhow::Error| CommandFailure::unreachable(format!("{error:#}"));
    let _writes_the_last_lines = logs::start(&config.settings.log).map_err(failed)?;
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    serve::run(config).map_err(failed)?;
    Ok(Exit::Done)
}

fn completions(shell: Shell) -> Result<Exit, CommandFailure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "hapax", &mut script);
    print(&script)
}

/// Every manual page: one for the program, and one for each command.
fn man() -> Result<Exit, CommandFailure> {
    let mut pages = Vec::new();
    write_pages(&Cli::command(), "hapax", &mut pages)?;
    print(&pages)
}

/// `name` is the name of the page. clap needs it to be `'static`, so it is leaked; the process ends after
/// this.
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

fn print(bytes: &[u8]) -> Result<Exit, CommandFailure> {
    output::data(String::from_utf8_lossy(bytes).trim_end())?;
    Ok(Exit::Done)
}
