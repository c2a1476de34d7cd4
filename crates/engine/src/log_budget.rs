//! How many log lines arrivals may cost: enough to follow a quiet server line by line, few enough
//! that a busy or attacked one is limited neither by its log nor by the disk below it.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use jiff::Timestamp;

/// A number of lines per second. Lines beyond it are counted and summed up in one line.
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

    /// Whether there is a line for this at `now`. Where not, it is counted.
    ///
    /// Two threads that turn the second at the same time may allow a few lines more; the bound is
    /// there for the disk, not for accounting.
    pub(crate) fn admit(&self, now: Timestamp) -> bool {
        let second = now.as_second();
        if self.second.load(Ordering::Relaxed) != second
            && self.second.swap(second, Ordering::Relaxed) != second
        {
            self.used.store(0, Ordering::Relaxed);
        }
        // The load first: past the bound nothing is written that other threads must fetch again,
        // and the counter cannot run over.
        let has_room = self.used.load(Ordering::Relaxed) < self.lines_per_second
            && self.used.fetch_add(1, Ordering::Relaxed) < self.lines_per_second;
        if !has_room {
            self.held_back.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    /// How many were held back since this was last asked.
    pub(crate) fn take_held_back(&self) -> u64 {
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
    fn what_exceeds_the_budget_of_a_second_is_summed_up_and_the_next_second_is_free_again() {
        let budget = LogBudget::new(3);
        let at = |second| Timestamp::from_second(second).unwrap();
        let admitted = |second| (0..10).filter(|_| budget.admit(at(second))).count();
        assert_eq!(admitted(1), 3);
        assert_eq!(budget.take_held_back(), 7);
        assert_eq!(budget.take_held_back(), 0);
        assert_eq!(admitted(2), 3);
        assert_eq!(budget.take_held_back(), 7);
    }
}
