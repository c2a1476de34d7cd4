//! The configuration: flags over environment over file over defaults, read once into a [`Config`]
//! that is checked to the last secret, or into [`ConfigErrors`] that name every problem and its line.
//!
//! [`reader`] reads all of it, [`settings`] what has a default, [`overrides`] what flags and
//! environment replace, [`tokens`] who may use the admin side, [`lookup`] a single setting for commands
//! that need no more.
//!
//! [`document`] walks the TOML, [`units`] knows the values, [`secrets`] where secrets come from,
//! [`sources`] builds what verifies, [`handlers`] what works, [`proxies`] what stands in front of an
//! app, [`shared`] what nodes share, [`dev`] is what happens without a file.

mod alerts;
mod dev;
mod document;
mod handlers;
mod lookup;
mod order;
mod overrides;
mod problem;
mod proxies;
mod reader;
mod refetch;
mod secret_file;
mod secrets;
mod settings;
mod shared;
mod sources;
mod suggest;
#[cfg(test)]
mod tests;
mod tls;
mod tokens;
pub(crate) mod units;

use std::path::PathBuf;
use std::sync::Arc;

use hapax_engine::tls::Certificate;

pub(crate) use self::alerts::Alerts;
pub(crate) use self::dev::{DevMode, dev_secret, is_dev_secret};
pub(crate) use self::handlers::Mode;
pub(crate) use self::lookup::{ServerLocation, database_url, server_location};
pub(crate) use self::overrides::Flags;
pub(crate) use self::problem::{ConfigErrors, InvalidSetting};
pub(crate) use self::proxies::{Proxy, Scope};
use self::reader::{Environment, load_in};
pub(crate) use self::secrets::resolve as resolve_secret;
pub(crate) use self::settings::{LogFormat, LogSettings, Settings};
pub(crate) use self::shared::{Role, ServiceUrl};
pub(crate) use self::sources::ConfiguredSource;
pub(crate) use self::tokens::{ADMIN_TOKEN_FILE, Permission, Token, admin_token};
pub(crate) use self::units::Keep;

/// The file that `init` writes: every key explained, every default spelled out.
pub(crate) const DEFAULT_TOML: &str = include_str!("../hapax.default.toml");

/// The config file that is read where none is named.
pub(crate) const DEFAULT_PATH: &str = "hapax.toml";

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

/// Reads and checks the configuration. In dev mode this makes the dev secret, if it is not there.
pub(crate) fn load(flags: &Flags) -> Result<Config, ConfigErrors> {
    load_in(flags, &Environment::real(false))
}

/// The same for those who do not serve: nothing is made, and without a file there are no sources.
pub(crate) fn load_read_only(flags: &Flags) -> Result<Config, ConfigErrors> {
    load_in(flags, &Environment::real(true))
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
