//! Lists that stop at their bound: what they have searched, where they continue, and that a search over
//! several pages finds everything exactly once.

use std::collections::BTreeMap;

use hapax_core::delivery::{DeliveryStatus, MessageStatus};
use hapax_core::job::{HandlerName, Phase, Retry};
use hapax_core::order::OrderPolicy;
use hapax_core::store::{
    Cursor, DeliveryFilter, EventFilter, JobFilter, MessageFilter, NewMessage, Page, ReadBound,
    Status, TextSearch, Verdict,
};
use hapax_core::{SourceName, Tenant, Timestamp};

use crate::harness::{
    Replay, Sender, Working, World, after, body, done, failed, job, ordered, placed, spec,
};
use crate::sending::{ALL, Sending, delivered, message, wanting};

/// The rows that one page may read, and the most items that it may hold.
const BOUND: ReadBound = ReadBound::Rows(4);
const LIMIT: usize = 2;

/// Far more pages than any search here needs.
const PAGES_MAX: usize = 200;

/// Goes over all pages of a list, and checks what each page says about how far it searched.
async fn search<T>(
    read: impl AsyncFn(Option<Cursor>) -> Page<T>,
    between: impl AsyncFn(),
) -> Vec<T> {
    let (mut found, mut before, mut searched) = (Vec::new(), None, Timestamp::MAX);
    for _ in 0..PAGES_MAX {
        let page = read(before).await;
        assert!(page.items.len() <= LIMIT);
        match (page.next, page.searched_to) {
            // A page that is neither full nor the last one reports how far it searched.
            (Some(_), to) => assert_eq!(to.is_some(), page.items.len() < LIMIT),
            (None, to) => assert_eq!(to, None),
        }
        if let Some(to) = page.searched_to {
            assert!(to <= searched, "{to} is later than {searched}");
            searched = to;
        }
        found.extend(page.items);
        match page.next {
            None => return found,
            next => before = next,
        }
        between().await;
    }
    panic!("the search does not end");
}

async fn events<S: Working>(world: &World<S>, filter: EventFilter) -> Vec<String> {
    let read = async |before| {
        let page = EventFilter { before, limit: LIMIT, bound: BOUND, ..filter.clone() };
        world.store.events(page).await.expect("reads")
    };
    let found = search(read, async || {}).await;
    found.into_iter().map(|event| event.event_id).collect()
}

fn of_status(status: Status) -> EventFilter {
    EventFilter { status: Some(status), ..EventFilter::default() }
}

/// One event in every status, each behind `between` processed ones.
async fn one_of_each<S: Working>(world: &World<S>, between: usize) {
    world
        .announce([
            spec("fee"),
            ordered("latest", OrderPolicy::Latest),
            ordered("stock", OrderPolicy::Sequence { start: Some(1) }),
        ])
        .await;
    let mut n = 0;
    let mut bury = async || {
        for _ in 0..between {
            world.accept(&format!("plain_{n}"), &[job("fee")]).await;
            world.do_all("fee").await;
            n += 1;
        }
        world.pass(1);
    };
    world.accept("ignored", &[]).await;
    bury().await;
    world.accept("newer", &[placed("latest", "r", 2)]).await;
    world.do_all("latest").await;
    world.accept("stale", &[placed("latest", "r", 1)]).await;
    world.do_all("latest").await;
    bury().await;
    let refused = world.arrive_late("discarded", &[]).await;
    world.store.reject(refused, world.by("not ours")).await.expect("rejects");
    bury().await;
    world.arrive_late("review", &[]).await;
    bury().await;
    // Two dead jobs are one dead event.
    world.accept("dead", &[job("fee"), job("latest")]).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Never)).await;
    world.settle(&world.claim_one("latest").await, failed(Retry::Never)).await;
    bury().await;
    world.accept("failed", &[job("fee")]).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Schedule)).await;
    bury().await;
    world.accept("held", &[placed("stock", "hammer", 3)]).await;
    world.claim("stock", 10).await;
    bury().await;
    world.arrive(&Sender::of("acme", "rare"), "other", &[]).await;
    bury().await;
    world.accept("processing", &[job("fee")]).await;
    world.claim_one("fee").await;
    bury().await;
    world.accept("received", &[job("stock")]).await;
    for id in ["rest_0", "rest_1", "rest_2"] {
        world.accept(id, &[]).await;
    }
}

pub(crate) async fn a_search_over_several_pages_finds_each_match_once<S: Working>(world: World<S>) {
    // Matches lie further apart than a page may read. A page that ended without a cursor would hide them, and
    // one that began again at its last item would show it twice.
    one_of_each(&world, 5).await;
    for (status, expected) in [
        (Status::Review, &["review"][..]),
        (Status::Discarded, &["discarded"]),
        (Status::Dead, &["dead"]),
        (Status::Failed, &["failed"]),
        (Status::Held, &["held"]),
        (Status::Processing, &["processing"]),
        (Status::Received, &["received"]),
        (Status::Stale, &["stale"]),
        (Status::Ignored, &["rest_2", "rest_1", "rest_0", "other", "ignored"]),
    ] {
        assert_eq!(events(&world, of_status(status)).await, expected, "{status:?}");
    }
    let processed = events(&world, of_status(Status::Processed)).await;
    assert_eq!(processed.len(), 46, "{processed:?}");
    let any = EventFilter::default;
    let unfinished_since = Some(after(86_400));
    let open = ["received", "processing", "held", "failed", "dead", "review"];
    assert_eq!(events(&world, EventFilter { unfinished_since, ..any() }).await, open);
    let source = Some(SourceName::new("rare"));
    assert_eq!(events(&world, EventFilter { source, ..any() }).await, ["other"]);
    let tenant = Some(Tenant::new("acme"));
    assert_eq!(events(&world, EventFilter { tenant, ..any() }).await, ["other"]);
    let none = Some(SourceName::new("absent"));
    assert_eq!(events(&world, EventFilter { source: none, ..any() }).await, [""; 0]);
    let text = Some(TextSearch::new("plain_17"));
    assert_eq!(events(&world, EventFilter { text, ..any() }).await, ["plain_17"]);
    let event_type = Some("payout.never".to_owned());
    assert_eq!(events(&world, EventFilter { event_type, ..any() }).await, [""; 0]);
    // Two copies of one event, and one of another.
    for id in ["dead", "dead", "plain_9"] {
        let copy = world.arrive(&Sender::plain(), id, &[]).await;
        assert!(matches!(copy, Verdict::Duplicate(_)), "{copy:?}");
    }
    world.store.flush_copies().await;
    assert_eq!(
        events(&world, EventFilter { has_copies: true, ..any() }).await,
        ["dead", "plain_9"]
    );
    let dead = EventFilter { has_copies: true, ..of_status(Status::Dead) };
    assert_eq!(events(&world, dead).await, ["dead"]);
    let all = events(&world, any()).await;
    let mut once = all.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!((all.len(), once.len()), (59, 59));
}

pub(crate) async fn events_that_come_during_a_search_are_not_in_it<S: Working>(world: World<S>) {
    // New rows push the others down: a search by offset would show rows twice.
    world.announce([spec("fee")]).await;
    for n in 0..30 {
        let jobs = if n % 10 == 0 { vec![job("fee")] } else { Vec::new() };
        world.accept(&format!("evt_{n:02}"), &jobs).await;
    }
    let came = std::sync::atomic::AtomicUsize::new(0);
    for status in [Status::Received, Status::Ignored] {
        let read = async |before| {
            let page = EventFilter { before, limit: LIMIT, bound: BOUND, ..of_status(status) };
            world.store.events(page).await.expect("reads")
        };
        let found = search(read, async || {
            let n = came.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            world.accept(&format!("late_{n:02}"), &[job("fee")]).await;
        })
        .await;
        let of_before = found.iter().filter(|event| event.event_id.starts_with("evt_")).count();
        let expected = if status == Status::Received { 3 } else { 27 };
        let shown: std::collections::BTreeSet<_> = found.iter().map(|event| event.id).collect();
        assert_eq!((of_before, found.len(), shown.len()), (expected, expected, expected));
    }
}

pub(crate) async fn jobs_are_searched_in_bounded_pages<S: Working>(world: World<S>) {
    one_of_each(&world, 5).await;
    let jobs = async |filter: JobFilter| -> Vec<String> {
        let read = async |before| {
            let page = JobFilter { before, limit: LIMIT, bound: BOUND, ..filter.clone() };
            world.store.jobs(page).await.expect("reads")
        };
        let found = search(read, async || {}).await;
        found.into_iter().map(|job| format!("{} {}", job.event_id, job.handler)).collect()
    };
    let of = |phase| JobFilter { phase: Some(phase), ..JobFilter::default() };
    for (phase, expected) in [
        (Phase::Dead, 2),
        (Phase::Held, 1),
        (Phase::Stale, 1),
        (Phase::Leased, 1),
        (Phase::Ready, 2),
        (Phase::Parked, 0),
        (Phase::Review, 0),
        (Phase::Done, 46),
    ] {
        let found = jobs(of(phase)).await;
        assert_eq!(found.len(), expected, "{phase:?}: {found:?}");
    }
    let fee = JobFilter { handler: Some(HandlerName::new("fee")), ..of(Phase::Dead) };
    assert_eq!(jobs(fee).await, ["dead fee"]);
    let acme = JobFilter { tenant: Some(Tenant::new("acme")), ..JobFilter::default() };
    assert_eq!(jobs(acme).await, [""; 0]);
    let died_of = |error: &str| JobFilter { error: Some(error.to_owned()), ..of(Phase::Dead) };
    let dead = jobs(of(Phase::Dead)).await;
    let groups = world.store.dead_groups(JobFilter { limit: 10, ..of(Phase::Dead) }).await;
    for group in groups.expect("reads").groups {
        let listed = jobs(died_of(&group.error)).await;
        assert_eq!(listed.len() as u64, group.count, "{group:?}: {listed:?} of {dead:?}");
    }
    assert_eq!(jobs(died_of("another error")).await, [""; 0]);
    let without = JobFilter { error: Some(String::new()), ..of(Phase::Held) };
    assert_eq!(jobs(without).await.len(), 1, "a held job has no error");
    let forced = JobFilter { forced: true, ..JobFilter::default() };
    assert_eq!(jobs(forced.clone()).await, [""; 0]);
    let plain = world.event("plain_17").await.summary.id;
    world.replay(plain, &[job("fee")], Replay::Force).await;
    assert_eq!(jobs(forced.clone()).await, ["plain_17 fee"]);
    let done = JobFilter { phase: Some(Phase::Done), ..forced };
    assert_eq!(jobs(done).await, [""; 0]);
    let mut all = BTreeMap::<String, usize>::new();
    for job in jobs(JobFilter::default()).await {
        *all.entry(job).or_default() += 1;
    }
    assert!(all.len() == 53 && all.values().all(|times| *times == 1), "{all:?}");
}

pub(crate) async fn messages_and_deliveries_are_searched_in_bounded_pages<S: Sending>(
    world: World<S>,
) {
    // One of each status among others that were delivered, over two endpoints.
    let endpoint = world.add(wanting(&["invoice.*"])).await;
    world.add(wanting(&["invoice.*", "order.*"])).await;
    let silent = world.add(wanting(&["silent.*"])).await;
    let of = |id: &str, kind: &str| NewMessage { r#type: kind.to_owned(), ..message(id) };
    let bury = async |name: &str| {
        for n in 0..5 {
            world.send(of(&format!("{name}_{n}"), "order.paid")).await;
        }
        for claim in world.take(ALL).await {
            world.report(&claim, delivered()).await;
        }
        world.pass(1);
    };
    world.send(of("none", "absent")).await;
    bury("a").await;
    world.send(of("held", "silent.night").with_key("k")).await;
    world.disable(silent).await;
    bury("b").await;
    world.send(message("dead")).await;
    for claim in world.take(ALL).await {
        let verdict = match claim.endpoint.id == endpoint {
            true => crate::sending::failed(Retry::Never),
            false => delivered(),
        };
        world.report(&claim, verdict).await;
    }
    bury("c").await;
    world.send(of("failed", "order.paid")).await;
    for claim in world.take(ALL).await {
        world.report(&claim, crate::sending::failed(Retry::Schedule)).await;
    }
    world.send(of("sending", "order.paid")).await;
    world.take(ALL).await;
    world.send(of("waiting", "order.paid").with_tenant("default")).await;

    let messages = async |filter: MessageFilter| -> Vec<String> {
        let read = async |before| {
            let page = MessageFilter { before, limit: LIMIT, bound: BOUND, ..filter.clone() };
            world.store.messages(page).await.expect("reads")
        };
        search(read, async || {}).await.into_iter().map(|message| message.id).collect()
    };
    let deliveries = async |filter: DeliveryFilter| -> Vec<String> {
        let read = async |before| {
            let page = DeliveryFilter { before, limit: LIMIT, bound: BOUND, ..filter.clone() };
            world.store.deliveries(page).await.expect("reads")
        };
        search(read, async || {}).await.into_iter().map(|delivery| delivery.message).collect()
    };
    for (status, id) in [
        (DeliveryStatus::Dead, "dead"),
        (DeliveryStatus::Failed, "failed"),
        (DeliveryStatus::Held, "held"),
        (DeliveryStatus::Sending, "sending"),
        (DeliveryStatus::Waiting, "waiting"),
    ] {
        let filter =
            MessageFilter { status: Some(MessageStatus(Some(status))), ..MessageFilter::default() };
        assert_eq!(messages(filter).await, [id], "{status:?}");
        let filter = DeliveryFilter { status: Some(status), ..DeliveryFilter::default() };
        assert_eq!(deliveries(filter.clone()).await, [id], "{status:?}");
        let to = DeliveryFilter { endpoint: Some(endpoint), ..filter };
        let expected = if status == DeliveryStatus::Dead { &[id][..] } else { &[] };
        assert_eq!(deliveries(to).await, expected, "{status:?}");
    }
    let any = MessageFilter::default;
    let status = Some(MessageStatus(None));
    assert_eq!(messages(MessageFilter { status, ..any() }).await, ["none"]);
    let message_type = Some("silent.night".to_owned());
    assert_eq!(messages(MessageFilter { message_type, ..any() }).await, ["held"]);
    let key = Some("k".to_owned());
    assert_eq!(messages(MessageFilter { key: key.clone(), ..any() }).await, ["held"]);
    assert_eq!(deliveries(DeliveryFilter { key, ..DeliveryFilter::default() }).await, ["held"]);
    assert_eq!(messages(any()).await.len(), 21);
    let to = DeliveryFilter { endpoint: Some(endpoint), ..DeliveryFilter::default() };
    assert_eq!(deliveries(to).await, ["dead"]);
    assert_eq!(deliveries(DeliveryFilter::default()).await.len(), 21);
}

/// A thousand events with these ids, received now.
pub(crate) async fn a_thousand<S: Working>(world: &World<S>, name: &str) {
    let events: Vec<_> = (0..1_000).map(|n| body(&format!("{name}-{n}"))).collect();
    let text = format!(r#"{{"events":[{}]}}"#, events.join(","));
    let now = world.clock.now();
    let ingest = Sender::of_several().ingest_for(&text, now, now, &[]);
    world.store.ingest(ingest).await.expect("ingests");
}

/// The events of one second that contain a text, from one page that reads far less than all events.
async fn of_a_second<S: Working>(world: &World<S>, second: i64, text: &str) -> Vec<String> {
    let filter = EventFilter {
        since: Some(after(second)),
        until: Some(after(second + 1)),
        text: Some(TextSearch::new(text)),
        limit: 10,
        ..EventFilter::default()
    };
    let page = EventFilter { bound: ReadBound::Rows(2_000), ..filter.clone() };
    let page = world.store.events(page).await.expect("reads");
    assert_eq!((page.next, page.searched_to), (None, None));
    page.items.into_iter().map(|event| event.event_id).collect()
}

pub(crate) async fn a_list_of_a_time_begins_near_it<S: Working>(world: World<S>) {
    // Enough events that reading all of them would take far more than the bound: a list that began at the
    // newest one would need many pages.
    for hour in 0..12 {
        a_thousand(&world, &hour.to_string()).await;
        world.pass(3_600);
    }
    assert_eq!(of_a_second(&world, 3 * 3_600, "3-77\"").await, ["3-77"]);
    assert_eq!(of_a_second(&world, 0, "0-77\"").await, ["0-77"]);
    assert_eq!(of_a_second(&world, 11 * 3_600, "11-77\"").await, ["11-77"]);
    assert_eq!(of_a_second(&world, 100, "-77\"").await, [""; 0]);
}

pub(crate) async fn a_list_of_a_time_is_whole_after_the_clock_was_set_back<S: Working>(
    world: World<S>,
) {
    // Later rows have earlier times: a binary search by time alone would miss the rows on one side.
    for hour in 0..6 {
        a_thousand(&world, &format!("first-{hour}")).await;
        world.pass(3_600);
    }
    world.pass(-4 * 3_600);
    for hour in 2..8 {
        a_thousand(&world, &format!("again-{hour}")).await;
        world.pass(3_600);
    }
    let filter = EventFilter {
        since: Some(after(3 * 3_600)),
        until: Some(after(3 * 3_600 + 1)),
        text: Some(TextSearch::new("-3-77\"")),
        limit: 10,
        ..EventFilter::default()
    };
    let page = EventFilter { bound: ReadBound::Rows(usize::MAX), ..filter };
    let page = world.store.events(page).await.expect("reads");
    let mut ids: Vec<_> = page.items.into_iter().map(|event| event.event_id).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["again-3-77", "first-3-77"]);
}

pub(crate) async fn a_result_stays_when_its_page_is_full_and_the_bound_is_reached<S: Working>(
    world: World<S>,
) {
    // Exactly as many matches as the page holds, in exactly as many rows as it may read.
    world.announce([spec("fee")]).await;
    for n in 0..2 {
        world.accept(&format!("evt_{n}"), &[job("fee")]).await;
        world.settle(&world.claim_one("fee").await, done("ok")).await;
    }
    let filter = EventFilter { limit: 2, bound: ReadBound::Rows(2), ..EventFilter::default() };
    let page = world.store.events(filter.clone()).await.expect("reads");
    assert_eq!((page.items.len(), page.searched_to), (2, None));
    if let Some(before) = page.next {
        let rest = EventFilter { before: Some(before), ..filter };
        let rest = world.store.events(rest).await.expect("reads");
        assert_eq!((rest.items.len(), rest.next), (0, None));
    }
}
