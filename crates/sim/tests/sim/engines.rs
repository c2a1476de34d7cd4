//! Redis, PgBouncer, and the guarantee that no engine outlives its test process.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hapax_sim::{PgBouncer, Postgres, Redis, RedisReply, skip};

#[tokio::test]
async fn redis_forgets_when_killed_and_comes_back_with_an_old_snapshot() {
    // A key is saved and then changed, and the process is killed. After the restart, the key must
    // have its saved value.
    let redis = Redis::with_settings(&[("maxmemory", "8mb")]).await;
    let url = redis.url();
    let value = |bytes: &[u8]| RedisReply::Text(bytes.to_vec());
    redis.command(&["SET", "seen", "old"]).await;
    redis.command(&["SAVE"]).await;
    redis.command(&[b"SET".as_slice(), b"seen", b"new\x00\r\n"]).await;
    assert_eq!(redis.command(&["GET", "seen"]).await, value(b"new\x00\r\n"));

    redis.kill().await;
    redis.start_again().await;
    assert_eq!(redis.url(), url);
    assert_eq!(redis.command(&["GET", "seen"]).await, value(b"old"));

    redis.flush_all().await;
    assert_eq!(redis.command(&["GET", "seen"]).await, RedisReply::Nothing);
    assert_eq!(redis.command(&["INCR", "count"]).await, RedisReply::Integer(1));
    assert!(matches!(redis.command(&["NONSENSE"]).await, RedisReply::Refused(_)));
    let limit = redis.command(&["CONFIG", "GET", "maxmemory"]).await;
    assert_eq!(limit, RedisReply::List(vec![value(b"maxmemory"), value(b"8388608")]));
}

#[tokio::test]
async fn a_paused_redis_answers_after_the_pause() {
    // A command sent during the pause must be answered after it.
    let redis = Redis::start().await;
    redis.pause().await;
    let asked = ["PING"];
    let mut answer = std::pin::pin!(redis.command(&asked));
    let waited = tokio::time::timeout(Duration::from_millis(200), &mut answer).await;
    assert!(waited.is_err(), "answered while paused");
    redis.resume().await;
    assert_eq!(answer.await, RedisReply::Text(b"PONG".to_vec()));
}

#[tokio::test]
async fn pgbouncer_gives_one_session_to_many_clients_in_turn() {
    // The pool has one session, so two clients are both served only if they share it.
    if !PgBouncer::is_installed() {
        return skip("PgBouncer", "it is not installed");
    }
    let server = Postgres::shared().await;
    let name = "pooled";
    server.execute(&format!("CREATE DATABASE {name}")).await;
    let pooler = PgBouncer::in_front_of(server, 1).await;
    let connect = || async {
        let url = pooler.url_for(name);
        let (client, connection) =
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connects");
        tokio::spawn(connection);
        client
    };
    let (one, other) = (connect().await, connect().await);
    let session = "SELECT pg_backend_pid()";
    let first = one.simple_query(session).await.expect("answers");
    let second = other.simple_query(session).await.expect("answers");
    let pid = |messages: &[tokio_postgres::SimpleQueryMessage]| {
        messages.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        })
    };
    assert!(pid(&first).is_some());
    assert_eq!(pid(&first), pid(&second));
}

#[test]
fn engines_are_gone_after_their_process_was_killed() {
    // SIGKILL runs no destructor: only another process can clean up.
    let mut holder = Command::new(env!("CARGO_BIN_EXE_engines"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("the holder starts");
    let said = BufReader::new(holder.stdout.take().expect("a pipe")).lines().take(2);
    let ports: Vec<u16> = said
        .map(|line| {
            let line = line.expect("a line");
            let (_, address) = line.split_once("127.0.0.1:").expect("an address");
            let digits: String = address.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().expect("a port")
        })
        .collect();
    assert_eq!(ports.len(), 2, "it did not name both engines");
    let listens = |port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_ok();
    assert!(ports.iter().all(listens), "an engine does not listen");

    holder.kill().expect("killed");
    holder.wait().expect("reaped");
    let deadline = Instant::now() + Duration::from_secs(120);
    while ports.iter().any(listens) {
        assert!(Instant::now() < deadline, "an engine outlived its process");
        std::thread::yield_now();
    }
}
