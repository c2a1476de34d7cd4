//! The page of alerts, and its actions: silence, and a test alert.

use std::sync::Arc;
use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::{Extension, Json};

use super::super::extract::{JsonBody, PathId};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, alerts};
use super::actions::{ActionForm, ActionRequest, ActionResult, FormField, PageAction, Question};
use super::filters::Filters;
use super::{Frame, Page, PageReader};
use crate::api::{Alert, AlertList, SilenceRequest, Span};
use crate::config::units;
use crate::format;
use crate::format::url_part;

#[derive(Template)]
#[template(path = "alerts.html")]
pub(in crate::admin) struct Alerts {
    frame: Frame,
    list: AlertList,
    done: Option<String>,
}

/// `GET /alerts`.
pub(in crate::admin) async fn alerts<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Alerts>, Problem> {
    let Json(list) = alerts::list(State(Arc::clone(&admin))).await;
    let frame = reader.frame(&admin, "/alerts").await;
    Ok(reader.page(Alerts { frame, list, done: filters.done() }))
}

/// The page where an operator sees what an alert is about: the text of its link, and its path.
pub(crate) fn alert_page(alert: &Alert) -> Option<(&'static str, String)> {
    let filtered = |path: &str, fields: &[(&str, &str)]| {
        let filters = fields
            .iter()
            .fold(Filters::default(), |filters, (name, value)| filters.with(name, value));
        filters.link(path)
    };
    let about_source = |name, fragment: &str| {
        let source = url_part(alert.source.as_deref()?);
        Some((name, format!("/sources/{source}{fragment}")))
    };
    if let Some(endpoint) = &alert.endpoint {
        return Some(("endpoint", format!("/endpoints/{}", url_part(endpoint))));
    }
    match (alert.name.as_str(), alert.lane.as_deref().and_then(|lane| lane.split_once('/'))) {
        ("dead_letters", Some((source, handler))) => {
            let fields = [("source", source), ("handler", handler)];
            Some(("dead letters", filtered("/dead", &fields)))
        }
        ("oldest_job", Some((source, handler))) => {
            let fields = [("source", source), ("handler", handler), ("status", "ready")];
            Some(("jobs", filtered("/jobs", &fields)))
        }
        ("review", _) => {
            let source = alert.source.as_deref().unwrap_or_default();
            Some(("review", filtered("/review", &[("source", source)])))
        }
        ("duplicate_spike" | "conflicts", _) => Some(("duplicates", "/duplicates".to_owned())),
        ("log_growth" | "store", _) => Some(("storage", "/storage".to_owned())),
        ("failed_verifications", _) => about_source("refused requests", "#rejections"),
        ("secret_expiry", _) => about_source("secrets", "#secrets"),
        (_, Some(_)) => Some(("handlers", "/handlers".to_owned())),
        (_, None) => about_source("source", ""),
    }
}

/// Silences an alert.
pub(in crate::admin) struct SilenceAlert;

impl<S: AdminStore> PageAction<S> for SilenceAlert {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "Silence this alert?".to_owned(),
            sentences: vec![
                "Until then the alert publishes no messages. It stays on this page, and the metric does not count it."
                    .to_owned(),
                "If the problem still exists then, its receivers are notified.".to_owned(),
            ],
            fields: vec![FormField {
                name: "for",
                label: "How long (such as 30m, 4h, 7d)",
                value: Some("4h".to_owned()),
                ..FormField::default()
            }],
            needs_reason: true,
            button: "Silence",
            ..about_alert(asked).await?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        let span = units::duration(&form.fields.get("for").unwrap_or_default())
            .ok()
            .filter(|span| !span.is_zero())
            .ok_or_else(|| {
                Problem::bad_request(
                    "the duration is missing or not valid: go back and enter one, such as 4h",
                )
            })?;
        silence(asked, form, span).await
    }
}

/// Ends the silence of an alert.
pub(in crate::admin) struct UnsilenceAlert;

impl<S: AdminStore> PageAction<S> for UnsilenceAlert {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "End the silence of this alert?".to_owned(),
            sentences: vec![
                "If the problem still exists, its receivers are notified within seconds."
                    .to_owned(),
            ],
            button: "End the silence",
            ..about_alert(asked).await?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        silence(asked, form, Duration::ZERO).await
    }
}

/// A question about an alert, without its text.
async fn about_alert<S: AdminStore>(
    ActionRequest { admin, id, .. }: ActionRequest<S>,
) -> Result<Question, Problem> {
    let Json(list) = alerts::list(State(admin)).await;
    let alert = list.items.into_iter().find(|alert| alert.id == id);
    let alert = alert.ok_or_else(|| Problem::not_found("no alert has that id, or it is over"))?;
    Ok(Question { subject: alert.message, back: "/alerts".to_owned(), ..Question::default() })
}

/// Silences an alert for `span`; zero ends its silence.
async fn silence<S: AdminStore>(
    ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
    form: &ActionForm,
    span: Duration,
) -> Result<ActionResult, Problem> {
    let asked = SilenceRequest { r#for: Span(span), reason: form.reason.clone() };
    let silenced = alerts::silence(State(admin), Extension(caller), PathId(id), JsonBody(asked));
    let Json(Alert { silenced, .. }) = silenced.await?;
    let sentence = match silenced {
        Some(silence) => format!("The alert is silenced until {}.", format::at(silence.until)),
        None => "The alert is no longer silenced.".to_owned(),
    };
    Ok(ActionResult { page: "/alerts".to_owned(), sentence, ..ActionResult::default() })
}

/// Sends a test alert. Its page is `/alerts/test`.
pub(in crate::admin) struct TestAlert;

impl<S: AdminStore> PageAction<S> for TestAlert {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        is_test(&id)?;
        let reach = alerts::reach(&admin).await?;
        let (sentence, button) = match reach.problem {
            Some(problem) => (format!("No endpoint receives alerts: {problem}"), ""),
            None => (
                format!(
                    "Two messages go to {}: the test alert is raised, and cleared.",
                    format::count(reach.endpoints as u64, "endpoint")
                ),
                "Send",
            ),
        };
        Ok(Question {
            title: "Send a test alert?".to_owned(),
            subject: if button.is_empty() { sentence.clone() } else { String::new() },
            sentences: vec![sentence],
            button,
            back: "/alerts".to_owned(),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        _: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        is_test(&id)?;
        let Json(tested) = alerts::test(State(admin), Extension(caller)).await?;
        let sentence = match tested.messages.is_empty() {
            true => "Nothing was sent: no endpoint subscribes to alerts.".to_owned(),
            false => format!(
                "The test alert is on its way, in {}.",
                format::count(tested.deliveries as u64, "message")
            ),
        };
        Ok(ActionResult { page: "/alerts".to_owned(), sentence, ..ActionResult::default() })
    }
}

fn is_test(id: &str) -> Result<(), Problem> {
    match id {
        "test" => Ok(()),
        _ => Err(Problem::not_found("there is no such page")),
    }
}
