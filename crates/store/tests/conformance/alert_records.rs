//! Alerts that are stored: one row for each subject, raised and cleared once for all nodes.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::alert_board::{AlertReport, AlertState, AlertsNoted, JUDGE, Silence, StoredAlert};
use hapax_core::own_messages::ActiveAlert;
use hapax_core::store::{CheckIn, SilenceAsk};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::harness::{World, after, handler, noon};
use crate::own_messages::own;
use crate::sending::{Sending, wanting};

const LEASE: Duration = Duration::from_secs(30);

fn node(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn alert(subject: &str, text: &str) -> ActiveAlert {
    ActiveAlert { subject: subject.to_owned(), data: json!({"message": text}).into() }
}

fn alerts(subjects: &[&str]) -> Vec<ActiveAlert> {
    subjects.iter().map(|subject| alert(subject, subject)).collect()
}

fn report(node: Uuid, judged: Option<&[&str]>, own: &[&str]) -> AlertReport {
    AlertReport {
        node,
        judged: judged.map(alerts),
        own: alerts(own),
        raise_after: Duration::from_secs(5),
        clear_after: Duration::from_secs(300),
    }
}

fn raised(subject: &str) -> (String, Value) {
    ("hapax.alert.raised".to_owned(), json!({"message": subject}))
}

fn cleared(subject: &str) -> (String, Value) {
    ("hapax.alert.cleared".to_owned(), json!({"message": subject}))
}

impl<S: Sending> World<S> {
    /// Reports what a node has found: the subjects that were raised, and those that were cleared.
    async fn found(
        &self,
        node: Uuid,
        judged: Option<&[&str]>,
        own: &[&str],
    ) -> (Vec<String>, Vec<String>) {
        let noted = self.store.note_alerts(report(node, judged, own)).await.expect("notes");
        assert_eq!(noted.judged, judged.is_some(), "{noted:?}");
        let subjects = |alerts: Vec<ActiveAlert>| alerts.into_iter().map(|it| it.subject).collect();
        (subjects(noted.raised), subjects(noted.cleared))
    }

    async fn listed(&self) -> Vec<StoredAlert> {
        self.store.alerts().await.expect("reads")
    }

    async fn listed_subjects(&self) -> Vec<String> {
        self.listed().await.into_iter().map(|row| row.alert.subject).collect()
    }

    async fn silence(&self, subject: &str, seconds: u64) -> Option<StoredAlert> {
        let ask = SilenceAsk {
            id: alert(subject, "").key(),
            span: Duration::from_secs(seconds),
            reason: "known".to_owned(),
            who: "ops (anna)".to_owned(),
        };
        self.store.silence_alert(ask).await.expect("silences")
    }
}

const NOTHING: (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());

fn raises(subjects: &[&str]) -> (Vec<String>, Vec<String>) {
    (subjects.iter().map(|subject| (*subject).to_owned()).collect(), Vec::new())
}

fn clears(subjects: &[&str]) -> (Vec<String>, Vec<String>) {
    let (subjects, none) = raises(subjects);
    (none, subjects)
}

pub(crate) async fn an_alert_is_raised_once_and_cleared_once_for_all_nodes<S: Sending>(
    world: World<S>,
) {
    // Twenty nodes see the same problem at the same time. The problem comes and goes, and all nodes
    // restart.
    world.add_for(own(), wanting(&["hapax.alert.*"])).await;
    let all_report = async |subjects: &'static [&'static str]| {
        let mut nodes = JoinSet::new();
        for number in 1..=20 {
            let store = Arc::clone(&world.store);
            let report = report(node(number), None, subjects);
            nodes.spawn(async move { store.note_alerts(report).await.expect("notes") });
        }
        let noted: Vec<AlertsNoted> = nodes.join_all().await;
        noted.iter().map(|noted| noted.raised.len()).sum::<usize>()
    };
    assert_eq!(all_report(&["b", "a"]).await, 0, "one look");
    world.pass(5);
    assert_eq!(all_report(&["b", "a"]).await, 2);
    assert_eq!(world.own_messages().await.len(), 2);
    let row = world.listed().await.remove(0);
    assert_eq!((row.since, row.seen_at), (after(0), after(5)));
    assert_eq!((row.state, row.is_published, row.silence), (AlertState::Raised, true, None));
    // Other processes, after a restart.
    world.pass(200);
    assert_eq!(world.found(node(31), None, &["a"]).await, NOTHING, "it goes on");
    world.pass(100);
    assert_eq!(world.found(node(31), None, &[]).await, NOTHING, "not quiet for long enough");
    assert_eq!(world.listed_subjects().await, [""; 0]);
    world.pass(1);
    assert_eq!(world.found(node(31), None, &[]).await, clears(&["b"]));
    world.pass(100);
    assert_eq!(world.found(node(31), None, &["a"]).await, NOTHING, "it came back in time");
    world.pass(301);
    assert_eq!(world.found(node(32), None, &[]).await, clears(&["a"]));
    let messages = world.own_messages().await;
    assert_eq!(messages[2..], [cleared("b"), cleared("a")]);
    // When the problem comes again, it is another alert.
    assert_eq!(world.found(node(32), None, &["a"]).await, NOTHING);
    world.pass(10);
    assert_eq!(world.found(node(32), None, &["a"]).await, raises(&["a"]));
    assert_eq!(world.listed().await[0].since, after(5 + 200 + 100 + 1 + 100 + 301));
    assert_eq!(world.own_messages().await[4..], [raised("a")]);
}

pub(crate) async fn a_problem_of_one_look_is_no_alert<S: Sending>(world: World<S>) {
    world.add_for(own(), wanting(&["hapax.alert.*"])).await;
    for _ in 0..3 {
        assert_eq!(world.found(node(1), None, &["a"]).await, NOTHING);
        assert_eq!(world.listed().await[0].state, AlertState::Pending, "shown, not announced");
        world.pass(4);
        assert_eq!(world.found(node(1), None, &["a"]).await, NOTHING, "too soon");
        world.pass(6);
        assert_eq!(world.found(node(1), None, &[]).await, NOTHING);
        assert_eq!(world.listed().await, []);
        world.pass(1);
    }
    assert_eq!(world.own_messages().await, []);
}

/// The check-in of a node under a name of its own.
fn checking_in(number: u128) -> CheckIn {
    let name = format!("host-{number}:8080");
    CheckIn { node: node(number), name, lease: LEASE, handlers: Vec::new() }
}

pub(crate) async fn a_node_that_died_is_missing_and_one_that_stopped_is_not<S: Sending>(
    world: World<S>,
) {
    // A killed node does not check out. A process that starts under the same name takes its place.
    let check_in = async |number: u128, name: &str| {
        let checked = CheckIn { name: name.to_owned(), ..checking_in(number) };
        world.store.check_in(checked).await.expect("checks in");
    };
    let listed = async || {
        let nodes = world.store.nodes().await.expect("reads").into_iter();
        nodes.map(|one| (one.node.as_u128(), one.is_alive)).collect::<Vec<_>>()
    };
    assert_eq!(listed().await, []);
    for number in [3, 1, 2] {
        check_in(number, &format!("{number}")).await;
    }
    assert_eq!(listed().await, [(1, true), (2, true), (3, true)]);
    // The first node shuts down and checks out; the second one is killed.
    world.store.check_out(node(1)).await.expect("checks out");
    world.store.check_out(node(9)).await.expect("an unknown node");
    assert_eq!(listed().await, [(2, true), (3, true)]);
    world.pass(30);
    check_in(3, "3").await;
    assert_eq!(listed().await, [(2, true), (3, true)]);
    world.pass(1);
    assert_eq!(listed().await, [(2, false), (3, true)]);
    let missing = world.store.nodes().await.expect("reads").remove(0);
    assert_eq!((missing.started_at, missing.seen_at), (noon(), noon()));
    // Another process takes the place of the killed node. After that process checks out, neither node is
    // listed.
    check_in(4, "2").await;
    assert_eq!(listed().await, [(4, true), (3, true)]);
    world.store.check_out(node(4)).await.expect("checks out");
    assert_eq!(listed().await, [(3, true)]);
    // A node that was only slow is back.
    check_in(2, "2").await;
    assert_eq!(listed().await, [(2, true), (3, true)]);
    world.pass(3_600);
    check_in(3, "3").await;
    assert_eq!(listed().await, [(2, false), (3, true)]);
    world.pass(1);
    assert_eq!(listed().await, [(3, true)], "it was missing for an hour");
}

pub(crate) async fn one_node_at_a_time_judges_the_data_of_all<S: Sending>(world: World<S>) {
    let hold = async |number: u128| {
        let checked = checking_in(number);
        world.store.check_in(checked).await.expect("checks in").is_judge
    };
    let judged = async |number: u128, subjects: &[&str]| {
        let report = report(node(number), Some(subjects), &[]);
        world.store.note_alerts(report).await.expect("notes").judged
    };
    assert!(!judged(1, &["a"]).await, "it holds no lease");
    assert!(hold(1).await && !hold(2).await);
    world.pass(29);
    assert!(hold(1).await && !hold(2).await, "it was renewed");
    assert!(judged(1, &["a"]).await && !judged(2, &["b"]).await);
    world.pass(5);
    assert_eq!(world.found(node(1), Some(&["a"]), &[]).await, raises(&["a"]));
    assert_eq!(world.listed().await[0].reporter, JUDGE);
    // The first node stops for a while, and the second one takes over.
    world.pass(25);
    assert!(!judged(1, &["late"]).await, "its lease has ended");
    assert!(hold(2).await && !hold(1).await);
    assert!(!judged(1, &["late"]).await);
    assert_eq!(world.listed_subjects().await, ["a"]);
    assert_eq!(world.found(node(2), Some(&["a"]), &[]).await, NOTHING, "raised already");
    // A problem that the judge does not find is over, whichever node found it.
    assert_eq!(world.found(node(2), Some(&[]), &[]).await, NOTHING);
    assert_eq!(world.listed_subjects().await, [""; 0]);
    world.pass(301);
    assert!(hold(1).await);
    assert_eq!(world.found(node(1), Some(&[]), &[]).await, clears(&["a"]));
}

pub(crate) async fn only_a_judge_clears_an_alert_about_all_nodes<S: Sending>(world: World<S>) {
    // Nothing could be recorded for a while. A node that does not judge then reports first.
    let check_in = async |number: u128| {
        let checked = checking_in(number);
        world.store.check_in(checked).await.expect("checks in").is_judge
    };
    assert!(check_in(1).await);
    assert_eq!(world.found(node(1), Some(&["all"]), &[]).await, NOTHING);
    world.pass(10);
    assert_eq!(world.found(node(1), Some(&["all"]), &[]).await, raises(&["all"]));
    world.pass(400);
    assert!(check_in(1).await);
    assert_eq!(world.found(node(2), None, &[]).await, NOTHING);
    assert_eq!(world.found(node(1), Some(&["all"]), &[]).await, NOTHING, "it goes on");
    world.pass(301);
    assert!(check_in(1).await);
    assert_eq!(world.found(node(1), Some(&[]), &[]).await, clears(&["all"]));
}

pub(crate) async fn the_handlers_of_all_nodes_that_are_alive_are_known<S: Sending>(
    world: World<S>,
) {
    let check_in = async |number: u128, handlers: &[&str]| {
        let handlers = handlers.iter().map(|name| handler(name)).collect();
        let checked = CheckIn { handlers, ..checking_in(number) };
        let known = world.store.check_in(checked).await.expect("checks in").handlers;
        let mut names: Vec<String> = known.iter().map(|one| one.handler.to_string()).collect();
        names.sort();
        names
    };
    assert_eq!(check_in(1, &["a", "b"]).await, ["a", "b"]);
    assert_eq!(check_in(2, &["b", "c"]).await, ["a", "b", "c"]);
    world.pass(30);
    assert_eq!(check_in(2, &["c"]).await, ["a", "b", "c"], "a reload");
    world.pass(30);
    assert_eq!(check_in(2, &[]).await, ["a", "b"]);
    world.pass(1);
    assert_eq!(check_in(2, &[]).await, [""; 0], "the first node is dead");
}

pub(crate) async fn a_node_ends_its_own_alerts_and_those_of_a_dead_one_are_listed_no_more<
    S: Sending,
>(
    world: World<S>,
) {
    let found = async |number: u128, own: &[&str]| {
        assert_eq!(world.found(node(number), None, own).await, NOTHING);
    };
    found(1, &["of both", "of one"]).await;
    found(2, &["of both", "of two"]).await;
    assert_eq!(world.listed_subjects().await, ["of both", "of one", "of two"]);
    // The first node's report does not clear what the second node found.
    found(1, &[]).await;
    assert_eq!(world.listed_subjects().await, ["of both", "of two"]);
    world.pass(60);
    assert_eq!(world.listed_subjects().await, ["of both", "of two"]);
    world.pass(1);
    found(1, &[]).await;
    assert_eq!(world.listed_subjects().await, [""; 0], "the second node is dead");
}

pub(crate) async fn a_silenced_alert_is_published_when_its_silence_ends<S: Sending>(
    world: World<S>,
) {
    world.add_for(own(), wanting(&["hapax.alert.*"])).await;
    assert_eq!(world.silence("a", 100).await, None, "no such alert");
    let found = async |own: &[&str]| world.found(node(1), None, own).await;
    found(&["a", "b"]).await;
    let silenced = world.silence("a", 100).await.expect("an alert");
    let silence =
        Silence { until: after(100), reason: "known".to_owned(), who: "ops (anna)".to_owned() };
    assert_eq!(silenced.silence, Some(silence));
    assert_eq!(world.listed().await, [silenced, world.listed().await.remove(1)]);
    world.pass(10);
    assert_eq!(found(&["a", "b"]).await, raises(&["a", "b"]));
    assert_eq!(world.own_messages().await, [raised("b")]);
    world.pass(89);
    found(&["a", "b"]).await;
    assert_eq!(world.own_messages().await, [raised("b")]);
    world.pass(1);
    assert_eq!(found(&["a", "b"]).await, NOTHING);
    assert_eq!(world.own_messages().await, [raised("b"), raised("a")]);
    assert_eq!(world.listed().await[0].silence, None, "it has ended");
    // A silence holds even if the alert is cleared and raised again. A receiver that got an alert
    // before the silence learns that it is over.
    world.silence("a", 1_000).await.expect("an alert");
    world.silence("b", 0).await.expect("an alert");
    found(&["b"]).await;
    world.pass(301);
    assert_eq!(found(&["b"]).await, clears(&["a"]));
    assert_eq!(world.listed_subjects().await, ["b"]);
    assert_eq!(world.own_messages().await[2..], [cleared("a")]);
    found(&["a", "b"]).await;
    world.pass(10);
    assert_eq!(found(&["a", "b"]).await, raises(&["a"]));
    assert!(world.listed().await[0].silence.is_some());
    assert_eq!(world.own_messages().await.len(), 3);
    // No message was published when the alert was raised, so none is published when it ends.
    found(&["b"]).await;
    world.pass(301);
    found(&["b"]).await;
    assert_eq!(world.own_messages().await.len(), 3);
    // The silence is ended by hand.
    found(&["a", "b"]).await;
    world.silence("a", 0).await.expect("an alert");
    world.pass(10);
    found(&["a", "b"]).await;
    assert_eq!(world.own_messages().await[3..], [raised("a")]);
}

pub(crate) async fn an_alert_that_no_endpoint_wants_is_published_once_one_does<S: Sending>(
    world: World<S>,
) {
    let found = async |own: &[&str]| world.found(node(1), None, own).await;
    found(&["a", "b"]).await;
    world.pass(10);
    assert_eq!(found(&["a", "b"]).await, raises(&["a", "b"]));
    assert_eq!(world.own_messages().await, []);
    found(&["a"]).await;
    world.add_for(own(), wanting(&["hapax.alert.*"])).await;
    world.pass(10);
    found(&["a"]).await;
    assert_eq!(world.own_messages().await, [raised("a")]);
    world.pass(400);
    assert_eq!(found(&[]).await, clears(&["a", "b"]));
    assert_eq!(world.own_messages().await, [raised("a"), cleared("a")]);
}
