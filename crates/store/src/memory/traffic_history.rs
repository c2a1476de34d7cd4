//! The history of traffic in the model.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use hapax_core::store::{
    MERGES, MINUTE_SECONDS, StoreError, TRAFFIC_KEPT, TrafficAsk, TrafficCount, TrafficHistory,
    TrafficPoint,
};

use super::MemoryStore;

/// Counts by length, start and source: new, copies, rejected.
pub(super) type Counts = BTreeMap<(i64, i64, String), [u64; 3]>;

impl TrafficHistory for MemoryStore {
    async fn record_traffic(&self, counts: Vec<TrafficCount>) -> Result<(), StoreError> {
        let now = self.now().as_second();
        let kept = &mut self.model().traffic;
        for count in counts {
            let start = floor(count.at.as_second(), MINUTE_SECONDS);
            let counted = [count.new, count.copies, count.rejected];
            add(kept, (MINUTE_SECONDS, start, count.source.to_string()), counted);
        }
        for (from, to, age) in MERGES {
            let is_old =
                |(width, start, _): &&(i64, i64, String)| *width == from && *start < now - age;
            let old: Vec<_> = kept.keys().filter(is_old).cloned().collect();
            for key in old {
                let counted = kept.remove(&key).unwrap_or_default();
                let (_, start, source) = key;
                add(kept, (to, floor(start, to), source), counted);
            }
        }
        kept.retain(|(_, start, _), _| *start >= now - TRAFFIC_KEPT);
        Ok(())
    }

    async fn traffic(&self, ask: TrafficAsk) -> Result<Vec<TrafficPoint>, StoreError> {
        let (from, to) = (ask.from.as_second(), ask.to.as_second());
        let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
        let mut points: BTreeMap<i64, [u64; 3]> = BTreeMap::new();
        for ((_, start, source), counted) in &self.model().traffic {
            let is_asked = ask.source.as_ref().is_none_or(|asked| asked.as_str() == source);
            if is_asked && (from..to).contains(start) {
                let point = points.entry(floor(*start, step)).or_default();
                point.iter_mut().zip(counted).for_each(|(sum, more)| *sum += more);
            }
        }
        let point = |(at, [new, copies, rejected]): (i64, [u64; 3])| {
            let at = Timestamp::from_second(at).unwrap_or(Timestamp::UNIX_EPOCH);
            TrafficPoint { at, new, copies, rejected }
        };
        Ok(points.into_iter().map(point).collect())
    }
}

fn add(kept: &mut Counts, key: (i64, i64, String), counted: [u64; 3]) {
    let sums = kept.entry(key).or_default();
    sums.iter_mut().zip(counted).for_each(|(sum, more)| *sum += more);
}

fn floor(second: i64, width: i64) -> i64 {
    second - second.rem_euclid(width)
}
