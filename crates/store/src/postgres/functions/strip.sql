-- Keeps: the narrow row of every event. Deletes the history of finished events past their time, and
-- with `with_bodies` their bodies; otherwise bodies are dropped with their day. Events that are open,
-- dead or in review stay. The event's row is locked before its jobs are read: a replay, which adds
-- jobs, locks it first as well. Returns the last id read (null: all were read, or another node is
-- pruning: `alone`), the number of stripped events, and the sources of the others with the arrival time
-- of the oldest one.
CREATE OR REPLACE FUNCTION hapax.strip(
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
        WHERE e.id = ANY (seen) AND e.pruned IS NULL AND e.state <> hapax.event_state('review')
        ORDER BY e.id FOR UPDATE SKIP LOCKED);
    -- A separate statement, now that no replay can add jobs.
    WITH ended AS (
        UPDATE hapax.event e SET pruned = CASE
            WHEN e.state <> hapax.event_state('open') THEN 'discarded' ELSE hapax.status(s.rank) END,
            guard = CASE WHEN e.guard_until <= coalesce(now_at, statement_timestamp()) THEN NULL
                         ELSE e.guard END
        FROM unnest(looked) AS l (id) CROSS JOIN LATERAL (
            SELECT min(hapax.rank(j.state, j.steps)) AS rank, bool_and(hapax.is_over(j.state)) AS is_over
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
        -- Within the range of their days: the other partitions are not read.
        DELETE FROM hapax.body b WHERE b.id >= first AND b.id <= last AND b.id = ANY (ripe);
    END IF;
END $$;
