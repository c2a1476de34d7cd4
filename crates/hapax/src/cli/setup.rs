//! `hapax init` and `hapax check-config`.

use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;

use hapax_core::store::HandlerRef;
use serde_json::json;

use super::admin_client;
use super::output::{self, CommandFailure, Exit};
use crate::config::{self, Config, ConfigErrors, Flags};
use crate::statements::{Statements, Unprepared};

/// The hint for statements that the database cannot prepare.
const HINT: &str =
    "correct the statement, or create the table it uses before the first event arrives";

/// `hapax init`.
#[derive(Debug, clap::Args)]
pub(super) struct Init {
    /// The file to write
    #[arg(long, value_name = "FILE", default_value = config::DEFAULT_PATH)]
    config: PathBuf,
}

impl Init {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let path = self.config.display();
        let created = std::fs::OpenOptions::new().write(true).create_new(true).open(&self.config);
        let written = created.and_then(|mut file| {
            file.write_all(config::DEFAULT_TOML.as_bytes())?;
            file.sync_all()
        });
        match written {
            Ok(()) => {
                output::words(&format!(
                    "wrote {path}: add a source to it, then run `hapax check-config`"
                ));
                Ok(Exit::Done)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                output::error(&format!("{path} exists already and was not changed"));
                Ok(Exit::Negative)
            }
            Err(error) => Err(CommandFailure::unreachable(format!("cannot write {path}: {error}"))),
        }
    }
}

/// `hapax check-config`.
#[derive(Debug, clap::Args)]
pub(super) struct CheckConfig {
    /// The config file [env: HAPAX_CONFIG] [default: hapax.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl CheckConfig {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        // The file is named explicitly, so that a missing file is an error and not dev mode.
        let from_env = || std::env::var_os("HAPAX_CONFIG").filter(|path| !path.is_empty());
        let file = self
            .config
            .or_else(|| from_env().map(PathBuf::from))
            .unwrap_or_else(|| PathBuf::from(config::DEFAULT_PATH));
        let checked = config::load_read_only(&Flags { config: Some(file), ..Flags::default() });
        let config = match checked {
            Ok(config) => config,
            Err(errors) => return refused(errors, self.json),
        };
        // Without a database this is only a note: the file may be checked on another machine.
        let unprepared =
            admin_client::run(async { Ok(Statements::of(&config).unprepared().await) })?;
        let unprepared = unprepared.unwrap_or_else(|error| {
            output::words(&format!("the SQL of handlers was not checked: {error}"));
            Vec::new()
        });
        match self.json {
            true => as_json(&config, &unprepared),
            false => as_words(&config, &unprepared),
        }
    }
}

fn as_json(config: &Config, unprepared: &[Unprepared]) -> Result<Exit, CommandFailure> {
    let sources: Vec<_> = config
        .sources
        .iter()
        .map(|configured| {
            let handlers = configured.handlers.iter().map(|handler| handler.name.as_str());
            json!({
                "source": configured.source.name().as_str(),
                "tenant": configured.source.tenant().as_str(),
                "provider": configured.provider,
                "path": configured.path,
                "mode": configured.mode.as_str(),
                "handlers": handlers.collect::<Vec<_>>(),
            })
        })
        .collect();
    let proxies: Vec<_> = config
        .proxies
        .iter()
        .map(|proxy| {
            json!({
                "proxy": proxy.name,
                "listen": proxy.listen.to_string(),
                "upstream": proxy.upstream.to_string(),
            })
        })
        .collect();
    let file = config.file.as_ref().map(|file| file.display().to_string());
    let warnings = &config.warnings;
    output::json(&json!({
        "ok": unprepared.is_empty(),
        "file": file,
        "sources": sources,
        "proxies": proxies,
        "warnings": warnings,
        "errors": unprepared.iter().map(ToString::to_string).collect::<Vec<_>>(),
    }))?;
    Ok(judged(unprepared))
}

fn judged(unprepared: &[Unprepared]) -> Exit {
    if unprepared.is_empty() { Exit::Done } else { Exit::Negative }
}

fn as_words(config: &Config, unprepared: &[Unprepared]) -> Result<Exit, CommandFailure> {
    for configured in &config.sources {
        output::data(&format!("{}  {}", configured.path, configured.provider))?;
    }
    for proxy in &config.proxies {
        output::data(&format!("http://{} -> {}", proxy.listen, proxy.upstream))?;
    }
    for warning in &config.warnings {
        output::warning(warning);
    }
    let file = config.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
    for one in unprepared {
        let HandlerRef { source, handler } = &one.handler;
        let place = format!("{file}: sources.{source}.handlers.{handler}");
        output::error(&format!("{place}: {}\n  hint: {HINT}", one.why));
    }
    if !unprepared.is_empty() {
        return Ok(Exit::Negative);
    }
    let count = config.sources.len();
    let noun = if count == 1 { "source" } else { "sources" };
    let proxies = match config.proxies.len() {
        0 => String::new(),
        1 => ", 1 proxy".to_owned(),
        count => format!(", {count} proxies"),
    };
    output::words(&format!("{file}: ok, {count} {noun}{proxies}"));
    Ok(Exit::Done)
}

fn refused(errors: ConfigErrors, json: bool) -> Result<Exit, CommandFailure> {
    if json {
        let file = errors.file.as_ref().map(|file| file.display().to_string());
        output::json(&json!({ "ok": false, "file": file, "errors": errors.lines() }))?;
    }
    Err(errors.into())
}
