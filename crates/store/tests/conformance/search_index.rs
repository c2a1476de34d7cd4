//! The index over values that operators search for: what it finds, in which order, and that nothing is left out.

use std::sync::Arc;

use hapax_core::json::Pointer;
use hapax_core::search::SearchFields;
use hapax_core::store::{
    Cursor, EventFilter, EventId, Horizon, NewMessage, Outcome, ReadBound, TextSearch, Verdict,
};
use hapax_core::{SourceName, Tenant};
use uuid::Uuid;

use crate::harness::{Sender, Working, World, after, job, spec};
use crate::sending::json;

/// The fields of the source that all cases use.
fn fields(pointers: &[&str]) -> Arc<SearchFields> {
    let pointers = pointers.iter().map(|text| Pointer::parse(text).expect("a pointer")).collect();
    Arc::new(SearchFields::new([(SourceName::new("shop"), pointers)]))
}

/// A new event with further members in its body, which begin with a comma.
async fn accept_with<S: Working>(world: &World<S>, id: &str, more: &str) -> EventId {
    let body = format!(r#"{{"id":"{id}","type":"payout.paid","created":1780315200{more}}}"#);
    let now = world.clock.now();
    let ingest = Sender::plain().ingest_for(&body, now, now, &[]);
    match world.store.ingest(ingest).await.expect("ingests").remove(0) {
        Verdict::Accepted(id) => id,
        other => panic!("{id}: {other:?}"),
    }
}

async fn of_customer<S: Working>(world: &World<S>, id: &str, customer: &str) -> EventId {
    accept_with(world, id, &format!(r#","customer":"{customer}""#)).await
}

/// Indexes everything, three events at a time.
async fn index_all<S: Working>(world: &World<S>, fields: &Arc<SearchFields>) {
    // On PostgreSQL an event is indexed a few seconds after its time.
    world.pass(10);
    for _ in 0..200 {
        if !world.store.index_values(Arc::clone(fields), 3).await.expect("indexes") {
            return;
        }
    }
    panic!("indexing never ends");
}

fn search_for(fields: &SearchFields, text: &str) -> TextSearch {
    TextSearch { values: fields.hashes(text, |_, _| true), ..TextSearch::new(text) }
}

/// The events of all pages, and the number of events on the first page.
async fn search<S: Working>(
    world: &World<S>,
    text: TextSearch,
    bound: ReadBound,
) -> (Vec<String>, usize) {
    let (mut found, mut first, mut before): (Vec<String>, _, Option<Cursor>) =
        (Vec::new(), None, None);
    for _ in 0..500 {
        let text = Some(text.clone());
        let filter = EventFilter { text, before, limit: 2, bound, ..EventFilter::default() };
        let page = world.store.events(filter).await.expect("reads");
        found.extend(page.items.into_iter().map(|event| event.event_id));
        first.get_or_insert(found.len());
        before = page.next;
        if before.is_none() {
            return (found, first.unwrap_or_default());
        }
    }
    panic!("the search does not end");
}

pub(crate) async fn an_indexed_value_finds_its_events_however_many_lie_between<S: Working>(
    world: World<S>,
) {
    // A page may read four rows: without the index the search would have to read all events first.
    let named = fields(&["/customer", "/order"]);
    of_customer(&world, "oldest", "cus_1").await;
    accept_with(&world, "escaped", r#","customer":"caf\u00e9","order":77"#).await;
    for n in 0..40 {
        of_customer(&world, &format!("evt_{n}"), "cus_other").await;
    }
    let (found, on_first) = search(&world, search_for(&named, "cus_1"), ReadBound::Rows(4)).await;
    assert_eq!((found, on_first), (vec!["oldest".to_owned()], 0));
    index_all(&world, &named).await;
    for (text, expected) in [("cus_1", "oldest"), ("café", "escaped"), ("77", "escaped")] {
        let (found, on_first) = search(&world, search_for(&named, text), ReadBound::Rows(4)).await;
        assert_eq!((found, on_first), (vec![expected.to_owned()], 1), "{text}");
    }
    let (found, _) = search(&world, search_for(&named, "cus_"), ReadBound::Rows(100)).await;
    assert_eq!(found.len(), 41, "a part of a value is found in the bodies");
}

pub(crate) async fn other_fields_index_old_events_again<S: Working>(world: World<S>) {
    // An index that only continued from its mark would never contain the field `order` of events
    // before the change.
    for n in 0..7 {
        accept_with(
            &world,
            &format!("evt_{n}"),
            &format!(r#","customer":"c{n}","order":"o\u002d{n}""#),
        )
        .await;
    }
    index_all(&world, &fields(&["/customer"])).await;
    let both = fields(&["/customer", "/order"]);
    let found =
        async |text: &str| search(&world, search_for(&both, text), ReadBound::Rows(100)).await.0;
    assert_eq!(found("o-3").await, [""; 0]);
    index_all(&world, &both).await;
    assert_eq!(found("o-3").await, ["evt_3"]);
    assert_eq!(found("c3").await, ["evt_3"]);
    // Events that come later are indexed as well.
    accept_with(&world, "evt_new", r#","order":"o\u002dnew""#).await;
    index_all(&world, &both).await;
    assert_eq!(found("o-new").await, ["evt_new"]);
}

pub(crate) async fn exact_matches_come_first_and_each_event_once<S: Working>(world: World<S>) {
    // Both parts of the list end at every possible position in a page.
    let named = fields(&["/customer"]);
    for n in 0..6 {
        of_customer(&world, &format!("exact_{n}"), "cus_1").await;
        accept_with(&world, &format!("part_{n}"), r#","note":"of cus_1""#).await;
        of_customer(&world, &format!("other_{n}"), "cus_2").await;
    }
    let also = of_customer(&world, "named", "cus_3").await;
    index_all(&world, &named).await;
    accept_with(&world, "part_new", r#","note":"of cus_1""#).await;
    let text = TextSearch { named: vec![also], ..search_for(&named, "cus_1") };
    let mut expected = vec!["named".to_owned()];
    expected.extend((0..6).rev().map(|n| format!("exact_{n}")));
    expected.push("part_new".to_owned());
    expected.extend((0..6).rev().map(|n| format!("part_{n}")));
    for rows in [1, 2, 3, 4, 5, 7, 100] {
        let (found, _) = search(&world, text.clone(), ReadBound::Rows(rows)).await;
        assert_eq!(found, expected, "{rows} rows a page");
    }
}

pub(crate) async fn a_search_finds_what_it_may_ask_for_and_nothing_else<S: Working>(
    world: World<S>,
) {
    // A caller who must not see a value could otherwise guess it by searching.
    let named = fields(&["/customer"]);
    of_customer(&world, "evt_cus_1", "cus_1").await;
    of_customer(&world, "evt_2", "cus_1").await;
    let other = Sender::of("acme", "other");
    world.arrive(&other, "evt_3_cus_1", &[]).await;
    index_all(&world, &named).await;
    let found = async |text: TextSearch| search(&world, text, ReadBound::Rows(100)).await.0;
    let of = |names: &[&str]| Some(names.iter().map(SourceName::new).collect::<Vec<_>>());
    let hidden = TextSearch { sources: of(&[]), ..TextSearch::new("cus_1") };
    assert_eq!(found(hidden).await, ["evt_3_cus_1", "evt_cus_1"], "by the sender's id only");
    let body = TextSearch { sources: of(&["shop"]), ..TextSearch::new("cus_1") };
    assert_eq!(found(body).await, ["evt_3_cus_1", "evt_2", "evt_cus_1"]);
    let by_index = TextSearch { sources: of(&[]), ..search_for(&named, "cus_1") };
    assert_eq!(found(by_index.clone()).await, ["evt_2", "evt_cus_1", "evt_3_cus_1"]);
    // Every other filter holds for exact matches too.
    let filter = EventFilter {
        text: Some(by_index),
        tenant: Some(Tenant::new("acme")),
        limit: 10,
        ..EventFilter::default()
    };
    let page = world.store.events(filter).await.expect("reads");
    let ids: Vec<_> = page.items.iter().map(|event| event.event_id.as_str()).collect();
    assert_eq!(ids, ["evt_3_cus_1"]);
}

pub(crate) async fn a_pruned_event_is_not_found_by_its_values<S: Working>(world: World<S>) {
    let named = fields(&["/customer"]);
    for n in 0..20 {
        of_customer(&world, &format!("old_{n}"), "cus_1").await;
    }
    world.pass(500);
    index_all(&world, &named).await;
    of_customer(&world, "unindexed", "cus_1").await;
    world.pass(500);
    of_customer(&world, "young", "cus_1").await;
    let horizon = Horizon { events_before: after(800), ..Horizon::forever() };
    while world.store.prune(horizon.clone(), 3).await.expect("prunes") {}
    let found = async || search(&world, search_for(&named, "cus_1"), ReadBound::Rows(100)).await.0;
    assert_eq!(found().await, ["young"]);
    // The events between the mark and the first event with a body are pruned.
    index_all(&world, &named).await;
    assert_eq!(found().await, ["young"]);
}

pub(crate) async fn calls_that_index_at_once_leave_out_no_event<S: Working>(world: World<S>) {
    // A mark that one call moves past the events of another call would hide those events for ever.
    let named = fields(&["/customer"]);
    let mut expected = Vec::new();
    for round in 0..4 {
        for n in 0..5 {
            // Escaped, so that the index alone finds it.
            let id = format!("evt_{round}_{n}");
            accept_with(&world, &id, r#","customer":"cus\u005f1""#).await;
            expected.insert(0, id);
        }
        world.pass(10);
        let index = || async {
            for _ in 0..20 {
                world.store.index_values(Arc::clone(&named), 2).await.expect("indexes");
            }
        };
        tokio::join!(index(), index(), index(), index());
    }
    index_all(&world, &named).await;
    let (found, _) = search(&world, search_for(&named, "cus_1"), ReadBound::Rows(100)).await;
    assert_eq!(found, expected);
}

pub(crate) async fn an_event_is_found_by_the_id_of_a_request_or_a_message<S: Working>(
    world: World<S>,
) {
    world.announce([spec("fee")]).await;
    let request = |n: u64, began: i64| {
        let millis = u64::try_from(after(began).as_millisecond()).expect("in range");
        let mut random = [7; 10];
        random[8..].copy_from_slice(&(n as u16).to_be_bytes());
        uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
    };
    let mut events = Vec::new();
    for n in 0..30 {
        let now = world.clock.now();
        let text = crate::harness::body(&format!("evt_{n}"));
        let mut ingest = Sender::plain().ingest_for(&text, now, now, &[job("fee")]);
        // The body of a request may take a while.
        ingest.via.request_id = request(n, i64::try_from(n).expect("small") - 3);
        let Verdict::Accepted(id) = world.store.ingest(ingest).await.expect("ingests").remove(0)
        else {
            panic!("a new event")
        };
        events.push(id);
        world.pass(1);
    }
    let now = world.clock.now();
    let mut copy = Sender::plain().ingest_for(&crate::harness::body("evt_4"), now, now, &[]);
    copy.via.request_id = request(99, 30);
    world.store.ingest(copy).await.expect("ingests");
    world.store.flush_copies().await;
    let traced = async |id: String| world.store.events_traced_by(&id).await.expect("reads");
    assert_eq!(traced(request(17, 14).to_string()).await, [events[17]]);
    assert_eq!(traced(request(99, 30).to_string()).await, [events[4]]);
    assert_eq!(traced(request(98, 30).to_string()).await, []);
    assert_eq!(traced(Uuid::nil().to_string()).await, []);
    assert_eq!(traced("evt_4".to_owned()).await, []);

    let claim = world.claim("fee", 1).await.remove(0);
    let message = NewMessage::new("fee.charged", json("{}")).with_id("msg_of_a_handler");
    let outcome = Outcome::Done { result: None, publish: vec![message], answer: None };
    world.settle(&claim, outcome).await;
    assert_eq!(traced("msg_of_a_handler".to_owned()).await, [claim.event.id]);
}

pub(crate) async fn events_with_a_value_are_counted_up_to_a_bound<S: Working>(world: World<S>) {
    // An event that is pruned, not indexed yet or of another field must not count.
    let named = fields(&["/customer", "/order"]);
    let value = |text: &str| {
        let values = named.found_in(&SourceName::new("shop"), text.as_bytes());
        values.first().expect("a value").hash
    };
    let (same, other) = (value(r#"{"customer":"cus_1"}"#), value(r#"{"order":"cus_1"}"#));
    let count = async |hash, most| world.store.count_events_with(hash, most).await.expect("counts");
    assert_eq!(count(same, 9).await, 0);
    for n in 0..4 {
        of_customer(&world, &format!("evt_{n}"), "cus_1").await;
        world.pass(100);
    }
    accept_with(&world, "evt_order", r#","order":"cus_1","customer":"cus_2""#).await;
    index_all(&world, &named).await;
    assert_eq!((count(same, 9).await, count(other, 9).await), (4, 1));
    assert_eq!((count(same, 4).await, count(same, 3).await, count(same, 0).await), (4, 3, 0));
    of_customer(&world, "evt_late", "cus_1").await;
    assert_eq!(count(same, 9).await, 4);
    index_all(&world, &named).await;
    assert_eq!(count(same, 9).await, 5);
    let horizon = Horizon { events_before: after(150), ..Horizon::forever() };
    while world.store.prune(horizon.clone(), 3).await.expect("prunes") {}
    assert_eq!(count(same, 9).await, 3);
}
