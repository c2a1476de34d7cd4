//! The acts of operators on messages and deliveries.

use hapax_core::delivery::DeliveryId;
use hapax_core::store::{Action, DeliveryReplayed, DeliverySkipped, MessageAct, MessageRef};
use uuid::Uuid;

use super::row::message_and_endpoint;
use crate::postgres::Shared;
use crate::postgres::connect::PgError;
use crate::postgres::jobs::only;
use crate::postgres::row::{stamp, text};

pub(super) async fn replay_delivery(
    shared: &Shared,
    delivery: DeliveryId,
    by: &Action,
) -> Result<DeliveryReplayed, PgError> {
    let (message, endpoint) = message_and_endpoint(delivery);
    let (who, reason) = (text(&by.who), by.reason.as_deref().map(text));
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT hapax.replay_delivery($1, $2, $3, $4, $5, $6, $7)",
            &[&delivery.0, &message, &endpoint, &who, &reason, &stamp(by.at), &shared.now()],
        )
        .await?;
    Ok(match only(&rows)?.get(0) {
        1 => DeliveryReplayed::Due,
        2 => DeliveryReplayed::AlreadyOpen,
        3 => DeliveryReplayed::Gone,
        _unknown => DeliveryReplayed::Unknown,
    })
}

pub(super) async fn skip_delivery(
    shared: &Shared,
    delivery: DeliveryId,
    by: &Action,
) -> Result<DeliverySkipped, PgError> {
    let (message, endpoint) = message_and_endpoint(delivery);
    let (who, reason) = (text(&by.who), by.reason.as_deref().map(text));
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT hapax.skip_delivery($1, $2, $3, $4, $5, $6, $7)",
            &[&delivery.0, &message, &endpoint, &who, &reason, &stamp(by.at), &shared.now()],
        )
        .await?;
    Ok(match only(&rows)?.get(0) {
        1 => DeliverySkipped::Skipped,
        2 => DeliverySkipped::Sending,
        3 => DeliverySkipped::AlreadyOver,
        _unknown => DeliverySkipped::Unknown,
    })
}

pub(super) async fn change_message(
    shared: &Shared,
    message: &MessageRef,
    act: MessageAct,
    by: &Action,
) -> Result<Option<Vec<DeliveryId>>, PgError> {
    let (tenant, id) = (text(message.tenant.as_str()), text(&message.id));
    let act = match act {
        MessageAct::Cancel => 0,
        MessageAct::Replay => 1,
    };
    let (who, reason) = (text(&by.who), by.reason.as_deref().map(text));
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT hapax.change_message($1, $2, $3, $4, $5, $6, $7)",
            &[&tenant, &id, &act, &who, &reason, &stamp(by.at), &shared.now()],
        )
        .await?;
    let changed: Option<Vec<Uuid>> = only(&rows)?.get(0);
    Ok(changed.map(|ids| ids.into_iter().map(DeliveryId).collect()))
}

pub(super) async fn cancel_orphans(shared: &Shared, limit: usize) -> Result<bool, PgError> {
    let most = i32::try_from(limit.max(1)).unwrap_or(i32::MAX);
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client.query("SELECT hapax.cancel_orphans($1, $2)", &[&most, &shared.now()]).await?;
    Ok(only(&rows)?.get::<_, i32>(0) >= most)
}
