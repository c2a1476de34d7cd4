//! The messages that Hapax publishes about itself. Most messages are published by the functions
//! that make the change. This file publishes those that had to wait, and the alerts of this node.

use std::time::Duration;

use hapax_core::limits::ALERTS_CLEARED_MAX;
use hapax_core::own_messages::ActiveAlert;
use hapax_core::store::{AlertsNoted, OwnMessages, StoreError};

use crate::postgres::connect::{PgError, retried};
use crate::postgres::prune::most;
use crate::postgres::row::text;
use crate::postgres::{PgStore, Shared};

impl OwnMessages for PgStore {
    async fn publish_deaths(&self, limit: usize) -> Result<bool, StoreError> {
        self.act(move |shared| async move { retried(|| publish_deaths(&shared, limit)).await })
            .await
    }

    async fn note_alerts(
        &self,
        active: Vec<ActiveAlert>,
        quiet: Duration,
    ) -> Result<AlertsNoted, StoreError> {
        self.act(
            move |shared| async move { retried(|| note_alerts(&shared, &active, quiet)).await },
        )
        .await
    }
}

async fn publish_deaths(shared: &Shared, limit: usize) -> Result<bool, PgError> {
    let mut lent = shared.pools.admin.lend().await?;
    let sql = "SELECT hapax.publish_deaths($1, $2)";
    let rows = lent.query(sql, &[&most(limit), &shared.now()]).await?;
    let published: i32 = rows[0].get(0);
    Ok(published >= most(limit))
}

async fn note_alerts(
    shared: &Shared,
    active: &[ActiveAlert],
    quiet: Duration,
) -> Result<AlertsNoted, PgError> {
    let column = |of: fn(&ActiveAlert) -> String| active.iter().map(of).collect::<Vec<String>>();
    let subjects = column(|alert| text(&alert.subject));
    let datas = column(|alert| alert.data.as_str().to_owned());
    let keys = column(ActiveAlert::key);
    let quiet = i64::try_from(quiet.as_micros()).unwrap_or(i64::MAX);
    let mut lent = shared.pools.admin.lend().await?;
    let rows = lent
        .query(
            "SELECT raised, cleared FROM hapax.note_alerts($1, $2, $3, $4, $5, $6)",
            &[&subjects, &datas, &keys, &quiet, &most(ALERTS_CLEARED_MAX), &shared.now()],
        )
        .await?;
    let count = |at: usize| rows[0].get::<_, i32>(at).unsigned_abs() as usize;
    Ok(AlertsNoted { raised: count(0), cleared: count(1) })
}
