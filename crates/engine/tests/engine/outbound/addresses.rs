//! The guard: the addresses that endpoints may have. No name may lead to any other address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hapax_engine::{
    DnsResolver, ENDPOINT_PORTS, EndpointClient, EndpointUrl, GuardRules, SendErrorClass, is_public,
};
use hickory_resolver::proto::op::{Message, MessageType, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA, CNAME};
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

use super::{Canary, NO_CONTENT, Names, Sink, client, loopback_allowed, post};
use crate::support::within;

/// Addresses that must be blocked: one or more of each range, and its first and last where an
/// off-by-one error is likely.
const BLOCKED: &[&str] = &[
    // This host and loopback.
    "0.0.0.0",
    "0.255.255.255",
    "127.0.0.1",
    "127.255.255.254",
    // Private, shared and link-local.
    "10.0.0.0",
    "10.255.255.255",
    "172.16.0.0",
    "172.31.255.255",
    "192.168.0.0",
    "192.168.255.255",
    "100.64.0.0",
    "100.127.255.255",
    "169.254.0.1",
    "169.254.255.255",
    // Ranges for protocols, documentation, benchmarks and relays.
    "192.0.0.1",
    "192.0.0.255",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.0",
    "198.19.255.255",
    "198.51.100.7",
    "203.0.113.9",
    // Multicast, reserved, broadcast.
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    // Metadata services.
    "169.254.169.254",
    "169.254.170.2",
    "169.254.169.123",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd00:ec2::254",
    // IPv6 without an IPv4 address inside.
    "::",
    "::1",
    "fe80::1",
    "febf::1",
    "fc00::1",
    "fdff::1",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "3fff::1",
    "3fff:fff::1",
    "100::1",
    "5f00::1",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "3ffe::1",
    "4000::1",
    "e000::1",
    // IPv6 with an IPv4 address inside: mapped, compatible, NAT64 (well-known and local), 6to4,
    // Teredo, ISATAP.
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "::8.8.8.8",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::7f00:1",
    "64:ff9b:1::1",
    "64:ff9b:1::808:808",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "2002:c0a8:101::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2606:4700::5efe:7f00:1",
    "2606:4700::200:5efe:a00:1",
    "fe80::5efe:808:808",
];

/// Public neighbours of those ranges, and IPv6 addresses with a public IPv4 address inside.
const PUBLIC: &[&str] = &[
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.0",
    "168.63.129.15",
    "169.253.255.255",
    "169.255.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.0",
    "192.0.3.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "2606:4700::1111",
    "2a00:1450::1",
    "2001:200::1",
    "2001:4860::8888",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
    "2606:4700::5efe:808:808",
];

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Tries both sides of every range.
#[test]
fn the_ranges_that_are_not_public_end_where_they_should() {
    for text in BLOCKED {
        assert!(!is_public(address(text)), "{text} counts as public");
    }
    for text in PUBLIC {
        assert!(is_public(address(text)), "{text} does not count as public");
    }
}

/// The blocked address is in the URL itself, on every port that endpoints may use.
#[tokio::test]
async fn a_blocked_address_in_a_url_is_not_connected_to() {
    let client = client(GuardRules::default(), &Names::new());
    for text in BLOCKED {
        let host = match address(text) {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        for url in [format!("http://{host}/"), format!("https://{host}/in")] {
            // The URL is well-formed, and may have been stored under other rules, so the connection
            // must also be blocked.
            let error = post(&client, &url).await.unwrap_err();
            assert_eq!(error.class, SendErrorClass::Blocked, "{url}: {error}");
            assert!(!error.may_have_arrived, "{url}");
            assert!(EndpointUrl::parse(&url, client.rules()).is_err(), "{url}");
        }
    }
}

/// The blocked address is the answer of a name server: alone, before and after a public address,
/// and between two.
#[tokio::test]
async fn a_name_with_any_blocked_address_is_not_connected_to() {
    let names = Names::new();
    let client = client(GuardRules::default(), &names);
    for blocked in BLOCKED {
        let (public, other) = ("8.8.8.8", "2606:4700::1111");
        let several: [&[&str]; 4] =
            [&[blocked], &[public, blocked], &[blocked, public], &[public, blocked, other]];
        for answer in several {
            names.set("hook.example", &[answer]);
            let error = post(&client, "http://hook.example/").await.unwrap_err();
            assert_eq!(error.class, SendErrorClass::Blocked, "{answer:?}: {error}");
            // The error reveals nothing about the internal network to the party that chose the
            // name.
            assert!(!error.text.contains(blocked), "{error}");
        }
    }
}

/// The name is public for the first lookup and private for the second: a guard that looks up twice connects
/// to the canary.
#[tokio::test]
async fn a_name_that_changes_its_address_is_judged_by_the_address_that_is_used() {
    let canary = Canary::new().await;
    // 127.0.0.2 stands for the public address, 127.0.0.1 for the one inside.
    let allowed = vec!["127.0.0.2/32".parse().unwrap()];
    let rules = GuardRules::new(allowed, ENDPOINT_PORTS.to_vec(), None);
    let names = Names::new();
    let client = client(rules, &names);
    let url = format!("http://rebind.example:{}/", canary.port());
    for _ in 0..20 {
        names.set("rebind.example", &[&["127.0.0.2"], &["127.0.0.1"]]);
        let before = names.lookups();
        let first = post(&client, &url).await.unwrap_err();
        assert_eq!(first.class, SendErrorClass::Refused, "{first}");
        assert_eq!(names.lookups(), before + 1, "each attempt resolves once");
        let second = post(&client, &url).await.unwrap_err();
        assert_eq!(second.class, SendErrorClass::Blocked, "{second}");
        assert_eq!(names.lookups(), before + 2, "each attempt resolves once");
    }
    canary.saw_nothing().await;
}

/// A redirect to a blocked address must not be followed.
#[tokio::test]
async fn a_redirect_is_an_answer_and_is_not_followed() {
    let canary = Canary::new().await;
    let client = client(loopback_allowed(), &Names::new());
    for status in [301, 302, 303, 307, 308] {
        for target in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"] {
            let to = format!("http://{target}:{}/", canary.port());
            let answer =
                format!("HTTP/1.1 {status} Moved\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n");
            let sink = Sink::answering(answer).await;
            assert_eq!(post(&client, &sink.url()).await.unwrap().status.as_u16(), status);
        }
    }
    canary.saw_nothing().await;
}

/// A connection to the blocked address is open in the pool of another client when the endpoint is called.
#[tokio::test]
async fn a_connection_of_another_client_is_never_used() {
    let mut sink = Sink::answering(NO_CONTENT).await;
    let open = client(loopback_allowed(), &Names::new());
    assert_eq!(post(&open, &sink.url()).await.unwrap().status, 204);
    let guarded = client(GuardRules::default(), &Names::one("sink.example", &["127.0.0.1"]));
    let name = format!("http://sink.example:{}/in", sink.port());
    for url in [sink.url(), name] {
        let error = post(&guarded, &url).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Blocked, "{error}");
    }
    // A client under the strictest rules does not use connections of another guarded client either.
    let portal = client(open.rules().strictest(), &Names::new());
    assert_eq!(post(&portal, &sink.url()).await.unwrap_err().class, SendErrorClass::Blocked);
    assert_eq!((sink.requests().len(), sink.connections()), (1, 1));
}

/// Names of the hosts file, and names below localhost that a name server could answer.
#[tokio::test]
async fn localhost_is_never_asked_for_and_never_public() {
    let canary = Canary::new().await;
    let names = Names::one("localhost", &["8.8.8.8"]);
    names.set("a.localhost", &[&["8.8.8.8"]]);
    names.set("localhost.localdomain", &[&["127.0.0.1"]]);
    names.set("metadata.google.internal", &[&["169.254.169.254"]]);
    let guarded = client(GuardRules::default(), &names);
    for host in ["localhost", "LOCALHOST.", "a.localhost"] {
        let error = post(&guarded, &format!("http://{host}/")).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Blocked, "{host}: {error}");
    }
    assert_eq!(names.lookups(), 0);
    for host in ["localhost.localdomain", "metadata.google.internal"] {
        let error = post(&guarded, &format!("http://{host}/")).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Blocked, "{host}: {error}");
    }
    canary.saw_nothing().await;
    // Where loopback is allowed, localhost is loopback and nothing else.
    let sink = Sink::answering(NO_CONTENT).await;
    let open = client(loopback_allowed(), &names);
    let url = format!("http://localhost:{}/", sink.port());
    assert_eq!(post(&open, &url).await.unwrap().status, 204);
}

/// In an allowed net any port may be used, elsewhere only the configured ones.
#[tokio::test]
async fn allowed_nets_and_ports_are_checked_for_each_address() {
    let sink = Sink::answering(NO_CONTENT).await;
    let names = Names::one("in.example", &["127.0.0.1"]);
    names.set("out.example", &[&["8.8.8.8"]]);
    names.set("mixed.example", &[&["127.0.0.1", "8.8.8.8"]]);
    names.set("inside.example", &[&["10.0.0.1"]]);
    let client = client(loopback_allowed(), &names);
    let port = sink.port();
    assert_eq!(post(&client, &format!("http://in.example:{port}/")).await.unwrap().status, 204);
    // An address on a port that is not allowed blocks the whole name, as a blocked address does.
    for host in ["out.example", "mixed.example", "inside.example", "8.8.8.8"] {
        let error = post(&client, &format!("http://{host}:{port}/")).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Blocked, "{host}: {error}");
    }
    assert_eq!(sink.connections(), 1);
}

/// The reasons that are shown when no connection was made.
#[tokio::test]
async fn a_failure_before_the_connection_has_its_class_and_its_reason() {
    let names = Names::one("refused.example", &["127.0.0.1"]);
    names.set("empty.example", &[&[]]);
    let client = client(loopback_allowed(), &names);
    let free = Canary::new().await.port();
    for (url, class, text) in [
        (format!("http://refused.example:{free}/"), SendErrorClass::Refused, "connection refused"),
        (
            "http://gone.example/".into(),
            SendErrorClass::Dns,
            "looking up gone.example: the name does not exist",
        ),
        (
            "http://empty.example/".into(),
            SendErrorClass::Dns,
            "looking up empty.example: the name has no address",
        ),
        (
            "http://10.0.0.1/".into(),
            SendErrorClass::Blocked,
            "no net in [outbound] allow contains it",
        ),
    ] {
        let error = post(&client, &url).await.unwrap_err();
        assert_eq!(error.class, class, "{error}");
        assert!(error.text.contains(text), "{error}");
        assert!(!error.may_have_arrived);
    }
}

/// A name server on loopback: `a.example` leads to `b.example` and on to `c.example`, which has `last`.
/// Only fully qualified names exist, so a lookup below a search domain would not find them.
async fn name_server(last: &'static str) -> (SocketAddr, JoinSet<()>) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let at = socket.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let mut bytes = [0_u8; 4_096];
        while let Ok((count, asker)) = socket.recv_from(&mut bytes).await {
            let Ok(query) = Message::from_vec(&bytes[..count]) else { continue };
            let answer = chain(&query, address(last));
            let _ = socket.send_to(&answer.to_vec().unwrap(), asker).await;
        }
    });
    (at, serving)
}

fn chain(query: &Message, last: IpAddr) -> Message {
    let name = |text: &str| Name::from_ascii(text).unwrap();
    let question = query.queries[0].clone();
    let mut answer = query.clone();
    answer.metadata.message_type = MessageType::Response;
    answer.metadata.recursion_available = true;
    if !question.name().to_ascii().eq_ignore_ascii_case("a.example.") {
        answer.metadata.response_code = ResponseCode::NXDomain;
        return answer;
    }
    for (from, to) in [("a.example.", "b.example."), ("b.example.", "c.example.")] {
        answer.answers.push(Record::from_rdata(name(from), 0, RData::CNAME(CNAME(name(to)))));
    }
    let found = match (last, question.query_type()) {
        (IpAddr::V4(last), RecordType::A) => Some(RData::A(A(last))),
        (IpAddr::V6(last), RecordType::AAAA) => Some(RData::AAAA(AAAA(last))),
        _ => None,
    };
    answer.answers.extend(found.map(|data| Record::from_rdata(name("c.example."), 0, data)));
    answer
}

/// The blocked address is at the end of a chain of aliases, through real DNS.
#[tokio::test]
async fn a_chain_of_aliases_is_judged_by_its_last_address() {
    let mut sink = Sink::answering(NO_CONTENT).await;
    let url = format!("http://a.example:{}/", sink.port());
    let allowed =
        |net: &str| GuardRules::new(vec![net.parse().unwrap()], ENDPOINT_PORTS.to_vec(), None);
    for (last, rules, status) in [
        ("127.0.0.1", allowed("127.0.0.0/8"), Ok(204)),
        ("127.0.0.1", allowed("10.0.0.0/8"), Err(SendErrorClass::Blocked)),
        ("::1", allowed("127.0.0.0/8"), Err(SendErrorClass::Blocked)),
        ("::ffff:169.254.169.254", allowed("127.0.0.0/8"), Err(SendErrorClass::Blocked)),
        ("64:ff9b::7f00:1", allowed("127.0.0.0/8"), Err(SendErrorClass::Blocked)),
    ] {
        let (server, _serving) = name_server(last).await;
        let resolver = Arc::new(DnsResolver::asking(server));
        let client = EndpointClient::with(rules, resolver, &[]).unwrap();
        let answered = post(&client, &url).await;
        let answered =
            answered.map(|answered| answered.status.as_u16()).map_err(|error| error.class);
        assert_eq!(answered, status, "{last}");
        let missing = post(&client, "http://missing.example/").await.unwrap_err();
        assert_eq!(missing.class, SendErrorClass::Dns, "{missing}");
        assert!(missing.text.contains("does not exist"), "{missing}");
    }
    assert_eq!(sink.requests().len(), 1);
}

#[tokio::test]
async fn a_forbidden_port_of_a_name_is_refused_at_creation_where_its_addresses_are_known() {
    // With `allow`, a name on any port may be in an allowed net. Only the addresses of the name decide this.
    let names = Names::new();
    names.set("public.example", &[&["93.184.216.34"]]);
    names.set("inside.example", &[&["10.1.2.3"]]);
    names.set("mixed.example", &[&["10.1.2.3", "93.184.216.34"]]);
    let allow = vec!["10.0.0.0/8".parse().unwrap()];
    let rules = GuardRules::new(allow, ENDPOINT_PORTS.to_vec(), None);
    let client = client(rules, &names);
    let check = async |url: &str, expected: bool| {
        let parsed = EndpointUrl::parse(url, client.rules()).expect("its form is good");
        assert_eq!(within(client.check(&parsed)).await.is_ok(), expected, "{url}");
    };
    check("http://inside.example:6379/", true).await;
    check("http://public.example:6379/", false).await;
    check("http://mixed.example:6379/", false).await;
    // The name may be created later.
    check("http://unknown.example:6379/", true).await;
    let before = names.lookups();
    check("https://public.example/", true).await;
    check("http://10.1.2.3:6379/", true).await;
    assert_eq!(names.lookups(), before, "only where the port depends on it");
}
