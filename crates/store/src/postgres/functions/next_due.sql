-- When the next job of a handler is due, or the next lease or hold ends. The time may be too early,
-- and is never too late as far as the calling node knows (see hapax.claim). Null while the handler is
-- paused.
CREATE OR REPLACE FUNCTION hapax.next_due(
    of_handler integer, known_lanes integer[], known_since timestamptz[], leases_since timestamptz,
    now_at timestamptz DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    current_lane integer := 0;
    due timestamptz;
    earliest timestamptz;
    next_known integer;
    next_lane integer;
BEGIN
    PERFORM FROM hapax.handler h WHERE h.handler = of_handler AND h.paused_at IS NOT NULL;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    SELECT x.due_at INTO earliest FROM hapax.job x
    WHERE x.handler = of_handler AND x.state = hapax.job_state('leased')
      AND x.due_at >= coalesce(leases_since, '-infinity')
    ORDER BY x.due_at LIMIT 1;
    -- A held job stays held until the running job of its resource has ended.
    SELECT x.due_at INTO due FROM hapax.job x
    WHERE x.handler = of_handler AND x.state = hapax.job_state('held')
      AND x.due_at < coalesce(earliest, 'infinity')
      AND (SELECT true FROM hapax.job b
           WHERE b.lane = x.lane AND b.resource = x.resource AND b.state = hapax.job_state('leased')
           LIMIT 1) IS NULL
    ORDER BY x.due_at LIMIT 1;
    earliest := least(earliest, due);
    FOR look IN 1..256 LOOP
        EXIT WHEN earliest <= at;
        SELECT min(k) INTO next_known FROM unnest(known_lanes) k WHERE k > current_lane;
        SELECT x.lane, x.due_at INTO next_lane, due FROM hapax.job x
        WHERE x.handler = of_handler AND x.state = hapax.job_state('ready') AND x.lane > current_lane
          AND x.lane < coalesce(next_known, 2147483647)
        ORDER BY x.lane, x.due_at, x.job LIMIT 1;
        IF NOT FOUND AND next_known IS NOT NULL THEN
            next_lane := next_known;
            SELECT x.due_at INTO due FROM hapax.job x
            WHERE x.handler = of_handler AND x.state = hapax.job_state('ready') AND x.lane = next_known
              AND x.due_at >= known_since[array_position(known_lanes, next_known)]
            ORDER BY x.due_at, x.job LIMIT 1;
        ELSIF NOT FOUND THEN
            RETURN earliest;
        END IF;
        current_lane := next_lane;
        earliest := least(earliest, due);
    END LOOP;
    RETURN least(earliest, at);
END $$;
