//! Messages: their content, their ids, and the exact bytes that endpoints get.
//!
//! A message is identified by its tenant and id. The [`fingerprint`](NewMessage::fingerprint) recognises
//! another message under the same id. `data` is a slice of the publisher's own text: nothing parses and
//! prints it again, so that numbers, key order and spaces reach every endpoint as they were given.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::json::{self, Pointer};
use crate::key::{KeyHash, Tenant};
use crate::limits::{MESSAGE_DATA_BYTES_MAX, MESSAGE_ID_CHARS_MAX, MESSAGE_NAME_BYTES_MAX};

/// The tenant of messages that Hapax publishes about itself. No other publisher may use this tenant.
pub const OWN_TENANT: &str = "hapax";

/// Why nothing else may belong to that tenant.
pub fn own_tenant_fault() -> String {
    format!("the tenant {OWN_TENANT:?} is reserved for messages of Hapax itself")
}

/// The beginning of the types of those messages.
const OWN_TYPES: &str = "hapax.";

/// A message to be published with a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewMessage {
    /// The type of the message, such as `invoice.paid`. Endpoints choose messages by type.
    pub r#type: String,
    /// The content, as JSON text.
    pub data: MessageData,
    /// The order key: messages with the same key are numbered in the order of their commits.
    #[serde(default)]
    pub key: Option<String>,
    /// The owner. Without one, the message belongs to the tenant of the event that it is published for,
    /// or to `default`.
    #[serde(default)]
    pub tenant: Option<String>,
    /// The id; the same id twice is one message. If it is missing, the store makes an id.
    #[serde(default)]
    pub id: Option<String>,
    /// The version of the publisher's API that `data` follows.
    #[serde(default)]
    pub api_version: Option<String>,
}

impl NewMessage {
    /// A message of this type and content, with nothing else set.
    pub fn new(r#type: impl Into<String>, data: impl Into<MessageData>) -> Self {
        Self {
            r#type: r#type.into(),
            data: data.into(),
            key: None,
            tenant: None,
            id: None,
            api_version: None,
        }
    }

    /// The same message under this id.
    pub fn with_id(self, id: impl Into<String>) -> Self {
        Self { id: Some(id.into()), ..self }
    }

    /// The same message with this order key.
    pub fn with_key(self, key: impl Into<String>) -> Self {
        Self { key: Some(key.into()), ..self }
    }

    /// The same message of this tenant.
    pub fn with_tenant(self, tenant: impl Into<String>) -> Self {
        Self { tenant: Some(tenant.into()), ..self }
    }

    /// The same message with this version of the publisher's API.
    pub fn with_api_version(self, api_version: impl Into<String>) -> Self {
        Self { api_version: Some(api_version.into()), ..self }
    }

    /// Why no store accepts this message, if so. Callers report the reason before the message becomes part of
    /// a commit, because every attempt of that commit would be refused.
    pub fn fault(&self) -> Option<String> {
        let names = [
            ("type", Some(&self.r#type)),
            ("key", self.key.as_ref()),
            ("tenant", self.tenant.as_ref()),
            ("api_version", self.api_version.as_ref()),
        ];
        let name_fault = names.into_iter().find_map(|(name, value)| name_fault(name, value?));
        name_fault.or_else(|| self.id.as_deref().and_then(id_fault)).or_else(|| {
            if self.tenant.as_deref() == Some(OWN_TENANT) || self.r#type.starts_with(OWN_TYPES) {
                return Some(format!(
                    "the tenant {OWN_TENANT:?} and types that begin with {OWN_TYPES:?} are reserved for \
                     messages of Hapax itself"
                ));
            }
            let bytes = self.data.as_str().len();
            (bytes > MESSAGE_DATA_BYTES_MAX).then(|| {
                format!(
                    "the data of a message has {bytes} bytes; the most is {MESSAGE_DATA_BYTES_MAX}"
                )
            })
        })
    }

    /// Recognises the content of a message: type, key, version and data as given. The same id with another
    /// fingerprint is a conflict.
    pub fn fingerprint(&self) -> KeyHash {
        let optional = |value: &Option<String>| match value {
            None => vec![0],
            Some(text) => [&[1], text.as_bytes()].concat(),
        };
        let (key, version) = (optional(&self.key), optional(&self.api_version));
        KeyHash::of(
            b"message content",
            [self.r#type.as_bytes(), &key, &version, self.data.as_str().as_bytes()],
        )
    }

    /// The bytes that endpoints get, made once when the message is published, and stored.
    pub fn envelope(&self, stamp: &Stamp<'_>, payload: Payload) -> String {
        let thin;
        let data = match payload {
            Payload::Fat => self.data.as_str(),
            Payload::Thin => {
                thin = self.data.thin();
                &thin
            }
        };
        let text = |text: &str| serde_json::Value::from(text).to_string();
        let version = self.api_version.as_deref().map_or_else(|| "null".to_owned(), text);
        let sequence = match stamp.sequence {
            None => String::new(),
            Some(sequence) => format!(",\"sequence\":{sequence}"),
        };
        format!(
            "{{\"id\":{},\"type\":{},\"created_at\":\"{}\",\"api_version\":{version},\"data\":{data}{sequence}}}",
            text(stamp.id),
            text(&self.r#type),
            stamp.created_at,
        )
    }
}

/// The values that a store adds to a message when it publishes the message.
#[derive(Debug, Clone, Copy)]
pub struct Stamp<'a> {
    /// The id.
    pub id: &'a str,
    /// When it was published.
    pub created_at: Timestamp,
    /// Its number among the messages with the same key; `None` without a key.
    pub sequence: Option<u64>,
}

/// How much of a message an endpoint gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Payload {
    /// All of `data`.
    #[default]
    Fat,
    /// Only `data.id` and `data.object`: the receiver fetches the rest.
    Thin,
}

/// The bytes for an endpoint that wants thin payloads, from the stored bytes of a message, thin or
/// not. [`NewMessage::envelope`] makes the same bytes. `None` if `body` is not an envelope.
pub fn thin_envelope(body: &[u8]) -> Option<Vec<u8>> {
    // Inside a string every quote is escaped, so this is the key itself.
    const DATA: &str = ",\"data\":";
    let body = std::str::from_utf8(body).ok()?;
    let (head, rest) = body.split_at(body.find(DATA)? + DATA.len());
    let data = serde_json::Deserializer::from_str(rest).into_iter::<&RawValue>().next()?.ok()?;
    let tail = rest.strip_prefix(data.get())?;
    let thin = MessageData(data.to_owned()).thin();
    Some([head, &thin, tail].concat().into_bytes())
}

/// The key under which a message id is known: at most one message exists for each tenant and id.
pub fn message_key(tenant: &Tenant, id: &str) -> KeyHash {
    KeyHash::of(b"message", [tenant.as_str().as_bytes(), id.as_bytes()])
}

/// JSON text as its publisher wrote it.
#[derive(Clone)]
pub struct MessageData(Box<RawValue>);

impl MessageData {
    /// Takes JSON text as it is, if it is JSON.
    pub fn parse(text: impl Into<String>) -> Result<Self, serde_json::Error> {
        RawValue::from_string(text.into()).map(Self)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        self.0.get()
    }

    /// The object with only `id` and `object` left, each as it was given.
    pub fn thin(&self) -> String {
        let kept = ["/id", "/object"].map(|pointer| Pointer::parse(pointer).expect("a pointer"));
        // If the data cannot be read (an array, a repeated key), both fields are left out.
        let found = json::extract(self.as_str().as_bytes(), &kept).unwrap_or_default();
        let fields: Vec<String> = ["id", "object"]
            .iter()
            .zip(found)
            .filter_map(|(name, value)| Some(format!("\"{name}\":{}", value?.raw())))
            .collect();
        format!("{{{}}}", fields.join(","))
    }
}

impl FromStr for MessageData {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, serde_json::Error> {
        Self::parse(text)
    }
}

impl From<serde_json::Value> for MessageData {
    fn from(value: serde_json::Value) -> Self {
        Self::parse(value.to_string()).expect("a JSON value prints as JSON")
    }
}

impl PartialEq for MessageData {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for MessageData {}

impl fmt::Debug for MessageData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageData({} bytes)", self.as_str().len())
    }
}

impl Serialize for MessageData {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for MessageData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Box::<RawValue>::deserialize(deserializer).map(Self)
    }
}

/// Why `id` cannot be the id of a message, if so.
pub fn id_fault(id: &str) -> Option<String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    match id.len() {
        0 => Some("the id of a message is empty".to_owned()),
        1..=MESSAGE_ID_CHARS_MAX if id.bytes().all(allowed) => None,
        1..=MESSAGE_ID_CHARS_MAX => {
            Some("the id of a message may contain only A-Z, a-z, 0-9, _ and -".to_owned())
        }
        _too_long => {
            Some(format!("the id of a message is longer than {MESSAGE_ID_CHARS_MAX} characters"))
        }
    }
}

fn name_fault(name: &str, value: &str) -> Option<String> {
    match value.len() {
        0 => Some(format!("the {name} of a message is empty")),
        1..=MESSAGE_NAME_BYTES_MAX if value.chars().any(char::is_control) => {
            Some(format!("the {name} of a message contains a control character"))
        }
        1..=MESSAGE_NAME_BYTES_MAX => None,
        _too_long => {
            Some(format!("the {name} of a message is longer than {MESSAGE_NAME_BYTES_MAX} bytes"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(data: &str) -> NewMessage {
        NewMessage::new("invoice.paid", MessageData::parse(data).unwrap())
    }

    fn stamp(sequence: Option<u64>) -> Stamp<'static> {
        Stamp { id: "msg_1", created_at: "2026-03-01T12:00:00Z".parse().unwrap(), sequence }
    }

    // Spaces, the order of keys, and a number that no parser here can represent must all be kept.
    #[test]
    fn stored_bytes_become_the_thin_ones_that_publishing_would_have_made() {
        // Data with spaces, a nested "data", a type that looks like the key, and no object at all.
        for data in [
            r#"{ "id" : "inv_1", "data":{"id":2}, "object" :{"a": [1, 2]}, "n":1e400 }"#,
            r#"{"id":9007199254740993}"#,
            "[1,2]",
            "7",
        ] {
            for sequence in [None, Some(12)] {
                let kind = "odd \",\"data\":{}";
                let message = NewMessage::new(kind, MessageData::parse(data).unwrap());
                let stamp = Stamp { id: "m1", created_at: Timestamp::UNIX_EPOCH, sequence };
                let thin = message.envelope(&stamp, Payload::Thin).into_bytes();
                let fat = message.envelope(&stamp, Payload::Fat);
                assert_eq!(thin_envelope(fat.as_bytes()).as_ref(), Some(&thin), "{data}");
                assert_eq!(thin_envelope(&thin).as_ref(), Some(&thin), "{data}");
            }
        }
        assert_eq!(thin_envelope(b"{}"), None);
    }

    #[test]
    fn data_reaches_the_endpoint_as_it_was_given() {
        let data = "{\"b\": 1e400, \"a\" :9007199254740993,\"s\":\"\\u00e9\\/\"}";
        assert_eq!(
            message(data).envelope(&stamp(None), Payload::Fat),
            format!(
                "{{\"id\":\"msg_1\",\"type\":\"invoice.paid\",\"created_at\":\"2026-03-01T12:00:00Z\",\
                 \"api_version\":null,\"data\":{data}}}"
            )
        );
        let keyed = message("1").with_api_version("v\"2").envelope(&stamp(Some(7)), Payload::Fat);
        assert!(
            keyed.ends_with("\"api_version\":\"v\\\"2\",\"data\":1,\"sequence\":7}"),
            "{keyed}"
        );
    }

    #[test]
    fn a_thin_payload_keeps_id_and_object_only() {
        let check = |data: &str, expected: &str| {
            let body = message(data).envelope(&stamp(None), Payload::Thin);
            assert!(body.ends_with(&format!("\"data\":{expected}}}")), "{body}");
        };
        check(
            "{\"object\":\"invoice\",\"id\": 12.0,\"amount\":5}",
            "{\"id\":12.0,\"object\":\"invoice\"}",
        );
        check("{\"id\":{\"x\":[1]}}", "{\"id\":{\"x\":[1]}}");
        check("{\"amount\":5}", "{}");
        check("[1,2]", "{}");
        check("null", "{}");
    }

    #[test]
    fn a_fingerprint_covers_every_part_and_no_part_runs_into_another() {
        let base = message("{}");
        let others = [
            message("{ }"),
            NewMessage::new("invoice.paid2", base.data.clone()),
            base.clone().with_key(""),
            base.clone().with_key("k"),
            base.clone().with_api_version("k"),
        ];
        for other in &others {
            assert_ne!(base.fingerprint(), other.fingerprint(), "{other:?}");
        }
        assert_ne!(others[3].fingerprint(), others[4].fingerprint());
        // Identity is the id and the tenant; neither is content.
        assert_eq!(base.fingerprint(), base.clone().with_id("x").with_tenant("y").fingerprint());
    }

    #[test]
    fn a_message_that_no_store_accepts_is_refused_with_its_reason() {
        let check = |message: NewMessage, expected: Option<&str>| {
            let fault = message.fault();
            match expected {
                None => assert_eq!(fault, None),
                Some(part) => assert!(fault.as_deref().unwrap_or("").contains(part), "{fault:?}"),
            }
        };
        check(message("{}"), None);
        check(message("{}").with_id("A-z_09"), None);
        check(message("{}").with_id("a".repeat(128)), None);
        check(message("{}").with_id("a".repeat(129)), Some("longer than 128"));
        check(message("{}").with_id(""), Some("id of a message is empty"));
        check(message("{}").with_id("a.b"), Some("may contain only"));
        check(message("{}").with_key(""), Some("key of a message is empty"));
        check(message("{}").with_key("a\nb"), Some("control character"));
        check(message("{}").with_tenant("hapax"), Some("reserved"));
        check(NewMessage::new("hapax.alert.raised", message("{}").data), Some("reserved"));
        check(NewMessage::new("t".repeat(256), message("{}").data), Some("longer than 255"));
        check(message(&format!("\"{}\"", "x".repeat(1 << 20))), Some("the most is"));
    }
}
