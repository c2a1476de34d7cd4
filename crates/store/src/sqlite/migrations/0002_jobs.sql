-- Jobs: the work that events promise, written in their commit. Names of ours start with hapax_.

CREATE TABLE hapax_handler (
    handler INTEGER PRIMARY KEY,
    source  TEXT NOT NULL,
    name    TEXT NOT NULL,
    UNIQUE (source, name)
);

-- A lane holds the jobs of one handler for one tenant. Claims go over the lanes of a handler in
-- turn, so that a noisy tenant does not starve the others.
CREATE TABLE hapax_lane (
    lane    INTEGER PRIMARY KEY,
    pair    INTEGER NOT NULL,
    handler INTEGER NOT NULL,
    UNIQUE (pair, handler)
);

-- state: 0 ready, 1 leased, 2 done, 3 stale, 4 dead, 5 held, 6 parked.
-- due_at: ready: from when; leased: until when; held and parked: since when; else: when it ended.
-- wait: how long the wait is that due_at ends. A due time further ahead than that was written before
-- the clock was set back.
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
    PRIMARY KEY (event_seq, lane)
) WITHOUT ROWID;
CREATE INDEX hapax_job_ready  ON hapax_job (lane, due_at) WHERE state = 0;
CREATE INDEX hapax_job_leased ON hapax_job (lane, due_at) WHERE state = 1;
CREATE INDEX hapax_job_dead   ON hapax_job (lane) WHERE state = 4;
CREATE INDEX hapax_job_waits  ON hapax_job (lane, resource, position) WHERE state > 4;
-- One at a time per resource, if the work is done outside the writer: this index decides the race.
CREATE UNIQUE INDEX hapax_job_busy ON hapax_job (lane, resource) WHERE state = 1 AND exclusive = 1;

-- Attempts that failed or were lost; the one that succeeded stands in the job itself, its answer too.
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

-- The last position applied to a resource, per lane, and when that was.
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

-- The outbox: a message is recorded with the commit that publishes it, or not at all.
CREATE TABLE hapax_message (
    message    INTEGER PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    id         TEXT    NOT NULL,
    type       TEXT    NOT NULL,
    data       TEXT    NOT NULL,
    key        TEXT,
    event_seq  INTEGER,
    created_at INTEGER NOT NULL,
    UNIQUE (tenant, id)
);
CREATE INDEX hapax_message_event ON hapax_message (event_seq) WHERE event_seq IS NOT NULL;
CREATE INDEX hapax_message_age ON hapax_message (created_at);

-- The event whose handler runs now, so that its messages are listed with it.
CREATE TABLE hapax_current (one INTEGER PRIMARY KEY CHECK (one = 1), event_seq INTEGER, at INTEGER);
INSERT INTO hapax_current VALUES (1, NULL, NULL);

-- INSERT INTO hapax_publish (type, data, key, tenant, id) VALUES … inside a handler.
CREATE VIEW hapax_publish AS SELECT type, data, key, tenant, id FROM hapax_message WHERE 0;
CREATE TRIGGER hapax_publish_insert INSTEAD OF INSERT ON hapax_publish BEGIN
    SELECT RAISE(ABORT, 'hapax_publish: type is missing') WHERE NEW.type IS NULL OR NEW.type = '';
    SELECT RAISE(ABORT, 'hapax_publish: data is not JSON') WHERE NEW.data IS NULL OR NOT json_valid(NEW.data);
    INSERT INTO hapax_message (tenant, id, type, data, key, event_seq, created_at)
    SELECT coalesce(NEW.tenant, 'default'), coalesce(NEW.id, 'msg_' || lower(hex(randomblob(16)))),
           NEW.type, NEW.data, NEW.key, event_seq,
           coalesce(at, CAST(unixepoch('subsec') * 1000000 AS INTEGER))
    FROM hapax_current WHERE true
    ON CONFLICT (tenant, id) DO NOTHING;
END;

DROP VIEW hapax_processed_events;
CREATE VIEW hapax_processed_events AS
WITH standing AS (
    SELECT e.seq,
           CASE WHEN e.state = 1 THEN 'review'
                WHEN e.state = 2 THEN 'discarded'
                ELSE CASE (SELECT min(CASE j.state WHEN 4 THEN 2
                                           WHEN 5 THEN 4
                                           WHEN 1 THEN 5
                                           WHEN 2 THEN 7
                                           WHEN 3 THEN 8
                                           ELSE CASE WHEN j.steps > 0 THEN 3 ELSE 6 END END)
                           FROM hapax_job j WHERE j.event_seq = e.seq)
                     WHEN 2 THEN 'dead' WHEN 3 THEN 'failed' WHEN 4 THEN 'held'
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
WHERE j.state = 2;

CREATE VIEW hapax_dead_letters AS
SELECT e.event_id, p.tenant, p.source, h.name AS handler, b.event_type, j.run, j.attempt, j.error,
       strftime('%Y-%m-%dT%H:%M:%fZ', j.due_at / 1000000.0, 'unixepoch') AS buried_at
FROM hapax_job j JOIN hapax_event e ON e.seq = j.event_seq JOIN hapax_body b ON b.seq = e.seq
     JOIN hapax_pair p ON p.pair = e.pair JOIN hapax_lane l ON l.lane = j.lane JOIN hapax_handler h ON h.handler = l.handler
WHERE j.state = 4;
