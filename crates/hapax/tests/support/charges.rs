//! Clients of an API behind a proxy: they send a charge with an Idempotency-Key, and repeat it.

use std::net::SocketAddr;

use super::{Answer, House, Server, Wire};

/// One request for a charge.
#[derive(Debug, Clone)]
pub(crate) struct Charge<'c> {
    pub(crate) method: &'c str,
    pub(crate) target: &'c str,
    pub(crate) key: Option<&'c str>,
    pub(crate) account: Option<&'c str>,
    pub(crate) headers: &'c str,
    pub(crate) body: &'c str,
}

impl<'c> Charge<'c> {
    /// A charge of account `acct_1`.
    pub(crate) fn with_key(key: &'c str) -> Self {
        Self {
            method: "POST",
            target: "/charges",
            key: Some(key),
            account: Some("acct_1"),
            headers: "",
            body: "{\"amount\":100}",
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Self { method, target, key, account, headers, body } = self;
        let key = key.map_or(String::new(), |key| format!("idempotency-key: {key}\r\n"));
        let account = account.map_or(String::new(), |it| format!("x-account-id: {it}\r\n"));
        let length = body.len();
        format!(
            "{method} {target} HTTP/1.1\r\nhost: api.example\r\n{key}{account}{headers}\
             content-length: {length}\r\n\r\n{body}"
        )
        .into_bytes()
    }

    /// Sends the charge on a new connection.
    pub(crate) fn send(&self, to: SocketAddr) -> Answer {
        self.try_send(to).expect("an answer")
    }

    /// `None` if the connection failed or ended without an answer.
    pub(crate) fn try_send(&self, to: SocketAddr) -> Option<Answer> {
        Wire::try_connect(to).ok()?.try_ask(&self.bytes())
    }
}

/// The config of a proxy `api` in front of `upstream`, with `keys` added.
pub(crate) fn proxy(upstream: &str, keys: &str) -> String {
    let scope = if keys.contains("scope =") { "" } else { "scope = \"header:x-account-id\"\n" };
    format!(
        "[proxies.api]\nlisten = \"127.0.0.1:0\"\nupstream = \"{upstream}\"\n{scope}\
         require_key = [\"POST /charges\"]\n{keys}\n"
    )
}

/// The address of a server's proxy `api`.
pub(crate) fn api(server: &Server) -> SocketAddr {
    let line = server.stdout.wait_for("hapax proxy api http://");
    let at = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
    at.unwrap().parse().unwrap()
}

/// Starts a server with such a proxy, and returns it with the proxy's address.
pub(crate) fn start(upstream: &str, keys: &str) -> (House, Server, SocketAddr) {
    let house = House::new(&proxy(upstream, keys));
    let server = house.start();
    let at = api(&server);
    (house, server, at)
}

/// The type of a problem: the part after `urn:hapax:problem:`.
pub(crate) fn problem(answer: &Answer) -> String {
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    let kind = answer.json()["type"].as_str().unwrap().to_owned();
    kind.rsplit(':').next().unwrap().to_owned()
}

/// The parts of an answer that a replay must repeat.
pub(crate) fn kept(answer: &Answer) -> (u16, Vec<String>, Vec<u8>) {
    let of_one_answer = ["hapax-request-id:", "idempotency-replayed:", "date:"];
    let mut lines: Vec<String> = answer
        .head
        .lines()
        .skip(1)
        .filter(|line| !line.is_empty() && !of_one_answer.iter().any(|it| line.starts_with(it)))
        .map(str::to_owned)
        .collect();
    lines.sort();
    (answer.status, lines, answer.body.clone())
}

pub(crate) fn is_replay(answer: &Answer) -> bool {
    answer.header("idempotency-replayed") == Some("true")
}
