//! Plans of operators over the deliveries of an endpoint. `functions/run_plan.sql` has the rules.

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    Action, DeliveryPlan, NewPlan, Plan, PlanCount, PlanCreated, PlanId, PlanRun, PlanState,
    PlannedDeliveries, Plans, StoreError,
};
use tokio_postgres::Row;
use uuid::Uuid;

use crate::postgres::connect::{PgError, retried};
use crate::postgres::jobs::only;
use crate::postgres::prune::most;
use crate::postgres::reader::read;
use crate::postgres::row::{stamp, text};
use crate::postgres::{PgStore, Shared};

/// A plan, as [`plan_of`] reads it.
const PLAN: &str = "SELECT p.id, e.id, p.which, p.since_at, p.asked_until, p.rate, p.total, p.done, p.skipped, \
                    p.state, p.created_at, p.ended_at, p.who, p.reason \
                    FROM hapax.plan p JOIN hapax.endpoint e ON e.endpoint = p.endpoint";

impl Plans for PgStore {
    async fn count_plan(&self, work: DeliveryPlan) -> Result<PlanCount, StoreError> {
        let counted = async {
            let now = self.shared.now().unwrap_or_else(Timestamp::now);
            let until = work.until.map_or(now, |until| until.min(now));
            let mut lent = self.shared.pools.outbox_reads.lend().await?;
            let sql = "SELECT hapax.count_plan($1, $2, $3, $4)";
            let (since, until) = (stamp(work.since), stamp(until));
            let rows =
                lent.query(sql, &[&work.endpoint.0, &work.which.as_str(), &since, &until]).await?;
            Ok::<Option<i64>, PgError>(only(&rows)?.get(0))
        };
        Ok(match counted.await.map_err(read)? {
            Some(count) => PlanCount::Deliveries(count.unsigned_abs()),
            None => PlanCount::UnknownEndpoint,
        })
    }

    async fn create_plan(&self, plan: NewPlan, by: Action) -> Result<PlanCreated, StoreError> {
        self.act(move |shared| async move { retried(|| create(&shared, &plan, &by)).await }).await
    }

    async fn run_plan(&self, limit: usize) -> Result<PlanRun, StoreError> {
        let ran =
            self.act(move |shared| async move { retried(|| run(&shared, limit)).await }).await?;
        if let PlanRun::Ran(_) = ran {
            self.shared.sending.hint();
        }
        Ok(ran)
    }

    async fn cancel_plan(&self, id: PlanId, _by: Action) -> Result<Option<Plan>, StoreError> {
        self.act(move |shared| async move {
            retried(|| async {
                let mut lent = shared.pools.admin.lend().await?;
                let sql = "UPDATE hapax.plan SET state = 'cancelled', \
                               ended_at = coalesce($2, statement_timestamp()) \
                           WHERE id = $1 AND state = 'running'";
                lent.query(sql, &[&id.0, &shared.now()]).await?;
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
            let mut lent = self.shared.pools.outbox_reads.lend().await?;
            let sql = format!("{PLAN} ORDER BY p.created_at DESC, p.id DESC LIMIT $1");
            let rows = lent.query(&sql, &[&i64::from(most(limit))]).await?;
            Ok::<_, PgError>(rows.iter().filter_map(plan_of).collect())
        };
        listed.await.map_err(read)
    }
}

async fn create(shared: &Shared, plan: &NewPlan, by: &Action) -> Result<PlanCreated, PgError> {
    let NewPlan { id, work, rate } = plan;
    let rate = rate.map(|rate| i32::try_from(rate.max(1)).unwrap_or(i32::MAX));
    let created: bool = {
        let mut lent = shared.pools.admin.lend().await?;
        let rows = lent
            .query(
                "SELECT hapax.create_plan($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
                &[
                    &id.0,
                    &work.endpoint.0,
                    &work.which.as_str(),
                    &stamp(work.since),
                    &work.until.map(stamp),
                    &rate,
                    &text(&by.who),
                    &by.reason.as_deref().map(text),
                    &stamp(by.at),
                    &shared.now(),
                ],
            )
            .await?;
        only(&rows)?.get(0)
    };
    let found = if created { find(shared, *id).await? } else { None };
    Ok(match found {
        Some(plan) => PlanCreated::Created(Box::new(plan)),
        None => PlanCreated::UnknownEndpoint,
    })
}

async fn run(shared: &Shared, limit: usize) -> Result<PlanRun, PgError> {
    let mut lent = shared.pools.admin.lend().await?;
    let sql = "SELECT id, not_before FROM hapax.run_plan($1, $2)";
    let rows = lent.query(sql, &[&most(limit), &shared.now()]).await?;
    let row = only(&rows)?;
    Ok(match (row.get::<_, Option<Uuid>>(0), row.get::<_, Option<Timestamp>>(1)) {
        (Some(id), _) => PlanRun::Ran(PlanId(id)),
        (None, Some(at)) => PlanRun::NotBefore(at),
        (None, None) => PlanRun::Idle,
    })
}

async fn find(shared: &Shared, id: PlanId) -> Result<Option<Plan>, PgError> {
    let mut lent = shared.pools.outbox_reads.lend().await?;
    let rows = lent.query(&format!("{PLAN} WHERE p.id = $1"), &[&id.0]).await?;
    Ok(rows.first().and_then(plan_of))
}

/// `None` if the row was changed by hand so that it cannot be read.
fn plan_of(row: &Row) -> Option<Plan> {
    let count = |at: usize| row.get::<_, i64>(at).unsigned_abs();
    Some(Plan {
        id: PlanId(row.get(0)),
        work: DeliveryPlan {
            endpoint: EndpointId(row.get(1)),
            which: PlannedDeliveries::parse(row.get(2))?,
            since: row.get(3),
            until: row.get(4),
        },
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
