-- Sends a held job, whose row is locked, to review.
CREATE OR REPLACE FUNCTION hapax.to_review(of_job uuid, why text, at timestamptz) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE hapax.job SET state = hapax.job_state('review'), due_at = at, error = why WHERE job = of_job;
$$;
