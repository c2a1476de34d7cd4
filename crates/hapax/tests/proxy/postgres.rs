//! The same proxy on several nodes of one PostgreSQL, and apps that store their answer in their own
//! transaction.

use std::sync::Barrier;

use crate::support::charges::{Charge, api, is_replay, kept, proxy};
use crate::support::nodes::Database;
use crate::support::upstream::{Asked, Reply, Upstream};
use crate::support::{Answer, House, Server};

fn node(database: &Database, upstream: &str, keys: &str) -> House {
    House::new(&format!("database_url = \"{}\"\n{}", database.url, proxy(upstream, keys)))
}

#[test]
fn fifty_copies_over_two_nodes_are_one_charge() {
    // Half of the copies go to each node at the same moment; only the database decides.
    const COPIES: usize = 50;
    const ROUNDS: usize = 4;
    let app = Upstream::counting();
    let database = Database::empty("proxy");
    let houses = [node(&database, &app.url(), ""), node(&database, &app.url(), "")];
    let servers = houses.each_ref().map(House::start);
    let proxies = servers.each_ref().map(api);
    for round in 1..=ROUNDS {
        let key = format!("key-{round}");
        let start = Barrier::new(COPIES);
        let answers: Vec<Answer> = std::thread::scope(|scope| {
            let (start, key) = (&start, key.as_str());
            let copy = |n: usize| {
                scope.spawn(move || {
                    start.wait();
                    Charge::with_key(key).send(proxies[n % 2])
                })
            };
            let copies: Vec<_> = (0..COPIES).map(copy).collect();
            copies.into_iter().map(|it| it.join().unwrap()).collect()
        });
        let first: Vec<_> =
            answers.iter().filter(|it| it.status == 201 && !is_replay(it)).collect();
        assert_eq!(first.len(), 1, "{answers:?}");
        for other in answers.iter().filter(|it| it.status != 409) {
            assert_eq!(kept(other), kept(first[0]));
        }
        for at in proxies {
            let replay = Charge::with_key(&key).send(at);
            assert!(is_replay(&replay) && kept(&replay) == kept(first[0]), "{replay:?}");
        }
        assert_eq!(app.effects().len(), round);
    }
    // No stored answer is lost with a killed node.
    let [gone, left] = servers;
    gone.kill();
    assert!(is_replay(&Charge::with_key("key-1").send(api(&left))));
    left.stop();
}

/// Writes the charge and the answer in one transaction of the app, as docs/idempotency.md shows.
fn charge_and_finish(database: &Database, asked: &Asked) {
    let quoted = |name: &str| asked.header(name).unwrap().replace('\'', "''");
    let (scope, key, fence) =
        (quoted("hapax-scope"), quoted("idempotency-key"), asked.number("hapax-fence"));
    database.execute(&format!(
        "BEGIN;\
         INSERT INTO charges VALUES ('{key}');\
         SELECT hapax.finish('{scope}', '{key}', {fence}, 201, \
                '{{\"content-type\": \"application/json\", \"x-charge\": \"7\"}}', '{{\"id\":7}}');\
         COMMIT"
    ));
}

fn finishing_app(after: fn() -> Reply) -> (Database, Upstream, House, Server) {
    let database = Database::empty("proxy");
    database.execute("CREATE TABLE charges (key text)");
    let url = Database { url: database.url.clone() };
    let app = Upstream::new(move |asked| {
        charge_and_finish(&url, asked);
        after()
    });
    let house = node(&database, &app.url(), "lease = \"10m\"");
    let server = house.start();
    (database, app, house, server)
}

#[test]
fn an_answer_stored_in_the_app_s_own_transaction_is_sent() {
    // The app dies before it answers, answers something else, or is behind a gateway that timed
    // out. The charge and its answer were one commit, so the outcome is known.
    let ways: [fn() -> Reply; 3] = [
        || Reply::Cut,
        || Reply::created("something else"),
        || Reply::Answer(504, String::new(), b"late".to_vec()),
    ];
    for way in ways {
        let (database, app, _house, server) = finishing_app(way);
        let charge = Charge::with_key("key-'1'");
        let first = charge.send(api(&server));
        assert_eq!((first.status, first.text().as_str()), (201, "{\"id\":7}"), "{first:?}");
        assert_eq!(first.header("x-charge"), Some("7"));
        let again = charge.send(api(&server));
        assert!(is_replay(&again) && kept(&again) == kept(&first), "{again:?}");
        assert_eq!(app.effects().len(), 1);
        assert_eq!(database.number("SELECT count(*) FROM charges"), 1);
        server.stop();
    }
}

#[test]
fn an_app_whose_proxy_died_keeps_its_answer_for_the_retry() {
    // Hapax is killed while the app works; the app commits, and its answer reaches no client.
    let database = Database::empty("proxy");
    database.execute("CREATE TABLE charges (key text)");
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let url = Database { url: database.url.clone() };
    let app = Upstream::new(move |asked| {
        gate.lock().unwrap().recv().unwrap();
        charge_and_finish(&url, asked);
        Reply::Cut
    });
    let house = node(&database, &app.url(), "lease = \"10m\"");
    let server = house.start();
    let charge = Charge::with_key("key-1");
    std::thread::scope(|scope| {
        let (at, charge) = (api(&server), &charge);
        let client = scope.spawn(move || charge.try_send(at));
        app.wait_for(1);
        server.kill();
        assert!(client.join().unwrap().is_none());
    });
    let server = house.start();
    let at = api(&server);
    assert_eq!(charge.send(at).status, 409);
    go.send(()).unwrap();
    let replay = crate::support::until("the app has committed", || {
        let answer = charge.send(at);
        (answer.status != 409).then_some(answer)
    });
    assert!(is_replay(&replay) && replay.text() == "{\"id\":7}", "{replay:?}");
    assert_eq!(app.effects().len(), 1);
    assert_eq!(database.number("SELECT count(*) FROM charges"), 1);
    server.stop();
}

#[test]
fn only_ingress_nodes_open_a_proxy() {
    let app = Upstream::counting();
    let database = Database::empty("proxy");
    let config = proxy(&app.url(), "");
    let worker = House::new(&format!(
        "database_url = \"{}\"\nroles = [\"worker\", \"admin\"]\n{config}",
        database.url
    ));
    let server = worker.spawn();
    server.stdout.wait_for("hapax ready:");
    assert!(!server.stdout.text().contains("hapax proxy"), "{}", server.stdout.text());
    server.stop();
}
