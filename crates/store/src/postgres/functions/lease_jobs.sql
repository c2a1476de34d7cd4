-- Keeps: attempt+1 and a new fence, before the work. Leases jobs whose rows are locked. in_order: the
-- resource is leased with the job, and the unique index job_busy decides if two transactions do so.
CREATE OR REPLACE FUNCTION hapax.lease_jobs(
    h hapax.handler, jobs uuid[], who text, at timestamptz, in_order boolean)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE hapax.job x
    SET state = hapax.job_state('leased'), due_at = at + h.lease * interval '1 microsecond',
        fence = hapax.next_fence(x.fence), attempt = x.attempt + 1, started_at = at, worker = who,
        exclusive = in_order AND x.resource IS NOT NULL
    WHERE x.job = ANY (jobs);
END $$;
