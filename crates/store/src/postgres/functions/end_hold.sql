-- Ends the hold of a job whose gap stayed open past the deadline. The row of the job is locked. The
-- handler's rule decides. To skip the gap, the mark moves by one step; positions at or below it are
-- stale from then on.
CREATE OR REPLACE FUNCTION hapax.end_hold(h hapax.handler, j hapax.job, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lowest bigint;
BEGIN
    IF NOT h.go THEN
        PERFORM hapax.to_review(j.job, 'its predecessor did not arrive in time', at);
        RETURN;
    ELSIF h.policy <> hapax.order_policy('sequence') THEN
        -- The state that leads to most of the others runs first, as if an operator had forced it.
        UPDATE hapax.job SET state = hapax.job_state('ready'), due_at = at, forced = true
        WHERE job = (
            SELECT w.job FROM hapax.job w
            WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = hapax.job_state('held')
            ORDER BY (SELECT count(*) FROM hapax.job o JOIN hapax.transition t
                          ON t.handler = h.handler AND t.from_at = w.position
                             AND t.to_at = o.position AND t.says <> hapax.order_verdict('stale')
                      WHERE o.lane = j.lane AND o.resource = j.resource
                        AND o.state = hapax.job_state('held')) DESC,
                w.job
            LIMIT 1
            FOR UPDATE SKIP LOCKED);
        RETURN;
    END IF;
    IF NOT hapax.try_mark(j.lane, j.resource) THEN
        RETURN;
    END IF;
    SELECT w.position INTO lowest FROM hapax.job w
    WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = hapax.job_state('held')
    ORDER BY w.position LIMIT 1;
    UPDATE hapax.mark m SET position = greatest(m.position, lowest - 1)
    WHERE m.lane = j.lane AND m.resource = j.resource;
    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
END $$;
