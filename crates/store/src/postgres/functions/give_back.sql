-- Gives back claims whose work never began: the attempt is not counted, and the fence is void.
CREATE OR REPLACE FUNCTION hapax.give_back(jobs uuid[], fences bigint[], now_at timestamptz DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
BEGIN
    FOR j IN
        SELECT x.* FROM unnest(jobs, fences) r (job, fence)
        JOIN hapax.job x ON x.job = r.job AND x.fence = r.fence
        WHERE x.state = hapax.job_state('leased')
        ORDER BY x.job
        FOR UPDATE OF x
    LOOP
        UPDATE hapax.job
        SET state = hapax.job_state('ready'), due_at = at, attempt = greatest(attempt - 1, 0),
            fence = hapax.next_fence(fence), started_at = NULL, worker = NULL, exclusive = false
        WHERE job = j.job;
        IF j.resource IS NOT NULL THEN
            SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
            PERFORM hapax.ready_next(h, j.lane, j.resource, at);
        END IF;
    END LOOP;
END $$;
