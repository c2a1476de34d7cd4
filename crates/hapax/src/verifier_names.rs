//! Writes the names of verifiers, so that the history of an event says which secret accepted it. The number that is
//! stored with an arrival is a digest of these names, so the ingress does not wait until they are written. The task
//! also writes which secrets each source has and when each of them last verified a request.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{SecretUse, StoreError, Verifier, VerifierNames};
use hapax_core::{SourceName, Tenant, Timestamp};
use jiff::SignedDuration;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

/// How often new names and uses are written.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long one write may take: a store that does not answer must not delay the shutdown.
const WRITE_MAX: Duration = Duration::from_secs(2);

/// The most names or uses of one write.
const WRITTEN_AT_ONCE: usize = 1_000;

/// A use of a secret is written again once it is this much later than the written one: a busy source needs no write
/// every few seconds.
const USED_AGAIN_AFTER: SignedDuration = SignedDuration::from_secs(60);

/// Writes new names and uses until `stop`, and once more after it.
pub(crate) async fn run<S: VerifierNames>(
    store: Arc<S>,
    uses: impl Fn() -> Vec<SecretUse> + Send,
    stop: CancellationToken,
) {
    let mut beats = interval(LOOK_EVERY);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut written = Written::default();
    loop {
        let is_over = stop.run_until_cancelled(beats.tick()).await.is_none();
        match timeout(WRITE_MAX, written.write(&*store, uses())).await {
            Ok(Ok(())) => {}
            // The next round writes them.
            Ok(Err(error)) => tracing::debug!(%error, "recording the uses of secrets: {error}"),
            Err(_) => tracing::debug!("recording the uses of secrets takes too long"),
        }
        if is_over {
            return;
        }
    }
}

/// The names and uses that this process has written.
#[derive(Default)]
struct Written {
    names: BTreeSet<Verifier>,
    uses: BTreeMap<(SourceName, Tenant, Verifier), Option<Timestamp>>,
}

impl Written {
    async fn write<S: VerifierNames>(
        &mut self,
        store: &S,
        uses: Vec<SecretUse>,
    ) -> Result<(), StoreError> {
        let current: BTreeSet<Verifier> = uses.iter().map(|one| one.verifier.clone()).collect();
        let new: Vec<Verifier> =
            current.difference(&self.names).take(WRITTEN_AT_ONCE).cloned().collect();
        if !new.is_empty() {
            store.name_verifiers(new.clone()).await?;
            self.names.extend(new);
        }
        let due: Vec<SecretUse> =
            uses.iter().filter(|one| self.is_due(one)).take(WRITTEN_AT_ONCE).cloned().collect();
        if !due.is_empty() {
            store.note_secrets(due.clone()).await?;
            self.uses.extend(due.into_iter().map(|one| (key(&one), one.used_at)));
        }
        // Names of sources that are no longer configured are forgotten.
        self.names.retain(|verifier| current.contains(verifier));
        let keys: BTreeSet<_> = uses.iter().map(key).collect();
        self.uses.retain(|key, _| keys.contains(key));
        Ok(())
    }

    fn is_due(&self, one: &SecretUse) -> bool {
        match (self.uses.get(&key(one)), one.used_at) {
            (None, _) | (Some(None), Some(_)) => true,
            (Some(Some(before)), Some(used_at)) => {
                used_at.duration_since(*before) >= USED_AGAIN_AFTER
            }
            (Some(_), None) => false,
        }
    }
}

fn key(one: &SecretUse) -> (SourceName, Tenant, Verifier) {
    (one.source.clone(), one.tenant.clone(), one.verifier.clone())
}

#[cfg(test)]
mod tests {
    use hapax_sim::{Act, FaultyStore};
    use hapax_store::MemoryStore;

    use super::*;

    #[tokio::test]
    async fn a_use_is_written_at_once_and_then_once_a_minute() {
        // A write that fails is repeated; a busy source writes no row every few seconds.
        let store = FaultyStore::new(MemoryStore::new());
        let source = SourceName::new("stripe");
        let used = |second: Option<i64>| SecretUse {
            tenant: Tenant::new("acme"),
            source: source.clone(),
            verifier: Verifier { scheme: "stripe".to_owned(), secret: "env:A".to_owned() },
            used_at: second.map(|second| Timestamp::from_second(second).unwrap()),
        };
        let mut written = Written::default();
        let recorded = async || {
            let records = store.secrets_of(&source, 9).await.unwrap();
            records.first().map(|record| record.used_at.map(|at| at.as_second()))
        };
        store.fail_next(Act::NoteSecrets, 1);
        assert!(written.write(&store, vec![used(None)]).await.is_err());
        assert_eq!(recorded().await, None);
        for (second, expected) in [
            (None, None),
            (Some(1_000), Some(1_000)),
            (Some(1_059), Some(1_000)),
            (Some(1_060), Some(1_060)),
        ] {
            written.write(&store, vec![used(second)]).await.unwrap();
            assert_eq!(recorded().await, Some(expected), "{second:?}");
        }
        assert_eq!(store.begun(Act::NoteSecrets), 4);
        assert_eq!(store.begun(Act::NameVerifiers), 1);
        // A source that is removed and added again is written again, which changes nothing.
        written.write(&store, Vec::new()).await.unwrap();
        written.write(&store, vec![used(None)]).await.unwrap();
        assert_eq!(recorded().await, Some(Some(1_060)));
    }
}
