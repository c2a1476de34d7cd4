//! How browsers reach the admin side or the portal: directly, or through a reverse proxy at another URL.

use axum::http::Uri;
use url::Url;

/// The URL of a side as browsers see it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Site {
    /// Scheme, host and port, as browsers name them in the header `Origin`.
    origin: Option<String>,
    /// The path in front of every page: empty, or such as `/hapax`.
    base: String,
    /// Whether browsers use TLS.
    is_secure: bool,
}

impl Site {
    /// The site at `url`. `has_tls` says whether the listener itself speaks TLS.
    pub(crate) fn new(url: Option<&str>, has_tls: bool) -> Self {
        let Some(url) = url.and_then(|url| Url::parse(url).ok()) else {
            return Self { is_secure: has_tls, ..Self::default() };
        };
        Self {
            origin: Some(url.origin().ascii_serialization()),
            base: url.path().trim_end_matches('/').to_owned(),
            is_secure: has_tls || url.scheme() == "https",
        }
    }

    /// Scheme, host and port, if they are configured.
    pub(super) fn origin(&self) -> Option<&str> {
        self.origin.as_deref()
    }

    /// The path in front of every page.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// The attributes of a cookie that only this site gets.
    pub(super) fn cookie_attributes(&self) -> String {
        self.cookie_attributes_below("")
    }

    /// The attributes of a cookie that only the pages below a path of this site get.
    pub(super) fn cookie_attributes_below(&self, path: &str) -> String {
        let below = format!("{}{path}", self.base);
        let path = if below.is_empty() { "/" } else { &below };
        let secure = if self.is_secure { "; Secure" } else { "" };
        format!("Path={path}; HttpOnly; SameSite=Lax{secure}")
    }

    /// The URI without the path of the site: a reverse proxy may leave it in the request or remove it.
    pub(crate) fn without_base(&self, uri: &Uri) -> Option<Uri> {
        let rest = uri.path().strip_prefix(self.base.as_str()).filter(|_| !self.base.is_empty())?;
        let path = match rest {
            "" => "/",
            rest if rest.starts_with('/') => rest,
            _ => return None,
        };
        let path_and_query = match uri.query() {
            Some(query) => format!("{path}?{query}"),
            None => path.to_owned(),
        };
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(path_and_query.parse().ok()?);
        Uri::from_parts(parts).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_understood_with_and_without_the_path_of_the_site() {
        let check = |asked: &str, expected: Option<&str>| {
            let site = Site::new(Some("https://ops.example.com/hapax/"), false);
            let found = site.without_base(&asked.parse().unwrap());
            assert_eq!(found.map(|uri| uri.to_string()).as_deref(), expected, "{asked}");
        };
        check("/hapax/events?status=dead", Some("/events?status=dead"));
        check("/hapax", Some("/"));
        check("/hapax/", Some("/"));
        check("/events", None);
        check("/hapaxes", None);
        let plain = Site::new(None, false);
        assert_eq!(plain.without_base(&"/events".parse().unwrap()), None);
    }

    #[test]
    fn a_cookie_is_secure_where_browsers_use_tls_and_stays_below_the_path_of_the_site() {
        let check = |url: Option<&str>, has_tls: bool, expected: &str| {
            assert_eq!(Site::new(url, has_tls).cookie_attributes(), expected, "{url:?}");
        };
        check(None, false, "Path=/; HttpOnly; SameSite=Lax");
        check(None, true, "Path=/; HttpOnly; SameSite=Lax; Secure");
        let url = "https://OPS.example.com:443/hapax";
        check(Some(url), false, "Path=/hapax; HttpOnly; SameSite=Lax; Secure");
        check(Some("http://10.0.0.1"), true, "Path=/; HttpOnly; SameSite=Lax; Secure");
        check(Some("http://10.0.0.1"), false, "Path=/; HttpOnly; SameSite=Lax");
        assert_eq!(Site::new(Some(url), false).origin(), Some("https://ops.example.com"));
    }
}
