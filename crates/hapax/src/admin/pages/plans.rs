//! Many events or deliveries at once, by plans: the question with its count, the list of plans, and the
//! progress of one.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::store::PlanState;

use super::super::auth::Caller;
use super::super::extract::{IdempotencyKeyHeader, JsonBody, PathId, QueryParams};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, endpoints, plans as api_plans};
use super::actions::{ActionForm, ActionRequest, ActionResult, FormField, PageAction, Question};
use super::filters::Filters;
use super::{Frame, Page, PageReader};
use crate::api::{EventPlanRequest, Plan, PlanRequest, Planned, PlannedWork};
use crate::format;

/// The fields of a filter that choose the events of a plan.
const EVENT_FIELDS: [&str; 9] =
    ["tenant", "source", "handler", "type", "status", "q", "since", "until", "unfinished_for"];

/// The fields that choose the deliveries of a plan.
const DELIVERY_FIELDS: [&str; 3] = ["status", "since", "until"];

/// The note on the scope of a plan.
const FIXED: &str = "The plan is about what matches now, and not about what comes later. Its page shows the \
     progress, and it can be cancelled.";

/// The fields of a list that a plan does not have. A list that they filter offers no plan, which would take more than
/// the list shows.
const LIST_FIELDS: [&str; 2] = ["copied", "error"];

/// The link to the question about everything that matches a filter; `None` without a filter.
pub(super) fn link(act: &str, filters: &Filters) -> Option<String> {
    let chosen = filters.only(&EVENT_FIELDS);
    let is_whole = filters.only(&LIST_FIELDS).is_empty();
    (is_whole && !chosen.is_empty()).then(|| chosen.link(&format!("/plans/{act}")))
}

/// Replays, approves, rejects or discards all events that match. The path names the act.
pub(in crate::admin) struct PlanEvents;

impl<S: AdminStore> PageAction<S> for PlanEvents {
    async fn question(
        ActionRequest { admin, caller, id: act, filters }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let QueryParams(asked) = filters.only(&EVENT_FIELDS).query::<EventPlanRequest>()?;
        let asked = EventPlanRequest { dry_run: true, ..asked };
        let Json(Planned { count, .. }) =
            of_events(admin, caller, &act, IdempotencyKeyHeader(None), asked).await?;
        let (verb, sentence, list) = match &*act {
            "approve" => {
                ("Approve", "Their handlers run, as if the events had arrived in time.", "/review")
            }
            "reject" => ("Reject", "Their handlers never run.", "/review"),
            "discard" => ("Discard", "Their dead letters leave the list and never run.", "/dead"),
            _ => (
                "Replay",
                "Their jobs run now. A job that is done, stale or discarded does nothing unless it is forced.",
                match filters.get("status").as_deref() {
                    Some("dead") => "/dead",
                    _ => "/events",
                },
            ),
        };
        let has_since = filters.get("since").is_some();
        Ok(Question {
            title: match count {
                0 => "No event matches".to_owned(),
                count => format!("{verb} {}?", format::count(count, "event")),
            },
            subject: filters.only(&EVENT_FIELDS).described(),
            sentences: vec![sentence.to_owned(), FIXED.to_owned()],
            button: if count == 0 { "" } else { verb },
            fields: vec![rate("Events a second at most (empty: no limit)")],
            needs_reason: act == "reject",
            offers_force: act == "replay" && has_since,
            is_final: matches!(&*act, "reject" | "discard"),
            back: filters.only(&EVENT_FIELDS).link(list),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id: act, filters }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let QueryParams(asked) = filters.only(&EVENT_FIELDS).query::<EventPlanRequest>()?;
        let asked = EventPlanRequest {
            rate: rate_of(form)?,
            reason: form.reason.clone(),
            force: form.force,
            ..asked
        };
        let key = IdempotencyKeyHeader(Some(form.plan.to_string()));
        let Json(planned) = of_events(admin, caller, &act, key, asked).await?;
        recorded(&planned)
    }
}

async fn of_events<S: AdminStore>(
    admin: Arc<Admin<S>>,
    caller: Caller,
    act: &str,
    key: IdempotencyKeyHeader,
    asked: EventPlanRequest,
) -> Result<Json<Planned>, Problem> {
    let (state, by, body) = (State(admin), Extension(caller), JsonBody(asked));
    match act {
        "replay" => api_plans::replay_events(state, by, key, body).await,
        "approve" => api_plans::approve_events(state, by, key, body).await,
        "reject" => api_plans::reject_events(state, by, key, body).await,
        "discard" => api_plans::discard_events(state, by, key, body).await,
        _ => Err(Problem::not_found("a plan replays, approves, rejects or discards")),
    }
}

/// Sends many deliveries of an endpoint again, or sends messages that the endpoint never got.
pub(in crate::admin) struct PlanDeliveries;

impl PlanDeliveries {
    /// The deliveries that the query names; by default those that died in the last 24 hours.
    fn asked(filters: &Filters) -> Result<(Filters, PlanRequest), Problem> {
        let mut chosen = filters.only(&DELIVERY_FIELDS);
        for (name, value) in [("status", "dead"), ("since", "24h")] {
            if chosen.get(name).is_none() {
                chosen = chosen.with(name, value);
            }
        }
        let QueryParams(asked) = chosen.query::<PlanRequest>()?;
        Ok((chosen, asked))
    }

    /// The plan with this rate that a form asks for, and the key under which it is recorded once.
    pub(in crate::admin) fn request(
        filters: &Filters,
        form: &ActionForm,
        rate: Option<u32>,
    ) -> Result<(IdempotencyKeyHeader, PlanRequest), Problem> {
        let (_, asked) = Self::asked(filters)?;
        let asked = PlanRequest { rate, reason: form.reason.clone(), ..asked };
        Ok((IdempotencyKeyHeader(Some(form.plan.to_string())), asked))
    }
}

impl<S: AdminStore> PageAction<S> for PlanDeliveries {
    async fn question(
        ActionRequest { admin, caller, id, filters }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let (chosen, asked) = Self::asked(&filters)?;
        let asked = JsonBody(PlanRequest { dry_run: true, ..asked });
        let Json(endpoint) = endpoints::show(State(Arc::clone(&admin)), PathId(id.clone())).await?;
        let key = IdempotencyKeyHeader(None);
        let (state, by, path) = (State(admin), Extension(caller), PathId(id.clone()));
        let Json(Planned { count, .. }) = api_plans::create(state, by, key, path, asked).await?;
        let field = |name, label, words| FormField {
            name,
            label,
            value: chosen.get(name),
            words,
            has_lines: false,
        };
        Ok(Question {
            title: match count {
                0 => "No delivery matches".to_owned(),
                1 => "Send 1 delivery again?".to_owned(),
                count => format!("Send {count} deliveries again?"),
            },
            subject: endpoint.url,
            sentences: vec![
                "The endpoint gets the same ids and the same bytes, so a receiver that dedupes by id does \
                 nothing twice."
                    .to_owned(),
                FIXED.to_owned(),
            ],
            choices: vec![
                field("status", "Which", &["dead", "all", "missing"]),
                field("since", "Since (1h, or a time)", &[]),
                field("until", "Until", &[]),
            ],
            button: if count == 0 { "" } else { "Send again" },
            fields: vec![rate("Deliveries a second at most (empty: no limit)")],
            back: format!("/endpoints/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, filters }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let (key, asked) = Self::request(&filters, form, rate_of(form)?)?;
        let (state, by, path) = (State(admin), Extension(caller), PathId(id));
        let Json(planned) = api_plans::create(state, by, key, path, JsonBody(asked)).await?;
        recorded(&planned)
    }
}

pub(in crate::admin) fn rate(label: &'static str) -> FormField {
    FormField { name: "rate", label, ..FormField::default() }
}

pub(in crate::admin) fn rate_of(form: &ActionForm) -> Result<Option<u32>, Problem> {
    let parse = |rate: String| rate.trim().parse();
    let rate = form.fields.get("rate").map(parse).transpose();
    rate.map_err(|_| Problem::bad_request("rate must be from 1 to 100000 a second"))
}

/// Redirects to the page of the plan.
pub(in crate::admin) fn recorded(planned: &Planned) -> Result<ActionResult, Problem> {
    let id = planned.id.ok_or_else(|| Problem::unavailable("the plan has no id"))?;
    let sentence = "The plan is recorded and runs.".to_owned();
    Ok(ActionResult { page: format!("/replays/{id}"), sentence, ..ActionResult::default() })
}

/// Stops a plan.
pub(in crate::admin) struct CancelPlan;

impl<S: AdminStore> PageAction<S> for CancelPlan {
    async fn question(
        ActionRequest { admin, id, .. }: ActionRequest<S>,
    ) -> Result<Question, Problem> {
        let Json(plan) = api_plans::show(State(admin), PathId(id.clone())).await?;
        let row = PlanRow::from(plan);
        Ok(Question {
            title: "Cancel this plan?".to_owned(),
            sentences: vec![
                format!("It has taken {} of {}.", row.taken(), row.plan.total),
                "Its finished part stays as it is.".to_owned(),
            ],
            subject: row.what,
            button: "Cancel the plan",
            is_final: true,
            back: format!("/replays/{id}"),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let asked = form.reason_body();
        let cancelled =
            api_plans::cancel(State(admin), Extension(caller), PathId(id.clone()), asked);
        let Json(plan) = cancelled.await?;
        let sentence = format!("The plan is {} now.", plan.state.as_str());
        Ok(ActionResult { page: format!("/replays/{id}"), sentence, ..ActionResult::default() })
    }
}

/// A plan, as pages show it.
struct PlanRow {
    plan: Plan,
    /// The act, and the events or deliveries that it applies to.
    what: String,
}

impl PlanRow {
    /// How many deliveries or events the plan has taken or skipped.
    fn taken(&self) -> u64 {
        self.plan.done + self.plan.skipped
    }

    fn is_running(&self) -> bool {
        self.plan.state == PlanState::Running
    }

    /// The page of the plan's endpoint.
    fn endpoint(&self) -> Option<String> {
        match &self.plan.work {
            PlannedWork::Deliveries { endpoint, .. } => Some(format!("/endpoints/{endpoint}")),
            PlannedWork::Events { .. } => None,
        }
    }
}

impl From<Plan> for PlanRow {
    fn from(plan: Plan) -> Self {
        let times = |since: Option<_>, until: Option<_>| {
            let since = since.map(|at| format!("since {}", format::at(at)));
            since.into_iter().chain(until.map(|at| format!("until {}", format::at(at))))
        };
        let what = match &plan.work {
            PlannedWork::Deliveries { status, since, until, .. } => {
                let what = format!("send deliveries again: {}", status.as_str());
                [what].into_iter().chain(times(Some(*since), *until)).collect::<Vec<_>>()
            }
            PlannedWork::Events {
                action,
                tenant,
                source,
                handler,
                r#type,
                status,
                q,
                since,
                until,
                unfinished_since,
                force,
            } => {
                let named = [
                    ("tenant", tenant.as_deref()),
                    ("source", source.as_deref()),
                    ("handler", handler.as_deref()),
                    ("type", r#type.as_deref()),
                    ("status", status.as_ref().map(|status| status.as_str())),
                    ("containing", q.as_deref()),
                ];
                let named = named
                    .into_iter()
                    .filter_map(|(name, value)| value.map(|value| format!("{name} {value}")));
                let unfinished =
                    unfinished_since.map(|at| format!("unfinished since {}", format::at(at)));
                let force = force.then(|| "finished jobs too".to_owned());
                [format!("{action} events")]
                    .into_iter()
                    .chain(named)
                    .chain(times(*since, *until))
                    .chain(unfinished)
                    .chain(force)
                    .collect()
            }
        };
        Self { what: what.join(", "), plan }
    }
}

#[derive(Template)]
#[template(path = "plans.html")]
pub(in crate::admin) struct PlansPage {
    frame: Frame,
    rows: Vec<PlanRow>,
    /// Whether there may be older plans that are not listed.
    is_cut: bool,
}

/// `GET /replays`.
pub(in crate::admin) async fn plans<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
) -> Result<Page<PlansPage>, Problem> {
    let frame = reader.frame(&admin, "/replays").await;
    let Json(plans) = api_plans::list(State(admin)).await?;
    let rows: Vec<_> = plans.items.into_iter().map(PlanRow::from).collect();
    let is_cut = rows.len() == api_plans::LISTED_MAX;
    Ok(reader.page(PlansPage { frame, rows, is_cut }))
}

#[derive(Template)]
#[template(path = "plan.html")]
pub(in crate::admin) struct PlanPage {
    frame: Frame,
    row: PlanRow,
    done: Option<String>,
}

/// `GET /replays/{id}`.
pub(in crate::admin) async fn plan<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    PathId(id): PathId,
    filters: Filters,
) -> Result<Page<PlanPage>, Problem> {
    let frame = reader.frame(&admin, "/replays").await;
    let Json(plan) = api_plans::show(State(admin), PathId(id)).await?;
    Ok(reader.page(PlanPage { frame, row: plan.into(), done: filters.done() }))
}
