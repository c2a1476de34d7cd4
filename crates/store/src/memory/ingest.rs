//! Stores one event per key, and decides about a second arrival under the same key.

use hapax_core::job::{Fence, JobId, Phase, Progress, jittered};
use hapax_core::store::{
    ArrivalInfo, ArrivalNote, Decision, EventDetail, EventId, EventSummary, HandlerRef, Ingest,
    KnownEvent, NewJob, ReviewReason, Status, Verdict,
};
use hapax_core::{EventKey, GuardKeep, GuardSeen, Receipt, Timeliness, Timestamp};
use uuid::Uuid;

use super::work::{dice, later};
use super::{EventNumber, GuardRecord, Job, Model, ReviewState, Stored};
use crate::limits::{CONFLICTS_IN_FULL, COPIES_IN_FULL};

/// A receipt, how it arrived, and the jobs it creates.
struct ArrivalContext<'a> {
    receipt: &'a Receipt,
    jobs: &'a [NewJob],
    via: &'a ArrivalInfo,
    now: Timestamp,
}

impl Model {
    /// Decides all receipts of one request.
    pub(super) fn ingest(&mut self, ingest: &Ingest, now: Timestamp) -> Vec<Verdict> {
        let jobs = ingest.jobs.iter().map(Vec::as_slice).chain(std::iter::repeat(&[][..]));
        let coming = ingest.receipts.iter().zip(jobs);
        coming
            .map(|(receipt, jobs)| {
                self.decide(&ArrivalContext { receipt, jobs, via: &ingest.via, now })
            })
            .collect()
    }

    /// Writes the jobs of an event: one for each handler, however often this function is called.
    pub(super) fn write_jobs(&mut self, event: EventNumber, jobs: &[NewJob], now: Timestamp) {
        for job in jobs {
            if self.job_for(event, &job.handler).is_none() {
                self.write_job(event, job, now);
            }
        }
    }

    fn write_job(&mut self, event: EventNumber, new: &NewJob, now: Timestamp) {
        let key = &self.events[&event].key;
        let handler = HandlerRef { source: key.source.clone(), handler: new.handler.clone() };
        let id = JobId(Uuid::now_v7());
        let first_wait = self.handlers.get(&handler).and_then(|spec| spec.policy.retry.first());
        let wait = first_wait.map(|wait| jittered(*wait, dice(id, 0))).unwrap_or_default();
        let job = Job {
            id,
            event,
            tenant: key.tenant.clone(),
            handler,
            place: new.place.clone(),
            phase: if new.hopeless.is_some() { Phase::Dead } else { Phase::Ready },
            run: 1,
            progress: Progress::default(),
            earlier_attempts: 0,
            fence: Fence(0),
            due: later(now, wait),
            taken: None,
            forced: false,
            result: None,
            error: new.hopeless.clone(),
            finished_at: new.hopeless.as_ref().map(|_| now),
            attempts: Vec::new(),
        };
        self.jobs_ever += 1;
        self.jobs.insert(self.jobs_ever, job);
    }

    fn decide(&mut self, coming: &ArrivalContext<'_>) -> Verdict {
        let receipt = coming.receipt;
        let known = self.known_by_key(receipt);
        let is_copy = known.is_some_and(|at| self.events[&at].body_hash == receipt.body_hash());
        if !is_copy && let Some(verdict) = self.decide_suspected(known, coming) {
            return verdict;
        }
        if let Some(at) = known {
            return self.decide_known(at, coming);
        }
        if let (Some(guard), Some(at)) = (receipt.guard(), self.known_by_guard(receipt))
            && guard.seen == GuardSeen::Duplicate
        {
            return self.decide_known(at, coming);
        }
        let review = match receipt.timeliness() {
            Timeliness::Late { .. } => Some(ReviewReason::Late),
            Timeliness::OnTime => None,
        };
        self.insert(receipt.key(), review, coming)
    }

    /// The verdict on a receipt that looks like a replay, new or known; `None` if it is no replay. The
    /// replay has its own key, so that it does not take the id of another event. `known` is the event
    /// that has that id.
    fn decide_suspected(
        &mut self,
        known: Option<EventNumber>,
        coming: &ArrivalContext<'_>,
    ) -> Option<Verdict> {
        let key = coming.receipt.if_replay()?;
        if let Some(&filed) = self.keys.get(key) {
            return Some(self.decide_known(filed, coming));
        }
        let held_by = self.known_by_guard(coming.receipt)?;
        let is_its_own = known == Some(held_by);
        (!is_its_own).then(|| self.insert(key, Some(ReviewReason::Replay), coming))
    }

    /// The event under this key, or an event under the key of a neighbouring span that was received
    /// near enough in time.
    fn known_by_key(&self, receipt: &Receipt) -> Option<EventNumber> {
        if let Some(&at) = self.keys.get(receipt.key()) {
            return Some(at);
        }
        let beside = receipt.neighbours()?;
        let near = |at: &&EventNumber| beside.hold(self.events[at].detail.summary.received_at);
        beside.keys.iter().filter_map(|key| self.keys.get(key)).find(near).copied()
    }

    /// The event that was seen with the same signed content.
    fn known_by_guard(&self, receipt: &Receipt) -> Option<EventNumber> {
        self.guards.get(&receipt.guard()?.hash).map(|guarded| guarded.event)
    }

    /// Stores the signed content of this receipt with the event, unless the content is known
    /// already.
    fn hold_guard(&mut self, at: EventNumber, coming: &ArrivalContext<'_>) {
        let Some(guard) = coming.receipt.guard() else { return };
        let until = match guard.keep {
            GuardKeep::For(long) => Some(later(coming.now, long)),
            GuardKeep::WithKeys => None,
        };
        self.guards.entry(guard.hash).or_insert(GuardRecord { event: at, until });
    }

    fn decide_known(&mut self, at: EventNumber, coming: &ArrivalContext<'_>) -> Verdict {
        let ArrivalContext { receipt, via, .. } = coming;
        let held_by = self.known_by_guard(receipt);
        // Unsigned bytes may differ although all signed content is the same.
        let same_content = receipt.guard().is_some_and(|guard| guard.seen == GuardSeen::Duplicate)
            && held_by == Some(at);
        let stored = self.events.get_mut(&at).expect("every key has its event");
        if stored.gone {
            self.hold_guard(at, coming);
            return Verdict::Duplicate(self.known(at));
        }
        if stored.body_hash == receipt.body_hash() || same_content {
            let waits_for_on_time = stored.review_state == ReviewState::Review
                && stored.detail.summary.review == Some(ReviewReason::Late);
            let is_its_own = held_by.is_none_or(|holder| holder == at);
            let promoted =
                waits_for_on_time && is_its_own && receipt.timeliness() == Timeliness::OnTime;
            stored.note(via, None);
            self.hold_guard(at, coming);
            if !promoted {
                return Verdict::Duplicate(self.known(at));
            }
            let stored = self.events.get_mut(&at).expect("every key has its event");
            stored.review_state = ReviewState::Ours;
            let id = stored.detail.summary.id;
            self.write_jobs(at, coming.jobs, coming.now);
            return Verdict::Accepted(id);
        }
        if let Some(other) = receipt.if_conflict() {
            return match self.keys.get(other).copied().or(held_by) {
                Some(filed) => {
                    if let Some(stored) = self.events.get_mut(&filed) {
                        stored.note(via, None);
                    }
                    self.hold_guard(filed, coming);
                    Verdict::Duplicate(self.known(filed))
                }
                None => self.insert(other, Some(ReviewReason::Conflict), coming),
            };
        }
        stored.note(via, Some(receipt));
        if guards_conflict(receipt) {
            self.hold_guard(at, coming);
        }
        Verdict::Conflict(self.known(at))
    }

    fn insert(
        &mut self,
        key: &EventKey,
        review: Option<ReviewReason>,
        coming: &ArrivalContext<'_>,
    ) -> Verdict {
        let ArrivalContext { receipt, via, .. } = coming;
        let at = self.events_ever;
        self.events_ever += 1;
        let id = EventId(Uuid::now_v7());
        let (review_state, decision) = match review {
            None => (ReviewState::Ours, Decision::Accepted),
            Some(_) => (ReviewState::Review, Decision::Review),
        };
        let summary = EventSummary {
            id,
            event_id: key.event_id.to_string(),
            tenant: key.tenant.to_string(),
            source: key.source.to_string(),
            event_type: receipt.event_type().map(str::to_owned),
            occurred_at: receipt.occurred_at(),
            received_at: via.received_at,
            status: Status::Ignored,
            review,
            arrivals: 1,
            conflicts: 0,
            processed_at: None,
            result: None,
        };
        let detail = EventDetail {
            summary,
            arrivals: vec![arrival(via, decision, None)],
            headers: via.headers.to_string(),
            body: receipt.body().clone(),
            jobs: Vec::new(),
            actions: Vec::new(),
            messages: Vec::new(),
        };
        let body_hash = receipt.body_hash();
        let stored = Stored { key: key.clone(), detail, body_hash, review_state, gone: false };
        self.events.insert(at, stored);
        self.keys.insert(key.clone(), at);
        self.hold_guard(at, coming);
        match review {
            None => {
                self.write_jobs(at, coming.jobs, coming.now);
                Verdict::Accepted(id)
            }
            Some(_) => Verdict::Review(id),
        }
    }

    fn known(&self, at: EventNumber) -> KnownEvent {
        let summary = self.summary(at);
        KnownEvent {
            id: summary.id,
            status: summary.status,
            result: summary.result.map(Into::into),
        }
    }
}

impl Stored {
    /// Counts one more arrival, and keeps it in full while there is room.
    fn note(&mut self, via: &ArrivalInfo, conflict: Option<&Receipt>) {
        let summary = &mut self.detail.summary;
        summary.arrivals += 1;
        let notes = &mut self.detail.arrivals;
        if let Some(receipt) = conflict {
            summary.conflicts += 1;
            if summary.conflicts <= CONFLICTS_IN_FULL {
                notes.push(arrival(via, Decision::Conflict, Some(receipt)));
            }
            return;
        }
        notes.push(arrival(via, Decision::Duplicate, None));
        let plain = |note: &ArrivalNote| note.decision == Decision::Duplicate;
        if notes.iter().filter(|note| plain(note)).count() > COPIES_IN_FULL
            && let Some(oldest) = notes.iter().position(plain)
        {
            notes.remove(oldest);
        }
    }
}

/// Whether the signed content of a conflict is stored with the event of its id. If the id is part of the guarded
/// content, no other id can have this content. With the guard, the next such arrival would be a copy of the event,
/// although the bodies differ.
fn guards_conflict(receipt: &Receipt) -> bool {
    receipt.guard().is_some_and(|guard| guard.seen == GuardSeen::Review)
}

fn arrival(via: &ArrivalInfo, decision: Decision, conflict: Option<&Receipt>) -> ArrivalNote {
    ArrivalNote {
        decision,
        received_at: via.received_at,
        request_id: via.request_id,
        remote: via.remote,
        secret: via.secret,
        verifier: None,
        signed_at: via.signed_at,
        body: conflict.map(|receipt| receipt.body().clone()),
    }
}
