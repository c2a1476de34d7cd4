//! The stores of Hapax. Three stores implement the traits of [`hapax_core::store`]:
//! [`MemoryStore`], the readable model of a store; [`SqliteStore`], the durable embedded database;
//! and [`PgStore`], one PostgreSQL that many nodes share. One conformance suite
//! (`tests/conformance`) runs on all of them.

mod columns;
mod copies;
mod copy_pacing;
mod dead_groups;
mod file_permissions;
mod key_hasher;
mod known_nodes;
mod memory;
mod operator_acts;
mod page_search;
mod postgres;
mod recent;
mod redis_cache;
mod redis_ledger;
mod sealed_values;
mod sqlite;
mod stored_answer;
mod transact;
mod wait;

#[cfg(test)]
extern crate self as hapax_store;
#[cfg(test)]
#[allow(dead_code)]
#[path = "../tests/conformance/harness.rs"]
mod harness;

pub use file_permissions::private_dir;
pub use memory::MemoryStore;
pub use postgres::{
    HandlerRoleReport, MigrationStatus, PgDb, PgDbError, PgOpenError, PgOptions, PgReport, PgStore,
    PgTx, PoolSizes,
};
pub use redis_cache::RedisReport;
pub use redis_ledger::{RedisLedger, RedisLedgerError};
pub use sealed_values::{SealedOwner, SealedValue};
pub use sqlite::{Clock, Db, DbError, OpenError, SqliteOptions, SqliteStore, Tx};
pub use transact::{Answering, Committed, Failure, JobRight, KeyRight, Transact, TxError};

pub mod limits {
    //! Every bound of the stores, each with its reason.

    use std::time::Duration;

    use jiff::SignedDuration;

    /// Requests that may wait for the writer: 1 to 2 s of work at full rate. Beyond that the sender
    /// is asked to retry, because an answer would come too late.
    pub const WAITING_MAX: usize = 16_384;

    /// Receipts in one commit: a larger batch saves no more and only delays the answer.
    pub const BATCH_RECEIPTS_MAX: usize = 512;

    /// How many waiting requests justify a commit while another commit runs. A commit costs the
    /// shared database as much as the rows of several requests, so fewer requests wait for the next
    /// commit instead.
    pub const WORTH_A_COMMIT: usize = 100;

    /// How long a request with an event waits for its commit in a shared database, the queue
    /// included. Most senders give up after five to ten seconds: before that they get a 503 and
    /// retry.
    pub const ACK_MAX: Duration = Duration::from_secs(5);

    /// The longest value that a handler's statement reads or builds on SQLite, unless `max_body` asks
    /// for more: twice the largest object that is refetched. One SQL function over such a value takes
    /// well under a second, and acks wait that long.
    pub const STATEMENT_VALUE_BYTES_MAX: usize = 32 << 20;

    /// Body bytes in one commit, so that a few large bodies do not delay every other request.
    pub const BATCH_BYTES_MAX: usize = 4 << 20;

    /// Keys held in memory before they are merged into the tree: large enough that a merge touches
    /// each page for several keys, small enough to stay a few megabytes.
    pub const FRESH_KEYS_MAX: usize = 200_000;

    /// Keys in the young tree before they are moved to the large one. A merge rewrites the whole
    /// young tree, and a move rewrites the whole large one. So the limit is several merges, and far
    /// below the tens of millions of keys that a store may hold.
    pub const YOUNG_KEYS_MAX: usize = 1_600_000;

    /// Keys merged between two batches of acks: about a millisecond of the writer's time.
    pub const MERGE_CHUNK: usize = 2_000;

    /// Deleted keys in the filter over the trees before the filter is made again without them: one to three
    /// megabytes. The deleted keys must also be more than half of all, so that a rebuild reads about as many
    /// keys as it removes, or fewer.
    pub const FILTER_DELETED_MAX: usize = 1_000_000;

    /// Bytes in one page of a new database. A page holds several events of a common size and is
    /// written to the log once or twice. With much larger pages, the commit of a single event would
    /// write unused bytes.
    pub const PAGE_BYTES: u32 = 8_192;

    /// Pages that the write-ahead log grows by before the checkpointer copies them back. Each round
    /// syncs the database file, so it must copy enough to be worth a sync. A commit that is synced
    /// meanwhile waits until the disk has written the round's pages: 2 MiB.
    pub const WAL_PAGES_CHECKPOINT: u32 = 250;

    /// Bytes of one write to the log: most commits fit, the memory for them stays small, and SQLite's own function
    /// can write less than 128 KiB.
    pub const LOG_WRITE_BYTES_MAX: usize = 96 << 10;

    /// Pages in the write-ahead log before the writer itself finishes the checkpoint, so that the
    /// log starts over. This bounds the file at about 32 MiB. A log that starts over is written in
    /// place, and syncing it needs no change of the file's own records.
    pub const WAL_PAGES_MAX: u32 = 4_000;

    /// Bytes of the log that are read and written again at a time after a failed sync: few calls, and
    /// little memory.
    pub const REWRITE_BYTES: usize = 1 << 20;

    /// How soon the writer tries again to start the log over when a reader blocked it.
    pub const LOG_RETRY: Duration = Duration::from_millis(50);

    /// How often a reader that keeps the log from starting over is logged.
    pub const LOG_WARN: Duration = Duration::from_secs(10);

    /// Copies of one event that are stored in full; further copies are only counted.
    pub const COPIES_IN_FULL: usize = 8;

    /// Conflicting bodies of one event that are stored; further ones are only counted.
    pub const CONFLICTS_IN_FULL: u64 = 8;

    /// Events whose copies may wait for a deferred write. Beyond this number, the write begins at
    /// once.
    pub const COPIES_WAITING_MAX: usize = 20_000;

    /// Records of copies that may wait while none can be written, because the disk hangs: a few seconds of a
    /// fast retry storm, in about 40 MB. Beyond this number, copies of events without a waiting copy are left
    /// out.
    pub const COPY_RECORDS_MAX: usize = 10 * COPIES_WAITING_MAX;

    /// Events whose copies are written between two batches of acks: about two milliseconds of the
    /// writer's time.
    pub const COPIES_CHUNK: usize = 500;

    /// The most new events in one commit that cause no pacing of copies: the machine has room for
    /// both.
    pub const FEW_EVENTS: usize = 4;

    /// How long copies are paced after a commit of more than [`FEW_EVENTS`]: several commits on a healthy disk.
    pub const PACED_FOR: Duration = Duration::from_millis(10);

    /// New events for each copy that is answered, while many new events arrive. A copy costs about as much
    /// as a new event, so a retry storm takes about a ninth of the machine's time from new events.
    pub const EVENTS_PER_COPY: usize = 8;

    /// How long a copy waits at most for its turn. The bound is far below every sender's timeout. With a shorter
    /// bound, many connections could have their copies answered without a turn, and would use most of the
    /// machine's time after all.
    pub const COPY_WAIT_MAX: Duration = Duration::from_millis(25);

    /// How long a copy may wait for its deferred write: less than a second, and no sooner than
    /// needed, because one write serves all copies of an event.
    pub const COPIES_FLUSH: Duration = Duration::from_millis(800);

    /// How long an operator's query waits for copies to be written: longer than a busy disk needs,
    /// and short enough for an operator to wait.
    pub const READ_FLUSH_MAX: Duration = Duration::from_secs(2);

    /// Memory for committed events whose duplicates are answered from memory, at 28 bytes each. This memory
    /// holds 262,144 events: the last hour of a source that sends 70 events a second.
    pub const RECENT_BYTES_MAX: usize = 7 << 20;

    /// Committed events whose jobs wait, held on SQLite so that their first claim reads nothing: more than arrive
    /// between two slices of an SQL handler.
    pub const FRESH_EVENTS_MAX: usize = 1_024;

    /// Bytes of the bodies and headers of these events.
    pub const FRESH_EVENTS_BYTES_MAX: usize = 2 << 20;

    /// How long a slice of SQL handlers may begin new jobs. Acks that arrive meanwhile wait for the
    /// slice. One job alone has its own timeout.
    pub const SQL_SLICE_MAX: Duration = Duration::from_millis(25);

    /// If the last attempt at an endpoint took less than this, the endpoint may get claims before
    /// its attempts in flight have ended. A change meanwhile, such as disabling the endpoint, takes
    /// effect that much later.
    pub const FAST_ATTEMPT_MAX: Duration = Duration::from_millis(50);

    /// How long an exchange of deliveries may begin new claims: acks that arrive meanwhile wait for the
    /// exchange.
    pub const EXCHANGE_SLICE_MAX: Duration = Duration::from_millis(10);

    /// Leases that are ended at a time: a few milliseconds of the writer's time.
    pub const EXPIRED_AT_ONCE: usize = 500;

    /// The most deliveries that a claim parks at one endpoint, besides those that it takes: this
    /// also bounds its time.
    pub const PARKED_AT_ONCE: usize = 256;

    /// After so many jobs that a claim sets aside because of their order, besides those that it takes, it reads each
    /// further lane once: this bounds its time. The functions of PostgreSQL have the same number for each lane, and a
    /// time for the whole claim.
    pub const JOBS_ASIDE_AT_ONCE: usize = 256;

    /// Parked deliveries that a claim readies after the order of their endpoint was changed.
    pub const UNPARKED_AT_ONCE: usize = 256;

    /// Endpoints whose waits are checked between two batches of acks after the clock was set back.
    pub const ENDPOINTS_CHECKED_AT_ONCE: usize = 500;

    /// Messages of the API in one commit: enough for all messages that arrive during the commit before.
    pub const PUBLISH_BATCH_MAX: usize = 64;

    /// Bytes of messages in one commit, so that a few large ones do not delay every other request.
    pub const PUBLISH_BATCH_BYTES_MAX: usize = 4 << 20;

    /// Fences of Idempotency-Keys that one write of their counter reserves on SQLite. A restart skips the
    /// unused ones.
    pub const FENCES_AT_ONCE: i64 = 256;

    /// Reservations and answers of Idempotency-Keys in one commit. The quota of a caller may be exceeded
    /// by as many keys as other commits are adding at the same time.
    pub const KEY_BATCH_MAX: usize = 128;

    /// Commits of Idempotency-Keys at the same time: while two run, further requests are batched.
    pub const KEY_BATCHES_AT_ONCE: usize = 2;

    /// How long a commit of several Idempotency-Keys waits for a transaction that has locked one of the keys.
    /// The other keys of the commit wait as long.
    pub const KEY_BATCH_LOCK_MAX: Duration = Duration::from_millis(50);

    /// Messages of the API that wait for a commit; further ones are refused.
    pub const PUBLISH_WAITING_MAX: usize = 4_096;

    /// How long a commit of several messages waits for a user's transaction that holds the id or the key
    /// of one of them. The other messages wait as long.
    pub const PUBLISH_BATCH_LOCK_MAX: Duration = Duration::from_millis(50);

    /// How long a message whose id or key is held then waits in its own transaction. After that its
    /// publisher should retry.
    pub const PUBLISH_ALONE_LOCK_MAX: Duration = Duration::from_secs(5);

    /// How long a sender waits at most before it claims deliveries: other nodes and users'
    /// transactions publish without notifying it.
    pub const DELIVERY_POLL_EVERY: Duration = Duration::from_millis(250);

    /// Prepared statements of a Rust handler that one connection keeps. A handler has fewer. The limit
    /// bounds what dynamically built SQL may cost the server.
    pub const HANDLER_STATEMENTS_MAX: usize = 256;

    /// The least time after which the server ends a transaction of a handler in Rust that sends it
    /// nothing: much longer than a busy node pauses between two statements.
    pub const HANDLER_IDLE_MIN: Duration = Duration::from_secs(1);

    /// How long a Redis lookup may take: the database answers in a few milliseconds, so a longer
    /// wait would save nothing.
    pub const FRONT_ANSWER_MAX: Duration = Duration::from_millis(15);

    /// How long connecting to Redis, or a background write to it, may take.
    pub const FRONT_CONNECT_MAX: Duration = Duration::from_secs(1);

    /// How long a Redis that failed is not used. A dead Redis costs at most one short wait in that
    /// time.
    pub const FRONT_REST: Duration = Duration::from_millis(500);

    /// How long a Redis that fails repeatedly is not used: short enough that an operator sees it
    /// recover soon.
    pub const FRONT_REST_MAX: Duration = Duration::from_secs(8);

    /// How often a failing Redis is logged.
    pub const FRONT_LOG_EVERY: Duration = Duration::from_secs(60);

    /// How long an entry in Redis is valid. Far below every retention of keys, so that no entry
    /// reports a duplicate of a key that was pruned.
    pub const FRONT_ENTRY_AGE_MAX: Duration = Duration::from_secs(6 * 3_600);

    /// Requests whose lookups are sent to Redis as one command.
    pub const FRONT_ASKED_MAX: usize = 256;

    /// Entries that are written to Redis as one pipeline: enough for several commits, and lookups do not
    /// wait long behind them.
    pub const FRONT_WRITTEN_MAX: usize = 1_024;

    /// Commits whose entries wait to be written to Redis, and requests that wait to look up;
    /// further ones skip Redis.
    pub const FRONT_WAITING_MAX: usize = 1_024;

    /// How long a slice of retention may begin new ranges: acks that arrive meanwhile wait for the
    /// slice.
    pub const PRUNE_SLICE_MAX: Duration = Duration::from_millis(2);

    /// How long one read for the API may take before it is cancelled.
    pub const READ_MAX: Duration = Duration::from_secs(5);

    /// The most events one page of a list holds.
    pub const PAGE_MAX: usize = 500;

    /// The most rows that one page of a list of deliveries reads on PostgreSQL: about 50 ms. A page that
    /// is not full by then still has a cursor.
    pub const LIST_ROWS_READ_MAX: usize = 10_000;

    /// How much more than its span of time a list or a plan reads on both sides. Rows are numbered in the
    /// order of their commits, which is nearly the order of their times: a request may overtake another
    /// one. Steps of the clock are added to this slack.
    pub const LIST_TIME_SLACK: Duration = Duration::from_secs(60);

    /// As [`LIST_TIME_SLACK`], for messages on PostgreSQL, where the time of a message is the start of
    /// its transaction.
    pub const MESSAGE_TIME_SLACK: SignedDuration = SignedDuration::from_hours(24);

    /// Rows of events that are read before the start of a request, to find the events that the request
    /// brought. Commits follow arrivals within milliseconds, so these rows cover seconds at a high rate, and
    /// reading them takes about 10 ms.
    pub const TRACE_ROWS_BEFORE: i64 = 1_000;

    /// Rows of events that are read after the start of a request; see [`TRACE_ROWS_BEFORE`].
    pub const TRACE_ROWS_AFTER: i64 = 20_000;

    /// Events whose values are read at once for the search index: a few milliseconds of a reader.
    pub const INDEX_READ: i64 = 500;

    /// Bytes of bodies that are read at once for the search index.
    pub const INDEX_READ_BYTES: usize = 4 << 20;

    /// Rows of the search index that are written between two batches of acks: about a millisecond of the writer's
    /// time.
    pub const INDEX_CHUNK: usize = 250;

    /// Events that one commit of the search index takes on PostgreSQL: some ten milliseconds of the database.
    pub const INDEX_STEP: usize = 2_000;

    /// The first walk of the search index on PostgreSQL indexes an event this long after the time that its
    /// node recorded. The walk misses no event of a node whose clock is behind, or whose commit is late, by
    /// less than this.
    pub const INDEX_SETTLED_AFTER: SignedDuration = SignedDuration::from_secs(5);

    /// The second walk of the search index indexes an event after this time. The clock of a working node
    /// is not further behind: a node with such a clock would refuse every signed time.
    pub const INDEX_CHECKED_AFTER: SignedDuration = SignedDuration::from_hours(1);

    /// A list with fewer rows than this is read as a whole, whatever span of time it is for. Reading the list
    /// takes about 3 ms.
    pub const LIST_WHOLE_MAX: i64 = 10_000;

    /// The most open jobs or deliveries that are collected and sorted for a list, in about 2 ms. If
    /// there are more, they are frequent enough to be found by reading rows from new to old.
    pub const LIST_SORTED_MAX: usize = 5_000;

    /// Steps back of the clock that are remembered for lists of a time.
    pub const CLOCK_STEPS_KEPT: usize = 100;

    /// Events that one query of a plan reads, in about 20 ms. The query may find none that the plan
    /// takes.
    pub const PLAN_SCAN: usize = 2_000;

    /// Events that one query reads for a plan that searches bodies, which may be a MiB each.
    pub const PLAN_SEARCH: usize = 200;

    /// Bodies that one slice of a plan reads: they are parsed before the slice is taken.
    pub const PLAN_BYTES: usize = 4 << 20;

    /// The largest step back of the clock that is ignored: it delays waiting jobs by no more than
    /// that.
    pub const CLOCK_STEP_MIN: Duration = Duration::from_secs(1);

    /// The longest wait between two slices of a plan: a slice of one event or delivery at the lowest rate, and
    /// the wait after a slice that met a lock.
    pub const SLICE_WAIT_MAX: Duration = Duration::from_secs(2);

    /// Due times that are corrected between two batches of acks after the clock was set back: a few
    /// milliseconds of the writer's time.
    pub const PULLED_IN_AT_ONCE: usize = 1_000;

    /// How long the writer waits between two attempts to write after a failed commit.
    pub const RECOVERY_WAIT: Duration = Duration::from_millis(200);
}
