//! Evaluates the alert rules every few seconds and keeps the list of active alerts. [`rules`]
//! decides which alerts are active, and [`history`] keeps the counters. This file schedules the
//! rounds, and logs each alert once when it begins and once when it ends. After each round the
//! active alerts are passed to the store, which publishes each once for all nodes.

mod history;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::own_messages::ActiveAlert;
use hapax_core::store::{HandlerRef, Inspect, LaneState, OwnMessages, PausedHandler, Store};
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{Now, Traffic};
use jiff::SignedDuration;
use metrics::gauge;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use self::history::History;
pub(crate) use self::rules::SecretEnds;
use self::rules::{About, Finding, Observations, judge};
use crate::api::{self, Severity};
use crate::config::{ALERT_NAMES, Alerts, Config};
use crate::statements::{Statements, Unprepared};

/// The time between two rounds.
const ROUND_EVERY: Duration = Duration::from_secs(10);

/// A request for the alerts starts a round too, unless the last one is younger than this.
const ROUND_AGAIN: SignedDuration = SignedDuration::from_millis(500);

/// The time after which an alert is cleared for all nodes. An alert that comes and goes is then one alert.
const QUIET: Duration = Duration::from_secs(5 * 60);

/// The most alerts of one name that are published one by one; one more message stands for all
/// others. A problem of a thousand tenants must not be a thousand messages.
const PUBLISHED_PER_NAME_MAX: usize = 20;

/// The part of the configuration that alerts depend on. A reload replaces it.
#[derive(Debug, Clone, Default)]
pub(crate) struct AlertRules {
    pub(crate) alerts: Alerts,
    pub(crate) secrets: Vec<SecretEnds>,
    /// The SQL of the handlers.
    pub(crate) statements: Statements,
}

impl AlertRules {
    /// The rules of this configuration.
    pub(crate) fn of(config: &Config) -> Self {
        let secrets = config.sources.iter().map(|configured| SecretEnds {
            source: configured.source.name().clone(),
            tenant: configured.source.tenant().to_string(),
            until: configured.secrets_until.clone(),
        });
        Self {
            alerts: config.settings.alerts.clone(),
            secrets: secrets.collect(),
            statements: Statements::of(config),
        }
    }
}

/// The inputs of the rules, apart from the store.
pub(crate) struct Inputs {
    /// The counters of every source since the process started.
    pub(crate) traffic: Box<dyn Fn() -> Vec<Traffic> + Send + Sync>,
    /// How far this machine's clock is ahead of the times that senders sign.
    pub(crate) clock_offset_seconds: Box<dyn Fn() -> Option<i64> + Send + Sync>,
    /// The handlers that are configured now.
    pub(crate) known: Box<dyn Fn() -> Vec<HandlerRef> + Send + Sync>,
    /// When the secrets of tenants that were added at run time end.
    pub(crate) tenant_secrets: Box<dyn Fn() -> Vec<SecretEnds> + Send + Sync>,
    /// The write-ahead log, where the store has one.
    pub(crate) log: Option<PathBuf>,
    /// The clock.
    pub(crate) now: Now,
}

/// An active alert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Alert {
    about: About,
    severity: Severity,
    since: Timestamp,
    message: String,
}

impl From<Alert> for api::Alert {
    fn from(Alert { about, severity, since, message }: Alert) -> Self {
        let About { name, source, tenant, lane } = about;
        Self { name: name.to_owned(), source, tenant, lane, severity, since, message }
    }
}

/// Evaluates the rules, and keeps the active alerts.
pub(crate) struct AlertMonitor {
    inputs: Inputs,
    kept: Mutex<Kept>,
    /// Held during a round: only one runs at a time.
    turn: tokio::sync::Mutex<()>,
}

struct Kept {
    rules: AlertRules,
    history: History,
    /// The state of each handler's jobs, from the last successful query.
    lanes: Vec<LaneState>,
    paused: Vec<PausedHandler>,
    in_review: Vec<(SourceName, u64)>,
    board: BTreeMap<About, Alert>,
    last_round: Option<Timestamp>,
    /// Handlers whose SQL the database refused; `None` until the database was asked.
    unprepared: Option<Vec<Unprepared>>,
}

impl AlertMonitor {
    /// No alert is active, and all counters are zero.
    pub(crate) fn new(inputs: Inputs, rules: AlertRules) -> Self {
        let history = History::new((inputs.now)());
        let kept = Kept {
            rules,
            history,
            lanes: Vec::new(),
            paused: Vec::new(),
            in_review: Vec::new(),
            board: BTreeMap::new(),
            last_round: None,
            unprepared: None,
        };
        Self { inputs, kept: Mutex::new(kept), turn: tokio::sync::Mutex::new(()) }
    }

    /// Replaces the rules after the configuration was reloaded.
    pub(crate) fn reload(&self, rules: AlertRules) {
        let mut kept = self.kept();
        kept.rules = rules;
        kept.unprepared = None;
    }

    /// Runs a round every few seconds, until `stop`.
    pub(crate) async fn run<S: Store + Inspect + OwnMessages>(
        &self,
        store: Arc<S>,
        stop: CancellationToken,
    ) {
        let mut beats = interval(ROUND_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            let round = async {
                self.run_round(&*store).await;
                self.publish(&*store).await;
            };
            stop.run_until_cancelled(round).await;
        }
    }

    /// Lets the store publish alerts that are new, and those that are over.
    async fn publish<S: OwnMessages>(&self, store: &S) {
        let active = published(&self.kept().board);
        if let Err(error) = store.note_alerts(active, QUIET).await {
            // The next round tries again. A store that cannot write is an alert itself.
            tracing::debug!(%error, "publishing alerts: {error}");
        }
    }

    /// The active alerts, the most severe first.
    pub(crate) async fn alerts<S: Store + Inspect>(&self, store: &S) -> Vec<Alert> {
        self.run_round(store).await;
        let mut alerts: Vec<Alert> = self.kept().board.values().cloned().collect();
        alerts.sort_by(|a, b| b.severity.cmp(&a.severity).then(a.since.cmp(&b.since)));
        alerts
    }

    /// The failed verifications of each source in the last `span`, and the time from which they
    /// were counted. The process may be younger than `span`.
    pub(crate) fn failed_within(&self, span: Duration) -> (BTreeMap<SourceName, u64>, Timestamp) {
        let (traffic, now) = ((self.inputs.traffic)(), (self.inputs.now)());
        let kept = self.kept();
        // Every source is sampled at the same moments, so any source name gives the same time.
        let (_, since) = kept.history.at(history::earlier(now, span), &SourceName::new(""));
        let of_source = |one: Traffic| {
            let (counts, _) = kept.history.within(span, now, &one);
            (one.source, counts.failed)
        };
        (traffic.into_iter().map(of_source).collect(), since)
    }

    async fn run_round<S: Store + Inspect>(&self, store: &S) {
        let _turn = self.turn.lock().await;
        let now = (self.inputs.now)();
        let last_round = self.kept().last_round;
        if last_round.is_some_and(|at| now.duration_since(at).abs() < ROUND_AGAIN) {
            return;
        }
        let lanes = match store.lanes().await {
            Ok(lanes) => Some(lanes),
            Err(error) => {
                tracing::debug!(%error, "reading the state of the handlers: {error}");
                None
            }
        };
        let paused = match store.paused_handlers().await {
            Ok(paused) => Some(paused),
            Err(error) => {
                tracing::debug!(%error, "reading which handlers are paused: {error}");
                None
            }
        };
        let in_review = match store.in_review().await {
            Ok(in_review) => Some(in_review),
            Err(error) => {
                tracing::debug!(%error, "counting events in review: {error}");
                None
            }
        };
        self.check_statements().await;
        let traffic = (self.inputs.traffic)();
        let log = self.inputs.log.as_ref().and_then(|log| std::fs::metadata(log).ok());
        let known = (self.inputs.known)();
        let mut secrets = (self.inputs.tenant_secrets)();
        let mut guard = self.kept();
        let kept = &mut *guard;
        kept.last_round = Some(now);
        // If the store cannot be read, the last known values stay, so that no alert ends because of
        // a failed query.
        kept.lanes = lanes.unwrap_or_else(|| std::mem::take(&mut kept.lanes));
        kept.paused = paused.unwrap_or_else(|| std::mem::take(&mut kept.paused));
        kept.in_review = in_review.unwrap_or_else(|| std::mem::take(&mut kept.in_review));
        kept.history.note(now, &traffic);
        secrets.extend(kept.rules.secrets.iter().cloned());
        let observed = Observations {
            now,
            history: &kept.history,
            traffic: &traffic,
            lanes: &kept.lanes,
            in_review: &kept.in_review,
            known: &known,
            paused: &kept.paused,
            secrets: &secrets,
            unwritable: store.writable().err().map(|error| error.to_string()),
            clock_offset_seconds: (self.inputs.clock_offset_seconds)(),
            log_bytes: log.map(|log| log.len()),
            unprepared: kept.unprepared.as_deref().unwrap_or_default(),
        };
        let found = judge(&observed, &kept.rules.alerts);
        post(&mut kept.board, found, now);
    }

    /// Lets the database prepare the handlers' SQL: once, and in every round while some of it fails.
    async fn check_statements(&self) {
        let statements = {
            let kept = self.kept();
            if !kept.rules.alerts.statements || kept.unprepared.as_ref().is_some_and(Vec::is_empty)
            {
                return;
            }
            kept.rules.statements.clone()
        };
        match statements.unprepared().await {
            Ok(unprepared) => self.kept().unprepared = Some(unprepared),
            Err(error) => tracing::debug!(%error, "preparing the handlers' statements: {error}"),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("no panic happens under this lock")
    }
}

/// The alerts as the store publishes them. Of each name the oldest keep their own messages.
fn published(board: &BTreeMap<About, Alert>) -> Vec<ActiveAlert> {
    let mut active = Vec::new();
    for name in ALERT_NAMES {
        let mut alerts: Vec<&Alert> =
            board.values().filter(|alert| alert.about.name == name).collect();
        alerts.sort_by(|a, b| a.since.cmp(&b.since).then(a.about.cmp(&b.about)));
        let shown = alerts.len().min(PUBLISHED_PER_NAME_MAX);
        active.extend(alerts[..shown].iter().map(|alert| alert.published()));
        let more = &alerts[shown..];
        active.extend(more.iter().max_by_key(|alert| alert.severity).map(|worst| {
            let message = format!(
                "{} more alerts of this kind are active: see `hapax alerts`. One of them: {}",
                more.len(),
                worst.message
            );
            let about = About { name, source: None, tenant: None, lane: None };
            let summary = Alert { about, message, ..(*worst).clone() };
            ActiveAlert { subject: format!("[\"more\",\"{name}\"]"), ..summary.published() }
        }));
    }
    active
}

impl Alert {
    /// The subject has no time in it: another node finds the same problem a few seconds earlier or later.
    fn published(&self) -> ActiveAlert {
        let About { name, source, tenant, lane } = &self.about;
        let subject = serde_json::json!([name, source, tenant, lane]).to_string();
        let data = serde_json::to_value(api::Alert::from(self.clone())).expect("an alert is JSON");
        ActiveAlert { subject, data: data.into() }
    }
}

/// Adds new alerts to the board, removes alerts that are over, and logs both.
fn post(board: &mut BTreeMap<About, Alert>, found: Vec<Finding>, now: Timestamp) {
    let mut before = std::mem::take(board);
    for Finding { about, severity, message } in found {
        let since = match before.remove(&about) {
            Some(alert) => alert.since,
            None => {
                say_begun(&about, severity, &message);
                now
            }
        };
        board.insert(about.clone(), Alert { about, severity, since, message });
    }
    for alert in before.into_values() {
        let About { name, source, tenant, lane } = &alert.about;
        tracing::info!(alert = name, source, tenant, lane, "cleared: {}", alert.message);
    }
    // The metric of an alert that never occurred is zero, not absent.
    for name in ALERT_NAMES {
        let count = board.keys().filter(|about| about.name == name).count();
        gauge!("hapax_alerts", "name" => name).set(count as f64);
    }
}

fn say_begun(about: &About, severity: Severity, message: &str) {
    let About { name, source, tenant, lane } = about;
    match severity {
        Severity::Info => tracing::info!(alert = name, source, tenant, lane, "{message}"),
        Severity::Warning => tracing::warn!(alert = name, source, tenant, lane, "{message}"),
        Severity::Critical => tracing::error!(alert = name, source, tenant, lane, "{message}"),
    }
}
