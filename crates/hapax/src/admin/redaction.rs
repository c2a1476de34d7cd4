//! `redact`: the values of a source that only tokens with `payload` or `admin` see.

use std::collections::HashMap;

use arc_swap::ArcSwap;
use hapax_core::json;

use crate::api::{Body, Event};
use crate::config::Redaction;

/// The text that is shown instead of a value.
const MASK: &str = "[redacted]";

/// The values that the current configuration masks, by source.
#[derive(Debug, Default)]
pub(crate) struct Redactions(ArcSwap<HashMap<String, Redaction>>);

impl Redactions {
    /// Every configured source, and the values that it masks.
    pub(crate) fn new(sources: impl IntoIterator<Item = (String, Redaction)>) -> Self {
        let redactions = Self::default();
        redactions.reload(sources);
        redactions
    }

    /// Replaces the rules, from the next request on.
    pub(crate) fn reload(&self, sources: impl IntoIterator<Item = (String, Redaction)>) {
        self.0.store(sources.into_iter().collect::<HashMap<_, _>>().into());
    }

    /// Whether a caller who must not see masked values may search in the bodies of this source, or of all sources:
    /// what a search finds would reveal a masked value letter by letter.
    pub(super) fn may_search(&self, source: Option<&str>) -> bool {
        let rules = self.0.load();
        match source {
            Some(source) => rules.get(source).is_some_and(Redaction::is_empty),
            None => rules.values().all(Redaction::is_empty),
        }
    }

    /// Masks the values of an event that its source names. For a source that is not configured any
    /// more, these names are unknown, so all bodies and header values of its events are masked.
    pub(super) fn mask(&self, event: &mut Event) {
        let rules = self.0.load();
        let Some(redaction) = rules.get(&event.summary.source) else {
            let arrived = event.arrivals.iter_mut().map(|arrival| &mut arrival.body);
            for body in arrived.chain([&mut event.body]).filter(|body| **body != Body::default()) {
                *body = Body { body: Some(MASK.to_owned()), body_base64: None };
            }
            event.headers.iter_mut().for_each(|(_, value)| *value = MASK.to_owned());
            return;
        };
        mask_body(redaction, &mut event.body);
        for arrival in &mut event.arrivals {
            mask_body(redaction, &mut arrival.body);
        }
        for (name, value) in &mut event.headers {
            if redaction.headers.iter().any(|masked| masked.eq_ignore_ascii_case(name)) {
                *value = MASK.to_owned();
            }
        }
    }
}

/// Masks the values that pointers name. A body in which they cannot be found for sure, because it is no JSON
/// or has two readings, is masked as a whole.
fn mask_body(redaction: &Redaction, body: &mut Body) {
    if redaction.pointers.is_empty() || *body == Body::default() {
        return;
    }
    let masked = body.body.as_deref().and_then(|text| {
        let spans = json::spans(text.as_bytes(), &redaction.pointers).ok()?;
        let mut masked = String::with_capacity(text.len());
        let mut from = 0;
        for (start, end) in spans {
            masked.push_str(&text[from..start]);
            masked.push_str(&format!("\"{MASK}\""));
            from = end;
        }
        masked.push_str(&text[from..]);
        Some(masked)
    });
    *body = Body { body: Some(masked.unwrap_or_else(|| MASK.to_owned())), body_base64: None };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pointers: &[&str], body: &[u8], expected: &str) {
        let pointers = pointers.iter().map(|text| json::Pointer::parse(text).unwrap()).collect();
        let mut body = Body::of(body);
        mask_body(&Redaction { pointers, headers: Vec::new() }, &mut body);
        assert_eq!(body, Body::of(expected.as_bytes()));
    }

    #[test]
    fn the_named_values_are_masked_and_every_other_byte_stays() {
        let body = br#"{"id":1, "email":"a@b.c","card":{"n":[4,2]},"n":9007199254740993}"#;
        let both = r#"{"id":1, "email":"[redacted]","card":"[redacted]","n":9007199254740993}"#;
        check(&["/email", "/card", "/card/n"], body, both);
        check(&["/nothing"], body, std::str::from_utf8(body).unwrap());
        check(&[], b"email=a@b.c", "email=a@b.c");
    }

    #[test]
    fn a_body_in_which_a_value_may_hide_is_masked_as_a_whole() {
        check(&["/email"], br#"{"email":1,"email":"a@b.c"}"#, MASK);
        check(&["/email"], br#"{"\u0065mail":"a@b.c","email":1}"#, MASK);
        check(&["/email"], br#"{"email":"\ud800a@b.c"}"#, MASK);
        check(&["/email"], b"email=a@b.c", MASK);
        check(&["/email"], b"\xff\xfe", MASK);
    }
}
