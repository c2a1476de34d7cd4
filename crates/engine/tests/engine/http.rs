//! The HTTP loop against clients that misbehave, over real sockets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{FOREVER, Wire, within};
use bytes::Bytes;
use hapax_engine::http::{Peer, Received, serve};
use hapax_engine::{Drained, HttpLimits};
use http::{Request, Response, Version};
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{interval, timeout};
use tokio_rustls::rustls;
use tokio_util::sync::CancellationToken;

/// Long enough for the bytes to arrive on a busy machine, and short enough for a test to wait.
const SHORT: Duration = Duration::from_millis(300);

struct Running {
    address: SocketAddr,
    stop: CancellationToken,
    served: JoinHandle<Drained>,
    reached: Arc<AtomicUsize>,
}

impl Running {
    async fn stopped(self) -> Drained {
        self.stop.cancel();
        within(self.served).await.expect("the loop does not panic")
    }

    fn reached(&self) -> usize {
        self.reached.load(Ordering::SeqCst)
    }
}

/// A server that answers with `answer`.
async fn start_with<A, F>(
    limits: HttpLimits,
    tls: Option<Arc<rustls::ServerConfig>>,
    answer: A,
) -> Running
where
    A: Fn(Request<Received>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    start_with_peer(limits, tls, move |request, _peer| answer(request)).await
}

/// A server whose `answer` uses the connection.
async fn start_with_peer<A, F>(
    limits: HttpLimits,
    tls: Option<Arc<rustls::ServerConfig>>,
    answer: A,
) -> Running
where
    A: Fn(Request<Received>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let reached = Arc::new(AtomicUsize::new(0));
    let counting = {
        let reached = reached.clone();
        move |request: Request<Received>, peer: Peer| {
            reached.fetch_add(1, Ordering::SeqCst);
            answer(request, peer)
        }
    };
    let served = tokio::spawn(serve(listener, tls, counting, limits, stop.clone()));
    Running { address, stop, served, reached }
}

/// A server that reads each body and returns its length.
async fn start(limits: HttpLimits) -> Running {
    start_with(limits, None, |request| async {
        match request.into_body().collect().await {
            Ok(body) => Response::new(Full::from(body.to_bytes().len().to_string())),
            Err(_) => {
                let mut answer = Response::new(Full::default());
                *answer.status_mut() = http::StatusCode::BAD_REQUEST;
                answer.headers_mut().insert("connection", "close".parse().unwrap());
                answer
            }
        }
    })
    .await
}

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

#[tokio::test]
async fn a_connection_is_reused_and_answers_arrive_in_order() {
    let server = start(HttpLimits::default()).await;
    let mut wire = Wire::connect(server.address).await;
    for length in [0, 5, 70_000] {
        wire.write(format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n")).await;
        wire.write("x".repeat(length)).await;
        let heard = wire.answer().await;
        assert_eq!((heard.status, heard.body), (200, length.to_string().into_bytes()));
    }
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn a_head_split_anywhere_in_its_first_bytes_is_still_parsed() {
    // The first letters of POST and of the HTTP/2 preface are the same.
    let server = start(HttpLimits::default()).await;
    for cut in 1..6 {
        let mut wire = Wire::connect(server.address).await;
        let request = "PRIVET / HTTP/1.1\r\nhost: a\r\n\r\n".as_bytes();
        wire.write(&request[..cut]).await;
        wire.write(&request[cut..]).await;
        assert_eq!(wire.answer().await.status, 200);
    }
}

#[tokio::test]
async fn a_silent_connection_is_closed_at_the_deadline() {
    let limits = HttpLimits { header_deadline: SHORT, ..HttpLimits::default() };
    let server = start(limits).await;
    let mut wire = Wire::connect(server.address).await;
    assert_eq!(wire.rest().await, b"");
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn a_slow_head_is_cut_off_however_steadily_it_arrives() {
    let limits = HttpLimits { header_deadline: SHORT, ..HttpLimits::default() };
    let server = start(limits).await;
    let mut wire = Wire::connect(server.address).await;
    wire.write("POST / HTTP/1.1\r\nx: ").await;
    drip_until_closed(&mut wire).await;
    assert_eq!(server.reached(), 0);
}

#[tokio::test]
async fn the_second_head_of_a_connection_has_a_deadline_too() {
    let limits = HttpLimits { header_deadline: SHORT, ..HttpLimits::default() };
    let server = start(limits).await;
    let mut wire = Wire::connect(server.address).await;
    wire.write(GET).await;
    assert_eq!(wire.answer().await.status, 200);
    wire.write("POST / HTTP/1.1\r\nx: ").await;
    drip_until_closed(&mut wire).await;
    assert_eq!(server.reached(), 1);
}

async fn drip_until_closed(wire: &mut Wire) {
    let mut drops = interval(Duration::from_millis(10));
    let mut byte = [0];
    within(async {
        loop {
            tokio::select! {
                read = wire.stream.read(&mut byte) => match read {
                    Ok(0) | Err(_) => break,
                    Ok(_) => panic!("nothing should be answered"),
                },
                _ = drops.tick() => { let _ = wire.stream.try_write(b"a"); }
            }
        }
    })
    .await;
}

#[tokio::test]
async fn between_requests_a_connection_outlives_the_header_deadline_but_not_its_idle_time() {
    let header_deadline = Duration::from_millis(50);
    let idle = Duration::from_secs(1);
    let limits = HttpLimits { header_deadline, idle, ..HttpLimits::default() };
    let server = start(limits).await;
    let mut wire = Wire::connect(server.address).await;
    wire.write(GET).await;
    assert_eq!(wire.answer().await.status, 200);
    let quiet = tokio::time::Instant::now();
    assert_eq!(wire.rest().await, b"");
    assert!(quiet.elapsed() > header_deadline * 2, "closed after {:?}", quiet.elapsed());
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn a_head_over_the_limit_is_431_and_the_connection_ends() {
    let server = start(HttpLimits::default()).await;
    let mut wire = Wire::connect(server.address).await;
    wire.write(format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(20_000))).await;
    assert_eq!(wire.answer().await.status, 431);
    assert_eq!(wire.rest().await, b"");
    let mut wire = Wire::connect(server.address).await;
    wire.write(format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", "x: y\r\n".repeat(150))).await;
    assert_eq!(wire.answer().await.status, 431);
    assert_eq!(wire.rest().await, b"");
    assert_eq!(server.reached(), 0);
}

#[tokio::test]
async fn requests_that_two_parsers_could_read_differently_are_400_and_the_connection_ends() {
    // Each head can be read in two ways, and contains a second request that only one of the two
    // readings finds.
    let hidden = "GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n";
    let corpus = [
        (
            "both lengths",
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "both lengths, the other way",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        ),
        (
            "two lengths",
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
        ),
        ("signed length", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +4\r\n\r\nabcd"),
        ("negative length", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n"),
        ("length list", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4, 5\r\n\r\nabcd"),
        (
            "chunked is not last",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        ),
        (
            "unknown coding",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "chunked in HTTP/1.0",
            "POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "no hex chunk size",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        ),
        (
            "overflowing chunk size",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        ),
        (
            "negative chunk size",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        ),
        (
            "chunk longer than it says",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n0\r\n\r\n",
        ),
        (
            "folded header",
            "POST / HTTP/1.1\r\nhost: a\r\nx: b\r\n c: d\r\ncontent-length: 0\r\n\r\n",
        ),
        ("blank before the colon", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length : 0\r\n\r\n"),
        ("bare line feeds", "POST / HTTP/1.1\nhost: a\ncontent-length: 0\n\n"),
        ("one bare line feed", "POST / HTTP/1.1\r\nhost: a\ncontent-length: 0\r\n\r\n"),
        ("NUL in a value", "POST / HTTP/1.1\r\nhost: a\r\nx: \0\r\ncontent-length: 0\r\n\r\n"),
        (
            "bare CR in a value",
            "POST / HTTP/1.1\r\nhost: a\r\nx: a\rb\r\ncontent-length: 0\r\n\r\n",
        ),
        ("two hosts", "POST / HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 0\r\n\r\n"),
        ("the same host twice", "GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n"),
        ("two hosts in HTTP/1.0", "GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n"),
        ("no host", "POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"),
        ("a list of hosts", "GET / HTTP/1.1\r\nhost: a, b\r\n\r\n"),
        ("a host with a path", "GET / HTTP/1.1\r\nhost: a/b\r\n\r\n"),
        ("a host with a user", "GET / HTTP/1.1\r\nhost: u@a\r\n\r\n"),
        ("a target at another host", "GET http://b/ HTTP/1.1\r\nhost: a\r\n\r\n"),
        ("a tunnel", "CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n"),
        ("a host as target", "POST a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n"),
        ("everything as target", "POST * HTTP/1.1\r\nhost: a\r\n\r\n"),
        (
            "a coding before chunked",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "a coding before chunked, in two lines",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "chunked twice",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        ),
        ("an empty coding", "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding:\r\n\r\n0\r\n\r\n"),
        (
            "the same length twice",
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ncontent-length: 4\r\n\r\nabcd",
        ),
        ("hex length", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0x4\r\n\r\nabcd"),
        ("length with a blank", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4 4\r\n\r\nabcd"),
        ("no length", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: \r\n\r\nabcd"),
        (
            "a chunk's size ends in a bare line feed",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4\nabcd\r\n0\r\n\r\n",
        ),
        (
            "a chunk's extension holds a line feed",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4;x\nabcd\r\n0\r\n\r\n",
        ),
    ];
    let endless_extension = format!(
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4;{}\r\nabcd\r\n0\r\n\r\n",
        "x".repeat(32 * 1024)
    );
    let corpus = corpus.into_iter().chain([("an endless extension", &*endless_extension)]);
    let server = start(HttpLimits::default()).await;
    for (name, request) in corpus {
        let mut wire = Wire::connect(server.address).await;
        wire.write(format!("{request}{hidden}")).await;
        let heard = wire.try_answer().await;
        assert_eq!(heard.map(|heard| heard.status), Some(400), "{name}");
        assert_eq!(String::from_utf8_lossy(&wire.rest().await), "", "{name}");
    }
    let mut wire = Wire::connect(server.address).await;
    wire.write(GET).await;
    assert_eq!(wire.answer().await.status, 200, "the server is still up");
}

#[tokio::test]
async fn a_pipelined_head_is_checked_as_strictly() {
    // A proxy in front may send several requests in one packet, and attackers choose where they
    // end.
    let before = [
        ("a head", "GET / HTTP/1.1\r\nhost: a\r\n\r\n"),
        ("a body", "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nab\n\nc"),
        (
            "chunks",
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3;x\r\na\n\n\r\n0\r\nx: y\r\n\r\n",
        ),
    ];
    let ambiguous = [
        ("bare line feeds", "POST / HTTP/1.1\nhost: a\ncontent-length: 0\n\n"),
        ("one bare line feed", "POST / HTTP/1.1\r\nhost: a\ncontent-length: 0\r\n\r\n"),
        (
            "both lengths",
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "the same length twice",
            "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\ncontent-length: 0\r\n\r\n",
        ),
        ("two hosts", "GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"),
    ];
    let server = start(HttpLimits::default()).await;
    let hidden = "GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n";
    for (behind, first) in before {
        for (name, second) in ambiguous {
            let mut wire = Wire::connect(server.address).await;
            wire.write(format!("{first}{first}{second}{hidden}")).await;
            assert_eq!(wire.answer().await.status, 200, "{name} behind {behind}");
            assert_eq!(wire.answer().await.status, 200, "{name} behind {behind}");
            let heard = wire.try_answer().await;
            assert_eq!(heard.map(|heard| heard.status), Some(400), "{name} behind {behind}");
            assert_eq!(String::from_utf8_lossy(&wire.rest().await), "", "{name} behind {behind}");
        }
        let mut wire = Wire::connect(server.address).await;
        wire.write(format!("{first}{first}{first}")).await;
        for _ in 0..3 {
            assert_eq!(wire.answer().await.status, 200, "an ordinary one behind {behind}");
        }
    }
}

#[tokio::test]
async fn heads_that_only_look_unusual_are_served() {
    let server = start(HttpLimits::default()).await;
    let unusual = [
        "GET http://a/ HTTP/1.1\r\nhost: A\r\n\r\n",
        "GET / HTTP/1.1\r\nhost:\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: [::1]:8080\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
        "GET / HTTP/1.0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: a\r\nTransfer-Encoding: \tChunked \r\n\r\n1;x=y\r\na\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length:\t004 \r\n\r\nabcd",
        "\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n",
    ];
    for request in unusual {
        let mut wire = Wire::connect(server.address).await;
        wire.write(request).await;
        assert_eq!(wire.answer().await.status, 200, "{request:?}");
    }
}

#[tokio::test]
async fn an_answer_given_before_the_body_is_read_reaches_a_client_that_only_writes() {
    // Without lingering, closing with unread input resets the connection: the client's write fails,
    // and many clients then never read an answer.
    let server = start_with(HttpLimits::default(), None, |_request| async {
        let mut answer = Response::new(Full::from("no"));
        answer.headers_mut().insert("connection", "close".parse().unwrap());
        answer
    })
    .await;
    let length = 4 * 1024 * 1024;
    let mut wire = Wire::connect(server.address).await;
    wire.write(format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n")).await;
    within(wire.stream.write_all(&vec![b'x'; length])).await.expect("all of it is taken");
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.body), (200, b"no".to_vec()));
    assert_eq!(wire.rest().await, b"");
}

#[tokio::test]
async fn beyond_the_limit_a_connection_waits_while_all_others_run_requests() {
    let gate = Arc::new(Semaphore::new(0));
    let limits = HttpLimits { connections_max: 1, ..HttpLimits::default() };
    let server = start_with(limits, None, {
        let gate = gate.clone();
        move |_request| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                Response::new(Full::from("done"))
            }
        }
    })
    .await;
    let mut first = Wire::connect(server.address).await;
    first.write(GET).await;
    within(async {
        while server.reached() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let mut second = Wire::connect(server.address).await;
    second.write(GET).await;
    // These yields give a faulty loop enough time to accept the second connection.
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(server.reached(), 1, "the second connection is not served yet");
    gate.add_permits(2);
    assert_eq!(first.answer().await.status, 200, "what was at work is answered");
    assert_eq!(second.answer().await.status, 200);
}

/// Far longer than any test, so an idle connection is closed only to make room for another.
const PATIENT: Duration = Duration::from_secs(3600);

/// Limits under which only a lack of slots ends a connection.
fn patient(connections_max: usize) -> HttpLimits {
    HttpLimits {
        connections_max,
        header_deadline: PATIENT,
        handshake_deadline: PATIENT,
        idle: PATIENT,
        write_stall: PATIENT,
        linger: PATIENT,
        ..HttpLimits::default()
    }
}

/// A server on which `POST /signed` counts as verified. Every body is read, and `/big` has a long
/// answer.
async fn start_verifying(limits: HttpLimits, tls: Option<Arc<rustls::ServerConfig>>) -> Running {
    start_with_peer(limits, tls, |request, peer| async move {
        let path = request.uri().path().to_owned();
        let read = request.into_body().collect().await.is_ok();
        let mut answer = Response::new(Full::from(match &*path {
            "/big" => vec![b'x'; 64 * 1024 * 1024],
            _small => b"ok".to_vec(),
        }));
        match &*path {
            "/signed" if read => peer.has_verified(),
            "/big" => {}
            _other => *answer.status_mut() = http::StatusCode::NOT_FOUND,
        }
        answer
    })
    .await
}

const SIGNED: &str = "POST /signed HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi";
const PLACES: usize = 8;

/// Checks that hostile connections of one kind block neither a new sender nor a verified one.
async fn check_gets_in_beside(kind: &str, hostile: &[u8], answer: Option<u16>) {
    let server = start_verifying(patient(PLACES), None).await;
    let mut known = Wire::connect(server.address).await;
    known.write(SIGNED).await;
    assert_eq!(known.answer().await.status, 200, "{kind}");
    let mut held = Vec::new();
    for _ in 0..PLACES * 3 {
        let mut wire = Wire::connect(server.address).await;
        wire.write(hostile).await;
        if let Some(status) = answer {
            assert_eq!(wire.answer().await.status, status, "{kind}");
        }
        held.push(wire);
    }
    for _ in 0..PLACES * 2 {
        let mut new = Wire::connect(server.address).await;
        new.write(SIGNED).await;
        assert_eq!(new.answer().await.status, 200, "{kind}");
    }
    known.write(SIGNED).await;
    assert_eq!(known.answer().await.status, 200, "{kind}: the one that had verified goes on");
    drop(held);
}

#[tokio::test]
async fn idle_connections_are_closed_for_new_ones_whatever_they_wait_for() {
    let with_body = "POST /signed HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhi";
    let http_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    check_gets_in_beside("silent", b"", None).await;
    check_gets_in_beside("slow head", b"POST /signed HTTP/1.1\r\nx: ", None).await;
    check_gets_in_beside("slow body", with_body.as_bytes(), None).await;
    check_gets_in_beside("idle after 404", GET.as_bytes(), Some(404)).await;
    check_gets_in_beside("slow second head", format!("{GET}GET").as_bytes(), Some(404)).await;
    check_gets_in_beside("HTTP/2 without a request", http_2, None).await;
    check_gets_in_beside("refused and lingering", b"nonsense\r\n\r\n", Some(400)).await;
}

#[tokio::test]
async fn a_connection_is_closed_for_another_only_where_none_is_free() {
    let server = start_verifying(patient(3), None).await;
    let mut idle = Wire::connect(server.address).await;
    for _ in 0..2 {
        idle.write(GET).await;
        assert_eq!(idle.answer().await.status, 404);
    }
    let mut second = Wire::connect(server.address).await;
    let mut third = Wire::connect(server.address).await;
    for wire in [&mut second, &mut third, &mut idle] {
        wire.write(GET).await;
        assert_eq!(wire.answer().await.status, 404, "three have room");
    }
    let mut fourth = Wire::connect(server.address).await;
    fourth.write(GET).await;
    assert_eq!(fourth.answer().await.status, 404);
    assert_eq!(second.rest().await, b"", "the one that has been idle longest is closed");
    for wire in [&mut third, &mut idle, &mut fourth] {
        wire.write(GET).await;
        assert_eq!(wire.answer().await.status, 404);
    }
}

#[tokio::test]
async fn connections_of_the_address_with_the_most_are_closed_first() {
    // The oldest connection belongs to another client, and must stay.
    let server = start_verifying(patient(4), None).await;
    let mut lone = Wire::connect_from([127, 0, 0, 2], server.address).await;
    lone.write(GET).await;
    assert_eq!(lone.answer().await.status, 404);
    let mut held = Vec::new();
    for _ in 0..12 {
        let mut wire = Wire::connect_from([127, 0, 0, 3], server.address).await;
        wire.write(GET).await;
        assert_eq!(wire.answer().await.status, 404);
        held.push(wire);
    }
    lone.write(GET).await;
    assert_eq!(lone.answer().await.status, 404);
}

#[tokio::test]
async fn a_peer_that_leaves_its_answer_unread_is_closed_after_some_time() {
    let server = start_verifying(patient(1), None).await;
    let mut deaf = Wire::connect(server.address).await;
    deaf.write("GET /big HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut next = Wire::connect(server.address).await;
    next.write(SIGNED).await;
    assert_eq!(next.answer().await.status, 200);
}

#[tokio::test]
async fn a_peer_that_reads_nothing_is_cut_and_its_slot_is_free_again() {
    let limits = HttpLimits { connections_max: 1, write_stall: SHORT, ..HttpLimits::default() };
    let server = start_with(limits, None, |request| async move {
        let size = if request.uri().path() == "/big" { 64 * 1024 * 1024 } else { 1 };
        Response::new(Full::from(vec![b'x'; size]))
    })
    .await;
    let mut deaf = Wire::connect(server.address).await;
    deaf.write("GET /big HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut next = Wire::connect(server.address).await;
    next.write(GET).await;
    assert_eq!(next.answer().await.status, 200);
}

#[tokio::test]
async fn a_shutdown_answers_requests_in_flight_and_accepts_no_new_ones() {
    let gate = Arc::new(Semaphore::new(0));
    let server = start_with(HttpLimits::default(), None, {
        let gate = gate.clone();
        move |_request| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                Response::new(Full::from("done"))
            }
        }
    })
    .await;
    let mut idle = Wire::connect(server.address).await;
    gate.add_permits(1);
    idle.write(GET).await;
    assert_eq!(idle.answer().await.status, 200);
    let mut busy = Wire::connect(server.address).await;
    busy.write(GET).await;
    within(async {
        while server.reached() < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    server.stop.cancel();
    assert_eq!(idle.rest().await, b"", "an idle connection is closed at once");
    within(async { while TcpStream::connect(server.address).await.is_ok() {} }).await;
    gate.add_permits(1);
    let heard = busy.answer().await;
    assert_eq!((heard.status, heard.header("connection")), (200, Some("close")));
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn a_shutdown_does_not_wait_longer_than_its_drain() {
    let limits = HttpLimits { drain: SHORT, ..HttpLimits::default() };
    let server = start_with(limits, None, |_request| std::future::pending()).await;
    let mut wire = Wire::connect(server.address).await;
    wire.write(GET).await;
    within(async {
        while server.reached() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(server.stopped().await, Drained::Cut { connections: 1 });
}

#[tokio::test]
async fn a_handler_that_panics_ends_only_its_own_connection() {
    let server = start_with(HttpLimits::default(), None, |request| async move {
        assert_ne!(request.uri().path(), "/panic", "planned by the test");
        Response::new(Full::default())
    })
    .await;
    let mut wire = Wire::connect(server.address).await;
    wire.write("GET /panic HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(wire.try_answer().await.is_none());
    let mut wire = Wire::connect(server.address).await;
    wire.write(GET).await;
    assert_eq!(wire.answer().await.status, 200);
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn http_2_is_spoken_with_prior_knowledge() {
    let server = start(HttpLimits::default()).await;
    let stream = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(ask_http_2(TokioIo::new(stream), "http").await, "5");
    assert_eq!(server.stopped().await, Drained::Clean);
}

async fn ask_http_2<T>(io: T, scheme: &str) -> String
where
    T: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (mut sender, connection) = within(
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), io),
    )
    .await
    .unwrap();
    let connection = tokio::spawn(connection);
    let request =
        Request::post(format!("{scheme}://localhost/")).body(Full::from("hello")).unwrap();
    let answer = within(sender.send_request(request)).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_2));
    let body = within(answer.into_body().collect()).await.unwrap().to_bytes();
    drop(sender);
    within(connection).await.unwrap().unwrap();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn frames_without_progress_end_an_http_2_connection() {
    // Each frame costs the peer a few bytes and no stream, so no limit of streams counts it.
    let frame = |kind: u8, stream: u8, payload: &[u8]| {
        let mut frame = vec![0, 0, payload.len() as u8, kind, 0, 0, 0, 0, stream];
        frame.extend_from_slice(payload);
        frame
    };
    let floods = [
        ("PRIORITY", frame(2, 1, &[0, 0, 0, 0, 16])),
        ("SETTINGS", frame(4, 0, &[])),
        ("PING", frame(6, 0, &[0; 8])),
        ("WINDOW_UPDATE", frame(8, 0, &[0, 0, 0, 1])),
        ("an unknown kind", frame(0xbb, 1, &[1, 2, 3])),
    ];
    let server = start(HttpLimits::default()).await;
    for (name, frame) in floods {
        let mut wire = Wire::connect(server.address).await;
        wire.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
        let flood = frame.repeat(2_000);
        let (mut reads, mut writes) = wire.stream.split();
        let mut heard = Vec::new();
        let floods = async { while writes.write_all(&flood).await.is_ok() {} };
        // Either the reader or the writer may notice first that the connection has ended. A server
        // without a bound would never end it.
        let ended = async {
            tokio::select! {
                () = floods => {}
                _ = reads.read_to_end(&mut heard) => {}
            }
        };
        assert!(timeout(FOREVER, ended).await.is_ok(), "{name}");
    }
    let stream = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(ask_http_2(TokioIo::new(stream), "http").await, "5");
}

#[tokio::test]
async fn an_http_2_connection_is_drained_like_any_other() {
    let gate = Arc::new(Semaphore::new(0));
    let server = start_with(HttpLimits::default(), None, {
        let gate = gate.clone();
        move |_request| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                Response::new(Full::from("done"))
            }
        }
    })
    .await;
    let stream = TokioIo::new(TcpStream::connect(server.address).await.unwrap());
    let (mut sender, connection) = within(hyper::client::conn::http2::handshake::<
        _,
        _,
        Empty<Bytes>,
    >(TokioExecutor::new(), stream))
    .await
    .unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::get("http://localhost/").body(Empty::new()).unwrap();
    let answer = tokio::spawn(sender.send_request(request));
    within(async {
        while server.reached() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    server.stop.cancel();
    gate.add_permits(1);
    let answer = within(answer).await.unwrap().unwrap();
    let body = within(answer.into_body().collect()).await.unwrap().to_bytes();
    assert_eq!(body, "done");
    assert_eq!(server.stopped().await, Drained::Clean);
    within(connection).await.unwrap().unwrap();
}

mod over_tls {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, ServerName};
    use tokio_rustls::TlsConnector;

    use super::*;

    struct Tls {
        server: Arc<rustls::ServerConfig>,
        client: rustls::ClientConfig,
        certificate: Arc<hapax_engine::tls::Certificate>,
        directory: tempfile::TempDir,
    }

    /// A new self-signed pair in `directory`; the certificate is returned.
    fn write_pair(directory: &std::path::Path) -> CertificateDer<'static> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(directory.join("cert.pem"), made.cert.pem()).unwrap();
        std::fs::write(directory.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        CertificateDer::from_pem_file(directory.join("cert.pem")).unwrap()
    }

    fn trusting(certificate: CertificateDer<'static>) -> rustls::ClientConfig {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate).unwrap();
        rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    }

    fn load(
        directory: &std::path::Path,
    ) -> Result<Arc<hapax_engine::tls::Certificate>, hapax_engine::tls::TlsError> {
        let (cert, key) = (directory.join("cert.pem"), directory.join("key.pem"));
        hapax_engine::tls::Certificate::load(&cert, &key)
    }

    fn tls() -> Tls {
        let directory = tempfile::tempdir().unwrap();
        let client = trusting(write_pair(directory.path()));
        let certificate = load(directory.path()).unwrap();
        Tls { server: certificate.server_config().unwrap(), client, certificate, directory }
    }

    async fn hello(_request: Request<Received>) -> Response<Full<Bytes>> {
        Response::new(Full::from("hello"))
    }

    async fn connect(
        address: SocketAddr,
        mut client: rustls::ClientConfig,
        alpn: &[&[u8]],
    ) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        client.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("localhost").unwrap();
        within(TlsConnector::from(Arc::new(client)).connect(name, stream)).await
    }

    #[tokio::test]
    async fn both_protocols_are_spoken_over_tls() {
        let tls = tls();
        let server = start_with(HttpLimits::default(), Some(tls.server), hello).await;
        let stream = connect(server.address, tls.client.clone(), &[b"h2"]).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        assert_eq!(ask_http_2(TokioIo::new(stream), "https").await, "hello");
        for alpn in [&[b"http/1.1".as_slice()][..], &[]] {
            let stream = connect(server.address, tls.client.clone(), alpn).await.unwrap();
            let (mut sender, connection) =
                within(hyper::client::conn::http1::handshake(TokioIo::new(stream))).await.unwrap();
            let connection = tokio::spawn(connection);
            let request =
                Request::get("/").header("host", "a").body(Empty::<Bytes>::new()).unwrap();
            let answer = within(sender.send_request(request)).await.unwrap();
            assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "hello");
            drop(sender);
            within(connection).await.unwrap().unwrap();
        }
        assert_eq!(server.stopped().await, Drained::Clean);
    }

    #[tokio::test]
    async fn a_handshake_that_is_not_finished_is_cut_off() {
        let tls = tls();
        let limits = HttpLimits { handshake_deadline: SHORT, ..HttpLimits::default() };
        let server = start_with(limits, Some(tls.server), hello).await;
        let mut wire = Wire::connect(server.address).await;
        wire.write([0x16, 0x03]).await;
        assert_eq!(wire.rest().await, b"");
        assert_eq!(server.stopped().await, Drained::Clean);
    }

    #[tokio::test]
    async fn connections_with_unfinished_handshakes_are_closed_for_new_ones() {
        let tls = tls();
        let server = start_verifying(patient(PLACES), Some(tls.server)).await;
        let mut held = Vec::new();
        for n in 0..PLACES * 3 {
            let mut wire = Wire::connect(server.address).await;
            wire.write(&[0x16, 0x03][..n % 3]).await;
            held.push(wire);
        }
        for alpn in [&[b"h2".as_slice()][..], &[b"http/1.1"]].repeat(PLACES) {
            connect(server.address, tls.client.clone(), alpn).await.expect("a handshake");
        }
        drop(held);
    }

    #[tokio::test]
    async fn a_renewed_certificate_is_used_and_a_broken_one_cannot_be_loaded() {
        let tls = tls();
        let server = start_with(HttpLimits::default(), Some(tls.server), hello).await;
        let renewed = trusting(write_pair(tls.directory.path()));
        assert!(connect(server.address, renewed.clone(), &[]).await.is_err());
        tls.certificate.replace_with(&load(tls.directory.path()).unwrap());
        assert!(connect(server.address, renewed.clone(), &[]).await.is_ok());
        std::fs::write(tls.directory.path().join("cert.pem"), "nonsense").unwrap();
        assert!(load(tls.directory.path()).is_err());
        assert!(connect(server.address, renewed, &[]).await.is_ok());
    }
}
