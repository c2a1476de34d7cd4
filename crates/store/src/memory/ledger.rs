//! Idempotency-Keys in the model: the behaviour that the other ledgers must have.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::job::Fence;
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Ledger, Owner, Quota, Reservation, ReserveAsk, Reserved, Scope,
    StoredAnswer, Usage,
};
use hapax_core::store::{
    Held, KeyDeleted, KeyFilter, KeyPage, KeyPosition, KeyRecord, KeyRecords, StoreError,
};

use super::MemoryStore;
use super::work::later;

/// A key that was reserved.
#[derive(Debug)]
pub(super) struct ReservedKey {
    fingerprint: Fingerprint,
    fence: Fence,
    attempt: u32,
    leased_until: Timestamp,
    ttl: Duration,
    expires_at: Timestamp,
    answer: Option<StoredAnswer>,
    /// Whether the key counts for the quota of its caller.
    is_counted: bool,
}

/// The scope and key under which a reservation is stored.
pub(super) type KeyName = (Scope, IdempotencyKey);

impl Ledger for MemoryStore {
    async fn reserve(&self, ask: ReserveAsk) -> Result<Reservation, StoreError> {
        let now = self.now();
        let mut model = self.model();
        let name = (ask.scope, ask.key);
        let mut attempt = 1;
        if let Some(kept) = model.reservations.get(&name) {
            let is_running = kept.answer.is_none() && kept.leased_until > now;
            if kept.expires_at > now {
                if kept.fingerprint != ask.fingerprint {
                    return Ok(Reservation::Mismatch);
                }
                if let Some(answer) = &kept.answer {
                    return Ok(Reservation::Replay(answer.clone()));
                }
            }
            if is_running {
                let remaining = kept.leased_until.duration_since(now).unsigned_abs();
                return Ok(Reservation::InProgress { remaining });
            }
            if kept.answer.is_none() {
                attempt = kept.attempt + 1;
            }
        } else if let Some(quota) = ask.quota
            && !judged(&model.reservations, name.0.owner(), quota, Quota::admits)
        {
            return Ok(Reservation::OverQuota);
        }
        model.fences_ever += 1;
        let fence = Fence(model.fences_ever);
        let kept = ReservedKey {
            fingerprint: ask.fingerprint,
            fence,
            attempt,
            leased_until: later(now, ask.lease),
            ttl: ask.ttl,
            expires_at: later(now, ask.ttl),
            answer: None,
            is_counted: ask.quota.is_some(),
        };
        model.reservations.insert(name.clone(), kept);
        let (scope, key) = name;
        Ok(Reservation::Fresh(Reserved { scope, key, fence, attempt, quota: ask.quota }))
    }

    async fn finish(&self, reserved: &Reserved, answer: &StoredAnswer) -> Result<Held, StoreError> {
        let now = self.now();
        let mut model = self.model();
        let name = (reserved.scope.clone(), reserved.key.clone());
        let is_kept = reserved.quota.is_none_or(|quota| {
            judged(&model.reservations, reserved.scope.owner(), quota, Quota::keeps)
        });
        let Some(kept) = model.reservations.get_mut(&name).filter(|kept| kept.is_open(reserved))
        else {
            return Ok(Held::Lost);
        };
        kept.answer = Some(if is_kept { answer.clone() } else { StoredAnswer::not_kept() });
        kept.expires_at = later(now, kept.ttl);
        Ok(Held::Kept)
    }

    async fn abandon(&self, reserved: &Reserved) -> Result<(), StoreError> {
        let mut model = self.model();
        let name = (reserved.scope.clone(), reserved.key.clone());
        let void = Fence(model.fences_ever + 1);
        match model.reservations.get_mut(&name).filter(|kept| kept.is_open(reserved)) {
            None => {}
            Some(kept) if kept.attempt > 1 => {
                kept.attempt -= 1;
                kept.leased_until = Timestamp::MIN;
                kept.fence = void;
                model.fences_ever = void.0;
            }
            Some(_) => drop(model.reservations.remove(&name)),
        }
        Ok(())
    }
}

impl KeyRecords for MemoryStore {
    async fn keys(&self, filter: KeyFilter) -> Result<KeyPage, StoreError> {
        let model = self.model();
        let mut names: Vec<_> = model.reservations.iter().collect();
        names.sort_by(|((a, x), _), ((b, y), _)| {
            (a.as_str(), x.as_str()).cmp(&(b.as_str(), y.as_str()))
        });
        let after = |scope: &str, key: &str| {
            let start = filter.after.as_ref();
            start.is_none_or(|at| (scope, key) > (at.scope.as_str(), at.key.as_str()))
        };
        let fits = |scope: &str, key: &str| {
            filter.scope.as_ref().is_none_or(|start| scope.starts_with(start.as_str()))
                && filter.key.as_ref().is_none_or(|wanted| key == wanted)
        };
        let mut found = names.into_iter().filter_map(|((scope, key), kept)| {
            let (scope, key) = (scope.as_str(), key.as_str());
            (after(scope, key) && fits(scope, key)).then(|| KeyRecord {
                scope: scope.to_owned(),
                key: key.to_owned(),
                attempt: kept.attempt,
                leased_until: kept.leased_until,
                expires_at: kept.expires_at,
                status: kept.answer.as_ref().map(|answer| answer.status.as_u16()),
                bytes: kept.answer.as_ref().map_or(0, StoredAnswer::size),
            })
        });
        let items: Vec<_> = found.by_ref().take(filter.limit).collect();
        let last = items.last().filter(|_| found.next().is_some());
        let next = last.map(|it| KeyPosition { scope: it.scope.clone(), key: it.key.clone() });
        Ok(KeyPage { items, next })
    }

    async fn delete_key(&self, name: KeyPosition) -> Result<KeyDeleted, StoreError> {
        let now = self.now();
        let mut model = self.model();
        let wanted = |(scope, key): &&KeyName| {
            (scope.as_str(), key.as_str()) == (name.scope.as_str(), name.key.as_str())
        };
        let Some(found) = model.reservations.keys().find(wanted).cloned() else {
            return Ok(KeyDeleted::Unknown);
        };
        let is_running = |kept: &ReservedKey| kept.answer.is_none() && kept.leased_until > now;
        if model.reservations.get(&found).is_some_and(is_running) {
            return Ok(KeyDeleted::Busy);
        }
        model.reservations.remove(&found);
        Ok(KeyDeleted::Deleted)
    }
}

impl ReservedKey {
    /// Whether the reservation has expired.
    pub(super) fn is_past(&self, now: Timestamp) -> bool {
        self.expires_at <= now && (self.answer.is_some() || self.leased_until <= now)
    }

    /// Whether the key still waits for the answer of this reservation.
    fn is_open(&self, reserved: &Reserved) -> bool {
        self.fence == reserved.fence && self.answer.is_none()
    }
}

/// The quota's decision on the current usage. The function scans every key, which only a model may do.
fn judged(
    reservations: &HashMap<KeyName, ReservedKey>,
    owner: &Owner,
    quota: Quota,
    says: impl Fn(Quota, Usage, Usage, u64) -> bool,
) -> bool {
    let (mut own, mut all, mut callers) = (Usage::default(), Usage::default(), HashSet::new());
    callers.insert(owner);
    for ((scope, _), kept) in reservations.iter().filter(|(_, kept)| kept.is_counted) {
        let theirs = scope.owner();
        if theirs.realm() != owner.realm() {
            continue;
        }
        callers.insert(theirs);
        let bytes = kept.answer.as_ref().map_or(0, StoredAnswer::size);
        for usage in [Some(&mut all), (theirs == owner).then_some(&mut own)].into_iter().flatten() {
            usage.keys += 1;
            usage.bytes += bytes;
        }
    }
    says(quota, own, all, callers.len() as u64)
}
