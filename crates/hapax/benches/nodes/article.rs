//! What articles teach: axum, a pool of 32, verify, then one `INSERT … ON CONFLICT DO NOTHING` for
//! each request. It is as fast as it can be without leaving the pattern: prepared statements, one
//! autocommit statement, the body as bytes, and Hapax's own verification.

use std::io::Write as _;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::routing::post;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use hapax_core::{Arrival, Source, Timestamp, Verified, verify};
use tokio_postgres::NoTls;

use crate::database;
use crate::shared::floor;

const POOL: usize = 32;

const TABLE: &str = "CREATE TABLE webhook_events (
    event_id text PRIMARY KEY,
    event_type text,
    body bytea NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now()
)";

const INSERT: &str = "INSERT INTO webhook_events (event_id, event_type, body) VALUES ($1, $2, $3) \
     ON CONFLICT DO NOTHING";

struct App {
    source: Source,
    pool: Pool,
}

/// Makes the table.
pub(crate) async fn migrate(database: &str) -> anyhow::Result<()> {
    database::connect(database).await?.batch_execute(TABLE).await.context("the article's table")
}

/// Serves until killed.
pub(crate) fn run(database: &str) -> anyhow::Result<()> {
    let fast = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(database.parse()?, NoTls, fast);
    let pool = Pool::builder(manager).max_size(POOL).build()?;
    let app = Arc::new(App { source: floor::source()?, pool });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
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
        Ok(Verified::Reply(_)) | Err(_) => return Err(StatusCode::UNAUTHORIZED),
    };
    let failed = |_| StatusCode::INTERNAL_SERVER_ERROR;
    let client = app.pool.get().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let insert = client.prepare_cached(INSERT).await.map_err(failed)?;
    let mut new = 0;
    for receipt in &receipts {
        let (event_id, event_type) = (&*receipt.key().event_id, receipt.event_type());
        let body = &receipt.body()[..];
        new += client.execute(&insert, &[&event_id, &event_type, &body]).await.map_err(failed)?;
    }
    Ok(if new > 0 { r#"{"received":true}"# } else { r#"{"received":true,"duplicate":true}"# })
}
