//! `refetch` through the real server: each kind of handler applies the current object from the API,
//! and the event only says that the object changed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use crate::support::app::App;
use crate::support::ledger::Ledger;
use crate::support::nodes::Database;
use crate::support::{FOREVER, House, Sender, Server, Wire, post, until};
use serde_json::{Value, json};

const SECRET: &str = "whsec_work";
const API_AUTH: &str = "Bearer s3cr3t-of-the-api";

/// The source of truth: an API on loopback that answers the n-th request, counted from 0, as the
/// test decides.
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

    /// The head of each request, in order of arrival.
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
    House::new(&config(api, way)).env("API_AUTH", API_AUTH)
}

fn config(api: &Api, way: &str) -> String {
    format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n\
         [sources.stripe.handlers.state]\n{way}\nretry = [\"0s\", \"10ms\", \"10ms\", \"10ms\"]\n\
         [sources.stripe.handlers.state.order]\nresource = \"/data/object/id\"\nby = \"/created\"\n\
         [sources.stripe.handlers.state.refetch]\n\
         url = \"http://{}/payouts/{{resource}}\"\nheaders = {{ authorization = \"env:API_AUTH\" }}\n",
        api.address
    )
}

/// A payout that was pending when its event was created.
fn send(server: &Server, event_id: &str, payout: &str, created: i64) {
    server.ask(request(event_id, payout, created)).is("accepted");
}

fn request(event_id: &str, payout: &str, created: i64) -> Vec<u8> {
    let body = json!({
        "id": event_id, "object": "event", "type": "payout.updated", "created": created,
        "data": { "object": { "id": payout, "status": "pending" } },
    });
    Sender::stripe(SECRET).request(body.to_string()).bytes()
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
fn sql_applies_the_current_object_once_the_api_works() {
    // The event says `pending`, and the API has a newer state. The API is down during the first two
    // attempts.
    let api = Api::new(|count, head| match count {
        0 | 1 => (500, String::new()),
        more => paid(more, head),
    });
    let house = house(
        &api,
        // The timeout is not the default of 100 ms for SQL: on a busy machine one statement may take longer.
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
    let outcomes: Vec<_> = attempts
        .iter()
        .map(|attempt| (attempt["outcome"].as_str().unwrap(), attempt["error"].as_str()))
        .collect();
    let down = ("failed", Some("refetch: HTTP 500"));
    assert_eq!(outcomes, [down, down, ("done", None)], "{event}");
    // An older version of the same payout is not even fetched.
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
fn failing_sql_is_logged_without_the_values_of_the_api() {
    // A database quotes values in its errors.
    let api = Api::new(paid);
    let house = house(&api, "sql = \"SELECT json_extract(:body, :current)\"");
    let server = house.start();
    send(&server, "evt_1", "po_1", 1);
    let event = until_status(&server, "evt_1", "dead");
    let error = event["jobs"][0]["attempts"][0]["error"].as_str().unwrap_or_default();
    assert!(error.contains("Zoë"), "the database quotes nothing: {event}");
    let log = server.stop();
    assert!(log.contains("of stripe/state failed: see `hapax explain`"), "{log}");
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
fn a_pull_worker_gets_the_object_beside_the_event_and_nothing_if_it_cannot_be_fetched() {
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

/// An object that changes, behind an API whose first answer can be held back.
struct Object {
    state: Arc<(Mutex<State>, Condvar)>,
    api: Api,
}

struct State {
    version: usize,
    held: bool,
}

impl Object {
    /// With `held`, the API holds back its answers until the object changes.
    fn new(held: bool) -> Self {
        let state = Arc::new((Mutex::new(State { version: 1, held }), Condvar::new()));
        let shared = Arc::clone(&state);
        let api = Api::new(move |_, _| {
            let state = shared.0.lock().unwrap();
            // An API answers with the version that it read before it was held back.
            let version = state.version;
            let _go = shared.1.wait_timeout_while(state, FOREVER, |state| state.held).unwrap();
            (200, json!({ "version": version }).to_string())
        });
        Self { state, api }
    }

    /// Creates the next version; a request that was held back still gets the old one.
    fn changes(&self) {
        let mut state = self.state.0.lock().unwrap();
        state.version += 1;
        state.held = false;
        self.state.1.notify_all();
    }

    fn until_asked(&self, times: usize) {
        until("the object is fetched", || (self.api.requests().len() >= times).then_some(()));
    }
}

/// The moment of the SIGKILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    /// The request for the object is in flight.
    InFlight,
    /// The process has reached this failpoint and is stopped there.
    At(&'static str),
}

impl Blow {
    fn start(self, house: &House) -> Server {
        match self {
            Self::InFlight => house.start(),
            Self::At(point) => {
                house.start_with(&[("HAPAX_FAILPOINTS", &format!("{point}=stop@1"))])
            }
        }
    }

    /// Waits for the moment, then kills the server and changes the object.
    fn falls(self, object: &Object, server: Server) {
        match self {
            Self::InFlight => object.until_asked(1),
            Self::At(point) => {
                until(&format!("it stands still at {point}"), || {
                    server.stands_still().then_some(())
                });
            }
        }
        server.kill();
        object.changes();
    }
}

const TABLE: &str = "CREATE TABLE states (event TEXT, version TEXT)";

/// Kills the server. Its successor must apply the newest version once; a job that was committed
/// before is not even fetched again.
#[track_caller]
fn dies_and_applies_once(
    blow: Blow,
    object: &Object,
    house: &House,
    applied: impl Fn() -> Vec<String>,
) {
    let server = dies_with_an_event(blow, object, house);
    until_status(&server, "evt_1", "processed");
    let before = match blow {
        Blow::At("worker.after_commit") => ["evt_1 1"],
        _ => ["evt_1 2"],
    };
    assert_eq!(applied(), before, "{blow:?}");
    let asked = object.api.requests().len();
    assert_eq!(asked, if before == ["evt_1 1"] { 1 } else { 2 }, "{blow:?}");
    // The next event applies the object as it is at that time.
    object.changes();
    send(&server, "evt_2", "po_1", 2);
    until_status(&server, "evt_2", "processed");
    assert_eq!(applied(), [before[0], "evt_2 3"], "{blow:?}");
    server.stop();
}

/// A server that is killed while it handles an event, and its successor, which gets the event
/// again: the sender may never have had an answer.
fn dies_with_an_event(blow: Blow, object: &Object, house: &House) -> Server {
    let event = request("evt_1", "po_1", 1);
    let server = blow.start(house);
    let mut sender = server.wire();
    sender.write(&event);
    blow.falls(object, server);
    let server = house.start();
    server.ask(&event).is("duplicate");
    server
}

const SQL_BLOWS: [Blow; 4] = [
    Blow::InFlight,
    Blow::At("refetch.after_answer"),
    Blow::At("worker.before_commit"),
    Blow::At("worker.after_commit"),
];

#[test]
fn a_sigkill_at_any_step_of_a_refetch_applies_the_newest_object_once() {
    for blow in SQL_BLOWS {
        let object = Object::new(blow == Blow::InFlight);
        let sql = "INSERT INTO states VALUES (:event_id, :current ->> '$.version')";
        // The timeout is not the default of 100 ms for SQL: on a busy machine one statement may take longer.
        let house = house(&object.api, &format!("timeout = \"10s\"\nsql = \"{sql}\""));
        let ledger = Ledger::create(&house, TABLE);
        dies_and_applies_once(blow, &object, &house, || {
            let rows = ledger.counts("SELECT event || ' ' || version, 1 FROM states");
            assert_eq!(ledger.number("SELECT count(*) FROM states") as usize, rows.len());
            rows.into_keys().collect()
        });
    }
}

#[test]
fn a_sigkill_at_any_step_of_a_refetch_applies_the_newest_object_once_on_postgresql() {
    // On PostgreSQL, the leases of a dead node must end first. To save time, all cases run at once.
    std::thread::scope(|scope| {
        for blow in SQL_BLOWS {
            scope.spawn(move || dies_on_postgresql(blow));
        }
    });
}

fn dies_on_postgresql(blow: Blow) {
    let object = Object::new(blow == Blow::InFlight);
    let database = Database::empty("refetch");
    database.execute(TABLE);
    let sql = "INSERT INTO states VALUES (:event_id, :current::json ->> 'version')";
    let way = format!("timeout = \"3s\"\nlease = \"12s\"\nsql = \"{sql}\"");
    let config = config(&object.api, &way);
    let url = &database.url;
    // The config ends with the table `refetch`, so the appended timeout is that of the fetch.
    let house = House::new(&format!("database_url = \"{url}\"\n{config}timeout = \"3s\"\n"))
        .env("API_AUTH", API_AUTH);
    dies_and_applies_once(blow, &object, &house, || {
        let rows = "SELECT event || ' ' || version FROM states ORDER BY event";
        database.execute(rows).into_iter().flatten().collect()
    });
}

#[test]
fn a_sigkill_at_any_step_of_a_refetch_sends_an_app_the_newest_object_under_the_same_key() {
    // A call that was sent before is repeated, with the newest object.
    for blow in [
        Blow::InFlight,
        Blow::At("refetch.after_answer"),
        Blow::At("http.after_answer"),
        Blow::At("http.after_settle"),
    ] {
        let object = Object::new(blow == Blow::InFlight);
        let app = App::new(|_| 200);
        let house = house(&object.api, &format!("http = \"{}\"", app.url()));
        let server = dies_with_an_event(blow, &object, &house);
        until_status(&server, "evt_1", "processed");
        server.stop();
        let (old, new) = (r#"{"version":1}"#, r#"{"version":2}"#);
        let objects: Vec<_> = app.calls().into_iter().filter_map(|call| call.current).collect();
        let expected = match blow {
            Blow::At("http.after_settle") => vec![old],
            Blow::At("http.after_answer") => vec![old, new],
            Blow::InFlight | Blow::At(_) => vec![new],
        };
        assert_eq!(objects, expected, "{blow:?}");
        assert_eq!(app.ledger().len(), 1, "{blow:?}: one key");
        let fetched = if blow == Blow::At("http.after_settle") { 1 } else { 2 };
        assert_eq!(object.api.requests().len(), fetched, "{blow:?}");
    }
}

#[test]
fn a_sigkill_at_any_step_of_a_refetch_gives_a_pull_worker_the_newest_object() {
    // The object is fetched within the worker's own request, which ends with the server. The lease
    // of the pull worker must end first. To save time, both cases run at once.
    std::thread::scope(|scope| {
        for blow in [Blow::InFlight, Blow::At("refetch.after_answer")] {
            scope.spawn(move || dies_with_a_claim(blow));
        }
    });
}

fn dies_with_a_claim(blow: Blow) {
    let object = Object::new(blow == Blow::InFlight);
    // The config ends with the table `refetch`, so the appended timeout is that of the fetch.
    let config = config(&object.api, "pull = true\nlease = \"6s\"");
    let house = House::new(&format!("{config}timeout = \"3s\"\n")).env("API_AUTH", API_AUTH);
    let server = blow.start(&house);
    send(&server, "evt_1", "po_1", 1);
    let ask = json!({ "source": "stripe", "handler": "state", "limit": 1, "wait": "60s" });
    let mut worker = Wire::connect(server.admin);
    worker.write(post(server.admin, "/api/v1/claims", &ask));
    blow.falls(&object, server);
    assert!(worker.try_answer().is_none(), "{blow:?}: a claim of a server that is dead");
    let server = house.start();
    let claimed = server.admin_post("/api/v1/claims", &ask).json();
    let item = &claimed["items"][0];
    assert_eq!(item["current"], json!({ "version": 2 }), "{blow:?}: {claimed}");
    let path = format!("/api/v1/claims/{}/complete", item["job"].as_str().unwrap());
    let done = server.admin_post(&path, &json!({ "fence": item["fence"] }));
    assert_eq!(done.status, 200, "{blow:?}: {done:?}");
    until_status(&server, "evt_1", "processed");
    server.stop();
    assert_eq!(object.api.requests().len(), 2, "{blow:?}");
}
