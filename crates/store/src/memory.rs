//! The readable model of a store: what the others must do, without a disk. It forgets everything
//! when dropped, so it is for tests and for reading.

use std::collections::HashMap;
use std::sync::Mutex;

use hapax_core::job::JobId;
use hapax_core::store::{
    ArrivalNote, Cursor, Decision, EventDetail, EventFilter, EventId, EventName, EventSummary,
    Ingest, Inspect, JobDetail, JobFilter, Known, Lookup, Page, ReviewReason, Status, Store,
    StoreError, Verdict, Via,
};
use hapax_core::{EventKey, KeyHash, Receipt, Timeliness};
use uuid::Uuid;

use crate::limits::{CONFLICTS_IN_FULL, COPIES_IN_FULL, PAGE_MAX};

/// Events in memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    model: Mutex<Model>,
}

#[derive(Debug, Default)]
struct Model {
    events: Vec<Stored>,
    keys: HashMap<EventKey, usize>,
    guards: HashMap<KeyHash, usize>,
}

#[derive(Debug)]
struct Stored {
    detail: EventDetail,
    body_hash: KeyHash,
}

impl Stored {
    fn known(&self) -> Known {
        Known { id: self.detail.summary.id, status: self.detail.summary.status, result: None }
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn model(&self) -> std::sync::MutexGuard<'_, Model> {
        self.model.lock().expect("no panic happens under this lock")
    }
}

impl Store for MemoryStore {
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<Verdict>, StoreError> {
        let mut model = self.model();
        let decide = |receipt| model.decide(receipt, &ingest.via);
        Ok(ingest.receipts.iter().map(decide).collect())
    }

    async fn knows(&self, key: &EventKey) -> Result<bool, StoreError> {
        Ok(self.model().keys.contains_key(key))
    }

    fn writable(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

impl Model {
    fn decide(&mut self, receipt: &Receipt, via: &Via) -> Verdict {
        if let Some(&at) = self.keys.get(receipt.key()) {
            return self.meet_again(at, receipt, via);
        }
        if let Some(earlier) = receipt.earlier()
            && let Some(&at) = self.keys.get(&earlier.key)
            && self.events[at].detail.summary.received_at >= earlier.not_before
        {
            return self.meet_again(at, receipt, via);
        }
        let seen_before = receipt.guard().is_some_and(|guard| self.guards.contains_key(&guard));
        let review = match (receipt.timeliness(), seen_before) {
            (_, true) => Some(ReviewReason::Replay),
            (Timeliness::Late { .. }, false) => Some(ReviewReason::Late),
            (Timeliness::OnTime, false) => None,
        };
        self.insert(receipt.key(), review, receipt, via)
    }

    fn meet_again(&mut self, at: usize, receipt: &Receipt, via: &Via) -> Verdict {
        let stored = &mut self.events[at];
        if stored.body_hash == receipt.body_hash() {
            let summary = &mut stored.detail.summary;
            let waits_for_on_time =
                summary.status == Status::Review && summary.review == Some(ReviewReason::Late);
            let promoted = waits_for_on_time && receipt.timeliness() == Timeliness::OnTime;
            if promoted {
                summary.status = Status::Ignored;
            }
            stored.note(via, None);
            return match promoted {
                true => Verdict::Accepted(stored.known().id),
                false => Verdict::Duplicate(stored.known()),
            };
        }
        if let Some(other) = receipt.if_conflict() {
            return match self.keys.get(other) {
                Some(&filed) => {
                    self.events[filed].note(via, None);
                    Verdict::Duplicate(self.events[filed].known())
                }
                None => self.insert(other, Some(ReviewReason::Conflict), receipt, via),
            };
        }
        stored.note(via, Some(receipt));
        Verdict::Conflict(stored.known())
    }

    fn insert(
        &mut self,
        key: &EventKey,
        review: Option<ReviewReason>,
        receipt: &Receipt,
        via: &Via,
    ) -> Verdict {
        let at = self.events.len();
        let id = EventId(Uuid::now_v7());
        let (status, decision) = match review {
            None => (Status::Ignored, Decision::Accepted),
            Some(_) => (Status::Review, Decision::Review),
        };
        let summary = EventSummary {
            id,
            event_id: key.event_id.to_string(),
            tenant: key.tenant.to_string(),
            source: key.source.to_string(),
            event_type: receipt.event_type().map(str::to_owned),
            occurred_at: receipt.occurred_at(),
            received_at: via.received_at,
            status,
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
        self.events.push(Stored { detail, body_hash: receipt.body_hash() });
        self.keys.insert(key.clone(), at);
        if let Some(guard) = receipt.guard() {
            self.guards.entry(guard).or_insert(at);
        }
        match review {
            None => Verdict::Accepted(id),
            Some(_) => Verdict::Review(id),
        }
    }
}

impl Stored {
    /// Counts one more arrival, and keeps it in full while there is room.
    fn note(&mut self, via: &Via, conflict: Option<&Receipt>) {
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

fn arrival(via: &Via, decision: Decision, conflict: Option<&Receipt>) -> ArrivalNote {
    ArrivalNote {
        decision,
        received_at: via.received_at,
        request_id: via.request_id,
        remote: via.remote,
        secret: via.secret,
        signed_at: via.signed_at,
        body: conflict.map(|receipt| receipt.body().clone()),
    }
}

impl Inspect for MemoryStore {
    async fn jobs(&self, _filter: JobFilter) -> Result<Page<JobDetail>, StoreError> {
        Ok(Page { items: Vec::new(), next: None })
    }

    async fn job(&self, _id: JobId) -> Result<Option<JobDetail>, StoreError> {
        Ok(None)
    }

    async fn events(&self, filter: EventFilter) -> Result<Page<EventSummary>, StoreError> {
        let model = self.model();
        let before = filter.before.map_or(usize::MAX, |Cursor(before)| before as usize);
        let limit = filter.limit.clamp(1, PAGE_MAX);
        let mut fitting = model
            .events
            .iter()
            .enumerate()
            .rev()
            .filter(|(at, stored)| *at < before && fits(&filter, &stored.detail))
            .map(|(at, stored)| (at, stored.detail.summary.clone()));
        let page: Vec<_> = fitting.by_ref().take(limit).collect();
        let more = fitting.next().is_some();
        let next = page.last().filter(|_| more).map(|(at, _)| Cursor(*at as u64));
        Ok(Page { items: page.into_iter().map(|(_, summary)| summary).collect(), next })
    }

    async fn event(&self, name: &EventName) -> Result<Lookup<EventDetail>, StoreError> {
        let model = self.model();
        let found: Vec<&EventDetail> = model
            .events
            .iter()
            .map(|stored| &stored.detail)
            .filter(|detail| match name {
                EventName::Ours(id) => detail.summary.id == *id,
                EventName::Theirs(event_id) => detail.summary.event_id == **event_id,
            })
            .collect();
        Ok(match found.as_slice() {
            [] => Lookup::None,
            [one] => Lookup::One((*one).clone()),
            several => Lookup::Ambiguous(several.iter().map(|one| one.summary.id).collect()),
        })
    }
}

fn fits(filter: &EventFilter, detail: &EventDetail) -> bool {
    let summary = &detail.summary;
    let holds = |text: &String| {
        summary.event_id.contains(text.as_str())
            || detail.body.windows(text.len().max(1)).any(|part| part == text.as_bytes())
    };
    filter.tenant.as_ref().is_none_or(|tenant| summary.tenant == tenant.as_str())
        && filter.source.as_ref().is_none_or(|source| summary.source == source.as_str())
        && filter
            .event_type
            .as_ref()
            .is_none_or(|wanted| summary.event_type.as_deref() == Some(wanted.as_str()))
        && filter.status.is_none_or(|status| summary.status == status)
        && filter.since.is_none_or(|since| summary.received_at >= since)
        && filter.until.is_none_or(|until| summary.received_at < until)
        && filter.text.as_ref().is_none_or(holds)
}
