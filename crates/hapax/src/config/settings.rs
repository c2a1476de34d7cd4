//! The settings that have a default: what they are, how the file sets them, and which of them
//! contradict each other.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use hapax_core::handler::Dialect;
use hapax_engine::{BodyLimits, HttpLimits};
use ipnet::IpNet;

use super::alerts::Alerts;
use super::document::Section;
use super::overrides::{Flags, SetAt};
use super::problem::InvalidSetting;
use super::reader::ConfigReader;
use super::secrets::{self, Resolved};
use super::shared::{Role, Roles, ServiceUrl};
use super::units::{self, Keep};
use crate::logs;

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
pub(super) const KEEP_DEFAULT: Keep = Keep::For(hapax::limits::KEEP_DEFAULT);

impl Default for Settings {
    fn default() -> Self {
        let (http, body) = (HttpLimits::default(), BodyLimits::default());
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
            max_body_bytes: body.bytes_max,
            max_connections: http.connections_max,
            header_timeout: http.header_deadline,
            body_timeout: body.deadline,
            drain: http.drain,
            log: LogSettings { format: LogFormat::Human, level: "info".to_owned() },
            retention: Retention { keys: None, events: KEEP_DEFAULT },
            alerts: Alerts::default(),
        }
    }
}

impl ConfigReader<'_> {
    pub(super) fn apply_file(&mut self, root: &Section<'_>, settings: &mut Settings) {
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

    /// SQLite is one process: what another one would do, nobody would.
    pub(super) fn check_sqlite_settings(
        &mut self,
        root: &Section<'_>,
        flags: &Flags,
        settings: &Settings,
    ) {
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
    pub(super) fn check_roles(&mut self, root: &Section<'_>, flags: &Flags, settings: &Settings) {
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
}

impl Settings {
    /// Sets one key from its text, wherever that came from.
    pub(super) fn set(&mut self, key: &str, text: &str) -> Result<(), InvalidSetting> {
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
