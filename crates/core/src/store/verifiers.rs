//! The verifier of an arrival: its scheme and its secret, by the reference that operators know.

use std::future::Future;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::StoreError;
use crate::key::{KeyHash, SourceName, Tenant};

/// A scheme and one secret of a source.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Verifier {
    /// The provider whose scheme it is, or `custom`.
    pub scheme: String,
    /// The reference of the secret, such as `env:STRIPE_SECRET`. Never the secret itself.
    pub secret: String,
}

impl Verifier {
    /// The number that is stored with every arrival: a digest of the names, so that it stays the same when other
    /// secrets are added or removed. Below 2^31.
    pub fn number(&self) -> usize {
        let KeyHash(digest) =
            KeyHash::of(b"verifier", [self.scheme.as_bytes(), self.secret.as_bytes()]);
        let [a, b, c, d, ..] = digest;
        (u32::from_be_bytes([a, b, c, d]) >> 1) as usize
    }
}

/// A secret that a node uses for a source of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretUse {
    /// The tenant.
    pub tenant: Tenant,
    /// The source.
    pub source: SourceName,
    /// The scheme and the secret.
    pub verifier: Verifier,
    /// When the last request that it verified arrived, if there was one.
    pub used_at: Option<Timestamp>,
}

/// The record of a secret of a source, merged from all nodes and kept over restarts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretRecord {
    /// The tenant.
    pub tenant: Tenant,
    /// The scheme and the secret.
    pub verifier: Verifier,
    /// When a node first used this reference for the source, by the store's clock.
    pub known_since: Timestamp,
    /// When the last request that it verified arrived, to about a minute.
    pub used_at: Option<Timestamp>,
}

/// The names of verifiers. An arrival is stored with the number of its verifier only.
pub trait VerifierNames: Send + Sync + 'static {
    /// Records names. A name that is known already stays.
    fn name_verifiers(
        &self,
        verifiers: Vec<Verifier>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Records secrets and their last uses. A secret keeps the time of its first record. Its last use only moves
    /// forward, whichever node reports a use. Deleting the tenant deletes its records.
    fn note_secrets(
        &self,
        uses: Vec<SecretUse>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The secrets of a source that were ever recorded, by tenant, scheme and secret, at most `limit`.
    fn secrets_of(
        &self,
        source: &SourceName,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<SecretRecord>, StoreError>> + Send;
}
