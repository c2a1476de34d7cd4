//! A Redis in front of the shared database that is emptied, stopped, killed, restored from an old
//! snapshot, or returns wrong data. The answers stay the same, each event has one effect, no answer waits for
//! Redis, and there are few log lines.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::nodes::{self, Database, SECRET, Senders, wait};
use crate::support::{House, Sender, Server, until};
use hapax_core::{EventKey, SourceName, Tenant};
use hapax_sim::{Redis, RedisReply};

/// The time limit of an answer. Even on a busy machine no answer takes this long, so a slower
/// answer has waited for Redis.
const ACK_MAX: Duration = Duration::from_secs(10);

/// A node with this Redis in front.
fn node(database: &Database, redis: &Redis) -> (House, Server) {
    let house = database.house(&format!("redis_url = \"{}\"", redis.url()), nodes::ROW);
    let server = house.start();
    (house, server)
}

/// Sends requests until the node is connected to Redis: it connects in the background.
fn connected(server: &Server) {
    until("Redis answers", || {
        server.ask(Sender::stripe(SECRET).event("evt_0"));
        server.stderr.text().contains("connected to Redis").then_some(())
    });
}

/// The name of an event's entry in Redis.
fn name_of(event_id: &str) -> Vec<u8> {
    let key = EventKey {
        tenant: Tenant::default(),
        source: SourceName::new("stripe"),
        event_id: event_id.into(),
    };
    [b"hapax:".as_slice(), &key.hash().0].concat()
}

pub(super) fn get(redis: &Redis, event_id: &str) -> Option<Vec<u8>> {
    match wait(redis.command(&[b"GET".to_vec(), name_of(event_id)])) {
        RedisReply::Text(value) => Some(value),
        RedisReply::Nothing => None,
        other => panic!("{other:?}"),
    }
}

fn plant(redis: &Redis, event_id: &str, value: &[u8]) {
    let set = [b"SET".to_vec(), name_of(event_id), value.to_vec()];
    assert_eq!(wait(redis.command(&set)), RedisReply::Text(b"OK".to_vec()));
}

/// Sends copies until Redis has entries for all of these events. An entry that a busy Redis missed
/// is written again by a node that queries the database, not by a node that answers from memory.
pub(super) fn cached(database: &Database, redis: &Redis, events: std::ops::Range<usize>) {
    let sender = Sender::stripe(SECRET);
    until("Redis has all entries", || {
        let missing: Vec<_> =
            events.clone().filter(|n| get(redis, &format!("evt_{n}")).is_none()).collect();
        if missing.is_empty() {
            return Some(());
        }
        let (_house, forgetful) = node(database, redis);
        until("it tried to connect", || forgetful.stderr.text().contains("Redis").then_some(()));
        for n in missing {
            forgetful.ask(sender.event(&format!("evt_{n}"))).is("duplicate");
        }
        forgetful.stop();
        None
    });
}

/// The number of log lines about Redis.
fn words(said: &str) -> usize {
    said.lines().filter(|line| line.contains("Redis")).count()
}

#[test]
fn a_redis_that_is_emptied_ten_times_a_second_changes_no_answer() {
    // An entry that one node has just written disappears before or while another node reads it.
    const EVENTS: usize = 600;
    let database = Database::shared("flushed");
    let redis = wait(Redis::start());
    let nodes = [node(&database, &redis), node(&database, &redis)];
    let servers = || nodes.iter().map(|(_, server)| server);
    let senders = Senders::to(servers());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                wait(redis.flush_all());
                std::thread::park_timeout(Duration::from_millis(100));
            }
        });
        // All events are sent twice, so that most are duplicates that Redis may or may not know.
        senders.send(6, 0..EVENTS, || ());
        senders.send(6, 0..EVENTS, || ());
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(senders.refused(), 0);
    senders.one_id_each(EVENTS);
    database.all_processed(&nodes[0].1, EVENTS);
    database.is_once_each(EVENTS);
    for (_, server) in nodes {
        let said = server.stop();
        assert!(words(&said) < 10, "{said}");
    }
}

#[test]
fn a_redis_that_stops_or_dies_under_load_delays_no_answer_for_long() {
    // A stopped Redis keeps its connections and answers nothing; a killed one refuses connections;
    // then it is back.
    const EVENTS: usize = 500;
    let database = Database::shared("stopped");
    let redis = wait(Redis::start());
    let (_house, server) = node(&database, &redis);
    connected(&server);
    let senders = Senders::to([&server]);
    let sender = Sender::stripe(SECRET);
    let prompt = |what: &str| {
        for n in 0..20 {
            let asked = Instant::now();
            let answer = server.ask(sender.event(&format!("evt_{n}")));
            assert_eq!(answer.status, 200, "{what}: {answer:?}");
            assert!(asked.elapsed() < ACK_MAX, "{what}: {:?}", asked.elapsed());
        }
    };
    senders.send(4, 0..EVENTS, || {
        for round in 0..2 {
            senders.until_acked((round + 1) * EVENTS / 6);
            wait(redis.pause());
            prompt("stopped");
            wait(redis.resume());
            prompt("going on");
            wait(redis.kill());
            prompt("killed");
            wait(redis.start_again());
            prompt("back");
        }
    });
    assert_eq!(senders.refused(), 0);
    senders.one_id_each(EVENTS);
    // A logged failure is followed by a line when Redis is back.
    let mut events = EVENTS;
    let mut until_said = |words: &str, times: usize| {
        until(words, || {
            server.ask(sender.event(&format!("evt_{events}"))).is("accepted");
            events += 1;
            (server.stderr.text().matches(words).count() >= times).then_some(())
        });
    };
    wait(redis.kill());
    until_said("Redis failed", 1);
    wait(redis.start_again());
    until_said("connected to Redis", 2);
    database.all_processed(&server, events);
    database.is_once_each(events);
    let said = server.stop();
    assert!(words(&said) < 30, "{} lines of Redis:\n{said}", words(&said));
}

#[test]
fn forged_entries_in_redis_are_ignored() {
    // Redis returns another event's entry under this key, random bytes or a truncated entry, for
    // known events and for one that never arrived.
    const EVENTS: usize = 8;
    let database = Database::shared("planted");
    let redis = wait(Redis::start());
    let (_house, first) = node(&database, &redis);
    connected(&first);
    let senders = Senders::to([&first]);
    senders.send(2, 0..EVENTS, || ());
    database.all_processed(&first, EVENTS);
    cached(&database, &redis, 0..EVENTS);
    let good: Vec<Vec<u8>> =
        (0..EVENTS).map(|n| get(&redis, &format!("evt_{n}")).unwrap()).collect();
    for n in 1..EVENTS {
        let value = match n % 4 {
            0 => vec![0xff; 200],
            1 => good[(n + 1) % EVENTS].clone(),
            2 => good[n][..good[n].len() - 1].to_vec(),
            _ => Vec::new(),
        };
        plant(&redis, &format!("evt_{n}"), &value);
    }
    plant(&redis, "evt_new", &good[3]);
    // A node with an empty memory, so that it queries Redis.
    let (_other_house, second) = node(&database, &redis);
    connected(&second);
    let sender = Sender::stripe(SECRET);
    second.ask(sender.event("evt_new")).is("accepted");
    for n in 0..EVENTS {
        let event = format!("evt_{n}");
        let answer = second.ask(sender.event(&event));
        answer.is("duplicate");
        assert_eq!(answer.json()["status"], "processed", "{answer:?}");
        senders.heard(&event, &answer);
    }
    senders.one_id_each(EVENTS);
    database.all_processed(&second, EVENTS + 1);
    database.is_once_each(EVENTS + 1);
    first.stop();
    second.stop();
}

#[test]
fn entries_of_an_older_epoch_in_redis_are_ignored() {
    // The database was restored from a backup without an event, and Redis, from its own old
    // snapshot, still calls it a duplicate: the sender's retries would have no effect.
    const EVENTS: usize = 10;
    let database = Database::shared("restored");
    let redis = wait(Redis::start());
    let (_house, first) = node(&database, &redis);
    connected(&first);
    Senders::to([&first]).send(1, 0..EVENTS, || ());
    database.all_processed(&first, EVENTS);
    cached(&database, &redis, 0..EVENTS);
    assert_eq!(wait(redis.command(&["SAVE"])), RedisReply::Text(b"OK".to_vec()));
    first.stop();
    database.execute("DELETE FROM hapax.job; DELETE FROM hapax.event; DELETE FROM ledger");
    // As long as the epoch is the same, Redis is trusted: for events that are in no database, each
    // sent once, only Redis can answer "duplicate". (Not always: if Redis does not answer in time,
    // the database decides, and a busy machine may be late for all of them.)
    let sender = Sender::stripe(SECRET);
    until("Redis is believed", || {
        let (_house, second) = node(&database, &redis);
        connected(&second);
        let believed = (1..EVENTS).filter(|n| {
            let answer = second.ask(sender.event(&format!("evt_{n}")));
            assert_eq!(answer.status, 200, "{answer:?}");
            answer.decision() == "duplicate"
        });
        let believed = believed.count();
        second.stop();
        database.execute("DELETE FROM hapax.job; DELETE FROM hapax.event; DELETE FROM ledger");
        (believed > 0).then_some(())
    });
    database.execute("UPDATE hapax.epoch SET counter = counter + 1");
    wait(redis.kill());
    wait(redis.start_again());
    assert!(get(&redis, "evt_2").is_some(), "the snapshot was not restored");
    let (_house, third) = node(&database, &redis);
    connected(&third);
    let accepted = third.ask(sender.event("evt_2"));
    accepted.is("accepted");
    database.all_processed(&third, 2);
    let again = third.ask(sender.event("evt_2"));
    again.is("duplicate");
    assert_eq!(again.id(), accepted.id());
    assert_eq!(database.effects().get("evt_2"), Some(&1));
    third.stop();
}

#[test]
fn doctor_checks_redis_which_may_be_missing_and_never_prints_its_password() {
    // Doctor meets a Redis that runs, one that refuses the password, and one that does not run.
    let database = Database::shared("redis_doctor");
    let redis = wait(Redis::start());
    let house = database.house("", "");
    let config = house.config_file().display().to_string();
    let doctor = |url: &str| {
        let run =
            crate::common::hapax(&["doctor", "--json", "--config", &config, "--redis-url", url])
                .run();
        assert!(!format!("{run:?}").contains("hunter2"), "{run:?}");
        let found = run.stdout.lines().map(|line| serde_json::from_str(line).unwrap());
        let found = found.filter(|found: &serde_json::Value| found["check"] == "redis");
        let findings: Vec<_> = found.collect();
        assert_eq!(findings.len(), 1, "{run:?}");
        let text = |key: &str| findings[0][key].as_str().unwrap().to_owned();
        (run.code, text("level"), text("note"))
    };
    // On a busy machine Redis may be slower than a lookup waits, which is reported as well.
    let note = until("Redis is quick", || {
        let (code, level, note) = doctor(&redis.url());
        assert_eq!(code, 0, "{note}");
        (level == "ok").then_some(note)
    });
    let version = note.split("Redis ").nth(1).expect("its version");
    assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{note}");
    assert!(note.contains(" ms") && note.contains("optional"), "{note}");
    let refused = format!("redis://u:hunter2@127.0.0.1:{}/", redis.port());
    wait(redis.kill());
    for url in [refused.as_str(), "redis://:hunter2@127.0.0.1:9/"] {
        let (code, level, note) = doctor(url);
        assert_eq!((code, level.as_str()), (0, "warn"), "{note}");
        assert!(note.contains("optional"), "{note}");
    }
    wait(redis.start_again());
    let (code, level, note) = doctor(&refused);
    assert_eq!((code, level.as_str()), (0, "warn"), "{note}");
}

#[test]
fn lookups_in_redis_are_counted() {
    // An operator wants to know whether Redis is useful, and whether it fails.
    let database = Database::shared("redis_counted");
    let redis = wait(Redis::start());
    let (_house, first) = node(&database, &redis);
    connected(&first);
    Senders::to([&first]).send(1, 0..3, || ());
    database.all_processed(&first, 3);
    cached(&database, &redis, 0..3);
    let counted = |server: &Server, outcome: &str| {
        let label = format!("outcome=\"{outcome}\"");
        server.metric("hapax_redis_answers_total", &[&label])
    };
    let sender = Sender::stripe(SECRET);
    // Each node looks up an event once and then remembers it. If Redis was too slow, the test tries
    // again with another node.
    let (_other, second) = until("a duplicate that only Redis knows is a hit", || {
        let (house, second) = node(&database, &redis);
        connected(&second);
        for n in 1..3 {
            second.ask(sender.event(&format!("evt_{n}")));
        }
        (counted(&second, "hit") >= 1.0).then_some((house, second))
    });
    let count = |outcome: &str| counted(&second, outcome);
    let mut new = 0;
    until("a new one is a miss", || {
        new += 1;
        second.ask(sender.event(&format!("new_{new}"))).is("accepted");
        (count("miss") >= 1.0).then_some(())
    });
    let before = count("failed");
    wait(redis.kill());
    second.ask(sender.event("while it is away")).is("accepted");
    assert!(count("failed") > before);
}
