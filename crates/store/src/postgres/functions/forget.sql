-- Keeps: a key until its source's horizon, and every guard until its own. Deletes events that were
-- stripped and whose key is past its horizon; `bounds` are the first ids after the horizons.
-- Returns the deleted keys.
CREATE OR REPLACE FUNCTION hapax.forget(
    sources text[], bounds uuid[], befores timestamptz[], most integer, now_at timestamptz
) RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- In the order of the index only the first few rows are read; a bitmap would read a source's whole range.
SET enable_bitmapscan = off
AS $$
DECLARE
    moment CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    ripe uuid[];
BEGIN
    PERFORM hapax.commit_without_sync();
    IF NOT pg_try_advisory_xact_lock(x'6861706178000003'::bigint) THEN
        RETURN;
    END IF;
    -- Counting copies checks that the event exists, and must not run between these statements.
    PERFORM pg_advisory_xact_lock(x'6861706178000004'::bigint);
    ripe := ARRAY(
        SELECT old.id FROM unnest(sources, bounds, befores) AS h (source, bound, before),
        LATERAL (
            -- The condition is one range of event_source: for `source =` and `id <` the planner may
            -- read all events by their ids instead.
            SELECT e.id FROM hapax.event e
            WHERE e.received_at < h.before
              AND (e.source, e.id) >= (h.source, '00000000-0000-0000-0000-000000000000')
              AND (e.source, e.id) < (h.source, h.bound)
              AND (SELECT true FROM hapax.body b WHERE b.id = e.id) IS NULL
              -- The event's body may be in a partition whose removal was cut off.
              AND (SELECT true FROM hapax.job j WHERE j.job >= e.id AND j.job <= hapax.last_job(e.id)
                   LIMIT 1) IS NULL
              AND (e.guard IS NULL OR e.guard_until IS NULL OR e.guard_until <= moment)
              AND (SELECT true FROM hapax.seen s
                   WHERE s.event = e.id AND s.until > moment LIMIT 1) IS NULL
            ORDER BY e.source, e.id LIMIT most FOR UPDATE SKIP LOCKED
        ) old
        LIMIT most);
    -- A copy that was signed again may have added its guard before the rows above were locked.
    ripe := ARRAY(
        SELECT r.id FROM unnest(ripe) AS r (id)
        WHERE (SELECT true FROM hapax.seen s
               WHERE s.event = r.id AND s.until > moment LIMIT 1) IS NULL);
    DELETE FROM hapax.seen s WHERE s.event = ANY (ripe);
    -- Copies that arrived after its body was deleted were still counted.
    DELETE FROM hapax.arrival a WHERE a.event = ANY (ripe);
    DELETE FROM hapax.copy c WHERE c.event = ANY (ripe);
    DELETE FROM hapax.ended n WHERE n.event = ANY (ripe);
    RETURN QUERY DELETE FROM hapax.event e WHERE e.id = ANY (ripe) RETURNING e.hash;
END $$;
