-- Holds a job because a position before its own was not applied. The row of the job is locked. At
-- most as many jobs are held as the handler allows.
CREATE OR REPLACE FUNCTION hapax.hold(h hapax.handler, j hapax.job, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    waiting integer;
    newest uuid := j.job;
    last hapax.job;
BEGIN
    SELECT count(*) INTO waiting FROM (
        SELECT FROM hapax.job w
        WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = hapax.job_state('held')
        LIMIT h.hold_max) w;
    UPDATE hapax.job
    SET state = hapax.job_state('held'), due_at = at + h.hold * interval '1 microsecond',
        exclusive = false
    WHERE job = j.job;
    IF waiting < h.hold_max THEN
        RETURN;
    END IF;
    -- The numbers of a machine's states do not order them by age.
    IF h.policy = hapax.order_policy('sequence') THEN
        SELECT w.* INTO last FROM hapax.job w
        WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = hapax.job_state('held')
        ORDER BY w.position DESC, w.job DESC LIMIT 1
        FOR UPDATE SKIP LOCKED;
        newest := coalesce(last.job, newest);
    END IF;
    PERFORM hapax.to_review(newest, 'too many jobs of its resource wait for their predecessors', at);
END $$;
