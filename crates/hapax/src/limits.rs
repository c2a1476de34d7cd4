//! What holds where neither a config nor code says otherwise; one truth for the server and for the
//! library.

use std::time::Duration;

/// The wait before each attempt: a day and a half in all.
pub const RETRY_DEFAULT: [Duration; 7] = [
    Duration::ZERO,
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(2 * 3_600),
    Duration::from_secs(10 * 3_600),
    Duration::from_secs(24 * 3_600),
];

/// How long one attempt may take.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);

/// How long a transaction on SQLite may take: it shares the writer with the acks.
pub const SQLITE_TIMEOUT_DEFAULT: Duration = Duration::from_millis(100);

/// How long a claim lasts unless renewed.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(30);

/// How many attempts of one handler run at once.
pub const CONCURRENCY_DEFAULT: usize = 16;

/// How long events, and keys of senders that sign a time, are kept: far beyond any sender's retries.
pub const KEEP_DEFAULT: Duration = Duration::from_secs(90 * 86_400);

pub use hapax_engine::limits::DRAIN_DEFAULT;
