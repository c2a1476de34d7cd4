//! A retry storm against the real server: every known event arrives once more from many connections, beside new
//! events and other bodies under known ids. Meanwhile the server is killed, its syncs fail, or retention deletes
//! bodies. No event is lost or runs twice, and a copy is a duplicate only of an event that was sent before.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::faults::{Failing, is_refused_for_now};
use crate::support::ledger::{Ledger, SCHEMA, effect};
use crate::support::load::Dice;
use crate::support::{House, Sender, Server, Wire, cannot_run, until};

const SECRET: &str = "whsec_storm";

/// Connections at once.
const CLIENTS: usize = 8;

/// A server whose handler writes a ledger without a unique constraint.
fn house(settings: &str) -> (House, Ledger) {
    let house = House::new(&format!(
        "{settings}\n[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n\
         [sources.stripe.handlers.fee]\nsql = \"\"\"{}\"\"\"\n",
        effect("fee")
    ));
    let ledger = Ledger::create(&house, SCHEMA);
    (house, ledger)
}

/// What the senders know.
#[derive(Default)]
struct Sent {
    /// The id of each acked event.
    acked: HashMap<String, String>,
    /// Events whose request got no answer, or a 503.
    open: HashSet<String>,
    /// Answered conflicts of each event.
    conflicts: BTreeMap<String, u64>,
    /// Conflicts that may be stored although their request got no answer.
    open_conflicts: BTreeMap<String, u64>,
}

/// One request of a storm.
#[derive(Clone)]
enum Step {
    New(String),
    Copy(String),
    /// Another body under a known id.
    Conflict(String),
}

/// The senders of a storm.
struct Senders {
    sender: Sender,
    sent: Mutex<Sent>,
    answers: AtomicUsize,
    refusals: AtomicUsize,
}

impl Senders {
    fn new() -> Self {
        let sender = Sender::stripe(SECRET);
        Self {
            sender,
            sent: Mutex::default(),
            answers: AtomicUsize::new(0),
            refusals: AtomicUsize::new(0),
        }
    }

    fn sent(&self) -> std::sync::MutexGuard<'_, Sent> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the steps over several connections until all are answered or the server is gone, while `meanwhile` runs.
    fn send<T>(&self, server: &Server, steps: &[Step], meanwhile: impl FnOnce() -> T) -> T {
        let to = server.ingress;
        std::thread::scope(|scope| {
            for part in steps.chunks(steps.len().div_ceil(CLIENTS).max(1)) {
                scope.spawn(move || {
                    let Ok(mut wire) = Wire::try_connect(to) else { return };
                    let _ = part.iter().try_for_each(|step| self.step(&mut wire, step));
                });
            }
            meanwhile()
        })
    }

    /// Sends one request and checks its answer against everything that was answered before. `None` if the server is
    /// gone.
    fn step(&self, wire: &mut Wire, step: &Step) -> Option<()> {
        let (Step::New(event_id) | Step::Copy(event_id) | Step::Conflict(event_id)) = step;
        let request = match step {
            Step::New(_) | Step::Copy(_) => self.sender.event(event_id),
            Step::Conflict(_) => self
                .sender
                .request(format!(r#"{{"id":"{event_id}","type":"payout.paid","amount":2}}"#))
                .bytes(),
        };
        if let Step::New(_) = step {
            self.sent().open.insert(event_id.clone());
        }
        let Some(answer) = wire.try_ask(&request) else {
            if let Step::Conflict(_) = step {
                *self.sent().open_conflicts.entry(event_id.clone()).or_default() += 1;
            }
            return None;
        };
        self.answers.fetch_add(1, Ordering::Relaxed);
        if answer.status == 503 {
            is_refused_for_now(&answer);
            self.refusals.fetch_add(1, Ordering::Relaxed);
            if let Step::Conflict(_) = step {
                *self.sent().open_conflicts.entry(event_id.clone()).or_default() += 1;
            }
            return Some(());
        }
        let mut sent = self.sent();
        match sent.acked.get(event_id) {
            Some(id) => {
                answer.is("duplicate");
                assert_eq!(answer.id(), *id, "{event_id} has two ids");
            }
            None => {
                assert!(sent.open.remove(event_id), "{event_id} was never sent: {answer:?}");
                assert_eq!(answer.status, 200, "{answer:?}");
                sent.acked.insert(event_id.clone(), answer.id());
            }
        }
        if let Step::Conflict(_) = step {
            *sent.conflicts.entry(event_id.clone()).or_default() += 1;
        }
        Some(())
    }

    /// A copy of each event that was ever sent, every tenth with another body too, and `new` new events, in random
    /// order.
    fn storm(&self, dice: &mut Dice, round: usize, new: usize) -> Vec<Step> {
        let sent = self.sent();
        let mut steps: Vec<Step> =
            (0..new).map(|n| Step::New(format!("evt_{round}_{n}"))).collect();
        steps.extend(sent.open.iter().cloned().map(Step::Copy));
        for (n, event_id) in sent.acked.keys().enumerate() {
            steps.push(Step::Copy(event_id.clone()));
            if n % 10 == 0 {
                steps.push(Step::Conflict(event_id.clone()));
            }
        }
        drop(sent);
        dice.shuffle(&mut steps);
        steps
    }

    /// Sends what is still open, and checks that every event that was ever sent ran once.
    fn settle(&self, server: &Server, ledger: &Ledger) {
        let open: Vec<Step> = self.sent().open.iter().cloned().map(Step::Copy).collect();
        self.send(server, &open, || ());
        let sent = self.sent();
        assert!(sent.open.is_empty(), "not answered: {:?}", sent.open);
        until("every event has its effect", || {
            (ledger.effects().len() >= sent.acked.len()).then_some(())
        });
        ledger.is_once_each(sent.acked.len());
    }
}

fn counts(server: &Server, of: &str) -> BTreeMap<String, u64> {
    let events = server.events("");
    let text = |event: &serde_json::Value| event["event_id"].as_str().unwrap().to_owned();
    events.iter().map(|event| (text(event), event[of].as_u64().unwrap())).collect()
}

#[test]
fn sigkills_during_a_retry_storm_lose_nothing_and_double_nothing() {
    let (house, ledger) = house("");
    let senders = Senders::new();
    let mut dice = Dice::new();
    for round in 0..4 {
        let server = house.start();
        let steps = senders.storm(&mut dice, round, 150);
        let answers = senders.answers.load(Ordering::Relaxed);
        // Somewhere in the storm, and in the first round after most of its events.
        let killed_after = answers + steps.len() / 3 + dice.below(steps.len() as u64 / 2) as usize;
        senders.send(&server, &steps, || {
            until("some of the storm is answered", || {
                (senders.answers.load(Ordering::Relaxed) >= killed_after).then_some(())
            });
            server.signal("KILL");
        });
        server.kill();
    }
    let server = house.start();
    senders.settle(&server, &ledger);

    // A storm that nothing disturbs is counted exactly.
    let (arrivals, conflicts) =
        (counts(&server, "arrival_count"), counts(&server, "conflict_count"));
    let known: Vec<String> = senders.sent().acked.keys().cloned().collect();
    let copies: Vec<Step> = known.iter().cloned().map(Step::Copy).collect();
    senders.send(&server, &copies, || ());
    let after = counts(&server, "arrival_count");
    assert!(
        known.iter().all(|event| after[event] == arrivals[event] + 1),
        "{arrivals:?} {after:?}"
    );
    assert_eq!(counts(&server, "conflict_count"), conflicts);
    // A conflict is committed before its answer.
    let sent = senders.sent();
    for (event, stored) in conflicts {
        let answered = sent.conflicts.get(&event).copied().unwrap_or_default();
        let open = sent.open_conflicts.get(&event).copied().unwrap_or_default();
        assert!((answered..=answered + open).contains(&stored), "{event}: {stored}");
    }
    drop(sent);
    senders.settle(&server, &ledger);
}

#[test]
fn failing_syncs_during_a_retry_storm_lose_nothing_and_double_nothing() {
    let (house, ledger) = house("");
    let senders = Senders::new();
    let mut dice = Dice::new();
    let server = house.start();
    let first = senders.storm(&mut dice, 0, 200);
    senders.send(&server, &first, || ());
    for round in 1..4 {
        // A recovery and the commit after it make seven syncs in a row.
        let failing = match Failing::of(&server, "fsync,fdatasync:error=EIO:when=6+12") {
            Ok(failing) => failing,
            Err(why) => return cannot_run("failing syncs in a storm", &format!("tracing: {why}")),
        };
        let steps = senders.storm(&mut dice, round, 150);
        senders.send(&server, &steps, || ());
        drop(failing);
        until("it accepts again by itself", || {
            (server.admin_get("/readyz").status == 200).then_some(())
        });
    }
    assert!(senders.refusals.load(Ordering::Relaxed) > 0, "no sync failed");
    senders.settle(&server, &ledger);
    server.kill();
    let server = house.start();
    let again = senders.storm(&mut dice, 4, 0);
    senders.send(&server, &again, || ());
    senders.settle(&server, &ledger);
}

#[test]
fn a_retry_storm_of_events_that_retention_deletes_runs_nothing_again() {
    let (house, ledger) = house("[retention]\nevents = \"1s\"\n");
    let senders = Senders::new();
    let mut dice = Dice::new();
    let server = house.start();
    let first = senders.storm(&mut dice, 0, 300);
    senders.send(&server, &first, || ());
    let bodies = || ledger.number("SELECT count(*) FROM hapax_body");
    // Storms go on until the bodies of all events are deleted.
    let mut round = 0;
    until("the bodies of all events are deleted", || {
        round += 1;
        let steps = senders.storm(&mut dice, round, 0);
        senders.send(&server, &steps, || ());
        (bodies() == 0).then_some(())
    });
    senders.settle(&server, &ledger);
    server.kill();
    let server = house.start();
    let again = senders.storm(&mut dice, 0, 0);
    senders.send(&server, &again, || ());
    senders.settle(&server, &ledger);
}
