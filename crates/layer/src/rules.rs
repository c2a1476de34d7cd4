//! The configuration of the layer: which routes require a key, how callers are identified, and how long
//! keys last.

use std::fmt;
use std::time::Duration;

use hapax_core::json::{POINTERS_MAX, Pointer};
use hapax_core::ledger::Quota;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, Method, StatusCode};

use crate::principal::Principal;
use crate::target::{self, Path, changes_nothing};

/// How long an answer is stored by default: longer than any client keeps retrying.
pub const TTL_DEFAULT: Duration = Duration::from_secs(72 * 60 * 60);

/// How long the work may take by default: longer than most clients wait for an answer.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(60);

/// The default quota of each caller: far above what one account needs, far below a full disk.
pub const QUOTA_DEFAULT: Quota = Quota { keys: 1_000_000, bytes: 256 << 20 };

/// The largest body of a request with a key by default, in bytes.
pub const BODY_BYTES_DEFAULT: usize = 1 << 20;

/// The rules of one API. Every one has a default.
#[derive(Debug, Clone)]
pub struct IdempotencyRules {
    pub(crate) realm: String,
    pub(crate) required: Vec<RoutePattern>,
    /// How a request identifies its caller. `None`: by the Authorization header. All requests
    /// without that header are one caller.
    pub(crate) principal: Option<Principal>,
    pub(crate) ttl: Duration,
    pub(crate) lease: Duration,
    pub(crate) wait: Duration,
    pub(crate) mismatch_status: StatusCode,
    pub(crate) fingerprint_ignore: Vec<Pointer>,
    pub(crate) body_max: usize,
    pub(crate) quota: Option<Quota>,
}

impl Default for IdempotencyRules {
    fn default() -> Self {
        Self {
            realm: "default".to_owned(),
            required: Vec::new(),
            principal: None,
            ttl: TTL_DEFAULT,
            lease: LEASE_DEFAULT,
            wait: Duration::ZERO,
            mismatch_status: StatusCode::CONFLICT,
            fingerprint_ignore: Vec::new(),
            body_max: BODY_BYTES_DEFAULT,
            quota: Some(QUOTA_DEFAULT),
        }
    }
}

impl IdempotencyRules {
    /// The API that the keys belong to; "default" by default. Two APIs on one ledger need different names.
    /// Two routers that are nested under different paths need different names too, since each sees
    /// only its own part of the path.
    pub fn realm(self, realm: impl Into<String>) -> Self {
        Self { realm: realm.into(), ..self }
    }

    /// The routes that require a key. On other routes a key is honoured if the client sends one.
    pub fn required(self, routes: impl IntoIterator<Item = RoutePattern>) -> Self {
        Self { required: routes.into_iter().collect(), ..self }
    }

    /// How a request identifies its caller. By default the Authorization header identifies the caller,
    /// and all requests without that header are one caller. With any other choice, a request that does
    /// not identify its caller is refused.
    pub fn principal(self, principal: Principal) -> Self {
        Self { principal: Some(principal), ..self }
    }

    /// How long an answer is stored: 72 hours by default.
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// How long the work may take: 60 seconds by default. After that, a request whose outcome is unknown may
    /// run again.
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// How long a retry waits for the running request before it gets a 409: not at all by default.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// The status for a key that was used for another request: 409 by default.
    pub fn mismatch_status(self, mismatch_status: StatusCode) -> Self {
        Self { mismatch_status, ..self }
    }

    /// The values in a JSON body that may differ between retries of one request.
    ///
    /// # Panics
    /// With more than [`POINTERS_MAX`] pointers.
    pub fn fingerprint_ignore(self, fingerprint_ignore: Vec<Pointer>) -> Self {
        assert!(fingerprint_ignore.len() <= POINTERS_MAX, "at most {POINTERS_MAX} pointers");
        Self { fingerprint_ignore, ..self }
    }

    /// The largest body of a request with a key, in bytes: 1 MiB by default.
    pub fn body_max(self, body_max: usize) -> Self {
        Self { body_max, ..self }
    }

    /// How much each caller may have stored at once: a million keys and 256 MiB of answers by default. `None`
    /// is unlimited. A new key over the quota gets a 429.
    pub fn quota(self, quota: Option<Quota>) -> Self {
        Self { quota, ..self }
    }

    /// Whether a request requires a key, under any of the methods that the service may use.
    pub(crate) fn requires(&self, method: &Method, headers: &HeaderMap, path: &Path) -> bool {
        target::methods(method, headers)
            .any(|method| self.required.iter().any(|route| route.covers(&method, path)))
    }

    /// The header that identifies the caller. `None` if no header does.
    pub fn principal_header(&self) -> Option<HeaderName> {
        match &self.principal {
            None | Some(Principal::Jwt { .. } | Principal::UnverifiedJwt(_)) => Some(AUTHORIZATION),
            Some(Principal::Header(name)) => Some(name.clone()),
            Some(Principal::Custom(_) | Principal::Shared) => None,
        }
    }
}

/// A pattern for requests of one method: `POST /charges`, `POST /accounts/*/charges`, `POST /v1/*`. A `*` in
/// the middle matches one whole segment; a `*` at the end matches anything.
#[derive(Clone, PartialEq, Eq)]
pub struct RoutePattern {
    method: Method,
    /// The segments, decoded and in lower case, without a final `*`.
    segments: Vec<PatternSegment>,
    end: PatternEnd,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PatternSegment {
    Exactly(String),
    Any,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PatternEnd {
    Here,
    /// The last segment is a prefix, and more may follow.
    Open,
}

/// Why a text is not a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RoutePatternError {
    /// The text is not two words.
    #[error("a route is a method and a path, like \"POST /charges\"")]
    Shape,
    /// The first word is not an HTTP method in capitals.
    #[error("a route begins with a method in capitals, like \"POST\"")]
    Method,
    /// The method is safe or CONNECT. Such requests bypass the layer with or without a key.
    #[error("GET, HEAD, OPTIONS and TRACE never need a key")]
    Safe,
    /// The path does not begin with a slash.
    #[error("the path of a route begins with \"/\"")]
    NoSlash,
    /// The path has a query or a fragment.
    #[error("a route has no query or fragment")]
    Query,
    /// A segment contains a star and other characters, and the star does not end the path.
    #[error("a \"*\" in a route matches a whole segment, or at the end anything")]
    Star,
    /// No request could match the path.
    #[error(
        "the path of a route has no empty or dotted segments, \";\", \"\\\" or control characters"
    )]
    Path,
}

impl RoutePattern {
    /// Parses a route.
    pub fn parse(text: &str) -> Result<Self, RoutePatternError> {
        let (method, path) = text.trim().split_once(' ').ok_or(RoutePatternError::Shape)?;
        let path = path.trim_start();
        if path.contains(char::is_whitespace) {
            return Err(RoutePatternError::Shape);
        }
        if method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_uppercase()) {
            return Err(RoutePatternError::Method);
        }
        let method =
            Method::from_bytes(method.as_bytes()).map_err(|_| RoutePatternError::Method)?;
        if changes_nothing(&method) {
            return Err(RoutePatternError::Safe);
        }
        if !path.starts_with('/') {
            return Err(RoutePatternError::NoSlash);
        }
        if path.contains(['?', '#']) {
            return Err(RoutePatternError::Query);
        }
        if path.contains("//") {
            return Err(RoutePatternError::Path);
        }
        let (path, end) = match path.strip_suffix('*') {
            Some(rest) => (rest, PatternEnd::Open),
            None => (without_last_slash(path), PatternEnd::Here),
        };
        let segments = path.split('/').map(|segment| match segment {
            "*" => Ok(PatternSegment::Any),
            star if star.contains('*') => Err(RoutePatternError::Star),
            plain => exactly(plain).map(PatternSegment::Exactly),
        });
        Ok(Self { method, segments: segments.collect::<Result<_, _>>()?, end })
    }

    /// Whether a request matches. All spellings of a path are treated alike: `//charges`, `/CHARGES`,
    /// `/%63harges`, `/charges;a` and `/x/../charges` match where `/charges` does. A path that cannot be
    /// normalised (a NUL, invalid UTF-8) matches nothing.
    pub fn matches(&self, method: &Method, path: &str) -> bool {
        Path::of(path).is_ok_and(|path| self.covers(method, &path))
    }

    pub(crate) fn covers(&self, method: &Method, path: &Path) -> bool {
        self.method == method && path.readings().into_iter().any(|path| self.covers_path(path))
    }

    fn covers_path(&self, path: &str) -> bool {
        let path = match self.end {
            PatternEnd::Here => without_last_slash(path),
            PatternEnd::Open => path,
        };
        let path: Vec<_> = path.split('/').collect();
        let long_enough = match self.end {
            PatternEnd::Here => path.len() == self.segments.len(),
            PatternEnd::Open => path.len() >= self.segments.len(),
        };
        let last = self.segments.len() - 1;
        long_enough
            && self.segments.iter().zip(&path).enumerate().all(|(at, (wanted, found))| {
                match (wanted, self.end) {
                    (PatternSegment::Any, PatternEnd::Here | PatternEnd::Open) => true,
                    (PatternSegment::Exactly(text), PatternEnd::Open) if at == last => {
                        found.starts_with(text.as_str())
                    }
                    (PatternSegment::Exactly(text), PatternEnd::Here | PatternEnd::Open) => {
                        found == text
                    }
                }
            })
    }
}

/// A segment in normal form. A segment that normalising would change could never match and is refused.
fn exactly(segment: &str) -> Result<String, RoutePatternError> {
    let path = Path::of(&format!("/{segment}")).map_err(|_| RoutePatternError::Path)?;
    let text = &path.normal()[1..];
    let stays = text == &path.readings()[1][1..] && !text.contains('/');
    stays.then(|| text.to_owned()).ok_or(RoutePatternError::Path)
}

/// Most apps ignore a slash at the end.
fn without_last_slash(path: &str) -> &str {
    path.strip_suffix('/').filter(|shorter| !shorter.is_empty()).unwrap_or(path)
}

impl fmt::Debug for RoutePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.method)?;
        for (at, segment) in self.segments.iter().enumerate() {
            let slash = if at == 0 { "" } else { "/" };
            match segment {
                PatternSegment::Exactly(text) => write!(f, "{slash}{}", text.escape_default())?,
                PatternSegment::Any => write!(f, "{slash}*")?,
            }
        }
        match self.end {
            PatternEnd::Here => Ok(()),
            PatternEnd::Open => write!(f, "*"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(route: &str, path: &str, expected: bool) {
        let route = RoutePattern::parse(route).unwrap();
        assert_eq!(route.matches(&Method::POST, path), expected, "{route:?} and {path}");
        assert!(!route.matches(&Method::PUT, path), "{route:?} is for one method");
    }

    #[test]
    fn a_route_is_one_path_or_those_that_its_stars_stand_for() {
        check("POST /charges", "/charges", true);
        check("POST  /charges ", "/charges", true);
        check("POST /charges", "/charges/1", false);
        check("POST /charges", "/Charges", true);
        check("POST /Charges", "/charges", true);
        check("POST /accounts/*/charges", "/accounts/7/charges", true);
        check("POST /accounts/*/charges", "/accounts/charges", false);
        check("POST /accounts/*/charges", "/accounts/7/8/charges", false);
        check("POST /v1/*", "/v1/charges", true);
        check("POST /v1/*", "/v1/accounts/7/charges", true);
        check("POST /v1/*", "/v2/charges", false);
        check("POST /v1/*", "/v1", false);
        check("POST /charge*", "/charges/7", true);
        check("POST /*/charges*", "/v1/charges/7/refunds", true);
        check("POST /*", "/", true);
        check("POST /", "/", true);
        check("POST /", "/x", false);
    }

    // An attacker could spell a path in another way to avoid the required key.
    #[test]
    fn a_path_is_the_same_however_it_is_escaped() {
        check("POST /charges", "/%63harges", true);
        check("POST /charges", "/%63%68arges", true);
        check("POST /charges", "/charges/", true);
        check("POST /charges/", "/charges", true);
        check("POST /charges/", "/charges/", true);
        check("POST /charges", "/charges//", true);
        check("POST /a%20b", "/a%20b", true);
        check("POST /charges", "/%2563harges", true);
        check("POST /a/b", "/a%2Fb", true);
        check("POST /charges", "//charges", true);
        check("POST /charges", "/..;/charges;a", true);
        check("POST /v1/*", "/v1/", true);
        check("POST /v1/*", "/x/..;/V1//charges", true);
        // Paths are also matched without resolving dots, because some servers do not resolve them.
        check("POST /accounts/*/charges", "/accounts/../charges", true);
        check("POST /accounts/*/charges", "/accounts//charges", true);
        check("POST /accounts/*/charges", "/accounts/;x/charges", true);
        check("POST /charges", "/charges%00", false);
        check("POST /100%", "/100%", true);
    }

    #[test]
    fn each_bad_route_has_its_error() {
        let error = |text| RoutePattern::parse(text).unwrap_err();
        assert_eq!(error("/charges"), RoutePatternError::Shape);
        assert_eq!(error("POST /a b"), RoutePatternError::Shape);
        assert_eq!(error("post /charges"), RoutePatternError::Method);
        assert_eq!(error("GET /charges"), RoutePatternError::Safe);
        assert_eq!(error("POST charges"), RoutePatternError::NoSlash);
        assert_eq!(error("POST /charges?dry=1"), RoutePatternError::Query);
        assert_eq!(error("POST /char*ges"), RoutePatternError::Star);
        assert_eq!(error("POST /a*/b"), RoutePatternError::Star);
        for never in
            ["POST /a/../b", "POST /a;b", "POST /a%2fb", "POST /a\\b", "POST /a%00", "POST //a"]
        {
            assert_eq!(error(never), RoutePatternError::Path, "{never}");
        }
    }
}
