//! The counters of each source over the last day, sampled every few seconds.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use hapax_core::{SourceName, Timestamp};
use jiff::SignedDuration;

use super::traffic::Traffic;

/// Up to this age all samples are kept, because some rules compare spans of minutes.
const FINE: SignedDuration = SignedDuration::from_mins(10);

/// Among older samples, one is kept for each span of this length: rules that look further back need
/// no more.
const COARSE_EVERY: SignedDuration = SignedDuration::from_mins(1);

/// Samples are deleted at this age: no rule compares a longer span.
const KEPT: SignedDuration = SignedDuration::from_hours(25);

/// The counters of one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SourceCounts {
    pub(super) new: u64,
    pub(super) copies: u64,
    pub(super) conflicts: u64,
    pub(super) failed: u64,
}

impl SourceCounts {
    pub(super) fn arrivals(self) -> u64 {
        self.new + self.copies
    }

    /// The difference between two samples. A source that was removed and configured again counts
    /// from zero, so no difference is negative.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            new: self.new.saturating_sub(before.new),
            copies: self.copies.saturating_sub(before.copies),
            conflicts: self.conflicts.saturating_sub(before.conflicts),
            failed: self.failed.saturating_sub(before.failed),
        }
    }
}

/// The counters at one moment, without sources whose counters are all zero.
#[derive(Debug)]
struct CounterSample {
    at: Timestamp,
    counts: BTreeMap<SourceName, SourceCounts>,
}

/// The first and the last verified arrival of a source, and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Activity {
    pub(super) first: Timestamp,
    pub(super) last: Timestamp,
    pub(super) arrivals: u64,
}

/// The samples so far.
#[derive(Debug)]
pub(super) struct CounterHistory {
    began: Timestamp,
    fine: VecDeque<CounterSample>,
    coarse: VecDeque<CounterSample>,
    activity: BTreeMap<SourceName, Activity>,
}

impl CounterHistory {
    /// An empty history: every counter was zero at `began`.
    pub(super) fn new(began: Timestamp) -> Self {
        Self { began, fine: VecDeque::new(), coarse: VecDeque::new(), activity: BTreeMap::new() }
    }

    /// Adds a sample.
    pub(super) fn note(&mut self, at: Timestamp, traffic: &[Traffic]) {
        let counts: BTreeMap<_, _> = traffic.iter().map(counted).filter(is_something).collect();
        for (source, counts) in &counts {
            if counts.arrivals() == 0 {
                continue;
            }
            let activity = self.activity.entry(source.clone()).or_insert(Activity {
                first: at,
                last: at,
                arrivals: 0,
            });
            if activity.arrivals != counts.arrivals() {
                (activity.last, activity.arrivals) = (at, counts.arrivals());
            }
        }
        // A source that is no longer configured cannot be silent.
        self.activity.retain(|source, _| traffic.iter().any(|one| one.source == *source));
        self.fine.push_back(CounterSample { at, counts });
        while self.fine.front().is_some_and(|sample| at.duration_since(sample.at) > FINE) {
            let aged = self.fine.pop_front();
            let last = self.coarse.back().map(|sample| sample.at);
            self.coarse.extend(aged.filter(|sample| {
                last.is_none_or(|last| sample.at.duration_since(last) >= COARSE_EVERY)
            }));
        }
        while self.coarse.front().is_some_and(|sample| at.duration_since(sample.at) > KEPT) {
            self.coarse.pop_front();
        }
    }

    /// The counters in the last sample at or before `at`, and the time of that sample. Before the
    /// first sample all counters are zero.
    pub(super) fn at(&self, at: Timestamp, source: &SourceName) -> (SourceCounts, Timestamp) {
        let samples = self.fine.iter().rev().chain(self.coarse.iter().rev());
        match samples.into_iter().find(|sample| sample.at <= at) {
            Some(sample) => (sample.counts.get(source).copied().unwrap_or_default(), sample.at),
            None => (SourceCounts::default(), self.began),
        }
    }

    /// The arrivals of a source in the last `span`, up to its current counters, and the time at
    /// which the span really starts.
    pub(super) fn within(
        &self,
        span: Duration,
        now: Timestamp,
        traffic: &Traffic,
    ) -> (SourceCounts, Timestamp) {
        let (before, since) = self.at(earlier(now, span), &traffic.source);
        (counted(traffic).1.since(before), since)
    }

    /// The verified arrivals of a source, or `None` if there were none.
    pub(super) fn activity(&self, source: &SourceName) -> Option<Activity> {
        self.activity.get(source).copied()
    }
}

/// The instant that lies `span` before `now`.
pub(super) fn earlier(now: Timestamp, span: Duration) -> Timestamp {
    let span = SignedDuration::try_from(span).ok();
    span.and_then(|span| now.checked_sub(span).ok()).unwrap_or(Timestamp::MIN)
}

fn counted(traffic: &Traffic) -> (SourceName, SourceCounts) {
    let Traffic { source, new, copies, conflicts, failed_verifications } = traffic;
    let counts = SourceCounts {
        new: *new,
        copies: *copies,
        conflicts: *conflicts,
        failed: *failed_verifications,
    };
    (source.clone(), counts)
}

fn is_something((_, counts): &(SourceName, SourceCounts)) -> bool {
    *counts != SourceCounts::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn stripe(new: u64) -> Traffic {
        let source = SourceName::new("stripe");
        Traffic { source, new, copies: 0, conflicts: 0, failed_verifications: 2 * new }
    }

    #[test]
    fn a_span_is_counted_from_the_sample_at_its_beginning_however_old() {
        // A day of samples every ten seconds: thinning them out must not change the numbers by more
        // than the minute that is left between two samples.
        let mut history = CounterHistory::new(at(0));
        let day = 86_400;
        for second in (10..=day).step_by(10) {
            history.note(at(second), &[stripe(second as u64)]);
        }
        let check = |span: i64, wanted: i64| {
            let span = Duration::from_secs(span as u64);
            let (counts, since) = history.within(span, at(day), &stripe(day as u64));
            assert_eq!(counts.new as i64, wanted, "{span:?}");
            assert_eq!(since, at(day - wanted), "{span:?}");
            assert_eq!(counts.failed, 2 * counts.new);
        };
        check(60, 60);
        check(65, 70);
        check(600, 600);
        check(2 * day, day);
        let (hour, _) = history.within(Duration::from_secs(3_600), at(day), &stripe(day as u64));
        assert!((3_600..=3_660).contains(&hour.new), "{hour:?}");
        assert!(history.coarse.len() + history.fine.len() < 1_600);
    }

    #[test]
    fn a_counter_that_starts_from_zero_again_gives_no_negative_number() {
        let mut history = CounterHistory::new(at(0));
        history.note(at(10), &[stripe(100)]);
        let (counts, _) = history.within(Duration::from_secs(1), at(20), &stripe(3));
        assert_eq!(counts.new, 0);
    }

    #[test]
    fn a_source_that_is_no_longer_configured_is_forgotten() {
        let mut history = CounterHistory::new(at(0));
        history.note(at(10), &[stripe(1)]);
        assert_eq!(history.activity(&SourceName::new("stripe")).unwrap().last, at(10));
        history.note(at(20), &[]);
        assert_eq!(history.activity(&SourceName::new("stripe")), None);
    }
}
