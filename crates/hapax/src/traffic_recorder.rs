//! Records how much each source sends. Every ten seconds this process writes its own counts of the current minute;
//! a row is replaced, so a write that is repeated counts nothing twice. A process that is killed loses at most ten
//! seconds.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{MINUTE_SECONDS, TrafficCount, TrafficHistory};
use hapax_core::{SourceName, Timestamp, tuned};
use hapax_engine::{Now, Traffic};
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How often counts are recorded.
const RECORD_EVERY: Duration = Duration::from_secs(10);

/// How long one record may take: a store that does not answer must not delay the shutdown.
const RECORD_MAX: Duration = Duration::from_secs(2);

/// How many rounds without a count may pass before the history is tidied all the same.
const IDLE_ROUNDS_MAX: u32 = 60;

/// The most rows that wait for a store that cannot write: an hour of a hundred sources. The oldest are dropped.
const WAITING_MAX: usize = 6_000;

/// Counts what this process receives, and writes it.
pub(crate) struct TrafficRecorder {
    node: Uuid,
    traffic: Box<dyn Fn() -> Vec<Traffic> + Send + Sync>,
    now: Now,
    counted: Mutex<Counted>,
}

impl TrafficRecorder {
    /// `node` names this process, and only this one; `traffic` returns its counters since the start.
    pub(crate) fn new(
        node: Uuid,
        traffic: Box<dyn Fn() -> Vec<Traffic> + Send + Sync>,
        now: Now,
    ) -> Self {
        Self { node, traffic, now, counted: Mutex::default() }
    }

    /// The sources that are configured now.
    pub(crate) fn sources(&self) -> Vec<SourceName> {
        (self.traffic)().into_iter().map(|one| one.source).collect()
    }

    /// Records until `stop`, and once more then.
    pub(crate) async fn run<S: TrafficHistory>(&self, store: Arc<S>, stop: CancellationToken) {
        let every = tuned!("traffic.every_ms", RECORD_EVERY.as_millis() as u64);
        let mut beats = interval(Duration::from_millis(every));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut idle_rounds = 0;
        loop {
            let is_over = stop.run_until_cancelled(beats.tick()).await.is_none();
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

    /// Writes what was counted so far, so that a read of the history after this contains it. False if there was
    /// nothing to write.
    pub(crate) async fn record<S: TrafficHistory>(&self, store: &S) -> bool {
        let mut counted = self.counted.lock().await;
        let now = (self.now)();
        counted.count((self.traffic)(), now);
        let rows = counted.waiting();
        if rows.is_empty() {
            return false;
        }
        match timeout(RECORD_MAX, store.record_traffic(self.node, rows)).await {
            Ok(Ok(())) => counted.written(now),
            // The next round writes these rows again.
            Ok(Err(error)) => tracing::debug!(%error, "recording the traffic: {error}"),
            Err(_) => tracing::debug!("recording the traffic takes too long"),
        }
        true
    }
}

/// The counts of this process.
#[derive(Default)]
struct Counted {
    /// The counters of each source when they were last read: new, copies, conflicts, rejected, unavailable.
    counters: HashMap<SourceName, [u64; 5]>,
    /// The counts of a minute and source, for the current minute and for minutes that are not written yet.
    minutes: BTreeMap<(i64, String), Minute>,
}

#[derive(Default)]
struct Minute {
    counts: [u64; 5],
    is_written: bool,
}

impl Counted {
    /// Adds what the counters have grown by. Counters of a source that was removed and added again start at zero.
    fn count(&mut self, traffic: Vec<Traffic>, now: Timestamp) {
        let minute = minute_of(now);
        let mut counters = HashMap::new();
        for Traffic { source, new, copies, conflicts, failed_verifications, unavailable } in traffic
        {
            let after = [new, copies, conflicts, failed_verifications, unavailable];
            let before = self.counters.get(&source).copied().unwrap_or_default();
            let grown: [u64; 5] =
                std::array::from_fn(|at| after[at].checked_sub(before[at]).unwrap_or(after[at]));
            if grown != [0; 5] {
                let row = self.minutes.entry((minute, source.to_string())).or_default();
                row.counts = std::array::from_fn(|at| row.counts[at] + grown[at]);
                row.is_written = false;
            }
            counters.insert(source, after);
        }
        self.counters = counters;
        while self.minutes.len() > WAITING_MAX {
            self.minutes.pop_first();
        }
    }

    /// The rows to write.
    fn waiting(&self) -> Vec<TrafficCount> {
        let waiting = self.minutes.iter().filter(|(_, row)| !row.is_written);
        let count = |((minute, source), row): (&(i64, String), &Minute)| TrafficCount {
            source: SourceName::new(source),
            at: Timestamp::from_second(*minute).unwrap_or(Timestamp::UNIX_EPOCH),
            new: row.counts[0],
            copies: row.counts[1],
            conflicts: row.counts[2],
            rejected: row.counts[3],
            unavailable: row.counts[4],
        };
        waiting.map(count).collect()
    }

    /// The rows of the current minute may grow.
    fn written(&mut self, now: Timestamp) {
        let minute = minute_of(now);
        self.minutes.retain(|(of, _), _| *of >= minute);
        self.minutes.values_mut().for_each(|row| row.is_written = true);
    }
}

fn minute_of(at: Timestamp) -> i64 {
    let second = at.as_second();
    second - second.rem_euclid(MINUTE_SECONDS)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex as PlainMutex;
    use std::sync::atomic::{AtomicI64, Ordering};

    use hapax_core::store::TrafficAsk;
    use hapax_sim::{Act, FaultyStore};
    use hapax_store::MemoryStore;

    use super::*;

    #[tokio::test]
    async fn each_arrival_is_recorded_once_whatever_becomes_of_a_write() {
        // The store fails, also after it has written; minutes pass; a source is removed and added again.
        let counters = Arc::new(PlainMutex::new([0; 4]));
        let second = Arc::new(AtomicI64::new(1_000_020));
        let clock: Now = {
            let second = Arc::clone(&second);
            Arc::new(move || Timestamp::from_second(second.load(Ordering::SeqCst)).unwrap())
        };
        let store = FaultyStore::new(MemoryStore::with_clock(Arc::clone(&clock)));
        let recorder = {
            let counters = Arc::clone(&counters);
            let traffic = move || {
                let [new, copies, conflicts, failed_verifications] = *counters.lock().unwrap();
                let source = SourceName::new("s");
                vec![Traffic {
                    source,
                    new,
                    copies,
                    conflicts,
                    failed_verifications,
                    unavailable: 0,
                }]
            };
            TrafficRecorder::new(Uuid::from_u128(1), Box::new(traffic), clock)
        };
        let points = async || {
            let ask = TrafficAsk {
                source: None,
                from: Timestamp::from_second(1_000_000).unwrap(),
                to: Timestamp::from_second(1_001_000).unwrap(),
                step: Duration::from_secs(60),
            };
            let points = store.traffic(ask).await.unwrap();
            points
                .iter()
                .map(|one| [one.new, one.copies, one.conflicts, one.rejected])
                .collect::<Vec<_>>()
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
        // Removed, and added again.
        assert!(step([1, 0, 0, 0], 5).await);
        assert_eq!(points().await, [[6, 1, 0, 2], [3, 1, 0, 0]]);
    }
}
