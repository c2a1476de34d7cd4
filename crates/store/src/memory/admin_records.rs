//! Sessions and the audit trail in the model.

use hapax_core::store::{AdminRecords, AuditEntry, AuditFilter, Cursor, Page, Session, StoreError};

use super::MemoryStore;

impl AdminRecords for MemoryStore {
    async fn open_session(&self, session: Session) -> Result<(), StoreError> {
        let now = self.now();
        let mut model = self.model();
        model.sessions.retain(|_, open| open.expires_at > now);
        model.sessions.insert(session.hash, session);
        Ok(())
    }

    async fn session(&self, hash: [u8; 32]) -> Result<Option<Session>, StoreError> {
        Ok(self.model().sessions.get(&hash).cloned())
    }

    async fn end_session(&self, hash: [u8; 32]) -> Result<(), StoreError> {
        self.model().sessions.remove(&hash);
        Ok(())
    }

    async fn audit(&self, entries: Vec<AuditEntry>) -> Result<(), StoreError> {
        self.model().audit.extend(entries);
        Ok(())
    }

    async fn audited(&self, filter: AuditFilter) -> Result<Page<AuditEntry>, StoreError> {
        let model = self.model();
        let end = filter.before.map_or(u128::MAX, |Cursor(before)| before);
        let mut found = model.audit.iter().enumerate().rev().filter(|(position, entry)| {
            (*position as u128) < end && filter.who.as_ref().is_none_or(|who| *who == entry.who)
        });
        let shown: Vec<_> = found.by_ref().take(filter.limit).collect();
        let more = found.next().is_some();
        let last = shown.last().map(|(position, _)| Cursor(*position as u128));
        let items = shown.into_iter().map(|(_, entry)| entry.clone()).collect();
        Ok(Page::new(items, last.filter(|_| more)))
    }
}
