//! Actions of operators on one handler: pause and resume.

use axum::Extension;
use axum::extract::State;
use hapax_core::SourceName;
use hapax_core::job::HandlerName;
use hapax_core::store::HandlerRef;

use super::super::extract::{JsonBody, PathHandler};
use super::super::problem::Problem;
use super::super::{AdminStore, handlers};
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

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let handler = PathHandler(handler_named(&id)?);
        let asked = JsonBody(ReasonRequest { reason: form.reason.clone() });
        let _paused = handlers::pause(State(admin), Extension(caller), handler, asked).await?;
        Ok(shown(format!("The handler {id} is paused.")))
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

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let handler = PathHandler(handler_named(&id)?);
        let asked = JsonBody(ReasonRequest { reason: form.reason.clone() });
        let _resumed = handlers::resume(State(admin), Extension(caller), handler, asked).await?;
        Ok(shown(format!("The handler {id} is resumed.")))
    }
}

/// A question about a handler, without its text.
fn about_handler(id: String) -> Result<Question, Problem> {
    handler_named(&id)?;
    Ok(Question { subject: id, back: "/handlers".to_owned(), ..Question::default() })
}

/// The list of handlers after an action.
fn shown(sentence: String) -> ActionResult {
    ActionResult { page: "/handlers".to_owned(), sentence, ..ActionResult::default() }
}

/// The handler that a path names as one segment.
fn handler_named(id: &str) -> Result<HandlerRef, Problem> {
    let (source, handler) =
        id.split_once('/').ok_or_else(|| Problem::not_found("no handler has that name"))?;
    Ok(HandlerRef { source: SourceName::new(source), handler: HandlerName::new(handler) })
}
