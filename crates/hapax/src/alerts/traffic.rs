//! The counts of all nodes, as the judge of alerts reads them from the store in each round. The
//! counters that it makes of it begin a day before the judge does, so a restart forgets nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_core::store::{MINUTE_SECONDS, TrafficAsk, TrafficCount};
use hapax_core::{SourceName, Timestamp};
use hapax_engine::Traffic;
use jiff::SignedDuration;

use super::history::{History, earlier};

/// How far back the judge begins: no rule compares a longer span.
const BEGINS_BEFORE: Duration = Duration::from_secs(25 * 3_600);

/// Minutes that ended this long ago are not read again: every node has written them.
const SETTLED_AFTER: Duration = Duration::from_secs(5 * 60);

/// The counters of each source over all nodes.
pub(super) struct MergedTraffic {
    history: History,
    /// The sums of all minutes before `settled`.
    sums: BTreeMap<SourceName, [u64; 3]>,
    settled: Timestamp,
    current: Vec<Traffic>,
    was_read: bool,
}

impl MergedTraffic {
    /// Nothing is read yet.
    pub(super) fn new(now: Timestamp) -> Self {
        let begin = minute_of(earlier(now, BEGINS_BEFORE));
        Self {
            history: History::new(begin),
            sums: BTreeMap::new(),
            settled: begin,
            current: Vec::new(),
            was_read: false,
        }
    }

    /// The counts to read next.
    pub(super) fn ask(&self) -> TrafficAsk {
        let step = Duration::from_secs(MINUTE_SECONDS.unsigned_abs());
        // A node's clock may be ahead.
        TrafficAsk { source: None, from: self.settled, to: Timestamp::MAX, step }
    }

    /// Takes what was read, in the order of time. Only `sources` are configured.
    pub(super) fn take(
        &mut self,
        counts: Vec<TrafficCount>,
        sources: &[SourceName],
        now: Timestamp,
    ) {
        let is_first = !std::mem::replace(&mut self.was_read, true);
        let settled = minute_of(earlier(now, SETTLED_AFTER)).max(self.settled);
        let mut sums = self.sums.clone();
        let mut counts = counts.into_iter().peekable();
        while let Some(count) = counts.next() {
            let sum = sums.entry(count.source).or_default();
            let grown = [count.new, count.copies, count.rejected];
            *sum = std::array::from_fn(|at| sum[at].saturating_add(grown[at]));
            if counts.peek().is_some_and(|next| next.at == count.at) {
                continue;
            }
            let end = count.at.saturating_add(SignedDuration::from_secs(MINUTE_SECONDS));
            let end = end.unwrap_or(Timestamp::MAX);
            if is_first && end <= now {
                self.history.note(end, &traffic(&sums));
            }
            if count.at < settled {
                self.sums.clone_from(&sums);
            }
        }
        self.settled = settled;
        sums.retain(|source, _| sources.contains(source));
        for source in sources {
            sums.entry(source.clone()).or_default();
        }
        self.current = traffic(&sums);
        self.history.note(now, &self.current);
    }

    pub(super) fn history(&self) -> &History {
        &self.history
    }

    /// The counters of each configured source.
    pub(super) fn current(&self) -> &[Traffic] {
        &self.current
    }
}

fn traffic(sums: &BTreeMap<SourceName, [u64; 3]>) -> Vec<Traffic> {
    let of_source = |(source, [new, copies, rejected]): (&SourceName, &[u64; 3])| Traffic {
        source: source.clone(),
        new: *new,
        copies: *copies,
        failed_verifications: *rejected,
        unavailable: 0,
    };
    sums.iter().map(of_source).collect()
}

/// The beginning of the minute.
pub(super) fn minute_of(at: Timestamp) -> Timestamp {
    let second = at.as_second();
    Timestamp::from_second(second - second.rem_euclid(MINUTE_SECONDS)).unwrap_or(at)
}
