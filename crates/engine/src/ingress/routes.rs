//! The routing table: the source of each path, with that source's limits, counters and log budget.
//! A reload builds a new table and swaps it in. After that, a request needs no lookup by name.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use hapax_core::handler::{EventView, Handler};
use hapax_core::store::{Decision, EventId, NewJob, Rejection, SecretUse, TrafficFigures};
use hapax_core::{Receipt, Source, SourceName, Tenant, Timestamp};
use http::HeaderName;
use ipnet::IpNet;
use metrics::{Counter, Histogram, counter, histogram};
use tracing::{error, info, warn};

use crate::http::body_memory::BodyMemory;
use crate::ingress::rate_limits::{EventLimit, FailureLimit};
use crate::ingress::rejections::RejectionLog;
use crate::ingress::respond::Reason;
use crate::limits::{BodyLimits, HANDSHAKES, LOG_LINES_PER_SECOND, Rate, UNVERIFIED_DEFAULT};
use crate::log_budget::LogBudget;
use crate::source_tallies::{SourceTallies, SourceTally};

/// The settings of the ingress. All settings may change with a reload.
#[derive(Debug)]
pub struct RoutesSpec {
    /// The public URL of this server, without a path and without a slash at its end.
    pub public_url: String,
    /// The proxies whose `X-Forwarded-For` is trusted.
    pub trusted_proxies: Vec<IpNet>,
    /// The limits of a body.
    pub body: BodyLimits,
    /// Every configured pair of tenant and source.
    pub sources: Vec<RouteSpec>,
}

impl RoutesSpec {
    /// A table of these sources, with the defaults for everything else.
    pub fn new(sources: Vec<RouteSpec>) -> Self {
        Self {
            public_url: "http://localhost".to_owned(),
            trusted_proxies: Vec::new(),
            body: BodyLimits::default(),
            sources,
        }
    }
}

/// One source of one tenant, and its limits.
#[derive(Debug)]
pub struct RouteSpec {
    /// The source. Its path is `/webhooks/{source}`, or `/webhooks/{tenant}/{source}` for a tenant
    /// other than the default.
    pub source: Arc<Source>,
    /// `rate_limit`: verified events.
    pub rate_limit: Option<Rate>,
    /// `unverified_limit`: failed verifications per client address.
    pub unverified_limit: Option<Rate>,
    /// The handlers that get a job for each event.
    pub handlers: Vec<Arc<Handler>>,
    /// When the sender gets its answer.
    pub mode: AnswerMode,
}

/// When a sender gets its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AnswerMode {
    /// The sender is answered as soon as the event is durable.
    #[default]
    Async,
    /// The sender is answered when the event's jobs have ended, or after `timeout`.
    Sync {
        /// `sync_timeout`: counted from the request's head.
        timeout: Duration,
    },
}

impl AnswerMode {
    /// The word in the config.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Async => "async",
            Self::Sync { .. } => "sync",
        }
    }
}

impl RouteSpec {
    /// A source with the default limits and no handlers.
    pub fn new(source: Arc<Source>) -> Self {
        Self {
            source,
            rate_limit: None,
            unverified_limit: Some(UNVERIFIED_DEFAULT),
            handlers: Vec::new(),
            mode: AnswerMode::Async,
        }
    }
}

/// A change of one pair of tenant and source while the server runs.
#[derive(Debug)]
pub enum RouteChange {
    /// Its requests are verified by this source.
    Serve(RouteSpec),
    /// The pair exists, but its secrets cannot be used now: its requests get a 503, so that the sender
    /// retries. A 401 would make the sender give up.
    Unavailable {
        /// The tenant.
        tenant: Tenant,
        /// The source.
        source: SourceName,
    },
    /// Its requests get a 404.
    Remove {
        /// The tenant.
        tenant: Tenant,
        /// The source.
        source: SourceName,
    },
}

/// Two pairs of tenant and source have the same path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("two sources answer at /webhooks/{path}")]
pub struct PathTaken {
    /// The path after `/webhooks/`.
    pub path: String,
}

/// The compiled table. Build it after the metrics recorder is installed, because the counters are
/// resolved here, once. A clone shares limits, counters and memory with the original.
#[derive(Debug, Clone)]
pub struct Routes {
    by_path: HashMap<Box<str>, Arc<SourceRoute>>,
    /// The pairs whose secrets cannot be used now.
    unavailable: HashMap<Box<str>, Arc<SourceRecord>>,
    /// Counts and logs requests that are refused before their source is known.
    pub(crate) unknown_source: Arc<SourceRecord>,
    pub(crate) public_url: Box<str>,
    pub(crate) trusted_proxies: Arc<[IpNet]>,
    pub(crate) body: BodyLimits,
    pub(crate) unfinished: BodyMemory,
    /// The last refused requests of all sources.
    rejections: Arc<RejectionLog>,
    /// The counters that statistics and alerts read, because metrics cannot be read back.
    tallies: SourceTallies,
}

/// One source in the table.
#[derive(Debug)]
pub(crate) struct SourceRoute {
    pub(crate) source: Arc<Source>,
    pub(crate) rate: Option<EventLimit>,
    pub(crate) unverified: Option<FailureLimit>,
    pub(crate) handshakes: FailureLimit,
    pub(crate) secret_headers: Box<[HeaderName]>,
    pub(crate) record: SourceRecord,
    pub(crate) mode: AnswerMode,
    handlers: Box<[Arc<Handler>]>,
    /// The time of the last request that each secret verified, in seconds since 1970; zero for
    /// none.
    secrets_used: Box<[AtomicI64]>,
}

impl Routes {
    /// Compiles the table.
    pub fn build(spec: RoutesSpec) -> Result<Self, PathTaken> {
        let rejections = Arc::<RejectionLog>::default();
        let tallies = SourceTallies::default();
        let mut by_path = HashMap::with_capacity(spec.sources.len());
        for route in spec.sources {
            let path = path_of(route.source.tenant(), route.source.name());
            if by_path
                .insert(path.clone(), Arc::new(SourceRoute::new(route, &rejections, &tallies)))
                .is_some()
            {
                return Err(PathTaken { path: path.into() });
            }
        }
        Ok(Self {
            by_path,
            unavailable: HashMap::new(),
            // These requests belong to no source, so no source's figures count them.
            unknown_source: Arc::new(SourceRecord::new("unknown", &rejections, Arc::default())),
            public_url: spec.public_url.trim_end_matches('/').into(),
            trusted_proxies: spec.trusted_proxies.into(),
            unfinished: BodyMemory::new(spec.body.unfinished_bytes_max, spec.body.left_alone),
            rejections,
            tallies,
            body: spec.body,
        })
    }

    /// Changes some pairs. The counters of their sources continue.
    pub fn change(&mut self, changes: Vec<RouteChange>) {
        for change in changes {
            match change {
                RouteChange::Serve(spec) => {
                    let path = path_of(spec.source.tenant(), spec.source.name());
                    let route = SourceRoute::new(spec, &self.rejections, &self.tallies);
                    if let Some(before) = self.by_path.get(&path) {
                        route.continue_from(before);
                    }
                    self.unavailable.remove(&path);
                    self.by_path.insert(path, Arc::new(route));
                }
                RouteChange::Unavailable { tenant, source } => {
                    let path = path_of(&tenant, &source);
                    self.by_path.remove(&path);
                    let tally = self.tallies.of(&source);
                    let record = SourceRecord::new(source.as_str(), &self.rejections, tally);
                    self.unavailable.insert(path, Arc::new(record));
                }
                RouteChange::Remove { tenant, source } => {
                    let path = path_of(&tenant, &source);
                    self.by_path.remove(&path);
                    self.unavailable.remove(&path);
                }
            }
        }
    }

    /// The source at this path of a URL, exactly as it was received.
    pub(crate) fn find(&self, path: &str) -> Option<&Arc<SourceRoute>> {
        self.by_path.get(path.strip_prefix("/webhooks/")?)
    }

    /// The counters of a source at this path whose secrets cannot be used now.
    pub(crate) fn find_unavailable(&self, path: &str) -> Option<&SourceRecord> {
        self.unavailable.get(path.strip_prefix("/webhooks/")?).map(|record| &**record)
    }

    /// Continues the counters of the previous table.
    pub(crate) fn continue_from(&mut self, before: &Self) {
        // Rejections are later taken from the new table only, so those of the previous table move
        // there.
        before.rejections.take().into_iter().for_each(|rejection| self.rejections.note(rejection));
        self.tallies = before.tallies.clone();
        for (path, route) in &mut self.by_path {
            if let Some(before) = before.by_path.get(path) {
                route.continue_from(before);
            }
            if let Some(route) = Arc::get_mut(route) {
                route.record.tally = self.tallies.of(route.source.name());
            }
        }
        for record in self.unavailable.values_mut() {
            if let Some(record) = Arc::get_mut(record) {
                record.tally = self.tallies.of(&record.source());
            }
        }
    }

    /// Takes the rejections since the last call.
    pub(crate) fn take_rejections(&self) -> Vec<Rejection> {
        let taken = self.rejections.take();
        let served: HashSet<_> = self.by_path.values().map(|route| route.source.name()).collect();
        self.rejections.retain(|source| served.contains(source));
        taken
    }

    /// The secrets of all sources, and when this process last saw each of them verify a request.
    pub(crate) fn secret_uses(&self) -> Vec<SecretUse> {
        self.by_path.values().flat_map(|route| route.secret_uses()).collect()
    }

    /// The figures of every source since the process started, including those of sources that a
    /// reload removed.
    pub(crate) fn figures(&self) -> BTreeMap<SourceName, TrafficFigures> {
        self.tallies.figures()
    }

    /// The sources that have a path, including those whose secrets cannot be used now.
    pub(crate) fn sources(&self) -> BTreeSet<SourceName> {
        let served = self.by_path.values().map(|route| route.source.name().clone());
        served.chain(self.unavailable.values().map(|record| record.source())).collect()
    }

    /// Forgets quiet clients and logs how many lines the budget suppressed. Called every second.
    pub(crate) fn maintain(&self) {
        self.unknown_source.log_suppressed_lines();
        self.unavailable.values().for_each(|record| record.log_suppressed_lines());
        for route in self.by_path.values() {
            route.record.log_suppressed_lines();
            if let Some(limit) = &route.unverified {
                limit.maintain();
            }
            route.handshakes.maintain();
        }
    }
}

fn path_of(tenant: &Tenant, source: &SourceName) -> Box<str> {
    match tenant.as_str() {
        "default" => source.as_str().into(),
        tenant => format!("{tenant}/{source}").into(),
    }
}

impl SourceRoute {
    fn new(spec: RouteSpec, rejections: &Arc<RejectionLog>, tallies: &SourceTallies) -> Self {
        let secret_headers = spec.source.scheme().secret_headers();
        let tally = tallies.of(spec.source.name());
        Self {
            record: SourceRecord::new(spec.source.name().as_str(), rejections, tally),
            secret_headers: secret_headers
                .iter()
                .filter_map(|name| HeaderName::try_from(name).ok())
                .collect(),
            rate: spec.rate_limit.map(EventLimit::new),
            unverified: spec.unverified_limit.map(FailureLimit::new),
            handshakes: FailureLimit::new(HANDSHAKES),
            secrets_used: spec.source.verifiers().iter().map(|_| AtomicI64::new(0)).collect(),
            source: spec.source,
            mode: spec.mode,
            handlers: spec.handlers.into(),
        }
    }

    /// Notes that the secret at this index verified a request.
    pub(crate) fn secret_verified(&self, secret: usize, at: Timestamp) {
        if let Some(used) = self.secrets_used.get(secret).or(self.secrets_used.first()) {
            used.fetch_max(at.as_second(), Ordering::Relaxed);
        }
    }

    fn secret_uses(&self) -> impl Iterator<Item = SecretUse> + '_ {
        self.source.verifiers().iter().zip(&self.secrets_used).map(|(verifier, used)| SecretUse {
            tenant: self.source.tenant().clone(),
            source: self.source.name().clone(),
            verifier: verifier.clone(),
            used_at: match used.load(Ordering::Relaxed) {
                0 => None,
                second => Timestamp::from_second(second).ok(),
            },
        })
    }

    /// Takes over the uses of the secrets that the previous table had too.
    fn continue_from(&self, before: &Self) {
        for (verifier, used) in self.source.verifiers().iter().zip(&self.secrets_used) {
            let same = before.source.verifiers().iter().position(|one| one == verifier);
            if let Some(earlier) = same.and_then(|at| before.secrets_used.get(at)) {
                used.fetch_max(earlier.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
    }

    /// The jobs for each of these events.
    pub(crate) fn jobs_for(&self, receipts: &[Receipt]) -> Vec<Vec<NewJob>> {
        let jobs_of = |receipt: &Receipt| {
            let event = EventView { event_type: receipt.event_type(), body: receipt.body() };
            self.handlers.iter().filter_map(|handler| handler.job_for(event)).collect()
        };
        receipts.iter().map(jobs_of).collect()
    }
}

/// The counters of a source, and the log budget of each decision.
#[derive(Debug)]
pub(crate) struct SourceRecord {
    pub(crate) source: Box<str>,
    arrivals: [Counter; DECISIONS.len()],
    refusals: [Counter; Reason::ALL.len()],
    pub(crate) handshakes: Counter,
    ack_seconds: Histogram,
    /// The counters of the source over all tenants.
    tally: Arc<SourceTally>,
    pub(crate) rejections: Arc<RejectionLog>,
    budgets: [LogBudget; LineKind::ALL.len()],
}

const DECISIONS: [Decision; 4] =
    [Decision::Accepted, Decision::Duplicate, Decision::Conflict, Decision::Review];

/// Log lines that share a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LineKind {
    Accepted,
    Duplicate,
    Conflict,
    Review,
    Rejected,
    /// Unknown late events and a store that cannot write: a budget of their own, which ordinary
    /// refusals cannot use up.
    Alarming,
}

impl LineKind {
    const ALL: [Self; 6] = [
        Self::Accepted,
        Self::Duplicate,
        Self::Conflict,
        Self::Review,
        Self::Rejected,
        Self::Alarming,
    ];

    pub(crate) fn of(decision: Decision) -> Self {
        match decision {
            Decision::Accepted => Self::Accepted,
            Decision::Duplicate => Self::Duplicate,
            Decision::Conflict => Self::Conflict,
            Decision::Review => Self::Review,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Duplicate => "duplicate",
            Self::Conflict => "conflict",
            Self::Review => "review",
            Self::Rejected | Self::Alarming => "rejected",
        }
    }
}

impl SourceRecord {
    fn new(source: &str, rejections: &Arc<RejectionLog>, tally: Arc<SourceTally>) -> Self {
        let label = source.to_owned();
        Self {
            source: source.into(),
            arrivals: DECISIONS.map(|decision| {
                counter!("hapax_arrivals_total", "source" => label.clone(), "decision" => decision.as_str())
            }),
            refusals: Reason::ALL.map(|reason| {
                counter!("hapax_rejections_total", "source" => label.clone(), "reason" => reason.as_str())
            }),
            handshakes: counter!("hapax_handshakes_total", "source" => label.clone()),
            ack_seconds: histogram!("hapax_ack_seconds", "source" => label.clone()),
            tally,
            rejections: Arc::clone(rejections),
            budgets: LineKind::ALL.map(|_| LogBudget::new(LOG_LINES_PER_SECOND)),
        }
    }

    fn source(&self) -> SourceName {
        SourceName::new(&*self.source)
    }

    pub(crate) fn count(&self, decision: Decision, at: Timestamp) {
        self.arrivals[decision as usize].increment(1);
        self.tally.arrived(decision, at);
    }

    /// Counts the duration of a request that was answered with 2xx.
    pub(crate) fn count_ack(&self, took: Duration) {
        self.ack_seconds.record(took);
        self.tally.acknowledged(took);
    }

    /// Counts the time between the first arrival of an event and the arrival of a copy. An event's id begins with
    /// the time of that arrival; clocks of nodes may differ a little.
    pub(crate) fn count_copy(&self, event: EventId, at: Timestamp) {
        let first = event.0.get_timestamp().map(|first| first.to_unix());
        let first = first.and_then(|(seconds, nanos)| {
            Timestamp::new(i64::try_from(seconds).ok()?, i32::try_from(nanos).ok()?).ok()
        });
        if let Some(first) = first {
            self.tally.copied(at.duration_since(first).try_into().unwrap_or_default());
        }
    }

    /// Counts a request that could not be verified, whatever its answer is.
    pub(crate) fn count_failed_verification(&self, reason: Reason) {
        self.tally.rejected(reason);
    }

    pub(crate) fn count_refusal(&self, reason: Reason) {
        if matches!(reason, Reason::Unavailable | Reason::Crowded) {
            self.tally.unavailable();
        }
        self.refusals[reason as usize].increment(1);
    }

    pub(crate) fn budget(&self, kind: LineKind) -> &LogBudget {
        &self.budgets[kind as usize]
    }

    fn log_suppressed_lines(&self) {
        let source = &*self.source;
        for kind in LineKind::ALL {
            let decision = kind.as_str();
            match (self.budget(kind).take_suppressed(), kind) {
                (0, _) => {}
                (more, LineKind::Accepted | LineKind::Duplicate) => {
                    info!(source, decision, more, "and {more} more {decision} from {source}");
                }
                (more, LineKind::Conflict | LineKind::Review | LineKind::Rejected) => {
                    warn!(source, decision, more, "and {more} more {decision} from {source}");
                }
                (more, LineKind::Alarming) => {
                    error!(source, decision, more, "and {more} more {decision} from {source}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decision_and_lane_is_at_its_index_in_its_list() {
        assert!(DECISIONS.into_iter().enumerate().all(|(at, decision)| decision as usize == at));
        assert!(LineKind::ALL.into_iter().enumerate().all(|(at, kind)| kind as usize == at));
    }

    #[test]
    fn refusals_of_a_source_without_usable_secrets_are_in_its_figures() {
        // All pairs of the source are unavailable, a reload builds a new table, and the last pair is removed.
        let (tenant, source) = (Tenant::new("acme"), SourceName::new("stripe"));
        let table = |change| {
            let mut routes = Routes::build(RoutesSpec::new(Vec::new())).unwrap();
            routes.change(vec![change]);
            routes
        };
        let unavailable =
            || RouteChange::Unavailable { tenant: tenant.clone(), source: source.clone() };
        let refuse = |routes: &Routes| {
            let record = routes.find_unavailable("/webhooks/acme/stripe").expect("the pair");
            record.count_refusal(Reason::Unavailable);
        };
        let counted = |routes: &Routes| routes.figures()[&source].counts.unavailable;
        let first = table(unavailable());
        refuse(&first);
        assert_eq!(counted(&first), 1);
        let mut reloaded = table(unavailable());
        reloaded.continue_from(&first);
        refuse(&reloaded);
        assert_eq!(counted(&reloaded), 2);
        assert_eq!(reloaded.sources(), BTreeSet::from([source.clone()]));
        let mut removed = table(RouteChange::Remove { tenant, source: source.clone() });
        removed.continue_from(&reloaded);
        assert_eq!((counted(&removed), removed.sources()), (2, BTreeSet::new()));
    }
}
