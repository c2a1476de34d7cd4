//! Refused requests.

use std::net::IpAddr;

use hapax_core::Timestamp;
use hapax_core::store;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// A request that was refused. Only the time and the reason are proven.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Rejection {
    pub(crate) at: Timestamp,
    /// The id that the request was answered with.
    pub(crate) request_id: Uuid,
    /// The client's address.
    #[schema(value_type = Option<String>, required)]
    pub(crate) remote: Option<IpAddr>,
    /// The reason, as in the metric `hapax_rejections_total`.
    pub(crate) reason: String,
    /// Why, in more words.
    #[schema(required)]
    pub(crate) detail: Option<String>,
    /// The event id in the request, if one could be read. Anyone may have written it.
    #[schema(required)]
    pub(crate) claimed_id: Option<String>,
}

impl From<store::Rejection> for Rejection {
    fn from(rejection: store::Rejection) -> Self {
        let store::Rejection { source: _, at, request_id, remote, reason, detail, claimed_id } =
            rejection;
        Self { at, request_id, remote, reason, detail, claimed_id }
    }
}
