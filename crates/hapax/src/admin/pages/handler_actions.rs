//! Actions of operators on one handler: pause and resume.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use hapax_core::SourceName;
use hapax_core::job::HandlerName;
use hapax_core::store::HandlerRef;

use super::super::auth::Caller;
use super::super::extract::{JsonBody, PathHandler};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, handlers};
use super::actions::{ActionForm, ActionRequest, ActionResult, PageAction, Question};
use crate::api::ReasonRequest;

/// Pauses a handler.
pub(in crate::admin) struct PauseHandler;

impl<S: AdminStore> PageAction<S> for PauseHandler {
    async fn question(ActionRequest { id, .. }: ActionRequest<S>) -> Result<Question, Problem> {
        let sentence = "No node claims its jobs until it is resumed. Attempts that are running end as usual. \
                        Events are stored as before, and nothing is lost.";
        Ok(Question {
            title: "Pause this handler?".to_owned(),
            sentences: vec![sentence.to_owned()],
            button: "Pause",
            ..about_handler(id)?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        change_handler(asked, form, handlers::pause, "paused").await
    }
}

/// Resumes a paused handler.
pub(in crate::admin) struct ResumeHandler;

impl<S: AdminStore> PageAction<S> for ResumeHandler {
    async fn question(ActionRequest { id, .. }: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "Resume this handler?".to_owned(),
            sentences: vec!["Every job that became due meanwhile runs now.".to_owned()],
            button: "Resume",
            ..about_handler(id)?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        change_handler(asked, form, handlers::resume, "resumed").await
    }
}

/// A question about a handler, without its text.
fn about_handler(id: String) -> Result<Question, Problem> {
    handler_named(&id)?;
    Ok(Question { subject: id, back: "/handlers".to_owned(), ..Question::default() })
}

/// Changes a handler through a function of the API, and shows the list of handlers.
async fn change_handler<S, F, T>(
    ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
    form: &ActionForm,
    change: impl FnOnce(
        State<Arc<Admin<S>>>,
        Extension<Caller>,
        PathHandler,
        JsonBody<ReasonRequest>,
    ) -> F,
    changed: &str,
) -> Result<ActionResult, Problem>
where
    F: Future<Output = Result<T, Problem>>,
{
    let handler = PathHandler(handler_named(&id)?);
    change(State(admin), Extension(caller), handler, form.reason_body()).await?;
    Ok(ActionResult {
        page: "/handlers".to_owned(),
        sentence: format!("The handler {id} is {changed}."),
        ..ActionResult::default()
    })
}

/// The handler that a path names as one segment.
fn handler_named(id: &str) -> Result<HandlerRef, Problem> {
    let (source, handler) =
        id.split_once('/').ok_or_else(|| Problem::not_found("no handler has that name"))?;
    Ok(HandlerRef { source: SourceName::new(source), handler: HandlerName::new(handler) })
}
