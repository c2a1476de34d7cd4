//! The configuration. Flags override the environment, which overrides the file, which overrides the
//! defaults. The result is a checked [`Config`], or [`ConfigErrors`] with every problem and its line.
//!
//! [`reader`] reads a whole configuration. [`settings`] reads the keys with a default, [`overrides`] the flags and
//! environment variables, and [`dev`] the configuration without a file. [`tokens`], [`sources`], [`handlers`],
//! [`proxies`], [`outbound`], [`vault`] and [`portal`] read the sections. [`document`] walks the TOML with its line
//! numbers, [`units`] parses single values, and [`secrets`] resolves `env:` and `file:`. [`restart`] lists the changes
//! that a reload cannot apply. [`lookup`] reads single settings for other commands.

mod alerts;
mod dev;
mod document;
mod handlers;
mod lookup;
mod order;
mod outbound;
mod overrides;
mod portal;
mod problem;
mod proxies;
mod reader;
mod refetch;
mod restart;
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
mod vault;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_engine::tls::Certificate;

pub(crate) use self::alerts::{Alerts, KEYS as ALERT_NAMES};
pub(crate) use self::dev::{DevMode, dev_secret, is_dev_secret};
pub(crate) use self::lookup::{ServerLocation, database_url, server_location};
pub(crate) use self::outbound::OutboundSettings;
pub(crate) use self::overrides::Flags;
pub(crate) use self::portal::PortalSettings;
pub(crate) use self::problem::{ConfigErrors, InvalidSetting};
pub(crate) use self::proxies::{CallerIdentity, Proxy};
use self::reader::{Environment, load_in};
pub(crate) use self::restart::AppliedAtStart;
pub(crate) use self::secrets::resolve as resolve_secret;
pub(crate) use self::settings::{LogFormat, LogSettings, Settings};
pub(crate) use self::shared::{Role, ServiceUrl};
pub(crate) use self::sources::{ConfiguredSource, Redaction, SourceTemplate, secret_text_hash};
pub(crate) use self::tokens::{ADMIN_TOKEN_FILE, Permission, Token, admin_token};
pub(crate) use self::units::Keep;
pub(crate) use self::vault::{NO_VAULT_KEY, VaultFileState, VaultKeySource, VaultSettings};

/// The file that `init` writes: every key explained, every default spelled out.
pub(crate) const DEFAULT_TOML: &str = include_str!("../hapax.default.toml");

/// The config file that is read if none is named.
pub(crate) const DEFAULT_PATH: &str = "hapax.toml";

/// A checked configuration.
#[derive(Debug)]
pub(crate) struct Config {
    /// Everything that is not a secret, a certificate or a source.
    pub(crate) settings: Settings,
    /// TLS on the public side.
    pub(crate) tls: Option<Arc<Certificate>>,
    /// TLS on the admin side.
    pub(crate) admin_tls: Option<Arc<Certificate>>,
    /// The tokens of the admin side.
    pub(crate) tokens: Vec<Token>,
    /// The file of the server's own token, if the config has no tokens.
    own_token: Option<PathBuf>,
    /// The sources of the public side, one for each (tenant, source) pair.
    pub(crate) sources: Vec<ConfiguredSource>,
    /// The sources without their tenants, for tenants that are added at run time.
    pub(crate) templates: Vec<SourceTemplate>,
    /// The Idempotency-Key proxies.
    pub(crate) proxies: Vec<Proxy>,
    /// The pages of receiving parties.
    pub(crate) portal: Option<PortalSettings>,
    /// The keys of the vault.
    pub(crate) vault: VaultSettings,
    /// Set if there is no config file.
    pub(crate) dev: Option<DevMode>,
    /// The config file, if there is one.
    pub(crate) file: Option<PathBuf>,
    /// Warnings, one line each.
    pub(crate) warnings: Vec<String>,
    flags: Flags,
    watched: Vec<PathBuf>,
}

/// Reads and checks the configuration. In dev mode this creates the dev secret if it is missing.
pub(crate) fn load(flags: &Flags) -> Result<Config, ConfigErrors> {
    load_in(flags, &Environment::real(false))
}

/// Reads and checks the configuration without creating files. In dev mode there are then no sources.
pub(crate) fn load_read_only(flags: &Flags) -> Result<Config, ConfigErrors> {
    load_in(flags, &Environment::real(true))
}

impl Config {
    /// Reads everything again with the same flags. A missing file is an error: without it the sources would
    /// silently become those of dev mode.
    pub(crate) fn reload(&self) -> Result<Self, ConfigErrors> {
        match &self.file {
            Some(file) => load(&Flags { config: Some(file.clone()), ..self.flags.clone() }),
            None => load(&self.flags),
        }
    }

    /// The shortest time for which a source keeps its keys; `None` if all sources keep them for ever.
    pub(crate) fn keys_kept(&self) -> Option<Duration> {
        let kept = self.templates.iter().filter_map(|source| match source.keep_keys {
            Keep::For(span) => Some(span),
            Keep::Forever => None,
        });
        kept.min()
    }

    /// The files that were read: config, secrets, certificates, SQL.
    pub(crate) fn watched_files(&self) -> &[PathBuf] {
        &self.watched
    }
}
