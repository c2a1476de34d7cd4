//! The results of a run, as tables or as JSON.

use std::fmt;

use serde_json::{Value, json};

use crate::patterns::Pattern;
use crate::shared;
use crate::shared::figures::thousands;
use crate::storm::{Fault, Tally};

/// All of a run.
pub(crate) struct Report {
    pub(crate) events: u32,
    pub(crate) deliveries: usize,
    pub(crate) rows: Vec<Row>,
}

pub(crate) struct Row {
    pub(crate) pattern: Pattern,
    pub(crate) connections: usize,
    pub(crate) tally: Tally,
}

impl Row {
    fn is_once_each(&self) -> bool {
        self.tally.doubles == 0 && self.tally.lost == 0
    }
}

impl Report {
    /// A pattern that promises one effect and broke the promise.
    pub(crate) fn broken(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.pattern.is_sound() && !row.is_once_each())
    }

    fn healthy(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.tally.fault == Fault::None)
    }

    fn troubled(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.tally.fault != Fault::None)
    }
}

impl shared::Report for Report {
    fn json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "pattern": row.pattern.name(),
                "connections": row.connections,
                "fault": row.tally.fault.name(),
                "deliveries_per_second": row.tally.per_second(),
                "latency_us": {
                    "p50": row.tally.latency_us(0.5),
                    "p99": row.tally.latency_us(0.99),
                },
                "again": row.tally.again,
                "doubles": row.tally.doubles,
                "lost": row.tally.lost,
            })
        });
        json!({
            "events": self.events,
            "deliveries": self.deliveries,
            "runs": rows.collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (events, deliveries) = (f64::from(self.events), self.deliveries as f64);
        writeln!(
            f,
            "\n{} events, {} deliveries of them in each run",
            thousands(events),
            thousands(deliveries)
        )?;
        let mut connections = None;
        for row in self.healthy() {
            if connections.replace(row.connections) != Some(row.connections) {
                writeln!(
                    f,
                    "\n{:<28} {:>12} {:>10} {:>10} {:>8} {:>8}",
                    format!("{} at once", row.connections),
                    "deliveries/s",
                    "p50 us",
                    "p99 us",
                    "doubles",
                    "lost"
                )?;
            }
            writeln!(
                f,
                "{:<28} {:>12} {:>10} {:>10} {:>8} {:>8}",
                row.pattern.name(),
                thousands(row.tally.per_second()),
                thousands(row.tally.latency_us(0.5)),
                thousands(row.tally.latency_us(0.99)),
                row.tally.doubles,
                row.tally.lost
            )?;
        }
        if self.troubled().next().is_some() {
            writeln!(
                f,
                "\n{:<28} {:<18} {:>12} {:>8} {:>8} {:>8}",
                "where something fails", "", "deliveries/s", "again", "doubles", "lost"
            )?;
        }
        for row in self.troubled() {
            writeln!(
                f,
                "{:<28} {:<18} {:>12} {:>8} {:>8} {:>8}",
                row.pattern.name(),
                row.tally.fault.name(),
                thousands(row.tally.per_second()),
                row.tally.again,
                row.tally.doubles,
                row.tally.lost
            )?;
        }
        Ok(())
    }
}
