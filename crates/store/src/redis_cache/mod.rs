//! Redis in front of a shared database: it answers duplicates of events whose work has ended, and
//! nothing else. An entry counts only with a proof that Hapax wrote it in this epoch of the
//! database ([`entry`]). If Redis is slow, wrong, empty or down, a request waits a bounded time and
//! gets the same answer from the database.
//!
//! Entries are written in the background after their commit. Entries are dropped silently when Redis is not
//! available. A miss proves nothing: then the database decides.

mod entry;
mod probe;

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::{KeyHash, Timestamp};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use entry::{CacheEntry, Seal};
pub use probe::RedisReport;

use crate::limits::{
    FRONT_ANSWER_MAX, FRONT_ASKED_MAX, FRONT_CONNECT_MAX, FRONT_ENTRY_AGE_MAX, FRONT_LOG_EVERY,
    FRONT_REST, FRONT_REST_MAX, FRONT_WAITING_MAX, FRONT_WRITTEN_MAX,
};

/// The Redis cache, which is never trusted without a proof.
pub(crate) struct RedisCache {
    line: Arc<SharedConnection>,
    asked: mpsc::Sender<CacheLookup>,
    writes: mpsc::Sender<CacheChange>,
    age_max: Duration,
    keys_kept: Option<Duration>,
    counted: LookupCounters,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// Counters of lookups, by result.
struct LookupCounters {
    hit: metrics::Counter,
    miss: metrics::Counter,
    failed: metrics::Counter,
}

impl LookupCounters {
    fn new() -> Self {
        let of = |outcome| metrics::counter!("hapax_redis_answers_total", "outcome" => outcome);
        Self { hit: of("hit"), miss: of("miss"), failed: of("failed") }
    }
}

/// A lookup of these keys; values are returned in the same order.
struct CacheLookup {
    keys: Vec<KeyHash>,
    answer: oneshot::Sender<Vec<Option<Vec<u8>>>>,
}

/// A change that waits for the background task.
enum CacheChange {
    /// Entries to be sealed and written under their keys.
    Write(Arc<Seal>, Vec<(KeyHash, CacheEntry)>),
    /// Keys to be deleted.
    Remove(Vec<KeyHash>),
}

/// The URL is not a Redis URL. The error does not repeat the URL, which may contain a password.
#[derive(Debug, thiserror::Error)]
#[error("redis_url is not a Redis URL: {0}")]
pub(crate) struct RedisUrlError(String);

impl RedisCache {
    /// Connects in the background: Redis need not be available now. `keys_kept` is the shortest
    /// retention of a key. An entry expires long before that, and is not written if its key may be
    /// pruned earlier: it would report a duplicate of a key that is new again.
    pub(crate) fn open(url: &str, keys_kept: Option<Duration>) -> Result<Self, RedisUrlError> {
        let client =
            Client::open(url).map_err(|error| RedisUrlError(error.category().to_owned()))?;
        let age_max =
            keys_kept.map_or(FRONT_ENTRY_AGE_MAX, |kept| FRONT_ENTRY_AGE_MAX.min(kept / 2));
        let line = Arc::new(SharedConnection {
            client,
            state: Mutex::new(RedisState::Down { until: None }),
            failed: AtomicU32::new(0),
            said: Mutex::new(CacheReply { fails_at: None, answers: false }),
        });
        let (asked, questions) = mpsc::channel(FRONT_WAITING_MAX);
        let (writes, entries) = mpsc::channel(FRONT_WAITING_MAX);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(ask_together(Arc::clone(&line), questions, stop.clone()));
        tasks.spawn(write_entries(
            Arc::clone(&line),
            tasks.clone(),
            entries,
            age_max,
            stop.clone(),
        ));
        tasks.close();
        line.lift(&tasks);
        let counted = LookupCounters::new();
        Ok(Self { line, asked, writes, age_max, keys_kept, counted, stop, tasks })
    }

    /// The entry under each key, in order. Takes a bounded time and never fails.
    pub(crate) async fn ask(&self, seal: &Seal, keys: &[KeyHash]) -> Vec<Option<CacheEntry>> {
        let Some(values) = self.values(keys).await else {
            self.counted.failed.increment(keys.len() as u64);
            return vec![None; keys.len()];
        };
        let mut values = values.into_iter();
        let open = |key: &KeyHash| CacheEntry::open(&values.next()??, seal, key, self.age_max);
        let entries: Vec<_> = keys.iter().map(open).collect();
        let hits = entries.iter().flatten().count() as u64;
        self.counted.hit.increment(hits);
        self.counted.miss.increment(keys.len() as u64 - hits);
        entries
    }

    /// The stored values; `None` if Redis is not available. The caller waits for the lookup in
    /// flight and then for its own, and each of them has a short timeout.
    async fn values(&self, keys: &[KeyHash]) -> Option<Vec<Option<Vec<u8>>>> {
        if !self.line.is_up() {
            self.line.lift(&self.tasks);
            return None;
        }
        let (answer, values) = oneshot::channel();
        self.asked.try_send(CacheLookup { keys: keys.to_vec(), answer }).ok()?;
        values.await.ok()
    }

    /// Queues entries of events that are committed and ended, all those of one commit together. Dropped
    /// when the queue is full.
    pub(crate) fn write(
        &self,
        seal: Arc<Seal>,
        ended: impl IntoIterator<Item = (KeyHash, CacheEntry)>,
    ) {
        let lasts = |(_, entry): &(KeyHash, CacheEntry)| {
            self.keys_kept.is_none_or(|kept| {
                let received_at =
                    Timestamp::from_millisecond((entry.known.id.0.as_u128() >> 80) as i64);
                let age = received_at.map(|at| entry.written_at.duration_since(at).unsigned_abs());
                age.is_ok_and(|age| age + self.age_max < kept)
            })
        };
        let entries: Vec<_> = ended.into_iter().filter(lasts).collect();
        if !entries.is_empty() {
            let _full = self.writes.try_send(CacheChange::Write(seal, entries));
        }
    }

    /// Queues the deletion of these keys' entries. Best effort: an entry that is not deleted still
    /// belongs to a committed event.
    pub(crate) fn remove(&self, keys: impl IntoIterator<Item = KeyHash>) {
        let keys: Vec<_> = keys.into_iter().collect();
        if !keys.is_empty() {
            let _full = self.writes.try_send(CacheChange::Remove(keys));
        }
    }

    /// Stops the background tasks; unwritten entries are dropped.
    pub(crate) async fn close(&self) {
        self.stop.cancel();
        self.tasks.wait().await;
    }
}

impl fmt::Debug for RedisCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RedisCache")
    }
}

/// Batches lookups: those that arrive while an answer is pending are sent to Redis as one command.
/// A dropped lookup counts as a miss.
async fn ask_together(
    line: Arc<SharedConnection>,
    mut questions: mpsc::Receiver<CacheLookup>,
    stop: CancellationToken,
) {
    let mut waiting = Vec::new();
    loop {
        waiting.clear();
        let asked = questions.recv_many(&mut waiting, FRONT_ASKED_MAX);
        if stop.run_until_cancelled(asked).await.is_none_or(|count| count == 0) {
            return;
        }
        let Some(mut redis) = line.connection() else { continue };
        let mut command = redis::cmd("MGET");
        for key in waiting.iter().flat_map(|question| &question.keys) {
            command.arg(name_of(key).as_slice());
        }
        let asked = timeout(FRONT_ANSWER_MAX, command.query_async(&mut redis));
        let values: Vec<Option<Vec<u8>>> = match stop.run_until_cancelled(asked).await {
            None => return,
            Some(Ok(Ok(values))) => {
                line.works();
                values
            }
            Some(Ok(Err(error))) => {
                line.rest(error.category());
                continue;
            }
            Some(Err(_too_slow)) => {
                line.rest("no answer in time");
                continue;
            }
        };
        let mut values = values.into_iter();
        for question in waiting.drain(..) {
            let theirs = values.by_ref().take(question.keys.len()).collect();
            let _gave_up = question.answer.send(theirs);
        }
    }
}

/// Writes entries with an expiry, so that Redis deletes them soon after nodes stop trusting them.
async fn write_entries(
    line: Arc<SharedConnection>,
    tasks: TaskTracker,
    mut changes: mpsc::Receiver<CacheChange>,
    age_max: Duration,
    stop: CancellationToken,
) {
    let seconds = age_max.as_secs().max(1);
    while let Some(Some(first)) = stop.run_until_cancelled(changes.recv()).await {
        let Some(mut redis) = line.connection() else {
            line.lift(&tasks);
            continue;
        };
        let mut pipe = redis::pipe();
        let mut keys = 0;
        let mut next = Some(first);
        while let Some(change) = next {
            match change {
                CacheChange::Write(seal, entries) => {
                    keys += entries.len();
                    for (key, entry) in entries {
                        let (name, value) = (name_of(&key), entry.sealed(&seal, &key));
                        pipe.cmd("SET").arg(&name).arg(value).arg("EX").arg(seconds).ignore();
                    }
                }
                CacheChange::Remove(gone) => {
                    keys += gone.len();
                    gone.iter().for_each(|key| {
                        pipe.cmd("DEL").arg(&name_of(key)).ignore();
                    });
                }
            }
            next = if keys < FRONT_WRITTEN_MAX { changes.try_recv().ok() } else { None };
        }
        let written = timeout(FRONT_CONNECT_MAX, pipe.query_async::<()>(&mut redis));
        match stop.run_until_cancelled(written).await {
            None | Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => line.rest(error.category()),
            Some(Err(_too_slow)) => line.rest("no answer in time"),
        }
    }
}

fn name_of(key: &KeyHash) -> [u8; 22] {
    let mut name = *b"hapax:................";
    name[6..].copy_from_slice(&key.0);
    name
}

/// The one connection, shared by lookups and writes.
struct SharedConnection {
    client: Client,
    state: Mutex<RedisState>,
    /// Failures since the last answer: the pause grows with each.
    failed: AtomicU32,
    said: Mutex<CacheReply>,
}

/// The last log lines about Redis.
struct CacheReply {
    /// When a failure was last logged.
    fails_at: Option<Instant>,
    /// Whether the last log line reported that Redis answers.
    answers: bool,
}

enum RedisState {
    Up(MultiplexedConnection),
    /// A task is connecting.
    Lifting,
    /// Redis is not tried again before this time.
    Down {
        until: Option<Instant>,
    },
}

impl SharedConnection {
    fn connection(&self) -> Option<MultiplexedConnection> {
        match &*self.state() {
            RedisState::Up(redis) => Some(redis.clone()),
            RedisState::Lifting | RedisState::Down { .. } => None,
        }
    }

    fn is_up(&self) -> bool {
        matches!(&*self.state(), RedisState::Up(_))
    }

    /// Connects in the background, if the pause is over: no request waits for it.
    fn lift(self: &Arc<Self>, tasks: &TaskTracker) {
        {
            let mut state = self.state();
            match &*state {
                RedisState::Up(_) | RedisState::Lifting => return,
                RedisState::Down { until: Some(until) } if Instant::now() < *until => return,
                RedisState::Down { .. } => *state = RedisState::Lifting,
            }
        }
        let line = Arc::clone(self);
        tasks.spawn(async move {
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(Some(FRONT_CONNECT_MAX))
                .set_response_timeout(Some(FRONT_CONNECT_MAX));
            let connecting = line.client.get_multiplexed_async_connection_with_config(&config);
            let next = match timeout(FRONT_CONNECT_MAX, connecting).await {
                Ok(Ok(redis)) => {
                    line.log_recovery();
                    RedisState::Up(redis)
                }
                Ok(Err(error)) => line.down(error.category()),
                Err(_) => line.down("no connection in time"),
            };
            *line.state() = next;
        });
    }

    /// Logs that Redis answers: at the first answer, and at the first answer after a failure was logged.
    fn log_recovery(&self) {
        let mut said = self.said.lock().expect("no panic happens under this lock");
        if !said.answers {
            said.answers = true;
            tracing::info!("connected to Redis: it answers duplicates of finished events");
        }
    }

    /// Records an answer.
    fn works(&self) {
        // Usually this only reads a number that does not change.
        if self.failed.load(Ordering::Relaxed) > 0 {
            self.failed.store(0, Ordering::Relaxed);
        }
    }

    /// Records a failure: Redis is not used for a while.
    fn rest(&self, why: &str) {
        let mut state = self.state();
        if let RedisState::Up(_) = &*state {
            *state = self.down(why);
        }
    }

    /// Takes Redis out of use, for longer each time. Logged at most once per interval, so that a
    /// Redis that answers now and then does not fill the log.
    fn down(&self, why: &str) -> RedisState {
        let failed = self.failed.fetch_add(1, Ordering::Relaxed).min(16);
        let mut said = self.said.lock().expect("no panic happens under this lock");
        if said.fails_at.is_none_or(|at| at.elapsed() > FRONT_LOG_EVERY) {
            *said = CacheReply { fails_at: Some(Instant::now()), answers: false };
            tracing::warn!(
                "Redis failed ({why}) and is paused: the database answers duplicates until Redis is tried again"
            );
        }
        let rest = FRONT_REST.saturating_mul(1 << failed).min(FRONT_REST_MAX);
        RedisState::Down { until: Some(Instant::now() + rest) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, RedisState> {
        self.state.lock().expect("no panic happens under this lock")
    }
}
