//! The settings that have a default: their types, how the file sets them, and checks between them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use hapax_core::handler::Dialect;
use hapax_engine::{BodyLimits, HttpLimits};
use ipnet::IpNet;

use super::alerts::Alerts;
use super::document::Section;
use super::outbound::OutboundSettings;
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
    /// Whether requests from this machine need no token. Dev mode needs none either way.
    pub(crate) admin_open: bool,
    /// The URL of the admin side as browsers see it, without a trailing slash.
    pub(crate) admin_url: Option<String>,
    /// The URL that senders use, without a trailing slash. In dev mode the URL is derived from `listen`, or
    /// from the bound address if that has port 0.
    pub(crate) public_url: Option<String>,
    /// The proxies whose `X-Forwarded-For` is trusted.
    pub(crate) trusted_proxies: Vec<IpNet>,
    /// The directory of the embedded database.
    pub(crate) data_dir: PathBuf,
    /// The PostgreSQL that nodes share, instead of the embedded database.
    pub(crate) database_url: Option<ServiceUrl>,
    /// The same database with the role of SQL and Rust handlers.
    pub(crate) handlers_database_url: Option<ServiceUrl>,
    /// A Redis in front of PostgreSQL.
    pub(crate) redis_url: Option<ServiceUrl>,
    /// The roles of this process.
    pub(crate) roles: Roles,
    /// The largest accepted body.
    pub(crate) max_body_bytes: usize,
    /// The most connections to the public side at once.
    pub(crate) max_connections: usize,
    /// The timeout of a request's headers.
    pub(crate) header_timeout: Duration,
    /// The timeout of a request's body.
    pub(crate) body_timeout: Duration,
    /// How long a shutdown waits for accepted requests and running work.
    pub(crate) drain: Duration,
    /// The format and level of the log.
    pub(crate) log: LogSettings,
    /// How long keys and events are kept.
    pub(crate) retention: Retention,
    /// The thresholds of alerts.
    pub(crate) alerts: Alerts,
    /// The addresses that endpoints may have, and how much is sent at once.
    pub(crate) outbound: OutboundSettings,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogSettings {
    /// Text or JSON.
    pub(crate) format: LogFormat,
    /// A level, or directives.
    pub(crate) level: String,
}

/// The format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// Text for people.
    Human,
    /// One JSON object per line.
    Json,
}

/// `[retention]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retention {
    /// How long a duplicate is recognised. `None` is 90 days, and forever for schemes without a signed time;
    /// `SourceTemplate::keep_keys` has the value of each source.
    pub(crate) keys: Option<Keep>,
    /// Bodies and history.
    pub(crate) events: Keep,
    /// Deliveries that are dead, held or parked for longer are cancelled.
    pub(crate) deliveries: Keep,
}

/// Ninety days: longer than any sender's retries.
pub(super) const KEEP_DEFAULT: Keep = Keep::For(hapax::limits::KEEP_DEFAULT);

/// Thirty days: longer than an outage of a receiver that comes back.
const KEEP_DELIVERIES_DEFAULT: Keep = Keep::For(Duration::from_secs(30 * 86_400));

impl Default for Settings {
    fn default() -> Self {
        let (http, body) = (HttpLimits::default(), BodyLimits::default());
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 8081)),
            admin_open: false,
            admin_url: None,
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
            retention: Retention {
                keys: None,
                events: KEEP_DEFAULT,
                deliveries: KEEP_DELIVERIES_DEFAULT,
            },
            alerts: Alerts::default(),
            outbound: OutboundSettings::default(),
        }
    }
}

impl ConfigReader<'_> {
    pub(super) fn apply_file(&mut self, root: &Section<'_>, settings: &mut Settings) {
        let problems = &mut self.problems;
        for entry in root.entries() {
            match entry.name() {
                key @ ("listen" | "admin_listen" | "admin_url" | "public_url" | "data_dir"
                | "header_timeout" | "body_timeout" | "drain") => {
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
                    log.expect(&["format", "level"], problems);
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
                "outbound" => {
                    let Some(outbound) = entry.section(problems) else { continue };
                    settings.outbound = OutboundSettings::read(&outbound, problems);
                }
                "retention" => {
                    let Some(retention) = entry.section(problems) else { continue };
                    retention.expect(&["keys", "events", "deliveries"], problems);
                    let keys = retention.get("keys");
                    settings.retention.keys =
                        keys.and_then(|keys| keys.parse(units::keep, problems));
                    if let Some(events) = retention.get("events") {
                        let events = events.parse(units::keep, problems);
                        settings.retention.events = events.unwrap_or(KEEP_DEFAULT);
                    }
                    if let Some(deliveries) = retention.get("deliveries") {
                        let deliveries = deliveries.parse(units::keep, problems);
                        settings.retention.deliveries =
                            deliveries.unwrap_or(KEEP_DELIVERIES_DEFAULT);
                    }
                }
                // Sections are read elsewhere; unknown keys are reported already.
                _section_or_unknown => {}
            }
        }
    }

    /// Reports settings that need a shared PostgreSQL while SQLite is used, which belongs to one process.
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
                "needs database_url: Redis caches a shared PostgreSQL",
                "set database_url, or remove this: the embedded database answers duplicates from memory",
            );
            self.problems.add(origin, key, invalid);
        }
        if let Some(SetAt { origin, key }) = self.set_at(root, flags, "handlers_database_url") {
            let invalid = InvalidSetting::new(
                "needs database_url: it is a role on a shared PostgreSQL",
                "set database_url, or remove this: on the embedded database handlers cannot reach the \
                 tables of Hapax",
            );
            self.problems.add(origin, key, invalid);
        }
        let missing: Vec<_> = settings.roles.missing().map(Role::as_str).collect();
        if let Some(SetAt { origin, key }) = self.set_at(root, flags, "roles")
            && !missing.is_empty()
        {
            let invalid = InvalidSetting::new(
                format!(
                    "lacks {}: on the embedded database one process has every role",
                    missing.join(" and ")
                ),
                "remove this, or set database_url to run roles in separate processes",
            );
            self.problems.add(origin, key, invalid);
        }
    }
}

impl Settings {
    /// Sets one key from its text.
    pub(super) fn set(&mut self, key: &str, text: &str) -> Result<(), InvalidSetting> {
        match key {
            "listen" => self.listen = units::address(text)?,
            "admin_listen" => self.admin_listen = units::address(text)?,
            "admin_open" => self.admin_open = flag(text)?,
            "admin_url" => {
                let hint = "write the URL that browsers use: \"https://ops.example.com/hapax\"";
                self.admin_url = Some(units::base_url(text, hint)?);
            }
            "public_url" => {
                let hint = "write the URL that senders use: \"https://hooks.example.com\"";
                self.public_url = Some(units::base_url(text, hint)?);
            }
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
