//! Actions from pages. A GET shows what the action would do and asks; the POST acts and leads back to the
//! page. Each form has an id of its own that the ledger of Idempotency-Keys remembers, so a form that is sent
//! twice acts once.
//!
//! The actions themselves are in [`super::event_actions`], [`super::sending_actions`],
//! [`super::handler_actions`], [`super::plans`], [`super::alerts`] and [`super::storage`].

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use askama::Template;
use axum::body::Bytes;
use axum::extract::{FromRequest, OriginalUri, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use hapax_core::Timestamp;
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Ledger, Quota, Reservation, ReserveAsk, Scope, StoredAnswer,
};
use jiff::SignedDuration;
use tokio::time::Instant;
use uuid::Uuid;

use super::super::auth::Caller;
use super::super::extract::{JsonBody, PathId};
use super::super::problem::Problem;
use super::super::storage::OWN_REALMS;
use super::super::{Admin, AdminStore};
use super::filters::{Filters, form};
use super::{Frame, Page, PageReader, SeeOther};
use crate::api::ReasonRequest;

/// How long an action may take before the same form may act again.
const LEASE: Duration = Duration::from_secs(60);

/// How long a sent form is remembered.
const TTL: Duration = Duration::from_secs(24 * 3_600);

/// How long a form may be sent after its page was made. This must not be longer than [`TTL`]: an older form may have
/// been sent and forgotten, and would act again.
const SENT_WITHIN: SignedDuration = SignedDuration::from_hours(12);

/// How long a form that is sent again waits for its first action, and how often it looks.
const SAME_FORM_WAIT: Duration = Duration::from_secs(5);
const SAME_FORM_POLL: Duration = Duration::from_millis(50);

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
    /// A new secret. Only the answer to the form shows the secret, and nothing stores it.
    pub(in crate::admin) secret: Option<String>,
}

/// The answer to a form.
pub(in crate::admin) enum Acted {
    /// Redirects to the page that shows the result.
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
    /// The fields as they were sent. A form that is sent again has the same bytes.
    bytes: Bytes,
}

impl ActionForm {
    /// The form's reason, as the body of a request to the API.
    pub(in crate::admin) fn reason_body(&self) -> JsonBody<ReasonRequest> {
        JsonBody(ReasonRequest { reason: self.reason.clone() })
    }
}

impl<S: Send + Sync> FromRequest<S> for ActionForm {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let (bytes, fields) = form(request, state, FORM_BYTES_MAX).await?;
        let plan = fields.get("plan").and_then(|plan| plan.parse().ok());
        let plan = plan.ok_or_else(|| {
            Problem::bad_request(
                "the field `plan` of the form is missing or not valid: open the page again",
            )
        })?;
        let (reason, force) = (fields.get("reason"), fields.get("force").is_some());
        Ok(Self { plan, reason, force, fields, bytes })
    }
}

/// The parts of a request for an action.
pub(in crate::admin) struct ActionRequest<S> {
    pub(in crate::admin) admin: Arc<Admin<S>>,
    pub(in crate::admin) caller: Caller,
    /// The last part of the path: in most cases the id of the action's subject.
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
    reader: PageReader,
    OriginalUri(uri): OriginalUri,
    PathId(id): PathId,
    filters: Filters,
) -> Result<Page<Confirm>, Problem> {
    let frame = reader.frame(&admin, "").await;
    let caller = reader.caller()?;
    let question = A::question(ActionRequest { admin, caller, id, filters }).await?;
    Ok(reader.page(Confirm::new(frame, &uri, question)))
}

/// Acts once for each form.
pub(in crate::admin) async fn act<S: AdminStore, A: PageAction<S>>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
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

/// The result of a form. If the form was sent before, the result of the first time.
pub(in crate::admin) enum ActedOnce {
    /// The page that shows it.
    Leads(String),
    /// The action made a secret, which only this answer shows.
    Shows { sentence: String, secret: String, page: String },
}

impl ActedOnce {
    /// The answer to the form.
    pub(in crate::admin) fn into_answer(self, reader: PageReader, frame: Frame) -> Acted {
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
    let is_late = |made: SystemTime| {
        let made = Timestamp::try_from(made).unwrap_or(Timestamp::MIN);
        (admin.now)().duration_since(made) > SENT_WITHIN
    };
    if made_at(form.plan).is_none_or(is_late) {
        return Err(Problem::conflict("this form is too old to be sent: open its page again"));
    }
    let reserved = match reserved(&*admin.store, ask).await? {
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

/// Reserves the id of a form. A browser sends a form again when its button is pressed twice, so the second request
/// waits for the action of the first.
async fn reserved<S: Ledger>(store: &S, ask: ReserveAsk) -> Result<Reservation, Problem> {
    let until = Instant::now() + SAME_FORM_WAIT;
    loop {
        match store.reserve(ask.clone()).await? {
            Reservation::InProgress { .. } if Instant::now() < until => {
                tokio::time::sleep(SAME_FORM_POLL).await;
            }
            reservation => return Ok(reservation),
        }
    }
}

/// When the page of a form was made; `None` if this is not the id of a form.
fn made_at(plan: Uuid) -> Option<SystemTime> {
    let (seconds, nanos) = plan.get_timestamp()?.to_unix();
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))
}

fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("", |path| path.as_str())
}

fn location(answer: &StoredAnswer) -> String {
    let location = answer.headers.iter().find(|(name, _)| name == header::LOCATION.as_str());
    location.map_or_else(|| "/".to_owned(), |(_, value)| value.clone())
}
