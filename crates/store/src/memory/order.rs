//! Who may run now: one job at a time per resource, and what the order guard says. The guard is
//! asked when a job is claimed; the mark moves only with "done".

use hapax_core::job::Phase;
use hapax_core::order::{Guard, OrderPolicy, Place, Position};
use hapax_core::store::{HandlerRef, HandlerSpec};
use hapax_core::{Tenant, Timestamp};

use super::{Job, JobNumber, Model};

/// What order is kept of: a handler has its own mark for each resource of each tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Resource {
    tenant: Tenant,
    handler: HandlerRef,
    name: Box<str>,
}

/// What a claim does with a job it comes to.
pub(super) enum Turn {
    /// It runs.
    Now,
    /// Newer news was applied already.
    Past,
    /// A number before it has not been applied.
    NotYet,
    /// Another job of its resource is running.
    AfterAnother,
}

impl Model {
    pub(super) fn turn_of(&mut self, at: JobNumber, spec: &HandlerSpec) -> Turn {
        let job = &self.jobs[&at];
        let (Some(policy), Some(resource)) = (spec.order, job.resource()) else {
            return Turn::Now;
        };
        let guard = match job.forced {
            true => Guard::Run,
            false => self.guard_of(job, policy),
        };
        match guard {
            Guard::Stale => Turn::Past,
            Guard::Hold => Turn::NotYet,
            Guard::Run if self.is_busy(&resource) => Turn::AfterAnother,
            Guard::Run => {
                // Once a sequence has begun it stays begun: if its first number fails, the second
                // must not be taken for the first.
                if let Some(place) = &job.place {
                    self.starts.entry(resource).or_insert(place.position);
                }
                Turn::Now
            }
        }
    }

    pub(super) fn guard_of(&self, job: &Job, policy: OrderPolicy) -> Guard {
        self.guard(&job.tenant, &job.handler, job.place.as_ref(), policy)
    }

    /// What the guard says of a place by the mark as it is.
    pub(super) fn guard(
        &self,
        tenant: &Tenant,
        handler: &HandlerRef,
        place: Option<&Place>,
        policy: OrderPolicy,
    ) -> Guard {
        let Some(place) = place else { return Guard::Run };
        let resource = Resource::of(tenant, handler, place);
        let begun = match policy {
            OrderPolicy::Sequence { start: None } => OrderPolicy::Sequence {
                start: self.starts.get(&resource).map(|Position(first)| *first),
            },
            OrderPolicy::Sequence { start: Some(_) } | OrderPolicy::Latest => policy,
        };
        begun.decide(self.marks.get(&resource).copied(), place.position)
    }

    /// The job's effects are applied: nothing older counts any more, and who waited for exactly
    /// this one goes on.
    pub(super) fn move_mark(&mut self, at: JobNumber, now: Timestamp) {
        let job = &self.jobs[&at];
        let (Some(place), Some(resource)) = (&job.place, job.resource()) else { return };
        let position = place.position;
        let mark = self.marks.entry(resource.clone()).or_insert(position);
        *mark = position.max(*mark);
        let Some(policy) = self.handlers.get(&job.handler).and_then(|spec| spec.order) else {
            return;
        };
        let waited = |job: &Job| {
            job.phase == Phase::Held
                && job.resource().as_ref() == Some(&resource)
                && self.guard_of(job, policy) != Guard::Hold
        };
        let go: Vec<_> =
            self.jobs.iter().filter(|(_, job)| waited(job)).map(|(at, _)| *at).collect();
        for at in go {
            self.ready(at, now);
        }
    }

    /// The job is no longer at work: in the same step the next of its resource is ready.
    pub(super) fn leave(&mut self, at: JobNumber, to: Phase, now: Timestamp) {
        self.job_mut(at).phase = to;
        if let Some(resource) = self.jobs[&at].resource() {
            self.ready_next(&resource, now);
        }
    }

    /// Whatever was missed, no job stays parked at a free resource, and none is held that the
    /// handler's policy of today would let go.
    pub(super) fn ready_unblocked(&mut self, handler: &HandlerRef, now: Timestamp) {
        let order = self.handlers.get(handler).and_then(|spec| spec.order);
        let waits = |job: &Job| match job.phase {
            Phase::Parked => true,
            Phase::Held => order.is_none_or(|policy| self.guard_of(job, policy) != Guard::Hold),
            Phase::Ready | Phase::Leased | Phase::Done | Phase::Stale | Phase::Dead => false,
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

    /// Who has waited is due at once, behind whoever is due already.
    fn ready(&mut self, at: JobNumber, now: Timestamp) {
        let job = self.job_mut(at);
        job.phase = Phase::Ready;
        job.due = now;
    }

    fn is_busy(&self, resource: &Resource) -> bool {
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
    fn of(tenant: &Tenant, handler: &HandlerRef, place: &Place) -> Self {
        Self { tenant: tenant.clone(), handler: handler.clone(), name: place.resource.clone() }
    }
}
