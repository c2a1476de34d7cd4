-- The tables of the schema hapax: events, keys, jobs, messages and deliveries. The database assigns every
-- number here, and its clock decides leases and due times. Functions and views have files of their own.

-- One row: the values that distinguish this database from a restored or promoted copy, and the key
-- under which cache entries in Redis are sealed.
CREATE TABLE hapax.epoch (
    one       boolean PRIMARY KEY DEFAULT true CHECK (one),
    counter   bigint NOT NULL DEFAULT 1,
    cache_key bytea  NOT NULL DEFAULT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
);
INSERT INTO hapax.epoch DEFAULT VALUES;

-- A handler as the nodes last announced it. retry and lease in microseconds: SQL functions follow the
-- schedule too.
-- policy: null none, 0 latest, 1 sequence, 2 machine.
-- workplace: 0 in the node's process, which it may end, 1 in an app that is called, 2 with workers that lease
--   its jobs.
-- paused_at: while it is set, no node claims its jobs.
CREATE TABLE hapax.handler (
    handler  integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    source   text    NOT NULL,
    name     text    NOT NULL,
    retry    bigint[] NOT NULL DEFAULT '{0}',
    lease    bigint  NOT NULL DEFAULT 30000000,
    policy   smallint,
    start_at bigint,
    hold     bigint  NOT NULL DEFAULT 600000000,
    hold_max integer NOT NULL DEFAULT 1000,
    go       boolean NOT NULL DEFAULT false,
    workplace smallint NOT NULL DEFAULT 0,
    paused_at timestamptz,
    paused_by text,
    pause_reason text,
    UNIQUE (source, name)
);

-- A machine's verdict on a step: 0 run, 1 stale, 2 hold. from_at -1 is "no state yet"; every state of the
-- machine has a row that leads to itself; a step between two states that has no row is stale.
CREATE TABLE hapax.transition (
    handler integer  NOT NULL REFERENCES hapax.handler,
    from_at bigint   NOT NULL,
    to_at   bigint   NOT NULL,
    says    smallint NOT NULL,
    PRIMARY KEY (handler, from_at, to_at)
);

-- A lane holds the jobs of one handler for one tenant. Claims go over the lanes of a handler in
-- turn, so that a noisy tenant does not starve the others. Below 2^24: see hapax.job.
CREATE TABLE hapax.lane (
    lane    integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY CHECK (lane < 16777216),
    handler integer NOT NULL REFERENCES hapax.handler,
    tenant  text    NOT NULL,
    UNIQUE (handler, tenant)
);

-- Keeps: one Event per (tenant, source, event id). `hash` decides that race: 16 bytes of SHA-256 over the
-- length-prefixed parts, as a uuid, because that is 16 bytes and nothing else. This is the narrow row, which
-- outlives the event's body. An event is whole exactly while its body is there; afterwards it is pruned, and
-- its jobs and history are gone too.
-- has_jobs: jobs were written for it. A pruned event with jobs was processed and one without jobs was ignored,
--   unless hapax.ended says otherwise.
-- Text of senders is bytea, because text cannot hold a NUL.
-- state: 0 open, 1 in review, 2 discarded.
-- review: 0 none, 1 late, 2 replay, 3 conflict.
CREATE TABLE hapax.event (
    id          uuid     PRIMARY KEY,
    hash        uuid     NOT NULL UNIQUE,
    tenant      text     NOT NULL,
    source      text     NOT NULL,
    event_id    bytea    NOT NULL,
    event_type  bytea,
    occurred_at timestamptz,
    received_at timestamptz NOT NULL,
    body_hash   uuid     NOT NULL,
    state       smallint NOT NULL DEFAULT 0,
    review      smallint NOT NULL DEFAULT 0,
    request_id  uuid     NOT NULL,
    remote      inet,
    secret      integer  NOT NULL,
    signed_at   timestamptz,
    guard       uuid,
    guard_until timestamptz,
    has_jobs    boolean  NOT NULL DEFAULT false
);
-- Keeps: one Event per signed content, whatever ids it arrives under. `guard` is a hash of the signed
-- content, if this event was the first with that content; a replay in review has none.
-- guard_until: the guard is kept at least until then, and is deleted with the key; null means as long as the
--   key.
CREATE UNIQUE INDEX event_guard ON hapax.event (guard) WHERE guard IS NOT NULL;
CREATE INDEX event_review ON hapax.event (id) WHERE state <> 0 /* open */;
-- The keys that retention may delete, each source by its own horizon.
CREATE INDEX event_source ON hapax.event (source, id);

-- How a pruned event ended, where hapax.event.has_jobs does not imply it: 'stale' or 'discarded'.
CREATE TABLE hapax.ended (
    event  uuid PRIMARY KEY,
    status text NOT NULL
);

-- Every (tenant, source) pair that an event has arrived under. A search for a sender's id looks up the hash
-- of the id under each pair: an index over event_id would cost every insert a random page.
CREATE TABLE hapax.pair (
    tenant text NOT NULL,
    source text NOT NULL,
    PRIMARY KEY (tenant, source)
);

-- Headers and bodies, in partitions by the time in the id. Partitions are created ahead, and dropped once
-- they are empty and their time has passed.
CREATE TABLE hapax.body (
    id      uuid  NOT NULL,
    headers bytea NOT NULL,
    body    bytea NOT NULL,
    PRIMARY KEY (id)
) PARTITION BY RANGE (id);

-- The values of events that operators search for: hashes of hapax_core::search. Rows are added by deferred writes, and
-- deleted with the body of their event as ranges.
CREATE TABLE hapax.search_value (
    event uuid NOT NULL,
    hash  uuid NOT NULL,
    PRIMARY KEY (event, hash)
);
CREATE INDEX search_value_hash ON hapax.search_value (hash, event);

-- How far the index has come, for each set of fields that nodes use.
-- through: the first walk has indexed the events up to here that were visible a few seconds after their time.
-- checked: the second walk has come this far, an hour behind; it finds the events of nodes whose clocks are
--   behind.
-- busy_until: a node is indexing for these fields.
-- seen_at: when a node last indexed for these fields.
CREATE TABLE hapax.search_mark (
    fields     uuid PRIMARY KEY,
    through    uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    checked    uuid,
    busy_until timestamptz NOT NULL DEFAULT '-infinity',
    seen_at    timestamptz NOT NULL DEFAULT '-infinity'
);

-- Further signed content of an event: its copies may be signed again. `until` as guard_until.
CREATE TABLE hapax.seen (
    hash  uuid  PRIMARY KEY,
    event uuid  NOT NULL,
    until timestamptz
);
CREATE INDEX seen_event ON hapax.seen (event);

-- The newest arrivals of an event after the first one, and the bodies of conflicts. Most events have none
-- or one, so that a copy costs one row. Somewhat more than the newest few may be here.
CREATE TABLE hapax.arrival (
    event       uuid    NOT NULL,
    received_at timestamptz NOT NULL,
    request_id  uuid    NOT NULL,
    conflict    boolean NOT NULL,
    remote      inet,
    secret      integer NOT NULL,
    signed_at   timestamptz,
    body        bytea,
    PRIMARY KEY (event, received_at, request_id)
);
-- The ids of requests grow with their time, so that a copy is added at the end.
CREATE INDEX arrival_request ON hapax.arrival (request_id);

-- Further arrivals of an event, which no longer have a row in hapax.arrival, and how many of all its
-- arrivals were conflicts.
CREATE TABLE hapax.copy (
    event        uuid   PRIMARY KEY,
    only_counted bigint NOT NULL,
    conflicts    bigint NOT NULL
);

-- Keeps: one Job per event and handler. A job's id is its event's id with the lane in the last 24 bits (an
-- event's id ends in 24 zero bits), so that one index finds a job by its id and all jobs of an event as a
-- range.
-- state: 0 ready, 1 leased, 2 done, 3 stale, 4 dead, 5 held, 6 parked, 7 review, 8 discarded. Statements name
--   it by hapax.job_state; an index cannot, because the functions come after the tables.
-- due_at: when a ready job may run, when a lease ends, the deadline of a held job, since when a job is parked;
--   otherwise when the job ended.
CREATE TABLE hapax.job (
    job        uuid     PRIMARY KEY,
    event      uuid     NOT NULL,
    handler    integer  NOT NULL,
    lane       integer  NOT NULL,
    state      smallint NOT NULL,
    due_at     timestamptz NOT NULL,
    fence      bigint   NOT NULL DEFAULT 0,
    run        integer  NOT NULL DEFAULT 1,
    attempt    integer  NOT NULL DEFAULT 0,
    steps      integer  NOT NULL DEFAULT 0,
    lost       integer  NOT NULL DEFAULT 0,
    forced     boolean  NOT NULL DEFAULT false,
    exclusive  boolean  NOT NULL DEFAULT false,
    resource   text,
    position   bigint,
    started_at timestamptz,
    worker     text,
    result     text,
    error      text,
    answer_status integer,
    answer     text,
    earlier_attempts integer NOT NULL DEFAULT 0
) WITH (fillfactor = 70);
CREATE INDEX job_ready  ON hapax.job (handler, lane, due_at, job) WHERE state = 0 /* ready */;
CREATE INDEX job_leased ON hapax.job (handler, due_at) WHERE state = 1 /* leased */;
CREATE INDEX job_held   ON hapax.job (handler, due_at) WHERE state = 5 /* held */;
CREATE INDEX job_gap    ON hapax.job (lane, resource, position, job) WHERE state = 5 /* held */;
CREATE INDEX job_parked ON hapax.job (handler, lane, resource, position, job) WHERE state = 6 /* parked */;
CREATE INDEX job_dead   ON hapax.job (handler, job) WHERE state IN (4 /* dead */, 7 /* review */);
CREATE INDEX job_at_work ON hapax.job (lane, resource) WHERE state = 1 /* leased */ AND resource IS NOT NULL;
-- For the lists of operators, from new to old. Both hold rare states only: a job that runs at once is never
-- in them.
CREATE INDEX job_listed ON hapax.job (state, job)
    WHERE state IN (3 /* stale */, 4 /* dead */, 5 /* held */, 7 /* review */, 8 /* discarded */);
CREATE INDEX job_failed ON hapax.job (job) WHERE state IN (0 /* ready */, 6 /* parked */) AND steps > 0;
-- Keeps: one at a time per resource, over all nodes. This index decides. A claim that leases the
-- resource with the job sets `exclusive`; SQL handlers run under the lock of the mark instead.
CREATE UNIQUE INDEX job_busy ON hapax.job (lane, resource) WHERE state = 1 /* leased */ AND exclusive;

-- Attempts that failed or were lost; the attempt that succeeded is in the job's row.
CREATE TABLE hapax.attempt (
    job        uuid    NOT NULL,
    run        integer NOT NULL,
    attempt    integer NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at   timestamptz,
    outcome    text    NOT NULL,
    error      text,
    worker     text    NOT NULL,
    answer_status integer,
    answer     text,
    PRIMARY KEY (job, run, attempt)
);

-- The last position applied to a resource, per lane; null if there is none yet. The order guard locks its row,
-- so the first claim of a resource writes it.
-- moved_at: when it last moved, in whole hours, so that a resource which moves often changes no index.
CREATE TABLE hapax.mark (
    lane     integer NOT NULL,
    resource text    NOT NULL,
    position bigint,
    moved_at timestamptz NOT NULL DEFAULT '-infinity',
    PRIMARY KEY (lane, resource)
);
CREATE INDEX mark_age ON hapax.mark (lane, moved_at);

-- Actions of operators, and their reasons.
CREATE TABLE hapax.action (
    action bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    event  uuid   NOT NULL,
    what   text   NOT NULL,
    who    text   NOT NULL,
    reason text,
    at     timestamptz NOT NULL
);
CREATE INDEX action_event ON hapax.action (event);

-- Endpoints: the addresses that messages are sent to. A number is never used twice: the row of a deleted
-- endpoint stays, without its secrets. Below 2^24: see hapax.delivery.
-- settings: all that an operator chose, as JSON text; the columns after it repeat what statements need.
-- types: patterns for LIKE; an endpoint without patterns wants all types. retry and lease in microseconds.
-- keeps_order: deliveries under one key are sent one at a time, in order.
-- parks_dead: a dead delivery keeps the later ones under its key waiting.
-- secrets, headers: sealed.
-- key_ids: the vault keys that a node needs to open them.
-- version: grows with every change.
-- auto_disable: it is disabled after days of nothing but failures.
-- rate_interval: microseconds between two attempts, if it has a rate limit.
-- failing: why its circuit is not closed.
-- orphans: it was deleted, and may have open deliveries.
-- deleted_in: the transaction that deleted it.
CREATE TABLE hapax.endpoint (
    endpoint        integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY CHECK (endpoint < 16777216),
    id              uuid     NOT NULL UNIQUE,
    tenant          text     NOT NULL,
    settings        text     NOT NULL,
    uid             text,
    types           text[]   NOT NULL,
    api_version     text,
    is_thin         boolean  NOT NULL,
    max_in_flight   integer  NOT NULL,
    retry           bigint[] NOT NULL,
    lease           bigint   NOT NULL,
    keeps_order     boolean  NOT NULL DEFAULT false,
    parks_dead      boolean  NOT NULL DEFAULT false,
    auto_disable    boolean  NOT NULL DEFAULT true,
    rate_interval   bigint,
    secrets         bytea    NOT NULL,
    headers         bytea,
    key_ids         bigint[] NOT NULL,
    version         bigint   NOT NULL DEFAULT 1,
    created_at      timestamptz NOT NULL,
    disabled_at     timestamptz,
    disabled_reason text,
    disabled_by     text,
    failing         text,
    deleted_at      timestamptz,
    deleted_in      xid8,
    orphans         boolean  NOT NULL DEFAULT false,
    -- When it was announced that deliveries of this endpoint expire soon.
    expiry_announced_at timestamptz
);
-- Keeps: one endpoint per uid and tenant.
CREATE UNIQUE INDEX endpoint_uid ON hapax.endpoint (tenant, uid)
    WHERE uid IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX endpoint_tenant ON hapax.endpoint (tenant, endpoint) WHERE deleted_at IS NULL;
CREATE INDEX endpoint_enabled ON hapax.endpoint (endpoint)
    WHERE disabled_at IS NULL AND deleted_at IS NULL;
CREATE INDEX endpoint_failing ON hapax.endpoint (endpoint)
    WHERE failing IS NOT NULL AND disabled_at IS NULL AND deleted_at IS NULL;
CREATE INDEX endpoint_orphans ON hapax.endpoint (endpoint) WHERE orphans;
CREATE INDEX endpoint_disabled ON hapax.endpoint (endpoint)
    WHERE disabled_at IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX endpoint_expiring ON hapax.endpoint (endpoint) WHERE expiry_announced_at IS NOT NULL;

-- The part of an endpoint that attempts change: its circuit, its rate and its block. A claim locks the row,
-- so that two nodes never count the attempts under way of one endpoint at the same time. A claim carries the
-- number in circuit.
-- slots: attempts at once while the endpoint recovers; null if only its own limit counts.
-- rate_at: the attempts so far use up the rate limit until this time (hapax_core::rate_limit).
-- unpark_from: its order was changed, and parked deliveries of messages from here on are to be judged again.
-- leased_from: no leased delivery of the endpoint is of an earlier message.
-- spread_until: it was enabled, and its deliveries are spread out until then.
-- deaths: dead deliveries that are not published yet.
-- died_since: the first of them.
-- deaths_published_at: the last message about dead deliveries.
CREATE TABLE hapax.endpoint_state (
    endpoint      integer PRIMARY KEY,
    circuit       bigint  NOT NULL DEFAULT 0,
    failures      integer NOT NULL DEFAULT 0,
    failing_since timestamptz,
    open_until    timestamptz,
    open_for      bigint  NOT NULL DEFAULT 0,
    slots         integer,
    rate_at       timestamptz,
    blocked_until timestamptz,
    unpark_from   bigint,
    leased_from   bigint  NOT NULL DEFAULT 0,
    spread_until  timestamptz,
    deaths        bigint  NOT NULL DEFAULT 0,
    died_since    timestamptz,
    deaths_published_at timestamptz
) WITH (fillfactor = 50);
CREATE INDEX endpoint_deaths ON hapax.endpoint_state (deaths_published_at) WHERE deaths > 0;

-- Keeps: one row for each subject of an alert.
-- key: its id, and the order key of the messages about it.
-- data: the content of those messages, as of the last check.
-- reporter: the node that found it last; the nil id is the judge of all nodes.
-- state: 0 pending, 1 raised, 2 cleared.
-- found: the last check of the reporter found it.
-- published: the beginning of the alert was published.
-- since, seen_at: the first and the last check that found it.
CREATE TABLE hapax.alert (
    subject   text PRIMARY KEY,
    key       text NOT NULL UNIQUE,
    data      text NOT NULL,
    reporter  uuid NOT NULL,
    state     smallint NOT NULL,
    found     boolean NOT NULL,
    published boolean NOT NULL,
    since     timestamptz NOT NULL,
    seen_at   timestamptz NOT NULL,
    silenced_until timestamptz,
    silence_reason text,
    silenced_by    text
) WITH (fillfactor = 50);

-- The processes that are or were alive. name: host and address. stopped: the process shut down normally.
-- handlers: as JSON.
CREATE TABLE hapax.node (
    node       uuid PRIMARY KEY,
    name       text NOT NULL,
    started_at timestamptz NOT NULL,
    seen_at    timestamptz NOT NULL,
    stopped    boolean NOT NULL,
    handlers   text NOT NULL
) WITH (fillfactor = 50);

-- Keeps: reports are written one after the other (version), and one node at a time judges the data of all
-- nodes.
CREATE TABLE hapax.alert_board (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    version     bigint NOT NULL DEFAULT 0,
    judge       uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    judge_until timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);
INSERT INTO hapax.alert_board DEFAULT VALUES;

-- Keeps: one message per tenant and id, recorded with the commit that publishes it or not at all.
-- fingerprint: recognises other content under the same id.
-- body, thin: the bytes that endpoints get, made once; thin is null unless an endpoint wanted it.
--   A message is whole while it has its body; after that it has no deliveries, and only its id is known.
-- deliveries: how many were written with it.
-- written_in: the publishing transaction, so that a job completed in it can find its messages.
-- A message with a key has its own number as its place among the messages with that key.
CREATE TABLE hapax.message (
    message     bigint  PRIMARY KEY,
    tenant      text    NOT NULL,
    id          text    NOT NULL,
    type        text    NOT NULL,
    key         text,
    api_version text,
    fingerprint uuid    NOT NULL,
    event       uuid,
    deliveries  integer NOT NULL,
    created_at  timestamptz NOT NULL,
    written_in  xid8    NOT NULL DEFAULT pg_current_xact_id(),
    body        bytea,
    thin        bytea,
    UNIQUE (id, tenant)
);
CREATE INDEX message_event ON hapax.message (event) WHERE event IS NOT NULL;
CREATE INDEX message_age ON hapax.message (created_at);
-- Retention reads the first of these two indexes from old to new, and deletes by the second.
CREATE INDEX message_whole ON hapax.message (message) WHERE body IS NOT NULL;
CREATE INDEX message_stripped ON hapax.message (created_at) WHERE body IS NULL;
CREATE INDEX message_key ON hapax.message (key, message) WHERE key IS NOT NULL;
-- Below 2^38: see hapax.delivery_id.
CREATE SEQUENCE hapax.message_number MAXVALUE 274877906943;

-- Keeps: one delivery per message and endpoint. hapax.delivery_id makes its id from both.
-- state: 0 ready, 1 leased, 2 delivered, 3 dead, 4 cancelled, 5 parked; by name in hapax.delivery_state.
-- due_at: when a ready delivery may be sent, when a lease ends, since when a delivery is parked; otherwise when
--   it ended.
-- circuit: the number of the endpoint's circuit at the last claim.
-- key: the order key of its message.
-- place: among the deliveries under that key; a replay takes a new one.
-- started_at, node: of the last attempt; null once its fence is void.
-- took_ms, answer_status, answer: of the attempt that delivered.
CREATE TABLE hapax.delivery (
    message       bigint   NOT NULL,
    endpoint      integer  NOT NULL,
    state         smallint NOT NULL,
    due_at        timestamptz NOT NULL,
    fence         bigint   NOT NULL DEFAULT 0,
    attempt       integer  NOT NULL DEFAULT 0,
    steps         integer  NOT NULL DEFAULT 0,
    lost          integer  NOT NULL DEFAULT 0,
    started_at    timestamptz,
    node          text,
    error         text,
    took_ms       bigint,
    answer_status integer,
    answer        text,
    key           text,
    place         bigint,
    circuit       bigint   NOT NULL DEFAULT 0,
    earlier_attempts integer NOT NULL DEFAULT 0,
    PRIMARY KEY (message, endpoint)
) WITH (fillfactor = 70);
CREATE INDEX delivery_ready   ON hapax.delivery (endpoint, due_at, message) WHERE state = 0 /* ready */;
-- The index is on an expression, so that the planner uses no other index for the count of leases, whatever
-- the statistics say. For an empty table an index on all deliveries of an endpoint would seem equally
-- good, and later its scan would read every waiting delivery.
CREATE INDEX delivery_sending ON hapax.delivery ((endpoint + 0), message) WHERE state = 1 /* leased */;
CREATE INDEX delivery_leased  ON hapax.delivery (due_at) WHERE state = 1 /* leased */;
CREATE INDEX delivery_failed  ON hapax.delivery (message) WHERE state = 0 /* ready */ AND steps > 0;
CREATE INDEX delivery_dead    ON hapax.delivery (message) WHERE state = 3 /* dead */;
CREATE INDEX delivery_died    ON hapax.delivery (endpoint, due_at, message) WHERE state = 3 /* dead */;
CREATE INDEX delivery_parked_since ON hapax.delivery (endpoint, due_at) WHERE state = 5 /* parked */;
CREATE INDEX delivery_to      ON hapax.delivery (endpoint, message);
CREATE INDEX delivery_key     ON hapax.delivery (endpoint, key, place)
    WHERE state IN (0, 1, 5) /* open */ AND key IS NOT NULL;
CREATE INDEX delivery_dead_key ON hapax.delivery (endpoint, key, place)
    WHERE state = 3 /* dead */ AND key IS NOT NULL;
CREATE INDEX delivery_parked  ON hapax.delivery (endpoint, message) WHERE state = 5 /* parked */;

-- Attempts that failed or were lost. The attempt that delivered is in the delivery's row, until another
-- attempt follows. took_ms is null if the outcome is unknown.
CREATE TABLE hapax.delivery_attempt (
    message       bigint  NOT NULL,
    endpoint      integer NOT NULL,
    attempt       integer NOT NULL,
    started_at    timestamptz NOT NULL,
    took_ms       bigint,
    answer_status integer,
    answer        text,
    error         text,
    node          text    NOT NULL,
    PRIMARY KEY (message, endpoint, attempt)
);

-- Actions of operators on endpoints, messages and deliveries, and their reasons.
CREATE TABLE hapax.sending_action (
    action   bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    endpoint integer,
    message  bigint,
    what     text NOT NULL,
    who      text NOT NULL,
    reason   text,
    at       timestamptz NOT NULL
);
CREATE INDEX sending_action_message ON hapax.sending_action (message) WHERE message IS NOT NULL;

-- Sessions of the dashboard: the hash of the browser's cookie, and of the token that it stands for.
CREATE TABLE hapax.session (
    hash       bytea       PRIMARY KEY,
    token      bytea       NOT NULL,
    who        text        NOT NULL,
    expires_at timestamptz NOT NULL
);
CREATE INDEX session_expiry ON hapax.session (expires_at);

-- Links to the portal: the hash of the code, and once it was exchanged, of the browser's cookie.
CREATE TABLE hapax.portal_link (
    id            uuid        PRIMARY KEY,
    tenant        text        NOT NULL,
    may_replay    boolean     NOT NULL,
    may_endpoints boolean     NOT NULL,
    code          bytea       NOT NULL UNIQUE,
    session       bytea,
    created_at    timestamptz NOT NULL,
    expires_at    timestamptz NOT NULL,
    entered_at    timestamptz
);
CREATE INDEX portal_link_tenant ON hapax.portal_link (tenant);
CREATE INDEX portal_link_expiry ON hapax.portal_link (expires_at);

-- When the newest pings of a tenant from the portal were sent, oldest first.
CREATE TABLE hapax.portal_ping (
    tenant text          PRIMARY KEY,
    sent   timestamptz[] NOT NULL
);

-- The names of verifiers: a scheme, and the reference of a secret. number: see hapax.event.secret.
CREATE TABLE hapax.verifier (
    number integer PRIMARY KEY,
    scheme text    NOT NULL,
    secret text    NOT NULL
);

-- The secrets of each source: when a reference was first used for it, and when it last verified a request, to about a
-- minute.
CREATE TABLE hapax.secret_use (
    source      text        NOT NULL,
    tenant      text        NOT NULL,
    scheme      text        NOT NULL,
    secret      text        NOT NULL,
    known_since timestamptz NOT NULL,
    used_at     timestamptz,
    PRIMARY KEY (source, tenant, scheme, secret)
);

-- Pulled jobs that apps completed by SQL alone. No node learns of these jobs otherwise: a node takes these
-- rows and counts them. Rows are only added, so that transactions of apps never wait for each other.
CREATE TABLE hapax.completion (
    id          bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    source      text        NOT NULL,
    received_at timestamptz NOT NULL,
    attempt     integer     NOT NULL,
    steps       integer     NOT NULL,
    run         integer     NOT NULL,
    started_at  timestamptz NOT NULL,
    ended_at    timestamptz NOT NULL
);

-- The figures of each endpoint: one row for each hour and each process that counted them. start: in seconds.
-- delivered, failed: attempts. micros: the sum of their durations. tallies: their durations by bucket, as
-- hapax.traffic.tallies.
CREATE TABLE hapax.endpoint_hour (
    endpoint  uuid   NOT NULL,
    start     bigint NOT NULL,
    node      uuid   NOT NULL,
    delivered bigint NOT NULL,
    failed    bigint NOT NULL,
    micros    bigint NOT NULL,
    tallies   bigint[] NOT NULL,
    PRIMARY KEY (endpoint, start, node)
) WITH (fillfactor = 70);
CREATE INDEX endpoint_hour_start ON hapax.endpoint_hour (start);

-- The last refused requests of each source. Few rows, written every few seconds at most. Text of
-- senders is bytea, because text here cannot hold a NUL.
CREATE TABLE hapax.rejection (
    source     text        NOT NULL,
    at         timestamptz NOT NULL,
    request_id uuid        NOT NULL,
    remote     inet,
    reason     text        NOT NULL,
    detail     bytea,
    claimed_id bytea,
    PRIMARY KEY (source, at, request_id)
);

-- Requests to the admin side that change something, including refused ones.
CREATE TABLE hapax.audit (
    entry   bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL,
    who     text        NOT NULL,
    action  text        NOT NULL,
    subject text        NOT NULL,
    status  integer     NOT NULL
);

-- The figures of each source, on all nodes together: by the minute, after a while by the hour and by the day.
-- width and start are in seconds. A node writes rows of its own; merged rows have the nil node.
-- succeeded: jobs that succeeded.
-- retrying: the growth of the number of jobs that are being retried.
-- *_micros: sums of durations.
-- waiting, dead, review: the highest values in that time.
-- last_arrival: the last second with an arrival.
-- tallies: counts by kind and index, such as durations by bucket; the lowest 12 bits of each number hold kind
--   and index, the bits above them the count.
CREATE TABLE hapax.traffic (
    width    bigint NOT NULL,
    start    bigint NOT NULL,
    source   text   NOT NULL,
    node     uuid   NOT NULL,
    new bigint NOT NULL,
    copies bigint NOT NULL,
    conflicts bigint NOT NULL,
    rejected bigint NOT NULL,
    unavailable bigint NOT NULL,
    succeeded bigint NOT NULL,
    forced bigint NOT NULL,
    failed_attempts bigint NOT NULL,
    died bigint NOT NULL,
    retrying bigint NOT NULL,
    ack_micros bigint NOT NULL,
    wait_micros bigint NOT NULL,
    processing_micros bigint NOT NULL,
    waiting bigint NOT NULL,
    dead bigint NOT NULL,
    review bigint NOT NULL,
    last_arrival bigint NOT NULL,
    tallies  bigint[] NOT NULL,
    PRIMARY KEY (width, start, source, node)
);
CREATE INDEX traffic_nodes ON hapax.traffic (start)
    WHERE width = 60 AND node <> '00000000-0000-0000-0000-000000000000';

-- Plans: acts of operators on many deliveries of an endpoint, or on many events. A plan runs in slices; the
-- commit of a slice also moves its place and its counts.
-- endpoint, which: set for a plan over deliveries.
-- which: dead, all or missing.
-- events: set for a plan over events; its act and its filter, as JSON text.
-- until_at: never after created_at, the time of the plan.
-- asked_until: the end that the operator gave.
-- rate: deliveries or events a second.
-- next_at: when the next slice is due.
-- passed_at, passed: the place of the last delivery that was taken.
-- last_message: where the plan ends.
-- passed_event: the last event that was read.
-- state: running, done or cancelled.
CREATE TABLE hapax.plan (
    id           uuid PRIMARY KEY,
    endpoint     integer,
    which        text,
    events       text,
    since_at     timestamptz NOT NULL,
    until_at     timestamptz NOT NULL,
    asked_until  timestamptz,
    rate         integer,
    total        bigint  NOT NULL,
    done         bigint  NOT NULL DEFAULT 0,
    skipped      bigint  NOT NULL DEFAULT 0,
    state        text    NOT NULL DEFAULT 'running',
    next_at      timestamptz NOT NULL,
    passed_at    timestamptz NOT NULL DEFAULT '-infinity',
    passed       bigint  NOT NULL DEFAULT 0,
    last_message bigint  NOT NULL DEFAULT 0,
    passed_event uuid    NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    who          text    NOT NULL,
    reason       text,
    created_at   timestamptz NOT NULL,
    ended_at     timestamptz,
    request      uuid    NOT NULL,
    alone        boolean NOT NULL DEFAULT false,
    waits_for    text[]  NOT NULL DEFAULT '{}',
    CHECK ((endpoint IS NULL) = (events IS NOT NULL) AND (endpoint IS NULL) = (which IS NULL))
) WITH (fillfactor = 50);
CREATE INDEX plan_running ON hapax.plan (next_at) WHERE state = 'running';
-- Keeps: of the plans of an endpoint that must run alone, at most one runs.
CREATE UNIQUE INDEX plan_alone ON hapax.plan (endpoint) WHERE state = 'running' AND alone;
CREATE INDEX plan_age ON hapax.plan (created_at);
CREATE INDEX plan_ended ON hapax.plan (ended_at) WHERE ended_at IS NOT NULL;

-- The secrets of tenants that are added at run time, sealed by the vault.
CREATE TABLE hapax.source_secret (
    tenant  text  NOT NULL,
    source  text  NOT NULL,
    secrets bytea NOT NULL,
    set_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant, source)
);

-- Keeps: a change of hapax.source_secret is applied only to the version that it was decided for. The row is
-- locked by each change.
CREATE TABLE hapax.source_secret_version (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version bigint  NOT NULL
);
INSERT INTO hapax.source_secret_version (version) VALUES (0);

-- Tenants whose data is being deleted or was deleted.
-- began_in: the transaction that began the deletion. The deletion covers events whose transactions began
--   before that one, and messages up to last_message.
-- phase: 0 events, 1 messages, 2 keys of hapax.once, 3 the pass is over.
-- is_last_pass: null before the first slice of a pass.
-- passed_*: how far the pass has come.
-- next_at: when the next slice is due.
CREATE TABLE hapax.tenant_deletion (
    tenant         text     PRIMARY KEY,
    began_at       timestamptz NOT NULL,
    began_in       xid8     NOT NULL,
    ended_at       timestamptz,
    next_at        timestamptz NOT NULL,
    phase          smallint NOT NULL DEFAULT 0,
    is_last_pass   boolean,
    passed_source  text     NOT NULL DEFAULT '',
    passed_event   uuid     NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    last_message   bigint   NOT NULL,
    passed_message bigint   NOT NULL DEFAULT 0,
    endpoints      bigint   NOT NULL DEFAULT 0,
    events         bigint   NOT NULL DEFAULT 0,
    messages       bigint   NOT NULL DEFAULT 0,
    who            text     NOT NULL,
    reason         text
);
CREATE INDEX tenant_deletion_running ON hapax.tenant_deletion (next_at) WHERE ended_at IS NULL;

-- The operators that set and deleted the secrets.
CREATE TABLE hapax.source_secret_action (
    action bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    tenant text NOT NULL,
    source text NOT NULL,
    what   text NOT NULL,
    who    text NOT NULL,
    reason text,
    at     timestamptz NOT NULL
);

-- Idempotency-Keys: reserved, then finished with an answer, or abandoned. A fence is not guessable, and
-- larger than the one before it: by the row while the key is kept, and after that by the time.
-- attempt: how often the key was reserved without an answer.
-- owner: the caller that it counts for ('api/acct_1'), null where no quota holds.
-- bytes: the size of the answer.
CREATE TABLE hapax.reservation (
    scope        text        NOT NULL,
    key          text        NOT NULL,
    fingerprint  bytea       NOT NULL,
    fence        bigint      NOT NULL,
    leased_until timestamptz NOT NULL,
    ttl          interval    NOT NULL,
    expires_at   timestamptz NOT NULL,
    status       integer,
    headers      jsonb,
    body         bytea,
    attempt      integer     NOT NULL DEFAULT 1,
    owner        text,
    bytes        bigint      NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, key)
);
CREATE INDEX reservation_expiry ON hapax.reservation (expires_at);

-- The usage of each caller, and of each API ('api', without a slash), so that checking a quota
-- needs no count. Triggers update the usage in the same statement that changes a reservation:
-- nothing can be missed or counted twice. The usage of an owner is the sum over its rows. There is
-- one row for each transaction that counts for it at the same time, so that none ever waits for
-- another here, least of all for a user's transaction that stays open. callers: how many owners an
-- API has; such an owner has a row 0.
CREATE TABLE hapax.key_usage (
    owner   text   NOT NULL,
    slot    bigint NOT NULL,
    keys    bigint NOT NULL,
    bytes   bigint NOT NULL,
    callers bigint NOT NULL,
    PRIMARY KEY (owner, slot)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
-- The rows to be merged.
CREATE INDEX key_usage_apart ON hapax.key_usage (owner) WHERE slot <> 0;
CREATE SEQUENCE hapax.key_usage_slot;

-- The parameters of an arrival, of the reasons for doubt, and of its jobs. Each is a separate type,
-- because a table's type changes with the table. A later step creates new types and alters none of
-- these: nodes of the version before send them as they are.
CREATE TYPE hapax.arrived AS (
    id          uuid,
    hash        uuid,
    tenant      text,
    source      text,
    event_id    bytea,
    event_type  bytea,
    occurred_at timestamptz,
    received_at timestamptz,
    body_hash   uuid,
    request_id  uuid,
    remote      inet,
    secret      integer,
    signed_at   timestamptz,
    headers     bytea,
    body        bytea,
    guard       uuid,
    guard_us    bigint,
    replay_hash uuid,
    has_jobs    boolean
);
-- replay_hash: the key under which it waits for an operator if its guard was seen with another
-- event.
-- copies: an arrival with a known guard is a copy of that event.
-- before, after: the keys of the neighbouring spans. An event under one of them is the same event if it was
--   received between not_before and not_after.
CREATE TYPE hapax.doubt AS (
    late           boolean,
    copies         boolean,
    before         uuid,
    after          uuid,
    not_before     timestamptz,
    not_after      timestamptz,
    other_hash     uuid,
    other_event_id bytea,
    replay_event_id bytea
);
-- An Idempotency-Key to reserve, and an answer to store. owner: null without a quota.
CREATE TYPE hapax.key_ask AS (
    scope       text,
    key         text,
    fingerprint bytea,
    lease_us    bigint,
    ttl_us      bigint,
    owner       text,
    max_keys    bigint,
    max_bytes   bigint
);
CREATE TYPE hapax.key_answer AS (
    scope     text,
    key       text,
    fence     bigint,
    status    integer,
    headers   jsonb,
    body      bytea,
    size      bigint,
    owner     text,
    max_keys  bigint,
    max_bytes bigint
);
-- A copy of an event, as hapax.arrival stores it.
CREATE TYPE hapax.copied AS (
    event       uuid,
    received_at timestamptz,
    request_id  uuid,
    remote      inet,
    secret      integer,
    signed_at   timestamptz
);
CREATE TYPE hapax.promised AS (
    n        integer,
    handler  integer,
    lane     integer,
    state    smallint,
    resource text,
    position bigint,
    error    text
);
