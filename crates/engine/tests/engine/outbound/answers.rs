//! What endpoints answer, and how little of it can do harm.

use std::time::Duration;

use bytes::Bytes;
use hapax_engine::{EndpointUrl, SendErrorClass};
use http::HeaderMap;

use super::{NO_CONTENT, Names, Sink, client, loopback_allowed, post};
use crate::support::within;

/// The plain case: what arrives is what was given, and the connection is used again.
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
    for _ in 0..3 {
        let body = Bytes::from_static(b"{\"n\":1}");
        let sent = client.post(&url, headers.clone(), body, Duration::from_secs(60));
        assert_eq!(within(sent).await.unwrap().status, 204);
    }
    let requests = sink.requests();
    assert_eq!(requests.len(), 3);
    let (head, body) = requests[0].split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("POST /in/%41?x=|&y=%20 HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nhost: sink.example:{}", sink.port())), "{head}");
    assert!(head.contains("\r\nwebhook-id: msg_1"), "{head}");
    assert!(head.contains("\r\ncontent-length: 7"), "{head}");
    assert!(head.contains("\r\nuser-agent: hapax/"), "{head}");
    assert!(!head.contains("evil") && !head.contains("accept-encoding"), "{head}");
    assert_eq!(body, "{\"n\":1}");
    assert_eq!(sink.connections(), 1);
}

/// A server that reads the request and closes: a client that resends would show a second request.
#[tokio::test]
async fn a_request_that_may_have_arrived_is_never_sent_again() {
    let mut sink = Sink::closing("").await;
    let client = client(loopback_allowed(), &Names::new());
    let error = post(&client, &sink.url()).await.unwrap_err();
    assert_eq!(error.class, SendErrorClass::Broken, "{error}");
    assert!(error.may_have_arrived);
    assert_eq!((sink.requests().len(), sink.connections()), (1, 1));
}
