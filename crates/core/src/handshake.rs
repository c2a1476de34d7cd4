//! Handshakes: the challenges that some senders send before or between their events, and the replies
//! that they require.
//!
//! A handshake is never an event: it is answered, and nothing is stored. An echoed challenge is bounded,
//! printable, and never of a content type that a browser would run.
//!
//! X and Zoom require their challenge to be signed with the secret that signs events. A reply must never
//! be a signature that an event could carry. So such a challenge must be a token: letters, digits and the
//! few other characters of base64 and UUIDs. No JSON object and no signed content of Zoom (`v0:…`)
//! consists of those alone. The signed content decides whether a request is a handshake, never an
//! unsigned header.

use std::borrow::Cow;
use std::collections::BTreeMap;

use aws_lc_rs::{constant_time, hmac};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::{HeaderMap, Method};
use jiff::Timestamp;

use crate::arrival::Arrival;
use crate::envelope::form;
use crate::json::{self, Pointer, Value};
use crate::limits::{
    HANDSHAKE_BODY_BYTES_MAX, HANDSHAKE_ECHO_BYTES_MAX, HANDSHAKE_TOKEN_BYTES_MAX,
};
use crate::secret::{ActiveSecret, Secret};
use crate::source::Source;
use crate::verify::Refusal;

/// The handshake of a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Challenge {
    /// A signed `url_verification`, whose challenge is echoed.
    Slack,
    /// GET with `hub.verify_token`, which must equal the parameter `verify_token`, and `hub.challenge`.
    Meta,
    /// A signed `endpoint.url_validation`, answered with an HMAC; repeated every 72 hours.
    Zoom,
    /// A signed body with a `challenge` and no `event`, whose challenge is echoed. Revocations are
    /// events.
    Twitch,
    /// GET with `challenge`.
    Dropbox,
    /// GET with `crc_token`, answered with an HMAC.
    X,
    /// "Intent to receive": signed bodies without events, answered 200, and badly signed ones 401.
    Xero,
    /// A signed PING: of webhook events type 0, of interactions type 1.
    Discord,
    /// An unsigned form that holds nothing but `webhook_id`, sent when the webhook is created.
    WooCommerce,
    /// OPTIONS with `WebHook-Request-Origin`, as in the CloudEvents webhook specification.
    CloudEvents,
}

/// The reply to a handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandshakeReply {
    /// The HTTP status.
    pub status: u16,
    /// `content-type` and other headers that the sender requires.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Bytes,
}

impl HandshakeReply {
    /// 200 with an empty body.
    pub fn empty() -> Self {
        Self::bare(200)
    }

    fn bare(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Bytes::new() }
    }

    fn typed(content_type: &str, body: String) -> Self {
        let headers = vec![
            ("content-type", content_type.to_owned()),
            ("x-content-type-options", "nosniff".to_owned()),
        ];
        Self { status: 200, headers, body: body.into() }
    }

    /// The challenge as plain text, which no browser runs.
    fn echo(challenge: Cow<'_, str>) -> Option<Self> {
        echoable(&challenge).then(|| Self::typed("text/plain", challenge.into_owned()))
    }

    fn json(value: &serde_json::Value) -> Self {
        Self::typed("application/json", value.to_string())
    }
}

impl Challenge {
    /// Answers a request that is not a POST: a challenge by GET, or OPTIONS of CloudEvents. `None` if
    /// this sender has no such handshake; the request then gets a 405.
    pub fn unsigned(
        self,
        source: &Source,
        method: &Method,
        query: &str,
        headers: &HeaderMap,
    ) -> Option<HandshakeReply> {
        match (self, method) {
            (Self::Meta, &Method::GET) => Some(meta(&source.handshake, query)),
            (Self::Dropbox, &Method::GET) => Some(dropbox(query)),
            (Self::X, &Method::GET) => Some(crc(&source.handshake, query)),
            (Self::CloudEvents, &Method::OPTIONS) => cloud_events(headers),
            (
                Self::Slack
                | Self::Meta
                | Self::Zoom
                | Self::Twitch
                | Self::Dropbox
                | Self::X
                | Self::Xero
                | Self::Discord
                | Self::WooCommerce
                | Self::CloudEvents,
                _,
            ) => None,
        }
    }

    /// Whether this sender has a handshake that is a POST without a signature. Such a request must reach
    /// [`verify`](mod@crate::verify), and must not be refused before for its missing header or its content
    /// type.
    pub fn posts_unsigned(self) -> bool {
        self == Self::WooCommerce
    }

    /// Answers an unsigned POST that is a handshake.
    pub(crate) fn unsigned_post(self, arrival: &Arrival) -> Option<HandshakeReply> {
        (self.posts_unsigned() && is_woocommerce_ping(arrival)).then(HandshakeReply::empty)
    }

    /// Answers a signed POST that is a handshake. `secret` is the index of the secret that verified.
    pub(crate) fn signed(
        self,
        source: &Source,
        arrival: &Arrival,
        secret: usize,
    ) -> Result<Option<HandshakeReply>, Refusal> {
        match self {
            Self::Slack => slack(arrival),
            Self::Zoom => zoom(&source.handshake, arrival, secret),
            Self::Twitch => twitch(arrival),
            Self::Discord => discord(arrival),
            // A body of Xero without events is answered as an empty batch.
            Self::Meta
            | Self::Dropbox
            | Self::X
            | Self::Xero
            | Self::WooCommerce
            | Self::CloudEvents => Ok(None),
        }
    }
}

/// The keys with which a source answers challenges.
pub(crate) struct HandshakeKeys {
    /// One for each secret, in the order of the config.
    hmac: Vec<hmac::Key>,
    /// The secret that expires last. Hapax answers with this secret if the request does not show which one
    /// to use.
    lasting: usize,
    verify_token: Option<Secret>,
}

impl HandshakeKeys {
    pub(crate) fn new(secrets: &[ActiveSecret], params: &BTreeMap<String, String>) -> Self {
        let key = |active: &ActiveSecret| {
            hmac::Key::new(hmac::HMAC_SHA256, active.secret.expose().as_bytes())
        };
        let until = |place: &usize| secrets[*place].until.unwrap_or(Timestamp::MAX);
        Self {
            hmac: secrets.iter().map(key).collect(),
            lasting: (0..secrets.len()).rev().max_by_key(until).unwrap_or_default(),
            verify_token: params
                .get("verify_token")
                .filter(|token| !token.is_empty())
                .map(Secret::new),
        }
    }

    fn sign(&self, secret: usize, text: &str) -> Option<hmac::Tag> {
        self.hmac.get(secret).map(|key| hmac::sign(key, text.as_bytes()))
    }
}

impl std::fmt::Debug for HandshakeKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HandshakeKeys(hidden)")
    }
}

fn meta(keys: &HandshakeKeys, query: &str) -> HandshakeReply {
    let token = parameter(query, "hub.verify_token");
    let known = match (&keys.verify_token, &token) {
        (Some(known), Some(token)) => {
            constant_time::verify_slices_are_equal(known.expose().as_bytes(), token.as_bytes())
                .is_ok()
        }
        (None, _) | (_, None) => false,
    };
    let subscribing = parameter(query, "hub.mode").as_deref() == Some("subscribe");
    if !known || !subscribing {
        return HandshakeReply::bare(403);
    }
    echo_parameter(query, "hub.challenge")
}

fn dropbox(query: &str) -> HandshakeReply {
    echo_parameter(query, "challenge")
}

fn crc(keys: &HandshakeKeys, query: &str) -> HandshakeReply {
    let token = parameter(query, "crc_token").filter(|token| is_token(token));
    match token.and_then(|token| keys.sign(keys.lasting, &token)) {
        Some(tag) => {
            let answer = format!("sha256={}", BASE64_STANDARD.encode(tag));
            HandshakeReply::json(&serde_json::json!({ "response_token": answer }))
        }
        None => HandshakeReply::bare(400),
    }
}

/// Allows the sender to send: every event is verified by its signature, so nothing needs to be refused
/// here.
fn cloud_events(headers: &HeaderMap) -> Option<HandshakeReply> {
    let origin = headers.get("webhook-request-origin")?.to_str().ok()?;
    let named = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]_*".contains(&byte);
    if !echoable(origin) || !origin.bytes().all(named) {
        return Some(HandshakeReply::bare(400));
    }
    let asked = headers.get("webhook-request-rate").and_then(|rate| rate.to_str().ok());
    let rate = asked.filter(|rate| rate.len() <= 9 && is_digits(rate)).unwrap_or("*");
    let headers = vec![
        ("allow", "POST".to_owned()),
        ("webhook-allowed-origin", origin.to_owned()),
        ("webhook-allowed-rate", rate.to_owned()),
    ];
    Some(HandshakeReply { status: 200, headers, body: Bytes::new() })
}

fn slack(arrival: &Arrival) -> Result<Option<HandshakeReply>, Refusal> {
    let [kind, challenge] = look(arrival, ["/type", "/challenge"]);
    if text(kind).as_deref() != Some("url_verification") {
        return Ok(None);
    }
    echo_field(challenge, "/challenge")
}

fn zoom(
    keys: &HandshakeKeys,
    arrival: &Arrival,
    secret: usize,
) -> Result<Option<HandshakeReply>, Refusal> {
    let [event, token] = look(arrival, ["/event", "/payload/plainToken"]);
    if text(event).as_deref() != Some("endpoint.url_validation") {
        return Ok(None);
    }
    let token = text(token).filter(|token| is_token(token));
    match token.and_then(|token| Some((keys.sign(secret, &token)?, token))) {
        Some((tag, token)) => Ok(Some(HandshakeReply::json(&serde_json::json!({
            "plainToken": token,
            "encryptedToken": hex::encode(tag),
        })))),
        None => Err(Refusal::Malformed("no challenge at /payload/plainToken".to_owned())),
    }
}

/// Twitch names the kind in `twitch-eventsub-message-type`, which is not signed, so the signed body
/// decides: only handshakes have a `challenge`, and only notifications have an `event`.
fn twitch(arrival: &Arrival) -> Result<Option<HandshakeReply>, Refusal> {
    let [challenge, event] = look(arrival, ["/challenge", "/event"]);
    match (challenge, event) {
        (Some(challenge), None) => echo_field(Some(challenge), "/challenge"),
        (Some(_) | None, _) => Ok(None),
    }
}

/// Type 1 is a PING among interactions and an event among webhook events. Only the latter have an
/// `event`.
fn discord(arrival: &Arrival) -> Result<Option<HandshakeReply>, Refusal> {
    let [kind, event] = look(arrival, ["/type", "/event"]);
    Ok(match (kind.map(Value::raw), event) {
        (Some("0"), None) => Some(HandshakeReply::bare(204)),
        (Some("1"), None) => Some(HandshakeReply::json(&serde_json::json!({ "type": 1 }))),
        (Some(_) | None, _) => None,
    })
}

fn is_woocommerce_ping(arrival: &Arrival) -> bool {
    let id = arrival.body.strip_prefix(b"webhook_id=").unwrap_or_default();
    !arrival.headers.contains_key("x-wc-webhook-signature")
        && (1..=20).contains(&id.len())
        && id.iter().all(u8::is_ascii_digit)
}

/// Reads values of a body that may be a handshake. A body that is too large or not JSON is not a
/// handshake; the envelope decides whether it is an event.
fn look<'a, const N: usize>(arrival: &'a Arrival, paths: [&str; N]) -> [Option<Value<'a>>; N] {
    let mut values = [None; N];
    if arrival.body.len() > HANDSHAKE_BODY_BYTES_MAX {
        return values;
    }
    let pointers = paths.map(|path| Pointer::parse(path).expect("written in this file"));
    if let Ok(found) = json::extract(&arrival.body, &pointers) {
        values.copy_from_slice(&found);
    }
    values
}

fn text<'a>(value: Option<Value<'a>>) -> Option<Cow<'a, str>> {
    value.and_then(Value::as_text)
}

fn echo_field(value: Option<Value<'_>>, place: &str) -> Result<Option<HandshakeReply>, Refusal> {
    match text(value).and_then(HandshakeReply::echo) {
        Some(reply) => Ok(Some(reply)),
        None => Err(Refusal::Malformed(format!("no challenge at {place}"))),
    }
}

fn echo_parameter(query: &str, name: &str) -> HandshakeReply {
    parameter(query, name)
        .and_then(HandshakeReply::echo)
        .unwrap_or_else(|| HandshakeReply::bare(400))
}

fn parameter<'a>(query: &'a str, name: &str) -> Option<Cow<'a, str>> {
    form::find(query.as_bytes(), name).ok().flatten()
}

fn echoable(text: &str) -> bool {
    (1..=HANDSHAKE_ECHO_BYTES_MAX).contains(&text.len()) && !text.contains(char::is_control)
}

/// Whether a challenge may be signed: it cannot be the signed content of an event.
fn is_token(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~+/=".contains(&byte);
    (1..=HANDSHAKE_TOKEN_BYTES_MAX).contains(&text.len()) && text.bytes().all(plain)
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(secrets: &[&str], verify_token: Option<&str>) -> HandshakeKeys {
        let secrets: Vec<ActiveSecret> =
            secrets.iter().map(|text| ActiveSecret::forever(Secret::new(*text))).collect();
        let params = verify_token.map(|token| ("verify_token".to_owned(), token.to_owned()));
        HandshakeKeys::new(&secrets, &params.into_iter().collect())
    }

    fn post(body: &str) -> Arrival {
        Arrival {
            method: Method::POST,
            url: "https://hooks.example.com/webhooks/x".into(),
            headers: HeaderMap::new(),
            body: Bytes::copy_from_slice(body.as_bytes()),
        }
    }

    fn body(reply: &HandshakeReply) -> &str {
        std::str::from_utf8(&reply.body).expect("text")
    }

    fn is_plain(reply: &HandshakeReply) -> bool {
        reply.headers.contains(&("content-type", "text/plain".into()))
            && reply.headers.contains(&("x-content-type-options", "nosniff".into()))
    }

    #[test]
    fn meta_gets_its_challenge_only_with_the_token() {
        let ask = |keys: &HandshakeKeys, query: &str| meta(keys, query);
        let known = keys(&["s"], Some("to ken"));
        let good = "hub.mode=subscribe&hub.verify_token=to%20ken&hub.challenge=1158201444";
        let reply = ask(&known, good);
        assert_eq!((reply.status, body(&reply)), (200, "1158201444"));
        assert!(is_plain(&reply));
        for (bad, status) in [
            ("hub.mode=subscribe&hub.verify_token=other&hub.challenge=1", 403),
            ("hub.mode=subscribe&hub.challenge=1", 403),
            ("hub.mode=unsubscribe&hub.verify_token=to%20ken&hub.challenge=1", 403),
            ("hub.mode=subscribe&hub.verify_token=x&hub.verify_token=to%20ken", 403),
            ("hub.mode=subscribe&hub.verify_token=to%20ken", 400),
            ("", 403),
        ] {
            let reply = ask(&known, bad);
            assert_eq!((reply.status, body(&reply)), (status, ""), "{bad}");
        }
        assert_eq!(ask(&keys(&["s"], None), good).status, 403);
        assert_eq!(
            ask(&keys(&["s"], Some("")), "hub.mode=subscribe&hub.verify_token=").status,
            403
        );
    }

    #[test]
    fn an_echo_is_bounded_and_never_html() {
        let reply = dropbox("challenge=%3Cscript%3Ealert(1)%3C/script%3E");
        assert_eq!(body(&reply), "<script>alert(1)</script>");
        assert!(is_plain(&reply));
        let long = "x".repeat(HANDSHAKE_ECHO_BYTES_MAX);
        assert_eq!(dropbox(&format!("challenge={long}")).status, 200);
        for bad in [&format!("challenge={long}y"), "challenge=", "", "challenge=a%0d%0ab"] {
            let reply = dropbox(bad);
            assert_eq!((reply.status, reply.body.len()), (400, 0), "{bad:.40}");
        }
    }

    #[test]
    fn x_gets_the_hmac_of_its_token_by_the_secret_that_stays() {
        let mut secrets = vec![
            ActiveSecret {
                until: Some(Timestamp::UNIX_EPOCH),
                ..ActiveSecret::forever(Secret::new("old"))
            },
            ActiveSecret::forever(Secret::new("consumer")),
            ActiveSecret::forever(Secret::new("other")),
        ];
        let reply = crc(&HandshakeKeys::new(&secrets, &BTreeMap::new()), "crc_token=foo");
        // Computed with `openssl dgst -sha256 -hmac consumer`.
        let expected =
            r#"{"response_token":"sha256=3ytpMIdvAhd2hOGEwax2tDXjZ5gmoZ8mLgWEUBpr9nI="}"#;
        assert_eq!(body(&reply), expected);
        secrets.clear();
        let none = HandshakeKeys::new(&secrets, &BTreeMap::new());
        assert_eq!(crc(&none, "crc_token=foo").status, 400);
        assert_eq!(crc(&keys(&["s"], None), "crc=foo").status, 400);
    }

    #[test]
    fn slack_and_twitch_get_their_challenge_back() {
        let reply = slack(&post(r#"{"token":"t","challenge":"3eZb","type":"url_verification"}"#));
        let reply = reply.expect("answered").expect("a handshake");
        assert_eq!((reply.status, body(&reply), is_plain(&reply)), (200, "3eZb", true));
        let event = post(r#"{"type":"event_callback","challenge":"x","event_id":"Ev1"}"#);
        assert_eq!(slack(&event), Ok(None));
        assert_eq!(slack(&post("payload=%7B%7D")), Ok(None));
        assert!(slack(&post(r#"{"type":"url_verification"}"#)).is_err());
        assert!(slack(&post(r#"{"type":"url_verification","challenge":7}"#)).is_err());

        // The header that names the kind is not signed, so it decides nothing.
        let kinds = ["webhook_callback_verification", "notification", "revocation"];
        let mut asked = post(r#"{"challenge":"pogchamp-kappa","subscription":{}}"#);
        let mut event = post(r#"{"subscription":{},"event":{"id":1},"challenge":"x"}"#);
        let mut revoked = post(r#"{"subscription":{"status":"authorization_revoked"}}"#);
        for kind in kinds {
            for arrival in [&mut asked, &mut event, &mut revoked] {
                let kind = kind.parse().expect("a value");
                arrival.headers.insert("twitch-eventsub-message-type", kind);
            }
            let reply = twitch(&asked).expect("answered").expect("a handshake");
            assert_eq!((body(&reply), is_plain(&reply)), ("pogchamp-kappa", true), "{kind}");
            assert_eq!((twitch(&event), twitch(&revoked)), (Ok(None), Ok(None)), "{kind}");
        }
    }

    #[test]
    fn nothing_that_could_be_an_event_is_signed_for_a_handshake() {
        let keys = keys(&["consumer"], None);
        let long = "a".repeat(HANDSHAKE_TOKEN_BYTES_MAX);
        for token in ["9b4507b3-9040-4669-9ca3-6b94edb50553", "OTJiZjAwODM+/w==", "foo", &long] {
            let query = format!("crc_token={}", token.replace('+', "%2B"));
            assert_eq!(crc(&keys, &query).status, 200, "{token}");
        }
        for event in [
            r#"{"for_user_id":"1"}"#,
            "{}",
            "[]",
            "\"1\"",
            "v0:1767225600:{}",
            "a b",
            "a\n",
            "é",
            &format!("{long}a"),
        ] {
            let escaped: String = event.bytes().map(|byte| format!("%{byte:02x}")).collect();
            let reply = crc(&keys, &format!("crc_token={escaped}"));
            assert_eq!((reply.status, body(&reply)), (400, ""), "{event}");
            let asked = serde_json::json!({
                "event": "endpoint.url_validation", "payload": { "plainToken": event },
            });
            assert!(zoom(&keys, &post(&asked.to_string()), 0).is_err(), "{event}");
        }
    }

    #[test]
    fn zoom_gets_the_hmac_of_its_token_by_the_secret_that_signed() {
        let keys = keys(&["old", "consumer"], None);
        let asked = post(
            r#"{"event":"endpoint.url_validation","event_ts":1,"payload":{"plainToken":"foo"}}"#,
        );
        let reply = zoom(&keys, &asked, 1).expect("answered").expect("a handshake");
        let expected = r#"{"encryptedToken":"df2b6930876f02177684e184c1ac76b435e3679826a19f262e0584501a6bf672","plainToken":"foo"}"#;
        assert_eq!(body(&reply), expected);
        assert_ne!(zoom(&keys, &asked, 0).expect("answered"), Some(reply));
        assert_eq!(zoom(&keys, &post(r#"{"event":"meeting.started"}"#), 0), Ok(None));
        assert!(zoom(&keys, &post(r#"{"event":"endpoint.url_validation"}"#), 0).is_err());
    }

    #[test]
    fn discord_pings_are_distinguished_from_events() {
        let status = |text: &str| {
            let reply = discord(&post(text)).expect("answered")?;
            Some((reply.status, body(&reply).to_owned()))
        };
        assert_eq!(status(r#"{"version":1,"type":0}"#), Some((204, String::new())));
        assert_eq!(status(r#"{"id":"1","type":1}"#), Some((200, r#"{"type":1}"#.into())));
        assert_eq!(status(r#"{"version":1,"type":1,"event":{"type":"X"}}"#), None);
        assert_eq!(status(r#"{"id":"1","type":2,"data":{}}"#), None);
        assert_eq!(status(r#"{"type":"1"}"#), None);
        assert_eq!(status("{"), None);
    }

    #[test]
    fn only_a_bare_unsigned_ping_of_woocommerce_passes_without_a_signature() {
        let answered = |arrival: &Arrival| Challenge::WooCommerce.unsigned_post(arrival).is_some();
        assert!(answered(&post("webhook_id=12")));
        for event in ["webhook_id=", "webhook_id=1&a=b", "webhook_id=1\n", "a=1", "", "{}"] {
            assert!(!answered(&post(event)), "{event}");
        }
        let mut signed = post("webhook_id=12");
        signed.headers.insert("x-wc-webhook-signature", "x".parse().expect("a value"));
        assert!(!answered(&signed));
        assert!(Challenge::Slack.unsigned_post(&post("webhook_id=12")).is_none());
    }

    #[test]
    fn cloud_events_senders_may_send() {
        let ask = |pairs: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.insert(*name, value.parse().expect("a value"));
            }
            cloud_events(&headers)
        };
        let reply = ask(&[("webhook-request-origin", "eventgrid.azure.net")]).expect("answered");
        assert!(reply.headers.contains(&("webhook-allowed-origin", "eventgrid.azure.net".into())));
        assert!(reply.headers.contains(&("webhook-allowed-rate", "*".into())));
        let reply = ask(&[("webhook-request-origin", "a.b"), ("webhook-request-rate", "120")]);
        let rate = ("webhook-allowed-rate", "120".to_owned());
        assert!(reply.expect("answered").headers.contains(&rate));
        assert_eq!(ask(&[]), None);
        assert_eq!(ask(&[("webhook-request-origin", "<b>")]).expect("answered").status, 400);
    }
}
