//! However the work ends, its key is settled: the answer is stored, the key is free, or it stays in progress until
//! its lease ends.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::ledger::{Reserved, Settle};
use hapax_core::limits::{ANSWER_BODY_BYTES_MAX, ANSWER_HEADER_BYTES_MAX};
use hapax_core::store::StoreError;
use hapax_layer::{Body, BoxError, IdempotencyOutcome};
use hapax_sim::{Act, PLANNED};
use http::{HeaderMap, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::support::{Api, Failed, LEASE, Paused, answer, charge, paused, rules, soon};

/// The state of a key after its first run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// Every retry gets an answer with this status.
    Kept(u16),
    /// The next request runs.
    Free,
    /// No request runs before the lease has ended. After that, the next one runs.
    InProgress,
}

/// The answer to the first caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hears {
    Status(u16),
    Error,
}

/// How the work ends.
type Exit = fn() -> Result<Response<Body>, Failed>;

async fn check(name: &str, exit: Exit, hears: Hears, after: After) {
    let api = Api::new(rules(), move |effects, request| async move {
        let reserved = request.extensions().get::<Reserved>().expect("a right to the work");
        assert_eq!(reserved.key.as_str(), "k");
        match effects.add(format!("attempt {}", reserved.attempt)) {
            1 => exit(),
            _ => Ok(answer(StatusCode::OK, format!("attempt {}", reserved.attempt))),
        }
    });
    let first = api.try_send(charge("k")).await;
    let heard = first.as_ref().map_or(Hears::Error, |heard| Hears::Status(heard.status));
    assert_eq!(heard, hears, "{name}: {first:?}");
    if let Ok(first) = &first {
        assert_eq!(first.outcome, Some(IdempotencyOutcome::Fresh), "{name}");
        assert_eq!(first.header("idempotency-replayed"), None, "{name}");
    }

    let second = api.send(charge("k")).await;
    match after {
        After::Kept(status) => {
            assert!(second.is_replay(), "{name}: {second:?}");
            assert_eq!(second.status, status, "{name}");
            assert_eq!(api.effects.count(), 1, "{name}");
        }
        After::Free => {
            assert_eq!((&second.body[..], api.effects.count()), (&b"attempt 1"[..], 2), "{name}");
        }
        After::InProgress => {
            assert_eq!(
                (second.status, second.outcome),
                (409, Some(IdempotencyOutcome::InProgress)),
                "{name}"
            );
            assert_eq!(second.header("retry-after"), Some("5"), "{name}");
            assert_eq!(api.effects.count(), 1, "{name}");
            api.ledger.pass(LEASE);
            let third = api.send(charge("k")).await;
            assert_eq!((&third.body[..], api.effects.count()), (&b"attempt 2"[..], 2), "{name}");
        }
    }
    // No request is still running in the background.
    soon(api.layer.drained()).await;
}

fn status(code: u16) -> Result<Response<Body>, Failed> {
    Ok(answer(StatusCode::from_u16(code).unwrap(), format!("{{\"code\":{code}}}")))
}

fn settled(code: u16, settle: Settle) -> Result<Response<Body>, Failed> {
    let mut answer = status(code)?;
    answer.extensions_mut().insert(settle);
    Ok(answer)
}

/// An answer with these frames.
fn frames(
    frames: impl IntoIterator<Item = Result<Frame<Bytes>, BoxError>>,
) -> Result<Response<Body>, Failed> {
    Ok(Response::new(Body::new(Frames(frames.into_iter().collect::<Vec<_>>().into_iter()))))
}

struct Frames(std::vec::IntoIter<Result<Frame<Bytes>, BoxError>>);

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(self.0.next())
    }
}

/// A body that sends one frame and stays open.
struct Open(Option<Bytes>);

impl http_body::Body for Open {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.0.take().map_or(Poll::Pending, |said| Poll::Ready(Some(Ok(Frame::data(said)))))
    }
}

fn data(length: usize) -> Result<Frame<Bytes>, BoxError> {
    Ok(Frame::data(Bytes::from(vec![b'x'; length])))
}

#[tokio::test]
async fn an_answer_settles_its_key_by_its_status_or_by_its_settle_extension() {
    check("200", || status(200), Hears::Status(200), After::Kept(200)).await;
    check("204", || status(204), Hears::Status(204), After::Kept(204)).await;
    check("302", || status(302), Hears::Status(302), After::Kept(302)).await;
    check("400", || status(400), Hears::Status(400), After::Kept(400)).await;
    check("404", || status(404), Hears::Status(404), After::Kept(404)).await;
    check("500", || status(500), Hears::Status(500), After::Kept(500)).await;
    check("401", || status(401), Hears::Status(401), After::Free).await;
    check("425", || status(425), Hears::Status(425), After::Free).await;
    check("429", || status(429), Hears::Status(429), After::Free).await;
    // A timeout around the work answers 408, and the work may be half done.
    check("408", || status(408), Hears::Status(408), After::InProgress).await;
    check("502", || status(502), Hears::Status(502), After::InProgress).await;
    check("503", || status(503), Hears::Status(503), After::InProgress).await;
    check("504", || status(504), Hears::Status(504), After::InProgress).await;
    let kept = || settled(429, Settle::Keep);
    check("429, but kept", kept, Hears::Status(429), After::Kept(429)).await;
    check("502, but free", || settled(502, Settle::Free), Hears::Status(502), After::Free).await;
    let unknown = || settled(200, Settle::Wait);
    check("200, but unknown", unknown, Hears::Status(200), After::InProgress).await;
}

#[tokio::test]
async fn work_that_fails_keeps_nothing_and_its_key_waits_out_the_lease() {
    check("an error", || Err("boom".into()), Hears::Error, After::InProgress).await;
    check("a panic", || panic!("boom"), Hears::Status(500), After::InProgress).await;
    let broken = || frames([data(10), Err("reset".into())]);
    check("an answer that breaks off", broken, Hears::Status(502), After::InProgress).await;
    let at_once = || frames([Err("reset".into())]);
    check("an answer that never begins", at_once, Hears::Status(502), After::InProgress).await;
}

#[tokio::test]
async fn an_answer_as_large_as_can_be_kept_is_kept() {
    let largest = || frames([data(ANSWER_BODY_BYTES_MAX - 10), data(10)]);
    check("the largest", largest, Hears::Status(200), After::Kept(200)).await;
}

// The work of a huge answer is done. If the key were free or in progress, the work would be done again.
#[tokio::test]
async fn an_answer_too_large_to_keep_is_never_run_again() {
    let in_pieces = || frames([data(ANSWER_BODY_BYTES_MAX), data(1)]);
    check("in pieces", in_pieces, Hears::Status(200), After::Kept(500)).await;
    let in_one = || Ok(answer(StatusCode::OK, vec![b'x'; ANSWER_BODY_BYTES_MAX + 1]));
    check("in one", in_one, Hears::Status(200), After::Kept(500)).await;
    let many_headers = || {
        let mut answer = answer(StatusCode::OK, "{}");
        let value = "v".repeat(ANSWER_HEADER_BYTES_MAX);
        answer.headers_mut().insert("x-large", value.parse().unwrap());
        Ok(answer)
    };
    check("its headers", many_headers, Hears::Status(200), After::Kept(500)).await;
    // Once an answer exceeds the limit, its key is settled, even if the answer is interrupted
    // later.
    let then_broken = || frames([data(ANSWER_BODY_BYTES_MAX + 1), Err("reset".into())]);
    check("and it breaks off", then_broken, Hears::Error, After::Kept(500)).await;
}

#[tokio::test]
async fn the_first_caller_gets_a_huge_answer_whole_and_retries_get_an_error() {
    let api = Api::new(rules(), |effects, _| async move {
        effects.add("exported");
        let pieces = (0..5u8).map(|piece| {
            Ok(Frame::data(Bytes::from(vec![b'a' + piece; ANSWER_BODY_BYTES_MAX / 3])))
        });
        frames(pieces)
    });
    let first = api.send(charge("k")).await;
    let expected: Vec<_> =
        (0..5u8).flat_map(|piece| vec![b'a' + piece; ANSWER_BODY_BYTES_MAX / 3]).collect();
    assert!(first.body == expected, "every byte, in order");
    let replay = api.send(charge("k")).await;
    assert_eq!((replay.status, replay.problem().as_deref()), (500, Some("answer_too_large")));
    assert!(replay.is_replay());
    assert_eq!(api.effects.count(), 1);
}

// A stream of events never reaches the limit and never ends. If the layer collected it, the caller
// would wait forever.
#[tokio::test(start_paused = true)]
async fn an_answer_that_does_not_end_is_streamed_before_its_lease_is_over() {
    let api = Api::new(rules(), |effects, _| async move {
        effects.add("subscribed");
        Ok(Response::new(Body::new(Open(Some(Bytes::from_static(b"event 1"))))))
    });
    let asked = Instant::now();
    let response = tower::ServiceExt::oneshot(api.service.clone(), charge("k").into_request());
    let mut body = response.await.unwrap().into_body();
    assert_eq!(asked.elapsed(), LEASE / 4 * 3);
    let first = soon(body.frame()).await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "event 1");
    let retry = api.send(charge("k")).await;
    assert_eq!((retry.status, retry.is_replay()), (500, true));
    assert_eq!(api.effects.count(), 1);
}

// After work that took nearly all of its lease, a pause in the answer would outlast the lease.
#[tokio::test(start_paused = true)]
async fn an_answer_that_begins_late_may_still_end() {
    let api = Api::new(rules(), |effects, _| async move {
        effects.add("worked");
        tokio::time::sleep(LEASE).await;
        let pause = tokio::time::sleep(LEASE / 8);
        Ok(Response::new(Body::new(Full::new(Bytes::from_static(b"late")).with_trailers(async {
            pause.await;
            None
        }))))
    });
    assert_eq!(api.send(charge("k")).await.body, "late");
    let replay = api.send(charge("k")).await;
    assert_eq!((replay.status, &replay.body[..]), (200, &b"late"[..]));
    assert!(replay.is_replay());
}

// An answer that is collected would lose its trailers.
#[tokio::test]
async fn trailers_reach_the_first_caller() {
    let api = Api::new(rules(), |effects, _| async move {
        effects.add("called");
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse()?);
        frames([data(3), Ok(Frame::trailers(trailers))])
    });
    let first = api.send(charge("k")).await;
    assert_eq!(first.trailers.as_ref().unwrap()["grpc-status"], "0");
    let replay = api.send(charge("k")).await;
    assert_eq!((replay.body, replay.trailers), (first.body, None));
    assert_eq!(api.effects.count(), 1);
}

// A replayed length or connection header would describe a connection that is closed.
#[tokio::test]
async fn headers_of_one_connection_are_not_stored() {
    let api = Api::new(rules(), |effects, _| async move {
        effects.add("called");
        let mut answer = answer(StatusCode::OK, "{}");
        for (name, value) in [
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("content-length", "2"),
            ("idempotency-replayed", "false"),
            ("location", "/charges/1"),
            ("link", "<a>"),
        ] {
            answer.headers_mut().insert(name, value.parse()?);
        }
        answer.headers_mut().append("link", "<b>".parse()?);
        answer.headers_mut().insert("x-latin", http::HeaderValue::from_bytes(b"caf\xe9")?);
        Ok(answer)
    });
    api.send(charge("k")).await;
    let replay = api.send(charge("k")).await;
    let mut names: Vec<_> = replay.headers.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-type", "idempotency-replayed", "link", "link", "location"]);
    let links: Vec<_> = replay.headers.get_all("link").iter().collect();
    assert_eq!(links, ["<a>", "<b>"]);
    assert!(replay.is_replay());
}

// Without its own task, the work would be interrupted half done when the client hangs up, and its
// key would stay in progress.
#[tokio::test]
async fn a_client_that_hangs_up_cuts_nothing_short() {
    let Paused { api, begun, gate } = paused(rules());
    let sender = api.clone();
    let client = tokio::spawn(async move { sender.send(charge("k")).await });
    soon(begun.notified()).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    assert_eq!(api.send(charge("k")).await.outcome, Some(IdempotencyOutcome::InProgress));

    gate.add_permits(1);
    soon(api.layer.drained()).await;
    let replay = api.send(charge("k")).await;
    assert_eq!((replay.status, &replay.body[..]), (201, &b"run 1"[..]));
    assert!(replay.is_replay());
}

// Between the reservation and the work, the key is taken and nothing runs yet.
#[tokio::test]
async fn a_client_that_hangs_up_while_its_key_is_reserved_leaves_no_key_behind() {
    let api = Api::counting(rules());
    let gate = api.ledger.faults.block_answers(Act::Reserve);
    let sender = api.clone();
    let client = tokio::spawn(async move { sender.send(charge("k")).await });
    soon(api.ledger.reserved()).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    gate.add_permits(Semaphore::MAX_PERMITS / 2);
    soon(api.layer.drained()).await;
    assert!(api.send(charge("k")).await.is_replay());
    assert_eq!(api.effects.count(), 1);
}

#[tokio::test]
async fn without_a_ledger_nothing_runs() {
    let api = Api::counting(rules());
    api.ledger.fail(Act::Reserve);
    let heard = api.send(charge("k")).await;
    assert_eq!((heard.status, heard.outcome), (503, Some(IdempotencyOutcome::Unavailable)));
    assert_eq!(heard.problem().as_deref(), Some("unavailable"));
    assert_eq!(heard.header("retry-after"), Some("2"));
    assert!(!String::from_utf8_lossy(&heard.body).contains(PLANNED));
    assert_eq!(api.effects.count(), 0);
    api.ledger.faults.heal(Act::Reserve);
    assert_eq!(api.send(charge("k")).await.status, 201);
}

// If the layer gave up at the first error of the ledger, the same charge would run again after the lease.
#[tokio::test(start_paused = true)]
async fn an_answer_that_cannot_be_kept_for_a_while_is_kept_then() {
    kept_once_the_ledger_takes_it(StoreError::Unavailable(PLANNED.into())).await;
}

// The work is done, and the ledger's queue is full for a moment.
#[tokio::test(start_paused = true)]
async fn an_answer_that_a_busy_ledger_does_not_take_is_kept_then() {
    kept_once_the_ledger_takes_it(StoreError::Busy).await;
}

async fn kept_once_the_ledger_takes_it(error: StoreError) {
    let api = Api::counting(rules());
    api.ledger.faults.fail(Act::Finish, error);
    let sender = api.clone();
    let client = tokio::spawn(async move { sender.send(charge("k")).await });
    let finishes = || api.ledger.faults.begun(Act::Finish);
    while finishes() < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!client.is_finished());
    api.ledger.faults.heal(Act::Finish);
    assert_eq!(soon(client).await.unwrap().status, 201);
    assert!(api.send(charge("k")).await.is_replay());
    assert_eq!(api.effects.count(), 1);
}

// If an answer were sent before it is stored, a client could get 201 and, after a crash, another answer.
#[tokio::test(start_paused = true)]
async fn an_answer_that_cannot_be_kept_is_not_sent() {
    let api = Api::counting(rules());
    api.ledger.fail(Act::Finish);
    let heard = api.send(charge("k")).await;
    assert_eq!((heard.status, heard.outcome), (503, Some(IdempotencyOutcome::Unavailable)));
    assert!(!String::from_utf8_lossy(&heard.body).contains("run"), "{heard:?}");
    api.ledger.faults.heal(Act::Finish);
    assert_eq!(api.send(charge("k")).await.outcome, Some(IdempotencyOutcome::InProgress));
    assert_eq!(api.effects.count(), 1);
}

// The ledger took so long that another attempt may run by now. If this work began, there could be a
// second effect.
#[tokio::test(start_paused = true)]
async fn work_whose_lease_is_over_before_it_begins_is_not_begun() {
    let api = Api::counting(rules());
    let gate = api.ledger.faults.block_answers(Act::Reserve);
    let sender = api.clone();
    let client = tokio::spawn(async move { sender.send(charge("k")).await });
    soon(api.ledger.reserved()).await;
    tokio::time::advance(LEASE).await;
    gate.add_permits(Semaphore::MAX_PERMITS / 2);
    let heard = soon(client).await.unwrap();
    assert_eq!((heard.status, heard.outcome), (503, Some(IdempotencyOutcome::Unavailable)));
    assert_eq!(heard.header("retry-after"), Some("2"));
    assert_eq!(api.effects.count(), 0);
    // Nothing was done, so the key is free.
    assert_eq!((api.send(charge("k")).await.status, api.effects.count()), (201, 1));
}

#[tokio::test]
async fn a_key_that_cannot_be_freed_waits_out_its_lease() {
    let api = Api::new(rules(), |effects, _| async move {
        effects.add("turned away");
        status(401)
    });
    api.ledger.fail(Act::Abandon);
    assert_eq!(api.send(charge("k")).await.status, 401);
    assert_eq!(api.send(charge("k")).await.outcome, Some(IdempotencyOutcome::InProgress));
    api.ledger.pass(LEASE);
    assert_eq!(api.send(charge("k")).await.status, 401);
    assert_eq!(api.effects.count(), 2);
}

// The layer reads the stored answer by reserving the key. Because the lease has ended, that gives the layer
// a new reservation, which it must release.
#[tokio::test]
async fn work_that_ended_unknown_after_its_lease_leaves_the_key_free() {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let api = Api::new(rules(), move |effects, _| {
        let held = Arc::clone(&held);
        async move {
            if effects.add("charged") > 1 {
                return status(201);
            }
            held.acquire().await.expect("never closed").forget();
            settled(502, Settle::Wait)
        }
    });
    let sender = api.clone();
    let client = tokio::spawn(async move { sender.send(charge("k")).await });
    soon(async {
        while api.effects.count() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    api.ledger.pass(LEASE);
    gate.add_permits(1);
    assert_eq!(soon(client).await.unwrap().status, 502);
    assert_eq!((api.send(charge("k")).await.status, api.effects.count()), (201, 2));
}

// A service that fails before it accepts the request has done nothing, and must not block the key.
#[tokio::test]
async fn a_service_that_does_not_get_ready_frees_the_key() {
    let api = Api::counting(rules());
    let mut refusing = tower::Layer::layer(&api.layer, NeverReady);
    let call = tower::Service::call(&mut refusing, charge("k").into_request());
    assert_eq!(soon(call).await.unwrap_err().to_string(), "not ready");
    assert_eq!(api.send(charge("k")).await.status, 201);
    assert_eq!(api.ledger.faults.begun(Act::Reserve), 2);
}

#[derive(Clone)]
struct NeverReady;

impl tower::Service<http::Request<Body>> for NeverReady {
    type Response = Response<Body>;
    type Error = Failed;
    type Future = std::future::Ready<Result<Response<Body>, Failed>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        Poll::Ready(Err("not ready".into()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        panic!("it said that it is not ready")
    }
}
