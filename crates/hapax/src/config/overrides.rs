//! Settings from the command line and the environment, which override the file.

use std::path::PathBuf;

use hapax_core::secret::Secret;

use super::document::Section;
use super::problem::SettingOrigin;
use super::reader::ConfigReader;
use super::settings::Settings;

/// Settings on the command line; each overrides the environment and the file.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Flags {
    /// The config file [env: HAPAX_CONFIG] [default: hapax.toml if it exists]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The directory of the embedded database and the dev secret [env: HAPAX_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<String>,
    /// The address that receives webhooks [env: HAPAX_LISTEN]
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<String>,
    /// The address of the admin API, metrics and health [env: HAPAX_ADMIN_LISTEN]
    #[arg(long, value_name = "ADDR")]
    pub(crate) admin_listen: Option<String>,
    /// The URL at which senders reach this server [env: HAPAX_PUBLIC_URL]
    #[arg(long, value_name = "URL")]
    pub(crate) public_url: Option<String>,
    /// The log level: off, error, warn, info, debug, trace, or directives such as hapax=debug [env:
    /// HAPAX_LOG]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
    /// The log format: human or json [env: HAPAX_LOG_FORMAT]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) log_format: Option<String>,
    /// A shared PostgreSQL. Other users can see flags but not the environment [env: HAPAX_DATABASE_URL]
    #[arg(long, value_name = "URL", value_parser = parse_secret)]
    pub(crate) database_url: Option<Secret>,
    /// A Redis in front of PostgreSQL; like --database-url, better set in the environment [env: HAPAX_REDIS_URL]
    #[arg(long, value_name = "URL", value_parser = parse_secret)]
    pub(crate) redis_url: Option<Secret>,
    /// The roles of this process: some of ingress,worker,sender,admin [env: HAPAX_ROLES] [default: all]
    #[arg(long, value_name = "ROLES")]
    pub(crate) roles: Option<String>,
}

/// Wraps a value so that it cannot be printed.
fn parse_secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(Secret::new(text))
}

/// Settings that the environment and flags can override: key, variable, flag.
pub(super) const OVERRIDABLE: [(&str, &str, &str); 18] = [
    ("listen", "HAPAX_LISTEN", "--listen"),
    ("admin_listen", "HAPAX_ADMIN_LISTEN", "--admin-listen"),
    ("admin_open", "HAPAX_ADMIN_OPEN", ""),
    ("admin_url", "HAPAX_ADMIN_URL", ""),
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

/// The place where a setting was set.
pub(super) struct SetAt {
    pub(super) origin: SettingOrigin,
    /// The key, or empty if the origin names it.
    pub(super) key: &'static str,
}

impl ConfigReader<'_> {
    /// Applies the flags, and the environment variables of keys that no flag sets.
    pub(super) fn apply_overrides(
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
                self.problems.add(SettingOrigin::Override(origin), "", invalid);
            }
        }
    }

    /// Where an overridable setting was set, if it was: the origin with the highest precedence.
    pub(super) fn set_at(
        &self,
        root: &Section<'_>,
        flags: &Flags,
        key: &'static str,
    ) -> Option<SetAt> {
        let (_, variable, flag) = OVERRIDABLE.into_iter().find(|(known, _, _)| *known == key)?;
        if flags.get(key).is_some() {
            return Some(SetAt { origin: SettingOrigin::Override(flag), key: "" });
        }
        if (self.environment.env)(variable).is_some_and(|text| !text.is_empty()) {
            return Some(SetAt { origin: SettingOrigin::Override(variable), key: "" });
        }
        root.get(key).map(|entry| SetAt { origin: SettingOrigin::File(entry.at()), key })
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
