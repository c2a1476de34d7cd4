//! Charges a fee of 0.5 % for every payout that was paid: an axum app with Hapax inside, on a PostgreSQL
//! that any number of such apps may share.
//!
//! The fee, "done" and the message about it are one commit. So the fee is charged once, however often
//! the webhook comes, whichever app gets it, and whenever an app dies. The table needs no unique
//! constraint.
//!
//! - `DATABASE_URL`: the database, postgres://localhost/postgres unless set
//! - `LISTEN`: the address of the app, 127.0.0.1:3000 unless set
//! - `STRIPE_SECRET`: the endpoint's secret, whsec_example unless set

#![allow(clippy::print_stdout, reason = "the app prints its address")]

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use hapax::tokio_postgres::{self, NoTls};
use hapax::{
    Committed, Event, Failure, Handler, Hapax, MessageData, NewMessage, PgStore, PgTx, Source,
    handler,
};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

struct ChargeFee;

/// The part of Stripe's event that matters here.
#[derive(Deserialize)]
struct Notice {
    data: NoticeData,
}

#[derive(Deserialize)]
struct NoticeData {
    object: Payout,
}

#[derive(Deserialize)]
struct Payout {
    id: String,
    amount: i64,
}

impl Handler<PgStore> for ChargeFee {
    async fn handle(&self, event: Event, tx: PgTx) -> Result<Committed, Failure> {
        let notice: Notice = event.json()?;
        let Payout { id, amount } = notice.data.object;
        // Minor units; half a unit is rounded up. Slow work belongs here, before the transaction.
        let fee = (amount * 5 + 500) / 1000;
        let mut db = tx.begin().await?;
        db.execute("INSERT INTO payout_fees VALUES ($1, $2, $3)", &[&id, &amount, &fee]).await?;
        let data: MessageData = format!(r#"{{"payout":"{id}","fee":{fee}}}"#).parse()?;
        db.publish(&NewMessage::new("fee.charged", data).with_key(id)).await?;
        Ok(db.commit(Some(format!("fee {fee}"))).await?)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let set = |name: &str, otherwise: &str| std::env::var(name).unwrap_or(otherwise.to_owned());
    let mut terminate = signal(SignalKind::terminate())?;
    let url = set("DATABASE_URL", "postgres://localhost/postgres");
    make_table(&url).await?;

    // Short, so that another app soon takes over the jobs of one that died.
    let charge_fee = handler("charge-fee", ChargeFee)
        .types(["payout.paid"])
        .timeout(Duration::from_secs(1))
        .lease(Duration::from_secs(2));
    let stripe = Source::new("stripe", "stripe")
        .secret(set("STRIPE_SECRET", "whsec_example"))
        .handler(charge_fee);
    let hapax = Hapax::builder().database_url(url).source(stripe).open().await?;

    let app = Router::new().route("/", get(async || "pay out\n")).merge(hapax.router());
    let listener = TcpListener::bind(set("LISTEN", "127.0.0.1:3000")).await?;
    println!("app ready: http://{}", listener.local_addr()?);

    // The server stops before the workers, so that every accepted event still has a worker.
    let working = hapax.spawn();
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())
        .with_graceful_shutdown(async move {
            terminate.recv().await;
        })
        .await?;
    working.stop().await;
    Ok(())
}

/// Creates the app's table, in the same database as Hapax's. Several apps may start at once: the lock
/// lets one of them create it.
async fn make_table(url: &str) -> Result<(), Box<dyn Error>> {
    let (database, connection) = tokio_postgres::connect(url, NoTls).await?;
    let connected = tokio::spawn(connection);
    database
        .batch_execute(
            "SELECT pg_advisory_xact_lock(50);
             CREATE TABLE IF NOT EXISTS payout_fees (payout_id text, amount bigint, fee bigint)",
        )
        .await?;
    drop(database);
    Ok(connected.await??)
}
