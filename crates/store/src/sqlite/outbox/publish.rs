//! Publishing: the message, its bytes and one delivery for each endpoint that wants it, in the open
//! transaction. Every way to publish ends in [`Outbox::publish`].

use hapax_core::job::jittered;
use hapax_core::message::{OWN_TENANT, Payload, Stamp, own_tenant_fault};
use hapax_core::store::{NewMessage, Published, PublishedMessage};
use hapax_core::{Tenant, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::Outbox;
use crate::sqlite::row::{micros, timestamp};

/// Why a handler's message is not published: its attempt fails.
pub(super) type PublishRefusal = String;

/// The event that a message is published for.
#[derive(Debug, Clone, Copy)]
pub(in crate::sqlite) struct For<'a> {
    pub(in crate::sqlite) tenant: &'a Tenant,
    pub(in crate::sqlite) event: Option<i64>,
}

impl Outbox {
    /// Publishes a message in the open transaction. The index over ids decides whether it is new.
    pub(in crate::sqlite) fn publish(
        &mut self,
        conn: &Connection,
        message: &NewMessage,
        of: For<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Published> {
        // The time is rounded as it is stored, so that the bytes name the same time.
        let now = timestamp(micros(now));
        let tenant = match &message.tenant {
            Some(tenant) => Tenant::new(tenant),
            None => of.tenant.clone(),
        };
        let id = message.id.clone().unwrap_or_else(new_id);
        let fingerprint = message.fingerprint();
        let wanted: Vec<i64> = self.of_tenant.get(&tenant).map_or_else(Vec::new, |numbers| {
            let wants = |number: &&i64| self.endpoints[number].record.settings.wants(message);
            numbers.iter().filter(wants).copied().collect()
        });
        let seq = self.last_message + 1;
        let inserted = conn
            .prepare_cached(
                "INSERT INTO hapax_message
                     (seq, tenant, id, type, key, api_version, fingerprint, event_seq, created_at, deliveries)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) ON CONFLICT (id, tenant) DO NOTHING",
            )?
            .execute((
                seq,
                tenant.as_str(),
                &id,
                &message.r#type,
                &message.key,
                &message.api_version,
                &fingerprint.0[..],
                of.event,
                micros(now),
                wanted.len() as i64,
            ))?;
        if inserted == 0 {
            let (known, deliveries): ([u8; 16], i64) = conn
                .prepare_cached(
                    "SELECT fingerprint, deliveries FROM hapax_message WHERE id = ?1 AND tenant = ?2",
                )?
                .query_row((&id, tenant.as_str()), |row| Ok((row.get(0)?, row.get(1)?)))?;
            return Ok(if known == fingerprint.0 {
                Published::Duplicate(PublishedMessage { id, deliveries: deliveries.unsigned_abs() })
            } else {
                Published::Conflict { id }
            });
        }
        self.last_message = seq;
        self.wrote = true;
        let sequence = message.key.is_some().then_some(seq.unsigned_abs());
        let stamp = Stamp { id: &id, created_at: now, sequence };
        let payload = |number: &i64| self.endpoints[number].record.settings.payload;
        let thin = wanted.iter().any(|number| payload(number) == Payload::Thin);
        let thin = thin.then(|| message.envelope(&stamp, Payload::Thin));
        conn.prepare_cached(
            "INSERT INTO hapax_message_body (seq, body, thin) VALUES (?1, ?2, ?3)",
        )?
        .execute((
            seq,
            message.envelope(&stamp, Payload::Fat).as_bytes(),
            thin.as_ref().map(|thin| thin.as_bytes()),
        ))?;
        for number in &wanted {
            let first_wait = self.endpoints[number].policy.retry.first().copied();
            let wait = jittered(first_wait.unwrap_or_default(), self.dice.roll());
            let wait = i64::try_from(wait.as_micros()).unwrap_or(i64::MAX);
            let due = micros(now).saturating_add(wait);
            conn.prepare_cached(
                "INSERT INTO hapax_delivery (message_seq, endpoint, state, due_at, wait, key, place)
                 VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6)",
            )?
            .execute((seq, number, due, wait, &message.key, sequence.map(|_| seq)))?;
            self.note_due(*number, due);
        }
        self.woken |= !wanted.is_empty();
        Ok(Published::Accepted(PublishedMessage { id, deliveries: wanted.len() as u64 }))
    }

    /// Publishes a message of a handler, with its outcome. A message that no endpoint may get, or whose
    /// id was used for other content, fails the attempt: the caller undoes the transaction.
    pub(in crate::sqlite) fn publish_with(
        &mut self,
        conn: &Connection,
        message: &NewMessage,
        of: For<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<(), PublishRefusal>> {
        if let Some(fault) = message.fault() {
            return Ok(Err(fault));
        }
        if message.tenant.is_none() && of.tenant.as_str() == OWN_TENANT {
            return Ok(Err(own_tenant_fault()));
        }
        Ok(match self.publish(conn, message, of, now)? {
            Published::Accepted(_) | Published::Duplicate(_) => Ok(()),
            Published::Conflict { id } => {
                Err(format!("the message id {id} was used before, for other content"))
            }
        })
    }

    /// Makes messages of the rows that the running handler has staged, at the end of its
    /// transaction.
    pub(in crate::sqlite) fn publish_staged(
        &mut self,
        conn: &Connection,
        of: For<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<(), PublishRefusal>> {
        let mut published = 0;
        while let Some((place, staged)) = next_staged(conn, published)? {
            let message = match staged {
                Ok(message) => message,
                Err(fault) => return Ok(Err(format!("hapax_publish: {fault}"))),
            };
            if let Err(refused) = self.publish_with(conn, &message, of, now)? {
                return Ok(Err(format!("hapax_publish: {refused}")));
            }
            published = place;
        }
        if published > 0 {
            conn.prepare_cached("DELETE FROM hapax_staged")?.execute([])?;
        }
        Ok(Ok(()))
    }
}

/// The staged row after this place, one at a time: a handler may publish much.
fn next_staged(
    conn: &Connection,
    after: i64,
) -> rusqlite::Result<Option<(i64, Result<NewMessage, String>)>> {
    conn.prepare_cached(
        "SELECT place, type, data, key, tenant, id, api_version FROM hapax_staged
         WHERE place > ?1 ORDER BY place LIMIT 1",
    )?
    .query_row([after], |row| Ok((row.get(0)?, staged(row))))
    .optional()
}

fn staged(row: &Row<'_>) -> Result<NewMessage, String> {
    let text = |at: usize, name: &str| match row.get::<_, Option<String>>(at) {
        Ok(text) => Ok(text),
        Err(_) => Err(format!("{name} must be text, in UTF-8")),
    };
    let data = text(2, "data")?.unwrap_or_default();
    Ok(NewMessage {
        r#type: text(1, "type")?.unwrap_or_default(),
        data: data.parse().map_err(|error| format!("data is not JSON: {error}"))?,
        key: text(3, "key")?,
        tenant: text(4, "tenant")?,
        id: text(5, "id")?,
        api_version: text(6, "api_version")?,
    })
}

/// An id for a message that has none. Ids of one time lie side by side in the index.
fn new_id() -> String {
    format!("msg_{}", Uuid::now_v7().simple())
}
