//! Plans of operators over the deliveries of an endpoint, or over events.

use std::cmp::Reverse;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::delivery::DeliveryPhase;
use hapax_core::endpoint::EndpointId;
use hapax_core::job::{HandlerName, Phase};
use hapax_core::store::{
    Action, ActionNote, DeliveryPlan, EventAct, EventFilter, EventPlan, EventSlice, Held, Horizon,
    JobScope, NewPlan, Plan, PlanCount, PlanCreated, PlanId, PlanRun, PlanState, PlanWork,
    PlannedDeliveries, PlannedEvent, Plans, ReplayAsk, ReplayEffect, Reviewed, SliceSpan, Status,
    StoreError, plan_slice, slice_wait,
};
use hapax_core::{KeyHash, Timestamp};
use jiff::SignedDuration;

use super::outbox::{DeliveryNumber, EndpointNumber, MessageNumber};
use super::{EventNumber, Job, MemoryStore, Model, ReviewState};

/// A plan, with the part that it has not taken yet.
#[derive(Debug)]
pub(super) struct StoredPlan {
    plan: Plan,
    request: KeyHash,
    next_at: Timestamp,
    left: RemainingItems,
}

/// The part of a plan that is left.
#[derive(Debug)]
enum RemainingItems {
    /// Deliveries to this endpoint.
    Deliveries(EndpointNumber, Vec<PlanItem>),
    /// Events from this number on.
    Events { from: EventNumber },
}

/// One item of a plan over deliveries: a delivery to send again, or a message to deliver.
#[derive(Debug, Clone, Copy)]
enum PlanItem {
    Delivery(DeliveryNumber),
    Message(MessageNumber),
}

impl Plans for MemoryStore {
    async fn count_plan(&self, work: PlanWork) -> Result<PlanCount, StoreError> {
        Ok(match self.model().planned(&work, self.now()) {
            Some((count, _)) => PlanCount::Counted(count),
            None => PlanCount::UnknownEndpoint,
        })
    }

    async fn create_plan(&self, plan: NewPlan, by: Action) -> Result<PlanCreated, StoreError> {
        Ok(self.model().create_plan(plan, by, self.now()))
    }

    async fn run_plan(&self, limit: usize, except: Vec<PlanId>) -> Result<PlanRun, StoreError> {
        let ran = self.model().run_plan(limit, &except, self.now());
        self.hint_deliveries();
        Ok(ran)
    }

    async fn take_slice(&self, slice: EventSlice) -> Result<Held, StoreError> {
        let held = self.model().take_slice(slice, self.now());
        self.hint();
        Ok(held)
    }

    async fn cancel_plan(&self, id: PlanId, _by: Action) -> Result<Option<Plan>, StoreError> {
        let mut model = self.model();
        let found = model.plans.iter_mut().find(|one| one.plan.id == id);
        Ok(found.map(|one| {
            if one.plan.state == PlanState::Running {
                one.plan.state = PlanState::Cancelled;
                one.plan.ended_at = Some(self.now());
            }
            one.plan.clone()
        }))
    }

    async fn plan(&self, id: PlanId) -> Result<Option<Plan>, StoreError> {
        let model = self.model();
        Ok(model.plans.iter().find(|one| one.plan.id == id).map(|one| one.plan.clone()))
    }

    async fn plans(&self, limit: usize) -> Result<Vec<Plan>, StoreError> {
        let mut plans: Vec<Plan> = self.model().plans.iter().map(|one| one.plan.clone()).collect();
        plans.sort_by_key(|plan| Reverse(plan.created_at));
        plans.truncate(limit);
        Ok(plans)
    }
}

/// The endpoint of a plan over deliveries.
fn endpoint_of(work: &PlanWork) -> Option<EndpointId> {
    match work {
        PlanWork::Deliveries(work) => Some(work.endpoint),
        PlanWork::Events(_) => None,
    }
}

impl Model {
    /// The count and the items of a plan that is made at this instant. `None` if its endpoint is
    /// unknown.
    fn planned(&self, work: &PlanWork, now: Timestamp) -> Option<(u64, RemainingItems)> {
        match work {
            PlanWork::Deliveries(work) => {
                let (endpoint, taken) = self.planned_deliveries(work, now)?;
                Some((taken.len() as u64, RemainingItems::Deliveries(endpoint, taken)))
            }
            PlanWork::Events(work) => {
                let count = self.planned_events(work, now, 0).count();
                Some((count as u64, RemainingItems::Events { from: 0 }))
            }
        }
    }

    /// The events from this number on that a plan of this instant takes, oldest first.
    fn planned_events<'a>(
        &'a self,
        work: &'a EventPlan,
        instant: Timestamp,
        from: EventNumber,
    ) -> impl Iterator<Item = EventNumber> + 'a {
        // The status is decided below, as of the instant.
        let exact = match work.filter.status {
            Some(Status::Dead | Status::Review) => None,
            status => status,
        };
        let until = Some(work.until(instant));
        let filter = EventFilter { status: exact, until, ..work.filter.clone() };
        let is_so = move |at: EventNumber, phase: Phase| {
            self.jobs_of(at).any(|job| {
                job.phase == phase && job.ended_at() < instant && is_of(job, work.handler.as_ref())
            })
        };
        let stands = move |at: EventNumber, state: ReviewState| match work.filter.status {
            Some(Status::Dead) => is_so(at, Phase::Dead),
            Some(Status::Review) => state == ReviewState::Review || is_so(at, Phase::Review),
            Some(_) | None => true,
        };
        let later = self.events.range(from..).filter(|(_, stored)| !stored.gone);
        later
            .filter(move |(at, stored)| {
                self.fits(&filter, **at, stored, &self.summary(**at))
                    && stands(**at, stored.review_state)
            })
            .map(|(at, _)| *at)
    }

    /// The items of a plan over deliveries, oldest first.
    fn planned_deliveries(
        &self,
        work: &DeliveryPlan,
        now: Timestamp,
    ) -> Option<(EndpointNumber, Vec<PlanItem>)> {
        let at = self.endpoint_numbered(work.endpoint)?;
        let until = work.until.map_or(now, |until| until.min(now));
        let in_time = |at: Timestamp| work.since <= at && at < until;
        let of_endpoint = self.deliveries.iter().filter(|(_, one)| one.endpoint == at);
        let taken = match work.which {
            PlannedDeliveries::Dead => of_endpoint
                .filter(|(_, one)| {
                    one.phase == DeliveryPhase::Dead && one.finished_at.is_some_and(in_time)
                })
                .map(|(number, _)| PlanItem::Delivery(*number))
                .collect(),
            PlannedDeliveries::All => of_endpoint
                .filter(|(_, one)| in_time(self.messages[&one.message].created_at))
                .map(|(number, _)| PlanItem::Delivery(*number))
                .collect(),
            PlannedDeliveries::Missing => {
                let record = &self.endpoints[&at].record;
                let lacks = |number: MessageNumber| {
                    self.deliveries_of(number).all(|delivery| delivery.endpoint != at)
                };
                let messages = self.messages.iter().filter(|(number, message)| {
                    !message.gone
                        && in_time(message.created_at)
                        && message.tenant == record.tenant
                        && record.settings.wants(&message.new)
                        && lacks(**number)
                });
                messages.map(|(number, _)| PlanItem::Message(*number)).collect()
            }
        };
        Some((at, taken))
    }

    fn create_plan(&mut self, new: NewPlan, by: Action, now: Timestamp) -> PlanCreated {
        if let Some(known) = self.plans.iter().find(|one| one.plan.id == new.id) {
            return match known.request == new.request {
                true => PlanCreated::Created(Box::new(known.plan.clone())),
                false => PlanCreated::OtherRequest,
            };
        }
        let Some((total, left)) = self.planned(&new.work, now) else {
            return PlanCreated::UnknownEndpoint;
        };
        let is_busy = |one: &StoredPlan| {
            one.plan.state == PlanState::Running
                && endpoint_of(&one.plan.work) == endpoint_of(&new.work)
        };
        if new.alone && self.plans.iter().any(is_busy) {
            return PlanCreated::EndpointBusy;
        }
        let plan = Plan {
            id: new.id,
            work: new.work,
            rate: new.rate,
            total,
            done: 0,
            skipped: 0,
            state: PlanState::Running,
            created_at: now,
            ended_at: None,
            who: by.who,
            reason: by.reason,
        };
        self.plans.push(StoredPlan {
            plan: plan.clone(),
            request: new.request,
            next_at: now,
            left,
        });
        PlanCreated::Created(Box::new(plan))
    }

    fn run_plan(&mut self, limit: usize, except: &[PlanId], now: Timestamp) -> PlanRun {
        let running = self.plans.iter_mut().enumerate();
        let running = running.filter(|(_, one)| {
            one.plan.state == PlanState::Running && !except.contains(&one.plan.id)
        });
        let Some((at, first)) = running.min_by_key(|(_, one)| one.next_at) else {
            return PlanRun::Idle;
        };
        if first.next_at > now {
            return PlanRun::NotBefore(first.next_at);
        }
        let (count, wait) = plan_slice(first.plan.rate, limit);
        let id = first.plan.id;
        let (endpoint, taken): (_, Vec<PlanItem>) = match &mut first.left {
            RemainingItems::Events { from } => {
                let from = *from;
                return self.slice_of(at, from, count);
            }
            RemainingItems::Deliveries(endpoint, left) => {
                (*endpoint, left.drain(..count.min(left.len())).collect())
            }
        };
        let (mut done, mut skipped) = (0, 0);
        let is_orphaned = self.endpoints[&endpoint].deleted;
        for one in taken.into_iter().filter(|_| !is_orphaned) {
            match self.send_planned(at, endpoint, one, now) {
                true => done += 1,
                false => skipped += 1,
            }
        }
        let stored = &mut self.plans[at];
        stored.advance(done, skipped, wait, now);
        let is_over =
            matches!(&stored.left, RemainingItems::Deliveries(_, left) if left.is_empty());
        if is_orphaned || is_over {
            stored.end(if is_orphaned { PlanState::Cancelled } else { PlanState::Done }, now);
        }
        PlanRun::Ran(id)
    }

    /// The next slice of a plan over events.
    fn slice_of(&self, plan: usize, from: EventNumber, count: usize) -> PlanRun {
        let Plan { id, work, created_at, .. } = &self.plans[plan].plan;
        let PlanWork::Events(work) = work else { unreachable!("the plan is over events") };
        let numbers: Vec<_> =
            self.planned_events(work, *created_at, from).take(count + 1).collect();
        let is_last = numbers.len() <= count;
        let numbers = &numbers[..numbers.len().min(count)];
        let planned = |at: &EventNumber| {
            let stored = &self.events[at];
            PlannedEvent {
                id: stored.detail.summary.id,
                tenant: stored.key.tenant.clone(),
                source: stored.key.source.clone(),
                event_type: stored.detail.summary.event_type.clone(),
                body: match work.act.writes_jobs() {
                    true => stored.detail.body.clone(),
                    false => Bytes::new(),
                },
                jobs: Vec::new(),
            }
        };
        let next = numbers.last().map_or(from, |last| last + 1);
        PlanRun::Events(Box::new(EventSlice {
            plan: *id,
            work: (**work).clone(),
            events: numbers.iter().map(planned).collect(),
            span: SliceSpan { after: from.into(), through: next.into(), is_last },
        }))
    }

    fn take_slice(&mut self, slice: EventSlice, now: Timestamp) -> Held {
        let EventSlice { plan, work, events, span } = slice;
        let stands = |one: &StoredPlan| {
            let is_there = matches!(one.left, RemainingItems::Events { from } if u128::from(from) == span.after);
            one.plan.id == plan && one.plan.state == PlanState::Running && is_there
        };
        let Some(at) = self.plans.iter().position(stands) else { return Held::Lost };
        let Plan { who, reason, created_at, rate, .. } = self.plans[at].plan.clone();
        let by = Action { who, reason, at: created_at };
        let (wait, scope) = (slice_wait(rate, events.len()), work.scope(created_at));
        let (mut done, mut skipped) = (0, 0);
        for event in events {
            match self.decide_planned(&work, event, scope, by.clone(), now) {
                true => done += 1,
                false => skipped += 1,
            }
        }
        let stored = &mut self.plans[at];
        stored.left =
            RemainingItems::Events { from: u64::try_from(span.through).unwrap_or(u64::MAX) };
        stored.advance(done, skipped, wait, now);
        if span.is_last {
            stored.end(PlanState::Done, now);
        }
        Held::Kept
    }

    /// False if the event needs nothing.
    fn decide_planned(
        &mut self,
        work: &EventPlan,
        event: PlannedEvent,
        scope: JobScope,
        by: Action,
        now: Timestamp,
    ) -> bool {
        let reviewed = match work.act {
            EventAct::Replay { force } => {
                let ask =
                    ReplayAsk { event: event.id, handlers: event.jobs, force, dry_run: false, by };
                let runs = |one: &hapax_core::store::Replayed| one.effect == ReplayEffect::WouldRun;
                return self.replay(ask, scope, now).iter().any(runs);
            }
            EventAct::Approve => self.approve(event.id, &event.jobs, scope, by, now),
            EventAct::Reject => self.reject(event.id, scope, by, now),
            EventAct::Discard => self.discard(event.id, work.handler.as_ref(), scope, by, now),
        };
        reviewed == Reviewed::Decided
    }

    /// Deletes plans that ended before the horizon of events.
    pub(super) fn prune_plans(&mut self, horizon: &Horizon) {
        let is_old = |one: &StoredPlan| {
            one.plan.ended_at.is_some_and(|ended_at| ended_at < horizon.events_before)
        };
        self.plans.retain(|one| !is_old(one));
    }

    /// False if the delivery is due or under way, or pruned.
    fn send_planned(
        &mut self,
        plan: usize,
        endpoint: EndpointNumber,
        taken: PlanItem,
        now: Timestamp,
    ) -> bool {
        let Plan { who, reason, created_at, .. } = self.plans[plan].plan.clone();
        let note = |action: &str| ActionNote {
            action: action.to_owned(),
            who: who.clone(),
            reason: reason.clone(),
            at: created_at,
        };
        match taken {
            PlanItem::Delivery(number) => {
                let Some(delivery) = self.deliveries.get(&number) else { return false };
                if delivery.finished_at.is_some_and(|at| at >= created_at)
                    && delivery.phase == DeliveryPhase::Dead
                {
                    // The delivery died again after the plan was made.
                    return false;
                }
                let sent = self.send_again(number, now);
                if sent {
                    self.delivery_mut(number).actions.push(note("replay"));
                }
                self.wake_parked(now);
                sent
            }
            PlanItem::Message(number) => {
                let message = self.messages.get(&number).filter(|message| !message.gone);
                let Some(message) = message else { return false };
                let key = message.new.key.clone();
                let written = self.write_delivery(number, endpoint, key, now);
                self.delivery_mut(written).actions.push(note("backfill"));
                true
            }
        }
    }
}

impl StoredPlan {
    /// Counts a slice. The next slice is due after `wait`.
    fn advance(&mut self, done: u64, skipped: u64, wait: Duration, now: Timestamp) {
        self.plan.done += done;
        self.plan.skipped += skipped;
        let wait = SignedDuration::try_from(wait).unwrap_or(SignedDuration::ZERO);
        self.next_at = self.next_at.max(now - SignedDuration::from_secs(1)) + wait;
    }

    fn end(&mut self, state: PlanState, now: Timestamp) {
        self.plan.state = state;
        self.plan.ended_at = Some(now);
    }
}

impl Job {
    /// When the job died or went to review.
    fn ended_at(&self) -> Timestamp {
        self.finished_at.unwrap_or(self.due)
    }

    /// Whether an act of that scope may change the job.
    pub(super) fn is_within(&self, scope: JobScope) -> bool {
        scope.holds(self.phase, self.ended_at())
    }
}

fn is_of(job: &Job, handler: Option<&HandlerName>) -> bool {
    handler.is_none_or(|handler| job.handler.handler == *handler)
}
