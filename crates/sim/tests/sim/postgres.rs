//! Real PostgreSQL servers: started, broken and removed.

use std::path::Path;

use hapax_sim::{Postgres, StopMode, skip};

#[tokio::test]
async fn the_shared_server_keeps_its_tests_apart() {
    // Two tests with the same label must get two databases.
    let server = Postgres::shared().await;
    let one = server.create_database("ledger").await;
    let other = server.create_database("ledger").await;
    Postgres::execute_at(&one, "CREATE TABLE fees (amount int)").await;
    let seen = "SELECT count(*) FROM pg_tables WHERE tablename = 'fees'";
    assert_eq!(Postgres::execute_at(&one, seen).await, [Some("1".to_owned())]);
    assert_eq!(Postgres::execute_at(&other, seen).await, [Some("0".to_owned())]);

    let template = one.rsplit('/').next().expect("a name");
    let copy = server.create_database_from("ledger", template).await;
    assert_eq!(Postgres::execute_at(&copy, seen).await, [Some("1".to_owned())]);
    server.drop_database(&copy).await;
    let left = "SELECT datname FROM pg_database WHERE datname LIKE 'ledger%'";
    assert_eq!(server.execute(left).await.len(), 2);
}

#[tokio::test]
async fn durability_is_that_of_production() {
    // A server that only pretends to sync would let every crash test pass.
    let server = Postgres::shared().await;
    assert_eq!(server.execute("SHOW fsync").await, [Some("on".to_owned())]);
    assert_eq!(server.execute("SHOW synchronous_commit").await, [Some("on".to_owned())]);
    assert_eq!(server.execute("SHOW full_page_writes").await, [Some("on".to_owned())]);
}

#[tokio::test]
async fn committed_rows_survive_every_way_to_stop_the_server() {
    // The server is stopped in each way. Afterwards the server has the same data and the same port, and
    // nothing is left behind at the end.
    let server = Postgres::with_settings(&[("log_statement", "all")]).await;
    server.execute("CREATE TABLE fees (amount int)").await;
    let url = server.url();

    server.execute("INSERT INTO fees VALUES (1)").await;
    server.kill_postmaster().await;
    assert_eq!(server.pid().await, None);
    server.start_again().await;

    server.execute("INSERT INTO fees VALUES (2)").await;
    server.stop(StopMode::Immediate).await;
    server.start_again().await;

    server.execute("INSERT INTO fees VALUES (3)").await;
    server.stop(StopMode::Fast).await;
    server.start_again().await;

    assert_eq!(server.url(), url);
    assert_eq!(server.execute("SELECT sum(amount) FROM fees").await, [Some("6".to_owned())]);
    assert!(server.log().contains("SELECT sum(amount) FROM fees"), "the settings were not taken");

    let folder = server.execute("SHOW data_directory").await.remove(0).expect("a folder");
    assert!(Path::new(&folder).exists());
    drop(server);
    assert!(!Path::new(&folder).exists(), "the folder outlives its server");
}

#[tokio::test]
async fn sessions_end_by_request_and_by_crash() {
    // A client holds a session open. The client must notice both a terminated and a killed session.
    let server = Postgres::start().await;
    let held = || async {
        let (client, connection) =
            tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.expect("connects");
        let ended = tokio::spawn(connection);
        client.simple_query("SELECT 1").await.expect("answers");
        (client, ended)
    };

    let (client, ended) = held().await;
    assert_eq!(server.kill_backends(Some("elsewhere")).await, 0);
    assert_eq!(server.kill_backends(None).await, 1);
    assert!(ended.await.expect("no panic").is_err());
    drop(client);

    let (client, ended) = held().await;
    assert!(server.crash_backend().await);
    assert!(ended.await.expect("no panic").is_err());
    drop(client);
}

#[tokio::test]
async fn a_promoted_standby_has_every_acknowledged_commit() {
    // The primary dies right after its answer. Every answered commit must be on the standby.
    let primary = Postgres::start().await;
    if !primary.can_have_standby() {
        return skip("a promoted standby", "this PostgreSQL has no pg_basebackup");
    }
    primary.execute("CREATE TABLE fees (amount int)").await;
    let standby = primary.standby().await;
    primary.execute("INSERT INTO fees VALUES (7)").await;
    primary.kill_postmaster().await;

    assert_eq!(standby.execute("SELECT pg_is_in_recovery()").await, [Some("t".to_owned())]);
    standby.promote().await;
    assert_eq!(standby.execute("SELECT amount FROM fees").await, [Some("7".to_owned())]);
    standby.execute("INSERT INTO fees VALUES (8)").await;
}

#[tokio::test]
async fn a_server_with_tls_has_a_valid_certificate_and_refuses_plain_connections() {
    // A second client, psql, must connect with the authority, and must not connect without TLS.
    let (server, tls) = Postgres::with_tls().await;
    let Some(psql) = server.program("psql") else {
        return skip("a server with TLS", "psql is not installed");
    };
    let psql = |sslmode: &str| {
        let url = format!("postgres://{}@127.0.0.1:{}/postgres", tls.role, server.port());
        std::process::Command::new(&psql)
            .args(["-Atc", "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &url])
            .env("PGSSLMODE", sslmode)
            .env("PGSSLROOTCERT", &tls.authority_file)
            .output()
            .expect("psql runs")
    };
    let proven = psql("verify-full");
    assert!(proven.status.success(), "{}", String::from_utf8_lossy(&proven.stderr));
    assert_eq!(proven.stdout, b"t\n");
    assert!(!psql("disable").status.success(), "let in without TLS");
}
