//! The answers of sync sources: waits, within bounds, for the jobs of an event that is already
//! durable. The wait only reads the outcome; workers run the jobs.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{
    EventName, Inspect, KnownEvent, Lookup, Status, StoreError, Verdict, Work,
};
use tokio::time::{Instant, sleep_until};

use crate::event_waiters::EventWaiters;
use crate::limits::{SYNC_POLL, SYNC_POLL_MAX};

/// The state of an event's jobs when the wait ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SyncOutcome {
    /// No job will run without an operator.
    Ended(KnownEvent),
    /// An attempt failed, or a job is a dead letter.
    Failed,
    /// A job is still running or waiting.
    Running(KnownEvent),
}

/// Waits for jobs. `SyncWait` is a trait so that an ingress without sync sources needs fewer bounds
/// on its store.
pub(crate) trait SyncWait: Send + Sync {
    /// Waits for the jobs of the event of `verdict`, at most until `until`.
    fn wait_for_jobs<'a>(
        &'a self,
        verdict: &'a Verdict,
        until: Instant,
    ) -> Pin<Box<dyn Future<Output = Result<SyncOutcome, StoreError>> + Send + 'a>>;
}

/// Reads the event from the store after every notification, and at intervals without one.
pub(crate) struct StoreSyncWait<S> {
    pub(crate) store: Arc<S>,
    pub(crate) event_waiters: EventWaiters,
}

impl<S: Work + Inspect> SyncWait for StoreSyncWait<S> {
    fn wait_for_jobs<'a>(
        &'a self,
        verdict: &'a Verdict,
        until: Instant,
    ) -> Pin<Box<dyn Future<Output = Result<SyncOutcome, StoreError>> + Send + 'a>> {
        Box::pin(self.look_until(verdict, until))
    }
}

/// The state of an event, and how many of its attempts have failed.
struct EventProgress {
    known: KnownEvent,
    failures: u32,
}

impl<S: Work + Inspect> StoreSyncWait<S> {
    async fn look_until(
        &self,
        verdict: &Verdict,
        until: Instant,
    ) -> Result<SyncOutcome, StoreError> {
        let id = verdict.id();
        let waiting = self.event_waiters.wait_for(id);
        let mut may_hurry = matches!(verdict, Verdict::Duplicate(_));
        let mut failures_before = 0;
        let mut pause = SYNC_POLL;
        loop {
            let notify = waiting.notify();
            let EventProgress { known, failures } = self.read_progress(verdict).await?;
            match known.status {
                Status::Processed
                | Status::Stale
                | Status::Ignored
                | Status::Discarded
                | Status::Review => return Ok(SyncOutcome::Ended(known)),
                Status::Dead => return Ok(SyncOutcome::Failed),
                // The attempt failed before this copy arrived: the copy is the next attempt.
                Status::Failed if may_hurry => {
                    may_hurry = false;
                    failures_before = failures;
                    self.store.hurry(id).await?;
                }
                Status::Failed if failures > failures_before => return Ok(SyncOutcome::Failed),
                Status::Failed | Status::Held | Status::Processing | Status::Received => {}
            }
            if Instant::now() >= until {
                return Ok(match known.status {
                    Status::Failed => SyncOutcome::Failed,
                    _running => SyncOutcome::Running(known),
                });
            }
            tokio::select! {
                () = notify => {}
                () = sleep_until(until.min(Instant::now() + pause)) => {
                    pause = next(pause);
                }
            }
        }
    }

    async fn read_progress(&self, verdict: &Verdict) -> Result<EventProgress, StoreError> {
        let id = verdict.id();
        Ok(match self.store.event(&EventName::Ours(id)).await? {
            Lookup::One(event) => EventProgress {
                failures: event.jobs.iter().map(|job| job.progress.steps).sum(),
                known: KnownEvent {
                    id,
                    status: event.summary.status,
                    result: event.summary.result.map(Into::into),
                },
            },
            // The event was pruned. Its outcome is still stored with its key, and the verdict
            // contains it.
            Lookup::None | Lookup::Ambiguous(_) => {
                EventProgress { failures: 0, known: known_by(verdict) }
            }
        })
    }
}

/// The event of a verdict.
fn known_by(verdict: &Verdict) -> KnownEvent {
    match verdict {
        Verdict::Duplicate(known) | Verdict::Conflict(known) => known.clone(),
        Verdict::Accepted(id) | Verdict::Review(id) => {
            KnownEvent { id: *id, status: Status::Received, result: None }
        }
    }
}

fn next(pause: Duration) -> Duration {
    (pause * 2).min(SYNC_POLL_MAX)
}
