-- The tables of Hapax in the file that it shares with the user. Every name of Hapax starts with hapax_.

CREATE TABLE hapax_meta (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;
-- merged_through: every key of an event up to this seq is in hapax_key.
-- last_seq: no event ever had a higher one, even if it was pruned since.
-- epoch: raised after a failed write, so that its remains in the log are overwritten.
-- last_message: as last_seq, of messages.
-- reservation_fence: no higher one was ever issued, including those of deleted keys.
-- source_secrets: the version of all rows of hapax_source_secret, raised with each change.
INSERT INTO hapax_meta (name, value)
VALUES ('merged_through', 0), ('last_seq', 0), ('epoch', 0), ('last_message', 0),
       ('reservation_fence', 0), ('source_secrets', 0);

-- Backward steps of the clock, in microseconds. The times of events and messages may differ from the
-- order of their numbers by the largest of these steps.
CREATE TABLE hapax_clock_step (
    step INTEGER PRIMARY KEY,
    at   INTEGER NOT NULL,
    back INTEGER NOT NULL
);

-- A (tenant, source) pair, so that an event names it with one small number.
CREATE TABLE hapax_pair (
    pair   INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    source TEXT NOT NULL,
    UNIQUE (tenant, source)
);

-- The narrow row of an event, which stays as long as its key. Appended to, in the order of the commits. Times
-- are microseconds since 1970.
-- state: 0 open, 1 in review, 2 discarded.
-- review: 0 none, 1 late, 2 replay, 3 conflict.
-- guard_hash: the hash of the signed content, if this event was the first with that content; the hash is in
--   the key index beside the event's key.
-- guard_until: the guard, and so the row, stays at least until then; null means as long as the key.
-- pruned: -1 while the event is whole; once its body, jobs and history are gone, the status it ended with: 11
--   discarded, 17 processed, 18 stale, 19 ignored. Every one of these takes one byte (0 and 1 would take
--   none), so that marking a row leaves its size as it is, and no page has to be split.
CREATE TABLE hapax_event (
    seq         INTEGER PRIMARY KEY,
    id          BLOB    NOT NULL,
    pair        INTEGER NOT NULL,
    event_id    TEXT    NOT NULL,
    received_at INTEGER NOT NULL,
    body_hash   BLOB    NOT NULL,
    guard_hash  BLOB,
    guard_until INTEGER,
    state       INTEGER NOT NULL,
    review      INTEGER NOT NULL,
    pruned      INTEGER NOT NULL DEFAULT -1
);
CREATE INDEX hapax_event_review ON hapax_event (state) WHERE state <> 0 /* open */;

-- The part of an event that retention deletes: the content and how it arrived. A row exists exactly
-- while its event is whole. Rows of one time are adjacent, so deleting a range of them frees whole
-- pages, which the next events fill again.
CREATE TABLE hapax_body (
    seq         INTEGER PRIMARY KEY,
    event_type  TEXT,
    occurred_at INTEGER,
    request_id  BLOB    NOT NULL,
    remote      TEXT,
    secret      INTEGER NOT NULL,
    signed_at   INTEGER,
    headers     TEXT    NOT NULL,
    body        BLOB    NOT NULL
);

-- The values of events that operators search for: hashes of hapax_core::search. Rows are added by deferred writes, in
-- sorted merges, and deleted with hapax_body as ranges. A value is found in blocks of 65536 events, so that a merge
-- rewrites the pages of the newest block only, however many events there are.
CREATE TABLE hapax_search_value (
    seq  INTEGER NOT NULL,
    hash BLOB    NOT NULL,
    PRIMARY KEY (seq, hash)
) WITHOUT ROWID;
CREATE INDEX hapax_search_value_block ON hapax_search_value (seq >> 16, hash);

-- How far the index has come, for the fields that were indexed last. Moves with the last row that it covers.
CREATE TABLE hapax_search_mark (
    fields  BLOB    PRIMARY KEY,
    through INTEGER NOT NULL
) WITHOUT ROWID;

-- The key index: fed in sorted merges from memory, never one random page per event. The index has two trees,
-- so that a merge from memory rewrites a small one: a merge into a large tree touches every page of it, and
-- would cost more with every stored event.
CREATE TABLE hapax_key (
    hash BLOB PRIMARY KEY,
    seq  INTEGER NOT NULL
) WITHOUT ROWID;

-- Keys that are later moved to hapax_key, in order, once there are many. A key is in exactly one of the
-- two.
CREATE TABLE hapax_key_young (
    hash BLOB PRIMARY KEY,
    seq  INTEGER NOT NULL
) WITHOUT ROWID;

-- Further signed content of an event: its copies may be signed again. Few, so one random page each.
CREATE TABLE hapax_guard (
    hash      BLOB PRIMARY KEY,
    event_seq INTEGER NOT NULL,
    until     INTEGER
) WITHOUT ROWID;
CREATE INDEX hapax_guard_event ON hapax_guard (event_seq);

-- The newest few arrivals of an event after the first one, and the bodies of conflicts. Most events have
-- none or one, so that a copy costs one row.
CREATE TABLE hapax_arrival (
    event_seq   INTEGER NOT NULL,
    received_at INTEGER NOT NULL,
    request_id  BLOB    NOT NULL,
    conflict    INTEGER NOT NULL,
    remote      TEXT,
    secret      INTEGER NOT NULL,
    signed_at   INTEGER,
    body        BLOB,
    PRIMARY KEY (event_seq, received_at, request_id)
) WITHOUT ROWID;
-- The ids of requests grow with their time, so that a copy is added at the end.
CREATE INDEX hapax_arrival_request ON hapax_arrival (request_id);

-- Further arrivals of an event, which no longer have a row in hapax_arrival, and how many of all its
-- arrivals were conflicts.
CREATE TABLE hapax_copy (
    event_seq    INTEGER PRIMARY KEY,
    only_counted INTEGER NOT NULL,
    conflicts    INTEGER NOT NULL
);

-- A handler: events create its jobs in their own commit. paused_at: while it is set, none of its jobs is
-- claimed.
CREATE TABLE hapax_handler (
    handler      INTEGER PRIMARY KEY,
    source       TEXT NOT NULL,
    name         TEXT NOT NULL,
    paused_at    INTEGER,
    paused_by    TEXT,
    pause_reason TEXT,
    UNIQUE (source, name)
);

-- A lane holds the jobs of one handler for one tenant. Claims visit the lanes of a handler in turn, so
-- that a noisy tenant does not starve the others.
CREATE TABLE hapax_lane (
    lane    INTEGER PRIMARY KEY,
    pair    INTEGER NOT NULL,
    handler INTEGER NOT NULL,
    UNIQUE (pair, handler)
);

-- state: 0 ready, 1 leased, 2 done, 3 stale, 4 dead, 5 held, 6 parked, 7 review, 8 discarded. Statements say
-- the name in a comment. A function could not stand for it, as on PostgreSQL: a partial index matches the
-- number only, and any client that opens the file would need the function.
-- due_at: when a ready job may run, when a lease or a hold ends, since when a job is parked or in review;
--   otherwise when the job ended.
-- wait: the length of the wait that due_at ends. A due time further ahead than that was written before the
--   clock was set back.
-- forced: an operator, or a gap held long enough, lets it run whatever the order guard decides.
CREATE TABLE hapax_job (
    event_seq  INTEGER NOT NULL,
    lane       INTEGER NOT NULL,
    state      INTEGER NOT NULL,
    due_at     INTEGER NOT NULL,
    wait       INTEGER NOT NULL DEFAULT 0,
    fence      INTEGER NOT NULL DEFAULT 0,
    run        INTEGER NOT NULL DEFAULT 1,
    attempt    INTEGER NOT NULL DEFAULT 0,
    steps      INTEGER NOT NULL DEFAULT 0,
    lost       INTEGER NOT NULL DEFAULT 0,
    resource   TEXT,
    position   INTEGER,
    exclusive  INTEGER NOT NULL DEFAULT 0,
    started_at INTEGER,
    worker     TEXT,
    result     TEXT,
    error      TEXT,
    answer_status INTEGER,
    answer     TEXT,
    forced     INTEGER NOT NULL DEFAULT 0,
    earlier_attempts INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (event_seq, lane)
) WITHOUT ROWID;
-- Every statement that changes a state opens each of these indexes, so there are few. A job that runs at once is only
-- in the first one. SQLite uses a partial index for a query with one of its conditions. IN is not used here: SQLite
-- builds a table of the values for each statement.
-- Jobs by the time at which something is due.
CREATE INDEX hapax_job_due ON hapax_job (state, lane, due_at)
    WHERE state = 0 /* ready */ OR state = 1 /* leased */ OR state = 5 /* held */;
-- Jobs that do not run now, by lane, and those that wait for others by resource.
CREATE INDEX hapax_job_waiting ON hapax_job (state, lane, resource, position)
    WHERE state = 4 /* dead */ OR state = 5 /* held */ OR state = 6 /* parked */ OR state = 7 /* review */;
-- For the lists of operators, from new to old.
CREATE INDEX hapax_job_listed ON hapax_job (state, event_seq)
    WHERE state > 2 /* stale, dead, held, parked, review or discarded */;
CREATE INDEX hapax_job_failed ON hapax_job (event_seq)
    WHERE steps > 0 AND (state = 0 /* ready */ OR state = 6 /* parked */);
-- One job at a time per resource, if the work is done outside the writer: this index decides the race.
CREATE UNIQUE INDEX hapax_job_busy ON hapax_job (lane, resource) WHERE exclusive = 1 AND state = 1 /* leased */;

-- Attempts that failed or were lost; the successful one is in the job itself, with its answer.
CREATE TABLE hapax_attempt (
    event_seq  INTEGER NOT NULL,
    lane       INTEGER NOT NULL,
    run        INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at   INTEGER,
    outcome    TEXT    NOT NULL,
    error      TEXT,
    worker     TEXT    NOT NULL,
    answer_status INTEGER,
    answer     TEXT,
    PRIMARY KEY (event_seq, lane, run, attempt)
) WITHOUT ROWID;

-- The last position applied to a resource, per lane, and its time.
CREATE TABLE hapax_mark (
    lane     INTEGER NOT NULL,
    resource TEXT    NOT NULL,
    position INTEGER NOT NULL,
    moved_at INTEGER NOT NULL,
    PRIMARY KEY (lane, resource)
) WITHOUT ROWID;
CREATE INDEX hapax_mark_age ON hapax_mark (lane, moved_at);

-- Actions of operators, and their reasons.
CREATE TABLE hapax_action (
    action    INTEGER PRIMARY KEY,
    event_seq INTEGER NOT NULL,
    what      TEXT    NOT NULL,
    who       TEXT    NOT NULL,
    reason    TEXT,
    at        INTEGER NOT NULL
);
CREATE INDEX hapax_action_event ON hapax_action (event_seq);

-- Endpoints: the addresses that messages are sent to. A number is never used twice: the row of a deleted
-- endpoint stays, without its secrets.
-- settings: what an operator chose, as JSON; uid is also a column.
-- secrets, headers: sealed.
-- version: grows with every change.
-- failing: why its circuit is not closed.
-- orphans: it was deleted, and may have open deliveries.
-- expiry_announced_at: when it was announced that deliveries of this endpoint expire soon.
CREATE TABLE hapax_endpoint (
    endpoint        INTEGER PRIMARY KEY,
    id              BLOB    NOT NULL UNIQUE,
    tenant          TEXT    NOT NULL,
    uid             TEXT,
    settings        TEXT    NOT NULL,
    secrets         BLOB    NOT NULL,
    headers         BLOB,
    version         INTEGER NOT NULL,
    created_at      INTEGER NOT NULL,
    disabled_at     INTEGER,
    disabled_reason TEXT,
    disabled_by     TEXT,
    failing         TEXT,
    deleted_at      INTEGER,
    orphans         INTEGER NOT NULL DEFAULT 0,
    expiry_announced_at INTEGER
);
CREATE UNIQUE INDEX hapax_endpoint_uid ON hapax_endpoint (tenant, uid)
    WHERE uid IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX hapax_endpoint_failing ON hapax_endpoint (endpoint)
    WHERE failing IS NOT NULL AND disabled_at IS NULL AND deleted_at IS NULL;
CREATE INDEX hapax_endpoint_orphans ON hapax_endpoint (endpoint) WHERE orphans = 1;
CREATE INDEX hapax_endpoint_disabled ON hapax_endpoint (endpoint)
    WHERE disabled_at IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX hapax_endpoint_expiring ON hapax_endpoint (endpoint)
    WHERE expiry_announced_at IS NOT NULL;

-- The part of an endpoint that attempts change: its circuit, its rate and its block.
-- slots: attempts at once while it recovers; null if only its own limit counts.
-- unpark_from: its order was changed, and parked deliveries of messages from here on are to be judged again.
-- spread_until: it was enabled, and its deliveries are spread out until then.
-- deaths: dead deliveries that are not published yet.
-- died_since: the first of them.
-- deaths_published_at: the last message about dead deliveries.
CREATE TABLE hapax_endpoint_state (
    endpoint      INTEGER PRIMARY KEY,
    circuit       INTEGER NOT NULL DEFAULT 0,
    failures      INTEGER NOT NULL DEFAULT 0,
    failing_since INTEGER,
    open_until    INTEGER,
    open_for      INTEGER NOT NULL DEFAULT 0,
    slots         INTEGER,
    rate_at       INTEGER,
    blocked_until INTEGER,
    unpark_from   INTEGER,
    spread_until  INTEGER,
    deaths        INTEGER NOT NULL DEFAULT 0,
    died_since    INTEGER,
    deaths_published_at INTEGER
);
CREATE INDEX hapax_endpoint_deaths ON hapax_endpoint_state (deaths_published_at) WHERE deaths > 0;

-- Keeps: one row for each subject of an alert.
-- data: the content of its messages, as of the last check.
-- reporter: the process that found it last; all zeros is the judge of all nodes.
-- state: 0 pending, 1 raised, 2 cleared.
-- found: the last check of the reporter found it.
-- published: the beginning of the alert was published.
-- since, seen_at: the first and the last check that found it.
CREATE TABLE hapax_alert (
    subject   TEXT PRIMARY KEY,
    data      TEXT NOT NULL,
    reporter  BLOB NOT NULL,
    state     INTEGER NOT NULL,
    found     INTEGER NOT NULL,
    published INTEGER NOT NULL,
    since     INTEGER NOT NULL,
    seen_at   INTEGER NOT NULL,
    silenced_until INTEGER,
    silence_reason TEXT,
    silenced_by    TEXT
) WITHOUT ROWID;

-- The narrow row of a message, which stays as long as its id must be known.
-- deliveries: how many were written with it.
-- event_seq: the event whose handler published it.
-- A message with a key is numbered by its seq among the messages with that key.
CREATE TABLE hapax_message (
    seq         INTEGER PRIMARY KEY,
    tenant      TEXT    NOT NULL,
    id          TEXT    NOT NULL,
    type        TEXT    NOT NULL,
    key         TEXT,
    api_version TEXT,
    fingerprint BLOB    NOT NULL,
    event_seq   INTEGER,
    created_at  INTEGER NOT NULL,
    deliveries  INTEGER NOT NULL,
    UNIQUE (id, tenant)
);
CREATE INDEX hapax_message_event ON hapax_message (event_seq) WHERE event_seq IS NOT NULL;
CREATE INDEX hapax_message_key ON hapax_message (key, seq) WHERE key IS NOT NULL;

-- The bytes that endpoints get, made once. thin: null unless an endpoint wants it. A row is here exactly
-- while its message is whole.
CREATE TABLE hapax_message_body (
    seq  INTEGER PRIMARY KEY,
    body BLOB NOT NULL,
    thin BLOB
);

-- A message for an endpoint.
-- state: 0 ready, 1 leased, 2 delivered, 3 dead, 4 cancelled, 5 parked.
-- due_at: when a ready delivery may be sent, when a lease ends, since when a delivery is parked; otherwise when
--   it ended.
-- wait: as in hapax_job.
-- circuit: the number of the endpoint's circuit at the last claim.
-- key: the order key of its message.
-- place: among the deliveries under that key; a replay takes a new one.
-- started_at, node, took_ms, answer_status, answer: of the last attempt; once it is delivered, of the attempt
--   that delivered.
CREATE TABLE hapax_delivery (
    message_seq   INTEGER NOT NULL,
    endpoint      INTEGER NOT NULL,
    state         INTEGER NOT NULL,
    due_at        INTEGER NOT NULL,
    wait          INTEGER NOT NULL DEFAULT 0,
    fence         INTEGER NOT NULL DEFAULT 0,
    attempt       INTEGER NOT NULL DEFAULT 0,
    steps         INTEGER NOT NULL DEFAULT 0,
    lost          INTEGER NOT NULL DEFAULT 0,
    started_at    INTEGER,
    node          TEXT,
    error         TEXT,
    took_ms       INTEGER,
    answer_status INTEGER,
    answer        TEXT,
    key           TEXT,
    place         INTEGER,
    circuit       INTEGER NOT NULL DEFAULT 0,
    earlier_attempts INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (message_seq, endpoint)
) WITHOUT ROWID;
CREATE INDEX hapax_delivery_ready  ON hapax_delivery (endpoint, due_at) WHERE state = 0 /* ready */;
CREATE INDEX hapax_delivery_leased ON hapax_delivery (endpoint, due_at) WHERE state = 1 /* leased */;
CREATE INDEX hapax_delivery_failed ON hapax_delivery (message_seq) WHERE state = 0 /* ready */ AND steps > 0;
CREATE INDEX hapax_delivery_dead   ON hapax_delivery (message_seq) WHERE state = 3 /* dead */;
CREATE INDEX hapax_delivery_died   ON hapax_delivery (endpoint, due_at) WHERE state = 3 /* dead */;
CREATE INDEX hapax_delivery_parked_since ON hapax_delivery (endpoint, due_at) WHERE state = 5 /* parked */;
CREATE INDEX hapax_delivery_to     ON hapax_delivery (endpoint, message_seq);
CREATE INDEX hapax_delivery_key    ON hapax_delivery (endpoint, key, place)
    WHERE key IS NOT NULL AND state IN (0 /* ready */, 1 /* leased */, 5 /* parked */);
CREATE INDEX hapax_delivery_dead_key ON hapax_delivery (endpoint, key, place)
    WHERE key IS NOT NULL AND state = 3 /* dead */;
CREATE INDEX hapax_delivery_parked ON hapax_delivery (endpoint, message_seq) WHERE state = 5 /* parked */;

-- Attempts that failed or were lost. The attempt that delivered is in the delivery's row, until another
-- attempt follows. took_ms is null if the outcome is unknown.
CREATE TABLE hapax_delivery_attempt (
    message_seq   INTEGER NOT NULL,
    endpoint      INTEGER NOT NULL,
    attempt       INTEGER NOT NULL,
    started_at    INTEGER NOT NULL,
    took_ms       INTEGER,
    answer_status INTEGER,
    answer        TEXT,
    error         TEXT,
    node          TEXT    NOT NULL,
    PRIMARY KEY (message_seq, endpoint, attempt)
) WITHOUT ROWID;

-- Actions of operators on endpoints, messages and deliveries, and their reasons.
CREATE TABLE hapax_sending_action (
    action      INTEGER PRIMARY KEY,
    endpoint    INTEGER,
    message_seq INTEGER,
    what        TEXT    NOT NULL,
    who         TEXT    NOT NULL,
    reason      TEXT,
    at          INTEGER NOT NULL
);
CREATE INDEX hapax_sending_action_message ON hapax_sending_action (message_seq)
    WHERE message_seq IS NOT NULL;

-- Plans: acts of operators on many deliveries of an endpoint, or on many events. A plan runs in slices; the
-- commit of a slice also moves its place and its counts.
-- endpoint, which: set for a plan over deliveries; `which` is dead, all or missing.
-- events: set for a plan over events; its act and its filter, as JSON.
-- until_at: never after created_at, the time of the plan.
-- asked_until: the end that the operator gave.
-- rate: deliveries or events a second.
-- next_at: when the next slice is due.
-- passed_at, passed: the place of the last delivery or event that was taken.
-- last: the message or event where the plan ends.
-- state: running, done or cancelled.
CREATE TABLE hapax_plan (
    plan         INTEGER PRIMARY KEY,
    id           BLOB    NOT NULL UNIQUE,
    endpoint     INTEGER,
    which        TEXT,
    events       TEXT,
    since_at     INTEGER NOT NULL,
    until_at     INTEGER NOT NULL,
    asked_until  INTEGER,
    rate         INTEGER,
    total        INTEGER NOT NULL,
    done         INTEGER NOT NULL DEFAULT 0,
    skipped      INTEGER NOT NULL DEFAULT 0,
    state        TEXT    NOT NULL DEFAULT 'running',
    next_at      INTEGER NOT NULL,
    passed_at    INTEGER NOT NULL,
    passed       INTEGER NOT NULL,
    last         INTEGER NOT NULL,
    who          TEXT    NOT NULL,
    reason       TEXT,
    created_at   INTEGER NOT NULL,
    ended_at     INTEGER,
    request      BLOB    NOT NULL
);
CREATE INDEX hapax_plan_running ON hapax_plan (next_at) WHERE state = 'running';
CREATE INDEX hapax_plan_ended ON hapax_plan (ended_at) WHERE ended_at IS NOT NULL;

-- The secrets of tenants that are added at run time, sealed by the vault.
CREATE TABLE hapax_source_secret (
    tenant  TEXT    NOT NULL,
    source  TEXT    NOT NULL,
    secrets BLOB    NOT NULL,
    set_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant, source)
) WITHOUT ROWID;

-- Tenants whose data is being deleted or was deleted. The rows up to last_event and last_message are covered,
-- and erased up to passed_event and passed_message.
CREATE TABLE hapax_tenant_deletion (
    tenant         TEXT    PRIMARY KEY,
    began_at       INTEGER NOT NULL,
    ended_at       INTEGER,
    last_event     INTEGER NOT NULL,
    passed_event   INTEGER NOT NULL DEFAULT 0,
    last_message   INTEGER NOT NULL,
    passed_message INTEGER NOT NULL DEFAULT 0,
    endpoints      INTEGER NOT NULL DEFAULT 0,
    events         INTEGER NOT NULL DEFAULT 0,
    messages       INTEGER NOT NULL DEFAULT 0,
    who            TEXT    NOT NULL,
    reason         TEXT
) WITHOUT ROWID;
CREATE INDEX hapax_tenant_deletion_running ON hapax_tenant_deletion (tenant) WHERE ended_at IS NULL;

-- The operators that set and deleted the secrets.
CREATE TABLE hapax_source_secret_action (
    action INTEGER PRIMARY KEY,
    tenant TEXT    NOT NULL,
    source TEXT    NOT NULL,
    what   TEXT    NOT NULL,
    who    TEXT    NOT NULL,
    reason TEXT,
    at     INTEGER NOT NULL
);

-- Messages that the running handler publishes. The writer makes messages of these rows in the same
-- transaction, so that the table is empty outside of it.
CREATE TABLE hapax_staged (
    place       INTEGER PRIMARY KEY,
    type        TEXT,
    data        TEXT,
    key         TEXT,
    tenant      TEXT,
    id          TEXT,
    api_version TEXT
);

-- For handlers: INSERT INTO hapax_publish (type, data, key, tenant, id) VALUES …. These checks fail
-- the statement that publishes an invalid message; the writer makes all other checks.
CREATE VIEW hapax_publish AS SELECT type, data, key, tenant, id, api_version FROM hapax_staged WHERE 0;
CREATE TRIGGER hapax_publish_insert INSTEAD OF INSERT ON hapax_publish BEGIN
    SELECT RAISE(ABORT, 'hapax_publish: type and data must not be null')
    WHERE NEW.type IS NULL OR NEW.data IS NULL;
    SELECT RAISE(ABORT, 'hapax_publish: type and id must not be empty')
    WHERE NEW.type = '' OR NEW.id = '';
    SELECT RAISE(ABORT, 'hapax_publish: at most 255 bytes of type, key, tenant and id')
    WHERE max(octet_length(NEW.type), coalesce(octet_length(NEW.key), 0),
              coalesce(octet_length(NEW.tenant), 0), coalesce(octet_length(NEW.id), 0),
              coalesce(octet_length(NEW.api_version), 0)) > 255;
    SELECT RAISE(ABORT, 'hapax_publish: an id has at most 128 characters of A-Z, a-z, 0-9, _ and -')
    WHERE octet_length(NEW.id) > 128 OR NEW.id GLOB '*[^-A-Za-z0-9_]*';
    SELECT RAISE(ABORT, 'hapax_publish: the tenant hapax and types hapax.* are reserved')
    WHERE NEW.tenant = 'hapax' OR NEW.type GLOB 'hapax.*';
    SELECT RAISE(ABORT, 'hapax_publish: at most 1 MiB of data')
    WHERE octet_length(NEW.data) > 1048576;
    SELECT RAISE(ABORT, 'hapax_publish: data is not JSON') WHERE NOT json_valid(NEW.data);
    INSERT INTO hapax_staged (type, data, key, tenant, id, api_version)
    VALUES (NEW.type, NEW.data, NEW.key, NEW.tenant, NEW.id, NEW.api_version);
END;

-- Sessions of the dashboard: the hash of the browser's cookie, and of the token that it stands for.
CREATE TABLE hapax_session (
    hash       BLOB    PRIMARY KEY,
    token      BLOB    NOT NULL,
    who        TEXT    NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE INDEX hapax_session_expiry ON hapax_session (expires_at);

-- Links to the portal: the hash of the code, and once it was exchanged, of the browser's cookie.
CREATE TABLE hapax_portal_link (
    id            BLOB    PRIMARY KEY,
    tenant        TEXT    NOT NULL,
    may_replay    INTEGER NOT NULL,
    may_endpoints INTEGER NOT NULL,
    code          BLOB    NOT NULL UNIQUE,
    session       BLOB,
    created_at    INTEGER NOT NULL,
    expires_at    INTEGER NOT NULL,
    entered_at    INTEGER
);
CREATE INDEX hapax_portal_link_tenant ON hapax_portal_link (tenant);
CREATE INDEX hapax_portal_link_expiry ON hapax_portal_link (expires_at);

-- When the newest pings of a tenant from the portal were sent: a JSON array, oldest first.
CREATE TABLE hapax_portal_ping (
    tenant TEXT PRIMARY KEY,
    sent   TEXT NOT NULL
);

-- Requests to the admin side that change something, including refused ones.
CREATE TABLE hapax_audit (
    entry   INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    who     TEXT    NOT NULL,
    action  TEXT    NOT NULL,
    subject TEXT    NOT NULL,
    status  INTEGER NOT NULL
);

-- The figures of each source: by the minute, after a while by the hour and by the day. width and start are in
-- seconds. A process writes rows of its own; merged rows have the nil node.
-- succeeded: jobs that succeeded.
-- retrying: the growth of the number of jobs that are being retried.
-- *_micros: sums of durations.
-- waiting, dead, review: the highest values in that time.
-- last_arrival: the last second with an arrival.
-- tallies: counts by kind and index, such as durations by bucket (hapax_core::store::Tallies).
CREATE TABLE hapax_traffic (
    width    INTEGER NOT NULL,
    start    INTEGER NOT NULL,
    source   TEXT    NOT NULL,
    node     BLOB    NOT NULL,
    new INTEGER NOT NULL,
    copies INTEGER NOT NULL,
    conflicts INTEGER NOT NULL,
    rejected INTEGER NOT NULL,
    unavailable INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    forced INTEGER NOT NULL,
    failed_attempts INTEGER NOT NULL,
    died INTEGER NOT NULL,
    retrying INTEGER NOT NULL,
    ack_micros INTEGER NOT NULL,
    wait_micros INTEGER NOT NULL,
    processing_micros INTEGER NOT NULL,
    waiting INTEGER NOT NULL,
    dead INTEGER NOT NULL,
    review INTEGER NOT NULL,
    last_arrival INTEGER NOT NULL,
    tallies  BLOB    NOT NULL,
    PRIMARY KEY (width, start, source, node)
) WITHOUT ROWID;
CREATE INDEX hapax_traffic_nodes ON hapax_traffic (start)
    WHERE width = 60 AND node <> x'00000000000000000000000000000000';

-- The names of verifiers: a scheme, and the reference of a secret. number: see hapax_body.secret.
CREATE TABLE hapax_verifier (
    number INTEGER PRIMARY KEY,
    scheme TEXT    NOT NULL,
    secret TEXT    NOT NULL
);

-- The secrets of each source: when a reference was first used for it, and when it last verified a request, to about a
-- minute.
CREATE TABLE hapax_secret_use (
    source      TEXT    NOT NULL,
    tenant      TEXT    NOT NULL,
    scheme      TEXT    NOT NULL,
    secret      TEXT    NOT NULL,
    known_since INTEGER NOT NULL,
    used_at     INTEGER,
    PRIMARY KEY (source, tenant, scheme, secret)
) WITHOUT ROWID;

-- The figures of each endpoint: one row for each hour and each process that counted them. start: in seconds.
-- delivered, failed: attempts. micros: the sum of their durations. tallies: their durations by bucket, as
-- hapax_traffic.tallies.
CREATE TABLE hapax_endpoint_hour (
    endpoint  BLOB    NOT NULL,
    start     INTEGER NOT NULL,
    node      BLOB    NOT NULL,
    delivered INTEGER NOT NULL,
    failed    INTEGER NOT NULL,
    micros    INTEGER NOT NULL,
    tallies   BLOB    NOT NULL,
    PRIMARY KEY (endpoint, start, node)
) WITHOUT ROWID;
CREATE INDEX hapax_endpoint_hour_start ON hapax_endpoint_hour (start);

-- The last refused requests of each source. Few rows, written every few seconds at most.
CREATE TABLE hapax_rejection (
    source     TEXT    NOT NULL,
    at         INTEGER NOT NULL,
    request_id BLOB    NOT NULL,
    remote     TEXT,
    reason     TEXT    NOT NULL,
    detail     TEXT,
    claimed_id TEXT,
    PRIMARY KEY (source, at, request_id)
) WITHOUT ROWID;

-- Idempotency-Keys of a user's API: reserved, then finished with an answer, or abandoned. Storing the answer
-- extends expires_at by the whole TTL; status is null until then. owner (the caller, 'api/acct_1') and realm
-- (the API, 'api') are null without a quota; bytes is the size of the answer.
CREATE TABLE hapax_reservation (
    scope        TEXT    NOT NULL,
    key          TEXT    NOT NULL,
    fingerprint  BLOB    NOT NULL,
    fence        INTEGER NOT NULL,
    attempt      INTEGER NOT NULL,
    leased_until INTEGER NOT NULL,
    lease        INTEGER NOT NULL,
    ttl          INTEGER NOT NULL,
    expires_at   INTEGER NOT NULL,
    status       INTEGER,
    headers      TEXT,
    body         BLOB,
    owner        TEXT,
    realm        TEXT,
    bytes        INTEGER NOT NULL DEFAULT 0,
    UNIQUE (scope, key)
);
CREATE INDEX hapax_reservation_expiry ON hapax_reservation (expires_at);

-- The usage of each API and each of its callers, so that checking a quota needs no count. The writer adds new keys
-- and stored answers once per transaction. The triggers below count all other changes in the statement that makes
-- them. A caller has a row as long as it has a key.
CREATE TABLE hapax_realm_usage (
    realm   TEXT    PRIMARY KEY,
    keys    INTEGER NOT NULL,
    bytes   INTEGER NOT NULL,
    callers INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE hapax_key_usage (
    owner TEXT    PRIMARY KEY,
    realm TEXT    NOT NULL,
    keys  INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TRIGGER hapax_key_usage_first AFTER INSERT ON hapax_key_usage BEGIN
    UPDATE hapax_realm_usage SET callers = callers + 1 WHERE realm = NEW.realm;
END;
CREATE TRIGGER hapax_key_usage_last AFTER DELETE ON hapax_key_usage BEGIN
    UPDATE hapax_realm_usage SET callers = callers - 1 WHERE realm = OLD.realm;
END;

CREATE TRIGGER hapax_reservation_went AFTER DELETE ON hapax_reservation
WHEN OLD.owner IS NOT NULL BEGIN
    UPDATE hapax_key_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
    DELETE FROM hapax_key_usage WHERE owner = OLD.owner AND keys = 0;
    UPDATE hapax_realm_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE realm = OLD.realm;
    DELETE FROM hapax_realm_usage WHERE realm = OLD.realm AND keys = 0;
END;
-- A key was taken over: its old answer is gone.
CREATE TRIGGER hapax_reservation_retaken AFTER UPDATE OF bytes ON hapax_reservation
WHEN NEW.status IS NULL AND NEW.owner IS OLD.owner AND NEW.owner IS NOT NULL AND NEW.bytes <> OLD.bytes BEGIN
    UPDATE hapax_key_usage SET bytes = bytes - OLD.bytes + NEW.bytes WHERE owner = NEW.owner;
    UPDATE hapax_realm_usage SET bytes = bytes - OLD.bytes + NEW.bytes WHERE realm = NEW.realm;
END;
-- A quota was added or removed since the key was first reserved.
CREATE TRIGGER hapax_reservation_counted AFTER UPDATE OF owner ON hapax_reservation
WHEN NEW.owner IS NOT NULL AND OLD.owner IS NULL BEGIN
    INSERT INTO hapax_realm_usage (realm, keys, bytes, callers) VALUES (NEW.realm, 1, NEW.bytes, 0)
    ON CONFLICT (realm) DO UPDATE SET keys = keys + 1, bytes = bytes + excluded.bytes;
    INSERT INTO hapax_key_usage (owner, realm, keys, bytes) VALUES (NEW.owner, NEW.realm, 1, NEW.bytes)
    ON CONFLICT (owner) DO UPDATE SET keys = keys + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER hapax_reservation_uncounted AFTER UPDATE OF owner ON hapax_reservation
WHEN NEW.owner IS NULL AND OLD.owner IS NOT NULL BEGIN
    UPDATE hapax_key_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
    DELETE FROM hapax_key_usage WHERE owner = OLD.owner AND keys = 0;
    UPDATE hapax_realm_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE realm = OLD.realm;
    DELETE FROM hapax_realm_usage WHERE realm = OLD.realm AND keys = 0;
END;

CREATE VIEW hapax_processed_events AS
WITH standing AS (
    SELECT e.seq,
           CASE WHEN e.state = 1 /* review */ THEN 'review'
                WHEN e.state = 2 /* discarded */ THEN 'discarded'
                ELSE CASE (SELECT min(CASE j.state WHEN 7 THEN 0
                                           WHEN 8 THEN 1
                                           WHEN 4 THEN 2
                                           WHEN 5 THEN 4
                                           WHEN 1 THEN 5
                                           WHEN 2 THEN 7
                                           WHEN 3 THEN 8
                                           ELSE CASE WHEN j.steps > 0 THEN 3 ELSE 6 END END)
                           FROM hapax_job j WHERE j.event_seq = e.seq)
                     WHEN 0 THEN 'review' WHEN 1 THEN 'discarded' WHEN 2 THEN 'dead' WHEN 3 THEN 'failed' WHEN 4 THEN 'held'
                     WHEN 5 THEN 'processing' WHEN 6 THEN 'received' WHEN 7 THEN 'processed'
                     WHEN 8 THEN 'stale' ELSE 'ignored' END
           END AS status
    FROM hapax_event e)
SELECT lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)) AS id,
       e.event_id,
       p.tenant,
       p.source,
       b.event_type,
       lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)) AS idempotency_key,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.received_at / 1000000.0, 'unixepoch') AS received_at,
       CASE WHEN s.status IN ('processed', 'stale') THEN
            (SELECT strftime('%Y-%m-%dT%H:%M:%fZ', max(j.due_at) / 1000000.0, 'unixepoch')
             FROM hapax_job j WHERE j.event_seq = e.seq) END AS processed_at,
       s.status IN ('processed', 'stale') AS processed,
       s.status,
       (SELECT j.result FROM hapax_job j WHERE j.event_seq = e.seq AND j.result IS NOT NULL
        ORDER BY j.lane LIMIT 1) AS result,
       CAST(b.body AS TEXT) AS payload
FROM hapax_event e JOIN hapax_body b ON b.seq = e.seq JOIN hapax_pair p ON p.pair = e.pair
     JOIN standing s ON s.seq = e.seq;

CREATE VIEW hapax_arrivals AS
SELECT lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)) AS id,
       e.event_id,
       CASE WHEN e.review <> 0 THEN 'review' ELSE 'accepted' END AS decision,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.received_at / 1000000.0, 'unixepoch') AS received_at,
       b.remote
FROM hapax_event e LEFT JOIN hapax_body b ON b.seq = e.seq
UNION ALL
SELECT lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)),
       e.event_id,
       CASE WHEN a.conflict THEN 'conflict' ELSE 'duplicate' END,
       strftime('%Y-%m-%dT%H:%M:%fZ', a.received_at / 1000000.0, 'unixepoch'),
       a.remote
FROM hapax_arrival a JOIN hapax_event e ON e.seq = a.event_seq;

CREATE VIEW hapax_attempts AS
SELECT e.event_id, h.source, h.name AS handler, a.run, a.attempt, a.outcome, a.error, a.worker,
       strftime('%Y-%m-%dT%H:%M:%fZ', a.started_at / 1000000.0, 'unixepoch') AS started_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', a.ended_at / 1000000.0, 'unixepoch') AS ended_at,
       a.answer_status, a.answer
FROM hapax_attempt a JOIN hapax_event e ON e.seq = a.event_seq
     JOIN hapax_lane l ON l.lane = a.lane JOIN hapax_handler h ON h.handler = l.handler
UNION ALL
SELECT e.event_id, h.source, h.name, j.run, j.attempt, 'done', NULL, j.worker,
       strftime('%Y-%m-%dT%H:%M:%fZ', j.started_at / 1000000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', j.due_at / 1000000.0, 'unixepoch'),
       j.answer_status, j.answer
FROM hapax_job j JOIN hapax_event e ON e.seq = j.event_seq
     JOIN hapax_lane l ON l.lane = j.lane JOIN hapax_handler h ON h.handler = l.handler
WHERE j.state = 2 /* done */;

CREATE VIEW hapax_dead_letters AS
SELECT e.event_id, p.tenant, p.source, h.name AS handler, b.event_type, j.run, j.attempt, j.error,
       strftime('%Y-%m-%dT%H:%M:%fZ', j.due_at / 1000000.0, 'unixepoch') AS buried_at
FROM hapax_job j JOIN hapax_event e ON e.seq = j.event_seq JOIN hapax_body b ON b.seq = e.seq
     JOIN hapax_pair p ON p.pair = e.pair JOIN hapax_lane l ON l.lane = j.lane JOIN hapax_handler h ON h.handler = l.handler
WHERE j.state = 4 /* dead */;

-- The status of a delivery in words: as hapax_core::delivery has it.
CREATE VIEW hapax_deliveries AS
SELECT printf('%s-%s-7%s-%04x-%012x',
              substr(printf('%012x', m.created_at / 1000), 1, 8),
              substr(printf('%012x', m.created_at / 1000), 9),
              lower(substr(hex(m.fingerprint), 1, 3)),
              32768 | (d.endpoint >> 8),
              ((d.endpoint & 255) << 40) | d.message_seq) AS id,
       m.id AS message,
       lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)) AS endpoint,
       CASE d.state WHEN 1 THEN 'sending' WHEN 2 THEN 'delivered' WHEN 3 THEN 'dead' WHEN 4 THEN 'cancelled'
            ELSE CASE WHEN e.deleted_at IS NOT NULL THEN 'cancelled'
                      WHEN e.disabled_at IS NOT NULL OR e.failing IS NOT NULL THEN 'held'
                      WHEN d.state = 5 /* parked */ THEN 'parked'
                      WHEN d.steps > 0 THEN 'failed' ELSE 'waiting' END
       END AS status,
       d.attempt,
       strftime('%Y-%m-%dT%H:%M:%fZ', m.created_at / 1000000.0, 'unixepoch') AS created_at,
       CASE WHEN d.state = 2 /* delivered */
            THEN strftime('%Y-%m-%dT%H:%M:%fZ', d.due_at / 1000000.0, 'unixepoch') END AS delivered_at
FROM hapax_delivery d JOIN hapax_message m ON m.seq = d.message_seq
     JOIN hapax_endpoint e ON e.endpoint = d.endpoint;
