//! Reads a whole configuration: finds the file, walks its sections and collects every problem.

use std::path::{Path, PathBuf};

use hapax_core::Timestamp;
use hapax_core::handler::Dialect;
use hapax_core::secret::Secret;

use super::document::{self, Section};
use super::overrides::Flags;
use super::problem::{ConfigErrors, ConfigProblems, InvalidSetting};
use super::secrets;
use super::settings::Settings;
use super::{Config, DEFAULT_PATH};

/// The inputs of a configuration besides its file; tests pass their own.
pub(crate) struct Environment<'w> {
    /// Looks up an environment variable.
    pub(crate) env: &'w dyn Fn(&str) -> Option<String>,
    /// The clock, to find secrets that have expired.
    pub(crate) now: Timestamp,
    /// Whether no file may be created; dev mode then has no sources.
    pub(crate) read_only: bool,
}

impl Environment<'static> {
    /// The environment of this process.
    pub(super) fn real(read_only: bool) -> Self {
        Self { env: &|name| std::env::var(name).ok(), now: Timestamp::now(), read_only }
    }
}

pub(super) const ROOT_KEYS: [&str; 27] = [
    "listen",
    "admin_listen",
    "admin_open",
    "admin_url",
    "admin_tls",
    "public_url",
    "trusted_proxies",
    "data_dir",
    "database_url",
    "handlers_database_url",
    "redis_url",
    "roles",
    "max_body",
    "max_connections",
    "header_timeout",
    "body_timeout",
    "drain",
    "log",
    "tls",
    "tokens",
    "retention",
    "alerts",
    "sources",
    "proxies",
    "outbound",
    "vault",
    "portal",
];

/// Reads one configuration and collects problems, warnings and files.
pub(super) struct ConfigReader<'w> {
    pub(super) environment: &'w Environment<'w>,
    /// The text of the file, to find lines inside its values.
    pub(super) text: &'w str,
    /// The dialect of the SQL of handlers.
    pub(super) dialect: Dialect,
    pub(super) problems: ConfigProblems,
    pub(super) watched: Vec<PathBuf>,
    pub(super) warnings: Vec<String>,
}

pub(super) fn load_in(
    flags: &Flags,
    environment: &Environment<'_>,
) -> Result<Config, ConfigErrors> {
    let (file, text) = find_file(flags, environment)?;
    let mut reader = ConfigReader::new(environment, &text);
    reader.watched.extend(file.clone());
    let config = reader.config(flags, file.as_deref(), &text);
    match config {
        Some(config) if reader.problems.is_empty() => Ok(config),
        Some(_) | None => Err(reader.problems.into_errors(file.as_deref(), &text)),
    }
}

/// Reads the config file. A named file must exist; if the default one is missing, that is dev mode.
pub(super) fn find_file(
    flags: &Flags,
    environment: &Environment<'_>,
) -> Result<(Option<PathBuf>, String), ConfigErrors> {
    let from_env = || (environment.env)("HAPAX_CONFIG").filter(|path| !path.is_empty());
    let named = flags.config.clone().or_else(|| from_env().map(PathBuf::from));
    let is_named = named.is_some();
    let path = named.unwrap_or_else(|| PathBuf::from(DEFAULT_PATH));
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok((Some(path), text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_named => {
            Ok((None, String::new()))
        }
        Err(error) => Err(ConfigErrors::whole(
            Some(&path),
            InvalidSetting::new(
                format!("cannot read the config file: {error}"),
                "pass the file with --config, or write one with `hapax init`",
            ),
        )),
    }
}

impl<'w> ConfigReader<'w> {
    pub(super) fn new(environment: &'w Environment<'w>, text: &'w str) -> Self {
        Self {
            environment,
            text,
            dialect: Dialect::Sqlite,
            problems: ConfigProblems::default(),
            watched: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

impl ConfigReader<'_> {
    /// Reads everything. `None` only if the file is not TOML; otherwise the result is valid only if there
    /// are no problems.
    fn config(&mut self, flags: &Flags, file: Option<&Path>, text: &str) -> Option<Config> {
        let document = document::parse(text, &mut self.problems)?;
        let root = Section::root(&document);
        root.expect(&ROOT_KEYS, &mut self.problems);

        let mut settings = Settings::default();
        self.apply_file(&root, &mut settings);
        self.apply_overrides(flags, &mut settings, |_| true);
        // This holds for an invalid URL too, so that its error is not repeated for each statement.
        if self.set_at(&root, flags, "database_url").is_some() {
            self.dialect = Dialect::Postgres;
        }
        self.check_sqlite_settings(&root, flags, &settings);
        let tokens = self.tokens(&root);
        let tls = self.tls(&root, "tls");
        let admin_tls = self.tls(&root, "admin_tls");
        self.check_admin_access(&root, flags, &settings, &tokens);

        let (sources, dev) = match file {
            Some(_) => (self.sources(&root, &settings), None),
            None => self.dev_mode(&mut settings),
        };
        let proxies = self.proxies(&root, &settings);
        let portal = self.portal(&root, &settings, &proxies);
        let vault = self.vault(&root, &settings, file.is_none());
        self.check_outbound(&settings);
        if file.is_some() {
            self.check_claim_tokens(&tokens, &sources.templates);
        }
        let own_token = file.and_then(|_| self.own_token(&settings, &tokens));
        self.watched.sort();
        self.watched.dedup();
        Some(Config {
            settings,
            tls,
            admin_tls,
            tokens,
            own_token,
            sources: sources.pairs,
            templates: sources.templates,
            proxies,
            portal,
            vault,
            dev,
            file: file.map(Path::to_owned),
            warnings: std::mem::take(&mut self.warnings),
            flags: flags.clone(),
            watched: std::mem::take(&mut self.watched),
        })
    }

    /// Reads a secret and adds its file to the watched ones.
    pub(super) fn secret(&mut self, entry: &document::Entry<'_>) -> Option<Secret> {
        let env = self.environment.env;
        let resolved = entry.parse(|text| secrets::resolve(text, env), &mut self.problems)?;
        self.watched.extend(resolved.file);
        Some(resolved.secret)
    }
}
