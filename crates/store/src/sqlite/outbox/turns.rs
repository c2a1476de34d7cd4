//! The turns of endpoints: endpoints with work are served in turn, and the others are sorted by the
//! time of their next work. There is no poll or task for each endpoint, and no state that grows
//! with the backlog.

use std::collections::{BTreeSet, HashMap};

/// Never.
pub(super) const NEVER: i64 = i64::MAX;

/// The endpoints by their numbers. An endpoint that never has work is not in here.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Endpoints that have work, by their turn.
    due: BTreeSet<(i64, i64)>,
    /// The other endpoints, by the time at which they will have work.
    later: BTreeSet<(i64, i64)>,
    slots: HashMap<i64, Slot>,
    /// The time of the last [`Turns::begin`].
    now: i64,
    last_turn: i64,
    first_turn: i64,
}

#[derive(Debug, Clone, Copy)]
enum Slot {
    Due(i64),
    Later(i64),
}

impl Turns {
    /// Gives a turn to every endpoint that has work at `now`.
    pub(super) fn begin(&mut self, now: i64) {
        self.now = now;
        while let Some(&(at, number)) = self.later.first()
            && at <= now
        {
            self.set(number, at);
        }
    }

    /// Records that an endpoint has work from `at` on. An endpoint that has its turn already keeps it.
    pub(super) fn set(&mut self, number: i64, at: i64) {
        if at <= self.now && matches!(self.slots.get(&number), Some(Slot::Due(_))) {
            return;
        }
        self.remove(number);
        if at == NEVER {
            return;
        }
        if at <= self.now {
            self.last_turn += 1;
            self.due.insert((self.last_turn, number));
            self.slots.insert(number, Slot::Due(self.last_turn));
        } else {
            self.later.insert((at, number));
            self.slots.insert(number, Slot::Later(at));
        }
    }

    /// Gives an endpoint the next turn.
    pub(super) fn set_first(&mut self, number: i64) {
        self.remove(number);
        self.first_turn -= 1;
        self.due.insert((self.first_turn, number));
        self.slots.insert(number, Slot::Due(self.first_turn));
    }

    pub(super) fn remove(&mut self, number: i64) {
        match self.slots.remove(&number) {
            Some(Slot::Due(turn)) => drop(self.due.remove(&(turn, number))),
            Some(Slot::Later(at)) => drop(self.later.remove(&(at, number))),
            None => {}
        }
    }

    /// Removes and returns the endpoint whose turn it is.
    pub(super) fn pop(&mut self) -> Option<i64> {
        let (_, number) = self.due.pop_first()?;
        self.slots.remove(&number);
        Some(number)
    }

    /// The number of endpoints that have work now.
    pub(super) fn waiting(&self) -> usize {
        self.due.len()
    }

    /// The time at which the next endpoint has work.
    pub(super) fn next_at(&self) -> Option<i64> {
        if !self.due.is_empty() {
            return Some(self.now);
        }
        self.later.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_has_its_turn_and_a_clock_that_goes_back_ends_none() {
        // One endpoint is always due: it must not keep the others from their turn. Then the clock
        // goes back while an endpoint has its turn.
        let mut turns = Turns::default();
        for (number, at) in [(1, 10), (2, 30), (3, 20), (4, NEVER)] {
            turns.set(number, at);
        }
        turns.begin(30);
        let mut order = Vec::new();
        for _ in 0..7 {
            let number = turns.pop().expect("someone is due");
            order.push(number);
            turns.set(number, 5);
        }
        assert_eq!(order, [1, 3, 2, 1, 3, 2, 1]);
        turns.begin(4);
        let number = turns.pop().expect("it had its turn");
        turns.set(number, 5);
        assert_eq!(turns.waiting(), 2);
        turns.remove(1);
        turns.remove(2);
        turns.remove(3);
        assert_eq!(turns.next_at(), None);
        turns.set(7, 9);
        assert_eq!(turns.next_at(), Some(9));
        turns.begin(9);
        turns.set(8, 1);
        turns.set_first(8);
        assert_eq!((turns.pop(), turns.pop(), turns.pop()), (Some(8), Some(7), None));
    }
}
