//! Signals, and changes of the configuration while the server runs.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::listeners::http_limits;
use super::parts::Parts;
use super::{ServerStore, from_config};
use crate::alerts::AlertRules;
use crate::config::{AppliedAtStart, Config, InvalidSetting};
use crate::tenant_sources::TenantRules;
use crate::{sending, telemetry};

/// How often files with secrets, certificates or SQL are checked for changes.
const FILES_CHECKED_EVERY: Duration = Duration::from_secs(1);

/// The signals that the server reacts to.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(super) fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listening for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }
}

/// A running server, whose configuration can change.
pub(super) struct Reloadable<S> {
    config: Config,
    applied_at_start: AppliedAtStart,
    parts: Parts<S>,
}

impl<S: ServerStore> Reloadable<S> {
    /// A server that has started with this configuration.
    pub(super) fn new(config: Config, parts: Parts<S>) -> Self {
        Self { applied_at_start: AppliedAtStart::of(&config), config, parts }
    }

    /// Reloads on SIGHUP and when a file with a secret, a certificate or SQL changes; returns on SIGTERM or SIGINT.
    pub(super) async fn run(&mut self, signals: &mut Signals, metrics: &PrometheusHandle) {
        let mut seen = self.files();
        let mut watch = tokio::time::interval(FILES_CHECKED_EVERY);
        let mut upkeep = tokio::time::interval(telemetry::UPKEEP);
        loop {
            tokio::select! {
                _ = signals.terminate.recv() => return,
                _ = signals.interrupt.recv() => return,
                _ = signals.hangup.recv() => {
                    self.reload("SIGHUP").await;
                    seen = self.files();
                }
                _ = watch.tick() => {
                    let now = self.files();
                    if now != seen {
                        self.reload("a file changed").await;
                        seen = self.files();
                    }
                }
                _ = upkeep.tick() => metrics.run_upkeep(),
            }
        }
    }

    /// The modification time and size of each file with a secret, a certificate or SQL. The config file is
    /// reloaded on SIGHUP only, because it may be half edited.
    fn files(&self) -> HashMap<PathBuf, Option<(SystemTime, u64)>> {
        let look = |path: &PathBuf| {
            let found = std::fs::metadata(path).ok();
            found.and_then(|file| Some((file.modified().ok()?, file.len())))
        };
        let own = self.config.file.as_ref();
        let watched = self.config.watched_files().iter().filter(|path| Some(*path) != own);
        watched.map(|path| (path.clone(), look(path))).collect()
    }

    /// Applies a new configuration as a whole, or keeps the old one and logs the errors.
    async fn reload(&mut self, why: &str) {
        let parts = &self.parts;
        let not_taken = |wrong: &str| {
            let wrong = wrong.replace("\n  hint:", "; hint:");
            tracing::error!(
                "{why}: the new configuration is invalid, the server keeps the old one: {wrong}"
            );
        };
        let mut newer = match self.config.reload() {
            Ok(newer) => newer,
            Err(errors) => {
                // One log line per error: a log line contains no line break.
                errors.lines().iter().for_each(|error| not_taken(error));
                return;
            }
        };
        if let Err(InvalidSetting { problem, hint }) = newer.take_own_token() {
            not_taken(&format!("{problem}; hint: {hint}"));
            return;
        }
        let mut routes = match from_config::routes(&newer, parts.public_address) {
            Ok(routes) => routes,
            Err(error) => {
                not_taken(&error.to_string());
                return;
            }
        };
        let sending = match sending::at_reload(&*parts.store, &newer, &parts.sending).await {
            Ok(sending) => sending,
            Err(error) => {
                not_taken(&error);
                return;
            }
        };
        if let Err(no_vault) = &sending {
            tracing::warn!("{why}: endpoints cannot be used and nothing is delivered: {no_vault}");
        }
        let keys_before = parts.sending.vault_keys();
        parts.sending.replace(sending);
        parts.sender.reload(parts.sending.setup());
        if newer.settings.outbound.max_in_flight > self.config.settings.outbound.max_in_flight {
            // More file descriptors, as far as the system allows.
            http_limits(&newer);
        }
        let ingress = &parts.ingress;
        let swap = |changes| {
            routes.change(changes);
            ingress.reload(routes);
        };
        parts.tenants.reload(TenantRules::of(&newer, parts.sending.vault()), swap).await;
        if parts.sending.vault_keys() != keys_before {
            parts.resealer.reload();
        }
        for proxy in &parts.proxies {
            if let Some(found) = newer.proxies.iter().find(|it| it.name == proxy.name()) {
                proxy.reload(from_config::proxy_spec(&newer, found));
            }
        }
        parts.workers.reload(from_config::lanes(&newer));
        parts.known_sources.store(Arc::new(from_config::source_names(&newer)));
        parts.janitor.reload(from_config::retention(&newer));
        parts.watch.reload(AlertRules::of(&newer));
        parts.authorizer.reload(from_config::without_token(&newer), from_config::tokens(&newer));
        parts.redactions.reload(from_config::redacted(&newer));
        parts.search_fields.store(Arc::new(from_config::search_fields(&newer)));
        parts.retry_schedules.store(Arc::new(from_config::retry_schedules(&newer)));
        let public_url = from_config::public_url(&newer, parts.public_address);
        parts.public_url.store(Arc::new(public_url));
        parts.certificates.reload(&newer);
        for warning in &newer.warnings {
            tracing::warn!("{why}: {warning}");
        }
        for key in self.applied_at_start.pending(&newer) {
            tracing::warn!("{why}: {key} changed; restart the server to apply it");
        }
        self.config = newer;
        tracing::info!("{why}: reloaded configuration and secrets");
    }
}
