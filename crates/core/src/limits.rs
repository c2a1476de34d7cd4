//! Every bound of the domain, each with its reason.

/// The longest event id: long enough for every sender seen, short enough for an index and a log line.
pub const EVENT_ID_BYTES_MAX: usize = 255;

/// The most events in one body: a commit stays short, and a hostile body cannot fan out without end.
pub const ITEMS_MAX: usize = 1_000;

/// How deep JSON may nest before it is called malformed: far beyond real events, far below the stack.
pub const JSON_DEPTH_MAX: usize = 64;

/// The shortest token or password that proves a sender which signs nothing: guessing one of 16 random
/// letters takes longer than any of them is used.
pub const TOKEN_CHARS_MIN: usize = 16;

/// How many signatures of one header are tried: rotation needs two or three, a flood gets no more (S-4).
pub const SIGNATURES_MAX: usize = 16;

/// The longest event type kept: it becomes a filter and a log field.
pub const EVENT_TYPE_BYTES_MAX: usize = 255;

/// The largest body looked at for a handshake: theirs are a few hundred bytes, and larger ones are
/// events that need not be read twice.
pub const HANDSHAKE_BODY_BYTES_MAX: usize = 4_096;

/// The longest challenge echoed: those seen are under 100 bytes, and nobody may store a page in us.
pub const HANDSHAKE_ECHO_BYTES_MAX: usize = 512;

/// The longest challenge that is signed: a UUID or a short base64 text at every sender seen.
pub const HANDSHAKE_TOKEN_BYTES_MAX: usize = 128;

/// The longest resource of an order guard: it stands in an index, as an event id does.
pub const RESOURCE_BYTES_MAX: usize = 255;

/// The longest type, key, tenant and id of a message: each stands in an index.
pub const MESSAGE_NAME_BYTES_MAX: usize = 255;

/// The most transitions of a state machine: what lies ahead of each state is worked out beforehand,
/// and nobody writes more by hand.
pub const TRANSITIONS_MAX: usize = 1_000;

/// How far the jobs of one handler are counted for gauges and alerts: past it the number only says
/// "many", and a backlog of a million must not make looking at it slow.
pub const LANE_COUNT_MAX: u64 = 10_000;

/// The longest result of a job that is stored: one line in the history of an event.
pub const RESULT_CHARS_MAX: usize = 200;

/// The longest error of an attempt that is stored: the first KiB of an app's answer, and the text
/// around it.
pub const ERROR_CHARS_MAX: usize = 1_200;

/// The longest Idempotency-Key: what clients of other APIs are used to.
pub const IDEMPOTENCY_KEY_BYTES_MAX: usize = 255;

/// The longest scope of such a key: it stands in an index beside it. A longer one is hashed.
pub const SCOPE_BYTES_MAX: usize = 1_000;

/// The largest answer that is kept for a key, and the most of its headers: it is kept for days, and
/// read back at once.
pub const ANSWER_BODY_BYTES_MAX: usize = 1 << 20;
/// See [`ANSWER_BODY_BYTES_MAX`].
pub const ANSWER_HEADER_BYTES_MAX: usize = 32 << 10;

/// The longest JSON Web Token that is read. Real ones are below 8 KiB, which is also what most servers
/// take in a header.
pub const JWT_BYTES_MAX: usize = 16 * 1024;

/// The most keys of a set: a token that names none of them is tried with each.
pub const JWT_KEYS_MAX: usize = 64;
