//! Reading an authenticated body: ids, types, times, batches, derived keys, and malformed variants of each.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::envelope::{Envelope, EnvelopeSpec, IdSpec, Identity, Item};
use hapax_core::limits;
use hapax_core::presets::{BodyFormat, PresetEnvelope, PresetId};
use hapax_core::{Arrival, Refusal};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

static PLAIN: PresetEnvelope = PresetEnvelope {
    items: None,
    id: PresetId::Selector("/id"),
    event_type: &["/type"],
    occurred_at: Some("/created"),
    body: BodyFormat::Json,
    form_json: None,
};

fn arrival(body: impl Into<Vec<u8>>) -> Arrival {
    Arrival {
        method: Method::POST,
        url: "https://hooks.example.com/webhooks/x".into(),
        headers: HeaderMap::new(),
        body: Bytes::from(body.into()),
    }
}

fn with_header(mut arrival: Arrival, name: &str, value: &str) -> Arrival {
    let name: HeaderName = name.parse().expect("a name");
    arrival.headers.append(name, HeaderValue::from_bytes(value.as_bytes()).expect("a value"));
    arrival
}

fn preset(preset: &'static PresetEnvelope) -> Envelope {
    Envelope::build(Some(preset), &EnvelopeSpec::default()).expect("builds")
}

fn spec(change: impl FnOnce(&mut EnvelopeSpec)) -> Envelope {
    let mut spec = EnvelopeSpec::default();
    change(&mut spec);
    Envelope::build(None, &spec).expect("builds")
}

fn with_id(selector: &str) -> Envelope {
    spec(|spec| spec.event_id = Some(IdSpec::Selector(selector.into())))
}

fn hashed(fields: &[&str]) -> Envelope {
    spec(|spec| {
        let fields = fields.iter().map(ToString::to_string).collect();
        spec.event_id = Some(IdSpec::Hash { fields, within: None });
    })
}

fn given(item: &Item) -> &str {
    match &item.identity {
        Identity::Given(id) => id,
        Identity::Derived { digest, .. } => panic!("derived: {digest}"),
    }
}

fn digest(envelope: &Envelope, arrival: &Arrival) -> String {
    match &envelope.read(arrival, None).expect("reads")[..] {
        [Item { identity: Identity::Derived { digest, .. }, .. }] => digest.clone(),
        other => panic!("not one derived key: {other:?}"),
    }
}

fn ids(envelope: &Envelope, arrival: &Arrival) -> Result<Vec<String>, &'static str> {
    match envelope.read(arrival, None) {
        Ok(items) => Ok(items.iter().map(|item| given(item).to_owned()).collect()),
        Err(refusal) => Err(refusal.reason()),
    }
}

#[test]
fn id_type_and_time_are_read_and_the_body_is_shared() {
    let arrival = arrival(r#"{"id":"evt_1","type":"payout.paid","created":1714564800}"#);
    let items = preset(&PLAIN).read(&arrival, None).expect("reads");
    assert_eq!(given(&items[0]), "evt_1");
    assert_eq!(items[0].event_type.as_deref(), Some("payout.paid"));
    assert_eq!(items[0].occurred_at.expect("time").as_second(), 1_714_564_800);
    assert_eq!(items[0].body.as_ptr(), arrival.body.as_ptr());
    assert_eq!(items[0].tenant, None);
}

#[test]
fn an_id_is_text_or_an_integer_and_nothing_else() {
    let check = |raw: &str, expected: Result<&str, &'static str>| {
        let found = ids(&preset(&PLAIN), &arrival(format!("{{\"id\":{raw},\"type\":\"t\"}}")));
        let expected = expected.map(|id| vec![id.to_owned()]);
        assert_eq!(found, expected, "{raw:.40}");
    };
    check(r#""evt_1""#, Ok("evt_1"));
    check("12345678901234567890123", Ok("12345678901234567890123"));
    check("-0", Ok("-0"));
    check(r#""\u00e9""#, Ok("é"));
    check(r#""e\u0301""#, Ok("e\u{301}"));
    check(&format!("\"{}\"", "x".repeat(255)), Ok(&"x".repeat(255)));
    for raw in ["\"\"", "1.0", "1e2", "true", "false", "null", "{}", "[]", "[\"a\"]"] {
        check(raw, Err("malformed"));
    }
    for raw in [r#""a\u0000""#, r#""a\nb""#, r#""\u007f""#, r#""\u0085""#, r#""\ud800""#] {
        check(raw, Err("malformed"));
    }
    check(&format!("\"{}\"", "x".repeat(256)), Err("malformed"));
    check(&format!("\"{}\"", "é".repeat(128)), Err("malformed"));
    check(&format!("\"{}\"", "x".repeat(1 << 20)), Err("malformed"));
    check(&"9".repeat(256), Err("malformed"));
}

#[test]
fn a_body_with_two_ids_or_none_is_refused() {
    let check = |body: &[u8], expected: &'static str| {
        assert_eq!(ids(&preset(&PLAIN), &arrival(body)), Err(expected), "{body:?}");
    };
    check(b"{\"id\":\"a\",\"id\":\"b\"}", "malformed");
    check(b"{\"id\":\"a\",\"\\u0069d\":\"b\"}", "malformed");
    check(b"\xef\xbb\xbf{\"id\":\"a\"}", "malformed");
    check(b"{\"id\":\"a\"}{\"id\":\"b\"}", "malformed");
    check(b"{\"id\":\"a\",\"x\":\"\xff\"}", "malformed");
    check(b"id=a", "malformed");
    check(b"", "malformed");
    check(&[b"{\"id\":\"a\",\"x\":".as_slice(), &b"[".repeat(100_000)].concat(), "malformed");
    check(b"{}", "no_id");
    check(b"[]", "malformed");
    check(b"{\"data\":{\"id\":\"a\"}}", "no_id");
}

#[test]
fn an_id_in_a_header_stands_there_once() {
    let envelope = with_id("header:X-Delivery");
    let once = with_header(arrival("not json"), "x-delivery", "d-1");
    assert_eq!(ids(&envelope, &once), Ok(vec!["d-1".into()]));
    assert_eq!(ids(&envelope, &arrival("{}")), Err("no_id"));
    assert_eq!(ids(&envelope, &with_header(once, "x-delivery", "d-1")), Err("malformed"));
    let empty = with_header(arrival("{}"), "x-delivery", "");
    assert_eq!(ids(&envelope, &empty), Err("malformed"));
    let tab = with_header(arrival("{}"), "x-delivery", "a\tb");
    assert_eq!(ids(&envelope, &tab), Err("malformed"));
    let mut latin = arrival("{}");
    latin.headers.append("x-delivery", HeaderValue::from_bytes(b"\xe9").expect("a value"));
    assert_eq!(ids(&envelope, &latin), Err("malformed"));
}

#[test]
fn an_id_in_a_form_or_in_the_query_stands_there_once() {
    let form = with_id("form:MessageSid");
    assert_eq!(ids(&form, &arrival("A=1&MessageSid=SM%31")), Ok(vec!["SM1".into()]));
    assert_eq!(ids(&form, &arrival("A=1")), Err("no_id"));
    assert_eq!(ids(&form, &arrival("MessageSid=")), Err("malformed"));
    assert_eq!(ids(&form, &arrival("MessageSid=a&Message%53id=b")), Err("malformed"));
    assert_eq!(ids(&form, &arrival("MessageSid=%ff")), Err("malformed"));
    assert_eq!(ids(&form, &arrival("MessageSid=a%00")), Err("malformed"));

    let query = with_id("query:id");
    let at = |url: &str| Arrival { url: url.into(), ..arrival("{}") };
    assert_eq!(ids(&query, &at("https://x/y?a=b&id=7#id=8")), Ok(vec!["7".into()]));
    assert_eq!(ids(&query, &at("https://x/y?id=7&id=7")), Err("malformed"));
    assert_eq!(ids(&query, &at("https://x/y")), Err("no_id"));
}

#[test]
fn the_first_id_that_is_there_counts() {
    static FIRST: PresetEnvelope = PresetEnvelope {
        items: None,
        id: PresetId::FirstOf(&["header:i-token", "form:MessageSid", "form:CallSid"]),
        event_type: &["form:MessageStatus"],
        occurred_at: None,
        body: BodyFormat::Form,
        form_json: None,
    };
    let envelope = preset(&FIRST);
    let call = arrival("MessageSid=&CallSid=CA1");
    assert_eq!(ids(&envelope, &call), Ok(vec!["CA1".into()]));
    assert_eq!(ids(&envelope, &with_header(call, "i-token", "t")), Ok(vec!["t".into()]));
    assert_eq!(ids(&envelope, &arrival("MessageSid=&From=1")), Err("no_id"));
    let twice = arrival("MessageSid=a&MessageSid=b&CallSid=c");
    assert_eq!(ids(&envelope, &twice), Err("malformed"));
}

#[test]
fn a_body_stands_in_where_no_id_is_there() {
    static ELSE_BODY: PresetEnvelope = PresetEnvelope {
        items: None,
        id: PresetId::FirstOf(&["/id", "body"]),
        event_type: &[],
        occurred_at: None,
        body: BodyFormat::Any,
        form_json: None,
    };
    let envelope = preset(&ELSE_BODY);
    assert_eq!(ids(&envelope, &arrival(r#"{"id":"a"}"#)), Ok(vec!["a".into()]));
    assert_ne!(digest(&envelope, &arrival("{}")), digest(&envelope, &arrival("{ }")));
    assert_eq!(digest(&envelope, &arrival("a=b")), digest(&envelope, &arrival("a=b")));
    assert_eq!(ids(&envelope, &arrival(r#"{"id":1.5}"#)), Err("malformed"));
}

#[test]
fn parts_of_a_joined_id_cannot_run_into_each_other() {
    static JOINED: PresetEnvelope = PresetEnvelope {
        items: Some("/notificationItems"),
        id: PresetId::Joined(&["/N/psp", "/N/code", "/N/success"]),
        event_type: &["/N/code"],
        occurred_at: None,
        body: BodyFormat::Json,
        form_json: None,
    };
    let id = |item: &str| {
        let body = format!("{{\"notificationItems\":[{{\"N\":{item}}}]}}");
        ids(&preset(&JOINED), &arrival(body))
    };
    let ok = |id: &str| Ok(vec![id.to_owned()]);
    assert_eq!(id(r#"{"psp":"P1","code":"CAPTURE","success":"true"}"#), ok("P1:CAPTURE:true"));
    assert_eq!(id(r#"{"psp":"P1","code":"CAPTURE","success":false}"#), ok("P1:CAPTURE:false"));
    assert_eq!(id(r#"{"psp":"a:b","code":"c","success":"d"}"#), ok(r"a\:b:c:d"));
    assert_eq!(id(r#"{"psp":"a","code":"b:c","success":"d"}"#), ok(r"a:b\:c:d"));
    assert_eq!(id(r#"{"psp":"a\\","code":"b","success":"c"}"#), ok(r"a\\:b:c"));
    assert_eq!(id(r#"{"psp":"P1","code":"CAPTURE"}"#), Err("no_id"));
    assert_eq!(id(r#"{"psp":true,"code":"c","success":"d"}"#), Err("malformed"));
    assert_eq!(id(r#"{"psp":"a","code":"","success":"d"}"#), Err("malformed"));
    let long = "x".repeat(200);
    let both = format!(r#"{{"psp":"{long}","code":"{long}","success":"d"}}"#);
    assert_eq!(id(&both), Err("malformed"));
}

#[test]
fn distinct_sets_of_fields_never_share_a_digest() {
    let envelope = hashed(&["/a", "/b"]);
    let bodies = [
        r#"{"a":"1","b":"2"}"#,
        r#"{"a":1,"b":"2"}"#,
        r#"{"a":"12"}"#,
        r#"{"b":"12"}"#,
        r#"{"a":"12","b":""}"#,
        r#"{"a":"","b":"12"}"#,
        r#"{"a":"12","b":null}"#,
        r#"{"a":"1","b":"2/b"}"#,
    ];
    let mut digests: Vec<String> =
        bodies.iter().map(|body| digest(&envelope, &arrival(*body))).collect();
    assert!(digests.iter().all(|digest| digest.len() == 32));
    let spaced = digest(&envelope, &arrival(r#"{ "b": "\u0032", "x": 9, "a": "1" }"#));
    assert_eq!(spaced, digests[0], "only the fields count, not how the rest is written");
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), bodies.len());
    assert!(matches!(envelope.read(&arrival(r#"{"c":1}"#), None), Err(Refusal::NoId(_))));
}

#[test]
fn a_body_can_be_its_own_identity() {
    let envelope = hashed(&["header:x-topic", "body"]);
    let first = digest(&envelope, &arrival(r#"{"a":1}"#));
    assert_eq!(first, digest(&envelope, &arrival(r#"{"a":1}"#)));
    assert_ne!(first, digest(&envelope, &arrival(r#"{"a":2}"#)));
    let with_topic = with_header(arrival(r#"{"a":1}"#), "x-topic", "t");
    assert_ne!(first, digest(&envelope, &with_topic));
    let twice = with_header(with_topic, "x-topic", "u");
    assert!(matches!(envelope.read(&twice, None), Err(Refusal::Malformed(_))));
}

#[test]
fn a_batch_is_one_item_per_element_each_a_slice_of_the_body() {
    let envelope = spec(|spec| {
        spec.items = Some("/events".into());
        spec.event_type = Some("outer:/kind".into());
        spec.tenant_from = Some("outer:/account".into());
    });
    let body = arrival(r#"{"events":[ {"id":1} ,{"id":"b"},{"id":1}],"kind":"k","account":77}"#);
    let items = envelope.read(&body, None).expect("reads");
    let ids: Vec<&str> = items.iter().map(given).collect();
    assert_eq!(ids, ["1", "b", "1"]);
    assert_eq!(&items[0].body[..], b"{\"id\":1}");
    assert_eq!(items[0].body.as_ptr(), body.body[12..].as_ptr());
    for item in &items {
        assert_eq!(item.event_type.as_deref(), Some("k"));
        assert_eq!(item.tenant.as_ref().map(|tenant| tenant.as_str()), Some("77"));
    }

    let read = |body: &str| match envelope.read(&arrival(body), None) {
        Ok(items) => Ok(items.len()),
        Err(refusal) => Err(refusal.reason()),
    };
    assert_eq!(read(r#"{"events":[],"account":1}"#), Ok(0));
    assert_eq!(read(r#"{"events":[{"id":1},{"id":1.5}],"account":1}"#), Err("malformed"));
    assert_eq!(read(r#"{"events":[{"id":1},{}],"account":1}"#), Err("no_id"));
    assert_eq!(read(r#"{"events":[{"id":1,"id":2}],"account":1}"#), Err("malformed"));
    assert_eq!(read(r#"{"events":[],"events":[{"id":1}],"account":1}"#), Err("malformed"));
    assert_eq!(read(r#"{"events":{"id":1},"account":1}"#), Err("malformed"));
    for none in [r#"{"account":1}"#, r#"{"events":null,"account":1}"#] {
        assert_eq!(read(none), Err("no_id"), "{none}");
    }
    let alone = envelope.read(&arrival(r#"{"id":"a","account":1}"#), None).expect("reads");
    assert_eq!(given(&alone[0]), "a", "a body that could hold several is one event itself");
}

#[test]
fn a_batch_has_a_bound() {
    let envelope = spec(|spec| spec.items = Some(String::new()));
    let batch = |count: usize| {
        let items: Vec<String> = (0..count).map(|id| format!("{{\"id\":{id}}}")).collect();
        arrival(format!("[{}]\r\n", items.join(",")))
    };
    assert_eq!(
        envelope.read(&batch(limits::ITEMS_MAX), None).expect("reads").len(),
        limits::ITEMS_MAX
    );
    assert!(matches!(
        envelope.read(&batch(limits::ITEMS_MAX + 1), None),
        Err(Refusal::Malformed(_))
    ));
}

#[test]
fn a_star_goes_through_every_element_and_nothing_is_left_out() {
    static NESTED: PresetEnvelope = PresetEnvelope {
        items: Some("/entry/*/changes|messaging"),
        id: PresetId::Hash { fields: &["parent:/id", "parent:/time", "body"], within: Some(600) },
        event_type: &["outer:/object", "/field"],
        occurred_at: Some("parent:/time"),
        body: BodyFormat::Json,
        form_json: None,
    };
    let envelope = preset(&NESTED);
    let read = |body: &str| envelope.read(&arrival(body), None);
    let body = r#"{"object":"page","entry":[
        {"id":"1","time":1714564800,"changes":[{"field":"feed","value":1},{"field":"feed","value":2}]},
        {"id":"2","time":1714564801,"messaging":[{"mid":"m"}]},
        {"id":"3","time":1714564800,"changes":[{"field":"feed","value":1}],"messaging":[]}]}"#;
    let items = read(body).expect("reads");
    let bodies: Vec<&[u8]> = items.iter().map(|item| &item.body[..]).collect();
    assert_eq!(bodies[0], br#"{"field":"feed","value":1}"#);
    assert_eq!(bodies[2], br#"{"mid":"m"}"#);
    assert_eq!(bodies[3], bodies[0]);
    let types: Vec<_> = items.iter().map(|item| item.event_type.as_deref().unwrap_or("")).collect();
    assert_eq!(types, ["page.feed", "page.feed", "page", "page.feed"]);
    assert_eq!(items[2].occurred_at.expect("time").as_second(), 1_714_564_801);
    let span = Some(Duration::from_secs(600));
    for (place, item) in items.iter().enumerate() {
        assert!(matches!(&item.identity, Identity::Derived { within, .. } if *within == span));
        assert!(items[place + 1..].iter().all(|other| other.identity != item.identity));
    }
    assert_eq!(read(body).expect("reads")[1].identity, items[1].identity);
    assert!(read(r#"{"object":"page","entry":[]}"#).expect("reads").is_empty());
    let odd = read(r#"{"object":"page","entry":[{"id":"1","time":2,"standby":[{}]}]}"#);
    let odd = odd.expect("reads");
    assert_eq!(&odd[0].body[..], br#"{"id":"1","time":2,"standby":[{}]}"#);
    assert_eq!(odd[0].occurred_at.expect("time").as_second(), 2);
    assert_eq!(read(r#"{"object":"page"}"#).expect("reads").len(), 1);
    assert!(read(r#"{"object":"page","entry":[{"changes":7}]}"#).is_err());
}

#[test]
fn required_fields_must_be_present() {
    let envelope = spec(|spec| spec.require = vec!["/type".into(), "header:x-shop".into()]);
    let refused = |arrival: &Arrival| match envelope.read(arrival, None) {
        Ok(_) => String::new(),
        Err(refusal) => refusal.to_string(),
    };
    let whole = with_header(arrival(r#"{"id":1,"type":"t"}"#), "x-shop", "s");
    assert_eq!(refused(&whole), "");
    assert!(refused(&arrival(r#"{"id":1,"type":"t"}"#)).contains("header:x-shop"));
    let null = with_header(arrival(r#"{"id":1,"type":null}"#), "x-shop", "s");
    assert!(refused(&null).contains("/type"));
}

#[test]
fn a_tenant_in_the_body_obeys_the_rules_of_ids() {
    let envelope = spec(|spec| spec.tenant_from = Some("/account".into()));
    let tenant = |account: &str| {
        let items = envelope.read(&arrival(format!("{{\"id\":1{account}}}")), None).ok()?;
        items[0].tenant.as_ref().map(|tenant| tenant.as_str().to_owned())
    };
    assert_eq!(tenant(r#","account":"acme""#).as_deref(), Some("acme"));
    // The tenant of Hapax's own messages has no events.
    let own = r#","account":"hapax""#;
    for bad in ["", r#","account":null"#, r#","account":"""#, r#","account":1.5"#, own] {
        assert_eq!(tenant(bad), None, "{bad}");
    }
}

#[test]
fn a_type_is_bounded_and_may_be_missing() {
    let read = |raw: &str| {
        let body = arrival(format!("{{\"id\":1,\"type\":{raw}}}"));
        match preset(&PLAIN).read(&body, None) {
            Ok(items) => Ok(items[0].event_type.as_deref().map(str::to_owned)),
            Err(refusal) => Err(refusal.reason()),
        }
    };
    assert_eq!(read("\"a.b\""), Ok(Some("a.b".into())));
    assert_eq!(read("3"), Ok(Some("3".into())));
    for none in ["null", "{}", "[]", "\"\""] {
        assert_eq!(read(none), Ok(None), "{none}");
    }
    assert_eq!(read(&format!("\"{}\"", "t".repeat(256))), Err("malformed"));
    assert_eq!(read("\"a\\u0007\""), Err("malformed"));
}

#[test]
fn an_unreadable_time_is_no_time() {
    let body = arrival(r#"{"id":1,"created":"soon"}"#);
    assert_eq!(preset(&PLAIN).read(&body, None).expect("reads")[0].occurred_at, None);
}

#[test]
fn config_selectors_replace_the_presets() {
    let spec = EnvelopeSpec {
        event_id: Some(IdSpec::Selector("/uuid".into())),
        event_type: Some("/kind".into()),
        ..EnvelopeSpec::default()
    };
    let envelope = Envelope::build(Some(&PLAIN), &spec).expect("builds");
    let body = r#"{"id":"a","uuid":"b","type":"c","kind":"d","created":1}"#;
    let items = envelope.read(&arrival(body), None).expect("reads");
    assert_eq!(given(&items[0]), "b");
    assert_eq!(items[0].event_type.as_deref(), Some("d"));
    assert!(items[0].occurred_at.is_some());
}

#[test]
fn a_bad_selector_is_an_error_with_a_hint() {
    let check = |field: &str, hint: &str, change: &dyn Fn(&mut EnvelopeSpec)| {
        let mut spec = EnvelopeSpec::default();
        change(&mut spec);
        let error = Envelope::build(None, &spec).expect_err("refused");
        assert_eq!(error.field, field);
        assert!(error.hint.contains(hint), "{error:?}");
    };
    let id = |text: &'static str| {
        move |spec: &mut EnvelopeSpec| spec.event_id = Some(IdSpec::Selector(text.into()))
    };
    check("event_id", "\"/id\"", &id("id"));
    check("event_id", "\"/data/id\"", &id("$.data.id"));
    check("event_id", "/id", &id(""));
    check("event_id", "~0", &id("/a~b"));
    check("event_id", "header:", &id("header:bad name"));
    check("event_id", "name", &id("form:"));
    check("event_id", "header:", &id("cookie:x"));
    check("event_id", "hash", &|spec| {
        spec.event_id = Some(IdSpec::Hash { fields: vec![], within: None });
    });
    check("event_id", "10m", &|spec| {
        let within = Some(Duration::from_millis(999));
        spec.event_id = Some(IdSpec::Hash { fields: vec!["/a".into()], within });
    });
    check("items", "/events", &|spec| spec.items = Some("events".into()));
    check("items", "shorter", &|spec| spec.items = Some("/*/*/*/*/a".into()));
    check("event_id", "items", &|spec| {
        spec.items = Some("/events".into());
        spec.event_id = Some(IdSpec::Selector("form:id".into()));
    });
    check("require", "require", &|spec| {
        spec.require = (0..65).map(|n| format!("/{n}")).collect();
    });
    check("event_type", "/type", &|spec| spec.event_type = Some("type".into()));
    check("occurred_at", "/created", &|spec| spec.occurred_at = Some("created".into()));
    check("tenant_from", "/account", &|spec| spec.tenant_from = Some("account".into()));

    let form = EnvelopeSpec {
        event_id: Some(IdSpec::Selector("form:id".into())),
        ..EnvelopeSpec::default()
    };
    assert_eq!(Envelope::build(Some(&PLAIN), &form).expect_err("refused").field, "event_id");
}

#[test]
fn a_body_must_not_announce_itself_as_something_else() {
    let json = preset(&PLAIN);
    for fits in [
        None,
        Some("application/json"),
        Some("Application/JSON; charset=utf-8"),
        Some("text/json"),
        Some("application/cloudevents+json"),
        Some("application/vnd.api+json;v=1"),
        Some(""),
    ] {
        assert!(json.content_type_fits(fits), "{fits:?}");
    }
    for other in [
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
        "text/html",
        "application/xml",
        "application/octet-stream",
        "image/png",
        "application/jsonp",
        "application/json, text/html",
    ] {
        assert!(!json.content_type_fits(Some(other)), "{other}");
    }
    let form = with_id("form:id");
    assert!(form.content_type_fits(Some("application/x-www-form-urlencoded; charset=UTF-8")));
    assert!(!form.content_type_fits(Some("application/json")));
    assert!(with_id("header:x-id").content_type_fits(Some("text/csv")));
}

#[test]
fn the_bytes_say_how_a_body_is_read_and_never_its_content_type() {
    // No sender signs the content type, so it must not change how the bytes are read: another content type
    // would turn the same signed bytes into another event.
    static EITHER: PresetEnvelope = PresetEnvelope {
        items: None,
        id: PresetId::FirstOf(&["/sid", "form:Sid"]),
        event_type: &[],
        occurred_at: None,
        body: BodyFormat::JsonOrForm,
        form_json: None,
    };
    static ANY: PresetEnvelope = PresetEnvelope { body: BodyFormat::Any, ..EITHER };
    let types = [None, Some("application/json"), Some("text/plain"), Some("image/png"), Some("")];
    let form = [Some("application/x-www-form-urlencoded")];
    for content_type in types.into_iter().chain(form) {
        let check = |format, body: &str, expected: Result<&str, &'static str>| {
            let mut arrival = arrival(body);
            if let Some(content_type) = content_type {
                arrival = with_header(arrival, "content-type", content_type);
            }
            let expected = expected.map(|id| vec![id.to_owned()]);
            assert_eq!(ids(&preset(format), &arrival), expected, "{content_type:?} {body}");
        };
        for format in [&EITHER, &ANY] {
            check(format, r#" {"sid":"a"}"#, Ok("a"));
            check(format, "Sid=b", Ok("b"));
            check(format, "", Err("no_id"));
        }
        check(&EITHER, "{Sid=b", Err("malformed"));
        check(&EITHER, "\u{feff}{\"sid\":\"a\"}", Err("malformed"));
        check(&ANY, "[ticket 1] hello", Err("no_id"));
    }
}

#[test]
fn json_inside_a_form_is_read_like_the_same_json_alone() {
    static WRAPPED: PresetEnvelope = PresetEnvelope {
        items: None,
        id: PresetId::Selector("header:x-id"),
        event_type: &["header:x-event", "/action"],
        occurred_at: None,
        body: BodyFormat::JsonOrForm,
        form_json: Some("payload"),
    };
    let read = |body: &str| {
        let arrival = with_header(arrival(body), "x-id", "1");
        let arrival = with_header(arrival, "x-event", "issues");
        let items = preset(&WRAPPED).read(&arrival, None).map_err(|refusal| refusal.reason())?;
        Ok(items[0].event_type.as_deref().map(str::to_owned))
    };
    let both = Ok(Some("issues.opened".to_owned()));
    assert_eq!(read(r#"{"action":"opened"}"#), both);
    assert_eq!(read("payload=%7B%22action%22%3A%22opened%22%7D"), both);
    assert_eq!(read("a=1&payload=%7B%22action%22%3A%22opened%22%7D&b"), both);
    assert_eq!(read("other=1"), Ok(Some("issues".to_owned())));
    for bad in ["payload=%7B", "payload=", "", "payload=%7B%7D&payload=%7B%7D"] {
        assert_eq!(read(bad), Err("malformed"), "{bad}");
    }
}

#[test]
fn a_number_or_a_string_alone_is_never_an_event() {
    // Such a body could be the signed content of a handshake, or a signed timestamp, replayed as an
    // event.
    let pointer = spec(|spec| {
        spec.event_id =
            Some(IdSpec::Hash { fields: vec!["body".into(), "/id".into()], within: None });
    });
    static BODY: PresetEnvelope =
        PresetEnvelope { id: PresetId::Hash { fields: &["body"], within: None }, ..PLAIN };
    for scalar in ["1", "12345", "\"foo\"", "true", "null", " 7 "] {
        let read = |envelope: &Envelope| envelope.read(&arrival(scalar), None).is_ok();
        assert!(!read(&preset(&BODY)), "{scalar}");
        assert!(!read(&pointer), "{scalar}");
    }
    assert!(preset(&BODY).read(&arrival("[1]"), None).is_err());
    assert!(preset(&BODY).read(&arrival("{}"), None).is_ok());
    assert!(pointer.read(&arrival("[1]"), None).is_ok());
}
