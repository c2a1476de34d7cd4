//! Bounds the log lines of arrivals: enough to follow a quiet server line by line, few enough that
//! neither the log nor its disk limits a busy or attacked server.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use jiff::Timestamp;

/// A number of lines per second. Lines beyond this number are counted and summed up in one line.
#[derive(Debug)]
pub(crate) struct LogBudget {
    lines_per_second: u32,
    second: AtomicI64,
    used: AtomicU32,
    held_back: AtomicU64,
}

impl LogBudget {
    pub(crate) fn new(lines_per_second: u32) -> Self {
        Self {
            lines_per_second,
            second: AtomicI64::new(i64::MIN),
            used: AtomicU32::new(0),
            held_back: AtomicU64::new(0),
        }
    }

    /// Whether a line may be logged at `now`. If not, the line is counted.
    ///
    /// Two threads that start a new second at the same time may admit a few lines more. The bound
    /// protects the disk; it is not an exact count.
    pub(crate) fn admit(&self, now: Timestamp) -> bool {
        let second = now.as_second();
        if self.second.load(Ordering::Relaxed) != second
            && self.second.swap(second, Ordering::Relaxed) != second
        {
            self.used.store(0, Ordering::Relaxed);
        }
        // The load comes before the addition: beyond the bound, no thread writes to the shared
        // cache line, and the counter cannot overflow.
        let has_room = self.used.load(Ordering::Relaxed) < self.lines_per_second
            && self.used.fetch_add(1, Ordering::Relaxed) < self.lines_per_second;
        if !has_room {
            self.held_back.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// The number of lines suppressed since the last call.
    pub(crate) fn take_suppressed(&self) -> u64 {
        match self.held_back.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.held_back.swap(0, Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_budget_of_a_second_are_summed_up_and_the_next_second_starts_afresh() {
        let budget = LogBudget::new(3);
        let at = |second| Timestamp::from_second(second).unwrap();
        let admitted = |second| (0..10).filter(|_| budget.admit(at(second))).count();
        assert_eq!(admitted(1), 3);
        assert_eq!(budget.take_suppressed(), 7);
        assert_eq!(budget.take_suppressed(), 0);
        assert_eq!(admitted(2), 3);
        assert_eq!(budget.take_suppressed(), 7);
    }
}
