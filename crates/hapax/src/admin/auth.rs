//! Authorization of the admin side. Every route needs an [`Access`]; every request has a [`Caller`], whose
//! name is recorded with its actions.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use aws_lc_rs::{constant_time, digest, rand};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, Version, header, uri::Authority};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use hapax_core::Timestamp;
use hapax_core::limits::{API_BODY_READ_WITHIN, FORM_READ_WITHIN};
use hapax_core::secret::Secret;
use hapax_core::store::{Action, AuditEntry, HandlerRef, PortalLinkId, Session};

use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::config::Permission;

/// Wrong tokens per second that are answered 401; further ones are answered 429.
const WRONG_TOKENS_PER_SECOND: u32 = 20;

/// The largest body of a request to the admin side, in bytes.
const BODY_BYTES_MAX: usize = 2 << 20;

/// Refusals per minute that the audit trail records, of known and of unknown callers each.
const REFUSALS_PER_MINUTE: u32 = 60;

/// Decides which requests are allowed.
pub(crate) struct Authorizer {
    address: IpAddr,
    rules: ArcSwap<AccessRules>,
    wrong: governor::DefaultDirectRateLimiter,
    refusals: Refusals,
}

/// Refusals that the audit trail records, at a bounded rate. Callers without a valid token have a rate of their own, so
/// that they cannot keep the refusals of known callers out of the trail.
pub(super) struct Refusals {
    of_known: governor::DefaultDirectRateLimiter,
    of_unknown: governor::DefaultDirectRateLimiter,
}

impl Default for Refusals {
    fn default() -> Self {
        let limiter = || {
            let a_minute = REFUSALS_PER_MINUTE.try_into().expect("not zero");
            governor::RateLimiter::direct(governor::Quota::per_minute(a_minute))
        };
        Self { of_known: limiter(), of_unknown: limiter() }
    }
}

impl Refusals {
    /// Whether the trail records one more refusal of this caller, who has no name if unknown.
    fn records(&self, who: &str) -> bool {
        let limiter = if who.is_empty() { &self.of_unknown } else { &self.of_known };
        limiter.check().is_ok()
    }
}

/// The rules of the current configuration.
struct AccessRules {
    without_token: WithoutToken,
    tokens: Vec<KnownToken>,
}

/// Whether a request without a token is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WithoutToken {
    /// Never.
    Refused,
    /// From this machine, if the listener is on loopback: in dev mode and with `admin_open`. A request that
    /// a reverse proxy forwarded does not count as from this machine.
    FromLoopback,
}

struct KnownToken {
    name: Arc<str>,
    digest: digest::Digest,
    allow: Arc<[Permission]>,
}

impl Authorizer {
    /// The authorizer of a listener on `address`. Tokens are stored as digests, so that a comparison takes
    /// the same time for every token.
    pub(crate) fn new<'a>(
        address: IpAddr,
        without_token: WithoutToken,
        tokens: impl IntoIterator<Item = (&'a str, &'a Secret, &'a [Permission])>,
    ) -> Self {
        let quota = governor::Quota::with_period(Duration::from_secs(1) / WRONG_TOKENS_PER_SECOND)
            .expect("a period above zero")
            .allow_burst(WRONG_TOKENS_PER_SECOND.try_into().expect("not zero"));
        let closed = AccessRules { without_token: WithoutToken::Refused, tokens: Vec::new() };
        let authorizer = Self {
            address,
            rules: ArcSwap::from_pointee(closed),
            wrong: governor::RateLimiter::direct(quota),
            refusals: Refusals::default(),
        };
        authorizer.reload(without_token, tokens);
        authorizer
    }

    /// Replaces the rules: a token that was removed is refused from its next request on.
    pub(crate) fn reload<'a>(
        &self,
        without_token: WithoutToken,
        tokens: impl IntoIterator<Item = (&'a str, &'a Secret, &'a [Permission])>,
    ) {
        let known = |(name, value, allow): (&str, &Secret, &[Permission])| KnownToken {
            name: name.into(),
            digest: digest::digest(&digest::SHA256, value.expose().as_bytes()),
            allow: allow.into(),
        };
        let tokens = tokens.into_iter().map(known).collect();
        let without_token = match self.address.is_loopback() {
            true => without_token,
            false => WithoutToken::Refused,
        };
        self.rules.store(Arc::new(AccessRules { without_token, tokens }));
    }

    /// The caller of a request. `session` is the one that its cookie names.
    fn admit(
        &self,
        access: Access,
        head: RequestHead<'_>,
        session: Option<&Session>,
        origin: Option<&str>,
    ) -> Result<Caller, RefusedRequest> {
        let RequestHead { is_safe, version, headers } = head;
        let rules = self.rules.load();
        let by_session = session.and_then(|session| rules.by_session(session));
        let caller = match (headers.get(header::AUTHORIZATION), by_session, rules.without_token) {
            (Some(shown), _, _) => self.check_bearer(&rules.tokens, shown.as_bytes())?,
            (None, Some(caller), _) => {
                if !is_safe {
                    check_same_origin(headers, origin)?;
                }
                caller
            }
            (None, None, WithoutToken::Refused) => return Err(Problem::unauthorized().into()),
            (None, None, WithoutToken::FromLoopback) => {
                if is_forwarded(version, headers) {
                    return Err(Problem::unauthorized().into());
                }
                loopback_caller(access, headers, origin)?
            }
        };
        if caller.may(access) {
            return Ok(caller);
        }
        let lacks = match access {
            Access::Read => "this token does not permit reading",
            Access::Operate => "this token does not permit operating",
            Access::Claim => "this token does not permit claiming",
            Access::Publish => "this token does not permit publishing",
            Access::Admin => "this token does not permit administration",
        };
        tracing::warn!(token = %caller.who, "refused a request with the token {}: {lacks}", caller.who);
        Err(RefusedRequest { who: caller.who, problem: Problem::forbidden(lacks) })
    }

    fn check_bearer(&self, tokens: &[KnownToken], shown: &[u8]) -> Result<Caller, Problem> {
        let token = match shown.get(..7) {
            Some(scheme) if scheme.eq_ignore_ascii_case(b"bearer ") => &shown[7..],
            _ => return Err(Problem::unauthorized()),
        };
        self.check(tokens, token).map(|(caller, _)| caller)
    }

    /// The caller with this token, and the digest of the token.
    pub(super) fn log_in(&self, token: &str) -> Result<(Caller, [u8; 32]), Problem> {
        self.check(&self.rules.load().tokens, token.as_bytes())
    }

    fn check(&self, tokens: &[KnownToken], token: &[u8]) -> Result<(Caller, [u8; 32]), Problem> {
        let shown = digest::digest(&digest::SHA256, token);
        // Every token is compared, so that the time does not reveal which token matched.
        let known = tokens.iter().fold(None, |found, known| {
            let same =
                constant_time::verify_slices_are_equal(known.digest.as_ref(), shown.as_ref());
            if same.is_ok() { Some(known) } else { found }
        });
        let Some(known) = known else {
            return match self.wrong.check() {
                Ok(()) => {
                    tracing::warn!("refused a request to the admin side with an unknown token");
                    Err(Problem::unauthorized())
                }
                Err(_) => Err(Problem::too_many()),
            };
        };
        let digest = known.digest.as_ref().try_into().expect("a SHA-256 has 32 bytes");
        let may = Grants::Only(Arc::clone(&known.allow));
        Ok((Caller { who: known.name.clone(), may, session: None }, digest))
    }
}

impl AccessRules {
    /// The caller of a session whose token is still configured.
    fn by_session(&self, session: &Session) -> Option<Caller> {
        let token = self.tokens.iter().find(|token| token.digest.as_ref() == session.token)?;
        Some(Caller {
            who: session.who.as_str().into(),
            may: Grants::Only(Arc::clone(&token.allow)),
            session: Some(session.hash),
        })
    }
}

/// The part of a request that determines whether the request is allowed.
#[derive(Clone, Copy)]
struct RequestHead<'a> {
    /// Whether its method is read-only.
    is_safe: bool,
    version: Version,
    headers: &'a HeaderMap,
}

/// Why a request was refused, and the name of its caller if it is known.
struct RefusedRequest {
    who: Arc<str>,
    problem: Problem,
}

impl From<Problem> for RefusedRequest {
    fn from(problem: Problem) -> Self {
        Self { who: "".into(), problem }
    }
}

/// The name that is recorded for actions without a token.
const LOOPBACK: &str = "loopback";

/// The access that a route needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Reading.
    Read,
    /// Replaying, approving, rejecting, discarding.
    Operate,
    /// Claiming the jobs of a handler. The request names the handler, so the route calls
    /// [`Caller::may_claim`].
    Claim,
    /// Publishing messages.
    Publish,
    /// Adding, changing and removing endpoints and secrets.
    Admin,
}

impl Access {
    /// Whether requests that change something are recorded in the audit trail. Requests of workers and
    /// publishers are not: there are too many of them.
    fn is_audited(self) -> bool {
        match self {
            Self::Operate | Self::Admin => true,
            Self::Read | Self::Claim | Self::Publish => false,
        }
    }

    /// The access as the OpenAPI document names it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Claim => "claim",
            Self::Publish => "publish",
            Self::Admin => "admin",
        }
    }

    /// The permissions that include the access, as [`Caller::may`] decides, in words.
    pub(super) fn allowed_by(self) -> &'static str {
        match self {
            Self::Read => "`read`, `payload`, `operate` or `admin`",
            Self::Operate => "`operate` or `admin`",
            Self::Claim => "`claim` for the handler, or `admin`",
            Self::Publish => "`publish` or `admin`",
            Self::Admin => "`admin`",
        }
    }
}

/// The caller of a request.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    who: Arc<str>,
    may: Grants,
    /// The session that the request belongs to.
    session: Option<[u8; 32]>,
}

#[derive(Debug, Clone)]
enum Grants {
    Everything,
    Only(Arc<[Permission]>),
}

/// The facts about a caller that decide what a page shows.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct CallerView {
    who: Arc<str>,
    has_session: bool,
    may_operate: bool,
    may_administer: bool,
    sees_payloads: bool,
}

impl Caller {
    /// The facts that decide which pages this caller sees.
    pub(super) fn view(&self) -> CallerView {
        CallerView {
            who: Arc::clone(&self.who),
            has_session: self.session.is_some(),
            may_operate: self.may(Access::Operate),
            may_administer: self.may(Access::Admin),
            sees_payloads: self.sees_payloads(),
        }
    }

    /// The holder of a link to the portal, which permits nothing on the admin side.
    pub(super) fn of_link(link: PortalLinkId) -> Self {
        let who = format!("portal {link}").into();
        Self { who, may: Grants::Only(Arc::from([])), session: None }
    }

    /// The name that is recorded.
    pub(super) fn who(&self) -> &str {
        &self.who
    }

    /// Whether a token or a session has authenticated the caller.
    fn is_authenticated(&self) -> bool {
        match &self.may {
            Grants::Everything => false,
            Grants::Only(_) => true,
        }
    }

    /// The session that the request belongs to, by its hash.
    pub(super) fn session(&self) -> Option<[u8; 32]> {
        self.session
    }

    /// The record of an action of this caller.
    pub(super) fn action(&self, reason: Option<String>, at: Timestamp) -> Action {
        Action { who: self.who.to_string(), reason, at }
    }

    /// Whether the caller may claim the jobs of this handler.
    pub(super) fn may_claim(&self, of: &HandlerRef) -> Result<(), Problem> {
        let allowed = self.has(|permission| match permission {
            Permission::Admin => true,
            Permission::Claim { source, handler } => {
                source == of.source.as_str() && handler == of.handler.as_str()
            }
            Permission::Read | Permission::Payload | Permission::Operate | Permission::Publish => {
                false
            }
        });
        match allowed {
            true => Ok(()),
            false => {
                Err(Problem::forbidden("this token does not permit claiming jobs of that handler"))
            }
        }
    }

    /// Whether the caller sees values that a source redacts.
    pub(super) fn sees_payloads(&self) -> bool {
        self.has(|permission| match permission {
            Permission::Payload | Permission::Admin => true,
            Permission::Read | Permission::Operate => false,
            Permission::Publish | Permission::Claim { .. } => false,
        })
    }

    /// Whether the caller has this permission.
    pub(super) fn may(&self, access: Access) -> bool {
        self.has(|permission| match (access, permission) {
            (_, Permission::Admin) => true,
            (Access::Publish, Permission::Publish) => true,
            (Access::Publish, Permission::Read | Permission::Payload | Permission::Operate) => {
                false
            }
            (Access::Publish, Permission::Claim { .. }) => false,
            (Access::Admin, Permission::Read | Permission::Payload | Permission::Operate) => false,
            (Access::Admin, Permission::Publish | Permission::Claim { .. }) => false,
            (Access::Read, Permission::Read | Permission::Payload | Permission::Operate) => true,
            (Access::Operate, Permission::Operate) => true,
            (Access::Claim, Permission::Claim { .. }) => true,
            (Access::Read, Permission::Publish | Permission::Claim { .. }) => false,
            (Access::Operate, Permission::Read | Permission::Payload) => false,
            (Access::Operate, Permission::Publish | Permission::Claim { .. }) => false,
            (Access::Claim, Permission::Read | Permission::Payload) => false,
            (Access::Claim, Permission::Operate | Permission::Publish) => false,
        })
    }

    fn has(&self, fits: impl Fn(&Permission) -> bool) -> bool {
        match &self.may {
            Grants::Everything => true,
            Grants::Only(allow) => allow.iter().any(fits),
        }
    }
}

/// The caller without a token on an open admin side. A web page that uses DNS rebinding still sends its own host
/// name, and is refused.
fn loopback_caller(
    access: Access,
    headers: &HeaderMap,
    origin: Option<&str>,
) -> Result<Caller, Problem> {
    check_host_is_loopback(headers)?;
    match access {
        Access::Read => {}
        Access::Operate | Access::Claim | Access::Publish | Access::Admin => {
            check_same_site(headers, origin)?
        }
    }
    Ok(Caller { who: LOOPBACK.into(), may: Grants::Everything, session: None })
}

/// Whether a reverse proxy on this machine may have forwarded the request of another client. Most proxies add a header.
/// nginx adds none by default, but forwards over HTTP/1.0, which no current browser or client uses.
fn is_forwarded(version: Version, headers: &HeaderMap) -> bool {
    version < Version::HTTP_11 || headers.keys().any(|name| is_proxy_header(name.as_str()))
}

/// Whether reverse proxies add a header of this name. `_` counts as `-`, as in many servers.
fn is_proxy_header(name: &str) -> bool {
    let name = name.replace('_', "-");
    let begins = ["x-forwarded", "x-original-", "x-envoy-", "x-azure-", "x-appengine-", "x-amzn-"];
    let contains = ["client-ip", "clientip", "real-ip", "connecting-ip", "user-ip"];
    matches!(&*name, "forwarded" | "via" | "cdn-loop")
        || begins.iter().any(|part| name.starts_with(part))
        || contains.iter().any(|part| name.contains(part))
}

fn check_host_is_loopback(headers: &HeaderMap) -> Result<(), Problem> {
    let mut hosts = headers.get_all(header::HOST).iter();
    // Exactly one Host header, without user information.
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.to_str().ok().filter(|host| !host.contains('@')),
        (Some(_), Some(_)) | (None, _) => None,
    };
    let host = host.and_then(|host| host.parse::<Authority>().ok());
    let loopback = host.is_some_and(|host| {
        let name = host.host().trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost")
            || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    });
    match loopback {
        true => Ok(()),
        false => Err(Problem::forbidden("the Host header must name a loopback address")),
    }
}

/// Refuses requests of web pages from other sites, which can send a simple POST to loopback. Browsers add
/// the origin of the page, which must be `own`, the configured one, or the host of the request.
pub(super) fn check_same_site(headers: &HeaderMap, own: Option<&str>) -> Result<(), Problem> {
    let text = |name| headers.get(name).map(|value: &header::HeaderValue| value.to_str().ok());
    let fetched_by_us = match text(header::HeaderName::from_static("sec-fetch-site")) {
        None => true,
        Some(site) => matches!(site, Some("same-origin" | "none")),
    };
    let host = text(header::HOST).flatten();
    let from_us = match text(header::ORIGIN) {
        None => true,
        Some(origin) => {
            let authority = origin.and_then(|origin| origin.split_once("://")).map(|(_, at)| at);
            (own.is_some() && origin == own) || (authority.is_some() && authority == host)
        }
    };
    match fetched_by_us && from_us {
        true => Ok(()),
        false => Err(Problem::forbidden("the request comes from a web page of another site")),
    }
}

/// Refuses requests with a cookie that another site made the browser send. Browsers name the origin of the
/// page in one of two headers; a request without both is refused.
pub(super) fn check_same_origin(headers: &HeaderMap, own: Option<&str>) -> Result<(), Problem> {
    let is_named = headers.contains_key("sec-fetch-site") || headers.contains_key(header::ORIGIN);
    match is_named {
        true => check_same_site(headers, own),
        false => Err(Problem::forbidden("the browser did not say which page sent the request")),
    }
}

/// The name of the cookie that holds the session.
pub(super) const SESSION_COOKIE: &str = "hapax_session";

/// The hash of the session that a request's cookie of this name holds.
pub(super) fn session_hash(headers: &HeaderMap, cookie: &str) -> Option<[u8; 32]> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs =
        cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == cookie)?;
    Some(hash_of(value))
}

/// A random value that only its holder knows, and its hash. Only the hash is stored.
pub(super) struct RandomValue {
    pub(super) text: String,
    pub(super) hash: [u8; 32],
}

impl RandomValue {
    pub(super) fn new() -> Result<Self, Problem> {
        let mut value = [0; 32];
        rand::fill(&mut value)
            .map_err(|_| Problem::unavailable("the system has no random bytes"))?;
        let text = BASE64_URL_SAFE_NO_PAD.encode(value);
        Ok(Self { hash: hash_of(&text), text })
    }
}

/// The hash under which a random value is stored.
pub(super) fn hash_of(value: &str) -> [u8; 32] {
    let hash = digest::digest(&digest::SHA256, value.as_bytes());
    hash.as_ref().try_into().expect("a SHA-256 has 32 bytes")
}

/// Marks the answer to a request with a valid token or session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Authenticated;

/// The state of [`authorize`] for one route.
pub(super) struct RouteGuard<S> {
    pub(super) admin: Arc<Admin<S>>,
    pub(super) access: Access,
    pub(super) path: &'static str,
}

impl<S> Clone for RouteGuard<S> {
    fn clone(&self) -> Self {
        Self { admin: Arc::clone(&self.admin), access: self.access, path: self.path }
    }
}

/// Middleware that refuses requests that are not allowed and passes the [`Caller`] on to the route.
pub(super) async fn authorize<S: AdminStore>(
    State(guard): State<RouteGuard<S>>,
    request: Request,
    next: Next,
) -> Response {
    let admin = &guard.admin;
    let audited = (!request.method().is_safe() && guard.access.is_audited()).then(|| Audited {
        action: format!("{} {}", request.method(), guard.path),
        subject: audited_subject(request.uri()),
    });
    match received(&guard, request).await {
        Ok((caller, mut request)) => {
            let who = Arc::clone(&caller.who);
            let is_authenticated = caller.is_authenticated();
            request.extensions_mut().insert(caller);
            let mut response = match audited {
                None => next.run(request).await,
                Some(audited) => {
                    let acting = Arc::clone(admin);
                    run_to_completion(admin, async move {
                        let response = next.run(request).await;
                        acting.shared_pages.end();
                        audited.record(&acting, &who, response.status()).await;
                        response
                    })
                    .await
                }
            };
            if is_authenticated {
                response.extensions_mut().insert(Authenticated);
            }
            response
        }
        Err(refusal) => {
            let response = refusal.problem.into_response();
            // A server error means that the store cannot be read, so it cannot record the refusal
            // either.
            if let Some(audited) = audited.filter(|_| response.status().is_client_error()) {
                audited.record(admin, &refusal.who, response.status()).await;
            }
            response
        }
    }
}

/// What an action is about: the path, and the query, which names the events of a plan or one link of a tenant. Not
/// the text of a search: it may be a value of a customer that is masked or erased elsewhere.
fn audited_subject(uri: &Uri) -> String {
    let without_text = |pair: &str| match pair.starts_with("q=") {
        true => "q=…".to_owned(),
        false => pair.to_owned(),
    };
    match uri.query() {
        Some(query) => {
            let pairs: Vec<_> = query.split('&').map(without_text).collect();
            format!("{}?{}", uri.path(), pairs.join("&"))
        }
        None => uri.path().to_owned(),
    }
}

/// Answers on a task of its own. An action ends, is recorded and is remembered by its form even if the client disconnects
/// meanwhile.
pub(super) async fn run_to_completion<S: AdminStore>(
    admin: &Admin<S>,
    acting: impl Future<Output = Response> + Send + 'static,
) -> Response {
    match admin.unfinished.spawn(acting).await {
        Ok(response) => response,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Problem::unavailable("the server stops").into_response(),
        },
    }
}

/// The request with its whole body, and its caller. A body is read only if the request is allowed. The
/// request is checked again once its body is complete, because the token or the session may have ended while
/// the body arrived slowly.
async fn received<S: AdminStore>(
    guard: &RouteGuard<S>,
    request: Request,
) -> Result<(Caller, Request), RefusedRequest> {
    let (is_safe, version) = (request.method().is_safe(), request.version());
    let head = RequestHead { is_safe, version, headers: request.headers() };
    let caller = admitted(guard, head).await?;
    // No id contains a NUL, and PostgreSQL refuses to compare text that contains one.
    let path_and_query = request.uri().path_and_query();
    if path_and_query.is_some_and(|asked| asked.as_str().contains("%00")) {
        let detail = "the path and the query must not contain a NUL character (%00)";
        return Err(RefusedRequest { who: caller.who, problem: Problem::bad_request(detail) });
    }
    if is_safe {
        return Ok((caller, request));
    }
    let within = match guard.path.starts_with("/api/") {
        true => API_BODY_READ_WITHIN,
        false => FORM_READ_WITHIN,
    };
    let (parts, body) = request.into_parts();
    let read = tokio::time::timeout(within, axum::body::to_bytes(body, BODY_BYTES_MAX)).await;
    let refused = |problem| RefusedRequest { who: Arc::clone(&caller.who), problem };
    let body = match read {
        Err(_) => return Err(refused(Problem::too_slow())),
        Ok(Err(_)) => return Err(refused(Problem::too_large())),
        Ok(Ok(body)) => body,
    };
    let caller = admitted(guard, RequestHead { is_safe, version, headers: &parts.headers }).await?;
    Ok((caller, Request::from_parts(parts, Body::from(body))))
}

/// The caller of a request that is allowed now.
async fn admitted<S: AdminStore>(
    RouteGuard { admin, access, .. }: &RouteGuard<S>,
    head: RequestHead<'_>,
) -> Result<Caller, RefusedRequest> {
    let headers = head.headers;
    let session = match (headers.get(header::AUTHORIZATION), session_hash(headers, SESSION_COOKIE))
    {
        (None, Some(hash)) => {
            let session = admin.store.session(hash).await.map_err(Problem::from)?;
            session.filter(|session| session.expires_at > (admin.now)())
        }
        (_, _) => None,
    };
    let origin = admin.site.origin();
    admin.authorizer.admit(*access, head, session.as_ref(), origin)
}

/// A request that the audit trail records.
pub(super) struct Audited {
    /// The method and the route.
    pub(super) action: String,
    /// The path and the query.
    pub(super) subject: String,
}

/// The longest subject that the audit trail keeps, in characters.
const SUBJECT_CHARS_MAX: usize = 300;

impl Audited {
    /// Appends the request to the audit trail. Refusals are recorded at a bounded rate, so that they cannot
    /// fill the disk.
    pub(super) async fn record<S: AdminStore>(
        self,
        admin: &Admin<S>,
        who: &str,
        status: StatusCode,
    ) {
        self.record_within(&admin.authorizer.refusals, admin, who, status).await;
    }

    /// Appends the request to the audit trail, and bounds the refusals by `refusals`.
    pub(super) async fn record_within<S: AdminStore>(
        self,
        refusals: &Refusals,
        admin: &Admin<S>,
        who: &str,
        status: StatusCode,
    ) {
        let is_refusal = matches!(
            status,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS
        );
        if is_refusal && !refusals.records(who) {
            return;
        }
        self.record_always(admin, who, status).await;
    }

    /// Records the request without a bound on the number of records: the caller has its own bound.
    pub(super) async fn record_always<S: AdminStore>(
        self,
        admin: &Admin<S>,
        who: &str,
        status: StatusCode,
    ) {
        let entry = AuditEntry {
            at: (admin.now)(),
            who: who.to_owned(),
            action: self.action,
            subject: self.subject.chars().take(SUBJECT_CHARS_MAX).collect(),
            status: status.as_u16(),
        };
        if let Err(error) = admin.store.audit(vec![entry]).await {
            tracing::warn!(%error, "an action is missing in the audit trail: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(authorizer: &Authorizer, lines: &[(&'static str, &str)]) -> bool {
        may(authorizer, Access::Read, lines)
    }

    fn may(authorizer: &Authorizer, access: Access, lines: &[(&'static str, &str)]) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().expect("a header value"));
        }
        let (is_safe, version) = (access == Access::Read, Version::HTTP_11);
        let head = RequestHead { is_safe, version, headers: &headers };
        authorizer.admit(access, head, None, None).is_ok()
    }

    #[test]
    fn the_audit_trail_names_the_query_but_no_searched_text() {
        for (asked, subject) in [
            (
                "/plans/replay?source=shop&q=alice@example.com&q=b",
                "/plans/replay?source=shop&q=…&q=…",
            ),
            ("/tenants/acme/portal?link=q=1", "/tenants/acme/portal?link=q=1"),
            ("/events/1/replay", "/events/1/replay"),
        ] {
            assert_eq!(audited_subject(&asked.parse().expect("a URI")), subject);
        }
    }

    #[test]
    fn on_loopback_only_a_loopback_host_is_allowed() {
        // A web page that uses DNS rebinding to 127.0.0.1 still sends its own host name.
        let authorizer = Authorizer::new([127, 0, 0, 1].into(), WithoutToken::FromLoopback, []);
        for host in ["localhost", "LOCALHOST:8081", "127.0.0.1:8081", "127.9.9.9", "[::1]:8081"] {
            assert!(admits(&authorizer, &[("host", host)]), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"]
        {
            assert!(!admits(&authorizer, &[("host", host)]), "{host}");
        }
        assert!(!admits(&authorizer, &[]));
        assert!(!admits(&authorizer, &[("host", "evil.example@localhost")]));
        assert!(!admits(&authorizer, &[("host", "localhost"), ("host", "evil.example")]));
    }

    #[test]
    fn a_request_that_a_proxy_forwarded_needs_a_token_on_loopback_too() {
        // A proxy on the same machine connects from loopback, and may name a loopback host.
        let names = [
            "forwarded",
            "via",
            "x-forwarded-for",
            "x-forwarded-host",
            "x_forwarded_for",
            "x-real-ip",
            "x-original-url",
            "cf-connecting-ip",
            "true-client-ip",
            "fly-client-ip",
            "x-azure-clientip",
            "x-appengine-user-ip",
            "x-envoy-external-address",
            "x-amzn-trace-id",
            "cdn-loop",
        ];
        let secret = Secret::new("right");
        let tokens = [("ops", &secret, &[Permission::Read][..])];
        let authorizer = Authorizer::new([127, 0, 0, 1].into(), WithoutToken::FromLoopback, tokens);
        let host = ("host", "localhost");
        for name in names {
            assert!(!admits(&authorizer, &[host, (name, "1")]), "{name}");
            assert!(admits(&authorizer, &[host, (name, "1"), ("authorization", "Bearer right")]));
        }
        for harmless in ["accept", "user-agent", "sec-fetch-site", "x-request-id", "priority"] {
            assert!(!is_proxy_header(harmless), "{harmless}");
        }
        let mut headers = HeaderMap::new();
        headers.insert("host", "localhost".parse().expect("a host"));
        for (version, expected) in [(Version::HTTP_10, false), (Version::HTTP_2, true)] {
            let head = RequestHead { is_safe: true, version, headers: &headers };
            let admitted = authorizer.admit(Access::Read, head, None, None).is_ok();
            assert_eq!(admitted, expected, "{version:?}");
        }
    }

    #[test]
    fn off_loopback_only_a_token_that_permits_reading_is_allowed() {
        let (good, weak) = (Secret::new("right"), Secret::new("weak"));
        let authorizer = Authorizer::new(
            [0, 0, 0, 0].into(),
            WithoutToken::FromLoopback,
            [("ops", &good, &[Permission::Read][..]), ("pub", &weak, &[Permission::Publish][..])],
        );
        assert!(admits(&authorizer, &[("authorization", "Bearer right")]));
        assert!(admits(&authorizer, &[("authorization", "bearer right")]));
        for wrong in ["Bearer wrong", "Bearer ", "Bearer", "Basic right", "right", "Bearer weak"] {
            assert!(!admits(&authorizer, &[("authorization", wrong)]), "{wrong}");
        }
        assert!(!admits(&authorizer, &[("host", "localhost")]));
    }

    #[test]
    fn each_access_needs_its_own_permission() {
        let claim = Permission::Claim { source: "stripe".into(), handler: "fee".into() };
        let permissions = [
            ("admin", Permission::Admin, [true, true, true, true, true]),
            ("operate", Permission::Operate, [true, true, false, false, false]),
            ("read", Permission::Read, [true, false, false, false, false]),
            ("payload", Permission::Payload, [true, false, false, false, false]),
            ("claim", claim, [false, false, true, false, false]),
            ("publish", Permission::Publish, [false, false, false, true, false]),
        ];
        for (name, permission, expected) in permissions {
            let secret = Secret::new(name);
            let tokens = [(name, &secret, &[permission][..])];
            let authorizer = Authorizer::new([127, 0, 0, 1].into(), WithoutToken::Refused, tokens);
            let shown = format!("Bearer {name}");
            let kinds =
                [Access::Read, Access::Operate, Access::Claim, Access::Publish, Access::Admin];
            let found = kinds.map(|access| may(&authorizer, access, &[("authorization", &shown)]));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn a_claim_token_permits_its_own_handler_only() {
        let allow = [Permission::Claim { source: "stripe".into(), handler: "fee".into() }];
        let caller =
            Caller { who: "worker".into(), may: Grants::Only(Arc::from(allow)), session: None };
        let of = |source: &str, handler: &str| HandlerRef {
            source: hapax_core::SourceName::new(source),
            handler: hapax_core::job::HandlerName::new(handler),
        };
        assert!(caller.may_claim(&of("stripe", "fee")).is_ok());
        assert!(caller.may_claim(&of("stripe", "mail")).is_err());
        assert!(caller.may_claim(&of("github", "fee")).is_err());
    }

    #[test]
    fn a_page_of_another_site_changes_nothing_on_loopback() {
        // A form on any page can be sent to 127.0.0.1 with a loopback Host header.
        let authorizer = Authorizer::new([127, 0, 0, 1].into(), WithoutToken::FromLoopback, []);
        let host = ("host", "127.0.0.1:8081");
        let operate = |more: (&'static str, &str)| may(&authorizer, Access::Operate, &[host, more]);
        assert!(may(&authorizer, Access::Operate, &[host]));
        assert!(operate(("origin", "http://127.0.0.1:8081")));
        assert!(operate(("sec-fetch-site", "same-origin")));
        for foreign in ["https://evil.example", "http://127.0.0.1:3000", "null", ""] {
            assert!(!operate(("origin", foreign)), "{foreign}");
        }
        for foreign in ["cross-site", "same-site"] {
            assert!(!operate(("sec-fetch-site", foreign)), "{foreign}");
        }
    }
}
