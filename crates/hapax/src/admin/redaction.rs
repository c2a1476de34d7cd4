//! `redact`: the values of a source that only tokens with `payload` or `admin` see.

use std::collections::HashMap;

use arc_swap::ArcSwap;
use hapax_core::{SourceName, json};

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

    /// The sources whose bodies may be searched by a caller who must not see masked values. In the other
    /// bodies, search results would reveal a masked value letter by letter.
    pub(super) fn searchable(&self) -> Vec<SourceName> {
        let rules = self.0.load();
        let open = rules.iter().filter(|(_, redaction)| redaction.pointers.is_empty());
        let mut sources: Vec<_> = open.map(|(source, _)| SourceName::new(source)).collect();
        sources.sort_unstable();
        sources
    }

    /// Whether a value of a source is neither masked nor part of a masked one.
    pub(super) fn shows(&self, source: &SourceName, pointer: &json::Pointer) -> bool {
        let is_within = |masked: &json::Pointer| {
            let mut keys = pointer.keys();
            masked.keys().all(|key| keys.next() == Some(key))
        };
        let rules = self.0.load();
        rules.get(source.as_str()).is_some_and(|rule| !rule.pointers.iter().any(is_within))
    }

    /// Masks the values of an event that its source names. For a source that is no longer
    /// configured, these names are unknown, so all bodies and header values of its events are
    /// masked.
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

/// Masks the values that pointers name. A body is masked as a whole if they cannot be located reliably,
/// because it is not JSON or has two readings.
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
    fn a_value_is_searched_only_if_it_is_not_masked_nor_part_of_a_masked_one() {
        let pointer = |text: &str| json::Pointer::parse(text).unwrap();
        let masked = ["/email", "/card/number"].map(pointer);
        let rule = Redaction { pointers: masked.into(), headers: Vec::new() };
        let headers = Redaction { pointers: Vec::new(), headers: vec!["x-user".to_owned()] };
        let sources = [("shop", rule), ("bank", headers), ("mail", Redaction::default())];
        let rules = Redactions::new(sources.map(|(name, rule)| (name.to_owned(), rule)));
        let check = |source: &str, text: &str, shown: bool| {
            assert_eq!(
                rules.shows(&SourceName::new(source), &pointer(text)),
                shown,
                "{source} {text}"
            );
        };
        check("shop", "/customer", true);
        check("shop", "/emails", true);
        check("shop", "/card/name", true);
        check("shop", "/email", false);
        check("shop", "/card/number", false);
        check("shop", "/card/number/last4", false);
        check("bank", "/email", true);
        check("gone", "/customer", false);
        let searchable = rules.searchable();
        assert_eq!(searchable, ["bank", "mail"].map(SourceName::new));
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
