//! The rules of a delivery's life exist twice: in `hapax_core::delivery`, and in the SQL functions.
//! Here both decide about every act in every phase, and must agree on every column.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::circuit::{self, Circuit, CircuitEvent};
use hapax_core::delivery::{
    AttemptRecord, DeliveryAct, DeliveryChange, DeliveryPhase, DeliveryState, DeliveryUnchanged,
    KeyPositionChange, KeyTurn, step,
};
use hapax_core::job::{Policy, Progress, Retry};
use hapax_sim::Postgres;
use hapax_store::PgStore;
use tokio_postgres::Row;

use crate::harness::{after, noon};
use crate::{PreparingClient, WITHOUT_SYNC, connect};

/// The numbers of the phases in the database.
const PHASES: [(DeliveryPhase, i16); 6] = [
    (DeliveryPhase::Ready, 0),
    (DeliveryPhase::Leased, 1),
    (DeliveryPhase::Delivered, 2),
    (DeliveryPhase::Dead, 3),
    (DeliveryPhase::Cancelled, 4),
    (DeliveryPhase::Parked, 5),
];

const FENCE: i64 = 100;
const DICE: f64 = 0.25;
const LEASE: Duration = Duration::from_secs(30);
/// The progress, and the attempts before the last replay.
const PROGRESS: [(Progress, u32); 9] = [
    (Progress { attempt: 1, steps: 0, lost: 0 }, 0),
    (Progress { attempt: 2, steps: 1, lost: 0 }, 0),
    (Progress { attempt: 3, steps: 2, lost: 1 }, 0),
    (Progress { attempt: 9, steps: 0, lost: 6 }, 0),
    (Progress { attempt: 40, steps: 0, lost: 30 }, 0),
    // The last unsent attempt that uses no step, and the one after it.
    (Progress { attempt: 21, steps: 1, lost: 0 }, 0),
    (Progress { attempt: 24, steps: 1, lost: 2 }, 0),
    // The same after a replay.
    (Progress { attempt: 51, steps: 1, lost: 0 }, 30),
    (Progress { attempt: 54, steps: 1, lost: 2 }, 30),
];

/// The messages in the database: the deliveries of both are under one key, and the second is judged.
const SETUP: &str =
    "SELECT hapax.publish('t', '{}', 'k', id => 'm0'), hapax.publish('t', '{}', 'k', id => 'm1')";

/// A delivery's row, as far as the rules decide about it.
#[derive(Debug, PartialEq, Clone)]
struct Stored {
    state: i16,
    due: Timestamp,
    fence: i64,
    progress: Progress,
    earlier_attempts: u32,
    is_begun: bool,
    attempts: i64,
    /// Whether the delivery moved behind all others under its key.
    is_last: bool,
}

fn policy() -> Policy {
    Policy { retry: [0, 60, 300].map(Duration::from_secs).to_vec(), lease: LEASE }
}

fn retries() -> [Retry; 6] {
    [
        Retry::Schedule,
        Retry::NotBefore(Duration::from_secs(1)),
        Retry::NotBefore(Duration::from_secs(1_000)),
        Retry::In(Duration::from_secs(7)),
        Retry::Never,
        Retry::Unsent,
    ]
}

/// Puts the delivery into this state. The earlier delivery under its key is under way if
/// `is_blocked`, and has ended otherwise.
async fn put(
    sql: &PreparingClient,
    phase: DeliveryPhase,
    (progress, earlier_attempts): (Progress, u32),
    due: Timestamp,
    is_blocked: bool,
) {
    let state = PHASES.iter().find(|(named, _)| *named == phase).expect("a phase").1;
    let [attempt, steps, lost, earlier_attempts] =
        [progress.attempt, progress.steps, progress.lost, earlier_attempts].map(|n| n as i32);
    let earlier: i16 = if is_blocked { 1 } else { 2 };
    sql.rows("DELETE FROM hapax.delivery_attempt", &[]).await;
    let put_earlier = "UPDATE hapax.delivery SET state = $1, due_at = $2 WHERE message = 1";
    sql.rows(put_earlier, &[&earlier, &after(1_000_000)]).await;
    sql.rows(
        "UPDATE hapax.delivery SET state = $1, due_at = $2, fence = $3, attempt = $4, steps = $5,
             lost = $6, started_at = $7, node = 'n', error = NULL, took_ms = 1, answer_status = 200,
             place = 2, earlier_attempts = $8
         WHERE message = 2",
        &[&state, &due, &FENCE, &attempt, &steps, &lost, &noon(), &earlier_attempts],
    )
    .await;
    if !matches!(phase, DeliveryPhase::Leased | DeliveryPhase::Delivered) {
        // The record that is deleted when a slow attempt reports.
        sql.rows(
            "INSERT INTO hapax.delivery_attempt (message, endpoint, attempt, started_at, error, node)
             SELECT message, endpoint, attempt, started_at, 'lost', 'n' FROM hapax.delivery
             WHERE message = 2",
            &[],
        )
        .await;
    }
}

async fn stored(sql: &PreparingClient) -> Stored {
    let row = sql
        .row(
            "SELECT state, due_at, fence, attempt, steps, lost, started_at IS NOT NULL,
                 (SELECT count(*) FROM hapax.delivery_attempt), place > 2, earlier_attempts
             FROM hapax.delivery WHERE message = 2",
            &[],
        )
        .await;
    let number = |row: &Row, at: usize| u32::try_from(row.get::<_, i32>(at)).expect("a number");
    Stored {
        state: row.get(0),
        due: row.get(1),
        fence: row.get(2),
        progress: Progress {
            attempt: number(&row, 3),
            steps: number(&row, 4),
            lost: number(&row, 5),
        },
        earlier_attempts: number(&row, 9),
        is_begun: row.get(6),
        attempts: row.get(7),
        is_last: row.get(8),
    }
}

/// Runs the act in SQL, and returns whether it was accepted.
async fn act(sql: &PreparingClient, act: &DeliveryAct<'_>, now: Timestamp) -> bool {
    let settle = async |verdict: i32, how: i32, wait: i64| -> bool {
        let row = sql
            .row(
                "SELECT s.is_recorded FROM hapax.delivery d CROSS JOIN LATERAL hapax.settle_attempt(
                     d.message, d.endpoint, $1, $2, 5, 500, 'a', 'e', $3, $4, $5, $6) s
                 WHERE d.message = 2",
                &[&FENCE, &verdict, &how, &wait, &DICE, &now],
            )
            .await;
        row.get(0)
    };
    match act {
        DeliveryAct::Claim { turn, .. } => {
            let was = stored(sql).await.state;
            let rows = sql
                .rows(
                    "SELECT delivery FROM hapax.exchange('{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
                         '{}', '{}', '{}', '{}', '{}', 1, 1000, 'n', '{5}', 0, NULL, NULL, NULL, $1)",
                    &[&now],
                )
                .await;
            let claimed = rows.len() == 2;
            match turn {
                KeyTurn::Now => claimed,
                KeyTurn::Later => !claimed && was != 5 && stored(sql).await.state == 5,
            }
        }
        DeliveryAct::LeaseEnded => {
            let rows = sql
                .rows(
                    "SELECT hapax.lose_delivery(d, $1, $2) FROM hapax.delivery d
                     WHERE d.state = hapax.delivery_state('leased') AND d.message = 2",
                    &[&DICE, &now],
                )
                .await;
            !rows.is_empty()
        }
        DeliveryAct::Delivered => settle(0, 0, 0).await,
        DeliveryAct::Failed { retry, .. } => {
            let micros = |wait: &Duration| i64::try_from(wait.as_micros()).expect("a wait");
            let (how, wait) = match retry {
                Retry::Schedule => (0, 0),
                Retry::NotBefore(wait) => (1, micros(wait)),
                Retry::In(wait) => (2, micros(wait)),
                Retry::Never => (3, 0),
                Retry::Unsent => (4, 0),
            };
            settle(1, how, wait).await
        }
        DeliveryAct::GivenBack => settle(2, 0, 0).await,
        DeliveryAct::Cancel => {
            let ask = "SELECT hapax.change_message('default', 'm1', 0, 'ops', NULL, $1, $1)";
            let row = sql.row(ask, &[&now]).await;
            !row.get::<_, Vec<uuid::Uuid>>(0).is_empty()
        }
        DeliveryAct::Woken => {
            let was = stored(sql).await.state;
            let ask = "SELECT hapax.ready_next_delivery(1, 'k', $1)";
            sql.row(ask, &[&now]).await;
            was == 5 && stored(sql).await.state == 0
        }
        DeliveryAct::Skip => {
            let ask = "SELECT hapax.skip_delivery(v.id, 2, 1, 'ops', NULL, $1, $1)
                       FROM hapax.deliveries v WHERE v.message = 'm1'";
            sql.row(ask, &[&now]).await.get::<_, i32>(0) == 1
        }
        DeliveryAct::Expire => {
            let ask =
                "SELECT hapax.expire_delivery(d, $1) FROM hapax.delivery d WHERE d.message = 2";
            sql.row(ask, &[&now]).await.get(0)
        }
        DeliveryAct::Replay { parks_key } => {
            let parks = "UPDATE hapax.endpoint SET parks_dead = $1";
            sql.rows(parks, &[parks_key]).await;
            let ask = "SELECT hapax.replay_delivery(v.id, 2, 1, 'ops', NULL, $1, $1)
                       FROM hapax.deliveries v WHERE v.message = 'm1'";
            sql.row(ask, &[&now]).await.get::<_, i32>(0) == 1
        }
    }
}

/// The row that is expected after the rules of core have decided.
fn expected(before: &Stored, decided: &Result<DeliveryChange, DeliveryUnchanged>) -> Stored {
    let Ok(change) = decided else { return before.clone() };
    let state = PHASES.iter().find(|(phase, _)| *phase == change.phase).expect("a phase").1;
    let attempts = match change.attempt {
        AttemptRecord::Keep => before.attempts,
        AttemptRecord::Lost | AttemptRecord::Failed | AttemptRecord::Delivered => {
            before.attempts + 1
        }
        AttemptRecord::Remove => before.attempts - 1,
    };
    let is_begun = !change.voids_fence || change.phase == DeliveryPhase::Leased;
    let is_last = change.place == KeyPositionChange::Last;
    let DeliveryChange { due, progress, earlier_attempts, .. } = *change;
    let fence = before.fence;
    Stored { state, due, fence, progress, earlier_attempts, is_begun, attempts, is_last }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sql_and_core_decide_alike_about_every_act_in_every_phase() {
    // A rule that was changed in one place only would show as a different row.
    let url = Postgres::shared().await.create_database("delivery_rules").await;
    PgStore::migrate(&url).await.expect("migrates");
    let sql = PreparingClient::new(connect(&url).await);
    sql.batch_execute(WITHOUT_SYNC).await.expect("sets");
    sql.batch_execute(
        "SELECT hapax.create_endpoint(gen_random_uuid(), 'default', '{\"url\":\"u\"}', NULL, '{}', NULL,
             false, 9, '{0,60000000,300000000}', 30000000, '', NULL, '{5}', 'ops', NULL, now(), 9,
             NULL, true, true);",
    )
    .await
    .expect("an endpoint");
    sql.batch_execute(SETUP).await.expect("deliveries");
    let (now, policy) = (after(1_000), policy());
    let mut acts = vec![
        DeliveryAct::Claim { lease: LEASE, turn: KeyTurn::Now },
        DeliveryAct::Claim { lease: LEASE, turn: KeyTurn::Later },
        DeliveryAct::LeaseEnded,
        DeliveryAct::Delivered,
        DeliveryAct::GivenBack,
        DeliveryAct::Woken,
        DeliveryAct::Cancel,
        DeliveryAct::Skip,
        DeliveryAct::Expire,
        DeliveryAct::Replay { parks_key: false },
        DeliveryAct::Replay { parks_key: true },
    ];
    acts.extend(retries().map(|retry| DeliveryAct::Failed { retry, policy: &policy }));
    let mut compared = 0;
    for (phase, _) in PHASES {
        for (progress, earlier_attempts) in PROGRESS {
            for due in [after(999), after(1_000), after(1_500)] {
                for one in &acts {
                    if matches!(one, DeliveryAct::Claim { .. })
                        && phase == DeliveryPhase::Leased
                        && due <= now
                    {
                        // An exchange ends this lease first; the end of a lease is tested separately.
                        continue;
                    }
                    let is_blocked = match one {
                        DeliveryAct::Claim { turn, .. } => {
                            *turn == KeyTurn::Later || phase == DeliveryPhase::Parked
                        }
                        DeliveryAct::Woken => false,
                        DeliveryAct::LeaseEnded
                        | DeliveryAct::Delivered
                        | DeliveryAct::Failed { .. }
                        | DeliveryAct::GivenBack
                        | DeliveryAct::Cancel
                        | DeliveryAct::Skip
                        | DeliveryAct::Expire
                        | DeliveryAct::Replay { .. } => phase == DeliveryPhase::Parked,
                    };
                    // A case is rolled back: it leaves no old rows for the next ones to read.
                    sql.batch_execute("BEGIN").await.expect("begins");
                    put(&sql, phase, (progress, earlier_attempts), due, is_blocked).await;
                    let before = stored(&sql).await;
                    let state = DeliveryState { phase, progress, earlier_attempts, due };
                    let decided = step(&state, one, now, DICE);
                    let holds = act(&sql, one, now).await;
                    let found = stored(&sql).await;
                    sql.batch_execute("ROLLBACK").await.expect("rolls back");
                    let case = format!("{one:?} in {state:?}: {decided:?}");
                    let is_kept =
                        decided.is_ok() || decided == Err(DeliveryUnchanged::AlreadyDelivered);
                    assert_eq!(holds, is_kept, "{case}");
                    let voids = decided.as_ref().is_ok_and(|change| change.voids_fence);
                    assert_eq!(found.fence > FENCE, voids, "{case}: {found:?}");
                    let wanted = expected(&before, &decided);
                    // The database rounds to microseconds.
                    let apart = found.due.duration_since(wanted.due).abs().as_micros();
                    assert!(apart <= 2, "{case}: due {} not {}", found.due, wanted.due);
                    let found = Stored { fence: before.fence, due: wanted.due, ..found };
                    assert_eq!(found, wanted, "{case}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 800, "{compared}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_act_under_another_fence_changes_nothing() {
    // A sender guesses a fence that was never issued, also for a delivery that was never claimed.
    let url = Postgres::shared().await.create_database("delivery_fence").await;
    PgStore::migrate(&url).await.expect("migrates");
    let sql = PreparingClient::new(connect(&url).await);
    sql.batch_execute(
        "SELECT hapax.create_endpoint(gen_random_uuid(), 'default', '{\"url\":\"u\"}', NULL, '{}', NULL,
             false, 9, '{0}', 30000000, '', NULL, '{5}', 'ops', NULL, now(), 9);",
    )
    .await
    .expect("an endpoint");
    sql.batch_execute(SETUP).await.expect("deliveries");
    let settle = async |fence: i64, verdict: i32| -> bool {
        let ask =
            "SELECT s.is_recorded FROM hapax.delivery d CROSS JOIN LATERAL hapax.settle_attempt(
                       d.message, d.endpoint, $1, $2, 5, 200, 'a', 'e', 0, 0, 0.5, now()) s
                   WHERE d.message = 2";
        sql.row(ask, &[&fence, &verdict]).await.get(0)
    };
    let fresh = stored(&sql).await;
    for verdict in 0..3 {
        assert!(!settle(fresh.fence, verdict).await, "it was never claimed");
    }
    assert_eq!(stored(&sql).await, fresh);
    for (phase, _) in PHASES {
        put(&sql, phase, PROGRESS[0], noon(), phase == DeliveryPhase::Parked).await;
        let before = stored(&sql).await;
        for verdict in 0..3 {
            for fence in [FENCE - 1, FENCE + 1] {
                assert!(!settle(fence, verdict).await, "{phase:?}");
            }
        }
        assert_eq!(stored(&sql).await, before, "{phase:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_of_a_delivery_has_the_same_number_under_its_name() {
    // Statements name states by a function. A misspelt name must be an error, and not a condition
    // that no row meets.
    let url = Postgres::shared().await.create_database("delivery_names").await;
    PgStore::migrate(&url).await.expect("migrates");
    let sql = connect(&url).await;
    for (phase, number) in PHASES {
        let name = format!("{phase:?}").to_lowercase();
        let row = sql.query_one("SELECT hapax.delivery_state($1)", &[&name]).await;
        assert_eq!(row.expect("a number").get::<_, i32>(0), i32::from(number), "{name}");
    }
    assert!(sql.query("SELECT hapax.delivery_state('leasd')", &[]).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sql_and_core_decide_alike_about_every_event_of_a_circuit() {
    // Every circuit that a rule could distinguish from another, and every event.
    let url = Postgres::shared().await.create_database("circuit_rules").await;
    PgStore::migrate(&url).await.expect("migrates");
    let sql = connect(&url).await;
    let now = after(1_000);
    let events = [
        CircuitEvent::Probed { lease_end: after(1_030) },
        CircuitEvent::Works { max_in_flight: 16 },
        CircuitEvent::Fails,
        CircuitEvent::Nothing,
        CircuitEvent::GivenUp,
        CircuitEvent::Enabled,
    ];
    let numbers: Vec<i32> = (0..).take(events.len()).collect();
    let ask = sql
        .prepare(
            "SELECT c.circuit, c.failures, c.failing_since, c.open_until, c.open_for, c.slots
             FROM unnest($6::integer[]) WITH ORDINALITY event (number, at),
                 hapax.judge_circuit(ROW(1, 7, $1, $2, $3, $4, $5, NULL, NULL, NULL, 0, NULL, 0, NULL,
                     NULL)::hapax.endpoint_state, event.number, $7, 16, $8) c
             ORDER BY event.at",
        )
        .await
        .expect("prepares");
    let mut compared = 0;
    for failures in [0, 3, 4, 5, 9] {
        for failing_since in [None, Some(noon())] {
            for open_until in [None, Some(after(999)), Some(now), Some(after(1_001))] {
                for minutes in [0, 1, 20, 40, 60] {
                    for slots in [None, Some(2), Some(7), Some(8), Some(16)] {
                        let open_for = Duration::from_secs(60 * minutes);
                        let circuit = Circuit {
                            number: 7,
                            failures,
                            failing_since,
                            open_until,
                            open_for,
                            slots,
                        };
                        let micros = open_for.as_micros() as i64;
                        let rows = sql
                            .query(
                                &ask,
                                &[
                                    &(failures as i32),
                                    &failing_since,
                                    &open_until,
                                    &micros,
                                    &slots.map(|slots| slots as i32),
                                    &numbers,
                                    &after(1_030),
                                    &now,
                                ],
                            )
                            .await
                            .expect("judges");
                        assert_eq!(rows.len(), events.len());
                        for (row, event) in rows.iter().zip(events) {
                            let judged = Circuit {
                                number: row.get(0),
                                failures: row.get::<_, i32>(1) as u32,
                                failing_since: row.get(2),
                                open_until: row.get(3),
                                open_for: Duration::from_micros(row.get::<_, i64>(4) as u64),
                                slots: row.get::<_, Option<i32>>(5).map(|slots| slots as u32),
                            };
                            let decided = circuit::step(&circuit, event, now).unwrap_or(circuit);
                            assert_eq!(judged, decided, "{event:?} of {circuit:?}");
                            compared += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(compared > 5_000, "{compared}");
}
