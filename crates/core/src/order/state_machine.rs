//! A state machine over named states: which state may follow which, and which are reachable.
//!
//! A state is stored as a number derived from its name alone. So stored marks stay valid when the
//! config lists its transitions in another order, or more of them.

use std::collections::{BTreeMap, BTreeSet};

use aws_lc_rs::digest;

use super::{OrderDecision, Position};
use crate::limits::TRANSITIONS_MAX;

/// Named states, the allowed transitions between them, and the start state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    start: Position,
    names: BTreeMap<Position, Box<str>>,
    /// The states that each state may go to directly.
    next: BTreeMap<Position, BTreeSet<Position>>,
    /// The states that are reachable from each state in any number of steps.
    ahead: BTreeMap<Position, BTreeSet<Position>>,
}

/// Why a list of transitions is not a state machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MachineError {
    /// There are none.
    #[error("allows no transition")]
    Empty,
    /// There are more than the bound.
    #[error("allows more than {TRANSITIONS_MAX} transitions")]
    TooMany,
    /// One of them is not two names with an arrow between them.
    #[error("\"{text}\" is not a transition")]
    Arrow {
        /// Its index, from 0.
        index: usize,
        /// Its text.
        text: String,
    },
    /// The start state appears in no transition.
    #[error("\"{0}\" appears in no transition")]
    Start(String),
    /// Two names have the same number.
    #[error("\"{0}\" and \"{1}\" have the same hash; rename one of them")]
    SameNumber(String, String),
}

impl Machine {
    /// Parses transitions such as `pending -> paid`. Without a `start`, the first transition's origin is
    /// the start state.
    pub fn parse(start: Option<&str>, allow: &[impl AsRef<str>]) -> Result<Self, MachineError> {
        if allow.len() > TRANSITIONS_MAX {
            return Err(MachineError::TooMany);
        }
        let mut names = BTreeMap::<Position, Box<str>>::new();
        let mut next = BTreeMap::<Position, BTreeSet<Position>>::new();
        let mut first = None;
        for (index, text) in allow.iter().enumerate() {
            let text = text.as_ref();
            let (from, to) = states_of(text)
                .ok_or_else(|| MachineError::Arrow { index, text: text.to_owned() })?;
            for name in [from, to] {
                let known = names.entry(number_of(name)).or_insert_with(|| name.into());
                if **known != *name {
                    return Err(MachineError::SameNumber(known.to_string(), name.to_owned()));
                }
            }
            next.entry(number_of(from)).or_default().insert(number_of(to));
            first.get_or_insert(from);
        }
        let start = start.or(first).ok_or(MachineError::Empty)?;
        if !names.contains_key(&number_of(start)) {
            return Err(MachineError::Start(start.to_owned()));
        }
        let ahead = names.keys().map(|from| (*from, reachable(&next, *from))).collect();
        Ok(Self { start: number_of(start), names, next, ahead })
    }

    /// The number of a state. `None` for a name that appears in no transition.
    pub fn position(&self, state: &str) -> Option<Position> {
        let number = number_of(state);
        self.names.get(&number).filter(|name| ***name == *state).map(|_| number)
    }

    /// All of its states.
    pub fn states(&self) -> impl Iterator<Item = Position> + '_ {
        self.names.keys().copied()
    }

    /// The name of a state by its number.
    pub fn state(&self, position: Position) -> Option<&str> {
        self.names.get(&position).map(|name| &**name)
    }

    /// Decides about a step to `target`. A mark that is not a state of this machine counts as none: its
    /// resource starts again from the start state.
    pub(super) fn decide(&self, mark: Option<Position>, target: Position) -> OrderDecision {
        let holds = |map: &BTreeMap<Position, BTreeSet<Position>>, from: Position| {
            map.get(&from).is_some_and(|states| states.contains(&target))
        };
        match mark.filter(|mark| self.names.contains_key(mark)) {
            None if target == self.start => OrderDecision::Run,
            None if holds(&self.ahead, self.start) => OrderDecision::Hold,
            None => OrderDecision::Stale,
            Some(current) if holds(&self.next, current) => OrderDecision::Run,
            // The event names the current state. Such an event is stale even if a cycle leads back to that
            // state.
            Some(current) if target == current => OrderDecision::Stale,
            Some(current) if holds(&self.ahead, current) => OrderDecision::Hold,
            Some(_) => OrderDecision::Stale,
        }
    }

    /// The state from which most of the others are reachable; of several, the first.
    pub(super) fn earliest(&self, held: impl IntoIterator<Item = Position>) -> Option<Position> {
        let held: Vec<Position> = held.into_iter().collect();
        let leads_to = |from: &Position| {
            let ahead = self.ahead.get(from);
            held.iter().filter(|to| ahead.is_some_and(|ahead| ahead.contains(to))).count()
        };
        // `max_by_key` returns the last of equals, so the order is reversed.
        held.iter().rev().max_by_key(|from| leads_to(from)).copied()
    }
}

fn states_of(transition: &str) -> Option<(&str, &str)> {
    let (from, to) = transition.split_once("->")?;
    let (from, to) = (from.trim(), to.trim());
    let is_name = |name: &str| !name.is_empty() && !name.contains("->");
    (is_name(from) && is_name(to)).then_some((from, to))
}

/// 63 bits of the hash of the name, so that the number is positive in every database.
fn number_of(state: &str) -> Position {
    let hash = digest::digest(&digest::SHA256, state.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_ref()[..8]);
    Position(i64::from_be_bytes(first) & i64::MAX)
}

fn reachable(next: &BTreeMap<Position, BTreeSet<Position>>, from: Position) -> BTreeSet<Position> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(state) = open.pop() {
        let steps = next.get(&state).into_iter().flatten();
        open.extend(steps.filter(|step| reached.insert(**step)).copied());
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payout() -> Machine {
        Machine::parse(
            None,
            &["pending -> charged", "charged->paid", "paid -> paid", " charged -> failed "],
        )
        .unwrap()
    }

    fn check(machine: &Machine, current: Option<&str>, target: &str, expected: OrderDecision) {
        let number = |state: &str| machine.position(state).unwrap();
        let found = machine.decide(current.map(number), number(target));
        assert_eq!(found, expected, "{current:?} -> {target}");
    }

    #[test]
    fn a_step_runs_if_allowed_waits_if_ahead_and_is_stale_if_behind() {
        // Every kind of step, including a cycle and a repeated state.
        let payout = payout();
        check(&payout, None, "pending", OrderDecision::Run);
        check(&payout, None, "charged", OrderDecision::Hold);
        check(&payout, None, "paid", OrderDecision::Hold);
        check(&payout, Some("pending"), "charged", OrderDecision::Run);
        check(&payout, Some("pending"), "paid", OrderDecision::Hold);
        check(&payout, Some("pending"), "pending", OrderDecision::Stale);
        check(&payout, Some("charged"), "pending", OrderDecision::Stale);
        check(&payout, Some("charged"), "failed", OrderDecision::Run);
        check(&payout, Some("paid"), "failed", OrderDecision::Stale);
        check(&payout, Some("paid"), "paid", OrderDecision::Run);
        let circle = Machine::parse(Some("b"), &["a -> b", "b -> c", "c -> a"]).unwrap();
        check(&circle, None, "b", OrderDecision::Run);
        check(&circle, None, "a", OrderDecision::Hold);
        check(&circle, Some("b"), "b", OrderDecision::Stale);
        check(&circle, Some("c"), "b", OrderDecision::Hold);
        check(&circle, Some("a"), "b", OrderDecision::Run);
        let apart = Machine::parse(Some("b"), &["a -> b", "b -> c"]).unwrap();
        check(&apart, None, "a", OrderDecision::Stale);
    }

    #[test]
    fn a_state_has_the_same_number_in_every_machine_and_never_a_negative_one() {
        // A config that lists its transitions in another order must not change stored marks.
        let other = Machine::parse(Some("paid"), &["paid -> x", "charged -> paid"]).unwrap();
        for state in ["charged", "paid"] {
            let number = payout().position(state).unwrap();
            assert_eq!(other.position(state), Some(number));
            assert_eq!(other.state(number), Some(state));
            assert!(number.0 >= 0);
        }
        // A build that numbered states in another way would lose every stored mark.
        assert_eq!(number_of("paid"), Position(0x268a_d70e_b5bc_4737));
        assert_eq!(payout().position("x"), None);
        assert_eq!(payout().state(Position(1)), None);
    }

    #[test]
    fn a_mark_of_another_machine_counts_as_none() {
        // The current state of a resource was removed from the config.
        let payout = payout();
        let gone = Some(number_of("authorized"));
        assert_eq!(payout.decide(gone, number_of("pending")), OrderDecision::Run);
        assert_eq!(payout.decide(gone, number_of("paid")), OrderDecision::Hold);
    }

    #[test]
    fn of_several_states_the_one_that_leads_to_the_others_is_the_earliest() {
        // The states are held in the order of arrival, which is not the order of the transitions.
        let payout = payout();
        let check = |held: &[&str], expected: Option<&str>| {
            let found = payout.earliest(held.iter().map(|state| number_of(state)));
            assert_eq!(found.and_then(|found| payout.state(found)), expected, "{held:?}");
        };
        check(&["failed", "charged", "pending"], Some("pending"));
        check(&["failed", "charged"], Some("charged"));
        check(&["failed"], Some("failed"));
        check(&[], None);
    }

    #[test]
    fn bad_transitions_are_refused() {
        for bad in ["a", "a > b", "-> b", "a ->", "a -> b -> c", "", "a - > b"] {
            let refused = Machine::parse(None, &["x -> y", bad]);
            let expected = MachineError::Arrow { index: 1, text: bad.to_owned() };
            assert_eq!(refused, Err(expected), "{bad}");
        }
        assert_eq!(Machine::parse(None, &[""; 0]), Err(MachineError::Empty));
        assert_eq!(Machine::parse(Some("a"), &[""; 0]), Err(MachineError::Start("a".to_owned())));
        let unknown = Machine::parse(Some("z"), &["a -> b"]);
        assert_eq!(unknown, Err(MachineError::Start("z".to_owned())));
        let many = vec!["a -> b"; TRANSITIONS_MAX + 1];
        assert_eq!(Machine::parse(None, &many), Err(MachineError::TooMany));
    }
}
