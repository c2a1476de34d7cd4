//! The style sheet, the script and the icon. Their paths contain a hash of their content, so browsers may
//! keep them for a year.

use std::sync::LazyLock;

use aws_lc_rs::digest;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

use super::super::extract::PathId;
use super::super::problem::Problem;

/// A file that pages load.
struct Asset {
    /// Where pages find it.
    path: String,
    media_type: &'static str,
    bytes: &'static [u8],
}

impl Asset {
    fn new(name: &str, media_type: &'static str, bytes: &'static [u8]) -> Self {
        let hash = hex::encode(&digest::digest(&digest::SHA256, bytes).as_ref()[..8]);
        Self { path: format!("/assets/{hash}-{name}"), media_type, bytes }
    }
}

/// Where pages find the style sheet.
pub(crate) fn style() -> &'static str {
    &STYLE.path
}

/// Where pages find the script.
pub(crate) fn script() -> &'static str {
    &SCRIPT.path
}

/// Where pages find the icon.
pub(crate) fn icon() -> &'static str {
    &ICON.path
}

/// The style sheet.
static STYLE: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("style.css", "text/css; charset=utf-8", include_bytes!("../../../assets/style.css"))
});

/// The script, an ES module.
static SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    let bytes = include_bytes!("../../../assets/pages.js");
    Asset::new("pages.js", "text/javascript; charset=utf-8", bytes)
});

/// The icon of the tab.
static ICON: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("icon.svg", "image/svg+xml", include_bytes!("../../../assets/icon.svg"))
});

/// A file, as a response.
pub(in crate::admin) struct File(&'static Asset);

impl IntoResponse for File {
    fn into_response(self) -> Response {
        let mut response = self.0.bytes.into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.0.media_type));
        let a_year = HeaderValue::from_static("public, max-age=31536000, immutable");
        headers.insert(header::CACHE_CONTROL, a_year);
        response
    }
}

/// `GET /assets/{name}`.
pub(in crate::admin) async fn file(PathId(name): PathId) -> Result<File, Problem> {
    let known = [&*STYLE, &*SCRIPT, &*ICON];
    let found = known.into_iter().find(|asset| asset.path.strip_prefix("/assets/") == Some(&name));
    found.map(File).ok_or_else(|| Problem::not_found("there is no such file"))
}
