//! The request and response types of the admin API. The admin side answers with these types, and the command
//! line reads them: a field has one definition.
//!
//! Request types refuse unknown fields, so that a misspelt `dry_run` does not become a run. Response types
//! ignore unknown fields, so that an older command line can read a newer server. The OpenAPI document is
//! generated from these types: a doc comment here is a description there.

mod alerts;
mod audit;
mod claims;
mod dead_letters;
mod endpoint_figures;
mod endpoints;
mod events;
mod jobs;
mod messages;
mod nodes;
mod plans;
mod portal;
mod rejections;
mod replay;
mod source_secrets;
mod stats;
mod storage;
mod tenants;
mod values;

use hapax_core::{Timestamp, store};
use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{
    KnownFormat, Object, ObjectBuilder, Schema, SchemaFormat, SchemaType, Type,
};
use utoipa::openapi::{ArrayBuilder, Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

pub(crate) use alerts::{
    Alert, AlertList, AlertReach, AlertSilence, Severity, SilenceRequest, TestedAlerts,
};
pub(crate) use audit::{AuditEntry, AuditQuery};
pub(crate) use claims::{
    Claim, ClaimRequest, Claimed, CompleteRequest, FailRequest, RenewRequest, Settled,
};
pub(crate) use dead_letters::{DeadLetters, DeadLettersQuery};
pub(crate) use endpoint_figures::EndpointRates;
pub(crate) use endpoints::{
    Deleted, Endpoint, EndpointRequest, EndpointsQuery, Patch, PingAnswer, ReasonRequest,
    RotateRequest,
};
pub(crate) use events::{
    Action, Arrival, Event, EventSummary, EventsQuery, PublishedDelivery, SameValue,
};
pub(crate) use jobs::{Attempt, Handler, HandlerPause, Job, JobsQuery, Lane, Pause};
pub(crate) use messages::{
    ChangedDeliveries, DeliveriesQuery, Delivery, DeliveryEffect, Message, MessageQuery,
    MessageSummary, MessagesQuery, PublishRequest, Published, ReplayedDelivery, SkipEffect,
    SkippedDelivery,
};
pub(crate) use nodes::Node;
pub(crate) use plans::{EventPlanRequest, Plan, PlanRequest, Planned, PlannedWork};
pub(crate) use portal::{PortalAccess, PortalLink, PortalRequest, PortalRevokeQuery, RevokedLinks};
pub(crate) use rejections::Rejection;
pub(crate) use replay::{
    DecideRequest, Decided, ReplayEffect, ReplayEventRequest, ReplayItem, ReplayJobRequest,
    ReplayJobsRequest, Replayed,
};
pub(crate) use source_secrets::SourceSecret;
pub(crate) use stats::{Figures, History, HistoryPoint, HistoryQuery, Seconds, Stats, StatsQuery};
pub(crate) use storage::{DeleteKeyRequest, DeletedKey, Key, KeysQuery, Storage};
pub(crate) use tenants::{
    DeletionState, SourceSecretRequest, SourceSecrets, SourceSecretsRequest, TenantDeletion,
};
pub(crate) use values::{Body, Moment, RetryIn, Span};

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct List<T> {
    pub(crate) items: Vec<T>,
    /// The cursor of the next page; null on the last one.
    pub(crate) next: Option<String>,
    /// Set if the page ended before it was full, because the search took long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) searched_to: Option<Timestamp>,
}

impl<T> List<T> {
    /// A list that is never longer than one page.
    pub(crate) fn whole(items: Vec<T>) -> Self {
        Self { items, next: None, searched_to: None }
    }
}

impl<T, U: From<T>> From<store::Page<T>> for List<U> {
    fn from(page: store::Page<T>) -> Self {
        let next = page.next.map(|store::Cursor(next)| next.to_string());
        let items = page.items.into_iter().map(U::from).collect();
        Self { items, next, searched_to: page.searched_to }
    }
}

// By hand, because the derive gives every `List<T>` the same name.
impl<T: ToSchema> PartialSchema for List<T> {
    fn schema() -> RefOr<Schema> {
        let text_or_null = SchemaType::from_iter([Type::String, Type::Null]);
        let next = ObjectBuilder::new()
            .schema_type(text_or_null)
            .description(Some("The cursor of the next page; null on the last one."));
        let searched_to = ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime)))
            .description(Some(
                "Set if the page ended before it was full, because the search took long: everything since this \
                 time was searched, and the cursor continues the search.",
            ));
        let object = Object::builder()
            .property("items", ArrayBuilder::new().items(Ref::from_schema_name(T::name())))
            .property("next", next)
            .property("searched_to", searched_to)
            .required("items")
            .required("next")
            .description(Some("One page of a list."));
        object.into()
    }
}

impl<T: ToSchema> ToSchema for List<T> {
    fn name() -> std::borrow::Cow<'static, str> {
        format!("{}List", T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((T::name().into_owned(), T::schema()));
        T::schemas(schemas);
    }
}

/// An error, as RFC 9457 defines it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct Problem {
    /// A name for the kind of error that never changes, such as `urn:hapax:problem:not_found`.
    pub(crate) r#type: String,
    pub(crate) title: String,
    /// The HTTP status.
    pub(crate) status: u16,
    /// The problem in words.
    pub(crate) detail: String,
    /// If several events have the sender's id: Hapax's id of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) candidates: Vec<Uuid>,
}
