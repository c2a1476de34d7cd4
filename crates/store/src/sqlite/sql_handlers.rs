//! SQL handlers: runs the statements, "done" and published messages in one transaction.
//!
//! First attempts share a transaction, without savepoints. Any error, a statement that ends the
//! transaction (`INSERT OR ROLLBACK`, `RAISE(ROLLBACK)`, an interrupt) or a failed commit rolls
//! back the whole transaction. Each job then runs alone under the same claim. A job that fails
//! alone uses a step of its schedule. Jobs that a slice has no time to begin are given back.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::Timestamp;
use hapax_core::failpoint;
use hapax_core::handler::{SqlParameter, SqlProgram, SqlStatement};
use hapax_core::job::{Fence, JobId, Phase, Retry};
use hapax_core::lifecycle::Act;
use hapax_core::order::OrderDecision;
use hapax_core::store::{Claim, DAMAGED_BODY, Ran, SqlAsk, SqlRan, SqlRun, TriedJob, TriedVerdict};
use rusqlite::ffi::SQLITE_CORRUPT_VTAB;
use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{CachedStatement, Connection, ErrorCode, OpenFlags, params_from_iter};

use super::jobs::{ClaimParameters, JobRow, Lanes, Reported, row_and_lane};
use super::order;
use super::outbox::{For, Outbox};
use super::row::{DONE, LEASED};
use super::sandbox::Sandbox;
use super::transaction::Transaction;
use crate::limits::{SQL_SLICE_MAX, STATEMENT_VALUE_BYTES_MAX};

/// The parts of the writer that a run borrows.
pub(super) struct SqlRunner<'a> {
    pub(super) conn: &'a Connection,
    pub(super) lanes: &'a mut Lanes,
    pub(super) outbox: &'a mut Outbox,
    pub(super) sandbox: &'a Sandbox,
    pub(super) now: &'a dyn Fn() -> Timestamp,
    /// Jobs that are claimed and not settled. The writer gives these jobs back if the database fails.
    pub(super) begun: &'a mut Vec<(JobId, Fence)>,
}

/// The outcome of one job.
enum JobOutcome {
    Done,
    Guarded,
}

/// The outcome of one job before its "done" is written.
enum Worked {
    /// The effects are in the open transaction. The result of the last statement, if it has one.
    Ran(Option<String>),
    /// The order rule does not allow the job now.
    Guarded,
}

/// The outcome of a batch.
enum SharedRun {
    Ran(SqlRan),
    /// Nothing of the batch is committed. `by` is the place of the job that failed, or `None` if
    /// the commit failed.
    Undone {
        by: Option<usize>,
    },
}

/// The statements to run for a job.
struct Effects<'a> {
    program: &'a SqlProgram,
    timeout: Duration,
    current: Option<&'a str>,
}

impl<'a> Effects<'a> {
    fn of(ask: &'a SqlAsk) -> Self {
        Self { program: &ask.program, timeout: ask.timeout, current: None }
    }
}

/// Why one job, or its whole batch, did not run.
enum NotRun {
    /// The statements are wrong, slow, or violate a constraint.
    Statement(String),
    /// The database itself failed.
    Store(rusqlite::Error),
}

impl<'a> SqlRunner<'a> {
    /// Claims and runs one slice. An error is the database's own: nothing of the slice is lost, and the
    /// writer gives its claims back once it can write again.
    pub(super) fn run(&mut self, ask: &SqlAsk) -> rusqlite::Result<SqlRan> {
        let mut until = Instant::now() + SQL_SLICE_MAX;
        let mut claims = self.claim(ask)?;
        let mut ran = SqlRan::default();
        self.begun.extend(claims.iter().map(|(_, claim)| (claim.job, claim.fence)));
        if !claims.is_empty() {
            failpoint!("worker.after_claim");
        }
        if let [(_, claim)] = &claims[..]
            && claim.alone
        {
            ran.alone = Some(Box::new(claim.clone()));
            return Ok(ran);
        }
        if claims.len() > 1 {
            match self.together(&claims, ask, until)? {
                SharedRun::Ran(together) => return Ok(together),
                SharedRun::Undone { by } => {
                    tracing::debug!(jobs = claims.len(), "a batch failed; each runs alone");
                    // The job that failed the batch runs first, so that it cannot fail the next
                    // batches too: a slow statement would cost all the others its timeout each
                    // time.
                    if let Some(culprit) = by {
                        claims[..=culprit].rotate_right(1);
                    }
                    until = Instant::now() + SQL_SLICE_MAX;
                }
            }
        }
        for (begun, (job, claim)) in claims.iter().enumerate() {
            if begun > 0 && Instant::now() >= until {
                let tx = Transaction::begin_unsynced(self.conn)?;
                self.give_back(&claims[begun..])?;
                tx.commit()?;
                break;
            }
            match self.alone(job, claim, &Effects::of(ask))? {
                Ok(JobOutcome::Done) => count_done(&mut ran, claim),
                Ok(JobOutcome::Guarded) => ran.guarded += 1,
                Err(error) => {
                    let verdict = self.fail(job, &error)?;
                    ran.failed += 1;
                    ran.tried.push(TriedJob::of(claim, verdict));
                }
            }
            ran.events.push(claim.event.id);
        }
        Ok(ran)
    }

    /// Runs a job that was claimed before, if its fence still holds.
    pub(super) fn run_claimed(&mut self, run: &SqlRun) -> rusqlite::Result<Ran> {
        let (seq, lane) = row_and_lane(run.job);
        let job = JobRow::find(self.conn, seq, lane)?.filter(|job| job.fence == run.fence.0);
        let job = match job {
            Some(job) if job.state == LEASED => job,
            Some(job) if job.state == DONE => return Ok(Ran::Done),
            Some(_) | None => return Ok(Ran::Lost),
        };
        let tx = Transaction::begin_unsynced(self.conn)?;
        let claim = self.lanes.claim_with_body(self.conn, &job, (self.now)())?;
        tx.commit()?;
        let Some(claim) = claim else { return Ok(Ran::Failed(DAMAGED_BODY.to_owned())) };
        let effects = Effects {
            program: &run.program,
            timeout: run.timeout,
            current: run.current.as_deref(),
        };
        match self.alone(&job, &claim, &effects)? {
            Ok(JobOutcome::Done) => Ok(Ran::Done),
            Ok(JobOutcome::Guarded) => Ok(Ran::Guarded),
            Err(error) => {
                self.fail(&job, &error)?;
                Ok(Ran::Failed(error))
            }
        }
    }

    /// Claims: attempt+1 and a new fence are committed before the work. That commit need not
    /// survive a power cut by itself, because the effects would be lost with it.
    fn claim(&mut self, ask: &SqlAsk) -> rusqlite::Result<Vec<(JobRow, Claim)>> {
        let now = (self.now)();
        let tx = Transaction::begin_unsynced(self.conn)?;
        let asked = ClaimParameters {
            handler: &ask.claim.handler,
            limit: ask.claim.limit,
            worker: &ask.claim.worker,
            guard: false,
        };
        let jobs = self.lanes.claim(self.conn, &asked, now)?;
        let mut claims = Vec::with_capacity(jobs.len());
        for job in jobs {
            if let Some(claim) = self.lanes.claim_with_body(self.conn, &job, now)? {
                claims.push((job, claim));
            }
        }
        tx.commit()?;
        Ok(claims)
    }

    /// Claimed, and not begun.
    fn give_back(&mut self, claims: &[(JobRow, Claim)]) -> rusqlite::Result<()> {
        let now = (self.now)();
        for (_, claim) in claims {
            self.lanes.give_back(self.conn, claim.job, claim.fence, now)?;
        }
        Ok(())
    }

    /// All jobs in one transaction, as far as the time allows.
    fn together(
        &mut self,
        claims: &[(JobRow, Claim)],
        ask: &SqlAsk,
        until: Instant,
    ) -> rusqlite::Result<SharedRun> {
        let tx = Transaction::begin(self.conn)?;
        let mut ran = SqlRan::default();
        let mut alike = Vec::with_capacity(claims.len());
        let mut compiled = Vec::new();
        for (begun, (job, claim)) in claims.iter().enumerate() {
            if begun > 0 && Instant::now() >= until {
                self.give_back(&claims[begun..])?;
                break;
            }
            match self.work(job, claim, &Effects::of(ask), &mut compiled) {
                Ok(Worked::Ran(None)) if job.place.is_none() => {
                    alike.push(job);
                    count_done(&mut ran, claim);
                }
                Ok(Worked::Ran(result)) => {
                    self.done(job, result.as_deref())?;
                    count_done(&mut ran, claim);
                }
                Ok(Worked::Guarded) => ran.guarded += 1,
                Err(NotRun::Statement(_)) => return Ok(SharedRun::Undone { by: Some(begun) }),
                Err(NotRun::Store(error)) => return Err(error),
            }
            ran.events.push(claim.event.id);
        }
        self.lanes.all_done(self.conn, alike, (self.now)())?;
        failpoint!("worker.before_commit");
        match tx.commit() {
            Ok(()) => {
                failpoint!("worker.after_commit");
                Ok(SharedRun::Ran(ran))
            }
            Err(error) if is_the_users_at_commit(&error) => Ok(SharedRun::Undone { by: None }),
            Err(error) => Err(error),
        }
    }

    fn alone(
        &mut self,
        job: &JobRow,
        claim: &Claim,
        effects: &Effects<'_>,
    ) -> rusqlite::Result<Result<JobOutcome, String>> {
        let tx = Transaction::begin(self.conn)?;
        let ran = match self.work(job, claim, effects, &mut Vec::new()) {
            Ok(Worked::Ran(result)) => {
                self.done(job, result.as_deref())?;
                JobOutcome::Done
            }
            Ok(Worked::Guarded) => JobOutcome::Guarded,
            Err(NotRun::Statement(error)) => return Ok(Err(error)),
            Err(NotRun::Store(error)) => return Err(error),
        };
        failpoint!("worker.before_commit");
        match tx.commit() {
            Ok(()) => {
                failpoint!("worker.after_commit");
                Ok(Ok(ran))
            }
            Err(error) if is_the_users_at_commit(&error) => Ok(Err(format!("at commit: {error}"))),
            Err(error) => Err(error),
        }
    }

    /// Checks the order and applies the effects of one job, in the open transaction. The caller writes "done"
    /// in this transaction.
    fn work(
        &mut self,
        job: &JobRow,
        claim: &Claim,
        effects: &Effects<'_>,
        compiled: &mut Vec<CachedStatement<'a>>,
    ) -> Result<Worked, NotRun> {
        let now = (self.now)();
        if self.is_set_aside(job, now).map_err(NotRun::Store)? {
            return Ok(Worked::Guarded);
        }
        let result = self.effects(claim, effects, compiled)?;
        if self.sandbox.may_publish() {
            let of = For { tenant: &claim.event.key.tenant, event: Some(job.seq) };
            self.outbox
                .publish_staged(self.conn, of, now)
                .map_err(NotRun::Store)?
                .map_err(NotRun::Statement)?;
        }
        failpoint!("worker.mid_handler", &claim.event.key.event_id);
        Ok(Worked::Ran(result))
    }

    /// Records "done" in the transaction of the effects.
    fn done(&mut self, job: &JobRow, result: Option<&str>) -> rusqlite::Result<()> {
        let done = self.lanes.done(self.conn, job, result, None, (self.now)())?;
        assert!(done.is_ok(), "the writer has just seen this fence hold");
        Ok(())
    }

    /// Whether the order rule does not allow the job now. In that case the job is set aside.
    fn is_set_aside(&mut self, job: &JobRow, now: Timestamp) -> rusqlite::Result<bool> {
        let order = self.lanes.spec_of(job.lane).and_then(|spec| spec.order.as_ref());
        let (Some(rule), Some(place)) = (order.cloned(), &job.place) else { return Ok(false) };
        let hold = match order::guard(self.conn, job, &rule.policy, place)? {
            OrderDecision::Run => return Ok(false),
            OrderDecision::Stale => None,
            OrderDecision::Hold => Some(rule.gaps.hold),
        };
        let aside = Act::SetAside { hold };
        let aside = self.lanes.act(self.conn, job, &aside, Reported::default(), now)?;
        let aside = aside.expect("the writer has just claimed it");
        if aside.phase == Phase::Held {
            order::limit_held(self.conn, self.lanes, job, &rule, now)?;
        }
        Ok(true)
    }

    /// Runs the statements of one job. `compiled` holds those of the jobs before it in the same transaction.
    fn effects(
        &mut self,
        claim: &Claim,
        effects: &Effects<'_>,
        compiled: &mut Vec<CachedStatement<'a>>,
    ) -> Result<Option<String>, NotRun> {
        let Effects { program, timeout, current } = *effects;
        let confined = self.sandbox.confine(self.conn, timeout).map_err(NotRun::Store)?;
        let mut result = None;
        for (nth, statement) in (1..).zip(&program.statements) {
            let place = || format!("statement {nth} (line {})", statement.line);
            let ran = compile(self.conn, statement, nth - 1, compiled)
                .and_then(|compiled| execute(compiled, statement, claim, current));
            match ran {
                Ok(first) => result = first,
                Err(error) => {
                    let slow = confined.timed_out();
                    drop(confined);
                    return Err(judge(error, &place(), slow, timeout));
                }
            }
            if self.conn.is_autocommit() {
                return Err(NotRun::Statement(format!("{}: ended the transaction", place())));
            }
            // The last step of a statement may have passed the deadline unchecked.
            if confined.timed_out() {
                return Err(timed_out(&place(), timeout));
            }
        }
        Ok(result)
    }

    fn fail(&mut self, job: &JobRow, error: &str) -> rusqlite::Result<TriedVerdict> {
        let now = (self.now)();
        let tx = Transaction::begin(self.conn)?;
        let failed = self.lanes.fail(self.conn, job, error, Retry::Schedule, None, now)?;
        let change = failed.expect("the writer has just seen this fence hold");
        tx.commit()?;
        Ok(if change.phase == Phase::Dead { TriedVerdict::Died } else { TriedVerdict::Failed })
    }
}

fn count_done(ran: &mut SqlRan, claim: &Claim) {
    ran.done += 1;
    ran.tried.push(TriedJob::of(claim, TriedVerdict::Succeeded));
}

/// How long the check of all statements may take.
const CHECK_MAX: Duration = Duration::from_secs(10);

/// For each program, why its statements cannot be prepared; `None` if they can.
pub(super) fn check(
    file: &Path,
    programs: &[Arc<SqlProgram>],
) -> rusqlite::Result<Vec<Option<String>>> {
    let is_there = file.exists();
    let mut conn = if is_there {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        Connection::open_with_flags(file, flags)?
    } else {
        Connection::open_in_memory()?
    };
    conn.busy_timeout(Duration::from_secs(5))?;
    let ours = "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'hapax_publish')";
    let has_ours: bool = conn.query_row(ours, [], |row| row.get(0))?;
    let sandbox = Sandbox::on(&mut conn, STATEMENT_VALUE_BYTES_MAX)?;
    let confined = sandbox.confine(&conn, CHECK_MAX)?;
    let fault = |program: &Arc<SqlProgram>| {
        (1..).zip(&program.statements).find_map(|(nth, statement)| {
            let error = conn.prepare(&statement.text).err()?;
            let (place, message) = match &error {
                rusqlite::Error::SqlInputError { msg, offset, .. } => {
                    let at = usize::try_from(*offset).ok();
                    let place = at.map(|at| statement.place_of_byte(at).to_string());
                    (place, msg.clone())
                }
                other => (None, other.to_string()),
            };
            // A table may be missing before the first start: Hapax creates its own tables then, and
            // the user may create theirs.
            let missing = message.contains("no such ");
            if missing && (!is_there || (!has_ours && message.contains("hapax_"))) {
                return None;
            }
            let place = place.unwrap_or_else(|| format!("line {}", statement.line));
            Some(format!("statement {nth} ({place}): {message}"))
        })
    };
    let faults = programs.iter().map(fault).collect();
    drop(confined);
    Ok(faults)
}

/// The statement at this place of its program, compiled if it is not yet.
fn compile<'a, 'c>(
    conn: &'c Connection,
    statement: &SqlStatement,
    place: usize,
    compiled: &'a mut Vec<CachedStatement<'c>>,
) -> rusqlite::Result<&'a mut CachedStatement<'c>> {
    if compiled.len() == place {
        // Statements are cached by their text, and authorized only when they are compiled. A handler's
        // statement must never match a cached statement of Hapax, which was compiled without the
        // limits.
        compiled.push(conn.prepare_cached(&format!("/* handler */ {}", statement.text))?);
    }
    Ok(&mut compiled[place])
}

/// Runs one statement to its end and returns its first value as text.
fn execute(
    compiled: &mut CachedStatement<'_>,
    statement: &SqlStatement,
    claim: &Claim,
    current: Option<&str>,
) -> rusqlite::Result<Option<String>> {
    let values = statement.parameters.iter().map(|parameter| value(*parameter, claim, current));
    let mut rows = compiled.query(params_from_iter(values))?;
    let mut first = None;
    while let Some(row) = rows.next()? {
        if first.is_none() {
            first = match row.get::<_, Value>(0)? {
                Value::Null => None,
                Value::Integer(number) => Some(number.to_string()),
                Value::Real(number) => Some(number.to_string()),
                Value::Text(text) => Some(text),
                Value::Blob(bytes) => Some(format!("{} bytes", bytes.len())),
            };
        }
    }
    Ok(first)
}

fn value<'a>(
    parameter: SqlParameter,
    claim: &'a Claim,
    current: Option<&'a str>,
) -> ToSqlOutput<'a> {
    let event = &claim.event;
    let text = |text: &'a str| ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes()));
    let optional = |it: Option<&'a str>| it.map_or(ToSqlOutput::Owned(Value::Null), text);
    let made = |text: String| ToSqlOutput::Owned(Value::Text(text));
    match parameter {
        SqlParameter::Tenant => text(event.key.tenant.as_str()),
        SqlParameter::Source => text(event.key.source.as_str()),
        SqlParameter::EventId => text(&event.key.event_id),
        SqlParameter::EventType => optional(event.event_type.as_deref()),
        SqlParameter::Id => made(event.id.to_string()),
        SqlParameter::IdempotencyKey => text(&claim.idempotency_key),
        SqlParameter::Body => match std::str::from_utf8(&event.body) {
            Ok(body) => text(body),
            Err(_) => ToSqlOutput::Borrowed(ValueRef::Blob(&event.body)),
        },
        SqlParameter::ReceivedAt => made(event.received_at.to_string()),
        SqlParameter::OccurredAt => match event.occurred_at {
            Some(at) => made(at.to_string()),
            None => ToSqlOutput::Owned(Value::Null),
        },
        SqlParameter::Resource => optional(event.resource.as_deref()),
        SqlParameter::Attempt => ToSqlOutput::Owned(Value::Integer(claim.attempt.into())),
        SqlParameter::Current => optional(current),
    }
}

fn judge(error: rusqlite::Error, place: &str, slow: bool, timeout: Duration) -> NotRun {
    if slow {
        return timed_out(place, timeout);
    }
    if is_the_users(&error) {
        return NotRun::Statement(format!("{place}: {error}"));
    }
    NotRun::Store(error)
}

fn timed_out(place: &str, timeout: Duration) -> NotRun {
    NotRun::Statement(format!("{place}: timed out after {timeout:?}"))
}

/// Whether the user's statement caused an error, not the disk. A statement that needs too much
/// memory is the user's error, and a virtual table with wrong content does not mean that the file
/// is damaged.
pub(super) fn is_the_users(error: &rusqlite::Error) -> bool {
    match error.sqlite_error_code() {
        Some(
            ErrorCode::DiskFull
            | ErrorCode::SystemIoFailure
            | ErrorCode::CannotOpen
            | ErrorCode::NotADatabase
            | ErrorCode::DatabaseBusy
            | ErrorCode::DatabaseLocked
            | ErrorCode::ReadOnly,
        ) => false,
        Some(ErrorCode::DatabaseCorrupt) => is_of_a_virtual_table(error),
        Some(_) | None => true,
    }
}

/// Whether an error at a commit is the user's. An error for lack of memory is not the user's, because Hapax's
/// own part of the commit had no memory either.
pub(super) fn is_the_users_at_commit(error: &rusqlite::Error) -> bool {
    is_the_users(error) && error.sqlite_error_code() != Some(ErrorCode::OutOfMemory)
}

fn is_of_a_virtual_table(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|it| it.extended_code == SQLITE_CORRUPT_VTAB)
}

#[cfg(test)]
mod tests {
    use rusqlite::ffi;

    use super::*;

    #[test]
    fn a_statement_that_asks_too_much_is_the_users_and_a_failing_disk_is_not() {
        // If the error of one user's statement counted as the store's own, the writer would drop
        // all memory and reopen the file, again and again.
        let of = |code| rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
        let check = |code, statement, commit| {
            let error = of(code);
            let found = (is_the_users(&error), is_the_users_at_commit(&error));
            assert_eq!(found, (statement, commit), "{error}");
        };
        check(ffi::SQLITE_NOMEM, true, false);
        check(ffi::SQLITE_CORRUPT_VTAB, true, true);
        check(ffi::SQLITE_CONSTRAINT_FOREIGNKEY, true, true);
        check(ffi::SQLITE_TOOBIG, true, true);
        check(ffi::SQLITE_INTERRUPT, true, true);
        check(ffi::SQLITE_CORRUPT, false, false);
        check(ffi::SQLITE_IOERR_FSYNC, false, false);
        check(ffi::SQLITE_FULL, false, false);
    }
}
