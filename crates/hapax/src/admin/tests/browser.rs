//! Requests as a browser sends them to the dashboard and to the portal, and the answers.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header, request};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;

/// The header with which a browser says that a page of the same server sent the request.
pub(super) const SAME_ORIGIN: (&str, &str) = ("sec-fetch-site", "same-origin");

/// An answer to a browser.
pub(super) struct Answered {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) text: String,
}

impl Answered {
    pub(super) fn header(&self, name: header::HeaderName) -> &str {
        self.headers.get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }
}

/// Sends a request as a browser does, with these further headers.
pub(super) async fn answered(
    router: &Router,
    request: request::Builder,
    more: &[(&str, &str)],
    form: &str,
) -> Answered {
    let mut request = request.header("accept", "text/html");
    for (name, value) in more {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::from(form.to_owned())).unwrap();
    let response = router.clone().oneshot(request).await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    Answered { status, headers, text: String::from_utf8(body.to_vec()).unwrap() }
}
