//! A cache entry for one event, sealed by a MAC. The MAC's key is held only by the database, and it
//! covers the epoch, the event's key and the whole entry.
//!
//! A value is ignored if it is of another epoch (a restored backup, a promoted standby), under
//! another event's key, truncated, forged or too old.

use std::fmt;
use std::time::Duration;

use aws_lc_rs::hmac;
use hapax_core::store::{EventId, KnownEvent, Status};
use hapax_core::{KeyHash, Timestamp};
use uuid::Uuid;

/// The first byte: the version of the layout below.
const LAYOUT: u8 = 2;

/// Layout, id, hash of the body, guard, time of writing, status.
const HEAD: usize = 1 + 16 + 16 + 16 + 8 + 1;

/// The value for an event without a guard.
const NO_GUARD: KeyHash = KeyHash([0; 16]);

const MAC: usize = 32;

/// The cached facts of an event whose work has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheEntry {
    pub(crate) body_hash: KeyHash,
    /// The guard of the newest arrival.
    pub(crate) guard: Option<KeyHash>,
    pub(crate) known: KnownEvent,
    pub(crate) written_at: Timestamp,
}

/// The key and the epoch that entries are sealed under. Created again whenever the epoch changes.
pub(crate) struct Seal {
    key: hmac::Key,
    epoch: Box<[u8]>,
}

// Not derived: it would print the key.
impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seal")
    }
}

impl Seal {
    pub(crate) fn new(cache_key: &[u8], epoch: &[u8]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, cache_key), epoch: epoch.into() }
    }

    fn context(&self, key: &KeyHash, payload: &[u8]) -> Vec<u8> {
        let length = (self.epoch.len() as u64).to_be_bytes();
        [b"hapax cache".as_slice(), &length, &self.epoch, &key.0, payload].concat()
    }
}

impl CacheEntry {
    pub(crate) fn sealed(&self, seal: &Seal, key: &KeyHash) -> Vec<u8> {
        let mut payload = Vec::with_capacity(HEAD + MAC);
        payload.push(LAYOUT);
        payload.extend_from_slice(self.known.id.0.as_bytes());
        payload.extend_from_slice(&self.body_hash.0);
        payload.extend_from_slice(&self.guard.unwrap_or(NO_GUARD).0);
        payload.extend_from_slice(&self.written_at.as_second().to_be_bytes());
        payload.push(code_of(self.known.status));
        payload.extend_from_slice(self.known.result.as_deref().unwrap_or_default().as_bytes());
        let mac = hmac::sign(&seal.key, &seal.context(key, &payload));
        payload.extend_from_slice(mac.as_ref());
        payload
    }

    /// Returns `None` for a value that was not written under this key in this epoch, or was written
    /// too long ago.
    pub(crate) fn open(
        value: &[u8],
        seal: &Seal,
        key: &KeyHash,
        age_max: Duration,
    ) -> Option<Self> {
        let (payload, mac) = value.split_at_checked(value.len().checked_sub(MAC)?)?;
        if payload.len() < HEAD || payload[0] != LAYOUT {
            return None;
        }
        hmac::verify(&seal.key, &seal.context(key, payload), mac).ok()?;
        let (head, result) = payload.split_at(HEAD);
        let id = EventId(Uuid::from_slice(&head[1..17]).ok()?);
        let body_hash = KeyHash(head[17..33].try_into().ok()?);
        let guard = KeyHash(head[33..49].try_into().ok()?);
        let written_at = Timestamp::from_second(i64::from_be_bytes(head[49..57].try_into().ok()?));
        let written_at = written_at.ok()?;
        // If the clock was set back, an entry must not stay valid for ever.
        let age = Timestamp::now().duration_since(written_at).unsigned_abs();
        if age > age_max {
            return None;
        }
        let result = (!result.is_empty()).then(|| std::str::from_utf8(result)).transpose().ok()?;
        let known = KnownEvent { id, status: status_of(head[57])?, result: result.map(Into::into) };
        let guard = (guard != NO_GUARD).then_some(guard);
        Some(Self { body_hash, guard, known, written_at })
    }
}

/// Only events that have ended are cached, so only their statuses have a code.
const ENDED: [(u8, Status); 4] =
    [(1, Status::Processed), (2, Status::Stale), (3, Status::Ignored), (4, Status::Discarded)];

fn code_of(status: Status) -> u8 {
    ENDED.iter().find(|(_, ended)| *ended == status).map_or(0, |(code, _)| *code)
}

fn status_of(code: u8) -> Option<Status> {
    ENDED.iter().find(|(known, _)| *known == code).map(|(_, status)| *status)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE_MAX: Duration = Duration::from_secs(3_600);

    fn key(n: u8) -> KeyHash {
        KeyHash([n; 16])
    }

    fn entry(status: Status, result: Option<&str>) -> CacheEntry {
        let known =
            KnownEvent { id: EventId(Uuid::now_v7()), status, result: result.map(Into::into) };
        let written_at = Timestamp::from_second(Timestamp::now().as_second()).expect("in range");
        CacheEntry { body_hash: key(7), guard: None, known, written_at }
    }

    #[test]
    fn only_a_sealed_value_is_read_back() {
        // The test changes every single byte, truncates at every length, and uses another key,
        // another epoch and another cache key.
        let seal = Seal::new(b"the database's key", b"epoch 1");
        let ended = entry(Status::Processed, Some("created fee 123"));
        let value = ended.sealed(&seal, &key(1));
        assert_eq!(CacheEntry::open(&value, &seal, &key(1), AGE_MAX), Some(ended));
        for at in 0..value.len() {
            let mut changed = value.clone();
            changed[at] ^= 1;
            assert_eq!(CacheEntry::open(&changed, &seal, &key(1), AGE_MAX), None, "byte {at}");
            assert_eq!(
                CacheEntry::open(&value[..at], &seal, &key(1), AGE_MAX),
                None,
                "cut at {at}"
            );
        }
        assert_eq!(CacheEntry::open(&value, &seal, &key(2), AGE_MAX), None);
        let later = Seal::new(b"the database's key", b"epoch 2");
        assert_eq!(CacheEntry::open(&value, &later, &key(1), AGE_MAX), None);
        let other = Seal::new(b"another key", b"epoch 1");
        assert_eq!(CacheEntry::open(&value, &other, &key(1), AGE_MAX), None);
    }

    #[test]
    fn an_old_entry_is_ignored_and_an_unfinished_event_has_none() {
        let seal = Seal::new(b"the database's key", b"epoch 1");
        let mut ended = entry(Status::Ignored, None);
        ended.written_at =
            Timestamp::from_second(ended.written_at.as_second() - 4_000).expect("in range");
        assert_eq!(CacheEntry::open(&ended.sealed(&seal, &key(1)), &seal, &key(1), AGE_MAX), None);
        // The clock was ahead when this entry was written, and is right again.
        ended.written_at =
            Timestamp::from_second(ended.written_at.as_second() + 8_000).expect("in range");
        assert_eq!(CacheEntry::open(&ended.sealed(&seal, &key(1)), &seal, &key(1), AGE_MAX), None);
        let running = entry(Status::Processing, None);
        assert_eq!(
            CacheEntry::open(&running.sealed(&seal, &key(1)), &seal, &key(1), AGE_MAX),
            None
        );
    }
}
