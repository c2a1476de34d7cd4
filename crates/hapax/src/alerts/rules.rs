//! The rules of alerts: one function for each alert, from observations to findings. The functions
//! keep no state.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use hapax_core::endpoint::EndpointRecord;
use hapax_core::limits::LANE_COUNT_MAX;
use hapax_core::store::{HandlerRef, LaneState, PausedHandler, Verifier};
use hapax_core::{SourceName, Timestamp};
use jiff::SignedDuration;

use super::history::{CounterHistory, earlier};
use super::traffic::Traffic;
use crate::api::Severity;
use crate::config::Alerts;
use crate::statements::Unprepared;

/// The recent span whose rate of duplicates is compared with the usual rate.
const SPIKE_NOW: Duration = Duration::from_secs(5 * 60);

/// The span before it that defines the usual rate. The span is a whole day, because some hours of a
/// sender have more duplicates than others.
const SPIKE_BEFORE: Duration = Duration::from_secs(24 * 3_600);

/// Fewer duplicates than this are never a spike.
const SPIKE_COPIES_MIN: u64 = 50;

/// The least usual rate, in duplicates per new event: a source with a lower rate is treated as if it had this one.
const SPIKE_USUAL_MIN: f64 = 0.1;

/// The shortest span over which failed verifications are counted.
const FAILED_OVER_MIN: Duration = Duration::from_secs(60);

/// A source counts as silent only if it sent at least this many events before.
const SILENCE_ARRIVALS_MIN: u64 = 10;

/// A source counts as silent only after this many times its usual pause between two events.
const SILENCE_TIMES_USUAL: u32 = 10;

/// A source counts as silent only after this many times its longest pause in a week: a weekend is not a
/// silence.
const SILENCE_TIMES_LONGEST: u32 = 2;

/// The subject of an alert. Two findings with the same subject are the same alert.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct About {
    /// The key of `[alerts]`.
    pub(crate) name: &'static str,
    pub(crate) source: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) lane: Option<String>,
    /// The id of an endpoint.
    pub(crate) endpoint: Option<String>,
}

/// A problem that exists now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) about: About,
    pub(crate) severity: Severity,
    pub(crate) message: String,
}

/// When the secrets of one source of one tenant end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SecretEnds {
    pub(crate) source: SourceName,
    pub(crate) tenant: String,
    /// The references of the secrets.
    pub(crate) verifiers: Vec<Verifier>,
    /// `None` is never.
    pub(crate) until: Vec<Option<Timestamp>>,
}

/// A key that the vault of this node lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MissingKey {
    pub(super) key: String,
    /// How many stored values need it.
    pub(super) values: usize,
    /// The owner of one of these values.
    pub(super) example: String,
}

/// All observations of one round.
pub(super) struct Observations<'a> {
    pub(super) now: Timestamp,
    pub(super) history: &'a CounterHistory,
    pub(super) traffic: &'a [Traffic],
    pub(super) lanes: &'a [LaneState],
    /// Events of each source that wait for review as a whole. Jobs in review are in `lanes`.
    pub(super) in_review: &'a [(SourceName, u64)],
    /// The handlers of all nodes that are alive.
    pub(super) known: &'a HashSet<HandlerRef>,
    /// The longest pause of each source in a week.
    pub(super) pauses: &'a BTreeMap<SourceName, Duration>,
    /// Endpoints whose circuit is open.
    pub(super) failing: &'a [EndpointRecord],
    /// The keys of the vault that are missing, and what needs them.
    pub(super) missing_keys: &'a [MissingKey],
    /// Handlers that an operator has paused.
    pub(super) paused: &'a [PausedHandler],
    pub(super) secrets: &'a [SecretEnds],
    /// Why the store cannot write, if it cannot.
    pub(super) unwritable: Option<String>,
    pub(super) clock_offset_seconds: Option<i64>,
    /// The size of the write-ahead log, if there is one.
    pub(super) log_bytes: Option<u64>,
    /// Handlers whose statements the database cannot prepare.
    pub(super) unprepared: &'a [Unprepared],
}

/// The problems in the data of all nodes.
pub(super) fn judge(observed: &Observations<'_>, alerts: &Alerts) -> Vec<Finding> {
    let mut found = Vec::new();
    for traffic in observed.traffic {
        found.extend(duplicate_spike(observed, alerts, traffic));
        found.extend(failed_verifications(observed, alerts, traffic));
        found.extend(conflicts(observed, alerts, traffic));
        found.extend(silence(observed, alerts, traffic));
    }
    for lane in observed.lanes {
        found.extend(oldest_job(observed, alerts, lane));
        found.extend(handler_gone(observed, alerts, lane));
        found.extend(dead_letters(alerts, lane));
    }
    found.extend(review(observed, alerts));
    found.extend(observed.failing.iter().filter_map(|endpoint| circuits(alerts, endpoint)));
    found
}

/// The problems of this process: its configuration, its clock, its way to the store.
pub(super) fn judge_node(observed: &Observations<'_>, alerts: &Alerts) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(observed.secrets.iter().filter_map(|ends| secret_expiry(observed, alerts, ends)));
    found.extend(observed.missing_keys.iter().filter_map(|missing| vault_key(alerts, missing)));
    found.extend(clock_skew(observed, alerts));
    found.extend(log_growth(observed, alerts));
    found.extend(observed.unprepared.iter().filter_map(|one| statements(alerts, one)));
    found.extend(store(observed, alerts));
    found
}

fn about(name: &'static str) -> About {
    About { name, source: None, tenant: None, lane: None, endpoint: None }
}

fn of_source(name: &'static str, source: &SourceName) -> About {
    About { source: Some(source.to_string()), ..about(name) }
}

fn of_lane(name: &'static str, lane: &LaneState) -> About {
    let HandlerRef { source, handler } = &lane.handler;
    About { lane: Some(format!("{source}/{handler}")), ..of_source(name, source) }
}

fn duplicate_spike(
    observed: &Observations<'_>,
    alerts: &Alerts,
    traffic: &Traffic,
) -> Option<Finding> {
    let times = f64::from(alerts.duplicate_spike?);
    let (now, _) = observed.history.within(SPIKE_NOW, observed.now, traffic);
    let (then, _) = observed.history.at(earlier(observed.now, SPIKE_NOW), &traffic.source);
    let (long_ago, _) = observed.history.at(earlier(observed.now, SPIKE_BEFORE), &traffic.source);
    let before = then.since(long_ago);
    // Duplicates per new event, not their share of all arrivals: a share of one half cannot treble.
    let per_new = |copies: u64, new: u64| copies as f64 / new.max(1) as f64;
    let usual = per_new(before.copies, before.new).max(SPIKE_USUAL_MIN);
    let is_spike = now.copies >= SPIKE_COPIES_MIN && per_new(now.copies, now.new) >= times * usual;
    is_spike.then(|| Finding {
        about: of_source("duplicate_spike", &traffic.source),
        severity: Severity::Warning,
        message: format!(
            "{} sent {} duplicates and {} new events in 5 minutes; usual are {:.1} duplicates per \
             event. Check whether answers reach the sender late or not at all",
            traffic.source, now.copies, now.new, usual
        ),
    })
}

fn failed_verifications(
    observed: &Observations<'_>,
    alerts: &Alerts,
    traffic: &Traffic,
) -> Option<Finding> {
    let rate = alerts.failed_verifications?;
    let over = rate.per.max(FAILED_OVER_MIN);
    let limit = f64::from(rate.count.get()) * over.as_secs_f64() / rate.per.as_secs_f64();
    let (now, _) = observed.history.within(over, observed.now, traffic);
    (now.failed as f64 >= limit).then(|| Finding {
        about: of_source("failed_verifications", &traffic.source),
        severity: Severity::Warning,
        message: format!(
            "{} requests to {} failed verification in {}: the secret is wrong, or the requests are \
             forged",
            now.failed,
            traffic.source,
            words(over)
        ),
    })
}

fn conflicts(observed: &Observations<'_>, alerts: &Alerts, traffic: &Traffic) -> Option<Finding> {
    let rate = alerts.conflicts?;
    let (now, _) = observed.history.within(rate.per, observed.now, traffic);
    let (source, count) = (&traffic.source, now.conflicts);
    let copies = match count {
        1 => "1 copy".to_owned(),
        count => format!("{count} copies"),
    };
    (count >= u64::from(rate.count.get())).then(|| Finding {
        about: of_source("conflicts", source),
        severity: Severity::Warning,
        message: format!(
            "{source} sent {copies} under a known id with another body in {}. The first body counts; compare \
             both with `hapax events list --source {source}` and `hapax events show`",
            words(rate.per)
        ),
    })
}

fn silence(observed: &Observations<'_>, alerts: &Alerts, traffic: &Traffic) -> Option<Finding> {
    let least = alerts.silence?;
    let activity = observed.history.activity(&traffic.source)?;
    if activity.arrivals < SILENCE_ARRIVALS_MIN {
        return None;
    }
    let active_for = activity.last.duration_since(activity.first).unsigned_abs();
    let usual = active_for / u32::try_from(activity.arrivals).unwrap_or(u32::MAX);
    let quiet = observed.now.duration_since(activity.last).unsigned_abs();
    let longest = observed.pauses.get(&traffic.source).copied().unwrap_or_default();
    let limit = least.max(usual * SILENCE_TIMES_USUAL).max(longest * SILENCE_TIMES_LONGEST);
    (quiet >= limit).then(|| Finding {
        about: of_source("silence", &traffic.source),
        severity: Severity::Warning,
        message: format!(
            "{} has sent nothing for {}; it usually sends about every {}. Check the sender, and whether its \
             requests still reach this server",
            traffic.source,
            words(quiet),
            words(usual.max(Duration::from_secs(1)))
        ),
    })
}

fn oldest_job(observed: &Observations<'_>, alerts: &Alerts, lane: &LaneState) -> Option<Finding> {
    let limit = SignedDuration::try_from(alerts.oldest_job?).ok()?;
    let due = observed.now.duration_since(lane.oldest_due?);
    let HandlerRef { source, handler } = &lane.handler;
    let paused = observed.paused.iter().find(|one| one.handler == lane.handler);
    let why = match (observed.known.contains(&lane.handler), paused) {
        (false, _) => ", and no such handler is configured".to_owned(),
        (true, Some(paused)) => format!(
            ": {} paused the handler. `hapax handlers resume {source}/{handler}` resumes it",
            paused.who
        ),
        (true, None) => String::new(),
    };
    (due >= limit).then(|| Finding {
        about: of_lane("oldest_job", lane),
        severity: Severity::Warning,
        message: format!(
            "a job of {source}/{handler} has been due for {}{why}",
            words(due.unsigned_abs())
        ),
    })
}

fn handler_gone(observed: &Observations<'_>, alerts: &Alerts, lane: &LaneState) -> Option<Finding> {
    let waiting = lane.ready + lane.leased + lane.held + lane.parked;
    let HandlerRef { source, handler } = &lane.handler;
    let is_gone = alerts.handler_gone && waiting > 0 && !observed.known.contains(&lane.handler);
    let jobs = match waiting {
        1 => "1 job waits".to_owned(),
        LANE_COUNT_MAX.. => format!("{LANE_COUNT_MAX} jobs or more wait"),
        waiting => format!("{waiting} jobs wait"),
    };
    is_gone.then(|| Finding {
        about: of_lane("handler_gone", lane),
        severity: Severity::Warning,
        message: format!(
            "{jobs} for {source}/{handler}, and no node has this handler. Add it to the config again, or discard \
             the events"
        ),
    })
}

fn circuits(alerts: &Alerts, endpoint: &EndpointRecord) -> Option<Finding> {
    // An endpoint that receives alerts would receive an alert about itself once it answers again.
    let is_reported = alerts.circuits && endpoint.subject().is_published();
    let (id, tenant) = (endpoint.id.to_string(), endpoint.tenant.as_str());
    is_reported.then(|| Finding {
        about: About {
            tenant: Some(tenant.to_owned()).filter(|tenant| tenant != "default"),
            endpoint: Some(id.clone()),
            ..about("circuits")
        },
        severity: Severity::Warning,
        message: format!(
            "deliveries to the endpoint {id} of {tenant} are held: {}. `hapax endpoints ping {id}` tries it",
            endpoint.failing_reason().unwrap_or("its circuit is open")
        ),
    })
}

fn vault_key(alerts: &Alerts, missing: &MissingKey) -> Option<Finding> {
    let MissingKey { key, values, example } = missing;
    let values = match values {
        1 => "1 stored value needs".to_owned(),
        values => format!("{values} stored values need"),
    };
    alerts.vault_key.then(|| Finding {
        about: about("vault_key"),
        severity: Severity::Critical,
        message: format!(
            "[vault] has no key {key}, which {values}, such as that of {example}: add the key to `old`"
        ),
    })
}

fn dead_letters(alerts: &Alerts, lane: &LaneState) -> Option<Finding> {
    let limit = u64::from(alerts.dead_letters?);
    let HandlerRef { source, handler } = &lane.handler;
    let count = match lane.dead {
        LANE_COUNT_MAX.. => format!("at least {LANE_COUNT_MAX} dead letters"),
        1 => "1 dead letter".to_owned(),
        dead => format!("{dead} dead letters"),
    };
    // Counting stops at LANE_COUNT_MAX, so a higher limit can only be compared with that number.
    (lane.dead >= limit.min(LANE_COUNT_MAX)).then(|| Finding {
        about: of_lane("dead_letters", lane),
        severity: Severity::Warning,
        message: format!("{source}/{handler} has {count}: see `hapax dead list`"),
    })
}

fn secret_expiry(
    observed: &Observations<'_>,
    alerts: &Alerts,
    ends: &SecretEnds,
) -> Option<Finding> {
    let limit = SignedDuration::try_from(alerts.secret_expiry?).ok()?;
    let name = match ends.tenant.as_str() {
        "default" => ends.source.to_string(),
        tenant => format!("{} of {tenant}", ends.source),
    };
    let left = |until: Timestamp| until.duration_since(observed.now);
    let limited: Option<Vec<Timestamp>> = ends.until.iter().copied().collect();
    let last = limited.as_ref().and_then(|all| all.iter().max().copied());
    let next = ends.until.iter().flatten().copied().filter(|end| left(*end).is_positive()).min();
    let (severity, message) = match (last, next) {
        (Some(last), _) if !left(last).is_positive() => {
            (Severity::Critical, format!("every secret of {name} has expired: no request verifies"))
        }
        (Some(last), _) if left(last) <= limit => (
            Severity::Critical,
            format!("the last secret of {name} expires at {last}: then no request verifies"),
        ),
        (_, Some(next)) if left(next) <= limit => {
            (Severity::Info, format!("a secret of {name} expires at {next}; another stays valid"))
        }
        (Some(_) | None, Some(_) | None) => return None,
    };
    let about = About {
        tenant: Some(ends.tenant.clone()).filter(|tenant| tenant != "default"),
        ..of_source("secret_expiry", &ends.source)
    };
    Some(Finding { about, severity, message })
}

fn clock_skew(observed: &Observations<'_>, alerts: &Alerts) -> Option<Finding> {
    let limit = alerts.clock_skew?.as_secs();
    let offset = observed.clock_offset_seconds?;
    let way = if offset > 0 { "ahead of" } else { "behind" };
    (offset.unsigned_abs() >= limit).then(|| Finding {
        about: about("clock_skew"),
        severity: Severity::Critical,
        message: format!(
            "this machine's clock is {} s {way} the times that senders sign",
            offset.unsigned_abs()
        ),
    })
}

/// One finding for each source: events in review as a whole, and jobs in review, added up.
fn review(observed: &Observations<'_>, alerts: &Alerts) -> Vec<Finding> {
    let mut waiting = BTreeMap::<&SourceName, u64>::new();
    let jobs = observed.lanes.iter().map(|lane| (&lane.handler.source, lane.review));
    let events = observed.in_review.iter().map(|(source, count)| (source, *count));
    for (source, count) in events.chain(jobs).filter(|(_, count)| alerts.review && *count > 0) {
        *waiting.entry(source).or_default() += count;
    }
    let finding = |(source, count): (&SourceName, u64)| {
        let events = match count {
            1 => "1 event waits".to_owned(),
            LANE_COUNT_MAX.. => format!("{LANE_COUNT_MAX} events or more wait"),
            count => format!("{count} events wait"),
        };
        Finding {
            about: of_source("review", source),
            severity: Severity::Warning,
            message: format!(
                "{events} for review: see `hapax events list --status review --source {source}`"
            ),
        }
    };
    waiting.into_iter().map(finding).collect()
}

fn log_growth(observed: &Observations<'_>, alerts: &Alerts) -> Option<Finding> {
    let limit = alerts.log_growth? as u64;
    let bytes = observed.log_bytes?;
    (bytes >= limit).then(|| Finding {
        about: about("log_growth"),
        severity: Severity::Warning,
        message: format!(
            "the write-ahead log has grown to {} MiB: some process keeps a read transaction open",
            bytes >> 20
        ),
    })
}

fn statements(alerts: &Alerts, unprepared: &Unprepared) -> Option<Finding> {
    let HandlerRef { source, handler } = &unprepared.handler;
    alerts.statements.then(|| Finding {
        about: About {
            lane: Some(format!("{source}/{handler}")),
            ..of_source("statements", source)
        },
        severity: Severity::Critical,
        message: format!("the statements of {source}/{handler} cannot run: {}", unprepared.why),
    })
}

fn store(observed: &Observations<'_>, alerts: &Alerts) -> Option<Finding> {
    let why = observed.unwritable.as_ref().filter(|_| alerts.store)?;
    Some(Finding {
        about: about("store"),
        severity: Severity::Critical,
        message: format!("no event can be accepted: {why}"),
    })
}

/// A span in words, in the largest unit that is precise enough.
fn words(span: Duration) -> String {
    match span.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} minutes", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} hours", seconds / 3_600),
        seconds => format!("{} days", seconds / 86_400),
    }
}
