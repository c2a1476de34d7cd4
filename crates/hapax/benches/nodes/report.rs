//! The results of a run, as a table or as JSON, with the required figures.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::shared;
use crate::shared::figures::{Figure, Figures, measured_json, thousands};
use crate::shared::load::Measured;

/// All results; a load that was not selected has no requests.
#[derive(Default)]
pub(crate) struct Report {
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

impl Report {
    /// The measurements, with their names.
    fn lines(&self) -> Vec<(&'static str, &Measured)> {
        let all = [
            ("new events: floor", &self.floor),
            ("new events: article", &self.article),
            ("new events: article, lean driver", &self.lean_article),
            ("new events: one node", &self.one),
            ("new events: two nodes", &self.two),
            ("new events: two nodes, 64 each", &self.two_in_full),
            ("duplicates: floor", &self.floor_copies),
            ("duplicates: the node's memory", &self.copies),
            ("seen by another node: floor", &self.floor_redis),
            ("seen by another node: Redis", &self.redis),
            ("seen by another node: database", &self.database),
        ];
        all.into_iter().filter(|(_, measured)| measured.requests > 0).collect()
    }

    fn figures(&self) -> Figures {
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
            ratio("two nodes that share them, to one", &self.two, &self.one, 0.9, 1.0),
            ratio("two nodes with 64 each, to one", &self.two_in_full, &self.one, 0.9, 1.0),
            effects,
        ];
        Figures(all.into_iter().flatten().collect())
    }
}

impl shared::Report for Report {
    fn json(&self) -> Value {
        let loads = self.lines().into_iter();
        let loads: Map<_, _> =
            loads.map(|(name, measured)| (name.to_owned(), measured_json(measured))).collect();
        let effects = self.effects.as_ref().map(|effects| {
            json!({
                "ingest_beside": measured_json(&effects.ingest),
                "effects": effects.effects,
                "effects_per_second": effects.per_second(),
                "seconds": effects.seconds,
                "seconds_after_the_last_ack": effects.seconds_after,
            })
        });
        json!({ "loads": loads, "effects": effects, "figures": self.figures().json() })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<32} {:>10} {:>9} {:>9} {:>9}",
            "64 connections", "requests/s", "p50 us", "p99 us", "cpu us"
        )?;
        for (name, measured) in self.lines() {
            writeln!(
                f,
                "{name:<32} {:>10} {:>9} {:>9} {:>9.1}",
                thousands(measured.per_second()),
                thousands(measured.latency_us(0.5)),
                thousands(measured.latency_us(0.99)),
                measured.cpu_us_per_request(),
            )?;
        }
        if let Some(effects) = &self.effects {
            writeln!(
                f,
                "\nSQL effects {}/s: {} in {:.1} s, {:.1} s of it after the last ack; \
                 ingest beside it {}/s, p99 {} us",
                thousands(effects.per_second()),
                thousands(effects.effects as f64),
                effects.seconds,
                effects.seconds_after,
                thousands(effects.ingest.per_second()),
                thousands(effects.ingest.latency_us(0.99)),
            )?;
        }
        write!(f, "{}", self.figures())
    }
}
