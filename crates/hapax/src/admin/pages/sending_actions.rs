//! Actions of operators on one delivery, one message or one endpoint.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};

use super::super::auth::Caller;
use super::super::extract::{JsonBody, PathId, QueryParams};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, endpoints, messages};
use super::actions::{ActionForm, ActionRequest, ActionResult, FormField, PageAction, Question};
use super::sending::KeyOrder;
use crate::api::{
    ChangedDeliveries, DeliveryEffect, MessageQuery, ReasonRequest, RotateRequest, SkipEffect,
};
use crate::format;
use crate::format::url_part;

/// The longest sentence about a ping. The sentence quotes the error and is part of a URL.
const SENTENCE_CHARS_MAX: usize = 300;

/// Sends a delivery again.
pub(in crate::admin) struct ReplayDelivery;

impl<S: AdminStore> PageAction<S> for ReplayDelivery {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let Json(delivery) = messages::delivery(State(admin), PathId(id.clone())).await?;
        Ok(Question {
            title: "Send this delivery again?".to_owned(),
            subject: format!("{} to {}", delivery.message, delivery.url),
            sentences: vec![
                format!("It is {} after {}.", delivery.status.as_str(), format::count(delivery.attempt.into(), "attempt")),
                "The endpoint gets the same id and the same bytes, so a receiver that dedupes by id does nothing twice."
                    .to_owned(),
            ],
            button: "Send again",
            back: format!("/deliveries/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let asked = form.reason_body();
        let replay =
            messages::replay_delivery(State(admin), Extension(caller), PathId(id.clone()), asked);
        let Json(replayed) = replay.await?;
        let sentence = match replayed.effect {
            DeliveryEffect::Due => "The delivery is due now.".to_owned(),
            DeliveryEffect::AlreadyOpen => "The delivery is due or under way already.".to_owned(),
        };
        Ok(ActionResult { page: format!("/deliveries/{id}"), sentence, ..ActionResult::default() })
    }
}

/// Gives up a delivery.
pub(in crate::admin) struct SkipDelivery;

impl<S: AdminStore> PageAction<S> for SkipDelivery {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let read = messages::delivery(State(Arc::clone(&admin)), PathId(id.clone()));
        let Json(delivery) = read.await?;
        let order = KeyOrder::of(&admin, &delivery).await?;
        let status = delivery.status.as_str();
        let mut subject = format!("{} to {}", delivery.message, delivery.url);
        let (sentences, button) = if order.may_skip(&delivery) {
            let then = match &delivery.key {
                Some(key) if order.is_ordered => {
                    format!("The next delivery under the key {key} is sent without it.")
                }
                Some(_) | None => "No later attempt is made.".to_owned(),
            };
            (vec![format!("It is {status}. The endpoint does not get it."), then], "Give up")
        } else {
            subject += &format!(" is {status}: there is nothing to give up now.");
            (Vec::new(), "")
        };
        Ok(Question {
            title: "Give up this delivery?".to_owned(),
            subject,
            sentences,
            button,
            is_final: true,
            back: format!("/deliveries/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let asked = form.reason_body();
        let skip =
            messages::skip_delivery(State(admin), Extension(caller), PathId(id.clone()), asked);
        let Json(skipped) = skip.await?;
        let sentence = match skipped.effect {
            SkipEffect::Skipped => "The delivery is given up.".to_owned(),
            SkipEffect::AlreadyOver => "The delivery was over already.".to_owned(),
        };
        Ok(ActionResult { page: format!("/deliveries/{id}"), sentence, ..ActionResult::default() })
    }
}

/// Sends again the deliveries of a message that are not delivered.
pub(in crate::admin) struct ReplayMessage;

impl<S: AdminStore> PageAction<S> for ReplayMessage {
    async fn question(
        ActionRequest { id, filters, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        Ok(Question {
            title: "Send this message again?".to_owned(),
            back: filters.link(&message_page(&id)),
            subject: id,
            sentences: vec!["Every delivery that is not delivered is attempted now.".to_owned()],
            button: "Send again",
            ..Question::default()
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        change_message(asked, form, messages::replay, "due now").await
    }
}

/// Cancels the open deliveries of a message.
pub(in crate::admin) struct CancelMessage;

impl<S: AdminStore> PageAction<S> for CancelMessage {
    async fn question(
        ActionRequest { id, filters, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        Ok(Question {
            title: "Cancel this message?".to_owned(),
            back: filters.link(&message_page(&id)),
            subject: id,
            sentences: vec!["Its open deliveries are no longer attempted.".to_owned()],
            button: "Cancel deliveries",
            is_final: true,
            ..Question::default()
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        change_message(asked, form, messages::cancel, "cancelled").await
    }
}

/// Changes the deliveries of a message through a function of the API, and shows the message.
async fn change_message<S, F>(
    ActionRequest { admin, caller, id, filters }: ActionRequest<S>,
    form: &ActionForm,
    change: impl FnOnce(
        State<Arc<Admin<S>>>,
        Extension<Caller>,
        PathId,
        QueryParams<MessageQuery>,
        JsonBody<ReasonRequest>,
    ) -> F,
    changed: &str,
) -> Result<ActionResult, Problem>
where
    F: Future<Output = Result<Json<ChangedDeliveries>, Problem>>,
{
    let query = QueryParams(MessageQuery { tenant: filters.get("tenant") });
    let (page, path) = (message_page(&id), PathId(id));
    let change = change(State(admin), Extension(caller), path, query, form.reason_body());
    let Json(ChangedDeliveries { deliveries }) = change.await?;
    let sentence = match deliveries.len() {
        1 => format!("1 delivery is {changed}."),
        count => format!("{count} deliveries are {changed}."),
    };
    Ok(ActionResult { page, filters, sentence, ..ActionResult::default() })
}

fn message_page(id: &str) -> String {
    format!("/messages/{}", url_part(id))
}

/// Holds the deliveries of an endpoint.
pub(in crate::admin) struct DisableEndpoint;

impl<S: AdminStore> PageAction<S> for DisableEndpoint {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "Disable this endpoint?".to_owned(),
            sentences: vec![
                "Its deliveries are held until it is enabled. None is lost.".to_owned(),
            ],
            button: "Disable",
            ..about_endpoint(asked).await?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        change_endpoint(asked, form, endpoints::disable, "disabled").await
    }
}

/// Enables a disabled endpoint.
pub(in crate::admin) struct EnableEndpoint;

impl<S: AdminStore> PageAction<S> for EnableEndpoint {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        Ok(Question {
            title: "Enable this endpoint?".to_owned(),
            sentences: vec!["Its held deliveries are attempted again.".to_owned()],
            button: "Enable",
            ..about_endpoint(asked).await?
        })
    }

    async fn act(asked: ActionRequest<S>, form: &ActionForm) -> Result<ActionResult, Problem> {
        change_endpoint(asked, form, endpoints::enable, "enabled").await
    }
}

/// Sends one test message.
pub(in crate::admin) struct PingEndpoint;

impl<S: AdminStore> PageAction<S> for PingEndpoint {
    async fn question(asked: ActionRequest<S>) -> Result<Question, Problem> {
        let sentence = "One signed test message is sent now. It is neither recorded nor retried.";
        Ok(Question {
            title: "Ping this endpoint?".to_owned(),
            sentences: vec![sentence.to_owned()],
            button: "Ping",
            ..about_endpoint(asked).await?
        })
    }

    async fn act(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let asked = form.reason_body();
        let Json(ping) = endpoints::ping(State(admin), PathId(id.clone()), asked).await?;
        let answer = match (ping.status, ping.error) {
            (_, Some(error)) => format!("The ping failed after {} ms: {error}", ping.took_ms),
            (Some(status), None) => {
                format!("The endpoint answered HTTP {status} after {} ms.", ping.took_ms)
            }
            (None, None) => "The endpoint answered.".to_owned(),
        };
        Ok(endpoint_shown(&id, answer.chars().take(SENTENCE_CHARS_MAX).collect()))
    }
}

/// A question about an endpoint, with its subject and the link back. The caller adds the text.
async fn about_endpoint<S: AdminStore>(
    ActionRequest { admin, id, .. }: ActionRequest<S>,
) -> Result<Question, Problem> {
    let back = format!("/endpoints/{id}");
    let Json(endpoint) = endpoints::show(State(admin), PathId(id)).await?;
    Ok(Question { subject: endpoint.url, back, ..Question::default() })
}

/// Changes an endpoint through a function of the API, and shows its page.
async fn change_endpoint<S, F, T>(
    ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
    form: &ActionForm,
    change: impl FnOnce(State<Arc<Admin<S>>>, Extension<Caller>, PathId, JsonBody<ReasonRequest>) -> F,
    changed: &str,
) -> Result<ActionResult, Problem>
where
    F: Future<Output = Result<T, Problem>>,
{
    change(State(admin), Extension(caller), PathId(id.clone()), form.reason_body()).await?;
    Ok(endpoint_shown(&id, format!("The endpoint is {changed}.")))
}

/// The page of the endpoint after an action.
fn endpoint_shown(id: &str, sentence: String) -> ActionResult {
    ActionResult { page: format!("/endpoints/{id}"), sentence, ..ActionResult::default() }
}

/// Gives an endpoint a new secret.
pub(in crate::admin) struct RotateEndpoint;

impl<S: AdminStore> PageAction<S> for RotateEndpoint {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let Json(endpoint) = endpoints::show(State(admin), PathId(id.clone())).await?;
        Ok(Question {
            title: "Rotate the secret of this endpoint?".to_owned(),
            subject: endpoint.url,
            sentences: vec![
                "Deliveries are signed with a new secret, which the next page shows once.".to_owned(),
                "During the overlap they are signed with the old secret too, so the receiver can change \
                 over without losing one."
                    .to_owned(),
            ],
            fields: vec![FormField {
                name: "overlap",
                label: "Overlap (0s revokes the old secret now)",
                value: Some("24h".to_owned()),
                ..FormField::default()
            }],
            button: "Rotate",
            back: format!("/endpoints/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let QueryParams(asked) = form.fields.only(&["overlap"]).query::<RotateRequest>()?;
        let rotated =
            endpoints::rotate(State(admin), Extension(caller), PathId(id.clone()), JsonBody(asked));
        let Json(endpoint) = rotated.await?;
        let sentence = match endpoint.secret {
            Some(_) => "The secret was rotated. The new one is shown once.",
            None => "The key was rotated. Give the new public key to the receiver.",
        };
        let (page, sentence) = (format!("/endpoints/{id}"), sentence.to_owned());
        Ok(ActionResult { page, sentence, secret: endpoint.secret, ..ActionResult::default() })
    }
}
