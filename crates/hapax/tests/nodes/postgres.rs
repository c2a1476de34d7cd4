//! Faults of PostgreSQL under the load of two nodes: killed sessions and servers, a promoted
//! standby, a pooler in between, and passwords that must not be printed. No node is restarted.

use std::time::{Duration, Instant};

use crate::support::nodes::{self, Database, SECRET, Senders, wait};
use crate::support::{Answer, House, Sender, Server, until};
use hapax_sim::{PgBouncer, Postgres, Redis, TcpProxy, TrafficMode};

/// A handler with short leases: jobs lost with the database are retried within the test. The handler has more
/// attempts than any job needs.
const HANDLER: &str = "[sources.stripe.handlers.fee]\ntimeout = \"1s\"\nlease = \"2s\"\n\
     retry = [\"0s\", \"0s\", \"0s\", \"1s\", \"1s\", \"1s\", \"2s\", \"2s\", \"2s\", \"5s\", \"5s\", \"5s\"]\n\
     sql = \"INSERT INTO ledger VALUES (:event_id, 'fee', :attempt)\"\n";

/// How long a node may take after the database is back: the documentation promises five seconds,
/// and a busy machine needs more.
const BACK: Duration = Duration::from_secs(60);

/// Two nodes on one database.
fn two(url: &str) -> ([House; 2], [Server; 2]) {
    let config = format!("database_url = \"{url}\"\n{}", nodes::config("", HANDLER));
    let houses = [0, 1].map(|_| House::new(&config));
    let servers = [houses[0].start(), houses[1].start()];
    (houses, servers)
}

/// Waits until every node accepts events again, and prints how long that took.
#[track_caller]
fn takes_events_again(nodes: &[Server], round: usize) {
    let since = Instant::now();
    let sender = Sender::stripe(SECRET);
    for node in nodes {
        until("it takes events again", || {
            let answer = node.ask(sender.event(&format!("evt_back_{round}")));
            (answer.status == 200).then_some(())
        });
        until("it says so", || (node.admin_get("/readyz").status == 200).then_some(()));
    }
    let took = since.elapsed();
    assert!(took < BACK, "it took {took:?}");
}

/// Sends events while the faults of `blows` happen, and checks the result at the end.
fn under_load(
    database: &Database,
    nodes: &[Server],
    events: usize,
    blows: usize,
    mut blow: impl FnMut(usize),
) {
    let senders = Senders::to(nodes);
    senders.send(6, 0..events, || {
        for round in 0..blows {
            senders.until_acked((round + 1) * events / (blows + 2));
            blow(round);
            takes_events_again(nodes, round);
        }
    });
    senders.one_id_each(events);
    database.all_processed(&nodes[0], events + blows);
    database.is_once_each(events + blows);
    // Every acked event is in the database, under the acked id.
    for node in nodes {
        assert_eq!(node.events("source=stripe").len(), events + blows);
    }
}

#[test]
fn sessions_that_are_ended_or_crash_under_load_cost_nothing_but_time() {
    // An administrator ends all sessions, or one session gets a SIGKILL, after which PostgreSQL ends all
    // sessions and recovers.
    let server = wait(Postgres::start());
    let database = Database::on(&server, "sessions");
    let (_houses, nodes) = two(&database.url);
    under_load(&database, &nodes, 600, 4, |round| {
        wait(async {
            match round % 2 {
                0 => assert!(server.kill_backends(Some(database.name())).await > 0),
                _ => {
                    assert!(server.crash_backend().await);
                    server.wait_until_ready().await;
                }
            }
        });
    });
    for node in nodes {
        node.stop();
    }
}

#[test]
fn a_database_that_is_killed_and_comes_back_finds_its_nodes_waiting() {
    // While the database is down every answer is a 503 with Retry-After; no acked event is lost.
    let server = wait(Postgres::start());
    let database = Database::on(&server, "postmaster");
    let (_houses, nodes) = two(&database.url);
    let sender = Sender::stripe(SECRET);
    under_load(&database, &nodes, 400, 2, |round| {
        wait(server.kill_postmaster());
        for node in &nodes {
            let asked = Instant::now();
            let answer = node.ask(sender.event(&format!("evt_back_{round}")));
            assert_eq!(answer.status, 503, "{answer:?}");
            assert!(answer.header("retry-after").is_some(), "{answer:?}");
            assert!(asked.elapsed() < BACK, "{:?}", asked.elapsed());
            until("it says that it is not ready", || {
                (node.admin_get("/readyz").status == 503).then_some(())
            });
            assert_eq!(node.admin_get("/healthz").status, 200, "a restart would not help");
        }
        wait(server.start_again());
    });
    for node in nodes {
        let said = node.stop();
        // A node logs one line when the database fails and one when it is back, not one for each
        // request.
        let lines = said.lines().filter(|line| line.contains("WARN")).count();
        assert!(lines < 200, "{lines} warnings:\n{said}");
    }
}

#[test]
fn nodes_follow_a_synchronous_standby_that_is_promoted_under_load() {
    // The old primary dies during the load. Every acked event is on the new primary, and entries
    // that the nodes cached in the old epoch are no longer used.
    let primary = wait(Postgres::start());
    if !primary.can_have_standby() {
        return crate::support::skip(
            "a promoted standby",
            "this build of PostgreSQL cannot be copied",
        );
    }
    let mut database = Database::on(&primary, "followed");
    let standby = wait(primary.standby());
    let (_houses, nodes) = two(&on_either(primary.port(), standby.port(), database.name()));
    const EVENTS: usize = 400;
    let senders = Senders::to(&nodes);
    senders.send(6, 0..EVENTS, || {
        senders.until_acked(EVENTS / 3);
        wait(async {
            primary.kill_postmaster().await;
            standby.promote().await;
        });
        takes_events_again(&nodes, 0);
    });
    database.url = standby.url_for(database.name());
    senders.one_id_each(EVENTS);
    database.all_processed(&nodes[0], EVENTS + 1);
    database.is_once_each(EVENTS + 1);
    for node in nodes {
        // A node checks the epoch a few times a second, so a node that is stopped at once may not
        // have checked it.
        node.stderr.wait_for("another epoch");
        node.stop();
    }
    database.is_once_each(EVENTS + 1);
}

/// The URL of a database on two servers that asks for the one that accepts writes.
fn on_either(one: u16, other: u16, name: &str) -> String {
    format!(
        "postgres://postgres@127.0.0.1:{one},127.0.0.1:{other}/{name}?target_session_attrs=read-write"
    )
}

/// The first answer that does not ask for a retry.
#[track_caller]
fn answered(node: &Server, event: &str) -> Answer {
    let request = Sender::stripe(SECRET).event(event);
    until(&format!("{event} is answered"), || {
        let answer = node.ask(&request);
        (answer.status != 503).then_some(answer)
    })
}

#[test]
fn events_that_an_asynchronous_standby_never_got_are_new_after_its_promotion() {
    // Acked and processed events are lost with the primary, together with their effects. Both nodes
    // and Redis have them cached. The sender's retry must be new on the new primary.
    const KEPT: usize = 12;
    const EVENTS: usize = 36;
    let primary = wait(Postgres::start());
    if !primary.can_have_standby() {
        return crate::support::skip(
            "a promoted asynchronous standby",
            "this build of PostgreSQL cannot be copied",
        );
    }
    let mut database = Database::on(&primary, "lagging");
    let standby = wait(primary.asynchronous_standby());
    let redis = wait(Redis::start());
    let either = on_either(primary.port(), standby.port(), database.name());
    let keys = format!("database_url = \"{either}\"\nredis_url = \"{}\"\n", redis.url());
    let start = || {
        let house = House::new(&nodes::config(&keys, HANDLER));
        let node = house.start();
        (house, node)
    };
    let nodes = [start(), start()];
    let before = Senders::to(nodes.iter().map(|(_, node)| node));
    before.send(4, 0..KEPT, || ());
    database.all_processed(&nodes[0].1, KEPT);
    wait(standby.stop_following(&primary));
    before.send(4, KEPT..EVENTS, || ());
    before.one_id_each(EVENTS);
    database.all_processed(&nodes[0].1, EVENTS);
    database.is_once_each(EVENTS);
    // Each node now answers each of them from memory, and a node without memory could use Redis.
    for (_, node) in &nodes {
        for n in 0..EVENTS {
            let copy = answered(node, &format!("evt_{n}"));
            copy.is("duplicate");
            before.heard(&format!("evt_{n}"), &copy);
        }
    }
    before.one_id_each(EVENTS);
    super::redis::cached(&database, &redis, 0..EVENTS);
    wait(primary.kill_postmaster());
    // Memory is used for one second after the last answer of the database, and no longer.
    for (_, node) in &nodes {
        until("memory answers no more", || {
            (node.ask(Sender::stripe(SECRET).event("evt_0")).status == 503).then_some(())
        });
    }
    wait(standby.promote());
    database.url = standby.url_for(database.name());
    database.is_once_each(KEPT);
    // One more node with an empty memory: it can know the lost events only from Redis.
    let forgetful = start();
    forgetful.1.stderr.wait_for("connected to Redis");
    let all = [&nodes[0].1, &nodes[1].1, &forgetful.1];
    let after = Senders::to(all);
    for n in 0..EVENTS {
        let event = format!("evt_{n}");
        for (turn, node) in all.iter().cycle().skip(n).take(all.len()).enumerate() {
            let answer = answered(node, &event);
            match n >= KEPT && turn == 0 {
                true => answer.is("accepted"),
                false => answer.is("duplicate"),
            }
            after.heard(&event, &answer);
        }
    }
    after.one_id_each(EVENTS);
    for n in 0..KEPT {
        let event = format!("evt_{n}");
        assert_eq!(after.ids_of(&event), before.ids_of(&event), "{event} was never lost");
    }
    database.all_processed(&nodes[0].1, EVENTS);
    database.is_once_each(EVENTS);
    // Copies of finished events are duplicates of the new ones, from memory and Redis again.
    after.send(4, 0..EVENTS, || ());
    after.one_id_each(EVENTS);
    for (_, node) in nodes {
        node.stderr.wait_for("another epoch");
        node.stop();
    }
    forgetful.1.stop();
    database.is_once_each(EVENTS);
}

#[test]
fn an_asynchronous_standby_that_is_promoted_under_load_loses_what_it_never_got_and_doubles_nothing()
{
    // The standby stops receiving during the load, and the primary dies with acked events, events
    // in flight and claimed jobs. The senders then send everything again.
    const EVENTS: usize = 300;
    let primary = wait(Postgres::start());
    if !primary.can_have_standby() {
        return crate::support::skip(
            "an asynchronous standby under load",
            "this build of PostgreSQL cannot be copied",
        );
    }
    let mut database = Database::on(&primary, "behind");
    let standby = wait(primary.asynchronous_standby());
    let (_houses, nodes) = two(&on_either(primary.port(), standby.port(), database.name()));
    let before = Senders::to(&nodes);
    let seen = before.send(6, 0..EVENTS, || {
        before.until_acked(EVENTS / 4);
        wait(standby.stop_following(&primary));
        let seen = before.acked();
        before.until_acked(seen + EVENTS / 4);
        wait(async {
            primary.kill_postmaster().await;
            standby.promote().await;
        });
        // From here on no node answers for the old primary.
        nodes.iter().for_each(|node| drop(node.stderr.wait_for("another epoch")));
        seen
    });
    database.url = standby.url_for(database.name());
    let after = Senders::to(&nodes);
    after.send(6, 0..EVENTS, || ());
    after.one_id_each(EVENTS);
    database.all_processed(&nodes[0], EVENTS);
    database.is_once_each(EVENTS);
    let lost = (0..EVENTS).map(|n| format!("evt_{n}")).filter(|event| {
        let known = after.ids_of(event);
        before.ids_of(event).iter().any(|id| !known.contains(id))
    });
    assert!(lost.count() > 0, "nothing was lost, after {seen} acks had reached the standby");
    for node in nodes {
        node.stop();
    }
    database.is_once_each(EVENTS);
}

#[test]
fn a_primary_that_falls_silent_does_not_keep_nodes_from_the_promoted_standby() {
    // The primary's machine disappears without closing connections: packets vanish, connections
    // open and never answer.
    let primary = wait(Postgres::start());
    if !primary.can_have_standby() {
        return crate::support::skip(
            "a silent primary",
            "this build of PostgreSQL cannot be copied",
        );
    }
    let mut database = Database::on(&primary, "silent");
    let standby = wait(primary.standby());
    let network = wait(TcpProxy::to_port(primary.port()));
    let (_houses, nodes) = two(&on_either(network.port(), standby.port(), database.name()));
    let senders = Senders::to(&nodes);
    senders.send(2, 0..20, || ());
    network.set(TrafficMode::Hold);
    wait(async {
        primary.kill_postmaster().await;
        standby.promote().await;
    });
    database.url = standby.url_for(database.name());
    senders.send(4, 20..60, || ());
    senders.one_id_each(60);
    database.all_processed(&nodes[0], 60);
    database.is_once_each(60);
}

#[test]
fn a_pooler_in_transaction_mode_is_refused_in_words_that_help() {
    // The settings, prepared statements and locks of a session would be spread over several server sessions.
    if !PgBouncer::is_installed() {
        return crate::support::skip("a pooler in transaction mode", "no pgbouncer here");
    }
    let database = Database::shared("pooled");
    let pooler = wait(async { PgBouncer::in_front_of(Postgres::shared().await, 4).await });
    let url = pooler.url_for(database.name());
    let house = House::new(&format!("database_url = \"{url}\"\n{}", nodes::config("", HANDLER)));
    let (code, said) = house.fail();
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("pool_mode = session"), "{said}");
}

#[test]
fn a_node_speaks_tls_and_refuses_a_server_that_it_cannot_trust() {
    // The role is accepted over TLS only, and the certificate comes from a test authority.
    let (server, tls) = wait(Postgres::with_tls());
    let database = Database::on(&server, "secured");
    let at = |settings: &str| {
        let url = format!(
            "postgres://{}@localhost:{}/{}?{settings}",
            tls.role,
            server.port(),
            database.name()
        );
        House::new(&format!("database_url = \"{url}\"\n{}", nodes::config("", HANDLER)))
    };
    let house = at(&format!("sslmode=verify-full&sslrootcert={}", tls.authority_file.display()));
    let node = house.start();
    Senders::to([&node]).send(2, 0..10, || ());
    database.all_processed(&node, 10);
    let plain = "SELECT count(*) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) \
                 WHERE a.application_name LIKE 'hapax-%' AND a.application_name <> 'hapax-sim' \
                 AND NOT s.ssl";
    assert_eq!(database.number(plain), 0);
    node.stop();
    for (settings, word) in [("sslmode=disable", "pg_hba"), ("sslmode=verify-full", "sslrootcert")]
    {
        let (code, said) = at(settings).fail();
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains(word), "{settings}: {said}");
    }
}

const CANARY: &str = "hunter2-canary";

#[track_caller]
fn is_silent(what: &str, said: &str) {
    assert!(!said.contains("hunter2"), "{what} shows the password: {said}");
}

#[test]
fn a_password_is_never_printed() {
    // The password is in the config, the environment and the flags, with a server that runs, is
    // down or refuses, and with invalid URLs.
    let server = wait(Postgres::start());
    let database = Database::on(&server, "canary");
    let host = format!("127.0.0.1:{}", server.port());
    let url = format!("postgres://postgres:{CANARY}@{host}/{}", database.name());
    let redis = format!("redis://:{CANARY}@127.0.0.1:9/");
    let keys = format!(
        "database_url = \"env:PG_URL\"\nredis_url = \"{redis}\"\n[log]\nlevel = \"trace\"\n"
    );
    let house = House::new(&nodes::config(&keys, HANDLER)).env("PG_URL", &url);
    let node = house.start();
    Senders::to([&node]).send(2, 0..10, || ());
    database.all_processed(&node, 10);
    is_silent("metrics", &node.admin_get("/metrics").text());
    is_silent("an event", &node.admin_get("/api/v1/events/evt_1").text());
    wait(server.kill_postmaster());
    until("the outage is logged", || {
        let ready = node.admin_get("/readyz");
        is_silent("readyz", &ready.text());
        (ready.status == 503).then_some(())
    });
    let refused = node.ask(Sender::stripe(SECRET).event("evt_down"));
    assert_eq!(refused.status, 503);
    is_silent("a refusal", &refused.text());
    is_silent("an API's error", &node.admin_get("/api/v1/events").text());
    is_silent("alerts", &node.admin_get("/api/v1/alerts").text());
    node.signal("HUP");
    node.stderr.wait_for("reloaded configuration");
    let stdout = node.stdout.clone();
    is_silent("the log", &node.stop());
    is_silent("stdout", &stdout.text());
    // No server is reachable, at the start and for each command.
    let (code, said) = house.fail();
    assert_eq!(code, Some(3), "{said}");
    is_silent("a start without a database", &said);
    wait(server.start_again());
    for bad in [
        url.clone().replace(&host, "127.0.0.1:9"),
        url.clone().replace("/canary", "/nowhere"),
        url.clone().replace("postgres:hunter2", "nobody:hunter2"),
        format!("postgres://postgres:{CANARY}@"),
        format!("postgres://postgres:{CANARY}@{host}/x?sslmode=odd"),
        format!("postgres://postgres:{CANARY}@{host}/x?unknown=1"),
        format!("postgres:{CANARY}@{host}/x"),
        format!("postgres://{host}/x?password={CANARY}&connect_timeout=soon"),
    ] {
        for command in ["migrate", "doctor", "serve", "check-config"] {
            let run = crate::common::hapax(&[command, "--database-url", &bad])
                .in_dir(house.path())
                .env("PG_URL", &url)
                .run();
            assert_ne!(run.code, 0, "{command} {bad}: {run:?}");
            is_silent(command, &run.stdout);
            is_silent(command, &run.stderr);
        }
    }
}

#[test]
fn doctor_checks_the_database_that_nodes_share() {
    // Doctor does not check the embedded database, which is not used here, and changes nothing.
    let database = Database::empty("doctor");
    let house = database.house("", "");
    let doctor = |url: Option<&str>| {
        let config = house.config_file().display().to_string();
        let mut args = vec!["doctor", "--json", "--config", &config];
        args.extend(url.map(|url| ["--database-url", url]).into_iter().flatten());
        let run = crate::common::hapax(&args).run();
        is_silent("doctor", &run.stderr);
        let findings: Vec<serde_json::Value> =
            run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (run.code, findings)
    };
    let of = |findings: &[serde_json::Value], check: &str| -> (String, String) {
        let found = findings.iter().find(|finding| finding["check"] == check);
        let found = found.unwrap_or_else(|| panic!("no {check}: {findings:?}"));
        let text = |key: &str| found[key].as_str().unwrap().to_owned();
        (text("level"), text("note"))
    };
    let (code, findings) = doctor(None);
    assert_eq!(code, 0, "{findings:?}");
    let (level, note) = of(&findings, "database");
    assert!(
        level == "ok" && note.contains("PostgreSQL") && note.contains(database.name()),
        "{note}"
    );
    assert_eq!(of(&findings, "recovery").0, "ok");
    assert_eq!(of(&findings, "clock").0, "ok");
    let (level, note) = of(&findings, "schema");
    assert!(level == "warn" && note.contains("migrate up"), "{note}");
    assert!(findings.iter().all(|finding| finding["check"] != "data dir"), "{findings:?}");
    let there = "SELECT count(*) FROM pg_namespace WHERE nspname = 'hapax'";
    assert_eq!(database.number(there), 0, "it changed something");
    // Doctor runs alongside a server on the same database.
    let node = house.start();
    let (_, findings) = doctor(None);
    assert_eq!(of(&findings, "schema").0, "ok", "{findings:?}");
    node.stop();
    // No node of this version accepts these tables, so neither command may report success.
    database.execute("UPDATE hapax.migration SET checksum = 'x' || checksum WHERE number = 1");
    let (code, findings) = doctor(None);
    assert_eq!((code, of(&findings, "schema").0.as_str()), (1, "fail"));
    let config = house.config_file().display().to_string();
    let status = crate::common::hapax(&["migrate", "status", "--config", &config]).run();
    assert!(status.code == 1 && status.stdout.contains("refused"), "{}", status.stdout);
    database.execute("UPDATE hapax.migration SET checksum = substr(checksum, 2) WHERE number = 1");
    // No server at the address, a database that accepts no writes, and a standby are failures: exit 1.
    let (code, findings) = doctor(Some("postgres://127.0.0.1:9/nowhere"));
    assert_eq!((code, of(&findings, "database").0.as_str()), (1, "fail"));
    database.execute(&format!(
        "ALTER DATABASE \"{}\" SET default_transaction_read_only = on",
        database.name()
    ));
    let (code, findings) = doctor(None);
    let (level, note) = of(&findings, "database");
    assert_eq!((code, level.as_str()), (1, "fail"));
    assert!(note.contains("accepts no writes"), "{note}");
    let primary = wait(Postgres::start());
    if !primary.can_have_standby() {
        return crate::support::skip(
            "doctor at a standby",
            "this build of PostgreSQL cannot be copied",
        );
    }
    let standby = wait(primary.standby());
    let (code, findings) = doctor(Some(&standby.url()));
    assert_eq!((code, of(&findings, "recovery").0.as_str()), (1, "fail"));
}

#[test]
fn handlers_of_a_role_named_hapax_reach_the_users_tables_and_no_table_of_hapax() {
    // By default the search_path begins with the schema named like the role. There the plain name "event"
    // meant Hapax's own table: a handler that deleted from it made the next copy new, and a fee was
    // charged twice. Functions of the user try the same with the full name, and under a search_path of
    // their own.
    let server = wait(Postgres::start());
    let owner = Database { url: wait(server.create_database("role_hapax")) };
    owner.execute(&format!(
        "CREATE ROLE hapax LOGIN; ALTER DATABASE \"{}\" OWNER TO hapax",
        owner.name()
    ));
    let database = Database { url: owner.url.replace("postgres@", "hapax@") };
    assert_eq!(database.execute("SELECT current_user::text"), [Some("hapax".to_owned())]);
    database.execute(
        "CREATE TABLE event (event_id text); INSERT INTO event VALUES ('evt_1'), ('evt_2');
         CREATE TABLE job (event_id text); CREATE TABLE seen (event_id text);
         CREATE TABLE ledger (event_id text, handler text, attempt int);
         CREATE FUNCTION wipe() RETURNS text LANGUAGE plpgsql AS
             $$ BEGIN DELETE FROM hapax.event; RETURN 'wiped'; END $$;
         CREATE FUNCTION wipe_by_path() RETURNS text LANGUAGE plpgsql SET search_path = hapax AS
             $$ BEGIN UPDATE job SET state = 0; DELETE FROM event; RETURN 'wiped'; END $$",
    );
    let fee = "[sources.stripe.handlers.fee]\nsql = \"\"\"\nDELETE FROM event WHERE event_id = :event_id;\n\
               INSERT INTO seen VALUES (:event_id);\nINSERT INTO job VALUES (:event_id);\n\
               INSERT INTO ledger VALUES (:event_id, 'fee', :attempt)\"\"\"\n";
    let sly = |name: &str, function: &str| {
        format!(
            "[sources.stripe.handlers.{name}]\nretry = [\"0s\"]\nsql = \"SELECT {function}() || :event_id\"\n"
        )
    };
    let handlers = [fee, &sly("sly", "wipe"), &sly("slyer", "wipe_by_path")].concat();

    // A statement that names a table of Hapax is refused before anything runs.
    for table in ["event", "job", "seen"] {
        let sql = format!("[sources.stripe.handlers.fee]\nsql = \"DELETE FROM hapax.{table}\"\n");
        let (code, said) = database.house("", &sql).fail();
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(&format!("hapax.{table}")), "{said}");
    }

    let house = database.house("", &handlers);
    let sender = Sender::stripe(SECRET);
    // The second server knows nothing from memory: the database itself must recognise the copies.
    for round in 0..2 {
        let node = house.start();
        for id in ["evt_1", "evt_2"] {
            let verdicts = if round == 0 { ["accepted", "duplicate"] } else { ["duplicate"; 2] };
            for verdict in verdicts {
                node.ask(sender.event(id)).is(verdict);
            }
        }
        until("each handler has had its turn", || {
            let ended =
                "SELECT count(*) FROM hapax.job WHERE state IN (2 /* done */, 4 /* dead */)";
            (database.number(ended) == 6).then_some(())
        });
        let dead = node.admin_get("/api/v1/jobs?status=dead").json();
        let errors: Vec<&str> = dead["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|job| job["error"].as_str().unwrap())
            .collect();
        assert_eq!(errors.len(), 4, "{dead}");
        assert!(
            errors.iter().all(|error| error.contains("a handler must not write to hapax.")),
            "{dead}"
        );
        node.stop();
    }
    database.is_once_each(2);
    for (sql, rows) in [
        ("SELECT count(*) FROM public.event", 0),
        ("SELECT count(*) FROM public.seen", 2),
        ("SELECT count(*) FROM public.job", 2),
        ("SELECT count(*) FROM hapax.event", 2),
        ("SELECT count(*) FROM hapax.seen", 0),
    ] {
        assert_eq!(database.number(sql), rows, "{sql}");
    }
}
