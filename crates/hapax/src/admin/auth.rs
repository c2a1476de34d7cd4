//! Who may use the admin side.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::{constant_time, digest};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header, uri::Authority};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hapax_core::secret::Secret;
use hapax_core::store::{Inspect, Store};

use super::Admin;
use super::problem::Problem;
use crate::config::Permission;

/// Wrong tokens that are answered per second; the rest are told to wait.
const WRONG_TOKENS_PER_SECOND: u32 = 20;

/// Decides who may pass.
pub(crate) struct Gate {
    rule: Rule,
    tokens: Vec<Known>,
    wrong: governor::DefaultDirectRateLimiter,
}

/// What the listener's address asks for.
enum Rule {
    /// Only this machine can connect; a name that was rebound to it must not help.
    Loopback,
    /// Anyone can connect: a token is needed.
    Token,
}

struct Known {
    name: String,
    digest: digest::Digest,
    allow: Vec<Permission>,
}

impl Gate {
    /// For a listener on `address`. Tokens are kept as digests: comparing those takes the same time
    /// whatever was sent.
    pub(crate) fn new<'a>(
        address: IpAddr,
        tokens: impl IntoIterator<Item = (&'a str, &'a Secret, &'a [Permission])>,
    ) -> Self {
        let rule = if address.is_loopback() { Rule::Loopback } else { Rule::Token };
        let tokens = tokens
            .into_iter()
            .map(|(name, value, allow)| Known {
                name: name.to_owned(),
                digest: digest::digest(&digest::SHA256, value.expose().as_bytes()),
                allow: allow.to_vec(),
            })
            .collect();
        let quota = governor::Quota::with_period(Duration::from_secs(1) / WRONG_TOKENS_PER_SECOND)
            .expect("a period above zero")
            .allow_burst(WRONG_TOKENS_PER_SECOND.try_into().expect("not zero"));
        Self { rule, tokens, wrong: governor::RateLimiter::direct(quota) }
    }

    fn admit(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let shown = headers.get(header::AUTHORIZATION);
        match (&self.rule, shown) {
            (Rule::Loopback, None) => names_loopback(headers),
            (Rule::Loopback, Some(shown)) => {
                names_loopback(headers)?;
                self.check(shown.as_bytes())
            }
            (Rule::Token, Some(shown)) => self.check(shown.as_bytes()),
            (Rule::Token, None) => Err(Problem::unauthorized()),
        }
    }

    fn check(&self, shown: &[u8]) -> Result<(), Problem> {
        let token = match shown.get(..7) {
            Some(scheme) if scheme.eq_ignore_ascii_case(b"bearer ") => &shown[7..],
            _ => return Err(Problem::unauthorized()),
        };
        let shown = digest::digest(&digest::SHA256, token);
        // Every token is compared: which one fitted does not show in the time taken.
        let known = self.tokens.iter().fold(None, |found, known| {
            let same =
                constant_time::verify_slices_are_equal(known.digest.as_ref(), shown.as_ref());
            if same.is_ok() { Some(known) } else { found }
        });
        let Some(known) = known else {
            return match self.wrong.check() {
                Ok(()) => {
                    tracing::warn!("a wrong token was shown to the admin side");
                    Err(Problem::unauthorized())
                }
                Err(_) => Err(Problem::too_many()),
            };
        };
        let may_read = known.allow.iter().any(|permission| match permission {
            Permission::Admin | Permission::Read | Permission::Operate => true,
            Permission::Publish | Permission::Claim { .. } => false,
        });
        if may_read {
            return Ok(());
        }
        tracing::warn!(token = %known.name, "token {} may not read", known.name);
        Err(Problem::forbidden("this token may not read"))
    }
}

fn names_loopback(headers: &HeaderMap) -> Result<(), Problem> {
    let mut hosts = headers.get_all(header::HOST).iter();
    // Only one name may be given, and nothing in front of it that another reader takes for one.
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.to_str().ok().filter(|host| !host.contains('@')),
        (Some(_), Some(_)) | (None, _) => None,
    };
    let host = host.and_then(|host| host.parse::<Authority>().ok());
    let loopback = host.is_some_and(|host| {
        let name = host.host().trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost")
            || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    });
    match loopback {
        true => Ok(()),
        false => Err(Problem::forbidden("the Host header must name a loopback address")),
    }
}

/// The door in front of every guarded route.
pub(super) async fn only_the_allowed<S: Store + Inspect>(
    State(admin): State<Arc<Admin<S>>>,
    mut request: Request,
    next: Next,
) -> Response {
    // HTTP/2 carries the host in the request's own address.
    if !request.headers().contains_key(header::HOST)
        && let Some(authority) = request.uri().authority()
        && let Ok(host) = header::HeaderValue::from_str(authority.as_str())
    {
        request.headers_mut().insert(header::HOST, host);
    }
    match admin.gate.admit(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(gate: &Gate, lines: &[(&'static str, &str)]) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().expect("a header value"));
        }
        gate.admit(&headers).is_ok()
    }

    #[test]
    fn on_loopback_only_a_loopback_host_passes() {
        // A web page whose name was rebound to 127.0.0.1 still sends its own name.
        let gate = Gate::new([127, 0, 0, 1].into(), []);
        for host in ["localhost", "LOCALHOST:8081", "127.0.0.1:8081", "127.9.9.9", "[::1]:8081"] {
            assert!(admits(&gate, &[("host", host)]), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"]
        {
            assert!(!admits(&gate, &[("host", host)]), "{host}");
        }
        assert!(!admits(&gate, &[]));
        assert!(!admits(&gate, &[("host", "evil.example@localhost")]));
        assert!(!admits(&gate, &[("host", "localhost"), ("host", "evil.example")]));
    }

    #[test]
    fn off_loopback_only_a_token_that_may_read_passes() {
        let (good, weak) = (Secret::new("right"), Secret::new("weak"));
        let gate = Gate::new(
            [0, 0, 0, 0].into(),
            [("ops", &good, &[Permission::Read][..]), ("pub", &weak, &[Permission::Publish][..])],
        );
        assert!(admits(&gate, &[("authorization", "Bearer right")]));
        assert!(admits(&gate, &[("authorization", "bearer right")]));
        for wrong in ["Bearer wrong", "Bearer ", "Bearer", "Basic right", "right", "Bearer weak"] {
            assert!(!admits(&gate, &[("authorization", wrong)]), "{wrong}");
        }
        assert!(!admits(&gate, &[("host", "localhost")]));
    }
}
