//! The messages that Hapax publishes about itself, in the transactions of the changes that they are about.
//! [`hapax_core::own_messages`] defines which changes are published, and the content of each
//! message.

use std::time::Duration;

use hapax_core::delivery::EndpointStanding;
use hapax_core::limits::ALERTS_CLEARED_MAX;
use hapax_core::message::{MessageData, OWN_TENANT};
use hapax_core::own_messages::{ActiveAlert, DEATHS_EVERY};
use hapax_core::store::{AlertsNoted, NewMessage, OwnMessages, Published, StoreError};
use hapax_core::{Tenant, Timestamp};
use rusqlite::{Connection, OptionalExtension};

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

    async fn note_alerts(
        &self,
        active: Vec<ActiveAlert>,
        quiet: Duration,
    ) -> Result<AlertsNoted, StoreError> {
        self.writer
            .behind(move |writer| {
                writer.in_transaction(|writer| {
                    let now = writer.now();
                    writer.outbox.note_alerts(&writer.conn, &active, quiet, now)
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
        let changed = record.subject().changed(before, record.standing(), record.trouble());
        self.publish_own(conn, changed, now)
    }

    /// Counts a dead delivery, and publishes the count unless a message about the endpoint is too young.
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

    fn note_alerts(
        &mut self,
        conn: &Connection,
        active: &[ActiveAlert],
        quiet: Duration,
        now: Timestamp,
    ) -> rusqlite::Result<AlertsNoted> {
        let mut noted = AlertsNoted::default();
        for alert in active {
            let inserted = conn
                .prepare_cached(
                    "INSERT INTO hapax_alert (subject, data, raised_at, seen_at)
                     VALUES (?1, ?2, ?3, ?3) ON CONFLICT (subject) DO NOTHING",
                )?
                .execute((&alert.subject, alert.data.as_str(), micros(now)))?;
            if inserted > 0 {
                noted.raised += 1;
                self.publish_own(conn, Some(alert.raised()), now)?;
            } else {
                conn.prepare_cached("UPDATE hapax_alert SET seen_at = ?2 WHERE subject = ?1")?
                    .execute((&alert.subject, micros(now)))?;
            }
        }
        while noted.cleared < ALERTS_CLEARED_MAX
            && let Some(over) = next_over(conn, before(now, quiet))?
        {
            noted.cleared += 1;
            conn.prepare_cached("DELETE FROM hapax_alert WHERE subject = ?1")?
                .execute([&over.subject])?;
            self.publish_own(conn, Some(over.cleared()), now)?;
        }
        Ok(noted)
    }
}

/// An alert that was last reported before this.
fn next_over(conn: &Connection, before: i64) -> rusqlite::Result<Option<ActiveAlert>> {
    conn.prepare_cached("SELECT subject, data FROM hapax_alert WHERE seen_at < ?1 LIMIT 1")?
        .query_row([before], |row| {
            let data: String = row.get(1)?;
            let data = MessageData::parse(data).expect("it was JSON when it was written");
            Ok(ActiveAlert { subject: row.get(0)?, data })
        })
        .optional()
}

/// A message about dead deliveries that was published at or before this is old enough for another one.
fn published_before(now: Timestamp) -> i64 {
    before(now, DEATHS_EVERY)
}

fn before(now: Timestamp, span: Duration) -> i64 {
    micros(now).saturating_sub(i64::try_from(span.as_micros()).unwrap_or(i64::MAX))
}
