//! Assembles the server and runs it. Only this module connects engine and store.
//!
//! [`serve_on`] is the table of contents: [`listeners`] are bound, [`parts`] are built [`from_config`], tasks in the
//! [`background`] start, then the [`public_side`] and the [`operator_side`]. [`ready`] prints the addresses, and
//! [`reload`] applies changes until a signal ends the server.

mod background;
mod from_config;
mod listeners;
mod operator_side;
mod parts;
mod public_side;
mod ready;
mod reload;

use std::sync::Arc;

use anyhow::Context as _;
use hapax::Database;
use hapax_engine::Readiness;
use hapax_store::{PgStore, SqliteStore};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::background::Background;
use self::listeners::{ListenerTls, Listeners};
use self::operator_side::OperatorSide;
use self::parts::Parts;
use self::public_side::PublicSide;
use self::ready::ReadyLines;
use self::reload::{Reloadable, Signals};
use crate::admin::AdminStore;
use crate::config::{Config, InvalidSetting};
use crate::telemetry;

/// Runs the server until a signal stops it. Accepted requests are then committed and answered.
pub(crate) fn run(config: Config) -> anyhow::Result<()> {
    let metrics = telemetry::start()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("hapax")
        .build()
        .context("starting the runtime")?;
    runtime.block_on(serve(config, metrics))
}

async fn serve(config: Config, metrics: PrometheusHandle) -> anyhow::Result<()> {
    // Signals are registered first: a signal during the start must not kill the process while the
    // store opens.
    let signals = Signals::new()?;
    match &config.settings.database_url {
        None => {
            let options = from_config::sqlite_options(&config);
            let open = move || SqliteStore::open(options);
            let store = tokio::task::spawn_blocking(open).await.context("opening the store")??;
            serve_on(Arc::new(store), config, metrics, signals).await
        }
        Some(url) => {
            let opening = PgStore::open(from_config::postgres_options(&config, url));
            let store = opening.await.with_context(|| format!("opening {url}"))?;
            serve_on(Arc::new(store), config, metrics, signals).await
        }
    }
}

/// The stores that a server runs on.
trait ServerStore: Database + AdminStore {}

impl<S: Database + AdminStore> ServerStore for S {}

/// Runs the server on its store, from the first listener to the last commit. Parts for other roles are built
/// but not started: the admin side of one node answers for handlers that another node runs.
async fn serve_on<S: ServerStore>(
    store: Arc<S>,
    mut config: Config,
    metrics: PrometheusHandle,
    mut signals: Signals,
) -> anyhow::Result<()> {
    config.take_own_token().map_err(|InvalidSetting { problem, hint }| {
        anyhow::anyhow!("{problem}; {hint}, or add [tokens.ops] to the config")
    })?;
    let listeners = Listeners::bind(&config)?;
    let tls = ListenerTls::new(&config)?;
    let lines = ReadyLines::new(&config, &listeners, &tls);
    let parts = Parts::new(Arc::clone(&store), &config, &listeners.at).await?;
    let (stop, stop_background) = (CancellationToken::new(), CancellationToken::new());
    let readiness = Arc::new(Readiness::new(stop.clone()));
    let unfinished = TaskTracker::new();
    let operator_side = {
        let (readiness, unfinished) = (Arc::clone(&readiness), unfinished.clone());
        OperatorSide::new(
            &parts,
            &config,
            &listeners.at,
            &tls,
            metrics.clone(),
            readiness,
            unfinished,
        )
    };
    let limits = listeners::http_limits(&config);

    parts.announce_handlers().await;
    let mut background = Background::start(&parts, &config.settings, &stop_background);
    let public_side =
        PublicSide::start(&parts, listeners.public, listeners.proxies, tls.public, &limits, &stop);
    operator_side.start(
        (listeners.admin, tls.admin),
        (listeners.portal, tls.portal),
        &limits,
        &stop_background,
        &mut background,
    );
    readiness.opened();
    lines.print(&config);

    let (watch, drain) = (Arc::clone(&parts.watch), config.settings.drain);
    Reloadable::new(config, parts).run(&mut signals, &metrics).await;

    tracing::info!("shutting down: accepted requests are committed and answered first");
    stop.cancel();
    public_side.drained().await?;
    // Workers and admin side stop last: sync senders wait for workers, and pull workers complete their jobs
    // through the admin side.
    stop_background.cancel();
    background.ended().await?;
    unfinished.close();
    // Everything else that an action waits for has a bound below `drain`; a slow ping has none.
    if tokio::time::timeout(drain, unfinished.wait()).await.is_err() {
        tracing::warn!("the server stops although an operator's action has not ended");
    }
    watch.check_out(&*store).await;
    store.close().await;
    tracing::info!("stopped");
    Ok(())
}
