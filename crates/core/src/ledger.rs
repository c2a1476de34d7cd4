//! Idempotency-Keys of one's own API: whoever retries a request with the same key gets the answer of
//! the first one, and the work is done once.
//!
//! A key is *reserved* under a fence and a lease, then *finished* with an answer, or *abandoned*. In
//! progress is a state with an end: a process that dies keeps nobody out for longer than its lease.
//! What is here is pure: what a key, a scope and a fingerprint are, and the seam [`Ledger`] behind
//! which every database stands.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use aws_lc_rs::digest;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, StatusCode};

use crate::job::Fence;
use crate::json::{self, Pointer};
use crate::limits::{IDEMPOTENCY_KEY_BYTES_MAX, SCOPE_BYTES_MAX};
use crate::store::{Held, StoreError};

/// The header that carries a key.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// A key as its client chose it: 1 to 255 printable bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Box<str>);

/// Why a header holds no key. Says nothing of what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Nothing between the quotes, or nothing at all.
    #[error("the Idempotency-Key is empty")]
    Empty,
    /// Past the bound.
    #[error("the Idempotency-Key is longer than {IDEMPOTENCY_KEY_BYTES_MAX} bytes")]
    TooLong,
    /// Bytes that cannot be shown.
    #[error("the Idempotency-Key holds more than printable ASCII")]
    NotPrintable,
    /// It begins with a quote that is never closed, or goes on behind it.
    #[error("the Idempotency-Key is not a well-formed quoted string")]
    Quoting,
    /// Two headers, and so two meanings.
    #[error("there is more than one Idempotency-Key")]
    Several,
}

impl IdempotencyKey {
    /// The key of a request; `None` where it has none.
    pub fn of(headers: &HeaderMap) -> Result<Option<Self>, KeyError> {
        let mut found = headers.get_all(IDEMPOTENCY_KEY).iter();
        match (found.next(), found.next()) {
            (None, _) => Ok(None),
            (Some(value), None) => Self::parse(value.as_bytes()).map(Some),
            (Some(_), Some(_)) => Err(KeyError::Several),
        }
    }

    /// Takes a bare key, or one quoted as the IETF draft has it: `abc` and `"abc"` are the same key.
    pub fn parse(value: &[u8]) -> Result<Self, KeyError> {
        let value = value.trim_ascii();
        if !value.iter().all(|byte| (b' '..=b'~').contains(byte)) {
            return Err(KeyError::NotPrintable);
        }
        let key = match value.strip_prefix(b"\"") {
            Some(rest) => unquoted(rest).ok_or(KeyError::Quoting)?,
            None => value.to_vec(),
        };
        match key.len() {
            0 => Err(KeyError::Empty),
            length if length > IDEMPOTENCY_KEY_BYTES_MAX => Err(KeyError::TooLong),
            _ => {
                let text = String::from_utf8(key).map_err(|_| KeyError::NotPrintable)?;
                Ok(Self(text.into()))
            }
        }
    }

    /// The key as text, unquoted.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What stands before the closing quote, which must be the last byte.
fn unquoted(rest: &[u8]) -> Option<Vec<u8>> {
    let mut key = Vec::with_capacity(rest.len());
    let mut bytes = rest.iter();
    loop {
        match bytes.next()? {
            b'"' => return bytes.as_slice().is_empty().then_some(key),
            b'\\' => key.push(*bytes.next().filter(|byte| matches!(byte, b'"' | b'\\'))?),
            byte => key.push(*byte),
        }
    }
}

/// Within which a key means one request: whose it is, and what it asks for. The same key elsewhere is
/// another key, so that nobody is given what somebody else was answered.
///
/// It is printable, so that it can travel in a header, and says what it is for in a table.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope {
    text: Box<str>,
    owner: Owner,
}

/// The caller of an API that keys are counted for. Callers that are not named are one caller.
///
/// `api/acct_1`: the API, a slash, and the caller. Neither part holds another slash.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(Box<str>);

impl Owner {
    /// The caller as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The API as text: all before the slash.
    pub fn realm(&self) -> &str {
        self.0.split('/').next().unwrap_or_default()
    }
}

impl Scope {
    /// `realm` is the API (a tenant, or the name of a proxy), `principal` who calls it, `route` the
    /// path. No part can run into its neighbour.
    pub fn new(realm: &str, principal: &str, method: &Method, route: &str) -> Self {
        let (mut realm_shown, mut principal_shown, mut route_shown) =
            (String::new(), String::new(), String::new());
        escape(realm, b"/", &mut realm_shown);
        escape(principal, b"/", &mut principal_shown);
        escape(route, b"", &mut route_shown);
        let text = format!("{realm_shown}/{principal_shown}/{method} {route_shown}");
        let text = bounded(&realm_shown, text).into();
        // Callers of one API are counted together, so the name of the API is never cut.
        if realm_shown.len() > SCOPE_BYTES_MAX / 2 {
            realm_shown = format!("#{}", hashed(&realm_shown));
        }
        let owner = bounded(&realm_shown, format!("{realm_shown}/{principal_shown}"));
        Self { text, owner: Owner(owner.into()) }
    }

    /// The scope as text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The caller whose key it is.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }
}

/// `whole`, or `realm/#` and its hash where it is too long to be kept.
fn bounded(realm: &str, whole: String) -> String {
    if whole.len() <= SCOPE_BYTES_MAX {
        return whole;
    }
    let mut short = realm.to_owned();
    short.truncate(SCOPE_BYTES_MAX / 2);
    format!("{short}/#{}", hashed(&whole))
}

fn hashed(text: &str) -> String {
    hex::encode(digest::digest(&digest::SHA256, text.as_bytes()))
}

/// How much each caller of an API may have kept at once. A key counts from its reservation until it is
/// forgotten, an answer with its headers and body.
///
/// Only new keys are refused for it. The API as a whole may hold [`Quota::TOTAL`] times as much; over
/// that, new keys are refused to callers that hold more than their fair share, the total divided by
/// the number of callers. So one caller cannot keep out the others, and many cannot fill the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quota {
    /// The most keys of one caller.
    pub keys: u64,
    /// The most bytes of answers of one caller. The answer that goes beyond it is still kept.
    pub bytes: u64,
}

/// How much is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Keys, running or answered.
    pub keys: u64,
    /// Bytes of their answers.
    pub bytes: u64,
}

impl Quota {
    /// How many times the quota of one caller an API may hold.
    pub const TOTAL: u64 = 16;

    /// Whether a caller that holds `own` may reserve another key, where all `callers` of the API
    /// together (this one included) hold `all`.
    pub fn admits(self, own: Usage, all: Usage, callers: u64) -> bool {
        let share = Share { callers, ..Share::of(self.keys) };
        share.has_room(own.keys, all.keys, 1) && self.keeps(own, all, callers)
    }

    /// Whether an answer of this caller is kept whole.
    pub fn keeps(self, own: Usage, all: Usage, callers: u64) -> bool {
        let share = Share { callers, ..Share::of(self.bytes) };
        share.has_room(own.bytes, all.bytes, 1)
    }
}

/// What one caller may hold of one thing.
struct Share {
    most: u64,
    total: u128,
    callers: u64,
}

impl Share {
    fn of(most: u64) -> Self {
        Self { most, total: u128::from(most) * u128::from(Quota::TOTAL), callers: 1 }
    }

    fn has_room(&self, own: u64, all: u64, more: u64) -> bool {
        let fair = u128::from(own.saturating_add(more)) * u128::from(self.callers.max(1));
        own < self.most && (u128::from(all) < self.total || fair <= self.total)
    }
}

/// Percent-encodes what is not printable, and `apart`, and the percent sign itself.
fn escape(part: &str, apart: &[u8], out: &mut String) {
    use fmt::Write;
    for byte in part.bytes() {
        if (b'!'..=b'~').contains(&byte) && byte != b'%' && byte != b'#' && !apart.contains(&byte) {
            out.push(char::from(byte));
        } else {
            // A String takes everything.
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

/// What a request asks for, in 32 bytes: the same key with another fingerprint is a mistake of the
/// client, and nothing runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Over the target as it is spelled (path and query) and the body, byte for byte, but for the values
    /// that `ignored` points at in a JSON body: what a client makes again with every try. The [`Scope`]
    /// holds one form of the path for all its spellings; two resources whose paths differ only in
    /// spelling must not share an answer.
    ///
    /// # Panics
    /// With more than [`json::POINTERS_MAX`] pointers: who reads them from a config keeps that bound.
    pub fn of(target: Option<&str>, body: &[u8], ignored: &[Pointer]) -> Self {
        let mut hasher = digest::Context::new(&digest::SHA256);
        let mut feed = |part: &[u8]| {
            hasher.update(&(part.len() as u64).to_be_bytes());
            hasher.update(part);
        };
        feed(target.unwrap_or_default().as_bytes());
        let mut from = 0;
        for (start, end) in spans(body, ignored) {
            feed(&body[from..start]);
            from = end;
        }
        feed(&body[from..]);
        let mut print = [0; 32];
        print.copy_from_slice(hasher.finish().as_ref());
        Self(print)
    }
}

/// Where the values of `pointers` stand in the body, first to last, none inside another.
fn spans(body: &[u8], pointers: &[Pointer]) -> Vec<(usize, usize)> {
    let Ok(found) = json::extract(body, pointers) else { return Vec::new() };
    let mut spans: Vec<_> = found
        .into_iter()
        .flatten()
        .map(|value| {
            let start = value.raw().as_ptr().addr() - body.as_ptr().addr();
            (start, start + value.raw().len())
        })
        .collect();
    spans.sort_unstable();
    spans.dedup_by(|next, kept| next.1 <= kept.1);
    spans
}

/// What to reserve.
#[derive(Debug, Clone)]
pub struct ReserveAsk {
    /// Within which the key means one request.
    pub scope: Scope,
    /// The key.
    pub key: IdempotencyKey,
    /// What is asked for.
    pub fingerprint: Fingerprint,
    /// How long the work may take: in progress ends with it.
    pub lease: Duration,
    /// How long the answer is kept.
    pub ttl: Duration,
    /// How much its caller may have kept; `None` is unlimited, and not counted.
    pub quota: Option<Quota>,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reservation {
    /// Yours to run.
    Fresh(Reserved),
    /// It was run: this is what it was answered.
    Replay(StoredAnswer),
    /// Somebody runs it, and may for at most this long.
    InProgress {
        /// What is left of the lease.
        remaining: Duration,
    },
    /// The key was used for another request. Wins over in progress.
    Mismatch,
    /// The key is new, and its caller has as much kept as it may: nothing was reserved.
    OverQuota,
}

/// The right to run a request, and to say what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// Within which the key means one request.
    pub scope: Scope,
    /// The key.
    pub key: IdempotencyKey,
    /// Voids every right given out before.
    pub fence: Fence,
    /// How often this key was reserved, this time included: more than once where a lease ran out.
    pub attempt: u32,
    /// The quota that it was reserved under.
    pub quota: Option<Quota>,
}

/// What a request was answered, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredAnswer {
    /// The status.
    pub status: StatusCode,
    /// The headers that are not about one connection, in their order.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Bytes,
}

impl StoredAnswer {
    /// How many bytes it counts for in a [`Quota`]: headers and body.
    pub fn size(&self) -> u64 {
        let headers = self.headers.iter().map(|(name, value)| name.len() + value.len());
        (headers.sum::<usize>() + self.body.len()) as u64
    }

    /// What is kept in the place of an answer whose caller already holds all the bytes it may. The
    /// work is done, so the key must stay used.
    pub fn not_kept() -> Self {
        let body = "{\"type\":\"urn:hapax:problem:answer_not_kept\",\"title\":\"the work is done, but \
                    its answer was not kept: this caller has too many bytes of answers kept\",\
                    \"status\":500}";
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            headers: vec![("content-type".to_owned(), "application/problem+json".to_owned())],
            body: Bytes::from_static(body.as_bytes()),
        }
    }
}

/// What an answer means for its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settle {
    /// It is kept, and is what every retry gets.
    Keep,
    /// Nothing was done, and the same request may well succeed later: the key is free.
    Free,
    /// Nobody knows what was done: nothing is kept, and the key is in progress to the end of its
    /// lease.
    Wait,
}

impl Settle {
    /// By its status alone. A caller that was turned away before any work (401, 403, 425, 429) is free
    /// to come again, and must not be told so for days after it was let in; a gateway that speaks for somebody else (502, 503, 504) does not know, and neither
    /// does a timeout around the work, which many a framework answers as 408.
    pub fn by_status(status: StatusCode) -> Self {
        match status.as_u16() {
            401 | 403 | 425 | 429 => Self::Free,
            408 | 502..=504 => Self::Wait,
            _ => Self::Keep,
        }
    }
}

/// The store of reservations. Every method is one atomic act that is durable when it returns `Ok`;
/// a lost fence is an answer. Time is the database's own. What is past its ttl is forgotten by
/// [`Work::prune`](crate::store::Work::prune).
pub trait Ledger: Send + Sync + 'static {
    /// Reserves a key, or says why not. One insert decides the race: of any number that ask at once
    /// one gets `Fresh`. A lease that ran out is given to the next who asks, under a higher fence;
    /// a key past its ttl is as good as new. The same act counts the key and holds it to its quota;
    /// a key that is known is never refused for it, and counts until it is forgotten.
    fn reserve(
        &self,
        ask: ReserveAsk,
    ) -> impl Future<Output = Result<Reservation, StoreError>> + Send;

    /// Keeps the answer, once per fence: `Lost` where the key was reserved again, abandoned or
    /// finished since, this same call before it included. Whoever is told so asks
    /// [`reserve`](Ledger::reserve) again and gets what is kept. Where the caller already holds all the
    /// bytes of its quota, [`StoredAnswer::not_kept`] is kept instead.
    fn finish(
        &self,
        reserved: &Reserved,
        answer: &StoredAnswer,
    ) -> impl Future<Output = Result<Held, StoreError>> + Send;

    /// Nothing was done under this right: the key is free, or as an earlier attempt left it. That one
    /// may have been carried out, so the next still counts on from it, and only for the same request.
    /// Under a lost fence there is nothing to give up.
    fn abandon(&self, reserved: &Reserved) -> impl Future<Output = Result<(), StoreError>> + Send;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(value: &str) -> Result<String, KeyError> {
        IdempotencyKey::parse(value.as_bytes()).map(|key| key.as_str().into())
    }

    #[test]
    fn bare_and_quoted_keys_are_the_same_key() {
        assert_eq!(key("8e03978e-40d5"), Ok("8e03978e-40d5".into()));
        assert_eq!(key("\"8e03978e-40d5\""), Ok("8e03978e-40d5".into()));
        assert_eq!(key("  spaced out  "), Ok("spaced out".into()));
        assert_eq!(key(r#""a \"b\" \\""#), Ok(r#"a "b" \"#.into()));
        assert_eq!(key("it\"s"), Ok("it\"s".into()));
    }

    #[test]
    fn what_is_no_key_is_refused() {
        assert_eq!(key(""), Err(KeyError::Empty));
        assert_eq!(key("   "), Err(KeyError::Empty));
        assert_eq!(key("\"\""), Err(KeyError::Empty));
        assert_eq!(key(&"k".repeat(255)), Ok("k".repeat(255)));
        assert_eq!(key(&"k".repeat(256)), Err(KeyError::TooLong));
        assert_eq!(key(&format!("\"{}\"", "k".repeat(255))), Ok("k".repeat(255)));
        assert_eq!(key("tab\there"), Err(KeyError::NotPrintable));
        assert_eq!(key("größe"), Err(KeyError::NotPrintable));
        for bad in ["\"open", "\"", "\"a\"b", "\"a\\x\"", "\"a\\", "\"a\"; p=1"] {
            assert_eq!(key(bad), Err(KeyError::Quoting), "{bad}");
        }
    }

    #[test]
    fn two_keys_are_none() {
        let mut headers = HeaderMap::new();
        assert_eq!(IdempotencyKey::of(&headers), Ok(None));
        headers.append(IDEMPOTENCY_KEY, "a".parse().unwrap());
        assert_eq!(IdempotencyKey::of(&headers).unwrap().unwrap().as_str(), "a");
        headers.append(IDEMPOTENCY_KEY, "a".parse().unwrap());
        assert_eq!(IdempotencyKey::of(&headers), Err(KeyError::Several));
    }

    #[test]
    fn a_scope_reads_as_what_it_is_for() {
        let scope = Scope::new("api", "acct_42", &Method::POST, "/charges");
        assert_eq!(scope.as_str(), "api/acct_42/POST /charges");
        let scope = Scope::new("api", "a/b c%", &Method::POST, "/charges/ä");
        assert_eq!(scope.as_str(), "api/a%2Fb%20c%25/POST /charges/%C3%A4");
    }

    proptest! {
        // S-40: whoever finds two callers with one scope reads somebody else's answers.
        #[test]
        fn different_callers_never_share_a_scope(
            a in ("[a/#% \u{e4}]{0,4}", "[a/#% \u{e4}]{0,4}", "/[a/#% \u{e4}]{0,4}"),
            b in ("[a/#% \u{e4}]{0,4}", "[a/#% \u{e4}]{0,4}", "/[a/#% \u{e4}]{0,4}"),
            repeat in prop_oneof![Just(1_usize), Just(300)],
        ) {
            let scope = |(realm, principal, route): &(String, String, String)| {
                Scope::new(realm, &principal.repeat(repeat), &Method::POST, route)
            };
            let (ours, theirs) = (scope(&a), scope(&b));
            let same = a.0 == b.0 && a.1.repeat(repeat) == b.1.repeat(repeat) && a.2 == b.2;
            prop_assert_eq!(ours == theirs, same);
            prop_assert!(ours.as_str().len() <= SCOPE_BYTES_MAX);
            prop_assert!(ours.as_str().bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        }
    }

    #[test]
    fn a_caller_is_told_from_others_and_its_api_from_the_caller() {
        let owner = |realm: &str, principal: &str| {
            let scope = Scope::new(realm, principal, &Method::POST, "/charges");
            (scope.owner().as_str().to_owned(), scope.owner().realm().to_owned())
        };
        assert_eq!(owner("api", "acct_1"), ("api/acct_1".into(), "api".into()));
        assert_eq!(owner("api", ""), ("api/".into(), "api".into()));
        assert_eq!(owner("a/b", "c/d"), ("a%2Fb/c%2Fd".into(), "a%2Fb".into()));
        let long = "x".repeat(SCOPE_BYTES_MAX + 1);
        let (whole, realm) = owner(&long, &long);
        assert!(whole.len() <= SCOPE_BYTES_MAX && realm.starts_with('#'), "{whole}");
        assert_ne!(owner(&long, "a"), owner(&long, "b"));
        assert_eq!(owner(&long, "a").1, owner(&long, "b").1);
        assert_ne!(owner("api", &long), owner("api", &format!("{long}x")));
    }

    #[test]
    fn a_caller_has_its_quota_and_over_the_total_its_fair_share() {
        let quota = Quota { keys: 10, bytes: 1_000 };
        let check = |own: (u64, u64), all: (u64, u64), callers, expected| {
            let (own, all) =
                (Usage { keys: own.0, bytes: own.1 }, Usage { keys: all.0, bytes: all.1 });
            assert_eq!(quota.admits(own, all, callers), expected, "{own:?} {all:?} {callers}");
        };
        check((0, 0), (0, 0), 1, true);
        check((9, 0), (9, 0), 1, true);
        check((10, 0), (10, 0), 1, false);
        check((1, 999), (1, 999), 1, true);
        check((1, 1_000), (1, 1_000), 1, false);
        // The total is 160 keys: with forty callers each may have four.
        check((9, 0), (159, 0), 40, true);
        check((9, 0), (160, 0), 40, false);
        check((3, 0), (160, 0), 40, true);
        check((4, 0), (160, 0), 40, false);
        check((0, 0), (160, 0), 161, false);
        // And 16,000 bytes, so 400 each.
        check((0, 399), (0, 16_000), 40, true);
        check((0, 400), (0, 16_000), 40, false);
        check((0, 900), (0, 15_999), 40, true);
        let huge = Quota { keys: u64::MAX, bytes: u64::MAX };
        let most = Usage { keys: u64::MAX - 1, bytes: u64::MAX - 1 };
        assert!(huge.admits(most, most, u64::MAX));
    }

    fn print(query: Option<&str>, body: &str, ignored: &[&str]) -> Fingerprint {
        let ignored: Vec<_> = ignored.iter().map(|one| Pointer::parse(one).unwrap()).collect();
        Fingerprint::of(query, body.as_bytes(), &ignored)
    }

    #[test]
    fn a_fingerprint_is_of_every_byte_that_is_not_ignored() {
        let one = print(None, r#"{"amount":100,"client_ts":1}"#, &["/client_ts"]);
        assert_eq!(one, print(None, r#"{"amount":100,"client_ts":22}"#, &["/client_ts"]));
        assert_ne!(one, print(None, r#"{"amount":101,"client_ts":1}"#, &["/client_ts"]));
        assert_ne!(one, print(None, r#"{"amount":100,"client_ts":1}"#, &[]));
        assert_ne!(one, print(Some("dry=1"), r#"{"amount":100,"client_ts":1}"#, &["/client_ts"]));
        // What stands beside the hole cannot move into it.
        assert_ne!(
            print(None, r#"{"a":1,"b":2}"#, &["/a"]),
            print(None, r#"{"a":1,"b":2}"#, &["/b"])
        );
        // One inside another is one hole.
        let nested = print(None, r#"{"a":{"b":1}}"#, &["/a", "/a/b"]);
        assert_eq!(nested, print(None, r#"{"a":{"b":[2]}}"#, &["/a/b", "/a"]));
        // Not JSON: every byte counts.
        assert_ne!(print(None, "a=1&ts=1", &["/ts"]), print(None, "a=1&ts=2", &["/ts"]));
    }

    #[test]
    fn who_was_turned_away_may_come_again_and_who_speaks_for_another_does_not_know() {
        let settle = |code| Settle::by_status(StatusCode::from_u16(code).unwrap());
        for kept in [200, 201, 202, 204, 302, 400, 402, 404, 409, 422, 500, 501, 505] {
            assert_eq!(settle(kept), Settle::Keep, "{kept}");
        }
        for free in [401, 403, 425, 429] {
            assert_eq!(settle(free), Settle::Free, "{free}");
        }
        for unknown in [408, 502, 503, 504] {
            assert_eq!(settle(unknown), Settle::Wait, "{unknown}");
        }
    }
}
