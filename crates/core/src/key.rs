//! The identity of an event: tenant, source and the sender's own id. Each part is length-prefixed, so
//! that no part runs into the next, and all are hashed to 16 bytes for the index that decides races.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::digest;
use serde::{Deserialize, Serialize};

/// The owner of events. Without tenants in the config, every event belongs to `default`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tenant(Arc<str>);

/// The name of a configured sender, in the config and in its URL.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SourceName(Arc<str>);

macro_rules! name {
    ($type:ident) => {
        impl $type {
            /// The name as written.
            pub fn new(name: impl AsRef<str>) -> Self {
                Self(Arc::from(name.as_ref()))
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
name!(Tenant);
name!(SourceName);

impl Default for Tenant {
    fn default() -> Self {
        Self::new("default")
    }
}

/// The identity of an event: at most one Event exists for each.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventKey {
    /// The tenant's name.
    pub tenant: Tenant,
    /// The source's name.
    pub source: SourceName,
    /// The sender's own id, or the derived one if the sender has none.
    pub event_id: Box<str>,
}

/// The separator between the id of a suspected replay and the hash of its body.
const REPLAY_MARK: &str = "~replay~";

impl EventKey {
    /// The key under which a suspected replay is stored for review. Its id stays free for the event that it
    /// belongs to.
    pub fn of_suspected_replay(&self, body_hash: KeyHash) -> Self {
        let event_id = format!("{}{REPLAY_MARK}{body_hash:?}", self.event_id).into();
        Self { tenant: self.tenant.clone(), source: self.source.clone(), event_id }
    }

    /// The id with which a suspected replay arrived, from the id under which it is stored.
    pub fn replayed_id(event_id: &str) -> Option<&str> {
        let (came_under, body_hash) = event_id.rsplit_once(REPLAY_MARK)?;
        (body_hash.len() == 32).then_some(came_under)
    }

    /// The 16 bytes under which the key index stores this event.
    pub fn hash(&self) -> KeyHash {
        KeyHash::of(
            b"event",
            [self.tenant.as_str(), self.source.as_str(), &self.event_id].map(str::as_bytes),
        )
    }
}

/// The first 16 bytes of a SHA-256 over length-prefixed parts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyHash(pub [u8; 16]);

impl KeyHash {
    /// Hashes `parts` in their order. `kind` keeps hashes made for different purposes apart.
    pub fn of<'a>(kind: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = digest::Context::new(&digest::SHA256);
        let mut feed = |part: &[u8]| {
            hasher.update(&(part.len() as u64).to_be_bytes());
            hasher.update(part);
        };
        feed(kind);
        parts.into_iter().for_each(&mut feed);
        let mut short = [0; 16];
        short.copy_from_slice(&hasher.finish().as_ref()[..16]);
        Self(short)
    }
}

impl KeyHash {
    /// The hash that is stored beside the body of an event.
    pub fn of_body(body: &[u8]) -> Self {
        Self::of(b"body", [body])
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tenant: &str, source: &str, event_id: &str) -> KeyHash {
        EventKey {
            tenant: Tenant::new(tenant),
            source: SourceName::new(source),
            event_id: event_id.into(),
        }
        .hash()
    }

    #[test]
    fn no_part_of_a_key_can_run_into_its_neighbour() {
        assert_ne!(key("a", "bc", "d"), key("ab", "c", "d"));
        assert_ne!(key("a", "b", "cd"), key("a", "bc", "d"));
        assert_ne!(key("", "a", "b"), key("a", "", "b"));
        assert_eq!(key("a", "b", "c"), key("a", "b", "c"));
    }
}
