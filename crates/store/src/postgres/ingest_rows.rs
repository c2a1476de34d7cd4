//! A batch as parameters of a statement: arrays of rows. One array of rows costs the database a
//! fraction of an array for each column.

use std::collections::HashSet;
use std::error::Error;

use bytes::{BufMut, BytesMut};
use hapax_core::store::EventId;
use hapax_core::{GuardKeep, GuardSeen, Receipt, Timeliness, Timestamp};
use tokio_postgres::types::{IsNull, Kind, ToSql, Type};
use uuid::Uuid;

use super::connect::{PgError, PooledClient};
use super::ingest::{PendingReceipt, RowVerdict};
use super::lane_ids::LaneAt;
use super::row::{of_hash, stamp, text};
use crate::limits::CONFLICTS_IN_FULL;

/// The receipts of one statement, in the order in which they are decided.
#[derive(Default)]
pub(super) struct Rows<'a> {
    arrived: Vec<ArrivalRow<'a>>,
    doubts: Vec<DoubtRow<'a>>,
    promised: Vec<Promised>,
}

/// A `hapax.arrived`.
#[derive(Debug)]
struct ArrivalRow<'a> {
    id: Uuid,
    hash: Uuid,
    tenant: &'a str,
    source: &'a str,
    event_id: &'a [u8],
    event_type: Option<&'a [u8]>,
    occurred_at: Option<Timestamp>,
    received_at: Timestamp,
    body_hash: Uuid,
    request_id: Uuid,
    remote: Option<std::net::IpAddr>,
    secret: i32,
    signed_at: Option<Timestamp>,
    headers: &'a [u8],
    body: &'a [u8],
    guard: Option<Uuid>,
    /// The least time for which the guard is kept, in microseconds; `None`: as long as the key.
    guard_us: Option<i64>,
    /// The hash of the key under which a suspected replay waits.
    replay_hash: Option<Uuid>,
    /// Whether the event has jobs.
    has_jobs: bool,
}

/// A `hapax.doubt`: why an arrival needs the function.
#[derive(Debug)]
struct DoubtRow<'a> {
    late: bool,
    copies: bool,
    before: Option<Uuid>,
    after: Option<Uuid>,
    not_before: Option<Timestamp>,
    not_after: Option<Timestamp>,
    other_hash: Option<Uuid>,
    other_event_id: Option<&'a [u8]>,
    replay_event_id: Option<&'a [u8]>,
}

/// A `hapax.promised`: a job of arrival number `n`, counted from 1.
#[derive(Debug)]
struct Promised {
    n: i32,
    handler: i32,
    lane: i32,
    state: i16,
    resource: Option<String>,
    position: Option<i64>,
    error: Option<String>,
}

/// A struct as the database's composite type of the same fields, in the same order.
macro_rules! composite {
    ($name:ident $(<$life:lifetime>)? { $($field:ident),+ $(,)? }) => {
        impl tokio_postgres::types::ToSql for $name $(<$life>)? {
            fn to_sql(
                &self,
                ty: &tokio_postgres::types::Type,
                out: &mut bytes::BytesMut,
            ) -> Result<tokio_postgres::types::IsNull, Box<dyn std::error::Error + Sync + Send>> {
                $crate::postgres::ingest_rows::write_composite(ty, &[$(&self.$field as &dyn tokio_postgres::types::ToSql),+], out)
            }

            fn accepts(ty: &tokio_postgres::types::Type) -> bool {
                matches!(ty.kind(), tokio_postgres::types::Kind::Composite(fields)
                    if fields.iter().map(|field| field.name()).eq([$(stringify!($field)),+]))
            }

            tokio_postgres::types::to_sql_checked!();
        }
    };
}

pub(super) use composite;

composite!(ArrivalRow<'_> {
    id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
    request_id, remote, secret, signed_at, headers, body, guard, guard_us, replay_hash,
    has_jobs,
});
composite!(DoubtRow<'_> {
    late, copies, before, after, not_before, not_after, other_hash, other_event_id,
    replay_event_id,
});
composite!(Promised { n, handler, lane, state, resource, position, error });

pub(super) fn write_composite(
    ty: &Type,
    values: &[&dyn ToSql],
    out: &mut BytesMut,
) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
    let Kind::Composite(fields) = ty.kind() else { return Err("not a composite type".into()) };
    out.put_i32(i32::try_from(values.len())?);
    for (field, value) in fields.iter().zip(values) {
        out.put_u32(field.type_().oid());
        let length_at = out.len();
        out.put_i32(-1);
        if let IsNull::No = value.to_sql_checked(field.type_(), out)? {
            let length = i32::try_from(out.len() - length_at - 4)?;
            out[length_at..length_at + 4].copy_from_slice(&length.to_be_bytes());
        }
    }
    Ok(IsNull::No)
}

impl<'a> Rows<'a> {
    pub(super) fn push(&mut self, item: &PendingReceipt<'a>, lanes: &[LaneAt]) {
        let (receipt, via, key) = (item.receipt, item.via, item.receipt.key());
        self.arrived.push(ArrivalRow {
            id: item.id.0,
            hash: of_hash(receipt.key_hash()),
            tenant: key.tenant.as_str(),
            source: key.source.as_str(),
            event_id: key.event_id.as_bytes(),
            event_type: receipt.event_type().map(str::as_bytes),
            occurred_at: receipt.occurred_at().map(stamp),
            received_at: via.received_at,
            body_hash: of_hash(receipt.body_hash()),
            request_id: via.request_id,
            remote: via.remote,
            secret: i32::try_from(via.secret).unwrap_or(i32::MAX),
            signed_at: via.signed_at.map(stamp),
            headers: via.headers.as_bytes(),
            body: receipt.body(),
            guard: receipt.guard().map(|guard| of_hash(guard.hash)),
            guard_us: receipt.guard().and_then(|guard| match guard.keep {
                GuardKeep::For(long) => i64::try_from(long.as_micros()).ok(),
                GuardKeep::WithKeys => None,
            }),
            replay_hash: receipt.if_replay().map(|key| of_hash(key.hash())),
            has_jobs: !item.jobs.is_empty(),
        });
        let n = self.arrived.len() as i32;
        self.promised.extend(item.jobs.iter().zip(lanes).map(|(job, at)| Promised {
            n,
            handler: at.handler,
            lane: at.lane,
            state: if job.hopeless.is_some() { 4 } else { 0 },
            resource: job.place.as_ref().map(|place| text(&place.resource)),
            position: job.place.as_ref().map(|place| place.position.0),
            error: job.hopeless.as_deref().map(text),
        }));
    }

    /// Adds the columns that only [`Rows::ingest`] sends, of the receipt that was pushed last.
    pub(super) fn push_doubt(&mut self, receipt: &'a Receipt) {
        let (beside, other) = (receipt.neighbours(), receipt.if_conflict());
        let key_at = |at: usize| beside.map(|beside| of_hash(beside.keys[at].hash()));
        self.doubts.push(DoubtRow {
            late: receipt.timeliness() != Timeliness::OnTime,
            copies: receipt.guard().is_some_and(|guard| guard.seen == GuardSeen::Duplicate),
            before: key_at(0),
            after: key_at(1),
            not_before: beside.map(|beside| stamp(beside.not_before)),
            not_after: beside.map(|beside| stamp(beside.not_after)),
            other_hash: other.map(|other| of_hash(other.hash())),
            other_event_id: other.map(|other| other.event_id.as_bytes()),
            replay_event_id: receipt.if_replay().map(|key| key.event_id.as_bytes()),
        });
    }

    /// Runs the single statement; returns the ids of new events.
    pub(super) async fn insert(
        &self,
        client: &mut PooledClient,
        now: Option<Timestamp>,
    ) -> Result<HashSet<Uuid>, PgError> {
        const EVENTS: &str =
            concat!(include_str!("sql/insert_events.sql"), ") SELECT id FROM accepted");
        const EVENTS_AND_JOBS: &str = concat!(
            include_str!("sql/insert_events.sql"),
            include_str!("sql/insert_jobs.sql"),
            ") SELECT id FROM accepted"
        );
        if self.arrived.is_empty() {
            return Ok(HashSet::new());
        }
        let rows = if self.promised.is_empty() {
            client.query(EVENTS, &[&self.arrived, &now]).await?
        } else {
            client.query(EVENTS_AND_JOBS, &[&self.arrived, &now, &self.promised]).await?
        };
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Calls the function, which needs a doubt for each row. Returns each row with its verdict.
    pub(super) async fn ingest(
        &self,
        client: &mut PooledClient,
        now: Option<Timestamp>,
    ) -> Result<Vec<(usize, RowVerdict)>, PgError> {
        let conflicts_max = CONFLICTS_IN_FULL as i64;
        let rows = client
            .query(
                "SELECT row_number, verdict, id FROM hapax.ingest($1, $2, $3, $4, $5)",
                &[&self.arrived, &self.doubts, &self.promised, &conflicts_max, &now],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| {
                let (place, verdict, id): (i32, i16, Uuid) = (row.get(0), row.get(1), row.get(2));
                let id = EventId(id);
                let row_verdict = match verdict {
                    0 => RowVerdict::Accepted(id),
                    1 => RowVerdict::Duplicate(id),
                    2 => RowVerdict::Conflict(id),
                    3 => RowVerdict::Review(id),
                    4 => RowVerdict::Promoted(id),
                    _ => RowVerdict::Taken,
                };
                (place as usize - 1, row_verdict)
            })
            .collect())
    }
}
