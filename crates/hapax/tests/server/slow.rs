//! Thousands of connections that send almost nothing, during signed traffic: every signed request
//! is answered.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::support::{House, Sender, Server, skip};

const SECRET: &str = "whsec_slow";

fn house(settings: &str) -> House {
    House::new(&format!(
        "{settings}[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n\
         unverified_limit = \"off\"\n"
    ))
}

/// The bytes that a hostile connection sends before it goes idle, and whether the server answers
/// them first.
struct Hostile {
    kind: &'static str,
    bytes: Vec<u8>,
    is_answered: bool,
}

fn every_kind() -> Vec<Hostile> {
    let signed = Sender::stripe(SECRET).event("evt_slow");
    let forged = Sender::stripe("whsec_another").event("evt_forged");
    let unknown = b"GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n";
    let http_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let kind = |kind, bytes: &[u8], is_answered| Hostile { kind, bytes: bytes.into(), is_answered };
    vec![
        kind("silent", b"", false),
        kind("slow head", &signed[..30], false),
        kind("slow body", &signed[..signed.len() - 40], false),
        kind("idle after 404", unknown, true),
        kind("idle after 401", &forged, true),
        kind("HTTP/2 without a request", http_2, true),
    ]
}

fn hold(server: &Server, hostile: &Hostile) -> TcpStream {
    let mut stream = TcpStream::connect(server.ingress).unwrap();
    stream.write_all(&hostile.bytes).unwrap();
    if hostile.is_answered {
        let read = stream.read(&mut [0; 1024]).unwrap();
        assert!(read > 0, "{}: no answer", hostile.kind);
    }
    stream
}

#[test]
fn five_thousand_connections_that_wait_do_not_keep_signed_requests_from_their_answer() {
    // There are more connections than slots, of every kind at once.
    const HELD: usize = 5_000;
    let granted = rlimit::increase_nofile_limit(HELD as u64 + 512).unwrap_or(0);
    if granted < HELD as u64 + 512 {
        return skip("slow connections", &format!("only {granted} open files are allowed"));
    }
    let house = house("header_timeout = \"60s\"\nbody_timeout = \"60s\"\n");
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let mut kept = server.wire();
    kept.try_ask(&sender.event("evt_first")).unwrap().is("accepted");
    let kinds = every_kind();
    let held: Vec<_> = (0..HELD).map(|n| hold(&server, &kinds[n % kinds.len()])).collect();
    for n in 0..50 {
        server.ask(sender.event(&format!("evt_new_connection_{n}"))).is("accepted");
        kept.try_ask(&sender.event(&format!("evt_kept_{n}"))).unwrap().is("accepted");
    }
    assert_eq!(server.events("").len(), 101);
    assert_eq!(server.admin_get("/readyz").status, 200);
    drop(held);
    server.stop();
}

#[test]
fn beyond_the_limit_idle_connections_are_closed_and_verified_ones_stay() {
    // These timeouts are longer than the test, so only the limit closes connections.
    let house = house("max_connections = 16\nheader_timeout = \"60s\"\nbody_timeout = \"60s\"\n");
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let mut kept = server.wire();
    kept.try_ask(&sender.event("evt_first")).unwrap().is("accepted");
    for (round, hostile) in every_kind().into_iter().enumerate() {
        let evicted = || {
            let of = |kind: &str| {
                let label = format!("kind=\"{kind}\"");
                server.metric("hapax_connections_evicted_total", &[&label])
            };
            ["head", "idle", "body"].map(of).iter().sum::<f64>()
        };
        let before = evicted();
        let held: Vec<_> = (0..40).map(|_| hold(&server, &hostile)).collect();
        for n in 0..20 {
            server.ask(sender.event(&format!("evt_{round}_{n}"))).is("accepted");
        }
        let still = kept.try_ask(&sender.event(&format!("evt_{round}_kept")));
        still.unwrap_or_else(|| panic!("{}: it was closed", hostile.kind)).is("accepted");
        assert!(evicted() - before >= 25.0, "{}: {before} {}", hostile.kind, evicted());
        drop(held);
    }
}
