//! The findings of a run.

use crate::patterns::Pattern;
use crate::shared::figures::thousands;
use crate::shared::report::{Column, Report, Table, column};
use crate::storm::{Fault, Tally};

/// The floor of a table is its first row: the pattern that only checks, then acts.
const COLUMNS: [Column; 7] = [
    column("deliveries/s", 0),
    column("to floor", 2),
    column("p50 us", 0),
    column("p99 us", 0),
    column("again", 0),
    column("doubles", 0),
    column("lost", 0),
];

/// The findings of a whole run.
pub(crate) struct Findings {
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
    fn numbers(&self, floor: Option<&Self>) -> [Option<f64>; 7] {
        let Tally { again, doubles, lost, .. } = &self.tally;
        let rate = self.tally.per_second();
        [
            Some(rate),
            floor.map(|floor| rate / floor.tally.per_second()),
            Some(self.tally.latency_us(0.5)),
            Some(self.tally.latency_us(0.99)),
            Some(*again as f64),
            Some(*doubles as f64),
            Some(*lost as f64),
        ]
    }

    fn is_once_each(&self) -> bool {
        self.tally.doubles == 0 && self.tally.lost == 0
    }
}

impl Findings {
    /// A pattern that promises one effect and broke the promise.
    pub(crate) fn broken(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.pattern.is_sound() && !row.is_once_each())
    }

    pub(crate) fn report(&self) -> Report {
        let mut report = Report::default();
        let healthy: Vec<&Row> =
            self.rows.iter().filter(|row| row.tally.fault == Fault::None).collect();
        for rows in healthy.chunk_by(|one, next| one.connections == next.connections) {
            let connections = rows.first().map_or(0, |row| row.connections);
            let mut table = Table::new(format!("{connections} at once"), COLUMNS);
            for (place, row) in rows.iter().enumerate() {
                let floor = rows.first().copied().filter(|_| place > 0);
                table.row(row.pattern.name(), row.numbers(floor));
            }
            table.note(format!(
                "{} events, {} deliveries of them in each run",
                thousands(f64::from(self.events)),
                thousands(self.deliveries as f64)
            ));
            report.table(table);
        }
        let mut table = Table::new("where something fails", COLUMNS);
        for row in self.rows.iter().filter(|row| row.tally.fault != Fault::None) {
            let name = format!("{}, {}", row.pattern.name(), row.tally.fault.name());
            table.row(name, row.numbers(None));
        }
        report.table(table);
        report
    }
}
