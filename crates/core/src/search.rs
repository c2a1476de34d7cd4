//! Values of events that operators search for. A source names the fields in `search`. A store keeps the hash
//! of each value beside its event, and finds all events with a value by that hash.
//!
//! A hash also covers the source and the pointer. So each search decides which fields it may use: it leaves
//! out the hashes of values that are redacted for the caller, and of fields that the source no longer names.

use std::collections::BTreeMap;

use crate::json::{self, Pointer};
use crate::key::{KeyHash, SourceName};
use crate::limits::SEARCH_VALUE_BYTES_MAX;

/// The values that each source names in `search`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SearchFields(BTreeMap<SourceName, Vec<Pointer>>);

impl SearchFields {
    /// The fields of these sources. A source without any is left out.
    pub fn new(sources: impl IntoIterator<Item = (SourceName, Vec<Pointer>)>) -> Self {
        Self(sources.into_iter().filter(|(_, fields)| !fields.is_empty()).collect())
    }

    /// Whether no source names any.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sources that name values.
    pub fn sources(&self) -> impl Iterator<Item = &SourceName> {
        self.0.keys()
    }

    /// Identifies the set of fields. An index that was built for other fields has to be completed.
    pub fn fingerprint(&self) -> KeyHash {
        let parts = self.0.iter().flat_map(|(source, fields)| {
            // No field has an empty pointer, so an empty part marks the end of a source.
            [source.as_str()].into_iter().chain(fields.iter().map(Pointer::as_str)).chain([""])
        });
        KeyHash::of(b"search fields", parts.map(str::as_bytes))
    }

    /// The hashes of the values that an event has, sorted, each once. A body that is not JSON has none. Only
    /// strings and integers of at most [`SEARCH_VALUE_BYTES_MAX`] bytes count.
    pub fn values_of(&self, source: &SourceName, body: &[u8]) -> Vec<KeyHash> {
        let found = self.found_in(source, body);
        let mut hashes: Vec<KeyHash> = found.into_iter().map(|value| value.hash).collect();
        hashes.sort_unstable();
        hashes.dedup();
        hashes
    }

    /// The values that an event has, in the order of the fields. The same values as those of [`Self::values_of`].
    pub fn found_in(&self, source: &SourceName, body: &[u8]) -> Vec<FoundValue<'_>> {
        let Some(fields) = self.0.get(source) else { return Vec::new() };
        let Ok(found) = json::extract(body, fields) else { return Vec::new() };
        let values = fields.iter().zip(found).filter_map(|(field, value)| {
            let text = value?.as_id_text()?.into_owned();
            Some(FoundValue { hash: hash(source, field, &text)?, field, text })
        });
        values.collect()
    }

    /// The hashes under which events with this value are found, in the fields that `may` allows.
    pub fn hashes(&self, text: &str, may: impl Fn(&SourceName, &Pointer) -> bool) -> Vec<KeyHash> {
        let named = self.0.iter().flat_map(|(source, fields)| {
            fields
                .iter()
                .map(move |field| (source, field))
                .filter(|(source, field)| may(source, field))
        });
        named.filter_map(|(source, field)| hash(source, field, text)).collect()
    }
}

/// A value of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundValue<'a> {
    /// The field that holds it.
    pub field: &'a Pointer,
    /// The value as text.
    pub text: String,
    /// The hash under which it is indexed.
    pub hash: KeyHash,
}

fn hash(source: &SourceName, field: &Pointer, value: &str) -> Option<KeyHash> {
    let fits = !value.is_empty() && value.len() <= SEARCH_VALUE_BYTES_MAX;
    fits.then(|| {
        let parts = [source.as_str(), field.as_str(), value];
        KeyHash::of(b"search value", parts.map(str::as_bytes))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(named: &[(&str, &[&str])]) -> SearchFields {
        let pointers =
            |texts: &[&str]| texts.iter().map(|text| Pointer::parse(text).unwrap()).collect();
        SearchFields::new(
            named.iter().map(|(source, texts)| (SourceName::new(source), pointers(texts))),
        )
    }

    #[test]
    fn strings_and_integers_are_found_by_their_text_and_nothing_else_is() {
        let shop = SourceName::new("shop");
        let named = fields(&[("shop", &["/customer", "/n", "/deep/0", "/absent"])]);
        let long = "x".repeat(SEARCH_VALUE_BYTES_MAX + 1);
        let check = |body: &str, text: &str, found: bool| {
            let values = named.values_of(&shop, body.as_bytes());
            let asked = named.hashes(text, |_, _| true);
            assert_eq!(asked.iter().any(|hash| values.contains(hash)), found, "{text} in {body}");
        };
        check(r#"{"customer":"cus_1"}"#, "cus_1", true);
        check(r#"{"customer":"caf\u00e9"}"#, "café", true);
        check(r#"{"n":9007199254740993}"#, "9007199254740993", true);
        check(r#"{"deep":["a"]}"#, "a", true);
        check(r#"{"customer":"cus_1"}"#, "cus_", false);
        check(r#"{"other":"cus_1"}"#, "cus_1", false);
        check(r#"{"customer":{"id":"cus_1"}}"#, "cus_1", false);
        check(r#"{"n":1.5}"#, "1.5", false);
        check(r#"{"customer":""}"#, "", false);
        check(&format!(r#"{{"customer":"{long}"}}"#), &long, false);
        check("customer=cus_1", "cus_1", false);
        // The body has two readings.
        check(r#"{"customer":"cus_1","customer":"cus_2"}"#, "cus_1", false);
        // A value under two fields has one hash for each field.
        assert_eq!(named.values_of(&shop, br#"{"customer":"1","n":1}"#).len(), 2);
    }

    #[test]
    fn a_value_of_another_source_or_of_a_field_that_is_left_out_is_not_asked_for() {
        let (shop, bank) = (SourceName::new("shop"), SourceName::new("bank"));
        let named = fields(&[("shop", &["/a", "/b"]), ("bank", &["/a"]), ("none", &[])]);
        assert_eq!(named.sources().collect::<Vec<_>>(), [&bank, &shop]);
        let of_shop = named.values_of(&shop, br#"{"a":"v"}"#);
        assert_ne!(of_shop, named.values_of(&bank, br#"{"a":"v"}"#));
        assert_eq!(named.hashes("v", |_, _| true).len(), 3);
        let without_a = named.hashes("v", |_, field| field.as_str() != "/a");
        assert!(!without_a.contains(&of_shop[0]));
        assert_eq!(without_a.len(), 1);
    }

    #[test]
    fn other_fields_have_another_fingerprint() {
        // If the parts were only joined, some of these would have equal hashes.
        let all = [
            fields(&[]),
            fields(&[("a", &["/b"])]),
            fields(&[("a", &["/b", "/c"])]),
            fields(&[("a", &["/b"]), ("c", &["/b"])]),
            fields(&[("a", &["/b/c"])]),
        ];
        for (n, one) in all.iter().enumerate() {
            assert!(all[..n].iter().all(|other| other.fingerprint() != one.fingerprint()), "{n}");
        }
    }
}
