//! Cancels deliveries that were dead, held or parked for too long, after their endpoint was announced.

use hapax_core::delivery::{DeliveryAct, EXPIRED};
use hapax_core::endpoint::EndpointId;
use hapax_core::own_messages::EndpointSubject;
use hapax_core::store::{
    Expiry, ExpiryAsk, ExpiryNotice, ExpiryStep, ExpirySubject, ExpiryTimes, OutboxRetention,
    StoreError,
};
use hapax_core::{Tenant, Timestamp};
use rusqlite::{Connection, OptionalExtension};
use uuid::Uuid;

use super::Outbox;
use super::change::Reported;
use super::row::{COLUMNS, DeliveryRow};
use crate::sqlite::SqliteStore;
use crate::sqlite::row::{micros, timestamp};

impl OutboxRetention for SqliteStore {
    async fn expire_deliveries(&self, ask: ExpiryAsk) -> Result<Expiry, StoreError> {
        self.writer
            .behind(move |writer| {
                writer.in_transaction(|writer| {
                    let now = writer.now();
                    writer.outbox.expire_deliveries(&writer.conn, ask, now)
                })
            })
            .await
    }
}

/// The columns of an endpoint that expiry reads.
struct ExpiryRow {
    number: i64,
    id: EndpointId,
    tenant: Tenant,
    /// Null unless the endpoint is disabled and not deleted.
    held_since: Option<i64>,
    announced_at: Option<i64>,
    is_deleted: bool,
}

impl Outbox {
    /// One slice of a round. The position is kept in memory: after a failed write the round begins again.
    fn expire_deliveries(
        &mut self,
        conn: &Connection,
        ask: ExpiryAsk,
        now: Timestamp,
    ) -> rusqlite::Result<Expiry> {
        let times = ask.times(now);
        let (mut expiry, mut room) = (Expiry::default(), ask.limit.max(1));
        for _ in 0..ask.limit.max(1) {
            let Some(subject) = next_subject(conn, self.expired_up_to)? else {
                self.expired_up_to = 0;
                return Ok(expiry);
            };
            self.expired_up_to = subject.number;
            let oldest = oldest(conn, &subject)?.map(timestamp);
            let announced_at = subject.announced_at.map(timestamp);
            let is_deleted = subject.is_deleted;
            match times.step(&ExpirySubject { oldest, announced_at, is_deleted }) {
                ExpiryStep::Leave => {}
                ExpiryStep::Announce => {
                    announce(conn, subject.number, Some(micros(now)))?;
                    let (endpoint, tenant) = (subject.id, subject.tenant);
                    let oldest = oldest.unwrap_or(now);
                    let subject = EndpointSubject { id: endpoint, tenant: tenant.clone() };
                    let message = subject.expiring(oldest, ask.cancelled_from(oldest, now));
                    self.publish_own(conn, message, now)?;
                    expiry.announced.push(ExpiryNotice { endpoint, tenant, oldest });
                }
                ExpiryStep::Withdraw => announce(conn, subject.number, None)?,
                ExpiryStep::Cancel => {
                    let gone = self.expire_of(conn, &subject, &times, room, now)?;
                    room -= gone;
                    expiry.cancelled.push((subject.id, gone as u64));
                }
            }
            if room == 0 {
                // The endpoint may have more.
                self.expired_up_to = subject.number - 1;
                break;
            }
        }
        expiry.more = true;
        Ok(expiry)
    }

    fn expire_of(
        &mut self,
        conn: &Connection,
        subject: &ExpiryRow,
        times: &ExpiryTimes,
        room: usize,
        now: Timestamp,
    ) -> rusqlite::Result<usize> {
        let before = micros(times.cancel_before);
        let holds = subject.held_since.is_some_and(|since| since < before);
        let old: Vec<DeliveryRow> = conn
            // Parked deliveries come first: if the dead delivery that they wait for ended first, they would
            // be sent.
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_parked_since
                 WHERE d.endpoint = ?1 AND d.state = 5 /* parked */ AND d.due_at < ?2 AND NOT ?5
                 UNION ALL
                 SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_died
                 WHERE d.endpoint = ?1 AND d.state = 3 /* dead */ AND d.due_at < ?2
                 UNION ALL
                 SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_ready
                 WHERE d.endpoint = ?1 AND d.state = 0 /* ready */ AND d.due_at < ?2 AND ?3
                 LIMIT ?4"
            ))?
            .query_map(
                (subject.number, before, holds, room as i64, subject.is_deleted),
                DeliveryRow::read,
            )?
            .collect::<rusqlite::Result<_>>()?;
        let why = Reported { error: Some(EXPIRED), ..Reported::default() };
        for row in &old {
            let expired = self.act(conn, row, &DeliveryAct::Expire, why, now)?;
            assert!(expired.is_ok(), "leased and ended deliveries are not read here");
        }
        Ok(old.len())
    }
}

/// The next endpoint that has dead or parked deliveries, is disabled, or was announced.
fn next_subject(conn: &Connection, after: i64) -> rusqlite::Result<Option<ExpiryRow>> {
    conn.prepare_cached(
        "SELECT e.endpoint, e.id, e.tenant, iif(e.deleted_at IS NULL, e.disabled_at, NULL),
                e.expiry_announced_at, e.deleted_at IS NOT NULL
         FROM hapax_endpoint e WHERE e.endpoint = (
             SELECT min(n) FROM (
                 SELECT min(endpoint) AS n FROM hapax_delivery INDEXED BY hapax_delivery_died
                 WHERE state = 3 /* dead */ AND endpoint > ?1
                 UNION ALL
                 SELECT min(endpoint) FROM hapax_delivery INDEXED BY hapax_delivery_parked_since
                 WHERE state = 5 /* parked */ AND endpoint > ?1
                 UNION ALL
                 SELECT min(endpoint) FROM hapax_endpoint INDEXED BY hapax_endpoint_disabled
                 WHERE disabled_at IS NOT NULL AND deleted_at IS NULL AND endpoint > ?1
                 UNION ALL
                 SELECT min(endpoint) FROM hapax_endpoint INDEXED BY hapax_endpoint_expiring
                 WHERE expiry_announced_at IS NOT NULL AND endpoint > ?1))",
    )?
    .query_row([after], |row| {
        Ok(ExpiryRow {
            number: row.get(0)?,
            id: EndpointId(Uuid::from_bytes(row.get(1)?)),
            tenant: Tenant::new(row.get_ref(2)?.as_str()?),
            held_since: row.get(3)?,
            announced_at: row.get(4)?,
            is_deleted: row.get(5)?,
        })
    })
    .optional()
}

/// The time since which the oldest delivery of an endpoint has been dead, held or parked.
fn oldest(conn: &Connection, subject: &ExpiryRow) -> rusqlite::Result<Option<i64>> {
    let first = |sql: &str| -> rusqlite::Result<Option<i64>> {
        conn.prepare_cached(sql)?.query_row([subject.number], |row| row.get(0))
    };
    let dead = first(
        "SELECT min(due_at) FROM hapax_delivery INDEXED BY hapax_delivery_died
         WHERE endpoint = ?1 AND state = 3 /* dead */",
    )?;
    let parked = match subject.is_deleted {
        true => None,
        false => first(
            "SELECT min(due_at) FROM hapax_delivery INDEXED BY hapax_delivery_parked_since
             WHERE endpoint = ?1 AND state = 5 /* parked */",
        )?,
    };
    let held = match subject.held_since {
        Some(since) => first(super::NEXT_DUE)?.map(|due| due.max(since)),
        None => None,
    };
    Ok(dead.into_iter().chain(parked).chain(held).min())
}

fn announce(conn: &Connection, number: i64, at: Option<i64>) -> rusqlite::Result<()> {
    conn.prepare_cached("UPDATE hapax_endpoint SET expiry_announced_at = ?2 WHERE endpoint = ?1")?
        .execute((number, at))
        .map(|_| ())
}
