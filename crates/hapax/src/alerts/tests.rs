//! Each rule, case by case; and an alert stays one alert from its beginning to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use hapax_core::Tenant;
use hapax_core::endpoint::{EndpointId, EndpointSealed, EndpointSettings};
use hapax_core::job::HandlerName;
use hapax_core::store::{NewJob, TrafficCount, TrafficCounts, TrafficFigures};
use hapax_core::vault::Sealed;
use hapax_core::{SourceName, Timestamp};
use hapax_sim::{Act, FaultyStore, SignedEvent};
use hapax_store::MemoryStore;

use super::history::CounterHistory;
use super::traffic::Traffic;
use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

fn traffic(new: u64, copies: u64, failed_verifications: u64) -> Traffic {
    let source = SourceName::new("stripe");
    Traffic { source, new, copies, conflicts: 0, failed_verifications }
}

fn lane(oldest_due: Option<Timestamp>, dead: u64) -> LaneState {
    let handler =
        HandlerRef { source: SourceName::new("stripe"), handler: HandlerName::new("fee") };
    LaneState { handler, oldest_due, ready: 1, leased: 0, held: 0, parked: 0, review: 0, dead }
}

/// The observations of a healthy server, to which a test adds a problem.
struct Scene {
    now: Timestamp,
    history: CounterHistory,
    traffic: Vec<Traffic>,
    lanes: Vec<LaneState>,
    paused: Vec<PausedHandler>,
    in_review: Vec<(SourceName, u64)>,
    known: HashSet<HandlerRef>,
    pauses: BTreeMap<SourceName, Duration>,
    failing: Vec<EndpointRecord>,
    missing_keys: Vec<MissingKey>,
    secrets: Vec<SecretEnds>,
    unwritable: Option<String>,
    clock_offset_seconds: Option<i64>,
    log_bytes: Option<u64>,
    unprepared: Vec<Unprepared>,
    alerts: Alerts,
}

impl Scene {
    fn well() -> Self {
        Self {
            now: at(0),
            history: CounterHistory::new(at(0)),
            traffic: Vec::new(),
            lanes: Vec::new(),
            paused: Vec::new(),
            in_review: Vec::new(),
            known: HashSet::from([lane(None, 0).handler]),
            pauses: BTreeMap::new(),
            failing: Vec::new(),
            missing_keys: Vec::new(),
            secrets: Vec::new(),
            unwritable: None,
            clock_offset_seconds: Some(3),
            log_bytes: Some(32 << 20),
            unprepared: Vec::new(),
            alerts: Alerts::default(),
        }
    }

    /// Adds a sample of the counters at this second.
    fn sample(&mut self, second: i64, counters: Traffic) {
        self.history.note(at(second), std::slice::from_ref(&counters));
        (self.now, self.traffic) = (at(second), vec![counters]);
    }

    fn found(&self) -> Vec<Finding> {
        let observed = Observations {
            now: self.now,
            history: &self.history,
            traffic: &self.traffic,
            lanes: &self.lanes,
            in_review: &self.in_review,
            known: &self.known,
            pauses: &self.pauses,
            failing: &self.failing,
            missing_keys: &self.missing_keys,
            paused: &self.paused,
            secrets: &self.secrets,
            unwritable: self.unwritable.clone(),
            clock_offset_seconds: self.clock_offset_seconds,
            log_bytes: self.log_bytes,
            unprepared: &self.unprepared,
        };
        let mut found = judge(&observed, &self.alerts);
        found.extend(judge_node(&observed, &self.alerts));
        found
    }

    fn names(&self) -> Vec<&'static str> {
        self.found().iter().map(|finding| finding.about.name).collect()
    }

    /// Expects exactly this alert, and none after `off` has disabled it.
    fn check(mut self, name: &str, severity: Severity, part: &str, off: fn(&mut Alerts)) {
        let found = self.found();
        assert_eq!(self.names(), [name]);
        assert_eq!(found[0].severity, severity, "{found:?}");
        assert!(found[0].message.contains(part), "{found:?}");
        off(&mut self.alerts);
        assert_eq!(self.names(), [""; 0], "switched off");
    }
}

#[test]
fn a_server_that_is_well_has_no_alerts() {
    let mut scene = Scene::well();
    scene.lanes = vec![lane(Some(at(-299)), 0)];
    scene.secrets = vec![ends(&[None])];
    for minute in 0..120 {
        // A copy for every tenth event, and now and then a wrong signature.
        let n = minute as u64 * 100;
        scene.sample(minute * 60, traffic(n, n / 10, n / 10));
    }
    scene.lanes[0].oldest_due = Some(scene.now);
    assert_eq!(scene.names(), [""; 0], "{:?}", scene.found());
}

#[test]
fn many_more_copies_than_usual_are_a_spike() {
    let usual = |scene: &mut Scene, copies_per_event: f64| {
        for minute in 0..60 {
            let new = minute as u64 * 100;
            scene.sample(minute * 60, traffic(new, (new as f64 * copies_per_event) as u64, 0));
        }
        scene.traffic[0].clone()
    };
    let mut scene = Scene::well();
    let before = usual(&mut scene, 0.1);
    scene.sample(3_599, traffic(before.new + 100, before.copies + 200, 0));
    scene.check("duplicate_spike", Severity::Warning, "stripe sent", |alerts| {
        alerts.duplicate_spike = None;
    });
    // A sender that always sends each event three times has no spike when it continues to.
    let mut scene = Scene::well();
    let before = usual(&mut scene, 2.0);
    scene.sample(3_599, traffic(before.new + 100, before.copies + 200, 0));
    assert_eq!(scene.names(), [""; 0]);
    // Fewer than 50 duplicates are not a spike, even without any new event.
    let mut scene = Scene::well();
    scene.sample(10, traffic(0, 49, 0));
    assert_eq!(scene.names(), [""; 0]);
    scene.sample(20, traffic(0, 50, 0));
    assert_eq!(scene.names(), ["duplicate_spike"]);
}

#[test]
fn failed_verifications_count_within_their_minute_only() {
    let mut scene = Scene::well();
    scene.sample(0, traffic(0, 0, 0));
    scene.sample(30, traffic(0, 0, 19));
    assert_eq!(scene.names(), [""; 0]);
    scene.sample(50, traffic(0, 0, 20));
    assert_eq!(scene.names(), ["failed_verifications"]);
    scene.sample(200, traffic(0, 0, 20));
    assert_eq!(scene.names(), [""; 0], "they are long past");
    scene.sample(210, traffic(0, 0, 60));
    scene.check("failed_verifications", Severity::Warning, "40 requests to stripe", |alerts| {
        alerts.failed_verifications = None;
    });
}

#[test]
fn silence_depends_on_how_often_the_source_usually_sends() {
    let active_source = |every: i64| {
        let mut scene = Scene::well();
        for n in 1..=20 {
            scene.sample(n * every, traffic(n as u64, 0, 0));
        }
        scene
    };
    let quiet_for = |scene: &mut Scene, seconds: i64| {
        scene.now = scene.now.checked_add(SignedDuration::from_secs(seconds)).unwrap();
    };
    let mut scene = active_source(10);
    quiet_for(&mut scene, 3_599);
    assert_eq!(scene.names(), [""; 0]);
    quiet_for(&mut scene, 1);
    scene.check("silence", Severity::Warning, "nothing for 60 minutes", |alerts| {
        alerts.silence = None;
    });
    // One event in half an hour is usual here: an hour without one is normal, half a day is not.
    let mut scene = active_source(1_800);
    quiet_for(&mut scene, 4 * 3_600);
    assert_eq!(scene.names(), [""; 0]);
    quiet_for(&mut scene, 8 * 3_600);
    assert_eq!(scene.names(), ["silence"]);
    // A source whose longest pause was 60 hours is not silent before 120 hours.
    let mut scene = active_source(10);
    scene.pauses = BTreeMap::from([(SourceName::new("stripe"), Duration::from_secs(60 * 3_600))]);
    quiet_for(&mut scene, 119 * 3_600);
    assert_eq!(scene.names(), [""; 0]);
    quiet_for(&mut scene, 3_600);
    assert_eq!(scene.names(), ["silence"]);
    // A source that never sent an event is not silent.
    let mut scene = Scene::well();
    scene.sample(10, traffic(0, 0, 5));
    quiet_for(&mut scene, 86_400);
    assert_eq!(scene.names(), [""; 0]);
}

#[test]
fn old_jobs_and_dead_letters_are_reported_by_handler() {
    let mut scene = Scene::well();
    scene.lanes = vec![lane(Some(at(-300)), 0)];
    assert_eq!(scene.found()[0].about.lane.as_deref(), Some("stripe/fee"));
    scene.check("oldest_job", Severity::Warning, "due for 5 minutes", |alerts| {
        alerts.oldest_job = None;
    });
    let mut scene = Scene::well();
    (scene.lanes, scene.known) = (vec![lane(Some(at(-300)), 0)], HashSet::new());
    assert!(scene.found()[0].message.contains("no such handler"), "{:?}", scene.found());
    let mut scene = Scene::well();
    scene.lanes = vec![lane(Some(at(-300)), 0)];
    let handler = scene.lanes[0].handler.clone();
    let paused = PausedHandler { handler, since: at(-600), who: "ops".to_owned(), reason: None };
    scene.paused = vec![paused];
    assert!(scene.found()[0].message.contains("ops paused the handler"), "{:?}", scene.found());
    let mut scene = Scene::well();
    scene.lanes = vec![lane(None, 1)];
    scene.check("dead_letters", Severity::Warning, "has 1 dead letter:", |alerts| {
        alerts.dead_letters = None;
    });
    let mut scene = Scene::well();
    (scene.lanes, scene.alerts.dead_letters) = (vec![lane(None, 10_000)], Some(50_000));
    assert!(scene.found()[0].message.contains("at least 10000"), "more are not counted");
}

fn ends(until: &[Option<i64>]) -> SecretEnds {
    let until = until.iter().map(|second| second.map(at)).collect();
    SecretEnds {
        source: SourceName::new("stripe"),
        tenant: "acme".into(),
        verifiers: Vec::new(),
        until,
    }
}

#[test]
fn an_expiring_secret_is_reported_early_and_is_critical_if_it_is_the_last() {
    const DAY: i64 = 86_400;
    let check = |until: &[Option<i64>], expected: Option<Severity>| {
        let mut scene = Scene::well();
        scene.secrets = vec![ends(until)];
        let found = scene.found();
        assert_eq!(found.first().map(|finding| finding.severity), expected, "{until:?} {found:?}");
        if let Some(finding) = found.first() {
            assert_eq!(finding.about.tenant.as_deref(), Some("acme"));
        }
        scene.alerts.secret_expiry = None;
        assert_eq!(scene.names(), [""; 0], "switched off");
    };
    check(&[None], None);
    check(&[None, Some(-DAY)], None);
    check(&[None, Some(8 * DAY)], None);
    check(&[None, Some(6 * DAY)], Some(Severity::Info));
    check(&[Some(6 * DAY)], Some(Severity::Critical));
    check(&[Some(6 * DAY), Some(8 * DAY)], Some(Severity::Info));
    check(&[Some(-DAY)], Some(Severity::Critical));
    check(&[Some(-DAY), Some(8 * DAY)], None);
}

#[test]
fn a_wrong_clock_a_growing_log_and_a_store_that_cannot_write_are_reported() {
    for offset in [60, -61] {
        let mut scene = Scene::well();
        scene.clock_offset_seconds = Some(offset);
        let way = if offset > 0 { "60 s ahead of" } else { "61 s behind" };
        scene.check("clock_skew", Severity::Critical, way, |alerts| alerts.clock_skew = None);
    }
    let mut scene = Scene::well();
    scene.log_bytes = Some(256 << 20);
    scene.check("log_growth", Severity::Warning, "256 MiB", |alerts| alerts.log_growth = None);
    let mut scene = Scene::well();
    let handler = lane(None, 0).handler;
    scene.unprepared = vec![Unprepared { handler, why: "no such table: payout_fees".into() }];
    scene.check("statements", Severity::Critical, "no such table: payout_fees", |alerts| {
        alerts.statements = false;
    });
    let mut scene = Scene::well();
    scene.unwritable = Some("the disk is full".into());
    scene.check("store", Severity::Critical, "the disk is full", |alerts| alerts.store = false);
}

/// A monitor on a store whose clock stands at the same second as its own.
struct Monitored {
    monitor: AlertMonitor,
    second: Arc<AtomicI64>,
    counters: Arc<std::sync::Mutex<Vec<Traffic>>>,
}

impl Monitored {
    fn new(node: u128, second: &Arc<AtomicI64>, rules: AlertRules) -> Self {
        let clock = Arc::clone(second);
        let now: Now = Arc::new(move || at(clock.load(Ordering::SeqCst)));
        let counters: Arc<std::sync::Mutex<Vec<Traffic>>> = Arc::default();
        let read = Arc::clone(&counters);
        let figures = |traffic: &Traffic| {
            let counts = TrafficCounts {
                new: traffic.new,
                copies: traffic.copies,
                conflicts: traffic.conflicts,
                rejected: traffic.failed_verifications,
                ..TrafficCounts::default()
            };
            (traffic.source.clone(), TrafficFigures { counts, ..TrafficFigures::default() })
        };
        let traffic = Box::new(move || read.lock().unwrap().iter().map(figures).collect());
        let read = Arc::clone(&counters);
        let sources =
            move || read.lock().unwrap().iter().map(|traffic| traffic.source.clone()).collect();
        let node = Uuid::from_u128(node);
        let inputs = Inputs {
            node,
            node_name: format!("host-{node}:8080"),
            traffic: Arc::new(TrafficRecorder::new(
                node,
                traffic,
                Box::new(sources),
                Arc::clone(&now),
            )),
            clock_offset_seconds: Box::new(|| None),
            known: Box::new(Vec::new),
            tenant_secrets: Box::new(Vec::new),
            sending: Arc::new(SharedSending::new(Err("no vault".to_owned()))),
            log: None,
            now,
        };
        Self { monitor: AlertMonitor::new(inputs, rules), second: Arc::clone(second), counters }
    }

    fn count(&self, traffic: Traffic) {
        *self.counters.lock().unwrap() = vec![traffic];
    }

    /// The alerts after this second's round, with their beginning in seconds.
    async fn round(&self, store: &impl AlertStore, second: i64) -> Vec<(String, i64)> {
        self.second.store(second, Ordering::SeqCst);
        self.monitor.round(store, RoundCause::Due).await;
        let since = |alert: &api::Alert| alert.since.duration_since(at(0)).as_secs();
        self.monitor.listed().iter().map(|alert| (alert.name.clone(), since(alert))).collect()
    }
}

fn store_at(second: &Arc<AtomicI64>) -> MemoryStore {
    let clock = Arc::clone(second);
    MemoryStore::with_clock(Arc::new(move || at(clock.load(Ordering::SeqCst))))
}

fn named(name: &str, since: i64) -> Vec<(String, i64)> {
    vec![(name.to_owned(), since)]
}

fn rules_with(until: Option<i64>) -> AlertRules {
    AlertRules { secrets: vec![ends(&[until])], ..AlertRules::default() }
}

#[tokio::test]
async fn an_alert_keeps_its_beginning_and_goes_when_it_is_over() {
    // Each round finds the same problem. The repeated problem must not be a new alert each time,
    // and the alert must end.
    let second = Arc::new(AtomicI64::new(0));
    let (watch, store) = (Monitored::new(1, &second, rules_with(Some(0))), store_at(&second));
    for later in [0, 10, 20] {
        assert_eq!(watch.round(&store, later).await, named("secret_expiry", 0));
    }
    watch.monitor.reload(rules_with(None));
    assert_eq!(watch.round(&store, 30).await, []);
    watch.monitor.reload(rules_with(Some(0)));
    assert_eq!(watch.round(&store, 40).await, named("secret_expiry", 0), "not cleared yet");
    watch.monitor.reload(rules_with(None));
    assert_eq!(watch.round(&store, 341).await, []);
    watch.monitor.reload(rules_with(Some(0)));
    assert_eq!(watch.round(&store, 350).await, named("secret_expiry", 350));
    let off = Alerts { secret_expiry: None, ..Alerts::default() };
    watch.monitor.reload(AlertRules { alerts: off, ..rules_with(Some(0)) });
    assert_eq!(watch.round(&store, 360).await, []);
}

#[tokio::test]
async fn one_node_judges_what_all_have_counted_and_another_takes_over() {
    // Each node alone has too few failed verifications. The judge dies, and its successor has counted none itself.
    let second = Arc::new(AtomicI64::new(0));
    let store = store_at(&second);
    let [first, other, last] =
        [1, 2, 3].map(|node| Monitored::new(node, &second, AlertRules::default()));
    first.count(traffic(5, 0, 12));
    other.count(traffic(5, 0, 8));
    last.count(traffic(0, 0, 0));
    assert_eq!(first.round(&store, 10).await, []);
    other.monitor.inputs.traffic.record(&store).await;
    assert_eq!(first.round(&store, 20).await, named("failed_verifications", 20));
    assert_eq!(other.round(&store, 21).await, named("failed_verifications", 20));
    assert_eq!(last.round(&store, 22).await, named("failed_verifications", 20));
    // The first node is gone. Its last check counts until its lease ends, and the minute is then over.
    assert_eq!(last.round(&store, 40).await, named("failed_verifications", 20));
    assert_eq!(last.round(&store, 51).await, named("failed_verifications", 20), "the successor");
    assert_eq!(first.round(&store, 55).await, named("failed_verifications", 20));
    assert!(!first.monitor.kept().lease.unwrap().1, "only one judges");
    assert_eq!(last.round(&store, 130).await, []);
}

#[tokio::test]
async fn a_new_judge_that_cannot_read_the_data_ends_no_alert() {
    // The judge dies. The queries of its successor fail for longer than it takes to clear an alert, but its reports
    // are recorded.
    let second = Arc::new(AtomicI64::new(0));
    let store = FaultyStore::new(store_at(&second));
    let [first, next] = [1, 2].map(|node| Monitored::new(node, &second, AlertRules::default()));
    let late = SignedEvent { is_late: true, ..SignedEvent::new("stripe", "evt_1", at(0)) };
    store.ingest(late.ingest(Vec::new())).await.unwrap();
    let job = NewJob { handler: HandlerName::new("gone"), place: None, hopeless: None };
    store.ingest(SignedEvent::new("github", "evt_2", at(0)).ingest(vec![job])).await.unwrap();
    first.count(traffic(5, 0, 20));
    let mut expected = vec!["failed_verifications", "handler_gone", "review"];
    let names = |alerts: Vec<(String, i64)>| {
        let mut names: Vec<String> = alerts.into_iter().map(|(name, _)| name).collect();
        names.sort();
        names
    };
    for later in [0, 10] {
        assert_eq!(names(first.round(&store, later).await), expected);
    }
    let reads = [Act::Lanes, Act::InReview, Act::ListEndpoints, Act::TrafficBySource];
    for act in reads {
        store.fail(act, StoreError::Unavailable("too slow".into()));
    }
    for later in (50..=500).step_by(10) {
        assert_eq!(names(next.round(&store, later).await), expected, "{later}");
    }
    assert!(next.monitor.kept().lease.unwrap().1, "the successor judges");
    // Once the data can be read, the problem that is over ends, and one that has begun meanwhile is found.
    for act in reads {
        store.heal(act);
    }
    expected[0] = "oldest_job";
    expected.sort();
    assert_eq!(names(next.round(&store, 510).await), expected);
}

#[tokio::test]
async fn what_the_store_cannot_record_is_listed_by_the_node() {
    let second = Arc::new(AtomicI64::new(0));
    let watch = Monitored::new(1, &second, rules_with(Some(0)));
    let store = FaultyStore::new(store_at(&second));
    store.fail(Act::NoteAlerts, StoreError::Unavailable("the disk is full".into()));
    for later in [0, 10] {
        assert_eq!(watch.round(&store, later).await, named("secret_expiry", 0));
        assert_eq!(watch.monitor.listed()[0].notified, Some(false));
    }
    store.heal(Act::NoteAlerts);
    assert_eq!(watch.round(&store, 20).await, named("secret_expiry", 20));
    store.fail(Act::NoteAlerts, StoreError::Unavailable("the disk is full".into()));
    assert_eq!(watch.round(&store, 30).await, named("secret_expiry", 20));
}

#[test]
fn another_body_under_a_known_id_is_reported_until_its_hour_is_over() {
    let conflicts = |count| Traffic { conflicts: count, ..traffic(5, count, 0) };
    let mut scene = Scene::well();
    scene.sample(0, conflicts(0));
    scene.sample(120, conflicts(1));
    let said = "stripe sent 1 copy under a known id with another body in 60 minutes";
    assert!(scene.found()[0].message.starts_with(said), "{:?}", scene.found());
    scene.sample(3_700, conflicts(1));
    assert_eq!(scene.names(), ["conflicts"]);
    scene.sample(3_800, conflicts(1));
    assert_eq!(scene.names(), [""; 0]);
    scene.sample(3_810, conflicts(3));
    scene.check("conflicts", Severity::Warning, "2 copies", |alerts| alerts.conflicts = None);
}

#[test]
fn jobs_whose_handler_no_node_has_are_reported_until_one_has_it() {
    let mut scene = Scene::well();
    scene.lanes = vec![LaneState { ready: 2, held: 1, ..lane(None, 0) }];
    assert_eq!(scene.names(), [""; 0]);
    let known = std::mem::take(&mut scene.known);
    assert!(scene.found()[0].message.starts_with("3 jobs wait for stripe/fee"));
    assert_eq!(scene.names(), ["handler_gone"]);
    // Dead letters have an alert of their own.
    scene.lanes = vec![LaneState { ready: 0, ..lane(None, 1) }];
    assert_eq!(scene.names(), ["dead_letters"]);
    scene.lanes = vec![lane(None, 0)];
    scene.known = known;
    assert_eq!(scene.names(), [""; 0]);
    scene.known.clear();
    scene.check("handler_gone", Severity::Warning, "no node has this handler", |alerts| {
        alerts.handler_gone = false;
    });
}

fn failing(tenant: &str) -> EndpointRecord {
    let id = EndpointId(Uuid::from_u128(7));
    let sealed = Sealed::from_bytes(vec![1; 64]).expect("bytes of a sealed value");
    EndpointRecord {
        id,
        tenant: Tenant::new(tenant),
        settings: EndpointSettings::at("https://example.com/in"),
        sealed: EndpointSealed { secrets: sealed, headers: None },
        version: 1,
        created_at: at(0),
        disabled: None,
        failing: Some("it failed 5 times in a row".to_owned()),
    }
}

#[test]
fn an_open_circuit_is_reported_unless_it_is_that_of_a_receiver_of_alerts() {
    let mut scene = Scene::well();
    scene.failing = vec![failing("hapax")];
    assert_eq!(scene.names(), [""; 0]);
    scene.failing.push(failing("acme"));
    let found = scene.found();
    assert_eq!(found[0].about.endpoint, Some(EndpointId(Uuid::from_u128(7)).to_string()));
    assert_eq!(found[0].about.tenant.as_deref(), Some("acme"));
    scene.check("circuits", Severity::Warning, "it failed 5 times in a row", |alerts| {
        alerts.circuits = false;
    });
}

#[test]
fn a_key_that_stored_values_need_is_reported_until_the_vault_has_it() {
    let mut scene = Scene::well();
    let example = "the endpoint ep_1".to_owned();
    scene.missing_keys = vec![MissingKey { key: "k1a2".to_owned(), values: 3, example }];
    let said = "has no key k1a2, which 3 stored values need, such as that of the endpoint ep_1";
    scene.check("vault_key", Severity::Critical, said, |alerts| alerts.vault_key = false);
}

#[test]
fn the_longest_pause_of_a_week_is_that_between_two_hours_with_arrivals() {
    let count = |source: &str, hour: i64, new| TrafficCount {
        source: SourceName::new(source),
        at: at(hour * 3_600),
        figures: TrafficFigures {
            counts: TrafficCounts { new, rejected: 1, ..TrafficCounts::default() },
            ..TrafficFigures::default()
        },
    };
    let mut merged = MergedTraffic::new(at(0));
    assert!(merged.ask_week(at(0)).is_some());
    let counts =
        [count("a", 0, 1), count("b", 1, 1), count("a", 1, 2), count("a", 3, 0), count("a", 9, 1)];
    merged.take_week(&counts, at(0));
    assert!(merged.ask_week(at(3_599)).is_none() && merged.ask_week(at(3_600)).is_some());
    let hours = |count: u64| Duration::from_secs(count * 3_600);
    assert_eq!(merged.pauses(), &BTreeMap::from([(SourceName::new("a"), hours(7))]));
}

#[test]
fn events_and_jobs_in_review_are_one_alert_for_each_source() {
    let mut scene = Scene::well();
    scene.in_review = vec![(SourceName::new("github"), 1), (SourceName::new("stripe"), 2)];
    scene.lanes = vec![LaneState { review: 3, ..lane(None, 0) }];
    let found = scene.found();
    let texts: Vec<_> =
        found.iter().map(|one| (one.about.source.as_deref().unwrap(), &*one.message)).collect();
    assert_eq!(texts[0].0, "github");
    assert!(
        texts[0].1.starts_with("1 event waits for review: see `hapax events list"),
        "{texts:?}"
    );
    assert_eq!(texts[1].0, "stripe");
    assert!(texts[1].1.starts_with("5 events wait for review"), "{texts:?}");
    assert_eq!(scene.names(), ["review", "review"]);
    scene.alerts.review = false;
    assert!(scene.found().is_empty());
}

#[test]
fn of_many_alerts_of_one_name_the_oldest_are_published_one_by_one() {
    // A thousand tenants with the same problem must not cause a thousand messages. An alert that has its own messages
    // must not lose them to a newer alert.
    let finding = |tenant: usize| Finding {
        about: About {
            name: "secret_expiry",
            source: Some("stripe".to_owned()),
            tenant: Some(format!("t{tenant:03}")),
            lane: None,
            endpoint: None,
        },
        severity: Severity::Info,
        message: format!("a secret of t{tenant:03} expires"),
    };
    let found: Vec<Finding> = (500..520).map(finding).collect();
    let first: Vec<String> =
        reported(&found, |_| at(0)).into_iter().map(|alert| alert.subject).collect();
    assert_eq!(first.len(), PER_NAME_MAX);
    assert_eq!(first[0], r#"["secret_expiry","stripe","t500",null,null]"#);
    let found: Vec<Finding> = (0..1_000).map(finding).collect();
    let since = |subject: &str| match first.iter().any(|one| one == subject) {
        true => at(0),
        false => at(10),
    };
    let mut all = reported(&found, since);
    let summary = all.pop().unwrap();
    let subjects: Vec<String> = all.into_iter().map(|alert| alert.subject).collect();
    assert_eq!(subjects, first);
    assert_eq!(summary.subject, r#"["more","secret_expiry"]"#);
    let data: serde_json::Value = serde_json::from_str(summary.data.as_str()).unwrap();
    assert_eq!(data["name"], "secret_expiry");
    assert!(data["message"].as_str().unwrap().starts_with("980 more alerts"), "{data}");
}
