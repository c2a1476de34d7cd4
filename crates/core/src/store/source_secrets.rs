//! The sealed secrets of sources that operators set for tenants at run time.

use std::future::Future;

use jiff::Timestamp;

use super::{Action, StoreError};
use crate::key::{SourceName, Tenant};
use crate::vault::{OpenError, Sealed};

/// Keeps one sealed value for each (tenant, source) pair. The whole set has one version, which grows with
/// every change. A change is refused if it was decided from another version of the set. Therefore concurrent
/// changes cannot give the same secret to two pairs, although the store cannot read a secret.
pub trait SourceSecretStore: Send + Sync + 'static {
    /// Every pair and the version of the set, read at the same moment.
    fn source_secrets(&self) -> impl Future<Output = Result<SourceSecretSet, StoreError>> + Send;

    /// The version of the set alone. Every node asks for the version several times a second.
    fn source_secrets_version(&self) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Changes one pair in one commit, if the set still has `version`. The action is recorded in the same
    /// commit, except for [`SourceSecretsAct::Reseal`], which changes no secret.
    fn change_source_secrets(
        &self,
        change: SourceSecretsChange,
        by: Action,
    ) -> impl Future<Output = Result<SourceSecretsChanged, StoreError>> + Send;
}

/// A tenant of a source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourcePair {
    /// The tenant.
    pub tenant: Tenant,
    /// The source.
    pub source: SourceName,
}

/// The pairs of one version.
#[derive(Debug, Clone, Default)]
pub struct SourceSecretSet {
    /// The version.
    pub version: u64,
    /// The pairs, in no order.
    pub pairs: Vec<SourceSecretRecord>,
}

/// One pair with its sealed secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSecretRecord {
    /// The pair.
    pub pair: SourcePair,
    /// Its secrets, or why the stored bytes are not a sealed value. One damaged pair leaves the others
    /// readable.
    pub sealed: Result<Sealed, OpenError>,
    /// When its secrets were last set.
    pub set_at: Timestamp,
}

/// A change of one pair.
#[derive(Debug, Clone)]
pub struct SourceSecretsChange {
    /// The version of the set that the change was decided from.
    pub version: u64,
    /// The pair.
    pub pair: SourcePair,
    /// The change to the pair.
    pub act: SourceSecretsAct,
}

/// A change to the secrets of a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceSecretsAct {
    /// Sets its secrets; the pair may be new.
    Set(Sealed),
    /// Replaces the sealed value by the same secrets under another key of the vault.
    Reseal(Sealed),
    /// Removes the pair.
    Delete,
}

/// The answer to a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceSecretsChanged {
    /// Changed; the set has this version now.
    Changed {
        /// The new version.
        version: u64,
    },
    /// The set has another version: read it, and decide again.
    VersionChanged,
    /// There is no such pair to reseal or to remove.
    Unknown,
    /// There are [`TENANT_SOURCES_MAX`](crate::limits::TENANT_SOURCES_MAX) pairs.
    TooMany,
}
