//! Noticing that this machine's clock is wrong (O6): senders sign their own time, and many
//! authentic arrivals that all differ from ours in the same way are better witnesses than it.

use std::collections::VecDeque;

use hapax_core::KeyHash;
use jiff::{SignedDuration, Timestamp};

/// What the senders' signed times say about our clock.
#[derive(Debug, Default)]
pub(crate) struct ClockWatch {
    /// How far ahead of the sender's time ours was at each of the last authentic arrivals.
    offsets: VecDeque<i64>,
    outside_in_a_row: u32,
    last_outside: Option<KeyHash>,
    last_alarm: Option<Timestamp>,
}

/// One authentic arrival, as a witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Witness {
    /// Our time minus the signed time.
    pub(crate) offset_seconds: i64,
    /// Set where it lay outside the window: what tells this event from others.
    pub(crate) outside: Option<KeyHash>,
}

/// Reason to look at the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Alarm {
    /// The median of many arrivals is off.
    Offset { seconds: i64 },
    /// Arrivals with good signatures are outside the window, one after the other.
    OutsideWindow { in_a_row: u32 },
}

/// One sender's queue or retry proves nothing; half of so many does.
const WITNESSES_MIN: usize = 32;
const WITNESSES_MAX: usize = 64;

/// Far above network and queueing delays, far below the window of five minutes.
const OFFSET_SECONDS_MAX: i64 = 60;

/// Distinct authentic events outside the window without one inside between them.
const OUTSIDE_IN_A_ROW_MAX: u32 = 5;

const ALARM_EVERY: SignedDuration = SignedDuration::from_mins(1);

impl ClockWatch {
    /// Hears one witness.
    pub(crate) fn note(&mut self, witness: Witness) {
        if self.offsets.len() == WITNESSES_MAX {
            self.offsets.pop_front();
        }
        self.offsets.push_back(witness.offset_seconds);
        match witness.outside {
            None => {
                self.outside_in_a_row = 0;
                self.last_outside = None;
            }
            // Someone resending one old request over and over says nothing about the clock.
            Some(event) if self.last_outside == Some(event) => {}
            Some(event) => {
                self.outside_in_a_row = self.outside_in_a_row.saturating_add(1);
                self.last_outside = Some(event);
            }
        }
    }

    /// How far our clock is ahead of the senders', once enough of them were heard.
    pub(crate) fn offset_seconds(&self) -> Option<i64> {
        if self.offsets.len() < WITNESSES_MIN {
            return None;
        }
        let mut offsets: Vec<i64> = self.offsets.iter().copied().collect();
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
        let by_window = (self.outside_in_a_row >= OUTSIDE_IN_A_ROW_MAX)
            .then_some(Alarm::OutsideWindow { in_a_row: self.outside_in_a_row });
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

    fn inside(offset_seconds: i64) -> Witness {
        Witness { offset_seconds, outside: None }
    }

    #[test]
    fn a_wrong_clock_is_named_once_a_minute() {
        let mut watch = ClockWatch::default();
        (0..31).for_each(|_| watch.note(inside(90)));
        assert_eq!(watch.alarm(at(0)), None);
        watch.note(inside(90));
        assert_eq!(watch.alarm(at(0)), Some(Alarm::Offset { seconds: 90 }));
        assert_eq!(watch.alarm(at(59)), None);
        assert_eq!(watch.alarm(at(60)), Some(Alarm::Offset { seconds: 90 }));
    }

    #[test]
    fn a_minority_of_old_retries_raises_no_alarm() {
        let mut watch = ClockWatch::default();
        (0..20).for_each(|_| watch.note(inside(1)));
        (0..19).for_each(|_| watch.note(inside(250)));
        assert_eq!(watch.alarm(at(0)), None);
        assert_eq!(watch.offset_seconds(), Some(1));
    }

    #[test]
    fn distinct_events_outside_the_window_one_after_the_other_raise_an_alarm() {
        let mut watch = ClockWatch::default();
        let outside = |event| Witness { offset_seconds: -400, outside: Some(KeyHash([event; 16])) };
        (0..4).for_each(|event| watch.note(outside(event)));
        assert_eq!(watch.alarm(at(0)), None);
        watch.note(outside(4));
        assert_eq!(watch.alarm(at(0)), Some(Alarm::OutsideWindow { in_a_row: 5 }));
    }

    #[test]
    fn one_old_request_sent_again_and_again_raises_no_alarm() {
        let mut watch = ClockWatch::default();
        (0..20).for_each(|_| {
            watch.note(Witness { offset_seconds: 9000, outside: Some(KeyHash([7; 16])) })
        });
        assert_eq!(watch.alarm(at(0)), None);
    }
}
