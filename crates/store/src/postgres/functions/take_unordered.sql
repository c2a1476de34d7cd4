-- Leases due jobs of a lane, oldest first, at most `room`; their order is decided later, in the
-- transaction of the work. A job in the node's own process that was lost before is taken alone: as the
-- first job of the claim, or not now. seen_until: no job that was due before this time is left in this
-- lane. aside: always null here; hapax.take_in_order returns it.
CREATE OR REPLACE FUNCTION hapax.take_unordered(
    h hapax.handler, of_lane integer, room integer, since timestamptz, is_first boolean, who text,
    at timestamptz,
    OUT taken uuid[], OUT by_itself boolean, OUT seen_until timestamptz, OUT aside uuid[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    first_job uuid;
    first_lost integer;
BEGIN
    SELECT (array_agg(c.job))[1], (array_agg(c.lost))[1],
        array_agg(c.job) FILTER (WHERE c.lost = 0),
        coalesce(min(c.due_at) FILTER (WHERE c.lost > 0), max(c.due_at))
    INTO first_job, first_lost, taken, seen_until FROM (
        SELECT x.job, x.due_at,
            CASE h.workplace WHEN hapax.workplace('node') THEN x.lost ELSE 0 END AS lost
        FROM hapax.job x
        WHERE x.handler = h.handler AND x.lane = of_lane AND x.state = hapax.job_state('ready')
          AND x.due_at <= at AND x.due_at >= since
        ORDER BY x.due_at, x.job LIMIT room
        FOR UPDATE SKIP LOCKED) c;
    by_itself := is_first AND coalesce(first_lost > 0, false);
    IF by_itself THEN
        taken := ARRAY[first_job];
        seen_until := NULL;
    END IF;
    PERFORM hapax.lease_jobs(h, taken, who, at, false);
END $$;
