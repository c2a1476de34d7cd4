//! [`Work::wait`](hapax_core::store::Work::wait) for all stores: an arrival, or the time of the next job.

use std::ops::RangeInclusive;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::Wake;
use tokio::time::{Instant, sleep_until};

/// When the next job is due, and the store's clock when that was read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NextDue {
    pub(crate) due: Option<Timestamp>,
    pub(crate) now: Timestamp,
}

/// Waits for `arrived`, or for the time that `next` reads, within `span`. A read that fails counts as no
/// known job, because the caller polls at the end of the span anyway.
pub(crate) async fn wait<E>(
    arrived: impl Future<Output = ()>,
    next: impl Future<Output = Result<NextDue, E>>,
    span: RangeInclusive<Duration>,
) -> Wake {
    let began = Instant::now();
    let time = async {
        let Ok(NextDue { due: Some(due), now }) = next.await else {
            sleep_until(began + *span.end()).await;
            return None;
        };
        let until_due = Duration::try_from(due.duration_since(now)).unwrap_or_default();
        sleep_until(began + until_due.max(*span.start()).min(*span.end())).await;
        Some(due)
    };
    tokio::select! {
        biased;
        () = arrived => Wake::Arrived,
        due = time => Wake::Elapsed { due },
    }
}
