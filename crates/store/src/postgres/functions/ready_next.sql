-- Readies the held jobs of a resource that the mark now admits, and the first parked job if no job
-- is leased. Called when a job of the resource is no longer leased, or was set aside. The order of
-- these jobs is decided again when they are claimed. Returns true if any job is ready now, or held
-- past its deadline, so that the next claim has something to do.
CREATE OR REPLACE FUNCTION hapax.ready_next(h hapax.handler, of_lane integer, of_resource text, at timestamptz)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    mark bigint;
    any_held boolean := false;
BEGIN
    IF h.policy IS NULL OR h.policy <> hapax.order_policy('latest') THEN
        SELECT m.position INTO mark FROM hapax.mark m
        WHERE m.lane = of_lane AND m.resource = of_resource;
        UPDATE hapax.job SET state = hapax.job_state('ready'), due_at = at
        WHERE job IN (
            SELECT w.job FROM hapax.job w
            WHERE w.lane = of_lane AND w.resource = of_resource AND w.state = hapax.job_state('held')
              AND (h.policy IS NULL OR h.policy <> hapax.order_policy('sequence') OR w.position - 1 <= mark)
              AND (h.policy IS NULL OR hapax.guard(h, mark, w.position) <> hapax.order_verdict('hold'))
            FOR UPDATE SKIP LOCKED);
        any_held := FOUND;
        IF NOT any_held THEN
            PERFORM FROM hapax.job w
            WHERE w.lane = of_lane AND w.resource = of_resource
              AND w.state = hapax.job_state('held') AND w.due_at <= at;
            any_held := FOUND;
        END IF;
    END IF;
    PERFORM FROM hapax.job b
    WHERE b.lane = of_lane AND b.resource = of_resource AND b.state = hapax.job_state('leased');
    IF FOUND THEN
        RETURN any_held;
    END IF;
    UPDATE hapax.job SET state = hapax.job_state('ready'), due_at = at
    WHERE job = (
        SELECT w.job FROM hapax.job w
        WHERE w.handler = h.handler AND w.lane = of_lane AND w.resource = of_resource
          AND w.state = hapax.job_state('parked')
        ORDER BY w.position, w.job LIMIT 1
        FOR UPDATE SKIP LOCKED);
    RETURN FOUND OR any_held;
END $$;
