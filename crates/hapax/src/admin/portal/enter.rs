//! The way into the portal. A GET shows one button and changes nothing, because programs that scan mail open every
//! link in it. Only the POST exchanges the code for a cookie, and a code works once.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hapax_core::Timestamp;
use hapax_core::store::{PortalLink, PortalRight};

use super::super::AdminStore;
use super::super::auth::{Audited, Caller, RandomValue, check_same_site, hash_of};
use super::super::extract::PathId;
use super::super::pages::{Frame, Page, PageReader, SeeOther};
use super::super::problem::Problem;
use super::Portal;
use super::guard::{COOKIE, Visitor};

/// The characters of a code: 32 bytes in base64.
const CODE_CHARS: usize = 43;

#[derive(Template)]
#[template(path = "portal/enter.html")]
pub(super) struct Enter {
    frame: Frame,
    action: String,
    tenant: String,
    expires_at: Timestamp,
    may_replay: bool,
    may_change: bool,
}

#[derive(Template)]
#[template(path = "portal/used.html")]
pub(super) struct UsedCodePage {
    frame: Frame,
    pages: String,
}

/// The page that a code leads to.
pub(super) enum EnterPage {
    Open(Box<Page<Enter>>),
    Used(Box<Page<UsedCodePage>>),
}

impl IntoResponse for EnterPage {
    fn into_response(self) -> Response {
        match self {
            Self::Open(page) => page.into_response(),
            Self::Used(page) => {
                let mut response = page.into_response();
                *response.status_mut() = StatusCode::GONE;
                response
            }
        }
    }
}

/// `GET /enter/{code}`.
pub(super) async fn ask<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    reader: PageReader,
    PathId(code): PathId,
) -> Result<EnterPage, Problem> {
    let frame = Frame::without_session(&portal.site);
    let link = known(&portal, &code).await?.ok_or_else(ended)?;
    if link.entered_at.is_some() {
        let pages = format!("{}{}/", portal.site.base(), path_of(&link));
        return Ok(EnterPage::Used(Box::new(reader.page(UsedCodePage { frame, pages }))));
    }
    let page = Enter {
        frame,
        action: format!("{}/enter/{code}", portal.site.base()),
        tenant: link.tenant.to_string(),
        expires_at: link.expires_at,
        may_replay: link.rights.permit(PortalRight::Replay),
        may_change: link.rights.permit(PortalRight::Endpoints),
    };
    Ok(EnterPage::Open(Box::new(reader.page(page))))
}

/// The redirect of a browser that has entered, with its cookie.
pub(super) struct CookieRedirect {
    to: String,
    cookie: HeaderValue,
}

impl IntoResponse for CookieRedirect {
    fn into_response(self) -> Response {
        let mut response = SeeOther(self.to).into_response();
        response.headers_mut().insert(header::SET_COOKIE, self.cookie);
        response
    }
}

/// `POST /enter/{code}`.
pub(super) async fn enter<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    PathId(code): PathId,
    headers: HeaderMap,
) -> Result<CookieRedirect, Problem> {
    // Another site must not use up a code, nor lead the browser to the pages of another tenant.
    check_same_site(&headers, portal.site.origin())?;
    let now = (portal.admin.now)();
    let session = RandomValue::new()?;
    // The code is read before anything is written: requests with guessed codes must not queue for a commit.
    let entered = match known(&portal, &code).await? {
        Some(_) => portal.admin.store.enter_portal(hash_of(&code), session.hash, now).await?,
        None => None,
    };
    let Some(link) = entered else {
        record(&portal, "", StatusCode::UNAUTHORIZED).await;
        return Err(ended());
    };
    record(&portal, Caller::of_link(link.id).who(), StatusCode::SEE_OTHER).await;
    let path = path_of(&link);
    let attributes = portal.site.cookie_attributes_below(&path);
    let seconds = link.expires_at.duration_since(now).as_secs().max(0);
    let cookie = format!("{COOKIE}={}; {attributes}; Max-Age={seconds}", session.text);
    let mut cookie = HeaderValue::try_from(cookie).expect("base64 and attributes");
    cookie.set_sensitive(true);
    Ok(CookieRedirect { to: format!("{path}/"), cookie })
}

/// `POST /p/{link}/logout`. The link ends, because its code has been used.
pub(super) async fn leave<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
) -> Result<LeftPage, Problem> {
    let link = visitor.link();
    portal.admin.store.end_portal_link(link.id).await?;
    let attributes = portal.site.cookie_attributes_below(&path_of(link));
    let cookie = format!("{COOKIE}=; {attributes}; Max-Age=0");
    let cookie = HeaderValue::try_from(cookie).expect("attributes");
    let page = reader.page(LoggedOut { frame: Frame::without_session(&portal.site) });
    Ok(LeftPage { page: Box::new(page), cookie })
}

#[derive(Template)]
#[template(path = "portal/left.html")]
pub(super) struct LoggedOut {
    frame: Frame,
}

/// The page after leaving.
pub(super) struct LeftPage {
    page: Box<Page<LoggedOut>>,
    cookie: HeaderValue,
}

impl IntoResponse for LeftPage {
    fn into_response(self) -> Response {
        let mut response = self.page.into_response();
        response.headers_mut().insert(header::SET_COOKIE, self.cookie);
        response
    }
}

/// The link of a code, if it has not ended.
async fn known<S: AdminStore>(
    portal: &Portal<S>,
    code: &str,
) -> Result<Option<PortalLink>, Problem> {
    if !is_code(code) {
        return Ok(None);
    }
    let found = portal.admin.store.portal_link(hash_of(code)).await?;
    Ok(found.filter(|link| link.expires_at > (portal.admin.now)()))
}

/// Whether the text has the form of a code. Other text is not looked up.
fn is_code(text: &str) -> bool {
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    text.len() == CODE_CHARS && text.bytes().all(is_base64)
}

/// The path of the pages behind a link.
fn path_of(link: &PortalLink) -> String {
    format!("/p/{}", link.id)
}

fn ended() -> Problem {
    Problem::not_found("this link has ended, was used before, or was revoked: ask for a new one")
}

/// Records an attempt to enter, without the code.
async fn record<S: AdminStore>(portal: &Portal<S>, who: &str, status: StatusCode) {
    let (action, subject) = ("POST /enter/{code}".to_owned(), "/enter".to_owned());
    let audited = Audited { action, subject };
    audited.record_within(&portal.refusals, &portal.admin, who, status).await;
}
