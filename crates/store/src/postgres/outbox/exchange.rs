//! Settles attempts and claims deliveries, in one commit.

use std::sync::Arc;
use std::time::Instant;

use hapax_core::Tenant;
use hapax_core::delivery::DeliveryId;
use hapax_core::endpoint::EndpointId;
use hapax_core::job::Fence;
use hapax_core::limits::ERROR_CHARS_MAX;
use hapax_core::store::{
    AttemptOutcome, AttemptVerdict, DeliveryAsk, DeliveryClaim, DeliveryTarget, EndpointSignal,
    Exchanged, HandlerAnswer, Held,
};
use tokio_postgres::Row;
use uuid::Uuid;

use super::row::{key_number, message_and_endpoint, sealed, settings};
use crate::limits::FAST_ATTEMPT_MAX;
use crate::postgres::Shared;
use crate::postgres::connect::PgError;
use crate::postgres::handler_registry::micros;
use crate::postgres::jobs::{dice, retry_columns, shortened};
use crate::postgres::row::text;

/// Outcomes as the arrays of `hapax.exchange`.
#[derive(Debug, Default)]
struct Outcomes {
    messages: Vec<i64>,
    endpoints: Vec<i32>,
    fences: Vec<i64>,
    verdicts: Vec<i32>,
    tooks: Vec<i64>,
    statuses: Vec<Option<i32>>,
    answers: Vec<Option<String>>,
    errors: Vec<Option<String>>,
    hows: Vec<i32>,
    waits: Vec<i64>,
    dices: Vec<f64>,
    signals: Vec<i32>,
    pauses: Vec<i64>,
}

impl Outcomes {
    fn add(&mut self, outcome: &AttemptOutcome) {
        let (message, endpoint) = message_and_endpoint(outcome.delivery);
        let (works, nothing) = (EndpointSignal::Works, EndpointSignal::Nothing);
        let (verdict, answer, error, (how, wait), says) = match &outcome.verdict {
            AttemptVerdict::Delivered(answer) => (0, Some(answer), None, (0, 0), works),
            AttemptVerdict::DeliveredLast { answer, reason } => {
                (0, Some(answer), Some(reason), (0, 0), EndpointSignal::Disable)
            }
            AttemptVerdict::Failed { error, answer, retry, says } => {
                (1, answer.as_ref(), Some(error), retry_columns(*retry), *says)
            }
            AttemptVerdict::GivenBack => (2, None, None, (0, 0), nothing),
        };
        let (signal, pause) = match says {
            EndpointSignal::Works => (0, 0),
            EndpointSignal::Fails => (1, 0),
            EndpointSignal::Pauses(wait) => (2, micros(wait)),
            EndpointSignal::Disable => (3, 0),
            EndpointSignal::Nothing => (4, 0),
        };
        self.signals.push(signal);
        self.pauses.push(pause);
        self.messages.push(message);
        self.endpoints.push(endpoint);
        self.fences.push(outcome.fence.0);
        self.verdicts.push(verdict);
        self.tooks.push(i64::try_from(outcome.took.as_millis()).unwrap_or(i64::MAX));
        self.statuses.push(answer.map(|answer| i32::from(answer.status)));
        self.answers.push(answer.and_then(kept_body));
        self.errors.push(error.map(|error| shortened(error, ERROR_CHARS_MAX)));
        self.hows.push(how);
        self.waits.push(wait);
        self.dices.push(dice());
    }
}

/// The body of an answer, unless it is empty.
fn kept_body(answer: &HandlerAnswer) -> Option<String> {
    (!answer.body.is_empty()).then(|| text(&answer.body))
}

pub(super) async fn exchange(
    shared: &Shared,
    outcomes: &[AttemptOutcome],
    ask: &DeliveryAsk,
) -> Result<Exchanged, PgError> {
    let mut reported = Outcomes::default();
    outcomes.iter().for_each(|outcome| reported.add(outcome));
    let wanted = i32::try_from(ask.limit).unwrap_or(i32::MAX);
    let bytes_max = i64::try_from(ask.bytes_max).unwrap_or(i64::MAX);
    let keys: Vec<i64> = ask.vault_keys.iter().copied().map(key_number).collect();
    let fast_ms = ask.claims_ahead.then_some(FAST_ATTEMPT_MAX.as_millis() as i64);
    let began = Instant::now();
    let (turn, looks_at_all) = {
        let mut turn = shared.sending.turn();
        let looks_at_all = turn.hints.take_full_check();
        (turn.clone(), looks_at_all)
    };
    let mut client = shared.pools.send.checkout_in_turn().await?;
    let rows = client
        .query(
            "SELECT * FROM hapax.exchange($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, \
             $15, $16, $17, $18, $19, $20, $21, $22, $23)",
            &[
                &reported.messages,
                &reported.endpoints,
                &reported.fences,
                &reported.verdicts,
                &reported.tooks,
                &reported.statuses,
                &reported.answers,
                &reported.errors,
                &reported.hows,
                &reported.waits,
                &reported.dices,
                &reported.signals,
                &reported.pauses,
                &wanted,
                &bytes_max,
                &text(&ask.node),
                &keys,
                &turn.endpoint,
                &turn.hints.hinted(),
                &turn.hints.since(),
                &turn.hints.leases(),
                &shared.now(),
                &fast_ms,
            ],
        )
        .await?;
    drop(client);
    let (summary, claimed) = rows.split_last().ok_or(PgError::Gone)?;
    if ask.limit > 0 {
        let mut turn = shared.sending.turn();
        turn.endpoint = summary.get("next_turn");
        let (endpoints, until) = (summary.get("endpoints_seen"), summary.get("seen_until"));
        turn.hints.record_claim(endpoints, until, summary.get("leases_until"));
        if looks_at_all {
            turn.hints.note_full_check(began);
        }
    }
    let settled: Vec<bool> = summary.get("settled");
    let held = |recorded: bool| if recorded { Held::Kept } else { Held::Lost };
    Ok(Exchanged {
        settled: settled.into_iter().map(held).collect(),
        claims: claims(claimed),
        next_due: summary.get("next_due"),
    })
}

/// The claims; those of one endpoint share its target.
fn claims(rows: &[Row]) -> Vec<DeliveryClaim> {
    let mut last: Option<Arc<DeliveryTarget>> = None;
    let mut claims = Vec::with_capacity(rows.len());
    for row in rows {
        let id = EndpointId(row.get("endpoint"));
        let known = last.take().filter(|target| target.id == id);
        // A claim that cannot be read is logged and left to its lease.
        let Some(target) = known.or_else(|| target(id, row)) else { continue };
        claims.push(DeliveryClaim {
            delivery: DeliveryId(row.get::<_, Uuid>("delivery")),
            fence: Fence(row.get("fence")),
            attempt: u32::try_from(row.get::<_, i32>("attempt")).unwrap_or(0),
            message: row.get("message"),
            body: row.get::<_, Vec<u8>>("body").into(),
            leased_until: row.get("leased_until"),
            endpoint: Arc::clone(&target),
        });
        last = Some(target);
    }
    claims
}

fn target(id: EndpointId, row: &Row) -> Option<Arc<DeliveryTarget>> {
    let settings = settings(id, row.get("settings"))?;
    let sealed = sealed(id, row.get("secrets"), row.get("headers"))?;
    Some(Arc::new(DeliveryTarget {
        id,
        tenant: Tenant::new(row.get::<_, &str>("tenant")),
        url: settings.url,
        address_by: settings.address_by,
        timeout: settings.timeout,
        max_in_flight: settings.max_in_flight,
        payload: settings.payload,
        sealed,
    }))
}
