//! Idempotency-Keys on the writer: each act is batched into the writer's next commit, together with
//! events and other acts, and is answered once that commit is synced.
//!
//! The one writer thread decides every race, backed by the unique key. Fences come from a counter
//! that only grows, so that no fence is issued twice, whatever happens to its key.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::job::Fence;
use hapax_core::ledger::{
    Fingerprint, Ledger, Quota, Reservation, ReserveAsk, Reserved, StoredAnswer,
};
use hapax_core::store::{Held, StoreError};
use rusqlite::{Connection, OptionalExtension, Row};

use super::SqliteStore;
use super::key_usage::KeyUsage;
use super::row::micros;
use super::writer::{BatchResult, Writer};
use crate::limits::{BATCH_BYTES_MAX, FENCES_AT_ONCE};
use crate::stored_answer;

impl Ledger for SqliteStore {
    async fn reserve(&self, ask: ReserveAsk) -> Result<Reservation, StoreError> {
        self.writer
            .run_batched(0, move |writer| {
                let now = writer.now();
                let (fences, usage) = (&mut writer.fences, &mut writer.key_usage);
                let reservation = reserve(&writer.conn, fences, usage, ask, now)?;
                Ok(match reservation {
                    Reservation::Fresh(_) => BatchResult::wrote(reservation),
                    Reservation::Replay(ref answer) => {
                        let bytes = answer.body.len();
                        BatchResult::only_read(reservation).holding(bytes)
                    }
                    Reservation::InProgress { .. }
                    | Reservation::Mismatch
                    | Reservation::OverQuota => BatchResult::only_read(reservation),
                })
            })
            .await
    }

    async fn finish(&self, reserved: &Reserved, answer: &StoredAnswer) -> Result<Held, StoreError> {
        // The writer's time is the scarcest, so headers become text before the act is queued.
        let (reserved, answer) = (reserved.clone(), AnswerRow::of(answer));
        self.writer
            .run_batched(answer.body.len(), move |writer| {
                let now = writer.now();
                let (conn, usage) = (&writer.conn, &mut writer.key_usage);
                let fits = match reserved.quota {
                    Some(quota) => {
                        usage.judge(conn, reserved.scope.owner(), quota, Quota::keeps)?
                    }
                    None => true,
                };
                let held = if fits {
                    finish(conn, usage, &reserved, &answer, now)?
                } else {
                    let not_kept = AnswerRow::of(&StoredAnswer::not_kept());
                    finish(conn, usage, &reserved, &not_kept, now)?
                };
                Ok(match held {
                    Held::Kept => BatchResult::wrote(held),
                    Held::Lost => BatchResult::only_read(held),
                })
            })
            .await
    }

    async fn abandon(&self, reserved: &Reserved) -> Result<(), StoreError> {
        let reserved = reserved.clone();
        self.writer
            .run_batched(0, move |writer| {
                writer.key_usage.write(&writer.conn)?;
                abandon(&writer.conn, &mut writer.fences, &reserved)?;
                Ok(BatchResult::wrote(()))
            })
            .await
    }
}

/// Fences that this process may issue. The number in `hapax_meta` covers all these fences, so that most
/// reservations need not write it. A failed write or a restart drops the rest of the block.
#[derive(Debug, Default)]
pub(super) struct FenceBlock {
    issued: i64,
    last: i64,
}

impl FenceBlock {
    /// A fence that was never issued before. The open transaction must be committed before any use of the
    /// fence.
    fn next(&mut self, conn: &Connection) -> rusqlite::Result<i64> {
        if self.issued == self.last {
            let last: i64 = conn
                .prepare_cached(
                    "UPDATE hapax_meta SET value = value + ?1 WHERE name = 'reservation_fence'
                     RETURNING value",
                )?
                .query_row([FENCES_AT_ONCE], |row| row.get(0))?;
            *self = Self { issued: last - FENCES_AT_ONCE, last };
        }
        self.issued += 1;
        Ok(self.issued)
    }

    /// A fence that was never issued before, unless the block is used up. Writes nothing, so it may be taken in a
    /// transaction that is rolled back.
    fn take(&mut self) -> Option<i64> {
        (self.issued < self.last).then(|| {
            self.issued += 1;
            self.issued
        })
    }

    /// Takes back the fence that was issued last: no row has it.
    fn take_back(&mut self) {
        self.issued -= 1;
    }
}

/// An answer as its columns.
pub(super) struct AnswerRow {
    status: u16,
    headers: String,
    body: Bytes,
    /// The bytes that count against the quota.
    size: u64,
}

impl AnswerRow {
    pub(super) fn of(answer: &StoredAnswer) -> Self {
        Self {
            status: answer.status.as_u16(),
            headers: stored_answer::as_pairs(&answer.headers).to_string(),
            body: answer.body.clone(),
            size: answer.size(),
        }
    }
}

/// The columns of a key's row that decide a reservation.
struct ReservedKey {
    attempt: u32,
    leased_until: i64,
    is_this_request: bool,
    is_past_its_ttl: bool,
    answer: Option<StoredAnswer>,
}

impl ReservedKey {
    fn find(conn: &Connection, ask: &ReserveAsk, now: i64) -> rusqlite::Result<Option<Self>> {
        conn.prepare_cached(
            "SELECT attempt, leased_until, fingerprint, expires_at, status, headers, body
             FROM hapax_reservation WHERE scope = ?1 AND key = ?2",
        )?
        .query_row((ask.scope.as_str(), ask.key.as_str()), |row| {
            let Fingerprint(print) = &ask.fingerprint;
            Ok(Self {
                attempt: row.get(0)?,
                leased_until: row.get(1)?,
                is_this_request: row.get_ref(2)?.as_blob()? == print,
                is_past_its_ttl: row.get::<_, i64>(3)? <= now,
                answer: row
                    .get::<_, Option<i64>>(4)?
                    .map(|status| kept(status, row))
                    .transpose()?,
            })
        })
        .optional()
    }
}

fn kept(status: i64, row: &Row<'_>) -> rusqlite::Result<StoredAnswer> {
    let headers: Option<String> = row.get(5)?;
    let headers = headers.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
    Ok(stored_answer::answer_of(
        status,
        headers,
        row.get::<_, Option<Vec<u8>>>(6)?.unwrap_or_default(),
    ))
}

fn reserve(
    conn: &Connection,
    fences: &mut FenceBlock,
    usage: &mut KeyUsage,
    ask: ReserveAsk,
    now: Timestamp,
) -> rusqlite::Result<Reservation> {
    let at = micros(now);
    // Most keys are new: the insert finds out whether this one is.
    let has_room = match ask.quota {
        Some(quota) => usage.judge(conn, ask.scope.owner(), quota, Quota::admits)?,
        None => true,
    };
    if has_room && let Some(fence) = fences.take() {
        if insert(conn, &ask, (fence, 1), at, IfKnown::Nothing)? {
            return new_key(conn, usage, ask, fence);
        }
        fences.take_back();
    }
    let Some(kept) = ReservedKey::find(conn, &ask, at)? else {
        if !has_room {
            return Ok(Reservation::OverQuota);
        }
        let fence = fences.next(conn)?;
        insert(conn, &ask, (fence, 1), at, IfKnown::Nothing)?;
        return new_key(conn, usage, ask, fence);
    };
    let attempt = match kept.answer {
        _ if !kept.is_past_its_ttl && !kept.is_this_request => return Ok(Reservation::Mismatch),
        Some(answer) if !kept.is_past_its_ttl => return Ok(Reservation::Replay(answer)),
        None if kept.leased_until > at => {
            let remaining = Duration::from_micros(kept.leased_until.abs_diff(at));
            return Ok(Reservation::InProgress { remaining });
        }
        None => kept.attempt.saturating_add(1),
        Some(_past) => 1,
    };
    let fence = fences.next(conn)?;
    usage.write(conn)?;
    insert(conn, &ask, (fence, attempt), at, IfKnown::TakeOver)?;
    Ok(fresh(ask, fence, attempt))
}

/// Counts a new key.
fn new_key(
    conn: &Connection,
    usage: &mut KeyUsage,
    ask: ReserveAsk,
    fence: i64,
) -> rusqlite::Result<Reservation> {
    if ask.quota.is_some() {
        usage.add_key(conn, ask.scope.owner())?;
    }
    Ok(fresh(ask, fence, 1))
}

fn fresh(ask: ReserveAsk, fence: i64, attempt: u32) -> Reservation {
    let ReserveAsk { scope, key, quota, .. } = ask;
    Reservation::Fresh(Reserved { scope, key, fence: Fence(fence), attempt, quota })
}

/// The outcome if the key has a row.
enum IfKnown {
    Nothing,
    TakeOver,
}

/// Inserts the key's row, or takes it over. Returns whether a row was written.
fn insert(
    conn: &Connection,
    ask: &ReserveAsk,
    (fence, attempt): (i64, u32),
    at: i64,
    if_known: IfKnown,
) -> rusqlite::Result<bool> {
    let sql = "INSERT INTO hapax_reservation
             (scope, key, fingerprint, fence, attempt, leased_until, ttl, expires_at, lease, owner,
              realm)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
         ON CONFLICT (scope, key) DO UPDATE SET
             fingerprint = excluded.fingerprint, fence = excluded.fence,
             attempt = excluded.attempt, leased_until = excluded.leased_until,
             lease = excluded.lease,
             ttl = excluded.ttl, expires_at = excluded.expires_at,
             status = NULL, headers = NULL, body = NULL, bytes = 0,
             owner = excluded.owner, realm = excluded.realm
         WHERE ?12";
    let (lease, ttl) = (span(ask.lease), span(ask.ttl));
    let written = conn.prepare_cached(sql)?.execute((
        ask.scope.as_str(),
        ask.key.as_str(),
        &ask.fingerprint.0,
        fence,
        attempt,
        at.saturating_add(lease),
        ttl,
        at.saturating_add(ttl),
        lease,
        ask.quota.map(|_| ask.scope.owner().as_str()),
        ask.quota.map(|_| ask.scope.owner().realm()),
        matches!(if_known, IfKnown::TakeOver),
    ))?;
    Ok(written == 1)
}

/// Whether the key still waits for the answer of this reservation.
pub(super) fn is_open(conn: &Connection, reserved: &Reserved) -> rusqlite::Result<bool> {
    conn.prepare_cached(
        "SELECT 1 FROM hapax_reservation
         WHERE scope = ?1 AND key = ?2 AND fence = ?3 AND status IS NULL",
    )?
    .exists((reserved.scope.as_str(), reserved.key.as_str(), reserved.fence.0))
}

/// Stores the answer, if the fence still holds.
pub(super) fn finish(
    conn: &Connection,
    usage: &mut KeyUsage,
    reserved: &Reserved,
    answer: &AnswerRow,
    now: Timestamp,
) -> rusqlite::Result<Held> {
    let finished = conn
        .prepare_cached(
            "UPDATE hapax_reservation
             SET status = ?4, headers = ?5, body = ?6, expires_at = ?7 + ttl, bytes = ?8
             WHERE scope = ?1 AND key = ?2 AND fence = ?3 AND status IS NULL",
        )?
        .execute((
            reserved.scope.as_str(),
            reserved.key.as_str(),
            reserved.fence.0,
            answer.status,
            &answer.headers,
            &*answer.body,
            micros(now),
            i64::try_from(answer.size).unwrap_or(i64::MAX),
        ))?;
    if finished == 0 {
        return Ok(Held::Lost);
    }
    // The row names an owner exactly if its reservation had a quota.
    if reserved.quota.is_some() {
        usage.add_bytes(conn, reserved.scope.owner(), answer.size)?;
    }
    Ok(Held::Kept)
}

/// Abandons a reservation. If an earlier attempt may have been carried out, the row stays to record
/// it.
fn abandon(
    conn: &Connection,
    fences: &mut FenceBlock,
    reserved: &Reserved,
) -> rusqlite::Result<()> {
    let right = (reserved.scope.as_str(), reserved.key.as_str(), reserved.fence.0);
    let gone = conn
        .prepare_cached(
            "DELETE FROM hapax_reservation
             WHERE scope = ?1 AND key = ?2 AND fence = ?3 AND status IS NULL AND attempt = 1",
        )?
        .execute(right)?;
    if gone == 1 || !is_open(conn, reserved)? {
        return Ok(());
    }
    let void = fences.next(conn)?;
    conn.prepare_cached(
        "UPDATE hapax_reservation SET attempt = attempt - 1, leased_until = 0, fence = ?4
         WHERE scope = ?1 AND key = ?2 AND fence = ?3 AND status IS NULL",
    )?
    .execute((right.0, right.1, right.2, void))?;
    Ok(())
}

/// Deletes up to `limit` expired keys, and no more bytes than a commit may hold. Returns true if
/// there may be more. A key under a lease stays.
pub(super) fn forget(writer: &mut Writer, limit: usize) -> rusqlite::Result<bool> {
    let now = micros(writer.now());
    let past: Vec<(i64, u32)> = writer
        .conn
        .prepare_cached(
            "SELECT rowid, coalesce(length(body), 0) FROM hapax_reservation
             WHERE expires_at <= ?1 AND (status IS NOT NULL OR leased_until <= ?1)
             ORDER BY expires_at LIMIT ?2",
        )?
        .query_map((now, limit as i64), |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    if past.is_empty() {
        return Ok(false);
    }
    let found = past.len();
    let gone = writer.in_transaction(|writer| {
        let (mut gone, mut bytes) = (0, 0);
        for (row, length) in past {
            if bytes > BATCH_BYTES_MAX {
                break;
            }
            writer
                .conn
                .prepare_cached("DELETE FROM hapax_reservation WHERE rowid = ?1")?
                .execute([row])?;
            gone += 1;
            bytes += length as usize;
        }
        Ok(gone)
    })?;
    Ok(gone < found || found == limit)
}

/// A span in microseconds. Longer spans are cut at ten years, so that no sum overflows.
fn span(duration: Duration) -> i64 {
    const TEN_YEARS: i64 = 10 * 365 * 86_400 * 1_000_000;
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX).min(TEN_YEARS)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Poll;

    use hapax_core::ledger::{IdempotencyKey, Scope};
    use hapax_core::store::{Horizon, Store, Work};
    use http::{Method, StatusCode};

    use super::*;
    use crate::harness::{DatabaseDirectory, Sender, World};

    fn ask(key: &str) -> ReserveAsk {
        ReserveAsk {
            scope: Scope::new("api", "acct_1", &Method::POST, "/charges"),
            key: IdempotencyKey::parse(key.as_bytes()).expect("a key"),
            fingerprint: Fingerprint::of(None, b"{}", &[]),
            lease: Duration::from_secs(60),
            ttl: Duration::from_secs(3_600),
            quota: None,
        }
    }

    fn answer() -> StoredAnswer {
        let headers = vec![("x-a".to_owned(), "1".to_owned())];
        StoredAnswer { status: StatusCode::CREATED, headers, body: "ok".into() }
    }

    async fn fresh(store: &SqliteStore, key: &str) -> Reserved {
        match store.reserve(ask(key)).await.expect("reserves") {
            Reservation::Fresh(reserved) => reserved,
            other => panic!("{key}: {other:?}"),
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn waiting_acts_share_one_commit_and_are_answered_after_it() {
        // If each act had its own commit, each would need a sync, and the rate would be a tenth.
        // The same key is reserved twice in the batch: the second answer must not report a
        // reservation that is not on disk yet.
        let place = DatabaseDirectory::new();
        let store = place.open();
        let commits = Arc::new(AtomicUsize::new(0));
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let counted = Arc::clone(&commits);
        store.writer.tamper(move |conn| {
            conn.commit_hook(Some(move || {
                counted.fetch_add(1, Ordering::SeqCst);
                false
            }))
            .expect("a hook");
            // While the writer blocks here, everything below queues up for one batch.
            let _ = held.recv();
        });
        let keys = ["a", "b", "c", "a", "d"];
        let mut asked: Vec<_> = keys.map(|key| Box::pin(store.reserve(ask(key)))).into();
        let mut ingested = pin!(store.ingest(Sender::plain().ingest(r#"{"id":"evt_1"}"#)));
        poll_fn(|context| {
            for one in &mut asked {
                assert!(one.as_mut().poll(context).is_pending());
            }
            assert!(ingested.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(hold);
        let mut outcomes = Vec::new();
        for one in asked {
            outcomes.push(match one.await.expect("reserves") {
                Reservation::Fresh(reserved) => Some(reserved.fence),
                Reservation::InProgress { .. } => None,
                other => panic!("{other:?}"),
            });
        }
        ingested.await.expect("ingests");
        assert_eq!(
            outcomes,
            [Some(Fence(1)), Some(Fence(2)), Some(Fence(3)), None, Some(Fence(4))]
        );
        assert_eq!(commits.load(Ordering::SeqCst), 1);
        store.close().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn replays_of_large_answers_do_not_keep_a_batch_waiting() {
        // In a storm of retries, one batch would read five hundred answers of a megabyte into
        // memory at once, and every ack would wait for them.
        let place = DatabaseDirectory::new();
        let store = place.open();
        let large = StoredAnswer { body: vec![0; 1 << 20].into(), ..answer() };
        let reserved = fresh(&store, "k").await;
        assert_eq!(store.finish(&reserved, &large).await.expect("finishes"), Held::Kept);
        let batches = Arc::new(AtomicUsize::new(0));
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let counted = Arc::clone(&batches);
        store.writer.tamper(move |conn| {
            conn.rollback_hook(Some(move || {
                counted.fetch_add(1, Ordering::SeqCst);
            }))
            .expect("a hook");
            let _ = held.recv();
        });
        let mut asked: Vec<_> = (0..8).map(|_| Box::pin(store.reserve(ask("k")))).collect();
        poll_fn(|context| {
            for one in &mut asked {
                assert!(one.as_mut().poll(context).is_pending());
            }
            Poll::Ready(())
        })
        .await;
        drop(hold);
        for one in asked {
            assert_eq!(one.await.expect("reserves"), Reservation::Replay(large.clone()));
        }
        assert_eq!(batches.load(Ordering::SeqCst), 2);
        store.close().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_commit_that_failed_reserved_and_finished_nothing() {
        // If "fresh" were answered before the commit is on disk, two attempts could run under one
        // fence.
        let place = DatabaseDirectory::new();
        let store = place.open();
        let first = fresh(&store, "first").await;
        let mut refusals = 1..=1;
        store.writer.tamper(move |conn| {
            conn.commit_hook(Some(move || refusals.next().is_some())).expect("a hook");
        });
        let failed = store.reserve(ask("second")).await;
        assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
        // Reservations are refused until writing works again. The first reservation is still valid then.
        let deadline = tokio::time::timeout(crate::harness::FOREVER, async {
            while store.writable().is_err() {
                tokio::task::yield_now().await;
            }
        });
        deadline.await.expect("the store recovers by itself");
        let second = fresh(&store, "second").await;
        assert_eq!(second.attempt, 1, "it was not reserved before");
        assert!(second.fence > first.fence);
        assert_eq!(store.finish(&first, &answer()).await.expect("finishes"), Held::Kept);
        store.close().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_store_that_was_opened_again_still_knows_and_repeats_no_fence() {
        // One key keeps its answer, and one stays in progress. A third is abandoned several times,
        // which deletes its row each time. The file is closed and opened in between.
        let place = DatabaseDirectory::new();
        let mut fences = HashSet::new();
        for round in 0..3 {
            let store = place.open();
            if round > 0 {
                let reservation = store.reserve(ask("kept")).await.expect("reserves");
                assert_eq!(reservation, Reservation::Replay(answer()));
                let reservation = store.reserve(ask("running")).await.expect("reserves");
                assert!(matches!(reservation, Reservation::InProgress { .. }), "{reservation:?}");
            } else {
                let kept = fresh(&store, "kept").await;
                store.finish(&kept, &answer()).await.expect("finishes");
                assert!(fences.insert(kept.fence));
                assert!(fences.insert(fresh(&store, "running").await.fence));
            }
            for _ in 0..3 {
                let given_up = fresh(&store, "given up").await;
                store.abandon(&given_up).await.expect("abandons");
                assert!(fences.insert(given_up.fence), "{given_up:?}");
            }
            store.close().await;
        }
    }

    /// The usage of each caller and API as the tables record it, and as counted from the keys.
    async fn usage(store: &SqliteStore) -> (Vec<(String, i64, i64)>, Vec<(String, i64, i64)>) {
        let read = |sql: &'static str| {
            store.writer.slice(move |writer| {
                let mut rows = writer.conn.prepare(sql)?;
                let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
                rows.collect()
            })
        };
        let stored = read(
            "SELECT owner, keys, bytes FROM hapax_key_usage
             UNION ALL SELECT realm, keys, bytes FROM hapax_realm_usage
             UNION ALL SELECT 'callers of ' || realm, callers, 0 FROM hapax_realm_usage ORDER BY 1",
        );
        let counted = read(
            "SELECT owner, count(*), sum(bytes) FROM hapax_reservation
             WHERE owner IS NOT NULL GROUP BY 1
             UNION ALL SELECT realm, count(*), sum(bytes) FROM hapax_reservation
             WHERE owner IS NOT NULL GROUP BY 1
             UNION ALL SELECT 'callers of ' || realm, count(DISTINCT owner), 0
             FROM hapax_reservation WHERE owner IS NOT NULL GROUP BY 1 ORDER BY 1",
        );
        (stored.await.expect("reads"), counted.await.expect("counts"))
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_usage_of_callers_is_what_their_keys_add_up_to() {
        // Usage is kept in memory during a transaction, and triggers change the same rows. Batches mix new keys,
        // repeats, answers, abandoned keys, keys whose lease or ttl is over, and keys that lost or got their quota.
        let world = World::on_disk();
        let store = &world.store;
        let mut seed = 7_u64;
        let mut random = |most: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % most
        };
        let mut held: Vec<Reserved> = Vec::new();
        for round in 0..60 {
            let asks: Vec<ReserveAsk> = (0..12)
                .map(|_| ReserveAsk {
                    scope: Scope::new("api", &format!("acct_{}", random(3)), &Method::POST, "/"),
                    quota: (random(8) > 0).then_some(Quota { keys: 20, bytes: 300 }),
                    ..ask(&format!("k{}", random(25)))
                })
                .collect();
            // While the writer blocks, all acts of the round queue up for one batch.
            let (hold, wait) = std::sync::mpsc::channel::<()>();
            store.writer.tamper(move |_| {
                let _ = wait.recv();
            });
            let reserve = asks.into_iter().map(|ask| Box::pin(store.reserve(ask)));
            let mut reserve: Vec<_> = reserve.collect();
            let ends: Vec<(Reserved, bool)> =
                held.drain(..).map(|reserved| (reserved, random(3) > 0)).collect();
            let mut end: Vec<_> = ends
                .iter()
                .map(|(reserved, finishes)| {
                    Box::pin(async move {
                        if *finishes {
                            store.finish(reserved, &answer()).await.expect("finishes");
                        } else {
                            store.abandon(reserved).await.expect("abandons");
                        }
                    })
                })
                .collect();
            poll_fn(|context| {
                let mut ends = end.iter_mut();
                for one in &mut reserve {
                    assert!(one.as_mut().poll(context).is_pending());
                    if let Some(end) = ends.next() {
                        assert!(end.as_mut().poll(context).is_pending());
                    }
                }
                for end in ends {
                    assert!(end.as_mut().poll(context).is_pending());
                }
                Poll::Ready(())
            })
            .await;
            drop(hold);
            for one in reserve {
                if let Reservation::Fresh(reserved) = one.await.expect("reserves")
                    && random(4) > 0
                {
                    held.push(reserved);
                }
            }
            for one in end {
                one.await;
            }
            let (stored, counted) = usage(store).await;
            assert_eq!(stored, counted, "round {round}");
            if round % 5 == 4 {
                world.pass(61);
            }
            if round % 20 == 19 {
                world.pass(3_601);
                while store.prune(Horizon::forever(), 5).await.expect("prunes") {}
                let (stored, counted) = usage(store).await;
                assert_eq!(stored, counted, "round {round}, pruned");
            }
        }
        world.store.close().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_replay_that_finds_the_block_of_fences_used_up_writes_nothing() {
        // A batch of replays is rolled back. If the batch had extended the block of fences, a process that is
        // killed later would issue the same fences again.
        let place = DatabaseDirectory::new();
        let store = place.open();
        let mut last = fresh(&store, "first").await;
        let mut issued = HashSet::from([last.fence]);
        for n in 1..FENCES_AT_ONCE {
            last = fresh(&store, &format!("k{n}")).await;
            assert!(issued.insert(last.fence));
        }
        let again = store.reserve(ask("first")).await.expect("reserves");
        assert!(matches!(again, Reservation::InProgress { .. }), "{again:?}");
        let new = fresh(&store, "new").await;
        assert!(issued.insert(new.fence));
        let meta = store.writer.slice(|writer| {
            let sql = "SELECT value FROM hapax_meta WHERE name = 'reservation_fence'";
            writer.conn.query_row(sql, [], |row| row.get::<_, i64>(0))
        });
        assert!(meta.await.expect("reads") >= new.fence.0);
        store.close().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pruning_forgets_large_answers_a_few_at_a_time() {
        // A thousand answers of a megabyte in one commit would keep every ack waiting.
        let world = World::on_disk();
        let large = StoredAnswer { body: vec![0; 1 << 20].into(), ..answer() };
        for n in 0..12 {
            let reserved = fresh(&world.store, &format!("k{n}")).await;
            assert_eq!(world.store.finish(&reserved, &large).await.expect("finishes"), Held::Kept);
        }
        world.pass(3_601);
        let horizon = Horizon::forever();
        let mut slices = 1;
        while world.store.prune(horizon.clone(), 500).await.expect("prunes") {
            slices += 1;
        }
        assert_eq!(slices, 3);
        let left = world.store.writer.slice(|writer| {
            let count = "SELECT count(*) FROM hapax_reservation";
            writer.conn.query_row(count, [], |row| row.get::<_, i64>(0))
        });
        assert_eq!(left.await.expect("counts"), 0);
        world.store.close().await;
    }
}
