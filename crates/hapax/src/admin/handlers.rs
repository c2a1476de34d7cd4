//! Routes for handlers: which are configured, and pausing them.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::job::WorkLocation;
use hapax_core::store::{HandlerRef, HandlerSpec, Inspect, PauseAnswer, PausedHandler};

use super::auth::Caller;
use super::extract::{self, JsonBody, PathHandler};
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{Handler, HandlerPause, List, Pause, ReasonRequest};

/// The handlers that are paused.
pub(super) struct PausedHandlers(Vec<PausedHandler>);

impl PausedHandlers {
    pub(super) async fn of<S: Inspect>(store: &S) -> Result<Self, Problem> {
        Ok(Self(store.paused_handlers().await?))
    }

    /// The pause of this handler, if it is paused.
    pub(super) fn get(&self, handler: &HandlerRef) -> Option<Pause> {
        self.0.iter().find(|one| one.handler == *handler).cloned().map(Pause::from)
    }

    /// All of them.
    pub(super) fn into_list(self) -> Vec<HandlerPause> {
        self.0.into_iter().map(HandlerPause::from).collect()
    }
}

/// `GET /api/v1/handlers`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
) -> Result<Json<List<Handler>>, Problem> {
    let paused = PausedHandlers::of(&*admin.store).await?;
    let shown = |spec: HandlerSpec| Handler {
        paused: paused.get(&spec.handler),
        source: spec.handler.source.to_string(),
        handler: spec.handler.handler,
        pull: spec.workplace == WorkLocation::Pulled,
        attempts_max: spec.policy.retry.len(),
        lease_seconds: spec.policy.lease.as_secs_f64(),
    };
    Ok(Json(List::whole((admin.configured)().into_iter().map(shown).collect())))
}

/// `POST /api/v1/handlers/{source}/{handler}/pause`.
pub(super) async fn pause<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathHandler(handler): PathHandler,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<HandlerPause>, Problem> {
    let by = caller.action(extract::reason(asked.reason)?, (admin.now)());
    if !(admin.configured)().iter().any(|spec| spec.handler == handler) {
        return Err(unknown(&handler));
    }
    let answer = admin.store.pause_handler(handler.clone(), by).await?;
    answered(&admin, &caller, "paused", handler, answer).await
}

/// `POST /api/v1/handlers/{source}/{handler}/resume`. A handler that is no longer configured can be resumed
/// too.
pub(super) async fn resume<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathHandler(handler): PathHandler,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<HandlerPause>, Problem> {
    let by = caller.action(extract::reason(asked.reason)?, (admin.now)());
    let is_paused = PausedHandlers::of(&*admin.store).await?.get(&handler).is_some();
    if !is_paused && !(admin.configured)().iter().any(|spec| spec.handler == handler) {
        return Err(unknown(&handler));
    }
    let answer = admin.store.resume_handler(handler.clone(), by).await?;
    answered(&admin, &caller, "resumed", handler, answer).await
}

/// Logs the act if it changed anything, and returns the handler as it is now.
async fn answered<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    did: &str,
    handler: HandlerRef,
    answer: PauseAnswer,
) -> Result<Json<HandlerPause>, Problem> {
    let (who, HandlerRef { source, handler: name }) = (caller.who(), &handler);
    match answer {
        PauseAnswer::Changed => {
            tracing::info!(source = %source, token = who, "{who} {did} the handler {source}/{name}");
        }
        PauseAnswer::AlreadySo => {}
        PauseAnswer::Unknown => return Err(unknown(&handler)),
    }
    let paused = PausedHandlers::of(&*admin.store).await?.get(&handler);
    Ok(Json(HandlerPause {
        source: handler.source.to_string(),
        handler: handler.handler,
        paused,
        changed: answer == PauseAnswer::Changed,
    }))
}

fn unknown(handler: &HandlerRef) -> Problem {
    let HandlerRef { source, handler } = handler;
    Problem::not_found(&format!("no handler \"{handler}\" of source \"{source}\" is configured"))
}
