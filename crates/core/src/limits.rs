//! Every bound of the domain, each with its reason.

/// The longest event id: long enough for every sender seen, short enough for an index and a log line.
pub const EVENT_ID_BYTES_MAX: usize = 255;

/// The most events in one body: a commit stays short, and a hostile body cannot fan out without limit.
pub const ITEMS_MAX: usize = 1_000;

/// How deep JSON may nest before it is refused as malformed: far beyond real events, far below what
/// the stack holds.
pub const JSON_DEPTH_MAX: usize = 64;

/// The shortest token or password of a sender that signs nothing: guessing 16 random letters takes
/// longer than any token stays in use.
pub const TOKEN_CHARS_MIN: usize = 16;

/// How many signatures of one header are tried: a rotation needs two or three, and a flood of them
/// must not cost much work.
pub const SIGNATURES_MAX: usize = 16;

/// The longest event type that is stored: it becomes a filter and a log field.
pub const EVENT_TYPE_BYTES_MAX: usize = 255;

/// The largest body that is searched for a handshake. Handshakes have a few hundred bytes; larger
/// bodies are events and need not be parsed twice.
pub const HANDSHAKE_BODY_BYTES_MAX: usize = 4_096;

/// The longest challenge that is echoed. Real challenges are under 100 bytes; the bound keeps a caller
/// from having a whole page sent back.
pub const HANDSHAKE_ECHO_BYTES_MAX: usize = 512;

/// The longest challenge that is signed. Every known sender uses a UUID or a short base64 text.
pub const HANDSHAKE_TOKEN_BYTES_MAX: usize = 128;

/// The longest resource of an ordered handler: it is indexed, as an event id is.
pub const RESOURCE_BYTES_MAX: usize = 255;

/// The longest type, key, tenant and API version of a message: each is indexed or becomes a filter.
pub const MESSAGE_NAME_BYTES_MAX: usize = 255;

/// The longest id of a message: it becomes a header of every delivery.
pub const MESSAGE_ID_CHARS_MAX: usize = 128;

/// The largest content of a message: receivers commonly refuse more, and every delivery holds it in
/// memory.
pub const MESSAGE_DATA_BYTES_MAX: usize = 1 << 20;

/// The most endpoints of one tenant: publishing a message writes one delivery for each that matches.
pub const ENDPOINTS_PER_TENANT_MAX: usize = 1_000;

/// The most endpoints of one tenant whose address its receiving party chose: an operator did not see them, and a
/// party that needs more can ask for them.
pub const RECEIVER_ENDPOINTS_PER_TENANT_MAX: usize = 20;

/// The most pings of one tenant from the portal within [`PORTAL_PINGS_WITHIN`]: enough to test an endpoint,
/// and too few to disturb another party's server.
pub const PORTAL_PINGS_MAX: usize = 10;

/// The span of [`PORTAL_PINGS_MAX`].
pub const PORTAL_PINGS_WITHIN: std::time::Duration = std::time::Duration::from_secs(60);

/// The most forms that one link to the portal may send to one node within a minute: more than a person sends, and
/// few enough that no program keeps the database busy.
pub const PORTAL_FORMS_PER_MINUTE: u32 = 60;

/// The sustained number of pages per second that one portal link may request from one node. Ten open tabs
/// request fewer. Lists of all tenants share one reader.
pub const PORTAL_PAGES_PER_SECOND: u32 = 20;

/// The burst of pages that one link may request beyond that rate.
pub const PORTAL_PAGES_AT_ONCE: u32 = 200;

/// The most refused or failed forms of one link that one node records in the audit trail within a minute.
pub const PORTAL_REFUSALS_PER_MINUTE: u32 = 20;

/// How long the body of a form may take to arrive. A browser sends a body at once. A body that arrives more
/// slowly could outlive the session under which its request was admitted.
pub const FORM_READ_WITHIN: std::time::Duration = std::time::Duration::from_secs(10);

/// How long the body of a request to the admin API may take to arrive. A program may have a slow connection,
/// and a message is larger than a form. A body that never ends must not hold its connection and its memory.
pub const API_BODY_READ_WITHIN: std::time::Duration = std::time::Duration::from_secs(30);

/// The most transitions of a state machine: the states reachable from each state are computed when the
/// config is read, and no config written by hand has more.
pub const TRANSITIONS_MAX: usize = 1_000;

/// The number at which counting the jobs of one handler stops, for gauges and alerts. A larger
/// number would not help an operator, and counting a backlog of a million must not be slow.
pub const LANE_COUNT_MAX: u64 = 10_000;

/// The longest result of a job that is stored: one line in the history of an event.
pub const RESULT_CHARS_MAX: usize = 200;

/// The longest error of an attempt that is stored: the first KiB of an app's answer, and the text
/// around it.
pub const ERROR_CHARS_MAX: usize = 1_200;

/// The longest Idempotency-Key: the bound that clients know from other APIs.
pub const IDEMPOTENCY_KEY_BYTES_MAX: usize = 255;

/// The longest scope of an Idempotency-Key: it is indexed together with the key. A longer one is hashed.
pub const SCOPE_BYTES_MAX: usize = 1_000;

/// The largest body of an answer that is stored for a key: it is stored for days and read into memory
/// as a whole.
pub const ANSWER_BODY_BYTES_MAX: usize = 1 << 20;
/// The most bytes of its headers, for the same reason.
pub const ANSWER_HEADER_BYTES_MAX: usize = 32 << 10;

/// The longest JSON Web Token that is read. Real tokens are below 8 KiB, which is also what most
/// servers accept in a header.
pub const JWT_BYTES_MAX: usize = 16 * 1024;

/// The most keys of a JWK set: a token without a `kid` is checked against each.
pub const JWT_KEYS_MAX: usize = 64;

/// The shortest signing secret of an endpoint: Standard Webhooks requires 24 bytes.
pub const SIGNING_SECRET_BYTES_MIN: usize = 24;
/// The longest one, for the same reason. HMAC-SHA256 would hash a longer one to 32 bytes anyway.
pub const SIGNING_SECRET_BYTES_MAX: usize = 64;

/// The most active secrets of an endpoint: two rotations in a row. Each adds a signature to every delivery.
pub const ENDPOINT_SECRETS_MAX: usize = 3;

/// The most secrets of one (tenant, source) pair that are set at run time: a request is checked against each.
pub const SOURCE_SECRETS_MAX: usize = 8;

/// The longest secret that is set at run time. PEM keys and key sets are shorter.
pub const SOURCE_SECRET_BYTES_MAX: usize = 16 << 10;

/// The most (tenant, source) pairs that are set at run time: each node holds all of them in memory.
pub const TENANT_SOURCES_MAX: usize = 10_000;

/// The longest time for which a replaced secret still signs. A receiver that has not changed its secret by
/// then is unlikely to do so later.
pub const SECRET_OVERLAP_MAX: std::time::Duration = std::time::Duration::from_secs(366 * 86_400);

/// The most alerts that one commit clears: each is a message, and the next round clears the rest.
pub const ALERTS_CLEARED_MAX: usize = 100;

/// The longest value that `search` indexes, in bytes: ids and addresses are shorter, and prose is not looked up as
/// a whole.
pub const SEARCH_VALUE_BYTES_MAX: usize = 255;

/// The most values of an event that a source may name in `search`: each costs a row of the index.
pub const SEARCH_FIELDS_MAX: usize = 8;

/// The most events that a search by the id of a request or a message finds: as many as a page of a list shows.
pub const TRACED_EVENTS_MAX: usize = 100;

/// The longest time between the start of a request and the arrival time of its events. A search by the id of
/// a request reads that far. A request that takes longer has reached its deadline.
pub const REQUEST_TIME_MAX: std::time::Duration = std::time::Duration::from_secs(60);

/// How many copies are read to find the events of a sample. Reading these copies takes a few hundredths of a
/// second.
pub const COPIES_READ_MAX: usize = 50_000;

/// How long one page of a list reads before it returns what it found: a person does not notice the wait, and
/// a search of the whole database takes turns with all other reads.
pub const LIST_READ_MAX: std::time::Duration = std::time::Duration::from_millis(50);

/// The shortest lease of a delivery. A claim may wait for its endpoint, and an outcome may wait for the
/// database. Neither wait may let the lease end while the process is alive, because that would cause a second
/// attempt.
pub const DELIVERY_LEASE_MIN: std::time::Duration = std::time::Duration::from_secs(30);
