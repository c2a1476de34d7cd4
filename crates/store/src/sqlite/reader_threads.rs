//! The threads that read for operators, each with a connection of its own, apart from the writer.
//!
//! A page must never make a sender wait. So these threads give way: while the processors are busy, the threads that
//! accept events run first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use hapax_core::store::{Cause, StoreError};
use rusqlite::Connection;
use tokio::sync::{Semaphore, oneshot};

use super::open::{DatabaseLocation, OpenError};
use crate::limits::READ_MAX;

/// Threads for short queries; more queries wait.
const READERS: usize = 2;

/// Threads for lists that may search through many rows. Searches take turns, so that no number of them
/// keeps the short queries waiting.
const SEARCHERS: usize = 1;

/// How many steps of SQLite's virtual machine run between two checks of the clock: a few hundredths of a millisecond.
/// A check also yields the processor. A low priority alone is not enough: Linux lets a running thread finish its slice
/// of about 3 ms before a thread that was woken takes its place.
const STEPS_PER_LOOK: i32 = 1_000;

/// How far the niceness of these threads is above that of the threads that accept events. On a busy machine a reader
/// then gets about a tenth of the time that another thread gets. With a smaller share, pages would not load on a
/// machine that is overloaded.
#[cfg(target_os = "linux")]
const NICER: i32 = 10;

/// A query with the place for its answer.
type Query = Box<dyn FnOnce(&mut Connection) + Send>;

#[derive(Debug)]
pub(super) struct Readers {
    short: ReaderPool,
    searching: ReaderPool,
}

impl Readers {
    pub(super) fn open(place: &DatabaseLocation) -> Result<Self, OpenError> {
        Ok(Self {
            short: ReaderPool::start(place, READERS)?,
            searching: ReaderPool::start(place, SEARCHERS)?,
        })
    }

    /// Runs a query off the runtime's threads.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.short.run(query).await
    }

    /// As [`Readers::run`], for a query that may search through many rows.
    pub(super) async fn search<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.searching.run(query).await
    }

    /// Ends the threads once their queries have ended. Later queries are refused.
    pub(super) fn close(&self) {
        self.short.close();
        self.searching.close();
    }
}

/// Threads that take queries in turn.
#[derive(Debug)]
struct ReaderPool {
    /// One permit for each thread. A caller that gives up while it waits for a permit costs no query.
    free: Arc<Semaphore>,
    threads: Mutex<Option<Threads>>,
}

#[derive(Debug)]
struct Threads {
    queries: Sender<Query>,
    running: Vec<JoinHandle<()>>,
}

impl ReaderPool {
    fn start(place: &DatabaseLocation, count: usize) -> Result<Self, OpenError> {
        let (queries, waiting) = mpsc::channel();
        let waiting = Arc::new(Mutex::new(waiting));
        let running = (0..count).map(|_| {
            let conn = place.reader().map_err(|source| place.error(source))?;
            let waiting = Arc::clone(&waiting);
            let thread = std::thread::Builder::new().name("hapax-reader".into());
            thread
                .spawn(move || serve(conn, &waiting))
                .map_err(|source| OpenError::Io { path: place.path().to_owned(), source })
        });
        let running = running.collect::<Result<_, _>>()?;
        let threads = Mutex::new(Some(Threads { queries, running }));
        Ok(Self { free: Arc::new(Semaphore::new(count)), threads })
    }

    async fn run<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let turn = Arc::clone(&self.free).acquire_owned().await.map_err(|_| StoreError::Closed)?;
        let (answer, answered) = oneshot::channel();
        let query = Box::new(move |conn: &mut Connection| {
            // A query that panics drops its permit and its answer too.
            let _turn = turn;
            let deadline = Instant::now() + READ_MAX;
            let look = move || {
                std::thread::yield_now();
                Instant::now() > deadline
            };
            let read = conn.progress_handler(STEPS_PER_LOOK, Some(look)).and_then(|()| query(conn));
            let _ = answer.send(read);
        });
        self.pass(query)?;
        match answered.await {
            Ok(answer) => answer.map_err(|error| StoreError::Read(Cause::new(error))),
            Err(_) => Err(StoreError::Read("the query panicked".into())),
        }
    }

    fn pass(&self, query: Query) -> Result<(), StoreError> {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let threads = threads.as_ref().ok_or(StoreError::Closed)?;
        threads.queries.send(query).map_err(|_| StoreError::Closed)
    }

    fn close(&self) {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Threads { queries, running }) = threads else { return };
        drop(queries);
        for thread in running {
            if thread.join().is_err() {
                tracing::error!("a reader panicked");
            }
        }
    }
}

/// Runs queries until no more can come.
fn serve(mut conn: Connection, waiting: &Mutex<Receiver<Query>>) {
    give_way();
    loop {
        let query = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(query) = query else { return };
        // The panic was reported where it happened. The next query begins with its own statements.
        let _ = catch_unwind(AssertUnwindSafe(|| query(&mut conn)));
    }
}

/// Lowers the priority of the calling thread. On Linux each thread has its own priority; elsewhere the
/// priority belongs to the process and stays as it is.
fn give_way() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(NICER) {
        tracing::debug!(%error, "lowering the priority of a reader: {error}");
    }
}
