//! Keys of senders that are not configured but fetched when a request names them: PayPal's certificates and Plaid's
//! keys. This file owns the cache and its bounds. Where a key may be, and whether it can be trusted, is decided by the
//! scheme in core.
//!
//! Requests name keys before anything about them is proven. So every bound here must hold against forged names:
//! - A key is fetched by one task, however many requests wait for it.
//! - Each client address, and each host, has a rate of fetches. Known keys need no fetch and are never limited.
//! - Keys that were known before, and keys that proven senders name, have a separate allowance of
//!   fetches. Forged names from unproven addresses cannot use up this allowance. An address is a proven
//!   sender after a request of it was verified.
//! - A fetch that failed is not repeated for a while, and failed names never displace known keys.
//!
//! If a key cannot be fetched, the request is not refused as invalid: the sender gets a 503 and
//! retries.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::scheme::sender_key::{KeyRequest, SenderKey};
use hapax_core::{KeyHash, Source, Timestamp};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};
use tokio::sync::{Semaphore, watch};
use tracing::{info, warn};

use crate::http::client_address::party;
use crate::ingress::rate_limits::{EventLimit, FailureLimit};
use crate::limits::{
    RETRY_AFTER_BUSY_SECONDS, RETRY_AFTER_UNAVAILABLE_SECONDS, Rate, SENDER_KEY_BYTES_MAX,
    SENDER_KEY_DEADLINE, SENDER_KEY_FAILED_FOR, SENDER_KEY_FETCHES_AT_ONCE,
    SENDER_KEY_FETCHES_PER_ADDRESS, SENDER_KEY_FETCHES_PER_HOST, SENDER_KEY_FRESH_FOR,
    SENDER_KEY_PROVEN_MAX, SENDER_KEY_REFRESH_AFTER, SENDER_KEY_REFRESH_AGAIN,
    SENDER_KEY_WAITERS_MAX, SENDER_KEYS_MAX,
};
use crate::outbound::{EndpointClient, EndpointUrl};
use crate::run_to_completion::BackgroundTasks;

/// Fetches and keeps keys of senders.
pub struct SenderKeys {
    client: EndpointClient,
    entries: Mutex<HashMap<KeyHash, KeyEntry>>,
    /// Fetches of unknown keys by client address.
    by_address: FailureLimit,
    /// Fetches by host and by the party that named the key. Schemes know only a few hosts.
    by_host: Mutex<HashMap<(String, NamedBy), EventLimit>>,
    proven: Mutex<ProvenSenders>,
    waiters: Semaphore,
    tasks: BackgroundTasks,
    place: UrlOverride,
}

/// The URL from which a document is really fetched: in tests, a server that stands in for the
/// sender.
type UrlOverride = Box<dyn Fn(&str) -> String + Send + Sync>;

/// Why a key is not available now. The sender must retry.
#[derive(Debug)]
pub(crate) struct KeyUnavailable {
    pub(crate) why: String,
    pub(crate) retry_after_seconds: u64,
}

impl KeyUnavailable {
    /// This process fetches no keys.
    pub(crate) fn never_fetched() -> Self {
        Self::busy("this server fetches no keys of senders")
    }

    fn busy(why: &str) -> Self {
        Self { why: why.to_owned(), retry_after_seconds: RETRY_AFTER_BUSY_SECONDS }
    }
}

enum KeyEntry {
    /// A task fetches it. The receiver ends with the task.
    Fetching {
        host: String,
        named_by: NamedBy,
        ended: watch::Receiver<()>,
    },
    Known {
        key: Arc<SenderKey>,
        fetched_at: Timestamp,
        refresh_at: Timestamp,
    },
    Failed {
        why: Arc<str>,
        until: Timestamp,
    },
}

/// The party that names a key that must be fetched. Each has its own share of the fetches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum NamedBy {
    /// Any request, possibly forged.
    Stranger,
    /// A request from an address that sent a verified one before, or any request if the key was known before.
    Sender,
}

/// Addresses that sent a verified request with a fetched key, and when.
#[derive(Debug, Default)]
struct ProvenSenders(HashMap<IpAddr, Timestamp>);

impl ProvenSenders {
    fn add(&mut self, from: IpAddr, now: Timestamp) {
        if self.0.len() >= SENDER_KEY_PROVEN_MAX && !self.0.contains_key(&party(from)) {
            let oldest = self.0.iter().min_by_key(|(_, at)| **at).map(|(from, _)| *from);
            oldest.and_then(|oldest| self.0.remove(&oldest));
        }
        self.0.insert(party(from), now);
    }

    fn contains(&self, from: IpAddr) -> bool {
        self.0.contains_key(&party(from))
    }
}

/// The next step for a request that names a key.
enum KeyLookup {
    Use(Arc<SenderKey>),
    Wait(watch::Receiver<()>),
    Refuse(KeyUnavailable),
}

impl SenderKeys {
    /// Fetches through `client`. Must be called on the runtime that will serve it.
    pub fn new(client: EndpointClient) -> Self {
        Self::at(client, |url| url.to_owned())
    }

    /// [`Self::new`], but `place` maps each URL to the URL of a test server.
    #[doc(hidden)]
    pub fn at(
        client: EndpointClient,
        place: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> Self {
        Self {
            client,
            entries: Mutex::default(),
            by_address: FailureLimit::new(per_minute(SENDER_KEY_FETCHES_PER_ADDRESS)),
            by_host: Mutex::default(),
            proven: Mutex::default(),
            waiters: Semaphore::new(SENDER_KEY_WAITERS_MAX),
            tasks: BackgroundTasks::here(),
            place: Box::new(place),
        }
    }

    /// The key that a request of `from` names. If the key has to be fetched, waits for it, at most for the
    /// deadline of a fetch.
    pub(crate) async fn get(
        self: &Arc<Self>,
        source: &Arc<Source>,
        asked: KeyRequest,
        from: IpAddr,
        now: Timestamp,
    ) -> Result<Arc<SenderKey>, KeyUnavailable> {
        let mut ended = match self.step(source, &asked, Some(from), now) {
            KeyLookup::Use(key) => return Ok(key),
            KeyLookup::Refuse(unavailable) => return Err(unavailable),
            KeyLookup::Wait(ended) => ended,
        };
        let _waiting = self
            .waiters
            .try_acquire()
            .map_err(|_| KeyUnavailable::busy("too many requests wait for keys of senders"))?;
        // The value never changes: the task drops its sender when the entry is decided.
        let _ = ended.changed().await;
        match self.step(source, &asked, None, now) {
            KeyLookup::Use(key) => Ok(key),
            KeyLookup::Refuse(unavailable) => Err(unavailable),
            KeyLookup::Wait(_) => {
                Err(KeyUnavailable::busy("the key was dropped after it was fetched"))
            }
        }
    }

    /// Decides the next step of a request, and starts a fetch where one is needed. A request
    /// without a client address starts no fetch.
    fn step(
        self: &Arc<Self>,
        source: &Arc<Source>,
        asked: &KeyRequest,
        from: Option<IpAddr>,
        now: Timestamp,
    ) -> KeyLookup {
        let mut entries = self.entries();
        let was_known = matches!(entries.get(&asked.id), Some(KeyEntry::Known { .. }));
        match entries.get_mut(&asked.id) {
            Some(KeyEntry::Known { key, fetched_at, refresh_at }) if is_fresh(*fetched_at, now) => {
                let key = Arc::clone(key);
                if now >= *refresh_at {
                    *refresh_at = later(now, SENDER_KEY_REFRESH_AGAIN);
                    self.spawn_refresh(source, asked, now);
                }
                return KeyLookup::Use(key);
            }
            Some(KeyEntry::Fetching { ended, .. }) => return KeyLookup::Wait(ended.clone()),
            Some(KeyEntry::Failed { why, until }) if now < *until => {
                return KeyLookup::Refuse(KeyUnavailable {
                    why: why.to_string(),
                    retry_after_seconds: RETRY_AFTER_UNAVAILABLE_SECONDS,
                });
            }
            Some(KeyEntry::Known { .. } | KeyEntry::Failed { .. }) | None => {}
        }
        let Some(from) = from else {
            return KeyLookup::Refuse(KeyUnavailable::busy(
                "the key was dropped after it was fetched",
            ));
        };
        let named_by = match was_known || self.proven().contains(from) {
            true => NamedBy::Sender,
            false => NamedBy::Stranger,
        };
        // A key that was known before uses no share of the address: all requests that name it share
        // one fetch.
        let counted = (!was_known).then_some(from);
        if let Err(unavailable) = self.admit(&entries, asked, named_by, counted) {
            return KeyLookup::Refuse(unavailable);
        }
        make_room(&mut entries);
        let (ends, ended) = watch::channel(());
        let fetching = KeyEntry::Fetching {
            host: host(&asked.url).to_owned(),
            named_by,
            ended: ended.clone(),
        };
        entries.insert(asked.id, fetching);
        drop(entries);
        self.spawn_fetch(source, asked, now, ends);
        KeyLookup::Wait(ended)
    }

    /// Notes that a request of `from` was verified with a fetched key.
    pub(crate) fn note_verified(&self, from: IpAddr, now: Timestamp) {
        self.proven().add(from, now);
    }

    /// Whether a key may be fetched now. `counted`: the address whose share it uses, if any.
    fn admit(
        &self,
        entries: &HashMap<KeyHash, KeyEntry>,
        asked: &KeyRequest,
        named_by: NamedBy,
        counted: Option<IpAddr>,
    ) -> Result<(), KeyUnavailable> {
        let host = host(&asked.url);
        let is_beside = |entry: &&KeyEntry| {
            matches!(entry, KeyEntry::Fetching { host: other, named_by: by, .. }
                if other == host && *by == named_by)
        };
        let at_once = entries.values().filter(is_beside).count();
        if at_once >= SENDER_KEY_FETCHES_AT_ONCE {
            return Err(KeyUnavailable::busy("too many keys are fetched from this sender at once"));
        }
        let over = |what: &str, seconds| KeyUnavailable {
            why: format!("{what} named more unknown keys than are fetched in a minute"),
            retry_after_seconds: seconds,
        };
        if let Some(from) = counted {
            self.by_address
                .take(from)
                .map_err(|exceeded| over("this client address", exceeded.retry_after_seconds))?;
        }
        let mut by_host = self.by_host.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = by_host
            .entry((host.to_owned(), named_by))
            .or_insert_with(|| EventLimit::new(per_minute(SENDER_KEY_FETCHES_PER_HOST)));
        limit
            .take(1)
            .map_err(|exceeded| over("all requests together", exceeded.retry_after_seconds))
    }

    fn spawn_fetch(
        self: &Arc<Self>,
        source: &Arc<Source>,
        asked: &KeyRequest,
        now: Timestamp,
        ends: watch::Sender<()>,
    ) {
        // Decides the entry also if the fetch panics: no request waits for a task that is gone.
        let mut fetch = Fetch { keys: Arc::clone(self), id: asked.id, outcome: None, now, ends };
        let (source, asked) = (Arc::clone(source), asked.clone());
        self.tasks.spawn(async move {
            let outcome = fetch.keys.fetch(&source, &asked, now).await;
            match &outcome {
                Ok(_) => info!(source = %source.name(), "fetched the {} of {}", asked.name, source.name()),
                Err(why) => warn!(
                    source = %source.name(),
                    "could not fetch the {} of {}; requests that need it get a 503: {why}",
                    asked.name,
                    source.name()
                ),
            }
            fetch.ends_with(outcome);
        });
    }

    /// Fetches a known key again. If the fetch fails, the known key is used until it is too old.
    fn spawn_refresh(self: &Arc<Self>, source: &Arc<Source>, asked: &KeyRequest, now: Timestamp) {
        let (keys, source, asked) = (Arc::clone(self), Arc::clone(source), asked.clone());
        self.tasks.spawn(async move {
            match keys.fetch(&source, &asked, now).await {
                // An entry that was removed to make room, or that is being fetched again, stays as
                // it is.
                Ok(key) => {
                    if let Some(entry @ KeyEntry::Known { .. }) = keys.entries().get_mut(&asked.id)
                    {
                        *entry = KeyEntry::known(key, now);
                    }
                }
                Err(why) => warn!(
                    source = %source.name(),
                    "could not fetch the {} of {} again; the known one is used: {why}",
                    asked.name,
                    source.name()
                ),
            }
        });
    }

    async fn fetch(
        &self,
        source: &Source,
        asked: &KeyRequest,
        now: Timestamp,
    ) -> Result<SenderKey, String> {
        let place = (self.place)(&asked.url);
        let url = EndpointUrl::from_stored(&place).map_err(|error| error.to_string())?;
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
        let body = asked.body.as_ref().map(|body| Bytes::copy_from_slice(body));
        if body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        let answered = self
            .client
            .fetch(&url, headers, body, SENDER_KEY_DEADLINE, SENDER_KEY_BYTES_MAX)
            .await
            .map_err(|error| error.to_string())?;
        if answered.status != StatusCode::OK {
            return Err(format!("{} answered {}", url.host(), answered.status.as_u16()));
        }
        if answered.truncated {
            return Err(format!("the answer is longer than {SENDER_KEY_BYTES_MAX} bytes"));
        }
        source
            .scheme()
            .read_key(asked, &answered.body_start, now)
            .map_err(|error| error.to_string())
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<KeyHash, KeyEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn proven(&self) -> MutexGuard<'_, ProvenSenders> {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets addresses that have named no unknown key for a while.
    pub(crate) fn maintain(&self) {
        self.by_address.maintain();
    }

    /// Waits for fetches that are under way. Each has a deadline.
    pub(crate) async fn finish(&self) {
        self.tasks.finish().await;
    }
}

impl fmt::Debug for SenderKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SenderKeys").field("known", &self.entries().len()).finish_non_exhaustive()
    }
}

impl KeyEntry {
    fn known(key: SenderKey, now: Timestamp) -> Self {
        let refresh_at = later(now, SENDER_KEY_REFRESH_AFTER);
        Self::Known { key: Arc::new(key), fetched_at: now, refresh_at }
    }
}

/// A fetch under way. Dropping this value decides the entry of its key, then wakes the requests that wait.
struct Fetch {
    keys: Arc<SenderKeys>,
    id: KeyHash,
    outcome: Option<Result<SenderKey, String>>,
    now: Timestamp,
    ends: watch::Sender<()>,
}

impl Fetch {
    fn ends_with(&mut self, outcome: Result<SenderKey, String>) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        let outcome = self.outcome.take().unwrap_or_else(|| Err("the fetch broke off".to_owned()));
        let entry = match outcome {
            Ok(key) => KeyEntry::known(key, self.now),
            Err(why) => {
                KeyEntry::Failed { why: why.into(), until: later(self.now, SENDER_KEY_FAILED_FOR) }
            }
        };
        self.keys.entries().insert(self.id, entry);
        self.ends.send_replace(());
    }
}

fn per_minute(count: u32) -> Rate {
    Rate { count: NonZeroU32::new(count).expect("at least one"), per: Duration::from_secs(60) }
}

/// Whether a key may still be used. The time since the fetch may be negative: another request may have caused
/// the fetch after this one began.
fn is_fresh(fetched_at: Timestamp, now: Timestamp) -> bool {
    now.duration_since(fetched_at).unsigned_abs() < SENDER_KEY_FRESH_FOR
}

fn later(at: Timestamp, by: Duration) -> Timestamp {
    at.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// The host of a URL whose form the scheme has checked.
fn host(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split('/').next().unwrap_or_default()
}

/// Makes room for one entry. Failed names are removed first, so that forged ones displace no known
/// key; then the key that was fetched the longest time ago. A fetch under way stays.
fn make_room(entries: &mut HashMap<KeyHash, KeyEntry>) {
    if entries.len() < SENDER_KEYS_MAX {
        return;
    }
    let rank = |entry: &KeyEntry| match entry {
        KeyEntry::Failed { until, .. } => Some((0, *until)),
        KeyEntry::Known { fetched_at, .. } => Some((1, *fetched_at)),
        KeyEntry::Fetching { .. } => None,
    };
    let oldest = entries
        .iter()
        .filter_map(|(id, entry)| Some((rank(entry)?, *id)))
        .min_by_key(|(rank, _)| *rank);
    if let Some((_, id)) = oldest {
        entries.remove(&id);
    }
}
