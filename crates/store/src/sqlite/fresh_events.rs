//! Events that were committed a moment ago and whose jobs wait. The first claim of such a job takes the event from
//! memory instead of reading and hashing the row that was just written.
//!
//! An event is added only after its commit. An event that is not here is read from the file.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::store::EventId;

use super::new_rows::EventRow;
use crate::limits::{FRESH_EVENTS_BYTES_MAX, FRESH_EVENTS_MAX};

/// The part of an event that a claim names. Times are microseconds since 1970.
#[derive(Debug)]
pub(super) struct EventContent {
    pub(super) id: EventId,
    pub(super) event_id: Box<str>,
    pub(super) event_type: Option<Box<str>>,
    pub(super) occurred_at: Option<i64>,
    pub(super) received_at: i64,
    pub(super) headers: Arc<str>,
    pub(super) body: Bytes,
}

impl EventContent {
    fn size(&self) -> usize {
        self.body.len() + self.headers.len()
    }
}

/// The newest events with waiting jobs, in the order of their numbers.
#[derive(Debug, Default)]
pub(super) struct FreshEvents {
    events: VecDeque<(i64, EventContent)>,
    bytes: usize,
}

impl FreshEvents {
    /// Adds an event that is committed. Beyond the bounds the oldest events are dropped.
    pub(super) fn add(&mut self, event: EventRow) {
        let EventRow { seq, id, event_id, event_type, occurred_at, received_at, headers, .. } =
            event;
        debug_assert!(self.events.back().is_none_or(|(last, _)| *last < seq));
        if event.body.len() + headers.len() > FRESH_EVENTS_BYTES_MAX {
            return;
        }
        // A copy, because the body may be part of a connection's larger buffer.
        let body = Bytes::copy_from_slice(&event.body);
        let content =
            EventContent { id, event_id, event_type, occurred_at, received_at, headers, body };
        self.bytes += content.size();
        self.events.push_back((seq, content));
        while self.events.len() > FRESH_EVENTS_MAX || self.bytes > FRESH_EVENTS_BYTES_MAX {
            let Some((_, oldest)) = self.events.pop_front() else { break };
            self.bytes -= oldest.size();
        }
    }

    /// Takes the event with this number, if it is here.
    pub(super) fn take(&mut self, seq: i64) -> Option<EventContent> {
        let at = self.events.binary_search_by_key(&seq, |(seq, _)| *seq).ok()?;
        let (_, content) = self.events.remove(at)?;
        self.bytes -= content.size();
        Some(content)
    }
}
