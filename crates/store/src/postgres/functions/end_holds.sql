-- Ends up to 64 holds of a handler whose deadline has passed, by the handler's rule (hapax.end_hold).
-- A hold continues while a due or running job may still fill its gap. Such holds are passed over before
-- the 64 are counted: holds of a busy resource must not keep those of other resources from ending.
-- Returns the events of these jobs.
CREATE OR REPLACE FUNCTION hapax.end_holds(h hapax.handler, at timestamptz) RETURNS uuid[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    j hapax.job;
    events uuid[] := '{}';
BEGIN
    FOR j IN
        SELECT * FROM hapax.job x
        WHERE x.handler = h.handler AND x.state = hapax.job_state('held') AND x.due_at <= at
          -- Subqueries for each row, because no plan can turn them into a scan of the table. The search for a
          -- due job passes all that were due since the last vacuum, so it comes second.
          AND CASE WHEN (SELECT true FROM hapax.job b
                         WHERE b.lane = x.lane AND b.resource = x.resource
                           AND b.state = hapax.job_state('leased') LIMIT 1) IS NULL
              THEN (SELECT true FROM hapax.job d
                    WHERE d.handler = x.handler AND d.lane = x.lane
                      AND d.state = hapax.job_state('ready') AND d.due_at <= at LIMIT 1) IS NULL
              ELSE false END
        ORDER BY x.due_at LIMIT 64
        FOR UPDATE SKIP LOCKED
    LOOP
        -- A hold that ended just now may have readied jobs.
        PERFORM FROM hapax.job x
        WHERE x.handler = h.handler AND x.lane = j.lane AND x.state = hapax.job_state('ready')
          AND x.due_at <= at;
        CONTINUE WHEN FOUND;
        PERFORM hapax.end_hold(h, j, at);
        events := events || j.event;
    END LOOP;
    RETURN events;
END $$;
