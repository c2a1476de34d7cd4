//! The findings of a run, and the figures that Hapax is held to.

use crate::acks_while_working::Beside;
use crate::backlog::{Backlog, SMALL};
use crate::effects::Effects;
use crate::retention::Retention;
use crate::shared::figures::{Figure, mebibytes, thousands};
use crate::shared::open::Paced;
use crate::shared::report::{Report, Table, column};

/// The results of a run.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) effects: Option<Effects>,
    pub(crate) beside: Vec<Beside>,
    pub(crate) backlog: Option<Backlog>,
    pub(crate) retention: Vec<Retention>,
}

impl Findings {
    pub(crate) fn report(&self) -> Report {
        let mut report = Report::default();
        self.effects.iter().for_each(|one| report.table(effects_table(one)));
        if !self.beside.is_empty() {
            report.table(beside_table(&self.beside));
        }
        self.backlog.iter().for_each(|one| report.table(backlog_table(one)));
        for one in &self.retention {
            report.table(acks_table(one));
            report.table(samples_table(one));
        }
        report.figures(self.figures());
        report
    }

    fn figures(&self) -> impl Iterator<Item = Figure> {
        let effects = self.effects.iter().map(|one| {
            Figure::higher(
                "SQL effects/s at 64 connections, to ingest alone",
                one.ratio(),
                0.75,
                0.9,
            )
        });
        let beside = self.beside.iter().map(|one| {
            Figure::lower(
                format!("ack p99 beside {}, relative to without", one.what),
                one.ratio(),
                2.0,
                1.2,
            )
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
                format!("retention, {what}: ack p99, relative to without pruning"),
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
        effects.chain(beside).chain(backlog).chain(retention)
    }
}

fn effects_table(one: &Effects) -> Table {
    let title = "SQL handlers, 64 connections; the floor is ingest alone";
    let mut table = Table::of_loads(title, []);
    table.load("ingest alone", &one.alone, None, []);
    table.load("ingest beside the handler", &one.working, Some(&one.alone), []);
    table.row("effects", [Some(one.per_second()), Some(one.ratio())]);
    table.note(format!(
        "{} effects in {:.1} s, {:.1} s of it after the last ack",
        thousands(one.effects as f64),
        one.seconds,
        one.seconds_after,
    ));
    table
}

/// Acks in an open loop: latency counts from the planned time.
fn beside_table(beside: &[Beside]) -> Table {
    let columns = [column("sent late", 0), column("C", 0), column("held", 0)];
    let mut table = Table::of_loads("acks in an open loop, beside", columns);
    for one in beside {
        table.load("nothing", &one.without.measured, None, paced(&one.without, None));
        let floor = Some(&one.without.measured);
        table.load(one.what, &one.with.measured, floor, paced(&one.with, one.held));
        let planned = thousands(one.per_second);
        table.note(format!("beside {}: planned at {planned} events/s", one.what));
    }
    table
}

fn paced(paced: &Paced, held: Option<usize>) -> [Option<f64>; 3] {
    let held = held.map(|held| held as f64);
    [Some(paced.sent_late_us_p99().into()), Some(paced.connections as f64), held]
}

fn backlog_table(one: &Backlog) -> Table {
    let columns = [
        column("us a job", 1),
        column("to floor", 2),
        column("cpu us", 1),
        column("claim p50", 0),
        column("jobs", 0),
    ];
    let mut table = Table::new("claims of 100 jobs", columns);
    for (jobs, claims, ratio) in
        [(SMALL, &one.small, None), (one.jobs, &one.large, Some(one.ratio()))]
    {
        let numbers = [
            Some(claims.us_per_job()),
            ratio,
            Some(claims.cpu_us_per_job()),
            Some(claims.us_p50()),
            Some(claims.jobs as f64),
        ];
        table.row(format!("{} waiting", thousands(jobs as f64)), numbers);
    }
    table
}

fn acks_table(one: &Retention) -> Table {
    let columns = [column("sent late", 0), column("C", 0)];
    let title = format!("{}: acks of events that are kept for a minute", one.what);
    let mut table = Table::of_loads(title, columns);
    let late = |of: &Paced| paced(of, None).into_iter().take(2);
    table.load("without pruning", &one.without.measured, None, late(&one.without));
    table.load("with pruning", &one.with.measured, Some(&one.without.measured), late(&one.with));
    table
}

fn samples_table(one: &Retention) -> Table {
    let columns = [
        column("events", 0),
        column("file MiB", 1),
        column("in use MiB", 1),
        column("log MiB", 1),
        column("overdue", 0),
    ];
    let mut table = Table::new(format!("{}: size", one.what), columns);
    for sample in &one.samples {
        let numbers = [
            sample.events as f64,
            mebibytes(sample.file_bytes),
            mebibytes(sample.used_bytes),
            mebibytes(sample.log_bytes),
            sample.overdue as f64,
        ];
        table.row(format!("after {:.0} s", sample.seconds), numbers.map(Some));
    }
    table
}
