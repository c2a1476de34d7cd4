//! Every bound of the engine, each with its reason. Tests and the config can replace the values; no
//! other file of the engine defines a bound.

use std::num::NonZeroU32;
use std::time::Duration;

/// How long a shutdown waits for running requests and attempts: longer than a handler's timeout.
pub const DRAIN_DEFAULT: Duration = Duration::from_secs(30);

/// The limits of the connections of one listener.
#[derive(Debug, Clone)]
pub struct HttpLimits {
    /// Connections open at once. When all slots are in use, a slow or idle connection is closed for
    /// a new one. A new connection waits only if all others are running a request. An idle
    /// connection costs some 20 KB, so this bounds memory at about 80 MB.
    pub connections_max: usize,
    /// The time from the first byte of a head to its end; for the first head, from the start of the
    /// connection. Real senders need milliseconds; a slow client holds a connection no longer than
    /// this.
    pub header_deadline: Duration,
    /// The longest head. Senders stay below 4 KB, and below 10 KB with a JWT.
    pub header_bytes_max: usize,
    /// The time for the TLS handshake, from the connection's first byte.
    pub handshake_deadline: Duration,
    /// How long a connection may stay without a request. Load balancers keep idle connections for
    /// 60 s. This limit is longer, because the side that reuses a connection should be the one to
    /// close it. The check runs once per this span, so a quiet connection lasts between one and two
    /// spans.
    pub idle: Duration,
    /// How long a peer may leave sent bytes unread before the connection is cut.
    pub write_stall: Duration,
    /// How long a connection is read after the last byte was sent. Unread bytes would cause a
    /// reset, and the reset would destroy an answer that was sent before the request was read.
    pub linger: Duration,
    /// How many bytes are read and discarded in that time.
    pub linger_bytes_max: usize,
    /// How long a shutdown waits for requests in flight.
    pub drain: Duration,
    /// Concurrent requests on one HTTP/2 connection: senders open more connections, not more
    /// streams.
    pub streams_max: u32,
    /// Streams that the peer reset before they were read, and streams that were reset for errors.
    /// Beyond this number the connection is closed (rapid reset).
    pub reset_streams_max: usize,
    /// Body bytes a peer may have in flight on one HTTP/2 connection.
    pub connection_window_bytes: u32,
    /// Body bytes a peer may have in flight on one HTTP/2 stream.
    pub stream_window_bytes: u32,
    /// How often a quiet HTTP/2 connection gets a ping, and how long the peer has for the answer.
    pub ping: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections_max: 4_096,
            header_deadline: Duration::from_secs(10),
            header_bytes_max: 16 * 1024,
            handshake_deadline: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            write_stall: Duration::from_secs(30),
            linger: Duration::from_secs(2),
            linger_bytes_max: 8 * 1024 * 1024,
            drain: DRAIN_DEFAULT,
            streams_max: 128,
            reset_streams_max: 32,
            connection_window_bytes: 512 * 1024,
            stream_window_bytes: 256 * 1024,
            ping: Duration::from_secs(20),
        }
    }
}

/// The time for a first head or a body before a connection counts as slow. Real senders need
/// milliseconds, over a long distance with TLS perhaps half a second.
pub const SLOW_AFTER: Duration = Duration::from_secs(2);

/// The time for which a new connection is not closed to make room for another. If there are more new
/// senders than slots, they must wait for each other, not close each other. The time also bounds a
/// flood: at most all slots are replaced within this time.
pub const NEW_FOR: Duration = Duration::from_millis(250);

/// An address is crowding if it holds more than one in this many of all slots, and more than
/// [`CROWD_MIN`]. A provider sends from many addresses, a flood from few.
pub const CROWD_SHARE: usize = 8;

/// An address with at most this many connections is never crowding, however few slots there are.
pub const CROWD_MIN: usize = 16;

/// While more than one in this many connections is new, further connections wait for them, and no
/// connection with a verified request is closed.
pub const MANY_NEW_SHARE: usize = 16;

/// When all slots are in use, one in this many connections is closed, all of them together. A slot
/// becomes free a moment after its connection is closed, so closing one connection at a time would
/// delay each new connection.
pub const EVICT_SHARE: usize = 256;

/// Each survey of all connections chooses one in this many for closing. A survey of 4,096
/// connections costs half a millisecond, so new connections share one.
pub const SURVEY_SHARE: usize = 16;

/// How long the result of a survey is used.
pub const SURVEY_VALID: Duration = Duration::from_millis(50);

/// The pause before the next survey when no slot has become free.
pub const SURVEY_AGAIN: Duration = Duration::from_millis(10);

/// How often the log reports that connections were closed for new ones.
pub const EVICTION_LOG_EVERY: Duration = Duration::from_secs(10);

/// HTTP/2 frames without progress (PRIORITY, PING, SETTINGS, WINDOW_UPDATE, empty DATA …) that a
/// connection may send in a row. Browsers and libraries send a few dozen.
pub const FREE_FRAMES: u32 = 1_024;

/// How many more such frames each request allows.
pub const FREE_FRAMES_PER_REQUEST: u32 = 64;

/// How many more each second allows: clients send a ping every few seconds.
pub const FREE_FRAMES_PER_SECOND: u32 = 10;

/// One more such frame is allowed for this many bytes sent: a client that reads a long answer sends
/// a WINDOW_UPDATE for every few KiB.
pub const SENT_BYTES_PER_FREE_FRAME: usize = 4 * 1024;

/// The limits of one body.
#[derive(Debug, Clone)]
pub struct BodyLimits {
    /// `max_body`: one byte more is answered with 413.
    pub bytes_max: usize,
    /// The time from the end of the head to the end of the body.
    pub deadline: Duration,
    /// How long a body may be slower than [`BodyLimits::bytes_per_second_min`].
    pub grace: Duration,
    /// A body that is slower than this on average, after the grace, is answered with 408.
    pub bytes_per_second_min: u64,
    /// Bytes of unfinished bodies held at once over all connections. A body that arrives in one
    /// piece does not count: its bytes are in the connection's buffer anyway.
    pub unfinished_bytes_max: usize,
    /// The time for which a new body is not dropped for another, and the span over which its speed
    /// is measured. Most bodies are complete by then.
    pub left_alone: Duration,
}

impl Default for BodyLimits {
    fn default() -> Self {
        Self {
            bytes_max: 1024 * 1024,
            deadline: Duration::from_secs(30),
            grace: Duration::from_secs(3),
            bytes_per_second_min: 1_024,
            unfinished_bytes_max: 256 * 1024 * 1024,
            left_alone: Duration::from_millis(500),
        }
    }
}

/// When memory for bodies is short, one in this many bytes is freed beyond the need. Otherwise each
/// piece of a body would search for the slowest body again.
pub const SPARE_SHARE: usize = 64;

/// A count per time span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// The count per span, which is also the largest burst.
    pub count: NonZeroU32,
    /// The span.
    pub per: Duration,
}

impl Rate {
    /// A rate of `count` per second.
    pub const fn per_second(count: NonZeroU32) -> Self {
        Self { count, per: Duration::from_secs(1) }
    }
}

/// The default of `unverified_limit`.
pub const UNVERIFIED_DEFAULT: Rate = Rate::per_second(NonZeroU32::new(100).expect("100 is not 0"));

/// Handshakes answered for one address at one source. Senders ask when a webhook is set up and then
/// hourly at most. A client that asks more often is trying to get something signed or to guess a
/// token.
pub const HANDSHAKES: Rate = Rate::per_second(NonZeroU32::new(10).expect("10 is not 0"));

/// Addresses remembered per source for the unverified limit. While there are more, all addresses
/// share one bucket.
pub const ADDRESSES_MAX: usize = 100_000;

/// Rejections per second and source that are noted for operators. For each, the body is read once more to find the
/// id that it claims.
pub const REJECTIONS_NOTED_PER_SECOND: u32 = 10;

/// The most bytes of a text in such a note.
pub const REJECTION_TEXT_BYTES_MAX: usize = 255;

/// Log lines per second, source and decision. Lines beyond that are summed up in one line.
pub const LOG_LINES_PER_SECOND: u32 = 100;

/// The longest value of a request in a log line.
pub const LOG_VALUE_CHARS_MAX: usize = 128;

/// Bytes of headers stored with an event: enough to verify it again and to identify the sender.
pub const KEPT_HEADERS_BYTES_MAX: usize = 8 * 1024;

/// Hops of X-Forwarded-For that are read.
pub const FORWARDED_HOPS_MAX: usize = 32;

/// Retry-After while the store cannot write: soon enough to limit the delay, late enough for the
/// store to recover.
pub const RETRY_AFTER_UNAVAILABLE_SECONDS: u64 = 5;

/// Retry-After while the store's queue is full or memory for bodies is short: both last only a
/// moment.
pub const RETRY_AFTER_BUSY_SECONDS: u64 = 1;

/// Late events remembered as logged: more than a sender retries at a time.
pub(crate) const LOGGED_LOST_MAX: usize = 256;

/// The time between two rounds that maintain limiters, log sums and the clock check.
pub const TEND_EVERY: Duration = Duration::from_secs(1);

/// Jobs in one batch of an `sql` handler. One sync serves the whole batch, and acks that arrive meanwhile
/// wait a few milliseconds.
pub const SQL_SLICE: usize = 192;

/// Jobs of an `http` handler claimed at once, however many it may run concurrently.
pub const CLAIM_MAX: usize = 64;

/// After a batch that was not full, new jobs may gather this long. Otherwise, under load, each
/// commit of acks would be followed by a commit for its few jobs.
pub const GATHER: Duration = Duration::from_millis(2);

/// How often a lane without a notification polls for work: notifications are hints.
pub const POLL_EVERY: Duration = Duration::from_secs(1);

/// The most deliveries of one exchange: a commit stays short, and acks wait only briefly meanwhile.
pub const EXCHANGE_CLAIMS_MAX: usize = 256;

/// The outcomes that an exchange must have to begin while the store commits another one.
pub const EXCHANGE_BESIDE_MIN: usize = 8;

/// The first window of attempts in flight at an endpoint that is new to a node: an endpoint that
/// hangs from the start takes no more slots than this.
pub const ENDPOINT_WINDOW_START: usize = 2;

/// The largest window of attempts in flight that an endpoint reaches by successes. The
/// `max_in_flight` of an endpoint is always lower.
pub const ENDPOINT_WINDOW_MAX: usize = 1_024;

/// An attempt that is older than this is slow: most endpoints answer within a second.
pub const SLOW_ATTEMPT_AGE: Duration = Duration::from_secs(1);

/// The longest time that a claim waits in memory for its endpoint. A lease lasts at least 30 seconds and at
/// least twice the timeout, so after this time a whole attempt and at least ten seconds more still fit into
/// it.
pub const WAITING_CLAIM_AGE_MAX: Duration = Duration::from_secs(5);

/// A claim that has waited in memory for longer than this is checked again before its attempt: on another node an
/// operator may have changed the endpoint or cancelled the message. Claims of fast endpoints rarely wait so long.
pub const UNCHECKED_CLAIM_AGE_MAX: Duration = Duration::from_millis(500);

/// The longest time that a claim beyond the `max_in_flight` of an endpoint waits in memory.
pub const CLAIM_AHEAD_AGE_MAX: Duration = Duration::from_secs(1);

/// The endpoints whose windows a node remembers while nothing is under way there: about 2 MB.
pub const ENDPOINTS_REMEMBERED_MAX: usize = 20_000;

/// Deliveries of deleted endpoints that one commit cancels: acks wait only briefly meanwhile.
pub const ORPHANS_PER_COMMIT: usize = 500;

/// The shortest pause between two exchanges that found nothing to claim: a hint may be for deliveries
/// that cannot be claimed now.
pub const SENDER_PAUSE_MIN: Duration = Duration::from_millis(5);

/// How many times that pause doubles while exchanges claim nothing although deliveries are due: up
/// to 320 ms. The pause rarely delays a delivery, and saves work for a store with many endpoints
/// that cannot be called.
pub const SENDER_PAUSE_DOUBLINGS: u32 = 6;

/// The first pause after the store failed; it doubles with each failure in a row.
pub const STORE_PAUSE: Duration = Duration::from_millis(100);

/// The longest such pause, so that work resumes soon after the store recovers.
pub const STORE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// How long a job with a lost attempt waits to run alone in the process, and how long it then runs
/// alone. A job that kills the process mostly does so at once, and no handler may delay the others
/// for as long as its app takes.
pub const ALONE_MAX: Duration = Duration::from_secs(2);

/// The longest object that is sent to an app in a header: servers accept 8 to 16 KiB of headers in
/// all.
pub const CURRENT_HEADER_BYTES_MAX: usize = 8 * 1024;

/// How often the gauges of the handlers are updated.
pub const GAUGES_EVERY: Duration = Duration::from_secs(10);

/// The deadline for opening a connection to another server, including TLS.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How long an outbound connection may stay idle. The time is shorter than the 5 s after which
/// Node.js closes its side: no request should be sent on a connection that is being closed.
pub const OUTBOUND_IDLE: Duration = Duration::from_secs(2);

/// How long a connection may stay idle if the proxy uses it for requests with a key. For such a
/// request, a connection that is being closed costs more: the proxy cannot know whether the app has
/// seen the request. Gunicorn closes its side after 2 s.
pub const PASSING_IDLE: Duration = Duration::from_secs(1);

/// Idle outbound connections, for each host.
pub const OUTBOUND_IDLE_MAX: usize = 64;

/// How long before the end of its lease an upstream must have answered, so that the answer can still be
/// stored. The margin is a tenth of the lease, at least this and at most [`UPSTREAM_MARGIN_MAX`].
pub const UPSTREAM_MARGIN_MIN: Duration = Duration::from_millis(100);
/// The upper bound of that margin.
pub const UPSTREAM_MARGIN_MAX: Duration = Duration::from_secs(2);

/// Requests with a key that one proxy runs at once, including those whose clients have hung up. The limit
/// is the default number of connections, or the configured number if it is higher. Otherwise clients with
/// short timeouts would pile up bodies, tasks and connections for as long as a slow upstream takes.
pub const KEYED_MAX: usize = 4_096;

/// How much of an app's answer is read; the rest is dropped with its connection.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The longest Retry-After that is honoured: a wrong clock of the app must not delay a job for
/// ever.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// How much of an error answer is stored: enough for the error message, not for a whole page.
pub(crate) const ANSWER_KEPT_BYTES: usize = 1_024;

/// The longest URL of an endpoint: browsers and gateways accept about this length.
pub const ENDPOINT_URL_BYTES_MAX: usize = 2_048;

/// Parsed URLs of endpoints that a sender keeps: more than most nodes have endpoints, and at most 2 MiB.
pub(crate) const PARSED_URLS_MAX: usize = 1_024;

/// Custom headers of one endpoint: a token and a few labels.
pub const CUSTOM_HEADERS_MAX: usize = 32;

/// The longest name of a custom header.
pub const CUSTOM_HEADER_NAME_BYTES_MAX: usize = 128;

/// Names and values of all custom headers of an endpoint: servers take 8 to 16 KiB of headers in all.
pub const CUSTOM_HEADERS_BYTES_MAX: usize = 4_096;

/// The bytes of an answer's body that are read so that the endpoint's connection can be used again.
/// A longer body closes its connection.
pub const ENDPOINT_ANSWER_BODY_BYTES_MAX: usize = 16 * 1024;

/// The head of an endpoint's answer: twice the most that common servers send.
pub const ENDPOINT_ANSWER_HEAD_BYTES_MAX: usize = 32 * 1024;

/// All bytes of an endpoint's answer, including informational answers and bytes that are read
/// ahead. The bound is above the other two, and far below a flood within the deadline.
pub const ENDPOINT_ANSWER_BYTES_MAX: usize = 128 * 1024;

/// The longest time that a connection to an endpoint may take to open. Deliveries have their own
/// deadlines. This deadline only ends connections whose delivery took another connection.
pub const ENDPOINT_CONNECT_DEADLINE: Duration = Duration::from_secs(30);

/// How long the addresses of a new endpoint's name are looked up: the operator waits for the answer.
pub const ENDPOINT_CHECK_DEADLINE: Duration = Duration::from_secs(2);

/// Idle connections to one endpoint's host: as many as a busy endpoint gets deliveries at once, so
/// that a burst need not open a connection for each delivery.
pub const ENDPOINT_IDLE_MAX: usize = 256;

/// Addresses of one name that are tried. Trying more would only use up the deadline.
pub const ENDPOINT_ADDRESSES_MAX: usize = 8;

/// How long one address of an endpoint may take to connect before the next is tried in parallel (RFC
/// 8305).
pub const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// Names whose addresses are remembered.
pub const LOOKUP_CACHE_ENTRIES: u64 = 4_096;

/// The longest time that addresses are remembered, so that an endpoint can move within a minute.
pub const LOOKUP_TTL_MAX: Duration = Duration::from_secs(60);

/// The longest time that a missing name is remembered: the next attempt of a delivery resolves it again.
pub const LOOKUP_MISS_TTL_MAX: Duration = Duration::from_secs(5);

/// The part of an error's text that is kept: a certificate can contain any number of names.
pub(crate) const SEND_ERROR_CHARS_MAX: usize = 300;

/// How often a synchronous answer polls its event at first; the interval doubles.
pub const SYNC_POLL: Duration = Duration::from_millis(10);

/// The longest such interval.
pub const SYNC_POLL_MAX: Duration = Duration::from_millis(250);

/// The longest time between two rounds of the janitor.
pub const PRUNE_EVERY: Duration = Duration::from_secs(60);

/// The shortest time between two rounds of the janitor, for retention times of seconds.
pub const PRUNE_EVERY_MIN: Duration = Duration::from_secs(1);

/// Rounds of the janitor within the shortest retention time. Expired data is then a small part of
/// all data, and is deleted in many small steps instead of one large one.
pub const PRUNES_PER_RETENTION: u32 = 12;

/// A step of the clock that makes the janitor doubt it. Corrections while the clock keeps time are smaller.
pub(crate) const CLOCK_STEP_MIN: Duration = Duration::from_secs(60);

/// The longest time for which the janitor deletes nothing after the clock was set forward. Time
/// synchronisation corrects a wrong clock sooner, and the data that accumulates meanwhile is small.
pub(crate) const CLOCK_DOUBT_MAX: Duration = Duration::from_secs(3_600);

/// The longest such time at the start of the process. It is short, so that a process that restarts often
/// still deletes.
pub(crate) const CLOCK_DOUBT_AT_START_MAX: Duration = Duration::from_secs(30);

/// Events deleted in one commit. A store with a single writer stops earlier, after a time limit.
pub const PRUNE_BATCH: usize = 1_000;

/// The time between two rounds of the search indexer. Until a value is indexed, a search finds it only in
/// the newest bodies. With a longer time, each page of the index that is written gets more rows.
pub const INDEX_EVERY: Duration = Duration::from_secs(2);

/// Events that the search indexer takes at once. The number is large enough that rows of one page are written
/// together, and small enough for a few megabytes of hashes at most.
pub const INDEX_BATCH: usize = 20_000;

/// The shortest pause between two commits of the janitor or of the search indexer, so that acks go
/// first. Otherwise the pause is as long as the commit took, so that deleting takes at most half of
/// the store's time. A janitor that falls behind makes only the shortest pause. The janitor makes
/// no pause while the store has no other request.
pub const PRUNE_PAUSE: Duration = Duration::from_millis(5);

/// An endpoint is announced before its first delivery is cancelled. The time between the two is the
/// retention of deliveries divided by this number.
pub const EXPIRY_NOTICE_PART: u32 = 10;

/// The longest such time: enough for an operator to come back from a weekend.
pub const EXPIRY_NOTICE_MAX: Duration = Duration::from_secs(3 * 86_400);

/// Deliveries or events of a plan that one commit takes: a few milliseconds of the store.
pub const PLAN_BATCH: usize = 200;

/// The pause between two such commits, so that acks go first.
pub const PLAN_PAUSE: Duration = Duration::from_millis(5);

/// How long a node leaves a plan alone after another node took a slice of it, because the other
/// node continues the plan.
pub const PLAN_TAKEN_PAUSE: Duration = Duration::from_millis(250);

/// The longest time that a node leaves a plan alone because its slices fail. The cause of the
/// failures may end at any time.
pub const PLAN_RETRY_MAX: Duration = Duration::from_secs(60);

/// Plans that a node leaves alone at a time. Operators have a few plans. Beyond this number, all plans are
/// tried again.
pub const PLANS_LEFT_MAX: usize = 1_000;

/// Keys of senders that are known or known to be missing: far more than all senders use at a time.
pub const SENDER_KEYS_MAX: usize = 512;

/// The largest answer that holds a key. A chain of certificates has a few KiB.
pub const SENDER_KEY_BYTES_MAX: usize = 64 << 10;

/// The time to fetch a key, from the name lookup to the last byte: senders wait this long for their answer.
pub const SENDER_KEY_DEADLINE: Duration = Duration::from_secs(5);

/// How long a fetched key is used: a key that the sender withdrew is refused after this time.
pub const SENDER_KEY_FRESH_FOR: Duration = Duration::from_secs(24 * 3_600);

/// The age at which a key that is still in use is fetched again in the background.
pub const SENDER_KEY_REFRESH_AFTER: Duration = Duration::from_secs(12 * 3_600);

/// The time after which a failed fetch in the background is tried again.
pub const SENDER_KEY_REFRESH_AGAIN: Duration = Duration::from_secs(300);

/// The pause before a key that could not be fetched is fetched again: shorter than the time after
/// which senders retry.
pub const SENDER_KEY_FAILED_FOR: Duration = Duration::from_secs(30);

/// Fetches from one host at once. Strangers and proven senders have this limit separately, so a slow
/// host holds at most twice as many connections.
pub const SENDER_KEY_FETCHES_AT_ONCE: usize = 4;

/// Unknown keys that the requests of one client address may name in a minute. Senders change keys once in
/// months.
pub const SENDER_KEY_FETCHES_PER_ADDRESS: u32 = 10;

/// Unknown keys that the requests of all addresses together may name in a minute, for each host: a
/// load that a sender's server can bear. Proven senders have a separate limit of the same size.
pub const SENDER_KEY_FETCHES_PER_HOST: u32 = 60;

/// Addresses that are remembered as those of proven senders: more than any sender posts from in a day.
pub const SENDER_KEY_PROVEN_MAX: usize = 4_096;

/// Requests that wait for a key at once: each holds a connection.
pub const SENDER_KEY_WAITERS_MAX: usize = 512;
