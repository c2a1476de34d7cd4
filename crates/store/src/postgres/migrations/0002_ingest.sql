-- Functions for arriving events that need more than the one statement.

-- The last id that a job of this event can have: its jobs are the range from the event's own id to
-- this. Without a search_path, so that PostgreSQL can inline it.
CREATE FUNCTION hapax.last_job(event uuid) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN pg_catalog.encode(
    overlay(pg_catalog.uuid_send(event) PLACING pg_catalog.decode('ffffff', 'hex') FROM 14), 'hex'
)::pg_catalog.uuid;

-- The rank of a job's state among the statuses of its event: the event has the lowest rank of all
-- its jobs. 0 review, 1 discarded, 2 dead, 3 failed, 4 held, 5 processing, 6 received, 7 processed,
-- 8 stale. Not STRICT, so that PostgreSQL can inline it: a call would cost more than the row.
CREATE FUNCTION hapax.rank(state smallint, steps integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE state
    WHEN 7 THEN 0 WHEN 8 THEN 1 WHEN 4 THEN 2 WHEN 5 THEN 4
    WHEN 1 THEN 5 WHEN 2 THEN 7 WHEN 3 THEN 8
    ELSE CASE WHEN steps > 0 THEN 3 ELSE 6 END
END;

-- Keeps: one number per handler, and one per handler and tenant.
CREATE FUNCTION hapax.lane_of(
    of_source text, of_name text, of_tenant text, OUT handler integer, OUT lane integer
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    -- Looked for first: a failed insert would still use up a number.
    LOOP
        SELECT h.handler INTO lane_of.handler FROM hapax.handler h
        WHERE h.source = of_source AND h.name = of_name;
        EXIT WHEN FOUND;
        INSERT INTO hapax.handler (source, name) VALUES (of_source, of_name) ON CONFLICT DO NOTHING;
    END LOOP;
    LOOP
        SELECT l.lane INTO lane_of.lane FROM hapax.lane l
        WHERE l.handler = lane_of.handler AND l.tenant = of_tenant;
        EXIT WHEN FOUND;
        INSERT INTO hapax.lane (handler, tenant) VALUES (lane_of.handler, of_tenant)
        ON CONFLICT DO NOTHING;
    END LOOP;
END $$;

-- A job's id: its event's, with the lane in the last 24 bits.
CREATE FUNCTION hapax.job_id(event uuid, lane integer) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN pg_catalog.encode(
    overlay(pg_catalog.uuid_send(event)
            PLACING pg_catalog.substring(pg_catalog.int4send(lane), 2, 3) FROM 14), 'hex'
)::pg_catalog.uuid;

-- When a new job is due: after the first wait of its schedule, ±20 %, so that jobs that arrived
-- together are not due together; a job that is dead on arrival (state 4), at once.
CREATE FUNCTION hapax.first_due(at timestamptz, retry bigint[], state smallint) RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN at + retry[1] * CASE state WHEN 4 THEN 0 ELSE 0.8 + 0.4 * pg_catalog.random() END
    * interval '1 microsecond';

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
    replay_hash uuid
);
-- replay_hash: the key under which it waits for a person if its guard was seen with another event.
-- copies: the same guard is the same event. before, after: the keys of the spans beside this one, of
-- which an event counts that came between not_before and not_after.
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
CREATE TYPE hapax.promised AS (
    n        integer,
    handler  integer,
    lane     integer,
    state    smallint,
    resource text,
    position bigint,
    error    text
);

-- Keeps: one Event per (tenant, source, event id) and per guard, with its jobs, in the cases that take
-- more than a look: late ones, replays, derived keys, conflicts. Unique hashes and guards decide every
-- race: the loser looks again. Rows come sorted by hash, so that two batches seldom wait in a circle.
-- verdict: 0 accepted, 1 duplicate, 2 conflict, 3 review, 4 promoted out of review.
CREATE FUNCTION hapax.ingest(
    arrived hapax.arrived[], doubts hapax.doubt[], promised hapax.promised[],
    conflicts_max bigint, now_at timestamptz
) RETURNS TABLE (row_number integer, verdict smallint, id uuid)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    moment CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    r record;
    met hapax.event;
    holder uuid;
    filed uuid;
    key_hash uuid;
    key_event_id bytea;
    why smallint;
    counted bigint;
    decided smallint;
    decided_id uuid;
BEGIN
    -- The same notice on both sides of a span's edge has two keys, so no constraint decides between
    -- them: a transaction that looks at a neighbouring key must not miss one that is writing it.
    PERFORM pg_advisory_xact_lock(l.lock) FROM (
        SELECT DISTINCT
            ('x' || encode(substr(uuid_send(one_of.hash), 1, 8), 'hex'))::bit(64)::bigint AS lock
        FROM ROWS FROM (unnest(arrived), unnest(doubts)) AS u,
             LATERAL (VALUES (u.hash), (u.before), (u.after)) AS one_of (hash)
        WHERE u.before IS NOT NULL
        ORDER BY 1
    ) l;
    FOR r IN
        SELECT * FROM ROWS FROM (unnest(arrived), unnest(doubts)) WITH ORDINALITY AS u (
            id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
            request_id, remote, secret, signed_at, headers, body, guard, guard_us, replay_hash,
            late, copies, before, after, not_before, not_after, other_hash, other_event_id,
            replay_event_id, n
        )
    LOOP
        decided := NULL;
        FOR turn IN 1..8 LOOP
            key_hash := r.hash;
            key_event_id := r.event_id;
            holder := NULL;
            SELECT * INTO met FROM hapax.event e WHERE e.hash = r.hash;
            IF NOT FOUND AND r.before IS NOT NULL THEN
                SELECT * INTO met FROM hapax.event e
                WHERE e.hash IN (r.before, r.after)
                  AND e.received_at BETWEEN r.not_before AND r.not_after
                ORDER BY e.received_at LIMIT 1;
            END IF;
            IF r.guard IS NOT NULL THEN
                SELECT e.id INTO holder FROM hapax.event e WHERE e.guard = r.guard;
                IF NOT FOUND THEN
                    SELECT s.event INTO holder FROM hapax.seen s WHERE s.hash = r.guard;
                END IF;
                IF met.id IS NULL AND holder IS NOT NULL AND r.copies THEN
                    SELECT * INTO met FROM hapax.event e WHERE e.id = holder;
                    -- Forgotten since the look: so is its guard.
                    CONTINUE WHEN NOT FOUND;
                END IF;
            END IF;
            filed := NULL;
            IF r.replay_hash IS NOT NULL AND met.body_hash IS DISTINCT FROM r.body_hash THEN
                SELECT e.id INTO filed FROM hapax.event e WHERE e.hash = r.replay_hash;
            END IF;
            IF filed IS NOT NULL THEN
                decided := 1;
                decided_id := filed;
                EXIT;
            ELSIF r.replay_hash IS NOT NULL AND met.body_hash IS DISTINCT FROM r.body_hash
                AND holder IS DISTINCT FROM met.id AND holder IS NOT NULL
            THEN
                -- A suspected replay takes from no event the id it came under: that id is not signed.
                key_hash := r.replay_hash;
                key_event_id := r.replay_event_id;
                why := 2;
            ELSIF met.id IS NULL THEN
                why := CASE WHEN r.late THEN 1 ELSE 0 END;
            ELSIF met.body_hash = r.body_hash OR (r.copies AND met.id = holder) THEN
                -- Bytes that were not signed may differ where all that was signed is the same.
                decided := 1;
                decided_id := met.id;
                -- Content that ran as another event is a replay of that one, on time or not.
                IF met.state = 1 AND met.review = 1 AND NOT r.late
                    AND (holder IS NULL OR holder = met.id)
                THEN
                    UPDATE hapax.event e SET state = 0 WHERE e.id = met.id AND e.state = 1;
                    IF NOT FOUND THEN
                        -- Another transaction was faster; read what it wrote.
                        decided := NULL;
                        CONTINUE;
                    END IF;
                    decided := 4;
                END IF;
                EXIT;
            ELSIF r.other_hash IS NOT NULL THEN
                -- A derived key may be too coarse: stored under a separate key, for review.
                key_hash := r.other_hash;
                key_event_id := r.other_event_id;
                SELECT e.id INTO decided_id FROM hapax.event e WHERE e.hash = r.other_hash;
                decided_id := coalesce(decided_id, holder);
                IF decided_id IS NOT NULL THEN
                    decided := 1;
                    EXIT;
                END IF;
                why := 3;
            ELSE
                INSERT INTO hapax.copy AS c (event, copies, conflicts, last_at)
                VALUES (met.id, 1, 1, r.received_at)
                ON CONFLICT (event) DO UPDATE
                SET copies = c.copies + 1, conflicts = c.conflicts + 1,
                    last_at = greatest(c.last_at, excluded.last_at)
                RETURNING c.conflicts INTO counted;
                IF counted <= conflicts_max THEN
                    INSERT INTO hapax.arrival (event, received_at, request_id, conflict, remote,
                                               secret, signed_at, body)
                    VALUES (met.id, r.received_at, r.request_id, true, r.remote, r.secret,
                            r.signed_at, r.body)
                    ON CONFLICT DO NOTHING;
                END IF;
                decided := 2;
                decided_id := met.id;
                EXIT;
            END IF;
            INSERT INTO hapax.event (id, hash, tenant, source, event_id, event_type, occurred_at,
                                     received_at, body_hash, state, review, request_id, remote,
                                     secret, signed_at, guard, guard_until)
            VALUES (r.id, key_hash, r.tenant, r.source, key_event_id, r.event_type, r.occurred_at,
                    r.received_at, r.body_hash, CASE WHEN why = 0 THEN 0 ELSE 1 END, why,
                    r.request_id, r.remote, r.secret, r.signed_at,
                    CASE WHEN holder IS NULL THEN r.guard END,
                    CASE WHEN holder IS NULL THEN moment + r.guard_us * interval '1 microsecond' END)
            ON CONFLICT DO NOTHING;
            IF FOUND THEN
                INSERT INTO hapax.body (id, headers, body) VALUES (r.id, r.headers, r.body);
                decided := CASE WHEN why = 0 THEN 0 ELSE 3 END;
                decided_id := r.id;
                EXIT;
            END IF;
        END LOOP;
        IF decided IS NULL THEN
            RAISE EXCEPTION 'an event was never to be had' USING ERRCODE = 'serialization_failure';
        END IF;
        IF decided IN (1, 2, 4) AND r.guard IS NOT NULL AND holder IS NULL THEN
            -- The signed content of a copy: captured and sent under another id it is a replay as
            -- well. The lock keeps retention from deleting the event in between.
            INSERT INTO hapax.seen (hash, event, until)
            SELECT r.guard, e.id, moment + r.guard_us * interval '1 microsecond'
            FROM hapax.event e WHERE e.id = decided_id FOR KEY SHARE
            ON CONFLICT DO NOTHING;
        END IF;
        IF decided IN (0, 4) THEN
            INSERT INTO hapax.job (job, event, handler, lane, state, due_at, resource, position,
                                   error)
            SELECT hapax.job_id(decided_id, j.lane), decided_id, j.handler, j.lane, j.state,
                   hapax.first_due(moment, h.retry, j.state),
                   j.resource, j.position, j.error
            FROM unnest(promised) AS j
            LEFT JOIN hapax.lane l
                 ON l.lane = j.lane AND l.handler = j.handler AND l.tenant = r.tenant
            LEFT JOIN hapax.handler h ON h.handler = l.handler
            WHERE j.n = r.n;
        END IF;
        ingest.row_number := r.n;
        ingest.verdict := decided;
        ingest.id := decided_id;
        RETURN NEXT;
    END LOOP;
END $$;

-- Keeps: copies are counted, and the newest few of each event are stored in full. A deferred write:
-- a crash may lose the last copies, so no request waits for the disk.
CREATE FUNCTION hapax.count_copies(
    events uuid[], counts bigint[], lasts timestamptz[],
    seen_events uuid[], seen_ats timestamptz[], seen_request_ids uuid[], seen_remotes inet[],
    seen_secrets integer[], seen_signed_ats timestamptz[], keep integer
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    many uuid[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    -- An event that is forgotten meanwhile would leave its copies behind for ever: see hapax.forget.
    PERFORM pg_advisory_xact_lock_shared(x'6861706178000004'::bigint);
    WITH counted AS (
        INSERT INTO hapax.copy AS c (event, copies, conflicts, last_at)
        SELECT u.event, u.copies, 0, u.last_at
        FROM unnest(events, counts, lasts) AS u (event, copies, last_at)
        JOIN hapax.event e ON e.id = u.event
        ORDER BY u.event
        ON CONFLICT (event) DO UPDATE
        SET copies = c.copies + excluded.copies, last_at = greatest(c.last_at, excluded.last_at)
        RETURNING c.event, c.copies
    )
    SELECT array_agg(n.event) INTO many FROM counted n WHERE n.copies > keep;
    INSERT INTO hapax.arrival (event, received_at, request_id, conflict, remote, secret, signed_at)
    SELECT u.event, u.received_at, u.request_id, false, u.remote, u.secret, u.signed_at
    FROM unnest(seen_events, seen_ats, seen_request_ids, seen_remotes, seen_secrets,
                seen_signed_ats)
         AS u (event, received_at, request_id, remote, secret, signed_at)
    JOIN hapax.event e ON e.id = u.event
    ORDER BY u.event, u.received_at, u.request_id
    ON CONFLICT DO NOTHING;
    IF many IS NOT NULL THEN
        DELETE FROM hapax.arrival a USING (
            SELECT o.event, o.received_at, o.request_id, row_number() OVER (
                       PARTITION BY o.event ORDER BY o.received_at DESC, o.request_id DESC) AS place
            FROM hapax.arrival o WHERE o.event = ANY (many) AND NOT o.conflict
        ) old
        WHERE old.place > keep AND a.event = old.event AND a.received_at = old.received_at
          AND a.request_id = old.request_id;
    END IF;
END $$;

-- Keeps: a partition for the bodies of every day. It is created beside the table and then attached,
-- which blocks neither readers nor writers. Two nodes may ask for the same day.
CREATE FUNCTION hapax.make_partition(day date) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := 'body_' || to_char(day, 'YYYYMMDD');
    ms_from bigint := extract(epoch FROM day::timestamp)::bigint * 1000;
    ms_to bigint := ms_from + 86400000;
BEGIN
    PERFORM pg_advisory_xact_lock(x'6861706178000002'::bigint);
    IF to_regclass('hapax.' || name) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE hapax.%I (LIKE hapax.body INCLUDING ALL)', name);
    -- Rows are found only by their id, so the planner needs no statistics.
    EXECUTE format('ALTER TABLE hapax.%I ALTER id SET STATISTICS 0, ALTER headers SET STATISTICS 0,
                        ALTER body SET STATISTICS 0', name);
    EXECUTE format('ALTER TABLE hapax.body ATTACH PARTITION hapax.%I FOR VALUES FROM (%L) TO (%L)',
        name, rpad(lpad(to_hex(ms_from), 12, '0'), 32, '0')::uuid,
        rpad(lpad(to_hex(ms_to), 12, '0'), 32, '0')::uuid);
    RETURN true;
END $$;
