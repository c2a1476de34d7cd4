//! The open connections of one listener, and which of them are closed when another one needs a place.
//!
//! Only when every place is taken is anything closed. The state of a connection is a few atomics of
//! its own ([`Flight`]), so serving a request costs nothing here. When room is needed, all connections
//! are looked at once and the first of those to go are kept for the next newcomers.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use metrics::counter;
use tokio::task::AbortHandle;
use tracing::warn;

use crate::http::socket::Flight;
use crate::limits::{
    CROWD_MIN, CROWD_SHARE, EVICT_SHARE, EVICTION_LOG_EVERY, MANY_NEW_SHARE, SURVEY_SHARE,
    SURVEY_VALID,
};

/// What a connection is doing, in the order in which connections give way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// No request yet, and it had time for one: silent, within its TLS handshake or its first head.
    SlowHead,
    /// Waits for its next request; none of those before it was verified.
    Idle,
    /// Has had time for the body of its request, or leaves an answer unread.
    SlowBody,
    /// No request yet, but it has not had much time.
    Head,
    /// Sends a body, and has not had much time.
    Body,
    /// Has only just come, or just begun a body. It is left alone until it has had some time; while
    /// there are many of these, a newcomer waits for them, so that no flood reaches those below.
    New,
    /// Waits for its next request, and has sent one that was verified.
    VerifiedIdle,
    /// The same, but slow with a body or an answer.
    VerifiedSlow,
}

impl Standing {
    fn kind(self) -> &'static str {
        match self {
            Self::SlowHead | Self::Head | Self::New => "head",
            Self::Idle => "idle",
            Self::SlowBody | Self::Body => "body",
            Self::VerifiedIdle | Self::VerifiedSlow => "verified",
        }
    }
}

/// All connections of one listener.
#[derive(Debug)]
pub(crate) struct Connections {
    /// Those that have ended are removed now and then.
    open: Vec<Open>,
    max: usize,
    /// The next ones to close, the last one first.
    next: Vec<Candidate>,
    surveyed_at: Option<Instant>,
    closed: Closed,
}

#[derive(Debug, Clone)]
struct Open {
    flight: Arc<Flight>,
    task: AbortHandle,
}

#[derive(Debug)]
struct Candidate {
    open: Open,
    standing: Standing,
}

/// How many were closed since it was last logged.
#[derive(Debug, Default)]
struct Closed {
    count: usize,
    logged_at: Option<Instant>,
}

impl Connections {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            open: Vec::new(),
            max,
            next: Vec::new(),
            surveyed_at: None,
            closed: Closed::default(),
        }
    }

    pub(crate) fn add(&mut self, flight: Arc<Flight>, task: AbortHandle) {
        if self.open.len() >= self.max.saturating_mul(2).max(64) {
            self.forget_ended();
        }
        self.open.push(Open { flight, task });
    }

    /// Closes a few connections at once, as many as newcomers may need before their ends are seen.
    /// Returns how many; it is 0 where all of them must be left alone.
    pub(crate) fn make_room(&mut self, now: Instant) -> usize {
        let is_valid = |at: Instant| now.saturating_duration_since(at) < SURVEY_VALID;
        if self.next.is_empty() || !self.surveyed_at.is_some_and(is_valid) {
            self.survey(now);
        }
        let wanted = (self.max / EVICT_SHARE).max(1);
        let mut closed = 0;
        while closed < wanted
            && let Some(Candidate { open, standing }) = self.next.pop()
        {
            // It may have moved on since it was looked at.
            let is_due = open.flight.standing(now).is_some_and(|now| now <= standing);
            if is_due && !open.flight.is_gone() {
                open.flight.goes();
                open.task.abort();
                counter!("hapax_connections_evicted_total", "kind" => standing.kind()).increment(1);
                closed += 1;
            }
        }
        self.log(closed, now);
        closed
    }

    fn forget_ended(&mut self) {
        self.open.retain(|open| !open.flight.is_gone() && !open.task.is_finished());
    }

    /// Finds those that are to go next: the worst standing first, in it the address that holds most
    /// connections of its sort, verified or not, and of that address the one that has waited longest.
    ///
    /// An address that holds a large part of all places crowds. Its new connections are not left alone:
    /// one that is opened again as soon as it is closed would otherwise always be new. The connections
    /// of other addresses then have their whole time for a head or a body.
    fn survey(&mut self, now: Instant) {
        self.forget_ended();
        self.surveyed_at = Some(now);
        let mut shares: HashMap<(IpAddr, bool), usize> = HashMap::new();
        let mut found = Vec::with_capacity(self.open.len());
        for (at, open) in self.open.iter().enumerate() {
            let whose = (open.flight.client(), open.flight.is_verified());
            *shares.entry(whose).or_default() += 1;
            if let Some(standing) = open.flight.standing(now) {
                found.push((standing, open.flight.waits_since(), whose, at));
            }
        }
        let crowd = (self.max / CROWD_SHARE).max(CROWD_MIN);
        let crowds = |whose: &(IpAddr, bool)| shares.get(whose).is_some_and(|held| *held > crowd);
        let is_crowded =
            shares.iter().any(|((_, is_verified), held)| !is_verified && *held > crowd);
        let mut found: Vec<_> = found
            .into_iter()
            .map(|(standing, since, whose, at)| {
                let rank = match (standing, crowds(&whose)) {
                    (Standing::New, true) => Standing::Head,
                    (Standing::Head | Standing::Body, false) if is_crowded => Standing::New,
                    (standing, _) => standing,
                };
                (rank, since, whose, at)
            })
            .collect();
        let new = found.iter().filter(|(standing, ..)| *standing == Standing::New).count();
        let may_go = |standing: Standing| match new > self.max / MANY_NEW_SHARE {
            true => standing < Standing::New,
            false => standing != Standing::New,
        };
        found.retain(|&(standing, ..)| may_go(standing));
        found.sort_unstable_by_key(|&(standing, since, _, _)| (standing, since));
        // Each one that goes makes the share of its address smaller.
        let mut ordered: Vec<_> = found
            .into_iter()
            .map(|(standing, since, whose, at)| {
                let share = shares.get_mut(&whose).map_or(0, |share| {
                    let before = *share;
                    *share = before.saturating_sub(1);
                    before
                });
                (standing, Reverse(share), since, at)
            })
            .collect();
        let kept = (self.max / SURVEY_SHARE).max(1).min(ordered.len());
        if kept < ordered.len() {
            ordered.select_nth_unstable(kept);
            ordered.truncate(kept);
        }
        ordered.sort_unstable();
        self.next.clear();
        self.next.extend(
            ordered
                .into_iter()
                .rev()
                // Now and when its turn comes it is what it is, whatever that counts for here.
                .map(|(rank, _, _, at)| {
                    let open = self.open[at].clone();
                    let standing = open.flight.standing(now).unwrap_or(rank);
                    Candidate { open, standing }
                }),
        );
    }

    fn log(&mut self, closed: usize, now: Instant) {
        self.closed.count += closed;
        let was_said = |at: Instant| now.saturating_duration_since(at) < EVICTION_LOG_EVERY;
        if self.closed.count == 0 || self.closed.logged_at.is_some_and(was_said) {
            return;
        }
        let (closed, max) = (self.closed.count, self.max);
        warn!(
            closed,
            max,
            "all {max} connections were in use: closed {closed} that were slow or idle to take new \
             ones (metric hapax_connections_evicted_total; setting max_connections)"
        );
        self.closed = Closed { count: 0, logged_at: Some(now) };
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use super::*;
    use crate::limits::{NEW_FOR, SLOW_AFTER};

    fn flight(address: &str) -> Arc<Flight> {
        Arc::new(Flight::new(SocketAddr::new(address.parse().unwrap(), 1)))
    }

    /// Lets the clock of a connection, which counts whole microseconds, move on.
    fn tick() {
        let began = Instant::now();
        while began.elapsed() < Duration::from_micros(2) {
            std::hint::spin_loop();
        }
    }

    /// The order in which these give way, one by one, `after` they were opened.
    fn order(flights: &[Arc<Flight>], after: Duration) -> Vec<usize> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut connections = Connections::new(flights.len());
        for flight in flights {
            let task = runtime.spawn(std::future::pending::<()>());
            connections.add(flight.clone(), task.abort_handle());
        }
        let now = Instant::now() + after;
        let mut gone = Vec::new();
        while connections.make_room(now) > 0 {
            let is_new = |at: &usize| flights[*at].is_gone() && !gone.contains(at);
            let newly = (0..flights.len()).find(is_new).expect("one has gone");
            gone.push(newly);
        }
        flights.iter().for_each(|flight| flight.comes_back());
        gone
    }

    #[test]
    fn slow_heads_go_before_idle_ones_and_verified_ones_last() {
        let one = || flight("192.0.2.1");
        let (verified, answering, idle, head) = (one(), one(), one(), one());
        drop(verified.begin());
        verified.has_verified();
        let _answering = answering.begin();
        drop(idle.begin());
        let flights = [verified, answering, idle, head];
        assert_eq!(order(&flights, SLOW_AFTER), [3, 2, 0], "never the one that is being answered");
        assert_eq!(order(&flights, NEW_FOR), [2, 3, 0], "a head that has not had much time");
        assert_eq!(order(&flights, Duration::ZERO), [2], "one that has only just come");
    }

    #[test]
    fn an_answer_that_its_peer_does_not_take_holds_no_place() {
        // On HTTP/2 a window of 0 leaves the answer where it is, and the socket idle.
        let flights = [flight("192.0.2.1")];
        let (running, _) = flights[0].begin();
        assert!(order(&flights, SLOW_AFTER).is_empty(), "its answer is being made");
        let running = running.with_answer();
        assert!(order(&flights, Duration::ZERO).is_empty(), "it may be taken yet");
        assert_eq!(order(&flights, SLOW_AFTER + Duration::from_secs(1)), [0]);
        drop(running);
    }

    #[test]
    fn an_address_that_crowds_gives_way_even_as_it_comes_and_others_have_their_time() {
        // Opened again as soon as they are closed, the connections of one address are always new.
        let crowd = CROWD_MIN + 8;
        let mut flights = vec![flight("192.0.2.9")];
        flights.extend((0..crowd).map(|_| flight("192.0.2.1")));
        for after in [Duration::ZERO, NEW_FOR] {
            let gone = order(&flights, after);
            assert!(gone.len() >= 8, "{after:?}: {gone:?}");
            assert!(!gone[..8].contains(&0), "{after:?}: {gone:?}");
        }
    }

    #[test]
    fn bodies_that_do_not_come_go_before_verified_connections() {
        let (verified, body) = (flight("192.0.2.1"), flight("192.0.2.1"));
        drop(verified.begin());
        verified.has_verified();
        let (_running, _) = body.begin();
        let reading = body.reads();
        let flights = [verified, body];
        assert_eq!(order(&flights, SLOW_AFTER), [1, 0]);
        drop(reading);
        assert_eq!(order(&flights, SLOW_AFTER), [0]);
    }

    #[test]
    fn of_equals_the_address_that_holds_most_gives_way_until_another_holds_as_much() {
        let addresses = ["192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.2", "192.0.2.1"];
        let flights = addresses.map(flight);
        assert_eq!(order(&flights, SLOW_AFTER), [1, 0, 2, 3, 4]);
        // One network of IPv6 is one party.
        let addresses = ["192.0.2.1", "2001:db8::1", "2001:db8::2", "2001:db8::3"];
        assert_eq!(order(&addresses.map(flight), SLOW_AFTER), [1, 2, 0, 3]);
    }

    #[test]
    fn behind_a_proxy_the_client_counts_that_it_names() {
        let flights = ["10.0.0.1"; 4].map(flight);
        for (flight, client) in flights.iter().zip(["192.0.2.1", "192.0.2.2", "192.0.2.2"]) {
            flight.is_for(client.parse().unwrap());
            drop(flight.begin());
            tick();
        }
        drop(flights[3].begin());
        assert_eq!(order(&flights, SLOW_AFTER), [1, 0, 2, 3]);
    }
}
