//! The settings that a server reads only when it starts.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use hapax_store::limits::STATEMENT_VALUE_BYTES_MAX;

use super::{Config, PortalSettings, Settings};

/// The settings that need a restart, as a running server has applied them. A reload does not change these
/// settings.
#[derive(Debug)]
pub(crate) struct AppliedAtStart {
    settings: Settings,
    has_tls: bool,
    has_admin_tls: bool,
    portal: Option<PortalAtStart>,
    proxies: Vec<(String, SocketAddr)>,
    keys_kept: Option<Duration>,
}

#[derive(Debug, PartialEq, Eq)]
struct PortalAtStart {
    listen: SocketAddr,
    public_url: Option<String>,
    has_tls: bool,
}

impl AppliedAtStart {
    /// The settings of a server that starts with this configuration.
    pub(crate) fn of(config: &Config) -> Self {
        let portal = |it: &PortalSettings| PortalAtStart {
            listen: it.listen,
            public_url: it.public_url.clone(),
            has_tls: it.tls.is_some(),
        };
        Self {
            settings: config.settings.clone(),
            has_tls: config.tls.is_some(),
            has_admin_tls: config.admin_tls.is_some(),
            portal: config.portal.as_ref().map(portal),
            proxies: config.proxies.iter().map(|it| (it.name.clone(), it.listen)).collect(),
            keys_kept: config.keys_kept(),
        }
    }

    /// The keys in which the server differs from `newer` until it is restarted.
    pub(crate) fn pending(&self, newer: &Config) -> Vec<String> {
        let newer = Self::of(newer);
        let (old, new) = (&self.settings, &newer.settings);
        let differs = [
            ("listen", old.listen != new.listen),
            ("tls", self.has_tls != newer.has_tls),
            ("admin_listen", old.admin_listen != new.admin_listen),
            ("admin_url", old.admin_url != new.admin_url),
            ("admin_tls", self.has_admin_tls != newer.has_admin_tls),
            ("data_dir", old.data_dir != new.data_dir),
            ("database_url", old.database_url != new.database_url),
            ("handlers_database_url", old.handlers_database_url != new.handlers_database_url),
            ("redis_url", old.redis_url != new.redis_url),
            ("roles", old.roles != new.roles),
            ("max_connections", old.max_connections != new.max_connections),
            ("max_body (for SQL handlers)", bodies_outgrow_values(old, new)),
            ("header_timeout", old.header_timeout != new.header_timeout),
            ("drain", old.drain != new.drain),
            ("log", old.log != new.log),
            ("portal", self.portal != newer.portal),
            ("outbound.proxy (for keys of senders)", old.outbound.proxy != new.outbound.proxy),
            ("retention.keys (for Redis)", self.redis_outlives_keys(&newer)),
        ];
        let differs = differs.into_iter().filter(|(_, differs)| *differs);
        differs.map(|(key, _)| key.to_owned()).chain(self.proxies_moved(&newer)).collect()
    }

    /// Whether Redis was opened for keys that are kept for longer. Entries may then outlive their keys.
    fn redis_outlives_keys(&self, newer: &Self) -> bool {
        let is_shorter =
            newer.keys_kept.is_some_and(|new| self.keys_kept.is_none_or(|old| new < old));
        self.settings.redis_url.is_some() && is_shorter
    }

    /// Proxies whose listener would have to be opened, closed or moved.
    fn proxies_moved(&self, newer: &Self) -> Vec<String> {
        let at = |of: &Self, name: &str| {
            of.proxies.iter().find(|(known, _)| known == name).map(|(_, listen)| *listen)
        };
        let names: BTreeSet<&String> =
            self.proxies.iter().chain(&newer.proxies).map(|(name, _)| name).collect();
        let moved = |name: &String| match (at(self, name), at(newer, name)) {
            (Some(old), Some(new)) if old == new => None,
            (Some(_), Some(_)) => Some(format!("proxies.{name}.listen")),
            (Some(_), None) | (None, Some(_)) | (None, None) => Some(format!("proxies.{name}")),
        };
        names.into_iter().filter_map(moved).collect()
    }
}

/// Whether the longest body needs longer values in SQL handlers than the limit that the embedded database was opened
/// with.
fn bodies_outgrow_values(old: &Settings, new: &Settings) -> bool {
    let limit = STATEMENT_VALUE_BYTES_MAX.max(old.max_body_bytes.saturating_mul(2));
    old.database_url.is_none() && new.max_body_bytes.saturating_mul(2) > limit
}
