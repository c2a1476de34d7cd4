//! Charges a fee of 0.5 % for every payout that was paid: an axum app with Hapax inside.
//!
//! The fee, "done" and the message about it are one commit. So the fee is charged once, however often
//! the webhook comes and whenever the process dies. The table needs no unique constraint.
//!
//! - `LISTEN`: the address of the app, 127.0.0.1:3000 unless set
//! - `DATA_DIR`: the directory of the database, hapax-data unless set
//! - `STRIPE_SECRET`: the endpoint's secret, whsec_example unless set

#![allow(clippy::print_stdout, reason = "the app prints its address")]

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use hapax::{
    Committed, Event, Failure, Handler, Hapax, MessageData, NewMessage, Source, Tx, handler,
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

impl Handler for ChargeFee {
    async fn handle(&self, event: Event, tx: Tx) -> Result<Committed, Failure> {
        let notice: Notice = event.json()?;
        let Payout { id, amount } = notice.data.object;
        // Minor units; half a unit is rounded up. Slow work belongs here, before the transaction.
        let fee = (amount * 5 + 500) / 1000;
        let committed = tx.commit(move |db| {
            db.execute("INSERT INTO payout_fees VALUES (?1, ?2, ?3)", (&id, amount, fee))?;
            let data: MessageData = format!(r#"{{"payout":"{id}","fee":{fee}}}"#).parse()?;
            db.publish(&NewMessage::new("fee.charged", data).with_key(id))?;
            Ok(Some(format!("fee {fee}")))
        });
        Ok(committed.await?)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let set = |name: &str, otherwise: &str| std::env::var(name).unwrap_or(otherwise.to_owned());
    let mut terminate = signal(SignalKind::terminate())?;
    let data_dir = set("DATA_DIR", "hapax-data");
    make_table(&data_dir)?;

    let stripe = Source::new("stripe", "stripe")
        .secret(set("STRIPE_SECRET", "whsec_example"))
        .handler(handler("charge-fee", ChargeFee).types(["payout.paid"]));
    let hapax = Hapax::builder().data_dir(data_dir).source(stripe).open().await?;

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

/// Creates the app's table, in the same file as Hapax's.
fn make_table(data_dir: &str) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(data_dir)?;
    let database = hapax::rusqlite::Connection::open(format!("{data_dir}/hapax.db"))?;
    database.execute_batch(
        "CREATE TABLE IF NOT EXISTS payout_fees (payout_id TEXT, amount INTEGER, fee INTEGER)",
    )?;
    Ok(())
}
