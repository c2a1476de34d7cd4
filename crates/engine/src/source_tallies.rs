//! Counters of each source since the process started: requests, outcomes of jobs, and how long both took. Every
//! counter is one atomic number, so counting takes no lock. The counters are read every few seconds and recorded as
//! [`TrafficFigures`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::log_buckets::{BUCKETS, bucket_of};
use hapax_core::store::{
    Decision, Gauges, REJECTED_REASONS, Tallies, TallyKind, TrafficCounts, TrafficFigures,
    TriedJob, TriedVerdict,
};
use hapax_core::{SourceName, Timestamp};

use crate::ingress::respond::Reason;

/// The counters of all sources. A clone shares the counters.
#[derive(Debug, Clone, Default)]
pub(crate) struct SourceTallies(Arc<Mutex<BTreeMap<SourceName, Arc<SourceTally>>>>);

impl SourceTallies {
    /// The counters of a source, which continue for as long as the process runs.
    pub(crate) fn of(&self, source: &SourceName) -> Arc<SourceTally> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(source.clone()).or_default())
    }

    /// All counters of every source that was ever counted.
    pub(crate) fn figures(&self) -> BTreeMap<SourceName, TrafficFigures> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(source, tally)| (source.clone(), tally.figures())).collect()
    }
}

/// The counters of one source.
#[derive(Debug, Default)]
pub(crate) struct SourceTally {
    new: AtomicU64,
    copies: AtomicU64,
    conflicts: AtomicU64,
    rejected: [AtomicU64; REJECTED_REASONS.len()],
    unavailable: AtomicU64,
    succeeded: AtomicU64,
    forced: AtomicU64,
    failed_attempts: AtomicU64,
    died: AtomicU64,
    retrying: AtomicI64,
    ack: Durations,
    wait: Durations,
    processing: Durations,
    copy_waits: Durations,
    /// The time of the last arrival, in seconds since 1970.
    last_arrival: AtomicU64,
}

impl SourceTally {
    /// Counts an arrival.
    pub(crate) fn arrived(&self, decision: Decision, at: Timestamp) {
        self.last_arrival
            .store(u64::try_from(at.as_second()).unwrap_or_default(), Ordering::Relaxed);
        let counter = match decision {
            Decision::Accepted | Decision::Review => &self.new,
            Decision::Duplicate | Decision::Conflict => &self.copies,
        };
        count(counter);
        if decision == Decision::Conflict {
            count(&self.conflicts);
        }
    }

    /// Counts the duration of a request that was answered with 2xx.
    pub(crate) fn acknowledged(&self, took: Duration) {
        self.ack.count(took);
    }

    /// Counts the time between the first arrival of an event and the arrival of a copy.
    pub(crate) fn copied(&self, wait: Duration) {
        self.copy_waits.count(wait);
    }

    /// Counts a request that failed verification.
    pub(crate) fn rejected(&self, reason: Reason) {
        let place = REJECTED_REASONS.iter().position(|name| *name == reason.as_str());
        if let Some(counter) = place.and_then(|place| self.rejected.get(place)) {
            count(counter);
        }
    }

    /// Counts a request that was answered with 503.
    pub(crate) fn unavailable(&self) {
        count(&self.unavailable);
    }

    /// Counts an attempt that ended with a verdict.
    pub(crate) fn count_attempt(&self, job: &TriedJob, began: Timestamp, ended: Timestamp) {
        let since =
            |at: Timestamp| at.duration_since(job.received_at).try_into().unwrap_or_default();
        if job.attempt == 1 {
            self.wait.count(since(began));
        }
        let has_failed_before = job.steps > 0;
        match job.verdict {
            TriedVerdict::Succeeded => {
                count(&self.succeeded);
                if job.run > 1 {
                    count(&self.forced);
                }
                self.processing.count(since(ended));
            }
            TriedVerdict::Failed => count(&self.failed_attempts),
            TriedVerdict::Died => {
                count(&self.failed_attempts);
                count(&self.died);
            }
        }
        match (job.verdict, has_failed_before) {
            (TriedVerdict::Failed, false) => {
                self.retrying.fetch_add(1, Ordering::Relaxed);
            }
            (TriedVerdict::Succeeded | TriedVerdict::Died, true) => {
                self.retrying.fetch_sub(1, Ordering::Relaxed);
            }
            (TriedVerdict::Failed, true)
            | (TriedVerdict::Succeeded | TriedVerdict::Died, false) => {}
        }
    }

    /// All counters, and the last arrival. The gauges of jobs are not counted here.
    pub(crate) fn figures(&self) -> TrafficFigures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut tallies = Tallies::default();
        let mut rejected = 0;
        for (index, counter) in (0..).zip(&self.rejected) {
            tallies.count(TallyKind::Rejected, index, read(counter));
            rejected += read(counter);
        }
        self.copy_waits.read(TallyKind::Copy, &mut tallies);
        let counts = TrafficCounts {
            new: read(&self.new),
            copies: read(&self.copies),
            conflicts: read(&self.conflicts),
            rejected,
            unavailable: read(&self.unavailable),
            succeeded: read(&self.succeeded),
            forced: read(&self.forced),
            failed_attempts: read(&self.failed_attempts),
            died: read(&self.died),
            retrying: self.retrying.load(Ordering::Relaxed),
            ack_micros: self.ack.read(TallyKind::Ack, &mut tallies),
            wait_micros: self.wait.read(TallyKind::Wait, &mut tallies),
            processing_micros: self.processing.read(TallyKind::Processing, &mut tallies),
        };
        let gauges = Gauges { last_arrival: read(&self.last_arrival), ..Gauges::default() };
        TrafficFigures { counts, tallies, gauges }
    }
}

/// Durations by bucket, and their sum.
#[derive(Debug)]
struct Durations {
    buckets: [AtomicU64; BUCKETS],
    micros: AtomicU64,
}

impl Default for Durations {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS], micros: AtomicU64::new(0) }
    }
}

impl Durations {
    fn count(&self, took: Duration) {
        count(&self.buckets[usize::from(bucket_of(took))]);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Adds the buckets to `tallies`, and returns the sum of all durations in microseconds.
    fn read(&self, kind: TallyKind, tallies: &mut Tallies) -> u64 {
        for (bucket, counter) in (0..).zip(&self.buckets) {
            tallies.count(kind, bucket, counter.load(Ordering::Relaxed));
        }
        self.micros.load(Ordering::Relaxed)
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_is_retried_counts_as_such_until_it_ends() {
        let tally = SourceTally::default();
        let received_at = Timestamp::UNIX_EPOCH;
        let at = |second| Timestamp::from_second(second).unwrap();
        let count_attempt = |attempt, steps, verdict, began, ended| {
            let job = TriedJob { received_at, attempt, steps, run: attempt, verdict };
            tally.count_attempt(&job, at(began), at(ended));
        };
        count_attempt(1, 0, TriedVerdict::Failed, 1, 2);
        count_attempt(2, 1, TriedVerdict::Failed, 3, 4);
        assert_eq!(tally.figures().counts.retrying, 1);
        count_attempt(3, 2, TriedVerdict::Succeeded, 5, 8);
        assert_eq!(
            tally.figures().counts.forced,
            1,
            "a job that is done in a later run was forced"
        );
        count_attempt(1, 0, TriedVerdict::Succeeded, -5, -3);
        count_attempt(1, 0, TriedVerdict::Died, 1, 1);
        let TrafficFigures { counts, tallies, .. } = tally.figures();
        assert_eq!((counts.retrying, counts.succeeded), (0, 2));
        assert_eq!((counts.failed_attempts, counts.died), (3, 1));
        // If this clock is behind the clock that received the event, the duration is zero and not
        // negative.
        assert_eq!((counts.wait_micros, counts.processing_micros), (2_000_000, 8_000_000));
        let totals = [TallyKind::Wait, TallyKind::Processing].map(|kind| tallies.total(kind));
        assert_eq!(totals, [3, 2]);
    }

    #[test]
    fn a_copy_is_counted_by_its_wait() {
        let tally = SourceTally::default();
        for millis in [20, 20, 5_000] {
            tally.copied(Duration::from_millis(millis));
        }
        let waits: Vec<(u8, u64)> = tally.figures().tallies.of(TallyKind::Copy).collect();
        let bucket = |millis| bucket_of(Duration::from_millis(millis));
        assert_eq!(waits, [(bucket(20), 2), (bucket(5_000), 1)]);
    }

    #[test]
    fn every_reason_of_a_failed_verification_is_counted() {
        let tally = SourceTally::default();
        let failed = Reason::ALL
            .into_iter()
            .filter(|reason| reason.is_failed_verification() || *reason == Reason::StaleUnseen);
        let failed: Vec<Reason> = failed.collect();
        failed.iter().for_each(|reason| tally.rejected(*reason));
        assert_eq!(tally.figures().counts.rejected, failed.len() as u64);
        assert_eq!(failed.len(), REJECTED_REASONS.len());
    }
}
