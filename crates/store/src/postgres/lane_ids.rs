//! The numbers of lanes, cached in memory: a lane is created once, in a separate statement, before
//! the first job that needs it. The cache is dropped when the database was replaced by another one.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use hapax_core::job::HandlerName;
use hapax_core::{SourceName, Tenant};

use super::connect::{PgError, PooledClient};

/// One handler of a source, for one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct LaneName {
    pub(super) tenant: Tenant,
    pub(super) source: SourceName,
    pub(super) handler: HandlerName,
}

/// The numbers of a lane and its handler in this database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneAt {
    pub(super) handler: i32,
    pub(super) lane: i32,
}

/// The cached numbers.
#[derive(Debug, Default)]
pub(super) struct LaneIds {
    lanes: Mutex<HashMap<LaneName, LaneAt>>,
    pairs: Mutex<HashSet<(Tenant, SourceName)>>,
}

impl LaneIds {
    /// The lane, which is created if it does not exist.
    pub(super) async fn lane(
        &self,
        client: &mut PooledClient,
        name: &LaneName,
    ) -> Result<LaneAt, PgError> {
        if let Some(lane) = self.known(name) {
            return Ok(lane);
        }
        let rows = client
            .query(
                "SELECT handler, lane FROM hapax.lane_of($1, $2, $3)",
                &[&name.source.as_str(), &name.handler.as_str(), &name.tenant.as_str()],
            )
            .await?;
        let row = rows.first().ok_or(PgError::Gone)?;
        let at = LaneAt { handler: row.get(0), lane: row.get(1) };
        self.lanes.lock().expect("no panic happens under this lock").insert(name.clone(), at);
        Ok(at)
    }

    /// The lane, if it is cached.
    pub(super) fn known(&self, name: &LaneName) -> Option<LaneAt> {
        self.lanes.lock().expect("no panic happens under this lock").get(name).copied()
    }

    /// Registers the pair, so that its events are found by their sender's id.
    pub(super) async fn pair(
        &self,
        client: &mut PooledClient,
        pair: &(Tenant, SourceName),
    ) -> Result<(), PgError> {
        if self.pairs.lock().expect("no panic happens under this lock").contains(pair) {
            return Ok(());
        }
        client
            .execute(
                "INSERT INTO hapax.pair (tenant, source) VALUES ($1, $2) ON CONFLICT DO NOTHING",
                &[&pair.0.as_str(), &pair.1.as_str()],
            )
            .await?;
        self.pairs.lock().expect("no panic happens under this lock").insert(pair.clone());
        Ok(())
    }

    pub(super) fn clear(&self) {
        self.lanes.lock().expect("no panic happens under this lock").clear();
        self.pairs.lock().expect("no panic happens under this lock").clear();
    }
}
