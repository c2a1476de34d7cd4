//! Links to the portal: whose pages they open, for how long, and what their holder may do there.
//!
//! A link has a code, which is exchanged once for the value of a browser's cookie. The store knows only the
//! hashes of both. A link ends at its time, when it is revoked, and with its tenant.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::StoreError;
use crate::key::Tenant;

/// Our id of a link. The id is part of the paths of its pages, and not a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PortalLinkId(pub Uuid);

impl fmt::Display for PortalLinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A right of the holder of a link. Each right includes reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortalRight {
    /// Reading endpoints, deliveries and their attempts.
    Read,
    /// Sending deliveries again.
    Replay,
    /// Adding, changing, pausing, testing and removing endpoints, and rotating their secrets.
    Endpoints,
}

impl PortalRight {
    /// As text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Replay => "replay",
            Self::Endpoints => "endpoints",
        }
    }
}

/// The rights of a link. Every link permits reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortalRights {
    /// Whether it permits [`PortalRight::Replay`].
    pub replay: bool,
    /// Whether it permits [`PortalRight::Endpoints`].
    pub endpoints: bool,
}

impl PortalRights {
    /// Whether a link with these rights permits this.
    pub fn permit(self, right: PortalRight) -> bool {
        match right {
            PortalRight::Read => true,
            PortalRight::Replay => self.replay,
            PortalRight::Endpoints => self.endpoints,
        }
    }

    /// The rights in a list.
    pub fn to_vec(self) -> Vec<PortalRight> {
        let all = [PortalRight::Read, PortalRight::Replay, PortalRight::Endpoints];
        all.into_iter().filter(|right| self.permit(*right)).collect()
    }
}

impl FromIterator<PortalRight> for PortalRights {
    fn from_iter<I: IntoIterator<Item = PortalRight>>(rights: I) -> Self {
        rights.into_iter().fold(Self::default(), |all, right| match right {
            PortalRight::Read => all,
            PortalRight::Replay => Self { replay: true, ..all },
            PortalRight::Endpoints => Self { endpoints: true, ..all },
        })
    }
}

/// A link to the portal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortalLink {
    /// Our id.
    pub id: PortalLinkId,
    /// The tenant whose endpoints and deliveries the link shows.
    pub tenant: Tenant,
    /// The rights of its holder.
    pub rights: PortalRights,
    /// When it was created.
    pub created_at: Timestamp,
    /// When the link ends, together with the browser session that it opened.
    pub expires_at: Timestamp,
    /// When its code was exchanged. A code works once.
    pub entered_at: Option<Timestamp>,
}

/// The acts on links. Every method is one atomic act, and no store caches a link: a link that was revoked on one
/// node is unknown to every other node from that commit on.
pub trait PortalLinks: Send + Sync + 'static {
    /// Stores a link with the hash of its code, and deletes some that have ended. Durable when it returns `Ok`.
    fn create_portal_link(
        &self,
        link: PortalLink,
        code: [u8; 32],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The link whose code has this hash, whether the code was exchanged or not. The link may have ended: the
    /// caller compares `expires_at`.
    fn portal_link(
        &self,
        code: [u8; 32],
    ) -> impl Future<Output = Result<Option<PortalLink>, StoreError>> + Send;

    /// Exchanges a code for a session, given the hashes of both. `None` if the code is unknown, was exchanged
    /// before, or its link has ended at `at`. If several calls use one code, only one of them gets the link.
    /// Durable when it returns `Ok`.
    fn enter_portal(
        &self,
        code: [u8; 32],
        session: [u8; 32],
        at: Timestamp,
    ) -> impl Future<Output = Result<Option<PortalLink>, StoreError>> + Send;

    /// The link with this id, if it opened the session with this hash. The link may have ended: the caller
    /// compares `expires_at`.
    fn portal_session(
        &self,
        link: PortalLinkId,
        session: [u8; 32],
    ) -> impl Future<Output = Result<Option<PortalLink>, StoreError>> + Send;

    /// The links that have not ended at `at`, of this tenant or of all, newest first; at most `limit`.
    fn portal_links(
        &self,
        tenant: Option<Tenant>,
        at: Timestamp,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<PortalLink>, StoreError>> + Send;

    /// Ends one link. A link that is unknown has ended already.
    fn end_portal_link(
        &self,
        link: PortalLinkId,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Ends all links of a tenant, and returns their number.
    fn revoke_portal_links(
        &self,
        tenant: Tenant,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Counts a ping from the portal. Returns false and counts nothing if the tenant has already sent
    /// [`PORTAL_PINGS_MAX`](crate::limits::PORTAL_PINGS_MAX) pings within the
    /// [`PORTAL_PINGS_WITHIN`](crate::limits::PORTAL_PINGS_WITHIN) before `at`, over all nodes.
    fn take_portal_ping(
        &self,
        tenant: Tenant,
        at: Timestamp,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;
}
