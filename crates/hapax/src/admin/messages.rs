//! Routes for messages and their deliveries.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::delivery::{DeliveryId, DeliveryStatus, MessageStatus};
use hapax_core::message::NewMessage;
use hapax_core::store::{
    self, DeliveryFilter, DeliveryReplayed, DeliverySkipped, MessageAct, MessageDetail,
    MessageFilter, MessageRef, ReadBound,
};
use hapax_core::{KeyHash, Tenant};
use serde::Deserialize as _;
use serde::de::IntoDeserializer as _;

use super::auth::Caller;
use super::events::instant;
use super::extract::{self, IdempotencyKeyHeader, JsonBody, PathId, QueryParams, cursor, limit};
use super::problem::Problem;
use super::{Accepted, Admin, AdminStore};
use crate::api::{
    ChangedDeliveries, DeliveriesQuery, Delivery, DeliveryEffect, List, Message, MessageQuery,
    MessageSummary, MessagesQuery, PublishRequest, Published, ReasonRequest, ReplayedDelivery,
    SkipEffect, SkippedDelivery,
};

/// `POST /api/v1/messages`.
pub(super) async fn publish<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    JsonBody(asked): JsonBody<PublishRequest>,
) -> Result<Accepted<Published>, Problem> {
    let mut message = NewMessage::from(asked);
    if message.id.is_none() {
        message.id = key.map(|key| id_of(caller.who(), &key));
    }
    if let Some(fault) = message.fault() {
        return Err(Problem::bad_request(&fault));
    }
    let published = |message: store::PublishedMessage, duplicate| {
        Accepted(Published { id: message.id, deliveries: message.deliveries, duplicate })
    };
    match admin.store.publish(message).await? {
        store::Published::Accepted(message) => Ok(published(message, false)),
        store::Published::Duplicate(message) => Ok(published(message, true)),
        store::Published::Conflict { id } => Err(Problem::message_conflict(&id)),
    }
}

/// The id of a message that is published under an Idempotency-Key: the same key of the same token gives the
/// same id.
fn id_of(who: &str, key: &str) -> String {
    let parts = [who, key].map(str::as_bytes);
    format!("msg_{:?}", KeyHash::of(b"idempotency key of a message", parts))
}

/// `GET /api/v1/messages`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<MessagesQuery>,
) -> Result<Json<List<MessageSummary>>, Problem> {
    let now = (admin.now)();
    let filter = MessageFilter {
        tenant: query.tenant.map(Tenant::new),
        message_type: query.r#type,
        key: query.key,
        status: query.status.as_deref().map(message_status).transpose()?,
        since: query.since.map(|at| instant(now, at)),
        until: query.until.map(|at| instant(now, at)),
        before: cursor(query.cursor)?,
        limit: limit(query.limit)?,
        bound: ReadBound::default(),
    };
    let page = admin.store.messages(filter).await?;
    Ok(Json(page.into()))
}

fn message_status(text: &str) -> Result<MessageStatus, Problem> {
    if text == "none" {
        return Ok(MessageStatus(None));
    }
    let read: Result<DeliveryStatus, serde::de::value::Error> =
        DeliveryStatus::deserialize(text.into_deserializer());
    read.map(|status| MessageStatus(Some(status)))
        .map_err(|error| Problem::bad_request(&format!("status: {error}, or `none`")))
}

/// `GET /api/v1/messages/{id}`.
pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
    QueryParams(query): QueryParams<MessageQuery>,
) -> Result<Json<Message>, Problem> {
    Ok(Json(find(&admin, &id, query).await?.into()))
}

/// `POST /api/v1/messages/{id}/cancel`.
pub(super) async fn cancel<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    QueryParams(query): QueryParams<MessageQuery>,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<ChangedDeliveries>, Problem> {
    change(&admin, &caller, &id, query, MessageAct::Cancel, asked).await
}

/// `POST /api/v1/messages/{id}/replay`.
pub(super) async fn replay<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    QueryParams(query): QueryParams<MessageQuery>,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<ChangedDeliveries>, Problem> {
    change(&admin, &caller, &id, query, MessageAct::Replay, asked).await
}

async fn change<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    id: &str,
    query: MessageQuery,
    act: MessageAct,
    asked: ReasonRequest,
) -> Result<Json<ChangedDeliveries>, Problem> {
    let reason = extract::reason(asked.reason)?;
    let found = find(admin, id, query).await?;
    let by = caller.action(reason, (admin.now)());
    let message = MessageRef { tenant: Tenant::new(&found.summary.tenant), id: found.summary.id };
    let changed = admin.store.change_message(message, act, by).await?.ok_or_else(unknown)?;
    let done = match act {
        MessageAct::Cancel => "cancelled",
        MessageAct::Replay => "replayed",
    };
    let (who, count) = (caller.who(), changed.len());
    tracing::info!(token = who, "{who} {done} {count} deliveries of the message {id}");
    Ok(Json(ChangedDeliveries { deliveries: changed }))
}

async fn find<S: AdminStore>(
    admin: &Admin<S>,
    id: &str,
    query: MessageQuery,
) -> Result<MessageDetail, Problem> {
    let mut found = admin.store.message(id, query.tenant.map(Tenant::new)).await?;
    match found.len() {
        0 => Err(unknown()),
        1 => Ok(found.remove(0)),
        _several => {
            let tenants: Vec<&str> = found.iter().map(|it| &*it.summary.tenant).collect();
            Err(Problem::conflict(&format!(
                "messages of several tenants have that id: add ?tenant= with one of {}",
                tenants.join(", ")
            )))
        }
    }
}

fn unknown() -> Problem {
    Problem::not_found("no message has that id")
}

/// `GET /api/v1/deliveries`.
pub(super) async fn deliveries<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<DeliveriesQuery>,
) -> Result<Json<List<Delivery>>, Problem> {
    let now = (admin.now)();
    let filter = DeliveryFilter {
        endpoint: query.endpoint,
        message: query.message,
        tenant: query.tenant.map(Tenant::new),
        status: query.status,
        key: query.key,
        since: query.since.map(|at| instant(now, at)),
        until: query.until.map(|at| instant(now, at)),
        before: cursor(query.cursor)?,
        limit: limit(query.limit)?,
        bound: ReadBound::default(),
    };
    let page = admin.store.deliveries(filter).await?;
    Ok(Json(page.into()))
}

/// `GET /api/v1/deliveries/{id}`.
pub(super) async fn delivery<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
) -> Result<Json<Delivery>, Problem> {
    let found = admin.store.delivery(parse(&id)?).await?;
    found.map(|found| Json(found.into())).ok_or_else(unknown_delivery)
}

/// `POST /api/v1/deliveries/{id}/replay`.
pub(super) async fn replay_delivery<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<ReplayedDelivery>, Problem> {
    let reason = extract::reason(asked.reason)?;
    let id = parse(&id)?;
    let by = caller.action(reason, (admin.now)());
    let effect = match admin.store.replay_delivery(id, by).await? {
        DeliveryReplayed::Due => DeliveryEffect::Due,
        DeliveryReplayed::AlreadyOpen => DeliveryEffect::AlreadyOpen,
        DeliveryReplayed::Gone => {
            return Err(Problem::conflict(
                "the delivery cannot be sent again: its endpoint was removed, or its message is pruned",
            ));
        }
        DeliveryReplayed::Unknown => return Err(unknown_delivery()),
    };
    let who = caller.who();
    tracing::info!(token = who, "{who} replayed the delivery {id}");
    Ok(Json(ReplayedDelivery { id, effect }))
}

/// `POST /api/v1/deliveries/{id}/skip`.
pub(super) async fn skip_delivery<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<SkippedDelivery>, Problem> {
    let reason = extract::reason(asked.reason)?;
    let id = parse(&id)?;
    let by = caller.action(reason, (admin.now)());
    let effect = match admin.store.skip_delivery(id, by).await? {
        DeliverySkipped::Skipped => SkipEffect::Skipped,
        DeliverySkipped::AlreadyOver => SkipEffect::AlreadyOver,
        DeliverySkipped::Sending => {
            return Err(Problem::conflict(
                "an attempt of this delivery is under way: skip it once the attempt has ended",
            ));
        }
        DeliverySkipped::Unknown => return Err(unknown_delivery()),
    };
    let who = caller.who();
    tracing::info!(token = who, "{who} skipped the delivery {id}");
    Ok(Json(SkippedDelivery { id, effect }))
}

fn parse(id: &str) -> Result<DeliveryId, Problem> {
    id.parse().map(DeliveryId).map_err(|_| unknown_delivery())
}

fn unknown_delivery() -> Problem {
    Problem::not_found("no delivery has that id")
}
