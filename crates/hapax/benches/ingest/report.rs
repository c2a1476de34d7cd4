//! The findings of a run, and the figures that Hapax is held to.

use crate::disk::Syncs;
use crate::shared::figures::{Figure, mebibytes, thousands};
use crate::shared::load::{Load, Measured};
use crate::shared::open::Paced;
use crate::shared::report::{Column, Report, Table, column};
use crate::storm::Storm;

/// Bytes that the server caused to be written to a disk, per request.
const BYTES: Column = column("bytes", 0);

/// The findings of a whole run.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) pairings: Vec<Pairing>,
    pub(crate) steady: Option<Steady>,
    pub(crate) storms: Vec<Storm>,
    pub(crate) growth: Option<Growth>,
}

/// One load at one concurrency, on both servers.
pub(crate) struct Pairing {
    pub(crate) load: Load,
    pub(crate) connections: usize,
    pub(crate) floor: Measured,
    pub(crate) hapax: Measured,
    pub(crate) syncs: Option<Syncs>,
}

/// New events in an open loop at half the top rate.
pub(crate) struct Steady {
    pub(crate) per_second: f64,
    pub(crate) paced: Paced,
}

/// The beginning and the end of a store that grew, each with the floor.
pub(crate) struct Growth {
    pub(crate) keys: u64,
    pub(crate) floor_first: Measured,
    pub(crate) first: Measured,
    pub(crate) floor_last: Measured,
    pub(crate) last: Measured,
}

impl Pairing {
    fn ratio(&self) -> f64 {
        self.hapax.per_second() / self.floor.per_second()
    }
}

impl Growth {
    fn ratio(&self) -> f64 {
        self.last.per_second() / self.first.per_second()
    }

    fn table(&self) -> Table {
        let title = format!("a store that grows to {} keys", thousands(self.keys as f64));
        let mut table = Table::of_loads(title, []);
        table.load("first: floor", &self.floor_first, None, []);
        table.load("first: hapax", &self.first, Some(&self.floor_first), []);
        table.load("last: floor", &self.floor_last, None, []);
        table.load("last: hapax", &self.last, Some(&self.floor_last), []);
        table.note(format!(
            "last to first {:.2}; with the floor's own change taken out {:.2}",
            self.ratio(),
            self.ratio_to_floor()
        ));
        table
    }

    /// The ratio of end to beginning, corrected for the change of the machine's speed.
    fn ratio_to_floor(&self) -> f64 {
        self.ratio() * self.floor_first.per_second() / self.floor_last.per_second()
    }
}

impl Steady {
    fn table(&self) -> Table {
        let Self { per_second, paced } = self;
        let rate = thousands(*per_second);
        let title = format!("new events in an open loop, {rate} a second: half the top rate");
        let columns = [BYTES, column("sent late", 0), column("C", 0)];
        let mut table = Table::of_loads(title, columns);
        let bytes = paced.measured.written_bytes_per_request();
        let more = [bytes, paced.sent_late_us_p99().into(), paced.connections as f64];
        table.load("hapax", &paced.measured, None, more.map(Some));
        table
    }
}

impl Findings {
    pub(crate) fn report(&self) -> Report {
        let mut report = Report::default();
        for pairings in self.pairings.chunk_by(|one, next| one.load == next.load) {
            report.table(table_of(pairings));
        }
        report.tables(self.steady.iter().map(Steady::table));
        self.storms.iter().for_each(|storm| report.table(storm.table()));
        report.figures(self.figures());
        report.figures(self.storms.iter().flat_map(Storm::figures));
        if let Some(growth) = &self.growth {
            report.table(growth.table());
        }
        report
    }

    fn figures(&self) -> impl Iterator<Item = Figure> {
        let at = |load, connections| {
            let mut pairings = self.pairings.iter();
            pairings.find(|one| one.load == load && one.connections == connections)
        };
        let new = at(Load::New, 64).map(|one| {
            Figure::higher("new events, 64 connections, to the floor", one.ratio(), 0.60, 0.80)
        });
        let copies = at(Load::Copies, 64).map(|one| {
            Figure::higher("only duplicates, 64 connections, to the floor", one.ratio(), 0.80, 0.95)
        });
        let growth = self.growth.as_ref().map(|growth| {
            let keys = thousands(growth.keys as f64);
            let what = format!("rate at {keys} keys, to the first 100,000");
            Figure::higher(what, growth.ratio(), 0.90, 0.95)
        });
        let ack = at(Load::New, 1).and_then(|one| {
            let ratio = one.hapax.latency_us(0.5) / one.syncs.as_ref()?.preallocated_us_p50();
            Some(Figure::lower(
                "one connection: ack p50, to one sync, preallocated",
                ratio,
                1.4,
                1.2,
            ))
        });
        let memory = at(Load::New, 256).map(|one| {
            let resident = mebibytes(one.hapax.usage.resident_bytes);
            Figure::lower("resident MiB, 256 connections, new events", resident, 64.0, 48.0)
        });
        let steady = self.steady.as_ref().map(|steady| {
            let ms = steady.paced.measured.latency_us(0.999) / 1_000.0;
            Figure::lower("p99.9 at half the top rate, open loop, ms", ms, 10.0, 5.0)
        });
        [new, copies, steady, growth, ack, memory].into_iter().flatten()
    }
}

/// The pairings of one load, by their connections.
fn table_of(pairings: &[Pairing]) -> Table {
    let title = pairings.first().map_or("", |one| one.load.name());
    let mut table = Table::of_loads(title, [BYTES]);
    for one in pairings {
        table.load(format!("{} connections: floor", one.connections), &one.floor, None, []);
        let name = format!("{} connections: hapax", one.connections);
        let bytes = one.hapax.written_bytes_per_request();
        table.load(name, &one.hapax, Some(&one.floor), [Some(bytes)]);
        if let Some(syncs) = &one.syncs {
            let ack = one.hapax.latency_us(0.5);
            let (appended, fixed) = (syncs.appended_us_p50(), syncs.preallocated_us_p50());
            table.note(format!(
                "one sync of 4 KiB, p50: appended {appended} us (ack {:.2} times), preallocated \
                 {fixed} us ({:.2} times)",
                ack / appended,
                ack / fixed,
            ));
        }
    }
    table
}
