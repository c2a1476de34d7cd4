-- Ends up to 64 holds of a handler whose deadline has passed, by the handler's rule (hapax.end_hold).
-- A hold continues while a due or running job may still fill its gap. Returns the events of these
-- jobs.
CREATE OR REPLACE FUNCTION hapax.end_holds(h hapax.handler, at timestamptz) RETURNS uuid[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    j hapax.job;
    events uuid[] := '{}';
BEGIN
    FOR j IN
        SELECT * FROM hapax.job x
        WHERE x.handler = h.handler AND x.state = hapax.job_state('held') AND x.due_at <= at
        ORDER BY x.due_at LIMIT 64
        FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM FROM hapax.job x
        WHERE x.handler = h.handler AND x.lane = j.lane AND x.state = hapax.job_state('ready')
          AND x.due_at <= at;
        CONTINUE WHEN FOUND;
        PERFORM FROM hapax.job x
        WHERE x.lane = j.lane AND x.resource = j.resource AND x.state = hapax.job_state('leased');
        CONTINUE WHEN FOUND;
        PERFORM hapax.end_hold(h, j, at);
        events := events || j.event;
    END LOOP;
    RETURN events;
END $$;
