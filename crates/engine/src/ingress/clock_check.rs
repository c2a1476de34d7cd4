//! Detects that this machine's clock is wrong. Senders sign the time of their own clocks. If the
//! signed times of many authentic arrivals differ from this machine's clock in the same way, this
//! clock is wrong.

use std::collections::VecDeque;

use hapax_core::KeyHash;
use jiff::{SignedDuration, Timestamp};

/// The evidence of signed times about this machine's clock.
#[derive(Debug, Default)]
pub(crate) struct ClockCheck {
    /// For the last authentic events: how far this clock was ahead of the signed time at the first
    /// arrival.
    offsets: VecDeque<(KeyHash, i64)>,
    /// The distinct events outside the window since the last one inside, oldest first.
    outside: VecDeque<KeyHash>,
    last_alarm: Option<Timestamp>,
}

/// One authentic arrival, as evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClockEvidence {
    /// Identifies the event.
    pub(crate) event: KeyHash,
    /// This machine's time minus the signed time.
    pub(crate) offset_seconds: i64,
    /// Whether the signed time was outside the window.
    pub(crate) is_outside: bool,
}

/// Why the clock may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Alarm {
    /// The median offset of many arrivals is too large.
    Offset { seconds: i64 },
    /// Authentic arrivals are outside the window, one after the other.
    OutsideWindow { in_a_row: usize },
}

/// How many distinct events the median needs, and how many it uses at most. An event that is sent
/// repeatedly counts once. A few events that a sender has queued or retried cannot move the median;
/// half of the events would have to agree.
const WITNESSES_MIN: usize = 32;
const WITNESSES_MAX: usize = 64;

/// Far above network and queueing delays, far below the window of five minutes.
const OFFSET_SECONDS_MAX: i64 = 60;

/// Distinct authentic events outside the window without one inside between them.
const OUTSIDE_IN_A_ROW_MAX: usize = 5;

const ALARM_EVERY: SignedDuration = SignedDuration::from_mins(1);

impl ClockCheck {
    /// Adds one piece of evidence. Copies of a known event are ignored: they may be one captured
    /// request that is sent repeatedly.
    pub(crate) fn note(&mut self, evidence: ClockEvidence) {
        if self.offsets.iter().any(|(event, _)| *event == evidence.event) {
            return;
        }
        if self.offsets.len() == WITNESSES_MAX {
            self.offsets.pop_front();
        }
        self.offsets.push_back((evidence.event, evidence.offset_seconds));
        match evidence.is_outside {
            false => self.outside.clear(),
            true if self.outside.contains(&evidence.event) => {}
            true => {
                if self.outside.len() == WITNESSES_MAX {
                    self.outside.pop_front();
                }
                self.outside.push_back(evidence.event);
            }
        }
    }

    /// How far this clock is ahead of the senders' clocks, once there is enough evidence.
    pub(crate) fn offset_seconds(&self) -> Option<i64> {
        if self.offsets.len() < WITNESSES_MIN {
            return None;
        }
        let mut offsets: Vec<i64> = self.offsets.iter().map(|(_, offset)| *offset).collect();
        let middle = offsets.len() / 2;
        Some(*offsets.select_nth_unstable(middle).1)
    }

    /// An alarm, at most one a minute.
    pub(crate) fn alarm(&mut self, now: Timestamp) -> Option<Alarm> {
        if self.last_alarm.is_some_and(|last| now.duration_since(last).abs() < ALARM_EVERY) {
            return None;
        }
        let by_median = self
            .offset_seconds()
            .filter(|seconds| seconds.unsigned_abs() > OFFSET_SECONDS_MAX.unsigned_abs())
            .map(|seconds| Alarm::Offset { seconds });
        let in_a_row = self.outside.len();
        let by_window =
            (in_a_row >= OUTSIDE_IN_A_ROW_MAX).then_some(Alarm::OutsideWindow { in_a_row });
        let alarm = by_median.or(by_window)?;
        self.last_alarm = Some(now);
        Some(alarm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// The nth event, inside the window.
    fn inside(nth: u8, offset_seconds: i64) -> ClockEvidence {
        ClockEvidence { event: KeyHash([nth; 16]), offset_seconds, is_outside: false }
    }

    fn outside(nth: u8, offset_seconds: i64) -> ClockEvidence {
        ClockEvidence { is_outside: true, ..inside(nth, offset_seconds) }
    }

    #[test]
    fn a_wrong_clock_is_reported_once_a_minute() {
        let mut watch = ClockCheck::default();
        (0..31).for_each(|nth| watch.note(inside(nth, 90)));
        assert_eq!(watch.alarm(at(0)), None);
        watch.note(inside(31, 90));
        assert_eq!(watch.alarm(at(0)), Some(Alarm::Offset { seconds: 90 }));
        assert_eq!(watch.alarm(at(59)), None);
        assert_eq!(watch.alarm(at(60)), Some(Alarm::Offset { seconds: 90 }));
    }

    #[test]
    fn a_minority_of_old_retries_raises_no_alarm() {
        let mut watch = ClockCheck::default();
        (0..20).for_each(|nth| watch.note(inside(nth, 1)));
        (20..39).for_each(|nth| watch.note(inside(nth, 250)));
        assert_eq!(watch.alarm(at(0)), None);
        assert_eq!(watch.offset_seconds(), Some(1));
    }

    #[test]
    fn distinct_events_outside_the_window_one_after_the_other_raise_an_alarm() {
        let mut watch = ClockCheck::default();
        (0..4).for_each(|nth| watch.note(outside(nth, -400)));
        assert_eq!(watch.alarm(at(0)), None);
        watch.note(outside(4, -400));
        assert_eq!(watch.alarm(at(0)), Some(Alarm::OutsideWindow { in_a_row: 5 }));
    }

    #[test]
    fn one_old_request_sent_again_and_again_raises_no_alarm() {
        // A few other events are on time, as on any day.
        let mut watch = ClockCheck::default();
        for nth in 0..3 {
            watch.note(inside(nth, 1));
            (0..40).for_each(|_| watch.note(outside(200, 90_000)));
        }
        assert_eq!(watch.alarm(at(0)), None);
        assert_eq!(watch.offset_seconds(), None, "four events are not enough to judge by");
    }

    #[test]
    fn copies_of_one_event_do_not_outweigh_the_others() {
        let mut watch = ClockCheck::default();
        (0..40).for_each(|nth| watch.note(inside(nth, 1)));
        (0..200).for_each(|_| watch.note(inside(200, 90_000)));
        assert_eq!(watch.offset_seconds(), Some(1));
    }
}
