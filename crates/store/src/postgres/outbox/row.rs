//! How endpoints and deliveries are stored in this database.

use hapax_core::Tenant;
use hapax_core::delivery::{DeliveryId, DeliveryPhase};
use hapax_core::endpoint::{
    Disabled, DisabledBy, EndpointId, EndpointRecord, EndpointSealed, EndpointSettings,
};
use hapax_core::vault::{KeyId, Sealed};
use tokio_postgres::Row;

/// The bits of an endpoint's number in the id of a delivery, and those of the message's after them.
const ENDPOINT_BITS: u32 = 24;
const MESSAGE_BITS: u32 = 38;

/// The columns of an endpoint, in the order in which [`record`] reads them.
pub(super) const RECORD: &str = "e.id, e.tenant, e.settings, e.secrets, e.headers, e.version, e.created_at, \
                      e.disabled_at, e.disabled_reason, e.endpoint, e.failing, e.disabled_by";

/// An endpoint from [`RECORD`], which begins at column `from`. `None` if the row was changed by hand
/// and cannot be read. The error is logged, and nothing is sent to that endpoint.
pub(super) fn record(row: &Row, from: usize) -> Option<EndpointRecord> {
    let id = EndpointId(row.get(from));
    let settings = settings(id, row.get(from + 2))?;
    let sealed = sealed(id, row.get(from + 3), row.get(from + 4))?;
    let disabled_at: Option<_> = row.get(from + 7);
    Some(EndpointRecord {
        id,
        tenant: Tenant::new(row.get::<_, &str>(from + 1)),
        settings,
        sealed,
        version: row.get::<_, i64>(from + 5).unsigned_abs(),
        created_at: row.get(from + 6),
        disabled: disabled_at.map(|at| Disabled {
            at,
            reason: row.get::<_, Option<String>>(from + 8).unwrap_or_default(),
            by: DisabledBy::parse(row.get(from + 11)),
        }),
        failing: row.get(from + 10),
    })
}

/// The settings of an endpoint from their column.
pub(super) fn settings(id: EndpointId, text: &str) -> Option<EndpointSettings> {
    let read = serde_json::from_str(text);
    read.inspect_err(|error| {
        tracing::error!(endpoint = %id, "the stored settings of endpoint {id} cannot be read: {error}");
    })
    .ok()
}

/// The sealed values of an endpoint from their columns.
pub(super) fn sealed(
    id: EndpointId,
    secrets: &[u8],
    headers: Option<&[u8]>,
) -> Option<EndpointSealed> {
    let read = |bytes: &[u8]| {
        let sealed = Sealed::from_bytes(bytes.to_vec());
        sealed.inspect_err(|error| {
            tracing::error!(endpoint = %id, "a sealed value of endpoint {id} cannot be read: {error}");
        })
    };
    let secrets = read(secrets).ok()?;
    let headers = headers.map(read).transpose().ok()?;
    Some(EndpointSealed { secrets, headers })
}

/// A vault key's id as it is stored.
pub(super) fn key_number(key: KeyId) -> i64 {
    i64::from_be_bytes(key.0)
}

/// The numbers of the message and the endpoint in a delivery's id. Such a delivery need not exist.
/// `hapax.delivery_id` makes the id.
pub(super) fn message_and_endpoint(id: DeliveryId) -> (i64, i32) {
    let low = id.0.as_u128() as u64;
    let message = low & ((1 << MESSAGE_BITS) - 1);
    let endpoint = (low >> MESSAGE_BITS) & ((1 << ENDPOINT_BITS) - 1);
    (message as i64, endpoint as i32)
}

/// A delivery's phase from its column. An unknown number counts as dead, so that it is shown to an
/// operator.
pub(super) fn phase_of(state: i16) -> DeliveryPhase {
    match state {
        0 => DeliveryPhase::Ready,
        1 => DeliveryPhase::Leased,
        2 => DeliveryPhase::Delivered,
        4 => DeliveryPhase::Cancelled,
        5 => DeliveryPhase::Parked,
        _dead => DeliveryPhase::Dead,
    }
}
