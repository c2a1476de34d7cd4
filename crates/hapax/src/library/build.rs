//! The builder: sources and handlers of an app, checked when it is opened.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::handler::{
    Handler as CoreHandler, HandlerError, HandlerKind, Order, Refetch, RustHandler, TypeFilter,
};
use hapax_core::job::{HandlerName, Policy};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{SourceError, SourceSpec};
use hapax_core::store::StoreError;
use hapax_core::{KeyHash, Tenant, Timestamp};
use hapax_engine::limits::UNVERIFIED_DEFAULT;
use hapax_engine::{AnswerMode, BodyLimits, OutboundTlsError, PathTaken, Rate, RouteSpec};
use hapax_store::{OpenError, PgOpenError, PgOptions, PgStore, SqliteStore};
use ipnet::IpNet;

use super::database::Database;
use super::handler::{Handler, HandlerAdapter};
use super::running::{CheckedSetup, Hapax};
use super::sending::{Sending, SendingSetupError};
use crate::limits::{
    CONCURRENCY_DEFAULT, DRAIN_DEFAULT, KEEP_DEFAULT, LEASE_DEFAULT, RETRY_DEFAULT, TIMEOUT_DEFAULT,
};

/// Builds a [`Hapax`]. [`Builder::data_dir`] or [`Builder::database_url`] decides which database it uses; the
/// handlers must be for the same one.
#[derive(Debug)]
#[must_use = "nothing happens before `open`"]
pub struct Builder<S: Database = SqliteStore> {
    database: Option<S::Options>,
    store: Option<Arc<S>>,
    public_url: String,
    trusted_proxies: Vec<IpNet>,
    body: BodyLimits,
    drain: Duration,
    keep_events: Option<Duration>,
    sources: Vec<Source<S>>,
    sending: Option<Sending>,
}

impl<S: Database> Default for Builder<S> {
    fn default() -> Self {
        Self {
            database: None,
            store: None,
            public_url: "http://localhost".to_owned(),
            trusted_proxies: Vec::new(),
            body: BodyLimits::default(),
            drain: DRAIN_DEFAULT,
            keep_events: Some(KEEP_DEFAULT),
            sources: Vec::new(),
            sending: None,
        }
    }
}

impl Builder<SqliteStore> {
    /// The directory of the database file `hapax.db`, created if it is missing. Your tables are in the same
    /// file. The database is closed at the shutdown.
    pub fn data_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.database = Some(directory.into());
        self
    }
}

impl Builder<PgStore> {
    /// `postgres://…`: a database that any number of nodes share. Your tables are in other schemas of the
    /// same database. Its connections are closed at the shutdown.
    pub fn database_url(self, url: impl Into<String>) -> Self {
        self.database(PgOptions::new(url))
    }

    /// [`Self::database_url`] with more options, such as the number of connections or a Redis in
    /// front.
    pub fn database(mut self, options: PgOptions) -> Self {
        self.database = Some(options);
        self
    }
}

impl<S: Database> Builder<S> {
    /// A database that the app has opened, and closes itself.
    pub fn store(mut self, store: Arc<S>) -> Self {
        self.store = Some(store);
        self
    }

    /// The URL at which senders reach the app, without a path; for senders that sign it.
    pub fn public_url(mut self, url: impl Into<String>) -> Self {
        self.public_url = url.into().trim_end_matches('/').to_owned();
        self
    }

    /// The proxies whose `X-Forwarded-For` is trusted.
    pub fn trusted_proxies(mut self, nets: impl IntoIterator<Item = IpNet>) -> Self {
        self.trusted_proxies = nets.into_iter().collect();
        self
    }

    /// The limits of a body; by default 1 MiB.
    pub fn body_limits(mut self, limits: BodyLimits) -> Self {
        self.body = limits;
        self
    }

    /// How long running work may take to finish at a shutdown; by default 30 s.
    pub fn drain(mut self, drain: Duration) -> Self {
        self.drain = drain;
        self
    }

    /// How long bodies and history are kept; by default 90 days, `None` is forever.
    pub fn keep_events(mut self, keep: Option<Duration>) -> Self {
        self.keep_events = keep;
        self
    }

    /// Adds a source.
    pub fn source(mut self, source: Source<S>) -> Self {
        self.sources.push(source);
        self
    }

    /// Delivers messages to endpoints, while [`Hapax::run`] runs.
    pub fn sending(mut self, sending: Sending) -> Self {
        self.sending = Some(sending);
        self
    }

    /// Checks everything, opens the database and registers the handlers. Call it on the runtime that will
    /// serve the app. No job runs before [`Hapax::run`].
    pub async fn open(self) -> Result<Hapax<S>, BuildError> {
        let keys_kept =
            self.sources.iter().map(Source::keys_kept).collect::<Result<Vec<_>, _>>()?;
        let (store, owns_store) = match (self.store, self.database) {
            (Some(store), _) => (store, false),
            (None, Some(options)) => {
                let store = S::open(options, keys_kept.into_iter().flatten().min()).await?;
                (Arc::new(store), true)
            }
            (None, None) => return Err(BuildError::NoStore),
        };
        let mut setup = CheckedSetup {
            public_url: self.public_url,
            trusted_proxies: self.trusted_proxies,
            body: self.body,
            drain: self.drain,
            keep_events: self.keep_events,
            keep_keys: Vec::new(),
            routes: Vec::new(),
            sending: self.sending,
        };
        for source in self.sources {
            source.add_to(&store, &mut setup)?;
        }
        Hapax::assemble(store, owns_store, setup).await
    }
}

/// A sender and the handlers of its events.
#[derive(Debug)]
#[must_use = "give it to `Builder::source`"]
pub struct Source<S: Database = SqliteStore> {
    spec: SourceSpec,
    tenants: Vec<(Tenant, Vec<ActiveSecret>)>,
    rate_limit: Option<Rate>,
    unverified_limit: Option<Rate>,
    mode: AnswerMode,
    keep_keys: Option<Option<Duration>>,
    handlers: Vec<HandlerSetup<S>>,
}

impl<S: Database> Source<S> {
    /// A source at `/webhooks/{name}`, for one of the built-in senders (`hapax providers`).
    pub fn new(name: &str, provider: &str) -> Self {
        Self::of(SourceSpec::new(name, provider, Vec::new()))
    }

    /// A source from a full spec.
    pub fn of(spec: SourceSpec) -> Self {
        Self {
            spec,
            tenants: Vec::new(),
            rate_limit: None,
            unverified_limit: Some(UNVERIFIED_DEFAULT),
            mode: AnswerMode::Async,
            keep_keys: None,
            handlers: Vec::new(),
        }
    }

    /// Adds a secret. Several may be active, so that a rotation has no gap.
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.spec.secrets.push(ActiveSecret::forever(Secret::new(secret)));
        self
    }

    /// Adds a secret that expires at `until`.
    pub fn secret_until(mut self, secret: impl Into<String>, until: Timestamp) -> Self {
        let secret = Secret::new(secret);
        self.spec
            .secrets
            .push(ActiveSecret { until: Some(until), ..ActiveSecret::forever(secret) });
        self
    }

    /// Adds a secret of this tenant, whose events arrive at `/webhooks/{tenant}/{name}` and have the same
    /// handlers. Two tenants must not share a secret.
    pub fn tenant(mut self, tenant: &str, secret: impl Into<String>) -> Self {
        let (tenant, secret) = (Tenant::new(tenant), ActiveSecret::forever(Secret::new(secret)));
        match self.tenants.iter_mut().find(|(known, _)| *known == tenant) {
            Some((_, secrets)) => secrets.push(secret),
            None => self.tenants.push((tenant, vec![secret])),
        }
        self
    }

    /// The most by which a signed time may differ from now, before or after.
    pub fn tolerance(mut self, tolerance: Duration) -> Self {
        self.spec.tolerance = Some(tolerance);
        self
    }

    /// Sets a parameter that some senders need besides the secret, such as `webhook_id`.
    pub fn param(mut self, name: &str, value: &str) -> Self {
        self.spec.params.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The rate limit of verified events; by default none.
    pub fn rate_limit(mut self, limit: Rate) -> Self {
        self.rate_limit = Some(limit);
        self
    }

    /// Answers the sender when the only handler is done, or after `timeout`.
    pub fn sync(mut self, timeout: Duration) -> Self {
        self.mode = AnswerMode::Sync { timeout };
        self
    }

    /// How long a duplicate is recognised; `None` is forever. By default 90 days, and forever if the sender
    /// signs no time.
    pub fn keep_keys(mut self, keep: Option<Duration>) -> Self {
        self.keep_keys = Some(keep);
        self
    }

    /// Adds a handler, with its own jobs, retries and dead letters.
    pub fn handler(mut self, handler: HandlerSetup<S>) -> Self {
        self.handlers.push(handler);
        self
    }

    fn add_to(mut self, store: &Arc<S>, setup: &mut CheckedSetup) -> Result<(), BuildError> {
        let name = self.spec.name.clone();
        if matches!(self.mode, AnswerMode::Sync { .. }) && self.handlers.len() != 1 {
            return Err(BuildError::SyncHandlers { source_name: name.to_string() });
        }
        let handlers_given = std::mem::take(&mut self.handlers);
        let sources = self.for_each_tenant()?;
        let others = setup.routes.iter().filter(|route| *route.source.name() != name);
        let taken: HashSet<&KeyHash> =
            others.flat_map(|route| route.source.scheme().key_hashes()).collect();
        if sources.iter().flat_map(|one| one.scheme().key_hashes()).any(|key| taken.contains(key)) {
            return Err(BuildError::SharedSecret { source_name: name.to_string() });
        }
        setup.keep_keys.push((name.clone(), self.keys_kept()?));
        let mut handlers: Vec<Arc<CoreHandler>> = Vec::new();
        for given in handlers_given {
            let handler = given.build(store).map_err(|(handler, error)| {
                let source_name = name.to_string();
                BuildError::Handler { source_name, handler, error }
            })?;
            if handlers.iter().any(|known| known.name == handler.name) {
                let (source_name, handler) = (name.to_string(), handler.name);
                return Err(BuildError::HandlerTaken { source_name, handler });
            }
            handlers.push(Arc::new(handler));
        }
        setup.routes.extend(sources.into_iter().map(|source| RouteSpec {
            source,
            rate_limit: self.rate_limit,
            unverified_limit: self.unverified_limit,
            handlers: handlers.clone(),
            mode: self.mode,
        }));
        Ok(())
    }

    /// How long its keys are kept; `None` is forever.
    fn keys_kept(&self) -> Result<Option<Duration>, BuildError> {
        if let Some(kept) = self.keep_keys {
            return Ok(kept);
        }
        let signs_time = self.for_each_tenant()?.iter().all(|source| source.signs_time());
        Ok(signs_time.then_some(KEEP_DEFAULT))
    }

    /// The source of each tenant, and of the default tenant if it has secrets.
    fn for_each_tenant(&self) -> Result<Vec<Arc<hapax_core::Source>>, BuildError> {
        let source_name = || self.spec.name.to_string();
        let own = (self.spec.tenant.clone(), self.spec.secrets.clone());
        let own = Some(own).filter(|(_, secrets)| !secrets.is_empty() || self.tenants.is_empty());
        let pairs: Vec<_> = own.into_iter().chain(self.tenants.iter().cloned()).collect();
        let build = |(tenant, secrets)| {
            let spec = SourceSpec { tenant, secrets, ..self.spec.clone() };
            hapax_core::Source::build(spec)
                .map(Arc::new)
                .map_err(|error| BuildError::Source { source_name: source_name(), error })
        };
        let sources: Vec<Arc<hapax_core::Source>> =
            pairs.into_iter().map(build).collect::<Result<_, _>>()?;
        // The decoded keys are compared, because one secret can be written in several ways.
        for (at, source) in sources.iter().enumerate() {
            let is_theirs = |hash: &KeyHash| {
                sources[..at].iter().any(|other| other.scheme().key_hashes().contains(hash))
            };
            if source.scheme().key_hashes().iter().any(is_theirs) {
                return Err(BuildError::SharedSecret { source_name: source_name() });
            }
        }
        Ok(sources)
    }
}

/// A handler with its name, event types and retry schedule.
#[derive(Debug)]
#[must_use = "give it to `Source::handler`"]
pub struct HandlerSetup<S: Database = SqliteStore> {
    name: HandlerName,
    kind: Kind<S>,
    types: Vec<String>,
    retry: Vec<Duration>,
    timeout: Option<Duration>,
    transaction_timeout: Option<Duration>,
    lease: Duration,
    concurrency: usize,
    order: Option<Order>,
    refetch: Option<Refetch>,
}

/// The kind of a handler, before there is a store.
enum Kind<S> {
    Core(HandlerKind),
    Rust(Box<dyn FnOnce(Arc<S>, Duration) -> Arc<dyn RustHandler> + Send>),
}

/// A handler in Rust. Its name must not change: after a restart its jobs are found by the name.
pub fn handler<S: Database>(name: &str, handler: impl Handler<S>) -> HandlerSetup<S> {
    HandlerSetup::new(
        name,
        Kind::Rust(Box::new(|store, transaction_timeout| {
            Arc::new(HandlerAdapter { handler, store, transaction_timeout })
        })),
    )
}

impl<S: Database> HandlerSetup<S> {
    /// An SQL or HTTP handler, as in the server's config.
    pub fn of(name: &str, kind: HandlerKind) -> Self {
        Self::new(name, Kind::Core(kind))
    }

    fn new(name: &str, kind: Kind<S>) -> Self {
        Self {
            name: HandlerName::new(name),
            kind,
            types: Vec::new(),
            retry: RETRY_DEFAULT.to_vec(),
            timeout: None,
            transaction_timeout: S::TRANSACTION_TIMEOUT,
            lease: LEASE_DEFAULT,
            concurrency: CONCURRENCY_DEFAULT,
            order: None,
            refetch: None,
        }
    }

    /// The event types it handles: globs such as `payout.*`; by default all.
    pub fn types(mut self, globs: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.types = globs.into_iter().map(Into::into).collect();
        self
    }

    /// The wait before each attempt; there are as many attempts as waits.
    pub fn retry(mut self, waits: impl IntoIterator<Item = Duration>) -> Self {
        self.retry = waits.into_iter().collect();
        self
    }

    /// The timeout of one attempt; by default 10 s, and 100 ms for SQL on SQLite.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The timeout of a Rust handler's transaction. By default 100 ms on SQLite, because senders wait for the
    /// same writer, and the timeout of the attempt on PostgreSQL.
    pub fn transaction_timeout(mut self, timeout: Duration) -> Self {
        self.transaction_timeout = Some(timeout);
        self
    }

    /// How long a claim lasts; it is renewed while the handler runs. The minimum is twice the timeout.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The number of concurrent attempts.
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// Keeps order per resource. The order is decided when a job is claimed, and one job of a resource runs
    /// at a time.
    pub fn order(mut self, order: Order) -> Self {
        self.order = Some(order);
        self
    }

    /// Fetches the current object before each attempt, under the claim.
    pub fn refetch(mut self, refetch: Refetch) -> Self {
        self.refetch = Some(refetch);
        self
    }

    fn build(self, store: &Arc<S>) -> Result<CoreHandler, (HandlerName, HandlerError)> {
        let fault = |field, problem: &str, hint: &str| {
            let (problem, hint) = (problem.to_owned(), hint.to_owned());
            (self.name.clone(), HandlerError { field, problem, hint })
        };
        if self.retry.is_empty() {
            return Err(fault(
                "retry",
                "is empty, so there would be no attempt",
                "add a wait; the first may be zero",
            ));
        }
        let types = TypeFilter::new(self.types).map_err(|error| (self.name.clone(), error))?;
        let by_default = match &self.kind {
            Kind::Core(HandlerKind::Sql(_)) => S::SQL_TIMEOUT,
            Kind::Core(HandlerKind::Http(_) | HandlerKind::Pull | HandlerKind::Rust(_))
            | Kind::Rust(_) => TIMEOUT_DEFAULT,
        };
        let timeout = self.timeout.unwrap_or(by_default);
        let kind = match self.kind {
            Kind::Core(HandlerKind::Pull) => {
                let hint = "use the server: pull workers need its admin API";
                return Err(fault("pull", "is not supported inside an app", hint));
            }
            Kind::Core(kind) => kind,
            Kind::Rust(adapt) => {
                // At most the timeout of the attempt, and therefore below the lease.
                let time = self.transaction_timeout.unwrap_or(timeout).min(timeout);
                HandlerKind::Rust(adapt(Arc::clone(store), time))
            }
        };
        Ok(CoreHandler {
            name: self.name,
            kind,
            types,
            // If the lease ended while the attempt may still run, a second attempt could start.
            policy: Policy { retry: self.retry, lease: self.lease.max(timeout * 2) },
            timeout,
            concurrency: self.concurrency,
            order: self.order,
            refetch: self.refetch,
        })
    }
}

impl<S> std::fmt::Debug for Kind<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Core(kind) => kind.fmt(f),
            Self::Rust(_) => f.write_str("Rust"),
        }
    }
}

/// Why a [`Hapax`] could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No database was given.
    #[error("no database: call `data_dir`, `database_url` or `store`")]
    NoStore,
    /// The database could not be opened.
    #[error("opening the database")]
    Open(#[from] OpenError),
    /// The shared database could not be opened.
    #[error("opening the database")]
    OpenShared(#[from] PgOpenError),
    /// The handlers could not be registered in the database.
    #[error("registering the handlers in the database")]
    Store(#[from] StoreError),
    /// A source is invalid.
    #[error("source {source_name}: {}: {error} ({})", error.field, error.hint)]
    Source {
        /// Its name.
        source_name: String,
        /// The problem.
        error: SourceError,
    },
    /// A handler is invalid.
    #[error("handler {source_name}/{handler}: {}: {} ({})", error.field, error.problem, error.hint)]
    Handler {
        /// Its source.
        source_name: String,
        /// Its name.
        handler: HandlerName,
        /// The problem.
        error: HandlerError,
    },
    /// Two tenants of a source, or two sources, have the same secret, so one signature is valid for both.
    #[error("source {source_name}: another of its tenants, or another source, has the same secret")]
    SharedSecret {
        /// The source.
        source_name: String,
    },
    /// Two handlers of one source have the same name.
    #[error("two handlers of source {source_name} have the name {handler}")]
    HandlerTaken {
        /// The source.
        source_name: String,
        /// The name.
        handler: HandlerName,
    },
    /// A sync source does not have exactly one handler.
    #[error("source {source_name}: `sync` needs exactly one handler")]
    SyncHandlers {
        /// The source.
        source_name: String,
    },
    /// Two sources answer at one path.
    #[error(transparent)]
    PathTaken(#[from] PathTaken),
    /// The client for calls to apps could not be set up.
    #[error(transparent)]
    Tls(#[from] OutboundTlsError),
    /// Endpoints cannot be delivered to.
    #[error("sending: {0}")]
    Sending(#[from] SendingSetupError),
}
