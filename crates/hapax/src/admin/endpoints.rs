//! Routes for endpoints. Secrets and the values of custom headers are sealed here, before they reach the
//! store, and are never read back for an answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::Tenant;
use hapax_core::endpoint::{
    AddressChoice, EndpointAct, EndpointChanged, EndpointId, EndpointOrder, EndpointRecord,
    EndpointSealed, EndpointSettings, NewEndpoint, OnDead, SecretAge, default_auto_disable,
    default_max_in_flight, default_retry, default_timeout,
};
use hapax_core::endpoint_check::{
    RotateFault, rotated, seal_headers, seal_secrets, settings_fault, tenant_fault,
};
use hapax_core::endpoint_secret::{EndpointSecrets, Signing, SigningSecret};
use hapax_core::handler::TypeFilter;
use hapax_core::limits::{ENDPOINTS_PER_TENANT_MAX, RECEIVER_ENDPOINTS_PER_TENANT_MAX};
use hapax_core::message::Payload;
use hapax_core::store::{AttemptVerdict, DeliveryTarget, EndpointFilter};
use hapax_core::vault::Vault;
use hapax_engine::{CustomHeaders, UrlProblem};
use url::Url;
use uuid::Uuid;
use zeroize::Zeroizing;

use super::auth::Caller;
use super::extract::{self, JsonBody, PathId, QueryParams, cursor, limit};
use super::problem::Problem;
use super::{Admin, AdminStore, Created};
use crate::api::{
    Deleted, Endpoint, EndpointRequest, EndpointsQuery, List, Patch, PingAnswer, ReasonRequest,
    RotateRequest, Span,
};
use crate::sending::SendingParts;
use crate::tenant_sources::nonce;

/// The overlap of a rotation if the request names none.
const OVERLAP: Duration = Duration::from_secs(24 * 3_600);

/// How many times a change is tried if another change of the endpoint is committed between the read
/// and the write.
const CHANGE_TRIES: usize = 5;

/// `GET /api/v1/endpoints`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<EndpointsQuery>,
) -> Result<Json<List<Endpoint>>, Problem> {
    let filter = EndpointFilter {
        tenant: query.tenant.map(Tenant::new),
        before: cursor(query.cursor)?,
        limit: limit(query.limit)?,
        ..EndpointFilter::default()
    };
    let page = admin.store.endpoints(filter).await?;
    Ok(Json(page.into()))
}

/// `POST /api/v1/endpoints`.
pub(super) async fn create<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    JsonBody(asked): JsonBody<EndpointRequest>,
) -> Result<Created<Endpoint>, Problem> {
    create_by(&admin, &caller, AddressChoice::Operator, asked).await.map(Created)
}

/// Adds an endpoint whose address `by` chose.
pub(super) async fn create_by<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    by: AddressChoice,
    asked: EndpointRequest,
) -> Result<Endpoint, Problem> {
    let vault = &*Arc::clone(&sending(admin)?.vault);
    let url = asked.url.as_deref().ok_or_else(|| Problem::bad_request("url is missing"))?;
    let tenant = tenant(asked.tenant.as_deref())?;
    let signing = asked.signing.unwrap_or_default();
    let secret = signing_secret(signing, asked.secret.as_deref(), &random())?;
    let id = EndpointId(Uuid::now_v7());
    let (shown, public_key) = (secret.expose(), secret.public_key());
    let sealed = EndpointSealed {
        secrets: seal_secrets(vault, &tenant, id, &EndpointSecrets::new(secret), nonce()),
        headers: None,
    };
    let url = checked_url(admin, url, by).await?;
    let before = EndpointSettings {
        signing,
        public_key,
        secret_ages: vec![SecretAge::new((admin.now)())],
        address_by: by,
        ..EndpointSettings::at(url)
    };
    let (settings, sealed) = changed(vault, &tenant, id, (before, sealed), asked)?;
    let new = NewEndpoint { id, tenant, settings, sealed };
    let act = caller.action(None, (admin.now)());
    let record = record_of(admin.store.create_endpoint(new, act).await?)?;
    tracing::info!(endpoint = %id, token = caller.who(), "{} added the endpoint {id}", caller.who());
    let secret = shown.map(|shown| shown.to_string());
    Ok(Endpoint { secret, ..record.into() })
}

/// `GET /api/v1/endpoints/{id}`.
pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
) -> Result<Json<Endpoint>, Problem> {
    Ok(Json(find(&admin, &id).await?.into()))
}

/// `PATCH /api/v1/endpoints/{id}`.
pub(super) async fn change<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<EndpointRequest>,
) -> Result<Json<Endpoint>, Problem> {
    change_by(&admin, &caller, AddressChoice::Operator, &id, asked).await.map(Json)
}

/// Changes an endpoint. If the address changes, it counts as chosen by `by`. If a receiving party moves
/// the endpoint to another origin and gives no headers, the headers are removed: their values were meant
/// for the previous server.
pub(super) async fn change_by<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    by: AddressChoice,
    id: &str,
    asked: EndpointRequest,
) -> Result<Endpoint, Problem> {
    if asked.tenant.is_some() || asked.secret.is_some() {
        return Err(Problem::bad_request(
            "tenant cannot be changed; change secret with POST /api/v1/endpoints/{id}/rotate",
        ));
    }
    let url = match &asked.url {
        Some(url) => Some(checked_url(admin, url, by).await?),
        None => None,
    };
    let record = update(admin, caller, id, |_, vault, record| {
        if asked.signing.is_some_and(|signing| signing != record.settings.signing) {
            return Err(Problem::bad_request(
                "signing can be changed only by POST /api/v1/endpoints/{id}/rotate",
            ));
        }
        let mut before = (record.settings, record.sealed);
        let mut asked = asked.clone();
        // If the address does not change, the party that chose it does not change either.
        if let Some(url) = url.as_ref().filter(|url| **url != before.0.url) {
            let moves = by == AddressChoice::Receiver && !is_same_origin(&before.0.url, url);
            if moves && asked.headers.is_keep() {
                asked.headers = Patch::Clear;
            }
            before.0.url.clone_from(url);
            before.0.address_by = by;
        }
        changed(vault, &record.tenant, record.id, before, asked)
    })
    .await?;
    Ok(record.into())
}

/// `POST /api/v1/endpoints/{id}/rotate`.
pub(super) async fn rotate<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<RotateRequest>,
) -> Result<Json<Endpoint>, Problem> {
    let overlap = asked.overlap.map_or(OVERLAP, |Span(overlap)| overlap);
    let random = random();
    // Every try uses the same secret, so that the committed one is shown.
    let new = |signing| signing_secret(signing, asked.secret.as_deref(), &random);
    let record = update(&admin, &caller, &id, |admin, vault, record| {
        let secret = new(asked.signing.unwrap_or(record.settings.signing))?;
        rotated(vault, record, secret, overlap, (admin.now)(), nonce()).map_err(|fault| match fault
        {
            RotateFault::Unreadable(_) => Problem::unavailable(&fault.to_string()),
            RotateFault::Refused(_) => Problem::conflict(&fault.to_string()),
        })
    })
    .await?;
    let secret = new(record.settings.signing)?.expose().map(|shown| shown.to_string());
    tracing::info!(endpoint = %record.id, token = caller.who(), "{} rotated the secret of the endpoint {}", caller.who(), record.id);
    Ok(Json(Endpoint { secret, ..record.into() }))
}

/// `POST /api/v1/endpoints/{id}/disable`.
pub(super) async fn disable<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<Endpoint>, Problem> {
    let reason = extract::reason(asked.reason)?;
    let shown = disable_reason(&caller, reason.as_deref());
    act(&admin, &caller, &id, EndpointAct::Disable { reason: shown }, reason).await
}

/// Disables an endpoint as its receiving party asks. An endpoint that is disabled already stays as it is.
pub(super) async fn disable_by_receiver<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    id: &str,
    reason: Option<String>,
) -> Result<(), Problem> {
    let reason = extract::reason(reason)?;
    let shown = disable_reason(caller, reason.as_deref());
    let disable = EndpointAct::DisableByReceiver { reason: shown };
    act(admin, caller, id, disable, reason).await.map(|_| ())
}

/// Enables an endpoint as its receiving party asks, unless an operator disabled it.
pub(super) async fn enable_by_receiver<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    id: &str,
    reason: Option<String>,
) -> Result<(), Problem> {
    let reason = extract::reason(reason)?;
    act(admin, caller, id, EndpointAct::EnableByReceiver, reason).await.map(|_| ())
}

/// The reason that is shown with a disabled endpoint.
fn disable_reason(caller: &Caller, given: Option<&str>) -> String {
    given.map_or_else(|| format!("disabled by {}", caller.who()), str::to_owned)
}

/// `POST /api/v1/endpoints/{id}/enable`.
pub(super) async fn enable<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<Endpoint>, Problem> {
    let reason = extract::reason(asked.reason)?;
    act(&admin, &caller, &id, EndpointAct::Enable, reason).await
}

/// `DELETE /api/v1/endpoints/{id}`.
pub(super) async fn delete<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
) -> Result<Json<Deleted>, Problem> {
    let id = parse(&id)?;
    let by = caller.action(None, (admin.now)());
    match admin.store.change_endpoint(id, EndpointAct::Delete, by).await? {
        EndpointChanged::Deleted => {
            tracing::info!(endpoint = %id, token = caller.who(), "{} removed the endpoint {id}", caller.who());
            Ok(Json(Deleted { deleted: true }))
        }
        other => record_of(other).map(|_| Json(Deleted { deleted: true })),
    }
}

/// `POST /api/v1/endpoints/{id}/ping`: one signed test message, which is not a delivery. A ping works while
/// the endpoint is disabled.
pub(super) async fn ping<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
    JsonBody(_): JsonBody<ReasonRequest>,
) -> Result<Json<PingAnswer>, Problem> {
    let sending = sending(&admin)?;
    let record = find(&admin, &id).await?;
    let target = DeliveryTarget::of(&record);
    let message = format!("ping_{}", Uuid::now_v7().simple());
    let ping = sending.endpoint_caller.ping(&target, &message, &admin.now).await;
    let (ok, answer, error) = match ping.verdict {
        // An operator asked for the ping: its answer disables nothing.
        AttemptVerdict::Delivered(answer) | AttemptVerdict::DeliveredLast { answer, .. } => {
            (true, Some(answer), None)
        }
        AttemptVerdict::Failed { error, answer, .. } => (false, answer, Some(error)),
        AttemptVerdict::GivenBack => (false, None, Some("the ping was not sent".to_owned())),
    };
    let (status, answer) = answer.map(|answer| (answer.status, answer.body)).unzip();
    let took_ms = u64::try_from(ping.took.as_millis()).unwrap_or(u64::MAX);
    Ok(Json(PingAnswer { ok, id: message, took_ms, status, error, answer }))
}

/// The endpoint with this id.
pub(super) async fn find<S: AdminStore>(
    admin: &Admin<S>,
    id: &str,
) -> Result<EndpointRecord, Problem> {
    admin.store.endpoint(parse(id)?).await?.ok_or_else(unknown)
}

fn parse(id: &str) -> Result<EndpointId, Problem> {
    id.parse().map(EndpointId).map_err(|_| unknown())
}

fn unknown() -> Problem {
    Problem::not_found("no endpoint has that id")
}

async fn act<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    id: &str,
    act: EndpointAct,
    reason: Option<String>,
) -> Result<Json<Endpoint>, Problem> {
    let by = caller.action(reason, (admin.now)());
    let record = record_of(admin.store.change_endpoint(parse(id)?, act, by).await?)?;
    Ok(Json(record.into()))
}

/// Changes an endpoint. If another change is committed first, `edit` is called again with the
/// changed endpoint.
async fn update<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    id: &str,
    edit: impl Fn(
        &Admin<S>,
        &Vault,
        EndpointRecord,
    ) -> Result<(EndpointSettings, EndpointSealed), Problem>,
) -> Result<EndpointRecord, Problem> {
    let vault = &*Arc::clone(&sending(admin)?.vault);
    for _ in 0..CHANGE_TRIES {
        let record = find(admin, id).await?;
        let (id, version) = (record.id, record.version);
        let (settings, sealed) = edit(admin, vault, record)?;
        let act = EndpointAct::Change { version, settings: Box::new(settings), sealed };
        let by = caller.action(None, (admin.now)());
        match admin.store.change_endpoint(id, act, by).await? {
            EndpointChanged::VersionChanged => {}
            changed => return record_of(changed),
        }
    }
    Err(Problem::conflict("other requests keep changing the endpoint: try again"))
}

fn record_of(changed: EndpointChanged) -> Result<EndpointRecord, Problem> {
    match changed {
        EndpointChanged::Changed(record) => Ok(*record),
        EndpointChanged::Deleted | EndpointChanged::Unknown => Err(unknown()),
        EndpointChanged::UidTaken => {
            Err(Problem::conflict("another endpoint of this tenant has that uid"))
        }
        EndpointChanged::TooMany => Err(Problem::conflict(&format!(
            "the tenant has as many endpoints as it may have: {ENDPOINTS_PER_TENANT_MAX} in all, and \
             {RECEIVER_ENDPOINTS_PER_TENANT_MAX} that were added in the portal"
        ))),
        EndpointChanged::DisabledByOperator => {
            Err(Problem::conflict("the sender disabled this endpoint: ask the sender to enable it"))
        }
        EndpointChanged::VersionChanged => {
            Err(Problem::conflict("the endpoint was changed meanwhile: try again"))
        }
    }
}

/// The settings and sealed values after the requested change.
fn changed(
    vault: &Vault,
    tenant: &Tenant,
    id: EndpointId,
    (before, sealed): (EndpointSettings, EndpointSealed),
    asked: EndpointRequest,
) -> Result<(EndpointSettings, EndpointSealed), Problem> {
    let types = asked.types.applied(before.types.into(), Vec::new);
    let types = TypeFilter::new(types).map_err(|error| Problem::bad_request(&error.problem))?;
    let spans = |spans: Vec<Duration>| spans.into_iter().map(Span).collect::<Vec<_>>();
    let retry = asked.retry.applied(spans(before.retry), || spans(default_retry()));
    let Span(timeout) = asked.timeout.applied(Span(before.timeout), || Span(default_timeout()));
    let mut settings = EndpointSettings {
        url: before.url,
        address_by: before.address_by,
        types,
        retry: retry.into_iter().map(|Span(wait)| wait).collect(),
        timeout,
        payload: asked.payload.applied(before.payload, Payload::default),
        api_version: asked.api_version.applied_to_option(before.api_version),
        max_in_flight: asked.max_in_flight.applied(before.max_in_flight, default_max_in_flight),
        rate_limit: asked.rate_limit.applied_to_option(before.rate_limit),
        auto_disable: asked.auto_disable.applied(before.auto_disable, default_auto_disable),
        order: asked.order.applied(before.order, EndpointOrder::default),
        on_dead: asked.on_dead.applied(before.on_dead, OnDead::default),
        signing: before.signing,
        public_key: before.public_key,
        secret_ages: before.secret_ages,
        uid: asked.uid.applied_to_option(before.uid),
        description: asked.description.applied_to_option(before.description),
        metadata: asked.metadata.applied(before.metadata, BTreeMap::new),
        header_names: before.header_names,
    };
    if let Some(fault) = settings_fault(&settings) {
        return Err(Problem::bad_request(&fault));
    }
    let headers = match asked.headers {
        Patch::Keep => return Ok((settings, sealed)),
        Patch::Clear => BTreeMap::new(),
        Patch::Set(headers) => headers,
    };
    let pairs = headers.iter().map(|(name, value)| (&**name, &**value));
    CustomHeaders::parse(pairs).map_err(|error| refused("headers", &error))?;
    settings.header_names = headers.keys().map(|name| name.to_ascii_lowercase()).collect();
    let headers = seal_headers(vault, tenant, id, &headers, nonce());
    Ok((settings, EndpointSealed { headers, ..sealed }))
}

fn tenant(asked: Option<&str>) -> Result<Tenant, Problem> {
    match asked.map(|name| (name, tenant_fault(name))) {
        None => Ok(Tenant::default()),
        Some((name, None)) => Ok(Tenant::new(name)),
        Some((_, Some(fault))) => Err(Problem::bad_request(fault)),
    }
}

/// The canonical form of the URL, if the rules allow it as far as they can be checked now.
async fn checked_url<S: AdminStore>(
    admin: &Admin<S>,
    url: &str,
    by: AddressChoice,
) -> Result<String, Problem> {
    match (sending(admin)?.endpoint_caller.check(url, by).await, by) {
        (Ok(url), _) => Ok(url.as_str().to_owned()),
        // The error must not reveal to a receiving party which addresses a name has.
        (Err(UrlProblem::Blocked { .. }), AddressChoice::Receiver) => Err(Problem::bad_request(
            "url: endpoints cannot be at this address: use a public address, on port 443 or 80",
        )),
        (Err(error), _) => Err(refused("url", &error)),
    }
}

/// Whether two URLs have the same scheme, host and port.
fn is_same_origin(one: &str, other: &str) -> bool {
    match (Url::parse(one), Url::parse(other)) {
        (Ok(one), Ok(other)) => one.origin() == other.origin(),
        (_, _) => false,
    }
}

fn sending<S: AdminStore>(admin: &Admin<S>) -> Result<Arc<SendingParts>, Problem> {
    admin.sending.get().map_err(|why| Problem::unavailable(&why))
}

fn refused(field: &str, error: &dyn std::fmt::Display) -> Problem {
    Problem::bad_request(&format!("{field}: {error}"))
}

fn signing_secret(
    signing: Signing,
    own: Option<&str>,
    random: &[u8; 32],
) -> Result<SigningSecret, Problem> {
    SigningSecret::given_or_generated(signing, own, random)
        .map_err(|error| refused("secret", &error))
}

fn random() -> Zeroizing<[u8; 32]> {
    let mut random = Zeroizing::new([0; 32]);
    aws_lc_rs::rand::fill(&mut *random).expect("the system has random numbers");
    random
}
