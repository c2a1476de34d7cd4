//! Actions of operators on one event: replay, approve, reject and discard.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};

use super::super::auth::Caller;
use super::super::extract::{JsonBody, PathId};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, events, replay, review};
use super::actions::{ActionForm, ActionRequest, ActionResult, PageAction, Question};
use crate::api::{DecideRequest, Decided, ReplayEffect, ReplayEventRequest, Replayed};

/// Runs the jobs of an event again.
pub(in crate::admin) struct ReplayEvent;

impl<S: AdminStore> PageAction<S> for ReplayEvent {
    async fn question(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let event = events::find(&*admin.store, &id).await?.summary;
        let asked = ReplayEventRequest { dry_run: true, ..ReplayEventRequest::default() };
        let dry_run = replay::event(State(admin), Extension(caller), PathId(id), JsonBody(asked));
        let Json(replayed) = dry_run.await?;
        Ok(Question {
            title: "Replay this event?".to_owned(),
            subject: event.event_id,
            sentences: effects(&replayed),
            button: "Replay",
            offers_force: true,
            back: format!("/events/{}", event.id),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let asked = ReplayEventRequest {
            reason: form.reason.clone(),
            force: form.force,
            ..ReplayEventRequest::default()
        };
        let replay = replay::event(
            State(Arc::clone(&admin)),
            Extension(caller),
            PathId(id.clone()),
            JsonBody(asked),
        );
        let Json(replayed) = replay.await?;
        let page = event_page(&admin, &id).await?;
        let sentence = effects(&replayed).join(" ");
        Ok(ActionResult { page, sentence, ..ActionResult::default() })
    }
}

/// The page of an event, by Hapax's id: the sender's may have any character.
async fn event_page<S: AdminStore>(admin: &Admin<S>, id: &str) -> Result<String, Problem> {
    Ok(format!("/events/{}", events::find(&*admin.store, id).await?.summary.id))
}

/// One sentence for each job about the effect of a replay.
fn effects(replayed: &Replayed) -> Vec<String> {
    if replayed.items.is_empty() {
        return vec!["No configured handler takes this event, so nothing runs.".to_owned()];
    }
    let effect = |item: &crate::api::ReplayItem| {
        let handler = &item.handler;
        match item.effect {
            ReplayEffect::WouldRun => format!("{handler} would run."),
            ReplayEffect::Runs => format!("{handler} runs now."),
            ReplayEffect::AlreadyApplied => {
                format!("{handler} is done already: nothing happens unless it is forced.")
            }
            ReplayEffect::Stale => {
                format!("{handler} does nothing: a newer version was already applied.")
            }
            ReplayEffect::AlreadyOpen => format!("{handler} is due or running already."),
            ReplayEffect::Discarded => {
                format!("{handler} was discarded: nothing happens unless it is forced.")
            }
            ReplayEffect::NoHandler | ReplayEffect::NoOrder => {
                let why =
                    item.detail.as_deref().unwrap_or("no configured handler takes this event");
                format!("{handler} cannot run: {why}.")
            }
        }
    };
    replayed.items.iter().map(effect).collect()
}

/// Lets the jobs of an event in review run.
pub(in crate::admin) struct ApproveEvent;

impl<S: AdminStore> PageAction<S> for ApproveEvent {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "Approve this event?".to_owned(),
            sentences: vec![
                "The handlers of the event run as if it had arrived in time.".to_owned(),
            ],
            button: "Approve",
            ..about_event(asked).await?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        decide(asked, form, review::approve).await
    }
}

/// Rejects an event in review.
pub(in crate::admin) struct RejectEvent;

impl<S: AdminStore> PageAction<S> for RejectEvent {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "Reject this event?".to_owned(),
            sentences: vec!["Its handlers never run.".to_owned()],
            button: "Reject",
            needs_reason: true,
            is_final: true,
            ..about_event(asked).await?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        decide(asked, form, review::reject).await
    }
}

/// Discards the dead letters of an event.
pub(in crate::admin) struct DiscardEvent;

impl<S: AdminStore> PageAction<S> for DiscardEvent {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "Discard the dead letters of this event?".to_owned(),
            sentences: vec!["The dead letters are removed from the list and never run.".to_owned()],
            button: "Discard",
            is_final: true,
            ..about_event(asked).await?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        decide(asked, form, review::discard_of_event).await
    }
}

/// A question about an event, without its text.
async fn about_event<S: AdminStore>(
    ActionRequest { admin, id, .. }: ActionRequest<S>,
) -> Result<Question, Problem> {
    let event = events::find(&*admin.store, &id).await?.summary;
    let back = format!("/events/{}", event.id);
    Ok(Question { subject: event.event_id, back, ..Question::default() })
}

/// Decides about an event through a function of the API, and shows its page.
async fn decide<S, F>(
    ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
    form: &ActionForm,
    decide: impl FnOnce(State<Arc<Admin<S>>>, Extension<Caller>, PathId, JsonBody<DecideRequest>) -> F,
) -> Result<ActionResult, Problem>
where
    F: Future<Output = Result<Json<Decided>, Problem>>,
{
    let asked = JsonBody(DecideRequest { reason: form.reason.clone() });
    let Json(decided) = decide(State(admin), Extension(caller), PathId(id), asked).await?;
    let sentence = format!("The event is {} now.", decided.status.as_str());
    let page = format!("/events/{}", decided.id);
    Ok(ActionResult { page, sentence, ..ActionResult::default() })
}
