//! The figures of minutes that are over, kept in memory: a page that is refreshed every second reads only the newest
//! minutes.
//!
//! A minute is closed once every node has written it. A node that could not write for a while writes older minutes
//! later. So a sum is read again when the beginning of its span moves: every minute for spans of up to two days, every
//! hour for longer ones.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hapax_core::store::{
    MINUTE_SECONDS, StoreError, TrafficAsk, TrafficCount, TrafficFigures, TrafficHistory,
};
use hapax_core::{SourceName, Timestamp};

/// Nodes write their counts every ten seconds: they have written a minute that ended this long ago, also after a short
/// outage of the store.
const CLOSED_AFTER_SECONDS: i64 = 5 * 60;

/// The most spans that are kept. Pages ask for two or three.
const SPANS_MAX: usize = 16;

/// The most figures of one span that are kept: an hour of a hundred sources by the minute, about 3 MiB. Longer
/// answers are rare, and are read each time.
const FIGURES_MAX: usize = 6_000;

/// Figures by step and source.
#[derive(Clone, Default)]
pub(crate) struct StepFigures(BTreeMap<(Timestamp, SourceName), TrafficFigures>);

impl StepFigures {
    pub(crate) fn add(&mut self, counts: impl IntoIterator<Item = TrafficCount>) {
        for TrafficCount { source, at, figures } in counts {
            self.0.entry((at, source)).or_default().add(&figures);
        }
    }

    /// The figures in the order of time.
    pub(crate) fn into_counts(self) -> Vec<TrafficCount> {
        let count = |((at, source), figures)| TrafficCount { source, at, figures };
        self.0.into_iter().map(count).collect()
    }
}

/// The time before which all minutes are closed.
pub(crate) fn closed_before(now: Timestamp) -> Timestamp {
    let second = now.as_second() - CLOSED_AFTER_SECONDS;
    Timestamp::from_second(second - second.rem_euclid(MINUTE_SECONDS)).unwrap_or(Timestamp::MIN)
}

/// The figures of closed minutes that were read.
#[derive(Default)]
pub(crate) struct ClosedFigures {
    spans: Mutex<HashMap<SpanKey, Span>>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct SpanKey {
    source: Option<SourceName>,
    /// The minute that the span begins with.
    from: i64,
    step: Duration,
    tallies: bool,
}

#[derive(Clone)]
struct Span {
    to: Timestamp,
    figures: StepFigures,
}

impl ClosedFigures {
    /// The figures of a span that ends with a closed minute, from memory as far as they are there.
    pub(crate) async fn read<S: TrafficHistory>(
        &self,
        store: &S,
        ask: TrafficAsk,
    ) -> Result<StepFigures, StoreError> {
        let from = ask.from.as_second();
        let key = SpanKey {
            source: ask.source.clone(),
            // Minutes are counted as a whole, from their start.
            from: from + (-from).rem_euclid(MINUTE_SECONDS),
            step: ask.step,
            tallies: ask.tallies,
        };
        // If the clock was set back, the kept span may be too long.
        let kept = self.spans().get(&key).filter(|span| span.to <= ask.to).cloned();
        let mut span = match kept {
            Some(span) if span.to == ask.to => return Ok(span.figures),
            Some(span) => span,
            None => Span { to: ask.from, figures: StepFigures::default() },
        };
        let more = store.traffic_by_source(TrafficAsk { from: span.to, ..ask.clone() }).await?;
        span.figures.add(more);
        span.to = ask.to;
        if span.figures.0.len() <= FIGURES_MAX {
            let mut spans = self.spans();
            if spans.len() >= SPANS_MAX && !spans.contains_key(&key) {
                // Spans whose beginning has moved are not asked for again.
                let oldest =
                    spans.iter().min_by_key(|(_, span)| span.to).map(|(key, _)| key.clone());
                oldest.map(|oldest| spans.remove(&oldest));
            }
            spans.insert(key, span.clone());
        }
        Ok(span.figures)
    }

    /// Whether figures of a span that begins with `from` are in memory.
    #[cfg(test)]
    pub(crate) fn has(&self, from: Timestamp) -> bool {
        self.spans().keys().any(|key| key.from == from.as_second())
    }

    fn spans(&self) -> std::sync::MutexGuard<'_, HashMap<SpanKey, Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
