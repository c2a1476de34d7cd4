//! The app behind a proxy, and how the target of a request is appended to its URL. A client chooses
//! the path below the upstream's own path, and cannot leave it.

use std::fmt;

use hapax_layer::has_dot_segments;
use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};

/// An app behind a proxy: `http://127.0.0.1:3000`, or with a path that is put before the path of
/// every request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    scheme: Scheme,
    authority: Authority,
    /// Without a slash at its end; empty if the URL has no path.
    prefix: Box<str>,
}

/// Why a text is not the URL of an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamError {
    /// The text cannot be parsed.
    #[error("is not a URL")]
    NotAUrl,
    /// Only `http` and `https` are supported.
    #[error("must begin with http:// or https://")]
    Scheme,
    /// The URL names no host to connect to.
    #[error("names no host")]
    NoHost,
    /// URLs are logged, so they must not contain credentials.
    #[error("must not contain a user name: URLs are logged")]
    UserName,
    /// Every request has its own query.
    #[error("must have neither query nor fragment")]
    Query,
    /// The path contains `.` or `..`, in any spelling.
    #[error("must not have dots for a part of its path")]
    Dots,
}

/// A target that cannot be appended to the upstream's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UnjoinableTarget;

impl Upstream {
    /// Parses the URL of an upstream from a config.
    pub fn parse(text: &str) -> Result<Self, UpstreamError> {
        if text.contains('#') {
            return Err(UpstreamError::Query);
        }
        let parts = text.parse::<Uri>().map_err(|_| UpstreamError::NotAUrl)?.into_parts();
        let scheme = match parts.scheme {
            Some(scheme) if scheme == Scheme::HTTP || scheme == Scheme::HTTPS => scheme,
            Some(_) | None => return Err(UpstreamError::Scheme),
        };
        let authority = parts.authority.filter(|authority| !authority.host().is_empty());
        let authority = authority.ok_or(UpstreamError::NoHost)?;
        if authority.as_str().contains('@') {
            return Err(UpstreamError::UserName);
        }
        let path = parts.path_and_query.ok_or(UpstreamError::NotAUrl)?;
        if path.query().is_some() {
            return Err(UpstreamError::Query);
        }
        if has_dot_segments(path.path()) {
            return Err(UpstreamError::Dots);
        }
        Ok(Self { scheme, authority, prefix: path.path().trim_end_matches('/').into() })
    }

    /// The name or address to connect to; an IPv6 address is in brackets.
    pub fn host(&self) -> &str {
        self.authority.host()
    }

    /// The port to connect to.
    pub fn port(&self) -> u16 {
        let by_scheme = if self.scheme == Scheme::HTTPS { 443 } else { 80 };
        self.authority.port_u16().unwrap_or(by_scheme)
    }

    /// The URL for a request with this `target`: its path and query unchanged, after the upstream's
    /// own path.
    pub(super) fn url(&self, target: &Uri) -> Result<Uri, UnjoinableTarget> {
        let asked = target.path_and_query().filter(|asked| asked.path().starts_with('/'));
        let asked = asked.ok_or(UnjoinableTarget)?;
        let path = match &*self.prefix {
            "" => asked.clone(),
            // Servers resolve dots after the two paths are joined, and would end above the prefix.
            _below if has_dot_segments(asked.path()) => return Err(UnjoinableTarget),
            prefix => {
                PathAndQuery::try_from(format!("{prefix}{asked}")).map_err(|_| UnjoinableTarget)?
            }
        };
        let url = Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone());
        url.path_and_query(path).build().map_err(|_| UnjoinableTarget)
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(upstream: &str, target: &str, expected: Result<&str, UnjoinableTarget>) {
        let upstream = Upstream::parse(upstream).unwrap();
        let url = upstream.url(&target.parse().unwrap()).map(|url| url.to_string());
        assert_eq!(url, expected.map(str::to_owned), "{target}");
    }

    #[test]
    fn path_and_query_are_forwarded_unchanged_after_the_path_of_the_upstream() {
        check("http://app:3000", "/a%2Fb//c?x=1&y=%20", Ok("http://app:3000/a%2Fb//c?x=1&y=%20"));
        check("http://app:3000/", "/", Ok("http://app:3000/"));
        check("https://app/v1/", "/charges?a=1", Ok("https://app/v1/charges?a=1"));
        // A client that uses the server as a forward proxy can name any host.
        check("http://app:3000", "http://evil.example/a?b", Ok("http://app:3000/a?b"));
        check("http://app:3000", "/a/../b", Ok("http://app:3000/a/../b"));
    }

    #[test]
    fn no_client_gets_above_the_path_of_the_upstream() {
        for target in [
            "/../admin",
            "/a/../../admin",
            "/..",
            "/%2e%2e/admin",
            "/.%2E/admin",
            "/a/..%2fadmin",
            "/..%5cadmin",
            "/..\\admin",
            "/./..",
            "/..;/admin",
            "/..;a=b/admin",
            "/%252e%252e/admin",
            "/..%252fadmin",
            "/..%3b/admin",
        ] {
            check("http://app/v1", target, Err(UnjoinableTarget));
        }
        check("http://app/v1", "/a..b/...", Ok("http://app/v1/a..b/..."));
        check("http://app", "*", Err(UnjoinableTarget));
    }

    #[test]
    fn a_text_that_is_no_upstream_is_refused() {
        let check =
            |text: &str, expected| assert_eq!(Upstream::parse(text), Err(expected), "{text}");
        check("127.0.0.1:3000", UpstreamError::Scheme);
        check("app", UpstreamError::Scheme);
        check("ftp://app", UpstreamError::Scheme);
        check("http://", UpstreamError::NotAUrl);
        check("http://:80", UpstreamError::NoHost);
        check("http://u:p@app", UpstreamError::UserName);
        check("http://app/?a=1", UpstreamError::Query);
        check("http://app/#a", UpstreamError::Query);
        check("http://app/a/../b", UpstreamError::Dots);
    }
}
