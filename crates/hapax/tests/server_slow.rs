//! Thousands of connections that send next to nothing, while signed traffic flows: every signed
//! request is answered.

mod support;

use std::io::Write;
use std::net::TcpStream;

use support::{House, Sender, skip};

const SECRET: &str = "whsec_slow";

fn house(settings: &str) -> House {
    House::new(&format!(
        "{settings}[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n"
    ))
}

/// Connections that have begun a request and will not finish it: some silent, some within the
/// head, some within a body that carries a signature.
fn crawl(house: &support::Server, count: usize) -> Vec<TcpStream> {
    let request = Sender::stripe(SECRET).event("evt_slow");
    let cuts = [0, 1, 30, request.len() - 40];
    (0..count)
        .map(|n| {
            let mut stream = TcpStream::connect(house.ingress).unwrap();
            stream.write_all(&request[..cuts[n % cuts.len()]]).unwrap();
            stream
        })
        .collect()
}

#[test]
fn two_thousand_slow_connections_do_not_keep_signed_requests_from_their_answer() {
    const SLOW: usize = 2_000;
    let granted = rlimit::increase_nofile_limit(SLOW as u64 + 512).unwrap_or(0);
    if granted < SLOW as u64 + 512 {
        return skip("slow connections", &format!("only {granted} open files are allowed"));
    }
    let house = house("");
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let slow = crawl(&server, SLOW);
    let mut kept = server.wire();
    for n in 0..100 {
        server.ask(sender.event(&format!("evt_new_connection_{n}"))).is("accepted");
        kept.try_ask(&sender.event(&format!("evt_kept_{n}"))).unwrap().is("accepted");
    }
    assert_eq!(server.events("").len(), 200);
    assert_eq!(server.admin_get("/readyz").status, 200);
    drop(slow);
    server.stop();
}

#[test]
fn past_the_cap_of_connections_the_slow_are_cut_and_the_signed_get_their_turn() {
    // More slow connections than there are places: only deadlines can free one.
    let house = house("max_connections = 32\nheader_timeout = \"1s\"\nbody_timeout = \"1s\"\n");
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let _slow = crawl(&server, 64);
    for n in 0..5 {
        server.ask(sender.event(&format!("evt_{n}"))).is("accepted");
    }
    assert_eq!(server.events("").len(), 5);
}
