-- Retention, and views that operators may read with any client.

-- Lets this transaction commit without waiting for the disk or a standby. Only for retention: a crash may
-- bring back what it deleted, and the next round deletes that again. Whatever commits later and waits
-- has everything before it on disk as well.
CREATE FUNCTION hapax.commit_behind() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT set_config('synchronous_commit', 'off', true);
$$;

-- Keeps: the narrow row of every event. Takes the history from events that are finished and past their
-- time, and with `with_bodies` their bodies; else those go with their day. Nothing that is open, dead or
-- waits for a person is touched. The event's row is locked before its jobs are looked at: a replay, which
-- gives it new work, locks it first as well.
-- Answers how far it looked (none: to the end, or another node is at it: `alone`), how many it took, and
-- the sources of those that it left with the time when the oldest of them was received.
CREATE FUNCTION hapax.strip(
    after uuid, bound uuid, before timestamptz, most integer, with_bodies boolean,
    now_at timestamptz,
    OUT reached uuid, OUT taken integer, OUT alone boolean, OUT left_of text[],
    OUT left_since timestamptz[]
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    seen uuid[];
    looked uuid[];
    ripe uuid[];
    first uuid;
    last uuid;
BEGIN
    taken := 0;
    PERFORM hapax.commit_behind();
    alone := pg_try_advisory_xact_lock(x'6861706178000003'::bigint);
    IF NOT alone THEN
        RETURN;
    END IF;
    seen := ARRAY(
        SELECT e.id FROM hapax.event e
        WHERE e.pruned IS NULL AND e.id > after AND e.id < bound AND e.received_at < before
        ORDER BY e.id LIMIT most);
    IF cardinality(seen) = most THEN
        reached := seen[most];
    END IF;
    looked := ARRAY(
        SELECT e.id FROM hapax.event e
        WHERE e.id = ANY (seen) AND e.pruned IS NULL AND e.state <> 1
        ORDER BY e.id FOR UPDATE SKIP LOCKED);
    -- A separate statement, now that no replay can give them work.
    WITH ended AS (
        UPDATE hapax.event e SET pruned = CASE
            WHEN e.state <> 0 THEN 'discarded'
            ELSE CASE s.rank WHEN 1 THEN 'discarded' WHEN 7 THEN 'processed' WHEN 8 THEN 'stale'
                 ELSE 'ignored' END
            END,
            guard = CASE WHEN e.guard_until <= coalesce(now_at, statement_timestamp()) THEN NULL
                         ELSE e.guard END
        FROM unnest(looked) AS l (id) CROSS JOIN LATERAL (
            SELECT min(hapax.rank(j.state, j.steps)) AS rank, bool_and(j.state IN (2, 3, 8)) AS is_over
            FROM hapax.job j WHERE j.job >= l.id AND j.job <= hapax.last_job(l.id)
        ) s
        WHERE e.id = l.id AND s.is_over IS NOT FALSE
        RETURNING e.id)
    SELECT array_agg(x.id ORDER BY x.id) INTO ripe FROM ended x;
    IF cardinality(seen) > coalesce(cardinality(ripe), 0) THEN
        SELECT array_agg(l.source), array_agg(l.since) INTO left_of, left_since FROM (
            SELECT e.source, min(e.received_at) AS since FROM hapax.event e
            WHERE e.id = ANY (seen) AND e.pruned IS NULL GROUP BY e.source) l;
    END IF;
    IF ripe IS NULL THEN
        RETURN;
    END IF;
    taken := cardinality(ripe);
    first := ripe[1];
    last := hapax.last_job(ripe[taken]);
    DELETE FROM hapax.job j USING unnest(ripe) AS r (id)
    WHERE j.job >= r.id AND j.job <= hapax.last_job(r.id);
    -- Most events have none.
    IF EXISTS (SELECT FROM hapax.attempt a WHERE a.job >= first AND a.job <= last) THEN
        DELETE FROM hapax.attempt a USING unnest(ripe) AS r (id)
        WHERE a.job >= r.id AND a.job <= hapax.last_job(r.id);
    END IF;
    DELETE FROM hapax.arrival a WHERE a.event = ANY (ripe);
    DELETE FROM hapax.copy c WHERE c.event = ANY (ripe);
    DELETE FROM hapax.action a WHERE a.event = ANY (ripe);
    IF with_bodies THEN
        -- Within the range of their days: the other partitions are not looked at.
        DELETE FROM hapax.body b WHERE b.id >= first AND b.id <= last AND b.id = ANY (ripe);
    END IF;
END $$;

-- Keeps: a key until its source's horizon, and every guard until its own. Deletes events that were
-- stripped and whose key is past it; `bounds` are the first ids after the horizons. Returns the
-- deleted keys.
CREATE FUNCTION hapax.forget(
    sources text[], bounds uuid[], befores timestamptz[], most integer, now_at timestamptz
) RETURNS SETOF uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moment CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    ripe uuid[];
BEGIN
    PERFORM hapax.commit_behind();
    IF NOT pg_try_advisory_xact_lock(x'6861706178000003'::bigint) THEN
        RETURN;
    END IF;
    -- The count of copies checks that the event exists, and must not run between our statements.
    PERFORM pg_advisory_xact_lock(x'6861706178000004'::bigint);
    ripe := ARRAY(
        SELECT old.id FROM unnest(sources, bounds, befores) AS h (source, bound, before),
        LATERAL (
            -- As one range of event_narrow: for `source =` and `id <` the planner may go over all events
            -- by their ids instead.
            SELECT e.id FROM hapax.event e
            WHERE e.pruned IS NOT NULL AND e.received_at < h.before
              AND (e.source, e.id) >= (h.source, '00000000-0000-0000-0000-000000000000')
              AND (e.source, e.id) < (h.source, h.bound)
              AND (e.guard IS NULL OR e.guard_until IS NULL OR e.guard_until <= moment)
              AND (SELECT true FROM hapax.seen s
                   WHERE s.event = e.id AND s.until > moment LIMIT 1) IS NULL
            ORDER BY e.source, e.id LIMIT most FOR UPDATE SKIP LOCKED
        ) old
        LIMIT most);
    -- A copy that was signed again may have brought its guard before the rows above were locked.
    ripe := ARRAY(
        SELECT r.id FROM unnest(ripe) AS r (id)
        WHERE (SELECT true FROM hapax.seen s
               WHERE s.event = r.id AND s.until > moment LIMIT 1) IS NULL);
    DELETE FROM hapax.seen s WHERE s.event = ANY (ripe);
    -- Copies that came since its body went were counted all the same.
    DELETE FROM hapax.arrival a WHERE a.event = ANY (ripe);
    DELETE FROM hapax.copy c WHERE c.event = ANY (ripe);
    DELETE FROM hapax.body b WHERE b.id = ANY (ripe);
    RETURN QUERY DELETE FROM hapax.event e WHERE e.id = ANY (ripe) RETURNING e.hash;
END $$;

-- Keeps: the mark of a resource until no event can need it. Deletes marks that have not moved since their
-- source's `befores`, at most `most`, and looks at as many lanes. In a sequence or a machine the next event
-- needs the mark, whenever that event comes: those stay. One that a transaction has locked is left.
-- Answers the last lane that it is done with, as its handler and tenant; none: it is done with all.
CREATE FUNCTION hapax.forget_marks(
    sources text[], befores timestamptz[], after_handler integer, after_tenant text, most integer,
    OUT last_handler integer, OUT last_tenant text
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    room integer := most;
    gone integer;
    h record;
    l record;
BEGIN
    PERFORM hapax.commit_behind();
    last_handler := after_handler;
    last_tenant := after_tenant;
    FOR h IN
        SELECT x.handler, b.before FROM unnest(sources, befores) AS b (source, before)
        CROSS JOIN LATERAL (
            SELECT o.handler FROM hapax.handler o
            WHERE o.source = b.source AND o.policy = 0 AND o.handler >= after_handler) x
        ORDER BY x.handler
    LOOP
        FOR l IN
            SELECT x.lane, x.tenant FROM hapax.lane x
            WHERE x.handler = h.handler
              AND x.tenant > CASE h.handler WHEN after_handler THEN after_tenant ELSE '' END
            ORDER BY x.tenant LIMIT room
        LOOP
            DELETE FROM hapax.mark m USING (
                SELECT o.resource FROM hapax.mark o
                WHERE o.lane = l.lane AND o.moved_at < h.before
                ORDER BY o.moved_at LIMIT room FOR UPDATE SKIP LOCKED) old
            WHERE m.lane = l.lane AND m.resource = old.resource;
            GET DIAGNOSTICS gone = ROW_COUNT;
            IF gone >= room AND gone > 0 THEN
                RETURN;
            END IF;
            last_handler := h.handler;
            last_tenant := l.tenant;
            room := room - greatest(gone, 1);
            IF room <= 0 THEN
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
    last_handler := NULL;
    last_tenant := NULL;
END $$;

-- Keeps: a message as long as the history of its time, and a key of the functions until it runs out,
-- by the database's clock; one under a lease, or without an end, stays. At most `most` of each; how
-- many of the greediest went.
CREATE FUNCTION hapax.expire(messages_before timestamptz, most integer, now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moment CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    gone integer;
    mostly integer;
BEGIN
    PERFORM hapax.commit_behind();
    DELETE FROM hapax.message m WHERE m.message IN (
        SELECT o.message FROM hapax.message o WHERE o.created_at < messages_before
        ORDER BY o.created_at LIMIT most FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS mostly = ROW_COUNT;
    DELETE FROM hapax.reservation r USING (
        SELECT o.scope, o.key FROM hapax.reservation o
        WHERE o.expires_at <= moment AND (o.status IS NOT NULL OR o.leased_until <= moment)
        ORDER BY o.expires_at LIMIT most FOR UPDATE SKIP LOCKED) old
    WHERE r.scope = old.scope AND r.key = old.key;
    GET DIAGNOSTICS gone = ROW_COUNT;
    mostly := greatest(mostly, gone);
    DELETE FROM hapax.once_key k USING (
        SELECT o.tenant, o.scope, o.key FROM hapax.once_key o WHERE o.expires_at <= moment
        ORDER BY o.expires_at LIMIT most FOR UPDATE SKIP LOCKED) old
    WHERE k.tenant = old.tenant AND k.scope = old.scope AND k.key = old.key;
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN greatest(mostly, gone);
END $$;

-- The sender's bytes as text; where they are none (a NUL, or not UTF-8), with escapes, so that one
-- such event does not break a whole view.
CREATE FUNCTION hapax.shown(bytes bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
    RETURN encode(bytes, 'escape');
END $$;

CREATE VIEW hapax.processed_events AS
SELECT e.id,
       hapax.shown(e.event_id) AS event_id,
       e.tenant,
       e.source,
       hapax.shown(e.event_type) AS event_type,
       e.id::text AS idempotency_key,
       e.received_at,
       CASE WHEN s.status IN ('processed', 'stale') THEN j.ended_at END AS processed_at,
       s.status IN ('processed', 'stale') AS processed,
       s.status,
       j.result,
       hapax.shown(b.body) AS payload
FROM hapax.event e
LEFT JOIN hapax.body b ON b.id = e.id
LEFT JOIN LATERAL (
    SELECT min(hapax.rank(j.state, j.steps)) AS rank, max(j.due_at) AS ended_at,
           (array_agg(j.result ORDER BY j.job) FILTER (WHERE j.result IS NOT NULL))[1] AS result
    FROM hapax.job j WHERE j.job >= e.id AND j.job <= hapax.last_job(e.id)
) j ON true
CROSS JOIN LATERAL (
    SELECT CASE WHEN e.state = 1 THEN 'review'
                WHEN e.state = 2 THEN 'discarded'
                ELSE CASE j.rank WHEN 0 THEN 'review' WHEN 1 THEN 'discarded' WHEN 2 THEN 'dead'
                                 WHEN 3 THEN 'failed' WHEN 4 THEN 'held' WHEN 5 THEN 'processing'
                                 WHEN 6 THEN 'received' WHEN 7 THEN 'processed'
                                 WHEN 8 THEN 'stale' ELSE 'ignored' END
           END AS status
) s
WHERE e.pruned IS NULL;

CREATE VIEW hapax.arrivals AS
SELECT e.id, hapax.shown(e.event_id) AS event_id,
       CASE WHEN e.review <> 0 THEN 'review' ELSE 'accepted' END AS decision,
       e.received_at, e.remote
FROM hapax.event e
UNION ALL
SELECT e.id, hapax.shown(e.event_id),
       CASE WHEN a.conflict THEN 'conflict' ELSE 'duplicate' END, a.received_at, a.remote
FROM hapax.arrival a JOIN hapax.event e ON e.id = a.event;

CREATE VIEW hapax.attempts AS
SELECT hapax.shown(e.event_id) AS event_id, h.source, h.name AS handler, a.run, a.attempt,
       a.outcome, a.error, a.worker, a.started_at, a.ended_at, a.answer_status, a.answer
FROM hapax.attempt a JOIN hapax.job j ON j.job = a.job JOIN hapax.event e ON e.id = j.event
     JOIN hapax.handler h ON h.handler = j.handler
UNION ALL
SELECT hapax.shown(e.event_id), h.source, h.name, j.run, j.attempt, 'done', NULL, j.worker,
       j.started_at, j.due_at, j.answer_status, j.answer
FROM hapax.job j JOIN hapax.event e ON e.id = j.event
     JOIN hapax.handler h ON h.handler = j.handler
WHERE j.state = 2;

CREATE VIEW hapax.dead_letters AS
SELECT hapax.shown(e.event_id) AS event_id, e.tenant, e.source, h.name AS handler,
       hapax.shown(e.event_type) AS event_type, j.run, j.attempt, j.error, j.due_at AS buried_at
FROM hapax.job j JOIN hapax.event e ON e.id = j.event
     JOIN hapax.handler h ON h.handler = j.handler
WHERE j.state = 4;

-- Nothing is sent yet: the shape that this view will have.
CREATE VIEW hapax.deliveries AS
SELECT NULL::uuid AS id, NULL::text AS message, NULL::text AS endpoint, NULL::text AS status,
       NULL::integer AS attempt, NULL::timestamptz AS created_at, NULL::timestamptz AS delivered_at
WHERE false;

-- Our functions need an explicit grant. A role that may read a view calls the functions in it, so
-- these three are granted to PUBLIC. None of them reads a table.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA hapax FROM PUBLIC;
GRANT EXECUTE ON FUNCTION hapax.shown(bytea), hapax.last_job(uuid), hapax.rank(smallint, integer)
    TO PUBLIC;
