//! The report of a bench: tables with one format, then the figures that Hapax is held to. The
//! report is printed as text, or as JSON with the same names.
//!
//! A table of loads compares every row with the floor of its own run, because rates change from one hour to
//! the next and their ratios hardly do.

use std::fmt;

use serde_json::{Map, Value, json};

use super::figures::{Figure, mebibytes, thousands};
use super::load::Measured;

/// Everything that a bench reports.
#[derive(Default)]
pub(crate) struct Report {
    tables: Vec<Table>,
    figures: Vec<Figure>,
}

/// One table, with notes below it.
pub(crate) struct Table {
    title: String,
    columns: Vec<Column>,
    rows: Vec<(String, Vec<Option<f64>>)>,
    notes: Vec<String>,
}

/// A column: its name, and how many decimals its numbers have.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    name: &'static str,
    decimals: usize,
}

/// The columns of a table of loads. `to floor` is the rate of the row divided by the rate of its floor.
const LOAD: [Column; 9] = [
    column("requests/s", 0),
    column("to floor", 2),
    column("p50 us", 0),
    column("p99 us", 0),
    column("p99.9 us", 0),
    column("worst us", 0),
    column("cpu us", 1),
    column("MiB", 1),
    column("peak MiB", 1),
];

/// A column of this name, whose numbers have this many decimals.
pub(crate) const fn column(name: &'static str, decimals: usize) -> Column {
    Column { name, decimals }
}

impl Report {
    pub(crate) fn table(&mut self, table: Table) {
        self.tables.push(table);
    }

    pub(crate) fn tables(&mut self, tables: impl IntoIterator<Item = Table>) {
        self.tables.extend(tables);
    }

    pub(crate) fn figures(&mut self, figures: impl IntoIterator<Item = Figure>) {
        self.figures.extend(figures);
    }

    pub(crate) fn json(&self) -> Value {
        let tables: Vec<Value> = self.tables.iter().map(Table::json).collect();
        let figures: Vec<Value> = self.figures.iter().map(Figure::json).collect();
        json!({ "tables": tables, "figures": figures })
    }
}

impl Table {
    /// A table with columns of its own.
    pub(crate) fn new(title: impl Into<String>, columns: impl IntoIterator<Item = Column>) -> Self {
        let columns = columns.into_iter().collect();
        Self { title: title.into(), columns, rows: Vec::new(), notes: Vec::new() }
    }

    /// A table of loads, and of columns that only this bench has.
    pub(crate) fn of_loads(
        title: impl Into<String>,
        more: impl IntoIterator<Item = Column>,
    ) -> Self {
        Self::new(title, LOAD.into_iter().chain(more))
    }

    /// Adds a row; a number that was not measured is `None`.
    pub(crate) fn row(
        &mut self,
        name: impl Into<String>,
        numbers: impl IntoIterator<Item = Option<f64>>,
    ) {
        let mut numbers: Vec<_> = numbers.into_iter().collect();
        assert!(numbers.len() <= self.columns.len(), "every number has a column");
        numbers.resize(self.columns.len(), None);
        self.rows.push((name.into(), numbers));
    }

    /// Adds one load to a table of loads. The floor itself has no `floor` to compare with.
    pub(crate) fn load(
        &mut self,
        name: impl Into<String>,
        measured: &Measured,
        floor: Option<&Measured>,
        more: impl IntoIterator<Item = Option<f64>>,
    ) {
        let numbers = [
            Some(measured.per_second()),
            floor.map(|floor| measured.per_second() / floor.per_second()),
            Some(measured.latency_us(0.5)),
            Some(measured.latency_us(0.99)),
            Some(measured.latency_us(0.999)),
            Some(measured.latency_us(1.0)),
            Some(measured.cpu_us_per_request()),
            Some(mebibytes(measured.usage.resident_bytes)),
            Some(mebibytes(measured.usage.resident_bytes_peak)),
        ];
        self.row(name, numbers.into_iter().chain(more));
    }

    /// Adds a sentence below the table.
    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    fn json(&self) -> Value {
        let row = |(name, numbers): &(String, Vec<Option<f64>>)| {
            let mut row = Map::from_iter([("name".to_owned(), Value::from(name.as_str()))]);
            for (column, number) in self.columns.iter().zip(numbers) {
                row.insert(column.name.to_owned(), Value::from(*number));
            }
            Value::Object(row)
        };
        let rows: Vec<Value> = self.rows.iter().map(row).collect();
        json!({ "title": self.title, "rows": rows, "notes": self.notes })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for table in &self.tables {
            write!(f, "{table}")?;
        }
        if self.figures.is_empty() {
            return Ok(());
        }
        writeln!(f, "\n{:<58} {:>9} {:>9} {:>9}", "figure", "measured", "required", "target")?;
        self.figures.iter().try_for_each(|figure| writeln!(f, "{figure}"))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.rows.iter().map(|(name, _)| name.chars().count());
        let first = names.chain([self.title.chars().count()]).max().unwrap_or(0);
        let cell = |column: &Column, number: Option<f64>| match (number, column.decimals) {
            (None, _) => "-".to_owned(),
            (Some(number), 0) => thousands(number),
            (Some(number), decimals) => format!("{number:.decimals$}"),
        };
        write!(f, "\n{:<first$}", self.title)?;
        for column in &self.columns {
            write!(f, " {:>11}", column.name)?;
        }
        writeln!(f)?;
        for (name, numbers) in &self.rows {
            write!(f, "{name:<first$}")?;
            for (column, number) in self.columns.iter().zip(numbers) {
                write!(f, " {:>11}", cell(column, *number))?;
            }
            writeln!(f)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))
    }
}
