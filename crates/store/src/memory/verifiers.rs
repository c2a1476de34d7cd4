//! The names of verifiers.

use hapax_core::SourceName;
use hapax_core::store::{SecretRecord, SecretUse, StoreError, Verifier, VerifierNames};

use super::MemoryStore;

impl VerifierNames for MemoryStore {
    async fn name_verifiers(&self, verifiers: Vec<Verifier>) -> Result<(), StoreError> {
        let numbered = verifiers.into_iter().map(|verifier| (verifier.number(), verifier));
        self.model().verifiers.extend(numbered);
        Ok(())
    }

    async fn note_secrets(&self, uses: Vec<SecretUse>) -> Result<(), StoreError> {
        let now = self.now();
        let mut model = self.model();
        for SecretUse { tenant, source, verifier, used_at } in uses {
            let key = (source, tenant.clone(), verifier.clone());
            let first = SecretRecord { tenant, verifier, known_since: now, used_at: None };
            let record = model.secrets.entry(key).or_insert(first);
            record.used_at = record.used_at.max(used_at);
        }
        Ok(())
    }

    async fn secrets_of(
        &self,
        source: &SourceName,
        limit: usize,
    ) -> Result<Vec<SecretRecord>, StoreError> {
        let model = self.model();
        let of_source = model.secrets.iter().filter(|((of, _, _), _)| of == source);
        Ok(of_source.map(|(_, record)| record.clone()).take(limit).collect())
    }
}
