//! Records how much each source sends: the counts of this process are added to the history in the
//! store every ten seconds. A process that is killed loses at most that much.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{TrafficCount, TrafficHistory};
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{Now, Traffic};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

/// How often counts are recorded.
const RECORD_EVERY: Duration = Duration::from_secs(10);

/// How long one record may take: a store that does not answer must not delay the shutdown.
const RECORD_MAX: Duration = Duration::from_secs(2);

/// How many rounds without a count may pass before the history is tidied all the same.
const IDLE_ROUNDS_MAX: u32 = 60;

/// Records until `stop`, and once more then.
pub(crate) async fn run<S: TrafficHistory>(
    store: Arc<S>,
    traffic: impl Fn() -> Vec<Traffic> + Send,
    now: Now,
    stop: CancellationToken,
) {
    let mut beats = interval(RECORD_EVERY);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut recorded = Recorded::default();
    let mut idle_rounds = 0;
    loop {
        let is_over = stop.run_until_cancelled(beats.tick()).await.is_none();
        let current = traffic();
        let counts = recorded.since(&current, now());
        idle_rounds = if counts.is_empty() { idle_rounds + 1 } else { 0 };
        if !counts.is_empty() || idle_rounds > IDLE_ROUNDS_MAX {
            idle_rounds = 0;
            match timeout(RECORD_MAX, store.record_traffic(counts)).await {
                Ok(Ok(())) => recorded = Recorded::of(current),
                // The next round records these counts too.
                Ok(Err(error)) => tracing::debug!(%error, "recording the traffic: {error}"),
                Err(_) => tracing::debug!("recording the traffic takes too long"),
            }
        }
        if is_over {
            return;
        }
    }
}

/// The counts of this process that are in the history.
#[derive(Default)]
struct Recorded(HashMap<SourceName, [u64; 3]>);

impl Recorded {
    fn of(traffic: Vec<Traffic>) -> Self {
        let counts = |one: Traffic| (one.source, [one.new, one.copies, one.failed_verifications]);
        Self(traffic.into_iter().map(counts).collect())
    }

    /// The requests of each source since then. Counters of a source that was removed and added
    /// again start at zero.
    fn since(&self, traffic: &[Traffic], at: Timestamp) -> Vec<TrafficCount> {
        let counts = traffic.iter().map(|one| {
            let before = self.0.get(&one.source).copied().unwrap_or_default();
            let since = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
            TrafficCount {
                source: one.source.clone(),
                at,
                new: since(one.new, before[0]),
                copies: since(one.copies, before[1]),
                rejected: since(one.failed_verifications, before[2]),
            }
        });
        counts.filter(|count| count.new + count.copies + count.rejected > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_arrival_is_recorded_once() {
        let traffic = |new, copies, failed_verifications| {
            let source = SourceName::new("stripe");
            vec![Traffic { source, new, copies, failed_verifications }]
        };
        let check = |before: Vec<Traffic>, now: Vec<Traffic>, expected: Option<[u64; 3]>| {
            let counts = Recorded::of(before).since(&now, Timestamp::UNIX_EPOCH);
            let counts: Vec<_> =
                counts.iter().map(|count| [count.new, count.copies, count.rejected]).collect();
            assert_eq!(counts, Vec::from_iter(expected));
        };
        check(Vec::new(), traffic(3, 1, 0), Some([3, 1, 0]));
        check(traffic(3, 1, 0), traffic(5, 1, 2), Some([2, 0, 2]));
        check(traffic(5, 1, 2), traffic(5, 1, 2), None);
        // The source was removed and added again.
        check(traffic(5, 1, 2), traffic(1, 0, 0), Some([1, 0, 0]));
    }
}
