//! Random plans of sending: publishes, exchanges, late reports, lost leases, replays, cancels and endpoints
//! that come and go, in any order. After every step the invariants are checked, in every store.
//! If nothing is random (every due delivery is claimed, and every wait is over when time passes),
//! the same plan has the same history everywhere.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::delivery::{DeliveryId, DeliveryStatus};
use hapax_core::endpoint::{EndpointId, EndpointOrder, EndpointSettings, OnDead};
use hapax_core::job::{Fence, Retry};
use hapax_core::store::{
    AttemptVerdict, DeliveryClaim, DeliveryDetail, DeliveryReplayed, EndpointSignal, Held,
    MessageAct, NewMessage, Published,
};
use proptest::prelude::*;

use crate::harness::{LEASE, World};
use crate::sending::{
    ALL, Sending, ask, delivered, failed, failed_saying, json, message, outcome, wanting,
};

/// Longer than a lease and the longest back-off after it together.
const ALL_WAITS: i64 = LEASE + 400;

const MESSAGES: u8 = 6;

#[derive(Debug, Clone, Copy)]
enum Act {
    /// Message `n`, with one of two contents.
    Publish {
        n: u8,
        content: u8,
    },
    /// Reports of the senders that claimed, however long ago, and new claims.
    Exchange {
        reports: [Option<(usize, Verdict)>; 2],
        limit: usize,
    },
    Replay {
        n: u8,
        endpoint: usize,
    },
    OnMessage {
        n: u8,
        act: MessageAct,
    },
    Disable(usize),
    Enable(usize),
    Delete(usize),
    Pass {
        seconds: i64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Verdict {
    Delivered,
    Failed,
    Never,
    Unsent,
    GivenBack,
}

impl Verdict {
    /// In a certain plan no circuit opens: an open circuit chooses a delivery by its due time, which is
    /// random.
    fn of_attempt(self, kind: PlanKind) -> AttemptVerdict {
        let says = match kind {
            PlanKind::Any => EndpointSignal::Fails,
            PlanKind::Certain => EndpointSignal::Works,
        };
        match self {
            Self::Delivered => delivered(),
            Self::Failed => failed_saying(Retry::Schedule, says),
            Self::Never => failed_saying(Retry::Never, says),
            Self::Unsent => failed(Retry::Unsent),
            Self::GivenBack => AttemptVerdict::GivenBack,
        }
    }
}

fn act() -> impl Strategy<Value = Act> {
    let verdict = prop_oneof![
        4 => Just(Verdict::Delivered),
        3 => Just(Verdict::Failed),
        1 => Just(Verdict::Never),
        1 => Just(Verdict::Unsent),
        1 => Just(Verdict::GivenBack),
    ];
    let report = || prop::option::of((0..8usize, verdict.clone()));
    let on_message = prop_oneof![Just(MessageAct::Cancel), Just(MessageAct::Replay)];
    prop_oneof![
        5 => (0..MESSAGES, prop_oneof![5 => Just(0u8), 1 => Just(1u8)])
            .prop_map(|(n, content)| Act::Publish { n, content }),
        10 => (report(), report(), 0..4usize)
            .prop_map(|(one, other, limit)| Act::Exchange { reports: [one, other], limit }),
        2 => (0..MESSAGES, 0..3usize).prop_map(|(n, endpoint)| Act::Replay { n, endpoint }),
        2 => (0..MESSAGES, on_message).prop_map(|(n, act)| Act::OnMessage { n, act }),
        1 => (0..3usize).prop_map(Act::Disable),
        2 => (0..3usize).prop_map(Act::Enable),
        1 => (0..3usize).prop_map(Act::Delete),
        3 => (0..=LEASE + 20).prop_map(|seconds| Act::Pass { seconds }),
    ]
}

fn plan() -> impl Strategy<Value = Vec<Act>> {
    prop::collection::vec(act(), 1..50)
}

/// How much of a plan depends on chance.
#[derive(Debug, Clone, Copy, PartialEq)]
enum PlanKind {
    /// Claims are bounded, and some waits are longer than the time that passes.
    Any,
    /// Every due delivery is claimed, and no wait outlasts a pass of time.
    Certain,
}

/// The acts so far, and what must be true after them.
struct History {
    kind: PlanKind,
    endpoints: Vec<EndpointId>,
    deleted: [bool; 3],
    disabled: [bool; 3],
    claims: Vec<DeliveryClaim>,
    fences: HashMap<DeliveryId, Fence>,
    bodies: HashMap<DeliveryId, Bytes>,
    /// Whether a sender has reported a delivery as delivered, and no operator has replayed it
    /// since.
    delivered: HashMap<DeliveryId, bool>,
    record: Vec<String>,
}

const IN_FLIGHT_MAX: u32 = 2;

impl History {
    async fn begin<S: Sending>(world: &World<S>, kind: PlanKind) -> Self {
        let max_in_flight = match kind {
            PlanKind::Any => IN_FLIGHT_MAX,
            PlanKind::Certain => 1_000,
        };
        let mut endpoints = Vec::new();
        let kinds = [&["odd.*"][..], &["*"], &["even.*", "odd.1"]];
        let orders = [
            (EndpointOrder::None, OnDead::Park),
            (EndpointOrder::Key, OnDead::Skip),
            (EndpointOrder::Key, OnDead::Park),
        ];
        for (types, (order, on_dead)) in kinds.into_iter().zip(orders) {
            // There are no waits between attempts: with their jitter each store would have its own
            // history.
            let retry = vec![Duration::ZERO; 3];
            let settings =
                EndpointSettings { retry, max_in_flight, order, on_dead, ..wanting(types) };
            endpoints.push(world.add(settings).await);
        }
        Self {
            kind,
            endpoints,
            deleted: [false; 3],
            disabled: [false; 3],
            claims: Vec::new(),
            fences: HashMap::new(),
            bodies: HashMap::new(),
            delivered: HashMap::new(),
            record: Vec::new(),
        }
    }

    fn at(&self, endpoint: EndpointId) -> usize {
        self.endpoints.iter().position(|one| *one == endpoint).expect("one of ours")
    }

    /// The claims of all senders, the newest first.
    fn claim(&self, back: usize) -> Option<DeliveryClaim> {
        let len = self.claims.len();
        (len > 0).then(|| self.claims[len - 1 - back % len].clone())
    }

    fn claimed(&mut self, mut claims: Vec<DeliveryClaim>) {
        claims.sort_by_key(|claim| (self.at(claim.endpoint.id), claim.message.clone()));
        let mut record = "claimed:".to_owned();
        for claim in claims {
            let endpoint = self.at(claim.endpoint.id);
            assert!(!self.deleted[endpoint] && !self.disabled[endpoint], "sent to {endpoint}");
            let before = self.fences.insert(claim.delivery, claim.fence);
            assert!(before.is_none_or(|before| before < claim.fence), "a fence never comes again");
            let body = self.bodies.entry(claim.delivery).or_insert_with(|| claim.body.clone());
            assert_eq!(*body, claim.body, "other bytes");
            let _ = write!(record, " {} to {endpoint} #{}", claim.message, claim.attempt);
            self.claims.push(claim);
        }
        self.record.push(record);
    }

    fn reported(&mut self, claim: &DeliveryClaim, verdict: Verdict, held: Held) {
        let endpoint = self.at(claim.endpoint.id);
        self.record.push(format!("{} to {endpoint}: {verdict:?} is {held:?}", claim.message));
        if held == Held::Lost {
            return;
        }
        assert_eq!(self.fences.get(&claim.delivery), Some(&claim.fence), "an older fence held");
        match verdict {
            Verdict::Delivered => {
                self.delivered.insert(claim.delivery, true);
            }
            Verdict::Failed | Verdict::Never | Verdict::Unsent | Verdict::GivenBack => {
                assert!(!self.is_delivered(claim.delivery), "a delivered message failed after all");
            }
        }
    }

    fn is_delivered(&self, delivery: DeliveryId) -> bool {
        self.delivered.get(&delivery).copied().unwrap_or_default()
    }

    /// Checks what must be true of every delivery, and compares the delivery with the history.
    fn check(&self, one: &DeliveryDetail) -> String {
        let endpoint = self.at(one.endpoint);
        let is_delivered = one.status == DeliveryStatus::Delivered;
        assert_eq!(
            is_delivered,
            self.is_delivered(one.id),
            "delivered, and only if reported: {one:?}"
        );
        match one.status {
            DeliveryStatus::Waiting | DeliveryStatus::Failed => {
                assert!(!self.disabled[endpoint] && !self.deleted[endpoint], "{one:?}");
                assert!(one.due_at.is_some() && one.finished_at.is_none(), "{one:?}");
            }
            DeliveryStatus::Held => assert!(one.reason.is_some(), "{one:?}"),
            DeliveryStatus::Parked => {
                assert!(one.key.is_some() && endpoint != 0, "{one:?}");
                assert!(one.due_at.is_none() && one.finished_at.is_none(), "{one:?}");
            }
            DeliveryStatus::Sending => {
                assert!(one.due_at.is_some() && one.finished_at.is_none(), "{one:?}");
            }
            DeliveryStatus::Dead | DeliveryStatus::Cancelled | DeliveryStatus::Delivered => {
                assert!(one.due_at.is_none() && one.finished_at.is_some(), "{one:?}");
            }
        }
        assert!(one.attempts.is_sorted_by(|a, b| a.n < b.n), "{one:?}");
        assert!(one.attempts.last().is_none_or(|last| last.n <= one.attempt), "{one:?}");
        let reason = match one.status {
            DeliveryStatus::Failed
            | DeliveryStatus::Dead
            | DeliveryStatus::Held
            | DeliveryStatus::Parked
            | DeliveryStatus::Delivered => one.reason.as_deref(),
            // The reason of a cancel is each store's own text, and the other statuses may have
            // none.
            DeliveryStatus::Cancelled | DeliveryStatus::Sending | DeliveryStatus::Waiting => None,
        };
        let (status, attempt, ended) = (one.status, one.attempt, one.finished_at);
        format!(
            "{} to {endpoint}: {status:?} #{attempt} {reason:?} {ended:?} {:?}",
            one.message, one.attempts
        )
    }
}

/// Checks every delivery, and adds all of them to the history.
async fn look<S: Sending>(world: &World<S>, history: &mut History) {
    let deliveries = world.all_deliveries().await;
    let mut under_way = [0; 3];
    let mut keys = HashSet::new();
    for one in deliveries.iter().filter(|one| one.status == DeliveryStatus::Sending) {
        let endpoint = history.at(one.endpoint);
        under_way[endpoint] += 1;
        let is_first = one.key.is_none() || keys.insert((endpoint, one.key.clone()));
        assert!(endpoint == 0 || is_first, "two of one key at once: {one:?}");
    }
    assert!(
        history.kind == PlanKind::Certain || under_way.iter().all(|count| *count <= IN_FLIGHT_MAX)
    );
    let mut lines: Vec<String> = deliveries.iter().map(|one| history.check(one)).collect();
    lines.sort();
    history.record.extend(lines);
    let backlog = world.store.delivery_backlog().await.expect("reads");
    let counted = |statuses: &[DeliveryStatus]| {
        deliveries.iter().filter(|one| statuses.contains(&one.status)).count() as u64
    };
    assert_eq!(backlog.waiting, counted(&[DeliveryStatus::Waiting, DeliveryStatus::Failed]));
    assert_eq!(backlog.sending, counted(&[DeliveryStatus::Sending]));
    assert_eq!(backlog.held, counted(&[DeliveryStatus::Held]));
    assert_eq!(backlog.parked, counted(&[DeliveryStatus::Parked]));
    assert_eq!(backlog.dead, counted(&[DeliveryStatus::Dead]));
}

fn published(n: u8, content: u8) -> NewMessage {
    let kind = if n % 2 == 1 { "odd" } else { "even" };
    NewMessage {
        r#type: format!("{kind}.{n}"),
        data: json(&content.to_string()),
        // Two keys, and messages without one.
        key: (!n.is_multiple_of(3)).then(|| format!("k{}", n % 3)),
        ..message(&format!("m{n}"))
    }
}

async fn perform<S: Sending>(world: &World<S>, history: &mut History, act: Act) {
    match act {
        Act::Publish { n, content } => {
            let record = match world.publish(published(n, content)).await {
                Published::Accepted(one) => format!("{} is new, to {}", one.id, one.deliveries),
                Published::Duplicate(one) => format!("{} is known, to {}", one.id, one.deliveries),
                Published::Conflict { id } => format!("{id} is a conflict"),
            };
            history.record.push(record);
        }
        Act::Exchange { reports, limit } => {
            let reports: Vec<_> = reports
                .into_iter()
                .flatten()
                .filter_map(|(back, verdict)| Some((history.claim(back)?, verdict)))
                .collect();
            let kind = history.kind;
            let outcomes =
                reports.iter().map(|(claim, verdict)| outcome(claim, verdict.of_attempt(kind)));
            let exchanged = match history.kind {
                PlanKind::Certain => world.exchange_all(outcomes.collect(), ask(ALL)).await,
                PlanKind::Any => world.exchange(outcomes.collect(), ask(limit)).await,
            };
            for ((claim, verdict), held) in reports.iter().zip(exchanged.settled) {
                history.reported(claim, *verdict, held);
            }
            history.claimed(exchanged.claims);
        }
        Act::Replay { n, endpoint } => {
            let is_it = |one: &DeliveryDetail| {
                one.message == format!("m{n}") && one.endpoint == history.endpoints[endpoint]
            };
            let Some(one) = world.all_deliveries().await.into_iter().find(is_it) else { return };
            let replayed = world.replay_delivery(one.id).await;
            assert_eq!(replayed == DeliveryReplayed::Gone, history.deleted[endpoint]);
            if replayed == DeliveryReplayed::Due {
                history.delivered.insert(one.id, false);
            }
            history.record.push(format!("replay of m{n} to {endpoint}: {replayed:?}"));
        }
        Act::OnMessage { n, act } => {
            let changed = world.act_on(&format!("m{n}"), act).await;
            let changed = changed.map(|ids| ids.len());
            history.record.push(format!("{act:?} of m{n}: {changed:?}"));
        }
        Act::Disable(endpoint) if !history.deleted[endpoint] => {
            world.disable(history.endpoints[endpoint]).await;
            history.disabled[endpoint] = true;
        }
        Act::Enable(endpoint) if !history.deleted[endpoint] => {
            world.enable(history.endpoints[endpoint]).await;
            let was_disabled = std::mem::take(&mut history.disabled[endpoint]);
            // The deliveries that the endpoint has held are spread out, in random order.
            if was_disabled && history.kind == PlanKind::Certain {
                world.pass(ALL_WAITS);
            }
        }
        // The last endpoint stays, so that no plan ends early.
        Act::Delete(endpoint) if !history.deleted[endpoint] && endpoint != 1 => {
            world.delete(history.endpoints[endpoint]).await;
            history.deleted[endpoint] = true;
            world.cancel_orphans().await;
        }
        Act::Disable(_) | Act::Enable(_) | Act::Delete(_) => {}
        Act::Pass { seconds } => {
            world.pass(if history.kind == PlanKind::Certain { ALL_WAITS } else { seconds });
        }
    }
}

/// Runs the plan, then lets every attempt succeed until nothing is left to do.
async fn live<S: Sending>(world: World<S>, kind: PlanKind, plan: &[Act]) -> Vec<String> {
    let mut history = History::begin(&world, kind).await;
    for act in plan {
        perform(&world, &mut history, *act).await;
        look(&world, &mut history).await;
    }
    for endpoint in 0..history.endpoints.len() {
        perform(&world, &mut history, Act::Enable(endpoint)).await;
    }
    for n in 0..MESSAGES {
        perform(&world, &mut history, Act::OnMessage { n, act: MessageAct::Replay }).await;
    }
    // Each round outlasts any lease and back-off, and sends to each endpoint.
    // A circuit that opened several times is open for longer than that.
    let everything = MESSAGES as usize * history.endpoints.len() + 40;
    for _ in 0..everything {
        world.pass(ALL_WAITS);
        for claim in world.take(ALL).await {
            assert_eq!(world.report(&claim, delivered()).await, Held::Kept);
            history.delivered.insert(claim.delivery, true);
        }
    }
    look(&world, &mut history).await;
    for one in world.all_deliveries().await {
        match one.status {
            DeliveryStatus::Delivered => {}
            DeliveryStatus::Cancelled | DeliveryStatus::Dead => {
                assert!(history.deleted[history.at(one.endpoint)], "given up: {one:?}");
            }
            DeliveryStatus::Waiting
            | DeliveryStatus::Failed
            | DeliveryStatus::Held
            | DeliveryStatus::Parked
            | DeliveryStatus::Sending => panic!("left behind: {one:?}"),
        }
    }
    history.record
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_sending_keeps_every_promise_in_memory(plan in plan()) {
        runtime().block_on(live(World::in_memory(), PlanKind::Any, &plan));
    }

    // The ids differ, and the jitter with them: a history that depends on chance would differ too.
    #[test]
    fn random_sending_has_the_same_story_twice_in_memory(plan in plan()) {
        let runtime = runtime();
        let expected = runtime.block_on(live(World::in_memory(), PlanKind::Certain, &plan));
        let got = runtime.block_on(live(World::in_memory(), PlanKind::Certain, &plan));
        prop_assert_eq!(got, expected);
    }
}

proptest! {
    // Each act is a commit on a real disk: fewer plans, and new ones in every run.
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn random_sending_keeps_every_promise_on_disk(plan in plan()) {
        runtime().block_on(live(World::on_disk(), PlanKind::Any, &plan));
    }

    #[test]
    fn random_sending_has_the_same_story_on_disk(plan in plan()) {
        let runtime = runtime();
        let expected = runtime.block_on(live(World::in_memory(), PlanKind::Certain, &plan));
        let got = runtime.block_on(live(World::on_disk(), PlanKind::Certain, &plan));
        prop_assert_eq!(got, expected);
    }
}

/// One runtime for all plans: the server in the background belongs to it.
fn one_runtime() -> &'static tokio::runtime::Runtime {
    static ONE: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    ONE.get_or_init(runtime)
}

proptest! {
    // Each act is a commit on a real server: fewer plans, and new ones in every run.
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn random_sending_keeps_every_promise_on_postgres(plan in plan()) {
        one_runtime().block_on(async {
            live(World::on_postgres().await, PlanKind::Any, &plan).await
        });
    }

    #[test]
    fn random_sending_has_the_same_story_on_postgres(plan in plan()) {
        let runtime = one_runtime();
        let expected = runtime.block_on(live(World::in_memory(), PlanKind::Certain, &plan));
        let got = runtime.block_on(async {
            live(World::on_postgres().await, PlanKind::Certain, &plan).await
        });
        prop_assert_eq!(got, expected);
    }
}
