-- In the transaction of the work, under the lock of its mark: records a job that must not run as stale
-- or held. This is not an attempt: the claim is not counted, and its fence is void. False: the
-- fence is lost.
CREATE OR REPLACE FUNCTION hapax.set_aside(
    of_job uuid, of_fence bigint, to_hold boolean, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
BEGIN
    SELECT * INTO j FROM hapax.job x WHERE x.job = of_job FOR UPDATE;
    IF NOT FOUND OR j.fence IS DISTINCT FROM of_fence OR j.state <> hapax.job_state('leased') THEN
        RETURN false;
    END IF;
    SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
    UPDATE hapax.job SET attempt = greatest(attempt - 1, 0), fence = hapax.next_fence(fence),
        started_at = NULL, worker = NULL
    WHERE job = of_job;
    IF to_hold THEN
        PERFORM hapax.hold(h, j, at);
    ELSE
        UPDATE hapax.job SET state = hapax.job_state('stale'), due_at = at, exclusive = false
        WHERE job = of_job;
    END IF;
    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
    RETURN true;
END $$;
