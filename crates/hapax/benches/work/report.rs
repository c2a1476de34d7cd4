//! The results of a run, as tables or as JSON, with the required figures.

use std::fmt;

use serde_json::{Value, json};

use crate::backlog::{Backlog, Claims, SMALL};
use crate::beside::Beside;
use crate::effects::Effects;
use crate::retention::Retention;
use crate::shared;
use crate::shared::figures::{Figure, Figures, measured_json, mebibytes, thousands};
use crate::shared::open::Paced;

/// All of a run.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) effects: Option<Effects>,
    pub(crate) beside: Vec<Beside>,
    pub(crate) backlog: Option<Backlog>,
    pub(crate) retention: Vec<Retention>,
}

impl Report {
    fn figures(&self) -> Figures {
        let effects = self.effects.iter().map(|one| {
            Figure::higher(
                "SQL effects/s at 64 connections, to ingest alone",
                one.ratio(),
                0.5,
                0.8,
            )
        });
        let beside = self.beside.iter().map(|one| {
            Figure::lower(format!("ack p99 beside {}, to without", one.what), one.ratio(), 2.0, 1.2)
        });
        let backlog = self.backlog.iter().map(|one| {
            let jobs = thousands(one.jobs as f64);
            Figure::lower(
                format!("a claim with {jobs} jobs waiting, to {}", thousands(SMALL as f64)),
                one.ratio(),
                1.3,
                1.1,
            )
        });
        let retention = self.retention.iter().flat_map(|one| {
            let what = one.what;
            let acks = Figure::lower(
                format!("retention, {what}: ack p99, to without pruning"),
                one.p99_ratio(),
                1.5,
                1.2,
            );
            let overdue = Figure::lower(
                format!("retention, {what}: events overdue at the end"),
                one.overdue_at_the_end() as f64,
                0.0,
                0.0,
            );
            let growth = one.bytes_per_event().map(|bytes| {
                let what = format!("retention, {what}: bytes that an event adds at last");
                Figure::lower(what, bytes, 500.0, 250.0)
            });
            let log = (one.log_bytes_peak() > 0).then(|| {
                let log = mebibytes(one.log_bytes_peak());
                Figure::lower("retention: the log's largest size, MiB", log, 64.0, 34.0)
            });
            [Some(acks), Some(overdue), growth, log].into_iter().flatten()
        });
        Figures(effects.chain(beside).chain(backlog).chain(retention).collect())
    }
}

impl shared::Report for Report {
    fn json(&self) -> Value {
        let effects = self.effects.as_ref().map(|one| {
            json!({
                "alone": measured_json(&one.alone),
                "ingest_beside": measured_json(&one.working),
                "effects": one.effects,
                "effects_per_second": one.per_second(),
                "seconds": one.seconds,
                "seconds_after_the_last_ack": one.seconds_after,
                "ratio": one.ratio(),
            })
        });
        let beside: Vec<Value> = self
            .beside
            .iter()
            .map(|one| {
                json!({
                    "what": one.what,
                    "per_second": one.per_second,
                    "without": paced_json(&one.without),
                    "with": paced_json(&one.with),
                    "held": one.held,
                    "ratio": one.ratio(),
                })
            })
            .collect();
        let backlog = self.backlog.as_ref().map(|one| {
            json!({
                "jobs": one.jobs,
                "small": claims_json(&one.small),
                "large": claims_json(&one.large),
                "ratio": one.ratio(),
            })
        });
        let retention = self.retention.iter().map(|one| {
            let samples = one.samples.iter().map(|sample| {
                json!({
                    "seconds": sample.seconds,
                    "events": sample.events,
                    "file_bytes": sample.file_bytes,
                    "used_bytes": sample.used_bytes,
                    "log_bytes": sample.log_bytes,
                    "overdue": sample.overdue,
                })
            });
            json!({
                "database": one.what,
                "without": paced_json(&one.without),
                "with": paced_json(&one.with),
                "samples": samples.collect::<Vec<_>>(),
            })
        });
        json!({
            "effects": effects,
            "beside": beside,
            "backlog": backlog,
            "retention": retention.collect::<Vec<_>>(),
            "figures": self.figures().json(),
        })
    }
}

fn paced_json(paced: &Paced) -> Value {
    let mut all = measured_json(&paced.measured);
    all["sent_late_us_p99"] = paced.sent_late_us_p99().into();
    all["connections"] = paced.connections.into();
    all
}

fn claims_json(claims: &Claims) -> Value {
    json!({
        "jobs": claims.jobs,
        "us_per_job": claims.us_per_job(),
        "cpu_us_per_job": claims.cpu_us_per_job(),
        "us_p50_of_a_claim": claims.us_p50(),
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(one) = &self.effects {
            writeln!(f, "\nSQL handlers, from accepted to committed, 64 connections")?;
            for (name, measured) in
                [("ingest alone", &one.alone), ("ingest beside the handler", &one.working)]
            {
                writeln!(
                    f,
                    "{name:>27} {:>9}/s  p50 {} us  p99 {} us  cpu {:.1} us",
                    thousands(measured.per_second()),
                    thousands(measured.latency_us(0.5)),
                    thousands(measured.latency_us(0.99)),
                    measured.cpu_us_per_request(),
                )?;
            }
            writeln!(
                f,
                "{:>27} {:>9}/s  {} effects in {:.1} s, {:.1} s of it after the last ack",
                "effects",
                thousands(one.per_second()),
                thousands(one.effects as f64),
                one.seconds,
                one.seconds_after,
            )?;
        }
        if !self.beside.is_empty() {
            writeln!(f, "\nacks in an open loop, latency from the planned instant")?;
            writeln!(
                f,
                "{:>32} {:>9} {:>9} {:>9} {:>10} {:>6} {:>6}",
                "beside", "events/s", "p50 us", "p99 us", "sent late", "C", "held"
            )?;
        }
        for one in &self.beside {
            for (what, paced, held) in
                [("nothing", &one.without, None), (one.what, &one.with, one.held)]
            {
                writeln!(
                    f,
                    "{what:>32} {:>9} {:>9} {:>9} {:>10} {:>6} {:>6}",
                    thousands(paced.measured.per_second()),
                    thousands(paced.measured.latency_us(0.5)),
                    thousands(paced.measured.latency_us(0.99)),
                    thousands(paced.sent_late_us_p99().into()),
                    paced.connections,
                    held.map_or(String::new(), |held| thousands(held as f64)),
                )?;
            }
        }
        if let Some(one) = &self.backlog {
            writeln!(f, "\nclaims of 100 jobs")?;
            for (jobs, claims) in [(SMALL, &one.small), (one.jobs, &one.large)] {
                writeln!(
                    f,
                    "{:>10} waiting: {:.1} us a job ({:.1} us of CPU), p50 of a claim {} us, over {} jobs",
                    thousands(jobs as f64),
                    claims.us_per_job(),
                    claims.cpu_us_per_job(),
                    thousands(claims.us_p50()),
                    thousands(claims.jobs as f64),
                )?;
            }
        }
        for one in &self.retention {
            writeln!(
                f,
                "\n{}, {} events/s that are kept for a minute: ack p99 {} us, {} us without pruning",
                one.what,
                thousands(one.with.measured.per_second()),
                thousands(one.with.measured.latency_us(0.99)),
                thousands(one.without.measured.latency_us(0.99)),
            )?;
            writeln!(
                f,
                "{:>8} {:>12} {:>10} {:>10} {:>10} {:>10}",
                "s", "events", "file MiB", "in use", "log MiB", "overdue"
            )?;
            for sample in &one.samples {
                writeln!(
                    f,
                    "{:>8.0} {:>12} {:>10.1} {:>10.1} {:>10.1} {:>10}",
                    sample.seconds,
                    thousands(sample.events as f64),
                    mebibytes(sample.file_bytes),
                    mebibytes(sample.used_bytes),
                    mebibytes(sample.log_bytes),
                    thousands(sample.overdue as f64),
                )?;
            }
        }
        write!(f, "{}", self.figures())
    }
}
