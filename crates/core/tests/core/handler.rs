//! Which events a handler wants, and how a job's place in the order is read.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::handler::{
    Dialect, EventView, Handler, HandlerKind, Order, RefetchUrl, SqlProgram, TypeFilter,
};
use hapax_core::job::{HandlerName, Policy, WorkLocation};
use hapax_core::order::{Gaps, Machine, OrderPolicy, OrderRule, Position, ResourcePosition};
use hapax_core::store::{ClaimedEvent, EventId, NewJob};
use hapax_core::{EventKey, SourceName, Tenant, Timestamp};

fn handler(types: &[&str], order: Option<(&str, &str)>) -> Handler {
    let program = SqlProgram::parse("SELECT :id", Dialect::Sqlite).unwrap();
    Handler {
        name: HandlerName::new("fee"),
        kind: HandlerKind::Sql(Arc::new(program)),
        types: TypeFilter::new(types.iter().copied()).unwrap(),
        policy: Policy { retry: vec![Duration::ZERO], lease: Duration::from_secs(30) },
        timeout: Duration::from_secs(10),
        concurrency: 16,
        refetch: None,
        order: order.map(|(resource, by)| Order::build(resource, by, latest()).unwrap()),
    }
}

fn latest() -> OrderRule {
    OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() }
}

fn job(handler: &Handler, event_type: Option<&str>, body: &str) -> Option<NewJob> {
    handler.job_for(EventView { event_type, body: body.as_bytes() })
}

#[test]
fn a_handler_wants_the_types_that_its_globs_match() {
    let check = |types: &[&str], event_type: Option<&str>, expected: bool| {
        let found = TypeFilter::new(types.iter().copied()).unwrap().matches(event_type);
        assert_eq!(found, expected, "{types:?} {event_type:?}");
    };
    check(&[], Some("payout.paid"), true);
    check(&["payout.paid"], Some("payout.paid"), true);
    check(&["payout.paid"], Some("payout.paid.x"), false);
    check(&["payout.paid"], Some("xpayout.paid"), false);
    check(&["payout.*"], Some("payout.paid"), true);
    check(&["payout.*"], Some("payout."), true);
    check(&["payout.*"], Some("payout"), false);
    check(&["payout.*"], Some("Payout.paid"), false);
    check(&["*.paid"], Some("payout.paid"), true);
    check(&["*.paid"], Some("payout.paid.paid"), true);
    check(&["*.paid"], Some("payout.paid.late"), false);
    check(&["a*b*c"], Some("a-b-b-c"), true);
    check(&["a*b*c"], Some("abc"), true);
    check(&["a*b*c"], Some("acb"), false);
    check(&["*a*"], Some("bab"), true);
    check(&["**"], Some("x"), true);
    check(&["*"], Some(""), true);
    check(&["x", "payout.*"], Some("payout.paid"), true);
    check(&["x", "y"], Some("payout.paid"), false);
    // A dot and a question mark match only themselves.
    check(&["payout.paid"], Some("payout-paid"), false);
    check(&["payout.pai?"], Some("payout.paid"), false);
    check(&["größe.*"], Some("größe.é"), true);
}

#[test]
fn an_event_without_a_type_matches_only_handlers_of_all_types() {
    for (types, expected) in
        [(&[][..], true), (&["*"], true), (&["x", "**"], true), (&["x*"], false), (&["x"], false)]
    {
        let job = job(&handler(types, None), None, "{}");
        assert_eq!(job.is_some(), expected, "{types:?}");
    }
}

#[test]
fn a_hostile_type_costs_no_more_than_the_product_of_both_lengths() {
    // Naive backtracking over many stars takes exponential time here.
    let glob = "*a".repeat(100);
    let types = TypeFilter::new([format!("{glob}b")]).unwrap();
    assert!(!types.matches(Some(&"a".repeat(255))));
}

#[test]
fn an_empty_type_in_the_list_is_refused() {
    assert_eq!(TypeFilter::new(["x", ""]).unwrap_err().field, "types");
}

#[test]
fn a_job_carries_its_place_in_the_order() {
    let check = |body: &str, resource: &str, position: i64| {
        let handler = handler(&[], Some(("/data/id", "/at")));
        let expected = NewJob {
            handler: HandlerName::new("fee"),
            place: Some(ResourcePosition {
                resource: resource.into(),
                position: Position(position),
            }),
            hopeless: None,
        };
        assert_eq!(job(&handler, None, body), Some(expected), "{body}");
    };
    check(r#"{"data":{"id":"po_1"},"at":7}"#, "po_1", 7);
    check(r#"{"at":-7,"data":{"id":12345678901234567890}}"#, "12345678901234567890", -7);
    // Neighbouring integers would be equal as floats.
    check(r#"{"data":{"id":"x"},"at":9007199254740993}"#, "x", 9_007_199_254_740_993);
    check(r#"{"data":{"id":"x"},"at":9223372036854775807}"#, "x", i64::MAX);
    check(r#"{"data":{"id":"x"},"at":-9223372036854775808}"#, "x", i64::MIN);
    check(r#"{"data":{"id":"x"},"at":-0}"#, "x", 0);
    check(r#"{"data":{"id":"\u0041\"/"},"at":1}"#, "A\"/", 1);
    let second = 1_767_225_607_000_000;
    check(r#"{"data":{"id":"x"},"at":"2026-01-01T00:00:07Z"}"#, "x", second);
    check(r#"{"data":{"id":"x"},"at":"2026-01-01t00:00:07z"}"#, "x", second);
    check(r#"{"data":{"id":"x"},"at":"2026-01-01 01:00:07+01:00"}"#, "x", second);
    check(r#"{"data":{"id":"x"},"at":"2026-01-01T00:00:07.000001Z"}"#, "x", second + 1);
    check(r#"{"data":{"id":"x"},"at":"2026-01-01T00:00:07.000001999-00:00"}"#, "x", second + 1);
    check(r#"{"data":{"id":"x"},"at":"1969-12-31T23:59:59.9999999Z"}"#, "x", -1);
}

#[test]
fn a_job_without_a_readable_place_is_dead_with_a_reason() {
    let check = |body: &str, parts: &[&str]| {
        let job = job(&handler(&[], Some(("/data/id", "/at"))), None, body).unwrap();
        let reason = job.hopeless.unwrap_or_else(|| panic!("{body}"));
        assert!(parts.iter().all(|part| reason.contains(part)), "{body}: {reason}");
        assert!(!reason.contains("hunter2"), "{reason}");
        assert_eq!(job.place, None);
    };
    check(r#"{"at":1}"#, &["resource (/data/id) is missing"]);
    check(r#"{"data":{"id":null},"at":1}"#, &["resource (/data/id) is null"]);
    check(r#"{"data":{"id":""},"at":1}"#, &["resource (/data/id) is empty"]);
    check(r#"{"data":{"id":1.5},"at":1}"#, &["resource", "neither text nor an integer"]);
    check(r#"{"data":{"id":{"hunter2":1}},"at":1}"#, &["resource", "neither"]);
    check(r#"{"data":{"id":true},"at":1}"#, &["resource", "neither"]);
    check(r#"{"data":{"id":"a\u0000b"},"at":1}"#, &["resource", "NUL"]);
    let long = format!(r#"{{"data":{{"id":"{}"}},"at":1}}"#, "x".repeat(256));
    check(&long, &["resource", "longer than 255"]);
    for at in [
        "1.0",
        "1e3",
        "true",
        "[1]",
        r#""""#,
        r#""12""#,
        r#""hunter2""#,
        r#""2026-01-01""#,
        r#""2026-01-01T00:00:07""#,
        r#""2026-01-01T00:00Z""#,
        r#""2026-01-01T00:00:07+01""#,
        r#""2026-01-01T00:00:07.Z""#,
        r#""2026-01-01T00:00:07,5Z""#,
        r#""2026-01-01T00:00:07Z[UTC]""#,
        r#""2026-13-01T00:00:07Z""#,
        r#""20260101T000007Z....""#,
        r#"" 2026-01-01T00:00:07Z""#,
        r#""+002026-01-01T00:00:07Z""#,
    ] {
        check(&format!(r#"{{"data":{{"id":"x"}},"at":{at}}}"#), &["by (/at)", "neither"]);
    }
    check(r#"{"data":{"id":"x"},"at":null}"#, &["by (/at) is null"]);
    check(r#"{"data":{"id":"x"}}"#, &["by (/at) is missing"]);
    check(r#"{"data":{"id":"x"},"at":9223372036854775808}"#, &["by", "64 bits"]);
    // A parser that takes the first value and one that takes the last would see different orders.
    check(r#"{"data":{"id":"x"},"at":1,"at":2}"#, &["cannot order this event", "twice"]);
    check("a=1&b=2", &["cannot order this event", "not JSON"]);
    check("", &["cannot order this event"]);
}

#[test]
fn a_job_that_the_handler_does_not_want_is_not_written_even_as_dead() {
    assert_eq!(job(&handler(&["payout.*"], Some(("/x", "/y"))), Some("invoice.paid"), "{}"), None);
}

#[test]
fn selectors_of_order_are_pointers_into_the_event() {
    for (resource, by, field) in [
        ("id", "/at", "order.resource"),
        ("/id", "header:x-at", "order.by"),
        ("", "/at", "order.resource"),
        ("/id", "/a~2", "order.by"),
    ] {
        let built = Order::build(resource, by, latest());
        assert_eq!(built.unwrap_err().field, field);
    }
}

#[test]
fn the_place_in_a_machine_is_the_number_of_its_state() {
    // An unknown state must be refused at once, or the job would be held without an end.
    let machine = Arc::new(Machine::parse(None, &["new -> paid", "paid -> 7"]).unwrap());
    let policy = OrderPolicy::Machine(Arc::clone(&machine));
    let rule = OrderRule { policy, gaps: Gaps::default() };
    let order = Order::build("/id", "/status", rule.clone()).unwrap();
    for (body, state) in
        [(r#"{"id":"x","status":"paid"}"#, "paid"), (r#"{"id":"x","status":7}"#, "7")]
    {
        let place = order.place(body.as_bytes()).unwrap();
        assert_eq!(Some(place.position), machine.position(state));
    }
    for (status, problem) in [
        (r#""hunter2""#, "state (/status) is a state that appears in no transition"),
        (r#""Paid""#, "appears in no transition"),
        ("null", "state (/status) is null"),
        ("[]", "neither text nor an integer"),
    ] {
        let body = format!(r#"{{"id":"x","status":{status}}}"#);
        let reason = order.place(body.as_bytes()).unwrap_err();
        assert!(reason.contains(problem) && !reason.contains("hunter2"), "{reason}");
    }
    assert_eq!(Order::build("/id", "status", rule).unwrap_err().field, "order.state");
}

#[test]
fn a_handler_spec_holds_the_workplace_policy_and_order() {
    let mut handler = handler(&[], Some(("/id", "/at")));
    let spec = handler.spec(&SourceName::new("stripe"));
    assert_eq!((spec.handler.source.as_str(), spec.handler.handler.as_str()), ("stripe", "fee"));
    assert_eq!((spec.order, spec.workplace), (Some(latest()), WorkLocation::Inside));
    handler.kind = HandlerKind::Pull;
    assert_eq!(handler.spec(&SourceName::new("stripe")).workplace, WorkLocation::Pulled);
}

#[test]
fn a_value_from_an_event_stays_one_segment_of_the_path_it_was_given() {
    // A sender that can choose any resource name tries to reach another path, host or query of the API.
    let of = |resource: Option<&str>| ClaimedEvent {
        id: EventId(uuid::Uuid::nil()),
        key: EventKey {
            tenant: Tenant::new("acme"),
            source: SourceName::new("shop"),
            event_id: "evt_1".into(),
        },
        event_type: None,
        occurred_at: None,
        received_at: Timestamp::UNIX_EPOCH,
        resource: resource.map(str::to_owned),
        headers: String::new(),
        body: bytes::Bytes::new(),
    };
    let check = |url: &str, resource: Option<&str>, expected: Result<&str, &str>| {
        let found = RefetchUrl::parse(url).unwrap().of(&of(resource)).map(|url| url.to_string());
        assert_eq!(found, expected.map(str::to_owned).map_err(str::to_owned), "{url}");
    };
    let url = "https://api.example.com/v1/{resource}/x?of={tenant}";
    check(url, Some("po_1"), Ok("https://api.example.com/v1/po_1/x?of=acme"));
    check(url, Some("a/b"), Ok("https://api.example.com/v1/a%2Fb/x?of=acme"));
    check(url, Some("..admin"), Ok("https://api.example.com/v1/..admin/x?of=acme"));
    // Some servers decode a path before they resolve its dots.
    check(
        url,
        Some("../../admin"),
        Err("a path segment from the event's resource consists only of dots"),
    );
    check(
        url,
        Some("a\\..\\b"),
        Err("a path segment from the event's resource consists only of dots"),
    );
    check(
        url,
        Some("a?b#c&d=%2F é"),
        Ok("https://api.example.com/v1/a%3Fb%23c%26d%3D%252F%20%C3%A9/x?of=acme"),
    );
    check(url, Some("@evil.example"), Ok("https://api.example.com/v1/%40evil.example/x?of=acme"));
    check(url, Some(".."), Err("a path segment from the event's resource consists only of dots"));
    check(url, Some("."), Err("a path segment from the event's resource consists only of dots"));
    check(url, None, Err("the event has no resource"));
    check("http://a/{event_type}", Some("x"), Err("the event has no event_type"));
    check("http://a/{event_id}.json", None, Ok("http://a/evt_1.json"));
}
