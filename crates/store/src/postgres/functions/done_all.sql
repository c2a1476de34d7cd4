-- Keeps: all these jobs are recorded as done, in the transaction of their effects. Returns how many
-- were not recorded, because their fence is lost or they were done before. Unless that is 0, the
-- transaction must not commit.
CREATE OR REPLACE FUNCTION hapax.done_all(
    jobs uuid[], fences bigint[], results text[], now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    plain uuid[];
    missed integer;
BEGIN
    WITH ended AS (
        UPDATE hapax.job j
        SET state = hapax.job_state('done'), due_at = at, result = left(r.result, 200), error = NULL,
            forced = false, exclusive = false
        FROM unnest(jobs, fences, results) r (job, fence, result)
        WHERE j.job = r.job AND j.fence = r.fence AND j.state = hapax.job_state('leased')
          AND j.resource IS NULL
        RETURNING j.job)
    SELECT coalesce(array_agg(e.job), '{}') INTO plain FROM ended e;
    IF cardinality(plain) = cardinality(jobs) THEN
        RETURN 0;
    END IF;
    SELECT count(*) INTO missed
    FROM unnest(jobs, fences, results) WITH ORDINALITY r (job, fence, result, n)
    WHERE r.job <> ALL (plain) AND hapax.done(r.job, r.fence, r.result, at) NOT IN (1, 3);
    RETURN missed;
END $$;
