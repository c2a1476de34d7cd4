//! The findings of a run, and the figures that Hapax is held to.

use crate::shared::CONNECTIONS;
use crate::shared::figures::{Figure, thousands};
use crate::shared::load::Measured;
use crate::shared::report::{Report, Table};

/// All results; a load that was not selected has no requests.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) floor: Measured,
    pub(crate) article: Measured,
    pub(crate) lean_article: Measured,
    pub(crate) one: Measured,
    pub(crate) two: Measured,
    /// With as many connections to each node as the single node had.
    pub(crate) two_in_full: Measured,
    pub(crate) floor_copies: Measured,
    pub(crate) copies: Measured,
    pub(crate) floor_redis: Measured,
    pub(crate) redis: Measured,
    pub(crate) database: Measured,
    pub(crate) effects: Option<Effects>,
}

/// SQL handlers, from accepted to committed.
#[derive(Default)]
pub(crate) struct Effects {
    pub(crate) ingest: Measured,
    pub(crate) effects: u64,
    /// From the first event sent to the last effect seen.
    pub(crate) seconds: f64,
    /// The part of it after the last ack.
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
        let mut table = Table::of_loads(format!("{CONNECTIONS} connections"), []);
        for (name, measured, floor) in self.loads() {
            if measured.requests > 0 {
                table.load(name, measured, floor, []);
            }
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
    fn loads(&self) -> [(&'static str, &Measured, Option<&Measured>); 11] {
        let (new, copies, seen) =
            (Some(&self.floor), Some(&self.floor_copies), Some(&self.floor_redis));
        [
            ("new events: floor", &self.floor, None),
            ("new events: article", &self.article, new),
            ("new events: article, lean driver", &self.lean_article, new),
            ("new events: one node", &self.one, new),
            ("new events: two nodes", &self.two, new),
            ("new events: two nodes, 64 each", &self.two_in_full, new),
            ("duplicates: floor", &self.floor_copies, None),
            ("duplicates: the node's memory", &self.copies, copies),
            ("seen by another node: floor", &self.floor_redis, None),
            ("seen by another node: Redis", &self.redis, seen),
            ("seen by another node: database", &self.database, seen),
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
        let all = [
            ratio("new events, to the article", &self.one, &self.article, 2.5, 4.0),
            ratio("the same, to one with a lean driver", &self.one, &self.lean_article, 2.5, 4.0),
            ratio(
                "duplicates from memory, to the floor",
                &self.copies,
                &self.floor_copies,
                0.7,
                0.9,
            ),
            ratio("duplicates from Redis, to the floor", &self.redis, &self.floor_redis, 0.7, 0.9),
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
