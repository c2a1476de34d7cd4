//! Idempotency-Keys of the user's own API: a request that is retried with the same key gets the answer
//! of the first one, and the work is done once.
//!
//! A key is *reserved* under a fence and a lease, then *finished* with an answer or *abandoned*. A
//! process that dies blocks its key no longer than the lease. This file is pure: keys, scopes,
//! fingerprints, quotas, and the trait [`Ledger`] that every database implements.

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

/// A key as the client chose it: 1 to 255 printable bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Box<str>);

/// Why a header holds no key. The message never quotes the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The key is empty, with or without quotes.
    #[error("the Idempotency-Key is empty")]
    Empty,
    /// The key is longer than the bound.
    #[error("the Idempotency-Key is longer than {IDEMPOTENCY_KEY_BYTES_MAX} bytes")]
    TooLong,
    /// Bytes that are not printable ASCII.
    #[error("the Idempotency-Key is not printable ASCII")]
    NotPrintable,
    /// The quoted string is not closed, or text follows it.
    #[error("the Idempotency-Key is not a well-formed quoted string")]
    Quoting,
    /// The header occurs twice.
    #[error("there is more than one Idempotency-Key")]
    Several,
}

impl IdempotencyKey {
    /// The key of a request. `None` without the header.
    pub fn of(headers: &HeaderMap) -> Result<Option<Self>, KeyError> {
        let mut found = headers.get_all(IDEMPOTENCY_KEY).iter();
        match (found.next(), found.next()) {
            (None, _) => Ok(None),
            (Some(value), None) => Self::parse(value.as_bytes()).map(Some),
            (Some(_), Some(_)) => Err(KeyError::Several),
        }
    }

    /// Parses a bare key, or one that is quoted as in the IETF draft: `abc` and `"abc"` are the same key.
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

/// The text before the closing quote, which must be the last byte.
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

/// The scope of a key: API, caller, method and route. The same key in another scope is another key, so
/// that no caller gets the answer of another.
///
/// Its text is printable, so that it fits into a header and is readable in a table.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope {
    text: Box<str>,
    owner: Owner,
}

/// The caller of an API whose keys are counted against a [`Quota`]. All callers without a name are one
/// caller.
///
/// `api/acct_1`: the API, a slash, and the caller. Neither part contains another slash.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(Box<str>);

impl Owner {
    /// The caller as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The API: the text before the slash.
    pub fn realm(&self) -> &str {
        self.0.split('/').next().unwrap_or_default()
    }
}

impl Scope {
    /// `realm` is the API (a tenant, or the name of a proxy), `principal` the caller, `route` the path.
    /// Parts are escaped, so that different parts never make the same scope.
    pub fn new(realm: &str, principal: &str, method: &Method, route: &str) -> Self {
        let (mut realm_shown, mut principal_shown, mut route_shown) =
            (String::new(), String::new(), String::new());
        escape(realm, b"/", &mut realm_shown);
        escape(principal, b"/", &mut principal_shown);
        escape(route, b"", &mut route_shown);
        let text = format!("{realm_shown}/{principal_shown}/{method} {route_shown}");
        let text = bounded(&realm_shown, text).into();
        // Callers of one API are counted together, so the name of the API is never truncated.
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

    /// The caller that owns the key.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }
}

/// `whole`, or `realm/#` and its hash if that is too long.
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

/// How many keys and bytes each caller of an API may have stored at once. A key counts from its
/// reservation until its ttl ends; an answer counts with its headers and body.
///
/// Only new keys are refused over the quota. The API as a whole may hold [`Quota::TOTAL`] times as much.
/// Over that total, new keys are refused to callers that hold more than their fair share, the total
/// divided by the number of callers. So one caller cannot block the others, and many callers cannot fill
/// the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quota {
    /// The most keys of one caller.
    pub keys: u64,
    /// The most bytes of answers of one caller. The answer that exceeds this bound is still stored.
    pub bytes: u64,
}

/// How much is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Keys, in progress or finished.
    pub keys: u64,
    /// Bytes of their answers.
    pub bytes: u64,
}

impl Quota {
    /// How many times the quota of one caller the whole API may hold.
    pub const TOTAL: u64 = 16;

    /// Whether a caller that holds `own` may reserve another key, if all `callers` of the API (including this
    /// one) together hold `all`.
    pub fn admits(self, own: Usage, all: Usage, callers: u64) -> bool {
        let share = Share { callers, ..Share::of(self.keys) };
        share.has_room(own.keys, all.keys, 1) && self.keeps(own, all, callers)
    }

    /// Whether an answer of this caller is stored.
    pub fn keeps(self, own: Usage, all: Usage, callers: u64) -> bool {
        let share = Share { callers, ..Share::of(self.bytes) };
        share.has_room(own.bytes, all.bytes, 1)
    }
}

/// One caller's share of keys or bytes.
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

/// Percent-encodes bytes that are not printable, the separators `apart`, `#` and the percent sign.
fn escape(part: &str, apart: &[u8], out: &mut String) {
    use fmt::Write;
    for byte in part.bytes() {
        if (b'!'..=b'~').contains(&byte) && byte != b'%' && byte != b'#' && !apart.contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a String never fails.
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

/// A hash of the request. The same key with another fingerprint is a mistake of the client, and nothing
/// runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Hashes the target as it is spelled (path and query) and the bytes of the body. The hash leaves out the
    /// values that `ignored` points at in a JSON body, which a client changes with every try.
    ///
    /// The [`Scope`] holds one normal form for all spellings of a path. Two resources whose paths differ
    /// only in spelling must not share an answer, so the spelling is hashed here.
    ///
    /// # Panics
    /// With more than [`json::POINTERS_MAX`] pointers. The config enforces that bound.
    pub fn of(target: Option<&str>, body: &[u8], ignored: &[Pointer]) -> Self {
        let mut hasher = digest::Context::new(&digest::SHA256);
        let mut feed = |part: &[u8]| {
            hasher.update(&(part.len() as u64).to_be_bytes());
            hasher.update(part);
        };
        feed(target.unwrap_or_default().as_bytes());
        let mut from = 0;
        for (start, end) in json::spans(body, ignored).unwrap_or_default() {
            feed(&body[from..start]);
            from = end;
        }
        feed(&body[from..]);
        let mut print = [0; 32];
        print.copy_from_slice(hasher.finish().as_ref());
        Self(print)
    }
}

/// A request to reserve a key.
#[derive(Debug, Clone)]
pub struct ReserveAsk {
    /// The scope of the key.
    pub scope: Scope,
    /// The key.
    pub key: IdempotencyKey,
    /// The hash of the request.
    pub fingerprint: Fingerprint,
    /// How long the work may take. The key is in progress no longer than this.
    pub lease: Duration,
    /// How long the answer is stored.
    pub ttl: Duration,
    /// The quota of the caller. `None` is unlimited, and not counted.
    pub quota: Option<Quota>,
}

/// The outcome of [`Ledger::reserve`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reservation {
    /// The key is reserved: the caller runs the request.
    Fresh(Reserved),
    /// The request was run before: its stored answer.
    Replay(StoredAnswer),
    /// Another attempt runs the request.
    InProgress {
        /// The time left of the lease.
        remaining: Duration,
    },
    /// The key was used for another request. A mismatch takes precedence over "in progress".
    Mismatch,
    /// The key is new, and its caller is over its quota. Nothing was reserved.
    OverQuota,
}

/// The right to run a request and to finish its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// The scope of the key.
    pub scope: Scope,
    /// The key.
    pub key: IdempotencyKey,
    /// The fence, which voids every earlier right to this key.
    pub fence: Fence,
    /// How often this key was reserved, including this time: more than once after a lease expired.
    pub attempt: u32,
    /// The quota under which it was reserved.
    pub quota: Option<Quota>,
}

/// The answer of a request, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredAnswer {
    /// The status.
    pub status: StatusCode,
    /// The end-to-end headers, in their order.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Bytes,
}

impl StoredAnswer {
    /// The bytes that count against a [`Quota`]: headers and body.
    pub fn size(&self) -> u64 {
        let headers = self.headers.iter().map(|(name, value)| name.len() + value.len());
        (headers.sum::<usize>() + self.body.len()) as u64
    }

    /// The answer that is stored instead if the caller already holds all the bytes of its quota. The
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

/// The change to a key after its request has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settle {
    /// The answer is stored, and every retry gets it.
    Keep,
    /// Nothing was done, and the same request may succeed later: the key is free.
    Free,
    /// The outcome is unknown: nothing is stored, and the key stays in progress until its lease
    /// ends.
    Wait,
}

impl Settle {
    /// Decides by the status alone.
    ///
    /// 401, 403, 425 and 429 refuse a request before any work, so the key is free: a stored refusal would
    /// be replayed for days after the caller was admitted. A gateway that answers 502, 503 or 504 does not
    /// know what the app did. Many frameworks answer 408 when a deadline around the work passes, so a 408
    /// leaves the outcome unknown too.
    pub fn by_status(status: StatusCode) -> Self {
        match status.as_u16() {
            401 | 403 | 425 | 429 => Self::Free,
            408 | 502..=504 => Self::Wait,
            _ => Self::Keep,
        }
    }
}

/// The store of reservations. Every method is one atomic act that is durable when it returns `Ok`. A
/// lost fence is an answer, not an error. Leases and ttls use the database's clock.
/// [`Work::prune`](crate::store::Work::prune) deletes keys past their ttl.
pub trait Ledger: Send + Sync + 'static {
    /// Reserves a key, or returns why it is not free. One insert decides the race: of any number of
    /// concurrent calls, one gets `Fresh`. After a lease has expired, the next call gets the key under a
    /// higher fence. A key past its ttl counts as new. The same act counts the key against its quota; a
    /// known key is never refused for the quota, and counts until its ttl ends.
    fn reserve(
        &self,
        ask: ReserveAsk,
    ) -> impl Future<Output = Result<Reservation, StoreError>> + Send;

    /// Stores the answer, once per fence. Returns `Lost` if the key was reserved again, abandoned or
    /// finished since, even by an earlier call with the same fence. After `Lost`,
    /// [`reserve`](Ledger::reserve) returns the stored answer. Where the caller already holds all the
    /// bytes of its quota, [`StoredAnswer::not_kept`] is stored instead.
    fn finish(
        &self,
        reserved: &Reserved,
        answer: &StoredAnswer,
    ) -> impl Future<Output = Result<Held, StoreError>> + Send;

    /// Gives up a right under which nothing was done. After a first attempt the key is free. After a
    /// later one the key keeps its fingerprint and the attempt count of the attempt before, because
    /// that attempt may have been carried out. Under a lost fence nothing happens.
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
    fn a_header_that_holds_no_valid_key_is_refused() {
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
    fn a_second_key_in_a_request_is_refused() {
        let mut headers = HeaderMap::new();
        assert_eq!(IdempotencyKey::of(&headers), Ok(None));
        headers.append(IDEMPOTENCY_KEY, "a".parse().unwrap());
        assert_eq!(IdempotencyKey::of(&headers).unwrap().unwrap().as_str(), "a");
        headers.append(IDEMPOTENCY_KEY, "a".parse().unwrap());
        assert_eq!(IdempotencyKey::of(&headers), Err(KeyError::Several));
    }

    #[test]
    fn a_scope_is_readable_text() {
        let scope = Scope::new("api", "acct_42", &Method::POST, "/charges");
        assert_eq!(scope.as_str(), "api/acct_42/POST /charges");
        let scope = Scope::new("api", "a/b c%", &Method::POST, "/charges/ä");
        assert_eq!(scope.as_str(), "api/a%2Fb%20c%25/POST /charges/%C3%A4");
    }

    proptest! {
        // Two callers with one scope would read each other's answers.
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
    fn every_caller_has_its_own_owner_and_the_owner_names_its_api() {
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
        // The total is 16,000 bytes: with forty callers each may have 400.
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
        // Bytes next to an ignored value cannot move into it.
        assert_ne!(
            print(None, r#"{"a":1,"b":2}"#, &["/a"]),
            print(None, r#"{"a":1,"b":2}"#, &["/b"])
        );
        // A pointer inside another one ignores the outer value.
        let nested = print(None, r#"{"a":{"b":1}}"#, &["/a", "/a/b"]);
        assert_eq!(nested, print(None, r#"{"a":{"b":[2]}}"#, &["/a/b", "/a"]));
        // This body is not JSON: every byte counts.
        assert_ne!(print(None, "a=1&ts=1", &["/ts"]), print(None, "a=1&ts=2", &["/ts"]));
    }

    #[test]
    fn a_refusal_frees_the_key_and_a_gateway_error_leaves_it_in_progress() {
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
