//! The counts of all nodes, as the judge of alerts reads them from the store in each round. The
//! counters that it computes begin 25 hours before the judge starts, so a restart forgets nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_core::store::{MINUTE_SECONDS, TrafficAsk, TrafficCount};
use hapax_core::{SourceName, Timestamp};
use jiff::SignedDuration;

use super::history::{CounterHistory, earlier};

/// How far back the judge begins: no rule compares a longer span.
const BEGINS_BEFORE: Duration = Duration::from_secs(25 * 3_600);

/// Minutes that ended this long ago are not read again: every node has written them.
const SETTLED_AFTER: Duration = Duration::from_secs(5 * 60);

/// The span whose longest pause is usual for a source.
const WEEK: Duration = Duration::from_secs(7 * 86_400);

/// How often that span is read.
const WEEK_EVERY: SignedDuration = SignedDuration::from_hours(1);

const HOUR: Duration = Duration::from_secs(3_600);

/// The counters of one source over all nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) source: SourceName,
    /// Arrivals of new events.
    pub(super) new: u64,
    /// Arrivals of known events, including conflicts.
    pub(super) copies: u64,
    /// Arrivals of known events with another body.
    pub(super) conflicts: u64,
    /// Requests whose signature was missing or wrong, or whose signed time was outside the window.
    pub(super) failed_verifications: u64,
}

/// The counters of each source over all nodes.
pub(super) struct MergedTraffic {
    history: CounterHistory,
    /// The sums of all minutes before `settled`.
    sums: BTreeMap<SourceName, [u64; 4]>,
    settled: Timestamp,
    current: Vec<Traffic>,
    was_read: bool,
    /// The longest pause of each source in a week, and when it was read.
    pauses: BTreeMap<SourceName, Duration>,
    pauses_at: Option<Timestamp>,
}

impl MergedTraffic {
    /// Nothing is read yet.
    pub(super) fn new(now: Timestamp) -> Self {
        let begin = minute_of(earlier(now, BEGINS_BEFORE));
        Self {
            history: CounterHistory::new(begin),
            sums: BTreeMap::new(),
            settled: begin,
            current: Vec::new(),
            was_read: false,
            pauses: BTreeMap::new(),
            pauses_at: None,
        }
    }

    /// The counts to read next.
    pub(super) fn ask(&self) -> TrafficAsk {
        let step = Duration::from_secs(MINUTE_SECONDS.unsigned_abs());
        // A node's clock may be ahead.
        TrafficAsk { source: None, from: self.settled, to: Timestamp::MAX, step, tallies: false }
    }

    /// Adds the counts that were read, which are in the order of time. Only the sources in `sources` are configured.
    pub(super) fn take(
        &mut self,
        counts: Vec<TrafficCount>,
        sources: &[SourceName],
        now: Timestamp,
    ) {
        let is_first = !std::mem::replace(&mut self.was_read, true);
        let settled = minute_of(earlier(now, SETTLED_AFTER)).max(self.settled);
        let mut sums = self.sums.clone();
        let mut counts = counts.into_iter().peekable();
        while let Some(count) = counts.next() {
            let sum = sums.entry(count.source).or_default();
            let added = count.figures.counts;
            let grown = [added.new, added.copies, added.conflicts, added.rejected];
            *sum = std::array::from_fn(|at| sum[at].saturating_add(grown[at]));
            if counts.peek().is_some_and(|next| next.at == count.at) {
                continue;
            }
            let end = count.at.saturating_add(SignedDuration::from_secs(MINUTE_SECONDS));
            let end = end.unwrap_or(Timestamp::MAX);
            if is_first && end <= now {
                self.history.note(end, &traffic(&sums));
            }
            if count.at < settled {
                self.sums.clone_from(&sums);
            }
        }
        self.settled = settled;
        sums.retain(|source, _| sources.contains(source));
        for source in sources {
            sums.entry(source.clone()).or_default();
        }
        self.current = traffic(&sums);
        self.history.note(now, &self.current);
    }

    /// The request for the hourly counts of a week, if it is time to read them again.
    pub(super) fn ask_week(&self, now: Timestamp) -> Option<TrafficAsk> {
        let is_due = self.pauses_at.is_none_or(|at| now.duration_since(at).abs() >= WEEK_EVERY);
        is_due.then(|| TrafficAsk {
            source: None,
            from: minute_of(earlier(now, WEEK)),
            to: Timestamp::MAX,
            step: HOUR,
            tallies: false,
        })
    }

    /// Takes the counts of each hour: the whole hours without an arrival between two hours with arrivals are a pause.
    pub(super) fn take_week(&mut self, counts: &[TrafficCount], now: Timestamp) {
        let mut last: BTreeMap<&SourceName, Timestamp> = BTreeMap::new();
        self.pauses.clear();
        let has_arrivals =
            |count: &&TrafficCount| count.figures.counts.new + count.figures.counts.copies > 0;
        for count in counts.iter().filter(has_arrivals) {
            if let Some(before) = last.insert(&count.source, count.at) {
                let pause = count.at.duration_since(before).unsigned_abs().saturating_sub(HOUR);
                let longest = self.pauses.entry(count.source.clone()).or_default();
                *longest = pause.max(*longest);
            }
        }
        self.pauses_at = Some(now);
    }

    /// Whether the counts were read at least once.
    pub(super) fn was_read(&self) -> bool {
        self.was_read
    }

    /// The longest pause of each source in a week.
    pub(super) fn pauses(&self) -> &BTreeMap<SourceName, Duration> {
        &self.pauses
    }

    pub(super) fn history(&self) -> &CounterHistory {
        &self.history
    }

    /// The counters of each configured source.
    pub(super) fn current(&self) -> &[Traffic] {
        &self.current
    }
}

fn traffic(sums: &BTreeMap<SourceName, [u64; 4]>) -> Vec<Traffic> {
    let of_source =
        |(source, [new, copies, conflicts, rejected]): (&SourceName, &[u64; 4])| Traffic {
            source: source.clone(),
            new: *new,
            copies: *copies,
            conflicts: *conflicts,
            failed_verifications: *rejected,
        };
    sums.iter().map(of_source).collect()
}

/// The beginning of the minute.
pub(super) fn minute_of(at: Timestamp) -> Timestamp {
    let second = at.as_second();
    Timestamp::from_second(second - second.rem_euclid(MINUTE_SECONDS)).unwrap_or(at)
}
