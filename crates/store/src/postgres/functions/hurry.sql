-- Makes the jobs of an event that wait for their next attempt due now.
CREATE OR REPLACE FUNCTION hapax.hurry(of_event uuid, now_at timestamptz DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE hapax.job SET due_at = coalesce(now_at, statement_timestamp())
    WHERE job IN (
        SELECT x.job FROM hapax.job x
        WHERE x.job BETWEEN of_event AND hapax.last_job(of_event)
          AND x.state = hapax.job_state('ready') AND x.due_at > coalesce(now_at, statement_timestamp())
        FOR UPDATE SKIP LOCKED);
$$;
