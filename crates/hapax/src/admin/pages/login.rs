//! Login and logout. A token is exchanged for a random session; the database knows only its hash, so every
//! node accepts the session. A session also ends when its token is removed.

use std::sync::Arc;
use std::time::Duration;

use askama::Template;
use axum::extract::{FromRequest, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hapax_core::store::Session;

use super::super::auth::{
    Audited, RandomValue, SESSION_COOKIE, check_same_origin, check_same_site, session_hash,
};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore};
use super::filters::{Filters, form};
use super::{Frame, Page, PageReader, SeeOther};
use crate::logs::needs_escape;

/// How long a session lasts.
const SESSION: Duration = Duration::from_secs(12 * 3_600);

/// The longest name of an operator, in characters.
const NAME_CHARS_MAX: usize = 60;

/// The largest form, in bytes.
const FORM_BYTES_MAX: usize = 4_096;

#[derive(Template)]
#[template(path = "login.html")]
pub(in crate::admin) struct Login {
    frame: Frame,
    next: String,
    problem: Option<String>,
}

/// `GET /login`.
pub(in crate::admin) async fn login<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Page<Login> {
    let next = local_path(filters.get("next"));
    reader.page(Login { frame: Frame::empty(&admin.site), next, problem: None })
}

/// The fields of the login form, and the headers that say which page sent it.
pub(in crate::admin) struct LoginForm {
    token: String,
    name: String,
    next: String,
    headers: HeaderMap,
}

impl<S: Send + Sync> FromRequest<S> for LoginForm {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let headers = request.headers().clone();
        let (_, fields) = form(request, state, FORM_BYTES_MAX).await?;
        Ok(Self {
            token: fields.get("token").unwrap_or_default().trim().to_owned(),
            name: fields.get("name").unwrap_or_default(),
            next: local_path(fields.get("next")),
            headers,
        })
    }
}

/// The outcome of a login.
pub(in crate::admin) enum LoggedIn {
    Yes { to: String, cookie: HeaderValue },
    No(Box<Page<Login>>),
}

impl IntoResponse for LoggedIn {
    fn into_response(self) -> Response {
        match self {
            Self::Yes { to, cookie } => {
                let mut response = SeeOther(to).into_response();
                response.headers_mut().insert(header::SET_COOKIE, cookie);
                response
            }
            Self::No(page) => {
                let mut response = page.into_response();
                *response.status_mut() = StatusCode::UNAUTHORIZED;
                response
            }
        }
    }
}

/// `POST /login`.
pub(in crate::admin) async fn log_in<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    form: LoginForm,
) -> Result<LoggedIn, Problem> {
    // Another site must not log the browser in with a token of that site's choice. Clients other than
    // browsers name no site, and pass this check.
    check_same_site(&form.headers, admin.site.origin())?;
    let (caller, token) = match admin.authorizer.log_in(&form.token) {
        Ok(known) => known,
        Err(problem) if problem.is_unauthorized() => {
            audited().record(&admin, "", StatusCode::UNAUTHORIZED).await;
            let problem = Some("This token is not valid on this server.".to_owned());
            let page = Login { frame: Frame::empty(&admin.site), next: form.next, problem };
            return Ok(LoggedIn::No(Box::new(reader.page(page))));
        }
        Err(problem) => return Err(problem),
    };
    let RandomValue { text: value, hash } = RandomValue::new()?;
    // Parentheses and hidden characters are removed, so that no name looks like the name of another
    // token.
    let is_plain = |c: &char| !needs_escape(*c) && !matches!(c, '(' | ')');
    let name: String = form.name.trim().chars().filter(is_plain).take(NAME_CHARS_MAX).collect();
    let who = match name.is_empty() {
        true => caller.who().to_owned(),
        false => format!("{} ({name})", caller.who()),
    };
    let expires_at = (admin.now)() + SESSION;
    let session = Session { hash, token, who: who.clone(), expires_at };
    admin.store.open_session(session).await?;
    audited().record(&admin, &who, StatusCode::SEE_OTHER).await;
    let seconds = SESSION.as_secs();
    let attributes = admin.site.cookie_attributes();
    let cookie = format!("{SESSION_COOKIE}={value}; {attributes}; Max-Age={seconds}");
    let mut cookie = HeaderValue::try_from(cookie).expect("base64 and attributes");
    cookie.set_sensitive(true);
    Ok(LoggedIn::Yes { to: form.next, cookie })
}

/// `POST /logout`. Without a session, the page only leads to the login.
pub(in crate::admin) async fn log_out<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    headers: HeaderMap,
) -> Result<LoggedIn, Problem> {
    check_same_origin(&headers, admin.site.origin())?;
    // Requests with an unknown cookie need no token, so they must not cause commits.
    if let Some(hash) = session_hash(&headers, SESSION_COOKIE)
        && admin.store.session(hash).await?.is_some()
    {
        admin.store.end_session(hash).await?;
    }
    let attributes = admin.site.cookie_attributes();
    let cookie = format!("{SESSION_COOKIE}=; {attributes}; Max-Age=0");
    let cookie = HeaderValue::try_from(cookie).expect("attributes");
    Ok(LoggedIn::Yes { to: "/login".to_owned(), cookie })
}

/// A login, as the audit trail records it.
fn audited() -> Audited {
    Audited { action: "POST /login".to_owned(), subject: "/login".to_owned() }
}

/// A path of this server; anything else could lead to another site.
fn local_path(next: Option<String>) -> String {
    let is_local = |path: &String| {
        path.starts_with('/')
            && !path.starts_with("//")
            && !path.contains('\\')
            && path.bytes().all(|byte| byte.is_ascii_graphic())
    };
    next.filter(is_local).unwrap_or_else(|| "/".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_never_leads_to_another_site() {
        let check = |next: &str, expected: &str| {
            assert_eq!(local_path(Some(next.to_owned())), expected, "{next:?}");
        };
        check("/events?status=dead", "/events?status=dead");
        for foreign in [
            "//evil.example",
            "https://evil.example",
            "/\\evil.example",
            "javascript:x",
            "",
            "/a\r\nb",
            "/\tb",
        ] {
            check(foreign, "/");
        }
    }
}
