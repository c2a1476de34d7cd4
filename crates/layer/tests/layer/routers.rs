//! The layer around an axum router, as apps use it.

use std::sync::Arc;

use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use hapax_core::ledger::Reserved;
use hapax_layer::{Body, IdempotencyLayer, IdempotencyOutcome, RoutePattern};
use hapax_store::MemoryStore;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::support::{Ask, Effects, Heard, charge, hear, rules};

/// An app with one route that charges, one that fails, and one that only reads.
fn app(effects: Effects) -> Router {
    let required = [RoutePattern::parse("POST /charges").unwrap()];
    let layer =
        IdempotencyLayer::new(Arc::new(MemoryStore::new()), Arc::new(rules().required(required)));
    let charged = effects.clone();
    let charge = move |Extension(reserved): Extension<Reserved>, Json(charge): Json<Value>| {
        let effects = charged.clone();
        async move {
            let id = effects.add(reserved.scope.as_str());
            (StatusCode::CREATED, Json(json!({"id": id, "amount": charge["amount"]})))
        }
    };
    let panics = move || {
        effects.add("panicked");
        async { panic!("boom") as StatusCode }
    };
    Router::new()
        .route("/charges", post(charge).get(async || "none yet"))
        .route("/panics", post(panics))
        .route("/echo", post(async |body: Bytes| body))
        .route("/health", get(async || StatusCode::NO_CONTENT))
        .layer(layer)
}

async fn send(app: &Router, ask: Ask) -> Heard {
    hear(app.clone(), ask.into_request()).await.unwrap()
}

#[tokio::test]
async fn a_handler_runs_once_for_each_key() {
    let effects = Effects::default();
    let app = app(effects.clone());
    let ask = charge("k").header("content-type", "application/json");
    let first = send(&app, ask.clone()).await;
    assert_eq!((first.status, first.outcome), (201, Some(IdempotencyOutcome::Fresh)));
    let body: Value = serde_json::from_slice(&first.body).unwrap();
    assert_eq!(body, json!({"id": 1, "amount": 100}));
    let replay = send(&app, ask.clone()).await;
    assert!(replay.is_replay());
    assert_eq!((replay.status, replay.body), (201, first.body));

    assert_eq!(send(&app, ask.without("idempotency-key")).await.status, 400);
    let look = send(&app, charge("k").method(http::Method::GET)).await;
    assert_eq!((look.status, look.outcome, &look.body[..]), (200, None, &b"none yet"[..]));
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn a_handler_that_panics_is_a_500_and_does_not_run_again_at_once() {
    let effects = Effects::default();
    let app = app(effects.clone());
    let first = send(&app, charge("k").path("/panics")).await;
    assert_eq!(first.status, 500);
    assert!(!String::from_utf8_lossy(&first.body).contains("boom"));
    let retry = send(&app, charge("k").path("/panics")).await;
    assert_eq!((retry.status, retry.outcome), (409, Some(IdempotencyOutcome::InProgress)));
    assert_eq!(effects.count(), 1);
}

// If the layer collected requests without a key, a large upload would fill the memory.
#[tokio::test]
async fn a_request_without_a_key_is_streamed_both_ways() {
    let app = app(Effects::default());
    let (sender, body) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
    let layer = IdempotencyLayer::new(Arc::new(MemoryStore::new()), Arc::new(rules()));
    let echo = tower::service_fn(async |request: Request<Body>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(request.into_body()))
    });
    let service = tower::Layer::layer(&layer, echo);
    let request = Request::post("/echo").body(Incoming(body)).unwrap();
    // The answer begins before the request body has ended.
    let mut answer = service.oneshot(request).await.unwrap().into_body();
    for piece in ["one", "two"] {
        sender.send(Bytes::from(piece)).unwrap();
        let frame = answer.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), piece);
    }
    drop(sender);
    assert!(answer.frame().await.is_none());

    let large = charge("").without("idempotency-key").path("/echo").body(vec![b'x'; 1_500_000]);
    let heard = send(&app, large).await;
    assert_eq!((heard.status, heard.body.len()), (200, 1_500_000));
}

struct Incoming(tokio::sync::mpsc::UnboundedReceiver<Bytes>);

impl http_body::Body for Incoming {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(http_body::Frame::data(piece))))
    }
}
