//! The commands of the writer, and the handles that send them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hapax_core::KeyHash;
use hapax_core::store::{Ingest, StoreError, Verdict};
#[cfg(test)]
use rusqlite::Connection;
use tokio::sync::oneshot;

use super::command_queue::{NotReceived, QueueReceiver, QueueSender, command_queue};
use super::{Next, Writer, WriterEnded, unavailable};
use crate::limits::WAITING_MAX;
use crate::sqlite::open::{DatabaseLocation, OpenError};
use crate::sqlite::{Clock, Shared};

/// The writer thread, and the sender of its commands.
#[derive(Debug)]
pub(in crate::sqlite) struct WriterHandle {
    sender: WriterSender,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Sends commands to the writer thread.
#[derive(Debug, Clone)]
pub(in crate::sqlite) struct WriterSender {
    commands: QueueSender<Command>,
    waiting: Arc<AtomicUsize>,
    /// Events and slices that were sent.
    demand: Arc<AtomicU64>,
}

impl WriterSender {
    /// Passes a request to the writer, which answers it.
    pub(in crate::sqlite) fn ingest(&self, ingest: Ingest, answer: AnswerSender<Vec<Verdict>>) {
        self.demand.fetch_add(1, Ordering::Relaxed);
        if let Err(unsent) = self.send_or_return(Command::Ingest(ingest, answer)) {
            let (command, why) = *unsent;
            refuse(command, &why);
        }
    }

    /// Asks for the waiting copies to be written now, once until they are taken. A full queue may drop the
    /// request: copies are flushed periodically anyway.
    pub(in crate::sqlite) fn flush_soon(&self) {
        let _ = self.send(Command::FlushCopies);
    }

    fn send(&self, command: Command) -> Result<(), StoreError> {
        self.send_or_return(command).map_err(|unsent| unsent.1)
    }

    /// Sends a command unless too many wait.
    fn send_or_return(&self, command: Command) -> Result<(), Box<(Command, StoreError)>> {
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(Box::new((command, StoreError::Busy)));
        }
        let sent = self.commands.send(command);
        sent.map_err(|command| Box::new((command, StoreError::Closed)))
    }

    /// Asks the writer to end, after everything that waits.
    fn close(&self, closed: oneshot::Sender<()>) -> bool {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.commands.send(Command::Close(closed)).is_ok()
    }
}

/// The commands that wait. Their number is bounded by [`WAITING_MAX`].
pub(super) struct Commands {
    queue: QueueReceiver<Command>,
    waiting: Arc<AtomicUsize>,
}

impl Commands {
    pub(super) fn try_recv(&self) -> Option<Command> {
        let command = self.queue.try_receive()?;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(command)
    }

    /// Looks for a command for a moment before [`Commands::receive_within`] lets the thread sleep.
    pub(super) fn receive_soon(&self, moment: Duration, at_most: Duration) -> Next {
        let began = Instant::now();
        while began.elapsed() < moment {
            if self.waiting.load(Ordering::Relaxed) > 0
                && let Some(command) = self.try_recv()
            {
                return Next::Command(command);
            }
            // Another thread that could run on this core goes first.
            std::thread::yield_now();
        }
        self.receive_within(at_most)
    }

    pub(super) fn receive_within(&self, at_most: Duration) -> Next {
        match self.queue.receive_within(at_most) {
            Ok(command) => {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                Next::Command(command)
            }
            Err(NotReceived::TimedOut) => Next::Housekeeping,
            Err(NotReceived::NoSenderLeft) => Next::NobodyLeft,
        }
    }
}

pub(super) type AnswerSender<T> = oneshot::Sender<Result<T, StoreError>>;

/// Called with the writer, or with the reason why the writer is not available.
pub(super) type Slice =
    Box<dyn FnOnce(Result<&mut Writer, StoreError>) -> rusqlite::Result<()> + Send>;

/// Called with the writer inside the batch's transaction, or with the reason why the writer is not
/// available.
pub(super) type BatchedAct = Box<
    dyn FnOnce(Result<&mut Writer, StoreError>) -> rusqlite::Result<BatchResult<Answerer>> + Send,
>;

/// Answers a batched act when its transaction has ended.
pub(super) type Answerer = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// The result of a batched act.
pub(in crate::sqlite) struct BatchResult<T> {
    pub(super) value: T,
    pub(super) wrote: bool,
    /// Bytes that the act read and holds until the batch has ended.
    pub(super) bytes: usize,
    pub(super) kind: ActKind,
}

/// The kinds of batched acts. Each has its own points at which a test ends the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sqlite) enum ActKind {
    /// An act on a reservation.
    Reservation,
    /// A message was published.
    Publish,
    /// Deliveries were settled and claimed.
    Exchange,
}

impl<T> BatchResult<T> {
    /// The act wrote: it must be on disk before its caller gets the answer.
    pub(in crate::sqlite) fn wrote(value: T) -> Self {
        Self { value, wrote: true, bytes: 0, kind: ActKind::Reservation }
    }

    /// The act only read: it needs no commit.
    pub(in crate::sqlite) fn only_read(value: T) -> Self {
        Self { value, wrote: false, bytes: 0, kind: ActKind::Reservation }
    }

    /// Declares how many bytes the act holds.
    pub(in crate::sqlite) fn holding(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// The act is of this kind.
    pub(in crate::sqlite) fn of(self, kind: ActKind) -> Self {
        Self { kind, ..self }
    }
}

pub(super) enum Command {
    Ingest(Ingest, AnswerSender<Vec<Verdict>>),
    /// An act that shares the batch's transaction, and the number of its bytes.
    Batched(usize, BatchedAct),
    /// A batched act that lets waiting events go first.
    BehindEvents(BatchedAct),
    Find(Vec<KeyHash>, AnswerSender<Vec<Option<i64>>>),
    FlushCopies,
    /// A closure with its own transactions, which answers its caller itself, even when it is refused.
    Slice(Slice),
    Close(oneshot::Sender<()>),
    /// Lets a test reach the writer's own connection, to make it fail.
    #[cfg(test)]
    Tamper(Box<dyn FnOnce(&mut Connection) + Send>),
    #[cfg(test)]
    MergeNow,
}

impl WriterHandle {
    pub(in crate::sqlite) fn start(
        place: Arc<DatabaseLocation>,
        shared: Arc<Shared>,
        clock: Clock,
    ) -> Result<Self, OpenError> {
        let (commands, queue) = command_queue();
        let sender = WriterSender { commands, waiting: Arc::default(), demand: Arc::default() };
        let commands = Commands { queue, waiting: Arc::clone(&sender.waiting) };
        let writer = Writer::open(place, shared, clock)?;
        let path = writer.place.path().to_owned();
        let thread = std::thread::Builder::new()
            .name("hapax-writer".into())
            .spawn(move || {
                let _last_word = WriterEnded(Arc::clone(&writer.shared));
                writer.run(&commands);
            })
            .map_err(|source| OpenError::Io { path, source })?;
        Ok(Self { sender, thread: Mutex::new(Some(thread)) })
    }

    /// The sender of its commands.
    pub(in crate::sqlite) fn sender(&self) -> WriterSender {
        self.sender.clone()
    }

    /// See [`WriterSender::ingest`].
    pub(in crate::sqlite) fn ingest(&self, ingest: Ingest, answer: AnswerSender<Vec<Verdict>>) {
        self.sender.ingest(ingest, answer);
    }

    /// The rows with these keys.
    pub(in crate::sqlite) async fn find(
        &self,
        keys: Vec<KeyHash>,
    ) -> Result<Vec<Option<i64>>, StoreError> {
        let (answer, found) = oneshot::channel();
        self.send(Command::Find(keys, answer))?;
        found.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Runs `act` on the writer, in a transaction that is committed before this returns. Dropping
    /// the future does not undo it.
    pub(in crate::sqlite) async fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.slice(move |writer| writer.in_transaction(act)).await
    }

    /// Runs `slice` on the writer between two batches; it manages its own transactions.
    pub(in crate::sqlite) async fn slice<T: Send + 'static>(
        &self,
        slice: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.sender.demand.fetch_add(1, Ordering::Relaxed);
        self.behind(slice).await
    }

    /// Runs `act` in the transaction of the next batch, and answers once that is committed. `act`
    /// must neither commit nor roll back. Dropping the future does not undo it.
    pub(in crate::sqlite) async fn run_batched<T: Send + 'static>(
        &self,
        bytes: usize,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<BatchResult<T>> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.batched(act, |batched| Command::Batched(bytes, batched)).await
    }

    /// Like [`WriterHandle::run_batched`], for an act that may take a while. Events that wait when the writer
    /// reaches it are committed first.
    pub(in crate::sqlite) async fn run_behind_events<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<BatchResult<T>> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.batched(act, Command::BehindEvents).await
    }

    async fn batched<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<BatchResult<T>> + Send + 'static,
        command: impl FnOnce(BatchedAct) -> Command,
    ) -> Result<T, StoreError> {
        self.sender.demand.fetch_add(1, Ordering::Relaxed);
        let (answer, done) = oneshot::channel();
        let batched: BatchedAct = Box::new(move |writer| match writer.map(act) {
            Ok(Ok(BatchResult { value, wrote, bytes, kind })) => {
                let answerer: Answerer = Box::new(move |ended: Result<(), StoreError>| {
                    let _ = answer.send(ended.map(|()| value));
                });
                Ok(BatchResult { value: answerer, wrote, bytes, kind })
            }
            Ok(Err(error)) => {
                let _ = answer.send(Err(unavailable(&error)));
                Err(error)
            }
            Err(refusal) => {
                let _ = answer.send(Err(refusal));
                Ok(BatchResult::only_read(Box::new(|_| {})))
            }
        });
        self.send(command(batched))?;
        done.await.unwrap_or(Err(StoreError::Closed))
    }

    /// How many events and slices were sent, except those of [`WriterHandle::behind`].
    pub(in crate::sqlite) fn foreground_requests(&self) -> u64 {
        self.sender.demand.load(Ordering::Relaxed)
    }

    /// Like [`WriterHandle::slice`], for background work: it does not count as demand.
    pub(in crate::sqlite) async fn behind<T: Send + 'static>(
        &self,
        slice: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, done) = oneshot::channel();
        self.send(Command::Slice(Box::new(move |writer| match writer.map(slice) {
            Ok(Ok(value)) => {
                let _ = answer.send(Ok(value));
                Ok(())
            }
            Ok(Err(error)) => {
                let _ = answer.send(Err(unavailable(&error)));
                Err(error)
            }
            Err(refusal) => {
                let _ = answer.send(Err(refusal));
                Ok(())
            }
        })))?;
        done.await.unwrap_or(Err(StoreError::Closed))
    }

    /// See [`WriterSender::flush_soon`].
    pub(in crate::sqlite) fn flush_soon(&self) {
        self.sender.flush_soon();
    }

    pub(in crate::sqlite) async fn close(&self) {
        let (closed, wait) = oneshot::channel();
        if self.sender.close(closed) {
            let _ = wait.await;
        }
        let thread = self.thread.lock().expect("no panic happens under this lock").take();
        if let Some(thread) = thread {
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the writer panicked");
            }
        }
    }

    /// The thread, so that a test can wait for its end without closing the store.
    #[cfg(test)]
    pub(in crate::sqlite) fn take_thread(&self) -> Option<JoinHandle<()>> {
        self.thread.lock().expect("no panic happens under this lock").take()
    }

    #[cfg(test)]
    pub(in crate::sqlite) fn merge_now(&self) {
        self.send(Command::MergeNow).expect("the writer listens");
    }

    #[cfg(test)]
    pub(in crate::sqlite) fn tamper(&self, tamper: impl FnOnce(&mut Connection) + Send + 'static) {
        self.send(Command::Tamper(Box::new(tamper))).expect("the writer listens");
    }

    fn send(&self, command: Command) -> Result<(), StoreError> {
        self.sender.send(command)
    }
}

pub(super) fn refuse(command: Command, why: &StoreError) {
    match command {
        Command::Ingest(_, answer) => drop(answer.send(Err(why.clone()))),
        Command::Find(_, answer) => drop(answer.send(Err(why.clone()))),
        Command::Batched(_, batched) | Command::BehindEvents(batched) => {
            drop(batched(Err(why.clone())));
        }
        Command::Slice(slice) => drop(slice(Err(why.clone()))),
        Command::FlushCopies => {}
        Command::Close(closed) => drop(closed.send(())),
        #[cfg(test)]
        Command::Tamper(_) | Command::MergeNow => {}
    }
}
