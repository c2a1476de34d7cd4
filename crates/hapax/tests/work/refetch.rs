//! `refetch` through the real server: the event is a hint, and what counts is the object as its API
//! tells it now, for each kind of handler.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::support::app::App;
use crate::support::ledger::Ledger;
use crate::support::{House, Sender, Server, until};
use serde_json::{Value, json};

const SECRET: &str = "whsec_work";
const API_AUTH: &str = "Bearer s3cr3t-of-the-api";

/// The source of truth: an API on loopback that answers the n-th request, from 0, as told.
struct Api {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Api {
    fn new(answer: impl Fn(usize, &str) -> (u16, String) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let (kept, answer) = (Arc::clone(&requests), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (kept, answer) = (Arc::clone(&kept), Arc::clone(&answer));
                std::thread::spawn(move || serve(stream.unwrap(), &kept, &*answer));
            }
        });
        Self { address, requests }
    }

    /// Each request's head, in the order they came.
    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(
    stream: TcpStream,
    kept: &Mutex<Vec<String>>,
    answer: &dyn Fn(usize, &str) -> (u16, String),
) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let count = {
            let mut kept = kept.lock().unwrap();
            kept.push(head.clone());
            kept.len() - 1
        };
        let (status, body) = answer(count, &head);
        let length = body.len();
        if write!(writer, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}").is_err()
        {
            return;
        }
    }
}

fn house(api: &Api, way: &str) -> House {
    House::new(&format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n\
         [sources.stripe.handlers.state]\n{way}\nretry = [\"0s\", \"10ms\", \"10ms\", \"10ms\"]\n\
         [sources.stripe.handlers.state.order]\nresource = \"/data/object/id\"\nby = \"/created\"\n\
         [sources.stripe.handlers.state.refetch]\n\
         url = \"http://{}/payouts/{{resource}}\"\nheaders = {{ authorization = \"env:API_AUTH\" }}\n",
        api.address
    ))
    .env("API_AUTH", API_AUTH)
}

/// A payout that was pending when its event was made.
fn send(server: &Server, event_id: &str, payout: &str, created: i64) {
    let body = json!({
        "id": event_id, "object": "event", "type": "payout.updated", "created": created,
        "data": { "object": { "id": payout, "status": "pending" } },
    });
    let request = Sender::stripe(SECRET).request(body.to_string()).bytes();
    server.ask(request).is("accepted");
}

#[track_caller]
fn until_status(server: &Server, event_id: &str, status: &str) -> Value {
    let path = format!("/api/v1/events/{event_id}");
    until(&format!("{event_id} is {status}"), || {
        let event = server.admin_get(&path).json();
        (event["status"] == status).then_some(event)
    })
}

fn paid(_: usize, _: &str) -> (u16, String) {
    (200, r#"{"id":"po_1","status":"paid","who":"Zoë"}"#.to_owned())
}

#[test]
fn sql_applies_the_object_as_the_api_tells_it_now_once_the_api_works() {
    // The event says pending, the API knows better, and is down for the first two attempts.
    let api = Api::new(|count, head| match count {
        0 | 1 => (500, String::new()),
        more => paid(more, head),
    });
    let house = house(
        &api,
        // Not the 100 ms that SQL has by itself: on a busy machine one statement may take longer.
        "timeout = \"10s\"\nsql = \"\"\"INSERT INTO states VALUES (:resource, :current ->> '$.status', :attempt);\
         SELECT :current ->> '$.who'\"\"\"",
    );
    let ledger =
        Ledger::create(&house, "CREATE TABLE states (payout TEXT, status TEXT, attempt INTEGER);");
    let server = house.start();
    send(&server, "evt_1", "po/1 x", 1);
    let event = until_status(&server, "evt_1", "processed");
    assert_eq!(event["result"], "Zoë", "{event}");
    let attempts = event["jobs"][0]["attempts"].as_array().unwrap();
    let told: Vec<_> = attempts
        .iter()
        .map(|attempt| (attempt["outcome"].as_str().unwrap(), attempt["error"].as_str()))
        .collect();
    let down = ("failed", Some("refetch: HTTP 500"));
    assert_eq!(told, [down, down, ("done", None)], "{event}");
    // Older news of the same payout is not even asked about.
    send(&server, "evt_0", "po/1 x", 0);
    until_status(&server, "evt_0", "stale");
    let said = server.stop();
    assert!(!said.contains("s3cr3t"), "{said}");
    assert_eq!(ledger.counts("SELECT payout || ' ' || status, attempt FROM states").len(), 1);
    assert_eq!(
        ledger.counts("SELECT payout || ' ' || status, attempt FROM states")["po/1 x paid"],
        3
    );
    let requests = api.requests();
    assert_eq!(requests.len(), 3, "{requests:?}");
    for request in &requests {
        assert!(request.starts_with("GET /payouts/po%2F1%20x HTTP/1.1\r\n"), "{request}");
        assert!(request.contains(&format!("authorization: {API_AUTH}\r\n")), "{request}");
    }
}

#[test]
fn sql_that_fails_is_said_in_the_log_without_what_the_api_told() {
    // A database quotes values in its errors.
    let api = Api::new(paid);
    let house = house(&api, "sql = \"SELECT json_extract(:body, :current)\"");
    let server = house.start();
    send(&server, "evt_1", "po_1", 1);
    let event = until_status(&server, "evt_1", "dead");
    let error = event["jobs"][0]["attempts"][0]["error"].as_str().unwrap_or_default();
    assert!(error.contains("Zoë"), "the database quotes nothing: {event}");
    let log = server.stop();
    assert!(log.contains("of stripe/state failed: `hapax explain` says why"), "{log}");
    assert!(!log.contains("Zoë") && !log.contains("paid"), "{log}");
}

#[test]
fn an_app_gets_the_object_in_a_header_beside_the_original_body() {
    let api = Api::new(paid);
    let app = App::new(|_| 200);
    let house = house(&api, &format!("http = \"{}\"", app.url()));
    let server = house.start();
    send(&server, "evt_1", "po_1", 1);
    until_status(&server, "evt_1", "processed");
    let calls = app.calls();
    assert_eq!(calls.len(), 1);
    let current = calls[0].current.as_deref();
    assert_eq!(current, Some(r#"{"id":"po_1","status":"paid","who":"Zo\u00eb"}"#));
    assert!(calls[0].body.contains("pending"), "{}", calls[0].body);
}

#[test]
fn a_pull_worker_gets_the_object_beside_the_event_and_nothing_where_it_cannot_be_had() {
    // The first fetch fails: that claim is a failed attempt, and the worker never sees it.
    let api = Api::new(|count, head| match count {
        0 => (404, String::new()),
        more => paid(more, head),
    });
    let house = house(&api, "pull = true");
    let server = house.start();
    send(&server, "evt_1", "po_1", 1);
    let ask = json!({ "source": "stripe", "handler": "state", "limit": 5, "wait": "20s" });
    let claimed = server.admin_post("/api/v1/claims", &ask).json();
    let item = &claimed["items"][0];
    assert_eq!(
        item["current"],
        json!({ "id": "po_1", "status": "paid", "who": "Zoë" }),
        "{claimed}"
    );
    assert_eq!((&item["attempt"], &item["event"]["event_id"]), (&json!(2), &json!("evt_1")));
    let path = format!("/api/v1/claims/{}/complete", item["job"].as_str().unwrap());
    let done = server.admin_post(&path, &json!({ "fence": item["fence"] }));
    assert_eq!(done.status, 200, "{done:?}");
    let event = until_status(&server, "evt_1", "processed");
    assert_eq!(event["jobs"][0]["attempts"][0]["error"], "refetch: HTTP 404", "{event}");
}
