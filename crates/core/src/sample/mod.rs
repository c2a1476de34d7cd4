//! Realistic sample events of every preset, for `hapax send` and tests: a body as the sender writes it,
//! and its unsigned headers. [`crate::scheme`] signs them.
//!
//! A sample is a template with names in angle brackets, filled from one [`SampleId`]. The same id makes
//! the same bytes, another id another event. The templates are in `templates.rs`.

mod templates;

use jiff::{SignedDuration, Timestamp};

use crate::json::{Pointer, PointerError};
use crate::key::KeyHash;
use templates::{TEMPLATES, Template};

/// The sample event of a provider, or `None` for an unknown provider. Without a type the sample has a common
/// type of that provider.
pub fn event(provider: &str, event_type: Option<&str>, id: &SampleId) -> Option<Sample> {
    let template = TEMPLATES.iter().find(|template| template.provider == provider)?;
    let event_type = event_type.unwrap_or(template.event_type);
    let values = TemplateValues { id, event_type };
    let encoding = template.encoding;
    Some(Sample {
        body: values.all(template.body.lines().map(str::trim), |text| encoding.escape(text)),
        content_type: encoding.content_type(),
        headers: headers(template, &values),
    })
}

/// A common event type of a provider, which its sample has by default.
pub fn best_known_type(provider: &str) -> Option<&'static str> {
    let template = TEMPLATES.iter().find(|template| template.provider == provider)?;
    Some(template.event_type)
}

/// The providers that have a sample.
pub fn providers() -> impl Iterator<Item = &'static str> {
    TEMPLATES.iter().map(|template| template.provider)
}

/// The identity of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleId {
    text: String,
    at: Timestamp,
    made_up: bool,
    hash: [u8; 16],
}

impl SampleId {
    /// An id given by the user. The event contains this id unchanged if the sender's ids are text. If the
    /// sender's ids are numbers, only digits can be used.
    pub fn exact(text: impl Into<String>, at: Timestamp) -> Self {
        Self::new(text.into(), at, false)
    }

    /// An id made from a unique token, in the form of that sender's ids: `evt_…`, a UUID, a number.
    pub fn made_up(token: impl Into<String>, at: Timestamp) -> Self {
        Self::new(token.into(), at, true)
    }

    fn new(text: String, at: Timestamp, made_up: bool) -> Self {
        let KeyHash(hash) = KeyHash::of(b"sample", [text.as_bytes()]);
        Self { text, at, made_up, hash }
    }

    /// The text itself if it is a number, else 15 digits derived from it.
    fn number(&self) -> String {
        let digits = self.text.bytes().all(|byte| byte.is_ascii_digit());
        if digits && (1..=18).contains(&self.text.len()) && !self.text.starts_with('0') {
            return self.text.clone();
        }
        let [a, b, c, d, e, f, ..] = self.hash;
        let number = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
        (100_000_000_000_000 + number % 900_000_000_000_000).to_string()
    }

    fn uuid(&self) -> String {
        uuid::Builder::from_random_bytes(self.hash).into_uuid().to_string()
    }
}

/// A request as a sender would make it, without the signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The body.
    pub body: String,
    /// The content type of the body.
    pub content_type: &'static str,
    /// The sender's headers apart from the signature, such as `X-GitHub-Delivery`.
    pub headers: Vec<(&'static str, String)>,
}

/// Sets `value` at `pointer`, and creates missing objects on the way. In an array only an existing
/// element can be replaced. The empty pointer replaces the whole document.
pub fn set(
    body: &mut serde_json::Value,
    pointer: &str,
    value: serde_json::Value,
) -> Result<(), SetError> {
    let pointer = Pointer::parse(pointer)?;
    let mut place = body;
    for key in pointer.keys() {
        if place.is_null() {
            *place = serde_json::Value::Object(serde_json::Map::new());
        }
        place = match place {
            serde_json::Value::Object(members) => {
                members.entry(key).or_insert(serde_json::Value::Null)
            }
            serde_json::Value::Array(elements) => key
                .parse()
                .ok()
                .and_then(|index: usize| elements.get_mut(index))
                .ok_or_else(|| SetError::Nothing(pointer.as_str().to_owned()))?,
            serde_json::Value::Null
            | serde_json::Value::Bool(_)
            | serde_json::Value::Number(_)
            | serde_json::Value::String(_) => {
                return Err(SetError::Nothing(pointer.as_str().to_owned()));
            }
        };
    }
    *place = value;
    Ok(())
}

/// Why a value could not be set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// Not a JSON pointer.
    #[error(transparent)]
    Pointer(#[from] PointerError),
    /// The pointer leads through a scalar, or past the end of an array.
    #[error("there is nothing at {0}")]
    Nothing(String),
}

/// How a template's body is written, and so how values must be escaped in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyEncoding {
    Json,
    Form,
}

impl BodyEncoding {
    fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Form => "application/x-www-form-urlencoded",
        }
    }

    fn escape(self, text: &str) -> String {
        match self {
            Self::Json => {
                let quoted = serde_json::Value::from(text).to_string();
                quoted[1..quoted.len() - 1].to_owned()
            }
            Self::Form => text.bytes().map(form_byte).collect(),
        }
    }
}

fn form_byte(byte: u8) -> String {
    match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'*' | b'-' | b'.' | b'_' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    }
}

fn headers(template: &Template, values: &TemplateValues<'_>) -> Vec<(&'static str, String)> {
    let value = |text: &str| values.all([text].into_iter(), str::to_owned);
    template.headers.iter().map(|(name, text)| (*name, value(text))).collect()
}

/// The values of the names in angle brackets.
struct TemplateValues<'a> {
    id: &'a SampleId,
    event_type: &'a str,
}

impl TemplateValues<'_> {
    fn all<'t>(
        &self,
        pieces: impl Iterator<Item = &'t str>,
        escape: impl Fn(&str) -> String,
    ) -> String {
        let mut whole = String::new();
        for mut rest in pieces {
            while let Some((plain, after)) = rest.split_once('<') {
                let (name, tail) = after.split_once('>').expect("templates close their brackets");
                whole.push_str(plain);
                whole.push_str(&escape(&self.value(name)));
                rest = tail;
            }
            whole.push_str(rest);
        }
        whole
    }

    fn value(&self, name: &str) -> String {
        let id = self.id;
        let (kind, of_type) = match self.event_type.split_once(['.', '/', ':']) {
            Some(parts) => parts,
            None => (self.event_type, ""),
        };
        match name {
            "id:uuid" if id.made_up => id.uuid(),
            "id:hex" if id.made_up => hex::encode(id.hash),
            "id:n" if id.made_up => id.number(),
            "id" | "id:uuid" | "id:hex" | "id:n" => id.text.clone(),
            "n" => id.number(),
            "hex" => hex::encode(id.hash),
            "hex8" => hex::encode(&id.hash[..4]),
            "uuid" => id.uuid(),
            "type" => self.event_type.to_owned(),
            "type:1" => kind.to_owned(),
            "type:2" => of_type.to_owned(),
            "object" => self.stripe_object().to_owned(),
            "object:id" => {
                format!("{}{}", stripe_prefix(self.stripe_object()), hex::encode(id.hash))
            }
            "s" => id.at.as_second().to_string(),
            "s:day" => (id.at.as_second() + 86_400).to_string(),
            "ms" => id.at.as_millisecond().to_string(),
            "time" => self.time(SignedDuration::ZERO),
            "time:day" => self.time(SignedDuration::from_hours(24)),
            "time:bare" => self.time(SignedDuration::ZERO).trim_end_matches('Z').to_owned(),
            other => match other.strip_prefix("id:") {
                Some(prefix) if id.made_up => format!("{prefix}{}", id.text),
                Some(_) => id.text.clone(),
                None => panic!("templates use known names only, not {other}"),
            },
        }
    }

    fn time(&self, later: SignedDuration) -> String {
        let at = Timestamp::from_second(self.id.at.as_second()).unwrap_or(self.id.at);
        at.checked_add(later).unwrap_or(at).to_string()
    }

    /// The object of a Stripe type: `charge.dispute` in `charge.dispute.created`.
    fn stripe_object(&self) -> &str {
        self.event_type.rsplit_once('.').map_or(self.event_type, |(object, _)| object)
    }
}

fn stripe_prefix(object: &str) -> &'static str {
    match object {
        "payout" => "po_",
        "charge" => "ch_",
        "charge.dispute" => "dp_",
        "charge.refund" | "refund" => "re_",
        "checkout.session" => "cs_test_",
        "customer" => "cus_",
        "customer.subscription" => "sub_",
        "invoice" => "in_",
        "payment_intent" => "pi_",
        "transfer" => "tr_",
        _other => "obj_",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn at() -> Timestamp {
        Timestamp::from_second(1_767_225_600).expect("in range")
    }

    #[test]
    fn every_sample_is_well_formed_and_its_own() {
        let mut seen = HashSet::new();
        for provider in providers() {
            assert!(seen.insert(provider), "{provider} twice");
            let make = |token: &str| event(provider, None, &SampleId::made_up(token, at()));
            let first = make("a1").expect("there");
            assert_eq!(make("a1"), Some(first.clone()), "{provider}: the same id, the same bytes");
            let second = make("a2").expect("there");
            assert_ne!(first, second, "{provider}: another id, another event");
            assert!(!first.body.contains(['<', '>', '\n']), "{provider}");
            if first.content_type == "application/json" {
                let read = serde_json::from_str::<serde_json::Value>(&first.body);
                assert!(read.is_ok(), "{provider}: {:?}", read.err());
            }
            let hostile = SampleId::exact("a\"b<c>&d=é", at());
            let hostile = event(provider, Some("x\"<y>&z"), &hostile).expect("there");
            if hostile.content_type == "application/json" {
                assert!(
                    serde_json::from_str::<serde_json::Value>(&hostile.body).is_ok(),
                    "{provider}"
                );
            }
        }
        assert_eq!(seen.len(), 55);
        assert_eq!(event("nobody", None, &SampleId::made_up("a", at())), None);
    }

    #[test]
    fn a_payout_of_stripe_looks_like_one() {
        let read = |event_type: Option<&str>, id: &SampleId| {
            let sample = event("stripe", event_type, id).expect("there");
            serde_json::from_str::<serde_json::Value>(&sample.body).expect("JSON")
        };
        let payout = read(Some("payout.paid"), &SampleId::exact("evt_42", at()));
        assert_eq!(payout["id"], "evt_42");
        assert_eq!(payout["type"], "payout.paid");
        assert_eq!(payout["created"], 1_767_225_600);
        assert_eq!(payout["data"]["object"]["amount"], 10_000);
        assert_eq!(payout["data"]["object"]["object"], "payout");
        let id = payout["data"]["object"]["id"].as_str().expect("text");
        assert!(id.starts_with("po_"), "{id}");
        let charge = read(Some("charge.succeeded"), &SampleId::made_up("7", at()));
        assert_eq!(charge["id"], "evt_7");
        assert_eq!(charge["data"]["object"]["object"], "charge");
    }

    #[test]
    fn ids_stand_where_each_sender_has_them() {
        let header = |provider: &str, name: &str, id: &SampleId| {
            let sample = event(provider, None, id).expect("there");
            sample.headers.into_iter().find(|(n, _)| *n == name).map(|(_, value)| value)
        };
        let exact = SampleId::exact("d-1", at());
        assert_eq!(header("github", "X-GitHub-Delivery", &exact).as_deref(), Some("d-1"));
        assert_eq!(header("svix", "svix-id", &exact).as_deref(), Some("d-1"));
        let made_up = SampleId::made_up("1", at());
        assert_eq!(header("svix", "svix-id", &made_up).as_deref(), Some("msg_1"));
        assert_eq!(header("github", "X-GitHub-Delivery", &made_up).map(|id| id.len()), Some(36));
        let hubspot = event("hubspot", None, &SampleId::exact("77", at())).expect("there");
        assert!(hubspot.body.contains("\"eventId\":77,"), "{}", hubspot.body);
    }

    #[test]
    fn values_can_be_set_by_pointer() {
        let mut body = serde_json::json!({ "a": { "b": [1, 2] } });
        set(&mut body, "/a/b/1", 9.into()).expect("set");
        set(&mut body, "/new/deep~1er", "x".into()).expect("set");
        assert_eq!(body, serde_json::json!({ "a": { "b": [1, 9] }, "new": { "deep/er": "x" } }));
        assert_eq!(set(&mut body, "/a/b/2", 0.into()), Err(SetError::Nothing("/a/b/2".into())));
        assert_eq!(set(&mut body, "/a/b/0/c", 0.into()), Err(SetError::Nothing("/a/b/0/c".into())));
        assert_eq!(set(&mut body, "a", 0.into()), Err(SetError::Pointer(PointerError::NoSlash)));
        set(&mut body, "", 0.into()).expect("set");
        assert_eq!(body, 0);
    }
}
