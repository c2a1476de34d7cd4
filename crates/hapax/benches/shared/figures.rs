//! The required figures, printed beside the measured ones.

use std::fmt;

use serde_json::{Value, json};

/// A figure to reach.
pub(crate) struct Figure {
    what: String,
    measured: f64,
    at_least: f64,
    aim: f64,
    better: Better,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Better {
    Higher,
    Lower,
}

impl Figure {
    /// A figure that should be high.
    pub(crate) fn higher(what: impl Into<String>, measured: f64, at_least: f64, aim: f64) -> Self {
        Self { what: what.into(), measured, at_least, aim, better: Better::Higher }
    }

    /// A figure that should be low.
    pub(crate) fn lower(what: impl Into<String>, measured: f64, at_most: f64, aim: f64) -> Self {
        Self { what: what.into(), measured, at_least: at_most, aim, better: Better::Lower }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "what": self.what,
            "measured": self.measured,
            "at_least": self.at_least,
            "aim": self.aim,
            "verdict": self.verdict(),
        })
    }

    fn verdict(&self) -> &'static str {
        let meets = |bound| match self.better {
            Better::Higher => self.measured >= bound,
            Better::Lower => self.measured <= bound,
        };
        match (meets(self.aim), meets(self.at_least)) {
            (true, _) => "the target",
            (false, true) => "reached",
            (false, false) => "MISSED",
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, measured, at_least, aim, .. } = self;
        let verdict = self.verdict();
        write!(f, "{what:<58} {measured:>9.2} {at_least:>9.2} {aim:>9.2}  {verdict}")
    }
}

pub(crate) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A whole number with separated thousands.
pub(crate) fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut spaced = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            spaced.push(',');
        }
        spaced.push(digit);
    }
    spaced
}
