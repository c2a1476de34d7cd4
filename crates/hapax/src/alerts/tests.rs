//! Each rule, case by case; and an alert stays one alert from its beginning to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use hapax_core::job::HandlerName;
use hapax_core::{SourceName, Timestamp};
use hapax_store::MemoryStore;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

fn traffic(new: u64, copies: u64, failed_verifications: u64) -> Traffic {
    Traffic { source: SourceName::new("stripe"), new, copies, failed_verifications }
}

fn lane(oldest_due: Option<Timestamp>, dead: u64) -> LaneState {
    let handler =
        HandlerRef { source: SourceName::new("stripe"), handler: HandlerName::new("fee") };
    LaneState { handler, oldest_due, ready: 1, leased: 0, held: 0, parked: 0, review: 0, dead }
}

/// The observations of a healthy server, to which a test adds a problem.
struct Scene {
    now: Timestamp,
    history: History,
    traffic: Vec<Traffic>,
    lanes: Vec<LaneState>,
    paused: Vec<PausedHandler>,
    in_review: Vec<(SourceName, u64)>,
    known: Vec<HandlerRef>,
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
            history: History::new(at(0)),
            traffic: Vec::new(),
            lanes: Vec::new(),
            paused: Vec::new(),
            in_review: Vec::new(),
            known: vec![lane(None, 0).handler],
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
            paused: &self.paused,
            secrets: &self.secrets,
            unwritable: self.unwritable.clone(),
            clock_offset_seconds: self.clock_offset_seconds,
            log_bytes: self.log_bytes,
            unprepared: &self.unprepared,
        };
        judge(&observed, &self.alerts)
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
    // Fewer than 50 duplicates are no spike, even without any new event.
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
    (scene.lanes, scene.known) = (vec![lane(Some(at(-300)), 0)], Vec::new());
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
    SecretEnds { source: SourceName::new("stripe"), tenant: "acme".into(), until }
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

#[tokio::test]
async fn an_alert_keeps_its_beginning_and_goes_when_it_is_over() {
    // Each round finds the same problem. The repeated problem must not be a new alert each time,
    // and the alert must end.
    let second = Arc::new(AtomicI64::new(0));
    let clock = Arc::clone(&second);
    let inputs = Inputs {
        traffic: Box::new(Vec::new),
        clock_offset_seconds: Box::new(|| None),
        known: Box::new(Vec::new),
        tenant_secrets: Box::new(Vec::new),
        log: None,
        now: Arc::new(move || at(clock.load(Ordering::SeqCst))),
    };
    let rules =
        |until: Option<i64>| AlertRules { secrets: vec![ends(&[until])], ..AlertRules::default() };
    let watch = AlertMonitor::new(inputs, rules(Some(0)));
    let store = MemoryStore::new();
    let alerts = async |later: i64| {
        second.store(later, Ordering::SeqCst);
        let alerts = watch.alerts(&store).await;
        alerts.into_iter().map(|alert| (alert.about.name, alert.since)).collect::<Vec<_>>()
    };
    for later in [0, 10, 20] {
        assert_eq!(alerts(later).await, [("secret_expiry", at(0))]);
    }
    watch.reload(rules(None));
    assert_eq!(alerts(30).await, []);
    watch.reload(rules(Some(0)));
    assert_eq!(alerts(40).await, [("secret_expiry", at(40))]);
    let off = Alerts { secret_expiry: None, ..Alerts::default() };
    watch.reload(AlertRules { alerts: off, ..rules(Some(0)) });
    assert_eq!(alerts(50).await, []);
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
    // A thousand tenants with the same problem must not be a thousand messages; and an alert that has its own
    // messages must not lose them to a newer one.
    let finding = |tenant: usize| Finding {
        about: About {
            name: "secret_expiry",
            source: Some("stripe".to_owned()),
            tenant: Some(format!("t{tenant:03}")),
            lane: None,
        },
        severity: Severity::Info,
        message: format!("a secret of t{tenant:03} expires"),
    };
    let subjects = |board: &BTreeMap<About, Alert>| -> Vec<String> {
        published(board).into_iter().map(|alert| alert.subject).collect()
    };
    let mut board = BTreeMap::new();
    post(&mut board, (500..520).map(finding).collect(), at(0));
    let first = subjects(&board);
    assert_eq!(first.len(), PUBLISHED_PER_NAME_MAX);
    assert_eq!(first[0], r#"["secret_expiry","stripe","t500",null]"#);
    post(&mut board, (0..1_000).map(finding).collect(), at(10));
    let all = subjects(&board);
    assert_eq!(all[..PUBLISHED_PER_NAME_MAX], first);
    assert_eq!(all[PUBLISHED_PER_NAME_MAX..], [r#"["more","secret_expiry"]"#]);
    let summary = published(&board).pop().unwrap();
    let data: serde_json::Value = serde_json::from_str(summary.data.as_str()).unwrap();
    assert_eq!(data["name"], "secret_expiry");
    assert!(data["message"].as_str().unwrap().starts_with("980 more alerts"), "{data}");
}
