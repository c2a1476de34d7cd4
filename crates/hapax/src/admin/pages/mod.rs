//! The dashboard: pages that the server renders on the admin side.
//!
//! A page calls the function of its API route and renders what the API would answer, so both show the same.
//! Every page works without JavaScript. The script refreshes the regions that a template marks with
//! `data-live`.

mod actions;
mod alerts;
pub(crate) mod assets;
mod curl;
mod event;
mod event_actions;
mod events;
mod filters;
mod handler_actions;
mod login;
mod overview;
mod plans;
mod plot;
mod portal_links;
mod sending;
mod sending_actions;
mod shared_pages;
mod storage;
pub(crate) mod text;
mod work;

use std::sync::Arc;

use askama::Template;
use aws_lc_rs::digest;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};
use hapax_core::store::{PortalLink, PortalRight};

use super::auth::{Access, Caller};
use super::problem::Problem;
use super::{Admin, AdminStore, Site};
use crate::api;

pub(super) use actions::{
    Acted, ActionForm, ActionRequest, ActionResult, Confirm, FormField, Forms, PageAction,
    Question, act, act_once, ask,
};
pub(crate) use alerts::alert_page;
pub(super) use alerts::{SilenceAlert, TestAlert, UnsilenceAlert, alerts};
pub(super) use assets::{File, file};
pub(super) use event::event;
pub(super) use event_actions::{ApproveEvent, DiscardEvent, RejectEvent, ReplayEvent};
pub(super) use events::{events, find, review};
pub(super) use filters::Filters;
pub(super) use handler_actions::{PauseHandler, ResumeHandler};
pub(super) use login::{LoggedIn, LoginForm, log_in, log_out, login};
pub(super) use overview::overview;
pub(super) use plans::{
    CancelPlan, PlanDeliveries, PlanEvents, plan, plans, rate, rate_of, recorded,
};
pub(super) use portal_links::{RevokePortalLink, portal_links};
pub(super) use sending::{STATUSES, deliveries, delivery, endpoint, endpoints, message, messages};
pub(super) use sending_actions::{
    CancelMessage, DisableEndpoint, EnableEndpoint, PingEndpoint, ReplayDelivery, ReplayMessage,
    RotateEndpoint, SkipDelivery,
};
pub(crate) use shared_pages::SharedPages;
pub(super) use shared_pages::share;
pub(super) use storage::{DeleteKey, duplicates, keys, storage};
pub(super) use work::{audit, dead, handlers, jobs, source};

/// The files that a browser may load for a page: only those of this server.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
     connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// A rendered page. A request whose `If-None-Match` names the same content gets a 304.
pub(super) struct Page<T> {
    template: T,
    if_none_match: Option<HeaderValue>,
}

impl<T: Template> IntoResponse for Page<T> {
    fn into_response(self) -> Response {
        let html = match self.template.render() {
            Ok(html) => html,
            Err(error) => {
                let detail = format!("the page cannot be rendered: {error}");
                return Problem::unavailable(&detail).into_response();
            }
        };
        let hash = digest::digest(&digest::SHA256, html.as_bytes());
        let etag = format!("\"{}\"", hex::encode(&hash.as_ref()[..16]));
        let is_same = self.if_none_match.is_some_and(|known| known.as_bytes() == etag.as_bytes());
        let mut response = match is_same {
            true => StatusCode::NOT_MODIFIED.into_response(),
            false => axum::response::Html(html).into_response(),
        };
        let etag = HeaderValue::try_from(etag).expect("hexadecimal digits in quotes");
        response.headers_mut().insert(header::ETAG, etag);
        response
    }
}

/// Redirects the browser to another page.
pub(super) struct SeeOther(pub(super) String);

impl IntoResponse for SeeOther {
    fn into_response(self) -> Response {
        Redirect::to(&self.0).into_response()
    }
}

/// The reader of a page, and the facts about the reader that every page shows.
pub(super) struct PageReader {
    caller: Option<Caller>,
    if_none_match: Option<HeaderValue>,
}

impl<S: Send + Sync> FromRequestParts<S> for PageReader {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(Self {
            caller: parts.extensions.get::<Caller>().cloned(),
            if_none_match: parts.headers.get(header::IF_NONE_MATCH).cloned(),
        })
    }
}

impl PageReader {
    /// The caller whose name is recorded.
    fn caller(&self) -> Result<Caller, Problem> {
        self.caller.clone().ok_or_else(Problem::unauthorized)
    }

    /// Answers with the page.
    pub(super) fn page<T: Template>(self, template: T) -> Page<T> {
        Page { template, if_none_match: self.if_none_match }
    }

    /// The frame around the content of a page.
    async fn frame<S: AdminStore>(&self, admin: &Admin<S>, here: &'static str) -> Frame {
        let may = |access| self.caller.as_ref().is_some_and(|caller| caller.may(access));
        Frame {
            place: PageSide::Dashboard,
            site: admin.site.base().to_owned(),
            base: admin.site.base().to_owned(),
            who: self.caller.as_ref().map(|caller| caller.who().to_owned()).unwrap_or_default(),
            session: self.caller.as_ref().is_some_and(|caller| caller.session().is_some()),
            may_operate: may(Access::Operate),
            may_administer: may(Access::Admin),
            alerts: {
                let alerts = admin.watch.recent_alerts(&*admin.store).await;
                alerts.iter().filter(|alert| alert.silenced.is_none()).count()
            },
            here,
        }
    }
}

/// The side that a page belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageSide {
    /// The pages of operators.
    Dashboard,
    /// The pages of a receiving party.
    Portal,
    /// Pages of the portal without a session.
    PortalDoor,
}

/// The frame around the content of every page.
pub(super) struct Frame {
    pub(super) place: PageSide,
    /// The path that the side is served under, where its files are.
    pub(super) site: String,
    /// The path in front of the pages: the path of the side. In the portal, the path of the link
    /// follows it.
    pub(super) base: String,
    /// The name that is recorded for actions of the reader.
    pub(super) who: String,
    /// Whether the reader can log out.
    pub(super) session: bool,
    pub(super) may_operate: bool,
    pub(super) may_administer: bool,
    pub(super) alerts: usize,
    /// The path of the list that the page belongs to.
    pub(super) here: &'static str,
}

/// One link of the navigation.
pub(super) struct Link {
    pub(super) path: &'static str,
    pub(super) name: &'static str,
    pub(super) current: bool,
    pub(super) count: usize,
}

impl Frame {
    /// The frame of a page of the dashboard that has no reader.
    fn empty(site: &Site) -> Self {
        Self::bare(PageSide::Dashboard, site)
    }

    /// The frame of a page of the portal that has no session.
    pub(super) fn without_session(site: &Site) -> Self {
        Self::bare(PageSide::PortalDoor, site)
    }

    /// The frame of a page of the portal, behind a link.
    pub(super) fn of_link(site: &Site, link: &PortalLink, here: &'static str) -> Self {
        Self {
            base: format!("{}/p/{}", site.base(), link.id),
            who: link.tenant.to_string(),
            session: true,
            may_operate: link.rights.permit(PortalRight::Replay),
            may_administer: link.rights.permit(PortalRight::Endpoints),
            here,
            ..Self::bare(PageSide::Portal, site)
        }
    }

    fn bare(place: PageSide, site: &Site) -> Self {
        Self {
            place,
            site: site.base().to_owned(),
            base: site.base().to_owned(),
            who: String::new(),
            session: false,
            may_operate: false,
            may_administer: false,
            alerts: 0,
            here: "",
        }
    }

    pub(super) fn is_dashboard(&self) -> bool {
        self.place == PageSide::Dashboard
    }

    /// The name of the pages in their title.
    pub(super) fn name(&self) -> &'static str {
        match self.place {
            PageSide::Dashboard => "Hapax",
            PageSide::Portal | PageSide::PortalDoor => "Webhooks",
        }
    }

    pub(super) fn links(&self) -> Vec<Link> {
        let pages: &[(&str, &str)] = match self.place {
            PageSide::Dashboard => &DASHBOARD_PAGES,
            PageSide::Portal => &PORTAL_PAGES,
            PageSide::PortalDoor => &[],
        };
        let link = |&(path, name)| {
            let count = if path == "/alerts" { self.alerts } else { 0 };
            Link { path, name, current: path == self.here, count }
        };
        pages.iter().map(link).collect()
    }
}

/// The lists of the dashboard.
const DASHBOARD_PAGES: [(&str, &str); 14] = [
    ("/events", "Events"),
    ("/dead", "Dead"),
    ("/review", "Review"),
    ("/handlers", "Handlers"),
    ("/endpoints", "Endpoints"),
    ("/alerts", "Alerts"),
    ("/messages", "Messages"),
    ("/deliveries", "Deliveries"),
    ("/replays", "Plans"),
    ("/duplicates", "Duplicates"),
    ("/keys", "Keys"),
    ("/portal", "Portal"),
    ("/storage", "Storage"),
    ("/audit", "Audit"),
];

/// The lists of the portal.
const PORTAL_PAGES: [(&str, &str); 3] =
    [("/", "Endpoints"), ("/deliveries", "Deliveries"), ("/verify", "How to verify")];

/// The page of an error.
#[derive(Template)]
#[template(path = "problem.html")]
pub(super) struct ProblemPage {
    frame: Frame,
    problem: api::Problem,
}

/// Middleware of page routes: errors become pages, and browsers get the rules that protect them.
pub(super) async fn finish(
    State(site): State<Arc<Site>>,
    request: Request,
    next: Next,
) -> Response {
    let if_none_match = request.headers().get(header::IF_NONE_MATCH).cloned();
    // Only browsers get errors as pages and are redirected to the login.
    let wants_page = wants_page(request.headers());
    let asked = (request.method().is_safe() && wants_page)
        .then(|| request.uri().path_and_query().cloned())
        .flatten();
    let mut response = next.run(request).await;
    if let Some(asked) = asked
        && response.status() == StatusCode::UNAUTHORIZED
    {
        let login = Filters::default().with("next", asked.as_str()).link("/login");
        response = SeeOther(login).into_response();
    }
    if wants_page {
        response = problem_as_page(response, Frame::empty(&site), if_none_match);
    }
    finish_headers(response.headers_mut(), &site);
    response
}

/// The page of an error instead of its problem in JSON.
pub(super) fn problem_as_page(
    mut response: Response,
    frame: Frame,
    if_none_match: Option<HeaderValue>,
) -> Response {
    let Some(problem) = response.extensions_mut().remove::<api::Problem>() else { return response };
    let (status, kept) = (response.status(), kept_headers(response.headers()));
    let page = Page { template: ProblemPage { frame, problem }, if_none_match };
    response = page.into_response();
    *response.status_mut() = status;
    response.headers_mut().extend(kept);
    response
}

/// Whether the request comes from a browser that shows pages. Other clients get a problem in JSON.
pub(super) fn wants_page(headers: &HeaderMap) -> bool {
    let kinds = headers.get(header::ACCEPT).and_then(|kinds| kinds.to_str().ok());
    kinds.is_some_and(|kinds| kinds.contains("text/html"))
}

/// Adds the rules that protect pages in a browser, and the path of the site to a redirect.
pub(super) fn finish_headers(headers: &mut HeaderMap, site: &Site) {
    // Handlers return paths on this server, without the path of the site.
    if let Some(to) = headers.get(header::LOCATION).and_then(|to| to.to_str().ok())
        && let Ok(to) = HeaderValue::try_from(format!("{}{to}", site.base()))
    {
        headers.insert(header::LOCATION, to);
    }
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::REFERRER_POLICY, "same-origin"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// The headers of an error that its page keeps.
fn kept_headers(headers: &HeaderMap) -> HeaderMap {
    let names = [header::RETRY_AFTER, header::WWW_AUTHENTICATE];
    let kept =
        names.into_iter().filter_map(|name| Some((name.clone(), headers.get(name)?.clone())));
    kept.collect()
}
