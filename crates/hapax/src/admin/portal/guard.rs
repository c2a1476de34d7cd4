//! Admits requests to the pages behind a link. The link is read for every request, so that a link that was revoked on
//! any node opens nothing from then on.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hapax_core::store::{PortalLink, PortalLinkId, PortalRight};

use super::super::auth::{
    Audited, Authenticated, Caller, check_same_origin, run_to_completion, session_hash,
};
use super::super::pages::Frame;
use super::super::problem::Problem;
use super::super::{AdminStore, Site};
use super::Portal;

/// The name of the cookie that holds the session of a link.
pub(super) const COOKIE: &str = "hapax_portal";

/// The holder of a link that is open.
#[derive(Debug, Clone)]
pub(super) struct Visitor {
    link: Arc<PortalLink>,
    /// The session, by its hash.
    session: [u8; 32],
}

impl Visitor {
    pub(super) fn link(&self) -> &PortalLink {
        &self.link
    }

    /// Checks again that the link is open. The body of a form arrives after the request was admitted, and the link
    /// may have ended meanwhile.
    pub(super) async fn check_again<S: AdminStore>(
        &self,
        portal: &Portal<S>,
    ) -> Result<(), Problem> {
        visitor(portal, Some(self.link.id), Some(self.session)).await.map(|_| ())
    }

    /// The link, as the actor of its holder's actions.
    pub(super) fn caller(&self) -> Caller {
        Caller::of_link(self.link.id)
    }

    /// The parts of a page around its content.
    pub(super) fn frame(&self, site: &Site, here: &'static str) -> Frame {
        Frame::of_link(site, &self.link, here)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Visitor {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(Problem::not_entered)
    }
}

/// The state of [`admit`] for one route.
pub(super) struct RouteGuard<S> {
    pub(super) portal: Arc<Portal<S>>,
    pub(super) right: PortalRight,
    pub(super) method: Method,
    pub(super) path: &'static str,
}

impl<S> Clone for RouteGuard<S> {
    fn clone(&self) -> Self {
        let portal = Arc::clone(&self.portal);
        Self { portal, right: self.right, method: self.method.clone(), path: self.path }
    }
}

/// Middleware that refuses requests that the link does not permit, and passes the [`Visitor`] on to the route.
pub(super) async fn admit<S: AdminStore>(
    State(guard): State<RouteGuard<S>>,
    mut request: Request,
    next: Next,
) -> Response {
    let portal = &guard.portal;
    let link = request.uri().path().split('/').nth(2).and_then(|id| id.parse().ok());
    let session = session_hash(request.headers(), COOKIE);
    let visitor = match visitor(portal, link.map(PortalLinkId), session).await {
        Ok(visitor) => visitor,
        Err(problem) => return problem.into_response(),
    };
    let audited = (!guard.method.is_safe()).then(|| Audited {
        action: format!("{} {}", guard.method, guard.path),
        subject: request.uri().path().to_owned(),
    });
    let permitted = permits(portal, &guard, &visitor, &request);
    request.extensions_mut().insert(visitor.clone());
    let answer = async move {
        match permitted {
            Ok(()) => next.run(request).await,
            Err(problem) => problem.into_response(),
        }
    };
    let mut response = match audited {
        None => answer.await,
        Some(audited) => {
            let (portal, link) = (Arc::clone(portal), visitor.link().id);
            let admin = Arc::clone(&portal.admin);
            run_to_completion(&admin, async move {
                let response = answer.await;
                let status = response.status();
                let has_failed = status.is_client_error() || status.is_server_error();
                if !has_failed || portal.limits.records_refusal(link) {
                    let caller = Caller::of_link(link);
                    audited.record_always(&portal.admin, caller.who(), status).await;
                }
                response
            })
            .await
        }
    };
    response.extensions_mut().insert(Authenticated);
    response.extensions_mut().insert(visitor);
    response
}

/// The holder of the link that the path names, by the session in the request's cookie. The answer does not
/// reveal whether the link is unknown, has ended or belongs to another session.
async fn visitor<S: AdminStore>(
    portal: &Portal<S>,
    link: Option<PortalLinkId>,
    session: Option<[u8; 32]>,
) -> Result<Visitor, Problem> {
    let (Some(link), Some(session)) = (link, session) else { return Err(Problem::not_entered()) };
    let found = portal.admin.store.portal_session(link, session).await?;
    let open = found.filter(|link| link.expires_at > (portal.admin.now)());
    open.map(|link| Visitor { link: Arc::new(link), session }).ok_or_else(Problem::not_entered)
}

fn permits<S>(
    portal: &Portal<S>,
    guard: &RouteGuard<S>,
    visitor: &Visitor,
    request: &Request,
) -> Result<(), Problem> {
    match guard.method.is_safe() {
        true => portal.limits.admit_page(visitor.link().id)?,
        false => {
            portal.limits.admit_form(visitor.link().id)?;
            check_same_origin(request.headers(), portal.site.origin())?;
        }
    }
    let lacks = match guard.right {
        PortalRight::Read => "this link does not permit reading",
        PortalRight::Replay => "this link does not permit sending deliveries again",
        PortalRight::Endpoints => "this link does not permit changing endpoints",
    };
    if !visitor.link().rights.permit(guard.right) {
        return Err(Problem::forbidden(lacks));
    }
    // No id contains a NUL, and PostgreSQL refuses to compare text with one.
    let asked = request.uri().path_and_query();
    match asked.is_some_and(|asked| asked.as_str().contains("%00")) {
        true => Err(Problem::bad_request("the address must not contain a NUL character (%00)")),
        false => Ok(()),
    }
}
