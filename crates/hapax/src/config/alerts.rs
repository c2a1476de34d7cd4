//! `[alerts]`: the thresholds of alerts. Each key is the name of an alert; `"off"` disables it.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_engine::Rate;

use super::document::Section;
use super::problem::{ConfigProblems, InvalidSetting};
use super::units;

/// Thresholds; `None` is off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Alerts {
    /// How many times more copies per new event than usual raise the alert.
    pub(crate) duplicate_spike: Option<u32>,
    /// Failed verifications of one source.
    pub(crate) failed_verifications: Option<Rate>,
    /// Arrivals of one source under a known id with another body.
    pub(crate) conflicts: Option<Rate>,
    /// How long a job has been due.
    pub(crate) oldest_job: Option<Duration>,
    /// Dead letters of one handler.
    pub(crate) dead_letters: Option<u32>,
    /// Whether to alert when jobs wait for a handler that no node has.
    pub(crate) handler_gone: bool,
    /// Whether to alert when events wait for an operator's decision.
    pub(crate) review: bool,
    /// How long a source may send nothing, if it sent more often before.
    pub(crate) silence: Option<Duration>,
    /// How soon a secret expires.
    pub(crate) secret_expiry: Option<Duration>,
    /// Whether to alert when the circuit of an endpoint is open.
    pub(crate) circuits: bool,
    /// Whether to alert when the vault lacks a key that stored values need.
    pub(crate) vault_key: bool,
    /// The difference between the times that senders sign and the clock.
    pub(crate) clock_skew: Option<Duration>,
    /// The size of the write-ahead log in bytes; a long-running reader makes it grow.
    pub(crate) log_growth: Option<usize>,
    /// Whether to alert when the database cannot prepare the statements of a handler.
    pub(crate) statements: bool,
    /// Whether to alert when the store cannot write.
    pub(crate) store: bool,
}

impl Default for Alerts {
    fn default() -> Self {
        let per_minute = |count: u32| Rate {
            count: count.try_into().expect("the default is not zero"),
            per: Duration::from_secs(60),
        };
        Self {
            duplicate_spike: Some(3),
            failed_verifications: Some(per_minute(20)),
            conflicts: Some(Rate { count: NonZeroU32::MIN, per: Duration::from_secs(3_600) }),
            oldest_job: Some(Duration::from_secs(5 * 60)),
            dead_letters: Some(1),
            handler_gone: true,
            review: true,
            silence: Some(Duration::from_secs(3_600)),
            secret_expiry: Some(Duration::from_secs(7 * 86_400)),
            circuits: true,
            vault_key: true,
            clock_skew: Some(Duration::from_secs(60)),
            log_growth: Some(256 << 20),
            statements: true,
            store: true,
        }
    }
}

/// Every key of `[alerts]`, which is also the name of its alert.
pub(crate) const KEYS: [&str; 15] = [
    "duplicate_spike",
    "failed_verifications",
    "conflicts",
    "oldest_job",
    "handler_gone",
    "dead_letters",
    "review",
    "silence",
    "secret_expiry",
    "circuits",
    "vault_key",
    "clock_skew",
    "log_growth",
    "statements",
    "store",
];

impl Alerts {
    /// Reads `[alerts]` over the defaults.
    pub(super) fn read(section: &Section<'_>, problems: &mut ConfigProblems) -> Self {
        section.expect(&KEYS, problems);
        let mut alerts = Self::default();
        for entry in section.entries() {
            let set = |text: &str| alerts.set(entry.name(), text);
            match entry.name() {
                "duplicate_spike" | "dead_letters" | "log_growth" => {
                    entry.parse_number(set, problems);
                }
                _text => {
                    entry.parse(set, problems);
                }
            }
        }
        alerts
    }

    fn set(&mut self, key: &str, text: &str) -> Result<(), InvalidSetting> {
        match key {
            "duplicate_spike" => self.duplicate_spike = unless_off(text, times)?,
            "failed_verifications" => self.failed_verifications = units::rate(text)?,
            "conflicts" => self.conflicts = units::rate(text)?,
            "handler_gone" => self.handler_gone = unless_off(text, on)?.is_some(),
            "circuits" => self.circuits = unless_off(text, on)?.is_some(),
            "vault_key" => self.vault_key = unless_off(text, on)?.is_some(),
            "oldest_job" => self.oldest_job = unless_off(text, units::span)?,
            "dead_letters" => self.dead_letters = unless_off(text, count)?,
            "review" => self.review = unless_off(text, on)?.is_some(),
            "silence" => self.silence = unless_off(text, units::span)?,
            "secret_expiry" => self.secret_expiry = unless_off(text, units::span)?,
            "clock_skew" => self.clock_skew = unless_off(text, units::span)?,
            "log_growth" => self.log_growth = unless_off(text, units::size)?,
            "statements" => self.statements = unless_off(text, on)?.is_some(),
            "store" => self.store = unless_off(text, on)?.is_some(),
            // The problem is reported already.
            _unknown => {}
        }
        Ok(())
    }
}

fn unless_off<T>(
    text: &str,
    read: impl FnOnce(&str) -> Result<T, InvalidSetting>,
) -> Result<Option<T>, InvalidSetting> {
    match text {
        "off" => Ok(None),
        text => read(text).map(Some).map_err(|InvalidSetting { problem, hint }| {
            InvalidSetting::new(problem, format!("{hint}; or \"off\""))
        }),
    }
}

fn on(text: &str) -> Result<(), InvalidSetting> {
    match text {
        "on" => Ok(()),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is neither \"on\" nor \"off\""),
            "write \"on\"",
        )),
    }
}

fn count(text: &str) -> Result<u32, InvalidSetting> {
    let bad = || InvalidSetting::new("is not a number above zero", "write a number, such as 1");
    text.trim().parse().ok().filter(|count| *count > 0).ok_or_else(bad)
}

fn times(text: &str) -> Result<u32, InvalidSetting> {
    let bad =
        || InvalidSetting::new("is not a number above one", "write how many times more, such as 3");
    text.trim().parse().ok().filter(|times| *times > 1).ok_or_else(bad)
}
