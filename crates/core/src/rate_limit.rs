//! The rate limit of an endpoint, shared by all nodes: the generic cell rate algorithm, as two functions over
//! one stored time.
//!
//! The store keeps the time until which the attempts so far are *paid for*. Each claim adds one interval to
//! this time, and a claim is allowed while that time is at most [`SLACK`] ahead. Unused time is not saved up,
//! so a pause is never followed by a flood.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How far claims may be ahead of the rate, so that a node that claims a little late still reaches
/// the limit.
pub const SLACK: Duration = Duration::from_millis(50);

/// How long the deliveries of an endpoint are spread out after it was enabled.
pub const RELEASE_FOR: Duration = Duration::from_secs(60);

/// The rate at which they are spread out: deliveries that were held for days must not arrive in one
/// second. The functions of PostgreSQL have the same numbers.
const RELEASE_RATE: RateLimit = RateLimit { count: 100, per: Per::Second };

/// The highest count of a limit: one endpoint cannot take more deliveries anyway.
const COUNT_MAX: u32 = 100_000;

/// A number of attempts in a second, minute or hour, such as `100/s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    count: u32,
    per: Per,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Per {
    Second,
    Minute,
    Hour,
}

impl Per {
    fn letter(self) -> &'static str {
        match self {
            Self::Second => "s",
            Self::Minute => "m",
            Self::Hour => "h",
        }
    }

    fn micros(self) -> i64 {
        match self {
            Self::Second => 1_000_000,
            Self::Minute => 60_000_000,
            Self::Hour => 3_600_000_000,
        }
    }
}

impl RateLimit {
    /// The time between two attempts, in microseconds.
    pub fn interval_us(self) -> i64 {
        (self.per.micros() / i64::from(self.count)).max(1)
    }

    /// How many attempts may begin at `now`, given the time until which earlier attempts are paid
    /// for.
    pub fn allowed(self, paid_until: Option<Timestamp>, now: Timestamp) -> u32 {
        let ahead =
            paid_until.map_or(0, |until| (until.as_microsecond() - now.as_microsecond()).max(0));
        let interval = self.interval_us();
        let room = interval.saturating_add(slack_us()).saturating_sub(ahead);
        u32::try_from((room / interval).max(0)).unwrap_or(u32::MAX)
    }

    /// The time until which attempts are paid for, once `more` further ones begin at `now`.
    pub fn paid_until(self, paid_until: Option<Timestamp>, now: Timestamp, more: u32) -> Timestamp {
        let from = paid_until.map_or(now, |until| until.max(now)).as_microsecond();
        let paid = from.saturating_add(self.interval_us().saturating_mul(i64::from(more)));
        Timestamp::from_microsecond(paid).unwrap_or(Timestamp::MAX)
    }
}

/// The limit that applies at `now` to an endpoint with this limit whose deliveries are spread out until then:
/// the slower of both.
pub fn limit_at(
    own: Option<RateLimit>,
    spread_until: Option<Timestamp>,
    now: Timestamp,
) -> Option<RateLimit> {
    let release = spread_until.filter(|until| *until > now).map(|_| RELEASE_RATE);
    own.into_iter().chain(release).max_by_key(|limit| limit.interval_us())
}

/// When the next attempt may begin, given the time until which earlier attempts are paid for.
pub fn next_at(paid_until: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(paid_until.as_microsecond() - slack_us()).unwrap_or(paid_until)
}

fn slack_us() -> i64 {
    i64::try_from(SLACK.as_micros()).unwrap_or(0)
}

impl FromStr for RateLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            || format!("\"{text}\" is not a rate: write a number per s, m or h, such as \"100/s\"");
        let (count, per) = text.split_once('/').ok_or_else(bad)?;
        let count: u32 = count.trim().parse().map_err(|_| bad())?;
        if !(1..=COUNT_MAX).contains(&count) {
            return Err(format!("a rate must be from 1 to {COUNT_MAX} per s, m or h"));
        }
        let per = match per.trim() {
            "s" => Per::Second,
            "m" => Per::Minute,
            "h" => Per::Hour,
            _unknown => return Err(bad()),
        };
        Ok(Self { count, per })
    }
}

impl fmt::Display for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.count, self.per.letter())
    }
}

impl Serialize for RateLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RateLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_per_second_minute_or_hour() {
        let check = |text: &str, interval: Option<i64>| {
            let read = text.parse::<RateLimit>().ok();
            assert_eq!(read.map(RateLimit::interval_us), interval, "{text}");
            if let Some(read) = read {
                assert_eq!(read.to_string().parse::<RateLimit>(), Ok(read));
            }
        };
        check("100/s", Some(10_000));
        check(" 30 / m ", Some(2_000_000));
        check("1/h", Some(3_600_000_000));
        check("0/s", None);
        check("100", None);
        check("-1/s", None);
        check("1e9/s", None);
        check("1000000/s", None);
    }

    #[test]
    fn two_nodes_that_claim_at_odd_times_reach_the_limit_and_never_pass_it() {
        // Both nodes share the stored time. The nodes ask at times that match neither the interval nor each
        // other, and one of them is away for a while.
        let limit: RateLimit = "100/s".parse().unwrap();
        let mut paid = None;
        let mut begun: Vec<i64> = Vec::new();
        for tick in 0..20_000_i64 {
            let asks = tick % 17 == 0 || (tick % 23 == 5 && !(4_000..9_000).contains(&tick));
            let now = Timestamp::from_millisecond(tick).unwrap();
            let allowed = limit.allowed(paid, now);
            if asks && allowed > 0 {
                paid = Some(limit.paid_until(paid, now, allowed));
                begun.extend((0..allowed).map(|_| tick));
            }
        }
        for start in (0..19_000).step_by(100) {
            let within = begun.iter().filter(|at| (start..start + 1_000).contains(*at)).count();
            assert!((95..=106).contains(&within), "{within} in the second after {start} ms");
        }
        assert!((1_995..=2_006).contains(&begun.len()), "{}", begun.len());
        // After a long pause no more attempts than the slack allows begin at once.
        let much_later = Timestamp::from_second(1_000).unwrap();
        assert_eq!(limit.allowed(paid, much_later), 6);
        let paid = limit.paid_until(paid, much_later, 6);
        assert_eq!(limit.allowed(Some(paid), much_later), 0);
        assert_eq!(limit.allowed(Some(paid), next_at(paid)), 1);
    }
}
