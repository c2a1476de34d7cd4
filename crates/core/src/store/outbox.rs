//! Sending: publishing messages, the endpoints that get them, and the attempts to deliver them.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Action, ActionNote, Cursor, HandlerAnswer, Held, Page, ReadBound, StoreError};
use crate::delivery::{DeliveryId, DeliveryStatus, MessageStatus};
use crate::endpoint::{
    AddressChoice, EndpointAct, EndpointChanged, EndpointId, EndpointRecord, EndpointSealed,
    NewEndpoint,
};
use crate::job::{Fence, Retry};
use crate::key::Tenant;
use crate::message::{NewMessage, Payload};
use crate::vault::KeyId;

/// The acts of sending. Every method is one atomic act: after a crash in the middle, either all of its
/// changes are stored or none.
pub trait Outbox: Send + Sync + 'static {
    /// Publishes a message: writes it, and one delivery for each endpoint of its tenant that wants it now,
    /// in one commit. After `Ok` the message is on disk. The same id with the same content is a duplicate;
    /// with other content it is a conflict. Neither changes anything. The caller has checked
    /// [`NewMessage::fault`].
    ///
    /// Dropping the future does not undo the commit.
    fn publish(
        &self,
        message: NewMessage,
    ) -> impl Future<Output = Result<Published, StoreError>> + Send;

    /// Settles attempts and claims due deliveries, in one commit. An outcome whose fence is no longer
    /// valid gets [`Held::Lost`] and changes nothing. If `Delivered` is reported again under the same
    /// fence, the answer is [`Held::Kept`].
    ///
    /// Outcomes are settled before expired leases are found, so a report at the end of a lease still counts.
    /// The schedule of a failed attempt is the endpoint's at that moment.
    ///
    /// An exchange may claim less than is due, so that it delays no other commit for long; `next_due` is
    /// then a time that has already passed. The endpoints take turns. Over all nodes, each endpoint has at
    /// most `max_in_flight` claims at once, and its claims stay within its rate limit. An endpoint is
    /// skipped if it is disabled or deleted, or if the key of one of its sealed values is not in
    /// `ask.vault_keys`. Expired leases are found here, including those of disabled and deleted endpoints:
    /// the attempt is lost and uses no step of the schedule.
    ///
    /// An endpoint that keeps order gets at most one delivery of each key at once, the earliest that has not
    /// ended. The claim parks the others that are due. Every commit that ends a delivery readies the next one
    /// under its key.
    ///
    /// Failures in a row open the circuit of an endpoint ([`crate::circuit`]); only one delivery is then claimed
    /// when it is time to try the endpoint. This call disables an endpoint that asks to be disabled, or whose
    /// attempts have all failed for days ([`GIVE_UP_AFTER`](crate::circuit::GIVE_UP_AFTER)). Each claim commits
    /// attempt + 1 and a new fence before this returns. On SQLite a power loss may undo a claim, so an attempt
    /// may be repeated under the same message id.
    fn exchange(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> impl Future<Output = Result<Exchanged, StoreError>> + Send;

    /// How many exchanges of one sender the store can use at once. A store that prepares a commit while it
    /// syncs the previous one can use several.
    fn exchanges_at_once(&self) -> usize {
        1
    }

    /// How long an exchange may wait until half of the attempts have ended. Waiting helps if an exchange
    /// is expensive even when it settles few outcomes.
    fn outcomes_gathered_for(&self) -> Duration {
        Duration::ZERO
    }

    /// A number that grows with each act of an operator through this process that may end claims, before the
    /// act is answered. Such acts are a change of an endpoint, the cancellation of a message and the deletion
    /// of a tenant. Acts through other processes may be missing.
    fn operator_acts(&self) -> u64;

    /// Resolves when there may be due deliveries, and after `at_most` in any case. A hint: polling is the
    /// truth.
    fn wait_for_deliveries(&self, at_most: Duration) -> impl Future<Output = ()> + Send;

    /// Creates an endpoint. The endpoint gets messages that are published from this commit on.
    fn create_endpoint(
        &self,
        endpoint: NewEndpoint,
        by: Action,
    ) -> impl Future<Output = Result<EndpointChanged, StoreError>> + Send;

    /// Changes an endpoint in one commit. The change holds for the next claim on every node. A deleted
    /// endpoint is unknown, and its uid is free. Its open deliveries are shown as cancelled from this commit
    /// on; [`cancel_orphans`](Self::cancel_orphans) ends them.
    fn change_endpoint(
        &self,
        endpoint: EndpointId,
        act: EndpointAct,
        by: Action,
    ) -> impl Future<Output = Result<EndpointChanged, StoreError>> + Send;

    /// Sends one delivery again, or now if it waits for its next attempt. A delivery to a disabled
    /// endpoint is held until the endpoint is enabled.
    fn replay_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> impl Future<Output = Result<DeliveryReplayed, StoreError>> + Send;

    /// Gives up one delivery that waits or is dead, so that the next one under its key is sent.
    fn skip_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> impl Future<Output = Result<DeliverySkipped, StoreError>> + Send;

    /// Cancels the open deliveries of a message, or replays those that are not delivered. Returns
    /// the ids of the changed deliveries. Deliveries to deleted endpoints are never replayed.
    /// `None` if there is no such message.
    fn change_message(
        &self,
        message: MessageRef,
        act: MessageAct,
        by: Action,
    ) -> impl Future<Output = Result<Option<Vec<DeliveryId>>, StoreError>> + Send;

    /// Cancels open deliveries of deleted endpoints, at most `limit` of them. True when there may be more.
    fn cancel_orphans(&self, limit: usize)
    -> impl Future<Output = Result<bool, StoreError>> + Send;
}

/// The reads of sending. They never wait for a writer.
pub trait InspectOutbox: Send + Sync + 'static {
    /// Endpoints, newest first, deleted ones left out.
    fn endpoints(
        &self,
        filter: EndpointFilter,
    ) -> impl Future<Output = Result<Page<EndpointRecord>, StoreError>> + Send;

    /// One endpoint; `None` if it is unknown or deleted.
    fn endpoint(
        &self,
        id: EndpointId,
    ) -> impl Future<Output = Result<Option<EndpointRecord>, StoreError>> + Send;

    /// Messages that match, newest first, bounded like [`Inspect::events`](super::Inspect::events).
    fn messages(
        &self,
        filter: MessageFilter,
    ) -> impl Future<Output = Result<Page<MessageSummary>, StoreError>> + Send;

    /// The messages with this id, of all tenants or of one. At most ten are returned.
    fn message(
        &self,
        id: &str,
        tenant: Option<Tenant>,
    ) -> impl Future<Output = Result<Vec<MessageDetail>, StoreError>> + Send;

    /// Deliveries that match, newest first, bounded like [`Inspect::events`](super::Inspect::events).
    fn deliveries(
        &self,
        filter: DeliveryFilter,
    ) -> impl Future<Output = Result<Page<DeliveryDetail>, StoreError>> + Send;

    /// One delivery.
    fn delivery(
        &self,
        id: DeliveryId,
    ) -> impl Future<Output = Result<Option<DeliveryDetail>, StoreError>> + Send;

    /// The backlog over all endpoints. Counting stops at [`LANE_COUNT_MAX`](crate::limits::LANE_COUNT_MAX).
    fn delivery_backlog(&self) -> impl Future<Output = Result<DeliveryBacklog, StoreError>> + Send;
}

/// The answer to a publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Published {
    /// The message is new and on disk.
    Accepted(PublishedMessage),
    /// The same message was published before.
    Duplicate(PublishedMessage),
    /// The id was used before, for other content.
    Conflict {
        /// The id.
        id: String,
    },
}

/// A message that is on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedMessage {
    /// Its id.
    pub id: String,
    /// How many deliveries were written with it.
    pub deliveries: u64,
}

/// The deliveries to claim.
#[derive(Debug, Clone)]
pub struct DeliveryAsk {
    /// The most deliveries to claim.
    pub limit: usize,
    /// The approximate limit of the bytes of their bodies together. A single delivery may exceed the limit.
    pub bytes_max: usize,
    /// The name of this node, recorded with the attempt.
    pub node: Arc<str>,
    /// The keys of the vault that this node holds.
    pub vault_keys: Arc<[KeyId]>,
    /// Whether this node keeps each endpoint's `max_in_flight` by itself and holds further claims until attempts
    /// have ended. A store that only this node uses may then claim more than that number, so that the next
    /// attempts begin before the last outcomes are committed.
    pub claims_ahead: bool,
}

/// The answer to an exchange.
#[derive(Debug, Clone, Default)]
pub struct Exchanged {
    /// Whether each outcome was recorded, in their order.
    pub settled: Vec<Held>,
    /// The claims.
    pub claims: Vec<DeliveryClaim>,
    /// When the next delivery that was not claimed is due, as far as the store knows. The time is a hint for
    /// how long to wait.
    pub next_due: Option<Timestamp>,
}

/// The right to attempt a delivery, with the data that the attempt needs.
#[derive(Debug, Clone)]
pub struct DeliveryClaim {
    /// The delivery.
    pub delivery: DeliveryId,
    /// The fence of this claim.
    pub fence: Fence,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// The id of the message: `webhook-id`.
    pub message: String,
    /// The bytes to send.
    pub body: Bytes,
    /// When the lease ends.
    pub leased_until: Timestamp,
    /// The endpoint as it is at this claim.
    pub endpoint: Arc<DeliveryTarget>,
}

/// An endpoint as a sender needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryTarget {
    /// Our id.
    pub id: EndpointId,
    /// The owner.
    pub tenant: Tenant,
    /// The address.
    pub url: String,
    /// The party that chose the address.
    pub address_by: AddressChoice,
    /// The deadline of the attempt.
    pub timeout: Duration,
    /// The most attempts under way at once.
    pub max_in_flight: u32,
    /// How much of a message it gets.
    pub payload: Payload,
    /// Its secrets and custom headers.
    pub sealed: EndpointSealed,
}

impl DeliveryTarget {
    /// The part of an endpoint's record that a sender needs.
    pub fn of(record: &EndpointRecord) -> Self {
        let settings = &record.settings;
        Self {
            id: record.id,
            tenant: record.tenant.clone(),
            url: settings.url.clone(),
            address_by: settings.address_by,
            timeout: settings.timeout,
            max_in_flight: settings.max_in_flight,
            payload: settings.payload,
            sealed: record.sealed.clone(),
        }
    }
}

/// How one attempt ended.
#[derive(Debug, Clone)]
pub struct AttemptOutcome {
    /// The delivery.
    pub delivery: DeliveryId,
    /// The fence of the claim.
    pub fence: Fence,
    /// How long the attempt took.
    pub took: Duration,
    /// The verdict.
    pub verdict: AttemptVerdict,
}

/// The verdict on one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttemptVerdict {
    /// The endpoint answered with a 2xx.
    Delivered(HandlerAnswer),
    /// The endpoint answered with a 2xx and asked not to be called again. The store records the delivery as
    /// delivered, and disables the endpoint with this reason.
    DeliveredLast {
        /// The endpoint's answer.
        answer: HandlerAnswer,
        /// Why the endpoint is disabled, in words for an operator.
        reason: String,
    },
    /// The attempt failed, or the endpoint answered with another status.
    Failed {
        /// Why, in words for an operator.
        error: String,
        /// The endpoint's answer, if it answered.
        answer: Option<HandlerAnswer>,
        /// When to try again.
        retry: Retry,
        /// The meaning of the failure for the endpoint as a whole.
        says: EndpointSignal,
    },
    /// The attempt never began, and does not count.
    GivenBack,
}

/// The meaning of a failed attempt for the endpoint as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointSignal {
    /// The endpoint may be failing.
    Fails,
    /// The endpoint may be failing, and no attempt may be made for this long (Retry-After with 429
    /// or 503).
    Pauses(Duration),
    /// The endpoint works, and refuses only this delivery.
    Works,
    /// The endpoint must not be called again: the store disables it, with the attempt's error as
    /// the reason.
    Disable,
    /// Nothing: the request never left this process.
    Nothing,
}

/// The answer to a replay of one delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryReplayed {
    /// The delivery is due now.
    Due,
    /// The delivery was due or under way already.
    AlreadyOpen,
    /// Its endpoint was deleted, or its message is pruned.
    Gone,
    /// There is no such delivery.
    Unknown,
}

/// The answer to a skip of one delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliverySkipped {
    /// The delivery is cancelled.
    Skipped,
    /// An attempt is under way.
    Sending,
    /// The delivery is delivered or cancelled.
    AlreadyOver,
    /// There is no such delivery.
    Unknown,
}

/// A message by its tenant and id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageRef {
    /// The owner.
    pub tenant: Tenant,
    /// The id.
    pub id: String,
}

/// An operator's act on all deliveries of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageAct {
    /// Cancels open deliveries.
    Cancel,
    /// Sends again the deliveries that have ended without being delivered, and makes waiting ones
    /// due now.
    Replay,
}

/// Which endpoints to list.
#[derive(Debug, Clone, Default)]
pub struct EndpointFilter {
    /// Only those whose circuit is open.
    pub failing: bool,
    /// Of this tenant.
    pub tenant: Option<Tenant>,
    /// Only entries older than this: the end of the previous page.
    pub before: Option<Cursor>,
    /// The most endpoints to return.
    pub limit: usize,
}

/// Which messages to list.
#[derive(Debug, Clone, Default)]
pub struct MessageFilter {
    /// Of this tenant.
    pub tenant: Option<Tenant>,
    /// Only messages of exactly this type.
    pub message_type: Option<String>,
    /// Only messages with exactly this key.
    pub key: Option<String>,
    /// Only messages in this status; `Some(MessageStatus(None))` finds messages without deliveries.
    pub status: Option<MessageStatus>,
    /// Published at or after.
    pub since: Option<Timestamp>,
    /// Published before.
    pub until: Option<Timestamp>,
    /// Only entries older than this: the end of the previous page.
    pub before: Option<Cursor>,
    /// The most messages to return.
    pub limit: usize,
    /// How much the page may read.
    pub bound: ReadBound,
}

/// Which deliveries to list.
#[derive(Debug, Clone, Default)]
pub struct DeliveryFilter {
    /// To this endpoint.
    pub endpoint: Option<EndpointId>,
    /// Only deliveries of the message with this id.
    pub message: Option<String>,
    /// Of this tenant.
    pub tenant: Option<Tenant>,
    /// In this status.
    pub status: Option<DeliveryStatus>,
    /// Only deliveries of messages with exactly this key.
    pub key: Option<String>,
    /// Published at or after.
    pub since: Option<Timestamp>,
    /// Published before.
    pub until: Option<Timestamp>,
    /// Only entries older than this: the end of the previous page.
    pub before: Option<Cursor>,
    /// The most deliveries to return.
    pub limit: usize,
    /// How much the page may read.
    pub bound: ReadBound,
}

/// A message in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageSummary {
    /// Its id.
    pub id: String,
    /// The owner.
    pub tenant: String,
    /// Its type.
    pub r#type: String,
    /// Its order key.
    pub key: Option<String>,
    /// Its number among the messages with that key.
    pub sequence: Option<u64>,
    /// The version of the publisher's API.
    pub api_version: Option<String>,
    /// When it was published.
    pub created_at: Timestamp,
    /// Its status over all deliveries.
    pub status: MessageStatus,
    /// How many deliveries it has.
    pub deliveries: u64,
}

/// A message with everything that is stored about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageDetail {
    /// The message as in a list.
    pub summary: MessageSummary,
    /// The bytes that endpoints get; empty once the message is pruned.
    pub body: Bytes,
    /// Its deliveries, by endpoint.
    pub deliveries: Vec<DeliveryDetail>,
}

/// A delivery with its attempts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryDetail {
    /// Our id.
    pub id: DeliveryId,
    /// The id of the message.
    pub message: String,
    /// The type of the message.
    pub message_type: String,
    /// The order key of the message.
    pub key: Option<String>,
    /// The owner.
    pub tenant: String,
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Its address, as it is now.
    pub url: String,
    /// The status.
    pub status: DeliveryStatus,
    /// Why it is not delivered: the last error, why the endpoint is disabled, or why it was cancelled.
    pub reason: Option<String>,
    /// Attempts so far.
    pub attempt: u32,
    /// When it was published.
    pub created_at: Timestamp,
    /// When the next attempt is due, or the lease ends; `None` once it has ended.
    pub due_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// Attempts that ended, oldest first.
    pub attempts: Vec<DeliveryAttempt>,
    /// The actions of operators on it and on its message, oldest first.
    pub actions: Vec<ActionNote>,
}

/// One attempt that ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryAttempt {
    /// The number of the attempt.
    pub n: u32,
    /// When it began.
    pub at: Timestamp,
    /// How long it took, in milliseconds; `None` for a lost attempt.
    pub took_ms: Option<u64>,
    /// The HTTP status that the endpoint answered with.
    pub status: Option<u16>,
    /// Why it failed.
    pub error: Option<String>,
    /// The beginning of the answer's body; `None` if it was empty.
    pub answer: Option<String>,
    /// The node that made it.
    pub node: String,
}

/// The backlog of deliveries. Every number stops at
/// [`LANE_COUNT_MAX`](crate::limits::LANE_COUNT_MAX), which means "this many or more".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeliveryBacklog {
    /// Deliveries to active endpoints that wait for their first attempt or for a retry.
    pub waiting: u64,
    /// Deliveries under way.
    pub sending: u64,
    /// Deliveries to endpoints that are disabled or whose circuit is open.
    pub held: u64,
    /// Deliveries to active endpoints that wait for an earlier one under their key.
    pub parked: u64,
    /// Dead deliveries.
    pub dead: u64,
    /// The earliest time at which a delivery to an active endpoint is or was due.
    pub oldest_due: Option<Timestamp>,
}
