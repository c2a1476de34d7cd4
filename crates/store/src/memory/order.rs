//! Decides which jobs may run: one at a time per resource, as the order rule allows, and what
//! happens to held jobs. The rule is checked when a job is claimed. The mark moves with "done". After a gap
//! was held long enough, the mark moves past it.

use hapax_core::job::Phase;
use hapax_core::order::{
    HELD_TOO_LONG, HELD_TOO_MANY, OnGap, OrderDecision, OrderPolicy, OrderRule, Position,
    ResourcePosition,
};
use hapax_core::store::{HandlerRef, HandlerSpec, Horizon};
use hapax_core::{Tenant, Timestamp};

use super::work::later;
use super::{Job, JobNumber, Model};

/// The unit of order: a handler has its own mark for each resource of each tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Resource {
    tenant: Tenant,
    handler: HandlerRef,
    name: Box<str>,
}

/// The decision of a claim on a due job.
pub(super) enum ClaimDecision {
    /// The job runs.
    Now,
    /// A newer version was already applied.
    Past,
    /// A number before it has not been applied.
    NotYet(OrderRule),
    /// Another job of its resource is running.
    AfterAnother,
}

impl Model {
    pub(super) fn turn_of(&mut self, at: JobNumber, spec: &HandlerSpec) -> ClaimDecision {
        let job = &self.jobs[&at];
        let (Some(rule), Some(resource)) = (&spec.order, job.resource()) else {
            return ClaimDecision::Now;
        };
        let guard = match job.forced {
            true => OrderDecision::Run,
            false => self.guard_of(job, &rule.policy),
        };
        match guard {
            OrderDecision::Stale => ClaimDecision::Past,
            OrderDecision::Hold => ClaimDecision::NotYet(rule.clone()),
            OrderDecision::Run if self.is_busy(&resource) => ClaimDecision::AfterAnother,
            OrderDecision::Run => {
                // The first number of a sequence is stored when it is claimed. If it fails, the
                // second number must not become the first.
                if let Some(place) = &job.place {
                    self.starts.entry(resource).or_insert(place.position);
                }
                ClaimDecision::Now
            }
        }
    }

    pub(super) fn order_of(&self, handler: &HandlerRef) -> Option<OrderRule> {
        self.handlers.get(handler)?.order.clone()
    }

    pub(super) fn guard_of(&self, job: &Job, policy: &OrderPolicy) -> OrderDecision {
        self.guard(&job.tenant, &job.handler, job.place.as_ref(), policy)
    }

    /// The guard's decision on a place, by the current mark.
    pub(super) fn guard(
        &self,
        tenant: &Tenant,
        handler: &HandlerRef,
        place: Option<&ResourcePosition>,
        policy: &OrderPolicy,
    ) -> OrderDecision {
        let Some(place) = place else { return OrderDecision::Run };
        let resource = Resource::of(tenant, handler, place);
        let mark = self.mark(&resource);
        match policy {
            OrderPolicy::Sequence { start: None } => {
                let start = self.starts.get(&resource).map(|Position(first)| *first);
                OrderPolicy::Sequence { start }.decide(mark, place.position)
            }
            OrderPolicy::Sequence { start: Some(_) }
            | OrderPolicy::Latest
            | OrderPolicy::Machine(_) => policy.decide(mark, place.position),
        }
    }

    fn mark(&self, resource: &Resource) -> Option<Position> {
        self.marks.get(resource).map(|(position, _)| *position)
    }

    /// Deletes the marks that no event can still need. In a sequence or a machine the next event
    /// needs the mark, however late it arrives: those stay.
    pub(super) fn forget_marks(&mut self, horizon: &Horizon, now: Timestamp) {
        let mut old = Vec::new();
        for (resource, (_, moved_at)) in &self.marks {
            let policy = self.order_of(&resource.handler).map(|rule| rule.policy);
            if !matches!(policy, Some(OrderPolicy::Latest)) {
                continue;
            }
            let source = &resource.handler.source;
            let whole = self.events.values().filter(|stored| !stored.gone);
            let unfinished = whole
                .filter(|stored| stored.key.source == *source)
                .map(|stored| stored.detail.summary.received_at)
                .filter(|received_at| *received_at < horizon.events_before)
                .min();
            if horizon.marks_before(source, now, unfinished).is_some_and(|t| *moved_at < t) {
                old.push(resource.clone());
            }
        }
        self.marks.retain(|resource, _| !old.contains(resource));
    }

    /// Moves the mark after the job's effects were applied: older versions become stale, and jobs
    /// that waited for exactly this one are ready.
    pub(super) fn move_mark(&mut self, at: JobNumber, now: Timestamp) {
        let job = &self.jobs[&at];
        let (Some(place), Some(resource)) = (&job.place, job.resource()) else { return };
        let rule = self.order_of(&job.handler);
        let policy = rule.map_or(OrderPolicy::Latest, |rule| rule.policy);
        let mark = policy.after(self.mark(&resource), place.position);
        self.marks.insert(resource.clone(), (mark, now));
        self.ready_held(&resource, &policy, now);
    }

    /// Readies the jobs that are held and that the current mark would not hold.
    fn ready_held(&mut self, resource: &Resource, policy: &OrderPolicy, now: Timestamp) {
        let waited = |job: &Job| {
            job.phase == Phase::Held
                && job.resource().as_ref() == Some(resource)
                && self.guard_of(job, policy) != OrderDecision::Hold
        };
        let go: Vec<_> =
            self.jobs.iter().filter(|(_, job)| waited(job)).map(|(at, _)| *at).collect();
        for at in go {
            self.ready(at, now);
        }
    }

    /// Holds a job for which the guard decided "not yet". The deadline is fixed now. If too many
    /// jobs are held, the newest goes to review. The states of a machine have no order, so there
    /// the arriving job goes to review.
    pub(super) fn hold(&mut self, at: JobNumber, rule: &OrderRule, now: Timestamp) {
        let due = later(now, rule.gaps.hold);
        let job = self.job_mut(at);
        job.phase = Phase::Held;
        job.due = due;
        let Some(resource) = job.resource() else { return };
        let held = self.held(&resource);
        if held.len() > rule.gaps.hold_max {
            let newest = match rule.policy {
                OrderPolicy::Machine(_) => Some(at),
                OrderPolicy::Latest | OrderPolicy::Sequence { .. } => {
                    held.into_iter().max().map(|(_, number)| number)
                }
            };
            self.send_to_review(newest.unwrap_or(at), HELD_TOO_MANY, now);
        }
    }

    fn send_to_review(&mut self, at: JobNumber, why: &str, now: Timestamp) {
        let job = self.job_mut(at);
        job.phase = Phase::Review;
        job.due = now;
        job.error = Some(why.to_owned());
    }

    /// Sends jobs that were held past their deadline to review, or lets them run past the gap. A
    /// held job waits longer while a job of the same tenant is due, because that job may fill the
    /// gap. A held job also waits while another job of the resource is leased.
    pub(super) fn judge_gaps(&mut self, handler: &HandlerRef, now: Timestamp) {
        let Some(rule) = self.order_of(handler) else { return };
        let is_due = |job: &Job| job.handler == *handler && job.due <= now;
        let busy: Vec<Tenant> = self
            .jobs
            .values()
            .filter(|job| is_due(job) && job.phase == Phase::Ready)
            .map(|job| job.tenant.clone())
            .collect();
        let overdue: Vec<JobNumber> = self
            .jobs
            .iter()
            .filter(|(_, job)| is_due(job) && job.phase == Phase::Held)
            .filter(|(_, job)| !busy.contains(&job.tenant))
            .map(|(at, _)| *at)
            .collect();
        let mut gone = Vec::new();
        for at in overdue {
            let Some(resource) = self.jobs[&at].resource() else { continue };
            if self.is_busy(&resource) || gone.contains(&resource) {
                continue;
            }
            match rule.gaps.on_gap {
                OnGap::Review => self.send_to_review(at, HELD_TOO_LONG, now),
                OnGap::Go => {
                    self.go_past_the_gap(&resource, &rule.policy, now);
                    gone.push(resource);
                }
            }
        }
    }

    fn go_past_the_gap(&mut self, resource: &Resource, policy: &OrderPolicy, now: Timestamp) {
        let held = self.held(resource);
        let Some(first) = policy.earliest(held.iter().map(|(position, _)| *position)) else {
            return;
        };
        match policy {
            OrderPolicy::Latest | OrderPolicy::Sequence { .. } => {
                let before = Position(first.0.saturating_sub(1));
                let mark = policy.after(self.mark(resource), before);
                self.marks.insert(resource.clone(), (mark, now));
                self.ready_held(resource, policy, now);
            }
            OrderPolicy::Machine(_) => {
                let of_it = held.iter().find(|(position, _)| *position == first);
                if let Some((_, at)) = of_it {
                    self.job_mut(*at).forced = true;
                    self.ready(*at, now);
                }
            }
        }
    }

    /// The held jobs of a resource, in the order they arrived.
    fn held(&self, resource: &Resource) -> Vec<(Position, JobNumber)> {
        let of_it =
            |job: &&Job| job.phase == Phase::Held && job.resource().as_ref() == Some(resource);
        let placed = |(at, job): (&JobNumber, &Job)| Some((job.place.as_ref()?.position, *at));
        self.jobs.iter().filter(|(_, job)| of_it(job)).filter_map(placed).collect()
    }

    /// Whether the mark has passed a job that was claimed and then lost its lease.
    pub(super) fn was_passed(&self, at: JobNumber) -> bool {
        let job = &self.jobs[&at];
        let (Some(rule), Some(place), Some(resource)) =
            (self.order_of(&job.handler), &job.place, job.resource())
        else {
            return false;
        };
        let mark = self.mark(&resource);
        !job.forced && mark.is_some() && !rule.policy.may_settle(mark, place.position)
    }

    /// Ends a job's lease, and readies the next job of its resource in the same step.
    pub(super) fn leave(&mut self, at: JobNumber, to: Phase, now: Timestamp) {
        self.job_mut(at).phase = to;
        if let Some(resource) = self.jobs[&at].resource() {
            self.ready_next(&resource, now);
        }
    }

    /// Readies jobs that an earlier step missed. Then no job is parked at a free resource, and no
    /// job is held that the handler's current policy would admit.
    pub(super) fn ready_unblocked(&mut self, handler: &HandlerRef, now: Timestamp) {
        let order = self.order_of(handler);
        let waits = |job: &Job| match job.phase {
            Phase::Parked => true,
            Phase::Held => order
                .as_ref()
                .is_none_or(|rule| self.guard_of(job, &rule.policy) != OrderDecision::Hold),
            Phase::Ready
            | Phase::Leased
            | Phase::Done
            | Phase::Stale
            | Phase::Dead
            | Phase::Review
            | Phase::Discarded => false,
        };
        let blocked: Vec<_> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.handler == *handler && waits(job))
            .map(|(at, _)| *at)
            .collect();
        for at in blocked {
            match (self.jobs[&at].phase, self.jobs[&at].resource()) {
                (Phase::Parked, Some(resource)) => self.ready_next(&resource, now),
                (_, _) => self.ready(at, now),
            }
        }
    }

    fn ready_next(&mut self, resource: &Resource, now: Timestamp) {
        let of_it = |job: &Job| job.resource().as_ref() == Some(resource);
        if self.is_busy(resource) {
            return;
        }
        let next = self
            .jobs
            .iter()
            .filter(|(_, job)| job.phase == Phase::Parked && of_it(job))
            .min_by_key(|(at, job)| (job.due, **at))
            .map(|(at, _)| *at);
        if let Some(at) = next {
            self.ready(at, now);
        }
    }

    /// Makes a waiting job due at once, after the jobs that are due already.
    pub(super) fn ready(&mut self, at: JobNumber, now: Timestamp) {
        let job = self.job_mut(at);
        job.phase = Phase::Ready;
        job.due = now;
    }

    pub(super) fn is_busy(&self, resource: &Resource) -> bool {
        let at_work = |job: &Job| job.phase == Phase::Leased;
        self.jobs.values().any(|job| at_work(job) && job.resource().as_ref() == Some(resource))
    }
}

impl Job {
    pub(super) fn resource(&self) -> Option<Resource> {
        let place = self.place.as_ref()?;
        Some(Resource::of(&self.tenant, &self.handler, place))
    }
}

impl Resource {
    fn of(tenant: &Tenant, handler: &HandlerRef, place: &ResourcePosition) -> Self {
        Self { tenant: tenant.clone(), handler: handler.clone(), name: place.resource.clone() }
    }
}
