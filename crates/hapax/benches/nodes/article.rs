//! The pattern of articles: axum, a pool of 32, verification, then one `INSERT … ON CONFLICT DO
//! NOTHING` for each request. One variant uses sqlx, as articles do. The other variant uses the
//! driver of Hapax and is as fast as the pattern allows. Both use prepared statements, one
//! autocommit statement, the body as bytes, and Hapax's own verification.

use std::io::Write as _;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::routing::post;
use clap::ValueEnum;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use hapax_core::{Arrival, Source, Timestamp, Verified, verify};
use sqlx::postgres::PgPoolOptions;
use tokio_postgres::NoTls;

use crate::database;
use crate::shared::floor;

const POOL: u32 = 32;

const TABLE: &str = "CREATE TABLE webhook_events (
    event_id text PRIMARY KEY,
    event_type text,
    body bytea NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now()
)";

const INSERT: &str = "INSERT INTO webhook_events (event_id, event_type, body) VALUES ($1, $2, $3) \
     ON CONFLICT DO NOTHING";

/// The driver of the article's pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Driver {
    /// As articles write it
    Sqlx,
    /// tokio-postgres with deadpool
    Lean,
}

struct App {
    source: Source,
    pool: Connections,
}

enum Connections {
    Sqlx(sqlx::PgPool),
    Lean(Pool),
}

impl Connections {
    async fn open(driver: Driver, database: &str) -> anyhow::Result<Self> {
        Ok(match driver {
            Driver::Sqlx => {
                let options = PgPoolOptions::new().max_connections(POOL);
                Self::Sqlx(options.connect(database).await.context("connecting")?)
            }
            Driver::Lean => {
                let fast = ManagerConfig { recycling_method: RecyclingMethod::Fast };
                let manager = Manager::from_config(database.parse()?, NoTls, fast);
                Self::Lean(Pool::builder(manager).max_size(POOL as usize).build()?)
            }
        })
    }

    /// The number of rows inserted: 0 if the event was known.
    async fn insert(
        &self,
        event_id: &str,
        event_type: Option<&str>,
        body: &[u8],
    ) -> anyhow::Result<u64> {
        Ok(match self {
            Self::Sqlx(pool) => {
                let insert = sqlx::query(INSERT).bind(event_id).bind(event_type).bind(body);
                insert.execute(pool).await?.rows_affected()
            }
            Self::Lean(pool) => {
                let client = pool.get().await?;
                let insert = client.prepare_cached(INSERT).await?;
                client.execute(&insert, &[&event_id, &event_type, &body]).await?
            }
        })
    }
}

/// Creates the table.
pub(crate) async fn migrate(database: &str) -> anyhow::Result<()> {
    database::connect(database).await?.batch_execute(TABLE).await.context("the article's table")
}

/// Serves until killed.
pub(crate) fn run(driver: Driver, database: &str) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let pool = Connections::open(driver, database).await?;
        let app = Arc::new(App { source: floor::source()?, pool });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.context("listening")?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "article ready: ingress http://{}", listener.local_addr()?)?;
        drop(out);
        let router = Router::new().route("/webhooks/stripe", post(receive)).with_state(app);
        axum::serve(listener, router).await.context("serving")
    })
}

async fn receive(
    State(app): State<Arc<App>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Result<&'static str, StatusCode> {
    let arrival = Arrival { method, url: uri.to_string(), headers, body };
    let receipts = match verify(&app.source, &arrival, Timestamp::now()) {
        Ok(Verified::Events { receipts, .. }) => receipts,
        Ok(Verified::Reply(_) | Verified::Empty) | Err(_) => return Err(StatusCode::UNAUTHORIZED),
    };
    let mut new = 0;
    for receipt in &receipts {
        let (event_id, event_type) = (&*receipt.key().event_id, receipt.event_type());
        let inserted = app.pool.insert(event_id, event_type, receipt.body()).await;
        new += inserted.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    }
    Ok(if new > 0 { r#"{"received":true}"# } else { r#"{"received":true,"duplicate":true}"# })
}
