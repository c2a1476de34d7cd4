//! The configuration: flags over environment over file over defaults, read once into a [`Config`]
//! that is checked to the last secret, or into [`ConfigErrors`] that name every problem and its line.
//!
//! [`document`] walks the TOML, [`units`] knows the values, [`secrets`] where secrets come from,
//! [`sources`] builds what verifies, [`handlers`] what works, [`proxies`] what stands in front of an
//! app, [`shared`] what nodes share, [`dev`] is what happens without a file.

mod alerts;
mod dev;
mod document;
mod handlers;
mod order;
mod problem;
mod proxies;
mod refetch;
mod secret_file;
mod secrets;
mod shared;
mod sources;
mod suggest;
mod tls;
pub(crate) mod units;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::handler::{Dialect, HandlerKind};
use hapax_core::secret::Secret;
use hapax_engine::tls::Certificate;
use ipnet::IpNet;

pub(crate) use self::alerts::Alerts;
pub(crate) use self::dev::DevMode;
use self::document::Section;
pub(crate) use self::handlers::Mode;
pub(crate) use self::problem::{ConfigErrors, InvalidSetting};
use self::problem::{ConfigProblems, Origin};
pub(crate) use self::proxies::{Proxy, Scope};
use self::secret_file::SecretKind;
use self::secrets::Resolved;
pub(crate) use self::secrets::resolve as resolve_secret;
pub(crate) use self::shared::{Role, Roles, ServiceUrl};
pub(crate) use self::sources::ConfiguredSource;
pub(crate) use self::units::Keep;
use crate::logs;

/// The file that `init` writes: every key explained, every default spelled out.
pub(crate) const DEFAULT_TOML: &str = include_str!("../hapax.default.toml");

/// The config file that is read where none is named.
pub(crate) const DEFAULT_PATH: &str = "hapax.toml";

/// The file in the data dir that holds the token of a server whose config has none.
pub(crate) const ADMIN_TOKEN_FILE: &str = "admin.token";

/// Shorter tokens could be guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// Settings given on the command line; each one beats the environment and the file.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Flags {
    /// The config file [env: HAPAX_CONFIG] [default: hapax.toml if it is there]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Where the database and the dev secret are kept [env: HAPAX_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<String>,
    /// Address of the public side, where webhooks arrive [env: HAPAX_LISTEN]
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<String>,
    /// Address of the admin side: API, metrics, health [env: HAPAX_ADMIN_LISTEN]
    #[arg(long, value_name = "ADDR")]
    pub(crate) admin_listen: Option<String>,
    /// The public side's URL as senders write it [env: HAPAX_PUBLIC_URL]
    #[arg(long, value_name = "URL")]
    pub(crate) public_url: Option<String>,
    /// off, error, warn, info, debug, trace, or directives such as hapax=debug [env: HAPAX_LOG]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
    /// human or json [env: HAPAX_LOG_FORMAT]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) log_format: Option<String>,
    /// The PostgreSQL that nodes share [env: HAPAX_DATABASE_URL, which other users cannot see]
    #[arg(long, value_name = "URL", value_parser = parse_secret)]
    pub(crate) database_url: Option<Secret>,
    /// A Redis in front of PostgreSQL [env: HAPAX_REDIS_URL, which other users cannot see]
    #[arg(long, value_name = "URL", value_parser = parse_secret)]
    pub(crate) redis_url: Option<Secret>,
    /// What this process does, some of ingress,worker,sender,admin [env: HAPAX_ROLES] [default: all]
    #[arg(long, value_name = "ROLES")]
    pub(crate) roles: Option<String>,
}

/// Kept so that it cannot be printed.
fn parse_secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret::new(text))
}

/// A checked configuration.
#[derive(Debug)]
pub(crate) struct Config {
    /// Everything that is not a secret, a certificate or a source.
    pub(crate) settings: Settings,
    /// TLS on the public side.
    pub(crate) tls: Option<Arc<Certificate>>,
    /// Who may use the admin side.
    pub(crate) tokens: Vec<Token>,
    /// Where the server keeps a token of its own, because the config has none.
    own_token: Option<PathBuf>,
    /// What answers on the public side: one for each (tenant, source) pair.
    pub(crate) sources: Vec<ConfiguredSource>,
    /// What answers in front of an app.
    pub(crate) proxies: Vec<Proxy>,
    /// Set where there is no config file.
    pub(crate) dev: Option<DevMode>,
    /// The config file, where there is one.
    pub(crate) file: Option<PathBuf>,
    /// Not wrong, but worth a look; each is one line.
    pub(crate) warnings: Vec<String>,
    flags: Flags,
    watched: Vec<PathBuf>,
}

/// The settings that have a default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The public side.
    pub(crate) listen: SocketAddr,
    /// The admin side.
    pub(crate) admin_listen: SocketAddr,
    /// Whether requests from this machine need no token. Dev mode is open without it.
    pub(crate) admin_open: bool,
    /// What senders see, without a slash at the end. In dev mode it is made of `listen`; where that
    /// has port 0, whoever binds the port knows better.
    pub(crate) public_url: Option<String>,
    /// Whose `X-Forwarded-For` is believed.
    pub(crate) trusted_proxies: Vec<IpNet>,
    /// Where the embedded database is.
    pub(crate) data_dir: PathBuf,
    /// The PostgreSQL that nodes share, instead of the embedded database.
    pub(crate) database_url: Option<ServiceUrl>,
    /// The same database, as the role that SQL and Rust handlers work as.
    pub(crate) handlers_database_url: Option<ServiceUrl>,
    /// A Redis in front of it.
    pub(crate) redis_url: Option<ServiceUrl>,
    /// What this process does.
    pub(crate) roles: Roles,
    /// The largest body taken.
    pub(crate) max_body_bytes: usize,
    /// The most connections to the public side at once.
    pub(crate) max_connections: usize,
    /// How long a request's headers may take.
    pub(crate) header_timeout: Duration,
    /// How long a request's body may take.
    pub(crate) body_timeout: Duration,
    /// How long a stop waits for what was accepted.
    pub(crate) drain: Duration,
    /// How to log.
    pub(crate) log: LogSettings,
    /// How long things are kept.
    pub(crate) retention: Retention,
    /// From when on something is worth a person's attention.
    pub(crate) alerts: Alerts,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogSettings {
    /// For people or for machines.
    pub(crate) format: LogFormat,
    /// What is logged: a level, or directives.
    pub(crate) level: String,
}

/// Who reads the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// People.
    Human,
    /// Machines: one JSON object a line.
    Json,
}

/// `[retention]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retention {
    /// How long a duplicate is recognised; `None` is 90 days, and for ever where the scheme signs no
    /// time. [`ConfiguredSource::keep_keys`] has the answer for each source.
    pub(crate) keys: Option<Keep>,
    /// Bodies and history.
    pub(crate) events: Keep,
}

/// Ninety days: longer than any sender's retries.
const KEEP_DEFAULT: Keep = Keep::For(hapax::limits::KEEP_DEFAULT);

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 8081)),
            admin_open: false,
            public_url: None,
            trusted_proxies: Vec::new(),
            data_dir: PathBuf::from("hapax-data"),
            database_url: None,
            handlers_database_url: None,
            redis_url: None,
            roles: Roles::default(),
            max_body_bytes: 1 << 20,
            max_connections: 4096,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            drain: Duration::from_secs(30),
            log: LogSettings { format: LogFormat::Human, level: "info".to_owned() },
            retention: Retention { keys: None, events: KEEP_DEFAULT },
            alerts: Alerts::default(),
        }
    }
}

/// `[tokens.NAME]`.
#[derive(Debug)]
pub(crate) struct Token {
    /// Recorded with every action.
    pub(crate) name: String,
    /// What the caller must show.
    pub(crate) value: Secret,
    /// What it is good for.
    pub(crate) allow: Vec<Permission>,
}

/// What a token is good for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Permission {
    /// Everything.
    Admin,
    /// Looking.
    Read,
    /// Looking, at what is masked for others too.
    Payload,
    /// Looking, replaying, approving.
    Operate,
    /// Publishing messages.
    Publish,
    /// Claiming the jobs of one handler.
    Claim {
        /// The source.
        source: String,
        /// Its handler.
        handler: String,
    },
}

/// What a configuration is read from beside its file: passed in, so that tests have their own.
pub(crate) struct Environment<'w> {
    /// Looks up an environment variable.
    pub(crate) env: &'w dyn Fn(&str) -> Option<String>,
    /// Tells secrets that have ended from those that have not.
    pub(crate) now: Timestamp,
    /// Whether nothing may be written: then dev mode has no sources.
    pub(crate) read_only: bool,
}

impl Environment<'static> {
    /// The one around this process.
    fn real(read_only: bool) -> Self {
        Self { env: &|name| std::env::var(name).ok(), now: Timestamp::now(), read_only }
    }
}

/// Reads and checks the configuration. In dev mode this makes the dev secret, if it is not there.
pub(crate) fn load(flags: &Flags) -> Result<Config, ConfigErrors> {
    load_in(flags, &Environment::real(false))
}

/// The same for those who do not serve: nothing is made, and without a file there are no sources.
pub(crate) fn load_read_only(flags: &Flags) -> Result<Config, ConfigErrors> {
    load_in(flags, &Environment::real(true))
}

/// Where a server is, as far as its config says so, for those who talk to it.
#[derive(Debug)]
pub(crate) struct ServerLocation {
    /// The admin side.
    pub(crate) admin_listen: SocketAddr,
    /// The data directory.
    pub(crate) data_dir: PathBuf,
    /// The config file, where there is one.
    pub(crate) file: Option<PathBuf>,
}

/// Reads where a server is. Nothing else of the config is looked at, so no secret need be there.
pub(crate) fn server_location(flags: &Flags) -> Result<ServerLocation, ConfigErrors> {
    let environment = Environment::real(true);
    let (file, text) = find_file(flags, &environment)?;
    let mut reader = ConfigReader::new(&environment, &text);
    let mut settings = Settings::default();
    if let Some(document) = document::parse(&text, &mut reader.problems) {
        for entry in Section::root(&document).entries() {
            if let key @ ("admin_listen" | "data_dir") = entry.name() {
                entry.parse(|text| settings.set(key, text), &mut reader.problems);
            }
        }
    }
    let of_interest = |key: &str| matches!(key, "admin_listen" | "data_dir");
    reader.apply_overrides(flags, &mut settings, of_interest);
    if !reader.problems.is_empty() {
        return Err(reader.problems.into_errors(file.as_deref(), &text));
    }
    let Settings { admin_listen, data_dir, .. } = settings;
    Ok(ServerLocation { admin_listen, data_dir, file })
}

/// Reads which PostgreSQL is shared. No other key or secret of the config is looked at.
pub(crate) fn database_url(flags: &Flags) -> Result<Option<ServiceUrl>, ConfigErrors> {
    let environment = Environment::real(true);
    let (file, text) = find_file(flags, &environment)?;
    let mut reader = ConfigReader::new(&environment, &text);
    let mut settings = Settings::default();
    reader.apply_overrides(flags, &mut settings, |key| key == "database_url");
    if let Some(document) = document::parse(&text, &mut reader.problems)
        && settings.database_url.is_none()
        && let Some(entry) = Section::root(&document).get("database_url")
        && let Some(secret) = reader.secret(&entry)
        && let Err(invalid) = settings.set("database_url", secret.expose())
    {
        entry.report(invalid, &mut reader.problems);
    }
    match reader.problems.is_empty() {
        true => Ok(settings.database_url),
        false => Err(reader.problems.into_errors(file.as_deref(), &text)),
    }
}

/// The token that the server with this data dir made for itself, if it did and we may read it.
pub(crate) fn admin_token(data_dir: &Path) -> Option<Secret> {
    secret_file::read(&data_dir.join(ADMIN_TOKEN_FILE), SecretKind::AdminToken).ok()
}

/// Whether a secret is a dev secret, from which each sender's own is derived.
pub(crate) fn is_dev_secret(secret: &Secret) -> bool {
    SecretKind::DevSecret.has_form_of(secret)
}

/// The dev secret of a server that ran with this data dir before, if there is one.
pub(crate) fn dev_secret(data_dir: &Path) -> Option<Secret> {
    secret_file::read(&data_dir.join(dev::SECRET_FILE), SecretKind::DevSecret).ok()
}

impl Config {
    /// Reads everything again, with the same flags. A file that is gone is an error: without it the
    /// sources would silently become those of dev mode.
    pub(crate) fn reload(&self) -> Result<Self, ConfigErrors> {
        match &self.file {
            Some(file) => load(&Flags { config: Some(file.clone()), ..self.flags.clone() }),
            None => load(&self.flags),
        }
    }

    /// Whether a server with this config keeps a token of its own in the data directory.
    pub(crate) fn keeps_own_token(&self) -> bool {
        self.own_token.is_some()
    }

    /// Reads the server's own token, where it needs one, and makes it at the first start: for servers
    /// only, and once what they need is open, so that a start that fails leaves nothing behind.
    pub(crate) fn take_own_token(&mut self) -> Result<(), InvalidSetting> {
        let Some(file) = &self.own_token else { return Ok(()) };
        let value = secret_file::read_or_make(file, SecretKind::AdminToken)?;
        let (name, allow) = (ADMIN_TOKEN_FILE.to_owned(), vec![Permission::Admin]);
        self.tokens = vec![Token { name, value, allow }];
        Ok(())
    }

    /// The files that were read: config, secrets, certificates. A change to one is worth a reload.
    pub(crate) fn watched_files(&self) -> &[PathBuf] {
        &self.watched
    }

    /// The keys that differ from `newer` but only take effect at a start.
    pub(crate) fn needs_restart(&self, newer: &Self) -> Vec<String> {
        let (old, new) = (&self.settings, &newer.settings);
        let differs = [
            ("listen", old.listen != new.listen),
            ("admin_listen", old.admin_listen != new.admin_listen),
            ("data_dir", old.data_dir != new.data_dir),
            ("database_url", old.database_url != new.database_url),
            ("handlers_database_url", old.handlers_database_url != new.handlers_database_url),
            ("redis_url", old.redis_url != new.redis_url),
            ("roles", old.roles != new.roles),
            ("max_connections", old.max_connections != new.max_connections),
            ("log", old.log != new.log),
        ];
        let differs = differs.into_iter().filter(|(_, differs)| *differs);
        differs.map(|(key, _)| key.to_owned()).chain(self.proxies_moved(newer)).collect()
    }

    /// Listeners are opened and closed at a start only.
    fn proxies_moved(&self, newer: &Self) -> Vec<String> {
        let names = |of: &Self| of.proxies.iter().map(|it| it.name.clone()).collect::<Vec<_>>();
        let at = |of: &Self, name: &str| {
            of.proxies.iter().find(|it| it.name == name).map(|it| it.listen)
        };
        let mut all = [names(self), names(newer)].concat();
        all.sort();
        all.dedup();
        let moved = |name: &String| match (at(self, name), at(newer, name)) {
            (Some(old), Some(new)) if old == new => None,
            (Some(_), Some(_)) => Some(format!("proxies.{name}.listen")),
            (Some(_), None) | (None, Some(_)) | (None, None) => Some(format!("proxies.{name}")),
        };
        all.iter().filter_map(moved).collect()
    }
}

/// Settings that the environment and flags can replace: key, variable, flag.
const OVERRIDABLE: [(&str, &str, &str); 17] = [
    ("listen", "HAPAX_LISTEN", "--listen"),
    ("admin_listen", "HAPAX_ADMIN_LISTEN", "--admin-listen"),
    ("admin_open", "HAPAX_ADMIN_OPEN", ""),
    ("public_url", "HAPAX_PUBLIC_URL", "--public-url"),
    ("trusted_proxies", "HAPAX_TRUSTED_PROXIES", ""),
    ("data_dir", "HAPAX_DATA_DIR", "--data-dir"),
    ("database_url", "HAPAX_DATABASE_URL", "--database-url"),
    ("handlers_database_url", "HAPAX_HANDLERS_DATABASE_URL", ""),
    ("redis_url", "HAPAX_REDIS_URL", "--redis-url"),
    ("roles", "HAPAX_ROLES", "--roles"),
    ("max_body", "HAPAX_MAX_BODY", ""),
    ("max_connections", "HAPAX_MAX_CONNECTIONS", ""),
    ("header_timeout", "HAPAX_HEADER_TIMEOUT", ""),
    ("body_timeout", "HAPAX_BODY_TIMEOUT", ""),
    ("drain", "HAPAX_DRAIN", ""),
    ("log.level", "HAPAX_LOG", "--log-level"),
    ("log.format", "HAPAX_LOG_FORMAT", "--log-format"),
];

const ROOT_KEYS: [&str; 22] = [
    "listen",
    "admin_listen",
    "admin_open",
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
];
const ROOT_LATER: [&str; 1] = ["outbound"];

/// Where a setting was set.
struct SetAt {
    origin: Origin,
    /// The key, where the place does not name it.
    key: &'static str,
}

/// What a load has found so far.
struct ConfigReader<'w> {
    environment: &'w Environment<'w>,
    /// The file, to find lines inside its values.
    text: &'w str,
    /// In which the SQL of handlers is read.
    dialect: Dialect,
    problems: ConfigProblems,
    watched: Vec<PathBuf>,
    warnings: Vec<String>,
}

pub(crate) fn load_in(
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

/// A named file must be there; the default one may be missing, and then it is dev mode.
fn find_file(
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
                "name a file with --config, or write one with `hapax init`",
            ),
        )),
    }
}

impl<'w> ConfigReader<'w> {
    fn new(environment: &'w Environment<'w>, text: &'w str) -> Self {
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
    /// `None` only where the file is not TOML at all; otherwise whatever could be read, which counts
    /// only if there were no problems.
    fn config(&mut self, flags: &Flags, file: Option<&Path>, text: &str) -> Option<Config> {
        let document = document::parse(text, &mut self.problems)?;
        let root = Section::root(&document);
        root.expect(&ROOT_KEYS, &ROOT_LATER, &mut self.problems);

        let mut settings = Settings::default();
        self.apply_file(&root, &mut settings);
        self.apply_overrides(flags, &mut settings, |_| true);
        // Also where the URL is wrong: that is one error, and not one for each statement as well.
        if self.set_at(&root, flags, "database_url").is_some() {
            self.dialect = Dialect::Postgres;
        }
        self.check_sqlite_settings(&root, flags, &settings);
        self.check_roles(&root, flags, &settings);
        let tokens = self.tokens(&root);
        let tls = self.tls(&root);
        self.check_admin_access(&root, flags, &settings, &tokens);

        let (sources, dev) = match file {
            Some(_) => (self.sources(&root, &settings), None),
            None => self.dev_mode(&mut settings),
        };
        let proxies = self.proxies(&root, &settings);
        if file.is_some() {
            self.check_claim_tokens(&tokens, &sources);
        }
        let own_token = file.and_then(|_| self.own_token(&settings, &tokens));
        self.watched.sort();
        self.watched.dedup();
        Some(Config {
            settings,
            tls,
            tokens,
            own_token,
            sources,
            proxies,
            dev,
            file: file.map(Path::to_owned),
            warnings: std::mem::take(&mut self.warnings),
            flags: flags.clone(),
            watched: std::mem::take(&mut self.watched),
        })
    }

    fn apply_file(&mut self, root: &Section<'_>, settings: &mut Settings) {
        let problems = &mut self.problems;
        for entry in root.entries() {
            match entry.name() {
                key @ ("listen" | "admin_listen" | "public_url" | "data_dir" | "header_timeout"
                | "body_timeout" | "drain") => {
                    entry.parse(|text| settings.set(key, text), problems);
                }
                key @ ("database_url" | "handlers_database_url" | "redis_url") => {
                    let Some(Resolved { secret, file }) =
                        entry.parse(|text| secrets::resolve(text, self.environment.env), problems)
                    else {
                        continue;
                    };
                    self.watched.extend(file);
                    if let Err(invalid) = settings.set(key, secret.expose()) {
                        entry.report(invalid, problems);
                    }
                }
                "roles" => {
                    let Some(words) = entry.texts(problems) else { continue };
                    match Roles::parse(words) {
                        Ok(roles) => settings.roles = roles,
                        Err(invalid) => entry.report(invalid, problems),
                    }
                }
                "admin_open" => settings.admin_open = entry.flag(problems).unwrap_or(false),
                key @ ("max_body" | "max_connections") => {
                    entry.parse_number(|text| settings.set(key, text), problems);
                }
                "trusted_proxies" => {
                    let nets = entry.list(problems).unwrap_or_default();
                    settings.trusted_proxies =
                        nets.iter().filter_map(|net| net.parse(units::net, problems)).collect();
                }
                "log" => {
                    let Some(log) = entry.section(problems) else { continue };
                    log.expect(&["format", "level"], &[], problems);
                    if let Some(format) = log.get("format") {
                        format.parse(|text| settings.set("log.format", text), problems);
                    }
                    if let Some(level) = log.get("level") {
                        level.parse(|text| settings.set("log.level", text), problems);
                    }
                }
                "alerts" => {
                    let Some(alerts) = entry.section(problems) else { continue };
                    settings.alerts = Alerts::read(&alerts, problems);
                }
                "retention" => {
                    let Some(retention) = entry.section(problems) else { continue };
                    retention.expect(&["keys", "events"], &[], problems);
                    let keys = retention.get("keys");
                    settings.retention.keys =
                        keys.and_then(|keys| keys.parse(units::keep, problems));
                    if let Some(events) = retention.get("events") {
                        let events = events.parse(units::keep, problems);
                        settings.retention.events = events.unwrap_or(KEEP_DEFAULT);
                    }
                }
                // Read on their own, or reported already.
                _section_or_unknown => {}
            }
        }
    }

    /// The environment first, then the flags, so that flags have the last word.
    fn apply_overrides(
        &mut self,
        flags: &Flags,
        settings: &mut Settings,
        wanted: impl Fn(&str) -> bool,
    ) {
        for (key, variable, flag) in OVERRIDABLE.into_iter().filter(|(key, ..)| wanted(key)) {
            let from_env = (self.environment.env)(variable).filter(|text| !text.is_empty());
            let given = match (flags.get(key), from_env) {
                (Some(text), _) => Some((flag, text.to_owned())),
                (None, Some(text)) => Some((variable, text)),
                (None, None) => None,
            };
            if let Some((origin, text)) = given
                && let Err(invalid) = settings.set(key, &text)
            {
                self.problems.add(Origin::Override(origin), "", invalid);
            }
        }
    }

    /// Where a replaceable setting was set, if it was: the place that has the last word.
    fn set_at(&self, root: &Section<'_>, flags: &Flags, key: &'static str) -> Option<SetAt> {
        let (_, variable, flag) = OVERRIDABLE.into_iter().find(|(known, _, _)| *known == key)?;
        if flags.get(key).is_some() {
            return Some(SetAt { origin: Origin::Override(flag), key: "" });
        }
        if (self.environment.env)(variable).is_some_and(|text| !text.is_empty()) {
            return Some(SetAt { origin: Origin::Override(variable), key: "" });
        }
        root.get(key).map(|entry| SetAt { origin: Origin::File(entry.at()), key })
    }

    /// SQLite is one process: what another one would do, nobody would.
    fn check_sqlite_settings(&mut self, root: &Section<'_>, flags: &Flags, settings: &Settings) {
        match self.dialect {
            Dialect::Sqlite => {}
            Dialect::Postgres => return,
        }
        if let Some(SetAt { origin, key }) = self.set_at(root, flags, "redis_url") {
            let invalid = InvalidSetting::new(
                "there is no PostgreSQL for it to stand in front of",
                "set database_url too, or remove this: the embedded database answers duplicates \
                 from memory",
            );
            self.problems.add(origin, key, invalid);
        }
        if let Some(SetAt { origin, key }) = self.set_at(root, flags, "handlers_database_url") {
            let invalid = InvalidSetting::new(
                "there is no PostgreSQL for handlers to work on",
                "set database_url too, or remove this: on the embedded database no handler can \
                 reach a table of Hapax's own",
            );
            self.problems.add(origin, key, invalid);
        }
        let missing: Vec<_> = settings.roles.missing().map(Role::as_str).collect();
        if let Some(SetAt { origin, key }) = self.set_at(root, flags, "roles")
            && !missing.is_empty()
        {
            let invalid = InvalidSetting::new(
                format!("without {}, nobody does that", missing.join(" and ")),
                "the embedded database belongs to one process, which needs every role: remove \
                 this, or set database_url to run roles apart",
            );
            self.problems.add(origin, key, invalid);
        }
    }

    /// A process that would only send says that it is ready, and does nothing: sending is not built yet.
    fn check_roles(&mut self, root: &Section<'_>, flags: &Flags, settings: &Settings) {
        let works = [Role::Ingress, Role::Worker, Role::Admin];
        if works.into_iter().any(|role| settings.roles.has(role)) {
            return;
        }
        if let Some(SetAt { origin, key }) = self.set_at(root, flags, "roles") {
            let invalid = InvalidSetting::new(
                "sender alone has nothing to do: sending to endpoints is not built yet",
                "add ingress, worker or admin",
            );
            self.problems.add(origin, key, invalid);
        }
    }

    fn tokens(&mut self, root: &Section<'_>) -> Vec<Token> {
        let mut tokens: Vec<Token> = Vec::new();
        let Some(section) = root.get("tokens").and_then(|entry| entry.section(&mut self.problems))
        else {
            return tokens;
        };
        for entry in section.entries() {
            let Some(token) = entry.section(&mut self.problems) else { continue };
            token.expect(&["value", "allow"], &[], &mut self.problems);
            let value = token.get("value");
            let allow = token.get("allow");
            if value.is_none() {
                let hint = "add value = \"env:HAPAX_OPS_TOKEN\"";
                token.report(InvalidSetting::new("has no value", hint), &mut self.problems);
            }
            let allow = match allow {
                Some(allow) => allow
                    .list(&mut self.problems)
                    .unwrap_or_default()
                    .iter()
                    .filter_map(|entry| entry.parse(permission, &mut self.problems))
                    .collect(),
                None => {
                    let hint = "add allow = [\"read\"], or \"operate\" or \"admin\"";
                    token.report(InvalidSetting::new("allows nothing", hint), &mut self.problems);
                    Vec::new()
                }
            };
            let Some(value_entry) = value else { continue };
            let Some(value) = self.secret(&value_entry) else { continue };
            if value.expose().chars().count() < TOKEN_CHARS_MIN {
                let invalid = InvalidSetting::new(
                    format!("is shorter than {TOKEN_CHARS_MIN} characters, and could be guessed"),
                    "make one with `openssl rand -hex 32`",
                );
                value_entry.report(invalid, &mut self.problems);
                continue;
            }
            if let Some(other) = tokens.iter().find(|token| token.value == value) {
                let invalid = InvalidSetting::new(
                    format!("has the same value as tokens.{}", other.name),
                    "give each token its own: actions are recorded under its name",
                );
                value_entry.report(invalid, &mut self.problems);
                continue;
            }
            tokens.push(Token { name: entry.name().to_owned(), value, allow });
        }
        tokens
    }

    /// Off loopback the admin side opens to a token only, so there must be one.
    fn check_admin_access(
        &mut self,
        root: &Section<'_>,
        flags: &Flags,
        settings: &Settings,
        tokens: &[Token],
    ) {
        if settings.admin_listen.ip().is_loopback() {
            return;
        }
        if settings.admin_open
            && let Some(SetAt { origin, key }) = self.set_at(root, flags, "admin_open")
        {
            let invalid = InvalidSetting::new(
                format!(
                    "{} is not loopback: there every request needs a token",
                    settings.admin_listen
                ),
                "remove admin_open, or set admin_listen to an address such as 127.0.0.1:8081",
            );
            self.problems.add(origin, key, invalid);
        }
        if !tokens.is_empty() {
            return;
        }
        let invalid = InvalidSetting::new(
            format!("{} is not loopback, and there is no token", settings.admin_listen),
            "add [tokens.ops] with value = \"env:HAPAX_OPS_TOKEN\" and allow = [\"admin\"], \
             or listen on 127.0.0.1",
        );
        let given = self.set_at(root, flags, "admin_listen");
        let SetAt { origin, key } =
            given.unwrap_or(SetAt { origin: Origin::Whole, key: "admin_listen" });
        self.problems.add(origin, key, invalid);
    }

    /// The file of the token that a server with no other makes for itself.
    fn own_token(&mut self, settings: &Settings, tokens: &[Token]) -> Option<PathBuf> {
        let is_needed =
            tokens.is_empty() && !settings.admin_open && settings.roles.has(Role::Admin);
        let file = is_needed.then(|| settings.data_dir.join(ADMIN_TOKEN_FILE));
        self.watched.extend(file.clone());
        file
    }

    /// A worker with a token for a handler that is not there finds out by being refused, long after.
    fn check_claim_tokens(&mut self, tokens: &[Token], sources: &[ConfiguredSource]) {
        for token in tokens {
            for permission in &token.allow {
                let Permission::Claim { source, handler } = permission else { continue };
                if !is_pulled(sources, source, handler) {
                    self.warnings.push(format!(
                        "[tokens.{}]: claim:{source}/{handler} is for a handler that is not there, \
                         or is not pulled",
                        token.name
                    ));
                }
            }
        }
    }

    /// Reads a secret and remembers its file.
    fn secret(&mut self, entry: &document::Entry<'_>) -> Option<Secret> {
        let env = self.environment.env;
        let resolved = entry.parse(|text| secrets::resolve(text, env), &mut self.problems)?;
        self.watched.extend(resolved.file);
        Some(resolved.secret)
    }
}

impl Flags {
    fn get(&self, key: &str) -> Option<&str> {
        let flag = match key {
            "database_url" => return self.database_url.as_ref().map(Secret::expose),
            "redis_url" => return self.redis_url.as_ref().map(Secret::expose),
            "listen" => &self.listen,
            "admin_listen" => &self.admin_listen,
            "public_url" => &self.public_url,
            "data_dir" => &self.data_dir,
            "log.level" => &self.log_level,
            "log.format" => &self.log_format,
            "roles" => &self.roles,
            _no_flag => &None,
        };
        flag.as_deref()
    }
}

impl Settings {
    /// Sets one key from its text, wherever that came from.
    fn set(&mut self, key: &str, text: &str) -> Result<(), InvalidSetting> {
        match key {
            "listen" => self.listen = units::address(text)?,
            "admin_listen" => self.admin_listen = units::address(text)?,
            "admin_open" => self.admin_open = flag(text)?,
            "public_url" => self.public_url = Some(units::base_url(text)?),
            "trusted_proxies" => {
                let nets = text.split(',').map(str::trim).filter(|net| !net.is_empty());
                self.trusted_proxies = nets.map(units::net).collect::<Result<_, _>>()?;
            }
            "data_dir" if text.trim().is_empty() => {
                return Err(InvalidSetting::new(
                    "is empty",
                    "name a directory, such as \"hapax-data\"",
                ));
            }
            "data_dir" => self.data_dir = PathBuf::from(text),
            "database_url" => self.database_url = Some(ServiceUrl::postgres(text)?),
            "handlers_database_url" => {
                self.handlers_database_url = Some(ServiceUrl::postgres(text)?);
            }
            "redis_url" => self.redis_url = Some(ServiceUrl::redis(text)?),
            "roles" => self.roles = Roles::parse(text.split(','))?,
            "max_body" => self.max_body_bytes = units::size(text)?,
            "max_connections" => self.max_connections = count(text)?,
            "header_timeout" => self.header_timeout = units::span(text)?,
            "body_timeout" => self.body_timeout = units::span(text)?,
            "drain" => self.drain = units::duration(text)?,
            "log.level" => {
                logs::filter(text)?;
                self.log.level = text.to_owned();
            }
            "log.format" => self.log.format = log_format(text)?,
            other => unreachable!("{other} is not in the table of replaceable settings"),
        }
        Ok(())
    }
}

/// Whether workers could claim jobs by that name.
fn is_pulled(sources: &[ConfiguredSource], source: &str, handler: &str) -> bool {
    let of_source = sources.iter().filter(|one| one.source.name().as_str() == source);
    of_source
        .flat_map(|one| &one.handlers)
        .any(|one| one.name.as_str() == handler && matches!(one.kind, HandlerKind::Pull))
}

fn flag(text: &str) -> Result<bool, InvalidSetting> {
    text.trim()
        .parse()
        .map_err(|_| InvalidSetting::new("is not true or false", "write true or false"))
}

fn count(text: &str) -> Result<usize, InvalidSetting> {
    match text.trim().parse() {
        Ok(count) if count > 0 => Ok(count),
        Ok(_) | Err(_) => {
            Err(InvalidSetting::new("is not a number above zero", "write a number, such as 4096"))
        }
    }
}

fn log_format(text: &str) -> Result<LogFormat, InvalidSetting> {
    match text {
        "human" => Ok(LogFormat::Human),
        "json" => Ok(LogFormat::Json),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is not a log format"),
            "write \"human\" or \"json\"",
        )),
    }
}

fn permission(text: &str) -> Result<Permission, InvalidSetting> {
    match text {
        "admin" => return Ok(Permission::Admin),
        "read" => return Ok(Permission::Read),
        "payload" => return Ok(Permission::Payload),
        "operate" => return Ok(Permission::Operate),
        "publish" => return Ok(Permission::Publish),
        _claim_or_unknown => {}
    }
    let claim = text.strip_prefix("claim:").and_then(|claim| claim.split_once('/'));
    match claim {
        Some((source, handler)) if !source.is_empty() && !handler.is_empty() => {
            Ok(Permission::Claim { source: source.to_owned(), handler: handler.to_owned() })
        }
        Some(_) | None => Err(InvalidSetting::new(
            format!("\"{text}\" is not something a token can allow"),
            "write \"admin\", \"read\", \"payload\", \"operate\", \"publish\" or \
             \"claim:SOURCE/HANDLER\"",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load_text(text: &str, env: &dyn Fn(&str) -> Option<String>, flags: Flags) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hapax.toml");
        std::fs::write(&file, text).unwrap();
        let environment = Environment { env, now: Timestamp::UNIX_EPOCH, read_only: true };
        load_in(&Flags { config: Some(file), ..flags }, &environment).unwrap()
    }

    #[test]
    fn the_file_that_init_writes_spells_out_the_built_in_defaults() {
        let config = load_text(DEFAULT_TOML, &|_| None, Flags::default());
        assert_eq!(config.settings, Settings::default());
        assert!(config.sources.is_empty() && config.tokens.is_empty() && config.tls.is_none());
        assert!(config.proxies.is_empty());
    }

    #[test]
    fn every_key_is_explained_in_the_file_that_init_writes() {
        let is_there = |key: &str| {
            DEFAULT_TOML.lines().any(|line| {
                let line = line.trim_start_matches("# ");
                line.starts_with(&format!("{key} =")) || line.starts_with(&format!("[{key}"))
            })
        };
        let nested = ["format", "level", "keys", "events", "cert", "key", "value", "allow"];
        let nested = nested.into_iter().chain(alerts::KEYS).chain(proxies::KEYS);
        for key in ROOT_KEYS.into_iter().chain(nested).chain(sources::all_keys().copied()) {
            let is_table = ["tenants", "scheme", "handlers", "order", "refetch"].contains(&key);
            assert!(is_there(key) || is_table, "{key}");
        }
        for (_, variable, _) in OVERRIDABLE {
            assert!(DEFAULT_TOML.contains(variable), "{variable}");
        }
    }

    #[test]
    fn every_example_in_the_file_that_init_writes_is_valid_once_uncommented() {
        // The second event_id is the alternative to the first; a table holds one of them.
        let text: String = DEFAULT_TOML
            .lines()
            .filter(|line| !line.contains("hash =") && !line.contains("tenant_from ="))
            // Instead of `sql`.
            .filter(|line| !line.contains("sql_file ="))
            // Stripe takes none, and a header that names the caller has nothing to verify.
            .filter(|line| !line.contains("params =") && !line.contains("jwks ="))
            .filter(|line| {
                !line.contains("cert =") && !line.contains("key =") && *line != "# [tls]"
            })
            .map(|line| match line.strip_prefix("# ") {
                Some(code) if is_header(code) || is_assignment(code) => format!("{code}\n"),
                Some(_) | None => format!("{line}\n"),
            })
            .collect();
        let text = text
            .replace("file:/run/secrets/legacy", "env:LEGACY")
            .replace("provider = \"stripe\"", "provider = \"custom\"")
            .replace(
                "[sources.legacy]",
                "[sources.stripe.scheme]\nheader = \"x-signature\"\n[sources.legacy]",
            );
        let known =
            ["STRIPE_SECRET", "ACME_STRIPE_SECRET", "LEGACY", "ID", "HAPAX_OPS_TOKEN", "API_AUTH"];
        let env = |name: &str| match name {
            "HOOK_SECRET" => Some("whsec_c2VjcmV0".to_owned()),
            name => known.contains(&name).then(|| format!("value of {name}")),
        };
        let config = load_text(&text, &env, Flags::default());
        assert_eq!((config.sources.len(), config.tokens.len()), (3, 1), "{text}");
        assert_eq!(config.proxies.len(), 1, "{text}");
        let handlers: Vec<_> = config.sources.iter().map(|it| it.handlers.len()).collect();
        assert_eq!(handlers, [0, 3, 3], "{text}");
    }

    fn is_header(line: &str) -> bool {
        line.starts_with('[') && line.ends_with(']') && !line.contains(':')
    }

    fn is_assignment(line: &str) -> bool {
        let key = line.split(" = ").next().unwrap_or_default();
        line.contains(" = ") && key.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    }

    #[test]
    fn flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults() {
        let text = "listen = \"127.0.0.1:1\"\nadmin_listen = \"127.0.0.1:2\"\ndrain = \"3s\"";
        let env = |name: &str| match name {
            "HAPAX_LISTEN" => Some("127.0.0.1:11".to_owned()),
            "HAPAX_ADMIN_LISTEN" => Some("127.0.0.1:12".to_owned()),
            "HAPAX_DRAIN" => Some(String::new()),
            "HAPAX_LOG" => Some("debug".to_owned()),
            _other => None,
        };
        let flags = Flags { listen: Some("127.0.0.1:21".to_owned()), ..Flags::default() };
        let settings = load_text(text, &env, flags).settings;
        assert_eq!(settings.listen.port(), 21);
        assert_eq!(settings.admin_listen.port(), 12);
        assert_eq!(settings.drain, Duration::from_secs(3));
        assert_eq!(settings.log.level, "debug");
        assert_eq!(settings.max_body_bytes, 1 << 20);
    }

    #[test]
    fn each_alert_can_be_set_and_switched_off() {
        let off: String = alerts::KEYS.map(|key| format!("{key} = \"off\"\n")).concat();
        let read = |text: &str| {
            load_text(&format!("[alerts]\n{text}"), &|_| None, Flags::default()).settings.alerts
        };
        let none = Alerts {
            duplicate_spike: None,
            failed_verifications: None,
            oldest_job: None,
            dead_letters: None,
            silence: None,
            secret_expiry: None,
            clock_skew: None,
            log_growth: None,
            statements: false,
            store: false,
        };
        assert_eq!(read(&off), none);
        let set = read("duplicate_spike = \"5\"\nsilence = \"2d\"\nlog_growth = 1000");
        let two_days = Duration::from_secs(2 * 86_400);
        assert_eq!((set.duplicate_spike, set.silence), (Some(5), Some(two_days)));
        assert_eq!((set.log_growth, set.store), (Some(1_000), true));
    }

    #[test]
    fn what_nodes_share_is_read_and_kept_out_of_debug_output() {
        // The password comes by flag, by variable and by a variable that the file names.
        let env = |name: &str| match name {
            "HAPAX_REDIS_URL" => Some("redis://:hunter2@cache/0".to_owned()),
            "HAPAX_ROLES" => Some("worker, admin".to_owned()),
            "URL" => Some("postgres://u:hunter2@filed/db".to_owned()),
            _other => None,
        };
        let text = "database_url = \"env:URL\"\nroles = [\"ingress\"]";
        let config = load_text(text, &env, Flags::default());
        let url = config.settings.database_url.as_ref().map(ServiceUrl::expose);
        assert_eq!(url, Some("postgres://u:hunter2@filed/db"));
        assert_eq!(config.settings.roles, Roles::parse(["admin", "worker"]).unwrap());
        assert!(!format!("{config:?}").contains("hunter2"));
        let flag = Secret::new("postgres://u:hunter2@flagged/db");
        let flags = Flags { database_url: Some(flag), ..Flags::default() };
        let flagged = load_text(text, &env, flags);
        let shown = format!("{flagged:?}");
        assert!(shown.contains("flagged/db") && !shown.contains("hunter2"), "{shown}");
        assert_eq!(config.needs_restart(&flagged), ["database_url"]);
    }

    #[test]
    fn only_declared_pairs_answer_and_each_on_its_own_path() {
        let text = r#"
            [sources.a]
            provider = "custom"
            event_id = "/id"
            scheme = { header = "x-signature" }
            [sources.a.tenants.acme]
            secrets = ["one"]
            [sources.a.tenants.zeta]
            secrets = ["two", { value = "three", until = 2026-12-01T00:00:00Z }]
            [sources.b]
            provider = "custom"
            event_id = "/id"
            scheme = { header = "x-signature" }
            secrets = ["four"]
            [sources.b.tenants.acme]
            secrets = ["five"]
        "#;
        let config = load_text(text, &|_| None, Flags::default());
        let paths: Vec<_> = config.sources.iter().map(|source| source.path.as_str()).collect();
        assert_eq!(
            paths,
            ["/webhooks/acme/a", "/webhooks/zeta/a", "/webhooks/b", "/webhooks/acme/b"]
        );
    }

    #[test]
    fn a_proxy_has_a_default_for_all_but_where_it_stands() {
        let text = "[proxies.api]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://127.0.0.1:3000\"";
        let config = load_text(text, &|_| None, Flags::default());
        let [api] = &*config.proxies else { panic!("{:?}", config.proxies) };
        let spans = (api.ttl, api.lease, api.wait).into();
        let [ttl, lease, wait]: [Duration; 3] = spans;
        assert_eq!((ttl.as_secs(), lease.as_secs(), wait.as_secs()), (72 * 3_600, 60, 0));
        assert_eq!((&api.scope, api.mismatch_status.as_u16()), (&Scope::Default, 409));
        // Told, since a token that changes between two tries would make them two requests.
        assert!(config.warnings.iter().any(|it| it.contains("proxies.api: no `scope`")));
    }

    #[test]
    fn a_proxy_that_moves_comes_or_goes_waits_for_a_restart_and_new_rules_do_not() {
        let proxy = |name: &str, port: u16, rest: &str| {
            format!(
                "[proxies.{name}]\nlisten = \"127.0.0.1:{port}\"\n\
                 upstream = \"http://127.0.0.1:3000\"\nscope = \"none\"\n{rest}\n"
            )
        };
        let load = |text: String| load_text(&text, &|_| None, Flags::default());
        let old = load(proxy("a", 1, "") + &proxy("b", 2, "") + &proxy("c", 3, ""));
        let new = load(proxy("a", 1, "ttl = \"1h\"") + &proxy("b", 9, "") + &proxy("d", 4, ""));
        assert_eq!(old.needs_restart(&new), ["proxies.b.listen", "proxies.c", "proxies.d"]);
    }

    #[test]
    fn a_config_file_that_disappears_does_not_turn_a_reload_into_dev_mode() {
        // load_text's directory is gone by now: what must not happen is dev mode's sources.
        let config = load_text("", &|_| None, Flags::default());
        let errors = config.reload().unwrap_err().to_string();
        assert!(errors.contains("cannot read the config file"), "{errors}");
    }
}
