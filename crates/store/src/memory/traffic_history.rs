//! The history of traffic in the model.

use std::collections::{BTreeMap, BTreeSet};

use hapax_core::store::{
    MERGES, MINUTE_SECONDS, NODES_MERGED_AFTER, StoreError, TRAFFIC_KEPT, TrafficAsk, TrafficCount,
    TrafficHistory, TrafficPoint,
};
use hapax_core::{SourceName, Timestamp};
use uuid::Uuid;

use super::MemoryStore;

/// Counts by length, start, source and node: new, copies, conflicts, rejected, unavailable. Merged counts have the nil node.
pub(super) type Counts = BTreeMap<(i64, i64, String, Uuid), [u64; 5]>;

impl TrafficHistory for MemoryStore {
    async fn record_traffic(
        &self,
        node: Uuid,
        counts: Vec<TrafficCount>,
    ) -> Result<(), StoreError> {
        let now = self.now().as_second();
        let kept = &mut self.model().traffic;
        for count in counts {
            let start = floor(count.at.as_second(), MINUTE_SECONDS);
            let counted =
                [count.new, count.copies, count.conflicts, count.rejected, count.unavailable];
            kept.insert((MINUTE_SECONDS, start, count.source.to_string(), node), counted);
        }
        let nodes = (MINUTE_SECONDS, MINUTE_SECONDS, NODES_MERGED_AFTER);
        for (from, to, age) in std::iter::once(nodes).chain(MERGES) {
            let is_old = |(width, start, _, node): &&(i64, i64, String, Uuid)| {
                *width == from && *start < now - age && (from != to || !node.is_nil())
            };
            let old: Vec<_> = kept.keys().filter(is_old).cloned().collect();
            for key in old {
                let counted = kept.remove(&key).unwrap_or_default();
                let (_, start, source, _) = key;
                add(kept, (to, floor(start, to), source, Uuid::nil()), counted);
            }
        }
        kept.retain(|(_, start, _, _), _| *start >= now - TRAFFIC_KEPT);
        Ok(())
    }

    async fn traffic(&self, ask: TrafficAsk) -> Result<Vec<TrafficPoint>, StoreError> {
        let (from, to) = (ask.from.as_second(), ask.to.as_second());
        let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
        let mut points: BTreeMap<i64, [u64; 5]> = BTreeMap::new();
        for ((_, start, source, _), counted) in &self.model().traffic {
            let is_asked = ask.source.as_ref().is_none_or(|asked| asked.as_str() == source);
            if is_asked && (from..to).contains(start) {
                let point = points.entry(floor(*start, step)).or_default();
                point.iter_mut().zip(counted).for_each(|(sum, more)| *sum += more);
            }
        }
        let point = |(at, [new, copies, conflicts, rejected, unavailable]): (i64, [u64; 5])| {
            let at = Timestamp::from_second(at).unwrap_or(Timestamp::UNIX_EPOCH);
            TrafficPoint { at, new, copies, conflicts, rejected, unavailable }
        };
        Ok(points.into_iter().map(point).collect())
    }

    async fn traffic_by_source(&self, ask: TrafficAsk) -> Result<Vec<TrafficCount>, StoreError> {
        let sources: BTreeSet<String> =
            self.model().traffic.keys().map(|(_, _, source, _)| source.clone()).collect();
        let mut counts = Vec::new();
        for source in sources.into_iter().map(SourceName::new) {
            if ask.source.as_ref().is_some_and(|asked| *asked != source) {
                continue;
            }
            let ask = TrafficAsk { source: Some(source.clone()), ..ask.clone() };
            let of_source =
                |TrafficPoint { at, new, copies, conflicts, rejected, unavailable }| TrafficCount {
                    source: source.clone(),
                    at,
                    new,
                    copies,
                    conflicts,
                    rejected,
                    unavailable,
                };
            counts.extend(self.traffic(ask).await?.into_iter().map(of_source));
        }
        counts.sort_by(|a, b| (a.at, a.source.as_str()).cmp(&(b.at, b.source.as_str())));
        Ok(counts)
    }
}

fn add(kept: &mut Counts, key: (i64, i64, String, Uuid), counted: [u64; 5]) {
    let sums = kept.entry(key).or_default();
    sums.iter_mut().zip(counted).for_each(|(sum, more)| *sum += more);
}

fn floor(second: i64, width: i64) -> i64 {
    second - second.rem_euclid(width)
}
