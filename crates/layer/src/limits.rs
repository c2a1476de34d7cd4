//! Every bound of this crate that is not configured, with its reason.

use std::time::Duration;

/// The longest name of a caller that is stored as text. Names are short; a longer value is likely a
/// token, and only its hash is stored.
pub(crate) const PRINCIPAL_BYTES_MAX: usize = 128;

/// The longest Retry-After while a request is in progress: most requests end long before their
/// lease.
pub(crate) const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);

/// The Retry-After of a caller over its quota. Its keys expire one by one, each after its ttl of
/// hours.
pub(crate) const RETRY_AFTER_QUOTA: Duration = Duration::from_secs(60);

/// The Retry-After while the ledger is unavailable. The time is shorter than for senders of webhooks,
/// because a client of an API waits for the answer.
pub(crate) const RETRY_AFTER_UNAVAILABLE: Duration = Duration::from_secs(2);

/// The first interval at which a waiting request polls the ledger. The interval doubles up to [`POLL_MAX`].
/// A request that ends in this process wakes its waiters at once. Polling finds the end of a request in
/// another process.
pub(crate) const POLL_FIRST: Duration = Duration::from_millis(25);
/// See [`POLL_FIRST`].
pub(crate) const POLL_MAX: Duration = Duration::from_secs(1);

/// The number of notifiers that waiting requests share. Requests for different keys that share a
/// notifier wake each other needlessly. With one notifier for each key, unused notifiers would have
/// to be removed.
pub(crate) const NOTIFY_SHARDS: usize = 64;

/// How often a path may be percent-encoded over itself. No client needs more than two rounds, and each
/// round costs a pass over the path.
pub(crate) const DECODE_ROUNDS_MAX: usize = 8;
