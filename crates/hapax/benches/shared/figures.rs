//! The required figures, printed beside the measured ones.

use std::fmt;

use serde_json::{Value, json};

use super::load::Measured;

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

/// All figures of a run.
pub(crate) struct Figures(pub(crate) Vec<Figure>);

impl Figure {
    /// A figure that should be high.
    pub(crate) fn higher(what: impl Into<String>, measured: f64, at_least: f64, aim: f64) -> Self {
        Self { what: what.into(), measured, at_least, aim, better: Better::Higher }
    }

    /// A figure that should be low.
    pub(crate) fn lower(what: impl Into<String>, measured: f64, at_most: f64, aim: f64) -> Self {
        Self { what: what.into(), measured, at_least: at_most, aim, better: Better::Lower }
    }

    fn verdict(&self) -> &'static str {
        let meets = |bound| match self.better {
            Better::Higher => self.measured >= bound,
            Better::Lower => self.measured <= bound,
        };
        match (meets(self.aim), meets(self.at_least)) {
            (true, _) => "the aim",
            (false, true) => "reached",
            (false, false) => "MISSED",
        }
    }
}

impl Figures {
    pub(crate) fn json(&self) -> Value {
        let each = self.0.iter().map(|figure| {
            json!({
                "what": figure.what,
                "measured": figure.measured,
                "at_least": figure.at_least,
                "aim": figure.aim,
                "verdict": figure.verdict(),
            })
        });
        each.collect()
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{:<58} {:>9} {:>9} {:>9}", "figure", "measured", "required", "the aim")?;
        for figure in &self.0 {
            writeln!(
                f,
                "{:<58} {:>9.2} {:>9.2} {:>9.2}  {}",
                figure.what,
                figure.measured,
                figure.at_least,
                figure.aim,
                figure.verdict()
            )?;
        }
        Ok(())
    }
}

/// One load on one server, as JSON.
pub(crate) fn measured_json(measured: &Measured) -> Value {
    json!({
        "requests": measured.requests,
        "requests_per_second": measured.per_second(),
        "latency_us": { "p50": measured.latency_us(0.5), "p99": measured.latency_us(0.99) },
        "cpu_us_per_request": measured.cpu_us_per_request(),
        "resident_bytes": measured.usage.resident_bytes,
        "resident_bytes_peak": measured.usage.resident_bytes_peak,
    })
}

pub(crate) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A whole number with its thousands apart.
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
