//! Decisions of operators: replay, approve, reject; and retention, which deletes events that no
//! longer need a decision.

use std::collections::hash_map::Entry;

use hapax_core::Timestamp;
use hapax_core::job::{Fence, HandlerName, Phase, Progress};
use hapax_core::order::OrderDecision;
use hapax_core::store::{
    Action, ActionNote, EventId, EventSummary, HandlerRef, Horizon, JobScope, NewJob, PauseAnswer,
    PausedHandler, ReplayAsk, ReplayEffect, Replayed, Reviewed,
};

use super::{EventNumber, GuardRecord, Job, JobNumber, Model, ReviewState, Stored};

impl Model {
    /// Runs again the jobs that may run again. An event that waits in review, or was rejected
    /// there, has no work to repeat. Only an approval runs such an event.
    pub(super) fn replay(
        &mut self,
        ask: ReplayAsk,
        scope: JobScope,
        now: Timestamp,
    ) -> Vec<Replayed> {
        let ours = |at: &EventNumber| self.events[at].review_state == ReviewState::Ours;
        let Some(event) = self.event_numbered(ask.event).filter(ours) else { return Vec::new() };
        let (mut replayed, mut changed) = (Vec::new(), false);
        for new in &ask.handlers {
            let job = self.job_for(event, &new.handler);
            if !job.map_or(scope.adds_jobs, |job| self.jobs[&job].is_within(scope)) {
                continue;
            }
            let effect = self.effect_of_replay(event, job, new, ask.force, now);
            let Some(effect) = effect else { continue };
            replayed.push(Replayed { handler: new.handler.clone(), effect });
            if ask.dry_run {
                continue;
            }
            match (effect, job) {
                (ReplayEffect::WouldRun, Some(job)) => {
                    changed = true;
                    self.again(job, new, ask.force, now);
                }
                (ReplayEffect::WouldRun | ReplayEffect::Stale, None) => {
                    changed = true;
                    self.write_jobs(event, std::slice::from_ref(new), now);
                    if let Some(job) = self.job_for(event, &new.handler) {
                        self.job_mut(job).forced = ask.force;
                    }
                }
                (ReplayEffect::Stale, Some(job)) => changed |= self.overtaken(job, now),
                (
                    ReplayEffect::AlreadyApplied
                    | ReplayEffect::AlreadyOpen
                    | ReplayEffect::Discarded,
                    _,
                ) => {}
            }
        }
        // A replay that changed nothing is not recorded.
        if changed {
            self.record(event, "replay", ask.by);
        }
        replayed
    }

    /// `None` if the replay has no effect: a job that can never run stays dead, or is not created.
    fn effect_of_replay(
        &self,
        event: EventNumber,
        job: Option<JobNumber>,
        new: &NewJob,
        force: bool,
        now: Timestamp,
    ) -> Option<ReplayEffect> {
        let phase = job.map(|at| self.jobs[&at].phase);
        if job.is_some_and(|at| self.waits_for_its_next_attempt(at, now)) {
            return Some(ReplayEffect::WouldRun);
        }
        if phase.is_some_and(Phase::is_open) {
            return Some(ReplayEffect::AlreadyOpen);
        }
        match (phase, force) {
            (Some(Phase::Done), false) => Some(ReplayEffect::AlreadyApplied),
            (Some(Phase::Stale), false) => Some(ReplayEffect::Stale),
            (Some(Phase::Review), _) => Some(ReplayEffect::AlreadyOpen),
            (Some(Phase::Discarded), false) => Some(ReplayEffect::Discarded),
            _ if new.hopeless.is_some() => None,
            (_, true) => Some(ReplayEffect::WouldRun),
            (_, false) => Some(match self.is_past(event, new) {
                true => ReplayEffect::Stale,
                false => ReplayEffect::WouldRun,
            }),
        }
    }

    fn waits_for_its_next_attempt(&self, at: JobNumber, now: Timestamp) -> bool {
        let job = &self.jobs[&at];
        job.phase == Phase::Ready && job.due > now
    }

    fn is_past(&self, event: EventNumber, new: &NewJob) -> bool {
        let key = &self.events[&event].key;
        let handler = HandlerRef { source: key.source.clone(), handler: new.handler.clone() };
        let order = self.handlers.get(&handler).and_then(|spec| spec.order.as_ref());
        order.is_some_and(|rule| {
            self.guard(&key.tenant, &handler, new.place.as_ref(), &rule.policy)
                == OrderDecision::Stale
        })
    }

    /// Closes a dead job after a newer version was applied, because the job no longer needs a
    /// decision. Returns whether the job was dead.
    fn overtaken(&mut self, at: JobNumber, now: Timestamp) -> bool {
        let lay_dead = self.jobs[&at].phase == Phase::Dead;
        if lay_dead {
            self.close(at, Phase::Stale, now);
        }
        lay_dead
    }

    /// Makes a job that waits for its next attempt due now, otherwise unchanged. A dead job
    /// continues its run with a fresh schedule; one that was lost before still runs alone. A
    /// finished job gets a new run, and with it a new idempotency key.
    fn again(&mut self, at: JobNumber, new: &NewJob, force: bool, now: Timestamp) {
        let job = self.job_mut(at);
        if job.phase == Phase::Ready {
            job.due = now;
            return;
        }
        if job.phase == Phase::Dead {
            job.progress = Progress { steps: 0, lost: job.progress.lost.min(1), ..job.progress };
        } else {
            job.run += 1;
            job.progress = Progress::default();
        }
        job.earlier_attempts = job.progress.attempt.saturating_sub(job.progress.lost);
        job.fence = Fence(job.fence.0 + 1);
        job.phase = Phase::Ready;
        job.due = now;
        job.taken = None;
        job.forced = force;
        job.place.clone_from(&new.place);
        job.result = None;
        job.error = None;
        job.finished_at = None;
    }

    pub(super) fn approve(
        &mut self,
        event: EventId,
        jobs: &[NewJob],
        scope: JobScope,
        by: Action,
        now: Timestamp,
    ) -> Reviewed {
        let Some(at) = self.event_numbered(event) else { return Reviewed::Unknown };
        if self.events[&at].review_state == ReviewState::Review {
            self.event_mut(at).review_state = ReviewState::Ours;
            self.write_jobs(at, jobs, now);
        } else {
            let waiting = self.in_review(at, scope);
            if waiting.is_empty() {
                return Reviewed::NotWaiting(self.summary(at).status);
            }
            for job in waiting {
                self.job_mut(job).forced = true;
                self.job_mut(job).error = None;
                self.ready(job, now);
            }
        }
        self.record(at, "approve", by);
        Reviewed::Decided
    }

    pub(super) fn reject(
        &mut self,
        event: EventId,
        scope: JobScope,
        by: Action,
        now: Timestamp,
    ) -> Reviewed {
        let Some(at) = self.event_numbered(event) else { return Reviewed::Unknown };
        if self.events[&at].review_state == ReviewState::Review {
            self.event_mut(at).review_state = ReviewState::Discarded;
        } else {
            let waiting = self.in_review(at, scope);
            if waiting.is_empty() {
                return Reviewed::NotWaiting(self.summary(at).status);
            }
            for job in waiting {
                let fence = &mut self.job_mut(job).fence;
                *fence = Fence(fence.0 + 1);
                self.close(job, Phase::Discarded, now);
            }
        }
        self.record(at, "reject", by);
        Reviewed::Decided
    }

    pub(super) fn discard(
        &mut self,
        event: EventId,
        handler: Option<&HandlerName>,
        scope: JobScope,
        by: Action,
        now: Timestamp,
    ) -> Reviewed {
        let Some(at) = self.event_numbered(event) else { return Reviewed::Unknown };
        let is_meant = |job: &Job| {
            let named = handler.is_none_or(|handler| job.handler.handler == *handler);
            job.event == at && job.phase == Phase::Dead && named && job.is_within(scope)
        };
        let dead: Vec<JobNumber> =
            self.jobs.iter().filter(|(_, job)| is_meant(job)).map(|(at, _)| *at).collect();
        if dead.is_empty() {
            return Reviewed::NotWaiting(self.summary(at).status);
        }
        for job in dead {
            let fence = &mut self.job_mut(job).fence;
            *fence = Fence(fence.0 + 1);
            self.close(job, Phase::Discarded, now);
        }
        self.record(at, "discard", by);
        Reviewed::Decided
    }

    pub(super) fn pause(&mut self, handler: HandlerRef, by: Action) -> PauseAnswer {
        let Action { who, reason, at } = by;
        match self.paused.entry(handler) {
            Entry::Occupied(_) => PauseAnswer::AlreadySo,
            Entry::Vacant(entry) => {
                let handler = entry.key().clone();
                entry.insert(PausedHandler { handler, since: at, who, reason });
                PauseAnswer::Changed
            }
        }
    }

    pub(super) fn resume(&mut self, handler: &HandlerRef) -> PauseAnswer {
        match self.paused.remove(handler) {
            Some(_) => PauseAnswer::Changed,
            None => PauseAnswer::AlreadySo,
        }
    }

    /// The jobs of an event that wait for an operator's decision.
    fn in_review(&self, event: EventNumber, scope: JobScope) -> Vec<JobNumber> {
        let waits =
            |job: &Job| job.event == event && job.phase == Phase::Review && job.is_within(scope);
        self.jobs.iter().filter(|(_, job)| waits(job)).map(|(at, _)| *at).collect()
    }

    fn record(&mut self, event: EventNumber, action: &str, by: Action) {
        let Action { who, reason, at } = by;
        let note = ActionNote { action: action.to_owned(), who, reason, at };
        self.event_mut(event).detail.actions.push(note);
    }

    /// Deletes the body, the history and the jobs of finished events first, and their keys only
    /// after the retention of keys. A dead letter is not finished: an operator has to decide about
    /// it.
    pub(super) fn prune(&mut self, horizon: &Horizon, limit: usize, now: Timestamp) -> bool {
        let old = |stored: &Stored| stored.detail.summary.received_at < horizon.events_before;
        let finished = |at: &EventNumber| {
            self.summary(*at).status.is_final() && self.jobs_of(*at).all(|job| job.phase.is_over())
        };
        let mut ripe: Vec<EventNumber> = self
            .events
            .iter()
            .filter(|(at, stored)| old(stored) && finished(at))
            .filter(|(at, stored)| !stored.gone || self.key_may_go(**at, stored, horizon, now))
            .map(|(at, _)| *at)
            .collect();
        let more = ripe.len() > limit;
        ripe.truncate(limit);
        for at in ripe {
            self.forget(at, horizon, now);
        }
        if !more {
            self.prune_messages(horizon);
            self.prune_plans(horizon);
            self.forget_marks(horizon, now);
        }
        more
    }

    /// Whether the key is past its horizon, and every guard of the event past its own time.
    fn key_may_go(
        &self,
        at: EventNumber,
        stored: &Stored,
        horizon: &Horizon,
        now: Timestamp,
    ) -> bool {
        let holds =
            |guarded: &GuardRecord| guarded.event == at && guarded.until.is_some_and(|t| t > now);
        stored.key_is_past(horizon) && !self.guards.values().any(holds)
    }

    fn forget(&mut self, at: EventNumber, horizon: &Horizon, now: Timestamp) {
        let summary = self.summary(at);
        self.strip(at, summary);
        if self.key_may_go(at, &self.events[&at], horizon, now) {
            self.events.remove(&at);
            self.keys.retain(|_, event| *event != at);
            self.guards.retain(|_, guarded| guarded.event != at);
        }
    }

    /// Takes body, history and jobs of an event. `summary`: the part of the event that stays
    /// readable.
    pub(super) fn strip(&mut self, at: EventNumber, summary: EventSummary) {
        self.jobs.retain(|_, job| job.event != at);
        self.search_index.forget(at);
        let stored = self.event_mut(at);
        stored.gone = true;
        stored.detail.summary = summary;
        stored.detail.body.clear();
        stored.detail.arrivals.clear();
        stored.detail.actions.clear();
    }

    fn event_mut(&mut self, at: EventNumber) -> &mut Stored {
        self.events.get_mut(&at).expect("a number is only taken from an event that is there")
    }
}

impl Stored {
    fn key_is_past(&self, horizon: &Horizon) -> bool {
        let of_source = horizon.keys_before.iter().find(|(source, _)| *source == self.key.source);
        of_source.is_some_and(|(_, before)| self.detail.summary.received_at < *before)
    }
}
