//! Queries of events and jobs: everything here only reads.

use std::collections::{BTreeMap, HashSet};

use hapax_core::job::{Phase, idempotency_key};
use hapax_core::limits::{LANE_COUNT_MAX, TRACED_EVENTS_MAX};
use hapax_core::store::{
    Cursor, DeadGroups, EventDetail, EventFilter, EventId, EventName, EventSample, EventSummary,
    JobDetail, JobFilter, LaneState, Lookup, MessageNote, Page, ReadBound, SampleAsk, SampledEvent,
    Status, TextSearch,
};
use hapax_core::{SourceName, Timestamp};
use uuid::Uuid;

use super::{EventNumber, Job, Model, ReviewState, Stored};
use crate::dead_groups::DeadGroupSums;
use crate::page_search::{PageSearch, Parts, ReadBudget};

impl Model {
    /// An event as a list shows it, with the status and result of its jobs.
    pub(super) fn summary(&self, at: EventNumber) -> EventSummary {
        let stored = &self.events[&at];
        let mut summary = stored.detail.summary.clone();
        if stored.gone {
            return summary;
        }
        summary.status = match stored.review_state {
            ReviewState::Review => Status::Review,
            ReviewState::Discarded => Status::Discarded,
            ReviewState::Ours => {
                Status::of_jobs(self.jobs_of(at).map(|job| (job.phase, job.progress.steps)))
            }
        };
        if self.jobs_of(at).all(|job| job.phase.is_over()) {
            summary.processed_at = self.jobs_of(at).filter_map(|job| job.finished_at).max();
        }
        summary.result = self.jobs_of(at).next().and_then(|job| job.result.clone());
        summary
    }

    fn detail(&self, at: EventNumber) -> EventDetail {
        let mut jobs: Vec<_> = self.jobs_of(at).map(|job| self.job_detail(job)).collect();
        jobs.sort_by(|a, b| a.handler.cmp(&b.handler));
        let published = self.messages.iter().filter(|(_, one)| one.event == Some(at) && !one.gone);
        let mut messages: Vec<MessageNote> = published
            .map(|(number, message)| MessageNote {
                id: message.id.clone(),
                tenant: message.tenant.as_str().to_owned(),
                r#type: message.new.r#type.clone(),
                created_at: message.created_at,
                status: self.message_status(*number),
            })
            .collect();
        messages.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        let mut detail = self.events[&at].detail.clone();
        for arrival in &mut detail.arrivals {
            arrival.verifier = self.verifiers.get(&arrival.secret).cloned();
        }
        EventDetail { summary: self.summary(at), jobs, messages, ..detail }
    }

    pub(super) fn job_detail(&self, job: &Job) -> JobDetail {
        let event = &self.events[&job.event].detail.summary;
        JobDetail {
            id: job.id,
            event: event.id,
            event_id: event.event_id.clone(),
            tenant: event.tenant.clone(),
            source: event.source.clone(),
            handler: job.handler.handler.clone(),
            phase: job.phase,
            run: job.run,
            progress: job.progress,
            fence: job.fence,
            due_at: job.due_at(),
            result: job.result.clone(),
            error: job.error.clone(),
            finished_at: job.finished_at,
            idempotency_key: idempotency_key(event.id, &job.handler.handler, job.run),
            resource: job.place.as_ref().map(|place| place.resource.to_string()),
            attempts: job.attempts.clone(),
        }
    }

    pub(super) fn list_events(&self, filter: &EventFilter) -> Page<EventSummary> {
        let is_in_time = |received_at: Timestamp| {
            filter.since.is_none_or(|since| received_at >= since)
                && filter.until.is_none_or(|until| received_at < until)
        };
        let there =
            self.events.iter().rev().filter(|(_, stored)| {
                !stored.gone && is_in_time(stored.detail.summary.received_at)
            });
        let rows = there.map(|(at, stored)| {
            let summary = self.summary(*at);
            let text = filter.text.as_ref();
            let is_exact = text.is_some_and(|text| self.finds_exactly(text, *at, &summary));
            let received_at = summary.received_at;
            let item = Some(summary).filter(|summary| self.fits(filter, *at, stored, summary));
            (*at, received_at, item, is_exact)
        });
        let mut search = PageSearch::begin(filter.limit, filter.bound);
        let (exact, rest) = match Parts::of(filter) {
            Parts::One(before) => (None, Some(before)),
            Parts::Both(before) => (Some(before), Some(None)),
            Parts::Rest(before) => (None, Some(Some(before))),
        };
        let is_before = |at: u64, before: Option<Cursor>| {
            before.is_none_or(|Cursor(before)| u128::from(at) < before)
        };
        if let Some(before) = exact {
            for (at, time, item, _) in
                rows.clone().filter(|(at, _, _, is_exact)| *is_exact && is_before(*at, before))
            {
                if search.take(Cursor(at.into()), time, item).is_break() {
                    break;
                }
            }
        }
        let has_two = !matches!(Parts::of(filter), Parts::One(_));
        if has_two && !search.begin_rest() {
            return search.page();
        }
        let before = rest.flatten();
        for (at, time, item, is_exact) in rows.filter(|(at, _, _, _)| is_before(*at, before)) {
            if search.take(Cursor(at.into()), time, item.filter(|_| !is_exact)).is_break() {
                break;
            }
        }
        search.page()
    }

    /// Whether a text is an id of this event or one of its indexed values.
    fn finds_exactly(&self, text: &TextSearch, at: EventNumber, summary: &EventSummary) -> bool {
        text.named.contains(&summary.id)
            || text.values.iter().any(|hash| self.search_index.has(at, *hash))
    }

    pub(super) fn traced_by(&self, id: &str) -> Vec<EventId> {
        let request = id.parse::<Uuid>().ok();
        let published: HashSet<EventNumber> = self
            .messages
            .values()
            .filter(|message| message.id == id && !message.gone)
            .filter_map(|message| message.event)
            .collect();
        let is_it = |at: &EventNumber, stored: &Stored| {
            let arrivals = &stored.detail.arrivals;
            published.contains(at) || arrivals.iter().any(|one| Some(one.request_id) == request)
        };
        let found = self.events.iter().filter(|(at, stored)| !stored.gone && is_it(at, stored));
        found.map(|(_, stored)| stored.detail.summary.id).take(TRACED_EVENTS_MAX).collect()
    }

    pub(super) fn find_event(&self, name: &EventName) -> Lookup<EventDetail> {
        let is_it = |stored: &Stored| match name {
            EventName::Ours(id) => stored.detail.summary.id == *id,
            EventName::Theirs(event_id) => stored.detail.summary.event_id == **event_id,
        };
        let there = self.events.iter().filter(|(_, stored)| !stored.gone && is_it(stored));
        let found: Vec<EventNumber> = there.map(|(at, _)| *at).collect();
        match found.as_slice() {
            [] => Lookup::None,
            [one] => Lookup::One(self.detail(*one)),
            several => Lookup::Ambiguous(
                several.iter().map(|at| self.events[at].detail.summary.id).collect(),
            ),
        }
    }

    pub(super) fn list_jobs(&self, filter: &JobFilter) -> Page<JobDetail> {
        let wanted = |job: &Job| {
            filter.tenant.as_ref().is_none_or(|tenant| job.tenant == *tenant)
                && filter.source.as_ref().is_none_or(|source| job.handler.source == *source)
                && filter.handler.as_ref().is_none_or(|handler| job.handler.handler == *handler)
                && filter.phase.is_none_or(|phase| job.phase == phase)
                && filter
                    .error
                    .as_ref()
                    .is_none_or(|error| job.error.as_deref().unwrap_or_default() == error)
                && (!filter.forced || job.run > 1)
        };
        let rows = self.jobs.iter().rev().map(|(at, job)| {
            let received_at = self.events[&job.event].detail.summary.received_at;
            (*at, received_at, wanted(job).then(|| self.job_detail(job)))
        });
        page(rows, filter.before, filter.limit, filter.bound)
    }

    pub(super) fn dead_groups(&self, filter: &JobFilter) -> DeadGroups {
        let wanted = |job: &Job| {
            filter.tenant.as_ref().is_none_or(|tenant| job.tenant == *tenant)
                && filter.source.as_ref().is_none_or(|source| job.handler.source == *source)
                && filter.handler.as_ref().is_none_or(|handler| job.handler.handler == *handler)
        };
        let (mut sums, mut last) = (DeadGroupSums::default(), None);
        let mut budget = ReadBudget::begin(filter.bound);
        let mut dead: Vec<&Job> =
            self.jobs.values().filter(|job| job.phase == Phase::Dead).collect();
        dead.sort_by_key(|job| std::cmp::Reverse((job.event, job.id)));
        for job in dead {
            if budget.is_spent() {
                return sums.groups(filter.limit, last);
            }
            budget.spend(1);
            last = Some(self.events[&job.event].detail.summary.received_at);
            if wanted(job) {
                let at = job.finished_at.unwrap_or(job.due);
                sums.add(job.error.as_deref().unwrap_or_default(), at);
            }
        }
        sums.groups(filter.limit, None)
    }

    pub(super) fn events_in_review(&self) -> Vec<(SourceName, u64)> {
        let mut counts = BTreeMap::<SourceName, u64>::new();
        for stored in self.events.values().filter(|one| one.review_state == ReviewState::Review) {
            *counts.entry(stored.key.source.clone()).or_default() += 1;
        }
        counts.into_iter().collect()
    }

    pub(super) fn lanes(&self) -> Vec<LaneState> {
        let mut lanes = BTreeMap::new();
        for job in self.jobs.values() {
            let name = (job.handler.source.as_str(), job.handler.handler.as_str());
            let of_phase = |lane: &mut LaneState| {
                let (count, due) = match job.phase {
                    Phase::Ready => (&mut lane.ready, job.due_at()),
                    Phase::Leased => (&mut lane.leased, job.due_at()),
                    Phase::Held => (&mut lane.held, None),
                    Phase::Parked => (&mut lane.parked, None),
                    Phase::Review => (&mut lane.review, None),
                    Phase::Dead => (&mut lane.dead, None),
                    Phase::Done | Phase::Stale | Phase::Discarded => return,
                };
                *count = (*count + 1).min(LANE_COUNT_MAX);
                lane.oldest_due = lane.oldest_due.into_iter().chain(due).min();
            };
            of_phase(lanes.entry(name).or_insert_with(|| LaneState {
                handler: job.handler.clone(),
                oldest_due: None,
                ready: 0,
                leased: 0,
                held: 0,
                parked: 0,
                review: 0,
                dead: 0,
            }));
        }
        lanes.into_values().filter(|lane| lane.open() + lane.dead > 0).collect()
    }

    pub(super) fn sample(&self, ask: &SampleAsk) -> EventSample {
        let wanted = |stored: &Stored| {
            !stored.gone
                && stored.detail.summary.received_at >= ask.since
                && stored.detail.arrivals.len() > 1
        };
        let there = self.events.iter().rev().filter(|(_, stored)| wanted(stored));
        let all: Vec<EventNumber> = there.map(|(at, _)| *at).collect();
        let sampled = |at: &EventNumber| SampledEvent {
            summary: self.summary(*at),
            arrived_at: {
                let arrivals = &self.events[at].detail.arrivals;
                arrivals.iter().map(|note| note.received_at).collect()
            },
        };
        let step = all.len().div_ceil(ask.limit.max(1)).max(1);
        EventSample {
            total: all.len() as u64,
            events: all.iter().step_by(step).map(sampled).collect(),
        }
    }
}

impl Job {
    /// The time at which the job's state changes without an operator: every open job has one.
    pub(super) fn due_at(&self) -> Option<Timestamp> {
        match self.phase {
            Phase::Leased => self.taken.as_ref().map(|taken| taken.until),
            Phase::Ready | Phase::Held | Phase::Parked => Some(self.due),
            Phase::Done | Phase::Stale | Phase::Dead | Phase::Review | Phase::Discarded => None,
        }
    }
}

/// One page of a list, newest first: rows with their times, and their items if they match.
pub(super) fn page<T>(
    newest_first: impl Iterator<Item = (u64, Timestamp, Option<T>)>,
    before: Option<Cursor>,
    limit: usize,
    bound: ReadBound,
) -> Page<T> {
    let before =
        before.map_or(u64::MAX, |Cursor(before)| u64::try_from(before).unwrap_or(u64::MAX));
    let mut search = PageSearch::begin(limit, bound);
    for (at, time, item) in newest_first.filter(|(at, _, _)| *at < before) {
        if search.take(Cursor(at.into()), time, item).is_break() {
            break;
        }
    }
    search.page()
}

impl Model {
    pub(super) fn fits(
        &self,
        filter: &EventFilter,
        at: EventNumber,
        stored: &Stored,
        summary: &EventSummary,
    ) -> bool {
        let body = &stored.detail.body;
        let holds = |search: &TextSearch| {
            let text = search.text.as_str();
            let may_read = search.sources.as_ref().is_none_or(|of| of.contains(&stored.key.source));
            self.finds_exactly(search, at, summary)
                || summary.event_id.contains(text)
                || may_read && body.windows(text.len().max(1)).any(|part| part == text.as_bytes())
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
            && filter
                .unfinished_since
                .is_none_or(|since| summary.received_at < since && !summary.status.is_final())
            && filter.text.as_ref().is_none_or(holds)
            && (!filter.has_copies || summary.arrivals > 1)
    }
}
