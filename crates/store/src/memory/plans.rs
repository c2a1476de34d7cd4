//! Plans of operators over the deliveries of an endpoint.

use std::cmp::Reverse;

use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryPhase;
use hapax_core::store::{
    Action, ActionNote, DeliveryPlan, NewPlan, Plan, PlanCount, PlanCreated, PlanId, PlanRun,
    PlanState, PlannedDeliveries, Plans, StoreError, plan_slice,
};
use jiff::SignedDuration;

use super::outbox::{DeliveryNumber, EndpointNumber, MessageNumber};
use super::{MemoryStore, Model};

/// A plan, with what it has not taken yet.
#[derive(Debug)]
pub(super) struct StoredPlan {
    plan: Plan,
    endpoint: EndpointNumber,
    next_at: Timestamp,
    left: Vec<Taken>,
}

/// What a plan takes.
#[derive(Debug, Clone, Copy)]
enum Taken {
    Delivery(DeliveryNumber),
    Message(MessageNumber),
}

impl Plans for MemoryStore {
    async fn count_plan(&self, work: DeliveryPlan) -> Result<PlanCount, StoreError> {
        let model = self.model();
        Ok(match model.planned(&work, self.now()) {
            Some((_, taken)) => PlanCount::Deliveries(taken.len() as u64),
            None => PlanCount::UnknownEndpoint,
        })
    }

    async fn create_plan(&self, plan: NewPlan, by: Action) -> Result<PlanCreated, StoreError> {
        Ok(self.model().create_plan(plan, by, self.now()))
    }

    async fn run_plan(&self, limit: usize) -> Result<PlanRun, StoreError> {
        let ran = self.model().run_plan(limit, self.now());
        self.hint_deliveries();
        Ok(ran)
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

impl Model {
    /// What a plan of this instant takes, oldest first.
    fn planned(&self, work: &DeliveryPlan, now: Timestamp) -> Option<(EndpointNumber, Vec<Taken>)> {
        let at = self.endpoint_numbered(work.endpoint)?;
        let until = work.until.map_or(now, |until| until.min(now));
        let in_time = |at: Timestamp| work.since <= at && at < until;
        let of_endpoint = self.deliveries.iter().filter(|(_, one)| one.endpoint == at);
        let taken = match work.which {
            PlannedDeliveries::Dead => of_endpoint
                .filter(|(_, one)| {
                    one.phase == DeliveryPhase::Dead && one.finished_at.is_some_and(in_time)
                })
                .map(|(number, _)| Taken::Delivery(*number))
                .collect(),
            PlannedDeliveries::All => of_endpoint
                .filter(|(_, one)| in_time(self.messages[&one.message].created_at))
                .map(|(number, _)| Taken::Delivery(*number))
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
                messages.map(|(number, _)| Taken::Message(*number)).collect()
            }
        };
        Some((at, taken))
    }

    fn create_plan(&mut self, new: NewPlan, by: Action, now: Timestamp) -> PlanCreated {
        if let Some(known) = self.plans.iter().find(|one| one.plan.id == new.id) {
            return PlanCreated::Created(Box::new(known.plan.clone()));
        }
        let Some((endpoint, left)) = self.planned(&new.work, now) else {
            return PlanCreated::UnknownEndpoint;
        };
        let plan = Plan {
            id: new.id,
            work: new.work,
            rate: new.rate,
            total: left.len() as u64,
            done: 0,
            skipped: 0,
            state: PlanState::Running,
            created_at: now,
            ended_at: None,
            who: by.who,
            reason: by.reason,
        };
        self.plans.push(StoredPlan { plan: plan.clone(), endpoint, next_at: now, left });
        PlanCreated::Created(Box::new(plan))
    }

    fn run_plan(&mut self, limit: usize, now: Timestamp) -> PlanRun {
        let running = self.plans.iter_mut().enumerate();
        let running = running.filter(|(_, one)| one.plan.state == PlanState::Running);
        let Some((at, first)) = running.min_by_key(|(_, one)| one.next_at) else {
            return PlanRun::Idle;
        };
        if first.next_at > now {
            return PlanRun::NotBefore(first.next_at);
        }
        let (count, wait) = plan_slice(first.plan.rate, limit);
        let taken: Vec<Taken> = first.left.drain(..count.min(first.left.len())).collect();
        let (id, endpoint) = (first.plan.id, first.endpoint);
        let (mut done, mut skipped) = (0, 0);
        let is_orphaned = self.endpoints[&endpoint].deleted;
        for one in taken.into_iter().filter(|_| !is_orphaned) {
            match self.send_planned(at, one, now) {
                true => done += 1,
                false => skipped += 1,
            }
        }
        let stored = &mut self.plans[at];
        stored.plan.done += done;
        stored.plan.skipped += skipped;
        let wait = SignedDuration::try_from(wait).unwrap_or(SignedDuration::ZERO);
        stored.next_at = stored.next_at.max(now - SignedDuration::from_secs(1)) + wait;
        if is_orphaned || stored.left.is_empty() {
            stored.plan.ended_at = Some(now);
            stored.plan.state = match is_orphaned {
                true => PlanState::Cancelled,
                false => PlanState::Done,
            };
        }
        PlanRun::Ran(id)
    }

    /// False if the delivery is due or under way, or pruned.
    fn send_planned(&mut self, plan: usize, taken: Taken, now: Timestamp) -> bool {
        let Plan { who, reason, created_at, .. } = self.plans[plan].plan.clone();
        let endpoint = self.plans[plan].endpoint;
        let note = |action: &str| ActionNote {
            action: action.to_owned(),
            who: who.clone(),
            reason: reason.clone(),
            at: created_at,
        };
        match taken {
            Taken::Delivery(number) => {
                let Some(delivery) = self.deliveries.get(&number) else { return false };
                if delivery.finished_at.is_some_and(|at| at >= created_at)
                    && delivery.phase == DeliveryPhase::Dead
                {
                    // It died again since.
                    return false;
                }
                let sent = self.send_again(number, now);
                if sent {
                    self.delivery_mut(number).actions.push(note("replay"));
                }
                self.wake_parked(now);
                sent
            }
            Taken::Message(number) => {
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
