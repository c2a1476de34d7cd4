//! Decisions of operators: replay, approve, reject, discard, pause, resume. Each is one call of the database, and
//! the same commit records the operator and the reason.

use hapax_core::job::HandlerName;
use hapax_core::store::{
    Action, EventId, HandlerRef, NewJob, PauseAnswer, ReplayAsk, ReplayEffect, Replayed, Reviewed,
    Status,
};
use hapax_core::{KeyHash, SourceName, Tenant};
use tokio_postgres::Row;

use super::Shared;
use super::connect::{PgError, PooledClient, retried};
use super::jobs::only;
use super::lane_ids::LaneName;
use super::row::{EventState, hash_of, text};

/// An operator's decision about an event in review.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReviewAction<'a> {
    /// The event runs, with these jobs.
    Approve(&'a [NewJob]),
    Reject,
}

/// The jobs of events, as one array for each column.
#[derive(Debug, Default)]
pub(super) struct JobColumns {
    pub(super) lanes: Vec<i32>,
    pub(super) resources: Vec<Option<String>>,
    pub(super) places: Vec<Option<i64>>,
    pub(super) hopeless: Vec<Option<String>>,
}

impl JobColumns {
    /// Adds the jobs of an event; missing lanes are created.
    pub(super) async fn add(
        &mut self,
        shared: &Shared,
        client: &mut PooledClient,
        tenant: &Tenant,
        source: &SourceName,
        jobs: &[NewJob],
    ) -> Result<(), PgError> {
        for job in jobs {
            let name = LaneName {
                tenant: tenant.clone(),
                source: source.clone(),
                handler: job.handler.clone(),
            };
            self.lanes.push(shared.names.lane(client, &name).await?.lane);
            self.resources.push(job.place.as_ref().map(|place| text(&place.resource)));
            self.places.push(job.place.as_ref().map(|place| place.position.0));
            self.hopeless.push(job.hopeless.as_deref().map(text));
        }
        Ok(())
    }
}

pub(super) async fn replay(shared: &Shared, ask: &ReplayAsk) -> Result<Vec<Replayed>, PgError> {
    retried(|| replay_once(shared, ask)).await
}

async fn replay_once(shared: &Shared, ask: &ReplayAsk) -> Result<Vec<Replayed>, PgError> {
    let mut client = shared.pools.work.checkout().await?;
    let Some(of) = FoundEvent::find(&mut client, ask.event).await? else { return Ok(Vec::new()) };
    let columns = of.columns(shared, &mut client, &ask.handlers).await?;
    let rows = client
        .query(
            "SELECT effect FROM hapax.replay($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
            &[
                &ask.event.0,
                &columns.lanes,
                &columns.resources,
                &columns.places,
                &columns.hopeless,
                &ask.force,
                &ask.dry_run,
                &text(&ask.by.who),
                &ask.by.reason.as_deref().map(text),
                &ask.by.at,
                &shared.now(),
            ],
        )
        .await;
    if !ask.dry_run {
        // If the answer was lost, the replay may be committed.
        of.forget(shared);
    }
    let rows = rows?;
    let replayed = |(new, row): (&NewJob, &Row)| {
        let effect = effect(row.get::<_, Option<i32>>(0)?)?;
        Some(Replayed { handler: new.handler.clone(), effect })
    };
    Ok(ask.handlers.iter().zip(&rows).filter_map(replayed).collect())
}

fn effect(number: i32) -> Option<ReplayEffect> {
    match number {
        0 => Some(ReplayEffect::WouldRun),
        1 => Some(ReplayEffect::AlreadyApplied),
        2 => Some(ReplayEffect::Stale),
        3 => Some(ReplayEffect::AlreadyOpen),
        4 => Some(ReplayEffect::Discarded),
        _ => None,
    }
}

pub(super) async fn decide(
    shared: &Shared,
    event: EventId,
    decision: ReviewAction<'_>,
    by: &Action,
) -> Result<Reviewed, PgError> {
    retried(|| decide_once(shared, event, decision, by)).await
}

async fn decide_once(
    shared: &Shared,
    event: EventId,
    decision: ReviewAction<'_>,
    by: &Action,
) -> Result<Reviewed, PgError> {
    let mut client = shared.pools.work.checkout().await?;
    let Some(of) = FoundEvent::find(&mut client, event).await? else {
        return Ok(Reviewed::Unknown);
    };
    let columns = match decision {
        ReviewAction::Approve(jobs) => of.columns(shared, &mut client, jobs).await?,
        ReviewAction::Reject => JobColumns::default(),
    };
    let rows = client
        .query(
            "SELECT hapax.decide($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            &[
                &event.0,
                &matches!(decision, ReviewAction::Reject),
                &columns.lanes,
                &columns.resources,
                &columns.places,
                &columns.hopeless,
                &text(&by.who),
                &by.reason.as_deref().map(text),
                &by.at,
                &shared.now(),
            ],
        )
        .await;
    if of.was_changed(shared, rows)? {
        return Ok(Reviewed::Decided);
    }
    Ok(Reviewed::NotWaiting(status(&mut client, event).await?))
}

pub(super) async fn discard(
    shared: &Shared,
    event: EventId,
    handler: Option<&HandlerName>,
    by: &Action,
) -> Result<Reviewed, PgError> {
    retried(|| async {
        let mut client = shared.pools.work.checkout().await?;
        let Some(of) = FoundEvent::find(&mut client, event).await? else {
            return Ok(Reviewed::Unknown);
        };
        let rows = client
            .query(
                "SELECT hapax.discard($1, $2, $3, $4, $5, $6)",
                &[
                    &event.0,
                    &handler.map(|handler| text(handler.as_str())),
                    &text(&by.who),
                    &by.reason.as_deref().map(text),
                    &by.at,
                    &shared.now(),
                ],
            )
            .await;
        if of.was_changed(shared, rows)? {
            return Ok(Reviewed::Decided);
        }
        Ok(Reviewed::NotWaiting(status(&mut client, event).await?))
    })
    .await
}

/// Pauses a handler, or ends its pause if `by` is `None`.
pub(super) async fn set_paused(
    shared: &Shared,
    handler: &HandlerRef,
    by: Option<&Action>,
) -> Result<PauseAnswer, PgError> {
    retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        let (source, name) = (text(handler.source.as_str()), text(handler.handler.as_str()));
        let (at, who, reason) = match by {
            Some(Action { who, reason, at }) => {
                (Some(*at), Some(text(who)), reason.as_deref().map(text))
            }
            None => (None, None, None),
        };
        let sql = "SELECT hapax.set_paused($1, $2, $3, $4, $5)";
        let rows = client.query(sql, &[&source, &name, &at, &who, &reason]).await?;
        Ok(match only(&rows)?.get::<_, Option<bool>>(0) {
            Some(true) => PauseAnswer::Changed,
            Some(false) => PauseAnswer::AlreadySo,
            None => PauseAnswer::Unknown,
        })
    })
    .await
}

/// An event that an operator named, if it is not pruned.
struct FoundEvent {
    tenant: Tenant,
    source: SourceName,
    hash: KeyHash,
}

impl FoundEvent {
    async fn find(client: &mut PooledClient, event: EventId) -> Result<Option<Self>, PgError> {
        let rows = client
            .query(
                "SELECT e.tenant, e.source, e.hash FROM hapax.event e \
                 JOIN hapax.body b ON b.id = e.id WHERE e.id = $1",
                &[&event.0],
            )
            .await?;
        Ok(rows.first().map(|row| Self {
            tenant: Tenant::new(row.get::<_, &str>(0)),
            source: SourceName::new(row.get::<_, &str>(1)),
            hash: hash_of(row.get(2)),
        }))
    }

    /// The answer of an act: whether it changed the event. The event is removed from memory and Redis in any case:
    /// if the answer was lost, the act may be committed, and if it changed nothing, an act before it may have.
    fn was_changed(
        &self,
        shared: &Shared,
        answer: Result<Vec<Row>, PgError>,
    ) -> Result<bool, PgError> {
        self.forget(shared);
        Ok(only(&answer?)?.get(0))
    }

    /// Removes the event from memory and Redis.
    fn forget(&self, shared: &Shared) {
        shared.remove_from_caches(std::slice::from_ref(&self.hash));
    }

    /// The columns to write for these jobs.
    async fn columns(
        &self,
        shared: &Shared,
        client: &mut PooledClient,
        jobs: &[NewJob],
    ) -> Result<JobColumns, PgError> {
        let mut columns = JobColumns::default();
        columns.add(shared, client, &self.tenant, &self.source, jobs).await?;
        Ok(columns)
    }
}

/// The status of an event that was not in review.
async fn status(client: &mut PooledClient, event: EventId) -> Result<Status, PgError> {
    let sql = concat!(include_str!("sql/known.sql"), " WHERE e.id = $1");
    let rows = client.query(sql, &[&event.0]).await?;
    let row = only(&rows)?;
    Ok(EventState::new(row.get(3), row.get(4), row.get(5), row.get(6)).status)
}
