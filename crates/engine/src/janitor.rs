//! The janitor works in small commits. The janitor deletes finished events past their retention. The janitor
//! cancels deliveries that were dead, held or parked for too long. The janitor publishes the pending messages
//! about dead deliveries, and erases the data of deleted tenants. While the store has other requests, the
//! janitor pauses between commits, so that no ack waits for more than one of them. While the clock is doubted
//! ([`crate::clock_trust`]), the janitor deletes nothing because of its age.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use hapax_core::store::{
    Expiry, ExpiryAsk, Horizon, OutboxRetention, OwnMessages, StoreError, StoreHints,
    TenantDeletions, Work,
};
use hapax_core::{SourceName, Timestamp, tuned};
use jiff::SignedDuration;
use metrics::counter;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::clock_trust::{ClockTrust, Trust};
use crate::ingress::Now;
use crate::limits::{
    CLOCK_DOUBT_MAX, EXPIRY_NOTICE_MAX, EXPIRY_NOTICE_PART, PRUNE_BATCH, PRUNE_EVERY,
    PRUNE_EVERY_MIN, PRUNE_PAUSE, PRUNES_PER_RETENTION,
};

/// The retention settings; `None` means for ever.
#[derive(Debug, Clone, Default)]
pub struct Retention {
    /// Bodies and history.
    pub events: Option<Duration>,
    /// Keys, per source. A source without an entry keeps its keys for ever.
    pub keys: Vec<(SourceName, Duration)>,
    /// Ids of messages.
    pub message_ids: Option<Duration>,
    /// Deliveries that are dead, held or parked.
    pub deliveries: Option<Duration>,
}

impl Retention {
    /// `keys` is the time that each source of each tenant keeps its keys, `None` for ever. Tenants
    /// share the keys of a source, so the longest of their times counts. Everything else is kept for ever.
    pub fn new(
        events: Option<Duration>,
        keys: impl IntoIterator<Item = (SourceName, Option<Duration>)>,
    ) -> Self {
        let mut longest: HashMap<SourceName, Option<Duration>> = HashMap::new();
        for (source, kept) in keys {
            let known = longest.entry(source).or_insert(Some(Duration::ZERO));
            *known = known.zip(kept).map(|(one, other)| one.max(other));
        }
        let keys = longest.into_iter().filter_map(|(source, kept)| Some((source, kept?))).collect();
        Self { events, keys, ..Self::default() }
    }
}

/// Deletes once a minute, or more often if a short retention time requires it.
pub struct Janitor<S> {
    store: Arc<S>,
    now: Now,
    every: Duration,
    retention: ArcSwap<Retention>,
    clock_trust: Mutex<ClockTrust>,
}

impl<S> Janitor<S> {
    /// A janitor with the default intervals.
    pub fn new(store: Arc<S>, now: Now, retention: Retention) -> Self {
        let every = tuned!("janitor.every_ms", PRUNE_EVERY.as_millis() as u64);
        let every = Duration::from_millis(every);
        let retention = ArcSwap::from_pointee(retention);
        Self { store, now, every, retention, clock_trust: Mutex::default() }
    }

    /// Sets the longest time between two rounds.
    pub fn every(self, every: Duration) -> Self {
        Self { every, ..self }
    }

    /// Replaces the retention settings.
    pub fn reload(&self, retention: Retention) {
        self.retention.store(Arc::new(retention));
    }

    /// The time until the next round.
    fn rest(&self) -> Duration {
        let often = self.retention.load().part().unwrap_or(PRUNE_EVERY);
        often.max(PRUNE_EVERY_MIN).min(self.every)
    }

    /// The time, unless the clock is doubted.
    fn trusted_now(&self) -> Option<Timestamp> {
        let hold = self.retention.load().part().unwrap_or(CLOCK_DOUBT_MAX);
        let now = (self.now)();
        let mut trust = self.clock_trust.lock().expect("no panic happens under this lock");
        match trust.check(now, Instant::now(), hold) {
            Trust::Trusted => Some(now),
            Trust::SetForward(by) => {
                let (by, hold) = (in_words(by), in_words(hold.min(CLOCK_DOUBT_MAX)));
                warn!(
                    "the clock of this machine went forward by {by}: expired data is kept until the clock is set \
                     back, or for {hold}; check the time synchronisation"
                );
                None
            }
            Trust::Doubted => None,
        }
    }

    /// Runs a slice that deletes data because of its age, unless the clock is doubted. A step of the clock
    /// in the middle of a long round must not delete anything either.
    async fn while_trusted(
        &self,
        slice: impl Future<Output = Result<bool, StoreError>>,
    ) -> Result<bool, StoreError> {
        match self.trusted_now() {
            Some(_) => slice.await,
            None => Ok(false),
        }
    }
}

impl<S: Work + StoreHints + OutboxRetention + OwnMessages + TenantDeletions> Janitor<S> {
    /// Deletes in rounds, until `stop`.
    pub async fn run(&self, stop: CancellationToken) {
        let mut failing = false;
        let mut late = false;
        loop {
            let began = Instant::now();
            match stop.run_until_cancelled(self.round(late)).await {
                Some(Err(error)) if !failing => {
                    failing = true;
                    warn!(%error, "deleting expired events: {error}; trying again");
                }
                Some(Err(_)) | None => {}
                Some(Ok(())) => failing = false,
            }
            let (rest, took) = (self.rest(), began.elapsed());
            late = took >= rest;
            if stop.run_until_cancelled(sleep(rest.saturating_sub(took))).await.is_none() {
                return;
            }
        }
    }

    /// Runs one round. `late`: the last round took longer than the time between two rounds.
    async fn round(&self, late: bool) -> Result<(), StoreError> {
        let retention = self.retention.load_full();
        if let Some(now) = self.trusted_now() {
            let horizon = retention.horizon(now);
            let slice = || self.while_trusted(self.store.prune(horizon.clone(), PRUNE_BATCH));
            self.in_slices(late, slice).await?;
        }
        self.in_slices(late, || self.store.publish_deaths(PRUNE_BATCH)).await?;
        // The deletion of a large tenant takes hours. The next round starts at once and continues
        // the work.
        let until = Instant::now() + self.rest();
        let erase = || async { Ok(self.store.erase(PRUNE_BATCH).await? && Instant::now() < until) };
        self.in_slices(late, erase).await?;
        let Some(ask) = retention.expiry() else { return Ok(()) };
        let slice = || async {
            let expiry = self.store.expire_deliveries(ask).await?;
            report(&expiry, &ask);
            Ok(expiry.more)
        };
        self.in_slices(late, || self.while_trusted(slice())).await
    }

    /// Runs slices until one returns false, and pauses between them while the store has other requests.
    async fn in_slices<F>(&self, late: bool, slice: impl Fn() -> F) -> Result<(), StoreError>
    where
        F: Future<Output = Result<bool, StoreError>>,
    {
        let (round, rest) = (Instant::now(), self.rest());
        let mut before = self.store.foreground_requests();
        let mut began = Instant::now();
        while slice().await? {
            let requests = self.store.foreground_requests();
            let is_quiet = requests.is_some() && requests == before;
            before = requests;
            match is_quiet {
                // Even without a pause, a request that arrives now waits for at most one commit.
                true => yield_now().await,
                false => sleep(pause(began.elapsed(), late || round.elapsed() >= rest)).await,
            }
            began = Instant::now();
        }
        Ok(())
    }
}

/// Logs and counts the result of one commit of expiry.
fn report(expiry: &Expiry, ask: &ExpiryAsk) {
    for notice in &expiry.announced {
        let (endpoint, tenant, since) = (notice.endpoint, &notice.tenant, notice.oldest);
        warn!(
            endpoint.id = %endpoint, %tenant,
            "deliveries to endpoint {endpoint} of tenant {tenant} have been dead, held or parked since {since} and \
             will be cancelled after {} in all: replay them, or enable the endpoint",
            in_words(ask.kept)
        );
    }
    for (endpoint, count) in &expiry.cancelled {
        counter!("hapax_deliveries_total", "outcome" => "expired").increment(*count);
        info!(
            endpoint.id = %endpoint, count,
            "cancelled {count} deliveries to endpoint {endpoint}: they were dead, held or parked for longer than {}",
            in_words(ask.kept)
        );
    }
}

fn in_words(kept: Duration) -> String {
    match kept.as_secs() {
        seconds @ 172_800.. => format!("{} days", seconds / 86_400),
        seconds @ 7_200.. => format!("{} hours", seconds / 3_600),
        seconds => format!("{seconds} s"),
    }
}

/// The pause after a commit that took this long. A janitor that falls behind pauses only briefly.
/// On a busy machine a commit takes long because it waits for other work, and an equally long pause
/// would let the backlog grow.
fn pause(took: Duration, is_behind: bool) -> Duration {
    match is_behind {
        true => PRUNE_PAUSE,
        false => took.max(PRUNE_PAUSE),
    }
}

impl<S> std::fmt::Debug for Janitor<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Janitor").field("retention", &self.retention).finish_non_exhaustive()
    }
}

impl Retention {
    /// A part of the shortest retention time; `None` if everything is kept for ever.
    fn part(&self) -> Option<Duration> {
        let keys = self.keys.iter().map(|(_, kept)| kept);
        let kept = self.events.iter().chain(&self.message_ids).chain(&self.deliveries).chain(keys);
        kept.min().map(|shortest| *shortest / PRUNES_PER_RETENTION)
    }

    fn horizon(&self, now: Timestamp) -> Horizon {
        let kept_before =
            |kept: Option<Duration>| kept.map_or(Timestamp::MIN, |kept| before(now, kept));
        Horizon {
            at: now,
            events_before: kept_before(self.events),
            keys_before: self
                .keys
                .iter()
                .map(|(source, kept)| (source.clone(), before(now, *kept)))
                .collect(),
            message_ids_before: kept_before(self.message_ids),
        }
    }

    fn expiry(&self) -> Option<ExpiryAsk> {
        let kept = self.deliveries?;
        let notice = (kept / EXPIRY_NOTICE_PART).min(EXPIRY_NOTICE_MAX);
        Some(ExpiryAsk { kept, notice, limit: PRUNE_BATCH })
    }
}

fn before(now: Timestamp, kept: Duration) -> Timestamp {
    SignedDuration::try_from(kept)
        .ok()
        .and_then(|kept| now.checked_sub(kept).ok())
        .unwrap_or(Timestamp::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_retention_time_means_frequent_rounds() {
        // With one round a minute, up to twice as many events as necessary would be stored if
        // events are kept for a minute.
        let check = |events: Option<u64>, keys: Option<u64>, seconds: u64| {
            let keys = keys.map(|kept| (SourceName::new("a"), Some(Duration::from_secs(kept))));
            let retention = Retention::new(events.map(Duration::from_secs), keys);
            let janitor = Janitor::new(Arc::new(()), Arc::new(Timestamp::now), retention);
            assert_eq!(janitor.rest(), Duration::from_secs(seconds));
        };
        check(None, None, 60);
        check(Some(30 * 86_400), Some(7 * 86_400), 60);
        check(Some(60), None, 5);
        check(Some(3_600), Some(24), 2);
        check(Some(1), Some(3_600), 1);
    }

    #[test]
    fn a_janitor_that_falls_behind_pauses_only_briefly() {
        // With pauses as long as its commits, the janitor deletes only half of the time, however
        // much is overdue.
        let slow = Duration::from_millis(300);
        assert_eq!(pause(slow, false), slow);
        assert_eq!(pause(Duration::ZERO, false), PRUNE_PAUSE);
        assert_eq!(pause(slow, true), PRUNE_PAUSE);
    }

    #[test]
    fn keys_are_kept_for_the_longest_time_that_a_tenant_of_the_source_sets() {
        // Tenants share the keys of a source: the short retention of one tenant must not turn
        // copies of another tenant's events into new events.
        let check = |keys: &[(&str, Option<u64>)], expected: &[(&str, u64)]| {
            let keys = keys
                .iter()
                .map(|(source, kept)| (SourceName::new(source), kept.map(Duration::from_secs)));
            let mut kept = Retention::new(None, keys).keys;
            kept.sort_by(|(one, _), (other, _)| one.as_str().cmp(other.as_str()));
            let kept: Vec<_> =
                kept.iter().map(|(source, kept)| (source.as_str(), kept.as_secs())).collect();
            assert_eq!(kept, expected);
        };
        check(
            &[("a", Some(1)), ("b", Some(5)), ("a", Some(3)), ("a", Some(2))],
            &[("a", 3), ("b", 5)],
        );
        check(&[("a", Some(1)), ("a", None), ("a", Some(2))], &[]);
        check(&[("a", None), ("b", Some(0))], &[("b", 0)]);
    }
}
