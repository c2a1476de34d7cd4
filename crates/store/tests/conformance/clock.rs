//! SQLite uses this machine's clock, which may be set back: waiting jobs must not wait longer by
//! the whole step.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::KeyHash;
use hapax_core::endpoint::EndpointSettings;
use hapax_core::job::{Retry, WorkLocation};
use hapax_core::ledger::{Fingerprint, IdempotencyKey, Ledger, Reservation, ReserveAsk, Scope};
use hapax_core::order::{Gaps, OnGap, OrderPolicy};
use hapax_core::store::{
    EventAct, EventFilter, EventPlan, HandlerSpec, Held, NewPlan, PlanId, PlanRun, Plans, Status,
    Work,
};
use hapax_store::{SqliteOptions, SqliteStore};
use http::Method;
use uuid::Uuid;

use crate::harness::{LEASE, World, failed, ids, job, placed, spec, with_gaps};
use crate::sending::{self, ALL};

const HOUR: i64 = 3_600;

/// Opens the same file again.
async fn restarted(world: World<SqliteStore>) -> World<SqliteStore> {
    let World { store, clock, place } = world;
    store.close().await;
    drop(store);
    let place = place.expect("on a disk");
    let options =
        SqliteOptions { clock: clock.for_a_store(), ..SqliteOptions::new(place.directory()) };
    let store = Arc::new(SqliteStore::open(options).expect("opens"));
    World { store, clock, place: Some(place) }
}

/// The step is noticed by the running store, or by the next one at its start.
async fn after_a_step(world: World<SqliteStore>, restart: bool) -> World<SqliteStore> {
    world.pass(-HOUR);
    if restart {
        return restarted(world).await;
    }
    world
}

#[tokio::test]
async fn a_retry_waits_no_longer_than_planned_after_the_clock_was_set_back() {
    // One retry is due by the schedule, and another must wait longer than any schedule.
    for restart in [false, true] {
        let world = World::on_disk();
        world.announce([spec("fee")]).await;
        world.accept("soon", &[job("fee")]).await;
        world.settle(&world.claim_one("fee").await, failed(Retry::Schedule)).await;
        world.accept("later", &[job("fee")]).await;
        let two_hours = Retry::In(Duration::from_secs(7_200));
        world.settle(&world.claim_one("fee").await, failed(two_hours)).await;
        world.accept("at once", &[job("fee")]).await;
        let world = after_a_step(world, restart).await;
        world.announce([spec("fee")]).await;
        assert_eq!(world.do_all("fee").await, ["at once"], "restart: {restart}");
        world.pass(80);
        assert_eq!(world.do_all("fee").await, ["soon"], "restart: {restart}");
        world.pass(7_200 - 80 - 1);
        assert!(world.claim("fee", 10).await.is_empty(), "restart: {restart}");
        world.pass(1);
        assert_eq!(world.do_all("fee").await, ["later"], "restart: {restart}");
    }
}

#[tokio::test]
async fn a_lease_has_its_own_length_and_no_more_after_the_clock_was_set_back() {
    // The lease may neither end early, while its worker runs, nor last longer by the step.
    for restart in [false, true] {
        let world = World::on_disk();
        // A restart ends the leases of this process, and not those of external workers.
        let outside = || HandlerSpec { workplace: WorkLocation::Pulled, ..spec("fee") };
        world.announce([outside()]).await;
        world.accept("evt_1", &[job("fee")]).await;
        world.claim_one("fee").await;
        let world = after_a_step(world, restart).await;
        world.announce([outside()]).await;
        world.pass(LEASE - 1);
        assert!(world.claim("fee", 10).await.is_empty(), "restart: {restart}");
        world.pass(5);
        assert_eq!(ids(&world.claim("fee", 10).await), ["evt_1"], "restart: {restart}");
    }
}

#[tokio::test]
async fn a_gap_is_judged_after_its_own_time_though_the_clock_was_set_back() {
    let gaps = Gaps { hold: Duration::from_secs(60), on_gap: OnGap::Go, ..Gaps::default() };
    let order = || with_gaps("fee", OrderPolicy::Sequence { start: Some(1) }, gaps);
    for restart in [false, true] {
        let world = World::on_disk();
        world.announce([order()]).await;
        world.accept("second", &[placed("fee", "r", 2)]).await;
        assert!(world.claim("fee", 10).await.is_empty(), "it waits for the first");
        let world = after_a_step(world, restart).await;
        world.announce([order()]).await;
        assert!(world.claim("fee", 10).await.is_empty(), "restart: {restart}");
        world.pass(61);
        assert_eq!(ids(&world.claim("fee", 10).await), ["second"], "restart: {restart}");
    }
}

#[tokio::test]
async fn a_reservation_has_its_own_length_and_no_more_after_the_clock_was_set_back() {
    let ask = || ReserveAsk {
        scope: Scope::new("api", "acct_1", &Method::POST, "/charges"),
        key: IdempotencyKey::parse(b"k").expect("a key"),
        fingerprint: Fingerprint::of(None, b"{}", &[]),
        lease: Duration::from_secs(60),
        ttl: Duration::from_secs(600),
        quota: None,
    };
    for restart in [false, true] {
        let world = World::on_disk();
        let reserve =
            async |world: &World<SqliteStore>| world.store.reserve(ask()).await.expect("reserves");
        assert!(matches!(reserve(&world).await, Reservation::Fresh(_)));
        let world = after_a_step(world, restart).await;
        // A running store notices the step at the first prune.
        while world.store.prune(nothing_goes(), 10).await.expect("prunes") {}
        world.pass(59);
        let reservation = reserve(&world).await;
        let Reservation::InProgress { remaining } = reservation else { panic!("{reservation:?}") };
        assert!(remaining <= Duration::from_secs(1), "restart: {restart}: {remaining:?}");
        world.pass(2);
        let reservation = reserve(&world).await;
        assert!(
            matches!(reservation, Reservation::Fresh(_)),
            "restart: {restart}: {reservation:?}"
        );
    }
}

/// An endpoint whose failed deliveries are due again at once.
fn patient() -> EndpointSettings {
    EndpointSettings { retry: vec![Duration::ZERO; 10], ..sending::settings() }
}

#[tokio::test]
async fn a_paused_endpoint_is_tried_after_its_own_time_though_the_clock_was_set_back() {
    for restart in [false, true] {
        let world = World::on_disk();
        world.add(patient()).await;
        for n in 0..6 {
            world.send(sending::message(&format!("m{n}"))).await;
        }
        for _ in 0..5 {
            let claim = world.take(1).await.remove(0);
            let failed = sending::failed(Retry::Schedule);
            assert_eq!(world.report(&claim, failed).await, Held::Kept);
        }
        assert!(world.take(ALL).await.is_empty(), "its circuit is open");
        let world = after_a_step(world, restart).await;
        assert!(world.take(ALL).await.is_empty(), "restart: {restart}");
        world.pass(61);
        assert_eq!(world.take(ALL).await.len(), 1, "restart: {restart}");
    }
}

#[tokio::test]
async fn an_endpoint_with_a_rate_limit_waits_for_one_interval_though_the_clock_was_set_back() {
    for restart in [false, true] {
        let world = World::on_disk();
        let rate_limit = Some("1/m".parse().expect("a rate"));
        world.add(EndpointSettings { rate_limit, ..patient() }).await;
        for n in 0..3 {
            world.send(sending::message(&format!("m{n}"))).await;
        }
        let claim = world.take_one().await;
        assert_eq!(world.report(&claim, sending::delivered()).await, Held::Kept);
        assert!(world.take(ALL).await.is_empty(), "one in a minute");
        let world = after_a_step(world, restart).await;
        assert!(world.take(ALL).await.is_empty(), "restart: {restart}");
        world.pass(61);
        assert_eq!(world.take(ALL).await.len(), 1, "restart: {restart}");
    }
}

#[tokio::test]
async fn a_plan_runs_its_next_slice_though_the_clock_was_set_back() {
    for restart in [false, true] {
        let world = World::on_disk();
        world.announce([spec("fee")]).await;
        for id in ["evt_1", "evt_2"] {
            world.accept(id, &[job("fee")]).await;
            world.settle(&world.claim_one("fee").await, failed(Retry::Never)).await;
        }
        world.pass(1);
        let dead = EventFilter { status: Some(Status::Dead), ..EventFilter::default() };
        let plan = NewPlan {
            id: PlanId(Uuid::now_v7()),
            work: EventPlan::new(EventAct::Discard, None, dead).into(),
            rate: Some(1),
            request: KeyHash([7; 16]),
            alone: false,
        };
        world.store.create_plan(plan, world.by("an outage")).await.expect("creates");
        let next = async |world: &World<SqliteStore>| {
            world.store.run_plan(10, Vec::new()).await.expect("runs")
        };
        let PlanRun::Events(slice) = next(&world).await else { panic!("no slice is due") };
        assert_eq!(world.store.take_slice(*slice).await.expect("takes"), Held::Kept);
        assert!(matches!(next(&world).await, PlanRun::NotBefore(_)), "one in a second");
        let world = after_a_step(world, restart).await;
        world.pass(2);
        let ran = next(&world).await;
        assert!(matches!(ran, PlanRun::Events(_)), "restart: {restart}: {ran:?}");
    }
}

fn nothing_goes() -> hapax_core::store::Horizon {
    hapax_core::store::Horizon::forever()
}
