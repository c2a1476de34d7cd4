-- Ends a lease that ran out. The row of the job is locked. The outcome of the attempt is unknown,
-- and the fence stays valid: until the job is claimed again, a worker that was only slow may still
-- report "done".
CREATE OR REPLACE FUNCTION hapax.lose(h hapax.handler, j hapax.job, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.note_attempt(j, 'lost', NULL, 'the lease ran out');
    IF j.lost >= 5 AND h.workplace = hapax.workplace('node') THEN
        UPDATE hapax.job
        SET state = hapax.job_state('dead'), due_at = at, lost = j.lost + 1, exclusive = false,
            error = 'every attempt was lost: the process died or the lease ran out each time'
        WHERE job = j.job;
    ELSE
        UPDATE hapax.job SET state = hapax.job_state('ready'), lost = j.lost + 1, exclusive = false,
            -- ±20 %, so that jobs that were lost together are not due together.
            due_at = least(j.due_at, at)
                + least(2 ^ least(j.lost, 16), 300) * (0.8 + 0.4 * random()) * interval '1 second',
            error = 'the lease ran out'
        WHERE job = j.job;
    END IF;
    IF j.resource IS NOT NULL THEN
        PERFORM hapax.ready_next(h, j.lane, j.resource, at);
    END IF;
END $$;
