//! Routes for alerts: the list, silence, and a test of whether they reach an endpoint.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::Tenant;
use hapax_core::delivery::EndpointStanding;
use hapax_core::endpoint::EndpointRecord;
use hapax_core::message::{NewMessage, OWN_TENANT};
use hapax_core::own_messages::{ALERT_RAISED, ActiveAlert};
use hapax_core::store::{self, AuditEntry, EndpointFilter, SilenceAsk};
use uuid::Uuid;

use super::auth::Caller;
use super::extract::{self, JsonBody, PathId};
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::alerts;
use crate::api::{Alert, AlertList, AlertReach, Severity, SilenceRequest, Span, TestedAlerts};

/// The longest silence: a month. An alert that is never wanted is switched off in `[alerts]`.
const SILENCE_MAX: Duration = Duration::from_secs(31 * 86_400);

/// How many endpoints of the tenant `hapax` are read, the newest first. A page reads these endpoints every
/// few seconds.
const RECEIVERS_MAX: usize = 100;

/// `GET /api/v1/alerts`.
pub(super) async fn list<S: AdminStore>(State(admin): State<Arc<Admin<S>>>) -> Json<AlertList> {
    let items = admin.watch.alerts(&*admin.store).await;
    Json(with_reach(&admin, items).await)
}

/// The alerts of the last round.
pub(super) async fn recent<S: AdminStore>(admin: &Admin<S>) -> AlertList {
    let items = admin.watch.recent_alerts(&*admin.store).await;
    with_reach(admin, items).await
}

async fn with_reach<S: AdminStore>(admin: &Admin<S>, items: Vec<Alert>) -> AlertList {
    // A store that cannot be read is itself an alert, so the failed read must not hide the list of
    // alerts.
    let reach = reach(admin).await.unwrap_or_else(|_| AlertReach {
        endpoints: 0,
        problem: Some("the store cannot be read, so nothing is delivered".to_owned()),
    });
    AlertList { items, next: None, reach }
}

/// `POST /api/v1/alerts/{id}/silence`.
pub(super) async fn silence<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<SilenceRequest>,
) -> Result<Json<Alert>, Problem> {
    let SilenceRequest { r#for: Span(span), reason } = asked;
    if span > SILENCE_MAX {
        return Err(Problem::bad_request(
            "`for` must be at most 31d; to switch off an alert permanently, use [alerts] in the config",
        ));
    }
    let reason = extract::reason(reason)?;
    let reason = match (reason, span.is_zero()) {
        (Some(reason), _) => reason,
        (None, true) => String::new(),
        (None, false) => {
            return Err(Problem::bad_request("reason is needed: it is shown to other operators"));
        }
    };
    let who = caller.who();
    let ask = SilenceAsk { id, span, reason: reason.clone(), who: who.to_owned() };
    let silenced = admin.watch.silence(&*admin.store, ask).await?;
    let alert = silenced
        .as_ref()
        .and_then(alerts::shown)
        .ok_or_else(|| Problem::not_found("no alert has that id, or it is over"))?;
    let action = match &alert.silenced {
        Some(silence) => format!("silenced an alert until {}: {reason}", silence.until),
        None => "ended the silence of an alert".to_owned(),
    };
    tracing::info!(token = who, alert = alert.name, "{who} {action}");
    // The audit entry of the request contains only the path. This entry names the alert.
    let place = alert.lane.as_ref().or(alert.source.as_ref()).or(alert.endpoint.as_ref());
    let subject = [Some(&alert.name), place];
    let subject: Vec<&str> = subject.into_iter().flatten().map(String::as_str).collect();
    let entry = AuditEntry {
        at: (admin.now)(),
        who: who.to_owned(),
        action,
        subject: subject.join(" "),
        status: 200,
    };
    if let Err(error) = admin.store.audit(vec![entry]).await {
        tracing::warn!(%error, "the silence of an alert is missing in the audit trail: {error}");
    }
    Ok(Json(alert))
}

/// `POST /api/v1/alerts/test`.
pub(super) async fn test<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<TestedAlerts>, Problem> {
    let reach = reach(&admin).await?;
    let mut tested = TestedAlerts { deliveries: 0, messages: Vec::new(), reach };
    if receivers(&admin).await?.is_empty() {
        return Ok(Json(tested));
    }
    // Each test has its own alert id, so that no receiver mistakes the test for a known alert.
    let subject = format!("[\"test\",\"{}\"]", Uuid::now_v7());
    let mut alert = ActiveAlert { subject, data: serde_json::Value::Null.into() };
    let content = Alert {
        id: alert.key(),
        name: "test".to_owned(),
        source: None,
        tenant: None,
        lane: None,
        endpoint: None,
        severity: Severity::Info,
        since: (admin.now)(),
        message: format!(
            "{} tests whether alerts reach their receivers. Nothing is wrong",
            caller.who()
        ),
        notified: None,
        silenced: None,
    };
    alert.data = serde_json::to_value(content).expect("an alert is JSON").into();
    // A receiver that opens an incident for an alert closes it with the second message.
    for message in [alert.raised(), alert.cleared()] {
        match admin.store.publish(message).await? {
            store::Published::Accepted(message) | store::Published::Duplicate(message) => {
                tested.deliveries += message.deliveries as usize;
                tested.messages.push(message.id);
            }
            store::Published::Conflict { id } => return Err(Problem::message_conflict(&id)),
        }
    }
    Ok(Json(tested))
}

/// Whether alerts reach an endpoint.
pub(super) async fn reach<S: AdminStore>(admin: &Admin<S>) -> Result<AlertReach, Problem> {
    let receivers = receivers(admin).await?;
    let is_active = |one: &&EndpointRecord| one.standing() == EndpointStanding::Active;
    let active = receivers.iter().filter(is_active).count();
    let problem = match (admin.sending.get(), receivers.first()) {
        (Err(why), _) => Some(format!("nothing is delivered: {why}")),
        (Ok(_), _) if active > 0 => None,
        (Ok(_), None) => Some(
            "no endpoint of the tenant hapax subscribes to hapax.alert.raised. Add one: hapax endpoints add URL \
             --tenant hapax --types 'hapax.alert.*'"
                .to_owned(),
        ),
        (Ok(_), Some(first)) => Some(format!(
            "the endpoint {} gets no deliveries: {}",
            first.id,
            first.failing_reason().unwrap_or("it is failing")
        )),
    };
    Ok(AlertReach { endpoints: if problem.is_none() { active } else { 0 }, problem })
}

/// The endpoints that subscribe to alerts.
async fn receivers<S: AdminStore>(admin: &Admin<S>) -> Result<Vec<EndpointRecord>, Problem> {
    let own = EndpointFilter {
        tenant: Some(Tenant::new(OWN_TENANT)),
        limit: RECEIVERS_MAX,
        ..EndpointFilter::default()
    };
    let raised = NewMessage::new(ALERT_RAISED, serde_json::Value::Null);
    let mut receivers = admin.store.endpoints(own).await?.items;
    receivers.retain(|one| one.settings.wants(&raised));
    Ok(receivers)
}
