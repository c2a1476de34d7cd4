//! Several nodes on one PostgreSQL, without faults: each event once, whichever node its copies
//! reach.

use std::sync::Barrier;

use crate::support::app::App;
use crate::support::nodes::{self, Database, SECRET, Senders, wait};
use crate::support::{Answer, FOREVER, House, Sender, Server, until};
use serde_json::json;

/// `count` nodes with the same config.
fn start(database: &Database, count: usize, handlers: &str) -> Vec<(House, Server)> {
    let houses: Vec<House> = (0..count).map(|_| database.house("", handlers)).collect();
    let started: Vec<Server> = std::thread::scope(|scope| {
        let starting: Vec<_> = houses.iter().map(|house| scope.spawn(|| house.start())).collect();
        starting.into_iter().map(|one| one.join().unwrap()).collect()
    });
    houses.into_iter().zip(started).collect()
}

/// Starts a server, and returns it with its config and directory.
fn begun(house: House) -> (House, Server) {
    let server = house.start();
    (house, server)
}

fn the_same_copies_to_all_at_once(count: usize) {
    const EVENTS: usize = 20;
    const COPIES: usize = 50;
    let database = Database::shared("copies");
    let nodes = start(&database, count, nodes::ROW_AND_SUM);
    let senders = Senders::to(nodes.iter().map(|(_, node)| node));
    let sender = Sender::stripe(SECRET);
    let requests: Vec<Vec<u8>> = (0..EVENTS).map(|n| sender.event(&format!("evt_{n}"))).collect();
    let together = Barrier::new(COPIES);
    let answers: Vec<Vec<Answer>> = std::thread::scope(|scope| {
        let copies: Vec<_> = (0..COPIES)
            .map(|copy| {
                let (requests, together) = (&requests, &together);
                let mut wire = nodes[copy % count].1.wire();
                scope.spawn(move || {
                    let one = |request: &Vec<u8>| {
                        together.wait();
                        wire.try_ask(request).expect("an answer")
                    };
                    requests.iter().map(one).collect()
                })
            })
            .collect();
        copies.into_iter().map(|copy| copy.join().unwrap()).collect()
    });
    let mut accepted = 0;
    for copy in &answers {
        for (event, answer) in copy.iter().enumerate() {
            assert_eq!(answer.status, 200, "{answer:?}");
            accepted += usize::from(answer.decision() == "accepted");
            senders.heard(&format!("evt_{event}"), answer);
        }
    }
    assert_eq!(accepted, EVENTS, "each is accepted by one node, and once");
    senders.one_id_each(EVENTS);
    database.all_processed(&nodes[0].1, EVENTS);
    database.is_once_each(EVENTS);
    assert_eq!(database.number("SELECT balance FROM account"), EVENTS as i64);
    // Afterwards every node gives the same answer for each event.
    for (_, node) in &nodes {
        for (event, request) in requests.iter().enumerate() {
            let answer = node.ask(request);
            answer.is("duplicate");
            assert_eq!(answer.json()["status"], "processed", "{answer:?}");
            senders.heard(&format!("evt_{event}"), &answer);
        }
    }
    senders.one_id_each(EVENTS);
    for (_, node) in nodes {
        node.stop();
    }
    database.is_once_each(EVENTS);
}

#[test]
fn fifty_copies_of_each_event_to_two_nodes_at_once_have_one_effect() {
    // All copies of one event leave at the same moment, half of them to each node.
    the_same_copies_to_all_at_once(2);
}

#[test]
fn fifty_copies_of_each_event_to_four_nodes_at_once_have_one_effect() {
    the_same_copies_to_all_at_once(4);
}

#[test]
fn a_copy_at_another_node_waits_for_the_outcome_and_gets_the_stored_answer() {
    // The copy arrives while node A works on the event. Node B gets no notification when that work
    // ends.
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let app = App::new(move |_| {
        gate.lock().unwrap().recv().unwrap();
        200
    });
    let database = Database::shared("sync");
    let handler = format!(
        "mode = \"sync\"\nsync_timeout = \"{wait}s\"\n\
         [sources.stripe.handlers.call]\ntimeout = \"{wait}s\"\nhttp = \"{}\"\n",
        app.url(),
        wait = FOREVER.as_secs()
    );
    let a = begun(database.house("", &handler));
    let b = begun(database.house("roles = [\"ingress\", \"admin\"]", &handler));
    let request = Sender::stripe(SECRET).event("evt_1");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| a.1.ask(&request));
        app.wait_for(1);
        let copies: Vec<_> = [&a, &b, &b].map(|node| scope.spawn(|| node.1.ask(&request))).into();
        // The copies wait before the app answers.
        until("the copies are waiting", || {
            let event = a.1.admin_get("/api/v1/events/evt_1").json();
            (event["arrival_count"].as_u64() == Some(4)).then_some(())
        });
        assert!(copies.iter().all(|copy| !copy.is_finished()), "it was answered before the work");
        go.send(()).unwrap();
        let first = first.join().unwrap();
        assert_eq!((first.status, first.json()["status"].clone()), (200, json!("processed")));
        for copy in copies {
            let copy = copy.join().unwrap();
            copy.is("duplicate");
            assert_eq!(copy.json()["status"], "processed", "{copy:?}");
            assert_eq!(copy.id(), first.id());
            assert_eq!(copy.json()["result"], first.json()["result"]);
        }
    });
    assert_eq!(app.calls().len(), 1);
    // Later copies get the same answer from either node.
    for (_, node) in [&a, &b] {
        assert_eq!(node.ask(&request).json()["status"], "processed");
    }
    assert_eq!(app.calls().len(), 1);
}

#[test]
fn an_ingress_a_worker_and_an_admin_node_work_together() {
    // No node could process an event alone: each has only one role.
    const EVENTS: usize = 50;
    let database = Database::shared("roles");
    let node = |role: &str| {
        let house = database.house(&format!("roles = [\"{role}\"]"), nodes::ROW_AND_SUM);
        let server = house.spawn();
        let ready = server.stdout.wait_for("hapax ready:");
        (house, server, ready)
    };
    let (_ingress_house, mut ingress, said) = node("ingress");
    assert!(said.contains("ingress http") && !said.contains("admin"), "{said}");
    ingress.ingress = address(&said);
    let senders = Senders::to([&ingress]);
    senders.send(4, 0..EVENTS, || ());
    // The events are accepted, and no worker runs yet.
    assert_eq!(database.number("SELECT count(*) FROM hapax.event"), EVENTS as i64);
    assert!(database.effects().is_empty());
    let (_worker_house, worker, said) = node("worker");
    assert!(said.ends_with("worker"), "{said}");
    let (_admin_house, mut admin, said) = node("admin");
    assert!(said.contains("admin http") && !said.contains("ingress"), "{said}");
    admin.admin = address(&said);
    database.all_processed(&admin, EVENTS);
    database.is_once_each(EVENTS);
    assert_eq!(admin.admin_get("/readyz").status, 200);
    let event = admin.admin_get("/api/v1/events/evt_7").json();
    assert_eq!(event["status"], "processed", "{event}");
    // An operator's replay reaches the worker through the database.
    let jobs = event["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 1, "{event}");
    let replayed = admin.admin_post("/api/v1/events/evt_7/replay", &json!({ "force": true }));
    assert_eq!(replayed.status, 200, "{replayed:?}");
    until("it ran once more", || (database.effects().get("evt_7") == Some(&2)).then_some(()));
    for node in [ingress, worker, admin] {
        node.stop();
    }
}

/// The one address in a line.
fn address(ready: &str) -> std::net::SocketAddr {
    ready.rsplit("//").next().unwrap().trim().parse().unwrap()
}

#[test]
fn an_id_with_a_nul_among_good_ones_is_answered_as_sqlite_answers_it() {
    // Text in PostgreSQL cannot contain a NUL; a NUL in a statement would fail its whole batch.
    const GOOD: usize = 63;
    let database = Database::shared("nul");
    let (_house, node) = begun(database.house("", nodes::ROW));
    let embedded = House::new(&nodes::config("", ""));
    let (_embedded_house, embedded) = begun(embedded);
    let sender = Sender::stripe(SECRET);
    let good: Vec<Vec<u8>> = (0..GOOD).map(|n| sender.event(&format!("evt_{n}"))).collect();
    let in_id = sender.request(r#"{"id":"evt_\u0000x","type":"payout.paid","data":{}}"#);
    let in_type = sender.request(r#"{"id":"evt_type","type":"pay\u0000out","data":{}}"#);
    let in_data = sender.request(r#"{"id":"evt_data","type":"payout.paid","data":"\u0000"}"#);
    let raw = sender.request(b"{\"id\":\"evt_raw\",\"type\":\"payout.paid\",\"data\":\"\0\"}");
    let odd = [in_id, in_type, in_data, raw].map(|request| request.bytes());
    let together = Barrier::new(GOOD + odd.len());
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let all: Vec<_> = good
            .iter()
            .chain(&odd)
            .map(|request| {
                let (mut wire, together) = (node.wire(), &together);
                scope.spawn(move || {
                    together.wait();
                    wire.try_ask(request).expect("an answer")
                })
            })
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let (kept, judged) = answers.split_at(GOOD);
    for answer in kept {
        answer.is("accepted");
    }
    for (request, answer) in odd.iter().zip(judged) {
        let otherwise = embedded.ask(request);
        assert_eq!(answer.status, otherwise.status, "{answer:?} and {otherwise:?}");
        assert_eq!(answer.header("hapax-decision"), otherwise.header("hapax-decision"));
        assert!(answer.status < 500, "{answer:?}");
    }
    assert_eq!(judged[0].status, 400, "{:?}", judged[0]);
    judged[2].is("accepted");
    let accepted = answers.iter().filter(|answer| answer.status == 200).count();
    database.all_processed(&node, accepted);
    database.is_once_each(accepted);
}

#[test]
fn a_server_starts_on_the_printed_schema_applied_by_hand() {
    // If the server may not migrate, operators run the printed SQL themselves, so it must be
    // complete.
    let server = wait(hapax_sim::Postgres::shared());
    let Some(psql) = server.program("psql") else {
        return crate::support::skip("the schema by hand", "no psql here");
    };
    let by_hand = |database: &Database, sql: &str| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("steps.sql");
        std::fs::write(&file, sql).unwrap();
        let ran = std::process::Command::new(&psql)
            .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f"])
            .arg(&file)
            .arg(&database.url)
            .output()
            .unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    };
    let hapax = |args: &[&str]| crate::common::hapax(args).run();
    let database = Database::shared("by_hand");
    let of = ["--database-url", &database.url];
    let status = hapax(&["migrate", "status", of[0], of[1]]);
    assert_eq!(status.code, 1, "{status:?}");
    assert!(status.stdout.lines().all(|line| line.ends_with("missing")), "{status:?}");
    let printed = hapax(&["sql", "schema"]);
    assert_eq!(printed.code, 0, "{printed:?}");
    by_hand(&database, &printed.stdout);
    let status = hapax(&["migrate", "status", of[0], of[1]]);
    assert_eq!(status.code, 0, "{status:?}");
    assert!(status.stdout.lines().all(|line| line.ends_with("applied")), "{status:?}");
    let taken = "SELECT max(at)::text FROM hapax.migration";
    let before = database.execute(taken);
    let (_house, node) = begun(database.house("", nodes::ROW));
    Senders::to([&node]).send(2, 0..10, || ());
    database.all_processed(&node, 10);
    assert_eq!(database.execute(taken), before, "the server migrated after all");
    assert!(!node.stop().contains("applied migration"));
    // `migrate up` leaves the same schema.
    let other = Database::empty("by_up");
    let up = hapax(&["migrate", "up", "--database-url", &other.url]);
    assert_eq!((up.code, &up.stdout), (0, &status.stdout), "{up:?}");
    let again = hapax(&["migrate", "up", "--database-url", &other.url]);
    assert_eq!((again.code, &again.stdout), (0, &up.stdout), "{again:?}");
    let shape = "SELECT string_agg(c.relname || '.' || a.attname || ':' || a.atttypid::regtype, ',' \
                 ORDER BY c.relname, a.attname) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid \
                 WHERE c.relnamespace = 'hapax'::regnamespace AND a.attnum > 0 \
                 AND c.relname NOT LIKE 'body\\_2%'";
    assert_eq!(other.execute(shape), database.execute(shape));
    // `once` alone is enough for users who want nothing else.
    let alone = Database::empty("once");
    let printed = hapax(&["sql", "once"]);
    by_hand(&alone, &printed.stdout);
    let once = "SELECT hapax.once('refunds', 're_1')::text";
    assert_eq!(alone.execute(once), [Some("true".to_owned())]);
    assert_eq!(alone.execute(once), [Some("false".to_owned())]);
    // `once` alone does not block a full migration later.
    let up = hapax(&["migrate", "up", "--database-url", &alone.url]);
    assert_eq!(up.code, 0, "{up:?}");
    assert_eq!(alone.execute(once), [Some("false".to_owned())], "a key was forgotten");
}

#[test]
fn a_nul_in_a_request_to_the_admin_side_is_refused_on_postgres_too() {
    let database = Database::shared("nul");
    let (_house, server) = begun(database.house("", nodes::ROW));
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    crate::support::no_nul_is_taken(&server);
}
