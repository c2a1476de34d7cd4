//! Every bound of the engine, each with its reason. Tests and the config replace the values;
//! nothing else holds a number of its own.

use std::num::NonZeroU32;
use std::time::Duration;

/// How long a stop waits for requests and attempts that are running: longer than a handler's timeout.
pub const DRAIN_DEFAULT: Duration = Duration::from_secs(30);

/// What one listener allows its connections.
#[derive(Debug, Clone)]
pub struct HttpLimits {
    /// Connections open at once; for the next one a slow or idle one is closed, and it waits only where
    /// all are at work. A connection that only waits costs some 20 KB, so this bounds memory at about
    /// 80 MB.
    pub connections_max: usize,
    /// From the first byte of a head (for the first one: from the connection itself) to its end.
    /// Real senders need milliseconds; a slow one holds a connection no longer than this.
    pub header_deadline: Duration,
    /// The longest head: senders stay below 4 KB, some with a JWT below 10 KB.
    pub header_bytes_max: usize,
    /// The TLS handshake, from the connection's first byte.
    pub handshake_deadline: Duration,
    /// How long a connection may stay without a request. Longer than the 60 s that load balancers
    /// keep theirs: the side that reuses a connection should be the one to close it. It is looked
    /// at once per this span, so a quiet connection lasts between one and two of them.
    pub idle: Duration,
    /// How long a peer may leave our bytes unread before the connection is cut.
    pub write_stall: Duration,
    /// How long we go on reading after our last byte, so that an answer sent before the request
    /// was read is not destroyed by the reset that unread bytes cause.
    pub linger: Duration,
    /// How much is read and thrown away in that time.
    pub linger_bytes_max: usize,
    /// How long a stop waits for what is in flight.
    pub drain: Duration,
    /// Requests at once on one HTTP/2 connection: senders fan out by connections, not by streams.
    pub streams_max: u32,
    /// Streams that were reset before we looked at them, and those we reset for errors: past this
    /// the connection is closed (rapid reset).
    pub reset_streams_max: usize,
    /// Body bytes a peer may have in flight on one HTTP/2 connection.
    pub connection_window_bytes: u32,
    /// And on one of its streams.
    pub stream_window_bytes: u32,
    /// How often a quiet HTTP/2 connection is asked whether it still lives, and how long it has
    /// for an answer.
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

/// How long a connection has for its first head or for a body before it is taken for a slow one. Real
/// senders need milliseconds, over a long way with TLS perhaps half a second.
pub const SLOW_AFTER: Duration = Duration::from_secs(2);

/// And how long a new one is left alone whatever others need: more new senders than there are places must
/// wait for each other, not close each other. Also, no flood of connections is served faster than all
/// places in this time.
pub const NEW_FOR: Duration = Duration::from_millis(250);

/// An address that holds more than one in so many of all places crowds, and at least [`CROWD_MIN`]: a
/// provider sends from many addresses, a flood from few.
pub const CROWD_SHARE: usize = 8;

/// Fewer connections than this crowd nothing, however few places there are.
pub const CROWD_MIN: usize = 16;

/// While more than one in so many connections is that new, newcomers wait for them and close none on which
/// a request was verified.
pub const MANY_NEW_SHARE: usize = 16;

/// When every place is taken, one in so many connections is closed at once: their ends are seen a moment
/// later, and newcomers would wait for each one.
pub const EVICT_SHARE: usize = 256;

/// One in so many connections is chosen for closing when all are looked at: the look costs half a
/// millisecond at 4,096, so newcomers share one.
pub const SURVEY_SHARE: usize = 16;

/// And for how long that choice holds.
pub const SURVEY_VALID: Duration = Duration::from_millis(50);

/// Where no place has become free: how soon it is looked again for a connection that may be closed.
pub const SURVEY_AGAIN: Duration = Duration::from_millis(10);

/// How often it is logged that connections had to be closed.
pub const EVICTION_LOG_EVERY: Duration = Duration::from_secs(10);

/// HTTP/2 frames that bring nothing forward (PRIORITY, PING, SETTINGS, WINDOW_UPDATE, empty DATA …) which a
/// connection may send in a row. Browsers and libraries send a few dozen.
pub const FREE_FRAMES: u32 = 1_024;

/// How many more of them each request explains.
pub const FREE_FRAMES_PER_REQUEST: u32 = 64;

/// And each second: clients ask every few seconds whether we still live.
pub const FREE_FRAMES_PER_SECOND: u32 = 10;

/// And so many bytes of ours: a client that reads a long answer gives window back for every few KiB.
pub const SENT_BYTES_PER_FREE_FRAME: usize = 4 * 1024;

/// What one body may be.
#[derive(Debug, Clone)]
pub struct BodyLimits {
    /// `max_body`: one byte more is a 413.
    pub bytes_max: usize,
    /// From the head's end to the body's end.
    pub deadline: Duration,
    /// How long a body may be slower than [`BodyLimits::bytes_per_second_min`].
    pub grace: Duration,
    /// Slower than this on average, after the grace, is a 408: a trickle is an attack or hopeless.
    pub bytes_per_second_min: u64,
    /// How many bytes of unfinished bodies are held at once over all connections. Bodies that come
    /// in one piece are not counted: their bytes are in the connection's buffer anyway.
    pub unfinished_bytes_max: usize,
    /// How long a body is left alone before it may have to give its memory to another, and the span
    /// over which its speed is measured for that. Most bodies are whole by then.
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

/// When memory for bodies is short, one in so many bytes is freed beyond what is needed, so that not each
/// piece of a body searches for the slowest again.
pub const SPARE_SHARE: usize = 64;

/// So many per that span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// How many at once, and how many per span.
    pub count: NonZeroU32,
    /// The span.
    pub per: Duration,
}

impl Rate {
    /// So many per second.
    pub const fn per_second(count: NonZeroU32) -> Self {
        Self { count, per: Duration::from_secs(1) }
    }
}

/// `unverified_limit` where the config is silent.
pub const UNVERIFIED_DEFAULT: Rate = Rate::per_second(NonZeroU32::new(100).expect("100 is not 0"));

/// Handshakes that one address gets answered at one source. Senders ask when a webhook is set up and
/// then hourly at most; more than this is an attempt to have something signed or a token guessed.
pub const HANDSHAKES: Rate = Rate::per_second(NonZeroU32::new(10).expect("10 is not 0"));

/// Addresses remembered per source for the unverified limit; beyond it, new ones share a bucket.
pub const ADDRESSES_MAX: usize = 100_000;

/// Log lines per second, source and decision; the rest is summed up in one.
pub const LOG_LINES_PER_SECOND: u32 = 100;

/// The longest value from outside in a log line.
pub const LOG_VALUE_CHARS_MAX: usize = 128;

/// The headers kept with an event: enough to verify it again and to see who sent it.
pub const KEPT_HEADERS_BYTES_MAX: usize = 8 * 1024;

/// Hops of X-Forwarded-For that are looked at.
pub const FORWARDED_HOPS_MAX: usize = 32;

/// When the store cannot write: soon enough that little is late, late enough to let it recover.
pub const RETRY_AFTER_UNAVAILABLE_SECONDS: u64 = 5;

/// When the store has too much waiting, or memory for bodies is short: that is over in a moment.
pub const RETRY_AFTER_BUSY_SECONDS: u64 = 1;

/// Events that came too late and are remembered as logged: more than a sender retries at a time.
pub(crate) const TOLD_LOST_MAX: usize = 256;

/// Between two looks at limiters, log sums and the clock.
pub const TEND_EVERY: Duration = Duration::from_secs(1);

/// Jobs in one slice of an `sql` handler: one sync serves them all, and the acks that wait
/// meanwhile wait a few milliseconds.
pub const SQL_SLICE: usize = 192;

/// Jobs of an `http` handler claimed in one go, however many it may run at once.
pub const CLAIM_MAX: usize = 64;

/// After a slice that was not full, what arrives next may gather this long: otherwise, under load,
/// each commit of acks would be followed by a commit for its few jobs.
pub const GATHER: Duration = Duration::from_millis(2);

/// How often a lane without a notification polls for work: notifications are hints.
pub const POLL_EVERY: Duration = Duration::from_secs(1);

/// The first pause after the store failed; it doubles with each failure in a row.
pub const STORE_PAUSE: Duration = Duration::from_millis(100);

/// And goes no further than this, so that work resumes soon after the store does.
pub const STORE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// How long a job that was lost before waits to have the process for itself, and how long it then
/// keeps it: what kills a process mostly does so at once, and no lane may hold up the others for as
/// long as its app likes to take.
pub const ALONE_MAX: Duration = Duration::from_secs(2);

/// The longest object that goes to an app in a header: servers take 8 to 16 KiB of headers in all.
pub const CURRENT_HEADER_BYTES_MAX: usize = 8 * 1024;

/// How often the gauges of the lanes are looked up.
pub const GAUGES_EVERY: Duration = Duration::from_secs(10);

/// How long a connection to another server may take to open, TLS included.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How long an outbound connection may wait for its next request. Shorter than the 5 s after which
/// Node.js closes its side: a request must not run into a connection that is being closed.
pub const OUTBOUND_IDLE: Duration = Duration::from_secs(2);

/// The same for requests that are passed on with a key, where running into one costs more: nobody then
/// knows whether the app has seen it. Gunicorn closes its side after 2 s.
pub const PASSING_IDLE: Duration = Duration::from_secs(1);

/// Outbound connections that wait for their next request, for each host.
pub const OUTBOUND_IDLE_MAX: usize = 64;

/// How long before the end of its lease an upstream must have answered, a tenth of it but at least and
/// at most this: the answer is still to be kept by then.
pub const UPSTREAM_MARGIN_MIN: Duration = Duration::from_millis(100);
/// See [`UPSTREAM_MARGIN_MIN`].
pub const UPSTREAM_MARGIN_MAX: Duration = Duration::from_secs(2);

/// Requests with a key that one proxy runs at once, those included whose clients have hung up: as many
/// as it has connections by default, and more where those are. A client with a short patience would otherwise pile up bodies,
/// tasks and connections for as long as a slow upstream takes.
pub const KEYED_MAX: usize = 4_096;

/// What is read of an answer to us; the rest is dropped with its connection.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The longest Retry-After that is honoured: a wrong clock on the far side must not bury a job.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// How much is kept of an answer that is no success: enough for what went wrong, not for a page.
pub(crate) const ANSWER_KEPT_BYTES: usize = 1_024;

/// How often a synchronous answer polls its event at first; the interval doubles.
pub const SYNC_POLL: Duration = Duration::from_millis(10);

/// And goes no further than this.
pub const SYNC_POLL_MAX: Duration = Duration::from_millis(250);

/// How often the janitor comes at least.
pub const PRUNE_EVERY: Duration = Duration::from_secs(60);

/// How often it comes at most, where things are kept for seconds.
pub const PRUNE_EVERY_MIN: Duration = Duration::from_secs(1);

/// How often it comes within the shortest time that anything is kept: what is past its time is then never
/// more than a small part of what is there, and it goes in many small steps instead of one large one.
pub const PRUNES_PER_RETENTION: u32 = 12;

/// Events deleted in one commit. A store that has one writer takes fewer, by the clock.
pub const PRUNE_BATCH: usize = 1_000;

/// The least pause between two such commits, so that acks go first. The pause is as long as the commit
/// took, so pruning takes at most half of the store's time and keeps up with any ingest. There is none
/// while the store is asked for nothing else.
pub const PRUNE_PAUSE: Duration = Duration::from_millis(5);
