//! Links to the portal in the model.

use std::collections::{BTreeMap, HashMap};

use hapax_core::limits::{PORTAL_PINGS_MAX, PORTAL_PINGS_WITHIN};
use hapax_core::store::{PortalLink, PortalLinkId, PortalLinks, StoreError};
use hapax_core::{Tenant, Timestamp};

use super::MemoryStore;

/// All links, and the newest pings of each tenant.
#[derive(Debug, Default)]
pub(super) struct StoredLinks {
    links: HashMap<PortalLinkId, StoredLink>,
    pings: BTreeMap<Tenant, Vec<Timestamp>>,
}

#[derive(Debug)]
struct StoredLink {
    link: PortalLink,
    code: [u8; 32],
    session: Option<[u8; 32]>,
}

impl StoredLinks {
    pub(super) fn delete_of(&mut self, tenant: &Tenant) {
        self.links.retain(|_, stored| stored.link.tenant != *tenant);
        self.pings.remove(tenant);
    }

    fn by_code(&mut self, code: [u8; 32]) -> Option<&mut StoredLink> {
        self.links.values_mut().find(|stored| stored.code == code)
    }
}

impl PortalLinks for MemoryStore {
    async fn create_portal_link(&self, link: PortalLink, code: [u8; 32]) -> Result<(), StoreError> {
        let now = self.now();
        let links = &mut self.model().portal.links;
        links.retain(|_, stored| stored.link.expires_at > now);
        links.insert(link.id, StoredLink { link, code, session: None });
        Ok(())
    }

    async fn portal_link(&self, code: [u8; 32]) -> Result<Option<PortalLink>, StoreError> {
        Ok(self.model().portal.by_code(code).map(|stored| stored.link.clone()))
    }

    async fn enter_portal(
        &self,
        code: [u8; 32],
        session: [u8; 32],
        at: Timestamp,
    ) -> Result<Option<PortalLink>, StoreError> {
        let mut model = self.model();
        let open = |stored: &&mut StoredLink| {
            stored.link.entered_at.is_none() && stored.link.expires_at > at
        };
        let Some(stored) = model.portal.by_code(code).filter(open) else { return Ok(None) };
        stored.session = Some(session);
        stored.link.entered_at = Some(at);
        Ok(Some(stored.link.clone()))
    }

    async fn portal_session(
        &self,
        link: PortalLinkId,
        session: [u8; 32],
    ) -> Result<Option<PortalLink>, StoreError> {
        let model = self.model();
        let found = model.portal.links.get(&link).filter(|it| it.session == Some(session));
        Ok(found.map(|stored| stored.link.clone()))
    }

    async fn portal_links(
        &self,
        tenant: Option<Tenant>,
        at: Timestamp,
        limit: usize,
    ) -> Result<Vec<PortalLink>, StoreError> {
        let model = self.model();
        let all = model.portal.links.values().map(|stored| &stored.link);
        let open = all.filter(|link| {
            link.expires_at > at && tenant.as_ref().is_none_or(|tenant| link.tenant == *tenant)
        });
        let mut open: Vec<PortalLink> = open.cloned().collect();
        open.sort_by_key(|link| std::cmp::Reverse((link.created_at, link.id)));
        open.truncate(limit);
        Ok(open)
    }

    async fn end_portal_link(&self, link: PortalLinkId) -> Result<(), StoreError> {
        self.model().portal.links.remove(&link);
        Ok(())
    }

    async fn revoke_portal_links(&self, tenant: Tenant) -> Result<u64, StoreError> {
        let links = &mut self.model().portal.links;
        let before = links.len();
        links.retain(|_, stored| stored.link.tenant != tenant);
        Ok((before - links.len()) as u64)
    }

    async fn take_portal_ping(&self, tenant: Tenant, at: Timestamp) -> Result<bool, StoreError> {
        let mut model = self.model();
        let sent = model.portal.pings.entry(tenant).or_default();
        sent.retain(|earlier| *earlier + PORTAL_PINGS_WITHIN > at);
        if sent.len() >= PORTAL_PINGS_MAX {
            return Ok(false);
        }
        sent.push(at);
        Ok(true)
    }
}
