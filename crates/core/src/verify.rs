//! [`verify`] turns an unverified [`Arrival`] into [`Receipt`]s or refuses it. Nothing else in the
//! workspace can make a Receipt.
//!
//! The order is fixed: the signature over the raw bytes, then the window, and only then the body.

use jiff::{SignedDuration, Timestamp};

use crate::arrival::Arrival;
use crate::envelope::{Identity, Item};
use crate::handshake::HandshakeReply;
use crate::json::{self, Pointer};
use crate::key::{EventKey, KeyHash};
use crate::receipt::{ContentGuard, GuardKeep, GuardSeen, Neighbours, Receipt, Timeliness};
use crate::scheme::SignedContent;
use crate::scheme::sender_key::SenderKey;
use crate::source::{ReplayGuard, Source};

/// The content of an authentic request.
#[derive(Debug)]
pub enum Verified {
    /// One event or several.
    Events {
        /// At least one.
        receipts: Vec<Receipt>,
        /// The signed timestamp.
        signed_at: Option<Timestamp>,
        /// The index of the secret that verified; [`Source::verifiers`] has its name.
        secret: usize,
    },
    /// A handshake: the reply to send. Nothing is stored.
    Reply(HandshakeReply),
    /// A notification without an event. Nothing is stored.
    Empty,
}

/// Why a request is refused. Each variant is one `reason` in the metrics.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A header or field that the scheme needs is missing.
    #[error("missing: {0}")]
    Missing(String),
    /// The signature is wrong, or not well-formed.
    #[error("signature: {0}")]
    Signature(String),
    /// A handshake that was signed before the window. (The caller decides about late events.)
    #[error("the handshake is too old: signed {age_seconds} s ago")]
    Stale {
        /// Seconds between signing and arrival.
        age_seconds: i64,
    },
    /// The request was signed too far in the future.
    #[error(
        "the timestamp is in the future: signed {ahead_seconds} s ahead of this machine's clock"
    )]
    Future {
        /// Seconds between now and the signed timestamp.
        ahead_seconds: i64,
    },
    /// Authentic, but not a body that this source sends.
    #[error("malformed: {0}")]
    Malformed(String),
    /// Authentic, but without an event id.
    #[error("no_id: {0}")]
    NoId(String),
}

impl Refusal {
    /// The `reason` in metrics, logs and `hapax verify`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing(_) => "missing",
            Self::Signature(_) => "signature",
            Self::Stale { .. } => "stale",
            Self::Future { .. } => "future",
            Self::Malformed(_) => "malformed",
            Self::NoId(_) => "no_id",
        }
    }
}

/// Verifies an arrival at `source`, at the instant `now`.
///
/// A late arrival is authentic and therefore yields Receipts, marked [`Timeliness::Late`]. The caller refuses
/// late Receipts or stores them for review, since only the store knows whether the event was seen before.
pub fn verify(source: &Source, arrival: &Arrival, now: Timestamp) -> Result<Verified, Refusal> {
    verify_with_key(source, arrival, None, now)
}

/// [`verify`] with the key that was fetched for this request, if
/// [`Scheme::key_request`](crate::scheme::Scheme::key_request) asked for one.
pub fn verify_with_key(
    source: &Source,
    arrival: &Arrival,
    key: Option<&SenderKey>,
    now: Timestamp,
) -> Result<Verified, Refusal> {
    if let Some(reply) = source.challenge().and_then(|challenge| challenge.unsigned_post(arrival)) {
        return Ok(Verified::Reply(reply));
    }
    let authentic = source.scheme.authenticate_with_key(arrival, key, now)?;
    let timeliness = match authentic.signed_at {
        Some(signed_at) => judge_window(source, signed_at, now)?,
        None => Timeliness::OnTime,
    };
    if let Some(challenge) = source.challenge()
        && let Some(reply) = challenge.signed(source, arrival, authentic.secret)?
    {
        return match timeliness {
            Timeliness::OnTime => Ok(Verified::Reply(reply)),
            Timeliness::Late { age_seconds } => Err(Refusal::Stale { age_seconds }),
        };
    }
    let guards = source.replay_guard == ReplayGuard::Signed;
    let content = match guards || source.envelope.asks_for_signed() {
        true => Some(source.scheme.signed_content(arrival)?),
        false => None,
    };
    let items = source.envelope.read(arrival, content.as_ref())?;
    let content = content.filter(|_| guards).unwrap_or(SignedContent::Nothing);
    let receipts: Vec<Receipt> = items
        .into_iter()
        .enumerate()
        .map(|(place, item)| {
            let guard = match source.counters.as_slice() {
                [] => guard_of(source, &content, place, &item),
                counters => Some(guard_beside(counters, source, &item)),
            };
            receipt(source, item, guard, timeliness, now)
        })
        .collect();
    if receipts.is_empty() {
        return Ok(Verified::Empty);
    }
    Ok(Verified::Events { receipts, signed_at: authentic.signed_at, secret: authentic.secret })
}

/// The event id in a request that was not verified. Anyone may have written this id. The id is only shown to
/// operators and decides nothing.
pub fn claimed_id(source: &Source, arrival: &Arrival) -> Option<String> {
    let items = source.envelope.read(arrival, None).ok()?;
    match items.into_iter().next()?.identity {
        Identity::Given(id) => Some(id.into()),
        Identity::Derived { .. } => None,
    }
}

/// Both ends belong to the window: a timestamp exactly `tolerance` away is inside.
fn judge_window(
    source: &Source,
    signed_at: Timestamp,
    now: Timestamp,
) -> Result<Timeliness, Refusal> {
    let age = now.duration_since(signed_at);
    let tolerance = SignedDuration::try_from(source.tolerance).unwrap_or(SignedDuration::MAX);
    if age > tolerance {
        return Ok(Timeliness::Late { age_seconds: age.as_secs() });
    }
    if age < -tolerance {
        return Err(Refusal::Future { ahead_seconds: -age.as_secs() });
    }
    Ok(Timeliness::OnTime)
}

/// The guard of an event: the hash of the signed content, with the event's index in the body where one
/// signature covers several events.
fn guard_of(
    source: &Source,
    content: &SignedContent,
    place: usize,
    item: &Item,
) -> Option<ContentGuard> {
    let place_bytes = (place as u64).to_be_bytes();
    let (signed, place): (&[u8], &[u8]) = match content {
        SignedContent::Nothing => return None,
        SignedContent::Whole(hash) => (hash, &place_bytes),
        // Each item is signed alone and can be moved to any index of another request, so the index
        // is not part of the guard.
        SignedContent::Items(hashes) => (hashes.get(place)?, b""),
    };
    let kind = match (source.guards_type, &item.event_type) {
        (true, Some(event_type)) => event_type.trim().to_ascii_lowercase(),
        (true, None) | (false, _) => String::new(),
    };
    let (tenant, name) = (source.tenant.as_str(), source.name.as_str());
    Some(ContentGuard {
        hash: KeyHash::of(
            b"guard",
            [tenant.as_bytes(), name.as_bytes(), kind.as_bytes(), signed, place],
        ),
        keep: match source.signs_time() {
            true => GuardKeep::For(source.tolerance.saturating_mul(2)),
            false => GuardKeep::WithKeys,
        },
        seen: match item.identity {
            Identity::Given(_) => GuardSeen::Review,
            Identity::Derived { .. } => GuardSeen::Duplicate,
        },
    })
}

/// The guard of an event whose sender counts attempts inside it: the hash of the event without these counters. The
/// id is part of that content, so only copies of one event have the same guard.
fn guard_beside(counters: &[Pointer], source: &Source, item: &Item) -> ContentGuard {
    // A repeated key is ambiguous. Such a body is compared as a whole.
    let spans = json::spans(&item.body, counters).unwrap_or_default();
    let starts = std::iter::once(0).chain(spans.iter().map(|(_, end)| *end));
    let ends = spans.iter().map(|(start, _)| *start).chain([item.body.len()]);
    let beside = starts.zip(ends).map(|(start, end)| &item.body[start..end]);
    let scope = [source.tenant.as_str(), source.name.as_str()].map(str::as_bytes);
    ContentGuard {
        hash: KeyHash::of(b"beside counters", scope.into_iter().chain(beside)),
        keep: GuardKeep::WithKeys,
        seen: GuardSeen::Duplicate,
    }
}

fn receipt(
    source: &Source,
    item: Item,
    guard: Option<ContentGuard>,
    timeliness: Timeliness,
    now: Timestamp,
) -> Receipt {
    let tenant = item.tenant.unwrap_or_else(|| source.tenant.clone());
    let key = |event_id: Box<str>| EventKey {
        tenant: tenant.clone(),
        source: source.name.clone(),
        event_id,
    };
    let body_hash = KeyHash::of_body(&item.body);
    let (key, neighbours, if_conflict) = match item.identity {
        Identity::Given(event_id) => (key(event_id), None, None),
        Identity::Derived { digest, within: None } => {
            let other = format!("{digest}~{body_hash:?}");
            (key(digest.into()), None, Some(key(other.into())))
        }
        Identity::Derived { digest, within: Some(within) } => {
            let span = i64::try_from(within.as_secs()).unwrap_or(i64::MAX).max(1);
            let bucket = now.as_second().div_euclid(span);
            let near = SignedDuration::from_secs(span);
            let neighbours = Neighbours {
                keys: [bucket - 1, bucket + 1].map(|span| key(format!("{digest}@{span}").into())),
                not_before: now.checked_sub(near).unwrap_or(Timestamp::MIN),
                not_after: now.checked_add(near).unwrap_or(Timestamp::MAX),
            };
            let other = format!("{digest}@{bucket}~{body_hash:?}");
            (key(format!("{digest}@{bucket}").into()), Some(neighbours), Some(key(other.into())))
        }
    };
    let if_replay = guard
        .is_some_and(|guard| guard.seen == GuardSeen::Review)
        .then(|| key.of_suspected_replay(body_hash));
    Receipt {
        key_hash: key.hash(),
        key,
        neighbours,
        if_conflict,
        if_replay,
        guard,
        event_type: item.event_type,
        occurred_at: item.occurred_at,
        body: item.body,
        body_hash,
        timeliness,
    }
}
