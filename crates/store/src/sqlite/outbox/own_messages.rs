//! The messages that Hapax publishes about itself, in the transactions of the changes that they report.
//! [`hapax_core::own_messages`] defines which changes are published, and the content of each message.

use hapax_core::delivery::EndpointStanding;
use hapax_core::message::OWN_TENANT;
use hapax_core::own_messages::{ALERT_RAISED, DEATHS_EVERY};
use hapax_core::store::{NewMessage, OwnMessages, Published, StoreError};
use hapax_core::{Tenant, Timestamp};
use rusqlite::Connection;

use super::Outbox;
use super::publish::For;
use crate::sqlite::SqliteStore;
use crate::sqlite::row::{micros, timestamp};

impl OwnMessages for SqliteStore {
    async fn publish_deaths(&self, limit: usize) -> Result<bool, StoreError> {
        self.writer
            .behind(move |writer| {
                writer.in_transaction(|writer| {
                    let now = writer.now();
                    writer.outbox.publish_due_deaths(&writer.conn, limit, now)
                })
            })
            .await
    }
}

impl Outbox {
    /// Publishes a message of Hapax itself, if an endpoint wants it.
    pub(super) fn publish_own(
        &mut self,
        conn: &Connection,
        message: Option<NewMessage>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(message) = message.filter(|message| self.is_wanted(message)) else {
            return Ok(());
        };
        let tenant = Tenant::new(OWN_TENANT);
        let published = self.publish(conn, &message, For { tenant: &tenant, event: None }, now)?;
        assert!(matches!(published, Published::Accepted(_)), "its id is new");
        Ok(())
    }

    /// Whether an endpoint wants messages about raised alerts.
    pub(super) fn wants_alerts(&self) -> bool {
        self.is_wanted(&NewMessage::new(ALERT_RAISED, serde_json::Value::Null))
    }

    fn is_wanted(&self, message: &NewMessage) -> bool {
        let own = self.of_tenant.get(&Tenant::new(OWN_TENANT));
        own.into_iter().flatten().any(|one| self.endpoints[one].record.settings.wants(message))
    }

    /// Publishes the new standing of an endpoint, if it has changed.
    pub(super) fn publish_standing(
        &mut self,
        conn: &Connection,
        number: i64,
        before: EndpointStanding,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get(&number) else { return Ok(()) };
        let record = &endpoint.record;
        let changed = record.subject().changed(before, record.standing(), record.failing_reason());
        self.publish_own(conn, changed, now)
    }

    /// Counts a dead delivery, and publishes the count unless the last message about the endpoint is too
    /// recent.
    pub(super) fn note_death(
        &mut self,
        conn: &Connection,
        number: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get(&number) else { return Ok(()) };
        let message = endpoint.record.subject().died(1, now);
        if message.is_none_or(|message| !self.is_wanted(&message)) {
            return Ok(());
        }
        conn.prepare_cached(
            "UPDATE hapax_endpoint_state SET deaths = deaths + 1, died_since = coalesce(died_since, ?2)
             WHERE endpoint = ?1",
        )?
        .execute((number, micros(now)))?;
        let due = conn
            .prepare_cached(
                "SELECT 1 FROM hapax_endpoint_state
                 WHERE endpoint = ?1 AND coalesce(deaths_published_at <= ?2, 1)",
            )?
            .exists((number, published_before(now)))?;
        if due {
            self.publish_deaths_of(conn, number, now)?;
        }
        Ok(())
    }

    fn publish_deaths_of(
        &mut self,
        conn: &Connection,
        number: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let (count, since): (i64, Option<i64>) = conn
            .prepare_cached(
                "SELECT deaths, died_since FROM hapax_endpoint_state WHERE endpoint = ?1",
            )?
            .query_row([number], |row| Ok((row.get(0)?, row.get(1)?)))?;
        conn.prepare_cached(
            "UPDATE hapax_endpoint_state SET deaths = 0, died_since = NULL, deaths_published_at = ?2
             WHERE endpoint = ?1",
        )?
        .execute((number, micros(now)))?;
        let Some(endpoint) = self.endpoints.get(&number) else { return Ok(()) };
        let since = since.map_or(now, timestamp);
        let message = endpoint.record.subject().died(count.unsigned_abs(), since);
        self.publish_own(conn, message, now)
    }

    fn publish_due_deaths(
        &mut self,
        conn: &Connection,
        limit: usize,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let due: Vec<i64> = conn
            .prepare_cached(
                "SELECT endpoint FROM hapax_endpoint_state INDEXED BY hapax_endpoint_deaths
                 WHERE deaths > 0 AND deaths_published_at <= ?1 LIMIT ?2",
            )?
            .query_map((published_before(now), limit as i64), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        for number in &due {
            self.publish_deaths_of(conn, *number, now)?;
        }
        Ok(due.len() == limit)
    }
}

/// A message about dead deliveries that was published at or before this is old enough for another one.
fn published_before(now: Timestamp) -> i64 {
    micros(now).saturating_sub(i64::try_from(DEATHS_EVERY.as_micros()).unwrap_or(i64::MAX))
}
