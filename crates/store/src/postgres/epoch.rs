//! Identifies the database, and decides whether cached answers are valid. An epoch is the system
//! identifier, the timeline, the ids of this database and its table of events, and a counter. A
//! copy on the same server and a restored dump have other ids. An operator raises the counter after
//! a restore that changes none of the other values. Facts from one epoch do not hold in another: a
//! promoted standby may never have received them.
//!
//! A task queries the epoch four times a second. Its last answer is valid for one second and no
//! longer.

use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use super::Shared;
use super::connect::{PgError, PooledClient};
use crate::redis_cache::Seal;

/// How often the database is queried.
const ASK_EVERY: Duration = Duration::from_millis(250);

/// How long an answer is valid.
const COUNTS_FOR: Duration = Duration::from_secs(1);

/// How long memory answers before the database is asked again: another node may have replayed a
/// finished event, or deleted its key, and does not notify this one.
const BELIEVED_FOR: Duration = Duration::from_secs(60);

/// How long an answer may take before another connection, perhaps to another server, is tried. This time is
/// shorter than any statement's timeout, so that a silent server is noticed before waiting requests give
/// up.
const ANSWER_MAX: Duration = Duration::from_secs(4);

/// An epoch of the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Epoch {
    system: i64,
    timeline: String,
    /// The ids of the database and of its table of events.
    oids: (u32, u32),
    counter: i64,
}

impl Epoch {
    fn bytes(&self) -> Vec<u8> {
        let Self { system, timeline, oids, counter } = self;
        let oids = [oids.0.to_be_bytes(), oids.1.to_be_bytes()].concat();
        [&system.to_be_bytes()[..], &counter.to_be_bytes(), &oids, timeline.as_bytes()].concat()
    }
}

/// The last answer.
#[derive(Debug, Default)]
pub(super) struct EpochWatch(RwLock<Option<ConfirmedEpoch>>);

#[derive(Debug, Clone)]
struct ConfirmedEpoch {
    epoch: Epoch,
    /// Seals the entries of the Redis cache in this epoch.
    seal: Arc<Seal>,
    /// When the query was sent. The age of the answer is counted from this time.
    at: Instant,
}

impl EpochWatch {
    /// The epoch, if it was confirmed on a primary within the last second.
    pub(super) fn confirmed(&self) -> Option<Epoch> {
        let heard = self.0.read().expect("no panic happens under this lock");
        heard
            .as_ref()
            .filter(|heard| heard.at.elapsed() < COUNTS_FOR)
            .map(|heard| heard.epoch.clone())
    }

    /// The current epoch with the seal of its entries.
    pub(super) fn sealed(&self) -> Option<(Epoch, Arc<Seal>)> {
        let heard = self.0.read().expect("no panic happens under this lock");
        let heard = heard.as_ref().filter(|heard| heard.at.elapsed() < COUNTS_FOR)?;
        Some((heard.epoch.clone(), Arc::clone(&heard.seal)))
    }

    /// Runs `put` if `epoch` is still the current one. The lock prevents a change in between.
    pub(super) fn within(&self, epoch: Option<&Epoch>, put: impl FnOnce()) {
        let heard = self.0.read().expect("no panic happens under this lock");
        if epoch.is_some() && heard.as_ref().map(|heard| &heard.epoch) == epoch {
            put();
        }
    }

    /// Records an answer. If the epoch has changed, `forget` is called before any reader sees the
    /// new epoch.
    fn record_answer(&self, epoch: Epoch, cache_key: &[u8], at: Instant, forget: impl FnOnce()) {
        let mut heard = self.0.write().expect("no panic happens under this lock");
        if heard.as_ref().is_some_and(|heard| heard.epoch != epoch) {
            tracing::warn!(
                "the database is in another epoch: a restore or a failover; memory is dropped"
            );
            forget();
        }
        let seal = match heard.take() {
            Some(before) if before.epoch == epoch => before.seal,
            Some(_) | None => Arc::new(Seal::new(cache_key, &epoch.bytes())),
        };
        *heard = Some(ConfirmedEpoch { epoch, seal, at });
    }
}

/// Queries once, and reports the outcome to the store's health.
pub(super) async fn ask(shared: &Shared) -> Result<(), PgError> {
    let asked = async {
        let mut client = shared.pools.watch.checkout().await?;
        let at = Instant::now();
        let reading = tokio::time::timeout(ANSWER_MAX, read(&mut client));
        let epoch = reading.await.map_err(|_| PgError::Silent)??;
        if epoch.is_none() {
            client.close_connection();
        }
        Ok::<_, PgError>((epoch, at))
    };
    match asked.await {
        Ok((Some((epoch, cache_key)), at)) => {
            shared.epoch.record_answer(epoch, &cache_key, at, || shared.forget_all());
            shared.health.works();
            Ok(())
        }
        Ok((None, _)) => {
            let why = "the database is a standby or read-only, and accepts no writes";
            shared.health.fails(&why.into());
            Err(PgError::Pool("the database accepts no writes".to_owned()))
        }
        Err(error) => {
            shared.health.fails(&error.to_string().into());
            Err(error)
        }
    }
}

/// Queries until the store is closed.
pub(super) async fn watch(shared: std::sync::Arc<Shared>) {
    let mut turn = tokio::time::interval(ASK_EVERY);
    turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut believed_since = Instant::now();
    loop {
        tokio::select! {
            () = shared.closing.cancelled() => return,
            _ = turn.tick() => {}
        }
        if believed_since.elapsed() > BELIEVED_FOR {
            shared.recent.clear();
            believed_since = Instant::now();
        }
        if let Err(error) = ask(&shared).await {
            tracing::debug!("reading the epoch: {error}");
        }
    }
}

/// The epoch of a primary that accepts writes; `None` from any other server.
async fn read(client: &mut PooledClient) -> Result<Option<(Epoch, Vec<u8>)>, PgError> {
    let rows = client
        .query(
            "SELECT system_identifier,
                    CASE WHEN pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean
                         THEN NULL
                         ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END,
                    (SELECT counter FROM hapax.epoch), (SELECT cache_key FROM hapax.epoch),
                    (SELECT oid FROM pg_database WHERE datname = current_database()),
                    'hapax.event'::regclass::oid
             FROM pg_control_system()",
            &[],
        )
        .await?;
    Ok(rows.first().and_then(|row| {
        let timeline: Option<String> = row.get(1);
        let (system, counter) = (row.get(0), row.get(2));
        let oids = (row.get(4), row.get(5));
        Some((Epoch { system, timeline: timeline?, oids, counter }, row.get(3)))
    }))
}

#[cfg(test)]
mod tests {
    use hapax_core::store::{EventId, KnownEvent, Status};
    use hapax_core::{KeyHash, Timestamp};

    use super::*;
    use crate::redis_cache::CacheEntry;

    fn epoch(counter: i64) -> Epoch {
        Epoch { system: 7, timeline: "1".to_owned(), oids: (1, 2), counter }
    }

    #[test]
    fn an_answer_is_valid_for_a_second_and_no_longer() {
        // A node that is cut off from its database must not continue to answer from memory.
        let watch = EpochWatch::default();
        let long_ago = Instant::now().checked_sub(COUNTS_FOR).expect("the machine runs that long");
        watch.record_answer(epoch(1), b"key", long_ago, || panic!("nothing was known before"));
        assert_eq!(watch.confirmed(), None);
        assert!(watch.sealed().is_none());
        watch.record_answer(epoch(1), b"key", Instant::now(), || panic!("the epoch is the same"));
        assert_eq!(watch.confirmed(), Some(epoch(1)));
        assert!(watch.sealed().is_some());
    }

    #[test]
    fn an_answer_of_one_epoch_is_not_cached_in_another() {
        // The answer of a commit may arrive after the failover that lost the commit.
        let watch = EpochWatch::default();
        let put = |asked_in: Option<&Epoch>| {
            let mut put = false;
            watch.within(asked_in, || put = true);
            put
        };
        assert!(!put(Some(&epoch(1))) && !put(None), "nothing is known yet");
        watch.record_answer(epoch(1), b"key", Instant::now(), || ());
        assert!(put(Some(&epoch(1))));
        assert!(!put(None), "the epoch of that answer was not known");
        let mut forgot = false;
        watch.record_answer(epoch(2), b"key", Instant::now(), || forgot = true);
        assert!(forgot);
        assert!(put(Some(&epoch(2))));
        assert!(!put(Some(&epoch(1))));
    }

    #[test]
    fn an_entry_sealed_in_one_epoch_is_ignored_in_another() {
        // Redis still holds entries from before a failover, a restore, or a raised counter.
        let sealed_in = |epochs: &[&Epoch]| {
            let watch = EpochWatch::default();
            for epoch in epochs {
                watch.record_answer((*epoch).clone(), b"key", Instant::now(), || ());
            }
            watch.sealed().expect("just heard").1
        };
        let id = EventId(uuid::Uuid::now_v7());
        let known = KnownEvent { id, status: Status::Processed, result: None };
        let (key, written_at) = (KeyHash([1; 16]), Timestamp::now());
        let entry = CacheEntry { body_hash: KeyHash([2; 16]), guard: None, known, written_at };
        let first = epoch(1);
        let value = entry.sealed(&sealed_in(&[&first]), &key);
        let age_max = Duration::from_secs(3_600);
        let counts = |seal: &Seal| CacheEntry::open(&value, seal, &key, age_max).is_some();
        assert!(counts(&sealed_in(&[&first])) && counts(&sealed_in(&[&first, &first])));
        for other in [
            epoch(2),
            Epoch { system: 8, ..epoch(1) },
            Epoch { timeline: "2".to_owned(), ..epoch(1) },
            Epoch { oids: (3, 2), ..epoch(1) },
            Epoch { oids: (1, 3), ..epoch(1) },
        ] {
            assert!(!counts(&sealed_in(&[&other])), "{other:?}");
            assert!(!counts(&sealed_in(&[&first, &other])), "after the first: {other:?}");
        }
    }
}
