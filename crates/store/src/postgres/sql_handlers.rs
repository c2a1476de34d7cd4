//! SQL handlers: their statements, "done" and published messages are one transaction, on
//! connections reserved for handlers.
//!
//! First attempts share a transaction, without savepoints, and their statements are pipelined. Any
//! error, a lost fence or a failed commit rolls back the whole transaction, and each job then runs
//! alone under the same claim. A job that fails alone uses a step of its schedule. A job whose
//! connection dies is lost, not failed: its outcome is unknown. Jobs that a slice has no time to
//! begin are given back.
//!
//! Changes that the statements make to the session are undone before the connection is used again.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_postgres::Object;
use hapax_core::failpoint;
use hapax_core::handler::{PostgresType, SqlParameter, SqlProgram, SqlStatement};
use hapax_core::job::{Fence, JobId, Policy, Retry};
use hapax_core::limits::{ERROR_CHARS_MAX, RESULT_CHARS_MAX};
use hapax_core::order::{OrderDecision, OrderRule, Position};
use hapax_core::store::{
    DAMAGED_BODY, HandlerRef, Ran, Settlement, SqlAsk, SqlRan, SqlRun, StoreError, TriedJob,
    TriedVerdict,
};
use tokio_postgres::error::{DbError, ErrorPosition, SqlState};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};
use uuid::Uuid;

use super::Shared;
use super::connect::{ClientPool, PgError, PooledClient, handler_session};
use super::jobs::{self, ClaimState, ClaimedJob, OrderCheck, only, shortened};
use super::result_text::{self, RawValue, ValueText};

/// How long a slice may begin new jobs. Meanwhile other slices wait for its connection, and its
/// leases run.
const SLICE_MAX: Duration = Duration::from_millis(500);

/// Jobs whose statements are sent together before the clock is checked: enough to hide the latency
/// of the server, few enough to notice slow statements.
const SENT_TOGETHER: usize = 16;

/// How much longer than the server this node waits for the end of a transaction.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// How often a job that lost a deadlock or a serialization race runs again within its attempt.
const RACES_MAX: usize = 3;

/// The longest wait of `hapax.lock_marks` for a resource.
const MARKS_WAIT_MAX: Duration = Duration::from_secs(2);

/// How many busy resources a slice waits for, because the leases of its other jobs run meanwhile.
const BUSY_RESOURCES_MAX: usize = 3;

/// Undoes the changes that statements may make to a session; prepared statements of Hapax stay.
const RESET: &str = "CLOSE ALL; SET SESSION AUTHORIZATION DEFAULT; RESET ALL; UNLISTEN *; \
                     SELECT pg_catalog.pg_advisory_unlock_all(); DISCARD TEMP; DISCARD SEQUENCES; ";

/// The outcome of one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JobOutcome {
    Done,
    Guarded,
}

/// Why a transaction was not committed.
#[derive(Debug)]
pub(super) enum NotRun {
    /// The statements are wrong, slow, or violate a constraint.
    Statement(String),
    /// A fence was lost, or the job is done already.
    Fence,
    /// Another transaction works on the resource of a job. Nothing was run.
    Waits,
    /// An immediate retry may succeed: after a deadlock, or when an `ALTER` made a plan invalid.
    Race(String),
    /// The connection or the server failed. The transaction may even have been committed.
    Outage(PgError),
}

/// Claims and runs one slice. An error comes from the database, not from a job. Jobs that were not begun are
/// given back if possible, and the others are lost when their leases end.
pub(super) async fn slice(shared: &Shared, ask: &SqlAsk) -> Result<SqlRan, StoreError> {
    let mut until = Instant::now() + SLICE_MAX;
    let begun = jobs::claim(shared, &ask.claim, OrderCheck::InTheWork).await?;
    let mut ran = SqlRan { guarded: begun.set_aside.len(), ..SqlRan::default() };
    ran.events.extend(begun.set_aside);
    let mut taken = begun.taken;
    if taken.is_empty() {
        return Ok(ran);
    }
    failpoint!("worker.after_claim");
    if let [only] = &taken[..]
        && only.claim.alone
    {
        ran.alone = Some(Box::new(only.claim.clone()));
        return Ok(ran);
    }
    // The sort is stable: jobs of one resource are adjacent, and stay in the order in which they
    // are due.
    taken.sort_by(|one, other| {
        let of = |it: &ClaimedJob| (it.lane, it.claim.event.resource.clone());
        of(one).cmp(&of(other))
    });
    let bench = SqlRunner::new(shared, &ask.claim.handler, &ask.program, ask.timeout);
    let (first, mut alone): (Vec<ClaimedJob>, Vec<ClaimedJob>) =
        taken.into_iter().partition(|taken| taken.claim.attempt == 1);
    let mut left = Vec::new();
    if first.len() > 1 {
        let limit = SLICE_MAX + ask.timeout + GRACE;
        match bench.transaction(&first, None, until, limit).await {
            Ok(went) => {
                left.extend(first[went.len()..].iter().cloned());
                for (went, taken) in went.iter().zip(&first) {
                    count(&mut ran, *went, taken);
                }
            }
            Err(why) => {
                tracing::debug!(jobs = first.len(), ?why, "a batch failed; each runs alone");
                alone.splice(0..0, first);
                // A slow job may have used up the time of the slice. Without new time, each slice
                // would end only one job, and the slow job would cost its timeout again.
                until = Instant::now() + SLICE_MAX;
            }
        }
    } else {
        alone.splice(0..0, first);
    }
    let mut busy = HashSet::new();
    for (begun, taken) in alone.iter().enumerate() {
        if (begun > 0 && Instant::now() >= until) || busy.len() >= BUSY_RESOURCES_MAX {
            left.extend(alone[begun..].iter().cloned());
            break;
        }
        let resource = (taken.lane, taken.claim.event.resource.as_ref());
        if busy.contains(&resource) {
            left.push(taken.clone());
            continue;
        }
        match bench.alone(taken, None).await {
            Ok(SoloOutcome::JobOutcome(went)) => count(&mut ran, went, taken),
            Ok(SoloOutcome::Failed(_)) => {
                ran.failed += 1;
                ran.tried.push(TriedJob::of(&taken.claim, bench.verdict_of_failure(taken)));
                ran.events.push(taken.claim.event.id);
            }
            Ok(SoloOutcome::Lost) => {}
            Ok(SoloOutcome::Waits) => {
                left.push(taken.clone());
                busy.insert(resource);
                // The wait used up the time of the slice, but jobs of other resources may run.
                until = Instant::now() + SLICE_MAX;
            }
            Err(outage) => {
                // The job that ran is lost. The jobs that were not begun are given back.
                left.extend(alone[begun + 1..].iter().cloned());
                give_back(shared, &left).await?;
                return Err(outage.into());
            }
        }
    }
    give_back(shared, &left).await?;
    Ok(ran)
}

/// How a job that ran alone ended.
#[derive(Debug)]
pub(super) enum SoloOutcome {
    JobOutcome(JobOutcome),
    /// The job failed, and the failure is recorded.
    Failed(String),
    Lost,
    /// The resource of the job is busy, and the job must still be given back.
    Waits,
}

fn count(ran: &mut SqlRan, went: JobOutcome, taken: &ClaimedJob) {
    match went {
        JobOutcome::Done => {
            ran.done += 1;
            ran.tried.push(TriedJob::of(&taken.claim, TriedVerdict::Succeeded));
        }
        JobOutcome::Guarded => ran.guarded += 1,
    }
    ran.events.push(taken.claim.event.id);
}

/// Runs alone a job that was claimed before.
pub(super) async fn claimed(shared: &Shared, run: &SqlRun) -> Result<Ran, StoreError> {
    let Some((claim_state, handler, taken)) = jobs::claimed(shared, run.job, run.fence).await?
    else {
        return Ok(Ran::Lost);
    };
    match claim_state {
        ClaimState::Leased => {}
        ClaimState::Done => return Ok(Ran::Done),
        ClaimState::Over => return Ok(Ran::Lost),
    }
    if taken.damaged {
        jobs::bury_damaged(shared, &taken).await?;
        return Ok(Ran::Failed(DAMAGED_BODY.to_owned()));
    }
    let bench = SqlRunner::new(shared, &handler, &run.program, run.timeout);
    Ok(match bench.alone(&taken, run.current.as_deref()).await? {
        SoloOutcome::JobOutcome(JobOutcome::Done) => Ran::Done,
        SoloOutcome::JobOutcome(JobOutcome::Guarded) => Ran::Guarded,
        SoloOutcome::Failed(error) => Ran::Failed(error),
        SoloOutcome::Lost => Ran::Lost,
        SoloOutcome::Waits => {
            give_back(shared, &[taken]).await?;
            Ran::Lost
        }
    })
}

async fn give_back(shared: &Shared, left: &[ClaimedJob]) -> Result<(), PgError> {
    if left.is_empty() {
        return Ok(());
    }
    let claims: Vec<_> = left.iter().map(|taken| (taken.claim.job, taken.claim.fence)).collect();
    jobs::give_back(shared, &claims).await
}

/// The state of a run.
struct SqlRunner<'a> {
    shared: &'a Shared,
    program: &'a SqlProgram,
    timeout: Duration,
    order: Option<OrderRule>,
    /// The schedule of the handler, if this node knows it.
    policy: Option<Policy>,
    publishes: bool,
}

impl<'a> SqlRunner<'a> {
    fn new(
        shared: &'a Shared,
        handler: &HandlerRef,
        program: &'a SqlProgram,
        timeout: Duration,
    ) -> Self {
        let spec = shared.handlers.get(handler).map(|known| known.spec.clone());
        let (order, policy) = spec.map_or((None, None), |spec| (spec.order, Some(spec.policy)));
        Self { shared, program, timeout, order, policy, publishes: publishes(program) }
    }

    /// Whether a failure of this job made it a dead letter.
    fn verdict_of_failure(&self, taken: &ClaimedJob) -> TriedVerdict {
        let steps = taken.claim.steps;
        match &self.policy {
            Some(policy) if !policy.ends_with(steps, Retry::Schedule) => TriedVerdict::Failed,
            Some(_) | None => TriedVerdict::Died,
        }
    }

    /// Runs one job in its own transaction, and records its failure if it fails.
    async fn alone(
        &self,
        taken: &ClaimedJob,
        current: Option<&str>,
    ) -> Result<SoloOutcome, PgError> {
        let one = std::slice::from_ref(taken);
        let (job, fence) = (taken.claim.job, taken.claim.fence);
        let mut races = 0;
        let error = loop {
            let until = Instant::now() + SLICE_MAX;
            match self.transaction(one, current, until, self.timeout + GRACE).await {
                Ok(went) => {
                    return Ok(went
                        .first()
                        .map_or(SoloOutcome::Lost, |went| SoloOutcome::JobOutcome(*went)));
                }
                Err(NotRun::Race(_)) if races < RACES_MAX => races += 1,
                Err(NotRun::Statement(error) | NotRun::Race(error)) => break error,
                // An earlier commit may have succeeded although its answer was lost.
                Err(NotRun::Fence) if jobs::is_done(self.shared, job).await? => {
                    return Ok(SoloOutcome::JobOutcome(JobOutcome::Done));
                }
                Err(NotRun::Fence) => return Ok(SoloOutcome::Lost),
                Err(NotRun::Waits) => return Ok(SoloOutcome::Waits),
                Err(NotRun::Outage(error)) => return Err(error),
            }
        };
        match jobs::fail(self.shared, job, fence, &error, Retry::Schedule, None).await? {
            Settlement::Recorded => Ok(SoloOutcome::Failed(error)),
            Settlement::AlreadyDone => Ok(SoloOutcome::JobOutcome(JobOutcome::Done)),
            Settlement::Lost => Ok(SoloOutcome::Lost),
        }
    }

    /// Checks the order rule, runs the effects and records "done" for these jobs, as far as the
    /// time allows, and commits. Returns the outcome of the jobs that were begun.
    async fn transaction(
        &self,
        jobs: &[ClaimedJob],
        current: Option<&str>,
        until: Instant,
        limit: Duration,
    ) -> Result<Vec<JobOutcome>, NotRun> {
        let mut connection = self.shared.pools.handlers.checkout().await.map_err(NotRun::Outage)?;
        let client = connection.raw().map_err(NotRun::Outage)?;
        let waits = self.order.as_ref().map_or(Duration::ZERO, |_| MARKS_WAIT_MAX);
        let inside = tokio::time::timeout(limit + waits, async {
            let went = self.inside(client, jobs, current, until).await?;
            failpoint!("worker.before_commit");
            commit(client).await?;
            failpoint!("worker.after_commit");
            Ok(went)
        });
        let outcome = match inside.await {
            Ok(outcome) => outcome,
            // The connection is closed, because a statement may still run on it.
            Err(_) => return Err(NotRun::Statement(self.timed_out())),
        };
        match &outcome {
            Ok(_) => reset_connection(&mut connection, ConnectionLeftovers::Ended).await,
            // The connection is closed, because its prepared statements may be invalid.
            Err(NotRun::Race(_) | NotRun::Outage(_)) => {}
            Err(NotRun::Statement(_) | NotRun::Fence | NotRun::Waits) => {
                reset_connection(&mut connection, ConnectionLeftovers::Open).await
            }
        }
        outcome
    }

    async fn inside(
        &self,
        client: &Object,
        jobs: &[ClaimedJob],
        current: Option<&str>,
        until: Instant,
    ) -> Result<Vec<JobOutcome>, NotRun> {
        begin(client, self.timeout, "").await?;
        let mut marks = self.marks(client, jobs).await?;
        let statements = self.prepared(client).await?;
        let mut went = Vec::with_capacity(jobs.len());
        let mut done = DoneJobs::default();
        for some in jobs.chunks(SENT_TOGETHER) {
            if !went.is_empty() && Instant::now() >= until {
                break;
            }
            let plans: Vec<OrderDecision> =
                some.iter().map(|job| self.guard(&mut marks, job)).collect();
            let results = self.effects(client, some, &plans, &statements, current).await?;
            for ((job, plan), result) in some.iter().zip(&plans).zip(results) {
                failpoint!("worker.mid_handler", &job.claim.event.key.event_id);
                match plan {
                    OrderDecision::Run => {
                        done.push(job.claim.job, job.claim.fence, result);
                        went.push(JobOutcome::Done);
                    }
                    OrderDecision::Stale | OrderDecision::Hold => went.push(JobOutcome::Guarded),
                }
            }
        }
        finish(self.shared, client, &done).await?;
        Ok(went)
    }

    /// The marks of these jobs' resources, locked until the end of the transaction. Another node may work on one
    /// of the resources for longer than the lock may take (`functions/lock_marks.sql`).
    async fn marks(&self, client: &Object, jobs: &[ClaimedJob]) -> Result<Marks, NotRun> {
        let placed = || jobs.iter().filter(|job| job.position.is_some());
        if self.order.is_none() || placed().next().is_none() {
            return Ok(Marks::default());
        }
        let lanes: Vec<i32> = placed().map(|job| job.lane).collect();
        let resources: Vec<_> = placed().map(|job| job.claim.event.resource.as_deref()).collect();
        let ask = "SELECT lane, resource, place FROM hapax.lock_marks($1, $2)";
        let statement = client.prepare_cached(ask).await.map_err(|error| of_hapax(error.into()))?;
        let rows = client.query(&statement, &[&lanes, &resources]).await.map_err(|error| {
            let waited = [SqlState::LOCK_NOT_AVAILABLE, SqlState::QUERY_CANCELED];
            match error.code() {
                Some(code) if waited.contains(code) => NotRun::Waits,
                Some(_) | None => of_hapax(error.into()),
            }
        })?;
        let mark =
            |row: &Row| ((row.get(0), row.get(1)), row.get::<_, Option<i64>>(2).map(Position));
        Ok(rows.iter().map(mark).collect())
    }

    /// The guard's decision on a job. If the job runs, the mark is moved for the jobs that follow it.
    fn guard(&self, marks: &mut Marks, job: &ClaimedJob) -> OrderDecision {
        let (Some(rule), Some(position), Some(resource)) =
            (&self.order, job.position, &job.claim.event.resource)
        else {
            return OrderDecision::Run;
        };
        let mark = marks.entry((job.lane, resource.clone())).or_default();
        let guard = match job.forced {
            true => OrderDecision::Run,
            false => rule.policy.decide(*mark, position),
        };
        if guard == OrderDecision::Run {
            *mark = Some(rule.policy.after(*mark, position));
        }
        guard
    }

    async fn prepared(&self, client: &Object) -> Result<Vec<Statement>, NotRun> {
        let mut all = Vec::with_capacity(self.program.statements.len());
        for (at, statement) in self.program.statements.iter().enumerate() {
            let types: Vec<Type> = statement.parameters.iter().map(|it| type_of(*it)).collect();
            let prepared = client.prepare_typed_cached(&statement.text, &types).await;
            all.push(prepared.map_err(|error| self.judged(error, at))?);
        }
        Ok(all)
    }

    /// Sends the statements of these jobs one after the other without waiting, then reads the
    /// answers: the result of each job.
    async fn effects(
        &self,
        client: &Object,
        jobs: &[ClaimedJob],
        plans: &[OrderDecision],
        statements: &[Statement],
        current: Option<&str>,
    ) -> Result<Vec<Option<String>>, NotRun> {
        let about = client
            .prepare_cached("SELECT hapax.works_for($1)")
            .await
            .map_err(|error| of_hapax(error.into()))?;
        let aside = client
            .prepare_cached("SELECT hapax.set_aside($1, $2, $3, $4)")
            .await
            .map_err(|error| of_hapax(error.into()))?;
        let now = self.shared.now();
        let mut sent: Vec<SentStatement<'_>> = Vec::new();
        for (job, plan) in jobs.iter().zip(plans) {
            let claim = &job.claim;
            match plan {
                OrderDecision::Run => {
                    if self.publishes {
                        let (job, about) = (claim.job.0, &about);
                        sent.push(SentStatement::of_hapax(async move {
                            client.query(about, &[&job]).await
                        }));
                    }
                    for (at, statement) in self.program.statements.iter().enumerate() {
                        let values = statement
                            .parameters
                            .iter()
                            .map(|parameter| value(*parameter, job, current))
                            .collect::<Result<Vec<_>, _>>()
                            .map_err(NotRun::Statement)?;
                        let prepared = &statements[at];
                        sent.push(SentStatement::of_user(at, async move {
                            let values: Vec<_> = values.iter().map(|value| &**value as _).collect();
                            client.query(prepared, &values).await
                        }));
                    }
                }
                OrderDecision::Stale | OrderDecision::Hold => {
                    let to_hold = *plan == OrderDecision::Hold;
                    let (job, fence, aside) = (claim.job.0, claim.fence.0, &aside);
                    sent.push(SentStatement::of_hapax(async move {
                        client.query(aside, &[&job, &fence, &to_hold, &now]).await
                    }));
                }
            }
        }
        let mut answers = in_order(sent).await.into_iter();
        let mut results = Vec::with_capacity(jobs.len());
        for plan in plans {
            let mut last = None;
            let expected = match plan {
                OrderDecision::Run => self.program.statements.len() + usize::from(self.publishes),
                OrderDecision::Stale | OrderDecision::Hold => 1,
            };
            for (whose, answer) in answers.by_ref().take(expected) {
                let rows = answer.map_err(|error| match whose {
                    Some(at) => self.judged(error, at),
                    None => of_hapax(error.into()),
                })?;
                last = Some(rows);
            }
            match plan {
                OrderDecision::Run => {
                    results.push(last.as_deref().map_or(ValueText::Nothing, result_text::first))
                }
                OrderDecision::Stale | OrderDecision::Hold => {
                    let rows = last.unwrap_or_default();
                    if !only(&rows).map_err(of_hapax)?.get::<_, bool>(0) {
                        return Err(NotRun::Fence);
                    }
                    results.push(ValueText::Nothing);
                }
            }
        }
        as_text(client, results).await
    }

    /// An error of the statement at this position in the program.
    fn judged(&self, error: tokio_postgres::Error, at: usize) -> NotRun {
        let Some(db) = error.as_db_error() else { return of_hapax(error.into()) };
        if *db.code() == SqlState::QUERY_CANCELED {
            return NotRun::Statement(self.timed_out());
        }
        let Some(statement) = self.program.statements.get(at) else {
            return of_hapax(error.into());
        };
        let text = placed(statement, at, db);
        sorted(error, text)
    }

    fn timed_out(&self) -> String {
        format!("timed out after {:?}", self.timeout)
    }
}

/// An error in the words of the database, with its position in the user's text.
fn placed(statement: &SqlStatement, at: usize, db: &DbError) -> String {
    let place = match db.position() {
        Some(ErrorPosition::Original(nth)) => {
            statement.place_of_character(*nth as usize).to_string()
        }
        Some(ErrorPosition::Internal { .. }) | None => format!("line {}", statement.line),
    };
    let (code, message) = (db.code().code(), db.message());
    let text = format!("statement {} ({place}): {message} ({code})", at + 1);
    shortened(&text, ERROR_CHARS_MAX)
}

/// Prepares the statements of each program in a session of handlers. Returns for each program why a
/// statement cannot be prepared.
pub(super) async fn check(
    client_pool: &ClientPool,
    programs: &[Arc<SqlProgram>],
) -> Result<Vec<Option<String>>, PgError> {
    let mut connection = client_pool.checkout().await?;
    let ours = "SELECT to_regnamespace('hapax') IS NOT NULL";
    let has_ours: bool = connection.query(ours, &[]).await?.first().is_some_and(|row| row.get(0));
    let client = connection.raw()?;
    let mut faults = Vec::with_capacity(programs.len());
    for program in programs {
        let mut fault = None;
        for (at, statement) in program.statements.iter().enumerate() {
            let types: Vec<Type> = statement.parameters.iter().map(|it| type_of(*it)).collect();
            let Err(error) = client.prepare_typed(&statement.text, &types).await else { continue };
            let Some(db) = error.as_db_error() else { return Err(error.into()) };
            // An error about Hapax's own schema is ignored if the schema does not exist yet: the
            // first start creates it.
            if has_ours || !db.message().contains("hapax") {
                fault = Some(placed(statement, at, db));
                break;
            }
        }
        faults.push(fault);
    }
    Ok(faults)
}

/// The marks of the resources, as this transaction sees them.
type Marks = HashMap<(i32, String), Option<Position>>;

/// Begins a handler's transaction, whose statements may each take as long as `timeout`; `more` is
/// sent in the same message.
pub(super) async fn begin(client: &Object, timeout: Duration, more: &str) -> Result<(), NotRun> {
    // The answer is awaited before anything else is sent: without a transaction, each later
    // statement would commit itself.
    let begin = format!(
        "BEGIN; SET LOCAL statement_timeout = {}; SET LOCAL lock_timeout = 0; \
         SET LOCAL standard_conforming_strings = on; SET LOCAL hapax.in_handler = 'on'{more}",
        timeout.as_millis().max(1)
    );
    client.batch_execute(&begin).await.map_err(|error| of_hapax(error.into()))
}

/// Checks every deferred constraint before an outcome is recorded. After this, the user's part of
/// the transaction is over, and only statements of Hapax follow.
pub(super) async fn check_constraints(client: &Object) -> Result<(), NotRun> {
    let over = "SET CONSTRAINTS ALL IMMEDIATE; SET LOCAL hapax.in_handler = 'off'";
    let checked = client.batch_execute(over).await;
    checked.map_err(|error| at_commit(&error))
}

/// Checks the constraints, and then records "done" for all of these jobs.
pub(super) async fn finish(
    shared: &Shared,
    client: &Object,
    done: &DoneJobs,
) -> Result<(), NotRun> {
    check_constraints(client).await?;
    if done.jobs.is_empty() {
        return Ok(());
    }
    let statement = client
        .prepare_cached("SELECT hapax.done_all($1, $2, $3, $4)")
        .await
        .map_err(|error| of_hapax(error.into()))?;
    let rows = client
        .query(&statement, &[&done.jobs, &done.fences, &done.results, &shared.now()])
        .await
        .map_err(|error| of_hapax(error.into()))?;
    match only(&rows).map_err(of_hapax)?.get::<_, i32>(0) {
        0 => Ok(()),
        _missed => Err(NotRun::Fence),
    }
}

/// Commits the transaction.
pub(super) async fn commit(client: &Object) -> Result<(), NotRun> {
    client.batch_execute("COMMIT").await.map_err(|error| at_commit(&error))
}

/// The state in which a handler left its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionLeftovers {
    /// A transaction, to be rolled back.
    Open,
    Ended,
}

/// Resets a connection for its next user; if that fails, it is closed.
pub(super) async fn reset_connection(connection: &mut PooledClient, left: ConnectionLeftovers) {
    let Ok(client) = connection.raw() else { return };
    let rolled_back = match left {
        ConnectionLeftovers::Open => client.batch_execute("ROLLBACK").await.is_ok(),
        ConnectionLeftovers::Ended => true,
    };
    let fresh = format!("{RESET}{}", handler_session());
    if rolled_back && client.batch_execute(&fresh).await.is_ok() {
        connection.clean();
    }
}

/// The jobs to be recorded as done.
#[derive(Debug, Default)]
pub(super) struct DoneJobs {
    jobs: Vec<Uuid>,
    fences: Vec<i64>,
    results: Vec<Option<String>>,
}

impl DoneJobs {
    pub(super) fn push(&mut self, job: JobId, fence: Fence, result: Option<String>) {
        self.jobs.push(job.0);
        self.fences.push(fence.0);
        self.results.push(result.map(|result| shortened(&result, RESULT_CHARS_MAX)));
    }
}

type StatementResult = Result<Vec<Row>, tokio_postgres::Error>;

/// A statement that was sent, and its position in the program; `None` for a statement of Hapax.
struct SentStatement<'a> {
    whose: Option<usize>,
    answer: Pin<Box<dyn Future<Output = StatementResult> + Send + 'a>>,
}

impl<'a> SentStatement<'a> {
    fn of_user(at: usize, answer: impl Future<Output = StatementResult> + Send + 'a) -> Self {
        Self { whose: Some(at), answer: Box::pin(answer) }
    }

    fn of_hapax(answer: impl Future<Output = StatementResult> + Send + 'a) -> Self {
        Self { whose: None, answer: Box::pin(answer) }
    }
}

/// Sends all statements in their order, then waits for the answers. A statement is sent when its
/// future is polled for the first time, and the server answers in the order of sending.
async fn in_order(mut sent: Vec<SentStatement<'_>>) -> Vec<(Option<usize>, StatementResult)> {
    let mut answers: Vec<Option<StatementResult>> = sent.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (one, answer) in sent.iter_mut().zip(&mut answers) {
            if let std::task::Poll::Ready(ready) = one.answer.as_mut().poll(context) {
                *answer = Some(ready);
            }
        }
        std::task::Poll::Ready(())
    })
    .await;
    let mut all = Vec::with_capacity(sent.len());
    for (one, answer) in sent.into_iter().zip(answers) {
        let answer = match answer {
            Some(answer) => answer,
            None => one.answer.await,
        };
        all.push((one.whose, answer));
    }
    all
}

/// The results as text. The server formats the values that only it can format.
async fn as_text(client: &Object, results: Vec<ValueText>) -> Result<Vec<Option<String>>, NotRun> {
    let mut all = Vec::with_capacity(results.len());
    for result in results {
        all.push(match result {
            ValueText::Nothing => None,
            ValueText::Text(text) => Some(text),
            ValueText::Of(kind, bytes) => {
                let ask = "SELECT $1::text";
                let statement = client
                    .prepare_typed_cached(ask, &[kind])
                    .await
                    .map_err(|error| of_hapax(error.into()))?;
                let rows = client
                    .query(&statement, &[&RawValue(bytes)])
                    .await
                    .map_err(|error| of_hapax(error.into()))?;
                only(&rows).map_err(of_hapax)?.get(0)
            }
        });
    }
    Ok(all)
}

fn publishes(program: &SqlProgram) -> bool {
    let names = |text: &str| text.to_ascii_lowercase().contains("publish");
    program.statements.iter().any(|statement| names(&statement.text))
}

fn type_of(parameter: SqlParameter) -> Type {
    match parameter.postgres_type() {
        PostgresType::Text => Type::TEXT,
        PostgresType::Timestamptz => Type::TIMESTAMPTZ,
        PostgresType::Int4 => Type::INT4,
    }
}

type BoundValue = Box<dyn ToSql + Send + Sync>;

/// The value of a parameter for this job, or why there is none.
fn value(
    parameter: SqlParameter,
    job: &ClaimedJob,
    current: Option<&str>,
) -> Result<BoundValue, String> {
    let (claim, event) = (&job.claim, &job.claim.event);
    let text = |text: &str| -> Result<BoundValue, String> {
        if text.contains('\0') {
            let name = parameter.name();
            return Err(format!(":{name} holds a NUL character, which text in PostgreSQL cannot"));
        }
        Ok(Box::new(text.to_owned()))
    };
    let maybe = |it: Option<&str>| match it {
        Some(it) => text(it),
        None => Ok(Box::new(None::<String>) as BoundValue),
    };
    match parameter {
        SqlParameter::Tenant => text(event.key.tenant.as_str()),
        SqlParameter::Source => text(event.key.source.as_str()),
        SqlParameter::EventId => text(&event.key.event_id),
        SqlParameter::EventType => maybe(event.event_type.as_deref()),
        SqlParameter::Id => text(&event.id.to_string()),
        SqlParameter::IdempotencyKey => text(&claim.idempotency_key),
        SqlParameter::Body => match std::str::from_utf8(&event.body) {
            Ok(body) => text(body),
            Err(_) => Err(":body is not UTF-8, which text in PostgreSQL must be".to_owned()),
        },
        SqlParameter::ReceivedAt => Ok(Box::new(event.received_at)),
        SqlParameter::OccurredAt => Ok(Box::new(event.occurred_at)),
        SqlParameter::Resource => maybe(event.resource.as_deref()),
        SqlParameter::Attempt => Ok(Box::new(i32::try_from(claim.attempt).unwrap_or(i32::MAX))),
        SqlParameter::Current => maybe(current),
    }
}

/// An error of a statement of Hapax in the handler's transaction.
pub(super) fn of_hapax(error: PgError) -> NotRun {
    match error {
        PgError::Sql(error) => {
            let text = match error.as_db_error() {
                Some(db) => format!("{} ({})", db.message(), db.code().code()),
                None => error.to_string(),
            };
            sorted(error, shortened(&text, ERROR_CHARS_MAX))
        }
        other => NotRun::Outage(other),
    }
}

/// An error of the commit, or of a constraint that was deferred to it. Under a stricter isolation level the server
/// often refuses the commit itself because of a race.
fn at_commit(error: &tokio_postgres::Error) -> NotRun {
    match error.as_db_error() {
        Some(db) if !is_outage(db.code()) => {
            let text = format!("at commit: {} ({})", db.message(), db.code().code());
            if is_race(error) { NotRun::Race(text) } else { NotRun::Statement(text) }
        }
        Some(db) => NotRun::Outage(PgError::Pool(format!("at commit ({})", db.code().code()))),
        None => NotRun::Outage(PgError::Gone),
    }
}

/// Classifies an error by its cause.
fn sorted(error: tokio_postgres::Error, text: String) -> NotRun {
    let Some(db) = error.as_db_error() else { return NotRun::Outage(error.into()) };
    if is_race(&error) {
        NotRun::Race(text)
    } else if is_outage(db.code()) {
        NotRun::Outage(error.into())
    } else {
        NotRun::Statement(text)
    }
}

/// Whether an immediate retry of the same transaction may succeed.
pub(super) fn is_race(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|db| {
        let code = db.code();
        let void_plan = *code == SqlState::INVALID_SQL_STATEMENT_NAME
            || (*code == SqlState::FEATURE_NOT_SUPPORTED && db.message().contains("cached plan"));
        *code == SqlState::T_R_SERIALIZATION_FAILURE
            || *code == SqlState::T_R_DEADLOCK_DETECTED
            || void_plan
    })
}

/// Whether the server caused an error, not the user's statement.
pub(super) fn is_outage(code: &SqlState) -> bool {
    let code = code.code();
    ["08", "53", "57P", "58"].iter().any(|class| code.starts_with(class))
        || ["25006", "XX001", "XX002"].contains(&code)
}
