//! Reads a job's place in the order: two JSON pointers into the event's body. [`crate::order`] decides
//! about the job.

use jiff::Timestamp;

use super::HandlerError;
use crate::json::{self, Pointer, PointerError, Value};
use crate::limits::RESOURCE_BYTES_MAX;
use crate::order::{Machine, OrderPolicy, OrderRule, Position, ResourcePosition};

/// The order of a handler: where resource and position are read, and the rule.
#[derive(Debug)]
pub struct Order {
    /// Which jobs may run, and what happens at gaps.
    pub rule: OrderRule,
    /// `resource`, then `by` or `state`. Both are found in one pass.
    pointers: [Pointer; 2],
}

impl Order {
    /// Parses the selectors of the resource and of the position, which for a state machine is its
    /// `state`. The `field` of an error is `order.resource`, `order.by` or `order.state`.
    pub fn build(resource: &str, along: &str, rule: OrderRule) -> Result<Self, HandlerError> {
        let field = match rule.policy {
            OrderPolicy::Latest | OrderPolicy::Sequence { .. } => "order.by",
            OrderPolicy::Machine(_) => "order.state",
        };
        let pointers = [pointer("order.resource", resource)?, pointer(field, along)?];
        Ok(Self { rule, pointers })
    }

    /// The place of an event, or why it has none. The reason never quotes a value of the event.
    pub fn place(&self, body: &[u8]) -> Result<ResourcePosition, String> {
        let found = json::extract(body, &self.pointers)
            .map_err(|malformed| format!("cannot order this event: {malformed}"))?;
        let [resource, along] = &self.pointers;
        let value = |index: usize| found.get(index).copied().flatten();
        let named = |key: &str, pointer: &Pointer, problem: &str| {
            format!("cannot order this event: {key} ({}) {problem}", pointer.as_str())
        };
        Ok(ResourcePosition {
            resource: resource_of(value(0))
                .map_err(|problem| named("resource", resource, problem))?,
            position: match &self.rule.policy {
                OrderPolicy::Latest | OrderPolicy::Sequence { .. } => {
                    position_of(value(1)).map_err(|problem| named("by", along, problem))?
                }
                OrderPolicy::Machine(machine) => {
                    state_in(machine, value(1)).map_err(|problem| named("state", along, problem))?
                }
            },
        })
    }
}

fn resource_of(value: Option<Value<'_>>) -> Result<Box<str>, &'static str> {
    let text = there(value)?.as_id_text().ok_or("is neither text nor an integer")?;
    match text.len() {
        0 => Err("is empty"),
        1..=RESOURCE_BYTES_MAX if text.contains('\0') => Err("holds a NUL character"),
        1..=RESOURCE_BYTES_MAX => Ok(text.into()),
        _longer => Err("is longer than 255 bytes"),
    }
}

/// An integer is compared as it is written. A float would make neighbouring integers equal.
fn position_of(value: Option<Value<'_>>) -> Result<Position, &'static str> {
    let value = there(value)?;
    let neither = "is neither an integer nor an RFC 3339 time";
    let text = value.as_id_text().ok_or(neither)?;
    if value.raw().starts_with('"') {
        return rfc3339_microseconds(&text).map(Position).ok_or(neither);
    }
    text.parse().map(Position).map_err(|_| "does not fit into 64 bits")
}

fn state_in(machine: &Machine, value: Option<Value<'_>>) -> Result<Position, &'static str> {
    let text = there(value)?.as_id_text().ok_or("is neither text nor an integer")?;
    machine.position(&text).ok_or("is a state that appears in no transition")
}

fn there(value: Option<Value<'_>>) -> Result<Value<'_>, &'static str> {
    match value {
        Some(value) if value.is_null() => Err("is null"),
        Some(value) => Ok(value),
        None => Err("is missing"),
    }
}

/// Microseconds since the epoch, truncated. The timestamp parser accepts more than RFC 3339, such as a
/// zone in brackets or an offset without minutes, so the shape is checked first.
fn rfc3339_microseconds(text: &str) -> Option<i64> {
    let bytes = text.as_bytes();
    let (&last, seconds) = (bytes.last()?, bytes.get(..19)?);
    let shape = b"0000-00-00T00:00:00";
    let fits = |(byte, shape): (&u8, &u8)| match shape {
        b'0' => byte.is_ascii_digit(),
        b'T' => matches!(byte, b'T' | b't' | b' '),
        separator => byte == separator,
    };
    let rest = &bytes[19..];
    let fraction = match last {
        b'Z' | b'z' => rest.strip_suffix(&[last])?,
        _digit => match rest.split_at_checked(rest.len().checked_sub(6)?)? {
            (fraction, [b'+' | b'-', a, b, b':', c, d])
                if [a, b, c, d].iter().all(|byte| byte.is_ascii_digit()) =>
            {
                fraction
            }
            _no_offset => return None,
        },
    };
    let fraction_fits = match fraction {
        [] => true,
        [b'.', digits @ ..] => !digits.is_empty() && digits.iter().all(u8::is_ascii_digit),
        _other => false,
    };
    if !seconds.iter().zip(shape).all(fits) || !fraction_fits {
        return None;
    }
    let at: Timestamp = text.parse().ok()?;
    i64::try_from(at.as_nanosecond().div_euclid(1_000)).ok()
}

fn pointer(field: &'static str, text: &str) -> Result<Pointer, HandlerError> {
    let bad = |problem: String, hint: &str| HandlerError { field, problem, hint: hint.to_owned() };
    match Pointer::parse(text) {
        Ok(pointer) if pointer.keys().next().is_none() => Err(bad(
            "selects nothing".to_owned(),
            "a JSON pointer to one field of the event, such as \"/data/object/id\"",
        )),
        Ok(pointer) => Ok(pointer),
        Err(problem @ PointerError::NoSlash) => Err(bad(
            format!("\"{text}\": {problem}"),
            "order is read from the event's own JSON: write \"/data/object/id\"",
        )),
        Err(problem @ PointerError::BadEscape) => {
            Err(bad(format!("\"{text}\": {problem}"), "write \"~0\" where a key has a \"~\""))
        }
    }
}
