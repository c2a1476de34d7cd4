//! Sending from an app that embeds Hapax: endpoints, messages in the app's own transactions, and the sender.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax::{
    Endpoint, Event, Failure, Hapax, NewMessage, PgStore, Published, Sending, SendingError,
    Signing, Source, Tx, VaultKey, handler_fn, tokio_postgres,
};
use serde_json::json;
use tempfile::TempDir;

use crate::support::ledger::{self, Ledger};
use crate::support::nodes::{Database, wait};
use crate::support::sender;
use crate::support::sink::Sink;
use crate::support::{Sender, until};

const SECRET: &str = "whsec_library_sending";

fn sending() -> Sending {
    Sending::new(VaultKey::from_bytes(&[7; 32])).allow("127.0.0.0/8".parse().unwrap())
}

fn message(kind: &str, id: &str) -> NewMessage {
    NewMessage::new(kind, json!({"id": id})).with_id(id)
}

/// An app whose handler charges a fee and publishes that it did, in one transaction. Its first attempt fails
/// after it has published.
async fn open(dir: &TempDir, attempts: &Arc<AtomicU32>) -> Hapax {
    let attempts = Arc::clone(attempts);
    let charge = handler_fn(move |event: Event, tx: Tx| {
        let attempts = Arc::clone(&attempts);
        async move {
            let attempt = attempts.fetch_add(1, Ordering::Relaxed);
            let id = event.event_id.to_string();
            let committed = tx
                .commit(move |db| {
                    db.execute("INSERT INTO ledger VALUES (?1, 'fee', 1)", [&id])?;
                    db.publish(&message("fee.charged", &format!("fee-{id}")))?;
                    match attempt {
                        0 => Err(Failure::new("the card was declined")),
                        _ => Ok(None),
                    }
                })
                .await;
            Ok::<_, Failure>(committed?)
        }
    });
    let charge = hapax::handler("charge", charge).retry([Duration::ZERO; 3]);
    let stripe = Source::new("stripe", "stripe").secret(SECRET).handler(charge);
    Hapax::builder().data_dir(dir.path()).source(stripe).sending(sending()).open().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_app_publishes_in_the_transaction_of_its_handler_and_its_endpoints_get_it() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::at(&dir.path().join("hapax.db"));
    ledger.execute(ledger::SCHEMA);
    let attempts = Arc::new(AtomicU32::new(0));
    let hapax = open(&dir, &attempts).await;
    let working = hapax.spawn();
    let sink = Sink::accepting();
    let endpoint = Endpoint::new(sink.url()).types(["fee.*"]).header("x-team", "billing");
    let added = hapax.add_endpoint(endpoint.uid("billing")).await.unwrap();
    let event = Sender::stripe(SECRET).request(sender::event("evt_1"));
    let (status, body) = super::sqlite::ask(hapax.router(), &event).await;
    assert_eq!(status, 200, "{body}");
    let got = tokio::task::block_in_place(|| sink.wait_for(1));
    // The attempt that failed published nothing.
    assert_eq!(attempts.load(Ordering::Relaxed), 2);
    assert_eq!((got.len(), got[0].id().as_str()), (1, "fee-evt_1"));
    assert!(
        got[0].verifies(added.secret.as_ref().unwrap()) && got[0].headers["x-team"] == "billing"
    );
    assert_eq!(ledger.effects().get("evt_1"), Some(&1));

    // A message is published on its own, and then again.
    let alone = hapax.publish(message("fee.refunded", "m1")).await.unwrap();
    assert!(matches!(alone, Published::Accepted(_)), "{alone:?}");
    let again = hapax.publish(message("fee.refunded", "m1")).await.unwrap();
    assert!(matches!(again, Published::Duplicate(_)), "{again:?}");
    let other = hapax.publish(message("fee.other", "m1")).await.unwrap();
    assert!(matches!(other, Published::Conflict { .. }), "{other:?}");
    tokio::task::block_in_place(|| sink.wait_for(2));

    // Invalid endpoints are refused, and nothing is stored.
    let refused = async |endpoint: Endpoint, part: &str| {
        let error = hapax.add_endpoint(endpoint).await.unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    };
    refused(Endpoint::new("http://10.0.0.1/"), "not public").await;
    refused(Endpoint::new(sink.url()).uid("billing"), "uid").await;
    refused(Endpoint::new(sink.url()).tenant("hapax"), "reserved").await;
    refused(Endpoint::new(sink.url()).header("host", "a"), "host").await;
    refused(Endpoint::new(sink.url()).secret("short"), "whsec_").await;
    refused(Endpoint::new(sink.url()).retry([]), "retry").await;
    let bad = hapax.publish(message("hapax.own", "m2")).await.unwrap_err();
    assert!(matches!(bad, SendingError::Invalid(_)), "{bad}");

    // After a restart the sealed secret is read again.
    working.stop().await;
    drop(hapax);
    let hapax = open(&dir, &attempts).await;
    let working = hapax.spawn();
    hapax.publish(message("fee.refunded", "m3")).await.unwrap();
    let got = tokio::task::block_in_place(|| sink.wait_for(3));
    let secret = added.secret.unwrap();
    assert!(got[2].id() == "m3" && got[2].verifies(&secret));

    // The endpoint changes to another kind of signature. For a while its deliveries carry the old signature too.
    let hour = Duration::from_secs(3_600);
    let rotated = hapax.rotate_endpoint(added.id, hour, Some(Signing::Ed25519)).await.unwrap();
    assert!(rotated.id == added.id && rotated.secret.is_none());
    hapax.publish(message("fee.refunded", "m4")).await.unwrap();
    let got = tokio::task::block_in_place(|| sink.wait_for(4));
    let key = rotated.public_key.unwrap();
    assert!(got[3].id() == "m4" && got[3].verifies(&secret) && got[3].verifies(&key));
    let rotated = hapax.rotate_endpoint(added.id, Duration::ZERO, None).await.unwrap();
    hapax.publish(message("fee.refunded", "m5")).await.unwrap();
    let got = tokio::task::block_in_place(|| sink.wait_for(5));
    assert!(got[4].verifies(&rotated.public_key.unwrap()) && !got[4].verifies(&key));
    assert!(hapax.remove_endpoint(added.id).await.unwrap());
    assert!(!hapax.remove_endpoint(added.id).await.unwrap());
    working.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn without_a_key_no_endpoint_can_be_added() {
    let dir = tempfile::tempdir().unwrap();
    let hapax = Hapax::builder().data_dir(dir.path()).open().await.unwrap();
    let refused = hapax.add_endpoint(Endpoint::new("https://example.com/in")).await.unwrap_err();
    assert!(matches!(refused, SendingError::NotConfigured), "{refused}");
    let working = hapax.spawn();
    working.stop().await;
}

#[test]
fn an_app_on_postgres_publishes_in_its_own_transaction() {
    let database = Database::empty("library_sending");
    let sink = Sink::accepting();
    let (working, added) = wait(async {
        let builder = Hapax::<PgStore>::builder().database_url(&database.url);
        let hapax = builder.sending(sending()).open().await.unwrap();
        (hapax.spawn(), hapax.add_endpoint(Endpoint::new(sink.url())).await.unwrap())
    });
    wait(async {
        let connecting = tokio_postgres::connect(&database.url, tokio_postgres::NoTls);
        let (mut client, connection) = connecting.await.unwrap();
        let connection = tokio::spawn(connection);
        let publish = "SELECT hapax.publish('invoice.paid', '{\"id\":1}'::jsonb, id => $1)";
        let rolled_back = client.transaction().await.unwrap();
        rolled_back.execute(publish, &[&"never"]).await.unwrap();
        rolled_back.rollback().await.unwrap();
        let committed = client.transaction().await.unwrap();
        committed.execute(publish, &[&"m1"]).await.unwrap();
        committed.commit().await.unwrap();
        connection.abort();
    });
    let got = sink.wait_for(1);
    assert_eq!((got.len(), got[0].id().as_str()), (1, "m1"));
    assert!(got[0].verifies(added.secret.as_ref().unwrap()));
    until("it is delivered", || {
        let delivered = "SELECT count(*) FROM hapax.deliveries WHERE status = 'delivered'";
        (database.number(delivered) == 1).then_some(())
    });
    wait(working.stop());
}
