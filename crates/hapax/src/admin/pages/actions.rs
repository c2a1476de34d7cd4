//! Actions from pages. A GET shows what the action would do and asks; the POST acts and leads back to the
//! page. Each form has an id of its own that the ledger of Idempotency-Keys remembers, so a form that is sent
//! twice acts once.

use std::sync::Arc;
use std::time::Duration;

use askama::Template;
use axum::body::Bytes;
use axum::extract::{FromRequest, OriginalUri, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use hapax_core::SourceName;
use hapax_core::job::HandlerName;
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Quota, Reservation, ReserveAsk, Scope, StoredAnswer,
};
use hapax_core::store::HandlerRef;
use url::form_urlencoded;
use uuid::Uuid;

use super::super::auth::Caller;
use super::super::extract::{JsonBody, PathHandler, PathId, QueryParams};
use super::super::problem::Problem;
use super::super::storage::OWN_REALMS;
use super::super::{Admin, AdminStore, endpoints, events, handlers, messages, replay, review};
use super::filters::{Filters, form};
use super::{Frame, Page, Reader, SeeOther};
use crate::api::{
    DecideRequest, DeliveryEffect, MessageQuery, ReasonRequest, ReplayEffect, ReplayEventRequest,
    Replayed, RotateRequest,
};
use crate::format;

/// How long an action may take before the same form may act again.
const LEASE: Duration = Duration::from_secs(60);

/// How long a sent form is remembered.
const TTL: Duration = Duration::from_secs(24 * 3_600);

/// The largest form, in bytes.
const FORM_BYTES_MAX: usize = 16_384;

/// The question on the page of an action.
#[derive(Default)]
pub(in crate::admin) struct Question {
    pub(in crate::admin) title: String,
    /// The subject of the action, in the sender's words.
    pub(in crate::admin) subject: String,
    /// The effect of the action, in sentences.
    pub(in crate::admin) sentences: Vec<String>,
    /// Fields that choose the subject of the action. Another choice shows the question again.
    pub(in crate::admin) choices: Vec<FormField>,
    /// The button that acts; empty if there is nothing to do.
    pub(in crate::admin) button: &'static str,
    /// Further fields of the form.
    pub(in crate::admin) fields: Vec<FormField>,
    pub(in crate::admin) needs_reason: bool,
    pub(in crate::admin) offers_force: bool,
    /// Whether the action cannot be undone.
    pub(in crate::admin) is_final: bool,
    /// The page that the reader comes from.
    pub(in crate::admin) back: String,
}

/// A field of a form.
#[derive(Default)]
pub(in crate::admin) struct FormField {
    pub(in crate::admin) name: &'static str,
    pub(in crate::admin) label: &'static str,
    pub(in crate::admin) value: Option<String>,
    /// The words to choose from; empty for free text.
    pub(in crate::admin) words: &'static [&'static str],
    /// Whether the text has several lines.
    pub(in crate::admin) has_lines: bool,
}

/// The result of an action, and the page that shows it.
#[derive(Default)]
pub(in crate::admin) struct ActionResult {
    pub(in crate::admin) page: String,
    /// The query of the page.
    pub(in crate::admin) filters: Filters,
    pub(in crate::admin) sentence: String,
    /// A new secret. Only the answer to the form shows it, and nothing stores it.
    pub(in crate::admin) secret: Option<String>,
}

/// The answer to a form.
pub(in crate::admin) enum Acted {
    /// Leads to the page that shows what was done.
    Leads(SeeOther),
    /// Shows a new secret.
    Shows(Box<Page<NewSecret>>),
}

impl IntoResponse for Acted {
    fn into_response(self) -> Response {
        match self {
            Self::Leads(to) => to.into_response(),
            Self::Shows(page) => page.into_response(),
        }
    }
}

#[derive(Template)]
#[template(path = "secret.html")]
pub(in crate::admin) struct NewSecret {
    frame: Frame,
    sentence: String,
    secret: String,
    back: String,
}

/// The fields of the form.
pub(in crate::admin) struct ActionForm {
    pub(in crate::admin) plan: Uuid,
    pub(in crate::admin) reason: Option<String>,
    pub(in crate::admin) force: bool,
    /// All fields.
    pub(in crate::admin) fields: Filters,
    /// The fields as they were sent: the same form has the same bytes.
    bytes: Bytes,
}

impl<S: Send + Sync> FromRequest<S> for ActionForm {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let (bytes, fields) = form(request, state, FORM_BYTES_MAX).await?;
        let plan = fields.get("plan").and_then(|plan| plan.parse().ok());
        let plan =
            plan.ok_or_else(|| Problem::bad_request("the form has no plan: open its page again"))?;
        let (reason, force) = (fields.get("reason"), fields.get("force").is_some());
        Ok(Self { plan, reason, force, fields, bytes })
    }
}

/// The parts of a request for an action.
pub(in crate::admin) struct ActionRequest<S> {
    pub(in crate::admin) admin: Arc<Admin<S>>,
    pub(in crate::admin) caller: Caller,
    /// The last part of the path: mostly the id of the action's subject.
    pub(in crate::admin) id: String,
    pub(in crate::admin) filters: Filters,
}

/// An action that a page offers.
pub(in crate::admin) trait PageAction<S: AdminStore>: 'static {
    /// Describes what the action would do.
    fn question(asked: ActionRequest<S>) -> impl Future<Output = Result<Question, Problem>> + Send;

    /// Acts.
    fn act(
        asked: ActionRequest<S>,
        form: &ActionForm,
    ) -> impl Future<Output = Result<ActionResult, Problem>> + Send;
}

#[derive(Template)]
#[template(path = "confirm.html")]
pub(in crate::admin) struct Confirm {
    frame: Frame,
    question: Question,
    action: String,
    back: String,
    plan: Uuid,
}

impl Confirm {
    /// The page that asks before an action. `uri` is the address that its form is sent to.
    pub(in crate::admin) fn new(frame: Frame, uri: &Uri, question: Question) -> Self {
        Self {
            action: format!("{}{}", frame.site, path_and_query(uri)),
            back: format!("{}{}", frame.base, question.back),
            frame,
            question,
            plan: Uuid::now_v7(),
        }
    }
}

/// The page that asks before an action.
pub(in crate::admin) async fn ask<S: AdminStore, A: PageAction<S>>(
    State(admin): State<Arc<Admin<S>>>,
    reader: Reader,
    OriginalUri(uri): OriginalUri,
    PathId(id): PathId,
    filters: Filters,
) -> Result<Page<Confirm>, Problem> {
    let frame = reader.frame(&admin, "").await;
    let caller = reader.caller()?;
    let question = A::question(ActionRequest { admin, caller, id, filters }).await?;
    Ok(reader.page(Confirm::new(frame, &uri, question)))
}

/// Acts, once for each form.
pub(in crate::admin) async fn act<S: AdminStore, A: PageAction<S>>(
    State(admin): State<Arc<Admin<S>>>,
    reader: Reader,
    OriginalUri(uri): OriginalUri,
    PathId(id): PathId,
    form: ActionForm,
) -> Result<Acted, Problem> {
    let (filters, caller) = (Filters::of(&uri), reader.caller()?);
    let asked = ActionRequest { admin: Arc::clone(&admin), caller, id, filters };
    let forms = Forms { side: "dashboard", under: "", quota: None };
    let acted = act_once::<S, A>(&forms, asked, &uri, &form).await?;
    let frame = reader.frame(&admin, "").await;
    Ok(acted.into_answer(reader, frame))
}

/// The forms of one side, as the ledger of Idempotency-Keys knows them.
pub(in crate::admin) struct Forms<'a> {
    /// The side.
    pub(in crate::admin) side: &'static str,
    /// The path in front of the pages that an action leads to.
    pub(in crate::admin) under: &'a str,
    /// How many forms of one caller are remembered.
    pub(in crate::admin) quota: Option<Quota>,
}

/// The result of a form, from now or from the first time that it was sent.
pub(in crate::admin) enum ActedOnce {
    /// The page that shows it.
    Leads(String),
    /// It made a secret, which only this answer shows.
    Shows { sentence: String, secret: String, page: String },
}

impl ActedOnce {
    /// The answer to the form.
    pub(in crate::admin) fn into_answer(self, reader: Reader, frame: Frame) -> Acted {
        match self {
            Self::Leads(to) => Acted::Leads(SeeOther(to)),
            Self::Shows { sentence, secret, page } => {
                let back = format!("{}{page}", frame.base);
                let page = reader.page(NewSecret { frame, sentence, secret, back });
                Acted::Shows(Box::new(page))
            }
        }
    }
}

/// Acts, unless the same form was sent before.
pub(in crate::admin) async fn act_once<S: AdminStore, A: PageAction<S>>(
    forms: &Forms<'_>,
    asked: ActionRequest<S>,
    uri: &Uri,
    form: &ActionForm,
) -> Result<ActedOnce, Problem> {
    let admin = Arc::clone(&asked.admin);
    let ask = ReserveAsk {
        scope: Scope::new(
            &format!("{OWN_REALMS}{}", forms.side),
            asked.caller.who(),
            &Method::POST,
            uri.path(),
        ),
        key: IdempotencyKey::parse(form.plan.to_string().as_bytes()).expect("a printable id"),
        fingerprint: Fingerprint::of(Some(path_and_query(uri)), &form.bytes, &[]),
        lease: LEASE,
        ttl: TTL,
        quota: forms.quota,
    };
    let reserved = match admin.store.reserve(ask).await? {
        Reservation::Fresh(reserved) => reserved,
        Reservation::Replay(answer) => return Ok(ActedOnce::Leads(location(&answer))),
        Reservation::InProgress { .. } => {
            return Err(Problem::conflict("this form was sent before, and its action still runs"));
        }
        Reservation::Mismatch => {
            return Err(Problem::conflict(
                "this form was sent before with other fields: open its page again",
            ));
        }
        Reservation::OverQuota => {
            return Err(Problem::limited("too many forms were sent today", 3_600));
        }
    };
    match A::act(asked, form).await {
        Ok(done) => {
            let to = done.filters.with_done(&done.sentence).link(&done.page);
            let to = format!("{}{to}", forms.under);
            let answer = StoredAnswer {
                status: StatusCode::SEE_OTHER,
                headers: vec![(header::LOCATION.to_string(), to.clone())],
                body: Bytes::new(),
            };
            let finished = admin.store.finish(&reserved, &answer).await;
            let Some(secret) = done.secret else {
                finished?;
                return Ok(ActedOnce::Leads(to));
            };
            // The secret is in use already, and only this answer shows it.
            if let Err(error) = finished {
                tracing::warn!(%error, "a form with a new secret may act again if it is sent again");
            }
            Ok(ActedOnce::Shows { sentence: done.sentence, secret, page: done.page })
        }
        Err(problem) => {
            admin.store.abandon(&reserved).await?;
            Err(problem)
        }
    }
}

fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("", |path| path.as_str())
}

fn location(answer: &StoredAnswer) -> String {
    let location = answer.headers.iter().find(|(name, _)| name == header::LOCATION.as_str());
    location.map_or_else(|| "/".to_owned(), |(_, value)| value.clone())
}

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

/// A decision about an event: approve, reject or discard.
pub(in crate::admin) struct Decide<const WHICH: u8>;

/// Lets the jobs of an event in review run.
pub(in crate::admin) type ApproveEvent = Decide<0>;
/// Rejects an event in review.
pub(in crate::admin) type RejectEvent = Decide<1>;
/// Discards the dead letters of an event.
pub(in crate::admin) type DiscardEvent = Decide<2>;

impl<S: AdminStore, const WHICH: u8> PageAction<S> for Decide<WHICH> {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let event = events::find(&*admin.store, &id).await?.summary;
        let (title, sentence, button) = match WHICH {
            0 => (
                "Approve this event?",
                "Its handlers run, as if it had arrived in time.",
                "Approve",
            ),
            1 => ("Reject this event?", "Its handlers never run.", "Reject"),
            _ => (
                "Discard its dead letters?",
                "They leave the list of dead letters and never run.",
                "Discard",
            ),
        };
        Ok(Question {
            title: title.to_owned(),
            subject: event.event_id,
            sentences: vec![sentence.to_owned()],
            button,
            needs_reason: WHICH == 1,
            is_final: WHICH != 0,
            back: format!("/events/{}", event.id),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let (state, by, path) = (State(admin), Extension(caller), PathId(id.clone()));
        let asked = JsonBody(DecideRequest { reason: form.reason.clone() });
        let Json(decided) = match WHICH {
            0 => review::approve(state, by, path, asked).await?,
            1 => review::reject(state, by, path, asked).await?,
            _ => review::discard_of_event(state, by, path, asked).await?,
        };
        let sentence = format!("The event is {} now.", decided.status.as_str());
        Ok(ActionResult {
            page: format!("/events/{}", decided.id),
            sentence,
            ..ActionResult::default()
        })
    }
}

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
        let asked = JsonBody(ReasonRequest { reason: form.reason.clone() });
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

/// An action on all deliveries of a message.
pub(in crate::admin) struct ChangeMessage<const CANCEL: bool>;

/// Sends the deliveries of a message again that are not delivered.
pub(in crate::admin) type ReplayMessage = ChangeMessage<false>;
/// Cancels the open deliveries of a message.
pub(in crate::admin) type CancelMessage = ChangeMessage<true>;

impl<S: AdminStore, const CANCEL: bool> PageAction<S> for ChangeMessage<CANCEL> {
    async fn question(
        ActionRequest { id, filters, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let (title, sentence, button) = match CANCEL {
            true => (
                "Cancel this message?",
                "Its open deliveries are not attempted any more.",
                "Cancel deliveries",
            ),
            false => (
                "Send this message again?",
                "Every delivery that is not delivered is attempted now.",
                "Send again",
            ),
        };
        Ok(Question {
            title: title.to_owned(),
            subject: id.clone(),
            sentences: vec![sentence.to_owned()],
            button,
            is_final: CANCEL,
            back: filters.link(&message_page(&id)),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, filters }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let query = QueryParams(MessageQuery { tenant: filters.get("tenant") });
        let asked = JsonBody(ReasonRequest { reason: form.reason.clone() });
        let (state, by, path) = (State(admin), Extension(caller), PathId(id.clone()));
        let Json(changed) = match CANCEL {
            true => messages::cancel(state, by, path, query, asked).await?,
            false => messages::replay(state, by, path, query, asked).await?,
        };
        let what = if CANCEL { "cancelled" } else { "due now" };
        let count = match changed.deliveries.len() {
            1 => "1 delivery is".to_owned(),
            count => format!("{count} deliveries are"),
        };
        let (page, sentence) = (message_page(&id), format!("{count} {what}."));
        Ok(ActionResult { page, filters, sentence, ..ActionResult::default() })
    }
}

fn message_page(id: &str) -> String {
    let id: String = form_urlencoded::byte_serialize(id.as_bytes()).collect();
    format!("/messages/{id}")
}

/// An action on an endpoint.
pub(in crate::admin) struct ChangeEndpoint<const WHICH: u8>;

/// Pauses a handler, or resumes it.
pub(in crate::admin) struct ChangeHandler<const PAUSES: bool>;

/// Pauses a handler.
pub(in crate::admin) type PauseHandler = ChangeHandler<true>;
/// Resumes a paused handler.
pub(in crate::admin) type ResumeHandler = ChangeHandler<false>;

/// The handler that a path names as one segment.
fn handler_named(id: &str) -> Result<HandlerRef, Problem> {
    let (source, handler) =
        id.split_once('/').ok_or_else(|| Problem::not_found("no handler has that name"))?;
    Ok(HandlerRef { source: SourceName::new(source), handler: HandlerName::new(handler) })
}

impl<S: AdminStore, const PAUSES: bool> PageAction<S> for ChangeHandler<PAUSES> {
    async fn question(ActionRequest { id, .. }: ActionRequest<S>) -> Result<Question, Problem> {
        handler_named(&id)?;
        let (title, sentence, button) = match PAUSES {
            true => (
                "Pause this handler?",
                "No node claims its jobs until it is resumed. Attempts that are running end as usual. \
                 Events are stored as before, and nothing is lost.",
                "Pause",
            ),
            false => {
                ("Resume this handler?", "Every job that became due meanwhile runs now.", "Resume")
            }
        };
        Ok(Question {
            title: title.to_owned(),
            subject: id,
            sentences: vec![sentence.to_owned()],
            button,
            back: "/handlers".to_owned(),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let handler = PathHandler(handler_named(&id)?);
        let reason = JsonBody(ReasonRequest { reason: form.reason.clone() });
        let (state, by) = (State(admin), Extension(caller));
        let sentence = match PAUSES {
            true => handlers::pause(state, by, handler, reason)
                .await
                .map(|_| format!("The handler {id} is paused."))?,
            false => handlers::resume(state, by, handler, reason)
                .await
                .map(|_| format!("The handler {id} is resumed."))?,
        };
        Ok(ActionResult { page: "/handlers".to_owned(), sentence, ..ActionResult::default() })
    }
}

/// Holds the deliveries of an endpoint.
pub(in crate::admin) type DisableEndpoint = ChangeEndpoint<0>;
/// Delivers to a disabled endpoint again.
pub(in crate::admin) type EnableEndpoint = ChangeEndpoint<1>;
/// Sends one test message.
pub(in crate::admin) type PingEndpoint = ChangeEndpoint<2>;

impl<S: AdminStore, const WHICH: u8> PageAction<S> for ChangeEndpoint<WHICH> {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let Json(endpoint) = endpoints::show(State(admin), PathId(id.clone())).await?;
        let (title, sentence, button) = match WHICH {
            0 => (
                "Disable this endpoint?",
                "Its deliveries are held until it is enabled. None is lost.",
                "Disable",
            ),
            1 => ("Enable this endpoint?", "Its held deliveries are attempted again.", "Enable"),
            _ => (
                "Ping this endpoint?",
                "One signed test message is sent now. It is neither recorded nor retried.",
                "Ping",
            ),
        };
        Ok(Question {
            title: title.to_owned(),
            subject: endpoint.url,
            sentences: vec![sentence.to_owned()],
            button,
            back: format!("/endpoints/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let asked = JsonBody(ReasonRequest { reason: form.reason.clone() });
        let (state, by, path) = (State(admin), Extension(caller), PathId(id.clone()));
        let sentence = match WHICH {
            0 => endpoints::disable(state, by, path, asked)
                .await
                .map(|_| "The endpoint is disabled.".to_owned())?,
            1 => endpoints::enable(state, by, path, asked)
                .await
                .map(|_| "The endpoint is enabled.".to_owned())?,
            _ => {
                let Json(ping) = endpoints::ping(state, path, asked).await?;
                let answer = match (ping.status, ping.error) {
                    (_, Some(error)) => {
                        format!("The ping failed after {} ms: {error}", ping.took_ms)
                    }
                    (Some(status), None) => {
                        format!("The endpoint answered HTTP {status} after {} ms.", ping.took_ms)
                    }
                    (None, None) => "The endpoint answered.".to_owned(),
                };
                answer.chars().take(300).collect()
            }
        };
        Ok(ActionResult { page: format!("/endpoints/{id}"), sentence, ..ActionResult::default() })
    }
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
