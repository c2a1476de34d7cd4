//! The [`Work`] half of the store: each method is one act or slice on the writer.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::job::{Fence, HandlerName, JobId};
use hapax_core::lifecycle::Act;
use hapax_core::store::{
    Action, Claim, ClaimAsk, EventId, HandlerRef, HandlerSpec, Held, Horizon, NewJob, Outcome, Ran,
    ReplayAsk, Replayed, Reviewed, SqlAsk, SqlRan, SqlRun, Status, StoreError, Work,
};
use hapax_core::{EventKey, SourceName, Tenant, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use super::SqliteStore;
use super::jobs::{Asked, EventAt, JobRow, place_of};
use super::prune;
use super::row::{self, DONE, Standing, micros, seq_of};
use super::transaction::Transaction;
use super::writer::Writer;

impl Work for SqliteStore {
    async fn announce(&self, handlers: Vec<HandlerSpec>) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                writer.lanes.announce(&writer.conn, handlers, now)
            })
            .await
    }

    async fn claim(&self, ask: ClaimAsk) -> Result<Vec<Claim>, StoreError> {
        self.writer
            .slice(move |writer| {
                let now = writer.now();
                // Synced before anyone works on it: a power cut that took the fence back would
                // give the same number to a second worker outside.
                let tx = Transaction::begin(&writer.conn)?;
                let asked = Asked {
                    handler: &ask.handler,
                    limit: ask.limit,
                    worker: &ask.worker,
                    guard: true,
                };
                let jobs = writer.lanes.claim(&writer.conn, &asked, now)?;
                let mut claims = Vec::with_capacity(jobs.len());
                for job in &jobs {
                    claims.extend(writer.lanes.hand_out(&writer.conn, job, now)?);
                }
                tx.commit()?;
                Ok(claims)
            })
            .await
    }

    async fn renew(&self, job: JobId, fence: Fence, lease: Duration) -> Result<Held, StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                writer.lanes.renew(&writer.conn, job, fence, lease, now)
            })
            .await
    }

    async fn settle(&self, job: JobId, fence: Fence, outcome: Outcome) -> Result<Held, StoreError> {
        self.telling(move |writer| {
            let now = writer.now();
            writer.lanes.settle(&writer.conn, job, fence, &outcome, now)
        })
        .await
    }

    async fn give_back(&self, claims: Vec<(JobId, Fence)>) -> Result<(), StoreError> {
        self.telling(move |writer| {
            let now = writer.now();
            for (job, fence) in claims {
                writer.lanes.give_back(&writer.conn, job, fence, now)?;
            }
            Ok(())
        })
        .await
    }

    async fn is_done(&self, job: JobId) -> Result<bool, StoreError> {
        let (seq, lane) = place_of(job);
        self.writer
            .slice(move |writer| {
                let row = JobRow::find(&writer.conn, seq, lane)?;
                Ok(row.is_some_and(|row| row.state == DONE))
            })
            .await
    }

    async fn run_sql(&self, ask: SqlAsk) -> Result<SqlRan, StoreError> {
        self.writer.slice(move |writer| writer.run_sql(&ask)).await
    }

    async fn run_claimed(&self, run: SqlRun) -> Result<Ran, StoreError> {
        let shared = Arc::clone(&self.shared);
        self.writer
            .slice(move |writer| {
                let ran = writer.run_claimed(&run)?;
                if writer.lanes.take_woken() {
                    shared.arrived.notify_waiters();
                }
                Ok(ran)
            })
            .await
    }

    async fn next_due(&self, handler: &HandlerRef) -> Result<Option<Timestamp>, StoreError> {
        let handler = handler.clone();
        self.writer
            .slice(move |writer| {
                let now = writer.now();
                writer.lanes.next_due(&writer.conn, &handler, now)
            })
            .await
    }

    async fn hurry(&self, event: EventId) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                let Some(event) = Found::by_id(&writer.conn, event)? else { return Ok(()) };
                let now = writer.now();
                writer.lanes.hurry(&writer.conn, event.seq, now)
            })
            .await?;
        self.shared.arrived.notify_waiters();
        Ok(())
    }

    fn work_arrived(&self) -> impl Future<Output = ()> + Send {
        // Created before the first poll, so that no arrival before it is missed.
        self.shared.arrived.notified()
    }

    async fn replay(&self, ask: ReplayAsk) -> Result<Vec<Replayed>, StoreError> {
        let replayed = self
            .writer
            .act(move |writer| {
                let Some(event) = Found::by_id(&writer.conn, ask.event)? else {
                    return Ok(Vec::new());
                };
                // An event that waits for review, or was rejected there, has nothing to run again.
                if event.standing.status() != Status::Ignored {
                    return Ok(Vec::new());
                }
                let now = writer.now();
                let (mut replayed, mut changed) = (Vec::new(), false);
                for job in &ask.handlers {
                    let act = !ask.dry_run;
                    let at = event.at();
                    let effect = writer.lanes.replay(&writer.conn, at, job, ask.force, act, now)?;
                    let Some((effect, changes)) = effect else { continue };
                    replayed.push(Replayed { handler: job.handler.clone(), effect });
                    changed |= changes && act;
                }
                // A replay that changed nothing is not recorded.
                if changed {
                    note_action(&writer.conn, event.seq, "replay", &ask.by)?;
                    writer.shared.recent.remove(&event.key.hash());
                }
                Ok(replayed)
            })
            .await;
        self.shared.arrived.notify_waiters();
        replayed
    }

    async fn approve(
        &self,
        event: EventId,
        jobs: Vec<NewJob>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        let reviewed = self
            .writer
            .act(move |writer| {
                let Some(event) = Found::by_id(&writer.conn, event)? else {
                    return Ok(Reviewed::Unknown);
                };
                let now = writer.now();
                if !writer.out_of_review(event.seq, &event.key, &jobs)?
                    && !writer.lanes.operate(&writer.conn, event.seq, None, &Act::Approve, now)?
                {
                    return event.not_waiting(&writer.conn);
                }
                decided(writer, &event, "approve", &by)
            })
            .await;
        self.shared.arrived.notify_waiters();
        reviewed
    }

    async fn reject(&self, event: EventId, by: Action) -> Result<Reviewed, StoreError> {
        self.writer
            .act(move |writer| {
                let Some(event) = Found::by_id(&writer.conn, event)? else {
                    return Ok(Reviewed::Unknown);
                };
                let out = writer.conn.execute(
                    "UPDATE hapax_event SET state = 2 /* discarded */
                     WHERE seq = ?1 AND state = 1 /* review */",
                    [event.seq],
                )?;
                let now = writer.now();
                if out == 0
                    && !writer.lanes.operate(&writer.conn, event.seq, None, &Act::Reject, now)?
                {
                    return event.not_waiting(&writer.conn);
                }
                decided(writer, &event, "reject", &by)
            })
            .await
    }

    async fn discard(
        &self,
        event: EventId,
        handler: Option<HandlerName>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        self.writer
            .act(move |writer| {
                let Some(event) = Found::by_id(&writer.conn, event)? else {
                    return Ok(Reviewed::Unknown);
                };
                let now = writer.now();
                if !writer.lanes.operate(
                    &writer.conn,
                    event.seq,
                    handler.as_ref(),
                    &Act::Discard,
                    now,
                )? {
                    return event.not_waiting(&writer.conn);
                }
                decided(writer, &event, "discard", &by)
            })
            .await
    }

    async fn prune(&self, horizon: Horizon, limit: usize) -> Result<bool, StoreError> {
        self.writer.behind(move |writer| prune::slice(writer, &horizon, limit)).await
    }

    fn demand(&self) -> Option<u64> {
        Some(self.writer.demand())
    }
}

impl SqliteStore {
    /// Runs an act, then notifies waiting workers of the jobs that it readied.
    async fn telling<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let shared = Arc::clone(&self.shared);
        self.writer
            .slice(move |writer| {
                let acted = writer.in_transaction(act)?;
                if writer.lanes.take_woken() {
                    shared.arrived.notify_waiters();
                }
                Ok(acted)
            })
            .await
    }
}

/// An event that a caller named.
struct Found {
    seq: i64,
    pair: i64,
    key: EventKey,
    standing: Standing,
}

impl Found {
    /// `None` as well for an event that was pruned: there is nothing left of it to work on.
    fn by_id(conn: &Connection, id: EventId) -> rusqlite::Result<Option<Self>> {
        conn.prepare_cached(
            "SELECT e.seq, e.pair, p.tenant, p.source, e.event_id, e.state, e.review
             FROM hapax_event e JOIN hapax_pair p ON p.pair = e.pair
             WHERE e.seq = ?1 AND e.id = ?2 AND e.pruned < 0",
        )?
        .query_row((seq_of(id), id.0.as_bytes()), |row| {
            Ok(Self {
                seq: row.get(0)?,
                pair: row.get(1)?,
                key: EventKey {
                    tenant: Tenant::new(row.get_ref(2)?.as_str()?),
                    source: SourceName::new(row.get_ref(3)?.as_str()?),
                    event_id: row.get_ref(4)?.as_str()?.into(),
                },
                standing: Standing::from_columns(row.get(5)?, row.get(6)?),
            })
        })
        .optional()
    }

    fn at(&self) -> EventAt<'_> {
        EventAt {
            seq: self.seq,
            pair: self.pair,
            tenant: &self.key.tenant,
            source: &self.key.source,
        }
    }

    fn not_waiting(&self, conn: &Connection) -> rusqlite::Result<Reviewed> {
        Ok(Reviewed::NotWaiting(row::status_at(conn, self.seq, self.standing)?))
    }
}

fn decided(writer: &Writer, event: &Found, what: &str, by: &Action) -> rusqlite::Result<Reviewed> {
    note_action(&writer.conn, event.seq, what, by)?;
    writer.shared.recent.remove(&event.key.hash());
    Ok(Reviewed::Decided)
}

fn note_action(conn: &Connection, seq: i64, what: &str, by: &Action) -> rusqlite::Result<()> {
    conn.execute(
        "INSERT INTO hapax_action (event_seq, what, who, reason, at) VALUES (?1, ?2, ?3, ?4, ?5)",
        (seq, what, &by.who, &by.reason, micros(by.at)),
    )?;
    Ok(())
}
