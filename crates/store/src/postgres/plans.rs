//! The plans of operators. A slice over deliveries is one call of `functions/run_plan.sql`. A slice over events
//! is read first ([`super::event_plans`]) and then taken by one call of `functions/take_slice.sql`.

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    Action, DeliveryPlan, EventPlan, EventSlice, Held, NewPlan, Plan, PlanCount, PlanCreated,
    PlanId, PlanRun, PlanState, PlanWork, PlannedDeliveries, Plans, StoreError, plan_slice,
};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::{PgError, retried};
use super::event_plans;
use super::jobs::only;
use super::prune::most;
use super::reader::read;
use super::row::{stamp, text};
use super::{PgStore, Shared};
use crate::columns::{json_of_plan, plan_of_json};

/// A plan, as [`plan_of`] reads it.
const PLAN: &str = "SELECT p.id, e.id, p.which, p.since_at, p.asked_until, p.rate, p.total, p.done, p.skipped, \
                    p.state, p.created_at, p.ended_at, p.who, p.reason, p.events, p.passed_event, p.request \
                    FROM hapax.plan p LEFT JOIN hapax.endpoint e ON e.endpoint = p.endpoint";

impl Plans for PgStore {
    async fn count_plan(&self, work: PlanWork) -> Result<PlanCount, StoreError> {
        let now = self.shared.now().unwrap_or_else(Timestamp::now);
        let counted = async {
            match &work {
                PlanWork::Deliveries(work) => count_deliveries(&self.shared, work, now).await,
                PlanWork::Events(work) => {
                    event_plans::count(&self.shared, work, now).await.map(Some)
                }
            }
        };
        Ok(match counted.await.map_err(read)? {
            Some(count) => PlanCount::Counted(count),
            None => PlanCount::UnknownEndpoint,
        })
    }

    async fn create_plan(&self, plan: NewPlan, by: Action) -> Result<PlanCreated, StoreError> {
        self.act(move |shared| async move {
            match &plan.work {
                PlanWork::Deliveries(work) => retried(|| create(&shared, &plan, work, &by)).await,
                PlanWork::Events(work) => create_of_events(&shared, &plan, work, &by).await,
            }
        })
        .await
    }

    async fn run_plan(&self, limit: usize, except: Vec<PlanId>) -> Result<PlanRun, StoreError> {
        let ran = self.act(move |shared| async move { run(&shared, limit, &except).await }).await?;
        if let PlanRun::Ran(_) = ran {
            self.shared.sending.hint();
        }
        Ok(ran)
    }

    async fn take_slice(&self, slice: EventSlice) -> Result<Held, StoreError> {
        let taken = self
            .act(move |shared| async move { retried(|| event_plans::take(&shared, &slice)).await });
        let held = taken.await?;
        self.shared.arrived.notify_waiters();
        Ok(held)
    }

    async fn cancel_plan(&self, id: PlanId, _by: Action) -> Result<Option<Plan>, StoreError> {
        self.act(move |shared| async move {
            retried(|| async {
                let mut client = shared.pools.admin.checkout().await?;
                let sql = "UPDATE hapax.plan SET state = 'cancelled', \
                               ended_at = coalesce($2, statement_timestamp()) \
                           WHERE id = $1 AND state = 'running'";
                client.query(sql, &[&id.0, &shared.now()]).await?;
                find(&shared, id).await
            })
            .await
        })
        .await
    }

    async fn plan(&self, id: PlanId) -> Result<Option<Plan>, StoreError> {
        find(&self.shared, id).await.map_err(read)
    }

    async fn plans(&self, limit: usize) -> Result<Vec<Plan>, StoreError> {
        let listed = async {
            let mut client = self.shared.pools.lists.checkout().await?;
            let sql = format!("{PLAN} ORDER BY p.created_at DESC, p.id DESC LIMIT $1");
            let rows = client.query(&sql, &[&i64::from(most(limit))]).await?;
            Ok::<_, PgError>(rows.iter().filter_map(plan_of).collect())
        };
        listed.await.map_err(read)
    }
}

async fn count_deliveries(
    shared: &Shared,
    work: &DeliveryPlan,
    now: Timestamp,
) -> Result<Option<u64>, PgError> {
    let until = work.until.map_or(now, |until| until.min(now));
    let mut client = shared.pools.lists.checkout().await?;
    let sql = "SELECT hapax.count_plan($1, $2, $3, $4)";
    let (since, until) = (stamp(work.since), stamp(until));
    let rows = client.query(sql, &[&work.endpoint.0, &work.which.as_str(), &since, &until]).await?;
    Ok(only(&rows)?.get::<_, Option<i64>>(0).map(i64::unsigned_abs))
}

fn rate_column(rate: Option<u32>) -> Option<i32> {
    rate.map(|rate| i32::try_from(rate.max(1)).unwrap_or(i32::MAX))
}

/// Counting may take several statements. The plan's instant is fixed before the count, and the
/// plan's row is committed after it.
async fn create_of_events(
    shared: &Shared,
    plan: &NewPlan,
    work: &EventPlan,
    by: &Action,
) -> Result<PlanCreated, PgError> {
    if let Some(known) = created_before(shared, plan).await? {
        return Ok(known);
    }
    let at: Timestamp = {
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "SELECT coalesce($1, statement_timestamp())";
        let rows = client.query(sql, &[&shared.now()]).await?;
        only(&rows)?.get(0)
    };
    let total = event_plans::count(shared, work, at).await?;
    let total = i64::try_from(total).unwrap_or(i64::MAX);
    let since = stamp(work.filter.since.unwrap_or(Timestamp::MIN));
    retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        client.query(
            "INSERT INTO hapax.plan (id, events, since_at, until_at, asked_until, rate, total, next_at, \
                 passed_event, who, reason, created_at, request) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $8, $12) ON CONFLICT (id) DO NOTHING",
            &[
                &plan.id.0,
                &json_of_plan(work),
                &since,
                &stamp(work.until(at)),
                &work.filter.until.map(stamp),
                &rate_column(plan.rate),
                &total,
                &at,
                &event_plans::before_first(work),
                &text(&by.who),
                &by.reason.as_deref().map(text),
                &Uuid::from_bytes(plan.request.0),
            ],
        )
        .await
    })
    .await?;
    created_before(shared, plan).await?.ok_or(PgError::Gone)
}

/// The answer if a plan with this id exists; `None` otherwise.
async fn created_before(shared: &Shared, plan: &NewPlan) -> Result<Option<PlanCreated>, PgError> {
    let Some(row) = find_row(shared, plan.id).await? else { return Ok(None) };
    if row.get::<_, Uuid>(16).into_bytes() != plan.request.0 {
        return Ok(Some(PlanCreated::OtherRequest));
    }
    Ok(plan_of(&row).map(|plan| PlanCreated::Created(Box::new(plan))))
}

async fn create(
    shared: &Shared,
    plan: &NewPlan,
    work: &DeliveryPlan,
    by: &Action,
) -> Result<PlanCreated, PgError> {
    let NewPlan { id, rate, request, alone, .. } = plan;
    let rate = rate_column(*rate);
    let created: bool = {
        let mut client = shared.pools.admin.checkout().await?;
        let rows = client
            .query(
                "SELECT hapax.create_plan($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
                &[
                    &id.0,
                    &work.endpoint.0,
                    &work.which.as_str(),
                    &stamp(work.since),
                    &work.until.map(stamp),
                    &rate,
                    &text(&by.who),
                    &by.reason.as_deref().map(text),
                    &Uuid::from_bytes(request.0),
                    alone,
                    &shared.now(),
                ],
            )
            .await?;
        only(&rows)?.get(0)
    };
    if !created {
        return Ok(PlanCreated::UnknownEndpoint);
    }
    Ok(match created_before(shared, plan).await? {
        Some(created) => created,
        None if *alone => PlanCreated::EndpointBusy,
        None => PlanCreated::UnknownEndpoint,
    })
}

async fn run(shared: &Shared, limit: usize, except: &[PlanId]) -> Result<PlanRun, PgError> {
    let except: Vec<Uuid> = except.iter().map(|id| id.0).collect();
    let next = retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "SELECT p.id, p.next_at, p.next_at <= coalesce($2, statement_timestamp()), \
                       p.events IS NOT NULL \
                   FROM hapax.plan p WHERE p.state = 'running' AND p.id <> ALL ($1) \
                   ORDER BY p.next_at LIMIT 1";
        client.query(sql, &[&except, &shared.now()]).await
    });
    let rows = next.await?;
    let Some(row) = rows.first() else { return Ok(PlanRun::Idle) };
    let (id, is_due) = (PlanId(row.get(0)), row.get::<_, bool>(2));
    if !is_due {
        return Ok(PlanRun::NotBefore(row.get(1)));
    }
    let is_of_events: bool = row.get(3);
    let ran = retried(|| async {
        match is_of_events {
            true => slice(shared, id, limit).await,
            false => run_slice(shared, id, limit).await,
        }
    });
    match ran.await {
        // An SQL error concerns this plan alone. Any other error concerns the database.
        Err(error @ PgError::Sql(_)) => Ok(PlanRun::Failed(id, error.to_string())),
        ran => ran,
    }
}

/// Runs a slice of a plan over deliveries.
async fn run_slice(shared: &Shared, id: PlanId, limit: usize) -> Result<PlanRun, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    let sql = "SELECT hapax.run_plan($1, $2, $3)";
    let rows = client.query(sql, &[&id.0, &most(limit), &shared.now()]).await?;
    Ok(if only(&rows)?.get(0) { PlanRun::Ran(id) } else { PlanRun::Taken(id) })
}

/// Reads the next slice of a plan over events.
async fn slice(shared: &Shared, id: PlanId, limit: usize) -> Result<PlanRun, PgError> {
    let Some(row) = find_row(shared, id).await? else { return Ok(PlanRun::Taken(id)) };
    let Some(plan) = plan_of(&row) else {
        let reason = "this version cannot read the plan's row: run it on a node with the version that wrote it";
        return Ok(PlanRun::Failed(id, reason.to_owned()));
    };
    let count = plan_slice(plan.rate, limit).0;
    let slice = event_plans::slice(shared, &plan, row.get(15), count).await?;
    Ok(PlanRun::Events(Box::new(slice)))
}

async fn find(shared: &Shared, id: PlanId) -> Result<Option<Plan>, PgError> {
    Ok(find_row(shared, id).await?.as_ref().and_then(plan_of))
}

async fn find_row(shared: &Shared, id: PlanId) -> Result<Option<Row>, PgError> {
    let mut client = shared.pools.lists.checkout().await?;
    let rows = client.query(&format!("{PLAN} WHERE p.id = $1"), &[&id.0]).await?;
    Ok(rows.into_iter().next())
}

/// The plan of a row; `None` if the row was changed by hand and cannot be read.
fn plan_of(row: &Row) -> Option<Plan> {
    let count = |at: usize| row.get::<_, i64>(at).unsigned_abs();
    let work = match row.get::<_, Option<&str>>(14) {
        Some(events) => PlanWork::from(plan_of_json(events)?),
        None => PlanWork::from(DeliveryPlan {
            endpoint: EndpointId(row.get::<_, Option<Uuid>>(1)?),
            which: PlannedDeliveries::parse(row.get::<_, Option<&str>>(2)?)?,
            since: row.get(3),
            until: row.get(4),
        }),
    };
    Some(Plan {
        id: PlanId(row.get(0)),
        work,
        rate: row.get::<_, Option<i32>>(5).map(i32::unsigned_abs),
        total: count(6),
        done: count(7),
        skipped: count(8),
        state: match row.get(9) {
            "running" => PlanState::Running,
            "done" => PlanState::Done,
            _cancelled => PlanState::Cancelled,
        },
        created_at: row.get(10),
        ended_at: row.get(11),
        who: row.get(12),
        reason: row.get(13),
    })
}
