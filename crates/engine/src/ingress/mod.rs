//! The ingress: one request from its head to its answer. This file holds the order of the checks
//! and every decision between them. The checks themselves are in other files.
//!
//! No 2xx is sent before [`Store::ingest`] has returned, and the store gets only events that
//! [`verify`](fn@hapax_core::verify) accepted. A sender's key that is not configured is fetched before the body
//! is read ([`sender_keys`]).

mod clock_check;
mod rate_limits;
mod rejections;
pub(crate) mod respond;
pub(crate) mod routes;
pub(crate) mod sender_keys;
pub(crate) mod stored_headers;
pub(crate) mod sync_wait;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use bytes::Bytes;
use hapax_core::handshake::{Challenge, HandshakeReply};
use hapax_core::scheme::sender_key::SenderKey;
use hapax_core::source::LatePolicy;
use hapax_core::store::{
    ArrivalInfo, Decision, Ingest, Inspect, KnownEvent, Rejection, SecretUse, Status, Store,
    StoreError, StoreHints, TrafficFigures, Verdict, Work,
};
use hapax_core::{
    Arrival, KeyHash, Receipt, Refusal, SourceName, Tenant, Timeliness, Timestamp, Verified,
    claimed_id, verify_with_key,
};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Version};
use hyper::body::Body;
use metrics::gauge;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::field::display;
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::event_waiters::EventWaiters;
use crate::http::Peer;
use crate::http::body::{self, BodyFault};
use crate::http::client_address::remote;
use crate::ingress::clock_check::{Alarm, ClockCheck, ClockEvidence};
use crate::ingress::respond::{ConnectionReuse, IngressResponse, Reason, RequestId};
use crate::ingress::routes::{
    AnswerMode, LineKind, RouteChange, Routes, SourceRecord, SourceRoute,
};
use crate::ingress::sender_keys::{KeyUnavailable, SenderKeys};
use crate::ingress::stored_headers::{Plain, kept_headers};
use crate::ingress::sync_wait::{StoreSyncWait, SyncOutcome, SyncWait};
use crate::limits::{
    LOGGED_LOST_MAX, RETRY_AFTER_BUSY_SECONDS, RETRY_AFTER_UNAVAILABLE_SECONDS, TEND_EVERY,
};
use crate::request_ids::RequestIds;
use crate::run_to_completion::BackgroundTasks;

/// The clock.
pub type Now = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// The ingress over a store.
pub struct Ingress<S> {
    store: Arc<S>,
    routes: ArcSwap<Routes>,
    now: Now,
    ids: RequestIds,
    clock: Mutex<ClockCheck>,
    /// The last events that were logged as late and unknown.
    logged_lost: Mutex<VecDeque<KeyHash>>,
    afterwards: BackgroundTasks,
    event_waiters: EventWaiters,
    /// Waits for the work of sync sources.
    sync_wait: Option<Box<dyn SyncWait>>,
    /// Fetches the keys of senders that are not configured.
    sender_keys: Option<Arc<SenderKeys>>,
}

impl<S: Store + StoreHints + Work + Inspect> Ingress<S> {
    /// Enables sync sources. Without this call, sync sources are answered like any other source.
    pub fn with_sync(mut self) -> Self {
        let looking =
            StoreSyncWait { store: self.store.clone(), event_waiters: self.event_waiters.clone() };
        self.sync_wait = Some(Box::new(looking));
        self
    }
}

impl<S: Store + StoreHints> Ingress<S> {
    /// Must be called on the runtime that will serve it: a commit whose client hangs up continues
    /// there.
    pub fn new(store: Arc<S>, routes: Routes, now: Now) -> Self {
        Self {
            store,
            routes: ArcSwap::from_pointee(routes),
            now,
            ids: RequestIds::new(Uuid::now_v7().as_u64_pair().1),
            clock: Mutex::default(),
            logged_lost: Mutex::default(),
            afterwards: BackgroundTasks::here(),
            event_waiters: EventWaiters::default(),
            sync_wait: None,
            sender_keys: None,
        }
    }

    /// Fetches keys of senders that are not configured. Without this, requests that need one get a 503.
    pub fn with_sender_keys(mut self, keys: SenderKeys) -> Self {
        self.sender_keys = Some(Arc::new(keys));
        self
    }

    /// The waiting requests, which workers notify.
    pub fn event_waiters(&self) -> EventWaiters {
        self.event_waiters.clone()
    }

    /// Replaces the routing table. Requests that have started keep the old one.
    pub fn reload(&self, mut routes: Routes) {
        let before = self.routes.load();
        routes.continue_from(&before);
        self.routes.store(Arc::new(routes));
    }

    /// Changes some pairs of the routing table, and leaves the others as they are. Requests that have started
    /// keep the old table. Calls of this and of [`Ingress::reload`] must not overlap.
    pub fn change_routes(&self, changes: Vec<RouteChange>) {
        let mut routes = Routes::clone(&self.routes.load());
        routes.change(changes);
        self.routes.store(Arc::new(routes));
    }

    /// The figures of the requests of every source since the process started, including those of sources that a
    /// reload removed. A reload does not reset the figures.
    pub fn figures(&self) -> BTreeMap<SourceName, TrafficFigures> {
        self.routes.load().figures()
    }

    /// The sources that have a path now, including those whose secrets cannot be used.
    pub fn sources(&self) -> BTreeSet<SourceName> {
        self.routes.load().sources()
    }

    /// The requests that were refused since the last call, the newest of each source.
    pub fn take_rejections(&self) -> Vec<Rejection> {
        self.routes.load().take_rejections()
    }

    /// The secrets of all sources, and when this process last saw each of them verify a request.
    pub fn secret_uses(&self) -> Vec<SecretUse> {
        self.routes.load().secret_uses()
    }

    /// How far this machine's clock is ahead of the times that senders sign, as a recent median;
    /// `None` until there is enough evidence.
    pub fn clock_offset_seconds(&self) -> Option<i64> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).offset_seconds()
    }

    /// Answers one request.
    pub async fn answer<B>(
        self: Arc<Self>,
        request: Request<B>,
        peer: impl Into<Peer>,
    ) -> IngressResponse
    where
        B: Body<Data = Bytes> + Unpin,
    {
        self.answer_below("", request, peer).await
    }

    /// Answers one request to a server that mounts the ingress below the path `prefix`. The request
    /// keeps its whole path: some senders sign it.
    pub async fn answer_below<B>(
        self: Arc<Self>,
        prefix: &str,
        request: Request<B>,
        peer: impl Into<Peer>,
    ) -> IngressResponse
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let routes = self.routes.load_full();
        let peer = peer.into();
        let (parts, body) = request.into_parts();
        let received_at = (self.now)();
        let call = RequestContext {
            began: Instant::now(),
            received_at,
            request_id: RequestId { uuid: self.ids.next(received_at) },
            remote: remote(peer.address(), &parts.headers, &routes.trusted_proxies),
            version: parts.version,
        };
        peer.is_for(call.remote);
        let path = parts.uri.path().strip_prefix(prefix);
        let Some(route) = path.and_then(|path| routes.find(path)) else {
            return answer_unknown_path(&routes, &call, path, &parts, &body);
        };
        if parts.method != Method::POST {
            return not_a_post(route, &call, &parts, &body);
        }
        if let Err(refused) = check_head(&routes, &parts.headers, &body) {
            return refuse(route, &call, refused, call.after(&body));
        }
        // A request that cannot verify is refused before its body is read. The handshakes of some
        // senders have no signature, though.
        let may_greet = route.source.challenge().is_some_and(Challenge::posts_unsigned);
        if !may_greet && let Some(what) = route.source.scheme().missing(&parts.headers) {
            let refused = RefusedRequest::because(Reason::Missing, what);
            return refuse(route, &call, refused, call.after(&body));
        }
        let route = route.clone();
        let key = match self.sender_key(&route, &call, &parts.headers).await {
            Ok(key) => key,
            Err(refused) => return refuse(&route, &call, refused, call.after(&body)),
        };
        match body::read(body, &routes.body, routes.unfinished.hold(call.remote)).await {
            Ok(body) => {
                let arrival = arrival(&routes.public_url, parts, body);
                self.judge(route, call, &peer, arrival, key).await
            }
            Err(fault) => refuse(&route, &call, fault.into(), call.after_unread()),
        }
    }

    /// The key of the sender that this request names, if it must be fetched. Only the head is in memory while
    /// requests wait for a key.
    async fn sender_key(
        &self,
        route: &SourceRoute,
        call: &RequestContext,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<SenderKey>>, RefusedRequest<'static>> {
        let Some(asked) = route.source.scheme().key_request(headers, call.received_at)? else {
            return Ok(None);
        };
        let keys = self.sender_keys.as_ref().ok_or_else(KeyUnavailable::never_fetched)?;
        let found = keys.get(&route.source, asked, call.remote, call.received_at).await?;
        Ok(Some(found))
    }

    /// Decides about a complete request.
    async fn judge(
        self: Arc<Self>,
        route: Arc<SourceRoute>,
        mut call: RequestContext,
        peer: &Peer,
        arrival: Arrival,
        key: Option<Arc<SenderKey>>,
    ) -> IngressResponse {
        // The body may have arrived slowly: the time window is checked against the time at which it
        // was complete.
        call.received_at = (self.now)();
        let verified = verify_with_key(&route.source, &arrival, key.as_deref(), call.received_at);
        let verified = match verified {
            Ok(verified) => verified,
            Err(refusal) => {
                self.note_future_time(&refusal, call.received_at);
                let refused = RefusedRequest { read: Some(&arrival), ..refusal.into() };
                return refuse(&route, &call, refused, ConnectionReuse::KeepAlive);
            }
        };
        if let (Some(_), Some(keys)) = (&key, &self.sender_keys) {
            keys.note_verified(call.remote, call.received_at);
        }
        let (receipts, signed_at, secret) = match verified {
            Verified::Events { receipts, signed_at, secret } => (receipts, signed_at, secret),
            Verified::Reply(reply) => {
                return answer_handshake(&route, &call, reply, ConnectionReuse::KeepAlive);
            }
            Verified::Empty => {
                return respond::handshake(
                    HandshakeReply::empty(),
                    call.request_id,
                    ConnectionReuse::KeepAlive,
                );
            }
        };
        peer.has_verified();
        route.secret_verified(secret, call.received_at);
        self.note_signed_time(&receipts, signed_at, call.received_at);
        let content_type = arrival.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !route.source.content_type_fits(content_type) {
            return refuse(&route, &call, Reason::ContentType.into(), ConnectionReuse::KeepAlive);
        }
        if let Some(limit) = &route.rate
            && let Err(over) = limit.take(receipts.len())
        {
            let refused = RefusedRequest::later(Reason::Limited, over.retry_after_seconds);
            return refuse(&route, &call, refused, ConnectionReuse::KeepAlive);
        }
        let via = ArrivalInfo {
            received_at: call.received_at,
            request_id: call.request_id.uuid,
            remote: Some(call.remote),
            secret: route.source.verifier_number(secret),
            signed_at,
            headers: kept_headers(&arrival.headers, &route.secret_headers),
        };
        drop(arrival);
        let afterwards = self.afterwards.clone();
        let is_refused = route.source.late() == LatePolicy::Reject && receipts.iter().any(is_late);
        // From here on the store is involved, and its answer is counted and logged even if the
        // client has hung up.
        if is_refused {
            afterwards.run_to_completion(self.refuse_late(route, call, receipts)).await
        } else {
            let jobs = route.jobs_for(&receipts);
            afterwards
                .run_to_completion(self.commit(route, call, Ingest { receipts, jobs, via }))
                .await
        }
    }

    /// Makes the events durable, then answers.
    async fn commit(
        self: Arc<Self>,
        route: Arc<SourceRoute>,
        call: RequestContext,
        ingest: Ingest,
    ) -> IngressResponse {
        let named: Vec<EventLabels> = ingest.receipts.iter().map(EventLabels::of).collect();
        let verdicts = match self.store.ingest(ingest).await {
            Ok(verdicts) if verdicts.len() == named.len() => verdicts,
            Ok(verdicts) => {
                let error = format!("{} verdicts for {} events", verdicts.len(), named.len());
                return unavailable(&route, &call, &StoreError::Unavailable(error.into()));
            }
            Err(error) => return unavailable(&route, &call, &error),
        };
        for (event, verdict) in named.iter().zip(&verdicts) {
            note(&route.record, &call, event, verdict);
        }
        let answer = match (route.mode, &self.sync_wait) {
            (AnswerMode::Sync { timeout }, Some(sync_wait)) => {
                let worked = wait_for_jobs(&**sync_wait, &verdicts, call.began + timeout).await;
                if worked.contains(&SyncOutcome::Failed) {
                    route.record.count_refusal(Reason::WorkFailed);
                }
                respond::worked(&verdicts, &worked, route.source.ack(), call.request_id)
            }
            (AnswerMode::Async, _) | (AnswerMode::Sync { .. }, None) => {
                respond::decided(&verdicts, route.source.ack(), call.request_id)
            }
        };
        route.record.count_ack(call.began.elapsed());
        answer
    }

    /// Refuses authentic events that are too late, and finds out whether any of them is unknown.
    async fn refuse_late(
        self: Arc<Self>,
        route: Arc<SourceRoute>,
        call: RequestContext,
        receipts: Vec<Receipt>,
    ) -> IngressResponse {
        let mut unseen = Vec::new();
        for receipt in &receipts {
            match self.has_seen(receipt).await {
                Ok(true) => {}
                Ok(false) => unseen.push((EventLabels::of(receipt), receipt.key_hash())),
                Err(error) => return unavailable(&route, &call, &error),
            }
        }
        if unseen.is_empty() {
            return refuse(&route, &call, Reason::Stale.into(), ConnectionReuse::KeepAlive);
        }
        route.record.count_failed_verification(Reason::StaleUnseen);
        for (event, hash) in &unseen {
            note_stale_unseen(&route.record, &call, event, self.is_first_logged(*hash));
        }
        respond::refused(Reason::StaleUnseen, call.request_id, None, ConnectionReuse::KeepAlive)
    }

    /// Whether a late, unknown event has not been logged recently: repeated deliveries of one
    /// event, by its sender or from a captured request, are one loss and not many.
    fn is_first_logged(&self, event: KeyHash) -> bool {
        let mut logged = self.logged_lost.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.contains(&event) {
            return false;
        }
        if logged.len() == LOGGED_LOST_MAX {
            logged.pop_front();
        }
        logged.push_back(event);
        true
    }

    async fn has_seen(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        let neighbours = receipt.neighbours().into_iter().flat_map(|beside| &beside.keys);
        for key in std::iter::once(receipt.key()).chain(neighbours) {
            if self.store.knows(key).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Uses a verified timestamp as evidence about the clock.
    fn note_signed_time(&self, receipts: &[Receipt], signed_at: Option<Timestamp>, now: Timestamp) {
        let Some(signed_at) = signed_at else { return };
        let late = receipts.iter().find(|receipt| is_late(receipt));
        let Some(first) = late.or(receipts.first()) else { return };
        self.note_evidence(ClockEvidence {
            event: first.key_hash(),
            offset_seconds: now.duration_since(signed_at).as_secs(),
            is_outside: late.is_some(),
        });
    }

    /// Uses a request that was signed ahead of this clock: its signature is valid, so it is
    /// evidence too.
    fn note_future_time(&self, refusal: &Refusal, now: Timestamp) {
        match refusal {
            Refusal::Future { ahead_seconds } => self.note_evidence(ClockEvidence {
                // The event of a refused request is unknown. The signed time identifies the event instead,
                // because every copy has the same time.
                event: KeyHash::of(
                    b"signed",
                    [&(now.as_second() + ahead_seconds).to_be_bytes()[..]],
                ),
                offset_seconds: -ahead_seconds,
                is_outside: true,
            }),
            Refusal::Missing(_)
            | Refusal::Signature(_)
            | Refusal::Stale { .. }
            | Refusal::Malformed(_)
            | Refusal::NoId(_) => {}
        }
    }

    fn note_evidence(&self, evidence: ClockEvidence) {
        // If the lock is taken, this evidence is dropped: under load there is enough other
        // evidence.
        if let Ok(mut clock) = self.clock.try_lock() {
            clock.note(evidence);
        }
    }

    /// Maintains limiters, log sums and the clock check, until `stop`.
    pub async fn maintain(&self, stop: CancellationToken) {
        let mut beats = interval(TEND_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let offset = gauge!("hapax_clock_offset_seconds");
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            self.routes.load().maintain();
            if let Some(keys) = &self.sender_keys {
                keys.maintain();
            }
            let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(seconds) = clock.offset_seconds() {
                offset.set(seconds as f64);
            }
            if let Some(alarm) = clock.alarm((self.now)()) {
                log_clock_alarm(alarm);
            }
        }
        self.routes.load().maintain();
    }

    /// Waits for commits whose clients have hung up. Call it after serving has ended.
    pub async fn finish(&self) {
        self.afterwards.finish().await;
        if let Some(keys) = &self.sender_keys {
            keys.finish().await;
        }
    }
}

impl<S> fmt::Debug for Ingress<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ingress").field("routes", &self.routes).finish_non_exhaustive()
    }
}

/// The facts about a request besides its content.
#[derive(Debug, Clone, Copy)]
struct RequestContext {
    began: Instant,
    received_at: Timestamp,
    request_id: RequestId,
    remote: IpAddr,
    version: Version,
}

impl RequestContext {
    /// Whether the connection can be reused after an answer that leaves the rest of `body` unread.
    fn after(&self, body: &impl Body) -> ConnectionReuse {
        if body.is_end_stream() { ConnectionReuse::KeepAlive } else { self.after_unread() }
    }

    fn after_unread(&self) -> ConnectionReuse {
        // On HTTP/2 only the stream ends.
        if self.version < Version::HTTP_2 {
            ConnectionReuse::Close
        } else {
            ConnectionReuse::KeepAlive
        }
    }
}

/// An event by the names that log lines use.
#[derive(Debug)]
struct EventLabels {
    tenant: Tenant,
    event_id: Box<str>,
    event_type: Option<Box<str>>,
}

impl EventLabels {
    fn of(receipt: &Receipt) -> Self {
        Self {
            tenant: receipt.key().tenant.clone(),
            event_id: receipt.key().event_id.clone(),
            event_type: receipt.event_type().map(Into::into),
        }
    }
}

/// A refusal, with a detail for the log only.
#[derive(Debug)]
struct RefusedRequest<'a> {
    reason: Reason,
    why: Option<String>,
    retry_after_seconds: Option<u64>,
    /// The request, if all of it was read.
    read: Option<&'a Arrival>,
}

impl RefusedRequest<'_> {
    fn because(reason: Reason, why: impl Into<String>) -> Self {
        Self { reason, why: Some(why.into()), retry_after_seconds: None, read: None }
    }

    fn later(reason: Reason, seconds: u64) -> Self {
        Self { reason, why: None, retry_after_seconds: Some(seconds), read: None }
    }
}

impl From<Reason> for RefusedRequest<'_> {
    fn from(reason: Reason) -> Self {
        Self { reason, why: None, retry_after_seconds: None, read: None }
    }
}

impl From<Refusal> for RefusedRequest<'_> {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Missing(why) => Self::because(Reason::Missing, why),
            Refusal::Signature(why) => Self::because(Reason::Signature, why),
            Refusal::Stale { age_seconds } => Self::because(
                Reason::Stale,
                format!("a handshake that was signed {age_seconds} s ago"),
            ),
            Refusal::Future { ahead_seconds } => Self::because(
                Reason::Future,
                format!("signed {ahead_seconds} s ahead of this machine's clock"),
            ),
            Refusal::Malformed(why) => Self::because(Reason::Malformed, why),
            Refusal::NoId(why) => Self::because(Reason::NoId, why),
        }
    }
}

impl From<KeyUnavailable> for RefusedRequest<'_> {
    fn from(unavailable: KeyUnavailable) -> Self {
        let KeyUnavailable { why, retry_after_seconds } = unavailable;
        Self { why: Some(why), ..Self::later(Reason::Unavailable, retry_after_seconds) }
    }
}

impl From<BodyFault> for RefusedRequest<'_> {
    fn from(fault: BodyFault) -> Self {
        match fault {
            BodyFault::TooLarge => Reason::TooLarge.into(),
            BodyFault::Slow => Reason::Slow.into(),
            BodyFault::Crowded => Self::later(Reason::Crowded, RETRY_AFTER_BUSY_SECONDS),
            BodyFault::Broken => Self::because(
                Reason::Malformed,
                "the framing of the body is wrong, or the body ended early",
            ),
        }
    }
}

/// Waits for the work on every event, no longer than `until`.
async fn wait_for_jobs(
    sync_wait: &dyn SyncWait,
    verdicts: &[Verdict],
    until: Instant,
) -> Vec<SyncOutcome> {
    let mut all = Vec::with_capacity(verdicts.len());
    for verdict in verdicts {
        let worked = sync_wait.wait_for_jobs(verdict, until.into()).await;
        all.push(worked.unwrap_or_else(|error| {
            // The event is durable; its result is not known now.
            warn!(%error, "reading the result of an event: {error}");
            let known = KnownEvent { id: verdict.id(), status: Status::Received, result: None };
            SyncOutcome::Running(known)
        }));
    }
    all
}

/// Answers a request to a path that belongs to no source whose secrets are known.
fn answer_unknown_path(
    routes: &Routes,
    call: &RequestContext,
    path: Option<&str>,
    parts: &Parts,
    body: &impl Body,
) -> IngressResponse {
    let is_health = parts.uri.path() == "/healthz";
    if is_health && matches!(parts.method, Method::GET | Method::HEAD) {
        return respond::healthy(call.request_id);
    }
    if let Some(record) = path.and_then(|path| routes.find_unavailable(path)) {
        let later = RefusedRequest::later(Reason::Unavailable, RETRY_AFTER_UNAVAILABLE_SECONDS);
        let why = Some("the secrets of this tenant cannot be used".to_owned());
        return refuse_at(record, call, RefusedRequest { why, ..later }, call.after(body));
    }
    let refused = RefusedRequest::because(Reason::Unknown, parts.uri.path());
    refuse_at(&routes.unknown_source, call, refused, call.after(body))
}

/// Answers a handshake that is not a POST, or refuses with 405.
fn not_a_post(
    route: &SourceRoute,
    call: &RequestContext,
    parts: &Parts,
    body: &impl Body,
) -> IngressResponse {
    let query = parts.uri.query().unwrap_or_default();
    let reply = route.source.challenge().and_then(|challenge| {
        challenge.unsigned(&route.source, &parts.method, query, &parts.headers)
    });
    match reply {
        Some(reply) => answer_handshake(route, call, reply, call.after(body)),
        None => refuse(route, call, Reason::Method.into(), call.after(body)),
    }
}

/// Answers a handshake and counts it. Each address gets a limited number of answers: some are
/// signed with the source's own secret, and some reveal whether a token was guessed.
fn answer_handshake(
    route: &SourceRoute,
    call: &RequestContext,
    reply: HandshakeReply,
    after: ConnectionReuse,
) -> IngressResponse {
    if let Err(over) = route.handshakes.take(call.remote) {
        route.record.count_refusal(Reason::Limited);
        let retry_after = Some(over.retry_after_seconds);
        return respond::refused(Reason::Limited, call.request_id, retry_after, after);
    }
    route.record.handshakes.increment(1);
    respond::handshake(reply, call.request_id, after)
}

/// Refuses by the head alone.
fn check_head(
    routes: &Routes,
    headers: &HeaderMap,
    body: &impl Body,
) -> Result<(), RefusedRequest<'static>> {
    if body.size_hint().lower() > routes.body.bytes_max as u64 {
        return Err(Reason::TooLarge.into());
    }
    if is_encoded(headers) { Err(Reason::Encoded.into()) } else { Ok(()) }
}

/// Whether the body is compressed. Such a request is refused, because its signature covers other bytes.
pub fn is_encoded(headers: &HeaderMap) -> bool {
    let is_plain = |encoding: &HeaderValue| {
        let encoding = encoding.as_bytes().trim_ascii();
        encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity")
    };
    !headers.get_all(CONTENT_ENCODING).iter().all(is_plain)
}

fn arrival(public_url: &str, parts: Parts, body: Bytes) -> Arrival {
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut url = String::with_capacity(public_url.len() + target.len());
    url.push_str(public_url);
    url.push_str(target);
    Arrival { method: parts.method, url, headers: parts.headers, body }
}

fn is_late(receipt: &Receipt) -> bool {
    match receipt.timeliness() {
        Timeliness::OnTime => false,
        Timeliness::Late { .. } => true,
    }
}

/// Refuses a request to a source. Beyond the limit of its address, a failure gets no reason and no
/// log line. Verified requests are never refused because of their address.
fn refuse(
    route: &SourceRoute,
    call: &RequestContext,
    refused: RefusedRequest<'_>,
    after: ConnectionReuse,
) -> IngressResponse {
    if refused.reason.is_failed_verification() {
        route.record.count_failed_verification(refused.reason);
    }
    if refused.reason.is_failed_verification()
        && let Some(limit) = &route.unverified
        && let Err(over) = limit.take(call.remote)
    {
        route.record.count_refusal(Reason::Limited);
        let retry_after = Some(over.retry_after_seconds);
        return respond::refused(Reason::Limited, call.request_id, retry_after, after);
    }
    if route.record.rejections.admits(&route.record.source, call.received_at.as_second()) {
        let read = refused.read.filter(|_| refused.reason != Reason::NoId);
        let claimed_id = read.and_then(|arrival| claimed_id(&route.source, arrival));
        note_rejection(&route.record, call, refused.reason, refused.why.clone(), claimed_id);
    }
    refuse_at(&route.record, call, refused, after)
}

/// Notes a refused request for operators.
fn note_rejection(
    record: &SourceRecord,
    call: &RequestContext,
    reason: Reason,
    detail: Option<String>,
    claimed_id: Option<String>,
) {
    record.rejections.note(Rejection {
        source: SourceName::new(&*record.source),
        at: call.received_at,
        request_id: call.request_id.uuid,
        remote: Some(call.remote),
        reason: reason.as_str().to_owned(),
        detail,
        claimed_id,
    });
}

fn refuse_at(
    record: &SourceRecord,
    call: &RequestContext,
    refused: RefusedRequest<'_>,
    after: ConnectionReuse,
) -> IngressResponse {
    let RefusedRequest { reason, why, retry_after_seconds, read: _ } = refused;
    record.count_refusal(reason);
    if record.budget(LineKind::Rejected).admit(call.received_at) {
        let (source, why) = (&*record.source, why.as_deref().map(Plain).map(display));
        warn!(
            request_id = %call.request_id.uuid,
            source,
            decision = "rejected",
            reason = reason.as_str(),
            why,
            remote = %call.remote,
            "refused a request for {source}: {}", reason.as_str()
        );
    }
    respond::refused(reason, call.request_id, retry_after_seconds, after)
}

/// Answers 503: no event was stored, and the sender must retry.
fn unavailable(route: &SourceRoute, call: &RequestContext, error: &StoreError) -> IngressResponse {
    let retry_after_seconds = match error {
        StoreError::Busy => RETRY_AFTER_BUSY_SECONDS,
        StoreError::Unavailable(_) | StoreError::Closed | StoreError::Read(_) => {
            RETRY_AFTER_UNAVAILABLE_SECONDS
        }
    };
    let record = &route.record;
    record.count_refusal(Reason::Unavailable);
    if record.budget(LineKind::Alarming).admit(call.received_at) {
        let source = &*record.source;
        error!(
            request_id = %call.request_id.uuid,
            source,
            decision = "rejected",
            reason = Reason::Unavailable.as_str(),
            remote = %call.remote,
            %error,
            "could not store an event of {source}; the sender is asked to retry: {error}"
        );
    }
    respond::refused(
        Reason::Unavailable,
        call.request_id,
        Some(retry_after_seconds),
        ConnectionReuse::KeepAlive,
    )
}

/// Counts one decision, and logs it within the log budget.
fn note(record: &SourceRecord, call: &RequestContext, event: &EventLabels, verdict: &Verdict) {
    let decision = match verdict {
        Verdict::Accepted(_) => Decision::Accepted,
        Verdict::Duplicate(_) => Decision::Duplicate,
        Verdict::Conflict(_) => Decision::Conflict,
        Verdict::Review(_) => Decision::Review,
    };
    record.count(decision, call.received_at);
    if let Verdict::Duplicate(known) | Verdict::Conflict(known) = verdict {
        record.count_copy(known.id, call.received_at);
    }
    if !record.budget(LineKind::of(decision)).admit(call.received_at) {
        return;
    }
    let (source, event_id) = (&*record.source, Plain(&event.event_id));
    let event_type = event.event_type.as_deref().map(Plain).map(display);
    macro_rules! say {
        ($level:ident, $text:literal) => {
            $level!(
                request_id = %call.request_id.uuid,
                source,
                tenant = %event.tenant,
                event_id = %event_id,
                event_type,
                decision = decision.as_str(),
                id = %verdict.id(),
                remote = %call.remote,
                $text,
            )
        };
    }
    match decision {
        Decision::Accepted => say!(info, "accepted {event_id} from {source}"),
        Decision::Duplicate => say!(info, "{event_id} from {source} is a duplicate"),
        Decision::Conflict => {
            say!(
                warn,
                "{event_id} from {source} arrived again with a different body; both are stored"
            )
        }
        Decision::Review => say!(warn, "{event_id} from {source} waits for review"),
    }
}

fn note_stale_unseen(
    record: &SourceRecord,
    call: &RequestContext,
    event: &EventLabels,
    is_first: bool,
) {
    record.count_refusal(Reason::StaleUnseen);
    if record.rejections.admits(&record.source, call.received_at.as_second()) {
        let detail = "authentic, too late, and never seen before".to_owned();
        let id = event.event_id.to_string();
        note_rejection(record, call, Reason::StaleUnseen, Some(detail), Some(id));
    }
    if !record.budget(LineKind::Alarming).admit(call.received_at) {
        return;
    }
    let (source, event_id) = (&*record.source, Plain(&event.event_id));
    macro_rules! say {
        ($level:ident, $($message:tt)*) => {
            $level!(
                request_id = %call.request_id.uuid,
                source,
                tenant = %event.tenant,
                event_id = %event_id,
                event_type = event.event_type.as_deref().map(Plain).map(display),
                decision = "rejected",
                reason = Reason::StaleUnseen.as_str(),
                remote = %call.remote,
                $($message)*
            )
        };
    }
    match is_first {
        true => say!(
            error,
            "refused {event_id} from {source}: authentic, too late, and never seen before; it may be \
             a lost event (with late = \"review\" it would wait for review)"
        ),
        false => say!(info, "refused {event_id} from {source} again: authentic, and too late"),
    }
}

fn log_clock_alarm(alarm: Alarm) {
    match alarm {
        Alarm::Offset { seconds } => error!(
            offset_seconds = seconds,
            "this machine's clock may be wrong: it is {seconds} s ahead of the times that senders sign"
        ),
        Alarm::OutsideWindow { in_a_row } => error!(
            in_a_row,
            "this machine's clock may be wrong: the last {in_a_row} authentic requests were \
             outside the window"
        ),
    }
}
