//! The open connections of one listener, and the choice of connections to close when a new one
//! needs a slot.
//!
//! Connections are closed only when all slots are in use. Each connection keeps its own state
//! ([`ConnectionActivity`]), so serving a request takes no lock of all connections. When slots are needed,
//! one survey of all connections chooses several to close, and later new connections use the same
//! result.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use metrics::counter;
use tokio::task::AbortHandle;
use tracing::warn;

use crate::http::socket::ConnectionActivity;
use crate::limits::{
    CROWD_MIN, CROWD_SHARE, EVICT_SHARE, EVICTION_LOG_EVERY, MANY_NEW_SHARE, SURVEY_SHARE,
    SURVEY_VALID,
};

/// The state of a connection, in the order in which connections are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ConnectionState {
    /// No request yet, although there was time for one: silent, or slow with its TLS handshake or
    /// its first head.
    SlowHead,
    /// Waits for its next request; no earlier request was verified.
    Idle,
    /// Slow with the body of its request, or leaves an answer unread.
    SlowBody,
    /// No request yet, but only a short time has passed.
    Head,
    /// Sends a body, and only a short time has passed.
    Body,
    /// Has just connected, or just started a body. Such a connection is not closed for a while. If there are
    /// many new connections, further ones wait for them, so that a flood cannot close connections in the
    /// states below.
    New,
    /// Waits for its next request, and an earlier one was verified.
    VerifiedIdle,
    /// An earlier request was verified, but the peer is slow with a body or an answer.
    VerifiedSlow,
}

impl ConnectionState {
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
    /// Closed connections are removed from time to time.
    open: Vec<OpenConnection>,
    max: usize,
    /// The next connections to close, the last one first.
    next: Vec<EvictionCandidate>,
    surveyed_at: Option<Instant>,
    closed: Closed,
}

#[derive(Debug, Clone)]
struct OpenConnection {
    activity: Arc<ConnectionActivity>,
    task: AbortHandle,
}

#[derive(Debug)]
struct EvictionCandidate {
    open: OpenConnection,
    state: ConnectionState,
}

/// The number of closed connections since the last log line.
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

    pub(crate) fn add(&mut self, activity: Arc<ConnectionActivity>, task: AbortHandle) {
        if self.open.len() >= self.max.saturating_mul(2).max(64) {
            self.forget_ended();
        }
        self.open.push(OpenConnection { activity, task });
    }

    /// Closes a few connections, as many as new ones may need before the slots are free. Returns
    /// their number: 0 if none may be closed.
    pub(crate) fn make_room(&mut self, now: Instant) -> usize {
        let is_valid = |at: Instant| now.saturating_duration_since(at) < SURVEY_VALID;
        if self.next.is_empty() || !self.surveyed_at.is_some_and(is_valid) {
            self.survey(now);
        }
        let wanted = (self.max / EVICT_SHARE).max(1);
        let mut closed = 0;
        while closed < wanted
            && let Some(EvictionCandidate { open, state }) = self.next.pop()
        {
            // The state of the connection may have changed since the survey.
            let is_due = open.activity.state(now).is_some_and(|now| now <= state);
            if is_due && !open.activity.is_gone() {
                open.activity.record_end();
                open.task.abort();
                counter!("hapax_connections_evicted_total", "kind" => state.kind()).increment(1);
                closed += 1;
            }
        }
        self.log(closed, now);
        closed
    }

    fn forget_ended(&mut self) {
        self.open.retain(|open| !open.activity.is_gone() && !open.task.is_finished());
    }

    /// Finds the connections to close next: the worst state first, then the address with the most
    /// connections of that sort (verified or not), then the one that has waited longest.
    ///
    /// An address that holds a large part of all slots is crowding. Its new connections may be
    /// closed at once; otherwise a client that reopens its connections at once would have only new
    /// ones. Connections of other addresses keep their full time for a head or a body.
    fn survey(&mut self, now: Instant) {
        self.forget_ended();
        self.surveyed_at = Some(now);
        let mut shares: HashMap<(IpAddr, bool), usize> = HashMap::new();
        let mut found = Vec::with_capacity(self.open.len());
        for (at, open) in self.open.iter().enumerate() {
            let whose = (open.activity.client(), open.activity.is_verified());
            *shares.entry(whose).or_default() += 1;
            if let Some(state) = open.activity.state(now) {
                found.push((state, open.activity.waits_since(), whose, at));
            }
        }
        let crowd = (self.max / CROWD_SHARE).max(CROWD_MIN);
        let crowds = |whose: &(IpAddr, bool)| shares.get(whose).is_some_and(|held| *held > crowd);
        let is_crowded =
            shares.iter().any(|((_, is_verified), held)| !is_verified && *held > crowd);
        let mut found: Vec<_> = found
            .into_iter()
            .map(|(state, since, whose, at)| {
                let rank = match (state, crowds(&whose)) {
                    (ConnectionState::New, true) => ConnectionState::Head,
                    (ConnectionState::Head | ConnectionState::Body, false) if is_crowded => {
                        ConnectionState::New
                    }
                    (state, _) => state,
                };
                (rank, since, whose, at)
            })
            .collect();
        let new = found.iter().filter(|(state, ..)| *state == ConnectionState::New).count();
        let may_go = |state: ConnectionState| match new > self.max / MANY_NEW_SHARE {
            true => state < ConnectionState::New,
            false => state != ConnectionState::New,
        };
        found.retain(|&(state, ..)| may_go(state));
        found.sort_unstable_by_key(|&(state, since, _, _)| (state, since));
        // Each chosen connection makes the share of its address smaller.
        let mut ordered: Vec<_> = found
            .into_iter()
            .map(|(state, since, whose, at)| {
                let share = shares.get_mut(&whose).map_or(0, |share| {
                    let before = *share;
                    *share = before.saturating_sub(1);
                    before
                });
                (state, Reverse(share), since, at)
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
                // The real state is kept, because it is compared again when the connection's turn
                // comes.
                .map(|(rank, _, _, at)| {
                    let open = self.open[at].clone();
                    let state = open.activity.state(now).unwrap_or(rank);
                    EvictionCandidate { open, state }
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

    fn activity(address: &str) -> Arc<ConnectionActivity> {
        Arc::new(ConnectionActivity::new(SocketAddr::new(address.parse().unwrap(), 1)))
    }

    /// Waits until the clock of a connection, which counts whole microseconds, advances.
    fn tick() {
        let began = Instant::now();
        while began.elapsed() < Duration::from_micros(2) {
            std::hint::spin_loop();
        }
    }

    /// The order in which these connections are closed, one by one, `after` they were opened.
    fn order(flights: &[Arc<ConnectionActivity>], after: Duration) -> Vec<usize> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut connections = Connections::new(flights.len());
        for activity in flights {
            let task = runtime.spawn(std::future::pending::<()>());
            connections.add(activity.clone(), task.abort_handle());
        }
        let now = Instant::now() + after;
        let mut gone = Vec::new();
        while connections.make_room(now) > 0 {
            let is_new = |at: &usize| flights[*at].is_gone() && !gone.contains(at);
            let newly = (0..flights.len()).find(is_new).expect("one has gone");
            gone.push(newly);
        }
        flights.iter().for_each(|activity| activity.comes_back());
        gone
    }

    #[test]
    fn slow_heads_are_closed_before_idle_connections_and_verified_ones_last() {
        let one = || activity("192.0.2.1");
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
    fn a_connection_with_an_unread_answer_can_be_closed() {
        // On HTTP/2 a window of 0 stops the answer and leaves the socket idle.
        let flights = [activity("192.0.2.1")];
        let (running, _) = flights[0].begin();
        assert!(order(&flights, SLOW_AFTER).is_empty(), "its answer is being made");
        let running = running.with_answer();
        assert!(order(&flights, Duration::ZERO).is_empty(), "it may be taken yet");
        assert_eq!(order(&flights, SLOW_AFTER + Duration::from_secs(1)), [0]);
        drop(running);
    }

    #[test]
    fn new_connections_of_a_crowding_address_are_closed_and_others_keep_their_time() {
        // If an address reopens its connections as soon as they are closed, all of them are always
        // new.
        let crowd = CROWD_MIN + 8;
        let mut flights = vec![activity("192.0.2.9")];
        flights.extend((0..crowd).map(|_| activity("192.0.2.1")));
        for after in [Duration::ZERO, NEW_FOR] {
            let gone = order(&flights, after);
            assert!(gone.len() >= 8, "{after:?}: {gone:?}");
            assert!(!gone[..8].contains(&0), "{after:?}: {gone:?}");
        }
    }

    #[test]
    fn connections_with_stalled_bodies_are_closed_before_verified_ones() {
        let (verified, body) = (activity("192.0.2.1"), activity("192.0.2.1"));
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
    fn a_slow_body_stays_slow_while_its_peer_finishes_other_requests() {
        // On HTTP/2 a peer holds one body back and finishes small requests beside it.
        let flights = ["192.0.2.1"; 2].map(activity);
        let held = flights.each_ref().map(|activity| {
            let (running, _) = activity.begin();
            tick();
            (running, activity.reads())
        });
        tick();
        let (small, _) = flights[0].begin();
        drop(flights[0].reads());
        drop(small);
        assert_eq!(order(&flights, SLOW_AFTER), [0, 1], "the body that began first");
        drop(held);
    }

    #[test]
    fn a_body_that_has_just_begun_is_not_slow_because_another_request_ran_long() {
        let flights = ["192.0.2.1"; 2].map(activity);
        let (long, _) = flights[0].begin();
        tick();
        let (_running, _) = flights[1].begin();
        let _reading = flights[1].reads();
        tick();
        let (_running, _) = flights[0].begin();
        let _reading = flights[0].reads();
        drop(long);
        assert_eq!(order(&flights, SLOW_AFTER), [1, 0], "the body that began first");
    }

    #[test]
    fn among_equals_the_address_with_the_most_connections_loses_them_first() {
        let addresses = ["192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.2", "192.0.2.1"];
        let flights = addresses.map(activity);
        assert_eq!(order(&flights, SLOW_AFTER), [1, 0, 2, 3, 4]);
        // One IPv6 network counts as one client.
        let addresses = ["192.0.2.1", "2001:db8::1", "2001:db8::2", "2001:db8::3"];
        assert_eq!(order(&addresses.map(activity), SLOW_AFTER), [1, 2, 0, 3]);
    }

    #[test]
    fn behind_a_proxy_connections_count_for_the_client_that_it_names() {
        let flights = ["10.0.0.1"; 4].map(activity);
        for (activity, client) in flights.iter().zip(["192.0.2.1", "192.0.2.2", "192.0.2.2"]) {
            activity.is_for(client.parse().unwrap());
            drop(activity.begin());
            tick();
        }
        drop(flights[3].begin());
        assert_eq!(order(&flights, SLOW_AFTER), [1, 0, 2, 3]);
    }
}
