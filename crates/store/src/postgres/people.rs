//! What a person decides: replay, approve, reject. Each is one call of the database, with the record
//! of who did it and why in the same commit.

use hapax_core::job::Phase;
use hapax_core::store::{
    Action, EventId, NewJob, ReplayAsk, ReplayEffect, Replayed, Reviewed, Status,
};
use hapax_core::{SourceName, Tenant};
use tokio_postgres::Row;
use uuid::Uuid;

use super::Shared;
use super::connect::{Lent, PgError, retried};
use super::jobs::{only, plain};
use super::names::LaneName;

/// What a person says of an event in review.
#[derive(Debug, Clone, Copy)]
pub(super) enum Decision<'a> {
    /// It runs, and this is its work.
    Approve(&'a [NewJob]),
    Reject,
}

/// The work of an event, column by column.
#[derive(Debug, Default)]
struct Columns {
    lanes: Vec<i32>,
    resources: Vec<Option<String>>,
    places: Vec<Option<i64>>,
    hopeless: Vec<Option<String>>,
}

pub(super) async fn replay(shared: &Shared, ask: &ReplayAsk) -> Result<Vec<Replayed>, PgError> {
    let mut lent = shared.pools.work.lend().await?;
    let Some(of) = Named::find(&mut lent, ask.event).await? else { return Ok(Vec::new()) };
    let columns = of.columns(shared, &mut lent, &ask.handlers).await?;
    let rows = lent
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
                &plain(&ask.by.who),
                &ask.by.reason.as_deref().map(plain),
                &ask.by.at,
                &shared.now(),
            ],
        )
        .await?;
    if !ask.dry_run {
        shared.forget(&of.hash);
    }
    let told = |(new, row): (&NewJob, &Row)| {
        let effect = effect(row.get::<_, Option<i32>>(0)?)?;
        Some(Replayed { handler: new.handler.clone(), effect })
    };
    Ok(ask.handlers.iter().zip(&rows).filter_map(told).collect())
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
    decision: Decision<'_>,
    by: &Action,
) -> Result<Reviewed, PgError> {
    retried(|| decide_once(shared, event, decision, by)).await
}

async fn decide_once(
    shared: &Shared,
    event: EventId,
    decision: Decision<'_>,
    by: &Action,
) -> Result<Reviewed, PgError> {
    let mut lent = shared.pools.work.lend().await?;
    let Some(of) = Named::find(&mut lent, event).await? else { return Ok(Reviewed::Unknown) };
    let columns = match decision {
        Decision::Approve(jobs) => of.columns(shared, &mut lent, jobs).await?,
        Decision::Reject => Columns::default(),
    };
    let rows = lent
        .query(
            "SELECT hapax.decide($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            &[
                &event.0,
                &matches!(decision, Decision::Reject),
                &columns.lanes,
                &columns.resources,
                &columns.places,
                &columns.hopeless,
                &plain(&by.who),
                &by.reason.as_deref().map(plain),
                &by.at,
                &shared.now(),
            ],
        )
        .await?;
    if only(&rows)?.get(0) {
        shared.forget(&of.hash);
        return Ok(Reviewed::Decided);
    }
    Ok(Reviewed::NotWaiting(status(&mut lent, event.0).await?))
}

/// An event that somebody named, if it is not pruned.
struct Named {
    tenant: Tenant,
    source: SourceName,
    hash: Vec<u8>,
}

impl Named {
    async fn find(lent: &mut Lent, event: EventId) -> Result<Option<Self>, PgError> {
        let rows = lent
            .query(
                "SELECT tenant, source, hash FROM hapax.event WHERE id = $1 AND pruned IS NULL",
                &[&event.0],
            )
            .await?;
        Ok(rows.first().map(|row| Self {
            tenant: Tenant::new(row.get::<_, &str>(0)),
            source: SourceName::new(row.get::<_, &str>(1)),
            hash: row.get(2),
        }))
    }

    /// What is to be written of this work; its lanes are made if they are not there.
    async fn columns(
        &self,
        shared: &Shared,
        lent: &mut Lent,
        jobs: &[NewJob],
    ) -> Result<Columns, PgError> {
        let mut columns = Columns::default();
        for job in jobs {
            let name = LaneName {
                tenant: self.tenant.clone(),
                source: self.source.clone(),
                handler: job.handler.clone(),
            };
            columns.lanes.push(shared.names.lane(lent, &name).await?.lane);
            columns.resources.push(job.place.as_ref().map(|place| place.resource.to_string()));
            columns.places.push(job.place.as_ref().map(|place| place.position.0));
            columns.hopeless.push(job.hopeless.as_deref().map(plain));
        }
        Ok(columns)
    }
}

/// Where an event stands that is there and was not waiting.
async fn status(lent: &mut Lent, event: Uuid) -> Result<Status, PgError> {
    let rows = lent
        .query(
            "SELECT e.state, j.state, j.steps FROM hapax.event e
             LEFT JOIN hapax.job j ON j.job BETWEEN e.id AND hapax.job_id(e.id, 16777215)
             WHERE e.id = $1",
            &[&event],
        )
        .await?;
    let standing = rows.first().map(|row| row.get::<_, i16>(0));
    Ok(match standing {
        Some(1) => Status::Review,
        Some(2) => Status::Discarded,
        Some(_) | None => Status::of_jobs(rows.iter().filter_map(|row| {
            let state: i16 = row.get::<_, Option<i16>>(1)?;
            let steps: i32 = row.get(2);
            Some((phase(state)?, u32::try_from(steps).unwrap_or(0)))
        })),
    })
}

fn phase(state: i16) -> Option<Phase> {
    Some(match state {
        0 => Phase::Ready,
        1 => Phase::Leased,
        2 => Phase::Done,
        3 => Phase::Stale,
        4 => Phase::Dead,
        5 => Phase::Held,
        6 => Phase::Parked,
        7 => Phase::Review,
        8 => Phase::Discarded,
        _ => return None,
    })
}
