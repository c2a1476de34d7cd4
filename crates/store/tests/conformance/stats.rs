//! The input of statistics, alerts and `doctor`: how far behind each handler is, which events are
//! unfinished, and which arrived in a span of time.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_core::job::Retry;
use hapax_core::limits::LANE_COUNT_MAX;
use hapax_core::order::OrderPolicy;
use hapax_core::store::{
    DeadGroup, EventFilter, EventSample, Gauges, JobFilter, LaneState, Outcome, ReadBound,
    SampleAsk, Status, Tallies, TallyKind, TrafficAsk, TrafficCount, TrafficCounts, TrafficFigures,
    Verdict, traffic_of_all,
};
use hapax_core::{SourceName, Tenant, Timestamp};
use uuid::Uuid;

use crate::harness::{
    LEASE, Sender, Working, World, after, body, done, failed, handler, job, noon, ordered, placed,
    spec,
};

fn lane(name: &str) -> LaneState {
    LaneState {
        handler: handler(name),
        oldest_due: None,
        ready: 0,
        leased: 0,
        held: 0,
        parked: 0,
        review: 0,
        dead: 0,
    }
}

async fn lanes<S: Working>(world: &World<S>) -> Vec<LaneState> {
    world.store.lanes().await.expect("reads")
}

fn seconds_after(at: Timestamp, seconds: i64) -> Timestamp {
    Timestamp::from_second(at.as_second() + seconds).expect("in range")
}

pub(crate) async fn each_lane_says_how_far_behind_it_is<S: Working>(world: World<S>) {
    // One handler has jobs of two tenants in every phase, and another handler has finished
    // everything.
    world
        .announce([
            spec("fee"),
            spec("idle"),
            ordered("latest", OrderPolicy::Latest),
            ordered("stock", OrderPolicy::Sequence { start: Some(1) }),
        ])
        .await;
    assert_eq!(lanes(&world).await, []);
    let noon = world.clock.now();
    world.accept("dead", &[job("fee"), job("idle")]).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Never)).await;
    world.settle(&world.claim_one("idle").await, done("done")).await;
    world.accept("leased", &[job("fee")]).await;
    world.claim_one("fee").await;
    world.pass(10);
    world.accept("ready", &[job("fee")]).await;
    world.arrive(&Sender::of("acme", "shop"), "other", &[job("fee")]).await;
    world.accept("gap", &[placed("stock", "hammer", 3)]).await;
    assert!(world.claim("stock", 10).await.is_empty());
    world.accept("first", &[placed("latest", "r", 1)]).await;
    world.accept("second", &[placed("latest", "r", 2)]).await;
    assert_eq!(world.claim("latest", 10).await.len(), 1);
    let fee = LaneState {
        oldest_due: Some(seconds_after(noon, 10)),
        ready: 2,
        leased: 1,
        dead: 1,
        ..lane("fee")
    };
    let latest = LaneState {
        oldest_due: Some(seconds_after(noon, 10 + LEASE)),
        leased: 1,
        parked: 1,
        ..lane("latest")
    };
    assert_eq!(lanes(&world).await, [fee, latest, LaneState { held: 1, ..lane("stock") }]);
}

pub(crate) async fn a_lane_that_no_node_knows_is_listed_as_well<S: Working>(world: World<S>) {
    // A handler that was renamed leaves its jobs behind; no worker claims them, so they must be
    // visible.
    world.announce([spec("fee")]).await;
    let noon = world.clock.now();
    world.accept("evt_1", &[job("fee"), job("renamed")]).await;
    world.arrive(&Sender::of("default", "gone"), "evt_1", &[job("fee")]).await;
    world.settle(&world.claim_one("fee").await, done("done")).await;
    let found = lanes(&world).await;
    let gone = SourceName::new("gone");
    let waits = |mut state: LaneState| {
        state.ready = 1;
        state.oldest_due = Some(noon);
        state
    };
    let mut of_gone = lane("fee");
    of_gone.handler.source = gone;
    assert_eq!(found, [waits(of_gone), waits(lane("renamed"))]);
}

pub(crate) async fn an_expired_lease_is_work_that_is_due<S: Working>(world: World<S>) {
    // A worker that died leaves no ready job: its job has been due since its lease ended.
    world.announce([spec("fee")]).await;
    let noon = world.clock.now();
    world.accept("evt_1", &[job("fee")]).await;
    world.claim_one("fee").await;
    world.pass(10 * LEASE);
    let due = Some(seconds_after(noon, LEASE));
    assert_eq!(lanes(&world).await, [LaneState { leased: 1, oldest_due: due, ..lane("fee") }]);
}

pub(crate) async fn counting_a_backlog_stops_at_the_cap<S: Working>(world: World<S>) {
    // There are more jobs than the limit, over several tenants: the sum must not exceed it.
    world.announce([spec("fee")]).await;
    let now = world.clock.now();
    for (tenant, batches) in [("a", 6), ("b", 6)] {
        let sender = Sender::of_several_of(tenant);
        for batch in 0..batches {
            let events: Vec<_> = (0..1_000).map(|n| body(&format!("{batch}-{n}"))).collect();
            let body = format!(r#"{{"events":[{}]}}"#, events.join(","));
            let ingest = sender.ingest_for(&body, now, now, &[job("fee")]);
            world.store.ingest(ingest).await.expect("ingests");
        }
    }
    let full = LaneState { ready: LANE_COUNT_MAX, oldest_due: Some(now), ..lane("fee") };
    assert_eq!(lanes(&world).await, [full]);
}

async fn unfinished<S: Working>(world: &World<S>, filter: EventFilter) -> Vec<String> {
    let filter = EventFilter { limit: 100, ..filter };
    let page = world.store.events(filter).await.expect("reads");
    page.items.into_iter().map(|event| event.event_id).collect()
}

pub(crate) async fn unfinished_events_came_before_and_have_not_ended<S: Working>(world: World<S>) {
    // There is one event in each status. Dead events and events in review are unfinished; stale and
    // ignored ones are finished.
    world
        .announce([
            spec("fee"),
            ordered("latest", OrderPolicy::Latest),
            ordered("stock", OrderPolicy::Sequence { start: Some(1) }),
        ])
        .await;
    world.accept("ignored", &[]).await;
    world.accept("processed", &[job("fee")]).await;
    world.do_all("fee").await;
    world.accept("newer", &[placed("latest", "r", 2)]).await;
    world.do_all("latest").await;
    world.accept("stale", &[placed("latest", "r", 1)]).await;
    world.do_all("latest").await;
    let refused = world.arrive_late("discarded", &[]).await;
    world.store.reject(refused, world.by("not ours")).await.expect("rejects");
    world.arrive_late("review", &[]).await;
    world.accept("dead", &[job("fee")]).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Never)).await;
    world.accept("failed", &[job("fee")]).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Schedule)).await;
    world.accept("held", &[placed("stock", "hammer", 3)]).await;
    world.claim("stock", 10).await;
    world.accept("processing", &[job("fee")]).await;
    world.claim_one("fee").await;
    world.accept("received", &[job("fee")]).await;
    let edge = seconds_after(world.clock.now(), 1);
    world.pass(1);
    world.accept("too new", &[job("fee")]).await;

    let before = |at| EventFilter { unfinished_since: Some(at), ..EventFilter::default() };
    let open = ["received", "processing", "held", "failed", "dead", "review"];
    assert_eq!(unfinished(&world, before(edge)).await, open);
    let all = unfinished(&world, EventFilter::default()).await;
    assert_eq!(all.len(), 12, "{all:?}");
    // The status is combined with the other conditions, including `until`.
    let both = |status| EventFilter { status: Some(status), ..before(edge) };
    assert_eq!(unfinished(&world, both(Status::Dead)).await, ["dead"]);
    assert_eq!(unfinished(&world, both(Status::Processed)).await, [""; 0]);
    let until = EventFilter { until: Some(Timestamp::UNIX_EPOCH), ..before(edge) };
    assert_eq!(unfinished(&world, until).await, [""; 0]);
    let other = EventFilter { tenant: Some(Tenant::new("acme")), ..before(edge) };
    assert_eq!(unfinished(&world, other).await, [""; 0]);
    assert_eq!(unfinished(&world, before(Timestamp::UNIX_EPOCH)).await, [""; 0]);
}

pub(crate) async fn a_page_of_unfinished_events_is_full_although_others_lie_between<S: Working>(
    world: World<S>,
) {
    // Filtering a page after reading it would return short pages, or lose later events.
    world.announce([spec("fee")]).await;
    for n in 0..40 {
        let jobs = if n % 10 == 0 { vec![job("fee")] } else { Vec::new() };
        world.accept(&format!("evt_{n:02}"), &jobs).await;
    }
    let later = seconds_after(world.clock.now(), 60);
    let mut filter =
        EventFilter { unfinished_since: Some(later), limit: 3, ..EventFilter::default() };
    let page = world.store.events(filter.clone()).await.expect("reads");
    let ids: Vec<_> = page.items.iter().map(|event| event.event_id.as_str()).collect();
    assert_eq!(ids, ["evt_30", "evt_20", "evt_10"]);
    filter.before = page.next;
    assert!(filter.before.is_some());
    let page = world.store.events(filter).await.expect("reads");
    let ids: Vec<_> = page.items.iter().map(|event| event.event_id.as_str()).collect();
    assert_eq!((ids, page.next), (vec!["evt_00"], None));
}

async fn sample<S: Working>(world: &World<S>, since: Timestamp, limit: usize) -> EventSample {
    world.store.sample(SampleAsk { since, limit }).await.expect("reads")
}

pub(crate) async fn a_sample_holds_the_events_of_a_span_that_came_more_than_once_and_when<
    S: Working,
>(
    world: World<S>,
) {
    // One event lies just before the span, one exactly at its edge, copies arrive long after, and a
    // clock was set back in between. Another event came once only.
    world.announce([spec("fee")]).await;
    let empty = sample(&world, Timestamp::UNIX_EPOCH, 10).await;
    assert_eq!(empty, EventSample { total: 0, events: Vec::new() });
    let noon = world.clock.now();
    world.accept("before", &[]).await;
    world.pass(100);
    world.accept("edge", &[job("fee")]).await;
    world.pass(3);
    world.settle(&world.claim_one("fee").await, done("done")).await;
    for _ in 0..2 {
        world.pass(10);
        let again = world.arrive(&Sender::plain(), "edge", &[job("fee")]).await;
        assert!(matches!(again, Verdict::Duplicate(_)), "{again:?}");
    }
    world.pass(-5);
    world.accept("after", &[]).await;
    world.accept("once", &[]).await;
    for copied in ["before", "after"] {
        world.arrive(&Sender::plain(), copied, &[]).await;
        crate::cases::arrivals_reach(&*world.store, copied, 2).await;
    }
    crate::cases::arrivals_reach(&*world.store, "edge", 3).await;
    let found = sample(&world, seconds_after(noon, 100), 10).await;
    assert_eq!(found.total, 2);
    assert!(!found.is_partial());
    let ids: Vec<_> = found.events.iter().map(|one| one.summary.event_id.as_str()).collect();
    assert_eq!(ids, ["after", "edge"]);
    let edge = &found.events[1];
    assert_eq!(edge.summary, world.event("edge").await.summary);
    assert_eq!(edge.summary.processed_at, Some(seconds_after(noon, 103)));
    assert_eq!(edge.arrived_at, [100, 113, 123].map(|later| seconds_after(noon, later)));
    assert_eq!(found.events[0].arrived_at, [seconds_after(noon, 118); 2]);
    assert_eq!(sample(&world, seconds_after(noon, 101), 10).await.events.len(), 1);
    assert_eq!(sample(&world, seconds_after(noon, 9_999), 10).await.total, 0);
}

pub(crate) async fn a_large_span_is_sampled_evenly<S: Working>(world: World<S>) {
    // A sample of only the newest or only the oldest events would describe a moment and not the
    // span.
    let noon = world.clock.now();
    for n in 0..100 {
        world.accept(&format!("evt_{n:03}"), &[]).await;
        world.accept(&format!("once_{n:03}"), &[]).await;
        world.arrive(&Sender::plain(), &format!("evt_{n:03}"), &[]).await;
        world.pass(10);
    }
    for n in 0..100 {
        crate::cases::arrivals_reach(&*world.store, &format!("evt_{n:03}"), 2).await;
    }
    let found = sample(&world, seconds_after(noon, 500), 10).await;
    assert!(found.is_partial());
    assert_eq!((found.total, found.events.len()), (50, 10));
    let times: Vec<_> = found.events.iter().map(|one| one.summary.received_at).collect();
    assert!(times.windows(2).all(|pair| pair[0] == seconds_after(pair[1], 50)), "{times:?}");
    let all = sample(&world, seconds_after(noon, 500), 50).await;
    assert_eq!((all.total, all.events.len(), all.is_partial()), (50, 50, false));
}

pub(crate) async fn events_that_wait_for_a_decision_are_counted_by_source<S: Working>(
    world: World<S>,
) {
    // One event in review is approved and one is rejected: neither waits any more. Accepted events never
    // waited.
    world.announce([spec("fee")]).await;
    assert_eq!(world.store.in_review().await.expect("reads"), []);
    let mut late = Vec::new();
    for n in 0..5 {
        late.push(world.arrive_late(&format!("late_{n}"), &[job("fee")]).await);
        world.accept(&format!("evt_{n}"), &[job("fee")]).await;
    }
    let of = |count| [(SourceName::new("shop"), count)];
    assert_eq!(world.store.in_review().await.expect("reads"), of(5));
    world.store.reject(late[0], world.by("not ours")).await.expect("rejects");
    world.store.approve(late[1], vec![job("fee")], world.by("ours")).await.expect("approves");
    assert_eq!(world.store.in_review().await.expect("reads"), of(3));
}

pub(crate) async fn the_space_that_a_store_occupies_adds_up<S: Working>(world: World<S>) {
    let found = world.store.storage().await.expect("reads");
    assert!(found.free_bytes.unwrap_or(0) <= found.database_bytes, "{found:?}");
    let of_tables: u64 = found.tables.iter().map(|table| table.bytes).sum();
    assert!(of_tables <= found.database_bytes, "{found:?}");
    assert!(found.tables.is_sorted_by(|one, other| one.bytes >= other.bytes), "{found:?}");
}

pub(crate) async fn traffic_is_added_up_and_becomes_coarser_without_losing_a_count<S: Working>(
    world: World<S>,
) {
    const DAY: i64 = 86_400;
    let now = world.clock.now();
    let at = |seconds: i64| now - Duration::from_secs(seconds.unsigned_abs());
    let count = |source: &str, at, new| {
        let mut tallies = Tallies::default();
        tallies.count(TallyKind::Ack, 40, new);
        tallies.count(TallyKind::Processing, u8::try_from(new % 100).expect("small"), 1);
        TrafficCount {
            source: SourceName::new(source),
            at,
            figures: TrafficFigures {
                counts: TrafficCounts {
                    new,
                    copies: 2 * new,
                    conflicts: 3 * new,
                    rejected: 1,
                    unavailable: 3,
                    succeeded: 4 * new,
                    forced: 7 * new,
                    failed_attempts: 5 * new,
                    died: 6 * new,
                    retrying: -7,
                    ack_micros: 8 * new,
                    wait_micros: 9 * new,
                    processing_micros: 1 << 50,
                },
                tallies,
                gauges: Gauges { waiting: new, dead: 1, review: 0, last_arrival: 1_000 + new },
            },
        }
    };
    let read = async |source: Option<&str>, step: i64| {
        let ask = TrafficAsk {
            source: source.map(SourceName::new),
            from: at(400 * DAY),
            to: now + Duration::from_secs(1),
            step: Duration::from_secs(step.unsigned_abs()),
            tallies: true,
        };
        traffic_of_all(world.store.traffic_by_source(ask).await.expect("reads"))
    };
    let record_as = async |node: u128, counts| {
        let recorded = world.store.record_traffic(Uuid::from_u128(node), counts).await;
        recorded.expect("records");
    };
    let record = async |counts| record_as(1, counts).await;
    for repeated in 0..2 {
        // A node writes the same counts again, and then larger ones in their place.
        record(vec![count("a", at(0), repeated), count("b", at(0), 10)]).await;
        record_as(2, vec![count("a", at(0), 1), count("a", at(60), 4)]).await;
    }
    let news = |points: BTreeMap<Timestamp, TrafficFigures>| {
        points.values().map(|figures| figures.counts.new).collect::<Vec<_>>()
    };
    assert_eq!(news(read(Some("a"), 60).await), [4, 2]);
    assert_eq!(news(read(None, 60).await), [4, 12]);
    let all = read(None, 100 * 365 * DAY).await.into_values().next().expect("one step");
    let sums = TrafficCounts {
        new: 16,
        copies: 32,
        conflicts: 48,
        rejected: 4,
        unavailable: 12,
        succeeded: 64,
        forced: 112,
        failed_attempts: 80,
        died: 96,
        retrying: -28,
        ack_micros: 128,
        wait_micros: 144,
        processing_micros: 4 << 50,
    };
    assert_eq!(all.counts, sums);
    assert_eq!(all.tallies.of(TallyKind::Ack).collect::<Vec<_>>(), [(40, 16)]);
    let processing: Vec<_> = all.tallies.of(TallyKind::Processing).collect();
    assert_eq!(processing, [(1, 2), (4, 1), (10, 1)]);
    // For one source the highest value of a gauge counts; the gauges of two sources are added.
    let gauges = Gauges { waiting: 14, dead: 2, review: 0, last_arrival: 1_010 };
    assert_eq!(all.gauges, gauges);

    let ask = TrafficAsk {
        source: None,
        from: at(DAY),
        to: now + Duration::from_secs(1),
        step: Duration::from_secs(60),
        tallies: false,
    };
    let of_each = world.store.traffic_by_source(ask.clone()).await.expect("reads");
    assert!(of_each.iter().all(|one| one.figures.tallies.is_empty()), "they were not asked for");
    let of_each: Vec<_> =
        of_each.iter().map(|one| (one.source.as_str(), one.figures.counts.new)).collect();
    assert_eq!(of_each, [("a", 4), ("a", 2), ("b", 10)]);
    let ask = TrafficAsk { source: Some(SourceName::new("b")), tallies: true, ..ask };
    let of_one = world.store.traffic_by_source(ask).await.expect("reads");
    assert_eq!(of_one, [count("b", at(0), 10)]);

    // Counts of three days ago are kept by the hour. Counts of 100 days ago are kept by the day.
    // Counts of three years ago are not kept.
    let old = [(3 * DAY, 100), (3 * DAY + 60, 100), (100 * DAY, 1_000), (1_098 * DAY, 5_000)];
    record(old.map(|(age, new)| count("a", at(age), new)).to_vec()).await;
    for _ in 0..3 {
        record(Vec::new()).await;
        assert_eq!(news(read(Some("a"), DAY).await).iter().sum::<u64>(), 1_206);
    }
    let by_the_minute = read(Some("a"), 60).await;
    let coarse: Vec<_> = by_the_minute.keys().map(|at| at.as_second()).collect();
    assert_eq!(coarse[0] % DAY, 0, "{by_the_minute:?}");
    assert_eq!(coarse[1] % 3_600, 0, "{by_the_minute:?}");
    let of_each_day = read(Some("a"), DAY).await;
    let whole: Vec<_> = of_each_day.values().map(|figures| figures.gauges.waiting).collect();
    assert_eq!(whole[..2], [1_000, 100], "{of_each_day:?}");
    let acks: u64 = of_each_day.values().map(|figures| figures.tallies.total(TallyKind::Ack)).sum();
    assert_eq!(acks, 1_206, "{of_each_day:?}");
    let micros: u64 =
        of_each_day.values().map(|figures| figures.counts.processing_micros >> 50).sum();
    assert_eq!(micros, 6, "{of_each_day:?}");
}

pub(crate) async fn dead_letters_are_counted_by_error_over_all_of_them<S: Working>(
    world: World<S>,
) {
    // Other states, other handlers, and more dead letters than the bound allows.
    world.announce([spec("fee"), spec("mail")]).await;
    let die = async |id: &str, name: &str, error: &str| {
        world.accept(id, &[job(name)]).await;
        let claim = world.claim(name, 1).await.remove(0);
        let error = error.into();
        world.settle(&claim, Outcome::Failed { error, retry: Retry::Never, answer: None }).await;
        world.pass(10);
    };
    let groups = async |filter: JobFilter| {
        let found = world.store.dead_groups(filter).await.expect("reads");
        let group = |one: &DeadGroup| {
            let second = |at: Timestamp| at.duration_since(noon()).as_secs();
            (one.error.clone(), one.count, second(one.first), second(one.last))
        };
        let shown: Vec<_> = found.groups.iter().map(group).collect();
        (shown, found.letters, found.errors, found.searched_to)
    };
    let all = |bound| JobFilter { limit: 10, bound, ..JobFilter::default() };
    let rows = ReadBound::Rows;
    assert_eq!(groups(all(rows(9))).await, (vec![], 0, 0, None));
    for n in 0..5 {
        let error = if n == 3 { "no funds" } else { "HTTP 500" };
        die(&format!("evt_{n}"), "fee", error).await;
    }
    die("evt_5", "mail", "no funds").await;
    world.accept("evt_open", &[job("fee")]).await;
    let group = |error: &str, count, first, last| (error.to_owned(), count, first, last);
    let whole = vec![group("HTTP 500", 4, 0, 40), group("no funds", 2, 30, 50)];
    assert_eq!(groups(all(rows(99))).await, (whole.clone(), 6, 2, None));
    assert_eq!(groups(all(rows(6))).await, (whole.clone(), 6, 2, None), "just enough");
    let one = JobFilter { limit: 1, ..all(rows(99)) };
    assert_eq!(groups(one).await, (whole[..1].to_vec(), 6, 2, None));
    let of_mail = JobFilter { handler: Some(handler("mail").handler), ..all(rows(99)) };
    assert_eq!(groups(of_mail).await, (vec![group("no funds", 1, 50, 50)], 1, 1, None));
    let elsewhere = JobFilter { tenant: Some(Tenant::new("nobody")), ..all(rows(99)) };
    assert_eq!(groups(elsewhere).await, (vec![], 0, 0, None));
    // The newest three.
    let newest = vec![group("no funds", 2, 30, 50), group("HTTP 500", 1, 40, 40)];
    assert_eq!(groups(all(rows(3))).await, (newest, 3, 2, Some(after(30))));
}
