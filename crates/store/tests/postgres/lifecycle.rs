//! The rules of a job's life exist twice: in `hapax_core::lifecycle`, and in the SQL functions that
//! users call inside their own transactions. Here both decide about every act in every phase under
//! every order policy, and must agree on every column.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::job::{HandlerName, Phase, Policy, Progress, Retry, WorkLocation};
use hapax_core::lifecycle::{
    Act, Admission, Change, ErrorText, History, Holder, JobState, Overtaken, ResourceEffect,
    Unchanged, step,
};
use hapax_core::order::{Gaps, Machine, OnGap, OrderPolicy, OrderRule, Position, ResourcePosition};
use hapax_core::store::{HandlerRef, HandlerSpec, NewJob, Store, Work};
use hapax_sim::Postgres;
use hapax_store::{PgOptions, PgStore};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::harness::{Sender, body, noon};
use crate::{PreparingClient, WITHOUT_SYNC, connect, handler};

/// The numbers of the phases in the database.
const PHASES: [(Phase, i16); 9] = [
    (Phase::Ready, 0),
    (Phase::Leased, 1),
    (Phase::Done, 2),
    (Phase::Stale, 3),
    (Phase::Dead, 4),
    (Phase::Held, 5),
    (Phase::Parked, 6),
    (Phase::Review, 7),
    (Phase::Discarded, 8),
];

/// The values of a statement, of any types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { vec![$(Box::new($value) as Box<dyn ToSql + Sync>),*] };
}

/// The fence of every case's job.
const FENCE: i64 = 100;
const DICE: f64 = 0.25;
const PROGRESS: Progress = Progress { attempt: 2, steps: 1, lost: 0 };
/// Other progress, and the attempts before the last replay.
const OTHER_PROGRESS: [(Progress, u32); 9] = [
    (Progress { attempt: 1, steps: 0, lost: 0 }, 0),
    (Progress { attempt: 3, steps: 2, lost: 1 }, 0),
    (Progress { attempt: 9, steps: 0, lost: 5 }, 0),
    (Progress { attempt: 9, steps: 0, lost: 6 }, 0),
    // The last unsent attempt that uses no step, and the one after it.
    (Progress { attempt: 21, steps: 1, lost: 0 }, 0),
    (Progress { attempt: 24, steps: 1, lost: 2 }, 0),
    // The same after a replay, and the first attempt after one.
    (Progress { attempt: 51, steps: 1, lost: 0 }, 30),
    (Progress { attempt: 54, steps: 1, lost: 2 }, 30),
    (Progress { attempt: 31, steps: 0, lost: 1 }, 30),
];
const HOLD: Duration = Duration::from_secs(600);
const LEASE: Duration = Duration::from_secs(30);

/// A handler with one event whose job is put into every phase.
struct Subject {
    spec: HandlerSpec,
    of_handler: i32,
    lane: i32,
    event: Uuid,
    job: Uuid,
    /// Another job of the same resource, which waits for its turn.
    companion: Uuid,
    place: Option<ResourcePosition>,
}

/// One combination.
#[derive(Debug, Clone, Copy)]
struct Case<'a> {
    from: JobState,
    act: Act<'a>,
    mark: Option<Position>,
    /// Whether another job of the resource is leased.
    is_busy: bool,
}

/// The columns of a job that the rules decide about.
#[derive(Debug, PartialEq, Clone)]
struct Row {
    state: i16,
    due: Timestamp,
    fence: i64,
    run: i32,
    progress: Progress,
    earlier_attempts: u32,
    forced: bool,
    exclusive: bool,
    is_begun: bool,
    worker: Option<String>,
    result: Option<String>,
    error: Option<String>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_has_the_same_number_under_its_name_in_sql_and_in_the_code() {
    // Statements name states by a function. A name with a wrong number would claim done jobs. A
    // misspelt name must be an error, and not a condition that no row meets.
    let url = Postgres::shared().await.create_database("names").await;
    PgStore::migrate(&url).await.expect("migrates");
    let sql = connect(&url).await;
    for (phase, number) in PHASES {
        let name = format!("{phase:?}").to_lowercase();
        let row = sql.query_one("SELECT hapax.job_state($1)", &[&name]).await.expect("a number");
        assert_eq!(row.get::<_, i32>(0), i32::from(number), "{name}");
    }
    for function in
        ["job_state", "event_state", "review_reason", "order_policy", "order_verdict", "workplace"]
    {
        let unknown = sql.query(&format!("SELECT hapax.{function}('leasd')"), &[]).await;
        assert!(unknown.is_err(), "{function}");
    }
}

fn policies() -> Vec<(&'static str, Option<OrderPolicy>)> {
    let machine = Machine::parse(Some("new"), &["new -> paid", "paid -> sent"]).expect("a machine");
    vec![
        ("none", None),
        ("latest", Some(OrderPolicy::Latest)),
        ("sequence", Some(OrderPolicy::Sequence { start: Some(1) })),
        ("machine", Some(OrderPolicy::Machine(Arc::new(machine)))),
    ]
}

fn position_of(policy: &OrderPolicy) -> Position {
    match policy {
        OrderPolicy::Latest | OrderPolicy::Sequence { .. } => Position(5),
        OrderPolicy::Machine(machine) => machine.position("paid").expect("a state"),
    }
}

/// Marks below, just before, at and beyond the position, and none at all.
fn marks(policy: Option<&OrderPolicy>) -> Vec<Option<Position>> {
    let mut marks = vec![None];
    match policy {
        None => {}
        Some(OrderPolicy::Latest | OrderPolicy::Sequence { .. }) => {
            marks.extend([2, 4, 9].map(|at| Some(Position(at))));
        }
        Some(OrderPolicy::Machine(machine)) => marks.extend(machine.states().map(Some)),
    }
    marks
}

impl Subject {
    async fn new(store: &PgStore, sql: &Client, spec: HandlerSpec) -> Self {
        let name = spec.handler.handler.clone();
        let place = spec.order.as_ref().map(|rule| ResourcePosition {
            resource: "r".into(),
            position: position_of(&rule.policy),
        });
        let mut jobs = Vec::new();
        for id in [format!("evt_{name}"), format!("evt_{name}_companion")] {
            let job = NewJob { handler: name.clone(), place: place.clone(), hopeless: None };
            let ingest = Sender::plain().ingest_for(&body(&id), noon(), noon(), &[job]);
            store.ingest(ingest).await.expect("accepts");
            let find = "SELECT j.job, j.event, j.handler, j.lane FROM hapax.job j \
                        JOIN hapax.event e ON e.id = j.event WHERE e.event_id = $1";
            jobs.push(sql.query_one(find, &[&id.as_bytes()]).await.expect("a job"));
        }
        Self {
            spec,
            of_handler: jobs[0].get(2),
            lane: jobs[0].get(3),
            event: jobs[0].get(1),
            job: jobs[0].get(0),
            companion: jobs[1].get(0),
            place,
        }
    }

    fn policy(&self) -> Option<&OrderPolicy> {
        self.spec.order.as_ref().map(|rule| &rule.policy)
    }

    fn resource(&self) -> Option<&str> {
        self.place.as_ref().map(|place| &*place.resource)
    }

    /// Puts the job into the case's phase, with its companion and the mark.
    async fn arrange(&self, sql: &Client, arrange: &Statement, case: &Case<'_>) {
        let JobState { phase, progress, earlier_attempts, due, forced } = case.from;
        let companion = match case.is_busy {
            true => number(Phase::Leased),
            // A claim wakes jobs parked at a free resource, and jobs held there.
            false if sweeps(case.act) => number(Phase::Done),
            false => number(Phase::Parked),
        };
        sql.execute(
            arrange,
            &[
                &self.job,
                &number(phase),
                &due,
                &(progress.attempt as i32),
                &(progress.steps as i32),
                &(progress.lost as i32),
                &forced,
                &(phase == Phase::Leased && self.place.is_some()),
                &earlier(60),
                &self.companion,
                &case.is_busy,
                &self.lane,
                &self.resource(),
                &case.mark.map(|mark| mark.0),
                &later(3_600),
                &companion,
                &(earlier_attempts as i32),
            ],
        )
        .await
        .expect("a phase");
    }

    /// The statement that runs the act in the database, and its values.
    fn statement(&self, act: Act<'_>) -> (&'static str, Vec<Box<dyn ToSql + Sync>>) {
        let now = noon();
        match act {
            Act::Claim { .. } | Act::LeaseEnded { .. } | Act::HoldEnded { .. } => {
                // A claim of zero jobs only ends leases and holds.
                let wanted = i32::from(matches!(act, Act::Claim { .. }));
                let claim = "SELECT count(*) FROM hapax.claim($1, $3, 'new', true, NULL, NULL, NULL, \
                             NULL, NULL, NULL, $2)";
                (claim, values![self.of_handler, now, wanted])
            }
            Act::Done { .. } => {
                let settle = "SELECT hapax.settle($1, $2, 'new', NULL, $3)";
                (settle, values![self.job, FENCE, now])
            }
            Act::Failed { retry, .. } => {
                let (how, wait) = match retry {
                    Retry::Schedule => (0, Duration::ZERO),
                    Retry::NotBefore(wait) => (1, wait),
                    Retry::In(wait) => (2, wait),
                    Retry::Never => (3, Duration::ZERO),
                    Retry::Unsent => (4, Duration::ZERO),
                };
                let failed = "SELECT hapax.failed($1, $2, 'new', $3, $4, $5, $6)";
                (failed, values![self.job, FENCE, how, wait.as_micros() as i64, DICE, now])
            }
            Act::GivenBack => {
                let give_back = "SELECT hapax.give_back(ARRAY[$1::uuid], ARRAY[$2::bigint], $3)";
                (give_back, values![self.job, FENCE, now])
            }
            Act::SetAside { hold } => {
                let set_aside = "SELECT hapax.set_aside($1, $2, $3, $4)";
                (set_aside, values![self.job, FENCE, hold.is_some(), now])
            }
            Act::Woken => {
                let wake = "SELECT hapax.ready_next(h, $2, $3, $4) FROM hapax.handler h \
                            WHERE h.handler = $1";
                let resource = self.resource().map(str::to_owned);
                (wake, values![self.of_handler, self.lane, resource, now])
            }
            Act::TooManyHeld => {
                let review = "SELECT hapax.to_review($1, $2, $3)";
                (review, values![self.job, hapax_core::order::HELD_TOO_MANY, now])
            }
            Act::Hurry => ("SELECT hapax.hurry($1, $2)", values![self.event, now]),
            Act::Replay { force, is_hopeless, is_behind: _ } => {
                let replay = "SELECT * FROM hapax.replay($1, ARRAY[$2::integer], ARRAY[$3::text], \
                              ARRAY[$4::bigint], ARRAY[$5::text], $6, false, 'me', NULL, $7, $7)";
                let place = self.place.as_ref().map(|place| place.position.0);
                let hopeless = is_hopeless.then_some("hopeless");
                let resource = self.resource().map(str::to_owned);
                (replay, values![self.event, self.lane, resource, place, hopeless, force, now])
            }
            Act::Approve | Act::Reject => {
                let decide =
                    "SELECT hapax.decide($1, $2, '{}', '{}', '{}', '{}', 'me', NULL, $3, $3)";
                (decide, values![self.event, act == Act::Reject, now])
            }
            Act::Discard => {
                let discard = "SELECT hapax.discard($1, NULL, 'me', NULL, $2, $2)";
                (discard, values![self.event, now])
            }
        }
    }

    async fn look(&self, sql: &Client, read: &Statement) -> Found {
        let row = sql.query_one(read, &[&self.job, &self.companion]).await.expect("a row");
        let count = |at: usize| row.get::<_, i32>(at) as u32;
        let job = Row {
            state: row.get(0),
            due: row.get(1),
            fence: row.get(2),
            run: row.get(3),
            progress: Progress { attempt: count(4), steps: count(5), lost: count(6) },
            earlier_attempts: count(17),
            forced: row.get(7),
            exclusive: row.get(8),
            is_begun: row.get(9),
            worker: row.get(10),
            result: row.get(11),
            error: row.get(12),
        };
        let outcome: Option<String> = row.get(13);
        let attempt = outcome.map(|outcome| (outcome, row.get(14), row.get(15)));
        Found { job, attempt, companion_is_ready: row.get(16) }
    }
}

/// Puts a job into a phase, with its companion and the mark of its resource.
const ARRANGE: &str = "WITH mark AS (
        INSERT INTO hapax.mark (lane, resource, position)
        SELECT $12, $13::text, $14 WHERE $13::text IS NOT NULL
        ON CONFLICT (lane, resource) DO UPDATE SET position = excluded.position),
    companion AS (
        UPDATE hapax.job SET state = $16, exclusive = $11, due_at = $15 WHERE job = $10)
    UPDATE hapax.job SET state = $2, due_at = $3, fence = 100, run = 1, attempt = $4, steps = $5,
        lost = $6, forced = $7, exclusive = $8, started_at = $9, worker = 'old', error = 'old',
        result = NULL, earlier_attempts = $17
    WHERE job = $1";

/// Reads a job, its attempt in the history and its companion.
const LOOK: &str = "SELECT j.state, j.due_at, j.fence, j.run, j.attempt, j.steps, j.lost, j.forced,
        j.exclusive, j.started_at IS NOT NULL, j.worker, j.result, j.error,
        a.outcome, a.ended_at IS NOT NULL, a.error, c.state = 0, j.earlier_attempts
    FROM hapax.job j JOIN hapax.job c ON c.job = $2
    LEFT JOIN hapax.attempt a ON a.job = j.job
    WHERE j.job = $1";

/// The state in the database after an act.
struct Found {
    job: Row,
    /// The attempt in the history: outcome, whether it has an end, error.
    attempt: Option<(String, bool, Option<String>)>,
    companion_is_ready: bool,
}

fn number(phase: Phase) -> i16 {
    PHASES.iter().find(|(one, _)| *one == phase).expect("all are listed").1
}

fn later(seconds: i64) -> Timestamp {
    Timestamp::from_second(noon().as_second() + seconds).expect("a time")
}

fn earlier(seconds: i64) -> Timestamp {
    later(-seconds)
}

/// The row that results from core's decision.
fn expected(before: &Row, decided: Result<Change, Unchanged>, subject: &Subject) -> Row {
    let Ok(change) = decided else { return before.clone() };
    let is_done = change.phase == Phase::Done;
    Row {
        state: number(change.phase),
        due: change.due,
        fence: if change.voids_fence { FENCE + 1 } else { FENCE },
        run: before.run + i32::from(change.new_run),
        progress: change.progress,
        earlier_attempts: change.earlier_attempts,
        forced: change.forced,
        exclusive: change.phase == Phase::Leased && subject.place.is_some(),
        is_begun: match change.holder {
            Holder::Keep => before.is_begun,
            Holder::Set => true,
            Holder::Clear => false,
        },
        worker: match change.holder {
            Holder::Keep => before.worker.clone(),
            Holder::Set => Some("new".to_owned()),
            Holder::Clear => None,
        },
        result: if is_done { Some("new".to_owned()) } else { before.result.clone() },
        error: match change.error {
            ErrorText::Keep => before.error.clone(),
            ErrorText::Clear => None,
            ErrorText::Set(text) => Some(text.to_owned()),
            ErrorText::Reported => Some("new".to_owned()),
        },
    }
}

fn expected_history(decided: Result<Change, Unchanged>) -> Option<(String, bool, Option<String>)> {
    let note = |outcome: &str, ended, error: Option<&str>| {
        Some((outcome.to_owned(), ended, error.map(str::to_owned)))
    };
    match decided.ok()?.history {
        History::Keep | History::Remove => None,
        History::Lost(why) => note("lost", false, Some(why)),
        History::Overtaken => note("lost", true, Some(hapax_core::order::OVERTAKEN)),
        History::Failed => note("failed", true, Some("new")),
        History::Done => note("done", true, None),
    }
}

/// All acts that the order policy, the mark and the other job allow at once in this phase.
fn acts<'a>(
    subject: &'a Subject,
    from: &JobState,
    mark: Option<Position>,
    is_busy: bool,
) -> Vec<Act<'a>> {
    let spec = &subject.spec;
    let guard = subject.policy().filter(|_| !from.forced).map(|policy| {
        let position = position_of(policy);
        (policy.decide(mark, position), mark.is_some() && !policy.may_settle(mark, position))
    });
    let is_stale = matches!(guard, Some((hapax_core::order::OrderDecision::Stale, _)));
    let is_held = matches!(guard, Some((hapax_core::order::OrderDecision::Hold, _)));
    let admission = if is_stale {
        Admission::Stale
    } else if is_held {
        Admission::Hold(HOLD)
    } else if is_busy {
        Admission::Busy
    } else {
        Admission::Run
    };
    let overtaken = match guard {
        Some((_, true)) if is_stale => Overtaken::Stale,
        Some((_, true)) => Overtaken::NotItsTurn,
        Some((_, false)) | None => Overtaken::No,
    };
    // A replay checks the rule itself, whether or not the job was forced before.
    let is_behind = subject.policy().is_some_and(|policy| {
        policy.decide(mark, position_of(policy)) == hapax_core::order::OrderDecision::Stale
    });
    let is_over = from.due <= noon();
    let mut acts = vec![
        Act::Done { overtaken },
        Act::GivenBack,
        Act::Hurry,
        Act::Approve,
        Act::Reject,
        Act::Discard,
    ];
    acts.extend(
        [Retry::Schedule, Retry::NotBefore(HOLD), Retry::In(HOLD), Retry::Never, Retry::Unsent]
            .map(|retry| Act::Failed { retry, policy: &spec.policy }),
    );
    for force in [false, true] {
        acts.extend([false, true].map(|is_hopeless| Act::Replay { force, is_behind, is_hopeless }));
    }
    if subject.place.is_some() {
        acts.extend([Act::SetAside { hold: None }, Act::SetAside { hold: Some(HOLD) }]);
        // Under `latest` no job is ever held, and a job that waits for its predecessor is not woken
        // yet.
        let is_held_back =
            matches!(subject.policy(), Some(OrderPolicy::Latest)) || is_held || from.forced;
        if !is_busy && (from.phase != Phase::Held || !is_held_back) {
            acts.push(Act::Woken);
        }
    }
    match from.phase {
        // A claim also ends leases, and holds of a resource without a leased job.
        Phase::Leased if is_over => acts.push(Act::LeaseEnded { workplace: spec.workplace }),
        Phase::Held if is_over && !is_busy => {
            let go = spec.order.as_ref().is_some_and(|rule| rule.gaps.on_gap == OnGap::Go);
            // Without a gap, or in a sequence, the mark decides: the conformance suite covers that.
            if is_held && (!go || matches!(subject.policy(), Some(OrderPolicy::Machine(_)))) {
                acts.push(Act::HoldEnded { go });
            }
            acts.push(Act::TooManyHeld);
        }
        // A claim wakes jobs parked at a free resource before it claims.
        Phase::Parked if !is_busy => {}
        Phase::Held if is_over => {}
        _ => acts.push(Act::Claim { admission, lease: LEASE }),
    }
    acts
}

/// Whether the act also changes other jobs of the handler.
fn sweeps(act: Act<'_>) -> bool {
    matches!(act, Act::Claim { .. } | Act::LeaseEnded { .. } | Act::HoldEnded { .. } | Act::Woken)
}

fn asks_for_order(act: Act<'_>) -> bool {
    match act {
        Act::Claim { .. }
        | Act::Done { .. }
        | Act::Woken
        | Act::HoldEnded { .. }
        | Act::Replay { .. } => true,
        Act::LeaseEnded { .. }
        | Act::Failed { .. }
        | Act::GivenBack
        | Act::SetAside { .. }
        | Act::TooManyHeld
        | Act::Hurry
        | Act::Approve
        | Act::Reject
        | Act::Discard => false,
    }
}

/// Every act in every phase, with every mark, and every other value that matters to that act.
fn cases(subject: &Subject) -> Vec<Case<'_>> {
    let mut cases = Vec::new();
    for (phase, _) in PHASES {
        let has_place = subject.place.is_some();
        // `on_gap` and the workplace matter only to these two acts.
        let goes = subject.spec.workplace == WorkLocation::Called;
        if goes && !matches!(phase, Phase::Held | Phase::Leased) {
            continue;
        }
        let with_force: &[bool] = if has_place { &[false, true] } else { &[false] };
        // A resource has one leased job at a time, and only a claim checks the others.
        let with_busy: &[bool] =
            if has_place && phase == Phase::Ready { &[false, true] } else { &[false] };
        for due in [earlier(30), later(30)] {
            for (&forced, &is_busy) in
                with_force.iter().flat_map(|force| with_busy.iter().map(move |busy| (force, busy)))
            {
                for mark in marks(subject.policy()) {
                    let from =
                        JobState { phase, progress: PROGRESS, earlier_attempts: 0, due, forced };
                    for act in acts(subject, &from, mark, is_busy) {
                        if !asks_for_order(act) && (mark.is_some() || forced || is_busy) {
                            continue;
                        }
                        cases.push(Case { from, act, mark, is_busy });
                        // The number of attempts matters only to these acts.
                        if mark.is_none()
                            && matches!(
                                act,
                                Act::LeaseEnded { .. } | Act::Failed { .. } | Act::Replay { .. }
                            )
                        {
                            cases.extend(OTHER_PROGRESS.map(|(progress, earlier_attempts)| Case {
                                from: JobState { progress, earlier_attempts, ..from },
                                act,
                                mark,
                                is_busy,
                            }));
                        }
                    }
                }
            }
        }
    }
    cases
}

/// The difference between the database and core, as text. The whole case is one round trip and one
/// transaction, which is rolled back.
async fn difference(sql: &PreparingClient, subject: &Subject, case: Case<'_>) -> Option<String> {
    let name = &subject.spec.handler.handler;
    let what = format!("{name}: {case:?}");
    let decided = step(&case.from, &case.act, noon(), DICE);
    let (act, values) = subject.statement(case.act);
    let values: Vec<&(dyn ToSql + Sync)> = values.iter().map(|value| &**value).collect();
    let (arrange, look) = (sql.prepared(ARRANGE).await, sql.prepared(LOOK).await);
    let act = sql.prepared(act).await;
    // Requests are sent in the order of these futures.
    let (begun, (), before, acted, found, ended) = tokio::join!(
        sql.batch_execute("BEGIN"),
        subject.arrange(sql, &arrange, &case),
        subject.look(sql, &look),
        sql.query(&act, &values),
        subject.look(sql, &look),
        sql.batch_execute("ROLLBACK"),
    );
    begun.expect("begins");
    acted.expect("acts");
    ended.expect("rolls back");
    let before = before.job;
    let (mut after, mut expected) = (found.job, expected(&before, decided, subject));
    if after.fence > FENCE && expected.fence > FENCE {
        // The increment of the fence is random.
        after.fence = expected.fence;
    }
    if matches!(case.act, Act::LeaseEnded { .. }) && after.state == number(Phase::Ready) {
        // The database has its own random numbers.
        let wait = |dice| match step(&case.from, &case.act, noon(), dice) {
            Ok(change) => change.due,
            Err(why) => panic!("{what}: {why:?}"),
        };
        assert!((wait(0.0)..=wait(1.0)).contains(&after.due), "{what}: due {}", after.due);
        expected.due = after.due;
    }
    let history = (found.attempt, expected_history(decided));
    let releases = matches!(&decided, Ok(change) if change.turn != ResourceEffect::Keep);
    let has_next = !sweeps(case.act) && !case.is_busy && subject.place.is_some();
    let next = has_next.then_some((found.companion_is_ready, releases));
    let is_same =
        after == expected && history.0 == history.1 && next.is_none_or(|(is, should)| is == should);
    (!is_same).then(|| {
        format!(
            "{what}\n  core decides {decided:?}\n  the database makes {after:?}\n  instead of {expected:?}\n  \
             history {history:?}, next job {next:?}"
        )
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_functions_decide_as_core_does_for_every_act_in_every_phase() {
    let url = Postgres::shared().await.create_database("lifecycle").await;
    let store = PgStore::open(PgOptions::new(&url)).await.expect("opens");
    let sql = PreparingClient::new(connect(&url).await);
    sql.batch_execute(WITHOUT_SYNC).await.expect("sets");
    let mut specs = Vec::new();
    for (name, policy) in policies() {
        for (on_gap, workplace) in
            [(OnGap::Review, WorkLocation::Inside), (OnGap::Go, WorkLocation::Called)]
        {
            let name = HandlerName::new(format!("{name}_{on_gap:?}"));
            let retry = vec![Duration::ZERO, Duration::from_secs(10), Duration::from_secs(60)];
            let gaps = Gaps { hold: HOLD, hold_max: 1_000, on_gap };
            specs.push(HandlerSpec {
                handler: HandlerRef { source: handler().source, handler: name },
                policy: Policy { retry, lease: LEASE },
                order: policy.clone().map(|policy| OrderRule { policy, gaps }),
                workplace,
            });
        }
    }
    store.announce(specs.clone()).await.expect("announces");
    let (mut tried, mut differences) = (0, Vec::new());
    for spec in specs {
        let subject = Subject::new(&store, &sql, spec).await;
        for case in cases(&subject) {
            differences.extend(difference(&sql, &subject, case).await);
            tried += 1;
        }
    }
    let few = &differences[..differences.len().min(10)];
    assert!(few.is_empty(), "{} of {tried} differ:\n{}", differences.len(), few.join("\n"));
    assert!(tried > 2_000, "only {tried} cases");
}
