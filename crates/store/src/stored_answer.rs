//! Writes the headers of a stored answer to a column as JSON, and reads them again. JSON that a
//! user's own SQL wrote is read as far as possible and never fails: a retried request must get its
//! answer.

use hapax_core::ledger::StoredAnswer;
use http::StatusCode;
use serde_json::{Map, Value};

/// Headers as an array of pairs, which keeps order and repeated names.
pub(crate) fn as_pairs(headers: &[(String, String)]) -> Value {
    let pair = |(name, value): &(String, String)| Value::from(vec![name.as_str(), value.as_str()]);
    headers.iter().map(pair).collect()
}

/// The headers as an object of names to values, or to arrays of values if a name is repeated. A user's
/// own SQL would write headers in this form. The object keeps the order of the values of one name, but
/// not the order of the names.
pub(crate) fn as_object(headers: &[(String, String)]) -> Value {
    let mut object = Map::new();
    for (name, value) in headers {
        let value = Value::from(value.as_str());
        match object.get_mut(name) {
            None => drop(object.insert(name.clone(), value)),
            Some(Value::Array(several)) => several.push(value),
            Some(one) => *one = Value::Array(vec![one.take(), value]),
        }
    }
    Value::Object(object)
}

/// Reads either shape, and arrays of such objects. Numbers and booleans are read as their JSON
/// text; null and deeper nesting are ignored.
pub(crate) fn headers_of(kept: Value) -> Vec<(String, String)> {
    match kept {
        Value::Object(object) => {
            object.into_iter().flat_map(|(name, value)| of_name(&name, value)).collect()
        }
        Value::Array(all) => all
            .into_iter()
            .flat_map(|one| match one {
                Value::Array(pair) => of_pair(pair),
                object @ Value::Object(_) => headers_of(object),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
            })
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    }
}

fn of_pair(pair: Vec<Value>) -> Vec<(String, String)> {
    let mut parts = pair.into_iter();
    match (parts.next(), parts.next(), parts.next()) {
        (Some(Value::String(name)), Some(value), None) => of_name(&name, value),
        _no_pair => Vec::new(),
    }
}

fn of_name(name: &str, value: Value) -> Vec<(String, String)> {
    let values = match value {
        Value::Array(several) => several,
        one => vec![one],
    };
    let text_of = |value: Value| match value {
        Value::String(text) => Some(text),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    };
    values.into_iter().filter_map(text_of).map(|value| (name.to_owned(), value)).collect()
}

/// The answer of a row. A number that is not a status was written by hand: it becomes a 500,
/// because the intended status is unknown.
pub(crate) fn answer_of(status: i64, headers: Value, body: Vec<u8>) -> StoredAnswer {
    let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
    // A 1xx only announces an answer, and cannot be sent as one.
    let status = status.filter(|status| !status.is_informational());
    StoredAnswer {
        status: status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        headers: headers_of(headers),
        body: body.into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn owned(headers: &[(&str, &str)]) -> Vec<(String, String)> {
        headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn both_shapes_are_read_as_they_were_written() {
        // A name three times, with others between: the object may move names, but never the values
        // of one name.
        let headers = owned(&[("link", "1"), ("etag", "\"x\""), ("link", "2"), ("link", "3")]);
        assert_eq!(headers_of(as_pairs(&headers)), headers);
        let object = as_object(&headers);
        assert_eq!(object, json!({ "link": ["1", "2", "3"], "etag": "\"x\"" }));
        let mut read = headers_of(object);
        let mut expected = headers;
        read.sort_by(|one, other| one.0.cmp(&other.0));
        expected.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(read, expected);
    }

    #[test]
    fn json_of_a_user_is_read_as_far_as_possible() {
        // An error here would keep the answer from a client for the whole TTL.
        let check = |kept: Value, expected: &[(&str, &str)]| {
            assert_eq!(headers_of(kept.clone()), owned(expected), "{kept}");
        };
        check(json!(null), &[]);
        check(json!("x"), &[]);
        check(json!([]), &[]);
        check(json!({ "age": 5, "a": null, "b": true }), &[("age", "5"), ("b", "true")]);
        check(json!({ "a": ["x", 1, null, ["y"]] }), &[("a", "x"), ("a", "1")]);
        check(json!({ "a": { "b": "c" } }), &[]);
        check(json!([["b", "1"], ["a", 2], ["b", "3"]]), &[("b", "1"), ("a", "2"), ("b", "3")]);
        check(json!([["a"], ["a", "b", "c"], [1, "b"], "a", 7, null]), &[]);
        check(json!([{ "a": "1" }, { "b": ["2", "3"] }]), &[("a", "1"), ("b", "2"), ("b", "3")]);
    }

    #[test]
    fn a_number_that_is_no_status_becomes_a_500() {
        for (kept, expected) in [(201, 201), (0, 500), (-1, 500), (70_000, 500), (101, 500)] {
            assert_eq!(answer_of(kept, Value::Null, Vec::new()).status.as_u16(), expected);
        }
    }
}
