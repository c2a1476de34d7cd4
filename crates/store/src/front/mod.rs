//! Redis in front of a shared database: it answers duplicates of events whose work has ended, and
//! nothing else. What it says counts only with a proof that we wrote it, in this epoch of the
//! database ([`entry`]); whatever else it does, be slow, lie, forget or vanish, costs a bounded
//! moment and changes no answer.
//!
//! Entries are written after the commit they tell of, behind the answer, and lost without a trace
//! when Redis is not there. A miss proves nothing: then the database decides.

mod entry;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::KeyHash;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use entry::{Entry, Seal};

use crate::limits::{
    FRONT_ANSWER_MAX, FRONT_CONNECT_MAX, FRONT_ENTRY_AGE_MAX, FRONT_REST, FRONT_WAITING_MAX,
};

/// A Redis, as far as we trust one.
pub(crate) struct Front {
    line: Arc<Line>,
    told: mpsc::Sender<Telling>,
    age_max: Duration,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// Entries to be written under their keys.
type Telling = Vec<(KeyHash, Vec<u8>)>;

/// The URL was no Redis URL. Its text is not repeated: it may hold a password.
#[derive(Debug, thiserror::Error)]
#[error("redis_url is not a Redis URL: {0}")]
pub(crate) struct FrontError(String);

impl Front {
    /// Takes up the connection in the background: whether Redis is there now does not matter.
    /// `keys_kept`: the shortest time that a key is kept; an entry counts far less long than that,
    /// or it would say "duplicate" of a key that was pruned.
    pub(crate) fn open(url: &str, keys_kept: Option<Duration>) -> Result<Self, FrontError> {
        let client = Client::open(url).map_err(|error| FrontError(error.category().to_owned()))?;
        let age_max =
            keys_kept.map_or(FRONT_ENTRY_AGE_MAX, |kept| FRONT_ENTRY_AGE_MAX.min(kept / 2));
        let line = Arc::new(Line { client, state: Mutex::new(State::Down { until: None }) });
        let (told, telling) = mpsc::channel(FRONT_WAITING_MAX);
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(tell(Arc::clone(&line), telling, age_max, stop.clone()));
        tasks.close();
        Ok(Self { line, told, age_max, stop, tasks })
    }

    /// What is known under each key, in their order. Never longer than a moment, never an error.
    pub(crate) async fn ask(&self, seal: &Seal, keys: &[KeyHash]) -> Vec<Option<Entry>> {
        let Some(mut redis) = self.line.connection() else {
            self.line.lift(&self.tasks);
            return vec![None; keys.len()];
        };
        let mut command = redis::cmd("MGET");
        for key in keys {
            command.arg(name_of(key).as_slice());
        }
        let asked = timeout(FRONT_ANSWER_MAX, command.query_async(&mut redis)).await;
        let values: Vec<Option<Vec<u8>>> = match asked {
            Ok(Ok(values)) => values,
            Ok(Err(error)) => {
                self.line.rest(error.category());
                Vec::new()
            }
            Err(_too_slow) => {
                self.line.rest("no answer in time");
                Vec::new()
            }
        };
        let mut values = values.into_iter();
        let open = |key: &KeyHash| Entry::open(&values.next()??, seal, key, self.age_max);
        keys.iter().map(open).collect()
    }

    /// Tells of events that are committed and ended, behind the answer. Dropped when more waits
    /// than Redis takes.
    pub(crate) fn tell(&self, seal: &Seal, ended: impl IntoIterator<Item = (KeyHash, Entry)>) {
        let sealed = |(key, entry): (KeyHash, Entry)| (key, entry.sealed(seal, &key));
        let telling: Telling = ended.into_iter().map(sealed).collect();
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

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Front")
    }
}

/// Entries outlive no node's trust in them by much, so Redis may forget them by itself.
async fn tell(
    line: Arc<Line>,
    mut telling: mpsc::Receiver<Telling>,
    age_max: Duration,
    stop: CancellationToken,
) {
    while let Some(Some(first)) = stop.run_until_cancelled(telling.recv()).await {
        let Some(mut redis) = line.connection() else { continue };
        let mut pipe = redis::pipe();
        let more = std::iter::from_fn(|| telling.try_recv().ok()).take(FRONT_WAITING_MAX);
        for (key, value) in std::iter::once(first).chain(more).flatten() {
            let seconds = age_max.as_secs().max(1);
            let name = name_of(&key);
            pipe.cmd("SET").arg(name.as_slice()).arg(value).arg("EX").arg(seconds).ignore();
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

/// The one connection, shared by all who ask: their questions travel together.
struct Line {
    client: Client,
    state: Mutex<State>,
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
                    tracing::info!("Redis answers: it may say what is a duplicate");
                    State::Up(redis)
                }
                Ok(Err(_)) | Err(_) => State::Down { until: Some(Instant::now() + FRONT_REST) },
            };
            *line.state() = next;
        });
    }

    /// It failed: for a while nobody asks it. Said once, by whoever took it down.
    fn rest(&self, why: &str) {
        let mut state = self.state();
        if let State::Up(_) = &*state {
            tracing::warn!("Redis is left alone for a moment ({why}): the database answers");
        }
        *state = State::Down { until: Some(Instant::now() + FRONT_REST) };
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no panic happens under this lock")
    }
}
