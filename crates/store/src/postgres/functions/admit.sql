-- Keeps: order, and one job at a time per resource. Decides about a due job whose row is locked.
-- Returns 0 if the job may be leased now, 1 if it is parked, 2 if it is stale or held. For 0 the
-- mark's row is locked until the lease is committed, so no other transaction leases the resource
-- meanwhile.
CREATE OR REPLACE FUNCTION hapax.admit(h hapax.handler, j hapax.job, at timestamptz) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    mark bigint;
    verdict smallint := hapax.order_verdict('run');
    busy boolean := true;
BEGIN
    IF hapax.try_mark(j.lane, j.resource) THEN
        SELECT m.position INTO mark FROM hapax.mark m
        WHERE m.lane = j.lane AND m.resource = j.resource;
        IF NOT j.forced THEN
            verdict := hapax.guard(h, mark, j.position);
        END IF;
        PERFORM FROM hapax.job b
        WHERE b.lane = j.lane AND b.resource = j.resource AND b.state = hapax.job_state('leased');
        busy := FOUND;
    END IF;
    IF verdict = hapax.order_verdict('stale') THEN
        UPDATE hapax.job SET state = hapax.job_state('stale'), due_at = at WHERE job = j.job;
    ELSIF verdict = hapax.order_verdict('hold') THEN
        PERFORM hapax.hold(h, j, at);
    ELSIF busy THEN
        UPDATE hapax.job SET state = hapax.job_state('parked'), due_at = at WHERE job = j.job;
        RETURN 1;
    ELSE
        PERFORM hapax.begin_sequence(h, j.lane, j.resource, j.position);
        RETURN 0;
    END IF;
    -- This job may have been readied as the next of its resource. The job after it is readied
    -- instead.
    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
    RETURN 2;
END $$;
