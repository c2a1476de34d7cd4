//! Jobs in PostgreSQL: each is announced, claimed and settled by one call of a function in the
//! database. The functions decide (`functions/claim.sql` and the files beside it). This file only calls the
//! functions and reads their results.

use std::time::Instant;

use hapax_core::job::{Fence, HandlerName, JobId, Retry, WorkLocation, idempotency_key};
use hapax_core::limits::{ERROR_CHARS_MAX, RESULT_CHARS_MAX};
use hapax_core::message::MessageData;
use hapax_core::order::{Gaps, OnGap, Position};
use hapax_core::store::{
    Claim, ClaimAsk, ClaimedEvent, DAMAGED_BODY, EventId, HandlerAnswer, HandlerRef, HandlerSpec,
    NewMessage, Outcome, Settlement,
};
use hapax_core::{EventKey, KeyHash, SourceName, Tenant, Timestamp};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Json;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, retried};
use super::handler_registry::{PolicyRow, micros};
use super::row;

/// Where order is decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OrderCheck {
    /// The order is decided in the claim, which leases the resource with the job.
    ByTheClaim,
    /// The order is decided in the work's own transaction, under the lock of the mark.
    InTheWork,
}

/// The jobs that one claim took, and the events whose jobs the order rule set aside.
#[derive(Debug, Default)]
pub(super) struct ClaimedJobs {
    pub(super) taken: Vec<ClaimedJob>,
    pub(super) set_aside: Vec<EventId>,
}

/// A claim, and the values that the order rule needs.
#[derive(Debug, Clone)]
pub(super) struct ClaimedJob {
    pub(super) claim: Claim,
    pub(super) lane: i32,
    pub(super) position: Option<Position>,
    pub(super) forced: bool,
    /// Whether the body differs from the one that was stored.
    pub(super) damaged: bool,
}

/// Announces these handlers to the database. From then on this node claims their jobs.
pub(super) async fn announce(shared: &Shared, specs: Vec<HandlerSpec>) -> Result<(), PgError> {
    let mut numbered = Vec::with_capacity(specs.len());
    for spec in specs {
        let number = retried(|| announce_one(shared, &spec)).await?;
        numbered.push((number, spec));
    }
    shared.handlers.replace(numbered);
    Ok(())
}

async fn announce_one(shared: &Shared, spec: &HandlerSpec) -> Result<i32, PgError> {
    let retry: Vec<i64> = spec.policy.retry.iter().copied().map(micros).collect();
    let order = PolicyRow::of(spec.order.as_ref().map(|rule| &rule.policy));
    let gaps = spec.order.as_ref().map_or_else(Gaps::default, |rule| rule.gaps);
    let hold_max = i32::try_from(gaps.hold_max).unwrap_or(i32::MAX);
    let workplace: i16 = match spec.workplace {
        WorkLocation::Inside => 0,
        WorkLocation::Called => 1,
        WorkLocation::Pulled => 2,
    };
    let mut client = shared.pools.work.checkout().await?;
    let rows = client
        .query(
            "SELECT hapax.announce($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
            &[
                &spec.handler.source.as_str(),
                &spec.handler.handler.as_str(),
                &retry,
                &micros(spec.policy.lease),
                &order.policy,
                &order.start_at,
                &micros(gaps.hold),
                &hold_max,
                &(gaps.on_gap == OnGap::Go),
                &workplace,
                &order.steps.0,
                &order.steps.1,
                &order.steps.2,
                &shared.now(),
            ],
        )
        .await?;
    Ok(only(&rows)?.get(0))
}

/// Claims up to the limit. Returns nothing if this node has not announced the handler.
pub(super) async fn claim(
    shared: &Shared,
    ask: &ClaimAsk,
    guarded: OrderCheck,
) -> Result<ClaimedJobs, PgError> {
    let mut claimed = retried(|| claim_once(shared, ask, guarded)).await;
    if claimed.as_ref().is_err_and(|error| error.code() == Some(&SqlState::UNIQUE_VIOLATION)) {
        // The unique index over leases refused a lease, because another node was faster. The job is
        // parked on the next try.
        claimed = retried(|| claim_once(shared, ask, guarded)).await;
    }
    let begun = match claimed? {
        Some(begun) => begun,
        None => {
            // The database does not know the handler, so it was replaced by another database.
            announce(shared, shared.handlers.specs()).await?;
            claim_once(shared, ask, guarded).await?.unwrap_or_default()
        }
    };
    without_damaged(shared, begun).await
}

/// Removes jobs whose body was changed, and makes them dead letters.
async fn without_damaged(shared: &Shared, mut begun: ClaimedJobs) -> Result<ClaimedJobs, PgError> {
    let (damaged, sound): (Vec<_>, Vec<_>) =
        begun.taken.into_iter().partition(|taken| taken.damaged);
    begun.taken = sound;
    for taken in damaged {
        bury_damaged(shared, &taken).await?;
        begun.set_aside.push(taken.claim.event.id);
    }
    Ok(begun)
}

/// Makes a job a dead letter because the stored body of its event was changed.
pub(super) async fn bury_damaged(shared: &Shared, taken: &ClaimedJob) -> Result<(), PgError> {
    let Claim { job, fence, event, .. } = &taken.claim;
    let id = event.id;
    tracing::error!(event.id = %id, job = %job, "event {id}: {DAMAGED_BODY}");
    retried(|| fail(shared, *job, *fence, DAMAGED_BODY, Retry::Never, None)).await?;
    Ok(())
}

async fn claim_once(
    shared: &Shared,
    ask: &ClaimAsk,
    guarded: OrderCheck,
) -> Result<Option<ClaimedJobs>, PgError> {
    let Some(handler) = shared.handlers.get(&ask.handler) else {
        return Ok(Some(ClaimedJobs::default()));
    };
    let limit = i32::try_from(ask.limit).unwrap_or(i32::MAX);
    let began = Instant::now();
    let mut turn = handler.turn();
    let all = turn.hints.take_full_check();
    let worker = row::text(&ask.worker);
    let mut client = shared.pools.work.checkout().await?;
    let rows = client
        .query(
            // After a restore, the number may belong to another handler, whose jobs must not run here.
            "SELECT * FROM hapax.claim( \
                 (SELECT h.handler FROM hapax.handler h \
                  WHERE h.handler = $1 AND h.source = $12 AND h.name = $13), \
                 $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
            &[
                &handler.number,
                &limit,
                &worker,
                &(guarded == OrderCheck::ByTheClaim),
                &turn.lane,
                &turn.look_lane,
                &turn.look_resource,
                &turn.hints.hinted(),
                &turn.hints.since(),
                &turn.hints.leases(),
                &shared.now(),
                &ask.handler.source.as_str(),
                &ask.handler.handler.as_str(),
            ],
        )
        .await?;
    drop(client);
    let Some((summary, claimed)) = rows.split_last() else { return Ok(None) };
    turn.lane = summary.get("lane");
    turn.look_lane = summary.get("look_lane");
    turn.look_resource = summary.get("look_resource");
    let (lanes, until) = (summary.get("lanes_seen"), summary.get("seen_until"));
    turn.hints.record_claim(lanes, until, summary.get("leases_until"));
    if all {
        turn.hints.note_full_check(began);
    }
    handler.next_turn(turn);
    let set_aside: Vec<Uuid> = summary.get("set_aside");
    Ok(Some(ClaimedJobs {
        taken: claimed.iter().map(|row| taken(&ask.handler, row)).collect(),
        set_aside: set_aside.into_iter().map(EventId).collect(),
    }))
}

/// A claim as it is now, and its handler; `None` if the job has another fence.
pub(super) async fn claimed(
    shared: &Shared,
    job: JobId,
    fence: Fence,
) -> Result<Option<(ClaimState, HandlerRef, ClaimedJob)>, PgError> {
    let mut client = shared.pools.work.checkout().await?;
    let ask = include_str!("sql/claimed.sql");
    let rows = client.query(ask, &[&job.0, &fence.0]).await?;
    Ok(rows.first().map(|row| {
        let handler = HandlerRef {
            source: SourceName::new(row.get::<_, &str>("source")),
            handler: HandlerName::new(row.get::<_, &str>("name")),
        };
        let claim_state = match row.get::<_, i16>("state") {
            1 => ClaimState::Leased,
            2 => ClaimState::Done,
            _ => ClaimState::Over,
        };
        let taken = taken(&handler, row);
        (claim_state, handler, taken)
    }))
}

/// The state of a job that still has this fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClaimState {
    Leased,
    Done,
    /// The job was lost, failed or set aside: it no longer runs under this claim.
    Over,
}

fn taken(handler: &HandlerRef, row: &Row) -> ClaimedJob {
    let id = EventId(row.get("event"));
    let run = unsigned(row.get("run"));
    let body: Vec<u8> = row.get("body");
    ClaimedJob {
        damaged: KeyHash::of_body(&body) != row::hash_of(row.get("body_hash")),
        lane: row.get("lane"),
        position: row.get::<_, Option<i64>>("place").map(Position),
        forced: row.get("forced"),
        claim: Claim {
            job: JobId(row.get("job")),
            fence: Fence(row.get("fence")),
            attempt: unsigned(row.get("attempt")),
            steps: unsigned(row.get("steps")),
            run,
            idempotency_key: idempotency_key(id, &handler.handler, run),
            leased_until: row.get("leased_until"),
            alone: row.get("alone"),
            event: ClaimedEvent {
                id,
                key: EventKey {
                    tenant: Tenant::new(row.get::<_, &str>("tenant")),
                    source: handler.source.clone(),
                    event_id: text(row.get("event_id")).into(),
                },
                event_type: row.get::<_, Option<&[u8]>>("event_type").map(text),
                occurred_at: row.get("occurred_at"),
                received_at: row.get("received_at"),
                resource: row.get("resource"),
                headers: text(row.get("headers")),
                body: body.into(),
            },
        },
    }
}

/// Records how an attempt ended.
pub(super) async fn settle(
    shared: &Shared,
    job: JobId,
    fence: Fence,
    outcome: &Outcome,
) -> Result<Settlement, PgError> {
    match outcome {
        Outcome::Done { result, publish, answer } => {
            let result = result.as_deref().map(|result| shortened(result, RESULT_CHARS_MAX));
            let messages = (!publish.is_empty())
                .then(|| Json(publish.iter().map(message).collect::<Vec<_>>()));
            let (status, answer) = columns_of(answer.as_ref());
            let ask = "SELECT hapax.settle($1, $2, $3, $4, $5, $6, $7)";
            let mut client = shared.pools.work.checkout().await?;
            let now = shared.now();
            let rows = client
                .query(ask, &[&job.0, &fence.0, &result, &messages, &now, &status, &answer])
                .await?;
            Ok(settlement(shared, only(&rows)?.get(0)))
        }
        Outcome::Failed { error, retry, answer } => {
            let settlement = fail(shared, job, fence, error, *retry, answer.as_ref()).await?;
            if settlement == Settlement::AlreadyDone
                && answer.is_some()
                && let Err(error) = add_answer(shared, job, fence, answer.as_ref()).await
            {
                // The job is done, whether or not the app's answer is stored.
                tracing::debug!(%job, "cannot store the answer to a job that is done: {error}");
            }
            Ok(settlement)
        }
    }
}

/// Adds the app's answer to a job that is done under this fence. Such a job stays done until a replay
/// voids the fence, so "done" again changes nothing else.
async fn add_answer(
    shared: &Shared,
    job: JobId,
    fence: Fence,
    answer: Option<&HandlerAnswer>,
) -> Result<(), PgError> {
    let (status, answer) = columns_of(answer);
    let ask = "SELECT hapax.settle($1, $2, NULL, NULL, $3, $4, $5)";
    let mut client = shared.pools.work.checkout().await?;
    client.query(ask, &[&job.0, &fence.0, &shared.now(), &status, &answer]).await?;
    Ok(())
}

/// The answer of `hapax.settle` and `hapax.failed`.
fn settlement(shared: &Shared, number: i32) -> Settlement {
    match number {
        1 => Settlement::Recorded,
        2 => Settlement::AlreadyDone,
        3 => {
            // Other jobs of the same resource are ready now.
            shared.arrived.notify_waiters();
            Settlement::Recorded
        }
        _ => Settlement::Lost,
    }
}

/// An answer as its two columns.
fn columns_of(answer: Option<&HandlerAnswer>) -> (Option<i32>, Option<&str>) {
    answer.map(|answer| (i32::from(answer.status), answer.body.as_str())).unzip()
}

/// Records a failed attempt: one step of the schedule. A job that is done under this fence stays done.
pub(super) async fn fail(
    shared: &Shared,
    job: JobId,
    fence: Fence,
    error: &str,
    retry: Retry,
    answer: Option<&HandlerAnswer>,
) -> Result<Settlement, PgError> {
    let (status, answer) = columns_of(answer);
    let (how, wait) = retry_columns(retry);
    let error = shortened(error, ERROR_CHARS_MAX);
    let mut client = shared.pools.work.checkout().await?;
    let rows = client
        .query(
            "SELECT hapax.failed($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            &[&job.0, &fence.0, &error, &how, &wait, &dice(), &shared.now(), &status, &answer],
        )
        .await?;
    drop(client);
    match settlement(shared, only(&rows)?.get(0)) {
        Settlement::Lost if is_done_under(shared, job, fence).await? => Ok(Settlement::AlreadyDone),
        settlement => Ok(settlement),
    }
}

/// The retry of a failed attempt as the parameters `how` and `wait` of `hapax.failed` and
/// `hapax.settle_attempt`.
pub(super) fn retry_columns(retry: Retry) -> (i32, i64) {
    match retry {
        Retry::Schedule => (0, 0),
        Retry::NotBefore(least) => (1, micros(least)),
        Retry::In(exactly) => (2, micros(exactly)),
        Retry::Never => (3, 0),
        Retry::Unsent => (4, 0),
    }
}

/// Gives back claims whose work never began.
pub(super) async fn give_back(shared: &Shared, claims: &[(JobId, Fence)]) -> Result<(), PgError> {
    let jobs: Vec<Uuid> = claims.iter().map(|(job, _)| job.0).collect();
    let fences: Vec<i64> = claims.iter().map(|(_, fence)| fence.0).collect();
    let mut client = shared.pools.work.checkout().await?;
    client.query("SELECT hapax.give_back($1, $2, $3)", &[&jobs, &fences, &shared.now()]).await?;
    Ok(())
}

/// Whether a job is done.
pub(super) async fn is_done(shared: &Shared, job: JobId) -> Result<bool, PgError> {
    let mut client = shared.pools.work.checkout().await?;
    let rows = client
        .query("SELECT state = hapax.job_state('done') FROM hapax.job WHERE job = $1", &[&job.0])
        .await?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}

/// Whether a job is done, under this fence.
pub(super) async fn is_done_under(
    shared: &Shared,
    job: JobId,
    fence: Fence,
) -> Result<bool, PgError> {
    let mut client = shared.pools.work.checkout().await?;
    let ask = "SELECT state = hapax.job_state('done') AND fence = $2 \
               FROM hapax.job WHERE job = $1";
    let rows = client.query(ask, &[&job.0, &fence.0]).await?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}

/// When a handler's next job is due, as far as is known.
pub(super) async fn next_due(
    shared: &Shared,
    handler: &HandlerRef,
) -> Result<Option<Timestamp>, PgError> {
    let Some(handler) = shared.handlers.get(handler) else { return Ok(None) };
    let mut client = shared.pools.work.checkout().await?;
    let hints = handler.turn().hints;
    let ask = "SELECT hapax.next_due($1, $2, $3, $4, $5)";
    let (lanes, since) = (hints.hinted(), hints.since());
    let rows = client
        .query(ask, &[&handler.number, &lanes, &since, &hints.leases(), &shared.now()])
        .await?;
    Ok(only(&rows)?.get(0))
}

/// The only row of a statement that always returns one row.
pub(super) fn only(rows: &[Row]) -> Result<&Row, PgError> {
    rows.first().ok_or(PgError::Gone)
}

pub(super) fn shortened(text: &str, chars_max: usize) -> String {
    row::text(text).chars().take(chars_max).collect()
}

/// Stored text is UTF-8. Bytes that were changed by hand are converted lossily.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn unsigned(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// A message as `hapax.settle` reads it. `data` is the publisher's own text, as a string, so that nothing
/// parses and prints it again.
#[derive(Debug, Serialize)]
struct OutboxMessage {
    r#type: String,
    data: String,
    thin: String,
    key: Option<String>,
    tenant: Option<String>,
    id: Option<String>,
    api_version: Option<String>,
}

fn message(new: &NewMessage) -> OutboxMessage {
    let plain = |text: &Option<String>| text.as_deref().map(row::text);
    OutboxMessage {
        r#type: row::text(&new.r#type),
        data: new.data.as_str().to_owned(),
        thin: new.data.thin(),
        key: plain(&new.key),
        tenant: plain(&new.tenant),
        id: plain(&new.id),
        api_version: plain(&new.api_version),
    }
}

/// The data of a message with a visible sign for each escaped NUL, which `jsonb` cannot store. All
/// other text stays unchanged.
pub(super) fn data_without_nul(data: &MessageData) -> Box<RawValue> {
    let mut text = String::with_capacity(data.as_str().len());
    let mut rest = data.as_str();
    while let Some(at) = rest.find('\\') {
        // An escape is a backslash with the character after it, so that a second backslash begins
        // no escape.
        let end = match rest.as_bytes()[at + 1] {
            b'u' => at + 6,
            _one_letter => at + 2,
        };
        text.push_str(&rest[..at]);
        text.push_str(match &rest[at..end] {
            "\\u0000" => "\u{2400}",
            escape => escape,
        });
        rest = &rest[end..];
    }
    text.push_str(rest);
    RawValue::from_string(text).expect("one character of a string was replaced")
}

pub(super) fn without_nul(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(row::text(text)),
        Value::Array(all) => Value::Array(all.iter().map(without_nul).collect()),
        Value::Object(all) => Value::Object(
            all.iter().map(|(key, value)| (row::text(key), without_nul(value))).collect(),
        ),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// A number between 0 and 1.
pub(super) fn dice() -> f64 {
    let (_, random) = Uuid::now_v7().as_u64_pair();
    f64::from(random as u32) / f64::from(u32::MAX)
}
