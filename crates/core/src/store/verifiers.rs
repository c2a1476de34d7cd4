//! The verifier of an arrival: its scheme and its secret, by the reference that operators know.

use std::future::Future;

use serde::{Deserialize, Serialize};

use super::StoreError;
use crate::key::KeyHash;

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

/// The names of verifiers, for the arrivals that have their numbers.
pub trait VerifierNames: Send + Sync + 'static {
    /// Records names. A name that is known already stays.
    fn name_verifiers(
        &self,
        verifiers: Vec<Verifier>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}
