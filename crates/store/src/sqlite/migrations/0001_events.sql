-- Events, their key index, and how often each arrived. Every name of ours starts with hapax_.

CREATE TABLE hapax_meta (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;
-- merged_through: every key of an event up to this seq is in hapax_key.
-- last_seq: no event ever had a higher one, even if it was pruned since.
-- epoch: raised after a write that failed, so that its remains in the log are overwritten.
INSERT INTO hapax_meta (name, value) VALUES ('merged_through', 0), ('last_seq', 0), ('epoch', 0);

-- A (tenant, source) pair, so that an event names it with one small number.
CREATE TABLE hapax_pair (
    pair   INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    source TEXT NOT NULL,
    UNIQUE (tenant, source)
);

-- The narrow row of an event, which stays as long as its key. Appended to, in the order of the commits.
-- Times are microseconds since 1970.
-- state: 0 open, 1 in review, 2 discarded. review: 0 none, 1 late, 2 replay, 3 conflict.
-- guard_hash: what was signed, where this event was the first to bring it; it stands in the key index
-- beside the event's key. guard_until: the row stays at least until then; null: as long as its key.
-- pruned: -1 while the event is whole; once its body, jobs and history are gone, the status it ended
-- with: 11 discarded, 17 processed, 18 stale, 19 ignored. Every one of these takes one byte (0 and 1
-- would take none), so that marking a row leaves its size as it is, and no page has to be split.
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
CREATE INDEX hapax_event_review ON hapax_event (state) WHERE state <> 0;

-- The part of an event that retention deletes: the content and how it arrived. A row is here
-- exactly while its event is whole. Rows of one time lie side by side, so deleting a range of them
-- frees whole pages, which the next events fill again.
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

-- The key index: fed in sorted merges from memory, never one random page per event.
CREATE TABLE hapax_key (
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

-- How often an event arrived after the first time.
CREATE TABLE hapax_copy (
    event_seq INTEGER PRIMARY KEY,
    copies    INTEGER NOT NULL,
    conflicts INTEGER NOT NULL,
    last_at   INTEGER NOT NULL
);

-- The newest few of those arrivals in full, and the bodies of conflicts.
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

CREATE VIEW hapax_processed_events AS
SELECT lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)) AS id,
       e.event_id,
       p.tenant,
       p.source,
       b.event_type,
       lower(hex(e.id)) AS idempotency_key,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.received_at / 1000000.0, 'unixepoch') AS received_at,
       NULL AS processed_at,
       0 AS processed,
       CASE e.state WHEN 1 THEN 'review' WHEN 2 THEN 'discarded' ELSE 'ignored' END AS status,
       NULL AS result,
       CAST(b.body AS TEXT) AS payload
FROM hapax_event e JOIN hapax_body b ON b.seq = e.seq JOIN hapax_pair p ON p.pair = e.pair;

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
