//! Redis in front of a shared database: it answers duplicates of events whose work has ended, and
//! nothing else. What it says counts only with a proof that we wrote it, in this epoch of the
//! database ([`entry`]); whatever else it does, be slow, lie, forget or vanish, costs a bounded
//! moment and changes no answer.
//!
//! Entries are written after the commit they tell of, behind the answer, and lost without a trace
//! when Redis is not there. A miss proves nothing: then the database decides.

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

pub(crate) use entry::{Entry, Seal};
pub use probe::RedisReport;

use crate::limits::{
    FRONT_ANSWER_MAX, FRONT_ASKED_MAX, FRONT_CONNECT_MAX, FRONT_ENTRY_AGE_MAX, FRONT_LOG_EVERY,
    FRONT_REST, FRONT_REST_MAX, FRONT_WAITING_MAX,
};

/// A Redis, as far as we trust one.
pub(crate) struct RedisCache {
    line: Arc<Line>,
    asked: mpsc::Sender<CacheLookup>,
    told: mpsc::Sender<CacheEntries>,
    age_max: Duration,
    keys_kept: Option<Duration>,
    counted: Counted,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// What questions came to, key by key.
struct Counted {
    hit: metrics::Counter,
    miss: metrics::Counter,
    failed: metrics::Counter,
}

impl Counted {
    fn new() -> Self {
        let of = |outcome| metrics::counter!("hapax_redis_answers_total", "outcome" => outcome);
        Self { hit: of("hit"), miss: of("miss"), failed: of("failed") }
    }
}

/// Somebody who wants to know what stands under these keys, in their order.
struct CacheLookup {
    keys: Vec<KeyHash>,
    answer: oneshot::Sender<Vec<Option<Vec<u8>>>>,
}

/// Entries to be written under their keys; none where there is to be none.
type CacheEntries = Vec<(KeyHash, Option<Vec<u8>>)>;

/// The URL was no Redis URL. Its text is not repeated: it may hold a password.
#[derive(Debug, thiserror::Error)]
#[error("redis_url is not a Redis URL: {0}")]
pub(crate) struct RedisUrlError(String);

impl RedisCache {
    /// Takes up the connection in the background: whether Redis is there now does not matter.
    /// `keys_kept`: the shortest time that a key is kept. An entry counts far less long than that, and
    /// there is none of a key that may be pruned before: it would say "duplicate" of what is new again.
    pub(crate) fn open(url: &str, keys_kept: Option<Duration>) -> Result<Self, RedisUrlError> {
        let client =
            Client::open(url).map_err(|error| RedisUrlError(error.category().to_owned()))?;
        let age_max =
            keys_kept.map_or(FRONT_ENTRY_AGE_MAX, |kept| FRONT_ENTRY_AGE_MAX.min(kept / 2));
        let line = Arc::new(Line {
            client,
            state: Mutex::new(State::Down { until: None }),
            failed: AtomicU32::new(0),
            said: Mutex::new(CacheReply { fails_at: None, answers: false }),
        });
        let (asked, questions) = mpsc::channel(FRONT_WAITING_MAX);
        let (told, telling) = mpsc::channel(FRONT_WAITING_MAX);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(ask_together(Arc::clone(&line), questions, stop.clone()));
        tasks.spawn(tell(Arc::clone(&line), tasks.clone(), telling, age_max, stop.clone()));
        tasks.close();
        line.lift(&tasks);
        let counted = Counted::new();
        Ok(Self { line, asked, told, age_max, keys_kept, counted, stop, tasks })
    }

    /// What is known under each key, in their order. Never longer than a moment, never an error.
    pub(crate) async fn ask(&self, seal: &Seal, keys: &[KeyHash]) -> Vec<Option<Entry>> {
        let Some(values) = self.values(keys).await else {
            self.counted.failed.increment(keys.len() as u64);
            return vec![None; keys.len()];
        };
        let mut values = values.into_iter();
        let open = |key: &KeyHash| Entry::open(&values.next()??, seal, key, self.age_max);
        let entries: Vec<_> = keys.iter().map(open).collect();
        let hits = entries.iter().flatten().count() as u64;
        self.counted.hit.increment(hits);
        self.counted.miss.increment(keys.len() as u64 - hits);
        entries
    }

    /// None at all where Redis is not to be had. Whoever asks waits for the question that is on its way
    /// and for its own, and each of them is given up after a moment.
    async fn values(&self, keys: &[KeyHash]) -> Option<Vec<Option<Vec<u8>>>> {
        if !self.line.is_up() {
            self.line.lift(&self.tasks);
            return None;
        }
        let (answer, values) = oneshot::channel();
        self.asked.try_send(CacheLookup { keys: keys.to_vec(), answer }).ok()?;
        values.await.ok()
    }

    /// Tells of events that are committed and ended, behind the answer. Dropped when more waits
    /// than Redis takes.
    pub(crate) fn tell(&self, seal: &Seal, ended: impl IntoIterator<Item = (KeyHash, Entry)>) {
        let lasts = |(_, entry): &(KeyHash, Entry)| {
            self.keys_kept.is_none_or(|kept| {
                let received_at =
                    Timestamp::from_millisecond((entry.known.id.0.as_u128() >> 80) as i64);
                let age = received_at.map(|at| entry.written_at.duration_since(at).unsigned_abs());
                age.is_ok_and(|age| age + self.age_max < kept)
            })
        };
        let sealed = |(key, entry): (KeyHash, Entry)| (key, Some(entry.sealed(seal, &key)));
        self.send(ended.into_iter().filter(lasts).map(sealed).collect());
    }

    /// What was told under these keys does not hold any more. As good as it goes: an entry that stays
    /// is still one of an event that was committed.
    pub(crate) fn untell(&self, keys: impl IntoIterator<Item = KeyHash>) {
        self.send(keys.into_iter().map(|key| (key, None)).collect());
    }

    fn send(&self, telling: CacheEntries) {
        if !telling.is_empty() {
            let _full = self.told.try_send(telling);
        }
    }

    /// Ends what runs behind; what was not written is not missed.
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

/// Whoever asks while an answer is on its way asks together with the others: one question for Redis,
/// however many requests want to know. Questions that are dropped are answered with nothing.
async fn ask_together(
    line: Arc<Line>,
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

/// Entries outlive no node's trust in them by much, so Redis may forget them by itself.
async fn tell(
    line: Arc<Line>,
    tasks: TaskTracker,
    mut telling: mpsc::Receiver<CacheEntries>,
    age_max: Duration,
    stop: CancellationToken,
) {
    while let Some(Some(first)) = stop.run_until_cancelled(telling.recv()).await {
        let Some(mut redis) = line.connection() else {
            line.lift(&tasks);
            continue;
        };
        let mut pipe = redis::pipe();
        let more = std::iter::from_fn(|| telling.try_recv().ok()).take(FRONT_WAITING_MAX);
        for (key, value) in std::iter::once(first).chain(more).flatten() {
            let seconds = age_max.as_secs().max(1);
            let name = name_of(&key);
            match value {
                Some(value) => pipe.cmd("SET").arg(&name).arg(value).arg("EX").arg(seconds),
                None => pipe.cmd("DEL").arg(&name),
            };
            pipe.ignore();
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

/// The one connection, shared by all who ask and tell.
struct Line {
    client: Client,
    state: Mutex<State>,
    /// How often it failed since it last answered: it rests longer each time.
    failed: AtomicU32,
    said: Mutex<CacheReply>,
}

/// What the log says of it.
struct CacheReply {
    /// When it was last said that it fails.
    fails_at: Option<Instant>,
    /// Whether the last that was said is that it answers.
    answers: bool,
}

enum State {
    Up(MultiplexedConnection),
    /// Somebody is connecting.
    Lifting,
    /// Not tried again before this.
    Down {
        until: Option<Instant>,
    },
}

impl Line {
    fn connection(&self) -> Option<MultiplexedConnection> {
        match &*self.state() {
            State::Up(redis) => Some(redis.clone()),
            State::Lifting | State::Down { .. } => None,
        }
    }

    fn is_up(&self) -> bool {
        matches!(&*self.state(), State::Up(_))
    }

    /// Connects in the background, if it is time: nobody waits for it.
    fn lift(self: &Arc<Self>, tasks: &TaskTracker) {
        {
            let mut state = self.state();
            match &*state {
                State::Up(_) | State::Lifting => return,
                State::Down { until: Some(until) } if Instant::now() < *until => return,
                State::Down { .. } => *state = State::Lifting,
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
                    line.say_that_it_answers();
                    State::Up(redis)
                }
                Ok(Err(error)) => line.down(error.category()),
                Err(_) => line.down("no connection in time"),
            };
            *line.state() = next;
        });
    }

    /// Once at first, and then once for each time that it was said to fail.
    fn say_that_it_answers(&self) {
        let mut said = self.said.lock().expect("no panic happens under this lock");
        if !said.answers {
            said.answers = true;
            tracing::info!("Redis answers: it may say what is a duplicate");
        }
    }

    /// It answered.
    fn works(&self) {
        // Mostly this is all: a look at a number that nobody changes.
        if self.failed.load(Ordering::Relaxed) > 0 {
            self.failed.store(0, Ordering::Relaxed);
        }
    }

    /// It failed: for a while nobody asks it.
    fn rest(&self, why: &str) {
        let mut state = self.state();
        if let State::Up(_) = &*state {
            *state = self.down(why);
        }
    }

    /// Out of use for longer each time. Logged once, and not again and again of one that answers now
    /// and then.
    fn down(&self, why: &str) -> State {
        let failed = self.failed.fetch_add(1, Ordering::Relaxed).min(16);
        let mut said = self.said.lock().expect("no panic happens under this lock");
        if said.fails_at.is_none_or(|at| at.elapsed() > FRONT_LOG_EVERY) {
            *said = CacheReply { fails_at: Some(Instant::now()), answers: false };
            tracing::warn!("Redis is left alone for a while ({why}): the database answers");
        }
        let rest = FRONT_REST.saturating_mul(1 << failed).min(FRONT_REST_MAX);
        State::Down { until: Some(Instant::now() + rest) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic happens under this lock")
    }
}
