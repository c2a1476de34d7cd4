//! Metrics: where they are gathered, and what each of them means.

use std::time::Duration;

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Seconds, from a fast disk's sync to a hopeless wait.
const SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

/// Receipts in one commit.
const BATCH: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

/// How often the histograms are tidied, so that they do not grow while nobody scrapes.
pub(crate) const UPKEEP: Duration = Duration::from_secs(5);

/// Starts gathering. Call it once, before anything is counted.
pub(crate) fn start() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)?
        .set_buckets_for_metric(Matcher::Full("hapax_store_batch_size".into()), BATCH)?
        .install_recorder()?;
    describe_counter!("hapax_arrivals_total", "Verified arrivals, by what became of them");
    describe_counter!("hapax_rejections_total", "Refused requests, by reason");
    describe_counter!("hapax_handshakes_total", "Answered handshakes of senders");
    describe_counter!(
        "hapax_connections_evicted_total",
        "Connections closed for others while all places were taken: head, idle, body or verified"
    );
    describe_histogram!(
        "hapax_ack_seconds",
        Unit::Seconds,
        "From the request's head to its answer"
    );
    describe_histogram!("hapax_store_commit_seconds", Unit::Seconds, "One commit, sync included");
    describe_histogram!("hapax_store_batch_size", "Receipts that shared one commit");
    describe_counter!(
        "hapax_redis_answers_total",
        "Keys that Redis was asked for: hit, miss, or failed where it was not to be had"
    );
    describe_counter!("hapax_jobs_total", "Attempts that ended, by handler and how");
    describe_histogram!(
        "hapax_handler_seconds",
        Unit::Seconds,
        "One attempt; of statements that shared a transaction, their share of it"
    );
    describe_gauge!(
        "hapax_oldest_job_seconds",
        Unit::Seconds,
        "How long the job that is due longest has been due"
    );
    describe_gauge!("hapax_dead_letters", "Buried jobs, counted up to 10000");
    describe_gauge!("hapax_alerts", "Alerts that hold now, by name");
    describe_gauge!(
        "hapax_clock_offset_seconds",
        Unit::Seconds,
        "How far senders' clocks are behind ours, the median of late"
    );
    Ok(handle)
}
