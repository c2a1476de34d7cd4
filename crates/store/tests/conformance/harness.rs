//! Shared by the cases: a temporary directory, receipts that are made by verifying signed requests
//! (there is no other way), and a [`World`]: a store with a clock that the case moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use aws_lc_rs::hmac;
use bytes::Bytes;
use hapax_core::envelope::{EnvelopeSpec, IdSpec};
use hapax_core::job::{HandlerName, JobId, Phase, Policy, Retry, WorkLocation};
use hapax_core::ledger::Ledger;
use hapax_core::order::{Gaps, OrderPolicy, OrderRule, Position, ResourcePosition};
use hapax_core::scheme::CustomScheme;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{LatePolicy, ReplayGuard, SourceSpec};
use hapax_core::store::{
    Action, ArrivalInfo, Claim, ClaimAsk, EventDetail, EventId, EventName, HandlerRef, HandlerSpec,
    Ingest, Inspect, JobDetail, KeyRecords, Lookup, NewJob, Operate, Outcome, ReplayAsk,
    ReplayEffect, SearchIndex, Settlement, Store, StoreHints, TrafficHistory, Verdict, Wake, Work,
};
use hapax_core::{Arrival, Receipt, Source, SourceName, Tenant, Timestamp, Verified, verify};
use hapax_sim::Postgres;
use hapax_store::{MemoryStore, PgOptions, PgStore, SqliteOptions, SqliteStore};
use http::{HeaderMap, HeaderValue, Method};
use tokio::sync::OnceCell;
use uuid::Uuid;

pub(crate) struct DatabaseDirectory(tempfile::TempDir);

impl DatabaseDirectory {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    pub(crate) fn open(&self) -> SqliteStore {
        SqliteStore::open(SqliteOptions::new(self.directory())).expect("opens")
    }

    pub(crate) fn directory(&self) -> std::path::PathBuf {
        self.0.path().to_owned()
    }

    pub(crate) fn file(&self) -> std::path::PathBuf {
        self.0.path().join("hapax.db")
    }
}

/// The URL of a fresh database with the tables of Hapax, on the one server of this test process.
pub(crate) async fn pg_database() -> String {
    static TEMPLATE: OnceCell<()> = OnceCell::const_new();
    let server = Postgres::shared().await;
    TEMPLATE
        .get_or_init(|| async {
            server.execute("CREATE DATABASE hapax_template").await;
            let url = server.url_for("hapax_template");
            PgStore::migrate(&url).await.expect("migrates");
            // Partitions for the day on which every test begins, and for today: this saves time in
            // each test.
            let days = "SELECT hapax.make_partition(day::date) FROM unnest(ARRAY[ \
                        timestamp '2026-06-01', now() AT TIME ZONE 'UTC']) AS first, \
                        generate_series(first, first + interval '7 days', interval '1 day') AS day";
            Postgres::execute_at(&url, days).await;
            let closed = "SELECT count(*)::text FROM pg_stat_activity \
                          WHERE datname = 'hapax_template'";
            while server.execute(closed).await != [Some("0".to_owned())] {
                tokio::task::yield_now().await;
            }
        })
        .await;
    server.create_database_from("case", "hapax_template").await
}

/// A store in its own database.
pub(crate) async fn on_postgres() -> Arc<PgStore> {
    let options = PgOptions::new(pg_database().await);
    Arc::new(PgStore::open(options).await.expect("opens"))
}

const URL: &str = "https://hooks.example.com/webhooks/shop";
const SECRET: &str = "a secret of the conformance suite";

/// The instant at which every test begins.
pub(crate) fn noon() -> Timestamp {
    "2026-06-01T12:00:00Z".parse().expect("a timestamp")
}

pub(crate) fn after(seconds: i64) -> Timestamp {
    Timestamp::from_second(noon().as_second() + seconds).expect("in range")
}

/// A sender that signs time and body, with the event id in the body.
pub(crate) struct Sender {
    source: Source,
    timed: bool,
    signs_url: bool,
}

impl Sender {
    fn build(change: impl FnOnce(&mut SourceSpec, &mut CustomScheme)) -> Self {
        let secret = ActiveSecret::forever(Secret::new(SECRET));
        let mut spec = SourceSpec::new("shop", "custom", vec![secret]);
        let mut scheme = CustomScheme {
            algorithm: Some("hmac-sha256".into()),
            header: Some("x-signature".into()),
            encoding: Some("hex".into()),
            content: Some("{timestamp}.{body}".into()),
            timestamp: Some("header:x-timestamp".into()),
            ..CustomScheme::default()
        };
        spec.late = Some(LatePolicy::Review);
        spec.envelope = EnvelopeSpec {
            event_id: Some(IdSpec::Selector("/id".into())),
            event_type: Some("/type".into()),
            occurred_at: Some("/created".into()),
            ..EnvelopeSpec::default()
        };
        change(&mut spec, &mut scheme);
        let timed = scheme.timestamp.is_some();
        let signs_url = scheme.content.as_ref().is_some_and(|content| content.contains("{url}"));
        spec.custom = Some(scheme);
        Self { source: Source::build(spec).expect("a source"), timed, signs_url }
    }

    pub(crate) fn plain() -> Self {
        Self::build(|_, _| {})
    }

    pub(crate) fn of(tenant: &str, source: &str) -> Self {
        Self::build(|spec, _| {
            spec.tenant = Tenant::new(tenant);
            spec.name = SourceName::new(source);
        })
    }

    pub(crate) fn of_several() -> Self {
        Self::build(|spec, _| spec.envelope.items = Some("/events".into()))
    }

    pub(crate) fn of_several_of(tenant: &str) -> Self {
        Self::build(|spec, _| {
            spec.tenant = Tenant::new(tenant);
            spec.envelope.items = Some("/events".into());
        })
    }

    /// Neither id nor time is signed: the id is in a header.
    pub(crate) fn guarded() -> Self {
        Self::build(|spec, scheme| {
            spec.envelope.event_id = Some(IdSpec::Selector("header:x-id".into()));
            spec.replay_guard = Some(ReplayGuard::Signed);
            scheme.content = Some("{body}".into());
            scheme.timestamp = None;
        })
    }

    /// The key is a hash of type and resource, because there is no id. There is no guard.
    pub(crate) fn derived(within: Option<Duration>) -> Self {
        Self::build(|spec, _| {
            spec.replay_guard = Some(ReplayGuard::Off);
            spec.envelope.event_id =
                Some(IdSpec::Hash { fields: vec!["/type".into(), "/resource".into()], within });
        })
    }

    /// Each attempt has its number in the signed body, beside the id.
    pub(crate) fn counting_attempts() -> Self {
        let secret = ActiveSecret::forever(Secret::new(SECRET));
        let spec = SourceSpec::new("shop", "coinbase_commerce", vec![secret]);
        Self { source: Source::build(spec).expect("a source"), timed: false, signs_url: false }
    }

    /// An arrival of [`Sender::counting_attempts`].
    pub(crate) fn ingest_attempt(&self, id: &str, attempt: u32, note: &str) -> Ingest {
        let body = format!(
            r#"{{"attempt_number":{attempt},"event":{{"id":"{id}","type":"paid","note":"{note}"}}}}"#
        );
        let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
        let mac = hex::encode(hmac::sign(&key, body.as_bytes()));
        let mut headers = HeaderMap::new();
        headers.insert("x-cc-webhook-signature", HeaderValue::from_str(&mac).expect("hex"));
        let receipts = self.verified(headers, "", &body, noon());
        Ingest { jobs: vec![vec![job("fee")]; receipts.len()], receipts, via: via(noon()) }
    }

    /// As [`Sender::counting_attempts`], but the sender also signs the time.
    pub(crate) fn counting_attempts_and_timed() -> Self {
        let secret = ActiveSecret::forever(Secret::new(SECRET));
        let mut spec = SourceSpec::new("shop", "mux", vec![secret]);
        spec.late = Some(LatePolicy::Review);
        Self { source: Source::build(spec).expect("a source"), timed: true, signs_url: false }
    }

    /// An arrival of [`Sender::counting_attempts_and_timed`].
    pub(crate) fn ingest_timed_attempt(
        &self,
        id: &str,
        attempt: u32,
        note: &str,
        signed: Timestamp,
        now: Timestamp,
    ) -> Ingest {
        let body = format!(
            r#"{{"id":"{id}","type":"paid","attempts":[{{"number":{attempt}}}],"note":"{note}"}}"#
        );
        let stamp = signed.as_second();
        let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
        let mac = hex::encode(hmac::sign(&key, format!("{stamp}.{body}").as_bytes()));
        let mut headers = HeaderMap::new();
        let signature = format!("t={stamp},v1={mac}");
        headers.insert("mux-signature", HeaderValue::from_str(&signature).expect("hex"));
        let receipts = self.verified(headers, "", &body, now);
        Ingest { jobs: vec![vec![job("fee")]; receipts.len()], receipts, via: via(now) }
    }

    /// A derived key with a guard.
    pub(crate) fn derived_and_guarded() -> Self {
        Self::build(|spec, _| {
            spec.name = SourceName::new("guarded");
            let fields = vec!["/type".into(), "/resource".into()];
            spec.envelope.event_id = Some(IdSpec::Hash { fields, within: None });
            spec.replay_guard = Some(ReplayGuard::Signed);
        })
    }

    /// The id is in an unsigned header; time and URL are signed. The sender signs each retry again,
    /// with another query.
    pub(crate) fn signing_again() -> Self {
        Self::build(|spec, scheme| {
            spec.envelope.event_id = Some(IdSpec::Selector("header:x-id".into()));
            spec.replay_guard = Some(ReplayGuard::Signed);
            scheme.content = Some("{timestamp}.{url}.{body}".into());
        })
    }

    /// As [`Sender::signing_again`], but without a signed time.
    pub(crate) fn signing_no_time() -> Self {
        Self::build(|spec, scheme| {
            spec.envelope.event_id = Some(IdSpec::Selector("header:x-id".into()));
            spec.replay_guard = Some(ReplayGuard::Signed);
            scheme.content = Some("{url}.{body}".into());
            scheme.timestamp = None;
        })
    }

    /// Signs a one-time token and nothing else of the body; the key is derived.
    pub(crate) fn one_time_token() -> Self {
        let secret = ActiveSecret::forever(Secret::new(SECRET));
        let mut spec = SourceSpec::new("shop", "mailgun", vec![secret]);
        spec.late = Some(LatePolicy::Review);
        spec.replay_guard = Some(ReplayGuard::Signed);
        let fields = vec!["/event-data/event".into(), "/event-data/id".into()];
        spec.envelope.event_id = Some(IdSpec::Hash { fields, within: None });
        Self { source: Source::build(spec).expect("a source"), timed: false, signs_url: false }
    }

    /// An arrival of [`Sender::one_time_token`]; `unsigned` makes other bytes of the same event.
    pub(crate) fn ingest_token(
        &self,
        token: &str,
        id: &str,
        unsigned: &str,
        jobs: &[NewJob],
    ) -> Ingest {
        let stamp = noon().as_second().to_string();
        let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
        let mac = hex::encode(hmac::sign(&key, format!("{stamp}{token}").as_bytes()));
        let body = format!(
            r#"{{"signature":{{"timestamp":"{stamp}","token":"{token}","signature":"{mac}"}},
                "event-data":{{"event":"opened","id":"{id}","note":"{unsigned}"}}}}"#
        );
        let receipts = self.verified(HeaderMap::new(), "", &body, noon());
        Ingest { jobs: vec![jobs.to_vec(); receipts.len()], receipts, via: via(noon()) }
    }

    /// An arrival under this header id, for this query.
    pub(crate) fn ingest_signed(
        &self,
        header_id: &str,
        query: &str,
        signed: Timestamp,
        now: Timestamp,
        jobs: &[NewJob],
    ) -> Ingest {
        let receipts = self.receipts_for(r#"{"type":"push"}"#, header_id, query, signed, now);
        Ingest { jobs: vec![jobs.to_vec(); receipts.len()], receipts, via: via(now) }
    }

    /// Receipts of a body signed at `signed` and received at `now`.
    pub(crate) fn receipts(
        &self,
        body: &str,
        header_id: &str,
        signed: Timestamp,
        now: Timestamp,
    ) -> Vec<Receipt> {
        self.receipts_for(body, header_id, "", signed, now)
    }

    fn receipts_for(
        &self,
        body: &str,
        header_id: &str,
        query: &str,
        signed: Timestamp,
        now: Timestamp,
    ) -> Vec<Receipt> {
        let stamp = signed.as_second().to_string();
        let mut content = Vec::new();
        let mut headers = HeaderMap::new();
        if self.timed {
            content.extend_from_slice(format!("{stamp}.").as_bytes());
            headers.insert("x-timestamp", HeaderValue::from_str(&stamp).expect("digits"));
        }
        if self.signs_url {
            content.extend_from_slice(format!("{URL}{query}.").as_bytes());
        }
        content.extend_from_slice(body.as_bytes());
        let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
        let mac = hex::encode(hmac::sign(&key, &content));
        headers.insert("x-signature", HeaderValue::from_str(&mac).expect("hex"));
        headers.insert("x-id", HeaderValue::from_str(header_id).expect("an id"));
        self.verified(headers, query, body, now)
    }

    fn verified(
        &self,
        headers: HeaderMap,
        query: &str,
        body: &str,
        now: Timestamp,
    ) -> Vec<Receipt> {
        let arrival = Arrival {
            method: Method::POST,
            url: format!("{URL}{query}"),
            headers,
            body: Bytes::copy_from_slice(body.as_bytes()),
        };
        match verify(&self.source, &arrival, now) {
            Ok(Verified::Events { receipts, .. }) => receipts,
            other => panic!("not verified: {other:?}"),
        }
    }

    /// On time.
    pub(crate) fn ingest(&self, body: &str) -> Ingest {
        self.ingest_at(body, noon(), noon())
    }

    pub(crate) fn ingest_at(&self, body: &str, signed: Timestamp, now: Timestamp) -> Ingest {
        self.ingest_for(body, signed, now, &[])
    }

    /// An ingest request with the same jobs for each event of the body.
    pub(crate) fn ingest_for(
        &self,
        body: &str,
        signed: Timestamp,
        now: Timestamp,
        jobs: &[NewJob],
    ) -> Ingest {
        let receipts = self.receipts(body, "unused", signed, now);
        Ingest { jobs: vec![jobs.to_vec(); receipts.len()], receipts, via: via(now) }
    }

    pub(crate) fn ingest_under(&self, header_id: &str, body: &str) -> Ingest {
        let receipts = self.receipts(body, header_id, noon(), noon());
        Ingest { jobs: vec![Vec::new(); receipts.len()], receipts, via: via(noon()) }
    }
}

pub(crate) fn via(received_at: Timestamp) -> ArrivalInfo {
    ArrivalInfo {
        received_at,
        request_id: Uuid::now_v7(),
        remote: Some([203, 0, 113, 9].into()),
        secret: 0,
        signed_at: None,
        headers: "content-type: application/json".into(),
    }
}

/// A body with this id.
pub(crate) fn body(id: &str) -> String {
    format!(r#"{{"id":"{id}","type":"payout.paid","created":1780315200,"amount":10000}}"#)
}

/// A store with everything that the cases about events and jobs call.
pub(crate) trait Working:
    Store + Work + Operate + Inspect + StoreHints + Ledger + KeyRecords + TrafficHistory + SearchIndex
{
}
impl<S> Working for S where
    S: Store
        + Work
        + Operate
        + Inspect
        + StoreHints
        + Ledger
        + KeyRecords
        + TrafficHistory
        + SearchIndex
{
}

/// A clock that stands at noon until a test advances it.
#[derive(Clone, Default)]
pub(crate) struct Clock(Arc<AtomicI64>);

impl Clock {
    pub(crate) fn now(&self) -> Timestamp {
        let ms = noon().as_millisecond() + self.0.load(Ordering::SeqCst);
        Timestamp::from_millisecond(ms).expect("in range")
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, seconds: i64) {
        self.0.fetch_add(seconds * 1_000, Ordering::SeqCst);
    }

    pub(crate) fn for_a_store(&self) -> Arc<dyn Fn() -> Timestamp + Send + Sync> {
        let clock = self.clone();
        Arc::new(move || clock.now())
    }
}

/// A store, and the clock it uses.
pub(crate) struct World<S> {
    pub(crate) store: Arc<S>,
    pub(crate) clock: Clock,
    /// The directory of the store, if it is on a disk: it is removed with the world.
    #[allow(dead_code)]
    pub(crate) place: Option<DatabaseDirectory>,
}

impl World<MemoryStore> {
    pub(crate) fn in_memory() -> Self {
        let clock = Clock::default();
        let store = Arc::new(MemoryStore::with_clock(clock.for_a_store()));
        Self { store, clock, place: None }
    }
}

impl World<SqliteStore> {
    pub(crate) fn on_disk() -> Self {
        let (clock, place) = (Clock::default(), DatabaseDirectory::new());
        let options =
            SqliteOptions { clock: clock.for_a_store(), ..SqliteOptions::new(place.directory()) };
        let store = Arc::new(SqliteStore::open(options).expect("opens"));
        Self { store, clock, place: Some(place) }
    }
}

impl World<PgStore> {
    pub(crate) async fn on_postgres() -> Self {
        let clock = Clock::default();
        let mut options = PgOptions::new(pg_database().await);
        options.clock = Some(clock.for_a_store());
        let store = Arc::new(PgStore::open(options).await.expect("opens"));
        Self { store, clock, place: None }
    }
}

/// Far beyond any expected wait: a test that waits this long would wait for ever.
pub(crate) const FOREVER: Duration = Duration::from_secs(120);

/// The lease of every handler in the cases, in seconds.
pub(crate) const LEASE: i64 = 30;

pub(crate) fn handler(name: &str) -> HandlerRef {
    HandlerRef { source: SourceName::new("shop"), handler: HandlerName::new(name) }
}

/// A handler with three attempts: at once, about a minute later, and about five minutes after that.
pub(crate) fn spec(name: &str) -> HandlerSpec {
    let retry = [0, 60, 300].map(Duration::from_secs).to_vec();
    let policy = Policy { retry, lease: Duration::from_secs(LEASE.unsigned_abs()) };
    HandlerSpec { handler: handler(name), policy, order: None, workplace: WorkLocation::Inside }
}

pub(crate) fn ordered(name: &str, policy: OrderPolicy) -> HandlerSpec {
    with_gaps(name, policy, Gaps::default())
}

pub(crate) fn with_gaps(name: &str, policy: OrderPolicy, gaps: Gaps) -> HandlerSpec {
    HandlerSpec { order: Some(OrderRule { policy, gaps }), ..spec(name) }
}

pub(crate) fn job(name: &str) -> NewJob {
    NewJob { handler: HandlerName::new(name), place: None, hopeless: None }
}

pub(crate) fn placed(name: &str, resource: &str, position: i64) -> NewJob {
    let place = ResourcePosition { resource: resource.into(), position: Position(position) };
    NewJob { place: Some(place), ..job(name) }
}

pub(crate) fn done(result: &str) -> Outcome {
    Outcome::Done { result: Some(result.to_owned()), publish: Vec::new(), answer: None }
}

pub(crate) fn failed(retry: Retry) -> Outcome {
    Outcome::Failed { error: "the till is closed".to_owned(), retry, answer: None }
}

impl<S: Working> World<S> {
    /// Lets time pass.
    pub(crate) fn pass(&self, seconds: i64) {
        self.clock.pass(seconds);
    }

    pub(crate) async fn announce(&self, handlers: impl IntoIterator<Item = HandlerSpec>) {
        self.store.announce(handlers.into_iter().collect()).await.expect("announces");
    }

    /// Another arrival of this event, on time, with its jobs.
    pub(crate) async fn arrive(&self, sender: &Sender, id: &str, jobs: &[NewJob]) -> Verdict {
        let now = self.clock.now();
        let ingest = sender.ingest_for(&body(id), now, now, jobs);
        self.store.ingest(ingest).await.expect("ingests").remove(0)
    }

    /// A new event of the default tenant.
    pub(crate) async fn accept(&self, id: &str, jobs: &[NewJob]) -> EventId {
        match self.arrive(&Sender::plain(), id, jobs).await {
            Verdict::Accepted(id) => id,
            other => panic!("{id}: {other:?}"),
        }
    }

    /// An event that was signed too long ago.
    pub(crate) async fn arrive_late(&self, id: &str, jobs: &[NewJob]) -> EventId {
        let now = self.clock.now();
        let signed = Timestamp::from_second(now.as_second() - 3_600).expect("in range");
        let ingest = Sender::plain().ingest_for(&body(id), signed, now, jobs);
        match self.store.ingest(ingest).await.expect("ingests").remove(0) {
            Verdict::Review(id) => id,
            other => panic!("{id}: {other:?}"),
        }
    }

    pub(crate) async fn claim(&self, name: &str, limit: usize) -> Vec<Claim> {
        let ask = ClaimAsk { handler: handler(name), limit, worker: "worker-1".into() };
        self.store.claim(ask).await.expect("claims")
    }

    /// The one job that can be claimed now.
    pub(crate) async fn claim_one(&self, name: &str) -> Claim {
        let mut claims = self.claim(name, 10).await;
        assert_eq!(ids(&claims).len(), 1, "one claim, not {:?}", ids(&claims));
        claims.remove(0)
    }

    /// The jobs that can be claimed next, however long that takes; none if that is more than a day.
    pub(crate) async fn claim_next(&self, name: &str) -> Vec<Claim> {
        for wait in std::iter::repeat_n(1, 600).chain(std::iter::repeat_n(600, 144)) {
            let claims = self.claim(name, 10).await;
            if !claims.is_empty() {
                return claims;
            }
            self.pass(wait);
        }
        Vec::new()
    }

    pub(crate) async fn settle(&self, claim: &Claim, outcome: Outcome) -> Settlement {
        self.store.settle(claim.job, claim.fence, outcome).await.expect("settles")
    }

    /// Whether the job of this claim is done.
    pub(crate) async fn is_done(&self, claim: &Claim) -> bool {
        self.job_by_id(claim.job).await.phase == Phase::Done
    }

    /// The time at which the store expects the next job of a handler to be due.
    pub(crate) async fn next_due(&self, name: &str) -> Option<Timestamp> {
        match self.store.wait(&handler(name), Duration::ZERO..=Duration::ZERO).await {
            Wake::Elapsed { due } => due,
            Wake::Arrived => panic!("nothing arrives meanwhile"),
        }
    }

    /// Resolves at the next arrival, and not when a job becomes due.
    pub(crate) async fn arrival(&self, name: &str) {
        let wake = self.store.wait(&handler(name), FOREVER..=FOREVER).await;
        assert_eq!(wake, Wake::Arrived);
    }

    /// Claims all jobs and settles them as done.
    pub(crate) async fn do_all(&self, name: &str) -> Vec<String> {
        let mut order = Vec::new();
        loop {
            let claims = self.claim(name, 10).await;
            if claims.is_empty() {
                return order;
            }
            for claim in claims {
                assert_eq!(self.settle(&claim, done("done")).await, Settlement::Recorded);
                order.push(claim.event.key.event_id.to_string());
            }
        }
    }

    pub(crate) async fn event(&self, id: &str) -> EventDetail {
        match self.lookup(id).await {
            Lookup::One(detail) => detail,
            other => panic!("{id}: {other:?}"),
        }
    }

    pub(crate) async fn event_by_our_id(&self, id: EventId) -> EventDetail {
        match self.store.event(&EventName::Ours(id)).await.expect("reads") {
            Lookup::One(detail) => detail,
            other => panic!("{id}: {other:?}"),
        }
    }

    pub(crate) async fn lookup(&self, id: &str) -> Lookup<EventDetail> {
        self.store.event(&EventName::Theirs(id.into())).await.expect("reads")
    }

    pub(crate) async fn job(&self, id: &str, name: &str) -> JobDetail {
        let jobs = self.event(id).await.jobs;
        jobs.into_iter().find(|job| job.handler.as_str() == name).expect("a job of that handler")
    }

    pub(crate) async fn job_by_id(&self, id: JobId) -> JobDetail {
        self.store.job(id).await.expect("reads").expect("is there")
    }

    pub(crate) fn by(&self, reason: &str) -> Action {
        Action { who: "ops".into(), reason: Some(reason.into()), at: self.clock.now() }
    }

    pub(crate) async fn replay(
        &self,
        event: EventId,
        jobs: &[NewJob],
        how: Replay,
    ) -> Vec<ReplayEffect> {
        let ask = ReplayAsk {
            event,
            handlers: jobs.to_vec(),
            force: matches!(how, Replay::Force | Replay::DryForce),
            dry_run: matches!(how, Replay::Dry | Replay::DryForce),
            by: self.by("asked for"),
        };
        let replayed = self.store.replay(ask).await.expect("replays");
        replayed.into_iter().map(|one| one.effect).collect()
    }
}

/// How a replay is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Replay {
    Plain,
    Force,
    Dry,
    DryForce,
}

/// The senders' ids of the claimed jobs, in order.
pub(crate) fn ids(claims: &[Claim]) -> Vec<&str> {
    claims.iter().map(|claim| &*claim.event.key.event_id).collect()
}
