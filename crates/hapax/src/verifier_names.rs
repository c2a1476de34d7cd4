//! Writes the names of verifiers, so that the history of an event says which secret accepted it. The number
//! that is stored with an arrival is a digest of these names: the ingress waits for nothing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Verifier, VerifierNames};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

/// How often new names are recorded: they appear after a reload, or when a tenant was added.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long one write may take: a store that does not answer must not delay the shutdown.
const WRITE_MAX: Duration = Duration::from_secs(2);

/// The most names of one write.
const WRITTEN_AT_ONCE: usize = 1_000;

/// Writes new names until `stop`.
pub(crate) async fn run<S: VerifierNames>(
    store: Arc<S>,
    verifiers: impl Fn() -> BTreeSet<Verifier> + Send,
    stop: CancellationToken,
) {
    let mut beats = interval(LOOK_EVERY);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut written: BTreeSet<Verifier> = BTreeSet::new();
    while stop.run_until_cancelled(beats.tick()).await.is_some() {
        let current = verifiers();
        let new: Vec<Verifier> =
            current.difference(&written).take(WRITTEN_AT_ONCE).cloned().collect();
        if new.is_empty() {
            continue;
        }
        match timeout(WRITE_MAX, store.name_verifiers(new.clone())).await {
            Ok(Ok(())) => {
                written.extend(new);
                // Names of sources that are gone are not kept here.
                written.retain(|verifier| current.contains(verifier));
            }
            // The next round writes them.
            Ok(Err(error)) => tracing::debug!(%error, "recording names of secrets: {error}"),
            Err(_) => tracing::debug!("recording names of secrets takes too long"),
        }
    }
}
