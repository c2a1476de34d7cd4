//! The network that fails on demand, in front of a real engine if the moment of the failure matters, and
//! otherwise in front of an echo server.

use std::time::{Duration, Instant};

use hapax_sim::{Postgres, READY_FOR_QUERY, TcpProxy, TrafficMode, Trap};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[tokio::test]
async fn a_lost_answer_is_lost_after_the_commit_and_a_lost_request_before_it() {
    // Both resets look the same to the client; only the database shows the difference.
    let server = Postgres::shared().await;
    let url = server.create_database("cut").await;
    Postgres::execute_at(&url, "CREATE TABLE fees (id text)").await;
    let proxy = TcpProxy::to_port(server.port()).await;
    let insert = async |id: &str| {
        let (client, connection) =
            tokio_postgres::connect(&proxy.through(&url), tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        client.execute("INSERT INTO fees VALUES ($1)", &[&id]).await
    };

    insert("evt_whole").await.expect("nothing is in the way yet");
    let trap = Trap::Answer { request: b"evt_lost".to_vec(), answer: READY_FOR_QUERY.to_vec() };
    proxy.arm(trap);
    insert("evt_other").await.expect("the trap is not for this one");
    insert("evt_lost").await.expect_err("its answer is lost");
    proxy.arm(Trap::Request(b"evt_never".to_vec()));
    insert("evt_never").await.expect_err("it never arrives");
    assert_eq!(proxy.sprung(), 2);

    let there = Postgres::execute_at(&url, "SELECT id FROM fees ORDER BY id").await;
    let there: Vec<_> = there.into_iter().flatten().collect();
    assert_eq!(there, ["evt_lost", "evt_other", "evt_whole"]);
}

#[tokio::test]
async fn a_moment_is_recognised_across_pieces() {
    // The bytes that identify the moment arrive one by one.
    let proxy = TcpProxy::to_port(echo().await).await;
    let mut client = connect(&proxy).await;
    proxy.arm(Trap::Request(b"COMMIT".to_vec()));
    for byte in b"xCOMMI" {
        client.write_all(&[*byte]).await.expect("sent");
        assert_eq!(client.read_u8().await.expect("echoed"), *byte);
    }
    client.write_all(b"T").await.expect("sent");
    client.read_u8().await.expect_err("cut before the last byte arrived");
    assert_eq!(proxy.sprung(), 1);
}

#[tokio::test]
async fn an_answer_ends_after_exactly_so_many_bytes() {
    // Bytes that passed before the trap was set must not count.
    let proxy = TcpProxy::to_port(echo().await).await;
    let mut client = connect(&proxy).await;
    client.write_all(b"before").await.expect("sent");
    let mut before = [0; 6];
    client.read_exact(&mut before).await.expect("echoed");
    proxy.arm(Trap::AfterBytes(4));
    client.write_all(b"0123456789").await.expect("sent");
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.expect("an orderly end");
    assert_eq!(rest, b"0123");
    proxy.wait_sprung(1).await;
}

#[tokio::test]
async fn held_bytes_arrive_when_traffic_flows_again() {
    // A partition must lose nothing when it ends, and let nothing pass while it lasts.
    let proxy = TcpProxy::to_port(echo().await).await;
    let mut client = connect(&proxy).await;
    proxy.set(TrafficMode::Hold);
    client.write_all(b"?").await.expect("sent");
    let waited = tokio::time::timeout(Duration::from_millis(200), client.read_u8()).await;
    assert!(waited.is_err(), "something came through");
    proxy.set(TrafficMode::Forward);
    assert_eq!(client.read_u8().await.expect("echoed"), b'?');
}

#[tokio::test]
async fn a_delay_holds_back_each_direction_and_does_not_add_up() {
    // Twenty pieces are sent in a row. The delay must be added once, not twenty times.
    let proxy = TcpProxy::to_port(echo().await).await;
    let mut client = connect(&proxy).await;
    const DELAY: Duration = Duration::from_millis(500);
    proxy.set(TrafficMode::Delay(DELAY));
    let begun = Instant::now();
    for _ in 0..20 {
        client.write_all(b"piece").await.expect("sent");
        client.flush().await.expect("sent");
        tokio::task::yield_now().await;
    }
    let mut all = [0; 100];
    client.read_exact(&mut all).await.expect("echoed");
    assert!(begun.elapsed() >= DELAY * 2, "too early: {:?}", begun.elapsed());
    assert!(begun.elapsed() < DELAY * 20, "it adds up: {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_cut_reaches_every_connection_and_refusal_every_new_one() {
    // Two connections are open at the cut. A third connection is opened while new ones are refused.
    let proxy = TcpProxy::to_port(echo().await).await;
    let (mut one, mut other) = (connect(&proxy).await, connect(&proxy).await);
    proxy.set(TrafficMode::Refuse);
    assert_eq!(proxy.cut(), 2);
    one.read_u8().await.expect_err("cut");
    other.read_u8().await.expect_err("cut");
    let refused = async {
        let mut late = TcpStream::connect(("127.0.0.1", proxy.port())).await?;
        late.read_u8().await
    };
    refused.await.expect_err("refused");
    proxy.set(TrafficMode::Forward);
    connect(&proxy).await;
}

/// Opens a connection, and checks that it reaches the server.
async fn connect(proxy: &TcpProxy) -> TcpStream {
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await.expect("connects");
    client.write_all(b"!").await.expect("sent");
    assert_eq!(client.read_u8().await.expect("echoed"), b'!');
    client
}

/// An echo server. Returns its port.
async fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = client.split();
                tokio::io::copy(&mut from, &mut to).await
            });
        }
    });
    port
}
