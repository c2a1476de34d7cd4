//! Values that several requests and answers share: durations, instants, bodies, and the schemas of the
//! words that core defines.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::{EndpointOrder, OnDead};
use hapax_core::endpoint_secret::Signing;
use hapax_core::job::Phase;
use hapax_core::message::Payload;
use hapax_core::store::{
    Decision, PlanState, PlannedDeliveries, PortalRight, ReviewReason, Status,
};
use serde::de::{self, DeserializeOwned, Visitor, value::Error as ValueError};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::config::units;

/// A duration: `"5m"`, or a number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0.as_secs_f64())
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfSpan;
        impl Visitor<'_> for OfSpan {
            type Value = Span;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as \"5m\", or a number of seconds")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Span, E> {
                let seconds = text.parse().ok().map(Duration::from_secs);
                match seconds.map_or_else(|| units::duration(text), Ok) {
                    Ok(duration) => Ok(Span(duration)),
                    Err(invalid) => {
                        Err(E::custom(format!("{}: {}", invalid.problem, invalid.hint)))
                    }
                }
            }

            fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<Span, E> {
                Ok(Span(Duration::from_secs(seconds)))
            }

            fn visit_f64<E: de::Error>(self, seconds: f64) -> Result<Span, E> {
                Duration::try_from_secs_f64(seconds).map(Span).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(OfSpan)
    }
}

impl PartialSchema for Span {
    fn schema() -> RefOr<Schema> {
        text_or_number("A duration such as `5m`, or a number of seconds.")
    }
}

impl ToSchema for Span {}

/// An instant: RFC 3339, or a duration before now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    At(Timestamp),
    Ago(Span),
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::At(at) => serializer.collect_str(at),
            Self::Ago(Span(span)) => {
                serializer.collect_str(&format_args!("{}ms", span.as_millis()))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Moment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if let Ok(at) = text.parse() {
            return Ok(Self::At(at));
        }
        units::duration(&text).map(|ago| Self::Ago(Span(ago))).map_err(|_| {
            de::Error::custom(
                "expected a time such as 2026-03-01T12:00:00Z, or a duration before now such as 1h",
            )
        })
    }
}

/// When a failed job is retried: after a duration, or never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryIn {
    Never,
    Span(Span),
}

impl Serialize for RetryIn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Never => serializer.serialize_str("never"),
            Self::Span(span) => span.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for RetryIn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        if value == "never" {
            return Ok(Self::Never);
        }
        let bad = "retry_in must be a duration such as \"5m\", a number of seconds, or \"never\"";
        Span::deserialize(value).map(Self::Span).map_err(|_| de::Error::custom(bad))
    }
}

impl PartialSchema for RetryIn {
    fn schema() -> RefOr<Schema> {
        text_or_number("A duration such as `5m`, a number of seconds, or `never`.")
    }
}

impl ToSchema for RetryIn {}

fn text_or_number(description: &str) -> RefOr<Schema> {
    let schema_type = SchemaType::from_iter([Type::String, Type::Number]);
    ObjectBuilder::new().schema_type(schema_type).description(Some(description)).into()
}

/// The bytes of a body, as one of two fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Body {
    /// The bytes, if they are UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) body: Option<String>,
    /// The bytes, if they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) body_base64: Option<String>,
}

impl Body {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self { body: Some(text.to_owned()), body_base64: None },
            Err(_) => Self { body: None, body_base64: Some(BASE64_STANDARD.encode(bytes)) },
        }
    }
}

/// The schema of [`Status`].
pub(super) type StatusWord = Word<Status>;
/// The schema of [`Phase`].
pub(super) type PhaseWord = Word<Phase>;
/// The schema of [`DeliveryStatus`].
pub(super) type DeliveryStatusWord = Word<DeliveryStatus>;
/// The schema of [`Payload`].
pub(super) type PayloadWord = Word<Payload>;
/// The schema of [`EndpointOrder`].
pub(super) type EndpointOrderWord = Word<EndpointOrder>;
/// The schema of [`Signing`].
pub(super) type SigningWord = Word<Signing>;
/// The schema of [`OnDead`].
pub(super) type OnDeadWord = Word<OnDead>;
/// The schema of [`PlannedDeliveries`].
pub(super) type PlannedDeliveriesWord = Word<PlannedDeliveries>;
/// The schema of [`PlanState`].
pub(super) type PlanStateWord = Word<PlanState>;
/// The schema of [`Decision`].
pub(super) type DecisionWord = Word<Decision>;
/// The schema of [`PortalRight`].
pub(super) type PortalRightWord = Word<PortalRight>;
/// The schema of [`ReviewReason`].
pub(super) type ReviewReasonWord = Word<ReviewReason>;

/// The schema of an enum of core, which knows nothing of OpenAPI. Name and words are those that serde reads.
pub(super) struct Word<T>(PhantomData<T>);

impl<T: DeserializeOwned> PartialSchema for Word<T> {
    fn schema() -> RefOr<Schema> {
        let (_, words) = name_and_words::<T>();
        let words = words.iter().copied();
        ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words)).into()
    }
}

impl<T: DeserializeOwned> ToSchema for Word<T> {
    fn name() -> Cow<'static, str> {
        name_and_words::<T>().0.into()
    }
}

/// The name and the variants that the derived `Deserialize` of an enum asks for.
fn name_and_words<T: DeserializeOwned>() -> (&'static str, &'static [&'static str]) {
    let mut asked = None;
    let _ = T::deserialize(EnumRecorder(&mut asked));
    asked.expect("an enum asks for its variants")
}

/// A deserializer that only records what an enum asks for.
struct EnumRecorder<'a>(&'a mut Option<(&'static str, &'static [&'static str])>);

impl<'de> Deserializer<'de> for EnumRecorder<'_> {
    type Error = ValueError;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, ValueError> {
        Err(de::Error::custom("only an enum can be described"))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, ValueError> {
        *self.0 = Some((name, variants));
        Err(de::Error::custom("recorded"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_text_with_a_unit_or_a_number_of_seconds() {
        let check = |json: &str, expected: Option<u64>| {
            let read = serde_json::from_str::<Span>(json).ok();
            assert_eq!(read, expected.map(|ms| Span(Duration::from_millis(ms))), "{json}");
        };
        check("\"5m\"", Some(300_000));
        check("\"90\"", Some(90_000));
        check("2", Some(2_000));
        check("0.5", Some(500));
        check("-1", None);
        check("\"soon\"", None);
    }

    #[test]
    fn the_words_of_an_enum_are_those_that_serde_reads() {
        let (name, words) = name_and_words::<ReviewReason>();
        assert_eq!((name, words), ("ReviewReason", &["late", "replay", "conflict"][..]));
    }
}
