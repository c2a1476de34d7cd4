-- Ends up to 64 leases of a handler that ran out, no earlier than `since` (see hapax.claim). A locked
-- job is being settled and is skipped. ended: how many leases; ended_until: no lease that is left ends
-- before this time.
CREATE OR REPLACE FUNCTION hapax.end_leases(
    h hapax.handler, since timestamptz, at timestamptz,
    OUT ended integer, OUT ended_until timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most CONSTANT integer := 64;
    j hapax.job;
BEGIN
    ended := 0;
    FOR j IN
        SELECT * FROM hapax.job x
        WHERE x.handler = h.handler AND x.state = hapax.job_state('leased') AND x.due_at <= at
          AND x.due_at >= coalesce(since, '-infinity')
        ORDER BY x.due_at LIMIT most
        FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM hapax.lose(h, j, at);
        ended := ended + 1;
        ended_until := j.due_at;
    END LOOP;
    IF ended < most THEN
        ended_until := at - hapax.commit_slack();
    END IF;
END $$;
