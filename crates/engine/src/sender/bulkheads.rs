//! Bulkheads: how many attempts each endpoint may have under way on this node, so that endpoints that hang
//! cannot take the slots of the others.
//!
//! An endpoint starts with a window of 2 attempts. The window doubles with each success, and a timeout sets it
//! to 1. Claims beyond the window wait here. While the node is crowded, an endpoint with an attempt older than
//! a second begins no other. Over all nodes the store bounds the claims of an endpoint by its
//! `max_in_flight`. A store that only this node uses may claim more, and the bound is kept here.
//!
//! While a claim waits, an operator may change its endpoint or cancel its message. [`BegunClaim::must_check`] says
//! when the sender has to ask the store again before it begins the attempt.

use std::collections::{HashMap, HashSet, VecDeque};

use hapax_core::circuit::FAILURES_MAX;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::DeliveryClaim;
use tokio::time::Instant;

use crate::limits::{
    CLAIM_AHEAD_AGE_MAX, ENDPOINT_WINDOW_MAX, ENDPOINT_WINDOW_START, ENDPOINTS_REMEMBERED_MAX,
    SLOW_ATTEMPT_AGE, UNCHECKED_CLAIM_AGE_MAX, WAITING_CLAIM_AGE_MAX,
};

/// The bulkheads of every endpoint that this node sends to.
#[derive(Debug, Default)]
pub(super) struct Bulkheads {
    endpoints: HashMap<EndpointId, Bulkhead>,
    /// The endpoints with waiting claims.
    with_waiting: HashSet<EndpointId>,
    waiting: usize,
    waiting_bytes: usize,
}

/// How an attempt ended, as far as the window is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptClass {
    Success,
    Timeout,
    /// The endpoint may be failing: it refused the connection, or answered with an error.
    Failure,
    /// The endpoint asked for a pause, or must not be called again.
    Stop,
    /// Another failure, or no outcome at all. Neither case shows how many attempts the endpoint can take at
    /// once.
    Other,
}

#[derive(Debug)]
struct Bulkhead {
    /// How many attempts may be under way.
    window: usize,
    /// How many attempts have failed since the last success.
    failures: u32,
    /// When each attempt under way began.
    begun: Vec<Instant>,
    waiting: VecDeque<WaitingClaim>,
}

#[derive(Debug)]
struct WaitingClaim {
    asked: ClaimedAt,
    claim: DeliveryClaim,
}

/// When a claim was asked for, and how many acts of operators this process had carried out by then.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClaimedAt {
    pub(super) at: Instant,
    pub(super) operator_acts: u64,
}

/// A claim whose attempt begins now.
#[derive(Debug)]
pub(super) struct BegunClaim {
    pub(super) claim: DeliveryClaim,
    /// Whether an act of an operator may have ended the claim.
    pub(super) must_check: bool,
}

impl Default for Bulkhead {
    fn default() -> Self {
        Self {
            window: ENDPOINT_WINDOW_START,
            failures: 0,
            begun: Vec::new(),
            waiting: VecDeque::new(),
        }
    }
}

impl Bulkhead {
    fn is_idle(&self) -> bool {
        self.begun.is_empty() && self.waiting.is_empty()
    }

    /// How long its claims may wait.
    fn waits_for(&self) -> std::time::Duration {
        let held = self.begun.len() + self.waiting.len();
        let max_in_flight =
            self.waiting.front().map(|one| one.claim.endpoint.max_in_flight as usize);
        match max_in_flight.is_some_and(|most| held > most) {
            true => CLAIM_AHEAD_AGE_MAX,
            false => WAITING_CLAIM_AGE_MAX,
        }
    }

    /// Whether an attempt under way is older than a second.
    fn is_slow(&self, now: Instant) -> bool {
        self.begun.iter().any(|began| now.duration_since(*began) > SLOW_ATTEMPT_AGE)
    }

    /// The next claim, if its attempt may begin now.
    fn next(&mut self, is_crowded: bool, now: ClaimedAt) -> Option<BegunClaim> {
        let max_in_flight = self.waiting.front()?.claim.endpoint.max_in_flight as usize;
        let has_room = self.begun.len() < self.window.min(max_in_flight);
        if !has_room || (is_crowded && self.is_slow(now.at)) {
            return None;
        }
        self.begun.push(now.at);
        self.waiting.pop_front().map(|WaitingClaim { asked, claim }| {
            let must_check = asked.operator_acts != now.operator_acts
                || now.at.duration_since(asked.at) > UNCHECKED_CLAIM_AGE_MAX;
            BegunClaim { claim, must_check }
        })
    }
}

impl Bulkheads {
    /// Claims that wait for their endpoint.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// The bytes of their bodies.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// Adds a claim. [`Bulkheads::begin`] says when it may be attempted.
    pub(super) fn add(&mut self, claim: DeliveryClaim, asked: ClaimedAt) {
        let endpoint = claim.endpoint.id;
        self.waiting += 1;
        self.waiting_bytes += claim.body.len();
        self.with_waiting.insert(endpoint);
        let bulkhead = self.endpoints.entry(endpoint).or_default();
        bulkhead.waiting.push_back(WaitingClaim { asked, claim });
    }

    /// Takes up to `most` claims whose attempts begin now. Endpoints take turns, one claim each.
    pub(super) fn begin(
        &mut self,
        most: usize,
        is_crowded: bool,
        now: ClaimedAt,
    ) -> Vec<BegunClaim> {
        let mut begun = Vec::new();
        let mut turn: Vec<EndpointId> = self.with_waiting.iter().copied().collect();
        while begun.len() < most && !turn.is_empty() {
            turn.retain(|endpoint| {
                if begun.len() >= most {
                    return false;
                }
                let Some(bulkhead) = self.endpoints.get_mut(endpoint) else { return false };
                let Some(next) = bulkhead.next(is_crowded, now) else { return false };
                self.waiting -= 1;
                self.waiting_bytes -= next.claim.body.len();
                begun.push(next);
                true
            });
        }
        self.forget_empty();
        begun
    }

    /// Records the end of an attempt that began at `began`. Returns the waiting claims of an endpoint that must
    /// not be called now: the store decides when the endpoint is tried again.
    pub(super) fn ended(
        &mut self,
        endpoint: EndpointId,
        began: Instant,
        ending: AttemptClass,
    ) -> Vec<DeliveryClaim> {
        let Some(bulkhead) = self.endpoints.get_mut(&endpoint) else { return Vec::new() };
        if let Some(place) = bulkhead.begun.iter().position(|known| *known == began) {
            bulkhead.begun.swap_remove(place);
        }
        bulkhead.window = match ending {
            AttemptClass::Success => (bulkhead.window * 2).min(ENDPOINT_WINDOW_MAX),
            AttemptClass::Timeout => 1,
            AttemptClass::Failure | AttemptClass::Stop | AttemptClass::Other => bulkhead.window,
        };
        bulkhead.failures = match ending {
            AttemptClass::Success => 0,
            AttemptClass::Timeout | AttemptClass::Failure => bulkhead.failures.saturating_add(1),
            AttemptClass::Stop | AttemptClass::Other => bulkhead.failures,
        };
        let must_stop = ending == AttemptClass::Stop || bulkhead.failures >= FAILURES_MAX;
        let stopped = match must_stop {
            true => std::mem::take(&mut bulkhead.waiting),
            false => VecDeque::new(),
        };
        if !stopped.is_empty() {
            self.with_waiting.remove(&endpoint);
        }
        self.waiting -= stopped.len();
        self.waiting_bytes -= stopped.iter().map(|one| one.claim.body.len()).sum::<usize>();
        if bulkhead.is_idle() && bulkhead.window == ENDPOINT_WINDOW_START {
            self.endpoints.remove(&endpoint);
        }
        if self.endpoints.len() > ENDPOINTS_REMEMBERED_MAX {
            self.endpoints.retain(|_, bulkhead| !bulkhead.is_idle());
        }
        stopped.into_iter().map(|one| one.claim).collect()
    }

    /// Takes the claims that have waited for too long: their leases may end before their attempts would, or
    /// their endpoint may have changed meanwhile.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<DeliveryClaim> {
        // The oldest claim of an endpoint is the first. Most calls find none that is overdue.
        let mut holding = self.with_waiting.iter().filter_map(|one| self.endpoints.get(one));
        let is_any = holding.any(|bulkhead| {
            let oldest = bulkhead.waiting.front();
            oldest.is_some_and(|one| now.duration_since(one.asked.at) > bulkhead.waits_for())
        });
        if !is_any {
            return Vec::new();
        }
        self.take_waiting(|bulkhead| {
            let at_most = bulkhead.waits_for();
            move |one| now.duration_since(one.asked.at) > at_most
        })
    }

    /// Takes the waiting claims of endpoints with a slow attempt.
    pub(super) fn waiting_for_slow(&mut self, now: Instant) -> Vec<DeliveryClaim> {
        self.take_waiting(|bulkhead| {
            let is_slow = bulkhead.is_slow(now);
            move |_| is_slow
        })
    }

    /// Takes every claim that waits.
    pub(super) fn take_all(&mut self) -> Vec<DeliveryClaim> {
        self.take_waiting(|_| |_| true)
    }

    /// Takes the waiting claims that `is_taken` selects, given the bulkhead of their endpoint.
    fn take_waiting<F: Fn(&WaitingClaim) -> bool>(
        &mut self,
        is_taken: impl Fn(&Bulkhead) -> F,
    ) -> Vec<DeliveryClaim> {
        let mut taken = Vec::new();
        for endpoint in &self.with_waiting {
            let Some(bulkhead) = self.endpoints.get_mut(endpoint) else { continue };
            let is_taken = is_taken(bulkhead);
            for one in std::mem::take(&mut bulkhead.waiting) {
                match is_taken(&one) {
                    true => taken.push(one.claim),
                    false => bulkhead.waiting.push_back(one),
                }
            }
        }
        self.waiting -= taken.len();
        self.waiting_bytes -= taken.iter().map(|claim| claim.body.len()).sum::<usize>();
        self.forget_empty();
        taken
    }

    fn forget_empty(&mut self) {
        let endpoints = &self.endpoints;
        self.with_waiting.retain(|endpoint| {
            endpoints.get(endpoint).is_some_and(|bulkhead| !bulkhead.waiting.is_empty())
        });
    }
}

/// Whether so few slots are free that slow endpoints get none.
pub(super) fn is_crowded(free_slots: usize, slots: usize) -> bool {
    free_slots * 2 < slots
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use bytes::Bytes;
    use hapax_core::delivery::DeliveryId;
    use hapax_core::endpoint::{AddressChoice, EndpointSealed};
    use hapax_core::job::Fence;
    use hapax_core::message::Payload;
    use hapax_core::store::DeliveryTarget;
    use hapax_core::vault::{SealContext, Vault, VaultKey};
    use hapax_core::{Tenant, Timestamp};
    use uuid::Uuid;

    use super::*;

    fn endpoint(number: u128) -> EndpointId {
        EndpointId(Uuid::from_u128(number))
    }

    fn claim(of: u128) -> DeliveryClaim {
        let vault = Vault::new(VaultKey::from_bytes(&[1; 32]), Vec::new()).unwrap();
        let tenant = Tenant::default();
        let secrets = vault.seal(&SealContext::endpoint_secrets(&tenant, "x"), b"x", [0; 12]);
        DeliveryClaim {
            delivery: DeliveryId(Uuid::now_v7()),
            fence: Fence(1),
            attempt: 1,
            message: "m".to_owned(),
            body: Bytes::from_static(b"12345"),
            leased_until: Timestamp::UNIX_EPOCH,
            endpoint: Arc::new(DeliveryTarget {
                id: endpoint(of),
                tenant,
                url: "http://127.0.0.1/".to_owned(),
                address_by: AddressChoice::Operator,
                timeout: Duration::from_secs(10),
                max_in_flight: 64,
                payload: Payload::Fat,
                sealed: EndpointSealed { secrets, headers: None },
            }),
        }
    }

    fn asked(at: Instant) -> ClaimedAt {
        ClaimedAt { at, operator_acts: 0 }
    }

    /// Bulkheads with this many waiting claims of one endpoint.
    fn waiting(count: usize, now: Instant) -> Bulkheads {
        let mut bulkheads = Bulkheads::default();
        (0..count).for_each(|_| bulkheads.add(claim(1), asked(now)));
        bulkheads
    }

    #[tokio::test(start_paused = true)]
    async fn a_window_doubles_with_each_success_and_falls_to_one_with_a_timeout() {
        let now = Instant::now();
        let mut bulkheads = waiting(100, now);
        assert_eq!(bulkheads.begin(usize::MAX, false, asked(now)).len(), 2);
        assert_eq!(bulkheads.begin(usize::MAX, false, asked(now)).len(), 0);
        bulkheads.ended(endpoint(1), now, AttemptClass::Success);
        // A window of four, and one attempt is still under way.
        assert_eq!(bulkheads.begin(usize::MAX, false, asked(now)).len(), 3);
        bulkheads.ended(endpoint(1), now, AttemptClass::Other);
        assert_eq!(bulkheads.begin(usize::MAX, false, asked(now)).len(), 1);
        bulkheads.ended(endpoint(1), now, AttemptClass::Timeout);
        // Three are under way, and the window is one.
        assert_eq!(bulkheads.begin(usize::MAX, false, asked(now)).len(), 0);
        for left in [2, 1] {
            bulkheads.ended(endpoint(1), now, AttemptClass::Other);
            assert_eq!(bulkheads.begin(usize::MAX, false, asked(now)).len(), 0, "{left}");
        }
        bulkheads.ended(endpoint(1), now, AttemptClass::Other);
        assert_eq!(bulkheads.begin(usize::MAX, false, asked(now)).len(), 1);
        let begun = 2 + 3 + 1 + 1;
        assert_eq!(
            (bulkheads.waiting(), bulkheads.waiting_bytes()),
            (100 - begun, 5 * (100 - begun))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_attempts_begin_than_the_endpoint_allows() {
        let now = Instant::now();
        let mut bulkheads = waiting(100, now);
        for ended in [0, 2, 4, 8, 16, 32, 64] {
            (0..ended).for_each(|_| drop(bulkheads.ended(endpoint(1), now, AttemptClass::Success)));
            bulkheads.begin(usize::MAX, false, asked(now));
            (0..100).for_each(|_| bulkheads.add(claim(1), asked(now)));
        }
        assert_eq!(bulkheads.endpoints[&endpoint(1)].begun.len(), 64);
    }

    #[tokio::test(start_paused = true)]
    async fn endpoints_take_turns() {
        let now = Instant::now();
        let mut bulkheads = waiting(10, now);
        (2..=5).for_each(|of| bulkheads.add(claim(of), asked(now)));
        let begun = bulkheads.begin(5, false, asked(now));
        let mut endpoints: Vec<_> = begun.iter().map(|begun| begun.claim.endpoint.id).collect();
        endpoints.sort();
        assert_eq!(endpoints, (1..=5).map(endpoint).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn on_a_crowded_node_an_endpoint_with_an_old_attempt_begins_no_other() {
        assert!(is_crowded(49, 100) && !is_crowded(50, 100));
        let now = Instant::now();
        let mut bulkheads = waiting(10, now);
        assert_eq!(bulkheads.begin(1, false, asked(now)).len(), 1);
        let later = now + SLOW_ATTEMPT_AGE + Duration::from_millis(1);
        assert_eq!(bulkheads.begin(usize::MAX, true, asked(later)).len(), 0);
        bulkheads.add(claim(2), asked(later));
        assert_eq!(bulkheads.begin(usize::MAX, true, asked(later)).len(), 1);
        assert_eq!(bulkheads.waiting_for_slow(later).len(), 9);
        assert_eq!((bulkheads.waiting(), bulkheads.waiting_bytes()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_given_back_before_its_lease_could_end_in_the_middle_of_an_attempt() {
        let now = Instant::now();
        let mut bulkheads = waiting(5, now);
        bulkheads.begin(usize::MAX, false, asked(now));
        assert_eq!(bulkheads.overdue(now + WAITING_CLAIM_AGE_MAX).len(), 0);
        let late = now + WAITING_CLAIM_AGE_MAX + Duration::from_millis(1);
        assert_eq!(bulkheads.overdue(late).len(), 3);
        assert_eq!((bulkheads.waiting(), bulkheads.waiting_bytes()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn claims_beyond_max_in_flight_wait_for_a_second_at_most() {
        let now = Instant::now();
        let later = now + CLAIM_AHEAD_AGE_MAX + Duration::from_millis(1);
        assert_eq!(waiting(64, now).overdue(later).len(), 0);
        assert_eq!(waiting(65, now).overdue(later).len(), 65);
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_stops_or_fails_gets_no_claim_that_waits() {
        let now = Instant::now();
        for (endings, stopped) in [
            (vec![AttemptClass::Stop], true),
            (vec![AttemptClass::Failure; FAILURES_MAX as usize], true),
            (vec![AttemptClass::Failure; FAILURES_MAX as usize - 1], false),
            (vec![AttemptClass::Other; 2 * FAILURES_MAX as usize], false),
        ] {
            let mut bulkheads = waiting(100, now);
            bulkheads.add(claim(2), asked(now));
            bulkheads.begin(usize::MAX, false, asked(now));
            let left = bulkheads.waiting();
            let given_back: usize =
                endings.iter().map(|ending| bulkheads.ended(endpoint(1), now, *ending).len()).sum();
            assert_eq!(given_back > 0, stopped, "{endings:?}");
            assert_eq!(bulkheads.waiting(), left - given_back, "{endings:?}");
            assert_eq!(bulkheads.waiting_bytes(), 5 * (left - given_back), "{endings:?}");
        }
    }

    // An act on this node is counted. An act on another node is not counted, so an old claim is checked too.
    #[tokio::test(start_paused = true)]
    async fn a_claim_that_waited_is_checked_after_an_act_of_an_operator_or_half_a_second() {
        let now = Instant::now();
        let late = now + UNCHECKED_CLAIM_AGE_MAX + Duration::from_millis(1);
        for (at, operator_acts, expected) in [
            (now, 0, false),
            (now + UNCHECKED_CLAIM_AGE_MAX, 0, false),
            (now, 1, true),
            (late, 0, true),
        ] {
            let begun = waiting(1, now).begin(1, false, ClaimedAt { at, operator_acts });
            assert_eq!(begun.len(), 1);
            assert_eq!(begun[0].must_check, expected, "{operator_acts} acts");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_bounded_number_of_endpoints_is_remembered() {
        let now = Instant::now();
        let mut bulkheads = Bulkheads::default();
        for of in 0..=ENDPOINTS_REMEMBERED_MAX as u128 {
            bulkheads.add(claim(of), asked(now));
            bulkheads.begin(1, false, asked(now));
            bulkheads.ended(endpoint(of), now, AttemptClass::Success);
        }
        assert!(bulkheads.endpoints.len() <= ENDPOINTS_REMEMBERED_MAX);
    }
}
