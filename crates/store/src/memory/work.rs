//! The life of jobs: claimed, renewed, settled, given back, lost. Each function is one commit, and
//! every settlement is checked against the fence.

use std::time::Duration;

use hapax_core::job::{
    AfterFailure, AfterLoss, Fence, JobId, Phase, Retry, WorkLocation, idempotency_key,
};
use hapax_core::limits::{ERROR_CHARS_MAX, RESULT_CHARS_MAX};
use hapax_core::order::{OVERTAKEN, OrderDecision};
use hapax_core::store::{
    AttemptNote, Claim, ClaimAsk, ClaimedEvent, EventId, HandlerAnswer, HandlerRef, HandlerSpec,
    Held, NewMessage, Outcome, Ran, Settlement, TriedVerdict,
};
use hapax_core::{Tenant, Timestamp};
use jiff::SignedDuration;
use uuid::Uuid;

use super::order::ClaimDecision;
use super::{EventNumber, Job, JobLease, JobNumber, Model};

/// The jobs that one claim took, and those that the order rule set aside.
#[derive(Default)]
pub(super) struct ClaimedJobs {
    pub(super) claims: Vec<Claim>,
    pub(super) guarded: Vec<EventId>,
}

impl Model {
    /// Takes due jobs of one handler, tenant by tenant in turn. Takes either several jobs that were
    /// never lost, or a single job that was lost before. If that job ends the process again, no
    /// other attempt is lost.
    pub(super) fn claim(&mut self, ask: &ClaimAsk, now: Timestamp) -> ClaimedJobs {
        let mut begun = ClaimedJobs::default();
        let Some(spec) = self.handlers.get(&ask.handler).cloned() else { return begun };
        if self.paused.contains_key(&ask.handler) {
            return begun;
        }
        self.lose_expired(&ask.handler, now);
        self.ready_unblocked(&ask.handler, now);
        self.judge_gaps(&ask.handler, now);
        let mut served: Vec<Tenant> = Vec::new();
        while begun.claims.len() < ask.limit {
            let Some(at) = self.next_in_turn(&ask.handler, &served, now) else { break };
            match self.turn_of(at, &spec) {
                ClaimDecision::Now => {}
                ClaimDecision::Past => {
                    self.close(at, Phase::Stale, now);
                    begun.guarded.push(self.event_of(at));
                    continue;
                }
                ClaimDecision::NotYet(rule) => {
                    self.hold(at, &rule, now);
                    begun.guarded.push(self.event_of(at));
                    continue;
                }
                ClaimDecision::AfterAnother => {
                    self.job_mut(at).phase = Phase::Parked;
                    continue;
                }
            }
            let claim = self.take(at, &spec, ask, now);
            served.push(claim.event.key.tenant.clone());
            begun.claims.push(claim);
            if self.goes_alone(&self.jobs[&at]) {
                break;
            }
        }
        if let Some(first) = served.first() {
            self.turns.insert(ask.handler.clone(), first.clone());
        }
        begun
    }

    /// The job whose turn it is. The tenant with the fewest jobs in this claim comes first,
    /// beginning after the tenant that began the last claim. Of its jobs, the one due longest comes
    /// first, then the one that arrived first. So every tenant's oldest job is the first of some
    /// claim, and runs even if it must run alone.
    fn next_in_turn(
        &self,
        handler: &HandlerRef,
        served: &[Tenant],
        now: Timestamp,
    ) -> Option<JobNumber> {
        let last = self.turns.get(handler);
        let had = |tenant: &Tenant| served.iter().filter(|one| *one == tenant).count();
        self.jobs
            .iter()
            .filter(|(_, job)| {
                job.handler == *handler && job.phase == Phase::Ready && job.due <= now
            })
            .filter(|(_, job)| served.is_empty() || !self.goes_alone(job))
            .min_by_key(|(at, job)| {
                let wraps = last.is_some_and(|last| job.tenant <= *last);
                (had(&job.tenant), wraps, &job.tenant, job.due, **at)
            })
            .map(|(at, _)| *at)
    }

    fn take(&mut self, at: JobNumber, spec: &HandlerSpec, ask: &ClaimAsk, now: Timestamp) -> Claim {
        let policy = spec.policy.clone();
        let until = later(now, policy.lease);
        let job = self.job_mut(at);
        job.phase = Phase::Leased;
        job.progress = job.progress.claimed();
        job.fence = Fence(job.fence.0 + 1);
        job.taken = Some(JobLease { worker: ask.worker.clone(), at: now, until, policy });
        self.describe(at, until)
    }

    fn describe(&self, at: JobNumber, until: Timestamp) -> Claim {
        let job = &self.jobs[&at];
        let event = &self.events[&job.event];
        Claim {
            job: job.id,
            fence: job.fence,
            attempt: job.progress.attempt,
            steps: job.progress.steps,
            run: job.run,
            idempotency_key: idempotency_key(
                event.detail.summary.id,
                &job.handler.handler,
                job.run,
            ),
            leased_until: until,
            alone: self.goes_alone(job),
            event: ClaimedEvent {
                id: event.detail.summary.id,
                key: event.key.clone(),
                event_type: event.detail.summary.event_type.clone(),
                occurred_at: event.detail.summary.occurred_at,
                received_at: event.detail.summary.received_at,
                resource: job.place.as_ref().map(|place| place.resource.to_string()),
                headers: event.detail.headers.clone(),
                body: event.detail.body.clone(),
            },
        }
    }

    fn goes_alone(&self, job: &Job) -> bool {
        job.progress.alone(self.workplace_of(&job.handler))
    }

    fn workplace_of(&self, handler: &HandlerRef) -> WorkLocation {
        self.handlers.get(handler).map_or(WorkLocation::Inside, |spec| spec.workplace)
    }

    fn event_of(&self, at: JobNumber) -> EventId {
        self.events[&self.jobs[&at].event].detail.summary.id
    }

    /// Prepares a claimed job that may still run; otherwise returns why it may not.
    pub(super) fn begin_claimed(
        &mut self,
        job: JobId,
        fence: Fence,
        now: Timestamp,
    ) -> Result<Claim, Ran> {
        let Some(at) = self.numbered(job).filter(|at| self.jobs[at].fence == fence) else {
            return Err(Ran::Lost);
        };
        match self.jobs[&at].phase {
            Phase::Done => return Err(Ran::Done),
            Phase::Leased => {}
            Phase::Ready
            | Phase::Held
            | Phase::Parked
            | Phase::Stale
            | Phase::Dead
            | Phase::Review
            | Phase::Discarded => return Err(Ran::Lost),
        }
        let of = &self.jobs[&at];
        let order = self.order_of(&of.handler).filter(|_| !of.forced);
        let Some(rule) = order else {
            return Ok(self.describe(at, of.due_at().unwrap_or(now)));
        };
        match self.guard_of(of, &rule.policy) {
            OrderDecision::Run => Ok(self.describe(at, of.due_at().unwrap_or(now))),
            OrderDecision::Stale => {
                self.job_mut(at).uncount();
                self.close(at, Phase::Stale, now);
                Err(Ran::Guarded)
            }
            OrderDecision::Hold => {
                self.job_mut(at).uncount();
                self.hold(at, &rule, now);
                self.leave(at, self.jobs[&at].phase, now);
                Err(Ran::Guarded)
            }
        }
    }

    /// Ends the leases that ran out. Their fences stay: until the job is claimed again, a worker
    /// that was only slow may still report "done".
    fn lose_expired(&mut self, handler: &HandlerRef, now: Timestamp) {
        let expired = |job: &Job| {
            job.handler == *handler
                && job.phase == Phase::Leased
                && job.taken.as_ref().is_some_and(|taken| taken.until <= now)
        };
        let lost: Vec<_> =
            self.jobs.iter().filter(|(_, job)| expired(job)).map(|(at, _)| *at).collect();
        let workplace = self.workplace_of(handler);
        for at in lost {
            let job = self.job_mut(at);
            let ended = job.due_at().unwrap_or(now);
            job.note("lost", None, Some("the lease ran out".to_owned()));
            match job.progress.lost(workplace, ended, dice(job.id, job.progress.attempt)) {
                AfterLoss::Again { progress, due } => {
                    job.progress = progress;
                    job.due = due;
                    self.leave(at, Phase::Ready, now);
                }
                AfterLoss::Bury { progress } => {
                    job.progress = progress;
                    self.close(at, Phase::Dead, now);
                }
            }
        }
    }

    pub(super) fn renew(
        &mut self,
        job: JobId,
        fence: Fence,
        lease: Duration,
        now: Timestamp,
    ) -> Held {
        match self.leased_under(job, fence).and_then(|at| self.job_mut(at).taken.as_mut()) {
            Some(taken) => {
                taken.until = taken.until.max(later(now, lease));
                Held::Kept
            }
            None => Held::Lost,
        }
    }

    pub(super) fn settle(
        &mut self,
        job: JobId,
        fence: Fence,
        outcome: Outcome,
        now: Timestamp,
    ) -> Settlement {
        let Some(at) = self.numbered(job).filter(|at| self.jobs[at].fence == fence) else {
            return Settlement::Lost;
        };
        let (held, answer) = match (self.jobs[&at].phase, outcome) {
            (Phase::Done, Outcome::Done { answer, .. } | Outcome::Failed { answer, .. }) => {
                self.keep_answer(at, answer);
                return Settlement::AlreadyDone;
            }
            (_, Outcome::Done { result, publish, answer }) => {
                (self.done(at, result, publish, now), answer)
            }
            (_, Outcome::Failed { error, retry, answer }) => {
                (self.failed(at, error, retry, now), answer)
            }
        };
        match held {
            Held::Kept => {
                self.keep_answer(at, answer);
                Settlement::Recorded
            }
            Held::Lost => Settlement::Lost,
        }
    }

    /// Whether a job that has failed is a dead letter now.
    pub(super) fn verdict_of_failure(&self, job: JobId) -> TriedVerdict {
        match self.numbered(job).map(|at| self.jobs[&at].phase) {
            Some(Phase::Dead) => TriedVerdict::Died,
            Some(_) | None => TriedVerdict::Failed,
        }
    }

    /// Adds the app's answer to the last attempt, unless it has one.
    fn keep_answer(&mut self, at: JobNumber, answer: Option<HandlerAnswer>) {
        if let Some(note) = self.job_mut(at).attempts.last_mut()
            && note.answer.is_none()
        {
            note.answer = answer;
        }
    }

    /// Records "done" under the fence even when the lease is over or the attempt was recorded as
    /// failed: the effects are committed. Only a newer claim, a replay or a decision of the order
    /// guard voids the fence.
    fn done(
        &mut self,
        at: JobNumber,
        result: Option<String>,
        publish: Vec<NewMessage>,
        now: Timestamp,
    ) -> Held {
        match self.jobs[&at].phase {
            Phase::Done | Phase::Stale | Phase::Discarded => return Held::Lost,
            Phase::Ready
            | Phase::Leased
            | Phase::Held
            | Phase::Parked
            | Phase::Dead
            | Phase::Review => {}
        }
        if self.jobs[&at].taken.is_none() {
            return Held::Lost;
        }
        if self.was_passed(at) {
            self.overtaken_at_work(at, now);
            return Held::Lost;
        }
        let (event, tenant) = (self.jobs[&at].event, self.jobs[&at].tenant.clone());
        if let Some(id) = self.id_in_conflict(&tenant, &publish) {
            let error = format!("the message id {id} was used before, for other content");
            return self.failed(at, error, Retry::Schedule, now);
        }
        let job = self.job_mut(at);
        job.note("done", Some(now), None);
        job.result = result.map(|text| shortened(&text, RESULT_CHARS_MAX));
        job.error = None;
        job.forced = false;
        for message in publish {
            self.publish(Some(event), &tenant, message, now);
        }
        self.move_mark(at, now);
        self.close(at, Phase::Done, now);
        Held::Kept
    }

    /// Handles a job that the mark passed while it was leased. If the job can only be stale from
    /// then on, it becomes stale at once, so that its resource need not wait for the end of the
    /// lease.
    fn overtaken_at_work(&mut self, at: JobNumber, now: Timestamp) {
        let job = &self.jobs[&at];
        let Some(rule) = self.order_of(&job.handler) else { return };
        if job.phase == Phase::Leased && self.guard_of(job, &rule.policy) == OrderDecision::Stale {
            self.job_mut(at).note("lost", Some(now), Some(OVERTAKEN.to_owned()));
            self.close(at, Phase::Stale, now);
        }
    }

    fn failed(&mut self, at: JobNumber, error: String, retry: Retry, now: Timestamp) -> Held {
        let job = self.job_mut(at);
        if job.phase != Phase::Leased {
            return Held::Lost;
        }
        let Some(taken) = job.taken.clone() else { return Held::Lost };
        job.note("failed", Some(now), Some(shortened(&error, ERROR_CHARS_MAX)));
        let (earlier, dice) = (job.earlier_attempts, dice(job.id, job.progress.attempt));
        match job.progress.failed_since_replay(earlier, &taken.policy, retry, now, dice) {
            AfterFailure::Again { progress, due } => {
                job.progress = progress;
                job.due = due;
                self.leave(at, Phase::Ready, now);
            }
            AfterFailure::Bury { progress } => {
                job.progress = progress;
                self.close(at, Phase::Dead, now);
            }
        }
        Held::Kept
    }

    /// Undoes the claim; its fence is void and no longer settles anything.
    pub(super) fn give_back(&mut self, job: JobId, fence: Fence, now: Timestamp) {
        if let Some(at) = self.leased_under(job, fence) {
            let job = self.job_mut(at);
            job.uncount();
            job.due = now;
            self.leave(at, Phase::Ready, now);
        }
    }

    /// Makes a job that waits for its next attempt due now.
    pub(super) fn hurry(&mut self, event: EventNumber, now: Timestamp) {
        let waits = |job: &&mut Job| job.event == event && job.phase == Phase::Ready;
        for job in self.jobs.values_mut().filter(waits) {
            job.due = now.min(job.due);
        }
    }

    pub(super) fn next_due(&self, handler: &HandlerRef) -> Option<Timestamp> {
        if self.paused.contains_key(handler) {
            return None;
        }
        let waiting = |job: &&Job| match job.phase {
            Phase::Ready | Phase::Leased => job.handler == *handler,
            // The job waits until the running job of its resource has ended.
            Phase::Held => {
                job.handler == *handler
                    && !job.resource().is_some_and(|resource| self.is_busy(&resource))
            }
            Phase::Parked
            | Phase::Done
            | Phase::Stale
            | Phase::Dead
            | Phase::Review
            | Phase::Discarded => false,
        };
        self.jobs.values().filter(waiting).filter_map(Job::due_at).min()
    }

    /// Ends a job, and readies the next job of its resource.
    pub(super) fn close(&mut self, at: JobNumber, end: Phase, now: Timestamp) {
        assert!(!end.is_open(), "a job ends done, stale, dead or discarded");
        self.job_mut(at).finished_at = Some(now);
        self.leave(at, end, now);
    }

    fn leased_under(&self, job: JobId, fence: Fence) -> Option<JobNumber> {
        let holds = |at: &JobNumber| {
            let job = &self.jobs[at];
            job.fence == fence && job.phase == Phase::Leased
        };
        self.numbered(job).filter(holds)
    }

    pub(super) fn job_mut(&mut self, at: JobNumber) -> &mut Job {
        self.jobs.get_mut(&at).expect("a number is only taken from a job that is there")
    }
}

impl Job {
    /// Voids a claim that parked or skipped the job: the claim does not count as an attempt, and
    /// its fence is lost.
    fn uncount(&mut self) {
        self.progress = self.progress.given_back();
        self.fence = Fence(self.fence.0 + 1);
        self.taken = None;
    }

    /// Records how the attempt ended. A later record of the same attempt replaces the earlier one.
    fn note(&mut self, outcome: &str, ended_at: Option<Timestamp>, error: Option<String>) {
        let Some(taken) = &self.taken else { return };
        let (run, attempt) = (self.run, self.progress.attempt);
        self.attempts.retain(|note| (note.run, note.attempt) != (run, attempt));
        self.attempts.push(AttemptNote {
            run,
            attempt,
            started_at: taken.at,
            ended_at,
            outcome: outcome.to_owned(),
            error: error.clone(),
            worker: taken.worker.to_string(),
            answer: None,
        });
        self.error = error;
    }
}

pub(super) fn shortened(text: &str, chars_max: usize) -> String {
    text.chars().take(chars_max).collect()
}

/// The jitter of an attempt of a job, between 0 and 1. The jitter differs between attempts, and is the same
/// in every call for one attempt.
pub(super) fn dice(job: JobId, attempt: u32) -> f64 {
    dice_of(job.0, attempt)
}

/// As [`dice`], for an attempt of any object with an id.
pub(super) fn dice_of(id: Uuid, attempt: u32) -> f64 {
    let (_, random) = id.as_u64_pair();
    let mixed = (random ^ u64::from(attempt)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as f64 / f64::from(u32::MAX)
}

pub(super) fn later(at: Timestamp, wait: Duration) -> Timestamp {
    SignedDuration::try_from(wait)
        .ok()
        .and_then(|wait| at.checked_add(wait).ok())
        .unwrap_or(Timestamp::MAX)
}
