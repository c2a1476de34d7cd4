//! Defaults that the server and the library share.

use std::time::Duration;

/// The wait before each attempt: a day and a half in total.
pub const RETRY_DEFAULT: [Duration; 7] = [
    Duration::ZERO,
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(2 * 3_600),
    Duration::from_secs(10 * 3_600),
    Duration::from_secs(24 * 3_600),
];

/// The timeout of one attempt.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);

/// The timeout of a transaction on SQLite, whose one writer also stores new events.
pub const SQLITE_TIMEOUT_DEFAULT: Duration = Duration::from_millis(100);

/// How long a claim lasts unless renewed.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(30);

/// Concurrent attempts of one handler.
pub const CONCURRENCY_DEFAULT: usize = 16;

/// How long events, and keys of senders that sign a time, are kept: longer than any sender retries.
pub const KEEP_DEFAULT: Duration = Duration::from_secs(90 * 86_400);

pub use hapax_engine::limits::DRAIN_DEFAULT;
