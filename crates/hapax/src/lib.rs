//! Hapax as a library: turns at-least-once webhooks into exactly-once effects inside your own app.
//!
//! The app mounts [`Hapax::router`] in its axum router, runs [`Hapax::run`] alongside it, and implements
//! its handlers in Rust. A handler gets the [`Event`] and a [`Tx`]: the right to one short transaction,
//! which also records "done". The handler computes first and commits last:
//!
//! ```no_run
//! use hapax::{Committed, Event, Failure, Handler, Hapax, Source, Tx, handler};
//!
//! struct ChargeFee;
//!
//! impl Handler for ChargeFee {
//!     async fn handle(&self, event: Event, tx: Tx) -> Result<Committed, Failure> {
//!         let payout: serde_json::Value = event.json()?;
//!         let amount = payout["data"]["object"]["amount"].as_i64();
//!         let fee = amount.ok_or(Failure::give_up("a payout without an amount"))? / 200;
//!         let committed = tx.commit(move |db| {
//!             db.execute("INSERT INTO fees VALUES (?1, ?2)", (&*event.event_id, fee))?;
//!             Ok(Some(format!("charged {fee}")))
//!         });
//!         Ok(committed.await?)
//!     }
//! }
//!
//! # async fn app() -> Result<(), Box<dyn std::error::Error>> {
//! let stripe = Source::new("stripe", "stripe")
//!     .secret(std::env::var("STRIPE_SECRET")?)
//!     .handler(handler("charge-fee", ChargeFee).types(["payout.*"]));
//! let hapax = Hapax::builder().data_dir("hapax-data").source(stripe).open().await?;
//! let app: axum::Router = axum::Router::new().merge(hapax.router()); // POST /webhooks/stripe
//! let working = hapax.spawn();
//! // … serve `app`, and at shutdown:
//! working.stop().await;
//! # drop(app);
//! # Ok(())
//! # }
//! ```
//!
//! On PostgreSQL, which several nodes can share, use `database_url` instead of `data_dir`. The handler then
//! awaits statements on an open transaction:
//!
//! ```no_run
//! use hapax::{Committed, Event, Failure, Handler, Hapax, PgStore, PgTx, Source, handler};
//!
//! struct ChargeFee;
//!
//! impl Handler<PgStore> for ChargeFee {
//!     async fn handle(&self, event: Event, tx: PgTx) -> Result<Committed, Failure> {
//!         let mut db = tx.begin().await?;
//!         db.execute("INSERT INTO fees VALUES ($1, 50)", &[&&*event.event_id]).await?;
//!         Ok(db.commit(Some("charged 50".to_owned())).await?)
//!     }
//! }
//!
//! # async fn app() -> Result<(), Box<dyn std::error::Error>> {
//! let stripe = Source::new("stripe", "stripe")
//!     .secret(std::env::var("STRIPE_SECRET")?)
//!     .handler(handler("charge-fee", ChargeFee));
//! let url = std::env::var("DATABASE_URL")?;
//! let hapax = Hapax::builder().database_url(url).source(stripe).open().await?;
//! # drop(hapax);
//! # Ok(())
//! # }
//! ```
//!
//! The library installs nothing global: no logger, no metrics recorder, no crypto provider. Several instances
//! can run in one process, each with its own data directory. Logs and metrics go to `tracing` and `metrics`.

pub mod limits;

mod library;

pub use hapax_core::endpoint::{EndpointId, OnDead};
pub use hapax_core::endpoint_secret::Signing;
pub use hapax_core::handler::{
    Dialect, HandlerKind, HttpTarget, Order, Refetch, SignAs, SqlProgram,
};
pub use hapax_core::job::{HandlerName, Retry};
pub use hapax_core::ledger::{Ledger, Reserved, StoredAnswer};
pub use hapax_core::message::{MessageData, NewMessage};
pub use hapax_core::order::{Gaps, Machine, OnGap, OrderPolicy, OrderRule};
pub use hapax_core::source::{LatePolicy, ReplayGuard, SourceSpec};
pub use hapax_core::store::{
    EventId, Inspect, InspectOutbox, Operate, Outbox, Published, PublishedMessage, Work,
};
pub use hapax_core::vault::VaultKey;
pub use hapax_core::{SourceName, Tenant, Timestamp};
pub use hapax_engine::{BodyLimits, EgressProxy, Rate, SenderLimits};
pub use hapax_store::{
    Answering, Committed, Db, DbError, Failure, JobRight, KeyRight, PgDb, PgDbError, PgOptions,
    PgStore, PgTx, PoolSizes, RedisLedger, RedisLedgerError, SqliteOptions, SqliteStore, Transact,
    Tx, TxError,
};
/// The SQLite binding that [`Db`] uses.
pub use rusqlite;
/// The PostgreSQL client that [`PgDb`] uses.
pub use tokio_postgres;

pub use library::{
    AddedEndpoint, BuildError, Builder, Database, Endpoint, Event, Handler, HandlerFn,
    HandlerSetup, Hapax, Running, Sending, SendingError, SendingSetupError, Source, handler,
    handler_fn,
};
