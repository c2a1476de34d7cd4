//! Metrics: the recorder, the buckets and the descriptions.

use std::time::Duration;

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Buckets in seconds, from the sync of a fast disk to a timeout.
const SECONDS: &[f64] = &[
    0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

/// Buckets for the receipts of one commit.
const BATCH: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

/// How often histograms are compacted, so that they do not grow between scrapes.
pub(crate) const UPKEEP: Duration = Duration::from_secs(5);

/// Installs the recorder. Call this once, before the first metric.
pub(crate) fn start() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)?
        .set_buckets_for_metric(Matcher::Full("hapax_store_batch_size".into()), BATCH)?
        .install_recorder()?;
    describe_counter!("hapax_arrivals_total", "Verified arrivals by decision");
    describe_counter!("hapax_rejections_total", "Rejected requests by reason");
    describe_counter!("hapax_handshakes_total", "Handshakes of senders that were answered");
    describe_counter!(
        "hapax_connections_evicted_total",
        "Connections closed to make room for new ones at max_connections, by state: head, idle, body or verified"
    );
    describe_histogram!("hapax_ack_seconds", Unit::Seconds, "From the request head to the answer");
    describe_histogram!(
        "hapax_store_commit_seconds",
        Unit::Seconds,
        "One commit, including the sync"
    );
    describe_histogram!("hapax_store_batch_size", "Receipts that shared one commit");
    describe_counter!("hapax_redis_answers_total", "Keys looked up in Redis: hit, miss or failed");
    describe_counter!("hapax_jobs_total", "Finished attempts by handler and outcome");
    describe_histogram!(
        "hapax_handler_seconds",
        Unit::Seconds,
        "Duration of one attempt; for statements that shared a transaction, their share of it"
    );
    describe_gauge!(
        "hapax_oldest_job_seconds",
        Unit::Seconds,
        "How long the oldest due job has been due"
    );
    describe_gauge!("hapax_dead_letters", "Dead letters, counted up to 10000");
    describe_gauge!("hapax_alerts", "Active alerts by name");
    describe_gauge!(
        "hapax_clock_offset_seconds",
        Unit::Seconds,
        "How far the clocks of senders are behind this server, as a recent median"
    );
    Ok(handle)
}
