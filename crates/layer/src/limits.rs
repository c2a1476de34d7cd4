//! Every bound of this crate that is not configured, with its reason.

use std::time::Duration;

/// The longest name of a caller that is written out. Names are short; what is longer is a token, and
/// only its hash is kept.
pub(crate) const PRINCIPAL_BYTES_MAX: usize = 128;

/// The longest that a client is told to stay away while its request runs: work mostly ends long
/// before its lease does.
pub(crate) const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);

/// How soon to come back when a caller has as many keys kept as it may: they go one by one with their
/// ttl, which is hours.
pub(crate) const RETRY_AFTER_QUOTA: Duration = Duration::from_secs(60);

/// How soon to come back when the ledger cannot be asked.
pub(crate) const RETRY_AFTER_UNAVAILABLE: Duration = Duration::from_secs(2);

/// The pause before the first second look at a running request, which doubles up to the last one. An
/// end in this process is told at once; this is for those in others.
pub(crate) const POLL_FIRST: Duration = Duration::from_millis(25);
/// See [`POLL_FIRST`].
pub(crate) const POLL_MAX: Duration = Duration::from_secs(1);

/// The number of notifiers that waiting requests share. Keys that share one wake each other up for
/// nothing; one notifier for each key would have to be removed again.
pub(crate) const NOTIFY_SHARDS: usize = 64;

/// How many times over a path may be percent-encoded. No client means more than two; each round costs
/// a pass over the path.
pub(crate) const DECODE_ROUNDS_MAX: usize = 8;
