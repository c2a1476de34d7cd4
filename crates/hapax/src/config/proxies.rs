//! `[proxies.NAME]`: Idempotency-Key in front of an app. What is wrong with a route, an upstream or a
//! span is a config error with its line, and not the first request's.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::hop_headers::{dashed, is_ours};
use hapax_core::json::{POINTERS_MAX, Pointer};
use hapax_core::jwt::{JwtKeys, JwtKeysError};
use hapax_core::ledger::{IDEMPOTENCY_KEY, Quota};
use hapax_engine::Upstream;
use hapax_layer::Route;
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
    /// Keys of one proxy are never those of another.
    pub(crate) name: String,
    /// Where clients come.
    pub(crate) listen: SocketAddr,
    /// Where they are sent on to.
    pub(crate) upstream: Upstream,
    /// Routes that need a key.
    pub(crate) require_key: Vec<Route>,
    /// Whose a key is.
    pub(crate) scope: Scope,
    /// How long an answer is kept.
    pub(crate) ttl: Duration,
    /// How long the app may take, and how long a crash keeps a key.
    pub(crate) lease: Duration,
    /// How long a copy waits for the one that runs.
    pub(crate) wait: Duration,
    /// What a key that was used for another request is answered.
    pub(crate) mismatch_status: StatusCode,
    /// What a client makes anew with every try.
    pub(crate) fingerprint_ignore: Vec<Pointer>,
    /// How much each caller may have kept at once.
    pub(crate) quota: Quota,
}

/// Whose a key is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Nothing was said: the Authorization header, and nobody's where there is none.
    Default,
    /// The value of a header, without which there is no key.
    Header(HeaderName),
    /// A claim of the JWT in Authorization, which these keys verify.
    Jwt(String, Arc<JwtKeys>),
    /// The same, whoever signed it.
    UnverifiedJwt(String),
    /// Everybody's.
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

/// Below it a pause of the machine would let a second one run beside the first.
const LEASE_MIN: Duration = Duration::from_secs(1);
/// A crash keeps a key this long: nobody waits longer than a day for an answer.
const LEASE_MAX: Duration = Duration::from_secs(86_400);
const TTL_MIN: Duration = Duration::from_secs(1);
/// Ten years; beyond it "for ever" was meant, and a database that only grows.
const TTL_MAX: Duration = Duration::from_secs(10 * 366 * 86_400);
/// Each is looked at for every request with a key.
const ROUTES_MAX: usize = 1_000;

impl ConfigReader<'_> {
    /// Reads every proxy, by name.
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
        section.expect(&KEYS, &[], &mut self.problems);
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
                    "proxies.{name}: no `scope`, so a key belongs to the Authorization header it came \
                     with, a retry with another token runs again, and whoever sends none shares keys \
                     with all others: name what stays the same, such as \"jwt:sub\", or \
                     \"header:authorization\" if your tokens do"
                ));
                Some(Scope::Default)
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

    /// Whose a key is, with the keys that verify it.
    fn scope_of_proxy(
        &mut self,
        entry: &Entry<'_>,
        keys: Option<JwtKeyEntry<'_>>,
    ) -> Option<Scope> {
        let said = entry.parse(scope, &mut self.problems)?;
        match (said, keys) {
            (ScopeSetting::Jwt(claim), Some((_, keys))) => Some(Scope::Jwt(claim, keys?)),
            (ScopeSetting::Jwt(claim), None) => {
                let invalid = InvalidSetting::new(
                    "nothing verifies the token, so that anybody could be its caller",
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

    /// `jwks` or `jwt_key`, where one of them is written; without keys where it cannot be read.
    fn jwt_keys<'d>(&mut self, section: &Section<'d>) -> Option<JwtKeyEntry<'d>> {
        type Read = fn(&str) -> Result<JwtKeys, JwtKeysError>;
        let (entry, read, hint): (_, Read, _) = match (section.get("jwks"), section.get("jwt_key"))
        {
            (None, None) => return None,
            (Some(_), Some(entry)) => {
                let hint = "put all keys into one set: jwks = \"file:/etc/hapax/jwks.json\"";
                entry.report(InvalidSetting::new("stands beside jwks", hint), &mut self.problems);
                return Some((entry, None));
            }
            (Some(entry), None) => {
                let hint = "write {\"keys\":[…]} as your issuer publishes it, or \"file:/etc/hapax/jwks.json\"";
                (entry, JwtKeys::from_jwks, hint)
            }
            (None, Some(entry)) => {
                let hint = "name a public key in PEM, or a shared secret of at least 32 bytes: \
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
            let hint = "say where clients come: listen = \"127.0.0.1:8090\"";
            section.report(InvalidSetting::new("has no listen", hint), &mut self.problems);
            return None;
        };
        let listen = entry.parse(units::address, &mut self.problems)?;
        if let Some((key, _)) = taken.iter().find(|(_, other)| clash(*other, listen)) {
            let invalid = InvalidSetting::new(
                format!("{listen} is taken by `{key}`"),
                "give each listener a port of its own; port 0 picks a free one",
            );
            entry.report(invalid, &mut self.problems);
        }
        taken.push((entry.path().to_owned(), listen));
        Some(listen)
    }

    fn upstream(&mut self, section: &Section<'_>, listen: Option<SocketAddr>) -> Option<Upstream> {
        let Some(entry) = section.get("upstream") else {
            let hint = "say where your app listens: upstream = \"http://127.0.0.1:3000\"";
            section.report(InvalidSetting::new("has no upstream", hint), &mut self.problems);
            return None;
        };
        let upstream = entry.parse(upstream, &mut self.problems)?;
        let at = upstream.host().trim_matches(['[', ']']).parse::<IpAddr>().ok();
        if let (Some(at), Some(listen)) = (at, listen)
            && SocketAddr::new(at, upstream.port()) == listen
        {
            let hint = "name the app behind, such as \"http://127.0.0.1:3000\"";
            entry.report(InvalidSetting::new("is this proxy itself", hint), &mut self.problems);
        }
        Some(upstream)
    }

    fn require_key(&mut self, section: &Section<'_>) -> Option<Vec<Route>> {
        let Some(entry) = section.get("require_key") else { return Some(Vec::new()) };
        let routes = entry.list(&mut self.problems)?;
        if routes.len() > ROUTES_MAX {
            let invalid = InvalidSetting::new(
                format!("{} routes are more than {ROUTES_MAX}", routes.len()),
                "let a `*` stand for a part of the path: \"POST /charges/*\"",
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
                "point at what holds several of them",
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

    /// `ttl`, `lease` and `wait`, which only make sense together.
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
            "as long as the slowest request of your app may take, such as \"60s\"",
        );
        judge(
            &ttl_entry,
            !(TTL_MIN..=TTL_MAX).contains(&ttl),
            "is not between 1s and 10 years",
            "longer than any client goes on retrying, such as \"72h\"",
        );
        judge(
            // Whichever of them was written.
            if ttl_entry.is_some() { &ttl_entry } else { &lease_entry },
            ttl < lease,
            "the ttl is shorter than the lease",
            "an answer must not be forgotten while its request may still run: lengthen `ttl` or \
             shorten `lease`",
        );
        judge(
            if wait_entry.is_some() { &wait_entry } else { &lease_entry },
            wait >= lease,
            "the wait is not shorter than the lease",
            "whoever waits is answered before the one who runs gives up: shorten `wait`",
        );
        (ttl, lease, wait)
    }
}

/// Where keys were written, and what was read there.
type JwtKeyEntry<'d> = (Entry<'d>, Option<Arc<JwtKeys>>);

/// What stands in `scope`, before it is known what verifies it.
#[derive(Debug, PartialEq, Eq)]
enum ScopeSetting {
    Jwt(String),
    Other(Scope),
}

fn verifies_nothing() -> InvalidSetting {
    InvalidSetting::new(
        "verifies nothing: the scope is no claim",
        "write scope = \"jwt:sub\", or leave it out",
    )
}

/// Whether two listeners would want the same port of the same address.
fn clash(one: SocketAddr, other: SocketAddr) -> bool {
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
            "write where your app listens: \"http://127.0.0.1:3000\"",
        )
    })
}

fn scope(text: &str) -> Result<ScopeSetting, InvalidSetting> {
    let hint = "write \"header:x-account-id\", \"jwt:sub\" or \"none\"";
    match text.split_once(':') {
        None if text == "none" => Ok(ScopeSetting::Other(Scope::Shared)),
        Some(("jwt", claim)) if !claim.trim().is_empty() => {
            Ok(ScopeSetting::Jwt(claim.trim().to_owned()))
        }
        Some(("jwt-unverified", claim)) if !claim.trim().is_empty() => {
            Ok(ScopeSetting::Other(Scope::UnverifiedJwt(claim.trim().to_owned())))
        }
        Some(("header", name)) => {
            let name = HeaderName::try_from(name.trim())
                .map_err(|_| InvalidSetting::new("names no header", hint))?;
            if dashed(&name) == IDEMPOTENCY_KEY.as_str() || is_ours(&name) {
                return Err(InvalidSetting::new(
                    format!("\"{name}\" does not say who calls"),
                    "name the header that does, such as \"header:x-account-id\"",
                ));
            }
            Ok(ScopeSetting::Other(Scope::Header(name)))
        }
        Some(_) | None => Err(InvalidSetting::new(format!("\"{text}\" is not a scope"), hint)),
    }
}

fn route(text: &str) -> Result<Route, InvalidSetting> {
    Route::parse(text).map_err(|error| {
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
            "write how many keys of one caller are kept at once, such as 1000000",
        )
    })
}

fn mismatch_status(text: &str) -> Result<StatusCode, InvalidSetting> {
    match text {
        "409" => Ok(StatusCode::CONFLICT),
        "422" => Ok(StatusCode::UNPROCESSABLE_ENTITY),
        other => Err(InvalidSetting::new(
            format!("{other} is not a status for a key that was used for something else"),
            "write 409, or 422 as the IETF draft has it",
        )),
    }
}

fn pointer(text: &str) -> Result<Pointer, InvalidSetting> {
    let hint = "write a JSON pointer to what changes with every try: \"/client_ts\"";
    match Pointer::parse(text) {
        Ok(_) if text.is_empty() => {
            Err(InvalidSetting::new("is the whole body, and would make any two requests one", hint))
        }
        Ok(pointer) => Ok(pointer),
        Err(error) => Err(InvalidSetting::new(format!("\"{text}\": {error}"), hint)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_clash_where_the_system_would_refuse_the_second() {
        let check = |one: &str, other: &str, expected: bool| {
            let (one, other) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(
                (clash(one, other), clash(other, one)),
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
    fn a_scope_says_who_calls() {
        assert_eq!(scope("none"), Ok(ScopeSetting::Other(Scope::Shared)));
        assert_eq!(scope("jwt:sub"), Ok(ScopeSetting::Jwt("sub".into())));
        let unverified = Scope::UnverifiedJwt("sub".into());
        assert_eq!(scope("jwt-unverified:sub"), Ok(ScopeSetting::Other(unverified)));
        let named = HeaderName::from_static("x-account-id");
        assert_eq!(scope("header:X-Account-Id"), Ok(ScopeSetting::Other(Scope::Header(named))));
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
