//! Counts the attempts of each endpoint by the hour: how many succeeded, and how long they took. The counts of an hour
//! grow until the hour is over, and are kept until they are written.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::log_buckets::bucket_of;
use hapax_core::store::{
    AttemptVerdict, EndpointFigures, EndpointHour, EndpointSignal, TallyKind, hour_of,
};

/// The most counts that are kept: of this hour, and of earlier hours that a store could not write. The oldest hours are
/// dropped. Further endpoints of the same hour are not counted.
const WAITING_MAX: usize = 20_000;

/// The counts of this process that are not over or not written yet.
#[derive(Debug, Default)]
pub struct EndpointTallies(Mutex<BTreeMap<(i64, EndpointId), Tally>>);

#[derive(Debug, Default)]
struct Tally {
    figures: EndpointFigures,
    is_written: bool,
}

impl EndpointTallies {
    /// Counts an attempt that ended. An attempt that never left the process is not counted: it says
    /// nothing about the endpoint.
    pub(super) fn count(
        &self,
        endpoint: EndpointId,
        verdict: &AttemptVerdict,
        took: Duration,
        at: Timestamp,
    ) {
        let is_delivered = match verdict {
            AttemptVerdict::Delivered(_) | AttemptVerdict::DeliveredLast { .. } => true,
            AttemptVerdict::GivenBack
            | AttemptVerdict::Failed { says: EndpointSignal::Nothing, .. } => return,
            AttemptVerdict::Failed { .. } => false,
        };
        let key = (hour_of(at), endpoint);
        let mut tallies = self.tallies();
        if tallies.len() >= WAITING_MAX && !tallies.contains_key(&key) {
            // A count of this hour must not be dropped: it would begin again at zero, and replace a higher count
            // that is written already.
            if tallies.first_key_value().is_none_or(|((oldest, _), _)| *oldest >= key.0) {
                return;
            }
            tallies.pop_first();
        }
        let tally = tallies.entry(key).or_default();
        tally.is_written = false;
        let figures = &mut tally.figures;
        match is_delivered {
            true => figures.delivered += 1,
            false => figures.failed += 1,
        }
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        figures.micros = figures.micros.saturating_add(micros);
        figures.tallies.count(TallyKind::Attempt, bucket_of(took), 1);
    }

    /// The counts that have grown since they were written.
    pub fn waiting(&self) -> Vec<EndpointHour> {
        let tallies = self.tallies();
        let grown = tallies.iter().filter(|(_, tally)| !tally.is_written);
        let hour = |(&(start, endpoint), tally): (&(i64, EndpointId), &Tally)| EndpointHour {
            endpoint,
            at: Timestamp::from_second(start).unwrap_or(Timestamp::UNIX_EPOCH),
            figures: tally.figures.clone(),
        };
        grown.map(hour).collect()
    }

    /// Notes that these counts are written. Counts of hours that are over are forgotten, unless they have grown
    /// meanwhile.
    pub fn written(&self, counts: &[EndpointHour], now: Timestamp) {
        let mut tallies = self.tallies();
        for EndpointHour { endpoint, at, figures } in counts {
            if let Some(tally) = tallies.get_mut(&(hour_of(*at), *endpoint)) {
                tally.is_written = tally.figures == *figures;
            }
        }
        let hour = hour_of(now);
        tallies.retain(|(start, _), tally| *start >= hour || !tally.is_written);
    }

    fn tallies(&self) -> MutexGuard<'_, BTreeMap<(i64, EndpointId), Tally>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::job::Retry;
    use hapax_core::store::HandlerAnswer;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn an_attempt_counts_in_its_hour_until_that_is_written() {
        // A count that grows while it is written must be written again; a late one belongs to its own hour.
        let (tallies, one) = (EndpointTallies::default(), EndpointId(Uuid::from_u128(1)));
        let at = |second| Timestamp::from_second(second).unwrap();
        let answer = || HandlerAnswer { status: 200, body: String::new() };
        let failed = |says| AttemptVerdict::Failed {
            error: "no".to_owned(),
            answer: None,
            retry: Retry::Schedule,
            says,
        };
        let took = Duration::from_millis(30);
        tallies.count(one, &AttemptVerdict::Delivered(answer()), took, at(7_199));
        tallies.count(one, &failed(EndpointSignal::Works), took, at(7_200));
        tallies.count(one, &failed(EndpointSignal::Nothing), took, at(7_200));
        tallies.count(one, &AttemptVerdict::GivenBack, took, at(7_200));
        let counts = |hours: &[EndpointHour]| -> Vec<_> {
            let line = |hour: &EndpointHour| {
                let EndpointFigures { delivered, failed, micros, tallies } = &hour.figures;
                (
                    hour.at.as_second(),
                    *delivered,
                    *failed,
                    *micros,
                    tallies.total(TallyKind::Attempt),
                )
            };
            hours.iter().map(line).collect()
        };
        let first = tallies.waiting();
        assert_eq!(counts(&first), [(3_600, 1, 0, 30_000, 1), (7_200, 0, 1, 30_000, 1)]);
        tallies.count(one, &AttemptVerdict::Delivered(answer()), took, at(7_201));
        tallies.written(&first, at(7_300));
        assert_eq!(counts(&tallies.waiting()), [(7_200, 1, 1, 60_000, 2)]);
        tallies.written(&tallies.waiting(), at(7_300));
        assert_eq!(tallies.waiting(), []);
        // The hour goes on, and then it is over.
        tallies.count(one, &failed(EndpointSignal::Fails), took, at(7_400));
        assert_eq!(counts(&tallies.waiting()), [(7_200, 1, 2, 90_000, 3)]);
        tallies.written(&tallies.waiting(), at(10_800));
        assert!(tallies.tallies().is_empty());
    }

    #[test]
    fn more_endpoints_than_are_kept_never_lower_a_count() {
        // What is written is the whole count of the hour, so a count that begins again would replace a higher one.
        let tallies = EndpointTallies::default();
        let deliver = |endpoint: usize, second| {
            let answer = HandlerAnswer { status: 200, body: String::new() };
            let endpoint = EndpointId(Uuid::from_u128(endpoint as u128));
            let at = Timestamp::from_second(second).unwrap();
            tallies.count(endpoint, &AttemptVerdict::Delivered(answer), Duration::ZERO, at);
        };
        (0..WAITING_MAX + 10).for_each(|endpoint| deliver(endpoint, 3_600));
        deliver(0, 3_601);
        let counted = tallies.waiting();
        assert_eq!((counted.len(), counted[0].figures.delivered), (WAITING_MAX, 2));
        // Counts of an hour that is over are dropped first.
        (0..10).for_each(|endpoint| deliver(endpoint, 7_200));
        let counted = tallies.waiting();
        assert_eq!(counted.len(), WAITING_MAX);
        assert_eq!(counted.iter().filter(|hour| hour.at.as_second() == 7_200).count(), 10);
    }
}
