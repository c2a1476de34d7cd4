//! Decides whether the wall clock can be trusted to tell which data has expired. To a clock that is far ahead for a
//! moment everything looks expired, and deleted data cannot be restored. Reads no clock itself:
//! [`crate::janitor`] passes both times.
//!
//! Monotonic time is not changed when the wall clock is set. If the wall clock goes ahead of it by a step, the
//! wall clock is doubted for a while. After that time the step is believed: the clock may have been behind
//! before, or the machine may have been suspended, because monotonic time stands still meanwhile.

use std::time::Duration;

use hapax_core::Timestamp;
use jiff::SignedDuration;
use tokio::time::Instant;

use crate::limits::{CLOCK_DOUBT_AT_START_MAX, CLOCK_DOUBT_MAX, CLOCK_STEP_MIN};

/// The readings of both clocks so far.
#[derive(Debug, Default)]
pub(crate) struct ClockTrust {
    last: Option<ClockReading>,
    /// The last reading that was trusted.
    trusted: Option<ClockReading>,
    doubt: Option<Doubt>,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trust {
    Trusted,
    /// The clock went forward by this much since the last check, and is doubted from now on.
    SetForward(Duration),
    Doubted,
}

#[derive(Debug, Clone, Copy)]
struct ClockReading {
    wall: Timestamp,
    at: Instant,
}

#[derive(Debug, Clone, Copy)]
struct Doubt {
    since: Instant,
    hold_max: Duration,
}

impl ClockTrust {
    /// Judges the wall clock. A doubt lasts for `hold`, up to a limit, or until the clock is back where it should
    /// be. The first reading is doubted for a short time: the clock of a machine that has just started may be
    /// wrong.
    pub(crate) fn check(&mut self, wall: Timestamp, at: Instant, hold: Duration) -> Trust {
        let reading = ClockReading { wall, at };
        let Some(last) = self.last.replace(reading) else {
            self.doubt = Some(Doubt { since: at, hold_max: CLOCK_DOUBT_AT_START_MAX });
            return Trust::Doubted;
        };
        if let Some(step) = reading.step_since(&last) {
            self.doubt = Some(Doubt { since: at, hold_max: CLOCK_DOUBT_MAX });
            return Trust::SetForward(step);
        }
        if let Some(doubt) = self.doubt {
            let is_held = at.duration_since(doubt.since) < hold.min(doubt.hold_max);
            let is_ahead = self.trusted.is_none_or(|known| reading.step_since(&known).is_some());
            if is_held && is_ahead {
                return Trust::Doubted;
            }
        }
        self.doubt = None;
        self.trusted = Some(reading);
        Trust::Trusted
    }
}

impl ClockReading {
    /// By how much the wall clock went further forward than monotonic time, if it is a step.
    fn step_since(&self, earlier: &Self) -> Option<Duration> {
        let elapsed = SignedDuration::try_from(self.at.duration_since(earlier.at)).ok()?;
        let ahead = self.wall.duration_since(earlier.wall).checked_sub(elapsed)?;
        Duration::try_from(ahead).ok().filter(|ahead| *ahead > CLOCK_STEP_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::Trust::{Doubted, SetForward, Trusted};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MINUTE: Duration = Duration::from_secs(60);
    const HOUR: Duration = Duration::from_secs(3_600);
    const YEAR: Duration = Duration::from_secs(365 * 86_400);

    /// Both clocks, and a retention of which a hold of ten minutes is a part.
    struct Clocks {
        trust: ClockTrust,
        wall: Timestamp,
        at: Instant,
        hold: Duration,
    }

    impl Clocks {
        fn at_start() -> Self {
            let wall = Timestamp::from_second(1_700_000_000).unwrap();
            Self { trust: ClockTrust::default(), wall, at: Instant::now(), hold: 10 * MINUTE }
        }

        /// Clocks that are trusted.
        fn trusted() -> Self {
            let mut clocks = Self::at_start();
            clocks.check(Doubted);
            clocks.pass(MINUTE);
            clocks.check(Trusted);
            clocks
        }

        fn pass(&mut self, long: Duration) {
            self.wall += long;
            self.at += long;
        }

        #[track_caller]
        fn check(&mut self, expected: Trust) {
            assert_eq!(self.trust.check(self.wall, self.at, self.hold), expected);
        }
    }

    #[test]
    fn the_first_reading_is_doubted_for_a_short_time() {
        // The machine has started, and time synchronisation has not corrected its clock yet.
        let mut clocks = Clocks::at_start();
        clocks.check(Doubted);
        clocks.pass(29 * SECOND);
        clocks.check(Doubted);
        clocks.pass(SECOND);
        clocks.check(Trusted);
        // With a retention of seconds, the time is a part of that retention.
        let mut clocks = Clocks { hold: SECOND, ..Clocks::at_start() };
        clocks.check(Doubted);
        clocks.pass(SECOND);
        clocks.check(Trusted);
    }

    #[test]
    fn a_step_forward_is_believed_after_the_hold() {
        let mut clocks = Clocks::trusted();
        clocks.pass(MINUTE);
        clocks.wall += YEAR;
        clocks.check(SetForward(YEAR));
        clocks.pass(9 * MINUTE);
        clocks.check(Doubted);
        clocks.pass(MINUTE);
        clocks.check(Trusted);
    }

    #[test]
    fn another_step_begins_the_hold_again_and_no_hold_is_longer_than_an_hour() {
        let mut clocks = Clocks { hold: YEAR, ..Clocks::trusted() };
        clocks.wall += YEAR;
        clocks.check(SetForward(YEAR));
        clocks.pass(HOUR - SECOND);
        clocks.wall += HOUR;
        clocks.check(SetForward(HOUR));
        clocks.pass(HOUR - SECOND);
        clocks.check(Doubted);
        clocks.pass(SECOND);
        clocks.check(Trusted);
    }

    #[test]
    fn a_clock_that_is_right_again_is_trusted_at_once() {
        let mut clocks = Clocks::trusted();
        clocks.wall += YEAR;
        clocks.check(SetForward(YEAR));
        clocks.pass(5 * MINUTE);
        clocks.wall -= YEAR / 2;
        clocks.check(Doubted);
        clocks.wall -= YEAR / 2;
        clocks.check(Trusted);
        // A clock that is set back keeps data for longer, which loses nothing.
        clocks.wall -= YEAR;
        clocks.check(Trusted);
    }

    #[test]
    fn a_clock_that_drifts_is_trusted() {
        let mut clocks = Clocks::trusted();
        for _ in 0..1_000 {
            clocks.pass(MINUTE);
            clocks.wall += 6 * SECOND;
            clocks.check(Trusted);
        }
    }

    #[test]
    fn a_machine_that_was_suspended_deletes_again_after_the_hold() {
        // Monotonic time stands still while a machine is suspended.
        let mut clocks = Clocks::trusted();
        clocks.wall += 8 * HOUR;
        clocks.check(SetForward(8 * HOUR));
        clocks.pass(10 * MINUTE);
        clocks.check(Trusted);
    }
}
