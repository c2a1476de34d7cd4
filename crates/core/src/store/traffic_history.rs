//! The figures of each source over time: counts, durations and gauges by the minute, later by the hour and by
//! the day.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use uuid::Uuid;

use super::{StoreError, TriedJob};
use crate::key::SourceName;
use crate::log_buckets::middle_of;

/// The figures of one source in one minute or step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficCount {
    /// The source.
    pub source: SourceName,
    /// For a minute: any time within it. For a step: its start, which is a multiple of the step's
    /// length since 1970.
    pub at: Timestamp,
    /// The figures.
    pub figures: TrafficFigures,
}

/// The figures of a period.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrafficFigures {
    /// The numbers that are added up.
    pub counts: TrafficCounts,
    /// Counts by kind and index, such as durations by bucket. These counts are added up too.
    pub tallies: Tallies,
    /// The highest value of each gauge.
    pub gauges: Gauges,
}

impl TrafficFigures {
    /// Adds figures of the same source from another node or another period.
    pub fn add(&mut self, other: &Self) {
        self.counts.add(&other.counts);
        self.tallies.add(&other.tallies);
        self.gauges = self.gauges.max(other.gauges);
    }

    /// The growth since `before`. Gauges stay as they are.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            counts: self.counts.since(&before.counts),
            tallies: self.tallies.since(&before.tallies),
            gauges: self.gauges,
        }
    }

    /// Adds figures of another source.
    pub fn add_source(&mut self, other: &Self) {
        let gauges = self.gauges.plus(other.gauges);
        self.add(other);
        self.gauges = gauges;
    }
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident: $number:ty,)+) => {
        /// Numbers that are added when figures are merged.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct TrafficCounts {
            $($(#[$doc])* pub $name: $number,)+
        }

        impl TrafficCounts {
            /// The names of all numbers, which are the names of their columns.
            pub const COLUMNS: [&str; [$(stringify!($name)),+].len()] = [$(stringify!($name)),+];

            /// All numbers, in the order of [`Self::COLUMNS`].
            pub fn numbers(&self) -> [i64; Self::COLUMNS.len()] {
                [$(i64::try_from(self.$name).unwrap_or(i64::MAX)),+]
            }

            /// The counts of these numbers.
            pub fn of_numbers(numbers: [i64; Self::COLUMNS.len()]) -> Self {
                let [$($name),+] = numbers;
                Self { $($name: <$number>::try_from($name).unwrap_or_default()),+ }
            }

            /// Adds other counts.
            pub fn add(&mut self, other: &Self) {
                $(self.$name = self.$name.saturating_add(other.$name);)+
            }
        }
    };
}

counts! {
    /// Arrivals of new events.
    new: u64,
    /// Arrivals of known events.
    copies: u64,
    /// Arrivals of known events with another body; they are copies too.
    conflicts: u64,
    /// Requests that failed verification. [`TallyKind::Rejected`] has the reasons.
    rejected: u64,
    /// Requests that were answered with 503: they could not be made durable, and the sender must retry.
    unavailable: u64,
    /// Jobs that succeeded.
    succeeded: u64,
    /// Those of them in a run that an operator forced: their effects happened again.
    forced: u64,
    /// Attempts that failed.
    failed_attempts: u64,
    /// Jobs that a failed attempt made dead letters.
    died: u64,
    /// Jobs that failed for the first time, less jobs that ended after a failure: the growth of the number of jobs
    /// that are being retried.
    retrying: i64,
    /// The sum of all durations of [`TallyKind::Ack`], in microseconds.
    ack_micros: u64,
    /// The sum of all durations of [`TallyKind::Wait`], in microseconds.
    wait_micros: u64,
    /// The sum of all durations of [`TallyKind::Processing`], in microseconds.
    processing_micros: u64,
}

impl TrafficCounts {
    /// The growth since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let mut grown = self.numbers();
        for (number, before) in grown.iter_mut().zip(before.numbers()) {
            *number -= before;
        }
        Self::of_numbers(grown)
    }
}

/// How many jobs of a source wait, and when it last sent an event. The gauges of several nodes or times are
/// merged by their maximum, because all of them count the same jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauges {
    /// Jobs that are not finished and need no operator.
    pub waiting: u64,
    /// Dead letters.
    pub dead: u64,
    /// Events and jobs that wait for a decision of an operator.
    pub review: u64,
    /// The time of the last verified arrival, in seconds since 1970; zero for none.
    pub last_arrival: u64,
}

impl Gauges {
    /// The names of the columns.
    pub const COLUMNS: [&str; 4] = ["waiting", "dead", "review", "last_arrival"];

    /// The numbers, in the order of [`Self::COLUMNS`].
    pub fn numbers(self) -> [i64; 4] {
        let Self { waiting, dead, review, last_arrival } = self;
        [waiting, dead, review, last_arrival].map(|count| i64::try_from(count).unwrap_or(i64::MAX))
    }

    /// The gauges with these numbers.
    pub fn of_numbers(numbers: [i64; 4]) -> Self {
        let [waiting, dead, review, last_arrival] = numbers.map(i64::unsigned_abs);
        Self { waiting, dead, review, last_arrival }
    }

    /// The maximum of each gauge.
    pub fn max(self, other: Self) -> Self {
        Self {
            waiting: self.waiting.max(other.waiting),
            dead: self.dead.max(other.dead),
            review: self.review.max(other.review),
            last_arrival: self.last_arrival.max(other.last_arrival),
        }
    }

    /// The gauges of two sources together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            waiting: self.waiting.saturating_add(other.waiting),
            dead: self.dead.saturating_add(other.dead),
            review: self.review.saturating_add(other.review),
            last_arrival: self.last_arrival.max(other.last_arrival),
        }
    }
}

/// The subject of a tally. The index of a duration is its bucket ([`crate::log_buckets`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TallyKind {
    /// Durations from the head of a request to its 2xx.
    Ack = 0,
    /// Durations from the first arrival of an event to the start of the first attempt of a job.
    Wait = 1,
    /// Durations from the first arrival of an event to the end of a job that succeeded.
    Processing = 2,
    /// Requests that failed verification. The index is the place of the reason in [`REJECTED_REASONS`].
    Rejected = 3,
    /// Durations of attempts to deliver to an endpoint.
    Attempt = 4,
    /// Durations from the first arrival of an event to each of its copies.
    Copy = 5,
}

/// The reasons for which a request fails verification.
pub const REJECTED_REASONS: [&str; 5] = ["missing", "signature", "stale", "future", "stale_unseen"];

/// Counts by kind and index. Only counts that are not zero are kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tallies(BTreeMap<u16, u64>);

impl Tallies {
    /// Adds `count` to the tally of a kind and index.
    pub fn count(&mut self, kind: TallyKind, index: u8, count: u64) {
        self.count_code(code(kind, index), count);
    }

    fn count_code(&mut self, code: u16, count: u64) {
        if count > 0 {
            let sum = self.0.entry(code).or_default();
            *sum = sum.saturating_add(count);
        }
    }

    /// Adds other tallies.
    pub fn add(&mut self, other: &Self) {
        other.0.iter().for_each(|(code, count)| self.count_code(*code, *count));
    }

    /// The growth since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let mut grown = Self::default();
        for (code, count) in &self.0 {
            let earlier = before.0.get(code).copied().unwrap_or_default();
            grown.count_code(*code, count.saturating_sub(earlier));
        }
        grown
    }

    /// Whether every count is zero.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The counts of a kind by index, in the order of the index.
    pub fn of(&self, kind: TallyKind) -> impl Iterator<Item = (u8, u64)> + '_ {
        let range = code(kind, 0)..=code(kind, u8::MAX);
        self.0.range(range).map(|(code, count)| ((code & 0xff) as u8, *count))
    }

    /// The sum over all indexes of a kind.
    pub fn total(&self, kind: TallyKind) -> u64 {
        self.of(kind).map(|(_, count)| count).sum()
    }

    /// A duration that the fraction `part` of all durations of a kind does not exceed, accurate to the width
    /// of a bucket.
    pub fn quantile(&self, kind: TallyKind, part: f64) -> Option<Duration> {
        let rank = ((part * self.total(kind) as f64).ceil() as u64).max(1);
        let mut passed = 0;
        let found = self.of(kind).find(|(_, count)| {
            passed += count;
            passed >= rank
        });
        found.map(|(bucket, _)| middle_of(bucket))
    }

    /// One number for each count: the lowest twelve bits hold kind and index, the bits above them
    /// the count.
    pub fn packed(&self) -> Vec<i64> {
        let pack = |(code, count): (&u16, &u64)| {
            let count = (*count).min(i64::MAX.unsigned_abs() >> CODE_BITS);
            ((count << CODE_BITS) | u64::from(*code)).cast_signed()
        };
        self.0.iter().map(pack).collect()
    }

    /// Adds numbers of [`Self::packed`].
    pub fn add_packed(&mut self, packed: impl IntoIterator<Item = i64>) {
        for number in packed {
            let number = number.cast_unsigned();
            self.count_code((number & ((1 << CODE_BITS) - 1)) as u16, number >> CODE_BITS);
        }
    }

    /// The same numbers as bytes, with as few bytes for each as it needs.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(4 * self.0.len());
        for number in self.packed() {
            let mut rest = number.cast_unsigned();
            while rest >= 0x80 {
                bytes.push((rest & 0x7f) as u8 | 0x80);
                rest >>= 7;
            }
            bytes.push(rest as u8);
        }
        bytes
    }

    /// Adds the numbers that [`Self::bytes`] has encoded.
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        let (mut number, mut shift) = (0_u64, 0);
        for byte in bytes {
            number |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or_default();
            shift += 7;
            if byte & 0x80 == 0 {
                self.add_packed([number.cast_signed()]);
                (number, shift) = (0, 0);
            }
        }
    }
}

/// The bits of kind and index in a packed number: four and eight.
const CODE_BITS: u32 = 12;

fn code(kind: TallyKind, index: u8) -> u16 {
    ((kind as u16) << 8) | u16::from(index)
}

/// Which figures to read.
#[derive(Debug, Clone)]
pub struct TrafficAsk {
    /// Only this source; `None` for all of them.
    pub source: Option<SourceName>,
    /// The start of the period.
    pub from: Timestamp,
    /// The end of the period, exclusive.
    pub to: Timestamp,
    /// The length of one step, at least a second.
    pub step: Duration,
    /// Whether the tallies are read, which takes longer.
    pub tallies: bool,
}

/// The figures over time.
pub trait TrafficHistory: Send + Sync + 'static {
    /// Writes the counts of `node` for whole minutes. `node` is the id of one process; no other process ever has the
    /// same id. A count replaces the one that the node wrote for the same minute and source, so a repeated call
    /// counts nothing twice. The same call merges a bounded number of old counts ([`NODES_MERGED_AFTER`],
    /// [`MERGES`]) and deletes those older than [`TRAFFIC_KEPT`].
    fn record_traffic(
        &self,
        node: Uuid,
        counts: Vec<TrafficCount>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Takes jobs that apps completed by SQL alone, at most `limit`, so that a node counts them. No other call returns
    /// them again: after a crash of the node they are not counted. Only jobs of pull handlers are returned:
    /// nodes count all other jobs themselves.
    fn take_completions(
        &self,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<Completion>, StoreError>> + Send;

    /// The figures of each step and source, in the order of time. A step without figures is left out. Old
    /// figures have the longer steps in which they are stored.
    fn traffic_by_source(
        &self,
        ask: TrafficAsk,
    ) -> impl Future<Output = Result<Vec<TrafficCount>, StoreError>> + Send;
}

/// A job that an app completed by SQL alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Its source.
    pub source: SourceName,
    /// The attempt that completed it.
    pub job: TriedJob,
    /// When the attempt began.
    pub began: Timestamp,
    /// When it ended.
    pub ended: Timestamp,
}

/// The figures of all sources together, by step.
pub fn traffic_of_all(counts: Vec<TrafficCount>) -> BTreeMap<Timestamp, TrafficFigures> {
    let mut steps: BTreeMap<Timestamp, TrafficFigures> = BTreeMap::new();
    for count in counts {
        steps.entry(count.at).or_default().add_source(&count.figures);
    }
    steps
}

/// The span of a newly recorded count, in seconds.
pub const MINUTE_SECONDS: i64 = 60;

/// The age, in seconds, after which the counts of all nodes for a minute are merged. No node still writes
/// a minute that is this old.
pub const NODES_MERGED_AFTER: i64 = 2 * 3_600;

/// The merges of counts into longer steps: the length of the step, the length of the longer step, and
/// the age after which counts are merged, all in seconds. Minutes are merged into hours after 48 hours,
/// and hours into days after 90 days.
pub const MERGES: [(i64, i64, i64); 2] = [(60, 3_600, 48 * 3_600), (3_600, 86_400, 90 * 86_400)];

/// How long the counts of a day are kept, in seconds: two years.
pub const TRAFFIC_KEPT: i64 = 2 * 366 * 86_400;

/// The most counts that one call merges or deletes.
pub const MERGED_MAX: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log_buckets::bucket_of;

    #[test]
    fn tallies_survive_every_form_and_add_up() {
        let mut tallies = Tallies::default();
        tallies.count(TallyKind::Ack, 0, 1);
        tallies.count(TallyKind::Processing, 200, 1 << 40);
        tallies.count(TallyKind::Rejected, 4, 127);
        tallies.count(TallyKind::Wait, 7, 0);
        let mut twice = Tallies::default();
        twice.add_packed(tallies.packed());
        assert_eq!(twice, tallies);
        twice.add_bytes(&tallies.bytes());
        assert_eq!(twice.of(TallyKind::Rejected).collect::<Vec<_>>(), [(4, 254)]);
        assert_eq!(twice.since(&tallies), tallies);
        assert!(tallies.since(&tallies).is_empty());
    }

    #[test]
    fn a_quantile_is_in_the_bucket_of_its_rank() {
        let mut tallies = Tallies::default();
        assert_eq!(tallies.quantile(TallyKind::Ack, 0.5), None);
        for millis in 1..=100 {
            tallies.count(TallyKind::Ack, bucket_of(Duration::from_millis(millis)), 1);
        }
        let bucket = |part| tallies.quantile(TallyKind::Ack, part).map(bucket_of);
        for (part, millis) in [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)] {
            assert_eq!(bucket(part), Some(bucket_of(Duration::from_millis(millis))), "{part}");
        }
    }

    #[test]
    fn only_jobs_that_are_retried_may_become_fewer() {
        let before = TrafficCounts { new: 5, retrying: 1, ..TrafficCounts::default() };
        let after = TrafficCounts { new: 8, retrying: 0, ..TrafficCounts::default() };
        let grown = after.since(&before);
        assert_eq!((grown.new, grown.retrying), (3, -1));
        assert_eq!(before.since(&after).new, 0);
        assert_eq!(TrafficCounts::of_numbers(after.numbers()), after);
    }
}
