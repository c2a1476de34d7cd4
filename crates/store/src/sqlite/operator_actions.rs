//! The [`Operate`] half of the store: decisions of operators. Each is one act on the writer, with the
//! record of the action in the same commit.

use hapax_core::job::HandlerName;
use hapax_core::lifecycle::Act;
use hapax_core::store::{
    Action, EventId, HandlerRef, JobScope, NewJob, Operate, PauseAnswer, ReplayAsk, Replayed,
    Reviewed, Status, StoreError,
};
use hapax_core::{EventKey, SourceName, Tenant};
use rusqlite::{Connection, OptionalExtension};

use super::SqliteStore;
use super::jobs::EventAt;
use super::row::{self, EventState, micros, seq_of};
use super::writer::Writer;

impl Operate for SqliteStore {
    async fn replay(&self, ask: ReplayAsk) -> Result<Vec<Replayed>, StoreError> {
        let replayed = self.writer.act(move |writer| writer.replay(&ask, JobScope::ALL)).await;
        self.shared.arrived.notify_waiters();
        replayed
    }

    async fn approve(
        &self,
        event: EventId,
        jobs: Vec<NewJob>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        let reviewed =
            self.writer.act(move |writer| writer.approve(event, &jobs, JobScope::ALL, &by)).await;
        self.shared.arrived.notify_waiters();
        reviewed
    }

    async fn reject(&self, event: EventId, by: Action) -> Result<Reviewed, StoreError> {
        self.writer.act(move |writer| writer.reject(event, JobScope::ALL, &by)).await
    }

    async fn discard(
        &self,
        event: EventId,
        handler: Option<HandlerName>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        self.writer
            .act(move |writer| writer.discard(event, handler.as_ref(), JobScope::ALL, &by))
            .await
    }

    async fn pause_handler(
        &self,
        handler: HandlerRef,
        by: Action,
    ) -> Result<PauseAnswer, StoreError> {
        let changed =
            self.writer.act(move |writer| writer.lanes.pause(&writer.conn, handler, &by)).await?;
        Ok(if changed { PauseAnswer::Changed } else { PauseAnswer::AlreadySo })
    }

    async fn resume_handler(
        &self,
        handler: HandlerRef,
        _by: Action,
    ) -> Result<PauseAnswer, StoreError> {
        let changed =
            self.writer.act(move |writer| writer.lanes.resume(&writer.conn, &handler)).await?;
        self.shared.arrived.notify_waiters();
        Ok(if changed { PauseAnswer::Changed } else { PauseAnswer::AlreadySo })
    }
}

/// Each decision runs in a transaction that its caller opens and commits.
impl Writer {
    pub(super) fn replay(
        &mut self,
        ask: &ReplayAsk,
        scope: JobScope,
    ) -> rusqlite::Result<Vec<Replayed>> {
        let Some(event) = FoundEvent::by_id(&self.conn, ask.event)? else {
            return Ok(Vec::new());
        };
        // An event that waits for review, or was rejected there, has nothing to run again.
        if event.event_state.status() != Status::Ignored {
            return Ok(Vec::new());
        }
        let now = self.now();
        let (mut replayed, mut changed) = (Vec::new(), false);
        for job in &ask.handlers {
            let effect = self.lanes.replay(&self.conn, event.at(), job, ask, scope, now)?;
            let Some((effect, changes)) = effect else { continue };
            replayed.push(Replayed { handler: job.handler.clone(), effect });
            changed |= changes && !ask.dry_run;
        }
        // A replay that changed nothing is not recorded.
        if changed {
            note_action(&self.conn, event.seq, "replay", &ask.by)?;
            self.remove_from_memory(event.key.hash());
        }
        Ok(replayed)
    }

    pub(super) fn approve(
        &mut self,
        event: EventId,
        jobs: &[NewJob],
        scope: JobScope,
        by: &Action,
    ) -> rusqlite::Result<Reviewed> {
        let Some(event) = FoundEvent::by_id(&self.conn, event)? else {
            return Ok(Reviewed::Unknown);
        };
        let now = self.now();
        if !self.out_of_review(event.seq, &event.key, jobs)?
            && !self.lanes.operate(&self.conn, event.seq, None, &Act::Approve, scope, now)?
        {
            return event.not_waiting(&self.conn);
        }
        decided(self, &event, "approve", by)
    }

    pub(super) fn reject(
        &mut self,
        event: EventId,
        scope: JobScope,
        by: &Action,
    ) -> rusqlite::Result<Reviewed> {
        let Some(event) = FoundEvent::by_id(&self.conn, event)? else {
            return Ok(Reviewed::Unknown);
        };
        let out = self.conn.execute(
            "UPDATE hapax_event SET state = 2 /* discarded */
             WHERE seq = ?1 AND state = 1 /* review */",
            [event.seq],
        )?;
        let now = self.now();
        if out == 0 && !self.lanes.operate(&self.conn, event.seq, None, &Act::Reject, scope, now)? {
            return event.not_waiting(&self.conn);
        }
        decided(self, &event, "reject", by)
    }

    pub(super) fn discard(
        &mut self,
        event: EventId,
        handler: Option<&HandlerName>,
        scope: JobScope,
        by: &Action,
    ) -> rusqlite::Result<Reviewed> {
        let Some(event) = FoundEvent::by_id(&self.conn, event)? else {
            return Ok(Reviewed::Unknown);
        };
        let now = self.now();
        if !self.lanes.operate(&self.conn, event.seq, handler, &Act::Discard, scope, now)? {
            return event.not_waiting(&self.conn);
        }
        decided(self, &event, "discard", by)
    }
}

/// An event that a caller named by its id.
pub(super) struct FoundEvent {
    pub(super) seq: i64,
    pair: i64,
    key: EventKey,
    event_state: EventState,
}

impl FoundEvent {
    /// The event, unless it is unknown or pruned.
    pub(super) fn by_id(conn: &Connection, id: EventId) -> rusqlite::Result<Option<Self>> {
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
                event_state: EventState::from_columns(row.get(5)?, row.get(6)?),
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
        Ok(Reviewed::NotWaiting(row::status_at(conn, self.seq, self.event_state)?))
    }
}

fn decided(
    writer: &mut Writer,
    event: &FoundEvent,
    what: &str,
    by: &Action,
) -> rusqlite::Result<Reviewed> {
    note_action(&writer.conn, event.seq, what, by)?;
    writer.remove_from_memory(event.key.hash());
    Ok(Reviewed::Decided)
}

fn note_action(conn: &Connection, seq: i64, what: &str, by: &Action) -> rusqlite::Result<()> {
    conn.execute(
        "INSERT INTO hapax_action (event_seq, what, who, reason, at) VALUES (?1, ?2, ?3, ?4, ?5)",
        (seq, what, &by.who, &by.reason, micros(by.at)),
    )?;
    Ok(())
}
