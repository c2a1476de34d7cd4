//! Answers of endpoints, including hostile answers, which must do little harm.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_engine::{
    EndpointClient, EndpointUrl, LookupFuture, Resolve, SendError, SendErrorClass, WebhookDelivery,
};
use http::HeaderMap;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::interval;

use super::{NO_CONTENT, Names, Sink, client, loopback_allowed, post, read_request};
use crate::support::within;

fn open_client() -> EndpointClient {
    client(loopback_allowed(), &Names::new())
}

/// A deadline that passes while the test waits.
const SHORT: Duration = Duration::from_millis(300);

async fn post_within(client: &EndpointClient, url: &str, deadline: Duration) -> SendError {
    let url = EndpointUrl::from_stored(url).unwrap();
    let body = Bytes::from_static(b"{}");
    within(client.post(&url, HeaderMap::new(), body, deadline)).await.unwrap_err()
}

/// The plain case: the delivery arrives unchanged, and the connection is used again.
#[tokio::test]
async fn a_delivery_arrives_once_and_as_given() {
    let mut sink = Sink::answering(NO_CONTENT).await;
    let client = client(loopback_allowed(), &Names::one("sink.example", &["127.0.0.1"]));
    let url = format!("http://sink.example:{}/in/%41?x=|&y=%20", sink.port());
    let url = EndpointUrl::parse(&url, client.rules()).unwrap();
    let mut headers = HeaderMap::new();
    headers.insert("webhook-id", "msg_1".parse().unwrap());
    headers.insert("host", "evil.example".parse().unwrap());
    headers.insert("content-length", "3".parse().unwrap());
    let body = Bytes::from_static(b"{\"n\":1}");
    let sent = client.post(&url, headers, body, Duration::from_secs(60));
    assert_eq!(within(sent).await.unwrap().status, 204);
    let requests = sink.requests();
    assert_eq!(requests.len(), 1);
    let (head, body) = requests[0].split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /in/%41?x=|&y=%20 HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nhost: sink.example:{}", sink.port())), "{head}");
    assert!(head.contains("\r\nwebhook-id: msg_1"), "{head}");
    assert!(head.contains("\r\ncontent-length: 7"), "{head}");
    assert!(head.contains("\r\nuser-agent: hapax/"), "{head}");
    assert!(!head.contains("evil") && !head.contains("accept-encoding"), "{head}");
    assert_eq!(body, "{\"n\":1}");
}

/// A burst to one host, ten times: a small pool would open a connection for nearly every delivery.
#[tokio::test]
async fn connections_to_one_host_are_used_again() {
    let sink = Sink::answering(NO_CONTENT).await;
    let client = open_client();
    for _ in 0..10 {
        let mut burst = JoinSet::new();
        for _ in 0..32 {
            let (client, url) = (client.clone(), sink.url());
            burst.spawn(async move { post(&client, &url).await.unwrap().status });
        }
        assert!(burst.join_all().await.iter().all(|status| *status == 204));
    }
    assert!(sink.connections() < 160, "{} connections for 320 deliveries", sink.connections());
}

/// The server reads the request and closes the connection. If the client sent the request again,
/// the server would see a second one.
#[tokio::test]
async fn a_request_that_may_have_arrived_is_never_sent_again() {
    let mut sink = Sink::closing("").await;
    let client = open_client();
    let error = post(&client, &sink.url()).await.unwrap_err();
    assert_eq!(error.class, SendErrorClass::Broken, "{error}");
    assert!(error.may_have_arrived);
    assert_eq!((sink.requests().len(), sink.connections()), (1, 1));
}

/// A server that closes each connection after one answer without announcing it. Some requests are sent on
/// closing connections. Each request arrives at most once, and a request that is reported as unsent
/// never arrives.
#[tokio::test]
async fn a_connection_that_closes_unannounced_costs_no_second_request() {
    let mut sink = Sink::closing(NO_CONTENT).await;
    let client = open_client();
    let (mut answered, mut maybe) = (0, 0);
    for _ in 0..300 {
        match post(&client, &sink.url()).await {
            Ok(_) => answered += 1,
            Err(error) if error.may_have_arrived => maybe += 1,
            Err(error) => assert_eq!(error.class, SendErrorClass::Unsent, "{error}"),
        }
    }
    let arrived = sink.requests().len();
    assert!(answered > 0);
    assert!((answered..=answered + maybe).contains(&arrived), "{answered} {maybe} {arrived}");
}

/// Writes `again` after `first` for as long as the client reads. When the connection ends, sends the
/// number of bytes that were written.
async fn flood(
    first: &'static str,
    again: &'static [u8],
) -> (SocketAddr, oneshot::Receiver<usize>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let at = listener.local_addr().unwrap();
    let (ended, written) = oneshot::channel();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await.unwrap();
        let _ = stream.write_all(first.as_bytes()).await;
        let many = again.repeat(16 * 1024 / again.len());
        let mut count = 0;
        while stream.write_all(&many).await.is_ok() {
            count += many.len();
        }
        let _ = ended.send(count);
    });
    (at, written)
}

/// Far above the bytes that the client reads, and about as many as the buffers of two sockets hold.
const FLOOD_BYTES_MAX: usize = 64 << 20;

/// A body without an end is cut: the status counts, and the connection is closed.
#[tokio::test]
async fn an_endless_body_is_read_to_a_bound() {
    let letters = b"abcdefghijklmnop";
    for head in
        ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"]
    {
        let (at, written) = flood(head, letters).await;
        let answered = post(&open_client(), &format!("http://{at}/")).await.unwrap();
        assert_eq!(answered.status, 200);
        assert_eq!((answered.body_start.len(), answered.truncated), (1_024, true));
        assert!(answered.body_start.starts_with(letters));
        assert!(within(written).await.unwrap() < FLOOD_BYTES_MAX);
    }
}

/// Endless heads of each kind: one header, many headers, many informational answers.
#[tokio::test]
async fn an_endless_head_is_a_broken_answer() {
    let floods: [(&str, &[u8]); 4] = [
        ("HTTP/1.1 200 OK\r\nx-long: ", b"aaaaaaaa"),
        ("HTTP/1.1 200 OK\r\n", b"x-many: a\r\n"),
        ("", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"),
        ("", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ];
    for (first, again) in floods {
        let (at, written) = flood(first, again).await;
        let error = post(&open_client(), &format!("http://{at}/")).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Broken, "{first:?}: {error}");
        assert!(error.may_have_arrived);
        assert!(within(written).await.unwrap() < FLOOD_BYTES_MAX);
    }
}

fn body_of(length: usize) -> String {
    format!("HTTP/1.1 500 Oops\r\ncontent-length: {length}\r\n\r\n{}", "x".repeat(length))
}

/// Bodies with lengths at the bounds. Each is sent twice, so that a connection is used again if
/// possible.
#[tokio::test]
async fn the_first_kibibyte_of_an_answer_is_kept() {
    for (length, kept, truncated) in
        [(0, 0, false), (1_024, 1_024, false), (1_025, 1_024, true), (200_000, 1_024, true)]
    {
        let sink = Sink::answering(body_of(length)).await;
        let client = open_client();
        for _ in 0..2 {
            let answered = post(&client, &sink.url()).await.unwrap();
            assert_eq!(answered.status, 500);
            assert_eq!(
                (answered.body_start.len(), answered.truncated),
                (kept, truncated),
                "{length}"
            );
        }
    }
}

/// A compressed body could be a bomb, and Hapax does not need its content.
#[tokio::test]
async fn a_packed_answer_is_not_unpacked() {
    let packed = b"\x1f\x8b\x08\0\0\0\0\0\0\x03";
    let mut answer =
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 10\r\n\r\n".to_vec();
    answer.extend_from_slice(packed);
    let sink = Sink::answering(answer).await;
    let answered = post(&open_client(), &sink.url()).await.unwrap();
    assert_eq!(answered.body_start.as_ref(), packed);
}

/// Answers with headers that are not text: a client that reads them as text fails the delivery.
#[tokio::test]
async fn odd_headers_of_an_answer_break_nothing() {
    for odd in [
        &b"x-name: caf\xc3\xa9"[..],
        b"x-name: \xff\xfe",
        b"x-n\xc3\xa4me: v",
        b"x name: v",
        b"retry-after: \xc3\xa9",
        b"webhook-delivery: \xff",
        b"webhook-delivery: something-new",
        b"content-type: \xc3\xa9",
        b"set-cookie: a=\xe9",
    ] {
        let answer = [b"HTTP/1.1 200 OK\r\n", odd, b"\r\ncontent-length: 2\r\n\r\nok"].concat();
        let sink = Sink::answering(answer).await;
        let answered = post(&open_client(), &sink.url()).await;
        let answered = answered.unwrap_or_else(|error| panic!("{odd:?}: {error}"));
        assert_eq!((answered.status.as_u16(), answered.body_start.as_ref()), (200, &b"ok"[..]));
        assert_eq!(answered.retry_after(Timestamp::UNIX_EPOCH), None);
        assert_eq!(answered.webhook_delivery, None);
    }
}

/// The headers with which a receiver controls its deliveries.
#[tokio::test]
async fn an_answer_can_ask_for_time_and_for_an_end() {
    for (header, wait, asks) in [
        ("retry-after: 7", Some(7), None),
        ("retry-after: 1e300", None, None),
        ("retry-after: inf", None, None),
        ("retry-after: 999999999999999999999999", Some(86_400), None),
        ("retry-after: Thu, 01 Jan 1970 00:00:10 GMT", Some(10), None),
        ("webhook-delivery: disable", None, Some(WebhookDelivery::Disable)),
        ("Webhook-Delivery:  Abort-Message ", None, Some(WebhookDelivery::AbortMessage)),
    ] {
        let sink =
            Sink::answering(format!("HTTP/1.1 503 Busy\r\n{header}\r\ncontent-length: 0\r\n\r\n"))
                .await;
        let answered = post(&open_client(), &sink.url()).await.unwrap();
        let expected = wait.map(Duration::from_secs);
        assert_eq!(answered.retry_after(Timestamp::UNIX_EPOCH), expected, "{header}");
        assert_eq!(answered.webhook_delivery, asks, "{header}");
    }
}

/// Answers that end early or are not HTTP.
#[tokio::test]
async fn half_an_answer_is_a_broken_one() {
    for (answer, text) in [
        ("", "closed before the answer ended"),
        ("HTTP/1.1 200 OK\r\ncontent-le", "closed before the answer ended"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", "closed before the answer ended"),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
            "closed before the answer ended",
        ),
        ("SSH-2.0-OpenSSH_9.2\r\n", "the answer is not HTTP/1.1"),
        ("\u{15}\u{3}\u{1}\0\u{2}\u{2}", "the answer is not HTTP/1.1"),
    ] {
        let sink = Sink::closing(answer).await;
        let error = post(&open_client(), &sink.url()).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Broken, "{answer:?}: {error}");
        assert!(error.text.contains(text), "{answer:?}: {error}");
    }
}

/// A server that sends one byte now and then: a deadline for each read would never pass.
#[tokio::test]
async fn one_deadline_covers_a_body_that_drips() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let mut ticks = interval(Duration::from_millis(10));
        while stream.write_all(b"x").await.is_ok() {
            ticks.tick().await;
        }
    });
    let error = post_within(&open_client(), &url, SHORT).await;
    assert_eq!(error.class, SendErrorClass::Timeout, "{error}");
    assert_eq!(error.text, "the answer did not end within 300ms");
    assert!(error.may_have_arrived);
    // The connection was closed with the delivery, so the server ends.
    within(serving.join_next()).await.unwrap().unwrap();
}

/// A resolver that never answers, and shows when its lookup is dropped.
#[derive(Debug)]
struct Silent(Arc<Semaphore>);

impl Resolve for Silent {
    fn lookup<'a>(&'a self, _: &'a str) -> LookupFuture<'a> {
        struct Dropped(Arc<Semaphore>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.add_permits(1);
            }
        }
        let dropped = Dropped(Arc::clone(&self.0));
        Box::pin(async move {
            let _dropped = dropped;
            std::future::pending().await
        })
    }
}

/// The deadline passes at every other stage; the error names the stage and whether the request can
/// have arrived.
#[tokio::test]
async fn a_timeout_names_its_stage_and_whether_the_request_can_have_arrived() {
    let dropped = Arc::new(Semaphore::new(0));
    let silent = Arc::new(Silent(Arc::clone(&dropped)));
    let lookup = EndpointClient::with(loopback_allowed(), silent, &[]).unwrap();
    let error = post_within(&lookup, "http://hook.example/", SHORT).await;
    assert_eq!(error.text, "the name was not resolved within 300ms");
    assert_eq!((error.class, error.may_have_arrived), (SendErrorClass::Timeout, false));
    // Lookups that continued without their deliveries would pile up.
    let _ = within(dropped.acquire()).await.unwrap();

    // The system accepts the connection and nothing reads it: a TLS handshake hangs, and a plain
    // request is written.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let at = listener.local_addr().unwrap();
    let error = post_within(&open_client(), &format!("https://{at}/"), SHORT).await;
    assert_eq!(error.text, "the TLS handshake did not end within 300ms");
    assert_eq!((error.class, error.may_have_arrived), (SendErrorClass::Timeout, false));

    let error = post_within(&open_client(), &format!("http://{at}/"), SHORT).await;
    assert_eq!(error.text, "no answer came within 300ms");
    assert_eq!((error.class, error.may_have_arrived), (SendErrorClass::Timeout, true));
}

/// Informational answers before the real one, as gateways send them.
#[tokio::test]
async fn informational_answers_are_skipped() {
    let hints = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(3);
    let sink = Sink::answering(format!("HTTP/1.1 100 Continue\r\n\r\n{hints}{NO_CONTENT}")).await;
    assert_eq!(post(&open_client(), &sink.url()).await.unwrap().status, 204);
}
