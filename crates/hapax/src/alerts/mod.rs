//! The watch: looks every few seconds at what the server has had and how it is doing, and keeps a
//! board of alerts. [`rules`] decides what is worth attention, [`history`] remembers the counters;
//! here is when that happens, and that an alert is told once when it begins and once when it ends.

mod history;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::store::{HandlerRef, Inspect, LaneState, Store};
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{Now, Traffic};
use jiff::SignedDuration;
use metrics::gauge;
use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use self::history::History;
pub(crate) use self::rules::SecretEnds;
use self::rules::{About, Finding, Seen, Severity, judge};
use crate::config::{ALERT_NAMES, Alerts, Config};
use crate::statements::{Statements, Unprepared};

/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Whoever asks for the alerts has it look again, but not more often than this.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_millis(500);

/// What the configuration says about alerts; a reload replaces it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rules {
    pub(crate) alerts: Alerts,
    pub(crate) secrets: Vec<SecretEnds>,
    /// What handlers will run.
    pub(crate) statements: Statements,
}

impl Rules {
    /// Those of this configuration.
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

/// Where the watch looks, beside the store.
pub(crate) struct Eyes {
    /// What every source has had since the process began.
    pub(crate) traffic: Box<dyn Fn() -> Vec<Traffic> + Send + Sync>,
    /// How far our clock is ahead of what senders sign.
    pub(crate) clock_offset_seconds: Box<dyn Fn() -> Option<i64> + Send + Sync>,
    /// The handlers that are configured now.
    pub(crate) known: Box<dyn Fn() -> Vec<HandlerRef> + Send + Sync>,
    /// The write-ahead log, where the store has one.
    pub(crate) log: Option<PathBuf>,
    /// The clock.
    pub(crate) now: Now,
}

/// Something that holds now, and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Alert {
    #[serde(flatten)]
    about: About,
    severity: Severity,
    since: Timestamp,
    message: String,
}

/// The watch.
pub(crate) struct Watch {
    eyes: Eyes,
    kept: Mutex<Kept>,
    /// One looks at a time.
    turn: tokio::sync::Mutex<()>,
}

struct Kept {
    rules: Rules,
    history: History,
    /// As far as the store could be asked.
    lanes: Vec<LaneState>,
    in_review: Vec<(SourceName, u64)>,
    board: BTreeMap<About, Alert>,
    looked_at: Option<Timestamp>,
    /// What the database said of the handlers' statements; `None` until it was asked.
    unprepared: Option<Vec<Unprepared>>,
}

impl Watch {
    /// Begins with counters that are all zero.
    pub(crate) fn new(eyes: Eyes, rules: Rules) -> Self {
        let history = History::new((eyes.now)());
        let kept = Kept {
            rules,
            history,
            lanes: Vec::new(),
            in_review: Vec::new(),
            board: BTreeMap::new(),
            looked_at: None,
            unprepared: None,
        };
        Self { eyes, kept: Mutex::new(kept), turn: tokio::sync::Mutex::new(()) }
    }

    /// Takes over what the configuration says now.
    pub(crate) fn reload(&self, rules: Rules) {
        let mut kept = self.kept();
        kept.rules = rules;
        kept.unprepared = None;
    }

    /// Looks every few seconds, until `stop`.
    pub(crate) async fn run<S: Store + Inspect>(&self, store: Arc<S>, stop: CancellationToken) {
        let mut beats = interval(LOOK_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            stop.run_until_cancelled(self.look(&*store)).await;
        }
    }

    /// What holds now, the worst first.
    pub(crate) async fn alerts<S: Store + Inspect>(&self, store: &S) -> Vec<Alert> {
        self.look(store).await;
        let mut alerts: Vec<Alert> = self.kept().board.values().cloned().collect();
        alerts.sort_by(|a, b| b.severity.cmp(&a.severity).then(a.since.cmp(&b.since)));
        alerts
    }

    /// How many verifications failed at each source in the last `span`, and since when that is
    /// known: this process may be younger.
    pub(crate) fn failed_within(&self, span: Duration) -> (BTreeMap<SourceName, u64>, Timestamp) {
        let (traffic, now) = ((self.eyes.traffic)(), (self.eyes.now)());
        let kept = self.kept();
        // Every source was looked at at the same moments.
        let (_, since) = kept.history.at(history::earlier(now, span), &SourceName::new(""));
        let of_source = |one: Traffic| {
            let (counts, _) = kept.history.within(span, now, &one);
            (one.source, counts.failed)
        };
        (traffic.into_iter().map(of_source).collect(), since)
    }

    async fn look<S: Store + Inspect>(&self, store: &S) {
        let _turn = self.turn.lock().await;
        let now = (self.eyes.now)();
        let looked_at = self.kept().looked_at;
        if looked_at.is_some_and(|at| now.duration_since(at).abs() < LOOK_AGAIN) {
            return;
        }
        let lanes = match store.lanes().await {
            Ok(lanes) => Some(lanes),
            Err(error) => {
                tracing::debug!(%error, "looking how far behind the handlers are: {error}");
                None
            }
        };
        let in_review = match store.in_review().await {
            Ok(in_review) => Some(in_review),
            Err(error) => {
                tracing::debug!(%error, "looking for events in review: {error}");
                None
            }
        };
        self.check_statements().await;
        let traffic = (self.eyes.traffic)();
        let log = self.eyes.log.as_ref().and_then(|log| std::fs::metadata(log).ok());
        let known = (self.eyes.known)();
        let mut guard = self.kept();
        let kept = &mut *guard;
        kept.looked_at = Some(now);
        // A store that cannot be asked has not become any better: what was seen last still counts.
        kept.lanes = lanes.unwrap_or_else(|| std::mem::take(&mut kept.lanes));
        kept.in_review = in_review.unwrap_or_else(|| std::mem::take(&mut kept.in_review));
        kept.history.note(now, &traffic);
        let seen = Seen {
            now,
            history: &kept.history,
            traffic: &traffic,
            lanes: &kept.lanes,
            in_review: &kept.in_review,
            known: &known,
            secrets: &kept.rules.secrets,
            unwritable: store.writable().err().map(|error| error.to_string()),
            clock_offset_seconds: (self.eyes.clock_offset_seconds)(),
            log_bytes: log.map(|log| log.len()),
            unprepared: kept.unprepared.as_deref().unwrap_or_default(),
        };
        let found = judge(&seen, &kept.rules.alerts);
        post(&mut kept.board, found, now);
    }

    /// Asks the database about the handlers' statements: once, and again while something is wrong.
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

/// Puts what was found on the board, takes off what is over, and tells of both.
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
        tracing::info!(alert = name, source, tenant, lane, "over: {}", alert.message);
    }
    // An alert that never occurred is zero.
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
