//! Reports to operators which key of the vault each stored value needs. Nothing is opened.

use std::fmt;

use hapax_core::vault::{KeyId, OpenError, Sealed};

/// One sealed value of the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedValue {
    /// The owner of the value.
    pub owner: SealedOwner,
    /// The key that opens it, or why the stored bytes are not a sealed value.
    pub key: Result<KeyId, OpenError>,
}

/// The owner of a sealed value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SealedOwner {
    /// The secrets or custom headers of an endpoint.
    Endpoint(String),
    /// The secrets of a tenant for a source.
    Tenant {
        /// The tenant.
        tenant: String,
        /// The source.
        source: String,
    },
}

impl fmt::Display for SealedOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoint(id) => write!(f, "the endpoint {id}"),
            Self::Tenant { tenant, source } => {
                write!(f, "the secrets of tenant {tenant} for source {source}")
            }
        }
    }
}

impl SealedValue {
    pub(crate) fn new(owner: SealedOwner, bytes: Vec<u8>) -> Self {
        Self { owner, key: Sealed::from_bytes(bytes).map(|sealed| sealed.key_id()) }
    }
}
