//! The sealed secrets of tenants that are added at run time.

use std::collections::BTreeMap;

use hapax_core::Tenant;
use hapax_core::limits::TENANT_SOURCES_MAX;
use hapax_core::store::{
    Action, SourcePair, SourceSecretRecord, SourceSecretSet, SourceSecretStore, SourceSecretsAct,
    SourceSecretsChange, SourceSecretsChanged, StoreError,
};

use super::MemoryStore;

/// The pairs, and the version of all of them.
#[derive(Debug, Default)]
pub(super) struct StoredSourceSecrets {
    version: u64,
    pairs: BTreeMap<SourcePair, SourceSecretRecord>,
}

impl SourceSecretStore for MemoryStore {
    async fn source_secrets(&self) -> Result<SourceSecretSet, StoreError> {
        let stored = &self.model().source_secrets;
        let pairs = stored.pairs.values().cloned().collect();
        Ok(SourceSecretSet { version: stored.version, pairs })
    }

    async fn source_secrets_version(&self) -> Result<u64, StoreError> {
        Ok(self.model().source_secrets.version)
    }

    async fn change_source_secrets(
        &self,
        change: SourceSecretsChange,
        by: Action,
    ) -> Result<SourceSecretsChanged, StoreError> {
        Ok(self.model().source_secrets.apply(change, &by))
    }
}

impl StoredSourceSecrets {
    /// Deletes all secrets of a tenant.
    pub(super) fn delete_of(&mut self, tenant: &Tenant) {
        let before = self.pairs.len();
        self.pairs.retain(|pair, _| pair.tenant != *tenant);
        self.version += u64::from(self.pairs.len() < before);
    }

    fn apply(&mut self, change: SourceSecretsChange, by: &Action) -> SourceSecretsChanged {
        let SourceSecretsChange { version, pair, act } = change;
        if version != self.version {
            return SourceSecretsChanged::VersionChanged;
        }
        let count = self.pairs.len();
        match (act, self.pairs.get_mut(&pair)) {
            (SourceSecretsAct::Set(_), None) if count >= TENANT_SOURCES_MAX => {
                return SourceSecretsChanged::TooMany;
            }
            (SourceSecretsAct::Reseal(_) | SourceSecretsAct::Delete, None) => {
                return SourceSecretsChanged::Unknown;
            }
            (SourceSecretsAct::Set(sealed), _) => {
                let record =
                    SourceSecretRecord { pair: pair.clone(), sealed: Ok(sealed), set_at: by.at };
                self.pairs.insert(pair, record);
            }
            (SourceSecretsAct::Reseal(sealed), Some(known)) => known.sealed = Ok(sealed),
            (SourceSecretsAct::Delete, Some(_)) => {
                self.pairs.remove(&pair);
            }
        }
        self.version += 1;
        SourceSecretsChanged::Changed { version: self.version }
    }
}
