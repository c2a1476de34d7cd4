//! Looks for problems every few seconds, and reports them to the store, which keeps one alert for each subject over
//! all nodes and restarts ([`hapax_core::alert_board`]). [`rules`] decides what is a problem.
//!
//! Problems of this process (its clock, its configuration) are found by every node. Problems in the data of
//! all nodes are found by one node at a time, which holds a lease: [`traffic`] reads the counts of all
//! nodes, and [`history`] keeps them. The node whose report raises or clears an alert logs it. While the
//! store cannot be written to, a node lists and logs its own findings.

mod history;
mod rules;
#[cfg(test)]
mod tests;
mod traffic;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::alert_board::{AlertReport, JUDGE, StoredAlert};
use hapax_core::endpoint::EndpointRecord;
use hapax_core::own_messages::ActiveAlert;
use hapax_core::store::{
    AlertRecords, CheckIn, CheckedIn, EndpointFilter, Gauges, HandlerRef, Inspect, InspectOutbox,
    LaneState, PausedHandler, SilenceAsk, SourceSecretStore, Store, StoreError, TrafficHistory,
};
use hapax_core::{SourceName, Timestamp, tuned};
use hapax_engine::Now;
use jiff::SignedDuration;
use metrics::gauge;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub(crate) use self::rules::SecretEnds;
use self::rules::{About, Finding, MissingKey, Observations, judge, judge_node};
use self::traffic::MergedTraffic;
use crate::api::{self, Severity};
use crate::config::{ALERT_NAMES, Alerts, Config};
use crate::sending::{self, SharedSending};
use crate::statements::{Statements, Unprepared};
use crate::traffic_recorder::TrafficRecorder;

/// The time between two rounds.
const ROUND_EVERY: Duration = Duration::from_secs(10);

/// A request for the alerts starts a round too, unless the last one is younger than this.
const ROUND_AGAIN: SignedDuration = SignedDuration::from_millis(500);

/// Pages show the alerts of the last round if that round is younger than this. A late round therefore does not make
/// each page wait for a new one.
const ROUND_RECENT: SignedDuration = SignedDuration::from_secs(15);

/// How long a node stays the judge of the data of all nodes after its last report. The lease lasts three
/// rounds, so that one slow round does not change the judge.
const LEASE: Duration = Duration::from_secs(30);

/// How long a check-out may take: a store that does not answer must not delay the shutdown.
const CHECK_OUT_MAX: Duration = Duration::from_secs(2);

/// If this node asked for the lease within this time, a round for a request does not ask again.
const LEASE_TRUSTED: SignedDuration = SignedDuration::from_secs(15);

/// The least time between the first check that finds a problem and the check that raises its alert. Rounds for requests
/// must not count as a second check.
const RAISE_AFTER: Duration = Duration::from_secs(5);

/// An alert is cleared for all nodes when its problem has been gone for this long. A problem that comes and goes is
/// then one alert.
const QUIET: Duration = Duration::from_secs(5 * 60);

/// The most alerts of one name; one more stands for all others. A problem of a thousand tenants must not be a
/// thousand messages.
const PER_NAME_MAX: usize = 20;

/// The most failing endpoints that are checked. If there are more than [`PER_NAME_MAX`], one alert stands for
/// the others.
const FAILING_MAX: usize = 200;

/// The time between two checks of the vault's keys: if it has all keys, and while one is missing.
const VAULT_EVERY: SignedDuration = SignedDuration::from_mins(10);
const VAULT_AGAIN: SignedDuration = SignedDuration::from_mins(1);

/// The part of the configuration that alerts depend on. A reload replaces this part.
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
            verifiers: configured.source.verifiers().to_vec(),
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
    /// Names this process, and only this one.
    pub(crate) node: Uuid,
    /// The host and the address of this process.
    pub(crate) node_name: String,
    /// The counts of this process, which are recorded before the counts of all nodes are read.
    pub(crate) traffic: Arc<TrafficRecorder>,
    /// The time by which this machine's clock is ahead of the times that senders sign.
    pub(crate) clock_offset_seconds: Box<dyn Fn() -> Option<i64> + Send + Sync>,
    /// The handlers that are configured now.
    pub(crate) known: Box<dyn Fn() -> Vec<HandlerRef> + Send + Sync>,
    /// When the secrets of tenants that were added at run time end.
    pub(crate) tenant_secrets: Box<dyn Fn() -> Vec<SecretEnds> + Send + Sync>,
    /// The vault, whose keys stored values need.
    pub(crate) sending: Arc<SharedSending>,
    /// The write-ahead log, if the store has one.
    pub(crate) log: Option<PathBuf>,
    /// The clock.
    pub(crate) now: Now,
}

/// The acts and reads of a store that alerts need.
pub(crate) trait AlertStore:
    Store + Inspect + InspectOutbox + SourceSecretStore + AlertRecords + TrafficHistory
{
}

impl<S: Store + Inspect + InspectOutbox + SourceSecretStore + AlertRecords + TrafficHistory>
    AlertStore for S
{
}

/// Looks for problems, and lists the alerts.
pub(crate) struct AlertMonitor {
    inputs: Inputs,
    kept: Mutex<MonitorState>,
    /// Held during a round: only one runs at a time.
    turn: tokio::sync::Mutex<()>,
}

struct MonitorState {
    rules: AlertRules,
    /// When this node last asked for the lease of the judge, and whether it got it.
    lease: Option<(Timestamp, bool)>,
    /// The traffic of all nodes, as the judge has read it.
    merged: MergedTraffic,
    /// The state of each handler's jobs, from the last successful query. `None` until this node has read it as the
    /// judge; the same holds for the next three.
    lanes: Option<Vec<LaneState>>,
    paused: Option<Vec<PausedHandler>>,
    in_review: Option<Vec<(SourceName, u64)>>,
    failing: Option<Vec<EndpointRecord>>,
    /// The handlers of all nodes that are alive.
    handlers: HashSet<HandlerRef>,
    /// The keys that the vault lacks, and when the stored values were last checked.
    missing_keys: Option<(Timestamp, Vec<MissingKey>)>,
    /// The alerts of all nodes, as the store listed them last.
    listed: Vec<api::Alert>,
    /// The alerts that were found while the store could not record them, with the time of the first
    /// round.
    unrecorded: BTreeMap<About, Alert>,
    last_round: Option<Timestamp>,
    /// Handlers whose SQL the database refused; `None` until the database was asked.
    unprepared: Option<Vec<Unprepared>>,
}

impl MonitorState {
    /// The number of waiting jobs of each source, as last read.
    fn gauges(&self) -> BTreeMap<SourceName, Gauges> {
        let mut gauges: BTreeMap<SourceName, Gauges> = BTreeMap::new();
        for lane in self.lanes.iter().flatten() {
            let of_source = gauges.entry(lane.handler.source.clone()).or_default();
            of_source.waiting += lane.ready + lane.leased + lane.held + lane.parked;
            of_source.dead += lane.dead;
            of_source.review += lane.review;
        }
        for (source, count) in self.in_review.iter().flatten() {
            gauges.entry(source.clone()).or_default().review += count;
        }
        gauges
    }

    /// The names of the alerts whose data this node has not read yet since it became the judge.
    fn unread(&self) -> Vec<&'static str> {
        let by_data: [(bool, &[&str]); 4] = [
            (self.lanes.is_some(), &["oldest_job", "handler_gone", "dead_letters", "review"]),
            (self.in_review.is_some(), &["review"]),
            (self.failing.is_some(), &["circuits"]),
            (
                self.merged.was_read(),
                &["duplicate_spike", "failed_verifications", "conflicts", "silence"],
            ),
        ];
        let unread = by_data.into_iter().filter(|(was_read, _)| !was_read);
        unread.flat_map(|(_, names)| names).copied().collect()
    }
}

/// A problem with its first check.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Alert {
    about: About,
    severity: Severity,
    since: Timestamp,
    message: String,
}

/// The alerts that one round has found.
struct RoundFindings {
    /// The problems in the data of all nodes; `None` if this node is not the judge.
    judged: Option<Vec<Finding>>,
    /// The names of the alerts that the judge cannot judge yet, because their data could not be read.
    unread: Vec<&'static str>,
    /// The problems of this process.
    own: Vec<Finding>,
}

/// Why a round runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RoundCause {
    /// The time between two rounds has passed.
    Due,
    /// A request asks for the alerts.
    Asked,
}

impl AlertMonitor {
    /// A monitor that has not run a round yet.
    pub(crate) fn new(inputs: Inputs, rules: AlertRules) -> Self {
        let kept = MonitorState {
            rules,
            lease: None,
            merged: MergedTraffic::new((inputs.now)()),
            lanes: None,
            paused: None,
            in_review: None,
            failing: None,
            handlers: HashSet::new(),
            missing_keys: None,
            listed: Vec::new(),
            unrecorded: BTreeMap::new(),
            last_round: None,
            unprepared: None,
        };
        Self { inputs, kept: Mutex::new(kept), turn: tokio::sync::Mutex::new(()) }
    }

    /// The secrets that this node has for a source, with their ends.
    pub(crate) fn secrets_of(&self, source: &SourceName) -> Vec<SecretEnds> {
        let mut secrets = self.kept().rules.secrets.clone();
        secrets.extend((self.inputs.tenant_secrets)());
        secrets.retain(|secret| secret.source == *source);
        secrets
    }

    /// Replaces the rules after the configuration was reloaded.
    pub(crate) fn reload(&self, rules: AlertRules) {
        let mut kept = self.kept();
        kept.rules = rules;
        kept.unprepared = None;
        kept.missing_keys = None;
    }

    /// Runs a round every few seconds, until `stop`.
    pub(crate) async fn run<S: AlertStore>(&self, store: Arc<S>, stop: CancellationToken) {
        let every = tuned!("alerts.every_ms", ROUND_EVERY.as_millis() as u64);
        let mut beats = interval(Duration::from_millis(every));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            stop.run_until_cancelled(self.round(&*store, RoundCause::Due)).await;
        }
    }

    /// Records the shutdown of this process, so that its node is not listed as missing. Called after the last round.
    pub(crate) async fn check_out<S: AlertStore>(&self, store: &S) {
        match timeout(CHECK_OUT_MAX, store.check_out(self.inputs.node)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "checking out of the store: {error}"),
            Err(_) => tracing::debug!("checking out of the store takes too long"),
        }
    }

    /// The active alerts of all nodes, the most severe first and those that are silenced last.
    pub(crate) async fn alerts<S: AlertStore>(&self, store: &S) -> Vec<api::Alert> {
        self.round(store, RoundCause::Asked).await;
        self.listed()
    }

    /// The active alerts as of the last round, unless that round is older than [`ROUND_RECENT`]. Pages show these
    /// alerts: an alert is raised after seconds and cleared after minutes, so a round for each page would find nothing
    /// more.
    pub(crate) async fn recent_alerts<S: AlertStore>(&self, store: &S) -> Vec<api::Alert> {
        let now = (self.inputs.now)();
        let last_round = self.kept().last_round;
        let is_recent = last_round.is_some_and(|at| now.duration_since(at).abs() < ROUND_RECENT);
        if !is_recent {
            self.round(store, RoundCause::Asked).await;
        }
        self.listed()
    }

    /// Silences an alert for all nodes. The next list shows the silence.
    pub(crate) async fn silence<S: AlertStore>(
        &self,
        store: &S,
        ask: SilenceAsk,
    ) -> Result<Option<StoredAlert>, StoreError> {
        let silenced = store.silence_alert(ask).await;
        self.kept().last_round = None;
        silenced
    }

    fn listed(&self) -> Vec<api::Alert> {
        let kept = self.kept();
        let mut alerts = kept.listed.clone();
        let known: BTreeSet<String> = alerts.iter().map(|alert| alert.id.clone()).collect();
        let unrecorded = kept.unrecorded.values().map(Alert::shown);
        alerts.extend(unrecorded.filter(|alert| !known.contains(&alert.id)));
        alerts.sort_by(|a, b| {
            let silenced = a.silenced.is_some().cmp(&b.silenced.is_some());
            silenced.then(b.severity.cmp(&a.severity)).then(a.since.cmp(&b.since))
        });
        alerts
    }

    /// The recorder of the figures of each source.
    pub(crate) fn traffic(&self) -> &TrafficRecorder {
        &self.inputs.traffic
    }

    async fn round<S: AlertStore>(&self, store: &S, why: RoundCause) {
        let _turn = self.turn.lock().await;
        let now = (self.inputs.now)();
        let last_round = self.kept().last_round;
        let is_young = last_round.is_some_and(|at| now.duration_since(at).abs() < ROUND_AGAIN);
        if why == RoundCause::Asked && is_young {
            return;
        }
        let is_judge = self.is_judge(store, now, why).await;
        if is_judge {
            self.observe(store, now).await;
        }
        self.check_statements().await;
        self.check_vault(store, now).await;
        let found = self.find(store, now, is_judge);
        self.kept().last_round = Some(now);
        match self.report(store, &found, now, why).await {
            Ok(()) => self.forget_unrecorded(&found),
            Err(error) => {
                tracing::debug!(%error, "recording the alerts: {error}");
                self.keep_unrecorded(&found, now);
            }
        }
        // The metric of an alert that never occurred is zero, not absent.
        let listed = self.listed();
        for name in ALERT_NAMES {
            let is_counted = |alert: &&api::Alert| alert.name == name && alert.silenced.is_none();
            let count = listed.iter().filter(is_counted).count();
            gauge!("hapax_alerts", "name" => name).set(count as f64);
        }
    }

    /// Whether this node judges the data of all nodes.
    async fn is_judge<S: AlertStore>(&self, store: &S, now: Timestamp, why: RoundCause) -> bool {
        let known = self.kept().lease;
        if let Some((at, holds)) = known
            && why == RoundCause::Asked
            && now.duration_since(at).abs() < LEASE_TRUSTED
        {
            return holds;
        }
        let lease = tuned!("alerts.lease_ms", LEASE.as_millis() as u64);
        let lease = Duration::from_millis(lease);
        let (node, name) = (self.inputs.node, self.inputs.node_name.clone());
        let checked = CheckIn { node, name, lease, handlers: (self.inputs.known)() };
        match store.check_in(checked).await {
            Ok(CheckedIn { is_judge, handlers }) => {
                let mut kept = self.kept();
                kept.handlers = handlers;
                kept.lease = Some((now, is_judge));
                is_judge
            }
            Err(error) => {
                tracing::debug!(%error, "reporting this node to the store: {error}");
                // On a store that cannot be written to, the last judge still lists its findings.
                known.is_some_and(|(_, holds)| holds)
            }
        }
    }

    /// Reads the data of all nodes. If the store cannot be read, the last known values stay. If there are
    /// none, the alerts of the previous judge stay. So no alert ends because of a failed query.
    async fn observe<S: AlertStore>(&self, store: &S, now: Timestamp) {
        match store.lanes().await {
            Ok(lanes) => self.kept().lanes = Some(lanes),
            Err(error) => tracing::debug!(%error, "reading the state of the handlers: {error}"),
        }
        match store.paused_handlers().await {
            Ok(paused) => self.kept().paused = Some(paused),
            Err(error) => tracing::debug!(%error, "reading which handlers are paused: {error}"),
        }
        match store.in_review().await {
            Ok(in_review) => self.kept().in_review = Some(in_review),
            Err(error) => tracing::debug!(%error, "counting events in review: {error}"),
        }
        let failing =
            EndpointFilter { failing: true, limit: FAILING_MAX, ..EndpointFilter::default() };
        match store.endpoints(failing).await {
            Ok(failing) => self.kept().failing = Some(failing.items),
            Err(error) => tracing::debug!(%error, "reading the endpoints that fail: {error}"),
        }
        let gauges = self.kept().gauges();
        self.inputs.traffic.note_gauges(gauges).await;
        self.inputs.traffic.record(store).await;
        let week = self.kept().merged.ask_week(now);
        if let Some(week) = week {
            match store.traffic_by_source(week).await {
                Ok(counts) => self.kept().merged.take_week(&counts, now),
                Err(error) => tracing::debug!(%error, "reading the traffic of a week: {error}"),
            }
        }
        let ask = self.kept().merged.ask();
        match store.traffic_by_source(ask).await {
            Ok(counts) => self.kept().merged.take(counts, &self.inputs.traffic.sources(), now),
            Err(error) => tracing::debug!(%error, "reading the traffic of all nodes: {error}"),
        }
    }

    fn find<S: AlertStore>(&self, store: &S, now: Timestamp, is_judge: bool) -> RoundFindings {
        let log = self.inputs.log.as_ref().and_then(|log| std::fs::metadata(log).ok());
        let mut secrets = (self.inputs.tenant_secrets)();
        let mut guard = self.kept();
        let kept = &mut *guard;
        if !is_judge {
            // When this node is the judge again, it begins with the counts of all nodes until then.
            kept.merged = MergedTraffic::new(now);
            // The data that this node read when it was last the judge may be an hour old.
            kept.lanes = None;
            kept.paused = None;
            kept.in_review = None;
            kept.failing = None;
        }
        secrets.extend(kept.rules.secrets.iter().cloned());
        let observed = Observations {
            now,
            history: kept.merged.history(),
            traffic: kept.merged.current(),
            lanes: kept.lanes.as_deref().unwrap_or_default(),
            in_review: kept.in_review.as_deref().unwrap_or_default(),
            known: &kept.handlers,
            pauses: kept.merged.pauses(),
            failing: kept.failing.as_deref().unwrap_or_default(),
            missing_keys: kept.missing_keys.as_ref().map_or(&[], |(_, missing)| missing),
            paused: kept.paused.as_deref().unwrap_or_default(),
            secrets: &secrets,
            unwritable: store.writable().err().map(|error| error.to_string()),
            clock_offset_seconds: (self.inputs.clock_offset_seconds)(),
            log_bytes: log.map(|log| log.len()),
            unprepared: kept.unprepared.as_deref().unwrap_or_default(),
        };
        let alerts = &kept.rules.alerts;
        RoundFindings {
            judged: is_judge.then(|| judge(&observed, alerts)),
            unread: kept.unread(),
            own: judge_node(&observed, alerts),
        }
    }

    /// Lets the store record the findings, and lists the alerts of all nodes. A round for a request
    /// records the findings only if an alert has begun or ended: the times of other alerts do not
    /// justify a commit for each request.
    async fn report<S: AlertStore>(
        &self,
        store: &S,
        found: &RoundFindings,
        now: Timestamp,
        why: RoundCause,
    ) -> Result<(), StoreError> {
        let mut rows = store.alerts().await?;
        let since = |subject: &str| {
            rows.iter().find(|row| row.alert.subject == subject).map_or(now, |row| row.since)
        };
        let judged = found.judged.as_deref().map(|judged| {
            let mut judged = reported(judged, since);
            judged.extend(still_unread(&rows, &judged, &found.unread));
            judged
        });
        let own = reported(&found.own, since);
        let node = self.inputs.node;
        let subjects = |alerts: &[ActiveAlert]| -> BTreeSet<String> {
            alerts.iter().map(|alert| alert.subject.clone()).collect()
        };
        let stored = |reporter: Uuid| -> BTreeSet<String> {
            let its = rows.iter().filter(|row| row.reporter == reporter);
            its.map(|row| row.alert.subject.clone()).collect()
        };
        let is_same = judged.as_deref().is_none_or(|judged| subjects(judged) == stored(JUDGE))
            && subjects(&own) == stored(node);
        let fresh: Vec<ActiveAlert> = judged.iter().flatten().chain(&own).cloned().collect();
        if why == RoundCause::Due || !is_same {
            let report = AlertReport {
                node,
                judged,
                own,
                raise_after: Duration::from_millis(tuned!(
                    "alerts.raise_after_ms",
                    RAISE_AFTER.as_millis() as u64
                )),
                clear_after: Duration::from_millis(tuned!(
                    "alerts.quiet_ms",
                    QUIET.as_millis() as u64
                )),
            };
            let noted = store.note_alerts(report).await?;
            noted.raised.iter().filter_map(content).for_each(|alert| log_raised(&alert));
            noted.cleared.iter().filter_map(content).for_each(|alert| log_cleared(&alert));
            rows = store.alerts().await?;
        }
        // The problems that this node has just found are more recent than those in the store.
        for alert in fresh {
            if let Some(row) = rows.iter_mut().find(|row| row.alert.subject == alert.subject) {
                row.alert = alert;
            }
        }
        self.kept().listed = rows.iter().filter_map(shown).collect();
        Ok(())
    }

    /// The store has recorded everything that was found.
    fn forget_unrecorded(&self, found: &RoundFindings) {
        let unrecorded = std::mem::take(&mut self.kept().unrecorded);
        let found: BTreeSet<&About> = found.all().map(|finding| &finding.about).collect();
        for alert in unrecorded.into_values().filter(|alert| !found.contains(&alert.about)) {
            log_cleared(&alert.shown());
        }
    }

    /// The store could not record the findings: this node lists and logs them.
    fn keep_unrecorded(&self, found: &RoundFindings, now: Timestamp) {
        let mut kept = self.kept();
        let known: BTreeSet<String> = kept.listed.iter().map(|alert| alert.id.clone()).collect();
        let mut before = std::mem::take(&mut kept.unrecorded);
        for Finding { about, severity, message } in found.all().cloned() {
            let since = before.remove(&about).map(|alert| alert.since);
            let is_new = since.is_none();
            let alert = Alert { about, severity, since: since.unwrap_or(now), message };
            let shown = alert.shown();
            if is_new && !known.contains(&shown.id) {
                log_raised(&shown);
            }
            kept.unrecorded.insert(alert.about.clone(), alert);
        }
        before.into_values().for_each(|alert| log_cleared(&alert.shown()));
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

    /// Checks now and then whether the vault has the keys of all stored values. This reads every
    /// endpoint, so it is not done in every round.
    async fn check_vault<S: AlertStore>(&self, store: &S, now: Timestamp) {
        {
            let kept = self.kept();
            let is_due = kept.missing_keys.as_ref().is_none_or(|(at, missing)| {
                let every = if missing.is_empty() { VAULT_EVERY } else { VAULT_AGAIN };
                now.duration_since(*at).abs() >= every
            });
            if !kept.rules.alerts.vault_key || !is_due {
                return;
            }
        }
        let known = self.inputs.sending.vault_keys();
        match sending::sealed_values(store).await {
            Ok(uses) => {
                let missing = uses.into_iter().filter(|(key, _)| !known.contains(key));
                let missing = missing.map(|(key, owners)| MissingKey {
                    key: key.to_string(),
                    values: owners.len(),
                    example: owners.into_iter().next().unwrap_or_default(),
                });
                // One alert stands for all keys: the first one is named.
                self.kept().missing_keys = Some((now, missing.take(1).collect()));
            }
            Err(error) => tracing::debug!(%error, "reading which keys are needed: {error}"),
        }
    }

    fn kept(&self) -> MutexGuard<'_, MonitorState> {
        self.kept.lock().expect("no panic happens under this lock")
    }
}

impl RoundFindings {
    fn all(&self) -> impl Iterator<Item = &Finding> {
        self.judged.iter().flatten().chain(&self.own)
    }
}

/// The problems as the store records them. For each name, the oldest problems have their own alerts, and one
/// more alert stands for all others. `since` returns the time of the first check that found a subject.
fn reported(found: &[Finding], since: impl Fn(&str) -> Timestamp) -> Vec<ActiveAlert> {
    let mut reported = Vec::new();
    for name in ALERT_NAMES {
        let of_name = found.iter().filter(|finding| finding.about.name == name);
        let mut alerts: Vec<Alert> = of_name
            .map(|Finding { about, severity, message }| Alert {
                about: about.clone(),
                severity: *severity,
                since: since(&about.subject()),
                message: message.clone(),
            })
            .collect();
        alerts.sort_by(|a, b| a.since.cmp(&b.since).then(a.about.cmp(&b.about)));
        let more = alerts.split_off(alerts.len().min(PER_NAME_MAX));
        reported.extend(alerts.iter().map(Alert::active));
        reported.extend(more.iter().max_by_key(|alert| alert.severity).map(|worst| {
            let subject = format!("[\"more\",\"{name}\"]");
            let message = format!(
                "{} more alerts of this kind are active. One of them: {}",
                more.len(),
                worst.message
            );
            let about = About { name, source: None, tenant: None, lane: None, endpoint: None };
            let since = since(&subject);
            Alert { about, message, since, severity: worst.severity }.active_as(subject)
        }));
    }
    reported
}

/// The alerts of the judge before this one that this judge cannot judge yet: a query that fails ends no alert.
fn still_unread(
    rows: &[StoredAlert],
    judged: &[ActiveAlert],
    unread: &[&'static str],
) -> Vec<ActiveAlert> {
    let is_judged = |row: &StoredAlert| judged.iter().any(|one| one.subject == row.alert.subject);
    let is_unread = |row: &StoredAlert| {
        content(&row.alert).is_some_and(|alert| unread.contains(&alert.name.as_str()))
    };
    let rows = rows.iter().filter(|row| row.reporter == JUDGE && is_unread(row) && !is_judged(row));
    rows.map(|row| row.alert.clone()).collect()
}

impl About {
    /// The subject, as all nodes spell it. The subject contains no time: another node finds the same problem a few
    /// seconds earlier or later.
    fn subject(&self) -> String {
        let Self { name, source, tenant, lane, endpoint } = self;
        serde_json::json!([name, source, tenant, lane, endpoint]).to_string()
    }
}

impl Alert {
    fn active(&self) -> ActiveAlert {
        self.active_as(self.about.subject())
    }

    fn active_as(&self, subject: String) -> ActiveAlert {
        let alert = ActiveAlert { subject, data: serde_json::Value::Null.into() };
        let content = api::Alert { id: alert.key(), ..self.content() };
        let data = serde_json::to_value(content).expect("an alert is JSON");
        ActiveAlert { data: data.into(), ..alert }
    }

    /// The alert as the API shows it while the store cannot record it.
    fn shown(&self) -> api::Alert {
        api::Alert { id: self.active().key(), notified: Some(false), ..self.content() }
    }

    fn content(&self) -> api::Alert {
        let About { name, source, tenant, lane, endpoint } = self.about.clone();
        api::Alert {
            id: String::new(),
            name: name.to_owned(),
            source,
            tenant,
            lane,
            endpoint,
            severity: self.severity,
            since: self.since,
            message: self.message.clone(),
            notified: None,
            silenced: None,
        }
    }
}

/// A stored alert as the API shows it.
pub(crate) fn shown(row: &StoredAlert) -> Option<api::Alert> {
    Some(api::Alert {
        id: row.alert.key(),
        since: row.since,
        notified: Some(row.is_published),
        silenced: row.silence.clone().map(api::AlertSilence::from),
        ..content(&row.alert)?
    })
}

/// The content of a stored alert; `None` if another version of Hapax wrote it and this version cannot read it.
fn content(alert: &ActiveAlert) -> Option<api::Alert> {
    serde_json::from_str(alert.data.as_str()).ok()
}

fn log_raised(alert: &api::Alert) {
    let api::Alert { name, source, tenant, lane, message, .. } = alert;
    match alert.severity {
        Severity::Info => tracing::info!(alert = name, source, tenant, lane, "{message}"),
        Severity::Warning => tracing::warn!(alert = name, source, tenant, lane, "{message}"),
        Severity::Critical => tracing::error!(alert = name, source, tenant, lane, "{message}"),
    }
}

fn log_cleared(alert: &api::Alert) {
    let api::Alert { name, source, tenant, lane, message, .. } = alert;
    tracing::info!(alert = name, source, tenant, lane, "cleared: {message}");
}
