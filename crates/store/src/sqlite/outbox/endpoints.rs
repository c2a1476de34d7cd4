//! Endpoints: created, changed, disabled and deleted, each in one commit.

use hapax_core::Tenant;
use hapax_core::circuit::CircuitEvent;
use hapax_core::delivery::EndpointStanding;
use hapax_core::endpoint::{
    AddressChoice, Disabled, DisabledBy, EndpointAct, EndpointChanged, EndpointId, EndpointRecord,
    EndpointSealed, EndpointSettings, NewEndpoint,
};
use hapax_core::job::Policy;
use hapax_core::limits::{ENDPOINTS_PER_TENANT_MAX, RECEIVER_ENDPOINTS_PER_TENANT_MAX};
use hapax_core::store::Action;
use hapax_core::vault::Sealed;
use rusqlite::types::Type;
use rusqlite::{Connection, Row};
use uuid::Uuid;

use super::Outbox;
use super::turns::NEVER;
use crate::sqlite::row::{LANE_BITS, micros, timestamp};

pub(super) const COLUMNS: &str = "endpoint, id, tenant, settings, secrets, headers, version, created_at, disabled_at, \
                       disabled_reason, failing, disabled_by";

/// Reads [`COLUMNS`].
pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<(i64, EndpointRecord)> {
    let settings: String = row.get(3)?;
    let settings: EndpointSettings = serde_json::from_str(&settings).map_err(unreadable(3))?;
    let headers: Option<Vec<u8>> = row.get(5)?;
    let sealed = EndpointSealed {
        secrets: Sealed::from_bytes(row.get(4)?).map_err(unreadable(4))?,
        headers: headers.map(Sealed::from_bytes).transpose().map_err(unreadable(5))?,
    };
    let disabled_at: Option<i64> = row.get(8)?;
    let reason: Option<String> = row.get(9)?;
    let by: Option<String> = row.get(11)?;
    let record = EndpointRecord {
        id: EndpointId(Uuid::from_bytes(row.get(1)?)),
        tenant: Tenant::new(row.get_ref(2)?.as_str()?),
        settings,
        sealed,
        version: row.get::<_, i64>(6)?.unsigned_abs(),
        created_at: timestamp(row.get(7)?),
        disabled: disabled_at.map(|at| Disabled {
            at: timestamp(at),
            reason: reason.unwrap_or_default(),
            by: DisabledBy::parse(by.as_deref()),
        }),
        failing: row.get(10)?,
    };
    Ok((row.get(0)?, record))
}

fn unreadable<E>(column: usize) -> impl FnOnce(E) -> rusqlite::Error
where
    E: std::error::Error + Send + Sync + 'static,
{
    move |error| rusqlite::Error::FromSqlConversionFailure(column, Type::Blob, Box::new(error))
}

/// Every endpoint that is not deleted, oldest first.
pub(super) fn load(conn: &Connection) -> rusqlite::Result<Vec<(i64, EndpointRecord)>> {
    conn.prepare(&format!(
        "SELECT {COLUMNS} FROM hapax_endpoint WHERE deleted_at IS NULL ORDER BY endpoint"
    ))?
    .query_map([], read)?
    .collect()
}

/// Endpoints whose parked deliveries must be judged again, and the first such message.
pub(super) fn to_unpark(conn: &Connection) -> rusqlite::Result<Vec<(i64, i64)>> {
    conn.prepare(
        "SELECT endpoint, unpark_from FROM hapax_endpoint_state WHERE unpark_from IS NOT NULL",
    )?
    .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
    .collect()
}

/// Deleted endpoints that may have open deliveries.
pub(super) fn orphaned(conn: &Connection) -> rusqlite::Result<Vec<i64>> {
    conn.prepare_cached("SELECT endpoint FROM hapax_endpoint WHERE orphans = 1")?
        .query_map([], |row| row.get(0))?
        .collect()
}

/// The schedule of an endpoint, deleted or not.
pub(super) fn policy(conn: &Connection, number: i64) -> rusqlite::Result<Policy> {
    let settings = conn
        .prepare_cached("SELECT settings FROM hapax_endpoint WHERE endpoint = ?1")?
        .query_row([number], |row| row.get::<_, String>(0))?;
    let settings: EndpointSettings = serde_json::from_str(&settings).map_err(unreadable(0))?;
    Ok(settings.policy())
}

impl Outbox {
    pub(super) fn create(
        &mut self,
        conn: &Connection,
        endpoint: NewEndpoint,
        by: &Action,
    ) -> rusqlite::Result<EndpointChanged> {
        if let Some(number) = self.numbers.get(&endpoint.id) {
            // The answer to the first call was lost.
            return Ok(EndpointChanged::Changed(Box::new(self.endpoints[number].record.clone())));
        }
        let siblings = self.of_tenant.get(&endpoint.tenant).map_or(&[][..], Vec::as_slice);
        let by_receiver = |number: &&i64| {
            self.endpoints[*number].record.settings.address_by == AddressChoice::Receiver
        };
        let is_full = match endpoint.settings.address_by {
            AddressChoice::Operator => false,
            AddressChoice::Receiver => {
                siblings.iter().filter(by_receiver).count() >= RECEIVER_ENDPOINTS_PER_TENANT_MAX
            }
        };
        let number = self.last_endpoint + 1;
        if is_full || siblings.len() >= ENDPOINTS_PER_TENANT_MAX || number >= 1 << LANE_BITS {
            return Ok(EndpointChanged::TooMany);
        }
        let created_at = micros(by.at);
        let settings = serde_json::to_string(&endpoint.settings).map_err(unwritable)?;
        let inserted = conn
            .prepare_cached(
                "INSERT INTO hapax_endpoint
                     (endpoint, id, tenant, uid, settings, secrets, headers, version, created_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 1, ?8) ON CONFLICT DO NOTHING",
            )?
            .execute((
                number,
                endpoint.id.0.as_bytes(),
                endpoint.tenant.as_str(),
                &endpoint.settings.uid,
                settings,
                endpoint.sealed.secrets.as_bytes(),
                endpoint.sealed.headers.as_ref().map(Sealed::as_bytes),
                created_at,
            ))?;
        if inserted == 0 {
            return self.not_inserted(conn, endpoint.id);
        }
        conn.prepare_cached("INSERT INTO hapax_endpoint_state (endpoint) VALUES (?1)")?
            .execute([number])?;
        note_action(conn, Some(number), None, "create", by)?;
        let record = EndpointRecord {
            id: endpoint.id,
            tenant: endpoint.tenant,
            settings: endpoint.settings,
            sealed: endpoint.sealed,
            version: 1,
            created_at: timestamp(created_at),
            disabled: None,
            failing: None,
        };
        self.insert(number, record.clone());
        Ok(EndpointChanged::Changed(Box::new(record)))
    }

    /// Either the uid is taken, or the id is that of a deleted endpoint.
    fn not_inserted(&self, conn: &Connection, id: EndpointId) -> rusqlite::Result<EndpointChanged> {
        let was_deleted = conn
            .prepare_cached("SELECT 1 FROM hapax_endpoint WHERE id = ?1")?
            .exists([id.0.as_bytes()])?;
        Ok(if was_deleted { EndpointChanged::Deleted } else { EndpointChanged::UidTaken })
    }

    pub(super) fn change(
        &mut self,
        conn: &Connection,
        id: EndpointId,
        act: EndpointAct,
        by: &Action,
    ) -> rusqlite::Result<EndpointChanged> {
        let Some(&number) = self.numbers.get(&id) else { return Ok(EndpointChanged::Unknown) };
        let mut record = self.endpoints[&number].record.clone();
        let before = record.standing();
        let (kept_order, parked_dead) =
            (record.settings.keeps_order(), record.settings.parks_dead());
        let what = match act {
            EndpointAct::Change { version, settings, sealed } => {
                if version != record.version {
                    return Ok(EndpointChanged::VersionChanged);
                }
                record.settings = *settings;
                record.sealed = sealed;
                "change"
            }
            EndpointAct::DisableByReceiver { .. } if record.disabled.is_some() => {
                return Ok(EndpointChanged::Changed(Box::new(record)));
            }
            EndpointAct::Disable { reason } => {
                let at = timestamp(micros(by.at));
                record.disabled = Some(Disabled { at, reason, by: DisabledBy::Operator });
                "disable"
            }
            EndpointAct::DisableByReceiver { reason } => {
                let at = timestamp(micros(by.at));
                record.disabled = Some(Disabled { at, reason, by: DisabledBy::Receiver });
                "disable"
            }
            EndpointAct::EnableByReceiver
                if record.disabled.as_ref().is_some_and(|it| it.by == DisabledBy::Operator) =>
            {
                return Ok(EndpointChanged::DisabledByOperator);
            }
            EndpointAct::Enable | EndpointAct::EnableByReceiver => {
                record.disabled = None;
                "enable"
            }
            EndpointAct::Delete => return self.delete(conn, number, by),
        };
        record.version += 1;
        let settings = serde_json::to_string(&record.settings).map_err(unwritable)?;
        let changed = conn
            .prepare_cached(
                "UPDATE OR IGNORE hapax_endpoint SET uid = ?2, settings = ?3, secrets = ?4, headers = ?5,
                     version = ?6, disabled_at = ?7, disabled_reason = ?8, disabled_by = ?9
                 WHERE endpoint = ?1",
            )?
            .execute((
                number,
                &record.settings.uid,
                settings,
                record.sealed.secrets.as_bytes(),
                record.sealed.headers.as_ref().map(Sealed::as_bytes),
                i64::try_from(record.version).unwrap_or(i64::MAX),
                record.disabled.as_ref().map(|disabled| micros(disabled.at)),
                record.disabled.as_ref().map(|disabled| &disabled.reason),
                record.disabled.as_ref().map(|disabled| disabled.by.as_str()),
            ))?;
        if changed == 0 {
            return Ok(EndpointChanged::UidTaken);
        }
        note_action(conn, Some(number), None, what, by)?;
        if let Some(endpoint) = self.endpoints.get_mut(&number) {
            endpoint.replace(record.clone());
        }
        if what == "enable" {
            let now = timestamp(micros(by.at));
            self.judge(conn, number, CircuitEvent::Enabled, None, now)?;
            if before == EndpointStanding::Disabled {
                self.spread(conn, number, now)?;
            }
        }
        let waits_less = (kept_order && !record.settings.keeps_order())
            || (parked_dead && !record.settings.parks_dead());
        if waits_less {
            self.set_unpark_from(conn, number, Some(0))?;
        }
        self.publish_standing(conn, number, before, timestamp(micros(by.at)))?;
        self.reschedule(number);
        self.woken = true;
        Ok(EndpointChanged::Changed(Box::new(record)))
    }

    /// Deletes all endpoints of a tenant, and erases the text that operators wrote about them,
    /// including endpoints that were deleted before. Returns how many were there.
    pub(in crate::sqlite) fn delete_of_tenant(
        &mut self,
        conn: &Connection,
        tenant: &Tenant,
        by: &Action,
    ) -> rusqlite::Result<usize> {
        let numbers = self.of_tenant.get(tenant).cloned().unwrap_or_default();
        for number in &numbers {
            self.delete(conn, *number, by)?;
        }
        // The schedule stays, because an attempt under way still has to end.
        conn.prepare_cached(
            "UPDATE hapax_endpoint
             SET uid = NULL, settings = json_remove(json_set(settings, '$.url', 'erased:'),
                     '$.uid', '$.description', '$.metadata', '$.header_names')
             WHERE tenant = ?1",
        )?
        .execute([tenant.as_str()])?;
        Ok(numbers.len())
    }

    /// A tombstone without secrets. Its open deliveries are shown as cancelled from now on.
    fn delete(
        &mut self,
        conn: &Connection,
        number: i64,
        by: &Action,
    ) -> rusqlite::Result<EndpointChanged> {
        conn.prepare_cached(
            "UPDATE hapax_endpoint SET deleted_at = ?2, orphans = 1, secrets = x'', headers = NULL
             WHERE endpoint = ?1",
        )?
        .execute((number, micros(by.at)))?;
        conn.prepare_cached("DELETE FROM hapax_endpoint_state WHERE endpoint = ?1")?
            .execute([number])?;
        note_action(conn, Some(number), None, "delete", by)?;
        let lease_end = self.endpoints.get(&number).map_or(NEVER, |endpoint| endpoint.lease_end);
        self.remove(number);
        // The leases of a deleted endpoint still end.
        self.turns.set(number, lease_end);
        Ok(EndpointChanged::Deleted)
    }
}

fn unwritable(error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(Box::new(error))
}

pub(super) fn note_action(
    conn: &Connection,
    endpoint: Option<i64>,
    message_seq: Option<i64>,
    what: &str,
    by: &Action,
) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "INSERT INTO hapax_sending_action (endpoint, message_seq, what, who, reason, at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute((endpoint, message_seq, what, &by.who, &by.reason, micros(by.at)))?;
    Ok(())
}
