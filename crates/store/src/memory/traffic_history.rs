//! The figures over time in the model.

use std::collections::BTreeMap;

use hapax_core::store::{
    Completion, MERGES, MINUTE_SECONDS, NODES_MERGED_AFTER, StoreError, TRAFFIC_KEPT, Tallies,
    TrafficAsk, TrafficCount, TrafficFigures, TrafficHistory,
};
use hapax_core::{SourceName, Timestamp};
use uuid::Uuid;

use super::MemoryStore;

/// Figures by length of the step, start, source and node. Merged figures have the nil node.
pub(super) type Counts = BTreeMap<(i64, i64, String, Uuid), TrafficFigures>;

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
            kept.insert((MINUTE_SECONDS, start, count.source.to_string(), node), count.figures);
        }
        let nodes = (MINUTE_SECONDS, MINUTE_SECONDS, NODES_MERGED_AFTER);
        for (from, to, age) in std::iter::once(nodes).chain(MERGES) {
            let is_old = |(width, start, _, node): &&(i64, i64, String, Uuid)| {
                *width == from && *start < now - age && (from != to || !node.is_nil())
            };
            let old: Vec<_> = kept.keys().filter(is_old).cloned().collect();
            for key in old {
                let figures = kept.remove(&key).unwrap_or_default();
                let (_, start, source, _) = key;
                kept.entry((to, floor(start, to), source, Uuid::nil())).or_default().add(&figures);
            }
        }
        kept.retain(|(_, start, _, _), _| *start >= now - TRAFFIC_KEPT);
        Ok(())
    }

    async fn take_completions(&self, _: usize) -> Result<Vec<Completion>, StoreError> {
        // Only the functions in PostgreSQL complete jobs past the node.
        Ok(Vec::new())
    }

    async fn traffic_by_source(&self, ask: TrafficAsk) -> Result<Vec<TrafficCount>, StoreError> {
        let (from, to) = (ask.from.as_second(), ask.to.as_second());
        let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
        let mut steps: BTreeMap<(i64, String), TrafficFigures> = BTreeMap::new();
        for ((_, start, source, _), figures) in &self.model().traffic {
            let is_asked = ask.source.as_ref().is_none_or(|asked| asked.as_str() == source);
            if is_asked && (from..to).contains(start) {
                steps.entry((floor(*start, step), source.clone())).or_default().add(figures);
            }
        }
        let count = |((at, source), mut figures): ((i64, String), TrafficFigures)| {
            if !ask.tallies {
                figures.tallies = Tallies::default();
            }
            let at = Timestamp::from_second(at).unwrap_or(Timestamp::UNIX_EPOCH);
            TrafficCount { source: SourceName::new(source), at, figures }
        };
        Ok(steps.into_iter().map(count).collect())
    }
}

fn floor(second: i64, width: i64) -> i64 {
    second - second.rem_euclid(width)
}
