//! `[proxies.NAME]`: Idempotency-Keys in front of an app.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::hop_headers::{dashed, is_ours};
use hapax_core::json::{POINTERS_MAX, Pointer};
use hapax_core::jwt::{JwtKeys, JwtKeysError};
use hapax_core::ledger::{IDEMPOTENCY_KEY, Quota};
use hapax_engine::Upstream;
use hapax_layer::RoutePattern;
use hapax_layer::rules::{LEASE_DEFAULT, QUOTA_DEFAULT, TTL_DEFAULT};
use http::{HeaderName, StatusCode};

use super::document::{Entry, Section};
use super::problem::InvalidSetting;
use super::reader::ConfigReader;
use super::settings::Settings;
use super::units;

/// One proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Proxy {
    /// The name; each proxy has its own keys.
    pub(crate) name: String,
    /// The address for clients.
    pub(crate) listen: SocketAddr,
    /// The app to which requests are forwarded.
    pub(crate) upstream: Upstream,
    /// Routes that need a key.
    pub(crate) require_key: Vec<RoutePattern>,
    /// How the caller that owns a key is identified.
    pub(crate) scope: CallerIdentity,
    /// How long an answer is kept.
    pub(crate) ttl: Duration,
    /// How long the app may take, and how long a key stays in progress after a crash.
    pub(crate) lease: Duration,
    /// How long a copy waits for the running request.
    pub(crate) wait: Duration,
    /// The status for a key that was used with another request.
    pub(crate) mismatch_status: StatusCode,
    /// Parts of the body that change with every retry.
    pub(crate) fingerprint_ignore: Vec<Pointer>,
    /// How much may be stored per caller.
    pub(crate) quota: Quota,
}

/// How the caller that owns a key is identified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallerIdentity {
    /// The scope is not configured: callers are distinguished by the Authorization header, and
    /// requests without one share their keys.
    Default,
    /// By the value of a header, which is required.
    Header(HeaderName),
    /// By a claim of the JWT in Authorization, verified with these keys.
    Jwt(String, Arc<JwtKeys>),
    /// By a claim of the JWT in Authorization, which is not verified.
    UnverifiedJwt(String),
    /// All callers share their keys.
    Shared,
}

pub(super) const KEYS: [&str; 13] = [
    "listen",
    "upstream",
    "require_key",
    "scope",
    "jwks",
    "jwt_key",
    "max_keys",
    "max_bytes",
    "ttl",
    "lease",
    "wait",
    "mismatch_status",
    "fingerprint_ignore",
];

/// With a shorter lease, a pause of the machine would let a second request run alongside the first.
const LEASE_MIN: Duration = Duration::from_secs(1);
/// After a crash a key stays in progress for the whole lease; no client waits longer than a day.
const LEASE_MAX: Duration = Duration::from_secs(86_400);
const TTL_MIN: Duration = Duration::from_secs(1);
/// Ten years: a longer time to live would let the database grow without bound.
const TTL_MAX: Duration = Duration::from_secs(10 * 366 * 86_400);
/// Every request with a key is compared with each route.
const ROUTES_MAX: usize = 1_000;

impl ConfigReader<'_> {
    /// Reads every proxy.
    pub(super) fn proxies(&mut self, root: &Section<'_>, settings: &Settings) -> Vec<Proxy> {
        let Some(section) = root.get("proxies").and_then(|entry| entry.section(&mut self.problems))
        else {
            return Vec::new();
        };
        let mut taken = vec![
            ("listen".to_owned(), settings.listen),
            ("admin_listen".into(), settings.admin_listen),
        ];
        let mut proxies = Vec::new();
        for entry in section.entries() {
            if let Err(InvalidSetting { problem, .. }) = units::name(entry.name()) {
                let hint = "use 1 to 64 letters, digits, \"_\", \".\" or \"-\"";
                entry.report(InvalidSetting::new(problem, hint), &mut self.problems);
                continue;
            }
            let Some(section) = entry.section(&mut self.problems) else { continue };
            proxies.extend(self.proxy(entry.name(), &section, &mut taken));
        }
        proxies
    }

    fn proxy(
        &mut self,
        name: &str,
        section: &Section<'_>,
        taken: &mut Vec<(String, SocketAddr)>,
    ) -> Option<Proxy> {
        section.expect(&KEYS, &mut self.problems);
        let listen = self.listen_of_proxy(section, taken);
        let upstream = self.upstream(section, listen);
        let require_key = self.require_key(section);
        let keys = self.jwt_keys(section);
        let scope = match section.get("scope") {
            Some(entry) => self.scope_of_proxy(&entry, keys),
            None => {
                if let Some(unused) = section.get("jwks").or(section.get("jwt_key")) {
                    unused.report(verifies_nothing(), &mut self.problems);
                }
                self.warnings.push(format!(
                    "proxies.{name}: no `scope`, so keys belong to the Authorization header: a retry with \
                     another token runs again, and requests without the header share their keys. Set \
                     `scope` to what identifies the caller, such as \"jwt:sub\", or to \
                     \"header:authorization\" if tokens never change"
                ));
                Some(CallerIdentity::Default)
            }
        };
        let (ttl, lease, wait) = self.spans(section);
        let mismatch_status = match section.get("mismatch_status") {
            Some(entry) => entry.parse_number(mismatch_status, &mut self.problems),
            None => Some(StatusCode::CONFLICT),
        };
        let fingerprint_ignore = self.fingerprint_ignore(section);
        let quota = self.quota(section);
        Some(Proxy {
            name: name.to_owned(),
            listen: listen?,
            upstream: upstream?,
            require_key: require_key?,
            scope: scope?,
            ttl,
            lease,
            wait,
            mismatch_status: mismatch_status?,
            fingerprint_ignore: fingerprint_ignore?,
            quota: quota?,
        })
    }

    /// Reads the scope, with the JWT keys that it needs.
    fn scope_of_proxy(
        &mut self,
        entry: &Entry<'_>,
        keys: Option<JwtKeyEntry<'_>>,
    ) -> Option<CallerIdentity> {
        let said = entry.parse(scope, &mut self.problems)?;
        match (said, keys) {
            (ScopeSetting::Jwt(claim), Some((_, keys))) => Some(CallerIdentity::Jwt(claim, keys?)),
            (ScopeSetting::Jwt(claim), None) => {
                let invalid = InvalidSetting::new(
                    "the token is not verified, so anyone could act as any caller",
                    format!(
                        "add jwks = \"file:/etc/hapax/jwks.json\" or jwt_key = \"env:JWT_KEY\"; behind \
                         a gateway that verifies tokens write scope = \"jwt-unverified:{claim}\""
                    ),
                );
                entry.report(invalid, &mut self.problems);
                None
            }
            (ScopeSetting::Other(_), Some((unused, _))) => {
                unused.report(verifies_nothing(), &mut self.problems);
                None
            }
            (ScopeSetting::Other(scope), None) => Some(scope),
        }
    }

    /// Reads `jwks` or `jwt_key`; the keys are `None` if they cannot be read.
    fn jwt_keys<'d>(&mut self, section: &Section<'d>) -> Option<JwtKeyEntry<'d>> {
        type Read = fn(&str) -> Result<JwtKeys, JwtKeysError>;
        let (entry, read, hint): (_, Read, _) = match (section.get("jwks"), section.get("jwt_key"))
        {
            (None, None) => return None,
            (Some(_), Some(entry)) => {
                let hint = "put all keys into one set and remove this: jwks = \"file:/etc/hapax/jwks.json\"";
                entry.report(
                    InvalidSetting::new("cannot be combined with jwks", hint),
                    &mut self.problems,
                );
                return Some((entry, None));
            }
            (Some(entry), None) => {
                let hint = "write {\"keys\":[…]} as your issuer publishes it, or \"file:/etc/hapax/jwks.json\"";
                (entry, JwtKeys::from_jwks, hint)
            }
            (None, Some(entry)) => {
                let hint = "write a public key in PEM, or a shared secret of at least 32 bytes: \
                            \"file:/etc/hapax/jwt.pem\", \"env:JWT_KEY\"";
                (entry, JwtKeys::from_key, hint)
            }
        };
        let keys = self.secret(&entry).and_then(|secret| match read(secret.expose()) {
            Ok(keys) => Some(Arc::new(keys)),
            Err(error) => {
                entry.report(InvalidSetting::new(error.to_string(), hint), &mut self.problems);
                None
            }
        });
        Some((entry, keys))
    }

    fn listen_of_proxy(
        &mut self,
        section: &Section<'_>,
        taken: &mut Vec<(String, SocketAddr)>,
    ) -> Option<SocketAddr> {
        let Some(entry) = section.get("listen") else {
            let hint = "add the address for clients: listen = \"127.0.0.1:8090\"";
            section.report(InvalidSetting::new("has no listen", hint), &mut self.problems);
            return None;
        };
        let listen = entry.parse(units::address, &mut self.problems)?;
        if let Some((key, _)) = taken.iter().find(|(_, other)| overlap(*other, listen)) {
            let invalid = InvalidSetting::new(
                format!("{listen} is used by `{key}` already"),
                "give each listener its own port; port 0 picks a free one",
            );
            entry.report(invalid, &mut self.problems);
        }
        taken.push((entry.path().to_owned(), listen));
        Some(listen)
    }

    fn upstream(&mut self, section: &Section<'_>, listen: Option<SocketAddr>) -> Option<Upstream> {
        let Some(entry) = section.get("upstream") else {
            let hint = "add the URL of your app: upstream = \"http://127.0.0.1:3000\"";
            section.report(InvalidSetting::new("has no upstream", hint), &mut self.problems);
            return None;
        };
        let upstream = entry.parse(upstream, &mut self.problems)?;
        let at = upstream.host().trim_matches(['[', ']']).parse::<IpAddr>().ok();
        if let (Some(at), Some(listen)) = (at, listen)
            && SocketAddr::new(at, upstream.port()) == listen
        {
            let hint =
                "write the URL of the app behind the proxy, such as \"http://127.0.0.1:3000\"";
            entry.report(
                InvalidSetting::new("is the address of this proxy", hint),
                &mut self.problems,
            );
        }
        Some(upstream)
    }

    fn require_key(&mut self, section: &Section<'_>) -> Option<Vec<RoutePattern>> {
        let Some(entry) = section.get("require_key") else { return Some(Vec::new()) };
        let routes = entry.list(&mut self.problems)?;
        if routes.len() > ROUTES_MAX {
            let invalid = InvalidSetting::new(
                format!("{} routes are more than {ROUTES_MAX}", routes.len()),
                "use `*` for a segment of the path: \"POST /charges/*\"",
            );
            entry.report(invalid, &mut self.problems);
            return None;
        }
        self.each(&routes, route)
    }

    fn fingerprint_ignore(&mut self, section: &Section<'_>) -> Option<Vec<Pointer>> {
        let Some(entry) = section.get("fingerprint_ignore") else { return Some(Vec::new()) };
        let pointers = entry.list(&mut self.problems)?;
        if pointers.len() > POINTERS_MAX {
            let invalid = InvalidSetting::new(
                format!("{} pointers are more than {POINTERS_MAX}", pointers.len()),
                "point at objects that contain several of them",
            );
            entry.report(invalid, &mut self.problems);
            return None;
        }
        self.each(&pointers, pointer)
    }

    /// `max_keys` and `max_bytes`.
    fn quota(&mut self, section: &Section<'_>) -> Option<Quota> {
        let keys = match section.get("max_keys") {
            Some(entry) => entry.parse_number(max_keys, &mut self.problems)?,
            None => QUOTA_DEFAULT.keys,
        };
        let bytes = match section.get("max_bytes") {
            Some(entry) => entry.parse(units::size, &mut self.problems)? as u64,
            None => QUOTA_DEFAULT.bytes,
        };
        Some(Quota { keys, bytes })
    }

    fn each<T>(
        &mut self,
        entries: &[Entry<'_>],
        read: impl Fn(&str) -> Result<T, InvalidSetting>,
    ) -> Option<Vec<T>> {
        let read = |entry: &Entry<'_>| entry.parse(&read, &mut self.problems);
        let all: Vec<T> = entries.iter().filter_map(read).collect();
        (all.len() == entries.len()).then_some(all)
    }

    /// Reads `ttl`, `lease` and `wait`, which depend on each other.
    fn spans(&mut self, section: &Section<'_>) -> (Duration, Duration, Duration) {
        let mut span = |key: &str, default: Duration| match section.get(key) {
            Some(entry) => {
                (entry.parse(units::duration, &mut self.problems).unwrap_or(default), Some(entry))
            }
            None => (default, None),
        };
        let (ttl, ttl_entry) = span("ttl", TTL_DEFAULT);
        let (lease, lease_entry) = span("lease", LEASE_DEFAULT);
        let (wait, wait_entry) = span("wait", Duration::ZERO);
        let mut judge = |entry: &Option<Entry<'_>>, is_wrong: bool, problem: &str, hint: &str| {
            if let (Some(entry), true) = (entry, is_wrong) {
                entry.report(InvalidSetting::new(problem, hint), &mut self.problems);
            }
        };
        judge(
            &lease_entry,
            !(LEASE_MIN..=LEASE_MAX).contains(&lease),
            "is not between 1s and 1d",
            "write how long the slowest request of your app may take, such as \"60s\"",
        );
        judge(
            &ttl_entry,
            !(TTL_MIN..=TTL_MAX).contains(&ttl),
            "is not between 1s and 10 years",
            "write more than the time for which clients retry, such as \"72h\"",
        );
        judge(
            // The problem is reported at the entry that is set.
            if ttl_entry.is_some() { &ttl_entry } else { &lease_entry },
            ttl < lease,
            "the ttl is shorter than the lease",
            "lengthen `ttl` or shorten `lease`: a key must not expire while its request may still run",
        );
        judge(
            if wait_entry.is_some() { &wait_entry } else { &lease_entry },
            wait >= lease,
            "the wait is not shorter than the lease",
            "shorten `wait`: a waiting copy must be answered before the lease of the running request ends",
        );
        (ttl, lease, wait)
    }
}

/// The entry of JWT keys, and the keys.
type JwtKeyEntry<'d> = (Entry<'d>, Option<Arc<JwtKeys>>);

/// The value of `scope`, before its JWT keys are known.
#[derive(Debug, PartialEq, Eq)]
enum ScopeSetting {
    Jwt(String),
    Other(CallerIdentity),
}

fn verifies_nothing() -> InvalidSetting {
    InvalidSetting::new(
        "has no effect: the scope is not a JWT claim",
        "set scope = \"jwt:sub\", or remove this",
    )
}

/// Whether two listeners would use the same port of the same address; an unspecified address
/// includes every other one.
pub(super) fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let anywhere = |address: SocketAddr| address.ip().is_unspecified();
    let (here, there) = (one.ip().to_canonical(), other.ip().to_canonical());
    one.port() != 0
        && one.port() == other.port()
        && (here == there || anywhere(one) || anywhere(other))
}

fn upstream(text: &str) -> Result<Upstream, InvalidSetting> {
    Upstream::parse(text).map_err(|error| {
        InvalidSetting::new(
            error.to_string(),
            "write the URL of your app: \"http://127.0.0.1:3000\"",
        )
    })
}

fn scope(text: &str) -> Result<ScopeSetting, InvalidSetting> {
    let hint = "write \"header:x-account-id\", \"jwt:sub\" or \"none\"";
    match text.split_once(':') {
        None if text == "none" => Ok(ScopeSetting::Other(CallerIdentity::Shared)),
        Some(("jwt", claim)) if !claim.trim().is_empty() => {
            Ok(ScopeSetting::Jwt(claim.trim().to_owned()))
        }
        Some(("jwt-unverified", claim)) if !claim.trim().is_empty() => {
            Ok(ScopeSetting::Other(CallerIdentity::UnverifiedJwt(claim.trim().to_owned())))
        }
        Some(("header", name)) => {
            let name = HeaderName::try_from(name.trim())
                .map_err(|_| InvalidSetting::new("is not the name of a header", hint))?;
            if dashed(&name) == IDEMPOTENCY_KEY.as_str() || is_ours(&name) {
                return Err(InvalidSetting::new(
                    format!("\"{name}\" does not identify the caller"),
                    "write the header that does, such as \"header:x-account-id\"",
                ));
            }
            Ok(ScopeSetting::Other(CallerIdentity::Header(name)))
        }
        Some(_) | None => Err(InvalidSetting::new(format!("\"{text}\" is not a scope"), hint)),
    }
}

fn route(text: &str) -> Result<RoutePattern, InvalidSetting> {
    RoutePattern::parse(text).map_err(|error| {
        InvalidSetting::new(
            format!("\"{text}\": {error}"),
            "write a method and a path: \"POST /charges\", \"POST /accounts/*/charges\"",
        )
    })
}

fn max_keys(text: &str) -> Result<u64, InvalidSetting> {
    text.parse().ok().filter(|keys| (1..=1_000_000_000_000).contains(keys)).ok_or_else(|| {
        InvalidSetting::new(
            format!("{text} is not a number of keys"),
            "write how many keys of one caller may be stored, such as 1000000",
        )
    })
}

fn mismatch_status(text: &str) -> Result<StatusCode, InvalidSetting> {
    match text {
        "409" => Ok(StatusCode::CONFLICT),
        "422" => Ok(StatusCode::UNPROCESSABLE_ENTITY),
        other => Err(InvalidSetting::new(
            format!("{other} is not a status for a reused key"),
            "write 409, or 422 as in the IETF draft",
        )),
    }
}

fn pointer(text: &str) -> Result<Pointer, InvalidSetting> {
    let hint = "write a JSON pointer to a value that changes with every retry: \"/client_ts\"";
    match Pointer::parse(text) {
        Ok(_) if text.is_empty() => {
            Err(InvalidSetting::new("is the whole body, so that all requests would be equal", hint))
        }
        Ok(pointer) => Ok(pointer),
        Err(error) => Err(InvalidSetting::new(format!("\"{text}\": {error}"), hint)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_clash_if_the_system_would_refuse_the_second() {
        let check = |one: &str, other: &str, expected: bool| {
            let (one, other) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(
                (overlap(one, other), overlap(other, one)),
                (expected, expected),
                "{one} {other}"
            );
        };
        check("127.0.0.1:80", "127.0.0.1:80", true);
        check("127.0.0.1:80", "127.0.0.1:81", false);
        check("127.0.0.1:80", "127.0.0.2:80", false);
        check("0.0.0.0:80", "127.0.0.1:80", true);
        check("[::]:80", "127.0.0.1:80", true);
        check("[::ffff:127.0.0.1]:80", "127.0.0.1:80", true);
        check("127.0.0.1:0", "127.0.0.1:0", false);
    }

    #[test]
    fn a_scope_identifies_the_caller() {
        assert_eq!(scope("none"), Ok(ScopeSetting::Other(CallerIdentity::Shared)));
        assert_eq!(scope("jwt:sub"), Ok(ScopeSetting::Jwt("sub".into())));
        let unverified = CallerIdentity::UnverifiedJwt("sub".into());
        assert_eq!(scope("jwt-unverified:sub"), Ok(ScopeSetting::Other(unverified)));
        let named = HeaderName::from_static("x-account-id");
        assert_eq!(
            scope("header:X-Account-Id"),
            Ok(ScopeSetting::Other(CallerIdentity::Header(named)))
        );
        for bad in [
            "",
            "sub",
            "jwt:",
            "jwt",
            "jwt-unverified:",
            "header:hapax_scope",
            "header:idempotency_key",
            "header:",
            "header:a b",
            "header:Idempotency-Key",
            "header:hapax-scope",
        ] {
            assert!(scope(bad).is_err(), "{bad:?}");
        }
    }
}
