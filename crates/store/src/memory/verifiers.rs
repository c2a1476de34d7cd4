//! The names of verifiers.

use hapax_core::store::{StoreError, Verifier, VerifierNames};

use super::MemoryStore;

impl VerifierNames for MemoryStore {
    async fn name_verifiers(&self, verifiers: Vec<Verifier>) -> Result<(), StoreError> {
        let numbered = verifiers.into_iter().map(|verifier| (verifier.number(), verifier));
        self.model().verifiers.extend(numbered);
        Ok(())
    }
}
