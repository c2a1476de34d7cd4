//! Records the figures of each source: its arrivals, the outcomes of its jobs, and the durations of both.
//! Every ten seconds this process writes its own figures of the current minute; a row is replaced, so a write
//! that is repeated counts nothing twice. A process that is killed loses at most ten seconds.
//!
//! A read writes nothing: it adds what this process has counted since its last write. Of past minutes it
//! reads only those that [`ClosedFigures`] does not keep.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{
    Completion, Gauges, MERGES, MINUTE_SECONDS, StoreError, TrafficAsk, TrafficCount,
    TrafficFigures, TrafficHistory,
};
use hapax_core::{SourceName, Timestamp, tuned};
use hapax_engine::Now;
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::closed_figures::{ClosedFigures, StepFigures, closed_before};

/// How often counts are recorded.
const RECORD_EVERY: Duration = Duration::from_secs(10);

/// How long one record may take: a store that does not answer must not delay the shutdown.
const RECORD_MAX: Duration = Duration::from_secs(2);

/// The number of rounds without a count after which the history is tidied anyway.
const IDLE_ROUNDS_MAX: u32 = 60;

/// The most completions that one statement takes, and how often one round takes them.
const COMPLETIONS_AT_ONCE: usize = 1_000;
const COMPLETION_ROUNDS_MAX: usize = 20;

/// The most rows that wait for a store that cannot write: an hour of a hundred sources. The oldest are dropped.
const WAITING_MAX: usize = 6_000;

/// Reads the counters of this process since its start, for every source that it ever served.
pub(crate) type ReadFigures = Box<dyn Fn() -> BTreeMap<SourceName, TrafficFigures> + Send + Sync>;

/// Reads which sources are configured now.
pub(crate) type ReadSources = Box<dyn Fn() -> Vec<SourceName> + Send + Sync>;

/// The most repetitions of a read during which a record was written.
const READ_AGAIN_MAX: usize = 3;

/// The span that [`TrafficRecorder::last_week`] covers.
const WEEK: Duration = Duration::from_secs(7 * 86_400);

/// How long before the beginning of the last week moves, its figures are also read from the next beginning
/// on. The time is several rounds, because one may fail.
const WEEK_AHEAD: Duration = Duration::from_secs(60);

/// Counts the work of this process, and writes the counts.
pub(crate) struct TrafficRecorder {
    node: Uuid,
    figures: ReadFigures,
    configured: ReadSources,
    now: Now,
    counted: Mutex<Counted>,
    closed: ClosedFigures,
}

impl TrafficRecorder {
    /// `node` names this process, and only this one.
    pub(crate) fn new(node: Uuid, figures: ReadFigures, configured: ReadSources, now: Now) -> Self {
        let (counted, closed) = (Mutex::default(), ClosedFigures::default());
        Self { node, figures, configured, now, counted, closed }
    }

    /// The sources that are configured now.
    pub(crate) fn sources(&self) -> Vec<SourceName> {
        (self.configured)()
    }

    /// Notes how many jobs of each source wait now. The next record contains the highest numbers of its
    /// minute.
    pub(crate) async fn note_gauges(&self, gauges: BTreeMap<SourceName, Gauges>) {
        let minute = minute_of((self.now)());
        let mut counted = self.counted.lock().await;
        for (source, gauges) in gauges {
            // A source without any needs no row.
            if gauges != Gauges::default() {
                let row = counted.minutes.entry((minute, source)).or_default();
                let most = row.figures.gauges.max(gauges);
                row.is_written &= most == row.figures.gauges;
                row.figures.gauges = most;
            }
        }
    }

    /// The figures of each source since `from`, over all nodes, in one step. The figures include every
    /// configured source.
    pub(crate) async fn since<S: TrafficHistory>(
        &self,
        store: &S,
        from: Timestamp,
        tallies: bool,
    ) -> Result<BTreeMap<SourceName, TrafficFigures>, StoreError> {
        let mut figures: BTreeMap<_, TrafficFigures> =
            self.sources().into_iter().map(|source| (source, TrafficFigures::default())).collect();
        let step = Duration::from_secs(i64::MAX.unsigned_abs());
        // A node's clock may be ahead.
        let ask = TrafficAsk { source: None, from, to: Timestamp::MAX, step, tallies };
        for count in self.read(store, ask).await? {
            figures.entry(count.source).or_default().add(&count.figures);
        }
        Ok(figures)
    }

    /// The figures of each source in the last week, without tallies. [`TrafficRecorder::keep_week`] keeps them in
    /// memory.
    pub(crate) async fn last_week<S: TrafficHistory>(
        &self,
        store: &S,
    ) -> Result<BTreeMap<SourceName, TrafficFigures>, StoreError> {
        self.since(store, beginning((self.now)(), WEEK), false).await
    }

    /// Keeps the figures of the last week in memory until `stop`, so that no page waits until they are read: there can
    /// be a hundred thousand rows.
    pub(crate) async fn keep_week<S: TrafficHistory>(
        &self,
        store: Arc<S>,
        stop: CancellationToken,
    ) {
        let mut beats = interval(RECORD_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            if let Some(Err(error)) = stop.run_until_cancelled(self.read_week(&*store)).await {
                tracing::debug!(%error, "reading the figures of the last week: {error}");
            }
        }
    }

    /// Reads the figures of the last week. Shortly before the beginning of that week moves, this also reads them from
    /// the next beginning on.
    async fn read_week<S: TrafficHistory>(&self, store: &S) -> Result<(), StoreError> {
        let now = (self.now)();
        let from = beginning(now, WEEK);
        self.since(store, from, false).await?;
        let next = beginning(now.saturating_add(WEEK_AHEAD).unwrap_or(now), WEEK);
        if next != from {
            self.since(store, next, false).await?;
        }
        Ok(())
    }

    /// The figures of each step and source that has any, over all nodes, in the order of time.
    pub(crate) async fn read<S: TrafficHistory>(
        &self,
        store: &S,
        ask: TrafficAsk,
    ) -> Result<Vec<TrafficCount>, StoreError> {
        let mut figures = StepFigures::default();
        let mut fresh = ask.clone();
        let unwritten = self.unwritten().await;
        // Minutes that this process has not written yet are not closed.
        let closed = closed_before((self.now)()).min(unwritten.oldest.unwrap_or(Timestamp::MAX));
        if ask.from < closed && closed <= ask.to {
            figures = self.closed.read(store, TrafficAsk { to: closed, ..ask.clone() }).await?;
            fresh.from = closed;
        }
        let mut writes = unwritten.writes;
        for _ in 0..READ_AGAIN_MAX {
            let counts = store.traffic_by_source(fresh.clone()).await?;
            let unwritten = self.unwritten().await;
            if unwritten.writes == writes {
                figures.add(counts);
                figures
                    .add(unwritten.counts.into_iter().filter_map(|count| step_of(count, &fresh)));
                return Ok(figures.into_counts());
            }
            // It is not known whether the counts contain what was written meanwhile.
            writes = unwritten.writes;
        }
        figures.add(store.traffic_by_source(fresh).await?);
        Ok(figures.into_counts())
    }

    /// The counts of this process that the store does not have.
    async fn unwritten(&self) -> Unwritten {
        let mut counted = self.counted.lock().await;
        counted.count((self.figures)(), (self.now)());
        counted.unwritten()
    }

    /// Records until `stop`, and once more after it. Jobs that apps completed by SQL alone are counted by `completed`
    /// first.
    pub(crate) async fn run<S: TrafficHistory>(
        &self,
        store: Arc<S>,
        completed: impl Fn(&Completion) + Send,
        stop: CancellationToken,
    ) {
        let every = tuned!("traffic.every_ms", RECORD_EVERY.as_millis() as u64);
        let mut beats = interval(Duration::from_millis(every));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut idle_rounds = 0;
        loop {
            let is_over = stop.run_until_cancelled(beats.tick()).await.is_none();
            take_completions(&*store, &completed).await;
            idle_rounds = if self.record(&*store).await { 0 } else { idle_rounds + 1 };
            if idle_rounds > IDLE_ROUNDS_MAX {
                idle_rounds = 0;
                let _ = timeout(RECORD_MAX, store.record_traffic(self.node, Vec::new())).await;
            }
            if is_over {
                return;
            }
        }
    }

    /// Writes all counts, so that a later read of the history contains them. False if there was nothing to
    /// write.
    pub(crate) async fn record<S: TrafficHistory>(&self, store: &S) -> bool {
        let mut counted = self.counted.lock().await;
        let now = (self.now)();
        counted.count((self.figures)(), now);
        let rows = counted.waiting();
        if rows.is_empty() {
            return false;
        }
        // Until the write has succeeded, it is not known what the store has.
        counted.begin_write();
        match timeout(RECORD_MAX, store.record_traffic(self.node, rows)).await {
            Ok(Ok(())) => counted.written(now),
            // The next round writes these rows again.
            Ok(Err(error)) => tracing::debug!(%error, "recording the traffic: {error}"),
            Err(_) => tracing::debug!("recording the traffic takes too long"),
        }
        true
    }
}

/// Counts the jobs that apps completed by SQL alone, as far as no other node has.
async fn take_completions<S: TrafficHistory>(store: &S, completed: impl Fn(&Completion)) {
    for _ in 0..COMPLETION_ROUNDS_MAX {
        let taken = match timeout(RECORD_MAX, store.take_completions(COMPLETIONS_AT_ONCE)).await {
            Ok(Ok(taken)) => taken,
            // The next round takes them.
            Ok(Err(error)) => {
                tracing::debug!(%error, "counting completed jobs: {error}");
                return;
            }
            Err(_) => {
                tracing::debug!("counting completed jobs takes too long");
                return;
            }
        };
        taken.iter().for_each(&completed);
        if taken.len() < COMPLETIONS_AT_ONCE {
            return;
        }
    }
}

/// The counts of this process.
#[derive(Default)]
struct Counted {
    /// The counters of each source when they were last read.
    counters: BTreeMap<SourceName, TrafficFigures>,
    /// The figures of a minute and source, for the current minute and for minutes that are not written yet.
    minutes: BTreeMap<(i64, SourceName), Minute>,
    /// How many writes have begun.
    writes: u64,
}

#[derive(Default)]
struct Minute {
    figures: TrafficFigures,
    is_written: bool,
    stored: Stored,
}

/// The figures of a minute that are in the store.
enum Stored {
    Figures(TrafficFigures),
    /// A write has failed, but the store may have applied it.
    Unknown,
}

impl Default for Stored {
    fn default() -> Self {
        Self::Figures(TrafficFigures::default())
    }
}

/// The counts that the store lacks, as of `writes` begun writes.
struct Unwritten {
    writes: u64,
    counts: Vec<TrafficCount>,
    /// The first minute that may not be written as a whole.
    oldest: Option<Timestamp>,
}

impl Counted {
    /// Adds the growth of the counters.
    fn count(&mut self, figures: BTreeMap<SourceName, TrafficFigures>, now: Timestamp) {
        let minute = minute_of(now);
        for (source, after) in &figures {
            let nothing = TrafficFigures::default();
            let before = self.counters.get(source).unwrap_or(&nothing);
            if after == before {
                continue;
            }
            let grown = after.since(before);
            let row = self.minutes.entry((minute, source.clone())).or_default();
            row.figures.add(&grown);
            row.is_written = false;
        }
        // If a source is removed and added again, its counters continue.
        self.counters.extend(figures);
        while self.minutes.len() > WAITING_MAX {
            self.minutes.pop_first();
        }
    }

    /// The rows to write.
    fn waiting(&self) -> Vec<TrafficCount> {
        let waiting = self.minutes.iter().filter(|(_, row)| !row.is_written);
        let count = |((minute, source), row): (&(i64, SourceName), &Minute)| TrafficCount {
            source: source.clone(),
            at: start_of(*minute),
            figures: row.figures.clone(),
        };
        waiting.map(count).collect()
    }

    /// Marks the rows that a write is about to store: until it succeeds, their stored figures are unknown.
    fn begin_write(&mut self) {
        self.writes += 1;
        let rows = self.minutes.values_mut().filter(|row| !row.is_written);
        rows.for_each(|row| row.stored = Stored::Unknown);
    }

    /// Marks the rows as written. Rows of the current minute are kept, because they may grow.
    fn written(&mut self, now: Timestamp) {
        let minute = minute_of(now);
        self.minutes.retain(|(of, _), _| *of >= minute);
        for row in self.minutes.values_mut().filter(|row| !row.is_written) {
            row.is_written = true;
            row.stored = Stored::Figures(row.figures.clone());
        }
    }

    /// The growth of each row since it was written.
    fn unwritten(&self) -> Unwritten {
        let waiting = self.minutes.iter().filter(|(_, row)| !row.is_written);
        let counts = waiting.clone().filter_map(|((minute, source), row)| {
            let Stored::Figures(stored) = &row.stored else { return None };
            let figures = row.figures.since(stored);
            Some(TrafficCount { source: source.clone(), at: start_of(*minute), figures })
        });
        Unwritten {
            writes: self.writes,
            counts: counts.collect(),
            oldest: waiting.map(|((minute, _), _)| start_of(*minute)).next(),
        }
    }
}

fn start_of(minute: i64) -> Timestamp {
    Timestamp::from_second(minute).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// The count as part of its step, if it is asked for.
fn step_of(count: TrafficCount, ask: &TrafficAsk) -> Option<TrafficCount> {
    let is_source = ask.source.as_ref().is_none_or(|source| *source == count.source);
    let is_asked = is_source && ask.from <= count.at && count.at < ask.to;
    let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
    let second = count.at.as_second();
    is_asked.then(|| TrafficCount { at: start_of(second - second.rem_euclid(step)), ..count })
}

/// The beginning of a window: the start of its first minute, or of its first hour or day if counts of that
/// age are stored in such steps.
pub(crate) fn beginning(now: Timestamp, window: Duration) -> Timestamp {
    let first = now.saturating_sub(window).unwrap_or(Timestamp::MIN);
    let age = i64::try_from(window.as_secs()).unwrap_or(i64::MAX);
    let mut coarser = MERGES.iter().filter(|(_, _, after)| age > *after).map(|(_, to, _)| *to);
    let width = coarser.next_back().unwrap_or(MINUTE_SECONDS);
    let second = first.as_second();
    Timestamp::from_second(second - second.rem_euclid(width)).unwrap_or(first)
}

fn minute_of(at: Timestamp) -> i64 {
    let second = at.as_second();
    second - second.rem_euclid(MINUTE_SECONDS)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex as PlainMutex;
    use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

    use hapax_core::store::{TrafficCounts, traffic_of_all};
    use hapax_sim::{Act, FaultyStore};
    use hapax_store::MemoryStore;

    use super::*;

    #[tokio::test]
    async fn each_arrival_is_recorded_once_whatever_becomes_of_a_write() {
        // The store fails, even after it has written; minutes pass; a source is removed and added again.
        let counters = Arc::new(PlainMutex::new([0; 4]));
        let is_configured = Arc::new(AtomicBool::new(true));
        let second = Arc::new(AtomicI64::new(1_000_020));
        let clock: Now = {
            let second = Arc::clone(&second);
            Arc::new(move || Timestamp::from_second(second.load(Ordering::SeqCst)).unwrap())
        };
        let store = FaultyStore::new(MemoryStore::with_clock(Arc::clone(&clock)));
        let recorder = {
            let counters = Arc::clone(&counters);
            let is_configured = Arc::clone(&is_configured);
            let figures = move || {
                if !is_configured.load(Ordering::SeqCst) {
                    return BTreeMap::new();
                }
                let [new, copies, conflicts, rejected] = *counters.lock().unwrap();
                let counts =
                    TrafficCounts { new, copies, conflicts, rejected, ..TrafficCounts::default() };
                let figures = TrafficFigures { counts, ..TrafficFigures::default() };
                BTreeMap::from([(SourceName::new("s"), figures)])
            };
            TrafficRecorder::new(Uuid::from_u128(1), Box::new(figures), Box::new(Vec::new), clock)
        };
        let read = async || {
            let ask = TrafficAsk {
                source: None,
                from: Timestamp::from_second(1_000_000).unwrap(),
                to: Timestamp::from_second(1_001_000).unwrap(),
                step: Duration::from_secs(60),
                tallies: true,
            };
            traffic_of_all(store.traffic_by_source(ask).await.unwrap())
        };
        let points = async || {
            let counts = |figures: TrafficFigures| {
                let TrafficCounts { new, copies, conflicts, rejected, .. } = figures.counts;
                [new, copies, conflicts, rejected]
            };
            read().await.into_values().map(counts).collect::<Vec<_>>()
        };
        let step = async |now: [u64; 4], seconds: i64| {
            *counters.lock().unwrap() = now;
            second.fetch_add(seconds, Ordering::SeqCst);
            recorder.record(&store).await
        };
        assert!(!step([0, 0, 0, 0], 0).await);
        assert!(step([3, 1, 0, 0], 0).await && !step([3, 1, 0, 0], 10).await);
        assert!(step([5, 1, 0, 2], 10).await);
        assert_eq!(points().await, [[5, 1, 0, 2]]);
        store.fail_next(Act::RecordTraffic, 1);
        assert!(step([6, 1, 0, 2], 0).await);
        // In the next minute both rows are written.
        assert!(step([8, 2, 0, 2], 60).await);
        assert_eq!(points().await, [[6, 1, 0, 2], [2, 1, 0, 0]]);
        // The source is removed for a while, and added again.
        is_configured.store(false, Ordering::SeqCst);
        assert!(!step([8, 2, 0, 2], 5).await);
        is_configured.store(true, Ordering::SeqCst);
        assert!(step([9, 2, 0, 2], 5).await);
        assert_eq!(points().await, [[6, 1, 0, 2], [3, 1, 0, 0]]);
        // The highest gauges of a minute are kept.
        for waiting in [5, 9, 0, 3] {
            let gauges = Gauges { waiting, ..Gauges::default() };
            recorder.note_gauges(BTreeMap::from([(SourceName::new("s"), gauges)])).await;
            recorder.record(&store).await;
        }
        let last = read().await.into_values().last().unwrap();
        assert_eq!((last.gauges.waiting, last.counts.new), (9, 3));
    }

    #[tokio::test]
    async fn a_read_counts_each_arrival_once_before_and_after_it_is_written() {
        // Reads between writes, around a write that failed, and hours later, when most minutes are closed.
        let new = Arc::new(AtomicI64::new(0));
        let second = Arc::new(AtomicI64::new(1_000_020));
        let clock: Now = {
            let second = Arc::clone(&second);
            Arc::new(move || Timestamp::from_second(second.load(Ordering::SeqCst)).unwrap())
        };
        let store = FaultyStore::new(MemoryStore::with_clock(Arc::clone(&clock)));
        let recorder = {
            let new = Arc::clone(&new);
            let figures = move || {
                let new = new.load(Ordering::SeqCst).unsigned_abs();
                let counts = TrafficCounts { new, ..TrafficCounts::default() };
                let figures = TrafficFigures { counts, ..TrafficFigures::default() };
                BTreeMap::from([(SourceName::new("s"), figures)])
            };
            TrafficRecorder::new(Uuid::from_u128(1), Box::new(figures), Box::new(Vec::new), clock)
        };
        let from = Timestamp::from_second(999_960).unwrap();
        let counted = async || {
            let all = recorder.since(&store, from, true).await.unwrap();
            all.into_values().map(|figures| figures.counts.new).sum::<u64>()
        };
        for expected in 1..=400_u64 {
            new.fetch_add(1, Ordering::SeqCst);
            assert_eq!(counted().await, expected);
            if expected == 100 {
                // Whether the store has these counts is not known until they are written again.
                store.fail_next(Act::RecordTraffic, 1);
                recorder.record(&store).await;
                assert!(counted().await <= expected);
                recorder.record(&store).await;
                assert_eq!(counted().await, expected);
            }
            if expected % 7 == 0 {
                recorder.record(&store).await;
                assert_eq!(counted().await, expected);
            }
            second.fetch_add(29, Ordering::SeqCst);
        }
        let steps = TrafficAsk {
            source: Some(SourceName::new("s")),
            from,
            to: Timestamp::MAX,
            step: Duration::from_secs(600),
            tallies: false,
        };
        for _ in 0..2 {
            let steps = traffic_of_all(recorder.read(&store, steps.clone()).await.unwrap());
            assert_eq!(steps.len(), 20, "{steps:?}");
            assert_eq!(steps.values().map(|figures| figures.counts.new).sum::<u64>(), 400);
        }
    }
    #[tokio::test(start_paused = true)]
    async fn the_figures_of_a_week_are_read_before_a_page_asks_for_them() {
        // The beginning of the week moves with the hour: the first page after that must not read the whole week.
        let second = Arc::new(AtomicI64::new(1_800_000_000));
        let clock: Now = {
            let second = Arc::clone(&second);
            Arc::new(move || Timestamp::from_second(second.load(Ordering::SeqCst)).unwrap())
        };
        let store = Arc::new(MemoryStore::with_clock(Arc::clone(&clock)));
        let recorder = Arc::new(TrafficRecorder::new(
            Uuid::from_u128(1),
            Box::new(BTreeMap::new),
            Box::new(Vec::new),
            clock,
        ));
        let stop = CancellationToken::new();
        let (keeper, to, stopped) = (Arc::clone(&recorder), Arc::clone(&store), stop.clone());
        let keeping = tokio::spawn(async move { keeper.keep_week(to, stopped).await });
        for _ in 0..1_000 {
            tokio::time::sleep(RECORD_EVERY).await;
            second.fetch_add(10, Ordering::SeqCst);
            let from = beginning((recorder.now)(), WEEK);
            assert!(recorder.closed.has(from), "{from}");
        }
        stop.cancel();
        keeping.await.unwrap();
    }

    #[test]
    fn a_window_begins_where_its_oldest_counts_begin() {
        let now: Timestamp = "2026-03-01T12:34:56Z".parse().unwrap();
        let check = |hours: u64, expected: &str| {
            let begins = beginning(now, Duration::from_secs(hours * 3_600));
            assert_eq!(begins.to_string(), expected);
        };
        check(1, "2026-03-01T11:34:00Z");
        check(48, "2026-02-27T12:34:00Z");
        check(49, "2026-02-27T11:00:00Z");
        check(91 * 24, "2025-11-30T00:00:00Z");
    }
}
