//! The findings of a run, and the figures that Hapax is held to.

use crate::shared::CONNECTIONS;
use crate::shared::figures::{Figure, thousands};
use crate::shared::load::Measured;
use crate::shared::report::{Column, Report, Table, column};

/// The columns of this bench alone: CPU time of the nodes and the database for each request, and bytes of
/// the database's write-ahead log, both until the last copy is recorded.
const COLUMNS: [Column; 2] = [column("all cpu us", 1), column("bytes", 0)];

/// All results; a load that was not selected has no requests.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) floor: Measured,
    pub(crate) article: Measured,
    pub(crate) lean_article: Measured,
    pub(crate) one: Measured,
    pub(crate) two: Measured,
    /// Two nodes, each with as many connections as the single node had.
    pub(crate) two_in_full: Measured,
    /// One node with many connections.
    pub(crate) many: Measured,
    pub(crate) floor_copies: Measured,
    pub(crate) copies: Measured,
    pub(crate) floor_again: Measured,
    /// New events in a fresh database, without statistics.
    pub(crate) fresh: Cost,
    pub(crate) redis: Cost,
    pub(crate) database: Cost,
    pub(crate) effects: Option<Effects>,
}

/// A load, and what each of its requests cost the nodes and the database.
#[derive(Default)]
pub(crate) struct Cost {
    pub(crate) measured: Measured,
    pub(crate) cpu_us: f64,
    pub(crate) log_bytes: f64,
}

/// SQL handlers, from accepted to committed.
#[derive(Default)]
pub(crate) struct Effects {
    pub(crate) ingest: Measured,
    pub(crate) effects: u64,
    /// From the first event sent to the last effect seen.
    pub(crate) seconds: f64,
    /// The part of that time after the last ack.
    pub(crate) seconds_after: f64,
}

impl Effects {
    fn per_second(&self) -> f64 {
        self.effects as f64 / self.seconds
    }
}

impl Findings {
    pub(crate) fn report(&self) -> Report {
        let mut report = Report::default();
        let mut table = Table::of_loads(format!("{CONNECTIONS} connections"), COLUMNS);
        for (name, measured, floor) in self.loads() {
            if measured.requests > 0 {
                table.load(name, measured, floor, []);
            }
        }
        let costs = [
            ("new events: a fresh database", &self.fresh),
            ("storm that another node took: Redis", &self.redis),
            ("storm that another node took: database", &self.database),
        ];
        for (name, cost) in costs.into_iter().filter(|(_, cost)| cost.measured.requests > 0) {
            let more = [Some(cost.cpu_us), Some(cost.log_bytes)];
            table.load(name, &cost.measured, Some(&self.floor_again), more);
        }
        if let Some(effects) = &self.effects {
            table.load("ingest beside SQL handlers", &effects.ingest, None, []);
            table.note(format!(
                "SQL effects {}/s: {} in {:.1} s, {:.1} s of it after the last ack",
                thousands(effects.per_second()),
                thousands(effects.effects as f64),
                effects.seconds,
                effects.seconds_after,
            ));
        }
        report.table(table);
        report.figures(self.figures());
        report
    }

    /// Each load under its name, with its floor.
    fn loads(&self) -> [(&'static str, &Measured, Option<&Measured>); 10] {
        let (new, copies) = (Some(&self.floor), Some(&self.floor_copies));
        [
            ("new events: floor", &self.floor, None),
            ("new events: article", &self.article, new),
            ("new events: article, lean driver", &self.lean_article, new),
            ("new events: one node", &self.one, new),
            ("new events: two nodes", &self.two, new),
            ("new events: two nodes, 64 each", &self.two_in_full, new),
            ("new events: one node, many connections", &self.many, new),
            ("duplicates: floor", &self.floor_copies, None),
            ("duplicates: the node's memory", &self.copies, copies),
            ("storm that another node took: floor", &self.floor_again, None),
        ]
    }

    fn figures(&self) -> impl Iterator<Item = Figure> {
        let ratio = |what: &str, of: &Measured, to: &Measured, at_least, aim| {
            let measured = of.per_second() / to.per_second();
            let is_there = of.requests > 0 && to.requests > 0;
            is_there.then(|| Figure::higher(what, measured, at_least, aim))
        };
        let effects = self.effects.as_ref().map(|effects| {
            Figure::higher("SQL effects/s, one node", effects.per_second(), 5_000.0, 10_000.0)
        });
        let (fresh, redis) = (&self.fresh.measured, &self.redis.measured);
        let (database, floor) = (&self.database.measured, &self.floor_again);
        let tail = (self.many.requests > 0).then(|| {
            let ms = self.many.latency_us(0.99) / 1_000.0;
            Figure::lower("new events, many connections: p99 ms", ms, 40.0, 20.0)
        });
        let all = [
            ratio("new events, to the floor", &self.one, &self.floor, 0.35, 0.5),
            ratio("new events in a fresh database, to the floor", fresh, floor, 0.35, 0.5),
            tail,
            ratio("new events, to the article", &self.one, &self.article, 2.5, 4.0),
            ratio("the same, to one with a lean driver", &self.one, &self.lean_article, 2.5, 4.0),
            ratio(
                "duplicates from memory, to the floor",
                &self.copies,
                &self.floor_copies,
                0.7,
                0.9,
            ),
            ratio("storm that another node took, Redis, to the floor", redis, floor, 0.45, 0.7),
            ratio("the same from the database, to the floor", database, floor, 0.35, 0.6),
            ratio("storm that another node took, Redis, to new events", redis, fresh, 1.0, 2.0),
            ratio("the same from the database, to new events", database, fresh, 1.0, 2.0),
            ratio("two nodes that share them, relative to one", &self.two, &self.one, 0.9, 1.0),
            ratio(
                "two nodes with 64 each, relative to one",
                &self.two_in_full,
                &self.one,
                0.9,
                1.0,
            ),
            effects,
        ];
        all.into_iter().flatten()
    }
}
