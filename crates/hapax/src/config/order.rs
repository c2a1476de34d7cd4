//! `[sources.NAME.handlers.H.order]`: the resource, the policy, and the handling of gaps.

use std::sync::Arc;

use hapax_core::handler::Order;
use hapax_core::order::{Gaps, Machine, MachineError, OnGap, OrderPolicy, OrderRule};

use super::document::Section;
use super::handlers::count;
use super::problem::InvalidSetting;
use super::reader::ConfigReader;
use super::units;

pub(super) const KEYS: [&str; 9] =
    ["resource", "by", "policy", "hold", "hold_max", "on_gap", "start", "state", "allow"];
/// The most held jobs of one resource; gaps that close by themselves hold far fewer.
const HOLD_MAX_MAX: usize = 1_000_000;

impl ConfigReader<'_> {
    pub(super) fn order(&mut self, section: &Section<'_>, label: &str) -> Option<Order> {
        let section = section.get("order")?.section(&mut self.problems)?;
        section.expect(&KEYS, &mut self.problems);
        let word = match section.get("policy") {
            Some(entry) => entry.parse(policy_word, &mut self.problems)?,
            None => PolicyWord::Latest,
        };
        let policy = match word {
            PolicyWord::Latest => Some(OrderPolicy::Latest),
            PolicyWord::Sequence => Some(self.sequence(&section)),
            PolicyWord::Machine => self.machine(&section),
        };
        for key in word.unused_keys().iter().filter(|key| section.get(key).is_some()) {
            let why = word.why();
            self.warnings.push(format!("{label}.order: `{key}` has no effect, since {why}"));
        }
        let default = Gaps::default();
        let problems = &mut self.problems;
        let hold = section.get("hold").and_then(|entry| entry.parse(units::span, problems));
        let on_gap = section.get("on_gap").and_then(|entry| entry.parse(on_gap, problems));
        let hold_max = self.parsed_number(&section, "hold_max", |text| {
            count(text, HOLD_MAX_MAX, default.hold_max)
        });
        let gaps = Gaps {
            hold: hold.unwrap_or(default.hold),
            hold_max: hold_max.unwrap_or(default.hold_max),
            on_gap: on_gap.unwrap_or(default.on_gap),
        };
        let resource = self.selector(&section, "resource", word);
        let position_key = self.selector(&section, word.position_key(), word);
        Order::build(resource?, position_key?, OrderRule { policy: policy?, gaps })
            .map_err(|error| {
                let key = error.field.trim_start_matches("order.");
                let invalid = InvalidSetting::new(error.problem, error.hint);
                match section.get(key) {
                    Some(entry) => entry.report(invalid, &mut self.problems),
                    None => section.report(invalid, &mut self.problems),
                }
            })
            .ok()
    }

    fn sequence(&mut self, section: &Section<'_>) -> OrderPolicy {
        let start = section.get("start");
        let start = start.and_then(|entry| entry.parse_number(start_at, &mut self.problems));
        OrderPolicy::Sequence { start: start.unwrap_or(Some(1)) }
    }

    /// Reads the states and the transitions between them.
    fn machine(&mut self, section: &Section<'_>) -> Option<OrderPolicy> {
        let Some(allow) = section.get("allow") else {
            let invalid = InvalidSetting::new("has no allow", ALLOW_HINT);
            section.report(invalid, &mut self.problems);
            return None;
        };
        let transitions = allow.list(&mut self.problems)?;
        let texts = allow.texts(&mut self.problems)?;
        let start = match section.get("start") {
            Some(entry) => {
                Some(entry.parse_number(|text| Ok(text.to_owned()), &mut self.problems)?)
            }
            None => None,
        };
        let error = match Machine::parse(start.as_deref(), &texts) {
            Ok(machine) => return Some(OrderPolicy::Machine(Arc::new(machine))),
            Err(error) => error,
        };
        let start = section.get("start");
        let (entry, hint) = match &error {
            MachineError::Arrow { index, .. } => (transitions.get(*index), ALLOW_HINT),
            MachineError::Start(_) => {
                (start.as_ref(), "write the initial state as `allow` names it")
            }
            MachineError::Empty | MachineError::TooMany | MachineError::SameNumber(..) => {
                (Some(&allow), ALLOW_HINT)
            }
        };
        let invalid = InvalidSetting::new(error.to_string(), hint);
        entry.unwrap_or(&allow).report(invalid, &mut self.problems);
        None
    }

    fn selector<'d>(
        &mut self,
        section: &Section<'d>,
        key: &str,
        word: PolicyWord,
    ) -> Option<&'d str> {
        match section.get(key) {
            Some(entry) => entry.text(&mut self.problems),
            None => {
                let hint = match word {
                    PolicyWord::Latest | PolicyWord::Sequence => {
                        "set both: resource = \"/data/object/id\" is the object, by = \"/created\" the order \
                         of its events"
                    }
                    PolicyWord::Machine => {
                        "set both: resource = \"/data/object/id\" is the object, \
                         state = \"/data/object/status\" its state"
                    }
                };
                section
                    .report(InvalidSetting::new(format!("has no {key}"), hint), &mut self.problems);
                None
            }
        }
    }
}

/// The hint for transitions.
const ALLOW_HINT: &str =
    "write two states with an arrow between them: allow = [\"pending -> paid\"]";

/// The policy, before its keys are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyWord {
    Latest,
    Sequence,
    Machine,
}

impl PolicyWord {
    /// The key that holds the position of an event in the order.
    fn position_key(self) -> &'static str {
        match self {
            Self::Latest | Self::Sequence => "by",
            Self::Machine => "state",
        }
    }

    /// Keys of other policies, which have no effect here and are reported.
    fn unused_keys(self) -> &'static [&'static str] {
        match self {
            Self::Latest => &["hold", "hold_max", "on_gap", "start", "state", "allow"],
            Self::Sequence => &["state", "allow"],
            Self::Machine => &["by"],
        }
    }

    fn why(self) -> &'static str {
        match self {
            Self::Latest => "\"latest\" has neither gaps nor states",
            Self::Sequence => "\"sequence\" has no states",
            Self::Machine => "\"machine\" uses `state`",
        }
    }
}

fn policy_word(text: &str) -> Result<PolicyWord, InvalidSetting> {
    match text {
        "latest" => Ok(PolicyWord::Latest),
        "sequence" => Ok(PolicyWord::Sequence),
        "machine" => Ok(PolicyWord::Machine),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is not an order policy"),
            "write \"latest\", \"sequence\" or \"machine\"",
        )),
    }
}

fn start_at(text: &str) -> Result<Option<i64>, InvalidSetting> {
    match (text, text.parse()) {
        ("first", _) => Ok(None),
        (_, Ok(number)) => Ok(Some(number)),
        (_, Err(_)) => Err(InvalidSetting::new(
            format!("\"{text}\" is neither a number nor \"first\""),
            "write the first number of each sequence, or \"first\" to start with the first event that arrives",
        )),
    }
}

fn on_gap(text: &str) -> Result<OnGap, InvalidSetting> {
    match text {
        "review" => Ok(OnGap::Review),
        "go" => Ok(OnGap::Go),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is not a way to handle a gap"),
            "write \"review\" or \"go\"",
        )),
    }
}
