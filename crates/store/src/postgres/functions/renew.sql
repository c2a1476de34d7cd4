-- Extends a lease. If the row is locked, the job is being settled: returns true without extending
-- the lease.
CREATE OR REPLACE FUNCTION hapax.renew(of_job uuid, of_fence bigint, lease bigint, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE hapax.job SET due_at = greatest(
        due_at, coalesce(now_at, statement_timestamp()) + lease * interval '1 microsecond')
    WHERE job = (
        SELECT x.job FROM hapax.job x
        WHERE x.job = of_job AND x.fence = of_fence AND x.state = hapax.job_state('leased')
        FOR UPDATE SKIP LOCKED);
    IF NOT FOUND THEN
        PERFORM FROM hapax.job x
        WHERE x.job = of_job AND x.fence = of_fence AND x.state = hapax.job_state('leased');
    END IF;
    RETURN FOUND;
END $$;
