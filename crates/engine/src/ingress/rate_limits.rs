//! The two limits of a source: verified events, and failed verifications per client address.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::http::client_address::party;
use crate::limits::{ADDRESSES_MAX, Rate};

/// The limit is exceeded; the next request is allowed after this time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateExceeded {
    pub(crate) retry_after_seconds: u64,
}

impl RateExceeded {
    fn wait(wait: Duration) -> Self {
        Self { retry_after_seconds: wait.as_secs_f64().ceil().max(1.0) as u64 }
    }
}

/// `rate_limit`: events per span.
#[derive(Debug)]
pub(crate) struct EventLimit {
    limiter: DefaultDirectRateLimiter,
    burst: NonZeroU32,
}

impl EventLimit {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { limiter: RateLimiter::direct(quota(rate)), burst: rate.count }
    }

    /// Takes tokens for `events`. A batch that is larger than the bucket needs only a full bucket:
    /// otherwise the batch could never pass and would be lost.
    pub(crate) fn take(&self, events: usize) -> Result<(), RateExceeded> {
        let events = u32::try_from(events).unwrap_or(u32::MAX).min(self.burst.get());
        let Some(events) = NonZeroU32::new(events) else { return Ok(()) };
        let fits = self.limiter.check_n(events).expect("at most the size of the bucket");
        fits.map_err(|until| {
            RateExceeded::wait(until.wait_time_from(DefaultClock::default().now()))
        })
    }
}

/// `unverified_limit`: failures per client address. Handshakes have a limit of the same kind.
/// Verified events do not count, so the limit never refuses them.
#[derive(Debug)]
pub(crate) struct FailureLimit {
    limiter: DefaultKeyedRateLimiter<IpAddr>,
    addresses_max: usize,
    crowded: AtomicBool,
}

impl FailureLimit {
    pub(crate) fn new(rate: Rate) -> Self {
        Self::holding(rate, ADDRESSES_MAX)
    }

    fn holding(rate: Rate, addresses_max: usize) -> Self {
        let limiter = RateLimiter::keyed(quota(rate));
        Self { limiter, addresses_max, crowded: AtomicBool::new(false) }
    }

    /// Counts one failure or one handshake.
    pub(crate) fn take(&self, from: IpAddr) -> Result<(), RateExceeded> {
        let key = match self.crowded.load(Ordering::Relaxed) {
            true => SHARED,
            false => party(from),
        };
        self.limiter.check_key(&key).map_err(|until| {
            RateExceeded::wait(until.wait_time_from(DefaultClock::default().now()))
        })
    }

    /// Forgets addresses that were quiet. The ingress calls this every second. Between two calls,
    /// each answered request adds at most one entry.
    pub(crate) fn maintain(&self) {
        self.limiter.retain_recent();
        let is_crowded = self.limiter.len() >= self.addresses_max;
        if !is_crowded {
            self.limiter.shrink_to_fit();
        }
        self.crowded.store(is_crowded, Ordering::Relaxed);
    }
}

/// The bucket that all addresses share while too many addresses are remembered. No client has this
/// address.
const SHARED: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

fn quota(rate: Rate) -> Quota {
    let each = (rate.per / rate.count.get()).max(Duration::from_nanos(1));
    Quota::with_period(each).expect("longer than nothing").allow_burst(rate.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(count: u32) -> Rate {
        Rate { count: NonZeroU32::new(count).unwrap(), per: Duration::from_secs(3600) }
    }

    #[test]
    fn a_batch_larger_than_the_bucket_passes_when_the_bucket_is_full() {
        let limit = EventLimit::new(rate(10));
        assert_eq!(limit.take(500), Ok(()));
        assert!(limit.take(1).is_err());
    }

    #[test]
    fn one_address_does_not_use_up_the_limit_of_another() {
        let limit = FailureLimit::new(rate(1));
        assert_eq!(limit.take("192.0.2.1".parse().unwrap()), Ok(()));
        assert!(limit.take("192.0.2.1".parse().unwrap()).is_err());
        assert_eq!(limit.take("192.0.2.2".parse().unwrap()), Ok(()));
    }

    #[test]
    fn the_addresses_of_one_ipv6_network_share_one_limit() {
        let limit = FailureLimit::new(rate(1));
        assert_eq!(limit.take("2001:db8::1".parse().unwrap()), Ok(()));
        assert!(limit.take("2001:db8::2".parse().unwrap()).is_err());
        assert_eq!(limit.take("2001:db8:0:1::1".parse().unwrap()), Ok(()));
    }

    #[test]
    fn past_the_bound_new_addresses_share_one_bucket_and_memory_stops_growing() {
        let limit = FailureLimit::holding(rate(2), 10);
        for last in 0..10 {
            assert_eq!(limit.take(IpAddr::from([192, 0, 2, last])), Ok(()));
        }
        limit.maintain();
        for last in 100..200 {
            let _ = limit.take(IpAddr::from([192, 0, 2, last]));
        }
        assert_eq!(limit.limiter.len(), 11);
    }

    #[test]
    fn retry_after_is_whole_seconds_and_never_zero() {
        assert_eq!(RateExceeded::wait(Duration::from_millis(3)).retry_after_seconds, 1);
        assert_eq!(RateExceeded::wait(Duration::from_millis(1001)).retry_after_seconds, 2);
    }
}
