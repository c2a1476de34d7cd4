//! The behaviour of every store, case by case. The first comment of each case says how it tries to
//! break the store.

pub(crate) use crate::admin_records::*;
pub(crate) use crate::portal_links::*;
pub(crate) use crate::rejections::*;
pub(crate) use crate::verifiers::*;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{
    Decision, EventFilter, EventName, Inspect, Lookup, ReviewReason, Status, Store, StoreHints,
    Verdict,
};
use hapax_core::{SourceName, Tenant};

use crate::harness::{Sender, after, body, noon};

async fn one(store: &impl Store, ingest: hapax_core::store::Ingest) -> Verdict {
    let mut verdicts = store.ingest(ingest).await.expect("ingests");
    assert_eq!(verdicts.len(), 1);
    verdicts.remove(0)
}

async fn detail(store: &impl Inspect, name: &str) -> hapax_core::store::EventDetail {
    match store.event(&EventName::Theirs(name.into())).await.expect("reads") {
        Lookup::One(detail) => detail,
        other => panic!("{name}: {other:?}"),
    }
}

/// Polls until the copies of the deferred write can be seen.
pub(crate) async fn arrivals_reach(store: &impl Inspect, name: &str, wanted: u64) {
    tokio::time::timeout(crate::harness::FOREVER, async {
        while detail(store, name).await.summary.arrivals < wanted {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("copies are written behind");
}

pub(crate) async fn a_new_event_is_accepted_and_its_copy_is_a_duplicate_with_the_same_id<
    S: Store + Inspect,
>(
    store: Arc<S>,
) {
    // The second arrival must neither be new nor get an id of its own.
    let sender = Sender::plain();
    let Verdict::Accepted(id) = one(&*store, sender.ingest(&body("evt_1"))).await else {
        panic!("not accepted")
    };
    for _ in 0..3 {
        let again = one(&*store, sender.ingest(&body("evt_1"))).await;
        let Verdict::Duplicate(known) = again else { panic!("{again:?}") };
        assert_eq!(known.id, id);
        assert_eq!(known.status, Status::Ignored);
    }
    let other = one(&*store, sender.ingest(&body("evt_2"))).await;
    assert!(matches!(other, Verdict::Accepted(other) if other != id), "{other:?}");
}

pub(crate) async fn a_thousand_copies_at_once_have_one_winner<S: Store + Inspect>(store: Arc<S>) {
    // All copies arrive at the same instant, on four threads: two of them could both find no event
    // yet.
    let sender = Arc::new(Sender::plain());
    for round in 0..5 {
        let event_id = format!("evt_{round}");
        let tasks: Vec<_> = (0..1_000)
            .map(|_| {
                let (store, ingest) = (Arc::clone(&store), sender.ingest(&body(&event_id)));
                tokio::spawn(async move { one(&*store, ingest).await })
            })
            .collect();
        let mut ids = HashSet::new();
        let mut accepted = 0;
        for task in tasks {
            let verdict = task.await.expect("no panic");
            ids.insert(verdict.id());
            accepted += usize::from(matches!(verdict, Verdict::Accepted(_)));
        }
        assert_eq!((accepted, ids.len()), (1, 1));
        arrivals_reach(&*store, &event_id, 1_000).await;
    }
}

pub(crate) async fn the_same_id_of_another_tenant_or_source_is_another_event<S: Store + Inspect>(
    store: Arc<S>,
) {
    // Another tenant must not be able to use up the ids of this one.
    let mut ids = HashSet::new();
    for (tenant, source) in [("a", "x"), ("b", "x"), ("a", "y"), ("ax", ""), ("", "ax")] {
        let verdict = one(&*store, Sender::of(tenant, source).ingest(&body("evt_1"))).await;
        assert!(matches!(verdict, Verdict::Accepted(_)), "{tenant}/{source}: {verdict:?}");
        ids.insert(verdict.id());
    }
    assert_eq!(ids.len(), 5);
}

pub(crate) async fn the_same_id_with_another_body_is_a_conflict_and_both_are_kept<
    S: Store + Inspect,
>(
    store: Arc<S>,
) {
    // The second body must neither replace the first, nor vanish, nor run.
    let sender = Sender::plain();
    let first = body("evt_1");
    let second = first.replace("10000", "99999");
    let id = one(&*store, sender.ingest(&first)).await.id();
    let verdict = one(&*store, sender.ingest(&second)).await;
    assert!(matches!(&verdict, Verdict::Conflict(known) if known.id == id), "{verdict:?}");
    // A conflict is on disk before its answer: no waiting here.
    let found = detail(&*store, "evt_1").await;
    assert_eq!(&found.body[..], first.as_bytes());
    assert_eq!((found.summary.arrivals, found.summary.conflicts), (2, 1));
    let kept: Vec<_> = found.arrivals.iter().filter_map(|note| note.body.as_deref()).collect();
    assert_eq!(kept, [second.as_bytes()]);
    assert!(matches!(one(&*store, sender.ingest(&first)).await, Verdict::Duplicate(_)));
    for _ in 0..20 {
        one(&*store, sender.ingest(&second)).await;
    }
    let found = detail(&*store, "evt_1").await;
    assert_eq!(found.summary.conflicts, 21);
    let kept = found.arrivals.iter().filter(|note| note.decision == Decision::Conflict).count();
    assert_eq!(kept, 8, "conflicting bodies are bounded");
}

pub(crate) async fn a_body_of_several_events_is_taken_whole_and_its_elements_are_known_again_elsewhere<
    S: Store + Inspect,
>(
    store: Arc<S>,
) {
    // An element that arrives again in another batch must be recognised there.
    let sender = Sender::of_several();
    let batch = |ids: &[&str]| {
        let events: Vec<_> = ids.iter().map(|id| body(id)).collect();
        sender.ingest(&format!(r#"{{"events":[{}]}}"#, events.join(",")))
    };
    let first = store.ingest(batch(&["a", "b", "c"])).await.expect("ingests");
    assert!(first.iter().all(|verdict| matches!(verdict, Verdict::Accepted(_))), "{first:?}");
    let second = store.ingest(batch(&["d", "b"])).await.expect("ingests");
    assert!(matches!(second[0], Verdict::Accepted(_)), "{second:?}");
    assert!(matches!(&second[1], Verdict::Duplicate(known) if known.id == first[1].id()));
    assert_eq!(&detail(&*store, "b").await.body[..], body("b").as_bytes());
}

pub(crate) async fn the_same_id_twice_in_one_body_is_one_event<S: Store + Inspect>(store: Arc<S>) {
    // Both are decided in one transaction: the second must see the first although it is not
    // committed yet.
    let sender = Sender::of_several();
    let twice = format!(r#"{{"events":[{0},{0}]}}"#, body("evt_1"));
    let verdicts = store.ingest(sender.ingest(&twice)).await.expect("ingests");
    assert!(matches!(verdicts[0], Verdict::Accepted(_)), "{verdicts:?}");
    assert!(matches!(&verdicts[1], Verdict::Duplicate(known) if known.id == verdicts[0].id()));
}

pub(crate) async fn a_late_event_waits_for_review_and_an_on_time_copy_promotes_it_once<
    S: Store + Inspect,
>(
    store: Arc<S>,
) {
    // A late copy must not release the event; of many on-time copies at once exactly one does.
    let sender = Arc::new(Sender::plain());
    let late = || sender.ingest_at(&body("evt_1"), noon(), after(3_600));
    let Verdict::Review(id) = one(&*store, late()).await else { panic!("not in review") };
    let again = one(&*store, late()).await;
    assert!(matches!(&again, Verdict::Duplicate(known) if known.status == Status::Review));
    assert_eq!(detail(&*store, "evt_1").await.summary.review, Some(ReviewReason::Late));
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let ingest = sender.ingest_at(&body("evt_1"), after(3_600), after(3_600));
            let store = Arc::clone(&store);
            tokio::spawn(async move { one(&*store, ingest).await })
        })
        .collect();
    let mut accepted = 0;
    for task in tasks {
        match task.await.expect("no panic") {
            Verdict::Accepted(promoted) => {
                assert_eq!(promoted, id);
                accepted += 1;
            }
            Verdict::Duplicate(known) => assert_eq!(known.id, id),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(accepted, 1);
    assert_eq!(detail(&*store, "evt_1").await.summary.status, Status::Ignored);
}

pub(crate) async fn a_late_copy_of_a_known_event_is_a_duplicate<S: Store + Inspect>(store: Arc<S>) {
    // The copy must not put a finished event back into review.
    let sender = Sender::plain();
    let id = one(&*store, sender.ingest(&body("evt_1"))).await.id();
    let late = one(&*store, sender.ingest_at(&body("evt_1"), noon(), after(86_400))).await;
    assert!(matches!(&late, Verdict::Duplicate(known) if known.id == id), "{late:?}");
    assert_eq!(detail(&*store, "evt_1").await.summary.status, Status::Ignored);
}

pub(crate) async fn signed_bytes_under_another_id_go_to_review_and_no_copy_promotes_them<
    S: Store + Inspect,
>(
    store: Arc<S>,
) {
    // An attacker with one captured request changes its unsigned id header, and sends that copy
    // twice.
    let sender = Sender::guarded();
    let bytes = r#"{"type":"push"}"#;
    let first = one(&*store, sender.ingest_under("d1", bytes)).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    let copy = one(&*store, sender.ingest_under("d1", bytes)).await;
    assert!(matches!(copy, Verdict::Duplicate(_)), "{copy:?}");
    let replayed = one(&*store, sender.ingest_under("d2", bytes)).await;
    assert!(matches!(replayed, Verdict::Review(_)), "{replayed:?}");
    let replayed = one(&*store, sender.ingest_under("d2", bytes)).await;
    assert!(matches!(&replayed, Verdict::Duplicate(known) if known.status == Status::Review));
    let third = one(&*store, sender.ingest_under("d3", bytes)).await;
    assert!(matches!(third, Verdict::Review(_)), "{third:?}");
    let filed = store.event(&EventName::Ours(replayed.id())).await.expect("reads");
    assert!(
        matches!(&filed, Lookup::One(event) if event.summary.review == Some(ReviewReason::Replay))
    );
    let other = one(&*store, sender.ingest_under("d4", r#"{"type":"pull"}"#)).await;
    assert!(matches!(other, Verdict::Accepted(_)), "{other:?}");
}

pub(crate) async fn a_derived_key_with_another_body_goes_to_review_under_a_key_of_its_own<
    S: Store + Inspect,
>(
    store: Arc<S>,
) {
    // A derived key may be too coarse: the second body can be a real event and must not be lost.
    let sender = Sender::derived(None);
    let of = |n: u32| format!(r#"{{"type":"t","resource":"r","n":{n}}}"#);
    let first = one(&*store, sender.ingest(&of(1))).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    let second = one(&*store, sender.ingest(&of(2))).await;
    assert!(matches!(second, Verdict::Review(id) if id != first.id()), "{second:?}");
    let again = one(&*store, sender.ingest(&of(2))).await;
    assert!(matches!(&again, Verdict::Duplicate(known) if known.id == second.id()), "{again:?}");
    let again = one(&*store, sender.ingest(&of(1))).await;
    assert!(matches!(&again, Verdict::Duplicate(known) if known.id == first.id()), "{again:?}");
    let page = store.events(EventFilter { limit: 10, ..EventFilter::default() }).await;
    let reviews: Vec<_> = page.expect("reads").items.iter().map(|event| event.review).collect();
    assert_eq!(reviews, [Some(ReviewReason::Conflict), None]);
}

pub(crate) async fn equal_derived_keys_are_one_event_only_within_their_span<S: Store + Inspect>(
    store: Arc<S>,
) {
    // Copies on both sides of a span's edge are one event; the same notification later is another
    // event.
    let sender = Sender::derived(Some(Duration::from_secs(600)));
    let notice = r#"{"type":"t","resource":"r"}"#;
    let at = |seconds| sender.ingest_at(notice, after(seconds), after(seconds));
    // Noon is an edge of ten-minute spans: 590 and 610 lie in different ones.
    let first = one(&*store, at(590)).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    for near in [590, 610, 1_190] {
        let copy = one(&*store, at(near)).await;
        assert!(matches!(&copy, Verdict::Duplicate(known) if known.id == first.id()), "{near}");
    }
    let later = one(&*store, at(1_191)).await;
    assert!(matches!(later, Verdict::Accepted(id) if id != first.id()), "{later:?}");
}

pub(crate) async fn a_copy_in_the_next_span_may_be_decided_first<S: Store + Inspect>(
    store: Arc<S>,
) {
    // Another node's clock is ahead, or this one's was set back: the later copy is already stored.
    let sender = Sender::derived(Some(Duration::from_secs(600)));
    let notice = r#"{"type":"t","resource":"r"}"#;
    let at = |seconds| sender.ingest_at(notice, after(seconds), after(seconds));
    let first = one(&*store, at(610)).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    for near in [599, 590, 10, 1_210] {
        let copy = one(&*store, at(near)).await;
        assert!(matches!(&copy, Verdict::Duplicate(known) if known.id == first.id()), "{near}");
    }
    let further_back = one(&*store, at(9)).await;
    assert!(matches!(further_back, Verdict::Accepted(id) if id != first.id()), "{further_back:?}");
}

pub(crate) async fn copies_are_counted_and_the_newest_few_kept_in_full<S: Store + Inspect>(
    store: Arc<S>,
) {
    // A flood of copies must neither be lost from the count nor fill the disk.
    let sender = Sender::plain();
    for n in 0..=50 {
        one(&*store, sender.ingest_at(&body("evt_1"), after(n), after(n))).await;
    }
    arrivals_reach(&*store, "evt_1", 51).await;
    let found = detail(&*store, "evt_1").await;
    let times: Vec<_> = found.arrivals.iter().map(|note| note.received_at).collect();
    let wanted: Vec<_> = std::iter::once(0).chain(43..=50).map(after).collect();
    assert_eq!(times, wanted);
    assert_eq!(found.arrivals[0].decision, Decision::Accepted);
    assert_eq!(found.headers, "content-type: application/json");
}

pub(crate) async fn a_list_pages_from_new_to_old_and_filters<S: Store + Inspect>(store: Arc<S>) {
    // No event may be skipped or shown twice where one page ends and the next begins.
    for n in 0..25 {
        let tenant = if n % 2 == 0 { "even" } else { "odd" };
        let sender = Sender::of(tenant, "shop");
        let name = format!("evt_{n:02}");
        one(&*store, sender.ingest_at(&body(&name), after(n), after(n))).await;
    }
    let list = async |filter: EventFilter| {
        let mut ids = Vec::new();
        let mut filter = EventFilter { limit: 4, ..filter };
        loop {
            let page = store.events(filter.clone()).await.expect("reads");
            assert!(page.items.len() <= 4);
            ids.extend(page.items.into_iter().map(|event| event.event_id));
            match page.next {
                Some(next) => filter.before = Some(next),
                None => return ids,
            }
        }
    };
    let all = list(EventFilter::default()).await;
    let wanted: Vec<_> = (0..25).rev().map(|n| format!("evt_{n:02}")).collect();
    assert_eq!(all, wanted);
    let of = |change: fn(&mut EventFilter)| {
        let mut filter = EventFilter::default();
        change(&mut filter);
        filter
    };
    assert_eq!(list(of(|f| f.tenant = Some(Tenant::new("odd")))).await.len(), 12);
    assert_eq!(list(of(|f| f.source = Some(SourceName::new("none")))).await.len(), 0);
    assert_eq!(list(of(|f| f.event_type = Some("payout.paid".into()))).await.len(), 25);
    assert_eq!(list(of(|f| f.status = Some(Status::Review))).await.len(), 0);
    assert_eq!(list(of(|f| f.text = Some("evt_1".into()))).await.len(), 10);
    assert_eq!(list(of(|f| f.text = Some("\"amount\":10000".into()))).await.len(), 25);
    assert_eq!(list(of(|f| f.since = Some(after(20)))).await.len(), 5);
    assert_eq!(list(of(|f| f.until = Some(after(20)))).await.len(), 20);
}

pub(crate) async fn an_event_is_found_by_either_id_and_an_ambiguous_one_is_said_to_be<
    S: Store + Inspect,
>(
    store: Arc<S>,
) {
    // The sender's id alone names two events as soon as two sources use it.
    let id = one(&*store, Sender::of("a", "x").ingest(&body("evt_1"))).await.id();
    let ours = store.event(&EventName::Ours(id)).await.expect("reads");
    assert!(matches!(ours, Lookup::One(found) if found.summary.event_id == "evt_1"));
    assert_eq!(detail(&*store, "evt_1").await.summary.id, id);
    let other = one(&*store, Sender::of("b", "x").ingest(&body("evt_1"))).await.id();
    let both = store.event(&EventName::Theirs("evt_1".into())).await.expect("reads");
    let Lookup::Ambiguous(ids) = both else { panic!("{both:?}") };
    assert_eq!(HashSet::from_iter(ids), HashSet::from([id, other]));
    let none = store.event(&EventName::Theirs("evt_2".into())).await.expect("reads");
    assert_eq!(none, Lookup::None);
    let foreign = hapax_core::store::EventId(uuid::Uuid::now_v7());
    assert_eq!(store.event(&EventName::Ours(foreign)).await.expect("reads"), Lookup::None);
}

pub(crate) async fn a_key_is_known_once_its_event_is_there<S: Store + StoreHints>(store: Arc<S>) {
    // If a stored event were "not known", a late copy would count as a lost event.
    let sender = Sender::plain();
    let ingest = sender.ingest(&body("evt_1"));
    let key = ingest.receipts[0].key().clone();
    assert!(!store.knows(&key).await.expect("reads"));
    one(&*store, ingest).await;
    assert!(store.knows(&key).await.expect("reads"));
    assert!(store.writable().is_ok());
}
