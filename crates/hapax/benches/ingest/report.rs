//! The results of a run, as tables or as JSON, with the required figures.

use std::fmt;

use serde_json::{Value, json};

use crate::disk::Syncs;
use crate::shared;
use crate::shared::figures::{Figure, Figures, measured_json, mebibytes, thousands};
use crate::shared::load::{Load, Measured};

/// All of a run.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) pairings: Vec<Pairing>,
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

    /// The same without the difference of the machine's speed at the two times.
    fn ratio_to_floor(&self) -> f64 {
        self.ratio() * self.floor_first.per_second() / self.floor_last.per_second()
    }
}

impl Report {
    fn figures(&self) -> Figures {
        let at = |load, connections| {
            let mut pairings = self.pairings.iter();
            pairings.find(|one| one.load == load && one.connections == connections)
        };
        let new = at(Load::New, 64).map(|one| {
            Figure::higher("new events, 64 connections, to the floor", one.ratio(), 0.50, 0.65)
        });
        let copies = at(Load::Copies, 64).map(|one| {
            Figure::higher("only duplicates, 64 connections, to the floor", one.ratio(), 0.80, 0.95)
        });
        let growth = self.growth.as_ref().map(|growth| {
            let keys = thousands(growth.keys as f64);
            let what = format!("rate at {keys} keys, to the first 100,000");
            Figure::higher(what, growth.ratio(), 0.70, 0.95)
        });
        let ack = at(Load::New, 1).and_then(|one| {
            let ratio = one.hapax.latency_us(0.5) / one.syncs.as_ref()?.appended_us_p50();
            Some(Figure::lower("one connection: ack p50, to one sync", ratio, 2.5, 1.3))
        });
        let memory = at(Load::New, 256).map(|one| {
            let resident = mebibytes(one.hapax.usage.resident_bytes);
            Figure::lower("resident MiB, 256 connections, new events", resident, 128.0, 48.0)
        });
        Figures([new, copies, growth, ack, memory].into_iter().flatten().collect())
    }
}

impl shared::Report for Report {
    fn json(&self) -> Value {
        let pairings: Vec<Value> = self
            .pairings
            .iter()
            .map(|one| {
                json!({
                    "load": one.load.name(),
                    "connections": one.connections,
                    "ratio": one.ratio(),
                    "floor": measured_json(&one.floor),
                    "hapax": measured_json(&one.hapax),
                    "sync_us_p50": one.syncs.as_ref().map(|syncs| json!({
                        "appended": syncs.appended_us_p50(),
                        "preallocated": syncs.preallocated_us_p50(),
                    })),
                })
            })
            .collect();
        let growth = self.growth.as_ref().map(|growth| {
            json!({
                "keys": growth.keys,
                "ratio": growth.ratio(),
                "ratio_to_floor": growth.ratio_to_floor(),
                "first": measured_json(&growth.first),
                "last": measured_json(&growth.last),
                "floor_first": measured_json(&growth.floor_first),
                "floor_last": measured_json(&growth.floor_last),
            })
        });
        json!({ "loads": pairings, "growth": growth, "figures": self.figures().json() })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut load = None;
        for one in &self.pairings {
            if load.replace(one.load) != Some(one.load) {
                writeln!(f, "\n{}", one.load.name())?;
                writeln!(
                    f,
                    "{:>6} {:>10} {:>10} {:>6} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}",
                    "C",
                    "floor/s",
                    "hapax/s",
                    "ratio",
                    "p50 us",
                    "p99 us",
                    "cpu us",
                    "(floor)",
                    "MiB",
                    "peak"
                )?;
            }
            writeln!(
                f,
                "{:>6} {:>10} {:>10} {:>6.2} {:>10} {:>10} {:>10.1} {:>10.1} {:>8.1} {:>8.1}",
                one.connections,
                thousands(one.floor.per_second()),
                thousands(one.hapax.per_second()),
                one.ratio(),
                thousands(one.hapax.latency_us(0.5)),
                thousands(one.hapax.latency_us(0.99)),
                one.hapax.cpu_us_per_request(),
                one.floor.cpu_us_per_request(),
                mebibytes(one.hapax.usage.resident_bytes),
                mebibytes(one.hapax.usage.resident_bytes_peak),
            )?;
            if let Some(syncs) = &one.syncs {
                writeln!(
                    f,
                    "       one sync of 4 KiB, p50: appended {} us (ack {:.2} times), preallocated {} us ({:.2} times)",
                    syncs.appended_us_p50(),
                    one.hapax.latency_us(0.5) / syncs.appended_us_p50(),
                    syncs.preallocated_us_p50(),
                    one.hapax.latency_us(0.5) / syncs.preallocated_us_p50(),
                )?;
            }
        }
        if let Some(growth) = &self.growth {
            writeln!(f, "\na store that grows to {} keys", thousands(growth.keys as f64))?;
            for (when, measured, floor) in [
                ("first", &growth.first, &growth.floor_first),
                ("last", &growth.last, &growth.floor_last),
            ] {
                writeln!(
                    f,
                    "{when:>6} {:>10}/s  p50 {} us  p99 {} us  cpu {:.1} us  {:.1} MiB (peak {:.1})  floor {}/s",
                    thousands(measured.per_second()),
                    thousands(measured.latency_us(0.5)),
                    thousands(measured.latency_us(0.99)),
                    measured.cpu_us_per_request(),
                    mebibytes(measured.usage.resident_bytes),
                    mebibytes(measured.usage.resident_bytes_peak),
                    thousands(floor.per_second()),
                )?;
            }
            writeln!(
                f,
                "       last to first {:.2}; with the floor's own change taken out {:.2}",
                growth.ratio(),
                growth.ratio_to_floor()
            )?;
        }
        write!(f, "{}", self.figures())
    }
}
